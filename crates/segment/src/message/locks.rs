//! Locks and barriers in memory of another machine: what a party asks of the host that has the memory, because an exchange
//! in the memory that stands for it would be seen by nobody else.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::{NodeId, SessionId};

/// Parties of a barrier in memory of another machine, at most: a message names them all.
pub const MOST_FAR_PARTIES: usize = 1024;

/// What the processes of one machine may have of locks and barriers on another: locks that they hold, barriers that they are
/// parties of, and the parties of all different barriers that they name.
pub const MOST_FAR_LOCKS: u32 = 65_536;

/// Who holds a lock, anywhere in the rack: a session of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LockHolder {
    /// Number of the session's host.
    pub node: NodeId,
    /// Number of the session on its host.
    pub session: SessionId,
}

impl LockHolder {
    /// As locks write it: a number, and how often that was given out before. A session's number is used again only after
    /// 65,536 others, and then with another generation. `None` for what no session is.
    pub fn to_number(self) -> Option<(NonZeroU32, u32)> {
        let number = self.node.checked_shl(16)? | (self.session.0 & 0xffff) as u32;
        let generation = (self.session.0 >> 16) as u32;
        let fits = self.node <= 0xffff;
        fits.then_some((NonZeroU32::new(number)?, generation))
    }

    /// Who is written so.
    pub fn of_number(number: NonZeroU32, generation: u32) -> LockHolder {
        let session = u64::from(generation) << 16 | u64::from(number.get() & 0xffff);
        LockHolder { node: number.get() >> 16, session: SessionId(session) }
    }
}

/// What is done to a lock or a barrier. Each may come twice, and has its effect once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRequest {
    /// Offset of the lock or the barrier in the segment, in bytes.
    pub offset: u64,
    /// What is done to it.
    pub operation: LockOperation,
}

/// What is done to a lock or a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockOperation {
    /// Takes the lock if nobody holds it: [`LockReply::Taken`] or [`LockReply::Held`].
    Take {
        /// Number of the attempt, which no other one of this session has.
        attempt: u64,
    },
    /// Unlocks what an attempt took: [`LockReply::Done`], also when it holds it no more.
    Release {
        /// Number of the attempt.
        attempt: u64,
    },
    /// Says that a holder is dead: [`LockReply::Done`].
    DeclareDead {
        /// The session that is no more.
        holder: LockHolder,
    },
    /// Arrives at a barrier: [`LockReply::Barrier`].
    Arrive {
        /// All parties, in the order in which all name them.
        parties: Vec<LockHolder>,
        /// Phases that the party has passed; `None` only asks for that, and the party has not arrived.
        passed: Option<u32>,
    },
    /// Says that a party of a barrier is dead: [`LockReply::Done`].
    Exclude {
        /// All parties, in the order in which all name them.
        parties: Vec<LockHolder>,
        /// The session that is no more.
        dead: LockHolder,
    },
    /// Gives back what an attempt took whose party was never told so: [`LockReply::Done`]. Where the attempt was to be told
    /// that the holder before it died, the next one is.
    GiveBack {
        /// Number of the attempt.
        attempt: u64,
    },
}

impl LockOperation {
    /// The parties that it names: all of a barrier's, and none of a lock.
    pub fn parties(&self) -> &[LockHolder] {
        match self {
            LockOperation::Arrive { parties, .. } | LockOperation::Exclude { parties, .. } => {
                parties
            }
            LockOperation::Take { .. }
            | LockOperation::Release { .. }
            | LockOperation::DeclareDead { .. }
            | LockOperation::GiveBack { .. } => &[],
        }
    }

    /// Whether what was stored before is to be there before it: others see it by this.
    pub fn publishes(&self) -> bool {
        matches!(
            self,
            LockOperation::Release { .. } | LockOperation::Arrive { passed: Some(_), .. }
        )
    }
}

/// What became of a [`LockOperation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockReply {
    /// The session holds the lock.
    Taken {
        /// Its last holder died, or was cut off, while it held it.
        died: bool,
    },
    /// Somebody else holds it, or another thread of the session.
    Held {
        /// Who it is; `None` when it was let go just now.
        holder: Option<LockHolder>,
    },
    /// Done, with nothing to tell.
    Done,
    /// The party has arrived.
    Barrier {
        /// Phases that it had passed before.
        passed: u32,
        /// How it stands with the one that it waits for.
        phase: BarrierPhase,
    },
}

impl LockReply {
    /// Whether what others stored before is to be seen by who hears this.
    pub fn admits(&self) -> bool {
        let passed = |phase| matches!(phase, BarrierPhase::Passed { .. });
        match self {
            LockReply::Taken { .. } => true,
            LockReply::Barrier { phase, .. } => passed(*phase),
            LockReply::Held { .. } | LockReply::Done => false,
        }
    }
}

/// How it stands with a barrier's phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BarrierPhase {
    /// Others have not arrived.
    Waiting,
    /// All who live have arrived.
    Passed {
        /// How many those are.
        live: u32,
    },
    /// This party was declared dead: the others go on without it.
    Excluded,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_is_written_so_that_it_is_found_again() {
        for (node, session) in [(4, 1), (8, 0x1_0000), (0xffff, 0xffff_ffff_ffff), (1, 0)] {
            let holder = LockHolder { node, session: SessionId(session) };
            let (number, generation) = holder.to_number().unwrap();
            assert_eq!(LockHolder::of_number(number, generation), holder);
        }
        assert_eq!(LockHolder { node: 0x1_0000, session: SessionId(1) }.to_number(), None);
        assert_eq!(LockHolder { node: 0, session: SessionId(0x1_0000) }.to_number(), None);
    }
}
