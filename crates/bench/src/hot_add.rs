//! Functions plugged into a running stock guest: how long that takes until it is answered, until the guest has the
//! drive, and until it is out again, against the same lease without a guest.

use std::time::{Duration, Instant};

use crate::machine::Regime;
use crate::nvme::Settings;
use crate::rack::{BenchRack, BorrowedDrive};
use crate::raw::STORE;
use crate::report::Case;
use crate::{BenchError, Report};

/// The VM, as `--vm` and `vm` name it.
const VM: &str = "bench";
/// How long a stock guest may take to start under QEMU's translator.
const STARTS: Duration = Duration::from_secs(180);
/// A guest that waits for its drive, or for its end, without waking its processors more often than needed.
const APPEARS: &str = "until ls /dev/nvme?n1; do sleep 0.005; done";

/// A rack in which beta's guest is lent alpha's drive.
fn rack_file() -> String {
    let size = STORE >> 20;
    format!(
        "name = \"bench\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"{size} MiB\"\n\
         backing = \"memory\"\n[hosts.beta]\n"
    )
}

/// Milliseconds of one time round.
struct Times {
    answered: f64,
    appeared: f64,
    returned: f64,
}

fn milliseconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

/// Borrows the drive and returns it: with `vm` for the guest, which has booted, and without for nobody.
fn round(rack: &BenchRack, vm: bool) -> Result<Times, BenchError> {
    let plugged: &[&str] = if vm { &["alpha/nvme0", "--vm", VM] } else { &["alpha/nvme0"] };
    let begun = Instant::now();
    let lease: BorrowedDrive = rack.borrow(plugged)?;
    let answered = milliseconds(begun);
    if vm {
        rack.json(&["vm", "exec", VM, "--", "bash", "-c", APPEARS])?;
    }
    let appeared = milliseconds(begun);
    let begun = Instant::now();
    rack.give_back(&lease)?;
    Ok(Times { answered, appeared, returned: milliseconds(begun) })
}

/// Starts the guest and waits until it answers; what it runs under.
fn start(rack: &BenchRack) -> Result<String, BenchError> {
    let vm = rack.json(&["vm", "run", "--host", "beta", "--name", VM, "--detach"])?;
    let begun = Instant::now();
    // Firmware may take what is asked before the guest runs: it is asked again.
    while let Err(error) = rack.json(&["vm", "exec", VM, "--seconds", "5", "--", "true"]) {
        if begun.elapsed() > STARTS {
            return Err(error);
        }
    }
    Ok(vm["accel"].as_str().unwrap_or("unknown").to_owned())
}

/// Runs all cases and adds their rows to `report`.
///
/// # Errors
/// When rackbus itself fails; without QEMU the cases are left out.
pub fn run(settings: &Settings, regime: &Regime, report: &mut Report) -> Result<(), BenchError> {
    type Part = fn(&Times) -> f64;
    let cases: [(&str, &str, Part); 3] = [
        ("hot-add, answered", "borrow without a guest", |times| times.answered),
        ("hot-add until the guest has the drive", "borrow without a guest", |times| times.appeared),
        ("hot-remove and return", "return without a guest", |times| times.returned),
    ];
    if !cases.iter().any(|(case, ..)| case.contains(&settings.only)) {
        return Ok(());
    }
    report.note(&format!("hot-add: regime {}", regime.name()));
    let Some(rack) = BenchRack::start(&settings.dir, &rack_file())? else {
        report.left_out("lending", "the rackbus binary is not beside this one");
        return Ok(());
    };
    let accel = match start(&rack) {
        Ok(accel) => accel,
        Err(error) => {
            report.left_out("hot-add", &error.to_string());
            return Ok(());
        }
    };
    for (name, peer_name, part) in cases.iter().filter(|(it, ..)| it.contains(&settings.only)) {
        let name = format!("{name}, {accel}");
        let case =
            Case { area: "lending", case: &name, peer_name, unit: "ms", runs: settings.runs };
        let measure = |vm| round(&rack, vm).map(|times| part(&times));
        report.compare(case, || measure(true), || measure(false), |ours, peer| ours / peer)?;
    }
    rack.json(&["vm", "stop", "--kill", VM]).map(drop)
}
