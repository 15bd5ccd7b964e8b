//! A conversation over TLS on a TCP connection: bytes for who may wait, and a [`Carrier`] for who may not.
//!
//! Both go through one lock, which is held for no system call that waits.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rackbus_identity::rustls::{Connection, Error};
use rackbus_identity::{Certified, IsRevoked, Revocations, WatchedConnection};
use rackbus_memory::{Carrier, HandleRef, Handles, PacketStream, Stream, StreamError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt;

use crate::whole::{HoldingStream, WholePackets};
use crate::{Conversation, OnRevoked, VERSIONS};

/// How long an idle peer may be silent before its kernel is asked whether it is there.
const SILENCE: Duration = Duration::from_secs(1);
/// How long the peer's kernel may leave what was sent unacknowledged before the connection counts as lost. It does
/// so also for a process that stalls or is busy, until its buffers are full.
const UNACKNOWLEDGED: Duration = Duration::from_millis(750);
/// Bytes that TLS holds at most before the socket takes them.
const BUFFER: usize = 256 << 10;
/// Bytes that are taken from the socket at once.
const RECEIVED: usize = 64 << 10;
/// Times that so many are taken before others have a turn, where they carry nothing.
const RECEIVES: usize = 2;

/// A conversation over TLS.
#[derive(Debug, Clone)]
pub(crate) struct TlsConversation(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: Arc<TcpStream>,
    tls: Mutex<TlsState>,
    /// How long the peer may take to take what is sent.
    limit: Duration,
    /// How long it may take for what is to be received.
    receive_limit: Mutex<Option<Duration>>,
    /// Ends it when the peer's certificate is revoked.
    watched: OnceLock<WatchedConnection>,
    /// The version of the link that both sides speak, when they have said so.
    version: OnceLock<u32>,
}

/// TLS, and what came from the socket and has not gone through it. TLS itself takes few bytes at a time: a call of the
/// system for each of these takes as long as to open them.
#[derive(Debug)]
struct TlsState {
    connection: Connection,
    buffer: Box<[u8]>,
    unread: Range<usize>,
}

impl TlsConversation {
    /// Over a connection that was made, with a handshake that ends within `limit`.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn begin(
        socket: TcpStream,
        mut tls: Connection,
        limit: Duration,
    ) -> std::io::Result<TlsConversation> {
        prepare(&socket)?;
        tls.set_buffer_limit(Some(BUFFER));
        let buffer = vec![0; RECEIVED].into_boxed_slice();
        let tls = Mutex::new(TlsState { connection: tls, buffer, unread: 0..0 });
        let receive_limit = Mutex::new(Some(limit));
        let socket = Arc::new(socket);
        let (watched, version) = Default::default();
        let shared = Shared { socket, tls, limit, receive_limit, watched, version };
        let conversation = TlsConversation(Arc::new(shared));
        let deadline = Instant::now() + limit;
        loop {
            let mut tls = conversation.0.tls();
            if !tls.connection.is_handshaking() {
                break;
            }
            let progress = conversation.0.step(&mut tls);
            let wants_write = tls.connection.wants_write();
            drop(tls);
            // What TLS says of the peer's certificate is worth more than that the conversation is over.
            if !progress? {
                conversation.0.wait(wants_write, Some(deadline)).map_err(std::io::Error::other)?;
            } else if Instant::now() > deadline {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        Ok(conversation)
    }

    /// Ends it when the certificate that the peer has shown is revoked.
    ///
    /// # Errors
    /// Why the peer is not to be spoken to: it is nobody of the rack, or no more.
    pub(crate) fn end_when_revoked(&self, revocations: &Revocations) -> Result<Certified, String> {
        let certified = self.peer(Certified::of);
        let certified = certified.ok_or("its certificate is of nobody of a rack")?;
        let socket = self.0.socket.clone();
        let end = move || {
            tracing::warn!("a conversation is ended: the peer's certificate was revoked");
            let _ = socket.shutdown(std::net::Shutdown::Both);
        };
        let watched = revocations.watch(certified.clone(), end).map_err(|it| it.to_string())?;
        // It is asked once, when the conversation begins.
        let _ = self.0.watched.set(watched);
        Ok(certified)
    }

    /// Notes the version of the link that both sides speak.
    pub(crate) fn agree(&self, version: u32) {
        // It is agreed once, when the conversation begins.
        let _ = self.0.version.set(version);
    }

    /// What is to be received next may take for ever.
    pub(crate) fn receive_without_limit(&self) {
        *self.0.receive_limit.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The certificate that the peer has shown.
    pub(crate) fn peer<T>(
        &self,
        look: impl FnOnce(&rackbus_identity::rustls::pki_types::CertificateDer<'_>) -> Option<T>,
    ) -> Option<T> {
        look(self.0.tls().connection.peer_certificates()?.first()?)
    }
}

/// Sets what all connections between nodes have: nothing waits for more to send, nothing blocks, and a peer
/// whose machine is gone is noticed.
fn prepare(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENCE)?;
    sockopt::set_tcp_keepintvl(socket, SILENCE)?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    sockopt::set_tcp_user_timeout(socket, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}

pub(crate) fn stream_error(error: &std::io::Error) -> StreamError {
    match error.raw_os_error() {
        Some(number) => Errno::from_raw_os_error(number).into(),
        None if error.kind() == ErrorKind::TimedOut => StreamError::TimedOut,
        None => StreamError::Closed,
    }
}

impl Shared {
    fn tls(&self) -> MutexGuard<'_, TlsState> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends and receives what can be now; whether there was anything.
    fn step(&self, tls: &mut TlsState) -> std::io::Result<bool> {
        let sent = self.send_out(&mut tls.connection)?;
        Ok(self.take_in(tls)? || sent)
    }

    fn send_out(&self, tls: &mut Connection) -> std::io::Result<bool> {
        let mut some = false;
        while tls.wants_write() {
            match tls.write_tls(&mut &*self.socket) {
                Ok(_) => some = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(some)
    }

    /// Has TLS take what is there, once, as far as it does that before what it has is read; false when there is nothing.
    fn take_in(&self, tls: &mut TlsState) -> std::io::Result<bool> {
        let TlsState { connection, buffer, unread } = tls;
        if !connection.wants_read() {
            return Ok(false);
        }
        if Range::is_empty(unread) {
            match (&*self.socket).read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => *unread = 0..count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        while connection.wants_read() && !Range::is_empty(unread) {
            unread.start += connection.read_tls(&mut &buffer[unread.clone()])?;
            if let Err(error) = connection.process_new_packets() {
                // The peer is told why.
                let _ = self.send_out(connection);
                tracing::warn!(%error, "TLS with another node failed");
                return Err(refused(error));
            }
        }
        Ok(true)
    }

    /// Waits until something can be received, or sent, or it is `until`.
    fn wait(&self, to_send: bool, until: Option<Instant>) -> Result<(), StreamError> {
        let flags = if to_send { PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [PollFd::new(&self.socket, flags)];
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = left.map(|left| left.try_into().unwrap_or_default());
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(0) => Err(StreamError::TimedOut),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn receive_limit(&self) -> Option<Duration> {
        *self.receive_limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What TLS found wrong.
fn refused(error: Error) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidData, error)
}

impl Stream for TlsConversation {
    /// Handles lead nowhere on another machine.
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        if !handles.is_empty() {
            return Err(StreamError::Socket(Errno::OPNOTSUPP));
        }
        let deadline = Instant::now() + self.0.limit;
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let mut tls = self.0.tls();
                let taken = tls.connection.writer().write(rest);
                let taken = taken.map_err(|error| stream_error(&error))?;
                rest = &rest[taken..];
                let sent =
                    self.0.send_out(&mut tls.connection).map_err(|error| stream_error(&error))?;
                drop(tls);
                if taken == 0 && !sent {
                    self.0.wait(true, Some(deadline))?;
                }
            }
        }
        loop {
            let mut tls = self.0.tls();
            self.0.send_out(&mut tls.connection).map_err(|error| stream_error(&error))?;
            if !tls.connection.wants_write() {
                return Ok(());
            }
            drop(tls);
            self.0.wait(true, Some(deadline))?;
        }
    }

    fn receive(&self, buffer: &mut [u8], _handles: &mut Handles) -> Result<(), StreamError> {
        let mut done = 0;
        // For all of it: a peer may not send a byte now and then for ever.
        let deadline = self.0.receive_limit().map(|limit| Instant::now() + limit);
        while done < buffer.len() {
            match self.receive_some(&mut buffer[done..], stream_error)? {
                0 => self.0.wait(false, deadline)?,
                count => done += count,
            }
        }
        Ok(())
    }

    fn wait_closed(&self) {
        loop {
            let mut fds = [PollFd::new(&self.0.socket, PollFlags::RDHUP)];
            match rustix::event::poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }

    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        let other = PollFd::from_borrowed_fd(other, PollFlags::IN);
        let closed = PollFd::new(&self.0.socket, PollFlags::RDHUP);
        // An interrupted wait is a wake-up too many: the caller looks whether it has ended.
        let _ = rustix::event::poll(&mut [closed, other], None);
    }

    fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.0.socket, PollFlags::RDHUP)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
    }

    fn shut_down(&self) {
        // Fails only when it is shut down already.
        let _ = self.0.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl TlsConversation {
    /// Receives what is there; 0 when there is nothing, or nothing yet in the records that were taken: the socket is readable
    /// then where there are more. Less than `buffer` has room for is all that was taken from the socket.
    pub(crate) fn receive_some(
        &self,
        buffer: &mut [u8],
        failed: fn(&std::io::Error) -> StreamError,
    ) -> Result<usize, StreamError> {
        let mut tls = self.0.tls();
        let (mut done, mut turns) = (0, 0);
        loop {
            match tls.connection.reader().read(&mut buffer[done..]) {
                // What came before the end is taken first.
                Ok(0) if done == 0 && !buffer.is_empty() => return Err(StreamError::Closed),
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(&error)),
            }
            if tls.unread.is_empty() {
                // Records may be empty, as many as the peer likes.
                if done > 0 || turns == RECEIVES {
                    return Ok(done);
                }
                turns += 1;
            }
            if done == buffer.len() || !self.0.take_in(&mut tls).map_err(|error| failed(&error))? {
                return Ok(done);
            }
        }
    }
}

/// For messages, which are put in whole.
impl HoldingStream for TlsConversation {
    fn put(&self, parts: &[&[u8]]) -> Result<bool, StreamError> {
        let mut tls = self.0.tls();
        // In one record, as far as that goes: each is sealed, sent and opened by itself.
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let taken = tls.connection.writer().write_vectored(rest);
            let taken = taken.map_err(|error| stream_error(&error))?;
            if taken == 0 {
                return Err(StreamError::Closed);
            }
            IoSlice::advance_slices(&mut rest, taken);
        }
        self.0.send_out(&mut tls.connection).map_err(|error| stream_error(&error))?;
        Ok(tls.connection.wants_write())
    }

    fn give_held(&self) -> Result<(), StreamError> {
        Stream::send(self, &[], &[])
    }

    fn receive_now(&self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        self.receive_some(buffer, stream_error)
    }

    fn wait_readable(&self, until: Option<Instant>) -> Result<(), StreamError> {
        self.0.wait(false, until)
    }
}

/// What a connection's failure means for what is carried: only what TLS says of the end is meant by the peer, and
/// not a socket that is closed or reset.
fn carried_error(error: &std::io::Error) -> StreamError {
    match stream_error(error) {
        StreamError::Closed => StreamError::Socket(Errno::CONNRESET),
        other => other,
    }
}

impl Carrier for TlsConversation {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let mut tls = self.0.tls();
        let taken = tls.connection.writer().write(bytes);
        let taken = taken.map_err(|error| carried_error(&error))?;
        self.0.send_out(&mut tls.connection).map_err(|error| carried_error(&error))?;
        Ok(taken)
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        let mut tls = self.0.tls();
        self.0.send_out(&mut tls.connection).map_err(|error| carried_error(&error))?;
        Ok(!tls.connection.wants_write())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        self.receive_some(buffer, carried_error)
    }

    fn finish(&self) {
        let mut tls = self.0.tls();
        tls.connection.send_close_notify();
        // As far as that goes now: a peer that does not hear it is refused when it comes again.
        let _ = self.0.send_out(&mut tls.connection);
        drop(tls);
        Stream::shut_down(self);
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }

    fn shut_down(&self) {
        Stream::shut_down(self);
    }
}

impl Conversation for TlsConversation {
    /// Nothing need be said for it: messages follow.
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        self.receive_without_limit();
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

    fn local_address(&self) -> Option<std::net::IpAddr> {
        self.0.socket.local_addr().ok().map(|address| address.ip())
    }
}
