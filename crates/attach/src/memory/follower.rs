//! Devices that have memory of this process mapped, and are to be where it is when the node moves it.
//!
//! The thread that answers the node waits until they have let the old memory go, and the node gives a process no more
//! than two seconds for that before it takes it for dead: a device whose lender does not answer in time is given up,
//! and its process stays. That is for the devices of one memory: where others stall in several that move at the same
//! time, the times add up.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rackbus_memory::ResourceHandle;

/// How long all devices together may take to let memory go.
const LONGEST: Duration = Duration::from_millis(1500);

/// A mapping of memory by somebody else than this process.
pub(crate) trait Follower: std::fmt::Debug + Send + Sync {
    /// The device: what it does not answer for one mapping, it does not for others.
    fn device(&self) -> usize;

    /// The memory is about to move: on return nothing of it is read or written any more, unless the device was given
    /// up.
    fn unmap(&self);

    /// The memory is in this file from now on, which may be the one that it was in.
    fn take_up(&self, file: &ResourceHandle);

    /// The device takes too long: what waits for it in another thread fails now. Its conversation ends, and with that,
    /// as soon as its lender hears of it, all that it has mapped.
    fn give_up(&self);
}

pub(super) fn take_up_all(followers: &[Arc<dyn Follower>], file: &ResourceHandle) {
    followers.iter().for_each(|follower| follower.take_up(file));
}

/// Has the devices let the memory go, side by side, and gives up those who take longer than [`LONGEST`].
pub(super) fn unmap_all(followers: &[Arc<dyn Follower>]) {
    let mut devices: BTreeMap<usize, Vec<&Arc<dyn Follower>>> = BTreeMap::new();
    followers.iter().for_each(|it| devices.entry(it.device()).or_default().push(it));
    if devices.is_empty() {
        return;
    }
    let deadline = Instant::now() + LONGEST;
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel();
        for (device, mappings) in &devices {
            let done = done.clone();
            let work = move || {
                mappings.iter().for_each(|mapping| mapping.unmap());
                // Who was given up is not waited for.
                let _ = done.send(*device);
            };
            let named = std::thread::Builder::new().name("device mapping".into());
            if let Err(error) = named.spawn_scoped(scope, work) {
                tracing::warn!(%error, "no thread can be started: memory is unmapped one by one");
                mappings.iter().for_each(|mapping| mapping.unmap());
            }
        }
        drop(done);
        let mut late = devices.clone();
        while !late.is_empty() {
            match ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(device) => drop(late.remove(&device)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Err(mpsc::RecvTimeoutError::Timeout) => break,
            }
        }
        late.values().filter_map(|mappings| mappings.first()).for_each(|it| it.give_up());
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
        fn device(&self) -> usize {
            std::ptr::from_ref(self).addr()
        }

        fn unmap(&self) {
            self.wait();
            *self.mapped.lock().unwrap() = false;
        }

        fn take_up(&self, _: &ResourceHandle) {
            self.wait();
            *self.mapped.lock().unwrap() = !*self.given_up.lock().unwrap();
        }

        fn give_up(&self) {
            *self.given_up.lock().unwrap() = true;
            self.ended.notify_all();
        }
    }

    fn memory() -> Arc<MappedMemory> {
        MappedMemory::new(
            Some(ResourceHandle::of_descriptor(SharedMemory::reserve("follower", 4096).unwrap())),
            true,
            4096,
        )
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
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
            assert!(!*devices[1].mapped.lock().unwrap());
            memory.unfreeze();
            program.join().unwrap().unwrap();
        });
        assert!(*devices[0].given_up.lock().unwrap());
        assert!(!*devices[1].given_up.lock().unwrap());
        assert!(*devices[1].mapped.lock().unwrap() && !*devices[0].mapped.lock().unwrap());
    }

    /// A device that takes up the first file that it is given when it is told to, and then always at once.
    #[derive(Debug, Default)]
    struct Slow {
        told: Mutex<bool>,
        hears: Condvar,
        begun: Mutex<usize>,
        has: Mutex<Option<ResourceHandle>>,
    }

    impl Follower for Slow {
        fn device(&self) -> usize {
            std::ptr::from_ref(self).addr()
        }

        fn unmap(&self) {
            *self.has.lock().unwrap() = None;
        }

        fn take_up(&self, file: &ResourceHandle) {
            *self.begun.lock().unwrap() += 1;
            let told = self.told.lock().unwrap();
            drop(self.hears.wait_while(told, |told| !*told).unwrap());
            self.has.lock().unwrap().get_or_insert(file.clone());
        }

        fn give_up(&self) {
            unreachable!("it answers");
        }
    }

    #[test]
    fn what_is_mapped_while_the_memory_moves_is_mapped_where_it_is() {
        let memory = memory();
        let device = Arc::new(Slow::default());
        std::thread::scope(|scope| {
            let program = scope.spawn(|| memory.lead((0, 4096), &device));
            while *device.begun.lock().unwrap() == 0 {
                std::thread::yield_now();
            }
            memory.freeze(0, 4096).unwrap();
            let other =
                ResourceHandle::of_descriptor(SharedMemory::reserve("moved", 4096).unwrap());
            memory.adopt((0, 4096), other, 0, true).unwrap();
            // The device takes up what the memory was in, and then what it is in.
            *device.told.lock().unwrap() = true;
            device.hears.notify_all();
            memory.unfreeze();
            program.join().unwrap().unwrap();
        });
        let now = memory.lock().file.clone().unwrap();
        assert!(device.has.lock().unwrap().as_ref().unwrap().is_clone_of(&now));
    }
}
