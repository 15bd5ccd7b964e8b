//! A program that borrows two drives whole or not at all, and uses both.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_e2e::soak::{DriveUser, LentDrive};
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_seeds::Random;

use crate::{LONGEST_UNDER_WAY, Soak};

/// The composition of the rack file.
const NAME: &str = "pair";
/// How many functions it has.
const FUNCTIONS: usize = 2;

/// Borrows the composition, uses and returns it, until it is told to stop.
pub fn work(soak: &Soak, number: usize, mut random: Random) -> Result<()> {
    let mut user = DriveUser::new(number, random.fork());
    while !soak.load.stop.load(Ordering::Relaxed) {
        let Ok(borrowed) = soak.rack.json(&["composition", "borrow", NAME, "--wait=2s"]) else {
            wait_free(soak)?;
            continue;
        };
        let leases = borrowed["leases"].as_array().cloned().unwrap_or_default();
        // What is lost in between is said by the leases' stages.
        let ended = leases.iter().any(|lease| lease["stage"] != "active");
        ensure!(leases.len() == FUNCTIONS || ended, "{NAME} is borrowed in part: {borrowed}");
        soak.whole.fetch_add(1, Ordering::Relaxed);
        soak.load.leases.fetch_add(leases.len() as u64, Ordering::Relaxed);
        for _ in 0..1 + random.below(6) {
            for lease in &leases {
                let function = lease["function"].as_str().unwrap_or_default();
                let count = 1 + random.below(50);
                soak.load.use_drive(
                    &soak.rack,
                    function,
                    &LentDrive::of(lease),
                    count,
                    &mut user,
                )?;
            }
        }
        if soak.rack.json(&["composition", "return", NAME]).is_err() {
            wait_free(soak)?;
        }
    }
    wait_free(soak)
}

/// Waits until nothing of the composition is borrowed. What a request has got that nobody was told of is given back by the
/// rack, and what could not be returned is returned now.
fn wait_free(soak: &Soak) -> Result<()> {
    let mut known_since: Option<Instant> = None;
    loop {
        if let Ok(list) = soak.rack.json(&["composition", "list"]) {
            let all = list.as_array().into_iter().flatten();
            let state = all.filter(|it| it["name"] == NAME).map(|it| it["state"].clone()).next();
            if state.as_ref().is_some_and(|state| state == "free") {
                return Ok(());
            }
            let since = *known_since.get_or_insert_with(Instant::now);
            if since.elapsed() > LONGEST_UNDER_WAY {
                return Err(CheckFailure(format!("{NAME} is not returned: {list}")));
            }
            drop(soak.rack.json(&["composition", "return", NAME]));
        } else {
            // Who could have returned it was not there.
            known_since = None;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
