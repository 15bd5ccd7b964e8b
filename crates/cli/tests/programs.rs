//! Programs that borrow devices by themselves, and die, or whose device goes: what they had goes back, what they
//! have mapped leads nowhere.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_attach::devices::{BorrowedDevice, DeviceError, DeviceMapping, Devices};
use rackbus_attach::{
    AttachError, LocalSegment, Location, Mapping, Refusal, SegmentKind, SegmentOptions, Session,
    Withdrawal,
};
use rackbus_control::api::{DeviceState, LeaseStage, Placement};
use support::machines::Machines;
use support::segments::answered;
use support::{PATIENCE, Rack, THREE_HOSTS};

/// CAP's lower half of a drive, MAGIC of an accelerator, neither of which is all ones or zero.
const CAP: usize = 0;

fn devices(run_dir: std::path::PathBuf, host: &str) -> Devices {
    let location = Location { run_dir, host: host.to_owned() };
    let session = Session::open(&location).unwrap();
    Devices::open(&session, &location).unwrap()
}

fn borrow(devices: &Devices, function: &str, strict: bool) -> Result<BorrowedDevice, DeviceError> {
    let all = devices.list().unwrap();
    let entry = all.iter().find(|entry| entry.function == function).unwrap();
    devices.borrow(entry.fdid, strict)
}

/// A device's registers, mapped.
fn registers(device: &BorrowedDevice) -> Mapping {
    let bar = device.connect_bar(0).unwrap();
    bar.map(0, bar.size()).unwrap()
}

fn load(registers: &Mapping, at: usize) -> u32 {
    registers.whole().load_u32(at, Ordering::Acquire).unwrap()
}

/// Waits until all registers read ones.
fn wait_gone(registers: &Mapping) {
    let begun = Instant::now();
    while (0..8192).step_by(4).any(|at| load(registers, at) != u32::MAX) {
        assert!(begun.elapsed() < PATIENCE, "the registers stay: {:#x}", load(registers, CAP));
        std::thread::yield_now();
    }
}

/// Another process on beta that has borrowed `alpha/nvme0`, which is this test binary in its [`part`].
struct Program(Child);

impl Program {
    fn start(rack: &Rack) -> Program {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "part", "--ignored", "--nocapture", "--quiet"])
            .env("PART_RUN_DIR", rack.run_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("borrowed")), "it ends");
        Program(child)
    }
}

/// What the other process does: it keeps what it has until its input ends, or it is killed.
#[test]
#[ignore = "a part of the other tests, which start it"]
fn part() {
    let Some(run_dir) = std::env::var_os("PART_RUN_DIR") else { return };
    let devices = devices(run_dir.into(), "beta");
    let device = borrow(&devices, "alpha/nvme0", false).unwrap();
    let _registers = registers(&device);
    println!("borrowed");
    let _ = std::io::stdin().read_line(&mut String::new());
    // As a program that does not return what it has.
    std::process::exit(0);
}

#[test]
fn what_a_program_borrowed_goes_back_when_it_ends_however_it_ends() {
    let rack = Rack::up(THREE_HOSTS);
    for killed in [false, true] {
        let mut program = Program::start(&rack);
        let lent = rack.wait_device("alpha/nvme0", DeviceState::Lent);
        assert_eq!(lent.holder.as_deref(), Some("beta"));
        // Others are told who has it, and wait as usual.
        let told = rack.bad(1, &["borrow", "alpha/nvme0", "--for", "gamma"]);
        assert!(told.contains("beta"), "{told}");
        let refused = borrow(&devices(rack.run_dir(), "gamma"), "alpha/nvme0", false);
        let in_use = |error: &DeviceError| matches!(error, DeviceError::Attach(AttachError::Refused(Refusal::DeviceInUse(said))) if said.contains("beta"));
        assert!(refused.as_ref().is_err_and(in_use), "{refused:?}");
        match killed {
            true => program.0.kill().unwrap(),
            false => drop(program.0.stdin.take()),
        }
        program.0.wait().unwrap();
        rack.wait_device("alpha/nvme0", DeviceState::Offered);
        let ended = rack.wait_lease(lent.lease.unwrap(), LeaseStage::Ended);
        assert!(ended.returned, "{ended:?}");
    }
    // It is free for everybody.
    rack.give_back(&rack.borrow("alpha/nvme0", "gamma"));
}

#[test]
fn a_device_that_is_taken_away_reads_ones_and_says_so() {
    let rack = Rack::up(THREE_HOSTS);
    let devices = devices(rack.run_dir(), "beta");
    let memory = SegmentOptions { id: 1, choose: true, size: 8192, kind: SegmentKind::Private };
    let memory = devices.session().create_segment(&memory).unwrap();
    for strict in [false, true] {
        let device = borrow(&devices, "alpha/nvme0", strict).unwrap();
        let lease = rack.wait_lease(device.lease(), LeaseStage::Active);
        let placement = if strict { Placement::Borrower } else { Placement::Lender };
        assert_eq!(lease.placement, placement);
        let registers = registers(&device);
        assert!(![0, u32::MAX].contains(&load(&registers, CAP)));
        let mapping = device.map_local(&memory, (100, 5000)).unwrap();
        assert_eq!(mapping.address() % 4096, 100);
        rack.give_back(&lease);
        wait_gone(&registers);
        let gone = |outcome: Result<(), DeviceError>| {
            assert!(matches!(outcome, Err(DeviceError::Gone)), "{outcome:?}");
        };
        gone(device.identity().map(drop));
        gone(device.connect_bar(0).map(drop));
        gone(device.map_local(&memory, (0, 4096)).map(drop));
        gone(device.create_segment(1, 4096).map(drop));
        drop(mapping);
        // It was over already.
        device.give_back().unwrap();
        rack.wait_device("alpha/nvme0", DeviceState::Offered);
    }
}

#[test]
fn registers_of_a_lender_that_was_killed_read_ones() {
    let accelerator = "[hosts.alpha.devices.accel0]\nkind = \"accelerator\"\nfunctions = 1\n";
    let mut rack = Rack::up(&format!("{THREE_HOSTS}{accelerator}"));
    let devices = devices(rack.run_dir(), "beta");
    let functions = ["alpha/nvme0", "alpha/accel0.vf1"].map(|it| [(it, false), (it, true)]);
    for (function, strict) in functions.into_iter().flatten() {
        let device = borrow(&devices, function, strict).unwrap();
        let registers = registers(&device);
        assert!(![0, u32::MAX].contains(&load(&registers, CAP)));
        rack.process(Some("alpha")).crash();
        wait_gone(&registers);
        assert!(matches!(device.identity(), Err(DeviceError::Gone)));
        drop(device);
        rack.restart(Some("alpha"));
        rack.wait_device(function, DeviceState::Offered);
    }
}

#[test]
fn registers_read_ones_when_the_programs_own_node_was_killed() {
    let mut rack = Rack::up(THREE_HOSTS);
    let of_first_life = devices(rack.run_dir(), "beta");
    let device = borrow(&of_first_life, "alpha/nvme0", false).unwrap();
    let registers = registers(&device);
    rack.process(Some("beta")).crash();
    // The lender does it: nobody is left here.
    wait_gone(&registers);
    assert!(matches!(device.identity(), Err(DeviceError::Gone)));
    rack.restart(Some("beta"));
    rack.wait_device("alpha/nvme0", DeviceState::Offered);
    drop((device, of_first_life));
    // The program attaches anew; that its device is offered says nothing of its own node.
    let begun = Instant::now();
    let beta = Location { run_dir: rack.run_dir(), host: "beta".to_owned() };
    while let Err(error) = Session::open(&beta) {
        assert!(begun.elapsed() < PATIENCE, "{error}{}", rack.logs());
        std::thread::sleep(Duration::from_millis(5));
    }
    let again = devices(rack.run_dir(), "beta");
    let device = borrow(&again, "alpha/nvme0", false).unwrap();
    device.give_back().unwrap();
}

/// A drive's admin queue, by registers in memory and a private segment.
struct Admin {
    registers: Mapping,
    memory: Mapping,
    entries: u32,
    _of_device: DeviceMapping,
    _segment: LocalSegment,
}

impl Admin {
    const ENTRIES: u32 = 8;

    fn of(devices: &Devices, device: &BorrowedDevice) -> Admin {
        let options =
            SegmentOptions { id: 1, choose: true, size: 8192, kind: SegmentKind::Private };
        let segment = devices.session().create_segment(&options).unwrap();
        let of_device = device.map_local(&segment, (0, 8192)).unwrap();
        let (registers, memory) = (registers(device), segment.map(0, 8192).unwrap());
        let at = of_device.address();
        let store = |offset, value| registers.whole().store_u32(offset, value, Ordering::SeqCst);
        let queues = [at, at + 4096].map(|queue| [queue as u32, (queue >> 32) as u32]);
        store(0x24, (Admin::ENTRIES - 1) << 16 | (Admin::ENTRIES - 1)).unwrap();
        for (place, [low, high]) in [0x28, 0x30].into_iter().zip(queues) {
            store(place, low).unwrap();
            store(place + 4, high).unwrap();
        }
        store(0x14, 4 << 20 | 6 << 16 | 1).unwrap();
        while load(&registers, 0x1c) != 1 {
            std::thread::yield_now();
        }
        Admin { registers, memory, entries: 0, _of_device: of_device, _segment: segment }
    }

    /// Has the drive say what it is, to whatever is at `address`; the status.
    fn identify(&mut self, address: u64) -> u32 {
        let (slot, turn) = (self.entries % Admin::ENTRIES, self.entries / Admin::ENTRIES);
        let mut command = [0_u32; 16];
        (command[0], command[10]) = (6, 1);
        (command[6], command[7]) = (address as u32, (address >> 32) as u32);
        let memory = self.memory.whole();
        for (at, dword) in command.into_iter().enumerate() {
            memory.store_u32(slot as usize * 64 + at * 4, dword, Ordering::SeqCst).unwrap();
        }
        self.entries += 1;
        let ring = |nth: usize, value| {
            let stride = 4 << (load(&self.registers, 4) & 0xf);
            let place = 0x1000 + nth * stride;
            self.registers.whole().store_u32(place, value, Ordering::SeqCst).unwrap();
        };
        ring(0, self.entries % Admin::ENTRIES);
        let wanted = u32::from(turn.is_multiple_of(2));
        let begun = Instant::now();
        let last = loop {
            let place = 4096 + slot as usize * 16 + 12;
            let last = memory.load_u32(place, Ordering::Acquire).unwrap();
            if last >> 16 & 1 == wanted {
                break last;
            }
            assert!(begun.elapsed() < PATIENCE, "the drive does not answer");
            std::thread::yield_now();
        };
        ring(1, self.entries % Admin::ENTRIES);
        // Status code type and code, without the bits that say what else there is to know.
        last >> 17 & 0x7ff
    }
}

/// The model number in what a drive says of itself.
fn model(told: &Mapping) -> [u8; 16] {
    let mut model = [0; 16];
    told.whole().part(24, 16).unwrap().copy_to(&mut model);
    model
}

/// Memory that is taken away from others moves, and what a device has of it follows: the device writes where its
/// user reads, and not where somebody else did.
#[test]
fn a_device_follows_memory_that_its_node_moves() {
    let rack = Rack::up(THREE_HOSTS);
    let devices = devices(rack.run_dir(), "beta");
    let device = borrow(&devices, "alpha/nvme0", false).unwrap();
    let mut admin = Admin::of(&devices, &device);
    let segment = devices.session().create_segment(&SegmentOptions::shared(9, 4096)).unwrap();
    segment.set_available().unwrap();
    let of_device = device.map_local(&segment, (0, 4096)).unwrap();
    let told = segment.map(0, 4096).unwrap();
    let gamma = Location { run_dir: rack.run_dir(), host: "gamma".to_owned() };
    let gamma = Session::open(&gamma).unwrap();
    for round in 0..3 {
        segment.set_available().unwrap();
        let remote = answered(|| gamma.connect(segment_node(&devices), 9, 20_000)).unwrap();
        let seen = remote.map(0, 4096).unwrap();
        assert_eq!(admin.identify(of_device.address()), 0, "round {round}");
        assert_eq!(model(&seen), model(&told));
        assert_ne!(model(&told), [0; 16]);
        segment.set_unavailable(Withdrawal::Force).unwrap();
        told.whole().fill(0);
        assert_eq!(admin.identify(of_device.address()), 0, "round {round}");
        assert_ne!(model(&told), [0; 16], "the device writes elsewhere");
        assert_eq!(model(&seen), [0; 16], "who lost the memory sees what a device writes");
        drop((remote, seen));
    }
    // Memory that is mapped no more is out of the device's reach: its own error, and counted.
    drop(of_device);
    told.whole().fill(0);
    assert_eq!(admin.identify(1 << 33), 4, "data transfer error");
    assert_eq!(model(&told), [0; 16]);
    device.give_back().unwrap();
}

/// Number of the host that a session is on.
fn segment_node(devices: &Devices) -> u32 {
    devices.session().node()
}

const MACHINES: &str = r#"
name = "lab"

[[share]]
host = "gamma"
segments = "*"
with = "*"
access = "write"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"

[hosts.beta]
[hosts.gamma]
"#;

/// Between machines the drive's controller runs at its borrower, and stores to a stand-in of another machine's
/// memory, which is there when the program has flushed.
#[test]
fn a_program_uses_a_drive_and_memory_of_other_machines() {
    let rack = Machines::start(MACHINES);
    let [_alpha, beta, gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    let devices = devices(beta.run_dir(), "beta");
    let device = borrow(&devices, "alpha/nvme0", false).unwrap();
    let mut admin = Admin::of(&devices, &device);
    let gamma = Location { run_dir: gamma.run_dir(), host: "gamma".to_owned() };
    let owner = Session::open(&gamma).unwrap();
    let segment = owner.create_segment(&SegmentOptions::shared(9, 4096)).unwrap();
    let home = segment.map(0, 4096).unwrap();
    segment.set_available().unwrap();
    let remote = answered(|| devices.session().connect(owner.node(), 9, 20_000)).unwrap();
    assert!(remote.is_far());
    let of_device = device.map_remote(&remote, (0, 4096)).unwrap();
    assert_eq!(admin.identify(of_device.address()), 0);
    remote.flush().unwrap();
    assert_ne!(model(&home), [0; 16]);
    assert_eq!(model(&home), model(&remote.map(0, 4096).unwrap()));
    // A memory function's accesses go to another machine one by one, so a program cannot have its memory mapped.
    let memory = borrow(&devices, "alpha/ram0", false).unwrap();
    let refused = memory.connect_bar(2).unwrap_err();
    assert!(matches!(refused, DeviceError::NotMemory(2)), "{refused}");
    memory.give_back().unwrap();
    drop(of_device);
    device.give_back().unwrap();
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
}

/// What a program has mapped of a device goes on to the next process of its node: the program asks the device as before.
#[test]
fn a_program_goes_on_with_its_device_when_the_node_of_that_is_restarted_in_place() {
    let rack = Rack::up(THREE_HOSTS);
    let devices = devices(rack.run_dir(), "beta");
    let device = borrow(&devices, "alpha/nvme0", false).unwrap();
    let mut admin = Admin::of(&devices, &device);
    let segment = devices.session().create_segment(&SegmentOptions::shared(9, 4096)).unwrap();
    let of_device = device.map_local(&segment, (0, 4096)).unwrap();
    let told = segment.map(0, 4096).unwrap();
    for round in 0..3 {
        assert_eq!(admin.identify(of_device.address()), 0, "round {round}");
        assert_ne!(model(&told), [0; 16]);
        told.whole().fill(0);
        rack.restart_in_place("alpha");
    }
    assert_eq!(admin.identify(of_device.address()), 0);
    assert_ne!(model(&told), [0; 16]);
    let lent = rack.wait_device("alpha/nvme0", DeviceState::Lent);
    assert_eq!(rack.wait_lease(lent.lease.unwrap(), LeaseStage::Active).borrower, "beta");
    device.give_back().unwrap();
}

impl Drop for Program {
    fn drop(&mut self) {
        // One that has ended is waited for anyway.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
