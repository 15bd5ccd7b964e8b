//! The conversations with the node, two for each process of the guest.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, Packets, SharedMemory};
use rackbus_segment::guest::GuestChannel;
use rustix::event::{PollFd, PollFlags, poll};

use super::Device;
use super::kept::kinds;
use crate::journal::JournalRecord;
use crate::state::DescriptorKind;

/// Bytes of the page that proves that stores are seen on both sides.
const PAGE: u64 = 4096;

impl Device {
    /// Connects to the node, and hears what it says in a session until that ends, on threads of its own.
    pub(super) fn connect(self: &Arc<Self>, session: u64) {
        let device = self.clone();
        let talk = move || match device.reach(session) {
            Ok(()) => device.converse(session),
            Err(error) => {
                tracing::info!(%error, node = %device.node.display(), "no node for the guest");
                device.act(&JournalRecord::Unreachable { session });
            }
        };
        if let Err(error) = std::thread::Builder::new().name("session".into()).spawn(talk) {
            tracing::error!(%error, "a process of the guest was refused: cannot start a thread for it");
            self.act(&JournalRecord::Unreachable { session });
        }
    }

    /// Has the two sockets and the page of a session, unless it is over already.
    fn reach(self: &Arc<Self>, session: u64) -> std::io::Result<()> {
        let calls = Packets::connect(&self.node)?;
        let (events, theirs) = Packets::pair()?;
        let page = SharedMemory::reserve("rackbus proof", PAGE).map_err(std::io::Error::other)?;
        let page_kind = DescriptorKind::Memory { size: PAGE, write: true };
        let beside = vec![calls.into(), events.into(), theirs.into(), page];
        self.act_with(&JournalRecord::Connected { session, page: page_kind }, beside);
        Ok(())
    }

    /// Goes on with a session that is connected.
    pub(super) fn go_on(self: &Arc<Self>, session: u64) {
        let device = self.clone();
        let talk = move || device.converse(session);
        if std::thread::Builder::new().name("session".into()).spawn(talk).is_err() {
            self.end_session(session);
        }
    }

    /// A session has ended, whatever the node has to say.
    pub(super) fn end_session(self: &Arc<Self>, session: u64) {
        if let Some(conversation) = self.lock().kept.sessions.get(&session) {
            conversation.shut_down();
        }
        self.act(&JournalRecord::Over { session });
    }

    fn converse(self: &Arc<Self>, session: u64) {
        let (sockets, slot) = {
            let inner = self.lock();
            let conversation = inner.kept.sessions.get(&session);
            let sockets = conversation.map(|it| (it.calls.clone(), it.events.clone()));
            (sockets, inner.kept.core.state.slot(session))
        };
        let Some(((calls, events), slot)) = sockets.zip(slot) else { return };
        let (device, heard) = (self.clone(), events.clone());
        let listen = move || device.hear((session, slot), GuestChannel::Events, &heard);
        let listening = std::thread::Builder::new().name("session's events".into()).spawn(listen);
        if listening.is_ok() {
            self.hear((session, slot), GuestChannel::Calls, &calls);
        }
        calls.shut_down();
        events.shut_down();
    }

    /// Hears what the node says until it says nothing more: then the session has ended.
    fn hear(
        self: &Arc<Self>,
        (session, slot): (u64, usize),
        place: GuestChannel,
        packets: &Packets,
    ) {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::new(0, 0));
        loop {
            // Only what is there is received: who takes over can tell what was lost on the way.
            let mut polled = [PollFd::from_borrowed_fd(packets.as_fd(), PollFlags::IN)];
            if poll(&mut polled, None).is_err() {
                continue;
            }
            self.ledger.receiving(slot, place, true);
            let received = packets.receive(&mut buffer, &mut spin, None);
            let more =
                received.ok().is_some_and(|packet| self.heard(session, place, packet, &buffer));
            self.ledger.receiving(slot, place, false);
            if !more {
                break;
            }
        }
        self.act(&JournalRecord::Over { session });
    }

    /// Takes in what the node said; whether that made sense.
    fn heard(
        self: &Arc<Self>,
        session: u64,
        place: GuestChannel,
        packet: Packet,
        buffer: &[u8],
    ) -> bool {
        let Packet { length, fds, lost } = packet;
        let Some(message) = buffer.get(..length) else { return false };
        let kinds = kinds(&fds);
        let events = place == GuestChannel::Events;
        let message = message.to_vec();
        self.act_with(&JournalRecord::Received { session, events, message, kinds, lost }, fds);
        true
    }
}

/// Copies of descriptors, to be told along with a record.
pub(super) fn borrowed(fds: &[OwnedFd]) -> Vec<std::os::fd::BorrowedFd<'_>> {
    fds.iter().map(|fd| fd.as_fd()).collect()
}
