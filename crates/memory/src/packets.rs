//! Whole messages with handles beside them: a UNIX socket that keeps the borders of messages.
//!
//! [`Packets`] is the control path of shared memory: between a process and its host's node, and
//! between two nodes on one machine. One message is one system call, and a receiver that is busy
//! may poll for a short time before it sleeps ([`AdaptiveSpin`]): a wake-up costs more than all
//! the rest of a call.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with, socketpair,
};
use rustix::process::Uid;

use crate::handles::{HandleRef, Handles};
use crate::spin::{AdaptiveSpin, nanoseconds};
use crate::stream::{StreamError, pass};

/// Bytes of the longest message.
pub const MAX_PACKET: usize = 32 << 10;

/// The most descriptors beside one message.
pub const MAX_PACKET_DESCRIPTORS: usize = 64;

/// A connection that carries messages, each whole and in order, and what leads to memory beside them.
pub trait PacketStream: Send + Sync + std::fmt::Debug {
    /// Sends a message if the peer has room for it at once; never waits.
    ///
    /// # Errors
    /// [`StreamError::TimedOut`] when the peer has no room now; any other means that the
    /// connection is of no more use.
    fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError>;

    /// Sends a message whose answer nobody needs. Whether the answer will come anyway, to be
    /// received and thrown away.
    ///
    /// # Errors
    /// As [`send`](PacketStream::send).
    fn post(&self, message: &[u8]) -> Result<bool, StreamError> {
        self.send(message, &[]).map(|()| true)
    }

    /// Waits for a message, which goes into `buffer` (of at least [`MAX_PACKET`] bytes): polls as long as
    /// `spin` has found worth while, then sleeps, until `deadline` at most.
    ///
    /// # Errors
    /// [`StreamError::TimedOut`] after the deadline, [`StreamError::Closed`] when there will be none any more.
    fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError>;

    /// Waits until the peer may have room again, or is gone.
    fn wait_sendable(&self);

    /// Ends the conversation in both directions, from any thread.
    fn shut_down(&self);

    /// Gives up this process' share of the connection, which others have as well: for a fork, whose connections are its
    /// parent's. It does not end by that, but does with the last of the others. Nothing can be sent or received here from
    /// then on. May be called in the child of a process with several threads.
    fn abandon_in_fork(&self) {}

    /// Whether handles go along with messages; if not, [`send`](PacketStream::send) fails with any.
    fn passes_memory(&self) -> bool {
        true
    }
}

/// One end of a packet socket.
#[derive(Debug)]
pub struct Packets(OwnedFd);

/// A message as it came.
#[derive(Debug)]
pub struct Packet {
    /// Bytes of it, at the head of the buffer that it was received into.
    pub length: usize,
    /// What is beside it.
    pub handles: Handles,
    /// Whether there were more than this process has room for, which are lost.
    pub lost: bool,
}

impl Packet {
    /// The message if nothing of it was lost.
    ///
    /// # Errors
    /// [`StreamError::TooManyDescriptors`] if something was.
    pub fn whole(self) -> Result<Packet, StreamError> {
        if self.lost { Err(StreamError::TooManyDescriptors) } else { Ok(self) }
    }
}

impl Packets {
    /// Two ends of one connection.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pair() -> std::io::Result<(Packets, Packets)> {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        Ok((Packets(a), Packets(b)))
    }

    /// Connects to who listens at `path`.
    ///
    /// # Errors
    /// When nobody listens there, or the path is too long for a socket.
    pub fn connect(path: &Path) -> std::io::Result<Packets> {
        Packets::connect_until(path, None)
    }

    /// Connects to who listens at `path`, and gives up at `deadline` where the listener's queue is full until then.
    ///
    /// # Errors
    /// As [`connect`](Packets::connect); [`TimedOut`](std::io::ErrorKind::TimedOut) after the deadline.
    pub fn connect_until(path: &Path, deadline: Option<Instant>) -> std::io::Result<Packets> {
        let socket = packet_socket()?;
        loop {
            match connect(&socket, &SocketAddrUnix::new(path)?) {
                Ok(()) => return Ok(Packets(socket)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if deadline.is_some_and(|at| Instant::now() >= at) => {
                    return Err(std::io::ErrorKind::TimedOut.into());
                }
                // The listener's queue is full: it will be there in a moment.
                Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes an end that a peer passed; anything but such a socket is refused.
    ///
    /// # Errors
    /// When it is no packet socket, or cannot be made non-blocking.
    pub fn from_peer(fd: OwnedFd) -> std::io::Result<Packets> {
        if rustix::net::sockopt::socket_domain(&fd)? != AddressFamily::UNIX
            || rustix::net::sockopt::socket_type(&fd)? != SocketType::SEQPACKET
        {
            return Err(std::io::Error::other("the descriptor is no packet socket"));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Packets(fd))
    }

    /// Sends a packet as [`PacketStream::send`] does, without an object of the trait.
    ///
    /// # Errors
    /// As there.
    pub fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PACKET_DESCRIPTORS))];
        let mut passed = None;
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(first) = handles.first() {
            let passed = passed.insert([first.as_descriptor(); MAX_PACKET_DESCRIPTORS]);
            pass(handles, passed, &mut control)?;
        }
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.0, &[IoSlice::new(message)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives a message into `buffer` (of at least [`MAX_PACKET`] bytes) if there is one.
    ///
    /// # Errors
    /// [`StreamError::TimedOut`] when there is none now; [`StreamError::Closed`] when there will
    /// be none any more.
    pub fn try_receive(&self, buffer: &mut [u8]) -> Result<Packet, StreamError> {
        self.receive_now(buffer, RecvFlags::empty())
    }

    /// Looks at the next message as [`try_receive`](Packets::try_receive) does, and leaves it where it is: the
    /// handles are copies of those that come with it.
    ///
    /// # Errors
    /// As there.
    pub fn peek(&self, buffer: &mut [u8]) -> Result<Packet, StreamError> {
        self.receive_now(buffer, RecvFlags::PEEK)
    }

    /// Throws the next message away; false if there is none.
    pub fn discard(&self) -> bool {
        // Received without room for them, descriptors are closed by the system.
        loop {
            match rustix::net::recv(&self.0, &mut [0; 1], RecvFlags::DONTWAIT) {
                Ok((received, _)) => return received > 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    fn receive_now(&self, buffer: &mut [u8], how: RecvFlags) -> Result<Packet, StreamError> {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PACKET_DESCRIPTORS))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(buffer)];
            let flags = how | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = match recvmsg(&self.0, &mut slices, &mut control, flags) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let mut handles = Handles::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(passed) = message {
                    handles.extend(passed);
                }
            }
            if received.bytes == 0 {
                return Err(StreamError::Closed);
            }
            if received.flags.contains(ReturnFlags::TRUNC) {
                return Err(StreamError::Socket(Errno::MSGSIZE));
            }
            let lost = received.flags.contains(ReturnFlags::CTRUNC);
            return Ok(Packet { length: received.bytes, handles, lost });
        }
    }

    /// Receives a packet as [`PacketStream::receive`] does, without an object of the trait.
    ///
    /// # Errors
    /// As there.
    pub fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        let begun = Instant::now();
        let budget = Duration::from_nanos(spin.budget_ns());
        loop {
            match self.try_receive(buffer) {
                Err(StreamError::TimedOut) => {}
                other => {
                    spin.found();
                    return other;
                }
            }
            if begun.elapsed() >= budget {
                break;
            }
            // Whoever is to answer may need this processor.
            std::thread::yield_now();
        }
        let outcome = loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !self.wait_readable(left) {
                break Err(StreamError::TimedOut);
            }
            match self.try_receive(buffer) {
                Err(StreamError::TimedOut) => {}
                other => break other,
            }
        };
        spin.waited(nanoseconds(begun.elapsed()));
        outcome
    }

    /// Sleeps until there is something to receive, or the peer is gone; false after `left`.
    fn wait_readable(&self, left: Option<Duration>) -> bool {
        let left = left.map(|left| rustix::time::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut polled = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut polled, left.as_ref()) {
            Ok(0) => false,
            // An interrupted wait is a look too many.
            _ => true,
        }
    }

    /// The user of the process at the other end, as the system knows it.
    ///
    /// # Errors
    /// When the system cannot tell.
    pub fn peer_user(&self) -> std::io::Result<Uid> {
        Ok(rustix::net::sockopt::socket_peercred(&self.0)?.uid)
    }

    /// Ends the conversation in both directions, from any thread.
    pub fn shut_down(&self) {
        // Fails only when it is shut down already.
        let _ = shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl PacketStream for Packets {
    fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        Packets::send(self, message, handles)
    }

    fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        Packets::receive(self, buffer, spin, deadline)
    }

    fn wait_sendable(&self) {
        let mut polled = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::OUT)];
        // An interrupted wait is a try too many.
        let _ = rustix::event::poll(&mut polled, None);
    }

    fn shut_down(&self) {
        Packets::shut_down(self);
    }

    fn abandon_in_fork(&self) {
        // The number stays this one's, and nobody else is given it.
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let Ok(nowhere) = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty()) else {
            return;
        };
        // SAFETY: the descriptor is open and this one's; it is neither closed nor given away.
        let own = unsafe { OwnedFd::from_raw_fd(self.0.as_raw_fd()) };
        let mut own = std::mem::ManuallyDrop::new(own);
        // Where it fails, the connection stays as it is.
        let _ = rustix::io::dup3(&nowhere, &mut own, rustix::io::DupFlags::CLOEXEC);
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Packets> for OwnedFd {
    fn from(packets: Packets) -> OwnedFd {
        packets.0
    }
}

fn packet_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Listens for connections that carry messages.
#[derive(Debug)]
pub struct PacketListener(OwnedFd);

impl PacketListener {
    /// Listens at `path`; a socket left there by a process that is gone is replaced.
    ///
    /// # Errors
    /// When another process listens there, or the path cannot be made.
    pub fn bind(path: &Path) -> std::io::Result<PacketListener> {
        let found = Packets::connect_until(path, Some(Instant::now()));
        // One whose queue is full is there as well.
        let full = |error: std::io::Error| error.kind() == std::io::ErrorKind::TimedOut;
        crate::socket::place(path, found.map_or_else(full, |_| true), |path| {
            let socket = packet_socket()?;
            bind(&socket, &SocketAddrUnix::new(path)?)?;
            listen(&socket, 1024)?;
            Ok(PacketListener(socket))
        })
    }

    /// Goes on listening on the socket of another process, which passed it.
    pub fn resume(socket: OwnedFd) -> PacketListener {
        PacketListener(socket)
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn accept(&self) -> std::io::Result<Packets> {
        loop {
            let mut polled = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut polled, None) {
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Packets(socket)),
                Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for PacketListener {
    /// Readable when somebody has connected.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AsHandle, Event};

    #[test]
    fn messages_keep_their_borders_and_descriptors() {
        let (a, b) = Packets::pair().unwrap();
        let event = Event::new().unwrap();
        a.send(b"one", &[event.as_handle()]).unwrap();
        a.send(b"three", &[]).unwrap();
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let mut first = b.receive(&mut buffer, &mut spin, None).unwrap();
        assert_eq!((first.length, first.handles.len()), (3, 1));
        first.handles.event().unwrap().ring();
        assert!(event.drain());
        assert_eq!(b.try_receive(&mut buffer).unwrap().length, 5);
        assert_eq!(b.try_receive(&mut buffer).unwrap_err(), StreamError::TimedOut);
        drop(a);
        assert_eq!(b.try_receive(&mut buffer).unwrap_err(), StreamError::Closed);
    }

    #[test]
    fn a_listener_that_takes_nobody_is_waited_for_until_the_deadline() {
        let path = std::env::temp_dir().join(format!("rackbus-full-{}", std::process::id()));
        let socket = packet_socket().unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 0).unwrap();
        let now = || Packets::connect_until(&path, Some(Instant::now()));
        let mut waiting = Vec::new();
        let error = loop {
            match now() {
                Ok(packets) => waiting.push(packets),
                Err(error) => break error,
            }
        };
        assert_eq!((waiting.len(), error.kind()), (1, std::io::ErrorKind::TimedOut));
        assert!(PacketListener::bind(&path).is_err());
        // When one of them is taken, there is room.
        let listener = PacketListener::resume(socket);
        let _taken = listener.accept().unwrap();
        assert!(now().is_ok());
        drop(listener);
        assert_eq!(now().unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
        let _ = std::fs::remove_file(&path);
    }

    #[test]
    fn a_full_peer_is_not_waited_for() {
        let (a, _b) = Packets::pair().unwrap();
        let sent = (0..100_000).find(|_| a.send(&[7; 1000], &[]).is_err());
        assert!(sent.is_some());
        assert_eq!(a.send(&[7; 1000], &[]).unwrap_err(), StreamError::TimedOut);
    }
}
