//! What a node lends.
//!
//! The lender decides who may use a function and when that ends; what it lends is behind a trait, so
//! that it does the same for all: a device model on an engine here ([`Modelled`]), a physical function,
//! another process' vfio-user server.

use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::DeviceReport;
use rackbus_devices::class::{LentTo, no_levels};
use rackbus_devices::{DeviceConfig, Folders, RackDevice};
use rackbus_memory::{Carried, CarriedSession, Lending, Stream};
use rackbus_metal::SavedLoan;
use rackbus_pci::engine::{EngineOptions, NoAnswer};
use rackbus_pci::vfio_user::{EngineDevice, RestingConversation, SavedSession, ServedDevice};
use rackbus_pci::{Engine, EngineHandle, Function, MediumOffer, SaveError};
use rackbus_qos::LevelRoom;

use crate::report;
use crate::upstream::Upstream;
use crate::vfio::{self, Physical, WindowLending};

/// Why a function is not ready.
#[derive(Debug)]
pub enum NotReady {
    /// It does not answer in the time that it was given.
    Hangs,
    /// It cannot be run.
    Failed(io::Error),
}

/// A function that a node lends. Calls come from any thread; those that change who has it come one
/// at a time.
pub trait Lendable: Debug + Send + Sync {
    /// Whether a node begins without it and has it ready when it is asked for: the machine may be without it now.
    fn may_be_absent(&self) -> bool {
        false
    }

    /// It is not lent any more: whoever had it before gets it back, where there was somebody.
    fn release(&self) {}

    /// Has it ready for its next user, reset and scrubbed: starts what it runs on, at first and after
    /// that failed. Waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NotReady`].
    fn arm(&self, limit: Duration) -> Result<(), NotReady>;

    /// Promises its next user this service level, or as much as anybody gets; nobody has what the one before had.
    ///
    /// # Errors
    /// Why not, and what could be promised instead.
    fn set_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// Promises the user that it has another service level from now on. One that cannot be kept changes nothing.
    ///
    /// # Errors
    /// As [`set_level`](Lendable::set_level).
    fn change_level(&self, level: Option<&str>) -> Result<(), String> {
        no_levels(level)
    }

    /// Promises a user that continues with what was [resumed](Lendable::resume) this service level, which it had before,
    /// whether it fits now or not.
    ///
    /// # Errors
    /// Why no such level can be kept.
    fn resume_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
        no_levels(level)
    }

    /// What its device could still promise; nothing where there are no levels.
    fn room(&self) -> Option<LevelRoom> {
        None
    }

    /// Gives it to the user at the other end of `stream`, whose memory `lending` lends, for as long as
    /// the stream is open. Dropping what is returned takes everything of the user's away, resets and
    /// scrubs it. Does not wait for it.
    ///
    /// # Errors
    /// When it cannot be used.
    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>>;

    /// Lends it to the kernel of `borrower`, which lends its memory by `lending`, through this host's NTB to that host, for
    /// the lease of this epoch: in that host's own PCI tree. Dropping what is returned takes it away, resets and scrubs
    /// it; where it is lost before, the conversation with the borrower's node, `stream`, is ended.
    ///
    /// # Errors
    /// When it cannot be lent so, or there is no such NTB.
    fn lend_in_window(
        &self,
        _borrower: &str,
        _epoch: u64,
        _lending: Lending,
        _stream: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let what = "a function of another program cannot be lent to a host's own kernel";
        Err(io::Error::new(io::ErrorKind::Unsupported, what))
    }

    /// How it is lent in windows, if it can be.
    fn windows(&self) -> Option<&WindowLending> {
        None
    }

    /// Goes on, as [`resume`](Lendable::resume), with what another process `lent` in its window to `borrower`, and with what it
    /// saved of a model.
    ///
    /// # Errors
    /// When that is not possible. Then it is as if it did not run, and the borrower reaches nothing of it.
    fn resume_in_window(
        &self,
        _saved: Option<SavedSession>,
        _user: User,
        (_borrower, _lent): (&str, SavedLoan),
    ) -> io::Result<LentInWindow> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Takes all of its user's memory and interrupts away at once, although it hangs. It is not
    /// scrubbed by that.
    fn revoke(&self);

    /// What it counts and how it is, beside what is `known`. Nothing is waited for.
    fn describe(&self, known: DeviceReport) -> DeviceReport;

    /// The function as a value, and the `conversation` with its user, which rests. From now on nothing
    /// happens here, until it is [taken back](Lendable::take_back); a function of the machine goes on meanwhile. `None` when there is nothing to continue
    /// with: it does not run, or its user's memory was taken away. Waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NotSaved`]; it continues as it was.
    fn save(
        &self,
        _conversation: RestingConversation,
        _limit: Duration,
    ) -> Result<Option<SavedSession>, NotSaved> {
        Err(NotSaved::Refused(SaveError::Unsupported))
    }

    /// Whether the system has ended all that the saved function asked it for: see
    /// [`is_settled`](rackbus_pci::Function::is_settled).
    fn is_settled(&self) -> bool {
        true
    }

    /// Whether it is of the kind of which a function of class `class` was saved: the rack file may name another one since.
    fn continues(&self, class: &str) -> bool {
        ![crate::vfio::CLASS, rackbus_devices::upstream::CLASS].contains(&class)
    }

    /// Goes on here after all with what was saved.
    fn take_back(&self, _saved: SavedSession) {}

    /// Goes on, in the place of [`arm`](Lendable::arm), with what another process saved; for the `user`
    /// that it had, which lends its memory by the lending and has the function as long as the stream is
    /// open.
    ///
    /// # Errors
    /// When that is not possible. Then it is as if it did not run.
    fn resume(&self, _saved: SavedSession, _user: Option<User>) -> io::Result<Option<Resumed>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Who uses a function.
pub struct User {
    /// Its memory, as the fabric lends it to the function.
    pub lending: Lending,
    /// Its conversation, which is open as long as it has the function.
    pub stream: Arc<dyn Stream>,
    /// What carries the operations of its front on another machine.
    pub session: Option<CarriedSession>,
}

/// A function in the hands of its user, and where the conversation with it rested.
pub type Resumed = (Box<dyn Attached>, RestingConversation);

/// Why a function was not saved.
#[derive(Debug)]
pub enum NotSaved {
    /// It does not answer in the time that it was given.
    Hangs,
    /// The model or its session cannot be saved now.
    Refused(SaveError),
}

/// A function in a borrower's window.
#[derive(Debug)]
pub struct LentInWindow {
    /// Offset of its control area there.
    pub offset: u64,
    /// What takes it away when it is dropped.
    pub held: Box<dyn Debug + Send>,
}

/// A function in the hands of one user.
pub trait Attached: ServedDevice {
    /// Hands its medium to a front at the user's, instead of itself, until it is dropped; where that shares
    /// no memory with this process, by operations that `carried` carries.
    ///
    /// # Errors
    /// Why the medium cannot be obtained.
    fn serve_medium(&self, carried: Option<Carried>) -> Result<MediumOffer, String>;

    /// Its user has the medium and nothing of the registers, from the beginning or again after a restart in place; of the
    /// BARs those whose memory goes along with a medium that is not `carried` to another machine.
    fn share_medium(&self, _carried: bool) {}
}

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

/// What `host` lends of a rack's devices, which find their files in `folders`; functions of the machine also through
/// its NTBs. Those that only the timing model knows are left out.
pub fn of_host(
    host: &str,
    devices: &[RackDevice],
    folders: &Folders,
    ntbs: &Arc<vfio::Ntbs>,
) -> Vec<(String, Arc<dyn Lendable>)> {
    let lendable = |device: &RackDevice| {
        let name = device.function.strip_prefix(host)?.strip_prefix('/')?.to_owned();
        let (config, folders) = (device.config.clone()?, folders.clone());
        if let Some(server) = config.upstream(&folders) {
            let upstream = Upstream::new(&name, server);
            return Some((name, Arc::new(upstream) as Arc<dyn Lendable>));
        }
        if let Some(function) = config.physical() {
            let taker = vfio::taker(host, &folders);
            let windows = WindowLending::new(ntbs.clone(), taker.clone());
            let physical = Physical::new(&name, function, &taker).with_windows(windows);
            return Some((name, Arc::new(physical) as Arc<dyn Lendable>));
        }
        let windows = WindowLending::new(ntbs.clone(), vfio::taker(host, &folders));
        let modelled = Modelled::described(&name, config, folders).with_windows(windows);
        Some((name, Arc::new(modelled) as Arc<dyn Lendable>))
    };
    devices.iter().filter_map(lendable).collect()
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
