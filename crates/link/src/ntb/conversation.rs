//! A conversation through an NTB, as the node has it: one end of a socket pair, whose other end the bridge's thread has.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rackbus_identity::{Certified, IsRevoked, Revocations, Subject, WatchedConnection};
use rackbus_memory::{Carrier, HandleRef, Handles, PacketStream, Stream, StreamError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::whole::{HoldingStream, WholePackets};
use crate::{Conversation, OnRevoked, VERSIONS};

/// How long the peer may take to take what is sent, and to answer a hello.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(3);

/// Sends what the socket takes now; 0 when it takes nothing.
pub(super) fn send_some(socket: &UnixStream, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            other => return other,
        }
    }
}

/// Receives what is there; `None` when there is nothing, and 0 bytes when nothing comes any more.
pub(super) fn receive_some(socket: &UnixStream, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
    loop {
        match rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((count, _)) => return Ok(Some(count)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// A conversation. Copies of it are the same one.
#[derive(Debug, Clone)]
pub(super) struct NtbConversation(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: Arc<UnixStream>,
    /// What was put and the socket did not take.
    held: Mutex<Vec<u8>>,
    /// The version of the link that both sides speak, when they have said so.
    version: OnceLock<u32>,
    /// Ends it when the peer's host is revoked.
    watched: OnceLock<WatchedConnection>,
}

impl NtbConversation {
    /// Over a socket whose other end the bridge has. The peer may take so long for the first answer as it may to take what is
    /// sent.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn new(socket: UnixStream) -> std::io::Result<NtbConversation> {
        socket.set_read_timeout(Some(TIME_LIMIT))?;
        socket.set_write_timeout(Some(TIME_LIMIT))?;
        let (held, version, watched) = Default::default();
        let socket = Arc::new(socket);
        Ok(NtbConversation(Arc::new(Shared { socket, held, version, watched })))
    }

    /// Ends it when all that `host`, the peer, was given is revoked.
    ///
    /// # Errors
    /// When it is by now.
    pub(super) fn end_when_revoked(
        &self,
        revocations: &Revocations,
        host: &str,
    ) -> Result<(), IsRevoked> {
        let (socket, peer) = (self.0.socket.clone(), host.to_owned());
        let end = move || {
            tracing::warn!(peer, "a conversation through the NTB is ended: the peer was revoked");
            socket.shut_down();
        };
        let peer = Certified::unshown(Subject::Node(host.to_owned()));
        // It is asked once, when the conversation begins.
        let _ = self.0.watched.set(revocations.watch(peer, end)?);
        Ok(())
    }

    /// Notes the version of the link that both sides speak; from then on what is to be received may take for ever.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn agree(&self, version: u32) -> std::io::Result<()> {
        // It is agreed once, when the conversation begins.
        let _ = self.0.version.set(version);
        self.0.socket.set_read_timeout(None)
    }

    fn held(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the socket is ready, or it is `until`.
    fn wait(&self, ready: PollFlags, until: Option<Instant>) -> Result<(), StreamError> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.map(|left| left.try_into().unwrap_or_default());
        match rustix::event::poll(&mut [PollFd::new(&*self.0.socket, ready)], limit.as_ref()) {
            Ok(0) => Err(StreamError::TimedOut),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the socket what is held, as far as it takes that; whether something is left.
    fn give(&self) -> Result<bool, StreamError> {
        let mut held = self.held();
        while !held.is_empty() {
            match send_some(&self.0.socket, &held)? {
                0 => return Ok(true),
                count => drop(held.drain(..count)),
            }
        }
        Ok(false)
    }
}

impl Stream for NtbConversation {
    /// Handles lead nowhere on another machine.
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        match handles {
            [] => self.0.socket.send(parts, &[]),
            _ => Err(StreamError::Socket(Errno::OPNOTSUPP)),
        }
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        self.0.socket.receive(buffer, handles)
    }

    fn wait_closed(&self) {
        self.0.socket.wait_closed();
    }

    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        self.0.socket.wait_closed_or(other);
    }

    fn is_closed(&self) -> bool {
        self.0.socket.is_closed()
    }

    fn shut_down(&self) {
        self.0.socket.shut_down();
    }
}

impl HoldingStream for NtbConversation {
    fn put(&self, parts: &[&[u8]]) -> Result<bool, StreamError> {
        parts.iter().for_each(|part| self.held().extend_from_slice(part));
        self.give()
    }

    fn give_held(&self) -> Result<(), StreamError> {
        let until = Instant::now() + TIME_LIMIT;
        while self.give()? {
            self.wait(PollFlags::OUT, Some(until))?;
        }
        Ok(())
    }

    fn receive_now(&self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        match receive_some(&self.0.socket, buffer)? {
            Some(0) => Err(StreamError::Closed),
            count => Ok(count.unwrap_or(0)),
        }
    }

    fn wait_readable(&self, until: Option<Instant>) -> Result<(), StreamError> {
        self.wait(PollFlags::IN, until)
    }
}

/// The end of a conversation is not the end of what it carries.
fn carried_error(error: StreamError) -> StreamError {
    match error {
        StreamError::Closed => StreamError::Socket(Errno::CONNRESET),
        other => other,
    }
}

impl Carrier for NtbConversation {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        send_some(&self.0.socket, bytes).map_err(|errno| carried_error(errno.into()))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        self.receive_now(buffer).map_err(carried_error)
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }

    fn shut_down(&self) {
        Stream::shut_down(self);
    }
}

impl Conversation for NtbConversation {
    /// Nothing need be said for it: messages follow.
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        Ok(Arc::new(WholePackets::new(self.clone())?))
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        self.offer_packets()
    }

    fn carrier(&self) -> Option<Box<dyn Carrier>> {
        Some(Box::new(self.clone()))
    }

    fn when_revoked(&self, end: OnRevoked) -> Result<Option<WatchedConnection>, IsRevoked> {
        self.0.watched.get().map(|watched| watched.watch_also(end)).transpose()
    }

    fn version(&self) -> u32 {
        self.0.version.get().copied().unwrap_or(VERSIONS.newest())
    }
}
