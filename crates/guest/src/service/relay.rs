//! QEMU's messages: each is recorded before it is taken off the socket, and its answer is sent in a way
//! that shows afterwards whether it was (`ledger`).
//!
//! QEMU waits for the answer to a message before it sends another one. So whoever takes over finds at most
//! one message that was recorded and not answered, and what is on the socket is either that one or new.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::Device;
use crate::journal::JournalRecord;
use crate::journal::frontend::{HEAD, VhostHead};

/// Descriptors that may come with a message: a region for each slot of a table.
const MOST_DESCRIPTORS: usize = 32;

/// QEMU at one end, what answers it at the other.
#[derive(Debug)]
pub(super) struct Relay {
    pub qemu: Arc<UnixStream>,
    pub inside: UnixStream,
}

/// A message that is still on QEMU's socket; `None` at its end.
///
/// No more is looked at than the one message: of several, the system gives the descriptors together.
fn peek(qemu: &UnixStream) -> std::io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut length = HEAD;
    loop {
        let Some((bytes, fds)) = peek_bytes(qemu, length)? else { return Ok(None) };
        if bytes.len() < length {
            // The rest comes right behind, or QEMU ended before it had sent all of it.
            if hung_up(qemu) {
                return Ok(None);
            }
            std::thread::sleep(std::time::Duration::from_micros(50));
            continue;
        }
        let head = VhostHead::of(&bytes).ok_or(std::io::ErrorKind::InvalidData)?;
        if length == HEAD + head.length {
            let own = bytes.get(HEAD..).is_some_and(|says| head.has_descriptors(says));
            // The system gives those of the next message along with one that has none.
            return Ok(Some((bytes, if own { fds } else { Vec::new() })));
        }
        length = HEAD + head.length;
    }
}

/// At most so many bytes that are on the socket, and what comes along; `None` at its end.
fn peek_bytes(
    qemu: &UnixStream,
    length: usize,
) -> std::io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; length];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let there = loop {
        match recvmsg(qemu, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => break received.bytes,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    bytes.truncate(there);
    Ok((there > 0).then_some((bytes, fds)))
}

/// Whether QEMU is gone.
fn hung_up(qemu: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::from_borrowed_fd(qemu.as_fd(), PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A closed socket reports it whether or not it was asked for.
    poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().is_empty()
}

fn take_off(mut qemu: &UnixStream, length: usize) -> std::io::Result<()> {
    // What came along was taken with the peek; read without room for descriptors, they are closed.
    qemu.read_exact(&mut vec![0; length])
}

impl Relay {
    /// Passes messages on until one side ends.
    pub(super) fn run(&self, device: &Arc<Device>) {
        if let Err(error) = self.pass_all(device) {
            tracing::debug!(%error, "the conversation with QEMU ends");
        }
        // Whoever waits at either side is told.
        let _ = self.inside.shutdown(std::net::Shutdown::Both);
    }

    fn pass_all(&self, device: &Arc<Device>) -> std::io::Result<()> {
        while let Some((message, fds)) = peek(&self.qemu)? {
            let length = message.len();
            let copies: Result<Vec<_>, _> = fds.iter().map(OwnedFd::try_clone).collect();
            let record =
                device.record_only(&JournalRecord::Frontend { message: message.clone() }, copies?);
            take_off(&self.qemu, length)?;
            self.pass(device, record, &message, &fds)?;
        }
        Ok(())
    }

    /// Has a message answered.
    fn pass(
        &self,
        device: &Arc<Device>,
        record: u64,
        message: &[u8],
        fds: &[OwnedFd],
    ) -> std::io::Result<()> {
        match self.ask(message, fds)? {
            Some(answer) => device.ledger.reply(&*self.qemu, record, &answer),
            None => Ok(()),
        }
    }

    /// Says something inside; the answer, if one is wanted.
    pub(super) fn ask(&self, message: &[u8], fds: &[OwnedFd]) -> std::io::Result<Option<Vec<u8>>> {
        self.say(message, fds)?;
        let head = VhostHead::of(message).ok_or(std::io::ErrorKind::InvalidData)?;
        if !head.wants_reply() {
            return Ok(None);
        }
        let mut answer = vec![0; HEAD];
        (&self.inside).read_exact(&mut answer)?;
        let head = VhostHead::of(&answer).ok_or(std::io::ErrorKind::InvalidData)?;
        answer.resize(HEAD + head.length, 0);
        (&self.inside).read_exact(&mut answer[HEAD..])?;
        Ok(Some(answer))
    }

    fn say(&self, message: &[u8], fds: &[OwnedFd]) -> std::io::Result<()> {
        let beside: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&beside)) {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let slices = [std::io::IoSlice::new(message)];
        let sent = sendmsg(&self.inside, &slices, &mut control, SendFlags::NOSIGNAL)?;
        match message.get(sent..) {
            Some(rest) if !rest.is_empty() => (&self.inside).write_all(rest),
            _ => Ok(()),
        }
    }

    /// Goes on where another process died: the message that it took last is answered, if it was not.
    pub(super) fn resume(&self, device: &Arc<Device>) -> std::io::Result<()> {
        let waits = {
            let inner = device.lock();
            inner.kept.core.frontend.waits().map(|(record, bytes)| (record, bytes.to_vec()))
        };
        let Some((record, message)) = waits.filter(|(record, _)| !device.ledger.replied(*record))
        else {
            return Ok(());
        };
        if !is_empty(&self.qemu) {
            take_off(&self.qemu, message.len())?;
        }
        device.wait_taken_up();
        let head = VhostHead::of(&message).ok_or(std::io::ErrorKind::InvalidData)?;
        match head.asks() {
            true => self.pass(device, record, &message, &[]),
            // What it sets is set.
            false => device.ledger.reply(&*self.qemu, record, &head.done()),
        }
    }
}

/// Whether nothing is on QEMU's socket.
fn is_empty(qemu: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let mut byte = [0; 1];
    !matches!(rustix::net::recv(qemu, &mut byte, flags), Ok((1.., _)))
}
