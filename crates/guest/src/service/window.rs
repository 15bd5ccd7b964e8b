//! The window: what QEMU is asked to map into the device's memory, one thing after the other.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use vhost::vhost_user::message::VhostUserMMap;
use vhost::vhost_user::{Backend as Frontend, VhostUserFrontendReqHandler};

use super::Device;
use crate::journal::JournalRecord;

/// Flag of a mapping that may be stored to.
const WRITABLE: u64 = 1;

/// Something for QEMU to do.
#[derive(Debug)]
pub(super) enum WindowJob {
    Map {
        job: u64,
        /// None where it was released meanwhile.
        file: Option<Arc<OwnedFd>>,
        at: u64,
        offset: u64,
        length: u64,
        /// Another process may have had QEMU do it.
        again: bool,
    },
    Unmap {
        ranges: Vec<(u64, u64)>,
    },
    /// The device has ended.
    End,
}

/// The way to ask QEMU.
#[derive(Default)]
pub(super) struct QemuWindow {
    state: Mutex<FrontendState>,
    changed: Condvar,
}

#[derive(Default)]
struct FrontendState {
    frontend: Option<Frontend>,
    /// Whether the queues run: QEMU is asked at no other time.
    running: bool,
    /// The VM has ended.
    closed: bool,
}

impl QemuWindow {
    fn lock(&self) -> MutexGuard<'_, FrontendState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, frontend: Frontend) {
        self.lock().frontend = Some(frontend);
    }

    pub(super) fn close(&self) {
        let mut way = self.lock();
        (way.frontend, way.closed) = (None, true);
        self.changed.notify_all();
    }

    pub(super) fn set_running(&self, running: bool) {
        self.lock().running = running;
        self.changed.notify_all();
    }

    /// Waits until the queues run: what a VM that was stopped waits for, it gets when it continues.
    fn wait_running(&self) {
        let stopped = |way: &mut FrontendState| !way.running && !way.closed;
        drop(self.changed.wait_while(self.lock(), stopped));
    }

    /// The way to QEMU if it may be asked now; or whether it never will be again.
    fn way(&self) -> Result<Frontend, bool> {
        let way = self.lock();
        way.frontend.clone().filter(|_| way.running).ok_or(way.closed)
    }
}

fn request((at, length): (u64, u64), offset: u64, flags: u64) -> VhostUserMMap {
    VhostUserMMap { fd_offset: offset, shm_offset: at, len: length, flags, ..Default::default() }
}

impl Device {
    /// Does the jobs, in their order, until the device has ended.
    ///
    /// Where another process died, QEMU may have done the first one, or do it right now: it is asked something
    /// that it answers afterwards.
    pub(super) fn map_and_unmap(self: &Arc<Self>, jobs: Receiver<WindowJob>, inherited: bool) {
        let mut settled = None;
        if inherited {
            let outcome = self.settle();
            settled = outcome.unwrap_or_else(|error| {
                tracing::warn!(%error, "QEMU does not say what it has mapped");
                None
            });
        }
        for job in jobs {
            if let (WindowJob::Map { job, .. }, Some(true)) = (&job, settled.take()) {
                self.act(&JournalRecord::Mapped { job: *job, done: true });
            } else if !self.do_job(job) {
                return;
            }
        }
    }

    /// Waits until QEMU reads its messages. It ends if it finds one about the window after the device was
    /// stopped, as a reset of the VM does: so it is told nothing while it does something else, of which the
    /// reset may be a part. What remains is a reset in the microseconds until it has read the message.
    fn wait_for_qemu(&self) -> Option<Frontend> {
        loop {
            self.window.wait_running();
            // A channel that is closed fails with what follows.
            let _ = self.settle();
            match self.window.way() {
                Ok(way) => return Some(way),
                Err(true) => return None,
                // The VM was stopped in between.
                Err(false) => {}
            }
        }
    }

    /// Maps, and waits until the mapping is there. QEMU answers before, and changes the VM's memory then: what it is
    /// asked next it answers after that. Until then what the guest stores there is lost.
    fn map_now(&self, request: &VhostUserMMap, file: &OwnedFd) -> bool {
        let Some(frontend) = self.wait_for_qemu() else { return false };
        if let Err(error) = frontend.shmem_map(request, file) {
            tracing::warn!(%error, "QEMU does not map a part of a segment");
            return false;
        }
        match self.settle() {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%error, "QEMU has mapped a part of a segment, and does not say that it is there");
                false
            }
        }
    }

    fn unmap_now(&self, request: &VhostUserMMap) {
        let Some(frontend) = self.wait_for_qemu() else { return };
        if let Err(error) = frontend.shmem_unmap(request) {
            // A reset of the VM has taken it away before.
            tracing::debug!(%error, "QEMU has no such mapping");
        }
    }

    /// Does a job; whether there are to be more.
    fn do_job(self: &Arc<Self>, job: WindowJob) -> bool {
        match job {
            WindowJob::Map { job, file, at, offset, length, again } => {
                let wanted = request((at, length), offset, WRITABLE);
                let map = || file.as_ref().is_some_and(|it| self.map_now(&wanted, it));
                let mut done = map();
                if again && !done {
                    self.unmap_now(&wanted);
                    done = map();
                }
                self.act(&JournalRecord::Mapped { job, done });
            }
            WindowJob::Unmap { ranges } => {
                for range in ranges {
                    self.unmap_now(&request(range, 0, 0));
                }
                self.act(&JournalRecord::Unmapped);
            }
            WindowJob::End => return false,
        }
        true
    }
}
