//! Locks and barriers in memory of this host, for parties on other machines: what is an exchange in memory for this host's
//! processes, others ask for.
//!
//! The memory says who holds a lock, as for everybody. What is noted beside it is by which attempt somebody took one: an
//! attempt that comes twice has its effect once, and an unlocking that comes late unlocks nothing that was taken since.
//! Attempts of a connection count up.
//! A connection that ends frees what was taken by it, whose next holder is told that the last one died: a host that is cut
//! off cannot store to the memory any more. Memory that is being moved is left alone: what ends meanwhile is unlocked
//! where the memory is then.

use std::collections::BTreeMap;

use super::interface::{LockAccess, LockState};
use super::notes::{BarrierParties, FarNotes};
use super::{ConnectionTarget, Directory, GuestConnection, Objects};
use crate::message::{
    BarrierPhase, Handle, LockHolder, LockOperation, LockReply, LockRequest, MOST_FAR_PARTIES,
    NodeId, ObjectId, Refusal, SessionId,
};

/// Milliseconds until what could not be done in memory is tried again.
const RETRY: u64 = 100;

/// What parties on other machines have in a piece of memory.
#[derive(Debug, Default)]
pub(super) struct FarLocks {
    /// Locks that are held, each by which connection and where.
    held: BTreeMap<(GuestConnection, u64), HeldLock>,
    /// Of each connection, the last attempt. Attempts count up: what has no greater number has been tried, or is given up.
    tried: BTreeMap<GuestConnection, u64>,
    /// Barriers that a connection's party has arrived at, or has asked about.
    barriers: BTreeMap<(GuestConnection, u64, SessionId), Arrival>,
    /// What is to be done when the memory is where it will be, or could not be done before.
    owed: Vec<(u64, Owed)>,
}

/// A party of a barrier.
#[derive(Debug)]
struct Arrival {
    parties: BarrierParties,
    /// Phases that it had passed when it arrived or asked last.
    passed: u32,
}

#[derive(Debug)]
struct HeldLock {
    holder: LockHolder,
    attempt: u64,
    died: bool,
}

/// What is still to be done to a lock or a barrier.
#[derive(Debug)]
enum Owed {
    Free(LockHolder),
    FreeOfDead(LockHolder),
    Exclude(BarrierParties, LockHolder),
}

impl Owed {
    /// The parties of the barrier that it is about.
    fn parties(&self) -> Option<BarrierParties> {
        match self {
            Owed::Exclude(parties, _) => Some(parties.clone()),
            Owed::Free(_) | Owed::FreeOfDead(_) => None,
        }
    }

    /// Does it; whether it could be done.
    fn settle(&self, memory: ObjectId, offset: u64, objects: &mut dyn Objects) -> bool {
        let access = match self {
            Owed::Free(holder) => LockAccess::Free(*holder),
            Owed::FreeOfDead(holder) => LockAccess::FreeOfDead(*holder),
            Owed::Exclude(parties, dead) => LockAccess::Exclude { parties, dead: *dead },
        };
        objects.lock(memory, offset, access).is_some()
    }
}

impl FarLocks {
    /// The memory has ended: nothing of all this counts any more.
    fn leave(&self, notes: &mut FarNotes) {
        self.held.keys().for_each(|((node, _), _)| notes.remove_lock(*node));
        let barriers = self.barriers.iter();
        barriers.for_each(|(((node, _), ..), it)| notes.remove_arrival(*node, &it.parties));
    }

    /// Notes an attempt; whether it is a new one.
    fn tries(&mut self, guest: GuestConnection, attempt: u64) -> bool {
        let last = self.tried.entry(guest).or_default();
        let new = *last < attempt;
        *last = (*last).max(attempt);
        new
    }

    /// What the end of a connection frees.
    fn take_held(&mut self, guest: GuestConnection) -> Vec<(u64, Owed)> {
        let ended: Vec<u64> =
            self.held.range((guest, 0)..=(guest, u64::MAX)).map(|((_, at), _)| *at).collect();
        let free = |at: u64| Some((at, Owed::FreeOfDead(self.held.remove(&(guest, at))?.holder)));
        ended.into_iter().filter_map(free).collect()
    }

    /// The barriers that a connection's parties have arrived at.
    fn take_barriers(&mut self, guest: GuestConnection) -> Vec<(u64, Owed)> {
        let range = (guest, 0, SessionId(0))..=(guest, u64::MAX, SessionId(u64::MAX));
        let ended: Vec<(GuestConnection, u64, SessionId)> =
            self.barriers.range(range).map(|(key, _)| *key).collect();
        let leave = |key: (GuestConnection, u64, SessionId)| {
            let dead = LockHolder { node: guest.0, session: key.2 };
            Some((key.1, Owed::Exclude(self.barriers.remove(&key)?.parties, dead)))
        };
        ended.into_iter().filter_map(leave).collect()
    }

    /// Whether somebody holds the lock at a place by a connection that is there. Whoever says that it is dead has not reached
    /// its node, which others may: the end of its connection frees the lock.
    fn holds(&self, holder: LockHolder, offset: u64) -> bool {
        let of_node = ((holder.node, Handle(0)), 0)..=((holder.node, Handle(u64::MAX)), u64::MAX);
        self.held.range(of_node).any(|((_, at), it)| (*at, it.holder) == (offset, holder))
    }

    /// The same of a party of the barrier at a place.
    fn waits(&self, party: LockHolder, offset: u64) -> bool {
        let first = ((party.node, Handle(0)), 0, SessionId(0));
        let last = ((party.node, Handle(u64::MAX)), u64::MAX, SessionId(u64::MAX));
        let mut of_node = self.barriers.range(first..=last);
        of_node.any(|((_, at, session), _)| (*at, *session) == (offset, party.session))
    }

    /// What was left to be done, when the memory is at rest; whether all of it is. What cannot be done now, as the host may
    /// have no descriptor left for it, is tried again ([`Directory::settle_later`]).
    pub(super) fn settle(&mut self, memory: ObjectId, objects: &mut dyn Objects) -> bool {
        self.owed.retain(|(offset, owed)| !owed.settle(memory, *offset, objects));
        self.owed.is_empty()
    }
}

/// Memory that a connection leads to.
struct FarMemory<'a> {
    memory: ObjectId,
    moving: bool,
    write: bool,
    locks: &'a mut FarLocks,
}

impl Directory {
    /// The memory of a segment or a group that a connection leads to, or led to until now.
    fn far_memory(&mut self, guest: GuestConnection) -> Option<FarMemory<'_>> {
        match self.guests.get(&guest)?.0 {
            ConnectionTarget::Segment(handle) => {
                let segment = self.segments.get_mut(&handle)?;
                let (moving, write) = (segment.moving.is_some(), segment.writes(guest));
                Some(FarMemory {
                    memory: segment.memory?,
                    moving,
                    write,
                    locks: &mut segment.locks,
                })
            }
            ConnectionTarget::Group(id) => {
                let group = self.groups.get_mut(&id)?;
                let (memory, moving) = (group.memory(), group.is_moving());
                let write = group.writes(guest);
                Some(FarMemory { memory, moving, write, locks: group.locks() })
            }
            ConnectionTarget::Interrupt(..) | ConnectionTarget::Pages(_) => None,
        }
    }

    /// Does something to a lock or a barrier for a party of another host.
    pub(super) fn lock(
        &mut self,
        guest: GuestConnection,
        session: SessionId,
        request: LockRequest,
        objects: &mut dyn Objects,
    ) -> Result<LockReply, Refusal> {
        let far = self.far_memory(guest).ok_or(Refusal::Stale)?;
        if !far.write {
            return Err(Refusal::Denied);
        }
        if far.moving
            && let LockOperation::Take { attempt } = request.operation
        {
            // It is answered, and so not tried later.
            far.locks.tries(guest, attempt);
        }
        if !far.moving {
            far.locks.settle(far.memory, objects);
        }
        // What is let go is noted for later then.
        let lets_go = matches!(
            request.operation,
            LockOperation::Release { .. } | LockOperation::GiveBack { .. }
        );
        if far.moving && !lets_go {
            return Err(Refusal::Busy);
        }
        let LockRequest { offset, operation } = request;
        let (memory, party) = (far.memory, LockHolder { node: guest.0, session });
        let mut access =
            |access: LockAccess<'_>| objects.lock(memory, offset, access).ok_or_else(no_lock);
        match operation {
            LockOperation::Take { attempt } => {
                self.take_lock((guest, offset), (party, attempt), objects)
            }
            LockOperation::Release { attempt } => {
                self.release_lock((guest, offset), (party, attempt), true, objects)
            }
            LockOperation::GiveBack { attempt } => {
                self.release_lock((guest, offset), (party, attempt), false, objects)
            }
            LockOperation::DeclareDead { holder } if far.locks.holds(holder, offset) => {
                Ok(LockReply::Done)
            }
            LockOperation::DeclareDead { holder } => {
                access(LockAccess::FreeOfDead(holder)).map(|_| LockReply::Done)
            }
            LockOperation::Arrive { parties, passed } => {
                let key = (guest, offset, session);
                self.arrive(key, (party, parties), passed, objects)
            }
            LockOperation::Exclude { dead, .. } if far.locks.waits(dead, offset) => {
                Ok(LockReply::Done)
            }
            LockOperation::Exclude { parties, dead } => {
                let exclude = LockAccess::Exclude { parties: &parties, dead };
                access(exclude).map(|_| LockReply::Done)
            }
        }
    }

    /// An attempt of a party to take the lock at a place of its connection's memory.
    fn take_lock(
        &mut self,
        key: (GuestConnection, u64),
        (party, attempt): (LockHolder, u64),
        objects: &mut dyn Objects,
    ) -> Result<LockReply, Refusal> {
        let FarMemory { memory, locks, .. } = self.far_memory(key.0).ok_or(Refusal::Stale)?;
        let mut access =
            |access: LockAccess<'_>| objects.lock(memory, key.1, access).ok_or_else(no_lock);
        if let Some(HeldLock { holder, attempt: by, died }) = locks.held.get(&key) {
            let (holder, by, died) = (*holder, *by, *died);
            if access(LockAccess::Look)? == LockState::Held(Some(holder)) {
                return Ok(match (by, holder) == (attempt, party) {
                    true => LockReply::Taken { died },
                    false => LockReply::Held { holder: Some(holder) },
                });
            }
            // Others took it for dead.
            locks.held.remove(&key);
            self.far_notes.remove_lock(key.0.0);
        }
        if !self.far_memory(key.0).is_some_and(|far| far.locks.tries(key.0, attempt)) {
            return Ok(LockReply::Held { holder: None });
        }
        self.far_notes.add_lock(key.0.0).map_err(|why| self.too_many_locks(key.0.0, why))?;
        let taken = match objects.lock(memory, key.1, LockAccess::Take(party)) {
            Some(LockState::Taken { died }) => died,
            other => {
                self.far_notes.remove_lock(key.0.0);
                return match other {
                    Some(LockState::Held(holder)) => Ok(LockReply::Held { holder }),
                    _ => Err(no_lock()),
                };
            }
        };
        if let Some(far) = self.far_memory(key.0) {
            far.locks.held.insert(key, HeldLock { holder: party, attempt, died: taken });
        }
        Ok(LockReply::Taken { died: taken })
    }

    /// A party arrives at a barrier, or asks how far that is.
    fn arrive(
        &mut self,
        key: (GuestConnection, u64, SessionId),
        (party, parties): (LockHolder, Vec<LockHolder>),
        passed: Option<u32>,
        objects: &mut dyn Objects,
    ) -> Result<LockReply, Refusal> {
        let node = key.0.0;
        if parties.len() > MOST_FAR_PARTIES {
            return Err(self.too_many_locks(node, Refusal::TooMany(MOST_FAR_PARTIES as u32)));
        }
        let FarMemory { memory, locks, .. } = self.far_memory(key.0).ok_or(Refusal::Stale)?;
        let before = locks.barriers.get(&key).filter(|it| *it.parties == *parties);
        let before = before.map(|it| (it.parties.clone(), it.passed));
        if let (Some(passed), Some((_, last))) = (passed, &before)
            && is_before(passed, *last)
        {
            // It has arrived later since: this comes twice.
            return Ok(LockReply::Barrier { passed, phase: BarrierPhase::Waiting });
        }
        let (parties, before) = match before {
            Some((parties, last)) => (parties, Some(last)),
            None => {
                // Another barrier may have been there.
                if let Some(other) = locks.barriers.remove(&key) {
                    self.far_notes.remove_arrival(node, &other.parties);
                }
                let noted = self.far_notes.add_arrival(node, parties);
                (noted.map_err(|why| self.too_many_locks(node, why))?, None)
            }
        };
        let arrive = LockAccess::Arrive { parties: &parties, party, passed };
        let Some(LockState::Arrived(at, phase)) = objects.lock(memory, key.1, arrive) else {
            if before.is_none() {
                self.far_notes.remove_arrival(node, &parties);
            }
            return Err(no_lock());
        };
        // Who asks how far the barrier is begins anew. Where the number is smaller, another barrier is there now, and that
        // number holds. Otherwise the earlier one stays: the question may be one that came twice, and its party goes on
        // from the first answer.
        let passed = match (passed, before) {
            (None, Some(last)) if !is_before(at, last) => last,
            _ => at,
        };
        if let Some(far) = self.far_memory(key.0) {
            far.locks.barriers.insert(key, Arrival { parties, passed });
        }
        Ok(LockReply::Barrier { passed: at, phase })
    }

    /// A party lets go what its attempt took, if that holds it still. One that was not `told` that it held it does not know
    /// that the holder before it died: the next one has to be told.
    fn release_lock(
        &mut self,
        key: (GuestConnection, u64),
        (party, attempt): (LockHolder, u64),
        told: bool,
        objects: &mut dyn Objects,
    ) -> Result<LockReply, Refusal> {
        let FarMemory { memory, moving, locks, .. } =
            self.far_memory(key.0).ok_or(Refusal::Stale)?;
        locks.tries(key.0, attempt);
        let by = |it: &HeldLock| (it.attempt, it.holder) == (attempt, party);
        if let Some(held) = locks.held.get(&key).filter(|it| by(it)) {
            let owed = match held.died && !told {
                true => Owed::FreeOfDead(party),
                false => Owed::Free(party),
            };
            locks.held.remove(&key);
            locks.owed.push((key.1, owed));
            let settled = moving || locks.settle(memory, objects);
            self.settle_later(settled);
            self.far_notes.remove_lock(key.0.0);
        }
        Ok(LockReply::Done)
    }

    /// A node is refused what its processes have too much of.
    fn too_many_locks(&mut self, node: NodeId, why: Refusal) -> Refusal {
        self.refused.locks += 1;
        self.note_refused(node, why)
    }

    /// Memory has ended, with all that was noted of it.
    pub(super) fn forget_locks(&mut self, locks: &FarLocks) {
        locks.leave(&mut self.far_notes);
    }

    /// A connection ends: what was locked by it is free, and its next holder is told. When it is `cut`, nobody waits at
    /// barriers any more for who arrived by it; otherwise its node says who lives.
    pub(super) fn end_locks(
        &mut self,
        guest: GuestConnection,
        cut: bool,
        objects: &mut dyn Objects,
    ) {
        let Some(far) = self.far_memory(guest) else { return };
        let (held, barriers) = (far.locks.take_held(guest), far.locks.take_barriers(guest));
        far.locks.tried.remove(&guest);
        let (memory, moving) = (far.memory, far.moving);
        let held_count = held.len();
        let named: Vec<BarrierParties> =
            barriers.iter().filter_map(|(_, owed)| owed.parties()).collect();
        let owed: Vec<(u64, Owed)> =
            held.into_iter().chain(barriers.into_iter().filter(|_| cut)).collect();
        far.locks.owed.extend(owed);
        let settled = moving || far.locks.settle(memory, objects);
        self.settle_later(settled);
        (0..held_count).for_each(|_| self.far_notes.remove_lock(guest.0));
        named.iter().for_each(|parties| self.far_notes.remove_arrival(guest.0, parties));
    }

    /// Has what could not be done in memory tried again after a while, unless all was `settled`: whoever waits for it in
    /// memory asks nobody.
    pub(super) fn settle_later(&mut self, settled: bool) {
        if !settled && self.locks_due.is_none() {
            self.locks_due = Some(self.now.saturating_add(RETRY));
        }
    }

    /// Tries again what could not be done in memory, where that is due.
    pub(super) fn retry_locks(&mut self, objects: &mut dyn Objects) {
        if self.locks_due.is_none_or(|due| due > self.now) {
            return;
        }
        self.locks_due = None;
        let mut settled = true;
        for segment in self.segments.values_mut().filter(|it| it.moving.is_none()) {
            if let Some(memory) = segment.memory {
                settled &= segment.locks.settle(memory, objects);
            }
        }
        for group in self.groups.values_mut().filter(|it| !it.is_moving()) {
            let memory = group.memory();
            settled &= group.locks().settle(memory, objects);
        }
        self.settle_later(settled);
    }
}

fn no_lock() -> Refusal {
    let why = "a lock lies inside of the memory, at a multiple of 64, between its own parties";
    Refusal::Illegal(why.into())
}

/// Whether a number of phases is less than another one, of numbers that begin anew after their last.
fn is_before(passed: u32, other: u32) -> bool {
    passed.wrapping_sub(other) > u32::MAX / 2
}
