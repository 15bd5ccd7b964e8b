//! What a submitter holds of a transaction: its state, and how to wait for its end.
//!
//! The transaction lies in memory that the ticket and the channel share without counting: one
//! word says how far it is and who has released it. The channel's last access to it is the exchange
//! that ends it; whoever finds the other gone frees it. So an ended transaction is one transfer of
//! a cache line, and its regions are released by the thread that submitted it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::channel::Signals;
use super::transaction::Transaction;
use crate::spin::Spinning;

/// Why a transaction failed. Some of its bytes may have been copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyFailure {
    /// The owner of a region truncated its file.
    #[error("the owner of the memory truncated it")]
    Truncated,
    /// A region was revoked: its memory was taken away.
    #[error("the memory was taken away")]
    Revoked,
    /// Whom the bytes are from or for was gone when they were copied
    /// ([`Transaction::between`]).
    #[error("the process at the other end of the copy is gone")]
    Gone,
}

/// How far a transaction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransactionState {
    /// Submitted, and not ended yet.
    Posted,
    /// All bytes are copied.
    Done,
    /// Ended by [`Ticket::abort`] or with its channel; some of its bytes may have been copied.
    Aborted,
    /// Ended because memory was lost.
    Failed(CopyFailure),
}

impl TransactionState {
    /// Whether it has ended.
    pub fn ended(self) -> bool {
        self != TransactionState::Posted
    }

    fn to_word(self) -> u32 {
        match self {
            TransactionState::Posted => 0,
            TransactionState::Done => 1,
            TransactionState::Aborted => 2,
            TransactionState::Failed(CopyFailure::Truncated) => 3,
            TransactionState::Failed(CopyFailure::Revoked) => 4,
            TransactionState::Failed(CopyFailure::Gone) => 5,
        }
    }

    fn of_word(word: u32) -> TransactionState {
        match word & STATE {
            0 => TransactionState::Posted,
            1 => TransactionState::Done,
            2 => TransactionState::Aborted,
            3 => TransactionState::Failed(CopyFailure::Truncated),
            4 => TransactionState::Failed(CopyFailure::Revoked),
            _ => TransactionState::Failed(CopyFailure::Gone),
        }
    }
}

/// The bits of the word that hold the state; the others mean something only while it is posted.
const STATE: u32 = 0xff;
/// Somebody asked to abort it.
const ABORT: u32 = 1 << 8;
/// Somebody sleeps until it ends.
const AWAITED: u32 = 1 << 9;
/// The ticket was dropped.
const LEFT: u32 = 1 << 10;

/// How long to look at the state before sleeping: about what a wake-up costs.
const SPIN: Duration = Duration::from_micros(50);

/// A transaction on its way through a channel.
#[derive(Debug)]
pub(super) struct Posting {
    word: AtomicU32,
    /// The channel's until it ends, then the ticket's.
    transaction: Transaction,
}

/// The channel's hold on a posting. Must be ended.
#[derive(Debug)]
pub(super) struct PostingHold(NonNull<Posting>);

// SAFETY: the posting is `Send`; the word tells who may access it.
unsafe impl Send for PostingHold {}

/// A submitted transaction, as its submitter sees it. Dropping it aborts nothing.
#[derive(Debug)]
pub struct Ticket {
    posting: NonNull<Posting>,
    signals: Arc<Signals>,
}

// SAFETY: until the end a ticket only accesses the word, which is atomic; afterwards it only drops
// the transaction, which is `Send`.
unsafe impl Send for Ticket {}
// SAFETY: as above; dropping needs the ticket as a whole.
unsafe impl Sync for Ticket {}

/// A ticket and the channel's hold for a transaction.
pub(super) fn post(transaction: Transaction, signals: Arc<Signals>) -> (Ticket, PostingHold) {
    let posting = Box::new(Posting { word: AtomicU32::new(0), transaction });
    let posting = NonNull::from(Box::leak(posting));
    (Ticket { posting, signals }, PostingHold(posting))
}

impl PostingHold {
    /// The word, without touching the transaction beside it.
    fn word(&self) -> &AtomicU32 {
        // SAFETY: the posting lives at least until the channel ends it.
        unsafe { &(*self.0.as_ptr()).word }
    }

    /// The transaction that this is the ticket of.
    pub fn transaction(&self) -> &Transaction {
        // SAFETY: until it ends, the transaction is the channel's alone.
        unsafe { &(*self.0.as_ptr()).transaction }
    }

    /// The transaction, to be changed.
    pub fn transaction_mut(&mut self) -> &mut Transaction {
        // SAFETY: until it ends, the transaction is the channel's alone.
        unsafe { &mut (*self.0.as_ptr()).transaction }
    }

    /// Whether somebody asked to abort it.
    pub fn to_abort(&self) -> bool {
        self.word().load(Ordering::Relaxed) & ABORT != 0
    }

    /// Ends it: whoever waits is woken. True when somebody had asked to abort it.
    pub fn end(self, state: TransactionState) -> bool {
        let word: *const AtomicU32 = self.word();
        let before = self.word().swap(state.to_word(), Ordering::AcqRel);
        if before & LEFT != 0 {
            // SAFETY: the ticket is gone, so this is the last hold; it came from a box.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        } else if before & AWAITED != 0 {
            wake_at(word);
        }
        before & ABORT != 0
    }
}

/// Wakes all who sleep on a word that may be gone already: then nobody sleeps there.
fn wake_at(word: *const AtomicU32) {
    // SAFETY: the system looks for sleepers by the address and does not access what is there.
    unsafe {
        libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}

impl Ticket {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: the posting lives at least as long as the ticket.
        unsafe { &(*self.posting.as_ptr()).word }
    }

    /// The transaction's state at this moment; never waits.
    #[inline]
    pub fn poll(&self) -> TransactionState {
        TransactionState::of_word(self.word().load(Ordering::Acquire))
    }

    /// Waits until it has ended, at most for `timeout` (`None` waits as long as it takes): looks
    /// for a short time, then sleeps. Its state then, which is [`TransactionState::Posted`] when it took too
    /// long.
    pub fn wait(&self, timeout: Option<Duration>) -> TransactionState {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut spinning = Spinning::new(SPIN.min(timeout.unwrap_or(Duration::MAX)));
        while spinning.goes_on() {
            let state = self.poll();
            if state.ended() {
                return state;
            }
        }
        loop {
            let word = self.word().fetch_or(AWAITED, Ordering::AcqRel) | AWAITED;
            let state = TransactionState::of_word(word);
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if state.ended() || left.is_some_and(|left| left.is_zero()) {
                return state;
            }
            let timeout = left.map(|left| rustix::time::Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            // However it ends, the state is looked at again.
            let _ = futex::wait(self.word(), futex::Flags::PRIVATE, word, timeout.as_ref());
        }
    }

    /// Asks that it ends without copying more. It may be done before that is seen; the state
    /// tells.
    pub fn abort(&self) {
        // Counted first: who sees the mark has been counted.
        self.signals.aborts_asked.fetch_add(1, Ordering::AcqRel);
        let before = self.word().fetch_or(ABORT, Ordering::AcqRel);
        if TransactionState::of_word(before).ended() || before & ABORT != 0 {
            self.signals.aborts_asked.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let ended = self.poll().ended()
            || TransactionState::of_word(self.word().fetch_or(LEFT, Ordering::AcqRel)).ended();
        if ended {
            // SAFETY: the channel released it when it ended it, so this is the last hold; it came from
            // a box.
            drop(unsafe { Box::from_raw(self.posting.as_ptr()) });
        }
    }
}
