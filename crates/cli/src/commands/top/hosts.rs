//! The last two reports of each host's node, of which rates are made (pure).

use std::collections::BTreeMap;

use rackbus_control::api::HostStatus;

/// What each host's node reported lately.
#[derive(Debug, Default)]
pub struct HostReports(BTreeMap<String, [HostStatus; 2]>);

/// What a host's node said last, and what it said before that.
#[derive(Debug, Clone, Copy)]
pub struct ReportPair<'a> {
    /// What its node reported last.
    pub now: &'a HostStatus,
    /// What it reported before that; the same where there was one report only.
    pub before: &'a HostStatus,
    /// Seconds between the two; none where there was one report only.
    pub seconds: Option<f64>,
}

impl HostReports {
    /// Takes what is said of the hosts now.
    pub fn take(&mut self, hosts: &[HostStatus]) {
        // A node that is not there has no report, and one of an older version does not say when it counted.
        let there = || hosts.iter().filter(|host| host.counted_ms > 0);
        self.0.retain(|name, _| there().any(|host| host.host == *name));
        for host in there() {
            match self.0.get_mut(&host.host) {
                Some(pair) if host.counted_ms > pair[1].counted_ms => {
                    pair.rotate_left(1);
                    pair[1] = host.clone();
                }
                // The same report again.
                Some(pair) if host.counted_ms == pair[1].counted_ms => {}
                // A node that was started anew counts from nothing.
                _ => {
                    self.0.insert(host.host.clone(), [host.clone(), host.clone()]);
                }
            }
        }
    }

    /// The reports of all hosts whose nodes are there.
    pub fn pairs(&self) -> impl Iterator<Item = ReportPair<'_>> {
        self.0.values().map(|[before, now]| {
            let ms = now.counted_ms - before.counted_ms;
            ReportPair { now, before, seconds: (ms > 0).then(|| ms as f64 / 1e3) }
        })
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A host whose node reported this at that time, beside what every node does.
    pub fn host(counted_ms: u64, more: serde_json::Value) -> HostStatus {
        let mut host = json!({
            "host": "alpha", "state": "up", "heard_ms_ago": 10, "overruns": 0, "log_lines_left_out": 0,
            "address": null, "offers": 1, "borrows": 0, "counted_ms": counted_ms,
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            host[name] = value.clone();
        }
        serde_json::from_value(host).unwrap()
    }

    #[test]
    fn pairs_are_of_two_reports_of_one_life_of_a_node() {
        let mut reports = HostReports::default();
        let mut seconds = |counted_ms| {
            reports.take(&[host(counted_ms, json!({}))]);
            reports.pairs().map(|pair| pair.seconds).collect::<Vec<_>>()
        };
        assert_eq!(seconds(1000), [None]);
        assert_eq!(seconds(1000), [None]);
        assert_eq!(seconds(3000), [Some(2.0)]);
        assert_eq!(seconds(3000), [Some(2.0)], "however often one looks");
        assert_eq!(seconds(500), [None], "the node was started anew");
        assert_eq!(seconds(0), [], "the node is not there");
    }
}
