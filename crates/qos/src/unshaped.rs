//! How engines are shared where nobody shapes: queue pairs take turns, a message each, as a device does that knows
//! queues and no tenants (seed paper, observation 4). Nothing is charged, bounded or promised.

use std::collections::{BTreeMap, VecDeque};

use crate::turn::{
    EngineTurn, MessagePiece, NextTurn, OpenTurn, QueuedMessage, TenantId, TurnResult, Usage,
};

/// A queue pair: whose, and which of that tenant's.
type QueueKey = (TenantId, u16);

/// Each queue in its turn has one message done, however long that takes. One that an engine has begun is continued
/// before another is begun.
#[derive(Debug)]
pub struct MessageRoundRobin {
    /// An engine looks up after so many nanoseconds, and goes on with the same message.
    interval_ns: u64,
    tenants: BTreeMap<TenantId, UnshapedTenant>,
    queues: BTreeMap<QueueKey, VecDeque<QueuedMessage>>,
    /// Queues with messages, in the order of their turns. Some may have none any more.
    turns: VecDeque<QueueKey>,
    /// Messages that have begun, and that no engine has now.
    begun: VecDeque<(QueueKey, QueuedMessage)>,
    under_way: u32,
    /// Tenants that there were.
    lives: u64,
}

#[derive(Debug, Default)]
struct UnshapedTenant {
    /// Which of all tenants that there were.
    life: u64,
    usage: Usage,
}

impl Default for MessageRoundRobin {
    /// Engines that look up at the end of each message only.
    fn default() -> MessageRoundRobin {
        MessageRoundRobin::new(u64::MAX)
    }
}

impl MessageRoundRobin {
    /// Engines that look up after so many nanoseconds, so that a message can be taken from them: nobody else's is done
    /// for that.
    pub fn new(interval_ns: u64) -> MessageRoundRobin {
        MessageRoundRobin {
            interval_ns: interval_ns.max(1),
            tenants: BTreeMap::new(),
            queues: BTreeMap::new(),
            turns: VecDeque::new(),
            begun: VecDeque::new(),
            under_way: 0,
            lives: 0,
        }
    }

    /// A tenant comes, or is there.
    pub fn set(&mut self, id: TenantId) {
        let lives = &mut self.lives;
        self.tenants.entry(id).or_insert_with(|| {
            *lives += 1;
            UnshapedTenant { life: *lives, usage: Usage::default() }
        });
    }

    /// A tenant goes. Its waiting messages are returned; what an engine has of it is not waited for.
    pub fn remove(&mut self, id: TenantId) -> Vec<QueuedMessage> {
        self.tenants.remove(&id);
        self.take_out(id, |_, _| true)
    }

    /// Another tenant comes in the place of one. What waited of that one is returned; what was counted continues.
    pub fn renew(&mut self, id: TenantId) -> Vec<QueuedMessage> {
        let counted = self.usage(id).unwrap_or_default();
        let left = self.remove(id);
        self.set(id);
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.usage = counted;
        }
        left
    }

    /// Those of a tenant's waiting messages that `which` says, of a queue each, wait no more. They are returned.
    pub fn take_out(
        &mut self,
        id: TenantId,
        mut which: impl FnMut(u16, &QueuedMessage) -> bool,
    ) -> Vec<QueuedMessage> {
        let mut out = Vec::new();
        let mut stays = |(tenant, queue): QueueKey, message: &QueuedMessage| {
            let goes = tenant == id && which(queue, message);
            out.extend(goes.then_some(*message));
            !goes
        };
        self.begun.retain(|(key, message)| stays(*key, message));
        for (key, messages) in &mut self.queues {
            messages.retain(|message| stays(*key, message));
        }
        self.queues.retain(|_, messages| !messages.is_empty());
        self.turns.retain(|key| self.queues.contains_key(key));
        out
    }

    /// What a tenant has used so far. Of [`Usage`], that are operations, bytes, engine time and turns.
    pub fn usage(&self, id: TenantId) -> Option<Usage> {
        self.tenants.get(&id).map(|tenant| tenant.usage)
    }

    /// Something was done for a tenant in no turn of its, and took so much time of a processor: it is counted.
    pub fn charge(&mut self, id: TenantId, engine_ns: u64) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.usage.engine_ns += engine_ns;
        }
    }

    /// Whether messages of any tenant wait.
    pub fn has_waiting(&self) -> bool {
        !self.turns.is_empty() || !self.begun.is_empty()
    }

    /// Turns that are under way.
    pub fn under_way(&self) -> u32 {
        self.under_way
    }

    /// A message comes. False when there is no such tenant.
    pub fn submit(&mut self, id: TenantId, queue: u16, message: QueuedMessage) -> bool {
        if !self.tenants.contains_key(&id) {
            return false;
        }
        let key = (id, queue);
        let messages = self.queues.entry(key).or_default();
        if messages.is_empty() {
            self.turns.push_back(key);
        }
        messages.push_back(message);
        true
    }

    /// What an engine that is free does now.
    pub fn next_turn(&mut self) -> NextTurn {
        let begun = self.begun.pop_front();
        let Some((key, message)) = begun.or_else(|| self.first()) else { return NextTurn::Idle };
        let Some(tenant) = self.tenants.get_mut(&key.0) else { return NextTurn::Idle };
        tenant.usage.turns += 1;
        self.under_way += 1;
        NextTurn::Run(EngineTurn::whole(key, message, self.interval_ns, tenant.life))
    }

    /// The first message of the queue whose turn it is.
    fn first(&mut self) -> Option<(QueueKey, QueuedMessage)> {
        let key = self.turns.pop_front()?;
        let messages = self.queues.get_mut(&key)?;
        let message = messages.pop_front()?;
        if !messages.is_empty() {
            self.turns.push_back(key);
        }
        Some((key, message))
    }

    /// Time of an engine that is free, for messages of a tenant that come while it lasts; nothing where any message
    /// waits.
    pub fn open(&mut self, id: TenantId) -> Option<OpenTurn> {
        if self.has_waiting() {
            return None;
        }
        let tenant = self.tenants.get_mut(&id)?;
        tenant.usage.turns += 1;
        self.under_way += 1;
        Some(OpenTurn::unbounded(id, self.interval_ns, tenant.life))
    }

    /// An open turn has ended. False when its tenant has gone: then nothing is counted.
    pub fn close(&mut self, turn: &OpenTurn) -> bool {
        self.under_way = self.under_way.saturating_sub(1);
        let tenant = self.tenants.get_mut(&turn.tenant);
        let Some(tenant) = tenant.filter(|tenant| tenant.life == turn.life) else { return false };
        tenant.usage.operations += turn.ended;
        count(&mut tenant.usage, turn.spent.ingress, turn.spent.egress, turn.spent.engine_ns);
        true
    }

    /// A turn has ended. Its message continues in the next one, unless it is over. False when its tenant has gone:
    /// then it does not, and nothing is counted.
    pub fn complete(&mut self, turn: &EngineTurn, done: TurnResult) -> bool {
        self.under_way = self.under_way.saturating_sub(1);
        let tenant = self.tenants.get_mut(&turn.tenant);
        let Some(tenant) = tenant.filter(|tenant| tenant.life == turn.life) else { return false };
        tenant.usage.operations += turn.pieces.iter().filter(|piece| piece.over).count() as u64;
        let ingress = turn.pieces.iter().map(|piece| piece.length).sum();
        count(&mut tenant.usage, ingress, done.egress, done.engine_ns);
        let key = (turn.tenant, turn.queue);
        for MessagePiece { message, length, .. } in turn.pieces.iter().filter(|piece| !piece.over) {
            self.begun.push_back((key, QueuedMessage { done: message.done + length, ..*message }));
        }
        true
    }
}

fn count(usage: &mut Usage, ingress: u64, egress: u64, engine_ns: u64) {
    usage.ingress += ingress;
    usage.egress += egress;
    usage.engine_ns += engine_ns;
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn message(tag: u64, ingress: u64) -> QueuedMessage {
        QueuedMessage { tag, ingress, egress: 0, cost_ns: ingress, granule: 1, done: 0 }
    }

    fn both() -> MessageRoundRobin {
        let mut policy = MessageRoundRobin::new(100);
        policy.set(A);
        policy.set(B);
        policy
    }

    fn run(policy: &mut MessageRoundRobin) -> EngineTurn {
        match policy.next_turn() {
            NextTurn::Run(turn) => turn,
            other => panic!("{other:?}"),
        }
    }

    /// As much of the turn's message as fits into its time, at a byte a nanosecond.
    fn work(policy: &mut MessageRoundRobin, turn: &mut EngineTurn) {
        let piece = &mut turn.pieces[0];
        piece.length = piece.length.min(turn.budget_ns);
        piece.over = piece.message.done + piece.length == piece.message.ingress;
        let done = TurnResult { engine_ns: piece.length, egress: 1 };
        assert!(policy.complete(turn, done));
    }

    #[test]
    fn queues_take_turns_by_message_and_what_has_begun_is_continued_first() {
        let mut policy = both();
        for (tenant, queue, tag, length) in
            [(A, 0, 1, 250), (A, 0, 2, 50), (B, 0, 3, 50), (A, 1, 4, 50)]
        {
            assert!(policy.submit(tenant, queue, message(tag, length)));
        }
        let mut seen = Vec::new();
        while policy.has_waiting() {
            let mut turn = run(&mut policy);
            seen.push((turn.pieces[0].message.tag, turn.pieces[0].message.done));
            work(&mut policy, &mut turn);
        }
        assert_eq!(seen, [(1, 0), (1, 100), (1, 200), (3, 0), (4, 0), (2, 0)]);
        let usage = policy.usage(A).unwrap();
        assert_eq!((usage.operations, usage.ingress, usage.engine_ns), (3, 350, 350));
        assert_eq!((usage.turns, usage.egress, policy.under_way()), (5, 5, 0));
        assert_eq!(policy.next_turn(), NextTurn::Idle);
    }

    #[test]
    fn what_a_tenant_leaves_is_returned_and_its_turns_are_nobodys() {
        let mut policy = both();
        for tag in 0..4 {
            policy.submit(A, (tag % 2) as u16, message(tag, 500));
        }
        let tags = |left: Vec<QueuedMessage>| left.iter().map(|m| m.tag).collect::<Vec<_>>();
        let mut turn = run(&mut policy);
        work(&mut policy, &mut turn);
        let turn = run(&mut policy);
        assert_eq!(tags(policy.take_out(A, |queue, _| queue == 1)), [1, 3]);
        assert_eq!(tags(policy.renew(A)), [2]);
        assert!(!policy.complete(&turn, TurnResult::default()), "it is the former user's");
        assert!(!policy.has_waiting() && policy.usage(A).unwrap().engine_ns == 100);
        let open = policy.open(A).unwrap();
        assert!(policy.submit(B, 0, message(9, 1)) && policy.open(B).is_none());
        assert!(policy.remove(A).is_empty() && !policy.close(&open));
        assert!(!policy.submit(A, 0, message(5, 1)));
        assert_eq!(run(&mut policy).tenant, B);
    }
}
