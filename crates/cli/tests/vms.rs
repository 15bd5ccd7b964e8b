//! VMs without a guest: a program that only waits stands for QEMU, and the test answers at its
//! sockets. What is tested is who has which name, folder and lease.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rackbus_control::api::{BorrowRequest, DeviceState, LeaseStage};
use rackbus_driver::{Drive, DriveOptions};
use rackbus_pci::vfio_user::Client;
use rackbus_spec::vfio_user::irq;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use support::{PATIENCE, Process, Rack, THREE_HOSTS, with_leases_of};

/// What stands for QEMU: asked what it can do, with a machine that does not run, it says nothing.
const PROGRAM: &str = "#!/bin/sh\ncase \" $* \" in *' -S '*) exit 1 ;; esac\nexec sleep 1000\n";

/// A rack, and what stands for QEMU.
struct Lab {
    rack: Rack,
    cache: tempfile::TempDir,
}

impl Lab {
    fn up() -> Lab {
        Lab::with(PROGRAM)
    }

    /// Whose QEMU opens the functions that it is given: this test binary does.
    fn whose_vms_use_what_they_have() -> Lab {
        let program = std::env::current_exe().unwrap();
        let part = "--exact plays_qemu --ignored --nocapture";
        Lab::with(&format!(
            "#!/bin/sh\ncase \" $* \" in *' -S '*) exit 1 ;; esac\n\
             PLAYED_ARGUMENTS=\"$*\" exec {} {part}\n",
            program.display()
        ))
    }

    fn with(program: &str) -> Lab {
        Lab::of(THREE_HOSTS, program)
    }

    fn of(rack: &str, program: &str) -> Lab {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("qemu/run");
        std::fs::create_dir_all(&folder).unwrap();
        let qemu = folder.join("qemu-system-x86_64");
        std::fs::write(&qemu, program).unwrap();
        std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
        Lab { rack: Rack::up(rack), cache }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.rack.command(args);
        command.env("RACKBUS_CACHE", self.cache.path()).env("RACKBUS_ACCEL", "tcg");
        command
    }

    /// Begins `vm run` with a drive or without.
    fn run(&self, args: &[&str]) -> Child {
        let common = ["vm", "run", "--host", "beta", "--kernel", "/dev/null"];
        self.begin(&[&common, args].concat())
    }

    /// Begins a command that may be ended by signals.
    fn begin(&self, args: &[&str]) -> Child {
        let run = self.command(args);
        // Who runs the tests may ignore signals, as `nohup` does, and `vm run` heeds that.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,TERM").arg(run.get_program()).args(run.get_args());
        let set = run.get_envs().filter_map(|(name, value)| Some((name, value?)));
        command.envs(set).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.rack.run_dir().join("beta/vms").join(name)
    }

    /// Waits until a VM of that name is being started, and answers for its QEMU from then on.
    fn answer(&self, name: &str) {
        self.await_start(name, || false);
        self.serve(name).unwrap();
    }

    /// The same, unless the command that starts it ends before: it was told to.
    fn answer_unless_ended(&self, name: &str, run: &mut Child) {
        self.await_start(name, || run.try_wait().unwrap().is_some());
        // Its folder is gone with it.
        let _ = self.serve(name);
    }

    fn await_start(&self, name: &str, mut is_over: impl FnMut() -> bool) {
        let log = self.folder(name).join("qemu.log");
        self.rack.block(async {
            while !log.exists() && !is_over() {
                tokio::task::yield_now().await;
            }
        });
    }

    fn serve(&self, name: &str) -> std::io::Result<()> {
        self.serve_with(name, serve_qmp)
    }

    /// Has each connection to a VM's QMP socket answered so.
    fn serve_with(
        &self,
        name: &str,
        answer: impl Fn(UnixStream) + Send + 'static,
    ) -> std::io::Result<()> {
        let folder = self.folder(name);
        let listener = UnixListener::bind(folder.join("qmp.sock"))?;
        std::thread::spawn(move || listener.incoming().flatten().for_each(answer));
        UnixListener::bind(folder.join("agent.sock")).map(drop)
    }
}

/// Answers as a QEMU that has the drive plugged in, and that is killed when it is to unplug it.
fn ends_when_it_unplugs(mut stream: UnixStream, folder: &Path) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for line in reader.lines().map_while(Result::ok) {
        if line.contains("device_del") {
            return qemu(folder).crash();
        }
        let plugged = json!([{"name": "fn-alpha_nvme0", "type": "child<vfio-user-pci>"}]);
        let devices = if line.contains("qom-list") { plugged } else { json!([]) };
        let _ = writeln!(stream, "{}", json!({"return": devices}));
    }
}

/// Answers as a QEMU whose guest has the drive plugged in and never releases it.
fn never_unplugs(mut stream: UnixStream) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for line in reader.lines().map_while(Result::ok) {
        let plugged = json!([{"name": "fn-alpha_nvme0", "type": "child<vfio-user-pci>"}]);
        let devices = if line.contains("qom-list") { plugged } else { json!([]) };
        let _ = writeln!(stream, "{}", json!({"return": devices}));
    }
}

fn serve_qmp(mut stream: UnixStream) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for _ in reader.lines().map_while(Result::ok) {
        let _ = stream.write_all(b"{\"return\": []}\n");
    }
}

/// The process that stands for the QEMU of the VM in `folder`.
fn qemu(folder: &Path) -> Process {
    let text = std::fs::read(folder.join("vm.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
    Process::of(Pid::from_raw(record["pid"].as_i64().unwrap() as i32).unwrap())
}

#[test]
fn vm_run_that_is_ended_returns_what_it_borrowed() {
    let lab = Lab::up();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT] {
        let mut run = lab.run(&["--borrow", "alpha/nvme0"]);
        lab.answer("vm1");
        let mut told = BufReader::new(run.stderr.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        assert!(line.contains("VM vm1 runs on beta"), "{line}");
        let qemu = qemu(&lab.folder("vm1"));
        kill_process(Pid::from_child(&run), signal).unwrap();
        assert_eq!(run.wait().unwrap().code(), Some(1), "{signal:?}");
        assert!(qemu.wait(PATIENCE), "{signal:?}: its VM goes on");
        assert!(!lab.folder("vm1").exists());
        let lease = lab.rack.json(&["leases", "--all"]).as_array().unwrap().last().unwrap().clone();
        assert_eq!(lease["returned"], true, "{signal:?}: {lease}");
        lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
    }
}

#[test]
fn who_ends_vm_run_while_it_starts_leaves_nothing_either() {
    let lab = Lab::up();
    let mut run = lab.run(&["--borrow", "alpha/nvme0"]);
    lab.rack.wait_lease(1, LeaseStage::Active);
    kill_process(Pid::from_child(&run), Signal::HUP).unwrap();
    lab.answer_unless_ended("vm1", &mut run);
    assert_eq!(run.wait().unwrap().code(), Some(1));
    assert!(lab.rack.wait_lease(1, LeaseStage::Ended).returned);
}

/// It is to go on without who started it, but not before that has said so.
#[test]
fn who_ends_a_detached_vm_run_while_it_starts_leaves_nothing_either() {
    let lab = Lab::up();
    let mut run = lab.run(&["--detach", "--borrow", "alpha/nvme0"]);
    lab.rack.wait_lease(1, LeaseStage::Active);
    kill_process(Pid::from_child(&run), Signal::INT).unwrap();
    lab.answer_unless_ended("vm1", &mut run);
    assert_eq!(run.wait().unwrap().code(), Some(1));
    assert!(lab.rack.wait_lease(1, LeaseStage::Ended).returned);
    assert!(!lab.folder("vm1").exists(), "its VM goes on");
}

#[test]
fn vm_args_that_fail_leave_no_lease() {
    let lab = Lab::up();
    let common = ["vm", "args", "--host", "beta", "--borrow", "alpha/nvme0", "--fabric"];
    // Another host of the rack is nobody's guest; and there is no such host.
    for (round, guest) in [(1, "nobody"), (2, "../beta")] {
        let told = lab.rack.bad(2, &[&common[..], &[guest]].concat());
        assert!(told.contains(guest), "{told}");
        assert!(lab.rack.wait_lease(round, LeaseStage::Ended).returned);
    }
}

/// The first function is borrowed, and the second one's lender takes its time.
#[test]
fn who_ends_vm_args_or_vm_run_while_they_borrow_leaves_no_lease() {
    let drive = "kind = \"nvme\"\nsize = \"16 MiB\"\nbacking = \"memory\"\n";
    // No lease expires while it does.
    let rack = with_leases_of("60 s", THREE_HOSTS);
    let lab = Lab::of(&format!("{rack}[hosts.gamma.devices.nvme2]\n{drive}"), PROGRAM);
    let gamma = lab.rack.process(Some("gamma"));
    gamma.signal(Signal::STOP);
    let both = ["--borrow", "alpha/nvme0", "--borrow", "gamma/nvme2"];
    let run = ["vm", "run", "--host", "beta", "--kernel", "/dev/null"];
    for (round, command) in [(1, &["vm", "args", "--host", "beta"][..]), (3, &run)] {
        let mut command = lab.begin(&[command, &both].concat());
        lab.rack.wait_lease(round, LeaseStage::Active);
        lab.rack.wait_lease(round + 1, LeaseStage::Arming);
        kill_process(Pid::from_child(&command), Signal::INT).unwrap();
        assert_eq!(command.wait().unwrap().code(), Some(1));
        assert!(lab.rack.wait_lease(round, LeaseStage::Ended).returned);
        gamma.signal(Signal::CONT);
        assert!(lab.rack.wait_lease(round + 1, LeaseStage::Ended).returned);
        lab.rack.wait_device("gamma/nvme2", DeviceState::Offered);
        gamma.signal(Signal::STOP);
    }
    gamma.signal(Signal::CONT);
}

#[test]
fn two_that_are_started_at_once_have_two_names() {
    let lab = Lab::up();
    let both = [lab.run(&["--detach", "--json"]), lab.run(&["--detach", "--json"])];
    lab.answer("vm1");
    lab.answer("vm2");
    for run in both {
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let names: Vec<_> = lab.rack.json(&["vm", "list"]).as_array().unwrap().clone();
    assert_eq!(names.iter().map(|vm| &vm["vm"]).collect::<Vec<_>>(), ["vm1", "vm2"]);
    for name in ["vm1", "vm2"] {
        lab.rack.good(&["vm", "stop", "--kill", name]);
    }
}

#[test]
fn a_name_is_taken_in_the_whole_rack_from_the_moment_that_its_vm_starts() {
    let lab = Lab::up();
    let first = lab.run(&["--name", "db", "--detach"]);
    // Its QEMU cannot be spoken to yet, so nobody finds it by its record.
    lab.await_start("db", || false);
    let begin = ["vm", "run", "--host", "alpha", "--kernel", "/dev/null", "--detach"];
    let named = lab.command(&[&begin[..], &["--name", "db"]].concat()).output().unwrap();
    assert_eq!(named.status.code(), Some(1));
    let said = String::from_utf8_lossy(&named.stderr).into_owned();
    assert!(said.contains("'db' already runs"), "{said}");
    lab.serve("db").unwrap();
    assert!(first.wait_with_output().unwrap().status.success());
    lab.rack.good(&["vm", "stop", "--kill", "db"]);
}

#[test]
fn a_running_vm_is_known_by_its_process_however_its_folder_is_spelled() {
    let lab = Lab::up();
    let run = lab.run(&["--detach"]);
    lab.answer("vm1");
    assert!(run.wait_with_output().unwrap().status.success());
    let qemu = qemu(&lab.folder("vm1"));
    let mut list = lab.command(&["vm", "list"]);
    let run_dir = lab.rack.run_dir();
    let list = list.current_dir(run_dir.parent().unwrap()).env("RACKBUS_RUN_DIR", "./run/../run");
    let told = String::from_utf8(list.output().unwrap().stdout).unwrap();
    assert!(told.contains("vm1"), "{told}");
    assert!(lab.folder("vm1").join("vm.json").exists(), "a running VM's folder was removed");
    assert!(!qemu.is_gone());
    // Neither its guest nor the control plane is needed to end it.
    lab.rack.process(None).crash();
    std::fs::remove_file(lab.folder("vm1").join("qmp.sock")).unwrap();
    lab.rack.good(&["vm", "stop", "--kill", "vm1"]);
    assert!(qemu.wait(PATIENCE));
}

#[test]
fn a_vms_host_and_name_are_no_paths() {
    let lab = Lab::up();
    let told = lab.rack.bad(2, &["vm", "run", "--host", "../x", "--kernel", "/dev/null"]);
    assert!(told.contains("alpha, beta, gamma"), "{told}");
    assert!(!lab.rack.run_dir().join("../x").exists());
    for more in [&["--detach"][..], &["--detach", "--fabric=alpha"]] {
        let run = lab.run(&[&["--name", "../y"], more].concat()).wait_with_output().unwrap();
        assert_eq!(run.status.code(), Some(2));
        assert!(!lab.folder("../y").exists());
        assert!(!lab.rack.run_dir().join("beta/y.log").exists());
    }
}

/// The sockets of the functions that QEMU is given.
fn sockets(arguments: &str) -> Vec<PathBuf> {
    let functions = arguments.split("-device ").filter(|it| it.contains("vfio-user-pci"));
    let path = |it: &str| Some(it.split("\"path\":\"").nth(1)?.split('"').next()?.into());
    functions.filter_map(path).collect()
}

#[test]
#[ignore = "a part of the other tests, which start it"]
fn plays_qemu() {
    let Ok(arguments) = std::env::var("PLAYED_ARGUMENTS") else { return };
    let open =
        |socket: &PathBuf| Drive::open(socket, DriveOptions { depth: 4, data: 1 << 20 }).unwrap();
    let mut drives: Vec<Drive> = sockets(&arguments).iter().map(open).collect();
    drives.iter_mut().for_each(|drive| drive.write(0, &[7; 512], true).unwrap());
    // Its user sees that, and ends it.
    let run_dir = PathBuf::from(std::env::var_os("RACKBUS_RUN_DIR").unwrap());
    let done = run_dir.join("played");
    std::fs::write(&done, "").unwrap();
    while done.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A VM whose guest powers off, or whose QEMU is killed: nobody is left to return what it had.
#[test]
fn a_lease_ends_with_its_vm() {
    let lab = Lab::whose_vms_use_what_they_have();
    let done = lab.rack.run_dir().join("played");
    for (round, killed) in [(1, false), (2, true)] {
        let run = lab.run(&["--detach", "--borrow", "alpha/nvme0"]);
        lab.answer("vm1");
        assert!(run.wait_with_output().unwrap().status.success());
        lab.rack.block(async {
            while !done.exists() {
                tokio::task::yield_now().await;
            }
        });
        let qemu = qemu(&lab.folder("vm1"));
        match killed {
            true => qemu.signal(Signal::KILL),
            false => std::fs::remove_file(&done).unwrap(),
        }
        assert!(qemu.wait(PATIENCE));
        let lease = lab.rack.wait_lease(round, LeaseStage::Ended);
        assert!(lease.returned, "{lease:?}");
        lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
        let _ = std::fs::remove_file(&done);
        let told = lab.rack.good(&["vm", "list"]);
        assert!(!told.contains("vm1"), "{told}");
    }
}

/// QEMU ends when it is asked to unplug the function, as it does with a failed assertion.
#[test]
fn vm_remove_says_that_the_qemu_ended_and_what_is_returned() {
    let lab = Lab::whose_vms_use_what_they_have();
    let run = lab.run(&["--detach", "--borrow", "alpha/nvme0"]);
    lab.await_start("vm1", || false);
    let folder = lab.folder("vm1");
    lab.serve_with("vm1", move |stream| ends_when_it_unplugs(stream, &folder)).unwrap();
    assert!(run.wait_with_output().unwrap().status.success());
    let qemu = qemu(&lab.folder("vm1"));
    let told = lab.rack.bad(1, &["vm", "remove", "vm1", "alpha/nvme0"]);
    assert!(told.contains("VM vm1 ended; alpha/nvme0 is returned"), "{told}");
    assert!(qemu.wait(PATIENCE));
    assert!(lab.rack.wait_lease(1, LeaseStage::Ended).returned);
    lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
}

#[test]
fn a_vm_that_is_being_moved_is_neither_stopped_nor_changed() {
    let lab = Lab::up();
    let run = lab.run(&["--detach", "--name", "db"]);
    lab.answer("db");
    assert!(run.wait_with_output().unwrap().status.success());
    let moves = rackbus_vm::registry::NameClaim::of_rack(&lab.rack.run_dir(), "db").unwrap();
    for args in [
        &["vm", "stop", "db"][..],
        &["vm", "stop", "--kill", "db"],
        &["vm", "add", "db", "alpha/nvme0"],
        &["vm", "remove", "db", "alpha/nvme0"],
        &["vm", "add", "db", "--memory", "512M"],
        &["vm", "remove", "db", "memory0"],
    ] {
        let told = lab.rack.bad(1, args);
        assert!(told.contains("just being started, moved or stopped"), "{args:?}: {told}");
    }
    drop(moves);
    lab.rack.good(&["vm", "stop", "--kill", "db"]);
}

/// What is beside the options may name files by where the VM was started, and it is started again from elsewhere.
#[test]
fn a_vm_runs_in_the_folder_that_it_was_first_started_in() {
    let lab = Lab::with(
        "#!/bin/sh\ncase \" $* \" in *' -S '*) exit 1 ;; esac\ntest -e disk.img || exit 1\nexec sleep 1000\n",
    );
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("disk.img"), "").unwrap();
    let mut run = lab.command(&["vm", "run", "--host", "beta", "--kernel", "/dev/null"]);
    run.args(["--detach", "--name", "db", "--", "-drive", "file=disk.img"]);
    let run = run.current_dir(folder.path()).stdout(Stdio::piped()).spawn().unwrap();
    lab.answer("db");
    assert!(run.wait_with_output().unwrap().status.success());
    let record = std::fs::read_dir(lab.folder("db")).unwrap().flatten();
    let written = record.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    let folder = folder.path().to_str().unwrap();
    assert!(written.into_iter().any(|text| text.contains(folder)), "the folder is not kept");
    lab.rack.good(&["vm", "stop", "--kill", "db"]);
}

/// This QEMU cannot be asked whether it bears that a function with MSI-X is unplugged.
#[test]
fn msix_is_shown_where_the_user_asks_for_it() {
    let lab = Lab::up();
    for (round, asked) in [(1, false), (2, true)] {
        let args = ["--detach", "--borrow", "alpha/nvme0", "--msix"];
        let run = lab.run(&args[..if asked { 4 } else { 3 }]);
        lab.answer("vm1");
        assert!(run.wait_with_output().unwrap().status.success());
        let lease = lab.rack.wait_lease(round, LeaseStage::Active);
        let socket = Path::new(lease.socket.as_deref().unwrap());
        let user = Client::connect(socket, PATIENCE).unwrap();
        let vectors = [irq::MSIX, irq::MSI].map(|index| user.irq_info(index).unwrap().count > 0);
        assert_eq!(vectors, [asked, !asked], "MSI-X, MSI");
        drop(user);
        lab.rack.good(&["vm", "stop", "--kill", "vm1"]);
        lab.rack.wait_lease(round, LeaseStage::Ended);
        lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
    }
}

/// QEMU ends when a lender refuses memory that is plugged in.
#[test]
fn no_more_memory_is_plugged_in_than_the_host_has() {
    let rack = THREE_HOSTS.replace("[hosts.beta]", "[hosts.beta]\nmemory = \"1 GiB\"");
    let lab = Lab::of(&rack, PROGRAM);
    let run = ["vm", "run", "--host", "beta", "--kernel", "/dev/null", "--max-memory"];
    let told = lab.rack.bad(2, &[&run[..], &["2G"]].concat());
    assert!(told.contains("1 GiB by the rack file"), "{told}");
    let told = lab.rack.bad(2, &[&run[..], &["256M"]].concat());
    assert!(told.contains("from 512M"), "{told}");
    for name in ["first", "second"] {
        let run = lab.run(&["--detach", "--name", name, "--memory", "384M", "--max-memory", "1G"]);
        lab.answer(name);
        assert!(run.wait_with_output().unwrap().status.success());
    }
    let told = lab.rack.bad(1, &[&run[..6], &["--memory", "384M"]].concat());
    assert!(told.contains("768 MiB of memory, and 384 MiB more"), "{told}");
    let told = lab.rack.bad(1, &["vm", "add", "first", "--memory", "512M"]);
    assert!(told.contains("768 MiB of memory, and 512 MiB more"), "{told}");
    lab.rack.good(&["vm", "stop", "--kill", "second"]);
    // There is room now; this QEMU has nothing to show for it.
    let told = lab.rack.bad(1, &["vm", "add", "first", "--memory", "512M"]);
    assert!(told.contains("memory0 is not among the memory devices"), "{told}");
    let told = lab.rack.bad(1, &["vm", "remove", "first", "memory0"]);
    assert!(told.contains("no plugged memory memory0"), "{told}");
    lab.rack.good(&["vm", "stop", "--kill", "first"]);
}

/// One command borrows all of it and starts the VM; what ends the VM returns it whole.
#[test]
fn a_vm_starts_with_a_composition_and_its_end_returns_it_whole() {
    let composition = "[[composition]]\nname = \"both\"\nhost = \"beta\"\n\
        functions = [\"alpha/nvme0\", \"alpha/nvme1\"]\n";
    let lab = Lab::of(&format!("{THREE_HOSTS}{composition}"), PROGRAM);
    let run = lab.run(&["--detach", "--composition", "both"]);
    lab.answer("vm1");
    assert!(run.wait_with_output().unwrap().status.success());
    let state = || {
        let listed = lab.rack.json(&["composition", "list"]);
        let leases = listed[0]["leases"].as_array().unwrap().len();
        (listed[0]["state"].as_str().unwrap().to_owned(), leases)
    };
    assert_eq!(state(), ("borrowed".to_owned(), 2));
    let told = lab.rack.bad(1, &["vm", "run", "--host", "gamma", "--composition", "both"]);
    assert!(told.contains("is for beta"), "{told}");
    lab.rack.good(&["vm", "stop", "--kill", "vm1"]);
    assert_eq!(state(), ("free".to_owned(), 0));
    for function in ["alpha/nvme0", "alpha/nvme1"] {
        lab.rack.wait_device(function, DeviceState::Offered);
    }
}

/// A QEMU with one port, into which it plugs what it is told to, unless it is said that it is broken.
fn plugs_in(mut stream: UnixStream, told: &Mutex<Vec<String>>) {
    let reader = BufReader::new(stream.try_clone().unwrap());
    let _ = stream.write_all(b"{\"QMP\": {}}\n");
    for line in reader.lines().map_while(Result::ok) {
        let port = json!({"qdev_id": "port0", "pci_bridge": {"devices": []}});
        let answer = match &line {
            line if line.contains("query-pci") => json!({"return": [{"devices": [port]}]}),
            line if line.contains("device_add") && line.contains("nvme1") => {
                json!({"error": {"class": "GenericError", "desc": "this function is broken"}})
            }
            _ => json!({"return": []}),
        };
        told.lock().unwrap().push(line);
        let _ = writeln!(stream, "{answer}");
    }
}

/// By command and by the API: who borrows a function for a running VM has it there when that is answered, or not at all.
#[test]
fn a_function_is_plugged_into_a_running_vm_by_its_node() {
    let compositions = [("well", "alpha/nvme0"), ("ill", "alpha/nvme1")].map(|(name, first)| {
        format!(
            "[[composition]]\nname = \"{name}\"\nhost = \"beta\"\nfunctions = [\"{first}\", \"gamma/nvme0\"]\n"
        )
    });
    let third =
        "[hosts.gamma.devices.nvme0]\nkind = \"nvme\"\nsize = \"16 MiB\"\nbacking = \"memory\"\n";
    let lab = Lab::of(&format!("{THREE_HOSTS}{third}{}", compositions.concat()), PROGRAM);
    let run = lab.run(&["--detach"]);
    lab.await_start("vm1", || false);
    let told = Arc::new(Mutex::new(Vec::new()));
    let tells = Arc::clone(&told);
    lab.serve_with("vm1", move |stream| plugs_in(stream, &tells)).unwrap();
    assert!(run.wait_with_output().unwrap().status.success());
    let asked = |what: &str| told.lock().unwrap().iter().filter(|line| line.contains(what)).count();

    let borrow = ["borrow", "alpha/nvme0", "--for", "beta", "--vm"];
    let refused = lab.rack.bad(1, &[&borrow[..], &["other"]].concat());
    assert!(refused.contains("no VM named 'other' on host 'beta'"), "{refused}");
    lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
    let refused = lab.rack.bad(1, &[&borrow[..], &["../vm1"]].concat());
    assert!(refused.contains("`../vm1` is no name of a VM"), "{refused}");
    let refused = lab.rack.bad(1, &["vm", "add", "vm1", "alpha/nvme1"]);
    assert!(refused.contains("this function is broken"), "{refused}");
    lab.rack.wait_device("alpha/nvme1", DeviceState::Offered);

    let before = asked("device_add");
    let request =
        BorrowRequest { vm: Some("vm1".to_owned()), ..BorrowRequest::new("alpha/nvme0", "beta") };
    let lease = lab.rack.block(lab.rack.client().borrow_as(&request)).unwrap();
    assert_eq!(lease.vm.as_deref(), Some("vm1"));
    assert_eq!(asked("device_add"), before + 1, "when it is answered");
    assert!(asked(lease.socket.as_deref().unwrap()) > 0);
    let listed = lab.rack.json(&["leases"]);
    assert_eq!(listed[0]["vm"], "vm1", "{listed}");
    lab.rack.good(&["return", "alpha/nvme0"]);

    // Several of them: all, or none.
    let refused = lab.rack.bad(1, &["composition", "borrow", "ill", "--vm", "vm1"]);
    assert!(refused.contains("this function is broken"), "{refused}");
    for function in ["alpha/nvme1", "gamma/nvme0"] {
        lab.rack.wait_device(function, DeviceState::Offered);
    }
    let before = asked("device_add");
    let borrowed = lab.rack.json(&["composition", "borrow", "well", "--vm", "vm1"]);
    assert_eq!((asked("device_add"), borrowed["state"].as_str()), (before + 2, Some("borrowed")));
    let leases = borrowed["leases"].as_array().unwrap();
    assert!(leases.len() == 2 && leases.iter().all(|it| it["vm"] == "vm1"), "{borrowed}");
    // It is there already; without the VM, or for another, it is not the same.
    lab.rack.good(&["composition", "borrow", "well", "--vm", "vm1"]);
    lab.rack.bad(1, &["composition", "borrow", "well"]);
    lab.rack.bad(1, &["composition", "borrow", "well", "--vm", "other"]);
    assert_eq!(asked("device_add"), before + 2);
    lab.rack.good(&["composition", "return", "well"]);
    lab.rack.good(&["vm", "stop", "--kill", "vm1"]);
}

/// A return that waits for a guest is hastened by another one, and the node waits no longer than that.
#[test]
fn a_node_that_waits_for_a_guest_hears_that_it_has_less_time() {
    let lab = Lab::whose_vms_use_what_they_have();
    let done = lab.rack.run_dir().join("played");
    let run = lab.run(&["--detach", "--borrow", "alpha/nvme0"]);
    lab.await_start("vm1", || false);
    lab.serve_with("vm1", never_unplugs).unwrap();
    assert!(run.wait_with_output().unwrap().status.success());
    let until = |is_so: &dyn Fn() -> bool| {
        let begun = std::time::Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < PATIENCE, "{}", lab.rack.logs());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    until(&|| done.exists());
    let patient = lab.begin(&["return", "alpha/nvme0", "--within", "10min"]);
    lab.rack.wait_lease(1, LeaseStage::Closing);
    lab.rack.good(&["return", "alpha/nvme0", "--force"]);
    assert!(patient.wait_with_output().unwrap().status.success());
    until(&|| lab.rack.logs().contains("the guest did not release the function"));
    std::fs::remove_file(&done).unwrap();
}
