//! The log of events: at most [`MOST_EVENTS`], none older than [`KEPT_MS`].

use std::collections::{BTreeMap, VecDeque};

use super::Draft;
use crate::api::{EventKind, EventRecord};

/// Events that are kept at most; the oldest are forgotten first.
pub const MOST_EVENTS: usize = 10_000;
/// How long an event is kept: thirty days, in milliseconds.
pub const KEPT_MS: u64 = 30 * 24 * 60 * 60 * 1000;
/// Of all events, refusals are at most so many: whoever is refused again and again does not push out the others.
pub const MOST_REFUSAL_EVENTS: usize = MOST_EVENTS / 10;
/// Refusals that are forgotten in one step for that, which a store takes as a whole.
const FORGOTTEN: usize = 32;

/// The events that are kept, oldest first.
#[derive(Debug, Default)]
pub struct Log {
    events: VecDeque<EventRecord>,
    /// The greatest number that was given.
    newest: u64,
    /// How many of each kind were put here in this life.
    counts: BTreeMap<EventKind, u64>,
}

impl Log {
    /// What was stored, in order.
    pub fn of(events: Vec<EventRecord>) -> Log {
        let newest = events.last().map_or(0, |event| event.id);
        Log { events: events.into(), newest, counts: BTreeMap::new() }
    }

    /// Numbers events that happen at `now`, or happened before; nothing is kept yet.
    pub fn number(&self, now: u64, drafts: Vec<Draft>) -> Vec<EventRecord> {
        let numbered = drafts.into_iter().zip(self.newest + 1..);
        let event = |(draft, id): (Draft, u64)| {
            let Draft { kind, host, function, lease, epoch, by, at_ms, text, .. } = draft;
            let at_ms = at_ms.unwrap_or(now);
            EventRecord { id, at_ms, kind, host, function, lease, epoch, by, text }
        };
        numbered.map(event).collect()
    }

    /// The first that stays when `new` are added at `now`; 0 when none is forgotten.
    pub fn first_kept(&self, now: u64, new: usize) -> u64 {
        let excess = (self.events.len() + new).saturating_sub(MOST_EVENTS);
        let old = |(nth, event): &(usize, &EventRecord)| {
            *nth < excess || event.at_ms.saturating_add(KEPT_MS) <= now
        };
        let gone = self.events.iter().enumerate().take_while(old).last();
        gone.map_or(0, |(_, event)| event.id + 1)
    }

    /// The numbers of the refusals that are forgotten when `new` are added and `first` is the first that stays: the
    /// oldest of those that are too many.
    pub fn forgotten(&self, new: &[EventRecord], first: u64) -> Vec<u64> {
        let is_refusal = |event: &&EventRecord| event.kind == EventKind::Refusal;
        let added = new.iter().filter(is_refusal).count();
        if added == 0 {
            return Vec::new();
        }
        let kept = || self.events.iter().filter(is_refusal).filter(|event| event.id >= first);
        let excess = (kept().count() + added).saturating_sub(MOST_REFUSAL_EVENTS);
        kept().map(|event| event.id).take(excess.min(FORGOTTEN)).collect()
    }

    /// Keeps events that are stored now.
    pub fn put(&mut self, events: &[EventRecord], first: u64) {
        let forgotten = self.forgotten(events, first);
        if !forgotten.is_empty() {
            self.events.retain(|event| !forgotten.contains(&event.id));
        }
        while self.events.front().is_some_and(|event| event.id < first) {
            self.events.pop_front();
        }
        self.newest = events.last().map_or(self.newest, |event| event.id);
        self.events.extend(events.iter().cloned());
        for event in events {
            *self.counts.entry(event.kind).or_default() += 1;
        }
    }

    /// Whether this was said of the lease, or of the host where it is about none.
    pub fn says(&self, draft: &Draft) -> bool {
        let of = (draft.lease, &draft.host, &draft.function);
        let same = |event: &EventRecord| (event.lease, &event.host, &event.function) == of;
        self.events.iter().rev().any(|event| same(event) && event.text == draft.text)
    }

    /// How many events of a kind there were in this life of the control plane.
    pub fn count(&self, kind: EventKind) -> u64 {
        self.counts.get(&kind).copied().unwrap_or_default()
    }

    /// The number of the newest event there ever was.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// The events after number `after`, of one kind or of all, in order; of these the last `most`.
    pub fn after(&self, after: u64, kind: Option<EventKind>, most: usize) -> Vec<EventRecord> {
        let wanted = self.events.iter().rev().take_while(|event| event.id > after);
        let wanted = wanted.filter(|event| kind.is_none_or(|kind| kind == event.kind));
        let mut events: Vec<EventRecord> = wanted.take(most).cloned().collect();
        events.reverse();
        events
    }
}
