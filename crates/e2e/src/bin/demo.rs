#![forbid(unsafe_code)]
//! The demonstration: three hosts, one NVMe drive, two unmodified Linux guests.
//!
//! Host alpha lends a drive; a guest on beta makes a file system on it and writes; the drive goes
//! back and a guest on gamma finds the data; another drive is plugged into that running guest and
//! unplugged. Everything is done through the command line, as a person would, and every step is
//! checked: the last line is `demo: ok` only when all of it held.
//!
//! Usage: `demo RACK_FILE REPORT_DIR`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rackbus_driver::{Drive, DriveOptions};
use rackbus_e2e::{Guest, RackProcesses, Result, ensure};
use rackbus_vm::Assets;
use serde::Serialize;
use serde_json::json;

/// How much the guest writes, MiB.
const WRITTEN_MIB: u32 = 64;

/// One step, for the report.
#[derive(Debug, Serialize)]
struct Step {
    what: String,
    milliseconds: f64,
}

/// One lease, for the report.
#[derive(Debug, Serialize)]
struct DriveLease {
    function: String,
    to: String,
    user: String,
}

/// What a borrowed drive does, for the report.
#[derive(Debug, Serialize)]
struct Measured {
    user: String,
    what: String,
    latency_us: f64,
    iops: f64,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    ok: bool,
    error: Option<String>,
    total_seconds: f64,
    lent: Vec<DriveLease>,
    steps: Vec<Step>,
    measured: Vec<Measured>,
}

impl Report {
    /// Does a step, times it and says so.
    fn step<T>(&mut self, what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        let value = run().map_err(|e| rackbus_e2e::CheckFailure(format!("{what}: {e}")))?;
        let milliseconds = begun.elapsed().as_secs_f64() * 1000.0;
        println!("  {:>9.1} ms  {what}", milliseconds);
        self.steps.push(Step { what: what.to_owned(), milliseconds });
        Ok(value)
    }

    fn lent(&mut self, function: &str, to: &str, user: &str) {
        self.lent.push(DriveLease { function: function.into(), to: to.into(), user: user.into() });
    }

    fn print(&self) {
        println!("\nlent:");
        for lent in &self.lent {
            println!("  {:<14} to {:<8} used by {}", lent.function, lent.to, lent.user);
        }
        println!("\nthe borrowed drive:      latency        IOPS");
        for m in &self.measured {
            println!("  {:<20} {:>8.1} µs {:>11.0}  {}", m.user, m.latency_us, m.iops, m.what);
        }
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(file), Some(dir)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: demo RACK_FILE REPORT_DIR");
        return ExitCode::from(2);
    };
    let begun = Instant::now();
    let mut report = Report::default();
    let outcome = demonstrate(&file, &dir, &mut report);
    report.ok = outcome.is_ok();
    report.error = outcome.err().map(|e| e.to_string());
    report.total_seconds = begun.elapsed().as_secs_f64();
    let path = dir.join("report.json");
    let text = serde_json::to_vec_pretty(&report).unwrap_or_default();
    if let Err(error) = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&path, text)) {
        eprintln!("demo: cannot write {}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    if let Some(error) = &report.error {
        eprintln!("demo: failed: {error}");
        return ExitCode::FAILURE;
    }
    report.print();
    println!("\n{} in {:.1} s", path.display(), report.total_seconds);
    println!("demo: ok");
    ExitCode::SUCCESS
}

fn demonstrate(file: &Path, dir: &Path, report: &mut Report) -> Result<()> {
    // A fresh rack: the drives of an earlier demonstration are not this one's.
    if dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    let accel = Assets::of_user().accel()?;
    println!("guests run under {accel} on this machine");
    println!("hosts alpha, beta and gamma ({}):", file.display());
    let rack = report.step("the rack comes up", || RackProcesses::start(file, dir))?;
    let sum = on_beta(&rack, report)?;
    let mut guest = on_gamma(&rack, report, &sum)?;
    hot_plug(&rack, report, &mut guest)?;
    measure_guest(report, &mut guest)?;
    report.step("the guest on gamma stops, the drive goes back", || guest.stop(&rack))?;
    measure_host(&rack, report)?;
    let left = rack.json(&["leases"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "leases are left over: {left}");
    report.step("the rack goes down", || {
        drop(rack);
        Ok(())
    })
}

/// Steps 1 and 2: a guest on beta fills alpha's drive; meanwhile gamma cannot have it.
fn on_beta(rack: &RackProcesses, report: &mut Report) -> Result<String> {
    println!("a guest on beta borrows alpha/nvme0 (Debian 12, Linux 6.1, unmodified):");
    let mut guest = report.step("borrowed, VM started", || {
        Guest::start(rack, "writer", "beta", "bookworm", &["alpha/nvme0"])
    })?;
    report.lent("alpha/nvme0", "beta", "VM writer");
    report.step("the guest boots and finds the drive", || {
        guest.booted()?;
        guest.wait_drives(1)
    })?;
    report.step("it makes an ext4 file system", || {
        guest.run("mkfs.ext4 -q /dev/nvme0n1 && mount /dev/nvme0n1 /mnt/a")
    })?;
    let sum = report.step(&format!("it writes {WRITTEN_MIB} MiB of random data"), || {
        guest.run(&format!(
            "dd if=/dev/urandom of=/mnt/a/data bs=1M count={WRITTEN_MIB} status=none && sync && \
             sha256sum </mnt/a/data | cut -d' ' -f1"
        ))
    })?;
    println!("                SHA-256 {sum}");
    let refusal = report.step("gamma is refused the drive", || {
        rack.refused(&["borrow", "alpha/nvme0", "--for", "gamma"])
    })?;
    println!("                {refusal}");
    ensure!(refusal.contains("beta"), "the refusal does not name the holder: {refusal}");
    report.step("it unmounts; VM stopped, drive given back", || {
        guest.run("umount /mnt/a")?;
        guest.stop(rack)
    })?;
    let state = rack.device("alpha/nvme0")?;
    ensure!(state["state"] == "offered", "alpha/nvme0 was not offered again: {state}");
    Ok(sum)
}

/// Step 3: a guest on gamma finds the same data.
fn on_gamma(rack: &RackProcesses, report: &mut Report, sum: &str) -> Result<Guest> {
    println!("a guest on gamma borrows alpha/nvme0 (Debian 13, Linux 6.12, unmodified):");
    let mut guest = report.step("borrowed, VM started", || {
        Guest::start(rack, "reader", "gamma", "trixie", &["alpha/nvme0"])
    })?;
    report.lent("alpha/nvme0", "gamma", "VM reader");
    report.step("the guest boots and finds the drive", || {
        guest.booted()?;
        guest.wait_drives(1)
    })?;
    let found = report.step("it mounts the file system and reads the data", || {
        guest.run("mount /dev/nvme0n1 /mnt/a && sha256sum </mnt/a/data | cut -d' ' -f1")
    })?;
    ensure!(found == sum, "the data changed: SHA-256 {found}, was {sum}");
    println!("                SHA-256 {found}: the same");
    Ok(guest)
}

/// Step 4: another drive comes and goes while the guest runs.
fn hot_plug(rack: &RackProcesses, report: &mut Report, guest: &mut Guest) -> Result<()> {
    println!("a second drive, beta/nvme1, for the running guest:");
    report.step("borrowed, plugged in, found by the guest", || {
        rack.json(&["vm", "add", "reader", "beta/nvme1"])?;
        guest.wait_drives(2)
    })?;
    report.lent("beta/nvme1", "gamma", "VM reader");
    report.step("the guest copies the data to it and compares", || {
        guest.run(
            "new=$(ls -d /dev/nvme*n1 | grep -v \"$(findmnt -no SOURCE /mnt/a)\") && \
             mkfs.ext4 -q $new && mount $new /mnt/b && cp /mnt/a/data /mnt/b/ && sync && \
             echo 3 >/proc/sys/vm/drop_caches && cmp /mnt/a/data /mnt/b/data && umount /mnt/b",
        )
    })?;
    report.step("unplugged, given back", || {
        rack.json(&["vm", "remove", "reader", "beta/nvme1"])?;
        guest.wait_drives(1)
    })?;
    let state = rack.device("beta/nvme1")?;
    ensure!(state["state"] == "offered", "beta/nvme1 was not offered again: {state}");
    guest.run("cmp /mnt/a/data /mnt/a/data && umount /mnt/a").map(drop)
}

/// Step 5, in the guest: fio through its own NVMe driver.
fn measure_guest(report: &mut Report, guest: &mut Guest) -> Result<()> {
    println!("latency and IOPS, 4 KiB random reads:");
    let accel = guest.vm().record().accel.clone();
    for depth in [1, 32] {
        let text = report.step(&format!("the guest measures at queue depth {depth}"), || {
            guest.run(&format!(
                "fio --name=read --filename=/dev/nvme0n1 --readonly --rw=randread --bs=4k \
                 --direct=1 --ioengine=libaio --iodepth={depth} --runtime=2 --time_based \
                 --output-format=json"
            ))
        })?;
        let fio: serde_json::Value = serde_json::from_str(&text)?;
        let read = &fio["jobs"][0]["read"];
        let (iops, latency) = (read["iops"].as_f64(), read["clat_ns"]["mean"].as_f64());
        let (Some(iops), Some(nanoseconds)) = (iops, latency) else {
            return Err(rackbus_e2e::CheckFailure(format!("fio measured nothing: {fio}")));
        };
        report.measured.push(Measured {
            user: format!("guest ({accel})"),
            what: format!("fio libaio, queue depth {depth}"),
            latency_us: nanoseconds / 1000.0,
            iops,
        });
    }
    Ok(())
}

/// Step 5, without a guest: a driver in user space on beta. A guest under TCG measures mostly
/// TCG; this measures the drive.
fn measure_host(rack: &RackProcesses, report: &mut Report) -> Result<()> {
    let (lease, socket) = rack.borrow("alpha/nvme0", "beta")?;
    report.lent("alpha/nvme0", "beta", "userspace driver");
    let (count, seconds) = report.step("a userspace driver on beta measures", || {
        let mut drive = Drive::open(&socket, DriveOptions::default())?;
        let blocks = drive.info().blocks / 8;
        let mut data = [0; 4096];
        let (begun, mut count, mut at) = (Instant::now(), 0u32, 1u64);
        while begun.elapsed() < Duration::from_secs(2) {
            // A stride that is odd, so that it visits every place.
            at = (at + 0x9e37_79b1) % blocks;
            drive.read(at * 8, &mut data)?;
            count += 1;
        }
        Ok((f64::from(count), begun.elapsed().as_secs_f64()))
    })?;
    report.measured.push(Measured {
        user: "userspace driver".into(),
        what: "queue depth 1".into(),
        latency_us: seconds * 1e6 / count,
        iops: count / seconds,
    });
    rack.give_back(lease)?;
    ensure!(rack.json(&["status"])?["live_leases"] == json!(0), "a lease is left over");
    Ok(())
}
