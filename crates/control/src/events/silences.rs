//! Which nodes are not heard from any more. Each is told of once when it has been silent for long, and once when it is
//! heard from again, also by the control planes that follow: what was told is in the stored events.

use std::collections::BTreeMap;

use super::{Draft, Log};
use crate::api::{EventKind, EventRecord};

/// When a node was heard from last, as the control plane knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastHeard {
    /// The time, on the authority's clock: that of its own beginning where no node has said anything since.
    pub at: u64,
    /// Whether the node has said something since this control plane began.
    pub in_this_life: bool,
}

/// The hosts whose nodes are silent, as it was told.
#[derive(Debug, Clone, Default)]
pub struct SilentNodes {
    /// By host, whether an earlier control plane told it.
    told: BTreeMap<String, bool>,
}

impl SilentNodes {
    /// As the control planes before this one told it.
    pub fn of(log: &Log) -> SilentNodes {
        let mut told = BTreeMap::new();
        for event in log.after(0, None, usize::MAX) {
            let EventRecord { kind, host: Some(host), function: None, text, .. } = event else {
                continue;
            };
            let is_fault = kind == EventKind::Fault;
            if is_fault && text.starts_with(&silent(&host)) {
                told.insert(host, true);
            } else if (is_fault && text == heard_again(&host)) || text == left_the_rack(&host) {
                told.remove(&host);
            }
        }
        SilentNodes { told }
    }

    /// What is new at `now`, with the host that each event is of. `heard`: when the node of each host of the rack was heard
    /// from last; one that was not for more than `longest` milliseconds is silent.
    pub fn news<'h>(
        &mut self,
        now: u64,
        longest: u64,
        heard: impl Iterator<Item = (&'h str, LastHeard)>,
    ) -> Vec<(String, Draft)> {
        // Those that left the rack are told of no more.
        let told = std::mem::take(&mut self.told);
        let mut news = Vec::new();
        for (host, heard) in heard {
            let silent_ms = now.saturating_sub(heard.at);
            let is_silent = silent_ms > longest;
            let before = told.get(host).copied();
            // That this control plane has begun is no sign of the node.
            if before == Some(true) && !heard.in_this_life {
                self.told.insert(host.to_owned(), true);
                continue;
            }
            if is_silent {
                self.told.insert(host.to_owned(), false);
            }
            let text = match (before.is_some(), is_silent) {
                (false, true) => Some(format!("{}for {} s", silent(host), silent_ms / 1000)),
                (true, false) => Some(heard_again(host)),
                _ => None,
            };
            let event = |text| Draft::of_host(EventKind::Fault, Some(host), text);
            news.extend(text.map(|text| (host.to_owned(), event(text))));
        }
        news
    }
}

/// What is told of a host that leaves the rack: one that joins it later is another one.
pub fn left_the_rack(host: &str) -> String {
    format!("host {host} left the rack")
}

/// What is told of a node that is silent begins so.
fn silent(host: &str) -> String {
    format!("the node of {host} has not been heard from ")
}

/// What is told of one that is heard from again.
fn heard_again(host: &str) -> String {
    format!("the node of {host} is heard from again")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that was heard from at `at` by this control plane.
    fn at(at: u64) -> LastHeard {
        LastHeard { at, in_this_life: true }
    }

    fn texts<'h>(
        silent: &mut SilentNodes,
        now: u64,
        heard: impl IntoIterator<Item = (&'h str, LastHeard)>,
    ) -> Vec<String> {
        let news = silent.news(now, 15_000, heard.into_iter());
        news.into_iter().map(|(_, draft)| draft.text).collect()
    }

    #[test]
    fn a_node_that_is_silent_is_told_of_once_and_so_is_its_return() {
        let mut silent = SilentNodes::default();
        let mut news =
            |now, alpha, beta| texts(&mut silent, now, [("alpha", at(alpha)), ("beta", at(beta))]);
        assert!(news(15_000, 0, 14_000).is_empty());
        let gone = ["the node of alpha has not been heard from for 16 s"];
        assert_eq!(news(16_000, 0, 14_000), gone);
        assert!(news(20_000, 0, 19_000).is_empty());
        let back = ["the node of alpha is heard from again"];
        assert_eq!(news(21_000, 20_500, 19_000), back);
        assert!(news(22_000, 20_500, 19_000).is_empty());
    }

    #[test]
    fn a_host_that_left_and_came_back_begins_anew() {
        let mut silent = SilentNodes::default();
        assert_eq!(texts(&mut silent, 20_000, [("alpha", at(0))]).len(), 1);
        assert!(texts(&mut silent, 21_000, []).is_empty());
        assert!(texts(&mut silent, 22_000, [("alpha", at(21_500))]).is_empty());
    }

    /// The control plane is started anew, again and again, while a node is silent.
    #[test]
    fn later_control_planes_do_not_tell_the_same_silence_again() {
        let mut log = Log::default();
        let mut stored = |silent: &mut SilentNodes, now, heard: LastHeard| {
            let news = silent.news(now, 15_000, [("alpha", heard)].into_iter());
            let drafts: Vec<Draft> = news.into_iter().map(|(_, draft)| draft).collect();
            let events = log.number(now, drafts);
            log.put(&events, 0);
            (events.into_iter().map(|event| event.text).collect::<Vec<_>>(), SilentNodes::of(&log))
        };
        let (gone, mut silent) = stored(&mut SilentNodes::default(), 16_000, at(0));
        assert_eq!(gone, ["the node of alpha has not been heard from for 16 s"]);
        for begun in [20_000, 50_000] {
            // By its time it is heard from when the control plane begins.
            for now in [begun, begun + 16_000] {
                let none = LastHeard { at: begun, in_this_life: false };
                let (news, next) = stored(&mut silent, now, none);
                assert!(news.is_empty(), "{news:?}");
                silent = next;
            }
        }
        let (back, mut next) = stored(&mut silent, 70_000, at(70_000));
        assert_eq!(back, ["the node of alpha is heard from again"]);
        // It is told of its next silence.
        assert!(stored(&mut next, 71_000, at(70_000)).0.is_empty());
        assert_eq!(stored(&mut next, 86_000, at(70_000)).0.len(), 1);
    }

    /// It was silent when it left; another one joins by its name, and a control plane is started after that.
    #[test]
    fn a_host_that_left_is_not_silent_for_later_control_planes() {
        let drafts = vec![
            Draft::of_host(EventKind::Fault, Some("alpha"), format!("{}for 16 s", silent("alpha"))),
            Draft::of_host(EventKind::Access, Some("alpha"), left_the_rack("alpha")),
        ];
        let mut log = Log::default();
        let events = log.number(1, drafts);
        log.put(&events, 0);
        assert!(SilentNodes::of(&log).told.is_empty());
    }

    /// What nodes say of their functions is not what is told of nodes.
    #[test]
    fn only_what_is_told_of_nodes_counts() {
        let text = || format!("{}for 16 s", silent("alpha"));
        let drafts = vec![
            Draft::of_function(EventKind::Fault, "alpha", "alpha/nvme0", text()),
            Draft::of_host(EventKind::Loss, Some("alpha"), text()),
            Draft::of_host(EventKind::Fault, Some("beta"), text()),
        ];
        let mut log = Log::default();
        let events = log.number(1, drafts);
        log.put(&events, 0);
        assert!(SilentNodes::of(&log).told.is_empty());
    }
}
