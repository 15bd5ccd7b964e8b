//! A driver of the accelerator's functions.
//!
//! [`Accel`] opens one at a vfio-user socket. A whole request is [`run`](Accel::run); who wants many
//! under way puts descriptors into a queue itself and polls. Like the drive's, it lives in one thread,
//! polls, and makes no system call while both sides are busy.

use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Descriptor, OPERATIONS, Operation, STAGES,
    Status, queue_state, registers as reg, shadow,
};

use crate::DriveError;
use crate::device::{Device, connect};

/// Where the shared memory begins in the function's address space.
const IOVA: u64 = 1 << 32;
const PAGE: usize = 4096;
/// How long the function may take for a request.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Looks at the completion ring between two looks at the clock.
const SPINS: u32 = 1024;
/// After this long without an answer the processor is offered to others between looks.
const PATIENCE: Duration = Duration::from_millis(1);

/// Why the accelerator did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum AccelError {
    /// The connection failed, or the function turned us away.
    #[error("accelerator: {0}")]
    Client(#[from] rackbus_pci::vfio_user::ClientError),
    /// The function cannot be driven.
    #[error("accelerator: {0}")]
    Device(DriveError),
    /// Memory to share with it could not be had.
    #[error("accelerator: memory to share with it: {0}")]
    Memory(#[from] rackbus_memory::RegionError),
    /// It is not one that this driver can use.
    #[error("accelerator: {0}")]
    Unsupported(&'static str),
    /// A request is not within what it or its queue can do.
    #[error("accelerator: {0}")]
    Request(&'static str),
    /// An operation ended with an error.
    #[error("accelerator: {operation} failed: {status}")]
    Operation {
        /// What was asked.
        operation: &'static str,
        /// What it answered.
        status: Status,
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
pub struct Options {
    /// Queue pairs.
    pub queues: u16,
    /// Descriptors under way in each, 1 to 4095.
    pub depth: u16,
    /// Bytes of memory for data.
    pub data: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { queues: 1, depth: 32, data: 4 << 20 }
    }
}

/// What a function says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccelInfo {
    /// Queue pairs that it has.
    pub queues: u32,
    /// Contexts at most.
    pub contexts: u32,
    /// Bytes of a message at most.
    pub largest: u32,
    /// The operations that it can do.
    pub operations: Vec<Operation>,
}

/// What is to be done with a message.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work<'a> {
    /// The operations, in order, each with its context or 0.
    pub stages: &'a [(Operation, u16)],
    /// Nonce or first counter block.
    pub nonce: [u8; 16],
    /// Bytes at the beginning of the input that are authenticated only.
    pub associated: u32,
}

/// A function in use.
pub struct Accel {
    device: Box<dyn Device>,
    memory: SharedMemory,
    info: AccelInfo,
    queues: Vec<Ring>,
    /// Offset of the data, and its bytes.
    data: (usize, usize),
}

impl std::fmt::Debug for Accel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Accel").field("info", &self.info).finish_non_exhaustive()
    }
}

/// A queue pair.
#[derive(Debug)]
struct Ring {
    number: u16,
    submission: usize,
    completion: usize,
    entries: u32,
    depth: u32,
    tail: u32,
    rung: u32,
    head: u32,
    phase: bool,
    under_way: u32,
}

impl Accel {
    /// Opens the function at the vfio-user socket `path`; each register access takes at most `limit`.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn open(path: &Path, limit: Duration, options: Options) -> Result<Accel, AccelError> {
        Accel::start(Box::new(connect(path, limit)?), options)
    }

    /// Brings a function up.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn start(mut device: Box<dyn Device>, options: Options) -> Result<Accel, AccelError> {
        let Options { queues, depth, data } = options;
        if !(1..=4095).contains(&depth) || queues == 0 {
            return Err(AccelError::Request("1 to 4095 descriptors may be under way"));
        }
        let entries = (u32::from(depth) + 1).next_power_of_two();
        let page_up = |bytes: usize| bytes.next_multiple_of(PAGE);
        let submission = page_up(entries as usize * DESCRIPTOR_SIZE);
        let completion = page_up(entries as usize * COMPLETION_SIZE);
        let begin = PAGE + usize::from(queues) * (submission + completion);
        let length = begin + page_up(data.max(PAGE));
        let memory = SharedMemory::create("accel-driver", length as u64)?;
        device.start(IOVA, &memory)?;
        let info = identify(&mut *device)?;
        if u32::from(queues) > info.queues {
            return Err(AccelError::Request("the function has fewer queues"));
        }
        write4(&mut *device, reg::CONTROL, 0)?;
        device.write(reg::SHADOW, &IOVA.to_le_bytes())?;
        write4(&mut *device, reg::CONTROL, 1)?;
        let ring = |number: u16| {
            let at = PAGE + usize::from(number) * (submission + completion);
            Ring {
                number,
                submission: at,
                completion: at + submission,
                entries,
                depth: depth.into(),
                tail: 0,
                rung: 0,
                head: 0,
                phase: true,
                under_way: 0,
            }
        };
        let rings: Vec<Ring> = (0..queues).map(ring).collect();
        for ring in &rings {
            ring.make(&mut *device)?;
        }
        Ok(Accel { device, memory, info, queues: rings, data: (begin, length - begin) })
    }

    /// What the function says of itself.
    pub fn info(&self) -> &AccelInfo {
        &self.info
    }

    /// Bytes of memory for data.
    pub fn data_size(&self) -> usize {
        self.data.1
    }

    /// The memory for data: `length` bytes from `offset` on.
    pub fn data(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        let end = offset.checked_add(length)?;
        (end <= self.data.1)
            .then(|| self.memory.whole().part(self.data.0 + offset, length))
            .flatten()
    }

    /// The address by which the function knows a place in the memory for data.
    pub fn address(&self, offset: usize) -> u64 {
        IOVA + (self.data.0 + offset) as u64
    }

    /// Puts a descriptor into a queue; the function sees it after [`ring`](Accel::ring).
    ///
    /// # Errors
    /// [`AccelError::Request`] when the queue is full, or not there.
    #[inline]
    pub fn push(&mut self, queue: usize, descriptor: &Descriptor) -> Result<(), AccelError> {
        let Some(ring) = self.queues.get_mut(queue) else {
            return Err(AccelError::Request("there is no such queue"));
        };
        if ring.under_way == ring.depth {
            return Err(AccelError::Request("the queue is full"));
        }
        let at = ring.submission + ring.tail as usize * DESCRIPTOR_SIZE;
        self.memory.whole().write_obj(at, descriptor);
        ring.tail = (ring.tail + 1) & (ring.entries - 1);
        ring.under_way += 1;
        Ok(())
    }

    /// Tells the function of the descriptors put in since the last time.
    ///
    /// # Errors
    /// When the connection failed.
    #[inline]
    pub fn ring(&mut self, queue: usize) -> Result<(), AccelError> {
        let Some(ring) = self.queues.get_mut(queue).filter(|ring| ring.tail != ring.rung) else {
            return Ok(());
        };
        ring.rung = ring.tail;
        ring.doorbell(&self.memory, &mut *self.device, 0, ring.tail)
    }

    /// The next completion of a queue, if there is one.
    ///
    /// # Errors
    /// When the connection failed.
    #[inline]
    pub fn poll(&mut self, queue: usize) -> Result<Option<Completion>, AccelError> {
        let Some(ring) = self.queues.get_mut(queue) else { return Ok(None) };
        let memory = self.memory.whole();
        let at = ring.completion + ring.head as usize * COMPLETION_SIZE;
        // The half with the phase tag, which was written last.
        let high = memory.load_u64(at + 8, Ordering::Acquire).unwrap_or(0);
        if (high >> 32 & 1 != 0) != ring.phase {
            self.device.progress();
            return Ok(None);
        }
        let low = memory.load_u64(at, Ordering::Relaxed).unwrap_or(0);
        ring.head = (ring.head + 1) & (ring.entries - 1);
        if ring.head == 0 {
            ring.phase = !ring.phase;
        }
        ring.under_way = ring.under_way.saturating_sub(1);
        ring.doorbell(&self.memory, &mut *self.device, 4, ring.head)?;
        Ok(Some(Completion {
            output: low as u32,
            value: (low >> 32) as u32,
            head: high as u16,
            id: (high >> 16) as u16,
            status: (high >> 32) as u16 >> 1,
            reserved: 0,
        }))
    }

    /// Descriptors of a queue that are under way.
    pub fn under_way(&self, queue: usize) -> u32 {
        self.queues.get(queue).map_or(0, |ring| ring.under_way)
    }

    /// A descriptor for `work` on data at offset `input` with room for output at offset `output`.
    pub fn describe(
        &self,
        work: &Work<'_>,
        (input, input_length): (usize, usize),
        (output, output_length): (usize, usize),
    ) -> Result<Descriptor, AccelError> {
        if work.stages.len() > STAGES {
            return Err(AccelError::Request("a pipeline has 1 to 4 stages"));
        }
        let length = |length: usize| {
            u32::try_from(length).map_err(|_| AccelError::Request("the message is too large"))
        };
        let mut descriptor = Descriptor {
            associated: work.associated,
            input: self.address(input),
            output: self.address(output),
            input_length: length(input_length)?,
            output_length: length(output_length)?,
            nonce: work.nonce,
            ..Descriptor::default()
        };
        for (nth, (operation, context)) in work.stages.iter().enumerate() {
            (descriptor.stages[nth], descriptor.contexts[nth]) = (*operation as u8, *context);
        }
        Ok(descriptor)
    }

    /// Does `work` on `input` and waits for it. `room` is how many bytes may come out.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn run(
        &mut self,
        work: &Work<'_>,
        input: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, AccelError> {
        let output = input.len().next_multiple_of(64);
        let descriptor = self.describe(work, (0, input.len()), (output, room))?;
        let too_large = AccelError::Request("the message does not fit into the memory for data");
        let Some(to) = self.data(0, input.len()) else { return Err(too_large) };
        to.copy_from(input);
        if self.data(output, room).is_none() {
            return Err(too_large);
        }
        let completion = self.finish(work, &descriptor);
        let written = completion.as_ref().map_or(0, |completion| completion.output as usize);
        let mut result = vec![0; written.min(room)];
        if let Some(from) = self.data(output, result.len()) {
            from.copy_to(&mut result);
        }
        // No message stays in memory that is used again, also of one that failed.
        let out = if completion.is_ok() { result.len() } else { room };
        for (at, length) in [(0, input.len()), (output, out)] {
            if let Some(used) = self.data(at, length) {
                used.fill(0);
            }
        }
        completion.map(|_| result)
    }

    /// Keeps a key, or patterns, for `operation`; its handle.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn create_context(&mut self, operation: Operation, data: &[u8]) -> Result<u16, AccelError> {
        let stages = [(Operation::CreateContext, 0), (operation, 0)];
        let work = Work { stages: &stages, ..Work::default() };
        let Some(to) = self.data(0, data.len()) else {
            return Err(AccelError::Request("it does not fit into the memory for data"));
        };
        to.copy_from(data);
        let descriptor = self.describe(&work, (0, data.len()), (0, 0))?;
        let completion = self.finish(&work, &descriptor);
        if let Some(used) = self.data(0, data.len()) {
            used.fill(0);
        }
        u16::try_from(completion?.value)
            .map_err(|_| AccelError::Unsupported("it answered with a handle that is none"))
    }

    /// Wipes a context.
    ///
    /// # Errors
    /// [`AccelError`].
    pub fn destroy_context(&mut self, handle: u16) -> Result<(), AccelError> {
        let stages = [(Operation::DestroyContext, handle)];
        let work = Work { stages: &stages, ..Work::default() };
        let descriptor = self.describe(&work, (0, 0), (0, 0))?;
        self.finish(&work, &descriptor).map(drop)
    }

    fn finish(&mut self, work: &Work<'_>, from: &Descriptor) -> Result<Completion, AccelError> {
        if self.under_way(0) > 0 {
            return Err(AccelError::Request("the queue has other descriptors under way"));
        }
        self.push(0, from)?;
        self.ring(0)?;
        let completion = self.wait(0)?;
        match Status::from_number(completion.status) {
            Some(Status::Success) => Ok(completion),
            Some(status) => {
                let operation = work.stages.first().map_or("nothing", |stage| stage.0.name());
                Err(AccelError::Operation { operation, status })
            }
            None => Err(AccelError::Unsupported("it answered with a status that is none")),
        }
    }

    /// Waits for the next completion of a queue.
    ///
    /// # Errors
    /// [`AccelError::TimedOut`], or when the connection or the queue failed.
    pub fn wait(&mut self, queue: usize) -> Result<Completion, AccelError> {
        let start = Instant::now();
        loop {
            for _ in 0..SPINS {
                if let Some(completion) = self.poll(queue)? {
                    return Ok(completion);
                }
                std::hint::spin_loop();
            }
            let waited = start.elapsed();
            if waited > TIME_LIMIT {
                return Err(AccelError::TimedOut);
            }
            if waited > PATIENCE {
                let state = reg::QUEUE + queue as u64 * reg::QUEUE_STRIDE + reg::STATE;
                match read4(&mut *self.device, state)? {
                    queue_state::ON => {}
                    u32::MAX => return Err(AccelError::Device(DriveError::Absent)),
                    _ => return Err(AccelError::Request("the queue pair failed")),
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

impl Ring {
    fn make(&self, device: &mut dyn Device) -> Result<(), AccelError> {
        let base = reg::QUEUE + u64::from(self.number) * reg::QUEUE_STRIDE;
        let address = |offset: usize| (IOVA + offset as u64).to_le_bytes();
        device.write(base + reg::SUBMISSION, &address(self.submission))?;
        device.write(base + reg::COMPLETION, &address(self.completion))?;
        write4(device, base + reg::RING_ENTRIES, self.entries)?;
        write4(device, base + reg::ENABLE, 1)?;
        match read4(device, base + reg::STATE)? {
            queue_state::ON => Ok(()),
            _ => Err(AccelError::Unsupported("it refuses the queue pair")),
        }
    }

    /// Stores a doorbell's value in the shadow page, and in the register if the function sleeps.
    #[inline]
    fn doorbell(
        &self,
        memory: &SharedMemory,
        device: &mut dyn Device,
        which: usize,
        value: u32,
    ) -> Result<(), AccelError> {
        let memory = memory.whole();
        let at = shadow::DOORBELL + usize::from(self.number) * shadow::STRIDE + which;
        memory.store_u32(at, value, Ordering::Release);
        fence(Ordering::SeqCst);
        if memory.load_u32(shadow::ASLEEP, Ordering::Relaxed) == Some(1) {
            let register = reg::DOORBELL + u64::from(self.number) * reg::DOORBELL_STRIDE;
            device.write(register + which as u64, &value.to_le_bytes())?;
        }
        Ok(())
    }
}

fn identify(device: &mut dyn Device) -> Result<AccelInfo, AccelError> {
    match read4(device, reg::MAGIC)? {
        u32::MAX => return Err(AccelError::Device(DriveError::Absent)),
        reg::MAGIC_VALUE => {}
        _ => return Err(AccelError::Unsupported("it is no accelerator")),
    }
    if read4(device, reg::VERSION)? != reg::VERSION_VALUE {
        return Err(AccelError::Unsupported("its interface is of another version"));
    }
    let mut operations = [0; 8];
    device.read(reg::OPERATIONS, &mut operations)?;
    let bits = u64::from_le_bytes(operations);
    let can = |operation: &Operation| bits >> *operation as u8 & 1 == 1;
    Ok(AccelInfo {
        queues: read4(device, reg::QUEUES)?,
        contexts: read4(device, reg::CONTEXTS)?,
        largest: read4(device, reg::LARGEST)?,
        operations: OPERATIONS.into_iter().filter(can).collect(),
    })
}

fn read4(device: &mut dyn Device, offset: u64) -> Result<u32, AccelError> {
    let mut data = [0; 4];
    device.read(offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn write4(device: &mut dyn Device, offset: u64, value: u32) -> Result<(), AccelError> {
    Ok(device.write(offset, &value.to_le_bytes())?)
}
