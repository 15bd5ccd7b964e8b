//! Events that processes of the guest wait for, and the time.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rackbus_memory::Doorbell;
use rustix::event::epoll;

use super::{Device, now};
use crate::journal::JournalRecord;

/// How long the thread sleeps at most: less than any read of the guest's may wait.
const TICK: Duration = Duration::from_millis(250);

/// Events that one look takes in.
const EVENTS: usize = 64;

/// The events that are listened to. Nobody takes their counters back: other processes wait for the same
/// ones, and each ring is heard here as a change.
#[derive(Debug)]
pub(super) struct Bells(OwnedFd);

impl Bells {
    pub(super) fn new() -> std::io::Result<Bells> {
        Ok(Bells(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    pub(super) fn listen(&self, object: u64, bell: &Doorbell) -> std::io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.0, bell.as_fd(), epoll::EventData::new_u64(object), flags)?)
    }

    pub(super) fn forget(&self, bell: &Doorbell) {
        // One that could not be listened to is not there.
        let _ = epoll::delete(&self.0, bell.as_fd());
    }

    /// The next rings, at most until the next tick.
    fn rings(&self, limit: Duration) -> Vec<u64> {
        let limit =
            rustix::time::Timespec { tv_sec: 0, tv_nsec: limit.min(TICK).subsec_nanos().into() };
        let mut events = Vec::with_capacity(EVENTS);
        let spare = rustix::buffer::spare_capacity(&mut events);
        // An interrupted wait is a look too many.
        let _ = epoll::wait(&self.0, spare, Some(&limit));
        events.iter().map(|event: &epoll::Event| event.data.u64()).collect()
    }
}

impl Device {
    /// Hears rings and keeps the time, until the device has ended.
    pub(super) fn hear_bells(self: &Arc<Self>) {
        while !self.over.load(Ordering::Acquire) {
            let due = self.lock().kept.core.state.next_tick();
            let left = due.map_or(TICK, |due| Duration::from_millis(due.saturating_sub(now())));
            for object in self.bells.rings(left) {
                self.act(&JournalRecord::Rang { object });
            }
            let (now, due) = (now(), self.lock().kept.core.state.next_tick());
            if due.is_some_and(|due| due <= now) {
                self.act(&JournalRecord::Tick { now });
            }
        }
    }
}
