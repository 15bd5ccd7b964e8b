//! What a node says of a function's engine, wherever the function's front runs.

use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_control::api::DeviceReport;
use rackbus_pci::EngineHandle;

/// What `engine` counts, beside what is known otherwise. Nothing is waited for.
pub(crate) fn of_engine(engine: &EngineHandle, known: DeviceReport) -> DeviceReport {
    let (dma_refused, last_refused) = engine.refusals().get();
    let by_cause = engine.refusals().by_cause();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = engine.counters();
    DeviceReport {
        trouble: known.trouble.or_else(|| engine.health().trouble()),
        dma_refused,
        dma_refused_by_cause: by_cause.map(|(cause, count)| (cause.to_owned(), count)).collect(),
        last_refused: last_refused.map(|fault| fault.to_string()),
        busy_polls: count(&counters.busy_polls),
        parks: count(&counters.parks),
        jobs: count(&counters.jobs),
        moves: count(&counters.moves),
        ..known
    }
}
