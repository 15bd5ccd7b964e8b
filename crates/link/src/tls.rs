//! A conversation over TLS on a TCP connection: bytes for who may wait, and a [`Carrier`] for who may not.
//!
//! Both go through one lock, which is held for no system call that waits. Records are sealed and opened by this process
//! (`process`), or by the kernel where it can and the conversation may be resumed (`kernel`).

mod alert;
pub(crate) mod kernel;
mod process;

use std::io::{ErrorKind, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kernel::KernelTls;
use process::ProcessTls;
use rackbus_identity::rustls::Connection;
use rackbus_identity::rustls::pki_types::CertificateDer;
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

/// A conversation over TLS.
#[derive(Debug, Clone)]
pub(crate) struct TlsConversation(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: Arc<TcpStream>,
    tls: Mutex<Records>,
    /// The certificate that the peer has shown.
    peer: Option<CertificateDer<'static>>,
    /// How long the peer may take to take what is sent.
    limit: Duration,
    /// How long it may take for what is to be received.
    receive_limit: Mutex<Option<Duration>>,
    /// Ends it when the peer's certificate is revoked.
    watched: OnceLock<WatchedConnection>,
    /// The version of the link that both sides speak, when they have said so.
    version: OnceLock<u32>,
}

/// Who seals and opens the records of a connection.
#[derive(Debug)]
enum Records {
    /// This process, by rustls. In a box: it is large.
    Process(Box<ProcessTls>),
    /// The kernel, from the end of the handshake on.
    Kernel(KernelTls),
    /// Nobody: the kernel did not take over what this process had given up.
    Nobody,
}

impl Records {
    /// Puts as much as there is room for: how many bytes.
    fn write(&mut self, socket: &TcpStream, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        match self {
            Records::Process(tls) => tls.write(parts),
            Records::Kernel(tls) => tls.write(socket, parts),
            Records::Nobody => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Puts all of it, and keeps what the socket does not take.
    fn put(&mut self, socket: &TcpStream, parts: &[&[u8]]) -> std::io::Result<()> {
        match self {
            Records::Process(tls) => tls.put(parts),
            Records::Kernel(tls) => tls.put(socket, parts),
            Records::Nobody => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Sends what is kept, as far as the socket takes it; whether it took any.
    fn send_out(&mut self, socket: &TcpStream) -> std::io::Result<bool> {
        match self {
            Records::Process(tls) => tls.send_out(socket),
            Records::Kernel(tls) => tls.send_out(socket),
            Records::Nobody => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Whether the socket has still to take something.
    fn has_kept(&self) -> bool {
        match self {
            Records::Process(tls) => tls.has_kept(),
            Records::Kernel(tls) => tls.has_kept(),
            Records::Nobody => false,
        }
    }

    /// Receives what is there: 0 bytes when there is nothing, `None` when the peer has said that nothing follows.
    fn receive(&mut self, socket: &TcpStream, buffer: &mut [u8]) -> std::io::Result<Option<usize>> {
        match self {
            Records::Process(tls) => tls.receive(socket, buffer),
            Records::Kernel(tls) => tls.receive(socket, buffer),
            Records::Nobody => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Tells the peer that nothing follows, as far as that goes now.
    fn close(&mut self, socket: &TcpStream) {
        match self {
            Records::Process(tls) => tls.close(socket),
            Records::Kernel(tls) => tls.close(socket),
            Records::Nobody => {}
        }
    }
}

impl TlsConversation {
    /// Over a connection that was made, with a handshake that ends within `limit`.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn begin(
        socket: TcpStream,
        tls: Connection,
        limit: Duration,
    ) -> std::io::Result<TlsConversation> {
        prepare(&socket)?;
        let mut tls = Box::new(ProcessTls::new(tls));
        let deadline = Instant::now() + limit;
        while tls.connection().is_handshaking() {
            // What TLS says of the peer's certificate is worth more than that the conversation is over.
            if !tls.step(&socket)? {
                wait(&socket, tls.has_kept(), Some(deadline)).map_err(std::io::Error::other)?;
            } else if Instant::now() > deadline {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        let peer = tls.connection().peer_certificates().and_then(|shown| shown.first());
        let peer = peer.map(|certificate| certificate.clone().into_owned());
        let tls = Mutex::new(Records::Process(tls));
        let receive_limit = Mutex::new(Some(limit));
        let socket = Arc::new(socket);
        let (watched, version) = Default::default();
        let shared = Shared { socket, tls, peer, limit, receive_limit, watched, version };
        Ok(TlsConversation(Arc::new(shared)))
    }

    /// From now on the kernel seals and opens what is sent and received, if it can. Only where nothing is on its way: the
    /// peer has said all that it says before it is answered, and waits for that.
    ///
    /// # Errors
    /// What is still to be sent cannot be, or the kernel has refused the keys: the conversation is over then.
    pub(crate) fn seal_by_kernel(&self) -> Result<(), StreamError> {
        Stream::send(self, &[], &[])?;
        // Before anything is locked: it may take as long as to load a module.
        if !kernel::is_there() {
            return Ok(());
        }
        let mut tls = self.0.tls();
        let Records::Process(process) = &mut *tls else { return Ok(()) };
        let is_ready = process.can_be_given_up() && KernelTls::takes(process.connection());
        if !is_ready || !kernel::prepare(&self.0.socket) {
            return Ok(());
        }
        let Records::Process(process) = std::mem::replace(&mut *tls, Records::Nobody) else {
            return Ok(());
        };
        let kernel = process.into_secrets().and_then(|it| KernelTls::begin(&self.0.socket, it));
        *tls = Records::Kernel(kernel.map_err(|error| stream_error(&error))?);
        Ok(())
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
        look: impl FnOnce(&CertificateDer<'static>) -> Option<T>,
    ) -> Option<T> {
        look(self.0.peer.as_ref()?)
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

/// Waits until something can be received, or sent, or it is `until`.
fn wait(socket: &TcpStream, to_send: bool, until: Option<Instant>) -> Result<(), StreamError> {
    let flags = if to_send { PollFlags::OUT } else { PollFlags::IN };
    let mut fds = [PollFd::new(socket, flags)];
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let limit = left.map(|left| left.try_into().unwrap_or_default());
    match rustix::event::poll(&mut fds, limit.as_ref()) {
        Ok(0) => Err(StreamError::TimedOut),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Shared {
    fn tls(&self) -> MutexGuard<'_, Records> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, to_send: bool, until: Option<Instant>) -> Result<(), StreamError> {
        wait(&self.socket, to_send, until)
    }

    fn receive_limit(&self) -> Option<Duration> {
        *self.receive_limit.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
                let taken = tls.write(&self.0.socket, &[IoSlice::new(rest)]);
                let taken = taken.map_err(|error| stream_error(&error))?;
                rest = &rest[taken..];
                let sent = tls.send_out(&self.0.socket).map_err(|error| stream_error(&error))?;
                drop(tls);
                if taken == 0 && !sent {
                    self.0.wait(true, Some(deadline))?;
                }
            }
        }
        loop {
            let mut tls = self.0.tls();
            tls.send_out(&self.0.socket).map_err(|error| stream_error(&error))?;
            if !tls.has_kept() {
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
                // Also where a part of a record has come, of which some kernels say that it can be read.
                0 if deadline.is_some_and(|it| Instant::now() >= it) => {
                    return Err(StreamError::TimedOut);
                }
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
        let received = self.0.tls().receive(&self.0.socket, buffer);
        received.map_err(|error| failed(&error))?.ok_or(StreamError::Closed)
    }
}

/// For messages, which are put in whole.
impl HoldingStream for TlsConversation {
    fn put(&self, parts: &[&[u8]]) -> Result<bool, StreamError> {
        let mut tls = self.0.tls();
        tls.put(&self.0.socket, parts).map_err(|error| stream_error(&error))?;
        tls.send_out(&self.0.socket).map_err(|error| stream_error(&error))?;
        Ok(tls.has_kept())
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
        let taken = tls.write(&self.0.socket, &[IoSlice::new(bytes)]);
        let taken = taken.map_err(|error| carried_error(&error))?;
        tls.send_out(&self.0.socket).map_err(|error| carried_error(&error))?;
        Ok(taken)
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        let mut tls = self.0.tls();
        tls.send_out(&self.0.socket).map_err(|error| carried_error(&error))?;
        Ok(!tls.has_kept())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        self.receive_some(buffer, carried_error)
    }

    fn finish(&self) {
        // A peer that does not hear it is refused when it comes again.
        self.0.tls().close(&self.0.socket);
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
