//! A host that does anything it can: the controller answers or ignores it, never fails, and
//! never reaches memory that was not mapped.

use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::*;

/// The part of the host's memory that the drive may reach; the rest is a canary.
const OPEN: std::ops::Range<u64> = 4 << 20..12 << 20;

#[derive(Debug, Clone)]
enum Deed {
    Register(u64, Vec<u8>),
    ReadRegister(u64, usize),
    Doorbell(u16, bool, u32),
    Command(u16, [u64; 8]),
    Scribble(u64, u64),
    Poll,
    Park,
    Unmap,
    Reset,
    Restart,
}

/// Addresses that are wrong in interesting ways, or right.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..RAM_SIZE).prop_map(|at| RAM + at),
        (0..RAM_SIZE / 4096).prop_map(|page| RAM + page * 4096),
        Just(RAM + OPEN.end - 512),
        Just(RAM + OPEN.start - 512),
        Just(u64::MAX - 4095),
    ]
}

fn command() -> impl Strategy<Value = [u64; 8]> {
    let opcode = prop_oneof![0u64..16, Just(0x7c), 0u64..256];
    let small = prop_oneof![0u64..64, any::<u64>()];
    let dwords = prop::array::uniform4(prop_oneof![0u64..2048, any::<u64>()]);
    (opcode, small, 0u64..4, address(), address(), dwords).prop_map(
        |(opcode, flags, nsid, prp1, prp2, dwords)| {
            let cdw0 = opcode | (flags & 0xc3) << 8 | (flags & 0xffff) << 16;
            let nsid = if nsid == 3 { 0xffff_ffff } else { nsid };
            [cdw0 | nsid << 32, 0, flags, prp1, prp2, dwords[0], dwords[1], dwords[2]]
        },
    )
}

fn deed() -> impl Strategy<Value = Deed> {
    let offset = prop_oneof![0u64..0x40, 0x1000u64..0x1400, 0u64..0x3ff8];
    prop_oneof![
        2 => (offset.clone(), prop::collection::vec(any::<u8>(), 1..=8))
            .prop_map(|(offset, data)| Deed::Register(offset, data)),
        1 => (offset, 1usize..=8).prop_map(|(offset, length)| Deed::ReadRegister(offset, length)),
        4 => (0u16..4, any::<bool>(), prop_oneof![0u32..20, any::<u32>()])
            .prop_map(|(qid, cq, value)| Deed::Doorbell(qid, cq, value)),
        8 => (0u16..3, command()).prop_map(|(qid, command)| Deed::Command(qid, command)),
        3 => (OPEN, any::<u64>()).prop_map(|(at, value)| Deed::Scribble(at & !7, value)),
        8 => Just(Deed::Poll),
        1 => Just(Deed::Park),
        1 => Just(Deed::Unmap),
        1 => Just(Deed::Reset),
        2 => Just(Deed::Restart),
    ]
}

fn do_it(host: &mut TestHost, deed: Deed) {
    let both = Access::READ | Access::WRITE;
    match deed {
        Deed::Register(offset, data) => {
            host.endpoint.write(FunctionRegion::Bar(0), offset, &data).unwrap();
        }
        Deed::ReadRegister(offset, length) => {
            host.endpoint.read(FunctionRegion::Bar(0), offset, &mut vec![0; length]).unwrap();
        }
        Deed::Doorbell(qid, false, value) => {
            host.write4(reg::sq_tail_doorbell(qid, DOORBELL_STRIDE), value);
        }
        Deed::Doorbell(qid, true, value) => {
            host.write4(reg::cq_head_doorbell(qid, DOORBELL_STRIDE), value);
        }
        Deed::Command(qid, words) => {
            if host.has_pair(qid) {
                host.submit(qid, Sqe::read_from_bytes(words.as_bytes()).unwrap());
                host.poll();
            }
        }
        Deed::Scribble(at, value) => host.poke(RAM + at, &value.to_le_bytes()),
        Deed::Poll => {
            host.poll();
        }
        Deed::Park => {
            host.endpoint.park();
        }
        Deed::Unmap => {
            let length = OPEN.end - OPEN.start;
            host.endpoint.unmap(RAM + OPEN.start, length).unwrap();
            host.poll();
            let memory = Some(host.ram.handle(OPEN.start));
            host.endpoint.map(RAM + OPEN.start, length, both, memory).unwrap();
        }
        Deed::Reset => {
            host.endpoint.reset();
            host.command_register(0b110);
        }
        Deed::Restart => {
            host.write4(reg::CC, 0);
            host.restart(RAM + OPEN.start);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn nothing_a_host_does_harms_the_drive_or_others(
        deeds in prop::collection::vec(deed(), 1..120),
    ) {
        let mut host = TestHost::plain(&NvmeConfig::memory(4 << 20, "HOSTILE"));
        host.endpoint.unmap(RAM, RAM_SIZE).unwrap();
        let both = Access::READ | Access::WRITE;
        let memory = Some(host.ram.handle(OPEN.start));
        host.endpoint.map(RAM + OPEN.start, OPEN.end - OPEN.start, both, memory).unwrap();
        for canary in [0..OPEN.start, OPEN.end..RAM_SIZE] {
            let length = (canary.end - canary.start) as usize;
            host.poke(RAM + canary.start, &vec![0xc5; length]);
        }
        host.restart(RAM + OPEN.start);
        for deed in deeds {
            do_it(&mut host, deed);
        }
        for canary in [0..OPEN.start, OPEN.end..RAM_SIZE] {
            let length = (canary.end - canary.start) as usize;
            let bytes = host.peek(RAM + canary.start, length);
            prop_assert!(bytes.iter().all(|byte| *byte == 0xc5), "memory outside was written");
        }
        // Whatever happened, the next one finds a drive that works.
        host.endpoint.scrub();
        host.endpoint.map(RAM, RAM_SIZE, both, Some(host.ram.handle(0))).unwrap();
        host.command_register(0b110);
        host.restart(RAM);
        host.create_pair(1, ENTRIES);
        prop_assert_eq!(host.write_blocks(1, &[3; 512]), Status::SUCCESS);
        prop_assert_eq!(host.read_blocks(1, 512), vec![3; 512]);
    }
}

/// A drive whose first block is ones, with or without shadow doorbells.
fn written_drive(shadow: bool) -> TestHost {
    let mut host = TestHost::with_memory(1 << 20);
    assert_eq!(host.write_blocks(0, &[1; 512]), Status::SUCCESS);
    if shadow {
        host.configure_shadow();
    }
    host
}

/// Accesses to memory that were refused so far.
fn refused(host: &TestHost) -> u64 {
    host.endpoint.dma().refusals().get().0
}

/// A hypervisor maps its guest's memory anew, as QEMU does when a machine is reset.
#[test]
fn memory_of_queues_that_nobody_wants_meanwhile_is_not_refused() {
    for shadow in [false, true] {
        let mut host = written_drive(shadow);
        let before = refused(&host);
        host.unmap_ram();
        host.poll();
        assert_eq!(refused(&host), before, "refused accesses that nobody asked for");
        host.map_ram();
        host.poll();
        let buffer = host.scratch();
        let read = host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
        host.ring(1);
        assert_eq!(host.wait(1, read).status(), Status::SUCCESS);
        assert_eq!(refused(&host), before);
        // Whose driver asks for what is not there is told.
        let buffer = host.scratch();
        host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
        host.unmap_ram();
        let tail = host.pairs[&1].tail;
        host.write4(reg::sq_tail_doorbell(1, DOORBELL_STRIDE), tail.into());
        host.poll();
        assert!(refused(&host) > before, "nothing was refused, shadow doorbells: {shadow}");
    }
}

/// A driver in user space that ends without a word: its kernel turns bus mastering off, and no more.
#[test]
fn a_drive_that_may_not_master_the_bus_any_more_asks_for_no_memory() {
    for shadow in [false, true] {
        let mut host = written_drive(shadow);
        let before = refused(&host);
        host.command_register(0b010);
        host.poll();
        host.unmap_ram();
        host.poll();
        assert_eq!(refused(&host), before, "refused accesses that nobody asked for");
        host.map_ram();
        host.command_register(0b110);
        host.poll();
        let buffer = host.scratch();
        let read = host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
        host.ring(1);
        assert_eq!(host.wait(1, read).status(), Status::SUCCESS);
        assert_eq!(host.peek(buffer, 512), [1; 512], "shadow doorbells: {shadow}");
    }
}
