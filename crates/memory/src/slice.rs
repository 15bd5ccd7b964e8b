//! Checked access to a piece of memory that a peer may change at any time.
//!
//! No reference and no Rust slice to such memory ever exists: bytes are copied in or out, small
//! values are loaded and stored atomically.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::copy::bytes;
use crate::region::Region;

/// A piece of a mapped region: an address and a length that were checked when it was made.
///
/// The lifetime is that of the mapping it points into, so a slice cannot outlive it.
#[derive(Debug, Clone, Copy)]
pub struct DmaSlice<'a> {
    start: NonNull<u8>,
    length: usize,
    mapping: PhantomData<&'a Region>,
}

macro_rules! atomic_access {
    ($load:ident, $store:ident, $value:ty, $atomic:ty) => {
        #[doc = concat!("Loads a [`", stringify!($value), "`] at `offset`; `None` when it is out of bounds or not aligned.")]
        #[inline]
        pub fn $load(&self, offset: usize, ordering: Ordering) -> Option<$value> {
            let at = self.aligned::<$atomic>(offset)?;
            // SAFETY: `aligned` checked bounds and alignment; the mapping outlives `self`, and
            // atomics are sound on memory that others change.
            Some(unsafe { &*at }.load(ordering))
        }

        #[doc = concat!("Stores a [`", stringify!($value), "`] at `offset`; `None` when it is out of bounds or not aligned.")]
        #[inline]
        pub fn $store(&self, offset: usize, value: $value, ordering: Ordering) -> Option<()> {
            let at = self.aligned::<$atomic>(offset)?;
            // SAFETY: as above.
            unsafe { &*at }.store(value, ordering);
            Some(())
        }
    };
}

/// No bytes of no memory.
impl Default for DmaSlice<'_> {
    fn default() -> Self {
        DmaSlice { start: NonNull::dangling(), length: 0, mapping: PhantomData }
    }
}

impl<'a> DmaSlice<'a> {
    /// # Safety
    /// `[start, start + length)` must stay mapped for `'a`, readable (and writable, for the
    /// stores) or replaced by the guard when it faults.
    pub(crate) unsafe fn new(start: NonNull<u8>, length: usize) -> Self {
        DmaSlice { start, length, mapping: PhantomData }
    }

    /// Length of the slice in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The first byte's address in this process, for system calls that move the bytes
    /// (`preadv2`, io_uring). Valid while the mapping is.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// `length` bytes from `offset`; `None` when they are not inside.
    #[inline]
    pub fn part(&self, offset: usize, length: usize) -> Option<DmaSlice<'a>> {
        if offset.checked_add(length)? > self.length {
            return None;
        }
        // SAFETY: inside the checked range, same lifetime.
        Some(unsafe { DmaSlice::new(self.start.add(offset), length) })
    }

    /// Copies from here into `out`: as many bytes as both have; returns that number.
    #[inline]
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let count = out.len().min(self.length);
        // SAFETY: `count` bytes are inside both.
        unsafe { bytes::copy_out(self.start.as_ptr(), out.as_mut_ptr(), count) };
        count
    }

    /// Whether it has these bytes and no others, each read once.
    pub fn has_bytes(&self, bytes: &[u8]) -> bool {
        const WORD: usize = size_of::<u64>();
        // So many words for each decision: they are on their way from memory together.
        const WORDS: usize = 8;
        if bytes.len() != self.length {
            return false;
        }
        let (mut at, is_aligned) = (0, self.aligned::<AtomicU64>(0).is_some());
        for there in bytes.chunks_exact(WORD * WORDS).take_while(|_| is_aligned) {
            let mut differ = 0;
            for (nth, word) in there.as_chunks::<WORD>().0.iter().enumerate() {
                // SAFETY: inside, as `bytes` are as many, and aligned, as the first is.
                let here =
                    unsafe { &*self.start.as_ptr().add(at + nth * WORD).cast::<AtomicU64>() };
                differ |= here.load(Ordering::Relaxed) ^ u64::from_ne_bytes(*word);
            }
            if differ != 0 {
                return false;
            }
            at += WORD * WORDS;
        }
        let mut here = [0; WORD * WORDS];
        bytes[at..].chunks(here.len()).enumerate().all(|(nth, there)| {
            let here = &mut here[..there.len()];
            let part = self.part(at + nth * WORD * WORDS, there.len());
            part.is_some_and(|part| part.copy_to(here) == there.len()) && *here == *there
        })
    }

    /// Copies `data` to here: as many bytes as both have; returns that number.
    #[inline]
    pub fn copy_from(&self, data: &[u8]) -> usize {
        let count = data.len().min(self.length);
        // SAFETY: as above.
        unsafe { bytes::copy(data.as_ptr(), self.start.as_ptr(), count) };
        count
    }

    /// Copies from another piece of shared memory: as many bytes as both have; the two may
    /// overlap. Returns the number copied.
    #[inline]
    pub fn copy_from_slice(&self, source: DmaSlice<'_>) -> usize {
        let count = source.length.min(self.length);
        // SAFETY: `count` bytes are mapped on both sides.
        unsafe { bytes::copy(source.start.as_ptr(), self.start.as_ptr(), count) };
        count
    }

    /// Writes `byte` to every byte of the slice.
    #[inline]
    pub fn fill(&self, byte: u8) {
        // SAFETY: the whole slice is mapped.
        unsafe { std::ptr::write_bytes(self.start.as_ptr(), byte, self.length) };
    }

    /// Copies a plain value out of `offset`; `None` when it is out of bounds. No alignment needed.
    #[inline]
    pub fn read_obj<T: FromBytes>(&self, offset: usize) -> Option<T> {
        let part = self.part(offset, size_of::<T>())?;
        // SAFETY: bounds checked; any bytes are a valid `T`.
        Some(unsafe { part.start.cast::<T>().as_ptr().read_unaligned() })
    }

    /// Copies a plain value to `offset`; `None` when it is out of bounds. No alignment needed.
    #[inline]
    pub fn write_obj<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Option<()> {
        let part = self.part(offset, size_of::<T>())?;
        part.copy_from(value.as_bytes());
        Some(())
    }

    atomic_access!(load_u16, store_u16, u16, AtomicU16);
    atomic_access!(load_u32, store_u32, u32, AtomicU32);
    atomic_access!(load_u64, store_u64, u64, AtomicU64);

    /// Stores the bytes of `value` that `mask` has ones for to the aligned word at `offset`, in one step, and
    /// leaves the others as they are, whoever stores to them; `None` when it is out of bounds or not aligned.
    #[inline]
    pub fn merge_u64(&self, offset: usize, value: u64, mask: u64) -> Option<()> {
        let at = self.aligned::<AtomicU64>(offset)?;
        // SAFETY: as above.
        let word = unsafe { &*at };
        if mask == u64::MAX {
            word.store(value, Ordering::Release);
            return Some(());
        }
        let merged = |now: u64| Some((now & !mask) | (value & mask));
        // Another turn means that somebody else has stored: it ends for one of them each time.
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, merged);
        Some(())
    }

    /// Asks the processor to bring the first lines of the slice near, for reading.
    #[inline]
    pub fn prefetch(&self) {
        for line in (0..self.length.min(4096)).step_by(64) {
            prefetch(self.start.as_ptr().wrapping_add(line));
        }
    }

    /// The same for writing.
    #[inline]
    pub fn prefetch_write(&self) {
        for line in (0..self.length.min(4096)).step_by(64) {
            prefetch_write(self.start.as_ptr().wrapping_add(line));
        }
    }

    #[inline]
    fn aligned<T>(&self, offset: usize) -> Option<*const T> {
        if offset.checked_add(size_of::<T>())? > self.length {
            return None;
        }
        // SAFETY: inside the slice.
        let at = unsafe { self.start.as_ptr().add(offset) };
        (at as usize).is_multiple_of(align_of::<T>()).then_some(at.cast::<T>())
    }
}

/// Asks the processor to bring the line at `address` near, for reading. Any address will do.
#[inline]
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching never faults and has no effect on memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Asks the processor to bring the line at `address` near, to be written. Any address will do.
#[inline]
fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching never faults and has no effect on memory.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

// SAFETY: memory shared with other processes is no less shared between threads; see `Region`.
unsafe impl Send for DmaSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for DmaSlice<'_> {}

/// A piece of a region that keeps the mapping alive: for what is resolved once and used often,
/// a queue or a page of shadow doorbells.
///
/// It keeps the memory *mapped*, not *granted*: whoever caches one compares
/// [`DmaSpace::generation`](crate::DmaSpace::generation) and resolves again when it moved.
#[derive(Debug, Clone)]
pub struct PinnedSlice {
    region: Arc<Region>,
    /// Of the region, which stays where it is: an access does not look there first.
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the address is the region's, which is both.
unsafe impl Send for PinnedSlice {}
// SAFETY: as above.
unsafe impl Sync for PinnedSlice {}

impl PinnedSlice {
    /// `length` bytes from `offset` of `region`; `None` when they are not inside.
    pub fn new(region: Arc<Region>, offset: usize, length: usize) -> Option<PinnedSlice> {
        let start = region.slice(offset, length)?.start;
        Some(PinnedSlice { region, start, length })
    }

    /// A slice of all of `region`, which stays mapped as long as the slice lives.
    pub fn whole(region: Arc<Region>) -> PinnedSlice {
        let DmaSlice { start, length, .. } = region.whole();
        PinnedSlice { region, start, length }
    }

    /// The pinned memory, to access.
    #[inline]
    pub fn get(&self) -> DmaSlice<'_> {
        // SAFETY: inside of the region, which is mapped as long as `self`, at the same place and with the same length.
        unsafe { DmaSlice::new(self.start, self.length) }
    }

    /// The region that it is a part of.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

/// A range that is contiguous for its function, in as many pieces as there are mappings behind it:
/// usually one, where a guest translates DMA itself up to one for each page.
#[derive(Debug, Clone)]
pub struct PinnedPieces {
    first: PinnedSlice,
    /// The others, in order, and where in the range each begins.
    rest: Vec<(usize, PinnedSlice)>,
}

impl PinnedPieces {
    pub(crate) fn new(first: PinnedSlice) -> Self {
        PinnedPieces { first, rest: Vec::new() }
    }

    /// Adds the piece that begins `start` bytes into the range, behind those there are.
    pub(crate) fn push(&mut self, start: usize, piece: PinnedSlice) {
        self.rest.push((start, piece));
    }

    /// `length` bytes from `offset` of the range; `None` when they are not inside, or not in one
    /// piece.
    #[inline]
    pub fn at(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        match self.first.get().part(offset, length) {
            None if !self.rest.is_empty() => self.beyond_first(offset, length),
            found => found,
        }
    }

    #[cold]
    fn beyond_first(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        let index = self.rest.partition_point(|(start, _)| *start <= offset).checked_sub(1)?;
        let (start, piece) = &self.rest[index];
        piece.get().part(offset - start, length)
    }

    /// The first piece, and the others with where in the range each begins.
    pub fn into_parts(self) -> (PinnedSlice, Vec<(usize, PinnedSlice)>) {
        (self.first, self.rest)
    }

    /// The pieces themselves, in order.
    pub fn into_pieces(self) -> impl Iterator<Item = PinnedSlice> {
        std::iter::once(self.first).chain(self.rest.into_iter().map(|(_, piece)| piece))
    }

    /// Whether pieces meet at multiples of `size` bytes only.
    pub fn meet_at(&self, size: usize) -> bool {
        self.rest.iter().all(|(start, _)| start.is_multiple_of(size))
    }
}

#[cfg(test)]
mod tests {
    use crate::SharedMemory;

    #[test]
    fn memory_has_its_own_bytes_and_no_others() {
        let memory = SharedMemory::create("slice", 4096).unwrap();
        let bytes: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
        memory.whole().copy_from(&bytes);
        for (offset, length) in [(0, 4096), (0, 0), (8, 64), (64, 200), (3, 130), (4090, 6)] {
            let part = memory.whole().part(offset, length).unwrap();
            let mut there = bytes[offset..offset + length].to_vec();
            assert!(part.has_bytes(&there), "{length} from {offset}");
            for at in 0..length {
                there[at] ^= 0x80;
                assert!(!part.has_bytes(&there), "{at} of {length} from {offset}");
                there[at] ^= 0x80;
            }
            there.push(0);
            assert!(!part.has_bytes(&there), "one more than {length} from {offset}");
        }
    }
}
