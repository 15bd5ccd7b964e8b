//! Raw messages against the server: what the specification says of each, and what happens when a
//! client does not keep to it. The framing survives every wrong request but a wrong length.

mod common;

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{connect, copy, map, serve_copier};
use proptest::prelude::*;
use rackbus_memory::{HandleRef, SharedMemory, Stream};
use rackbus_pci::vfio_user::LocalFunction;
use rackbus_spec::vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet, MessageHeader, RegionAccess, RegionInfo,
    RegionInfoFlags, command, irq, region,
};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

const REPLY: u32 = 1;
const ERROR: u32 = 1 << 5;
const NO_REPLY: u32 = 1 << 4;

struct Raw {
    stream: UnixStream,
    next_id: u16,
}

impl Raw {
    /// A connection that has not negotiated.
    fn new(function: &LocalFunction) -> Raw {
        let stream = UnixStream::connect(function.server().path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        Raw { stream, next_id: 1 }
    }

    fn negotiated(function: &LocalFunction) -> Raw {
        let mut raw = Raw::new(function);
        raw.request(command::VERSION, &[0, 0, 0, 0], &[]).unwrap();
        raw
    }

    fn send(&mut self, command: u16, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> u16 {
        let message_id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let message_size = (size_of::<MessageHeader>() + body.len()) as u32;
        let header = MessageHeader { message_id, command, message_size, flags, error: 0 };
        let handles: Vec<_> = fds.iter().map(|fd| HandleRef::of_descriptor(*fd)).collect();
        Stream::send(&self.stream, &[header.as_bytes(), body], &handles).unwrap();
        message_id
    }

    fn reply(&mut self) -> (MessageHeader, Vec<u8>) {
        let mut head = [0; size_of::<MessageHeader>()];
        self.stream.read_exact(&mut head).unwrap();
        let header = MessageHeader::read_from_bytes(&head).unwrap();
        let mut body = vec![0; header.message_size as usize - head.len()];
        self.stream.read_exact(&mut body).unwrap();
        (header, body)
    }

    /// Sends and takes the reply; an error reply must be a bare header.
    fn request(
        &mut self,
        command: u16,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, Errno> {
        let id = self.send(command, 0, body, fds);
        let (header, body) = self.reply();
        assert_eq!((header.message_id, header.command), (id, command));
        assert_eq!(header.flags & REPLY, REPLY);
        if header.flags & ERROR != 0 {
            assert!(body.is_empty() && header.error != 0);
            return Err(Errno::from_raw_os_error(header.error as i32));
        }
        Ok(body)
    }

    fn config_word(&mut self) -> u32 {
        let access = RegionAccess { offset: 0, region: region::CONFIG, count: 4 };
        let body = self.request(command::REGION_READ, access.as_bytes(), &[]).unwrap();
        u32::from_le_bytes(body[16..20].try_into().unwrap())
    }

    fn assert_alive(&mut self) {
        assert_eq!(self.config_word(), 0x5678_1234);
    }

    fn assert_closed(mut self) {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).expect("the server closes the connection");
    }
}

#[test]
fn negotiation_comes_first_once_and_stays_short() {
    let function = serve_copier();
    let mut raw = Raw::new(&function);
    let info = DeviceInfo { argsz: 16, flags: 0, num_regions: 0, num_irqs: 0 };
    let early = raw.request(command::DEVICE_GET_INFO, info.as_bytes(), &[]);
    assert_eq!(early, Err(Errno::INVAL));
    assert_eq!(raw.request(command::VERSION, &[0, 0], &[]), Err(Errno::INVAL), "too short");
    assert_eq!(raw.request(command::VERSION, &[1, 0, 0, 0], &[]), Err(Errno::NOTSUP));
    let garbage = [&[0, 0, 0, 0][..], b"not json\0"].concat();
    assert_eq!(raw.request(command::VERSION, &garbage, &[]), Err(Errno::INVAL));
    let qemu = br#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576,"pgsizes":4096,"max_dma_maps":65535,"migration":{"pgsize":4096},"write_multiple":true,"twin_socket":{"supported":true}}}"#;
    let body = [&[0, 0, 0, 0][..], qemu, b"\0"].concat();
    let reply = raw.request(command::VERSION, &body, &[]).unwrap();
    assert_eq!(reply[..4], [0, 0, 0, 0], "version 0.0");
    assert_eq!(reply.last(), Some(&0), "terminated");
    assert!(reply.len() + size_of::<MessageHeader>() <= 214, "it fits QEMU's buffer");
    let text: serde_json::Value = serde_json::from_slice(&reply[4..reply.len() - 1]).unwrap();
    assert_eq!(text["capabilities"]["max_msg_fds"], 8);
    assert_eq!(raw.request(command::VERSION, &body, &[]), Err(Errno::INVAL), "only once");
    raw.assert_alive();
}

#[test]
fn wrong_lengths_end_the_conversation_and_nothing_else() {
    let function = serve_copier();
    for size in [0u32, 15, u32::MAX, (1 << 20) + 65] {
        let mut raw = Raw::negotiated(&function);
        let header =
            MessageHeader { message_id: 9, command: 4, message_size: size, flags: 0, error: 0 };
        raw.stream.write_all(header.as_bytes()).unwrap();
        let (reply, _) = raw.reply();
        assert_eq!((reply.message_id, reply.flags), (9, REPLY | ERROR));
        raw.assert_closed();
        // The server is there for the next one.
        Raw::negotiated(&function).assert_alive();
    }
}

/// A client that sent no request waits for no answer, and would take one for another's.
#[test]
fn wrong_lengths_are_answered_only_to_requests() {
    let function = serve_copier();
    for flags in [NO_REPLY, REPLY] {
        let mut raw = Raw::negotiated(&function);
        let header = MessageHeader { message_id: 9, command: 4, message_size: 15, flags, error: 0 };
        raw.stream.write_all(header.as_bytes()).unwrap();
        let mut rest = Vec::new();
        raw.stream.read_to_end(&mut rest).expect("the server closes the connection");
        assert!(rest.is_empty(), "flags {flags:#x} were answered");
    }
}

#[test]
fn wrong_bodies_are_answered_and_survived() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    for command in 0..32u16 {
        if command == command::DEVICE_RESET {
            continue;
        }
        let known = matches!(command, 1..=5 | 7..=10);
        let expected = if known { Errno::INVAL } else { Errno::NOTSUP };
        for length in [0, 1, 7] {
            let outcome = raw.request(command, &vec![0xff; length], &[]);
            assert_eq!(outcome, Err(expected), "command {command} with {length} bytes");
        }
    }
    assert_eq!(raw.request(0x7fff, &[], &[]), Err(Errno::NOTSUP));
    raw.assert_alive();
}

#[test]
fn regions_that_are_not_there_are_refused() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    let read = |region, offset, count| RegionAccess { offset, region, count };
    for access in [
        read(region::CONFIG, 4096, 1),
        read(region::CONFIG, 4095, 2),
        read(region::CONFIG, u64::MAX, 2),
        read(0, 0x2000, 1),
        read(1, 0, 4),
        read(region::ROM, 0, 4),
        read(8, 0, 1),
        read(9, 0, 1),
        read(u32::MAX, 0, 1),
        read(region::CONFIG, 0, u32::MAX),
    ] {
        let outcome = raw.request(command::REGION_READ, access.as_bytes(), &[]);
        assert_eq!(outcome, Err(Errno::INVAL), "{access:?}");
    }
    let mut write = read(region::CONFIG, 0, 8).as_bytes().to_vec();
    write.extend([0; 4]);
    let outcome = raw.request(command::REGION_WRITE, &write, &[]);
    assert_eq!(outcome, Err(Errno::INVAL), "count and data differ");
    raw.assert_alive();
}

#[test]
fn posted_writes_are_never_answered() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    let enable = RegionAccess { offset: 4, region: region::CONFIG, count: 2 };
    raw.send(command::REGION_WRITE, NO_REPLY, &[enable.as_bytes(), &[6, 0]].concat(), &[]);
    let wrong = RegionAccess { offset: 9999, region: region::CONFIG, count: 2 };
    raw.send(command::REGION_WRITE, NO_REPLY, &[wrong.as_bytes(), &[6, 0]].concat(), &[]);
    raw.send(command::REGION_WRITE, NO_REPLY, &[], &[]);
    raw.send(99, NO_REPLY, &[], &[]);
    // The next reply is this request's: nothing came between.
    let access = RegionAccess { offset: 4, region: region::CONFIG, count: 2 };
    let body = raw.request(command::REGION_READ, access.as_bytes(), &[]).unwrap();
    assert_eq!(body[16..], [6, 0], "and the write took effect before the read");
}

#[test]
fn replies_from_a_client_are_ignored() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    raw.send(command::REGION_READ, REPLY, &[0; 16], &[]);
    raw.assert_alive();
}

#[test]
fn information_respects_the_senders_room() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    let ask =
        |argsz, index| RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
    let small = raw.request(command::DEVICE_GET_REGION_INFO, ask(32, 0).as_bytes(), &[]).unwrap();
    let info = RegionInfo::read_from_bytes(&small).unwrap();
    assert!(small.len() == 32 && info.argsz == 64 && info.cap_offset == 0);
    // QEMU refuses an answer that says that there are capabilities, and not where.
    let flags = |info: &RegionInfo| RegionInfoFlags::from_bits_retain(info.flags);
    assert_eq!(flags(&info) & RegionInfoFlags::CAPS, RegionInfoFlags::empty());
    let whole = raw.request(command::DEVICE_GET_REGION_INFO, ask(64, 0).as_bytes(), &[]).unwrap();
    assert_eq!(whole.len(), 64);
    let info = RegionInfo::read_from_prefix(&whole).unwrap().0;
    assert!(info.cap_offset == 32 && flags(&info).contains(RegionInfoFlags::CAPS));
    for argsz in [0, 31] {
        let outcome = raw.request(command::DEVICE_GET_REGION_INFO, ask(argsz, 0).as_bytes(), &[]);
        assert_eq!(outcome, Err(Errno::INVAL));
    }
    let none = raw.request(command::DEVICE_GET_REGION_INFO, ask(32, 9).as_bytes(), &[]);
    assert_eq!(none, Err(Errno::INVAL));
    for (index, count) in [(irq::INTX, 1), (irq::MSI, 0), (irq::MSIX, 20), (irq::ERR, 0)] {
        let ask = IrqInfo { argsz: 16, flags: 0, index, count: 0 };
        let reply = raw.request(command::DEVICE_GET_IRQ_INFO, ask.as_bytes(), &[]).unwrap();
        assert_eq!(IrqInfo::read_from_bytes(&reply).unwrap().count, count);
    }
    let ask = IrqInfo { argsz: 16, flags: 0, index: 5, count: 0 };
    let none = raw.request(command::DEVICE_GET_IRQ_INFO, ask.as_bytes(), &[]);
    assert_eq!(none, Err(Errno::INVAL));
}

#[test]
fn descriptors_must_fit_what_is_asked() {
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    let memory = SharedMemory::create("two", 4096).unwrap();
    let map = DmaMap { argsz: 32, flags: 3, offset: 0, address: 0, size: 4096 };
    let two = [memory.as_fd(), memory.as_fd()];
    let outcome = raw.request(command::DMA_MAP, map.as_bytes(), &two);
    assert_eq!(outcome, Err(Errno::INVAL));
    let neither = DmaMap { flags: 0, ..map };
    let outcome = raw.request(command::DMA_MAP, neither.as_bytes(), &[memory.as_fd()]);
    assert_eq!(outcome, Err(Errno::INVAL));
    let set = |flags, count| IrqSet { argsz: 20, flags, index: irq::MSIX, start: 0, count };
    for (flags, count, fds) in [
        (4 | 32, 3, &two[..]),   // descriptors for some of the vectors
        (1 | 32, 1, &two[..1]),  // descriptors that were not announced
        (4 | 8, 1, &two[..1]),   // an eventfd that masks
        (32, 1, &[]),            // no kind of data
        (1 | 4 | 32, 1, &[]),    // two kinds of data
        (2 | 32, 4, &[]),        // booleans that are not there
        (1 | 32, u32::MAX, &[]), // more vectors than there are
    ] {
        let outcome = raw.request(command::DEVICE_SET_IRQS, set(flags, count).as_bytes(), fds);
        assert_eq!(outcome, Err(Errno::INVAL), "flags {flags:#x} count {count}");
    }
    let odd = DmaMap { argsz: 32, flags: 1 << 2 | 3, offset: 0, address: 0, size: 4096 };
    let outcome = raw.request(command::DMA_MAP, odd.as_bytes(), &[memory.as_fd()]);
    assert_eq!(outcome, Err(Errno::INVAL), "flags that nobody knows");
    let both = DmaUnmap { argsz: 24, flags: 2, address: 1, size: 0 };
    let outcome = raw.request(command::DMA_UNMAP, both.as_bytes(), &[]);
    assert_eq!(outcome, Err(Errno::INVAL), "everything, but from an address");
    raw.assert_alive();
}

#[test]
fn thousands_of_tiny_mappings_in_one_burst() {
    const COUNT: u64 = 4000;
    let function = serve_copier();
    let mut raw = Raw::negotiated(&function);
    let memory = SharedMemory::create("tiny", 4096).unwrap();
    // A client may send without waiting: requests in flight are answered in order.
    for burst in 0..COUNT / 100 {
        for at in 0..100 {
            let address = (burst * 100 + at) * 8192;
            let map = DmaMap { argsz: 32, flags: 3, offset: 0, address, size: 4096 };
            raw.send(command::DMA_MAP, 0, map.as_bytes(), &[memory.as_fd()]);
        }
        for _ in 0..100 {
            assert_eq!(raw.reply().0.flags, REPLY);
        }
    }
    let all = DmaUnmap { argsz: 24, flags: 2, address: 0, size: 0 };
    raw.request(command::DMA_UNMAP, all.as_bytes(), &[]).unwrap();
    let one = DmaUnmap { argsz: 24, flags: 0, address: 0, size: 4096 };
    assert_eq!(raw.request(command::DMA_UNMAP, one.as_bytes(), &[]), Err(Errno::NOENT));
}

/// A client that neither reads its replies nor closes blocks nobody but itself.
#[test]
fn a_client_that_stops_reading_harms_nobody_else() {
    let stuck = serve_copier();
    let raw = Raw::negotiated(&stuck);
    raw.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let access = RegionAccess { offset: 0, region: region::CONFIG, count: 4096 };
    let message_size = 32;
    let header = MessageHeader {
        message_id: 1,
        command: command::REGION_READ,
        message_size,
        flags: 0,
        error: 0,
    };
    while Stream::send(&raw.stream, &[header.as_bytes(), access.as_bytes()], &[]).is_ok() {}
    let other = serve_copier();
    let client = connect(&other);
    let _memory = map(&client, 0, 0x1000);
    assert_eq!(copy(&client, 0, 0x100, 8), 1);
    // And the stuck one's own function can be stopped.
    drop(stuck);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever bytes a client sends, the server lives and serves the next.
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), negotiate: bool) {
        let function = serve_copier();
        let mut raw = if negotiate { Raw::negotiated(&function) } else { Raw::new(&function) };
        raw.stream.write_all(&bytes).unwrap();
        drop(raw);
        Raw::negotiated(&function).assert_alive();
    }

    /// Well-framed nonsense is answered, each message once.
    #[test]
    fn malformed_messages_of_right_length_are_answered(messages in prop::collection::vec((0u16..20, prop::collection::vec(any::<u8>(), 0..64)), 1..40)) {
        let function = serve_copier();
        let mut raw = Raw::negotiated(&function);
        for (command, body) in &messages {
            let _ = raw.request(*command, body, &[]);
        }
        let reset = raw.request(command::DEVICE_RESET, &[], &[]);
        prop_assert!(reset.is_ok());
        raw.assert_alive();
    }
}

/// A device that fails during a conversation is not busy for ever.
#[test]
fn a_client_is_served_after_one_whose_device_panicked() {
    use rackbus_pci::Engine;
    use rackbus_pci::vfio_user::{EngineDevice, RequestRefused, ServedDevice, Server};
    use std::sync::atomic::{AtomicBool, Ordering};

    let model = common::Copier::new();
    let engine = Engine::start("copier", model, Default::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    let failed = AtomicBool::new(false);
    let open = move || -> Result<Box<dyn ServedDevice>, RequestRefused> {
        assert!(failed.swap(true, Ordering::Relaxed), "the first client's device fails");
        Ok(Box::new(device.session()))
    };
    let path = common::socket_path();
    let _server = Server::bind(&path, open).unwrap();
    let first = UnixStream::connect(&path).unwrap();
    Raw { stream: first, next_id: 1 }.assert_closed();
    let stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut second = Raw { stream, next_id: 1 };
    second.request(command::VERSION, &[0, 0, 0, 0], &[]).expect("the device is free");
    second.assert_alive();
}
