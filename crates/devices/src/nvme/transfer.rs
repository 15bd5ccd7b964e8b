//! Data pointers: from PRP entries (NVM Express base 1.4, section 4.3) or SGL descriptors
//! (section 4.4) to memory.
//!
//! A command's pointer is first parsed into *runs*, pieces that are contiguous for the function,
//! so that neighbouring pages become one copy; then the runs are resolved. Lists and segments
//! live in memory that the host may change meanwhile: each entry is read once, then judged.

use std::cell::Cell;

use rackbus_memory::{Access, DmaSlice, DmaSpace, PinnedSlice, RegionError, SharedMemory};
use rackbus_spec::nvme::command::{PSDT_PRP, PSDT_SGL_MPTR_BUFFER, PSDT_SGL_MPTR_SGL};
use rackbus_spec::nvme::data::{PRP_SIZE, SGL_DESCRIPTOR_SIZE, SglDescriptor, SglType};
use rackbus_spec::nvme::{Sqe, Status};
use zerocopy::IntoBytes;

use super::buffer::{ControllerMemoryWindow, TransferPiece};

/// Descriptors that one SGL may have: more than any driver sends, few enough that a list which
/// leads in circles ends soon.
const MAX_DESCRIPTORS: u32 = 4096;
/// PRP entries fetched at once.
const PRP_CHUNK: usize = 64;
/// SGL descriptors fetched at once.
const SGL_CHUNK: usize = 32;

/// The direction of a command's data transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataDirection {
    /// The controller reads the host's memory.
    FromHost,
    /// The controller writes the host's memory.
    ToHost,
}

impl DataDirection {
    fn access(self) -> Access {
        match self {
            DataDirection::FromHost => Access::READ,
            DataDirection::ToHost => Access::WRITE,
        }
    }
}

/// A contiguous piece of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    place: Place,
    length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The host's memory at this address.
    Host(u64),
    /// A bit bucket: data of a read that the driver does not want (section 4.4.1).
    Bucket,
}

/// Resolves the data pointers of commands, PRPs and SGLs; kept by the controller so that its buffers are allocated once.
#[derive(Debug)]
pub struct DataPointers {
    runs: Vec<Run>,
    direction: DataDirection,
    /// Where data for bit buckets goes, as long as the longest transfer.
    bucket: SharedMemory,
    /// Whether anything went there since it was scrubbed.
    bucket_used: Cell<bool>,
    /// Addresses of the controller memory buffer, and of the persistent memory region; the first come before the second, and
    /// both before those of the host.
    windows: [Option<ControllerMemoryWindow>; 2],
}

impl DataPointers {
    /// For transfers of up to `max_bytes`.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left.
    pub fn new(max_bytes: u64) -> Result<Self, RegionError> {
        Ok(DataPointers {
            runs: Vec::with_capacity(8),
            direction: DataDirection::ToHost,
            bucket: SharedMemory::create("nvme-bit-bucket", max_bytes)?,
            bucket_used: Cell::new(false),
            windows: [None, None],
        })
    }

    /// Forgets what went into bit buckets.
    pub fn scrub(&mut self) {
        self.runs.clear();
        if self.bucket_used.take() {
            self.bucket.whole().fill(0);
        }
    }

    /// The controller memory buffer and the persistent memory region are at these addresses from now on, or at none.
    pub fn set_windows(&mut self, windows: [Option<ControllerMemoryWindow>; 2]) {
        self.windows = windows;
    }

    /// Memory for `length` bytes that nobody wants; `None` beyond the longest transfer.
    pub fn discard(&self, length: u64) -> Option<PinnedSlice> {
        self.bucket_used.set(true);
        PinnedSlice::new(self.bucket.region().clone(), 0, usize::try_from(length).ok()?)
    }

    /// Parses the data pointer of `sqe` for exactly `length` bytes. `page` is the controller's
    /// memory page size; only I/O commands may use SGLs (`sgl`).
    ///
    /// # Errors
    /// The status that the command completes with.
    #[inline]
    pub fn parse(
        &mut self,
        dma: &DmaSpace,
        sqe: &Sqe,
        length: usize,
        page: u64,
        sgl: bool,
        direction: DataDirection,
    ) -> Result<(), Status> {
        self.runs.clear();
        self.direction = direction;
        match sqe.cdw0.psdt() {
            PSDT_PRP => self.prp(dma, sqe.dptr, length, page),
            PSDT_SGL_MPTR_BUFFER | PSDT_SGL_MPTR_SGL if sgl => self.sgl(dma, sqe, length),
            _ => Err(Status::INVALID_FIELD.do_not_retry()),
        }
    }

    /// Calls `use_memory` with the memory of the transfer parsed last, in order: one piece where the data lies in one
    /// mapping, which takes no allocation. The pieces are not returned: to move a result of theirs costs a processor
    /// more than all the rest, since it reads it in other words than it was stored in and so waits for all stores
    /// before, among them to lines that the driver's processor has.
    ///
    /// # Errors
    /// Data Transfer Error when any byte of it is not mapped.
    #[inline]
    pub fn with_slices<R>(
        &self,
        dma: &DmaSpace,
        use_memory: impl FnOnce(&[DmaSlice<'_>]) -> R,
    ) -> Result<R, Status> {
        let access = self.direction.access();
        let mut first = None;
        let mut rest = Vec::new();
        for run in &self.runs {
            let mut push = |slice| match first {
                None => first = Some(slice),
                Some(_) => rest.push(slice),
            };
            match run.place {
                Place::Host(address) => self.cut(address, run.length, |piece, length| {
                    match piece {
                        TransferPiece::Host(at) => {
                            dma.walk(at, length, access, &mut push).map_err(transfer_error)?;
                        }
                        TransferPiece::Buffer(window, at) => {
                            push(window.slice(at, length).ok_or(Status::INTERNAL_ERROR)?);
                        }
                    }
                    Ok(())
                })?,
                Place::Bucket => {
                    self.bucket_used.set(true);
                    push(self.bucket.whole().part(0, run.length).ok_or(Status::INTERNAL_ERROR)?);
                }
            }
        }
        if let Some(first) = first {
            if rest.is_empty() {
                return Ok(use_memory(std::slice::from_ref(&first)));
            }
            rest.insert(0, first);
        }
        Ok(use_memory(&rest))
    }

    /// Copies the data of the transfer parsed last to `out`, as many bytes as both have.
    ///
    /// # Errors
    /// As [`with_slices`](DataPointers::with_slices).
    pub fn copy_to(&self, dma: &DmaSpace, out: &mut [u8]) -> Result<(), Status> {
        let mut at = 0;
        self.with_slices(dma, |slices| {
            for slice in slices {
                at += slice.copy_to(&mut out[at..]);
            }
        })
    }

    /// Copies `data` to the memory of the transfer parsed last, as many bytes as both have.
    ///
    /// # Errors
    /// As [`with_slices`](DataPointers::with_slices).
    pub fn copy_from(&self, dma: &DmaSpace, data: &[u8]) -> Result<(), Status> {
        let mut at = 0;
        self.with_slices(dma, |slices| {
            for slice in slices {
                at += slice.copy_from(&data[at..]);
            }
        })
    }

    /// As [`with_slices`](DataPointers::with_slices), for work that continues in the background.
    ///
    /// # Errors
    /// As [`with_slices`](DataPointers::with_slices).
    pub fn pin(&self, dma: &DmaSpace) -> Result<Vec<PinnedSlice>, Status> {
        let access = self.direction.access();
        let mut pinned = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            match run.place {
                Place::Host(address) => self.cut(address, run.length, |piece, length| {
                    match piece {
                        TransferPiece::Host(at) => {
                            let pieces = dma.pin_pieces(at, length, access);
                            pinned.extend(pieces.map_err(transfer_error)?.into_pieces());
                        }
                        TransferPiece::Buffer(window, at) => {
                            pinned.push(window.pin(at, length).ok_or(Status::INTERNAL_ERROR)?);
                        }
                    }
                    Ok(())
                })?,
                Place::Bucket => {
                    let slice = self.discard(run.length as u64);
                    pinned.push(slice.ok_or(Status::INTERNAL_ERROR)?);
                }
            }
        }
        Ok(pinned)
    }

    /// Tells `visit` of a run's pieces: all of it, where no memory of the controller's has a part of it.
    #[inline]
    fn cut<'a>(
        &'a self,
        address: u64,
        length: usize,
        mut visit: impl FnMut(TransferPiece<'a>, usize) -> Result<(), Status>,
    ) -> Result<(), Status> {
        match &self.windows {
            [None, None] => visit(TransferPiece::Host(address), length),
            [Some(window), None] | [None, Some(window)] => window.cut(address, length, visit),
            [Some(first), Some(second)] => {
                first.cut(address, length, |piece, length| match piece {
                    TransferPiece::Host(at) => second.cut(at, length, &mut visit),
                    TransferPiece::Buffer(..) => visit(piece, length),
                })
            }
        }
    }

    #[inline]
    fn push(&mut self, place: Place, length: usize) {
        if let (Some(last), Place::Host(address)) = (self.runs.last_mut(), place)
            && let Place::Host(start) = last.place
            && start.checked_add(last.length as u64) == Some(address)
        {
            last.length += length;
            return;
        }
        self.runs.push(Run { place, length });
    }

    /// Section 4.3: PRP1 may start inside a page; what follows are whole pages. If two pages are
    /// enough PRP2 is the second, else it points to a list.
    #[inline]
    fn prp(
        &mut self,
        dma: &DmaSpace,
        [prp1, prp2]: [u64; 2],
        length: usize,
        page: u64,
    ) -> Result<(), Status> {
        let offset = prp1 & (page - 1);
        if !offset.is_multiple_of(4) {
            return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
        }
        let first = length.min((page - offset) as usize);
        self.push(Place::Host(prp1), first);
        let rest = length - first;
        if rest == 0 {
            return Ok(());
        }
        if rest as u64 <= page {
            if !prp2.is_multiple_of(page) {
                return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
            }
            self.push(Place::Host(prp2), rest);
            return Ok(());
        }
        self.prp_list(dma, prp2, rest, page)
    }

    /// Follows a list for `rest` bytes. The first list may start inside a page; the last entry of
    /// a page points to the next list when more entries are needed than fit.
    fn prp_list(
        &mut self,
        dma: &DmaSpace,
        mut list: u64,
        mut rest: usize,
        page: u64,
    ) -> Result<(), Status> {
        let invalid = Status::PRP_OFFSET_INVALID.do_not_retry();
        if !list.is_multiple_of(PRP_SIZE as u64) {
            return Err(invalid);
        }
        let mut entries = [0u64; PRP_CHUNK];
        loop {
            // Every list but the first starts a page, so it has at least one data entry: a chain
            // that leads in circles still gets to its end.
            let slots = ((page - (list & (page - 1))) / PRP_SIZE as u64) as usize;
            let needed = rest.div_ceil(page as usize);
            let chained = needed > slots;
            let mut data_entries = if chained { slots - 1 } else { needed };
            while data_entries > 0 {
                let count = data_entries.min(PRP_CHUNK);
                list = self.read_list(dma, list, &mut entries[..count])?;
                for entry in &entries[..count] {
                    if !entry.is_multiple_of(page) {
                        return Err(invalid);
                    }
                    let bytes = rest.min(page as usize);
                    self.push(Place::Host(*entry), bytes);
                    rest -= bytes;
                }
                data_entries -= count;
            }
            if !chained {
                return Ok(());
            }
            self.read_list(dma, list, &mut entries[..1])?;
            list = entries[0];
            if !list.is_multiple_of(page) {
                return Err(invalid);
            }
        }
    }

    /// Lists and segments are neither in the controller memory buffer (`CMBSZ.LISTS`) nor in the persistent memory region.
    fn check_list(&self, address: u64) -> Result<(), Status> {
        let has = |window: &Option<ControllerMemoryWindow>| {
            window.as_ref().is_some_and(|it| it.contains(address))
        };
        match &self.windows {
            [buffer, _] if has(buffer) => Err(Status::INVALID_USE_OF_BUFFER.do_not_retry()),
            [_, region] if has(region) => Err(Status::DATA_TRANSFER_ERROR.do_not_retry()),
            _ => Ok(()),
        }
    }

    /// Reads PRP entries at `list`; returns the address after them.
    fn read_list(&self, dma: &DmaSpace, list: u64, out: &mut [u64]) -> Result<u64, Status> {
        self.check_list(list)?;
        dma.read(list, out.as_mut_bytes()).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        Ok(list.saturating_add((out.len() * PRP_SIZE) as u64))
    }

    /// Section 4.4: the command holds one descriptor, of the data or of a segment with more. The
    /// descriptors may describe more than the data, not less.
    fn sgl(&mut self, dma: &DmaSpace, sqe: &Sqe, length: usize) -> Result<(), Status> {
        let mut parser = SglParser { rest: length, descriptors: 0 };
        let first: SglDescriptor = zerocopy::transmute!(sqe.dptr);
        let mut segment = match first.kind() {
            Some(SglType::Segment | SglType::LastSegment) => Some(first),
            _ => {
                parser.data(self, first)?;
                None
            }
        };
        while let Some(descriptor) = segment {
            segment = parser.segment(self, dma, descriptor)?;
        }
        if parser.rest > 0 {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        Ok(())
    }
}

fn transfer_error<E>(_: E) -> Status {
    Status::DATA_TRANSFER_ERROR
}

struct SglParser {
    /// Bytes that have no place yet.
    rest: usize,
    descriptors: u32,
}

impl SglParser {
    /// Takes a descriptor of data.
    fn data(
        &mut self,
        transfer: &mut DataPointers,
        descriptor: SglDescriptor,
    ) -> Result<(), Status> {
        let place = match descriptor.kind() {
            Some(SglType::DataBlock) => Place::Host(descriptor.address),
            // Section 4.4.1: a bit bucket takes part in reads; in writes it has no length.
            Some(SglType::BitBucket) if transfer.direction == DataDirection::ToHost => {
                Place::Bucket
            }
            Some(SglType::BitBucket) => return Ok(()),
            Some(SglType::Segment | SglType::LastSegment) => {
                return Err(Status::INVALID_SGL_SEGMENT.do_not_retry());
            }
            None => return Err(Status::SGL_TYPE_INVALID.do_not_retry()),
        };
        let length = self.rest.min(descriptor.length as usize);
        if length > 0 {
            transfer.push(place, length);
            self.rest -= length;
        }
        Ok(())
    }

    /// Reads the segment that `descriptor` points to; returns the descriptor of the next one.
    fn segment(
        &mut self,
        transfer: &mut DataPointers,
        dma: &DmaSpace,
        descriptor: SglDescriptor,
    ) -> Result<Option<SglDescriptor>, Status> {
        let bytes = descriptor.length as usize;
        if bytes == 0 || !bytes.is_multiple_of(SGL_DESCRIPTOR_SIZE) {
            return Err(Status::INVALID_SGL_SEGMENT.do_not_retry());
        }
        let last = descriptor.kind() == Some(SglType::LastSegment);
        let mut count = bytes / SGL_DESCRIPTOR_SIZE;
        let mut address = descriptor.address;
        let mut chunk = [SglDescriptor::default(); SGL_CHUNK];
        while count > 0 {
            let now = count.min(SGL_CHUNK);
            self.descriptors = self.descriptors.saturating_add(now as u32);
            if self.descriptors > MAX_DESCRIPTORS {
                return Err(Status::INVALID_SGL_COUNT.do_not_retry());
            }
            transfer.check_list(address)?;
            dma.read(address, chunk[..now].as_mut_bytes())
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            address = address.saturating_add((now * SGL_DESCRIPTOR_SIZE) as u64);
            count -= now;
            for (index, entry) in chunk[..now].iter().enumerate() {
                if !last && count == 0 && index == now - 1 {
                    return match entry.kind() {
                        Some(SglType::Segment | SglType::LastSegment) => Ok(Some(*entry)),
                        _ => Err(Status::INVALID_SGL_SEGMENT.do_not_retry()),
                    };
                }
                self.data(transfer, *entry)?;
            }
        }
        Ok(None)
    }
}
