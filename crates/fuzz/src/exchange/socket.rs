//! A connection between the end of an exchange and a fuzzer in the place of another node.

use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::{Carrier, StreamError};
use rustix::io::Errno;
use rustix::net::SendFlags;

/// What both sides of a connection know of it.
#[derive(Debug, Default)]
struct Fate {
    /// The peer has said that nothing continues.
    meant: AtomicBool,
    /// The end has let the connection go.
    let_go: AtomicBool,
}

/// The end's side, which takes and gives so many bytes at most at once.
#[derive(Debug)]
struct Socket(UnixStream, usize, Arc<Fate>);

/// Sends without a signal to a process that does not ignore it, as a fuzzer's.
fn send(socket: &UnixStream, bytes: &[u8]) -> std::io::Result<usize> {
    Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?)
}

/// The side of a connection that the fuzzer plays.
#[derive(Debug)]
pub(super) struct FuzzedNode(UnixStream, Arc<Fate>, bool);

impl FuzzedNode {
    /// A connection whose other side takes and gives so many bytes at most `at_once`.
    pub(super) fn connect(at_once: usize) -> (FuzzedNode, Box<dyn Carrier>) {
        let (near, far) = UnixStream::pair().expect("there are descriptors");
        for socket in [&near, &far] {
            socket.set_nonblocking(true).expect("sockets can");
        }
        let fate = Arc::<Fate>::default();
        (FuzzedNode(far, fate.clone(), false), Box::new(Socket(near, at_once, fate)))
    }

    /// Says as many of these bytes as the socket takes now.
    pub(super) fn say(&mut self, bytes: &[u8]) -> usize {
        match send(&self.0, bytes) {
            Ok(count) => count,
            Err(error) => {
                self.2 |= error.kind() != ErrorKind::WouldBlock;
                0
            }
        }
    }

    /// What the end has said since the last time.
    pub(super) fn read(&mut self) -> Vec<u8> {
        let mut said = Vec::new();
        // It ends where there is no more now, or where the end is gone.
        let _ = self.0.read_to_end(&mut said);
        said
    }

    /// Whether the end takes nothing more by this connection.
    pub(super) fn is_over(&self) -> bool {
        self.2
    }

    /// Whether the end has let the connection go.
    pub(super) fn is_let_go(&self) -> bool {
        self.1.let_go.load(Ordering::Relaxed)
    }

    /// Breaks the connection, as a lost network does.
    pub(super) fn cut(&mut self) {
        // It may be shut down already.
        let _ = self.0.shutdown(Shutdown::Both);
        self.2 = true;
    }

    /// The peer ends the session.
    pub(super) fn finish(&mut self) {
        self.1.meant.store(true, Ordering::Relaxed);
        self.cut();
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.2.let_go.store(true, Ordering::Relaxed);
    }
}

impl Socket {
    fn over(&self) -> StreamError {
        match self.2.meant.load(Ordering::Relaxed) {
            true => StreamError::Closed,
            false => StreamError::Socket(Errno::CONNRESET),
        }
    }

    fn outcome(&self, result: std::io::Result<usize>) -> Result<usize, StreamError> {
        match result {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(_) => Err(self.over()),
            Ok(count) => Ok(count),
        }
    }
}

impl Carrier for Socket {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        self.outcome(send(&self.0, &bytes[..bytes.len().min(self.1)]))
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let count = buffer.len().min(self.1);
        match (&self.0).read(&mut buffer[..count]) {
            Ok(0) if count > 0 => Err(self.over()),
            received => self.outcome(received),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn shut_down(&self) {
        // It may be shut down already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
