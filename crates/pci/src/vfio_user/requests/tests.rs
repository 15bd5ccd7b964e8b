//! A client that answers, one that does not, and one that says anything.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use rackbus_memory::{Access, MemoryHandle};
use rackbus_spec::vfio_user::{MessageHeader, VERSION, Version};

use super::*;
use crate::endpoint::{FunctionRegion, IrqChange};
use crate::vfio_user::wire::send_message;
use crate::vfio_user::{DeviceShape, RequestRefused};

const LONG: Duration = Duration::from_secs(60);

/// A device that asks, and answers nothing itself.
struct Asking {
    requests: Requests,
    shape: DeviceShape,
}

impl Asking {
    fn new(patience: Duration) -> Arc<Asking> {
        let requests = Requests::with_patience(patience);
        Arc::new(Asking { requests, shape: DeviceShape::new(Vec::new(), 1, 0) })
    }
}

impl ServedDevice for Asking {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(&self, _: FunctionRegion, _: u64, count: usize) -> Result<Vec<u8>, RequestRefused> {
        Ok(vec![0; count])
    }

    fn write(&self, _: FunctionRegion, _: u64, _: Vec<u8>, _: bool) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn map(
        &self,
        _: u64,
        _: u64,
        _: Access,
        _: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap(&self, _: u64, _: u64) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn set_irqs(&self, _: IrqChange) -> Result<(), RequestRefused> {
        Ok(())
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        panic!("planted: the device fails")
    }

    fn requests(&self) -> Option<&Requests> {
        Some(&self.requests)
    }
}

/// A served device and its client's connection, after the first message, so that requests can be sent.
fn connected(patience: Duration) -> (Arc<Asking>, UnixStream, Receiver<Result<(), WireError>>) {
    let device = Asking::new(patience);
    let (server, client) = UnixStream::pair().unwrap();
    let (ended, ends) = channel();
    let (served, server) = (device.clone(), Arc::new(server));
    std::thread::spawn(move || {
        let _ = ended.send(serve_asking(&server, &*served, &served.requests));
    });
    let version = Version { major: VERSION.0, minor: VERSION.1 };
    let head = header(1, command::VERSION, 0, 0, size_of::<Version>());
    send_message(&client, head, [version.as_bytes(), &[]], &[]).unwrap();
    let reply = WireMessage::receive(&client).unwrap();
    assert_eq!(reply.header.message_id, 1);
    (device, client, ends)
}

fn answer(client: &UnixStream, message: &WireMessage, data: &[u8]) {
    let access: DmaAccess = message.head().unwrap();
    let length = size_of::<DmaAccess>() + data.len();
    let id = message.header.message_id;
    let head = header(id, message.header.command, Flags::REPLY.bits(), 0, length);
    send_message(client, head, [access.as_bytes(), data], &[]).unwrap();
}

#[test]
fn writes_are_posted_in_order_and_reads_wait_for_what_the_client_says() {
    let (device, client, ends) = connected(LONG);
    let asking = std::thread::spawn({
        let device = device.clone();
        move || {
            device.requests.write(0xfee0_0000, &[1, 2, 3, 4]).unwrap();
            let mut data = [0; 5000];
            device.requests.read(0x1000, &mut data).unwrap();
            device.requests.flush().unwrap();
            data
        }
    });
    let write = WireMessage::receive(&client).unwrap();
    assert_eq!(write.header.command, command::DMA_WRITE);
    assert_eq!(write.head(), Some(DmaAccess { address: 0xfee0_0000, count: 4 }));
    assert_eq!(write.tail::<DmaAccess>(), [1, 2, 3, 4]);
    assert!(!device.requests.all_answered());
    for (address, count) in [(0x1000, MOST_BYTES), (0x2000, 5000 - MOST_BYTES)] {
        let read = WireMessage::receive(&client).unwrap();
        assert_eq!(read.header.command, command::DMA_READ);
        assert_eq!(read.head(), Some(DmaAccess { address, count: count as u64 }));
        answer(&client, &read, &vec![7; count]);
    }
    answer(&client, &write, &[]);
    assert_eq!(asking.join().unwrap(), [7; 5000]);
    drop(client);
    assert!(ends.recv_timeout(LONG).unwrap().is_ok());
    assert_eq!(device.requests.write(0, &[0]), Err(RequestError::Gone));
}

#[test]
fn a_client_that_answers_nothing_is_waited_for_once_until_it_says_something() {
    let (device, client, _ends) = connected(Duration::from_millis(20));
    let mut data = [0; 4];
    assert_eq!(device.requests.read(0, &mut data), Err(RequestError::TimedOut));
    assert!(device.requests.lock().silent);
    // So many are open, and no more: nothing grows, nobody waits.
    let sent = (0..1000).filter(|_| device.requests.write(0, &[0]).is_ok()).count();
    assert_eq!(sent, MOST_OPEN - 1);
    let late = WireMessage::receive(&client).unwrap();
    answer(&client, &late, &[1; 4]);
    // Its late answer is not taken for one to another question, and what was sent is answered at last.
    for _ in 0..sent {
        let write = WireMessage::receive(&client).unwrap();
        answer(&client, &write, &[]);
    }
    while !device.requests.all_answered() {
        std::thread::yield_now();
    }
    assert!(!device.requests.lock().silent);
    assert_eq!(device.requests.write(0, &[0]), Ok(()));
}

#[test]
fn malformed_answers_are_errors_or_ignored() {
    let (device, client, _ends) = connected(LONG);
    let read = || {
        let device = device.clone();
        std::thread::spawn(move || device.requests.read(0, &mut [0; 8]))
    };
    let asked = read();
    let message = WireMessage::receive(&client).unwrap();
    // An answer to nobody, and one with fewer bytes than were asked for.
    let nobody = header(message.header.message_id.wrapping_add(9), 11, Flags::REPLY.bits(), 0, 0);
    send_message(&client, nobody, [&[], &[]], &[]).unwrap();
    answer(&client, &message, &[1; 7]);
    assert_eq!(asked.join().unwrap(), Err(RequestError::Nonsense));
    let asked = read();
    let message = WireMessage::receive(&client).unwrap();
    let flags = (Flags::REPLY | Flags::ERROR).bits();
    let refusal = header(message.header.message_id, command::DMA_READ, flags, 14, 0);
    send_message(&client, refusal, [&[], &[]], &[]).unwrap();
    assert_eq!(asked.join().unwrap(), Err(RequestError::Refused(Errno::FAULT)));
    // A client that goes away answers whoever waits.
    let asked = read();
    drop(WireMessage::receive(&client).unwrap());
    drop(client);
    assert_eq!(asked.join().unwrap(), Err(RequestError::Gone));
}

/// Answers what was asked with an error.
fn refuse(client: &UnixStream, message: &WireMessage, errno: Errno) {
    let MessageHeader { message_id, command, .. } = message.header;
    let flags = (Flags::REPLY | Flags::ERROR).bits();
    let errno = errno.raw_os_error().unsigned_abs();
    let refusal = header(message_id, command, flags, errno, 0);
    send_message(client, refusal, [&[], &[]], &[]).unwrap();
}

#[test]
fn writes_that_the_client_refuses_are_told_of_once() {
    let (device, client, _ends) = connected(LONG);
    for byte in 0..3 {
        device.requests.write(0x1000, &[byte]).unwrap();
    }
    let [first, second, third] = [(); 3].map(|()| WireMessage::receive(&client).unwrap());
    refuse(&client, &first, Errno::FAULT);
    answer(&client, &second, &[]);
    refuse(&client, &third, Errno::PERM);
    assert_eq!(device.requests.flush(), Err(RequestError::Refused(Errno::FAULT)));
    assert_eq!(device.requests.flush(), Ok(()), "nobody writes the same again");
}

#[test]
fn a_client_whose_device_panicked_is_told_so() {
    let (device, client, ends) = connected(LONG);
    let head = header(2, command::DEVICE_RESET, 0, 0, 0);
    send_message(&client, head, [&[], &[]], &[]).unwrap();
    // It says nothing more, and keeps its end open: whoever served it has gone all the same.
    assert_eq!(ends.recv_timeout(LONG).err(), Some(RecvTimeoutError::Disconnected));
    assert!(client.is_closed());
    assert_eq!(device.requests.write(0, &[0]), Err(RequestError::Gone));
}

#[test]
fn an_answer_that_comes_as_the_wait_for_it_ends_is_taken_and_its_place_is_free() {
    let mut state = State::default();
    state.open.insert(1, Open::Answered(Ok(vec![7])));
    state.open.insert(2, Open::Read { count: 4 });
    state.open.insert(3, Open::Write);
    assert_eq!(state.give_up(1), Some(Ok(vec![7])));
    assert!(!state.open.contains_key(&1), "nothing more comes that would free it");
    assert_eq!(state.give_up(2), None);
    assert!(matches!(state.open.get(&2), Some(Open::Abandoned)), "its answer may still come");
    assert_eq!(state.give_up(3), None);
    assert_eq!(state.give_up(4), None, "the client went, and its requests with it");
    assert_eq!(state.unanswered(), 2);
}
