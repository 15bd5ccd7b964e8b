#![forbid(unsafe_code)]
//! Sharing an accelerator among tenants, as decisions: what may be promised, whose turn it is, how
//! long a turn lasts. No I/O, clock, threads or randomness; a live device, a model of one and the
//! simulation below ask the same code.
//!
//! What an operation costs depends on its content: compressing 64 KiB of noise takes fifteen times as
//! long as compressing zeroes. So tenants are arbitrated by *engine time*: an estimate is charged when
//! work is handed to an engine, the measured time is settled when it comes back, and who used more
//! than was estimated carries the debt. Queues have no share of their own: a tenant with eight has
//! what a tenant with one has.
//!
//! * [`level`]: what a tenant asks for.
//! * [`profile`]: what operations cost by size and output. [`estimate`]: what this tenant's will.
//! * [`admission`]: which levels can be kept together, and what would fit instead.
//! * [`room`]: what a device could still promise, as a value; [`choice`]: which of several devices is asked first.
//! * [`arbiter`]: who is served next, with [`drr`] and [`bucket`] as its parts; [`turn`]: what it is given and
//!   gives out. [`kept`]: how far tenants got what they were promised.
//! * [`meter`]: limits on the bytes and operations of one user, of a drive that is lent and of functions in the timing model.
//! * [`sharing`]: that, or nothing of it ([`unshaped`]), as a device is asked for.
//! * [`simulation`]: tenants and engines in simulated time, for the experiments.
//!
//! Time is nanoseconds as a number that the caller passes in; it need only grow.

pub mod admission;
pub mod arbiter;
pub mod bucket;
pub mod choice;
pub mod drr;
pub mod estimate;
pub mod kept;
pub mod level;
pub mod meter;
pub mod profile;
pub mod room;
pub mod sharing;
pub mod simulation;
mod tenant;
pub mod turn;
pub mod unshaped;

pub use admission::{Capacity, LevelAdmission, LevelRefused};
pub use arbiter::TenantArbiter;
pub use choice::{CandidateDevice, CandidateFunction, Outlook, RankedDevice, rank};
pub use estimate::{Estimate, OutputEstimate};
pub use kept::MinimumRecord;
pub use level::{LevelError, Rate, RateUnit, ServiceLevel};
pub use meter::{Metered, OperationMeter};
pub use profile::{EngineProfile, Point, ProfileError};
pub use room::{LevelRoom, ResourcesLeft};
pub use sharing::{EngineSharing, Shaping};
pub use tenant::{Guarantee, RateLimit, TenantShare};
pub use turn::{
    EngineTurn, MessagePiece, NextTurn, OpenTurn, QueuedMessage, SharingSettings, TenantId,
    TurnResult, Usage,
};
pub use unshaped::MessageRoundRobin;

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;
