//! Network cards of a rack of real processes: functions borrowed by two hosts, driven from user space, in nodes that are
//! restarted in place and nodes that die.

mod support;

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_control::api::{DeviceState, Lease};
use rackbus_driver::net::{Net, NetOptions};
use rackbus_spec::virtio::net::NetHeader;
use serde_json::Value;
use support::pcapng::CaptureFile;
use support::{PATIENCE, Rack};

const RACK: &str = "name = \"lab\"\n[control]\nlease_ttl = \"10 s\"\nreturn_grace = \"2 s\"\n\
                    [hosts.alpha.devices.nic0]\nkind = \"nic\"\nfunctions = 2\nqueues = 1\n\
                    mac = \"02:00:00:00:00:01\"\nrate = \"1 Gbit/s\"\n[hosts.beta]\n[hosts.gamma]\n";

fn open(lease: &Lease) -> Net {
    let options = NetOptions { interrupts: true, ..NetOptions::default() };
    let socket = lease.socket.as_ref().unwrap();
    Net::open(std::path::Path::new(socket), PATIENCE, options).unwrap()
}

/// Sends a frame until the other one has it: a network may lose some.
fn reaches(from: &mut Net, to: &mut Net, number: u8) {
    let mut frame = [&to.info().mac[..], &from.info().mac, &[0x88, 0xb5]].concat();
    frame.resize(1000, number);
    let (begun, mut found) = (Instant::now(), Vec::new());
    while begun.elapsed() < PATIENCE {
        from.send(0, &NetHeader::default(), &frame).unwrap();
        from.flush(0).unwrap();
        to.wait(0, Duration::from_millis(100));
        while to.receive(0, &mut found).unwrap().is_some() {
            if found == frame {
                return;
            }
        }
    }
    panic!("frame {number} does not come");
}

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

#[test]
fn functions_of_a_card_reach_each_other_whoever_borrows_them_and_in_whatever_process() {
    let rack = Rack::up(RACK);
    let one = rack.borrow("alpha/nic0.vf1", "beta");
    let two = rack.borrow("alpha/nic0.vf2", "gamma");
    let (mut a, mut b) = (open(&one), open(&two));
    assert_eq!(a.info().mac, [2, 0, 0, 0, 0, 1]);
    assert_eq!(b.info().mac, [2, 0, 0, 0, 0, 2]);
    assert!(a.is_up().unwrap() && b.is_up().unwrap());
    reaches(&mut a, &mut b, 1);
    for round in 2..5 {
        for host in HOSTS {
            rack.restart_in_place(host);
        }
        reaches(&mut a, &mut b, round);
        reaches(&mut b, &mut a, round);
    }
    let text = rack.good(&["devices"]);
    assert!(text.contains("virtio-net, 02:00:00:00:00:01, 1 queue pair, 1 Gbit/s"), "{text}");

    // Whoever has it next finds nothing of this one.
    drop(a);
    rack.give_back(&one);
    rack.wait_device("alpha/nic0.vf1", DeviceState::Offered);
    let mut a = open(&rack.borrow("alpha/nic0.vf1", "gamma"));
    reaches(&mut b, &mut a, 9);

    // Its lender dies: drivers find functions that are not there, whose registers are all ones.
    assert!(!b.is_broken().unwrap());
    rack.process(Some("alpha")).crash();
    let begun = Instant::now();
    while matches!(b.is_broken(), Ok(false)) {
        assert!(begun.elapsed() < PATIENCE, "the lost function still works");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Frames pass through the lender's port, and the lender has no memory of the borrower's.
#[test]
fn the_front_of_a_network_function_runs_at_a_borrower_that_wants_strict_isolation() {
    let rack = Rack::up(RACK);
    let strict = |function: &str, host: &str| -> Lease {
        let args = ["borrow", function, "--for", host, "--isolation", "strict"];
        serde_json::from_value(rack.json(&args)).unwrap()
    };
    let one = strict("alpha/nic0.vf1", "beta");
    assert_eq!(serde_json::to_value(one.placement).unwrap(), "borrower");
    let two = rack.borrow("alpha/nic0.vf2", "gamma");
    let (mut a, mut b) = (open(&one), open(&two));
    assert_eq!(a.info().mac, [2, 0, 0, 0, 0, 1]);
    assert!(a.is_up().unwrap() && b.is_up().unwrap());
    for round in 1..4 {
        reaches(&mut a, &mut b, 2 * round);
        reaches(&mut b, &mut a, 2 * round + 1);
        // Both ends of what is between front and port go on in place.
        for host in HOSTS {
            rack.restart_in_place(host);
        }
    }
    reaches(&mut a, &mut b, 20);
    drop(a);
    rack.give_back(&one);
    rack.wait_device("alpha/nic0.vf1", DeviceState::Offered);
    let mut a = open(&strict("alpha/nic0.vf1", "gamma"));
    reaches(&mut b, &mut a, 9);
    // Its lender dies: drivers find functions that are not there.
    rack.process(Some("alpha")).crash();
    let begun = Instant::now();
    while matches!(a.is_broken(), Ok(false)) {
        assert!(begun.elapsed() < PATIENCE, "the lost function still works");
        std::thread::sleep(Duration::from_millis(5));
    }
    let device = rack.bad(1, &["borrow", "alpha/nic0", "--for", "beta"]);
    assert!(device.contains("alpha/nic0"), "{device}");
}

/// What is asked of all for an address that is known is answered by the asker's own node.
#[test]
fn a_function_that_asks_for_a_known_address_is_answered_and_others_hear_nothing() {
    let rack = Rack::up(&RACK.replace("functions = 2", "functions = 3"));
    let leases = ["vf1", "vf2", "vf3"].map(|it| rack.borrow(&format!("alpha/nic0.{it}"), "beta"));
    let [mut asker, mut asked, mut third] = leases.each_ref().map(open);
    let port = |function: &str| -> Value {
        let status = rack.json(&["net", "status", "alpha"]);
        let ports = status[0]["ports"].as_array().unwrap();
        ports.iter().find(|it| it["port"] == function).unwrap().clone()
    };
    let address =
        |function: &str| -> Ipv4Addr { port(function)["ipv4"].as_str().unwrap().parse().unwrap() };
    let own = address("alpha/nic0.vf1");
    let mac = asker.info().mac;
    let mut ask = |about: Ipv4Addr| {
        let mut frame = [&[0xff; 6][..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac].concat();
        frame.extend([&own.octets()[..], &[0; 6], &about.octets()].concat());
        asker.send(0, &NetHeader::default(), &frame).unwrap();
        asker.flush(0).unwrap();
        frame
    };
    // One that nobody has goes to all, and is what they hear first.
    ask(address("alpha/nic0.vf2"));
    let unknown = ask(Ipv4Addr::from_bits(own.to_bits() + 1000));
    for other in [&mut asked, &mut third] {
        assert_eq!(next_frame(other), unknown);
    }
    let answer = next_frame(&mut asker);
    assert_eq!(answer[..12], [mac, asked.info().mac].concat());
    assert_eq!(
        (&answer[12..22], &answer[22..28]),
        (&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2][..], &asked.info().mac[..])
    );
    assert_eq!(answer[28..32], address("alpha/nic0.vf2").octets());
    assert_eq!(port("alpha/nic0.vf1")["answered"], 1);
}

/// The next frame that comes.
fn next_frame(net: &mut Net) -> Vec<u8> {
    let (begun, mut found) = (Instant::now(), Vec::new());
    while net.receive(0, &mut found).unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "nothing comes");
        net.wait(0, Duration::from_millis(100));
    }
    found
}

/// Sends a frame once, of a length by its number, and takes what comes until it has come.
fn pass(from: &mut Net, to: &mut Net, number: u8) {
    let mut frame = [&to.info().mac[..], &from.info().mac, &[0x88, 0xb5]].concat();
    frame.resize(600 + usize::from(number), number);
    from.send(0, &NetHeader::default(), &frame).unwrap();
    from.flush(0).unwrap();
    while next_frame(to) != frame {}
}

/// A capture of a function's port, as another program reads it: what it sent and what it received, in order.
#[test]
fn a_capture_of_a_functions_port_has_its_frames_and_no_others() {
    let rack = Rack::up(RACK);
    let leases = ["vf1", "vf2"].map(|it| rack.borrow(&format!("alpha/nic0.{it}"), "beta"));
    let [mut near, mut far] = leases.each_ref().map(open);
    // Both ways are open, and nothing that was sent for that is on them any more.
    reaches(&mut near, &mut far, 1);
    reaches(&mut far, &mut near, 2);
    pass(&mut near, &mut far, 3);
    pass(&mut far, &mut near, 4);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vf2.pcapng");
    let path = file.display().to_string();
    let options = ["net", "capture", "alpha/nic0.vf2", "-w", &path, "--frames", "6", "--json"];
    let mut capture = rack.command(&options);
    let mut capturing = capture.stdout(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !std::fs::metadata(&file).is_ok_and(|it| it.len() > 0) {
        assert!(begun.elapsed() < PATIENCE && capturing.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    for number in 11..=13 {
        pass(&mut near, &mut far, number);
        pass(&mut far, &mut near, number);
    }
    let told = capturing.wait_with_output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["frames"], &told["missed"]), (&6.into(), &0.into()));
    let captured = CaptureFile::read(&std::fs::read(&file).unwrap());
    assert_eq!(captured.interface, "alpha/nic0.vf2");
    let found: Vec<(bool, usize, u8)> =
        captured.frames.iter().map(|it| (it.sent, it.bytes.len(), it.bytes[100])).collect();
    let expected =
        (11..=13).flat_map(|n| [false, true].map(|sent| (sent, 600 + usize::from(n), n)));
    assert_eq!(found, expected.collect::<Vec<_>>());
    let mut last = u64::try_from(before.as_nanos()).unwrap();
    for frame in captured.frames {
        assert!(
            frame.time_ns >= last && frame.time_ns < last + 60_000_000_000,
            "{}",
            frame.time_ns
        );
        last = frame.time_ns;
    }
}
