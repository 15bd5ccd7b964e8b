//! What a lease used, and how far it got what it was promised: the difference of two reports of its function.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::{DeviceReport, OperationReport};

/// What a lease used of a function that has a shaper.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct LeaseReport {
    /// Number of the lease.
    pub lease: u64,
    /// The service level that it has, or had at its end.
    pub level: Option<String>,
    /// What was done for it, by kind of operation; kinds of which there was none are left out.
    pub operations: BTreeMap<String, OperationReport>,
    /// What the shaper did for it, by name: `engine_ns`, `ingress_bytes`, and of its minimum `promised` and
    /// `delivered` (in the unit that it is in), compared in so many seconds (`windows`), and seconds in which it got
    /// less (`violations`).
    pub shaping: BTreeMap<String, u64>,
}

impl LeaseReport {
    /// What a lease used between two reports of its function; nothing where that has no shaper.
    pub fn between(lease: u64, begun: &DeviceReport, now: &DeviceReport) -> Option<LeaseReport> {
        if now.shaping.is_empty() {
            return None;
        }
        let operations = now.operations.iter().map(|(kind, counts)| {
            let earlier = begun.operations.get(kind).cloned().unwrap_or_default();
            (kind.clone(), counts.since(&earlier))
        });
        let shaping = now.shaping.iter().map(|(name, count)| {
            let earlier = begun.shaping.get(name).copied().unwrap_or_default();
            (name.clone(), count.saturating_sub(earlier))
        });
        Some(LeaseReport {
            lease,
            level: now.level.clone(),
            operations: operations.filter(|(_, counts)| counts.done > 0).collect(),
            shaping: shaping.collect(),
        })
    }

    /// The same with what the lease used before, of a function that was begun anew meanwhile and counts from there.
    #[must_use]
    pub fn after(mut self, before: &LeaseReport) -> LeaseReport {
        for (kind, counts) in &before.operations {
            let later = self.operations.entry(kind.clone()).or_default();
            *later = all([counts, &*later].into_iter());
        }
        for (name, count) in &before.shaping {
            let later = self.shaping.entry(name.clone()).or_default();
            *later = later.saturating_add(*count);
        }
        self
    }

    /// What the shaper counted under this name.
    pub fn shaped(&self, name: &str) -> u64 {
        self.shaping.get(name).copied().unwrap_or_default()
    }

    /// The part of its minimum that it got while it had work waiting; none where there was nothing to compare.
    pub fn kept(&self) -> Option<f64> {
        let promised = self.shaped("promised");
        (promised > 0).then(|| self.shaped("delivered") as f64 / promised as f64)
    }

    /// All operations in one distribution.
    pub fn all_operations(&self) -> OperationReport {
        all(self.operations.values())
    }

    /// What it used and what was kept, in a line for people.
    pub fn summary(&self) -> String {
        let all = self.all_operations();
        let megabytes = |name: &str| self.shaped(name) as f64 / 1e6;
        let time = |part| all.percentile_ns(part).map_or(0.0, |ns| ns / 1e3);
        let used = format!(
            "{} operations ({} failed) took {:.1} MB in and {:.1} MB out and {:.3} s of engines, half of them \
             {:.0} us or less, 99 % {:.0} us",
            all.done,
            all.failed,
            megabytes("ingress_bytes"),
            megabytes("egress_bytes"),
            self.shaped("engine_ns") as f64 / 1e9,
            time(0.5),
            time(0.99),
        );
        let level = self.level.as_deref();
        match (level, self.kept()) {
            (None, _) => used,
            (Some(level), None) => format!("{used}; of `{level}` nothing was asked for at length"),
            (Some(level), Some(kept)) => format!(
                "{used}; of the minimum of `{level}` it got {:.1} %, and less than that in {} of {} s",
                kept * 100.0,
                self.shaped("violations"),
                self.shaped("windows"),
            ),
        }
    }
}

/// Whether a function counts from the beginning again: something of `now` is less than it was at `seen`.
pub fn began_anew(seen: &DeviceReport, now: &DeviceReport) -> bool {
    let done = |report: &DeviceReport, kind| report.operations.get(kind).map_or(0, |it| it.done);
    let count = |report: &DeviceReport, name| report.shaping.get(name).copied().unwrap_or(0);
    seen.operations.keys().any(|kind| done(now, kind) < done(seen, kind))
        || seen.shaping.keys().any(|name| count(now, name) < count(seen, name))
}

/// Operations of several kinds in one distribution.
pub fn all<'a>(kinds: impl Iterator<Item = &'a OperationReport>) -> OperationReport {
    kinds.fold(OperationReport::default(), |mut all, counts| {
        all.done += counts.done;
        all.failed += counts.failed;
        all.bytes += counts.bytes;
        all.total_ns += counts.total_ns;
        all.latency.resize(all.latency.len().max(counts.latency.len()), 0);
        all.latency.iter_mut().zip(&counts.latency).for_each(|(sum, count)| *sum += count);
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(done: u64, shaping: &[(&str, u64)]) -> DeviceReport {
        let counts = OperationReport { done, latency: vec![0, 0, done], ..Default::default() };
        DeviceReport {
            operations: [("zstd".to_owned(), counts)].into(),
            shaping: shaping.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            level: Some("zstd 8 Mbit/s".to_owned()),
            ..DeviceReport::default()
        }
    }

    #[test]
    fn a_lease_used_what_was_counted_between_its_ends() {
        let begun = report(5, &[("promised", 10), ("delivered", 10), ("engine_ns", 7)]);
        let now = [
            ("promised", 1010),
            ("delivered", 985),
            ("engine_ns", 2_000_000_007),
            ("violations", 1),
            ("windows", 3),
        ];
        let used = LeaseReport::between(4, &begun, &report(105, &now)).unwrap();
        assert_eq!((used.lease, used.all_operations().done, used.kept()), (4, 100, Some(0.975)));
        let said = used.summary();
        assert!(said.starts_with("100 operations (0 failed) took 0.0 MB in"), "{said}");
        let end = "of the minimum of `zstd 8 Mbit/s` it got 97.5 %, and less than that in 1 of 3 s";
        assert!(said.contains("2.000 s of engines") && said.ends_with(end), "{said}");
        assert_eq!(LeaseReport::between(4, &begun, &report(9, &[])), None);
    }

    #[test]
    fn what_was_used_before_a_function_began_anew_is_added() {
        let seen = report(5, &[("engine_ns", 10), ("windows", 2)]);
        assert!(!began_anew(&seen, &report(5, &[("engine_ns", 10), ("windows", 3)])));
        assert!(began_anew(&seen, &report(5, &[("engine_ns", 9), ("windows", 3)])));
        assert!(began_anew(&seen, &report(4, &[("engine_ns", 10), ("windows", 2)])));
        assert!(began_anew(&seen, &report(5, &[])));
        let before = LeaseReport::between(4, &DeviceReport::default(), &seen).unwrap();
        let later = report(3, &[("engine_ns", 4), ("turns", 1)]);
        let used =
            LeaseReport::between(4, &DeviceReport::default(), &later).unwrap().after(&before);
        assert_eq!(used.all_operations().latency, [0, 0, 8]);
        let sums = [("engine_ns", 14), ("turns", 1), ("windows", 2)];
        assert!(sums.into_iter().all(|(name, sum)| used.shaped(name) == sum), "{used:?}");
    }
}
