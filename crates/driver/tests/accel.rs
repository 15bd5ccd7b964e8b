//! The accelerator end to end: a driver, a function, the engines.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::accel::{Accel, AccelError, AccelOptions, MessageWork};
use rackbus_driver::{DrivenFunction, InThreadFunction};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{LocalFunction, serve_function};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{Descriptor, Operation, OperationStatus};

fn function(pool: &Arc<EnginePool>, tenant: u32) -> Box<dyn DrivenFunction> {
    let model = Accelerator::new(pool, TenantId(tenant), None, 1).unwrap();
    Box::new(InThreadFunction::new(Box::new(model)))
}

fn accel(options: AccelOptions) -> Accel {
    let pool = EnginePool::new(PoolOptions::default());
    Accel::start(function(&pool, 1), options).unwrap()
}

fn work(stages: &[(Operation, u16)]) -> MessageWork<'_> {
    MessageWork { stages, ..MessageWork::default() }
}

fn status(outcome: Result<Vec<u8>, AccelError>) -> OperationStatus {
    match outcome {
        Err(AccelError::Operation { status, .. }) => status,
        other => panic!("{other:?}"),
    }
}

fn text(size: usize) -> Vec<u8> {
    (0..size).map(|n| b"abcdefgh and so on, "[n * n % 19]).collect()
}

#[test]
fn what_is_encrypted_and_compressed_comes_back() {
    let mut accel = accel(AccelOptions::default());
    let key = accel.create_context(Operation::Aes256GcmSeal, &[9; 32]).unwrap();
    for size in [0, 1, 15, 16, 17, 4096, 65_537, 1 << 20] {
        let message = text(size);
        let room = size + size / 8 + 1024;
        for (there, back) in [
            (Operation::Deflate, Operation::Inflate),
            (Operation::ZstdCompress, Operation::ZstdDecompress),
            (Operation::Lz4Compress, Operation::Lz4Decompress),
            (Operation::Aes256Ctr, Operation::Aes256Ctr),
            (Operation::Copy, Operation::Copy),
        ] {
            let room = room.min(1 << 20);
            let of = |operation: Operation| if operation == Operation::Aes256Ctr { key } else { 0 };
            let out = accel.run(&work(&[(there, of(there))]), &message, room);
            let out = out.unwrap_or_else(|error| panic!("{size} {there:?}: {error}"));
            let again = accel.run(&work(&[(back, of(back))]), &out, room);
            let again = again.unwrap_or_else(|error| panic!("{size} {back:?}: {error}"));
            assert!(again == message, "{size} {back:?}: {} bytes", again.len());
        }
    }
}

/// Engines are kept from one operation to the next, whichever chain they were in: nothing of an operation is seen in another.
#[test]
fn results_are_the_same_whatever_was_done_before() {
    use Operation::{Aes256Ctr, Crc32c, Deflate, Lz4Compress, Sha256, ZstdCompress};
    let messages = [text(0), text(100), text(5000), vec![7; 70_000]];
    let chains: [&[Operation]; 8] = [
        &[Lz4Compress, Sha256],
        &[Lz4Compress],
        &[Sha256],
        &[ZstdCompress, Lz4Compress, Sha256],
        &[Sha256, Lz4Compress],
        &[Deflate, Aes256Ctr, Sha256],
        &[Lz4Compress, Lz4Compress],
        &[Crc32c],
    ];
    let run = |accel: &mut Accel, key: u16, chain: &[Operation], message: &[u8]| {
        let of = |operation: &Operation| if *operation == Aes256Ctr { key } else { 0 };
        let stages: Vec<_> = chain.iter().map(|operation| (*operation, of(operation))).collect();
        accel.run(&work(&stages), message, 80_000).unwrap()
    };
    let mut used = accel(AccelOptions::default());
    let key = used.create_context(Aes256Ctr, &[9; 32]).unwrap();
    let mut alone = std::collections::BTreeMap::new();
    let mut state = 1u32;
    for _ in 0..300 {
        state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        let (chain, message) = ((state >> 16) as usize % 8, (state >> 24) as usize % 4);
        // What does not fit ends its engines in the middle.
        let small = used.run(&work(&[(Lz4Compress, 0)]), &messages[3], 8);
        assert_eq!(status(small), OperationStatus::OutputTooSmall);
        let out = run(&mut used, key, chains[chain], &messages[message]);
        let expected = alone.entry((chain, message)).or_insert_with(|| {
            let mut fresh = accel(AccelOptions::default());
            let key = fresh.create_context(Aes256Ctr, &[9; 32]).unwrap();
            run(&mut fresh, key, chains[chain], &messages[message])
        });
        assert!(out == *expected, "{:?} of message {message}", chains[chain]);
    }
}

/// The function learns of completions that were taken with the next descriptors: also of a full ring, all of these have
/// room for theirs.
#[test]
fn a_full_ring_goes_on_however_many_completions_are_taken_at_a_time() {
    for depth in [1, 2, 7, 63] {
        let mut accel = accel(AccelOptions { depth, ..AccelOptions::default() });
        let descriptor = accel.describe(&work(&[(Operation::Crc32c, 0)]), (0, 64), (4096, 4));
        let descriptor = descriptor.unwrap();
        let (mut put, mut took, mut state) = (0u32, 0u32, 1u32);
        for _ in 0..500 {
            state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            while accel.under_way(0) < depth.into() {
                accel.push(0, &Descriptor { id: put as u16, ..descriptor }).unwrap();
                put += 1;
            }
            assert!(matches!(accel.push(0, &descriptor), Err(AccelError::Full)));
            accel.ring(0).unwrap();
            for _ in 0..1 + (state >> 16) % u32::from(depth) {
                let completion = accel.wait_for(0, Duration::from_secs(5)).unwrap();
                let completion = completion.expect("a descriptor is not completed");
                assert_eq!((completion.id, completion.status), (took as u16, 0));
                took += 1;
            }
        }
    }
}

#[test]
fn a_chain_is_its_operations_one_after_the_other() {
    let mut accel = accel(AccelOptions::default());
    let key = accel.create_context(Operation::Aes256GcmSeal, &[9; 32]).unwrap();
    let message = text(200_000);
    let seal = [(Operation::ZstdCompress, 0), (Operation::Aes256GcmSeal, key)];
    let sealed = accel.run(&work(&seal), &message, 1 << 20).unwrap();
    assert!(sealed.len() < message.len());
    let compressed = accel.run(&work(&seal[..1]), &message, 1 << 20).unwrap();
    assert_eq!(accel.run(&work(&seal[1..]), &compressed, 1 << 20).unwrap(), sealed);
    let open = [(Operation::Aes256GcmOpen, key), (Operation::ZstdDecompress, 0)];
    assert_eq!(accel.run(&work(&open), &sealed, 1 << 20).unwrap(), message);
    let hash = [open[0], open[1], (Operation::Sha256, 0)];
    let hashed = accel.run(&work(&hash), &sealed, 64).unwrap();
    assert_eq!(hashed, accel.run(&work(&[(Operation::Sha256, 0)]), &message, 32).unwrap());
    let mut changed = sealed;
    changed[20] ^= 1;
    let refused = accel.run(&work(&open), &changed, 1 << 20);
    assert!(matches!(
        status(refused),
        OperationStatus::NotAuthentic | OperationStatus::CorruptInput
    ));
}

/// Stages, input, room for output, and how it ends.
type Case<'a> = (Vec<(Operation, u16)>, &'a [u8], usize, OperationStatus);

/// One tenant's mistakes: an error for that descriptor, and the next one is done.
#[test]
fn what_cannot_be_done_ends_with_a_status_and_nothing_else_happens() {
    let mut accel = accel(AccelOptions::default());
    let key = accel.create_context(Operation::Aes256Ctr, &[9; 32]).unwrap();
    let patterns = accel.create_context(Operation::RegexScan, b"(x+x+)+y\nab").unwrap();
    let bomb = accel.run(&work(&[(Operation::Deflate, 0)]), &vec![0; 1 << 20], 1 << 20).unwrap();
    let catastrophic = vec![b'x'; 1 << 18];
    let cases: Vec<Case<'_>> = vec![
        (vec![], b"", 0, OperationStatus::InvalidOperation),
        (vec![(Operation::Copy, 0)], b"abc", 2, OperationStatus::OutputTooSmall),
        (vec![(Operation::Aes256Ctr, 0)], b"abc", 3, OperationStatus::InvalidContext),
        (vec![(Operation::Aes256Ctr, key + 9)], b"abc", 3, OperationStatus::InvalidContext),
        (vec![(Operation::Aes256Ctr, patterns)], b"abc", 3, OperationStatus::InvalidContext),
        (vec![(Operation::RegexScan, key)], b"abc", 64, OperationStatus::InvalidContext),
        (
            vec![(Operation::Aes256Ctr, key), (Operation::Aes256Ctr, key)],
            b"abc",
            3,
            OperationStatus::InvalidField,
        ),
        (vec![(Operation::CreateContext, 0)], b"abc", 3, OperationStatus::InvalidOperation),
        (
            vec![(Operation::CreateContext, 0), (Operation::Aes256Ctr, 0)],
            b"abc",
            0,
            OperationStatus::InvalidField,
        ),
        (
            vec![(Operation::CreateContext, 0), (Operation::RegexScan, 0)],
            b"(",
            0,
            OperationStatus::InvalidField,
        ),
        (
            vec![(Operation::CreateContext, 0), (Operation::RegexScan, 0)],
            b"((a{100}){100}){100}",
            0,
            OperationStatus::NoRoom,
        ),
        (vec![(Operation::DestroyContext, 99)], b"", 0, OperationStatus::InvalidContext),
        (vec![(Operation::Inflate, 0)], b"not compressed", 100, OperationStatus::CorruptInput),
        (
            vec![(Operation::ZstdDecompress, 0)],
            b"not compressed",
            100,
            OperationStatus::CorruptInput,
        ),
        (
            vec![(Operation::Lz4Decompress, 0)],
            b"not compressed",
            100,
            OperationStatus::CorruptInput,
        ),
        (vec![(Operation::Inflate, 0)], &bomb, 4096, OperationStatus::OutputTooSmall),
        (
            vec![(Operation::Inflate, 0), (Operation::Inflate, 0)],
            &bomb,
            4096,
            OperationStatus::CorruptInput,
        ),
        (vec![(Operation::Aes256GcmOpen, key)], b"short", 64, OperationStatus::CorruptInput),
        (vec![(Operation::Aes256GcmOpen, key)], &[0; 64], 64, OperationStatus::NotAuthentic),
    ];
    for (stages, input, room, expected) in cases {
        let found = status(accel.run(&work(&stages), input, room));
        assert_eq!(found, expected, "{stages:?}");
    }
    let scanned = accel.run(&work(&[(Operation::RegexScan, patterns)]), &catastrophic, 64);
    assert!(scanned.unwrap().is_empty());
    let scanned = accel.run(&work(&[(Operation::RegexScan, patterns)]), b"cab xxy", 64).unwrap();
    let found: Vec<u64> =
        scanned.chunks(8).map(|n| u64::from_le_bytes(n.try_into().unwrap())).collect();
    assert_eq!(found, [1, 3, 0, 7]);
    assert_eq!(accel.run(&work(&[(Operation::Copy, 0)]), b"abc", 3).unwrap(), b"abc");
}

#[test]
fn memory_that_is_not_the_functions_is_a_transfer_error() {
    let mut accel = accel(AccelOptions::default());
    let copy = [(Operation::Copy, 0)];
    let good = accel.describe(&work(&copy), (0, 64), (64, 64)).unwrap();
    let list = Descriptor { input_segments: 1, ..good };
    let beyond = accel.address(accel.data_size() - 32);
    for (descriptor, expected) in [
        (Descriptor { input: 0, ..good }, OperationStatus::Transfer),
        (Descriptor { output: u64::MAX - 10, ..good }, OperationStatus::Transfer),
        (Descriptor { input: beyond, ..good }, OperationStatus::Transfer),
        (Descriptor { output: beyond, ..good }, OperationStatus::Transfer),
        (Descriptor { input_length: u32::MAX, ..good }, OperationStatus::InvalidField),
        (Descriptor { output_length: u32::MAX, ..good }, OperationStatus::InvalidField),
        (Descriptor { input_segments: u16::MAX, ..good }, OperationStatus::InvalidField),
        (Descriptor { associated: 1, ..good }, OperationStatus::InvalidField),
        (Descriptor { reserved: 1, ..good }, OperationStatus::InvalidField),
        (Descriptor { stages: [3, 0, 3, 0], ..good }, OperationStatus::InvalidOperation),
        (Descriptor { stages: [255, 0, 0, 0], ..good }, OperationStatus::InvalidOperation),
        (list, OperationStatus::InvalidField),
        (Descriptor { input: 16, ..list }, OperationStatus::Transfer),
        (good, OperationStatus::Success),
    ] {
        accel.push(0, &descriptor).unwrap();
        accel.ring(0).unwrap();
        let completion = accel.wait(0).unwrap();
        assert_eq!(
            OperationStatus::from_number(completion.status),
            Some(expected),
            "{descriptor:?}"
        );
    }
}

#[test]
fn many_are_under_way_and_each_is_completed_once() {
    let mut accel =
        accel(AccelOptions { queues: 4, depth: 100, data: 1 << 20, ..AccelOptions::default() });
    let hash = [(Operation::Crc32c, 0)];
    let (mut sent, mut done) = (0u32, vec![false; 10_000]);
    while done.contains(&false) {
        for queue in 0..4 {
            while accel.under_way(queue) < 100 && sent < 10_000 {
                let length = sent as usize % 3000;
                let at = (4096, 4 * (sent as usize % 1000));
                let mut descriptor =
                    accel.describe(&work(&hash), (at.0, length), (at.1, 4)).unwrap();
                descriptor.id = sent as u16;
                accel.push(queue, &descriptor).unwrap();
                sent += 1;
            }
            accel.ring(queue).unwrap();
            while let Some(completion) = accel.poll(queue).unwrap() {
                assert_eq!((completion.status, completion.output), (0, 4));
                assert!(!std::mem::replace(&mut done[usize::from(completion.id)], true));
            }
        }
    }
}

/// Messages of a tenant that always wait, where the machine lets its driver run: some tenths of a second of the engines' work.
const UNDER_WAY: u16 = 2048;
/// Messages that still waited when its driver came to give more, at least: the engines have had work of this tenant's all the time.
const LEFT: u64 = 64;

/// Keeps [`UNDER_WAY`] messages under way in all until it is told to stop, and counts in `dry` how often fewer than
/// [`LEFT`] of them were left meanwhile.
fn flood(
    pool: &Arc<EnginePool>,
    (tenant, queues): (u32, u16),
    message: &[u8],
    dry: &AtomicU64,
    stop: &AtomicBool,
) {
    let depth = UNDER_WAY / queues;
    let options = AccelOptions { queues, depth, data: 4 << 20, ..AccelOptions::default() };
    let mut accel = Accel::start(function(pool, tenant), options).unwrap();
    accel.data(0, message.len()).unwrap().copy_from(message);
    let deflate = [(Operation::Deflate, 0)];
    let to = (1 << 20, message.len() + message.len() / 4);
    let descriptor = accel.describe(&work(&deflate), (0, message.len()), to).unwrap();
    let mut sent = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let ended = pool.usage(TenantId(tenant)).map_or(0, |usage| usage.operations);
        if sent < ended + LEFT {
            dry.fetch_add(1, Ordering::Relaxed);
        }
        for queue in 0..usize::from(queues) {
            while accel.under_way(queue) < u32::from(depth) {
                accel.push(queue, &descriptor).unwrap();
                sent += 1;
            }
            accel.ring(queue).unwrap();
            while let Some(completion) = accel.poll(queue).unwrap() {
                assert_eq!(completion.status, 0);
            }
        }
        std::thread::yield_now();
    }
}

/// Two tenants that pay the same, with messages of the same size, of which those of one cost many times
/// as much and come by four queues.
#[test]
fn equal_tenants_get_equal_engine_time_whatever_their_messages_cost() {
    /// Engine time of a window, and how many there are in which both had work waiting all the time.
    const WINDOW_NS: u64 = 300_000_000;
    const WINDOWS: usize = 7;
    let pool = EnginePool::new(PoolOptions::default());
    let (stop, dry) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut state = 1u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    });
    let noise: Vec<u8> = noise.take(65_536).collect();
    let used = || {
        let of = |tenant| pool.usage(TenantId(tenant)).map_or(0, |usage| usage.engine_ns);
        [of(1), of(2)]
    };
    let (mut ratios, begun) = (Vec::new(), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&pool, (1, 4), &noise, &dry, &stop));
        scope.spawn(|| flood(&pool, (2, 1), &[0; 65_536], &dry, &stop));
        let (mut from, mut dry_before) = (used(), dry.load(Ordering::Relaxed));
        while ratios.len() < WINDOWS && begun.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(1));
            let to = used();
            let [first, second] = [0, 1].map(|tenant| to[tenant] - from[tenant]);
            let dry_now = dry.load(Ordering::Relaxed);
            // A machine that runs others keeps a tenant from having work on, and what it leaves is the other's.
            if dry_now != dry_before || from.contains(&0) {
                (from, dry_before) = (to, dry_now);
            } else if first + second >= WINDOW_NS {
                ratios.push(first as f64 / second as f64);
                from = to;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(ratios.len(), WINDOWS, "the tenants had no work waiting: {dry:?} times");
    ratios.sort_by(f64::total_cmp);
    let median = ratios[WINDOWS / 2];
    assert!(
        (0.95..=1.05).contains(&median),
        "engine time of the first by the second's: {ratios:?}"
    );
}

/// Processor time of this thread.
fn used() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A function on an engine of its own, which lets one operation through each second.
fn slow(folder: &Path) -> (LocalFunction, PathBuf) {
    let pool = EnginePool::new(PoolOptions::default());
    let level = "copy 0 op/s max 1 op/s".parse().unwrap();
    let model = Accelerator::new(&pool, TenantId(1), Some(&level), 1).unwrap();
    let socket = folder.join("accel.sock");
    (serve_function(Box::new(model), &socket, EngineOptions::default()).unwrap(), socket)
}

#[test]
fn a_driver_that_waits_long_sleeps() {
    let folder = tempfile::tempdir().unwrap();
    let (_function, socket) = slow(folder.path());
    for interrupts in [true, false] {
        let options = AccelOptions { interrupts, ..AccelOptions::default() };
        let mut accel = Accel::open(&socket, Duration::from_secs(10), options).unwrap();
        let copy = [(Operation::Copy, 0)];
        // The first ones are let through at once, or not, as the bucket is.
        let (mut waited, mut worked) = (Duration::ZERO, Duration::ZERO);
        while waited < Duration::from_millis(500) {
            let (begun, before) = (Instant::now(), used());
            assert_eq!(accel.run(&work(&copy), b"abc", 3).unwrap(), b"abc");
            waited += begun.elapsed();
            worked += used() - before;
        }
        assert!(worked < waited / 2, "{worked:?} of {waited:?}, interrupts: {interrupts}");
        let none = accel.wait_for(0, Duration::from_millis(1)).unwrap();
        assert!(none.is_none(), "{none:?}");
    }
}
