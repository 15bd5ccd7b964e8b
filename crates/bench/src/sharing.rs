//! Time-sharing: eight programs take turns on one drive. How equally its operations fall to them, hand-over included
//! (Jain's index), and how long a hand-over takes, against one that is done by hand: return, and borrow for the next.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::lent;
use crate::machine::Regime;
use crate::nvme::Settings;
use crate::rack::BenchRack;
use crate::raw::STORE;
use crate::report::Case;
use crate::{BenchError, Report};

/// Programs that take turns.
const PROGRAMS: usize = 8;
/// Turns of each that are measured.
const ROUNDS: u64 = 4;
/// Bytes of an operation.
const BLOCK: usize = 4096;
/// Data that a program has for its drive.
const DATA: usize = 1 << 20;

/// A rack in which eight hosts can borrow alpha's drive.
fn rack_file() -> String {
    let drive = format!("kind = \"nvme\"\nsize = \"{} MiB\"\nbacking = \"memory\"\n", STORE >> 20);
    let hosts: String = (0..PROGRAMS).map(|host| format!("[hosts.host{host}]\n")).collect();
    format!("name = \"bench\"\n[hosts.alpha.devices.nvme0]\n{drive}{hosts}")
}

/// A program that takes turns: it reads whenever it has the drive, and releases it when it is told to.
struct Program {
    share: u64,
    follower: Child,
    following: Option<JoinHandle<()>>,
    reads: Arc<AtomicU64>,
}

impl Program {
    fn start(rack: &BenchRack, host: usize, slice: Duration) -> Result<Program, BenchError> {
        let (host, slice) = (format!("host{host}"), format!("{}ms", slice.as_millis()));
        let joined =
            rack.json(&["share", "join", "alpha/nvme0", "--for", &host, "--slice", &slice])?;
        let unknown = || BenchError::Peer(format!("rackbus share join gave no number: {joined}"));
        let share = joined["share"].as_u64().ok_or_else(unknown)?;
        let mut follower = rack.follow(&["share", "follow", &share.to_string(), "--json"])?;
        let lines = follower.stdout.take();
        let reads = Arc::new(AtomicU64::new(0));
        let counted = reads.clone();
        let following = std::thread::spawn(move || follow(lines.map(BufReader::new), &counted));
        Ok(Program { share, follower, following: Some(following), reads })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It has ended where the share was left.
        let _ = self.follower.kill();
        let _ = self.follower.wait();
        if let Some(following) = self.following.take() {
            let _ = following.join();
        }
    }
}

/// Reads in each turn that the lines tell of, until they end.
fn follow(lines: Option<impl BufRead>, reads: &Arc<AtomicU64>) {
    let mut turn: Option<(Arc<AtomicBool>, JoinHandle<()>)> = None;
    for line in lines.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
        let stands: Value = serde_json::from_str(&line).unwrap_or_default();
        if let Some((over, reading)) = turn.take() {
            over.store(true, Ordering::Release);
            let _ = reading.join();
        }
        if let (Some("turn"), Some(socket)) = (stands["state"].as_str(), stands["socket"].as_str())
        {
            let (over, socket, reads) =
                (Arc::new(AtomicBool::new(false)), socket.to_owned(), reads.clone());
            let until = over.clone();
            turn = Some((over, std::thread::spawn(move || read(&socket, &until, &reads))));
        }
    }
    if let Some((over, reading)) = turn {
        over.store(true, Ordering::Release);
        let _ = reading.join();
    }
}

/// Reads until the turn is over. A drive that fails ends the turn.
fn read(socket: &str, over: &AtomicBool, reads: &AtomicU64) {
    let Ok(mut drive) = lent::open(socket.as_ref(), DATA) else { return };
    let mut block = vec![0; BLOCK];
    while !over.load(Ordering::Acquire) && drive.read(0, &mut block).is_ok() {
        reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// The sum of what the shares say of themselves under `key`.
fn sum(shares: &Value, key: &str) -> u64 {
    shares.as_array().into_iter().flatten().filter_map(|share| share[key].as_u64()).sum()
}

/// Jain's index of what the programs read, and milliseconds that a hand-over took.
fn take_turns(rack: &BenchRack, slice: Duration) -> Result<(f64, f64), BenchError> {
    let programs: Result<Vec<Program>, BenchError> =
        (0..PROGRAMS).map(|host| Program::start(rack, host, slice)).collect();
    let programs = programs?;
    let list = || rack.json(&["share", "list"]);
    let least = |shares: &Value| {
        let turns = |share: &Value| share["turns"].as_u64();
        shares.as_array().into_iter().flatten().filter_map(turns).min().unwrap_or(0)
    };
    // From where each has had a turn: the first had the drive while others joined.
    let mut before = list()?;
    while least(&before) < 1 {
        std::thread::sleep(slice / 4);
        before = list()?;
    }
    let reads = || programs.iter().map(|program| program.reads.load(Ordering::Relaxed));
    let begun: Vec<u64> = reads().collect();
    let until = sum(&before, "turns") + ROUNDS * PROGRAMS as u64;
    let mut after = list()?;
    while sum(&after, "turns") < until {
        std::thread::sleep(slice / 50);
        after = list()?;
    }
    let done: Vec<f64> = reads().zip(begun).map(|(now, then)| (now - then) as f64).collect();
    for program in &programs {
        rack.json(&["share", "leave", &program.share.to_string()])?;
    }
    drop(programs);
    while rack.json(&["devices"])?[0]["state"] != "offered" {}
    let all: f64 = done.iter().sum();
    let squares: f64 = done.iter().map(|count| count * count).sum();
    let of = |key| (sum(&after, key) - sum(&before, key)) as f64;
    Ok((all * all / (done.len() as f64 * squares), of("handover_ms") / of("handovers")))
}

/// Milliseconds from the request to return the drive until the next one can use it, by two commands.
fn by_hand(rack: &BenchRack) -> Result<f64, BenchError> {
    let lease = rack.borrow_for("host0", &["alpha/nvme0"])?;
    let begun = Instant::now();
    rack.give_back(&lease)?;
    let next = rack.borrow_for("host1", &["alpha/nvme0"])?;
    let time = begun.elapsed();
    rack.give_back(&next)?;
    Ok(time.as_secs_f64() * 1e3)
}

/// Runs both cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    let cases = ["time-sharing, 8 programs, Jain index", "time-sharing, hand-over"];
    if !cases.iter().any(|case| case.contains(&settings.only)) {
        return Ok(());
    }
    report.note(&format!("time-sharing: regime {}", regime.name()));
    let Some(rack) = BenchRack::start(&settings.dir, &rack_file())? else {
        report.left_out("lending", "the rackbus binary is not beside this one");
        return Ok(());
    };
    let slice = settings.time.clamp(Duration::from_millis(200), Duration::from_secs(1));
    let mut handovers = Vec::new();
    let case = |case, peer_name, unit| Case {
        area: "lending",
        case,
        peer_name,
        unit,
        runs: settings.runs,
    };
    let turns = || {
        let (jain, handover) = take_turns(&rack, slice)?;
        handovers.push(handover);
        Ok(jain)
    };
    report.compare(
        case(cases[0], "equal parts", "index"),
        turns,
        || Ok(1.0),
        |ours, peer| ours / peer,
    )?;
    let mut measured = handovers.into_iter();
    let ours = || Ok(measured.next().unwrap_or(f64::NAN));
    let hand = || by_hand(&rack);
    report.compare(case(cases[1], "return and borrow, by hand", "ms"), ours, hand, |ours, peer| {
        ours / peer
    })
}
