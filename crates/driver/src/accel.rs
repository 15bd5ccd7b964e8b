//! A driver of the accelerator's functions.
//!
//! [`Accel`] opens one at a vfio-user socket, or one of this machine's. A whole request is
//! [`run`](Accel::run); who wants many under way puts descriptors into a queue itself and polls. Like the
//! drive's, it lives in one thread, and makes no system call while both sides are busy. Who waits polls for a
//! while and then sleeps until an interrupt.

mod layout;
mod registers;
mod requests;
mod ring;
mod source;
mod submitter;

use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, Event, SharedMemory};
use rackbus_pci::machine::FunctionKind;
use rackbus_spec::accel::{
    Completion, DEVICE_ID, Descriptor, Operation, OperationStatus, VENDOR_ID, queue_state,
    registers as reg,
};

use layout::AccelLayout;
pub use layout::MessageSpan;
use registers::{identify, settled, write4};
use ring::AccelRing;
pub use source::{DriveRange, DriveSource, SourceError};
pub use submitter::{FinishedRequest, Ranges, Submitter};

use crate::DriveError;
use crate::device::{DmaAddresses, DrivenFunction, FunctionPlace};

/// What the functions are.
const KIND: FunctionKind = FunctionKind::Identity(VENDOR_ID, DEVICE_ID);
/// Queue pairs that there are registers for.
const MOST_QUEUES: u16 = 63;
/// Where the shared memory begins in the function's address space, where the driver can choose.
const IOVA: u64 = 1 << 32;
/// Where memory of other functions' drivers begins there; IOMMUs have 39 bits of addresses at least.
const OTHERS: u64 = 1 << 38;
/// How long the function may take for a request.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Looks at the completion ring between two looks at the clock.
const SPINS: u32 = 256;
/// Who waits polls for so long, and then sleeps.
const POLLED: Duration = Duration::from_micros(100);
/// The same where nothing rings, and how long each sleep is then.
const PATIENCE: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(100);
/// Who sleeps looks so often whether the function is still there.
const LOOK: Duration = Duration::from_millis(200);

/// Of a call for a queue that was not opened.
fn no_queue() -> AccelError {
    AccelError::Request("there is no such queue")
}

/// Why the accelerator did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The connection failed, or the function turned us away.
    #[error("accelerator: {0}")]
    Client(#[from] rackbus_pci::vfio_user::ClientError),
    /// The function cannot be driven.
    #[error("accelerator: {0}")]
    Device(DriveError),
    /// Memory to share with it could not be obtained.
    #[error("accelerator: memory to share with it: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// It is not one that this driver can use.
    #[error("accelerator: {0}")]
    Unsupported(&'static str),
    /// A request is not within what it or its queue can do.
    #[error("accelerator: {0}")]
    Request(&'static str),
    /// As many descriptors are under way in the queue as may be.
    #[error("accelerator: the queue is full")]
    Full,
    /// An operation ended with an error.
    #[error("accelerator: {operation} failed: {status}")]
    Operation {
        /// Name of the operation that failed.
        operation: &'static str,
        /// The status in its completion.
        status: OperationStatus,
    },
    /// It did not answer in time.
    #[error("accelerator: no answer in time; its lender may be gone")]
    TimedOut,
}

impl From<DriveError> for AccelError {
    fn from(error: DriveError) -> AccelError {
        match error {
            DriveError::Client(error) => AccelError::Client(error),
            DriveError::Memory(error) => AccelError::Memory(error),
            other => AccelError::Device(other),
        }
    }
}

/// How to use a function.
#[derive(Debug, Clone, Copy)]
pub struct AccelOptions {
    /// How many queue pairs of the function are used.
    pub queues: u16,
    /// Descriptors under way in each, 1 to 4095.
    pub depth: u16,
    /// Bytes of memory for data.
    pub data: usize,
    /// Who waits long sleeps until an interrupt, where the function has any.
    pub interrupts: bool,
}

impl Default for AccelOptions {
    fn default() -> AccelOptions {
        AccelOptions { queues: 1, depth: 32, data: 4 << 20, interrupts: true }
    }
}

/// What a function says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccelInfo {
    /// Queue pairs that it has.
    pub queues: u32,
    /// How many contexts the function keeps at most.
    pub contexts: u32,
    /// Bytes of a message at most.
    pub largest: u32,
    /// The operations that it can do.
    pub operations: Vec<Operation>,
}

/// What is to be done with a message.
#[derive(Debug, Clone, Copy, Default)]
pub struct MessageWork<'a> {
    /// The operations, in order, each with its context or 0.
    pub stages: &'a [(Operation, u16)],
    /// Nonce or first counter block.
    pub nonce: [u8; 16],
    /// Bytes at the beginning of the input that are authenticated only.
    pub associated: u32,
}

/// A function in use.
pub struct Accel {
    device: Box<dyn DrivenFunction>,
    memory: SharedMemory,
    addresses: DmaAddresses,
    layout: AccelLayout,
    info: AccelInfo,
    queues: Vec<AccelRing>,
    /// What rings for each vector.
    events: Vec<Event>,
    data_size: usize,
    /// Something under way in a queue was given up by who waited for it.
    late: bool,
    /// When was looked last whether that can still end.
    looked: Option<Instant>,
}

impl std::fmt::Debug for Accel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Accel").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Accel {
    /// Opens the function at a place; each register access of one behind a socket takes at most `limit`.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn open_at(
        place: &FunctionPlace,
        limit: Duration,
        options: AccelOptions,
    ) -> Result<Accel, AccelError> {
        Accel::start(place.open(limit, KIND)?, options)
    }

    /// Opens the function at the vfio-user socket `path`; each register access takes at most `limit`.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn open(path: &Path, limit: Duration, options: AccelOptions) -> Result<Accel, AccelError> {
        Accel::open_at(&FunctionPlace::Socket(path.to_owned()), limit, options)
    }

    /// Opens the function at this PCI address of this machine's; see [`rackbus_pci::machine`] for how it has
    /// to be set up.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn open_pci(address: &str, options: AccelOptions) -> Result<Accel, AccelError> {
        Accel::open_at(&FunctionPlace::Machine(address.to_owned()), TIME_LIMIT, options)
    }

    /// The addresses of the accelerators that this machine has.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn find() -> Result<Vec<String>, AccelError> {
        let found = rackbus_pci::machine::find(VENDOR_ID, DEVICE_ID);
        Ok(found.map_err(DriveError::from)?)
    }

    /// Brings a function up.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn start(
        device: Box<dyn DrivenFunction>,
        options: AccelOptions,
    ) -> Result<Accel, AccelError> {
        let AccelOptions { queues, depth, data, interrupts } = options;
        if !(1..=4095).contains(&depth) || queues == 0 {
            return Err(AccelError::Request("1 to 4095 descriptors may be under way"));
        }
        if queues > MOST_QUEUES {
            return Err(AccelError::Request("the function has fewer queues"));
        }
        let layout = AccelLayout::new(queues, depth, data);
        let mut device = device;
        let memory = device.memory("accel-driver", layout.length)?;
        // Declared behind the memory: where this fails, the function is stopped before its memory is given back.
        let mut device = device;
        let addresses = device.start(IOVA, &memory)?;
        let info = identify(&mut *device)?;
        if u32::from(queues) > info.queues {
            return Err(AccelError::Request("the function has fewer queues"));
        }
        let events = if interrupts { device.interrupts(queues)? } else { Vec::new() };
        write4(&mut *device, reg::CONTROL, 0)?;
        settled(&mut *device, reg::STATUS, |status| status == 0)?;
        let page = addresses.at(0).map_or(0, |(address, _)| address);
        device.write(reg::SHADOW, &page.to_le_bytes())?;
        write4(&mut *device, reg::CONTROL, 1)?;
        settled(&mut *device, reg::STATUS, |status| status == 1)?;
        let mut rings = Vec::new();
        for (number, place) in (0..queues).zip(&layout.rings) {
            let mut ring = AccelRing::new(number, *place, depth);
            if !events.is_empty() {
                ring.vector = u32::from(number) % events.len() as u32;
            }
            ring.polls(&memory, true);
            ring.make(&mut *device, &addresses)?;
            rings.push(ring);
        }
        let data_size = layout.length - layout.data;
        let (queues, late, looked) = (rings, false, None);
        Ok(Accel {
            device,
            memory,
            addresses,
            layout,
            info,
            queues,
            events,
            data_size,
            late,
            looked,
        })
    }

    /// What the function says of itself.
    pub fn info(&self) -> &AccelInfo {
        &self.info
    }

    /// Bytes of memory for data.
    pub fn data_size(&self) -> usize {
        self.data_size
    }

    /// The memory for data: `length` bytes from `offset` on.
    pub fn data(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        let end = offset.checked_add(length)?;
        (end <= self.data_size)
            .then(|| self.memory.whole().part(self.layout.data + offset, length))
            .flatten()
    }

    /// The address by which the function knows a place in the memory for data; 0 outside of it.
    pub fn address(&self, offset: usize) -> u64 {
        let at = self.data_offset(offset, 0).ok().and_then(|at| self.addresses.at(at));
        at.map_or(0, |(address, _)| address)
    }

    /// A range of the memory for data, as descriptors name it.
    ///
    /// # Errors
    /// When it is not in there, or the function does not reach it in one piece, which happens without an IOMMU.
    pub fn span(&self, offset: usize, length: usize) -> Result<MessageSpan, AccelError> {
        layout::span(&self.addresses, self.data_offset(offset, length)?, length)
    }

    /// Several ranges (offset and length each) as one message. Their list is written into the memory for data at
    /// offset `at`, 16 bytes for each; what the function reaches in several pieces takes more. The list must
    /// not change until the descriptor has ended.
    ///
    /// # Errors
    /// When something is not in the memory for data, or there are more than `most` segments, or 256.
    pub fn list(
        &self,
        (at, most): (usize, usize),
        ranges: Ranges<'_>,
    ) -> Result<MessageSpan, AccelError> {
        let at = self.data_offset(at, 0)?;
        let within = |(offset, length): &(usize, usize)| {
            Ok::<_, AccelError>((self.data_offset(*offset, *length)?, *length))
        };
        let ranges = ranges.iter().map(within).collect::<Result<Vec<_>, _>>()?;
        layout::list(&self.memory, &self.addresses, (at, most), ranges.into_iter())
    }

    /// Where something in the memory for data is in the shared memory.
    fn data_offset(&self, offset: usize, length: usize) -> Result<usize, AccelError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.data_size => Ok(self.layout.data + offset),
            _ => Err(AccelError::Request("the message does not fit into the memory for data")),
        }
    }

    /// Up to `most` offsets of `length` bytes each in the first `room` bytes of the memory for data, which the function
    /// reaches in one piece each.
    fn places(&self, room: usize, length: usize, most: usize) -> Vec<usize> {
        let data = self.layout.data;
        let places = self.addresses.places((data, data + room), length, most);
        places.into_iter().map(|at| at - data).collect()
    }

    /// Lets the function read memory of another one's driver; the addresses at which it does. One at a time.
    ///
    /// # Errors
    /// When it cannot.
    pub fn reach(&mut self, memory: &SharedMemory) -> Result<DmaAddresses, AccelError> {
        Ok(self.device.share(OTHERS, memory)?)
    }

    /// Takes away `length` bytes of such memory.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn leave(&mut self, length: usize) -> Result<(), AccelError> {
        Ok(self.device.unshare(OTHERS, length)?)
    }

    /// Puts a descriptor into a queue; the function sees it after [`ring`](Accel::ring). Nothing is put into any queue
    /// while a whole request that failed is under way: the function may still read and write the memory for data.
    ///
    /// # Errors
    /// [`AccelError::Full`]; [`AccelError::Request`] when the queue is not there, or such a request is under way.
    #[inline]
    pub fn push(&mut self, queue: usize, descriptor: &Descriptor) -> Result<(), AccelError> {
        self.check_late()?;
        let ring = self.queues.get_mut(queue).ok_or_else(no_queue)?;
        if ring.under_way == ring.depth {
            return Err(AccelError::Full);
        }
        ring.push(&self.memory, descriptor);
        Ok(())
    }

    /// Tells the function of the descriptors put in since the last time.
    ///
    /// # Errors
    /// When the connection failed, or the queue is not there.
    #[inline]
    pub fn ring(&mut self, queue: usize) -> Result<(), AccelError> {
        let ring = self.queues.get_mut(queue).ok_or_else(no_queue)?;
        ring.ring(&self.memory, &mut *self.device)
    }

    /// The next completion of a queue, if there is one; none of what was given up.
    ///
    /// # Errors
    /// When the connection failed, or the queue is not there.
    #[inline]
    pub fn poll(&mut self, queue: usize) -> Result<Option<Completion>, AccelError> {
        if self.late {
            self.forget();
        }
        let ring = self.queues.get_mut(queue).ok_or_else(no_queue)?;
        if ring.given_up {
            return Ok(None);
        }
        let taken = ring.take(&self.memory);
        if taken.is_none() {
            self.device.progress();
        }
        Ok(taken)
    }

    /// How many descriptors may be under way in a queue.
    pub fn depth(&self, queue: usize) -> u32 {
        self.queues.get(queue).map_or(0, |ring| ring.depth)
    }

    /// Descriptors of a queue that are under way.
    pub fn under_way(&self, queue: usize) -> u32 {
        self.queues.get(queue).map_or(0, |ring| ring.under_way)
    }

    /// Waits for the next completion of a queue.
    ///
    /// # Errors
    /// [`AccelError::TimedOut`], or when the connection or the queue failed, or the queue is not there.
    pub fn wait(&mut self, queue: usize) -> Result<Completion, AccelError> {
        self.wait_for(queue, TIME_LIMIT)?.ok_or(AccelError::TimedOut)
    }

    /// Waits for the next completion of a queue, for so long at most.
    ///
    /// # Errors
    /// When the connection or the queue failed, or the queue is not there.
    pub fn wait_for(
        &mut self,
        queue: usize,
        limit: Duration,
    ) -> Result<Option<Completion>, AccelError> {
        let (start, mut looked) = (Instant::now(), Duration::ZERO);
        let polled = if self.events.is_empty() { PATIENCE } else { POLLED };
        loop {
            for _ in 0..SPINS {
                if let Some(completion) = self.poll(queue)? {
                    return Ok(Some(completion));
                }
                std::hint::spin_loop();
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Ok(None);
            }
            if waited < polled {
                continue;
            }
            if waited - looked >= LOOK {
                looked = waited;
                self.look(queue)?;
            }
            self.sleep(queue, (limit - waited).min(LOOK));
        }
    }

    /// Whether a queue pair still works.
    fn look(&mut self, queue: usize) -> Result<(), AccelError> {
        let Some(ring) = self.queues.get(queue) else {
            return Err(AccelError::Request("there is no such queue"));
        };
        match ring.state(&mut *self.device)? {
            queue_state::ON => Ok(()),
            u32::MAX => Err(AccelError::Device(DriveError::Absent)),
            _ => Err(AccelError::Request("the queue pair failed")),
        }
    }

    /// Sleeps until there may be a completion. A device without a thread of its own needs this one.
    fn sleep(&mut self, queue: usize, limit: Duration) {
        if self.device.progress() {
            return;
        }
        let Some(ring) = self.queues.get(queue) else { return };
        match self.events.get(ring.vector as usize) {
            None => std::thread::sleep(NAP),
            Some(event) => {
                ring.polls(&self.memory, false);
                if !ring.some(&self.memory) {
                    event.wait(u64::try_from(limit.as_nanos()).ok());
                }
                ring.polls(&self.memory, true);
            }
        }
    }
}
