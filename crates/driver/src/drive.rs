//! Bringing a drive up, and whole requests on it.

mod elsewhere;

use std::path::Path;
use std::time::{Duration, Instant};

use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_spec::nvme::command::{
    Cdw0, CreateCqCdw11, CreateSqCdw11, DsmCdw11, QueueCdw10, RwCdw12,
};
use rackbus_spec::nvme::data::DsmRange;
use rackbus_spec::nvme::identify::{self as id, IdentifyController, IdentifyNamespace};
use rackbus_spec::nvme::registers::{self as reg, Aqa, Cap, Cc, Csts};
use rackbus_spec::nvme::{AdminOpcode, IoOpcode, Sqe, Status};
use zerocopy::{FromZeros, IntoBytes};

use crate::DriveError;
use crate::device::{Device, connect};
use crate::queue::{Buffer, CQ_FACTOR, Completed, PAGE, Place, Queue, ring_entries};

/// Where the shared memory begins in the drive's address space, where the driver can choose.
const IOVA: u64 = 1 << 32;
/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 16;
/// How long a drive may take for a command.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// After this long without an answer its status is looked at, and then again and again.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Looks at the completion queue between two looks at the clock.
const SPINS: u32 = 1024;
/// After this long without an answer the processor is offered to others between looks.
const PATIENCE: Duration = Duration::from_millis(1);

// The shared memory, in bytes from its start: pages for the two shadow buffers, the admin queues
// and identify data; then the I/O queue pair; then the data.
const SHADOW_VALUES: usize = 0;
const SHADOW_EVENTS: usize = PAGE;
const ADMIN_SQ: usize = 2 * PAGE;
const ADMIN_CQ: usize = 3 * PAGE;
const IDENTIFY: usize = 4 * PAGE;
const IO_SQ: usize = 5 * PAGE;

/// How to use a drive.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Commands in flight, 1 to 512.
    pub depth: u16,
    /// Bytes of memory for data.
    pub data: usize,
}

impl Default for Options {
    /// 32 commands, 4 MiB.
    fn default() -> Self {
        Options { depth: 32, data: 4 << 20 }
    }
}

/// What the drive says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveInfo {
    /// Serial number, without the spaces that pad it.
    pub serial: String,
    /// Model number, without the spaces that pad it.
    pub model: String,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Capacity in logical blocks.
    pub blocks: u64,
    /// Most bytes that one command moves.
    pub max_transfer: usize,
    /// Whether writes need a flush to survive a loss of power.
    pub volatile_cache: bool,
}

/// An open drive with one I/O queue.
pub struct Drive {
    device: Box<dyn Device>,
    memory: SharedMemory,
    queue: Queue,
    info: DriveInfo,
    data: Buffer,
}

impl std::fmt::Debug for Drive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drive").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drive {
    /// Opens the drive at a vfio-user socket.
    ///
    /// # Errors
    /// [`DriveError`] when it cannot be reached, started or used.
    pub fn open(path: &Path, options: Options) -> Result<Drive, DriveError> {
        Drive::with_device(Box::new(connect(path, TIME_LIMIT)?), options)
    }

    /// Starts the drive behind `device`.
    ///
    /// # Errors
    /// As [`open`](Drive::open).
    pub fn with_device(mut device: Box<dyn Device>, options: Options) -> Result<Drive, DriveError> {
        if !(1..=512).contains(&options.depth) {
            return Err(DriveError::Request("1 to 512 commands may be in flight"));
        }
        let (depth, entries) = (options.depth, ring_entries(options.depth));
        let page_up = |bytes: usize| bytes.next_multiple_of(PAGE);
        let io_cq = IO_SQ + page_up(usize::from(entries) * 64);
        let data = io_cq + page_up(usize::from(entries * CQ_FACTOR) * 16);
        let length = data + page_up(options.data.max(PAGE));
        let memory = device.memory("nvme-driver", length)?;
        let iova = device.start(IOVA, &memory)?.whole();
        let iova = iova.ok_or(DriveError::Unsupported("it needs more memory in one piece"))?;
        let dstrd = enable(&mut *device, iova)?;
        let queue = admin_queue(&memory, iova, dstrd);
        let mut admin = Admin { device: &mut *device, queue, iova };
        let (mut info, sgl, shadowed) = admin.identify(&memory)?;
        if !sgl {
            info.max_transfer = info.max_transfer.min(PAGE);
        }
        let shadow = if shadowed { Some(admin.shadow_doorbells()?) } else { None };
        let place = Place { id: 1, sq: IO_SQ, cq: io_cq, entries, depth, dstrd, shadow };
        admin.create_queues(place)?;
        let queue = Queue::new(&memory, iova, place, sgl);
        let data = Buffer { offset: data, length: length - data };
        Ok(Drive { device, memory, queue, info, data })
    }

    /// What the drive says of itself.
    pub fn info(&self) -> &DriveInfo {
        &self.info
    }

    /// The queue, with the device that it is used with and the memory for data.
    pub fn parts(&mut self) -> (&mut Queue, &mut dyn Device, Buffer) {
        (&mut self.queue, &mut *self.device, self.data)
    }

    /// `length` bytes of the memory for data from `offset` on.
    pub fn buffer(&self, offset: usize, length: usize) -> Option<Buffer> {
        let end = offset.checked_add(length)?;
        (end <= self.data.length).then(|| Buffer { offset: self.data.offset + offset, length })
    }

    /// Reads `out.len()` bytes, whole blocks, from block `lba` on.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn read(&mut self, lba: u64, out: &mut [u8]) -> Result<(), DriveError> {
        let pieces = self.pieces(lba, out.len())?;
        for ((lba, blocks, buffer), out) in pieces.iter().zip(out.chunks_mut(self.piece())) {
            self.transfer(IoOpcode::Read, *lba, *blocks, *buffer, false)?;
            self.slice(*buffer)?.copy_to(out);
        }
        Ok(())
    }

    /// Writes `data`, whole blocks, from block `lba` on. With `fua`, it is on the medium on
    /// return.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn write(&mut self, lba: u64, data: &[u8], fua: bool) -> Result<(), DriveError> {
        let pieces = self.pieces(lba, data.len())?;
        for ((lba, blocks, buffer), data) in pieces.iter().zip(data.chunks(self.piece())) {
            self.slice(*buffer)?.copy_from(data);
            self.transfer(IoOpcode::Write, *lba, *blocks, *buffer, fua)?;
        }
        Ok(())
    }

    /// Whether the drive has `data`, whole blocks, from block `lba` on.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn compare(&mut self, lba: u64, data: &[u8]) -> Result<bool, DriveError> {
        let pieces = self.pieces(lba, data.len())?;
        for ((lba, blocks, buffer), data) in pieces.iter().zip(data.chunks(self.piece())) {
            self.slice(*buffer)?.copy_from(data);
            match self.transfer(IoOpcode::Compare, *lba, *blocks, *buffer, false) {
                Ok(()) => {}
                Err(DriveError::Command { status, .. })
                    if status.code() == Status::COMPARE_FAILURE =>
                {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Brings everything written before to the medium.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn flush(&mut self) -> Result<(), DriveError> {
        self.run("flush", io(IoOpcode::Flush))
    }

    /// Makes `blocks` blocks from `lba` on read as zeroes.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn write_zeroes(&mut self, lba: u64, blocks: u64) -> Result<(), DriveError> {
        let mut done = 0;
        while done < blocks {
            let count = (blocks - done).min(1 << 16);
            let mut sqe = io(IoOpcode::WriteZeroes);
            let at = lba.saturating_add(done);
            (sqe.cdw10, sqe.cdw11) = (at as u32, (at >> 32) as u32);
            sqe.cdw12 = RwCdw12::new().with_nlb((count - 1) as u16).into();
            self.run("write zeroes", sqe)?;
            done += count;
        }
        Ok(())
    }

    /// Gives the space of `blocks` blocks from `lba` on back; they read as zeroes.
    ///
    /// # Errors
    /// [`DriveError`].
    pub fn deallocate(&mut self, lba: u64, blocks: u32) -> Result<(), DriveError> {
        let range = DsmRange { attributes: 0, nlb: blocks, slba: lba };
        let buffer = Buffer { offset: self.data.offset, length: size_of::<DsmRange>() };
        self.slice(buffer)?.copy_from(range.as_bytes());
        let mut sqe = io(IoOpcode::DatasetManagement);
        sqe.cdw11 = DsmCdw11::new().with_ad(true).into();
        self.queue.point_to(&mut sqe, buffer);
        self.run("deallocate", sqe)
    }

    /// Bytes of the pieces that requests are cut into.
    fn piece(&self) -> usize {
        let most = self.info.max_transfer.min(self.data.length);
        most - most % self.info.block_size as usize
    }

    /// Cuts a request into commands: block, number of blocks and buffer of each.
    fn pieces(&self, lba: u64, length: usize) -> Result<Vec<(u64, u32, Buffer)>, DriveError> {
        let block = self.info.block_size as usize;
        if !length.is_multiple_of(block) {
            return Err(DriveError::Request("the length is not a multiple of the block size"));
        }
        let piece = self.piece();
        let cut = |start: usize| {
            let length = piece.min(length - start);
            let buffer = Buffer { offset: self.data.offset, length };
            let lba = lba.checked_add((start / block) as u64);
            let lba = lba.ok_or(DriveError::Request("the blocks are beyond the drive's end"))?;
            Ok((lba, (length / block) as u32, buffer))
        };
        (0..length).step_by(piece).map(cut).collect()
    }

    fn slice(&self, buffer: Buffer) -> Result<DmaSlice<'_>, DriveError> {
        let part = self.memory.whole().part(buffer.offset, buffer.length);
        part.ok_or(DriveError::Request("the buffer is no part of the drive's memory"))
    }

    fn transfer(
        &mut self,
        opcode: IoOpcode,
        lba: u64,
        blocks: u32,
        buffer: Buffer,
        fua: bool,
    ) -> Result<(), DriveError> {
        self.check_idle()?;
        self.queue.submit(opcode, lba, blocks, buffer, fua)?;
        self.finish(name(opcode))
    }

    fn run(&mut self, name: &'static str, sqe: Sqe) -> Result<(), DriveError> {
        self.check_idle()?;
        self.queue.push(sqe)?;
        self.finish(name)
    }

    /// A whole request waits for the next completion, which has to be its own.
    fn check_idle(&self) -> Result<(), DriveError> {
        match self.queue.in_flight() {
            0 => Ok(()),
            _ => Err(DriveError::Request("the queue has other commands in flight")),
        }
    }

    fn finish(&mut self, name: &'static str) -> Result<(), DriveError> {
        self.queue.ring(&mut *self.device)?;
        wait(&mut self.queue, &mut *self.device, name).map(drop)
    }
}

/// What is asked for, in errors.
fn name(opcode: IoOpcode) -> &'static str {
    match opcode {
        IoOpcode::Read => "read",
        IoOpcode::Write => "write",
        _ => "compare",
    }
}

/// An I/O command on the namespace without arguments.
fn io(opcode: IoOpcode) -> Sqe {
    let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
    sqe.cdw0 = Cdw0::new().with_opcode(opcode as u8);
    sqe
}

/// Waits for the next completion of `queue`.
fn wait(
    queue: &mut Queue,
    device: &mut dyn Device,
    name: &'static str,
) -> Result<Completed, DriveError> {
    let start = Instant::now();
    let mut next_look = LOOK_AFTER;
    loop {
        for _ in 0..SPINS {
            if let Some(completed) = queue.poll(device)? {
                if completed.status.is_success() {
                    return Ok(completed);
                }
                return Err(DriveError::Command { command: name, status: completed.status });
            }
            device.progress();
            std::hint::spin_loop();
        }
        let waited = start.elapsed();
        if waited > next_look {
            // A drive that was lost answers nothing, and its registers read as ones.
            next_look = waited + LOOK_AFTER;
            let csts = read4(device, reg::CSTS)?;
            if Csts::from(csts).cfs() {
                return Err(failure(csts));
            }
        }
        if waited > TIME_LIMIT {
            return Err(DriveError::TimedOut(name));
        }
        if waited > PATIENCE {
            std::thread::yield_now();
        }
    }
}

fn read4(device: &mut dyn Device, offset: u64) -> Result<u32, DriveError> {
    let mut data = [0; 4];
    device.read(offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn write4(device: &mut dyn Device, offset: u64, value: u32) -> Result<(), DriveError> {
    device.write(offset, &value.to_le_bytes())
}

/// Enables the controller (NVM Express base 1.4, section 7.6.1); returns its doorbell stride.
fn enable(device: &mut dyn Device, iova: u64) -> Result<u8, DriveError> {
    let mut data = [0; 8];
    device.read(reg::CAP, &mut data)?;
    if data == [0xff; 8] {
        return Err(DriveError::Absent);
    }
    let cap = Cap::from(u64::from_le_bytes(data));
    if cap.css() & 1 == 0 || cap.mpsmin() > 0 {
        return Err(DriveError::Unsupported(
            "it does not speak the NVM command set with 4 KiB pages",
        ));
    }
    write4(device, reg::CC, 0)?;
    wait_ready(device, false)?;
    let aqa = Aqa::new().with_asqs(ADMIN_ENTRIES - 1).with_acqs(ADMIN_ENTRIES * CQ_FACTOR - 1);
    write4(device, reg::AQA, aqa.into())?;
    device.write(reg::ASQ, &(iova + ADMIN_SQ as u64).to_le_bytes())?;
    device.write(reg::ACQ, &(iova + ADMIN_CQ as u64).to_le_bytes())?;
    let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
    write4(device, reg::CC, cc.into())?;
    wait_ready(device, true)?;
    Ok(cap.dstrd())
}

/// What a controller status means that says that the controller can go on no more.
fn failure(csts: u32) -> DriveError {
    if csts == u32::MAX { DriveError::Absent } else { DriveError::Failed(csts) }
}

fn wait_ready(device: &mut dyn Device, ready: bool) -> Result<(), DriveError> {
    let start = Instant::now();
    while start.elapsed() < TIME_LIMIT {
        let csts = read4(device, reg::CSTS)?;
        if Csts::from(csts).cfs() {
            return Err(failure(csts));
        }
        if Csts::from(csts).rdy() == ready {
            return Ok(());
        }
        device.progress();
        std::thread::yield_now();
    }
    Err(DriveError::TimedOut("enable"))
}

fn admin_queue(memory: &SharedMemory, iova: u64, dstrd: u8) -> Queue {
    let place = Place {
        id: 0,
        sq: ADMIN_SQ,
        cq: ADMIN_CQ,
        entries: ADMIN_ENTRIES,
        depth: 1,
        dstrd,
        shadow: None,
    };
    Queue::new(memory, iova, place, false)
}

/// The admin queue while the drive is brought up.
struct Admin<'a> {
    device: &'a mut dyn Device,
    queue: Queue,
    /// The address of the shared memory.
    iova: u64,
}

impl Admin<'_> {
    fn run(
        &mut self,
        name: &'static str,
        mut sqe: Sqe,
        opcode: AdminOpcode,
    ) -> Result<(), DriveError> {
        sqe.cdw0.set_opcode(opcode as u8);
        self.queue.push(sqe)?;
        self.queue.ring(self.device)?;
        wait(&mut self.queue, self.device, name).map(drop)
    }

    /// What the drive says of itself; whether it takes SGLs, and has shadow doorbells.
    fn identify(&mut self, memory: &SharedMemory) -> Result<(DriveInfo, bool, bool), DriveError> {
        let mut controller = IdentifyController::new_zeroed();
        self.identify_into(memory, id::CNS_CONTROLLER, 0, controller.as_mut_bytes())?;
        let mut namespace = IdentifyNamespace::new_zeroed();
        self.identify_into(memory, id::CNS_NAMESPACE, 1, namespace.as_mut_bytes())?;
        let format = namespace.lbaf[usize::from(namespace.flbas & 0xf)];
        if format.ms != 0 || !(9..=12).contains(&format.lbads) {
            return Err(DriveError::Unsupported("its blocks have metadata or an unusual size"));
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        let max_transfer = match controller.mdts {
            0 => 1 << 20,
            power => PAGE << power.min(8),
        };
        let info = DriveInfo {
            serial: text(&controller.sn),
            model: text(&controller.mn),
            block_size: 1 << format.lbads,
            blocks: namespace.nsze,
            max_transfer,
            volatile_cache: controller.vwc & id::VWC_PRESENT != 0,
        };
        let sgl = controller.sgls & 0b11 != 0;
        Ok((info, sgl, controller.oacs & id::OACS_DOORBELL_BUFFER != 0))
    }

    fn identify_into(
        &mut self,
        memory: &SharedMemory,
        cns: u8,
        nsid: u32,
        out: &mut [u8],
    ) -> Result<(), DriveError> {
        let dptr = [self.iova + IDENTIFY as u64, 0];
        let sqe = Sqe { nsid, dptr, cdw10: u32::from(cns), ..Sqe::default() };
        self.run("identify", sqe, AdminOpcode::Identify)?;
        if let Some(page) = memory.whole().part(IDENTIFY, PAGE) {
            page.copy_to(out);
        }
        Ok(())
    }

    /// Offers the shadow pages; returns where they are.
    fn shadow_doorbells(&mut self) -> Result<(usize, usize), DriveError> {
        let dptr = [self.iova + SHADOW_VALUES as u64, self.iova + SHADOW_EVENTS as u64];
        let sqe = Sqe { dptr, ..Sqe::default() };
        self.run("doorbell buffer config", sqe, AdminOpcode::DoorbellBufferConfig)?;
        Ok((SHADOW_VALUES, SHADOW_EVENTS))
    }

    fn create_queues(&mut self, place: Place) -> Result<(), DriveError> {
        let size = |entries: u16| {
            let cdw10 = QueueCdw10::new().with_qid(place.id).with_qsize(entries - 1);
            u32::from(cdw10)
        };
        let cq = Sqe {
            cdw10: size(place.entries * CQ_FACTOR),
            cdw11: CreateCqCdw11::new().with_pc(true).into(),
            dptr: [self.iova + place.cq as u64, 0],
            ..Sqe::default()
        };
        self.run("create completion queue", cq, AdminOpcode::CreateCq)?;
        let sq = Sqe {
            cdw10: size(place.entries),
            cdw11: CreateSqCdw11::new().with_pc(true).with_cqid(place.id).into(),
            dptr: [self.iova + place.sq as u64, 0],
            ..Sqe::default()
        };
        self.run("create submission queue", sq, AdminOpcode::CreateSq)
    }
}
