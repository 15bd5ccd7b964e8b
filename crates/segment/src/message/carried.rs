//! Between two nodes that share no memory: messages with words for what would be beside them, and the stores
//! that keep both sides' memory the same.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::Handle;

/// What is sent over a conversation that passes no memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CarriedMessage<'a> {
    /// An [`ConnectorMessage`](super::ConnectorMessage) or a [`OwnerMessage`](super::OwnerMessage), encoded.
    Said {
        /// The encoded message that is carried.
        #[serde(borrow, with = "bytes")]
        message: Cow<'a, [u8]>,
        /// For what would be beside it: the connection that it belongs to, and what each piece is.
        given: Option<(Handle, Vec<StandIn>)>,
    },
    /// Stores to the memory of a connection, in the order of their offsets.
    Stores {
        /// The connection, as its connector's node calls it.
        connection: Handle,
        /// Number of the batch that they are a part of; a batch takes effect as a whole.
        batch: u64,
        /// Whether they are the last of it.
        last: bool,
        /// Whether it takes effect only with the next batch of the same node that has this not: both do in one.
        held: bool,
        /// Where they are: each the offset of its first byte, and how many bytes follow it.
        runs: Vec<(u64, u32)>,
        /// All their bytes, one run after the other.
        #[serde(borrow, with = "bytes")]
        data: Cow<'a, [u8]>,
    },
    /// A batch that is held is there, all of it.
    Held {
        /// The connection whose memory the batch changes.
        connection: Handle,
        /// Number of the batch.
        batch: u64,
    },
    /// A batch has taken effect.
    Applied {
        /// The connection whose memory the batch changed.
        connection: Handle,
        /// Number of the batch.
        batch: u64,
    },
    /// An interrupt was triggered.
    Rung {
        /// The connection by which the interrupt is triggered.
        connection: Handle,
        /// How often it was triggered since the last time.
        count: u32,
    },
    /// A data interrupt's message.
    Message {
        /// The connection by which the message was sent.
        connection: Handle,
        /// The bytes that the sender gave, at most [`MAX_DATA`](super::MAX_DATA).
        #[serde(borrow, with = "bytes")]
        data: Cow<'a, [u8]>,
    },
    /// A [`Rung`](CarriedMessage::Rung) or a [`Message`](CarriedMessage::Message) is there, and comes before what follows it.
    Reached {
        /// The connection to the interrupt.
        connection: Handle,
    },
    /// The owner has room for one more message than before.
    Taken {
        /// The connection whose message was handed on.
        connection: Handle,
    },
    /// What is held takes effect alone: the batches of the other conversation that it was held for may be lost with
    /// that.
    Release,
    /// As [`Applied`](CarriedMessage::Applied), by the memory's home, where no further machine has the memory.
    AppliedAlone {
        /// The connection whose memory the batch changed.
        connection: Handle,
        /// Number of the batch.
        batch: u64,
    },
    /// A connector's host asks for all that took effect at this one's memory to take effect at the further machines
    /// that have it.
    PassOn {
        /// Number of the question.
        number: u64,
    },
    /// What [`PassOn`](Self::PassOn) asked for is done.
    PassedOn {
        /// Number of the question.
        number: u64,
    },
    /// A part of what was copied to the memory of a connection. It belongs to a batch as [`Stores`](Self::Stores) do, behind
    /// which it comes, and its bytes may take effect in any order.
    Copied {
        /// The connection, as its connector's node calls it.
        connection: Handle,
        /// Number of the batch that it is a part of.
        batch: u64,
        /// Whether it is the last of it.
        last: bool,
        /// As of stores: the batch takes effect only with the next one that has this not.
        held: bool,
        /// Where it is: behind the part before it.
        offset: u64,
        /// The bytes from there on, at least one.
        #[serde(borrow, with = "bytes")]
        data: Cow<'a, [u8]>,
    },
    /// A connector's host asks for memory in which copies may [land](crate::landing), once in a conversation.
    LandingWanted {
        /// The providers of remote memory access that it has, the preferred ones first.
        providers: Vec<String>,
    },
    /// The answer to that: how the memory is reached, as the providers' crate writes it. Nothing where there is none.
    LandingGiven {
        /// The offer of a lane, encoded.
        offer: Option<String>,
    },
    /// As [`Copied`](Self::Copied), of bytes that have landed.
    Landed {
        /// The connection, as its connector's node calls it.
        connection: Handle,
        /// Number of the batch that it is a part of, the last of it.
        batch: u64,
        /// As of stores: the batch takes effect only with the next one that has this not.
        held: bool,
        /// Where it is in the memory of the connection.
        offset: u64,
        /// Where it has landed: the first byte of a slot.
        place: u32,
        /// How many bytes it has.
        length: u32,
    },
}

/// What stands on the other machine for something that cannot be passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StandIn {
    /// Memory of so many bytes, which is kept the same.
    Memory {
        /// Its size in bytes.
        size: u64,
        /// Whether the connector may store to it.
        write: bool,
    },
    /// An interrupt's doorbell; its event comes next.
    Doorbell,
    /// An event object, which stands for a doorbell.
    Event,
    /// The ring of a sender of data.
    Ring,
}

/// Bytes as one piece, and not one by one.
mod bytes {
    use std::borrow::Cow;
    use std::fmt;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    struct Bytes;

    impl<'de> Visitor<'de> for Bytes {
        type Value = Cow<'de, [u8]>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_borrowed_bytes<E: Error>(self, bytes: &'de [u8]) -> Result<Self::Value, E> {
            Ok(Cow::Borrowed(bytes))
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Cow<'de, [u8]>, D::Error> {
        deserializer.deserialize_bytes(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{decode, encode};
    use super::*;

    #[test]
    fn what_is_carried_is_what_was_sent() {
        let connection = Handle(7);
        for carried in [
            CarriedMessage::Said {
                message: Cow::Owned(vec![1, 2, 3]),
                given: Some((connection, vec![StandIn::Memory { size: 10, write: true }])),
            },
            CarriedMessage::Stores {
                connection,
                batch: 3,
                last: true,
                held: false,
                runs: vec![(5, 2), (9, 1)],
                data: Cow::Owned(vec![1, 2, 3]),
            },
            CarriedMessage::Message { connection, data: Cow::Owned(Vec::new()) },
            CarriedMessage::Release,
            CarriedMessage::Copied {
                connection,
                batch: 3,
                last: false,
                held: true,
                offset: 70,
                data: Cow::Owned(vec![1, 2, 3]),
            },
            CarriedMessage::LandingWanted { providers: vec!["verbs".to_owned()] },
            CarriedMessage::LandingGiven { offer: None },
            CarriedMessage::Landed {
                connection,
                batch: 4,
                held: false,
                offset: 70,
                place: 1 << 20,
                length: 9,
            },
        ] {
            let bytes = encode(&carried);
            assert_eq!(decode::<CarriedMessage<'_>>(&bytes), Some(carried));
        }
    }
}
