//! What a node says of a function's engine, wherever the function's front runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_control::api::{
    DeviceReport, LATENCY_BOUNDS_NS, MediumLinkReport, OperationReport, RdmaLaneReport,
};
use rackbus_lease::Grant;
use rackbus_memory::CarriedSession;
use rackbus_memory::exchange::{LaneStatus, SessionStatus};
use rackbus_pci::operations::OperationCounts;
use rackbus_pci::{EngineHandle, Operations};

/// What `engine` counts, beside what is known otherwise. Nothing is waited for.
pub(crate) fn of_engine(engine: &EngineHandle, known: DeviceReport) -> DeviceReport {
    let (dma_refused, _) = engine.refusals().get();
    let burst = engine.refusals().burst();
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
        first_refused: burst.map(|burst| burst.first.to_string()),
        last_refused: burst.map(|burst| burst.last.to_string()),
        busy_polls: count(&counters.busy_polls),
        idle_polls: count(&counters.idle_polls),
        parks: count(&counters.parks),
        jobs: count(&counters.jobs),
        requests_refused: count(&counters.requests_refused),
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

/// What is known of a front by its link to the medium of `grant`, which is on another machine.
pub(crate) fn of_link(session: &CarriedSession, grant: &Grant) -> DeviceReport {
    let SessionStatus { lost_for, reconnects, repeated, last_lost } = session.status();
    let trouble = lost_for.map(|_| {
        let (lender, hold) = (&grant.function.host, session.timing().hold / 1000);
        format!("the link to {lender} is lost; what is under way is held for up to {hold} s")
    });
    let (lost_ms, resumed, last_lost_ms) = (lost_for, reconnects, last_lost);
    let lane = session.lane().map(|lane| {
        let LaneStatus { provider, up, lost, moved: operations, bytes, fell_back } = lane;
        RdmaLaneReport { provider, up, lost, operations, bytes, fell_back }
    });
    let link = Some(MediumLinkReport { lost_ms, resumed, last_lost_ms, repeated, lane });
    DeviceReport { trouble, link, ..DeviceReport::default() }
}
