//! Nodes restarted in place under a guest's load.

use std::time::Duration;

use rackbus_e2e::guest::succeeded;
use rackbus_e2e::{Result, ensure};

use crate::RackWithGuests;
use crate::guests::{add, busy, remove};

/// Random I/O for some seconds, each block verified when it was written.
const LOAD: &str = "cd /tmp && fio --name=verify --filename=$(ls -d /dev/nvme?n1) --rw=randrw \
    --bs=4k-32k --bsrange=4k-32k --direct=1 --ioengine=libaio --iodepth=8 --size=16M --offset=64M \
    --time_based --runtime=15 --verify=crc32c --verify_fatal=1 --verify_backlog=64";
/// How long it may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);
/// How often all nodes are restarted meanwhile.
const ROUNDS: u64 = 5;

/// A stock guest verifies what it writes while all nodes are restarted again and again, with the drive's
/// controller at the lender and at the borrower: fio finds no error, and the guest's kernel saw none. The
/// drive is unplugged in order afterwards.
pub fn in_place(world: &mut RackWithGuests) -> Result<()> {
    for isolation in ["shared", "strict"] {
        let RackWithGuests { rack, old, .. } = world;
        match isolation {
            "shared" => add(rack, old, "old", "alpha/nvme0")?,
            _ => {
                rack.json(&["vm", "add", "old", "alpha/nvme0", "--isolation", isolation])?;
                old.wait_drives(1)?;
            }
        }
        let lease = rack.json(&["leases"])?[0]["lease"].clone();
        old.run("dmesg -C")?;
        let running = old.begin(LOAD, LIMIT)?;
        busy(old)?;
        let mut longest = 0;
        for _ in 0..ROUNDS {
            for row in rack.restart(&["alpha", "beta", "gamma"])? {
                let used = u64::from(row["host"] == "alpha" || row["host"] == "beta");
                ensure!(row["in_use"] == used, "{used} functions are in use: {row}");
                longest = longest.max(row["pause_us"].as_u64().unwrap_or_default());
            }
        }
        let text = running.wait()?;
        ensure!(succeeded("old", LOAD, &text)?.contains("err= 0"), "fio found errors");
        let said = old.run("dmesg | grep -i 'nvme.*\\(timeout\\|reset\\|error\\)' || true")?;
        ensure!(said.is_empty(), "the guest noticed: {said}");
        let same = rack.json(&["leases"])?[0]["lease"].clone();
        ensure!(same == lease, "lease {lease} became {same}");
        println!("           {isolation}: {} restarts, {longest} us at most", ROUNDS * 3);
        remove(rack, old, "old", "alpha/nvme0")?;
    }
    Ok(())
}
