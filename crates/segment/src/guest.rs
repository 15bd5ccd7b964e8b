//! How a process in a virtual machine talks to the node outside of it: through files of a file system
//! that the VM's host serves.
//!
//! In the root of the file system is one file, [`SESSION`]. Each process that opens it has a session with
//! the node. What it writes is a message, what it reads is one, with its head ([`GuestFrame`]); where in the
//! file it does so says which conversation is meant ([`GuestChannel`]). What comes beside a message is memory or
//! an event, each a file of its own ([`object_name`]) that nobody can list and only its session's user can
//! open.

use crate::message::{NodeId, SegmentId, SessionRequest, decode};

/// The name (`tag`) that the guest's kernel knows the file system by.
pub const TAG: &str = "rackbus";

/// The file that is a session for each process that opens it.
pub const SESSION: &str = "session";

/// Bytes of the longest message, as between a process and a node.
pub const MAX_MESSAGE: usize = 32 << 10;

/// The most files that come with a message.
pub const MAX_OBJECTS: usize = 64;

/// Bytes that are exchanged at once: the process asks and gets the answer by one request of its kernel's. A longer
/// request is written, a longer answer is read.
pub const EXCHANGE_BYTES: usize = 2048;

/// The number of that operation (`ioctl`) on the session's file: it gives and takes so many bytes. What is given is
/// the message's length (32 bits) and the message; what is taken is a frame, and the result is its length, 0
/// where there was none that fits for as long as anybody may wait.
pub const EXCHANGE: u32 = 3 << 30 | (EXCHANGE_BYTES as u32) << 16 | (b'r' as u32) << 8 | 1;

/// Bytes of the longest frame.
pub const MAX_FRAME: usize = HEAD + 8 * MAX_OBJECTS + MAX_MESSAGE;

/// Bytes of a frame before its files.
const HEAD: usize = 8;

/// The first frame of a session: its file is a page to prove with that stores are seen on both sides.
pub const GREETING: &[u8] = b"rackbus guest 1";

/// Whether a request is not a guest's to make: devices are plugged into a virtual machine by its host.
pub fn is_refused(request: &[u8]) -> bool {
    matches!(
        decode(request),
        Some(
            SessionRequest::ListDevices { .. }
                | SessionRequest::BorrowDevice { .. }
                | SessionRequest::ReturnDevice { .. }
        )
    )
}

/// Conversations of a session, by the offset at which its file is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GuestChannel {
    /// Requests are written and replies read.
    Calls,
    /// Events are read and notices written.
    Events,
    /// Eight bytes are written that the process stored in the page of the greeting. They are answered when
    /// the far side has read the same and stored its [`proof`] behind them.
    Proof,
    /// A byte is written: the session ends.
    End,
    /// Requests are written whose replies nobody reads.
    Posts,
}

impl GuestChannel {
    /// Where in the file it is.
    pub fn offset(self) -> u64 {
        match self {
            GuestChannel::Calls => 0,
            GuestChannel::Events => 1 << 16,
            GuestChannel::Proof => 2 << 16,
            GuestChannel::End => 3 << 16,
            GuestChannel::Posts => 4 << 16,
        }
    }

    /// The conversation at an offset.
    pub fn at(offset: u64) -> Option<GuestChannel> {
        [
            GuestChannel::Calls,
            GuestChannel::Events,
            GuestChannel::Proof,
            GuestChannel::End,
            GuestChannel::Posts,
        ]
        .into_iter()
        .find(|place| place.offset() == offset)
    }
}

/// A message as it is given to be exchanged; `None` when it is longer than that.
pub fn to_exchange(message: &[u8]) -> Option<[u8; EXCHANGE_BYTES]> {
    let mut bytes = [0; EXCHANGE_BYTES];
    let (length, rest) = bytes.split_first_chunk_mut::<4>()?;
    *length = u32::try_from(message.len()).ok()?.to_le_bytes();
    rest.get_mut(..message.len())?.copy_from_slice(message);
    Some(bytes)
}

/// The message in what was given to be exchanged; `None` when there is none.
pub fn exchanged(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    rest.get(..usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

/// What the far side stores in answer to `word`.
pub fn proof(word: u64) -> u64 {
    !word.rotate_left(17)
}

/// A message that a process reads, with what came beside it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GuestFrame {
    /// Numbers of the files, in the message's order.
    pub objects: Vec<u64>,
    /// Whether there were more that the guest has no room for.
    pub lost: bool,
    /// The message as the node sent it.
    pub message: Vec<u8>,
}

impl GuestFrame {
    /// As it is read.
    pub fn encode(&self) -> Vec<u8> {
        let count = u16::try_from(self.objects.len()).unwrap_or(u16::MAX);
        let length = u32::try_from(self.message.len()).unwrap_or(u32::MAX);
        let mut bytes = Vec::with_capacity(HEAD + 8 * self.objects.len() + self.message.len());
        bytes.extend(length.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes.extend(u16::from(self.lost).to_le_bytes());
        self.objects.iter().for_each(|object| bytes.extend(object.to_le_bytes()));
        bytes.extend(&self.message);
        bytes
    }

    /// From what was read; `None` when that is no frame.
    pub fn decode(bytes: &[u8]) -> Option<GuestFrame> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (count, rest) = rest.split_first_chunk::<2>()?;
        let (lost, rest) = rest.split_first_chunk::<2>()?;
        let count = usize::from(u16::from_le_bytes(*count));
        let (objects, message) = rest.split_at_checked(8 * count)?;
        if count > MAX_OBJECTS || message.len() != u32::from_le_bytes(*length) as usize {
            return None;
        }
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
        let objects = objects.chunks_exact(8).filter_map(number).collect();
        let lost = u16::from_le_bytes(*lost) != 0;
        Some(GuestFrame { objects, lost, message: message.to_vec() })
    }
}

/// The name of a file that came with a message.
pub fn object_name(number: u64) -> String {
    format!("o{number}")
}

/// The number in such a name.
pub fn object_number(name: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(name).ok()?.strip_prefix('o')?;
    let number = digits.parse().ok()?;
    // One name for each: no sign, no zeroes before it.
    (object_name(number).as_bytes() == name).then_some(number)
}

/// Why a guest is refused what a host's process gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "segment {segment} of node {node} may only be read, and a virtual machine cannot be kept from storing: \
     grant it write access in [[share]], or read it from a host"
)]
pub struct ReadOnly {
    /// Node id of the host that has the segment.
    pub node: NodeId,
    /// The segment's number on that host.
    pub segment: SegmentId,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_as_they_went(
            objects in prop::collection::vec(any::<u64>(), 0..8),
            lost: bool, message in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let frame = GuestFrame { objects, lost, message };
            let bytes = frame.encode();
            prop_assert_eq!(GuestFrame::decode(&bytes), Some(frame));
            prop_assert_eq!(GuestFrame::decode(&bytes[..bytes.len() - 1]), None);
        }

        #[test]
        fn anything_is_a_frame_or_none(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(frame) = GuestFrame::decode(&bytes) {
                prop_assert_eq!(frame.objects.len() * 8 + frame.message.len() + 8, bytes.len());
            }
        }
    }

    #[test]
    fn what_is_exchanged_has_its_length() {
        let longest = [7; EXCHANGE_BYTES - 4];
        for message in [&[][..], b"message", &longest] {
            assert_eq!(exchanged(&to_exchange(message).unwrap()), Some(message));
        }
        assert_eq!(to_exchange(&[7; EXCHANGE_BYTES - 3]), None);
        for wrong in [&[][..], &[1, 0, 0], &[1, 0, 0, 0], &[255; 100]] {
            assert_eq!(exchanged(wrong), None);
        }
    }

    #[test]
    fn an_object_has_one_name() {
        assert_eq!(object_number(object_name(77).as_bytes()), Some(77));
        for name in ["o", "o+7", "o07", "O7", "7", "o7 ", "o99999999999999999999"] {
            assert_eq!(object_number(name.as_bytes()), None, "{name}");
        }
        for place in [
            GuestChannel::Calls,
            GuestChannel::Events,
            GuestChannel::Proof,
            GuestChannel::End,
            GuestChannel::Posts,
        ] {
            assert_eq!(GuestChannel::at(place.offset()), Some(place));
        }
        assert_eq!(GuestChannel::at(1), None);
    }
}
