//! A function whose engines another node has: the same results as beside them, and what either end may not do.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rackbus_memory::{Access, Exchange, ExchangeHandles, Handles, InheritedEnd, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, FunctionState, Saved};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Operation, SglEntry, registers as reg,
};
use rackbus_spec::pcie::Command;

use super::super::{Accelerator, CLASS, EnginePool, PoolOptions};
use super::*;

mod bounds;
mod hostile;
mod stored;
mod succession;

const IOVA: u64 = 1 << 20;
const MEMORY: u64 = 8 << 20;
/// Places in the memory: the two rings, a list, input and output.
const RINGS: [u64; 2] = [0, 0x2000];
const LIST: u64 = 0x3000;
const INPUT: u64 = 1 << 20;
const OUTPUT: u64 = 4 << 20;
const ENTRIES: u32 = 128;

fn lender(pool: &std::sync::Arc<EnginePool>) -> Endpoint {
    Endpoint::new(Box::new(Accelerator::new(pool, TenantId(1), None, 77).unwrap()))
}

fn pool() -> std::sync::Arc<EnginePool> {
    EnginePool::new(PoolOptions::default())
}

/// A tenant that drives its function by hand, whose front is here and whose engines may be elsewhere.
struct Tenant {
    front: Endpoint,
    lender: Option<Endpoint>,
    lost: Lost,
    /// The memory between the two.
    between: Option<OwnedFd>,
    description: String,
    memory: SharedMemory,
    sent: u32,
    seen: u32,
}

impl Tenant {
    fn beside(pool: &std::sync::Arc<EnginePool>) -> Tenant {
        Tenant::with(lender(pool), None, Lost::new(|| {}), None, String::new())
    }

    fn apart(pool: &std::sync::Arc<EnginePool>) -> Tenant {
        let mut lender = lender(pool);
        let MediumOffer { class, description, handles } = lender.serve_medium(None).unwrap();
        assert_eq!(class, CLASS);
        let exchange = ExchangeHandles::try_from(handles).unwrap();
        let between = Handles::from(exchange.try_clone().unwrap()).next_descriptor().unwrap();
        let lost = Lost::new(|| {});
        let made =
            front(&description, MediumAccess::Handles(exchange.into()), lost.clone()).unwrap();
        Tenant::with(Endpoint::new(made), Some(lender), lost, Some(between), description)
    }

    fn with(
        front: Endpoint,
        lender: Option<Endpoint>,
        lost: Lost,
        between: Option<OwnedFd>,
        description: String,
    ) -> Tenant {
        let memory = SharedMemory::create("accel-medium-test", MEMORY).unwrap();
        let mut tenant =
            Tenant { front, lender, lost, between, description, memory, sent: 0, seen: 0 };
        tenant.map();
        let command = Command::MEMORY_SPACE | Command::BUS_MASTER;
        tenant.front.write(FunctionRegion::Config, 4, &command.bits().to_le_bytes()).unwrap();
        tenant.begin();
        tenant
    }

    fn begin(&mut self) {
        (self.sent, self.seen) = (0, 0);
        self.memory.whole().part(0, LIST as usize).unwrap().fill(0);
        self.write(reg::CONTROL, &1u32.to_le_bytes());
        for (register, ring) in [reg::SUBMISSION, reg::COMPLETION].into_iter().zip(RINGS) {
            self.write(reg::QUEUE + register, &(IOVA + ring).to_le_bytes());
        }
        self.write(reg::QUEUE + reg::RING_ENTRIES, &ENTRIES.to_le_bytes());
        self.write(reg::QUEUE + reg::ENABLE, &1u32.to_le_bytes());
    }

    fn map(&mut self) {
        let handle = Some(self.memory.handle(0));
        self.front.map(IOVA, MEMORY, Access::READ | Access::WRITE, handle).unwrap();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.front.write(FunctionRegion::Bar(0), offset, data).unwrap();
    }

    fn put(&self, at: u64, data: &[u8]) {
        self.memory.whole().part(at as usize, data.len()).unwrap().copy_from(data);
    }

    fn get(&self, at: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.whole().part(at as usize, length).unwrap().copy_to(&mut data);
        data
    }

    fn push(&mut self, descriptor: &Descriptor) {
        let at = self.sent % ENTRIES * DESCRIPTOR_SIZE as u32;
        self.memory.whole().write_obj(at as usize, descriptor);
        self.sent += 1;
        self.write(reg::DOORBELL, &(self.sent % ENTRIES).to_le_bytes());
    }

    fn poll_front(&mut self) {
        let now = self.front.clock();
        self.front.poll(now);
    }

    fn poll_lender(&mut self) {
        if let Some(lender) = &mut self.lender {
            let now = lender.clock();
            lender.poll(now);
        }
    }

    fn completion(&mut self) -> Option<Completion> {
        let at = RINGS[1] as usize + (self.seen % ENTRIES) as usize * COMPLETION_SIZE;
        let completion: Completion = self.memory.whole().read_obj(at).unwrap();
        let phase = u16::from((self.seen / ENTRIES).is_multiple_of(2));
        if completion.status & 1 != phase {
            return None;
        }
        self.seen += 1;
        self.write(reg::DOORBELL + 4, &(self.seen % ENTRIES).to_le_bytes());
        Some(completion)
    }

    fn wait(&mut self) -> (OperationStatus, u32, u32) {
        let begun = Instant::now();
        loop {
            self.poll_front();
            self.poll_lender();
            if let Some(Completion { status, output, value, .. }) = self.completion() {
                return (OperationStatus::from_number(status >> 1).unwrap(), output, value);
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is completed");
        }
    }

    /// One operation, or several in a row; what it put out.
    fn run(&mut self, asked: &Descriptor, input: &[u8]) -> (OperationStatus, Vec<u8>) {
        self.put(INPUT, input);
        self.push(&Descriptor { input_length: input.len() as u32, ..*asked });
        let (status, written, _) = self.wait();
        (status, self.get(OUTPUT, written as usize))
    }

    fn create(&mut self, of: Operation, made_of: &[u8]) -> u16 {
        self.put(INPUT, made_of);
        let stages = [Operation::CreateContext as u8, of as u8, 0, 0];
        let input_length = made_of.len() as u32;
        self.push(&Descriptor {
            stages,
            input: IOVA + INPUT,
            input_length,
            ..Descriptor::default()
        });
        let (status, _, handle) = self.wait();
        assert_eq!(status, OperationStatus::Success);
        handle as u16
    }

    fn between(&self) -> SharedMemory {
        let file = self.between.as_ref().unwrap().try_clone().unwrap();
        let size = rustix::fs::fstat(&file).unwrap().st_size;
        SharedMemory::adopt(file, size as u64).unwrap()
    }

    /// Front and lender go on in other processes, each from what it was saved as.
    fn hand_over(&mut self, pool: &std::sync::Arc<EnginePool>, [of_front, of_lender]: [bool; 2]) {
        let text =
            |saved: &Saved| FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
        if of_front {
            let saved = self.front.save().unwrap();
            let state = text(&saved);
            let end = InheritedEnd { files: saved.medium, session: None };
            let made = front_again(&self.description, end, self.lost.clone()).unwrap();
            self.front = Endpoint::new(made);
            self.front.restore(&state, saved.descriptors).unwrap();
        }
        if of_lender {
            let saved = self.lender.as_mut().unwrap().save().unwrap();
            self.lender_again(pool, saved);
        }
    }

    /// The lender goes on in another process.
    fn lender_again(&mut self, pool: &std::sync::Arc<EnginePool>, saved: Saved) {
        let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
        let mut model = Accelerator::new(pool, TenantId(1), None, 77).unwrap();
        model.bring(saved.medium);
        let mut next = Endpoint::new(Box::new(model));
        next.restore(&state, saved.descriptors).unwrap();
        self.lender = Some(next);
    }
}

fn message(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * at / 7 % 251) as u8).collect()
}

fn ask(stages: &[Operation], contexts: &[u16]) -> Descriptor {
    let mut descriptor = Descriptor {
        input: IOVA + INPUT,
        output: IOVA + OUTPUT,
        output_length: 1 << 20,
        nonce: [3; 16],
        ..Descriptor::default()
    };
    for (at, stage) in stages.iter().enumerate() {
        descriptor.stages[at] = *stage as u8;
    }
    descriptor.contexts[..contexts.len()].copy_from_slice(contexts);
    descriptor
}

#[test]
fn every_operation_has_the_same_result_apart_from_the_engines_as_beside_them() {
    let (here, there) = (pool(), pool());
    let mut tenants = [Tenant::beside(&here), Tenant::apart(&there)];
    let keys = tenants.each_mut().map(|tenant| tenant.create(Operation::Aes256GcmSeal, &[5; 32]));
    let patterns = tenants.each_mut().map(|tenant| tenant.create(Operation::RegexScan, b"(a|b)+c"));
    let mut compare = |asked: &[Operation], input: &[u8]| {
        let [one, other] = [0, 1].map(|at| {
            let context = |of: &Operation| match of {
                Operation::RegexScan => patterns[at],
                Operation::Aes256Ctr | Operation::Aes256GcmSeal | Operation::Aes256GcmOpen => {
                    keys[at]
                }
                _ => 0,
            };
            let contexts: Vec<u16> = asked.iter().map(context).collect();
            tenants[at].put(OUTPUT, &[9; 64]);
            let (status, output) = tenants[at].run(&ask(asked, &contexts), input);
            if status == OperationStatus::NotAuthentic {
                let left = tenants[at].get(OUTPUT, input.len().min(64));
                assert!(left.iter().all(|byte| *byte == 0), "{asked:?} left {left:?}");
            }
            (status, output)
        });
        let said = format!("{asked:?} of {} bytes: {:?}, {:?}", input.len(), one.0, other.0);
        assert!(one.0 == other.0, "{said}");
        // What compressed data is like depends on where an engine was interrupted.
        let compresses = [Operation::Deflate, Operation::ZstdCompress, Operation::Lz4Compress];
        assert!(one == other || asked.iter().any(|of| compresses.contains(of)), "{said}");
        one
    };
    let reverses = [
        (Operation::Aes256GcmSeal, Some(Operation::Aes256GcmOpen)),
        (Operation::Aes256Ctr, Some(Operation::Aes256Ctr)),
        (Operation::Deflate, Some(Operation::Inflate)),
        (Operation::ZstdCompress, Some(Operation::ZstdDecompress)),
        (Operation::Lz4Compress, Some(Operation::Lz4Decompress)),
        (Operation::Copy, None),
        (Operation::Sha256, None),
        (Operation::Sha3_512, None),
        (Operation::Blake3, None),
        (Operation::RegexScan, None),
        (Operation::Crc32c, None),
    ];
    for (operation, reverse) in reverses {
        for length in [0, 1, 4096, 900_000] {
            let (status, output) = compare(&[operation], &message(length));
            assert_eq!(status, OperationStatus::Success, "{operation:?} of {length} bytes");
            if let Some(reverse) = reverse {
                let (status, back) = compare(&[reverse], &output);
                assert!(
                    status == OperationStatus::Success && back == message(length),
                    "{reverse:?}"
                );
            }
        }
    }
    let chain = [Operation::ZstdCompress, Operation::Aes256GcmSeal, Operation::Sha256];
    assert_eq!(compare(&chain, &message(100_000)).0, OperationStatus::Success);
    // And the same mistakes.
    assert_eq!(compare(&[Operation::Inflate], &[0xff; 100]).0, OperationStatus::CorruptInput);
    // What is done at once, and what in parts.
    for length in [16, 100, 900_000] {
        let forged = message(length);
        assert_eq!(compare(&[Operation::Aes256GcmOpen], &forged).0, OperationStatus::NotAuthentic);
    }
    assert_eq!(compare(&[Operation::DestroyContext], &[]).0, OperationStatus::InvalidContext);
    assert_eq!(
        compare(&[Operation::CreateContext, Operation::Copy], &[]).0,
        OperationStatus::InvalidOperation
    );
    for tenant in &mut tenants {
        let small = Descriptor { output_length: 10, ..ask(&[Operation::Copy], &[]) };
        assert_eq!(tenant.run(&small, &[1; 11]).0, OperationStatus::OutputTooSmall);
        assert_eq!(
            tenant.run(&ask(&[Operation::Aes256Ctr], &[99]), &[1]).0,
            OperationStatus::InvalidContext
        );
        let beyond = Descriptor { output: IOVA + MEMORY - 5, ..ask(&[Operation::Copy], &[]) };
        assert_eq!(tenant.run(&beyond, &[1; 11]).0, OperationStatus::Transfer);
    }
}

/// It is opened in parts, and has ended before its tag was seen.
#[test]
fn what_was_not_found_authentic_is_not_left_whatever_it_ends_with() {
    let mut tenant = Tenant::beside(&pool());
    let key = tenant.create(Operation::Aes256GcmSeal, &[5; 32]);
    let length = super::super::engines::Portion::Whole.bytes() * 5 / 2;
    let sealed = tenant.run(&ask(&[Operation::Aes256GcmSeal], &[key]), &message(length)).1;
    let room = length as u32 - 100;
    tenant.put(OUTPUT, &vec![0; length]);
    let small = Descriptor { output_length: room, ..ask(&[Operation::Aes256GcmOpen], &[key]) };
    assert_eq!(tenant.run(&small, &sealed).0, OperationStatus::OutputTooSmall);
    assert!(tenant.get(OUTPUT, length).iter().all(|byte| *byte == 0), "some of it is left");
}

#[test]
fn input_and_output_may_lie_in_many_pieces() {
    let mut tenant = Tenant::apart(&pool());
    let data = message(50_000);
    tenant.put(INPUT, &data);
    let mut list = Vec::new();
    let mut at = 0;
    for nth in 0..40 {
        let length = if nth == 39 { 50_000 - at } else { 1 + at % 2000 };
        // Behind one another in the input, with gaps in the output.
        list.push(
            [INPUT + u64::from(at), OUTPUT + u64::from(at + nth * 64)].map(|address| SglEntry {
                address: IOVA + address,
                length,
                reserved: 0,
            }),
        );
        at += length;
    }
    for (nth, pair) in list.iter().enumerate() {
        for (which, segment) in pair.iter().enumerate() {
            tenant.put(LIST + 4096 * which as u64 + 16 * nth as u64, segment.as_bytes());
        }
    }
    tenant.push(&Descriptor {
        stages: [Operation::Copy as u8, 0, 0, 0],
        input: IOVA + LIST,
        input_segments: 40,
        output: IOVA + LIST + 4096,
        output_segments: 40,
        input_length: 50_000,
        output_length: 50_000,
        ..Descriptor::default()
    });
    assert_eq!(tenant.wait().0, OperationStatus::Success);
    let pieces = list.iter().flat_map(|[_, to]| tenant.get(to.address - IOVA, to.length as usize));
    assert!(pieces.eq(data));
}

#[test]
fn more_operations_than_slots_all_end_in_their_queue() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &message(4096));
    for round in 0..3u16 {
        for nth in 0..100 {
            let asked = Descriptor {
                id: round * 100 + nth,
                input_length: 64,
                ..ask(&[Operation::Sha256], &[])
            };
            tenant.push(&asked);
        }
        for _ in 0..100 {
            assert_eq!(tenant.wait().0, OperationStatus::Success);
        }
    }
}

/// Contexts are the lender's, and are gone when the tenant begins anew; so is what they were made of.
#[test]
fn a_function_that_begins_anew_has_no_contexts_and_no_key_stays_between_the_two() {
    let mut tenant = Tenant::apart(&pool());
    let key = *b"thirty-two bytes of a secret key";
    let handle = tenant.create(Operation::Aes256Ctr, &key);
    tenant.put(INPUT, &[0; 64]);
    let between = tenant.between();
    let mut all = vec![0; between.whole().len()];
    between.whole().copy_to(&mut all);
    assert!(!all.windows(32).any(|window| window == key), "the key is left between the two");
    tenant.write(reg::CONTROL, &0u32.to_le_bytes());
    tenant.begin();
    assert_eq!(
        tenant.run(&ask(&[Operation::Aes256Ctr], &[handle]), &[1]).0,
        OperationStatus::InvalidContext
    );
    // Also when it does so again and again, without waiting for anything.
    for _ in 0..200 {
        tenant.push(&Descriptor { input_length: 4096, ..ask(&[Operation::Deflate], &[]) });
        tenant.poll_front();
        tenant.write(reg::CONTROL, &0u32.to_le_bytes());
        tenant.begin();
    }
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), b"again").1, b"again");
}
