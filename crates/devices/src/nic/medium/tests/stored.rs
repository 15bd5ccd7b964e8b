//! States of this and of earlier versions, in files: a function, a front and its lender continue from each of them.

use std::sync::atomic::Ordering;

use rackbus_memory::Access;
use rackbus_pci::MediumAccess;
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_seeds::stored::StoredStates;
use rackbus_spec::virtio::net::feature;
use rackbus_spec::virtio::ring::{SplitDescriptor, flags};
use rackbus_spec::virtio::{common as reg, feature as common, status};

use super::super::super::saved::VERSION;
use super::*;
use crate::class::{front, front_again};

/// In version 1 as it was written at first, neither end of a port elsewhere knows of generations. Its files are those of
/// version 2 without that.
const READ: std::ops::RangeInclusive<u32> = 1..=VERSION;

const IOVA: u64 = 1 << 32;
/// Bytes from one queue's areas to the next one's, each area in a page.
const QUEUE: u64 = 0x3000;
const DATA: u64 = 0xa000;
const COMMAND: u64 = DATA + 0x5000;
/// Buffers for frames that come.
const PLACES: u64 = DATA + 0x6000;
const MEMORY: u64 = 0x20000;
/// The group that the driver listens to.
const GROUP: MacAddress = MacAddress([0x33, 0x33, 0, 0, 0, 7]);
/// Bytes per second and at once: two of the frames pass, and others wait.
const RATE: (u64, u64) = (1000, 200);
const FRAME: usize = 120;

fn stored(name: &'static str) -> StoredStates {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/nic/medium/tests/stored");
    StoredStates::new(folder, name, VERSION)
}

/// A function under a driver, its port here or at a lender.
struct Driver {
    network: LocalNetwork,
    function: Option<Endpoint>,
    lender: Option<Endpoint>,
    description: String,
    peer: Box<dyn NetworkPort>,
    memory: SharedMemory,
    /// How many buffers each queue was given.
    given: [u16; 3],
    now: u64,
}

impl Driver {
    fn new(apart: bool) -> Driver {
        let network = LocalNetwork::new([]);
        let rate = apart.then_some(RATE);
        let nic = super::function(&network, rate, &Arc::default());
        let mut peer = network.port("alpha/nic0.vf2").unwrap();
        peer.attend(true);
        let mut function = Endpoint::new(Box::new(nic));
        let (mut lender, mut description) = (None, String::new());
        if apart {
            let offer = function.serve_medium(None).unwrap();
            let files = MediumAccess::Handles(offer.handles);
            let made = front(CLASS, &offer.description, files, Lost::new(|| {})).unwrap();
            lender = Some(std::mem::replace(&mut function, Endpoint::new(made)));
            description = offer.description;
        }
        let memory = SharedMemory::create("driver", MEMORY).unwrap();
        let access = Access::READ | Access::WRITE;
        function.map(IOVA, MEMORY, access, Some(memory.handle(0))).unwrap();
        let function = Some(function);
        let (given, now) = ([0; 3], 0);
        let mut it = Driver { network, function, lender, description, peer, memory, given, now };
        it.enable();
        it
    }

    fn function(&mut self) -> &mut Endpoint {
        self.function.as_mut().unwrap()
    }

    fn write(&mut self, at: u64, data: &[u8]) {
        self.function().write(FunctionRegion::Bar(0), at, data).unwrap();
    }

    fn enable(&mut self) {
        self.function().write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        self.write(reg::DEVICE_STATUS, &[status::ACKNOWLEDGE | status::DRIVER]);
        let features = common::VERSION_1 | feature::CTRL_VQ | feature::CTRL_RX;
        for half in 0..2u32 {
            self.write(reg::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
            self.write(reg::DRIVER_FEATURE, &((features >> (32 * half)) as u32).to_le_bytes());
        }
        self.write(reg::DEVICE_STATUS, &[status::FEATURES_OK]);
        for queue in 0..3u16 {
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

    /// Gives a queue buffers, each a place in the memory and a length: those of one request, or a request each.
    fn give(&mut self, queue: usize, buffers: &[(u64, u32, u16)]) {
        let (at, whole) = (QUEUE as usize * queue, self.memory.whole());
        for (address, length, flags) in buffers {
            let number = self.given[queue] % 8;
            let (address, next) = (IOVA + address, number + 1);
            let descriptor = SplitDescriptor { address, length: *length, flags: *flags, next };
            whole.write_obj(at + 16 * usize::from(number), &descriptor);
            whole.store_u16(at + 0x1004 + 2 * usize::from(number), number, Ordering::Relaxed);
            self.given[queue] += 1;
        }
        let requests = if queue == 2 { 1 } else { self.given[queue] };
        whole.store_u16(at + 0x1002, requests, Ordering::Release);
    }

    /// Has the function listen to the group, by a command.
    fn listen(&mut self) {
        let stations = [&1u32.to_le_bytes()[..], &self.peer.mac().0].concat();
        let groups = [&1u32.to_le_bytes()[..], &GROUP.0].concat();
        let said = [&[1, 0][..], &stations, &groups].concat();
        let place = self.memory.whole().part(COMMAND as usize, said.len()).unwrap();
        place.copy_from(&said);
        let answer = (COMMAND + 0x100, 1, flags::WRITE);
        self.give(2, &[(COMMAND, said.len() as u32, flags::NEXT), answer]);
        self.turn();
        let used = 2 * QUEUE as usize + 0x2002;
        assert_eq!(self.memory.whole().load_u16(used, Ordering::Acquire), Some(1));
    }

    fn turn(&mut self) {
        self.now += 1000;
        let now = self.now;
        self.function().poll(now);
        if let Some(lender) = &mut self.lender {
            lender.poll(now);
        }
        self.function().poll(now);
    }

    /// The driver makes a frame with this number available.
    fn send(&mut self, number: u32) {
        let at = DATA + 0x200 * u64::from(number);
        let from = MacAddress::derived(NAME);
        self.frame(at as usize + 12, (from, self.peer.mac()), number);
        self.give(1, &[(at, 12 + FRAME as u32, 0)]);
    }

    /// Another station sends one.
    fn send_back(&mut self, to: MacAddress, number: u32) {
        let at = DATA as usize + 0x4000;
        self.frame(at, (self.peer.mac(), to), number);
        let frame = self.memory.whole().part(at, FRAME).unwrap();
        assert_eq!(self.peer.send(Offload::default(), &[frame]), SendOutcome::Done);
    }

    fn frame(&self, at: usize, (from, to): (MacAddress, MacAddress), number: u32) {
        let whole = self.memory.whole();
        whole.write_obj(at, &to.0);
        whole.write_obj(at + 6, &from.0);
        whole.write_obj(at + 14, &number);
    }

    /// Numbers of frames that the other station has got.
    fn arrived(&mut self) -> Vec<u32> {
        std::iter::from_fn(|| {
            let number: u32 = self.peer.next()?.bytes.read_obj(14).unwrap();
            self.peer.consume();
            Some(number)
        })
        .collect()
    }

    /// Numbers of frames that the driver has got, in the buffers that it gave from `PLACES` on.
    fn received(&self) -> Vec<u32> {
        let whole = self.memory.whole();
        let used = whole.load_u16(0x2002, Ordering::Acquire).unwrap();
        let place = |nth: u16| (PLACES + 0x200 * u64::from(nth)) as usize + 12 + 14;
        (0..used).map(|nth| whole.read_obj(place(nth)).unwrap()).collect()
    }

    /// Runs until frames have passed that were held back by the rate.
    fn run(&mut self) -> Vec<u32> {
        let mut arrived = Vec::new();
        for _ in 0..20 {
            self.now += 1_000_000_000;
            self.turn();
            arrived.extend(self.arrived());
        }
        arrived
    }
}

fn receive_buffers() -> Vec<(u64, u32, u16)> {
    (0..4).map(|nth| (PLACES + 0x200 * nth, 0x200, flags::WRITE)).collect()
}

fn read(text: &str) -> FunctionState {
    FunctionState::from_bytes(text.as_bytes()).unwrap()
}

#[test]
fn a_function_continues_from_what_each_version_wrote() {
    for version in READ {
        let mut it = Driver::new(false);
        it.listen();
        it.send(0);
        it.turn();
        assert_eq!(it.arrived(), [0]);
        // It is not taken by a function that is saved.
        it.send(1);
        // The memory and the descriptors are those of this function, which did the same as the one that was stored.
        let saved = it.function().save().unwrap();
        stored("function").compare(&saved.state.to_bytes().unwrap());
        it.function = None;
        let nic = super::function(&it.network, None, &Arc::default());
        let mut function = Endpoint::new(Box::new(nic));
        function
            .restore(&read(&stored("function").read(version)), saved.descriptors)
            .unwrap_or_else(|error| panic!("version {version}: {error}"));
        it.function = Some(function);
        it.give(0, &receive_buffers());
        it.send(2);
        assert_eq!(it.run(), [1, 2], "version {version}: each once");
        it.send_back(GROUP, 10);
        it.send_back(MacAddress::derived(NAME), 11);
        it.run();
        assert_eq!(it.received(), [10, 11], "version {version}: each once, also to the group");
    }
}

#[test]
fn a_front_and_its_lender_continue_from_what_each_version_wrote() {
    for version in READ {
        let mut it = Driver::new(true);
        it.listen();
        for number in 0..5 {
            it.send(number);
        }
        // One came, for which the driver has no buffer; the lender holds others back.
        it.send_back(MacAddress::derived(NAME), 10);
        it.turn();
        let before = it.arrived();
        assert!(!before.is_empty() && before.len() < 5, "{before:?}");
        // Still in the queue.
        it.send(5);
        let saved = it.function().save().unwrap();
        let lender = it.lender.as_mut().unwrap().save().unwrap();
        stored("front").compare(&saved.state.to_bytes().unwrap());
        stored("lender").compare(&lender.state.to_bytes().unwrap());
        (it.function, it.lender) = (None, None);
        let end = InheritedEnd { files: saved.medium, session: None };
        let next = front_again(CLASS, &it.description, end, Lost::new(|| {})).unwrap();
        let mut next = Endpoint::new(next);
        next.restore(&read(&stored("front").read(version)), saved.descriptors)
            .unwrap_or_else(|error| panic!("version {version}: {error}"));
        it.function = Some(next);
        let mut nic = super::function(&it.network, Some(RATE), &Arc::default());
        nic.inherited.files = lender.medium;
        let mut next = Endpoint::new(Box::new(nic));
        next.restore(&read(&stored("lender").read(version)), lender.descriptors)
            .unwrap_or_else(|error| panic!("version {version}: {error}"));
        it.lender = Some(next);
        it.give(0, &receive_buffers());
        let arrived: Vec<u32> = before.into_iter().chain(it.run()).collect();
        assert_eq!(arrived, [0, 1, 2, 3, 4, 5], "version {version}: each once");
        it.send_back(GROUP, 11);
        it.send_back(MacAddress::derived(NAME), 12);
        it.run();
        assert_eq!(it.received(), [10, 11, 12], "version {version}: each once, also to the group");
    }
}

#[test]
fn a_state_of_a_newer_version_is_refused() {
    let mut first = Driver::new(false);
    let saved = first.function().save().unwrap();
    let mut state = saved.state;
    let text = String::from_utf8(state.to_bytes().unwrap()).unwrap();
    let model = format!("\"class\":\"nic\",\"version\":{VERSION}");
    let newer = text.replacen(&model, "\"class\":\"nic\",\"version\":99", 1);
    assert_ne!(newer, text);
    state = read(&newer);
    first.function = None;
    let nic = super::function(&first.network, None, &Arc::default());
    let refused = Endpoint::new(Box::new(nic)).restore(&state, saved.descriptors).unwrap_err();
    let expected =
        format!("the state has version 99, this program knows {VERSION}; use a newer program");
    assert_eq!(refused.to_string(), expected);
}
