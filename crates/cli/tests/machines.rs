//! A rack whose hosts are machines: joining, borrowing over the network, and who may do what.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_driver::DriveError;
use rackbus_driver::accel::{Accel, AccelOptions, MessageWork};
use rackbus_identity::{Credentials, now};
use rackbus_spec::accel::{Descriptor, Operation};
use rustix::process::Signal;
use support::machines::Machines;
use support::{PATIENCE, Process, open, socket};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[link]
hold = "2 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.accel0]
kind = "accelerator"
functions = 2

[hosts.beta]
[hosts.gamma]
"#;

#[test]
fn a_drive_of_another_machine_is_borrowed_and_keeps_what_was_written() {
    let rack = Machines::start(RACK);
    let [mut alpha, beta, gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    // Each machine's own tools know the rack.
    let listed = beta.json(&["devices"]).to_string();
    assert!(listed.contains("alpha/nvme0"), "{listed}");
    // No memory is between the two, and no bridge.
    let path = beta.json(&["path", "alpha/nvme0", "beta"]);
    let parts = path["components"].as_array().unwrap().iter().map(|part| part["name"].as_str());
    let way = ["alpha/nvme0", "alpha/root", "network", "beta/root", "beta/memory"].map(Some);
    assert_eq!((parts.collect::<Vec<_>>(), &path["hops"]), (way.to_vec(), &3.into()));
    let lease = beta.borrow("alpha/nvme0", "beta");
    assert_eq!(serde_json::to_value(lease.placement).unwrap(), "borrower");
    let mut drive = open(&lease);
    let pattern: Vec<u8> =
        (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    drive.write(64, &pattern, false).unwrap();
    drive.flush().unwrap();
    let mut read = vec![0; pattern.len()];
    drive.read(64, &mut read).unwrap();
    assert!(read == pattern);
    let busy = gamma.bad(&["borrow", "alpha/nvme0", "--for", "gamma"]);
    assert!(busy.contains("beta"), "{busy}");
    drop(drive);
    beta.json(&["return", &lease.lease.to_string()]);
    let lease = gamma.borrow("alpha/nvme0", "gamma");
    let mut drive = open(&lease);
    drive.read(64, &mut read).unwrap();
    assert!(read == pattern, "gamma finds something else");
    // Its lender's machine dies: what is absent says so, and does not hang.
    alpha.crash();
    let begun = Instant::now();
    let gone = loop {
        match drive.read(64, &mut read) {
            Ok(()) => assert!(begun.elapsed() < PATIENCE, "the drive of a dead machine answers"),
            Err(gone) => break gone,
        }
    };
    assert!(!matches!(gone, DriveError::TimedOut(_)), "{gone} after {:?}", begun.elapsed());
    drop(drive);
    // It comes back by its certificate alone, and has the data.
    rack.node(&mut alpha, "alpha", None);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.read(64, &mut read).unwrap();
    assert!(read == pattern, "acknowledged data is lost");
}

/// Its front is on the borrower's machine, its engines on the lender's, which keeps what it promised.
#[test]
fn an_accelerator_of_another_machine_is_rented_at_a_level() {
    let rack = Machines::start(RACK);
    let [mut alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let level = "crc32c 80 Mbit/s message 64 KiB";
    let said = beta.json(&["borrow", "--accel", level, "--for", "beta"]);
    assert_eq!(
        (&said["function"], &said["placement"]),
        (&"alpha/accel0.vf1".into(), &"borrower".into())
    );
    let socket = said["socket"].as_str().unwrap();
    let options = AccelOptions { depth: 30, ..AccelOptions::default() };
    let mut accel = Accel::open(Path::new(socket), PATIENCE, options).unwrap();
    let message: Vec<u8> = (0..1 << 20).map(|n: u32| (n.wrapping_mul(n) / 7 % 251) as u8).collect();
    let key = accel.create_context(Operation::Aes256GcmSeal, &[7; 32]).unwrap();
    let stages = [(Operation::ZstdCompress, 0), (Operation::Aes256GcmSeal, key)];
    let there = MessageWork { stages: &stages, ..MessageWork::default() };
    let sealed = accel.run(&there, &message, 1 << 20).unwrap();
    let stages = [(Operation::Aes256GcmOpen, key), (Operation::ZstdDecompress, 0)];
    let back = MessageWork { stages: &stages, ..MessageWork::default() };
    assert!(accel.run(&back, &sealed, 1 << 20).unwrap() == message);
    let hash = MessageWork { stages: &[(Operation::Sha256, 0)], ..MessageWork::default() };
    let descriptor = accel.describe(&hash, (0, 4096), (1 << 20, 32)).unwrap();
    for id in 0..30 {
        accel.push(0, &Descriptor { id, ..descriptor }).unwrap();
    }
    accel.ring(0).unwrap();
    for _ in 0..30 {
        assert_eq!(accel.wait(0).unwrap().status, 0);
    }
    let number = said["lease"].to_string();
    let refused = beta.bad(&["accel", "level", &number, "crc32c 90000 Gbit/s message 64 KiB"]);
    assert!(refused.contains("would fit"), "{refused}");
    // Its lender's machine dies: it is absent then, and nothing hangs.
    for id in 0..30 {
        accel.push(0, &Descriptor { id, ..descriptor }).unwrap();
    }
    alpha.crash();
    let _ = accel.ring(0);
    let ended = (0..30).map(|_| accel.wait_for(0, PATIENCE)).collect::<Result<Vec<_>, _>>();
    assert!(!matches!(&ended, Ok(all) if all.iter().any(Option::is_none)), "an operation hangs");
}

#[test]
fn what_a_machine_does_not_answer_fails_in_bounded_time() {
    // With the usual time for which a front waits: longer than the driver does.
    let rack = Machines::start(&RACK.replace("hold = \"2 s\"", ""));
    let [mut alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], false).unwrap();
    // It stalls: its kernel answers, its node does not.
    let process = Process::of(rustix::process::Pid::from_child(alpha.process()));
    process.signal(Signal::STOP);
    let begun = Instant::now();
    let failed = loop {
        // Its threads may need a moment to stop.
        match drive.read(0, &mut [0; 4096]) {
            Ok(()) => assert!(begun.elapsed() < PATIENCE, "a node that stalls answers"),
            Err(failed) => break failed,
        }
    };
    assert!(
        matches!(failed, DriveError::TimedOut(_) | DriveError::Absent | DriveError::Command { .. }),
        "{failed}"
    );
    process.signal(Signal::CONT);
    drop(drive);
    beta.json(&["return", &lease.lease.to_string()]);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
}

#[test]
fn what_needs_shared_memory_is_refused_with_the_reason() {
    let others = "[hosts.alpha.devices.other0]\nkind = \"upstream\"\nsocket = \"./other.sock\"\n";
    let rack = Machines::start(&format!("{RACK}{others}"));
    let [_alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let refused = beta.bad(&["borrow", "alpha/other0", "--for", "beta"]);
    assert!(refused.contains("or from another machine: a function of kind upstream"), "{refused}");
    let said = beta.bad(&["borrow", "alpha/nvme0", "--for", "beta", "--placement", "lender"]);
    assert!(said.contains("hosts of this rack are machines"), "{said}");
}

#[test]
fn a_token_is_good_once_for_its_host() {
    let rack = Machines::start(RACK);
    let token = rack.token("beta");
    let token = token.to_str().unwrap();
    let join = |host: &str, file: &str| {
        rack.machine(&format!("{host}-{}", file.len())).bad(&[
            "node",
            "--host",
            host,
            "--join",
            &rack.url,
            "--listen",
            "127.0.0.1:0",
            "--token-file",
            file,
        ])
    };
    assert!(join("gamma", token).contains("the token is for host beta"));
    assert!(join("delta", token).contains("the token is for host beta"));
    let mut beta = rack.machine("beta");
    rack.node(&mut beta, "beta", Some(std::path::Path::new(token)));
    assert!(join("beta", token).contains("used already"));
    let forged = format!("{token}.forged");
    let text = std::fs::read_to_string(token).unwrap();
    // In this place only: what is there may stand elsewhere too, in the fingerprint for example.
    let other = if &text[9..12] == "000" { "111" } else { "000" };
    std::fs::write(&forged, format!("{}{other}{}", &text[..9], &text[12..])).unwrap();
    assert!(join("beta", &forged).contains("used already"));
    let none = rack.machine("nobody").bad(&["node", "--host", "beta", "--join", &rack.url]);
    assert!(none.contains("has no certificate"), "{none}");
    // The token of another rack: its authority is not the one that answers.
    let other = Machines::start(RACK);
    let foreign = other.token("beta");
    let said = join("beta", foreign.to_str().unwrap());
    assert!(said.contains("does not answer") && said.contains("certificate"), "{said}");
}

#[test]
fn a_nodes_certificate_is_renewed_by_itself_and_it_stays_joined() {
    let rack = Machines::start(RACK);
    let _alpha = rack.joined("alpha");
    let made = rack.control.json(&["token", "beta", "--life", "20s"]);
    let token = rack.control.run_dir().join("beta.token");
    std::fs::write(&token, made["token"].as_str().unwrap()).unwrap();
    let mut beta = rack.machine("beta");
    rack.node(&mut beta, "beta", Some(&token));
    let certified = || Credentials::load(&beta.state_dir()).unwrap().unwrap().certified().clone();
    let first = certified();
    assert_eq!(first.life(), Duration::from_secs(20));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    // The control plane ends what was connected by the first certificate when that is over; the renewed one is next.
    let begun = Instant::now();
    while !first.is_over(now()) || certified().until < first.until + 20 {
        assert!(begun.elapsed() < PATIENCE, "{:?}: {}", certified(), beta.log());
        drive.read(0, &mut [0; 4096]).unwrap();
    }
    let next = certified();
    assert_eq!((next.life(), &next.subject), (first.life(), &first.subject));
    assert_ne!(next.serial, first.serial);
    rack.wait(|rack| rack.state_of("beta") == "up");
    // What was borrowed is, and more can be: the control plane and the lender know it by the new one.
    drive.write(0, &[7; 4096], false).unwrap();
    let shown = beta.json(&["leases"]);
    assert_eq!((&shown[0]["lease"], &shown[0]["stage"]), (&lease.lease.into(), &"active".into()));
    drop(drive);
    beta.json(&["return", &lease.lease.to_string()]);
    let lease = beta.borrow("alpha/nvme0", "beta");
    open(&lease).read(0, &mut [0; 4096]).unwrap();
    for wrong in ["19s", "31d"] {
        let said = rack.control.bad(&["token", "beta", "--life", wrong]);
        assert!(said.contains("choose 20 s to 30 days"), "{said}");
    }
}

#[test]
fn a_run_directory_is_one_nodes() {
    let rack = Machines::start(RACK);
    let alpha = rack.joined("alpha");
    let noted = || std::fs::read_to_string(alpha.run_dir().join("rack.json")).unwrap();
    let before = noted();
    let other = tempfile::tempdir().unwrap();
    let token = rack.token("beta");
    let join = ["node", "--host", "beta", "--join", &rack.url, "--listen", "127.0.0.1:0"];
    let own = ["--state-dir", other.path().to_str().unwrap()];
    let token = ["--token-file", token.to_str().unwrap()];
    let said = alpha.bad(&[&join[..], &own, &token].concat());
    let place = alpha.run_dir().display().to_string();
    let expected =
        format!("the node of alpha runs in {place} already; name a run directory of its own");
    assert!(said.contains(&expected) && said.contains("--run-dir"), "{said}");
    // Nor does a control plane start there, or a whole rack.
    let file = other.path().join("rack.toml");
    std::fs::write(&file, RACK).unwrap();
    let file = file.to_str().unwrap();
    for start in [&["control", file, "--listen", "127.0.0.1:0"][..], &["control"], &["up", file]] {
        let said = alpha.bad(&[start, &own[..]].concat());
        assert!(said.contains(&expected) && said.contains("--run-dir"), "{start:?}: {said}");
    }
    // What they would have noted there is not, and commands there are alpha's as before.
    assert_eq!(noted(), before);
    assert_eq!(alpha.json(&["whoami"])["host"], "alpha");
}

#[test]
fn a_machine_acts_for_its_own_host_alone() {
    let rack = Machines::start(RACK);
    let [_alpha, beta, gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    let said = gamma.bad(&["borrow", "alpha/nvme0", "--for", "beta"]);
    assert!(said.contains("gamma may not act for beta"), "{said}");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let said = gamma.bad(&["return", &lease.lease.to_string()]);
    assert!(said.contains("gamma may not act for beta"), "{said}");
    let said = gamma.bad(&["return", &(lease.lease + 1).to_string()]);
    assert!(said.contains("there is no lease"), "{said}");
    let said = gamma.bad(&["token", "beta"]);
    assert!(said.contains("node of gamma may not ask for POST /v1/tokens"), "{said}");
    assert!(socket(&lease).exists());
    // Who speaks no TLS, or says nothing, is not waited for.
    let address = rack.url.strip_prefix("https://").unwrap();
    let mut silent: Vec<TcpStream> =
        (0..50).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut scanner = TcpStream::connect(address).unwrap();
    scanner.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = scanner.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "it is answered without TLS");
    beta.json(&["return", &lease.lease.to_string()]);
    // Their connections are closed.
    let ended = silent[0].read(&mut [0; 1]);
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}
