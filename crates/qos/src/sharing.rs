//! How the engines of a device are shared: by the arbiter of this crate, or not shaped at all. A device is asked for one
//! of the two, and asks whichever it has in the same way.

use crate::arbiter::TenantArbiter;
use crate::kept::MinimumRecord;
use crate::tenant::TenantShare;
use crate::turn::{
    EngineTurn, NextTurn, OpenTurn, QueuedMessage, SharingSettings, TenantId, TurnResult, Usage,
};
use crate::unshaped::MessageRoundRobin;

/// Whether a device shapes what its tenants send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Shaping {
    /// Tenants have shares of the engines' time, and levels that are kept.
    #[default]
    On,
    /// Queue pairs take turns by message, whoever has them. No level can be kept.
    Off,
}

/// What decides which message an engine does next.
#[derive(Debug)]
pub enum EngineSharing {
    /// Tenants are served by their shares.
    Shaped(Box<TenantArbiter>),
    /// Queue pairs are served in turn.
    Unshaped(MessageRoundRobin),
}

use EngineSharing::{Shaped, Unshaped};

impl EngineSharing {
    /// Engines that nobody uses yet.
    pub fn new(shaping: Shaping, settings: SharingSettings) -> EngineSharing {
        match shaping {
            Shaping::On => Shaped(Box::new(TenantArbiter::new(settings))),
            Shaping::Off => Unshaped(MessageRoundRobin::new(settings.slice_ns)),
        }
    }

    /// A tenant comes, or gets another share, which only shaped engines have.
    pub fn set(&mut self, id: TenantId, share: TenantShare, now: u64) {
        match self {
            Shaped(arbiter) => arbiter.set(id, share, now),
            Unshaped(queues) => queues.set(id),
        }
    }

    /// A tenant goes. Its waiting messages are returned; what an engine has of it is not waited for.
    pub fn remove(&mut self, id: TenantId) -> Vec<QueuedMessage> {
        match self {
            Shaped(arbiter) => arbiter.remove(id),
            Unshaped(queues) => queues.remove(id),
        }
    }

    /// Another tenant comes in the place of one, and owes nothing of what that one spent. What waited of that one is
    /// returned; what was counted continues.
    pub fn renew(&mut self, id: TenantId, share: TenantShare, now: u64) -> Vec<QueuedMessage> {
        match self {
            Shaped(arbiter) => arbiter.renew(id, share, now),
            Unshaped(queues) => queues.renew(id),
        }
    }

    /// Those of a tenant's waiting messages that `which` says, of a queue each, wait no more. They are returned.
    pub fn take_out(
        &mut self,
        id: TenantId,
        now: u64,
        which: impl FnMut(u16, &QueuedMessage) -> bool,
    ) -> Vec<QueuedMessage> {
        match self {
            Shaped(arbiter) => arbiter.take_out(id, now, which),
            Unshaped(queues) => queues.take_out(id, which),
        }
    }

    /// What a tenant has used so far.
    pub fn usage(&self, id: TenantId) -> Option<Usage> {
        match self {
            Shaped(arbiter) => arbiter.usage(id),
            Unshaped(queues) => queues.usage(id),
        }
    }

    /// How far a tenant got its minimum so far; nothing where no minimum can be kept.
    pub fn kept(&mut self, id: TenantId, now: u64) -> Option<MinimumRecord> {
        match self {
            Shaped(arbiter) => arbiter.kept(id, now),
            Unshaped(_) => None,
        }
    }

    /// Something was done for a tenant in no turn of its, and took so many nanoseconds of a processor.
    pub fn charge(&mut self, id: TenantId, engine_ns: u64, now: u64) {
        match self {
            Shaped(arbiter) => arbiter.charge(id, engine_ns, now),
            Unshaped(queues) => queues.charge(id, engine_ns),
        }
    }

    /// Whether a tenant owes so much that nothing more is to be done for it outside of turns; nobody does where nothing is
    /// charged.
    pub fn owes(&mut self, id: TenantId, now: u64) -> bool {
        match self {
            Shaped(arbiter) => arbiter.owes(id, now),
            Unshaped(_) => false,
        }
    }

    /// Whether bounds of its own hold a tenant's messages back.
    pub fn is_held(&self, id: TenantId) -> bool {
        match self {
            Shaped(arbiter) => arbiter.is_held(id),
            Unshaped(_) => false,
        }
    }

    /// Whether messages of any tenant wait.
    pub fn has_waiting(&self) -> bool {
        match self {
            Shaped(arbiter) => arbiter.has_waiting(),
            Unshaped(queues) => queues.has_waiting(),
        }
    }

    /// A message comes. False when there is no such tenant.
    pub fn submit(&mut self, id: TenantId, queue: u16, message: QueuedMessage, now: u64) -> bool {
        match self {
            Shaped(arbiter) => arbiter.submit(id, queue, message, now),
            Unshaped(queues) => queues.submit(id, queue, message),
        }
    }

    /// What an engine that is free does now.
    pub fn next(&mut self, now: u64) -> NextTurn {
        match self {
            Shaped(arbiter) => arbiter.next(now),
            Unshaped(queues) => queues.next_turn(),
        }
    }

    /// Time of an engine that is free, for messages of a tenant that come while it lasts; nothing where a message waits
    /// for an engine, or bounds of its own hold the tenant back: then its messages are to be
    /// [submitted](Self::submit).
    pub fn open(&mut self, id: TenantId, now: u64) -> Option<OpenTurn> {
        match self {
            Shaped(arbiter) => arbiter.open(id, now),
            Unshaped(queues) => queues.open(id),
        }
    }

    /// An open turn has ended. False when its tenant has gone: then nobody is charged.
    pub fn close(&mut self, turn: &OpenTurn, now: u64) -> bool {
        match self {
            Shaped(arbiter) => arbiter.close(turn, now),
            Unshaped(queues) => queues.close(turn),
        }
    }

    /// A turn has ended. Of its messages, those that are not over wait again, before all others of their queue. False
    /// when its tenant has gone: then they do not, and nobody is charged.
    pub fn complete(&mut self, turn: &EngineTurn, done: TurnResult, now: u64) -> bool {
        match self {
            Shaped(arbiter) => arbiter.complete(turn, done, now),
            Unshaped(queues) => queues.complete(turn, done),
        }
    }
}
