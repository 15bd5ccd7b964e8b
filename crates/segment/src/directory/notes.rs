//! How much is noted here of locks and barriers of other machines' processes, in bounded numbers.
//!
//! A lock that is held counts as one, and so does a party of a barrier. The parties of a barrier are named by each of them
//! at each arrival, and most barriers of a program have the same ones: a machine's *list* is kept once for all of its
//! arrivals that name it, and its parties are counted once.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::message::{LockHolder, MOST_FAR_LOCKS, NodeId, Refusal};

/// All that a barrier waits for, in the order in which all name them.
pub(super) type BarrierParties = Arc<[LockHolder]>;

/// What is noted of one machine.
#[derive(Debug, Default)]
struct NotesOfNode {
    count: u32,
    /// Its lists, and how many arrivals name each.
    lists: BTreeMap<BarrierParties, u32>,
}

/// What is noted of each.
#[derive(Debug, Default)]
pub(super) struct FarNotes(BTreeMap<NodeId, NotesOfNode>);

impl FarNotes {
    /// Notes a lock that is held.
    ///
    /// # Errors
    /// [`Refusal::TooMany`], and nothing is noted.
    pub(super) fn add_lock(&mut self, node: NodeId) -> Result<(), Refusal> {
        self.add(node, 1)
    }

    fn add(&mut self, node: NodeId, count: u32) -> Result<(), Refusal> {
        let counted = self.0.get(&node).map_or(0, |notes| notes.count);
        if counted.saturating_add(count) > MOST_FAR_LOCKS {
            return Err(Refusal::TooMany(MOST_FAR_LOCKS));
        }
        self.0.entry(node).or_default().count += count;
        Ok(())
    }

    pub(super) fn remove_lock(&mut self, node: NodeId) {
        self.remove(node, 1);
    }

    fn remove(&mut self, node: NodeId, count: u32) {
        let Some(notes) = self.0.get_mut(&node) else { return };
        notes.count = notes.count.saturating_sub(count);
        if notes.count == 0 {
            self.0.remove(&node);
        }
    }

    /// Notes an arrival at a barrier of these parties: the list of them that is kept.
    ///
    /// # Errors
    /// [`Refusal::TooMany`], and nothing is noted.
    pub(super) fn add_arrival(
        &mut self,
        node: NodeId,
        parties: Vec<LockHolder>,
    ) -> Result<BarrierParties, Refusal> {
        let kept = self.0.get(&node).and_then(|notes| notes.lists.get_key_value(&parties[..]));
        let kept = kept.map(|(list, _)| list.clone());
        let new = if kept.is_none() { weight(&parties) } else { 0 };
        self.add(node, new.saturating_add(1))?;
        let list = kept.unwrap_or_else(|| parties.into());
        *self.0.entry(node).or_default().lists.entry(list.clone()).or_default() += 1;
        Ok(list)
    }

    /// An arrival is noted no more, nor is its list with the last that names it.
    pub(super) fn remove_arrival(&mut self, node: NodeId, parties: &BarrierParties) {
        let mut count = 1;
        if let Some(notes) = self.0.get_mut(&node)
            && let Some(named) = notes.lists.get_mut(parties)
        {
            *named -= 1;
            if *named == 0 {
                notes.lists.remove(parties);
                count += weight(parties);
            }
        }
        self.remove(node, count);
    }
}

/// What the parties of a list count.
fn weight(parties: &[LockHolder]) -> u32 {
    u32::try_from(parties.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::SessionId;

    fn parties(node: NodeId, count: u64) -> Vec<LockHolder> {
        (0..count).map(|session| LockHolder { node, session: SessionId(session) }).collect()
    }

    #[test]
    fn a_list_counts_once_until_the_last_arrival_that_names_it_is_gone() {
        let mut notes = FarNotes::default();
        let (few, many) = (parties(8, 64), parties(8, 1024));
        let lists: Vec<BarrierParties> =
            (0..60_000).map(|_| notes.add_arrival(8, few.clone()).unwrap()).collect();
        assert!(lists.iter().all(|list| Arc::ptr_eq(list, &lists[0])));
        let other = notes.add_arrival(8, many).unwrap();
        let left = MOST_FAR_LOCKS - 60_064 - 1025;
        (0..left).for_each(|_| notes.add_lock(8).unwrap());
        assert_eq!(notes.add_lock(8), Err(Refusal::TooMany(MOST_FAR_LOCKS)));
        assert_eq!(notes.add_arrival(8, few), Err(Refusal::TooMany(MOST_FAR_LOCKS)));
        notes.add_lock(12).unwrap();
        notes.remove_arrival(8, &other);
        (0..1025).for_each(|_| notes.add_lock(8).unwrap());
        assert!(notes.add_lock(8).is_err());
        lists.iter().for_each(|list| notes.remove_arrival(8, list));
        (0..left + 1025).for_each(|_| notes.remove_lock(8));
        notes.remove_lock(12);
        assert!(notes.0.is_empty(), "{notes:?}");
    }
}
