//! Peer-to-peer over a rack of real processes: by which way, who touches the bytes, and what is left when a
//! node dies or stalls.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::api::{DeviceState, Lease, LeaseStage};
use rackbus_devices::memory::BAR;
use rackbus_driver::{Drive, DriveError};
use rackbus_memory::Region as Mapping;
use rackbus_pci::vfio_user::Client as User;
use rackbus_spec::nvme::Status;
use rackbus_spec::vfio_user::region;
use rustix::process::Signal;
use serde_json::Value;
use support::{PATIENCE, Rack, open, socket, with_leases_of};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.gamma.devices.ram0]
kind = "memory"
size = "4 MiB"

[hosts.beta]
"#;
const SIZE: u64 = 4 << 20;
const AT: u64 = 1 << 40;

/// A drive of alpha and memory of gamma in the hands of one program of beta.
struct Program {
    leases: [Lease; 2],
    drive: Drive,
    memory: Mapping,
    _function: User,
}

impl Program {
    fn start(rack: &Rack) -> Program {
        let leases = ["alpha/nvme0", "gamma/ram0"].map(|function| {
            let said = rack.json(&["borrow", function, "--for", "beta", "--group", "db"]);
            serde_json::from_value::<Lease>(said).unwrap()
        });
        let function = User::connect(socket(&leases[1]), Duration::from_secs(60)).unwrap();
        let memory = function.map_region(BAR.into(), 0, SIZE).unwrap();
        let register = 0x10 + 4 * u64::from(BAR);
        function.write(region::CONFIG, register, &AT.to_le_bytes()).unwrap();
        function.write(region::CONFIG, 4, &[2, 0]).unwrap();
        let mut drive = open(&leases[0]);
        drive.write(0, &[0x5a; 1 << 20], false).unwrap();
        Program { leases, drive, memory, _function: function }
    }

    /// The drive reads a MiB into the BAR.
    fn read(&mut self) -> Result<(), DriveError> {
        self.drive.read_to(0, 1 << 20, AT)
    }

    fn is_refused(&mut self) -> bool {
        let refused = Status::DATA_TRANSFER_ERROR;
        matches!(self.read(), Err(DriveError::Command { status, .. }) if status.code() == refused)
    }
}

/// What the drive reaches of BARs.
fn windows(rack: &Rack) -> Vec<Value> {
    let ranges = rack.json(&["reach", "alpha/nvme0"]).as_array().unwrap().clone();
    ranges.into_iter().filter(|range| range["to"] == "bar").collect()
}

#[test]
fn bytes_take_the_route_that_path_shows_and_the_borrower_touches_none() {
    let rack = Rack::up(RACK);
    let mut program = Program::start(&rack);
    program.read().unwrap();
    assert_eq!(program.memory.whole().read_obj::<u64>(4096), Some(0x5a5a_5a5a_5a5a_5a5a));
    let windows = windows(&rack);
    let way = &rack.json(&["path", "alpha/nvme0", "gamma/ram0"])["components"];
    assert_eq!((windows.len(), &windows[0]["components"]), (1, way));
    assert_eq!(
        (&windows[0]["device"], &windows[0]["node"]),
        (&"gamma/ram0".into(), &"alpha".into())
    );
    // What the program may map is no secret either.
    let of_beta = rack.json(&["reach", "beta"]).as_array().unwrap().clone();
    let of_beta: Vec<_> = of_beta.iter().filter(|range| range["to"] == "bar").collect();
    assert_eq!((of_beta.len(), &of_beta[0]["device"]), (1, &"gamma/ram0".into()), "{of_beta:?}");
    assert_eq!((&of_beta[0]["bar"], &of_beta[0]["node"]), (&2.into(), &"gamma".into()));
    // Its node has the descriptor, which it passed on, and never mapped it.
    let maps = |host: &str| {
        let process = rack.process(Some(host)).pid.as_raw_nonzero();
        std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap()
    };
    assert!(maps("alpha").contains("memfd:memory "), "the drive's lender moves the bytes");
    assert!(!maps("beta").contains("memfd:memory "));
    // Nodes report while something changes, and not at once.
    let (begun, window) = (Instant::now(), "gamma/ram0 BAR 2, 4 MiB at 0x10000000000");
    while !rack.good(&["devices", "alpha/nvme0"]).contains(window) {
        assert!(begun.elapsed() < PATIENCE, "no window is told of");
    }
    let metrics = rack.good(&["metrics", "alpha"]);
    let written = "rackbus_function_peer_written_bytes_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\"} 1048576";
    assert!(metrics.contains(written), "{metrics}");
    for lease in &program.leases {
        rack.give_back(lease);
    }
}

#[test]
fn what_a_dead_lender_had_is_reached_no_more_and_the_drive_goes_on() {
    let rack = Rack::up(RACK);
    let mut program = Program::start(&rack);
    program.read().unwrap();
    rack.process(Some("gamma")).crash();
    let begun = Instant::now();
    while !windows(&rack).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "memory of a lender that is gone is reached");
    }
    assert!(program.is_refused());
    program.drive.read(0, &mut [0; 4096]).unwrap();
}

/// It cannot close its windows: the lenders take back what they lent when that has expired.
#[test]
fn a_borrower_that_stalls_leaves_no_window() {
    let rack = Rack::up(&with_leases_of("4 s", RACK));
    let mut program = Program::start(&rack);
    program.read().unwrap();
    let beta = rack.process(Some("beta"));
    beta.signal(Signal::STOP);
    for lease in &program.leases {
        rack.wait_lease(lease.lease, LeaseStage::Ended);
    }
    let begun = Instant::now();
    let offered = || {
        let devices = rack.block(rack.client().devices()).unwrap();
        devices.iter().all(|device| device.state == DeviceState::Offered)
    };
    while !offered() {
        assert!(begun.elapsed() < PATIENCE, "what was lent is not offered again");
    }
    // All nodes would be asked by `rackbus reach`, the one that stalls too.
    let alpha =
        ControlClient::new(&rack.run_dir().join("alpha").join(rackbus_node::metrics::SOCKET));
    let reached = rack.block(alpha.reach("alpha/nvme0")).unwrap();
    assert_eq!(reached, [], "a function that was taken back reaches memory");
    beta.signal(Signal::CONT);
    drop(program);
}

/// A drive of one lender reads into the persistent memory region of another's: once that is durable, it is there after both
/// lenders were killed, for whoever borrows that drive next, wherever its controller runs.
#[test]
fn what_a_region_acknowledged_is_there_when_its_lender_was_killed() {
    let text = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.gamma.devices.nvme0]
kind = "nvme"
size = "16 MiB"
buffer = "64 KiB"
persistent = "1 MiB"
persistent_file = "REGION"

[hosts.beta]
"#;
    const MIB: usize = 1 << 20;
    // On a disk: folders for temporary files are often in memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let region = folder.path().join("region.pmr");
    let mut rack = Rack::up(&text.replace("REGION", region.to_str().unwrap()));
    assert!(rack.good(&["devices", "gamma/nvme0"]).contains("1 MiB persistent memory"));
    let leases = ["alpha/nvme0", "gamma/nvme0"].map(|function| {
        let said = rack.json(&["borrow", function, "--for", "beta", "--group", "db"]);
        serde_json::from_value::<Lease>(said).unwrap()
    });
    let [mut from, mut to] = [&leases[0], &leases[1]].map(open);
    assert!(matches!(from.place_region(AT), Err(DriveError::Unsupported(_))));
    to.place_region(AT).unwrap();
    let data: Vec<u8> = (0..MIB).map(|at| (at / 512 + at % 241) as u8).collect();
    from.write(100, &data, false).unwrap();
    from.read_to(100, MIB, AT).unwrap();
    to.make_region_durable().unwrap();
    for host in ["alpha", "gamma"] {
        rack.process(Some(host)).crash();
    }
    drop((from, to));
    for host in ["alpha", "gamma"] {
        rack.restart(Some(host));
    }
    rack.wait_up(&["alpha", "beta", "gamma"]);
    for isolation in ["shared", "strict"] {
        rack.wait_device("gamma/nvme0", DeviceState::Offered);
        let said = rack.json(&["borrow", "gamma/nvme0", "--for", "beta", "--isolation", isolation]);
        let lease: Lease = serde_json::from_value(said).unwrap();
        let mut drive = open(&lease);
        drive.place_region(AT).unwrap();
        drive.write_from(500, MIB, AT).unwrap();
        let mut found = vec![0; MIB];
        drive.read(500, &mut found).unwrap();
        assert!(found == data, "{isolation}: what was durable is lost");
        drive.make_region_durable().unwrap();
        drop(drive);
        rack.give_back(&lease);
    }
}

/// Two drives of two lenders: what one reads into the buffer of the other is written from there by that one.
#[test]
fn a_drive_reads_into_the_memory_buffer_of_another() {
    let text = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.gamma.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"
buffer = "1 MiB"

[hosts.beta]
"#;
    const MIB: usize = 1 << 20;
    let rack = Rack::up(text);
    assert!(rack.good(&["devices", "gamma/nvme0"]).contains("1 MiB memory buffer"));
    let leases = ["alpha/nvme0", "gamma/nvme0"].map(|function| {
        let said = rack.json(&["borrow", function, "--for", "beta", "--group", "db"]);
        serde_json::from_value::<Lease>(said).unwrap()
    });
    let [mut from, mut to] = [&leases[0], &leases[1]].map(open);
    assert!(matches!(from.place_buffer(AT), Err(DriveError::Unsupported(_))));
    assert!(matches!(to.place_buffer(AT + 4096), Err(DriveError::Request(_))));
    assert_eq!(to.place_buffer(AT).unwrap(), MIB as u64);
    let data: Vec<u8> = (0..MIB).map(|at| (at / 512 + at % 251) as u8).collect();
    from.write(100, &data, false).unwrap();
    from.read_to(100, MIB, AT).unwrap();
    to.write_from(500, MIB, AT).unwrap();
    let mut found = vec![0; MIB];
    to.read(500, &mut found).unwrap();
    assert!(found == data, "what was copied differs");
    let metrics = rack.good(&["metrics", "alpha"]);
    let written = "rackbus_function_peer_written_bytes_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\"} 1048576";
    assert!(metrics.contains(written), "{metrics}");
    // Beyond its end, and when it is given back, there is nothing.
    let refused = |outcome: Result<(), DriveError>| matches!(outcome, Err(DriveError::Command { status, .. }) if status.code() == Status::DATA_TRANSFER_ERROR);
    assert!(refused(from.read_to(100, 4096, AT + MIB as u64)));
    drop(to);
    rack.give_back(&leases[1]);
    assert!(refused(from.read_to(100, 4096, AT)));
    // Its next user finds zeroes, also where the controller runs at the borrower.
    let said = rack.json(&["borrow", "gamma/nvme0", "--for", "beta", "--isolation", "strict"]);
    let lease: Lease = serde_json::from_value(said).unwrap();
    let mut strict = open(&lease);
    assert_eq!(strict.place_buffer(AT).unwrap(), MIB as u64);
    strict.write_from(0, MIB, AT).unwrap();
    strict.read(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "a former user's data is in the buffer");
    // In a group it is told to whoever borrows it that it reaches none of the others.
    drop(strict);
    rack.give_back(&lease);
    let borrow = |isolation| {
        let args =
            ["borrow", "gamma/nvme0", "--for", "beta", "--group", "db", "--isolation", isolation];
        rack.good(&args)
    };
    let apart = "it reaches no memory of the group's other functions";
    assert!(borrow("strict").contains(apart));
    rack.good(&["return", "gamma/nvme0"]);
    assert!(!borrow("shared").contains(apart));
}
