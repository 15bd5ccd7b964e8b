//! Memory that virtual machines share: what segments, interrupts and mapping cost a stock guest.
//!
//! The programs are the public tools and those of the end-to-end tests, the same binaries in guests and on
//! hosts. Under TCG, QEMU's translator, a guest's instructions are some ten times slower than a processor's:
//! what is compared with the guest's own memory says what the device adds, and what is compared with hosts says
//! mostly what TCG costs. So each case's name says under what the guests ran.

mod system;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::machine::{Regime, wait_quiet};
use crate::report::{Case, ResultRow, median};
use crate::{BenchError, Report};
use system::{MeasuredGuests, ProgramPlace};

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// Where the rack's sockets and state go.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
    /// How often a segment is mapped and given back, to see whether that becomes slower.
    pub cycles: u32,
}

/// Segments that are mapped meanwhile.
const LIVE: u32 = 100;

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself or a guest fails; without QEMU the area is left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    std::fs::create_dir_all(&settings.dir).map_err(BenchError::io("making the work directory"))?;
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let system = match MeasuredGuests::start(&settings.dir) {
        Ok(system) => system,
        Err(error) => {
            report.left_out("guests", &error.0);
            return Ok(());
        }
    };
    let mut bench = Bench { settings, report, system };
    bench.bandwidth()?;
    bench.ping_pong()?;
    bench.interrupts()?;
    bench.mapping()?;
    bench.cycles()
}

struct Bench<'a> {
    settings: &'a Settings,
    report: &'a mut Report,
    system: MeasuredGuests,
}

/// A number of a JSON object.
fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

/// The rows that a program printed.
fn rows(printed: &str) -> Vec<Value> {
    printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn last(printed: &str, key: &str) -> f64 {
    rows(printed).last().map_or(f64::NAN, |row| number(row, key))
}

impl From<rackbus_e2e::CheckFailure> for BenchError {
    fn from(failure: rackbus_e2e::CheckFailure) -> BenchError {
        BenchError::Peer(failure.0)
    }
}

impl Bench<'_> {
    /// A case's name, with what the guests run under; `None` when it is not wanted.
    fn named(&self, what: &str) -> Option<String> {
        let name = format!("{what}, {}", self.system.accel);
        name.contains(&self.settings.only).then_some(name)
    }

    /// Stores and loads of a guest in a host's segment, against the guest's own memory.
    fn bandwidth(&mut self) -> Result<(), BenchError> {
        if self.named("PIO").is_none() && self.settings.only != "PIO" {
            return Ok(());
        }
        let runs = self.settings.runs;
        let printed = self.system.pair(
            ProgramPlace::Host("alpha"),
            ProgramPlace::First,
            "pio",
            |id| match id {
                None => "own".to_owned(),
                Some(id) => format!("{id} {runs}"),
            },
        )?;
        for row in rows(&printed) {
            let size = rackbus_fabric::rack::format_size(number(&row, "bytes") as u64);
            let what = row["what"].as_str().unwrap_or_default();
            let Some(case) = self.named(&format!("PIO {what} {size}")) else { continue };
            self.report.add(ResultRow {
                area: "guests",
                case,
                ours: number(&row, "ours"),
                peer: number(&row, "peer"),
                peer_name: "the guest's own memory".to_owned(),
                unit: "MB/s",
                ratio: number(&row, "ratio"),
                runs,
            })?;
        }
        Ok(())
    }

    /// The same tool between guests and hosts, against two hosts.
    fn against_hosts(
        &mut self,
        what: &str,
        tool: &str,
        options: &str,
        sides: (ProgramPlace, ProgramPlace),
    ) -> Result<(), BenchError> {
        let Some(case) = self.named(what) else { return Ok(()) };
        let case = Case {
            area: "guests",
            case: &case,
            peer_name: "two hosts, same programs",
            unit: "us",
            runs: self.settings.runs,
        };
        let system = std::cell::RefCell::new(&mut self.system);
        let measure = |(server, client)| {
            let printed = system.borrow_mut().tool(server, client, tool, options)?;
            Ok(last(&printed, "us"))
        };
        let ours = || measure(sides);
        let peer = || measure((ProgramPlace::Host("alpha"), ProgramPlace::Host("beta")));
        self.report.compare(case, ours, peer, |ours, peer| ours / peer)
    }

    fn ping_pong(&mut self) -> Result<(), BenchError> {
        let options = "-loops 5000 -size 64";
        for (what, sides) in [
            ("ping-pong 64 B, guest and host", (ProgramPlace::Host("beta"), ProgramPlace::First)),
            ("ping-pong 64 B, guest and guest", (ProgramPlace::First, ProgramPlace::Second)),
        ] {
            self.against_hosts(what, "scipp", options, sides)?;
        }
        Ok(())
    }

    /// Interrupts, against hosts and against an eventfd between two processes of the guest.
    fn interrupts(&mut self) -> Result<(), BenchError> {
        let options = "-loops 300";
        for (what, sides) in [
            ("interrupt, guest and host", (ProgramPlace::Host("beta"), ProgramPlace::First)),
            ("interrupt, guest and guest", (ProgramPlace::First, ProgramPlace::Second)),
        ] {
            self.against_hosts(what, "intr_bench", options, sides)?;
        }
        let Some(case) = self.named("interrupt, guest and host, against an eventfd") else {
            return Ok(());
        };
        let case = Case {
            area: "guests",
            case: &case,
            peer_name: "eventfd between processes of the guest",
            unit: "us",
            runs: self.settings.runs,
        };
        let system = std::cell::RefCell::new(&mut self.system);
        let ours = || {
            let sides = (ProgramPlace::Host("beta"), ProgramPlace::First);
            let printed = system.borrow_mut().tool(sides.0, sides.1, "intr_bench", options)?;
            Ok(last(&printed, "us"))
        };
        let peer = || {
            let printed = system.borrow_mut().alone(ProgramPlace::First, "events", "2000")?;
            Ok(last(&printed, "us"))
        };
        self.report.compare(case, ours, peer, |ours, peer| ours / peer)
    }

    /// Connecting, mapping and the first store, against a program on a host.
    fn mapping(&mut self) -> Result<(), BenchError> {
        for (live, name) in [(0, "nothing else mapped"), (LIVE, "100 others mapped")] {
            for (what, key) in [
                ("connect", "connect"),
                ("connect, map and first store", "first"),
                ("unmap and disconnect", "end"),
            ] {
                let Some(case) = self.named(&format!("{what}, {name}")) else { continue };
                let case = Case {
                    area: "guests",
                    case: &case,
                    peer_name: "a host, same program",
                    unit: "us",
                    runs: self.settings.runs.min(5),
                };
                let system = std::cell::RefCell::new(&mut self.system);
                let on = |place| {
                    let printed = system.borrow_mut().mapping(place, 100, live)?;
                    Ok(median(
                        &rows(&printed).iter().map(|row| number(row, key)).collect::<Vec<_>>(),
                    ))
                };
                let (ours, peer) = (|| on(ProgramPlace::First), || on(ProgramPlace::Host("beta")));
                self.report.compare(case, ours, peer, |ours, peer| ours / peer)?;
            }
        }
        Ok(())
    }

    /// Thousands of segments mapped and given back: whether the last ones cost more than the first.
    fn cycles(&mut self) -> Result<(), BenchError> {
        let cycles = self.settings.cycles;
        let what = format!("map and unmap, {cycles} times, {LIVE} others mapped: last tenth");
        let Some(case) = self.named(&what) else { return Ok(()) };
        let printed = self.system.mapping(ProgramPlace::First, cycles, LIVE)?;
        let tenths = rows(&printed);
        let cost = |row: &Value| number(row, "first") + number(row, "end");
        let all: Vec<f64> = tenths.iter().map(cost).collect();
        let course: Vec<String> = all.iter().map(|it| format!("{it:.0}")).collect();
        self.report.note(&format!("each tenth of the cycles: {} us", course.join(", ")));
        let (Some(first), Some(last)) = (all.first(), all.last()) else { return Ok(()) };
        self.report.add(ResultRow {
            area: "guests",
            case,
            ours: *last,
            peer: *first,
            peer_name: "the first tenth".to_owned(),
            unit: "us",
            ratio: last / first,
            runs: 1,
        })
    }
}
