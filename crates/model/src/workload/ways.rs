//! Hosts that are joined in more than one way: all that moves between them takes one of these, which is told.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_fabric::rack::Rack;

use crate::disjoint::Disjoint;

/// So many sentences are told; of more, how many there are.
const MOST: usize = 4;
const WAY: &str =
    "what moves between them takes the shortest way, and of equals the first in the rack file";

/// A sentence for each host or two hosts of which more than one way of adapters and links leads to others.
pub(super) fn notes(rack: &Rack) -> Vec<String> {
    let fabrics = fabrics(rack);
    let mut told = Vec::new();
    // By two fabrics: the hosts that are in both.
    let mut both: BTreeMap<(usize, usize), BTreeSet<&str>> = BTreeMap::new();
    let mut fabrics_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (nth, hosts) in fabrics.iter().enumerate() {
        for (host, adapters) in hosts {
            if adapters.len() > 1 && hosts.len() > 1 {
                let adapters = adapters.iter().copied().collect::<Vec<_>>().join(" and ");
                told.push(format!("{host} and others are joined by {adapters}: {WAY}"));
            }
            fabrics_of.entry(host).or_default().push(nth);
        }
    }
    for (host, of) in fabrics_of {
        for (nth, one) in of.iter().enumerate() {
            of[..nth]
                .iter()
                .for_each(|other| _ = both.entry((*other, *one)).or_default().insert(host));
        }
    }
    for hosts in both.into_values().filter(|hosts| hosts.len() > 1) {
        let hosts: Vec<&str> = hosts.into_iter().take(2).collect();
        let sentence = format!("{} are joined in several ways: {WAY}", hosts.join(" and "));
        if !told.contains(&sentence) {
            told.push(sentence);
        }
    }
    let more = told.len().saturating_sub(MOST);
    told.truncate(MOST);
    if more > 0 {
        told.push(format!("{more} more hosts, or pairs of hosts, are joined in several ways"));
    }
    told
}

/// What joins hosts, each switch or group of switches and each cable from adapter to adapter: by host its adapters there.
fn fabrics(rack: &Rack) -> Vec<BTreeMap<&str, BTreeSet<&str>>> {
    let Some(physical) = &rack.fabric else { return Vec::new() };
    let hosts: BTreeMap<&str, &str> =
        physical.adapters.iter().map(|part| (part.name.as_str(), part.host.as_str())).collect();
    let outer = physical.switches.iter().filter(|switch| switch.host.is_none() && !switch.cxl);
    let outer: BTreeMap<&str, usize> =
        outer.enumerate().map(|(nth, switch)| (switch.name.as_str(), nth)).collect();
    let ends = || physical.links.iter().map(|link| link.ends.each_ref().map(String::as_str));
    let mut joined = Disjoint::new(outer.len());
    for [a, b] in ends() {
        if let (Some(a), Some(b)) = (outer.get(a), outer.get(b)) {
            joined.join(*a, *b);
        }
    }
    let mut found: Vec<BTreeMap<&str, BTreeSet<&str>>> = vec![BTreeMap::new(); outer.len()];
    for [a, b] in ends() {
        let switch = outer.get(a).or(outer.get(b)).copied();
        let adapters = [a, b].into_iter().filter_map(|end| Some((*hosts.get(end)?, end)));
        let adapters: Vec<(&str, &str)> = adapters.collect();
        let fabric = match (switch, adapters.len()) {
            (Some(switch), _) => &mut found[joined.first(switch)],
            (None, 2) => {
                found.push(BTreeMap::new());
                let Some(cable) = found.last_mut() else { continue };
                cable
            }
            (None, _) => continue,
        };
        for (host, adapter) in adapters {
            fabric.entry(host).or_default().insert(adapter);
        }
    }
    found
}
