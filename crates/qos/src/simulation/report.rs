//! What a simulated tenant got.

use crate::turn::{EngineTurn, TurnResult};

use super::load::SimulatedOperation;

/// Parts of the run in which what was done is added up, in nanoseconds.
const STEP_NS: u64 = 10_000_000;

/// The beginning of a run, in which queues fill and what was saved up is spent, in nanoseconds.
pub const WARM_NS: u64 = 20_000_000;

/// What was done within a part of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReportInterval {
    /// How many operations ended.
    pub operations: u64,
    /// Bytes that went in.
    pub ingress: u64,
    /// Bytes that came out.
    pub egress: u64,
    /// Engine time, in nanoseconds.
    pub engine_ns: u64,
}

/// What one tenant got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantReport {
    /// What was done in each hundredth of a second.
    pub steps: Vec<ReportInterval>,
    /// How long operations took from their arrival on, in nanoseconds, ascending.
    pub latencies: Vec<u64>,
}

impl TenantReport {
    /// The whole run, less its [beginning](WARM_NS).
    pub fn total(&self) -> ReportInterval {
        self.steps.iter().skip((WARM_NS / STEP_NS) as usize).fold(ReportInterval::default(), add)
    }

    /// How long operations took: the `part`th of a hundred, in nanoseconds.
    pub fn percentile(&self, part: f64) -> u64 {
        let at = (self.latencies.len() as f64 * part / 100.0) as usize;
        self.latencies.get(at.min(self.latencies.len().saturating_sub(1))).copied().unwrap_or(0)
    }

    /// The least that was done within any `window_ns` from `from_ns` on, by what `of` says.
    pub fn least(&self, window_ns: u64, from_ns: u64, of: impl Fn(&ReportInterval) -> u64) -> u64 {
        let width = (window_ns / STEP_NS).max(1) as usize;
        let steps: Vec<u64> =
            self.steps.iter().map(of).skip((from_ns / STEP_NS) as usize).collect();
        steps.windows(width).map(|window| window.iter().sum()).min().unwrap_or(0)
    }
}

fn add(total: ReportInterval, step: &ReportInterval) -> ReportInterval {
    ReportInterval {
        operations: total.operations + step.operations,
        ingress: total.ingress + step.ingress,
        egress: total.egress + step.egress,
        engine_ns: total.engine_ns + step.engine_ns,
    }
}

/// Adds up what a tenant got.
#[derive(Debug)]
pub(super) struct Recorder(TenantReport);

impl Recorder {
    pub(super) fn new(length_ns: u64) -> Recorder {
        let steps = vec![ReportInterval::default(); (length_ns / STEP_NS) as usize + 1];
        Recorder(TenantReport { steps, latencies: Vec::new() })
    }

    pub(super) fn turn(&mut self, now: u64, turn: &EngineTurn, done: TurnResult) {
        let step = &mut self.0.steps[(now / STEP_NS) as usize];
        step.ingress += turn.pieces.iter().map(|piece| piece.length).sum::<u64>();
        step.egress += done.egress;
        step.engine_ns += done.engine_ns;
    }

    pub(super) fn ended(&mut self, now: u64, operation: &SimulatedOperation) {
        self.0.steps[(now / STEP_NS) as usize].operations += 1;
        self.0.latencies.push(now - operation.arrived);
    }

    pub(super) fn finish(mut self) -> TenantReport {
        self.0.latencies.sort_unstable();
        // The last step is not whole.
        self.0.steps.pop();
        self.0
    }
}
