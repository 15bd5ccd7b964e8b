//! Whole messages over a stream that passes no memory: each with its length (32 bits, little endian) before it, and nothing
//! beside it.
//!
//! A message is taken whole or not at all: while the stream still holds bytes that its socket did not take, nothing
//! more is put in, so one who takes nothing costs one message. A thread gives what is held to the socket when
//! that has room again; it lives for as long as the conversation.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::packets::{MAX_PACKET, Packet};
use rackbus_memory::{AdaptiveSpin, HandleRef, Handles, PacketStream, Stream, StreamError};
use rustix::io::Errno;

use crate::framed::FramedPackets;

/// A stream that holds what its socket does not take at once.
pub(crate) trait HoldingStream: Stream + Clone + std::fmt::Debug + 'static {
    /// Holds all parts, gives the socket what that takes now, and says whether something is held still.
    ///
    /// # Errors
    /// When the connection is of no more use.
    fn put(&self, parts: &[&[u8]]) -> Result<bool, StreamError>;

    /// Gives the socket all that is held, within the time that a peer may take for that.
    ///
    /// # Errors
    /// As [`put`](HoldingStream::put), and when the peer takes too long.
    fn give_held(&self) -> Result<(), StreamError>;

    /// Receives what is there into the beginning of `buffer`; 0 when there is nothing.
    ///
    /// # Errors
    /// As [`put`](HoldingStream::put).
    fn receive_now(&self, buffer: &mut [u8]) -> Result<usize, StreamError>;

    /// Waits until something can be received, or it is `until`.
    ///
    /// # Errors
    /// [`StreamError::TimedOut`] then.
    fn wait_readable(&self, until: Option<Instant>) -> Result<(), StreamError>;
}

/// A conversation of packets over such a stream. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct WholePackets<S: HoldingStream> {
    stream: S,
    /// Whether the stream holds something that its socket did not take.
    held: Arc<Backlog>,
    /// Bytes of messages that have not been asked for.
    incoming: Mutex<FramedPackets>,
}

#[derive(Debug, Default)]
struct Backlog {
    state: Mutex<Holding>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Holding {
    some: bool,
    ended: bool,
}

impl Backlog {
    fn lock(&self) -> MutexGuard<'_, Holding> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the socket what the stream holds, whenever there is something, until the conversation ends.
    fn give(&self, stream: &impl HoldingStream) {
        loop {
            let waiting = |it: &mut Holding| !it.some && !it.ended;
            let waited = self.changed.wait_while(self.lock(), waiting);
            if waited.unwrap_or_else(PoisonError::into_inner).ended {
                return;
            }
            let outcome = stream.give_held();
            if outcome.is_err() {
                // It took nothing for as long as it may take. Nothing more is held, which nobody would give away.
                Stream::shut_down(stream);
            }
            let mut held = self.lock();
            held.some = false;
            held.ended |= outcome.is_err();
            drop(held);
            self.changed.notify_all();
            if outcome.is_err() {
                return;
            }
        }
    }
}

impl<S: HoldingStream> WholePackets<S> {
    /// Goes on with a conversation that nothing else is sent over.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub(crate) fn new(stream: S) -> Result<WholePackets<S>, StreamError> {
        let held = Arc::<Backlog>::default();
        let (theirs, giving) = (held.clone(), stream.clone());
        std::thread::Builder::new()
            .name("link packets".into())
            .spawn(move || theirs.give(&giving))
            .map_err(|_| StreamError::Socket(Errno::AGAIN))?;
        Ok(WholePackets { stream, held, incoming: Mutex::default() })
    }
}

impl<S: HoldingStream> Drop for WholePackets<S> {
    fn drop(&mut self) {
        self.held.lock().ended = true;
        self.held.changed.notify_all();
        Stream::shut_down(&self.stream);
    }
}

impl<S: HoldingStream> PacketStream for WholePackets<S> {
    fn send(&self, message: &[u8], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        if !handles.is_empty() {
            return Err(StreamError::Socket(Errno::OPNOTSUPP));
        }
        let length = u32::try_from(message.len()).ok().filter(|_| message.len() <= MAX_PACKET);
        let length = length.ok_or(StreamError::Socket(Errno::MSGSIZE))?;
        let mut held = self.held.lock();
        if held.some {
            return Err(StreamError::TimedOut);
        }
        held.some = self.stream.put(&[&length.to_le_bytes(), message])?;
        if held.some {
            self.held.changed.notify_all();
        }
        Ok(())
    }

    fn receive(
        &self,
        buffer: &mut [u8],
        spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, polled) = (Instant::now(), Duration::from_nanos(spin.budget_ns()));
        loop {
            if let Some(packet) = incoming.next_packet()? {
                let length = packet.len();
                buffer[..length].copy_from_slice(packet);
                spin.waited(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
                return Ok(Packet { length, handles: Handles::new(), lost: false });
            }
            match self.stream.receive_now(incoming.room())? {
                0 if begun.elapsed() < polled => std::hint::spin_loop(),
                0 => self.stream.wait_readable(deadline)?,
                count => incoming.received(count),
            }
        }
    }

    fn wait_sendable(&self) {
        let held = |it: &mut Holding| it.some && !it.ended;
        drop(self.held.changed.wait_while(self.held.lock(), held));
    }

    fn shut_down(&self) {
        Stream::shut_down(&self.stream);
    }

    fn passes_memory(&self) -> bool {
        false
    }
}
