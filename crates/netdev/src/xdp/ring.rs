//! The rings and the memory that a socket shares with the kernel.

use std::io;
use std::marker::PhantomData;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::mapped::MappedArea;

/// A ring with one side here and one in the kernel. Which one writes entries depends on the ring.
#[derive(Debug)]
pub struct XdpRing<T> {
    area: MappedArea,
    producer: usize,
    consumer: usize,
    flags: usize,
    entries: usize,
    mask: u32,
    /// This side's own count; the other side sees it later.
    own: u32,
    kind: PhantomData<T>,
}

/// Whether the kernel is to be called for it to go on.
const NEED_WAKEUP: u32 = libc::XDP_RING_NEED_WAKEUP;

impl<T: Copy> XdpRing<T> {
    /// The ring of a socket at an offset of its descriptor.
    pub fn map(
        socket: BorrowedFd<'_>,
        page: i64,
        at: &libc::xdp_ring_offset,
        entries: u32,
    ) -> io::Result<XdpRing<T>> {
        let length = at.desc as usize + entries as usize * size_of::<T>();
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let area = MappedArea::map(length, flags, socket.as_raw_fd(), page)?;
        Ok(XdpRing {
            area,
            producer: at.producer as usize,
            consumer: at.consumer as usize,
            flags: at.flags as usize,
            entries: at.desc as usize,
            mask: entries - 1,
            own: 0,
            kind: PhantomData,
        })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the kernel said that a word of the ring is there; it is aligned, and both sides access it atomically.
        unsafe { AtomicU32::from_ptr(self.area.address().as_ptr().add(at).cast()) }
    }

    fn entry(&self, number: u32) -> *mut T {
        let place = (number & self.mask) as usize;
        // SAFETY: entries lie behind each other, as many as the mask says, and all of them were mapped.
        unsafe { self.area.address().as_ptr().add(self.entries).cast::<T>().add(place) }
    }

    /// The next entry that the kernel wrote.
    pub fn pop(&self) -> Option<T> {
        if self.word(self.producer).load(Ordering::Acquire) == self.own {
            return None;
        }
        // SAFETY: the kernel wrote the entry before it counted it, and writes it again only when it is released.
        Some(unsafe { self.entry(self.own).read() })
    }

    /// Gives the entry back that was popped last.
    pub fn release(&mut self) {
        self.own = self.own.wrapping_add(1);
        self.word(self.consumer).store(self.own, Ordering::Release);
    }

    /// Whether there is no room for an entry of this side's.
    pub fn is_full(&self) -> bool {
        let taken = self.word(self.consumer).load(Ordering::Acquire);
        self.own.wrapping_sub(taken) > self.mask
    }

    /// Whether the kernel has taken all entries.
    pub fn is_empty(&self) -> bool {
        self.word(self.consumer).load(Ordering::Acquire) == self.own
    }

    /// Writes an entry, for which there is room; the kernel sees it when it is [published](XdpRing::publish).
    pub fn push(&mut self, entry: T) {
        if self.is_full() {
            return;
        }
        // SAFETY: the kernel has read what was in the place, and reads it again only when it is published.
        unsafe { self.entry(self.own).write(entry) };
        self.own = self.own.wrapping_add(1);
    }

    /// Shows the kernel what was pushed.
    pub fn publish(&mut self) {
        self.word(self.producer).store(self.own, Ordering::Release);
    }

    /// Whether the kernel waits to be called.
    pub fn wants_wake_up(&self) -> bool {
        self.word(self.flags).load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }
}

/// Where the rings of a socket lie.
pub fn offsets(socket: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: all zeroes are such a structure.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::xdp_mmap_offsets>() as libc::socklen_t;
    // SAFETY: the kernel writes the structure, of which the length is told.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            (&raw mut offsets).cast(),
            &raw mut length,
        )
    };
    match outcome {
        0 if length as usize == size_of::<libc::xdp_mmap_offsets>() => Ok(offsets),
        // Before Linux 5.4 there were no flags.
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}
