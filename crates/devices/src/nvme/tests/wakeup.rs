//! Shadow doorbells: a wake-up is never lost, and a busy host is never made to ring.

use proptest::prelude::*;
use rackbus_memory::{DmaSpace, Lending};
use rackbus_pci::Work;

use super::super::shadow::{ShadowDoorbell, ShadowPages, ShadowValue, need_event};
use super::*;

const SLOT: usize = 128;

/// The pages, with both sides' view of one doorbell.
struct Pair {
    ram: SharedMemory,
    pages: ShadowPages,
    doorbell: ShadowDoorbell,
    size: u16,
    /// How far the device has consumed.
    consumed: u16,
    /// What the host stored last.
    stored: u16,
}

impl Pair {
    fn new(size: u16, at: u16) -> Pair {
        let ram = SharedMemory::create("shadow-test", 8192).unwrap();
        let mut dma = DmaSpace::new();
        dma.set_master(true);
        let memory = Some(ram.handle(0));
        let loan = Lending::alone().lend(0, 8192, Access::READ | Access::WRITE, memory);
        dma.map(loan.unwrap()).unwrap();
        let pages = ShadowPages::new(&dma, 0, 4096, 4096);
        let mut doorbell = ShadowDoorbell::new(size);
        doorbell.set(at);
        doorbell.attach(SLOT, &pages);
        Pair { ram, pages, doorbell, size, consumed: at, stored: at }
    }

    /// Host, first step: stores the next value; returns the old one.
    fn store(&mut self, by: u16) -> u16 {
        let old = self.stored;
        self.stored = (old + by) % self.size;
        let new = u32::from(self.stored);
        self.ram.whole().store_u32(SLOT, new, Ordering::SeqCst).unwrap();
        old
    }

    /// Host, second step: looks at the event index; true when it has to ring.
    fn must_ring(&self, old: u16) -> bool {
        let event = self.ram.whole().load_u32(4096 + SLOT, Ordering::SeqCst).unwrap();
        need_event(event as u16, self.stored, old)
    }

    /// Device: takes what is there; true when there was something.
    fn poll(&mut self) -> bool {
        let seen = self.doorbell.look(self.pages.values.as_ref());
        if let ShadowValue::Moved(value) = seen {
            self.doorbell.set(value);
            self.doorbell.keep_away(self.pages.events.as_ref());
            self.consumed = value;
        }
        assert_ne!(seen, ShadowValue::Invalid);
        seen != ShadowValue::Same
    }

    fn room(&self) -> u16 {
        (self.size - 1) - (self.stored + self.size - self.consumed) % self.size
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Device {
    Polling,
    Armed,
    Asleep,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Both sides take their steps in any order; whenever the host is done with a submission and
    /// the device sleeps, the device has seen it or is about to be woken.
    #[test]
    fn no_interleaving_loses_a_wake_up(
        size in prop_oneof![2u16..=9, Just(1024), Just(4096)],
        at in any::<u16>(),
        steps in prop::collection::vec((any::<bool>(), 1u16..4), 1..400),
    ) {
        let mut pair = Pair::new(size, at % size);
        let (mut device, mut storing, mut rung) = (Device::Polling, None, false);
        for (host, by) in steps {
            match (host, storing) {
                (true, None) if pair.room() > 0 => {
                    let by = by.min(pair.room());
                    storing = Some(pair.store(by));
                }
                (true, Some(old)) => {
                    rung |= pair.must_ring(old);
                    storing = None;
                }
                _ => match device {
                    Device::Polling => {
                        if !pair.poll() {
                            pair.doorbell.arm(pair.pages.events.as_ref());
                            device = Device::Armed;
                        }
                    }
                    Device::Armed => {
                        let news = pair.doorbell.has_news(pair.pages.values.as_ref());
                        device = if news { Device::Polling } else { Device::Asleep };
                    }
                    Device::Asleep if rung => {
                        rung = false;
                        device = Device::Polling;
                    }
                    Device::Asleep => {}
                },
            }
            if storing.is_none() && device == Device::Asleep && !rung {
                prop_assert_eq!(pair.consumed, pair.stored, "the device sleeps on");
            }
        }
    }

    /// A device that polls is rung at most once, for the first submission after it was armed,
    /// even if the host has the queue full, or nearly so in a large one.
    #[test]
    fn a_polled_queue_is_not_rung(
        size in prop_oneof![2u16..=64, 65u16..=4096],
        at in any::<u16>(),
        steps in prop::collection::vec((1u16..200, 0u8..3), 100..400),
    ) {
        let mut pair = Pair::new(size, at % size);
        let depth = if size <= 64 { size - 1 } else { size / 4 * 3 };
        let mut rings = 0;
        for (by, polls) in steps {
            let in_flight = (size - 1) - pair.room();
            let by = by.min(depth - in_flight.min(depth));
            if by > 0 {
                let old = pair.store(by);
                rings += u32::from(pair.must_ring(old));
            }
            if polls > 0 {
                pair.poll();
            }
        }
        prop_assert!(rings <= 1, "{rings} rings");
    }
}

#[test]
fn a_value_outside_of_the_ring_is_reported_once() {
    let mut pair = Pair::new(16, 3);
    for (raw, seen) in [
        (16, ShadowValue::Invalid),
        (16, ShadowValue::Same),
        (u32::MAX, ShadowValue::Invalid),
        (1 << 16 | 4, ShadowValue::Invalid),
        (4, ShadowValue::Moved(4)),
        (4, ShadowValue::Same),
    ] {
        pair.ram.whole().store_u32(SLOT, raw, Ordering::SeqCst).unwrap();
        assert_eq!(pair.doorbell.look(pair.pages.values.as_ref()), seen, "{raw:#x}");
    }
    assert_eq!(pair.doorbell.value(), 3, "what was seen is taken over by who asked");
}

/// A host with shadow doorbells; returns the pages' addresses.
fn shadowed(host: &mut TestHost) -> (u64, u64) {
    let (values, events) = (host.pages(1), host.pages(1));
    let mut config = admin(AdminOpcode::DoorbellBufferConfig);
    config.dptr = [values, events];
    assert_eq!(host.status(0, config), Status::SUCCESS);
    (values, events)
}

fn word(host: &TestHost, address: u64) -> u32 {
    host.ram.whole().load_u32((address - RAM) as usize, Ordering::SeqCst).unwrap()
}

fn slot(qid: u64) -> u64 {
    2 * qid * (4 << DOORBELL_STRIDE)
}

#[test]
fn commands_are_taken_from_the_shadow_page_alone() {
    let mut host = TestHost::with_memory(1 << 20);
    let (values, events) = shadowed(&mut host);
    assert_eq!(host.poll(), Work::Idle, "worth polling");
    for round in 1..=40u32 {
        let buffer = host.scratch();
        host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
        let tail = round % u32::from(ENTRIES);
        host.poke(values + slot(1), &tail.to_le_bytes());
        assert_eq!(host.poll(), Work::Done);
        let cqe = host.completion(1).expect("the command was not taken");
        assert_eq!(cqe.status(), Status::SUCCESS);
        // The completion's doorbell goes through the shadow page too.
        host.poke(values + slot(1) + (4 << DOORBELL_STRIDE), &tail.to_le_bytes());
        let event = word(&host, events + slot(1));
        assert!(!need_event(event as u16, (tail as u16 + 1) % ENTRIES, tail as u16), "{round}");
    }
    assert_eq!(host.poll(), Work::Idle);
    assert!(host.endpoint.park(), "nothing to do");
    let tail = 40 % u32::from(ENTRIES);
    assert_eq!(word(&host, events + slot(1)), tail, "armed at the tail");
    let buffer = host.scratch();
    host.enqueue(1, transfer(IoOpcode::Read, 0, 512, buffer));
    host.poke(values + slot(1), &(tail + 1).to_le_bytes());
    assert!(!host.endpoint.park(), "work came before the sleep");
}

#[test]
fn a_new_queue_wipes_what_an_old_one_left_in_the_shadow_page() {
    let mut host = TestHost::with_memory(1 << 20);
    let (values, _) = shadowed(&mut host);
    host.poke(values + slot(2), &77u32.to_le_bytes());
    host.poke(values + slot(2) + (4 << DOORBELL_STRIDE), &78u32.to_le_bytes());
    host.create_pair(2, ENTRIES);
    assert_eq!(word(&host, values + slot(2)), 0);
    assert_eq!(word(&host, values + slot(2) + (4 << DOORBELL_STRIDE)), 0);
    assert_eq!(host.poll(), Work::Idle);
}

#[test]
fn shadow_pages_must_be_two_pages() {
    let mut host = TestHost::with_memory(1 << 20);
    let page = host.pages(1);
    for (dptr, status) in [
        ([page, page], Status::INVALID_FIELD),
        ([page + 64, page], Status::INVALID_FIELD),
        ([page, 0x1000], Status::DATA_TRANSFER_ERROR),
    ] {
        let mut config = admin(AdminOpcode::DoorbellBufferConfig);
        config.dptr = dptr;
        assert_eq!(host.status(0, config), status);
    }
}
