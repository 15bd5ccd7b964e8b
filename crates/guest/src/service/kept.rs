//! A device's descriptors, beside what the records say of them.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::doorbell::DOORBELL_BYTES;
use rackbus_memory::{Access, Doorbell, Packets, PeerEvent, Region, StreamError};
use rackbus_segment::guest::Place;
use rustix::fs::{FileType, OFlags};

use crate::journal::frontend::Key;
use crate::journal::{Core, Outcome, Record};
use crate::state::{Action, Kind};

/// What a file of the guest's is here.
#[derive(Debug)]
pub(super) enum Held {
    Memory(Arc<OwnedFd>),
    /// An event, with the memory that its doorbell lies in.
    Bell(Arc<Doorbell>, Arc<OwnedFd>),
    Other,
}

/// The sockets of a session with the node: one for requests, one for events.
#[derive(Debug)]
pub(super) struct Conversation {
    pub calls: Arc<Packets>,
    pub events: Arc<Packets>,
    /// The node's end of the events, which goes along with the first request.
    pub theirs: Option<OwnedFd>,
}

impl Conversation {
    pub(super) fn send(&mut self, place: Place, message: &[u8]) -> Result<(), StreamError> {
        if place == Place::Events {
            return self.events.send(message, &[]);
        }
        let theirs = self.theirs.take();
        let beside: Vec<_> = theirs.iter().map(|fd| fd.as_fd()).collect();
        self.calls.send(message, &beside)
    }

    pub(super) fn shut_down(&self) {
        self.calls.shut_down();
        self.events.shut_down();
    }
}

/// All that a device has; its standby has the same.
#[derive(Debug)]
pub(super) struct Kept {
    pub core: Core,
    pub held: HashMap<u64, Held>,
    pub sessions: HashMap<u64, Conversation>,
    /// What came with QEMU's messages.
    pub said: BTreeMap<Key, Vec<OwnedFd>>,
}

impl Kept {
    pub(super) fn new(core: Core) -> Kept {
        let (held, sessions) = (HashMap::new(), HashMap::new());
        Kept { core, held, sessions, said: BTreeMap::new() }
    }

    /// Something happened, and this came along.
    pub(super) fn take(&mut self, record: &Record, beside: Vec<OwnedFd>) -> Outcome {
        let outcome = self.core.take(record);
        match record {
            Record::Frontend { .. } => {
                let Kept { core, said, .. } = self;
                said.retain(|key, _| core.frontend.has(*key));
                if let Some(key) = outcome.set {
                    said.insert(key, beside);
                }
            }
            Record::Connected { session, .. } => self.connected(*session, &outcome, beside),
            Record::Received { kinds, .. } => {
                let mut line = None;
                let numbers = outcome.objects.iter();
                for ((number, fd), kind) in numbers.zip(beside).zip(kinds) {
                    let held = hold(fd, *kind, line.as_ref());
                    line = match &held {
                        Held::Memory(file) => Some(file.clone()),
                        _ => None,
                    };
                    self.held.insert(*number, held);
                }
            }
            _ => {}
        }
        outcome
    }

    fn connected(&mut self, session: u64, outcome: &Outcome, beside: Vec<OwnedFd>) {
        let Some(number) = outcome.objects.first() else { return };
        let Ok([calls, events, theirs, page]) = <[OwnedFd; 4]>::try_from(beside) else { return };
        let packets = |fd| Packets::from_peer(fd).map(Arc::new);
        let (Ok(calls), Ok(events)) = (packets(calls), packets(events)) else { return };
        self.held.insert(*number, Held::Memory(Arc::new(page)));
        let theirs = Some(theirs);
        self.sessions.insert(session, Conversation { calls, events, theirs });
    }

    /// What a standby does with actions: it lets go of what they end.
    pub(super) fn let_go(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Forget { object } => drop(self.held.remove(object)),
                // The serving process shuts the sockets down, or whoever takes over when it could not.
                Action::End { session } => drop(self.sessions.remove(session)),
                Action::Send { session, place: Place::Calls, .. } => {
                    if let Some(conversation) = self.sessions.get_mut(session) {
                        conversation.theirs = None;
                    }
                }
                _ => {}
            }
        }
    }
}

/// What the descriptors of one message are.
pub(super) fn kinds(fds: &[OwnedFd]) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::with_capacity(fds.len());
    for fd in fds {
        let after_memory = matches!(kinds.last(), Some(Kind::Memory { .. }));
        let is_file = rustix::fs::fstat(fd)
            .ok()
            .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        kinds.push(match is_file {
            Some(stat) => {
                let write = rustix::fs::fcntl_getfl(fd)
                    .is_ok_and(|flags| flags.intersection(OFlags::RWMODE) == OFlags::RDWR);
                Kind::Memory { size: u64::try_from(stat.st_size).unwrap_or(0), write }
            }
            None if after_memory => Kind::Bell,
            None => Kind::Other,
        });
    }
    kinds
}

/// Takes a descriptor in; `line` is the memory before it in the message.
pub(super) fn hold(fd: OwnedFd, kind: Kind, line: Option<&Arc<OwnedFd>>) -> Held {
    match (kind, line) {
        (Kind::Memory { .. }, _) => Held::Memory(Arc::new(fd)),
        (Kind::Bell, Some(line)) => match bell(fd, line.as_fd()) {
            Some(bell) => Held::Bell(Arc::new(bell), line.clone()),
            None => Held::Other,
        },
        _ => Held::Other,
    }
}

fn bell(event: OwnedFd, line: BorrowedFd<'_>) -> Option<Doorbell> {
    let both = Access::READ | Access::WRITE;
    let region = Region::map(line, 0, DOORBELL_BYTES as u64, both).ok()?;
    Doorbell::new(Arc::new(region), 0, PeerEvent::new(event).ok()?)
}
