//! How many of the events that a node's reports bring about are kept: a node that says something new all the time would push
//! out the events of all others.

use std::collections::BTreeMap;

use super::Draft;
use crate::api::EventKind;

/// So many events of one host are kept at once, of leases and of all else.
const AT_ONCE: u64 = 200;
/// And of its NTBs: whoever is at the other end of a cable brings these about.
const OF_NTBS: u64 = 12;
/// After so many milliseconds one more is kept: of what leases used, which is said once for each, of all else, and of NTBs.
const EVERY_MS: [u64; 3] = [1000, 60_000, 3_600_000];

/// Keeps one host from filling the log.
#[derive(Debug, Clone, Default)]
pub struct ReportLimiter {
    hosts: BTreeMap<String, [Allowance; 3]>,
}

/// What one host may still say.
#[derive(Debug, Clone, Default)]
struct Allowance {
    /// Events that were kept and are not made up for yet.
    kept: u64,
    /// Until when time that has passed is counted.
    counted_ms: u64,
    /// How many were left out since the last time that this was said.
    left_out: u64,
}

impl Allowance {
    /// Takes as many of `events` as there is room for: `most` at once, and one each `every_ms`.
    fn take(
        &mut self,
        now: u64,
        (most, every_ms): (u64, u64),
        mut events: Vec<Draft>,
    ) -> Vec<Draft> {
        let passed = now.saturating_sub(self.counted_ms) / every_ms;
        self.kept = self.kept.saturating_sub(passed);
        self.counted_ms = match self.kept {
            0 => now,
            _ => self.counted_ms.saturating_add(passed.saturating_mul(every_ms)),
        };
        let room = usize::try_from(most.saturating_sub(self.kept)).unwrap_or(usize::MAX);
        let too_many = events.len().saturating_sub(room) as u64;
        events.truncate(room);
        self.kept = self.kept.saturating_add(events.len() as u64);
        self.left_out = self.left_out.saturating_add(too_many);
        events
    }
}

impl ReportLimiter {
    /// Those of `events` that are kept, which a report of `host` brings about at `now`. With the next ones that are kept it is
    /// said how many were not. `host` is one of the rack's.
    pub fn kept(&mut self, now: u64, host: &str, events: Vec<Draft>) -> Vec<Draft> {
        if events.is_empty() {
            return events;
        }
        let allowances = self.hosts.entry(host.to_owned()).or_default();
        let (of_leases, others): (Vec<_>, Vec<_>) =
            events.into_iter().partition(Draft::is_of_lease);
        let (of_ntbs, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|draft| draft.is_of_ntb);
        let bounds = [AT_ONCE, AT_ONCE, OF_NTBS].into_iter().zip(EVERY_MS);
        let mut kept = Vec::new();
        for ((allowance, bound), events) in
            allowances.iter_mut().zip(bounds).zip([of_leases, others, of_ntbs])
        {
            let before = allowance.left_out;
            let events = allowance.take(now, bound, events);
            if before > 0 && !events.is_empty() {
                allowance.left_out -= before;
                let text = format!(
                    "{before} events that the node of {host} brought about were left out: too many at once"
                );
                kept.push(Draft::of_host(EventKind::Refusal, Some(host), text));
            }
            kept.extend(events);
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::NodeReport;

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
        // One a minute, and beside each that others were left out.
        assert!((AT_ONCE + 110..=AT_ONCE + 120).contains(&kept), "{kept}");
        // Others are not concerned.
        assert_eq!(limiter.kept(3_600_000, "alpha", restarts(3)).len(), 3);
    }

    /// It is said once, and nobody keeps it beside.
    #[test]
    fn what_leases_used_is_kept_while_other_events_are_left_out() {
        let mut limiter = ReportLimiter::default();
        limiter.kept(0, "beta", restarts(500));
        let used = Draft { lease: Some(7), ..restarts(1).remove(0) };
        assert!(used.is_of_lease());
        let kept = limiter.kept(0, "beta", vec![used.clone(), restarts(1).remove(0)]);
        assert_eq!(kept, [used]);
    }

    /// It may store another header each second.
    #[test]
    fn events_of_an_ntb_push_out_no_other_events() {
        let (mut limiter, mut told) = (ReportLimiter::default(), BTreeMap::new());
        let (mut kept, hours) = (0, 24);
        for second in 0..hours * 3600 {
            let why = format!("its node speaks version {}", second % 250);
            let report =
                NodeReport { unused_ntbs: [("alpha".into(), why)].into(), ..NodeReport::default() };
            let drafts = Draft::of_ntbs("beta", &mut told, &report);
            assert_eq!(drafts.len(), 1);
            kept += limiter.kept(second * 1000, "beta", drafts).len() as u64;
        }
        // One an hour, and beside each that others were left out.
        assert!((OF_NTBS + 40..=OF_NTBS + 2 * hours).contains(&kept), "{kept}");
        assert_eq!(limiter.kept(hours * 3_600_000, "beta", restarts(3)).len(), 3);
    }

    #[test]
    fn what_was_left_out_is_said_with_the_next_event() {
        let mut limiter = ReportLimiter::default();
        assert_eq!(limiter.kept(0, "beta", restarts(205)).len() as u64, AT_ONCE);
        assert!(limiter.kept(1, "beta", restarts(2)).is_empty());
        let next = limiter.kept(EVERY_MS[1], "beta", restarts(1));
        assert!(next[0].text.starts_with("7 events that the node of beta"), "{next:?}");
        assert_eq!(next[1..], restarts(1));
        // A quiet time makes up for all.
        let later = EVERY_MS[1].saturating_mul(2 * AT_ONCE);
        assert_eq!(limiter.kept(later, "beta", restarts(205)).len() as u64, AT_ONCE);
    }
}
