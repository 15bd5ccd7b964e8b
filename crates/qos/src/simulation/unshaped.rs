//! What devices do without shaping, to be compared with: queues take turns, by message or by byte.

use std::collections::{BTreeMap, VecDeque};

use super::Policy;
use crate::drr::Drr;
use crate::turn::{EngineTurn, MessagePiece, NextTurn, QueuedMessage, TenantId, TurnResult};

/// Each queue in its turn has one message done (seed paper, observation 4).
#[derive(Debug, Default)]
pub struct MessageRoundRobin {
    queues: BTreeMap<(TenantId, u16), VecDeque<QueuedMessage>>,
    turns: VecDeque<(TenantId, u16)>,
}

impl Policy for MessageRoundRobin {
    fn submit(&mut self, tenant: TenantId, queue: u16, message: QueuedMessage, _now: u64) {
        let key = (tenant, queue);
        let messages = self.queues.entry(key).or_default();
        if messages.is_empty() {
            self.turns.push_back(key);
        }
        messages.push_back(message);
    }

    fn next(&mut self, _now: u64) -> NextTurn {
        let Some(key) = self.turns.pop_front() else { return NextTurn::Idle };
        let Some(messages) = self.queues.get_mut(&key) else { return NextTurn::Idle };
        let Some(message) = messages.pop_front() else { return NextTurn::Idle };
        if !messages.is_empty() {
            self.turns.push_back(key);
        }
        NextTurn::Run(whole(key, message))
    }

    fn complete(&mut self, _turn: &EngineTurn, _done: TurnResult, _now: u64) {}
}

/// Tenants have equal shares of the input bytes (deficit round robin by size), whatever they cost.
#[derive(Debug)]
pub struct BySize {
    tenants: Drr<TenantId>,
    queues: BTreeMap<TenantId, VecDeque<(u16, QueuedMessage)>>,
}

impl Default for BySize {
    fn default() -> BySize {
        BySize { tenants: Drr::new(64 << 10), queues: BTreeMap::new() }
    }
}

impl Policy for BySize {
    fn submit(&mut self, tenant: TenantId, queue: u16, message: QueuedMessage, now: u64) {
        self.queues.entry(tenant).or_default().push_back((queue, message));
        if self.queues[&tenant].len() == 1 {
            self.tenants.set(tenant, 1);
        }
        self.tenants.wake(tenant, now, 1);
    }

    fn next(&mut self, now: u64) -> NextTurn {
        let queues = &mut self.queues;
        let has_work = |tenant| queues.get(&tenant).is_some_and(|queue| !queue.is_empty());
        let Some(tenant) = self.tenants.pick(now, has_work) else { return NextTurn::Idle };
        let Some((queue, message)) = queues.get_mut(&tenant).and_then(VecDeque::pop_front) else {
            return NextTurn::Idle;
        };
        self.tenants.charge(tenant, message.ingress);
        NextTurn::Run(whole((tenant, queue), message))
    }

    fn complete(&mut self, _turn: &EngineTurn, _done: TurnResult, _now: u64) {}
}

/// A turn that is one message, however long that takes.
fn whole((tenant, queue): (TenantId, u16), message: QueuedMessage) -> EngineTurn {
    let piece = MessagePiece { message, length: message.ingress, over: true };
    EngineTurn::unbounded(tenant, queue, piece)
}
