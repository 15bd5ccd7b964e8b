//! Interrupts between hosts: with and without data.
//!
//! An interrupt is a doorbell in shared memory; its senders ring it, with no node in between. Each
//! sender of data has a ring of messages of its own, so that none can spoil another's.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::doorbell::{DOORBELL_BYTES, Doorbell, WaitError};
use rackbus_memory::region::RegionError;
use rackbus_memory::ring::{Consumer, Producer, PushError, RingLayout};
use rackbus_memory::{Access, AdaptiveSpin, PeerEvent, Region};
use rackbus_segment::Handle;
use rackbus_segment::message::{
    BROADCAST_NODE, DATA_SLOTS, InterruptKind, MAX_DATA, NodeId, Refusal, Reply, Request,
};

use crate::events::Watch;
use crate::registry::Watched;
use crate::session::{AttachError, Session};

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
        let request = Request::CreateInterrupt { kind, number, shared };
        let (Reply::Interrupt { interrupt: handle, number, rung }, fds) = session.call(&request)?
        else {
            return Err(AttachError::Protocol);
        };
        let bell = Arc::new(bell(&mut fds.into_iter())?);
        let (session, ended) = (session.clone(), AtomicBool::new(false));
        Ok(Line { session, handle, number, rung, bell, shared, ended, spin: AtomicU64::new(0) })
    }

    /// Waits for the doorbell to move away from `seen`.
    fn wait(&self, seen: u32, deadline: Option<Instant>) -> Result<u32, InterruptError> {
        let mut spin = AdaptiveSpin::resumed(self.spin.load(Ordering::Relaxed));
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let outcome = self.bell.wait(seen, &mut spin, left);
        self.spin.store(spin.budget_ns(), Ordering::Relaxed);
        Ok(outcome?)
    }

    fn remove(&self) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.session.registry().forget(self.handle);
        match self.shared || !self.session.is_own() {
            // Others of this host go on with it; and a fork's end is not its parent's.
            true => self.bell.leave(),
            false => self.bell.close(),
        }
        // A node that is gone has ended it already.
        let _ = self.session.done(&Request::RemoveInterrupt { interrupt: self.handle });
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
fn bell(fds: &mut impl Iterator<Item = OwnedFd>) -> Result<Doorbell, AttachError> {
    let (Some(line), Some(event)) = (fds.next(), fds.next()) else {
        return Err(AttachError::Protocol);
    };
    let region = shared(&line, DOORBELL_BYTES)?;
    let event = PeerEvent::new(event)
        .map_err(|cause| AttachError::System { what: "an interrupt's event", cause })?;
    Doorbell::new(region, 0, event).ok_or(AttachError::Protocol)
}

fn shared(file: &OwnedFd, bytes: usize) -> Result<Arc<Region>, RegionError> {
    let access = Access::READ | Access::WRITE;
    Ok(Arc::new(Region::map(file.as_fd(), 0, bytes as u64, access)?))
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
        self.registry().watch(line.handle, Watched::default(), self);
        Ok(Interrupt { line, taken, counting })
    }

    /// Makes an interrupt that others can send messages to.
    ///
    /// # Errors
    /// As [`create_interrupt`](Session::create_interrupt).
    pub fn create_data_interrupt(&self, number: Option<u32>) -> Result<DataInterrupt, AttachError> {
        let line = Line::make(self, InterruptKind::Data, number, false)?;
        let rings = Arc::new(Rings { bell: line.bell.clone(), state: Mutex::default() });
        let watched = Watched { rings: Arc::downgrade(&rings), ..Watched::default() };
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
        let mut all = Vec::new();
        for (node, _) in self.hosts() {
            match one(*node) {
                Ok(sender) => all.push(sender),
                Err(AttachError::Refused(Refusal::NoSuchInterrupt | Refusal::NotResponding)) => {}
                Err(error) => return Err(error),
            }
        }
        match all.is_empty() {
            true => Err(Refusal::NoSuchInterrupt.into()),
            false => Ok(RemoteDataInterrupt(all)),
        }
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
    /// [`InterruptError::Gone`] when it is removed meanwhile.
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

/// An interrupt of this process that carries messages. It ends when it is dropped.
#[derive(Debug)]
pub struct DataInterrupt {
    line: Line,
    rings: Arc<Rings>,
}

/// The rings of a data interrupt's senders.
#[derive(Debug)]
pub(crate) struct Rings {
    bell: Arc<Doorbell>,
    state: Mutex<RingsState>,
}

#[derive(Debug, Default)]
struct RingsState {
    rings: Vec<Incoming>,
    /// Which ring is looked into first: each in turn.
    first: usize,
}

#[derive(Debug)]
struct Incoming {
    ring: Handle,
    messages: Consumer,
    /// Once the sender is gone, so many messages are the last of it, whatever it puts in later.
    left: Option<usize>,
}

impl Rings {
    fn lock(&self) -> MutexGuard<'_, RingsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, ring: Handle, file: OwnedFd) -> Result<(), RegionError> {
        let region = shared(&file, RING.bytes().unwrap_or(1))?;
        let Some(messages) = Consumer::new(region, 0, RING) else { return Ok(()) };
        self.lock().rings.push(Incoming { ring, messages, left: None });
        // It may have sent already.
        self.bell.ring();
        Ok(())
    }

    pub(crate) fn sender_gone(&self, ring: Handle) {
        let mut state = self.lock();
        for incoming in state.rings.iter_mut().filter(|incoming| incoming.ring == ring) {
            incoming.left = Some(incoming.messages.len());
        }
        state.rings.retain(|incoming| incoming.left != Some(0));
    }

    /// Rings of an interrupt that nobody triggers.
    #[cfg(test)]
    pub(crate) fn silent() -> Arc<Rings> {
        let line = rackbus_memory::SharedMemory::reserve("line", DOORBELL_BYTES as u64).unwrap();
        let event = rackbus_memory::Event::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        let bell = bell(&mut [line, event].into_iter()).unwrap();
        Arc::new(Rings { bell: Arc::new(bell), state: Mutex::default() })
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock().rings.len()
    }

    /// The oldest message of the next sender that has one.
    fn take(&self, buffer: &mut [u8]) -> Option<usize> {
        let mut state = self.lock();
        state.rings.retain(|incoming| incoming.left != Some(0));
        let count = state.rings.len();
        for nth in 0..count {
            let at = (state.first + nth) % count;
            let incoming = &mut state.rings[at];
            let Some(length) = incoming.messages.pop(buffer) else {
                // What was left of a sender that is gone was rubbish.
                incoming.left = incoming.left.and(Some(0));
                continue;
            };
            if length <= buffer.len() {
                incoming.left = incoming.left.map(|left| left.saturating_sub(1));
                state.first = at + 1;
            }
            return Some(length);
        }
        None
    }
}

impl DataInterrupt {
    /// Its number on this host.
    pub fn number(&self) -> u32 {
        self.line.number
    }

    /// Takes the oldest message of a sender, each sender in turn; its length.
    ///
    /// # Errors
    /// As [`Interrupt::wait`], and [`InterruptError::BufferTooShort`].
    pub fn receive(
        &self,
        buffer: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<usize, InterruptError> {
        let deadline = after(timeout);
        loop {
            let seen = self.line.bell.count();
            match self.rings.take(buffer) {
                Some(length) if length <= buffer.len() => return Ok(length),
                Some(length) => return Err(InterruptError::BufferTooShort(length)),
                None => {}
            }
            in_time(deadline)?;
            self.line.wait(seen, deadline)?;
        }
    }

    /// Ends it now; who waits for it is woken.
    pub fn remove(&self) {
        self.line.remove();
    }
}

/// The sending end of an interrupt.
#[derive(Debug)]
struct Sender {
    session: Session,
    handle: Handle,
    bell: Doorbell,
    watch: Arc<Watch>,
    /// The interrupt is on another machine: what is triggered is there before anything is stored after it.
    far: bool,
}

impl Sender {
    /// Connects; with the ring for messages, where there is one.
    fn connect(
        session: &Session,
        node: NodeId,
        kind: InterruptKind,
        number: u32,
        timeout_ms: u32,
    ) -> Result<(Sender, Option<Arc<Region>>), AttachError> {
        let request = Request::ConnectInterrupt { node, kind, number, timeout_ms };
        let (Reply::Connected(connected), fds) = session.call(&request)? else {
            return Err(AttachError::Protocol);
        };
        let mut fds = fds.into_iter();
        let bell = bell(&mut fds)?;
        let ring = fds.next().map(|file| shared(&file, RING.bytes().unwrap_or(1))).transpose()?;
        let (handle, watch) = (connected.connection, Watch::new(None));
        let watched = Watched { watch: Arc::downgrade(&watch), ..Watched::default() };
        session.registry().watch(handle, watched, session);
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
        if self.far && self.session.flush(self.handle).is_err() {
            return self.heard(false);
        }
        // The line is near now. Before, asking for it would have doubled what a ring costs.
        self.heard(!self.bell.is_closed())
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

impl Drop for Sender {
    fn drop(&mut self) {
        self.watch.end();
        self.session.registry().forget(self.handle);
        self.session.disconnect(self.handle);
    }
}

/// An interrupt of some host, to be triggered. The connection ends when it is dropped.
#[derive(Debug)]
pub struct RemoteInterrupt(Sender);

impl RemoteInterrupt {
    /// Triggers it. What was stored before is seen by who is woken.
    ///
    /// # Errors
    /// [`InterruptError::Gone`], [`InterruptError::Unreachable`].
    #[inline]
    pub fn trigger(&self) -> Result<(), InterruptError> {
        self.0.ring_after(|| Ok(()))
    }
}

/// A data interrupt of some host, or of several, to be sent to.
#[derive(Debug)]
pub struct RemoteDataInterrupt(Vec<(Sender, Mutex<Producer>)>);

impl RemoteDataInterrupt {
    /// Sends a message. Messages of one connection arrive in their order.
    ///
    /// # Errors
    /// [`InterruptError::Full`], [`InterruptError::TooLong`], [`InterruptError::Unreachable`],
    /// [`InterruptError::Gone`]; of several receivers the first error, after all have been sent to,
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
    use rackbus_memory::SharedMemory;
    use rackbus_memory::ring::Producer;

    fn sender(rings: &Rings, ring: Handle) -> (SharedMemory, Producer) {
        let memory = SharedMemory::create("ring", RING.bytes().unwrap() as u64).unwrap();
        rings.add(ring, memory.descriptor().unwrap()).unwrap();
        let producer = Producer::new(memory.region().clone(), 0, RING).unwrap();
        (memory, producer)
    }

    #[test]
    fn the_ring_of_a_sender_that_left_rubbish_behind_is_let_go() {
        let rings = Rings::silent();
        let (memory, mut producer) = sender(&rings, Handle(1));
        producer.push(&[1]).unwrap();
        // Behind the indices is the length of the first message.
        memory.whole().store_u32(128, MAX_DATA + 1, Ordering::Relaxed).unwrap();
        rings.sender_gone(Handle(1));
        let mut buffer = [0; 8];
        assert_eq!([rings.take(&mut buffer), rings.take(&mut buffer)], [None; 2]);
        assert_eq!(rings.count(), 0);
    }

    #[test]
    fn a_sender_that_is_gone_sends_nothing_more() {
        let rings = Rings::silent();
        let (_memory, mut producer) = sender(&rings, Handle(1));
        producer.push(&[1]).unwrap();
        producer.push(&[2]).unwrap();
        rings.sender_gone(Handle(1));
        let mut buffer = [0; 8];
        for message in 1..=2 {
            // It has the memory still.
            producer.push(&[3]).unwrap();
            assert_eq!((rings.take(&mut buffer), buffer[0]), (Some(1), message));
        }
        assert_eq!(rings.take(&mut buffer), None);
        assert_eq!(rings.count(), 0);
    }
}
