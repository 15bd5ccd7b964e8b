//! A device model of this process, lent: on an engine of its own, which is made anew after each failure of the model.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::DeviceReport;
use rackbus_devices::class::{LentTo, no_levels};
use rackbus_devices::{DeviceConfig, Folders};
use rackbus_memory::{Carried, Lending, Stream};
use rackbus_metal::SavedLoan;
use rackbus_pci::engine::{EngineOptions, NoAnswer};
use rackbus_pci::vfio_user::{EngineDevice, RestingConversation, SavedSession, ServedDevice};
use rackbus_pci::{Engine, EngineHandle, Function, MediumOffer, SaveError};
use rackbus_qos::LevelRoom;

use super::{Attached, Lendable, LentInWindow, NotReady, NotSaved, Resumed, User};
use crate::report;
use crate::vfio::WindowLending;

/// Makes a function's device model, anew after each failure of it.
pub type Factory = Box<dyn Fn() -> io::Result<Box<dyn Function>> + Send + Sync>;

/// Makes the device model that continues with what an earlier one gave of its medium.
pub type Successor = Box<dyn Fn(Vec<OwnedFd>) -> io::Result<Box<dyn Function>> + Send + Sync>;

/// A device model, on an engine of its own: a class by front and medium.
pub struct Modelled {
    name: String,
    factory: Factory,
    successor: Option<Successor>,
    /// What the rack file says of it, where it is of one.
    config: Option<Arc<dyn DeviceConfig>>,
    options: EngineOptions,
    windows: WindowLending,
    running: Mutex<Option<Running>>,
    /// The newest engine, for who may not wait for `running`.
    engine: Mutex<Option<EngineHandle>>,
}

/// An engine with its function as it is served.
struct Running {
    engine: Engine,
    device: EngineDevice,
}

impl Debug for Modelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Modelled").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Modelled {
    /// The device `name`, whose model `factory` makes.
    pub fn new(name: &str, factory: Factory, options: EngineOptions) -> Modelled {
        let (successor, config, windows, running, engine) = Default::default();
        let name = name.to_owned();
        Modelled { name, factory, successor, config, options, windows, running, engine }
    }

    /// The same, which can be lent through NTBs.
    #[must_use]
    pub fn with_windows(self, windows: WindowLending) -> Modelled {
        Modelled { windows, ..self }
    }

    /// The same, which can continue in another process.
    #[must_use]
    pub fn with_successor(self, successor: Successor) -> Modelled {
        Modelled { successor: Some(successor), ..self }
    }

    /// The device `name`, as the rack file describes it, with its files in `folders`.
    pub fn described(name: &str, config: Arc<dyn DeviceConfig>, folders: Folders) -> Modelled {
        let (described, places) = (config.clone(), folders.clone());
        let model = Box::new(move || described.model(&places));
        let described = config.clone();
        let successor = Box::new(move |medium| described.resume(&folders, medium));
        let modelled = Modelled::new(name, model, EngineOptions::default());
        Modelled { config: Some(config), ..modelled.with_successor(successor) }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self) -> MutexGuard<'_, Option<EngineHandle>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, model: Box<dyn Function>) -> io::Result<Running> {
        let engine = Engine::start(&self.name, model, self.options.clone())?;
        let device = EngineDevice::new(engine.handle().clone()).map_err(io::Error::other)?;
        Ok(Running { engine, device })
    }

    fn runs(&self, running: &mut Option<Running>, started: Running) {
        *self.engine() = Some(started.engine.handle().clone());
        *running = Some(started);
    }
}

impl Lendable for Modelled {
    fn release(&self) {
        *self.engine() = None;
        // Its files are closed when its thread has ended.
        drop(self.running().take());
    }

    fn set_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        match &self.config {
            Some(config) => config.set_level(level, to),
            None => no_levels(level),
        }
    }

    fn change_level(&self, level: Option<&str>) -> Result<(), String> {
        match &self.config {
            Some(config) => config.change_level(level),
            None => no_levels(level),
        }
    }

    fn resume_level(&self, level: Option<&str>, to: LentTo) -> Result<(), String> {
        match &self.config {
            Some(config) => config.resume_level(level, to),
            None => no_levels(level),
        }
    }

    fn room(&self) -> Option<LevelRoom> {
        self.config.as_ref()?.room()
    }

    fn arm(&self, limit: Duration) -> Result<(), NotReady> {
        let mut running = self.running();
        if let Some(Running { engine, .. }) = &*running {
            match engine.handle().call_within(limit, |_| ()) {
                Ok(()) => return Ok(()),
                Err(NoAnswer::Late) => return Err(NotReady::Hangs),
                Err(NoAnswer::Stopped(_)) => {}
            }
            tracing::error!(device = self.name, "the device model failed and is started again");
            *running = None;
        }
        // What takes its time is done before anybody waits for it.
        if self.config.as_ref().is_some_and(|config| config.is_polled()) {
            self.windows.open_all();
        }
        let started = (self.factory)().and_then(|model| self.start(model));
        self.runs(&mut running, started.map_err(NotReady::Failed)?);
        Ok(())
    }

    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>> {
        let running = self.running();
        let Some(Running { device, .. }) = &*running else {
            return Err(io::Error::other("it does not run"));
        };
        let session = device.session_of(lending, Some(stream.clone()));
        let session = session.map_err(io::Error::other)?;
        Ok(Box::new(session))
    }

    fn lend_in_window(
        &self,
        borrower: &str,
        epoch: u64,
        lending: Lending,
        stream: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let running = self.running();
        let Some(Running { device, .. }) = &*running else {
            return Err(io::Error::other("it does not run"));
        };
        let session = device.session_of(lending.clone(), Some(stream.clone()));
        let session = Box::new(session.map_err(io::Error::other)?);
        let memory = device.engine().revoker().clone();
        // The engine serves it; opening an NTB takes its time.
        drop(running);
        self.windows.lend(&self.name, (session, memory), &lending, (borrower, epoch), stream)
    }

    fn revoke(&self) {
        if let Some(engine) = &*self.engine() {
            engine.revoker().revoke();
        }
    }

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        let counters = self.config.iter().flat_map(|config| config.shaping());
        let shaping = counters.map(|(name, count)| (name.to_owned(), count)).collect();
        let level = self.config.as_ref().and_then(|config| config.level());
        let known = DeviceReport { shaping, level, ..known };
        match &*self.engine() {
            Some(engine) => report::of_engine(engine, known),
            None => known,
        }
    }

    fn save(
        &self,
        conversation: RestingConversation,
        limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        let running = self.running();
        let Some(Running { engine, device }) = &*running else { return Ok(None) };
        if self.successor.is_none() {
            return Err(NotSaved::Refused(SaveError::Unsupported));
        }
        // What is asked of an engine is done, however late: first, whether it answers.
        match engine.handle().call_within(limit, |_| ()) {
            Ok(()) => {}
            Err(NoAnswer::Late) => return Err(NotSaved::Hangs),
            Err(NoAnswer::Stopped(_)) => return Ok(None),
        }
        match device.save(conversation) {
            Ok(saved) => Ok(Some(saved)),
            Err(SaveError::Revoked | SaveError::Stopped(_)) => Ok(None),
            Err(error) => Err(NotSaved::Refused(error)),
        }
    }

    fn windows(&self) -> Option<&WindowLending> {
        Some(&self.windows)
    }

    fn resume_in_window(
        &self,
        saved: Option<SavedSession>,
        user: User,
        (borrower, lent): (&str, SavedLoan),
    ) -> io::Result<LentInWindow> {
        let Some((successor, saved)) = self.successor.as_ref().zip(saved) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut running = self.running();
        let SavedSession { state, descriptors, medium } = saved;
        let started = self.start(successor(medium)?)?;
        let engine = started.engine.handle();
        let memory = self.windows.memory_of(borrower)?;
        engine.call(move |endpoint| endpoint.give_memory(memory)).map_err(io::Error::other)?;
        let User { lending, stream, .. } = user;
        let (device, lends) = (engine.clone(), lending.clone());
        let resumed = EngineDevice::resume(device, state, descriptors, lends, Some(stream.clone()));
        let (session, _) = resumed.map_err(io::Error::other)?;
        let device = (Box::new(session) as Box<dyn ServedDevice>, engine.revoker().clone());
        let lent =
            self.windows.lend_again(&self.name, device, &lending, (borrower, lent), &stream)?;
        self.runs(&mut running, started);
        Ok(lent)
    }

    fn is_settled(&self) -> bool {
        let running = self.running();
        running.as_ref().is_none_or(|Running { device, .. }| device.is_settled())
    }

    fn take_back(&self, saved: SavedSession) {
        let running = self.running();
        let Some(Running { device, .. }) = &*running else { return };
        if let Err(error) = device.take_back(saved) {
            tracing::error!(device = self.name, %error, "a saved function cannot be taken back");
        }
    }

    fn resume(&self, saved: SavedSession, user: Option<User>) -> io::Result<Option<Resumed>> {
        let Some(successor) = &self.successor else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let mut running = self.running();
        let SavedSession { state, descriptors, medium } = saved;
        let started = self.start(successor(medium)?)?;
        let engine = started.engine.handle();
        let resumed = match user {
            Some(User { lending, stream, session }) => {
                if let Some(session) = session {
                    let carried = engine.call(|endpoint| endpoint.carried_by(session));
                    carried.map_err(io::Error::other)?;
                }
                let engine = engine.clone();
                let resumed =
                    EngineDevice::resume(engine, state, descriptors, lending, Some(stream));
                let (session, conversation) = resumed.map_err(io::Error::other)?;
                Some((Box::new(session) as Box<dyn Attached>, conversation))
            }
            None => {
                let resumed = EngineDevice::resume_unused(engine, state, descriptors);
                resumed.map_err(io::Error::other)?;
                None
            }
        };
        self.runs(&mut running, started);
        Ok(resumed)
    }
}

impl Attached for EngineDevice {
    fn serve_medium(&self, carried: Option<Carried>) -> Result<MediumOffer, String> {
        let offered = self.engine().call(|endpoint| endpoint.serve_medium(carried));
        let offered = offered.map_err(|stopped| stopped.to_string())?;
        offered.map_err(|refused| refused.to_string())
    }

    fn share_medium(&self, carried: bool) {
        EngineDevice::share_medium(self, carried);
    }
}
