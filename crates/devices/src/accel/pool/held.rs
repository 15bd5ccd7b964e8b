//! Turns that a function's own thread holds: it is the engine for short operations that it has just taken from a ring.

use rackbus_qos::{OpenTurn, TenantId, TurnResult};
use rackbus_spec::accel::OperationStatus;

use super::super::clock::TickRate;
use super::PoolEngines;

/// Operations that cost less than this part of a slice are not worth passing to another thread, which takes some
/// microseconds there and back while both poll, and much more where one has to be woken. What comes behind them waits
/// for a turn at most anyway.
const SHORT: f64 = 0.1;

/// An engine's time that a function's thread has for its own operations of one kind.
#[derive(Debug)]
pub struct HeldTurn {
    turn: OpenTurn,
    kind: u8,
    /// What the profile's cost of such operations is multiplied by.
    factor: f64,
    /// What the operations cost by their profiles.
    profile_ns: f64,
    failed: u64,
    /// What they took, in nanoseconds.
    engine_ns: u64,
    /// What is short, in nanoseconds.
    short_ns: f64,
    /// How fast the processor's counter counts.
    pub rate: TickRate,
    /// The processor's counter when it was taken.
    pub begun: u64,
    /// It lasts so many ticks of that counter.
    pub budget_ticks: u64,
}

impl HeldTurn {
    /// Whether an operation of this kind, which costs so much by its profile, is to be done in it.
    pub fn takes(&self, kind: u8, profile_ns: f64) -> bool {
        self.kind == kind && profile_ns * self.factor <= self.short_ns && self.turn.goes_on()
    }

    /// Something of an operation was done: by its profile `profile_ns` of work on `ingress` bytes. It has ended with
    /// `status`, if it has.
    pub fn did(
        &mut self,
        profile_ns: f64,
        ingress: u64,
        done: TurnResult,
        status: Option<OperationStatus>,
    ) {
        self.profile_ns += profile_ns;
        self.engine_ns += done.engine_ns;
        self.failed += u64::from(status == Some(OperationStatus::EngineFailed));
        self.turn.did(ingress, done, status.is_some());
    }

    /// Engine time that it took so far, in nanoseconds.
    pub fn engine_ns(&self) -> u64 {
        self.engine_ns
    }
}

impl PoolEngines {
    /// Makes the calling thread an engine for operations of this kind, of which the first costs `profile_ns` by its
    /// profile: where one is free, nobody's operations wait, and it is short. It begins at `begun` by the processor's
    /// counter.
    pub fn hold(
        &self,
        tenant: TenantId,
        kind: u8,
        profile_ns: f64,
        begun: u64,
    ) -> Option<HeldTurn> {
        let mut shared = self.lock();
        if shared.busy >= self.options.workers {
            return None;
        }
        let factor = shared.factor(tenant, kind);
        let short_ns = self.options.slice_ns as f64 * SHORT;
        if profile_ns * factor > short_ns {
            return None;
        }
        let turn = shared.sharing.open(tenant, self.now_ns())?;
        shared.busy += 1;
        let rate = self.rate();
        let budget_ticks = rate.ticks(turn.budget_ns);
        let (profile_ns, failed, engine_ns) = (0.0, 0, 0);
        Some(HeldTurn {
            turn,
            kind,
            factor,
            profile_ns,
            failed,
            engine_ns,
            short_ns,
            rate,
            begun,
            budget_ticks,
        })
    }

    /// Gives the engine back, after so much engine time.
    pub fn release(&self, mut held: HeldTurn, engine_ns: u64) {
        if engine_ns < held.engine_ns {
            held.turn.correct(engine_ns);
        }
        let mut shared = self.lock();
        shared.busy -= 1;
        shared.failed += held.failed;
        if shared.sharing.close(&held.turn, self.now_ns()) {
            let key = (held.turn.tenant, held.kind);
            let estimate = &mut shared.estimates.entry(key).or_default().cost;
            // Not what is charged: that is more where an operation took less than the least.
            estimate.observe(held.profile_ns, engine_ns);
        }
        // Who is the engine in the place of another calls that when anything is left.
        if shared.sharing.has_waiting() {
            self.call(&shared, shared.jobs.len());
        }
    }
}
