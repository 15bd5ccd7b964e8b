//! States of this and of earlier versions, in files: a function continues from each of them.

use rackbus_seeds::stored::StoredStates;

use super::super::super::saved::VERSION;
use super::*;

/// Version 1, before an accelerator could have its front elsewhere, had contexts beside the operations, and how far each
/// operation came in it. Its file is that of version 2 written so.
const READ: std::ops::RangeInclusive<u32> = 1..=VERSION;

fn stored() -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/accel/tests/saved/stored");
    StoredStates::new(folder, "state", VERSION)
}

/// Where the word is that a descriptor waits for, and where it is copied to.
const WORD: u64 = INPUT + MESSAGE as u64 - 4;

/// A tenant with a descriptor that is done in part in the place of its input, one whose context was destroyed, one that
/// waits, and one behind it; and its key.
fn working(pool: &Arc<EnginePool>) -> (Tenant, u16) {
    let mut tenant = slow(pool);
    let [key, destroyed] = [9, 5].map(|byte| tenant.create_key([byte; 32]));
    tenant.put(INPUT, &message());
    tenant.push(&encrypt(7, key, INPUT, [Operation::Aes256Ctr, Operation::Copy]));
    under_way(&mut tenant);
    tenant.push(&encrypt(8, destroyed, OUTPUT, [Operation::Aes256Ctr, Operation::Copy]));
    let stages = [Operation::DestroyContext as u8, 0, 0, 0];
    let contexts = [destroyed, 0, 0, 0];
    tenant.push(&Descriptor { stages, contexts, ..Descriptor::default() });
    assert_eq!(tenant.wait().status, 1);
    let condition = Condition { mask: u32::MAX, value: 7, ..Condition::default() };
    tenant.push(&Descriptor {
        id: 9,
        stages: [Operation::Wait as u8, 0, 0, 0],
        input: IOVA + WORD,
        input_length: 4,
        associated: 60_000,
        nonce: zerocopy::transmute!(condition),
        ..Descriptor::default()
    });
    tenant.push(&Descriptor {
        id: 10,
        stages: [Operation::Copy as u8, 0, 0, 0],
        input: IOVA + WORD,
        output: IOVA + OUTPUT,
        input_length: 4,
        output_length: 4,
        ..Descriptor::default()
    });
    (tenant, key)
}

/// How many bytes of the first operation were done when the state was written.
fn done(stored: &str) -> usize {
    let state: Value = serde_json::from_str(stored).unwrap();
    let first = &state["model"]["state"]["under_way"][0];
    let done = first["done"].as_u64().or(first["work"]["done"].as_u64()).unwrap();
    assert!((1..u64::from(MESSAGE)).contains(&done), "nothing is done in part");
    done as usize
}

#[test]
fn a_function_continues_from_what_each_version_wrote() {
    let expected = encrypted([9; 32]);
    for version in READ {
        let pool = EnginePool::new(PoolOptions::default());
        let (mut tenant, key) = working(&pool);
        // The memory and the descriptors are those of this function, which did the same as the one that was stored.
        let Saved { state, descriptors, medium } = tenant.endpoint.save().unwrap();
        stored().compare(&state.to_bytes().unwrap());
        let text = stored().read(version);
        let done = done(&text);
        tenant.put(INPUT, &[&expected[..done], &message()[done..]].concat());
        tenant.endpoint = elsewhere(text.as_bytes(), (descriptors, medium))
            .unwrap_or_else(|error| panic!("version {version}: {error}"));
        let mut ended = [tenant.wait(), tenant.wait()];
        ended.sort_by_key(|completion| completion.id);
        let without_context = (OperationStatus::InvalidContext as u16) << 1 | 1;
        let ended = ended.map(|completion| (completion.id, completion.status));
        assert_eq!(ended, [(7, 1), (8, without_context)], "version {version}");
        assert!(tenant.place(INPUT) == expected, "version {version}: it was not done as if once");
        tenant.put(WORD, &7u32.to_le_bytes());
        for id in [9, 10] {
            let completion = tenant.wait();
            assert_eq!((completion.id, completion.status), (id, 1), "version {version}");
        }
        assert_eq!(tenant.place(OUTPUT)[..4], 7u32.to_le_bytes());
        // The key is there, and no completion comes twice.
        tenant.put(INPUT, &message());
        tenant.push(&encrypt(11, key, OUTPUT, [Operation::Aes256Ctr, Operation::Copy]));
        assert_eq!((tenant.wait().id, tenant.place(OUTPUT) == expected), (11, true));
    }
}
