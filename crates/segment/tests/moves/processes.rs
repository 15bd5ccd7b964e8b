//! The processes: what they ask for, how they answer their nodes, and what they store.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rackbus_segment::directory::AttachedObject;
use rackbus_segment::message::{Notice, Reply, SessionEvent, SessionRequest, VERSION};
use rackbus_segment::{Handle, NodeId, SessionId};

use crate::world::{Client, Manner, View, World};
use crate::{Mistake, Who};

impl World {
    pub fn replied(&mut self, who: Who, reply: Reply, attached: &[AttachedObject]) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        let asked = client.asking.take().expect("a reply that nobody asked for");
        let (handle, size) = match (&reply, asked) {
            (Reply::Created { segment, .. }, SessionRequest::CreateSegment { size, .. }) => {
                client.segments.push(*segment);
                (*segment, size)
            }
            (Reply::Connected(connected), _) => {
                client.connections.push(connected.connection);
                (connected.connection, connected.size)
            }
            (Reply::Started { ticket }, _) => {
                client.started.insert(*ticket);
                return;
            }
            _ => return,
        };
        let AttachedObject { object, write } = attached[0];
        let cut = self.cut_early.remove(&(who.0, handle));
        let view = View { object, size, write, frozen: false, over: false, cut, late: false };
        client.views.insert(handle, view);
        let fresh = self.segment_of.len() as u64;
        self.segment_of.entry(object).or_insert(fresh);
    }

    /// A process deals with its oldest event.
    pub fn hear(&mut self, who: Who) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        let (honest, mistake) = (client.manner == Manner::Honest, self.mistake);
        let Some((event, attached)) = client.inbox.pop_front() else { return };
        let mut change = |handle: &Handle, change: &dyn Fn(&mut View)| {
            if let Some(view) = client.views.get_mut(handle).filter(|view| honest && !view.over) {
                change(view);
            }
        };
        let notice = match event {
            SessionEvent::Freeze { ticket, keeper, .. } => {
                change(&keeper, &|view| view.frozen = true);
                Some(Notice::Frozen { ticket, keeper })
            }
            SessionEvent::Adopt { ticket, keeper, offset, length, .. } => {
                change(&keeper, &|view| {
                    assert_eq!((offset, length), (0, view.size));
                    view.object = attached[0].object;
                    view.frozen &= mistake != Mistake::UnfreezeAtAdoption;
                });
                Some(Notice::Adopted { ticket, keeper })
            }
            SessionEvent::Unfreeze { keeper, .. } => {
                change(&keeper, &|view| view.frozen = false);
                None
            }
            SessionEvent::Remote { connection, change: how } if how.is_final() => {
                change(&connection, &|view| (view.over, view.frozen) = (true, false));
                None
            }
            SessionEvent::Finished { ticket, outcome } => {
                assert_eq!(outcome, Ok(()));
                client.started.remove(&ticket);
                None
            }
            _ => None,
        };
        if let Some(notice) = notice.filter(|_| client.manner != Manner::Silent) {
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.noticed(now, session, notice, store));
        }
    }

    pub fn ask(&mut self, who: Who, request: SessionRequest) {
        let Some(client) = self.clients.get_mut(&who).filter(|it| it.asking.is_none()) else {
            return;
        };
        client.asking = Some(request.clone());
        self.note(|| format!("{who:?} asks {request:?}"));
        let (node, session) = who;
        self.with(node, |directory, now, store| directory.request(now, session, request, store));
    }

    pub fn new_session(&mut self, node: NodeId) {
        self.lives += 1;
        let who = (node, SessionId(self.lives));
        let manner = match self.random.below(12) {
            0 => Manner::Silent,
            1 => Manner::Liar,
            _ => Manner::Honest,
        };
        let client = Client {
            manner,
            views: BTreeMap::new(),
            segments: Vec::new(),
            connections: Vec::new(),
            kept: Vec::new(),
            inbox: VecDeque::new(),
            asking: None,
            started: BTreeSet::new(),
        };
        self.clients.insert(who, client);
        self.note(|| format!("{who:?} begins, {manner:?}"));
        self.ask(who, SessionRequest::Hello { version: VERSION });
    }

    pub fn end_session(&mut self, who: Who) {
        if self.clients.remove(&who).is_some() {
            self.note(|| format!("{who:?} ends"));
            let (node, session) = who;
            self.with(node, |directory, now, store| directory.closed(now, session, store));
        }
    }

    /// Ends what a process has by a handle; mappings of it stay.
    pub fn give_back(&mut self, who: Who, handle: Handle, request: SessionRequest) {
        let free = |client: &&mut Client| client.asking.is_none();
        let Some(client) = self.clients.get_mut(&who).filter(free) else { return };
        let Some(mut view) = client.views.remove(&handle) else { return };
        client.segments.retain(|it| *it != handle);
        client.connections.retain(|it| *it != handle);
        view.frozen &= self.mistake == Mistake::ForgetFirst;
        client.kept.push(view);
        self.ask(who, request);
    }

    /// A process stores to memory that it may store to, and signals whoever shares it.
    pub fn store(&mut self, who: Who, handle: Handle) -> Result<(), String> {
        let client = &self.clients[&who];
        let view = client.views[&handle];
        if view.frozen || !view.write {
            return Ok(());
        }
        self.stores += 1;
        let (value, segment) = (self.stores, self.segment_of[&view.object]);
        self.values.insert(view.object, value);
        self.note(|| format!("{who:?} stores {value} to {:?} by {handle:?}", view.object));
        if self.clients[&who].manner != Manner::Honest || view.cut || view.over {
            self.stored.insert(segment, None);
            self.scribbled.insert(view.object);
            return Ok(());
        }
        self.stored.insert(segment, Some(value));
        // A flush of it waits for whom the node says to have this memory.
        let (node, session) = who;
        let known = self.directories[&node].0.memory_of(session, handle);
        if self.clients[&who].segments.contains(&handle) && known != Some(view.object) {
            return Err(format!("{who:?} stored to {:?}, and flushes {known:?}", view.object));
        }
        for (reader, other) in self.members(segment) {
            let read = self.values.get(&other.object).copied().unwrap_or(0);
            if read != value {
                return Err(format!("{reader:?} was signalled {value} and reads {read}"));
            }
        }
        Ok(())
    }

    /// The honest processes that share a segment.
    pub fn members(&self, segment: u64) -> Vec<(Who, View)> {
        let honest = self.clients.iter().filter(|(_, client)| client.manner == Manner::Honest);
        let views = honest.flat_map(|(who, client)| client.views.values().map(|it| (*who, *it)));
        views
            .filter(|(_, view)| !view.cut && !view.over)
            .filter(|(_, view)| self.segment_of[&view.object] == segment)
            .collect()
    }
}
