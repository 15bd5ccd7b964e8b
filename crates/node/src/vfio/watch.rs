//! Watches a physical function for its end (an error that it cannot correct, or its removal from the machine), and
//! for what the IOMMU refused it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rackbus_memory::{Event, PeerEvent, Stream};
use rackbus_vfio::{FaultLog, InterruptIndex, IommuFault, PciAddress, VfioDevice, VfioError};
use tracing::Span;

/// What tells of a function's end, and why that is.
const ENDS: [(InterruptIndex, &str); 2] = [
    (InterruptIndex::Error, "it reported an error that it cannot correct (AER)"),
    (InterruptIndex::Request, "it is being removed from this machine, or given back to its driver"),
];

/// By what the kernel tells of a function that is open. What nobody has seen yet is there for the process that goes on
/// with it.
#[derive(Debug)]
pub struct WatchedEvents {
    events: Vec<(InterruptIndex, PeerEvent)>,
    /// Who may not read the kernel's log learns of no faults.
    log: Option<FaultLog>,
}

/// The descriptors of [`WatchedEvents`]: the events with their kinds, and the kernel's log.
pub type WatchedDescriptors = (Vec<(InterruptIndex, OwnedFd)>, Option<OwnedFd>);

impl WatchedEvents {
    /// Has the kernel tell of a function's end from now on.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn of(device: &VfioDevice) -> io::Result<WatchedEvents> {
        let mut events = Vec::new();
        for (kind, _) in ENDS {
            let event = Event::new()?;
            match device.wire(kind, 0, &[Some(event.as_fd())]) {
                Ok(()) => events.push((kind, event.into())),
                // Not every function reports errors.
                Err(VfioError::Refused { .. }) => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(WatchedEvents { events, log: FaultLog::open().ok() })
    }

    /// What the IOMMU refuses alone: of a function whose end somebody else hears of.
    pub fn faults_alone() -> WatchedEvents {
        WatchedEvents { events: Vec::new(), log: FaultLog::open().ok() }
    }

    /// Those that another process had.
    ///
    /// # Errors
    /// When one of them is no eventfd.
    pub fn inherited((events, log): WatchedDescriptors) -> io::Result<WatchedEvents> {
        let event = |(kind, event)| Ok((kind, PeerEvent::new(event)?));
        let events = events.into_iter().map(event).collect::<io::Result<_>>()?;
        Ok(WatchedEvents { events, log: log.map(FaultLog::inherited) })
    }

    /// Copies of the descriptors, for the process that goes on.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn descriptors(&self) -> io::Result<WatchedDescriptors> {
        let copy = |(kind, event): &(InterruptIndex, PeerEvent)| {
            Ok((*kind, event.as_fd().try_clone_to_owned()?))
        };
        let events = self.events.iter().map(copy).collect::<io::Result<_>>()?;
        let log = self.log.as_ref().map(|log| log.as_fd().try_clone_to_owned());
        Ok((events, log.transpose()?))
    }

    /// What the IOMMU refused the function since the last look.
    fn faults(&self, address: PciAddress) -> impl Iterator<Item = IommuFault> {
        let faults = self.log.as_ref().map(FaultLog::read).unwrap_or_default();
        faults.into_iter().filter(move |fault| fault.is_of(address))
    }

    /// Why the function has ended, where it has.
    fn end(&self) -> Option<&'static str> {
        let (rung, _) = self.events.iter().find(|(_, event)| event.drain())?;
        ENDS.iter().find(|(kind, _)| kind == rung).map(|(_, reason)| *reason)
    }
}

/// A thread that watches for as long as this is there.
#[derive(Debug)]
pub struct WatchThread {
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Watches the function at `address`. At its end its user's conversation is shut down, and `ended` hears why; `refused`
    /// hears what the IOMMU refused.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn begin(
        watched: Arc<WatchedEvents>,
        address: PciAddress,
        user: Arc<dyn Stream>,
        ended: impl FnOnce(&'static str) + Send + 'static,
        refused: impl Fn(IommuFault) + Send + 'static,
    ) -> io::Result<WatchThread> {
        let stop = Arc::new(Event::new()?);
        let thread = std::thread::Builder::new().name("function watch".into()).spawn({
            let (stop, about) = (stop.clone(), Span::current());
            move || {
                // What is said here is about the lease for which it is watched.
                let _about = about.entered();
                loop {
                    let mut fds = vec![stop.as_fd()];
                    fds.extend(watched.events.iter().map(|(_, event)| event.as_fd()));
                    fds.extend(watched.log.as_ref().map(AsFd::as_fd));
                    Event::wait_any(&fds, None);
                    watched.faults(address).for_each(&refused);
                    if stop.drain() {
                        return;
                    }
                    if let Some(reason) = watched.end() {
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    /// A function that says of its removal by the event.
    fn watched() -> (Event, Arc<WatchedEvents>) {
        let event = Event::new().unwrap();
        let copy = event.as_fd().try_clone_to_owned().unwrap();
        let events = vec![(InterruptIndex::Request, copy)];
        (event, Arc::new(WatchedEvents::inherited((events, None)).unwrap()))
    }

    #[test]
    fn what_a_stopped_watch_has_not_seen_the_next_one_sees() {
        let (event, before) = watched();
        let address: PciAddress = "0000:03:00.0".parse().unwrap();
        let (user, _borrower) = UnixStream::pair().unwrap();
        let user: Arc<dyn Stream> = Arc::new(user);
        let never = |reason| panic!("{reason}");
        drop(WatchThread::begin(before.clone(), address, user.clone(), never, |_| {}).unwrap());
        event.ring();
        assert!(!user.is_closed());
        let after = Arc::new(WatchedEvents::inherited(before.descriptors().unwrap()).unwrap());
        let (tells, told) = channel();
        let ended = move |reason| tells.send(reason).unwrap();
        let _watch = WatchThread::begin(after, address, user, ended, |_| {}).unwrap();
        assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), ENDS[1].1);
    }
}
