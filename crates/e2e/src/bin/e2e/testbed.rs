//! `rackbus testbed metal` as a person uses it: machines that stand for hosts, a drive that goes to and fro between
//! them many times, an accelerator that a program of the borrower's drives, and a lender that dies and comes back.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rackbus_e2e::rack::beside;
use rackbus_e2e::{CheckFailure, Result, ensure};
use rackbus_vm::metal::FILES;
use rustix::process::{Pid, Signal, kill_process};

/// The hosts' network; other tests have others.
const SUBNET: &str = "20";
/// How often either node is restarted in place.
const ROUNDS: u64 = 3;
/// How often the drive is borrowed and returned in a row.
const BATCH: u32 = 5;
/// The hosts are translated, and busy with other tests: a heartbeat may be late.
const SETTLE: &str = "until_ok test -b /dev/nvme0n1";

/// A test bed that runs; it ends when this is dropped.
struct Testbed<'d> {
    child: Child,
    dir: &'d Path,
}

impl Testbed<'_> {
    fn start(dir: &Path) -> Result<Testbed<'_>> {
        let mut command = Command::new(beside("rackbus")?);
        command.args(["testbed", "metal", "2", "--subnet", SUBNET, "--dir"]).arg(dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take();
        let mut testbed = Testbed { child, dir };
        for line in BufReader::new(out.ok_or_else(|| CheckFailure("no output".into()))?).lines() {
            if line?.starts_with("ready") {
                return Ok(testbed);
            }
        }
        Err(CheckFailure(format!("the test bed does not start: {}", testbed.child.wait()?)))
    }

    /// Runs another command of the test bed, which must succeed.
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(beside("rackbus")?);
        command.arg("testbed").arg("--dir").arg(self.dir).args(arguments);
        let output = command.stdin(Stdio::null()).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?}: {} {errors}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn on(&self, host: &str, script: &str) -> Result<String> {
        self.ask(&["on", host, "--", script])
    }
}

impl Drop for Testbed<'_> {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(0)) {
            // It fails only where the process has ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// What a borrower has after a return, which must not grow: vectors, functions, and descriptors of its node.
const HELD: &str = "echo $(grep -c . /proc/interrupts) $(ls /sys/bus/pci/devices | wc -l) \
                    $(ls /proc/$(cat /tmp/node.pid)/fd | wc -l)";
/// Kilobytes of its kernel's memory that nothing can reclaim.
const KERNEL_MEMORY: &str = "sync; echo 3 >/proc/sys/vm/drop_caches; sed -n 's/SUnreclaim: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
/// Kilobytes by which caches and per-processor lists may grow in all cycles together.
const NOISE_KB: i64 = 2048;

/// A drive that the lender's node models is driven by the borrower's kernel, alone and beside one of the machine; it keeps
/// what was written, and goes when its lender dies.
fn modelled(testbed: &Testbed<'_>) -> Result<()> {
    let functions = "set -e
        drive() { ls -d /sys/bus/pci/devices/*/nvme/nvme*/nvme*n1 | while read it; do
            [ $(cat $it/device/serial | tr -d ' ') != metal0 ] && basename $it; done; }
        there() { [ -n \"$(drive)\" ]; }
        gone() { ! there; }
        have() { until_ok rackbus borrow $1 --for beta --placement host; }
        verify() {
            echo 3 >/proc/sys/vm/drop_caches
            mkdir -p /mnt/m; mount -r /dev/$(drive) /mnt/m
            sha256sum -c --quiet /tmp/sum
            umount /mnt/m
        }
        ";
    let on = |script: &str| testbed.on("beta", &format!("{functions}{script}"));
    let said = on("have alpha/m0
        until_ok there
        lsblk -d -o NAME,SIZE,MODEL /dev/$(drive)
        grep -c nvme /proc/interrupts
        mke2fs -q /dev/$(drive)
        mkdir -p /mnt/m
        mount /dev/$(drive) /mnt/m
        dd if=/dev/urandom of=/mnt/m/data bs=64k count=128 status=none
        sha256sum /mnt/m/data >/tmp/sum
        umount /mnt/m
        verify
        have alpha/d0
        until_ok test -b /dev/nvme1n1
        dd if=$(ls /dev/nvme?n1 | grep -v $(drive)) of=/dev/null bs=64k count=64 iflag=direct status=none
        verify
        rackbus return alpha/d0
        echo 1 >/sys/block/$(drive)/device/reset_controller
        verify
        rackbus return alpha/m0
        gone
        have alpha/m0
        until_ok there
        verify")?;
    said.lines().for_each(|line| println!("           beta: {line}"));
    restarted(testbed, &on)?;
    // Its registers and its MSI-X table, which beta's processors reach: by the node, which has a folder of its own there.
    let reached = testbed.on("alpha", "rackbus --run-dir /tmp/run reach beta")?;
    for bar in ["BAR 0 of alpha/m0", "BAR 4 of alpha/m0"] {
        ensure!(reached.contains(bar), "{bar} is not in\n{reached}");
    }
    // A program that ends in the place of the lender's node leaves nothing of the window behind.
    let dying =
        format!("case \"$*\" in *--can-resume*) exec {FILES}/bin/rackbus \"$@\";; esac; exit 3");
    taken_over_by(testbed, "alpha", &dying)?;
    on("until_ok gone")?;
    testbed.ask(&["start", "alpha"])?;
    on("have alpha/m0; until_ok there; verify; rackbus return alpha/m0 >/dev/null").map(drop)
}

/// Restarts a host's node in place; what is said of it.
fn restart(testbed: &Testbed<'_>, host: &str) -> Result<serde_json::Value> {
    // The nodes here are run by a loader of their own, which is no program to go on as.
    let run_dir = run_dir(host);
    let restart = format!("rackbus --json {run_dir} restart {host} --program {FILES}/bin/rackbus");
    let said = testbed.on(host, &restart)?;
    let rows: serde_json::Value = serde_json::from_str(&said)?;
    let row = rows.get(0).unwrap_or(&rows).clone();
    println!("           {host} was restarted in place in {} us", row["pause_us"]);
    Ok(row)
}

/// What commands about the node of a host have to say.
fn run_dir(host: &str) -> &'static str {
    if host == "alpha" { "--run-dir /tmp/run" } else { "" }
}

/// Has a host's node restarted in place as a program that does not go on as it; what is said of that.
fn taken_over_by(testbed: &Testbed<'_>, host: &str, script: &str) -> Result<String> {
    let run_dir = run_dir(host);
    let restart = format!(
        "cat >/tmp/other <<'END'
#!/bin/sh
{script}
END
        chmod +x /tmp/other
        if rackbus {run_dir} restart {host} --program /tmp/other >/tmp/said 2>&1; then exit 1; fi
        cat /tmp/said"
    );
    testbed.on(host, &restart)
}

/// Either host's node is restarted in place while the borrower's kernel writes to a drive that the lender's node models, and to
/// one of its machine, and reads: the drives do not go, no command fails, and what was written is there.
fn restarted(testbed: &Testbed<'_>, on: &impl Fn(&str) -> Result<String>) -> Result<()> {
    let other = "other() { ls -d /dev/nvme?n1 | grep -v $(drive); }
        where() { readlink /sys/block/$(drive) /sys/block/$(basename $(other)); }
        ";
    let on = |script: &str| on(&format!("{other}{script}"));
    on("cat >/tmp/load.sh <<'END'
        set -e
        n=0
        while [ -e /tmp/loading ]; do
            dd if=/tmp/block of=$1 bs=64k count=16 oflag=direct conv=notrunc status=none
            dd if=$1 of=/tmp/back-$2 bs=64k count=16 iflag=direct status=none
            cmp /tmp/block /tmp/back-$2
            n=$((n + 1))
            echo $n >/tmp/loads-$2
        done
        echo done
END
        have alpha/d0
        until_ok test -b /dev/nvme1n1
        dd if=/dev/urandom of=/tmp/block bs=64k count=16 status=none
        mkdir -p /mnt/m
        mount /dev/$(drive) /mnt/m
        echo >/tmp/loading
        where >/tmp/where
        setsid sh /tmp/load.sh /mnt/m/load m >/tmp/load-m.log 2>&1 </dev/null &
        setsid sh /tmp/load.sh $(other) d >/tmp/load-d.log 2>&1 </dev/null &
        until_ok test -e /tmp/loads-m
        until_ok test -e /tmp/loads-d")?;
    let progress = "for load in m d; do
            before=$(cat /tmp/loads-$load)
            on() { [ $(cat /tmp/loads-$load) -gt $((before + 2)) ]; }
            until_ok on
        done
        [ \"$(where)\" = \"$(cat /tmp/where)\" ]";
    // One that is gone when the node is to become it: the node itself goes on.
    let gone = format!("rm \"$0\"; exec {FILES}/bin/rackbus \"$@\"");
    for host in ["alpha", "beta"] {
        let said = taken_over_by(testbed, host, &gone)?;
        ensure!(said.contains("No such file"), "{said}");
        on(progress)?;
    }
    for round in 1..=ROUNDS {
        for host in ["alpha", "beta"] {
            let row = restart(testbed, host)?;
            ensure!(row["restarts"] == round && row["in_use"] == 2, "{row}");
            on(progress)?;
        }
    }
    on("rm /tmp/loading
        for load in m d; do
            until_ok grep -q done /tmp/load-$load.log
            [ $(cat /tmp/load-$load.log) = done ]
        done
        umount /mnt/m
        verify
        rackbus return alpha/d0
        echo 1 >/sys/block/$(drive)/device/reset_controller
        verify
        dmesg | { ! grep -e BUG: -e WARNING: -e Call.Trace -e 'I/O error' -e 'is lost'; }")
    .map(drop)
}

/// Borrows the accelerator, whose registers a program of the borrower's finds in its window.
const RENT: &str = "set -e
    until_ok rackbus borrow alpha/a0.vf1 --for beta --placement host
    echo 8 >/proc/sys/vm/nr_hugepages
    accel() { rackbus accel run \"$@\"; }
    ";

/// Has `accel` work with a borrowed accelerator, and compares what comes of it.
pub const COMPUTE: &str = "head -c 32 /dev/urandom >key
    for size in 0 1 1000000; do
        head -c $size /dev/urandom >in
        [ \"$(accel sha256 <in)\" = \"$(sha256sum <in | cut -d' ' -f1)\" ]
        accel zstd+aes256gcm --key key <in >sealed
        accel aes256gcm-open+unzstd --key key <sealed >out
        cmp in out
    done
    ";

/// An accelerator that the lender's node models does what a program of the borrower's asks, with a right result, time after
/// time, and is away when it was returned.
fn rented(testbed: &Testbed<'_>) -> Result<()> {
    let said = testbed.on(
        "beta",
        &format!(
            "{RENT}
            {COMPUTE}
            echo \"accelerator: right\""
        ),
    )?;
    println!("           beta: {said}");
    // Either node is restarted in place while programs come and go: each has its results.
    testbed.on(
        "beta",
        "set -e
        cat >/tmp/rent.sh <<'END'
        set -e
        head -c 200000 /dev/urandom >/tmp/rent
        sum=$(sha256sum </tmp/rent | cut -d' ' -f1)
        n=0
        while [ -e /tmp/renting ]; do
            [ \"$(rackbus accel run sha256 </tmp/rent)\" = $sum ]
            n=$((n + 1))
            echo $n >/tmp/rents
        done
        echo done
END
        echo >/tmp/renting
        setsid sh /tmp/rent.sh >/tmp/rent.log 2>&1 </dev/null &
        until_ok test -e /tmp/rents || { cat /tmp/rent.log; exit 1; }",
    )?;
    for host in ["alpha", "beta"] {
        let row = restart(testbed, host)?;
        ensure!(row["in_use"] == 1, "{row}");
        let progress = "before=$(cat /tmp/rents); on() { [ $(cat /tmp/rents) -gt $((before + 1)) ]; }; until_ok on";
        testbed.on("beta", progress)?;
    }
    testbed.on(
        "beta",
        "rm /tmp/renting; until_ok grep -q done /tmp/rent.log; [ $(cat /tmp/rent.log) = done ]",
    )?;
    let reached = testbed.on("alpha", "rackbus --run-dir /tmp/run reach beta")?;
    let registers = "BAR 0 of alpha/a0.vf1";
    ensure!(reached.contains(registers), "{registers} is not in\n{reached}");
    let returned =
        "set -e; rackbus return alpha/a0.vf1 >/dev/null; ! rackbus accel run sha256 <key";
    testbed.on("beta", returned).map(drop)
}

/// Whether one of three numbers is larger in the second text.
fn grew(before: &str, after: &str) -> bool {
    let numbers = |held: &str| -> Vec<u64> {
        held.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    let (had, has) = (numbers(before), numbers(after));
    had.len() != 3 || has.len() != 3 || had.iter().zip(&has).any(|(had, has)| has > had)
}

/// Borrows the drive, reads it, and returns it.
fn cycle() -> String {
    format!(
        "set -e
        until_ok rackbus borrow alpha/d0 --for beta --placement host
        {SETTLE}
        dd if=/dev/nvme0n1 of=/dev/null bs=64k count=4 iflag=direct status=none
        rackbus return alpha/d0 >/dev/null
        [ ! -e /dev/nvme0n1 ]"
    )
}

/// A drive is borrowed and returned again and again, and nothing is left behind.
fn cycled(testbed: &Testbed<'_>, batches: u32) -> Result<()> {
    let cycle = cycle();
    testbed.on("beta", &cycle)?;
    // Connections that the node makes and closes by itself come and go: the least of some looks counts.
    let held =
        format!("for look in 1 2 3 4 5 6; do {HELD}; sleep 0.5; done | sort -n -k 3 | head -n 1");
    let kernel = || -> Result<i64> {
        let said = testbed.on("beta", KERNEL_MEMORY)?;
        said.parse().map_err(|_| CheckFailure(format!("no number: {said}")))
    };
    let memory = kernel()?;
    let cycles = batches * BATCH;
    let mut before = testbed.on("beta", &held)?;
    // What is opened once and kept may be opened during the first cycles; what grows twice is lost.
    for last in [false, true] {
        for _ in 0..batches {
            testbed.on("beta", &format!("for cycle in $(seq {BATCH}); do {cycle}\ndone"))?;
        }
        let after = testbed.on("beta", &held)?;
        if !grew(&before, &after) {
            println!("           {cycles} times: {after}");
            break;
        }
        let open = testbed.on("beta", "ls -l /proc/$(cat /tmp/node.pid)/fd")?;
        let text = format!("beta held {before} before {cycles} cycles, {after} after them: {open}");
        ensure!(!last, "{text}");
        println!("           {text}");
        before = after;
    }
    let grown = kernel()? - memory;
    println!("           unreclaimable kernel memory {grown:+} kB");
    ensure!(grown < NOISE_KB, "beta's kernel has {grown} kB more after {cycles} cycles");
    Ok(())
}

/// Borrows and returns the drive a hundred times, so that a leak of a few bytes or of one vector each time is seen.
pub fn hundred(dir: &Path) -> Result<()> {
    let folder = dir.join("testbed");
    let testbed = Testbed::start(&folder)?;
    cycled(&testbed, 100 / BATCH)?;
    testbed.ask(&["down"]).map(drop)
}

/// A few times, and then what the lender's node models, and a lender that dies and comes back.
pub fn borrowed(dir: &Path) -> Result<()> {
    let folder = dir.join("testbed");
    let testbed = Testbed::start(&folder)?;
    cycled(&testbed, 1)?;
    modelled(&testbed)?;
    rented(&testbed)?;
    testbed.on("beta", &format!("{RENT} accel sha256 <key"))?;
    testbed.on(
        "beta",
        &format!("set -e; rackbus borrow alpha/d0 --for beta --placement host; {SETTLE}"),
    )?;
    testbed.ask(&["kill", "alpha"])?;
    testbed.on("beta", "gone() { [ ! -e /dev/nvme0n1 ]; }; until_ok gone")?;
    testbed.on("beta", "gone() { ! rackbus accel run sha256 <key; }; until_ok gone")?;
    testbed.ask(&["start", "alpha"])?;
    testbed.on("beta", &cycle())?;
    testbed.ask(&["down"])?;
    Ok(())
}
