//! Several control planes over real etcd, as real processes: clients borrow and return at random while leaders are
//! killed, stopped, woken up and cut off from etcd, and members of etcd are killed and stopped, too. The history of each
//! function must be one that a single control plane can have made, and at the lender there are never two.

#[path = "../support/mod.rs"]
mod support;

mod authority;
mod history;
mod moving;
mod partitions;
mod people;
mod processes;
mod replaced;
mod secrets;
mod standing_still;
mod tls;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use history::{Effect, Operation};
use processes::{Cluster, Part, etcd};
use rackbus_control::api::Lease;
use rackbus_control::{ControlClient, ControlClientError};
use rackbus_seeds::Random;
use rustix::process::Signal;
use support::{PATIENCE, open};

const RACK: &str = r#"
name = "lab"
[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "1 MiB"
[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "1 MiB"
[hosts.alpha.devices.nvme2]
kind = "nvme"
size = "1 MiB"
[hosts.beta]
[hosts.gamma]
"#;
const CONTESTED: [&str; 2] = ["alpha/nvme0", "alpha/nvme1"];
const KEPT: &str = "alpha/nvme2";
/// How long the faults go on; `RACKBUS_HISTORY_SECONDS` for longer.
const SHORT: Duration = Duration::from_secs(20);
/// Changes of the leader at least, and borrows of each function.
const LEAST_CHANGES: usize = 2;
const LEAST_BORROWS: usize = 3;
/// An operation that takes longer is not known to be done.
const ANSWER: Duration = Duration::from_secs(25);

/// What the clients see.
struct Record {
    begun: Instant,
    operations: Mutex<Vec<(String, Operation)>>,
    lost: AtomicU64,
    over: AtomicBool,
}

impl Record {
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap()
    }

    fn note(&self, function: &str, from: u64, to: Option<u64>, effect: Effect) {
        let operation = Operation { from, to, effect };
        self.operations.lock().unwrap().push((function.to_owned(), operation));
    }
}

/// One client of a host: borrows a function, looks that nobody else writes to it, and returns it.
async fn client(own: ControlClient, host: &'static str, seed: u64, record: Arc<Record>) {
    let mut random = Random(seed);
    while !record.over.load(Ordering::Relaxed) {
        let function = CONTESTED[random.below(CONTESTED.len())];
        let from = record.now();
        let borrowed = tokio::time::timeout(ANSWER, own.borrow(function, host)).await;
        let lease = match borrowed {
            Ok(Ok(lease)) => lease,
            Ok(Err(ControlClientError::Refused(refused))) if refused.code == "held" => {
                record.note(function, from, Some(record.now()), Effect::Held);
                tokio::time::sleep(Duration::from_millis(random.below(40) as u64)).await;
                continue;
            }
            // Nothing is decided while a function is on its way back, or a node is looked for.
            Ok(Err(ControlClientError::Refused(refused)))
                if ["returning", "silent", "queued"].contains(&refused.code.as_str()) =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            unknown => {
                // Nobody who knows of it may get it for a while.
                let lost = 1_000_000 + record.lost.fetch_add(1, Ordering::Relaxed);
                println!(
                    "{:>9} {host}: a borrow of {function} has no outcome: {unknown:?}",
                    record.now()
                );
                record.note(function, from, None, Effect::Borrowed(lost));
                record.note(function, from, None, Effect::Returned(lost));
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        record.note(function, from, Some(record.now()), Effect::Borrowed(lease.lease));
        let hold = Duration::from_millis(random.below(30) as u64);
        let used = lease.clone();
        tokio::task::spawn_blocking(move || use_alone(&used, hold)).await.unwrap();
        give_back(&own, function, &lease, &record).await;
    }
}

/// Writes the lease's number and finds it again: nobody else writes here.
fn use_alone(lease: &Lease, hold: Duration) {
    let mut drive = open(lease);
    let mut block = vec![0; 4096];
    block[..8].copy_from_slice(&lease.lease.to_le_bytes());
    drive.write(0, &block, false).unwrap();
    std::thread::sleep(hold);
    let mut read = vec![0; 4096];
    drive.read(0, &mut read).unwrap();
    assert!(read == block, "lease {} finds what another one wrote", lease.lease);
}

async fn give_back(own: &ControlClient, function: &str, lease: &Lease, record: &Record) {
    let from = record.now();
    match tokio::time::timeout(ANSWER, own.give_back(lease.lease)).await {
        Ok(Ok(_)) => record.note(function, from, Some(record.now()), Effect::Returned(lease.lease)),
        // Its first answer was lost and it was forgotten that it was asked: it is over anyway.
        Ok(Err(ControlClientError::Refused(refused))) if refused.code == "over" => {
            record.note(function, from, Some(record.now()), Effect::Returned(lease.lease));
        }
        unknown => {
            println!("{:>9} a return of {function} has no outcome: {unknown:?}", record.now());
            record.note(function, from, None, Effect::Returned(lease.lease));
        }
    }
}

/// Uses a function all the time; the longest that something took. Whatever happens to the control plane does not
/// happen to this.
fn keep_using(lease: &Lease, record: &Record) -> (Duration, u64) {
    let mut drive = open(lease);
    let mut block = vec![7; 4096];
    drive.write(0, &block, false).unwrap();
    let (mut longest, mut done) = (Duration::ZERO, 0);
    while !record.over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        drive.read(0, &mut block).expect("what is borrowed goes on");
        longest = longest.max(begun.elapsed());
        done += 1;
        std::thread::sleep(Duration::from_millis(2));
    }
    (longest, done)
}

/// How many borrows of a function had an outcome.
fn borrows(operations: &[Operation]) -> usize {
    let is_borrow = |it: &&Operation| matches!(it.effect, Effect::Borrowed(_)) && it.to.is_some();
    operations.iter().filter(is_borrow).count()
}

/// What was asked for a function.
fn operations_of(record: &Record, function: &str) -> Vec<Operation> {
    let operations = record.operations.lock().unwrap();
    operations.iter().filter(|it| it.0 == function).map(|it| it.1).collect()
}

/// One fault after the other, for some time, and then until enough has come of it; how long it took each time until there
/// was another leader.
async fn faults(
    cluster: &mut Cluster,
    record: &Record,
    time: Duration,
    random: &mut Random,
) -> Vec<Duration> {
    let mut changes = Vec::new();
    let mut round = 0;
    let is_enough = |changes: &[Duration]| {
        let borrowed = |function: &str| borrows(&operations_of(record, function)) > LEAST_BORROWS;
        changes.len() >= LEAST_CHANGES && CONTESTED.iter().all(|function| borrowed(function))
    };
    while record.begun.elapsed() < time
        || (!is_enough(&changes) && record.begun.elapsed() < time + PATIENCE)
    {
        let leader = cluster.leader(None).await;
        let fault = if round < 4 { round } else { random.below(5) };
        round += 1;
        let begun = Instant::now();
        println!("{:>9} fault {fault}; {} leads", record.now(), cluster.controls[leader].name);
        match fault {
            0 => {
                cluster.controls[leader].kill();
                cluster.leader(Some(leader)).await;
                changes.push(begun.elapsed());
                cluster.controls[leader].again();
            }
            // One that wakes up and believes that it leads.
            1 => {
                cluster.controls[leader].signal(Signal::STOP);
                cluster.leader(Some(leader)).await;
                changes.push(begun.elapsed());
                tokio::time::sleep(Duration::from_millis(random.below(1500) as u64)).await;
                cluster.controls[leader].signal(Signal::CONT);
            }
            2 => {
                let member = random.below(cluster.etcd.len());
                cluster.etcd[member].kill();
                tokio::time::sleep(Duration::from_millis(500 + random.below(1500) as u64)).await;
                cluster.etcd[member].again();
            }
            3 => {
                let member = random.below(cluster.etcd.len());
                cluster.etcd[member].signal(Signal::STOP);
                tokio::time::sleep(Duration::from_millis(500 + random.below(2500) as u64)).await;
                cluster.etcd[member].signal(Signal::CONT);
            }
            // Two of three: nothing can be decided meanwhile.
            _ => {
                cluster.etcd[..2].iter().for_each(|it| it.signal(Signal::STOP));
                tokio::time::sleep(Duration::from_millis(random.below(5000) as u64)).await;
                cluster.etcd[..2].iter().for_each(|it| it.signal(Signal::CONT));
            }
        }
        tokio::time::sleep(Duration::from_millis(random.below(1500) as u64)).await;
    }
    changes
}

/// Has clients borrow and return at random while `disturb` does what it does, and looks whether a single control plane can
/// have done what they saw. `disturb` says how long it took each time until another led.
async fn check_while(
    cluster: &mut Cluster,
    seed: u64,
    disturb: impl AsyncFnOnce(&mut Cluster, &Record, &mut Random) -> Vec<Duration>,
) {
    cluster.leader(None).await;
    for host in ["alpha", "beta", "gamma"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    let record = Arc::new(Record {
        begun: Instant::now(),
        operations: Mutex::default(),
        lost: AtomicU64::new(0),
        over: AtomicBool::new(false),
    });
    let beta = cluster.nodes[1].client();
    let kept = beta.borrow(KEPT, "beta").await.unwrap();
    let keeps = record.clone();
    let keeping = {
        let kept = kept.clone();
        tokio::task::spawn_blocking(move || keep_using(&kept, &keeps))
    };
    let mut random = Random(seed);
    let clients: Vec<_> = [("beta", 1), ("gamma", 2), ("gamma", 2)]
        .into_iter()
        .map(|(host, node)| {
            let own = cluster.nodes[node].client();
            tokio::spawn(client(own, host, random.next(), record.clone()))
        })
        .collect();
    let changes = disturb(cluster, &record, &mut random).await;
    record.over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let (longest, done) = keeping.await.unwrap();
    let after = beta.lease(kept.lease).await.unwrap();
    assert_eq!((after.epoch, after.reason), (kept.epoch, None), "what was borrowed all the time");
    for function in CONTESTED {
        let own = operations_of(&record, function);
        let borrows = borrows(&own);
        println!("{function}: {} operations, {borrows} borrows", own.len());
        assert!(borrows > LEAST_BORROWS, "nothing was tried");
        if let Err(error) = history::check(&own) {
            panic!("{function}, seed {seed}: {error}\n{}", logs(cluster));
        }
    }
    println!("until another leads: {changes:?}; {done} reads meanwhile, the longest {longest:?}");
    assert!(changes.len() >= LEAST_CHANGES && done > 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_several_control_planes_do_one_could_have_done() {
    let Some(program) = etcd() else { return };
    let seconds = std::env::var("RACKBUS_HISTORY_SECONDS").ok().and_then(|it| it.parse().ok());
    let time = seconds.map_or(SHORT, Duration::from_secs);
    let seed = std::env::var("RACKBUS_SEED").ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    let mut cluster = Cluster::start(&program, 3, 3, RACK);
    let disturb = async |cluster: &mut Cluster, record: &Record, random: &mut Random| {
        faults(cluster, record, time, random).await
    };
    check_while(&mut cluster, seed, disturb).await;
}

fn logs(cluster: &Cluster) -> String {
    let parts = cluster.controls.iter().chain(&cluster.nodes);
    parts.map(|part: &Part| format!("--- {}\n{}", part.name, part.log())).collect()
}
