//! What is said of a flow of which the measured time is too short to tell, or tells nothing.

use super::FlowSpec;
use super::scripts::Run;
use crate::engine::Arrivals;

impl Run {
    /// What of a trace was not played.
    pub(super) fn unplayed(&self, spec: &FlowSpec) -> Option<String> {
        let length = spec.trace.as_ref().filter(|_| spec.arrivals == Arrivals::Traced)?.length();
        let played = self.workload().duration.min(spec.end).since(spec.begin);
        (played < length).then(|| {
            format!(
                "the trace lasts {length}, of which {played} were played; make `duration` longer"
            )
        })
    }
}

/// What is said of a flow all of whose jobs were over when measuring began.
pub(super) fn over(ended: bool, jobs: u64) -> Option<String> {
    let before = ended && jobs == 0;
    before.then(|| {
        "all its jobs ended before it was measured; make `warmup` shorter, or `count` larger"
            .to_owned()
    })
}

/// From this share on a rate is not known well enough.
const WIDE: f64 = 0.05;

/// From so many jobs on, those that came at random tell how long one takes.
const FEW: u64 = 20;

/// From so many jobs on there is one that is slower than 99 % of them.
const HUNDRED: u64 = 100;

/// What the measured time is too short to tell of a flow, of which `rate` jobs per second got through where
/// as many as `asked` came; `random` says whether they came at random times, and `vary` whether some took longer than others.
pub(super) fn doubt(
    (jobs, random, vary): (u64, bool, bool),
    confidence: Option<f64>,
    (rate, asked): (f64, Option<f64>),
) -> Option<String> {
    let longer = "make `duration` longer";
    let behind = asked.filter(|asked| rate < 0.97 * asked);
    // What gets what it asks for is known, however few its jobs.
    let met = |width| asked.is_some_and(|asked| (rate / asked - 1.0_f64).abs() < width / 2.0);
    match confidence {
        // Steps that move nothing are known by their jobs.
        None if jobs > 0 => None,
        None if rate == 0.0 => Some(format!("nothing moved in the measured time; {longer}")),
        Some(width) if width > WIDE && !met(width) => {
            Some(format!("the rate is known to {:.0} % only; {longer}", width * 100.0))
        }
        _ if jobs == 0 => Some(format!("no job ended, so latencies are not known; {longer}")),
        _ if random && jobs < FEW => {
            Some(format!("only {jobs} jobs ended, which came at random; {longer}"))
        }
        _ if behind.is_some() => {
            Some("more is asked for than gets through: latencies grow with `duration`".to_owned())
        }
        _ if vary && jobs < HUNDRED => {
            Some(format!("only {jobs} jobs ended, so p99 is the slowest of them; {longer}"))
        }
        _ => None,
    }
}
