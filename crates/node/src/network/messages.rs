//! What two nodes say to each other about rings of frames. Whoever wants to send asks; whoever has the memory
//! answers. As JSON, a packet each.

use serde::{Deserialize, Serialize};

/// What the sender's node says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SenderMessage {
    /// A ring is wanted.
    Open {
        /// Number of the question.
        request: u64,
        /// The station that will send.
        from: String,
        /// Which of its queues.
        #[serde(rename = "lane")]
        queue: u16,
        /// The station that is to receive.
        to: String,
    },
    /// Nothing will be sent into a ring any more.
    Close {
        /// The ring's number at its receiver.
        ring: u64,
    },
}

/// What the receiver's node says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReceiverMessage {
    /// Here is the ring. Its memory and its two events, for frames and for room, come along.
    Opened {
        /// Number of the question.
        request: u64,
        /// The ring's number at its receiver.
        ring: u64,
    },
    /// No ring is opened.
    Refused {
        /// Number of the question.
        request: u64,
        /// Why not, for people.
        reason: String,
    },
    /// Nobody takes anything from a ring any more.
    Closed {
        /// The ring's number at its receiver.
        ring: u64,
    },
}

/// A message as it is sent, in JSON.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

/// From the bytes of a peer.
pub fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}
