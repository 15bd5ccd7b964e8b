//! A drive on bare metal: borrowed through an NTB by another host's own kernel, against one like it that its host's own
//! kernel drives.
//!
//! Hosts are machines with stock kernels, the NTB is `rackbus ntb`, drives are QEMU's. Under TCG, QEMU's translator,
//! times are those of translated processors, so only ratios mean something, and only of what both sides do alike: both
//! kernels and both fio are the same, both drives' DMA passes the lender's emulated IOMMU. What the bridge adds on real
//! hardware is the timing model's to say; its answers are printed beside the rows.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use rackbus_e2e::rack::beside;
use rackbus_model::reproduce;
use rackbus_vm::metal::{BareMetalRack, BareMetalSpec};
use rackbus_vm::{Assets, GuestRelease, VmError};
use serde_json::Value;

use crate::machine::{Regime, wait_quiet};
use crate::report::{Case, ResultRow, median};
use crate::{BenchError, Report};

/// How long and how often the cases of this area are measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Pairs of runs for each case.
    pub runs: usize,
    /// How long each run takes.
    pub time: Duration,
    /// Where the machines' files go.
    pub dir: PathBuf,
    /// Only cases whose name contains this.
    pub only: String,
    /// How long to wait for the machine to become quiet.
    pub patience: Duration,
}

/// The lender and the borrower.
const HOSTS: [&str; 2] = ["alpha", "beta"];
/// The network that joins them; tests have others.
const SUBNET: u8 = 21;
/// How long a script may take beside what it measures.
const SLACK: Duration = Duration::from_secs(60);

/// A load of fio's: what it is called, its options, and whether its figure is latency or bandwidth.
const LOADS: [(&str, &str, bool); 9] = [
    ("4k read qd1", "--rw=randread --bs=4k --ioengine=psync", true),
    ("16k read qd1", "--rw=randread --bs=16k --ioengine=psync", true),
    ("64k read qd1", "--rw=randread --bs=64k --ioengine=psync", true),
    ("256k read qd1", "--rw=randread --bs=256k --ioengine=psync", true),
    ("4k write qd1", "--rw=randwrite --bs=4k --ioengine=psync", true),
    ("4k sequential read qd8", "--rw=read --bs=4k --ioengine=libaio --iodepth=8", false),
    ("128k sequential read qd8", "--rw=read --bs=128k --ioengine=libaio --iodepth=8", false),
    ("1m sequential read qd8", "--rw=read --bs=1m --ioengine=libaio --iodepth=8", false),
    ("128k sequential write qd8", "--rw=write --bs=128k --ioengine=libaio --iodepth=8", false),
];
/// What the timing model is asked of beside: rows of Device Lending's figures.
const MODELLED: [&str; 8] = ["DL1", "DL2", "DL3", "DL4", "DL5", "DL6", "DL7", "DL8"];
/// What the bridge's software counts at each end, by what was accessed.
const TRAPS: [(&str, [&str; 2]); 3] = [
    ("registers", ["register_reads", "register_writes"]),
    ("the translated window", ["window1_reads", "window1_writes"]),
    ("the mapped window", ["window2_reads", "window2_writes"]),
];

impl From<VmError> for BenchError {
    fn from(error: VmError) -> BenchError {
        BenchError::Peer(error.to_string())
    }
}

/// What a load came to.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// Mean latency of a request in microseconds.
    us: f64,
    /// Throughput of the run, in megabytes a second.
    mb: f64,
    /// Requests that were done.
    requests: f64,
}

/// What went through both ends of the bridge, and how many interrupts the borrowed drive raised.
#[derive(Debug, Clone, Copy)]
struct Passed {
    /// Accesses that trapped, of each of [`TRAPS`].
    trapped: [f64; TRAPS.len()],
    /// Interrupts of the borrowed drive that the borrower's kernel counted.
    interrupts: f64,
}

struct Bench {
    rack: BareMetalRack,
    time: Duration,
    accel: String,
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself or a machine fails; where machines cannot be booted the area is left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    let load = wait_quiet(0.5, settings.patience);
    let (name, runs) = (regime.name(), settings.runs);
    report.note(&format!("regime: {name}; load before: {load:.2}; {runs} runs each"));
    let rack = match Bench::boot(settings)? {
        Ok(rack) => rack,
        Err(error) => {
            report.left_out("metal", &error.to_string());
            return Ok(());
        }
    };
    let bench = RefCell::new(Bench::start(rack, settings)?);
    let accel = bench.borrow().accel.clone();
    for (what, options, is_latency) in LOADS {
        let case = format!("{what}, {accel}");
        if !case.contains(&settings.only) {
            continue;
        }
        let unit = if is_latency { "us" } else { "MB/s" };
        let peer_name = "a drive like it, driven by its own host";
        let figure = |host| {
            let measured = bench.borrow_mut().fio(host, options)?;
            Ok(if is_latency { measured.us } else { measured.mb })
        };
        let case = Case { area: "metal", case: &case, peer_name, unit, runs };
        report.compare(case, || figure(HOSTS[1]), || figure(HOSTS[0]), |ours, peer| ours / peer)?;
    }
    traps(settings, &bench, report)?;
    for row in reproduce::rows().iter().filter(|row| MODELLED.contains(&row.id)) {
        let reproduce::Row { id, case, published, modelled, unit, .. } = row;
        report.note(&format!(
            "the timing model, of real hardware: {id}, {case}: {modelled} {unit} (published: {published})"
        ));
    }
    Ok(())
}

/// What a run of reads counted.
struct CountedTraps {
    /// In each of [`TRAPS`].
    trapped: [f64; TRAPS.len()],
    interrupts: f64,
    requests: f64,
}

/// What traps at the bridge for each read, by what was accessed: doorbells of the drive and its interrupts in the translated
/// window, the heartbeat too, and nothing in the mapped one.
fn traps(
    settings: &Settings,
    bench: &RefCell<Bench>,
    report: &mut Report,
) -> Result<(), BenchError> {
    let mut bench = bench.borrow_mut();
    let (what, options, _) = LOADS[0];
    let case = |place: &str| format!("traps in {place}, {what}, {}", bench.accel);
    let cases = TRAPS.map(|(place, _)| case(place));
    if !cases.iter().any(|case| case.contains(&settings.only)) {
        return Ok(());
    }
    let mut counted = Vec::new();
    for _ in 0..settings.runs {
        let before = bench.passed()?;
        let requests = bench.fio(HOSTS[1], options)?.requests;
        let after = bench.passed()?;
        let interrupts = after.interrupts - before.interrupts;
        let trapped = [0, 1, 2].map(|nth| after.trapped[nth] - before.trapped[nth]);
        counted.push(CountedTraps { trapped, interrupts, requests });
    }
    let of = |figure: &dyn Fn(&CountedTraps) -> f64| -> f64 {
        median(&counted.iter().map(figure).collect::<Vec<_>>())
    };
    for (nth, case) in cases.into_iter().enumerate() {
        report.add(ResultRow {
            area: "metal",
            case,
            ours: of(&|it| it.trapped[nth] / it.requests),
            peer: of(&|it| it.interrupts / it.requests),
            peer_name: "interrupts, each of which is written to a window that traps".to_owned(),
            unit: "per read",
            ratio: of(&|it| it.trapped[nth] / it.interrupts),
            runs: settings.runs,
        })?;
    }
    Ok(())
}

impl Bench {
    /// Boots the machines; the inner error says why that cannot be done here.
    fn boot(settings: &Settings) -> Result<Result<BareMetalRack, VmError>, BenchError> {
        match std::fs::remove_dir_all(&settings.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(BenchError::io("removing the former run's files")(error));
            }
            _ => {}
        }
        let spec = BareMetalSpec {
            program: beside("rackbus")?,
            programs: Vec::new(),
            hosts: HOSTS.map(|name| (name.to_owned(), GuestRelease::Bookworm)).to_vec(),
            subnet: SUBNET,
            drive: 64 << 20,
            with_local_drive: true,
        };
        Ok(BareMetalRack::boot(&Assets::of_user(), &spec, &settings.dir))
    }

    /// Joins the rack and borrows the drive.
    fn start(mut rack: BareMetalRack, settings: &Settings) -> Result<Bench, BenchError> {
        rack.join()?;
        let borrow = "until_ok rackbus borrow alpha/d0 --for beta --placement host
            until_ok test -b /dev/nvme0n1";
        rackbus_vm::metal::run(rack.machine(HOSTS[1])?, borrow)?;
        let accel = Assets::of_user().accel()?.to_string();
        Ok(Bench { rack, time: settings.time, accel })
    }

    /// Runs fio on a host's only drive: the borrower's is the borrowed one, the lender's kernel has the other.
    fn fio(&mut self, host: &str, options: &str) -> Result<Measured, BenchError> {
        let seconds = self.time.as_secs_f64().max(0.5);
        let script = format!(
            "fio --name=load --filename=$(ls /dev/nvme*n1) --direct=1 {options} --time_based \\
                --runtime={}ms --output-format=json",
            (seconds * 1e3) as u64
        );
        let output = self.rack.exec(host, &script, self.time + SLACK)?;
        let failed = |why: String| BenchError::Peer(format!("fio on {host}: {why}"));
        if !output.ok() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        // fio notes what it thinks of its options before the report.
        let text = output.text();
        let json = text.find('{').map_or("", |at| &text[at..]);
        let said: Value =
            serde_json::from_str(json).map_err(|error| failed(format!("{error}: {text}")))?;
        let job = &said["jobs"][0];
        let side = if options.contains("write") { &job["write"] } else { &job["read"] };
        let number = |value: &Value| value.as_f64().filter(|it| *it > 0.0);
        let read = || {
            Some(Measured {
                us: number(&side["lat_ns"]["mean"])? / 1e3,
                mb: number(&side["bw_bytes"])? / 1e6,
                requests: number(&side["total_ios"])?,
            })
        };
        read().ok_or_else(|| failed(format!("it measured nothing: {job}")))
    }

    fn passed(&mut self) -> Result<Passed, BenchError> {
        let counted = self.rack.bridges()[0].counters()?;
        let count = |end: &str, name: &str| counted[end][name].as_f64().unwrap_or(f64::NAN);
        // The heartbeat of lender and borrower is among them, some ten a second.
        let trapped = TRAPS.map(|(_, names)| {
            ["a", "b"].iter().flat_map(|end| names.map(|it| count(end, it))).sum()
        });
        let script = "awk '/nvme/ { sum += $2 } END { print sum }' /proc/interrupts";
        let said = self.rack.exec(HOSTS[1], script, SLACK)?.text();
        let interrupts = said.trim().parse().map_err(|_| {
            BenchError::Peer(format!("the borrower's interrupts cannot be read: {said}"))
        })?;
        Ok(Passed { trapped, interrupts })
    }
}
