//! Memory that a process has through its node, and that the node may move elsewhere.

mod follower;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rackbus_memory::region::RegionError;
use rackbus_memory::{Access, AsHandle, DmaSlice, PinnedSlice, Region, ResourceHandle};
use rackbus_segment::Handle;

use crate::events::Watch;
use crate::session::AttachError;
pub(crate) use follower::Follower;

/// How long a new mapping waits for a move that is under way: longer than the node lets one last.
const PATIENCE: Duration = Duration::from_secs(10);

/// A mapping of a segment or of pages: memory, whosever it is.
///
/// It stays where it is until it is dropped. When its owner has removed the memory, or died, it
/// holds what it held last; when the memory is taken away, it reads zeroes, and writing to it
/// reaches nobody. Nothing that happens elsewhere makes an
/// access to it fail.
#[derive(Debug, Clone)]
pub struct Mapping {
    memory: PinnedSlice,
    /// What it stands for, where it is not the memory itself, which is on another machine.
    stands_for: Option<Arc<FarPlace>>,
}

/// Memory of another machine: who keeps what stands for it, and where in it a mapping begins.
#[derive(Debug)]
pub(crate) struct FarPlace {
    pub keeper: Handle,
    pub offset: u64,
    pub watch: Arc<Watch>,
}

impl Mapping {
    pub(crate) fn new(region: Arc<Region>) -> Mapping {
        Mapping { memory: PinnedSlice::whole(region), stands_for: None }
    }

    /// The same, for memory that is on another machine.
    pub(crate) fn standing_for(self, place: FarPlace) -> Mapping {
        Mapping { stands_for: Some(Arc::new(place)), ..self }
    }

    /// What it stands for, where it is not the memory itself.
    pub(crate) fn far_place(&self) -> Option<&Arc<FarPlace>> {
        self.stands_for.as_ref()
    }

    /// The mapped memory from its first byte to its last.
    #[inline]
    pub fn whole(&self) -> DmaSlice<'_> {
        self.memory.get()
    }

    /// The region behind it, for copies and locks.
    #[inline]
    pub fn region(&self) -> &Arc<Region> {
        self.memory.region()
    }

    /// Length of the mapped memory in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.memory.get().len()
    }

    /// Never: a mapping has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// The memory of a segment, a connection or an extent, with the mappings of it.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    state: Mutex<State>,
    moved: Condvar,
    access: Access,
    /// Bytes of it; its file has whole pages.
    size: u64,
}

#[derive(Debug)]
struct State {
    file: Option<ResourceHandle>,
    regions: Vec<Weak<Region>>,
    followers: Vec<Weak<dyn Follower>>,
    frozen: bool,
    /// The range that nobody is to access now, and the mappings in which the system sees to that.
    hidden: Option<(u64, u64, Vec<Weak<Region>>)>,
    /// Nothing is moved any more: it was given back, or taken away.
    ended: bool,
}

impl MappedMemory {
    pub(crate) fn new(file: Option<ResourceHandle>, write: bool, size: u64) -> Arc<MappedMemory> {
        let access = match write {
            true => Access::READ | Access::WRITE,
            false => Access::READ,
        };
        let state = State {
            file,
            regions: Vec::new(),
            followers: Vec::new(),
            frozen: false,
            hidden: None,
            ended: false,
        };
        Arc::new(MappedMemory { state: Mutex::new(state), moved: Condvar::new(), access, size })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether stores are allowed.
    pub(crate) fn writable(&self) -> bool {
        self.access.contains(Access::WRITE)
    }

    pub(crate) fn set_file(&self, file: ResourceHandle) {
        self.lock().file = Some(file);
    }

    /// Adds a mapping that was made otherwise.
    pub(crate) fn keep(&self, region: &Arc<Region>) {
        self.lock().regions.push(Arc::downgrade(region));
    }

    pub(crate) fn has_file(&self) -> bool {
        self.lock().file.is_some()
    }

    /// Maps a range; `address` asks for a place of the caller's choice.
    pub(crate) fn map(
        &self,
        (offset, length): (u64, u64),
        address: Option<usize>,
        read_only: bool,
    ) -> Result<Mapping, AttachError> {
        let (mut state, file) = self.at_rest((offset, length))?;
        let access = if read_only { Access::READ } else { self.access };
        let region = Region::map_at(address, file.as_handle(), offset, length, access)?;
        let region = Arc::new(region);
        state.regions.retain(|region| region.strong_count() > 0);
        state.regions.push(Arc::downgrade(&region));
        Ok(Mapping::new(region))
    }

    /// The file that a range of the memory is in, while nothing is moved.
    fn at_rest(
        &self,
        (offset, length): (u64, u64),
    ) -> Result<(MutexGuard<'_, State>, ResourceHandle), AttachError> {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.size);
        if !inside || length == 0 {
            return Err(RegionError::OutOfFile { offset, length, file_size: self.size }.into());
        }
        let state = self.lock();
        let changing = |state: &mut State| state.frozen || state.hidden.is_some();
        let waited = self.moved.wait_timeout_while(state, PATIENCE, changing);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.file.clone() {
            Some(file) if !state.frozen => Ok((state, file)),
            Some(_) => Err(AttachError::Busy),
            None => Err(AttachError::NoMemory),
        }
    }

    /// Has `follower` take up a range of the memory, and be where it is from now on, for as long as it lives.
    pub(crate) fn lead(
        &self,
        range: (u64, u64),
        follower: &Arc<impl Follower + 'static>,
    ) -> Result<(), AttachError> {
        let (mut state, mut file) = self.at_rest(range)?;
        let added: Weak<dyn Follower> = Arc::<_>::downgrade(follower) as Weak<dyn Follower>;
        state.followers.retain(|follower| follower.strong_count() > 0);
        state.followers.push(added);
        loop {
            // Not under the lock: it may take long, and a move is not to wait for it.
            drop(state);
            follower.take_up(&file);
            state = self.lock();
            let stays = state.file.as_ref().is_some_and(|now| now.is_clone_of(&file));
            if stays && !state.frozen {
                return Ok(());
            }
            // It moved meanwhile. Nobody uses the mapping yet.
            drop(state);
            follower.unmap();
            (state, file) = self.at_rest(range)?;
        }
    }

    /// The node moves a range elsewhere: writers wait from now on.
    pub(crate) fn freeze(&self, offset: u64, length: u64) -> Result<(), RegionError> {
        let mut state = self.lock();
        if state.ended {
            return Ok(());
        }
        // What is hidden is protected otherwise from now on.
        self.show_in(&mut state);
        state.frozen = true;
        for region in state.regions.iter().filter_map(Weak::upgrade) {
            region.freeze(offset, length)?;
        }
        follower::unmap_all(&followers(&state));
        Ok(())
    }

    /// Other bytes are about to be stored to a range, by the node: nobody accesses it until they are.
    pub(crate) fn hide(&self, offset: u64, length: u64) {
        let mut state = self.lock();
        if state.ended || state.frozen || state.hidden.is_some() {
            return;
        }
        let regions = state.regions.iter().filter_map(Weak::upgrade);
        let hidden = regions.filter(|region| region.hide(offset, length));
        let hidden = hidden.map(|region| Arc::downgrade(&region)).collect();
        state.hidden = Some((offset, length, hidden));
    }

    /// Gives this process the pages back that were kept from it while stores of another machine took effect.
    pub(crate) fn show(&self) {
        self.show_in(&mut self.lock());
    }

    fn show_in(&self, state: &mut State) {
        let Some((offset, length, regions)) = state.hidden.take() else { return };
        regions.iter().filter_map(Weak::upgrade).for_each(|region| region.show(offset, length));
        self.moved.notify_all();
    }

    /// The range is in `file` from now on, beginning at `from`; `whole` when that is all of it.
    /// Writers wait until it is unfrozen.
    pub(crate) fn adopt(
        &self,
        (offset, length): (u64, u64),
        file: ResourceHandle,
        from: u64,
        whole: bool,
    ) -> Result<(), RegionError> {
        let mut state = self.lock();
        if state.ended {
            return Ok(());
        }
        let regions: Vec<Arc<Region>> = state.regions.iter().filter_map(Weak::upgrade).collect();
        let outcomes =
            regions.iter().map(|region| region.adopt(offset, length, file.as_handle(), from));
        let outcome = outcomes.fold(Ok(()), Result::and);
        if whole {
            state.file = Some(file);
        }
        outcome
    }

    /// The move has ended: writers continue where the memory is now.
    pub(crate) fn unfreeze(&self) {
        self.unfreeze_in(&mut self.lock());
    }

    /// The node moves this memory no more: who waits for a move continues where it is, and nobody
    /// waits for one again, whatever the node said before it knew.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        self.show_in(&mut state);
        self.unfreeze_in(&mut state);
    }

    #[cfg(test)]
    pub(crate) fn is_frozen(&self) -> bool {
        self.lock().frozen
    }

    #[cfg(test)]
    fn followers(&self) -> usize {
        self.lock().followers.len()
    }

    #[cfg(test)]
    pub(crate) fn is_hidden(&self) -> bool {
        self.lock().hidden.is_some()
    }

    fn unfreeze_in(&self, state: &mut State) {
        if !std::mem::take(&mut state.frozen) {
            return;
        }
        for region in state.regions.iter().filter_map(Weak::upgrade) {
            if let Err(error) = region.unfreeze() {
                tracing::error!(%error, "memory that was frozen cannot be made writable again");
            }
        }
        if let Some(file) = &state.file {
            follower::take_up_all(&followers(state), file);
        }
        self.moved.notify_all();
    }
}

/// Those of a memory that still are there.
fn followers(state: &State) -> Vec<Arc<dyn Follower>> {
    state.followers.iter().filter_map(Weak::upgrade).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use rackbus_memory::SharedMemory;
    use rackbus_memory::sparse::copy_sparse;

    const SEEDS: u64 = 10;

    /// One step of the generator splitmix64 (Steele, Lea, Flood 2014).
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    fn number(name: &str) -> Option<u64> {
        Some(std::env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name} is a number")))
    }

    /// Writers count in mappings of a memory that moves, or is to move and does not, again and
    /// again; what they counted is there in the end, in every mapping.
    fn counts_while_it_moves(mut seed: u64) {
        const SIZE: u64 = 8 * 4096 + 100;
        const WRITERS: u64 = 3;
        let memory = MappedMemory::new(
            Some(ResourceHandle::of_descriptor(SharedMemory::reserve("first", SIZE).unwrap())),
            true,
            SIZE,
        );
        let stop = AtomicBool::new(false);
        let mappings: Vec<(Mapping, usize, usize)> = (0..WRITERS)
            .map(|writer| {
                // Each writer has a place of its own, in a mapping that begins anywhere before it.
                let at = 8192 * writer + 8 * (next(&mut seed) % 1000);
                let start = (next(&mut seed) % (at / 8 + 1)) * 8;
                let length = at + 8 - start + next(&mut seed) % (SIZE - at - 8);
                let mapping = memory.map((start, length), None, false).unwrap();
                (mapping, (at - start) as usize, at as usize)
            })
            .collect();
        let all = memory.map((0, SIZE), None, false).unwrap();
        std::thread::scope(|scope| {
            let count = |mapping: &Mapping, at: usize| {
                let mut counted = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    counted += 1;
                    // From what is there: a store that is lost is missing for good.
                    let here = mapping.whole().load_u64(at, Ordering::Acquire).unwrap();
                    mapping.whole().store_u64(at, here + 1, Ordering::Release).unwrap();
                }
                counted
            };
            let writers: Vec<_> = mappings
                .iter()
                .map(|(mapping, at, _)| scope.spawn(move || count(mapping, *at)))
                .collect();
            for _ in 0..20 {
                memory.freeze(0, SIZE).unwrap();
                let old = memory.lock().file.clone().unwrap();
                let new =
                    ResourceHandle::of_descriptor(SharedMemory::reserve("next", SIZE).unwrap());
                if !next(&mut seed).is_multiple_of(4) {
                    copy_sparse((old.as_descriptor(), 0), (new.as_descriptor(), 0), SIZE).unwrap();
                    memory.adopt((0, SIZE), new, 0, true).unwrap();
                }
                memory.unfreeze();
                (0..next(&mut seed) % 4).for_each(|_| std::thread::yield_now());
            }
            if next(&mut seed).is_multiple_of(2) {
                memory.freeze(0, SIZE).unwrap();
                memory.end();
            }
            stop.store(true, Ordering::Relaxed);
            for (writer, (mapping, at, in_all)) in writers.into_iter().zip(&mappings) {
                let counted = Some(writer.join().unwrap());
                assert_eq!(mapping.whole().load_u64(*at, Ordering::Acquire), counted);
                assert_eq!(all.whole().load_u64(*in_all, Ordering::Acquire), counted);
            }
        });
    }

    #[test]
    fn no_store_is_lost_to_a_move() {
        if let Some(seed) = number("RACKBUS_SEED") {
            return counts_while_it_moves(seed);
        }
        for seed in 0..number("RACKBUS_SEEDS").unwrap_or(SEEDS) {
            if std::panic::catch_unwind(|| counts_while_it_moves(seed)).is_err() {
                panic!(
                    "seed {seed} fails; replay it with: RACKBUS_SEED={seed} cargo test \
                     -p rackbus-attach --lib no_store -- --nocapture"
                );
            }
        }
    }

    #[test]
    fn a_writer_goes_on_when_the_move_that_it_waits_for_never_ends() {
        let file = ResourceHandle::of_descriptor(SharedMemory::reserve("test", 8192).unwrap());
        let memory = MappedMemory::new(Some(file), true, 8192);
        let mapping = memory.map((0, 8192), None, false).unwrap();
        memory.freeze(0, 8192).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| mapping.whole().write_obj(4096, &7_u64).unwrap());
            let mapper = scope.spawn(|| memory.map((4096, 8), None, false).unwrap());
            memory.end();
            writer.join().unwrap();
            let other = mapper.join().unwrap();
            assert_eq!(other.whole().read_obj::<u64>(0), Some(7));
        });
        // What is heard of the move later stops nobody.
        memory.freeze(0, 8192).unwrap();
        mapping.whole().write_obj(4096, &8_u64).unwrap();
        assert!(memory.map((0, 8), None, false).is_ok());
    }

    #[test]
    fn nobody_writes_before_all_mappings_have_moved() {
        let reserve = |name| SharedMemory::reserve(name, 8192).map(ResourceHandle::of_descriptor);
        let (old, new) = (reserve("old"), reserve("new"));
        let memory = MappedMemory::new(Some(old.unwrap()), true, 8192);
        let (one, other) = (memory.map((0, 8192), None, false), memory.map((0, 8192), None, false));
        let (one, other) = (one.unwrap(), other.unwrap());
        memory.freeze(0, 8192).unwrap();
        let unfrozen = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                one.whole().write_obj(0, &7_u64).unwrap();
                // The store is a signal to whoever polls: all must read it from now on.
                (unfrozen.load(Ordering::SeqCst), other.whole().read_obj::<u64>(0))
            });
            memory.adopt((0, 8192), new.unwrap(), 0, true).unwrap();
            // Long enough for a writer that is not kept waiting.
            std::thread::sleep(Duration::from_millis(20));
            unfrozen.store(true, Ordering::SeqCst);
            memory.unfreeze();
            assert_eq!(writer.join().unwrap(), (true, Some(7)));
        });
    }
}
