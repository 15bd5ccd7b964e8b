//! Mappings of the window: where which part of which file is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DescriptorKind, GuestAction, GuestState, PAGE, PendingRequest};
use crate::fuse::{self, Errno};

/// A mapping, as QEMU has it, or will have it when it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Mapped {
    object: u64,
    offset: u64,
    length: u64,
    job: u64,
}

/// All of a window's.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Maps {
    window: u64,
    by_place: BTreeMap<u64, Mapped>,
    /// Who waits for a mapping.
    waiting: BTreeMap<u64, PendingRequest>,
    next_job: u64,
}

impl Maps {
    pub(super) fn new(window: u64) -> Maps {
        Maps { window, by_place: BTreeMap::new(), waiting: BTreeMap::new(), next_job: 0 }
    }

    pub(super) fn window(&self) -> u64 {
        self.window
    }

    pub(super) fn len(&self) -> usize {
        self.by_place.len()
    }

    /// Takes out the mapping that begins at a place: from where and how long.
    pub(super) fn take(&mut self, at: u64) -> Option<(u64, u64)> {
        self.by_place.remove(&at).map(|it| (at, it.length))
    }

    pub(super) fn take_all(&mut self) -> Vec<(u64, u64)> {
        let all = std::mem::take(&mut self.by_place);
        all.into_iter().map(|(at, it)| (at, it.length)).collect()
    }

    /// Takes out those of a file.
    pub(super) fn take_of(&mut self, object: u64) -> Vec<(u64, u64)> {
        let of = self.by_place.iter().filter(|(_, it)| it.object == object);
        let places: Vec<u64> = of.map(|(at, _)| *at).collect();
        places.into_iter().filter_map(|at| self.take(at)).collect()
    }

    /// Takes out those that lie in a range, wholly or in part.
    fn take_in(&mut self, at: u64, length: u64) -> Vec<(u64, u64)> {
        let end = at.saturating_add(length);
        let before = self.by_place.range(..end).rev();
        let inside = before.take_while(|(begin, it)| **begin + it.length > at);
        let places: Vec<u64> = inside.map(|(begin, _)| *begin).collect();
        places.into_iter().filter_map(|at| self.take(at)).collect()
    }
}

impl GuestState {
    /// Maps a part of a file; the answer comes with [`mapped`](GuestState::mapped).
    pub(super) fn set_up(
        &mut self,
        asked: PendingRequest,
        node: u64,
        (offset, length, at): (u64, u64, u64),
        actions: &mut Vec<GuestAction>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let object = self.objects.get(&node).ok_or(Errno::BADF)?;
        let DescriptorKind::Memory { size, write } = object.kind else { return Err(Errno::INVAL) };
        // What may only be read cannot be given: only the guest's own kernel would keep it from storing.
        if !write {
            return Err(Errno::ACCES);
        }
        let aligned = [offset, length, at].iter().all(|it| it.is_multiple_of(PAGE));
        let inside = at.checked_add(length).is_some_and(|end| end <= self.maps.window);
        if !aligned || !inside || length == 0 || offset >= size {
            return Err(Errno::INVAL);
        }
        // The kernel maps more than small files have; beyond their end nothing is to be reached.
        let length = length.min(size.next_multiple_of(PAGE) - offset);
        if let Some(here) = self.maps.by_place.get(&at)
            && (here.object, here.offset, here.length) == (node, offset, length)
        {
            // Mapped for loads before, now for stores as well: it was for both.
            return Ok(Some(fuse::done(asked.unique)));
        }
        let ranges = self.maps.take_in(at, length);
        if !ranges.is_empty() {
            actions.push(GuestAction::Unmap { ranges, asked: None });
        }
        if object.revoked {
            // Nothing is there: it reads zeroes, and stores reach nobody.
            return Ok(Some(fuse::done(asked.unique)));
        }
        self.maps.next_job += 1;
        let job = self.maps.next_job;
        self.maps.by_place.insert(at, Mapped { object: node, offset, length, job });
        self.maps.waiting.insert(job, asked);
        actions.push(GuestAction::Map { job, object: node, at, offset, length });
        Ok(None)
    }

    /// A job of mapping ended so.
    pub fn mapped(&mut self, job: u64, done: bool) -> Vec<GuestAction> {
        if !done {
            self.maps.by_place.retain(|_, it| it.job != job);
        }
        let Some(PendingRequest { token, unique }) = self.maps.waiting.remove(&job) else {
            return Vec::new();
        };
        let bytes = if done { fuse::done(unique) } else { fuse::failed(unique, Errno::IO) };
        vec![GuestAction::Answer { token, bytes }]
    }
}
