//! A function whose engines another node has: the same results as beside them, and what either end may not do.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rackbus_memory::{Access, Exchange, SharedMemory};
use rackbus_pci::endpoint::Region;
use rackbus_pci::{Endpoint, FunctionState, Saved};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Operation, Segment, registers as reg,
};
use rackbus_spec::pcie::Command;

use super::super::{Accelerator, CLASS, Pool, PoolOptions};
use super::*;

const IOVA: u64 = 1 << 20;
const MEMORY: u64 = 8 << 20;
/// Places in the memory: the two rings, a list, input and output.
const RINGS: [u64; 2] = [0, 0x2000];
const LIST: u64 = 0x3000;
const INPUT: u64 = 1 << 20;
const OUTPUT: u64 = 4 << 20;
const ENTRIES: u32 = 128;

fn lender(pool: &std::sync::Arc<Pool>) -> Endpoint {
    Endpoint::new(Box::new(Accelerator::new(pool, TenantId(1), None, 77).unwrap()))
}

fn pool() -> std::sync::Arc<Pool> {
    Pool::new(PoolOptions::default())
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
    fn beside(pool: &std::sync::Arc<Pool>) -> Tenant {
        Tenant::with(lender(pool), None, Lost::new(|| {}), None, String::new())
    }

    fn apart(pool: &std::sync::Arc<Pool>) -> Tenant {
        let mut lender = lender(pool);
        let MediumOffer { class, description, files } = lender.serve_medium(None).unwrap();
        assert_eq!(class, CLASS);
        let between = files[0].try_clone().unwrap();
        let lost = Lost::new(|| {});
        let made = front(&description, MediumAccess::Files(files), lost.clone()).unwrap();
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
        tenant.front.write(Region::Config, 4, &command.bits().to_le_bytes()).unwrap();
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
        self.front.write(Region::Bar(0), offset, data).unwrap();
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

    fn wait(&mut self) -> (Status, u32, u32) {
        let begun = Instant::now();
        loop {
            self.poll_front();
            self.poll_lender();
            if let Some(Completion { status, output, value, .. }) = self.completion() {
                return (Status::from_number(status >> 1).unwrap(), output, value);
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is completed");
        }
    }

    /// One operation, or several in a row; what it put out.
    fn run(&mut self, asked: &Descriptor, input: &[u8]) -> (Status, Vec<u8>) {
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
        assert_eq!(status, Status::Success);
        handle as u16
    }

    fn between(&self) -> SharedMemory {
        let file = self.between.as_ref().unwrap().try_clone().unwrap();
        let size = rustix::fs::fstat(&file).unwrap().st_size;
        SharedMemory::adopt(file, size as u64).unwrap()
    }

    /// Front and lender go on in other processes, each from what it was saved as.
    fn hand_over(&mut self, pool: &std::sync::Arc<Pool>, [of_front, of_lender]: [bool; 2]) {
        let text =
            |saved: &Saved| FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
        if of_front {
            let saved = self.front.save().unwrap();
            let state = text(&saved);
            let made = front_again(&self.description, saved.medium, self.lost.clone()).unwrap();
            self.front = Endpoint::new(made);
            self.front.restore(&state, saved.descriptors).unwrap();
        }
        if of_lender {
            let saved = self.lender.as_mut().unwrap().save().unwrap();
            let state = text(&saved);
            let mut model = Accelerator::new(pool, TenantId(1), None, 77).unwrap();
            model.bring(saved.medium);
            let mut next = Endpoint::new(Box::new(model));
            next.restore(&state, saved.descriptors).unwrap();
            self.lender = Some(next);
        }
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
            tenants[at].run(&ask(asked, &contexts), input)
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
            assert_eq!(status, Status::Success, "{operation:?} of {length} bytes");
            if let Some(reverse) = reverse {
                let (status, back) = compare(&[reverse], &output);
                assert!(status == Status::Success && back == message(length), "{reverse:?}");
            }
        }
    }
    let chain = [Operation::ZstdCompress, Operation::Aes256GcmSeal, Operation::Sha256];
    assert_eq!(compare(&chain, &message(100_000)).0, Status::Success);
    // And the same mistakes.
    assert_eq!(compare(&[Operation::Inflate], &[0xff; 100]).0, Status::CorruptInput);
    assert_eq!(compare(&[Operation::Aes256GcmOpen], &[7; 100]).0, Status::NotAuthentic);
    assert_eq!(compare(&[Operation::DestroyContext], &[]).0, Status::InvalidContext);
    assert_eq!(
        compare(&[Operation::CreateContext, Operation::Copy], &[]).0,
        Status::InvalidOperation
    );
    for tenant in &mut tenants {
        let small = Descriptor { output_length: 10, ..ask(&[Operation::Copy], &[]) };
        assert_eq!(tenant.run(&small, &[1; 11]).0, Status::OutputTooSmall);
        assert_eq!(
            tenant.run(&ask(&[Operation::Aes256Ctr], &[99]), &[1]).0,
            Status::InvalidContext
        );
        let beyond = Descriptor { output: IOVA + MEMORY - 5, ..ask(&[Operation::Copy], &[]) };
        assert_eq!(tenant.run(&beyond, &[1; 11]).0, Status::Transfer);
    }
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
            [INPUT + u64::from(at), OUTPUT + u64::from(at + nth * 64)].map(|address| Segment {
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
    assert_eq!(tenant.wait().0, Status::Success);
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
            assert_eq!(tenant.wait().0, Status::Success);
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
        Status::InvalidContext
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
            assert_eq!(status, Status::Success);
            // A context has no output, a digest 32 bytes.
            if written == 0 {
                assert_eq!(made.replace(value as u16), None, "a context was made twice");
            }
        }
        let handle = made.unwrap();
        assert_eq!(tenant.run(&ask(&[Operation::Aes256Ctr], &[handle]), &[1; 9]).1.len(), 9);
        assert_eq!(handle, key + 1, "a context that nobody knows is left behind");
        assert_eq!(tenant.run(&sealed, &message(300_000)).0, Status::Success);
    }
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
    assert_eq!(tenant.wait().0, Status::Success);
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
        assert_eq!(tenant.wait().0, Status::Unreachable);
    }
    assert!(tenant.lost.get());
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, Status::Unreachable);
}

/// Its driver begins anew, and the lender dies before it has answered that.
#[test]
fn when_the_lender_is_lost_while_the_function_begins_anew_nothing_hangs() {
    let mut tenant = Tenant::apart(&pool());
    tenant.create(Operation::Aes256Ctr, &[5; 32]);
    tenant.write(reg::CONTROL, &0u32.to_le_bytes());
    tenant.begin();
    tenant.lender = None;
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, Status::Unreachable);
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
    assert_eq!(tenant.run(&ask(&[Operation::Copy], &[]), &[1]).0, Status::Success);
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
        assert!(matches!(status, Status::Unreachable | Status::Success), "{status:?}");
    }
    // It is there for the next one.
    tenant.lender.as_mut().unwrap().serve_medium(None).unwrap();
}

/// The other side of a medium, by hand.
fn by_hand() -> (Endpoint, Exchange) {
    let mut lender = lender(&pool());
    let offer = lender.serve_medium(None).unwrap();
    let busy = lender.serve_medium(None);
    assert!(matches!(busy, Err(MediumRefused::InUse)));
    (lender, Exchange::join(offer.files.try_into().unwrap(), LAYOUT).unwrap())
}

#[test]
fn a_front_that_breaks_the_rules_is_not_listened_to_any_more() {
    let run = |slot: u16| Ask {
        slot: slot.into(),
        kind: kind::RUN,
        stages: [Operation::Deflate as u8, 0, 0, 0],
        input_length: (1 << 20).into(),
        output_length: (1 << 20).into(),
        ..Ask::default()
    };
    let good = run(1);
    let bytes = |ask: Ask| ask.as_bytes().to_vec();
    let wrong = [
        ("a message of another length", vec![bytes(good)[1..].to_vec()]),
        ("a slot that is none", vec![bytes(run(SLOTS))]),
        ("a slot twice", vec![bytes(good), bytes(good)]),
        ("a queue that is none", vec![bytes(Ask { queue: 8, ..good })]),
        (
            "more than there is room for",
            vec![bytes(Ask { input_length: (1 << 21).into(), ..good })],
        ),
        ("a stop of one slot", vec![bytes(Ask { kind: kind::STOP, ..good })]),
        ("a kind that is none", vec![bytes(Ask { kind: 3, ..good })]),
    ];
    for (what, messages) in wrong {
        let (mut lender, mut front) = by_hand();
        for message in messages {
            front.send(&message, None).unwrap();
        }
        front.ring();
        lender.poll(0);
        assert!(front.is_closed(), "{what}");
    }
    // What a tenant may get wrong is an error of its own operation.
    let (mut lender, mut front) = by_hand();
    let descriptor = Ask {
        stages: [Operation::Wait as u8, 0, 0, 0],
        input_length: 4.into(),
        associated: 1.into(),
        output_length: 0.into(),
        ..good
    };
    front.send(descriptor.as_bytes(), None).unwrap();
    lender.poll(0);
    let mut message = [0; rackbus_memory::exchange::MESSAGE_BYTES];
    let length = front.receive(&mut message).unwrap();
    let answer = Answer::read_from_bytes(&message[..length]).unwrap();
    assert_eq!(answer.status.get(), Status::InvalidOperation as u16);
}

#[test]
fn a_lender_that_breaks_the_rules_is_lost() {
    let answer = |slot: u16, status: u16, written: u32| Answer {
        slot: slot.into(),
        status: status.into(),
        written: written.into(),
        value: 0.into(),
    };
    for (what, message) in [
        ("an answer to nothing", answer(5, 0, 0)),
        ("an answer of no slot", answer(64, 0, 0)),
        ("a stop that nobody asked for", answer(STOP, 0, 0)),
        ("a status that is none", answer(0, 99, 0)),
        ("more than there is room for", answer(0, 0, 65)),
    ] {
        let (mut lender, files) = Exchange::create("by hand", LAYOUT).unwrap();
        let description = serde_json::to_string(&Description { serial: 1, operations: u64::MAX });
        let (description, lost) = (description.unwrap(), Lost::new(|| {}));
        let made = front(&description, MediumAccess::Files(files.into()), lost.clone()).unwrap();
        let mut tenant = Tenant::with(Endpoint::new(made), None, lost, None, description);
        tenant.put(OUTPUT, &[7; 100]);
        let asked =
            Descriptor { input_length: 64, output_length: 64, ..ask(&[Operation::Copy], &[]) };
        tenant.push(&asked);
        tenant.poll_front();
        lender.data(output_tag(0), 4096).unwrap().get().fill(1);
        lender.send(message.as_bytes(), Some((output_tag(0), 4096))).unwrap();
        lender.ring();
        assert_eq!(tenant.wait().0, Status::Unreachable, "{what}");
        assert_eq!(tenant.get(OUTPUT, 100), [7; 100], "{what}");
        assert!(lender.is_closed() && tenant.lost.get(), "{what}");
    }
}

/// Invariant I4 under way: what was unmapped is not written to by an answer that comes later.
#[test]
fn an_answer_after_its_memory_was_unmapped_touches_nothing() {
    let mut tenant = Tenant::apart(&pool());
    tenant.put(INPUT, &message(64));
    tenant.put(OUTPUT, &[7; 64]);
    tenant.push(&Descriptor { input_length: 64, ..ask(&[Operation::Copy], &[]) });
    tenant.poll_front();
    tenant.front.unmap(IOVA, MEMORY).unwrap();
    tenant.poll_lender();
    tenant.poll_front();
    assert_eq!(tenant.get(OUTPUT, 64), [7; 64]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a front says, and whatever is in the places for data, its lender goes on for the next one.
    #[test]
    fn a_lender_outlives_any_front(
        messages in prop::collection::vec((any::<[u8; 44]>(), 0..3u8, 0..70u16, 0..18u8), 1..60),
        data in prop::collection::vec(any::<u8>(), 1..5000),
    ) {
        let (mut lender, mut front) = by_hand();
        for (noise, kind, slot, stage) in messages {
            let mut ask = Ask::read_from_bytes(&noise).unwrap();
            (ask.kind, ask.slot, ask.stages) = (kind.max(1), slot.into(), [stage, 0, 0, 0]);
            ask.queue %= 8;
            ask.contexts = [1.into(), 0.into(), 0.into(), 0.into()];
            let length = data.len() as u32;
            (ask.input_length, ask.associated) = (length.into(), (ask.associated.get() % 20).into());
            ask.output_length = (ask.output_length.get() % (1 << 20)).into();
            if let Some(place) = front.data(input_tag(slot % SLOTS), data.len()) {
                place.get().copy_from(&data);
            }
            let _ = front.send(ask.as_bytes(), None);
            lender.poll(0);
        }
        lender.scrub();
        prop_assert!(lender.serve_medium(None).is_ok());
    }
}
