//! Devices join and leave a rack that runs: by command, by a changed rack file, and from a host's own file.

mod support;

use rackbus_control::api::{DeviceState, LeaseStage};
use rustix::process::Signal;
use serde_json::Value;
use support::machines::Machines;
use support::{Rack, THREE_HOSTS, open, pattern};

const NVME2: [&str; 5] = ["offer", "alpha/nvme2", "kind=nvme", "size=4 MiB", "backing=file"];

/// Names of the functions that can be borrowed now.
fn offered(devices: &Value) -> Vec<&str> {
    let all = devices.as_array().unwrap().iter();
    let offered = all.filter(|device| device["state"] == "offered");
    offered.map(|device| device["function"].as_str().unwrap()).collect()
}

#[test]
fn a_device_that_joined_is_lent_like_others_and_outlives_both_its_processes() {
    let mut rack = Rack::up(THREE_HOSTS);
    rack.good(&NVME2);
    let lease = rack.borrow("alpha/nvme2", "beta");
    let mut drive = open(&lease);
    let data = pattern(7, 8192);
    drive.write(16, &data, true).unwrap();
    // In use, it continues in another process of its node.
    rack.restart_in_place("alpha");
    let mut read = vec![0; data.len()];
    drive.read(16, &mut read).unwrap();
    assert!(read == data);
    drop(drive);
    rack.give_back(&lease);
    // The control plane remembers it, and says it to a node that starts anew.
    rack.process(None).crash();
    rack.process(Some("alpha")).crash();
    rack.restart(None);
    rack.restart(Some("alpha"));
    rack.wait_device("alpha/nvme2", DeviceState::Offered);
    rack.wait_up(&["gamma"]);
    let lease = rack.borrow("alpha/nvme2", "gamma");
    let mut drive = open(&lease);
    drive.read(16, &mut read).unwrap();
    assert!(read == data);
}

#[test]
fn a_device_in_use_leaves_only_by_force_and_nobody_borrows_it_then() {
    let rack = Rack::up(THREE_HOSTS);
    rack.good(&NVME2);
    let lease = rack.borrow("alpha/nvme2", "beta");
    let refused = rack.bad(1, &["withdraw", "alpha/nvme2"]);
    assert!(refused.contains("is lent to beta") && refused.contains("--force"), "{refused}");
    rack.good(&["withdraw", "alpha/nvme2", "--force"]);
    let ended = rack.wait_lease(lease.lease, LeaseStage::Ended);
    assert_eq!(ended.reason.as_deref(), Some("its device was withdrawn"));
    let refused = rack.bad(1, &["borrow", "alpha/nvme2", "--for", "beta"]);
    assert!(refused.contains("offer"), "{refused}");
    // What it held stays: offered again, it is the same drive, under a newer epoch.
    rack.good(&NVME2);
    assert!(rack.borrow("alpha/nvme2", "beta").epoch > lease.epoch);
}

#[test]
fn what_the_rack_file_lists_leaves_and_comes_back() {
    let mut rack = Rack::up(THREE_HOSTS);
    rack.good(&["withdraw", "alpha/nvme1"]);
    assert_eq!(offered(&rack.json(&["devices"])), ["alpha/nvme0"]);
    rack.process(Some("alpha")).crash();
    // Its node starts without it also where it cannot be obtained any more.
    let file = rack.run_dir().parent().unwrap().join("state/alpha/nvme1.img");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    rack.restart(Some("alpha"));
    rack.wait_device("alpha/nvme0", DeviceState::Offered);
    let refused = rack.bad(1, &["borrow", "alpha/nvme1", "--for", "gamma"]);
    assert!(refused.contains("no longer offered"), "{refused}");
    std::fs::remove_dir(&file).unwrap();
    rack.good(&["offer", "alpha/nvme1"]);
    // Once more changes nothing, also while it is in use.
    rack.borrow("alpha/nvme1", "gamma");
    rack.good(&["offer", "alpha/nvme1"]);
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    let rack = Rack::up(THREE_HOSTS);
    let sections = || rack.block(async { rack.client().sections().await.unwrap() });
    let before = sections();
    for (args, code, said) in [
        (&["offer", "alpha/d", "kind=tape"][..], 1, "there is no kind of device `tape`"),
        (&["offer", "alpha/d", "kind=nvme", "size=much"], 1, "`size` is no size"),
        (&["offer", "alpha/d"], 1, "say what it is"),
        (&["offer", "alpha/d", "nvme"], 2, "is not KEY=VALUE"),
        (&["offer", "delta/d", "kind=memory", "size=1 MiB"], 1, "has no host delta"),
        (&["offer", "alpha/d", "kind=nic", "functions=1"], 1, "cannot join a running rack"),
        (
            &["offer", "alpha/d", "kind=nvme", "size=1 MiB", "backing=file", "path=/nowhere/d.img"],
            1,
            "",
        ),
        (&["offer", "alpha/../d", "kind=memory", "size=1 MiB"], 1, "is no function"),
        (&["withdraw", "alpha/d"], 1, "has no device alpha/d"),
        (&["withdraw", "alpha"], 2, "is no device"),
    ] {
        let refused = rack.bad(code, args);
        assert!(refused.contains(said), "{args:?}: {refused}");
    }
    assert_eq!(sections(), before);
}

#[test]
fn a_changed_rack_file_is_followed_where_that_can_be_done() {
    let rack = Rack::up(THREE_HOSTS);
    let file = rack.file();
    let before = std::fs::read_to_string(&file).unwrap();
    let unchanged = rack.run(&["up", &file]);
    assert!(String::from_utf8_lossy(&unchanged.stderr).contains("as the file says"));
    let more = "[hosts.gamma.devices.ram7]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    std::fs::write(&file, format!("{before}\n{more}")).unwrap();
    rack.good(&["up", &file]);
    rack.borrow("gamma/ram7", "beta");
    // It leaves the file, and so the rack, but not while it is in use; nor does it become another one then.
    for text in [before.clone(), format!("{before}\n{}", more.replace("1 MiB", "2 MiB"))] {
        std::fs::write(&file, text).unwrap();
        let refused = rack.bad(1, &["up", &file]);
        assert!(refused.contains("gamma/ram7 leaves the rack, and is lent to beta"), "{refused}");
        assert!(rack.good(&["devices"]).contains("ram7"));
    }
    rack.good(&["return", "gamma/ram7"]);
    let changed = rack.run(&["up", &file]);
    let said = String::from_utf8_lossy(&changed.stderr).into_owned();
    assert!(changed.status.success() && said.contains("described otherwise"), "{said}");
    rack.wait_device("gamma/ram7", DeviceState::Offered);
    let devices: Vec<Value> = serde_json::from_str(&rack.good(&["devices", "--json"])).unwrap();
    let ram = devices.iter().find(|it| it["function"] == "gamma/ram7").unwrap();
    assert!(ram.to_string().contains("2 MiB"), "{ram}");
    std::fs::write(&file, &before).unwrap();
    rack.good(&["up", &file]);
    assert!(!rack.good(&["devices"]).contains("ram7"));
    // What cannot become another one is as it was.
    // Nor does the next one of the file leave for that.
    let drives = |size: &str, next: &str| {
        let section = |name: &str, size: &str| {
            format!(
                "[hosts.gamma.devices.{name}]\nkind = \"nvme\"\nsize = \"{size}\"\nbacking = \"file\"\n"
            )
        };
        let both = section("d7", size) + &section("d8", next);
        std::fs::write(&file, format!("{before}\n{both}")).unwrap();
    };
    drives("4 MiB", "4 MiB");
    rack.good(&["up", &file]);
    // Two that change places: neither can have the other's file before both have left.
    let swapped = |first: &str, second: &str| {
        let section = |name: &str, file: &str| {
            format!(
                "[hosts.gamma.devices.{name}]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"{file}\"\n"
            )
        };
        let both = section("e7", first) + &section("e8", second);
        std::fs::write(&file, format!("{before}\n{both}")).unwrap();
    };
    let [one, two] = ["one", "two"].map(|name| format!("{}.{name}.img", file));
    swapped(&one, &two);
    rack.good(&["up", &file]);
    swapped(&two, &one);
    rack.good(&["up", &file]);
    drives("4 MiB", "4 MiB");
    rack.good(&["up", &file]);
    drives("8 MiB", "8 MiB");
    let refused = rack.bad(1, &["up", &file]);
    assert!(refused.contains("d7"), "{refused}");
    rack.wait_device("gamma/d8", DeviceState::Offered);
    rack.wait_device("gamma/d7", DeviceState::Offered);
    rack.borrow("gamma/d7", "beta");
    rack.good(&["return", "gamma/d7"]);
    // Started anew, the rack is what its file says.
    rack.good(&["down"]);
    std::fs::write(&file, format!("{before}\n{more}")).unwrap();
    rack.good(&["up", &file]);
    rack.wait_device("gamma/ram7", DeviceState::Offered);
}

/// What `rackbus up` says of each device and composition of a changed file that it follows.
fn followed(rack: &Rack, text: &str) -> Vec<(String, String)> {
    std::fs::write(rack.file(), text).unwrap();
    let changes = rack.json(&["up", &rack.file()]);
    let word = |it: &Value, key: &str| it[key].as_str().unwrap().to_owned();
    let all = changes.as_array().unwrap().iter();
    all.map(|it| (word(it, "name"), word(it, "change"))).collect()
}

fn said(changes: &[(&str, &str)]) -> Vec<(String, String)> {
    changes.iter().map(|(name, change)| (name.to_string(), change.to_string())).collect()
}

/// Size and state of a device, as they are listed.
fn detail(rack: &Rack, function: &str) -> Option<(String, String)> {
    let devices = rack.json(&["devices"]);
    let found = devices.as_array().unwrap().iter().find(|it| it["function"] == function)?;
    Some((found["detail"].as_str()?.to_owned(), found["state"].as_str()?.to_owned()))
}

#[test]
fn devices_that_the_rack_was_started_with_become_others() {
    let mut rack = Rack::up(THREE_HOSTS);
    let before = std::fs::read_to_string(rack.file()).unwrap();
    let other = before.replacen("\"16 MiB\"", "\"32 MiB\"", 1);
    // Not while somebody has it.
    let lease = rack.borrow("alpha/nvme0", "beta");
    std::fs::write(rack.file(), &other).unwrap();
    let refused = rack.bad(1, &["up", &rack.file()]);
    assert!(refused.contains("alpha/nvme0 leaves the rack, and is lent to beta"), "{refused}");
    rack.give_back(&lease);
    assert!(detail(&rack, "alpha/nvme0").unwrap().0.contains("16 MiB"));
    assert_eq!(followed(&rack, &other), said(&[("alpha/nvme0", "changed")]));
    assert_eq!(followed(&rack, &other), []);
    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!(open(&lease).info().blocks * 512, 32 << 20);
    rack.give_back(&lease);
    // So it stays: its node in another process, then a new life of it, then the control plane's.
    rack.restart_in_place("alpha");
    assert!(detail(&rack, "alpha/nvme0").unwrap().0.contains("32 MiB"));
    rack.process(Some("alpha")).crash();
    rack.restart(Some("alpha"));
    rack.wait_up(&["alpha"]);
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&["alpha", "beta"]);
    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!(open(&lease).info().blocks * 512, 32 << 20);
    rack.give_back(&lease);
    assert_eq!(followed(&rack, &other), []);
    // One that is not listed any more is gone, also for those processes.
    let end = other.find("[hosts.alpha.devices.nvme1]").unwrap();
    let less = other[..end].to_owned() + &other[other.find("[hosts.beta]").unwrap()..];
    assert_eq!(followed(&rack, &less), said(&[("alpha/nvme1", "removed")]));
    rack.process(None).crash();
    rack.process(Some("alpha")).crash();
    rack.restart(None);
    rack.restart(Some("alpha"));
    rack.wait_device("alpha/nvme0", DeviceState::Offered);
    assert_eq!(detail(&rack, "alpha/nvme1"), None);
    assert_eq!(followed(&rack, &before).len(), 2);
    assert_eq!(offered(&rack.json(&["devices"])), ["alpha/nvme0", "alpha/nvme1"]);
}

#[test]
fn what_of_a_changed_file_cannot_be_done_is_refused_whole_and_what_fails_is_undone() {
    let rack = Rack::up(THREE_HOSTS);
    let before = std::fs::read_to_string(rack.file()).unwrap();
    let sections = || rack.block(async { rack.client().sections().await.unwrap() });
    let things = || (sections(), rack.json(&["composition", "list"]));
    let as_it_was = things();
    let ram = "[hosts.gamma.devices.ram7]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let composed = "[[composition]]\nname = \"c\"\nhost = \"beta\"\nfunctions = [\"gamma/ram7\"]\n";
    let refused = |text: String, said: &str| {
        std::fs::write(rack.file(), text).unwrap();
        let refused = rack.bad(1, &["up", &rack.file()]);
        assert!(refused.contains(said), "{refused}");
        assert_eq!(things(), as_it_was, "something changed");
    };
    // Beside what could be done there is something that could not.
    let smaller = before.replace("[hosts.beta]", "[hosts.beta]\nmemory = \"64 MiB\"");
    refused(format!("{smaller}{ram}"), "hosts.beta");
    let nic = "[hosts.beta.devices.net]\nkind = \"nic\"\nfunctions = 1\n";
    refused(format!("{before}{ram}{nic}"), "beta/net.vf1, a network function");
    // A drive's file keeps its size, which its node finds when the other devices have changed already.
    let larger = before.replace("\"16 MiB\"", "\"32 MiB\"");
    refused(format!("{larger}{ram}{composed}"), "alpha/nvme1");
    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!(open(&lease).info().blocks * 512, 16 << 20);
    rack.give_back(&lease);
    assert_eq!(followed(&rack, &before), []);
}

#[test]
fn compositions_follow_a_changed_file() {
    let mut rack = Rack::up(THREE_HOSTS);
    let before = std::fs::read_to_string(rack.file()).unwrap();
    let composed = |name: &str, functions: &str| {
        format!("[[composition]]\nname = \"{name}\"\nhost = \"beta\"\nfunctions = [{functions}]\n")
    };
    let ram = "[hosts.gamma.devices.ram7]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let both = composed("db", "\"alpha/nvme0\", \"gamma/ram7\"");
    let text = format!("{before}{ram}{both}");
    let added = [("gamma/ram7", "added"), ("db", "added")];
    assert_eq!(followed(&rack, &text), said(&added));
    let borrowed = rack.json(&["composition", "borrow", "db"]);
    assert_eq!(borrowed["state"], "borrowed");
    // While it is borrowed others change, and it does not.
    let other = composed("web", "\"alpha/nvme1\"");
    assert_eq!(followed(&rack, &format!("{text}{other}")), said(&[("web", "added")]));
    for changed in [text.replace("\"alpha/nvme0\", ", ""), format!("{before}{ram}")] {
        std::fs::write(rack.file(), changed).unwrap();
        let refused = rack.bad(1, &["up", &rack.file()]);
        assert!(refused.contains("composition db changes, and"), "{refused}");
    }
    assert_eq!(rack.json(&["composition", "list"]).as_array().unwrap().len(), 2);
    rack.good(&["composition", "return", "db"]);
    let one = format!("{before}{ram}{}", composed("db", "\"gamma/ram7\""));
    assert_eq!(followed(&rack, &one), said(&[("db", "changed"), ("web", "removed")]));
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&["beta"]);
    let listed = rack.json(&["composition", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["functions"], serde_json::json!(["gamma/ram7"]));
    // One of the same name that was saved is nobody's to change but by its own command.
    rack.good(&["composition", "save", "own", "--for", "beta", "alpha/nvme1"]);
    std::fs::write(rack.file(), format!("{one}{}", composed("own", "\"alpha/nvme0\""))).unwrap();
    let refused = rack.bad(1, &["up", &rack.file()]);
    assert!(refused.contains("composition own was saved"), "{refused}");
    let table = {
        std::fs::write(rack.file(), &before).unwrap();
        rack.good(&["up", &rack.file()])
    };
    let row = |name: &str| table.lines().find(|line| line.contains(name)).unwrap_or_default();
    assert!(row("db").contains("removed") && row("gamma/ram7").contains("removed"), "{table}");
}

#[test]
fn a_machine_offers_what_its_own_file_lists() {
    let text = "name = \"lab\"\n[hosts.alpha]\n[hosts.beta]\n";
    let rack = Machines::start(text);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("node.toml");
    let file = file.to_str().unwrap();
    let device = |name: &str| {
        format!("[devices.{name}]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"file\"\n")
    };
    let mut alpha = rack.machine("alpha");
    let refused = {
        std::fs::write(file, "[devices.d]\nkind = \"tape\"\n").unwrap();
        rack.begin_node(&mut alpha, "alpha", Some(&rack.token("alpha")), &["--devices", file]);
        let ended = alpha.process().wait().unwrap();
        assert_eq!(ended.code(), Some(2));
        alpha.log()
    };
    assert!(refused.contains("node.toml") && refused.contains("tape"), "{refused}");
    std::fs::write(file, device("d1") + &device("d2")).unwrap();
    rack.begin_node(&mut alpha, "alpha", None, &["--devices", file]);
    let beta = rack.joined("beta");
    rack.wait(|_| offered(&beta.json(&["devices"])) == ["alpha/d1", "alpha/d2"]);
    let lease = beta.borrow("alpha/d1", "beta");
    let mut drive = open(&lease);
    let data = pattern(3, 4096);
    drive.write(8, &data, true).unwrap();
    drop(drive);
    beta.json(&["return", &lease.lease.to_string()]);
    // Another machine offers nothing of alpha's.
    let refused = beta.bad(&["offer", "alpha/d3", "kind=memory", "size=1 MiB"]);
    assert!(refused.contains("beta may not act for alpha"), "{refused}");
    let refused = beta.bad(&["withdraw", "alpha/d1"]);
    assert!(refused.contains("may not"), "{refused}");
    // The file has changed when the node starts anew.
    std::fs::write(file, device("d1")).unwrap();
    let process = alpha.process();
    rustix::process::kill_process(rustix::process::Pid::from_child(process), Signal::TERM).unwrap();
    process.wait().unwrap();
    rack.begin_node(&mut alpha, "alpha", None, &["--devices", file]);
    rack.wait(|_| offered(&beta.json(&["devices"])) == ["alpha/d1"]);
    let mut drive = open(&beta.borrow("alpha/d1", "beta"));
    let mut read = vec![0; data.len()];
    drive.read(8, &mut read).unwrap();
    assert!(read == data);
}
