//! What ends a loan at once while a host's own kernel drives another host's drive: the borrower reboots, the lender's node is
//! killed, and the lender's machine loses its power. The drive is borrowed again with its data after a reboot, and is gone from
//! the borrower soon after a death, whoever notices that.

use std::time::Duration;

use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_vm::BareMetalMachine;

use crate::metal::{MetalHosts, begin, run};

/// How long after its lender's death a drive may be there. These hosts stall for seconds where others use the processors too, so
/// they take a lender for alive that is silent for five; commands of the NVMe driver would be given up after thirty. What it took is
/// printed.
const REMOVAL: Duration = Duration::from_secs(10);

/// The borrower has the drive, and beta's node is there.
const BORROW: &str = "until_ok rackbus borrow alpha/d0 --for beta --placement host
    until_ok test -b /dev/nvme0n1
    verify";

/// Nanoseconds of a machine's clock.
const NOW: &str = "date +%s%N";

/// The borrower's kernel goes down with the drive mounted, and nobody returns it before. The module releases it then, the lease
/// ends, and what was written is there when it is borrowed again.
pub fn rebooted(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, address: [own, _], .. } = hosts;
    run(
        borrower,
        "mount /dev/nvme0n1 /mnt/a
        dd if=/dev/urandom of=/mnt/a/data bs=64k count=32 conv=fsync status=none
        sha256sum /mnt/a/data >sum",
    )?;
    // What a host has on disks of its own. These machines have none.
    let kept = borrower.run("cd /tmp; tar -c state sum | base64 -w 0")?;
    borrower.reboot()?;
    borrower.run(&format!("echo {kept} | base64 -d | tar -x -C /tmp"))?;
    borrower.load(&["rackbus silence_ms=5000"])?;
    begin(borrower, "node.log", &format!("rackbus node --host beta --join https://{own}:7420"))?;
    run(borrower, "until_ok rackbus devices")?;
    run(
        lender,
        "none() { [ \"$(rackbus --json leases)\" = '[]' ]; }
        until_ok none
        rackbus events | tail -n 4",
    )?;
    run(borrower, &format!("{BORROW}; healthy")).map(drop)
}

/// The lender's node dies. Its machine lives, and closes what it had open.
pub fn node_killed(hosts: &mut MetalHosts) -> Result<()> {
    const KILL: &str = "pkill -KILL -f 'files/rackbus node'";
    lost(hosts, "its node is killed", |lender| run(lender, KILL).map(drop))?;
    run(&mut hosts.borrower, "rackbus events | tail -n 4").map(drop)
}

/// The lender's machine dies, and the control plane on it.
pub fn switched_off(hosts: &mut MetalHosts) -> Result<()> {
    let MetalHosts { lender, borrower, address: [own, _], .. } = hosts;
    begin(lender, "node.log", &format!("rackbus node --host alpha --join https://{own}:7420"))?;
    run(borrower, BORROW)?;
    lost(hosts, "its power is cut", |lender| {
        lender.cut_power();
        Ok(())
    })
}

/// Has the lender die while the borrower reads. The drive goes in time by the borrower's clock, who reads is told, and nothing hangs.
fn lost(
    hosts: &mut MetalHosts,
    how: &str,
    die: impl Fn(&mut BareMetalMachine) -> Result<()>,
) -> Result<()> {
    let MetalHosts { lender, borrower, .. } = hosts;
    run(borrower, "rm -f load.log told away")?;
    let load = format!(
        "sh -c 'while dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 iflag=direct; do :; done; {NOW} >told'"
    );
    begin(borrower, "load.log", &load)?;
    begin(
        borrower,
        "away.log",
        &format!("sh -c 'while [ -e /dev/nvme0n1 ]; do sleep 0.01; done; {NOW} >away'"),
    )?;
    run(borrower, "until_ok grep -q copied load.log")?;
    let now = |borrower: &mut BareMetalMachine| number(&borrower.run(NOW)?);
    // What is no part of it: to have a command run by one machine, and to be told the time by the other.
    let asked = now(borrower)?;
    lender.run("true")?;
    run(borrower, "[ -b /dev/nvme0n1 ] && [ ! -s away ] && [ ! -s told ]")?;
    let begun = now(borrower)?;
    die(lender)?;
    run(borrower, "until_ok test -s away; until_ok test -s told; until_ok gone; healthy")?;
    let overhead = begun.saturating_sub(asked);
    for (what, file) in [("the drive is gone", "away"), ("who reads is told", "told")] {
        let took = number(&borrower.run(&format!("cat /tmp/{file}"))?)?.checked_sub(begun);
        let took = took.ok_or_else(|| CheckFailure(format!("{how}: {what} before that")))?;
        println!("           {how}: {what} after {took:.1?}, of which asking takes {overhead:.1?}");
        ensure!(took < REMOVAL + overhead, "{how}: {what} after {took:.1?} only");
    }
    run(borrower, "dmesg | grep -i -e lost -e away | tail -n 3").map(drop)
}

/// The time that a machine's clock shows.
fn number(said: &str) -> Result<Duration> {
    let nanoseconds = said.trim().parse();
    nanoseconds.map(Duration::from_nanos).map_err(|_| CheckFailure(format!("no time: {said}")))
}
