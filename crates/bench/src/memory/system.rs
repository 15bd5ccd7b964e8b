//! What the system has to tell somebody something: eventfds and UNIX sockets.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use super::pingpong::PingPongEnd;
use crate::BenchError;

/// Bytes of a message.
pub const MESSAGE: usize = 64;

/// Two eventfds, one in each direction.
pub struct EventFd {
    to: OwnedFd,
    from: OwnedFd,
}

impl EventFd {
    /// Both sides; both sleep until they are rung.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pair() -> Result<(EventFd, EventFd), BenchError> {
        let make = || -> std::io::Result<(OwnedFd, OwnedFd)> {
            let one = eventfd(0, EventfdFlags::CLOEXEC)?;
            let other = one.try_clone()?;
            Ok((one, other))
        };
        let (there, back) = (make().and_then(|it| Ok((it, make()?))))
            .map_err(BenchError::io("making an eventfd"))?;
        Ok((EventFd { to: there.0, from: back.0 }, EventFd { to: back.1, from: there.1 }))
    }
}

impl PingPongEnd for EventFd {
    fn send(&mut self) -> Result<(), BenchError> {
        let written = rustix::io::write(&self.to, &1u64.to_ne_bytes());
        written.map(drop).map_err(|errno| BenchError::io("ringing an eventfd")(errno.into()))
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        let read = rustix::io::read(&self.from, &mut [0; 8]);
        read.map(drop).map_err(|errno| BenchError::io("reading an eventfd")(errno.into()))
    }
}

/// One side of a pair of UNIX sockets that keep the borders of messages.
pub struct Socket {
    socket: OwnedFd,
    data: [u8; MESSAGE],
    flags: RecvFlags,
}

impl Socket {
    /// Both sides; with `DONTWAIT` among the flags they poll.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pair(kind: SocketType, flags: RecvFlags) -> Result<(Socket, Socket), BenchError> {
        let (one, other) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
            .map_err(|errno| BenchError::io("making a socket")(errno.into()))?;
        let side = |socket| Socket { socket, data: [0; MESSAGE], flags };
        Ok((side(one), side(other)))
    }
}

impl PingPongEnd for Socket {
    fn send(&mut self) -> Result<(), BenchError> {
        let sent = send(&self.socket, &self.data, SendFlags::empty());
        sent.map(drop).map_err(|errno| BenchError::io("sending a message")(errno.into()))
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        loop {
            match recv(&self.socket, &mut self.data[..], self.flags) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(BenchError::io("receiving a message")(errno.into())),
            }
        }
    }
}
