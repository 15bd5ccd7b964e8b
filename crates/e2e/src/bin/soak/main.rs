#![forbid(unsafe_code)]
//! A rack under load whose processes are killed, frozen, restarted and deprived of devices at random moments.
//!
//! Workers borrow drives for any host, write, read and flush them by a driver in user space, and return them. Others
//! (`peers`) borrow several functions and have drives read into the memory of another, or borrow two whole or not at all
//! (`compositions`), or take turns on a drive (`sharers`), and a virtual machine (`machine`) uses two drives of two hosts, and a
//! third one for peer-to-peer with memory, until it is killed or stopped, and the next begins. One of the drives is served by another program, which this one plays. All the while
//! `disturb` does what happens to racks. What each block may hold is known ([`rackbus_e2e::soak`]): no wrong data, no acknowledged
//! write lost, nothing of a lease that has ended, and no lease that is on its way for too long. At the end
//! everything is available again, every lease that ended says why, no process has kept descriptors or memory, and none is
//! left over.
//!
//! Usage: `soak DIR [SECONDS [SEED]]`; the last line is `soak: ok` and what was done.

mod compositions;
mod disturb;
mod machine;
mod peers;
mod sharers;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_e2e::soak::{
    Census, DriveLoad, LeasesUnderWay, check_census, check_reasons, is_settled, run_as_program,
};
use rackbus_e2e::{CheckFailure, RackProcesses, Result, ensure, programs};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::serve_function;
use rackbus_seeds::Random;

use disturb::RackDisturber;
use machine::Machines;

/// Four drives of two hosts, one that is shared and three for virtual machines, in files: what was acknowledged outlives a
/// killed process. And memory of two hosts, for peer-to-peer.
const RACK: &str = r#"
name = "soak"

[control]
lease_ttl = "2 s"
return_grace = "2 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.beta.devices.nvme2]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.beta.devices.nvme3]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.beta.devices.nvme4]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.gamma.devices.nvme5]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.alpha.devices.nvme6]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.beta.devices.nvme7]
kind = "nvme"
size = "4 MiB"
backing = "file"

[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"

[hosts.gamma.devices.ram1]
kind = "memory"
size = "1 MiB"

[hosts.gamma.devices.ram2]
kind = "memory"
size = "2 MiB"

[[composition]]
name = "pair"
host = "gamma"
functions = ["alpha/nvme0", "beta/nvme2"]
"#;

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const FUNCTIONS: [&str; 6] =
    ["alpha/nvme0", "alpha/nvme1", "beta/nvme2", "beta/nvme3", FOREIGN_DRIVE, "gamma/nvme5"];
/// The drive that another program serves: its device in the rack file names the socket.
const FOREIGN_DRIVE: &str = "gamma/far0";
const FOREIGN_SIZE: u64 = 4 << 20;
/// Those that are borrowed; the last one is shared most of the time.
const BORROWED: usize = 5;
/// The drive on which programs take turns.
const SHARED_DRIVE: &str = FUNCTIONS[BORROWED];
/// The drives of the virtual machines. The first is plugged in and out.
const MACHINE_DRIVES: [&str; 2] = ["beta/nvme4", "alpha/nvme6"];
/// Memory that drives read into.
const MEMORY: [&str; 2] = ["alpha/ram0", "gamma/ram1"];
/// Everything that the rack lends.
const DEVICES: [&str; 12] = [
    FUNCTIONS[0],
    FUNCTIONS[1],
    FUNCTIONS[2],
    FUNCTIONS[3],
    FOREIGN_DRIVE,
    SHARED_DRIVE,
    MACHINE_DRIVES[0],
    MACHINE_DRIVES[1],
    MEMORY[0],
    MEMORY[1],
    machine::PEER_DRIVE,
    machine::PEER_MEMORY,
];
/// More than there are drives: they wait for each other.
const WORKERS: usize = 6;
/// Programs with several functions.
const PEERS: usize = 2;
/// Programs that take turns on a drive.
const SHARERS: usize = 2;
/// How long everything may take to be there again after the last disturbance. A lease's time to live, its return, and
/// the driver's own limits are in it.
const SETTLE: Duration = Duration::from_secs(60);
/// The longest that a lease may be armed, opened or closed: its time to live and the time for its return, five times,
/// because each of the four processes that it needs may be killed or stall meanwhile; and half as much again, for a busy
/// machine. The shortest run takes longer than this.
const LONGEST_UNDER_WAY: Duration = Duration::from_secs(5 * (2 + 2) * 3 / 2);
/// How long all go on at most until each of what is counted was done at least once, where the time of the run is too short
/// for that on a busy machine.
const LONGEST: Duration = Duration::from_secs(3 * 60);

/// What all workers know.
struct Soak {
    rack: RackProcesses,
    /// Those who use a drive at a time, and what all know of the drives.
    load: DriveLoad,
    /// Blocks that drives have read into memory functions, and that were checked there.
    moved: AtomicU64,
    /// Turns on the shared drive that were used.
    turns: AtomicU64,
    /// Compositions that were borrowed whole.
    whole: AtomicU64,
}

fn main() -> ExitCode {
    run_as_program("soak", run)
}

fn run(dir: &Path, length: Duration, seed: u64) -> Result<String> {
    fs::create_dir_all(dir)?;
    // A former run's drives hold other data.
    let _ = fs::remove_dir_all(dir.join("state"));
    let file = dir.join("rack.toml");
    // A socket's path is short, and a build folder may be deep.
    let socket = std::env::temp_dir().join(format!("rackbus-far-{}.sock", std::process::id()));
    let model = Nvme::new(&NvmeConfig::memory(FOREIGN_SIZE, "far0"))?;
    let _served = serve_function(Box::new(model), &socket, EngineOptions::default())?;
    let foreign = format!("[hosts.gamma.devices.far0]\nkind = \"upstream\"\nsocket = {socket:?}\n");
    fs::write(&file, RACK.to_owned() + &foreign)?;
    let rack = RackProcesses::start(&file, dir)?;
    let fresh = census(&rack)?;
    let load = DriveLoad::new(&FUNCTIONS);
    let [moved, turns, whole] = std::array::from_fn(|_| AtomicU64::new(0));
    let soak = Soak { rack, load, moved, turns, whole };
    let outcome = soak.whole_run(length, Random(seed), &fresh);
    let (disturbed, machines) = match outcome {
        Ok(done) => done,
        Err(failure) => {
            // The rack's files go with it.
            if let Err(error) = soak.rack.keep_logs(dir) {
                eprintln!("the rack's logs are not kept: {error}");
            }
            return Err(failure);
        }
    };
    let counts = [&soak.load.operations, &soak.load.leases, &soak.moved, &soak.turns, &soak.whole];
    let [operations, leases, moved, turns, whole] = counts.map(|it| it.load(Ordering::Relaxed));
    ensure!(moved > 0, "nothing was moved by peer-to-peer");
    ensure!(turns > 0 && whole > 0, "{turns} turns were used and {whole} compositions borrowed");
    let machines = machines.describe();
    Ok(format!(
        "{operations} operations under {leases} leases, {moved} by peer-to-peer; {turns} turns, {whole} compositions; \
         {machines}; {disturbed}"
    ))
}

impl Soak {
    /// The load, and what is checked when it has ended; what was done to the rack, and in virtual machines.
    fn whole_run(
        &self,
        length: Duration,
        random: Random,
        fresh: &[Census],
    ) -> Result<(String, machine::MachineTally)> {
        let done = self.run(length, random)?;
        self.settle()?;
        self.load.verify(&self.rack, "gamma")?;
        check_reasons(&self.rack)?;
        check_census(fresh, || census(&self.rack))?;
        Ok(done)
    }

    /// Everybody works while the rack is disturbed; what was done to it, and in virtual machines.
    fn run(&self, length: Duration, mut random: Random) -> Result<(String, machine::MachineTally)> {
        let soak = self;
        let programs = programs::disk(&self.rack, &["peer"])?;
        std::thread::scope(|scope| {
            let mut workers: Vec<_> = (0..WORKERS)
                .map(|number| {
                    let random = random.fork();
                    scope.spawn(move || work(soak, number, random))
                })
                .collect();
            workers.extend((0..PEERS).map(|number| {
                let random = random.fork();
                scope.spawn(move || peers::work(soak, number, random))
            }));
            workers.extend((0..SHARERS).map(|number| {
                let random = random.fork();
                scope.spawn(move || sharers::work(soak, WORKERS + number, random))
            }));
            let whole = random.fork();
            workers.push(scope.spawn(move || compositions::work(soak, WORKERS + SHARERS, whole)));
            let machines = Machines::new(soak, random.fork(), programs);
            let machines = scope.spawn(move || machines.run());
            let mut disturber = RackDisturber::new(&soak.rack, random.fork());
            let begun = Instant::now();
            let mut told = Instant::now();
            let failed =
                || workers.iter().any(|worker| worker.is_finished()) || machines.is_finished();
            let mut outcome = Ok(());
            let mut under_way = LeasesUnderWay::new(LONGEST_UNDER_WAY);
            let goes_on = |so_far: Duration| {
                so_far < length || (so_far < LONGEST && !soak.did_all_at_least_once())
            };
            while goes_on(begun.elapsed()) && !failed() && outcome.is_ok() {
                let disturbed = match soak.load.awaits_end() {
                    true => {
                        std::thread::sleep(Duration::from_millis(100));
                        Ok(())
                    }
                    false => disturber.disturb(),
                };
                outcome = disturbed.and_then(|()| under_way.look(&soak.rack));
                if told.elapsed() > Duration::from_secs(10) {
                    told = Instant::now();
                    let operations = soak.load.operations.load(Ordering::Relaxed);
                    eprintln!("{} s: {operations} operations", begun.elapsed().as_secs());
                }
            }
            // Those that a failure finds frozen or dead are brought back as well.
            let calmed = disturber.calm();
            soak.load.stop.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().map_err(|_| CheckFailure("a worker panicked".to_owned()))??;
            }
            let done = machines
                .join()
                .map_err(|_| CheckFailure("the VMs' thread panicked".to_owned()))??;
            let disturbed = format!("{}; {}", disturber.describe(), under_way.describe());
            outcome.and(calmed).map(|()| (disturbed, done))
        })
    }
}

/// Borrows drives for any host, uses them and returns them.
fn work(soak: &Soak, number: usize, random: Random) -> Result<()> {
    soak.load.work(number, random, &soak.rack, |function, random| {
        // Where others take turns it is refused, mostly.
        if function == SHARED_DRIVE && !random.chance(10) {
            return Err(CheckFailure("left to those who take turns".to_owned()));
        }
        let host = HOSTS[random.below(HOSTS.len())];
        let placement = if random.chance(30) { "borrower" } else { "lender" };
        soak.rack.json(&["borrow", function, "--for", host, "--placement", placement, "--wait=2s"])
    })
}

impl Soak {
    /// Whether something was moved by peer-to-peer, a turn used, and a composition borrowed.
    fn did_all_at_least_once(&self) -> bool {
        [&self.moved, &self.turns, &self.whole].iter().all(|it| it.load(Ordering::Relaxed) > 0)
    }

    /// Everything is returned and available again.
    fn settle(&self) -> Result<()> {
        self.rack.wait_hosts(&HOSTS)?;
        self.rack.wait("all leases are returned", SETTLE, |rack| {
            self.load.return_owed(rack);
            self.load.owes_nothing().then_some(())
        })?;
        self.rack.wait("every function is offered again, and nobody has any", SETTLE, |rack| {
            is_settled(rack, DEVICES.len(), |_| &self.rack)
        })
    }
}

fn census(rack: &RackProcesses) -> Result<Vec<Census>> {
    let roles = ["control"].into_iter().chain(HOSTS);
    roles.map(|role| Census::of(role, rack.process(role)?, rack.run_dir())).collect()
}
