//! The scenarios of connections between hosts that are machines, many at once. By themselves: others have times to keep,
//! which they cannot beside these.

mod support;

use support::between_machines;

/// Where much else runs, threads stop between any two steps: what only seldom comes in another order does here.
#[test]
fn connections_come_and_go_on_a_busy_machine() {
    std::thread::scope(|scope| {
        for scenario in ["segments", "segment_events", "segments", "segment_events"] {
            scope.spawn(move || (0..12).for_each(|_| between_machines(scenario)));
        }
    });
}
