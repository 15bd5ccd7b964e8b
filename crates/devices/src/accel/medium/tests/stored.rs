//! States in files: a front, and the lender that has its engines, continue from each of them. Before version 2 there
//! were none.

use rackbus_seeds::stored::StoredStates;

use super::super::super::saved::VERSION;
use super::*;

fn stored(name: &'static str) -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/accel/medium/tests/stored");
    StoredStates::new(folder, name, VERSION)
}

fn create_key() -> Descriptor {
    let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
    Descriptor { stages, input: IOVA + INPUT, input_length: 32, ..Descriptor::default() }
}

/// A tenant with three digests and a key that are asked for, and a key that nobody waits for any more, while another
/// tenant has the engine.
fn working(pool: &std::sync::Arc<EnginePool>) -> (Tenant, u16) {
    let mut tenant = Tenant::apart(pool);
    let key = tenant.create(Operation::Aes256Ctr, &[5; 32]);
    tenant.push(&create_key());
    tenant.poll_front();
    for on in [0u32, 1] {
        tenant.write(reg::QUEUE + reg::ENABLE, &on.to_le_bytes());
    }
    (tenant.sent, tenant.seen) = (0, 0);
    tenant.memory.whole().part(0, LIST as usize).unwrap().fill(0);
    for _ in 0..3 {
        tenant.push(&Descriptor { input_length: 32, ..ask(&[Operation::Sha256], &[]) });
    }
    tenant.push(&create_key());
    tenant.poll_front();
    (tenant, key)
}

#[test]
fn a_front_and_its_lender_continue_from_what_each_version_wrote() {
    let digest = Tenant::beside(&pool()).run(&ask(&[Operation::Sha256], &[]), &[5; 32]).1;
    for version in 2..=VERSION {
        let pools = [pool(), pool()];
        pools[0].set_level(TenantId(9), None).unwrap();
        let busy = pools[0].hold(TenantId(9), 3, 0.0, rackbus_memory::ticks::now()).unwrap();
        let (mut tenant, key) = working(&pools[0]);
        // The memory and the descriptors are those of this function, which did the same as the one that was stored.
        let saved = tenant.front.save().unwrap();
        // It has heard of all that by the time that it is saved itself, and answered what needs no engine. A poll makes
        // one of the two keys, where nothing is owed.
        for _ in 0..2 {
            while pools[0].owes(TenantId(1)) {
                std::thread::yield_now();
            }
            tenant.poll_lender();
        }
        let lender = tenant.lender.as_mut().unwrap().save().unwrap();
        stored("front").compare(&saved.state.to_bytes().unwrap());
        stored("lender").compare(&lender.state.to_bytes().unwrap());
        let state =
            |name| FunctionState::from_bytes(stored(name).read(version).as_bytes()).unwrap();
        let end = InheritedEnd { files: saved.medium, session: None };
        let made = front_again(&tenant.description, end, tenant.lost.clone()).unwrap();
        tenant.front = Endpoint::new(made);
        tenant.front.restore(&state("front"), saved.descriptors).unwrap();
        tenant.lender_again(&pools[1], Saved { state: state("lender"), ..lender });
        pools[0].release(busy, 0);
        let mut made = None;
        for _ in 0..4 {
            let (status, written, value) = tenant.wait();
            assert_eq!(status, OperationStatus::Success);
            // A context has no output, a digest 32 bytes.
            if written == 0 {
                assert_eq!(made.replace(value as u16), None, "a context was made twice");
            }
        }
        assert_eq!(tenant.get(OUTPUT, 32), digest, "version {version}");
        let unwanted = key + 1;
        assert_eq!(made, Some(key + 2), "version {version}: no key is made again");
        for handle in [key, key + 2] {
            let encrypted = tenant.run(&ask(&[Operation::Aes256Ctr], &[handle]), &[1; 9]);
            assert_eq!((encrypted.0, encrypted.1.len()), (OperationStatus::Success, 9));
        }
        // What nobody waited for is destroyed, so its handle is the next one.
        assert_eq!(tenant.create(Operation::Aes256Ctr, &[6; 32]), unwanted);
    }
}
