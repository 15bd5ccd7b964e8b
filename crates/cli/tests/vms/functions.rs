//! The functions that VMs have: their leases end with the VM, and what is plugged in and out while it runs.

use super::*;

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

/// What `vm args` says, with these arguments more, and the number of its lease.
fn printed(lab: &Lab, more: &[&str]) -> (String, u64) {
    let common = ["vm", "args", "--host", "beta", "--borrow", "alpha/nvme0"];
    let value = lab.rack.json(&[&common[..], more].concat());
    let arguments = value["arguments"].as_array().unwrap().iter().map(|it| it.as_str().unwrap());
    (arguments.collect::<Vec<_>>().join(" "), value["leases"][0]["lease"].as_u64().unwrap())
}

/// Starts what stands for a QEMU by hand, and waits until it has used its drive.
fn start_by_hand(lab: &Lab, arguments: &str) -> Child {
    let done = lab.rack.run_dir().join("played");
    let qemu = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "functions::plays_qemu", "--ignored", "--nocapture"])
        .env("PLAYED_ARGUMENTS", arguments)
        .env("RACKBUS_RUN_DIR", lab.rack.run_dir())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    lab.rack.block(async {
        while !done.exists() {
            tokio::task::yield_now().await;
        }
    });
    qemu
}

/// Kills what was started by hand.
fn kill_by_hand(lab: &Lab, mut qemu: Child) {
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    std::fs::remove_file(lab.rack.run_dir().join("played")).unwrap();
}

/// Nobody else knows of its end; and a node that goes on in the place of another knows which process it was.
#[test]
fn a_lease_ends_with_a_qemu_that_was_started_by_hand() {
    let lab = Lab::up();
    for (round, restarted) in [(1, false), (2, true)] {
        let (arguments, lease) = printed(&lab, &[]);
        assert_eq!(lease, round);
        let qemu = start_by_hand(&lab, &arguments);
        if restarted {
            lab.rack.restart_in_place("beta");
        }
        lab.rack.wait_lease(lease, LeaseStage::Active);
        kill_by_hand(&lab, qemu);
        let ended = lab.rack.wait_lease(lease, LeaseStage::Ended);
        assert!(ended.returned, "{ended:?}");
        lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
    }
    // Nothing is left beside the sockets.
    let functions = std::fs::read_dir(lab.rack.run_dir().join("beta/functions")).unwrap();
    assert_eq!(functions.count(), 0);
}

#[test]
fn a_lease_that_is_to_be_kept_is_there_for_the_next_qemu() {
    let lab = Lab::up();
    let (arguments, lease) = printed(&lab, &["--keep"]);
    for _ in 0..3 {
        kill_by_hand(&lab, start_by_hand(&lab, &arguments));
    }
    lab.rack.good(&["return", &lease.to_string()]);
    assert!(lab.rack.wait_lease(lease, LeaseStage::Ended).returned);
}

/// Whoever goes on in the node's place hears nothing of the end of a VM that is gone by then.
#[test]
fn a_lease_ends_with_its_vm_although_its_node_was_restarted_before_that_could_be_stored() {
    let mut lab = Lab::whose_vms_use_what_they_have();
    let done = lab.rack.run_dir().join("played");
    let run = lab.run(&["--detach", "--borrow", "alpha/nvme0"]);
    lab.answer("vm1");
    assert!(run.wait_with_output().unwrap().status.success());
    lab.rack.block(async {
        while !done.exists() {
            tokio::task::yield_now().await;
        }
    });
    lab.rack.process(None).crash();
    let qemu = qemu(&lab.folder("vm1"));
    qemu.signal(Signal::KILL);
    assert!(qemu.wait(PATIENCE));
    // This removes what says which function was the VM's.
    let told = lab.rack.good(&["vm", "list"]);
    assert!(!told.contains("vm1"), "{told}");
    lab.rack.restart_in_place("beta");
    lab.rack.restart(None);
    let lease = lab.rack.wait_lease(1, LeaseStage::Ended);
    assert!(lease.returned, "{lease:?}");
    lab.rack.wait_device("alpha/nvme0", DeviceState::Offered);
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
    // Its functions count among those that no VM has ports for, before any is borrowed.
    let run = ["vm", "run", "--host", "beta", "--composition", "both", "--spare-ports", "27"];
    let told = lab.rack.bad(2, &run);
    assert!(told.contains("29 functions and spare ports: at most 28"), "{told}");
    assert_eq!(lab.rack.json(&["leases", "--all"]), serde_json::json!([]));
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
