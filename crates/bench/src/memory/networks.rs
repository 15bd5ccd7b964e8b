//! Against libraries that make a network of shared memory: UCX and libfabric, by their own programs,
//! each with one side on each of the two processors.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::messages::{CopiedMessage, Put};
use super::pingpong::one_way;
use super::pio::{batch, writes};
use super::{Bench, size};
use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU};
use crate::peers::{free_port, installed};

/// Bytes of a put.
const PUTS: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Bytes of a message there and back.
const MESSAGES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

/// How long a server may take until it listens.
const PATIENCE: Duration = Duration::from_secs(5);

/// What UCX's clock resolves well enough, in microseconds.
const RESOLVED: f64 = 0.2;

impl Bench<'_> {
    pub(super) fn networks(&mut self) -> Result<(), BenchError> {
        match installed("ucx_perftest") {
            true => {
                self.ucx_store()?;
                self.ucx()?;
            }
            false => self.report.left_out("UCX", "ucx_perftest is not installed"),
        }
        match installed("fi_pingpong") {
            true => self.libfabric()?,
            false => self.report.left_out("libfabric", "fi_pingpong is not installed"),
        }
        Ok(())
    }

    /// Puts of a program's own memory into the other host's.
    fn ucx(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let segment = self.hosts.on_alpha(PUTS[PUTS.len() - 1])?;
        let data = vec![3; PUTS[PUTS.len() - 1]];
        for bytes in PUTS {
            let gb = bytes as f64 / 1e9;
            for (way, arguments) in [
                ("UCX posix", ["-d", "memory", "-x", "posix", "-D", "bcopy"]),
                ("UCX cma", ["-d", "memory", "-x", "cma", "-D", "zcopy"]),
            ] {
                let case = format!("put {}", size(bytes));
                self.pairs(
                    (&case, way, "GB/s"),
                    || Ok(gb / writes(&segment.remote, &data[..bytes], time, batch(bytes))?),
                    || Ok(gb / (ucx("put_bw", bytes, &arguments, time)? / 1e6)),
                )?;
            }
        }
        Ok(())
    }

    /// A store that the other program sees.
    fn ucx_store(&mut self) -> Result<(), BenchError> {
        let (time, case) = (self.settings.time, "put 8 B, one way");
        if !self.wanted(case) {
            return Ok(());
        }
        let (on_alpha, on_beta) = (self.hosts.on_alpha(8)?, self.hosts.on_beta(8)?);
        self.pairs(
            (case, "UCX posix", "ns"),
            || {
                let mut near = Put::new(&on_alpha.remote, &on_beta.local, 0)?;
                let mut far = Put::new(&on_beta.remote, &on_alpha.local, 0)?;
                one_way(&mut near, &mut far, time)
            },
            || Ok(ucx("put_lat", 8, &["-d", "memory", "-x", "posix", "-D", "short"], time)? * 1e3),
        )
    }

    /// Messages there and back, compared like with like: both receivers touch all data, ours by
    /// copying it out and libfabric's by checking it; or neither does.
    fn libfabric(&mut self) -> Result<(), BenchError> {
        let time = self.settings.time;
        let each = MESSAGES.into_iter().flat_map(|bytes| [(bytes, true), (bytes, false)]);
        for (bytes, touched) in each {
            let data = if touched { "data touched" } else { "data left" };
            let case = format!("ping-pong {}, {data}, one way", size(bytes));
            if !self.wanted(&case) {
                continue;
            }
            let (on_alpha, on_beta) = (self.hosts.on_alpha(bytes)?, self.hosts.on_beta(bytes)?);
            let mut near = CopiedMessage::new(&on_alpha.remote, &on_beta.local, 0, bytes)?;
            let mut far = CopiedMessage::new(&on_beta.remote, &on_alpha.local, 0, bytes)?;
            if !touched {
                (near, far) = (near.leaving_data(), far.leaving_data());
            }
            self.pairs(
                (&case, "libfabric shm", "us"),
                || Ok(one_way(&mut near, &mut far, time)? / 1e3),
                || libfabric(bytes, time, touched),
            )?;
        }
        Ok(())
    }
}

/// Repetitions of what moves `bytes` that take about `time`, if 10 GB are moved in a second.
fn repetitions(bytes: usize, time: Duration) -> String {
    let each = (bytes as f64 / 10e9).max(0.2e-6);
    ((time.as_secs_f64() / each) as u64).max(20).to_string()
}

/// Microseconds of one operation of UCX's: its own median, or its mean where the clock is too
/// coarse for that. `arguments` say by which device and way.
///
/// # Errors
/// When its program fails, or gives no figures.
pub(crate) fn ucx(
    test: &str,
    bytes: usize,
    arguments: &[&str],
    time: Duration,
) -> Result<f64, BenchError> {
    let (port, bytes, count) = (free_port()?, bytes.to_string(), repetitions(bytes, time));
    let common = ["-p", &port, "-t", test, "-s", &bytes, "-n", &count];
    let common = [&common, arguments].concat();
    let text = both("ucx_perftest", &common, &["-f", "-v", "127.0.0.1"])?;
    // iterations, median, mean of the last interval, mean of all, …
    let figures = text.lines().rev().find_map(|line| {
        let mut fields = line.split(',').map(|field| field.trim().parse::<f64>());
        let (_, median, mean) = (fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?);
        Some(if median >= RESOLVED { median } else { mean })
    });
    figures.ok_or_else(|| BenchError::Peer(format!("ucx_perftest gave no figures: {text}")))
}

/// Microseconds of a message of libfabric's one way; `touched`: its data is checked.
fn libfabric(bytes: usize, time: Duration, touched: bool) -> Result<f64, BenchError> {
    let (port, bytes, count) = (free_port()?, bytes.to_string(), repetitions(bytes, time));
    let check: &[&str] = if touched { &["-c"] } else { &[] };
    let common = [&["-p", "shm", "-e", "rdm", "-I", &count, "-S", &bytes][..], check].concat();
    let server = [&common[..], &["-B", &port]].concat();
    let client = [&common[..], &["-P", &port, "127.0.0.1"]].concat();
    let text = sides("fi_pingpong", &server, &client)?;
    // bytes, sent, acknowledged, total, time, MB/s, us for each, M for each second
    let figure = text.lines().last().and_then(|line| line.split_whitespace().nth(6)?.parse().ok());
    figure.ok_or_else(|| BenchError::Peer(format!("fi_pingpong gave no figures: {text}")))
}

/// Both sides of a program that take the same arguments; the client's output.
fn both(program: &str, common: &[&str], client: &[&str]) -> Result<String, BenchError> {
    sides(program, common, &[common, client].concat())
}

/// Both sides of a program; the client's output.
fn sides(program: &str, server: &[&str], client: &[&str]) -> Result<String, BenchError> {
    let mut server = Side::start(program, SERVER_CPU, server)?;
    let begun = Instant::now();
    loop {
        let mut side = Side::start(program, CLIENT_CPU, client)?;
        let (text, done) = side.finish()?;
        if done {
            return Ok(text);
        }
        // Nobody listens yet, or the test failed.
        let over = server.0.try_wait().map_err(BenchError::io(program))?.is_some();
        if over || begun.elapsed() > PATIENCE {
            return Err(BenchError::Peer(format!("{program} failed: {text}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One side, ended when dropped.
struct Side(Child);

impl Side {
    fn start(program: &str, cpu: usize, arguments: &[&str]) -> Result<Side, BenchError> {
        let mut command = Command::new("taskset");
        command.args(["-c", &cpu.to_string(), program]).args(arguments);
        command.env("UCX_LOG_LEVEL", "error");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Side(command.spawn().map_err(BenchError::io(format!("starting {program}")))?))
    }

    /// What it said until it ended, and whether it ended well.
    fn finish(&mut self) -> Result<(String, bool), BenchError> {
        let mut text = String::new();
        if let Some(mut out) = self.0.stdout.take() {
            out.read_to_string(&mut text).map_err(BenchError::io("reading a peer's figures"))?;
        }
        let status = self.0.wait().map_err(BenchError::io("waiting for a peer"))?;
        Ok((text, status.success()))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
