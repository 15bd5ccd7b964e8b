//! A function with two pairs of queues, of which a driver uses one or both; and drivers that know few commands.

use super::*;
use crate::nic::steering;

const FEATURES: u64 = feature::CTRL_VQ | feature::MQ;
/// How long a frame waits for buffers where there are several pairs.
const PATIENCE: u64 = 20_000_000;

impl Guest {
    /// The command that sets how many pairs are used, as the `nth` command.
    fn use_pairs(&mut self, count: u16, nth: u16) {
        let queue = 4 * QUEUE as usize;
        let memory = self.memory.whole();
        let said = IOVA + DATA + 0x1000;
        let [low, high] = count.to_le_bytes();
        memory.part(DATA as usize + 0x1000, 4).unwrap().copy_from(&[4, 0, low, high]);
        let command = SplitDescriptor { address: said, length: 4, flags: flags::NEXT, next: 1 };
        memory.write_obj(queue, &command);
        let answer = SplitDescriptor { address: said + 8, length: 1, flags: flags::WRITE, next: 0 };
        memory.write_obj(queue + 16, &answer);
        memory.store_u16(queue + 0x1002, nth, Ordering::Release);
    }

    /// Requests of a queue that were completed.
    fn used(&self, queue: u64) -> u16 {
        let at = (QUEUE * queue) as usize + 0x2002;
        self.memory.whole().load_u16(at, Ordering::Acquire).unwrap()
    }

    /// A datagram to the driver that comes to a pair, with so many bytes of payload.
    fn send_to_pair(&mut self, pair: u16, payload: usize) {
        let datagram = |host: u8| {
            let mut frame = vec![0; 42 + payload];
            frame[..6].fill(0xff);
            frame[6..12].copy_from_slice(&self.peer.mac().0);
            frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
            (frame[23], frame[29]) = (17, host);
            frame
        };
        let comes_there = |frame: &Vec<u8>| steering::pair(steering::flow(&frame[..42]), 2) == pair;
        let frame = (0..=255).map(datagram).find(comes_there).unwrap();
        let place = self.memory.whole().part(DATA as usize + 0x4000, frame.len()).unwrap();
        place.copy_from(&frame);
        self.peer.send(Offload::default(), &[place]);
    }
}

#[test]
fn what_was_given_to_a_pair_before_it_was_given_up_is_sent() {
    let mut guest = Guest::with_pairs(2, FEATURES);
    guest.use_pairs(2, 1);
    guest.poll();
    // The driver gives a pair up, and sends what its queue has.
    guest.use_pairs(1, 2);
    guest.offer(3, IOVA + DATA, 100, 0, 1);
    assert_eq!(guest.poll(), Work::Done);
    guest.poll();
    assert_eq!(guest.used(3), 1);
    guest.offer(3, IOVA + DATA, 100, 0, 2);
    assert!(!guest.endpoint.park(), "what it has keeps the function from sleeping");
}

#[test]
fn a_pair_without_buffers_does_not_hold_up_another_one() {
    let mut guest = Guest::with_pairs(2, FEATURES);
    guest.use_pairs(2, 1);
    guest.poll();
    guest.offer(0, IOVA + DATA, 2048, flags::WRITE, 1);
    guest.send_to_pair(1, 60);
    guest.send_to_pair(0, 60);
    assert_eq!(guest.poll(), Work::Watch(PATIENCE));
    guest.now += PATIENCE - 2000;
    assert_eq!(guest.poll(), Work::Watch(1000));
    assert_eq!(guest.used(0), 0);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!(guest.used(0), 1);
    let lost = |guest: &Guest| guest.counters.no_buffers.load(Ordering::Relaxed);
    assert_eq!(lost(&guest), 1);
    // The next one does not wait, until there are buffers again.
    guest.send_to_pair(1, 60);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!(lost(&guest), 2);
    guest.offer(2, IOVA + DATA, 2048, flags::WRITE, 1);
    guest.send_to_pair(1, 60);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!((guest.used(2), lost(&guest)), (1, 2));
    guest.send_to_pair(1, 60);
    assert_eq!(guest.poll(), Work::Watch(PATIENCE), "it is waited for again");
}

#[test]
fn a_frame_for_which_a_driver_never_has_enough_buffers_is_dropped() {
    let mut guest = Guest::new(feature::MRG_RXBUF);
    guest.offer(0, IOVA + DATA, 100, flags::WRITE, 1);
    guest.send(300);
    assert!(matches!(guest.poll(), Work::Watch(_)));
    guest.now += 100_000_000;
    guest.send(30);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!(guest.counters.no_buffers.load(Ordering::Relaxed), 1);
    assert_eq!(guest.used(0), 1, "the next one has enough");
}

#[test]
fn a_frame_that_is_being_cut_goes_on_to_a_pair_that_is_used() {
    let mut guest = Guest::with_pairs(2, FEATURES);
    guest.use_pairs(2, 1);
    guest.poll();
    guest.send_segments_to_pair(1);
    assert!(matches!(guest.poll(), Work::Done | Work::Watch(_)));
    assert!(matches!(guest.poll(), Work::Watch(_)));
    guest.use_pairs(1, 2);
    guest.offer(0, IOVA + DATA, 2048, flags::WRITE, 1);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!(guest.used(0), 1);
}

impl Guest {
    /// A segment of TCP to a pair, which a driver without offloads takes in pieces.
    fn send_segments_to_pair(&mut self, pair: u16) {
        let segment = |host: u8| {
            let mut frame = vec![0; 54 + 3000];
            frame[..6].fill(0xff);
            frame[6..12].copy_from_slice(&self.peer.mac().0);
            frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
            frame[16..18].copy_from_slice(&3040u16.to_be_bytes());
            (frame[23], frame[29], frame[46]) = (6, host, 0x50);
            frame
        };
        let comes_there = |frame: &Vec<u8>| steering::pair(steering::flow(&frame[..54]), 2) == pair;
        let frame = (0..=255).map(segment).find(comes_there).unwrap();
        let place = self.memory.whole().part(DATA as usize + 0x4000, frame.len()).unwrap();
        place.copy_from(&frame);
        let offload = Offload {
            flags: rackbus_net::offload::NEEDS_CSUM,
            gso_type: rackbus_net::offload::GSO_TCPV4,
            hdr_len: 54.into(),
            gso_size: 1000.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
        };
        self.peer.send(offload, &[place]);
    }
}

#[test]
fn memory_that_comes_back_is_waited_for_anew_also_where_nothing_is_handed_over() {
    let mut guest = Guest::new(0);
    for time in 0..3 {
        guest.endpoint.unmap(IOVA, MEMORY).unwrap();
        guest.send(100);
        assert!(matches!(guest.poll(), Work::Asleep(Some(_))), "time {time}");
        assert!(!guest.is_broken(), "time {time}");
        let access = Access::READ | Access::WRITE;
        guest.endpoint.map(IOVA, MEMORY, access, Some(guest.memory.handle(0))).unwrap();
        guest.poll();
        guest.now += 1_000_000_000;
    }
    assert!(!guest.is_broken());
}

#[test]
fn a_driver_without_receive_modes_gets_frames_for_groups() {
    for (features, wanted) in [(0, 1), (feature::CTRL_VQ | feature::CTRL_RX, 0)] {
        let mut guest = Guest::new(features);
        guest.offer(0, IOVA + DATA, 2048, flags::WRITE, 1);
        let frame = guest.memory.whole().part(DATA as usize + 0x4000, 100).unwrap();
        let addresses = [[0x33, 0x33, 0, 0, 0, 1], guest.peer.mac().0].concat();
        frame.copy_from(&addresses);
        guest.peer.send(Offload::default(), &[frame]);
        guest.poll();
        assert_eq!(guest.used(0), wanted, "features {features:#x}");
    }
}
