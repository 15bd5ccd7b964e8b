//! Commands that continue in the background: what to do when a step of one has finished.

use std::collections::VecDeque;

use rackbus_memory::{DmaSlice, PinnedSlice, SharedMemory};
use rackbus_spec::nvme::{IoOpcode, Sqe, Status};
use serde::{Deserialize, Serialize};

use super::backing::{MediaError, MediumRequest};
use super::saved::{Words, sqe, words};

/// Steps of a command that the backing has not seen yet.
pub type Steps = VecDeque<MediumRequest<Vec<PinnedSlice>>>;

/// A command that continues in the background.
#[derive(Debug)]
pub struct CommandJob {
    /// The command, or the controller itself, that the job is for.
    pub owner: Owner,
    /// The processor's counter when its command was taken.
    pub begun: u64,
    /// The step that the backing has now; none when it moves data of the host's.
    pub now: Option<JobStep>,
    /// What is to be done after it.
    pub rest: Steps,
    /// What is to be done at the end.
    pub finish: Finish,
}

/// A step that uses no memory of the host's, so that it can be written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum JobStep {
    /// What was written becomes durable, as by [`MediumRequest::Flush`].
    Flush,
    /// A range reads as zeroes, as by [`MediumRequest::Zero`].
    Zero {
        /// Offset of the first byte on the drive.
        offset: u64,
        /// How many bytes read as zeroes.
        length: u64,
        /// The space may be given back.
        deallocate: bool,
    },
}

impl JobStep {
    /// The step that `request` is; none for one with buffers.
    pub fn of<B>(request: &MediumRequest<B>) -> Option<JobStep> {
        match *request {
            MediumRequest::Flush => Some(JobStep::Flush),
            MediumRequest::Zero { offset, length, deallocate } => {
                Some(JobStep::Zero { offset, length, deallocate })
            }
            MediumRequest::Read { .. } | MediumRequest::Write { .. } => None,
        }
    }

    /// Whether it stays within a drive of `size` bytes.
    pub fn is_within(&self, size: u64) -> bool {
        match self {
            JobStep::Flush => true,
            JobStep::Zero { offset, length, .. } => {
                offset.checked_add(*length).is_some_and(|end| end <= size)
            }
        }
    }
}

/// How a job that was saved is carried out after it is restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum JobRestart {
    /// The command is executed from its beginning.
    Command,
    /// These steps are done.
    Steps {
        /// From the one that was under way on.
        steps: Vec<JobStep>,
        /// Whether the write cache is turned on again should they fail, as by [`Finish::CacheOff`].
        cache_off: bool,
    },
    /// Nothing: it has ended with this status, and was not answered.
    Ended(u16),
}

/// A job that was in flight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobState {
    /// The submission queue of its command; none for a shutdown.
    pub queue: Option<u16>,
    /// The command as its 16 double words.
    command: Words,
    /// What is to be done.
    pub again: JobRestart,
}

impl JobState {
    /// Who waits for it.
    pub fn owner(&self) -> Owner {
        match self.queue {
            Some(qid) => Owner::Command(qid, sqe(self.command)),
            None => Owner::Shutdown,
        }
    }
}

/// Who waits for a job.
#[derive(Debug, Clone, Copy)]
pub enum Owner {
    /// A command of this submission queue.
    Command(u16, Sqe),
    /// The shutdown that the host asked for.
    Shutdown,
}

/// The last thing a job does.
#[derive(Debug)]
pub enum Finish {
    /// Nothing more than the completion entry.
    Plain,
    /// The volatile write cache was turned off, and is on again should its flush fail.
    CacheOff,
    /// Compare the host's data with what was read.
    Compare(CompareSides),
}

/// The two sides of a Compare command.
#[derive(Debug)]
pub struct CompareSides {
    /// The part of the host's memory that is compared.
    pub host: Vec<PinnedSlice>,
    /// What was read from the drive to compare with.
    pub drive: SharedMemory,
}

impl CompareSides {
    /// Whether both are the same.
    ///
    /// # Errors
    /// Compare Failure when they are not.
    pub fn check(&self) -> Result<(), Status> {
        let mut at = 0;
        for host in &self.host {
            let host = host.get();
            let drive = self.drive.whole().part(at, host.len()).ok_or(Status::INTERNAL_ERROR)?;
            if !equal(host, drive) {
                return Err(Status::COMPARE_FAILURE);
            }
            at += host.len();
        }
        Ok(())
    }
}

/// Whether two pieces of shared memory hold the same bytes.
fn equal(a: DmaSlice<'_>, b: DmaSlice<'_>) -> bool {
    const CHUNK: usize = 4096;
    let (mut left, mut right) = ([0; CHUNK], [0; CHUNK]);
    (0..a.len()).step_by(CHUNK).all(|at| {
        let count = CHUNK.min(a.len() - at);
        match (a.part(at, count), b.part(at, count)) {
            (Some(a), Some(b)) => {
                a.copy_to(&mut left[..count]);
                b.copy_to(&mut right[..count]);
                left[..count] == right[..count]
            }
            _ => false,
        }
    })
}

/// Whether a command makes ranges zeroes, which may be as long as the drive.
pub fn makes_zeroes(opcode: Option<IoOpcode>) -> bool {
    matches!(opcode, Some(IoOpcode::WriteZeroes | IoOpcode::DatasetManagement))
}

/// The jobs in progress, by the tag that the backing answers with.
#[derive(Debug, Default)]
pub struct CommandJobs {
    slots: Vec<Option<CommandJob>>,
    free: Vec<u32>,
    /// What those weigh that are not of the admin queue.
    weight: usize,
    /// How many are of the admin queue.
    admin: usize,
    /// How many of them make ranges zeroes.
    zeroing: usize,
}

/// What the jobs of I/O queues that run at once may weigh together; further commands wait in their queues.
pub const WEIGHT_LIMIT: usize = 256;
/// How many jobs of the admin queue may run at once besides: a driver whose medium stands still hears what else it asks.
pub const ADMIN_LIMIT: usize = 8;
/// How many of them may make ranges zeroes.
pub const ZEROING_LIMIT: usize = WEIGHT_LIMIT / 2;
/// The weight of a comparison, which takes memory of the lender as long as its data.
pub const COMPARISON_WEIGHT: usize = 16;

impl CommandJob {
    /// `moved` tells how the step ended that the backing has, where that is known already.
    fn save(&self, moved: Option<Result<(), MediaError>>) -> JobState {
        let rest = self.rest.iter().map(JobStep::of);
        let steps: Option<Vec<JobStep>> = std::iter::once(self.now).chain(rest).collect();
        let again = match steps {
            Some(steps) => {
                JobRestart::Steps { steps, cache_off: matches!(self.finish, Finish::CacheOff) }
            }
            None => match moved {
                None => JobRestart::Command,
                // What is written becomes durable with whatever else is.
                Some(Ok(())) => JobRestart::Steps { steps: vec![JobStep::Flush], cache_off: false },
                Some(Err(error)) => JobRestart::Ended(Status::from(error).0),
            },
        };
        let (queue, command) = match &self.owner {
            Owner::Command(qid, sqe) => (Some(*qid), words(sqe)),
            Owner::Shutdown => (None, Words::default()),
        };
        JobState { queue, command, again }
    }

    fn is_admin(&self) -> bool {
        matches!(self.owner, Owner::Command(0, _))
    }

    fn zeroes(&self) -> bool {
        match self.owner {
            Owner::Command(qid, sqe) if qid != 0 => {
                makes_zeroes(IoOpcode::from_u8(sqe.cdw0.opcode()))
            }
            _ => false,
        }
    }

    fn weight(&self) -> usize {
        match self.finish {
            _ if self.is_admin() => 0,
            Finish::Plain | Finish::CacheOff => 1,
            Finish::Compare(_) => COMPARISON_WEIGHT,
        }
    }
}

impl CommandJobs {
    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.weight == 0 && self.admin == 0
    }

    /// Whether no command of an I/O queue may be taken that could become a job.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.weight >= WEIGHT_LIMIT
    }

    /// Whether no command of the admin queue may be taken.
    #[inline]
    pub fn is_full_of_admin(&self) -> bool {
        self.admin >= ADMIN_LIMIT
    }

    /// Whether no command may be taken that makes ranges zeroes: others do not wait for as long as many of those take.
    #[inline]
    pub fn are_mostly_zeroing(&self) -> bool {
        self.zeroing >= ZEROING_LIMIT
    }

    /// What the write commands among them write is made durable before they are done, because there is no cache any
    /// more that could keep it.
    pub fn flush_what_is_written(&mut self) {
        for job in self.slots.iter_mut().flatten() {
            let Owner::Command(qid, sqe) = job.owner else { continue };
            let opcode = IoOpcode::from_u8(sqe.cdw0.opcode()).filter(|_| qid != 0);
            let writes = opcode == Some(IoOpcode::Write) || makes_zeroes(opcode);
            let last = job.rest.back().map_or(job.now, JobStep::of);
            if writes && last != Some(JobStep::Flush) {
                job.rest.push_back(MediumRequest::Flush);
            }
        }
    }

    /// Keeps `job`; returns its tag.
    pub fn insert(&mut self, job: CommandJob) -> u32 {
        self.weight += job.weight();
        self.admin += usize::from(job.is_admin());
        self.zeroing += usize::from(job.zeroes());
        match self.free.pop() {
            Some(tag) => {
                self.slots[tag as usize] = Some(job);
                tag
            }
            None => {
                self.slots.push(Some(job));
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// All of them, to be done again.
    pub fn save(&self, outcome: impl Fn(u32) -> Option<Result<(), MediaError>>) -> Vec<JobState> {
        let jobs = (0..).zip(&self.slots).filter_map(|(tag, job)| Some((tag, job.as_ref()?)));
        jobs.map(|(tag, job)| job.save(outcome(tag))).collect()
    }

    /// Whether a command of submission queue `qid` continues in the background.
    pub fn any_of(&self, qid: u16) -> bool {
        let of = |job: &CommandJob| matches!(job.owner, Owner::Command(owner, _) if owner == qid);
        self.slots.iter().flatten().any(of)
    }

    /// The job with `tag`.
    pub fn get_mut(&mut self, tag: u32) -> Option<&mut CommandJob> {
        self.slots.get_mut(tag as usize)?.as_mut()
    }

    /// Takes the job with `tag` out.
    pub fn remove(&mut self, tag: u32) -> Option<CommandJob> {
        let job = self.slots.get_mut(tag as usize)?.take()?;
        self.weight -= job.weight();
        self.admin -= usize::from(job.is_admin());
        self.zeroing -= usize::from(job.zeroes());
        self.free.push(tag);
        Some(job)
    }
}
