//! Lone reads of a drive that is lent through a rack, with nothing pinned: a user's normal case. They are in a
//! program of their own, so that the processors are theirs while it measures.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rackbus_control::api::Lease;
use rackbus_driver::Drive;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use support::{Rack, open};

const RACK: &str = "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\n\
                    size = \"16 MiB\"\n[hosts.beta]\n";
const STARTS: usize = 20;
/// Reads of one start, in batches whose median counts: what else the machine does hits some of them.
const BATCHES: usize = 25;
const BATCH: u32 = 100;

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

/// How long a read of 4 KiB takes with nothing else in flight: the median of the batches.
fn lone_read(drive: &mut Drive) -> Duration {
    let mut block = vec![0; 4096];
    let mut batches: Vec<Duration> = (0..BATCHES)
        .map(|_| {
            let begun = Instant::now();
            (0..BATCH).for_each(|nth| drive.read(u64::from(nth) * 8, &mut block).unwrap());
            begun.elapsed() / BATCH
        })
        .collect();
    batches.sort();
    batches[BATCHES / 2]
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

/// Lone reads of drives that are borrowed one after the other, with nothing pinned and then pinned.
fn starts(rack: &Rack) -> (Vec<Duration>, Vec<Duration>) {
    let everywhere = sched_getaffinity(None).unwrap();
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| everywhere.is_set(*cpu));
    let first = processors.next().unwrap();
    let last = processors.next_back().unwrap_or(first);
    let (mut free, mut pinned) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        let lease = rack.borrow("alpha/nvme0", "beta");
        let mut drive = open(&lease);
        free.push(lone_read(&mut drive));
        let engine = engine(rack, "alpha", "nvme0");
        let thread: i32 = engine.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let thread = Pid::from_raw(thread);
        sched_setaffinity(None, &pinned_to(first)).unwrap();
        sched_setaffinity(thread, &pinned_to(last)).unwrap();
        pinned.push(lone_read(&mut drive));
        sched_setaffinity(None, &everywhere).unwrap();
        sched_setaffinity(thread, &everywhere).unwrap();
        drop(drive);
        rack.give_back(&lease);
    }
    free.sort();
    pinned.sort();
    (free, pinned)
}

/// The figures themselves are rows of `make bench`, which asks for twice the pinned time. Here, where what runs is not
/// optimized, what counts is how many starts are of the other kind: with engine and driver on one processor, and asleep
/// at each turn, a read takes ten to twenty times as long, and it took that in most starts. What else the machine does
/// makes single ones slow, pinned or not, and while it is busy many: so there are five rounds, of which one counts, and a
/// quarter of the starts may be slow.
#[test]
fn lone_reads_are_as_fast_with_nothing_pinned() {
    if std::thread::available_parallelism().is_ok_and(|count| count.get() < 2) {
        eprintln!("skipped: with one processor there is nothing to choose");
        return;
    }
    let rack = Rack::up(RACK);
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let (free, pinned) = starts(&rack);
        let slow = |reads: &[Duration]| {
            reads.iter().filter(|read| **read > 6 * pinned[STARTS / 2]).count()
        };
        if slow(&free) <= STARTS / 4 + slow(&pinned) {
            return;
        }
        rounds.push((free, pinned));
    }
    panic!("lone reads with nothing pinned, and pinned, in five rounds: {rounds:?}");
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
