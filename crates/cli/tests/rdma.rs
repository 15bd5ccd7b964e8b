//! A drive of another machine, whose data move beside the link by libfabric's providers `tcp` and `shm`. Without libfabric these
//! tests say so and pass, unless `RACKBUS_LIBFABRIC` names one.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_spec::accel::Operation;
use serde_json::Value;
use support::libfabric::is_here;
use support::load::Load;
use support::machines::{Machine, Machines};
use support::relay::Relay;
use support::{PATIENCE, open, socket};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[link]
hold = "20 s"
rdma = "tcp"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

fn pattern(seed: u32) -> Vec<u8> {
    (0..1 << 20).map(|n: u32| ((n ^ seed).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

/// What the rack knows of the lane of alpha's drive.
fn lane(rack: &Machines) -> Value {
    rack.function("alpha/nvme0")["front"]["link"]["lane"].clone()
}

#[test]
fn data_of_a_drive_move_beside_the_link_by_tcp() {
    data_move_beside_the_link("tcp");
}

#[test]
fn data_of_a_drive_move_beside_the_link_by_shared_memory() {
    data_move_beside_the_link("shm");
}

fn data_move_beside_the_link(provider: &str) {
    if !is_here() {
        return;
    }
    let rack = Machines::start(&RACK.replace("\"tcp\"", &format!("{provider:?}")));
    let [_alpha, beta, gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    rack.wait(|rack| lane(rack)["up"] == true);
    let written = pattern(1);
    drive.write(64, &written, false).unwrap();
    drive.flush().unwrap();
    let mut read = vec![0; written.len()];
    drive.read(64, &mut read).unwrap();
    assert!(read == written);
    // Both megabytes went by the lane.
    rack.wait(|rack| lane(rack)["bytes"].as_u64() >= Some(2 << 20));
    let known = lane(&rack);
    assert!(known["provider"].as_str().unwrap().starts_with(provider), "{known}");
    assert_eq!(known["fell_back"], 0, "{known}");
    let shown = String::from_utf8(beta.run(&["devices", "alpha/nvme0"]).stdout).unwrap();
    assert!(shown.contains("RDMA lane") && shown.contains(", up; "), "{shown}");
    // The way says so, and what copies.
    let way = beta.json(&["path", "alpha/nvme0", "beta"])["between"].clone();
    assert_eq!((&way["link"], &way["lane"]), (&"TLS over TCP".into(), &known["provider"]), "{way}");
    let way = beta.json(&["path", "alpha/nvme0", "gamma"])["between"].clone();
    assert!(way["link"] == "TLS over TCP" && way["lane"].is_null(), "gamma has none: {way}");
    let shown = String::from_utf8(beta.run(&["path", "beta", "alpha/nvme0"]).stdout).unwrap();
    assert!(shown.contains("between the machines: TLS over TCP, and data by"), "{shown}");
    // Events are stored some time after what they tell of can be seen.
    rack.wait(|rack| rack.control.json(&["events"]).to_string().contains("move by an RDMA lane"));
    // Small ones, and what is no multiple of a page.
    for (at, blocks) in [(0, 1), (8, 7), (100, 8), (200, 9), (300, 255)] {
        let written = &pattern(at as u32)[..blocks * 512];
        drive.write(at, written, true).unwrap();
        let mut read = vec![0; written.len()];
        drive.read(at, &mut read).unwrap();
        assert!(read == written, "{blocks} blocks");
    }
    // It is revoked from beta while beta uses it; gamma finds what was acknowledged, by a lane of its own.
    let ours = pattern(7);
    drive.write(4096, &ours, true).unwrap();
    let number = lease.lease.to_string();
    let written_until_the_end = std::thread::spawn(move || {
        let begun = Instant::now();
        let mut done = 0;
        while drive.write(8192, &pattern(done), false).is_ok() {
            done += 1;
            assert!(begun.elapsed() < PATIENCE, "a drive that was taken away takes writes");
        }
        done
    });
    rack.wait(|rack| lane(rack)["bytes"].as_u64() >= Some(6 << 20));
    beta.json(&["return", &number]);
    let lease = gamma.borrow("alpha/nvme0", "gamma");
    assert!(written_until_the_end.join().unwrap() > 0);
    let mut drive = open(&lease);
    let mut read = vec![0; ours.len()];
    drive.read(4096, &mut read).unwrap();
    assert!(read == ours, "acknowledged data is lost");
    rack.wait(|rack| lane(rack)["up"] == true);
}

/// A message of an accelerator's goes there and its result comes back by the lane.
#[test]
fn messages_of_an_accelerator_move_beside_the_link() {
    if !is_here() {
        return;
    }
    let accelerator = "[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 2\n";
    let rack = Machines::start(&format!("{RACK}\n{accelerator}"));
    let [_alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/accel0.vf1", "beta");
    let mut accel = Accel::open(socket(&lease), PATIENCE, AccelOptions::default()).unwrap();
    let lane = |rack: &Machines| rack.function("alpha/accel0.vf1")["front"]["link"]["lane"].clone();
    rack.wait(|rack| lane(rack)["up"] == true);
    let message = pattern(3)[..1 << 19].to_vec();
    let key = accel.create_context(Operation::Aes256GcmSeal, &[7; 32]).unwrap();
    let (seal, open) = ([(Operation::Aes256GcmSeal, key)], [(Operation::Aes256GcmOpen, key)]);
    let [there, back] =
        [&seal, &open].map(|stages| MessageWork { stages, ..MessageWork::default() });
    let sealed = accel.run(&there, &message, 1 << 20).unwrap();
    assert!(sealed != message);
    assert!(accel.run(&back, &sealed, 1 << 20).unwrap() == message);
    // Both messages, and both results.
    rack.wait(|rack| lane(rack)["bytes"].as_u64() >= Some(2 << 20));
    assert_eq!(lane(&rack)["fell_back"], 0);
}

/// Descriptors that a process has.
fn descriptors(machine: &mut Machine) -> usize {
    let id = machine.process().id();
    std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count()
}

/// A node is restarted in place while its lane moves data: the link carries them from then on, until the drive is attached
/// anew; and the next program has nothing of the lane's.
#[test]
fn a_node_that_is_restarted_in_place_gives_its_lane_up() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(RACK);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let mut counts = Vec::new();
    for round in 0..2 {
        for host in ["alpha", "beta"] {
            let lease = beta.borrow("alpha/nvme0", "beta");
            let load = Load::start(&lease);
            rack.wait(|rack| lane(rack)["up"] == true);
            load.progress(50, || alpha.log() + &beta.log());
            let machine = if host == "alpha" { &mut alpha } else { &mut beta };
            machine.restart_in_place(host);
            load.progress(50, || alpha.log() + &beta.log());
            rack.wait(|rack| lane(rack)["up"] == false);
            drop(load.finish());
            beta.json(&["return", &lease.lease.to_string()]);
            rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
            let machine = if host == "alpha" { &mut alpha } else { &mut beta };
            if round == 0 {
                counts.push(descriptors(machine));
                continue;
            }
            // What is on its way back, or asks the control plane just now, goes by itself.
            let (before, begun) = (counts.remove(0), Instant::now());
            let mut count = descriptors(machine);
            while count > before + 1 && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(20));
                count = descriptors(machine);
            }
            assert!(count <= before + 1, "descriptors are left: {before}, then {count}");
        }
    }
}

/// The link's connection breaks again and again; the lane beside it stays, and nothing is lost or done twice.
#[test]
fn a_lane_outlives_connections_of_its_link() {
    if !is_here() {
        return;
    }
    let rack = Machines::start(RACK);
    let listen = format!("127.0.0.1:{}", support::machines::free_port());
    let relay = Relay::start(listen.clone());
    let mut alpha = rack.machine("alpha");
    let advertised = ["--advertise", &relay.address()];
    rack.node_at(&mut alpha, "alpha", &listen, &advertised, Some(&rack.token("alpha")));
    let beta = rack.joined("beta");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    rack.wait(|rack| lane(rack)["up"] == true);
    let connections = relay.taken();
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let breaking = scope.spawn(|| {
            for nth in 1..=10 {
                std::thread::sleep(Duration::from_millis(20));
                relay.kill();
                let (begun, before) = (Instant::now(), rounds.load(Ordering::Relaxed));
                // On a busy machine none carries anything within 20 ms, and who gets nothing done for seconds gives up: each is
                // broken only when it has carried what was under way.
                let carried = || rounds.load(Ordering::Relaxed) > before + 1;
                while (relay.taken() < connections + nth || !carried())
                    && begun.elapsed() < PATIENCE
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let mut round = 0;
        while !breaking.is_finished() {
            round += 1;
            let written = &pattern(round)[..64 << 10];
            drive.write(u64::from(round % 64) * 128, written, false).unwrap();
            let mut read = vec![0; written.len()];
            drive.read(u64::from(round % 64) * 128, &mut read).unwrap();
            assert!(read == written, "round {round}");
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    });
    rack.wait(|rack| {
        let link = &rack.function("alpha/nvme0")["front"]["link"];
        link["resumed"].as_u64() >= Some(2) && link["lane"]["up"] == true
    });
    assert_eq!(lane(&rack)["fell_back"], 0);
}

/// What is named and not there is said in the log, and everything is sent over the link.
#[test]
fn a_provider_that_is_not_there_changes_nothing() {
    let rack = Machines::start(&RACK.replace("rdma = \"tcp\"", "rdma = \"nothing\""));
    let [_alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    let written = pattern(3);
    drive.write(0, &written, true).unwrap();
    let mut read = vec![0; written.len()];
    drive.read(0, &mut read).unwrap();
    assert!(read == written);
    assert_eq!(lane(&rack), Value::Null);
    assert!(beta.log().contains("are sent over the link alone"), "{}", beta.log());
}
