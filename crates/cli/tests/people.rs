//! People on other machines: they log in with a token, may what their role says, and are named in the events.

mod support;

use std::path::PathBuf;

use serde_json::Value;
use support::machines::{Machine, Machines};

const RACK: &str = r#"
name = "lab"

[control]
lease_ttl = "15 s"
return_grace = "500 ms"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

/// A file with a token that `args` ask for.
fn token(rack: &Machines, name: &str, args: &[&str]) -> PathBuf {
    let made = rack.control.json(&[&["token"], args].concat());
    let path = rack.control.run_dir().join(format!("{name}.token"));
    std::fs::write(&path, made["token"].as_str().unwrap()).unwrap();
    path
}

/// The machine of somebody who is not logged in.
fn desk(rack: &Machines, name: &str) -> Machine {
    rack.desk(name)
}

/// The machine of somebody who has logged in, with a token that `args` ask for.
fn logged_in(rack: &Machines, user: &str, args: &[&str]) -> Machine {
    let file = token(rack, user, &[&["--user", user], args].concat());
    let machine = desk(rack, user);
    machine.json(&["login", &rack.url, "--token-file", file.to_str().unwrap()]);
    machine
}

fn events(rack: &Machines, kind: &str) -> Vec<Value> {
    let all = rack.control.json(&["events", "--kind", kind]);
    all.as_array().unwrap().clone()
}

/// Waits until the events tell of a refusal of somebody: they are stored some time after the answer.
fn wait_for_refusal(rack: &Machines, is_theirs: impl Fn(&Value) -> bool) {
    rack.wait(|rack| events(rack, "refusal").iter().any(|it| is_theirs(&it["by"])));
}

/// The event of who was let in that has this text, as soon as it is stored.
fn wait_for_access(rack: &Machines, text: &str) -> Value {
    let find = |rack: &Machines| events(rack, "access").into_iter().find(|it| it["text"] == text);
    rack.wait(|rack| find(rack).is_some());
    find(rack).unwrap()
}

#[test]
fn a_role_is_what_somebody_may_do() {
    let rack = Machines::start(RACK);
    let [_alpha, _beta, _gamma] = ["alpha", "beta", "gamma"].map(|host| rack.joined(host));
    let admin = logged_in(&rack, "root", &["--role", "administrator"]);
    let ann = logged_in(&rack, "ann", &["--role", "operator"]);
    let bob = logged_in(&rack, "bob", &["--role", "borrower", "--host", "beta"]);
    let eve = logged_in(&rack, "eve", &["--role", "reader"]);

    let who = ann.json(&["whoami"]);
    assert_eq!(
        (&who["user"], &who["role"], &who["rack"]),
        (&"ann".into(), &"operator".into(), &"lab".into())
    );
    let said = String::from_utf8(bob.run(&["whoami"]).stdout).unwrap();
    assert!(said.starts_with("bob (borrower for beta) in rack lab"), "{said}");
    assert_eq!(rack.control.json(&["whoami"])["role"], "local");

    // All of them read.
    for person in [&admin, &ann, &bob, &eve] {
        assert_eq!(person.json(&["devices"])[0]["function"], "alpha/nvme0");
        for command in ["status", "leases", "events", "metrics", "top"] {
            person.json(&[command]);
        }
        person.json(&["control", "status"]);
    }
    // A reader changes nothing.
    let borrow = ["borrow", "alpha/nvme0", "--for", "beta"];
    let said = eve.bad(&borrow);
    assert!(said.contains("eve (reader) may not ask for POST /v1/leases"), "{said}");
    // A borrower borrows for its host alone, and returns what that has.
    let lease = bob.borrow("alpha/nvme0", "beta");
    let said = bob.bad(&["borrow", "alpha/nvme0", "--for", "gamma"]);
    assert!(said.contains("bob (borrower for beta) may not act for gamma"), "{said}");
    assert!(eve.bad(&["return", &lease.lease.to_string()]).contains("eve (reader)"));
    bob.json(&["return", &lease.lease.to_string()]);
    let lease = ann.borrow("alpha/nvme0", "gamma");
    let said = bob.bad(&["return", &lease.lease.to_string()]);
    assert!(said.contains("bob (borrower for beta) may not act for gamma"), "{said}");
    ann.json(&["return", &lease.lease.to_string()]);
    ann.json(&["composition", "save", "pair", "--for", "beta", "alpha/nvme0"]);
    assert!(bob.bad(&["composition", "remove", "pair"]).contains("bob (borrower for beta)"));
    bob.json(&["composition", "borrow", "pair"]);
    assert!(eve.bad(&["composition", "return", "pair"]).contains("eve (reader)"));
    bob.json(&["composition", "return", "pair"]);
    ann.json(&["composition", "remove", "pair"]);
    // An operator says who has what, and lets nobody in.
    assert!(bob.bad(&["withdraw", "alpha/nvme0"]).contains("bob (borrower for beta)"));
    ann.json(&["withdraw", "alpha/nvme0"]);
    ann.json(&["offer", "alpha/nvme0"]);
    let described = ["offer", "alpha/nvme1", "kind=nvme", "size=1 MiB", "backing=memory"];
    let said = ann.bad(&described);
    assert!(said.contains("ann (operator) may not describe a device"), "{said}");
    admin.json(&described);
    for person in [&ann, &bob, &eve] {
        let said = person.bad(&["token", "--user", "mallory", "--role", "administrator"]);
        assert!(said.contains("may not ask for POST /v1/users/tokens"), "{said}");
        assert!(person.bad(&["token", "beta"]).contains("may not ask for POST /v1/tokens"));
    }
    admin.json(&["token", "--user", "mallory", "--role", "reader"]);

    // What was granted and refused says who asked.
    let granted = events(&rack, "lease");
    let by = |who: &str| granted.iter().filter(|it| it["by"]["user"] == who).count();
    assert!(by("ann") >= 2 && by("bob") >= 2 && by("eve") == 0, "{granted:#?}");
    for (user, role) in [("eve", "reader"), ("bob", "borrower"), ("ann", "operator")] {
        wait_for_refusal(&rack, |by| by["user"] == user && by["role"] == role);
    }
    wait_for_refusal(&rack, |by| by["host"] == "beta");
    wait_for_access(&rack, "ann logged in as operator");
    wait_for_access(&rack, "the machine of beta has joined");
    let made = wait_for_access(&rack, "a token was made for mallory, reader");
    assert_eq!(made["by"]["user"], "root");
    let metrics = String::from_utf8(rack.control.run(&["metrics"]).stdout).unwrap();
    assert!(metrics.contains("rackbus_requests_forbidden_total{role=\"reader\"}"), "{metrics}");
    let table = String::from_utf8(rack.control.run(&["events"]).stdout).unwrap();
    assert!(table.contains("ASKED BY") && table.contains("bob (borrower for beta)"), "{table}");
}

#[test]
fn repeated_refusals_are_counted_and_do_not_fill_the_events() {
    let rack = Machines::start(RACK);
    let eve = logged_in(&rack, "eve", &["--role", "reader"]);
    for _ in 0..40 {
        eve.bad(&["return", "1"]);
    }
    let metrics = String::from_utf8(rack.control.run(&["metrics"]).stdout).unwrap();
    assert!(metrics.contains("rackbus_requests_forbidden_total{role=\"reader\"} 40"), "{metrics}");
    // The fewer the more there are; each tells how many there were since the one before.
    wait_for_refusal(&rack, |by| by["user"] == "eve");
    let refused = events(&rack, "refusal");
    assert!(refused.len() < 10, "{refused:#?}");
    let told = refused.iter().map(|it| {
        let text = it["text"].as_str().unwrap();
        let more = text.rsplit_once(" more times").and_then(|(before, _)| before.rsplit_once('('));
        1 + more.map_or(0, |(_, count)| count.parse().unwrap())
    });
    assert!((1..=40u64).contains(&told.sum()), "{refused:#?}");
}

#[test]
fn contexts_say_which_rack_is_meant() {
    let (lab, other) = (Machines::start(RACK), Machines::start(&RACK.replace("lab", "other")));
    let ann = logged_in(&lab, "ann", &["--role", "reader"]);
    let file = token(&other, "ann", &["--user", "ann", "--role", "operator"]);
    let file = file.to_str().unwrap();
    ann.json(&["--context", "two", "login", &other.url, "--token-file", file]);
    assert_eq!(ann.json(&["status"])["rack"], "other", "the last is the current one");
    assert_eq!(ann.json(&["--context", "lab", "status"])["rack"], "lab");
    ann.json(&["context", "use", "lab"]);
    assert_eq!(ann.json(&["status"])["rack"], "lab");
    let mut command = ann.command(&["status", "--json"]);
    let named = command.env("RACKBUS_CONTEXT", "two").output().unwrap();
    let named: Value = serde_json::from_slice(&named.stdout).unwrap();
    assert_eq!(named["rack"], "other");
    let list = ann.json(&["context", "list"]);
    assert_eq!((&list[0]["name"], &list[0]["current"]), (&"lab".into(), &true.into()));
    assert_eq!((&list[1]["name"], &list[1]["current"]), (&"two".into(), &false.into()));
    assert_eq!(ann.json(&["context", "show"])["subject"], "ann.reader.user.rackbus");
    // What nodes of this machine are asked is not asked by a context.
    let said = ann.bad(&["--context", "two", "net", "status"]);
    assert!(said.contains("on the machine of a host only"), "{said}");
    // Where nothing runs there, a rack of the system's services may be found: what runs on this machine is no matter.
    let own = ann.run_dir().join("rackbus/own");
    std::fs::create_dir_all(&own).unwrap();
    let noted = serde_json::json!({"rack": "own", "file": "rack.toml", "state_dir": own});
    std::fs::write(own.join("rack.json"), noted.to_string()).unwrap();
    ann.json(&["context", "use", "local"]);
    let said = ann.bad(&["status"]);
    assert!(said.contains(own.to_str().unwrap()), "{said}");
    ann.json(&["context", "remove", "lab"]);
    assert!(ann.bad(&["--context", "lab", "status"]).contains("there is no context lab"));
}

#[test]
fn a_persons_token_is_good_once_and_lets_no_machine_in() {
    let rack = Machines::start(RACK);
    let file = token(&rack, "ann", &["--user", "ann", "--role", "reader"]);
    let file = file.to_str().unwrap();
    let join =
        ["node", "--host", "beta", "--join", &rack.url, "--listen", "127.0.0.1:0", "--token-file"];
    let said = rack.machine("beta").bad(&[&join[..], &[file]].concat());
    assert!(said.contains("the token is for user ann"), "{said}");
    let host = rack.token("beta");
    let said =
        desk(&rack, "bob").bad(&["login", &rack.url, "--token-file", host.to_str().unwrap()]);
    assert!(said.contains("the token is for host beta"), "{said}");
    desk(&rack, "ann").json(&["login", &rack.url, "--token-file", file]);
    let said = desk(&rack, "eve").bad(&["login", &rack.url, "--token-file", file]);
    assert!(said.contains("used already"), "{said}");
    for wrong in [
        &["token", "--user", "ann"][..],
        &["token", "beta", "--user", "ann", "--role", "reader"],
        &["token", "--user", "ann", "--role", "root"],
        &["token", "--user", "ann", "--role", "borrower"],
        &["token", "--user", "ann", "--role", "reader", "--host", "beta"],
    ] {
        assert_eq!(rack.control.run(wrong).status.code(), Some(2), "{wrong:?}");
    }
    for refused in [
        &["token", "--user", "Ann", "--role", "reader"][..],
        &["token", "--user", "ann", "--role", "borrower", "--host", "delta"],
        &["token", "--user", "ann", "--role", "reader", "--life", "1s"],
    ] {
        rack.control.bad(refused);
    }
}

#[test]
fn a_certificate_is_renewed_when_it_is_used_and_is_over_when_it_is_not() {
    let rack = Machines::start(RACK);
    // A busy machine is to find the time to use it in the half that it is renewed in.
    let ann = logged_in(&rack, "ann", &["--role", "reader", "--life", "40s"]);
    let bob = logged_in(&rack, "bob", &["--role", "reader", "--life", "12s"]);
    let serial =
        |ann: &Machine| ann.json(&["context", "show"])["serial"].as_str().unwrap().to_owned();
    let first = serial(&ann);
    // Half of its time passes, and it is used all the while.
    rack.wait(|_| {
        ann.json(&["status"]);
        serial(&ann) != first
    });
    assert_eq!(ann.json(&["whoami"])["role"], "reader");
    // Nobody uses it until it is over.
    rack.wait(|_| bob.json(&["context", "show"])["over"] == true);
    let said = bob.bad(&["status"]);
    assert!(said.contains("was good until") && said.contains("log in again"), "{said}");
}
