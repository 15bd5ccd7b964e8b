//! The controller memory buffer (NVM Express base 1.4, section 4.7): memory of the controller behind a BAR of its
//! own, which drivers and other functions load from and store into, and which commands name as the place of their
//! data.
//!
//! It is wherever the controller runs, beside the lender's blocks or at the borrower. It holds data, neither queues
//! nor lists. What a user left in it is gone when the function is given back.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_memory::{DmaSlice, PinnedSlice, Region, RegionError, SharedMemory};
use rackbus_pci::{Bar, BarMemory, Mappable};
use rackbus_spec::nvme::registers::{Cmbloc, Cmbmsc, Cmbsz};
use rustix::fs::FallocateFlags;

/// The BAR that is the buffer.
pub const BAR: u8 = 2;
/// Sizes that a buffer can have, in bytes: powers of two, as BARs are.
pub const SIZES: std::ops::RangeInclusive<u64> = 64 << 10..=64 << 30;

/// A controller's memory buffer.
#[derive(Debug)]
pub struct MemoryBuffer {
    memory: SharedMemory,
    bar: BarMemory,
}

/// A range of DMA addresses that leads to memory of the controller's own (CMB or PMR).
#[derive(Debug, Clone)]
pub struct ControllerMemoryWindow {
    base: u64,
    memory: Arc<Region>,
}

/// A piece of a transfer.
#[derive(Debug, Clone, Copy)]
pub enum TransferPiece<'a> {
    /// Memory of the host at this address.
    Host(u64),
    /// The buffer from this offset on.
    Buffer(&'a ControllerMemoryWindow, usize),
}

impl MemoryBuffer {
    /// A buffer of `size` zeroes.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left.
    pub fn new(size: u64) -> Result<MemoryBuffer, RegionError> {
        MemoryBuffer::around(SharedMemory::create("nvme-buffer", size)?)
    }

    /// The buffer of `size` bytes that an earlier life of the controller had, in `file`.
    ///
    /// # Errors
    /// When it is not that.
    pub fn again(file: OwnedFd, size: u64) -> Result<MemoryBuffer, RegionError> {
        MemoryBuffer::around(SharedMemory::adopt(file, size)?)
    }

    fn around(memory: SharedMemory) -> Result<MemoryBuffer, RegionError> {
        let file = memory.descriptor().map_err(out_of_descriptors)?;
        Ok(MemoryBuffer { memory, bar: BarMemory::new(file) })
    }

    /// The BAR that the host maps it by.
    pub fn bar(&self) -> Bar {
        let size = self.size();
        let mappable = Some(Mappable { memory: self.bar.clone(), areas: vec![(0, size)] });
        Bar { index: BAR, size, is_64bit: true, prefetchable: true, mappable }
    }

    /// Bytes that the buffer has.
    pub fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// A descriptor for who goes on with it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        // What could not be taken away from a former user is not passed on to who goes on either.
        drop(self.bar.descriptor()?);
        self.memory.descriptor()
    }

    /// A driver reads by a message what it could load.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(part) = self.part(offset, data.len()) {
            part.copy_to(data);
        }
    }

    /// A driver writes by a message what it could store.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Some(part) = self.part(offset, data.len()) {
            part.copy_from(data);
        }
    }

    fn part(&self, offset: u64, length: usize) -> Option<DmaSlice<'_>> {
        let memory = self.bar.is_there().then_some(&self.memory)?;
        memory.whole().part(usize::try_from(offset).ok()?, length)
    }

    /// Takes it away from its user: zeroes in other memory take its place, and who still maps the old one finds
    /// nothing there.
    ///
    /// # Errors
    /// When the system has no memory or descriptors left. Nobody can map or use the buffer until it succeeds: what there
    /// is, its former user may still have mapped.
    pub fn renew(&mut self) -> Result<(), RegionError> {
        self.bar.replace(None);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A memory file always has holes.
        let _ = rustix::fs::fallocate(&self.memory, flags, 0, self.size());
        let new = SharedMemory::create("nvme-buffer", self.size())?;
        let file = new.descriptor().map_err(out_of_descriptors)?;
        self.memory = new;
        self.bar.replace(Some(file));
        Ok(())
    }

    /// The addresses that the driver gave it, if it has.
    pub fn window(&self, control: Cmbmsc) -> Option<ControllerMemoryWindow> {
        let base = base(control, self.size()).filter(|_| self.bar.is_there())?;
        Some(ControllerMemoryWindow { base, memory: self.memory.region().clone() })
    }
}

/// The process has no descriptors left.
pub(super) fn out_of_descriptors(error: std::io::Error) -> RegionError {
    let code = error.raw_os_error();
    let cause = code.map_or(rustix::io::Errno::MFILE, rustix::io::Errno::from_raw_os_error);
    RegionError::System { what: "dup", cause }
}

/// Where a buffer of `size` bytes is for commands; `None` while it is not enabled, and for a base from which it would
/// go past the last address (`CMBSTS.CBAI`).
fn base(control: Cmbmsc, size: u64) -> Option<u64> {
    let base = control.cba() << 12;
    let enabled = control.cre() && control.cmse();
    (enabled && base.checked_add(size - 1).is_some()).then_some(base)
}

/// Whether the driver gave a buffer of `size` bytes addresses that it cannot have.
pub fn is_base_invalid(control: Cmbmsc, size: u64) -> bool {
    control.cre() && control.cmse() && base(control, size).is_none()
}

/// What CMBLOC says of every buffer: all its pieces and pointers may be here or there.
pub fn location() -> Cmbloc {
    let location = Cmbloc::new().with_bir(BAR).with_ofst(0);
    location.with_cdpmls(true).with_cdpcils(true).with_cdmmms(true)
}

/// What CMBSZ says of a buffer of `size` bytes: it takes data in both directions.
pub fn extent(size: u64) -> Cmbsz {
    // Units of 64 KiB or 1 MiB: there can be fewer than 2^20 of them.
    let szu = if size < 1 << 20 { 1 } else { 2 };
    let units = size >> (12 + 4 * szu);
    Cmbsz::new().with_rds(true).with_wds(true).with_szu(szu as u8).with_sz(units as u32)
}

impl ControllerMemoryWindow {
    /// `memory` at the addresses from `base` on, which are not beyond the last one.
    pub fn new(base: u64, memory: Arc<Region>) -> ControllerMemoryWindow {
        ControllerMemoryWindow { base, memory }
    }

    /// Cuts `length` bytes at `address` where the buffer begins and ends.
    ///
    /// # Errors
    /// What `visit` gives.
    pub fn cut<'a, E>(
        &'a self,
        address: u64,
        length: usize,
        mut visit: impl FnMut(TransferPiece<'a>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut at, mut left) = (address, length as u64);
        while left > 0 {
            let (piece, until) = match at.checked_sub(self.base) {
                Some(offset) if offset < self.memory.len() as u64 => (
                    TransferPiece::Buffer(self, offset as usize),
                    self.memory.len() as u64 - offset,
                ),
                Some(_) => (TransferPiece::Host(at), left),
                None => (TransferPiece::Host(at), self.base - at),
            };
            let count = left.min(until);
            visit(piece, count as usize)?;
            left -= count;
            at = match at.checked_add(count) {
                Some(next) => next,
                None if left == 0 => return Ok(()),
                // Past the last address there is nobody's memory: the host's domain refuses it.
                None => return visit(TransferPiece::Host(u64::MAX), left as usize),
            };
        }
        Ok(())
    }

    /// A piece of the buffer.
    pub fn slice(&self, offset: usize, length: usize) -> Option<DmaSlice<'_>> {
        self.memory.slice(offset, length)
    }

    /// Whether an address is one of the buffer's.
    pub fn contains(&self, address: u64) -> bool {
        let offset = address.checked_sub(self.base);
        offset.is_some_and(|offset| offset < self.memory.len() as u64)
    }

    /// A piece of it for work that goes on in the background.
    pub fn pin(&self, offset: usize, length: usize) -> Option<PinnedSlice> {
        PinnedSlice::new(self.memory.clone(), offset, length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn size_and_place_are_those_that_a_driver_computes() {
        for size in [*SIZES.start(), 1 << 20, *SIZES.end()] {
            let said = extent(size);
            assert_eq!(u64::from(said.sz()) * (4096 << (4 * said.szu())), size);
        }
        assert_eq!((location().bir(), location().ofst()), (BAR, 0));
    }

    #[test]
    fn a_base_beyond_the_last_address_is_invalid_and_gives_no_window() {
        let buffer = MemoryBuffer::new(64 << 10).unwrap();
        let control = Cmbmsc::new().with_cre(true).with_cmse(true);
        let last = control.with_cba(u64::MAX >> 12);
        assert!(is_base_invalid(last, buffer.size()) && buffer.window(last).is_none());
        let good = control.with_cba((u64::MAX >> 12) - 15);
        assert!(!is_base_invalid(good, buffer.size()) && buffer.window(good).is_some());
        assert!(buffer.window(good.with_cmse(false)).is_none());
        assert!(buffer.window(good.with_cre(false)).is_none());
    }

    proptest! {
        /// What would go past the last address is nobody's, in one piece.
        #[test]
        fn what_goes_past_the_last_address_is_one_piece_of_nobodys(
            back in 1u64..80_000, length in 1usize..200_000,
        ) {
            let buffer = MemoryBuffer::new(64 << 10).unwrap();
            let control = Cmbmsc::new().with_cre(true).with_cmse(true);
            let window = buffer.window(control.with_cba((u64::MAX >> 12) - 15)).unwrap();
            let (address, mut total, mut pieces) = (u64::MAX - back + 1, 0, Vec::new());
            let outcome: Result<(), ()> = window.cut(address, length, |piece, count| {
                total += count;
                pieces.push((matches!(piece, TransferPiece::Host(_)), count));
                Ok(())
            });
            prop_assert!(outcome.is_ok() && total == length && pieces.len() <= 3);
            let beyond = (length as u64).saturating_sub(back);
            if beyond > 0 {
                prop_assert_eq!(pieces.last().copied(), Some((true, beyond as usize)));
            }
        }

        /// Each byte of a range is the buffer's where its address is, and the host's elsewhere.
        #[test]
        fn a_range_is_cut_where_the_buffer_begins_and_ends(
            base in 0u64..40, address in 0u64..40 * 4096, length in 0usize..40 * 4096,
        ) {
            let buffer = MemoryBuffer::new(64 << 10).unwrap();
            let control = Cmbmsc::new().with_cre(true).with_cmse(true).with_cba(base);
            let window = buffer.window(control).unwrap();
            let (mut at, mut pieces) = (address, 0);
            let outcome: Result<(), ()> = window.cut(address, length, |piece, count| {
                let inside = |at: u64| (base * 4096..base * 4096 + (64 << 10)).contains(&at);
                match piece {
                    TransferPiece::Buffer(_, offset) => assert_eq!(offset as u64 + base * 4096, at),
                    TransferPiece::Host(address) => assert!(address == at && !inside(at)),
                }
                assert!(count > 0);
                assert_eq!(inside(at), inside(at + count as u64 - 1));
                at += count as u64;
                pieces += 1;
                Ok(())
            });
            prop_assert!(outcome.is_ok() && pieces <= 3);
            prop_assert_eq!(at, address + length as u64);
        }
    }
}
