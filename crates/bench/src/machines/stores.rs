//! How soon what a program stores to memory of another machine is seen by one that polls there, where nobody flushes. Both
//! programs are threads of this process; the nodes between them are processes that share nothing.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rackbus_attach::{LocalSegment, Mapping, RemoteSegment, SegmentOptions, Session};

use super::failed;
use super::network::{Desk, RackMachine, free_address};
use crate::BenchError;
use crate::rack::{BenchRack, scrape};
use crate::report::median;

/// The rack: two hosts with memory. What is copied at once is at most a quarter of that.
const RACK: &str =
    "name = \"stores\"\n[hosts.alpha]\nmemory = \"1 GiB\"\n[hosts.beta]\nmemory = \"1 GiB\"\n";
/// Bytes of a segment.
const BYTES: u64 = 4096;
/// How long nodes may take until they are there and reach each other.
const PATIENCE: Duration = Duration::from_secs(30);
/// Round trips of a run at least, however long they take.
const LEAST: usize = 8;

/// A segment as its owner has it, and as the other machine does.
struct FarSegment {
    local: Mapping,
    remote: Mapping,
    _segment: LocalSegment,
    _connection: RemoteSegment,
}

/// Two machines with memory, and a program on each.
pub(super) struct FarPrograms {
    pub(super) on_alpha: Session,
    pub(super) on_beta: Session,
    machines: [RackMachine; 2],
    _desk: Desk,
}

impl FarPrograms {
    /// Starts the machines in `dir`; `None` where there is no `rackbus`.
    ///
    /// # Errors
    /// When they do not come up.
    pub(super) fn start(dir: &Path) -> Result<Option<FarPrograms>, BenchError> {
        FarPrograms::start_with(dir, "")
    }

    /// The same of a rack file that has `more` as well.
    ///
    /// # Errors
    /// When they do not come up.
    pub(super) fn start_with(dir: &Path, more: &str) -> Result<Option<FarPrograms>, BenchError> {
        let Some(program) = BenchRack::find() else { return Ok(None) };
        let desk = Desk::start(&program, dir, &format!("{RACK}{more}"))?;
        let alpha = desk.join("alpha", &free_address()?, &[])?;
        let beta = desk.join("beta", &free_address()?, &[])?;
        let [on_alpha, on_beta] = [(&alpha, "alpha"), (&beta, "beta")]
            .map(|(machine, host)| again(|| Session::open(&machine.location(host))));
        let (on_alpha, on_beta, machines) = (on_alpha?, on_beta?, [alpha, beta]);
        Ok(Some(FarPrograms { on_alpha, on_beta, machines, _desk: desk }))
    }

    /// Bytes that beta's program has copied to alpha by an RDMA lane, as its node counts them.
    ///
    /// # Errors
    /// When the node's metrics cannot be read.
    pub(super) fn copied_by_lane(&self) -> Result<u64, BenchError> {
        let socket = self.machines[1].location("beta").run_dir.join("beta/metrics.sock");
        let page = scrape(&socket).map_err(BenchError::io("asking for metrics"))?;
        let mut lines = page.lines().filter(|line| {
            line.starts_with("rackbus_copied_to_machines_bytes_total{") && line.contains("lane")
        });
        let count = lines.next().and_then(|line| line.rsplit(' ').next()?.parse().ok());
        count.ok_or_else(|| failed("the node counts no copies by a lane"))
    }
}

/// Two machines, each with a segment that the other one has mapped.
pub(super) struct FarMemory {
    on_alpha: FarSegment,
    on_beta: FarSegment,
    last: u64,
    _programs: FarPrograms,
}

impl FarMemory {
    /// Starts the machines in `dir`; `None` where there is no `rackbus`.
    ///
    /// # Errors
    /// When they do not come up.
    pub(super) fn start(dir: &Path) -> Result<Option<FarMemory>, BenchError> {
        let Some(programs) = FarPrograms::start(dir)? else { return Ok(None) };
        let (on, with) = (&programs.on_alpha, &programs.on_beta);
        let (on_alpha, on_beta) = (far_segment(on, with)?, far_segment(with, on)?);
        Ok(Some(FarMemory { on_alpha, on_beta, last: 0, _programs: programs }))
    }

    /// Half of a round trip in microseconds, the median: a number that one thread stores, and one that the other stores when
    /// it has seen it. Before each, for `pause`, nothing is stored.
    ///
    /// # Errors
    /// When a thread panics.
    pub(super) fn one_way(&mut self, pause: Duration, time: Duration) -> Result<f64, BenchError> {
        let (there, back, over) = (&self.on_alpha, &self.on_beta, AtomicBool::new(false));
        let (first, mut trips) = (self.last + 1, Vec::new());
        let mut number = self.last;
        std::thread::scope(|scope| {
            let answers = scope.spawn(|| {
                for number in first.. {
                    await_number(&there.local, number);
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    store(&back.remote, number);
                }
            });
            let begun = Instant::now();
            while trips.len() < LEAST || begun.elapsed() < time {
                std::thread::sleep(pause);
                let sent = Instant::now();
                number += 1;
                store(&there.remote, number);
                await_number(&back.local, number);
                trips.push(sent.elapsed().as_secs_f64() * 1e6 / 2.0);
            }
            over.store(true, Ordering::Release);
            number += 1;
            store(&there.remote, number);
            answers.join().map_err(|_| BenchError::Peer("a thread panicked".into()))
        })?;
        self.last = number;
        Ok(median(&trips))
    }
}

fn store(to: &Mapping, number: u64) {
    to.whole().store_u64(0, number, Ordering::Release);
}

/// Waits until a number is there. Programs that poll let others run: with two processors and four threads the figure is the
/// scheduler's otherwise.
fn await_number(from: &Mapping, number: u64) {
    while from.whole().load_u64(0, Ordering::Acquire) != Some(number) {
        std::thread::yield_now();
    }
}

/// A segment of one program, mapped by the other.
fn far_segment(owner: &Session, user: &Session) -> Result<FarSegment, BenchError> {
    let segment = owner.create_segment(&SegmentOptions::shared(1, BYTES))?;
    segment.set_available()?;
    let local = segment.map(0, BYTES)?;
    let connection = again(|| user.connect(owner.node(), segment.id(), 1_000))?;
    let remote = connection.map(0, BYTES)?;
    Ok(FarSegment { local, remote, _segment: segment, _connection: connection })
}

/// Tries until it succeeds.
pub(super) fn again<T, E: std::fmt::Display>(
    attempt: impl Fn() -> Result<T, E>,
) -> Result<T, BenchError> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(error) if begun.elapsed() > PATIENCE => return Err(failed(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
