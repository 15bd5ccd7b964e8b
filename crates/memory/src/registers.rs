//! Registers of a device of this machine, mapped into a driver in user space.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::guard::Registration;
use crate::region::RegionError;

/// A mapped range of device registers. They are read and written by words of four bytes.
///
/// When the device is removed while it is mapped, the kernel takes the pages away; accesses do nothing
/// then, and [`gone`](MappedRegisters::gone) says so.
#[derive(Debug)]
pub struct MappedRegisters {
    base: NonNull<u8>,
    length: usize,
    registration: Registration,
}

// SAFETY: every access is one volatile load or store of a device's register, from whatever thread.
unsafe impl Send for MappedRegisters {}
// SAFETY: as above.
unsafe impl Sync for MappedRegisters {}

impl MappedRegisters {
    /// Maps the first `length` bytes of `file`, a BAR as Linux' sysfs has it (`resource0`).
    ///
    /// # Errors
    /// [`RegionError`] when the file is shorter, or the system refuses.
    pub fn map(file: BorrowedFd<'_>, length: u64) -> Result<MappedRegisters, RegionError> {
        let stat = rustix::fs::fstat(file)
            .map_err(|cause| RegionError::System { what: "fstat", cause })?;
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        let bytes = usize::try_from(length).ok().filter(|_| (1..=file_size).contains(&length));
        let Some(bytes) = bytes else {
            return Err(RegionError::OutOfFile { offset: 0, length, file_size });
        };
        MappedRegisters::map_bytes(file, 0, bytes)
    }

    /// Maps `length` bytes at `offset` of a device's file that has no size, as VFIO gives it: the kernel's driver
    /// knows what there is.
    ///
    /// # Errors
    /// [`RegionError`] when the driver has nothing there to be mapped.
    pub fn map_device(
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
    ) -> Result<MappedRegisters, RegionError> {
        let bytes = usize::try_from(length).ok().filter(|bytes| *bytes > 0);
        let out = RegionError::OutOfFile { offset, length, file_size: 0 };
        MappedRegisters::map_bytes(file, offset, bytes.ok_or(out)?)
    }

    fn map_bytes(
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
    ) -> Result<MappedRegisters, RegionError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                file,
                offset,
            )
        }
        .map_err(|cause| RegionError::System { what: "mmap", cause })?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null");
        let registration = Registration::new(base.as_ptr() as usize, bytes);
        Ok(MappedRegisters { base, length: bytes, registration })
    }

    /// Where it is in this process, and its bytes: for what maps it elsewhere.
    pub fn span(&self) -> (usize, usize) {
        (self.base.as_ptr() as usize, self.length)
    }

    /// Reads the word at `offset`; `None` where there is none.
    #[inline]
    pub fn read(&self, offset: u64) -> Option<u32> {
        let word = self.word(offset)?;
        // SAFETY: an aligned word inside of the mapping; the guard answers where the device has gone.
        Some(unsafe { word.read_volatile() })
    }

    /// Writes the word at `offset`; `None` where there is none.
    #[inline]
    pub fn write(&self, offset: u64, value: u32) -> Option<()> {
        let word = self.word(offset)?;
        // SAFETY: as above.
        unsafe { word.write_volatile(value) };
        Some(())
    }

    /// Stores whole words from `offset` on, in order, two at a time where they are aligned; `None`, with nothing stored, where
    /// not all of them are inside. A device's memory takes such stores whole, and in this order.
    #[inline]
    pub fn store(&self, offset: u64, words: &[u32]) -> Option<()> {
        let last = offset.checked_add(4 * (words.len() as u64).checked_sub(1)?)?;
        self.word(last)?;
        let mut at = self.word(offset)?;
        let mut rest = words;
        while let [first, more @ ..] = rest {
            let aligned = (at as usize).is_multiple_of(8);
            // SAFETY: first and last word are aligned and inside of the mapping, and so is what is in between.
            unsafe {
                match more {
                    [second, more @ ..] if aligned => {
                        let both = [*first, *second].map(u64::from);
                        let both = if cfg!(target_endian = "little") {
                            both[0] | both[1] << 32
                        } else {
                            both[0] << 32 | both[1]
                        };
                        at.cast::<u64>().write_volatile(both);
                        (at, rest) = (at.add(2), more);
                    }
                    _ => {
                        at.write_volatile(*first);
                        (at, rest) = (at.add(1), more);
                    }
                }
            }
        }
        Some(())
    }

    /// Whether the device was removed.
    pub fn gone(&self) -> bool {
        self.registration.truncated()
    }

    #[inline]
    fn word(&self, offset: u64) -> Option<*mut u32> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(4))?;
        let inside = offset.checked_add(4)? <= self.length;
        // SAFETY: inside of the mapping, which begins at a page.
        inside.then(|| unsafe { self.base.as_ptr().add(offset) }.cast::<u32>())
    }
}

impl Drop for MappedRegisters {
    fn drop(&mut self) {
        self.registration.retire();
        // SAFETY: the mapping is ours and nobody has a pointer into it; a failure to unmap would only
        // leak address space.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::SharedMemory;

    #[test]
    fn words_are_read_and_written_inside_of_the_mapping_only() {
        let memory = SharedMemory::create("registers", 4096).unwrap();
        let registers = MappedRegisters::map(memory.as_fd(), 4096).unwrap();
        assert_eq!(registers.write(4092, 7), Some(()));
        assert_eq!((registers.read(4092), registers.read(0)), (Some(7), Some(0)));
        for wrong in [4093, 4096, 2, u64::MAX] {
            assert_eq!((registers.read(wrong), registers.write(wrong, 1)), (None, None), "{wrong}");
        }
        assert!(!registers.gone());
        for length in [0, 4097] {
            assert!(MappedRegisters::map(memory.as_fd(), length).is_err(), "{length}");
        }
    }

    #[test]
    fn words_that_are_stored_at_once_are_all_inside_or_none_is_stored() {
        let memory = SharedMemory::create("registers", 4096).unwrap();
        let registers = MappedRegisters::map(memory.as_fd(), 4096).unwrap();
        for (at, count) in [(0, 1), (4, 5), (8, 4), (4092, 1), (4080, 4)] {
            let words: Vec<u32> = (1..=count).map(|word| at as u32 + word).collect();
            assert_eq!(registers.store(at, &words), Some(()));
            for (nth, word) in (0..).zip(&words) {
                assert_eq!(registers.read(at + 4 * nth), Some(*word));
            }
        }
        let before = registers.read(4088);
        for (at, words) in [(4088, &[7; 3][..]), (2, &[7]), (0, &[]), (u64::MAX - 3, &[7; 2])] {
            assert_eq!(registers.store(at, words), None, "{at}");
        }
        assert_eq!(registers.read(4088), before);
    }

    #[test]
    fn a_device_that_was_removed_is_noticed_and_harms_nobody() {
        let file = rustix::fs::memfd_create("registers", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let registers = MappedRegisters::map(file.as_fd(), 8192).unwrap();
        registers.write(4096, 1).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(registers.read(4096), Some(0));
        assert!(registers.gone());
    }
}
