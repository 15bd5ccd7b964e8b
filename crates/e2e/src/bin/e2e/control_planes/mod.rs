//! Three control planes on three machines, with etcd over TLS, as the book's chapter sets it up, under a drive in use: leaders are
//! cut off, wholly, in one direction, or with one host; processes are killed.
//!
//! etcd's leader and the rack's are on one machine at first, so that both are lost at once.

mod cluster;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::{CheckFailure, Result, ensure};
use serde_json::Value;

use cluster::{CONTROLS, ControlCluster, HOSTS};

/// What is borrowed all the time, and what is borrowed and returned.
const KEPT: &str = "alpha/nvme0";
const TRIED: &str = "alpha/nvme1";
/// How long it may take until another control plane leads.
const NEXT_LEADER: Duration = Duration::from_secs(5);
/// The same where the members of etcd hear from the old one for a while, until it has noticed that it hears from nobody.
const NEXT_LEADER_HEARD: Duration = Duration::from_secs(7);
/// How often the drive is used at least while nobody leads, which takes a second or more: it waits for no leader.
const USED_MEANWHILE: u64 = 10;

/// Whatever happens to the control planes, one leads within seconds, what is borrowed goes on, and nobody else gets it.
pub fn survive(_dir: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        println!("           left out: machines in namespaces take root");
        return Ok(());
    }
    let cluster = ControlCluster::start()?;
    let kept = cluster.on("beta")?.json(&["borrow", KEPT, "--for", "beta"])?;
    let mut trial = Trial { load: DriveUse::start(&kept)?, cluster, kept };
    let outcome = trial.run();
    outcome.map_err(|error| CheckFailure(format!("{error}{}", trial.cluster.logs())))
}

/// What is tried, and what stays as it is meanwhile.
struct Trial {
    load: DriveUse,
    cluster: ControlCluster,
    /// The lease of what is borrowed all the time.
    kept: Value,
}

impl Trial {
    fn run(&mut self) -> Result<()> {
        self.cut_off()?;
        self.killed()?;
        self.with_one_host()?;
        self.one_way("nothing that it sends arrives", |cluster, leader| {
            others(leader).iter().try_for_each(|it| cluster.cable(&["cut", leader, "--to", it]))
        })?;
        self.one_way("nothing that is sent to it arrives", |cluster, leader| {
            others(leader).iter().try_for_each(|it| cluster.cable(&["cut", it, "--to", leader]))
        })?;
        let leader = self.cluster.leader(&[])?;
        self.load.end()?;
        let lease = self.kept["lease"].to_string();
        self.cluster.on("beta")?.json(&["return", &lease])?;
        let left = self.cluster.on(leader)?.json(&["leases"])?;
        ensure!(left.as_array().is_some_and(Vec::is_empty), "leases are left over: {left}");
        Ok(())
    }

    /// The leader's cable is pulled. What it is asked for meanwhile, it does not do, now or later.
    fn cut_off(&mut self) -> Result<()> {
        let old = self.cluster.leader(&[])?;
        let term = self.cluster.status(old)?["term"].clone();
        let begun = Instant::now();
        self.cluster.cable(&["cut", old])?;
        // It believes that it leads, for a while.
        let lease = self.kept["lease"].to_string();
        let asked = [
            self.cluster.ask(old, &format!("return {lease}"))?,
            self.cluster.ask(old, &format!("borrow {TRIED} --for alpha"))?,
        ];
        let new = self.next_leader("its cable is pulled", old, begun, NEXT_LEADER)?;
        let later = self.cluster.status(new)?["term"].clone();
        ensure!(later.as_u64() > term.as_u64(), "term {later} is not later than {term}");
        self.lends(new)?;
        self.cluster.wait(old, "without the lead", |status| status["leads"] == false)?;
        for asked in asked {
            let (had_ended, said) = asked.end()?;
            ensure!(!had_ended, "one that was cut off has done it: {said}");
        }
        self.cluster.mend()?;
        self.follows(old)?;
        self.lends(new)
    }

    /// A member of etcd and its control plane, which leads, are killed at once, and come back.
    fn killed(&mut self) -> Result<()> {
        let old = self.cluster.leader(&[])?;
        let begun = Instant::now();
        self.cluster.kill(old, "control")?;
        self.cluster.kill(old, "etcd")?;
        let new = self.next_leader("it and etcd are killed", old, begun, NEXT_LEADER)?;
        self.lends(new)?;
        self.cluster.begin_etcd(old)?;
        self.cluster.begin_control(old)?;
        self.follows(old)?;
        self.lends(new)
    }

    /// The leader and the lender are cut off from the other control planes: the lender serves on, does nothing that the old leader
    /// cannot decide, and obeys the new one afterwards.
    fn with_one_host(&mut self) -> Result<()> {
        let old = self.cluster.leader(&[])?;
        let before = self.cluster.status(old)?["term"].as_u64();
        let majority: Vec<&str> = CONTROLS.into_iter().filter(|it| *it != old).collect();
        self.cluster.part("alpha", &majority)?;
        self.cluster.part(old, &["beta"])?;
        let begun = Instant::now();
        self.cluster.part(old, &majority)?;
        let new = self.next_leader("it and a host are cut off", old, begun, NEXT_LEADER)?;
        self.cluster.wait(old, "without the lead", |status| status["leads"] == false)?;
        let asked = [
            self.cluster.ask("alpha", &format!("borrow {KEPT} --for alpha"))?,
            self.cluster.ask("alpha", &format!("borrow {TRIED} --for alpha"))?,
            self.cluster.ask("beta", &format!("borrow {TRIED} --for beta"))?,
        ];
        let done = self.load.done();
        self.cluster.on("beta")?.wait("the drive is used", NEXT_LEADER, |_| {
            (self.load.done() > done + 100).then_some(())
        })?;
        for asked in asked {
            let (had_ended, said) = asked.end()?;
            ensure!(!had_ended, "nobody could decide that: {said}");
        }
        self.cluster.mend()?;
        self.follows(old)?;
        self.cluster.on(new)?.wait_hosts(&HOSTS)?;
        self.lends(new)?;
        let file = self.cluster.folder("alpha").join("state/alpha/control.term");
        let term = self.cluster.agreed()?["term"].as_u64();
        let noted = std::fs::read_to_string(&file)?;
        let obeyed = noted.trim().parse::<u64>().ok();
        let is_obeyed = before < obeyed && term.is_some() && obeyed <= term;
        ensure!(is_obeyed, "alpha obeys term {noted}, not {term:?}, and before {before:?}");
        Ok(())
    }

    /// Packets of the leader's are lost in one direction.
    fn one_way(
        &mut self,
        what: &str,
        cut: impl Fn(&ControlCluster, &str) -> Result<()>,
    ) -> Result<()> {
        let old = self.cluster.leader(&[])?;
        let begun = Instant::now();
        cut(&self.cluster, old)?;
        let new = self.next_leader(what, old, begun, NEXT_LEADER_HEARD)?;
        self.cluster.wait(old, "without the lead", |status| status["leads"] == false)?;
        self.lends(new)?;
        self.cluster.mend()?;
        self.follows(old).map(drop)
    }

    /// Waits until another one leads, and says how long that took.
    fn next_leader(
        &self,
        what: &str,
        old: &str,
        begun: Instant,
        limit: Duration,
    ) -> Result<&'static str> {
        let before = self.load.done();
        let new = self.cluster.leader(&[old])?;
        let (took, used) = (begun.elapsed(), self.load.done() - before);
        println!("           {old} leads, and {what}: {new} after {} ms", took.as_millis());
        ensure!(took < limit, "{what}: {new} leads only after {took:?}");
        ensure!(used >= USED_MEANWHILE, "{what}: the drive was used {used} times meanwhile");
        Ok(new)
    }

    /// A drive is borrowed and returned, and the other one stays where it is: with one lease, which is as it was.
    fn lends(&self, leader: &str) -> Result<()> {
        let beta = self.cluster.on("beta")?;
        let (lease, _) = beta.borrow(TRIED, "beta")?;
        beta.give_back(lease)?;
        let leases = self.cluster.on(leader)?.json(&["leases"])?;
        let of = |it: &&Value| it["function"] == KEPT;
        let kept: Vec<&Value> = leases.as_array().into_iter().flatten().filter(of).collect();
        let is_kept =
            |it: &&Value| it["lease"] == self.kept["lease"] && it["epoch"] == self.kept["epoch"];
        ensure!(kept.len() == 1 && kept.iter().all(is_kept), "{KEPT} is not as it was: {leases}");
        let refused = self.cluster.on("alpha")?.refused(&["borrow", KEPT, "--for", "alpha"])?;
        ensure!(refused.contains("beta"), "the refusal does not name the holder: {refused}");
        self.load.check()
    }

    /// One that led is back: one leads, in a later term than before, and the others follow. Which one that is, a busy machine may
    /// have changed once more.
    fn follows(&self, old: &str) -> Result<Value> {
        self.cluster.wait(old, "back", |status| {
            status["members"].as_array().is_some_and(|all| all.len() == CONTROLS.len())
        })?;
        self.cluster.agreed()
    }
}

/// All machines but this one.
fn others(machine: &str) -> Vec<&'static str> {
    CONTROLS.into_iter().chain(HOSTS).filter(|it| *it != machine).collect()
}

/// A drive that is written and read all the time.
struct DriveUse {
    counted: Arc<(AtomicU64, AtomicBool)>,
    worker: Option<JoinHandle<Result<Duration>>>,
}

impl DriveUse {
    /// Uses the drive of a lease.
    fn start(lease: &Value) -> Result<DriveUse> {
        let socket = lease["socket"].as_str().map(PathBuf::from);
        let socket = socket.ok_or_else(|| CheckFailure(format!("no socket in {lease}")))?;
        let drive = Drive::open(&socket, DriveOptions::default())?;
        let counted = Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
        let own = counted.clone();
        let worker = std::thread::spawn(move || use_drive(drive, &own));
        Ok(DriveUse { counted, worker: Some(worker) })
    }

    /// How many operations were done.
    fn done(&self) -> u64 {
        self.counted.0.load(Ordering::Relaxed)
    }

    /// It has not failed yet.
    fn check(&self) -> Result<()> {
        let is_over = self.worker.as_ref().is_none_or(JoinHandle::is_finished);
        ensure!(!is_over, "what is borrowed does not go on");
        Ok(())
    }

    /// Has the user end, and prints how long its operations took.
    fn end(&mut self) -> Result<()> {
        self.counted.1.store(true, Ordering::Relaxed);
        let worker = self.worker.take().ok_or_else(|| CheckFailure("it has ended".to_owned()))?;
        let longest =
            worker.join().map_err(|_| CheckFailure("the drive's user panicked".to_owned()))??;
        println!("           {} operations meanwhile, the longest {longest:?}", self.done());
        Ok(())
    }
}

/// Writes blocks and finds them again; the longest that one of these took.
fn use_drive(mut drive: Drive, counted: &(AtomicU64, AtomicBool)) -> Result<Duration> {
    const BLOCKS: u64 = 64;
    let (mut longest, mut block, mut read) = (Duration::ZERO, vec![0; 4096], vec![0; 4096]);
    for nth in 0.. {
        if counted.1.load(Ordering::Relaxed) {
            break;
        }
        block[..8].copy_from_slice(&u64::to_le_bytes(nth));
        let begun = Instant::now();
        drive.write(nth % BLOCKS * 8, &block, false)?;
        longest = longest.max(begun.elapsed());
        let begun = Instant::now();
        drive.read(nth % BLOCKS * 8, &mut read)?;
        longest = longest.max(begun.elapsed());
        ensure!(read == block, "block {nth} is another one");
        counted.0.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(longest)
}
