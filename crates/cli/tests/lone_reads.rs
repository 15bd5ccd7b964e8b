//! Lone reads of a drive that is lent through a rack, with nothing pinned: a user's normal case. They are in a
//! program of their own, so that the processors are theirs while it measures.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::Drive;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use support::{Rack, not_tested, open};

const RACK: &str = "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"16 MiB\"\n[hosts.beta]\n";
const STARTS: usize = 20;
/// Rounds of starts, of which one counts: the machine's own work hits some starts as well.
const ROUNDS: usize = 2;
/// Reads of a batch, of which the median counts.
const BATCH: u32 = 100;
/// How long a start reads with nothing pinned: an engine that shares its processor goes to an idle one after less than a
/// tenth of a second.
const FREE: Duration = Duration::from_millis(300);
/// The same, pinned.
const PINNED: Duration = Duration::from_millis(20);

/// The thread of a node that serves `device`.
fn engine(rack: &Rack, host: &str, device: &str) -> PathBuf {
    let tasks = format!("/proc/{}/task", rack.process(Some(host)).pid.as_raw_nonzero());
    let named = |task: &Path| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == device)
    };
    let mut tasks = std::fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path());
    tasks.find(|task| named(task)).expect("a node has a thread for each device that it lends")
}

/// Its processor time in nanoseconds, and how often it gave the processor back, by the kernel's account.
fn usage(task: &Path) -> (u64, u64) {
    let schedstat = std::fs::read_to_string(task.join("schedstat")).unwrap();
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let slept = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    let ns = schedstat.split_whitespace().next().unwrap();
    (ns.parse().unwrap(), slept.unwrap().trim().parse().unwrap())
}

fn pinned_to(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// How long a read of 4 KiB takes with nothing else in flight: the median of the batches that `time` has room for.
fn lone_read(drive: &mut Drive, time: Duration) -> Duration {
    let mut block = vec![0; 4096];
    let mut batches = Vec::new();
    let first = Instant::now();
    while batches.is_empty() || first.elapsed() < time {
        let begun = Instant::now();
        (0..BATCH).for_each(|nth| drive.read(u64::from(nth) * 8, &mut block).unwrap());
        batches.push(begun.elapsed() / BATCH);
    }
    batches.sort();
    batches[batches.len() / 2]
}

/// For how long all processors together have been idle.
fn idle() -> Duration {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    Duration::from_secs_f64(uptime.split_whitespace().nth(1).unwrap().parse().unwrap())
}

/// What `work` gives, and whether this thread and `engine` could have had a processor each meanwhile: as others left so much
/// of the processors idle.
fn undisturbed<T>(engine: &Path, work: impl FnOnce() -> T) -> (T, bool) {
    let own = Path::new("/proc/thread-self");
    let free = || idle() + Duration::from_nanos(usage(own).0 + usage(engine).0);
    let (begun, before) = (Instant::now(), free());
    let result = work();
    (result, free() - before >= begun.elapsed().mul_f64(1.8))
}

/// Waits until the thread does nothing any more: a spin is over after a hundred microseconds of its thread, which a busy
/// machine may let run only later.
fn at_rest(task: &Path) -> (u64, u64) {
    let begun = Instant::now();
    let mut before = usage(task);
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = usage(task);
        if now == before {
            return now;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come to rest: {now:?}");
        before = now;
    }
}

/// A drive that is borrowed anew: how long a lone read takes with nothing pinned and then pinned. `None` where other
/// programs had the processors.
fn start(rack: &Rack) -> Option<(Duration, Duration)> {
    let everywhere = sched_getaffinity(None).unwrap();
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| everywhere.is_set(*cpu));
    let first = processors.next().unwrap();
    let last = processors.next_back().unwrap_or(first);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    let engine = engine(rack, "alpha", "nvme0");
    let (free, alone) = undisturbed(&engine, || lone_read(&mut drive, FREE));
    let thread: i32 = engine.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let thread = Pid::from_raw(thread);
    sched_setaffinity(None, &pinned_to(first)).unwrap();
    sched_setaffinity(thread, &pinned_to(last)).unwrap();
    let pinned = lone_read(&mut drive, PINNED);
    sched_setaffinity(None, &everywhere).unwrap();
    sched_setaffinity(thread, &everywhere).unwrap();
    drop(drive);
    rack.give_back(&lease);
    alone.then_some((free, pinned))
}

/// The same of so many drives, in the order of their times; fewer where the machine is busy.
fn starts(rack: &Rack) -> (Vec<Duration>, Vec<Duration>) {
    let all = (0..2 * STARTS).filter_map(|_| start(rack)).take(STARTS);
    let (mut free, mut pinned): (Vec<_>, Vec<_>) = all.unzip();
    free.sort();
    pinned.sort();
    (free, pinned)
}

/// In 19 of 20 starts a read takes at most twice as long with nothing pinned. With engine and driver on one processor, and
/// asleep at each turn, it takes ten to twenty times as long. What other programs do with the processors hits whatever
/// is not pinned: starts where they have them do not count.
#[test]
fn lone_reads_are_as_fast_with_nothing_pinned() {
    if std::thread::available_parallelism().is_ok_and(|count| count.get() < 2) {
        return not_tested("with one processor there is nothing to choose");
    }
    let rack = Rack::up(RACK);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let (free, pinned) = starts(&rack);
        if free.len() < STARTS {
            return not_tested(
                "other programs have the processors: lone reads with nothing pinned",
            );
        }
        if free[STARTS - 2] <= 2 * pinned[STARTS / 2] {
            return;
        }
        rounds.push((free, pinned));
    }
    panic!("lone reads with nothing pinned, and pinned: {rounds:?}");
}

/// The threads of a node, by their names. Those of its runtime wake for what the node says of itself.
fn threads(rack: &Rack, host: &str) -> BTreeMap<PathBuf, String> {
    let tasks = format!("/proc/{}/task", rack.process(Some(host)).pid.as_raw_nonzero());
    let tasks = std::fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path());
    // One that ends meanwhile has no name.
    let named = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.join("comm")).ok()?;
        Some((task, name.trim().to_owned()))
    });
    named.filter(|(_, name)| !name.starts_with("tokio")).collect()
}

/// A drive that is borrowed so, and then idle: its engines, and what the nodes of lender and borrower have for its lease.
fn is_not_woken(isolation: &str, engines: &[&str]) {
    let rack = Rack::up(RACK);
    let both = |rack: &Rack| -> BTreeMap<PathBuf, String> {
        ["alpha", "beta"].into_iter().flat_map(|host| threads(rack, host)).collect()
    };
    let before = both(&rack);
    let borrow = ["borrow", "alpha/nvme0", "--for", "beta", "--isolation", isolation];
    let lease: Lease = serde_json::from_value(rack.json(&borrow)).unwrap();
    let mut drive = open(&lease);
    drive.read(0, &mut [0; 4096]).unwrap();
    let engines: Vec<PathBuf> = engines.iter().map(|host| engine(&rack, host, "nvme0")).collect();
    for engine in &engines {
        at_rest(engine);
    }
    let mut watched = both(&rack);
    watched.retain(|task, _| engines.contains(task) || !before.contains_key(task));
    assert!(watched.len() > engines.len(), "the nodes have no thread for the lease: {watched:?}");
    let rested: Vec<_> = watched.keys().map(|task| at_rest(task)).collect();
    std::thread::sleep(Duration::from_secs(10));
    let woken: Vec<_> = watched
        .iter()
        .zip(&rested)
        .filter(|((task, _), rested)| usage(task) != **rested)
        .map(|((_, name), _)| name)
        .collect();
    assert!(woken.is_empty(), "an idle drive's threads woke within 10 s: {woken:?}");
    drive.read(8, &mut [0; 4096]).unwrap();
}

#[test]
fn an_idle_drive_wakes_neither_its_lender_nor_its_borrower() {
    is_not_woken("shared", &["alpha"]);
}

/// Its front has an engine as well, in the borrower's node.
#[test]
fn an_idle_drive_whose_lender_gets_no_memory_wakes_nobody_either() {
    is_not_woken("strict", &["alpha", "beta"]);
}
