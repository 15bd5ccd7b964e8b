//! What a tenant may have, as the arbiter needs it, and where the tenant stands.

use std::collections::{BTreeMap, VecDeque};

use crate::bucket::Bucket;
use crate::drr::Drr;
use crate::kept::{Keeping, MinimumRecord, Promise};
use crate::level::{BURSTS, RateUnit, ServiceLevel};
use crate::turn::{QueuedMessage, Usage};

/// For so long a tenant's unused minimum or maximum is kept, in nanoseconds: longer than an engine that
/// is busy with others' turns, or was not scheduled, lets it wait.
const KEPT_NS: u64 = 20_000_000;

/// A rate that is not exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Units that may pass each second, on average.
    pub rate: u64,
    /// Units that may come at once.
    pub burst: u64,
}

impl RateLimit {
    /// A rate with room for `burst`, and for what comes while nobody looks.
    pub fn new(rate: u64, burst: u64) -> RateLimit {
        RateLimit { rate, burst: burst.max(part(rate, KEPT_NS)) }
    }

    fn bucket(self, now: u64) -> Bucket {
        Bucket::full(self.rate, self.burst, now)
    }
}

/// What a tenant gets before all that have no minimum: so much of the unit that it bought, for as much
/// engine time as this takes with the messages that it was bought for. What is dearer gets the time,
/// what is cheaper the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guarantee {
    /// Nanoseconds of engine time.
    pub engine: RateLimit,
    /// The same in bytes or operations, as [`Guarantee::unit`] says.
    pub units: RateLimit,
    /// Which of the two.
    pub unit: RateUnit,
    /// Units of one message of the kind that it was bought for.
    pub one: u64,
}

/// What a tenant may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantShare {
    /// Its minimum, if it has one.
    pub guarantee: Option<Guarantee>,
    /// Its weight in what is left.
    pub weight: u32,
    /// Operations each second at most.
    pub operations: Option<RateLimit>,
    /// Bytes into engines each second at most.
    pub ingress: Option<RateLimit>,
    /// Bytes out of engines each second at most.
    pub egress: Option<RateLimit>,
}

impl Default for TenantShare {
    /// A part of what others leave, without bounds.
    fn default() -> TenantShare {
        TenantShare { guarantee: None, weight: 1, operations: None, ingress: None, egress: None }
    }
}

impl TenantShare {
    /// What `level` is, where one operation of the kind that it is meant for costs `cost_ns`.
    pub fn of(level: &ServiceLevel, cost_ns: f64) -> TenantShare {
        let one = match level.min.unit {
            RateUnit::Bytes => level.message.max(1),
            RateUnit::Operations => 1,
        };
        let limit = |rate: u64| RateLimit::new(rate, level.burst.max(one));
        let engine = |operations: f64| (operations * cost_ns).ceil() as u64;
        let engine_ns = engine(level.operations());
        // No longer than others can be kept waiting for it, whatever the burst is.
        let most_ns = engine(1.0).max(engine_ns / BURSTS);
        let burst_ns = engine(level.burst.max(one) as f64 / one as f64).min(most_ns);
        let guarantee = (level.min.per_second > 0).then(|| Guarantee {
            engine: RateLimit::new(engine_ns, burst_ns),
            units: limit(level.min.per_second),
            unit: level.min.unit,
            one,
        });
        let bytes =
            |rate: u64| RateLimit::new(rate, level.largest.min(level.burst.max(level.message)));
        let max = |unit: RateUnit| level.max.filter(|_| level.min.unit == unit);
        let ingress = [max(RateUnit::Bytes), level.ingress].into_iter().flatten().min();
        TenantShare {
            guarantee,
            weight: level.weight,
            operations: max(RateUnit::Operations).map(limit),
            ingress: ingress.map(bytes),
            egress: level.egress.map(bytes),
        }
    }
}

/// What came at `rate` each second within `ns`.
fn part(rate: u64, ns: u64) -> u64 {
    u64::try_from(u128::from(rate) * u128::from(ns) / u128::from(crate::SECOND)).unwrap_or(u64::MAX)
}

/// A tenant at the arbiter.
#[derive(Debug)]
pub(crate) struct Tenant {
    /// Which of all tenants that there were.
    pub(crate) life: u64,
    share: TenantShare,
    /// Engine time and units of the guarantee.
    guarantee: Option<(Bucket, Bucket, RateUnit)>,
    operations: Option<Bucket>,
    ingress: Option<Bucket>,
    egress: Option<Bucket>,
    /// Its queues take turns.
    pub(crate) turns: Drr<u16>,
    pub(crate) queues: BTreeMap<u16, VecDeque<QueuedMessage>>,
    pub(crate) waiting: usize,
    /// Engine time that its last turn was charged with.
    pub(crate) last_turn_ns: u64,
    /// When it is looked at again: for its limits, and for its guarantee.
    pub(crate) timers: [Option<u64>; 2],
    /// Since when its limits hold it back.
    throttled_since: Option<u64>,
    pub(crate) usage: Usage,
    keeping: Keeping,
}

/// What a tenant spends at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    pub(crate) engine_ns: u64,
    pub(crate) operations: u64,
    pub(crate) ingress: u64,
    pub(crate) egress: u64,
}

impl Tenant {
    pub(crate) fn new(life: u64, share: TenantShare, slice_ns: u64, now: u64) -> Tenant {
        Tenant {
            life,
            share,
            guarantee: share.guarantee.map(|g| buckets(g, now)),
            operations: share.operations.map(|limit| limit.bucket(now)),
            ingress: share.ingress.map(|limit| limit.bucket(now)),
            egress: share.egress.map(|limit| limit.bucket(now)),
            turns: Drr::new(slice_ns),
            queues: BTreeMap::new(),
            waiting: 0,
            last_turn_ns: 0,
            timers: [None; 2],
            throttled_since: None,
            usage: Usage::default(),
            keeping: Keeping::new(share.guarantee.map(promise), now),
        }
    }

    /// Whether it has work waiting may be otherwise now.
    pub(crate) fn note(&mut self, now: u64) {
        self.keeping.wait(self.waiting > 0, now);
    }

    /// Its own limits hold it back until then.
    pub(crate) fn hold(&mut self, until: u64, now: u64) {
        self.keeping.hold(until, now);
    }

    /// Its own limits hold it back from now on.
    pub(crate) fn throttle(&mut self, now: u64) {
        self.usage.throttled += 1;
        self.throttled_since = Some(now);
    }

    /// They did so until then, which is counted now: how long it takes is not known before.
    pub(crate) fn let_on(&mut self, at: u64) {
        let since = self.throttled_since.take();
        self.usage.throttled_ns += since.map_or(0, |since| at.saturating_sub(since));
    }

    /// So much was done for it.
    pub(crate) fn got(&mut self, done: Spent, now: u64) {
        let units = match self.share.guarantee.map(|guarantee| guarantee.unit) {
            Some(RateUnit::Operations) => done.operations,
            _ => done.ingress,
        };
        self.keeping.got(units, done.engine_ns, now);
    }

    /// How far it got its minimum.
    pub(crate) fn kept(&mut self, now: u64) -> MinimumRecord {
        self.keeping.total(now)
    }

    /// Counts on from what was counted before it.
    pub(crate) fn go_on_counting(&mut self, kept: MinimumRecord) {
        self.keeping.go_on(kept);
    }

    pub(crate) fn share(&self) -> &TenantShare {
        &self.share
    }

    /// Another share from now on. What was spent of the old one stays spent.
    pub(crate) fn change(&mut self, share: TenantShare, now: u64) {
        let change =
            |bucket: &mut Option<Bucket>, limit: Option<RateLimit>| match (&mut *bucket, limit) {
                (Some(bucket), Some(limit)) => bucket.change(limit.rate, limit.burst, now),
                _ => *bucket = limit.map(|limit| limit.bucket(now)),
            };
        change(&mut self.operations, share.operations);
        change(&mut self.ingress, share.ingress);
        change(&mut self.egress, share.egress);
        match (&mut self.guarantee, share.guarantee) {
            (Some((engine, units, unit)), Some(new)) if *unit == new.unit => {
                engine.change(new.engine.rate, new.engine.burst, now);
                units.change(new.units.rate, new.units.burst, now);
            }
            (guarantee, new) => *guarantee = new.map(|new| buckets(new, now)),
        }
        self.share = share;
        self.keeping.promise(share.guarantee.map(promise), now);
    }

    /// When its limits let it continue: now, or later.
    pub(crate) fn free_at(&mut self, now: u64) -> u64 {
        let limits = [&mut self.operations, &mut self.ingress, &mut self.egress];
        limits.into_iter().flatten().map(|bucket| at(bucket, now)).max().unwrap_or(now)
    }

    /// Nothing of its guarantee is saved up by then.
    pub(crate) fn use_up_guarantee(&mut self, from: u64) {
        if let Some((engine, units, _)) = &mut self.guarantee {
            [engine, units].into_iter().for_each(|bucket| bucket.use_up(from));
        }
    }

    /// When its guarantee has something left: now, later, or never.
    pub(crate) fn guaranteed_at(&mut self, now: u64) -> u64 {
        match &mut self.guarantee {
            Some((engine, units, _)) => at(engine, now).max(at(units, now)),
            None => u64::MAX,
        }
    }

    /// What it may spend until its limits, or its guarantee where it is served by that, hold it back.
    pub(crate) fn allowed(&mut self, guaranteed: bool, now: u64) -> Spent {
        let tokens = |bucket: &mut Option<Bucket>| {
            bucket.as_mut().map_or(u64::MAX, |bucket| bucket.tokens(now))
        };
        let mut allowed = Spent {
            engine_ns: u64::MAX,
            operations: tokens(&mut self.operations),
            ingress: tokens(&mut self.ingress),
            egress: tokens(&mut self.egress),
        };
        if let Some((engine, units, unit)) = self.guarantee.as_mut().filter(|_| guaranteed) {
            allowed.engine_ns = engine.tokens(now);
            let bought = match unit {
                RateUnit::Bytes => &mut allowed.ingress,
                RateUnit::Operations => &mut allowed.operations,
            };
            *bought = (*bought).min(units.tokens(now));
        }
        allowed
    }

    /// It spends, of its guarantee too when it is served by that.
    pub(crate) fn spend(&mut self, guaranteed: bool, spent: Spent) {
        self.settle(guaranteed, Spent::default(), spent);
    }

    /// What was `estimated` is `actual`.
    pub(crate) fn settle(&mut self, guaranteed: bool, estimated: Spent, actual: Spent) {
        let settle = |bucket: &mut Option<Bucket>, estimated, actual| {
            if let Some(bucket) = bucket {
                bucket.settle(estimated, actual);
            }
        };
        settle(&mut self.operations, estimated.operations, actual.operations);
        settle(&mut self.ingress, estimated.ingress, actual.ingress);
        settle(&mut self.egress, estimated.egress, actual.egress);
        if let Some((engine, units, unit)) = self.guarantee.as_mut().filter(|_| guaranteed) {
            engine.settle(estimated.engine_ns, actual.engine_ns);
            match unit {
                RateUnit::Bytes => units.settle(estimated.ingress, actual.ingress),
                RateUnit::Operations => units.settle(estimated.operations, actual.operations),
            }
        }
    }
}

fn promise(guarantee: Guarantee) -> Promise {
    let Guarantee { engine, units, one, .. } = guarantee;
    Promise { units: units.rate, engine_ns: engine.rate, one }
}

fn buckets(guarantee: Guarantee, now: u64) -> (Bucket, Bucket, RateUnit) {
    (guarantee.engine.bucket(now), guarantee.units.bucket(now), guarantee.unit)
}

fn at(bucket: &mut Bucket, now: u64) -> u64 {
    if bucket.ready(now) { now } else { bucket.ready_at() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::level::Rate;

    proptest! {
        /// Whatever level there can be: what its tenant may have at once, before all others, is the engine time of one
        /// message, or of a tenth of a second of the rate.
        #[test]
        fn what_comes_at_once_is_bounded_in_engine_time(
            bytes in any::<bool>(),
            per_second in prop_oneof![1u64..100, 1u64..1 << 40],
            burst in prop_oneof![0u64..100, 0u64..1 << 21],
            message in prop_oneof![1u64..64, 1u64..=1 << 20],
            (fixed_ns, byte_ns) in (20.0..5000.0, 0.1..10.0),
        ) {
            let unit = if bytes { RateUnit::Bytes } else { RateUnit::Operations };
            let min = Rate { per_second, unit };
            let level = ServiceLevel { burst, message, ..ServiceLevel::new("any", min) };
            let cost_ns = fixed_ns + byte_ns * message as f64;
            let Guarantee { engine, units, .. } = TenantShare::of(&level, cost_ns).guarantee.unwrap();
            let most = cost_ns.max(level.operations() * cost_ns / 10.0);
            prop_assert!(engine.burst as f64 <= most + 2.0, "{:?} of {}", engine, cost_ns);
            if level.check().is_ok() {
                let one = if bytes { message } else { 1 };
                prop_assert!(units.burst <= one.max(per_second / 10), "{:?}", units);
            }
        }
    }
}
