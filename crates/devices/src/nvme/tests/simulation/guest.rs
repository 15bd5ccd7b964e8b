//! The guest: queues with commands outstanding, their buffers, and what it expects of each.

use std::ops::Range;

use rackbus_seeds::Random;
use rackbus_spec::nvme::data::DsmRange;
use rackbus_spec::nvme::features::VOLATILE_WRITE_CACHE;
use rackbus_spec::nvme::{AdminOpcode, Cqe, IoOpcode, Sqe, Status};
use zerocopy::IntoBytes as _;

use super::super::{ENTRIES, RAM, TestHost, admin, transfer};
use super::disk::{BLOCK, BLOCKS};
use super::model::{Promises, WriteNumber};

/// Bytes of the guest's memory.
pub const RAM_BYTES: u64 = 432 << 10;
/// Bytes of it that queues are in.
pub const QUEUE_BYTES: u64 = 64 << 10;
/// Address of the first command's buffer: the queues lie before it.
const BUFFERS: u64 = RAM + QUEUE_BYTES;
const BUFFER: u64 = 8192;
const MOST_BLOCKS: usize = BUFFER as usize / BLOCK;
/// The greatest number of I/O queues that a guest makes.
const MOST_QUEUES: u16 = 3;

/// A moment of a schedule: the time, and what is done then.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub at: u64,
    pub polls: u64,
}

/// What is known when a command completes.
#[derive(Debug, Clone, Copy)]
pub struct Circumstances {
    pub at: u64,
    /// Something has failed on the medium.
    pub fails: bool,
    /// A flush had failed, and the file was not loaded anew, before the controller worked.
    pub sync_failed: bool,
    /// The drive says that something is wrong with it.
    pub trouble: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read {
        durable: bool,
    },
    Write {
        durable: bool,
    },
    Zero {
        durable: bool,
    },
    /// Dataset Management, with as many ranges.
    Deallocate {
        ranges: usize,
    },
    Compare(WriteNumber),
    Flush,
    /// Set Features: the volatile write cache.
    Cache {
        on: bool,
    },
}

impl Kind {
    /// Whether it changes blocks.
    fn writes(self) -> bool {
        matches!(self, Kind::Write { .. } | Kind::Zero { .. } | Kind::Deallocate { .. })
    }

    /// Whether what it reads or writes is durable when it is done, as it says itself.
    fn durable(self) -> bool {
        match self {
            Kind::Read { durable } | Kind::Write { durable } | Kind::Zero { durable } => durable,
            _ => false,
        }
    }

    /// What its buffer holds beforehand.
    fn fill(self, version: WriteNumber, blocks: &Range<usize>) -> Vec<u8> {
        let all = |version: WriteNumber| version.to_le_bytes().repeat(blocks.len() * BLOCK / 8);
        match self {
            Kind::Write { .. } => all(version),
            Kind::Compare(version) => all(version),
            Kind::Deallocate { ranges } => split(blocks, ranges)
                .flat_map(|range| {
                    let (nlb, slba) = (range.len() as u32, range.start as u64);
                    DsmRange { attributes: 0, nlb, slba }.as_bytes().to_vec()
                })
                .collect(),
            _ => all(u64::MAX),
        }
    }
}

/// `blocks` in as many parts that follow each other.
fn split(blocks: &Range<usize>, parts: usize) -> impl Iterator<Item = Range<usize>> {
    let at = move |part: usize, blocks: &Range<usize>| blocks.start + blocks.len() * part / parts;
    let blocks = blocks.clone();
    (0..parts).map(move |part| at(part, &blocks)..at(part + 1, &blocks))
}

/// A command that was submitted and is not completed.
#[derive(Debug, Clone)]
struct Command {
    qid: u16,
    cid: u16,
    kind: Kind,
    blocks: Range<usize>,
    begun: Moment,
    buffer: usize,
    /// Its completion may have waited for memory that was unmapped: it may have ended long ago.
    late: bool,
}

pub struct SimulatedGuest {
    random: Random,
    pub queues: u16,
    pub shadowed: bool,
    /// It keeps its first queue full of long reads.
    pub greedy: bool,
    /// Whether what is written may rest in a volatile cache.
    cache: bool,
    outstanding: Vec<Command>,
    next_version: WriteNumber,
}

/// The content of a block: the same number all over.
pub fn version_of(block: &[u8]) -> Result<WriteNumber, String> {
    let words = block.as_chunks::<8>().0;
    let first = words[0];
    match words.iter().all(|word| *word == first) {
        true => Ok(u64::from_le_bytes(first)),
        false => Err("a block was written in part".to_owned()),
    }
}

impl SimulatedGuest {
    pub fn new(random: Random) -> SimulatedGuest {
        let outstanding = Vec::new();
        let (queues, shadowed, greedy) = (1, false, false);
        SimulatedGuest {
            random,
            queues,
            shadowed,
            greedy,
            cache: true,
            outstanding,
            next_version: 1,
        }
    }

    /// Another driver, or the same one after a reset.
    pub fn restart(&mut self) {
        self.queues = 1 + self.random.below(MOST_QUEUES.into()) as u16;
        self.shadowed = self.random.chance(50);
        self.greedy = self.random.chance(20);
        self.cache = true;
    }

    fn buffer(&self, index: usize) -> u64 {
        BUFFERS + index as u64 * BUFFER
    }

    fn kind(&mut self, qid: u16) -> Kind {
        if self.greedy && qid == 1 {
            return Kind::Read { durable: false };
        }
        match self.random.below(100) {
            0..34 => Kind::Read { durable: self.random.chance(15) },
            34..61 => Kind::Write { durable: false },
            61..70 => Kind::Write { durable: true },
            70..77 => Kind::Zero { durable: self.random.chance(20) },
            77..82 => Kind::Deallocate { ranges: 1 + self.random.below(3) },
            82..86 => Kind::Compare(self.next_version * self.random.below(2) as u64),
            _ => Kind::Flush,
        }
    }

    /// Turns the write cache on or off; `None` while an earlier command that does is not completed.
    pub fn submit_cache(&mut self, host: &mut TestHost, begun: Moment) -> Option<String> {
        if self.outstanding.iter().any(|command| command.qid == 0) {
            return None;
        }
        let on = self.random.chance(40);
        self.cache |= on;
        let (kind, blocks) = (Kind::Cache { on }, 0..0);
        let (entry, buffer) = (self.entry(kind, &blocks, 0), usize::MAX);
        let cid = host.enqueue(0, entry);
        self.outstanding.push(Command { qid: 0, cid, kind, blocks, begun, buffer, late: false });
        Some(format!("{cid} {kind:?}"))
    }

    /// Puts a command into queue `qid`; `None` when it is full.
    pub fn submit(
        &mut self,
        host: &mut TestHost,
        promises: &mut Promises,
        qid: u16,
        begun: Moment,
    ) -> Option<String> {
        let mine = self.outstanding.iter().filter(|command| command.qid == qid).count();
        if mine >= usize::from(ENTRIES) - 1 {
            return None;
        }
        let kind = self.kind(qid);
        let length = if self.greedy && qid == 1 {
            MOST_BLOCKS
        } else if self.random.chance(40) {
            // Whole pages, which are written at once.
            8 << self.random.below(2)
        } else {
            1 + self.random.below(MOST_BLOCKS)
        };
        let mut first = self.random.below(BLOCKS - length + 1);
        if length.is_multiple_of(8) {
            first -= first % 8;
        }
        let blocks = if kind == Kind::Flush { 0..0 } else { first..first + length };
        let free = |index: &usize| !self.outstanding.iter().any(|c| c.buffer == *index);
        let buffer = (0..).find(free)?;
        let version = match kind {
            Kind::Write { .. } => {
                self.next_version += 1;
                self.next_version
            }
            _ => 0,
        };
        let address = self.buffer(buffer);
        host.poke(address, &kind.fill(version, &blocks));
        if kind.writes() {
            blocks.clone().for_each(|block| promises.begun(block, version, begun.at));
        }
        let cid = host.enqueue(qid, self.entry(kind, &blocks, address));
        let what = format!("{cid} {kind:?} {blocks:?} version {version}");
        self.outstanding.push(Command { qid, cid, kind, blocks, begun, buffer, late: false });
        Some(what)
    }

    fn entry(&mut self, kind: Kind, blocks: &Range<usize>, address: u64) -> Sqe {
        let bytes = blocks.len().max(1) * BLOCK;
        let first = blocks.start as u64;
        let mut sqe = match kind {
            Kind::Read { .. } => transfer(IoOpcode::Read, first, bytes, address),
            Kind::Write { .. } => transfer(IoOpcode::Write, first, bytes, address),
            Kind::Compare(_) => transfer(IoOpcode::Compare, first, bytes, address),
            Kind::Zero { .. } => {
                let mut sqe = transfer(IoOpcode::WriteZeroes, first, bytes, 0);
                // Deallocate, or not.
                sqe.cdw12 |= u32::from(self.random.chance(50)) << 25;
                sqe
            }
            Kind::Deallocate { ranges } => {
                let mut sqe = transfer(IoOpcode::DatasetManagement, 0, BLOCK, address);
                (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (ranges as u32 - 1, 1 << 2, 0);
                sqe
            }
            Kind::Flush => {
                let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
                sqe.cdw0.set_opcode(IoOpcode::Flush as u8);
                sqe
            }
            Kind::Cache { on } => {
                let mut sqe = admin(AdminOpcode::SetFeatures);
                (sqe.cdw10, sqe.cdw11) = (VOLATILE_WRITE_CACHE.into(), on.into());
                sqe
            }
        };
        sqe.cdw12 |= u32::from(kind.durable()) << 30;
        sqe
    }

    /// A command of queue `qid` completed.
    pub fn completed(
        &mut self,
        host: &TestHost,
        promises: &mut Promises,
        qid: u16,
        cqe: Cqe,
        now: Circumstances,
    ) -> Result<(), String> {
        let found = self.outstanding.iter().position(|c| (c.qid, c.cid) == (qid, cqe.cid));
        let Some(index) = found else {
            return Err(format!("queue {qid}: {} was not outstanding", cqe.cid));
        };
        let command = self.outstanding.swap_remove(index);
        let status = cqe.status().code();
        let ok = status == Status::SUCCESS;
        let differs = matches!(command.kind, Kind::Compare(_)) && status == Status::COMPARE_FAILURE;
        if !ok && !differs && !now.fails {
            return Err(format!("{command:?} failed with {status:?} and nothing was wrong"));
        }
        let durable = ok && (command.kind.durable() || command.kind.writes() && !self.cache);
        if durable && now.sync_failed && !command.late {
            return Err(format!("{command:?} is durable after a failure"));
        }
        match command.kind {
            Kind::Read { durable } if ok => {
                self.check_data(host, promises, &command, durable, now.at)?
            }
            Kind::Read { .. } => {}
            Kind::Compare(_) => check_comparison(promises, &command, ok, differs, now.at)?,
            Kind::Write { .. } | Kind::Zero { .. } | Kind::Deallocate { .. } => {
                for block in command.blocks.clone() {
                    promises.ended(block, command.begun.at, ok, durable, now.at);
                }
            }
            // Off: all that has ended until now is durable, and so is all that ends from now on.
            Kind::Cache { on: false } | Kind::Flush if ok => {
                if now.sync_failed && !command.late {
                    return Err(format!("{command:?} succeeded after a failure"));
                }
                let off = command.kind != Kind::Flush;
                self.cache &= !off;
                promises.flushed(if off { now.at } else { command.begun.at });
            }
            Kind::Cache { on: true } if !ok => {
                return Err(format!("{command:?} failed with {status:?}"));
            }
            Kind::Cache { on: true } => {}
            // The cache is on again.
            Kind::Cache { on: false } | Kind::Flush => {
                self.cache |= command.kind != Kind::Flush;
                if !cqe.status().is_do_not_retry() {
                    return Err(format!("{command:?} failed and may be tried again"));
                }
                if !now.trouble {
                    return Err(format!("{command:?} failed and the drive counts as sound"));
                }
            }
        }
        Ok(())
    }

    fn check_data(
        &self,
        host: &TestHost,
        promises: &mut Promises,
        command: &Command,
        durable: bool,
        at: u64,
    ) -> Result<(), String> {
        let data = host.peek(self.buffer(command.buffer), command.blocks.len() * BLOCK);
        for (block, content) in command.blocks.clone().zip(data.chunks_exact(BLOCK)) {
            let version = version_of(content)?;
            if durable {
                promises.read_durably(block, version, command.begun.at, at);
            }
            promises.read(block, version, command.begun.at, at)?;
        }
        Ok(())
    }

    /// Nothing that is outstanding completes any more; what it has done stays done.
    pub fn give_up(&mut self, promises: &mut Promises, at: u64) {
        for command in self.outstanding.drain(..) {
            if command.kind.writes() {
                for block in command.blocks.clone() {
                    promises.ended(block, command.begun.at, false, false, at);
                }
            }
        }
    }

    /// Memory is mapped again: patience begins anew.
    pub fn mapped(&mut self, polls: u64) {
        for command in &mut self.outstanding {
            (command.begun.polls, command.late) = (polls, true);
        }
    }

    pub fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    pub fn check_waiting(&self, polls: u64, patience: u64) -> Result<(), String> {
        match self.outstanding.iter().find(|command| command.begun.polls + patience < polls) {
            Some(command) => Err(format!("{command:?} waits and nothing hinders it")),
            None => Ok(()),
        }
    }

    pub fn check_none_waits(&self) -> Result<(), String> {
        match self.outstanding.first() {
            Some(command) => Err(format!("{command:?} never ended")),
            None => Ok(()),
        }
    }
}

/// A comparison found what it should.
fn check_comparison(
    promises: &mut Promises,
    command: &Command,
    equal: bool,
    differs: bool,
    at: u64,
) -> Result<(), String> {
    let Kind::Compare(version) = command.kind else { return Ok(()) };
    let begun = command.begun.at;
    if equal {
        return command
            .blocks
            .clone()
            .try_for_each(|block| promises.read(block, version, begun, at));
    }
    let may_differ = |block| promises.may_differ(block, version, begun, at);
    if differs && !command.blocks.clone().any(may_differ) {
        return Err(format!("{command:?} differs, and nothing else may be there"));
    }
    Ok(())
}
