//! Starting and ending VMs: who has which name and folder, and what is returned.

use super::*;

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
fn ending_vm_run_while_it_starts_leaves_nothing_either() {
    let lab = Lab::up();
    let mut run = lab.run(&["--borrow", "alpha/nvme0"]);
    lab.rack.wait_lease(1, LeaseStage::Active);
    kill_process(Pid::from_child(&run), Signal::HUP).unwrap();
    lab.answer_unless_ended("vm1", &mut run);
    assert_eq!(run.wait().unwrap().code(), Some(1));
    assert!(lab.rack.wait_lease(1, LeaseStage::Ended).returned);
}

/// What stands for a QEMU that says nothing when it is asked what it can do, until nobody waits for that.
const SILENT: &str = "#!/bin/sh\ncase \" $* \" in *' -S '*) while kill -0 $PPID; do sleep 0.02; done; exit 1 ;; esac\n\
                      exec sleep 1000\n";

/// The node sees that the process has ended which was to start the VM; and so does one that goes on in its place.
#[test]
fn vm_run_that_is_killed_while_it_starts_leaves_nothing_either() {
    let lab = Lab::with(SILENT);
    for (round, restarted) in [(1, false), (2, true)] {
        let mut run = lab.run(&["--borrow", "alpha/nvme0"]);
        lab.rack.wait_lease(round, LeaseStage::Active);
        if restarted {
            lab.rack.restart_in_place("beta");
        }
        kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
        run.wait().unwrap();
        assert!(lab.rack.wait_lease(round, LeaseStage::Ended).returned);
        lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
    }
}

/// Its VM has the function by then, though it has not opened it.
#[test]
fn what_vm_run_borrowed_goes_back_with_its_vm_where_it_was_killed_before() {
    let lab = Lab::up();
    let mut run = lab.run(&["--borrow", "alpha/nvme0"]);
    lab.answer("vm1");
    let mut told = BufReader::new(run.stderr.take().unwrap());
    told.read_line(&mut String::new()).unwrap();
    let qemu = qemu(&lab.folder("vm1"));
    kill_process(Pid::from_child(&run), Signal::KILL).unwrap();
    run.wait().unwrap();
    assert!(!qemu.is_gone());
    qemu.signal(Signal::KILL);
    assert!(qemu.wait(PATIENCE));
    assert!(lab.rack.wait_lease(1, LeaseStage::Ended).returned);
}

/// It is to go on without who started it, but not before that has said so.
#[test]
fn ending_a_detached_vm_run_while_it_starts_leaves_nothing_either() {
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
fn options_that_no_vm_can_have_are_refused_before_anything_is_borrowed() {
    let lab = Lab::up();
    let common = ["vm", "run", "--host", "beta", "--borrow", "alpha/nvme0"];
    for (more, why) in [
        (&["--", "-device", "intel-iommu,intremap=on"][..], "give dma-translation=off too"),
        (&["--cpus", "0"], "0 processors: give 1 to 255"),
        (&["--spare-ports", "28"], "at most 28"),
    ] {
        let told = lab.rack.bad(2, &[&common[..], more].concat());
        assert!(told.contains(why) && told.contains("vm run --help"), "{told}");
    }
    assert_eq!(lab.rack.json(&["leases", "--all"]), serde_json::json!([]));
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
fn ending_vm_args_or_vm_run_while_they_borrow_leaves_no_lease() {
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
        &["vm", "move", "db", "--to", "alpha"],
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
