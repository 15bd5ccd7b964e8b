//! What the two halves of a memory function say to each other, where its front runs on another machine: each access a
//! question and an answer, over a connection that carries any bytes.
//!
//! A front that says anything reaches the bytes of the function and no others, and the next one finds a function that
//! works. A lender that says anything makes a front read ones at most.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rackbus_devices::Lost;
use rackbus_devices::class::front;
use rackbus_devices::memory::{AtReturn, BAR, CLASS, MEDIUM_LAYOUT, MemoryFunction, MemorySpan};
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, CarriedSession, Carrier, Exchange, StreamError};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, MediumAccess};

use crate::input::Input;

const SIZE: u64 = 1 << 20;
/// Deeds of one input.
const MOST: usize = 64;
/// What questions ask for.
const READ: u8 = 1;
const WRITE: u8 = 2;

/// A connection that is a socket.
#[derive(Debug)]
struct Socket(UnixStream);

impl Socket {
    /// Two connected ends, of which neither waits for the other.
    fn pair() -> [Socket; 2] {
        let (one, other) = UnixStream::pair().expect("there are descriptors");
        [one, other].map(|socket| {
            socket.set_nonblocking(true).expect("it is a socket");
            Socket(socket)
        })
    }
}

/// As many bytes as went through at once.
fn moved(outcome: std::io::Result<usize>, over: bool) -> Result<usize, StreamError> {
    match outcome {
        Ok(0) if over => Err(StreamError::Closed),
        Ok(count) => Ok(count),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(_) => Err(StreamError::Closed),
    }
}

impl Carrier for Socket {
    fn send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        moved(self.0.write(bytes), false)
    }

    fn flush(&mut self) -> Result<bool, StreamError> {
        Ok(true)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, StreamError> {
        let some = !buffer.is_empty();
        moved(self.0.read(buffer), some)
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn shut_down(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

fn carried(socket: Socket, side: SessionSide) -> Carried {
    let session = CarriedSession::of_one_connection(side).expect("there are descriptors");
    Carried { carrier: Box::new(socket), session, side, lane: None }
}

/// The half that is not tried, and the bytes that lead to the other one.
struct Other {
    /// Without one, bytes are said by hand.
    exchange: Option<Exchange>,
    by_hand: UnixStream,
}

impl Other {
    fn new(socket: Socket, side: SessionSide, speaks: bool) -> Other {
        let by_hand = socket.0.try_clone().expect("there are descriptors");
        let made = speaks.then(|| Exchange::carried("other", carried(socket, side), MEDIUM_LAYOUT));
        Other { exchange: made.map(|made| made.expect("there is memory")), by_hand }
    }

    fn say(&mut self, message: &[u8], data: usize, byte: u8) {
        let Some(exchange) = &mut self.exchange else { return };
        if let Some(place) = exchange.data(0, data) {
            place.get().fill(byte);
            let _ = exchange.send(message, (data > 0).then_some((0, data)));
        }
        exchange.ring();
    }

    fn say_by_hand(&mut self, bytes: &[u8]) {
        let _ = self.by_hand.write(bytes);
    }

    fn hear(&mut self) -> Option<Vec<u8>> {
        let exchange = self.exchange.as_mut()?;
        let mut message = [0; MESSAGE_BYTES];
        let length = exchange.receive(&mut message)?;
        Some(message[..length].to_vec())
    }
}

fn ask(kind: u8, offset: u64, length: u32) -> Vec<u8> {
    [&offset.to_le_bytes()[..], &length.to_le_bytes(), &[kind, 0, 0, 0]].concat()
}

fn length(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        small @ 0..=199 => u32::from(small),
        200..=219 => MEDIUM_LAYOUT.data_bytes as u32,
        220..=239 => MEDIUM_LAYOUT.data_bytes as u32 + 1,
        _ => input.u32(),
    }
}

fn offset(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        page @ 0..=127 => u64::from(page) * 4093,
        back @ 128..=239 => SIZE - u64::from(back - 128),
        _ => input.u64(),
    }
}

fn serve(lender: &mut Endpoint, speaks: bool) -> Other {
    let [near, far] = Socket::pair();
    let offer = lender.serve_medium(Some(carried(near, SessionSide::Answers)));
    assert_eq!(offer.expect("nobody has it").class, CLASS);
    Other::new(far, SessionSide::Asks, speaks)
}

/// What a front asks, and what comes of it.
fn asked(lender: &mut Endpoint, front: &mut Other, said: &[u8], data: usize) -> Option<Vec<u8>> {
    front.say(said, data, 7);
    for now in 0..8 {
        lender.poll(now);
        if let Some(answer) = front.hear() {
            return Some(answer);
        }
    }
    None
}

/// A front says anything.
fn hostile_front(input: &mut Input<'_>, speaks: bool) {
    let span = MemorySpan::memory(SIZE, AtReturn::Zero).expect("there is memory");
    let function = MemoryFunction::new(span, 7).expect("there are descriptors");
    let mut lender = Endpoint::new(Box::new(function));
    let mut front = serve(&mut lender, speaks);
    for now in 0..MOST as u64 {
        if input.is_empty() {
            break;
        }
        match input.u8() % 8 {
            0 | 1 => {
                let said = ask(input.u8() % 4, offset(input), length(input));
                let data = length(input) as usize;
                front.say(&said, data, input.u8());
            }
            2 => {
                let data = length(input) as usize;
                front.say(input.short(), data, 1);
            }
            3 | 4 => drop(lender.poll(now)),
            5 => drop(front.hear()),
            6 => front.say_by_hand(input.short()),
            _ => {
                lender.park();
                let saved = lender.save().expect("it has not ended");
                lender.take_back(saved).expect("nobody has gone on with it");
            }
        }
    }
    lender.poll(MOST as u64);
    assert!(lender.health().trouble().is_none(), "no store was lost");
    lender.scrub();
    let mut next = serve(&mut lender, true);
    let read = ask(READ, SIZE - 8, 8);
    assert_eq!(asked(&mut lender, &mut next, &read, 0), Some(vec![1, 0, 0, 0]));
    let exchange = next.exchange.as_ref().expect("it speaks");
    let mut bytes = [1; 8];
    exchange.data(0, 8).expect("it has a place").get().copy_to(&mut bytes);
    assert_eq!(bytes, [0; 8], "the next front finds bytes of the one before");
    assert_eq!(asked(&mut lender, &mut next, &ask(WRITE, 0, 8), 8), Some(vec![1, 0, 0, 0]));
}

/// A lender says anything. An access waits for its answer, so something is said before each.
fn hostile_lender(input: &mut Input<'_>, speaks: bool) {
    let [near, far] = Socket::pair();
    let mut lender = Other::new(far, SessionSide::Answers, speaks);
    let (lost, description) = (Lost::new(|| {}), "{\"size\": 1048576, \"serial\": 7}");
    let access = MediumAccess::Carried(carried(near, SessionSide::Asks));
    let made = front(CLASS, description, access, lost.clone()).expect("it is described");
    let mut front = Endpoint::new(made);
    front.write(FunctionRegion::Config, 4, &[2, 0]).expect("it is inside");
    // The side that asks says first that it is there.
    drop(lender.hear());
    let (mut said, mut spoilt) = (false, false);
    for now in 0..MOST as u64 {
        if input.is_empty() {
            break;
        }
        match input.u8() % 6 {
            0 | 1 => {
                let done = u32::from(input.u8() & 3).to_le_bytes();
                let data = length(input) as usize;
                lender.say(&done, data, input.u8());
                said |= speaks && data <= MEDIUM_LAYOUT.data_bytes;
            }
            2 => {
                // What is said behind it may be taken for a part of it.
                spoilt = true;
                lender.say_by_hand(input.short());
            }
            3 => {
                front.poll(now);
                said = false;
            }
            4 => drop(lender.hear()),
            _ => {
                if !std::mem::take(&mut said) || spoilt {
                    lost.set();
                }
                let mut data = vec![0; 1 + usize::from(input.u8())];
                let at = offset(input) % (SIZE - 256);
                match input.u8() & 1 {
                    0 => front.read(FunctionRegion::Bar(BAR), at, &mut data).expect("it is inside"),
                    _ => front.write(FunctionRegion::Bar(BAR), at, &data).expect("it is inside"),
                }
            }
        }
    }
    front.scrub();
}

/// Which half is which and how it is spoken to, then deeds.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let choice = input.u8();
    let speaks = choice & 2 == 0;
    match choice & 1 {
        0 => hostile_front(&mut input, speaks),
        _ => hostile_lender(&mut input, speaks),
    }
}

/// Halves that say what they should, and a session's bytes.
pub fn seeds() -> Vec<Vec<u8>> {
    let write = vec![0, WRITE, 3, 8, 8, 5];
    let read = vec![1, READ, 130, 2, 0, 0];
    let front =
        [vec![0], write.clone(), vec![3, 5, 5], read.clone(), vec![3, 5, 7], write, vec![3, 5]];
    let lender = [vec![1], vec![0, 1, 8, 9, 5, 7, 3, 0, 4, 0, 1, 0, 0, 5, 0, 9, 1, 3, 4]];
    // Headers of the session's frames: the first of a connection, and that of a message.
    let header = |message: u8, kind: u8| {
        let mut header = [0; 20];
        (header[0], header[2]) = (message, kind);
        header.to_vec()
    };
    let message = [header(16, 0), ask(READ, 0, 8)].concat();
    let by_hand = [vec![2, 6, 20], header(0, 1), vec![3, 6, 36], message, vec![3, 4, 3]];
    vec![front.concat(), lender.concat(), by_hand.concat(), [&[3], &front.concat()[1..]].concat()]
}
