//! A driver that does anything it can to a network function: registers, queues of both kinds in memory that it scribbles
//! over, tables, commands, notifications, resets, memory that goes and comes. At the other end of its network is a
//! port that sends and receives.
//!
//! What the function may not reach stays as it was, and so does what it may not reach for a while. Whatever was done,
//! the next driver finds a function that works. In between, another process may continue with it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_devices::nic::{Nic, NicCounters, NicOptions};
use rackbus_devices::virtio::layout;
use rackbus_memory::{Access, SharedMemory};
use rackbus_net::{LocalNetwork, MacAddress, NetworkPort, Offload, PortSource};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, Function, FunctionState, Work};
use rackbus_spec::virtio::net::{HEADER_SIZE, feature};
use rackbus_spec::virtio::ring::{PackedDescriptor, SplitDescriptor, flags, split};
use rackbus_spec::virtio::{common as reg, feature as common, status};

use crate::clock::ManualClock;
use crate::input::Input;

const PAGE: u64 = 4096;
/// Where the driver's memory is for the function.
const RAM: u64 = 0x1_0000_0000;
const PAGES: u64 = 64;
/// Pages that the function may read and write, in two maps side by side; the others are not mapped, but those that it
/// may only read.
const OPEN: [std::ops::Range<u64>; 2] = [4..32, 32..56];
const READ_ONLY: std::ops::Range<u64> = 56..60;
/// Pages by their use: three for each queue, tables, data.
const QUEUES: u64 = 4;
const TABLES: u64 = 14;
const DATA: u64 = 22;
/// Queues that are made: of one pair, and for control.
const MADE: u16 = 3;
/// Deeds of one input.
const MOST: usize = 128;

pub(crate) struct NicDriver {
    endpoint: Option<Endpoint>,
    network: LocalNetwork,
    peer: Box<dyn NetworkPort>,
    /// Memory that the peer sends from.
    outside: SharedMemory,
    ram: SharedMemory,
    time: ManualClock,
    unmapped: Option<Vec<u8>>,
}

fn at(page: u64) -> u64 {
    RAM + page * PAGE
}

pub(crate) fn model(network: &LocalNetwork) -> Box<dyn Function> {
    let name = "alpha/nic0.vf1".to_owned();
    let port = network.port(&name).expect("nobody has it");
    let options = NicOptions {
        mac: MacAddress::derived(&name),
        name,
        pairs: 2,
        rate: None,
        packed_rings: true,
    };
    Box::new(Nic::new(&options, Some(port), Arc::new(NicCounters::default())))
}

impl NicDriver {
    fn new() -> NicDriver {
        NicDriver::with(|network| model(network))
    }

    /// The driver of the function that this model is of.
    pub(crate) fn of(model: Box<dyn Function>) -> NicDriver {
        NicDriver::with(|_| model)
    }

    fn with(model: impl FnOnce(&LocalNetwork) -> Box<dyn Function>) -> NicDriver {
        let network = LocalNetwork::new([]);
        let mut peer = network.port("alpha/nic0.vf2").expect("nobody has it");
        peer.attend(true);
        let time = ManualClock::default();
        let memory = |pages| SharedMemory::create("driver", pages * PAGE).expect("there is memory");
        let ram = memory(PAGES);
        for page in [0, 60, 61, 62, 63, READ_ONLY.start, READ_ONLY.end - 1] {
            ram.whole().part((page * PAGE) as usize, 4096).expect("it is inside").fill(0xc5);
        }
        let endpoint = Some(Endpoint::with_clock(model(&network), Box::new(time.clone())));
        let mut driver =
            NicDriver { endpoint, network, peer, outside: memory(1), ram, time, unmapped: None };
        driver.map_all();
        driver
    }

    pub(crate) fn endpoint(&mut self) -> &mut Endpoint {
        self.endpoint.as_mut().expect("it is there between two deeds")
    }

    fn map(&mut self, pages: &std::ops::Range<u64>, access: Access) {
        let (length, offset) = ((pages.end - pages.start) * PAGE, pages.start * PAGE);
        let memory = Some(self.ram.handle(offset));
        self.endpoint().map(at(pages.start), length, access, memory).expect("nothing is there");
    }

    fn map_all(&mut self) {
        let both = Access::READ | Access::WRITE;
        self.map(&OPEN[0], both);
        self.map(&OPEN[1], both);
        self.map(&READ_ONLY, Access::READ);
        self.endpoint()
            .write(FunctionRegion::Config, 4, &6u16.to_le_bytes())
            .expect("it is inside");
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.endpoint().write(FunctionRegion::Bar(0), offset, data).expect("it is inside");
    }

    /// The driver writes to memory that the function may write to as well: what it may not stays known.
    fn poke<T: zerocopy::IntoBytes + zerocopy::Immutable>(&self, address: u64, value: &T) {
        let end = if self.unmapped.is_some() { OPEN[0].end } else { OPEN[1].end };
        let last = address.saturating_add(size_of::<T>() as u64);
        if address >= at(OPEN[0].start) && last <= at(end) {
            self.ram.whole().write_obj((address - RAM) as usize, value);
        }
    }

    fn peek(&self, pages: std::ops::Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; ((pages.end - pages.start) * PAGE) as usize];
        let part = self.ram.whole().part((pages.start * PAGE) as usize, bytes.len());
        part.expect("it is inside").copy_to(&mut bytes);
        bytes
    }

    /// Lets the function work until it has nothing to do, or long enough.
    pub(crate) fn poll(&mut self) {
        for _ in 0..16 {
            let now = self.time.0.fetch_add(1000, Ordering::Relaxed) + 1000;
            if self.endpoint().poll(now) != Work::Done {
                break;
            }
        }
        while self.peer.next().is_some() {
            self.peer.consume();
        }
    }

    /// The peer sends a frame of this length to the function.
    fn send(&mut self, length: usize, offload: Offload) {
        let to = MacAddress::derived("alpha/nic0.vf1").0;
        let frame = self.outside.whole();
        frame.write_obj(0, &to);
        frame.write_obj(6, &self.peer.mac().0);
        frame.write_obj(12, &[8u8, 0, 0x45, 0]);
        if let Some(frame) = frame.part(0, length.clamp(14, 4096)) {
            self.peer.send(offload, &[frame]);
        }
        self.peer.flush();
    }

    /// Brings the function up with these features and queues of `size` entries.
    pub(crate) fn enable(&mut self, features: u64, size: u16) {
        let write =
            |driver: &mut NicDriver, at: u64, data: &[u8]| driver.write(layout::COMMON + at, data);
        write(self, reg::DEVICE_STATUS, &[0]);
        write(self, reg::DEVICE_STATUS, &[status::ACKNOWLEDGE | status::DRIVER]);
        for half in 0..2u32 {
            write(self, reg::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
            write(self, reg::DRIVER_FEATURE, &((features >> (32 * half)) as u32).to_le_bytes());
        }
        write(self, reg::DEVICE_STATUS, &[status::FEATURES_OK]);
        for queue in 0..MADE {
            // With several pairs, the control queue is behind all of them.
            let number = if queue == 2 && features & feature::MQ != 0 { 4 } else { queue };
            write(self, reg::QUEUE_SELECT, &number.to_le_bytes());
            write(self, reg::QUEUE_SIZE, &size.to_le_bytes());
            let page = QUEUES + 3 * u64::from(queue);
            for (area, register) in
                [reg::QUEUE_DESC, reg::QUEUE_DRIVER, reg::QUEUE_DEVICE].into_iter().enumerate()
            {
                write(self, register, &at(page + area as u64).to_le_bytes());
            }
            write(self, reg::QUEUE_ENABLE, &1u16.to_le_bytes());
        }
        write(self, reg::DEVICE_STATUS, &[status::DRIVER_OK]);
    }

    /// Another process continues with the function as `state` says.
    fn go_on(&mut self, state: Option<&FunctionState>) -> bool {
        let saved = self.endpoint().save().expect("it has not ended");
        let text = saved.state.to_bytes().expect("it can be written");
        let own = FunctionState::from_bytes(&text).expect("it was written here");
        self.endpoint = None;
        let mut next = Endpoint::with_clock(model(&self.network), Box::new(self.time.clone()));
        let restored = next.restore(state.unwrap_or(&own), saved.descriptors).is_ok();
        self.endpoint = Some(next);
        restored
    }

    fn unmap(&mut self) {
        if self.unmapped.is_none() {
            let length = (OPEN[1].end - OPEN[1].start) * PAGE;
            self.endpoint().unmap(at(OPEN[1].start), length).expect("it is mapped");
            self.unmapped = Some(self.peek(OPEN[1].clone()));
        }
    }

    fn remap(&mut self) {
        if let Some(before) = self.unmapped.take() {
            self.map(&OPEN[1], Access::READ | Access::WRITE);
            assert!(self.peek(OPEN[1].clone()) == before, "unmapped memory was written");
        }
    }

    /// What must hold whatever the driver did.
    pub(crate) fn check(&self) {
        for page in [0..1, 60..PAGES, READ_ONLY.start..READ_ONLY.start + 1] {
            let bytes = self.peek(page.clone());
            assert!(bytes.iter().all(|byte| *byte == 0xc5), "{page:?} was written");
        }
    }

    /// The next driver: finds nothing of this one, and a function that works.
    fn serve_next(&mut self) {
        self.endpoint().scrub();
        assert_eq!(self.endpoint().unmap_all(), 0, "a scrubbed function has mappings");
        self.map_all();
        let queues = (QUEUES * PAGE) as usize;
        self.ram.whole().part(queues, (9 * PAGE) as usize).expect("inside").fill(0);
        self.enable(common::VERSION_1 | feature::MRG_RXBUF, 8);
        let buffer = |address, flags| SplitDescriptor { address, length: 2048, flags, next: 0 };
        self.poke(at(QUEUES), &buffer(at(DATA), flags::WRITE));
        self.poke(at(QUEUES + 1), &[0u16, 1, 0]);
        self.send(1000, Offload::default());
        self.poll();
        let used: Option<[u32; 3]> = self.ram.whole().read_obj(((QUEUES + 2) * PAGE) as usize);
        let written = 1000 + HEADER_SIZE as u32;
        assert_eq!(used.map(|used| used[0] >> 16), Some(1), "the next driver's frame");
        assert_eq!(used.map(|used| used[2]), Some(written), "its length");
        self.poke(at(DATA), &[0u8; HEADER_SIZE]);
        self.poke(at(DATA) + HEADER_SIZE as u64, &[0xffu8; 6]);
        let own = MacAddress::derived("alpha/nic0.vf1").0;
        self.poke(at(DATA) + HEADER_SIZE as u64 + 6, &own);
        self.poke(at(QUEUES + 3), &buffer(at(DATA), 0));
        self.poke(at(QUEUES + 4), &[0u16, 1, 0]);
        self.endpoint().poll(0);
        let came = self.peer.next().map(|frame| frame.bytes.len());
        assert_eq!(came, Some(2048 - HEADER_SIZE), "the frame that the next driver sent");
        self.peer.consume();
    }
}

/// An address: mostly in the driver's memory, on and off borders.
fn address(input: &mut Input<'_>) -> u64 {
    match u64::from(input.u8()) {
        page @ 0..=63 => at(page),
        page @ 64..=127 => at(page - 64) + u64::from(input.u16() & 0xfff),
        page @ 128..=191 => at(TABLES + page % 8),
        page @ 192..=239 => at(DATA + page % 24),
        _ => input.u64(),
    }
}

fn length(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        count @ 0..=127 => 16 * u32::from(count),
        128..=223 => u32::from(input.u16()),
        224..=239 => 2048,
        _ => input.u32(),
    }
}

fn descriptor(driver: &NicDriver, input: &mut Input<'_>) {
    let kind = input.u8();
    // In a queue's own table, or one of the others.
    let table = match kind & 3 {
        queue @ 0..3 => at(QUEUES + 3 * u64::from(queue)),
        _ => at(TABLES + u64::from(kind >> 5)),
    };
    let place = table + 16 * u64::from(input.u8() & 15);
    let (address, length, flags, next) = (address(input), length(input), input.u8(), input.u8());
    let wrap = u16::from(flags >> 3 & 1) << 7 | u16::from(flags >> 4 & 1) << 15;
    let low = u16::from(flags & 7);
    match kind & 16 != 0 {
        false => {
            driver.poke(place, &SplitDescriptor { address, length, flags: low, next: next.into() })
        }
        true => driver
            .poke(place, &PackedDescriptor { address, length, id: next.into(), flags: low | wrap }),
    }
}

fn deed(driver: &mut NicDriver, input: &mut Input<'_>) {
    match input.u8() % (DEEDS + 1) {
        DEEDS => {
            driver.remap();
            assert!(driver.go_on(None), "what was saved cannot be restored");
        }
        number => act(driver, number, input),
    }
}

/// Deeds that [`act`] knows.
pub(crate) const DEEDS: u8 = 13;

/// What a driver does to a function that stays in its process.
pub(crate) fn act(driver: &mut NicDriver, number: u8, input: &mut Input<'_>) {
    match number {
        0 | 1 => descriptor(driver, input),
        2 | 3 => {
            // Of the available ring: an entry, or the index.
            let queue = u64::from(input.u8() % 3);
            let ring = at(QUEUES + 3 * queue + 1);
            let place = match input.u8() {
                entry @ 0..=127 => split::RING as u64 + 2 * u64::from(entry & 31),
                _ => split::INDEX as u64,
            };
            driver.poke(ring + place, &u16::from(input.u8()));
        }
        4 => driver.poll(),
        5 => {
            let offload = Offload {
                flags: input.u8() & 1,
                gso_type: [0, 0, 1, 3, 4, 5][usize::from(input.u8() % 6)],
                gso_size: u16::from(input.u8()).into(),
                csum_start: u16::from(input.u8()).into(),
                csum_offset: 16.into(),
                ..Offload::default()
            };
            let length = usize::from(input.u16() & 0xfff);
            driver.send(length, offload);
        }
        6 => {
            let (offset, value) = (u64::from(input.u8() & 0x3f), input.u64().to_le_bytes());
            let width = [1, 2, 4, 8][usize::from(input.u8() & 3)];
            driver.write(layout::COMMON + offset, &value[..width]);
        }
        7 => {
            let mut data = [0; 4];
            let offset = u64::from(input.u16()) & 0x3ffc;
            driver
                .endpoint()
                .read(FunctionRegion::Bar(0), offset, &mut data)
                .expect("it is inside");
        }
        8 => {
            driver.endpoint().park();
        }
        9 => driver.unmap(),
        10 => driver.remap(),
        11 => {
            let (features, size) = (input.u64(), u16::from(input.u8()));
            let features = features & rackbus_devices::nic::features::OFFERED;
            driver.enable(features | common::VERSION_1, size);
        }
        _ => {
            let (address, data) = (address(input), input.short());
            for (offset, byte) in (0..).zip(data) {
                driver.poke(address.wrapping_add(offset), byte);
            }
        }
    }
}

/// Features and sizes, then deeds.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut driver = drive(&mut input);
    driver.remap();
    driver.check();
    driver.serve_next();
}

fn drive(input: &mut Input<'_>) -> NicDriver {
    let mut driver = NicDriver::new();
    let choice = input.u8();
    let bit = |bit: u8, feature: u64| if choice >> bit & 1 != 0 { feature } else { 0 };
    let offloads = feature::GUEST_OFFLOADS;
    let control = feature::CTRL_VQ | feature::CTRL_RX | feature::CTRL_VLAN;
    let features = common::VERSION_1
        | bit(0, common::RING_PACKED)
        | bit(1, common::EVENT_IDX)
        | bit(2, feature::MRG_RXBUF)
        | bit(3, offloads)
        | bit(4, control)
        | bit(5, control | feature::MQ)
        | bit(6, feature::CSUM | feature::HOST_TSO4);
    driver.enable(features, 16);
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        deed(&mut driver, input);
        driver.check();
    }
    driver
}

/// Restores what `data` says of a function.
pub fn restore(data: &[u8]) {
    let Ok(state) = FunctionState::from_bytes(data) else { return };
    let mut driver = NicDriver::new();
    if driver.go_on(Some(&state)) {
        driver.poll();
        driver.endpoint().park();
        driver.send(100, Offload::default());
        driver.poll();
        driver.go_on(None);
    } else {
        assert!(driver.endpoint().dma().is_empty(), "what was refused holds memory");
    }
    driver.serve_next();
}

/// Drivers that receive, send and command, by both kinds of queues.
pub fn seeds() -> Vec<Vec<u8>> {
    let buffer =
        |queue: u8, slot: u8, page: u8, flags: u8| vec![0, queue, slot, page, 224, flags, 0];
    let packed = |queue: u8, slot: u8, page: u8, flags: u8| {
        vec![0, queue | 16, slot, page, 224, flags | 8, slot]
    };
    let index = |queue: u8, value: u8| vec![2, queue, 128, value];
    let frame = vec![5, 1, 2, 100, 34, 0xe8, 3];
    let split_use = [
        buffer(0, 0, 22, 2),
        index(0, 1),
        frame.clone(),
        vec![4],
        buffer(1, 0, 23, 0),
        index(1, 1),
        vec![4, 8, 13],
        buffer(2, 0, 24, 1),
        index(2, 1),
        vec![4, 9, 4, 10, 4],
    ]
    .concat();
    let packed_use = [
        packed(0, 0, 22, 2),
        frame,
        vec![4],
        packed(1, 0, 23, 0),
        vec![4, 8, 13],
        packed(2, 0, 24, 4),
        vec![4, 11],
        vec![0xff; 9],
    ]
    .concat();
    let begun = |features: u8, deeds: &[u8]| [&[features], deeds].concat();
    vec![
        begun(0b1111100, &split_use),
        begun(0b0111110, &split_use),
        begun(0b1111101, &packed_use),
        begun(0b0000011, &packed_use),
    ]
}

/// What states have in them.
pub const WORDS: &[&str] = &[
    "\"version\":",
    "\"queues\":[",
    "\"size\":",
    "\"cursor\":{\"next\":",
    "\"accepted\":",
    "\"pairs\":",
    "\"offloads\":",
    "\"vlans\":[",
    "18446744073709551615",
    "null",
    "true",
];

/// States of functions that drivers have used.
pub fn states() -> Vec<Vec<u8>> {
    let used = seeds().into_iter().map(|deeds| {
        let mut driver = drive(&mut Input::new(&deeds));
        let saved = driver.endpoint().save().expect("it has not ended");
        saved.state.to_bytes().expect("it can be written")
    });
    used.collect()
}
