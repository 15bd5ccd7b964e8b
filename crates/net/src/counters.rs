//! What the ports of a network count. One thread adds, anybody reads.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::port::Cause;

/// A number that one thread adds to.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds to it: a load and a store, which need no locked instruction.
    #[inline]
    pub fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    /// Makes it another number.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// What it is now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why frames are dropped, in the order in which they are counted.
pub const CAUSES: [Cause; 9] = [
    Cause::Full,
    Cause::Unknown,
    Cause::Spoofed,
    Cause::Vlan,
    Cause::Length,
    Cause::Offload,
    Cause::Rate,
    Cause::Down,
    Cause::Unread,
];

impl Cause {
    /// A word for programs.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Full => "full",
            Cause::Unknown => "unknown",
            Cause::Spoofed => "spoofed",
            Cause::Vlan => "vlan",
            Cause::Length => "length",
            Cause::Offload => "offload",
            Cause::Rate => "rate",
            Cause::Down => "down",
            Cause::Unread => "unread",
        }
    }
}

/// Frames that were dropped, by cause.
#[derive(Debug, Default)]
pub struct Drops([Count; CAUSES.len()]);

impl Drops {
    /// Counts one frame that was dropped for `cause`.
    #[inline]
    pub fn count(&self, cause: Cause) {
        self.add(cause, 1);
    }

    /// Counts `frames` dropped frames.
    #[inline]
    pub fn add(&self, cause: Cause, frames: u64) {
        let place = CAUSES.iter().position(|it| *it == cause).unwrap_or(0);
        self.0[place].add(frames);
    }

    /// How many there were of each.
    pub fn all(&self) -> impl Iterator<Item = (Cause, u64)> {
        CAUSES.into_iter().zip(self.0.iter().map(Count::get))
    }
}

/// What a port exchanged with one other.
#[derive(Debug, Default)]
pub struct PeerCounters {
    /// Frames sent to it.
    pub sent: Count,
    /// Bytes of the frames sent.
    pub sent_bytes: Count,
    /// Frames that came from it.
    pub received: Count,
    /// Bytes of the frames received.
    pub received_bytes: Count,
    /// Frames for it that were dropped here, and frames from it that make no sense.
    pub drops: Drops,
    /// Bytes in its ring that it had not taken when the last burst was sent.
    pub waiting_bytes: Count,
    /// Times that its ring was opened.
    pub opened: Count,
    /// 1 while its ring is open.
    pub is_open: Count,
}

/// How the thread of a port spends its time.
#[derive(Debug, Default)]
pub struct PaceCounters {
    /// Rounds in which there was something to do.
    pub busy_polls: Count,
    /// Rounds in which there was nothing.
    pub idle_polls: Count,
    /// Nanoseconds between the begin and the end of all sleeps.
    pub asleep_ns: Count,
    /// Since when it sleeps, on the same clock; 0 while it is awake.
    pub asleep_since: Count,
    /// Times that it went to sleep.
    pub sleeps: Count,
    /// Since when the time is counted, on the same clock.
    pub since_ns: Count,
}

impl PaceCounters {
    /// Nanoseconds that it has slept until `now_ns`, with those of a sleep that lasts still.
    pub fn asleep_by(&self, now_ns: u64) -> u64 {
        let since = self.asleep_since.get();
        let current = if since > 0 { now_ns.saturating_sub(since) } else { 0 };
        self.asleep_ns.get().saturating_add(current)
    }
}

/// All that a queue of a port counts.
#[derive(Debug)]
pub struct LaneCounters {
    /// By the number of the other station.
    pub peers: Vec<PeerCounters>,
    /// Frames for groups that were sent.
    pub groups: Count,
    /// Questions for the station that has an address, which were answered here and sent to nobody.
    pub answered: Count,
    /// Frames that were dropped before their receiver was known.
    pub drops: Drops,
    /// Frames that a capture had no room for.
    pub not_captured: Count,
    /// Of the thread that drives it, where the network has that.
    pub pace: PaceCounters,
}

impl LaneCounters {
    /// Those of a queue in a network of so many stations.
    pub fn new(stations: usize) -> LaneCounters {
        LaneCounters {
            peers: (0..stations).map(|_| PeerCounters::default()).collect(),
            groups: Count::default(),
            answered: Count::default(),
            drops: Drops::default(),
            not_captured: Count::default(),
            pace: PaceCounters::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_that_lasts_still_counts() {
        let pace = PaceCounters::default();
        pace.asleep_ns.add(100);
        assert_eq!(pace.asleep_by(5_000), 100);
        pace.asleep_since.set(2_000);
        assert_eq!(pace.asleep_by(5_000), 3_100);
        // By a clock that was read before.
        assert_eq!(pace.asleep_by(1_000), 100);
    }
}
