//! The two ends over one exchange: what a front reads, writes and may not do.

mod turns;
mod zeroing;

use proptest::prelude::*;
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::{Event, Exchange, InheritedEnd, PinnedSlice, SharedMemory};
use rackbus_pci::endpoint::Endpoint;
use rackbus_pci::{MediumOffer, MediumRefused, Work};
use zerocopy::IntoBytes;

use super::*;
use crate::nvme::Nvme;
use crate::nvme::backing::{Backing, MediumRequest, RequestResult};
use crate::nvme::limits::Limits;

const SIZE: u64 = 1 << 20;

struct Both {
    lender: Endpoint,
    front: RemoteBacking,
    lost: Lost,
}

/// A lender's function whose medium is had by a front.
fn offered(config: &NvmeConfig) -> (Endpoint, MediumOffer) {
    let mut lender = Endpoint::new(Box::new(Nvme::new(config).unwrap()));
    let offer = lender.serve_medium(None).unwrap();
    (lender, offer)
}

fn both(config: &NvmeConfig) -> Both {
    let (lender, offer) = offered(config);
    let description: DriveDescription = serde_json::from_str(&offer.description).unwrap();
    assert_eq!((description.size, description.serial.as_str()), (SIZE, "M1"));
    let lost = Lost::new(|| {});
    let front =
        RemoteBacking::new(description, offer.handles.try_into().unwrap(), lost.clone()).unwrap();
    Both { lender, front, lost }
}

impl Both {
    /// Polls both ends until everything that was started has ended.
    fn settle(&mut self, count: usize) -> Vec<RequestResult> {
        let mut finished = Vec::new();
        let background = self.front.background().unwrap();
        background.submit();
        while finished.len() < count {
            self.lender.poll(0);
            self.front.background().unwrap().reap(&mut finished);
        }
        finished
    }

    fn start(&mut self, tag: u32, request: MediumRequest<Vec<PinnedSlice>>) {
        self.front.background().unwrap().start(tag, request);
    }
}

fn buffer(bytes: usize) -> (SharedMemory, Vec<PinnedSlice>) {
    let memory = SharedMemory::create("buffer", bytes as u64).unwrap();
    // In two pieces, as a guest's pages are.
    let half = bytes / 2;
    let pieces = [(0, half), (half, bytes - half)]
        .map(|(at, length)| PinnedSlice::new(memory.region().clone(), at, length).unwrap());
    (memory, pieces.into())
}

fn round_trip(config: &NvmeConfig) {
    let mut both = both(config);
    let (source, from) = buffer(8192);
    source.whole().fill(5);
    both.start(9, MediumRequest::Write { offset: 4096, from, durable: true });
    assert_eq!(both.settle(1), [(9, Ok(()))]);
    both.start(1, MediumRequest::Flush);
    both.start(2, MediumRequest::Zero { offset: 8192, length: 512, deallocate: false });
    let mut finished = both.settle(2);
    finished.sort_by_key(|(tag, _)| *tag);
    assert_eq!(finished, [(1, Ok(())), (2, Ok(()))]);
    let (target, into) = buffer(8192);
    both.start(3, MediumRequest::Read { offset: 4096, into });
    assert_eq!(both.settle(1), [(3, Ok(()))]);
    let mut data = vec![0; 8192];
    target.whole().copy_to(&mut data);
    assert!(data[..4096].iter().all(|byte| *byte == 5));
    assert!(data[4096..4608].iter().all(|byte| *byte == 0));
    assert!(data[4608..].iter().all(|byte| *byte == 5));
}

#[test]
fn what_is_written_is_read_in_memory() {
    round_trip(&NvmeConfig::memory(SIZE, "M1"));
}

#[test]
fn what_is_written_is_read_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    round_trip(&NvmeConfig::file(dir.path().join("disk"), SIZE, "M1"));
}

#[test]
fn more_operations_than_tags_all_end() {
    let mut both = both(&NvmeConfig::memory(SIZE, "M1"));
    let count = 3 * TAGS;
    for tag in 0..count {
        let (_, into) = buffer(512);
        both.start(tag, MediumRequest::Read { offset: 512 * u64::from(tag), into });
    }
    let mut tags: Vec<u32> = both.settle(count as usize).into_iter().map(|(tag, _)| tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..count).collect::<Vec<_>>());
}

#[test]
fn when_the_other_node_is_lost_everything_fails_and_nothing_waits() {
    let mut both = both(&NvmeConfig::memory(SIZE, "M1"));
    for tag in 0..2 * TAGS {
        let (_, into) = buffer(512);
        both.start(tag, MediumRequest::Read { offset: 0, into });
    }
    both.lost.set();
    let mut finished = Vec::new();
    both.front.background().unwrap().reap(&mut finished);
    assert_eq!(finished.len(), 2 * TAGS as usize);
    assert!(finished.iter().all(|(_, result)| *result == Err(MediaError::Unreachable)));
    assert!(!both.front.background().unwrap().has_buffers());
    assert!(!both.front.background().unwrap().rearm(), "its engine would never sleep");
    assert!(both.front.wake_fd().is_none(), "a lender that rings for ever would keep it awake");
    both.start(0, MediumRequest::Flush);
    assert!(both.front.background().unwrap().rearm(), "a flush is still to fail");
    both.front.background().unwrap().abort();
}

#[test]
fn a_medium_that_does_not_answer_keeps_no_reset_waiting() {
    let (_lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    let lost = Lost::new(move || ended.send(()).unwrap());
    let front = RemoteBacking::new(description, offer.handles.try_into().unwrap(), lost).unwrap();
    let mut front = front.with_patience(std::time::Duration::from_millis(20));
    let background = front.background().unwrap();
    background.start(1, MediumRequest::Flush);
    // Nobody polls the lender.
    background.abort();
    assert!(end.try_recv().is_ok(), "the conversation goes on with a node that hangs");
    let mut finished = Vec::new();
    background.reap(&mut finished);
    assert!(finished.is_empty(), "what was given up is reported: {finished:?}");
}

#[test]
fn a_scrub_of_the_function_is_the_end_of_its_front() {
    let mut both = both(&NvmeConfig::memory(SIZE, "M1"));
    assert!(matches!(both.lender.serve_medium(None), Err(MediumRefused::InUse)));
    both.start(7, MediumRequest::Flush);
    both.lender.scrub();
    assert!(both.lender.serve_medium(None).is_ok());
    let mut finished = Vec::new();
    both.front.background().unwrap().wait(&mut finished);
    assert_eq!(finished, [(7, Err(MediaError::Unreachable))]);
}

/// A flush that an earlier user gave up ends while a front has the medium, and asks nothing of it.
#[test]
fn a_flush_that_was_given_up_keeps_no_engine_awake() {
    let dir = tempfile::tempdir().unwrap();
    let config = NvmeConfig::file(dir.path().join("disk"), SIZE, "M1");
    let mut backing = crate::nvme::backing::open(&config).unwrap();
    let background = backing.background().unwrap();
    background.start(1, MediumRequest::Flush);
    background.submit();
    background.abort();
    Event::wait_any(&[backing.wake_fd().unwrap()], None);
    let mut lender = Endpoint::new(Box::new(Nvme::with_backing(&config, backing).unwrap()));
    let _offer = lender.serve_medium(None).unwrap();
    let sleeps = (0..8).any(|_| {
        lender.poll(0);
        lender.park()
    });
    assert!(sleeps, "its engine never sleeps");
}

/// The engine that serves it may end while its node continues: nobody else would notice.
#[test]
fn the_end_of_a_medium_ends_the_conversation_with_its_node() {
    let (lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let (ended, end) = std::sync::mpsc::channel();
    let lost = Lost::new(move || ended.send(()).unwrap());
    let mut front =
        RemoteBacking::new(description, offer.handles.try_into().unwrap(), lost).unwrap();
    assert!(!front.background().unwrap().rearm() && end.try_recv().is_err());
    drop(lender);
    assert!(!front.background().unwrap().rearm());
    assert!(end.try_recv().is_ok(), "the conversation goes on without a medium");
}

#[test]
fn an_answer_to_nothing_ends_the_conversation() {
    let (mut port, files) = Exchange::create("exchange", LAYOUT).unwrap();
    let (_lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let mut front = RemoteBacking::new(description, files, Lost::new(|| {})).unwrap();
    port.send(Answer { tag: 3.into(), result: 0.into() }.as_bytes(), None).unwrap();
    let mut finished = Vec::new();
    front.background().unwrap().reap(&mut finished);
    assert!(finished.is_empty() && port.is_closed());
}

#[test]
fn a_front_that_broke_the_rules_is_not_listened_to_any_more() {
    let (mut lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
    let mut front = Exchange::join(offer.handles.try_into().unwrap(), LAYOUT).unwrap();
    let (offset, length) = (0.into(), 0.into());
    let flush =
        Ask { tag: 1.into(), kind: kind::FLUSH, flags: 0, reserved: [0; 2], offset, length };
    for message in [&[0xff][..], flush.as_bytes(), flush.as_bytes()] {
        front.send(message, None).unwrap();
    }
    for _ in 0..4 {
        lender.poll(0);
    }
    assert!(front.is_closed());
    assert_eq!(front.receive(&mut [0; MESSAGE_BYTES]), None, "it was answered");
    assert!(lender.park(), "its engine does not sleep");
}

fn arbitrary_ask() -> impl Strategy<Value = Vec<u8>> {
    let number = || prop_oneof![0u64..2 * SIZE, any::<u64>(), (0u64..5000).prop_map(|n| n * 512)];
    let ask = (0u32..70, 0u8..6, any::<u8>(), number(), number()).prop_map(
        |(tag, kind, flags, offset, length)| {
            let (tag, offset, length) = (tag.into(), offset.into(), length.into());
            Ask { tag, kind, flags, reserved: [0; 2], offset, length }.as_bytes().to_vec()
        },
    );
    prop_oneof![ask, prop::collection::vec(any::<u8>(), 0..MESSAGE_BYTES)]
}

/// One answer at a time, each just before it would be given up.
#[test]
fn a_medium_that_answers_slowly_keeps_a_reset_waiting_for_so_long_only() {
    let (mut hostile, files) = Exchange::create("exchange", LAYOUT).unwrap();
    let (_lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let front = RemoteBacking::new(description, files, Lost::new(|| {})).unwrap();
    let patience = std::time::Duration::from_millis(200);
    let mut front = front.with_patience(patience);
    let background = front.background().unwrap();
    (0..TAGS).for_each(|tag| background.start(tag, MediumRequest::Flush));
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stops = ended.clone();
    let slow = std::thread::spawn(move || {
        for tag in 0..TAGS {
            std::thread::sleep(patience / 2);
            if stops.load(std::sync::atomic::Ordering::Relaxed) {
                return;
            }
            let _ = hostile.send(Answer { tag: tag.into(), result: 0.into() }.as_bytes(), None);
            hostile.ring();
        }
    });
    let begun = std::time::Instant::now();
    background.abort();
    let took = begun.elapsed();
    ended.store(true, std::sync::atomic::Ordering::Relaxed);
    slow.join().unwrap();
    assert!(took < 12 * patience, "{took:?}");
}

fn arbitrary_answer() -> impl Strategy<Value = Vec<u8>> {
    let answer = (0u32..70, prop_oneof![0u32..10, any::<u32>()]).prop_map(|(tag, result)| {
        Answer { tag: tag.into(), result: result.into() }.as_bytes().to_vec()
    });
    prop_oneof![4 => answer, 1 => prop::collection::vec(any::<u8>(), 0..MESSAGE_BYTES)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a medium's node says, the front neither panics nor waits, and each operation ends
    /// once.
    #[test]
    fn a_hostile_medium_does_no_harm(
        answers in prop::collection::vec(arbitrary_answer(), 1..100), operations in 1u32..100,
    ) {
        let (mut hostile, files) = Exchange::create("exchange", LAYOUT).unwrap();
        let (_lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
        let description = serde_json::from_str(&offer.description).unwrap();
        let lost = Lost::new(|| {});
        let mut front = RemoteBacking::new(description, files, lost.clone()).unwrap();
        let background = front.background().unwrap();
        let mut finished = Vec::new();
        for tag in 0..operations {
            let (_, into) = buffer(512);
            background.start(tag, MediumRequest::Read { offset: 0, into });
        }
        for answer in &answers {
            let _ = hostile.send(answer, None);
            background.reap(&mut finished);
        }
        lost.set();
        background.reap(&mut finished);
        let mut ended: Vec<u32> = finished.iter().map(|(tag, _)| *tag).collect();
        ended.sort_unstable();
        prop_assert_eq!(ended, (0..operations).collect::<Vec<_>>());
        prop_assert!(!background.has_buffers());
    }

    /// Whatever a front says, the port neither panics nor does anything outside of the drive, and
    /// each operation that it takes is answered once.
    #[test]
    fn a_hostile_front_does_no_harm(asks in prop::collection::vec(arbitrary_ask(), 1..100)) {
        let (mut lender, offer) = offered(&NvmeConfig::memory(SIZE, "M1"));
        let mut front = Exchange::join(offer.handles.try_into().unwrap(), LAYOUT).unwrap();
        let (mut message, mut answered) = ([0; MESSAGE_BYTES], 0);
        let mut sent = 0;
        for ask in &asks {
            sent += usize::from(front.send(ask, None).is_ok());
            while lender.poll(0) == Work::Done {}
            while front.receive(&mut message).is_some() {
                answered += 1;
            }
        }
        prop_assert!(answered <= sent);
        if !front.is_closed() {
            prop_assert_eq!(answered, sent);
        }
    }
}

impl Both {
    /// The lender's process is replaced: another one continues with its drive, of `config`.
    fn replace_lender(&mut self, config: &NvmeConfig) {
        let saved = self.lender.save().unwrap();
        // The old one goes first, and with it what it has under way with the medium.
        let nothing = NvmeConfig { backing: BackingConfig::Null, ..config.clone() };
        self.lender = Endpoint::new(Box::new(Nvme::new(&nothing).unwrap()));
        self.lender = Endpoint::new(Box::new(Nvme::resume(config, saved.medium).unwrap()));
        self.lender.restore(&saved.state, saved.descriptors).unwrap();
    }

    /// The front's process is replaced; what was started there is to be started again.
    fn replace_front(&mut self) {
        let (files, under_way) = (self.front.descriptors(), self.front.under_way_elsewhere());
        let mut next = RemoteBacking::again(
            self.front.description().clone(),
            InheritedEnd { files: files.unwrap(), session: None },
            self.lost.clone(),
        )
        .unwrap();
        // Its engine may poll it before it is told of what the old one left.
        self.lender.poll(0);
        next.background().unwrap().reap(&mut Vec::new());
        assert!(next.expect(&under_way));
        assert!(!next.expect(&under_way) || under_way.is_empty(), "they are taken twice");
        self.front = next;
    }
}

/// Writes and reads of a front while its process and that of the medium are replaced by others: each
/// operation ends once, and what was acknowledged is read.
fn replaced_again_and_again(config: &NvmeConfig, steps: &[(u8, u8)]) {
    let mut both = both(config);
    // By block: what was written last, acknowledged or not; an operation at a time for each block.
    let mut content = [0u8; 8];
    let mut open: Vec<(u32, u64, u8)> = Vec::new();
    for (number, (kind, block)) in (1u32..).zip(steps) {
        let (block, byte) = (u64::from(block % 8), number as u8);
        let mut finished = Vec::new();
        match kind % 4 {
            0 => both.replace_lender(config),
            1 => {
                both.replace_front();
                // As a front that is saved does with its commands.
                for (tag, block, byte) in &open {
                    let (memory, from) = buffer(4096);
                    memory.whole().fill(*byte);
                    both.start(
                        *tag,
                        MediumRequest::Write { offset: block * 4096, from, durable: true },
                    );
                }
            }
            _ if open.iter().all(|(_, other, _)| *other != block) => {
                let (memory, from) = buffer(4096);
                memory.whole().fill(byte);
                both.start(
                    number,
                    MediumRequest::Write { offset: block * 4096, from, durable: true },
                );
                open.push((number, block, byte));
            }
            _ => {}
        }
        both.front.background().unwrap().submit();
        if kind & 0x80 != 0 {
            both.lender.poll(0);
            both.front.background().unwrap().reap(&mut finished);
        }
        for (tag, result) in finished {
            let at = open.iter().position(|(open, ..)| *open == tag).expect("it ended before");
            let (_, block, byte) = open.remove(at);
            assert_eq!(result, Ok(()));
            content[block as usize] = byte;
        }
    }
    for (tag, result) in both.settle(open.len()) {
        let (_, block, byte) = *open.iter().find(|(open, ..)| *open == tag).unwrap();
        assert_eq!(result, Ok(()));
        content[block as usize] = byte;
    }
    for (block, expected) in (0..).zip(content) {
        let (memory, into) = buffer(4096);
        both.start(0, MediumRequest::Read { offset: block * 4096, into });
        assert_eq!(both.settle(1), [(0, Ok(()))]);
        let mut data = [0; 4096];
        memory.whole().copy_to(&mut data);
        assert!(data == [expected; 4096], "block {block} has not {expected}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn other_processes_go_on_with_front_and_medium(
        steps in proptest::collection::vec(any::<(u8, u8)>(), 0..40),
    ) {
        replaced_again_and_again(&NvmeConfig::memory(SIZE, "M1"), &steps);
        let dir = tempfile::tempdir().unwrap();
        let file = NvmeConfig::file(dir.path().join("disk"), SIZE, "M1");
        replaced_again_and_again(&file, &steps);
    }
}

#[test]
fn what_an_earlier_front_asked_for_ends_before_anything_new_begins() {
    let mut both = both(&NvmeConfig::memory(SIZE, "M1"));
    let (old, from) = buffer(512);
    old.whole().fill(1);
    both.start(1, MediumRequest::Write { offset: 0, from, durable: false });
    both.front.background().unwrap().submit();
    let under_way = both.front.under_way_elsewhere();
    let end = InheritedEnd { files: both.front.descriptors().unwrap(), session: None };
    let description = both.front.description().clone();
    let mut next = RemoteBacking::again(description, end, both.lost.clone()).unwrap();
    assert!(next.expect(&under_way));
    let (new, from) = buffer(512);
    new.whole().fill(2);
    next.background().unwrap().start(9, MediumRequest::Write { offset: 0, from, durable: false });
    assert_eq!(next.under_way_elsewhere(), under_way, "it was asked for too early");
    both.front = next;
    assert_eq!(both.settle(1), [(9, Ok(()))]);
    assert!(!both.front.expect(&[TAGS]), "no such operation");
}

#[test]
fn a_front_elsewhere_keeps_to_the_limits_of_the_drive_and_what_waits_ends_with_it() {
    let limits = Limits { bytes: None, operations: Some(100) };
    let mut both = both(&NvmeConfig { limits, ..NvmeConfig::memory(SIZE, "M1") });
    let count = 40;
    for tag in 0..count {
        let (_, into) = buffer(512);
        both.start(tag, MediumRequest::Read { offset: 0, into });
    }
    both.front.background().unwrap().submit();
    let (mut now, mut finished) = (0, Vec::new());
    // A burst of five is there at the beginning, and then one comes each 10 ms.
    while now < 200_000_000 {
        now = match both.lender.poll(now) {
            Work::Asleep(Some(until)) => {
                assert!(until > now && both.lender.park(), "it cannot sleep");
                until
            }
            Work::Done => now,
            other => panic!("{other:?} while operations wait"),
        };
        both.front.background().unwrap().reap(&mut finished);
        let most = 5 + now / 10_000_000 + 1;
        assert!(finished.len() as u64 <= most, "{} after {now} ns", finished.len());
    }
    assert!(finished.len() >= 20, "{}", finished.len());
    both.lender.scrub();
    assert!(matches!(both.lender.poll(now), Work::Asleep(None)));
}
