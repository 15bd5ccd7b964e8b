//! A rack is upgraded one machine at a time, from the version before to this one: after each step a drive is borrowed,
//! written and read across machines, and finds what was written before. `make test-upgrade` builds the version before
//! and names it; without it, that is said loudly, and nothing is tested.

mod support;

use std::path::PathBuf;

use support::load::Load;
use support::machines::{Machine, Machines};
use support::open;

/// Names `rackbus` of the version before.
const PREVIOUS: &str = "RACKBUS_PREVIOUS";

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "10 s"
return_grace = "500 ms"

[link]
hold = "1 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
"#;

fn previous() -> Option<PathBuf> {
    let named = std::env::var_os(PREVIOUS).map(PathBuf::from);
    match &named {
        Some(named) => assert!(named.exists(), "{PREVIOUS} names {}", named.display()),
        None => support::not_tested("`make test-upgrade` builds the version before"),
    }
    named
}

/// Writes at the place of this step, and reads what was written at all before.
fn works(rack: &Machines, beta: &Machine, step: u64) {
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    let pattern = |step: u64| vec![step as u8 + 1; 4096];
    drive.write(step * 8, &pattern(step), false).unwrap();
    drive.flush().unwrap();
    for before in 0..=step {
        let mut read = vec![0; 4096];
        drive.read(before * 8, &mut read).unwrap();
        assert!(read == pattern(before), "what was written at step {before} is lost at {step}");
    }
    drop(drive);
    beta.json(&["return", &lease.lease.to_string()]);
}

/// Ends a machine's node, and starts it as this version.
fn upgrade(rack: &Machines, machine: &mut Machine, host: &str) {
    machine.crash();
    machine.program = env!("CARGO_BIN_EXE_rackbus").into();
    // It was the one before that was up.
    rack.wait(|rack| rack.state_of(host) == "down");
    rack.node(machine, host, None);
}

fn joined(rack: &Machines, host: &str, program: &std::path::Path) -> Machine {
    let (mut machine, token) = (rack.machine(host), rack.token(host));
    machine.program = program.to_owned();
    rack.node(&mut machine, host, Some(&token));
    machine
}

/// Nodes go on as this version while a drive is borrowed and written all the time; the lender first, or the borrower.
#[test]
fn in_place_while_a_drive_is_in_use() {
    let Some(previous) = previous() else { return };
    let rack = RACK.replace("hold = \"1 s\"", "hold = \"20 s\"");
    for order in [[0, 1], [1, 0]] {
        let mut rack = Machines::start_with(&rack, &previous);
        let mut machines = ["alpha", "beta"].map(|host| joined(&rack, host, &previous));
        let lease = machines[1].borrow("alpha/nvme0", "beta");
        let load = Load::start(&lease);
        let logs = |machines: &[Machine; 2]| format!("{}{}", machines[0].log(), machines[1].log());
        load.progress(50, || logs(&machines));
        for which in order {
            machines[which].program = env!("CARGO_BIN_EXE_rackbus").into();
            let row = machines[which].restart_in_place(["alpha", "beta"][which]);
            assert_eq!(row["in_use"], 1, "{row}");
            load.progress(50, || logs(&machines));
        }
        rack.control.crash();
        rack.control.program = env!("CARGO_BIN_EXE_rackbus").into();
        rack.begin_control();
        rack.wait(|rack| ["alpha", "beta"].iter().all(|host| rack.state_of(host) == "up"));
        load.progress(50, || logs(&machines));
        drop(load.finish());
        machines[1].json(&["return", &lease.lease.to_string()]);
        rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    }
}

#[test]
fn nodes_first() {
    let Some(previous) = previous() else { return };
    let mut rack = Machines::start_with(RACK, &previous);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| joined(&rack, host, &previous));
    works(&rack, &beta, 0);
    upgrade(&rack, &mut beta, "beta");
    works(&rack, &beta, 1);
    upgrade(&rack, &mut alpha, "alpha");
    works(&rack, &beta, 2);
    rack.control.crash();
    rack.control.program = env!("CARGO_BIN_EXE_rackbus").into();
    rack.begin_control();
    rack.wait(|rack| ["alpha", "beta"].iter().all(|host| rack.state_of(host) == "up"));
    works(&rack, &beta, 3);
}

#[test]
fn control_plane_first() {
    let Some(previous) = previous() else { return };
    let mut rack = Machines::start_with(RACK, &previous);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| joined(&rack, host, &previous));
    works(&rack, &beta, 0);
    rack.control.crash();
    rack.control.program = env!("CARGO_BIN_EXE_rackbus").into();
    rack.begin_control();
    rack.wait(|rack| ["alpha", "beta"].iter().all(|host| rack.state_of(host) == "up"));
    works(&rack, &beta, 1);
    upgrade(&rack, &mut alpha, "alpha");
    works(&rack, &beta, 2);
    // A node with a certificate that the version before gave it is revoked as well.
    rack.control.json(&["revoke", "host", "beta"]);
    rack.wait(|rack| rack.state_of("beta") == "down");
    beta.crash();
    let token = rack.token("beta");
    let mut other = rack.machine("beta2");
    rack.node(&mut other, "beta", Some(&token));
    works(&rack, &other, 3);
}

/// The version before has begun to replace the rack's certificate authority, and kept for no certificate for which key it is.
#[test]
fn in_the_middle_of_a_rotation() {
    let Some(previous) = previous() else { return };
    let help = std::process::Command::new(&previous).args(["control", "ca", "--help"]).output();
    if !help.unwrap().status.success() {
        return support::not_tested("the version before does not replace certificate authorities");
    }
    let mut rack = Machines::start_with(RACK, &previous);
    let [mut alpha, mut beta] = ["alpha", "beta"].map(|host| joined(&rack, host, &previous));
    works(&rack, &beta, 0);
    // Nobody signs by the new one before this node is back.
    beta.crash();
    rack.control.json(&["control", "ca", "rotate"]);
    rack.control.crash();
    rack.control.program = env!("CARGO_BIN_EXE_rackbus").into();
    rack.begin_control();
    rack.wait(|rack| rack.state_of("alpha") == "up");
    upgrade(&rack, &mut alpha, "alpha");
    // And this one is upgraded when all others are.
    rack.node(&mut beta, "beta", None);
    let authorities = |rack: &Machines| {
        let status = rack.control.json(&["control", "ca", "status"]);
        let all = status["authorities"].as_array().unwrap();
        (all[0]["number"].as_u64().unwrap(), all.len())
    };
    let done =
        |rack: &Machines, step: &str| rack.control.run(&["control", "ca", step]).status.success();
    rack.wait(|rack| authorities(rack) == (1, 2));
    works(&rack, &beta, 1);
    rack.wait(|rack| done(rack, "retire"));
    upgrade(&rack, &mut beta, "beta");
    // All have shown by then for which keys theirs are.
    rack.wait(|rack| done(rack, "rotate"));
    rack.wait(|rack| authorities(rack) == (2, 2));
    rack.wait(|rack| done(rack, "retire"));
    works(&rack, &beta, 2);
}
