//! Memory of an operation that others change, or take away, while engines work on it where it is: that operation has any
//! result, and nobody else notices.

use std::sync::atomic::AtomicBool;

use rackbus_memory::MemoryHandle;

use super::*;

/// What engines read in the tenant's memory, or write there too.
const THERE: [Operation; 5] = [
    Operation::Copy,
    Operation::Aes256Ctr,
    Operation::Aes256GcmSeal,
    Operation::Sha256,
    Operation::Crc32c,
];
/// Done by the function's thread at once, by an engine, and in several turns.
const LENGTHS: [u32; 3] = [3000, 60_000, 1_000_000];

impl Tenant {
    /// A tenant whose key, where `operation` takes one, is the context 1.
    fn with_key(pool: &Arc<EnginePool>, number: u32, operation: Operation) -> Tenant {
        let mut tenant = Tenant::new(pool, number);
        if engines::takes_nonce(operation) {
            tenant.memory.whole().part(INPUT as usize, 32).unwrap().fill(9);
            let made = tenant.ask(Descriptor {
                stages: [Operation::CreateContext as u8, operation as u8, 0, 0],
                input: IOVA + INPUT,
                input_length: 32,
                ..Descriptor::default()
            });
            assert_eq!(made.0, OperationStatus::Success);
        }
        tenant
    }

    /// Does an operation on a message at `input`; the status that it ends with, and what it put out.
    fn done(
        &mut self,
        operation: Operation,
        input: u64,
        length: u32,
    ) -> (OperationStatus, Vec<u8>) {
        let (status, written) = self.between(operation, (input, IOVA + OUTPUT), length);
        (status, self.output(written as usize))
    }

    /// The same from one place to another; the bytes that it put out.
    fn between(
        &mut self,
        operation: Operation,
        (input, output): (u64, u64),
        length: u32,
    ) -> (OperationStatus, u32) {
        let asked = Descriptor {
            stages: [operation as u8, 0, 0, 0],
            contexts: [u16::from(engines::takes_nonce(operation)), 0, 0, 0],
            input,
            output,
            input_length: length,
            output_length: length + 64,
            ..Descriptor::default()
        };
        self.ask(asked)
    }

    fn fill_input(&self, length: usize) {
        let message: Vec<u8> = (0..length).map(|n| (n * 7 + n / 251) as u8).collect();
        self.memory.whole().part(INPUT as usize, length).unwrap().copy_from(&message);
    }
}

/// Ends who changes memory, also when a test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What an operation puts out for a message that nobody changes.
fn expected(operation: Operation, length: u32) -> Vec<u8> {
    let mut tenant = Tenant::with_key(&EnginePool::new(PoolOptions::default()), 1, operation);
    tenant.fill_input(length as usize);
    let (status, out) = tenant.done(operation, IOVA + INPUT, length);
    assert_eq!(status, OperationStatus::Success);
    out
}

#[test]
fn a_message_that_is_changed_while_engines_read_it_has_any_result_and_others_have_theirs() {
    let pool = EnginePool::new(PoolOptions::default());
    for operation in THERE {
        for length in LENGTHS {
            let expected = expected(operation, length);
            let [mut tenant, mut other] =
                [1, 2].map(|number| Tenant::with_key(&pool, number, operation));
            other.fill_input(length as usize);
            let (memory, over) = (tenant.memory.clone(), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut byte = 0u8;
                    while !over.load(Ordering::Relaxed) {
                        for at in [INPUT, OUTPUT] {
                            let place = memory.whole().part(at as usize, length as usize);
                            place.unwrap().fill(byte);
                        }
                        byte = byte.wrapping_add(1);
                    }
                });
                let _end = EndOnDrop(&over);
                for _ in 0..3 {
                    let (status, out) = tenant.done(operation, IOVA + INPUT, length);
                    assert_eq!((status, out.len()), (OperationStatus::Success, expected.len()));
                    let result = other.done(operation, IOVA + INPUT, length);
                    assert!(
                        result == (OperationStatus::Success, expected.clone()),
                        "{operation:?}"
                    );
                }
            });
            tenant.fill_input(length as usize);
            let again = tenant.done(operation, IOVA + INPUT, length);
            assert!(again == (OperationStatus::Success, expected), "{operation:?} of {length}");
        }
    }
}

/// Pages that a peer has taken away are zeroes under whatever reads or writes them, and what is asked for afterwards fails.
#[test]
fn a_message_whose_file_is_truncated_under_engines_harms_nobody() {
    const ELSEWHERE: u64 = IOVA + (64 << 20);
    let pool = EnginePool::new(PoolOptions::default());
    for operation in THERE {
        for (length, writes) in LENGTHS.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let mut tenant = Tenant::with_key(&pool, 1, operation);
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let file = rustix::fs::memfd_create("truncated", flags).unwrap();
            rustix::fs::ftruncate(&file, 2 << 20).unwrap();
            let handle = MemoryHandle::new(file.try_clone().unwrap(), 0).unwrap();
            let access = Access::READ | Access::WRITE;
            tenant.endpoint.map(ELSEWHERE, 2 << 20, access, Some(handle)).unwrap();
            rustix::fs::ftruncate(&file, 0).unwrap();
            tenant.fill_input(length as usize);
            let (here, there) = (IOVA + INPUT, ELSEWHERE);
            // The first of them finds the pages gone.
            let places = match writes {
                true => [(here, there), (there, IOVA + OUTPUT)],
                false => [(there, IOVA + OUTPUT), (here, there)],
            };
            for (nth, places) in places.into_iter().enumerate() {
                let (status, _) = tenant.between(operation, places, length);
                assert!(
                    status == OperationStatus::Success
                        || nth > 0 && status == OperationStatus::Transfer,
                    "{operation:?} of {length} bytes at {places:x?} ends with {status:?}"
                );
            }
            let expected = expected(operation, length);
            tenant.fill_input(length as usize);
            let next = tenant.done(operation, IOVA + INPUT, length);
            assert!(next == (OperationStatus::Success, expected), "{operation:?} of {length}");
        }
    }
}
