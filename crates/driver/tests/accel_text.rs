//! Text of a tenant is gone from engines when the function is given back, also from the windows of compressors and
//! decompressors: this process' memory is looked at.

mod scan;

use std::sync::Arc;

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::InThreadFunction;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_memory::wiping::WipingAllocator;
use rackbus_qos::TenantId;
use rackbus_spec::accel::Operation;

#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator;

/// What each byte is xored with of what must not be in memory by this test itself.
const MASK: u8 = 0xa5;
/// What the tenant's text consists of, masked: letters, so that it may be a pattern. No other text begins so.
const MASKED_TEXT: [u8; 24] = {
    let mut text = [0; 24];
    let mut n = 0;
    while n < 24 {
        text[n] = (b'a' + n as u8 * 7 % 26) ^ MASK;
        n += 1;
    }
    text
};

/// Where this process has the text in memory.
fn found() -> Vec<String> {
    let mut found = Vec::new();
    scan::each_mapping(|line, data, places| {
        for at in places.filter(|at| data[*at] == MASKED_TEXT[0] ^ MASK) {
            let bytes = data.get(at..at + MASKED_TEXT.len());
            let is = |bytes: &[u8]| bytes.iter().zip(MASKED_TEXT).all(|(a, b)| a ^ MASK == b);
            if bytes.is_some_and(is) {
                found.push(format!("{at:#x} behind {line}"));
            }
        }
    });
    found
}

fn tenant(pool: &Arc<EnginePool>) -> Accel {
    let model = Accelerator::new(pool, TenantId(1), None, 1).unwrap();
    let options = AccelOptions { data: 4 << 20, ..AccelOptions::default() };
    Accel::start(Box::new(InThreadFunction::new(Box::new(model))), options).unwrap()
}

/// The text, each time with another number behind it, so that there are literals and matches.
fn text(length: usize) -> Vec<u8> {
    let numbered = |n: u32| {
        let text = MASKED_TEXT.iter().map(|byte| byte ^ MASK);
        text.chain(n.wrapping_mul(0x9e37_79b9).to_le_bytes())
    };
    // It does not move while it grows.
    let mut whole = Vec::with_capacity(length);
    whole.extend((0..).flat_map(numbered).take(length));
    whole
}

fn wipe(mut data: Vec<u8>) {
    data.fill(0);
    std::hint::black_box(&data);
}

fn run(accel: &mut Accel, stages: &[(Operation, u16)], input: &[u8]) -> Vec<u8> {
    let work = MessageWork { stages, ..MessageWork::default() };
    accel.run(&work, input, (2 * input.len() + 4096).min(1 << 20)).unwrap()
}

/// Patterns are text, too: copies of it are made to compile them, and of what is compiled for each scan.
fn run_scans(pool: &Arc<EnginePool>) {
    let patterns = |times: usize| MASKED_TEXT.map(|byte| byte ^ MASK).repeat(times);
    for length in [200, 60_000, 900_000] {
        let mut accel = tenant(pool);
        let (pattern, message) = (patterns(20), text(length));
        let context = accel.create_context(Operation::RegexScan, &pattern).unwrap();
        let refused = [&pattern[..], b"("].concat();
        accel.create_context(Operation::RegexScan, &refused).unwrap_err();
        run(&mut accel, &[(Operation::RegexScan, context)], &message);
        [pattern, refused, message].into_iter().for_each(wipe);
        drop(accel);
        assert_eq!(found(), <Vec<String>>::default(), "a scan of {length} bytes");
    }
}

/// Done by the function's own thread, by an engine's whole, and in parts; one of them is given up in the middle.
#[test]
fn text_is_gone_from_engines_when_the_function_is_given_back() {
    let pool = EnginePool::new(PoolOptions::default());
    run_scans(&pool);
    for (there, back) in [
        (Operation::Deflate, Operation::Inflate),
        (Operation::ZstdCompress, Operation::ZstdDecompress),
        (Operation::Lz4Compress, Operation::Lz4Decompress),
        (Operation::Sha256, Operation::Copy),
        (Operation::Sha3_512, Operation::Copy),
        (Operation::Blake3, Operation::Copy),
        (Operation::Crc32c, Operation::Copy),
    ] {
        for length in [200, 3000, 60_000, 900_000] {
            let mut accel = tenant(&pool);
            let message = text(length);
            let out = run(&mut accel, &[(there, 0)], &message);
            if back != Operation::Copy {
                // It does not fit: the engines end in the middle of it.
                let stages = [(back, 0)];
                let work = MessageWork { stages: &stages, ..MessageWork::default() };
                accel.run(&work, &out, length / 2).unwrap_err();
                let again =
                    run(&mut accel, &[(there, 0), (back, 0), (Operation::Copy, 0)], &message);
                assert!(again == message, "{back:?} of {length} bytes");
                wipe(again);
            }
            wipe(message);
            wipe(out);
            drop(accel);
            assert_eq!(found(), <Vec<String>>::default(), "{there:?} of {length} bytes");
        }
    }
}
