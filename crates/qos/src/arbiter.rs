//! Who is served next by the engines, and for how long.
//!
//! Two levels, each by deficit round robin in engine time. First come tenants that have something left
//! of their guarantee; what is left of the engines goes to all that have work, by weight. Below, the
//! queues of a tenant take turns for what the tenant has. A turn is at most a *slice* of engine time:
//! of a long message it is a piece, and many short ones are a turn together. What a turn takes is
//! charged as estimated, and settled when it is known.

use std::collections::{BTreeMap, BTreeSet};

use crate::drr::Drr;
use crate::kept::MinimumRecord;
use crate::tenant::{Spent, Tenant, TenantShare};
use crate::turn::{
    EngineTurn, MessagePiece, NextTurn, OpenTurn, QueuedMessage, SharingSettings, TenantId,
    TurnResult, Usage,
};

/// Decides which tenant's message an engine serves next, and for how long.
#[derive(Debug)]
pub struct TenantArbiter {
    settings: SharingSettings,
    tenants: BTreeMap<TenantId, Tenant>,
    /// By [`Level`]: who has a guarantee, and everybody.
    levels: [Drr<TenantId>; 2],
    timers: BTreeSet<(u64, Level, TenantId)>,
    under_way: u32,
    /// Tenants that there were.
    lives: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Guaranteed,
    Rest,
}

const LEVELS: [Level; 2] = [Level::Guaranteed, Level::Rest];

impl TenantArbiter {
    /// An arbiter of engines that nobody uses yet.
    pub fn new(settings: SharingSettings) -> TenantArbiter {
        let slice_ns = settings.slice_ns.max(1);
        TenantArbiter {
            settings: SharingSettings { slice_ns, ..settings },
            tenants: BTreeMap::new(),
            levels: [Drr::new(slice_ns), Drr::new(slice_ns)],
            timers: BTreeSet::new(),
            under_way: 0,
            lives: 0,
        }
    }

    /// How the engines are shared.
    pub fn settings(&self) -> &SharingSettings {
        &self.settings
    }

    /// A tenant comes, or gets another share.
    pub fn set(&mut self, id: TenantId, share: TenantShare, now: u64) {
        let TenantArbiter { tenants, lives, settings, .. } = self;
        let new = || {
            *lives += 1;
            Tenant::new(*lives, share, settings.slice_ns, now)
        };
        let tenant = tenants.entry(id).or_insert_with(new);
        tenant.change(share, now);
        tenant.timers = [None; 2];
        tenant.let_on(now);
        self.timers.retain(|(.., other)| *other != id);
        let guaranteed = share.guarantee.is_some();
        let has_work = tenant.waiting > 0;
        match guaranteed {
            // What is guaranteed bounds the turns; among themselves they are equal.
            true => self.levels[Level::Guaranteed as usize].set(id, 1),
            false => self.levels[Level::Guaranteed as usize].remove(id),
        }
        self.levels[Level::Rest as usize].set(id, share.weight);
        if has_work {
            self.wake(id, now);
        }
    }

    /// A tenant that comes has saved nothing of its guarantee by then, as one that has long asked for all of it. Before
    /// its first message.
    pub fn use_up_guarantee(&mut self, id: TenantId, from: u64) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.use_up_guarantee(from);
        }
    }

    /// A tenant goes. Its waiting messages are returned; what an engine has of it is not waited for.
    pub fn remove(&mut self, id: TenantId) -> Vec<QueuedMessage> {
        for level in &mut self.levels {
            level.remove(id);
        }
        self.timers.retain(|(.., other)| *other != id);
        let queues = self.tenants.remove(&id).map(|tenant| tenant.queues).unwrap_or_default();
        queues.into_values().flatten().collect()
    }

    /// Another tenant comes in the place of one: it owes nothing of what that one spent, and what waited of that
    /// one is returned. What was counted continues.
    pub fn renew(&mut self, id: TenantId, share: TenantShare, now: u64) -> Vec<QueuedMessage> {
        let counted = self.tenants.get_mut(&id).map(|tenant| (tenant.usage, tenant.kept(now)));
        let left = self.remove(id);
        self.set(id, share, now);
        if let (Some(tenant), Some((usage, kept))) = (self.tenants.get_mut(&id), counted) {
            tenant.usage = usage;
            tenant.go_on_counting(kept);
        }
        left
    }

    /// Those of a tenant's waiting messages that `which` says, of a queue each, wait no more. They are returned.
    pub fn take_out(
        &mut self,
        id: TenantId,
        now: u64,
        mut which: impl FnMut(u16, &QueuedMessage) -> bool,
    ) -> Vec<QueuedMessage> {
        let Some(tenant) = self.tenants.get_mut(&id) else { return Vec::new() };
        let mut out = Vec::new();
        for (queue, messages) in &mut tenant.queues {
            messages.retain(|message| {
                let goes = which(*queue, message);
                out.extend(goes.then_some(*message));
                !goes
            });
        }
        tenant.waiting -= out.len();
        tenant.note(now);
        out
    }

    /// The share of a tenant.
    pub fn share(&self, id: TenantId) -> Option<&TenantShare> {
        self.tenants.get(&id).map(Tenant::share)
    }

    /// What a tenant has used so far.
    pub fn usage(&self, id: TenantId) -> Option<Usage> {
        self.tenants.get(&id).map(|tenant| tenant.usage)
    }

    /// How far a tenant got its minimum so far.
    pub fn kept(&mut self, id: TenantId, now: u64) -> Option<MinimumRecord> {
        self.tenants.get_mut(&id).map(|tenant| tenant.kept(now))
    }

    /// Something was done for a tenant in no turn of its, and took so much time of a processor: of its guarantee
    /// where that has something left, else of its part of the rest.
    pub fn charge(&mut self, id: TenantId, engine_ns: u64, now: u64) {
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        let guaranteed = tenant.guaranteed_at(now) <= now;
        let spent = Spent { engine_ns, ..Spent::default() };
        tenant.spend(guaranteed, spent);
        tenant.got(spent, now);
        tenant.usage.engine_ns += engine_ns;
        tenant.usage.guaranteed_ns += if guaranteed { engine_ns } else { 0 };
        let level = if guaranteed { Level::Guaranteed } else { Level::Rest };
        self.levels[level as usize].charge_now(id, engine_ns, now, self.settings.workers);
    }

    /// Whether a tenant owes so much that nothing more is to be done for it outside of turns: more than a turn, which
    /// everybody owes after one. The smallest piece of a message may take longer than a slice.
    pub fn owes(&mut self, id: TenantId, now: u64) -> bool {
        let SharingSettings { slice_ns, workers, .. } = self.settings;
        let Some(tenant) = self.tenants.get_mut(&id) else { return false };
        // As it would be charged.
        let guaranteed = tenant.guaranteed_at(now) <= now;
        let level = if guaranteed { Level::Guaranteed } else { Level::Rest };
        let turn = slice_ns.max(tenant.last_turn_ns);
        self.levels[level as usize].owed(id, tenant.waiting > 0, now, workers) > turn
    }

    /// Engine time that a tenant owes, in nanoseconds.
    pub fn debt_ns(&self, id: TenantId) -> u64 {
        self.levels[Level::Rest as usize].credit(id).min(0).unsigned_abs()
    }

    /// Messages of a tenant that wait.
    pub fn waiting(&self, id: TenantId) -> usize {
        self.tenants.get(&id).map_or(0, |tenant| tenant.waiting)
    }

    /// Whether messages of any tenant wait.
    pub fn has_waiting(&self) -> bool {
        self.tenants.values().any(|tenant| tenant.waiting > 0)
    }

    /// Whether messages of any tenant but this one wait.
    pub fn has_others(&self, id: TenantId) -> bool {
        self.tenants.iter().any(|(other, tenant)| *other != id && tenant.waiting > 0)
    }

    /// Whether a message of any tenant waits for nothing but an engine.
    fn has_ready(&self, now: u64) -> bool {
        self.tenants.values().any(|tenant| {
            tenant.waiting > 0 && tenant.timers[Level::Rest as usize].is_none_or(|at| at <= now)
        })
    }

    /// Whether bounds of its own hold a tenant's messages back.
    pub fn is_held(&self, id: TenantId) -> bool {
        self.tenants.get(&id).is_some_and(|tenant| tenant.timers[Level::Rest as usize].is_some())
    }

    /// Turns that are under way.
    pub fn under_way(&self) -> u32 {
        self.under_way
    }

    /// A message comes. False when there is no such tenant.
    pub fn submit(&mut self, id: TenantId, queue: u16, message: QueuedMessage, now: u64) -> bool {
        let Some(tenant) = self.tenants.get_mut(&id) else { return false };
        enqueue(tenant, queue, message, false, now);
        self.wake(id, now);
        true
    }

    /// What an engine that is free does now.
    pub fn next(&mut self, now: u64) -> NextTurn {
        self.expire(now);
        for level in LEVELS {
            if let Some(id) = self.pick(level, now)
                && let Some(turn) = self.turn(level, id, now)
            {
                self.under_way += 1;
                return NextTurn::Run(turn);
            }
        }
        let limits = self.timers.iter().find(|(_, level, _)| *level == Level::Rest);
        limits.map_or(NextTurn::Idle, |(at, ..)| NextTurn::Wait(*at))
    }

    /// Those who were to be looked at again by now are.
    fn expire(&mut self, now: u64) {
        while let Some((at, level, id)) = self.timers.first().copied().filter(|(at, ..)| *at <= now)
        {
            self.timers.remove(&(at, level, id));
            if let Some(tenant) = self.tenants.get_mut(&id) {
                tenant.timers[level as usize] = None;
                if level == Level::Rest {
                    tenant.let_on(at);
                }
                // In both levels: an open turn of somebody else's may have passed by it in the other one.
                self.wake(id, now);
            }
        }
    }

    /// Less was spent than a tenant was held back for: it continues when what was really spent lets it.
    fn look_again(&mut self, id: TenantId, now: u64) {
        let Some(tenant) = self.tenants.get_mut(&id).filter(|it| it.timers != [None; 2]) else {
            return;
        };
        let free_at = tenant.free_at(now);
        let ready_at = [free_at.max(tenant.guaranteed_at(now)), free_at];
        for (level, ready_at) in LEVELS.into_iter().zip(ready_at) {
            let Some(at) = tenant.timers[level as usize].filter(|at| ready_at < *at) else {
                continue;
            };
            self.timers.remove(&(at, level, id));
            // What it waits for then are its limits, if anything: others' messages do not hold it back.
            tenant.hold(free_at, now);
            let later = (ready_at > now).then_some(ready_at);
            tenant.timers[level as usize] = later;
            self.timers.extend(later.map(|at| (at, level, id)));
            if level == Level::Rest && later.is_none() {
                tenant.let_on(now);
            }
        }
        self.wake(id, now);
    }

    /// Time of an engine that is free, for messages of a tenant that come while it lasts; nothing where a message waits
    /// for an engine, or bounds of its own hold the tenant back: then its messages are to be
    /// [submitted](Self::submit). Others' that their own bounds hold back wait for none.
    pub fn open(&mut self, id: TenantId, now: u64) -> Option<OpenTurn> {
        self.expire(now);
        if self.has_ready(now) {
            return None;
        }
        self.wake(id, now);
        let tenant = self.tenants.get_mut(&id).filter(|tenant| tenant.timers == [None; 2])?;
        if tenant.free_at(now) > now {
            return None;
        }
        let guaranteed = tenant.guaranteed_at(now) <= now;
        let level = if guaranteed { Level::Guaranteed } else { Level::Rest };
        // As any turn, it is paid for by rounds.
        self.levels[level as usize].pick(now, |key| key == id)?;
        tenant.usage.turns += 1;
        self.under_way += 1;
        let SharingSettings { slice_ns, least_ns, .. } = self.settings;
        Some(OpenTurn {
            tenant: id,
            budget_ns: slice_ns,
            least_ns,
            life: tenant.life,
            guaranteed,
            allowed: tenant.allowed(guaranteed, now),
            spent: Spent::default(),
            ended: 0,
        })
    }

    /// An open turn has ended. False when its tenant has gone: then nobody is charged.
    pub fn close(&mut self, turn: &OpenTurn, now: u64) -> bool {
        self.under_way = self.under_way.saturating_sub(1);
        let tenant = self.tenants.get_mut(&turn.tenant);
        let Some(tenant) = tenant.filter(|tenant| tenant.life == turn.life) else { return false };
        let spent = turn.spent;
        tenant.spend(turn.guaranteed, spent);
        tenant.got(spent, now);
        let usage = &mut tenant.usage;
        usage.operations += turn.ended;
        usage.batched += spent.operations.saturating_sub(1);
        count_spent(usage, spent, turn.guaranteed);
        let level = if turn.guaranteed { Level::Guaranteed } else { Level::Rest };
        self.levels[level as usize].charge(turn.tenant, spent.engine_ns);
        true
    }

    /// A turn has ended. Of its messages, those that are not over wait again, before all others of
    /// their queue. False when its tenant has gone: then they do not, and nobody is charged.
    pub fn complete(&mut self, turn: &EngineTurn, done: TurnResult, now: u64) -> bool {
        self.under_way = self.under_way.saturating_sub(1);
        let tenant = self.tenants.get_mut(&turn.tenant);
        let Some(tenant) = tenant.filter(|tenant| tenant.life == turn.life) else { return false };
        let overhead = self.settings.least_ns.saturating_mul(turn.pieces.len() as u64);
        let actual = Spent {
            engine_ns: done.engine_ns.max(overhead),
            // What the time did not last for is not begun, and counts when it is.
            operations: turn.pieces.iter().filter(|piece| piece.begins()).count() as u64,
            ingress: turn.pieces.iter().map(|piece| piece.length).sum(),
            egress: done.egress,
        };
        tenant.settle(turn.guaranteed, turn.estimated, actual);
        tenant.got(actual, now);
        tenant.last_turn_ns = actual.engine_ns;
        tenant.turns.settle(turn.queue, turn.estimated.engine_ns, actual.engine_ns);
        let usage = &mut tenant.usage;
        usage.operations += turn.pieces.iter().filter(|piece| piece.over).count() as u64;
        count_spent(usage, actual, turn.guaranteed);
        for MessagePiece { message, length, .. } in
            turn.pieces.iter().rev().filter(|piece| !piece.over)
        {
            tenant.usage.split += u64::from(message.done == 0 && *length > 0);
            // Something is done with each turn, or a message whose engine does nothing never ends.
            let done = message.done + length;
            enqueue(tenant, turn.queue, QueuedMessage { done, ..*message }, true, now);
        }
        let level = if turn.guaranteed { Level::Guaranteed } else { Level::Rest };
        let (estimated, actual) = (turn.estimated.engine_ns, actual.engine_ns);
        self.levels[level as usize].settle(turn.tenant, estimated, actual);
        if tenant.waiting > 0 {
            self.wake(turn.tenant, now);
        }
        self.look_again(turn.tenant, now);
        true
    }

    /// A tenant has work: it is looked at, unless it is known when it may continue.
    fn wake(&mut self, id: TenantId, now: u64) {
        let Some(tenant) = self.tenants.get(&id) else { return };
        for level in LEVELS {
            if tenant.timers[level as usize].is_none() {
                self.levels[level as usize].wake(id, now, self.settings.workers);
            }
        }
    }

    fn pick(&mut self, level: Level, now: u64) -> Option<TenantId> {
        let TenantArbiter { tenants, timers, levels, .. } = self;
        levels[level as usize].pick(now, |id| {
            let Some(tenant) = tenants.get_mut(&id) else { return false };
            if tenant.waiting == 0 || tenant.timers[level as usize].is_some() {
                return false;
            }
            let mut at = tenant.free_at(now);
            let limited = at > now;
            if limited {
                tenant.hold(at, now);
            }
            if level == Level::Guaranteed {
                at = at.max(tenant.guaranteed_at(now));
            }
            if at <= now {
                return true;
            }
            if limited && level == Level::Rest {
                tenant.throttle(now);
            }
            tenant.timers[level as usize] = Some(at);
            timers.insert((at, level, id));
            false
        })
    }

    /// The turn of a tenant that has work.
    fn turn(&mut self, level: Level, id: TenantId, now: u64) -> Option<EngineTurn> {
        let SharingSettings { slice_ns, batch, least_ns, .. } = self.settings;
        let tenant = self.tenants.get_mut(&id)?;
        let queues = &tenant.queues;
        let has_work = |queue| queues.get(&queue).is_some_and(|queue| !queue.is_empty());
        let queue = tenant.turns.pick(now, has_work)?;
        let guaranteed = level == Level::Guaranteed;
        let mut turn = EngineTurn {
            tenant: id,
            queue,
            pieces: Vec::new(),
            budget_ns: slice_ns,
            life: tenant.life,
            guaranteed,
            estimated: Spent::default(),
        };
        while turn.pieces.len() < batch.max(1) {
            let Some(message) = tenant.queues.get(&queue).and_then(|queue| queue.front()).copied()
            else {
                break;
            };
            let left_ns = slice_ns.saturating_sub(turn.estimated.engine_ns);
            let (piece, spent) = cut(message, slice_ns, least_ns);
            // Neither does a later message make a turn too long, nor is a limit passed by more than one.
            let first = turn.pieces.is_empty();
            if !first && (spent.engine_ns > left_ns || tenant.free_at(now) > now) {
                break;
            }
            if let Some(queue) = tenant.queues.get_mut(&queue) {
                queue.pop_front();
            }
            tenant.waiting -= 1;
            tenant.spend(guaranteed, spent);
            turn.estimated.engine_ns += spent.engine_ns;
            turn.estimated.operations += spent.operations;
            turn.estimated.ingress += spent.ingress;
            turn.estimated.egress += spent.egress;
            tenant.usage.batched += u64::from(!first);
            turn.pieces.push(piece);
            if !piece.over || guaranteed && tenant.guaranteed_at(now) > now {
                break;
            }
        }
        tenant.note(now);
        tenant.usage.turns += 1;
        tenant.turns.charge(queue, turn.estimated.engine_ns);
        tenant.last_turn_ns = turn.estimated.engine_ns;
        self.levels[level as usize].charge(id, turn.estimated.engine_ns);
        Some(turn)
    }
}

fn count_spent(usage: &mut Usage, spent: Spent, guaranteed: bool) {
    usage.ingress += spent.ingress;
    usage.egress += spent.egress;
    usage.engine_ns += spent.engine_ns;
    usage.guaranteed_ns += if guaranteed { spent.engine_ns } else { 0 };
}

fn enqueue(tenant: &mut Tenant, queue: u16, message: QueuedMessage, first: bool, now: u64) {
    let messages = tenant.queues.entry(queue).or_insert_with(|| {
        tenant.turns.set(queue, 1);
        Default::default()
    });
    if first {
        messages.push_front(message)
    } else {
        messages.push_back(message)
    }
    tenant.waiting += 1;
    tenant.note(now);
    tenant.turns.wake(queue, now, 1);
}

/// The piece of `message` that is done next, and what it is estimated to spend: about a slice, in whole
/// granules.
fn cut(message: QueuedMessage, slice_ns: u64, least_ns: u64) -> (MessagePiece, Spent) {
    let left = message.ingress.saturating_sub(message.done);
    let part = |whole: u64, length: u64| match message.ingress {
        0 => whole,
        ingress => (u128::from(whole) * u128::from(length) / u128::from(ingress)) as u64,
    };
    let mut length = left;
    if message.granule > 0 && part(message.cost_ns, left) > slice_ns {
        let fits = u128::from(message.ingress) * u128::from(slice_ns) / u128::from(message.cost_ns);
        let fits = u64::try_from(fits).unwrap_or(u64::MAX);
        length = (fits - fits % message.granule).clamp(message.granule.min(left), left);
    }
    let spent = Spent {
        engine_ns: part(message.cost_ns, length).max(least_ns),
        operations: u64::from(message.done == 0),
        ingress: length,
        egress: part(message.egress, length),
    };
    (MessagePiece { message, length, over: length == left }, spent)
}

#[cfg(test)]
mod tests;
