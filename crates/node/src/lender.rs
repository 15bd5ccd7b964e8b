//! The lender: runs this host's functions, and is where a lease is enforced.
//!
//! A function is *armed* for one epoch; only the borrower of that epoch may attach, and only
//! until it is revoked. Revoking closes the borrower's conversation, which takes every mapping
//! and interrupt away and scrubs the function, and returns when that is done (invariant I4).
//! Arming a newer epoch needs the older one revoked first (I2).
//!
//! A function's engine may hang (a disk does). Then its borrower's memory is taken away from it
//! after a while, and the revocation ends when the engine answers again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_control::api::DeviceReport;
use rackbus_fabric::Topology;
use rackbus_link::{Incoming, Service};
use rackbus_memory::Stream;
use rackbus_pci::engine::{EngineOptions, NoAnswer};
use rackbus_pci::vfio_user::{EngineDevice, serve};
use rackbus_pci::{Engine, EngineHandle, Function};

use crate::reach::Reach;

/// How long an attach waits for the same borrower's previous conversation to be cleaned up.
const SUCCESSION: Duration = Duration::from_secs(2);

/// How long a function's engine may take to answer, before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes a function's device model, anew after each failure of it.
pub type Factory = Box<dyn Fn() -> std::io::Result<Box<dyn Function>> + Send + Sync>;

/// Why the lender refused.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The host has no such device.
    #[error("{host} has no device {device}; it has {available}")]
    NoDevice {
        /// This host.
        host: String,
        /// What was asked for.
        device: String,
        /// What there is.
        available: String,
    },
    /// The epoch is not the one that was armed.
    #[error("epoch {epoch} of {device} is not valid here ({reason})")]
    Stale {
        /// The device.
        device: String,
        /// The epoch that was presented.
        epoch: u64,
        /// What is valid instead.
        reason: String,
    },
    /// Somebody has the function and has not been revoked.
    #[error("{device} is in use under epoch {epoch}")]
    InUse {
        /// The device.
        device: String,
        /// The epoch that has it.
        epoch: u64,
    },
    /// The device cannot be run.
    #[error("{device} cannot be run: {cause}")]
    Device {
        /// The device.
        device: String,
        /// Why.
        cause: std::io::Error,
    },
    /// Its engine hangs. Nothing of the old borrower's can be reached.
    #[error(
        "{device} does not answer for {limit:?}, most likely its storage hangs; what its borrower \
         had lent it is taken away, and it is offered again when it answers"
    )]
    Hangs {
        /// The device.
        device: String,
        /// How long was waited.
        limit: Duration,
    },
}

/// Whom a function is armed for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Armed {
    /// The lease's number.
    pub lease: u64,
    /// Its fencing epoch.
    pub epoch: u64,
    /// The borrowing host.
    pub borrower: String,
}

/// All functions that this host lends.
#[derive(Debug)]
pub struct LentFunctions {
    host: String,
    lent: BTreeMap<String, Arc<Lent>>,
    reach: Arc<Reach>,
    patience: Duration,
}

struct Lent {
    name: String,
    factory: Factory,
    options: EngineOptions,
    patience: Duration,
    state: Mutex<State>,
    seen: Mutex<Seen>,
    /// Signalled when a conversation has ended and the function is scrubbed.
    idle: Condvar,
}

/// What others may see of a device, whatever holds its state.
#[derive(Debug, Default)]
struct Seen {
    engine: Option<EngineHandle>,
    /// Why it cannot be had now.
    trouble: Option<String>,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("name", &self.name).finish_non_exhaustive()
    }
}

struct State {
    armed: Option<Armed>,
    /// The newest epoch ever armed here: an older message never counts again.
    newest: u64,
    session: Option<Arc<dyn Stream>>,
    running: Option<(Engine, EngineDevice)>,
}

impl LentFunctions {
    /// A lender without devices, in a rack of that topology.
    pub fn new(host: &str, topology: Topology) -> Self {
        let (host, reach) = (host.to_owned(), Reach::new(topology));
        LentFunctions { host, lent: BTreeMap::new(), reach, patience: PATIENCE }
    }

    /// The same, whose devices added from now on may take so long to answer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        LentFunctions { patience, ..self }
    }

    /// Adds a device and starts its engine.
    ///
    /// # Errors
    /// [`LendError::Device`] when it cannot be run.
    pub fn add(
        &mut self,
        device: &str,
        factory: Factory,
        options: EngineOptions,
    ) -> Result<(), LendError> {
        let lent = Lent {
            name: device.to_owned(),
            factory,
            options,
            patience: self.patience,
            seen: Mutex::default(),
            state: Mutex::new(State { armed: None, newest: 0, session: None, running: None }),
            idle: Condvar::new(),
        };
        lent.start(&mut lent.lock())?;
        self.lent.insert(device.to_owned(), Arc::new(lent));
        Ok(())
    }

    /// The devices' names.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.lent.keys().map(String::as_str)
    }

    /// Lets `armed.borrower` attach under `armed.epoch`. Arming the same again changes nothing.
    ///
    /// # Errors
    /// [`LendError`] when the epoch is old, or another one has the function.
    pub fn arm(&self, device: &str, armed: Armed) -> Result<(), LendError> {
        let lent = self.find(device)?;
        let mut state = lent.lock();
        match &state.armed {
            Some(current) if *current == armed => return Ok(()),
            Some(current) if current.epoch < armed.epoch => {
                return Err(LendError::InUse { device: device.into(), epoch: current.epoch });
            }
            _ => {}
        }
        if armed.epoch <= state.newest {
            let reason = format!("epoch {} was armed already", state.newest);
            return Err(LendError::Stale { device: device.into(), epoch: armed.epoch, reason });
        }
        if let Some(session) = &state.session {
            // Cannot be after a revoke that returned; refuse rather than trust that.
            session.shut_down();
            return Err(LendError::InUse { device: device.into(), epoch: state.newest });
        }
        lent.start(&mut state)?;
        state.newest = armed.epoch;
        state.armed = Some(armed);
        Ok(())
    }

    /// Takes the function back from `epoch` and everything older. On return nothing of that
    /// borrower's is read or written any more, and the function is reset and scrubbed. Revoking
    /// again, or what was never armed, changes nothing.
    ///
    /// # Errors
    /// [`LendError`] when there is no such device, or it cannot be run any more;
    /// [`LendError::Hangs`] when it is not reset and scrubbed yet: [`finish`](LentFunctions::finish) waits
    /// for that.
    pub fn revoke(&self, device: &str, epoch: u64) -> Result<(), LendError> {
        let lent = self.find(device)?;
        let mut state = lent.lock();
        if state.armed.as_ref().is_some_and(|armed| armed.epoch > epoch) {
            return Ok(());
        }
        state.armed = None;
        state.newest = state.newest.max(epoch);
        if let Some(session) = &state.session {
            session.shut_down();
        }
        let in_use = |state: &mut State| state.session.is_some();
        let waited = lent.idle.wait_timeout_while(state, lent.patience, in_use);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match (&state.session, &state.running) {
            // The conversation waits for the engine.
            (Some(_), Some((engine, _))) => {
                engine.handle().revoker().revoke();
                let hangs = lent.hangs();
                lent.seen().trouble = Some(hangs.to_string());
                Err(hangs)
            }
            _ => lent.start(&mut state),
        }
    }

    /// Waits for the end of a revocation whose function [hangs](LendError::Hangs).
    ///
    /// # Errors
    /// [`LendError`] when there is no such device, or it cannot be run any more.
    pub fn finish(&self, device: &str) -> Result<(), LendError> {
        let lent = self.find(device)?;
        loop {
            let waited = lent.idle.wait_while(lent.lock(), |state| state.session.is_some());
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            match lent.start(&mut state) {
                Err(LendError::Hangs { .. }) => {}
                outcome => return outcome,
            }
        }
    }

    /// How the devices are, without waiting for any of them.
    pub fn report(&self) -> BTreeMap<String, DeviceReport> {
        self.lent.iter().map(|(name, lent)| (name.clone(), lent.report())).collect()
    }

    /// A node connected and wants a function: lets it in, or tells it why not. Holds the
    /// conversation on this thread until it ends.
    pub fn attend(&self, incoming: Incoming) {
        let Service::Function { device, lease, epoch } = incoming.hello.service.clone() else {
            return incoming.refuse("this is for functions");
        };
        let from = incoming.hello.from.clone();
        let lent = match self.find(&device) {
            Ok(lent) => lent.clone(),
            Err(error) => return incoming.refuse(&error.to_string()),
        };
        let stream = incoming.stream.clone();
        let session = match lent.attach(&Armed { lease, epoch, borrower: from.clone() }, &stream) {
            Ok(session) => session,
            Err(error) => {
                tracing::warn!(device, from, epoch, %error, "attach refused");
                return incoming.refuse(&error.to_string());
            }
        };
        let end = SessionEnd(&lent);
        let function = format!("{}/{device}", self.host);
        match self.reach.track(session, &function, &from) {
            Ok(session) => {
                tracing::info!(device, from, lease, epoch, "function attached");
                if incoming.accept().is_ok()
                    && let Err(error) = serve(&*stream, &session)
                {
                    tracing::warn!(device, from, %error, "conversation ended");
                }
                // Dropping the session scrubs the function; only then may anybody else have it.
                drop(session);
            }
            Err(error) => {
                tracing::error!(device, from, %error, "attach refused");
                incoming.refuse(&error.to_string());
            }
        }
        drop(end);
        tracing::info!(device, from, lease, epoch, "function released");
    }

    fn find(&self, device: &str) -> Result<&Arc<Lent>, LendError> {
        self.lent.get(device).ok_or_else(|| LendError::NoDevice {
            host: self.host.clone(),
            device: device.to_owned(),
            available: match self.lent.len() {
                0 => "none".to_owned(),
                _ => self.devices().collect::<Vec<_>>().join(", "),
            },
        })
    }
}

/// Says that a conversation has ended, however it did: a revocation waits for it. Dropped after the
/// session, and so after the function was scrubbed.
struct SessionEnd<'a>(&'a Lent);

impl Drop for SessionEnd<'_> {
    fn drop(&mut self) {
        self.0.lock().session = None;
        self.0.idle.notify_all();
    }
}

impl Lent {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self) -> DeviceReport {
        let (engine, trouble) = {
            let seen = self.seen();
            (seen.engine.clone(), seen.trouble.clone())
        };
        let Some(engine) = engine else { return DeviceReport { trouble, ..Default::default() } };
        let (dma_refused, last_refused) = engine.refusals().get();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = engine.counters();
        DeviceReport {
            trouble: trouble.or_else(|| engine.health().trouble()),
            dma_refused,
            last_refused: last_refused.map(|fault| fault.to_string()),
            busy_polls: count(&counters.busy_polls),
            parks: count(&counters.parks),
            jobs: count(&counters.jobs),
            moves: count(&counters.moves),
        }
    }

    fn hangs(&self) -> LendError {
        LendError::Hangs { device: self.name.clone(), limit: self.patience }
    }

    /// Has the engine run, and notes why it does not.
    fn start(&self, state: &mut State) -> Result<(), LendError> {
        let outcome = self.run(state);
        self.seen().trouble = outcome.as_ref().err().map(LendError::to_string);
        outcome
    }

    /// Starts the engine, if it is not running: at first, and after its device model failed.
    fn run(&self, state: &mut State) -> Result<(), LendError> {
        let device = |cause| LendError::Device { device: self.name.clone(), cause };
        if let Some((engine, _)) = &state.running {
            match engine.handle().call_within(self.patience, |_| ()) {
                Ok(()) => return Ok(()),
                Err(NoAnswer::Late) => return Err(self.hangs()),
                Err(NoAnswer::Stopped(_)) => {}
            }
            tracing::error!(device = self.name, "the device model failed and is started anew");
            state.running = None;
        }
        let model = (self.factory)().map_err(device)?;
        let engine = Engine::start(&self.name, model, self.options.clone()).map_err(device)?;
        let served = EngineDevice::new(engine.handle().clone());
        let served = served.map_err(|error| device(std::io::Error::other(error)))?;
        self.seen().engine = Some(engine.handle().clone());
        state.running = Some((engine, served));
        Ok(())
    }

    fn attach(&self, wanted: &Armed, stream: &Arc<dyn Stream>) -> Result<EngineDevice, LendError> {
        let stale =
            |reason| LendError::Stale { device: self.name.clone(), epoch: wanted.epoch, reason };
        let check = |state: &State| match &state.armed {
            Some(armed) if armed == wanted => Ok(()),
            Some(armed) => Err(stale(format!(
                "lease {} of {} has it under epoch {}",
                armed.lease, armed.borrower, armed.epoch
            ))),
            None => Err(stale("it is not lent to anybody".to_owned())),
        };
        let deadline = Instant::now() + SUCCESSION;
        let mut state = self.lock();
        check(&state)?;
        while state.session.is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LendError::InUse { device: self.name.clone(), epoch: wanted.epoch });
            }
            let waited = self.idle.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            check(&state)?;
        }
        self.start(&mut state)?;
        let (_, device) = state.running.as_ref().expect("it was just started");
        let session = device.session_over(stream.clone());
        let failed = |error| LendError::Device {
            device: self.name.clone(),
            cause: std::io::Error::other(error),
        };
        let session = session.map_err(failed)?;
        state.session = Some(stream.clone());
        Ok(session)
    }
}
