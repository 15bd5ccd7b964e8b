//! What the arbiter is given and gives out: messages, turns, and what became of them.

use serde::{Deserialize, Serialize};

use crate::tenant::Spent;

/// A tenant: a number that its owner gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// How the engines are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharingSettings {
    /// Engine time of a turn, in nanoseconds: who comes with something urgent waits for one.
    pub slice_ns: u64,
    /// Turns that are under way at the same time.
    pub workers: u32,
    /// Messages of a turn at most.
    pub batch: usize,
    /// What a message is charged at least, in nanoseconds: what it takes to fetch and to complete one.
    pub least_ns: u64,
}

impl Default for SharingSettings {
    fn default() -> SharingSettings {
        SharingSettings { slice_ns: 50_000, workers: 1, batch: 32, least_ns: 100 }
    }
}

/// A message that waits for an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedMessage {
    /// Its owner's name for it.
    pub tag: u64,
    /// Bytes that go in.
    pub ingress: u64,
    /// Bytes that will come out, as far as is known.
    pub egress: u64,
    /// What it will cost, as far as is known, in nanoseconds.
    pub cost_ns: u64,
    /// It may be interrupted at multiples of so many input bytes; 0 for nowhere.
    pub granule: u64,
    /// Input bytes that are done.
    pub done: u64,
}

/// A part of a message in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessagePiece {
    /// The message that is to be served.
    pub message: QueuedMessage,
    /// Input bytes that this turn is to do, from [`done`](QueuedMessage::done) on. Whoever does it puts here
    /// what it did, which may be less.
    pub length: u64,
    /// Nothing of the message is left afterwards. Whoever does it may say so earlier, or later.
    pub over: bool,
}

impl MessagePiece {
    /// It is the first of its message of which anything was done.
    pub(crate) fn begins(&self) -> bool {
        self.message.done == 0 && (self.length > 0 || self.over)
    }
}

/// Work for one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineTurn {
    /// The tenant whose message it is.
    pub tenant: TenantId,
    /// Of which of its queues.
    pub queue: u16,
    /// The messages, in order.
    pub pieces: Vec<MessagePiece>,
    /// The engine stops after so many nanoseconds, at the next place where it can.
    pub budget_ns: u64,
    /// The life of the tenant that it is a turn of.
    pub(crate) life: u64,
    pub(crate) guaranteed: bool,
    pub(crate) estimated: Spent,
}

impl EngineTurn {
    /// All that is left of a message, for policies that charge nothing.
    pub(crate) fn whole(
        (tenant, queue): (TenantId, u16),
        message: QueuedMessage,
        budget_ns: u64,
        life: u64,
    ) -> EngineTurn {
        let length = message.ingress.saturating_sub(message.done);
        let pieces = vec![MessagePiece { message, length, over: true }];
        let estimated = Spent::default();
        EngineTurn { tenant, queue, pieces, budget_ns, life, guaranteed: false, estimated }
    }
}

/// Time of an engine for messages that come while it lasts. Nobody waits when it is given out, so that nothing is to be
/// chosen; what was done is told message by message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenTurn {
    /// The tenant whose messages are done.
    pub tenant: TenantId,
    /// It ends after so many nanoseconds.
    pub budget_ns: u64,
    pub(crate) least_ns: u64,
    pub(crate) life: u64,
    pub(crate) guaranteed: bool,
    pub(crate) allowed: Spent,
    pub(crate) spent: Spent,
    /// Messages that have ended.
    pub(crate) ended: u64,
}

impl OpenTurn {
    /// One that nothing bounds but its time, for policies that charge nothing.
    pub(crate) fn unbounded(tenant: TenantId, budget_ns: u64, life: u64) -> OpenTurn {
        let most = u64::MAX;
        let allowed = Spent { engine_ns: most, operations: most, ingress: most, egress: most };
        let (spent, ended, least_ns) = (Spent::default(), 0, 0);
        OpenTurn { tenant, budget_ns, least_ns, life, guaranteed: false, allowed, spent, ended }
    }

    /// So much of a message was done; `over` when it has ended. One of which nothing was done is begun by the next turn
    /// with it.
    #[inline]
    pub fn did(&mut self, ingress: u64, done: TurnResult, over: bool) {
        self.spent.operations += u64::from(ingress > 0 || over);
        self.spent.ingress += ingress;
        self.spent.egress += done.egress;
        self.spent.engine_ns += done.engine_ns.max(self.least_ns);
        self.ended += u64::from(over);
    }

    /// Whether another message may be begun: no bound of the tenant's is passed by more than one message.
    #[inline]
    pub fn goes_on(&self) -> bool {
        let (spent, allowed) = (&self.spent, &self.allowed);
        spent.engine_ns < self.budget_ns.min(allowed.engine_ns)
            && spent.operations < allowed.operations
            && spent.ingress < allowed.ingress
            && spent.egress < allowed.egress
    }

    /// Engine time that it took so far, in nanoseconds.
    pub fn engine_ns(&self) -> u64 {
        self.spent.engine_ns
    }

    /// What it took is measured otherwise, and less.
    pub fn correct(&mut self, engine_ns: u64) {
        let least = self.least_ns.saturating_mul(self.spent.operations);
        self.spent.engine_ns = self.spent.engine_ns.min(engine_ns.max(least));
    }
}

/// The outcome of a turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TurnResult {
    /// Engine time that it took, in nanoseconds.
    pub engine_ns: u64,
    /// Bytes that came out.
    pub egress: u64,
}

/// What an engine that is free does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextTurn {
    /// Serve this turn now.
    Run(EngineTurn),
    /// Nothing until then, unless something new comes: tenants are at their limits.
    Wait(u64),
    /// Nothing until something comes.
    Idle,
}

/// What a tenant used, and what was done about it. All of it only grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Operations that have ended.
    pub operations: u64,
    /// Bytes that went into engines.
    pub ingress: u64,
    /// Bytes that came out.
    pub egress: u64,
    /// Engine time, in nanoseconds.
    pub engine_ns: u64,
    /// Of that, by its guarantee.
    pub guaranteed_ns: u64,
    /// How many turns engines took.
    pub turns: u64,
    /// Messages that did not end in the turn in which they were begun.
    pub split: u64,
    /// Messages that shared a turn with one before them.
    pub batched: u64,
    /// How often it had to wait because of its own limits.
    pub throttled: u64,
    /// For how long, in nanoseconds, as far as that is over.
    pub throttled_ns: u64,
}
