//! The server of the conversation: answers what the input says, and looks at what it is asked.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rackbus_memory::{Event, HandleRef, Handles, SharedMemory, Stream, StreamError};
use rackbus_pci::vfio_user::wire::{MAX_FDS, MAX_MESSAGE};
use rackbus_spec::vfio_user::{Flags, MessageHeader, RegionAccess, TYPE_MASK, command};
use rustix::fs::MemfdFlags;
use zerocopy::{FromBytes, IntoBytes};

use crate::input::Input;

/// Bytes of a memory file that the server passes.
pub(super) const MEMORY: u64 = 64 << 10;

/// What is in an answer's first byte, besides [`HEADERS`].
pub(super) mod answer {
    /// A message that nobody asked for comes as well.
    pub(in super::super) const UNASKED: u8 = 4;
    /// The answer to a read has as many bytes as were asked for.
    pub(in super::super) const FITS: u8 = 8;
    /// It is longer than its bytes in the input.
    pub(in super::super) const LONG: u8 = 0x10;
    /// Its header states another length.
    pub(in super::super) const LENGTH: u8 = 0x20;
}

/// What its header is, the lower two bits: right, an error, with any flags, or to another request.
const HEADERS: u8 = 3;
pub(super) const ERROR: u8 = 1;
const ANY_FLAGS: u8 = 2;

/// What comes beside an answer: the upper four bits of its second byte, and the lower four say how often.
pub(super) mod beside {
    /// Memory that cannot be truncated.
    pub(in super::super) const SEALED: u8 = 0;
    /// Memory that the server truncates.
    pub(in super::super) const UNSEALED: u8 = 1;
    /// An eventfd, which is no memory.
    pub(in super::super) const EVENT: u8 = 2;
    /// No memory, and seen to be open for as long as it is.
    pub(in super::super) const SOCKET: u8 = 3;
    /// A folder, which is a file with a size.
    pub(in super::super) const FOLDER: u8 = 4;
    /// A file that reads as zeroes and can be mapped: a character device.
    pub(in super::super) const DEVICE: u8 = 5;
}

/// A server, at the other end of a client's stream.
pub(super) struct FuzzedServer {
    state: Mutex<State>,
    ended: Condvar,
    /// What a client passes on.
    pub(super) event: Event,
    sealed: OwnedFd,
    unsealed: File,
    /// Of a pair: the one is passed on, and the other sees when nobody has it any more.
    passed: Mutex<Option<UnixStream>>,
    watched: UnixStream,
}

#[derive(Default)]
struct State {
    data: Vec<u8>,
    at: usize,
    /// What was said and not yet received.
    said: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// The body that was received last.
    body: Vec<u8>,
    /// The request that waits for its answer.
    asked: Option<MessageHeader>,
    /// Whether a body is received next, not a header.
    receives_body: bool,
    ended: bool,
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn take<T>(&mut self, take: impl FnOnce(&mut Input<'_>) -> T) -> T {
        let mut input = Input::new(&self.data[self.at..]);
        let taken = take(&mut input);
        self.at = self.data.len() - input.rest().len();
        taken
    }
}

impl FuzzedServer {
    pub(super) fn new(data: &[u8]) -> FuzzedServer {
        let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC);
        let unsealed = File::from(unsealed.expect("there is memory"));
        unsealed.set_len(MEMORY).expect("there is memory");
        let (passed, watched) = UnixStream::pair().expect("there is room for it");
        FuzzedServer {
            state: Mutex::new(State { data: data.to_vec(), ..State::default() }),
            ended: Condvar::new(),
            event: Event::new().expect("there is room for it"),
            sealed: SharedMemory::reserve("fuzz", MEMORY).expect("there is memory"),
            unsealed,
            passed: Mutex::new(Some(passed)),
            watched,
        }
    }

    /// Takes something from the input.
    pub(super) fn take<T>(&self, take: impl FnOnce(&mut Input<'_>) -> T) -> T {
        lock(&self.state).take(take)
    }

    /// Whether there is more for the client to do.
    pub(super) fn says_more(&self) -> bool {
        let state = lock(&self.state);
        !state.ended && state.at < state.data.len()
    }

    /// The body of the message that the client received last.
    pub(super) fn answered(&self) -> Vec<u8> {
        lock(&self.state).body.clone()
    }

    /// Truncates the file that can be, as a server may at any time.
    pub(super) fn truncate(&self) {
        self.unsealed.set_len(0).expect("it is not sealed");
    }

    /// Whether nobody has a descriptor any more that came beside an answer. What was not received is dropped before.
    pub(super) fn has_its_descriptors_back(&self) -> bool {
        lock(&self.state).fds.clear();
        drop(lock(&self.passed).take());
        self.watched.set_nonblocking(true).expect("it is a socket");
        matches!((&self.watched).read(&mut [0]), Ok(0))
    }

    fn fd(&self, kind: u8) -> Option<OwnedFd> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("there is room for it");
        let open = |path| OwnedFd::from(File::open(path).expect("it can be read"));
        match kind {
            beside::SEALED => Some(copy(self.sealed.as_fd())),
            beside::UNSEALED => Some(copy(self.unsealed.as_fd())),
            beside::EVENT => Some(copy(self.event.as_fd())),
            beside::SOCKET => lock(&self.passed).as_ref().map(|passed| copy(passed.as_fd())),
            beside::FOLDER => Some(open("/")),
            beside::DEVICE => Some(open("/dev/zero")),
            _ => None,
        }
    }

    /// Says what the input answers to a request; without input nothing.
    fn answer(&self, state: &mut State, request: &MessageHeader, access: Option<RegionAccess>) {
        if state.at == state.data.len() {
            return;
        }
        let (kind, beside) = state.take(|input| (input.u8(), input.u8()));
        let mut body = state.take(|input| input.short().to_vec());
        let long = if kind & answer::LONG != 0 {
            usize::from(state.take(|input| input.u16())) * 17
        } else {
            0
        };
        body.resize(body.len() + long, kind);
        if kind & answer::FITS != 0
            && let Some(access) = access
        {
            body.resize(size_of::<RegionAccess>() + access.count as usize, kind);
        }
        let length = size_of::<MessageHeader>() + body.len();
        let length = if kind & answer::LENGTH != 0 {
            state.take(|input| input.u32())
        } else {
            length as u32
        };
        let right = MessageHeader { message_size: length, flags: Flags::REPLY.bits(), ..*request };
        let header = state.take(|input| match kind & HEADERS {
            0 => right,
            ERROR => {
                let flags = (Flags::REPLY | Flags::ERROR).bits();
                MessageHeader { flags, error: input.number() as u32, ..right }
            }
            ANY_FLAGS => MessageHeader { flags: input.u32(), ..right },
            _ => MessageHeader { message_id: input.u16(), command: input.u16(), ..right },
        });
        let message = [header.as_bytes(), &body].concat();
        let unasked = if kind & answer::UNASKED != 0 { unasked(state) } else { Vec::new() };
        // Before the answer, or behind it when it has a body of an odd length.
        let first = unasked.len().is_multiple_of(2);
        let parts = if first { [unasked, message] } else { [message, unasked] };
        state.said.extend(parts.concat());
        state.fds.extend((0..beside & 15).filter_map(|_| self.fd(beside >> 4)));
    }
}

/// A message of the server's own: a request, as one for DMA, or a reply.
fn unasked(state: &mut State) -> Vec<u8> {
    let (command, flags) = state.take(|input| (input.u8().into(), input.u8().into()));
    let body = state.take(|input| input.short().to_vec());
    let message_size = (size_of::<MessageHeader>() + body.len()) as u32;
    let header = MessageHeader { message_id: 0, command, message_size, flags, error: 0 };
    [header.as_bytes(), &body].concat()
}

impl Stream for FuzzedServer {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        let bytes = parts.concat();
        let (header, body) =
            MessageHeader::read_from_prefix(&bytes).expect("a request has a header");
        let state = &mut *lock(&self.state);
        assert!(!state.ended, "{header:?} after the end");
        assert_eq!(header.message_size as usize, bytes.len(), "a request's length is not its own");
        assert_eq!(header.flags & TYPE_MASK, 0, "it asks by a reply");
        assert!(handles.len() <= MAX_FDS, "{} descriptors", handles.len());
        assert!(state.asked.is_none(), "{:?} was not answered", state.asked);
        if header.flags & Flags::NO_REPLY.bits() == 0 {
            state.asked = Some(header);
            let read = header.command == command::REGION_READ;
            let access = RegionAccess::read_from_prefix(body).ok().filter(|_| read);
            self.answer(state, &header, access.map(|(access, _)| access));
        }
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        assert!(buffer.len() <= MAX_MESSAGE, "room for {} bytes", buffer.len());
        let state = &mut *lock(&self.state);
        if state.ended || state.said.is_empty() && !buffer.is_empty() {
            return Err(StreamError::Closed);
        }
        if state.said.len() < buffer.len() {
            // A socket's time limit.
            return Err(StreamError::TimedOut);
        }
        buffer.copy_from_slice(&state.said[..buffer.len()]);
        state.said.drain(..buffer.len());
        handles.append(Handles::of_descriptors(std::mem::take(&mut state.fds)));
        if state.receives_body {
            state.asked = None;
            state.body = buffer.to_vec();
        }
        state.receives_body = !state.receives_body;
        Ok(())
    }

    fn wait_closed(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_closed(&self) -> bool {
        lock(&self.state).ended
    }

    fn shut_down(&self) {
        lock(&self.state).ended = true;
        self.ended.notify_all();
    }
}
