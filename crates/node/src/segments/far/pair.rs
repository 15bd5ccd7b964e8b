//! One end of a connection's memory between machines: the memory, and its [`ConnectionWindow`], which decides.
//!
//! A snapshot ([`collect`]) is of all memory that two hosts have in common, so that a flag in one segment does not
//! come before data in another. It is memory that was read twice with nothing changed in between: then it was so at
//! one moment, and has no store without those that came before it. Who stores without a pause is given some turns
//! ([`TURNS`]), and then taken as it is.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::merge::merge;
use rackbus_memory::sparse;
use rackbus_segment::coherence::{Batch, ConnectionSide, ConnectionWindow, PAGE, Violation};

use super::super::objects::Object;

/// How often memory that changes all the time is read again for a snapshot.
const TURNS: usize = 64;
/// Stores of more bytes than this take effect first: what is polled is seldom more than a word.
const WORD: usize = 8;

/// One end of memory that two machines have in common.
#[derive(Debug)]
pub struct CommonMemory(Mutex<State>);

#[derive(Debug)]
struct State {
    window: ConnectionWindow,
    object: Arc<Object>,
    /// The memory is being moved: nothing is read, and what is to take effect does when it is where it will be.
    paused: bool,
    /// What is staged was to take effect meanwhile.
    overdue: bool,
    /// What is here has to be told even if it is nothing: the other side waits for it.
    due: bool,
}

/// Pages that differ from what the other side has.
type Pages = BTreeMap<u64, Box<[u8; PAGE]>>;

impl State {
    /// Reads once, and notes what is another than was noted, or is known of the other side; whether anything was.
    fn differing(&self, pages: &mut Pages) -> bool {
        let mut differs = false;
        let Ok(region) = self.object.region() else { return false };
        let memory = region.whole();
        let mut now = [0; PAGE];
        let size = self.window.size();
        sparse::each_data(self.object.fd().as_fd(), size, |from, to| {
            for page in from / PAGE as u64..to.div_ceil(PAGE as u64) {
                let at = page * PAGE as u64;
                let length = (size - at).min(PAGE as u64) as usize;
                let Some(part) = memory.part(at as usize, length) else { return };
                part.copy_to(&mut now[..length]);
                now[length..].fill(0);
                let before = pages.get(&page).map_or(self.window.known(page), |noted| noted);
                if *before != now {
                    pages.insert(page, Box::new(now));
                    differs = true;
                }
            }
        });
        differs
    }

    fn tells(&self) -> bool {
        !self.paused && self.window.tells() && !self.window.is_waiting()
    }

    /// Stores what is staged: what is long first, so that what is most likely a flag comes last, for whoever could
    /// not be kept from the memory meanwhile.
    fn apply(&mut self) -> Option<u64> {
        self.overdue = false;
        let (batch, stores) = self.window.take_effect()?;
        let Ok(region) = self.object.region() else { return Some(batch) };
        let place = |(offset, bytes): (u64, _)| (offset as usize, bytes);
        let is_long = |(_, bytes): &(usize, &[u8])| bytes.len() > WORD;
        merge(region.whole(), stores.iter().map(place).filter(is_long));
        merge(region.whole(), stores.iter().map(place).filter(|it| !is_long(it)));
        Some(batch)
    }
}

/// Takes a snapshot of the memory of `pairs` at one moment: for each of which something is to be sent its place
/// among them, and the batch; and whether that is all that was stored: not of memory that is being moved, or has a
/// batch under way.
pub fn collect(pairs: &[Arc<CommonMemory>]) -> (Vec<(usize, Batch)>, bool) {
    let mut states: Vec<MutexGuard<'_, State>> = pairs.iter().map(|pair| pair.lock()).collect();
    let mut pages: Vec<Pages> = states.iter().map(|_| Pages::new()).collect();
    for _ in 0..TURNS {
        let mut differs = false;
        for (state, pages) in states.iter().zip(&mut pages).filter(|(state, _)| state.tells()) {
            differs |= state.differing(pages);
        }
        if !differs {
            break;
        }
    }
    let (mut batches, mut all) = (Vec::new(), true);
    for (at, (state, pages)) in states.iter_mut().zip(&pages).enumerate() {
        all &= !state.window.tells() || (!state.paused && !state.window.is_waiting());
        if state.tells() && (state.due || !pages.is_empty()) {
            state.due = false;
            let pages = pages.iter().map(|(page, bytes)| (*page, &bytes[..]));
            batches.extend(state.window.collect(pages).map(|batch| (at, batch)));
        }
    }
    (batches, all)
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
        let (paused, overdue) = (false, false);
        Arc::new(CommonMemory(Mutex::new(State { window, object, paused, overdue, due })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is its memory.
    pub fn is_of(&self, object: &Arc<Object>) -> bool {
        Arc::ptr_eq(&self.lock().object, object)
    }

    /// Whether a batch is under way to the other side.
    pub fn is_waiting(&self) -> bool {
        self.lock().window.is_waiting()
    }

    /// Nothing is read or stored from now on, because the memory is being moved.
    pub fn pause(&self) {
        self.lock().paused = true;
    }

    /// The memory is there from now on.
    pub fn adopt(&self, object: Arc<Object>) {
        self.lock().object = object;
    }

    /// Goes on where the memory is now; what was to take effect meanwhile is [due](CommonMemory::catch_up) by that.
    pub fn resume(&self) {
        self.lock().paused = false;
    }

    /// Whether something was to take effect while the memory was moved, and can now.
    pub fn is_overdue(&self) -> bool {
        let state = self.lock();
        state.overdue && !state.paused
    }

    /// What was to take effect meanwhile does: the number of its batch.
    pub fn catch_up(&self) -> Option<u64> {
        let mut state = self.lock();
        if state.overdue && !state.paused { state.apply() } else { None }
    }

    /// A part of a batch has come; whether it is whole by that, and can [take effect](CommonMemory::take_effect).
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

    /// The range that changes when what came takes effect.
    pub fn staged_range(&self) -> Option<(u64, u64)> {
        self.lock().window.staged_range()
    }

    /// What came takes effect: the number of its batch, unless it does later.
    pub fn take_effect(&self) -> Option<u64> {
        let mut state = self.lock();
        state.overdue = state.paused;
        if state.paused { None } else { state.apply() }
    }

    /// The other side says that a batch took effect.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn applied(&self, batch: u64) -> Result<(), Violation> {
        self.lock().window.applied(batch)
    }
}
