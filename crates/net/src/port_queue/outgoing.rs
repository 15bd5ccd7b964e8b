//! The way from a queue to a station: its ring, or what is known of why there is none.

use rackbus_memory::FrameSender;

use crate::liveness::Liveness;
use crate::pressure::Pressure;

/// How long after a failure a ring is not asked for again.
const AGAIN_NS: u64 = 100_000_000;

/// For how long frames wait for rings that are being opened (pure): a node opens one at once, but its threads may have
/// to wait for a processor. Whoever did not answer in this time is not waited for again, and for a while nobody is: a
/// machine that died had many stations, and each would stop the queue again.
#[derive(Debug)]
pub(super) struct OpeningPatience {
    /// How long a ring is waited for.
    wait_ns: u64,
    /// Since this time rings are waited for.
    from_ns: u64,
}

impl OpeningPatience {
    /// That of a queue which `waits` for its receivers.
    pub fn new(waits: bool) -> OpeningPatience {
        let wait_ns = if waits { OPENING_NS } else { OPENING_FROM_OUTSIDE_NS };
        OpeningPatience { wait_ns, from_ns: 0 }
    }

    /// How long a ring is waited for that is asked for at `now_ns`.
    fn wait_ns(&self, now_ns: u64) -> u64 {
        if now_ns < self.from_ns { 0 } else { self.wait_ns }
    }

    /// One was waited for in vain.
    fn failed(&mut self, now_ns: u64) {
        self.from_ns = now_ns.saturating_add(IN_VAIN_NS);
    }
}

/// How long the frames of a host or a function wait for a ring.
const OPENING_NS: u64 = 500_000_000;
/// The same of an uplink's: what comes from outside is for many stations.
const OPENING_FROM_OUTSIDE_NS: u64 = 50_000_000;
/// For how long no ring is waited for after one that did not come.
const IN_VAIN_NS: u64 = 1_000_000_000;

/// What a queue has of a station.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// Nothing: a ring is asked for with the first frame, from this time on.
    Closed { from_ns: u64, patient: bool },
    /// A ring was asked for; until this time it is waited for, where it still is.
    Opening { until_ns: Option<u64> },
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
    pub fn ready(&mut self, now_ns: u64, patience: &mut OpeningPatience) -> (Ready, bool) {
        match self {
            Outgoing::Open { .. } => (Ready::Open, false),
            Outgoing::Closed { from_ns, .. } if now_ns < *from_ns => (Ready::Down, false),
            Outgoing::Closed { patient, .. } => {
                let wait_ns = if *patient { patience.wait_ns(now_ns) } else { 0 };
                let until_ns = (wait_ns > 0).then(|| now_ns.saturating_add(wait_ns));
                *self = Outgoing::Opening { until_ns };
                (if until_ns.is_some() { Ready::Wait } else { Ready::Down }, true)
            }
            Outgoing::Opening { until_ns: Some(until_ns) } if now_ns < *until_ns => {
                (Ready::Wait, false)
            }
            Outgoing::Opening { until_ns } => {
                if until_ns.take().is_some() {
                    patience.failed(now_ns);
                }
                (Ready::Down, false)
            }
        }
    }
}
