//! A file behind a page cache, and io_uring on it, as the kernel has them: operations are short,
//! slow, out of order and fail; data that cannot be written back is reported once and forgotten;
//! a loss of power takes what was not written back.
#![allow(unsafe_code)] // the queue takes raw buffers, as the kernel's does

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use rackbus_memory::DmaSlice;
use rackbus_seeds::Random;
use rustix::io::Errno;

use super::super::super::backing::parts::{Call, FileAccess, FileQueue};

/// Bytes of a page of the cache.
pub const PAGE: usize = 4096;
/// Bytes of a block of the drive.
pub const BLOCK: usize = 512;
/// Blocks of the drive.
pub const BLOCKS: usize = 128;
const BYTES: usize = BLOCKS * BLOCK;
/// Entries of the submission queue: few, so that it is full at times.
const ENTRIES: usize = 8;

/// What the medium can do and what goes wrong with it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Character {
    /// Operations fail, pages cannot be written back.
    pub fails: bool,
    /// Everything may be late.
    pub slow: bool,
    /// `fallocate` by holes, by ranges.
    pub holes: bool,
    pub ranges: bool,
    /// Ranges must be whole pages.
    pub coarse: bool,
    /// Percent of reads that the cache cannot answer.
    pub cold: u64,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Transfer { access: FileAccess, offset: usize, durable: bool },
    Sync { dirty: [bool; BYTES / PAGE] },
    Zero { hole: bool, offset: usize, length: usize },
}

struct Op {
    id: u64,
    kind: Kind,
    buffers: Vec<libc::iovec>,
    due_ns: u64,
}

// SAFETY: whoever queued the operation keeps its buffers mapped, from whatever thread.
unsafe impl Send for Op {}

/// A page that could not be written back and left the cache: the medium's old content is back.
#[derive(Debug, Clone, Copy)]
pub struct Reverted {
    pub first_block: usize,
    pub blocks: usize,
}

pub struct DiskState {
    random: Random,
    pub character: Character,
    pub now_ns: u64,
    cache: Vec<u8>,
    medium: Vec<u8>,
    dirty: [bool; BYTES / PAGE],
    /// Pages that count as clean and are not on the medium.
    lost: [bool; BYTES / PAGE],
    /// An error that nobody was told of.
    unreported: bool,
    /// An error that the witness was not told of.
    pub unwitnessed: bool,
    queued: VecDeque<Op>,
    in_flight: Vec<Op>,
    completed: VecDeque<(u64, i32)>,
    pub reverted: Vec<Reverted>,
    /// A failure was reported to a flush or a durable write since the file was loaded.
    pub sync_failed: bool,
    /// How many operations the simulation failed so far.
    pub failures: u64,
    /// The process or its machine is gone.
    dead: bool,
}

impl DiskState {
    fn range(offset: usize, length: usize) -> std::ops::Range<usize> {
        offset.min(BYTES)..(offset + length).min(BYTES)
    }

    fn fault(&mut self, percent: u64) -> bool {
        let fails = self.character.fails && self.random.chance(percent);
        self.failures += u64::from(fails);
        fails
    }

    fn cold(&mut self) -> bool {
        self.random.chance(self.character.cold)
    }

    fn touch(&mut self, range: std::ops::Range<usize>) {
        for page in range.start / PAGE..range.end.div_ceil(PAGE) {
            self.dirty[page] = true;
            // Written anew: the cache has all of it, and it will be written back again.
            self.lost[page] = false;
        }
    }

    fn write_back(&mut self, page: usize) {
        if !std::mem::take(&mut self.dirty[page]) {
            return;
        }
        if self.fault(10) {
            self.lost[page] = true;
            self.unreported = true;
            self.unwitnessed = true;
        } else {
            let range = page * PAGE..(page + 1) * PAGE;
            self.medium[range.clone()].copy_from_slice(&self.cache[range]);
        }
    }

    fn evict(&mut self, page: usize) {
        if self.dirty[page] {
            return;
        }
        let range = page * PAGE..(page + 1) * PAGE;
        self.cache[range.clone()].copy_from_slice(&self.medium[range]);
        if std::mem::take(&mut self.lost[page]) {
            let blocks = PAGE / BLOCK;
            self.reverted.push(Reverted { first_block: page * blocks, blocks });
        }
    }

    /// What whoever waits for durability is told.
    fn report(&mut self) -> Result<(), Errno> {
        if std::mem::take(&mut self.unreported) {
            self.sync_failed = true;
            return Err(Errno::IO);
        }
        Ok(())
    }

    fn move_bytes(
        &mut self,
        access: FileAccess,
        offset: usize,
        buffers: &[(*mut u8, usize)],
        most: usize,
    ) -> usize {
        let mut moved = 0;
        for (pointer, length) in buffers {
            let count = (*length).min(most - moved).min(BYTES.saturating_sub(offset + moved));
            let data = &mut self.cache[offset + moved..offset + moved + count];
            // SAFETY: the buffer is mapped, with `length` bytes, until its operation has ended.
            unsafe {
                match access {
                    FileAccess::Read => {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), *pointer, count)
                    }
                    FileAccess::Write => {
                        std::ptr::copy_nonoverlapping(*pointer, data.as_mut_ptr(), count)
                    }
                }
            }
            moved += count;
        }
        if access == FileAccess::Write {
            self.touch(DiskState::range(offset, moved));
        }
        moved
    }

    /// How many of `length` bytes an operation moves, in whole blocks.
    fn portion(&mut self, length: usize) -> usize {
        if length > BLOCK && self.random.chance(10) {
            BLOCK * (1 + self.random.below(length / BLOCK))
        } else {
            length
        }
    }

    fn carry_out(&mut self, op: &Op) -> i32 {
        let errno = |cause: Errno| -cause.raw_os_error();
        match op.kind {
            Kind::Transfer { access, offset, durable } => {
                if self.random.chance(3) {
                    return errno(if self.random.chance(50) { Errno::INTR } else { Errno::AGAIN });
                }
                if self.fault(3) {
                    // A durable write that fails may have been told of others' data.
                    self.sync_failed |= durable;
                    let space = access == FileAccess::Write && self.random.chance(30);
                    return errno(if space { Errno::NOSPC } else { Errno::IO });
                }
                let buffers: Vec<_> =
                    op.buffers.iter().map(|b| (b.iov_base.cast::<u8>(), b.iov_len)).collect();
                let length = buffers.iter().map(|(_, length)| length).sum();
                let most = self.portion(length);
                let moved = self.move_bytes(access, offset, &buffers, most);
                if durable {
                    for page in offset / PAGE..(offset + moved).div_ceil(PAGE) {
                        self.write_back(page);
                    }
                    if let Err(cause) = self.report() {
                        return errno(cause);
                    }
                }
                moved as i32
            }
            Kind::Sync { dirty } => {
                (0..dirty.len()).filter(|page| dirty[*page]).for_each(|page| self.write_back(page));
                self.report().map_or_else(errno, |()| 0)
            }
            Kind::Zero { hole, offset, length } => {
                let supported = if hole { self.character.holes } else { self.character.ranges };
                if !supported {
                    return errno(Errno::OPNOTSUPP);
                }
                if self.character.coarse && (offset % PAGE != 0 || length % PAGE != 0) {
                    return errno(Errno::INVAL);
                }
                if self.fault(3) {
                    return errno(Errno::IO);
                }
                let range = DiskState::range(offset, length);
                self.cache[range.clone()].fill(0);
                self.touch(range);
                0
            }
        }
    }

    fn complete(&mut self, at: usize) {
        let op = self.in_flight.swap_remove(at);
        let result = if self.dead { -Errno::IO.raw_os_error() } else { self.carry_out(&op) };
        self.completed.push_back((op.id, result));
    }

    /// Lets the system work: what is due ends, in any order; pages are written back and leave the
    /// cache.
    pub fn advance(&mut self) {
        while let Some(at) = self.in_flight.iter().position(|op| op.due_ns <= self.now_ns) {
            self.complete(at);
        }
        if self.random.chance(10) {
            let page = self.random.below(BYTES / PAGE);
            self.write_back(page);
        }
        if self.random.chance(10) {
            let page = self.random.below(BYTES / PAGE);
            self.evict(page);
        }
    }

    pub fn has_completions(&self) -> bool {
        !self.completed.is_empty()
    }

    /// The process dies. What it had in flight is done or not. With `power`, the cache is gone too.
    pub fn die(&mut self, power: bool) {
        while !self.in_flight.is_empty() {
            let at = self.random.below(self.in_flight.len());
            if self.random.chance(50) {
                self.complete(at);
            } else {
                let id = self.in_flight.swap_remove(at).id;
                self.completed.push_back((id, -Errno::IO.raw_os_error()));
            }
        }
        // Nobody hears of it: whoever waits is gone, and only releases its buffers.
        self.dead = true;
        let ids: Vec<u64> = self.queued.drain(..).map(|op| op.id).collect();
        self.completed.extend(ids.into_iter().map(|id| (id, -Errno::IO.raw_os_error())));
        if power {
            for page in 0..BYTES / PAGE {
                if self.random.chance(30) {
                    self.write_back(page);
                }
            }
            self.cache.copy_from_slice(&self.medium);
            self.dirty = Default::default();
            self.lost = Default::default();
            self.unreported = false;
            self.unwitnessed = false;
            self.reverted.clear();
        }
    }

    /// Another process opens the file.
    pub fn revive(&mut self) {
        self.completed.clear();
        self.dead = false;
        self.sync_failed = false;
    }

    /// What a read of `block` would give now.
    pub fn content(&self, block: usize) -> &[u8] {
        &self.cache[block * BLOCK..(block + 1) * BLOCK]
    }
}

/// The file as one process has it open.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<DiskState>>);

impl Disk {
    pub fn new(random: Random, character: Character) -> Disk {
        Disk(Arc::new(Mutex::new(DiskState {
            random,
            character,
            now_ns: 1,
            cache: vec![0; BYTES],
            medium: vec![0; BYTES],
            dirty: Default::default(),
            lost: Default::default(),
            unreported: false,
            unwitnessed: false,
            queued: VecDeque::new(),
            in_flight: Vec::new(),
            completed: VecDeque::new(),
            reverted: Vec::new(),
            sync_failed: false,
            failures: 0,
            dead: false,
        })))
    }

    pub fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().expect("no test panics while it holds the disk")
    }
}

impl FileQueue for Disk {
    fn now_ns(&self) -> u64 {
        self.state().now_ns
    }

    fn transfer(
        &mut self,
        access: FileAccess,
        offset: u64,
        slices: &[DmaSlice<'_>],
    ) -> Result<usize, Errno> {
        let mut state = self.state();
        match access {
            FileAccess::Read if state.cold() => return Err(Errno::AGAIN),
            // Writers are throttled at times.
            FileAccess::Write if state.random.chance(3) => state.now_ns += 3_000_000,
            _ => {}
        }
        if state.fault(1) {
            return Err(Errno::IO);
        }
        let buffers: Vec<_> = slices.iter().map(|slice| (slice.as_ptr(), slice.len())).collect();
        let length = slices.iter().map(DmaSlice::len).sum();
        let most = state.portion(length);
        Ok(state.move_bytes(access, offset as usize, &buffers, most))
    }

    unsafe fn queue(&mut self, id: u64, call: Call<'_>) -> bool {
        let mut state = self.state();
        if state.queued.len() == ENTRIES {
            return false;
        }
        let (kind, buffers) = match call {
            Call::Transfer { access, offset, buffers, durable } => {
                let kind = Kind::Transfer { access, offset: offset as usize, durable };
                (kind, buffers.to_vec())
            }
            Call::DataSync => (Kind::Sync { dirty: Default::default() }, Vec::new()),
            Call::Allocate { mode, offset, length } => {
                let hole = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                let (offset, length) = (offset as usize, length as usize);
                (Kind::Zero { hole, offset, length }, Vec::new())
            }
        };
        state.queued.push_back(Op { id, kind, buffers, due_ns: 0 });
        true
    }

    fn submit(&mut self, wait: bool) -> Result<(), Errno> {
        let state = &mut *self.state();
        if !state.dead && state.random.chance(10) {
            return Err(Errno::AGAIN);
        }
        let all = state.queued.len();
        let take = if state.random.chance(10) { state.random.below(all + 1) } else { all };
        for mut op in state.queued.drain(..take).collect::<Vec<_>>() {
            let most = if state.character.slow { 2_000_000 } else { 20_000 };
            op.due_ns = state.now_ns + state.random.below(most) as u64;
            if let Kind::Sync { dirty } = &mut op.kind {
                *dirty = state.dirty;
            }
            state.in_flight.push(op);
        }
        if wait && state.completed.is_empty() {
            let next = (0..state.in_flight.len()).min_by_key(|at| state.in_flight[*at].due_ns);
            if let Some(at) = next {
                state.now_ns = state.now_ns.max(state.in_flight[at].due_ns);
                state.complete(at);
            }
        }
        Ok(())
    }

    fn has_queued(&mut self) -> bool {
        !self.state().queued.is_empty()
    }

    fn completion(&mut self) -> Option<(u64, i32)> {
        self.state().completed.pop_front()
    }

    fn has_completion(&mut self) -> bool {
        self.state().has_completions()
    }

    fn resting(&mut self) -> usize {
        let state = self.state();
        state.queued.len() + state.completed.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear_wake(&self) {}

    fn witness(&self) -> std::io::Result<Option<OwnedFd>> {
        Ok(None)
    }

    fn ask_witness(&mut self) -> Result<(), Errno> {
        let mut state = self.state();
        (0..BYTES / PAGE).for_each(|page| state.write_back(page));
        match std::mem::take(&mut state.unwitnessed) {
            true => {
                state.sync_failed = true;
                Err(Errno::IO)
            }
            false => Ok(()),
        }
    }

    fn reload(&mut self) -> Result<(), Errno> {
        let mut state = self.state();
        (0..BYTES / PAGE).for_each(|page| state.write_back(page));
        if std::mem::take(&mut state.unreported) {
            return Err(Errno::IO);
        }
        state.unwitnessed = false;
        (0..BYTES / PAGE).for_each(|page| state.evict(page));
        state.sync_failed = false;
        Ok(())
    }
}
