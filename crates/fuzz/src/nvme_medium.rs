//! What the two halves of a drive say to each other, where its controller runs elsewhere than its blocks: operations,
//! places for their data, and answers.
//!
//! A front that says anything reaches the drive's blocks and nothing else, and the next front has a medium that works. A
//! lender that says anything reaches nothing of the guest's but where a read of it goes.

use rackbus_devices::Lost;
use rackbus_devices::class::front;
use rackbus_devices::nvme::medium::{CLASS, LAYOUT};
use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::{Exchange, ExchangeHandles};
use rackbus_pci::{Endpoint, MediumAccess};

use crate::input::Input;
use crate::nvme::{NvmeDriver, ask};

/// Deeds of one input.
const MOST: usize = 128;
/// Bytes of the drive.
const SIZE: u64 = 256 << 10;
/// What questions ask for.
const READ: u8 = 1;
const WRITE: u8 = 2;

fn question(tag: u32, kind: u8, flags: u8, offset: u64, length: u64) -> Vec<u8> {
    let (offset, length) = (offset.to_le_bytes(), length.to_le_bytes());
    [&tag.to_le_bytes()[..], &[kind, flags, 0, 0], &offset, &length].concat()
}

fn answer(tag: u32, result: u32) -> Vec<u8> {
    [tag.to_le_bytes(), result.to_le_bytes()].concat()
}

fn tag(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        tag @ 0..=239 => u32::from(tag) % (LAYOUT.tags + 1),
        _ => input.u32(),
    }
}

/// A number of bytes: blocks, nearly that, a whole place, or any.
fn bytes(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        blocks @ 0..=199 => u64::from(blocks) * 512,
        near @ 200..=219 => u64::from(near) * 511,
        220..=229 => LAYOUT.data_bytes as u64,
        230..=239 => SIZE - 512,
        _ => input.u64(),
    }
}

fn lender() -> Endpoint {
    let config = NvmeConfig::memory(SIZE, "FUZZ");
    Endpoint::new(Box::new(Nvme::new(&config).expect("there is memory")))
}

fn join(lender: &mut Endpoint) -> Exchange {
    let offer = lender.serve_medium(None).expect("nobody has it");
    let files = ExchangeHandles::try_from(offer.handles).expect("there are three");
    Exchange::join(files, LAYOUT).expect("it is what was offered")
}

/// Has the lender do what was said, and gives its answer.
fn asked(lender: &mut Endpoint, front: &mut Exchange, said: &[u8]) -> Option<Vec<u8>> {
    front.send(said, Some((0, 512))).expect("there is room");
    front.ring();
    let mut message = [0; MESSAGE_BYTES];
    (0..8).find_map(|now| {
        lender.poll(now);
        front.receive(&mut message).map(|length| message[..length].to_vec())
    })
}

/// A front says anything.
fn hostile_front(input: &mut Input<'_>) {
    let mut lender = lender();
    let mut front = join(&mut lender);
    let mut message = [0; MESSAGE_BYTES];
    for now in 0..MOST as u64 {
        if input.is_empty() {
            break;
        }
        match input.u8() % 8 {
            0..=2 => {
                let (tag, kind, flags) = (tag(input), input.u8() % 6, input.u8());
                let said = question(tag, kind, flags, bytes(input), bytes(input));
                let _ = front.send(&said, None);
                front.ring();
            }
            3 => {
                let _ = front.send(input.short(), None);
                front.ring();
            }
            4 => {
                lender.poll(now);
            }
            5 => {
                let answers = std::iter::from_fn(|| front.receive(&mut message)).count();
                assert!(answers <= LAYOUT.tags as usize, "more answers than there are questions");
            }
            6 => {
                lender.park();
            }
            _ => {
                let saved = lender.save().expect("it has not ended");
                lender.take_back(saved).expect("nobody has gone on with it");
            }
        }
    }
    lender.poll(MOST as u64);
    assert!(lender.health().trouble().is_none(), "memory does not fail");
    lender.scrub();
    let mut next = join(&mut lender);
    next.data(0, 512).expect("it has a place").get().fill(7);
    let write = question(0, WRITE, 1, SIZE - 512, 512);
    assert_eq!(asked(&mut lender, &mut next, &write), Some(answer(0, 0)), "the next front's");
    next.data(0, 512).expect("it has a place").get().fill(1);
    let read = question(0, READ, 0, SIZE - 512, 512);
    assert_eq!(asked(&mut lender, &mut next, &read), Some(answer(0, 0)), "the next front's");
    let mut data = [0; 512];
    next.data(0, 512).expect("it has a place").get().copy_to(&mut data);
    assert_eq!(data, [7; 512], "not what was written");
}

/// A lender says anything.
fn hostile_lender(input: &mut Input<'_>) {
    let (mut lender, files) = Exchange::create("lender", LAYOUT).expect("there is memory");
    let description = format!(
        "{{\"size\":{SIZE},\"block_size\":512,\"serial\":\"FUZZ\",\"model\":\"FUZZ\",\"volatile_cache\":{}}}",
        input.u8() & 1 == 0
    );
    let (access, lost) = (MediumAccess::Handles(files.into()), Lost::new(|| {}));
    let made = front(CLASS, &description, access, lost.clone()).expect("it is described");
    let mut driver = NvmeDriver::of(made, NvmeConfig::memory(SIZE, "FUZZ"));
    driver.enable(16, false);
    let mut message = [0; MESSAGE_BYTES];
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        let choice = input.u8();
        match choice & 15 {
            0..=6 => ask(&mut driver, input, choice),
            7..=9 => {
                let said = answer(tag(input), u32::from(input.u8() % 8));
                let _ = lender.send(&said, None);
                lender.ring();
            }
            10 => {
                let _ = lender.send(input.short(), None);
                lender.ring();
            }
            11 => {
                let (place, length) = (tag(input), bytes(input) as usize);
                if let Some(place) = lender.data(place, length.min(LAYOUT.data_bytes)) {
                    place.get().fill(input.u8());
                }
            }
            12 => while lender.receive(&mut message).is_some() {},
            13 => {
                driver.endpoint.park();
            }
            _ => driver.poll(),
        }
        driver.check();
    }
    // A reset would wait for its answers.
    lost.set();
    driver.poll();
    driver.endpoint.scrub();
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
    const FLUSH: u8 = 3;
    const ZERO: u8 = 4;
    let say = |tag: u8, kind: u8, at: u8, blocks: u8| vec![0, tag, kind, 0, at, blocks];
    let front = [
        vec![0],
        say(0, WRITE, 8, 16),
        say(1, READ, 8, 16),
        vec![4, 5],
        say(0, FLUSH, 0, 0),
        say(2, ZERO, 0, 199),
        vec![7, 4, 6, 4, 5],
        say(1, READ, 235, 1),
        vec![4, 5],
    ];
    // A read and a write of queue 1, which the lender answers by the tags that are used first.
    let command = |opcode: u8| vec![0x90, opcode, 0, 0, 22, 23, 3, 7, 0];
    let lender = [
        vec![1, 0],
        command(2),
        command(1),
        vec![14, 12, 11, 0, 8, 5, 7, 0, 0, 7, 1, 0, 14, 13],
        command(0),
        vec![14, 7, 0, 5, 14],
    ];
    vec![front.concat(), lender.concat()]
}
