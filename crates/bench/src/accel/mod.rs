//! Accelerators: what a queue pair adds to the libraries, how many operations it carries, and what tenants get of
//! each other.
//!
//! The function's front runs in the thread of the program that asks, the engine on a thread of its own: as many
//! processors as the libraries, called directly, and a peer's server have. Between the two are the rings and the
//! memory that there are with a lender in another process, too.

mod direct;
mod dpdk;
mod fair;
mod inline;
mod queue;
mod server;

use std::time::Duration;

use rackbus_qos::Shaping;
use rackbus_spec::accel::Operation;

use crate::machine::{CLIENT_CPU, Regime, RestartCommand, SERVER_CPU, pin, unpin, wait_quiet};
use crate::nvme::ClientLoad;
use crate::report::Case;
use crate::{BenchError, Report, raw};
use direct::Direct;
use queue::LoadedQueuePair;

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
    /// How to start the other processes.
    pub again: RestartCommand,
}

/// What is measured at 64 KiB: each engine that takes any message.
const ENGINES: [Operation; 11] = [
    Operation::Copy,
    Operation::Aes256Ctr,
    Operation::Aes256GcmSeal,
    Operation::Sha256,
    Operation::Sha3_512,
    Operation::Blake3,
    Operation::Deflate,
    Operation::ZstdCompress,
    Operation::Lz4Compress,
    Operation::Crc32c,
    Operation::RegexScan,
];
/// What reverses another one, of what that made of 64 KiB.
const REVERSED: [Operation; 4] = [
    Operation::Aes256GcmOpen,
    Operation::Inflate,
    Operation::ZstdDecompress,
    Operation::Lz4Decompress,
];
/// The operations of the chain, and of the three calls that it is compared with.
const CHAIN: [Operation; 3] = [Operation::Lz4Compress, Operation::Aes256Ctr, Operation::Blake3];

const SMALL: usize = 64;
const PAGE: usize = 4096;
const LARGE: usize = 64 << 10;
/// Descriptors under way where throughput is measured.
const DEPTH: u16 = 32;

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let mut bench = Bench { settings, report };
    bench.engines()?;
    bench.small()?;
    bench.pages()?;
    bench.chains()?;
    bench.inline()?;
    bench.tenants()
}

/// What the cases share.
struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
}

impl Bench<'_> {
    fn wanted(&self, case: &str) -> bool {
        case.contains(&self.settings.only)
    }

    /// Measures two figures in turns and adds the row, unless it is not wanted.
    fn pairs(
        &mut self,
        case: &str,
        peer_name: &str,
        unit: &'static str,
        ours: impl FnMut() -> Result<f64, BenchError>,
        peer: impl FnMut() -> Result<f64, BenchError>,
    ) -> Result<(), BenchError> {
        if !self.wanted(case) {
            return Ok(());
        }
        let relate = if unit.ends_with("added") { |a, b| a - b } else { |a: f64, b: f64| a / b };
        let case = Case { area: "accel", case, peer_name, unit, runs: self.settings.runs };
        self.report.compare(case, ours, peer, relate)
    }

    /// Each engine through a queue pair, and the same library called directly.
    fn engines(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        for operation in ENGINES.into_iter().chain(REVERSED) {
            let case = format!("{} 64 KiB", operation.name());
            if !self.wanted(&case) {
                continue;
            }
            let message = direct::message(operation, LARGE);
            // A scan puts out more than it reads where much of that matches.
            let room = if operation == Operation::RegexScan { 8 * LARGE } else { 2 * LARGE };
            let mut queue = LoadedQueuePair::new(&[operation], &message, room, DEPTH)?;
            let mut direct = Direct::new(operation, room, DEPTH.into())?;
            let messages = vec![message.clone(); DEPTH.into()];
            let gigabytes = message.len() as f64 / 1e9;
            self.pairs(
                &case,
                "the library, called directly",
                "GB/s",
                || {
                    pin(CLIENT_CPU);
                    Ok(queue.rate(time)? * gigabytes)
                },
                || {
                    pin(SERVER_CPU);
                    Ok(direct.rate(time, &messages) * gigabytes)
                },
            )?;
            unpin();
        }
        Ok(())
    }

    /// What a queue pair costs where the operation costs nothing.
    fn small(&mut self) -> Result<(), BenchError> {
        let (time, again) = (self.settings.time, self.settings.again.clone());
        let message = vec![7; SMALL];
        let operation = Operation::Crc32c;
        let case = "crc32c 64 B, one at a time";
        if self.wanted(case) {
            let mut queue = LoadedQueuePair::new(&[operation], &message, SMALL, 1)?;
            let mut direct = Direct::new(operation, SMALL, 1)?;
            self.pairs(
                case,
                "the library, called directly",
                "us added",
                || {
                    pin(CLIENT_CPU);
                    Ok(1e6 / queue.rate(time)?)
                },
                || {
                    pin(SERVER_CPU);
                    Ok(1e6 / direct.rate(time, std::slice::from_ref(&message)))
                },
            )?;
            unpin();
        }
        let case = "crc32c 64 B, 32 under way";
        if self.wanted(case) {
            let mut queue = LoadedQueuePair::new(&[operation], &message, SMALL, DEPTH)?;
            let load = ClientLoad { bytes: PAGE, depth: DEPTH, write: false, random: false };
            self.pairs(
                case,
                "a ring in shared memory",
                "kop/s",
                || {
                    pin(CLIENT_CPU);
                    Ok(queue.rate(time)? / 1e3)
                },
                || Ok(raw::run(&again, &load, true, time)? / 1e3),
            )?;
            unpin();
        }
        Ok(())
    }

    /// 4 KiB at a time, against a server that does the same, and DPDK's drivers.
    fn pages(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let message = direct::message(Operation::Aes256Ctr, PAGE);
        let case = "aes256ctr 4 KiB, 32 under way";
        if self.wanted(case) {
            let mut queue = LoadedQueuePair::new(&[Operation::Aes256Ctr], &message, PAGE, DEPTH)?;
            let mut server = server::UringServer::start(PAGE, DEPTH.into())?;
            self.pairs(
                case,
                "an offload server, UNIX sockets and io_uring",
                "kop/s",
                || {
                    pin(CLIENT_CPU);
                    Ok(queue.rate(time)? / 1e3)
                },
                || {
                    pin(CLIENT_CPU);
                    Ok(server.rate(time)? / 1e3)
                },
            )?;
            unpin();
        }
        for driver in dpdk::DRIVERS {
            let case = format!("aes256gcm 4 KiB, against {}", driver.name);
            if !self.wanted(&case) {
                continue;
            }
            if let Err(why) = driver.check() {
                self.report.left_out(&case, &why);
                continue;
            }
            let operation = Operation::Aes256GcmSeal;
            let mut queue = LoadedQueuePair::new(&[operation], &message, PAGE + 64, DEPTH)?;
            self.pairs(
                &case,
                &format!("dpdk-test-crypto-perf, {}", driver.name),
                "kop/s",
                || {
                    pin(CLIENT_CPU);
                    let rate = queue.rate(time);
                    unpin();
                    Ok(rate? / 1e3)
                },
                || Ok(driver.rate(PAGE, time)? / 1e3),
            )?;
        }
        Ok(())
    }

    /// A pipeline in one descriptor, and the same in three that wait for each other: of many messages at a time, and of one,
    /// where the program has nothing else to do until each of the three has ended.
    fn chains(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        for (case, depth) in [
            ("lz4+aes256ctr+blake3 4 KiB", DEPTH),
            ("lz4+aes256ctr+blake3 4 KiB, one at a time", 1),
        ] {
            if !self.wanted(case) {
                continue;
            }
            let message = direct::message(CHAIN[0], PAGE);
            let mut chained = LoadedQueuePair::new(&CHAIN, &message, PAGE, depth)?;
            let mut calls = LoadedQueuePair::calls(&CHAIN, &message, 2 * PAGE, depth)?;
            pin(CLIENT_CPU);
            let compared = self.pairs(
                case,
                "three operations, one after the other",
                "kop/s",
                || Ok(chained.rate(time)? / 1e3),
                || Ok(calls.rate(time)? / 1e3),
            );
            unpin();
            compared?;
        }
        Ok(())
    }

    /// Data of a drive: with several reads in flight against one, and against a program that reads and calls the library.
    fn inline(&mut self) -> Result<(), BenchError> {
        let case = "crc32c of a drive, 64 KiB at a time";
        if !self.wanted(case) {
            return Ok(());
        }
        let time = self.settings.time;
        let mut ahead = inline::InlineSource::new(true)?;
        let mut single = inline::InlineSource::new(false)?;
        self.pairs(case, "one read in flight", "GB/s", || ahead.rate(time), || single.rate(time))?;
        let mut library = inline::LibraryReader::new()?;
        let peer = "reads of the drive, and the library called by the program";
        self.pairs(case, peer, "GB/s", || ahead.rate(time), || library.rate(time))
    }

    /// Tenants beside each other on one engine.
    fn tenants(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        for (name, messages) in fair::pairs() {
            let case = format!("engine time of two tenants: {name}");
            if !self.wanted(&case) {
                continue;
            }
            self.pairs(
                &case,
                "unshaped",
                "ratio",
                || fair::ratio(&messages, Shaping::On, time),
                || fair::ratio(&messages, Shaping::Off, time),
            )?;
        }
        let case = "two equal tenants, all operations";
        if self.wanted(case) {
            self.pairs(
                case,
                "unshaped",
                "kop/s",
                || fair::both(Shaping::On, time),
                || fair::both(Shaping::Off, time),
            )?;
        }
        // Ten seconds, where a run takes the usual time.
        let long = time * 25;
        let case = "a minimum beside a flood";
        self.pairs(case, "what was promised", "MB/s", || fair::minimum(long), || Ok(fair::PROMISED))
    }
}
