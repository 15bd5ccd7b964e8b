//! The interrupts of a model that is lent in a window: a thread waits for them, and stores the messages that their entries of
//! the MSI-X table say, which is plain memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rackbus_memory::{Event, MappedRegisters, SharedMemory};
use rackbus_spec::pcie::msix;

use crate::device::{VECTOR_CONTROL, event};
use crate::error::MetalError;
use crate::image::MsixTable;
use crate::lender::locked;
use crate::messages::{ApicWindow, MASKED, MsiEffect, message};
use crate::ntb::Ntb;
use crate::saved::{VectorDescriptors, VectorState};

/// Between two looks whether a masked vector still is, or nothing is to be stored for a while.
const UNMASKED: Duration = Duration::from_millis(1);

/// The interrupts of a model.
pub(crate) struct LentVectors {
    name: String,
    /// By vector; the model rings them.
    events: Vec<Event>,
    /// The BAR with the MSI-X table, which the borrower has mapped.
    table: SharedMemory,
    place: MsixTable,
    /// Where the pending bits are in it, if they are.
    pending: Option<usize>,
    /// What leads to the borrower's local APICs, and by which addresses. The latter change while `held` is held.
    interrupts: Arc<MappedRegisters>,
    addresses: Mutex<ApicWindow>,
    /// Which are pending. Whoever looks at the table, or stores a message, holds this.
    held: Mutex<Vec<bool>>,
    /// Nothing is stored to the borrower any more. Changed while `held` is held.
    cut: AtomicBool,
    /// Nothing is stored, and nothing is forgotten: another process may go on. Changed while `held` is held.
    paused: AtomicBool,
    stop: Event,
    stopped: AtomicBool,
}

impl LentVectors {
    /// Those of a model whose interrupts are `events`, by the entries of a table.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(
        name: &str,
        events: Vec<Event>,
        (table, place, pending): (SharedMemory, MsixTable, Option<usize>),
        ntb: &Ntb,
    ) -> Result<LentVectors, MetalError> {
        let held = Mutex::new(vec![false; events.len()]);
        Ok(LentVectors {
            name: name.to_owned(),
            events,
            table,
            place,
            pending,
            interrupts: ntb.outbound().clone(),
            addresses: Mutex::new(ApicWindow::whole(ntb.plan())),
            held,
            cut: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            stop: event()?,
            stopped: AtomicBool::new(false),
        })
    }

    /// Those that another process had, of a model `name`.
    ///
    /// # Errors
    /// When what came of them is not what the state says.
    pub fn again(
        name: &str,
        state: &VectorState,
        VectorDescriptors { table, events }: VectorDescriptors,
        ntb: &Ntb,
    ) -> Result<LentVectors, MetalError> {
        let failed = |cause| MetalError::System { what: "an interrupt that was passed on", cause };
        let events = events.into_iter().map(Event::adopt).collect::<std::io::Result<Vec<_>>>();
        let table = SharedMemory::adopt(table, state.table_bytes)?;
        let shape = (table, state.table(), state.pending_at());
        let vectors = LentVectors::new(name, events.map_err(failed)?, shape, ntb)?;
        let mut held = locked(&vectors.held);
        for vector in &state.held {
            if let Some(held) = held.get_mut(usize::from(*vector)) {
                *held = true;
            }
        }
        drop(held);
        Ok(vectors)
    }

    /// Stores no messages, or stores those that came meanwhile.
    pub fn pause(&self, on: bool) {
        let _held = locked(&self.held);
        self.paused.store(on, Ordering::Relaxed);
    }

    /// As another process goes on with them, while they are paused.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn save(&self) -> std::io::Result<(VectorState, VectorDescriptors)> {
        let held = locked(&self.held);
        let held = (0..).zip(&*held).filter_map(|(vector, held)| held.then_some(vector)).collect();
        let copies = self.events.iter().map(|event| event.as_fd().try_clone_to_owned());
        let events = copies.collect::<std::io::Result<Vec<OwnedFd>>>()?;
        let state = VectorState::new(self.place, self.table.len() as u64, self.pending, held);
        Ok((state, VectorDescriptors { table: self.table.descriptor()?, events }))
    }

    /// Has the thread return that runs [`deliver`](LentVectors::deliver).
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.stop.ring();
    }

    /// Masks every entry of the table, which is the borrower's from then on, and forgets what rang before.
    pub fn reset(&self) {
        self.mask_all(locked(&self.held));
    }

    fn mask_all(&self, mut held: MutexGuard<'_, Vec<bool>>) {
        for (vector, event) in self.events.iter().enumerate() {
            let control = self.entry(vector) + VECTOR_CONTROL as usize;
            self.table.whole().store_u32(control, MASKED.to_le(), Ordering::Release);
            event.drain();
        }
        held.fill(false);
        self.show_pending(&held);
    }

    /// Messages lead to the borrower's local APICs by these addresses from here on. What rang before is forgotten, and every
    /// entry of the table masked.
    pub fn lead(&self, addresses: ApicWindow) {
        let held = locked(&self.held);
        *locked(&self.addresses) = addresses;
        self.mask_all(held);
    }

    /// Stores no messages from here on, whatever the borrower unmasks.
    pub fn cut(&self) {
        let _held = locked(&self.held);
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Offset of a vector's entry in its BAR.
    fn entry(&self, vector: usize) -> usize {
        self.place.offset as usize + msix::ENTRY_SIZE as usize * vector
    }

    /// Stores messages as the model rings, until it is stopped.
    pub fn deliver(&self) {
        let mut nowhere = false;
        // Another process may have left some.
        let mut pending = true;
        while !self.stopped.load(Ordering::Relaxed) {
            let mut events = vec![self.stop.as_fd()];
            let paused = self.paused.load(Ordering::Relaxed);
            if !paused {
                events.extend(self.events.iter().map(AsFd::as_fd));
            }
            // Nobody says when a vector is unmasked.
            Event::wait_any(&events, (pending || paused).then_some(UNMASKED.as_nanos() as u64));
            let mut held = locked(&self.held);
            if self.paused.load(Ordering::Relaxed) {
                continue;
            }
            if self.cut.load(Ordering::Relaxed) {
                return;
            }
            let addresses = locked(&self.addresses).clone();
            for (vector, event) in self.events.iter().enumerate() {
                if !event.drain() && !held[vector] {
                    continue;
                }
                // One that is being changed is as one that is masked.
                let outcome = match self.words(vector) {
                    Some(words) => message(words, &addresses),
                    None => MsiEffect::Pending,
                };
                match outcome {
                    MsiEffect::Store { offset, data } => drop(self.interrupts.write(offset, data)),
                    MsiEffect::Nowhere if !std::mem::replace(&mut nowhere, true) => {
                        tracing::warn!(device = self.name, vector, "an interrupt leads nowhere");
                    }
                    MsiEffect::Nowhere | MsiEffect::Pending => {}
                }
                held[vector] = outcome == MsiEffect::Pending;
            }
            self.show_pending(&held);
            pending = held.contains(&true);
        }
    }

    /// Stores the pending bits.
    fn show_pending(&self, pending: &[bool]) {
        let Some(start) = self.pending else { return };
        for (number, vectors) in pending.chunks(32).enumerate() {
            let bits =
                vectors.iter().rev().fold(0u32, |bits, pending| bits << 1 | u32::from(*pending));
            self.table.whole().store_u32(start + 4 * number, bits.to_le(), Ordering::Release);
        }
    }

    /// The words of a vector's entry, which two looks in a row have found: who changes an entry masks it, stores its words
    /// one by one, and unmasks it, and nobody makes it wait for a look that is under way. `None` while it is being changed.
    fn words(&self, vector: usize) -> Option<[u32; 4]> {
        let word = |at: usize| {
            let found = self.table.whole().load_u32(self.entry(vector) + 4 * at, Ordering::Acquire);
            u32::from_le(found.unwrap_or(0))
        };
        let look = || [word(3), word(0), word(1), word(2)];
        let [control, low, high, data] = look();
        let again = look();
        ([control, low, high, data] == again).then_some([low, high, data, control])
    }
}

#[cfg(test)]
impl LentVectors {
    /// So many vectors, whose messages to these addresses are stored to memory, by a table of their own with pending bits at 4096.
    pub(crate) fn in_memory(
        count: u16,
        addresses: std::ops::Range<u64>,
    ) -> (LentVectors, SharedMemory) {
        let length = addresses.end - addresses.start;
        let apics = SharedMemory::create("apics", length).unwrap();
        let interrupts = MappedRegisters::map(apics.as_fd(), length).unwrap();
        let vectors = LentVectors {
            name: "test".to_owned(),
            events: (0..count).map(|_| Event::new().unwrap()).collect(),
            table: SharedMemory::create("table", 8192).unwrap(),
            place: MsixTable { bar: 4, offset: 0, entries: count },
            pending: Some(4096),
            interrupts: Arc::new(interrupts),
            addresses: Mutex::new(ApicWindow { addresses, offset: 0 }),
            held: Mutex::new(vec![false; count.into()]),
            cut: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            stop: Event::new().unwrap(),
            stopped: AtomicBool::new(false),
        };
        (vectors, apics)
    }

    /// Sets an entry of the table, as the borrower does.
    pub(crate) fn set(&self, vector: usize, entry: [u32; 4]) {
        for (number, word) in entry.into_iter().enumerate() {
            let at = self.entry(vector) + 4 * number;
            self.table.whole().store_u32(at, word, Ordering::Release).unwrap();
        }
    }

    /// What the model rings for a vector.
    pub(crate) fn event(&self, vector: usize) -> &Event {
        &self.events[vector]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const ADDRESSES: std::ops::Range<u64> = 0x1_0000_0000..0x1_0000_1000;

    /// Two vectors whose messages are stored to memory.
    fn vectors() -> (Arc<LentVectors>, SharedMemory) {
        let (vectors, apics) = LentVectors::in_memory(2, ADDRESSES);
        (Arc::new(vectors), apics)
    }

    fn until(what: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn interrupts_are_stored_where_their_entries_say_and_held_back_while_masked() {
        let (vectors, apics) = vectors();
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::spawn(move || serving.deliver());
        let word = |at| apics.whole().load_u32(at, Ordering::Acquire).unwrap();
        let pending = || vectors.table.whole().load_u32(4096, Ordering::Acquire).unwrap();

        vectors.events[1].ring();
        until("a masked vector is pending", || pending() == 0b10);
        vectors.set(1, [0x20, 1, 77, 0]);
        until("it is delivered when it is unmasked", || word(0x20) == 77);
        until("it is pending no more", || pending() == 0);

        // One that leads nowhere is lost, and holds nobody up.
        vectors.set(0, [0x20, 2, 5, 0]);
        vectors.events[0].ring();
        vectors.set(1, [0x24, 1, 78, 0]);
        vectors.events[1].ring();
        until("others are delivered", || word(0x24) == 78);
        assert_eq!((word(0x20), pending()), (77, 0));

        // A reset forgets what is pending.
        vectors.set(1, [0x28, 1, 79, 1]);
        vectors.events[1].ring();
        until("a masked vector is pending", || pending() == 0b10);
        vectors.reset();
        assert_eq!(pending(), 0);
        vectors.set(1, [0x28, 1, 80, 0]);
        vectors.set(0, [0x2c, 1, 81, 0]);
        vectors.events[0].ring();
        until("the other one is delivered", || word(0x2c) == 81);
        assert_eq!(word(0x28), 0, "what rang before the reset");

        vectors.stop();
        thread.join().unwrap();
    }

    #[test]
    fn a_vector_that_is_unmasked_after_the_cut_is_not_stored() {
        let (vectors, apics) = vectors();
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::spawn(move || serving.deliver());
        vectors.events[0].ring();
        let pending = || vectors.table.whole().load_u32(4096, Ordering::Acquire).unwrap();
        until("a masked vector is pending", || pending() == 0b01);
        vectors.cut();
        vectors.set(0, [0x20, 1, 77, 0]);
        // It looks every millisecond while one is pending.
        until("nobody delivers after the cut", || thread.is_finished());
        thread.join().unwrap();
        assert_eq!(apics.whole().load_u32(0x20, Ordering::Acquire), Some(0));
    }

    #[test]
    fn while_it_is_paused_nothing_is_stored_and_nothing_is_lost() {
        let (vectors, apics) = vectors();
        vectors.reset();
        let serving = vectors.clone();
        let thread = std::thread::spawn(move || serving.deliver());
        let word = |at| apics.whole().load_u32(at, Ordering::Acquire).unwrap();
        let pending = || vectors.table.whole().load_u32(4096, Ordering::Acquire).unwrap();
        vectors.events[1].ring();
        until("a masked vector is pending", || pending() == 0b10);
        vectors.pause(true);
        vectors.set(0, [0x20, 1, 77, 0]);
        vectors.events[0].ring();
        let (state, descriptors) = vectors.save().unwrap();
        assert_eq!((state.held.clone(), descriptors.events.len()), (vec![1], 2));
        // It looks every millisecond.
        std::thread::sleep(5 * UNMASKED);
        assert_eq!(word(0x20), 0);
        vectors.pause(false);
        until("what came meanwhile is stored", || word(0x20) == 77);
        assert_eq!(pending(), 0b10);
        vectors.stop();
        thread.join().unwrap();
    }
}
