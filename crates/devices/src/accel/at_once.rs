//! Short operations, which the function's own thread does as it takes them from a ring: to pass one to another thread
//! takes longer than to do it. So nothing of them is kept anywhere, and the shaper is asked once for many.

use rackbus_memory::ticks;
use rackbus_memory::wiping::WipeFreed;
use rackbus_qos::{TenantId, TurnResult};
use rackbus_spec::accel::OperationStatus;

use super::course::{Course, begin};
use super::engines::Spare;
use super::gather::MessageMemory;
use super::job::FinishedJob;
use super::pipeline::Pipeline;
use super::pool::{EnginePool, HeldTurn};
use super::scratch::Scratch;

/// What a function's thread has when it is an engine.
#[derive(Debug, Default)]
pub struct OwnEngine {
    scratch: Scratch,
    held: Option<HeldTurn>,
    /// No engine could be obtained since operations were last submitted.
    refused: bool,
}

/// An operation that may be short.
#[derive(Debug, Clone, Copy)]
pub struct ShortOperation {
    pub number: u64,
    /// The estimate that it counts for: its first operation.
    pub kind: u8,
    /// What it costs by the profiles, in nanoseconds.
    pub profile_ns: f64,
    /// The processor's counter when it was taken up.
    pub begun: u64,
}

/// The outcome of an operation.
pub enum Attempt {
    /// It is not short, or there is no engine for it.
    Refused,
    /// It has ended; the processor's counter before and after.
    Ended(FinishedJob, [u64; 2]),
    /// It took longer than was thought; so far, it took so much engine time in nanoseconds.
    Left(Course, u64),
}

impl OwnEngine {
    /// Does an operation, whose engines `start` begins, where that is to be done here.
    pub fn run<M: MessageMemory>(
        &mut self,
        (pool, tenant): (&EnginePool, TenantId),
        short: ShortOperation,
        memory: &(M, M),
        start: impl FnOnce(&mut Spare) -> Result<Pipeline, OperationStatus>,
    ) -> Attempt {
        let begun = short.begun;
        if !self.hold((pool, tenant), &short) {
            return Attempt::Refused;
        }
        let Some(held) = &mut self.held else { return Attempt::Refused };
        let ShortOperation { number, profile_ns, .. } = short;
        let _wiping = WipeFreed::begin();
        let Scratch { out, spare, .. } = &mut self.scratch;
        let (since, budget) = (held.begun, held.budget_ticks);
        let mut goes_on = || ticks::now().wrapping_sub(since) < budget;
        let (mut course, mut status) = match begin(|| start(spare), 0) {
            Ok(course) => (Some(course), None),
            Err(status) => (None, Some(status)),
        };
        let (mut read, mut written) = (0, 0);
        if let Some(course) = &mut course {
            status = course.go(memory, memory.0.len(), out, &mut goes_on);
            (read, written) = (course.read, course.written);
        }
        let ended = ticks::now();
        let engine_ns = held.rate.ns(ended.wrapping_sub(begun));
        let part = if memory.0.len() == 0 { 1.0 } else { read as f64 / memory.0.len() as f64 };
        let done = TurnResult { engine_ns, egress: written as u64 };
        held.did(profile_ns * part, read as u64, done, status);
        let Some(status) = status else {
            return course.map_or(Attempt::Refused, |course| Attempt::Left(course, engine_ns));
        };
        let good = status == OperationStatus::Success;
        if let Some(course) = course.filter(|_| good) {
            course.leave(spare);
        }
        let written = if good { written } else { 0 };
        Attempt::Ended(FinishedJob { number, status, written, value: engine_ns }, [begun, ended])
    }

    /// Has an engine's time for the operation, if an engine is free.
    pub fn hold(
        &mut self,
        (pool, tenant): (&EnginePool, TenantId),
        short: &ShortOperation,
    ) -> bool {
        let ShortOperation { kind, profile_ns, begun: now, .. } = *short;
        if let Some(held) = &self.held {
            let over = now.wrapping_sub(held.begun) >= held.budget_ticks;
            if held.takes(kind, profile_ns) && !over {
                return true;
            }
            self.release(pool);
        }
        if !self.refused {
            self.held = pool.hold(tenant, kind, profile_ns, now);
            if let Some(held) = &self.held {
                self.scratch.clock.begin(held.rate);
            }
            self.refused = self.held.is_none();
        }
        self.held.is_some()
    }

    /// Nothing of what was done stays.
    pub fn scrub(&mut self) {
        self.scratch.wipe();
    }

    /// Gives the engine's time back; more may be obtained from now on.
    pub fn release(&mut self, pool: &EnginePool) {
        self.refused = false;
        if let Some(held) = self.held.take() {
            let engine_ns = self.scratch.clock.end(held.engine_ns());
            pool.release(held, engine_ns);
        }
    }
}
