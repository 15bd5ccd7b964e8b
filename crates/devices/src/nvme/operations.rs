//! What a drive counts of its commands, for people and metrics: by kind, with how long they took.
//!
//! A command's time is from when its queue got its turn until it was answered; of those that were
//! answered in the same turn, until the end of that turn, which is short: so that a command costs a
//! few additions, and the look at the counter is shared by all of a turn.

use rackbus_pci::Operations;
use rackbus_pci::operations::Tally;
use rackbus_spec::nvme::Sqe;
use rackbus_spec::nvme::command::{IoOpcode, RwCdw12};

/// The kinds' names, by their place. Event requests, which wait for an event, are not counted.
const KINDS: [&str; 6] = ["read", "write", "flush", "zero", "other", "admin"];

/// The place of a command's kind in [`KINDS`].
#[inline]
fn kind(qid: u16, sqe: &Sqe) -> usize {
    if qid == 0 {
        return 5;
    }
    match IoOpcode::from_u8(sqe.cdw0.opcode()) {
        Some(IoOpcode::Read) => 0,
        Some(IoOpcode::Write) => 1,
        Some(IoOpcode::Flush) => 2,
        Some(IoOpcode::WriteZeroes | IoOpcode::DatasetManagement) => 3,
        Some(IoOpcode::Compare | IoOpcode::Verify) | None => 4,
    }
}

/// The commands of one drive.
#[derive(Debug)]
pub struct Counts {
    operations: Operations,
    block_size: u64,
    /// Those answered in this turn.
    turn: [Tally; KINDS.len()],
    /// The processor's counter when this turn began.
    begun: u64,
}

impl Counts {
    /// None yet, on a drive with blocks of so many bytes.
    pub fn new(block_size: u32) -> Counts {
        Counts {
            operations: Operations::new(&KINDS),
            block_size: block_size.into(),
            turn: Default::default(),
            begun: 0,
        }
    }

    /// What was counted since the model was made.
    pub fn operations(&self) -> Operations {
        self.operations.clone()
    }

    /// A queue gets its turn, at this value of the processor's counter.
    #[inline]
    pub fn begin(&mut self, ticks: u64) {
        self.begun = ticks;
    }

    /// The counter's value when the turn began in which commands are taken now.
    #[inline]
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// A command was answered in the turn in which it was taken.
    #[inline]
    pub fn done(&mut self, qid: u16, sqe: &Sqe, succeeded: bool) {
        let bytes = self.moved(qid, sqe);
        self.turn[kind(qid, sqe)].count(bytes, succeeded);
    }

    /// Ends a turn of the queues at `ticks`.
    #[inline]
    pub fn end(&mut self, ticks: u64) {
        let took = ticks.saturating_sub(self.begun);
        for (kind, tally) in self.turn.iter_mut().enumerate() {
            if tally.done > 0 {
                self.operations.add(kind, std::mem::take(tally), took);
            }
        }
    }

    /// A command was answered that was taken in the turn that began at `begun`.
    pub fn done_later(&self, qid: u16, sqe: &Sqe, succeeded: bool, begun: u64, ticks: u64) {
        let mut tally = Tally::default();
        tally.count(self.moved(qid, sqe), succeeded);
        self.operations.add(kind(qid, sqe), tally, ticks.saturating_sub(begun));
    }

    /// Bytes between host and drive.
    #[inline]
    fn moved(&self, qid: u16, sqe: &Sqe) -> u64 {
        match kind(qid, sqe) {
            0 | 1 => (u64::from(RwCdw12::from(sqe.cdw12).nlb()) + 1) * self.block_size,
            _ => 0,
        }
    }
}
