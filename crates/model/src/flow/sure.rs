//! Which flows the fair shares answer for, and why not for the others.
//!
//! A PCIe fabric gives flows their shares as long as nobody presses for more: then each gets what it asks
//! for. A flow that shares nothing with others gets what its route lets through. In between the fabric decides
//! by packets and queues, which shares know nothing of: that is refused rather than guessed.

use super::{Bottleneck, Flow, Shares};
use crate::disjoint::Disjoint;

/// From this utilization on, queues decide who gets what.
const BUSY: f64 = 0.85;
/// From this utilization on, what is taken for round trips (tags, trackers) may not do, nor units: others make these
/// longer. Where a link is `FILLING`, they make them several times as long.
const TAKEN: f64 = 0.5;
const TAKEN_BY_FILLING: f64 = 0.1;
const FILLING: f64 = 0.7;

/// What a link stands for, where that is no part of the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stands {
    /// Round trips of a requester: its tags.
    Own,
    /// Round trips by a root: those who wait for its trackers make others wait.
    Shared,
    /// Units that jobs use.
    Units,
    /// What a function may do in a second.
    Rate,
}

/// How a flow's jobs come, and what they do.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobPattern {
    /// They are several steps, which may fall into step with each other.
    pub several: bool,
    /// Each comes when another has ended.
    pub closed: bool,
    /// As many are under way as about keep units busy that they use: now one waits for another, now a unit for one.
    pub at_the_knee: bool,
}

/// Why a flow's rate is not known from shares alone; `None` where it is. `stands` is by link.
pub(super) fn doubts(
    flows: &[Flow],
    shares: &Shares,
    jobs: &[JobPattern],
    stands: &[Option<Stands>],
) -> Vec<Option<&'static str>> {
    let groups = groups(flows, shares.utilization.len());
    let mut users = vec![0_usize; shares.utilization.len()];
    flows.iter().flat_map(Flow::loads).for_each(|(link, _)| users[link] += 1);
    // As a flow's demand does, units and limits of its own keep it from more, and nobody else.
    let bounds_one = |stands: Option<Stands>| matches!(stands, Some(Stands::Units | Stands::Rate));
    let alone = |link: usize| bounds_one(stands[link]) && users[link] == 1;
    let bound = |nth: usize| match shares.flows[nth].bottleneck {
        Bottleneck::Demand => false,
        Bottleneck::Link(link) => !alone(link),
    };
    let mut crowded = vec![0.0_f64; flows.len()];
    let mut sizes = vec![0_usize; flows.len()];
    let mut busiest = vec![0.0_f64; flows.len()];
    let mut pressed = vec![false; flows.len()];
    let (mut own, mut taken) = (vec![0.0_f64; flows.len()], vec![0.0_f64; flows.len()]);
    for (nth, flow) in flows.iter().enumerate() {
        let group = groups[nth];
        sizes[group] += 1;
        pressed[group] |= bound(nth);
        for (link, _) in flow.loads().filter(|(link, _)| !alone(*link)) {
            let most = |found: &mut f64| *found = found.max(shares.utilization[link]);
            most(&mut busiest[group]);
            match stands[link] {
                None | Some(Stands::Rate) => {}
                Some(Stands::Own) => most(&mut own[group]),
                Some(Stands::Shared) => most(&mut taken[group]),
                Some(Stands::Units) => most(&mut crowded[nth]),
            }
        }
    }
    let doubt = |nth: usize| {
        let group = groups[nth];
        if sizes[group] > 1 && (pressed[group] || busiest[group] >= BUSY) {
            return Some("it meets others where something is full; simulate it");
        }
        let most = if busiest[group] >= FILLING { TAKEN_BY_FILLING } else { TAKEN };
        if sizes[group] > 1 && (taken[group] >= most || own[group] >= TAKEN) {
            return Some("reads wait for round trips that others make longer; simulate it");
        }
        // The queues of what is filling make jobs longer, and with them the distance of those that follow.
        let waits = shares.flows[nth].bottleneck == Bottleneck::Demand;
        if sizes[group] > 1 && jobs[nth].closed && waits && busiest[group] >= FILLING {
            return Some("its jobs wait for each other, and others make them longer; simulate it");
        }
        if jobs[nth].closed && crowded[nth] >= TAKEN || jobs[nth].at_the_knee {
            return Some("its jobs wait for units that others use; simulate it");
        }
        (jobs[nth].several && (bound(nth) || busiest[group] >= BUSY))
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
