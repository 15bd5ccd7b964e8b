//! A policy that shares input bytes instead of engine time, to be compared with.

use std::collections::{BTreeMap, VecDeque};

use super::Policy;
use crate::drr::Drr;
use crate::turn::{EngineTurn, NextTurn, QueuedMessage, TenantId, TurnResult};

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
        NextTurn::Run(EngineTurn::whole((tenant, queue), message, u64::MAX, 0))
    }

    fn complete(&mut self, _turn: &EngineTurn, _done: TurnResult, _now: u64) {}
}
