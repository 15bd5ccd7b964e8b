//! Measures rackbus against the machine's own limits and against other systems.
//!
//! Whatever is compared runs in turns in one program on the same processors, under the same
//! wake-up regime, and the median of the paired ratios counts; one figure alone says more about
//! the state of the machine than about the program. Each case is a row of [`ResultRow`]s.

pub mod accel;
mod against;
#[cfg(feature = "peers")]
mod blkio_peer;
mod borrowed;
mod bounce;
mod command;
pub mod datapath;
#[cfg(feature = "guests")]
pub mod guests;
mod hot_add;
mod interval;
pub mod lending;
mod lent;
mod machine;
pub mod machines;
pub mod memory;
#[cfg(feature = "guests")]
pub mod metal;
pub mod model;
pub mod network;
pub mod nvme;
mod peers;
mod rack;
mod raw;
mod report;
mod sharing;

pub use command::{BackingKind, BenchCommand, run};
pub use machine::{Regime, RestartCommand};
pub use report::{Report, ResultRow};

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The drive that is measured failed, or its controller reported an error.
    #[error(transparent)]
    Drive(#[from] rackbus_driver::DriveError),
    /// The drive could not be made.
    #[error(transparent)]
    Nvme(#[from] rackbus_devices::nvme::NvmeError),
    /// A segment or an interrupt could not be obtained.
    #[error(transparent)]
    Attach(#[from] rackbus_attach::AttachError),
    /// Memory could not be shared.
    #[error(transparent)]
    Memory(#[from] rackbus_memory::RegionError),
    /// A file or a program could not be used.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried, as a phrase for the message.
        what: String,
        /// The error of the system call.
        cause: std::io::Error,
    },
    /// Cases that an earlier build does better.
    #[error("slower than before: {0}")]
    Slower(String),
    /// Rows that only one of two builds has: nothing is known of them.
    #[error("rows that could not be compared: {0}; leave out what only one of both measures")]
    Unpaired(String),
    /// Another system did not work as expected.
    #[error("{0}")]
    Peer(String),
}

impl BenchError {
    /// Makes an I/O error of `what`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> BenchError {
        let what = what.into();
        move |cause| BenchError::Io { what, cause }
    }
}
