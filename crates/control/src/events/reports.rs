//! How many of the events that a node's reports bring about are kept: a node that says something new all the time would push
//! out the events of all others.

use std::collections::BTreeMap;

use super::Draft;

/// So many events of one host are kept at once.
const AT_ONCE: u64 = 200;
/// One more is kept each time that so many milliseconds have passed.
const EVERY_MS: u64 = 60_000;

/// Keeps one host from filling the log.
#[derive(Debug, Default)]
pub struct ReportLimiter {
    hosts: BTreeMap<String, Allowance>,
}

/// What one host may still say.
#[derive(Debug, Default)]
struct Allowance {
    /// Events that were kept and are not made up for yet.
    kept: u64,
    /// Until when time that has passed is counted.
    counted_ms: u64,
    /// How many were left out since the last that was kept.
    left_out: u64,
}

impl ReportLimiter {
    /// Those of `events` that are kept, which a report of `host` brings about at `now`; the first of them says how many were
    /// left out before it. `host` is one of the rack's.
    pub fn kept(&mut self, now: u64, host: &str, mut events: Vec<Draft>) -> Vec<Draft> {
        if events.is_empty() {
            return events;
        }
        let host = self.hosts.entry(host.to_owned()).or_default();
        let passed = now.saturating_sub(host.counted_ms) / EVERY_MS;
        host.kept = host.kept.saturating_sub(passed);
        host.counted_ms = match host.kept {
            0 => now,
            _ => host.counted_ms.saturating_add(passed.saturating_mul(EVERY_MS)),
        };
        let room = usize::try_from(AT_ONCE.saturating_sub(host.kept)).unwrap_or(usize::MAX);
        let too_many = events.len().saturating_sub(room) as u64;
        events.truncate(room);
        host.kept = host.kept.saturating_add(events.len() as u64);
        if let Some(first) = events.first_mut()
            && host.left_out > 0
        {
            let left_out = std::mem::take(&mut host.left_out);
            first.text = format!("{} ({left_out} events of this host were left out)", first.text);
        }
        host.left_out = host.left_out.saturating_add(too_many);
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restarts(count: usize) -> Vec<Draft> {
        vec![Draft::of_restart_in_place("beta", 1000); count]
    }

    #[test]
    fn a_node_that_says_something_new_all_the_time_does_not_fill_the_log() {
        let mut limiter = ReportLimiter::default();
        let mut kept = 0;
        for second in 0..3600 {
            kept += limiter.kept(second * 1000, "beta", restarts(3)).len() as u64;
        }
        assert!((AT_ONCE + 55..=AT_ONCE + 60).contains(&kept), "{kept}");
        // Others are not concerned.
        assert_eq!(limiter.kept(3_600_000, "alpha", restarts(3)).len(), 3);
    }

    #[test]
    fn what_was_left_out_is_said_with_the_next_event() {
        let mut limiter = ReportLimiter::default();
        assert_eq!(limiter.kept(0, "beta", restarts(205)).len() as u64, AT_ONCE);
        assert!(limiter.kept(1, "beta", restarts(2)).is_empty());
        let next = limiter.kept(EVERY_MS, "beta", restarts(1));
        assert!(next[0].text.ends_with("(7 events of this host were left out)"), "{next:?}");
        // A quiet time makes up for all.
        let later = EVERY_MS.saturating_mul(2 * AT_ONCE);
        assert_eq!(limiter.kept(later, "beta", restarts(205)).len() as u64, AT_ONCE);
    }
}
