//! The command line over a rack of real processes: what each command does, says and answers.

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use rackbus_attach::{Copier, Location, SegmentOptions, Session, Signal as CopySignal};
use rackbus_control::api::LeaseStage;
use rustix::process::Signal;
use support::{PATIENCE, Rack, THREE_HOSTS, open, pattern};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

#[test]
fn a_drive_is_borrowed_used_and_returned() {
    let rack = Rack::up(THREE_HOSTS);
    let devices = rack.good(&["devices"]);
    assert!(devices.lines().any(|l| l.starts_with("alpha/nvme0") && l.contains("offered")));
    assert!(!devices.contains('\x1b'), "colour without a terminal");

    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!((lease.borrower.as_str(), lease.lender.as_str()), ("beta", "alpha"));
    let data = pattern(1, 64 << 10);
    open(&lease).write(8, &data, true).unwrap();

    let refused = rack.bad(1, &["borrow", "alpha/nvme0", "--for", "gamma"]);
    assert!(refused.contains("lent to beta"), "{refused}");
    let refused = rack.run(&["borrow", "alpha/nvme0", "--for", "gamma", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!((told["code"].as_str(), refused.status.code()), (Some("held"), Some(1)));
    assert!(told["error"].as_str().unwrap().contains("beta"), "{told}");
    let leases = rack.good(&["leases"]);
    assert!(leases.contains("alpha/nvme0") && leases.contains("active"), "{leases}");

    let ended = rack.give_back(&lease);
    assert_eq!((ended.stage, ended.returned), (LeaseStage::Ended, true));
    assert_eq!(rack.good(&["leases"]).lines().count(), 1, "the head alone");
    assert!(rack.good(&["leases", "--all"]).contains("returned"));

    let next = rack.borrow("alpha/nvme0", "gamma");
    assert!(next.epoch > lease.epoch);
    let mut found = vec![0; data.len()];
    open(&next).read(8, &mut found).unwrap();
    assert!(found == data, "the next borrower finds other data");
}

#[test]
fn what_cannot_be_shown_with_msix_is_returned() {
    let rack = Rack::up(THREE_HOSTS);
    // Where the first lease's note would be is something else.
    let note = rack.run_dir().join("beta/functions/nvme0.1.interrupts");
    std::fs::create_dir_all(&note).unwrap();
    let said = rack.bad(1, &["borrow", "alpha/nvme0", "--for", "beta", "--msix"]);
    assert!(said.contains("it was returned"), "{said}");
    assert_eq!(rack.good(&["leases"]).lines().count(), 1, "the head alone");
}

#[test]
fn a_devices_counters_are_shown() {
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.read(0, &mut vec![0; 4096]).unwrap();
    // The node says how its devices are every few seconds.
    let counted = |device: &serde_json::Value| {
        ["jobs", "parks"].iter().all(|count| device["report"][count].as_u64() > Some(0))
    };
    let begun = std::time::Instant::now();
    let device = loop {
        let device = rack.json(&["devices", "alpha/nvme0"]);
        if counted(&device) {
            break device;
        }
        assert!(begun.elapsed() < PATIENCE, "{device}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert_eq!(device["report"]["trouble"], serde_json::Value::Null);
    let people = rack.good(&["devices", "alpha/nvme0"]);
    assert!(people.contains("DMA refused") && people.contains("beta, lease 1"), "{people}");
    assert!(rack.bad(1, &["devices", "alpha/nvme9"]).contains("no device alpha/nvme9"));
}

#[test]
fn a_hundred_leases_keep_every_byte() {
    let rack = Rack::up(THREE_HOSTS);
    let mut epoch = 0;
    for round in 0..100u64 {
        let host = HOSTS[1 + round as usize % 2];
        let lease = rack.borrow("alpha/nvme1", host);
        assert!(lease.epoch > epoch, "epochs only grow");
        epoch = lease.epoch;
        let mut drive = open(&lease);
        if round > 0 {
            let before = pattern(round - 1, 4096);
            assert!(drive.compare((round - 1) * 8, &before).unwrap(), "round {round}");
        }
        drive.write(round * 8, &pattern(round, 4096), false).unwrap();
        // Every other time the drive is returned while it is still open.
        if round % 2 == 0 {
            drop(drive);
            rack.give_back(&lease);
        } else {
            rack.give_back(&lease);
            assert!(drive.read(0, &mut [0; 512]).is_err(), "a returned drive goes on working");
        }
    }
}

#[test]
fn of_many_who_ask_at_once_one_gets_it() {
    let rack = Rack::up(THREE_HOSTS);
    let ask = |n: usize| {
        let args = ["borrow", "alpha/nvme0", "--for", HOSTS[1 + n % 2]];
        rack.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let asked: Vec<_> = (0..12).map(ask).collect();
    let answers: Vec<_> = asked.into_iter().map(|c| c.wait_with_output().unwrap()).collect();
    assert_eq!(answers.iter().filter(|a| a.status.success()).count(), 1);
    let holder = rack.json(&["devices"])[0]["holder"].as_str().unwrap().to_owned();
    for answer in answers.iter().filter(|a| !a.status.success()) {
        let told = String::from_utf8_lossy(&answer.stderr);
        assert!(told.contains(&format!("lent to {holder}")), "{told}");
    }
}

#[test]
fn down_leaves_no_process_and_keeps_the_state() {
    let rack = Rack::up(THREE_HOSTS);
    let processes = rack.processes(&HOSTS);
    for process in &processes {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
        let session = stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap();
        assert_eq!(session, process.pid.to_string(), "it would end with its terminal");
    }
    rack.good(&["up", &rack.file()]);
    let again = rack.bad(1, &["up", &rack.file(), "--foreground"]);
    assert!(again.contains("is up already"), "{again}");
    let lease = rack.borrow("alpha/nvme1", "beta");
    let data = pattern(7, 4096);
    open(&lease).write(0, &data, true).unwrap();
    rack.give_back(&lease);

    assert_eq!(rack.json(&["down"])["stopped"], 4);
    assert!(processes.iter().all(support::Process::is_gone));
    assert_eq!(sockets(&rack.run_dir()), Vec::<PathBuf>::new(), "nobody listens any more");
    let gone = rack.bad(1, &["status"]);
    assert!(gone.contains("rackbus up"), "{gone}");

    rack.good(&["up", &rack.file()]);
    let all = rack.json(&["leases", "--all"]);
    assert_eq!(all[0]["lease"], lease.lease, "the leases of before are known");
    let next = rack.borrow("alpha/nvme1", "gamma");
    assert!(next.epoch > lease.epoch);
    assert!(open(&next).compare(0, &data).unwrap());
}

/// The sockets in a folder and in those below it.
fn sockets(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .flat_map(|entry| match entry.file_type().unwrap() {
            kind if kind.is_dir() => sockets(&entry.path()),
            kind if kind.is_socket() => vec![entry.path()],
            _ => Vec::new(),
        })
        .collect()
}

#[test]
fn in_the_foreground_it_stops_with_its_process() {
    let rack = Rack::described(THREE_HOSTS);
    let mut child = rack
        .command(&["up", &rack.file(), "--foreground"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Its table says that all are up.
    let mut told = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut told, &mut line).unwrap();
    assert!(line.starts_with("rack lab: 3 hosts"), "{line}");
    let processes = rack.processes(&HOSTS);
    let own = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(own, Signal::INT).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(processes.iter().all(support::Process::is_gone));
}

#[test]
fn every_command_prints_json() {
    let rack = Rack::described(THREE_HOSTS);
    let status = rack.json(&["up", &rack.file()]);
    assert_eq!(status["hosts"].as_array().unwrap().len(), 3);
    assert_eq!(rack.json(&["status"])["rack"], "lab");
    let devices = rack.json(&["devices"]);
    assert_eq!(
        (&devices[0]["function"], &devices[0]["state"]),
        (&"alpha/nvme0".into(), &"offered".into())
    );
    let lease = rack.json(&["borrow", "alpha/nvme0", "--for", "beta"]);
    assert!(std::path::Path::new(lease["socket"].as_str().unwrap()).exists());
    assert_eq!(rack.json(&["leases"])[0]["borrower"], "beta");
    let number = lease["lease"].as_u64().unwrap().to_string();
    assert_eq!(rack.json(&["return", &number])["stage"], "ended");
    let again = rack.json(&["borrow", "alpha/nvme0", "--for", "beta"]);
    assert_eq!(rack.json(&["return", "alpha/nvme0"])["lease"], again["lease"]);
    for args in
        [&["return", &number][..], &["return", "999"], &["borrow", "alpha/x", "--for", "beta"]]
    {
        let refused = rack.run(&[args, &["--json"]].concat());
        let told: serde_json::Value = serde_json::from_slice(&refused.stdout).unwrap();
        assert!(told["error"].is_string() && told["remedy"].is_string(), "{args:?}: {told}");
        assert_eq!(refused.status.code(), Some(1));
    }
    assert_eq!(rack.json(&["down"])["rack"], "lab");
}

#[test]
fn errors_name_a_remedy() {
    let rack = Rack::up(THREE_HOSTS);
    let cases: [(&[&str], &str); 7] = [
        (&["return", "alpha/nvme0"], "alpha/nvme0 is lent to nobody"),
        (&["lend", "fffe:00:1f.7"], "no PCI function fffe:00:1f.7 on this machine; `lspci -D`"),
        (&["borrow", "alpha/nvme9", "--for", "beta"], "rackbus devices"),
        (&["borrow", "alpha/nvme0", "--for", "delta"], "alpha, beta, gamma"),
        (&["borrow", "nonsense", "--for", "beta"], "rackbus devices"),
        (&["return", "999"], "there is no lease 999"),
        (&["borrow", "alpha/nvme0", "--for", ""], "alpha, beta, gamma"),
    ];
    for (args, expected) in cases {
        let told = rack.bad(1, args);
        assert!(told.contains(expected), "{args:?}: {told}");
    }
    for args in
        [&["lent"][..], &["lend", "03:00"], &["borrow", "alpha/nvme0"], &["return", "one"], &[]]
    {
        assert_eq!(rack.run(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_vm_that_is_larger_than_its_host_is_refused_before_anything_is_borrowed() {
    let rack = Rack::up(
        "name = \"lab\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
         backing = \"memory\"\n[hosts.beta]\nmemory = \"1 GiB\"\n",
    );
    let run = ["vm", "run", "--host", "beta", "--borrow", "alpha/nvme0", "--memory", "2G"];
    let refused = rack.bad(2, &run);
    let said = "the VM would have 2 GiB of memory, and beta has 1 GiB by the rack file";
    assert!(refused.contains(said), "{refused}");
    assert_eq!(rack.json(&["leases", "--all"]), serde_json::json!([]));
}

#[test]
fn a_wrong_rack_file_is_refused_with_its_place() {
    let cases = [
        ("name = \"lab\"\n[hosts.alpha]\nmemry = \"1 GiB\"\n", "rack.toml:3:1: ", "`memory`"),
        ("name = \"lab\"\n[hosts.alpha.devices.d]\nkind = \"tape\"\n", "rack.toml:3:8: ", "nvme"),
        ("name = \"lab\n", "rack.toml:1:", ""),
    ];
    for (text, place, allowed) in cases {
        let rack = Rack::described(text);
        let told = rack.bad(2, &["up", &rack.file()]);
        assert!(told.contains(place) && told.contains(allowed), "{told}");
        assert!(!rack.run_dir().exists(), "something was begun");
    }
    let rack = Rack::described("");
    assert!(rack.bad(2, &["up", "/nowhere/rack.toml"]).contains("/nowhere/rack.toml"));
}

#[test]
fn a_device_that_cannot_run_stops_the_whole_start() {
    let text = THREE_HOSTS.replace("\"file\"", "\"/nowhere/disk.img\"");
    let rack = Rack::described(&text);
    let told = rack.bad(1, &["up", &rack.file()]);
    assert!(told.contains("the node of alpha ended") && told.contains("/nowhere"), "{told}");
    for host in HOSTS {
        let Ok(text) = std::fs::read_to_string(rack.run_dir().join(host).join("node.pid")) else {
            continue;
        };
        let pid: i32 = text.trim().parse().unwrap();
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        assert_ne!(name.trim(), "rackbus", "the node of {host} is still there");
    }
}

#[test]
fn of_several_racks_one_must_be_named() {
    let first = Rack::described("name = \"one\"\n[hosts.alpha]\n");
    let second = Rack::described("name = \"two\"\n[hosts.alpha]\n");
    let base = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
    let run = |rack: &Rack, args: &[&str]| {
        let mut command = rack.command(args);
        command.env_remove("RACKBUS_RUN_DIR").env("XDG_RUNTIME_DIR", base.path());
        let output = command.output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(told).unwrap())
    };
    assert_eq!(run(&first, &["up", &first.file()]).0, Some(0));
    assert!(run(&first, &["status"]).1.contains("rack one"), "the only one is meant");
    assert_eq!(run(&second, &["up", &second.file()]).0, Some(0));
    let (code, told) = run(&first, &["status"]);
    assert!(code == Some(2) && told.contains("one") && told.contains("two"), "{told}");
    assert!(run(&first, &["status", "--rack", "two"]).1.contains("rack two"));
    let folder = base.path().join("rackbus/one");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(folder).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700);
    for rack in ["one", "two"] {
        assert_eq!(run(&first, &["down", "--rack", rack]).0, Some(0));
    }
}

#[test]
fn events_name_what_happened_and_why() {
    let mut rack = Rack::up(THREE_HOSTS);
    let follow = rack.command(&["events", "--follow", "--json"]);
    let mut following = { follow }.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let lease = rack.borrow("alpha/nvme0", "beta");
    rack.bad(1, &["borrow", "alpha/nvme0", "--for", "gamma"]);
    let mut told = Vec::new();
    while told.last().is_none_or(|(kind, _)| kind != "refusal") {
        let event: serde_json::Value =
            serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let kind = event["kind"].as_str().unwrap();
        // That the nodes were started and offer functions is told as well.
        if event["lease"].is_u64() || kind == "refusal" {
            told.push((kind.to_owned(), event["lease"].clone()));
        }
    }
    let number: serde_json::Value = lease.lease.into();
    let lent = ("lease".to_owned(), number.clone());
    let refused = ("refusal".to_owned(), serde_json::Value::Null);
    assert_eq!(told, [lent.clone(), lent, refused]);
    following.kill().unwrap();
    following.wait().unwrap();

    rack.process(Some("alpha")).crash();
    rack.restart(Some("alpha"));
    rack.wait_lease(lease.lease, LeaseStage::Ended);
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&HOSTS);
    let losses = rack.json(&["events", "--kind", "loss"]);
    let losses = losses.as_array().unwrap();
    assert!(!losses.is_empty() && losses.iter().all(|loss| loss["lease"] == number), "{losses:?}");
    let table = rack.good(&["events"]);
    for said in
        ["beta can use alpha/nvme0", "gamma was refused", "the control plane", "node was restarted"]
    {
        assert!(table.contains(said), "{said}: {table}");
    }
    assert_eq!(rack.good(&["events", "--last", "2"]).lines().count(), 3, "the head and two");
    assert_eq!(rack.run(&["events", "--kind", "weather"]).status.code(), Some(2));
}

/// A token on a full disk, say, is lost otherwise without a word.
#[test]
fn what_cannot_be_written_is_a_failure_and_a_reader_that_left_is_none() {
    let rack = Rack::up(THREE_HOSTS);
    for args in [&["completions", "bash"][..], &["devices"], &["devices", "--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = rack.command(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("could not be written: No space"), "{args:?}: {said}");
    }
    let mut followed = rack.command(&["events", "--follow"]);
    let mut follower = followed.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    drop(lines);
    let begun = Instant::now();
    // Whoever follows notices with the next event.
    let status = loop {
        let lease = rack.borrow("alpha/nvme0", "beta");
        rack.give_back(&lease);
        if let Some(status) = follower.try_wait().unwrap() {
            break status;
        }
        assert!(begun.elapsed() < PATIENCE, "it goes on without a reader");
    };
    assert_eq!(status.code(), Some(0));
}

#[test]
fn metrics_count_what_is_done() {
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.write(0, &pattern(1, 4096), true).unwrap();
    let control = rack.good(&["metrics"]);
    assert!(control.contains("rackbus_leases{stage=\"active\"} 1"), "{control}");
    let node = rack.good(&["metrics", "alpha"]);
    for line in [
        "rackbus_function_attached{function=\"alpha/nvme0\"} 1.0",
        "rackbus_function_attached{function=\"alpha/nvme1\"} 0.0",
        "rackbus_link_conversations{service=\"functions\"} 1.0",
        "rackbus_link_conversations_begun_total{service=\"functions\"} 1",
        "rackbus_node_leases{role=\"lender\",state=\"armed\"} 1.0",
        "rackbus_shared_memory{what=\"segments\"} 0.0",
    ] {
        assert!(node.lines().any(|found| found == line), "{line} is not in\n{node}");
    }
    let polls =
        "rackbus_engine_busy_polls_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\"} ";
    let polls = node.lines().find_map(|line| line.strip_prefix(polls)).unwrap();
    assert_ne!(polls, "0", "nobody served the drive");
    drop(drive);
    assert!(rack.bad(2, &["metrics", "delta"]).contains("no host delta"));
}

/// A program of a host copies by a channel of its own, and its node says so.
#[test]
fn what_channels_copy_is_counted_by_the_node_of_their_host() {
    let rack = Rack::up(THREE_HOSTS);
    let [alpha, beta] = ["alpha", "beta"].map(|host| {
        Session::open(&Location { run_dir: rack.run_dir(), host: host.to_owned() }).unwrap()
    });
    let area = alpha.export_area(1 << 20).unwrap();
    let handle = beta.register_area(area.key()).unwrap();
    let source = beta.create_segment(&SegmentOptions::shared(1, 1 << 20)).unwrap();
    let source = source.map(0, 1 << 20).unwrap();
    let copier = Copier::start(&Default::default()).unwrap();
    for _ in 0..3 {
        copier.write(&handle, 0, (&source, 0), 4096, CopySignal::None).unwrap().finish().unwrap();
    }
    let counted = "rackbus_channel_bytes_total{} 12288";
    let begun = Instant::now();
    while !rack.good(&["metrics", "beta"]).lines().any(|line| line == counted) {
        assert!(begun.elapsed() < PATIENCE, "{}", rack.good(&["metrics", "beta"]));
    }
    drop((copier, handle, source));
    beta.close();
    // What it did stays counted when it has gone.
    let status = |rack: &Rack| {
        let status = rack.json(&["status"]);
        let hosts = status["hosts"].as_array().unwrap();
        hosts.iter().find(|host| host["host"] == "beta").unwrap()["channels"].clone()
    };
    while status(&rack)["transactions"] != 3 {
        assert!(begun.elapsed() < PATIENCE, "{}", status(&rack));
    }
    assert!(rack.good(&["metrics", "beta"]).lines().any(|line| line == counted));
}

/// Who looks for a lease's number in the logs finds what each process did for it; also where much else is logged at that
/// time, of which each log takes only so much.
#[test]
fn a_lease_is_traced_through_control_plane_lender_and_borrower() {
    let many = "[hosts.gamma.devices.card]\nkind = \"nic\"\nfunctions = 32\n";
    let rack = Rack::up(&format!("{THREE_HOSTS}{many}"));
    for number in 0..32 {
        rack.bad(1, &["borrow", &format!("alpha/none{number}"), "--for", "beta"]);
    }
    let lease = rack.borrow("alpha/nvme0", "beta");
    drop(open(&lease));
    rack.give_back(&lease);
    let about = format!("lease{{id={}}}", lease.lease);
    let of = |log: &str| {
        let text = std::fs::read_to_string(rack.run_dir().join(log)).unwrap();
        let lines = text.lines().filter(|line| line.contains(&about));
        lines.map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    for (log, steps) in [
        ("control.log", &["is being lent to beta", "beta can use", "ended: returned"][..]),
        ("alpha/node.log", &["to be lent", "function attached", "to be taken back"]),
        ("beta/node.log", &["borrowed", "in use", "releasing the function"]),
    ] {
        let told = of(log);
        for step in steps {
            assert!(told.contains(step), "{step} is not in {log}:\n{told}");
        }
    }
    assert!(of("gamma/node.log").is_empty());
}

#[test]
fn help_has_examples_and_shells_complete() {
    let rack = Rack::described("");
    for command in [
        "up",
        "down",
        "status",
        "devices",
        "borrow",
        "return",
        "leases",
        "events",
        "top",
        "metrics",
        "path",
        "reach",
        "node-id",
        "mem map",
        "on",
        "completions",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        assert!(rack.good(&words).contains("Example"), "{command}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = rack.good(&["completions", shell]);
        assert!(script.contains("borrow"), "{shell}");
    }
    assert!(rack.good(&["--version"]).starts_with("rackbus "));
}

#[test]
fn the_way_between_hosts_and_devices_is_shown() {
    let rack = Rack::up(THREE_HOSTS);
    let there = rack.json(&["path", "alpha/nvme0", "beta"]);
    assert_eq!((&there["from"], &there["to"]), (&"alpha/nvme0".into(), &"beta".into()));
    let names = |path: &serde_json::Value| -> Vec<String> {
        let hops = path["components"].as_array().unwrap();
        hops.iter().map(|hop| hop["name"].as_str().unwrap().to_owned()).collect()
    };
    // The drive reaches beta's memory; beta's processors, at their root complex, the drive.
    let (mut way, mut back) = (names(&there), names(&rack.json(&["path", "beta", "alpha/nvme0"])));
    assert_eq!(way.pop().as_deref(), Some("beta/memory"));
    back.reverse();
    assert_eq!(way, back, "the way back is the way there");
    assert_eq!(there["roots"], 2, "the lender's root complex and the borrower's");
    assert_eq!(there["hops"], way.len() - 1, "without the ends");
    let table = rack.good(&["path", "alpha/nvme0", "beta"]);
    assert!(names(&there).iter().all(|name| table.contains(name.as_str())), "{table}");
    let told = rack.bad(1, &["path", "alpha", "delta"]);
    assert!(told.contains("delta"), "{told}");
}
