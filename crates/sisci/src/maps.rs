//! Mappings of segments, local and remote.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rackbus_attach::{Mapping, RemoteSegment, Watch};
use rackbus_memory::copy::copy_bytes;
use rackbus_memory::{Access, DmaSlice};

use crate::constants::errors::*;
use crate::constants::*;
use crate::error::{Code, SciResult, check_flags, check_place, fail, finish, put};
use crate::forks::HeldLock;
use crate::handles::{HandleKind, RawHandle, find, kind};
use crate::local::SciLocalSegment;
use crate::remote::{Departure, SciRemoteSegment};

/// A mapping of a segment (`sci_map_t`), until it is unmapped.
#[derive(Debug)]
pub struct Map {
    mapping: Mapping,
    /// Where in its segment it begins.
    offset: u64,
    of: MappedSegment,
    /// Number of sequences on the mapping.
    pub(crate) sequences: AtomicUsize,
}
kind!(Map, 4);

/// What a flush tells of what was stored before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// It is where it is to be.
    There,
    /// Another machine did not answer in time: it may still come.
    NotYet,
    /// It does not come any more.
    Failed,
}

/// The segment that a mapping is of.
#[derive(Debug)]
enum MappedSegment {
    Local(Arc<SciLocalSegment>),
    Remote(Arc<SciRemoteSegment>),
}

impl MappedSegment {
    fn mapped(&self) -> &AtomicUsize {
        match self {
            MappedSegment::Local(local) => &local.mapped,
            MappedSegment::Remote(remote) => &remote.mapped,
        }
    }
}

impl Map {
    /// The memory that the mapping is of.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Whether it can be written to.
    pub(crate) fn writable(&self) -> bool {
        self.mapping.region().access().contains(Access::WRITE)
    }

    /// What happens at the far end of its segment, where that has one.
    fn far_end(&self) -> Option<&Watch> {
        match &self.of {
            MappedSegment::Local(local) => local.far_end(),
            MappedSegment::Remote(remote) => remote.watch(),
        }
    }

    /// How its segment went, if it did.
    pub(crate) fn left(&self) -> Option<Departure> {
        self.far_end().and_then(Departure::of)
    }

    /// Whether the home of its segment may be another machine, which has what is stored only once that was sent.
    pub(crate) fn is_far(&self) -> bool {
        match &self.of {
            MappedSegment::Local(local) => local.is_far(),
            MappedSegment::Remote(remote) => remote.segment().is_ok_and(RemoteSegment::is_far),
        }
    }

    /// Copies `size` bytes of `memory` to `offset` of the mapping, all of them to where they are to be, also on another machine;
    /// or fails when they cannot be there, or are not in time.
    ///
    /// # Safety
    /// Both are so many bytes, to be read and to be written to.
    pub(crate) unsafe fn copy_there(
        &self,
        offset: usize,
        memory: *const u8,
        size: usize,
    ) -> SciResult<()> {
        let source = |from: usize, to: DmaSlice<'_>| {
            let count = to.len().min(size.saturating_sub(from));
            // SAFETY: of `memory` as the caller says, and `to` is as long.
            unsafe { copy_bytes(memory.add(from), to.as_ptr(), count) };
            count
        };
        let carried = match &self.of {
            // Bytes that overwrite others of them are copied here, which knows in what order.
            MappedSegment::Remote(remote) if size > 0 && !self.overlaps(offset, memory, size) => {
                let place = self.offset + offset as u64;
                remote.segment()?.carry(place, (&source, size), &|| false)
            }
            MappedSegment::Remote(_) | MappedSegment::Local(_) => None,
        };
        if let Some(carried) = carried {
            return carried.map(|_| ()).map_err(|_| Code(SCI_ERR_TRANSFER_FAILED));
        }
        let part = self.mapping.whole().part(offset, size);
        source(0, part.ok_or(Code(SCI_ERR_OUT_OF_RANGE))?);
        self.flush()
    }

    /// Whether `size` bytes from `offset` of the mapping have some in common with as many of `memory`.
    fn overlaps(&self, offset: usize, memory: *const u8, size: usize) -> bool {
        let part = self.mapping.whole().part(offset, size);
        part.is_some_and(|part| part.as_ptr().addr().abs_diff(memory.addr()) < size)
    }

    /// Waits until what was stored before is where it is to be, or fails when it cannot be any more, or is not in time.
    pub(crate) fn flush(&self) -> SciResult<()> {
        match self.arrival() {
            Arrival::There => Ok(()),
            Arrival::NotYet | Arrival::Failed => fail(SCI_ERR_TRANSFER_FAILED),
        }
    }

    /// Waits until what was stored before is where it is to be, and says whether it is.
    pub(crate) fn arrival(&self) -> Arrival {
        let flushed = match &self.of {
            MappedSegment::Local(local) => local.flush(),
            MappedSegment::Remote(remote) => remote.flush(),
        };
        match flushed {
            Ok(()) => Arrival::There,
            Err(Code(SCI_ERR_NODE_NOT_RESPONDING)) => Arrival::NotYet,
            Err(_) => Arrival::Failed,
        }
    }

    /// Whether its segment is gone for good, or some of its memory: stores there reach nobody.
    pub(crate) fn lost(&self) -> bool {
        self.truncated() || self.far_end().is_some_and(Watch::lost)
    }

    /// Whether some of its memory could not be reached, because its file was cut or a virtual machine did not map it, and
    /// is the process' own instead.
    pub(crate) fn truncated(&self) -> bool {
        self.mapping.region().truncated()
    }

    /// Whether it is of a segment of this host's process.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.of, MappedSegment::Local(_))
    }

    /// Its place in the rack's address space; 0 where it has none.
    pub(crate) fn address(&self) -> u64 {
        let segment = match &self.of {
            MappedSegment::Local(local) => local.address(),
            MappedSegment::Remote(remote) => {
                remote.segment().ok().and_then(|segment| segment.address())
            }
        };
        segment.map_or(0, |address| address + self.offset)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        self.of.mapped().fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a program asks to be mapped.
struct MapRequest {
    offset: usize,
    size: usize,
    address: *mut c_void,
    flags: u32,
}

const MAP_FLAGS: u32 = SCI_FLAG_FIXED_MAP_ADDR
    | SCI_FLAG_READONLY_MAP
    | SCI_FLAG_LOCK_OPERATION
    | SCI_FLAG_READ_PREFETCH_AGGR_HOLD_MAP
    | SCI_FLAG_READ_PREFETCH_NO_HOLD_MAP
    | SCI_FLAG_IO_MAP_IOSPACE
    | SCI_FLAG_WRITES_DISABLE_GATHER_MAP
    | SCI_FLAG_DISABLE_128_BYTES_PACKETS
    | SCI_FLAG_NO_MEMORY_LOOPBACK
    | SCI_FLAG_SHARED_MAP
    | SCI_FLAG_BROADCAST
    | SCI_FLAG_WRITE_BACK_CACHE_MAP;

/// Flags of mappings that only an adapter could make.
const HARDWARE_FLAGS: u32 = SCI_FLAG_CONDITIONAL_INTERRUPT_MAP
    | SCI_FLAG_UNCONDITIONAL_DATA_INTERRUPT_MAP
    | SCI_FLAG_DMOVE_MAP;

impl MapRequest {
    /// Checks it against the segment's size: the range and where it is to be.
    fn check(&self, size: u64) -> SciResult<((u64, u64), Option<usize>)> {
        if self.flags & HARDWARE_FLAGS != 0 {
            return fail(SCI_ERR_FLAG_NOT_IMPLEMENTED);
        }
        check_flags(self.flags, MAP_FLAGS)?;
        if self.size == 0 {
            return fail(SCI_ERR_SIZE_ALIGNMENT);
        }
        let (offset, length) = (self.offset as u64, self.size as u64);
        match offset.checked_add(length) {
            Some(end) if end <= size => {}
            _ => return fail(SCI_ERR_OUT_OF_RANGE),
        }
        // Without the flag, the address is a hint, which need not be followed.
        if self.flags & SCI_FLAG_FIXED_MAP_ADDR == 0 {
            return Ok(((offset, length), None));
        }
        let within = |address: usize| address % 4096 == self.offset % 4096;
        match self.address.expose_provenance() {
            0 => fail(SCI_ERR_ILLEGAL_ADDRESS),
            address if within(address) => Ok(((offset, length), Some(address))),
            _ => fail(SCI_ERR_OFFSET_ALIGNMENT),
        }
    }
}

fn map_local(segment: RawHandle, wanted: &MapRequest) -> SciResult<(RawHandle, *mut c_void)> {
    let local = find::<SciLocalSegment>(segment)?;
    if local.is_left() {
        return fail(SCI_ERR_NOT_CONNECTED);
    }
    let (range, address) = wanted.check(local.size())?;
    let read_only = wanted.flags & SCI_FLAG_READONLY_MAP != 0;
    let mapping = local.map(range, address, read_only).map_err(|code| at(address, code))?;
    Ok(add(mapping, range.0, MappedSegment::Local(local)))
}

fn map_remote(segment: RawHandle, wanted: &MapRequest) -> SciResult<(RawHandle, *mut c_void)> {
    let remote = find::<SciRemoteSegment>(segment)?;
    let connected = remote.segment()?;
    if remote.lost() || !connected.is_there() {
        return fail(SCI_ERR_NOT_CONNECTED);
    }
    let (range, address) = wanted.check(connected.size())?;
    let read_only = wanted.flags & SCI_FLAG_READONLY_MAP != 0;
    if !read_only && !connected.writable() {
        return fail(SCI_ERR_ACCESS);
    }
    let mapping = connected.map_as(range, address, read_only);
    let mapping = mapping.map_err(|error| at(address, error.into()))?;
    Ok(add(mapping, range.0, MappedSegment::Remote(remote)))
}

/// Where the program chose the address, that is what the system did not like.
fn at(address: Option<usize>, code: Code) -> Code {
    match (address, code) {
        (Some(_), Code(SCI_ERR_SYSTEM)) => Code(SCI_ERR_ILLEGAL_ADDRESS),
        (_, code) => code,
    }
}

fn add(mapping: Mapping, offset: u64, of: MappedSegment) -> (RawHandle, *mut c_void) {
    of.mapped().fetch_add(1, Ordering::AcqRel);
    let pointer = mapping.whole().as_ptr().cast();
    let sequences = AtomicUsize::new(0);
    (Map::table().add(|_| Map { mapping, offset, of, sequences }), pointer)
}

fn unmap(handle: RawHandle, flags: u32) -> SciResult<()> {
    check_flags(flags, 0)?;
    let map = Map::table().take(handle).ok_or(Code(SCI_ERR_ILLEGAL_PARAMETER))?;
    crate::copy::forget_last();
    if map.sequences.load(Ordering::Acquire) > 0 {
        crate::copy::end_sequences(&map);
    }
    drop(map);
    Ok(())
}

/// Unmaps everything of the process.
pub(crate) fn end_all() {
    let maps = Map::table().clear();
    crate::copy::forget_last();
    drop(maps);
}

/// The locks of it all, held while the process forks.
pub(crate) fn hold() -> Vec<Option<HeldLock>> {
    vec![Map::table().hold()]
}

/// What a fork has of its parent's.
pub(crate) fn forget_all() {
    std::mem::forget(Map::table().clear());
    crate::copy::forget_last();
}

api! {
    /// Maps a part of a local segment.
    fn SCIMapLocalSegment(
        segment: RawHandle,
        map: *mut RawHandle,
        offset: usize,
        size: usize,
        address: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) -> *mut c_void {
        // SAFETY: as the caller says.
        unsafe {
            let wanted = MapRequest { offset, size, address, flags };
            let mapped = check_place(map).and_then(|()| map_local(segment, &wanted));
            let Some((handle, pointer)) = finish(error, mapped) else {
                return std::ptr::null_mut();
            };
            put(map, handle);
            pointer
        }
    }

    /// Maps a part of a remote segment.
    fn SCIMapRemoteSegment(
        segment: RawHandle,
        map: *mut RawHandle,
        offset: usize,
        size: usize,
        address: *mut c_void,
        flags: u32,
        error: *mut u32,
    ) -> *mut c_void {
        // SAFETY: as the caller says.
        unsafe {
            let wanted = MapRequest { offset, size, address, flags };
            let mapped = check_place(map).and_then(|()| map_remote(segment, &wanted));
            let Some((handle, pointer)) = finish(error, mapped) else {
                return std::ptr::null_mut();
            };
            put(map, handle);
            pointer
        }
    }

    /// Takes a mapping away; its addresses must not be used any more.
    fn SCIUnmapSegment(map: RawHandle, flags: u32, error: *mut u32) {
        // SAFETY: as the caller says.
        unsafe { finish(error, unmap(map, flags)) };
    }

    /// Where a mapping is.
    fn SCIGetMapPointer(map: RawHandle) -> *mut c_void {
        find::<Map>(map).map_or(std::ptr::null_mut(), |map| map.mapping.whole().as_ptr().cast())
    }

    /// A mapping's place in the rack's address space.
    fn SCIGetMapPhysAddr(map: RawHandle) -> u64 {
        find::<Map>(map).map_or(0, |map| map.address())
    }
}
