//! The guest: queues with commands outstanding, their buffers, and what it expects of each.

use rackbus_seeds::Random;
use rackbus_spec::nvme::{Cqe, IoOpcode, Sqe, Status};

use super::super::{ENTRIES, Host, RAM, transfer};
use super::disk::{BLOCK, BLOCKS};
use super::model::{Promises, Version};

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
    Read,
    Write { durable: bool },
    Zero,
    Flush,
}

/// A command that was submitted and is not completed.
#[derive(Debug, Clone)]
struct Command {
    qid: u16,
    cid: u16,
    kind: Kind,
    blocks: std::ops::Range<usize>,
    begun: Moment,
    buffer: usize,
    /// Its completion may have waited for memory that was unmapped: it may have ended long ago.
    late: bool,
}

pub struct Guest {
    random: Random,
    pub queues: u16,
    pub shadowed: bool,
    /// It keeps its first queue full of long reads.
    pub greedy: bool,
    outstanding: Vec<Command>,
    next_version: Version,
}

/// The content of a block: the same number all over.
pub fn version_of(block: &[u8]) -> Result<Version, String> {
    let words = block.as_chunks::<8>().0;
    let first = words[0];
    match words.iter().all(|word| *word == first) {
        true => Ok(u64::from_le_bytes(first)),
        false => Err("a block was written in part".to_owned()),
    }
}

impl Guest {
    pub fn new(random: Random) -> Guest {
        let outstanding = Vec::new();
        let (queues, shadowed, greedy) = (1, false, false);
        Guest { random, queues, shadowed, greedy, outstanding, next_version: 1 }
    }

    /// Another driver, or the same one after a reset.
    pub fn restart(&mut self) {
        self.queues = 1 + self.random.below(MOST_QUEUES.into()) as u16;
        self.shadowed = self.random.chance(50);
        self.greedy = self.random.chance(20);
    }

    fn buffer(&self, index: usize) -> u64 {
        BUFFERS + index as u64 * BUFFER
    }

    fn kind(&mut self, qid: u16) -> Kind {
        if self.greedy && qid == 1 {
            return Kind::Read;
        }
        match self.random.below(100) {
            0..35 => Kind::Read,
            35..65 => Kind::Write { durable: false },
            65..75 => Kind::Write { durable: true },
            75..83 => Kind::Zero,
            _ => Kind::Flush,
        }
    }

    /// Puts a command into queue `qid`; `None` when it is full.
    pub fn submit(
        &mut self,
        host: &mut Host,
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
        let fill = if version > 0 { version } else { u64::MAX };
        host.poke(address, &fill.to_le_bytes().repeat(blocks.len() * BLOCK / 8));
        if matches!(kind, Kind::Write { .. } | Kind::Zero) {
            blocks.clone().for_each(|block| promises.begun(block, version, begun.at));
        }
        let cid = host.enqueue(qid, self.entry(kind, &blocks, address));
        let what = format!("{cid} {kind:?} {blocks:?} version {version}");
        self.outstanding.push(Command { qid, cid, kind, blocks, begun, buffer, late: false });
        Some(what)
    }

    fn entry(&mut self, kind: Kind, blocks: &std::ops::Range<usize>, address: u64) -> Sqe {
        let bytes = blocks.len().max(1) * BLOCK;
        let first = blocks.start as u64;
        match kind {
            Kind::Read => transfer(IoOpcode::Read, first, bytes, address),
            Kind::Write { durable } => {
                let mut sqe = transfer(IoOpcode::Write, first, bytes, address);
                sqe.cdw12 |= u32::from(durable) << 30;
                sqe
            }
            Kind::Zero => {
                let mut sqe = transfer(IoOpcode::WriteZeroes, first, bytes, 0);
                // Deallocate, or not.
                sqe.cdw12 |= u32::from(self.random.chance(50)) << 25;
                sqe
            }
            Kind::Flush => {
                let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
                sqe.cdw0.set_opcode(IoOpcode::Flush as u8);
                sqe
            }
        }
    }

    /// A command of queue `qid` completed.
    pub fn completed(
        &mut self,
        host: &Host,
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
        if !ok && !now.fails {
            return Err(format!("{command:?} failed with {status:?} and nothing was wrong"));
        }
        match command.kind {
            Kind::Read if ok => self.check_data(host, promises, &command, now.at)?,
            Kind::Read => {}
            Kind::Write { durable } => {
                if durable && ok && now.sync_failed && !command.late {
                    return Err(format!("{command:?} is durable after a failure"));
                }
                for block in command.blocks.clone() {
                    promises.ended(block, command.begun.at, ok, durable && ok, now.at);
                }
            }
            Kind::Zero => {
                for block in command.blocks.clone() {
                    promises.ended(block, command.begun.at, ok, false, now.at);
                }
            }
            Kind::Flush if ok && now.sync_failed && !command.late => {
                return Err(format!("{command:?} succeeded after a failure"));
            }
            Kind::Flush if ok => promises.flushed(command.begun.at),
            Kind::Flush if !cqe.status().is_do_not_retry() => {
                return Err(format!("{command:?} failed and may be tried again"));
            }
            Kind::Flush if !now.trouble => {
                return Err(format!("{command:?} failed and the drive counts as sound"));
            }
            Kind::Flush => {}
        }
        Ok(())
    }

    fn check_data(
        &self,
        host: &Host,
        promises: &mut Promises,
        command: &Command,
        at: u64,
    ) -> Result<(), String> {
        let data = host.peek(self.buffer(command.buffer), command.blocks.len() * BLOCK);
        for (block, content) in command.blocks.clone().zip(data.chunks_exact(BLOCK)) {
            let version = version_of(content)?;
            promises.read(block, version, command.begun.at, at)?;
        }
        Ok(())
    }

    /// Nothing that is outstanding completes any more; what it has done stays done.
    pub fn give_up(&mut self, promises: &mut Promises, at: u64) {
        for command in self.outstanding.drain(..) {
            if matches!(command.kind, Kind::Write { .. } | Kind::Zero) {
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
