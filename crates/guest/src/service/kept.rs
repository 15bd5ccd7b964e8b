//! A device's descriptors, beside what the records say of them.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::doorbell::DOORBELL_BYTES;
use rackbus_memory::{Access, Doorbell, HandleRef, Packets, PeerEvent, Region, StreamError};
use rackbus_segment::guest::GuestChannel;
use rustix::fs::{FileType, OFlags};

use crate::journal::frontend::VhostSetting;
use crate::journal::{Core, JournalRecord, RecordOutcome};
use crate::state::{DescriptorKind, GuestAction};

/// What a file of the guest's is here.
#[derive(Debug)]
pub(super) enum KeptFile {
    Memory(Arc<OwnedFd>),
    /// An event, with the memory that its doorbell lies in.
    Bell(Arc<Doorbell>, Arc<OwnedFd>),
    Other,
}

/// The sockets of a session with the node: one for requests, one for events.
#[derive(Debug)]
pub(super) struct SessionSockets {
    pub calls: Arc<Packets>,
    pub events: Arc<Packets>,
    /// The node's end of the events, which goes along with the first request.
    pub theirs: Option<OwnedFd>,
}

impl SessionSockets {
    pub(super) fn send(&mut self, place: GuestChannel, message: &[u8]) -> Result<(), StreamError> {
        if place == GuestChannel::Events {
            return self.events.send(message, &[]);
        }
        let theirs = self.theirs.take();
        let beside = theirs.as_ref().map(|fd| HandleRef::of_descriptor(fd.as_fd()));
        self.calls.send(message, beside.as_slice())
    }

    pub(super) fn shut_down(&self) {
        self.calls.shut_down();
        self.events.shut_down();
    }
}

/// All that a device has; its standby has the same.
#[derive(Debug)]
pub(super) struct DeviceParts {
    pub core: Core,
    pub held: HashMap<u64, KeptFile>,
    pub sessions: HashMap<u64, SessionSockets>,
    /// What came with QEMU's messages.
    pub said: BTreeMap<VhostSetting, Vec<OwnedFd>>,
}

impl DeviceParts {
    pub(super) fn new(core: Core) -> DeviceParts {
        let (held, sessions) = (HashMap::new(), HashMap::new());
        DeviceParts { core, held, sessions, said: BTreeMap::new() }
    }

    /// Something happened, and this came along.
    pub(super) fn take(&mut self, record: &JournalRecord, beside: Vec<OwnedFd>) -> RecordOutcome {
        let outcome = self.core.take(record);
        match record {
            JournalRecord::Frontend { .. } => {
                let DeviceParts { core, said, .. } = self;
                said.retain(|key, _| core.frontend.has(*key));
                if let Some(key) = outcome.set {
                    said.insert(key, beside);
                }
            }
            JournalRecord::Connected { session, .. } => self.connected(*session, &outcome, beside),
            JournalRecord::Received { kinds, .. } => {
                let mut line = None;
                let numbers = outcome.objects.iter();
                for ((number, fd), kind) in numbers.zip(beside).zip(kinds) {
                    let held = hold(fd, *kind, line.as_ref());
                    line = match &held {
                        KeptFile::Memory(file) => Some(file.clone()),
                        _ => None,
                    };
                    self.held.insert(*number, held);
                }
            }
            _ => {}
        }
        outcome
    }

    fn connected(&mut self, session: u64, outcome: &RecordOutcome, beside: Vec<OwnedFd>) {
        let Some(number) = outcome.objects.first() else { return };
        let Ok([calls, events, theirs, page]) = <[OwnedFd; 4]>::try_from(beside) else { return };
        let packets = |fd| Packets::from_peer(fd).map(Arc::new);
        let (Ok(calls), Ok(events)) = (packets(calls), packets(events)) else { return };
        self.held.insert(*number, KeptFile::Memory(Arc::new(page)));
        let theirs = Some(theirs);
        self.sessions.insert(session, SessionSockets { calls, events, theirs });
    }

    /// What a standby does with actions: it releases what they end.
    pub(super) fn release(&mut self, actions: &[GuestAction]) {
        for action in actions {
            match action {
                GuestAction::Release { object } | GuestAction::Forget { object } => {
                    drop(self.held.remove(object));
                }
                // The serving process shuts the sockets down, or whoever takes over when it could not.
                GuestAction::End { session } => drop(self.sessions.remove(session)),
                GuestAction::Send { session, place: GuestChannel::Calls, .. } => {
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
pub(super) fn kinds(fds: &[OwnedFd]) -> Vec<DescriptorKind> {
    let mut kinds: Vec<DescriptorKind> = Vec::with_capacity(fds.len());
    for fd in fds {
        let after_memory = matches!(kinds.last(), Some(DescriptorKind::Memory { .. }));
        let is_file = rustix::fs::fstat(fd)
            .ok()
            .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        kinds.push(match is_file {
            Some(stat) => {
                let write = rustix::fs::fcntl_getfl(fd)
                    .is_ok_and(|flags| flags.intersection(OFlags::RWMODE) == OFlags::RDWR);
                DescriptorKind::Memory { size: u64::try_from(stat.st_size).unwrap_or(0), write }
            }
            None if after_memory => DescriptorKind::Bell,
            None => DescriptorKind::Other,
        });
    }
    kinds
}

/// Takes a descriptor in; `line` is the memory before it in the message.
pub(super) fn hold(fd: OwnedFd, kind: DescriptorKind, line: Option<&Arc<OwnedFd>>) -> KeptFile {
    match (kind, line) {
        (DescriptorKind::Memory { .. }, _) => KeptFile::Memory(Arc::new(fd)),
        (DescriptorKind::Bell, Some(line)) => match bell(fd, line.as_fd()) {
            Some(bell) => KeptFile::Bell(Arc::new(bell), line.clone()),
            None => KeptFile::Other,
        },
        _ => KeptFile::Other,
    }
}

fn bell(event: OwnedFd, line: BorrowedFd<'_>) -> Option<Doorbell> {
    let both = Access::READ | Access::WRITE;
    let region = Region::map(line, 0, DOORBELL_BYTES as u64, both).ok()?;
    Doorbell::new(Arc::new(region), 0, PeerEvent::new(event).ok()?)
}
