//! Two stock guests take turns on one drive, unattended; and a VM goes to another host with its drive.

use std::time::Duration;

use rackbus_e2e::{Guest, RackProcesses, Result, ensure};
use rackbus_vm::registry;

use crate::RackWithGuests;

/// How long all turns may take on a busy machine.
const TURNS: Duration = Duration::from_secs(180);

/// What a guest does without anybody attending to it: whenever the drive is there, it looks for what it wrote last in a
/// block of its own, and writes the next. `$1` is its block.
const WORK: &str = r#"cat >/tmp/work <<'END'
n=0
while [ ! -e /tmp/stop ]; do
    drive=$(ls -d /dev/nvme*n1 2>/dev/null | head -n 1)
    [ -b "$drive" ] || { sleep 0.1; continue; }
    dd if=$drive of=/tmp/got bs=4096 count=1 skip=$1 iflag=direct status=none 2>/dev/null || { sleep 0.1; continue; }
    got=$(head -c 16 /tmp/got | tr -d '\0' | awk '{print $1}')
    case "$n:$got" in
        0:*) ;;
        # The write that was not answered any more may have come.
        $n:b$1-$n | $n:b$1-$((n + 1))) ;;
        *) echo "after $n: $got" >>/tmp/wrong ;;
    esac
    printf '%-4096s' "b$1-$((n + 1)) " >/tmp/put
    dd if=/tmp/put of=$drive bs=4096 count=1 seek=$1 oflag=direct conv=nocreat,notrunc,fsync status=none 2>/dev/null &&
        n=$((n + 1)) && echo $n >/tmp/written
done
END
rm -f /tmp/stop /tmp/wrong /tmp/written; setsid bash /tmp/work BLOCK >/dev/null 2>&1 </dev/null &"#;

/// The turns that a share has had.
fn turns(rack: &RackProcesses, share: u64) -> Option<u64> {
    let shares = rack.json(&["share", "list"]).ok()?;
    let mut shares = shares.as_array()?.iter();
    shares.find(|it| it["share"] == share)?["turns"].as_u64()
}

pub fn turns_of_guests(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, old, new } = world;
    for (guest, block) in [(&mut *old, "100"), (&mut *new, "200")] {
        guest.run(&WORK.replace("BLOCK", block))?;
    }
    let mut shares = Vec::new();
    for (host, vm) in [("beta", "old"), ("gamma", "new")] {
        let share = rack.json(&[
            "share",
            "join",
            "alpha/nvme0",
            "--for",
            host,
            "--vm",
            vm,
            "--slice",
            "5s",
        ])?;
        shares.push(share["share"].as_u64().unwrap_or_default());
    }
    let refused = rack.refused(&["borrow", "alpha/nvme0", "--for", "beta"])?;
    ensure!(refused.contains("lent in turns to 2"), "{refused}");
    let all = |rack: &RackProcesses| {
        let had = shares.iter().map(|share| turns(rack, *share)).collect::<Option<Vec<_>>>()?;
        had.iter().all(|turns| *turns >= 2).then_some(())
    };
    let outcome = rack.wait("two turns of both guests", TURNS, all);
    let told = rack.json(&["share", "list"])?;
    for (guest, share) in [(&mut *old, shares[0]), (&mut *new, shares[1])] {
        guest.run("touch /tmp/stop")?;
        rack.json(&["share", "leave", &share.to_string()])?;
    }
    outcome?;
    for guest in [&mut *old, &mut *new] {
        guest.wait_drives(0)?;
        let wrong = guest.run("cat /tmp/wrong 2>/dev/null; true")?;
        ensure!(wrong.trim().is_empty(), "{}: other data than it wrote: {wrong}", guest.name());
        let written = guest.run("cat /tmp/written")?;
        let written: u64 = written.trim().parse().unwrap_or_default();
        ensure!(written > 1, "{} wrote {written} times", guest.name());
        println!("            {} wrote {written} times", guest.name());
    }
    for share in told.as_array().into_iter().flatten() {
        let (held, times) = (&share["held_ms"], &share["turns"]);
        let (handover, handovers) = (&share["handover_ms"], &share["handovers"]);
        println!(
            "            {}: {times} turns, {held} ms; {handovers} hand-overs of {handover} ms together",
            share["borrower"]
        );
    }
    let gone =
        |rack: &RackProcesses| rack.json(&["leases"]).ok()?.as_array()?.is_empty().then_some(());
    rack.wait("the last turn ends", TURNS, gone)
}

pub fn moved(world: &mut RackWithGuests) -> Result<()> {
    let RackWithGuests { rack, .. } = world;
    let mut guest = Guest::start(rack, "mover", "beta", "trixie", &["alpha/nvme0"])?;
    guest.booted()?;
    guest.wait_drives(1)?;
    let sum = guest.run(
        "mkfs.ext4 -q /dev/nvme?n1 && mount /dev/nvme?n1 /mnt/a && \
         dd if=/dev/urandom of=/mnt/a/data bs=1M count=8 status=none && \
         sha256sum </mnt/a/data && umount /mnt/a",
    )?;
    guest.release();
    let refused = rack.refused(&["vm", "move", "mover", "--to", "beta"])?;
    ensure!(refused.contains("runs on beta already"), "{refused}");
    // A host that there is not, and one that cannot have the drive: the VM goes on where it was.
    let nowhere = rack.output(&["vm", "move", "mover", "--to", "nowhere"])?;
    ensure!(!nowhere.status.success(), "it moved to a host that there is not");
    guest.run("mount /dev/nvme?n1 /mnt/a && sha256sum </mnt/a/data && umount /mnt/a")?;
    guest.release();
    // A host at which it cannot be started: what stands in the way is found when it is off, and has its drive there.
    let obstacle = rack.run_dir().join("alpha/vms");
    std::fs::write(&obstacle, "")?;
    let failed = rack.refused(&["vm", "move", "mover", "--to", "alpha"]);
    std::fs::remove_file(&obstacle)?;
    let failed = failed?;
    ensure!(failed.contains("was started at beta again"), "{failed}");
    let leases = rack.json(&["leases"])?;
    ensure!(leases[0]["borrower"] == "beta", "the drive is not beta's again: {leases}");
    let mut guest = Guest::attach(registry::find(rack.run_dir(), "beta", "mover")?);
    guest.booted()?;
    guest.wait_drives(1)?;
    let kept = guest.run("mount /dev/nvme?n1 /mnt/a && sha256sum </mnt/a/data && umount /mnt/a")?;
    ensure!(kept == sum, "written {sum}, found {kept}");
    guest.release();
    rack.json(&["vm", "move", "mover", "--to", "gamma"])?;
    let leases = rack.json(&["leases"])?;
    ensure!(leases[0]["borrower"] == "gamma", "the drive is not gamma's: {leases}");
    ensure!(registry::find(rack.run_dir(), "beta", "mover").is_err(), "it is still at beta");
    let record = registry::find(rack.run_dir(), "gamma", "mover")?;
    let mut guest = Guest::attach(record);
    guest.booted()?;
    guest.wait_drives(1)?;
    let found =
        guest.run("mount /dev/nvme?n1 /mnt/a && sha256sum </mnt/a/data && umount /mnt/a")?;
    ensure!(found == sum, "written {sum}, found {found}");
    taken_in_time(rack, guest)
}

/// A guest that does not release a drive loses it after the time that was given, and not before.
fn taken_in_time(rack: &RackProcesses, mut guest: Guest) -> Result<()> {
    // Its processors stand still: no driver of it hears the request.
    guest.vm().record().qmp()?.command("stop", &serde_json::json!({}))?;
    let begun = std::time::Instant::now();
    rack.json(&["return", "alpha/nvme0", "--within", "2s"])?;
    let took = begun.elapsed();
    println!("          taken after {took:.1?} from a guest that does not answer");
    ensure!(took >= Duration::from_secs(2), "it was taken after {took:?}");
    ensure!(took < Duration::from_secs(15), "it was taken after {took:?}");
    guest.vm().kill();
    let (lease, _) = rack.borrow("alpha/nvme0", "beta")?;
    rack.give_back(lease)
}
