//! Bytes that are copied to another machine by remote memory access: the two ends of the lane, around the
//! [slots](LandingSlots) in which they land.
//!
//! The owner's node has memory for each connector's node that asks for it ([`LandingMemory`]), which is registered for that one's
//! transfers and is none of a segment's. A thread of the connector's that copies moves the bytes there by itself
//! ([`LandingLane::land`]), and has the link say so when they have arrived: but for others that copy to the same host, nobody
//! waits for a transfer. With the conversation the memory is taken away.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::exchange::lane::{Lane, LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::{Event, Region, RegionError, SharedMemory};
use rackbus_segment::landing::{LANDING_BYTES, LandingSlots, landed_range};

/// Where the proof is that a lane leads to the memory: behind all slots.
const PROOF: usize = LANDING_BYTES as usize;
/// How long a transfer may take before the lane counts as lost, and the link carries the bytes.
const LOST: Duration = Duration::from_millis(500);
/// How long the end of a transfer is looked for without sleeping.
const SPIN: Duration = Duration::from_micros(200);

/// Memory of slots and of a proof, at either end.
fn memory() -> Result<SharedMemory, RegionError> {
    SharedMemory::create("landing", PROOF as u64 + PROOF_BYTES as u64)
}

/// How many bytes this host's processes have copied to other machines.
#[derive(Debug, Default)]
pub struct CopiedBytes {
    /// Those that an RDMA lane moved to the owner's landing memory.
    pub by_lane: AtomicU64,
    /// Those that the link carried.
    pub by_link: AtomicU64,
}

/// The owner's end: memory in which one connector's copies land.
#[derive(Debug)]
pub struct LandingMemory {
    region: Arc<Region>,
    target: Arc<dyn LaneTarget>,
}

impl LandingMemory {
    /// Exposes memory by `target`.
    ///
    /// # Errors
    /// [`LaneError`].
    pub fn new(target: Arc<dyn LaneTarget>) -> Result<LandingMemory, LaneError> {
        let memory = memory().map_err(|error| LaneError(error.to_string()))?;
        let region = memory.region().clone();
        target.expose(&region, PROOF)?;
        Ok(LandingMemory { region, target })
    }

    /// What has landed, read once; `None` where it is in no slot.
    pub fn read(&self, place: u32, length: u32) -> Option<Vec<u8>> {
        let range = landed_range(place, length)?;
        let landed = self.region.slice(range.start, range.len())?;
        let mut bytes = vec![0; range.len()];
        landed.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Takes the memory away: on return nobody reaches it, or it stays for ever.
    pub fn close(&self) {
        if !self.target.close() {
            tracing::error!("memory that copies land in cannot be taken away; it is kept");
        }
    }
}

/// The connector's end: what a thread that copies moves bytes by.
#[derive(Debug)]
pub struct LandingLane {
    region: Arc<Region>,
    /// Apart from the lane, which is locked for as long as a transfer takes: who gives a slot back does not wait for one.
    slots: Mutex<LandingSlots>,
    state: Mutex<LaneState>,
}

#[derive(Debug)]
struct LaneState {
    lane: Box<dyn Lane>,
    /// The number of the last transfer.
    last: u64,
}

impl LaneState {
    /// Moves bytes, and waits until they are moved.
    fn transfer(&mut self, write: bool, offset: usize, length: usize) -> Result<(), LaneError> {
        let begun = Instant::now();
        self.last += 1;
        let (id, mut ended, mut is_begun) = (self.last, Vec::new(), false);
        loop {
            is_begun = is_begun || self.lane.begin(id, write, offset, length)?;
            self.lane.poll(&mut ended)?;
            if ended.contains(&id) {
                return Ok(());
            }
            let left = LOST.checked_sub(begun.elapsed());
            let left = left.ok_or_else(|| LaneError("a transfer does not end".to_owned()))?;
            if begun.elapsed() > SPIN && is_begun && self.lane.rest() {
                match self.lane.wake_fd() {
                    Some(fd) => drop(Event::wait_any(&[fd], Some(left.as_nanos() as u64))),
                    None => std::thread::yield_now(),
                }
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn close(&mut self) {
        if !self.lane.close() {
            tracing::error!("a lane for copies cannot be closed; its memory is kept");
        }
    }
}

impl LandingLane {
    /// Over a lane to memory that was offered, where it is found to lead there by the `proof`.
    ///
    /// # Errors
    /// [`LaneError`].
    pub fn new(
        mut lane: Box<dyn Lane>,
        proof: [u8; PROOF_BYTES],
    ) -> Result<Arc<LandingLane>, LaneError> {
        let memory = memory().map_err(|error| LaneError(error.to_string()))?;
        let region = memory.region().clone();
        lane.register(&region)?;
        let (slots, mut state) = (Mutex::default(), LaneState { lane, last: 0 });
        state.transfer(false, PROOF, PROOF_BYTES)?;
        let mut found = [0; PROOF_BYTES];
        region.slice(PROOF, PROOF_BYTES).map(|place| place.copy_to(&mut found));
        match found == proof {
            true => Ok(Arc::new(LandingLane { region, slots, state: Mutex::new(state) })),
            false => Err(LaneError("it leads to other memory".to_owned())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> MutexGuard<'_, LandingSlots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing lands any more. Waits for a transfer that is under way.
    pub fn lose(&self) {
        // First: who waits for the lane now begins none.
        self.slots().lose();
        self.lock().close();
    }

    /// Moves bytes to a slot, and waits until they are there. `None` where the link carries them: there is no slot for them, or
    /// the lane is lost.
    pub fn land(self: &Arc<Self>, bytes: &[u8]) -> Option<LandedCopy> {
        let place = self.slots().take(bytes.len())?;
        let mut state = self.lock();
        if self.slots().is_lost() {
            // By who had the lane meanwhile.
            return None;
        }
        self.region.slice(place as usize, bytes.len())?.copy_from(bytes);
        match state.transfer(true, place as usize, bytes.len()) {
            Ok(()) => {
                let (lane, is_over) = (self.clone(), AtomicBool::new(false));
                Some(LandedCopy { lane, place, is_over })
            }
            Err(error) => {
                tracing::warn!(%error, "an RDMA lane is lost; copies go over the link");
                self.slots().lose();
                state.close();
                None
            }
        }
    }
}

/// Bytes that have landed, and have their slot until they have taken effect.
#[derive(Debug)]
pub struct LandedCopy {
    lane: Arc<LandingLane>,
    place: u32,
    is_over: AtomicBool,
}

impl LandedCopy {
    /// Where they are in the owner's memory.
    pub fn place(&self) -> u32 {
        self.place
    }

    /// Nobody reads them there any more, as they have taken effect or were never said to have landed: the slot is another
    /// one's.
    pub fn free_slot(&self) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            self.lane.slots().give_back(self.place);
        }
    }
}

impl Drop for LandedCopy {
    fn drop(&mut self) {
        if !*self.is_over.get_mut() {
            // They may still be read there.
            self.lane.lose();
        }
    }
}
