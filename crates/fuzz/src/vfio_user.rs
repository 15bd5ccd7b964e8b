//! A vfio-user client that says anything it likes to a served drive, with descriptors beside it.
//!
//! The input is messages: a command, flags, descriptors, a body and, rarely, a length in the header
//! that is not the message's; the client may be another node as well. What is served is a real endpoint with a real drive, with or without
//! the view that shows MSI for MSI-X.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rackbus_devices::nvme::{Nvme, NvmeConfig};
use rackbus_fabric::BarPlace;
use rackbus_memory::{
    Access, Event, HandleRef, Handles, MemoryHandle, SharedMemory, Stream, StreamError,
};
use rackbus_pci::Endpoint;
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{
    DeviceShape, RequestRefused, ServedDevice, ShownInterrupts, ShownWith, serve,
};
use rackbus_spec::vfio_user::{
    DmaMap, DmaUnmap, Flags, IrqSet, IrqSetFlags, MessageHeader, PeerMap, RegionAccess, RegionInfo,
    Registers, TYPE_MASK, Version, command, irq, region,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::input::Input;

/// Bytes of a memory file that the client passes.
const MEMORY: u64 = 256 << 10;
/// Most messages of one conversation.
const MOST: usize = 64;

/// What the client passes beside a message.
#[derive(Debug, Clone, Copy)]
enum Passed {
    Memory,
    Event,
    /// Something that is neither.
    Pipe,
    Nothing,
}

/// In an input a command is a byte; those from here on are messages between nodes.
const BETWEEN_NODES: u8 = 0xf0;

fn command_of(byte: u8) -> u16 {
    match byte.checked_sub(BETWEEN_NODES) {
        Some(nth) => command::PEER_MAP + u16::from(nth),
        None => byte.into(),
    }
}

struct Said {
    bytes: Vec<u8>,
    fds: Vec<Passed>,
}

/// Reads the messages of an input.
fn messages(input: &mut Input<'_>) -> Vec<Said> {
    let mut said = Vec::new();
    while !input.is_empty() && said.len() < MOST {
        let (command, kind, beside) = (input.u8(), input.u8(), input.u8());
        let body = input.short();
        // Some bodies are long, so that large accesses are reached.
        let long = if kind & 0x10 != 0 { usize::from(input.u16()) * 17 } else { 0 };
        let mut bytes = body.to_vec();
        bytes.resize(body.len() + long, kind);
        let length = if kind & 0x20 != 0 { input.u32() } else { 16 + bytes.len() as u32 };
        let flags = match kind & 3 {
            3 => input.u32(),
            2 => Flags::NO_REPLY.bits(),
            _ => 0,
        };
        let message_id = said.len() as u16;
        let command = command_of(command);
        let header = MessageHeader { message_id, command, message_size: length, flags, error: 0 };
        let fd = match beside >> 4 & 3 {
            0 => Passed::Memory,
            1 => Passed::Event,
            2 => Passed::Pipe,
            _ => Passed::Nothing,
        };
        let fds = vec![fd; usize::from(beside & 15)];
        said.push(Said { bytes: [header.as_bytes(), &bytes].concat(), fds });
    }
    said
}

/// The client: what it says, and a look at what it is answered.
struct Client {
    said: Mutex<Saying>,
    memory: OwnedFd,
    event: Event,
    /// The command that waits for its answer.
    open: Mutex<Option<MessageHeader>>,
}

/// What is left to say.
struct Saying {
    said: std::vec::IntoIter<Said>,
    /// Bytes of what was begun.
    left: Vec<u8>,
    /// Whether a body is received next, not a header.
    body: bool,
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    fn fd(&self, passed: Passed) -> Option<OwnedFd> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("there is room for it");
        match passed {
            Passed::Memory => Some(copy(self.memory.as_fd())),
            Passed::Event => Some(copy(self.event.as_fd())),
            Passed::Pipe => Some(std::io::pipe().expect("there is room for it").0.into()),
            Passed::Nothing => None,
        }
    }

    fn must_answer(header: &MessageHeader) -> bool {
        header.flags & TYPE_MASK == 0 && header.flags & Flags::NO_REPLY.bits() == 0
    }
}

impl Stream for Client {
    fn send(&self, parts: &[&[u8]], _: &[HandleRef<'_>]) -> Result<(), StreamError> {
        let bytes = parts.concat();
        let (reply, _) = MessageHeader::read_from_prefix(&bytes).expect("a reply has a header");
        assert_eq!(reply.message_size as usize, bytes.len(), "a reply's length is not its own");
        assert_eq!(reply.flags & TYPE_MASK, Flags::REPLY.bits(), "it answers with no reply");
        let failed = reply.flags & Flags::ERROR.bits() != 0;
        assert!(!failed || (reply.error != 0 && bytes.len() == 16), "an error says nothing");
        let asked = lock(&self.open).take().expect("an answer that nobody asked for");
        assert_eq!((reply.message_id, reply.command), (asked.message_id, asked.command));
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        let saying = &mut *lock(&self.said);
        while saying.left.len() < buffer.len() {
            let Some(next) = saying.said.next() else { return Err(StreamError::Closed) };
            saying.left.extend_from_slice(&next.bytes);
            let fds = next.fds.into_iter().filter_map(|passed| self.fd(passed)).collect();
            handles.append(Handles::of_descriptors(fds));
        }
        buffer.copy_from_slice(&saying.left[..buffer.len()]);
        saying.left.drain(..buffer.len());
        if !saying.body {
            let header =
                MessageHeader::read_from_bytes(buffer).expect("a header is received by itself");
            let mut open = lock(&self.open);
            assert!(open.is_none(), "{open:?} was never answered");
            *open = Client::must_answer(&header).then_some(header);
        }
        saying.body = !saying.body;
        Ok(())
    }

    fn wait_closed(&self) {}

    fn is_closed(&self) -> bool {
        false
    }

    fn shut_down(&self) {}
}

/// A function served without a thread: what an engine's mailbox would bring is done at once.
struct Direct {
    endpoint: Mutex<Endpoint>,
    shape: DeviceShape,
}

impl Direct {
    fn new() -> Direct {
        let nvme = Nvme::new(&NvmeConfig::memory(64 << 10, "FUZZ")).expect("there is memory");
        let endpoint = Endpoint::new(Box::new(nvme));
        let shape = DeviceShape::new(
            endpoint.bars(),
            endpoint.info().msix_vectors,
            endpoint.info().msi_vectors,
        );
        Direct { endpoint: Mutex::new(endpoint), shape }
    }

    fn call<T>(&self, act: impl FnOnce(&mut Endpoint) -> T) -> T {
        let mut endpoint = lock(&self.endpoint);
        let done = act(&mut endpoint);
        for _ in 0..4 {
            let now = endpoint.clock();
            endpoint.poll(now);
        }
        done
    }
}

impl ServedDevice for &Direct {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        let mut data = vec![0; count];
        self.call(|endpoint| endpoint.read(region, offset, &mut data))?;
        Ok(data)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        let written = self.call(|endpoint| endpoint.write(region, offset, &data));
        // Nobody hears what became of a posted write.
        if posted { Ok(()) } else { Ok(written?) }
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.map(iova, length, access, memory))?)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.unmap(iova, length))?)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.call(Endpoint::unmap_all);
        Ok(())
    }

    fn open_window(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        place: BarPlace,
        memory: MemoryHandle,
    ) -> Result<(), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.open_window(iova, length, access, place, memory))?)
    }

    fn close_window(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.close_window(iova, length))?)
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.poll_registers(bar))?)
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        Ok(self.call(|endpoint| endpoint.set_irqs(change))?)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.call(Endpoint::reset);
        Ok(())
    }
}

/// Holds the conversation that `data` says.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let msi = input.u8() & 1 != 0;
    let client = Client {
        said: Mutex::new(Saying {
            said: messages(&mut input).into_iter(),
            left: Vec::new(),
            body: false,
        }),
        memory: SharedMemory::reserve("fuzz", MEMORY).expect("there is memory"),
        event: Event::new().expect("there is room for it"),
        open: Mutex::new(None),
    };
    let direct = Direct::new();
    let ended = if msi {
        let view =
            ShownWith::new(&direct, ShownInterrupts::Msi).expect("configuration space can be read");
        serve(&client, &view)
    } else {
        serve(&client, &&direct)
    };
    // Whoever asked before the end was answered; what ended it is a length that cannot be.
    assert!(lock(&client.open).is_none() || ended.is_ok(), "the last was not answered: {ended:?}");
    let mut endpoint = lock(&direct.endpoint);
    endpoint.scrub();
    assert!(endpoint.dma().is_empty(), "a scrubbed function has mappings");
}

/// A message as the input spells it; `beside` is what descriptors are passed.
fn say(command: u16, beside: u8, body: &[u8]) -> Vec<u8> {
    let between_nodes = command.checked_sub(command::PEER_MAP);
    let command = between_nodes.map_or(command as u8, |nth| BETWEEN_NODES + nth as u8);
    let mut bytes = vec![command, 0, beside, body.len() as u8];
    bytes.extend_from_slice(body);
    bytes
}

fn write(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let access = RegionAccess { offset, region, count: data.len() as u32 };
    say(command::REGION_WRITE, 0, &[access.as_bytes(), data].concat())
}

fn read(region: u32, offset: u64, count: u32) -> Vec<u8> {
    say(command::REGION_READ, 0, RegionAccess { offset, region, count }.as_bytes())
}

fn set_irqs(index: u32, flags: IrqSetFlags, count: u32, beside: u8) -> Vec<u8> {
    let set = IrqSet { argsz: 20, flags: flags.bits(), index, start: 0, count };
    say(command::DEVICE_SET_IRQS, beside, set.as_bytes())
}

/// What a driver says that takes the drive into use.
pub fn seeds() -> Vec<Vec<u8>> {
    let version = [Version { major: 0, minor: 0 }.as_bytes(), b"{\"capabilities\":{}}\0"].concat();
    let map = DmaMap { argsz: 32, flags: 3, offset: 0, address: 0x10000, size: MEMORY };
    let unmap = DmaUnmap { argsz: 24, flags: 0, address: 0x10000, size: MEMORY };
    let info =
        |index| RegionInfo { argsz: 128, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
    let eventfd = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER;
    let hello = [
        say(command::VERSION, 0, &version),
        say(command::DEVICE_GET_INFO, 0, &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        say(command::DEVICE_GET_REGION_INFO, 0, info(0).as_bytes()),
        say(command::DEVICE_GET_IRQ_INFO, 0, &[16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
        say(command::DMA_MAP, 1, map.as_bytes()),
    ]
    .concat();
    let enable = [
        write(region::CONFIG, 4, &[6, 0]),
        write(0, 0x24, &[15, 0, 15, 0]),
        write(0, 0x28, &0x10000u64.to_le_bytes()),
        write(0, 0x30, &0x11000u64.to_le_bytes()),
        write(0, 0x14, &0x0046_0001u32.to_le_bytes()),
        read(0, 0x1c, 4),
        write(0, 0x1000, &[1, 0, 0, 0]),
        read(4, 0, 64),
    ]
    .concat();
    let irqs = [
        set_irqs(irq::MSIX, eventfd, 1, 0x11),
        set_irqs(irq::MSI, eventfd, 1, 0x11),
        set_irqs(irq::INTX, eventfd, 1, 0x11),
        set_irqs(irq::INTX, IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_UNMASK, 1, 0),
        set_irqs(irq::MSIX, IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_TRIGGER, 0, 0),
    ]
    .concat();
    // The only function that there is without a rack.
    let name = "host/function";
    let peer = PeerMap {
        map: DmaMap { address: 1 << 30, ..map },
        bar_offset: 0x1000,
        bar: 2,
        name_length: name.len() as u32,
    };
    let closed = DmaUnmap { address: 1 << 30, ..unmap };
    let peers = [
        say(command::PEER_MAP, 1, &[peer.as_bytes(), name.as_bytes()].concat()),
        say(command::DMA_MAP, 0, DmaMap { address: 1 << 30, ..map }.as_bytes()),
        say(command::PEER_UNMAP, 0, closed.as_bytes()),
        say(command::REGISTERS, 0, Registers { argsz: 16, bar: 0, size: 0 }.as_bytes()),
        say(command::REGISTERS, 1, Registers { argsz: 16, bar: 9, size: 1 }.as_bytes()),
    ]
    .concat();
    let end = [
        say(command::DMA_UNMAP, 0, unmap.as_bytes()),
        say(command::DMA_UNMAP, 0, DmaUnmap { flags: 2, address: 0, size: 0, ..unmap }.as_bytes()),
        say(command::DEVICE_RESET, 0, &[]),
    ]
    .concat();
    [0, 1]
        .into_iter()
        .map(|view| [&[view], &hello[..], &irqs, &enable, &peers, &end].concat())
        .chain([[&[0], &hello[..]].concat(), [&[1], &hello[..], &end].concat()])
        .collect()
}
