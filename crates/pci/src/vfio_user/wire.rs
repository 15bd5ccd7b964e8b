//! vfio-user messages on a stream: a header, a body, and descriptors beside them.
//!
//! What a peer sends is never trusted: a length that cannot be is an error that ends the
//! connection (the stream cannot be followed after it); everything else keeps the framing and is
//! answered.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rackbus_spec::vfio_user::{Flags, Header, TYPE_MASK};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

/// Most descriptors in one message; what `max_msg_fds` offers. QEMU's limit is 16, its default 8.
pub const MAX_FDS: usize = 8;
/// Room for descriptors on reception: the most Linux passes at once, so that none of a peer's is
/// lost unseen and left open.
const FD_ROOM: usize = 253;
/// Most data bytes in one region access; what `max_data_xfer_size` offers (QEMU's default).
pub const MAX_TRANSFER: usize = 1 << 20;
/// Largest message accepted: the largest access with its headers.
pub const MAX_MESSAGE: usize = MAX_TRANSFER + 64;

/// Why a message could not be received or sent.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer sent a header whose length cannot be.
    #[error("message {command} claims {size} bytes; 16 to {MAX_MESSAGE} are possible")]
    BadLength {
        /// The header's command.
        command: u16,
        /// The header's length.
        size: u32,
        /// Its message id, to answer with.
        message_id: u16,
    },
    /// The system refused.
    #[error("socket: {0}")]
    Socket(#[from] Errno),
}

/// One message.
#[derive(Debug)]
pub struct Message {
    /// Its header, as received.
    pub header: Header,
    /// What follows the header.
    pub body: Vec<u8>,
    /// Descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The header's flags.
    pub fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.header.flags)
    }

    /// Whether it is a command, not a reply.
    pub fn is_command(&self) -> bool {
        self.header.flags & TYPE_MASK == 0
    }

    /// The structure at the start of the body; `None` when the body is too short.
    pub fn head<T: FromBytes>(&self) -> Option<T> {
        T::read_from_prefix(&self.body).ok().map(|(value, _)| value)
    }

    /// What follows a structure of type `T` in the body.
    pub fn tail<T>(&self) -> &[u8] {
        self.body.get(size_of::<T>()..).unwrap_or(&[])
    }
}

/// Carries vfio-user messages: the UNIX stream that the protocol names, or a link between nodes.
pub trait Transport: Send + Sync {
    /// Receives the next message whole.
    ///
    /// # Errors
    /// [`WireError`]; after one the connection is of no more use.
    fn receive(&self) -> Result<Message, WireError>;

    /// Sends a message: `parts` one after the other, with `fds` beside the first byte.
    ///
    /// # Errors
    /// [`WireError`].
    fn send(&self, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Result<(), WireError>;

    /// Ends the conversation in both directions, from any thread: a blocked
    /// [`receive`](Transport::receive) returns.
    fn shut_down(&self);
}

impl Transport for UnixStream {
    fn receive(&self) -> Result<Message, WireError> {
        let mut fds = Vec::new();
        let mut head = [0; size_of::<Header>()];
        fill(self.as_fd(), &mut head, &mut fds)?;
        let header = Header::read_from_bytes(&head).expect("the buffer has the header's size");
        let Header {
            message_id,
            command,
            message_size: size,
            ..
        } = header;
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        if !(head.len()..=MAX_MESSAGE).contains(&length) {
            return Err(WireError::BadLength {
                command,
                size,
                message_id,
            });
        }
        let mut body = vec![0; length - head.len()];
        if !body.is_empty() {
            fill(self.as_fd(), &mut body, &mut fds)?;
        }
        Ok(Message { header, body, fds })
    }

    fn send(&self, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(WireError::Socket(Errno::MSGSIZE));
        }
        let mut skip = 0;
        let total: usize = parts.iter().map(|p| p.len()).sum();
        while skip < total {
            let slices = beyond(parts, skip);
            match sendmsg(self, &slices, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => skip += sent,
                Err(Errno::INTR) => continue,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
                Err(error) => return Err(error.into()),
            }
            // The descriptors went with the first byte.
            control.clear();
        }
        Ok(())
    }

    fn shut_down(&self) {
        // Fails only when it is shut down already.
        let _ = self.shutdown(std::net::Shutdown::Both);
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

/// Receives exactly `buffer.len()` bytes, collecting the descriptors that come along.
fn fill(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<(), WireError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_ROOM))];
    let mut done = 0;
    while done < buffer.len() {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut buffer[done..])];
        let received = match recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(WireError::Closed),
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received.bytes == 0 {
            return Err(WireError::Closed);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FD_ROOM {
            return Err(WireError::Socket(Errno::MFILE));
        }
        done += received.bytes;
    }
    Ok(())
}

/// A header for a message of `body` bytes after it.
pub(crate) fn header(message_id: u16, command: u16, flags: u32, error: u32, body: usize) -> Header {
    let message_size = u32::try_from(size_of::<Header>() + body).unwrap_or(u32::MAX);
    Header {
        message_id,
        command,
        message_size,
        flags,
        error,
    }
}

/// Sends a message whose body is `parts`.
pub(crate) fn send_message(
    transport: &dyn Transport,
    header: Header,
    parts: [&[u8]; 2],
    fds: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    transport.send(&[header.as_bytes(), parts[0], parts[1]], fds)
}
