//! Borrow and return, over and over, by userspace drivers on two hosts.

use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::{Result, ensure};

use crate::RackWithGuests;

/// What a borrow may take to the first completed read, and a return until the function is offered
/// again, beyond [what commands take](ASKS) that only ask. Both are of one rack on one machine.
const LIMIT: Duration = Duration::from_millis(50);
/// How many times what a command takes that only asks may be taken beyond that: it is the longer the slower and the busier
/// the machine is.
const ASKS: u32 = 10;

/// Each borrower finds what the one before wrote, writes its own, and returns; who asks meanwhile
/// is refused.
pub fn hundred(world: &mut RackWithGuests) -> Result<()> {
    let rack = &world.rack;
    let (mut borrows, mut returns, mut asks) = (Vec::new(), Vec::new(), Vec::new());
    let mut expected = None;
    for cycle in 0..100u32 {
        let (host, other) = if cycle % 2 == 0 { ("beta", "gamma") } else { ("gamma", "beta") };
        let begun = Instant::now();
        let (lease, socket) = rack.borrow("alpha/nvme0", host)?;
        let mut drive = Drive::open(&socket, DriveOptions::default())?;
        let mut found = vec![0; 64 << 10];
        let at = u64::from(cycle / 2) * 128;
        drive.read(0, &mut found)?;
        borrows.push(begun.elapsed());
        if let Some(expected) = &expected {
            ensure!(found == *expected, "cycle {cycle}: not what was written");
        }
        let refused = rack.refused(&["borrow", "alpha/nvme0", "--for", other])?;
        ensure!(refused.contains(host), "cycle {cycle}: the holder is not named: {refused}");
        let data = pattern(cycle, found.len());
        drive.write(0, &data, false)?;
        drive.write(at, &data, cycle % 3 == 0)?;
        drive.flush()?;
        drop(drive);
        let begun = Instant::now();
        rack.give_back(lease)?;
        returns.push(begun.elapsed());
        let begun = Instant::now();
        rack.json(&["leases"])?;
        asks.push(begun.elapsed());
        expected = Some(data);
    }
    let (borrow, give_back, ask) = (median(borrows), median(returns), median(asks));
    println!(
        "            borrow to first read {borrow:.1?}, return to offered {give_back:.1?}, leases {ask:.1?} (medians)"
    );
    ensure!(
        borrow.max(give_back) < LIMIT + ASKS * ask,
        "over {LIMIT:?} more than {ASKS} commands that only ask"
    );
    Ok(())
}

/// Bytes that differ from cycle to cycle and from place to place.
pub fn pattern(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        // Marsaglia's xorshift32.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..length).map(|_| next()).collect()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
