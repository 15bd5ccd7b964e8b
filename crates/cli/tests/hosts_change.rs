//! Hosts come and go with a changed rack file while the rack runs: nodes are started and ended, the others go on, and who
//! uses what these lend notices a pause at most.

mod support;

use std::os::unix::net::UnixListener;
use std::process::{Child, Stdio};

use rackbus_attach::{Location, Session};
use rackbus_control::api::{Change, DeviceState, HostState, LeaseStage};
use rustix::process::{Pid, Signal};
use support::load::Load;
use support::{Process, Rack, THREE_HOSTS, open, pattern};

/// A host more, with devices of its own, and one that borrows only.
const MORE: &str = "
[hosts.delta.devices.ram]
kind = \"memory\"
size = \"1 MiB\"

[hosts.delta.devices.disk]
kind = \"nvme\"
size = \"4 MiB\"
backing = \"file\"

[hosts.epsilon]
";

fn text_of(rack: &Rack) -> String {
    std::fs::read_to_string(rack.file()).unwrap()
}

fn write(rack: &Rack, text: &str) {
    std::fs::write(rack.file(), text).unwrap();
}

/// Has the rack follow a file, which must succeed; what it says of hosts.
fn follow(rack: &Rack, text: &str) -> Vec<(String, String)> {
    write(rack, text);
    let changes = rack.json(&["up", &rack.file()]);
    let word = |it: &serde_json::Value, key: &str| it[key].as_str().unwrap().to_owned();
    let all = changes.as_array().unwrap().iter().filter(|it| it["part"] == "host");
    all.map(|it| (word(it, "name"), word(it, "change"))).collect()
}

/// Has the rack refuse a file; what it says.
fn refused(rack: &Rack, text: &str) -> String {
    write(rack, text);
    rack.bad(1, &["up", &rack.file()])
}

fn said(changes: &[(&str, &str)]) -> Vec<(String, String)> {
    changes.iter().map(|(name, change)| (name.to_string(), change.to_string())).collect()
}

/// The rack's hosts, when all are up.
fn hosts(rack: &Rack) -> Vec<String> {
    rack.wait(async |client| {
        let hosts = client.status().await.ok()?.hosts;
        let up = hosts.iter().all(|it| it.state == HostState::Up);
        up.then(|| hosts.into_iter().map(|it| it.host).collect())
    })
}

/// Has the rack follow its file, up to where the control plane knows of one of these hosts that it comes or goes.
fn begin_following(rack: &Rack, hosts: &[&str]) -> Child {
    let client = rack.client();
    rack.block(async {
        let mut changes = client.changes().await.unwrap();
        let mut up = rack.command(&["up", &rack.file()]);
        let child = up.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        loop {
            match changes.next().await.expect("the control plane ended") {
                Change::Host(host) if hosts.contains(&&host.host[..]) => return child,
                _ => {}
            }
        }
    })
}

fn process_of(child: &Child) -> Process {
    Process::of(Pid::from_child(child))
}

fn without_gamma(text: &str) -> String {
    text.replace("[hosts.gamma]\n", "")
}

#[test]
fn hosts_come_and_go_while_others_use_what_is_lent() {
    let rack = Rack::up(THREE_HOSTS);
    let three = text_of(&rack);
    let kept = rack.processes(&["alpha", "beta"]).iter().map(|it| it.pid).collect::<Vec<_>>();
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(&lease);
    let mut epoch = 0;
    for round in 0..3 {
        load.progress(50, || rack.logs());
        let changes = follow(&rack, &format!("{three}{MORE}"));
        assert_eq!(changes, said(&[("delta", "added"), ("epsilon", "added")]));
        let all = ["alpha", "beta", "gamma", "delta", "epsilon"].map(str::to_owned);
        assert_eq!(hosts(&rack), all);
        // Both borrow and lend, also with the hosts that were there before.
        let other = rack.borrow("delta/disk", "beta");
        assert!(other.epoch > epoch, "epochs only grow");
        epoch = other.epoch;
        let mut drive = open(&other);
        if round > 0 {
            assert!(drive.compare(0, &pattern(round - 1, 4096)).unwrap(), "its file stays");
        }
        drive.write(0, &pattern(round, 4096), true).unwrap();
        drop(drive);
        rack.give_back(&other);
        let to_new = rack.borrow("alpha/nvme0", "epsilon");
        open(&to_new).write(0, &pattern(7, 512), true).unwrap();
        rack.give_back(&to_new);
        // Whoever shows the rack shows them.
        assert!(rack.good(&["path", "delta/ram", "epsilon"]).contains("epsilon"));
        assert!(rack.good(&["devices"]).contains("delta/ram"));
        assert!(rack.good(&["metrics"]).contains("host=\"delta\""));
        assert_eq!(rack.good(&["node-id", "epsilon"]), "20\n");
        assert_eq!(rack.good(&["on", "epsilon", "--", "echo", "there"]), "there\n");
        load.progress(50, || rack.logs());
        let [delta, epsilon] = ["delta", "epsilon"].map(|host| rack.process(Some(host)));
        let changes = follow(&rack, &three);
        assert_eq!(changes, said(&[("delta", "removed"), ("epsilon", "removed")]));
        assert!(delta.is_gone() && epsilon.is_gone());
        assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
        assert!(!rack.good(&["devices"]).contains("delta"));
        assert!(!rack.good(&["metrics"]).contains("delta"));
        assert!(rack.bad(2, &["on", "delta", "--", "true"]).contains("no host delta"));
        assert!(rack.bad(1, &["borrow", "delta/ram", "--for", "beta"]).contains("delta/ram"));
        assert!(rack.bad(1, &["borrow", "alpha/nvme0", "--for", "delta"]).contains("delta"));
        for socket in ["link.sock", "segments.sock"] {
            assert!(!rack.run_dir().join("delta").join(socket).exists(), "{socket}");
        }
    }
    let events = rack.good(&["events"]);
    for event in ["host delta joined the rack", "host delta left the rack"] {
        assert!(events.contains(event), "{events}");
    }
    load.finish();
    rack.give_back(&lease);
    let now = rack.processes(&["alpha", "beta"]).iter().map(|it| it.pid).collect::<Vec<_>>();
    assert_eq!(now, kept, "the processes are the same");
    assert_eq!(follow(&rack, &three), []);
}

#[test]
fn a_host_that_was_there_from_the_beginning_leaves_and_is_a_new_one_when_it_is_back() {
    let mut rack = Rack::up(THREE_HOSTS);
    let three = text_of(&rack);
    let lease = rack.borrow("alpha/nvme0", "gamma");
    rack.give_back(&lease);
    let gamma = rack.process(Some("gamma"));
    assert_eq!(follow(&rack, &without_gamma(&three)), said(&[("gamma", "removed")]));
    assert!(gamma.is_gone());
    // So it stays, whichever process starts anew.
    rack.process(None).crash();
    rack.process(Some("beta")).crash();
    rack.restart(None);
    rack.restart(Some("beta"));
    rack.wait_up(&["alpha", "beta"]);
    assert_eq!(hosts(&rack), ["alpha", "beta"]);
    assert_eq!(follow(&rack, &three), said(&[("gamma", "added")]));
    let lease = rack.borrow("alpha/nvme0", "gamma");
    open(&lease).write(0, &pattern(3, 512), true).unwrap();
    rack.give_back(&lease);
    let status = rack.block(async { rack.client().status().await.unwrap() });
    let gamma = status.hosts.iter().find(|it| it.host == "gamma").unwrap();
    assert_eq!(gamma.state, HostState::Up);
    assert!(rack.good(&["down"]).contains("4 processes"), "all nodes end with the rack");
}

#[test]
fn what_is_in_use_is_named_before_anything_changes() {
    let rack = Rack::up(&format!("{THREE_HOSTS}{MORE}"));
    let all = text_of(&rack);
    let less = all.replace(MORE, "");
    let processes = || {
        let hosts = ["alpha", "beta", "gamma", "delta", "epsilon"];
        rack.processes(&hosts).iter().map(|it| it.pid).collect::<Vec<_>>()
    };
    let restarts = || rack.good(&["events"]).matches("was restarted in place").count();
    let before = (processes(), hosts(&rack), restarts());
    let refuses = |text: &str, what: &str| {
        let told = refused(&rack, text);
        assert!(told.contains(what), "{told}");
        assert_eq!((processes(), hosts(&rack), restarts()), before, "something changed: {told}");
    };
    let lease = rack.borrow("delta/ram", "beta");
    refuses(&less, "host delta leaves the rack, and delta/ram is lent to beta");
    rack.give_back(&lease);
    let lease = rack.borrow("alpha/nvme0", "epsilon");
    refuses(&less, "host epsilon leaves the rack, and alpha/nvme0 is lent to it");
    rack.give_back(&lease);
    let share = ["share", "join", "alpha/nvme0", "--for", "epsilon"];
    let share = rack.json(&share)["share"].as_u64().unwrap().to_string();
    refuses(&less, "alpha/nvme0");
    rack.good(&["share", "leave", &share]);
    rack.wait_device("alpha/nvme0", DeviceState::Offered);
    rack.good(&["composition", "save", "both", "--for", "beta", "alpha/nvme0", "delta/ram"]);
    refuses(&less, "host delta leaves the rack, and the saved composition both names it");
    rack.good(&["composition", "remove", "both"]);
    // Processes that share memory, on a host that leaves and on one that stays.
    for (host, what) in [("epsilon", "host epsilon leaves the rack"), ("beta", "the node of beta")]
    {
        let place = Location { run_dir: rack.run_dir(), host: host.to_owned() };
        let session = Session::open(&place).unwrap();
        refuses(&less, what);
        drop(session);
    }
    // The others would have other numbers.
    refuses(&without_gamma(&all), "the node id of host delta, which `node_id = 16` would keep");
    follow(&rack, &less);
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
}

/// The node of the new host does not start, when the control plane and all other nodes know of it already.
#[test]
fn a_change_that_fails_half_way_is_undone() {
    let rack = Rack::up(THREE_HOSTS);
    let three = text_of(&rack);
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(&lease);
    load.progress(20, || rack.logs());
    let gamma = rack.process(Some("gamma"));
    let bad = "[hosts.delta.devices.d]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"/nowhere/d.img\"\n";
    let ram = "[hosts.beta.devices.ram7]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let told = refused(&rack, &format!("{}{ram}{bad}", without_gamma(&three)));
    assert!(told.contains("the node of delta ended"), "{told}");
    rack.wait_up(&["alpha", "beta", "gamma"]);
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
    assert!(!gamma.is_gone());
    assert!(!rack.good(&["devices"]).contains("ram7"));
    let other = rack.borrow("alpha/nvme0", "gamma");
    open(&other).write(0, &pattern(1, 512), true).unwrap();
    rack.give_back(&other);
    load.progress(20, || rack.logs());
    // With what keeps it from starting gone, it is followed.
    let good = bad.replace("/nowhere/d.img", "memory");
    let changes = follow(&rack, &format!("{}{ram}{good}", without_gamma(&three)));
    assert_eq!(changes, said(&[("gamma", "removed"), ("delta", "added")]));
    assert!(gamma.is_gone());
    rack.borrow("beta/ram7", "delta");
    load.progress(20, || rack.logs());
    load.finish();
}

/// Killed when the control plane knows the new hosts, and some nodes perhaps.
#[test]
fn another_up_goes_on_where_one_was_killed() {
    let rack = Rack::up(THREE_HOSTS);
    let three = text_of(&rack);
    let lease = rack.borrow("alpha/nvme1", "beta");
    let load = Load::start(&lease);
    let wanted = format!("{}{MORE}", without_gamma(&three));
    for text in [&wanted, &three] {
        write(&rack, text);
        let up = begin_following(&rack, &["delta", "gamma"]);
        process_of(&up).signal(Signal::KILL);
        up.wait_with_output().unwrap();
        // Whatever was left to do.
        follow(&rack, text);
        assert!(!hosts(&rack).is_empty());
        load.progress(20, || rack.logs());
    }
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
    let other = rack.borrow("alpha/nvme0", "gamma");
    open(&other).write(0, &pattern(1, 512), true).unwrap();
    rack.give_back(&other);
    load.finish();
    rack.wait_lease(rack.give_back(&lease).lease, LeaseStage::Ended);
}

/// Its process is gone, and with it what it lent.
#[test]
fn a_host_whose_node_has_died_leaves() {
    let rack = Rack::up(&format!("{THREE_HOSTS}{MORE}"));
    let delta: Process = rack.process(Some("delta"));
    delta.signal(Signal::KILL);
    assert!(delta.wait(support::PATIENCE));
    let less = text_of(&rack).replace(MORE, "");
    follow(&rack, &less);
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
    // As an `up` leaves it that is killed when the node has ended.
    let left = rack.run_dir().join("delta").join("link.sock");
    drop(UnixListener::bind(&left).unwrap());
    follow(&rack, &less);
    assert!(!left.exists());
}

/// It is looked once more before its node ends.
#[test]
fn a_host_that_is_used_since_it_was_looked_stays() {
    let rack = Rack::up(THREE_HOSTS);
    let three = text_of(&rack);
    let wanted = format!("{}[hosts.delta]\n", without_gamma(&three));
    write(&rack, &wanted);
    let gamma = rack.process(Some("gamma"));
    let up = begin_following(&rack, &["delta"]);
    process_of(&up).signal(Signal::STOP);
    let place = Location { run_dir: rack.run_dir(), host: "gamma".to_owned() };
    let session = Session::open(&place).unwrap();
    process_of(&up).signal(Signal::CONT);
    let ended = up.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && told.contains("host gamma leaves the rack"), "{told}");
    assert!(!gamma.is_gone());
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma"]);
    drop(session);
    let lease = rack.borrow("alpha/nvme0", "gamma");
    rack.give_back(&lease);
    assert_eq!(follow(&rack, &wanted), said(&[("gamma", "removed"), ("delta", "added")]));
    assert!(gamma.is_gone());
}

/// Killed when the node of a new host, which had come up, has been ended again.
#[test]
fn another_up_starts_what_one_that_was_killed_has_ended() {
    let rack = Rack::up(THREE_HOSTS);
    let bad =
        "[hosts.beta.devices.d]\nkind = \"nvme\"\nsize = \"1 MiB\"\nbacking = \"/nowhere/d.img\"\n";
    let wanted = format!("{}[hosts.delta]\n{bad}", text_of(&rack));
    write(&rack, &wanted);
    let up = begin_following(&rack, &["delta"]);
    let delta = rack.wait(async |_| {
        let file = rack.run_dir().join("delta").join("node.pid");
        rackbus_link::presence::holder(&file).map(Process::of)
    });
    assert!(delta.wait(support::PATIENCE), "it is not ended");
    process_of(&up).signal(Signal::KILL);
    up.wait_with_output().unwrap();
    follow(&rack, &wanted.replace("/nowhere/d.img", "memory"));
    assert_eq!(hosts(&rack), ["alpha", "beta", "gamma", "delta"]);
    rack.give_back(&rack.borrow("beta/d", "delta"));
}

#[test]
fn hosts_that_join_are_kept_awake_as_the_others_are() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let rack = Rack::described(THREE_HOSTS);
    rack.good(&["up", "--low-latency", &rack.file()]);
    follow(&rack, &format!("{}{MORE}", text_of(&rack)));
    for host in ["alpha", "delta"] {
        let folder = format!("/proc/{}/fd", rack.process(Some(host)).pid.as_raw_pid());
        let mut files = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
        let is_held = |fd: std::path::PathBuf| {
            std::fs::read_link(fd).is_ok_and(|file| file.ends_with("cpu_dma_latency"))
        };
        assert!(files.any(is_held), "{host}");
    }
}
