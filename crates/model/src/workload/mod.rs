//! Workloads: what moves in a rack, as `rackbus model run` reads it.
//!
//! ```toml
//! duration = "2 ms"
//!
//! [flows.backup]
//! kind = "write"         # the drive's DMA into beta's memory
//! from = "alpha/nvme0"
//! to = "beta"
//! size = "128 KiB"
//! depth = 8
//!
//! [flows.database]
//! kind = "nvme-read"
//! host = "beta"
//! device = "alpha/nvme0"
//! size = "4 KiB"
//! tenant = "shop"
//! ```
//!
//! A flow is one of these kinds, each a script of the engine's steps:
//!
//! | kind | what a job of it does |
//! | --- | --- |
//! | `write`, `read` | `from` (a device, or a host's processor) writes to or reads from `to` |
//! | `copy` | `by` reads `size` from `from` and writes it to `to`: a GPU's copy, RDMA, HRDMA |
//! | `request` | `from` writes `request` bytes to `to`, which after `service` writes `size` back |
//! | `steps` | steps, one after the other: each waits for the one before |
//! | `all-reduce` | `members` add up `size` bytes of each, in a ring, until all have the sum |
//! | `ring` | `host` rings `device`'s doorbell; that reads a descriptor and `size` of input, works for `service`, writes `output`, a completion and an interrupt |
//! | `nvme-read`, `nvme-write` | the same for a drive: command, media, data, completion, interrupt |
//! | `trace` | the same, for each read and write of a trace of block I/O |

pub mod blocks;
mod divided;
mod doubts;
mod engines;
mod file;
mod follow;
mod limits;
mod media;
mod meters;
pub mod pictures;
mod results;
mod scripts;
mod shaping;
mod spread;
mod steps;
mod traces;
mod untried;
mod ways;
mod writer;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::engine::Arrivals;
use crate::random::Distribution;
use crate::time::Time;

pub use blocks::BlockTrace;
pub use divided::{Divided, run};
pub use engines::FunctionLevel;
pub use file::{NamedText, parse, parse_with};
pub use follow::{TraceStep, Traced, trace};
pub use results::{FlowResult, HostProfile, Latency, LinkResult, Results, Slice, TenantResult};
pub use scripts::{Failed, Run, stranded, watch};
pub use shaping::{ShapedPart, ShapedTenant};
pub use steps::{Move, MoveKind, StepSpec};

/// What moves in a rack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// The seed of random arrivals and addresses.
    pub seed: u64,
    /// How long it is simulated.
    pub duration: Time,
    /// From when on it is measured.
    pub warmup: Time,
    /// How many there are of what steps use, by name; one of what is not named here.
    pub units: BTreeMap<String, u32>,
    /// Devices and switches that shape by tenant.
    pub shaping: Vec<ShapedPart>,
    /// Service levels of functions, in place of those that the rack file promises.
    pub levels: Vec<FunctionLevel>,
    /// The flows, in the file's order.
    pub flows: Vec<FlowSpec>,
    /// What was left out of what the file names, in sentences.
    pub notes: Vec<String>,
}

/// Jobs of one kind that follow each other, and how they come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowSpec {
    /// Its name in the file, unique there.
    pub name: String,
    /// Whose it is; results are added up by it.
    pub tenant: Option<String>,
    /// What its jobs do.
    pub kind: FlowKind,
    /// Bytes that each job counts for; 0 for one of steps that move nothing.
    pub size: u64,
    /// How its jobs come, to each of its queues.
    pub arrivals: Arrivals,
    /// Queue pairs: streams that a device takes turns among.
    pub queues: u32,
    /// Jobs of each queue at most.
    pub count: u64,
    /// When the first comes.
    pub begin: Time,
    /// From when on none begins; [`Time::MAX`] for never.
    pub end: Time,
    /// For how long its jobs come, and for how long none does then; `None` when they never pause.
    pub bursts: Option<[Distribution; 2]>,
    /// Its jobs one by one, of a flow of kind `trace`; its queues take turns.
    pub trace: Option<BlockTrace>,
    /// What passes between the end of a job and the next one's beginning.
    pub think: Distribution,
    /// Whether jobs are at random places of `span` bytes, or one after the other in it.
    pub random: bool,
    /// Bytes of the area that jobs are in.
    pub span: u64,
    /// Where the file says so, for messages: of each end, then of the flow.
    pub places: FlowSpans,
}

impl FlowSpec {
    /// A flow with one queue, from the beginning on and without end, in an area of 64 MiB.
    pub fn new(name: &str, kind: FlowKind, arrivals: Arrivals, size: u64) -> FlowSpec {
        FlowSpec {
            name: name.to_owned(),
            tenant: None,
            kind,
            size,
            arrivals,
            queues: 1,
            count: u64::MAX,
            begin: Time::ZERO,
            end: Time::MAX,
            bursts: None,
            trace: None,
            think: Distribution::Fixed(Time::ZERO),
            random: false,
            span: 64 << 20,
            places: FlowSpans::default(),
        }
    }

    /// The trace's reads and writes that one of its queues does.
    fn traced(&self, queue: u32) -> impl Iterator<Item = &blocks::BlockIo> {
        let all = self.trace.iter().flat_map(|trace| &trace.ios);
        all.skip(queue as usize).step_by(self.queues.max(1) as usize)
    }
}

/// Where it is in the file what a flow names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlowSpans {
    /// `from`, `by` or `host`, `to` or `device`, in the order of [`FlowKind::ends`].
    pub ends: Vec<Range<usize>>,
    /// Where `begin` is, bytes of the file.
    pub begin: Range<usize>,
    /// Where `end` is, bytes of the file.
    pub end: Range<usize>,
}

/// In whose memory a device's queues lie: its descriptors and completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuesIn {
    /// That of the host whose driver it is: the borrower's, of a device that is lent.
    Host,
    /// That of the host that the device is in.
    Lender,
}

/// What a flow's jobs do. Ends are named as in [`Assembly::end`](crate::assembly::Assembly::end).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FlowKind {
    /// DMA writes, or a processor's stores.
    Write {
        /// The device or host that makes the requests.
        from: String,
        /// The host or device whose memory is written to.
        to: String,
    },
    /// DMA reads, or a processor's loads.
    Read {
        /// The device or host that makes the requests.
        from: String,
        /// The host or device whose memory is read.
        to: String,
    },
    /// Reads whose bytes are written elsewhere as they come.
    Copy {
        /// The device or host that makes the requests.
        by: String,
        /// The host or device whose memory is read.
        from: String,
        /// The host or device whose memory is written to.
        to: String,
    },
    /// A write that is answered by another, after a service.
    Request {
        /// The host or device that asks.
        from: String,
        /// The host or device that answers.
        to: String,
        /// Bytes of a request.
        request: u64,
        /// How long the answer takes.
        service: Distribution,
    },
    /// Steps, one after the other.
    Steps {
        /// The steps, in the file's order; at least one.
        steps: Vec<StepSpec>,
    },
    /// Sums of what all members have, by a ring all-reduce.
    AllReduce {
        /// The devices, in the order of the ring; at least two.
        members: Vec<String>,
        /// Bytes per second that a member adds up; `None` for no time.
        reduce: Option<u64>,
        /// What software takes before each of the ring's steps.
        step: Time,
    },
    /// Jobs of a device with rings of descriptors.
    Ring {
        /// The host whose driver rings the doorbell.
        host: String,
        /// The device that takes the job, of any host.
        device: String,
        /// Bytes of a descriptor.
        descriptor: u64,
        /// Bytes that it reads for a job.
        input: u64,
        /// Bytes that it writes for a job.
        output: u64,
        /// How long it works on a job: of a drive, its medium.
        service: Distribution,
        /// Jobs that it works on at a time, of all flows; without it, as many as its class says, or 64 for a drive, or 1.
        units: Option<u32>,
        /// Whether it must be a drive.
        drive: bool,
        /// In whose memory its queues lie.
        queues_in: QueuesIn,
        /// Whether it interrupts at the end; the driver polls otherwise.
        interrupt: bool,
    },
}

impl FlowKind {
    /// The names of its ends, in the order of the file's keys.
    pub fn ends(&self) -> Vec<&str> {
        match self {
            FlowKind::Write { from, to }
            | FlowKind::Read { from, to }
            | FlowKind::Request { from, to, .. } => vec![from, to],
            FlowKind::Copy { by, from, to } => vec![by, from, to],
            FlowKind::Ring { host, device, .. } => vec![host, device],
            FlowKind::AllReduce { members, .. } => members.iter().map(String::as_str).collect(),
            FlowKind::Steps { steps } => steps.iter().flat_map(StepSpec::all_ends).collect(),
        }
    }
}
