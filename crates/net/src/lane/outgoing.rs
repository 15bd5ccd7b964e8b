//! The way from a lane to a station: its ring, or what is known of why there is none.

use rackbus_memory::FrameSender;

use crate::pressure::{Advice, Pressure};

/// How long after a failure a ring is not asked for again.
const AGAIN_NS: u64 = 100_000_000;

/// What a lane has of a station.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Nothing: a ring is asked for with the first frame, from this time on.
    Closed { from_ns: u64 },
    /// A ring was asked for.
    Opening { pressure: Pressure },
    /// Its ring.
    Open {
        sender: Box<FrameSender>,
        pressure: Pressure,
        /// Something was sent since the last flush.
        touched: bool,
    },
}

/// Whether a ring can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    Open,
    /// In a moment.
    Wait,
    /// Not now: frames are dropped.
    Down,
}

impl Default for Outgoing {
    fn default() -> Self {
        Outgoing::Closed { from_ns: 0 }
    }
}

impl Outgoing {
    pub fn open(sender: FrameSender) -> Outgoing {
        Outgoing::Open { sender: Box::new(sender), pressure: Pressure::default(), touched: false }
    }

    /// After a failure at `now_ns`.
    pub fn down(now_ns: u64) -> Outgoing {
        Outgoing::Closed { from_ns: now_ns.saturating_add(AGAIN_NS) }
    }

    /// Whether it can be used at `now_ns`, and whether a ring is to be asked for now.
    pub fn ready(&mut self, now_ns: u64) -> (Ready, bool) {
        match self {
            Outgoing::Open { .. } => (Ready::Open, false),
            Outgoing::Closed { from_ns } if now_ns < *from_ns => (Ready::Down, false),
            Outgoing::Closed { .. } => {
                let mut pressure = Pressure::default();
                pressure.is_full(now_ns);
                *self = Outgoing::Opening { pressure };
                (Ready::Wait, true)
            }
            // Who is asked may stand still.
            Outgoing::Opening { pressure } => match pressure.is_full(now_ns) {
                Advice::Wait => (Ready::Wait, false),
                Advice::Drop => (Ready::Down, false),
            },
        }
    }
}
