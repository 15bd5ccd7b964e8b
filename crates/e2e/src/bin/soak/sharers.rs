//! Programs that take turns on a drive.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rackbus_e2e::soak::{DriveUser, LentDrive};
use rackbus_e2e::{CheckFailure, Result};
use rackbus_seeds::Random;
use serde_json::Value;

use crate::{HOSTS, SHARED_DRIVE, Soak};

/// Joins those who take turns, uses the drive in each of its turns, and leaves, until it is told to stop.
pub fn work(soak: &Soak, number: usize, mut random: Random) -> Result<()> {
    let mut user = DriveUser::new(number, random.fork());
    while !soak.load.stop.load(Ordering::Relaxed) {
        let host = HOSTS[random.below(HOSTS.len())];
        let join =
            ["share", "join", SHARED_DRIVE, "--for", host, "--slice", "400ms", "--grace", "1s"];
        let Ok(joined) = soak.rack.json(&join) else {
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let share = joined["share"].as_u64().unwrap_or(0);
        let used = take_turns(soak, share, 1 + random.below(8), &mut user);
        leave(soak, share)?;
        used?;
    }
    Ok(())
}

/// Uses the drive in so many turns, or until the share is lost.
fn take_turns(soak: &Soak, share: u64, turns: usize, user: &mut DriveUser) -> Result<()> {
    let mut used = 0;
    let mut last = None;
    while used < turns && !soak.load.stop.load(Ordering::Relaxed) {
        let Ok(shares) = soak.rack.json(&["share", "list"]) else { continue };
        let own = shares.as_array().into_iter().flatten().find(|it| it["share"] == share);
        let Some(own) = own else { return Ok(()) };
        // One that is asked to release the drive has done so: it is open only while something is done with it.
        let Some(lease) = own["lease"].as_u64().filter(|_| own["state"] == "turn") else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let Some(lent) = lent(soak, lease) else { continue };
        if last.replace(lease) != Some(lease) {
            used += 1;
            soak.turns.fetch_add(1, Ordering::Relaxed);
            soak.load.leases.fetch_add(1, Ordering::Relaxed);
        }
        soak.load.use_drive(&soak.rack, SHARED_DRIVE, &lent, 30, user)?;
    }
    Ok(())
}

/// The lease that a turn is.
fn lent(soak: &Soak, lease: u64) -> Option<LentDrive> {
    let leases: Value = soak.rack.json(&["leases"]).ok()?;
    let own = leases.as_array()?.iter().find(|it| it["lease"] == lease)?;
    (own["stage"] == "active").then(|| LentDrive::of(own))
}

/// Leaves, as soon as the control plane answers.
fn leave(soak: &Soak, share: u64) -> Result<()> {
    loop {
        match soak.rack.json(&["share", "leave", &share.to_string()]) {
            Ok(_) => return Ok(()),
            Err(CheckFailure(why)) if why.contains("no share") => return Ok(()),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}
