//! Nodes on machines of their own, restarted in place while something is borrowed between them: its user gets no error, and
//! finds what was acknowledged.

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_attach::{Location, Session};
use rackbus_control::api::Lease;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_spec::accel::Operation;
use rackbus_spec::nvme::IoOpcode;
use serde_json::Value;
use support::load::Load;
use support::machines::{Machine, Machines};
use support::relay::Relay;
use support::{PATIENCE, open, socket};

/// Drives in a file and in memory, and an accelerator.
const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.alpha.devices.accel0]
kind = "accelerator"
functions = 1

[hosts.beta]
"#;

fn logs(machines: &[&Machine]) -> String {
    machines.iter().map(|it| it.log()).collect::<Vec<_>>().join("\n---\n")
}

/// Restarts the node of a machine, which stays the same process; its row.
fn restart(machine: &mut Machine, host: &str) -> Value {
    let row = machine.restart_in_place(host);
    goes_on(machine);
    row
}

fn goes_on(machine: &mut Machine) {
    assert!(machine.process().try_wait().unwrap().is_none(), "it has ended: {}", machine.log());
}

fn joined(rack: &Machines) -> [Machine; 2] {
    ["alpha", "beta"].map(|host| rack.joined(host))
}

/// Returns what `beta` has, and waits until its lender offers it again.
fn give_back(rack: &Machines, beta: &Machine, lease: u64, function: &str) {
    beta.json(&["return", &lease.to_string()]);
    rack.wait(|rack| rack.function(function)["state"] == "offered");
}

#[test]
fn a_driver_notices_nothing_when_lender_and_borrower_are_restarted() {
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = joined(&rack);
    for drive in ["alpha/nvme0", "alpha/nvme1"] {
        let lease = beta.borrow(drive, "beta");
        let load = Load::start(&lease);
        load.progress(50, || logs(&[&alpha, &beta]));
        for _ in 0..5 {
            let row = restart(&mut beta, "beta");
            assert_eq!(row["in_use"], 1, "{row}");
            load.progress(20, || logs(&[&alpha, &beta]));
            let row = restart(&mut alpha, "alpha");
            assert_eq!(row["in_use"], 1, "{row}");
            load.progress(20, || logs(&[&alpha, &beta]));
        }
        drop(load.finish());
        // The next user finds a drive, and the lease can be returned.
        open(&lease).read(0, &mut [0; 512]).unwrap();
        give_back(&rack, &beta, lease.lease, drive);
    }
}

/// Commands in flight at a time, and bytes of each.
const DEPTH: usize = 32;
const EACH: usize = 32 << 10;

/// Writes and then reads with many commands in flight, again and again until `stop`.
fn batches(lease: &Lease, stop: &AtomicBool, done: &AtomicU64) {
    let options = DriveOptions { depth: DEPTH as u16, data: DEPTH * EACH };
    let mut drive = Drive::open(socket(lease), options).unwrap();
    let buffers: Vec<_> = (0..DEPTH).map(|nth| drive.buffer(nth * EACH, EACH).unwrap()).collect();
    let (queue, device, _) = drive.parts();
    for round in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let byte = |nth: usize| (round as usize * 7 + nth) as u8;
        for opcode in [IoOpcode::Write, IoOpcode::Read] {
            for (nth, buffer) in buffers.iter().enumerate() {
                let fill = if opcode == IoOpcode::Write { byte(nth) } else { !byte(nth) };
                queue.data(*buffer).unwrap().fill(fill);
                let at = (round * DEPTH as u64 + nth as u64) * (EACH as u64 / 512) % (16 << 11);
                queue.submit(opcode, at, EACH as u32 / 512, *buffer, false).unwrap();
            }
            queue.ring(device).unwrap();
            let begun = Instant::now();
            while queue.in_flight() > 0 {
                match queue.poll(device).unwrap() {
                    Some(completed) => assert!(completed.status.is_success(), "{completed:?}"),
                    None => std::thread::yield_now(),
                }
                assert!(begun.elapsed() < PATIENCE, "{} commands never end", queue.in_flight());
            }
        }
        let mut read = vec![0; EACH];
        for (nth, buffer) in buffers.iter().enumerate() {
            queue.data(*buffer).unwrap().copy_to(&mut read);
            assert!(read.iter().all(|it| *it == byte(nth)), "round {round}, {nth}");
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn many_commands_in_flight_go_on() {
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = joined(&rack);
    let lease = beta.borrow("alpha/nvme0", "beta");
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| batches(&lease, &stop, &done));
        for nth in 0..12 {
            let before = done.load(Ordering::Relaxed);
            let begun = Instant::now();
            while done.load(Ordering::Relaxed) < before + 3 {
                assert!(!load.is_finished(), "the driver noticed: {}", logs(&[&alpha, &beta]));
                assert!(begun.elapsed() < PATIENCE, "it hangs: {}", logs(&[&alpha, &beta]));
                std::thread::sleep(Duration::from_millis(1));
            }
            match nth % 2 {
                0 => restart(&mut alpha, "alpha"),
                _ => restart(&mut beta, "beta"),
            };
        }
        stop.store(true, Ordering::Relaxed);
        load.join().unwrap();
    });
    give_back(&rack, &beta, lease.lease, "alpha/nvme0");
}

/// A host's own drive: both ends are in the node that is restarted.
#[test]
fn a_host_that_uses_its_own_drive_goes_on() {
    let rack = Machines::start(RACK);
    let mut alpha = rack.joined("alpha");
    let lease = alpha.borrow("alpha/nvme0", "alpha");
    let load = Load::start(&lease);
    for _ in 0..3 {
        load.progress(20, || alpha.log());
        assert_eq!(restart(&mut alpha, "alpha")["in_use"], 2);
    }
    load.progress(20, || alpha.log());
    drop(load.finish());
    give_back(&rack, &alpha, lease.lease, "alpha/nvme0");
}

/// Both at once, with the connections between them lost again and again, and without a control plane.
#[test]
fn both_are_restarted_at_once_while_connections_break_and_nobody_leads() {
    let mut rack = Machines::start(RACK);
    let listen = format!("127.0.0.1:{}", support::machines::free_port());
    let relay = Relay::start(listen.clone());
    let mut alpha = rack.machine("alpha");
    let advertised = ["--advertise", &relay.address()];
    rack.node_at(&mut alpha, "alpha", &listen, &advertised, Some(&rack.token("alpha")));
    let mut beta = rack.joined("beta");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let load = Load::start(&lease);
    load.progress(50, || logs(&[&alpha, &beta]));
    rack.control.crash();
    for _ in 0..5 {
        relay.kill();
        std::thread::scope(|scope| {
            for (machine, host) in [(&alpha, "alpha"), (&beta, "beta")] {
                scope.spawn(move || machine.restart_in_place(host));
            }
            relay.kill();
        });
        goes_on(&mut alpha);
        goes_on(&mut beta);
        load.progress(20, || logs(&[&alpha, &beta]));
    }
    rack.begin_control();
    rack.wait(|rack| ["alpha", "beta"].iter().all(|host| rack.state_of(host) == "up"));
    drop(load.finish());
    give_back(&rack, &beta, lease.lease, "alpha/nvme0");
}

/// Each operation is done once, and each context is made once.
#[test]
fn operations_of_an_accelerator_go_on() {
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = joined(&rack);
    let lease = beta.borrow("alpha/accel0.vf1", "beta");
    let mut accel = Accel::open(socket(&lease), PATIENCE, AccelOptions::default()).unwrap();
    let message: Vec<u8> = (0..300_000).map(|n: u32| (n.wrapping_mul(n) / 7 % 251) as u8).collect();
    let hash = MessageWork { stages: &[(Operation::Sha256, 0)], ..MessageWork::default() };
    let expected = accel.run(&hash, &message, 32).unwrap();
    for nth in 0..6u8 {
        let restarting = std::thread::scope(|scope| {
            let (alpha, beta) = (&mut alpha, &mut beta);
            let restarting = scope.spawn(move || match nth % 2 {
                0 => restart(alpha, "alpha"),
                _ => restart(beta, "beta"),
            });
            while !restarting.is_finished() {
                let context = accel.create_context(Operation::Aes256Ctr, &[nth; 32]).unwrap();
                assert_eq!(accel.run(&hash, &message, 32).unwrap(), expected);
                accel.destroy_context(context).unwrap();
            }
            restarting.join().unwrap()
        });
        assert_eq!(restarting["in_use"], 1, "{restarting}");
    }
    // None that nobody knows of was made on the way.
    let handle = accel.create_context(Operation::Aes256Ctr, &[1; 32]).unwrap();
    assert_eq!(handle, 1, "contexts were made twice");
    drop(accel);
    give_back(&rack, &beta, lease.lease, "alpha/accel0.vf1");
}

/// Requests of a machine wait for the process that goes on in the place of the one that listened.
#[test]
fn commands_of_a_machine_are_answered_while_its_node_is_restarted() {
    let rack = Machines::start(RACK);
    let [_alpha, mut beta] = joined(&rack);
    for _ in 0..5 {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut ask = beta.command(&["leases", "--json"]);
            let done = &done;
            let asking = scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let output = ask.output().unwrap();
                    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
                }
            });
            restart(&mut beta, "beta");
            done.store(true, Ordering::Relaxed);
            asking.join().unwrap();
        });
    }
}

/// A program at `path` that answers as this script says.
fn program(path: &Path, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_node_that_cannot_be_restarted_says_why_and_goes_on() {
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = joined(&rack);
    let lease = beta.borrow("alpha/nvme0", "beta");
    let load = Load::start(&lease);
    load.progress(50, || logs(&[&alpha, &beta]));
    let folder = tempfile::tempdir().unwrap();
    // It says that it can, and is gone when it is to: all was saved by then, and is taken back.
    let script = "cat >/dev/null; rm \"$0\"; echo 'ready to go on'";
    for (machine, host) in [(&mut alpha, "alpha"), (&mut beta, "beta")] {
        let said = support::not_for_being_busy(|| {
            let gone = program(&folder.path().join("gone"), script);
            machine.bad(&["restart", host, "--program", &gone])
        });
        assert!(said.contains("No such file") && said.contains("goes on"), "{said}");
        load.progress(20, || machine.log());
        // Without its certificate the next program could not speak to anybody.
        let (own, aside) = (machine.state_dir().join("identity.pem"), folder.path().join("aside"));
        std::fs::rename(&own, &aside).unwrap();
        let said = machine.restart_refused(host);
        assert!(said.contains("has no certificate that is good"), "{said}");
        std::fs::rename(&aside, &own).unwrap();
        load.progress(20, || machine.log());
        assert_eq!(restart(machine, host)["restarts"], 1);
        load.progress(20, || machine.log());
    }
    // Shared memory is refused as before.
    let session =
        Session::open(&Location { run_dir: beta.run_dir(), host: "beta".to_owned() }).unwrap();
    let said = beta.restart_refused("beta");
    assert!(said.contains("processes of the host share memory"), "{said}");
    drop(session);
    load.progress(20, || logs(&[&alpha, &beta]));
    drop(load.finish());
    give_back(&rack, &beta, lease.lease, "alpha/nvme0");
}

/// Where a lost connection ends the use of a function, neither side of it is restarted.
#[test]
fn a_session_that_is_not_held_is_not_lost_by_a_restart() {
    let rack = Machines::start(&format!("{RACK}\n[link]\nhold = \"0 s\"\n"));
    let [alpha, beta] = joined(&rack);
    let lease = beta.borrow("alpha/nvme0", "beta");
    let load = Load::start(&lease);
    for (machine, host) in [(&alpha, "alpha"), (&beta, "beta")] {
        load.progress(20, || machine.log());
        let said = machine.restart_refused(host);
        assert!(said.contains("`hold` of 0"), "{said}");
    }
    load.progress(20, || logs(&[&alpha, &beta]));
    drop(load.finish());
    give_back(&rack, &beta, lease.lease, "alpha/nvme0");
}

/// A lender that dies just when its borrower was replaced: the drive is lost as without a restart, and what was flushed is there.
#[test]
fn a_lender_that_dies_while_its_borrower_is_restarted_is_lost_as_ever() {
    let rack = Machines::start(&format!("{RACK}\n[link]\nhold = \"1 s\"\n"));
    let [mut alpha, mut beta] = joined(&rack);
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], false).unwrap();
    drive.flush().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| beta.restart_in_place("beta"));
        alpha.crash();
    });
    goes_on(&mut beta);
    // It is answered with an error, and not never.
    assert!(drive.read(0, &mut [0; 512]).is_err());
    drop(drive);
    rack.node(&mut alpha, "alpha", None);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut read = [0; 4096];
    open(&lease).read(0, &mut read).unwrap();
    assert_eq!(read, [7; 4096]);
}
