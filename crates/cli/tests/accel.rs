//! Accelerators of a rack of real processes: rented at a service level, used from the command line, and
//! given back.

mod support;

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use rackbus_control::api::DeviceState;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_qos::{Rate, ServiceLevel};
use rackbus_spec::accel::{Descriptor, Operation};
use support::{PATIENCE, Rack};

const RACK: &str = "name = \"lab\"\n[control]\nlease_ttl = \"10 s\"\nreturn_grace = \"2 s\"\n\
                    [hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 3\n[hosts.beta]\n";

/// What the command puts out for `input`.
fn through(rack: &Rack, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = rack.command(args);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}");
    output.stdout
}

#[test]
fn an_accelerator_is_rented_at_a_level_that_is_kept_and_used_from_the_command_line() {
    let rack = Rack::up(RACK);
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, [7; 32]).unwrap();
    let key = key.to_str().unwrap();

    // The first asks for something that can be kept; it gets a function of whichever device.
    let borrow = |level: &str| rack.run(&["borrow", "--accel", level, "--for", "beta"]);
    let said = borrow("crc32c 80 Mbit/s message 64 KiB");
    assert!(said.status.success(), "{said:?}");
    rack.wait_device("alpha/accel0.vf1", DeviceState::Lent);
    // The second asks for more than there is, and is told what there is.
    let said = borrow("crc32c 90000 Gbit/s message 64 KiB");
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && error.contains("would fit"), "{error}");
    let said = borrow("lzma 1 Gbit/s");
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(error.contains("there is no engine `lzma`"), "{error}");
    // Refused functions are there for others.
    rack.wait_device("alpha/accel0.vf2", DeviceState::Offered);

    let sealed = through(&rack, &["accel", "run", "aes256gcm", "--key", key], b"a message");
    assert_eq!(sealed.len(), 12 + 9 + 16);
    let opened = through(&rack, &["accel", "run", "aes256gcm-open", "--key", key], &sealed);
    assert_eq!(opened, b"a message");
    // RFC 3720, section B.4: 32 bytes of zeroes; FIPS 180-2, section B.1.
    assert_eq!(through(&rack, &["accel", "run", "crc32c"], &[0; 32]), b"8a9136aa\n");
    let digest = through(&rack, &["accel", "run", "sha256"], b"abc");
    assert_eq!(&digest[..8], b"ba7816bf");
    let listed = rack.good(&["accel", "list"]);
    assert!(listed.contains("alpha/accel0.vf1") && listed.contains("beta"), "{listed}");

    // A tenant that dies during its operations harms nobody, and what it had is there for the next one.
    let lease = rack.borrow("alpha/accel0.vf3", "beta");
    let options = AccelOptions { depth: 30, ..AccelOptions::default() };
    let mut dies =
        Accel::open(Path::new(lease.socket.as_deref().unwrap()), PATIENCE, options).unwrap();
    let deflate = MessageWork { stages: &[(Operation::Deflate, 0)], ..MessageWork::default() };
    let descriptor = dies.describe(&deflate, (0, 1 << 20), (1 << 20, 1 << 20)).unwrap();
    for _ in 0..30 {
        dies.push(0, &descriptor).unwrap();
    }
    dies.ring(0).unwrap();
    drop(dies);
    let one = ["accel", "run", "sha256", "--lease", "1"];
    assert_eq!(&through(&rack, &one, b"abc")[..8], b"ba7816bf");
    rack.give_back(&lease);
    let lease = rack.borrow("alpha/accel0.vf3", "beta");
    let number = lease.lease.to_string();
    let other = ["accel", "run", "sha256", "--lease", &number];
    assert_eq!(&through(&rack, &other, b"abc")[..8], b"ba7816bf");

    rack.good(&["return", "1"]);
    rack.wait_device("alpha/accel0.vf1", DeviceState::Offered);
}

/// Of several accelerators the control plane chooses the one where most is left; where none keeps the level, each says
/// what would fit.
#[test]
fn the_accelerator_with_most_room_is_chosen_and_a_refusal_says_what_each_would_keep() {
    let rack = Rack::up(&format!(
        "{RACK}[hosts.gamma.devices.accel0]\nkind = \"accelerator\"\nfunctions = 2\n"
    ));
    let offered = || {
        for function in ["alpha/accel0.vf1", "gamma/accel0.vf1"] {
            rack.wait_device(function, DeviceState::Offered);
        }
    };
    offered();
    let borrow = |level: &str, json: &[&str]| {
        rack.run(&[&["borrow", "--accel", level, "--for", "beta"], json].concat())
    };
    let said = borrow("crc32c 90000 Gbit/s message 64 KiB", &["--json"]);
    assert_eq!(said.status.code(), Some(1));
    let refused: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(refused["code"], "level_refused");
    let offers = refused["offers"].as_array().unwrap();
    let device = |number: usize| offers[number]["device"].as_str().unwrap();
    let fits = |number: usize| -> ServiceLevel {
        offers[number]["fits"].as_str().unwrap().parse().unwrap()
    };
    let mut devices = [device(0), device(1)];
    devices.sort();
    assert_eq!((devices, offers.len()), (["alpha/accel0", "gamma/accel0"], 2));
    let (most, less) = (fits(0), fits(1));
    assert!(most.min.per_second >= less.min.per_second, "{refused:#}");
    assert!(refused["remedy"].as_str().unwrap().contains(&most.to_string()), "{refused:#}");
    // People read the same.
    let said = borrow("crc32c 90000 Gbit/s message 64 KiB", &[]);
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(error.contains("alpha/accel0: ") && error.contains("gamma/accel0: "), "{error}");

    // What is left at its device after this is less than what the other has, before its node has said so.
    let per_second = most.min.per_second - less.min.per_second / 10;
    offered();
    let large = ServiceLevel { min: Rate { per_second, ..most.min }, ..most.clone() }.to_string();
    let first = rack.json(&["borrow", "--accel", &large, "--for", "beta"]);
    let chosen = first["function"].as_str().unwrap();
    // Offers are rounded: of two that look alike either may be the larger one.
    if most != less {
        assert_eq!(chosen, format!("{}.vf1", device(0)));
    }
    assert_eq!(first["level"], large);
    let small = "crc32c 8 Mbit/s message 64 KiB";
    let second = rack.json(&["borrow", "--accel", small, "--for", "beta"]);
    assert_ne!(second["lender"], first["lender"]);
    rack.good(&["return", &first["lease"].to_string()]);
    let third = rack.json(&["borrow", "--accel", &large, "--for", "beta"]);
    assert_eq!(third["function"], chosen);
}

/// A borrowed drive's data through a borrowed accelerator: the command tells both, and takes results.
#[test]
fn what_a_drive_has_goes_through_an_accelerator_on_its_way() {
    let rack = Rack::up(&format!(
        "{RACK}[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"4 MiB\"\n"
    ));
    for isolation in ["shared", "strict"] {
        let borrow = |function: &str| {
            let asked = ["borrow", function, "--for", "beta", "--isolation", isolation];
            rack.json(&asked)["lease"].to_string()
        };
        let (drive, accel) = (borrow("alpha/nvme0"), borrow("alpha/accel0.vf1"));
        let run = |args: &[&str]| {
            let mut all = vec!["accel", "run"];
            all.extend(args);
            all.extend(["--drive", &drive]);
            rack.command(&all).output().unwrap()
        };
        let sums = run(&["crc32c", "--message", "512K", "--from", "1M"]);
        assert!(sums.status.success(), "{sums:?}");
        let sums = String::from_utf8(sums.stdout).unwrap();
        let places: Vec<&str> = sums.lines().map(|line| line.split("  ").nth(1).unwrap()).collect();
        let expected: Vec<String> = (2..8).map(|nth| (nth << 19).to_string()).collect();
        assert_eq!(places, expected);
        let copied = run(&["zstd+unzstd", "--length", "1536K"]);
        assert_eq!((copied.status.success(), copied.stdout.len()), (true, 1536 << 10));
        // Counted on from message to message.
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key").display().to_string();
        std::fs::write(&key, [7; 32]).unwrap();
        let cipher = ["aes256ctr", "--key", &key, "--counter", "ffffffffffffffffffffffffffffff00"];
        let whole = through(&rack, &[&["accel", "run"], &cipher[..]].concat(), &[0; 1 << 20]);
        let parts = run(&[&cipher[..], &["--length", "1M", "--message", "256K"]].concat());
        assert!(parts.stdout == whole, "{}", String::from_utf8_lossy(&parts.stderr));
        for (args, expected) in [
            (&["aes256gcm"][..], "use another operation"),
            (&["copy+aes256ctr"], "use another operation"),
            (&["copy", "--from", "8M"], "beyond the drive's end"),
            (&["copy", "--from", "100"], "whole blocks"),
            (&["copy", "--message", "100"], "whole blocks"),
            (&["unzstd"], "the message at 0 failed"),
        ] {
            let refused = run(args);
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && said.contains(expected), "{args:?}: {said}");
        }
        rack.good(&["return", &drive]);
        let said = rack.bad(1, &["accel", "run", "copy", "--drive", &drive]);
        assert!(said.contains("none of a drive"), "{said}");
        rack.good(&["return", &accel]);
    }
}

/// With strict isolation the function's front is in the borrower's node: the lender has engines and keys, and none of
/// the borrower's memory.
#[test]
fn a_strict_borrower_uses_engines_that_reach_none_of_its_memory() {
    let rack = Rack::up(RACK);
    let level = "crc32c 80 Mbit/s message 64 KiB";
    let said = rack.json(&["borrow", "--accel", level, "--for", "beta", "--isolation", "strict"]);
    assert_eq!(said["placement"], "borrower");
    let function = said["function"].as_str().unwrap();
    rack.wait_device(function, DeviceState::Lent);
    let digest = through(&rack, &["accel", "run", "crc32c"], &[0; 32]);
    assert_eq!(digest, b"8a9136aa\n");
    let socket = said["socket"].as_str().unwrap();
    let mut accel = Accel::open(Path::new(socket), PATIENCE, AccelOptions::default()).unwrap();
    let key = accel.create_context(Operation::Aes256GcmSeal, &[7; 32]).unwrap();
    let seal = MessageWork { stages: &[(Operation::Aes256GcmSeal, key)], ..MessageWork::default() };
    assert_eq!(accel.run(&seal, b"a message", 64).unwrap().len(), 9 + 16);
    // Its memory is reached by its own host and nobody else.
    let reached = rack.json(&["reach", function]);
    let owners: Vec<&str> = reached
        .as_array()
        .map_or(Vec::new(), |all| all.iter().filter_map(|range| range["host"].as_str()).collect());
    assert!(owners.iter().all(|host| *host == "beta"), "{reached}");
    // It is shaped, and what it used is counted, where its engines are.
    let begun = Instant::now();
    loop {
        let listed = rack.good(&["accel", "list"]);
        let line = listed.lines().find(|line| line.starts_with(function)).unwrap().to_owned();
        let operations =
            line.split("64 KiB").nth(1).and_then(|rest| rest.split_whitespace().next());
        if operations.is_some_and(|operations| operations.parse::<u64>().unwrap() >= 2) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{listed}");
    }
    // Its lender dies: what is under way ends, and does not hang.
    let deflate = MessageWork { stages: &[(Operation::Deflate, 0)], ..MessageWork::default() };
    let descriptor = accel.describe(&deflate, (0, 1 << 20), (1 << 20, 1 << 20)).unwrap();
    for _ in 0..10 {
        accel.push(0, &descriptor).unwrap();
    }
    accel.ring(0).unwrap();
    rack.process(Some("alpha")).crash();
    let ended = (0..10).map(|_| accel.wait_for(0, PATIENCE)).collect::<Result<Vec<_>, _>>();
    assert!(!matches!(&ended, Ok(all) if all.iter().any(Option::is_none)), "an operation hangs");
}

/// What a tenant has under way continues in the new program of its lender's node, and of its own: each descriptor is
/// completed once, keys are there, and so is what it was promised.
#[test]
fn nodes_are_restarted_in_place_under_the_users_of_an_accelerator() {
    let rack = Rack::up(RACK);
    rack.restart_in_place("alpha");
    for isolation in ["shared", "strict"] {
        restarted_in_place(&rack, isolation);
    }
}

fn restarted_in_place(rack: &Rack, isolation: &str) {
    let level = "crc32c 80 Mbit/s message 64 KiB";
    let level = ["borrow", "--accel", level, "--for", "beta", "--isolation", isolation];
    let lease = rack.json(&level);
    // One that nobody uses continues, too.
    rack.restart_in_place("alpha");
    let socket = lease["socket"].as_str().unwrap().to_owned();
    let options = AccelOptions { depth: 30, ..AccelOptions::default() };
    let mut accel = Accel::open(Path::new(&socket), PATIENCE, options).unwrap();
    let key = accel.create_context(Operation::Aes256GcmSeal, &[7; 32]).unwrap();
    let seal = MessageWork { stages: &[(Operation::Aes256GcmSeal, key)], ..MessageWork::default() };
    let sealed = accel.run(&seal, b"a message", 64).unwrap();
    let deflate = MessageWork { stages: &[(Operation::Deflate, 0)], ..MessageWork::default() };
    for host in ["alpha", "beta", "alpha"] {
        for id in 0..30 {
            let descriptor = accel.describe(&deflate, (0, 1 << 20), (1 << 20, 1 << 20)).unwrap();
            accel.push(0, &Descriptor { id, ..descriptor }).unwrap();
        }
        accel.ring(0).unwrap();
        rack.restart_in_place(host);
        let mut done = [false; 30];
        for _ in 0..30 {
            let completion = accel.wait(0).unwrap();
            assert_eq!(completion.status, 0, "{host}");
            assert!(
                !std::mem::replace(&mut done[usize::from(completion.id)], true),
                "{host}: twice"
            );
        }
        assert_eq!(accel.run(&seal, b"a message", 64).unwrap(), sealed, "{host}");
    }
    drop(accel);
    let leases = rack.json(&["leases"]);
    assert_eq!(
        (&leases[0]["stage"], &leases[0]["function"]),
        (&"active".into(), &lease["function"])
    );
    rack.good(&["return", &lease["lease"].to_string()]);
    let again = rack.json(&level);
    assert_eq!(again["function"], lease["function"]);
    rack.good(&["return", &again["lease"].to_string()]);
}
