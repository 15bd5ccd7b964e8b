//! Registers as plain memory: a *polled register window*.
//!
//! A register that is trapped costs its driver a message and its answer. Where a function's registers are values
//! and not events, they can be memory instead that the driver and the function's engine have in common: the driver
//! stores and loads, the engine looks at the words that a driver writes, and stores those that the device changes.
//! Nothing traps, and nothing is sent, so the same works where there is nobody to trap or to send, as through the
//! window of an NTB.
//!
//! A class of devices qualifies when
//!
//! * reading a register changes nothing,
//! * what a write means is in the value that it leaves: writing the same value again means nothing more, and of two
//!   writes without an answer between them the first may go unseen.
//!
//! | class | qualifies | why |
//! | --- | --- | --- |
//! | NVMe | yes, with MSI-X, MSI or polled completions | CC, AQA, ASQ, ACQ and doorbells are values, and a driver waits for CSTS between two meanings of CC. INTMS and INTMC are events; they have no effect with MSI-X, and are not looked at here |
//! | accelerator | yes | CONTROL, a queue pair's ENABLE and the doorbells are values, and a driver waits for STATUS and STATE between two meanings of the first two |
//! | virtio | no | `queue_select` and `device_feature_select` are events, reading `isr` clears it, and notifications carry no value |
//! | memory | has no registers | its BAR is memory to begin with |
//!
//! All that the driver stores is hostile, as in every memory that is shared: each word is loaded once and checked.
//! Memory of a former user is [retired](PolledRegisters::retire): all ones, as a device that was pulled out reads,
//! and nobody looks at it any more.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rackbus_memory::{RegionError, SharedMemory};
use serde::{Deserialize, Serialize};

use crate::function::Work;

/// Why the registers of a BAR are not available as memory.
#[derive(Debug, thiserror::Error)]
pub enum NotPolled {
    /// Reads or writes of registers of this class have effects that memory has not.
    #[error(
        "registers of functions of this class are not plain values; they are only accessible by messages"
    )]
    Class,
    /// A read of one of its registers makes data durable.
    #[error(
        "reading PMRSTS makes a persistent memory region durable, which a load from memory does not; \
         registers of such a drive are only accessible by messages"
    )]
    Barrier,
    /// There are no registers behind that BAR.
    #[error("BAR {0} has no registers that can be polled")]
    Bar(u8),
    /// The function serves a front elsewhere.
    #[error("the function's front runs elsewhere")]
    Elsewhere,
    /// There is no memory or no descriptor left, or what was given is no such memory.
    #[error("the registers' memory: {0}")]
    Memory(#[from] RegionError),
    /// A descriptor could not be obtained.
    #[error("a descriptor for the registers' memory: {0}")]
    Descriptor(#[from] std::io::Error),
    /// What another process knew of them is of other registers.
    #[error("what is known of the registers' words is of other registers")]
    State,
}

/// Registers in memory that a driver has mapped.
#[derive(Debug)]
pub struct PolledRegisters(SharedMemory);

impl PolledRegisters {
    /// The largest window that is taken from somebody else, in bytes.
    const LARGEST: u64 = 1 << 20;

    /// Registers of `length` bytes, all zero.
    ///
    /// # Errors
    /// [`NotPolled`] when the system has no memory or descriptors left.
    pub fn new(length: u64) -> Result<PolledRegisters, NotPolled> {
        Ok(PolledRegisters(SharedMemory::create("registers", length)?))
    }

    /// Those that another process made and passed on.
    ///
    /// # Errors
    /// [`NotPolled`] when they have another length than it says, or somebody could truncate them.
    pub fn adopt(file: OwnedFd, length: u64) -> Result<PolledRegisters, NotPolled> {
        if !(4096..=PolledRegisters::LARGEST).contains(&length) {
            return Err(RegionError::OutOfFile { offset: 0, length, file_size: length }.into());
        }
        Ok(PolledRegisters(SharedMemory::adopt(file, length)?))
    }

    /// The memory, to be mapped by a driver.
    pub fn memory(&self) -> &SharedMemory {
        &self.0
    }

    /// A descriptor for a driver, and the registers' length in bytes.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn descriptor(&self) -> Result<(OwnedFd, u64), NotPolled> {
        Ok((self.0.descriptor()?, self.0.len() as u64))
    }

    /// The word at `offset`: what was stored before it is seen after this. 0 outside of the registers.
    #[inline]
    pub fn load(&self, offset: u64) -> u32 {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.0.whole().load_u32(offset, Ordering::Acquire).unwrap_or(0)
    }

    /// The two words from `offset` on, the lower one first. They may be of two stores.
    pub fn load_pair(&self, offset: u64) -> u64 {
        u64::from(self.load(offset)) | u64::from(self.load(offset.saturating_add(4))) << 32
    }

    /// Stores a word: who loads it sees what was stored before it. Outside of the registers nothing is stored.
    #[inline]
    pub fn store(&self, offset: u64, value: u32) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        // Out of range there is nothing to store to.
        let _ = self.0.whole().store_u32(offset, value, Ordering::Release);
    }

    /// Stores two words, the lower one first.
    pub fn store_pair(&self, offset: u64, value: u64) {
        self.store(offset, value as u32);
        self.store(offset.saturating_add(4), (value >> 32) as u32);
    }

    /// The device is gone for whoever has this mapped: every register reads all ones. What is stored afterwards
    /// nobody looks at.
    pub fn retire(&self) {
        self.0.whole().fill(0xff);
    }
}

/// Registers that a model looks at, with what it knows of each word.
///
/// A driver never stores all ones to the word at `mark`. Where that has all ones, the device was given back or its
/// lender is taken for lost, and whoever found that has [retired](PolledRegisters::retire) the registers: nothing new
/// is in that word, and nothing is [told](WatchedRegisters::tell) any more. A reset [shows](WatchedRegisters::show) them
/// anew, because a driver that did store all ones there finds its function again by that.
#[derive(Debug)]
pub struct WatchedRegisters {
    registers: PolledRegisters,
    /// Each word as it was last loaded or stored here.
    seen: Vec<u32>,
    mark: u64,
    again: LookAgain,
}

impl WatchedRegisters {
    /// Registers of `length` bytes, all zero, which somebody begins to look at at `now_ns`.
    ///
    /// # Errors
    /// As [`PolledRegisters::new`].
    pub fn new(length: u64, mark: u64, now_ns: u64) -> Result<WatchedRegisters, NotPolled> {
        let registers = PolledRegisters::new(length)?;
        let seen = vec![0; registers.0.len() / 4];
        Ok(WatchedRegisters { registers, seen, mark, again: LookAgain::after_work(now_ns) })
    }

    /// Goes on at `now_ns` with the registers in `file`, which another process [looked at](WatchedRegisters::state) before:
    /// what their driver has stored since then is news.
    ///
    /// # Errors
    /// As [`PolledRegisters::adopt`], and [`NotPolled::State`] when the state names words that they do not have.
    pub fn resume(
        file: OwnedFd,
        state: &WatchedState,
        now_ns: u64,
    ) -> Result<WatchedRegisters, NotPolled> {
        let registers = PolledRegisters::adopt(file, state.length)?;
        let mut seen = vec![0; registers.0.len() / 4];
        for (word, value) in &state.seen {
            let slot = usize::try_from(*word).ok().and_then(|word| seen.get_mut(word));
            *slot.ok_or(NotPolled::State)? = *value;
        }
        let (mark, again) = (state.mark, LookAgain::after_work(now_ns));
        Ok(WatchedRegisters { registers, seen, mark, again })
    }

    /// What is known of each word, for a process that goes on with the registers. Their memory goes along beside it.
    pub fn state(&self) -> WatchedState {
        let words = (0u32..).zip(&self.seen).filter(|(_, seen)| **seen != 0);
        let seen = words.map(|(word, seen)| (word, *seen)).collect();
        WatchedState { length: self.registers.0.len() as u64, mark: self.mark, seen }
    }

    /// Whether these are registers of `length` bytes with the word at `mark` that no driver fills with ones.
    pub fn are(&self, length: u64, mark: u64) -> bool {
        self.registers.0.len() as u64 == length && self.mark == mark
    }

    /// The memory, as its driver has it.
    pub fn registers(&self) -> &PolledRegisters {
        &self.registers
    }

    /// Whether somebody else has retired them.
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.registers.load(self.mark) == u32::MAX
    }

    /// What the driver has stored at `offset`, if that is another value than before. Nothing outside of the registers.
    #[inline]
    pub fn news(&mut self, offset: u64) -> Option<u32> {
        let value = self.registers.load(offset);
        if offset == self.mark && value == u32::MAX {
            return None;
        }
        let seen = self.seen.get_mut(usize::try_from(offset / 4).ok()?)?;
        (std::mem::replace(seen, value) != value).then_some(value)
    }

    /// Stores a word, whatever is there. Its driver stores nothing there meanwhile.
    pub fn show(&mut self, offset: u64, value: u32) {
        let at = usize::try_from(offset / 4).unwrap_or(usize::MAX);
        if let Some(seen) = self.seen.get_mut(at) {
            *seen = value;
            self.registers.store(offset, value);
        }
    }

    /// Stores a word that only the device changes, if it has.
    #[inline]
    pub fn tell(&mut self, offset: u64, value: u32) {
        let at = usize::try_from(offset / 4).unwrap_or(usize::MAX);
        if self.seen.get(at).is_some_and(|seen| *seen != value) && !self.is_retired() {
            self.show(offset, value);
        }
    }

    /// What a poll that did `work` at `now_ns` leads to where nobody rings: another look, in time.
    #[inline]
    pub fn look_again(&mut self, work: Work, now_ns: u64) -> Work {
        let wait = self.again.wait_ns(now_ns);
        match work {
            Work::Done => {
                self.again = LookAgain::after_work(now_ns);
                Work::Done
            }
            Work::Idle | Work::Asleep(None) => Work::Watch(wait),
            Work::Watch(limit) => Work::Watch(limit.min(wait)),
            Work::Asleep(Some(at)) => Work::Watch(at.saturating_sub(now_ns).min(wait)),
        }
    }
}

/// What a model knows of registers that it looks at, beside their memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WatchedState {
    /// Bytes of the registers.
    length: u64,
    /// Offset of the word in which no driver stores all ones.
    mark: u64,
    /// The words that were not zero when they were last looked at: their numbers and values.
    seen: Vec<(u32, u32)>,
}

impl WatchedState {
    /// Bytes of the registers.
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// How long nobody needs to look at registers, by how long nothing has come (pure).
///
/// The wait is an eighth of the time without work, so that what comes is late by an eighth of the pause before it at
/// most; between bounds, so that an idle function costs 500 looks a second, and its driver waits no longer
/// than 2 ms.
#[derive(Debug, Clone, Copy)]
pub struct LookAgain {
    worked_ns: u64,
}

impl LookAgain {
    const SHORTEST_NS: u64 = 20_000;
    const LONGEST_NS: u64 = 2_000_000;

    /// Something was done at `now_ns`.
    pub fn after_work(now_ns: u64) -> LookAgain {
        LookAgain { worked_ns: now_ns }
    }

    /// Nanoseconds until the next look.
    pub fn wait_ns(self, now_ns: u64) -> u64 {
        let idle = now_ns.saturating_sub(self.worked_ns);
        (idle / 8).clamp(LookAgain::SHORTEST_NS, LookAgain::LONGEST_NS)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn registers_are_the_same_for_both_and_all_ones_when_they_are_retired() {
        let engine = PolledRegisters::new(8192).unwrap();
        let (file, length) = engine.descriptor().unwrap();
        let driver = PolledRegisters::adopt(file, length).unwrap();
        driver.store_pair(0x28, 0x1234_5678_9abc_d000);
        assert_eq!(engine.load_pair(0x28), 0x1234_5678_9abc_d000);
        engine.store(0x1c, 1);
        assert_eq!(driver.load(0x1c), 1);
        for outside in [8192, 8190, 2, u64::MAX] {
            driver.store(outside, 7);
            assert_eq!(engine.load(outside), 0, "{outside}");
        }
        engine.retire();
        assert_eq!((driver.load(0), driver.load_pair(8184)), (u32::MAX, u64::MAX));
    }

    #[test]
    fn memory_that_somebody_could_truncate_is_not_taken_for_registers() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("no seals", flags).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        assert!(PolledRegisters::adopt(file, 8192).is_err());
        let short = SharedMemory::reserve("short", 4096).unwrap();
        assert!(PolledRegisters::adopt(short, 8192).is_err());
        for length in [0, 4095, (1 << 20) + 1, u64::MAX] {
            let file = SharedMemory::reserve("any", 2 << 20).unwrap();
            assert!(PolledRegisters::adopt(file, length).is_err(), "{length}");
        }
    }

    #[test]
    fn a_word_is_news_once_and_nothing_is_when_the_registers_were_retired() {
        let mut watched = WatchedRegisters::new(8192, 0x20, 0).unwrap();
        let (file, length) = watched.registers().descriptor().unwrap();
        let driver = PolledRegisters::adopt(file, length).unwrap();
        assert_eq!(watched.news(0x20), None);
        driver.store(0x20, 1);
        assert_eq!((watched.news(0x20), watched.news(0x20)), (Some(1), None));
        watched.show(0x20, 0);
        assert_eq!((driver.load(0x20), watched.news(0x20)), (0, None));
        watched.tell(0x24, 1);
        driver.store(0x24, 7);
        // Told already: what a driver does to it is not undone.
        watched.tell(0x24, 1);
        assert_eq!(driver.load(0x24), 7);
        assert_eq!((watched.news(8192), watched.news(u64::MAX)), (None, None));
        watched.show(8192, 1);
        driver.retire();
        assert!(watched.is_retired());
        watched.tell(0x28, 3);
        assert_eq!(watched.news(0x20), None);
        assert_eq!([0x20, 0x28].map(|at| driver.load(at)), [u32::MAX; 2]);
        watched.show(0x20, 0);
        watched.tell(0x28, 3);
        assert_eq!([0x20, 0x28].map(|at| driver.load(at)), [0, 3]);
    }

    #[test]
    fn registers_that_another_process_looked_at_have_what_was_stored_since_then_as_news() {
        let mut first = WatchedRegisters::new(8192, 0x20, 0).unwrap();
        let (file, length) = first.registers().descriptor().unwrap();
        let driver = PolledRegisters::adopt(file, length).unwrap();
        driver.store(0x20, 1);
        driver.store(0x1000, 5);
        assert_eq!((first.news(0x20), first.news(0x1000)), (Some(1), Some(5)));
        let written = serde_json::to_string(&first.state()).unwrap();
        // As programs of this version wrote it.
        assert_eq!(written, r#"{"length":8192,"mark":32,"seen":[[8,1],[1024,5]]}"#);
        let state: WatchedState = serde_json::from_str(&written).unwrap();
        driver.store(0x1000, 6);
        driver.store(0x1004, 7);
        let (file, _) = first.registers().descriptor().unwrap();
        let mut next = WatchedRegisters::resume(file, &state, 0).unwrap();
        assert!(next.are(8192, 0x20) && !next.are(4096, 0x20) && !next.are(8192, 0x24));
        assert_eq!([0x20, 0x1000, 0x1004].map(|at| next.news(at)), [None, Some(6), Some(7)]);
        // Words that are not there, and memory of another length.
        let file = || first.registers().descriptor().unwrap().0;
        let beyond = WatchedState { seen: vec![(2048, 1)], ..state.clone() };
        assert!(matches!(WatchedRegisters::resume(file(), &beyond, 0), Err(NotPolled::State)));
        let longer = WatchedState { length: 16384, ..state };
        assert!(matches!(WatchedRegisters::resume(file(), &longer, 0), Err(NotPolled::Memory(_))));
    }

    #[test]
    fn what_is_due_is_looked_for_in_time_and_work_brings_the_next_look_near() {
        let mut watched = WatchedRegisters::new(4096, 0, 0).unwrap();
        let now = 1_000_000_000;
        let longest = Work::Watch(LookAgain::LONGEST_NS);
        assert_eq!(watched.look_again(Work::Asleep(None), now), longest);
        assert_eq!(watched.look_again(Work::Idle, now), longest);
        assert_eq!(watched.look_again(Work::Watch(7), now), Work::Watch(7));
        assert_eq!(watched.look_again(Work::Asleep(Some(now + 9)), now), Work::Watch(9));
        assert_eq!(watched.look_again(Work::Asleep(Some(0)), now), Work::Watch(0));
        assert_eq!(watched.look_again(Work::Done, now), Work::Done);
        let soon = Work::Watch(LookAgain::SHORTEST_NS);
        assert_eq!(watched.look_again(Work::Idle, now), soon);
    }

    proptest! {
        /// What comes is late by an eighth of the pause at most, or by the shortest wait, and never by more than
        /// the longest.
        #[test]
        fn a_wait_is_bounded_by_the_pause_before_it(worked in any::<u64>(), idle in any::<u64>()) {
            let now = worked.saturating_add(idle);
            let wait = LookAgain::after_work(worked).wait_ns(now);
            prop_assert!(wait <= LookAgain::LONGEST_NS);
            prop_assert!(wait <= ((now - worked) / 8).max(LookAgain::SHORTEST_NS));
            prop_assert!(wait >= LookAgain::SHORTEST_NS);
        }
    }
}
