//! The command line of the measurements: `rackbus-bench …`, and `rackbus bench …`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use rackbus_devices::nvme::BackingConfig;

use crate::lent::lend;
use crate::machine::{Regime, RestartCommand};
use crate::raw::serve as serve_raw;
use crate::{
    BenchError, Report, accel, against, borrowed, datapath, hot_add, lending, machines, memory,
    model, network, nvme, sharing,
};

/// What can be measured.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// The lent NVMe drive.
    Nvme {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where sockets and images go.
        #[arg(long, default_value = "target/bench/nvme")]
        dir: PathBuf,
    },
    /// Functions of several lenders: peer-to-peer.
    Lending {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where the rack's sockets and state go.
        #[arg(long, default_value = "target/bench/lending")]
        dir: PathBuf,
    },
    /// A drive of another machine, over the network.
    Machines {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// The folder for the certificate authority that both ends have.
        #[arg(long, default_value = "target/bench/machines")]
        dir: PathBuf,
    },
    /// Memory that hosts share: segments, interrupts, the copy engine.
    Memory {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where the rack's sockets and state go.
        #[arg(long, default_value = "target/bench/memory")]
        dir: PathBuf,
    },
    /// Memory that virtual machines share: stock guests on two hosts.
    #[cfg(feature = "guests")]
    Guests {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where the rack's state goes.
        #[arg(long, default_value = "target/bench/guests")]
        dir: PathBuf,
        /// How often a segment is mapped and given back, to see whether that becomes slower.
        #[arg(long, default_value_t = 10_000)]
        cycles: u32,
    },
    /// A drive that another host's kernel borrows through an NTB: stock guests stand for the hosts. Needs root.
    #[cfg(feature = "guests")]
    Metal {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where the machines' files go.
        #[arg(long, default_value = "target/bench/metal")]
        dir: PathBuf,
    },
    /// Events and packets each second of the timing model.
    Model {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
    },
    /// The data path of shared memory: interrupts, messages, copies.
    Datapath {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
    },
    /// Accelerators: engines through queue pairs, tenants beside each other.
    Accel {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
    },
    /// The network between hosts: sockets over it, and its rings.
    Net {
        /// Settings that all areas have.
        #[command(flatten)]
        common: Common,
        /// Where the rack's sockets and state go.
        #[arg(long, default_value = "target/bench/net")]
        dir: PathBuf,
    },
    /// Pairs this build with an earlier one, and fails when a case became slower: more than what
    /// runs differ by, at 95 % confidence.
    Against {
        /// The `rackbus-bench` of the earlier build.
        before: PathBuf,
        /// How many pairs of runs.
        #[arg(long, default_value_t = 15)]
        pairs: usize,
        /// Where rows and files of the runs go.
        #[arg(long, default_value = "target/bench/against")]
        dir: PathBuf,
        /// An area and its options, for both: `-- nvme --only qd1 --time 200`.
        #[arg(last = true, required = true)]
        arguments: Vec<String>,
    },
    /// Serves a drive until standard input ends (used by the measurements).
    #[command(hide = true)]
    Lender {
        /// Where to serve it.
        #[arg(long)]
        socket: PathBuf,
        /// What is behind it.
        #[arg(long, default_value = "memory")]
        backing: BackingKind,
        /// A file or block device behind it.
        #[arg(long)]
        file: Option<PathBuf>,
    },
    /// Opens a drive and prints the microseconds of a lone 4 KiB read (used by the measurements).
    #[command(hide = true)]
    Reader {
        /// Where it is served.
        #[arg(long)]
        socket: PathBuf,
        /// For how many milliseconds to measure.
        #[arg(long)]
        time: u64,
    },
    /// The other side of the raw bound (used by the measurements).
    #[command(hide = true)]
    RawServer {
        /// Answer reads and writes without moving data.
        #[arg(long)]
        null: bool,
    },
}

/// How to measure, whatever it is.
#[derive(Debug, Clone, Args)]
pub struct Common {
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
}

impl Common {
    fn regime(&self) -> Result<Regime, BenchError> {
        if self.low_latency {
            Regime::low_latency().map_err(BenchError::io("/dev/cpu_dma_latency"))
        } else {
            Ok(Regime::default_idle())
        }
    }

    /// What each area begins with; rows go to the results, and are printed as JSON with `json`.
    fn begin(self, json: bool) -> Result<AreaRun, BenchError> {
        let (regime, report) = (self.regime()?, Report::new(Some(&self.results), json)?);
        let (time, patience) =
            (Duration::from_millis(self.time), Duration::from_secs(self.patience));
        Ok(AreaRun { regime, report, runs: self.runs, time, only: self.only, patience })
    }
}

/// What each area begins with.
struct AreaRun {
    regime: Regime,
    report: Report,
    runs: usize,
    time: Duration,
    only: String,
    patience: Duration,
}

/// Backings that need no file.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum BackingKind {
    /// Memory of the lender.
    Memory,
    /// A backing that keeps no data.
    Null,
}

/// Runs `command`. `prefix` is what this program has before it on its command line, to start
/// itself again as one of the processes that are measured. With `json` the rows are printed as JSON.
///
/// # Errors
/// [`BenchError`].
pub fn run(command: BenchCommand, prefix: &[&str], json: bool) -> Result<(), BenchError> {
    let again =
        || RestartCommand { prefix: prefix.iter().map(|word| (*word).to_owned()).collect() };
    match command {
        BenchCommand::Nvme { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = nvme::Settings { runs, time, dir, only, patience, again: again() };
            nvme::run(&settings, &regime, &mut report)
        }
        BenchCommand::Lending { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = nvme::Settings { runs, time, dir, only, patience, again: again() };
            lending::run(&settings, &regime, &mut report)?;
            borrowed::run(&settings, &regime, &mut report)?;
            sharing::run(&settings, &regime, &mut report)?;
            hot_add::run(&settings, &regime, &mut report)
        }
        BenchCommand::Machines { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = machines::Settings { runs, time, dir, only, patience };
            machines::run(&settings, &regime, &mut report)
        }
        BenchCommand::Memory { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = memory::Settings { runs, time, dir, only, patience };
            memory::run(&settings, &regime, &mut report)
        }
        #[cfg(feature = "guests")]
        BenchCommand::Guests { common, dir, cycles } => {
            let AreaRun { regime, mut report, runs, only, patience, .. } = common.begin(json)?;
            let settings = crate::guests::Settings { runs, dir, only, patience, cycles };
            crate::guests::run(&settings, &regime, &mut report)
        }
        #[cfg(feature = "guests")]
        BenchCommand::Metal { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = crate::metal::Settings { runs, time, dir, only, patience };
            crate::metal::run(&settings, &regime, &mut report)
        }
        BenchCommand::Model { common } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            model::run(&model::Settings { runs, time, only, patience }, &regime, &mut report)
        }
        BenchCommand::Datapath { common } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = datapath::Settings { runs, time, only, patience, again: again() };
            datapath::run(&settings, &regime, &mut report)
        }
        BenchCommand::Accel { common } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = accel::Settings { runs, time, only, patience, again: again() };
            accel::run(&settings, &regime, &mut report)
        }
        BenchCommand::Net { common, dir } => {
            let AreaRun { regime, mut report, runs, time, only, patience } = common.begin(json)?;
            let settings = network::Settings { runs, time, dir, only, patience };
            network::run(&settings, &regime, &mut report)
        }
        BenchCommand::Against { before, pairs, dir, arguments } => {
            against::run(&against::Settings { before, arguments, pairs, dir })?.check()
        }
        BenchCommand::Lender { socket, backing, file } => {
            let backing = match (file, backing) {
                (Some(path), _) => BackingConfig::File(path),
                (None, BackingKind::Memory) => BackingConfig::Memory,
                (None, BackingKind::Null) => BackingConfig::Null,
            };
            lend(backing, &socket)
        }
        BenchCommand::Reader { socket, time } => {
            nvme::read_once(&socket, Duration::from_millis(time))
        }
        BenchCommand::RawServer { null } => serve_raw(null),
    }
}
