//! Locks and barriers between processes of the rack, in shared memory, that survive whoever holds
//! them.
//!
//! Taking a free lock is one exchange in memory, or where the memory is another machine's a question to its host
//! ([`far`]). Who has waited for a while asks the nodes whether the holder still lives; the lock of one that does not is
//! free, and the next holder is told.

mod far;

use std::time::{Duration, Instant};

use rackbus_memory::Event;
use rackbus_memory::lock::{
    LockError, LockOwner, Locked, MUTEX_BYTES, SharedBarrier, SharedMutex, SharedMutexGuard,
};
use rackbus_segment::message::LockHolder;

use crate::memory::Mapping;
use crate::session::{AttachError, Session};
use far::{FarBarrier, FarGuard, FarMutex};

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
    mutex: Mutex,
}

#[derive(Debug)]
enum Mutex {
    Shared(SharedMutex),
    Far(FarMutex),
}

/// Holds the lock, and unlocks when dropped. Between machines what was stored before is there then.
#[derive(Debug)]
#[must_use = "dropping it unlocks at once"]
#[expect(dead_code, reason = "they unlock when they are dropped")]
pub struct RackMutexGuard<'a>(Guard<'a>);

#[derive(Debug)]
#[expect(dead_code, reason = "they unlock when they are dropped")]
enum Guard<'a> {
    Shared(SharedMutexGuard<'a>),
    Far(FarGuard<'a>),
}

impl<'a> From<SharedMutexGuard<'a>> for RackMutexGuard<'a> {
    fn from(guard: SharedMutexGuard<'a>) -> RackMutexGuard<'a> {
        RackMutexGuard(Guard::Shared(guard))
    }
}

impl<'a> From<FarGuard<'a>> for RackMutexGuard<'a> {
    fn from(guard: FarGuard<'a>) -> RackMutexGuard<'a> {
        RackMutexGuard(Guard::Far(guard))
    }
}

/// A barrier in memory that several processes have mapped; zeroes are a new one.
#[derive(Debug)]
pub struct RackBarrier {
    session: Session,
    parties: Vec<LockHolder>,
    barrier: Barrier,
}

#[derive(Debug)]
enum Barrier {
    Shared(SharedBarrier),
    Far(FarBarrier),
}

/// A session as locks write it.
fn owner(holder: LockHolder) -> Option<LockOwner> {
    let (id, generation) = holder.to_number()?;
    Some(LockOwner { id, generation })
}

fn holder(owner: LockOwner) -> LockHolder {
    LockHolder::of_number(owner.id, owner.generation)
}

impl Session {
    /// The lock at `offset` of a mapping that leads to the same memory for all parties.
    ///
    /// # Errors
    /// [`AttachError::Misplaced`] when it is not inside, not at a multiple of 64, or the mapping
    /// may only be read.
    pub fn mutex(&self, mapping: &Mapping, offset: usize) -> Result<RackMutex, AttachError> {
        let me = owner(self.holder()).ok_or(AttachError::Protocol)?;
        let mutex = SharedMutex::new(mapping.region().clone(), offset, event()?, me);
        let mutex = mutex.ok_or(AttachError::Misplaced)?;
        let mutex = match mapping.far_place() {
            Some(place) => Mutex::Far(FarMutex::new(self, place, offset, mutex)),
            None => Mutex::Shared(mutex),
        };
        Ok(RackMutex { session: self.clone(), mutex })
    }

    /// The barrier at `offset` of a mapping between `parties`, this session among them, in the same
    /// order for all. It takes [`RackBarrier::bytes`].
    ///
    /// # Errors
    /// As [`mutex`](Session::mutex), and when this session is not one of the parties. In memory of another machine a
    /// barrier has at most 1024 parties.
    pub fn barrier(
        &self,
        mapping: &Mapping,
        offset: usize,
        parties: &[LockHolder],
    ) -> Result<RackBarrier, AttachError> {
        let owners: Option<Vec<LockOwner>> = parties.iter().map(|party| owner(*party)).collect();
        let (owners, me) = (owners.unwrap_or_default(), owner(self.holder()));
        let me = me.ok_or(AttachError::Protocol)?;
        let region = mapping.region().clone();
        let barrier = SharedBarrier::new(region, offset, event()?, &owners, me);
        let barrier = barrier.ok_or(AttachError::Misplaced)?;
        let barrier = match mapping.far_place() {
            Some(place) => Barrier::Far(FarBarrier::new(self, place, offset, parties, barrier)?),
            None => Barrier::Shared(barrier),
        };
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
    pub fn try_lock(&self) -> Option<Locked<RackMutexGuard<'_>>> {
        match &self.mutex {
            Mutex::Shared(mutex) => mutex.try_lock().map(|locked| locked.map(RackMutexGuard::from)),
            Mutex::Far(mutex) => {
                mutex.lock(Duration::ZERO).ok().map(|locked| locked.map(RackMutexGuard::from))
            }
        }
    }

    /// Takes the lock. [`Locked::OwnerDied`] says that its last holder died while it held it: what
    /// it protects may be half changed.
    ///
    /// # Errors
    /// [`LockError::TimedOut`] after `timeout` (`None` waits for ever), [`LockError::Closed`]
    /// when the memory was taken away, or the connection to another machine's is lost, and [`LockError::TooMany`] when that
    /// machine's host gives this machine's processes no more locks.
    pub fn lock(&self, timeout: Option<Duration>) -> Result<Locked<RackMutexGuard<'_>>, LockError> {
        let mut patience = Patience::new(timeout);
        loop {
            let (slice, last) = patience.next();
            let outcome = match &self.mutex {
                Mutex::Shared(mutex) => {
                    mutex.lock(Some(slice)).map(|locked| locked.map(RackMutexGuard::from))
                }
                Mutex::Far(mutex) => {
                    mutex.lock(slice).map(|locked| locked.map(RackMutexGuard::from))
                }
            };
            match outcome {
                Err(LockError::TimedOut) if !last => {}
                other => return other,
            }
            self.free_of_dead();
        }
    }

    /// Frees the lock if its holder is dead.
    fn free_of_dead(&self) {
        match &self.mutex {
            Mutex::Shared(mutex) => {
                if let Some(owner) = mutex.owner()
                    && self.session.is_dead(holder(owner))
                {
                    mutex.declare_dead(owner);
                }
            }
            Mutex::Far(mutex) => {
                if let Some(holder) = mutex.holder()
                    && self.session.is_dead(holder)
                {
                    mutex.declare_dead(holder);
                }
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
    /// dead, [`LockError::Closed`] when the memory was taken away, or the connection to another machine's is lost, and
    /// [`LockError::TooMany`] when that machine's host notes no more arrivals for this machine: nobody has arrived then.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<usize, LockError> {
        let mut patience = Patience::new(timeout);
        loop {
            let (slice, last) = patience.next();
            let outcome = match &mut self.barrier {
                Barrier::Shared(barrier) => barrier.wait(Some(slice)),
                Barrier::Far(barrier) => barrier.wait(slice),
            };
            match outcome {
                Err(LockError::TimedOut) if !last => {}
                other => return other,
            }
            let others = self.parties.iter().filter(|party| **party != self.session.holder());
            for dead in others.filter(|party| self.session.is_dead(**party)) {
                match &self.barrier {
                    Barrier::Shared(barrier) => {
                        owner(*dead).map(|dead| barrier.declare_dead(dead));
                    }
                    Barrier::Far(barrier) => barrier.declare_dead(*dead),
                }
            }
        }
    }
}
