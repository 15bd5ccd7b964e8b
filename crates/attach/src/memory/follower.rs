//! Devices that have memory of this process mapped, and are to be where it is when the node moves it.
//!
//! The thread that answers the node waits for them, and the node gives a process no more than two seconds before it
//! takes it for dead: a device whose lender does not answer in half of that is given up, and its process stays.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long all of them together may take for one step of a move.
const STEP: Duration = Duration::from_secs(1);

/// Somebody else than this process who has memory mapped.
pub(crate) trait Follower: std::fmt::Debug + Send + Sync {
    /// The memory is about to move: on return nothing of it is read or written any more.
    fn unmap(&self);

    /// The memory is in this file from now on, which may be the one that it was in.
    fn take_up(&self, file: &Arc<OwnedFd>);

    /// It takes too long: what waits for it in another thread fails now, and it reaches nothing of this process any
    /// more.
    fn give_up(&self);
}

pub(super) fn unmap_all(followers: &[Arc<dyn Follower>]) {
    each(followers, |follower| follower.unmap());
}

pub(super) fn take_up_all(followers: &[Arc<dyn Follower>], file: &Arc<OwnedFd>) {
    each(followers, |follower| follower.take_up(file));
}

/// Has all of them do something side by side, and gives up those who take longer than [`STEP`].
fn each(followers: &[Arc<dyn Follower>], what: impl Fn(&dyn Follower) + Sync) {
    if followers.is_empty() {
        return;
    }
    let deadline = Instant::now() + STEP;
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel();
        let mut waits = vec![true; followers.len()];
        for (nth, follower) in followers.iter().enumerate() {
            let (done, what) = (done.clone(), &what);
            let work = move || {
                what(&**follower);
                // Who was given up is not waited for.
                let _ = done.send(nth);
            };
            let named = std::thread::Builder::new().name("device mapping".into());
            if let Err(error) = named.spawn_scoped(scope, work) {
                tracing::warn!(%error, "no thread can be started: a device loses memory that moves");
                follower.give_up();
                waits[nth] = false;
            }
        }
        while waits.contains(&true) {
            match ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(nth) => waits[nth] = false,
                Err(_) => break,
            }
        }
        let late = followers.iter().zip(waits).filter(|(_, waits)| *waits);
        late.for_each(|(follower, _)| follower.give_up());
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use rackbus_memory::SharedMemory;

    use super::super::MappedMemory;
    use super::*;

    /// A device whose lender answers, or does not until the device is given up.
    #[derive(Debug, Default)]
    struct Device {
        stalls: bool,
        given_up: Mutex<bool>,
        ended: Condvar,
        /// Whether it has the memory mapped.
        mapped: Mutex<bool>,
    }

    impl Device {
        fn wait(&self) {
            if self.stalls {
                let given_up = self.given_up.lock().unwrap();
                drop(self.ended.wait_while(given_up, |given_up| !*given_up).unwrap());
            }
        }
    }

    impl Follower for Device {
        fn unmap(&self) {
            self.wait();
            *self.mapped.lock().unwrap() = false;
        }

        fn take_up(&self, _: &Arc<OwnedFd>) {
            self.wait();
            *self.mapped.lock().unwrap() = !*self.given_up.lock().unwrap();
        }

        fn give_up(&self) {
            *self.given_up.lock().unwrap() = true;
            self.ended.notify_all();
        }
    }

    fn memory() -> Arc<MappedMemory> {
        MappedMemory::new(Some(SharedMemory::reserve("follower", 4096).unwrap()), true, 4096)
    }

    /// The node takes a process for dead that does not say within two seconds that it is frozen.
    #[test]
    fn a_device_whose_lender_stalls_is_given_up_and_the_others_stay() {
        let memory = memory();
        let devices = [true, false].map(|stalls| Arc::new(Device { stalls, ..Device::default() }));
        memory.lead((0, 4096), &devices[1]).unwrap();
        std::thread::scope(|scope| {
            // Its program maps for it while the node moves the memory.
            let program = scope.spawn(|| memory.lead((0, 4096), &devices[0]));
            while memory.followers() < 2 {
                std::thread::yield_now();
            }
            let begun = Instant::now();
            memory.freeze(0, 4096).unwrap();
            assert!(begun.elapsed() < 2 * STEP, "{:?}", begun.elapsed());
            assert!(!*devices[1].mapped.lock().unwrap());
            memory.unfreeze();
            program.join().unwrap().unwrap();
        });
        assert!(*devices[0].given_up.lock().unwrap());
        assert!(!*devices[1].given_up.lock().unwrap());
        assert!(*devices[1].mapped.lock().unwrap() && !*devices[0].mapped.lock().unwrap());
    }
}
