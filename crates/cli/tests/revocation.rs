//! Certificates that are taken back: refused at once by the control plane and by nodes, wherever the state is kept.

mod support;

use serde_json::Value;
use support::machines::{Machine, Machines};
use support::open;

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "4 s"
return_grace = "500 ms"

[link]
hold = "1 s"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

fn certificates(rack: &Machines) -> Vec<Value> {
    rack.control.json(&["certificates"]).as_array().unwrap().clone()
}

/// The certificates of a subject that are good, or not.
fn of(rack: &Machines, subject: &str, good: bool) -> Vec<String> {
    let all = certificates(rack).into_iter();
    let own = all.filter(|it| it["subject"] == subject && it["revoked"].is_null() == good);
    own.map(|it| it["serial"].as_str().unwrap().to_owned()).collect()
}

/// Waits until the events tell of a refusal of somebody: they are stored some time after the answer.
fn wait_for_refusal(rack: &Machines, is_theirs: impl Fn(&Value) -> bool) {
    rack.wait(|rack| {
        let refused = rack.control.json(&["events", "--kind", "refusal"]);
        refused.as_array().unwrap().iter().any(|it| is_theirs(&it["by"]))
    });
}

fn logged_in(rack: &Machines, user: &str, role: &str) -> Machine {
    let made = rack.control.json(&["token", "--user", user, "--role", role]);
    let desk = rack.desk(user);
    let file = rack.control.run_dir().join(format!("{user}.token"));
    std::fs::write(&file, made["token"].as_str().unwrap()).unwrap();
    desk.json(&["login", &rack.url, "--token-file", file.to_str().unwrap()]);
    desk
}

#[test]
fn a_person_who_is_revoked_is_out_until_there_is_a_new_token() {
    let rack = Machines::start(RACK);
    let (ann, bob) = (logged_in(&rack, "ann", "operator"), logged_in(&rack, "bob", "reader"));
    let admin = logged_in(&rack, "root", "administrator");
    // A conversation without an end, which is under way.
    let mut follows = ann.command(&["events", "--follow"]);
    let mut follows = follows.stdout(std::process::Stdio::null()).spawn().unwrap();
    rack.control.json(&["token", "--user", "ann", "--role", "reader"]);
    for refused in [&ann, &bob] {
        assert!(refused.bad(&["revoke", "user", "ann"]).contains("may not ask for"));
        assert!(refused.bad(&["certificates"]).contains("may not ask for"));
    }
    let done = admin.json(&["revoke", "user", "ann"]);
    assert_eq!((&done["certificates"], &done["tokens"]), (&1.into(), &1.into()));
    let ended = follows.wait().unwrap();
    assert!(!ended.success(), "the events go on");
    let said = ann.bad(&["status"]);
    assert!(said.contains("of ann.operator.user.rackbus, was revoked"), "{said}");
    assert!(ann.bad(&["whoami"]).contains("was revoked"));
    bob.json(&["status"]);
    wait_for_refusal(&rack, |by| by["role"] == "revoked" && by["user"] == "ann");
    let access = rack.control.json(&["events", "--kind", "access"]);
    let told = access.as_array().unwrap().iter().find(|it| it["by"]["user"] == "root").cloned();
    assert_eq!(told.unwrap()["text"], "user ann is revoked: 1 certificates that were good");
    assert_eq!(of(&rack, "ann.operator.user.rackbus", false).len(), 1);
    // With a new token she is another.
    let again = logged_in(&rack, "ann", "reader");
    again.json(&["status"]);
    let serial = of(&rack, "ann.reader.user.rackbus", true).remove(0);
    admin.json(&["revoke", "serial", &serial]);
    assert!(again.bad(&["status"]).contains("was revoked"));
    assert!(admin.bad(&["revoke", "serial", "4242"]).contains("no certificate that is good"));
    assert!(admin.bad(&["revoke", "host", "delta"]).contains("the rack has no host delta"));
}

#[test]
fn a_host_that_is_revoked_reaches_neither_control_plane_nor_nodes() {
    let mut rack = Machines::start(RACK);
    let [_alpha, mut beta, gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    let lease = beta.borrow("alpha/nvme0", "beta");
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], false).unwrap();
    rack.control.json(&["revoke", "host", "beta"]);
    // The control plane hears it no more, and nor does the lender's node: its lease ends, and what it had is lent to
    // others.
    rack.wait(|rack| rack.state_of("beta") == "down");
    let drive = std::cell::RefCell::new(drive);
    rack.wait(|_| drive.borrow_mut().read(0, &mut [0; 4096]).is_err());
    drop(drive);
    rack.wait(|rack| rack.function("alpha/nvme0")["state"] == "offered");
    assert!(beta.bad(&["status"]).contains("was revoked"));
    let lease = gamma.borrow("alpha/nvme0", "gamma");
    open(&lease).read(0, &mut [0; 4096]).unwrap();
    // Its certificate does not let it in again either; the list outlives the control plane.
    beta.crash();
    rack.restart_control();
    let said =
        beta.bad(&["node", "--host", "beta", "--join", &rack.url, "--listen", "127.0.0.1:0"]);
    assert!(said.contains("of beta.node.rackbus, was revoked"), "{said}");
    wait_for_refusal(&rack, |by| by["role"] == "revoked" && by["host"] == "beta");
    // Another machine joins as beta, with a token.
    let (mut other, token) = (rack.machine("beta2"), rack.token("beta"));
    rack.node(&mut other, "beta", Some(&token));
    gamma.json(&["return", &lease.lease.to_string()]);
    let lease = other.borrow("alpha/nvme0", "beta");
    open(&lease).read(0, &mut [0; 4096]).unwrap();
    assert_eq!(of(&rack, "beta.node.rackbus", true).len(), 1);
}

#[test]
fn what_is_revoked_is_in_a_backup() {
    let mut rack = Machines::start(RACK);
    let ann = logged_in(&rack, "ann", "operator");
    rack.control.json(&["revoke", "user", "ann"]);
    let backup = rack.control.run_dir().join("lab.backup");
    let backup = backup.to_str().unwrap();
    rack.control.json(&["control", "backup", backup]);
    rack.control.crash();
    let state = rack.control.state_dir();
    std::fs::remove_dir_all(&state).unwrap();
    let to = format!("sqlite:{}", state.join("control.db").display());
    rack.control.json(&["control", "restore", backup, "--to", &to]);
    rack.begin_control();
    assert!(ann.bad(&["status"]).contains("was revoked"));
    assert_eq!(of(&rack, "ann.operator.user.rackbus", false).len(), 1);
}
