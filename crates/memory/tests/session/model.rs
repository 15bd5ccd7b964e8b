//! What must hold: operations, blocks, and who has seen which effect.

use std::collections::BTreeMap;

/// Blocks that there are, and operations under way at a time.
pub const BLOCKS: usize = 6;
pub const TAGS: usize = 4;

/// What decides instead of the cores, in tests of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Right,
    /// The side that asks repeats all that was not answered.
    RepeatUnanswered,
    /// The side that answers keeps no answers.
    ForgetAnswers,
    /// A lender that restarted continues with a session of its former life.
    ResumeRestarted,
    /// A lender that goes on in another process does not do again what it had taken.
    ForgetTaken,
    /// A borrower that goes on in another process begins to count anew.
    KeepNothingSent,
}

impl Policy {
    /// How many messages a side keeps at most.
    pub fn room(self) -> usize {
        match self {
            // Its counts lag behind; that is not what is to be found.
            Policy::RepeatUnanswered => 1000,
            _ => TAGS,
        }
    }
}

/// An operation, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    pub id: u64,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The value that is written is the operation's number.
    Write(usize),
    Read(usize),
    Flush,
}

/// The answer to the operation with this number; of a read with the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub id: u64,
    pub value: u64,
}

/// An operation that is not answered.
#[derive(Debug)]
struct Open {
    ask: Ask,
    /// Of each block, the value that was answered last when it began.
    acknowledged: [u64; BLOCKS],
}

/// What the user of the drive has seen, and what the drive has done.
#[derive(Debug, Default)]
pub struct Model {
    open: BTreeMap<u64, Open>,
    /// Of each block, the value that was written last and answered.
    acknowledged: [u64; BLOCKS],
    executed: BTreeMap<u64, u32>,
    next: u64,
    /// What the drive has, and what of it survives the loss of its process.
    cache: [u64; BLOCKS],
    durable: [u64; BLOCKS],
    pub answered: u64,
}

impl Model {
    /// A next operation, of which the choice is `random`; `None` when there are enough, or it would write what
    /// is being written.
    pub fn ask(&mut self, random: u64) -> Option<Ask> {
        let block = random as usize / 16 % BLOCKS;
        let what = match random % 16 {
            0..=6 => What::Write(block),
            7..=13 => What::Read(block),
            _ => What::Flush,
        };
        let clashes = |open: &Open| match (open.ask.what, what) {
            (What::Write(one) | What::Read(one), What::Write(other) | What::Read(other)) => {
                one == other
            }
            _ => false,
        };
        if self.open.len() >= TAGS || self.open.values().any(clashes) {
            return None;
        }
        self.next += 1;
        let ask = Ask { id: self.next, what };
        self.open.insert(self.next, Open { ask, acknowledged: self.acknowledged });
        Some(ask)
    }

    /// The drive does it.
    pub fn execute(&mut self, ask: &Ask) -> Result<Answer, String> {
        let times = self.executed.entry(ask.id).or_default();
        *times += 1;
        if *times > 1 {
            return Err(format!("{ask:?} is executed twice"));
        }
        let value = match ask.what {
            What::Write(block) => {
                self.cache[block] = ask.id;
                0
            }
            What::Read(block) => self.cache[block],
            What::Flush => {
                self.durable = self.cache;
                0
            }
        };
        Ok(Answer { id: ask.id, value })
    }

    /// The user hears of it.
    pub fn answer(&mut self, answer: &Answer) -> Result<(), String> {
        let Some(Open { ask, acknowledged }) = self.open.remove(&answer.id) else {
            return Err(format!("{answer:?} is to nothing that is asked"));
        };
        match ask.what {
            What::Write(block) => self.acknowledged[block] = ask.id,
            // Nobody writes it meanwhile.
            What::Read(block) if answer.value != acknowledged[block] => {
                return Err(format!("{ask:?} finds {}, not {acknowledged:?}", answer.value));
            }
            What::Read(_) => {}
            What::Flush => {
                if (0..BLOCKS).any(|block| self.durable[block] < acknowledged[block]) {
                    return Err(format!("{ask:?} is answered, and covers not all: {self:?}"));
                }
            }
        }
        self.answered += 1;
        Ok(())
    }

    /// The lender's process dies.
    pub fn crash(&mut self) {
        self.cache = self.durable;
    }

    /// What is still asked.
    pub fn open(&self) -> Option<Ask> {
        self.open.values().next().map(|open| open.ask)
    }
}
