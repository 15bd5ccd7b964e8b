//! Nodes restarted in place while drives are in use: nobody gets an error, nothing that was acknowledged is
//! lost, and leases, sockets and mappings stay what they are.

mod support;

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_attach::{Location, Session};
use rackbus_control::api::{DeviceState, Lease, LeaseStage};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::PolledRegisters;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{Client, LocalFunction, serve_function};
use rackbus_spec::nvme::registers;
use rackbus_spec::vfio_user::region;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use support::load::Load;
use support::{PATIENCE, Rack, THREE_HOSTS, open, pattern, socket};

/// Drives in memory and in a file, and memory itself. Leases live as long as they do by default: a busy
/// machine may keep a node from its processor for longer than the time of a hasty one.
const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "memory"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.ram0]
kind = "memory"
size = "1 MiB"

[hosts.beta]
[hosts.gamma]
"#;

/// Restarts a node; its row.
fn restart(rack: &Rack, host: &str) -> Value {
    let pid = rack.process(Some(host)).pid;
    let row = rack.restart_in_place(host);
    assert_eq!(rack.process(Some(host)).pid, pid, "it is another process");
    row
}

/// Restarts lender, borrower and somebody else again and again under a load on `lease`.
fn restarts_under_load(rack: &Rack, lease: &Lease, rounds: u64) {
    let load = Load::start(lease);
    load.progress(50, || rack.logs());
    let reached = rack.json(&["reach", &lease.function]);
    assert!(reached.as_array().is_some_and(|ranges| !ranges.is_empty()), "{reached}");
    for round in 1..=rounds {
        for host in ["alpha", "beta", "gamma"] {
            let row = restart(rack, host);
            assert_eq!(row["in_use"], u64::from(host != "gamma"), "{row}");
            assert!(row["pause_us"].as_u64().is_some_and(|us| us > 0), "{row}");
            load.progress(20, || rack.logs());
        }
        assert_eq!(
            rack.json(&["reach", &lease.function]),
            reached,
            "round {round}: other mappings"
        );
    }
    rack.wait_up(&["alpha", "beta", "gamma"]);
    let same = rack.block(rack.client().lease(lease.lease)).unwrap();
    assert_eq!((same.stage, same.epoch), (LeaseStage::Active, lease.epoch), "{same:?}");
    assert_eq!(same.socket, lease.socket);
    drop(load.finish());
    // What follows is as usual: the next user finds a drive, and the lease can be returned.
    open(lease).read(0, &mut [0; 512]).unwrap();
    assert!(rack.give_back(lease).returned);
    rack.wait_device(&lease.function, DeviceState::Offered);
}

#[test]
fn a_driver_notices_nothing_when_lender_and_borrower_are_restarted() {
    let rack = Rack::up(RACK);
    for drive in ["alpha/nvme0", "alpha/nvme1"] {
        let lease = rack.borrow(drive, "beta");
        restarts_under_load(&rack, &lease, 5);
    }
    let events = rack.good(&["events", "--kind", "restart"]);
    assert!(events.contains("the node of alpha was restarted in place"), "{events}");
}

#[test]
fn a_front_at_the_borrower_and_its_medium_go_on_as_well() {
    let rack = Rack::up(RACK);
    for drive in ["alpha/nvme0", "alpha/nvme1"] {
        let strict = ["borrow", drive, "--for", "beta", "--isolation", "strict"];
        let lease: Lease = serde_json::from_value(rack.json(&strict)).unwrap();
        restarts_under_load(&rack, &lease, 5);
    }
}

/// A program at `path` that is asked and answers as this script says.
fn program(path: &Path, script: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// A file system of its own, which can be made to stand still; it moves again when this is dropped.
struct FileSystem {
    folder: tempfile::TempDir,
}

impl FileSystem {
    fn new() -> FileSystem {
        let folder = tempfile::tempdir().unwrap();
        let files = FileSystem { folder };
        let image = files.folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        std::fs::create_dir(files.path()).unwrap();
        let image = image.to_str().unwrap();
        run("mkfs.ext4", &["-q", image]);
        run("mount", &["-o", "loop", image, files.path().to_str().unwrap()]);
        files
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("files")
    }

    /// From now on writes wait, in the kernel and beyond any signal, until it is thawed.
    fn freeze(&self) {
        run("fsfreeze", &["--freeze", self.path().to_str().unwrap()]);
    }

    fn thaw(&self) {
        run("fsfreeze", &["--unfreeze", self.path().to_str().unwrap()]);
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // Both fail where there is nothing to undo.
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(self.path()).output();
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).output();
    }
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
}

/// Whether an operation of the process's io_uring waits in the kernel, where no signal ends that.
fn waits_in_kernel(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut stats =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    stats.any(|stat| stat.contains("(iou-wrk-") && stat.contains(") D "))
}

/// `execve` waits for what the kernel still does for a process. A node whose storage stands still would neither be
/// the old one nor the new one until then, for all that it lends.
#[test]
fn a_node_whose_storage_stands_still_is_not_restarted() {
    let files = FileSystem::new();
    let text = RACK.replace("\"file\"", &format!("\"{}\"", files.path().join("drive").display()));
    let rack = Rack::up(&text);
    let (stuck, other) = (rack.borrow("alpha/nvme1", "beta"), rack.borrow("alpha/nvme0", "beta"));
    let mut drive = open(&stuck);
    drive.write(0, &pattern(1, 4096), true).unwrap();
    let mut working = open(&other);
    files.freeze();
    let writer = std::thread::spawn(move || {
        drive.write(64, &pattern(2, 4096), true).unwrap();
        drive
    });
    let alpha = rack.process(Some("alpha")).pid.as_raw_nonzero().get();
    let begun = Instant::now();
    while !waits_in_kernel(alpha) {
        assert!(begun.elapsed() < PATIENCE, "nothing waits for the file system");
        std::thread::sleep(Duration::from_millis(1));
    }
    for round in 0..3 {
        let begun = Instant::now();
        let mut said = String::new();
        // A busy machine may keep something else from coming to rest first.
        while !said.contains("the storage of nvme1 does not answer") {
            assert!(begun.elapsed() < PATIENCE, "{said}");
            said = rack.bad(1, &["restart", "alpha"]);
        }
        let data = pattern(10 + round, 4096);
        working.write(0, &data, true).unwrap();
        assert!(working.compare(0, &data).unwrap());
    }
    files.thaw();
    let mut drive = writer.join().unwrap();
    assert_eq!(restart(&rack, "alpha")["restarts"], 1);
    assert!(drive.compare(0, &pattern(1, 4096)).unwrap());
    assert!(drive.compare(64, &pattern(2, 4096)).unwrap());
    assert!(working.compare(0, &pattern(12, 4096)).unwrap());
}

#[test]
fn a_node_that_cannot_be_restarted_says_why_and_goes_on() {
    let rack = Rack::up(RACK);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let load = Load::start(&lease);
    load.progress(50, || rack.logs());
    let folder = tempfile::tempdir().unwrap();
    let older =
        "echo 'rackbus: the state of a node has version 9, this program knows 8; x' >&2; exit 1";
    // It says that it can, and is gone when it is to.
    let gone = "cat >/dev/null; rm \"$0\"; echo 'ready to go on'";
    for (script, why) in [
        ("true", "it is no rackbus that can"),
        (older, "has version 9, this program knows 8"),
        (gone, "No such file"),
    ] {
        for host in ["alpha", "beta"] {
            let said = support::not_for_being_busy(|| {
                let program = program(&folder.path().join("program"), script);
                rack.bad(1, &["restart", host, "--program", &program])
            });
            assert!(said.contains(why) && said.contains("goes on"), "{said}");
            load.progress(20, || rack.logs());
        }
    }
    assert!(rack.bad(1, &["restart", "delta"]).contains("no node of delta runs"));
    assert!(rack.bad(2, &["restart", "alpha", "--program", "/nowhere"]).contains("/nowhere"));
    assert_eq!(restart(&rack, "alpha")["restarts"], 1);
    load.progress(20, || rack.logs());
    drop(load.finish());
    assert!(rack.give_back(&lease).returned);
}

#[test]
fn a_function_that_is_gone_stays_gone_for_whoever_still_has_it() {
    let rack = Rack::up(RACK);
    let connect = |lease: &Lease| Client::connect(socket(lease), PATIENCE).unwrap();
    let vendor = |client: &Client| {
        let mut vendor = [0; 2];
        client.read(region::CONFIG, 0, &mut vendor).map(|()| vendor).expect("nobody answers")
    };
    let lease = rack.borrow("alpha/nvme1", "beta");
    let ended = connect(&lease);
    let lost = rack.borrow("alpha/nvme0", "beta");
    let orphan = connect(&lost);
    assert!([&ended, &orphan].iter().all(|client| vendor(client) != [0xff; 2]));
    // The lease of the one has ended, the lender of the other has died.
    assert!(rack.give_back(&lease).returned);
    rack.process(Some("alpha")).crash();
    rack.wait_lease(lost.lease, LeaseStage::Ended);
    for _ in 0..2 {
        restart(&rack, "beta");
        for client in [&ended, &orphan] {
            assert_eq!(vendor(client), [0xff; 2]);
            client.reset().expect("it is taken, and has no effect");
        }
    }
}

#[test]
fn memory_that_a_user_mapped_stays_the_functions() {
    let rack = Rack::up(RACK);
    for isolation in ["shared", "strict"] {
        let ask = ["borrow", "alpha/ram0", "--for", "beta", "--isolation", isolation];
        let lease: Lease = serde_json::from_value(rack.json(&ask)).unwrap();
        let client = Client::connect(socket(&lease), PATIENCE).unwrap();
        // Memory space on.
        client.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
        let mapped = client.map_region(2, 0, 4096).unwrap();
        for round in 1..=3u8 {
            mapped.slice(0, 4).unwrap().copy_from(&[round; 4]);
            restart(&rack, "alpha");
            restart(&rack, "beta");
            let mut read = [0; 4];
            client.read(2, 0, &mut read).unwrap();
            assert_eq!(read, [round; 4], "{isolation}");
        }
        drop(client);
        assert!(rack.give_back(&lease).returned);
        let mut kept = [9; 4];
        mapped.slice(0, 4).unwrap().copy_to(&mut kept);
        assert_ne!(kept, [3; 4], "{isolation}: whoever keeps the mapping keeps the memory");
    }
}

/// Peer-to-peer continues with the nodes of the drive, of the memory and of their borrower in other processes,
/// which go on following the BAR.
#[test]
fn functions_go_on_reaching_each_other() {
    const AT: u64 = 0x38_0000_0000;
    const SIZE: u64 = 1 << 20;
    let memory = "[hosts.gamma.devices.ram0]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let rack = Rack::up(&THREE_HOSTS.replace("[hosts.gamma]", memory));
    let borrow = |function: &str| -> Lease {
        let lease = rack.json(&["borrow", function, "--for", "beta", "--group", "db"]);
        serde_json::from_value(lease).unwrap()
    };
    let (drive, target) = (borrow("alpha/nvme0"), borrow("gamma/ram0"));
    let mut drive = Drive::open(socket(&drive), DriveOptions::default()).unwrap();
    drive.write(0, &[0x5a; 4096], false).unwrap();
    let client = Client::connect(socket(&target), PATIENCE).unwrap();
    let mapped = client.map_region(2, 0, SIZE).unwrap();
    // BAR 2, and memory space on.
    let place = |at: u64| client.write(region::CONFIG, 0x18, &at.to_le_bytes()).unwrap();
    place(AT);
    client.write(region::CONFIG, 4, &2u16.to_le_bytes()).unwrap();
    let reads = |drive: &mut Drive, at: u64| {
        mapped.slice(0, 8).unwrap().copy_from(&[0; 8]);
        drive.read_to(0, 4096, at).unwrap();
        let mut found = [0; 8];
        mapped.slice(0, 8).unwrap().copy_to(&mut found);
        assert_eq!(found, [0x5a; 8]);
    };
    reads(&mut drive, AT);
    let reached = rack.json(&["reach", "alpha/nvme0"]);
    for at in [AT + SIZE, AT] {
        for host in ["beta", "alpha", "gamma", "beta"] {
            restart(&rack, host);
            reads(&mut drive, AT);
            assert_eq!(rack.json(&["reach", "alpha/nvme0"]), reached, "after a restart of {host}");
        }
        place(at);
        reads(&mut drive, at);
        place(AT);
        assert!(at == AT || drive.read_to(0, 4096, at).is_err(), "a window that is closed");
    }
    assert!(rack.give_back(&target).returned);
    assert!(drive.read_to(0, 4096, AT).is_err(), "a function that is returned is reached");
}

/// The variable that makes this program a vfio-user server: the socket that it listens at.
const SERVE: &str = "RACKBUS_TEST_SERVE";

fn serve_drive(socket: &Path) -> LocalFunction {
    let model = Nvme::new(&NvmeConfig::memory(16 << 20, "upstream")).unwrap();
    serve_function(Box::new(model), socket, EngineOptions::default()).unwrap()
}

/// Is the server that a node runs in [`functions_of_other_programs_go_on`].
#[test]
fn serves_when_it_is_told_to() {
    let Ok(socket) = std::env::var(SERVE) else { return };
    let socket = PathBuf::from(socket);
    std::fs::write(socket.with_extension("pid"), std::process::id().to_string()).unwrap();
    let _server = serve_drive(&socket);
    loop {
        std::thread::park();
    }
}

/// A server that listens by itself, and one that the node runs for each user.
#[test]
fn functions_of_other_programs_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (own, run) = (folder.path().join("own.sock"), folder.path().join("run.sock"));
    let _served = serve_drive(&own);
    let program = std::env::current_exe().unwrap();
    let rack = Rack::up(&format!(
        "name = \"lab\"\n[hosts.alpha.devices.own0]\nkind = \"upstream\"\nsocket = {own:?}\n\
         [hosts.alpha.devices.run0]\nkind = \"upstream\"\nsocket = {run:?}\n\
         command = [\"env\", \"{SERVE}={}\", {program:?}, \"--exact\", \"serves_when_it_is_told_to\"]\n\
         [hosts.beta]\n[hosts.gamma]\n",
        run.display()
    ));
    let server = || {
        let number = std::fs::read_to_string(run.with_extension("pid")).unwrap();
        Pid::from_raw(number.parse().unwrap()).unwrap()
    };
    let lease = rack.borrow("alpha/own0", "beta");
    restarts_under_load(&rack, &lease, 2);
    let lease = rack.borrow("alpha/run0", "beta");
    restarts_under_load(&rack, &lease, 2);

    // It is the same process all the time, and ends with its user.
    let lease = rack.borrow("alpha/run0", "beta");
    let mut drive = open(&lease);
    let before = server();
    restart(&rack, "alpha");
    drive.write(0, &[0xa5; 4096], false).unwrap();
    assert!(rack.give_back(&lease).returned);
    assert_eq!(server(), before);
    assert!(test_kill_process(before).is_err(), "the server is still there");
    drop(drive);

    // One that ends after the restart is lost to its user, as before it.
    let lease = rack.borrow("alpha/run0", "gamma");
    let mut drive = open(&lease);
    drive.write(0, &[0x5a; 4096], false).unwrap();
    restart(&rack, "alpha");
    kill_process(server(), Signal::KILL).unwrap();
    while drive.flush().is_ok() {}
    let _ = rack.run(&["return", &lease.lease.to_string()]);
    rack.wait_device("alpha/run0", DeviceState::Offered);
    drop(open(&rack.borrow("alpha/run0", "beta")));
}

#[test]
fn a_node_is_not_restarted_while_processes_share_memory() {
    let rack = Rack::up(RACK);
    let place = Location { run_dir: rack.run_dir(), host: "alpha".to_owned() };
    let session = Session::open(&place).unwrap();
    let said = rack.restart_refused("alpha");
    assert!(said.contains("share memory") && said.contains("sessions: 1"), "{said}");
    drop(session);
    // Its node hears of that.
    let deadline = Instant::now() + PATIENCE;
    while !rack.run(&["restart", "alpha"]).status.success() {
        assert!(Instant::now() < deadline, "the session stays{}", rack.logs());
    }
    drop(Session::open(&place).expect("its socket is served"));
}

/// A driver of a drive that only loads and stores: its registers are memory, and so are the admin queues and what is asked for.
struct Stores {
    registers: PolledRegisters,
    memory: SharedMemory,
    asked: u32,
    _client: Client,
}

impl Stores {
    const AT: u64 = 0x10_0000;
    const ENTRIES: u32 = 16;
    const READY: u32 = 1;

    fn open(lease: &Lease) -> Stores {
        let client = Client::connect(socket(lease), PATIENCE).unwrap();
        let memory = SharedMemory::create("driver", 0x3000).unwrap();
        let both = Access::READ | Access::WRITE;
        client.dma_map(Stores::AT, 0x3000, both, Some((memory.as_fd(), 0))).unwrap();
        client.write(region::CONFIG, 4, &6u16.to_le_bytes()).unwrap();
        let (file, length) = client.registers(0).unwrap();
        let registers = PolledRegisters::adopt(file, length).unwrap();
        Stores { registers, memory, asked: 0, _client: client }
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < PATIENCE, "{what}");
            std::thread::yield_now();
        }
    }

    fn enable(&mut self, on: bool) {
        if on {
            let size = Stores::ENTRIES - 1;
            self.registers.store(registers::AQA, size << 16 | size);
            self.registers.store_pair(registers::ASQ, Stores::AT);
            self.registers.store_pair(registers::ACQ, Stores::AT + 0x1000);
            self.memory.whole().fill(0);
            self.asked = 0;
        }
        // Entries of 64 and of 16 bytes.
        self.registers.store(registers::CC, 4 << 20 | 6 << 16 | u32::from(on));
        let ready = || self.registers.load(registers::CSTS) & Stores::READY == u32::from(on);
        self.until("it is not enabled, or not disabled", ready);
    }

    /// Has it identify itself: its vendor, by a command whose doorbell is stored `between` its being put into the queue and
    /// the look for its completion.
    fn vendor(&mut self, between: impl FnOnce()) -> u16 {
        let (at, turn) = (self.asked % Stores::ENTRIES, self.asked / Stores::ENTRIES);
        let mut command = [0u32; 16];
        (command[0], command[10]) = (self.asked << 16 | 6, 1);
        command[6] = Stores::AT as u32 + 0x2000;
        self.memory.whole().write_obj(64 * at as usize, &command);
        self.asked += 1;
        let stride = self.registers.load(registers::CAP + 4) & 0xf;
        let doorbells = [registers::sq_tail_doorbell, registers::cq_head_doorbell];
        let [tail, head] = doorbells.map(|of| of(0, stride as u8));
        self.registers.store(tail, self.asked % Stores::ENTRIES);
        between();
        let completion = 0x1000 + 16 * at as usize;
        let word = || self.memory.whole().load_u32(completion + 12, Ordering::Acquire).unwrap();
        self.until("a command does not end", || word() >> 16 & 1 == 1 - turn % 2);
        assert_eq!(
            word(),
            (1 - turn % 2) << 16 | (self.asked - 1),
            "another command's, or an error"
        );
        self.registers.store(head, self.asked % Stores::ENTRIES);
        self.memory.whole().read_obj(0x2000).unwrap()
    }
}

/// The registers stay the same memory, whoever looks at them, and what is stored meanwhile is looked at.
#[test]
fn a_driver_that_only_loads_and_stores_notices_nothing_either() {
    let rack = Rack::up(RACK);
    for isolation in ["shared", "strict"] {
        let ask = ["borrow", "alpha/nvme0", "--for", "beta", "--isolation", isolation];
        let lease: Lease = serde_json::from_value(rack.json(&ask)).unwrap();
        let mut driver = Stores::open(&lease);
        driver.enable(true);
        let vendor = driver.vendor(|| ());
        for host in ["alpha", "beta", "alpha", "beta"] {
            assert_eq!(driver.vendor(|| drop(restart(&rack, host))), vendor, "{isolation}");
            for _ in 0..2 * Stores::ENTRIES {
                assert_eq!(driver.vendor(|| ()), vendor, "{isolation}");
            }
        }
        driver.enable(false);
        driver.enable(true);
        assert_eq!(driver.vendor(|| ()), vendor);
        // For whoever has it when the lease ends, the device is gone.
        assert!(rack.give_back(&lease).returned);
        let ones = || driver.registers.load(registers::CSTS) == u32::MAX;
        driver.until("the registers of a device that is gone", ones);
        rack.wait_device(&lease.function, DeviceState::Offered);
    }
}
