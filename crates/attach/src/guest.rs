//! In a virtual machine: the conversations with the node outside, through a file system that the VM's host
//! serves (`rackbus_segment::guest`), and the proof that its files are the host's memory.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rackbus_memory::packets::Packet;
use rackbus_memory::window::{AskingPace, ReadBuffer};
use rackbus_memory::{
    Access, AdaptiveSpin, AsHandle, HandleRef, Handles, PacketStream, Region, StreamError, window,
};
use rackbus_segment::guest::{
    EXCHANGE, GREETING, GuestChannel, GuestFrame, MAX_FRAME, SESSION, TAG, object_name, proof,
    to_exchange,
};
use rustix::io::Errno;

use crate::session::{AttachError, lock};

// Commands of any other type are refused.
const _: () = assert!(EXCHANGE >> 8 & 0xff == window::COMMAND_TYPE as u32);

/// Why a guest's mapping of a segment would not be the segment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: {why}; the VM must be started with the device (rackbus vm run --fabric), and `dmesg | grep virtiofs` \
     in it must say \"Cache len\"", folder.display()
)]
pub struct WindowError {
    /// Where the file system is mounted.
    pub folder: PathBuf,
    /// What the guest has in the place of a usable window.
    pub why: &'static str,
}

/// Bytes of the page that proves it.
const PAGE: u64 = 4096;

/// The folder that a rack's file system is mounted in, if this is a virtual machine that has one.
pub(crate) fn find() -> Option<PathBuf> {
    mounted(&std::fs::read_to_string("/proc/self/mountinfo").ok()?)
}

/// The same from the list of mounts.
fn mounted(list: &str) -> Option<PathBuf> {
    list.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut what = after.split(' ');
        if (what.next(), what.next()) != (Some("virtiofs"), Some(TAG)) {
            return None;
        }
        before.split(' ').nth(4).map(unescaped)
    })
}

/// A path in which the kernel wrote blanks and the like as `\040`.
fn unescaped(path: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        let code = others.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

/// The two conversations of a new session: calls, and events.
pub(crate) fn open(folder: &Path) -> Result<[Arc<dyn PacketStream>; 2], AttachError> {
    let path = folder.join(SESSION);
    let file = File::options().read(true).write(true).open(&path);
    let file = file.map_err(|cause| AttachError::NoNode { path, cause })?;
    let admitted = window::admit(&file);
    admitted.map_err(|cause| AttachError::System { what: "fstat", cause })?;
    let session = Arc::new(Session { file, folder: folder.to_owned(), over: false.into() });
    let calls = Conversation::new(&session, GuestChannel::Calls)?;
    if let Err(error) = calls.prove() {
        window::withdraw();
        return Err(error);
    }
    window::keep(&session.file).map_err(|cause| AttachError::System { what: "fstat", cause })?;
    Ok([Arc::new(calls), Arc::new(Conversation::new(&session, GuestChannel::Events)?)])
}

/// The file that is the session.
#[derive(Debug)]
struct Session {
    file: File,
    folder: PathBuf,
    /// This side has ended it.
    over: AtomicBool,
}

impl Session {
    fn end(&self) {
        if !self.over.swap(true, Ordering::AcqRel) {
            // Who reads is told by the far side. Closing the file would do the same, later.
            let _ = self.file.write_at(&[0], GuestChannel::End.offset());
        }
    }
}

/// One of a session's conversations.
#[derive(Debug)]
struct Conversation {
    session: Arc<Session>,
    place: GuestChannel,
    incoming: Mutex<Incoming>,
    /// The far side does not exchange: it is of an earlier version.
    no_exchange: AtomicBool,
}

/// What came and was not received yet.
#[derive(Debug)]
struct Incoming {
    buffer: ReadBuffer,
    /// The frame that an exchange gave.
    exchanged: Option<Vec<u8>>,
    pace: AskingPace,
}

/// What an error of the file means for the conversation.
fn broken(error: &std::io::Error) -> StreamError {
    match error.kind() {
        ErrorKind::NotConnected => StreamError::Closed,
        _ => StreamError::Socket(Errno::from_io_error(error).unwrap_or(Errno::IO)),
    }
}

impl Conversation {
    fn new(session: &Arc<Session>, place: GuestChannel) -> Result<Conversation, AttachError> {
        let (buffer, pace) = (ReadBuffer::new(MAX_FRAME)?, AskingPace::default());
        let incoming = Incoming { buffer, exchanged: None, pace };
        let (incoming, no_exchange) = (Mutex::new(incoming), (place != GuestChannel::Calls).into());
        Ok(Conversation { session: session.clone(), place, incoming, no_exchange })
    }

    /// Proves by the page of the greeting that what is stored here is seen outside, and the other way
    /// round: a guest's kernel that has no window would give pages of its own, which nobody else sees.
    fn prove(&self) -> Result<(), AttachError> {
        let refused = |why| WindowError { folder: self.session.folder.clone(), why };
        let (frame, mut handles) = self.next(None).map_err(AttachError::Gone)?;
        if frame.message != GREETING {
            return Err(AttachError::Protocol);
        }
        let page = handles.resource().map_err(|_| AttachError::NoDescriptors)?;
        let both = Access::READ | Access::WRITE;
        let page = Region::map_at(None, page.as_handle(), 0, PAGE, both)
            .map_err(|_| refused("its files cannot be mapped"))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let word = now.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40) | 1;
        let (here, order) = (page.whole(), Ordering::SeqCst);
        let stored = here.store_u64(0, word, order);
        if stored.is_none() || page.truncated() {
            return Err(refused("the guest's kernel maps its files without a memory window").into());
        }
        let seen = self.session.file.write_at(&word.to_le_bytes(), GuestChannel::Proof.offset());
        if seen.is_err() {
            return Err(refused("what the guest stores is not seen outside").into());
        }
        match here.load_u64(8, order) == Some(proof(word)) {
            true => Ok(()),
            false => Err(refused("what is stored outside is not seen in the guest").into()),
        }
    }

    /// The next message with what leads to its files.
    fn next(&self, deadline: Option<Instant>) -> Result<(GuestFrame, Handles), StreamError> {
        let mut incoming = lock(&self.incoming);
        let Incoming { buffer, exchanged, pace } = &mut *incoming;
        loop {
            let asked = Instant::now();
            if self.session.over.load(Ordering::Acquire) {
                return Err(StreamError::Closed);
            }
            let bytes = match exchanged.take() {
                Some(bytes) => bytes,
                None => match buffer.read_at(&self.session.file, self.place.offset()) {
                    // Nothing was said for as long as the far side lets anybody wait.
                    Ok(0) if deadline.is_some_and(|at| Instant::now() >= at) => {
                        return Err(StreamError::TimedOut);
                    }
                    Ok(0) => {
                        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                        let pause = pace.nothing(asked.elapsed());
                        std::thread::sleep(pause.min(left.unwrap_or(pause)));
                        continue;
                    }
                    Ok(length) => {
                        pace.found();
                        buffer.bytes(length)
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(broken(&error)),
                },
            };
            let frame = GuestFrame::decode(&bytes);
            let mut frame = frame.ok_or(StreamError::Socket(Errno::PROTO))?;
            let opened = frame.objects.iter().map(|number| self.file(*number));
            let files: Result<Vec<OwnedFd>, std::io::Error> = opened.collect();
            return Ok(match files {
                Ok(files) => (frame, Handles::of_descriptors(files)),
                Err(_) => {
                    frame.lost = true;
                    (frame, Handles::new())
                }
            });
        }
    }

    /// Sends a message and takes in the next frame by one request of the guest's kernel's; false where it has to be
    /// written.
    fn exchange(&self, message: &[u8]) -> Result<bool, StreamError> {
        let bytes = to_exchange(message).filter(|_| !self.no_exchange.load(Ordering::Relaxed));
        let Some(mut bytes) = bytes else { return Ok(false) };
        let mut incoming = lock(&self.incoming);
        if incoming.exchanged.is_some() {
            return Ok(false);
        }
        match window::control(&self.session.file, EXCHANGE, &mut bytes) {
            Ok(0) => Ok(true),
            Ok(length) => {
                let frame = bytes.get(..length).ok_or(StreamError::Socket(Errno::PROTO))?;
                incoming.exchanged = Some(frame.to_vec());
                Ok(true)
            }
            Err(error) => match Errno::from_io_error(&error) {
                // Another answer comes first.
                Some(Errno::AGAIN) => Ok(false),
                Some(Errno::NOTTY | Errno::NOSYS) => {
                    self.no_exchange.store(true, Ordering::Relaxed);
                    Ok(false)
                }
                _ => Err(broken(&error)),
            },
        }
    }

    /// A file that came along. What may only be read is opened for that, and cannot be mapped.
    fn file(&self, number: u64) -> std::io::Result<OwnedFd> {
        let path = self.session.folder.join(object_name(number));
        Ok(File::options().read(true).write(true).open(path)?.into())
    }
}

impl PacketStream for Conversation {
    fn send(&self, message: &[u8], _handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        if self.session.over.load(Ordering::Acquire) {
            return Err(StreamError::Closed);
        }
        if self.exchange(message)? {
            return Ok(());
        }
        match self.session.file.write_at(message, self.place.offset()) {
            Ok(length) if length == message.len() => Ok(()),
            Ok(_) => Err(StreamError::Closed),
            Err(error) => Err(broken(&error)),
        }
    }

    fn post(&self, message: &[u8]) -> Result<bool, StreamError> {
        if self.place != GuestChannel::Calls || self.session.over.load(Ordering::Acquire) {
            return self.send(message, &[]).map(|()| true);
        }
        match self.session.file.write_at(message, GuestChannel::Posts.offset()) {
            Ok(length) if length == message.len() => Ok(false),
            // So many are under way that an answer has to be waited for, or it is a helper of an earlier version.
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::InvalidInput) =>
            {
                self.send(message, &[]).map(|()| true)
            }
            Ok(_) => Err(StreamError::Closed),
            Err(error) => Err(broken(&error)),
        }
    }

    fn receive(
        &self,
        buffer: &mut [u8],
        _spin: &mut AdaptiveSpin,
        deadline: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        let (frame, handles) = self.next(deadline)?;
        let room = buffer.get_mut(..frame.message.len());
        room.ok_or(StreamError::Socket(Errno::MSGSIZE))?.copy_from_slice(&frame.message);
        Ok(Packet { length: frame.message.len(), handles, lost: frame.lost })
    }

    fn wait_sendable(&self) {}

    fn shut_down(&self) {
        self.session.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A far side that has no room for anybody to wait answers at once that there is nothing.
    #[test]
    fn a_reader_whom_the_far_side_lets_go_at_once_does_not_spin() {
        let file = rackbus_memory::SharedMemory::create("test", 8).unwrap().descriptor().unwrap();
        let (folder, over) = (PathBuf::new(), false.into());
        let session = Arc::new(Session { file: file.into(), folder, over });
        let events = Conversation::new(&session, GuestChannel::Events).unwrap();
        let used = || -> std::time::Duration {
            let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            used.try_into().unwrap()
        };
        let (before, time) = (used(), std::time::Duration::from_millis(400));
        let begun = Instant::now();
        let error = events.next(Some(begun + time)).unwrap_err();
        assert_eq!(error, StreamError::TimedOut);
        // Not later than the deadline because of the pauses, but for what the machine does meanwhile.
        assert!(begun.elapsed() >= time && begun.elapsed() < time * 20);
        let used = used() - before;
        assert!(used < time / 4, "{used:?} of a processor in {time:?}");
    }

    #[test]
    fn the_racks_file_system_is_found_among_the_mounts() {
        let list = "22 1 0:21 / /proc rw - proc proc rw\n\
            30 1 0:40 / /mnt/other rw - virtiofs share rw\n\
            31 1 0:41 / /run/with\\040blank rw,nosuid shared:5 - virtiofs rackbus rw\n";
        assert_eq!(mounted(list), Some("/run/with blank".into()));
        assert_eq!(mounted(&list.replace("virtiofs rackbus", "9p rackbus")), None);
        assert_eq!(mounted(""), None);
    }
}
