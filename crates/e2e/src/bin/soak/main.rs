#![forbid(unsafe_code)]
//! A rack under load whose processes are killed, frozen, restarted and deprived of devices at random moments.
//!
//! Workers borrow drives for any host, write, read and flush them by a driver in user space, and return them. Others
//! (`peers`) borrow several functions and have drives read into the memory of another, and a virtual machine (`machine`)
//! uses a drive until it is killed or stopped, and the next begins. All the while
//! `disturb` does what happens to racks. What each block may hold is known (`model`): no wrong data, no acknowledged
//! write lost, nothing of a lease that has ended, and no lease that is on its way for too long (`stuck`). At the end
//! everything is available again, every lease that ended says why, no process has kept descriptors or memory, and none is
//! left over.
//!
//! Usage: `soak DIR [SECONDS [SEED]]`; the last line is `soak: ok` and what was done.

mod disturb;
mod machine;
mod model;
mod peers;
mod stuck;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::{CheckFailure, RackProcesses, Result, ensure};
use rackbus_seeds::Random;

use disturb::Disturber;
use machine::Machines;
use model::{BLOCK, BLOCKS, DriveModel};
use stuck::LeasesUnderWay;

/// Four drives of two hosts and one for virtual machines, in files: what was acknowledged outlives a killed process. And
/// memory of two hosts, for peer-to-peer.
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

[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"

[hosts.gamma.devices.ram1]
kind = "memory"
size = "1 MiB"
"#;

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const FUNCTIONS: [&str; 4] = ["alpha/nvme0", "alpha/nvme1", "beta/nvme2", "beta/nvme3"];
/// The drive of the virtual machines.
const MACHINE_DRIVE: &str = "beta/nvme4";
/// Memory that drives read into.
const MEMORY: [&str; 2] = ["alpha/ram0", "gamma/ram1"];
/// Everything that the rack lends.
const DEVICES: [&str; 7] =
    [FUNCTIONS[0], FUNCTIONS[1], FUNCTIONS[2], FUNCTIONS[3], MACHINE_DRIVE, MEMORY[0], MEMORY[1]];
/// More than there are drives: they wait for each other.
const WORKERS: usize = 6;
/// Programs with several functions.
const PEERS: usize = 2;
/// How long everything may take to be there again after the last disturbance. A lease's time to live, its return, and
/// the driver's own limits are in it.
const SETTLE: Duration = Duration::from_secs(60);
/// Descriptors that a node may have more than when it was started: connections that are just ending.
const SPARE_DESCRIPTORS: usize = 8;

/// What all workers know.
struct Soak {
    rack: RackProcesses,
    drives: Vec<Mutex<DriveModel>>,
    stop: AtomicBool,
    operations: AtomicU64,
    /// Writes that were acknowledged, and reads that were checked, of each drive.
    done: Vec<[AtomicU64; 2]>,
    /// Blocks that drives have read into memory functions, and that were checked there.
    moved: AtomicU64,
    leases: AtomicU64,
    /// Leases that could not be returned yet.
    owed: Mutex<BTreeSet<u64>>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).map(|text| text.parse::<u64>());
    let (Some(dir), Some(Ok(seconds)), Some(Ok(seed))) =
        (arguments.first(), number(1).or(Some(Ok(600))), number(2).or_else(|| Some(Ok(now()))))
    else {
        eprintln!("usage: soak DIR [SECONDS [SEED]]");
        return ExitCode::from(2);
    };
    println!("soak: {seconds} s, seed {seed}");
    match run(Path::new(dir), Duration::from_secs(seconds), seed) {
        Ok(done) => {
            println!("soak: ok, {done}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!(
                "soak: FAILED: {failure}\nagain, with the same choices: soak {dir} {seconds} {seed}"
            );
            ExitCode::FAILURE
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn run(dir: &Path, length: Duration, seed: u64) -> Result<String> {
    fs::create_dir_all(dir)?;
    // A former run's drives hold other data.
    let _ = fs::remove_dir_all(dir.join("state"));
    let file = dir.join("rack.toml");
    fs::write(&file, RACK)?;
    let rack = RackProcesses::start(&file, dir)?;
    let fresh = census(&rack)?;
    let soak = Soak {
        rack,
        drives: FUNCTIONS.iter().map(|_| Mutex::default()).collect(),
        stop: AtomicBool::new(false),
        operations: AtomicU64::new(0),
        done: FUNCTIONS.iter().map(|_| Default::default()).collect(),
        moved: AtomicU64::new(0),
        leases: AtomicU64::new(0),
        owed: Mutex::default(),
    };
    let (disturbed, machines) = soak.load(length, Random(seed))?;
    soak.settle()?;
    soak.verify()?;
    soak.check_reasons()?;
    soak.check_census(&fresh)?;
    let [operations, leases, moved] =
        [&soak.operations, &soak.leases, &soak.moved].map(|count| count.load(Ordering::Relaxed));
    for (function, done) in FUNCTIONS.iter().zip(&soak.done) {
        let [written, read] = done.each_ref().map(|count| count.load(Ordering::Relaxed));
        ensure!(written > 0 && read > 0, "{function}: {written} writes and {read} reads succeeded");
    }
    ensure!(moved > 0, "nothing was moved by peer-to-peer");
    let machines = machines.describe();
    Ok(format!(
        "{operations} operations under {leases} leases, {moved} by peer-to-peer; {machines}; {disturbed}"
    ))
}

impl Soak {
    /// Everybody works while the rack is disturbed; what was done to it, and in virtual machines.
    fn load(&self, length: Duration, mut random: Random) -> Result<(String, machine::Done)> {
        let soak = self;
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
            let machines = Machines::new(soak, random.fork());
            let machines = scope.spawn(move || machines.run());
            let mut disturber = Disturber::new(&soak.rack, random.fork());
            let begun = Instant::now();
            let mut told = Instant::now();
            let failed =
                || workers.iter().any(|worker| worker.is_finished()) || machines.is_finished();
            let mut outcome = Ok(());
            let mut under_way = LeasesUnderWay::default();
            while begun.elapsed() < length && !failed() && outcome.is_ok() {
                outcome = disturber.disturb().and_then(|()| under_way.look(&soak.rack));
                if told.elapsed() > Duration::from_secs(10) {
                    told = Instant::now();
                    let operations = soak.operations.load(Ordering::Relaxed);
                    eprintln!("{} s: {operations} operations", begun.elapsed().as_secs());
                }
            }
            // Those that a failure finds frozen or dead are brought back as well.
            let calmed = disturber.calm();
            soak.stop.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().map_err(|_| CheckFailure("a worker panicked".to_owned()))??;
            }
            let done = machines
                .join()
                .map_err(|_| CheckFailure("the VMs' thread panicked".to_owned()))??;
            let disturbed = format!("{}; {}", disturber.counts(), under_way.describe());
            outcome.and(calmed).map(|()| (disturbed, done))
        })
    }
}

/// Borrows, uses and returns drives until it is told to stop. What is refused or lost is tried again; what must not be
/// is a failure.
fn work(soak: &Soak, number: usize, mut random: Random) -> Result<()> {
    let mut value = number as u64;
    while !soak.stop.load(Ordering::Relaxed) {
        soak.return_owed();
        let drive = random.below(FUNCTIONS.len());
        let host = HOSTS[random.below(HOSTS.len())];
        let placement = if random.chance(30) { "borrower" } else { "lender" };
        let asked =
            ["borrow", FUNCTIONS[drive], "--for", host, "--placement", placement, "--wait=2s"];
        let Ok(lease) = soak.rack.json(&asked) else { continue };
        soak.leases.fetch_add(1, Ordering::Relaxed);
        let field = |name: &str| lease[name].as_u64().unwrap_or(0);
        let (id, epoch) = (field("lease"), field("epoch"));
        let socket = PathBuf::from(lease["socket"].as_str().unwrap_or_default());
        let count = 1 + random.below(400);
        let used = soak.use_drive(drive, epoch, &socket, count, (number, &mut value), &mut random);
        lock(&soak.owed).insert(id);
        used?;
    }
    Ok(())
}

impl Soak {
    /// Uses a drive under one lease, until that is lost or enough was done.
    fn use_drive(
        &self,
        drive: usize,
        epoch: u64,
        socket: &Path,
        count: usize,
        (worker, value): (usize, &mut u64),
        random: &mut Random,
    ) -> Result<()> {
        let wrong =
            |error: String| CheckFailure(format!("{}, epoch {epoch}: {error}", FUNCTIONS[drive]));
        let options = DriveOptions { depth: 4, data: 64 << 10 };
        let Ok(mut opened) = Drive::open(socket, options) else { return Ok(()) };
        for _ in 0..count {
            let block = random.below(BLOCKS);
            let lba = (block * BLOCK / 512) as u64;
            self.operations.fetch_add(1, Ordering::Relaxed);
            match random.below(100) {
                0..3 => {
                    if opened.flush().is_err() {
                        return Ok(());
                    }
                }
                3..50 => {
                    *value += WORKERS as u64;
                    let written = *value * 64 + worker as u64;
                    if !lock(&self.drives[drive]).begin(epoch, block, written) {
                        return Ok(());
                    }
                    let fua = random.chance(10);
                    if opened.write(lba, &model::content(block, written), fua).is_err() {
                        return Ok(());
                    }
                    lock(&self.drives[drive]).written(epoch, block, written);
                    self.done[drive][0].fetch_add(1, Ordering::Relaxed);
                }
                _ => {
                    if !lock(&self.drives[drive]).is_current(epoch) {
                        return Ok(());
                    }
                    let mut data = vec![0; BLOCK];
                    if opened.read(lba, &mut data).is_err() {
                        return Ok(());
                    }
                    lock(&self.drives[drive]).read(epoch, block, &data).map_err(wrong)?;
                    self.done[drive][1].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Tries to return what could not be returned before.
    fn return_owed(&self) {
        let owed: Vec<u64> = lock(&self.owed).iter().copied().collect();
        for lease in owed {
            let returned = self.rack.json(&["return", &lease.to_string()]);
            let over = match &returned {
                Ok(_) => true,
                Err(CheckFailure(why)) => {
                    why.contains("has ended already") || why.contains("no lease")
                }
            };
            if over {
                lock(&self.owed).remove(&lease);
            }
        }
    }

    /// Everything is returned and available again.
    fn settle(&self) -> Result<()> {
        self.rack.wait_hosts(&HOSTS)?;
        self.rack.wait("all leases are returned", SETTLE, |_| {
            self.return_owed();
            lock(&self.owed).is_empty().then_some(())
        })?;
        self.rack.wait("every function is offered again, and nobody has any", SETTLE, |rack| {
            let devices = rack.json(&["devices"]).ok()?;
            let offered = devices.as_array()?.iter().filter(|it| it["state"] == "offered").count();
            let leases = rack.json(&["leases"]).ok()?;
            (offered == DEVICES.len() && leases.as_array()?.is_empty()).then_some(())
        })
    }

    /// Every block holds what was acknowledged.
    fn verify(&self) -> Result<()> {
        for (drive, function) in FUNCTIONS.iter().enumerate() {
            let lease = self.rack.json(&["borrow", function, "--for", "gamma"])?;
            let epoch = lease["epoch"].as_u64().unwrap_or(0);
            let socket = lease["socket"].as_str().unwrap_or_default();
            let mut opened = Drive::open(Path::new(socket), DriveOptions::default())?;
            let mut model = lock(&self.drives[drive]);
            for block in 0..BLOCKS {
                let mut data = vec![0; BLOCK];
                opened.read((block * BLOCK / 512) as u64, &mut data)?;
                let read = model.read(epoch, block, &data);
                read.map_err(|error| CheckFailure(format!("{function}, at the end: {error}")))?;
            }
            drop(opened);
            self.rack.give_back(lease["lease"].as_u64().unwrap_or(0))?;
        }
        Ok(())
    }

    /// Every lease that is over says why, and an event tells of it.
    fn check_reasons(&self) -> Result<()> {
        let leases = self.rack.json(&["leases", "--all"])?;
        let events = self.rack.json(&["events", "--last", "10000"])?;
        let events = events.as_array().into_iter().flatten();
        let told: BTreeSet<u64> = events.filter_map(|event| event["lease"].as_u64()).collect();
        // Events are kept for a while only.
        let first = told.first().copied().unwrap_or(0);
        for lease in leases.as_array().into_iter().flatten() {
            let number = lease["lease"].as_u64().unwrap_or(0);
            ensure!(
                lease["reason"].is_string(),
                "lease {number} is over without a reason: {lease}"
            );
            ensure!(number <= first || told.contains(&number), "no event tells of lease {number}");
        }
        Ok(())
    }

    /// No process has kept what it does not need.
    fn check_census(&self, fresh: &[Census]) -> Result<()> {
        let begun = Instant::now();
        loop {
            let now = census(&self.rack)?;
            let grown = fresh.iter().zip(&now).find(|(fresh, now)| {
                now.descriptors > fresh.descriptors + SPARE_DESCRIPTORS
                    || now.memory > fresh.memory
                    || now.processes > fresh.processes
            });
            match grown {
                None => return Ok(()),
                // What ended just now may still be closing.
                Some(_) if begun.elapsed() < Duration::from_secs(10) => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Some((fresh, now)) => {
                    return Err(CheckFailure(format!(
                        "more is open than at first: {fresh:?}, now {now:?}"
                    )));
                }
            }
        }
    }
}

/// What a process has open.
#[derive(Debug)]
struct Census {
    #[allow(dead_code, reason = "a failure shows it")]
    role: &'static str,
    descriptors: usize,
    /// Mappings of memory files.
    memory: usize,
    /// Processes of the rack, the same for all roles: nodes, and what they and users have started.
    processes: usize,
}

/// How many processes have the rack's run directory among their arguments.
fn processes(rack: &RackProcesses) -> Result<usize> {
    let folder = rack.run_dir().display().to_string();
    // The folder, or something in it: not one whose name begins with the same letters.
    let ends = ["\0", "/"].map(|end| format!("{folder}{end}"));
    let of_rack = |entry: fs::DirEntry| {
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments).into_owned();
        ends.iter().any(|end| arguments.contains(end))
    };
    Ok(fs::read_dir("/proc")?.flatten().filter_map(|entry| of_rack(entry).then_some(())).count())
}

fn census(rack: &RackProcesses) -> Result<Vec<Census>> {
    let roles = ["control"].into_iter().chain(HOSTS);
    let processes = processes(rack)?;
    let of = |role| {
        let folder = format!("/proc/{}", rack.process(role)?.as_raw_pid());
        let descriptors = fs::read_dir(format!("{folder}/fd"))?.count();
        let maps = fs::read_to_string(format!("{folder}/maps"))?;
        let memory = maps.lines().filter(|line| line.contains("memfd:")).count();
        Ok(Census { role, descriptors, memory, processes })
    };
    roles.map(of).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
