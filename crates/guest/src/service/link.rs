//! From the serving process to its standby: everything that there is, and then each record.
//!
//! A standby that dies is replaced. One that does not take what it is told, because it is stopped or the
//! machine has no room, is ended, so that no guest waits for it.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rackbus_memory::{AdaptiveSpin, HandleRef, PacketStream, Packets, StreamError};
use rackbus_segment::message::{decode, encode};
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use super::kept::{DeviceParts, KeptFile, SessionSockets, hold};
use super::ledger::Ledger;
use crate::fuse::MAX_REQUEST;
use crate::journal::frontend::VhostSetting;
use crate::journal::{Core, JournalRecord};
use crate::state::DescriptorKind;

/// How long a standby may take to have room for something.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of the longest message: a request with its place, and what messages of the node's may have.
const MAX_TOLD: usize = MAX_REQUEST + (64 << 10);

/// What a standby is told.
#[derive(Serialize, Deserialize)]
enum StandbyMessage {
    /// It begins: with the ledger, the core as it is, and QEMU's socket.
    Begin { core: u64 },
    /// A file of the guest's that is memory.
    Memory { object: u64 },
    /// One that is an event, with its doorbell's memory.
    Bell { object: u64 },
    /// The sockets of a session go to the standby.
    Session { session: u64, opened: bool },
    /// What came with a message of QEMU's.
    Said { key: VhostSetting },
    /// That was all: from here on, whatever happens.
    Ready,
    /// A record, to be taken by the standby as well.
    Happened(JournalRecord),
}

/// The way to a standby.
#[derive(Debug)]
pub(super) struct StandbyLink(Packets);

impl StandbyLink {
    /// Tells a standby everything. `qemu` is the socket that QEMU speaks by.
    pub(super) fn begin(
        packets: Packets,
        kept: &DeviceParts,
        ledger: &Ledger,
        qemu: BorrowedFd<'_>,
    ) -> std::io::Result<StandbyLink> {
        let link = StandbyLink(packets);
        let core = encode(&kept.core);
        let file = rustix::fs::memfd_create("rackbus core", MemfdFlags::CLOEXEC)?;
        let mut written = 0;
        while let Some(rest) = core.get(written..).filter(|rest| !rest.is_empty()) {
            let slices = [IoSlice::new(rest)];
            written += rustix::io::pwritev(&file, &slices, written as u64)?;
        }
        let [words, replies] = ledger.descriptors();
        let core = core.len() as u64;
        link.tell(&StandbyMessage::Begin { core }, &[words, replies, file.as_fd(), qemu])?;
        for (object, held) in &kept.held {
            let object = *object;
            match held {
                KeptFile::Memory(file) => {
                    link.tell(&StandbyMessage::Memory { object }, &[file.as_fd()])?
                }
                KeptFile::Bell(bell, line) => {
                    link.tell(&StandbyMessage::Bell { object }, &[bell.as_fd(), line.as_fd()])?;
                }
                KeptFile::Other => {}
            }
        }
        for (session, SessionSockets { calls, events, theirs }) in &kept.sessions {
            let mut beside = vec![calls.as_fd(), events.as_fd()];
            beside.extend(theirs.iter().map(|fd| fd.as_fd()));
            let told = StandbyMessage::Session { session: *session, opened: theirs.is_none() };
            link.tell(&told, &beside)?;
        }
        for (key, fds) in &kept.said {
            let beside: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            link.tell(&StandbyMessage::Said { key: *key }, &beside)?;
        }
        link.tell(&StandbyMessage::Ready, &[])?;
        Ok(link)
    }

    /// Sends a record to the standby, with the descriptors that came with it.
    pub(super) fn happened(
        &self,
        record: &JournalRecord,
        beside: &[BorrowedFd<'_>],
    ) -> std::io::Result<()> {
        self.tell(&StandbyMessage::Happened(record.clone()), beside)
    }

    fn tell(&self, told: &StandbyMessage, beside: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        let (bytes, begun) = (encode(told), Instant::now());
        let handles: Vec<_> = beside.iter().map(|fd| HandleRef::of_descriptor(*fd)).collect();
        loop {
            match self.0.send(&bytes, &handles) {
                Err(StreamError::TimedOut) if begun.elapsed() < PATIENCE => {
                    let left = PATIENCE.saturating_sub(begun.elapsed());
                    wait_for_room(&self.0, left);
                }
                outcome => return outcome.map_err(std::io::Error::other),
            }
        }
    }
}

impl Drop for StandbyLink {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

fn wait_for_room(packets: &Packets, left: Duration) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::from_borrowed_fd(packets.as_fd(), PollFlags::OUT)];
    let tv_sec = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
    let limit = Timespec { tv_sec, tv_nsec: left.subsec_nanos().into() };
    // An interrupted wait is a try too many.
    let _ = poll(&mut polled, Some(&limit));
}

/// Everything that a standby has when the process that served is gone.
#[derive(Debug)]
pub(super) struct InheritedDevice {
    pub kept: DeviceParts,
    pub ledger: Ledger,
    pub qemu: OwnedFd,
}

/// Takes what the serving process says until it is gone; `None` when it never said everything.
pub(super) fn listen(packets: &Packets) -> Option<InheritedDevice> {
    let mut listener = Listener { kept: None, ledger: None, qemu: None, ready: false };
    let (mut buffer, mut spin) = (vec![0; MAX_TOLD], AdaptiveSpin::new(0, 0));
    loop {
        let packet = match PacketStream::receive(packets, &mut buffer, &mut spin, None) {
            Ok(packet) => packet,
            Err(StreamError::Closed) => break,
            Err(error) => {
                tracing::error!(%error, "the standby cannot follow");
                return None;
            }
        };
        let told = buffer.get(..packet.length).and_then(decode::<StandbyMessage>);
        let taken = told
            .filter(|_| !packet.lost)
            .and_then(|it| listener.take(it, packet.handles.into_descriptors()));
        if taken.is_none() {
            tracing::error!("the standby received a malformed record");
            return None;
        }
    }
    let Listener { kept, ledger, qemu, ready } = listener;
    let (kept, ledger, qemu) = (kept?, ledger?, qemu?);
    ready.then_some(InheritedDevice { kept, ledger, qemu })
}

struct Listener {
    kept: Option<DeviceParts>,
    ledger: Option<Ledger>,
    qemu: Option<OwnedFd>,
    ready: bool,
}

impl Listener {
    fn take(&mut self, told: StandbyMessage, beside: Vec<OwnedFd>) -> Option<()> {
        if let StandbyMessage::Begin { core } = told {
            let [words, replies, file, qemu] = beside.try_into().ok()?;
            let mut bytes = vec![0; usize::try_from(core).ok()?];
            let read = rustix::io::pread(&file, &mut bytes, 0).ok()?;
            self.kept = Some(DeviceParts::new(decode::<Core>(bytes.get(..read)?)?));
            self.ledger = Some(Ledger::adopt(words, replies).ok()?);
            self.qemu = Some(qemu);
            return Some(());
        }
        let kept = self.kept.as_mut()?;
        match told {
            StandbyMessage::Begin { .. } => {}
            StandbyMessage::Memory { object } => {
                let [file] = beside.try_into().ok()?;
                kept.held.insert(object, KeptFile::Memory(file.into()));
            }
            StandbyMessage::Bell { object } => {
                let [event, line] = beside.try_into().ok()?;
                kept.held.insert(object, hold(event, DescriptorKind::Bell, Some(&line.into())));
            }
            StandbyMessage::Session { session, opened } => {
                let mut beside = beside.into_iter();
                let mut next = || Packets::from_peer(beside.next()?).ok();
                let (calls, events) = (next()?.into(), next()?.into());
                let theirs = beside.next();
                if theirs.is_none() != opened {
                    return None;
                }
                kept.sessions.insert(session, SessionSockets { calls, events, theirs });
            }
            StandbyMessage::Said { key } => drop(kept.said.insert(key, beside)),
            StandbyMessage::Ready => self.ready = true,
            StandbyMessage::Happened(record) => {
                let outcome = kept.take(&record, beside);
                kept.release(&outcome.actions);
            }
        }
        Some(())
    }
}
