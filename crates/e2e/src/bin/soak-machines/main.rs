#![forbid(unsafe_code)]
//! Drives under load between machines whose network fails, and whose processes are killed, stall and are restarted.
//!
//! The machines are a testbed's: namespaces that a network alone joins. Programs on each borrow drives of all, write,
//! read and flush them by a driver in user space, and return them ([`rackbus_e2e::soak`]). All the while `disturb` pulls
//! cables, as a whole or in one direction, makes them slow and lossy, and does to processes what happens to those. No
//! wrong data, no acknowledged write lost, nothing of a lease that has ended, none on its way for too long; at the end
//! everything is available again, every lease that ended says why, and no process has kept descriptors or memory.
//!
//! Usage: `soak-machines DIR [SECONDS [SEED]]`, as root; the last line is `soak: ok` and what was done.

mod disturb;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_e2e::machines::MachineTestbed;
use rackbus_e2e::soak::{
    Census, DriveLoad, LeasesUnderWay, check_census, check_reasons, is_settled, run_as_program,
};
use rackbus_e2e::{CheckFailure, RackProcesses, Result};
use rackbus_seeds::Random;

use disturb::MachineDisturber;

/// Drives of three machines, in files: what was acknowledged outlives a killed process.
const RACK: &str = r#"
name = "soak-machines"

[control]
lease_ttl = "3 s"
return_grace = "2 s"

[link]
hold = "5 s"

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

[hosts.gamma.devices.nvme3]
kind = "nvme"
size = "4 MiB"
backing = "file"
"#;

/// The machine of the control plane.
const CONTROL: &str = "control";
const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const FUNCTIONS: [&str; 4] = ["alpha/nvme0", "alpha/nvme1", "beta/nvme2", "gamma/nvme3"];
/// More than there are drives: they wait for each other.
const WORKERS: usize = 6;
/// How long everything may take to be there again after the last disturbance: a lease's time to live, its return, the
/// time that a front waits for its link, and the driver's own limits are in it.
const SETTLE: Duration = Duration::from_secs(60);
/// The longest that a lease may be armed, opened or closed: its time to live, the time for its return and that for
/// which a front waits for its link, five times, because everything that it needs may fail one after the other.
const LONGEST_UNDER_WAY: Duration = Duration::from_secs(5 * (3 + 2 + 5));

fn main() -> ExitCode {
    run_as_program("soak-machines", run)
}

fn run(dir: &Path, length: Duration, seed: u64) -> Result<String> {
    fs::create_dir_all(dir)?;
    let file = dir.join("rack.toml");
    fs::write(&file, RACK)?;
    let soak = Soak::start(&file)?;
    let outcome = soak.run(length, Random(seed));
    if outcome.is_err() {
        // The machines' files go with the testbed.
        if let Err(error) = soak.keep_logs(dir) {
            eprintln!("the machines' logs are not kept: {error}");
        }
    }
    outcome
}

/// What all workers know.
struct Soak {
    testbed: MachineTestbed,
    /// The rack as the machine of the control plane sees it.
    control: RackProcesses,
    /// The same for each host.
    hosts: [RackProcesses; HOSTS.len()],
    load: DriveLoad,
}

impl Soak {
    fn start(file: &Path) -> Result<Soak> {
        let testbed = MachineTestbed::start(file)?;
        let [alpha, beta, gamma] = HOSTS.map(|host| testbed.on(host));
        let (control, hosts) = (testbed.on(CONTROL)?, [alpha?, beta?, gamma?]);
        Ok(Soak { testbed, control, hosts, load: DriveLoad::new(&FUNCTIONS) })
    }

    fn run(&self, length: Duration, random: Random) -> Result<String> {
        let fresh = self.census()?;
        let disturbed = self.disturbed(length, random)?;
        self.settle()?;
        self.load.verify(&self.hosts[2], HOSTS[2])?;
        check_reasons(&self.control)?;
        check_census(&fresh, || self.census())?;
        let [operations, leases] =
            [&self.load.operations, &self.load.leases].map(|count| count.load(Ordering::Relaxed));
        Ok(format!("{operations} operations under {leases} leases; {disturbed}"))
    }

    /// Everybody works while the machines are disturbed; what was done to them.
    fn disturbed(&self, length: Duration, mut random: Random) -> Result<String> {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..WORKERS)
                .map(|number| {
                    let random = random.fork();
                    scope.spawn(move || self.work(number, random))
                })
                .collect();
            let mut disturber = MachineDisturber::new(self, random.fork());
            let mut under_way = LeasesUnderWay::new(LONGEST_UNDER_WAY);
            let (begun, mut told) = (Instant::now(), Instant::now());
            let mut outcome = Ok(());
            let failed = || workers.iter().any(|worker| worker.is_finished());
            while begun.elapsed() < length && !failed() && outcome.is_ok() {
                let disturbed = match self.load.awaits_end() {
                    true => {
                        std::thread::sleep(Duration::from_millis(100));
                        Ok(())
                    }
                    false => disturber.disturb(),
                };
                outcome = disturbed.and_then(|()| under_way.look(&self.control));
                if told.elapsed() > Duration::from_secs(10) {
                    told = Instant::now();
                    let operations = self.load.operations.load(Ordering::Relaxed);
                    eprintln!("{} s: {operations} operations", begun.elapsed().as_secs());
                }
            }
            // What a failure finds cut off or dead is brought back as well.
            let calmed = disturber.calm();
            self.load.stop.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().map_err(|_| CheckFailure("a worker panicked".to_owned()))??;
            }
            let disturbed = format!("{}; {}", disturber.describe(), under_way.describe());
            outcome.and(calmed).map(|()| disturbed)
        })
    }

    /// Borrows drives for any machine, on that machine, uses them and returns them.
    fn work(&self, number: usize, random: Random) -> Result<()> {
        self.load.work(number, random, &self.control, |function, random| {
            let host = random.below(HOSTS.len());
            self.hosts[host].json(&["borrow", function, "--for", HOSTS[host], "--wait=2s"])
        })
    }

    /// Everything is returned and available again.
    fn settle(&self) -> Result<()> {
        self.control.wait_hosts(&HOSTS)?;
        self.control.wait("all leases are returned", SETTLE, |rack| {
            self.load.return_owed(rack);
            self.load.owes_nothing().then_some(())
        })?;
        self.control.wait("every function is offered again, and nobody has any", SETTLE, |rack| {
            is_settled(rack, FUNCTIONS.len(), |host| self.on(host))
        })
    }

    /// The rack as it is seen on a machine.
    fn on(&self, machine: &str) -> &RackProcesses {
        let number = HOSTS.iter().position(|host| *host == machine);
        number.map_or(&self.control, |number| &self.hosts[number])
    }

    fn census(&self) -> Result<Vec<Census>> {
        let of = |machine| {
            let rack = self.on(machine);
            Census::of(machine, rack.process(machine)?, self.testbed.dir())
        };
        [CONTROL].into_iter().chain(HOSTS).map(of).collect()
    }

    /// Copies the machines' logs to `dir`, for people.
    fn keep_logs(&self, dir: &Path) -> Result<()> {
        for machine in [CONTROL].into_iter().chain(HOSTS) {
            let log = self.testbed.dir().join(machine).join("log");
            fs::copy(log, dir.join(format!("{machine}.log")))?;
        }
        Ok(())
    }
}
