//! The way from a queue to a station: its ring, or what is known of why there is none.

use rackbus_memory::FrameSender;

use crate::liveness::Liveness;
use crate::pressure::Pressure;

/// How long after a failure a ring is not asked for again.
const AGAIN_NS: u64 = 100_000_000;

/// How long frames wait for a ring to be opened: a node does it at once, and its threads may have to wait for a
/// processor. Whoever did not answer in this time is not waited for again.
const OPENING_NS: u64 = 500_000_000;

/// What a queue has of a station.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Nothing: a ring is asked for with the first frame, from this time on.
    Closed { from_ns: u64, patient: bool },
    /// A ring was asked for; until this time it is waited for.
    Opening { until_ns: u64 },
    /// Frames go to this ring.
    Open {
        sender: Box<FrameSender>,
        pressure: Pressure,
        /// Frames that went into it.
        sent: u64,
        liveness: Liveness,
        /// Something was sent since the last flush.
        touched: bool,
    },
}

/// Whether a ring can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    Open,
    /// The ring is being opened: ask again.
    Wait,
    /// Not now: frames are dropped.
    Down,
}

impl Default for Outgoing {
    fn default() -> Self {
        Outgoing::Closed { from_ns: 0, patient: true }
    }
}

impl Outgoing {
    pub fn open(sender: FrameSender) -> Outgoing {
        Outgoing::Open {
            sender: Box::new(sender),
            pressure: Pressure::default(),
            sent: 0,
            liveness: Liveness::default(),
            touched: false,
        }
    }

    /// After a ring was lost at `now_ns`.
    pub fn lost(now_ns: u64) -> Outgoing {
        Outgoing::Closed { from_ns: now_ns, patient: true }
    }

    /// After none was available at `now_ns`.
    pub fn failed(now_ns: u64) -> Outgoing {
        Outgoing::Closed { from_ns: now_ns.saturating_add(AGAIN_NS), patient: false }
    }

    /// Whether it can be used at `now_ns`, and whether a ring is to be asked for now.
    pub fn ready(&mut self, now_ns: u64) -> (Ready, bool) {
        match self {
            Outgoing::Open { .. } => (Ready::Open, false),
            Outgoing::Closed { from_ns, .. } if now_ns < *from_ns => (Ready::Down, false),
            Outgoing::Closed { patient, .. } => {
                let wait_ns = if *patient { OPENING_NS } else { 0 };
                *self = Outgoing::Opening { until_ns: now_ns.saturating_add(wait_ns) };
                (if wait_ns > 0 { Ready::Wait } else { Ready::Down }, true)
            }
            Outgoing::Opening { until_ns } if now_ns < *until_ns => (Ready::Wait, false),
            Outgoing::Opening { .. } => (Ready::Down, false),
        }
    }
}
