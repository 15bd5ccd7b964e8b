//! An interrupt between processes: a count in shared memory, and a way to sleep until it moves.
//!
//! A ring is one atomic addition. Only when somebody has announced that it sleeps does a ring also
//! make a system call: a wake-up costs a hundred times the rest. Who waits looks at the count for a
//! bounded time ([`AdaptiveSpin`]) before it sleeps.
//!
//! Any number of threads in any number of processes may wait on one doorbell, each for another
//! count. They sleep on the line itself (futex), because an eventfd is one token: whoever takes it
//! takes it from all the others. The event is for one more party who cannot sleep on memory:
//! a thread that polls many descriptors, or a virtual machine whose interrupt it is
//! ([`Doorbell::arm`]).
//!
//! A peer that writes rubbish into the line, or dies between counting its ring and waking, can
//! delay a waiter until its next look, [`RECHECK`] later; never keep it.

mod line;

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rackbus_fabric::Access;
use rustix::thread::futex;

use crate::peer_event::PeerEvent;
use crate::region::Region;
use crate::spin::{AdaptiveSpin, Spinning, nanoseconds};
use crate::window::WindowEvent;

pub(crate) use line::{DoorbellLine, Look};

/// Bytes of a doorbell in a region: a cache line of its own.
pub const DOORBELL_BYTES: usize = 64;
const _: () = assert!(size_of::<DoorbellLine>() == DOORBELL_BYTES);

/// The longest sleep between two looks at the line.
pub const RECHECK: Duration = Duration::from_millis(500);

/// Between two looks at the line where the next ring cannot be slept for until a deadline: from, and up to.
const SLICES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// An event whose wait ends by a ring or when the far side says so, and by no deadline of the waiter's.
trait FarEvent {
    /// The number of the last ring that is known here.
    fn seen(&self) -> u64;
    /// Sleeps until there was a ring after that one, or for [`RECHECK`].
    fn wait(&self, seen: u64);
}

impl FarEvent for WindowEvent {
    fn seen(&self) -> u64 {
        WindowEvent::seen(self)
    }

    fn wait(&self, seen: u64) {
        WindowEvent::wait(self, seen);
    }
}

/// Why a wait ended without a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// No ring came in time.
    #[error("no ring came in time")]
    TimedOut,
    /// The doorbell was closed, or its memory was taken away: no ring will come any more.
    #[error("the doorbell was closed")]
    Closed,
}

/// One end of a doorbell; every party that rings or waits has its own, over the same bytes.
#[derive(Debug)]
pub struct Doorbell {
    region: Arc<Region>,
    line: NonNull<DoorbellLine>,
    /// Whoever has the line may have the event, too: it is never waited for.
    event: PeerEvent,
    /// Closed as far as this end knows: a peer that opens the line again does not open this.
    closed: AtomicBool,
}

// SAFETY: the line is atomics in memory that `region` keeps mapped.
unsafe impl Send for Doorbell {}
// SAFETY: as above.
unsafe impl Sync for Doorbell {}

impl Doorbell {
    /// The doorbell in the [`DOORBELL_BYTES`] from `offset` of `region`; zeroes are a doorbell that
    /// never rang. `None` when they are not inside, not aligned to a cache line, or the region
    /// cannot be both read and written.
    pub fn new(
        region: Arc<Region>,
        offset: usize,
        event: impl Into<PeerEvent>,
    ) -> Option<Doorbell> {
        let (line, event) = (shared::<DoorbellLine>(&region, offset)?, event.into());
        Some(Doorbell { region, line, event, closed: AtomicBool::new(false) })
    }

    /// The event that is rung where somebody polls it.
    pub(crate) fn event(&self) -> &PeerEvent {
        &self.event
    }

    fn line(&self) -> &DoorbellLine {
        // SAFETY: checked in `new`; the region stays mapped, and atomics are sound on memory that
        // others change.
        unsafe { self.line.as_ref() }
    }

    /// Rings: who waits sees another count.
    #[inline]
    pub fn ring(&self) {
        let wake = self.line().ring();
        self.wake(wake);
    }

    /// How often it rang, modulo 2^32.
    #[inline]
    pub fn count(&self) -> u32 {
        self.line().count()
    }

    /// Waits until the count is another than `seen`, and returns it: polls as long as `spin` says,
    /// then sleeps. A ring that came before is seen at once.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] after `timeout` (`None` waits for ever), [`WaitError::Closed`] when
    /// no ring can come any more; what the rings announced before is then for the caller to look
    /// at once more.
    pub fn wait(
        &self,
        seen: u32,
        spin: &mut AdaptiveSpin,
        timeout: Option<Duration>,
    ) -> Result<u32, WaitError> {
        let outcome = match self.event.window() {
            Some(event) => self.wait_far(event, seen, spin, timeout),
            None => {
                let sharing = futex::Flags::empty();
                wait_on(self.line(), seen, || self.is_closed(), sharing, spin, timeout)
            }
        };
        match outcome {
            Some(Look::Rung(count)) => Ok(count),
            Some(_) => Err(WaitError::Closed),
            None => Err(WaitError::TimedOut),
        }
    }

    /// The same in a virtual machine, whose futexes nobody outside of it can wake: sleeps for the event.
    fn wait_far(
        &self,
        event: &impl FarEvent,
        seen: u32,
        spin: &mut AdaptiveSpin,
        timeout: Option<Duration>,
    ) -> Option<Look> {
        let found = || {
            let look = if self.is_closed() { Look::Closed } else { self.line().look(seen) };
            Some(look).filter(|look| *look != Look::Same)
        };
        let begun = Instant::now();
        let deadline = timeout.and_then(|timeout| begun.checked_add(timeout));
        let mut spinning = Spinning::new(spin.budget().min(timeout.unwrap_or(Duration::MAX)));
        let mut slice = SLICES.0;
        loop {
            if let Some(found) = found() {
                spin.waited(nanoseconds(begun.elapsed()));
                return Some(found);
            }
            if spinning.goes_on() {
                continue;
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            match left {
                Some(Duration::ZERO) => return found(),
                // The far side would not let go of this thread before the deadline.
                Some(left) if left < RECHECK => {
                    std::thread::sleep(slice.min(left));
                    slice = (slice * 2).min(SLICES.1);
                    continue;
                }
                _ => {}
            }
            // Taken before it is announced that somebody waits: a ring that comes between is a later one.
            let rung = event.seen();
            if self.line().arm(seen) == Look::Same {
                event.wait(rung);
            }
        }
    }

    /// Wakes all who sleep for it or poll its event, without a ring: for one that was counted where they
    /// cannot be woken from, in a virtual machine.
    pub fn relay(&self) {
        // Whoever rang has moved the turn on already: nothing in the line says who still sleeps.
        wake_all(self.line().turn_word(), futex::Flags::empty());
        self.event.ring();
    }

    /// Closes it for ever, for everybody, and wakes all who wait. Counts as one more ring.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let wake = self.line().close();
        self.wake(wake);
    }

    /// Closes this end: who waits here is woken, and no ring is heard here any more. The others'
    /// ends continue.
    pub fn leave(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if self.event.window().is_some() {
            return self.event.ring();
        }
        if self.line().rouse() {
            wake_all(self.line().turn_word(), futex::Flags::empty());
        }
    }

    /// Whether this end knows that it was closed, or its memory was taken away, without a look at
    /// the line: for who is about to ring. A look would fetch the line from who polls it, and the
    /// ring would fetch it once more.
    #[inline]
    pub fn is_known_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.region.truncated()
    }

    /// Whether it was closed, or its memory was taken away.
    pub fn is_closed(&self) -> bool {
        if self.closed.load(Ordering::Acquire) {
            return true;
        }
        let closed = self.line().is_closed() || self.region.truncated();
        if closed {
            self.closed.store(true, Ordering::Release);
        }
        closed
    }

    /// Asks that the next ring, or the closing, rings the event too, once: then the descriptor
    /// ([`AsFd`]) is readable. False when there is nothing to wait for, because the count is
    /// another than `seen` already or the doorbell is closed. For one poller.
    pub fn arm(&self, seen: u32) -> bool {
        self.line().arm(seen) == Look::Same && !self.is_closed()
    }

    /// Takes the event back to rest; for the poller, before it looks at the count.
    pub fn disarm(&self) {
        self.event.drain();
    }

    #[inline]
    fn wake(&self, wake: line::Wake) {
        if self.event.window().is_some() {
            if wake.sleepers || wake.poller {
                self.event.ring();
            }
            return;
        }
        if wake.sleepers {
            wake_all(self.line().turn_word(), futex::Flags::empty());
        }
        if wake.poller {
            self.event.ring();
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// How often the doorbell at `offset` of a file rang, modulo 2^32, for who does not map it.
///
/// # Errors
/// When the file has no doorbell there, or cannot be read.
pub fn count_in(file: impl AsFd, offset: u64) -> std::io::Result<u32> {
    let mut count = [0; 4];
    match rustix::io::pread(file, &mut count, offset)? {
        4 => Ok(u32::from_ne_bytes(count)),
        _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A structure of atomics at `offset` of `region`: `None` when it is not inside, not aligned, or
/// the region cannot be both read and written.
pub(crate) fn shared<T>(region: &Region, offset: usize) -> Option<NonNull<T>> {
    if !region.access().contains(Access::READ | Access::WRITE) {
        return None;
    }
    let at = NonNull::new(region.slice(offset, size_of::<T>())?.as_ptr())?.cast::<T>();
    at.is_aligned().then_some(at)
}

/// Waits until `line` has another count than `seen`, or is closed, or `gone` says that nobody will
/// ring it any more; `None` when that took longer than `timeout`.
pub(crate) fn wait_on(
    line: &DoorbellLine,
    seen: u32,
    gone: impl Fn() -> bool + Copy,
    sharing: futex::Flags,
    spin: &mut AdaptiveSpin,
    timeout: Option<Duration>,
) -> Option<Look> {
    let found = || {
        let look = if gone() { Look::Closed } else { line.look(seen) };
        Some(look).filter(|look| *look != Look::Same)
    };
    if let Some(found) = found() {
        return Some(found);
    }
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut spinning = Spinning::new(spin.budget().min(timeout.unwrap_or(Duration::MAX)));
    while spinning.goes_on() {
        // Whether anybody can ring at all is asked when it did not in that time.
        let look = line.look(seen);
        if look != Look::Same {
            spin.found();
            return Some(look);
        }
    }
    // The spin began this long ago; its beginning was no time to look at the clock.
    let (spun, slept) = (spin.budget_ns(), Instant::now());
    let outcome = sleep_on(line, seen, found, gone, sharing, deadline);
    spin.waited(spun.saturating_add(nanoseconds(slept.elapsed())));
    outcome
}

/// Sleeps until `found` finds something.
fn sleep_on(
    line: &DoorbellLine,
    seen: u32,
    found: impl Fn() -> Option<Look>,
    gone: impl Fn() -> bool,
    sharing: futex::Flags,
    deadline: Option<Instant>,
) -> Option<Look> {
    if let Some(found) = found() {
        return Some(found);
    }
    loop {
        let left = deadline.map_or(RECHECK, |at| at.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return found();
        }
        match line.announce(seen) {
            // Announced first: who makes it so that nobody is to wait here looks for that after it.
            Ok(_) if gone() => return Some(Look::Closed),
            Ok(turn) => sleep(line.turn_word(), turn, sharing, left.min(RECHECK)),
            Err(look) => return Some(look),
        }
        if let Some(found) = found() {
            return Some(found);
        }
    }
}

/// Sleeps while the word at `turn` is `expected`, at most for `timeout`.
fn sleep(turn: *const u32, expected: u32, sharing: futex::Flags, timeout: Duration) {
    let timeout = rustix::time::Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the address is inside of a `DoorbellLine` that the caller holds; only the kernel accesses it
    // at this size.
    let word = unsafe { &*turn.cast::<AtomicU32>() };
    // However it ends, the caller looks again.
    let _ = futex::wait(word, sharing, expected, Some(&timeout));
}

/// Wakes all who sleep on the word at `turn`.
#[cold]
pub(crate) fn wake_all(turn: *const u32, sharing: futex::Flags) {
    // SAFETY: as in `sleep`.
    let word = unsafe { &*turn.cast::<AtomicU32>() };
    // It fails only for memory that is gone, where nobody sleeps.
    let _ = futex::wake(word, sharing, i32::MAX as u32);
}

#[cfg(test)]
mod tests;
