//! Frames as the kernel gives them to a packet socket. The tests need the rights to one, as the node does.

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::*;
use crate::configure::{InterfaceSettings, configure};
use crate::tap;

/// Needs the rights to a packet socket, as the node does.
#[test]
fn what_the_kernel_has_no_room_for_is_told_once() {
    let mut socket = match PacketSocket::open("lo") {
        Ok(socket) => socket,
        Err(PacketError::NotPermitted(_)) => return,
        Err(other) => panic!("{other}"),
    };
    let room = get(&socket.socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 0 as libc::c_int);
    assert!(room.unwrap() >= RECEIVE_BUFFER, "whatever others may have");
    let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = sender.local_addr().unwrap();
    // More than fit into the socket's queue, and then into the slots of the ring, which hold parts of them.
    let sent = 2 * RECEIVE_BUFFER as usize / 60_000 + 1024 + 200;
    for _ in 0..sent {
        sender.send_to(&[0; 60_000], to).unwrap();
    }
    let missed = socket.missed();
    assert!(missed > 0);
    // Whoever else sends to this interface meanwhile finds no room either.
    assert!(socket.missed() < missed);
    // One that a buffer has no room for.
    assert!(socket.read(&mut [0; 1000]).is_err());
    assert!(socket.missed() > 0);
}

/// Frames come to an interface whose other side is the test's. Large ones do not fit into the ring, which goes round.
#[test]
fn frames_of_any_length_come_in_order_by_the_ring() {
    // SAFETY: the thread is this test's, and nothing else of it changes.
    if unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.is_err() {
        return;
    }
    let Ok(queues) = tap::open("ringed0", 1) else { return };
    let mac = [2, 0, 0, 0, 0, 1];
    let settings = InterfaceSettings { mac, mtu: 1500, addresses: vec![], neighbours: vec![] };
    configure("ringed0", &settings).unwrap();
    let mut socket = PacketSocket::open("ringed0").unwrap();
    assert!(socket.ring.is_some());
    // It was down once: the system tells that before the next frame that is in the queue.
    let set_up = |up: bool| {
        let change = if up { "up" } else { "down" };
        let done =
            std::process::Command::new("ip").args(["link", "set", "ringed0", change]).status();
        done.is_ok_and(|status| status.success())
    };
    assert!(!set_up(false) || set_up(true));
    let mut buffer = vec![0; 70_000];
    for number in 3..5000u32 {
        let length = [60, 1514, 1518, 9000, 65_000][number as usize % 5];
        let mut frame = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2][..], &[0x88, 0xb5]].concat();
        if length == 1518 {
            frame.splice(12..12, [0x81, 0, 0, 7]);
        }
        frame.extend(number.to_be_bytes());
        frame.resize(length, number as u8);
        let bytes = [&[0; HEADER][..], &frame].concat();
        assert_eq!(rustix::io::write(&queues[0], &bytes).unwrap(), bytes.len());
        let (header, found) = socket.read(&mut buffer).unwrap();
        assert!(buffer[..found] == *frame, "frame {number} of {length} bytes");
        assert_eq!(header[1], 0);
    }
    let left = socket.read(&mut buffer).unwrap_err();
    assert_eq!(left.kind(), io::ErrorKind::WouldBlock);
    assert_eq!(socket.missed(), 0);
}
