//! What a tenant names that is not its own, or is not what it seems to be: an error of its own, and nobody else notices.

use rackbus_spec::accel::queue_state;

use super::*;

impl Tenant {
    fn state(&mut self, queue: u64) -> u32 {
        let mut state = [0; 4];
        let at = reg::QUEUE + queue * reg::QUEUE_STRIDE + reg::STATE;
        self.endpoint.read(FunctionRegion::Bar(0), at, &mut state).unwrap();
        u32::from_le_bytes(state)
    }

    /// A queue pair of this tenant's with rings at these addresses, and a descriptor to be done.
    fn queue_at(&mut self, queue: u64, [submission, completion]: [u64; 2]) {
        let registers = reg::QUEUE + queue * reg::QUEUE_STRIDE;
        self.write(registers + reg::SUBMISSION, &submission.to_le_bytes());
        self.write(registers + reg::COMPLETION, &completion.to_le_bytes());
        self.write(registers + reg::RING_ENTRIES, &16u32.to_le_bytes());
        self.write(registers + reg::ENABLE, &1u32.to_le_bytes());
        self.write(reg::DOORBELL + queue * reg::DOORBELL_STRIDE, &1u32.to_le_bytes());
        self.poll();
    }

    fn whole_memory(&self) -> Vec<u8> {
        let mut all = vec![0; MEMORY as usize];
        self.memory.whole().copy_to(&mut all);
        all
    }
}

/// An address space is one tenant's: what another has mapped at the same addresses, or at others, cannot be named.
#[test]
fn rings_in_memory_that_a_tenant_does_not_own_end_their_queue_pair_alone() {
    /// Where the other tenant alone has memory.
    const THERE: u64 = IOVA + (64 << 20);
    let pool = EnginePool::new(PoolOptions::default());
    let [mut tenant, mut other] = [1, 2].map(|number| Tenant::new(&pool, number));
    let handle = Some(other.memory.handle(0));
    other.endpoint.map(THERE, MEMORY, Access::READ | Access::WRITE, handle).unwrap();
    // What the other one has there is a descriptor that could be done.
    let copy = Descriptor {
        stages: [Operation::Copy as u8, 0, 0, 0],
        input: IOVA + INPUT,
        output: IOVA + OUTPUT,
        input_length: 64,
        output_length: 64,
        ..Descriptor::default()
    };
    other.memory.whole().write_obj(0, &copy);
    tenant.memory.whole().write_obj(RINGS[0] as usize, &copy);
    // Memory of its own that a device may read and not write.
    let read_only = IOVA + (32 << 20);
    let own = Some(tenant.memory.handle(0));
    tenant.endpoint.map(read_only, MEMORY, Access::READ, own).unwrap();
    let before = other.whole_memory();
    let end = IOVA + MEMORY;
    let good = [IOVA + RINGS[0], IOVA + RINGS[1]];
    for (queue, rings) in (1..).zip([
        [THERE, good[1]],
        [good[0], THERE + 0x1000],
        [0, good[1]],
        [good[0], end],
        [u64::MAX - 63, good[1]],
        [good[0], u64::MAX - 63],
        [good[0], read_only + 0x1000],
    ]) {
        tenant.queue_at(queue, rings);
        let begun = Instant::now();
        while tenant.state(queue) != queue_state::ERROR {
            tenant.poll();
            assert!(begun.elapsed() < Duration::from_secs(20), "{rings:x?} were accepted");
        }
    }
    assert!(other.whole_memory() == before, "memory of another tenant was written to");
    for tenant in [&mut tenant, &mut other] {
        assert_eq!(tenant.state(0), queue_state::ON);
        assert_eq!(tenant.ask(copy), (OperationStatus::Success, 64));
    }
}

/// A tenant that is let through slowly and unmaps what it asked about would else fill the lender's memory.
#[test]
fn what_was_given_up_waits_for_no_engine() {
    const THERE: u64 = IOVA + (64 << 20);
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    pool.set_level(TenantId(1), Some(&"copy 0 op/s in 1 kB/s".parse().unwrap())).unwrap();
    for _ in 0..3 {
        let own = Some(tenant.memory.handle(0));
        tenant.endpoint.map(THERE, MEMORY, Access::READ, own).unwrap();
        for _ in 0..5 {
            let asked = Descriptor {
                stages: [Operation::Copy as u8, 0, 0, 0],
                input: THERE + INPUT,
                output: IOVA + OUTPUT,
                input_length: 64 << 10,
                output_length: 64 << 10,
                ..Descriptor::default()
            };
            let at = tenant.sent as usize % 16 * DESCRIPTOR_SIZE;
            tenant.memory.whole().write_obj(at, &asked);
            tenant.sent += 1;
            tenant.write(reg::DOORBELL, &(tenant.sent % 16).to_le_bytes());
            tenant.poll();
        }
        assert!(pool.waiting() > 0, "nothing waits, so nothing is tried");
        tenant.endpoint.unmap(THERE, MEMORY).unwrap();
        let begun = Instant::now();
        // An engine may have had the first one at that moment.
        while pool.waiting() > 0 {
            tenant.poll();
            assert!(begun.elapsed() < Duration::from_secs(5), "{} wait still", pool.waiting());
        }
    }
    for _ in 0..15 {
        let status = tenant.wait().status >> 1;
        assert!(
            [OperationStatus::Transfer, OperationStatus::Success]
                .map(|it| it as u16)
                .contains(&status),
            "{status}"
        );
    }
}

/// Handles are small numbers, and each tenant's are its own.
#[test]
fn a_handle_of_another_tenants_context_names_none_or_ones_own() {
    let pool = EnginePool::new(PoolOptions::default());
    let [mut tenant, mut other] = [1, 2].map(|number| Tenant::new(&pool, number));
    let create = |tenant: &mut Tenant, key: u8| {
        tenant.memory.whole().part(INPUT as usize, 32).unwrap().fill(key);
        tenant.ask(Descriptor {
            stages: [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0],
            input: IOVA + INPUT,
            input_length: 32,
            ..Descriptor::default()
        })
    };
    let encrypt = |tenant: &mut Tenant, handle: u16| {
        tenant.memory.whole().part(INPUT as usize, 64).unwrap().fill(0);
        let asked = Descriptor {
            stages: [Operation::Aes256Ctr as u8, 0, 0, 0],
            contexts: [handle, 0, 0, 0],
            input: IOVA + INPUT,
            output: IOVA + OUTPUT,
            input_length: 64,
            output_length: 64,
            ..Descriptor::default()
        };
        let (status, written) = tenant.ask(asked);
        (status, tenant.output(written as usize))
    };
    // The first handle is 1.
    assert_eq!(create(&mut other, 5).0, OperationStatus::Success);
    let (_, of_other) = encrypt(&mut other, 1);
    assert_eq!(encrypt(&mut tenant, 1), (OperationStatus::InvalidContext, Vec::new()));
    let destroy = Descriptor {
        stages: [Operation::DestroyContext as u8, 0, 0, 0],
        contexts: [1, 0, 0, 0],
        ..Descriptor::default()
    };
    assert_eq!(tenant.ask(destroy).0, OperationStatus::InvalidContext);
    assert_eq!(create(&mut tenant, 6).0, OperationStatus::Success);
    let (status, own) = encrypt(&mut tenant, 1);
    assert!(status == OperationStatus::Success && own != of_other, "it has the other one's key");
    assert_eq!(tenant.ask(destroy).0, OperationStatus::Success);
    assert_eq!(encrypt(&mut tenant, 1).0, OperationStatus::InvalidContext);
    assert_eq!(encrypt(&mut other, 1), (OperationStatus::Success, of_other));
}

/// A zstd frame of a gigabyte of zeroes.
fn zstd_bomb() -> Vec<u8> {
    let mut bomb = Vec::new();
    let mut encoder = zstd_safe::CCtx::create();
    let zeroes = vec![0; 1 << 20];
    let mut part = vec![0; 1 << 20];
    for nth in 0..1024 {
        let mut input = zstd_safe::InBuffer::around(&zeroes);
        let last = nth == 1023;
        loop {
            let mut output = zstd_safe::OutBuffer::around(&mut part[..]);
            let how = match last {
                true => zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_end,
                false => zstd_safe::zstd_sys::ZSTD_EndDirective::ZSTD_e_continue,
            };
            let left = encoder.compress_stream2(&mut output, &mut input, how).unwrap();
            bomb.extend_from_slice(output.as_slice());
            if input.pos() == zeroes.len() && (!last || left == 0) {
                break;
            }
        }
    }
    bomb
}

/// An LZ4 frame of 128 MiB of zeroes.
fn lz4_bomb() -> Vec<u8> {
    let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
    let zeroes = vec![0; 1 << 20];
    for _ in 0..128 {
        std::io::Write::write_all(&mut encoder, &zeroes).unwrap();
    }
    encoder.finish().unwrap()
}

/// What comes out is bounded by the room for it, and so are the memory and the time that it takes.
#[test]
fn a_frame_that_would_fill_the_memory_ends_where_its_room_does() {
    let pool = EnginePool::new(PoolOptions::default());
    let [mut tenant, mut other] = [1, 2].map(|number| Tenant::new(&pool, number));
    // A frame that says that it is 2^60 bytes, with one window of as many.
    let mut giant = 0xfd2f_b528u32.to_le_bytes().to_vec();
    giant.push(0xe0);
    giant.extend_from_slice(&(1u64 << 60).to_le_bytes());
    giant.extend_from_slice(&[0x03, 0, 0, 7]);
    let (zstd, lz4) = (Operation::ZstdDecompress, Operation::Lz4Decompress);
    for (operation, behind, bomb, expected) in [
        (zstd, None, zstd_bomb(), OperationStatus::OutputTooSmall),
        (lz4, None, lz4_bomb(), OperationStatus::OutputTooSmall),
        (zstd, None, giant, OperationStatus::CorruptInput),
        // It takes all of a frame before it puts anything out.
        (zstd, Some(lz4), zstd_bomb(), OperationStatus::CorruptInput),
    ] {
        assert!(bomb.len() <= 1 << 20, "{operation:?}: {} bytes", bomb.len());
        let room = 128 << 10;
        tenant.memory.whole().part(INPUT as usize, bomb.len()).unwrap().copy_from(&bomb);
        tenant.memory.whole().part(OUTPUT as usize, 1 << 20).unwrap().fill(9);
        let before = pool.usage(TenantId(1)).unwrap().engine_ns;
        let asked = Descriptor {
            stages: [operation as u8, behind.map_or(0, |it| it as u8), 0, 0],
            input: IOVA + INPUT,
            output: IOVA + OUTPUT,
            input_length: bomb.len() as u32,
            output_length: room,
            ..Descriptor::default()
        };
        let (status, written) = tenant.ask(asked);
        assert_eq!((status, written), (expected, 0), "{operation:?}");
        let took = pool.usage(TenantId(1)).unwrap().engine_ns - before;
        // All of it would take as long as hundreds of messages that are as large as can be.
        let largest = pool.cost_ns(Operation::Copy, 1 << 20).max(1_000_000.0);
        assert!((took as f64) < 100.0 * largest, "{operation:?}: {took} ns");
        let behind = &tenant.output(1 << 20)[room as usize..];
        assert!(behind.iter().all(|byte| *byte == 9), "{operation:?} wrote behind its room");
        other.send(Operation::Copy, 4096);
        assert_eq!(other.wait().status & !1, 0);
    }
    assert_eq!(pool.failed(), 0);
}
