//! Memory of the host's in a virtual machine: a file system of the guest whose files are windows to it.
//!
//! A guest's virtiofs maps the pages of a file straight to a device's memory (DAX), so that loads and
//! stores of the guest touch the host's memory. Files of no other file system but memory's own are mapped
//! ([`Region`]), because their pages may wait for somebody; whoever has found a mounted
//! window says so ([`admit`]), proves that what is stored on one side is seen on the other, and takes the
//! word back if it is not.
//!
//! An eventfd of the host's cannot be used in a guest. In its place is a file of the same file system
//! ([`WindowEvent`]): reading it waits for a ring, writing to it rings.
//!
//! Such files are read past the page cache: the guest's kernel has the far side write to the reader's own
//! pages. Where a process forks meanwhile, Linux before 6.12 may leave those to the child, and the reader
//! finds what was there before. So everything is read into memory that forks share ([`ReadBuffer`]).

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::doorbell::RECHECK;
use crate::region::{Region, RegionError};

/// Which file systems are windows, each by its device number and a bit that says that there is one: one that is to
/// prove itself, and one that has done so, which stays when another one fails to.
struct Admitted {
    tried: AtomicU64,
    kept: AtomicU64,
}

static ADMITTED: Admitted = Admitted::none();
const THERE: u64 = 1 << 63;

impl Admitted {
    const fn none() -> Admitted {
        Admitted { tried: AtomicU64::new(0), kept: AtomicU64::new(0) }
    }

    fn is_empty(&self) -> bool {
        [&self.kept, &self.tried].iter().all(|it| it.load(Ordering::Acquire) == 0)
    }

    fn has(&self, device: u64) -> bool {
        [&self.kept, &self.tried].iter().any(|it| it.load(Ordering::Acquire) == device | THERE)
    }
}

/// How long to wait with the next look when the far side cannot be asked.
const PAUSE: Duration = Duration::from_millis(20);

/// How soon the far side lets go of somebody whom it has no room to let wait: it keeps others for longer. It is also the
/// longest pause before the next question, so that nothing is noticed later than after [`RECHECK`].
const SOON: Duration = RECHECK.checked_div(2).expect("by two");
/// How long who was answered too soon pauses at first; each further time it is twice as long.
const SHORTEST_PAUSE: Duration = Duration::from_millis(8);

/// How long to wait before the far side is asked again that had nothing to tell. Where more wait than it has room for,
/// it lets go of those who came first; if they asked at once, they would drive out the next ones, for ever.
#[derive(Debug, Default)]
pub struct AskingPace(Duration);

impl AskingPace {
    /// There was something to tell.
    pub fn found(&mut self) {
        self.0 = Duration::ZERO;
    }

    /// The far side had nothing to tell, and has waited for so long; the pause from then on.
    pub fn nothing(&mut self, waited: Duration) -> Duration {
        self.0 = match waited < SOON {
            true => (self.0 * 2).clamp(SHORTEST_PAUSE, SOON),
            false => Duration::ZERO,
        };
        self.0
    }
}

/// Lets files of the file system that `file` is on be mapped as memory, and no other window's.
///
/// # Errors
/// When the system does not say which that is.
pub fn admit(file: impl AsFd) -> std::io::Result<()> {
    let device = rustix::fs::fstat(file)?.st_dev;
    ADMITTED.tried.store(device | THERE, Ordering::Release);
    Ok(())
}

/// The window that `file` is on has proved itself: it stays, whatever others do.
///
/// # Errors
/// When the system does not say which that is.
pub fn keep(file: impl AsFd) -> std::io::Result<()> {
    let device = rustix::fs::fstat(file)?.st_dev;
    ADMITTED.kept.store(device | THERE, Ordering::Release);
    Ok(())
}

/// Takes back what [`admit`] said, but not what [`keep`] did. Mappings stay.
pub fn withdraw() {
    ADMITTED.tried.store(0, Ordering::Release);
}

/// Whether `file` is on a window to memory. Where there is none, the file is not asked: one of a peer may be on a file system
/// that does not answer.
pub(crate) fn has(file: BorrowedFd<'_>) -> bool {
    !ADMITTED.is_empty() && rustix::fs::fstat(file).is_ok_and(|stat| is_admitted(stat.st_dev))
}

/// Whether files on the file system with this device number are windows to memory.
pub(crate) fn is_admitted(device: u64) -> bool {
    ADMITTED.has(device)
}

/// Memory to read a window's files into.
#[derive(Debug)]
pub struct ReadBuffer(Region);

impl ReadBuffer {
    /// Of so many bytes.
    ///
    /// # Errors
    /// When the process has no room.
    pub fn new(bytes: usize) -> Result<ReadBuffer, RegionError> {
        Ok(ReadBuffer(Region::shared_with_forks(bytes as u64)?))
    }

    /// Reads from `offset` of `file`, as much as there is and has room; how much.
    ///
    /// # Errors
    /// What the system says.
    pub fn read_at(&mut self, file: impl AsFd, offset: u64) -> std::io::Result<usize> {
        let (place, fd) = (self.0.whole(), file.as_fd().as_raw_fd());
        let offset = offset.try_into().map_err(|_| Errno::INVAL)?;
        // SAFETY: the range is mapped as long as the region, which is borrowed for the call; it is
        // accessed by nobody else but forks, through raw copies.
        let read = unsafe { libc::pread(fd, place.as_ptr().cast(), place.len(), offset) };
        usize::try_from(read).map_err(|_| std::io::Error::last_os_error())
    }

    /// The first bytes of what was read, at most so many.
    pub fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length.min(self.0.len())];
        self.0.whole().copy_to(&mut bytes);
        bytes
    }
}

/// The type that a window's own commands have (bits 8 to 15 of their number, as `_IOWR` of Linux makes it). Linux itself
/// does nothing with commands of this type on files of other kinds than directories of FAT.
pub const COMMAND_TYPE: u8 = b'r';

/// Has the far side of `file` do something with `bytes`, whose number `command` says, and put its answer there;
/// the result of that.
///
/// # Errors
/// `ENOTTY` where `file` is not on the admitted window; `EINVAL` when `bytes` are fewer than `command` says, or it is not
/// a command of [`COMMAND_TYPE`] that gives and takes bytes; what the system says.
pub fn control(file: impl AsFd, command: u32, bytes: &mut [u8]) -> std::io::Result<usize> {
    if !has(file.as_fd()) {
        return Err(Errno::NOTTY.into());
    }
    // As the system itself takes such a number apart.
    let (direction, size) = (command >> 30, (command >> 16 & 0x3fff) as usize);
    let kind = (command >> 8 & 0xff) as u8;
    if direction != 3 || kind != COMMAND_TYPE || size == 0 || bytes.len() < size {
        return Err(Errno::INVAL.into());
    }
    let (fd, place) = (file.as_fd().as_raw_fd(), bytes.as_mut_ptr());
    // SAFETY: the guest's kernel reads and writes, for a file of a window, as many bytes as the command says, which are
    // there and borrowed for the call. Commands that the kernel takes itself, and for which it may access more than
    // that, have other types.
    let result = unsafe { libc::ioctl(fd, command.into(), place) };
    usize::try_from(result).map_err(|_| std::io::Error::last_os_error())
}

thread_local! {
    /// What this thread waits for rings with, and in which process.
    static RING: RefCell<Option<(u32, ReadBuffer)>> = const { RefCell::new(None) };
}

/// Reads eight bytes from `offset` of `file`; `None` when there are none.
fn number_at(file: &OwnedFd, offset: u64) -> std::io::Result<Option<u64>> {
    RING.with_borrow_mut(|ring| {
        let process = std::process::id();
        // A fork's would be its parent's as well.
        if ring.as_ref().is_none_or(|(owner, _)| *owner != process) {
            *ring = Some((process, ReadBuffer::new(8).map_err(std::io::Error::other)?));
        }
        let Some((_, buffer)) = ring.as_mut() else { return Ok(None) };
        let read = buffer.read_at(file, offset)?;
        Ok(buffer.bytes(read).try_into().map(u64::from_le_bytes).ok())
    })
}

/// An event of the host's, as a file of the window.
#[derive(Debug)]
pub struct WindowEvent {
    file: OwnedFd,
    /// The number of the last ring that is known here.
    seen: AtomicU64,
    /// That of all who wait here.
    pace: Mutex<AskingPace>,
}

impl WindowEvent {
    /// Takes a file that is on an admitted window; gives back what is not.
    pub(crate) fn new(file: OwnedFd) -> Result<WindowEvent, OwnedFd> {
        match has(file.as_fd()) {
            true => Ok(WindowEvent { file, seen: AtomicU64::new(0), pace: Mutex::default() }),
            false => Err(file),
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
        let begun = Instant::now();
        let pace = || self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        match number_at(&self.file, seen) {
            Ok(Some(number)) if number != seen => {
                self.seen.store(number, Ordering::Release);
                pace().found();
            }
            Ok(_) => {
                let pause = pace().nothing(begun.elapsed());
                std::thread::sleep(pause);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // The caller looks at the count again, and finds its end there.
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl From<WindowEvent> for OwnedFd {
    fn from(event: WindowEvent) -> OwnedFd {
        event.file
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

    #[test]
    fn a_window_that_has_proved_itself_stays_when_another_one_fails_to() {
        let admitted = Admitted::none();
        assert!(!admitted.has(0));
        admitted.tried.store(5 | THERE, Ordering::Release);
        admitted.kept.store(5 | THERE, Ordering::Release);
        admitted.tried.store(6 | THERE, Ordering::Release);
        assert!(admitted.has(5) && admitted.has(6));
        admitted.tried.store(0, Ordering::Release);
        assert!(admitted.has(5) && !admitted.has(6) && !admitted.has(0));
    }

    /// Which window is admitted is the process': one test for all of it.
    #[test]
    fn a_buffer_has_what_was_read_and_no_more() {
        let file = crate::SharedMemory::create("test", 16).unwrap();
        file.whole().copy_from(b"0123456789abcdef");
        let (descriptor, mut buffer) = (file.descriptor().unwrap(), ReadBuffer::new(8).unwrap());
        assert_eq!(buffer.read_at(&descriptor, 2).unwrap(), 8);
        assert_eq!(buffer.bytes(8), b"23456789");
        assert_eq!(buffer.read_at(&descriptor, 14).unwrap(), 2);
        assert_eq!((buffer.bytes(2), buffer.bytes(100).len()), (b"ef".to_vec(), 8));
        assert_eq!(number_at(&descriptor, 0).unwrap(), Some(u64::from_le_bytes(*b"01234567")));
        assert_eq!(number_at(&descriptor, 12).unwrap(), None);
        assert!(buffer.read_at(&descriptor, u64::MAX).is_err());
    }

    #[test]
    fn waiting_for_a_window_polls_less_and_less_often() {
        let mut pace = AskingPace::default();
        assert_eq!(pace.nothing(RECHECK), Duration::ZERO);
        assert_eq!(pace.nothing(SOON), Duration::ZERO);
        let pauses: Vec<u128> = (0..8).map(|_| pace.nothing(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [8, 16, 32, 64, 128, 250, 250, 250]);
        // What comes in a pause is noticed within the time that a waiter may be late anyway.
        assert!(SOON + pace.nothing(SOON - Duration::from_nanos(1)) <= RECHECK);
        pace.found();
        assert_eq!(pace.nothing(Duration::ZERO), SHORTEST_PAUSE);
        pace.nothing(Duration::ZERO);
        assert_eq!(pace.nothing(RECHECK), Duration::ZERO);
        assert_eq!(pace.nothing(Duration::ZERO), SHORTEST_PAUSE);
    }

    /// A far side that has no room for anybody to wait answers at once.
    #[test]
    fn a_waiter_whom_the_far_side_lets_go_at_once_does_not_spin() {
        // What is read at offset 8 is the number of the last ring.
        let file = crate::SharedMemory::create("test", 16).unwrap();
        let rings = |number| file.whole().store_u64(8, number, Ordering::SeqCst).unwrap();
        rings(8);
        let seen = AtomicU64::new(0);
        let event = WindowEvent { file: file.descriptor().unwrap(), seen, pace: Mutex::default() };
        let (begun, mut looks) = (Instant::now(), 0);
        while begun.elapsed() < RECHECK {
            event.wait(8);
            looks += 1;
        }
        assert!(looks <= 8, "{looks} looks");
        // A ring is another number: nobody pauses then, and the next pause is a short one.
        rings(5);
        event.wait(8);
        assert_eq!(event.pace.lock().unwrap().0, Duration::ZERO);
        assert_eq!(event.seen(), 5);
    }

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
        let ask = |command, length| {
            let error = control(&other, command, &mut vec![0; length]).unwrap_err();
            Errno::from_io_error(&error)
        };
        let command = |direction: u32, size: u32, kind: u8| {
            direction << 30 | size << 16 | u32::from(kind) << 8 | 1
        };
        // It is a window by name only, whose kernel knows no such command.
        assert_eq!(ask(command(3, 16, COMMAND_TYPE), 16), Some(Errno::NOTTY));
        assert_eq!(ask(command(3, 16, COMMAND_TYPE), 15), Some(Errno::INVAL));
        assert_eq!(ask(command(3, 0, COMMAND_TYPE), 16), Some(Errno::INVAL));
        assert_eq!(ask(command(1, 16, COMMAND_TYPE), 16), Some(Errno::INVAL));
        // Linux would read and write more than the 32 bytes that this says (FS_IOC_FIEMAP).
        assert_eq!(ask(0xc020_660b, 32), Some(Errno::INVAL));
        withdraw();
        assert_eq!(ask(0xc020_660b, 32), Some(Errno::NOTTY));
        assert!(matches!(map(), Err(RegionError::NotMemory)));
        let file = OwnedFd::from(std::fs::File::open(there).unwrap());
        assert!(WindowEvent::new(file).is_err());
    }
}
