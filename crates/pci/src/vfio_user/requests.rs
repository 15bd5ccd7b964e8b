//! What a device asks of its client by messages: DMA to memory that it has not mapped, such as another
//! device's registers in the client's machine, or the address of an interrupt.
//!
//! A write is posted: it is sent in order and nobody waits for its answer. A read waits. Both are bounded: a
//! client that answers nothing is waited for once, and after that not until it says something; so many requests
//! are open at a time that they always fit into the socket, so sending blocks nobody.
//!
//! Source: "vfio-user Protocol Specification", VFIO_USER_DMA_READ and VFIO_USER_DMA_WRITE; QEMU (11.1) takes
//! them as it says.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rackbus_memory::{HandleRef, Handles, Stream, StreamError};
use rackbus_spec::vfio_user::{DmaAccess, Flags, command};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use zerocopy::IntoBytes;

use super::device::ServedDevice;
use super::server::{ClientSession, receive};
use super::session::RestingConversation;
use super::wire::{WireError, WireMessage, header};

/// Most bytes of one request: it is sent whole or not at all.
pub const MOST_BYTES: usize = 4096;
/// Most requests that wait for their answers: with their bookkeeping they fit into a socket's buffer.
const MOST_OPEN: usize = 64;
/// Commands of the client's that wait to be handled while the device waits for somebody else.
const MOST_WAITING: usize = 64;
/// How long a client may take to answer: below QEMU's own patience of 5 s, since the one who waits for what this
/// device says may be another QEMU.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Why a request came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// There is no client, or it went away meanwhile.
    #[error("no client has the device")]
    Gone,
    /// The client did not answer in time, or has not since.
    #[error("the client does not answer")]
    TimedOut,
    /// The client refused it.
    #[error("the client refused it: {0}")]
    Refused(Errno),
    /// The answer is not one to what was asked.
    #[error("the client's answer is malformed")]
    Nonsense,
}

/// What a request that was sent waits for.
#[derive(Debug)]
enum Open {
    Write,
    Read {
        count: usize,
    },
    /// Nobody waits for the read any more.
    Abandoned,
    Answered(Result<Vec<u8>, RequestError>),
}

#[derive(Debug, Default)]
struct State {
    client: Option<Arc<UnixStream>>,
    /// Somebody is sending an answer, which may take its time.
    answering: bool,
    next_id: u16,
    open: BTreeMap<u16, Open>,
    /// Why a write was refused, until somebody who waits for all writes is told.
    refusal: Option<Errno>,
    /// A wait for it timed out, and it has said nothing since.
    silent: bool,
}

impl State {
    /// Requests that the client has not answered.
    fn unanswered(&self) -> usize {
        self.open.values().filter(|open| !matches!(open, Open::Answered(_))).count()
    }

    /// Nobody waits any more for the read of this number. The answer, where it has come; otherwise it may still come,
    /// and must not be taken for that to another request.
    fn give_up(&mut self, id: u16) -> Option<Result<Vec<u8>, RequestError>> {
        match self.open.remove(&id)? {
            Open::Answered(answer) => Some(answer),
            Open::Read { .. } | Open::Abandoned => {
                self.open.insert(id, Open::Abandoned);
                None
            }
            Open::Write => {
                self.open.insert(id, Open::Write);
                None
            }
        }
    }
}

/// The requests of one device to the client that has it, from any thread.
#[derive(Debug)]
pub struct Requests {
    state: Mutex<State>,
    changed: Condvar,
    patience: Duration,
    /// Writes that clients have refused.
    refused_writes: AtomicU64,
}

impl Default for Requests {
    fn default() -> Self {
        Requests::with_patience(PATIENCE)
    }
}

impl Requests {
    /// Those to a client that may take so long to answer.
    pub fn with_patience(patience: Duration) -> Requests {
        let (state, changed, refused_writes) = Default::default();
        Requests { state, changed, patience, refused_writes }
    }

    /// Whether the client has answered everything.
    pub fn all_answered(&self) -> bool {
        self.lock().unanswered() == 0
    }

    /// How many writes were refused by whoever was the client: they went nowhere.
    pub fn refused_writes(&self) -> u64 {
        self.refused_writes.load(Ordering::Relaxed)
    }

    /// Waits until the client has answered everything: what was written is there.
    ///
    /// # Errors
    /// When it does not in time, or has refused a write since it was last waited for, which is told once.
    pub fn flush(&self) -> Result<(), RequestError> {
        let deadline = Instant::now() + self.patience;
        let mut state = self.wait(self.lock(), deadline, |state| state.unanswered() > 0)?;
        state.refusal.take().map_or(Ok(()), |errno| Err(RequestError::Refused(errno)))
    }

    /// Writes `data` to the client's memory at `address`, and does not wait until it is there. A client that refuses it
    /// is heard of by [`flush`](Requests::flush) and [`refused_writes`](Requests::refused_writes).
    ///
    /// # Errors
    /// When it was not sent, or not all of it.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), RequestError> {
        for (nth, part) in data.chunks(MOST_BYTES).enumerate() {
            let address = address.wrapping_add((nth * MOST_BYTES) as u64);
            let access = DmaAccess { address, count: part.len() as u64 };
            self.send(command::DMA_WRITE, access, part, Open::Write)?;
        }
        Ok(())
    }

    /// Reads the client's memory at `address`.
    ///
    /// # Errors
    /// When the client refuses or does not answer; what is in `out` then is not the memory's.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), RequestError> {
        for (nth, part) in out.chunks_mut(MOST_BYTES).enumerate() {
            let address = address.wrapping_add((nth * MOST_BYTES) as u64);
            let access = DmaAccess { address, count: part.len() as u64 };
            let id = self.send(command::DMA_READ, access, &[], Open::Read { count: part.len() })?;
            part.copy_from_slice(&self.answer(id)?);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `busy`. A client that is silent is not waited for.
    fn wait<'s>(
        &self,
        mut state: MutexGuard<'s, State>,
        deadline: Instant,
        busy: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'s, State>, RequestError> {
        loop {
            if state.client.is_none() {
                return Err(RequestError::Gone);
            }
            if !busy(&state) {
                return Ok(state);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.silent || left.is_zero() {
                state.silent = true;
                return Err(RequestError::TimedOut);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a request; its number.
    fn send(
        &self,
        command: u16,
        access: DmaAccess,
        data: &[u8],
        open: Open,
    ) -> Result<u16, RequestError> {
        let deadline = Instant::now() + self.patience;
        let busy = |state: &State| state.answering || state.open.len() >= MOST_OPEN;
        let mut state = self.wait(self.lock(), deadline, busy)?;
        let client = state.client.clone().ok_or(RequestError::Gone)?;
        while state.open.contains_key(&state.next_id) {
            state.next_id = state.next_id.wrapping_add(1);
        }
        let id = state.next_id;
        let header = header(id, command, 0, 0, size_of::<DmaAccess>() + data.len());
        match send_whole(&client, [header.as_bytes(), access.as_bytes(), data]) {
            Ok(()) => {
                state.next_id = id.wrapping_add(1);
                state.open.insert(id, open);
                Ok(id)
            }
            Err(RequestError::TimedOut) => {
                state.silent = true;
                Err(RequestError::TimedOut)
            }
            Err(error) => Err(error),
        }
    }

    /// What the client answers to the read of this number.
    fn answer(&self, id: u16) -> Result<Vec<u8>, RequestError> {
        let deadline = Instant::now() + self.patience;
        let waits = |state: &State| matches!(state.open.get(&id), Some(Open::Read { .. }));
        let waited = self.wait(self.lock(), deadline, waits);
        let mut state = match waited {
            Ok(state) => state,
            Err(error) => {
                // The answer may have come since that wait ended.
                let came = self.lock().give_up(id);
                self.changed.notify_all();
                return came.unwrap_or(Err(error));
            }
        };
        match state.open.remove(&id) {
            Some(Open::Answered(answer)) => {
                self.changed.notify_all();
                answer
            }
            _ => Err(RequestError::Gone),
        }
    }

    /// The client has said something.
    fn heard(&self, message: &WireMessage) {
        let mut state = self.lock();
        state.silent = false;
        if !message.is_command() {
            let id = message.header.message_id;
            let asked = match state.open.get(&id) {
                Some(Open::Read { count }) => {
                    let answer = read_answer(message, *count);
                    state.open.insert(id, Open::Answered(answer));
                    true
                }
                Some(Open::Write) => {
                    if let Some(errno) = refusal(message) {
                        tracing::debug!(id, %errno, "the client refused a write");
                        self.refused_writes.fetch_add(1, Ordering::Relaxed);
                        state.refusal.get_or_insert(errno);
                    }
                    state.open.remove(&id).is_some()
                }
                Some(Open::Abandoned) => state.open.remove(&id).is_some(),
                Some(Open::Answered(_)) | None => false,
            };
            if !asked {
                tracing::debug!(id, "a reply that nobody asked for is ignored");
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn begin(&self, client: Arc<UnixStream>) {
        *self.lock() = State { client: Some(client), ..State::default() };
    }

    fn end(&self) {
        *self.lock() = State::default();
        self.changed.notify_all();
    }
}

/// Why the client refuses what was asked; `None` where it does not.
fn refusal(message: &WireMessage) -> Option<Errno> {
    let errno = i32::try_from(message.header.error).unwrap_or(0);
    let refused = message.flags().contains(Flags::ERROR);
    refused.then(|| Errno::from_raw_os_error(errno.clamp(1, 4095)))
}

/// What a read was answered.
fn read_answer(message: &WireMessage, count: usize) -> Result<Vec<u8>, RequestError> {
    if let Some(errno) = refusal(message) {
        return Err(RequestError::Refused(errno));
    }
    let data = message.tail::<DmaAccess>();
    let said = message.head::<DmaAccess>().map(|access| access.count);
    let fits = message.header.command == command::DMA_READ
        && said == Some(count as u64)
        && data.len() == count;
    if fits { Ok(data.to_vec()) } else { Err(RequestError::Nonsense) }
}

/// Sends a message that a socket takes in one piece, or none of it.
fn send_whole(client: &UnixStream, parts: [&[u8]; 3]) -> Result<(), RequestError> {
    let slices = parts.map(IoSlice::new);
    let total: usize = parts.iter().map(|part| part.len()).sum();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(client, &slices, &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) if sent == total => return Ok(()),
            Ok(_) => {
                // What follows could not be told apart from the rest: the conversation has ended.
                let _ = client.shutdown(std::net::Shutdown::Both);
                return Err(RequestError::Gone);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(RequestError::TimedOut),
            Err(_) => return Err(RequestError::Gone),
        }
    }
}

/// The client's connection, on which answers and requests take turns.
struct Shared<'a> {
    client: &'a UnixStream,
    requests: &'a Requests,
}

impl Stream for Shared<'_> {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        self.requests.lock().answering = true;
        let sent = self.client.send(parts, handles);
        self.requests.lock().answering = false;
        self.requests.changed.notify_all();
        sent
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        self.client.receive(buffer, handles)
    }

    fn wait_closed(&self) {
        self.client.wait_closed();
    }

    fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    fn shut_down(&self) {
        self.client.shut_down();
    }
}

/// Holds one client's conversation, as [`serve`](super::serve) does, about a device that asks its client by
/// `requests`. What the client answers is heard also while a command of its own waits for somebody else.
///
/// # Errors
/// How the conversation ended, when not by the client's closing it.
pub fn serve_asking(
    client: &Arc<UnixStream>,
    device: &dyn ServedDevice,
    requests: &Requests,
) -> Result<(), WireError> {
    requests.begin(client.clone());
    let stream = Shared { client, requests };
    std::thread::scope(|scope| {
        let (pass, commands) = mpsc::sync_channel(MOST_WAITING);
        let hearing = scope.spawn(|| {
            let heard = hear(&stream, requests, pass);
            requests.end();
            heard
        });
        let _unwinding = Unwinding(client);
        let mut session = ClientSession::new(device, RestingConversation::default());
        let answered = commands.iter().try_for_each(|message| session.answer(message, &stream));
        if answered.is_err() {
            client.shut_down();
        }
        drop(commands);
        let heard = hearing.join().unwrap_or(Ok(()));
        answered.and(heard)
    })
}

/// Ends the connection where the device panics: whoever hears the client would wait for it for ever, and the client
/// for its answer.
struct Unwinding<'a>(&'a UnixStream);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.shut_down();
        }
    }
}

/// Receives until the client is gone or nobody takes what it says.
fn hear(
    stream: &dyn Stream,
    requests: &Requests,
    pass: mpsc::SyncSender<WireMessage>,
) -> Result<(), WireError> {
    while let Some(message) = receive(stream)? {
        requests.heard(&message);
        if message.is_command() && pass.send(message).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
