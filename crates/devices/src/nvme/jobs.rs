//! Commands that go on in the background: what to do when a step of one has finished.

use std::collections::VecDeque;

use rackbus_memory::{DmaSlice, PinnedSlice, SharedMemory};
use rackbus_spec::nvme::{Sqe, Status};

use super::backing::Request;

/// Steps of a command that the backing has not seen yet.
pub type Steps = VecDeque<Request<Vec<PinnedSlice>>>;

/// A command that goes on in the background.
#[derive(Debug)]
pub struct Job {
    /// Who asked.
    pub owner: Owner,
    /// What is to be done after the step that the backing has now.
    pub rest: Steps,
    /// What is to be done at the end.
    pub finish: Finish,
}

/// Who waits for a job.
#[derive(Debug)]
pub enum Owner {
    /// A command of this submission queue.
    Command(u16, Sqe),
    /// The shutdown that the host asked for.
    Shutdown,
}

/// The last thing a job does.
#[derive(Debug)]
pub enum Finish {
    /// Nothing.
    Plain,
    /// Turn the volatile write cache off: what was in it is durable now.
    CacheOff,
    /// Compare the host's data with what was read.
    Compare(Comparison),
}

/// The two sides of a Compare command.
#[derive(Debug)]
pub struct Comparison {
    /// The host's data.
    pub host: Vec<PinnedSlice>,
    /// The drive's data.
    pub drive: SharedMemory,
}

impl Comparison {
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

/// Jobs by tag.
#[derive(Debug, Default)]
pub struct Jobs {
    slots: Vec<Option<Job>>,
    free: Vec<u32>,
    weight: usize,
}

/// What the jobs that run at once may weigh together; further commands wait in their queues.
const WEIGHT_LIMIT: usize = 256;
/// The weight of a comparison, which takes memory of the lender as long as its data.
const COMPARISON_WEIGHT: usize = 16;

impl Job {
    fn weight(&self) -> usize {
        match self.finish {
            Finish::Plain | Finish::CacheOff => 1,
            Finish::Compare(_) => COMPARISON_WEIGHT,
        }
    }
}

impl Jobs {
    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.weight == 0
    }

    /// Whether no command may be taken that could become a job.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.weight >= WEIGHT_LIMIT
    }

    /// Keeps `job`; returns its tag.
    pub fn insert(&mut self, job: Job) -> u32 {
        self.weight += job.weight();
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

    /// Whether a command of submission queue `qid` goes on in the background.
    pub fn any_of(&self, qid: u16) -> bool {
        let of = |job: &Job| matches!(job.owner, Owner::Command(owner, _) if owner == qid);
        self.slots.iter().flatten().any(of)
    }

    /// The job with `tag`.
    pub fn get_mut(&mut self, tag: u32) -> Option<&mut Job> {
        self.slots.get_mut(tag as usize)?.as_mut()
    }

    /// Takes the job with `tag` out.
    pub fn remove(&mut self, tag: u32) -> Option<Job> {
        let job = self.slots.get_mut(tag as usize)?.take()?;
        self.weight -= job.weight();
        self.free.push(tag);
        Some(job)
    }
}
