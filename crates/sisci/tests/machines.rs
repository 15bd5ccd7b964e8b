//! The scenarios of `tests/c` between hosts that are machines: the same programs, over TLS.

mod support;

use support::Rack;

/// Runs a scenario of two processes on two machines, each way round.
fn between(scenario: &str) {
    let rack = Rack::of_machines();
    for (owner_host, owner_node, peer_host) in [("alpha", "4", "beta"), ("beta", "8", "alpha")] {
        let peer_node = if peer_host == "beta" { "8" } else { "4" };
        let mut owner = rack.on(owner_host, &format!("tests/{scenario}"));
        owner.args(["owner", peer_node]);
        let mut peer = rack.on(peer_host, &format!("tests/{scenario}++"));
        peer.args(["peer", owner_node]);
        rack.both(owner, peer);
    }
}

macro_rules! between {
    ($($scenario:ident),*) => {$(
        #[test]
        fn $scenario() {
            between(stringify!($scenario));
        }
    )*};
}

between!(
    segments,
    maps,
    segment_events,
    interrupts,
    data_interrupts,
    dma,
    copy,
    removals,
    reflective
);

/// The group's memory is on alpha's machine: one other machine has it, and a third one is told why not.
#[test]
fn a_group_is_for_two_machines() {
    let rack = Rack::of_machines();
    let (ended, first) = std::sync::mpsc::channel();
    let servers = ["beta", "gamma"].map(|host| {
        let mut server = rack.on(host, "bin/reflective");
        server.args(["-server", "-rank", "1", "-size", "64"]);
        let (child, ended) = (server.spawn().unwrap(), ended.clone());
        std::thread::spawn(move || {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ended.send((output.status.success(), said)).unwrap();
        })
    });
    let (good, said) = first.recv().unwrap();
    assert!(!good && said.contains("cannot join group") && said.contains("one other"), "{said}");
    let mut client = rack.on("alpha", "bin/reflective");
    client.args(["-client", "-nodes", "1", "-loops", "5", "-size", "64"]);
    let output = client.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let (good, said) = first.recv().unwrap();
    assert!(good, "{said}");
    servers.into_iter().for_each(|server| server.join().unwrap());
}
