//! Locks and barriers in memory of this host for parties on other machines: what the directory decided is done in memory,
//! as a process of this host would do it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rackbus_memory::lock::{LockError, LockOwner, Locked, SharedBarrier, SharedMutex};
use rackbus_memory::{Event, Region};
use rackbus_segment::directory::{LockAccess, LockState};
use rackbus_segment::message::{BarrierPhase, LockHolder, LockOperation, LockRequest, Refusal};
use rackbus_segment::{Handle, SessionId};

use super::far::{Far, PATIENCE};
use super::{Owner, Segments};

fn owner(holder: LockHolder) -> Option<LockOwner> {
    let (id, generation) = holder.to_number()?;
    Some(LockOwner { id, generation })
}

fn holder(owner: LockOwner) -> LockHolder {
    LockHolder::of_number(owner.id, owner.generation)
}

/// Does something to the lock or the barrier at `offset`; `None` when there cannot be one.
pub fn access(region: Arc<Region>, offset: usize, access: LockAccess<'_>) -> Option<LockState> {
    let mutex = |region, me| SharedMutex::new(region, offset, Event::new().ok()?, me);
    let held = |mutex: &SharedMutex| LockState::Held(mutex.owner().map(holder));
    match access {
        LockAccess::Look => {
            // Whoever looks: the lock says who it is that holds it.
            let nobody = LockHolder { node: 1, session: SessionId(0) };
            Some(held(&mutex(region, owner(nobody)?)?))
        }
        LockAccess::Take(me) => {
            let mutex = mutex(region, owner(me)?)?;
            let taken = mutex.try_lock().map(|locked| {
                let died = matches!(locked, Locked::OwnerDied(_));
                // It is let go when its party says so.
                std::mem::forget(locked);
                LockState::Taken { died }
            });
            Some(taken.unwrap_or_else(|| held(&mutex)))
        }
        LockAccess::Free(me) => {
            let mutex = mutex(region, owner(me)?)?;
            mutex.unlock();
            Some(held(&mutex))
        }
        LockAccess::FreeOfDead(dead) => {
            let mutex = mutex(region, owner(dead)?)?;
            mutex.declare_dead(owner(dead)?);
            Some(held(&mutex))
        }
        LockAccess::Arrive { parties, party, passed } => {
            let barrier = barrier(region, offset, parties, party)?;
            let Some(before) = passed else {
                return Some(LockState::Arrived(barrier.passed(), BarrierPhase::Waiting));
            };
            let mut barrier = barrier.having_passed(before);
            let phase = match barrier.wait(Some(Duration::ZERO)) {
                Ok(live) => BarrierPhase::Passed { live: u32::try_from(live).unwrap_or(u32::MAX) },
                Err(LockError::TimedOut) => BarrierPhase::Waiting,
                Err(LockError::Excluded) => BarrierPhase::Excluded,
                Err(LockError::Closed | LockError::TooMany) => return None,
            };
            Some(LockState::Arrived(before, phase))
        }
        LockAccess::Exclude { parties, dead } => {
            barrier(region, offset, parties, dead)?.declare_dead(owner(dead)?);
            Some(LockState::Held(None))
        }
    }
}

fn barrier(
    region: Arc<Region>,
    offset: usize,
    parties: &[LockHolder],
    party: LockHolder,
) -> Option<SharedBarrier> {
    let owners: Option<Vec<LockOwner>> = parties.iter().map(|party| owner(*party)).collect();
    SharedBarrier::new(region, offset, Event::new().ok()?, &owners?, owner(party)?)
}

/// Flushes that a session began before locks of another machine are let go, and that were not in time: when the same is
/// asked again, they go on. Where looking at all memory takes longer than a flush is waited for, one that
/// begins anew each time would never end.
#[derive(Debug, Default)]
pub(super) struct BegunFlushes(HashMap<LockPlace, (LockOperation, Arc<Far>, u64)>);

/// A connection, and the offset of a lock in its memory.
type LockPlace = (Handle, u64);

/// Kept of a session at most: a lock beyond begins its flush anew.
const MOST_BEGUN: usize = 256;

impl BegunFlushes {
    /// Waits for at most `limit` until what was stored before `operation` was first asked for is at the memory's home;
    /// whether it is.
    pub fn flush(
        &mut self,
        place: LockPlace,
        operation: &LockOperation,
        far: &Arc<Far>,
        limit: Duration,
    ) -> bool {
        let same = |(begun, with, _): &(LockOperation, Arc<Far>, u64)| {
            begun == operation && Arc::ptr_eq(with, far)
        };
        let begun = self.0.remove(&place).filter(same);
        let flush = begun.map_or_else(|| far.begin_flush(), |(.., flush)| flush);
        let done = far.has_flushed_within(flush, limit);
        if done {
            return true;
        }
        if self.0.len() >= MOST_BEGUN {
            self.0.retain(|(connection, _), (_, far, _)| far.has_connection(*connection));
        }
        if self.0.len() < MOST_BEGUN {
            self.0.insert(place, (operation.clone(), far.clone(), flush));
        }
        false
    }
}

impl Segments {
    /// What comes before something is done to a lock of another machine: what was stored is to be there, where others see
    /// it by that. Why it cannot be.
    pub(super) fn before_lock(
        &self,
        session: SessionId,
        keeper: Handle,
        request: &LockRequest,
        begun: &mut BegunFlushes,
    ) -> Option<Refusal> {
        let (connection, far, older) = {
            let state = self.lock();
            let (node, connection) = state.directory.owner_of(session, keeper)?;
            let owner = state.owners.get(&node);
            let older = matches!(owner, Some(Owner::Here(outbox)) if !outbox.has_locks());
            let far = state.fars.get(&node).cloned();
            (connection, far, older)
        };
        if older {
            let why = "the node of the host that has the memory knows no locks of other machines: upgrade it";
            return Some(Refusal::Illegal(why.into()));
        }
        if !request.operation.publishes() {
            return None;
        }
        let far = far?;
        let in_time = match request.operation {
            LockOperation::Release { .. } => {
                begun.flush((connection, request.offset), &request.operation, &far, PATIENCE)
            }
            // A party that waited in vain may have stored something before it arrives by the same words.
            _ => far.flush(),
        };
        let is_there = in_time && far.has_connection(connection);
        (!is_there).then_some(Refusal::NotResponding)
    }
}
