//! What the two halves of a network function say to each other, where its front runs elsewhere than its port: batches of
//! frames, places for them, and what either half may not say.
//!
//! A front that says anything gets no more than its places hold, and what it sends comes out as frames that there can be.
//! Whatever it did, the next front has a port that works. A lender that says anything reaches nothing of the guest's.

use rackbus_devices::Lost;
use rackbus_devices::class::front;
use rackbus_devices::nic::CLASS;
use rackbus_devices::nic::medium::LAYOUT;
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::{Exchange, ExchangeHandles, SharedMemory};
use rackbus_net::port::{MAX_FRAME, MIN_FRAME};
use rackbus_net::{LocalNetwork, MacAddress, NetworkPort, Offload, PortSource};
use rackbus_pci::{Endpoint, MediumAccess};
use rackbus_spec::virtio::feature;

use crate::input::Input;
use crate::nic::{DEEDS, NicDriver, act, model};

/// Deeds of one input.
const MOST: usize = 128;
/// The first slot of a place for what comes, and that by which a front says whether it takes frames.
const INWARD: u16 = 31;
const ATTEND: u16 = 62;
/// What questions ask for.
const SEND: u8 = 1;
const ROOM: u8 = 2;
const ATTENDS: u8 = 3;
const WATCH: u8 = 4;

/// A question, or an answer: of a batch of so many bytes, and in an answer its number.
fn ask(slot: u16, kind: u8, flag: u8, bytes: u32) -> Vec<u8> {
    [&slot.to_le_bytes()[..], &[kind, flag], &bytes.to_le_bytes()].concat()
}

fn answer(slot: u16, up: u8, bytes: u32, number: u32) -> Vec<u8> {
    [ask(slot, up, 0, bytes), number.to_le_bytes().to_vec()].concat()
}

/// A record of a batch: a frame's length, what is left to do to it, and its first bytes.
fn record(input: &mut Input<'_>) -> Vec<u8> {
    let length = match input.u8() {
        small @ 0..=199 => u32::from(small),
        200..=239 => 1500,
        _ => input.u32(),
    };
    let mut offload = [0; 10];
    if input.u8() & 1 != 0 {
        let said = input.bytes(10);
        offload[..said.len()].copy_from_slice(said);
    }
    let (to, from) = (MacAddress::derived("alpha/nic0.vf2"), MacAddress::derived("alpha/nic0.vf1"));
    let head = [&to.0[..], &from.0, &[8, 0]].concat();
    [&length.to_le_bytes()[..], &offload, &[0, 0], &head].concat()
}

/// Puts records into the place of a slot, one behind the other.
fn fill(exchange: &Exchange, slot: u16, input: &mut Input<'_>) {
    let mut at = usize::from(input.u8() & 3);
    for _ in 0..input.u8() % 4 {
        let record = record(input);
        let length = u32::from_le_bytes([record[0], record[1], record[2], record[3]]) as usize;
        let Some(place) = exchange.data(slot.into(), LAYOUT.data_bytes) else { return };
        let Some(part) = place.get().part(at, record.len()) else { return };
        part.copy_from(&record);
        at = at.saturating_add(16).saturating_add(length).next_multiple_of(16);
    }
}

fn slot(input: &mut Input<'_>) -> u16 {
    match input.u8() {
        slot @ 0..=71 => slot.into(),
        72..=159 => 0,
        160..=239 => INWARD,
        _ => input.u16(),
    }
}

fn bytes(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        small @ 0..=127 => 16 * u32::from(small),
        128..=239 => LAYOUT.data_bytes as u32,
        _ => input.u32(),
    }
}

/// A lender, with a port of its network beside it.
struct LentNic {
    endpoint: Endpoint,
    peer: Box<dyn NetworkPort>,
    memory: SharedMemory,
    now: u64,
}

impl LentNic {
    fn new() -> LentNic {
        let network = LocalNetwork::new([]);
        let mut peer = network.port("alpha/nic0.vf2").expect("nobody has it");
        peer.attend(true);
        let memory = SharedMemory::create("peer", 1 << 17).expect("there is memory");
        LentNic { endpoint: Endpoint::new(model(&network)), peer, memory, now: 0 }
    }

    fn front(&mut self) -> Exchange {
        let offer = self.endpoint.serve_medium(None).expect("nobody has it");
        let files = ExchangeHandles::try_from(offer.handles).expect("there are three");
        Exchange::join(files, LAYOUT).expect("it is what was offered")
    }

    fn poll(&mut self) {
        self.now += 1_000_000;
        self.endpoint.poll(self.now);
        while let Some(frame) = self.peer.next() {
            let length = frame.bytes.len();
            assert!((MIN_FRAME..=MAX_FRAME).contains(&length), "a frame of {length} bytes");
            assert!(frame.offload.is_sound(length), "{:?} of {length} bytes", frame.offload);
            self.peer.consume();
        }
    }

    /// The peer sends a frame to the function.
    fn send(&mut self, length: usize) {
        let frame = self.memory.whole();
        frame.write_obj(0, &MacAddress::derived("alpha/nic0.vf1").0);
        frame.write_obj(6, &self.peer.mac().0);
        if let Some(frame) = frame.part(0, length.clamp(MIN_FRAME, MAX_FRAME)) {
            self.peer.send(Offload::default(), &[frame]);
        }
        self.peer.flush();
    }

    /// The next front: gets frames, and nothing of the one before.
    fn serve_next(mut self) {
        self.endpoint.scrub();
        let mut front = self.front();
        let mut message = [0; MESSAGE_BYTES];
        for said in [ask(ATTEND, ATTENDS, 1, 0), ask(INWARD, ROOM, 0, 0)] {
            front.send(&said, None).expect("there is room");
        }
        front.ring();
        self.poll();
        assert!(front.receive(&mut message).is_some() && message[..2] == ATTEND.to_le_bytes());
        self.send(1000);
        self.poll();
        assert_eq!(front.receive(&mut message), Some(12), "the next front's frame");
        assert_eq!(message[..12], answer(INWARD, 1, 1024, 0)[..], "its batch");
    }
}

/// A front says anything.
fn hostile_front(input: &mut Input<'_>) {
    let mut lender = LentNic::new();
    let mut front = lender.front();
    let mut message = [0; MESSAGE_BYTES];
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        match input.u8() % 9 {
            0 | 1 => {
                let (slot, kind) = (slot(input), input.u8() % 6);
                let _ = front.send(&ask(slot, kind, input.u8() & 1, bytes(input)), None);
                front.ring();
            }
            2 => {
                let _ = front.send(input.short(), None);
                front.ring();
            }
            3 => {
                let slot = slot(input);
                fill(&front, slot, input);
            }
            4 => lender.poll(),
            5 => lender.send(usize::from(input.u16())),
            6 => {
                let mut inward = 0;
                while front.receive(&mut message).is_some() {
                    inward += 1;
                }
                assert!(inward <= LAYOUT.tags, "more answers than there are questions");
            }
            7 => drop(lender.endpoint.park()),
            _ => {
                let saved = lender.endpoint.save().expect("it has not ended");
                lender.endpoint.take_back(saved).expect("nobody has gone on with it");
            }
        }
    }
    lender.poll();
    lender.serve_next();
}

/// A lender says anything.
fn hostile_lender(input: &mut Input<'_>) {
    let (mut lender, files) = Exchange::create("lender", LAYOUT).expect("there is memory");
    let description = format!(
        "{{\"serial\":1,\"mac\":[2,0,0,0,0,1],\"mtu\":{},\"pairs\":1,\"rate\":null,\"up\":true}}",
        input.u16()
    );
    let access = MediumAccess::Handles(files.into());
    let made = front(CLASS, &description, access, Lost::new(|| {})).expect("it is described");
    let mut driver = NicDriver::of(made);
    driver.enable(feature::VERSION_1, 16);
    let mut message = [0; MESSAGE_BYTES];
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        match input.u8() % 20 {
            number if number < DEEDS => act(&mut driver, number, input),
            13..=15 => {
                let (slot, number) = (slot(input), u32::from(input.u8() & 31));
                let said = answer(slot, input.u8() & 1, bytes(input), number);
                let _ = lender.send(&said, None);
                lender.ring();
            }
            16 => {
                let _ = lender.send(input.short(), None);
                lender.ring();
            }
            17 | 18 => {
                let slot = slot(input);
                fill(&lender, slot, input);
            }
            _ => while lender.receive(&mut message).is_some() {},
        }
        driver.check();
    }
    driver.poll();
    driver.endpoint().scrub();
    driver.check();
}

/// Which half is which, then deeds.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.u8() & 1 {
        0 => hostile_front(&mut input),
        _ => hostile_lender(&mut input),
    }
}

/// Halves that say what they should.
pub fn seeds() -> Vec<Vec<u8>> {
    let frame = [60, 0];
    let batch = |slot: u8| [&[3, slot, 0, 2][..], &frame, &frame].concat();
    let send = |slot: u8| vec![0, slot, SEND, 0, 10];
    let attend = vec![0, ATTEND as u8, ATTENDS, 1, 0];
    let room = |slot: u8| vec![0, slot, ROOM, 0, 0];
    let front = [
        vec![0],
        attend.clone(),
        room(31),
        room(32),
        vec![0, 63, WATCH, 1, 0],
        batch(0),
        send(0),
        vec![4, 5, 0xe8, 3, 4, 6, 7, 8, 4],
        batch(1),
        send(1),
        vec![4, 6],
        attend,
        vec![4, 6],
    ];
    // A driver's buffer, frames for it, and answers to what it sends.
    let buffer = |queue: u8, page: u8, flags: u8| vec![0, queue, 0, page, 224, flags, 0];
    let index = |queue: u8, value: u8| vec![2, queue, 128, value];
    let lender = [
        vec![1, 0xdc, 5],
        vec![19, 13, 62, 0, 1, 0, 4],
        buffer(0, 22, 2),
        index(0, 1),
        [&[17, 31, 0, 1][..], &frame].concat(),
        vec![13, 31, 0, 1, 5, 4],
        buffer(1, 23, 0),
        index(1, 1),
        vec![4, 13, 0, 0, 1, 0, 4, 8, 19, 13, 63, 0, 0, 0, 4, 11, 0xff, 8],
    ];
    vec![front.concat(), lender.concat()]
}
