//! A barrier in the same memory, between the parties that there are at first and a process of the memory's host.

use std::collections::BTreeMap;

use rackbus_segment::directory::{LockAccess, LockState};
use rackbus_segment::message::{
    BarrierPhase, LockHolder, LockOperation, SegmentAccess, SessionRequest,
};
use rackbus_segment::{NodeId, SessionId};

use super::{FAR, HOME, OWNER, SEGMENT, View, Who, World};

/// Where the barrier is.
pub const AT: u64 = 256;

/// What a barrier has in memory, as `rackbus_memory::lock` keeps it: of each party, how far it is, and whether it is dead.
#[derive(Debug, Clone, Default)]
pub struct BarrierMemory {
    phase: u32,
    slots: BTreeMap<(NodeId, SessionId), (u32, bool)>,
}

impl BarrierMemory {
    fn complete(&mut self, phase: u32, parties: &[LockHolder]) {
        let slots = &self.slots;
        let slot = |it: &LockHolder| slots.get(&(it.node, it.session)).copied().unwrap_or_default();
        if self.phase == phase && parties.iter().map(slot).all(|(at, dead)| dead || at > phase) {
            self.phase += 1;
        }
    }

    pub fn access(&mut self, access: LockAccess<'_>) -> Option<LockState> {
        match access {
            LockAccess::Arrive { passed: None, .. } => {
                Some(LockState::Arrived(self.phase, BarrierPhase::Waiting))
            }
            LockAccess::Arrive { parties, party, passed: Some(passed) } => {
                let slot = self.slots.entry((party.node, party.session)).or_default();
                slot.0 = passed + 1;
                let dead = slot.1;
                self.complete(passed, parties);
                let live = parties.iter().filter(|it| !self.is_dead(it)).count() as u32;
                Some(LockState::Arrived(
                    passed,
                    match (dead, self.phase > passed) {
                        (true, _) => BarrierPhase::Excluded,
                        (false, true) => BarrierPhase::Passed { live },
                        (false, false) => BarrierPhase::Waiting,
                    },
                ))
            }
            LockAccess::Exclude { parties, dead } => {
                self.slots.entry((dead.node, dead.session)).or_default().1 = true;
                self.complete(self.phase, parties);
                Some(LockState::Held(None))
            }
            _ => None,
        }
    }

    fn is_dead(&self, party: &LockHolder) -> bool {
        self.slots.get(&(party.node, party.session)).is_some_and(|(_, dead)| *dead)
    }
}

/// How a party stands with the barrier.
#[derive(Debug, Clone, Copy, Default)]
pub struct Standing {
    /// Phases that it knows it has passed, by this connection.
    pub passed: Option<u32>,
    /// It was told that it is dead.
    excluded: bool,
}

/// What is known of the barrier beside the memory.
#[derive(Debug, Default)]
pub struct Barrier {
    /// All parties, in the order that all name.
    pub parties: Vec<LockHolder>,
    /// Phases whose end each has said that it arrives at.
    reached: BTreeMap<(NodeId, SessionId), u32>,
    /// Hosts of which a conversation was cut at some time: their parties may be taken for dead.
    pub cut: Vec<NodeId>,
    /// How far the process of the memory's host is.
    here: u32,
    /// What a party was told and must not have been.
    wrong: Option<String>,
}

fn party(who: Who) -> LockHolder {
    LockHolder { node: who.0, session: who.1 }
}

impl World {
    fn barrier_memory(&self) -> Option<&BarrierMemory> {
        let memory = self.directories[&HOME].memory_of(OWNER, self.segment)?;
        self.stores[&HOME].barriers.get(&(memory, AT))
    }

    /// Somebody who is a party arrives, or asks how far it is; whether anybody does.
    pub fn arrive(&mut self) -> bool {
        let parties = self.barrier.parties.clone();
        let of = |who: &Who| parties.contains(&party(*who));
        let able: Vec<Who> = self
            .parties
            .iter()
            .filter(|(who, it)| of(who) && !it.waiting && it.view == View::Idle)
            .filter(|(_, it)| it.connection.is_some() && !it.standing.excluded)
            .map(|(who, _)| *who)
            .collect();
        let Some(who) = able.get(self.random.below(able.len())).copied() else { return false };
        let passed = self.parties[&who].standing.passed;
        if let Some(passed) = passed {
            let reached = self.barrier.reached.entry(who).or_default();
            *reached = (*reached).max(passed + 1);
        }
        self.lock(who, AT, LockOperation::Arrive { parties, passed }, View::Arriving(passed));
        true
    }

    /// The process of the memory's host arrives.
    pub fn arrive_here(&mut self) {
        let Some(memory) = self.directories[&HOME].memory_of(OWNER, self.segment) else { return };
        if self.frozen {
            return;
        }
        let (parties, passed) = (self.barrier.parties.clone(), self.barrier.here);
        let who = (HOME, OWNER);
        self.barrier.reached.insert(who, passed + 1);
        let barrier = self.stores.get_mut(&HOME).unwrap().barriers.entry((memory, AT)).or_default();
        let access =
            LockAccess::Arrive { parties: &parties, party: party(who), passed: Some(passed) };
        if let Some(LockState::Arrived(_, BarrierPhase::Passed { .. })) = barrier.access(access) {
            self.passes(who, passed);
            self.barrier.here = passed + 1;
        }
    }

    /// Somebody says that a party is dead that has died; or, where `unsure`, that it does not reach, and that has asked by
    /// a connection that is there how far the barrier is.
    pub fn exclude(&mut self, unsure: bool) -> bool {
        let dead = |it: &LockHolder| {
            let party = self.parties.get(&(it.node, it.session));
            let named = |it: &super::Party| it.connection.is_some() && it.standing.passed.is_some();
            it.node != HOME && party.is_none_or(|it| unsure && named(it))
        };
        let known =
            |it: &LockHolder| self.barrier_memory().is_some_and(|memory| memory.is_dead(it));
        let found = self.barrier.parties.iter().find(|it| dead(it) && !known(it)).copied();
        let Some(dead) = found else { return false };
        let parties = self.barrier.parties.clone();
        let exclude = LockOperation::Exclude { parties: parties.clone(), dead };
        let able = self.parties.iter().find(|(who, it)| {
            parties.contains(&party(**who))
                && !it.waiting
                && it.view == View::Idle
                && it.connection.is_some()
        });
        match able.map(|(who, _)| *who) {
            Some(who) => self.lock(who, AT, exclude, View::Busy),
            // What is in memory is changed by those who know it.
            None if self.frozen || self.parties.contains_key(&(dead.node, dead.session)) => {}
            None => {
                let memory = self.directories[&HOME].memory_of(OWNER, self.segment);
                let store = self.stores.get_mut(&HOME).unwrap();
                let barrier = store.barriers.entry((memory.unwrap(), AT)).or_default();
                barrier.access(LockAccess::Exclude { parties: &parties, dead });
            }
        }
        true
    }

    /// What a party hears of the phase whose end it arrived at.
    pub fn heard_of_barrier(
        &mut self,
        who: Who,
        asked: Option<u32>,
        passed: u32,
        phase: BarrierPhase,
    ) {
        if let BarrierPhase::Passed { .. } = phase {
            self.passes(who, passed);
        }
        let Some(party) = self.parties.get_mut(&who) else { return };
        match phase {
            BarrierPhase::Passed { .. } => party.standing.passed = Some(passed + 1),
            BarrierPhase::Excluded => party.standing.excluded = true,
            BarrierPhase::Waiting if asked.is_none() => party.standing.passed = Some(passed),
            BarrierPhase::Waiting => {}
        }
    }

    /// Nobody passes before all have arrived who were not taken for dead.
    fn passes(&mut self, who: Who, phase: u32) {
        let Some(memory) = self.barrier_memory() else { return };
        let late = self.barrier.parties.iter().find(|it| {
            let reached = self.barrier.reached.get(&(it.node, it.session)).copied();
            !memory.is_dead(it) && reached.unwrap_or_default() <= phase
        });
        if let Some(late) = late {
            let wrong = format!("{who:?} passed phase {phase}, and {late:?} had not arrived");
            self.barrier.wrong.get_or_insert(wrong);
        }
    }

    /// Nobody was let through too early, or taken for dead who was there all the time.
    pub fn check_barrier(&self) -> Result<(), String> {
        if let Some(wrong) = &self.barrier.wrong {
            return Err(wrong.clone());
        }
        let Some(memory) = self.barrier_memory() else { return Ok(()) };
        let wrong = self.barrier.parties.iter().find(|it| {
            let lives = it.node == HOME || self.parties.contains_key(&(it.node, it.session));
            memory.is_dead(it) && lives && !self.barrier.cut.contains(&it.node)
        });
        match wrong {
            Some(party) => Err(format!("{party:?} is taken for dead")),
            None => Ok(()),
        }
    }

    /// All who are left pass another phase: nobody waits for who is gone.
    pub fn rest_at_barrier(&mut self) -> Result<(), String> {
        for node in FAR {
            let (first, share) = (SEGMENT, SegmentAccess::Write);
            let request = SessionRequest::SetShare { first, last: first, node: Some(node), share };
            self.request((HOME, OWNER), request);
            self.rest()?;
        }
        let phase = |world: &World| world.barrier_memory().map_or(0, |memory| memory.phase);
        let until = phase(self) + 1;
        for _ in 0..400 {
            self.rest()?;
            if phase(self) >= until && !self.lags(until) {
                return Ok(());
            }
            self.reconnect();
            self.rest()?;
            if !self.exclude(false) {
                self.arrive();
            }
            self.arrive_here();
        }
        Err(format!("phase {until} is not passed: {:?}, {:?}", self.barrier, self.barrier_memory()))
    }

    /// Whether a party that may go on has not heard that this phase is over.
    fn lags(&self, phase: u32) -> bool {
        let lags = |(who, it): (&Who, &super::Party)| {
            self.barrier.parties.contains(&party(*who))
                && !it.standing.excluded
                && it.standing.passed.is_none_or(|passed| passed < phase)
        };
        self.barrier.here < phase || self.parties.iter().any(lags)
    }
}
