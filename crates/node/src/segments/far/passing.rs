//! Passing flushes on: what a connector on one machine flushed to memory of this host is flushed to the others that have it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rackbus_segment::flushing::FlushLedger;
use rackbus_segment::message::CarriedMessage;

use super::super::objects::Object;
use super::super::outbox::LetterQueue;
use super::{CommonMemory, End, Far, FarConversation, FarState, flush_each};
use crate::sequencer::essential_thread;

/// All other hosts that this one has memory in common with.
#[derive(Debug, Default)]
pub struct FlushTargets(Mutex<Vec<Weak<Far>>>);

impl FlushTargets {
    /// Has flushes passed on to this host as well, and forgets those that are gone.
    pub fn add(&self, far: &Arc<Far>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|far| far.strong_count() > 0);
        all.push(Arc::downgrade(far));
    }

    fn all(&self) -> Vec<Arc<Far>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}

/// What a connector's host asked to be passed on: at most one at a time, by a thread that there is as long as it takes.
#[derive(Debug, Default)]
pub(super) struct PassingOn {
    asked: u64,
    answered: u64,
}

/// How many connections lead to each of some memories: to an object, by where it is, which is no other one's meanwhile.
#[derive(Debug)]
pub(super) struct Leading(HashMap<*const Object, (Arc<Object>, usize)>);

impl Leading {
    fn of<'a>(pairs: impl Iterator<Item = &'a Arc<CommonMemory>>) -> Leading {
        let objects = pairs.map(|pair| pair.object());
        Leading(objects.map(|object| (Arc::as_ptr(&object), (object, 0))).collect())
    }

    /// Counts those that a host has.
    fn count(&mut self, of: &FarState) {
        for end in of.ends.values() {
            if let End::Memory(pair) = end
                && let Some((_, count)) = self.0.get_mut(&Arc::as_ptr(&pair.object()))
            {
                *count += 1;
            }
        }
    }

    /// Whether no connection but this one leads to its memory.
    pub fn is_alone(&self, pair: &CommonMemory) -> bool {
        self.0.get(&Arc::as_ptr(&pair.object())).is_some_and(|(_, count)| *count <= 1)
    }
}

impl CommonMemory {
    /// Whether another host has the same memory, or may have. While it is moved, of several hosts' connections to it some
    /// lead to where it was still.
    fn is_of_any(&self, objects: &[Arc<Object>]) -> bool {
        self.is_paused() || objects.iter().any(|object| self.is_of(object))
    }
}

impl Far {
    /// Of the memory of each of these, how many connections of other machines lead to it: with more than one, a further
    /// machine has it, or the same machine by another connection, for which something else stands there.
    pub(super) fn leading<'a>(
        &self,
        pairs: impl Iterator<Item = &'a Arc<CommonMemory>>,
    ) -> Leading {
        let mut leading = Leading::of(pairs);
        if leading.0.is_empty() {
            return leading;
        }
        leading.count(&self.lock());
        for far in self.passing.all() {
            if !std::ptr::eq(&*far, self) {
                leading.count(&far.lock());
            }
        }
        leading
    }

    /// The other side asks for what took effect here to be flushed to further machines.
    pub(super) fn pass_on(
        &self,
        way: FarConversation,
        outbox: &Arc<LetterQueue>,
        number: u64,
    ) -> Result<(), String> {
        let mut state = self.lock();
        let PassingOn { asked, answered } = state.passing_on;
        if way != FarConversation::ToConnector || asked != answered {
            return Err("a flush to be passed on before the last one was".to_owned());
        }
        state.passing_on.asked = asked + 1;
        drop(state);
        let Some(far) = self.own.upgrade() else {
            return Err("a flush to be passed on in a conversation that is over".to_owned());
        };
        let outbox = outbox.clone();
        let pass = move || far.flush_others(&outbox, number);
        let started = essential_thread("passing on", pass);
        started.map_err(|error| format!("cannot pass a flush on: {error}"))
    }

    /// Flushes to all machines that have memory which the other side is connected to, and says so when they have it, or
    /// have it no more: to further ones, and to the other side itself where that has several connections.
    fn flush_others(&self, outbox: &Arc<LetterQueue>, number: u64) {
        let way = FarConversation::ToConnector;
        let others = || -> Vec<Arc<Far>> {
            let all = self.lock().memories();
            let own = all.iter().filter(|(link, _)| link.0 == way);
            let objects: Vec<Arc<Object>> = own.map(|(_, pair)| pair.object()).collect();
            let mut all = self.passing.all();
            all.retain(|far| match std::ptr::eq(&**far, self) {
                true => objects.len() > 1,
                false => far.has_any(&objects),
            });
            all
        };
        let mut left = others();
        while !left.is_empty() && self.lock().is_with(way, outbox) {
            // One that does not answer is given up in time, or takes it later: the other side does not wait so long.
            let mut done = flush_each(&left, FlushLedger::has_taken_effect).into_iter();
            left.retain(|_| done.next() != Some(true));
            let still = others();
            left.retain(|far| still.iter().any(|it| Arc::ptr_eq(it, far)));
        }
        let mut state = self.lock();
        if state.is_with(way, outbox) {
            state.passing_on.answered = state.passing_on.asked;
            state.send(way, &CarriedMessage::PassedOn { number });
        }
    }

    /// Whether a connection leads there with one of these.
    fn has_any(&self, objects: &[Arc<Object>]) -> bool {
        let pairs = self.lock().memories();
        pairs.iter().any(|(_, pair)| pair.is_of_any(objects))
    }
}
