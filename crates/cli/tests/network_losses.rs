//! Datagrams that are numbered, between hosts of which one stands still: none comes twice or before one that was sent
//! earlier, and each of them came or is counted. Making interfaces takes root: without it the test says so and ends.

mod support;

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use rackbus_netdev::namespace;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::process::Signal;
use support::lab::{Lab, eventually, ping};
use support::programs::has;

/// Datagrams of a burst, many times as many as fit into a ring and an interface's queue.
const BURST: u32 = 60_000;
/// Bytes of each: one frame.
const BYTES: usize = 1000;
/// More than the kernel keeps for one socket of datagrams of a burst, each with what the kernel needs for it.
const ROOM: usize = 256 << 20;

/// A socket on a host.
fn socket(lab: &Lab, host: &str, address: &str) -> UdpSocket {
    let address = SocketAddr::new(address.parse().unwrap(), 0);
    namespace::within(&lab.namespace(host), move || UdpSocket::bind(address)).unwrap()
}

/// The numbers of the datagrams that have come and that come until none did for a second.
fn came(receiver: &UdpSocket) -> Vec<u32> {
    receiver.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let (mut numbers, mut datagram) = (Vec::new(), [0; BYTES]);
    while let Ok(length) = receiver.recv(&mut datagram) {
        assert_eq!(length, BYTES);
        numbers.push(u32::from_le_bytes(datagram[..4].try_into().unwrap()));
    }
    numbers
}

#[test]
fn each_datagram_to_a_host_that_stands_still_comes_once_or_is_counted() {
    let Some(lab) = Lab::up("losses", "") else { return };
    if !has("ping") {
        return;
    }
    for host in ["alpha", "beta", "gamma"] {
        // What the kernel says of its own accord would be counted as well.
        let off = "echo 1 > /proc/sys/net/ipv6/conf/rackbus0/disable_ipv6";
        lab.on(host, &["sh", "-c", off]);
    }
    ping(&lab, "alpha", "10.77.0.2", &[]);
    let sender = socket(&lab, "alpha", "10.77.0.1");
    let receiver = socket(&lab, "beta", "10.77.0.2");
    set_socket_recv_buffer_size_force(receiver.as_fd(), ROOM).unwrap();
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    let all = || {
        let counts = [lab.drops("alpha"), lab.drops("beta")];
        counts.into_iter().flat_map(BTreeMap::into_values).sum::<u64>()
    };
    let before = all();
    let beta = lab.rack.process(Some("beta"));
    beta.signal(Signal::STOP);
    let mut datagram = [0; BYTES];
    for number in 0..BURST {
        datagram[..4].copy_from_slice(&number.to_le_bytes());
        sender.send(&datagram).unwrap();
    }
    beta.signal(Signal::CONT);
    let numbers = came(&receiver);
    assert!(!numbers.is_empty(), "{}", lab.rack.logs());
    assert!(numbers.is_sorted_by(|one, next| one < next), "one came twice, or too late");
    let lost = u64::from(BURST) - numbers.len() as u64;
    eventually(&format!("{lost} did not come, and others were counted"), &lab.rack, || {
        let counted = all() - before;
        assert!(counted <= lost, "{lost} did not come, and {counted} were counted");
        counted == lost
    });
    let counted = lab.drops("alpha");
    // Both ways to lose one were gone.
    assert!(counted["full"] > 0 && counted["unread"] > 0, "{counted:?}");
    let metrics = lab.rack.good(&["metrics", "alpha"]);
    let name = "network_dropped_frames_total{port=\"alpha\",peer=\"\",cause=\"unread\"}";
    assert!(metrics.contains(name), "{metrics}");
}
