//! Interrupts of others, to be triggered or sent data.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::Region;
use rackbus_memory::doorbell::Doorbell;
use rackbus_memory::ring::{Producer, PushError};
use rackbus_segment::Handle;
use rackbus_segment::message::{InterruptKind, NodeId, Reply, SessionRequest};

use super::{InterruptError, RING, bell, shared};
use crate::events::Watch;
use crate::registry::Watched;
use crate::session::{AttachError, Session};

/// The sending end of an interrupt.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) session: Session,
    pub(super) handle: Handle,
    pub(super) bell: Doorbell,
    pub(super) watch: Arc<Watch>,
    /// The interrupt is on another machine: what is triggered is there before anything is stored after it.
    far: bool,
}

impl Sender {
    /// Connects; with the ring for messages, where there is one.
    pub(super) fn connect(
        session: &Session,
        node: NodeId,
        kind: InterruptKind,
        number: u32,
        timeout_ms: u32,
    ) -> Result<(Sender, Option<Arc<Region>>), AttachError> {
        let request = SessionRequest::ConnectInterrupt { node, kind, number, timeout_ms };
        let (made, reply, mut handles) = session.make(&request)?;
        let Reply::Connected(connected) = reply else { return Err(AttachError::Protocol) };
        let bell = bell(&mut handles)?;
        let ring = handles.resource().ok();
        let ring = ring.map(|memory| shared(&memory, RING.bytes().unwrap_or(1))).transpose()?;
        let (handle, watch) = (connected.connection, Watch::new(None));
        let watched = Watched { watch: Arc::downgrade(&watch), ..Watched::default() };
        session.registry().watch(handle, watched, session);
        made.claim();
        let far = session.between_machines() && node != session.node();
        Ok((Sender { session: session.clone(), handle, bell, watch, far }, ring))
    }

    /// Rings after `store`, and says whether anybody can have heard it.
    #[inline]
    fn ring_after(
        &self,
        store: impl FnOnce() -> Result<(), InterruptError>,
    ) -> Result<(), InterruptError> {
        self.heard(!self.bell.is_known_closed())?;
        if let Err(error) = store() {
            // Nobody makes room in what nobody reads.
            return self.heard(!self.bell.is_closed()).and(Err(error));
        }
        self.bell.ring();
        let confirmed = !self.far || self.session.flush(self.handle).is_ok();
        if !confirmed {
            self.wait_for_its_end();
        }
        // The line is near now. Before, asking for it would have doubled what a ring costs.
        unless_unconfirmed(confirmed, self.heard(!self.bell.is_closed()))
    }

    /// After a ring that was not confirmed: one that was just ended is not confirmed either, and its end is told a moment
    /// later.
    #[cold]
    fn wait_for_its_end(&self) {
        let begun = Instant::now();
        while self.heard(true).is_ok() && begun.elapsed() < END_IS_TOLD {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[inline]
    fn heard(&self, open: bool) -> Result<(), InterruptError> {
        match open && !self.watch.lost() {
            true => Ok(()),
            false if self.watch.is_unreachable() => Err(InterruptError::Unreachable),
            false => Err(InterruptError::Gone),
        }
    }
}

/// How long the end of an interrupt may take to be told, after a flush of its connection has failed for that.
const END_IS_TOLD: Duration = Duration::from_millis(500);

/// How a ring ended: where it is known that nobody hears it, that says more than that nobody confirmed it.
#[inline]
fn unless_unconfirmed(
    confirmed: bool,
    heard: Result<(), InterruptError>,
) -> Result<(), InterruptError> {
    match confirmed {
        true => heard,
        false => heard.and(Err(InterruptError::Unconfirmed)),
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.watch.end();
        self.session.registry().forget(self.handle);
        self.session.disconnect(self.handle);
    }
}

/// An interrupt of some host, to be triggered. The connection ends when it is dropped.
#[derive(Debug)]
pub struct RemoteInterrupt(pub(super) Sender);

impl RemoteInterrupt {
    /// Triggers it. What was stored before is seen by who is woken.
    ///
    /// # Errors
    /// [`InterruptError::Gone`], [`InterruptError::Unreachable`], and [`InterruptError::Unconfirmed`] where its host, another
    /// machine, did not answer in time.
    #[inline]
    pub fn trigger(&self) -> Result<(), InterruptError> {
        self.0.ring_after(|| Ok(()))
    }
}

/// A data interrupt of some host, or of several, to be sent to.
#[derive(Debug)]
pub struct RemoteDataInterrupt(pub(super) Vec<(Sender, Mutex<Producer>)>);

impl RemoteDataInterrupt {
    /// Sends a message. Messages of one connection arrive in their order.
    ///
    /// # Errors
    /// [`InterruptError::Full`], [`InterruptError::TooLong`], [`InterruptError::Unreachable`],
    /// [`InterruptError::Unconfirmed`] (it may arrive all the same), [`InterruptError::Gone`]; of several receivers the first error, after all have been sent to,
    /// one that is gone only when nothing else was wrong.
    pub fn send(&self, message: &[u8]) -> Result<(), InterruptError> {
        let one = |(sender, producer): &(Sender, Mutex<Producer>)| {
            sender.ring_after(|| {
                let mut producer = producer.lock().unwrap_or_else(PoisonError::into_inner);
                producer.push(message).map_err(|error| match error {
                    PushError::Full => InterruptError::Full,
                    PushError::TooLong { .. } => InterruptError::TooLong,
                })
            })
        };
        let errors: Vec<InterruptError> = self.0.iter().filter_map(|it| one(it).err()).collect();
        let worse = errors.iter().find(|error| **error != InterruptError::Gone);
        worse.or(errors.first()).map_or(Ok(()), |error| Err(*error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_nobody_confirms_is_not_one_that_nobody_hears() {
        assert_eq!(unless_unconfirmed(true, Ok(())), Ok(()));
        assert_eq!(unless_unconfirmed(false, Ok(())), Err(InterruptError::Unconfirmed));
        for known in [InterruptError::Gone, InterruptError::Unreachable] {
            for confirmed in [true, false] {
                assert_eq!(unless_unconfirmed(confirmed, Err(known)), Err(known));
            }
        }
    }
}
