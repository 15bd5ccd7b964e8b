//! What a tenant of an accelerator is charged and promised, seen by a driver.

use rackbus_devices::accel::{Accelerator, EnginePool, PoolOptions};
use rackbus_driver::InThreadFunction;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_qos::{ServiceLevel, TenantId};
use rackbus_spec::accel::Operation;

const TENANT: TenantId = TenantId(1);

#[test]
fn compiling_patterns_is_charged_to_who_has_them_compiled() {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TENANT, None, 1).unwrap();
    let mut accel =
        Accel::start(Box::new(InThreadFunction::new(Box::new(model))), AccelOptions::default())
            .unwrap();
    assert_eq!(pool.usage(TENANT).unwrap().engine_ns, 0);
    accel.create_context(Operation::RegexScan, b"(error|warning) [0-9]+\n\\w+@\\w+").unwrap();
    let charged = pool.usage(TENANT).unwrap().engine_ns;
    assert!(charged > 10_000, "{charged} ns for compiling patterns");
    // Also where they are none.
    accel.create_context(Operation::RegexScan, b"(").unwrap_err();
    assert!(pool.usage(TENANT).unwrap().engine_ns > charged);
}

/// A level of the rack file is each user's anew: what the one before put out beyond it is not the next one's.
#[test]
fn the_next_user_of_a_function_owes_nothing_of_what_the_one_before_did() {
    let level: ServiceLevel = "copy 0 Gbit/s out 1 B/s".parse().unwrap();
    let pool = EnginePool::new(PoolOptions::default());
    let copy = |accel: &mut Accel| {
        let stages = [(Operation::Copy, 0)];
        let work = MessageWork { stages: &stages, ..MessageWork::default() };
        let descriptor = accel.describe(&work, (0, 4096), (8192, 4096)).unwrap();
        accel.push(0, &descriptor).unwrap();
        accel.ring(0).unwrap();
    };
    let model = Accelerator::new(&pool, TENANT, Some(&level), 1).unwrap();
    let mut accel =
        Accel::start(Box::new(InThreadFunction::new(Box::new(model))), AccelOptions::default())
            .unwrap();
    // The burst holds so much: what is beyond it is owed, at a byte a second.
    for _ in 0..16 {
        copy(&mut accel);
    }
    accel.wait(0).unwrap();
    while pool.usage(TENANT).unwrap().throttled == 0 {
        assert!(accel.poll(0).unwrap().is_none(), "it owes an hour");
    }
    // Another user comes, and the level is the same.
    pool.begin(TENANT, Some(&level)).unwrap();
    copy(&mut accel);
    assert_eq!(accel.wait(0).unwrap().status, 0);
}
