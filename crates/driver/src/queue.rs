//! A queue pair as the host sees it: commands in, completions out.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::spin::Spinning;
use rackbus_memory::{DmaSlice, SharedMemory};
use rackbus_spec::accel::Condition;
use rackbus_spec::nvme::command::{Cdw0, PSDT_PRP, PSDT_SGL_MPTR_BUFFER, RwCdw12, SQE_SIZE};
use rackbus_spec::nvme::completion::CQE_SIZE;
use rackbus_spec::nvme::data::{SglDescriptor, SglType};
use rackbus_spec::nvme::registers::{DOORBELLS, cq_head_doorbell, sq_tail_doorbell};
use rackbus_spec::nvme::{IoOpcode, Sqe, Status};

use crate::DriveError;
use crate::device::{DmaAddresses, DrivenFunction};

/// Bytes of a memory page as the driver configures the controller.
pub(crate) const PAGE: usize = 4096;
/// Completion queue entries for each submission queue entry. The host tells how far it has read
/// only each half round; the other half holds more than can be in flight.
pub(crate) const CQ_FACTOR: u16 = 2;

/// Offset of a completion's last word: the command's identifier, the phase tag, the status (NVM Express base 1.4,
/// section 4.6).
const STATUS_WORD: usize = 12;

/// Ring entries for `depth` commands in flight. Half of them stay free, so that the drive, which
/// keeps its event index behind the host's doorbell, never has the host run into it.
pub(crate) fn ring_entries(depth: u16) -> u16 {
    (2 * depth).next_power_of_two()
}

/// A part of the memory shared with the drive, for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriveBuffer {
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

impl DriveBuffer {
    /// Where it begins in the memory shared with the drive, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// A command that has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// What [`DriveQueue::submit`] returned for it.
    pub id: u16,
    /// Status of the completion entry.
    pub status: Status,
    /// Dword 0 of the completion.
    pub dw0: u32,
}

/// Where a queue pair lies in the shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PairLayout {
    pub(crate) id: u16,
    pub(crate) sq: usize,
    pub(crate) cq: usize,
    pub(crate) entries: u16,
    /// Commands in flight: at most half of the entries.
    pub(crate) depth: u16,
    pub(crate) dstrd: u8,
    /// Offsets of the two shadow doorbell pages.
    pub(crate) shadow: Option<(usize, usize)>,
}

/// A queue pair of up to `depth` commands in flight.
#[derive(Debug)]
pub struct DriveQueue {
    memory: SharedMemory,
    addresses: DmaAddresses,
    place: PairLayout,
    sgl: bool,
    sq_tail: u16,
    /// The tail that the drive was told last.
    rung: u16,
    cq_head: u16,
    /// The head that the drive was told last.
    told: u16,
    phase: bool,
    free: Vec<u16>,
    /// Which identifiers are in flight: a drive may report anything.
    busy: Vec<bool>,
    waits: Spinning,
}

impl DriveQueue {
    pub(crate) fn new(
        memory: &SharedMemory,
        addresses: &DmaAddresses,
        place: PairLayout,
        sgl: bool,
    ) -> DriveQueue {
        DriveQueue {
            memory: memory.clone(),
            addresses: addresses.clone(),
            place,
            sgl,
            sq_tail: 0,
            rung: 0,
            cq_head: 0,
            told: 0,
            phase: true,
            free: (0..place.depth).rev().collect(),
            busy: vec![false; usize::from(place.depth)],
            waits: Spinning::endless(),
        }
    }

    /// How many commands may be in flight.
    pub fn depth(&self) -> usize {
        usize::from(self.place.depth)
    }

    /// How many commands are in flight.
    pub fn in_flight(&self) -> usize {
        self.depth() - self.free.len()
    }

    /// Where in the driver's memory the word with the status of the next completion will be, and what that is when
    /// command `id` has ended well, which is the only one in flight: for somebody else who waits for it.
    pub fn awaited(&self, id: u16) -> (usize, Condition) {
        let at = self.place.cq + usize::from(self.cq_head) * CQE_SIZE + STATUS_WORD;
        let phase = u32::from(self.phase) << 16;
        let good_value = phase | u32::from(id);
        (at, Condition { mask: 1 << 16, value: phase, good_mask: u32::MAX, good_value })
    }

    /// Puts a read, write or compare of `blocks` logical blocks (1 to 65,536) at `lba` into the
    /// queue; the drive sees it after [`ring`](DriveQueue::ring). The buffer must hold them.
    ///
    /// # Errors
    /// [`DriveError::Request`] when the queue is full, or the buffer is no part of the memory that the drive reaches in one
    /// piece.
    #[inline]
    pub fn submit(
        &mut self,
        opcode: IoOpcode,
        lba: u64,
        blocks: u32,
        buffer: DriveBuffer,
        fua: bool,
    ) -> Result<u16, DriveError> {
        let data = (self.address(buffer)?, buffer.length);
        self.submit_at(opcode, lba, blocks, data, fua)
    }

    /// Where the drive reaches a buffer.
    #[inline]
    fn address(&self, buffer: DriveBuffer) -> Result<u64, DriveError> {
        let address = self.addresses.piece(buffer.offset, buffer.length);
        address.ok_or(DriveError::Request("the buffer is not in one piece of the drive's memory"))
    }

    /// As [`submit`](DriveQueue::submit), with data at `address` of the drive's address space, `length` bytes: a
    /// part of a BAR of another function. The drive refuses what it does not reach.
    ///
    /// # Errors
    /// [`DriveError::Request`] when the queue is full.
    #[inline]
    pub fn submit_at(
        &mut self,
        opcode: IoOpcode,
        lba: u64,
        blocks: u32,
        data: (u64, usize),
        fua: bool,
    ) -> Result<u16, DriveError> {
        let mut sqe = Sqe { nsid: 1, ..Sqe::default() };
        sqe.cdw0 = Cdw0::new().with_opcode(opcode as u8);
        sqe.cdw10 = lba as u32;
        sqe.cdw11 = (lba >> 32) as u32;
        let nlb = u16::try_from(blocks.wrapping_sub(1))
            .map_err(|_| DriveError::Request("1 to 65,536 blocks are possible in a command"))?;
        sqe.cdw12 = RwCdw12::new().with_nlb(nlb).with_fua(fua).into();
        self.point(&mut sqe, data);
        self.push(sqe)
    }

    /// Sets the data pointer to memory of the driver's.
    pub(crate) fn point_to(&self, sqe: &mut Sqe, buffer: DriveBuffer) -> Result<(), DriveError> {
        self.point(sqe, (self.address(buffer)?, buffer.length));
        Ok(())
    }

    /// Sets the data pointer: PRPs where two pages are enough, else one SGL descriptor.
    #[inline]
    fn point(&self, sqe: &mut Sqe, (address, length): (u64, usize)) {
        let first_page_end = (address | (PAGE as u64 - 1)).wrapping_add(1);
        if self.sgl && length > PAGE {
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            let descriptor = SglDescriptor::new(SglType::DataBlock, address, length);
            sqe.cdw0.set_psdt(PSDT_SGL_MPTR_BUFFER);
            sqe.dptr = zerocopy::transmute!(descriptor);
        } else {
            sqe.cdw0.set_psdt(PSDT_PRP);
            sqe.dptr = [address, first_page_end];
        }
    }

    /// Puts any command into the queue; its identifier is set here.
    ///
    /// # Errors
    /// [`DriveError::Request`] when the queue is full.
    #[inline]
    pub fn push(&mut self, mut sqe: Sqe) -> Result<u16, DriveError> {
        let cid = self.free.pop().ok_or(DriveError::Request("the queue is full"))?;
        self.busy[usize::from(cid)] = true;
        sqe.cdw0.set_cid(cid);
        let at = self.place.sq + usize::from(self.sq_tail) * SQE_SIZE;
        self.memory.whole().write_obj(at, &sqe);
        self.sq_tail += 1;
        if self.sq_tail == self.place.entries {
            self.sq_tail = 0;
        }
        Ok(cid)
    }

    /// Tells the drive of the commands put in since the last time.
    ///
    /// # Errors
    /// When the connection failed.
    #[inline]
    pub fn ring(&mut self, device: &mut dyn DrivenFunction) -> Result<(), DriveError> {
        if self.sq_tail == self.rung {
            return Ok(());
        }
        let (old, new) = (self.rung, self.sq_tail);
        self.rung = new;
        let register = sq_tail_doorbell(self.place.id, self.place.dstrd);
        self.doorbell(device, register, old, new)
    }

    /// Stores a doorbell's value in the shadow page, and in the register if the drive asked for
    /// that or has no shadow page (NVM Express base 1.4, section 7.13).
    #[inline]
    fn doorbell(
        &self,
        device: &mut dyn DrivenFunction,
        register: u64,
        old: u16,
        new: u16,
    ) -> Result<(), DriveError> {
        if let Some((values, events)) = self.place.shadow {
            let slot = (register - DOORBELLS) as usize;
            let memory = self.memory.whole();
            memory.store_u32(values + slot, u32::from(new), Ordering::Release);
            fence(Ordering::SeqCst);
            let event = memory.load_u32(events + slot, Ordering::Relaxed).unwrap_or(0) as u16;
            // Whether the step from `old` to `new` crosses the event index, modulo 2^16.
            if new.wrapping_sub(event).wrapping_sub(1) >= new.wrapping_sub(old) {
                return Ok(());
            }
        }
        device.write(register, &u32::from(new).to_le_bytes())
    }

    /// The next completion, if there is one.
    ///
    /// # Errors
    /// When the connection failed, or the drive completed a command that nobody sent.
    #[inline]
    pub fn poll(
        &mut self,
        device: &mut dyn DrivenFunction,
    ) -> Result<Option<Completed>, DriveError> {
        let at = self.place.cq + usize::from(self.cq_head) * CQE_SIZE;
        let memory = self.memory.whole();
        // The half with the phase tag holds the identifier and the status too.
        let high = memory.load_u64(at + 8, Ordering::Acquire).unwrap_or(0);
        if (high >> 48 & 1 != 0) != self.phase {
            return Ok(None);
        }
        let dw0 = memory.load_u32(at, Ordering::Relaxed).unwrap_or(0);
        let id = (high >> 32) as u16;
        if !self.busy.get_mut(usize::from(id)).is_some_and(std::mem::take) {
            return Err(DriveError::Unsupported("it completed a command that nobody sent"));
        }
        self.free.push(id);
        self.cq_head += 1;
        let entries = self.cq_entries();
        if self.cq_head == entries {
            self.cq_head = 0;
            self.phase = !self.phase;
        }
        if self.cq_head.is_multiple_of(entries / CQ_FACTOR) {
            let (old, new) = (self.told, self.cq_head);
            self.told = new;
            let register = cq_head_doorbell(self.place.id, self.place.dstrd);
            self.doorbell(device, register, old, new)?;
        }
        Ok(Some(Completed { id, status: Status((high >> 49) as u16), dw0 }))
    }

    /// Waits for the next completion, however long that takes, and takes it; `None` when nothing is in flight. It polls,
    /// and after some microseconds lets others have the processor between its looks: what works on the command may have
    /// to run on this one.
    ///
    /// # Errors
    /// As [`poll`](DriveQueue::poll).
    pub fn wait(
        &mut self,
        device: &mut dyn DrivenFunction,
    ) -> Result<Option<Completed>, DriveError> {
        self.waits.restart();
        while self.in_flight() > 0 {
            if let Some(completed) = self.poll(device)? {
                return Ok(Some(completed));
            }
            device.progress();
            self.waits.goes_on();
        }
        Ok(None)
    }

    fn cq_entries(&self) -> u16 {
        self.place.entries * CQ_FACTOR
    }

    /// The memory of `buffer`.
    pub fn data(&self, buffer: DriveBuffer) -> Option<DmaSlice<'_>> {
        self.memory.whole().part(buffer.offset, buffer.length)
    }
}
