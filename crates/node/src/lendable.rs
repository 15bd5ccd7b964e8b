//! What a node lends.
//!
//! The lender decides who may use a function and when that ends; what it lends is behind a trait, so
//! that it does the same for all: a device model on an engine here ([`Modelled`]), a physical function,
//! another process' vfio-user server.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::DeviceReport;
use rackbus_devices::{Folders, RackDevice};
use rackbus_memory::{Lending, Stream};
use rackbus_pci::engine::{EngineOptions, NoAnswer};
use rackbus_pci::vfio_user::{Device, EngineDevice};
use rackbus_pci::{Engine, EngineHandle, Function, MediumOffer};

use crate::report;

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
    /// Has it ready for its next user, reset and scrubbed: starts what it runs on, at first and after
    /// that failed. Waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NotReady`].
    fn arm(&self, limit: Duration) -> Result<(), NotReady>;

    /// Gives it to the user at the other end of `stream`, whose memory `lending` lends, for as long as
    /// the stream is open. Dropping what is returned takes everything of the user's away, resets and
    /// scrubs it. Does not wait for it.
    ///
    /// # Errors
    /// When it cannot be used.
    fn attach(&self, lending: Lending, stream: &Arc<dyn Stream>) -> io::Result<Box<dyn Attached>>;

    /// Takes all of its user's memory and interrupts away at once, although it hangs. It is not
    /// scrubbed by that.
    fn revoke(&self);

    /// What it counts and how it is, beside what is `known`. Nothing is waited for.
    fn describe(&self, known: DeviceReport) -> DeviceReport;
}

/// A function in the hands of one user.
pub trait Attached: Device {
    /// Hands its medium to a front at the user's, instead of itself, until it is dropped.
    ///
    /// # Errors
    /// Why the medium cannot be had.
    fn serve_medium(&self) -> Result<MediumOffer, String>;
}

/// Makes a function's device model, anew after each failure of it.
pub type Factory = Box<dyn Fn() -> io::Result<Box<dyn Function>> + Send + Sync>;

/// A device model, on an engine of its own: a class by front and medium.
pub struct Modelled {
    name: String,
    factory: Factory,
    options: EngineOptions,
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
        let (running, engine) = Default::default();
        Modelled { name: name.to_owned(), factory, options, running, engine }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self) -> MutexGuard<'_, Option<EngineHandle>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> io::Result<Running> {
        let model = (self.factory)()?;
        let engine = Engine::start(&self.name, model, self.options.clone())?;
        let device = EngineDevice::new(engine.handle().clone()).map_err(io::Error::other)?;
        Ok(Running { engine, device })
    }
}

impl Lendable for Modelled {
    fn arm(&self, limit: Duration) -> Result<(), NotReady> {
        let mut running = self.running();
        if let Some(Running { engine, .. }) = &*running {
            match engine.handle().call_within(limit, |_| ()) {
                Ok(()) => return Ok(()),
                Err(NoAnswer::Late) => return Err(NotReady::Hangs),
                Err(NoAnswer::Stopped(_)) => {}
            }
            tracing::error!(device = self.name, "the device model failed and is started anew");
            *running = None;
        }
        let started = self.start().map_err(NotReady::Failed)?;
        *self.engine() = Some(started.engine.handle().clone());
        *running = Some(started);
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

    fn revoke(&self) {
        if let Some(engine) = &*self.engine() {
            engine.revoker().revoke();
        }
    }

    fn describe(&self, known: DeviceReport) -> DeviceReport {
        match &*self.engine() {
            Some(engine) => report::of_engine(engine, known),
            None => known,
        }
    }
}

/// What `host` lends of a rack's devices, which find their files in `folders`. Those that only the
/// timing model knows are left out.
pub fn of_host(
    host: &str,
    devices: &[RackDevice],
    folders: &Folders,
) -> Vec<(String, Arc<dyn Lendable>)> {
    let lendable = |device: &RackDevice| {
        let name = device.function.strip_prefix(host)?.strip_prefix('/')?.to_owned();
        let (config, folders) = (device.config.clone()?, folders.clone());
        let model = Box::new(move || config.model(&folders));
        let modelled = Modelled::new(&name, model, EngineOptions::default());
        Some((name, Arc::new(modelled) as Arc<dyn Lendable>))
    };
    devices.iter().filter_map(lendable).collect()
}

impl Attached for EngineDevice {
    fn serve_medium(&self) -> Result<MediumOffer, String> {
        let offered = self.engine().call(|endpoint| endpoint.serve_medium());
        let offered = offered.map_err(|stopped| stopped.to_string())?;
        offered.map_err(|refused| refused.to_string())
    }
}
