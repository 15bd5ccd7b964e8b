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

/// Where much else runs, threads stop between any two steps: what only seldom comes in another order does here.
#[test]
fn connections_come_and_go_on_a_busy_machine() {
    std::thread::scope(|scope| {
        for scenario in ["segments", "segment_events", "segments", "segment_events"] {
            scope.spawn(move || (0..12).for_each(|_| between(scenario)));
        }
    });
}

/// The group's memory is on alpha's machine; beta's and gamma's both have it, and hear a client on each of the three.
#[test]
fn a_group_is_for_three_machines() {
    let rack = Rack::of_machines();
    for client_host in ["alpha", "gamma"] {
        let servers: Vec<_> =
            ["alpha", "beta", "gamma"].into_iter().filter(|it| *it != client_host).collect();
        let servers: Vec<_> = servers
            .into_iter()
            .zip(["1", "2"])
            .map(|(host, rank)| {
                let mut server = rack.on(host, "bin/reflective");
                server.args(["-server", "-rank", rank, "-size", "64"]);
                let child = server.spawn().unwrap();
                std::thread::spawn(move || child.wait_with_output().unwrap())
            })
            .collect();
        let mut client = rack.on(client_host, "bin/reflective");
        client.args(["-client", "-nodes", "2", "-loops", "20", "-size", "64"]);
        let output = client.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        for server in servers {
            let output = server.join().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
    }
}
