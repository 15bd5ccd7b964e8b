//! The threads that are the engines: each asks for its next turn, does it, and tells what it took.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::ticks;
use rackbus_memory::wiping::WipeFreed;
use rackbus_qos::{EngineTurn, NextTurn, TurnResult};
use rackbus_spec::accel::OperationStatus;

use super::super::engines::wipe_stack;
use super::super::job::{EngineJob, Ran};
use super::super::scratch::Scratch;
use super::PoolEngines;
use super::wipe::WipingEngine;

/// An idle engine looks for work so long before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// What an engine does next.
enum NextWork {
    /// A turn, with the operations of it that there still are.
    Turn(EngineTurn, Vec<Option<Arc<EngineJob>>>),
    /// To wipe its memory, which it was asked for so often.
    Wipe(u64),
    /// Nothing was due: the engine looks for its next turn again.
    Nothing,
    /// Nobody uses the pool any more: the engine's thread ends.
    Over,
}

/// An engine: works as long as anybody uses its pool. That cannot be told from how many have the pool, as other engines
/// do.
pub(super) fn work(pool: &PoolEngines, number: u32) {
    let _wiping = WipeFreed::begin();
    let mut scratch = Scratch::default();
    let wiping = WipingEngine::new(pool, number);
    loop {
        match pool.next(number) {
            NextWork::Wipe(wanted) => {
                scratch.wipe();
                wipe_stack();
                wiping.wiped(wanted);
            }
            NextWork::Turn(turn, jobs) => pool.run(turn, &jobs, &mut scratch),
            NextWork::Nothing => {}
            NextWork::Over => return,
        }
    }
}

impl PoolEngines {
    /// The next turn and its operations, if there is one before long.
    fn next(&self, number: u32) -> NextWork {
        let seen = self.submitted.load(Ordering::Acquire);
        let mut shared = self.lock();
        if shared.over {
            return NextWork::Over;
        }
        if shared.wiped.get(&number) != Some(&shared.wipes) {
            return NextWork::Wipe(shared.wipes);
        }
        let next = match shared.busy < self.options.workers {
            true => shared.sharing.next(self.now_ns()),
            // Who is the engine in the place of this one calls when it leaves anything.
            false => NextTurn::Idle,
        };
        let wait = match next {
            NextTurn::Run(turn) => {
                let jobs = shared.jobs_of(&turn);
                shared.busy += 1;
                return NextWork::Turn(turn, jobs);
            }
            NextTurn::Wait(until) => Duration::from_nanos(until.saturating_sub(self.now_ns())),
            NextTurn::Idle => Duration::MAX,
        };
        drop(shared);
        let spun = Instant::now();
        while spun.elapsed() < SPIN.min(wait) {
            if self.submitted.load(Ordering::Acquire) != seen {
                return NextWork::Nothing;
            }
            std::hint::spin_loop();
        }
        let mut shared = self.lock();
        if shared.over || self.submitted.load(Ordering::Acquire) != seen {
            return NextWork::Nothing;
        }
        shared.sleeping += 1;
        // One that nobody calls looks again now and then.
        let limit = wait.saturating_sub(SPIN).min(Duration::from_millis(200));
        let woken = self.work.wait_timeout(shared, limit);
        woken.unwrap_or_else(PoisonError::into_inner).0.sleeping -= 1;
        NextWork::Nothing
    }

    /// Does a turn, and gives the engine back. All that is left of it on the stack is below its caller's part of that.
    #[inline(never)]
    fn run(&self, mut turn: EngineTurn, jobs: &[Option<Arc<EngineJob>>], scratch: &mut Scratch) {
        let rate = self.rate();
        let (begun, budget) = (scratch.clock.begin(rate), rate.ticks(turn.budget_ns));
        let goes_on = || ticks::now().wrapping_sub(begun) < budget;
        let mut ran = Vec::with_capacity(jobs.len());
        for (piece, job) in turn.pieces.iter_mut().zip(jobs) {
            let none = Ran { read: 0, written: 0, over: true, status: None };
            let done = job.as_ref().map_or(none, |job| job.run(piece, scratch, goes_on));
            (piece.length, piece.over) = (done.read as u64, done.over);
            ran.push(done);
        }
        let engine_ns = scratch.clock.end(rate.ns(ticks::now().wrapping_sub(begun)));
        let each = engine_ns / (jobs.len() as u64).max(1);
        let (mut profile_ns, mut room) = (0.0, 0.0);
        let mut finished = Vec::new();
        for (done, job) in ran.iter().zip(jobs) {
            let Some(job) = job else { continue };
            let part = done.read as f64 / (job.input_length as f64).max(1.0);
            let part = if job.input_length == 0 { 1.0 } else { part };
            profile_ns += job.profile_ns * part;
            room += job.output_length as f64 * part;
            if let Some(end) = job.account(each, done.status) {
                finished.push((job, end));
            }
        }
        let egress = ran.iter().map(|done| done.written as u64).sum();
        self.settle(&mut turn, jobs, TurnResult { engine_ns, egress }, (profile_ns, room));
        let failures =
            finished.iter().filter(|(_, end)| end.status == OperationStatus::EngineFailed).count();
        if failures > 0 {
            self.lock().failed += failures as u64;
        }
        // Those of a turn are of one tenant, and go to where it takes them together.
        let same = |(one, _): &(&Arc<EngineJob>, _), (next, _): &(&Arc<EngineJob>, _)| {
            Arc::ptr_eq(&one.outbox, &next.outbox)
        };
        for together in finished.chunk_by(same) {
            together[0].0.outbox.put(together.iter().map(|(_, end)| *end));
        }
    }

    /// Tells what a turn did, by the profiles about `profile_ns` of work, with `room` for its output; the engine is free.
    fn settle(
        &self,
        turn: &mut EngineTurn,
        jobs: &[Option<Arc<EngineJob>>],
        done: TurnResult,
        (profile_ns, room): (f64, f64),
    ) {
        let mut shared = self.lock();
        shared.busy -= 1;
        let held = shared.sharing.is_held(turn.tenant);
        // What was given up meanwhile does not come before the engines again: whoever looked for it there has not seen it.
        for (piece, job) in turn.pieces.iter_mut().zip(jobs) {
            piece.over |= job.as_ref().is_some_and(|job| job.is_given_up());
        }
        // Of a tenant that has gone meanwhile, nothing continues.
        let there = shared.sharing.complete(turn, done, self.now_ns());
        if let Some(Some(job)) = jobs.first()
            && there
        {
            let key = (turn.tenant, job.kind);
            let estimate = shared.estimates.entry(key).or_default();
            estimate.cost.observe(profile_ns, done.engine_ns);
            estimate.output.observe(room, done.egress);
        }
        if held && !shared.sharing.is_held(turn.tenant) {
            // It spent less than was thought: engines may wait for its bounds that have nothing to wait for.
            self.call(&shared, self.options.workers as usize);
        }
        for piece in turn.pieces.iter().filter(|piece| piece.over || !there) {
            shared.jobs.remove(&piece.message.tag);
        }
    }
}
