//! Each combination of what interfaces leave to others: checksums, and segmentation of TCP over IPv4, of TCP over IPv6 and of UDP,
//! each by itself. What is sent is what comes, and crosses in as many frames as that says. Making interfaces takes root: without it
//! the test says so and ends.

mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use rackbus_netdev::namespace;
use support::lab::Lab;
use support::programs::has;
use support::{PATIENCE, not_tested};

/// Bytes of a stream.
const STREAM: usize = 700_001;
/// Bytes of a datagram's payload where one message is cut into datagrams, and of such a message: ten whole ones, and a rest.
const DATAGRAM: usize = 1400;
const MESSAGE: usize = 10 * DATAGRAM + 500;

/// What an interface does itself, or leaves to others.
#[derive(Debug, Clone, Copy)]
struct Offloads {
    checksums: bool,
    tcp4: bool,
    tcp6: bool,
    udp: bool,
    receives_large: bool,
}

/// All that there are: without checksums nothing is left to others.
fn combinations() -> Vec<Offloads> {
    let of = |bits: u32| Offloads {
        checksums: true,
        tcp4: bits & 1 != 0,
        tcp6: bits & 2 != 0,
        udp: bits & 4 != 0,
        receives_large: bits & 8 != 0,
    };
    let none = |receives_large| Offloads { checksums: false, receives_large, ..of(0) };
    (0..16).map(of).chain([none(false), none(true)]).collect()
}

impl Offloads {
    fn set(self, lab: &Lab, host: &str) {
        let state = |on: bool| if on { "on" } else { "off" };
        let segments = state(self.tcp4 || self.tcp6 || self.udp);
        let mut all = vec![("tx", state(self.checksums)), ("gro", state(self.receives_large))];
        all.push(("gso", segments));
        if self.checksums {
            all.push(("tx-tcp-segmentation", state(self.tcp4)));
            all.push(("tx-tcp6-segmentation", state(self.tcp6)));
            all.push(("tx-udp-segmentation", state(self.udp)));
        }
        let words = all.into_iter().flat_map(|(name, state)| [name, state]);
        let program: Vec<&str> = ["ethtool", "-K", "rackbus0"].into_iter().chain(words).collect();
        lab.on(host, &program);
    }
}

/// Frames that alpha has sent to beta.
fn frames(lab: &Lab) -> u64 {
    lab.peer("alpha", "beta")["sent"].as_u64().unwrap_or(0)
}

/// A stream in each direction between two addresses; the frames that alpha sent for the first.
fn streams(lab: &Lab, (near, far): (IpAddr, IpAddr), data: &[u8], context: &str) -> u64 {
    let (alpha, beta) = (lab.namespace("alpha"), lab.namespace("beta"));
    let listen = move || TcpListener::bind(SocketAddr::new(far, 0));
    let listener = namespace::within(&beta, listen).unwrap();
    let target = listener.local_addr().unwrap();
    let connect = move || TcpStream::connect_timeout(&target, PATIENCE);
    let stream = namespace::within(&alpha, connect).unwrap();
    assert_eq!(stream.local_addr().unwrap().ip(), near);
    let (other, _) = listener.accept().unwrap();
    let pass = |mut from: &TcpStream, mut to: &TcpStream| {
        std::thread::scope(|scope| {
            scope.spawn(move || from.write_all(data).unwrap());
            let mut came = vec![0; data.len()];
            to.read_exact(&mut came).unwrap();
            assert!(came == data, "{context}");
        });
    };
    let before = frames(lab);
    pass(&stream, &other);
    let sent = frames(lab) - before;
    pass(&other, &stream);
    sent
}

/// Has a program on alpha send a message that is cut into datagrams (`UDP_SEGMENT`); the frames that alpha sent for it.
fn message(lab: &Lab, (_, far): (IpAddr, IpAddr), data: &[u8], context: &str) -> u64 {
    let beta = lab.namespace("beta");
    let bind = move || UdpSocket::bind(SocketAddr::new(far, 0));
    let receiver = namespace::within(&beta, bind).unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let port = receiver.local_addr().unwrap().port();
    let family = if far.is_ipv4() { "AF_INET" } else { "AF_INET6" };
    let program = format!(
        "import socket\ns = socket.socket(socket.{family}, socket.SOCK_DGRAM)\n\
         s.setsockopt(socket.IPPROTO_UDP, 103, {DATAGRAM})\n\
         s.sendto(bytes((it * 7 >> 3) & 255 for it in range({MESSAGE})), ('{far}', {port}))"
    );
    let before = frames(lab);
    lab.on("alpha", &["python3", "-c", &program]);
    let mut came = Vec::new();
    while came.len() < MESSAGE {
        let mut datagram = [0; 2 * DATAGRAM];
        let length = receiver.recv(&mut datagram).unwrap();
        assert_eq!(length, DATAGRAM.min(MESSAGE - came.len()), "{context}");
        came.extend_from_slice(&datagram[..length]);
    }
    assert!(came == data[..MESSAGE], "{context}");
    frames(lab) - before
}

#[test]
fn each_combination_of_offloads_carries_the_same_bytes() {
    let Some(lab) = Lab::up("offload", "") else { return };
    if !has("ethtool") || !has("python3") {
        return;
    }
    let features = lab.on("alpha", &["ethtool", "-k", "rackbus0"]);
    if features.contains("tx-udp-segmentation: off [fixed]") {
        not_tested("this kernel's TAP devices leave no segmentation of UDP to others");
        return;
    }
    let data: Vec<u8> = (0..STREAM).map(|it| ((it * 7) >> 3) as u8).collect();
    let address = |text: &str| -> IpAddr { text.parse().unwrap() };
    let [ipv4, ipv6] = [("10.77.0.1", "10.77.0.2"), ("fd72:6163:6b62::1", "fd72:6163:6b62::2")]
        .map(|(near, far)| (address(near), address(far)));
    // Frames that carried a stream in large segments, at least once.
    let mut fewest = [u64::MAX; 2];
    let all = combinations();
    for (nth, offloads) in all.iter().enumerate() {
        offloads.set(&lab, "alpha");
        // Each receiver has other ones than the sender.
        all[all.len() - 1 - nth].set(&lab, "beta");
        for (version, ends) in [ipv4, ipv6].into_iter().enumerate() {
            let context = format!("IPv{}: {offloads:?}", 4 + 2 * version);
            let sent = streams(&lab, ends, &data, &context);
            let whole = [offloads.tcp4, offloads.tcp6][version];
            if whole {
                fewest[version] = fewest[version].min(sent);
            } else {
                assert!(sent as usize >= STREAM / 1460, "{context}: {sent} frames");
            }
            whole_datagrams(&lab, ends, &data, &context);
            // A socket that computes checksums itself cuts nothing.
            if offloads.checksums {
                let sent = message(&lab, ends, &data, &context);
                let datagrams = MESSAGE.div_ceil(DATAGRAM) as u64;
                assert!(
                    if offloads.udp { sent < datagrams } else { sent >= datagrams },
                    "{context}: {sent}"
                );
            }
        }
    }
    assert!(fewest.iter().all(|frames| *frames < STREAM as u64 / 3000), "{fewest:?} frames");
}

/// Datagrams of all lengths, of which long ones go in fragments.
fn whole_datagrams(lab: &Lab, (near, far): (IpAddr, IpAddr), data: &[u8], context: &str) {
    let bind = |host: &str, address: IpAddr| {
        let at = SocketAddr::new(address, 0);
        namespace::within(&lab.namespace(host), move || UdpSocket::bind(at)).unwrap()
    };
    let (sender, receiver) = (bind("alpha", near), bind("beta", far));
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    for length in [0, 1, 1471, 1473, 9000, 65_000] {
        sender.send_to(&data[..length], receiver.local_addr().unwrap()).unwrap();
        let mut came = vec![0; 1 << 16];
        let count = receiver.recv(&mut came).unwrap();
        assert!(came[..count] == data[..length], "{context}: {length}");
    }
}
