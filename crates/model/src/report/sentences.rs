//! What came of a workload, in sentences: what holds flows up, and what is not known.

use std::collections::BTreeMap;

use crate::picture::Unit;
use crate::workload::{FlowResult, Results};

/// From this load on a link is worth a sentence of its own.
const BUSY: f64 = 0.8;

/// What the hosts were taken to be.
pub(super) fn hosts(results: &Results) -> String {
    let mut profiles: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for host in &results.hosts {
        profiles.entry(&host.profile).or_default().push(&host.host);
    }
    let told = profiles.into_iter().map(|(profile, hosts)| match hosts.len() {
        0..=8 => format!("{profile} ({})", hosts.join(", ")),
        many => format!("{profile} ({many} hosts)"),
    });
    format!("Hosts are taken to be {}.", list(&told.collect::<Vec<_>>()))
}

/// All sentences, those that concern most bytes first.
pub(super) fn all(results: &Results) -> Vec<String> {
    let mut groups: BTreeMap<&str, Vec<&FlowResult>> = BTreeMap::new();
    for flow in &results.flows {
        groups.entry(&flow.bottleneck).or_default().push(flow);
    }
    let mut groups: Vec<(&str, Vec<&FlowResult>)> = groups.into_iter().collect();
    let bytes = |flows: &[&FlowResult]| flows.iter().map(|flow| flow.bytes_per_second).sum::<f64>();
    // What is held up before what is not.
    groups.sort_by(|one, other| {
        let met = |name: &str| name == "demand";
        met(one.0).cmp(&met(other.0)).then(bytes(&other.1).total_cmp(&bytes(&one.1)))
    });
    let mut said: Vec<String> =
        groups.iter().map(|(bottleneck, flows)| held_up(bottleneck, flows)).collect();
    for link in &results.links {
        for (share, [from, to]) in [
            (link.there, [&link.ends[0], &link.ends[1]]),
            (link.back, [&link.ends[1], &link.ends[0]]),
        ] {
            let known =
                groups.iter().any(|(bottleneck, _)| *bottleneck == format!("{from} to {to}"));
            if share >= BUSY && !known {
                let percent = share * 100.0;
                said.push(format!(
                    "{from} to {to} ({}) is busy for {percent:.0} % of the time.",
                    link.link
                ));
            }
        }
    }
    let doubts = results.flows.iter().filter_map(|flow| Some((flow, flow.doubt.as_ref()?)));
    said.extend(
        doubts.map(|(flow, doubt)| format!("Of {} is not known enough: {doubt}.", flow.name)),
    );
    said.extend(results.notes.iter().map(|note| format!("{note}.")));
    said.extend(results.unvalidated.iter().map(|what| format!("Not validated: {what}.")));
    said
}

/// What holds some flows up.
fn held_up(bottleneck: &str, flows: &[&FlowResult]) -> String {
    let named = |flow: &&FlowResult| {
        format!("{} ({})", flow.name, Unit::BytesPerSecond.text(flow.bytes_per_second))
    };
    let names = list(&flows.iter().map(named).collect::<Vec<_>>());
    let (gets, waits) = if flows.len() == 1 { ("gets", "waits") } else { ("get", "wait") };
    let (part, what) = match bottleneck.split_once(": ") {
        Some((part, what)) => (part, what),
        None => (bottleneck, ""),
    };
    match what {
        "" if part == "demand" => format!("{names} {gets} all that is asked for."),
        "" if part == "latency" => format!(
            "{names} {gets} no more because too little is under way for so long a route: with more depth, or a \
             shorter route, the rate would rise."
        ),
        "" => format!("The wire from {part} is full: {names} {waits} for it."),
        "memory bandwidth" => {
            format!("The memory {part} is busy all the time: {names} {waits} for it.")
        }
        "split reads" => format!(
            "The root complex {part} cuts reads that pass from port to port into pieces, and has only so many of \
             them under way: {names} {waits} for it. With the IOMMU off, traffic between parts below one switch \
             does not cross it."
        ),
        "page walkers" => format!(
            "The IOMMU of {part} looks up pages all the time: {names} {waits} for it. Larger pages, or a smaller \
             area, would need fewer walks."
        ),
        "peer writes" => {
            format!(
                "The root complex {part} passes on no more writes from port to port: {names} {waits} for it."
            )
        }
        "tags" => format!(
            "{part} has as many reads under way as it has tags for: {names} {waits} for them. A shorter route, or \
             larger read requests, would help."
        ),
        "engine" => format!("The DMA engine of {part} moves no more: {names} {waits} for it."),
        "packet rate" => format!(
            "The DMA engine of {part} makes no more packets a second: {names} {waits} for it. Larger packets \
             would help."
        ),
        "medium" => format!("The medium of {part} is busy all the time: {names} {waits} for it."),
        what if let Some(limit) = what.strip_suffix(" in the rack file") => {
            format!("The {limit} of {part} in the rack file is used up: {names} {waits} for it.")
        }
        what if what.ends_with(" credits") => {
            format!("From {part}, packets wait for {what} most of the time: {names} {waits} there.")
        }
        what => format!("{names} {waits} for {what} of {part}."),
    }
}

/// `a`, `a and b`, `a, b and c`.
fn list(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
