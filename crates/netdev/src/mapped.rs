//! Memory of this process, or that it shares with the kernel.
#![allow(unsafe_code)] // mappings that no library has

use std::io;
use std::ptr::NonNull;

/// Pages of this process, or of a socket, until this is dropped.
#[derive(Debug)]
pub struct MappedArea {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: the pages are this value's alone and stay where they are, whichever thread has it.
unsafe impl Send for MappedArea {}

impl MappedArea {
    /// Anonymous pages of this process, zeroed and populated.
    pub fn new(length: usize) -> io::Result<MappedArea> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        MappedArea::map(length, flags, -1, 0)
    }

    /// Pages that a mapping of `fd` from `at` on has (mmap(2)), where the kernel has room for them.
    pub fn map(
        length: usize,
        flags: libc::c_int,
        fd: libc::c_int,
        at: i64,
    ) -> io::Result<MappedArea> {
        let flags = flags & !(libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses an address that nothing else is at.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), length, rights, flags, fd, at) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(MappedArea { address, length })
    }

    /// The address of its first byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Length of the mapping in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Copies bytes out of it; false where they are not all in it.
    pub fn read(&self, at: usize, to: &mut [u8]) -> bool {
        let inside = at.checked_add(to.len()).is_some_and(|end| end <= self.length);
        if inside {
            // SAFETY: the bytes are in the area, and the kernel leaves them alone while they are the receiver's.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.address.as_ptr().add(at),
                    to.as_mut_ptr(),
                    to.len(),
                );
            }
        }
        inside
    }

    /// Copies bytes into it; false where they do not all fit.
    pub fn write(&mut self, at: usize, from: &[u8]) -> bool {
        let inside = at.checked_add(from.len()).is_some_and(|end| end <= self.length);
        if inside {
            // SAFETY: the bytes are in the area, and the kernel leaves them alone before they are sent.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from.as_ptr(),
                    self.address.as_ptr().add(at),
                    from.len(),
                );
            }
        }
        inside
    }
}

impl Drop for MappedArea {
    fn drop(&mut self) {
        // SAFETY: the pages were mapped here with this length, and nothing points into them any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.length) };
    }
}
