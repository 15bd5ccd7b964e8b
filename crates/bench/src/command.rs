//! The command line of the measurements: `rackbus-bench …`, and `rackbus bench …`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use rackbus_devices::nvme::BackingConfig;

use crate::lent::lend;
use crate::machine::{Again, Regime};
use crate::raw::serve as serve_raw;
use crate::{BenchError, Report, nvme};

/// What can be measured.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// The lent NVMe drive.
    Nvme {
        /// Pairs of runs for each case.
        #[arg(long, default_value_t = 7)]
        runs: usize,
        /// Milliseconds of each run.
        #[arg(long, default_value_t = 400)]
        time: u64,
        /// Only cases whose name contains this.
        #[arg(long, default_value = "")]
        only: String,
        /// Hold /dev/cpu_dma_latency at 0 (takes root).
        #[arg(long)]
        low_latency: bool,
        /// Seconds to wait for the machine to become quiet.
        #[arg(long, default_value_t = 20)]
        patience: u64,
        /// Append the rows here.
        #[arg(long, default_value = "target/bench/results.jsonl")]
        results: PathBuf,
        /// Where sockets and images go.
        #[arg(long, default_value = "target/bench/nvme")]
        dir: PathBuf,
    },
    /// Serves a drive until standard input ends (used by the measurements).
    #[command(hide = true)]
    Lender {
        /// Where to serve it.
        #[arg(long)]
        socket: PathBuf,
        /// What is behind it.
        #[arg(long, default_value = "memory")]
        backing: Kind,
        /// A file or block device behind it.
        #[arg(long)]
        file: Option<PathBuf>,
    },
    /// The other side of the raw bound (used by the measurements).
    #[command(hide = true)]
    RawServer {
        /// Move no data.
        #[arg(long)]
        null: bool,
    },
}

/// Backings that need no file.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Kind {
    /// Memory of the lender.
    Memory,
    /// No data.
    Null,
}

/// Runs `command`. `prefix` is what this program has before it on its command line, to start
/// itself again as one of the processes that are measured. With `json` the rows are printed as JSON.
///
/// # Errors
/// [`BenchError`].
pub fn run(command: Command, prefix: &[&str], json: bool) -> Result<(), BenchError> {
    match command {
        Command::Nvme { runs, time, only, low_latency, patience, results, dir } => {
            let regime = if low_latency {
                Regime::low_latency().map_err(BenchError::io("/dev/cpu_dma_latency"))?
            } else {
                Regime::default_idle()
            };
            let (time, patience) = (Duration::from_millis(time), Duration::from_secs(patience));
            let again = Again { prefix: prefix.iter().map(|word| (*word).to_owned()).collect() };
            let settings = nvme::Settings { runs, time, dir, only, patience, again };
            nvme::run(&settings, &regime, &mut Report::new(Some(&results), json)?)
        }
        Command::Lender { socket, backing, file } => {
            let backing = match (file, backing) {
                (Some(path), _) => BackingConfig::File(path),
                (None, Kind::Memory) => BackingConfig::Memory,
                (None, Kind::Null) => BackingConfig::Null,
            };
            lend(backing, &socket)
        }
        Command::RawServer { null } => serve_raw(null),
    }
}
