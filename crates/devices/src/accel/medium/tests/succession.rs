//! Either end goes on in another process, is lost, or is taken back, with operations under way.

use super::super::local::OrderMemory;
use super::*;

#[test]
fn either_end_goes_on_elsewhere_with_what_is_under_way() {
    let pools = [pool(), pool()];
    for (at, ends) in [[true, false], [false, true], [true, true]].into_iter().enumerate() {
        let mut tenant = Tenant::apart(&pools[0]);
        let key = tenant.create(Operation::Aes256GcmSeal, &[5; 32]);
        tenant.put(INPUT, &message(300_000));
        let sealed =
            Descriptor { input_length: 300_000, ..ask(&[Operation::Aes256GcmSeal], &[key]) };
        tenant.push(&sealed);
        let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
        tenant.push(&Descriptor {
            id: 1,
            stages,
            input: IOVA + INPUT,
            input_length: 32,
            ..Descriptor::default()
        });
        for nth in 2..40 {
            tenant.push(&Descriptor {
                id: nth,
                input_length: 32,
                ..ask(&[Operation::Sha256], &[])
            });
        }
        // Asked, and perhaps taken.
        tenant.poll_front();
        if at % 2 == 0 {
            tenant.poll_lender();
        }
        tenant.hand_over(&pools[1], ends);
        let mut made = None;
        for _ in 0..40 {
            let (status, written, value) = tenant.wait();
            assert_eq!(status, OperationStatus::Success);
            // A context has no output, a digest 32 bytes.
            if written == 0 {
                assert_eq!(made.replace(value as u16), None, "a context was made twice");
            }
        }
        let handle = made.unwrap();
        assert_eq!(tenant.run(&ask(&[Operation::Aes256Ctr], &[handle]), &[1; 9]).1.len(), 9);
        assert_eq!(handle, key + 1, "a context that nobody knows is left behind");
        assert_eq!(tenant.run(&sealed, &message(300_000)).0, OperationStatus::Success);
    }
}

/// Nobody polls the lender after that, nor the front until it is told.
#[test]
fn a_lender_that_goes_on_tells_a_front_that_rests_and_keeps_no_engine() {
    let pools = [pool(), pool()];
    for pool in &pools {
        pool.set_level(TenantId(9), None).unwrap();
    }
    let mut tenant = Tenant::apart(&pools[0]);
    let hold = |pool: &EnginePool| pool.hold(TenantId(9), 3, 0.0, rackbus_memory::ticks::now());
    let busy = hold(&pools[0]).unwrap();
    for _ in 0..3 {
        tenant.push(&Descriptor { input_length: 32, ..ask(&[Operation::Copy], &[]) });
    }
    tenant.poll_front();
    tenant.poll_lender();
    let saved = tenant.lender.as_mut().unwrap().save().unwrap();
    while !tenant.front.park() {
        tenant.poll_front();
    }
    assert!(tenant.completion().is_none());
    tenant.lender_again(&pools[1], saved);
    let fd = tenant.front.wake_fd().unwrap();
    let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let within = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&within)), Ok(1), "it does not hear");
    pools[0].release(busy, 0);
    let free = hold(&pools[1]).expect("an engine that nobody uses is held");
    pools[1].release(free, 0);
    for _ in 0..3 {
        assert_eq!(tenant.wait().0, OperationStatus::Success);
    }
}

/// A handle may name another key by then, and what is done again is not done with that.
#[test]
fn what_uses_a_context_that_was_destroyed_does_not_get_another_one() {
    let pools = [pool(), pool()];
    pools[0].set_level(TenantId(9), None).unwrap();
    let mut tenant = Tenant::apart(&pools[0]);
    let key = tenant.create(Operation::Aes256Ctr, &[9; 32]);
    let busy = pools[0].hold(TenantId(9), 3, 0.0, rackbus_memory::ticks::now()).unwrap();
    tenant.put(INPUT, &message(64));
    tenant.push(&Descriptor { id: 7, input_length: 64, ..ask(&[Operation::Aes256Ctr], &[key]) });
    let stages = [Operation::DestroyContext as u8, 0, 0, 0];
    tenant.push(&Descriptor { stages, contexts: [key, 0, 0, 0], ..Descriptor::default() });
    assert_eq!(tenant.wait().0, OperationStatus::Success);
    assert_eq!(tenant.create(Operation::Aes256Ctr, &[5; 32]), key);
    tenant.hand_over(&pools[1], [false, true]);
    pools[0].release(busy, 0);
    assert_eq!(tenant.wait().0, OperationStatus::InvalidContext);
    // Its front goes on.
    assert_eq!(tenant.run(&ask(&[Operation::Aes256Ctr], &[key]), &[1; 9]).1.len(), 9);
}

/// Nor does one that is given up with an operation that it did itself.
#[test]
fn a_tenant_that_goes_holds_no_engine() {
    let pool = pool();
    pool.set_level(TenantId(9), None).unwrap();
    let mut local = Local::new(&pool, TenantId(1), None, Default::default()).unwrap();
    let descriptor =
        Descriptor { stages: [Operation::Copy as u8, 0, 0, 0], ..Descriptor::default() };
    let plan = super::super::super::request::check(&descriptor).unwrap();
    let order = OperationOrder { number: 1, queue: 0, descriptor: &descriptor, plan: &plan };
    let begun = local.start(
        &order,
        OrderMemory::Held(Default::default()),
        (0, rackbus_memory::ticks::now()),
    );
    assert!(matches!(begun, Ok(SubmitOutcome::Ended(..))), "it is not done at once");
    local.clear();
    assert!(pool.hold(TenantId(9), 3, 0.0, rackbus_memory::ticks::now()).is_some());
}

#[test]
fn what_was_saved_and_taken_back_goes_on_here() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &message(900_000));
    tenant.push(&Descriptor { input_length: 900_000, ..ask(&[Operation::ZstdCompress], &[]) });
    tenant.poll_front();
    tenant.poll_lender();
    let saved = [tenant.front.save().unwrap(), tenant.lender.as_mut().unwrap().save().unwrap()];
    let [front, lender] = saved;
    tenant.front.take_back(front).unwrap();
    tenant.lender.as_mut().unwrap().take_back(lender).unwrap();
    assert_eq!(tenant.wait().0, OperationStatus::Success);
}

/// Its next driver has nothing of the one before.
#[test]
fn a_function_that_was_saved_and_taken_back_begins_anew_at_its_lender_too() {
    let mut tenant = Tenant::apart(&pool());
    let key = tenant.create(Operation::Aes256Ctr, &[5; 32]);
    let saved = tenant.front.save().unwrap();
    tenant.front.take_back(saved).unwrap();
    tenant.write(reg::CONTROL, &0u32.to_le_bytes());
    tenant.begin();
    let status = tenant.run(&ask(&[Operation::Aes256Ctr], &[key]), &[1; 9]).0;
    assert_eq!(status, OperationStatus::InvalidContext);
}

#[test]
fn when_the_lender_is_lost_everything_ends_and_nothing_begins() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &message(64));
    for _ in 0..3 {
        tenant.push(&Descriptor { input_length: 64, ..ask(&[Operation::Sha256], &[]) });
    }
    tenant.poll_front();
    tenant.lender = None;
    for _ in 0..3 {
        assert_eq!(tenant.wait().0, OperationStatus::Unreachable);
    }
    assert!(tenant.lost.get());
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, OperationStatus::Unreachable);
}

/// Its driver begins anew, and the lender dies before it has answered that.
#[test]
fn when_the_lender_is_lost_while_the_function_begins_anew_nothing_hangs() {
    let mut tenant = Tenant::apart(&pool());
    tenant.create(Operation::Aes256Ctr, &[5; 32]);
    tenant.write(reg::CONTROL, &0u32.to_le_bytes());
    tenant.begin();
    tenant.lender = None;
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, OperationStatus::Unreachable);
}

/// Its queue pair is taken away before the lender answers with a handle.
#[test]
fn a_context_that_nobody_waits_for_any_more_is_destroyed() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &[5; 32]);
    let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
    let input = IOVA + INPUT;
    tenant.push(&Descriptor { stages, input, input_length: 32, ..Descriptor::default() });
    tenant.poll_front();
    for on in [0u32, 1] {
        tenant.write(reg::QUEUE + reg::ENABLE, &on.to_le_bytes());
    }
    (tenant.sent, tenant.seen) = (0, 0);
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, OperationStatus::Success);
    assert_eq!(tenant.create(Operation::Aes256Ctr, &[6; 32]), 1, "the other one stayed");
}

/// A queue pair fails with operations under way, and the front goes on elsewhere before its driver knows.
#[test]
fn a_front_with_a_failed_queue_goes_on_elsewhere_with_its_slots() {
    let pool = pool();
    let mut tenant = Tenant::apart(&pool);
    tenant.put(INPUT, &message(4096));
    for _ in 0..20 {
        tenant.push(&Descriptor { input_length: 4096, ..ask(&[Operation::Sha256], &[]) });
    }
    tenant.poll_front();
    tenant.write(reg::DOORBELL, &ENTRIES.to_le_bytes());
    tenant.hand_over(&pool, [true, false]);
    tenant.write(reg::CONTROL, &0u32.to_le_bytes());
    tenant.begin();
    for _ in 0..100 {
        assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), b"on").1, b"on");
    }
    assert!(!tenant.lost.get());
}

/// The lender's function is returned while operations are under way.
#[test]
fn a_lender_that_takes_its_function_back_ends_its_front() {
    let pool = pool();
    let mut tenant = Tenant::apart(&pool);
    tenant.put(INPUT, &message(900_000));
    for _ in 0..10 {
        tenant.push(&Descriptor { input_length: 900_000, ..ask(&[Operation::Deflate], &[]) });
    }
    tenant.poll_front();
    tenant.poll_lender();
    tenant.lender.as_mut().unwrap().scrub();
    let begun = Instant::now();
    while pool.waiting() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "operations of nobody wait for engines");
        std::thread::yield_now();
    }
    for _ in 0..10 {
        let status = tenant.wait().0;
        assert!(
            matches!(status, OperationStatus::Unreachable | OperationStatus::Success),
            "{status:?}"
        );
    }
    // It is there for the next one.
    tenant.lender.as_mut().unwrap().serve_medium(None).unwrap();
}
