use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rackbus_fabric::Access;

use super::*;
use crate::doorbell::Doorbell;
use crate::event::Event;
use crate::region::{Region, SharedMemory};

const LONG: Option<Duration> = Some(Duration::from_secs(30));

fn engine(channels: usize) -> CopyEngine {
    CopyEngine::start("copy", &CopyEngineOptions { channels, ..CopyEngineOptions::default() })
        .unwrap()
}

fn memory(bytes: usize) -> SharedMemory {
    SharedMemory::create("copy", bytes as u64).unwrap()
}

fn copy(from: &SharedMemory, to: &SharedMemory, at: usize, length: usize) -> Transaction {
    let (source, destination) =
        (CopyLocation::shared(from.region(), at), CopyLocation::shared(to.region(), at));
    Transaction::of(source, destination, length).unwrap()
}

/// Keeps a channel busy until the sender is dropped or sends.
fn hold(channel: &Channel) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (entered, inside) = mpsc::channel();
    let _ = channel.submit(Transaction::new().then(move |_| {
        entered.send(()).unwrap();
        let _ = held.recv();
    }));
    inside.recv().unwrap();
    release
}

#[test]
fn copies_what_it_was_told_to() {
    let (from, to) = (memory(1 << 20), memory(1 << 20));
    from.whole().fill(7);
    let engine = engine(1);
    let channel = &engine.channels()[0];
    let mut list = Transaction::new().merging_up_to(0);
    for page in [3, 5, 6] {
        let source = CopyLocation::shared(from.region(), page << 12);
        list.add(source, CopyLocation::shared(to.region(), page << 12), 4096).unwrap();
    }
    let tickets = channel.submit_all([copy(&from, &to, 8, 8), list, Transaction::new()]);
    for ticket in &tickets {
        assert_eq!(ticket.wait(LONG), TransactionState::Done);
        assert_eq!(ticket.poll(), TransactionState::Done);
    }
    let mut bytes = vec![0; 1 << 20];
    to.whole().copy_to(&mut bytes);
    for (at, byte) in bytes.iter().enumerate() {
        let copied = (8..16).contains(&at) || [3, 5, 6].contains(&(at >> 12));
        assert_eq!(*byte, if copied { 7 } else { 0 }, "{at}");
    }
    let statistics = channel.statistics();
    assert_eq!((statistics.transactions, statistics.pieces, statistics.merged), (3, 4, 0));
    assert_eq!(statistics.bytes, 8 + 3 * 4096);
    assert_eq!(channel.backlog(), 0);
}

#[test]
fn memory_of_this_process_can_be_copied_from_and_to() {
    let shared = memory(4096);
    let (mut from, mut to) = (vec![9u8; 100], vec![0u8; 100]);
    let engine = engine(1);
    let place = |bytes: &mut Vec<u8>| {
        let start = std::ptr::NonNull::new(bytes.as_mut_ptr()).unwrap();
        // SAFETY: the vectors are looked at only after both transactions have ended.
        unsafe { CopyLocation::own(start, bytes.len()) }
    };
    let out =
        Transaction::of(place(&mut from), CopyLocation::shared(shared.region(), 5), 100).unwrap();
    let back =
        Transaction::of(CopyLocation::shared(shared.region(), 5), place(&mut to), 100).unwrap();
    assert!(
        Transaction::of(place(&mut from), CopyLocation::shared(shared.region(), 5), 101).is_err()
    );
    for ticket in engine.least_busy().submit_all([out, back]) {
        assert_eq!(ticket.wait(LONG), TransactionState::Done);
    }
    assert_eq!(to, from);
}

#[test]
fn tells_at_the_end_on_the_channel_and_by_doorbell() {
    let (from, to) = (memory(4096), memory(4096));
    let bells = memory(4096);
    let bell = Doorbell::new(bells.region().clone(), 0, Event::new().unwrap()).unwrap();
    let bell = Arc::new(bell);
    let engine = engine(1);
    let channel = engine.channels()[0].clone();
    let (tell, told) = mpsc::channel();
    // What runs at the end may submit again.
    let again = {
        let (from, to, channel) = (from.clone(), to.clone(), channel.clone());
        move |state| {
            let last = copy(&from, &to, 0, 1).then(move |state| tell.send(state).unwrap());
            assert_eq!(state, TransactionState::Done);
            let _ = channel.submit(last);
        }
    };
    drop(channel.submit(copy(&from, &to, 0, 1).ring(bell.clone()).then(again)));
    assert_eq!(told.recv().unwrap(), TransactionState::Done);
    let mut spin = AdaptiveSpin::default();
    assert_eq!(bell.wait(0, &mut spin, LONG), Ok(1));
    // A panic there ends nothing.
    let ticket = channel.submit(Transaction::new().then(|_| panic!("on purpose")));
    assert_eq!(ticket.wait(LONG), TransactionState::Done);
    assert_eq!(channel.submit(copy(&from, &to, 0, 1)).wait(LONG), TransactionState::Done);
}

#[test]
fn aborts_what_has_not_begun_and_what_the_engine_leaves() {
    let (from, to) = (memory(4096), memory(4096));
    from.whole().fill(1);
    let engine = engine(1);
    let channel = engine.channels()[0].clone();
    let release = hold(&channel);
    let aborted = channel.submit(copy(&from, &to, 0, 4096));
    let done = channel.submit(copy(&from, &to, 4000, 1));
    assert_eq!(done.wait(Some(Duration::from_micros(200))), TransactionState::Posted);
    aborted.abort();
    aborted.abort();
    assert_eq!(aborted.poll(), TransactionState::Posted);
    release.send(()).unwrap();
    assert_eq!(aborted.wait(LONG), TransactionState::Aborted);
    assert_eq!(done.wait(LONG), TransactionState::Done);
    done.abort();
    assert_eq!(done.poll(), TransactionState::Done);
    assert_eq!(to.whole().read_obj::<u8>(0), Some(0));
    assert_eq!(to.whole().read_obj::<u8>(4000), Some(1));
    assert_eq!(channel.statistics().aborts, 1);
    assert_eq!(channel.shared_aborts(), 0);

    let release = hold(&channel);
    let left = channel.submit(copy(&from, &to, 0, 1));
    let stopping = std::thread::spawn(move || drop(engine));
    drop(release);
    stopping.join().unwrap();
    // It may have been carried out before the engine was told to end.
    assert!(left.wait(LONG).ended());
    let (tell, told) = mpsc::channel();
    let late = channel.submit(copy(&from, &to, 0, 1).then(move |state| tell.send(state).unwrap()));
    assert_eq!(late.poll(), TransactionState::Aborted);
    assert_eq!(told.recv().unwrap(), TransactionState::Aborted);
}

#[test]
fn a_large_copy_is_aborted_on_its_way() {
    let (from, to) = (memory(256 << 20), memory(256 << 20));
    let engine = engine(1);
    let ticket = engine.channels()[0].submit(copy(&from, &to, 0, 256 << 20));
    ticket.abort();
    assert_eq!(ticket.wait(LONG), TransactionState::Aborted);
    assert_eq!(engine.channels()[0].statistics().bytes, 0);
}

#[test]
fn memory_that_is_lost_fails_the_transaction() {
    let good = memory(4 << 12);
    let fd = SharedMemory::reserve("copy", 4096).unwrap();
    let revoked = Arc::new(
        Region::map(std::os::fd::AsFd::as_fd(&fd), 0, 4096, Access::READ | Access::WRITE).unwrap(),
    );
    // A file that its owner can truncate.
    let fd = rustix::fs::memfd_create("truncated", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 8192).unwrap();
    let truncated =
        Region::map(std::os::fd::AsFd::as_fd(&fd), 0, 8192, Access::READ | Access::WRITE);
    let truncated = Arc::new(truncated.unwrap());
    let engine = engine(1);
    let channel = &engine.channels()[0];

    let release = hold(channel);
    let to_good = |region| {
        Transaction::of(
            CopyLocation::shared(region, 0),
            CopyLocation::shared(good.region(), 0),
            4096,
        )
        .unwrap()
    };
    let tickets =
        channel.submit_all([to_good(&revoked), to_good(&truncated), to_good(good.region())]);
    revoked.revoke().unwrap();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    drop(release);
    let states: Vec<TransactionState> = tickets.iter().map(|ticket| ticket.wait(LONG)).collect();
    let failed = TransactionState::Failed;
    assert_eq!(
        states,
        [failed(CopyFailure::Revoked), failed(CopyFailure::Truncated), TransactionState::Done]
    );
    assert_eq!(channel.statistics().failures, 2);
    let source = CopyLocation::shared(&truncated, 0);
    let again = Transaction::of(source, CopyLocation::shared(good.region(), 0), 1);
    assert_eq!(again.unwrap_err(), PieceError::Lost(CopyFailure::Truncated));
}

#[test]
fn many_submitters_and_channels_lose_nothing() {
    const EACH: u32 = 3000;
    let (from, to) = (memory(4096), memory(4096));
    let engine = engine(2);
    let ended = Arc::new(AtomicU32::new(0));
    std::thread::scope(|scope| {
        for submitter in 0..3u32 {
            let (engine, ended, from, to) = (&engine, &ended, &from, &to);
            scope.spawn(move || {
                let mut tickets = Vec::new();
                for number in 0..EACH {
                    let ended = ended.clone();
                    let transaction = copy(from, to, (submitter * 64) as usize, 64);
                    let transaction = transaction.then(move |_| {
                        ended.fetch_add(1, Ordering::Relaxed);
                    });
                    let ticket = engine.least_busy().submit(transaction);
                    // Some are left, some waited for at once, some at the end.
                    match number % 3 {
                        0 => drop(ticket),
                        1 => assert_eq!(ticket.wait(LONG), TransactionState::Done),
                        _ => tickets.push(ticket),
                    }
                }
                for ticket in tickets {
                    assert_eq!(ticket.wait(LONG), TransactionState::Done);
                }
            });
        }
    });
    let total: u64 =
        engine.channels().iter().map(|channel| channel.statistics().transactions).sum();
    drop(engine);
    assert!(total <= u64::from(3 * EACH));
    assert_eq!(ended.load(Ordering::Relaxed), 3 * EACH);
}

/// Parties of whom one is gone, or none.
struct Gone {
    gone: bool,
    released: AtomicU32,
}

impl TransferParties for Gone {
    fn are_gone(&self) -> bool {
        assert_eq!(self.released.load(Ordering::Relaxed), 0);
        self.gone
    }

    fn release(&self) {
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn how_a_copy_ended_is_decided_when_it_ends() {
    let engine = CopyEngine::start("test", &CopyEngineOptions::default()).unwrap();
    let memory = SharedMemory::create("copy", 4096).unwrap();
    let place = |offset| CopyLocation::shared(memory.region(), offset);
    for gone in [false, true] {
        let parties = Arc::new(Gone { gone, released: AtomicU32::new(0) });
        let transaction = Transaction::of(place(0), place(64), 64).unwrap();
        let transaction = transaction.between(parties.clone());
        let ticket = engine.least_busy().submit(transaction);
        let ended =
            if gone { TransactionState::Failed(CopyFailure::Gone) } else { TransactionState::Done };
        assert_eq!(ticket.wait(None), ended);
        assert_eq!(parties.released.load(Ordering::Relaxed), 1, "they are released before");
        assert_eq!(ticket.poll(), ended);
    }
    assert_eq!(engine.channels()[0].statistics().failures, 1);
}
