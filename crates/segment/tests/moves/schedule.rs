//! What happens next, at random, and what must hold when nothing is under way any more.

use std::collections::{BTreeSet, VecDeque};

use rackbus_segment::message::{
    SegmentAccess, SegmentKind, SessionRequest, TargetKind, Withdrawal,
};
use rackbus_segment::{Handle, NodeId};

use crate::world::{Carried, Client, Manner, Work, World};
use crate::{Mistake, NODES, SIZES, Who, one};

impl World {
    /// Something that is under way continues; false when nothing is.
    pub fn advance(&mut self) -> bool {
        let queues: Vec<_> =
            self.carried.iter().filter(|(_, it)| !it.is_empty()).map(|(key, _)| *key).collect();
        let hears = |(_, client): &(&Who, &Client)| !client.inbox.is_empty();
        let clients: Vec<Who> = self.clients.iter().filter(hears).map(|(who, _)| *who).collect();
        let choice = self.random.below(queues.len() + clients.len() + self.work.len());
        if let Some((from, to, _)) = queues.get(choice).copied() {
            let carried = self.carried.get_mut(&queues[choice]).and_then(VecDeque::pop_front);
            match carried.expect("it is not empty") {
                Carried::Ask(ask) => {
                    self.with(to, |directory, now, store| directory.asked(now, from, ask, store));
                }
                Carried::Tell(tell, attached) => self.with(to, |directory, now, store| {
                    directory.told(now, from, tell, attached, store)
                }),
            }
        } else if let Some(who) = clients.get(choice - queues.len()) {
            self.hear(*who);
        } else if choice - queues.len() - clients.len() < self.work.len() {
            let (node, work) = self.work.swap_remove(choice - queues.len() - clients.len());
            self.finish(node, &work);
        } else {
            return false;
        }
        true
    }

    /// A thread of a node is done with something.
    pub fn finish(&mut self, node: NodeId, work: &Work) {
        let value = |world: &World, object| world.values.get(object).copied().unwrap_or(0);
        match work {
            Work::Copy(ticket, from, to) => {
                let copied = value(self, from);
                if self.mistake == Mistake::LateCopy {
                    // What it will have copied: nothing yet.
                    self.with(node, |directory, now, store| {
                        directory.copied(now, *ticket, Ok(()), store)
                    });
                    return;
                }
                self.values.insert(*to, copied);
                self.with(node, |directory, now, store| {
                    directory.copied(now, *ticket, Ok(()), store)
                });
            }
            Work::Empty(job, object) => {
                if self.mistake != Mistake::NeverEmptied {
                    self.values.insert(*object, 0);
                }
                self.with(node, |directory, now, store| {
                    directory.emptied(now, *job, Ok(()), store)
                });
            }
        }
    }

    /// Time passes until somebody is due.
    pub fn tick(&mut self) -> bool {
        let due = self.directories.values().filter_map(|(it, _)| it.next_tick()).min();
        let Some(due) = due.filter(|due| *due < u64::MAX) else { return false };
        self.now = self.now.max(due);
        self.excused = true;
        for node in NODES {
            self.with(node, |directory, now, store| directory.tick(now, store));
        }
        self.excused = false;
        true
    }

    pub fn step(&mut self) -> Result<(), String> {
        let whos: Vec<Who> = self.clients.keys().copied().collect();
        let who = one(&mut self.random, &whos);
        let node = NODES[self.random.below(3)];
        let id = 1 + self.random.below(2) as u32;
        let Some(who) = who else {
            self.new_session(node);
            return Ok(());
        };
        let client = &self.clients[&who];
        let (segments, connections) = (client.segments.clone(), client.connections.clone());
        let views: Vec<Handle> = client.views.keys().copied().collect();
        match self.random.below(100) {
            0 => self.crash(node),
            1 => self.end_session(who),
            2..=3 if whos.len() < 8 => self.new_session(node),
            4..=11 => {
                let size = SIZES[self.random.below(2)];
                let kind = SegmentKind::Shared;
                self.ask(who, SessionRequest::CreateSegment { id, choose: false, size, kind });
            }
            12..=19 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    self.ask(who, SessionRequest::SetAvailable { segment });
                }
            }
            20..=31 => {
                let (timeout_ms, what) = (1_000, TargetKind::Segment);
                self.ask(who, SessionRequest::Connect { node, id, timeout_ms, what });
            }
            32..=37 => {
                let share = [SegmentAccess::None, SegmentAccess::Read, SegmentAccess::Write]
                    [self.random.below(3)];
                let node = Some(node);
                self.ask(who, SessionRequest::SetShare { first: 1, last: 2, node, share });
            }
            38..=39 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    let how = Withdrawal::Force;
                    self.ask(who, SessionRequest::SetUnavailable { segment, how });
                }
            }
            40 => {
                if let Some(segment) = one(&mut self.random, &segments) {
                    self.give_back(who, segment, SessionRequest::Remove { segment });
                }
            }
            41..=42 => {
                if let Some(connection) = one(&mut self.random, &connections) {
                    self.give_back(who, connection, SessionRequest::Disconnect { connection });
                }
            }
            43 => {
                // Now and then a node stalls, and learns late what time it is.
                self.now += if self.random.below(4) == 0 { 10_000 } else { 0 };
                self.tick();
            }
            44 => {
                let other = NODES[self.random.below(3)];
                if other != node {
                    self.break_off(node, other);
                }
            }
            45..=62 => {
                if let Some(handle) = one(&mut self.random, &views) {
                    self.store(who, handle)?;
                }
            }
            _ => drop(self.advance()),
        }
        Ok(())
    }

    /// Lets everything happen that is under way, and looks what has come of it.
    pub fn rest(&mut self) -> Result<(), String> {
        for round in 0.. {
            if round > 100_000 {
                return Err("it does not come to rest".to_owned());
            }
            if !self.advance() && !self.tick() {
                break;
            }
        }
        for (who, client) in self.clients.iter().filter(|(_, it)| it.manner == Manner::Honest) {
            if client.asking.is_some() || !client.started.is_empty() {
                return Err(format!("{who:?} waits for an answer"));
            }
            if client.views.values().chain(&client.kept).any(|view| view.frozen) {
                return Err(format!("a writer of {who:?} waits for ever"));
            }
        }
        let segments: BTreeSet<u64> = self.segment_of.values().copied().collect();
        segments.into_iter().try_for_each(|segment| self.check(segment))
    }

    /// What holds of a segment at rest.
    pub fn check(&self, segment: u64) -> Result<(), String> {
        let members = self.members(segment);
        let Some((first, now)) = members.first() else { return Ok(()) };
        if let Some((other, view)) = members.iter().find(|(_, view)| view.object != now.object) {
            return Err(format!("{first:?} has {:?} and {other:?} {:?}", now.object, view.object));
        }
        let value = self.values.get(&now.object).copied().unwrap_or(0);
        let stored = self.stored.get(&segment).copied().unwrap_or(Some(0));
        if let Some(stored) = stored.filter(|stored| *stored != value) {
            return Err(format!("{first:?} reads {value}, {stored} was stored last"));
        }
        let cut = self.clients.iter().flat_map(|(who, client)| {
            client.views.values().filter(|view| view.cut).map(move |view| (who, view))
        });
        for (who, view) in cut.filter(|(_, view)| self.segment_of[&view.object] == segment) {
            if view.object == now.object && !view.late {
                return Err(format!("{who:?} was cut off and still has {:?}", view.object));
            }
            let left = self.values.get(&view.object).copied().unwrap_or(0);
            if left != 0 && !view.late && !self.scribbled.contains(&view.object) {
                return Err(format!("{who:?} was cut off and still reads {left}"));
            }
        }
        Ok(())
    }
}
