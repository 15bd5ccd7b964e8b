//! A function continues in another process: here, with other engines.

use rackbus_pci::{FunctionState, RestoreError, Saved};
use rackbus_spec::accel::Condition;
use serde_json::Value;

use super::*;

mod stored;

/// What a descriptor's output is beside the input, and the other way round.
const MESSAGE: u32 = 1 << 20;

impl Tenant {
    fn push(&mut self, descriptor: &Descriptor) {
        self.memory.whole().write_obj(self.sent as usize * DESCRIPTOR_SIZE, descriptor);
        self.sent += 1;
        self.write(reg::DOORBELL, &self.sent.to_le_bytes());
        self.poll();
    }

    fn put(&self, at: u64, data: &[u8]) {
        self.memory.whole().part(at as usize, data.len()).unwrap().copy_from(data);
    }

    fn place(&self, at: u64) -> Vec<u8> {
        let mut data = vec![0; MESSAGE as usize];
        self.memory.whole().part(at as usize, data.len()).unwrap().copy_to(&mut data);
        data
    }

    fn create_key(&mut self, key: [u8; 32]) -> u16 {
        self.put(INPUT, &key);
        let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
        self.push(&Descriptor {
            stages,
            input: IOVA + INPUT,
            input_length: 32,
            ..Descriptor::default()
        });
        self.wait().value as u16
    }
}

/// A descriptor that encrypts the message, into `output`.
fn encrypt(id: u16, key: u16, output: u64, stages: [Operation; 2]) -> Descriptor {
    Descriptor {
        id,
        stages: [stages[0] as u8, stages[1] as u8, 0, 0],
        contexts: stages
            .map(|of| if of == Operation::Copy { 0 } else { key })
            .into_iter()
            .chain([0, 0])
            .collect::<Vec<_>>()
            .try_into()
            .unwrap(),
        nonce: [0xff; 16],
        input: IOVA + INPUT,
        output: IOVA + output,
        input_length: MESSAGE,
        output_length: MESSAGE,
        ..Descriptor::default()
    }
}

/// The function on other engines, from what would be written down.
pub fn elsewhere(
    state: &[u8],
    saved: (Vec<std::os::fd::OwnedFd>, Vec<std::os::fd::OwnedFd>),
) -> Result<Endpoint, RestoreError> {
    let (descriptors, medium) = saved;
    let pool = EnginePool::new(PoolOptions::default());
    let mut model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    model.bring(medium);
    let mut endpoint = Endpoint::new(Box::new(model));
    endpoint.restore(&FunctionState::from_bytes(state)?, descriptors)?;
    Ok(endpoint)
}

/// A tenant that is let through slowly, so that what it asked for is under way for seconds.
fn slow(pool: &Arc<EnginePool>) -> Tenant {
    let tenant = Tenant::new(pool, 1);
    pool.set_level(TenantId(1), Some(&"aes256ctr 0 op/s in 200 kB/s".parse().unwrap())).unwrap();
    tenant
}

fn message() -> Vec<u8> {
    (0..MESSAGE).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect()
}

/// What comes of the message, from a function that nothing happens to.
fn encrypted(key: [u8; 32]) -> Vec<u8> {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    let key = tenant.create_key(key);
    tenant.put(INPUT, &message());
    tenant.push(&encrypt(1, key, OUTPUT, [Operation::Aes256Ctr, Operation::Copy]));
    assert_eq!(tenant.wait().status, 1);
    tenant.place(OUTPUT)
}

/// Waits until a part of what is under way has been written over the input.
fn under_way(tenant: &mut Tenant) {
    let begun = Instant::now();
    while tenant.place(INPUT) == message() {
        tenant.poll();
        assert!(begun.elapsed() < Duration::from_secs(60), "no engine takes it");
    }
}

#[test]
fn what_is_under_way_goes_on_elsewhere_also_in_the_place_of_its_input() {
    let expected = encrypted([9; 32]);
    for stages in [[Operation::Aes256Ctr, Operation::Copy], [Operation::Copy, Operation::Aes256Ctr]]
    {
        let pool = EnginePool::new(PoolOptions::default());
        let mut tenant = slow(&pool);
        let key = tenant.create_key([9; 32]);
        tenant.put(INPUT, &message());
        tenant.push(&encrypt(7, key, INPUT, stages));
        under_way(&mut tenant);
        let Saved { state, descriptors, medium } = tenant.endpoint.save().unwrap();
        let left = tenant.place(INPUT);
        assert!(left != expected, "all of it was done before it was saved");
        let bytes = state.to_bytes().unwrap();
        assert!(!String::from_utf8_lossy(&bytes).contains("9,9,9,9"), "a key is written down");
        tenant.poll();
        assert!(tenant.place(INPUT) == left, "the life that was saved goes on");
        tenant.endpoint = elsewhere(&bytes, (descriptors, medium)).unwrap();
        let completion = tenant.wait();
        assert_eq!((completion.id, completion.status, completion.output), (7, 1, MESSAGE));
        assert!(tenant.place(INPUT) == expected, "{stages:?}: it was not done as if once");
        // The key is there, and no completion comes twice.
        tenant.put(INPUT, &message());
        tenant.push(&encrypt(8, key, OUTPUT, stages));
        assert_eq!((tenant.wait().id, tenant.place(OUTPUT) == expected), (8, true));
    }
}

#[test]
fn a_saved_function_that_is_taken_back_goes_on_here() {
    let expected = encrypted([9; 32]);
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = slow(&pool);
    let key = tenant.create_key([9; 32]);
    tenant.put(INPUT, &message());
    tenant.push(&encrypt(7, key, INPUT, [Operation::Aes256Ctr, Operation::Copy]));
    under_way(&mut tenant);
    let saved = tenant.endpoint.save().unwrap();
    tenant.endpoint.take_back(saved).unwrap();
    pool.set_level(TenantId(1), None).unwrap();
    assert_eq!(tenant.wait().status, 1);
    assert!(tenant.place(INPUT) == expected, "it was not done as if once");
}

/// A handle may name another key by then: what was read before it was given anew does not use it.
#[test]
fn what_uses_a_context_that_was_destroyed_does_not_get_another_one() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = slow(&pool);
    let key = tenant.create_key([9; 32]);
    tenant.put(INPUT, &message());
    tenant.push(&encrypt(7, key, OUTPUT, [Operation::Aes256Ctr, Operation::Copy]));
    let destroy = [Operation::DestroyContext as u8, 0, 0, 0];
    tenant.push(&Descriptor { stages: destroy, contexts: [key, 0, 0, 0], ..Descriptor::default() });
    assert_eq!(tenant.wait().status, 1);
    assert_eq!(tenant.create_key([5; 32]), key);
    let Saved { state, descriptors, medium } = tenant.endpoint.save().unwrap();
    tenant.endpoint = elsewhere(&state.to_bytes().unwrap(), (descriptors, medium)).unwrap();
    let completion = tenant.wait();
    let expected = (OperationStatus::InvalidContext as u16) << 1 | 1;
    assert_eq!((completion.id, completion.status), (7, expected));
}

#[test]
fn states_that_cannot_be_are_refused() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = slow(&pool);
    let key = tenant.create_key([9; 32]);
    tenant.put(INPUT, &message());
    tenant.push(&encrypt(7, key, OUTPUT, [Operation::Aes256Ctr, Operation::Copy]));
    let Saved { state, descriptors, medium } = tenant.endpoint.save().unwrap();
    let good: Value = serde_json::from_slice(&state.to_bytes().unwrap()).unwrap();
    let copies = || {
        let clone = |fd: &std::os::fd::OwnedFd| fd.try_clone().unwrap();
        (descriptors.iter().map(clone).collect(), medium.iter().map(clone).collect())
    };
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 12] = [
        ("a queue pair less", |it| drop(it["queues"].as_array_mut().unwrap().pop())),
        ("rings of no size", |it| it["queues"][0]["entries"] = 3.into()),
        ("an index beyond", |it| it["queues"][0]["head"] = 16.into()),
        ("a state that is none", |it| it["queues"][0]["state"] = 9.into()),
        ("a stopped function", |it| it["running"] = false.into()),
        ("another queue", |it| it["under_way"][0]["queue"] = 1.into()),
        ("no queue", |it| it["under_way"][0]["queue"] = 8.into()),
        ("more than all is done", |it| it["under_way"][0]["work"]["done"] = (MESSAGE + 1).into()),
        ("an operation that is none", |it| it["under_way"][0]["descriptor"][1] = 99.into()),
        ("a context's creation", |it| it["under_way"][0]["descriptor"][1] = 0x401.into()),
        ("a hash that is half done", |it| {
            it["under_way"][0]["descriptor"][1] = (Operation::Sha256 as u32).into();
            it["under_way"][0]["work"]["done"] = 5.into();
        }),
        ("a key of another length", |it| it["medium"]["contexts"][0]["length"] = 31.into()),
    ];
    for (what, change) in changes {
        let mut value = good.clone();
        change(&mut value["model"]["state"]);
        let outcome = elsewhere(&serde_json::to_vec(&value).unwrap(), copies());
        assert!(matches!(outcome, Err(RestoreError::Invalid(_))), "{what}: {outcome:?}");
    }
    let (fds, _) = copies();
    let outcome = elsewhere(&serde_json::to_vec(&good).unwrap(), (fds, Vec::new()));
    assert!(matches!(outcome, Err(RestoreError::Invalid(_))), "no keys: {outcome:?}");
    let mut newer = good.clone();
    newer["model"]["version"] = 99.into();
    let outcome = elsewhere(&serde_json::to_vec(&newer).unwrap(), copies());
    assert!(matches!(outcome, Err(RestoreError::Newer { .. })), "{outcome:?}");
    // And the right one is good once.
    tenant.endpoint = elsewhere(&serde_json::to_vec(&good).unwrap(), copies()).unwrap();
    assert_eq!(tenant.wait().status, 1);
    let outcome = elsewhere(&serde_json::to_vec(&good).unwrap(), copies());
    assert!(matches!(outcome, Err(RestoreError::Taken)), "{outcome:?}");
}

/// A descriptor that waits is still in its ring, and what is behind it as well.
#[test]
fn what_waits_goes_on_waiting_elsewhere() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    let condition = Condition { mask: u32::MAX, value: 7, ..Condition::default() };
    let wait = Descriptor {
        id: 1,
        stages: [Operation::Wait as u8, 0, 0, 0],
        input: IOVA + INPUT,
        input_length: 4,
        associated: 60_000,
        nonce: zerocopy::transmute!(condition),
        ..Descriptor::default()
    };
    let copy = Descriptor {
        id: 2,
        stages: [Operation::Copy as u8, 0, 0, 0],
        input: IOVA + INPUT,
        output: IOVA + OUTPUT,
        input_length: 4,
        output_length: 4,
        ..Descriptor::default()
    };
    tenant.push(&wait);
    tenant.push(&copy);
    for _ in 0..100 {
        tenant.poll();
    }
    let Saved { state, descriptors, medium } = tenant.endpoint.save().unwrap();
    tenant.endpoint = elsewhere(&state.to_bytes().unwrap(), (descriptors, medium)).unwrap();
    for _ in 0..100 {
        tenant.poll();
    }
    assert_eq!(tenant.place(RINGS[1])[..16], [0; 16], "it did not wait");
    tenant.put(INPUT, &7u32.to_le_bytes());
    for id in [1, 2] {
        let completion = tenant.wait();
        assert_eq!((completion.id, completion.status), (id, 1));
    }
    assert_eq!(tenant.place(OUTPUT)[..4], 7u32.to_le_bytes());
}
