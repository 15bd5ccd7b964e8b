//! Rings that a driver got wrong, and what it is told.

use rackbus_memory::{Access, DmaSpace, Lending, SharedMemory};
use rackbus_spec::virtio::feature;
use rackbus_spec::virtio::ring::{PackedDescriptor, SplitDescriptor, event, flags, split};

use super::ring::QueueAddresses;
use super::*;

const IOVA: u64 = 1 << 32;
const SIZE: u16 = 8;
/// Where the areas, a table, and a second table are.
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const TABLE: u64 = 0x3000;

struct Memory {
    memory: SharedMemory,
    dma: DmaSpace,
}

impl Memory {
    fn new() -> Memory {
        let memory = SharedMemory::create("driver", 0x8000).unwrap();
        let mut dma = DmaSpace::new();
        let access = Access::READ | Access::WRITE;
        let loan = Lending::alone().lend(IOVA, 0x8000, access, Some(memory.handle(0)));
        dma.map(loan.unwrap()).unwrap();
        dma.set_master(true);
        Memory { memory, dma }
    }

    fn ring(&self, features: u64) -> VirtioRing {
        let place = QueueAddresses {
            size: SIZE,
            descriptors: IOVA,
            driver: IOVA + DRIVER,
            device: IOVA + DEVICE,
        };
        VirtioRing::new(&self.dma, place, features).unwrap()
    }

    fn put<T: zerocopy::IntoBytes + zerocopy::Immutable>(&self, at: u64, value: &T) {
        self.memory.whole().write_obj(at as usize, value).unwrap();
    }

    fn get<T: zerocopy::FromBytes>(&self, at: u64) -> T {
        self.memory.whole().read_obj(at as usize).unwrap()
    }

    /// A split ring's descriptor.
    fn descriptor(&self, at: u64, kind: u16, next: u16) {
        let address = IOVA + TABLE;
        self.put(at, &SplitDescriptor { address, length: 32, flags: kind, next });
    }

    fn packed(&self, at: u64, kind: u16, id: u16) {
        let address = IOVA + TABLE;
        self.put(at, &PackedDescriptor { address, length: 32, id, flags: kind });
    }

    /// Makes the first entries of a split ring available, all with the same head.
    fn available(&self, head: u16, index: u16) {
        for slot in 0..u64::from(SIZE) {
            self.put(DRIVER + split::RING as u64 + 2 * slot, &head);
        }
        self.put(DRIVER + split::INDEX as u64, &index);
    }
}

const NEXT: u16 = flags::NEXT;
const WRITE: u16 = flags::WRITE;
const INDIRECT: u16 = flags::INDIRECT;

type Case = (&'static str, Result<usize, DriverFault>, fn(&Memory));

/// What a driver did, and how many buffers the request has.
const SPLIT: [Case; 12] = [
    ("a chain", Ok(2), |m| {
        m.descriptor(0, NEXT, 1);
        m.descriptor(16, WRITE, 0);
        m.available(0, 1);
    }),
    ("a table behind a descriptor", Ok(3), |m| {
        m.descriptor(0, NEXT, 5);
        m.descriptor(80, INDIRECT, 0);
        m.descriptor(TABLE, NEXT, 1);
        m.descriptor(TABLE + 16, 0, 0);
        m.available(0, 1);
    }),
    ("a head that there is not", Err(DriverFault::Outside), |m| m.available(SIZE, 1)),
    ("an index too far ahead", Err(DriverFault::Index), |m| m.available(0, SIZE + 1)),
    ("a next one that there is not", Err(DriverFault::Outside), |m| {
        m.descriptor(0, NEXT, SIZE);
        m.available(0, 1);
    }),
    ("a circle", Err(DriverFault::Chain), |m| {
        m.descriptor(0, NEXT, 1);
        m.descriptor(16, NEXT, 0);
        m.available(0, 1);
    }),
    ("a buffer to be read at the end", Err(DriverFault::Order), |m| {
        m.descriptor(0, NEXT | WRITE, 1);
        m.descriptor(16, 0, 0);
        m.available(0, 1);
    }),
    ("a table that goes on", Err(DriverFault::Nested), |m| {
        m.descriptor(0, NEXT | INDIRECT, 1);
        m.available(0, 1);
    }),
    ("a table in a table", Err(DriverFault::Nested), |m| {
        m.descriptor(0, INDIRECT, 0);
        m.descriptor(TABLE, INDIRECT, 0);
        m.available(0, 1);
    }),
    ("a circle in a table", Err(DriverFault::Chain), |m| {
        m.descriptor(0, INDIRECT, 0);
        m.descriptor(TABLE, NEXT, 0);
        m.available(0, 1);
    }),
    ("a table's next one outside of it", Err(DriverFault::Outside), |m| {
        m.descriptor(0, INDIRECT, 0);
        m.descriptor(TABLE, NEXT, 2);
        m.available(0, 1);
    }),
    ("a table of half a descriptor", Err(DriverFault::Table), |m| {
        let address = IOVA + TABLE;
        m.put(0, &SplitDescriptor { address, length: 24, flags: INDIRECT, next: 0 });
        m.available(0, 1);
    }),
];

const AVAIL: u16 = flags::AVAIL;

const PACKED: [Case; 7] = [
    ("a chain", Ok(2), |m| {
        m.packed(16, WRITE | AVAIL, 7);
        m.packed(0, NEXT | AVAIL, 0);
    }),
    ("a table", Ok(2), |m| {
        m.packed(0, INDIRECT | AVAIL, 7);
        m.packed(TABLE, 0, 0);
        m.packed(TABLE + 16, WRITE, 0);
    }),
    ("a chain without an end", Err(DriverFault::Chain), |m| {
        (0..u64::from(SIZE)).for_each(|at| m.packed(16 * at, NEXT | AVAIL, 0));
    }),
    ("a buffer to be read at the end", Err(DriverFault::Order), |m| {
        m.packed(0, NEXT | WRITE | AVAIL, 0);
        m.packed(16, AVAIL, 0);
    }),
    ("a table that goes on", Err(DriverFault::Nested), |m| {
        m.packed(0, NEXT | INDIRECT | AVAIL, 0);
    }),
    ("a table in a table", Err(DriverFault::Nested), |m| {
        m.packed(0, INDIRECT | AVAIL, 0);
        m.packed(TABLE, INDIRECT, 0);
    }),
    ("an empty table", Err(DriverFault::Table), |m| {
        m.put(0, &PackedDescriptor { address: IOVA, length: 0, id: 0, flags: INDIRECT | AVAIL });
    }),
];

#[test]
fn a_request_is_taken_whole_or_is_a_fault() {
    for (features, cases) in [(0, &SPLIT[..]), (feature::RING_PACKED, &PACKED[..])] {
        for (what, expected, prepare) in cases {
            let memory = Memory::new();
            let (mut ring, mut chain) = (memory.ring(features), BufferChain::default());
            assert_eq!(ring.take(&memory.dma, &mut chain), Ok(false), "{what}: before");
            prepare(&memory);
            let cursor = ring.cursor();
            let taken = ring.take(&memory.dma, &mut chain);
            match expected {
                Ok(buffers) => {
                    assert_eq!(taken, Ok(true), "{what}");
                    assert_eq!(chain.readable.len() + chain.writable.len(), *buffers, "{what}");
                    let again = ring.cursor();
                    ring.rewind(cursor);
                    assert_eq!(ring.take(&memory.dma, &mut chain), Ok(true), "{what}: again");
                    assert_eq!(ring.cursor(), again);
                }
                Err(fault) => {
                    assert_eq!(taken, Err(QueueError::Fault(*fault)), "{what}");
                    assert_eq!(ring.cursor(), cursor, "{what}: nothing is taken");
                }
            }
        }
    }
}

#[test]
fn memory_that_is_gone_is_out_of_reach_and_no_fault() {
    for features in [0, feature::RING_PACKED] {
        let mut memory = Memory::new();
        let (mut ring, mut chain) = (memory.ring(features), BufferChain::default());
        memory.dma.unmap_all();
        ring.resolve(&memory.dma);
        assert_eq!(ring.take(&memory.dma, &mut chain), Err(QueueError::Unreachable));
        assert!(!ring.has_work());
        // Nothing is written anywhere.
        ring.complete(&[UsedRequest { id: 0, slots: 1, written: 1 }]);
        ring.ask_notifications(true);
        assert!(ring.wants_interrupt());
    }
}

/// A queue at a place that it cannot have.
#[test]
fn a_queue_is_aligned_and_of_a_possible_size() {
    let memory = Memory::new();
    let good =
        QueueAddresses { size: 8, descriptors: IOVA, driver: IOVA + DRIVER, device: IOVA + DEVICE };
    for (features, place) in [
        (0, QueueAddresses { size: 6, ..good }),
        (0, QueueAddresses { size: 0, ..good }),
        (feature::RING_PACKED, QueueAddresses { size: 0, ..good }),
        (0, QueueAddresses { descriptors: IOVA + 8, ..good }),
        (0, QueueAddresses { device: IOVA + 2, ..good }),
        (0, QueueAddresses { driver: u64::MAX - 1, ..good }),
    ] {
        assert_eq!(
            VirtioRing::new(&memory.dma, place, features).err(),
            Some(DriverFault::Queue),
            "{place:?}"
        );
    }
    VirtioRing::new(&memory.dma, QueueAddresses { size: 6, ..good }, feature::RING_PACKED).unwrap();
}

#[test]
fn an_interrupt_is_wanted_for_the_entry_that_the_driver_named() {
    let used = |id| UsedRequest { id, slots: 1, written: 0 };
    // A split queue: by its flag, or the index behind its entries.
    let memory = Memory::new();
    let mut ring = memory.ring(0);
    assert!(!ring.wants_interrupt());
    ring.complete(&[used(0)]);
    assert!(ring.wants_interrupt() && !ring.wants_interrupt());
    memory.put(DRIVER, &split::NO_INTERRUPT);
    ring.complete(&[used(0)]);
    assert!(!ring.wants_interrupt());
    let mut ring = memory.ring(feature::EVENT_IDX);
    memory.put(DRIVER + split::RING as u64 + 2 * u64::from(SIZE), &1u16);
    for (count, wanted) in [(1, false), (1, true), (1, false)] {
        ring.complete(&vec![used(0); count]);
        assert_eq!(ring.wants_interrupt(), wanted);
    }
    assert_eq!(memory.get::<u16>(DEVICE + split::INDEX as u64), 3);
    // A packed one: by its place, also around the end.
    let mut ring = memory.ring(feature::RING_PACKED);
    memory.put(DRIVER + event::FLAGS as u64, &event::DISABLE);
    ring.complete(&[used(1)]);
    assert!(!ring.wants_interrupt());
    memory.put(DRIVER + event::FLAGS as u64, &event::DESCRIPTOR);
    memory.put(DRIVER, &2u16.wrapping_add(event::WRAP));
    for wanted in [false, true, false] {
        ring.complete(&[used(1)]);
        assert_eq!(ring.wants_interrupt(), wanted);
    }
    memory.put(DRIVER, &1u16);
    for (count, wanted) in [(3, false), (2, false), (1, true), (1, false)] {
        ring.complete(&vec![used(1); count]);
        assert_eq!(ring.wants_interrupt(), wanted, "{count}");
    }
}

#[test]
fn notifications_are_asked_for_by_what_comes_next() {
    let memory = Memory::new();
    memory.descriptor(0, 0, 0);
    memory.available(0, 3);
    let mut chain = BufferChain::default();
    let mut ring = memory.ring(0);
    ring.ask_notifications(false);
    assert_eq!(memory.get::<u16>(DEVICE), split::NO_NOTIFY);
    ring.ask_notifications(true);
    assert_eq!(memory.get::<u16>(DEVICE), 0);
    let mut ring = memory.ring(feature::EVENT_IDX);
    for _ in 0..2 {
        ring.take(&memory.dma, &mut chain).unwrap();
    }
    ring.ask_notifications(true);
    assert_eq!(memory.get::<u16>(DEVICE + split::RING as u64 + 8 * u64::from(SIZE)), 3);
    // The driver may have looked before it was asked: what it has made available meanwhile is told here.
    let VirtioRing::Split(split) = &ring else { panic!("a split ring") };
    assert!(!split.ask_behind(3));
    memory.put(DRIVER + split::INDEX as u64, &4u16);
    assert!(split.ask_behind(3) && !split.ask_behind(4));
    let mut ring = memory.ring(feature::RING_PACKED);
    ring.ask_notifications(false);
    assert_eq!(memory.get::<u16>(DEVICE + event::FLAGS as u64), event::DISABLE);
}
