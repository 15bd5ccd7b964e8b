//! Data of a carried exchange that move beside its connection: by remote memory access (RDMA) between the places of
//! the two sides.
//!
//! The side that answers *exposes* its places: they are memory of its own that this session alone uses. The side that
//! asks moves the data, both ways: it writes what goes with a question before the question is sent, and reads what goes
//! with an answer before the answer is received. So no key to memory of the side that asks is ever given away, and
//! taking away what the other side exposes takes everything away.
//!
//! What is decided here is decided without clock, memory or thread. [`AskingLane`] knows which transfers are under way
//! and which answers wait for one; completions may come in any order, answers are received in theirs.
//! [`AnsweringLane`] knows whether data may be left in their places. A lane that fails is given up once: its side closes
//! it, says so on the connection before anything else, and the other side takes its places away before it hears what
//! follows. So nothing that was under way lands in a place that is used again; where a side cannot close it, the session
//! ends, and its memory is used by nobody again. What was to be written goes with its
//! question over the connection; what was to be read is asked for there ([fetched](AskingLane::fetched)). No question
//! is asked twice for it, and no answer is heard twice.

mod answering;
mod asking;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::session::SessionMillis;
use crate::region::Region;

pub use answering::AnsweringLane;
pub use asking::{AskingLane, Finished};

/// Data of fewer bytes go with their message: they are there sooner than a transfer is.
pub const LEAST: usize = 4096;

/// A transfer that has not ended after so much time, in which this side looked for its end, never does. Those who wait for
/// an operation, which is then sent over the connection, give up after 5 s.
pub const PATIENCE: SessionMillis = 2_000;

/// Bytes at the end of the exposed memory by which the side that asks makes sure that the lane leads there.
pub const PROOF_BYTES: usize = 16;

/// The other side broke the rules of the lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongLane;

/// Why a lane is of no more use, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LaneError(pub String);

/// What a side says of its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneNews {
    /// No lane was offered, opened or lost yet.
    None,
    /// The side that asks uses it.
    Up,
    /// It was used and is not any more: nothing is under way on it, and data of questions may have been left before.
    Down,
    /// It is of no use, and never was.
    Refused,
}

impl LaneNews {
    /// Its number in a frame.
    pub fn number(self) -> u32 {
        match self {
            LaneNews::None => 0,
            LaneNews::Up => 1,
            LaneNews::Down => 2,
            LaneNews::Refused => 3,
        }
    }

    /// What has this number.
    ///
    /// # Errors
    /// [`WrongLane`] when nothing has.
    pub fn numbered(number: u32) -> Result<LaneNews, WrongLane> {
        match number {
            0 => Ok(LaneNews::None),
            1 => Ok(LaneNews::Up),
            2 => Ok(LaneNews::Down),
            3 => Ok(LaneNews::Refused),
            _ => Err(WrongLane),
        }
    }
}

/// What a transfer moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    /// The proof that the lane leads to the right memory, to this side.
    Proof,
    /// Data of an answer, to this side.
    Read,
    /// Data of a question, to the other side.
    Write,
}

/// Bytes that move between the same place of both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Its number: no other transfer of the lane has it.
    pub id: u64,
    /// Which data the transfer moves: that of a question, or of an answer.
    pub moves: Moves,
    /// The tag whose place it is; of no meaning for a proof.
    pub tag: u32,
    /// Length of the transfer in bytes.
    pub length: usize,
}

/// The side that asks moves data by this. Nothing waits.
pub trait Lane: Send + fmt::Debug {
    /// The provider that moves its data, as its library names it.
    fn provider(&self) -> &str;

    /// The memory with this side's places, before anything else. It is kept until [`close`](Lane::close).
    ///
    /// # Errors
    /// [`LaneError`]: the lane cannot be used.
    fn register(&mut self, region: &Arc<Region>) -> Result<(), LaneError>;

    /// Begins to move `length` bytes at `offset` of both sides' memory, to the other side if it is a `write`. False
    /// when there is no room now: it is tried again after others have ended.
    ///
    /// # Errors
    /// [`LaneError`]: the lane is of no more use.
    fn begin(
        &mut self,
        id: u64,
        write: bool,
        offset: usize,
        length: usize,
    ) -> Result<bool, LaneError>;

    /// Adds the transfers that have ended, in any order, to `ended`.
    ///
    /// # Errors
    /// [`LaneError`] when one has failed: the lane is of no more use.
    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError>;

    /// Readable when a transfer has ended, after [`rest`](Lane::rest). `None` where there is no such thing.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Arranges that the next end of a transfer makes the descriptor readable; false when it has to be polled first.
    fn rest(&mut self) -> bool;

    /// Ends it: on return nothing reaches this side's memory by it. False when that cannot be ensured: what was under way may
    /// still reach it.
    #[must_use]
    fn close(&mut self) -> bool;
}

/// The memory that the side that answers exposes.
pub trait LaneTarget: Send + Sync + fmt::Debug {
    /// The provider that moves its data, as its library names it.
    fn provider(&self) -> &str;

    /// Exposes the memory with its places; [`PROOF_BYTES`] of it, from `proof` on, are for the proof.
    ///
    /// # Errors
    /// [`LaneError`]: the lane cannot be used.
    fn expose(&self, region: &Arc<Region>, proof: usize) -> Result<(), LaneError>;

    /// Why it is of no more use; `None` while it is.
    fn failure(&self) -> Option<LaneError>;

    /// Takes the memory away, from any thread: on return nobody reaches it. False when that cannot be ensured.
    #[must_use]
    fn close(&self) -> bool;
}

/// A lane beside the connections of a session.
#[derive(Debug)]
pub enum CarriedLane {
    /// Of the side that asks, with the proof that the other side gave over the connection.
    Asks(Box<dyn Lane>, [u8; PROOF_BYTES]),
    /// Of the side that answers.
    Answers(Arc<dyn LaneTarget>),
}
