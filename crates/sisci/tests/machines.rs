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

between!(segments, maps, segment_events, interrupts, data_interrupts, dma, copy, removals);
