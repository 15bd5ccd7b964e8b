//! The scenarios of `tests/c`: each is run by one process, or by two on two hosts.

use super::{Build, Rack, text};

/// Runs a scenario that one process runs, as C and as C++.
pub fn alone(build: Build, scenario: &str) {
    let rack = Rack::of(build);
    for variant in ["", "++"] {
        let output = rack.on("alpha", &format!("tests/{scenario}{variant}")).output().unwrap();
        assert!(output.status.success(), "{scenario}{variant}: {}", text(&output));
    }
}

/// Runs a scenario of two processes: one in C and one in C++, on two hosts, and both on one host.
pub fn together(build: Build, scenario: &str) {
    let rack = Rack::of(build);
    for (owner_host, owner_node) in [("alpha", "4"), ("beta", "8")] {
        let mut owner = rack.on(owner_host, &format!("tests/{scenario}"));
        owner.args(["owner", "8"]);
        let mut peer = rack.on("beta", &format!("tests/{scenario}++"));
        peer.args(["peer", owner_node]);
        rack.both(owner, peer);
    }
}

/// One test for each scenario, run by the programs of a build; but for `forks`: the sanitizers' own
/// locks may be held in a fork for ever by threads that it has not got; and `signals`: handlers of
/// faults and of signals at any time are the sanitizers' as well.
macro_rules! scenarios {
    ($build:expr) => {
        scenarios!($build, alone: headers, binary, library, handles, query, sharing);
        scenarios!($build, together: segments, maps, segment_events, interrupts, data_interrupts);
        scenarios!($build, together: dma, copy, reflective, removals);
    };
    ($build:expr, $how:ident: $($scenario:ident),*) => {$(
        #[test]
        fn $scenario() {
            crate::support::scenarios::$how($build, stringify!($scenario));
        }
    )*};
}
