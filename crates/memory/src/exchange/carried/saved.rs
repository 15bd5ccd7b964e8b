//! An end of a carried exchange as a value, for another process of its host that goes on with it.
//!
//! To the other side it is as if the connection was lost: messages that it has not acknowledged are sent again, with their
//! data, which are in the same memory as before. A lane is given up.

use serde::{Deserialize, Serialize};

use super::connection::{DataTransport, SessionFrame};
use crate::exchange::MESSAGE_BYTES;
use crate::exchange::session::{ContactState, OutboxState, SessionSide};

/// The version of what is written here.
pub const VERSION: u32 = 1;

/// A value of another version, or none that there can be.
#[derive(Debug, thiserror::Error)]
pub enum UnfitState {
    /// It is not of this version.
    #[error("the state of an exchange has version {0}, this program knows {VERSION}")]
    Version(u32),
    /// It is none that there can be.
    #[error("the state of an exchange: {0}")]
    Senseless(String),
}

/// One end between two messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EndState {
    version: u32,
    pub(super) side: SessionSide,
    pub(super) received: u64,
    pub(super) beat_heard: u32,
    pub(super) outbox: OutboxState<FrameState>,
    pub(super) lane: Option<BesideState>,
}

/// A message that is not acknowledged, and which data go with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FrameState {
    message: Vec<u8>,
    tag: u32,
    length: usize,
}

/// A lane that was given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum BesideState {
    Asks {
        provider: String,
        was_up: bool,
        answers: Vec<LeftAnswer>,
    },
    Answers {
        provider: String,
        /// The other side may have left data of questions, and lack data of answers.
        used: bool,
    },
}

impl BesideState {
    pub(super) fn provider(&self) -> &str {
        match self {
            BesideState::Asks { provider, .. } | BesideState::Answers { provider, .. } => provider,
        }
    }

    fn side(&self) -> SessionSide {
        match self {
            BesideState::Asks { .. } => SessionSide::Asks,
            BesideState::Answers { .. } => SessionSide::Answers,
        }
    }
}

/// An answer that came and was not received, with the tag and length of data that are still to come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeftAnswer {
    message: Vec<u8>,
    left: Option<(u32, usize)>,
}

/// An answer with its length, and the tag and length of data that are still to come.
type Answer = (([u8; MESSAGE_BYTES], usize), Option<(u32, usize)>);

impl LeftAnswer {
    pub(super) fn new(message: &[u8], left: Option<(u32, usize)>) -> LeftAnswer {
        LeftAnswer { message: message.to_vec(), left }
    }

    pub(super) fn parts(&self) -> Option<Answer> {
        Some((padded(&self.message)?, self.left))
    }
}

fn padded(message: &[u8]) -> Option<([u8; MESSAGE_BYTES], usize)> {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes.get_mut(..message.len())?.copy_from_slice(message);
    Some((bytes, message.len()))
}

impl FrameState {
    pub(super) fn of(frame: &SessionFrame) -> FrameState {
        let message = frame.message[..frame.message_length].to_vec();
        FrameState { message, tag: frame.tag, length: frame.length }
    }

    /// The message with its data, wherever a lane may have brought these before: the other side does not have it, or
    /// says so.
    fn frame(&self) -> Option<SessionFrame> {
        let (message, message_length) = padded(&self.message)?;
        let FrameState { tag, length, .. } = *self;
        Some(SessionFrame {
            message,
            message_length,
            tag,
            length,
            taken: 0,
            way: DataTransport::Behind,
        })
    }
}

impl EndState {
    pub(super) fn new(
        side: SessionSide,
        (received, beat_heard): (u64, u32),
        outbox: OutboxState<FrameState>,
        lane: Option<BesideState>,
    ) -> EndState {
        EndState { version: VERSION, side, received, beat_heard, outbox, lane }
    }

    pub(super) fn to_bytes(&self) -> std::io::Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(std::io::Error::other)
    }

    /// Reads what another process wrote, and checks what a fault could have spoilt.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<EndState, UnfitState> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let senseless = |error: serde_json::Error| UnfitState::Senseless(error.to_string());
        let Versioned { version } = serde_json::from_slice(bytes).map_err(senseless)?;
        if version != VERSION {
            return Err(UnfitState::Version(version));
        }
        let state: EndState = serde_json::from_slice(bytes).map_err(senseless)?;
        if state.lane.as_ref().is_some_and(|lane| lane.side() != state.side) {
            return Err(UnfitState::Senseless("its lane is of the other side".to_owned()));
        }
        Ok(state)
    }
}

impl OutboxState<FrameState> {
    /// The messages as they are sent.
    pub(super) fn frames(self) -> Result<OutboxState<SessionFrame>, UnfitState> {
        let unfit = || UnfitState::Senseless("a message is too long".to_owned());
        self.try_map(|frame| frame.frame().ok_or_else(unfit))
    }
}

/// A session as a value: its connections have ended with the process that had them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CarriedSessionState {
    /// When its clock began, in nanoseconds of the clock that all processes of the host have in common.
    pub(super) begun_ns: u64,
    pub(super) contact: ContactState,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::session::FrameOutbox;

    #[test]
    fn a_state_is_read_as_it_was_written_and_no_other_is() {
        let message = [1; MESSAGE_BYTES];
        let (message_length, tag, length, taken) = (7, 3, 4096, 100);
        let frame = SessionFrame {
            message,
            message_length,
            tag,
            length,
            taken,
            way: DataTransport::Moving(9),
        };
        let mut outbox = FrameOutbox::new(4);
        outbox.push(frame).unwrap();
        let answers = vec![LeftAnswer::new(&[5; 8], Some((2, 512)))];
        let lane = BesideState::Asks { provider: "shm".to_owned(), was_up: true, answers };
        let state =
            EndState::new(SessionSide::Asks, (5, 6), outbox.save(FrameState::of), Some(lane));
        let bytes = state.to_bytes().unwrap();
        let read = EndState::from_bytes(&bytes).unwrap();
        assert_eq!(read, state);
        let again = FrameOutbox::again(4, read.outbox.frames().unwrap()).unwrap();
        let frame = again.unsent().unwrap();
        assert_eq!((frame.taken, frame.way, frame.message_length), (0, DataTransport::Behind, 7));
        assert!(frame.message[..7] == [1; 7] && frame.message[7..].iter().all(|byte| *byte == 0));
        let text = String::from_utf8(bytes).unwrap();
        for (what, instead, said) in [
            ("\"version\":1", "\"version\":2", "has version 2, this program knows 1"),
            ("\"side\":\"asks\"", "\"side\":\"answers\"", "its lane is of the other side"),
            ("\"received\"", "\"taken\"", "unknown field `taken`"),
        ] {
            let other = text.replacen(what, instead, 1);
            assert_ne!(other, text);
            let refused = EndState::from_bytes(other.as_bytes()).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }
}
