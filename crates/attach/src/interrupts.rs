//! Interrupts between hosts: with and without data.
//!
//! An interrupt is a doorbell in shared memory; its senders ring it, with no node in between. Each
//! sender of data has a ring of messages of its own, so that none can spoil another's.

mod data;
mod remote;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rackbus_memory::doorbell::{DOORBELL_BYTES, Doorbell, WaitError};
use rackbus_memory::region::RegionError;
use rackbus_memory::ring::{Producer, RingLayout};
use rackbus_memory::{Access, AdaptiveSpin, AsHandle, Handles, Region, ResourceHandle};
use rackbus_segment::Handle;
use rackbus_segment::message::{
    BROADCAST_NODE, DATA_SLOTS, InterruptKind, MAX_DATA, NodeId, Refusal, Reply, SessionRequest,
};

use crate::registry::Watched;
use crate::session::{AttachError, Session};
pub use data::DataInterrupt;
pub(crate) use data::Rings;
use remote::Sender;
pub use remote::{RemoteDataInterrupt, RemoteInterrupt};

const RING: RingLayout = RingLayout { slots: DATA_SLOTS, slot_bytes: MAX_DATA };

/// Why an interrupt was not sent, or not received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InterruptError {
    /// None came in time.
    #[error("no interrupt came in time")]
    TimedOut,
    /// It was removed, or its owner is gone.
    #[error("the interrupt is gone")]
    Gone,
    /// Its host is gone.
    #[error("the interrupt's host does not answer; is it up?")]
    Unreachable,
    /// Between machines: it was sent, and nobody answered in time that it is there.
    #[error("nobody says that the interrupt arrived; it may have")]
    Unconfirmed,
    /// The receiver has not taken what was sent before.
    #[error("the receiver has no room; it must take messages first")]
    Full,
    /// The message is longer than messages can be.
    #[error("a message has at most {MAX_DATA} bytes")]
    TooLong,
    /// The buffer is shorter than the message, which stays where it is.
    #[error("the message has {0} bytes; use a buffer of that length")]
    BufferTooShort(usize),
}

impl From<WaitError> for InterruptError {
    fn from(error: WaitError) -> Self {
        match error {
            WaitError::TimedOut => InterruptError::TimedOut,
            WaitError::Closed => InterruptError::Gone,
        }
    }
}

/// An interrupt of this process. It ends when it is dropped.
#[derive(Debug)]
pub struct Interrupt {
    line: Line,
    /// How many rings of the doorbell have been taken.
    taken: AtomicU32,
    counting: bool,
}

/// What both sorts have.
#[derive(Debug)]
struct Line {
    session: Session,
    handle: Handle,
    number: u32,
    /// Rings that came before it was made.
    rung: u32,
    bell: Arc<Doorbell>,
    shared: bool,
    ended: AtomicBool,
    /// What the last wait left of an [`AdaptiveSpin`].
    spin: AtomicU64,
}

impl Line {
    fn make(
        session: &Session,
        kind: InterruptKind,
        number: Option<u32>,
        shared: bool,
    ) -> Result<Line, AttachError> {
        let request = SessionRequest::CreateInterrupt { kind, number, shared };
        let (made, reply, mut handles) = session.make(&request)?;
        let Reply::Interrupt { interrupt: handle, number, rung } = reply else {
            return Err(AttachError::Protocol);
        };
        let bell = Arc::new(bell(&mut handles)?);
        made.claim();
        let (session, ended) = (session.clone(), AtomicBool::new(false));
        Ok(Line { session, handle, number, rung, bell, shared, ended, spin: AtomicU64::new(0) })
    }

    /// Waits for the doorbell to move away from `seen`.
    fn wait(&self, seen: u32, deadline: Option<Instant>) -> Result<u32, InterruptError> {
        let mut spin = AdaptiveSpin::resumed(self.spin.load(Ordering::Relaxed));
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let outcome = self.bell.wait(seen, &mut spin, left);
        self.spin.store(spin.budget_ns(), Ordering::Relaxed);
        match outcome {
            // The node's end closed it: what was triggered before that counts.
            Err(WaitError::Closed)
                if self.session.is_gone() && !self.has_ended() && self.bell.count() != seen =>
            {
                Ok(self.bell.count())
            }
            outcome => Ok(outcome?),
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn remove(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        match self.shared || !self.session.is_own() {
            // Others of this host go on with it; and a fork's end is not its parent's.
            true => self.bell.leave(),
            false => self.bell.close(),
        }
        // A node that is gone has ended it already.
        let _ = self.session.done(&SessionRequest::RemoveInterrupt { interrupt: self.handle });
        // Last: until the node has answered, it may tell of senders, and their rings are beside that.
        self.session.registry().forget(self.handle);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.remove();
    }
}

pub(crate) fn after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// Fails once the time is over. Asked before each further look: a peer that rings without pause
/// gives a reason for one for ever.
pub(crate) fn in_time(deadline: Option<Instant>) -> Result<(), InterruptError> {
    match deadline.is_some_and(|at| Instant::now() >= at) {
        true => Err(InterruptError::TimedOut),
        false => Ok(()),
    }
}

/// The doorbell that a node passed: its line, then its event.
fn bell(handles: &mut Handles) -> Result<Doorbell, AttachError> {
    let region = shared(&handles.resource()?, DOORBELL_BYTES)?;
    let event = handles.event()?;
    Doorbell::new(region, 0, event).ok_or(AttachError::Protocol)
}

fn shared(memory: &ResourceHandle, bytes: usize) -> Result<Arc<Region>, RegionError> {
    let access = Access::READ | Access::WRITE;
    Ok(Arc::new(Region::map_at(None, memory.as_handle(), 0, bytes as u64, access)?))
}

impl Session {
    /// Makes an interrupt that others can trigger. Without a number the node chooses one. `shared`:
    /// other processes of this host may make the same one, and each hears every trigger.
    /// `counting`: each trigger counts; else those that come before they are waited for are one.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when the number is in use.
    pub fn create_interrupt(
        &self,
        number: Option<u32>,
        shared: bool,
        counting: bool,
    ) -> Result<Interrupt, AttachError> {
        let line = Line::make(self, InterruptKind::Plain, number, shared)?;
        let taken = AtomicU32::new(line.rung);
        let watched = Watched { bell: Arc::downgrade(&line.bell), ..Watched::default() };
        self.registry().watch(line.handle, watched, self);
        Ok(Interrupt { line, taken, counting })
    }

    /// Makes an interrupt that others can send messages to.
    ///
    /// # Errors
    /// As [`create_interrupt`](Session::create_interrupt).
    pub fn create_data_interrupt(&self, number: Option<u32>) -> Result<DataInterrupt, AttachError> {
        let line = Line::make(self, InterruptKind::Data, number, false)?;
        let rings = Arc::new(Rings { bell: line.bell.clone(), state: Mutex::default() });
        let (bell, of) = (Arc::downgrade(&line.bell), Arc::downgrade(&rings));
        let watched = Watched { rings: of, bell, ..Watched::default() };
        self.registry().watch(line.handle, watched, self);
        Ok(DataInterrupt { line, rings })
    }

    /// Connects to an interrupt of a host.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when there is none of that number.
    pub fn connect_interrupt(
        &self,
        node: NodeId,
        number: u32,
        timeout_ms: u32,
    ) -> Result<RemoteInterrupt, AttachError> {
        let (sender, _) = Sender::connect(self, node, InterruptKind::Plain, number, timeout_ms)?;
        Ok(RemoteInterrupt(sender))
    }

    /// Connects to a data interrupt of a host; with [`BROADCAST_NODE`] to those of that number on
    /// every host that has one.
    ///
    /// # Errors
    /// As [`connect_interrupt`](Session::connect_interrupt).
    pub fn connect_data_interrupt(
        &self,
        node: NodeId,
        number: u32,
        timeout_ms: u32,
    ) -> Result<RemoteDataInterrupt, AttachError> {
        let one = |node| -> Result<_, AttachError> {
            let kind = InterruptKind::Data;
            let (sender, ring) = Sender::connect(self, node, kind, number, timeout_ms)?;
            let producer = Producer::new(ring.ok_or(AttachError::Protocol)?, 0, RING);
            Ok((sender, Mutex::new(producer.ok_or(AttachError::Protocol)?)))
        };
        if node != BROADCAST_NODE {
            return Ok(RemoteDataInterrupt(vec![one(node)?]));
        }
        let attempts = self.hosts().iter().map(|(node, _)| one(*node));
        Ok(RemoteDataInterrupt(not_refused(attempts)?))
    }
}

/// What was not refused, of attempts to connect to several hosts. Where all refused, the first refusal that says more than
/// that a host has no such interrupt or does not answer: who is told that there is none yet tries again.
fn not_refused<T>(
    attempts: impl Iterator<Item = Result<T, AttachError>>,
) -> Result<Vec<T>, AttachError> {
    let (mut all, mut refused) = (Vec::new(), None);
    for attempt in attempts {
        match attempt {
            Ok(made) => all.push(made),
            Err(AttachError::Refused(Refusal::NoSuchInterrupt | Refusal::NotResponding)) => {}
            Err(AttachError::Refused(refusal)) => refused = refused.or(Some(refusal)),
            Err(error) => return Err(error),
        }
    }
    match all.is_empty() {
        true => Err(refused.unwrap_or(Refusal::NoSuchInterrupt).into()),
        false => Ok(all),
    }
}

impl Interrupt {
    /// Its number on this host.
    pub fn number(&self) -> u32 {
        self.line.number
    }

    /// Waits until it is triggered; a trigger that came before counts.
    ///
    /// # Errors
    /// [`InterruptError::TimedOut`] after `timeout` (`None` waits for ever), and
    /// [`InterruptError::Gone`] when it is removed meanwhile, or the host's node is gone.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), InterruptError> {
        let deadline = after(timeout);
        loop {
            let seen = self.taken.load(Ordering::Acquire);
            let count = self.line.wait(seen, deadline)?;
            let next = if self.counting { seen.wrapping_add(1) } else { count };
            let (here, late) = (Ordering::AcqRel, Ordering::Acquire);
            if self.taken.compare_exchange(seen, next, here, late).is_ok() {
                return Ok(());
            }
            // Another thread took it.
            in_time(deadline)?;
        }
    }

    /// Ends it now; who waits for it is woken.
    pub fn remove(&self) {
        self.line.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_refuses_does_not_keep_others_from_being_connected() {
        let refused = |refusal: Refusal| Err::<u32, _>(AttachError::Refused(refusal));
        let made = not_refused([refused(Refusal::Denied), Ok(8), Ok(12)].into_iter());
        assert_eq!(made.unwrap(), [8, 12]);
        let all =
            [Refusal::NotResponding, Refusal::NoSuchInterrupt, Refusal::Denied, Refusal::Busy];
        let none = not_refused(all.into_iter().map(refused));
        assert!(matches!(none, Err(AttachError::Refused(Refusal::Denied))), "{none:?}");
        let none = not_refused([refused(Refusal::NotResponding)].into_iter());
        assert!(matches!(none, Err(AttachError::Refused(Refusal::NoSuchInterrupt))), "{none:?}");
        let gone = not_refused([Ok(8), Err(AttachError::Protocol)].into_iter());
        assert!(matches!(gone, Err(AttachError::Protocol)), "{gone:?}");
    }
}
