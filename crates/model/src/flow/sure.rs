//! Which flows the fair shares answer for, and why not for the others.
//!
//! A PCIe fabric gives flows their shares as long as nobody presses for more: then each gets what it asks
//! for. A flow that shares nothing with others gets what its route lets through. In between the fabric decides
//! by packets and queues, which shares know nothing of: that is refused rather than guessed.

use super::{Bottleneck, Flow, Shares};
use crate::disjoint::Disjoint;

/// From this utilization on, queues decide who gets what.
const BUSY: f64 = 0.85;
/// From this utilization on, what is taken for round trips (tags, trackers) may not do: others make these
/// longer. Where a link is `FILLING`, they make them several times as long.
const TAKEN: f64 = 0.5;
const TAKEN_BY_FILLING: f64 = 0.1;
const FILLING: f64 = 0.7;

/// Whose round trips a link stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trips {
    /// A requester's: its tags.
    Own,
    /// A root's: those who wait for its trackers make others wait.
    Shared,
}

/// Why a flow's rate is not known from shares alone; `None` where it is. `several` are flows of several steps,
/// `trips` links that stand for what round trips take: of one requester, or of a root.
pub(super) fn doubts(
    flows: &[Flow],
    shares: &Shares,
    several: &[bool],
    trips: &[Option<Trips>],
) -> Vec<Option<&'static str>> {
    let groups = groups(flows, shares.utilization.len());
    let mut sizes = vec![0_usize; flows.len()];
    let mut busiest = vec![0.0_f64; flows.len()];
    let mut pressed = vec![false; flows.len()];
    let (mut own, mut taken) = (vec![0.0_f64; flows.len()], vec![0.0_f64; flows.len()]);
    for (nth, flow) in flows.iter().enumerate() {
        let group = groups[nth];
        sizes[group] += 1;
        pressed[group] |= shares.flows[nth].bottleneck != Bottleneck::Demand;
        for (link, _) in flow.loads() {
            busiest[group] = busiest[group].max(shares.utilization[link]);
            match trips[link] {
                None => {}
                Some(Trips::Own) => own[group] = own[group].max(shares.utilization[link]),
                Some(Trips::Shared) => taken[group] = taken[group].max(shares.utilization[link]),
            }
        }
    }
    let doubt = |nth: usize| {
        let group = groups[nth];
        let bound = shares.flows[nth].bottleneck != Bottleneck::Demand;
        if sizes[group] > 1 && (pressed[group] || busiest[group] >= BUSY) {
            return Some("it meets others where something is full; simulate it");
        }
        let most = if busiest[group] >= FILLING { TAKEN_BY_FILLING } else { TAKEN };
        if sizes[group] > 1 && (taken[group] >= most || own[group] >= TAKEN) {
            return Some("reads wait for round trips that others make longer; simulate it");
        }
        (several[nth] && (bound || busiest[group] >= BUSY))
            .then_some("its steps fill what they wait for; simulate it")
    };
    (0..flows.len()).map(doubt).collect()
}

/// By flow: the first of those that it is joined with by what they both load.
fn groups(flows: &[Flow], links: usize) -> Vec<usize> {
    let mut joined = Disjoint::new(flows.len());
    let mut first: Vec<Option<usize>> = vec![None; links];
    for (nth, flow) in flows.iter().enumerate() {
        for (link, _) in flow.loads() {
            joined.join(nth, *first[link].get_or_insert(nth));
        }
    }
    (0..flows.len()).map(|nth| joined.first(nth)).collect()
}
