//! Bytes with handles beside them: what carries messages between processes that share memory.
//!
//! [`Stream`] is the face of every connection that grants memory: a UNIX socket here, and what a
//! link between nodes gives. Handles travel with the first byte of what is sent; over a socket they are
//! descriptors. What a thread waits for besides is a descriptor all the same: it is polled here, and nothing is passed by it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::handles::{HandleRef, Handles};

/// The most descriptors one call passes (Linux's limit), so that none of a peer's is ever lost
/// unseen.
pub const MAX_DESCRIPTORS: usize = 253;

/// Why a stream failed. After any of these it is of no more use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not answer, or did not take what was sent, within the time limit.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// The peer passed more descriptors than this process may hold, or than a message has.
    #[error("the peer passed too many descriptors")]
    TooManyDescriptors,
    /// The operating system failed the operation.
    #[error("socket: {0}")]
    Socket(Errno),
}

impl From<Errno> for StreamError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PIPE | Errno::CONNRESET => StreamError::Closed,
            Errno::AGAIN | Errno::TIMEDOUT => StreamError::TimedOut,
            Errno::TOOMANYREFS | Errno::MFILE => StreamError::TooManyDescriptors,
            other => StreamError::Socket(other),
        }
    }
}

/// A connection that carries bytes in order, and handles beside them.
pub trait Stream: Send + Sync {
    /// Sends `parts` one after the other, with `handles` beside the first byte.
    ///
    /// # Errors
    /// [`StreamError`].
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError>;

    /// Receives exactly `buffer.len()` bytes, and appends the handles that come along.
    ///
    /// # Errors
    /// [`StreamError`].
    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError>;

    /// Waits until the peer is gone (or this side shut the stream down), without reading.
    fn wait_closed(&self);

    /// The same, at most until `other` is readable. Where there is no [handle](Stream::handle), not for
    /// `other`.
    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        let _ = other;
        self.wait_closed();
    }

    /// Whether the peer is gone already. Nothing is read.
    fn is_closed(&self) -> bool;

    /// Ends the conversation in both directions, from any thread: whoever waits in
    /// [`receive`](Stream::receive) or [`wait_closed`](Stream::wait_closed) returns.
    fn shut_down(&self);

    /// What leads another process of this host to the conversation: whoever is passed it can hold the conversation
    /// instead. Readable when there is something to receive or the peer is gone. `None` where another process
    /// cannot hold it.
    fn handle(&self) -> Option<HandleRef<'_>> {
        None
    }
}

/// The time limits of the socket are for all that is received or sent at once, and not for each piece of it: a
/// peer that gives or takes it byte by byte is given up as well.
impl Stream for UnixStream {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut passed = None;
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(first) = handles.first() {
            let passed = passed.insert([first.as_descriptor(); MAX_DESCRIPTORS]);
            pass(handles, passed, &mut control)?;
        }
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut sent = 0;
        let begun = Instant::now();
        // The system's own limit is for each piece of what is sent, so it is waited for here.
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while sent < total {
            match sendmsg(self, &beyond(parts, sent), &mut control, flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if flags.contains(SendFlags::DONTWAIT) => {
                    match self.write_timeout().ok().flatten() {
                        Some(limit) => wait(self, PollFlags::OUT, begun, limit)?,
                        None => flags.remove(SendFlags::DONTWAIT),
                    }
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            control.clear();
        }
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut done = 0;
        let begun = Instant::now();
        while done < buffer.len() {
            if done > 0
                && let Some(limit) = self.read_timeout().ok().flatten()
            {
                wait(self, PollFlags::IN, begun, limit)?;
            }
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut buffer[done..])];
            let received = match recvmsg(self, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    handles.extend(received);
                }
            }
            if received.bytes == 0 {
                return Err(StreamError::Closed);
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || handles.len() > MAX_DESCRIPTORS {
                return Err(StreamError::TooManyDescriptors);
            }
            done += received.bytes;
        }
        Ok(())
    }

    fn wait_closed(&self) {
        loop {
            // POLLHUP and POLLERR are always reported; POLLRDHUP when the peer closes its side.
            let mut fds = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::RDHUP)];
            match rustix::event::poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }

    fn is_closed(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::RDHUP)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
    }

    fn shut_down(&self) {
        // Fails only when it is shut down already.
        let _ = self.shutdown(std::net::Shutdown::Both);
    }

    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        let other = PollFd::from_borrowed_fd(other, PollFlags::IN);
        // An interrupted wait is a wake-up too many: the caller looks whether it has ended.
        let _ = rustix::event::poll(&mut [PollFd::new(self, PollFlags::RDHUP), other], None);
    }

    fn handle(&self) -> Option<HandleRef<'_>> {
        Some(HandleRef::of_descriptor(self.as_fd()))
    }
}

/// Has `control` pass `handles`, as far as it has room; `passed` has room for as many, and lives as long.
pub(crate) fn pass<'s, 'f>(
    handles: &[HandleRef<'f>],
    passed: &'s mut [BorrowedFd<'f>],
    control: &mut SendAncillaryBuffer<'_, 's, 'f>,
) -> Result<(), StreamError> {
    let room = passed.get_mut(..handles.len()).ok_or(StreamError::TooManyDescriptors)?;
    room.iter_mut().zip(handles).for_each(|(to, handle)| *to = handle.as_descriptor());
    let passed = control.push(SendAncillaryMessage::ScmRights(room));
    if passed { Ok(()) } else { Err(StreamError::TooManyDescriptors) }
}

/// Waits until the socket is ready, at most until `limit` after what was `begun`.
fn wait(
    stream: &UnixStream,
    ready: PollFlags,
    begun: Instant,
    limit: Duration,
) -> Result<(), StreamError> {
    loop {
        let left = limit.checked_sub(begun.elapsed()).ok_or(StreamError::TimedOut)?;
        // One that is too long for the system is none.
        let left = left.try_into().ok();
        match rustix::event::poll(&mut [PollFd::new(stream, ready)], left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(StreamError::TimedOut),
            Ok(_) => return Ok(()),
        }
    }
}

/// What is left of `parts` after `skip` bytes.
fn beyond<'a>(parts: &[&'a [u8]], mut skip: usize) -> Vec<IoSlice<'a>> {
    let mut slices = Vec::with_capacity(parts.len());
    for part in parts {
        let gone = skip.min(part.len());
        skip -= gone;
        if gone < part.len() {
            slices.push(IoSlice::new(&part[gone..]));
        }
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn handles_travel_with_the_bytes() {
        let (a, b) = UnixStream::pair().unwrap();
        let (read_end, write_end) = std::io::pipe().unwrap();
        let handle = HandleRef::of_descriptor(write_end.as_fd());
        a.send(&[b"he", b"", b"llo"], &[handle]).unwrap();
        drop(write_end);
        let (mut bytes, mut handles) = ([0; 5], Handles::new());
        b.receive(&mut bytes, &mut handles).unwrap();
        assert_eq!((&bytes, handles.len()), (b"hello", 1));
        rustix::io::write(handles.resource().unwrap().as_descriptor(), b"x").unwrap();
        let mut text = String::new();
        { read_end }.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn the_end_of_a_peer_is_noticed_without_reading() {
        let (a, b) = UnixStream::pair().unwrap();
        a.send(&[b"unread"], &[]).unwrap();
        assert!(!b.is_closed());
        let waiter = std::thread::spawn(move || {
            b.wait_closed();
            assert!(b.is_closed());
        });
        drop(a);
        waiter.join().unwrap();
    }

    #[test]
    fn the_time_limit_is_for_all_that_is_received_or_sent_at_once() {
        let limit = Duration::from_millis(200);
        let (a, b) = UnixStream::pair().unwrap();
        a.set_read_timeout(Some(limit)).unwrap();
        a.set_write_timeout(Some(limit)).unwrap();
        b.set_read_timeout(Some(limit / 8)).unwrap();
        // Gives and takes some as long as the other end is there.
        let slow = std::thread::spawn(move || {
            while b.send(&[b"x"], &[]).is_ok() {
                let _ = b.receive(&mut [0; 1 << 15], &mut Handles::new());
                std::thread::sleep(limit / 8);
            }
        });
        let timed = |act: &dyn Fn() -> Result<(), StreamError>| {
            let begun = Instant::now();
            assert_eq!(act(), Err(StreamError::TimedOut));
            assert!((limit..limit * 10).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        };
        timed(&|| a.send(&[&vec![0; 4 << 20]], &[]));
        timed(&|| a.receive(&mut [0; 1000], &mut Handles::new()));
        drop(a);
        slow.join().unwrap();
    }

    #[test]
    fn pieces_that_come_in_time_are_received_whole() {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let giver = std::thread::spawn(move || {
            for piece in [&b"he"[..], b"l", b"lo"] {
                b.send(&[piece], &[]).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut bytes = [0; 5];
        a.receive(&mut bytes, &mut Handles::new()).unwrap();
        assert_eq!(&bytes, b"hello");
        giver.join().unwrap();
        assert_eq!(a.receive(&mut bytes, &mut Handles::new()), Err(StreamError::Closed));
    }

    #[test]
    fn a_closed_stream_says_so() {
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert_eq!(b.receive(&mut [0], &mut Handles::new()), Err(StreamError::Closed));
        assert_eq!(b.send(&[b"x"], &[]), Err(StreamError::Closed));
    }
}
