//! Which queue the kernel sends frames by. The tests need the right to make an interface, as the node does.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::*;
use crate::configure::{InterfaceSettings, configure};
use crate::packet::{HEADER, PacketSocket};

const NAME: &str = "steered0";
const TCP: u8 = 6;
const UDP: u8 = 17;
const MORE_FRAGMENTS: u16 = 0x2000;

/// In a container there may be no TAP, or no right to programs in the kernel.
fn is_without_rights(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
}

/// The two queues of an interface in a network namespace of the calling thread's, and a socket that sends by it; `None`
/// without the rights.
fn interface() -> Option<(Vec<OwnedFd>, PacketSocket)> {
    // SAFETY: the thread is this test's, and nothing else of it changes.
    if unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.is_err() {
        return None;
    }
    let queues = match open(NAME, 2) {
        Ok(queues) => queues,
        Err(error) if is_without_rights(&error) => return None,
        Err(error) => panic!("{error}"),
    };
    match steer(&queues[0]) {
        Err(error) if is_without_rights(&error) => return None,
        steered => steered.unwrap(),
    }
    let mac = [2, 0, 0, 0, 0, 1];
    let settings = InterfaceSettings { mac, mtu: 1500, addresses: vec![], neighbours: vec![] };
    configure(NAME, &settings).unwrap();
    Some((queues, PacketSocket::open(NAME).unwrap()))
}

/// One direction of a flow: addresses end with these numbers.
#[derive(Clone, Copy)]
struct Flow {
    v6: bool,
    protocol: u8,
    from: (u8, u16),
    to: (u8, u16),
}

impl Flow {
    fn back(self) -> Flow {
        Flow { from: self.to, to: self.from, ..self }
    }

    /// A frame of it that ends with `mark`. `fragment` are the flags and offset of an IPv4 fragment.
    fn frame(self, fragment: u16, mark: u64) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        if self.v6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 28, self.protocol, 64]);
            for (last, _) in [self.from, self.to] {
                frame.extend(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into()).octets());
            }
        } else {
            frame.extend([8, 0, 0x45, 0, 0, 48, 0, 0]);
            frame.extend(fragment.to_be_bytes());
            frame.extend([64, self.protocol, 0, 0]);
            for (last, _) in [self.from, self.to] {
                frame.extend(Ipv4Addr::new(10, 0, 0, last).octets());
            }
        }
        if fragment & 0x1fff == 0 {
            frame.extend([self.from.1, self.to.1].map(u16::to_be_bytes).concat());
            frame.extend([0; 16]);
        } else {
            frame.extend([0x77; 20]);
        }
        frame.extend(mark.to_be_bytes());
        frame
    }
}

/// Sends a frame; the queue that it comes by.
fn sent_by(queues: &[OwnedFd], socket: &PacketSocket, frame: &[u8]) -> usize {
    let bytes = [&[0; HEADER][..], frame].concat();
    assert_eq!(rustix::io::write(socket, &bytes).unwrap(), bytes.len());
    let begun = Instant::now();
    let mut found = vec![0; 2000];
    while begun.elapsed() < Duration::from_secs(20) {
        for (nth, queue) in queues.iter().enumerate() {
            // What the kernel sends of itself is left out.
            while let Ok(length) = rustix::io::read(queue, &mut found[..]) {
                if found[HEADER..length] == *frame {
                    return nth;
                }
            }
        }
        let mut polled: Vec<_> =
            queues.iter().map(|queue| PollFd::new(queue, PollFlags::IN)).collect();
        let _ = poll(&mut polled, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
    }
    panic!("the frame came by no queue");
}

#[test]
fn a_flow_stays_in_its_queue_whichever_its_answers_come_by() {
    let Some((queues, socket)) = interface() else { return };
    let mut counts = [0; 2];
    for nth in 0..32 {
        let protocol = if nth % 4 < 2 { TCP } else { UDP };
        let (from, to) = ((1, 40_000 + u16::from(nth)), (2 + nth, 5201));
        let flow = Flow { v6: nth % 2 == 1, protocol, from, to };
        let queue = sent_by(&queues, &socket, &flow.frame(0, 1));
        counts[queue] += 1;
        // An answer comes by the other queue: those of a function and of an uplink have but one.
        let answer = [&[0; HEADER][..], &flow.back().frame(0, 2)].concat();
        rustix::io::write(&queues[1 - queue], &answer).unwrap();
        assert_eq!(sent_by(&queues, &socket, &flow.frame(0, 3)), queue, "flow {nth}");
    }
    assert!(counts.iter().all(|count| *count >= 4), "{counts:?}");
}

#[test]
fn streams_between_two_hosts_have_all_queues() {
    let Some((queues, socket)) = interface() else { return };
    for v6 in [false, true] {
        let mut counts = [0; 2];
        for port in 0..32 {
            let flow = Flow { v6, protocol: TCP, from: (1, 40_000 + port), to: (2, 5201) };
            counts[sent_by(&queues, &socket, &flow.frame(0, 1))] += 1;
        }
        assert!(counts.iter().all(|count| *count >= 8), "{counts:?}");
    }
}

#[test]
fn datagrams_in_fragments_stay_among_those_that_are_whole() {
    let Some((queues, socket)) = interface() else { return };
    for port in 0..16 {
        let flow = Flow { v6: false, protocol: UDP, from: (1, 40_000 + port), to: (2, 5201) };
        let by = [0, MORE_FRAGMENTS, 185].map(|it| sent_by(&queues, &socket, &flow.frame(it, 1)));
        assert!(by.iter().all(|queue| *queue == by[0]), "port {port}: {by:?}");
    }
}
