//! What a node says of a function's engine, wherever the function's front runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_control::api::{DeviceReport, LATENCY_BOUNDS_NS, OperationReport};
use rackbus_pci::operations::OperationCounts;
use rackbus_pci::{EngineHandle, Operations};

/// What `engine` counts, beside what is known otherwise. Nothing is waited for.
pub(crate) fn of_engine(engine: &EngineHandle, known: DeviceReport) -> DeviceReport {
    let (dma_refused, last_refused) = engine.refusals().get();
    let by_cause = engine.refusals().by_cause();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = engine.counters();
    let (peer_bytes_read, peer_bytes_written) = engine.peer_bytes().get();
    DeviceReport {
        peer_bytes_read,
        peer_bytes_written,
        trouble: known.trouble.or_else(|| engine.health().trouble()),
        dma_refused,
        dma_refused_by_cause: by_cause.map(|(cause, count)| (cause.to_owned(), count)).collect(),
        last_refused: last_refused.map(|fault| fault.to_string()),
        busy_polls: count(&counters.busy_polls),
        parks: count(&counters.parks),
        jobs: count(&counters.jobs),
        wakeups: count(&counters.wakeups),
        moves: count(&counters.moves),
        operations: operations(engine.operations()),
        ..known
    }
}

fn operations(operations: &Operations) -> BTreeMap<String, OperationReport> {
    let counts = operations.counts(&LATENCY_BOUNDS_NS).into_iter();
    counts
        .filter(|(_, counts)| counts.done > 0)
        .map(|(kind, counts)| (kind.to_owned(), report(counts)))
        .collect()
}

fn report(counts: OperationCounts) -> OperationReport {
    let OperationCounts { done, failed, bytes, total_ns, mut latency } = counts;
    latency.truncate(latency.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
    OperationReport { done, failed, bytes, total_ns, latency }
}
