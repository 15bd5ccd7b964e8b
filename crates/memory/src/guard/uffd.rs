//! Write protection in the kernel (userfaultfd): who writes to a protected page waits there until
//! the protection is gone, whatever signals it has blocked and whoever handles them. Linux 6.4 and
//! newer do it for all that is frozen here: shared memory (since 5.19), and private pages that were
//! never touched. Linux 5.14 and newer keep whoever accesses shared memory waiting, for loads as well. Processes without rights may have it for what they write themselves; with rights
//! (`CAP_SYS_PTRACE`, `/dev/userfaultfd`) system calls wait as well, which otherwise fail with
//! `EFAULT`.
//!
//! Nobody reads the descriptor: whoever waits is woken when its range is unregistered.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::mm::UserfaultfdFlags;

/// What the kernel is asked for when the descriptor is made.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// A range with a mode; what follows it differs between the calls.
#[repr(C)]
struct Ranged {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

const API: u64 = 0xaa;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01_u32 as libc::Ioctl;
const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02_u32 as libc::Ioctl;
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xc018_aa06_u32 as libc::Ioctl;
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;

/// Pages of shared memory can be protected (5.19).
const WP_SHMEM: u64 = 1 << 12;
/// Pages that were never touched as well, where the memory is private (6.4).
const WP_UNPOPULATED: u64 = 1 << 13;
/// Pages of shared memory that are nowhere (4.11), or in the file and not mapped (5.14), can be kept back.
const MISSING_SHMEM: u64 = 1 << 5;
const MINOR_SHMEM: u64 = 1 << 10;
const REGISTER_MISSING: u64 = 1 << 0;
const REGISTER_WP: u64 = 1 << 1;
const REGISTER_MINOR: u64 = 1 << 2;
const PROTECT: u64 = 1;

/// What [`Kernel::protect`] takes, and what [`Kernel::hide`] does.
const PROTECTING: u64 = WP_SHMEM | WP_UNPOPULATED;
const HIDING: u64 = MISSING_SHMEM | MINOR_SHMEM;

/// What this process may use.
struct Kernel {
    fd: OwnedFd,
    /// The process that it is for: a fork has the descriptor, but it is about its parent.
    process: u32,
    /// What the kernel was asked for, and has.
    features: u64,
}

static KERNEL: OnceLock<Option<Kernel>> = OnceLock::new();

fn kernel() -> Option<&'static Kernel> {
    let kernel = KERNEL.get_or_init(|| {
        // A kernel that lacks one of what it is asked for gives nothing of it.
        let made = Kernel::open(PROTECTING | HIDING).or_else(|| Kernel::open(HIDING));
        if made.as_ref().is_none_or(|kernel| kernel.features & PROTECTING == 0) {
            tracing::debug!("no write protection in the kernel: a signal handler does it");
        }
        made
    });
    kernel.as_ref().filter(|kernel| kernel.process == std::process::id())
}

fn by_device(flags: u32) -> Option<OwnedFd> {
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd").ok()?;
    // SAFETY: the call takes flags, and returns a new descriptor or a negative number.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    // SAFETY: nobody else has the descriptor yet.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn call<T>(fd: &OwnedFd, what: libc::Ioctl, argument: &mut T) -> bool {
    // SAFETY: each call is given the structure that it reads and writes, or one that begins with
    // it. It changes protection of mappings, never their bytes.
    unsafe { libc::ioctl(fd.as_raw_fd(), what, std::ptr::from_mut(argument)) == 0 }
}

fn ranged(start: usize, length: usize, mode: u64) -> Ranged {
    let length = length.next_multiple_of(4096) as u64;
    Ranged { start: start as u64, length, mode, ioctls: 0 }
}

impl Kernel {
    /// A descriptor with these features; `None` where the kernel has not all of them, or this process may not.
    fn open(features: u64) -> Option<Kernel> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: the descriptor is used for ranges of this process' own mappings only.
        let make = |flags| unsafe { rustix::mm::userfaultfd(flags) }.ok();
        /// `UFFD_USER_MODE_ONLY` of `userfaultfd(2)`: faults of this process only, which needs no privilege.
        const USER_MODE_ONLY: u32 = 1;
        let fd = make(flags)
            .or_else(|| by_device(flags.bits()))
            .or_else(|| make(flags | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY)))?;
        let mut api = Api { api: API, features, ioctls: 0 };
        let process = std::process::id();
        call(&fd, UFFDIO_API, &mut api).then_some(Kernel { fd, process, features })
    }

    fn protect(&self, start: usize, length: usize) -> bool {
        if self.features & PROTECTING == 0
            || !call(&self.fd, UFFDIO_REGISTER, &mut ranged(start, length, REGISTER_WP))
        {
            return false;
        }
        let done = call(&self.fd, UFFDIO_WRITEPROTECT, &mut ranged(start, length, PROTECT));
        if !done {
            self.release(start, length);
        }
        done
    }

    fn hide(&self, start: usize, length: usize) -> bool {
        let mode = REGISTER_MISSING | REGISTER_MINOR;
        if !call(&self.fd, UFFDIO_REGISTER, &mut ranged(start, length, mode)) {
            return false;
        }
        // SAFETY: a mapping of ours, of a file that is shared: what is not mapped any more is mapped again from there
        // when it is accessed, which now waits.
        let unmapped = unsafe { libc::madvise(start as *mut _, length, libc::MADV_DONTNEED) } == 0;
        if !unmapped {
            self.show(start, length);
        }
        unmapped
    }

    fn show(&self, start: usize, length: usize) {
        call(&self.fd, UFFDIO_UNREGISTER, &mut ranged(start, length, 0));
        call(&self.fd, UFFDIO_WAKE, &mut ranged(start, length, 0));
    }

    fn release(&self, start: usize, length: usize) {
        // Each alone would do where it succeeds; what was mapped anew is not protected, and what cannot
        // be unregistered for want of memory may be written to anyway. Those that came before a
        // change of mappings wait for an address, and are woken by it.
        call(&self.fd, UFFDIO_WRITEPROTECT, &mut ranged(start, length, 0));
        self.show(start, length);
    }
}

/// Lets writers to whole pages of this process' mappings wait; false where the kernel cannot or
/// may not. The range stays readable.
pub(super) fn protect(start: usize, length: usize) -> bool {
    kernel().is_some_and(|kernel| kernel.protect(start, length))
}

/// Lets whoever accesses whole pages of this process' mappings of shared memory wait, for loads as well; false
/// where the kernel cannot or may not. The pages themselves stay as they are, in their file.
pub(crate) fn hide(start: usize, length: usize) -> bool {
    kernel().is_some_and(|kernel| kernel.hide(start, length))
}

/// Lets those go on that wait because of [`hide`].
pub(crate) fn show(start: usize, length: usize) {
    if let Some(kernel) = kernel() {
        kernel.show(start, length);
    }
}

/// Lets them continue, also those that waited for what was mapped there before.
pub(super) fn release(start: usize, length: usize) {
    if let Some(kernel) = kernel() {
        kernel.release(start, length);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{Access, Region, SharedMemory};

    /// Such as Linux 6.1, of Debian 12.
    #[test]
    fn a_kernel_without_write_protection_of_all_memory_hides_it_all_the_same() {
        let Some(kernel) = Kernel::open(HIDING) else { return };
        let file = SharedMemory::reserve("test", 8192).unwrap();
        let region = Region::map(file.as_fd(), 0, 8192, Access::READ).unwrap();
        let start = region.whole().as_ptr() as usize;
        assert!(!kernel.protect(start, 8192));
        assert!(kernel.hide(start, 4096));
        std::thread::scope(|scope| {
            let read = || {
                let mut byte = [0];
                region.whole().part(0, 1).unwrap().copy_to(&mut byte);
                byte
            };
            let reading = scope.spawn(read);
            let other = Region::map(file.as_fd(), 0, 8192, Access::WRITE).unwrap();
            assert_eq!(other.whole().part(0, 1).unwrap().copy_from(&[7]), 1);
            kernel.show(start, 4096);
            assert_eq!(reading.join().unwrap(), [7]);
        });
    }
}
