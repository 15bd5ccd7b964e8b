//! Operations that the function's own thread does, and what keeps it from that.

use super::super::at_once::{Attempt, OwnEngine, ShortOperation};
use super::*;

#[test]
fn a_short_operation_is_done_by_who_takes_it_unless_the_engines_are_busy() {
    let pool = EnginePool::new(PoolOptions::default());
    pool.start().unwrap();
    let outbox = Arc::new(CompletionOutbox::new().unwrap());
    for tenant in [1, 2] {
        pool.set_level(TenantId(tenant), None).unwrap();
    }
    let memory: (Gather, Gather) = Default::default();
    let mut own = OwnEngine::default();
    let mut attempt = |tenant: u32, profile_ns: f64, engine: Box<dyn RunningOperation>| {
        let begun = rackbus_memory::ticks::now();
        let short = ShortOperation { number: 7, kind: 3, profile_ns, begun };
        let start = |_: &mut Spare| Ok(pipeline(Operation::Sha256, engine));
        let attempt = own.run((&pool, TenantId(tenant)), short, &memory, start);
        own.release(&pool);
        match attempt {
            Attempt::Ended(finished, _) => Some(finished.status),
            Attempt::Refused => None,
            Attempt::Left(..) => panic!("it is not done"),
        }
    };
    let copy = || {
        let request = engines::OperationRequest::default();
        engines::begin(Operation::Copy, &request, &mut Spare::default()).unwrap()
    };
    assert_eq!(attempt(1, 1000.0, copy()), Some(OperationStatus::Success));
    assert_eq!(attempt(1, 1000.0, Box::new(Panics)), Some(OperationStatus::EngineFailed));
    assert_eq!(attempt(1, 1_000_000.0, copy()), None, "a long one");
    // While the engine works for another, or another waits for it, there is none.
    let (engine, go_on) = held();
    pool.submit(TenantId(2), 0, vec![job(engine, 7, &outbox)]);
    assert_eq!(attempt(1, 1000.0, copy()), None, "two engines where there is one");
    go_on.send(()).unwrap();
    assert_eq!(wait(&outbox)[0].status, OperationStatus::Success);
    assert_eq!(attempt(1, 1000.0, copy()), Some(OperationStatus::Success));
    let usage = pool.usage(TenantId(1)).unwrap();
    assert_eq!((usage.operations, usage.turns, pool.failed()), (3, 3, 1));
}
