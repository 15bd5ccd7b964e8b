//! What a tenant's level and its debts let it do, the same beside the engines as apart from them.

use super::*;

fn both(pools: &[std::sync::Arc<EnginePool>; 2]) -> [Tenant; 2] {
    [Tenant::beside(&pools[0]), Tenant::apart(&pools[1])]
}

#[test]
fn a_message_that_is_longer_than_the_level_says_is_refused() {
    let pools = [pool(), pool()];
    for (tenant, pool) in both(&pools).iter_mut().zip(&pools) {
        let copy = ask(&[Operation::Copy], &[]);
        let mut status = |length: usize| tenant.run(&copy, &message(length)).0;
        let level = |text: &str| pool.set_level(TenantId(1), Some(&text.parse().unwrap())).unwrap();
        assert_eq!(status(100_000), OperationStatus::Success);
        level("copy 0 op/s message 64 largest 64");
        assert_eq!(
            [64, 65].map(&mut status),
            [OperationStatus::Success, OperationStatus::InvalidField]
        );
        level("copy 0 op/s largest 64 KiB");
        let statuses = [65_536, 65_537].map(&mut status);
        assert_eq!(statuses, [OperationStatus::Success, OperationStatus::InvalidField]);
        pool.set_level(TenantId(1), None).unwrap();
        assert_eq!(status(100_000), OperationStatus::Success);
        // A context is no message.
        level("aes256ctr 0 op/s message 16 largest 16");
        tenant.create(Operation::Aes256Ctr, &[5; 32]);
    }
}

#[test]
fn a_tenant_that_owes_for_a_context_waits_with_the_next_one() {
    let pools = [pool(), pool()];
    for (tenant, pool) in both(&pools).iter_mut().zip(&pools) {
        tenant.create(Operation::RegexScan, b"[01]*1[01]{30}");
        let begun = Instant::now();
        pool.charge(TenantId(1), 50_000_000);
        tenant.put(INPUT, &[5; 32]);
        let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
        let creates = ask(&[], &[]);
        tenant.push(&Descriptor { stages, input_length: 32, output_length: 0, ..creates });
        loop {
            tenant.poll_front();
            tenant.poll_lender();
            let completion = tenant.completion();
            // What it takes to make the context is owed in its turn.
            if completion.is_some() || !pool.owes(TenantId(1)) {
                tenant.seen -= u32::from(completion.is_some());
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "it is never paid");
        }
        assert!(begun.elapsed() >= Duration::from_millis(49), "{:?}", begun.elapsed());
        assert_eq!(tenant.wait().0, OperationStatus::Success);
    }
}
