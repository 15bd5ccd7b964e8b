//! The scenarios of `tests/c` between hosts that are machines: the same programs, over TLS.

mod support;

use support::{Rack, between_machines};

macro_rules! between {
    ($($scenario:ident),*) => {$(
        #[test]
        fn $scenario() {
            between_machines(stringify!($scenario));
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
