//! Tests of rings between nodes: who asks for them, and what their end leaves.

use rackbus_memory::StreamError;
use rackbus_net::{Cause, NetworkPort, Offload, PortQueue, SendOutcome};

use super::super::rings::ring_of_this_machine;
use super::super::tests::{host_queues, network};
use super::*;

/// A connection whose other end takes nothing.
#[derive(Debug)]
struct Silent;

impl PacketStream for Silent {
    fn send(&self, _: &[u8], _: &[HandleRef<'_>]) -> Result<(), StreamError> {
        Err(StreamError::Closed)
    }
    fn receive(
        &self,
        _: &mut [u8],
        _: &mut AdaptiveSpin,
        _: Option<Instant>,
    ) -> Result<Packet, StreamError> {
        Err(StreamError::Closed)
    }
    fn wait_sendable(&self) {}
    fn shut_down(&self) {}
}

/// Alpha, the first queue of its interface, which has asked for a ring to beta, and a frame for that.
fn asking(requests: &[u64]) -> (NetworkService, PortQueue, Vec<u8>) {
    let network = network();
    let mut queue = host_queues(&network).remove(0);
    let named = |name: &str| network.0.stations.named(name).unwrap();
    let ((own, alpha), (to, beta)) = (named("alpha"), named("beta"));
    let frame = [&beta.mac.0[..], &alpha.mac.0, &[0x88, 0xb5], &[0; 100]].concat();
    let mut peer = Peer::default();
    let ends = (PortQueueId { station: own, number: 0 }, to);
    peer.pending.extend(requests.iter().map(|request| (*request, ends)));
    network.0.lock().peers.insert("beta".to_owned(), peer);
    assert_eq!(queue.send_checked(Offload::default(), &frame, &[]), SendOutcome::Full);
    (network, queue, frame)
}

fn opened(network: &NetworkService, request: u64) -> bool {
    let told = ReceiverMessage::Opened { request, ring: 7 };
    network.0.told("beta", told, |_, _| Ok(ring_of_this_machine()?.0))
}

#[test]
fn a_node_that_opens_one_ring_twice_is_disconnected() {
    let (network, _queue, _) = asking(&[1, 2]);
    assert!(opened(&network, 1));
    assert!(!opened(&network, 2));
}

#[test]
fn what_cannot_be_asked_is_not_waited_for() {
    let (network, mut queue, frame) = asking(&[1]);
    network.0.begin_with("beta", Voice::Packets(Arc::new(Silent)));
    assert!(network.0.lock().peers["beta"].pending.is_empty());
    let sent = queue.send_checked(Offload::default(), &frame, &[]);
    assert_eq!(sent, SendOutcome::Dropped(Cause::Down));
}

#[test]
fn what_a_host_of_this_machine_had_not_taken_when_it_was_gone_is_counted() {
    let closed = |network: &NetworkService| {
        network.0.told("beta", ReceiverMessage::Closed { ring: 7 }, |_, _| unreachable!());
    };
    let gone = |network: &NetworkService| {
        network.0.peer_lost(&mut network.0.lock(), "beta");
    };
    for end in [&closed as &dyn Fn(&NetworkService), &gone] {
        let (network, mut queue, frame) = asking(&[1]);
        assert!(opened(&network, 1));
        for _ in 0..3 {
            assert_eq!(queue.send_checked(Offload::default(), &frame, &[]), SendOutcome::Done);
        }
        network.0.begin_with("beta", Voice::Packets(Arc::new(Silent)));
        end(&network);
        queue.unpark();
        let to = network.0.stations.named("beta").unwrap().0;
        let mut drops = queue.handle().counters().peers[to].drops.all();
        assert_eq!(drops.find(|(cause, _)| *cause == Cause::Down).unwrap().1, 3);
    }
}

#[test]
fn the_end_of_a_ring_that_was_replaced_is_not_that_of_the_next_one() {
    let (network, mut queue, frame) = asking(&[1, 2]);
    let told = |tell| network.0.told("beta", tell, |_, _| Ok(ring_of_this_machine()?.0));
    assert!(told(ReceiverMessage::Opened { request: 1, ring: 7 }));
    assert!(told(ReceiverMessage::Opened { request: 2, ring: 8 }));
    assert!(told(ReceiverMessage::Closed { ring: 7 }));
    assert_eq!(queue.send_checked(Offload::default(), &frame, &[]), SendOutcome::Done);
    assert!(told(ReceiverMessage::Closed { ring: 8 }));
    assert_eq!(queue.send_checked(Offload::default(), &frame, &[]), SendOutcome::Full);
}
