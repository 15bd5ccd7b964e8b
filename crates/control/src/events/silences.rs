//! Which nodes are not heard from any more. Each is told of once when it has been silent for long, and once when it is
//! heard from again.

use std::collections::BTreeSet;

use super::Draft;
use crate::api::EventKind;

/// The hosts whose nodes are silent, as it was told.
#[derive(Debug, Clone, Default)]
pub struct SilentNodes {
    told: BTreeSet<String>,
}

impl SilentNodes {
    /// What is new at `now`, with the host that each event is of. `heard`: when the node of each host of the rack was heard
    /// from last; one that was not for more than `longest` milliseconds is silent.
    pub fn news<'h>(
        &mut self,
        now: u64,
        longest: u64,
        heard: impl Iterator<Item = (&'h str, u64)>,
    ) -> Vec<(String, Draft)> {
        // Those that left the rack are told of no more.
        let told = std::mem::take(&mut self.told);
        let mut news = Vec::new();
        for (host, heard) in heard {
            let silent_ms = now.saturating_sub(heard);
            let text = match (told.contains(host), silent_ms > longest) {
                (false, true) => {
                    let seconds = silent_ms / 1000;
                    Some(format!("the node of {host} has not been heard from for {seconds} s"))
                }
                (true, false) => Some(format!("the node of {host} is heard from again")),
                _ => None,
            };
            if silent_ms > longest {
                self.told.insert(host.to_owned());
            }
            let event = |text| Draft::of_host(EventKind::Fault, Some(host), text);
            news.extend(text.map(|text| (host.to_owned(), event(text))));
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_silent_is_told_of_once_and_so_is_its_return() {
        let mut silent = SilentNodes::default();
        let mut news = |now, heard: &[(&str, u64)]| {
            let news = silent.news(now, 15_000, heard.iter().copied());
            news.into_iter().map(|(_, draft)| draft.text).collect::<Vec<_>>()
        };
        assert!(news(15_000, &[("alpha", 0), ("beta", 14_000)]).is_empty());
        let gone = ["the node of alpha has not been heard from for 16 s"];
        assert_eq!(news(16_000, &[("alpha", 0), ("beta", 14_000)]), gone);
        assert!(news(20_000, &[("alpha", 0), ("beta", 19_000)]).is_empty());
        let back = ["the node of alpha is heard from again"];
        assert_eq!(news(21_000, &[("alpha", 20_500), ("beta", 19_000)]), back);
        assert!(news(22_000, &[("alpha", 20_500), ("beta", 19_000)]).is_empty());
    }

    #[test]
    fn a_host_that_left_and_came_back_begins_anew() {
        let mut silent = SilentNodes::default();
        assert_eq!(silent.news(20_000, 15_000, [("alpha", 0)].into_iter()).len(), 1);
        assert!(silent.news(21_000, 15_000, std::iter::empty()).is_empty());
        assert!(silent.news(22_000, 15_000, [("alpha", 21_500)].into_iter()).is_empty());
    }
}
