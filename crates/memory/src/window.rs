//! Memory of the host's in a virtual machine: a file system of the guest whose files are windows to it.
//!
//! A guest's virtiofs maps the pages of a file straight to a device's memory (DAX), so that loads and
//! stores of the guest touch the host's memory. Files of no other file system but memory's own are mapped
//! ([`Region`](crate::Region)), because their pages may wait for somebody; whoever has found a mounted
//! window says so ([`admit`]), proves that what is stored on one side is seen on the other, and takes the
//! word back if it is not.
//!
//! An eventfd of the host's cannot be had in a guest. In its place is a file of the same file system
//! ([`WindowEvent`]): reading it waits for a ring, writing to it rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;

/// The device number of the file system that is admitted, and a bit that says that there is one.
static ADMITTED: AtomicU64 = AtomicU64::new(0);
const THERE: u64 = 1 << 63;

/// How long to wait with the next look when the far side cannot be asked.
const PAUSE: Duration = Duration::from_millis(20);

/// Lets files of the file system that `file` is on be mapped as memory, and no other window's.
///
/// # Errors
/// When the system does not say which that is.
pub fn admit(file: impl AsFd) -> std::io::Result<()> {
    let device = rustix::fs::fstat(file)?.st_dev;
    ADMITTED.store(device | THERE, Ordering::Release);
    Ok(())
}

/// Takes back what [`admit`] said. Mappings stay.
pub fn withdraw() {
    ADMITTED.store(0, Ordering::Release);
}

/// Whether files on the file system with this device number are windows to memory.
pub(crate) fn is_admitted(device: u64) -> bool {
    ADMITTED.load(Ordering::Acquire) == device | THERE
}

/// An event of the host's, as a file of the window.
#[derive(Debug)]
pub struct WindowEvent {
    file: OwnedFd,
    /// The number of the last ring that is known here.
    seen: AtomicU64,
}

impl WindowEvent {
    /// Takes a file that is on an admitted window; gives back what is not.
    pub(crate) fn new(file: OwnedFd) -> Result<WindowEvent, OwnedFd> {
        match rustix::fs::fstat(&file) {
            Ok(stat) if is_admitted(stat.st_dev) => {
                Ok(WindowEvent { file, seen: AtomicU64::new(0) })
            }
            _ => Err(file),
        }
    }

    /// Wakes everybody who sleeps for it, on whichever machine.
    pub(crate) fn ring(&self) {
        // What the far side does not take, nobody who is there waits for.
        let _ = rustix::io::pwrite(&self.file, &1_u64.to_le_bytes(), 0);
    }

    /// The number of the last ring that is known here: to be taken before whoever rings is told that
    /// somebody waits.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(Ordering::Acquire)
    }

    /// Sleeps until there was a ring after the one with the number `seen`; at most as long as the far side
    /// lets anybody wait, which is less than a second.
    pub(crate) fn wait(&self, seen: u64) {
        let mut number = [0; 8];
        match rustix::io::pread(&self.file, &mut number, seen) {
            Ok(8) => self.seen.store(u64::from_le_bytes(number), Ordering::Release),
            Ok(_) | Err(Errno::INTR) => {}
            // The caller looks at the count again, and finds its end there.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl AsFd for WindowEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Region, RegionError};

    /// Which window is admitted is the process': one test for all of it.
    #[test]
    fn only_files_of_the_admitted_window_are_mapped() {
        let path = std::env::temp_dir().join(format!("rackbus-window-{}", std::process::id()));
        let there = "/proc/self/mountinfo";
        let other = std::fs::File::open(there).unwrap();
        let map = || Region::map(other.as_fd(), 0, 8, Access::READ);
        assert!(matches!(map(), Err(RegionError::NotMemory)), "{}", path.display());
        admit(&other).unwrap();
        // It has no length, which is looked at next.
        assert!(matches!(map(), Err(RegionError::OutOfFile { .. })));
        withdraw();
        assert!(matches!(map(), Err(RegionError::NotMemory)));
        let file = OwnedFd::from(std::fs::File::open(there).unwrap());
        assert!(WindowEvent::new(file).is_err());
    }
}
