//! What an operation that failed had between its engines is gone when the function is given back, as keys are: this
//! process' memory is looked at.

mod scan;

use std::sync::Arc;

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::InThreadFunction;
use rackbus_driver::accel::{Accel, AccelError, AccelOptions, MessageWork};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{Operation, OperationStatus};

/// What each byte is xored with of what must not be in memory by this test itself.
const MASK: u8 = 0xa5;
/// What is secret of a message, masked. No other text begins so.
const MASKED_SECRET: [u8; 24] = {
    let mut secret = [0; 24];
    let mut n = 0;
    while n < 24 {
        secret[n] = (n as u8).wrapping_mul(91) ^ 0x3e;
        n += 1;
    }
    secret
};

/// Where this process has the secret in memory.
fn found() -> Vec<String> {
    let mut found = Vec::new();
    scan::each_mapping(|line, data, places| {
        for at in places.filter(|at| data[*at] == MASKED_SECRET[0] ^ MASK) {
            let bytes = data.get(at..at + MASKED_SECRET.len());
            let is = |bytes: &[u8]| bytes.iter().zip(MASKED_SECRET).all(|(a, b)| a ^ MASK == b);
            if bytes.is_some_and(is) {
                found.push(format!("{at:#x} behind {line}"));
            }
        }
    });
    found
}

fn tenant(pool: &Arc<EnginePool>) -> Accel {
    let model = Accelerator::new(pool, TenantId(1), None, 1).unwrap();
    Accel::start(Box::new(InThreadFunction::new(Box::new(model))), AccelOptions::default()).unwrap()
}

/// A chain deciphers the secret and then finds that it is no compressed message; and such a chain is given up in the middle.
/// Done by the function's own thread, and by an engine's.
#[test]
fn what_a_failed_operation_had_between_its_engines_is_gone_with_its_tenant() {
    let pool = EnginePool::new(PoolOptions::default());
    for length in [96, 2400, 24_000, 480_000] {
        let mut accel = tenant(&pool);
        let key = accel.create_context(Operation::Aes256Ctr, &[9; 32]).unwrap();
        let mut secret: Vec<u8> =
            MASKED_SECRET.iter().cycle().take(length).map(|byte| byte ^ MASK).collect();
        let cipher = [(Operation::Aes256Ctr, key)];
        let work = MessageWork { stages: &cipher, ..MessageWork::default() };
        let sent = accel.run(&work, &secret, length).unwrap();
        secret.fill(0);
        std::hint::black_box(&secret);
        drop(secret);
        for next in [Operation::Inflate, Operation::ZstdDecompress, Operation::Lz4Decompress] {
            let stages = [(Operation::Aes256Ctr, key), (Operation::Copy, 0), (next, 0)];
            let work = MessageWork { stages: &stages, ..MessageWork::default() };
            let failed = accel.run(&work, &sent, length).unwrap_err();
            let AccelError::Operation { status: OperationStatus::CorruptInput, .. } = failed else {
                panic!("{failed}")
            };
        }
        drop(accel);
        assert_eq!(found(), <Vec<String>>::default(), "{length} bytes");
    }
}
