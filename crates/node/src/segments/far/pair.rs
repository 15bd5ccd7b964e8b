//! One end of a connection's memory between machines: the memory, and its [`ConnectionWindow`], which decides.
//!
//! A snapshot ([`collect`]) is of all memory that two hosts have in common, so that a flag in one segment does not
//! come before data in another. It is memory that was read twice with nothing changed in between: then it was so at
//! one moment, and has no store without those that came before it. Who stores without a pause is given some turns
//! ([`TURNS`], for at most [`LONG`]), and then taken as it is.
//!
//! *Moves.* Memory that is being moved is read all the while: where it was, and then where it will be, which has the same
//! bytes. Nothing takes effect in it: what came for it waits until it is where it will be, and with it all that takes
//! effect in one with it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::merge::merge;
use rackbus_memory::{Region, sparse};
use rackbus_segment::coherence::{
    Batch, ConnectionSide, ConnectionWindow, PAGE, Stores, Violation,
};

use super::super::objects::Object;
use super::copying::{CopiesByPlace, QueuedCopy};

/// How often memory that changes all the time is read again for a snapshot.
const TURNS: usize = 64;
/// And for how long, after the second turn: much memory takes long to read, and who waits for a flush waits for this.
const LONG: Duration = Duration::from_millis(100);
/// Stores of more bytes than this take effect first: what is polled is seldom more than a word.
const WORD: usize = 8;

/// One end of memory that two machines have in common.
#[derive(Debug)]
pub struct CommonMemory {
    state: Mutex<PairState>,
    /// Apart from the state, which is locked for as long as all of the memory is read: a lookup of whose memory it is
    /// does not wait until that has ended.
    object: Mutex<Arc<Object>>,
    /// The memory is being moved: what is to take effect does when it is where it will be. Read with the state locked, so
    /// that nothing takes effect any more when that was locked once after this was set.
    paused: AtomicBool,
}

#[derive(Debug)]
pub(super) struct PairState {
    window: ConnectionWindow,
    /// What is staged was to take effect meanwhile.
    overdue: bool,
    /// What is here has to be told even if it is nothing: the other side waits for it.
    due: bool,
}

/// Pages that differ from what the other side has.
type Pages = BTreeMap<u64, Box<[u8; PAGE]>>;

impl PairState {
    /// Reads once, and notes what is another than was noted, or is known of the other side; whether anything was.
    /// But for `overwritten` pages, of which all bytes are told anyway.
    fn differing(&self, object: &Object, overwritten: &Range<u64>, pages: &mut Pages) -> bool {
        let (mut differs, mut next) = (false, 0);
        let Ok(region) = object.region() else { return false };
        let memory = region.whole();
        let mut now = [0; PAGE];
        let size = self.window.size();
        sparse::each_data(object, size, |from, to| {
            let (first, end) = (from / PAGE as u64, to.div_ceil(PAGE as u64));
            differs |= self.emptied(next..first, overwritten, pages);
            next = end;
            for (page, known) in self.window.each_known(first..end) {
                if overwritten.contains(&page) {
                    continue;
                }
                let at = page * PAGE as u64;
                let length = (size - at).min(PAGE as u64) as usize;
                let Some(part) = memory.part(at as usize, length) else { return };
                let before = &pages.get(&page).map_or(known, |it| it)[..length];
                if part.has_bytes(before) {
                    continue;
                }
                part.copy_to(&mut now[..length]);
                now[length..].fill(0);
                differs |= self.note(page, &now, pages);
            }
        });
        differs | self.emptied(next..size.div_ceil(PAGE as u64), overwritten, pages)
    }

    /// Notes those of `holes`, pages that the file does not have (any more), that were noted or are known to be something
    /// else than zeroes; whether there are any. They are not read: that would make the file have them again.
    fn emptied(&self, holes: Range<u64>, overwritten: &Range<u64>, pages: &mut Pages) -> bool {
        if holes.is_empty() {
            return false;
        }
        let noted = pages.range(holes.clone()).map(|(page, _)| *page);
        let mut found: Vec<u64> = self.window.known_pages(holes).chain(noted).collect();
        found.retain(|page| !overwritten.contains(page));
        found.into_iter().fold(false, |differs, page| self.note(page, &[0; PAGE], pages) | differs)
    }

    /// Notes what a page has, unless that was noted or is known of the other side; whether it did.
    fn note(&self, page: u64, now: &[u8; PAGE], pages: &mut Pages) -> bool {
        let before = pages.get(&page).map_or(self.window.known(page), |noted| noted);
        let differs = before != now;
        if differs {
            pages.insert(page, Box::new(*now));
        }
        differs
    }

    fn tells(&self) -> bool {
        self.window.tells() && !self.window.is_waiting()
    }

    /// What is staged next is to be stored now: the number of its batch, and where.
    fn take_staged(&mut self, object: &Object) -> Option<(u64, Stores, Option<Arc<Region>>)> {
        self.overdue = false;
        let (batch, stores) = self.window.take_effect()?;
        Some((batch, stores, object.region().ok()))
    }
}

/// Stores what is staged of all `pairs`, whose `states` these are, or of none while memory of one of them is being moved:
/// the numbers of their batches, in the order in which they took effect. What is long comes first, so that what is most likely a flag comes last, for whoever could
/// not be kept from the memory meanwhile.
fn apply(pairs: &[Arc<CommonMemory>], states: &mut [MutexGuard<'_, PairState>]) -> Vec<Vec<u64>> {
    let mut numbers = vec![Vec::new(); states.len()];
    if pairs.iter().any(|pair| pair.is_paused()) {
        states.iter_mut().for_each(|state| state.overdue = true);
        return numbers;
    }
    while store_next(pairs, states, &mut numbers) {}
    numbers
}

/// Stores what is staged first of all `pairs`, and notes the numbers of the batches; whether there was any.
fn store_next(
    pairs: &[Arc<CommonMemory>],
    states: &mut [MutexGuard<'_, PairState>],
    numbers: &mut [Vec<u64>],
) -> bool {
    let both = pairs.iter().zip(states);
    let taken: Vec<_> = both.map(|(pair, state)| state.take_staged(&pair.object())).collect();
    for long in [true, false] {
        for (_, stores, region) in taken.iter().flatten() {
            let Some(region) = region else { continue };
            let place = |(offset, bytes): (u64, _)| (offset as usize, bytes);
            let chosen = |(_, bytes): &(usize, &[u8])| (bytes.len() > WORD) == long;
            merge(region.whole(), stores.iter().map(place).filter(chosen));
        }
    }
    for (numbers, taken) in numbers.iter_mut().zip(&taken) {
        numbers.extend(taken.as_ref().map(|(batch, ..)| *batch));
    }
    taken.iter().any(Option::is_some)
}

fn lock_all(pairs: &[Arc<CommonMemory>]) -> Vec<MutexGuard<'_, PairState>> {
    pairs.iter().map(|pair| pair.lock()).collect()
}

/// What came for these takes effect, as a whole: the numbers of the batches, unless it does later. The caller has the
/// effects for itself.
pub fn take_effect(pairs: &[Arc<CommonMemory>]) -> Vec<Vec<u64>> {
    apply(pairs, &mut lock_all(pairs))
}

/// What was to take effect while memory was moved does, as a whole, unless some of it still cannot: the numbers of the
/// batches. The caller has the effects for itself.
pub fn catch_up(pairs: &[Arc<CommonMemory>]) -> Vec<Vec<u64>> {
    let mut states = lock_all(pairs);
    match states.iter().all(|state| state.overdue) {
        true => apply(pairs, &mut states),
        false => vec![Vec::new(); states.len()],
    }
}

/// Takes a snapshot of the memory of `pairs` at one moment: for each of which something is to be sent its place
/// among them, and the batch; and whether that is all that was stored: not of memory that has a batch under way. Before
/// that, it makes those of `copies`, each to the pair of its place, that can be: to memory that has nothing under way. These
/// are taken out.
pub fn collect(
    pairs: &[Arc<CommonMemory>],
    copies: &mut CopiesByPlace,
) -> (Vec<(usize, Batch)>, bool) {
    let mut states = lock_all(pairs);
    let mut pages: Vec<Pages> = states.iter().map(|_| Pages::new()).collect();
    let mut copied = make(pairs, &states, copies);
    let begun = Instant::now();
    for turn in 0..TURNS {
        if turn > 1 && begun.elapsed() > LONG {
            break;
        }
        let mut differs = false;
        let all = pairs.iter().zip(&states).zip(&mut pages).enumerate();
        for (at, ((pair, state), pages)) in all.filter(|(_, ((_, state), _))| state.tells()) {
            let overwritten = copied.get(&at).map_or(0..0, |copied| copied.overwritten.clone());
            differs |= state.differing(&pair.object(), &overwritten, pages);
        }
        if !differs {
            break;
        }
    }
    let (mut batches, mut all) = (Vec::new(), true);
    for (at, (state, pages)) in states.iter_mut().zip(&pages).enumerate() {
        all &= !state.window.tells() || !state.window.is_waiting();
        let copied = copied.remove(&at);
        if state.tells() && (state.due || !pages.is_empty() || copied.is_some()) {
            state.due = false;
            let pages = pages.iter().map(|(page, bytes)| (*page, &bytes[..]));
            let copied = copied.map_or((0, Vec::new()), |copied| copied.told);
            let batch = state.window.collect_with(pages, copied);
            batches.extend(batch.map(|batch| (at, batch)));
        }
    }
    (batches, all)
}

/// A batch of each of `copies` that can be made, as [`collect`] makes them, without a look at what else was stored.
pub fn collect_copies(
    pairs: &[Arc<CommonMemory>],
    copies: &mut CopiesByPlace,
) -> Vec<(usize, Batch)> {
    let mut states = lock_all(pairs);
    let made = make(pairs, &states, copies);
    let batch =
        |(at, made): (usize, MadeCopy)| Some((at, states[at].window.collect_with([], made.told)?));
    made.into_iter().filter_map(batch).collect()
}

/// A copy that was made here: where it is and its bytes, and the pages of which nothing else is told.
struct MadeCopy {
    told: (u64, Vec<u8>),
    overwritten: Range<u64>,
}

/// Makes those of `copies` that can be, and takes them out: those to memory that has nothing under way.
fn make(
    pairs: &[Arc<CommonMemory>],
    states: &[MutexGuard<'_, PairState>],
    copies: &mut CopiesByPlace,
) -> BTreeMap<usize, MadeCopy> {
    let (waiting, ready): (CopiesByPlace, CopiesByPlace) =
        std::mem::take(copies).into_iter().partition(|(at, _)| states[*at].window.is_waiting());
    *copies = waiting;
    let made = |(at, copy): (usize, QueuedCopy)| {
        let overwritten = copy.overwritten_pages();
        (at, MadeCopy { told: copy.make(&pairs[at].object()), overwritten })
    };
    ready.into_iter().map(made).collect()
}

impl CommonMemory {
    /// An end over an object of `size` bytes. A home tells all that it has at first.
    pub fn new(
        object: Arc<Object>,
        side: ConnectionSide,
        size: u64,
        write: bool,
    ) -> Arc<CommonMemory> {
        let (window, due) =
            (ConnectionWindow::new(side, size, write), side == ConnectionSide::Home);
        let state = Mutex::new(PairState { window, overdue: false, due });
        Arc::new(CommonMemory { state, object: Mutex::new(object), paused: AtomicBool::new(false) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PairState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is its memory.
    pub fn is_of(&self, object: &Arc<Object>) -> bool {
        Arc::ptr_eq(&self.object(), object)
    }

    /// The memory of this host's side, which is another one after a move.
    pub fn object(&self) -> Arc<Object> {
        self.object.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a batch is under way to the other side.
    pub fn is_waiting(&self) -> bool {
        self.lock().window.is_waiting()
    }

    /// Nothing takes effect from when this has [settled](CommonMemory::settle), because the memory is being moved.
    pub fn pause(&self) {
        self.paused.store(true, Ordering::Release);
    }

    /// Waits for what takes effect now, and for a snapshot that is being taken: the memory is not stored to any more that
    /// was [paused](CommonMemory::pause) before, and not read any more where it was before it was
    /// [adopted](CommonMemory::adopt). Takes as long as reading all that two hosts have in common.
    pub fn settle(&self) {
        drop(self.lock());
    }

    /// Whether a batch that was sent has taken effect at the other side.
    pub fn has_applied(&self, batch: u64) -> bool {
        self.lock().window.has_applied(batch)
    }

    /// Makes a part that goes on with a copy: a batch of it, behind those that are under way. `None` where these are as many
    /// as may be.
    pub(super) fn go_on_with(&self, copy: QueuedCopy) -> Option<Batch> {
        let mut state = self.lock();
        let told = copy.make(&self.object());
        state.window.go_on_with(told)
    }

    /// Whether the memory is being moved.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// The memory is there from now on. The memory of before may be emptied when this has
    /// [settled](CommonMemory::settle): what was read of it then was never stored.
    pub fn adopt(&self, object: Arc<Object>) {
        *self.object.lock().unwrap_or_else(PoisonError::into_inner) = object;
    }

    /// Goes on where the memory is now; what was to take effect meanwhile is [due](catch_up) by that.
    pub fn resume(&self) {
        self.paused.store(false, Ordering::Release);
    }

    /// Whether something was to take effect while memory was moved, and has not.
    pub fn is_overdue(&self) -> bool {
        self.lock().overdue
    }

    /// A part of a batch has come; whether it is whole by that, and can [take effect](take_effect).
    ///
    /// # Errors
    /// [`Violation`].
    pub fn hear(
        &self,
        batch: u64,
        last: bool,
        places: &[(u64, u32)],
        data: &[u8],
    ) -> Result<bool, Violation> {
        self.lock().window.hear(batch, last, places, data)
    }

    /// As [`hear`](CommonMemory::hear), of what was copied.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn hear_copied(
        &self,
        batch: u64,
        last: bool,
        offset: u64,
        data: Cow<'_, [u8]>,
    ) -> Result<bool, Violation> {
        self.lock().window.hear_copied(batch, last, offset, data)
    }

    /// Whether something that was copied takes effect with what came.
    pub fn has_copied(&self) -> bool {
        self.lock().window.has_copied()
    }

    /// Size of the memory in bytes, where bytes may be copied to it here.
    pub fn copied_to(&self) -> Option<u64> {
        let state = self.lock();
        state.window.tells().then(|| state.window.size())
    }

    /// The range that changes when what came takes effect, without what was copied.
    pub fn staged_range(&self) -> Option<(u64, u64)> {
        self.lock().window.staged_range()
    }

    /// The other side says that a batch took effect.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn applied(&self, batch: u64) -> Result<(), Violation> {
        self.lock().window.applied(batch)
    }
}

#[cfg(test)]
mod tests {
    use rackbus_segment::Objects;

    use super::super::super::objects::ObjectStore;
    use super::*;

    /// Sends what differs, which takes effect at once: where each store is, and its bytes.
    fn send(pair: &Arc<CommonMemory>) -> Vec<(u64, Vec<u8>)> {
        let (batches, all) = collect(std::slice::from_ref(pair), &mut BTreeMap::new());
        assert!(all, "something is left");
        let mut sent = Vec::new();
        for (_, batch) in &batches {
            pair.applied(batch.number()).unwrap();
            sent.extend(batch.stores().iter().map(|(offset, bytes)| (offset, bytes.to_vec())));
        }
        sent
    }

    #[test]
    fn a_page_that_is_taken_away_after_it_was_sent_is_sent_as_zeroes() {
        const PAGES: usize = 6;
        let size = (PAGES * PAGE) as u64;
        let mut store = ObjectStore::default();
        let id = store.memory(size).unwrap();
        let object = store.get(id).unwrap().clone();
        let memory = object.region().unwrap();
        let pair = CommonMemory::new(object.clone(), ConnectionSide::Home, size, true);
        let places = |pages: &[usize], value: u8| -> Vec<(u64, Vec<u8>)> {
            pages.iter().map(|page| ((page * PAGE + 8) as u64, vec![value; 4])).collect()
        };
        assert_eq!(send(&pair), [], "a home tells all at first, and there is nothing");
        for gone in [&[0, 5][..], &[0, 2, 5]] {
            for page in [0, 2, 5] {
                memory.whole().part(page * PAGE + 8, 4).unwrap().copy_from(&[7; 4]);
            }
            send(&pair);
            for page in gone {
                sparse::empty(&*object, (page * PAGE) as u64, PAGE as u64).unwrap();
            }
            assert_eq!(send(&pair), places(gone, 0));
            assert_eq!(send(&pair), []);
        }
        for page in [0, 2, 5] {
            memory.whole().part(page * PAGE + 8, 4).unwrap().copy_from(&[7; 4]);
        }
        assert_eq!(send(&pair), places(&[0, 2, 5], 7));
    }

    /// Pages that were noted in one turn, and are taken away before the next.
    #[test]
    fn a_page_that_is_taken_away_while_a_snapshot_is_taken_is_noted_as_zeroes() {
        let size = 3 * PAGE as u64;
        let mut store = ObjectStore::default();
        let id = store.memory(size).unwrap();
        let object = store.get(id).unwrap().clone();
        object.region().unwrap().whole().part(PAGE, 4).unwrap().copy_from(&[7; 4]);
        let pair = CommonMemory::new(object.clone(), ConnectionSide::Home, size, true);
        let (state, mut pages) = (pair.lock(), Pages::new());
        assert!(state.differing(&object, &(0..0), &mut pages) && pages[&1][0] == 7);
        sparse::empty(&*object, 0, size).unwrap();
        assert!(state.differing(&object, &(0..0), &mut pages), "it is as it was noted");
        assert_eq!(*pages[&1], [0; PAGE]);
        assert!(!state.differing(&object, &(0..0), &mut pages));
    }
}
