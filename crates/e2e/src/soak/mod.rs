//! What the soaks share: programs that borrow drives, use them by a driver in user space and return them, as long as
//! they are told to, and what they know together of each block. What the rack is made of, and what happens to it, is
//! each soak's own.

mod census;
mod disturb;
mod model;
mod program;
mod stuck;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveError, DriveOptions};
use rackbus_seeds::Random;
use serde_json::Value;

use crate::{CheckFailure, RackProcesses, Result, ensure};

pub use census::{Census, check_census};
pub use disturb::Disturbances;
pub use model::{BLOCK, BLOCKS, DriveModel, content};
pub use program::run_as_program;
pub use stuck::LeasesUnderWay;

/// How long a lease may go on after its drive has failed: longer than the rack needs to notice the loss of a host or a link,
/// with room for a busy machine.
const ENDS: Duration = Duration::from_secs(30);
/// How long the control plane may fail to answer. Disturbances keep it from that for some seconds at most.
const UNANSWERED: Duration = Duration::from_secs(120);

/// Programs that use drives at the same time, and what they have done.
#[derive(Debug)]
pub struct DriveLoad {
    /// The drives, as `HOST/DEVICE`.
    functions: &'static [&'static str],
    /// What each drive must hold.
    drives: Vec<Mutex<DriveModel>>,
    /// Set when everybody is to come to an end.
    pub stop: AtomicBool,
    /// Operations that were begun.
    pub operations: AtomicU64,
    /// Leases that were obtained.
    pub leases: AtomicU64,
    /// Writes that were acknowledged, and reads that were checked, of each drive.
    done: Vec<[AtomicU64; 2]>,
    /// Leases that could not be returned yet.
    owed: Mutex<BTreeSet<u64>>,
    /// Programs that wait for the end of a lease whose drive has failed.
    awaiting: AtomicUsize,
}

/// A drive under a lease.
#[derive(Debug)]
pub struct LentDrive {
    /// The lease by which it is held.
    pub lease: u64,
    /// The lease's fencing epoch: data of a newer one may have replaced what this lease wrote.
    pub epoch: u64,
    /// The vfio-user socket at which its function is used.
    pub socket: PathBuf,
}

/// A program that uses drives: what it writes, nobody else writes.
#[derive(Debug)]
pub struct DriveUser {
    number: u64,
    value: u64,
    random: Random,
}

impl DriveUser {
    /// The program with this number, below 64, which no other one has.
    #[must_use]
    pub fn new(number: usize, random: Random) -> DriveUser {
        DriveUser { number: number as u64, value: 0, random }
    }

    fn next_value(&mut self) -> u64 {
        self.value += 1;
        self.value * 64 + self.number
    }
}

impl LentDrive {
    /// What `rackbus borrow --json` says.
    #[must_use]
    pub fn of(lease: &Value) -> LentDrive {
        let field = |name: &str| lease[name].as_u64().unwrap_or(0);
        let socket = PathBuf::from(lease["socket"].as_str().unwrap_or_default());
        LentDrive { lease: field("lease"), epoch: field("epoch"), socket }
    }
}

impl DriveLoad {
    /// Nothing has been done yet with these drives, which hold zeroes.
    #[must_use]
    pub fn new(functions: &'static [&'static str]) -> DriveLoad {
        DriveLoad {
            functions,
            drives: functions.iter().map(|_| Mutex::default()).collect(),
            stop: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            leases: AtomicU64::new(0),
            done: functions.iter().map(|_| Default::default()).collect(),
            owed: Mutex::default(),
            awaiting: AtomicUsize::new(0),
        }
    }

    /// Borrows, uses and returns drives until it is told to stop, as the program with this number. `borrow` asks for one,
    /// for any host. What is refused or lost is tried again; what must not be is a failure.
    ///
    /// # Errors
    /// When a drive holds what it must not.
    pub fn work(
        &self,
        number: usize,
        mut random: Random,
        rack: &RackProcesses,
        mut borrow: impl FnMut(&str, &mut Random) -> Result<Value>,
    ) -> Result<()> {
        let mut user = DriveUser::new(number, random.fork());
        while !self.stop.load(Ordering::Relaxed) {
            self.return_owed(rack);
            let function = self.functions[random.below(self.functions.len())];
            let Ok(lease) = borrow(function, &mut random) else { continue };
            self.leases.fetch_add(1, Ordering::Relaxed);
            let lent = LentDrive::of(&lease);
            let count = 1 + random.below(400);
            let used = self.use_drive(rack, function, &lent, count, &mut user);
            self.owe(lent.lease);
            used?;
        }
        Ok(())
    }

    /// Uses a drive under one lease, until that is lost or so many operations were done.
    ///
    /// # Errors
    /// When it holds what it must not, or fails although the lease goes on.
    pub fn use_drive(
        &self,
        rack: &RackProcesses,
        function: &str,
        lent: &LentDrive,
        count: usize,
        user: &mut DriveUser,
    ) -> Result<()> {
        let drive = self.functions.iter().position(|it| *it == function);
        let drive = drive.ok_or_else(|| CheckFailure(format!("{function} is no drive")))?;
        let options = DriveOptions { depth: 4, data: 64 << 10 };
        let leases = [lent.lease];
        match Drive::open(&lent.socket, options) {
            Ok(mut opened) => match self.operate(&mut opened, drive, lent.epoch, count, user)? {
                Ok(()) => Ok(()),
                Err(error) => self.await_end(rack, function, &leases, &error, || false),
            },
            // Its lender may be out of reach for a while, without being lost.
            Err(error) => self.await_end(rack, function, &leases, &error, || {
                Drive::open(&lent.socket, options).is_ok()
            }),
        }
    }

    /// Does so many operations, or as many as there are until somebody else has the drive or one fails.
    fn operate(
        &self,
        opened: &mut Drive,
        drive: usize,
        epoch: u64,
        count: usize,
        user: &mut DriveUser,
    ) -> Result<std::result::Result<(), DriveError>> {
        for _ in 0..count {
            let block = user.random.below(BLOCKS);
            let lba = (block * BLOCK / 512) as u64;
            self.operations.fetch_add(1, Ordering::Relaxed);
            let failed = match user.random.below(100) {
                0..3 => opened.flush(),
                3..50 => {
                    let written = user.next_value();
                    if !self.model(drive).begin(epoch, block, written) {
                        break;
                    }
                    let fua = user.random.chance(10);
                    opened.write(lba, &content(block, written), fua).map(|()| {
                        self.model(drive).written(epoch, block, written);
                        self.done[drive][0].fetch_add(1, Ordering::Relaxed);
                    })
                }
                _ => {
                    if !self.is_current(drive, epoch) {
                        break;
                    }
                    let mut data = vec![0; BLOCK];
                    let read = opened.read(lba, &mut data);
                    if read.is_ok() {
                        self.check(drive, epoch, block, &data, "")?;
                        self.done[drive][1].fetch_add(1, Ordering::Relaxed);
                    }
                    read
                }
            };
            if failed.is_err() {
                return Ok(failed);
            }
        }
        Ok(Ok(()))
    }

    /// A drive has failed: its lease, or another one that it was used with, has ended, or does so soon; or what failed works
    /// when it is tried `again`. One that fails while all go on is a defect. Meanwhile nothing more is to
    /// [happen](DriveLoad::awaits_end) to the rack, which could end a lease for another reason.
    ///
    /// # Errors
    /// When all leases go on, or nobody can say whether they do.
    pub fn await_end(
        &self,
        rack: &RackProcesses,
        function: &str,
        leases: &[u64],
        error: &dyn std::fmt::Display,
        again: impl Fn() -> bool,
    ) -> Result<()> {
        self.awaiting.fetch_add(1, Ordering::Relaxed);
        let outcome = await_end(rack, function, leases, error, again);
        self.awaiting.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    /// Whether somebody waits for the end of a lease whose drive has failed.
    pub fn awaits_end(&self) -> bool {
        self.awaiting.load(Ordering::Relaxed) > 0
    }

    /// Whether nobody with a newer epoch has come to the drive with this number since.
    pub fn is_current(&self, drive: usize, epoch: u64) -> bool {
        self.model(drive).is_current(epoch)
    }

    /// A block was read: it holds what it must. `how` is said where it does not.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(
        &self,
        drive: usize,
        epoch: u64,
        block: usize,
        data: &[u8],
        how: &str,
    ) -> Result<()> {
        let wrong = |error: String| {
            CheckFailure(format!("{}, epoch {epoch}{how}: {error}", self.functions[drive]))
        };
        self.model(drive).read(epoch, block, data).map_err(wrong)
    }

    /// The lease is to be returned by whoever comes next, as soon as it can be.
    pub fn owe(&self, lease: u64) {
        lock(&self.owed).insert(lease);
    }

    /// Whether every lease was returned.
    pub fn owes_nothing(&self) -> bool {
        lock(&self.owed).is_empty()
    }

    /// Tries to return what could not be returned before.
    pub fn return_owed(&self, rack: &RackProcesses) {
        let owed: Vec<u64> = lock(&self.owed).iter().copied().collect();
        for lease in owed {
            let returned = rack.json(&["return", &lease.to_string()]);
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

    /// Every block of every drive holds what was acknowledged, and each drive was written and read.
    ///
    /// # Errors
    /// What is not so.
    pub fn verify(&self, rack: &RackProcesses, host: &str) -> Result<()> {
        for (drive, function) in self.functions.iter().enumerate() {
            let [written, read] =
                self.done[drive].each_ref().map(|count| count.load(Ordering::Relaxed));
            ensure!(
                written > 0 && read > 0,
                "{function}: {written} writes and {read} reads succeeded"
            );
            let lent = LentDrive::of(&rack.json(&["borrow", function, "--for", host])?);
            let mut opened = Drive::open(&lent.socket, DriveOptions::default())?;
            for block in 0..BLOCKS {
                let mut data = vec![0; BLOCK];
                opened.read((block * BLOCK / 512) as u64, &mut data)?;
                self.check(drive, lent.epoch, block, &data, ", at the end")?;
            }
            drop(opened);
            rack.give_back(lent.lease)?;
        }
        Ok(())
    }

    fn model(&self, drive: usize) -> MutexGuard<'_, DriveModel> {
        lock(&self.drives[drive])
    }
}

/// Every lease that is over says why, and an event tells of it.
///
/// # Errors
/// For the first one of which that is not so.
pub fn check_reasons(rack: &RackProcesses) -> Result<()> {
    let leases = rack.json(&["leases", "--all"])?;
    let events = rack.json(&["events", "--last", "10000"])?;
    let all = |value: &Value| value.as_array().cloned().unwrap_or_default();
    unexplained(&all(&leases), &all(&events))
}

/// Refuses a lease that is over without a reason, or whose end no event tells with its reason.
fn unexplained(leases: &[Value], events: &[Value]) -> Result<()> {
    let mut told = BTreeMap::<u64, Vec<&str>>::new();
    for event in events {
        let (lease, text) = (event["lease"].as_u64(), event["text"].as_str());
        lease.into_iter().for_each(|lease| told.entry(lease).or_default().extend(text));
    }
    // Events are kept for a while only.
    let first = told.keys().next().copied().unwrap_or(0);
    for lease in leases {
        let number = lease["lease"].as_u64().unwrap_or(0);
        let reason = lease["reason"].as_str().filter(|reason| !reason.is_empty());
        let Some(reason) = reason else {
            return Err(CheckFailure(format!("lease {number} is over without a reason: {lease}")));
        };
        // A turn that was over before it had begun took nothing from anybody.
        let turn = lease["share"].is_u64() && lease["returned"] == true;
        let explained =
            told.get(&number).is_some_and(|texts| texts.iter().any(|text| text.contains(reason)));
        ensure!(turn || number <= first || explained, "no event tells why {lease} is over");
    }
    Ok(())
}

/// Whether all of a rack's functions, so many, are offered, nobody has any, and none reaches anything: so the node of its
/// host says, which is asked on the machine that `on` names.
pub fn is_settled<'r>(
    rack: &RackProcesses,
    functions: usize,
    on: impl Fn(&str) -> &'r RackProcesses,
) -> Option<()> {
    let devices = rack.json(&["devices"]).ok()?;
    let offered = devices.as_array()?.iter().filter(|it| it["state"] == "offered");
    let offered: Vec<&str> = offered.filter_map(|it| it["function"].as_str()).collect();
    let leases = rack.json(&["leases"]).ok()?;
    let reaches_nothing = |function: &&str| {
        let host = function.split('/').next().unwrap_or_default();
        let reached = on(host).json(&["reach", function]).ok();
        reached.is_some_and(|reached| reached.as_array().is_some_and(Vec::is_empty))
    };
    let is_settled = offered.len() == functions && leases.as_array()?.is_empty();
    (is_settled && offered.iter().all(reaches_nothing)).then_some(())
}

/// Locks what no panic leaves half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn await_end(
    rack: &RackProcesses,
    function: &str,
    leases: &[u64],
    error: &dyn std::fmt::Display,
    again: impl Fn() -> bool,
) -> Result<()> {
    let (mut begun, mut answered) = (Instant::now(), Instant::now());
    loop {
        let active = |lease: &u64, all: &Value| {
            let mut all = all.as_array().into_iter().flatten();
            all.any(|it| it["lease"] == *lease && it["stage"] == "active")
        };
        let asked = Instant::now();
        match rack.json(&["leases"]) {
            Ok(all) if !leases.iter().all(|lease| active(lease, &all)) => return Ok(()),
            Ok(_) => {
                answered = Instant::now();
                let time = begun.elapsed();
                ensure!(
                    time < ENDS,
                    "{function} failed, and after {} s the leases {leases:?} are active: {error}",
                    time.as_secs()
                );
            }
            Err(unanswered) => {
                // Nothing is known of them meanwhile.
                begun += asked.elapsed();
                ensure!(
                    answered.elapsed() < UNANSWERED,
                    "{function} failed: {error}; {unanswered}"
                );
            }
        }
        if again() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_end_of_each_lease_is_told_by_an_event_with_its_reason() {
        let lease = |number: u64, reason: &str| json!({"lease": number, "reason": reason});
        let event = |number: u64, text: &str| json!({"lease": number, "text": text});
        let leases = [lease(3, "returned"), lease(4, "beta is lost")];
        let begun =
            [event(2, "alpha/d0 is offered"), event(3, "d0 is lent"), event(4, "d1 is lent")];
        let ends = [event(3, "the lease ended: returned"), event(4, "it ended: beta is lost")];
        assert!(unexplained(&leases, &[&begun[..], &ends[..]].concat()).is_ok());
        assert!(unexplained(&leases, &[&begun[..], &ends[..1]].concat()).is_err());
        assert!(unexplained(&leases, &[&begun[..], &ends[1..]].concat()).is_err());
        assert!(unexplained(&[lease(4, "")], &ends).is_err());
        // Of what is older than all events, none can be asked for.
        assert!(unexplained(&[lease(1, "returned")], &begun).is_ok());
    }
}
