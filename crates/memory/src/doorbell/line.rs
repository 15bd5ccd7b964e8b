//! The 64 bytes of a doorbell, and how ringing meets waiting in them.
//!
//! One word holds both the count of rings and the sleepers' *turn*, which is odd while somebody
//! sleeps or is about to. A ring is one addition, and the value before it tells whether anybody
//! has to be woken. Both sides change the same word, so one of the two comes first: a ring that
//! comes later sees the announcement, an announcement that comes later sees the ring.
//!
//! Who sleeps, sleeps only while the turn is the one it announced; who has to wake moves the turn
//! on first, so nobody who looked before that falls asleep after it. The turn never goes back: a
//! sleeper that died leaves one needless wake-up behind, and nothing else.
//!
//! A peer may write anything here. That can wake somebody for nothing or let a ring be missed
//! until the next look; nothing here repeats because of it.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// One step of the turn, which is in the word's upper half; also the bit that says "asleep".
const TURN: u64 = 1 << 32;

fn count_of(state: u64) -> u32 {
    state as u32
}

fn turn_of(state: u64) -> u32 {
    (state >> 32) as u32
}

/// A doorbell's line, as it lies in memory: the count in bytes 0 to 3, the sleepers' turn in 4 to
/// 7, then two flags.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct DoorbellLine {
    state: AtomicU64,
    closed: AtomicU32,
    armed: AtomicU32,
}

/// Whom a ring has to wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) struct Wake {
    /// All who sleep on the turn.
    pub sleepers: bool,
    /// Who polls the event.
    pub poller: bool,
}

/// What somebody who waits finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// The same count as before.
    Same,
    /// Rings came: the count now.
    Rung(u32),
    /// No ring will come any more.
    Closed,
}

impl DoorbellLine {
    /// A line that rang `count` times; only tests begin anywhere but at zero.
    #[cfg(loom)]
    #[allow(dead_code, reason = "used by the models, which compile this file by themselves")]
    pub fn at(count: u32) -> DoorbellLine {
        DoorbellLine { state: AtomicU64::new(count.into()), ..DoorbellLine::default() }
    }

    /// The rings so far, modulo 2^32.
    #[inline]
    pub fn count(&self) -> u32 {
        count_of(self.state.load(Ordering::Acquire))
    }

    /// Counts a ring and says whom to wake.
    #[inline]
    pub fn ring(&self) -> Wake {
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        let sleepers = turn_of(before) & 1 == 1;
        if sleepers {
            // Two rings may both move it, and the count's carry does: then it may be odd with
            // nobody asleep, and the next ring wakes for nothing.
            self.state.fetch_add(TURN, Ordering::AcqRel);
        }
        let armed = self.armed.load(Ordering::Acquire) != 0;
        Wake { sleepers, poller: armed && self.armed.swap(0, Ordering::AcqRel) != 0 }
    }

    /// Whether somebody sleeps who is to be woken without a ring.
    pub fn rouse(&self) -> bool {
        // A change, not a load: it comes before or after each announcement.
        let asleep = turn_of(self.state.fetch_add(0, Ordering::AcqRel)) & 1 == 1;
        if asleep {
            self.state.fetch_add(TURN, Ordering::AcqRel);
        }
        asleep
    }

    /// Closes for ever and says whom to wake. Counts as a ring, so that nobody falls asleep who
    /// looked before.
    pub fn close(&self) -> Wake {
        self.closed.store(1, Ordering::Release);
        self.ring()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// What has changed since the count was `seen`.
    #[inline]
    pub fn look(&self, seen: u32) -> Look {
        let count = self.count();
        self.judge(count, seen)
    }

    /// Announces that the caller is about to sleep: the turn to sleep with, unless there is no
    /// need to.
    pub fn announce(&self, seen: u32) -> Result<u32, Look> {
        let before = self.state.fetch_or(TURN, Ordering::AcqRel);
        match self.judge(count_of(before), seen) {
            Look::Same => Ok(turn_of(before) | 1),
            look => Err(look),
        }
    }

    /// Asks that the next ring wakes the poller; what has changed already since `seen`.
    pub fn arm(&self, seen: u32) -> Look {
        self.armed.store(1, Ordering::Release);
        // A change, not a load: it comes before or after each ring's, see above.
        let state = self.state.fetch_add(0, Ordering::AcqRel);
        self.judge(count_of(state), seen)
    }

    fn judge(&self, count: u32, seen: u32) -> Look {
        if self.is_closed() {
            Look::Closed
        } else if count == seen {
            Look::Same
        } else {
            Look::Rung(count)
        }
    }

    /// The word that holds the turn, for whoever sleeps on it. Never accessed as such here.
    #[allow(dead_code, reason = "the model of sleeping in the loom tests loads the turn instead")]
    pub fn turn_word(&self) -> *const u32 {
        const { assert!(cfg!(target_endian = "little"), "the turn is the word's second half") };
        (&raw const self.state).cast::<u32>().wrapping_add(1)
    }

    /// Number of the turn that has begun last.
    #[allow(dead_code, reason = "only the model of sleeping in the loom tests asks")]
    pub fn turn(&self) -> u32 {
        turn_of(self.state.load(Ordering::Acquire))
    }
}
