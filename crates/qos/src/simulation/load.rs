//! What a simulated tenant sends, and what its operations really cost.

use crate::SECOND;
use crate::turn::{MessagePiece, QueuedMessage};

/// How a tenant's messages come: after answers, or whatever becomes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageArrivals {
    /// So many are always under way in each queue: the next comes when one has ended.
    Closed {
        /// Messages under way in each queue.
        depth: u32,
    },
    /// They come whatever becomes of them, at random, on average so many each second over all queues.
    Open {
        /// Messages that come each second, on average.
        per_second: u64,
    },
}

/// What operations are about and cost.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageCosts {
    /// Sizes of the messages in bytes, each as likely as the others.
    pub sizes: Vec<u64>,
    /// Engine time of any operation, in nanoseconds.
    pub fixed_ns: f64,
    /// Engine time for each input byte, in nanoseconds, as the profile has it.
    pub byte_ns: f64,
    /// What the content makes of the profile's time for a byte: a factor within these, drawn for each
    /// message.
    pub factor: (f64, f64),
    /// Output in thousandths of the input.
    pub ratio: u32,
    /// What a policy is told that the output is, in the same unit: the room for it, which may be many times as much.
    pub room: u32,
    /// It may be interrupted at multiples of so many bytes; 0 for nowhere.
    pub granule: u64,
}

/// What a tenant sends: sizes, content, arrivals and queues.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Its queues, 1 at least.
    pub queues: u16,
    /// When its messages come.
    pub arrivals: MessageArrivals,
    /// What the messages are, which decides their cost and output.
    pub content: MessageCosts,
    /// When it begins, in nanoseconds.
    pub begins_ns: u64,
    /// In a closed queue, the next message comes so many nanoseconds after one has ended.
    pub think_ns: u64,
    /// It sends nothing in every second half of a period of so many nanoseconds; 0 for always.
    pub period_ns: u64,
}

impl Load {
    /// One queue in which 32 messages of `size` bytes are always under way, for an engine that takes so
    /// long and puts out as much as goes in.
    pub fn steady(size: u64, fixed_ns: f64, byte_ns: f64) -> Load {
        let content = MessageCosts {
            sizes: vec![size],
            fixed_ns,
            byte_ns,
            factor: (1.0, 1.0),
            ratio: 1000,
            room: 1000,
            granule: 1024,
        };
        let arrivals = MessageArrivals::Closed { depth: 32 };
        Load { queues: 1, arrivals, content, begins_ns: 0, think_ns: 0, period_ns: 0 }
    }
}

/// An operation as it really is.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimulatedOperation {
    pub(super) arrived: u64,
    size: u64,
    fixed_ns: f64,
    expected_byte_ns: f64,
    byte_ns: f64,
    ratio: u32,
    room: u32,
    granule: u64,
}

impl SimulatedOperation {
    /// What a policy is told.
    pub(super) fn message(&self, tag: u64) -> QueuedMessage {
        let cost = self.fixed_ns + self.size as f64 * self.expected_byte_ns;
        QueuedMessage {
            tag,
            ingress: self.size,
            egress: self.size * u64::from(self.room) / 1000,
            cost_ns: cost as u64,
            granule: self.granule,
            done: 0,
        }
    }

    /// How many bytes an engine does of `piece` within `budget_ns`, how long that takes, and what comes
    /// out. It does one granule in any case.
    pub(super) fn work(&self, piece: &MessagePiece, budget_ns: u64) -> (u64, u64, u64) {
        let fixed = if piece.message.done == 0 { self.fixed_ns } else { 0.0 };
        let mut length = piece.length;
        if self.granule > 0 {
            let fits = ((budget_ns as f64 - fixed) / self.byte_ns).max(0.0) as u64;
            // It looks at the time after each granule.
            let fits = fits.div_ceil(self.granule).max(1).saturating_mul(self.granule);
            length = length.min(fits);
        }
        let engine_ns = (fixed + length as f64 * self.byte_ns) as u64;
        (length, engine_ns, length * u64::from(self.ratio) / 1000)
    }
}

/// Draws a tenant's messages.
#[derive(Debug)]
pub(super) struct MessageSource {
    load: Load,
    state: u64,
}

impl MessageSource {
    pub(super) fn new(load: Load, seed: u64, number: u64) -> MessageSource {
        MessageSource { load, state: seed ^ number.wrapping_mul(0xd134_2543_de82_ef95) }
    }

    /// The queues' first messages.
    pub(super) fn first(&mut self) -> Vec<(u16, u64)> {
        let begins = self.load.begins_ns;
        match self.load.arrivals {
            MessageArrivals::Closed { depth } => {
                let queue = |queue| (0..depth).map(move |_| (queue, begins));
                (0..self.load.queues).flat_map(queue).collect()
            }
            MessageArrivals::Open { .. } => {
                let queues = 0..self.load.queues;
                queues.map(|queue| (queue, begins + self.gap())).collect()
            }
        }
    }

    pub(super) fn next_closed(&mut self, now: u64) -> Option<u64> {
        let next = now + self.load.think_ns;
        matches!(self.load.arrivals, MessageArrivals::Closed { .. }).then(|| self.awake(next))
    }

    pub(super) fn next_open(&mut self, now: u64) -> Option<u64> {
        matches!(self.load.arrivals, MessageArrivals::Open { .. }).then(|| {
            let gap = self.gap();
            self.awake(now + gap)
        })
    }

    pub(super) fn operation(&mut self, now: u64) -> SimulatedOperation {
        let index = (self.draw() * self.load.content.sizes.len() as f64) as usize;
        let part = self.draw();
        let MessageCosts { sizes, fixed_ns, byte_ns, factor, ratio, room, granule } =
            &self.load.content;
        SimulatedOperation {
            arrived: now,
            size: sizes[index.min(sizes.len() - 1)],
            fixed_ns: *fixed_ns,
            expected_byte_ns: *byte_ns,
            byte_ns: byte_ns * (factor.0 + (factor.1 - factor.0) * part),
            ratio: *ratio,
            room: *room,
            granule: *granule,
        }
    }

    /// From a moment on, when the tenant next sends.
    fn awake(&self, at: u64) -> u64 {
        let period = self.load.period_ns;
        if period == 0 || at % period < period / 2 { at } else { at - at % period + period }
    }

    /// Exponentially distributed around each queue's mean.
    fn gap(&mut self) -> u64 {
        let MessageArrivals::Open { per_second } = self.load.arrivals else { return 0 };
        let mean = SECOND as f64 * f64::from(self.load.queues) / per_second.max(1) as f64;
        (-(1.0 - self.draw()).ln() * mean) as u64
    }

    /// From 0 to below 1 (splitmix64).
    fn draw(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
