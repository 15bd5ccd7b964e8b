//! The scenarios of `tests/c` between hosts that are machines: the same programs, over TLS.

mod support;

use std::sync::atomic::Ordering;

use rackbus_attach::{SegmentOptions, Session};
use support::{Rack, between_machines, text};

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

/// What one process runs by itself, on a machine of several.
#[test]
fn programs_of_one_process_run_on_a_machine() {
    let rack = Rack::of_machines();
    for scenario in ["binary", "library", "handles", "query", "sharing", "forks", "signals"] {
        for variant in ["", "++"] {
            let output = rack.on("alpha", &format!("tests/{scenario}{variant}")).output().unwrap();
            assert!(output.status.success(), "{scenario}{variant}: {}", text(&output));
        }
    }
}

/// A second process on the owner's host shares the segment: its stores are as far as the owner's.
#[test]
fn what_an_attached_process_has_flushed_is_on_other_machines() {
    let rack = Rack::of_machines();
    let open = |host| Session::open(&rack.location(host)).unwrap();
    let (owner, sharer, peer) = (open("alpha"), open("alpha"), open("beta"));
    let segment = owner.create_segment(&SegmentOptions::shared(0x5a4e, 4096)).unwrap();
    segment.share().unwrap();
    segment.set_available().unwrap();
    let attached = sharer.attach(0x5a4e, None).unwrap();
    let remote = peer.connect(4, 0x5a4e, 3_000).unwrap();
    let (here, there) = (attached.map(0, 4096).unwrap(), remote.map(0, 4096).unwrap());
    for round in 1..=100 {
        here.whole().store_u64(64, round, Ordering::Release).unwrap();
        attached.flush_to_all().unwrap();
        assert_eq!(there.whole().load_u64(64, Ordering::Acquire), Some(round));
    }
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
