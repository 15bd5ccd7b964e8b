//! The stories of `tests/c`: each is told by one process, or by two on two hosts.

use super::{Build, Rack, text};

/// Runs a story that one process tells, as C and as C++.
pub fn alone(build: Build, story: &str) {
    let rack = Rack::of(build);
    for variant in ["", "++"] {
        let output = rack.on("alpha", &format!("tests/{story}{variant}")).output().unwrap();
        assert!(output.status.success(), "{story}{variant}: {}", text(&output));
    }
}

/// Runs a story of two processes: one in C and one in C++, on two hosts, and both on one host.
pub fn together(build: Build, story: &str) {
    let rack = Rack::of(build);
    for (owner_host, owner_node) in [("alpha", "4"), ("beta", "8")] {
        let mut owner = rack.on(owner_host, &format!("tests/{story}"));
        owner.args(["owner", "8"]);
        let mut peer = rack.on("beta", &format!("tests/{story}++"));
        peer.args(["peer", owner_node]);
        rack.both(owner, peer);
    }
}

/// One test for each story, told by the programs of a build; but for `forks`: the sanitizers' own
/// locks may be held in a fork for ever by threads that it has not got; and `signals`: handlers of
/// faults and of signals at any time are the sanitizers' as well.
macro_rules! stories {
    ($build:expr) => {
        stories!($build, alone: headers, binary, library, handles, query, sharing);
        stories!($build, together: segments, maps, segment_events, interrupts, data_interrupts);
        stories!($build, together: dma, copy, reflective, removals);
    };
    ($build:expr, $how:ident: $($story:ident),*) => {$(
        #[test]
        fn $story() {
            crate::support::stories::$how($build, stringify!($story));
        }
    )*};
}
