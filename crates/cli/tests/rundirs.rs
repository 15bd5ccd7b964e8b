//! Run and state directories: whose they are, what lives in them, and that nothing is left behind
//! that no command stops.

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;

use rackbus_memory::Access;
use rackbus_pci::vfio_user::{Client, ClientError};
use rackbus_spec::vfio_user::{IrqSetFlags, region};
use support::{PATIENCE, Rack, THREE_HOSTS};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

#[test]
fn up_after_the_control_planes_death_leaves_what_lives_to_be_stopped() {
    let rack = Rack::up(THREE_HOSTS);
    let nodes = HOSTS.map(|host| rack.process(Some(host)));
    rack.process(None).crash();
    let told = rack.bad(1, &["up", &rack.file()]);
    assert!(told.contains("alpha") && told.contains("rackbus down"), "{told}");
    assert!(nodes.iter().all(|node| !node.is_gone()), "up ended somebody else's process");
    assert_eq!(rack.json(&["down"])["stopped"], 3);
    assert!(nodes.iter().all(|node| node.wait(PATIENCE)));
    rack.good(&["up", &rack.file()]);
}

#[test]
fn of_two_that_start_a_rack_at_once_one_does() {
    let rack = Rack::described(THREE_HOSTS);
    let file = rack.file();
    let both = [(); 2].map(|()| rack.command(&["up", &file]).spawn().unwrap());
    let codes = both.map(|mut up| up.wait().unwrap().code());
    assert!(codes == [Some(0), Some(1)] || codes == [Some(1), Some(0)], "{codes:?}");
    assert!(rack.good(&["status"]).contains("rack lab: 3 hosts"));
    let processes = rack.processes(&HOSTS);
    assert_eq!(rack.json(&["down"])["stopped"], 4);
    assert!(processes.iter().all(|process| process.wait(PATIENCE)));
}

#[test]
fn down_stops_hosts_that_left_the_rack_file_and_needs_no_note_of_the_rack() {
    let rack = Rack::up(THREE_HOSTS);
    let gamma = rack.process(Some("gamma"));
    let text = THREE_HOSTS.replace("[hosts.gamma]", "");
    std::fs::write(rack.file(), text).unwrap();
    std::fs::remove_file(rack.run_dir().join("rack.json")).unwrap();
    assert_eq!(rack.json(&["down"])["stopped"], 4);
    assert!(gamma.wait(PATIENCE), "the node of a host that left goes on");
    assert!(rack.bad(1, &["down"]).contains("no rack runs"));
}

/// Nodes and commands go by the note of the rack that runs.
#[test]
fn a_control_plane_that_is_refused_leaves_the_note_of_the_one_that_runs() {
    let rack = Rack::up(THREE_HOSTS);
    let note = rack.run_dir().join("rack.json");
    let before = std::fs::read(&note).unwrap();
    let other = rack.file().replace("rack.toml", "other.toml");
    std::fs::write(&other, THREE_HOSTS.replace("[hosts.gamma]", "[hosts.delta]")).unwrap();
    let elsewhere = rack.file().replace("rack.toml", "elsewhere");
    let said = rack.bad(1, &["control", &other, "--state-dir", &elsewhere]);
    assert!(said.contains("runs already"), "{said}");
    assert_eq!(std::fs::read(&note).unwrap(), before);
}

#[test]
fn one_state_directory_is_one_racks() {
    let rack = Rack::up(THREE_HOSTS);
    let file = rack.file();
    let mut other = rack.command(&["up", &file]);
    let elsewhere = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
    other.env("RACKBUS_RUN_DIR", elsewhere.path().join("run"));
    let output = other.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "two racks share a database: {told}");
    assert!(told.contains("--state-dir"), "{told}");
    assert!(rack.good(&["status"]).contains("rack lab: 3 hosts"));
}

#[test]
fn a_run_directory_that_others_can_change_is_refused() {
    let rack = Rack::described(THREE_HOSTS);
    let run = rack.run_dir();
    std::fs::create_dir(&run).unwrap();
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o777)).unwrap();
    for args in [&["up", &rack.file()][..], &["down"], &["status"]] {
        let told = rack.bad(1, args);
        assert!(told.contains("others may change it"), "{args:?}: {told}");
    }
    std::fs::remove_dir(&run).unwrap();
    let mine = run.with_file_name("elsewhere");
    std::fs::create_dir(&mine).unwrap();
    symlink(&mine, &run).unwrap();
    assert!(rack.bad(1, &["up", &rack.file()]).contains("is a link"));
}

#[test]
fn a_folder_of_racks_that_others_can_change_is_refused() {
    let rack = Rack::described(THREE_HOSTS);
    let base = rack.run_dir().with_file_name("xdg");
    std::fs::create_dir_all(base.join("rackbus/lab")).unwrap();
    let racks = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(base.join("rackbus"), racks).unwrap();
    for args in [&["up", &rack.file()][..], &["down", "--rack", "lab"]] {
        let mut command = rack.command(args);
        command.env_remove("RACKBUS_RUN_DIR").env("XDG_RUNTIME_DIR", &base);
        let output = command.output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("others may change it"), "{args:?}: {told}");
    }
}

#[test]
fn a_process_id_that_a_dead_process_left_is_nobodys() {
    let rack = Rack::up(THREE_HOSTS);
    let alpha = rack.process(Some("alpha"));
    // As when a process has just begun: it holds the file before its number is in it.
    let stranger = std::process::Command::new("sleep").arg("1000").spawn();
    let mut stranger = stranger.unwrap();
    let file = rack.run_dir().join("alpha/node.pid");
    std::fs::write(&file, format!("{}\n", stranger.id())).unwrap();
    assert_eq!(rack.json(&["down"])["stopped"], 4);
    assert!(stranger.try_wait().unwrap().is_none(), "a stranger was ended");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    assert!(alpha.is_gone());
}

/// Whoever makes a process repeat itself does not fill its disk.
#[test]
fn repeated_log_lines_are_counted_instead_of_logged() {
    let rack = Rack::up(THREE_HOSTS);
    for _ in 0..2000 {
        let mut peer = UnixStream::connect(rack.run_dir().join("alpha/link.sock")).unwrap();
        peer.write_all(&[2, 0, 0, 0, b'{', b'}']).unwrap();
        let mut refusal = Vec::new();
        peer.read_to_end(&mut refusal).unwrap();
        assert!(!refusal.is_empty());
    }
    let log = std::fs::read_to_string(rack.run_dir().join("alpha/node.log")).unwrap();
    assert!(log.contains("a connection to the link was refused"), "{log}");
    assert!(log.len() < 32 << 10, "{} bytes of log", log.len());
    // The node tells the count with its next sign of life.
    let count = || rack.json(&["status"])["hosts"][0]["log_lines_left_out"].as_u64().unwrap();
    let begun = std::time::Instant::now();
    while count() < 1000 {
        assert!(begun.elapsed() < PATIENCE, "{} lines", count());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// The same of a function's user: its lender counts what it refused, and writes no line for each.
#[test]
fn requests_that_a_function_refuses_are_counted_and_not_logged() {
    const REQUESTS: u64 = 20_000;
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    let user = Client::connect(support::socket(&lease), PATIENCE).unwrap();
    const DATA_NONE: IrqSetFlags = IrqSetFlags::DATA_NONE;
    const ACTION_TRIGGER: IrqSetFlags = IrqSetFlags::ACTION_TRIGGER;
    let beyond = 1 << 40;
    for at in 0..REQUESTS {
        // Each is another cause.
        let refused = match at % 8 {
            0 => user.read(region::BAR0, beyond, &mut [0; 4]),
            1 => user.read(region::CONFIG, beyond, &mut [0; 4]),
            2 => user.write(region::BAR0, beyond, &[0; 4]),
            3 => user.region_info(1000).map(drop),
            4 => user.irq_info(1000).map(drop),
            5 => user.dma_unmap(at << 12, 4096),
            6 => user.dma_map(u64::MAX << 12, 8192, Access::READ, None),
            _ => user.set_irqs(1000, 0, 1, DATA_NONE | ACTION_TRIGGER, &[], &[]),
        };
        assert!(matches!(refused, Err(ClientError::Refused(_))), "{}: {refused:?}", at % 8);
    }
    for host in ["alpha", "beta"] {
        let log = rack.run_dir().join(host).join("node.log");
        let length = std::fs::metadata(&log).unwrap().len();
        assert!(length < 32 << 10, "{length} bytes in {}", log.display());
    }
    let begun = std::time::Instant::now();
    // Three of the causes the borrower's node knows by itself. Each request is counted once.
    let (by_lender, by_borrower) = (REQUESTS / 8 * 5, REQUESTS / 8 * 3);
    let lender = "rackbus_function_requests_refused_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\"}";
    let borrower = "rackbus_borrowed_requests_refused_total{function=\"alpha/nvme0\"}";
    for (host, metric, count) in [("alpha", lender, by_lender), ("beta", borrower, by_borrower)] {
        while !rack.good(&["metrics", host]).contains(&format!("{metric} {count}\n")) {
            assert!(begun.elapsed() < PATIENCE, "{}", rack.good(&["metrics", host]));
        }
    }
    // It goes on for whoever asks for something that there is.
    user.read(0, 8, &mut [0; 4]).unwrap();
}

#[test]
fn a_run_directory_whose_sockets_would_have_too_long_paths_is_refused_at_once() {
    let rack = Rack::described(THREE_HOSTS);
    let long = rack.run_dir().with_file_name("x".repeat(80));
    let mut up = rack.command(&["up", &rack.file()]);
    let output = up.env("RACKBUS_RUN_DIR", &long).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("the system takes 107") && told.contains("shorter"), "{told}");
    assert!(!long.join("rack.json").exists());
}

#[test]
fn a_relative_run_directory_is_the_same_from_everywhere() {
    let rack = Rack::described(THREE_HOSTS);
    let folder = rack.run_dir().parent().unwrap().to_owned();
    let mut up = rack.command(&["up", "rack.toml"]);
    let up = up.current_dir(&folder).env("RACKBUS_RUN_DIR", "run").output().unwrap();
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    let lease = rack.borrow("alpha/nvme0", "beta");
    assert!(support::socket(&lease).is_absolute(), "{lease:?}");
    support::open(&lease);
}
