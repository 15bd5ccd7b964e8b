//! Every command as a user types it: what it prints, for people and programs, and how it ends.

use crate::common::Rack;

#[test]
fn a_rack_comes_up_lends_and_goes_down() {
    let rack = Rack::up();
    let table = rack.ok(&["devices"]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("DEVICE"), "{table}");
    assert!(lines[1].starts_with("alpha/nvme0  nvme  offered"), "{table}");

    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!((lease["lease"].as_u64(), lease["stage"].as_str()), (Some(1), Some("active")));
    assert!(crate::common::socket(&lease).exists());

    let error = rack.fails(1, &["borrow", "alpha/nvme0", "--for", "gamma"]);
    assert_eq!(
        error,
        "rackbus: alpha/nvme0 is lent to beta (lease 1); wait until it is returned, or return it \
         with `rackbus return 1`\n"
    );
    let output = rack.run(&["borrow", "alpha/nvme0", "--for", "gamma", "--json"]);
    let error: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((error["code"].as_str(), output.status.code()), (Some("held"), Some(1)));

    assert_eq!(rack.json(&["leases"]).as_array().unwrap().len(), 1);
    assert!(rack.ok(&["return", "1"]).contains("alpha/nvme0 is offered again"));
    assert!(rack.ok(&["leases", "--all"]).contains("returned"));
    assert!(!crate::common::socket(&lease).exists());

    let status = rack.json(&["status"]);
    assert_eq!(status["hosts"].as_array().unwrap().len(), 3);
    assert_eq!(status["refused"], 2);
    let pids: Vec<i32> = ["control", "alpha", "beta", "gamma"].map(|p| rack.pid(p)).to_vec();
    assert!(rack.ok(&["down"]).contains("4 processes stopped"));
    for pid in pids {
        // A dead process that nobody has asked about yet has no command line any more.
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(command.is_empty(), "{pid} lives");
    }
    assert!(rack.fails(1, &["status"]).contains("start the rack with `rackbus up`"));
}

#[test]
fn wrong_usage_is_refused_before_anything_changes() {
    let rack = Rack::prepared();
    rack.fails(2, &["borow"]);
    rack.fails(2, &["borrow", "alpha/nvme0"]);
    rack.fails(2, &["return", "first"]);
    assert!(rack.fails(2, &["up", "/nonexistent.toml"]).contains("/nonexistent.toml"));
    let file = rack.path("wrong.toml");
    std::fs::write(&file, "name = \"x\"\n[hosts.a.devices.nvme0]\nkind = \"gpu\"\n").unwrap();
    let error = rack.fails(2, &["up", file.to_str().unwrap()]);
    assert!(error.contains("wrong.toml:3:8: ") && error.lines().count() == 1, "{error}");
    assert!(!rack.run_dir().exists(), "nothing was made");
}

#[test]
fn a_rack_is_not_started_twice() {
    let rack = Rack::up();
    let file = rack.path("rack.toml");
    let error = rack.fails(1, &["up", file.to_str().unwrap()]);
    assert!(error.contains("rack test is up already"), "{error}");
    assert_eq!(rack.json(&["status"])["hosts"][0]["state"], "up");
}

#[test]
fn completions_and_help_are_there() {
    let rack = Rack::prepared();
    for shell in ["bash", "zsh", "fish"] {
        assert!(rack.ok(&["completions", shell]).contains("rackbus"));
    }
    for command in ["up", "down", "status", "devices", "borrow", "return", "leases", "path"] {
        let help = rack.ok(&[command, "--help"]);
        assert!(help.contains("Example"), "{command} has no example");
    }
}
