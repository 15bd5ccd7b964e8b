//! A driver of network functions: virtio-net (virtio 1.2, section 5.1) over modern virtio-pci.
//!
//! [`Net`] opens one at a vfio-user socket. It sends and receives frames by any number of queue pairs, split or packed,
//! and polls; who waits sleeps until an interrupt. It lives in one thread. What it negotiates is chosen by
//! [`NetOptions`], so that it can be every kind of driver that a device has to bear.

mod packed;
mod registers;
mod ring;
mod split;

use std::path::Path;
use std::time::Duration;

use rackbus_memory::{DmaSlice, Event, SharedMemory};
use rackbus_spec::virtio::net::{self, HEADER_SIZE, NetHeader, feature};
use rackbus_spec::virtio::{feature as common, status};
use zerocopy::{FromBytes, IntoBytes};

use crate::DriveError;
use crate::device::{DmaAddresses, DrivenFunction, connect};
use registers::VirtioRegisters;
pub use ring::QueueLayout;
use ring::{MOST_SEGMENTS, NetQueue, QueueMemory};

/// Where the shared memory begins in the function's address space.
const IOVA: u64 = 1 << 32;
/// Bytes of a transmit buffer that holds the longest frame with its header.
const TRANSMIT_BUFFER: usize = 80 << 10;
/// Bytes of all transmit buffers of a pair, at most.
const TRANSMIT_BYTES: usize = 64 * TRANSMIT_BUFFER;
/// Looks at the control queue while waiting for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Receive buffers are given to the function when so large a part of them is free (a fourth).
const FILLED_BY: usize = 4;

/// Why the function did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The connection failed, or the function turned us away.
    #[error("network function: {0}")]
    Device(#[from] DriveError),
    /// Memory to share with it could not be obtained.
    #[error("network function: memory to share with it: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// It is not one that this driver can use.
    #[error("network function: {0}")]
    Unsupported(&'static str),
    /// It does not take what was accepted.
    #[error("network function: it refused the features {0:#x}")]
    Features(u64),
    /// A request is not within what it or its queue can do.
    #[error("network function: {0}")]
    Request(&'static str),
    /// It did not answer in time.
    #[error("network function: no answer in time; its lender may be gone")]
    TimedOut,
}

/// How to use a function.
#[derive(Debug, Clone, Copy)]
pub struct NetOptions {
    /// Features that are accepted as far as they are offered; version 1 always is.
    pub features: u64,
    /// Pairs of queues in use.
    pub pairs: u16,
    /// Descriptors of each queue.
    pub size: u16,
    /// Bytes of a receive buffer.
    pub buffer: usize,
    /// Bytes of a transmit buffer: a frame with its header. The smaller they are, the more there can be.
    pub transmit_buffer: usize,
    /// Descriptors that a frame is sent by.
    pub segments: u16,
    /// They are in a table of their own, where the function takes that.
    pub indirect: bool,
    /// Who waits sleeps until an interrupt.
    pub interrupts: bool,
}

impl Default for NetOptions {
    fn default() -> NetOptions {
        NetOptions {
            features: !0,
            pairs: 1,
            size: 256,
            buffer: 2048,
            transmit_buffer: TRANSMIT_BUFFER,
            segments: 1,
            indirect: false,
            interrupts: false,
        }
    }
}

/// What a function says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetInfo {
    /// The feature bits that were negotiated.
    pub features: u64,
    /// The function's Ethernet address.
    pub mac: [u8; 6],
    /// The longest packet in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Pairs of queues that it has.
    pub pairs: u16,
}

/// A function in use.
pub struct Net {
    device: Box<dyn DrivenFunction>,
    memory: SharedMemory,
    addresses: DmaAddresses,
    registers: VirtioRegisters,
    info: NetInfo,
    receive: Vec<NetQueue>,
    transmit: Vec<NetQueue>,
    control: Option<NetQueue>,
    /// What rings for each pair, and for the configuration.
    events: Vec<Event>,
    options: NetOptions,
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Net {
    /// Opens the function at the vfio-user socket `path`; each register access takes at most `limit`.
    ///
    /// # Errors
    /// [`NetError`].
    pub fn open(path: &Path, limit: Duration, options: NetOptions) -> Result<Net, NetError> {
        Net::start(Box::new(connect(path, limit)?), options)
    }

    /// Brings a function up.
    ///
    /// # Errors
    /// [`NetError`].
    pub fn start(device: Box<dyn DrivenFunction>, options: NetOptions) -> Result<Net, NetError> {
        let NetOptions { pairs, size, segments, transmit_buffer, .. } = options;
        if pairs == 0 || !(2..=1024).contains(&size) || !(1..=MOST_SEGMENTS).contains(&segments) {
            return Err(NetError::Request("1 to 1024 descriptors, 1 to 16 for each frame"));
        }
        if !(HEADER_SIZE..=TRANSMIT_BUFFER).contains(&transmit_buffer) {
            return Err(NetError::Request("a transmit buffer holds a header, and 80 KiB at most"));
        }
        let mut device = device;
        let (span, control_at) = layout(options);
        let memory = device.memory("net-driver", span)?;
        // Declared behind the memory: where this fails, the function is stopped before its memory is given back.
        let mut device = device;
        let addresses = device.start(IOVA, &memory)?;
        let mut registers = VirtioRegisters::find(&mut *device)?;
        let features = registers.negotiate(&mut *device, options.features)?;
        let info = registers.info(&mut *device, features)?;
        if pairs > info.pairs {
            return Err(NetError::Request("the function has fewer queue pairs"));
        }
        let many = features & feature::MQ != 0;
        let vectors = if options.interrupts { pairs + 1 } else { 0 };
        let mut events = Vec::new();
        if vectors > 0 && registers.enable_msix(&mut *device)? {
            events = device.interrupts(vectors)?;
        }
        let mut net = Net {
            device,
            memory,
            addresses,
            registers,
            info,
            receive: Vec::new(),
            transmit: Vec::new(),
            control: None,
            events,
            options,
        };
        net.make_queues(features)?;
        if features & feature::CTRL_VQ != 0 {
            let number = if many { 2 * net.info.pairs } else { 2 };
            let size = size.min(64);
            // Without tables each command has two of the queue's descriptors.
            let count = (size / 2).max(1);
            let place = QueueMemory { offset: control_at, buffer: 4096, count, segments: 2 };
            net.control = Some(net.make(number, size, place, features, None)?);
        }
        net.registers.set_status(&mut *net.device, status::DRIVER_OK)?;
        for pair in 0..pairs {
            net.fill(pair)?;
        }
        if pairs > 1 && !net.command((4, 0), &pairs.to_le_bytes())? {
            return Err(NetError::Request("the function refuses so many queue pairs"));
        }
        Ok(net)
    }

    fn make_queues(&mut self, features: u64) -> Result<(), NetError> {
        let NetOptions { pairs, size, buffer, .. } = self.options;
        let per_pair = pair_bytes(self.options);
        for pair in 0..pairs {
            let offset = usize::from(pair) * per_pair;
            let vector = (usize::from(pair) < self.events.len()).then_some(pair);
            let inward = QueueMemory { offset, buffer, count: size, segments: 1 };
            let outward = outward(self.options, offset + inward.length(size));
            let receive = self.make(2 * pair, size, inward, features, vector)?;
            let transmit = self.make(2 * pair + 1, size, outward, features, vector)?;
            self.receive.push(receive);
            self.transmit.push(transmit);
        }
        Ok(())
    }

    fn make(
        &mut self,
        number: u16,
        size: u16,
        span: QueueMemory,
        features: u64,
        vector: Option<u16>,
    ) -> Result<NetQueue, NetError> {
        let indirect = self.options.indirect && features & common::INDIRECT_DESC != 0;
        let mut queue = NetQueue::new(&self.memory, &self.addresses, number, size, span, features)?;
        queue.indirect = indirect && span.segments > 1;
        let places = queue.places;
        queue.notify_at = self.registers.enable(&mut *self.device, number, size, places, vector)?;
        // Nobody waits yet.
        queue.want_interrupts(&self.memory, false);
        Ok(queue)
    }

    /// What the function says of itself.
    pub fn info(&self) -> &NetInfo {
        &self.info
    }

    /// Whether its link is up.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn is_up(&mut self) -> Result<bool, NetError> {
        let status = self.registers.config16(&mut *self.device, net::config::STATUS)?;
        Ok(status & net::config::LINK_UP != 0)
    }

    /// Whether the function needs a reset: something in its queues was wrong.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn is_broken(&mut self) -> Result<bool, NetError> {
        let status = self.registers.status(&mut *self.device)?;
        Ok(status & status::DEVICE_NEEDS_RESET != 0)
    }

    /// Makes all free receive buffers of a pair available.
    fn fill(&mut self, pair: u16) -> Result<(), NetError> {
        let queue = &mut self.receive[usize::from(pair)];
        while let Some(number) = queue.free() {
            queue.push(&self.memory, number, 0, queue.span.buffer);
        }
        self.kick(2 * pair)
    }

    fn kick(&mut self, queue: u16) -> Result<(), NetError> {
        let pair = usize::from(queue / 2);
        let (queues, memory) = match queue % 2 {
            0 => (&mut self.receive, &self.memory),
            _ => (&mut self.transmit, &self.memory),
        };
        let Some(ring) = queues.get_mut(pair) else { return Ok(()) };
        if ring.publish(memory) {
            let value = ring.number.to_le_bytes();
            self.device.write(ring.notify_at, &value)?;
        }
        Ok(())
    }

    /// Puts a frame into a pair's transmit queue, where the function finds it after [`flush`](Net::flush). False when the
    /// queue is full.
    ///
    /// # Errors
    /// When the frame is longer than any, or the function says what cannot be.
    pub fn send(&mut self, pair: u16, header: &NetHeader, frame: &[u8]) -> Result<bool, NetError> {
        self.send_in_place(pair, header, frame.len(), |room| {
            room.copy_from(frame);
        })
    }

    /// As [`send`](Net::send), a frame of `length` bytes that `write` puts together where the function reads it. What it
    /// does not write is as it was left in that buffer by an earlier frame.
    ///
    /// # Errors
    /// As [`send`](Net::send).
    #[inline]
    pub fn send_in_place(
        &mut self,
        pair: u16,
        header: &NetHeader,
        length: usize,
        write: impl FnOnce(DmaSlice<'_>),
    ) -> Result<bool, NetError> {
        let Some(queue) = self.transmit.get_mut(usize::from(pair)) else {
            return Err(NetError::Request("there is no such queue pair"));
        };
        if length > queue.span.buffer - HEADER_SIZE {
            return Err(NetError::Request("the frame is longer than any"));
        }
        // The function writes where this looks, so it is not done for each frame.
        if queue.unused() == 0 {
            while let Some((number, _)) = queue.pop(&self.memory)? {
                queue.give_back(number);
            }
        }
        let Some(number) = queue.free() else {
            // There is room when the function has seen what is in the queue.
            self.kick(2 * pair + 1)?;
            self.device.progress();
            return Ok(false);
        };
        let buffer = queue.buffer(&self.memory, number);
        buffer.copy_from(header.as_bytes());
        if let Some(room) = buffer.part(HEADER_SIZE, length) {
            write(room);
        }
        queue.push(&self.memory, number, HEADER_SIZE + length, 0);
        Ok(true)
    }

    /// Lets the function see the frames that were put in, and tells it of them if it does not look itself.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn flush(&mut self, pair: u16) -> Result<(), NetError> {
        self.kick(2 * pair + 1)
    }

    /// Frames of a pair that the function has not sent yet.
    ///
    /// # Errors
    /// When the function says what cannot be.
    pub fn unsent(&mut self, pair: u16) -> Result<usize, NetError> {
        let Some(queue) = self.transmit.get_mut(usize::from(pair)) else { return Ok(0) };
        while let Some((number, _)) = queue.pop(&self.memory)? {
            queue.give_back(number);
        }
        self.device.progress();
        Ok(queue.under_way())
    }

    /// The next frame that a pair received, which is put in the place of what `frame` holds; `None` when there is none.
    ///
    /// # Errors
    /// When the connection failed, or the function says what cannot be.
    pub fn receive(
        &mut self,
        pair: u16,
        frame: &mut Vec<u8>,
    ) -> Result<Option<NetHeader>, NetError> {
        let mut length = 0;
        self.receive_in_place(pair, |part| {
            // What it held is written over.
            frame.resize(length + part.len(), 0);
            length += part.copy_to(&mut frame[length..]);
        })
    }

    /// As [`receive`](Net::receive), but the frame is shown to `look` where it lies, in as many parts as the function
    /// took buffers for it. The buffers go back to the function afterwards.
    ///
    /// # Errors
    /// As [`receive`](Net::receive); `look` may have seen a part of a frame then.
    #[inline]
    pub fn receive_in_place(
        &mut self,
        pair: u16,
        mut look: impl FnMut(DmaSlice<'_>),
    ) -> Result<Option<NetHeader>, NetError> {
        let Some(queue) = self.receive.get_mut(usize::from(pair)) else { return Ok(None) };
        let Some((number, length)) = queue.pop(&self.memory)? else {
            self.fill(pair)?;
            self.device.progress();
            return Ok(None);
        };
        let mut head = [0; HEADER_SIZE];
        let buffer = queue.buffer(&self.memory, number);
        buffer.copy_to(&mut head);
        let header = NetHeader::read_from_bytes(&head)
            .map_err(|_| NetError::Unsupported("a header of another size"))?;
        let length = (length as usize).min(queue.span.buffer).saturating_sub(HEADER_SIZE);
        if let Some(part) = buffer.part(HEADER_SIZE, length) {
            look(part);
        }
        queue.give_back(number);
        let mergeable = self.info.features & feature::MRG_RXBUF != 0;
        for _ in 1..if mergeable { header.num_buffers.get() } else { 1 } {
            let Some((number, length)) = queue.pop(&self.memory)? else {
                return Err(NetError::Unsupported("a frame of which buffers are missing"));
            };
            let length = (length as usize).min(queue.span.buffer);
            if let Some(part) = queue.buffer(&self.memory, number).part(0, length) {
                look(part);
            }
            queue.give_back(number);
        }
        // The function reads where this writes, so it is not done for each frame.
        if queue.unused() >= usize::from(queue.span.count).div_ceil(FILLED_BY) {
            self.fill(pair)?;
        }
        Ok(Some(header))
    }

    /// Sleeps until a pair may have received something, for so long at most. Without interrupts, or with a function in
    /// this very thread, it returns at once.
    pub fn wait(&mut self, pair: u16, limit: Duration) {
        if self.device.progress() {
            return;
        }
        let Some(queue) = self.receive.get_mut(usize::from(pair)) else { return };
        let Some(event) = self.events.get(usize::from(pair)) else {
            return std::thread::yield_now();
        };
        queue.want_interrupts(&self.memory, true);
        if !queue.has_used(&self.memory) {
            event.wait(u64::try_from(limit.as_nanos()).ok());
        }
        queue.want_interrupts(&self.memory, false);
    }

    /// Sends a command (class and number) by the control queue, and waits for its answer: whether it was done.
    ///
    /// # Errors
    /// When the function does not answer, or has no control queue.
    pub fn command(&mut self, command: (u8, u8), data: &[u8]) -> Result<bool, NetError> {
        let Some(queue) = &mut self.control else {
            return Err(NetError::Request("the function has no control queue"));
        };
        let said = [&[command.0, command.1], data].concat();
        if said.len() >= queue.span.buffer {
            return Err(NetError::Request("the command is longer than any"));
        }
        // None is free where the function has answered none of many.
        let number = queue.free().ok_or(NetError::TimedOut)?;
        let buffer = queue.buffer(&self.memory, number);
        buffer.copy_from(&said);
        queue.push(&self.memory, number, said.len(), 1);
        if queue.publish(&self.memory) {
            self.device.write(queue.notify_at, &queue.number.to_le_bytes())?;
        }
        let begun = std::time::Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some((answered, _)) = queue.pop(&self.memory)? {
                if answered != number {
                    // The late answer to a command that was given up.
                    queue.give_back(answered);
                    continue;
                }
                let mut answer = [0xff];
                if let Some(place) = buffer.part(said.len(), 1) {
                    place.copy_to(&mut answer);
                }
                queue.give_back(number);
                return Ok(answer == [net::control::OK]);
            }
            if !self.device.progress() {
                std::thread::yield_now();
            }
        }
        Err(NetError::TimedOut)
    }
}

/// Bytes of a pair's queues and buffers.
fn pair_bytes(options: NetOptions) -> usize {
    let NetOptions { size, buffer, .. } = options;
    let inward = QueueMemory { offset: 0, buffer, count: size, segments: 1 };
    inward.length(size) + outward(options, 0).length(size)
}

/// The memory of a pair's transmit queue, from `offset` on.
fn outward(options: NetOptions, offset: usize) -> QueueMemory {
    let NetOptions { size, segments, transmit_buffer: buffer, .. } = options;
    let most = u16::try_from(TRANSMIT_BYTES / buffer).unwrap_or(u16::MAX);
    QueueMemory { offset, buffer, count: (size / segments.max(1)).min(most), segments }
}

/// Bytes of all memory, and where the control queue is.
fn layout(options: NetOptions) -> (usize, usize) {
    let control = QueueMemory { offset: 0, buffer: 4096, count: 64, segments: 2 };
    let at = usize::from(options.pairs) * pair_bytes(options);
    (at + control.length(64), at)
}
