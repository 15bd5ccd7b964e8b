//! One end of a connection's memory between machines: the memory, and its [`Window`], which decides.
//!
//! A snapshot is memory that was read twice with nothing changed in between: then it was so at one moment, and has
//! no store without those that came before it. Who stores without a pause is given some turns, and then taken as
//! it is (see the book for what that means).

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::merge::merge;
use rackbus_memory::sparse;
use rackbus_segment::coherence::{Batch, PAGE, Side, Stores, Violation, Window};

use super::super::objects::Object;

/// How often memory that changes all the time is read again for a snapshot.
const TURNS: usize = 64;

/// One end.
#[derive(Debug)]
pub struct Pair {
    state: Mutex<State>,
    /// Signalled when a batch has taken effect, and when the connection is over.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    window: Window,
    object: Arc<Object>,
    /// The memory is being moved: nothing is read or stored, and what came waits until it is where it will be.
    paused: bool,
    deferred: Option<(u64, Stores)>,
    /// What is kept here has to be told even if it is nothing: the other side waits for it.
    due: bool,
    ended: bool,
}

impl State {
    /// The pages that differ from what the other side has, as they were at one moment.
    fn snapshot(&self) -> BTreeMap<u64, Box<[u8; PAGE]>> {
        let _stores = self.object.hold_stores();
        let mut pages = BTreeMap::new();
        for _ in 0..TURNS {
            if !self.differing(&mut pages) {
                break;
            }
        }
        pages
    }

    /// Reads once, and notes what is another than was noted, or is known of the other side; whether anything was.
    fn differing(&self, pages: &mut BTreeMap<u64, Box<[u8; PAGE]>>) -> bool {
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

    fn apply(&self, stores: &Stores) {
        let _stores = self.object.hold_stores();
        let Ok(region) = self.object.region() else { return };
        merge(region.whole(), stores.iter().map(|(offset, bytes)| (offset as usize, bytes)));
    }
}

/// What a look at the memory has come to.
#[derive(Debug)]
pub enum Looked {
    /// A batch to be sent.
    Batch(Batch),
    /// Nothing was stored to here.
    Same,
    /// One is under way: the next look comes after it.
    Waiting,
}

impl Pair {
    /// An end over an object of `size` bytes. A home tells all that it has at first.
    pub fn new(object: Arc<Object>, side: Side, size: u64, write: bool) -> Arc<Pair> {
        let (window, due) = (Window::new(side, size, write), side == Side::Home);
        let (paused, deferred, ended) = (false, None, false);
        let state = Mutex::new(State { window, object, paused, deferred, due, ended });
        Arc::new(Pair { state, changed: Condvar::new() })
    }

    /// Whether this is its memory.
    pub fn is_of(&self, object: &Arc<Object>) -> bool {
        Arc::ptr_eq(&self.lock().object, object)
    }

    /// Nothing is read or stored from now on, because the memory is being moved.
    pub fn pause(&self) {
        self.lock().paused = true;
    }

    /// The memory is there from now on.
    pub fn adopt(&self, object: Arc<Object>) {
        self.lock().object = object;
    }

    /// Goes on where the memory is now. The number of a batch that has taken effect by that.
    pub fn resume(&self) -> Option<u64> {
        let mut state = self.lock();
        state.paused = false;
        let (batch, stores) = state.deferred.take()?;
        state.apply(&stores);
        Some(batch)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks what was stored here.
    pub fn look(&self) -> Looked {
        let mut state = self.lock();
        if state.window.is_waiting() {
            return Looked::Waiting;
        }
        if state.ended || state.paused || !state.window.tells() {
            return Looked::Same;
        }
        let pages = state.snapshot();
        if pages.is_empty() && !state.due {
            return Looked::Same;
        }
        state.due = false;
        let pages = pages.iter().map(|(page, bytes)| (*page, &bytes[..]));
        state.window.collect(pages).map_or(Looked::Waiting, Looked::Batch)
    }

    /// A part of a batch has come: with its last one it takes effect, and this is true.
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
        let mut state = self.lock();
        match state.window.hear(batch, last, places, data)? {
            Some(stores) if state.paused => state.deferred = Some((batch, stores)),
            Some(stores) => {
                state.apply(&stores);
                return Ok(true);
            }
            None => {}
        }
        Ok(false)
    }

    /// The other side says that a batch took effect.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn applied(&self, batch: u64) -> Result<(), Violation> {
        let outcome = self.lock().window.applied(batch);
        self.changed.notify_all();
        outcome
    }

    /// The number of the last batch that came.
    pub fn heard(&self) -> u64 {
        self.lock().window.numbers().1
    }

    /// Waits until what was stored here before has taken effect on the other side: looks, and hands what is to be
    /// sent to `send`. False when the connection is over, or that took longer than `limit`.
    pub fn flush(&self, limit: Duration, send: impl Fn(&Batch)) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.look() {
                Looked::Same => return !self.lock().ended,
                Looked::Batch(batch) => {
                    send(&batch);
                    return self.wait_applied(batch.number(), until);
                }
                Looked::Waiting => {
                    let under_way = self.lock().window.numbers().0;
                    if !self.wait_applied(under_way, until) {
                        return false;
                    }
                }
            }
        }
    }

    fn wait_applied(&self, batch: u64, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let waiting = |state: &mut State| {
            !state.ended && state.window.is_waiting() && state.window.numbers().0 <= batch
        };
        let waited = self.changed.wait_timeout_while(self.lock(), left, waiting);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.ended && !timeout.timed_out()
    }

    /// The connection is over: nothing is waited for any more.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }
}
