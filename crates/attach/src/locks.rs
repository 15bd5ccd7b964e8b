//! Locks and barriers between processes of the rack, in shared memory, that survive whoever holds
//! them.
//!
//! Taking a free lock is one exchange in memory. Who has waited for a while asks the nodes whether
//! the holder still lives; the lock of one that does not is free, and the next holder is told.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use rackbus_memory::Event;
use rackbus_memory::lock::{LockError, LockOwner, Locked, MUTEX_BYTES, SharedBarrier, SharedMutex};
use rackbus_segment::SessionId;
use rackbus_segment::message::LockHolder;

use crate::memory::Mapping;
use crate::session::{AttachError, Session};

/// How long to wait before the nodes are asked who lives, and between two times.
const DOUBT: Duration = Duration::from_millis(20);
/// And at most, when it takes long.
const MOST_DOUBT: Duration = Duration::from_secs(1);

/// Bytes of a lock; it begins at a multiple of 64.
pub const LOCK_BYTES: usize = MUTEX_BYTES;

/// A lock in memory that several processes have mapped; zeroes are a free one.
#[derive(Debug)]
pub struct RackMutex {
    session: Session,
    mutex: SharedMutex,
}

/// A barrier in memory that several processes have mapped; zeroes are a new one.
#[derive(Debug)]
pub struct RackBarrier {
    session: Session,
    parties: Vec<LockHolder>,
    barrier: SharedBarrier,
}

/// A session as locks write it: its number is used again only after 65,536 others, and then with
/// another generation.
fn owner(holder: LockHolder) -> Option<LockOwner> {
    let number = holder.node.checked_shl(16)? | (holder.session.0 & 0xffff) as u32;
    let generation = (holder.session.0 >> 16) as u32;
    (holder.node <= 0xffff).then_some(LockOwner { id: NonZeroU32::new(number)?, generation })
}

fn holder(owner: LockOwner) -> LockHolder {
    let session = u64::from(owner.generation) << 16 | u64::from(owner.id.get() & 0xffff);
    LockHolder { node: owner.id.get() >> 16, session: SessionId(session) }
}

impl Session {
    /// The lock at `offset` of a mapping that is the same memory for all parties.
    ///
    /// # Errors
    /// [`AttachError::Misplaced`] when it is not inside, not at a multiple of 64, or the mapping
    /// may only be read; [`AttachError::NotShared`] for memory of another machine.
    pub fn mutex(&self, mapping: &Mapping, offset: usize) -> Result<RackMutex, AttachError> {
        if !mapping.is_shared() {
            return Err(AttachError::NotShared);
        }
        let me = owner(self.holder()).ok_or(AttachError::Protocol)?;
        let mutex = SharedMutex::new(mapping.region().clone(), offset, event()?, me);
        let session = self.clone();
        Ok(RackMutex { session, mutex: mutex.ok_or(AttachError::Misplaced)? })
    }

    /// The barrier at `offset` of a mapping between `parties`, this session among them, in the same
    /// order for all. It takes [`RackBarrier::bytes`].
    ///
    /// # Errors
    /// As [`mutex`](Session::mutex), and when this session is not one of the parties.
    pub fn barrier(
        &self,
        mapping: &Mapping,
        offset: usize,
        parties: &[LockHolder],
    ) -> Result<RackBarrier, AttachError> {
        if !mapping.is_shared() {
            return Err(AttachError::NotShared);
        }
        let owners: Option<Vec<LockOwner>> = parties.iter().map(|party| owner(*party)).collect();
        let (owners, me) = (owners.unwrap_or_default(), owner(self.holder()));
        let me = me.ok_or(AttachError::Protocol)?;
        let region = mapping.region().clone();
        let barrier = SharedBarrier::new(region, offset, event()?, &owners, me);
        let barrier = barrier.ok_or(AttachError::Misplaced)?;
        Ok(RackBarrier { session: self.clone(), parties: parties.to_vec(), barrier })
    }

    /// Whether a party is certainly gone. One whose node is dead is cut off, and counts as gone:
    /// its process knows ([`Session::is_gone`]) and must not continue. A node that is only slow, or
    /// out of reach, says nothing of its processes.
    fn is_dead(&self, holder: LockHolder) -> bool {
        self.alive(holder).is_ok_and(|alive| !alive)
    }
}

fn event() -> Result<Event, AttachError> {
    Event::new().map_err(|cause| AttachError::System { what: "an event", cause })
}

/// A time limit in slices: between two of them the nodes are asked who lives.
#[derive(Debug)]
struct Patience {
    deadline: Option<Instant>,
    slice: Duration,
}

impl Patience {
    fn new(timeout: Option<Duration>) -> Patience {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Patience { deadline, slice: DOUBT }
    }

    /// How long to wait now, and whether that is the last time.
    fn next(&mut self) -> (Duration, bool) {
        let slice = self.slice;
        self.slice = (slice * 2).min(MOST_DOUBT);
        match self.deadline.map(|at| at.saturating_duration_since(Instant::now())) {
            Some(left) if left <= slice => (left, true),
            _ => (slice, false),
        }
    }
}

impl RackMutex {
    /// Takes the lock if nobody holds it.
    pub fn try_lock(&self) -> Option<Locked<'_>> {
        self.mutex.try_lock()
    }

    /// Takes the lock. [`Locked::OwnerDied`] says that its last holder died while it held it: what
    /// it protects may be half changed.
    ///
    /// # Errors
    /// [`LockError::TimedOut`] after `timeout` (`None` waits for ever), and [`LockError::Closed`]
    /// when the memory was taken away.
    pub fn lock(&self, timeout: Option<Duration>) -> Result<Locked<'_>, LockError> {
        let mut patience = Patience::new(timeout);
        loop {
            let (slice, last) = patience.next();
            match self.mutex.lock(Some(slice)) {
                Err(LockError::TimedOut) if !last => {}
                other => return other,
            }
            if let Some(owner) = self.mutex.owner()
                && self.session.is_dead(holder(owner))
            {
                self.mutex.declare_dead(owner);
            }
        }
    }
}

impl RackBarrier {
    /// Bytes of a barrier for so many parties.
    pub fn bytes(parties: usize) -> usize {
        SharedBarrier::bytes(parties)
    }

    /// Arrives, and waits until all parties that live have; how many those are.
    ///
    /// # Errors
    /// [`LockError::TimedOut`] after `timeout` (`None` waits for ever): the arrival stays, and the
    /// next call waits for the same phase. [`LockError::Excluded`] when this party was taken for
    /// dead, [`LockError::Closed`] when the memory was taken away.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<usize, LockError> {
        let mut patience = Patience::new(timeout);
        loop {
            let (slice, last) = patience.next();
            match self.barrier.wait(Some(slice)) {
                Err(LockError::TimedOut) if !last => {}
                other => return other,
            }
            let others = self.parties.iter().filter(|party| **party != self.session.holder());
            for dead in others.filter(|party| self.session.is_dead(**party)) {
                if let Some(dead) = owner(*dead) {
                    self.barrier.declare_dead(dead);
                }
            }
        }
    }
}
