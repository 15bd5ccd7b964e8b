//! The conversations with the node, two for each process of the guest.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{Packets, SharedMemory, StreamError};
use rackbus_segment::guest::GuestChannel;
use rustix::event::{PollFd, PollFlags, poll};

use super::Device;
use super::kept::kinds;
use super::ledger::LeftOnSocket;
use crate::journal::JournalRecord;
use crate::state::{DescriptorKind, MOST_SESSIONS};

/// Bytes of the page that proves that stores are seen on both sides.
const PAGE: u64 = 4096;

/// How long a node may take to have room for a connection. Others are still connecting for sessions that the guest
/// has given up meanwhile.
const CONNECTING: Duration = Duration::from_secs(3);
/// Threads of sessions at a time: two for each that there may be, and as many again that still connect.
pub(super) const MOST_THREADS: usize = 3 * MOST_SESSIONS;

/// How many threads hear a node, or connect to it.
#[derive(Debug, Default)]
pub(super) struct SessionThreads(pub Arc<AtomicUsize>);

/// One of them, for as long as this is there.
struct CountedThread(Arc<AtomicUsize>);

impl SessionThreads {
    fn one_more(&self) -> Option<CountedThread> {
        let more = |count: usize| (count < MOST_THREADS).then_some(count + 1);
        let counted = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.is_ok().then(|| CountedThread(self.0.clone()))
    }
}

impl Drop for CountedThread {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Device {
    /// Has a thread of a session's do something, unless there are too many of them.
    fn start(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce(&Arc<Device>) + Send + 'static,
    ) -> std::io::Result<()> {
        let thread = self.threads.one_more();
        let thread = thread.ok_or_else(|| std::io::Error::other("too many threads of sessions"))?;
        let device = self.clone();
        let counted = move || {
            let _thread = thread;
            work(&device);
        };
        std::thread::Builder::new().name(name.into()).spawn(counted).map(drop)
    }

    /// Connects to the node, and hears what it says in a session until that ends, on threads of its own.
    pub(super) fn connect(self: &Arc<Self>, session: u64) {
        let talk = move |device: &Arc<Device>| match device.reach(session) {
            Ok(()) => device.converse(session),
            Err(error) => {
                tracing::info!(%error, node = %device.node.display(), "no node for the guest");
                device.act(&JournalRecord::Unreachable { session });
            }
        };
        if let Err(error) = self.start("session", talk) {
            tracing::error!(%error, "a process of the guest was refused: cannot start a thread for it");
            self.act(&JournalRecord::Unreachable { session });
        }
    }

    /// Has the two sockets and the page of a session, unless it is over already.
    fn reach(self: &Arc<Self>, session: u64) -> std::io::Result<()> {
        let deadline = Instant::now() + CONNECTING;
        let calls = Packets::connect_until(&self.node, Some(deadline))?;
        let (events, theirs) = Packets::pair()?;
        let page = SharedMemory::reserve("rackbus proof", PAGE).map_err(std::io::Error::other)?;
        let page_kind = DescriptorKind::Memory { size: PAGE, write: true };
        let beside = vec![calls.into(), events.into(), theirs.into(), page];
        self.act_with(&JournalRecord::Connected { session, page: page_kind }, beside);
        Ok(())
    }

    /// Goes on with a session that is connected.
    pub(super) fn go_on(self: &Arc<Self>, session: u64) {
        if self.start("session", move |device| device.converse(session)).is_err() {
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

    pub(super) fn converse(self: &Arc<Self>, session: u64) {
        let (sockets, slot) = {
            let inner = self.lock();
            let conversation = inner.kept.sessions.get(&session);
            let sockets = conversation.map(|it| (it.calls.clone(), it.events.clone()));
            (sockets, inner.kept.core.state.slot(session))
        };
        let Some(((calls, events), slot)) = sockets.zip(slot) else { return };
        let heard = events.clone();
        let listen =
            move |device: &Arc<Device>| device.hear((session, slot), GuestChannel::Events, &heard);
        match self.start("session's events", listen) {
            Ok(()) => self.hear((session, slot), GuestChannel::Calls, &calls),
            Err(error) => {
                tracing::error!(%error, session, "a process of the guest is disconnected: nobody can hear its events");
                self.act(&JournalRecord::Over { session });
            }
        }
        calls.shut_down();
        events.shut_down();
    }

    /// Hears what the node says until it says nothing more: then the session has ended.
    pub(super) fn hear(
        self: &Arc<Self>,
        (session, slot): (u64, usize),
        place: GuestChannel,
        packets: &Packets,
    ) {
        let mut buffer = vec![0; MAX_PACKET];
        loop {
            match packets.peek(&mut buffer) {
                Ok(packet) => self.heard((session, slot), place, packet, &buffer, packets),
                Err(StreamError::TimedOut) => {
                    let mut polled = [PollFd::from_borrowed_fd(packets.as_fd(), PollFlags::IN)];
                    // An interrupted wait is a look too many.
                    let _ = poll(&mut polled, None);
                }
                Err(_) => break,
            }
        }
        self.act(&JournalRecord::Over { session });
    }

    /// Takes in what the node said, and then takes it off the socket: whoever takes over in between knows of it.
    fn heard(
        self: &Arc<Self>,
        (session, slot): (u64, usize),
        place: GuestChannel,
        packet: Packet,
        buffer: &[u8],
        packets: &Packets,
    ) {
        let Packet { length, handles, lost } = packet;
        let fds = handles.into_descriptors();
        let message = buffer.get(..length).unwrap_or_default().to_vec();
        let (kinds, events) = (kinds(&fds), place == GuestChannel::Events);
        let record = JournalRecord::Received { session, events, message, kinds, lost };
        let (mut inner, which) = (self.lock(), (session, place));
        let before = inner.kept.core.state.received_count(session, place);
        let actions = self.record(&mut inner, &record, fds);
        let counted = inner.kept.core.state.received_count(session, place) > before;
        // Where the session is over, its slot may be another's.
        if counted {
            self.ledger.taken_off(slot, which, before, true);
        }
        packets.discard();
        if counted {
            self.ledger.taken_off(slot, which, before + 1, false);
        }
        self.perform(inner, actions);
    }

    /// Takes what is recorded off a session's sockets, where another process received from them before; false
    /// where it cannot be told what is recorded.
    pub(super) fn take_up_sockets(&self, session: u64) -> bool {
        let inner = self.lock();
        let state = &inner.kept.core.state;
        let Some((sockets, slot)) = inner.kept.sessions.get(&session).zip(state.slot(session))
        else {
            return true;
        };
        let both = [(GuestChannel::Calls, &sockets.calls), (GuestChannel::Events, &sockets.events)];
        both.into_iter().all(|(place, packets)| {
            let recorded = state.received_count(session, place);
            match self.ledger.left_on(slot, (session, place), recorded) {
                LeftOnSocket::New => return true,
                LeftOnSocket::OneRecorded => {
                    let before = recorded.wrapping_sub(1);
                    self.ledger.taken_off(slot, (session, place), before, true);
                    packets.discard();
                }
                // Nobody else receives from it: what is not there was taken off.
                LeftOnSocket::Unknown => match packets.peek(&mut vec![0; MAX_PACKET]) {
                    Err(StreamError::TimedOut | StreamError::Closed) => {}
                    _ => return false,
                },
            }
            self.ledger.taken_off(slot, (session, place), recorded, false);
            true
        })
    }
}

/// Copies of descriptors, to be told along with a record.
pub(super) fn borrowed(fds: &[OwnedFd]) -> Vec<std::os::fd::BorrowedFd<'_>> {
    fds.iter().map(|fd| fd.as_fd()).collect()
}
