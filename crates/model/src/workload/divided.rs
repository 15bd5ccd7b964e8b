//! A rack's independent parts: flows that use nothing in common are simulated apart from each other, side by side where
//! there are several processors. What comes out is the same, bit for bit, as of one simulation of all of them: flows
//! draw random numbers of their own, and what they do not share they do not wait for.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use rackbus_fabric::rack::Rack;

use super::Workload;
use super::results::{FlowResult, Results, tenants};
use super::scripts::{Failed, Run};
use super::untried::Untried;
use crate::disjoint::Disjoint;
use crate::engine::{FlowId, Stuck, Used};
use crate::timing::Timing;

/// Simulations that a workload is divided into at most, and what their racks consist of, all together: each has a rack of
/// its own. More parts than that share one.
const MOST: usize = 64;
const MOST_COMPONENTS: usize = 200_000;

/// Simulates `workload` in `rack`, at most `most` events of each of its independent parts.
///
/// # Errors
/// [`Failed`].
pub fn run(
    rack: &Rack,
    timing: &Timing,
    workload: &Workload,
    most: u64,
) -> Result<Results, Failed> {
    let mut divided = Divided::new(rack, timing, workload)?;
    divided.go(most, &|work| work())?;
    Ok(divided.results())
}

/// A workload in a rack, ready to run, in parts that have nothing to do with each other.
#[derive(Debug)]
pub struct Divided {
    /// By part: the numbers of its flows in the workload, and its simulation; by its first flow.
    parts: Vec<(Vec<usize>, Run)>,
}

impl Divided {
    /// Puts `rack` together and `workload` into it, once for each part.
    ///
    /// # Errors
    /// [`Failed`] when they do not fit.
    pub fn new(rack: &Rack, timing: &Timing, workload: &Workload) -> Result<Divided, Failed> {
        let whole = Run::new(rack, timing, workload)?;
        let groups = groups(&whole);
        if groups.len() < 2 {
            return Ok(Divided { parts: vec![((0..workload.flows.len()).collect(), whole)] });
        }
        drop(whole);
        let part = |numbers: Vec<usize>| {
            let run = Run::part(rack, timing, workload, &numbers)?;
            Ok((numbers, run))
        };
        let parts = groups.into_iter().map(part).collect::<Result<_, Failed>>()?;
        Ok(Divided { parts })
    }

    /// How many parts there are: so many can be simulated side by side.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there is no part: never, as a workload has flows.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Simulates all parts up to the workload's duration, each in at most `most` events. `on` calls what it is given,
    /// which ends when nothing is left to do: once, or on several threads at a time.
    ///
    /// # Errors
    /// [`Stuck`], of the first part that is.
    pub fn go(&mut self, most: u64, on: &dyn Fn(&(dyn Fn() + Sync))) -> Result<(), Stuck> {
        let todo = Mutex::new(self.parts.iter_mut().enumerate());
        let stuck: Mutex<BTreeMap<usize, Stuck>> = Mutex::new(BTreeMap::new());
        on(&|| {
            loop {
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((nth, (_, run))) = next else { return };
                if let Err(why) = run.go(most) {
                    stuck.lock().unwrap_or_else(PoisonError::into_inner).insert(nth, why);
                }
            }
        });
        let stuck = stuck.into_inner().unwrap_or_else(PoisonError::into_inner);
        stuck.into_values().next().map_or(Ok(()), Err)
    }

    /// What has come of all parts.
    pub fn results(&self) -> Results {
        let mut flows: BTreeMap<usize, FlowResult> = BTreeMap::new();
        let mut all: Option<Results> = None;
        for (numbers, run) in &self.parts {
            let mut own = run.results();
            flows.extend(numbers.iter().copied().zip(std::mem::take(&mut own.flows)));
            match &mut all {
                None => all = Some(own),
                Some(all) => {
                    all.events += own.events;
                    for (link, more) in all.links.iter_mut().zip(own.links) {
                        // Only one part uses it; to the others it is idle.
                        link.there += more.there;
                        link.back += more.back;
                        link.starved += more.starved;
                    }
                }
            }
        }
        let flows: Vec<FlowResult> = flows.into_values().collect();
        let tenants = tenants(&flows);
        let mut untried = Untried::default();
        self.parts.iter().for_each(|(_, run)| untried.merge(run.untried_as_loaded()));
        let unvalidated = untried.sentences();
        match all {
            Some(all) => Results { flows, tenants, unvalidated, ..all },
            None => unreachable!("a division has parts"),
        }
    }
}

/// The numbers of flows that have nothing to do with those of other groups, each group in order, by their first.
fn groups(whole: &Run) -> Vec<Vec<usize>> {
    let flows: Vec<&[FlowId]> = whole.flows().map(|(_, queues, _)| queues).collect();
    let mut joined = Disjoint::new(flows.len());
    let mut first: BTreeMap<Used, usize> = BTreeMap::new();
    for (nth, queues) in flows.iter().enumerate() {
        for used in queues.iter().flat_map(|queue| whole.assembly.world.used_by(*queue)) {
            joined.join(nth, *first.entry(used).or_insert(nth));
        }
    }
    let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for nth in 0..flows.len() {
        found.entry(joined.first(nth)).or_default().push(nth);
    }
    let mut groups: Vec<Vec<usize>> = found.into_values().collect();
    // The smallest are put together: each costs a rack of its own.
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    let components = whole.assembly.topology().components().count();
    let most = (MOST_COMPONENTS / components.max(1)).clamp(1, MOST);
    for nth in most..groups.len() {
        let more = std::mem::take(&mut groups[nth]);
        groups[most - 1 - nth % most].extend(more);
    }
    groups.truncate(most);
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort();
    groups
}
