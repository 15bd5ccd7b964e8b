//! Lanes whose transfers happen at once, are heard of when the input says so, or fail.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_memory::exchange::ExchangeLayout;
use rackbus_memory::exchange::lane::{CarriedLane, Lane, LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Region, SharedMemory};

const PROOF: [u8; PROOF_BYTES] = [0x5a; PROOF_BYTES];
const PAGE: usize = 4096;

/// What is beside the connections of an exchange.
#[derive(Debug, Clone)]
pub(super) struct InstantLane(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// What the side that answers exposes, where that is the other one.
    theirs: SharedMemory,
    /// What the side that asks has registered.
    registered: Option<Arc<Region>>,
    /// What the side that answers has exposed, where that is this one.
    exposed: Option<Arc<Region>>,
    ended: Vec<u64>,
    /// The ends of transfers are not heard of.
    held: bool,
    failed: bool,
    /// It does not close.
    stays: bool,
}

impl InstantLane {
    /// One that does not close if it `stays`.
    pub(super) fn new(layout: ExchangeLayout, stays: bool) -> InstantLane {
        let places = layout.data_bytes.next_multiple_of(PAGE) * layout.tags as usize;
        let theirs = SharedMemory::create("theirs", (places + PAGE) as u64);
        let theirs = theirs.expect("there is memory");
        theirs.whole().part(places, PROOF_BYTES).expect("it is within").copy_from(&PROOF);
        let (registered, exposed, ended) = Default::default();
        let (held, failed) = (false, false);
        let state = State { theirs, registered, exposed, ended, held, failed, stays };
        InstantLane(Arc::new(Mutex::new(state)))
    }

    /// The lane as an end of this side takes it.
    pub(super) fn end(&self, side: SessionSide) -> CarriedLane {
        match side {
            SessionSide::Asks => CarriedLane::Asks(Box::new(self.clone()), PROOF),
            SessionSide::Answers => CarriedLane::Answers(Arc::new(self.clone())),
        }
    }

    /// What becomes of it next.
    pub(super) fn choose(&self, choice: u8) {
        let mut state = self.lock();
        match choice % 4 {
            0 => state.held = false,
            1 => state.held = true,
            2 => state.failed = true,
            _ => state.ended.reverse(),
        }
    }

    /// Whether the other side reaches memory by it.
    pub(super) fn is_exposed(&self) -> bool {
        self.lock().exposed.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure() -> LaneError {
    LaneError("it was to fail".to_owned())
}

impl Lane for InstantLane {
    fn provider(&self) -> &str {
        "fuzz"
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), LaneError> {
        self.lock().registered = Some(region.clone());
        Ok(())
    }

    fn begin(
        &mut self,
        id: u64,
        write: bool,
        offset: usize,
        length: usize,
    ) -> Result<bool, LaneError> {
        let mut state = self.lock();
        if state.failed {
            return Err(failure());
        }
        let ours = state.registered.clone().expect("it was registered first");
        let (ours, theirs) = (ours.whole(), state.theirs.whole());
        let (from, to) = if write { (ours, theirs) } else { (theirs, ours) };
        let mut bytes = vec![0; length];
        from.part(offset, length).expect("a transfer is within the places").copy_to(&mut bytes);
        to.part(offset, length).expect("a transfer is within the places").copy_from(&bytes);
        assert!(!state.ended.contains(&id), "two transfers have one number");
        state.ended.push(id);
        Ok(true)
    }

    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError> {
        let mut state = self.lock();
        if state.failed {
            return Err(failure());
        }
        if !state.held {
            ended.append(&mut state.ended);
        }
        Ok(())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn rest(&mut self) -> bool {
        self.lock().ended.is_empty()
    }

    fn close(&mut self) -> bool {
        self.lock().registered = None;
        true
    }
}

impl LaneTarget for InstantLane {
    fn provider(&self) -> &str {
        "fuzz"
    }

    fn expose(&self, region: &Arc<Region>, proof: usize) -> Result<(), LaneError> {
        let there = region.whole().part(proof, PROOF_BYTES).is_some();
        assert!(there, "the proof is not within the memory");
        self.lock().exposed = Some(region.clone());
        Ok(())
    }

    fn failure(&self) -> Option<LaneError> {
        self.lock().failed.then(failure)
    }

    fn close(&self) -> bool {
        let mut state = self.lock();
        if !state.stays {
            state.exposed = None;
        }
        true
    }
}
