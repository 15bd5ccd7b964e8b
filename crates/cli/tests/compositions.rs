//! Compositions in a rack of real processes: borrowed whole or not at all, waited for, returned whole.

mod support;

use std::time::{Duration, Instant};

use rackbus_control::together::BorrowAllRequest;
use rackbus_lease::Placement;
use serde_json::Value;
use support::{PATIENCE, Rack};

const RACK: &str = "name = \"lab\"\n[control]\nlease_ttl = \"15 s\"\nreturn_grace = \"500 ms\"\n\
    [hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"4 MiB\"\nbacking = \"memory\"\n\
    [hosts.beta]\n\
    [hosts.gamma.devices.ram0]\nkind = \"memory\"\nsize = \"4 MiB\"\n\
    [[composition]]\nname = \"db\"\nhost = \"beta\"\nfunctions = [\"alpha/nvme0\", \"gamma/ram0\"]\n";

/// The functions of the leases of a composition, and whether all can be used.
fn borrowed(composition: &Value) -> (Vec<&str>, &str) {
    let leases = composition["leases"].as_array().unwrap();
    let functions = leases.iter().map(|lease| lease["function"].as_str().unwrap()).collect();
    (functions, composition["state"].as_str().unwrap())
}

fn live_leases(rack: &Rack) -> usize {
    rack.json(&["leases"]).as_array().unwrap().len()
}

#[test]
fn a_composition_is_borrowed_whole_or_not_at_all() {
    let mut rack = Rack::up(RACK);
    let listed = rack.json(&["composition", "list"]);
    assert_eq!((listed[0]["name"].as_str(), borrowed(&listed[0])), (Some("db"), (vec![], "free")));

    let whole = (vec!["alpha/nvme0", "gamma/ram0"], "borrowed");
    let first = rack.json(&["composition", "borrow", "db"]);
    assert_eq!(borrowed(&first), whole);
    let sockets = first["leases"].as_array().unwrap();
    assert!(
        sockets.iter().all(|lease| std::fs::exists(lease["socket"].as_str().unwrap()).unwrap())
    );
    // To ask for what one has is no second request.
    assert_eq!(rack.json(&["composition", "borrow", "db"]), first);
    assert_eq!(live_leases(&rack), 2);
    let back = rack.json(&["composition", "return", "db"]);
    assert_eq!((borrowed(&back), live_leases(&rack)), ((vec![], "free"), 0));

    // Somebody has a part of it: nothing of it is borrowed.
    let part = rack.borrow("gamma/ram0", "alpha");
    let refused = rack.bad(1, &["composition", "borrow", "db"]);
    assert!(refused.contains("gamma/ram0 is lent to alpha"), "{refused}");
    assert_eq!(live_leases(&rack), 1, "a part of a composition was borrowed");
    // One that waits gets it whole when that part is back.
    let waits = rack.command(&["composition", "borrow", "db", "--wait=1min", "--json"]);
    let waits = { waits }.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    // A newcomer does not overtake it, nor is anything lent to it meanwhile.
    let newcomer: Value = loop {
        let asked = rack.run(&["borrow", "alpha/nvme0", "--for", "gamma", "--json"]);
        let answer: Value = serde_json::from_slice(&asked.stdout).unwrap();
        if !asked.status.success() {
            break answer;
        }
        rack.good(&["return", &answer["lease"].to_string()]);
        assert!(begun.elapsed() < PATIENCE, "whoever waits is overtaken");
    };
    let newcomer = newcomer["error"].as_str().unwrap();
    assert!(newcomer.contains("1 requests wait for alpha/nvme0"), "{newcomer}");
    assert_eq!(live_leases(&rack), 1);
    rack.give_back(&part);
    let got = waits.wait_with_output().unwrap();
    assert_eq!(borrowed(&serde_json::from_slice(&got.stdout).unwrap()), whole);

    // A lender that begins anew has not lent its function any more; the other is kept until all is returned.
    rack.process(Some("gamma")).crash();
    rack.restart(Some("gamma"));
    rack.wait_up(&["alpha", "beta", "gamma"]);
    let begun = Instant::now();
    while borrowed(&rack.json(&["composition", "list"])[0]).1 != "partly" {
        assert!(begun.elapsed() < PATIENCE, "the lender's loss does not show");
        std::thread::sleep(Duration::from_millis(20));
    }
    let back = rack.json(&["composition", "return", "db"]);
    assert_eq!((borrowed(&back), live_leases(&rack)), ((vec![], "free"), 0));
}

#[test]
fn a_saved_composition_outlives_the_control_plane_and_wrong_ones_are_refused() {
    let mut rack = Rack::up(RACK);
    let save = |name: &'static str, functions: &[&'static str]| {
        [&["composition", "save", name, "--for", "beta"], functions].concat()
    };
    for (args, said) in [
        (save("db", &["alpha/ram0"]), "there is a composition db already"),
        (save("x", &["alpha/ram9"]), "there is no alpha/ram9"),
        (save("x", &["ram0"]), "ram0"),
        (save("x", &["alpha/ram0", "alpha/ram0"]), "alpha/ram0 is in the composition twice"),
        (save("no name", &["alpha/ram0"]), "`no name` is no name"),
        (vec!["composition", "save", "x", "--for", "delta", "alpha/ram0"], "no host delta"),
        (vec!["composition", "borrow", "x"], "there is no composition x"),
        (vec!["composition", "return", "x"], "there is no composition x"),
        (vec!["composition", "remove", "db"], "the rack file has the composition db"),
    ] {
        let refused = rack.bad(1, &args);
        assert!(refused.contains(said), "{args:?}: {refused}");
    }
    assert_eq!(rack.run(&["composition", "save", "x", "--for", "beta"]).status.code(), Some(2));

    let functions = ["alpha/ram0", "alpha/nvme0"];
    let mut strict = save("cache", &functions);
    strict.extend(["--isolation", "strict"]);
    assert_eq!(rack.json(&strict)["placement"], "borrower");
    rack.process(None).crash();
    rack.restart(None);
    rack.wait_up(&["alpha", "beta", "gamma"]);
    let got = rack.json(&["composition", "borrow", "cache"]);
    assert_eq!(borrowed(&got), (functions.to_vec(), "borrowed"));
    let placed = |lease: &Value| lease["placement"] == "borrower" && lease["group"] == "cache";
    assert!(got["leases"].as_array().unwrap().iter().all(placed), "{got}");
    let refused = rack.bad(1, &["composition", "remove", "cache"]);
    assert!(refused.contains("is borrowed"), "{refused}");
    rack.good(&["composition", "return", "cache"]);
    rack.good(&["composition", "remove", "cache"]);
    assert_eq!(rack.json(&["composition", "list"]).as_array().unwrap().len(), 1);
    let kinds = rack.good(&["events"]);
    assert!(kinds.contains("the composition cache was saved"), "{kinds}");
}

/// What `rackbus vm move` asks for: the functions of the VM's group, together, for another host.
#[test]
fn a_composition_whose_user_moved_to_another_host_is_borrowed_there() {
    let rack = Rack::up(RACK);
    rack.good(&["composition", "borrow", "db"]);
    rack.good(&["composition", "return", "db"]);
    let moved = BorrowAllRequest {
        functions: vec!["alpha/nvme0".to_owned(), "gamma/ram0".to_owned()],
        borrower: "alpha".to_owned(),
        placement: Placement::default(),
        group: Some("db".to_owned()),
        vm: None,
        wait_ms: None,
        priority: 0,
    };
    let client = rack.client();
    let leases = rack.block(async { client.borrow_together(&moved, "moved").await.unwrap() });
    let listed = rack.json(&["composition", "list"]);
    let whole = (vec!["alpha/nvme0", "gamma/ram0"], "borrowed");
    assert_eq!(borrowed(&listed[0]), whole);
    let table = rack.good(&["composition", "list"]);
    assert!(table.contains("borrowed by alpha"), "{table}");
    // Its own host does not have it.
    let refused = rack.bad(1, &["composition", "borrow", "db"]);
    assert!(refused.contains("is lent to alpha"), "{refused}");
    rack.give_back(&leases[0]);
    assert_eq!(rack.json(&["composition", "list"])[0]["state"], "partly");
    let back = rack.json(&["composition", "return", "db"]);
    assert_eq!((borrowed(&back), live_leases(&rack)), ((vec![], "free"), 0));
    // Another group's lease of one of its functions is none of it.
    rack.good(&["borrow", "alpha/nvme0", "--for", "alpha", "--group", "other"]);
    assert_eq!(rack.json(&["composition", "list"])[0]["state"], "free");
}
