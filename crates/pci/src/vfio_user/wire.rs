//! vfio-user messages on a stream: a header, a body, and descriptors beside them.
//!
//! The protocol is one of descriptors: what a peer passes becomes them here, and what is passed to it is made of them.
//!
//! What a peer sends is never trusted: a length that cannot be is an error that ends the
//! connection (the stream cannot be followed after it); everything else keeps the framing and is
//! answered.

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::{HandleRef, Handles, Stream, StreamError};
use rackbus_spec::vfio_user::{Flags, MessageHeader, TYPE_MASK};
use zerocopy::{FromBytes, IntoBytes};

/// Most descriptors in one message; what `max_msg_fds` offers. QEMU's limit is 16, its default 8.
pub const MAX_FDS: usize = 8;
/// Most data bytes in one region access; what `max_data_xfer_size` offers (QEMU's default).
pub const MAX_TRANSFER: usize = 1 << 20;
/// Largest message accepted: the largest access with its headers.
pub const MAX_MESSAGE: usize = MAX_TRANSFER + 64;

/// Why a message could not be received or sent.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The peer sent a header whose length cannot be.
    #[error("message {command} claims {size} bytes; 16 to {MAX_MESSAGE} are possible")]
    BadLength {
        /// Command of the header that was received.
        command: u16,
        /// Message size in bytes that the header states.
        size: u32,
        /// Its message id, to answer with.
        message_id: u16,
        /// Whether it is a request that wants an answer.
        wants_reply: bool,
    },
    /// The connection failed while a message was sent or received.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// A message: its header, its payload, and the descriptors that came with it.
#[derive(Debug)]
pub struct WireMessage {
    /// Its header, as received.
    pub header: MessageHeader,
    /// What follows the header.
    pub body: Vec<u8>,
    /// Descriptors that came with it.
    pub fds: Vec<OwnedFd>,
}

impl WireMessage {
    /// Receives the next message whole.
    ///
    /// # Errors
    /// [`WireError`]; after one the connection is of no more use.
    pub fn receive(stream: &dyn Stream) -> Result<WireMessage, WireError> {
        let mut handles = Handles::new();
        let mut head = [0; size_of::<MessageHeader>()];
        stream.receive(&mut head, &mut handles)?;
        let header =
            MessageHeader::read_from_bytes(&head).expect("the buffer has the header's size");
        let MessageHeader { message_id, command, message_size: size, .. } = header;
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        if !(head.len()..=MAX_MESSAGE).contains(&length) {
            let wants_reply = wants_reply(&header);
            return Err(WireError::BadLength { command, size, message_id, wants_reply });
        }
        let mut body = vec![0; length - head.len()];
        stream.receive(&mut body, &mut handles)?;
        Ok(WireMessage { header, body, fds: handles.into_descriptors() })
    }

    /// Type and options of the message; bits that have no name stay.
    pub fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.header.flags)
    }

    /// Whether it is a command, not a reply.
    pub fn is_command(&self) -> bool {
        self.header.flags & TYPE_MASK == 0
    }

    /// Whether it is a command whose sender waits for an answer.
    pub fn wants_reply(&self) -> bool {
        wants_reply(&self.header)
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

fn wants_reply(header: &MessageHeader) -> bool {
    header.flags & (TYPE_MASK | Flags::NO_REPLY.bits()) == 0
}

/// A header for a message of `body` bytes after it.
pub(crate) fn header(
    message_id: u16,
    command: u16,
    flags: u32,
    error: u32,
    body: usize,
) -> MessageHeader {
    let message_size = u32::try_from(size_of::<MessageHeader>() + body).unwrap_or(u32::MAX);
    MessageHeader { message_id, command, message_size, flags, error }
}

/// Sends a message whose body is `parts`.
pub(crate) fn send_message(
    stream: &dyn Stream,
    header: MessageHeader,
    parts: [&[u8]; 2],
    fds: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    let handles: Vec<_> = fds.iter().map(|fd| HandleRef::of_descriptor(*fd)).collect();
    Ok(stream.send(&[header.as_bytes(), parts[0], parts[1]], &handles)?)
}
