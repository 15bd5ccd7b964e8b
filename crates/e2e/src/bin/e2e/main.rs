#![forbid(unsafe_code)]
//! The end-to-end tests: one rack of real processes, two unmodified guests, and what a user of
//! the rack relies on, crash by crash.
//!
//! Usage: `e2e DIR [SCENARIO]...`; without names all scenarios run, in order, but those that are the same as another one on
//! another version of Linux or take minutes: `e2e DIR --more` runs these. The guests boot once and are shared; a scenario leaves them as
//! it found them. One that fails does not: those after it have a rack and guests of their own, and all that failed is told.

mod accelerators;
mod bridges;
mod control_planes;
mod controllers;
mod crashes;
mod cycles;
mod endings;
mod firmware;
mod guests;
mod isolated;
mod kernels;
mod machines;
mod memory;
mod metal;
mod nics;
mod ntb_link;
mod outages;
mod outside;
mod packages;
mod passthrough;
mod peers;
mod physical;
mod programs;
mod restarts;
mod sealed;
mod segments;
mod sharing;
mod systems;
mod testbed;
mod traffic;
mod translated;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use rackbus_e2e::{CheckFailure, Guest, RackProcesses, Result};
use rackbus_vm::Assets;

/// The rack file that all scenarios run with.
const RACK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/rack.toml");

/// The rack and its two guests: `old` (Debian 12) on beta, `new` (Debian 13) on gamma.
pub struct RackWithGuests {
    /// The rack that the guests are part of.
    pub rack: RackProcesses,
    /// Debian 12 on beta.
    pub old: Guest,
    /// Debian 13 on gamma.
    pub new: Guest,
}

type Scenario = (&'static str, fn(&mut RackWithGuests) -> Result<()>);

type Alone = (&'static str, fn(&Path) -> Result<()>);

/// Those without a rack, which come first.
const ALONE: [Alone; 10] = [
    ("two machines run Linux 6.12's NTB drivers on a bridge in software", bridges::trixie),
    ("a host's own driver drives a drive of another host", metal::bookworm),
    ("a program drives a drive of another host by its own host's vfio-pci", isolated::trixie),
    ("a VM boots from a drive of another host by its own host's vfio-pci", passthrough::boots),
    ("two hosts share memory and ring each other through a bridge in software", ntb_link::shared),
    ("Linux 6.12 returns no way to a drive that is in use by its last one", controllers::trixie),
    ("hosts of a test bed borrow and return a drive many times", testbed::borrowed),
    ("guests on two machines use a third one's network card and memory", machines::functions),
    ("three machines' control planes and etcd are cut off and killed", control_planes::survive),
    ("a machine's systemd runs the package's control plane and node", packages::units),
];

/// Those without a rack that are the same as another one on another version of Linux, or take minutes.
const MORE_ALONE: [Alone; 6] = [
    ("two machines run Linux 6.1's NTB drivers on a bridge in software", bridges::bookworm),
    ("Linux 6.1 returns no way to a drive that is in use by its last one", controllers::bookworm),
    ("Linux 6.12's own driver drives a drive of another host", metal::trixie),
    ("the newest kernel's own driver drives a drive of another host", metal::newest),
    ("hosts of a test bed borrow and return a drive a hundred times", testbed::hundred),
    ("a stock kernel in a VM drives a drive of another host", passthrough::stock_kernel),
];

/// The same of those with a rack.
const MORE: [Scenario; 2] = [
    ("programs in guests of the other kernels use accelerators", accelerators::in_other_guests),
    ("the library conforms in guests of all kernels", segments::conformance_in_guests),
];

/// In this order: those that kill nodes come last.
const SCENARIOS: [Scenario; 36] = [
    ("a drive is the same drive from one guest to the next", guests::data_follows),
    ("two kernels' nvme-cli find everything in order", guests::administration),
    ("fio verifies random I/O of four jobs in two guests", guests::verified_io),
    ("a strict borrower's guest uses the same drive", guests::strict_isolation),
    ("a guest's drive reaches memory that is plugged in later", memory::followed),
    ("a program in a guest maps borrowed memory", guests::memory),
    ("a guest's drive reaches the BARs of its other functions", peers::to_each_other),
    ("two guests reach each other by functions of a network card", nics::to_each_other),
    ("stock programs in guests reach guests, hosts and what is outside", traffic::everywhere),
    ("a program in a guest uses an accelerator as root", accelerators::without_iommu),
    ("a program in a guest with an IOMMU uses an accelerator", accelerators::with_iommu),
    ("a guest's drive is read through its accelerator", accelerators::from_drives),
    ("programs in two guests share memory with each other and with a host", segments::in_guests),
    ("programs, nodes and VMs end in the middle of copies and connects", endings::in_the_middle),
    ("a machine with an IOMMU lends its own drive and virtual functions", physical::lent),
    ("a stock kernel seals what goes between two machines", sealed::by_the_kernel),
    ("a guest that translates DMA by itself uses drives", translated::drives),
    ("a guest boots from a borrowed drive by UEFI", firmware::boots),
    ("each processor of a guest has its queue, unplugged under load", guests::queues),
    ("the newest kernel has a queue for each processor, by MSI-X and by MSI", kernels::newest),
    ("discard and write-zeroes leave zeroes", guests::zeroes),
    ("a second borrower is refused and told who has it", guests::second_borrower),
    ("two guests take turns on one drive, unattended", sharing::turns_of_guests),
    ("a VM moves to another host with its drive", sharing::moved),
    ("a QEMU started by hand finds its drive", guests::own_qemu),
    ("an idle drive uses no processor time", guests::idle),
    ("nodes are restarted in place and a guest notices nothing", restarts::in_place),
    ("100 times borrowed and returned, data checked", cycles::hundred),
    ("the control plane is killed under load", crashes::control_plane),
    ("a borrower's VM is killed under load", crashes::borrowing_vm),
    ("what has MSI-X stays until its VM ends, and goes back then", crashes::kept_functions),
    ("what was acknowledged survives the lender's kill", crashes::durability),
    ("what a persistent memory region acknowledged survives the lender's kill", crashes::region),
    ("a borrowing node is killed under load", crashes::borrower),
    ("a borrowing node is killed and its VM goes on", crashes::orphaned_function),
    ("a lender is killed under load", crashes::lender),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    // A folder of that name would be emptied.
    let dir = arguments.next().filter(|first| !first.starts_with('-')).map(PathBuf::from);
    let Some(dir) = dir else {
        eprintln!("usage: e2e DIR [--more | SCENARIO]...");
        return ExitCode::from(2);
    };
    let wanted: Vec<String> = arguments.collect();
    let begun = Instant::now();
    match run(&dir, &wanted) {
        Ok(outcome) if outcome.failed.is_empty() => {
            let (count, seconds) = (outcome.count, begun.elapsed().as_secs_f64());
            println!("e2e: ok, {count} scenarios in {seconds:.0} s");
            ExitCode::SUCCESS
        }
        Ok(outcome) => {
            // The logs are long: what failed comes last as well.
            for failed in &outcome.failed {
                eprintln!("e2e: failed: {failed}");
            }
            eprintln!("e2e: failed: {} of {} scenarios", outcome.failed.len(), outcome.count);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("e2e: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What the scenarios came to.
#[derive(Default)]
struct Outcome {
    /// How many have run.
    count: usize,
    /// Of each that failed the first line.
    failed: Vec<String>,
}

impl Outcome {
    /// Takes down how a scenario went that has begun then; whether it succeeded.
    fn note(&mut self, name: &str, begun: Instant, result: Result<()>) -> bool {
        let seconds = begun.elapsed().as_secs_f64();
        self.count += 1;
        match result {
            Ok(()) => println!("{seconds:>7.1} s  {name}"),
            Err(ref error) => {
                eprintln!("{seconds:>7.1} s  failed: {name}: {error}");
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                self.failed.push(format!("{name}: {line}"));
            }
        }
        result.is_ok()
    }
}

fn run(dir: &Path, wanted: &[String]) -> Result<Outcome> {
    empty(dir)?;
    let is_more = |name: &str| {
        MORE_ALONE.iter().any(|(more, _)| *more == name)
            || MORE.iter().any(|(more, _)| *more == name)
    };
    let alone = || ALONE.iter().chain(&MORE_ALONE);
    let with_rack = || SCENARIOS.iter().chain(&MORE);
    let names = || alone().map(|(name, _)| *name).chain(with_rack().map(|(name, _)| *name));
    let wants_more = wanted == ["--more"];
    let unknown = wanted.iter().find(|w| !names().any(|name| name.contains(w.as_str())));
    if let Some(unknown) = unknown.filter(|_| !wants_more) {
        return Err(CheckFailure(format!("there is no scenario {unknown:?}")));
    }
    println!("guests run under {}", Assets::of_user().accel()?);
    let chosen = |name: &str| match wanted {
        [] => !is_more(name),
        _ if wants_more => is_more(name),
        named => named.iter().any(|w| name.contains(w.as_str())),
    };
    let mut outcome = Outcome::default();
    for (name, scenario) in alone().filter(|(name, _)| chosen(name)) {
        let begun = Instant::now();
        let result = scenario(dir);
        outcome.note(name, begun, result);
    }
    let mut world = None;
    for (name, scenario) in with_rack().filter(|(name, _)| chosen(name)) {
        let begun = Instant::now();
        let with = match &mut world {
            Some(world) => world,
            none => match RackWithGuests::start(dir) {
                Ok(started) => none.insert(started),
                Err(error) => {
                    // Nothing can run, but what failed before is told.
                    outcome.note(name, begun, Err(error));
                    break;
                }
            },
        };
        let begun = Instant::now();
        let result = scenario(with).and_then(|()| nothing_left(with));
        let result = result.map_err(|e| CheckFailure(format!("{e}\n{}", with.rack.tail())));
        if !outcome.note(name, begun, result) {
            // It may have left anything behind, and its logs are looked for.
            world = None;
            let kept = dir.with_extension(format!("failed-{}", outcome.failed.len()));
            empty(&kept)?;
            std::fs::rename(dir, kept)?;
        }
    }
    Ok(outcome)
}

/// Removes what is in the folder, and it.
fn empty(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

impl RackWithGuests {
    /// Starts the rack, and both guests at the same time.
    fn start(dir: &Path) -> Result<RackWithGuests> {
        let begun = Instant::now();
        let rack = RackProcesses::start(RACK.as_ref(), dir)?;
        let room = ["--max-memory", "1G"];
        let mut old = Guest::start_with(&rack, "old", "beta", "bookworm", &[], &room)?;
        let mut new = Guest::start_with(&rack, "new", "gamma", "trixie", &[], &room)?;
        old.booted()?;
        new.booted()?;
        println!("{:>7.1} s  the rack and two guests are up", begun.elapsed().as_secs_f64());
        Ok(RackWithGuests { rack, old, new })
    }
}

/// No scenario leaves leases behind.
fn nothing_left(world: &RackWithGuests) -> Result<()> {
    let left = world.rack.json(&["leases"])?;
    rackbus_e2e::ensure!(left.as_array().is_some_and(Vec::is_empty), "leases left over: {left}");
    Ok(())
}
