//! Channels: threads that carry transactions out, in the order in which they were submitted.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;

use super::published::PublishedSlot;
use super::queue::CopyQueue;
use super::ticket::{CopyFailure, PostingHold, Ticket, TransactionState, post};
use super::transaction::{Transaction, copy_piece};
use crate::guard;
use crate::spin::{AdaptiveSpin, Spinning, nanoseconds};

/// Transactions between two updates of the busy time.
const BUSY_UPDATE: u64 = 64;

/// What a channel did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Transactions that ended, in whatever way.
    pub transactions: u64,
    /// Pieces that were added to them.
    pub pieces: u64,
    /// Pieces that were merged into the one before.
    pub merged: u64,
    /// Bytes of transactions that are done.
    pub bytes: u64,
    /// Nanoseconds in which the channel had something to do.
    pub busy_ns: u64,
    /// Number of transactions that failed.
    pub failures: u64,
    /// Transactions that were aborted.
    pub aborts: u64,
}

impl Statistics {
    /// The sum of both, number by number; the greatest number where it is more.
    #[must_use]
    pub fn plus(self, other: Statistics) -> Statistics {
        self.each(other, u64::saturating_add)
    }

    /// The sum of both, number by number, which begins anew after the greatest number.
    #[must_use]
    pub fn plus_wrapping(self, other: Statistics) -> Statistics {
        self.each(other, u64::wrapping_add)
    }

    /// The greater of both, number by number.
    #[must_use]
    pub fn at_least(self, other: Statistics) -> Statistics {
        self.each(other, u64::max)
    }

    /// What was added since `earlier`, number by number.
    #[must_use]
    pub fn since(self, earlier: Statistics) -> Statistics {
        self.each(earlier, u64::saturating_sub)
    }

    fn each(self, other: Statistics, join: fn(u64, u64) -> u64) -> Statistics {
        Statistics {
            transactions: join(self.transactions, other.transactions),
            pieces: join(self.pieces, other.pieces),
            merged: join(self.merged, other.merged),
            bytes: join(self.bytes, other.bytes),
            busy_ns: join(self.busy_ns, other.busy_ns),
            failures: join(self.failures, other.failures),
            aborts: join(self.aborts, other.aborts),
        }
    }
}

/// The counters behind [`Statistics`]; only the channel writes them.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counters {
    transactions: AtomicU64,
    pieces: AtomicU64,
    merged: AtomicU64,
    bytes: AtomicU64,
    busy_ns: AtomicU64,
    failures: AtomicU64,
    aborts: AtomicU64,
    /// Bytes of all that ended, to be compared with those submitted.
    ended_bytes: AtomicU64,
}

impl Counters {
    fn read(&self) -> Statistics {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Statistics {
            transactions: read(&self.transactions),
            pieces: read(&self.pieces),
            merged: read(&self.merged),
            bytes: read(&self.bytes),
            busy_ns: read(&self.busy_ns),
            failures: read(&self.failures),
            aborts: read(&self.aborts),
        }
    }
}

fn add(counter: &AtomicU64, value: u64) {
    // One writer: no locked instruction is needed.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

/// What submitters tell the channel beside the queue: rarely written, so the channel looks at it
/// for nothing.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Signals {
    /// The channel sleeps, or is about to.
    asleep: AtomicBool,
    stopping: AtomicBool,
    /// Postings that are marked to be aborted and have not ended.
    pub aborts_asked: AtomicU32,
}

/// An entry of the queue: all of a transaction of one piece, so that the channel needs nothing
/// else to carry it out.
#[derive(Debug)]
struct Entry {
    held: PostingHold,
    /// The first piece's; its bytes are `bytes` if it is the only one.
    source: *const u8,
    destination: *mut u8,
    bytes: u64,
    replaced_before: u32,
    /// Number of pieces that were added.
    added: u32,
    /// Number of pieces after adjacent ones were merged.
    pieces: u32,
    /// Whether somebody has a say in the end, or is to be told of it.
    tells: bool,
}

const _: () = assert!(CopyQueue::<Entry>::SLOT_BYTES == 64, "a submission is one cache line");

// SAFETY: the addresses are the transaction's, which is `Send`.
unsafe impl Send for Entry {}

impl Entry {
    fn new(transaction: Transaction, signals: &Arc<Signals>) -> (Ticket, Entry) {
        let (source, destination) = transaction.first();
        let (bytes, replaced_before) = (transaction.bytes(), transaction.replaced_before() as u32);
        let added = transaction.added.try_into().unwrap_or(u32::MAX);
        let pieces = transaction.pieces().try_into().unwrap_or(u32::MAX);
        let tells = transaction.tells();
        let (ticket, held) = post(transaction, signals.clone());
        (ticket, Entry { held, source, destination, bytes, replaced_before, added, pieces, tells })
    }
}

#[derive(Debug)]
struct Shared {
    queue: CopyQueue<Entry>,
    signals: Arc<Signals>,
    counters: Counters,
    /// Bytes of all that was submitted.
    submitted: AtomicU64,
}

/// How others reach a channel; cheap to clone.
#[derive(Debug, Clone)]
pub struct Channel {
    shared: Arc<Shared>,
    thread: Thread,
}

impl Channel {
    /// Starts the thread of one.
    pub(super) fn start(
        name: String,
        spin: AdaptiveSpin,
        cpu: Option<usize>,
    ) -> std::io::Result<(Channel, JoinHandle<()>)> {
        let shared = Arc::new(Shared {
            queue: CopyQueue::new(),
            signals: Arc::default(),
            counters: Counters::default(),
            submitted: AtomicU64::new(0),
        });
        let published = PublishedSlot::take();
        let runner = Runner { shared: shared.clone(), spin, taken: 0, published };
        let thread = crate::threads::spawn(name, move || {
            if let Some(cpu) = cpu {
                pin(cpu);
            }
            runner.run();
        })?;
        Ok((Channel { shared, thread: thread.thread().clone() }, thread))
    }

    /// Submits a transaction, behind all others. When the engine has stopped, it is aborted.
    pub fn submit(&self, transaction: Transaction) -> Ticket {
        let ticket = self.put(transaction);
        self.wake();
        ticket
    }

    /// Submits several at once: a channel that sleeps is woken once.
    pub fn submit_all(&self, transactions: impl IntoIterator<Item = Transaction>) -> Vec<Ticket> {
        let tickets = transactions.into_iter().map(|transaction| self.put(transaction)).collect();
        self.wake();
        tickets
    }

    /// What it did so far.
    pub fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }

    /// Bytes that were submitted and have not ended.
    pub fn backlog(&self) -> u64 {
        let submitted = self.shared.submitted.load(Ordering::Relaxed);
        // The counters are read one after the other: more may have ended than was submitted then.
        submitted.saturating_sub(self.shared.counters.ended_bytes.load(Ordering::Relaxed))
    }

    #[cfg(test)]
    pub(super) fn shared_aborts(&self) -> u32 {
        self.shared.signals.aborts_asked.load(Ordering::Relaxed)
    }

    fn put(&self, transaction: Transaction) -> Ticket {
        let shared = &*self.shared;
        shared.submitted.fetch_add(transaction.bytes(), Ordering::Relaxed);
        let (ticket, entry) = Entry::new(transaction, &shared.signals);
        if let Err(entry) = shared.queue.put(entry) {
            end(&shared.signals, entry, TransactionState::Aborted);
        }
        ticket
    }

    fn wake(&self) {
        // Pairs with the fence in `Runner::sleep`: either the channel sees what was put before it
        // sleeps, or this sees it asleep.
        fence(Ordering::SeqCst);
        if self.shared.signals.asleep.load(Ordering::Relaxed) {
            self.thread.unpark();
        }
    }

    /// Tells the thread to end; what waits is aborted.
    pub(super) fn stop(&self) {
        self.shared.queue.close();
        self.shared.signals.stopping.store(true, Ordering::Release);
        self.wake();
    }
}

/// The thread of a channel.
struct Runner {
    shared: Arc<Shared>,
    spin: AdaptiveSpin,
    /// Entries taken out of the queue.
    taken: u64,
    /// Where others read what it did.
    published: Option<PublishedSlot>,
}

impl Runner {
    fn run(mut self) {
        while !self.shared.signals.stopping.load(Ordering::Acquire) {
            match self.next() {
                Some(entry) => self.work(entry),
                None => self.idle(),
            }
        }
        while let Some(entry) = self.next() {
            self.end(entry, TransactionState::Aborted);
        }
        self.publish();
    }

    #[inline]
    fn next(&mut self) -> Option<Entry> {
        // SAFETY: this thread is the only one that takes, and counts in `taken`.
        unsafe { self.shared.queue.take(&mut self.taken) }
    }

    /// Carries out `entry` and all that came meanwhile.
    fn work(&mut self, entry: Entry) {
        let mut since = Instant::now();
        let mut next = Some(entry);
        while let Some(mut entry) = next {
            let state = self.carry_out(&mut entry);
            self.end(entry, state);
            if self.taken.is_multiple_of(BUSY_UPDATE) {
                self.count_busy(&mut since);
            }
            if self.shared.signals.stopping.load(Ordering::Relaxed) {
                break;
            }
            next = self.next();
        }
        self.count_busy(&mut since);
    }

    fn count_busy(&self, since: &mut Instant) {
        let now = Instant::now();
        let busy = u64::try_from((now - *since).as_nanos()).unwrap_or(u64::MAX);
        add(&self.shared.counters.busy_ns, busy);
        *since = now;
        self.publish();
    }

    /// Called where the busy time is counted, and not after each transaction: it costs seven stores.
    fn publish(&self) {
        if let Some(slot) = &self.published {
            slot.publish(self.shared.counters.read());
        }
    }

    fn carry_out(&self, entry: &mut Entry) -> TransactionState {
        let signals = &self.shared.signals;
        let held = &entry.held;
        // The next entry, if it is there, comes while this one is carried out.
        self.shared.queue.prefetch(self.taken);
        let stop = || {
            signals.stopping.load(Ordering::Relaxed)
                || (signals.aborts_asked.load(Ordering::Acquire) != 0 && held.to_abort())
        };
        if stop() {
            return TransactionState::Aborted;
        }
        let whole = match entry.pieces {
            0 => true,
            // Where somebody has a say, it is asked for each piece who brings it to its place.
            1 if !entry.tells => {
                let length = entry.bytes as usize;
                // SAFETY: the piece is the transaction's, which has not ended.
                unsafe { copy_piece(entry.source, entry.destination, length, stop) }
            }
            _ => entry.held.transaction().copy(stop),
        };
        if !whole {
            return TransactionState::Aborted;
        }
        if guard::replaced_count() as u32 != entry.replaced_before
            && let Some(failure) = entry.held.transaction().loss()
        {
            return TransactionState::Failed(failure);
        }
        if entry.tells && entry.held.transaction().gone() {
            return TransactionState::Failed(CopyFailure::Gone);
        }
        TransactionState::Done
    }

    fn end(&self, entry: Entry, state: TransactionState) {
        let counters = &self.shared.counters;
        add(&counters.transactions, 1);
        add(&counters.pieces, entry.added.into());
        add(&counters.merged, (entry.added - entry.pieces).into());
        add(&counters.ended_bytes, entry.bytes);
        match state {
            TransactionState::Failed(_) => add(&counters.failures, 1),
            TransactionState::Aborted => add(&counters.aborts, 1),
            TransactionState::Done | TransactionState::Posted => add(&counters.bytes, entry.bytes),
        }
        end(&self.shared.signals, entry, state);
    }

    /// Looks for work for as long as that pays, then sleeps.
    fn idle(&mut self) {
        let signals = &self.shared.signals;
        let mut spinning = Spinning::new(self.spin.budget());
        while spinning.goes_on() {
            if self.shared.queue.has(self.taken) {
                self.spin.found();
                return;
            }
            if signals.stopping.load(Ordering::Relaxed) {
                return;
            }
        }
        // The spin's beginning was no time to look at the clock.
        let (spun, slept) = (self.spin.budget_ns(), Instant::now());
        signals.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.shared.queue.has(self.taken) && !signals.stopping.load(Ordering::Relaxed) {
            std::thread::park();
        }
        signals.asleep.store(false, Ordering::Relaxed);
        self.spin.waited(spun.saturating_add(nanoseconds(slept.elapsed())));
    }
}

/// Ends an entry and tells who is to be told.
fn end(signals: &Signals, mut entry: Entry, state: TransactionState) {
    let (then, ring) = if entry.tells { entry.held.transaction_mut().told() } else { (None, None) };
    if entry.held.end(state) {
        signals.aborts_asked.fetch_sub(1, Ordering::AcqRel);
    }
    if let Some(then) = then
        && std::panic::catch_unwind(AssertUnwindSafe(|| then(state))).is_err()
    {
        tracing::error!("a callback at the end of a copy panicked");
    }
    if let Some(doorbell) = ring {
        doorbell.ring();
    }
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    if let Err(cause) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %cause, "the channel's thread could not be pinned");
    }
}
