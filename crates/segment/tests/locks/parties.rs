//! What parties and their nodes do by chance: take and free locks, say that somebody died, die, restart, lose rights.

use rackbus_segment::Objects;
use rackbus_segment::directory::{LockAccess, LockState};
use rackbus_segment::message::{
    ConnectorMessage, LockHolder, LockOperation, LockRequest, Question, SegmentAccess,
    SessionRequest, TargetKind,
};

use super::{Carried, FAR, HOME, Mistake, OFFSETS, OWNER, Party, SEGMENT, View, Who, Word, World};

impl World {
    pub(super) fn pick(&mut self, view: impl Fn(&Party) -> bool) -> Option<Who> {
        let who: Vec<Who> = self
            .parties
            .iter()
            .filter(|(_, it)| !it.waiting && view(it))
            .map(|(who, _)| *who)
            .collect();
        who.get(self.random.below(who.len())).copied()
    }

    pub(super) fn lock(&mut self, who: Who, offset: u64, operation: LockOperation, view: View) {
        let party = self.parties.get_mut(&who).unwrap();
        party.view = view;
        let keeper = party.connection.unwrap();
        let request = LockRequest { offset, operation };
        self.request(who, SessionRequest::Lock { keeper, request });
    }

    pub(super) fn try_to_lock(&mut self) {
        let free = |it: &Party| it.view == View::Idle && it.connection.is_some();
        let Some(who) = self.pick(free) else { return };
        self.attempts += 1;
        let (attempt, offset) = (self.attempts, OFFSETS[self.random.below(2)]);
        self.lock(who, offset, LockOperation::Take { attempt }, View::Asking(attempt, offset));
    }

    pub(super) fn unlock(&mut self) -> bool {
        let Some(who) = self.pick(|it| matches!(it.view, View::Holding(..))) else { return false };
        let View::Holding(attempt, offset) = self.parties[&who].view else { return false };
        self.lock(who, offset, LockOperation::Release { attempt }, View::Busy);
        true
    }

    /// A party that found somebody dead holding a lock says so; or somebody who lives, and whom it does not reach.
    pub(super) fn declare(&mut self) {
        let able =
            |it: &Party| it.view == View::Idle && it.connection.is_some() && it.seen.is_some();
        let Some(who) = self.pick(able) else { return };
        let Some((offset, holder)) = self.parties.get_mut(&who).and_then(|it| it.seen.take())
        else {
            return;
        };
        let dead = !self.parties.contains_key(&(holder.node, holder.session));
        if (dead || self.random.below(2) == 0) && holder.node != HOME {
            self.lock(who, offset, LockOperation::DeclareDead { holder }, View::Busy);
        }
    }

    /// The same question once more, somewhere behind the first one.
    pub(super) fn duplicate(&mut self) {
        let node = FAR[self.random.below(2)];
        let Some(queue) = self.asks.get_mut(&node) else { return };
        let mut locks = queue.iter().enumerate().filter_map(|(at, it)| match it {
            Carried::Ask(ask @ ConnectorMessage::Question { what: Question::Lock { .. }, .. }) => {
                Some((at, ask.clone()))
            }
            _ => None,
        });
        let Some((at, mut ask)) = locks.next_back() else { return };
        if self.mistake == Mistake::TakesTwice
            && let ConnectorMessage::Question { what: Question::Lock { request, .. }, .. } =
                &mut ask
            && let LockOperation::Take { attempt } = &mut request.operation
        {
            self.attempts += 1;
            *attempt = self.attempts;
        }
        if self.mistake == Mistake::ArrivesTwice
            && let ConnectorMessage::Question { what: Question::Lock { request, .. }, .. } =
                &mut ask
            && let LockOperation::Arrive { passed: Some(passed), .. } = &mut request.operation
        {
            *passed += 1;
        }
        let behind = at + 1 + self.random.below(queue.len() - at);
        queue.insert(behind, Carried::Ask(ask));
    }

    pub(super) fn reconnect(&mut self) -> bool {
        let Some(who) = self.pick(|it| it.connection.is_none()) else { return false };
        self.parties.get_mut(&who).unwrap().view = View::Busy;
        let (what, timeout_ms) = (TargetKind::Segment, 1000);
        self.request(who, SessionRequest::Connect { node: HOME, id: SEGMENT, timeout_ms, what });
        true
    }

    /// A process of the owner's host takes the lock in memory, or lets it go.
    pub(super) fn lock_here(&mut self) {
        let Some(memory) = self.directories[&HOME].memory_of(OWNER, self.segment) else { return };
        if self.frozen {
            return;
        }
        let (me, at) = (LockHolder { node: HOME, session: OWNER }, OFFSETS[self.random.below(2)]);
        let store = self.stores.get_mut(&HOME).unwrap();
        match store.words.get(&(memory, at)) == Some(&Word::Held(me)) {
            true => drop(store.lock(memory, at, LockAccess::Free(me))),
            false => {
                if let Some(LockState::Taken { died: true }) =
                    store.lock(memory, at, LockAccess::Take(me))
                {
                    store.untold.remove(&at);
                }
            }
        };
    }

    pub(super) fn die(&mut self) {
        let Some(who) = self.pick(|_| true) else { return };
        self.note(|| format!("{}/{} dies", who.0, who.1.0));
        self.parties.remove(&who);
        self.with(who.0, |directory, now, store| directory.closed(now, who.1, store));
        self.new_party(who.0);
    }

    pub(super) fn restart(&mut self) {
        let node = FAR[self.random.below(2)];
        self.note(|| format!("{node} restarts"));
        self.cut(node);
        self.unnoticed.insert(node, [true, false]);
        let count = self.parties.keys().filter(|who| who.0 == node).count();
        self.parties.retain(|who, _| who.0 != node);
        self.start(node);
        (0..count).for_each(|_| self.new_party(node));
    }

    pub(super) fn change_rights(&mut self) {
        let (node, first) = (FAR[self.random.below(2)], SEGMENT);
        let share = [SegmentAccess::None, SegmentAccess::Write, SegmentAccess::Write];
        let share = share[self.random.below(3)];
        if share == SegmentAccess::None {
            // Who loses the right is cut off.
            self.barrier.cut.push(node);
        }
        let request = SessionRequest::SetShare { first, last: first, node: Some(node), share };
        self.request((HOME, OWNER), request);
    }
}
