//! The bare side: memory that two mappings share, copied to and from by `memcpy`, stored to and
//! loaded by atomics, without checks and without rackbus.
#![allow(unsafe_code)] // the bound has no bounds checks inside of its loops

use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rackbus_memory::{Access, Region, SharedMemory};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::pingpong::{PingPongEnd, PrivateBuffer};
use super::typical;
use crate::BenchError;

/// A mapping of a memory file.
#[derive(Debug, Clone)]
pub struct Plain(Arc<Region>);

impl Plain {
    /// `bytes` of a new file, all of them touched.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn new(bytes: usize) -> Result<Plain, BenchError> {
        let (plain, _) = Plain::pair(bytes)?;
        Ok(plain)
    }

    /// The same, and a second mapping of it.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn pair(bytes: usize) -> Result<(Plain, Plain), BenchError> {
        let memory = SharedMemory::create("plain", bytes as u64)?;
        let fd = memory.descriptor().map_err(BenchError::io("sharing memory"))?;
        let map = || Region::map(fd.as_fd(), 0, bytes as u64, Access::READ | Access::WRITE);
        let (one, other) = (map()?, map()?);
        one.whole().fill(1);
        other.whole().fill(1);
        Ok((Plain(Arc::new(one)), Plain(Arc::new(other))))
    }

    /// Where a range begins.
    ///
    /// # Panics
    /// When it is not inside: the cases are part of this program.
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        self.0.slice(offset, length).expect("a case stays inside of its memory").as_ptr()
    }

    /// Seconds of writing `data` to the beginning.
    ///
    /// # Errors
    /// None: copying does not fail.
    pub fn writes(&self, data: &[u8], time: Duration, batch: u64) -> Result<f64, BenchError> {
        let (from, to) = (data.as_ptr(), self.at(0, data.len()));
        typical(time, batch, || {
            // SAFETY: `at` checked the range; nobody else uses it.
            unsafe { ptr::copy_nonoverlapping(black_box(from), to, black_box(data.len())) };
            Ok(())
        })
    }

    /// Seconds of reading the beginning to `out`.
    ///
    /// # Errors
    /// None: copying does not fail.
    pub fn reads(&self, out: &mut [u8], time: Duration, batch: u64) -> Result<f64, BenchError> {
        let (from, to, length) = (self.at(0, out.len()), out.as_mut_ptr(), out.len());
        typical(time, batch, || {
            // SAFETY: as above.
            unsafe { ptr::copy_nonoverlapping(black_box(from), to, black_box(length)) };
            Ok(())
        })
    }

    /// Seconds of copying `length` bytes from `source`, walking through both.
    ///
    /// # Errors
    /// None: copying does not fail.
    pub fn walk(
        &self,
        source: &Plain,
        length: usize,
        time: Duration,
        batch: u64,
    ) -> Result<f64, BenchError> {
        let bytes = self.0.len().min(source.0.len());
        let (from, to) = (source.at(0, bytes), self.at(0, bytes));
        let mut at = 0;
        typical(time, batch, || {
            // SAFETY: `at + length` is within both ranges, which are different memory.
            unsafe { ptr::copy_nonoverlapping(from.add(at), to.add(at), black_box(length)) };
            at = if at + 2 * length > bytes { 0 } else { at + length };
            Ok(())
        })
    }

    /// The region, as the other side of a copy.
    pub fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

/// One side of two lines, one in each direction: a number is stored to one, awaited in the other.
/// In cache lines of its own, as the sides of two processes are.
#[derive(Debug)]
#[repr(align(128))]
pub struct PingPongLines {
    plain: Plain,
    /// Where this side stores, and where it looks.
    at: (usize, usize),
    sent: u64,
    received: u64,
}

impl PingPongLines {
    /// Both sides, over the page at `page`.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn pair(page: usize) -> Result<(PingPongLines, PingPongLines), BenchError> {
        let (near, far) = Plain::pair((page + 1) << 12)?;
        let (there, back) = (page << 12, (page << 12) + 2048);
        near.0.whole().fill(0);
        let side = |plain, at| PingPongLines { plain, at, sent: 0, received: 0 };
        Ok((side(near, (there, back)), side(far, (back, there))))
    }

    fn line(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `pair` made the memory that large, and aligned it; both sides use atomics.
        unsafe { AtomicU64::from_ptr(self.plain.0.whole().as_ptr().add(offset).cast()) }
    }
}

impl PingPongEnd for PingPongLines {
    fn send(&mut self) -> Result<(), BenchError> {
        self.sent += 1;
        self.line(self.at.0).store(self.sent, Ordering::Release);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.received += 1;
        while self.line(self.at.1).load(Ordering::Acquire) != self.received {}
        Ok(())
    }
}

/// One side of two buffers, one in each direction: a message is copied in, with its number as its
/// last four bytes, and copied out.
#[derive(Debug)]
#[repr(align(128))]
pub struct Buffers {
    plain: Plain,
    at: (usize, usize),
    data: PrivateBuffer,
    sent: u32,
    received: u32,
}

impl Buffers {
    /// Both sides, for messages of `bytes`, a multiple of four, from `at` of a file on.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn pair(at: usize, bytes: usize) -> Result<(Buffers, Buffers), BenchError> {
        let back = at + bytes.next_multiple_of(2048);
        let (near, far) = Plain::pair(back + bytes)?;
        near.0.whole().fill(0);
        let data = || PrivateBuffer::new(bytes);
        let side = |plain, at| Buffers { plain, at, data: data(), sent: 0, received: 0 };
        Ok((side(near, (at, back)), side(far, (back, at))))
    }

    /// A message's beginning, and its number.
    fn message(&self, offset: usize) -> (*mut u8, &AtomicU32) {
        // SAFETY: `pair` made the memory that large; the number is aligned as the message is.
        unsafe {
            let start = self.plain.0.whole().as_ptr().add(offset);
            (start, AtomicU32::from_ptr(start.add(self.data.len() - 4).cast()))
        }
    }
}

impl PingPongEnd for Buffers {
    fn send(&mut self) -> Result<(), BenchError> {
        self.sent += 1;
        let (start, number) = self.message(self.at.0);
        // SAFETY: the message is inside; the other side does not read it before its number.
        unsafe {
            ptr::copy_nonoverlapping(self.data.as_ptr(), start, black_box(self.data.len() - 4))
        };
        number.store(self.sent, Ordering::Release);
        Ok(())
    }

    fn wait(&mut self) -> Result<(), BenchError> {
        self.received += 1;
        let (start, number) = self.message(self.at.1);
        while number.load(Ordering::Acquire) != self.received {}
        let length = black_box(self.data.len() - 4);
        // SAFETY: the message is inside; the other side does not write it before the answer.
        unsafe { ptr::copy_nonoverlapping(start, self.data.as_mut_ptr(), length) };
        Ok(())
    }
}

/// A socket on which memory files are passed.
#[derive(Debug)]
pub struct FilePassing(OwnedFd, OwnedFd);

impl FilePassing {
    /// Both ends, in this process.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> Result<FilePassing, BenchError> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let pair = socketpair(family, kind, SocketFlags::CLOEXEC, None);
        let (one, other) = pair.map_err(|errno| BenchError::io("making a socket")(errno.into()))?;
        Ok(FilePassing(one, other))
    }

    /// Makes a memory file of `bytes`, maps it, passes it, maps what came, touches both, and lets
    /// go of all: the least that two processes need to share memory.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn share(&self, bytes: usize) -> Result<(), BenchError> {
        self.pass(bytes).map_err(|errno| BenchError::io("passing memory")(errno.into()))
    }

    fn pass(&self, bytes: usize) -> rustix::io::Result<()> {
        let file = rustix::fs::memfd_create("passed", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        let ours = touched(file.as_fd(), bytes)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut slices = [IoSliceMut::new(&mut byte)];
        recvmsg(&self.1, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(files) = message else { continue };
            for file in files {
                let theirs = touched(file.as_fd(), bytes)?;
                // SAFETY: mapped by `touched`, and not used any more.
                unsafe { rustix::mm::munmap(theirs, bytes)? };
            }
        }
        // SAFETY: as above.
        unsafe { rustix::mm::munmap(ours, bytes) }
    }
}

/// A new mapping of a file whose first byte was written.
fn touched(file: BorrowedFd<'_>, bytes: usize) -> rustix::io::Result<*mut std::ffi::c_void> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping overlaps nothing; its first byte is inside of the file.
    unsafe {
        let start =
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)?;
        start.cast::<u8>().write_volatile(1);
        Ok(start)
    }
}
