//! The side whose memory is reached: a lender's end of a lane.
//!
//! Providers without an adapter of their own move data only while somebody polls them, at either side. So a thread does
//! that for as long as the memory is exposed; it sleeps while nothing happens, where the provider has a descriptor to wait
//! for.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_memory::exchange::lane::{LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::{Event, Region};

use crate::endpoint::{RegistrationUse, RmaEndpoint};
use crate::{LaneOffer, RmaError, digits};

/// Between two polls of a provider that has no descriptor to wait for.
const PAUSE: Duration = Duration::from_micros(50);

/// A descriptor is waited for no longer than this: so the thread ends when the memory is not exposed any more.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct State {
    /// `None` when the memory was taken away.
    endpoint: Option<RmaEndpoint>,
    offer: Option<LaneOffer>,
    failure: Option<LaneError>,
}

/// A lender's end of a lane, for one session.
#[derive(Debug)]
pub struct RmaTarget {
    provider: String,
    state: Arc<Mutex<State>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Random bytes of the system.
fn random<const N: usize>() -> Result<[u8; N], LaneError> {
    let mut bytes = [0; N];
    // SAFETY: it fills the array, which is as long as is said.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    match usize::try_from(filled) == Ok(N) {
        true => Ok(bytes),
        false => Err(LaneError("the system gives no random numbers".to_owned())),
    }
}

impl RmaTarget {
    /// One by `provider`, from the interface with address `from` where addresses are such. Nothing is exposed yet.
    ///
    /// # Errors
    /// [`RmaError`].
    pub fn open(provider: &str, from: Option<IpAddr>) -> Result<RmaTarget, RmaError> {
        let endpoint = RmaEndpoint::open(provider, from, 0)?;
        let provider = endpoint.provider().to_owned();
        let state = State { endpoint: Some(endpoint), offer: None, failure: None };
        Ok(RmaTarget { provider, state: Arc::new(Mutex::new(state)) })
    }

    /// What the other side needs to reach the memory; `None` unless it is exposed.
    pub fn offer(&self) -> Option<LaneOffer> {
        lock(&self.state).offer.clone()
    }
}

impl LaneTarget for RmaTarget {
    fn provider(&self) -> &str {
        &self.provider
    }

    fn expose(&self, region: &Arc<Region>, proof: usize) -> Result<(), LaneError> {
        let (secret, key) = (random::<PROOF_BYTES>()?, u64::from_le_bytes(random()?));
        let mut state = lock(&self.state);
        let gone = || LaneError("it was closed".to_owned());
        let endpoint = state.endpoint.as_mut().ok_or_else(gone)?;
        region.slice(proof, PROOF_BYTES).map(|place| place.copy_from(&secret));
        let lane = |error: RmaError| LaneError(error.to_string());
        endpoint.register(region, RegistrationUse::Exposed, key).map_err(lane)?;
        let address = endpoint.address().map_err(lane)?;
        let (base, key) = endpoint.reached_by().ok_or_else(gone)?;
        let (provider, address, proof) = (self.provider.clone(), digits(&address), digits(&secret));
        state.offer = Some(LaneOffer { provider, address, base, key, proof });
        drop(state);
        let state = self.state.clone();
        let thread = std::thread::Builder::new().name("rdma lane".into());
        let spawned = thread.spawn(move || progress(&state));
        spawned.map(drop).map_err(|error| LaneError(format!("no thread for it: {error}")))
    }

    fn failure(&self) -> Option<LaneError> {
        lock(&self.state).failure.clone()
    }

    fn close(&self) -> bool {
        let mut state = lock(&self.state);
        state.offer = None;
        state.endpoint.take().is_none_or(RmaEndpoint::close)
    }
}

impl Drop for RmaTarget {
    fn drop(&mut self) {
        // Nobody asks any more.
        let _ = self.close();
    }
}

/// Lets the provider go on until the memory is taken away.
fn progress(state: &Mutex<State>) {
    let mut numbers = [0; 16];
    loop {
        let mut locked = lock(state);
        let Some(endpoint) = &mut locked.endpoint else { return };
        // Nothing of this side's ends; what the other side does is not told.
        if let Err(error) = endpoint.poll(&mut numbers) {
            tracing::debug!(%error, "a lane's endpoint has failed");
            locked.failure = Some(LaneError(error.to_string()));
            return;
        }
        let rests = endpoint.rest();
        let wake = endpoint.wake().filter(|_| rests).and_then(|fd| fd.try_clone().ok());
        let waits = endpoint.wake().is_some();
        drop(locked);
        match wake {
            Some(fd) => drop(Event::wait_any(&[fd.as_fd()], Some(LOOK.as_nanos() as u64))),
            None if waits => std::thread::yield_now(),
            None => std::thread::sleep(PAUSE),
        }
    }
}
