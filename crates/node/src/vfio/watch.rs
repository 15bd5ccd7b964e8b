//! Watches a physical function for its end (an error that it cannot correct, or its removal from the machine), and
//! for what the IOMMU refused it.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rackbus_memory::{Event, Stream};
use rackbus_vfio::{FaultLog, InterruptIndex, IommuFault, VfioDevice, VfioError};
use tracing::Span;

/// A thread that watches for as long as this is there.
#[derive(Debug)]
pub struct WatchThread {
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Watches `device`. At its end its user's conversation is shut down, and `ended` hears why; `refused` hears what
    /// the IOMMU refused.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn begin(
        device: &VfioDevice,
        user: Arc<dyn Stream>,
        ended: impl FnOnce(&'static str) + Send + 'static,
        refused: impl Fn(IommuFault) + Send + 'static,
    ) -> io::Result<WatchThread> {
        let stop = Arc::new(Event::new()?);
        let watched = [
            (InterruptIndex::Error, "it reported an error that it cannot correct (AER)"),
            (
                InterruptIndex::Request,
                "it is being removed from this machine, or given back to its driver",
            ),
        ];
        let mut events = Vec::new();
        for (kind, reason) in watched {
            let event = Event::new()?;
            match device.wire(kind, 0, &[Some(event.as_fd())]) {
                Ok(()) => events.push((event, reason)),
                // Not every function reports errors.
                Err(VfioError::Refused { .. }) => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        // Who may not read the kernel's log learns of no faults.
        let mut log = FaultLog::open().ok();
        let address = device.address();
        let thread = std::thread::Builder::new().name("function watch".into()).spawn({
            let (stop, about) = (stop.clone(), Span::current());
            move || {
                // What is said here is about the lease for which it is watched.
                let _about = about.entered();
                loop {
                    let mut fds = vec![stop.as_fd()];
                    fds.extend(events.iter().map(|(event, _)| event.as_fd()));
                    fds.extend(log.as_ref().map(AsFd::as_fd));
                    Event::wait_any(&fds, None);
                    let faults = log.as_mut().map(FaultLog::read).unwrap_or_default();
                    faults.into_iter().filter(|fault| fault.is_of(address)).for_each(&refused);
                    if stop.drain() {
                        return;
                    }
                    if let Some((_, reason)) = events.iter().find(|(event, _)| event.drain()) {
                        ended(reason);
                        // Its borrower learns it as the loss of its lender.
                        return user.shut_down();
                    }
                }
            }
        })?;
        Ok(WatchThread { stop, thread: Some(thread) })
    }
}

impl Drop for WatchThread {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // It panics as little as it waits for anybody.
            let _ = thread.join();
        }
    }
}
