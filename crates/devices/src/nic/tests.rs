//! A function under drivers that break it, and without interrupts by message.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_memory::{Access, SharedMemory};
use rackbus_net::{LocalNetwork, MacAddress, NetworkPort, Offload, PortSource};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, Work};
use rackbus_spec::virtio::net::{config, feature};
use rackbus_spec::virtio::ring::{SplitDescriptor, flags};
use rackbus_spec::virtio::{capability as cap, common as reg, feature as common, isr, status};

use super::*;
use crate::virtio::layout;

const IOVA: u64 = 1 << 32;
/// Bytes from one queue's areas to the next one's, each area in a page.
const QUEUE: u64 = 0x3000;
const DATA: u64 = 0x10000;
const MEMORY: u64 = 0x20000;

mod pairs;

struct Guest {
    endpoint: Endpoint,
    memory: SharedMemory,
    peer: Box<dyn NetworkPort>,
    counters: Arc<NicCounters>,
    now: u64,
}

impl Guest {
    /// A driver with a receive and a transmit queue, and a port beside its function's.
    fn new(features: u64) -> Guest {
        Guest::with_pairs(1, features)
    }

    fn with_pairs(pairs: u16, features: u64) -> Guest {
        let network = LocalNetwork::new([]);
        let name = "alpha/nic0.vf1".to_owned();
        let port = Some(network.port(&name).unwrap());
        let mut peer = network.port("alpha/nic0.vf2").unwrap();
        peer.attend(true);
        let mac = MacAddress::derived(&name);
        let options = NicOptions { name, pairs, mac, rate: None, packed_rings: true };
        let counters = Arc::new(NicCounters::default());
        let mut endpoint = Endpoint::new(Box::new(Nic::new(&options, port, counters.clone())));
        let memory = SharedMemory::create("driver", MEMORY).unwrap();
        let access = Access::READ | Access::WRITE;
        endpoint.map(IOVA, MEMORY, access, Some(memory.handle(0))).unwrap();
        endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        let mut guest = Guest { endpoint, memory, peer, counters, now: 0 };
        guest.enable(features);
        guest
    }

    fn write(&mut self, at: u64, data: &[u8]) {
        self.endpoint.write(FunctionRegion::Bar(0), at, data).unwrap();
    }

    fn read1(&mut self, at: u64) -> u8 {
        let mut data = [0];
        self.endpoint.read(FunctionRegion::Bar(0), at, &mut data).unwrap();
        data[0]
    }

    fn enable(&mut self, features: u64) {
        self.write(reg::DEVICE_STATUS, &[0]);
        self.write(reg::DEVICE_STATUS, &[status::ACKNOWLEDGE | status::DRIVER]);
        for half in 0..2u32 {
            self.write(reg::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
            let word = ((features | common::VERSION_1) >> (32 * half)) as u32;
            self.write(reg::DRIVER_FEATURE, &word.to_le_bytes());
        }
        self.write(reg::DEVICE_STATUS, &[status::FEATURES_OK]);
        let queues: u16 = match features & (feature::CTRL_VQ | feature::MQ) {
            0 => 2,
            feature::CTRL_VQ => 3,
            _ => 5,
        };
        for queue in 0..queues {
            self.write(reg::QUEUE_SELECT, &queue.to_le_bytes());
            self.write(reg::QUEUE_SIZE, &8u16.to_le_bytes());
            let at = IOVA + QUEUE * u64::from(queue);
            for (area, register) in
                (0..).zip([reg::QUEUE_DESC, reg::QUEUE_DRIVER, reg::QUEUE_DEVICE])
            {
                self.write(register, &(at + 0x1000 * area).to_le_bytes());
            }
            self.write(reg::QUEUE_ENABLE, &1u16.to_le_bytes());
        }
        self.write(reg::DEVICE_STATUS, &[status::DRIVER_OK]);
    }

    /// Makes one buffer available to a queue, at its first descriptor.
    fn offer(&mut self, queue: u64, address: u64, length: u32, kind: u16, index: u16) {
        let at = (QUEUE * queue) as usize;
        let descriptor = SplitDescriptor { address, length, flags: kind, next: 0 };
        self.memory.whole().write_obj(at, &descriptor);
        self.memory.whole().store_u16(at + 0x1002, index, Ordering::Release);
    }

    fn send(&mut self, length: usize) {
        let frame = self.memory.whole().part(DATA as usize + 0x4000, length).unwrap();
        let addresses = [[0xff; 6], self.peer.mac().0].concat();
        frame.copy_from(&addresses);
        self.peer.send(Offload::default(), &[frame]);
    }

    fn poll(&mut self) -> Work {
        self.now += 1000;
        let now = self.now;
        self.endpoint.poll(now)
    }

    fn is_broken(&mut self) -> bool {
        self.read1(reg::DEVICE_STATUS) & status::DEVICE_NEEDS_RESET != 0
    }
}

#[test]
fn without_messages_the_pin_is_high_until_its_cause_is_read() {
    let mut guest = Guest::new(0);
    guest.offer(0, IOVA + DATA, 2048, flags::WRITE, 1);
    guest.send(100);
    assert_eq!(guest.poll(), Work::Done);
    let mut status = [0; 2];
    guest.endpoint.read(FunctionRegion::Config, 6, &mut status).unwrap();
    assert_eq!(status[0] & 8, 8, "the pin's level in the status register");
    assert_eq!(guest.read1(layout::ISR), isr::QUEUE);
    assert_eq!(guest.read1(layout::ISR), 0);
    guest.endpoint.read(FunctionRegion::Config, 6, &mut status).unwrap();
    assert_eq!(status[0] & 8, 0);
}

/// What drivers see: a driver that had accepted them before, and comes back after a reset, keeps them.
#[test]
fn packed_rings_are_offered_unless_the_rack_file_says_otherwise() {
    for packed_rings in [true, false] {
        let name = "alpha/nic0.vf1".to_owned();
        let mac = MacAddress::derived(&name);
        let options = NicOptions { name, pairs: 1, mac, rate: None, packed_rings };
        let nic = Nic::new(&options, None, Arc::default());
        let mut endpoint = Endpoint::new(Box::new(nic));
        endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        let high = 1u32.to_le_bytes();
        endpoint.write(FunctionRegion::Bar(0), reg::DEVICE_FEATURE_SELECT, &high).unwrap();
        let mut word = [0; 4];
        endpoint.read(FunctionRegion::Bar(0), reg::DEVICE_FEATURE, &mut word).unwrap();
        let offered = u64::from(u32::from_le_bytes(word)) << 32;
        assert_eq!(offered & common::RING_PACKED != 0, packed_rings);
        assert_ne!(offered & common::VERSION_1, 0);
    }
}

/// Datagrams that are to be cut into IP fragments: drivers that take none would lose them.
#[test]
fn udp_fragmentation_is_not_offered_and_accepted_of_who_had_it() {
    let mut guest = Guest::new(feature::CSUM | feature::HOST_TSO4);
    assert_ne!(guest.read1(reg::DEVICE_STATUS) & status::FEATURES_OK, 0);
    guest.write(reg::DEVICE_FEATURE_SELECT, &0u32.to_le_bytes());
    let mut word = [0; 4];
    guest.endpoint.read(FunctionRegion::Bar(0), reg::DEVICE_FEATURE, &mut word).unwrap();
    let offered = u64::from(u32::from_le_bytes(word));
    assert_eq!(offered & (feature::HOST_UFO | feature::HOST_TSO4), feature::HOST_TSO4);
    let mut guest = Guest::new(feature::CSUM | feature::HOST_UFO);
    assert_ne!(guest.read1(reg::DEVICE_STATUS) & status::FEATURES_OK, 0);
}

#[test]
fn a_driver_that_breaks_its_function_is_told_and_goes_on_after_a_reset() {
    let bad: [fn(&mut Guest); 4] = [
        |guest| guest.offer(1, IOVA + DATA, 100, flags::NEXT, 9),
        |guest| guest.offer(1, IOVA + DATA, 100, flags::NEXT, 1),
        |guest| {
            // Too short for a header.
            guest.offer(0, IOVA + DATA, 4, flags::WRITE, 1);
            guest.send(100);
        },
        |guest| {
            guest.offer(1, 0x1234, 100, 0, 1);
            // Memory that stays out of reach: at first it is waited for.
            assert!(matches!(guest.poll(), Work::Asleep(Some(_))));
            assert!(!guest.is_broken());
            guest.now += 200_000_000;
        },
    ];
    for (number, prepare) in bad.into_iter().enumerate() {
        let mut guest = Guest::new(0);
        prepare(&mut guest);
        guest.poll();
        assert!(guest.is_broken(), "case {number}");
        assert_eq!(guest.counters.faults.load(Ordering::Relaxed), 1);
        assert_eq!(guest.read1(layout::ISR), isr::CONFIG, "its driver is told");
        assert_eq!(guest.poll(), Work::Asleep(None), "nothing is done any more");
        guest.memory.whole().part(0, DATA as usize).unwrap().fill(0);
        guest.enable(0);
        guest.offer(0, IOVA + DATA, 2048, flags::WRITE, 1);
        guest.send(100);
        assert_eq!(guest.poll(), Work::Done, "case {number}: after a reset");
        assert!(!guest.is_broken());
    }
}

#[test]
fn a_frame_waits_for_buffers_and_one_that_never_fits_is_dropped() {
    let mut guest = Guest::new(0);
    guest.send(100);
    assert_eq!(guest.poll(), Work::Watch(100_000_000), "there are no buffers");
    assert!(guest.endpoint.park(), "which only a notification can change");
    guest.offer(0, IOVA + DATA, 50, flags::WRITE, 1);
    assert_eq!(guest.poll(), Work::Done);
    assert_eq!(guest.counters.too_large.load(Ordering::Relaxed), 1);
    guest.send(30);
    guest.poll();
    let used: u16 = guest.memory.whole().load_u16(0x2002, Ordering::Acquire).unwrap();
    assert_eq!(used, 1, "the buffer was not used up by what did not fit");
}

/// A receiver that is stopped may not hold its sender up for ever: who sleeps tries again by itself.
#[test]
fn a_sender_with_a_full_receiver_tries_again_later() {
    let mut guest = Guest::new(0);
    let to = guest.peer.mac();
    let addresses = [to.0, MacAddress::derived("alpha/nic0.vf1").0].concat();
    guest.memory.whole().part(DATA as usize + 12, 12).unwrap().copy_from(&addresses);
    for index in 1..200 {
        guest.offer(1, IOVA + DATA, 0x4000, 0, index);
        match guest.poll() {
            Work::Done => {}
            waits => {
                assert_eq!(waits, Work::Asleep(Some(guest.now + 1_000_000)));
                assert!(guest.endpoint.park(), "there is nothing else to do");
                return;
            }
        }
    }
    panic!("the receiver is never full");
}

/// Buffers that are too few for a frame: the driver notifies of the next one, whatever was there before.
#[test]
fn a_frame_that_needs_more_buffers_is_handed_over_when_they_come() {
    let mut guest = Guest::new(feature::MRG_RXBUF | common::EVENT_IDX);
    for at in 0..4 {
        let address = IOVA + DATA + 100 * at;
        let buffer = SplitDescriptor { address, length: 100, flags: flags::WRITE, next: 0 };
        guest.memory.whole().write_obj(16 * at as usize, &buffer);
        guest.memory.whole().store_u16(0x1004 + 2 * at as usize, at as u16, Ordering::Relaxed);
    }
    let offer = |guest: &Guest, index: u16| {
        guest.memory.whole().store_u16(0x1002, index, Ordering::Release);
    };
    guest.send(300);
    offer(&guest, 2);
    assert!(matches!(guest.poll(), Work::Watch(_)));
    assert!(guest.endpoint.park());
    let event = guest.memory.whole().load_u16(0x2004 + 8 * 8, Ordering::Relaxed);
    assert_eq!(event, Some(2), "the index that it wants to be notified of");
    offer(&guest, 3);
    assert!(matches!(guest.poll(), Work::Watch(_)), "still too few");
    // They come while it is about to sleep.
    offer(&guest, 4);
    assert!(!guest.endpoint.park());
    assert_eq!(guest.memory.whole().load_u16(0x2002, Ordering::Acquire), Some(4));
}

#[test]
fn registers_are_reached_through_configuration_space_too() {
    let mut guest = Guest::new(0);
    let mut bytes = [0; 256];
    guest.endpoint.read(FunctionRegion::Config, 0, &mut bytes).unwrap();
    let mut at = usize::from(bytes[0x34]);
    while (bytes[at], bytes[at + cap::TYPE]) != (9, cap::PCI_ACCESS) {
        at = usize::from(bytes[at + 1]);
        assert_ne!(at, 0, "there is no such capability");
    }
    let mut config = |offset: usize, data: &[u8]| {
        guest.endpoint.write(FunctionRegion::Config, (at + offset) as u64, data).unwrap();
    };
    config(cap::BAR, &[0]);
    config(cap::OFFSET, &(layout::DEVICE as u32 + config::STATUS as u32).to_le_bytes());
    config(cap::STRUCTURE_LENGTH, &2u32.to_le_bytes());
    let mut link = [0; 2];
    guest.endpoint.read(FunctionRegion::Config, (at + cap::ACCESS_DATA) as u64, &mut link).unwrap();
    assert_eq!(u16::from_le_bytes(link), config::LINK_UP);
    // Outside of the BAR nothing is reached.
    let mut config = |offset: usize, data: &[u8]| {
        guest.endpoint.write(FunctionRegion::Config, (at + offset) as u64, data).unwrap();
    };
    config(cap::OFFSET, &u32::MAX.to_le_bytes());
    config(cap::STRUCTURE_LENGTH, &1u32.to_le_bytes());
    config(cap::ACCESS_DATA, &[1]);
}

#[test]
fn a_queue_is_reset_by_itself() {
    let mut guest = Guest::new(common::RING_RESET | feature::STATUS);
    guest.write(reg::QUEUE_SELECT, &0u16.to_le_bytes());
    guest.write(reg::QUEUE_RESET, &1u16.to_le_bytes());
    assert_eq!(guest.read1(reg::QUEUE_ENABLE), 0);
    guest.send(100);
    guest.poll();
    assert_eq!(guest.counters.no_queue.load(Ordering::Relaxed), 1);
    assert!(!guest.is_broken());
}

/// A hypervisor may map memory anew as often as it likes, each time within its limit.
#[test]
fn commands_whose_memory_is_out_of_reach_again_are_waited_for_again() {
    let mut guest = Guest::new(feature::CTRL_VQ);
    let answer =
        SplitDescriptor { address: IOVA + DATA + 0x100, length: 1, flags: flags::WRITE, next: 0 };
    guest.memory.whole().write_obj(2 * QUEUE as usize + 16, &answer);
    let command = |guest: &mut Guest, address: u64, index: u16| {
        let at = 2 * QUEUE as usize;
        let said = SplitDescriptor { address, length: 3, flags: flags::NEXT, next: 1 };
        guest.memory.whole().write_obj(at, &said);
        guest.memory.whole().store_u16(at + 0x1002, index, Ordering::Release);
    };
    for index in 1..4 {
        command(&mut guest, 0x1234, index);
        assert!(matches!(guest.poll(), Work::Asleep(Some(_))), "time {index}");
        assert!(!guest.is_broken(), "time {index}");
        command(&mut guest, IOVA + DATA, index);
        assert_eq!(guest.poll(), Work::Done);
        guest.now += 1_000_000_000;
    }
    command(&mut guest, 0x1234, 4);
    guest.poll();
    guest.now += 200_000_000;
    guest.poll();
    assert!(guest.is_broken(), "it stays out of reach");
}
