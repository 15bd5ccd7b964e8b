//! `rackbus-bench`: measures an area and prints its rows. `make bench` runs it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use rackbus_bench::{BenchError, Regime, Report, lend, nvme, serve_raw};
use rackbus_devices::nvme::BackingConfig;

#[derive(Parser)]
#[command(about = "Measures rackbus against the machine's limits and other systems")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
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
        #[arg(long)]
        socket: PathBuf,
        #[arg(long, default_value = "memory")]
        backing: Kind,
        #[arg(long)]
        file: Option<PathBuf>,
    },
    /// The other side of the raw bound (used by the measurements).
    #[command(hide = true)]
    RawServer {
        #[arg(long)]
        null: bool,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Memory,
    Null,
}

fn run(what: What) -> Result<(), BenchError> {
    match what {
        What::Nvme { runs, time, only, low_latency, results, dir } => {
            let regime = if low_latency {
                Regime::low_latency().map_err(BenchError::io("/dev/cpu_dma_latency"))?
            } else {
                Regime::default_idle()
            };
            let time = Duration::from_millis(time);
            let settings = nvme::Settings { runs, time, dir, only };
            nvme::run(&settings, &regime, &mut Report::new(Some(&results))?)
        }
        What::Lender { socket, backing, file } => {
            let backing = match (file, backing) {
                (Some(path), _) => BackingConfig::File(path),
                (None, Kind::Memory) => BackingConfig::Memory,
                (None, Kind::Null) => BackingConfig::Null,
            };
            lend(backing, &socket)
        }
        What::RawServer { null } => serve_raw(null),
    }
}

fn main() -> ExitCode {
    match run(Arguments::parse().what) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rackbus-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
