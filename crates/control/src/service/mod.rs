//! The control plane's shell around [`rackbus_lease::Authority`]: gives it time and messages,
//! stores what it decides, then sends what it says.
//!
//! `writer` takes the steps, on a thread of its own; `known` is what everybody sees of them.

mod known;
mod paths;
mod views;
mod writer;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_fabric::Topology;
use rackbus_lease::{
    Authority, BorrowRefused, Config, FunctionId, FunctionState, LeaseRecord, LeaseState, Message,
    Outcome, Record, ReturnRefused,
};
use tokio::sync::{broadcast, mpsc, watch};

use crate::api::{ApiError, Event, Lease};
use crate::store::{Store, StoreError};

use known::Known;
use views::present;
pub(crate) use views::problem;
use writer::{Request, Writing};

/// How long a request waits for nodes to do what it asks for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a return waits: a guest may take its time to let go of a device.
const RETURN_PATIENCE: Duration = Duration::from_secs(40);
/// How many incidents the status tells.
const INCIDENTS: usize = 10;
/// Events that a slow listener may be behind.
const EVENT_BACKLOG: usize = 1024;

/// What the rack file says there is.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// The rack's name.
    pub rack: String,
    /// The hosts, by name.
    pub hosts: Vec<String>,
    /// The functions.
    pub devices: Vec<InventoryDevice>,
    /// What joins them.
    pub topology: Topology,
}

/// One function of the rack file.
#[derive(Debug, Clone)]
pub struct InventoryDevice {
    /// Its name.
    pub function: FunctionId,
    /// What it is.
    pub kind: String,
    /// Size and backing, for people.
    pub detail: String,
}

/// How the control plane runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// What there is.
    pub inventory: Inventory,
    /// Time limits of the protocol.
    pub config: Config,
    /// Where the state is kept.
    pub database: PathBuf,
}

/// The running control plane.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    writing: Writing,
}

/// What the writer and those who ask share.
#[derive(Debug)]
struct Shared {
    inventory: Inventory,
    clock: Clock,
    known: Mutex<Known>,
    /// Moves with every step.
    steps: watch::Sender<u64>,
    events: broadcast::Sender<Event>,
}

/// Milliseconds since 1970 that never go back while the process runs.
#[derive(Debug)]
struct Clock {
    begun: Instant,
    offset: u64,
}

impl Clock {
    fn new() -> Self {
        let offset = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { begun: Instant::now(), offset: millis(offset) }
    }

    fn now(&self) -> u64 {
        self.offset.saturating_add(millis(self.begun.elapsed()))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Why the control plane cannot run.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its state cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
}

impl Service {
    /// Opens the state and goes on where it stopped.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(options: Options) -> Result<Arc<Service>, OpenError> {
        let store = Store::open(&options.database, &options.inventory.rack)?;
        let clock = Clock::new();
        let authority = Authority::restore(options.config, clock.now(), store.load()?);
        let shared = Arc::new(Shared {
            inventory: options.inventory,
            clock,
            known: Mutex::new(Known::of(&authority)),
            steps: watch::Sender::new(0),
            events: broadcast::Sender::new(EVENT_BACKLOG),
        });
        let writing =
            Writing::start(authority, store, shared.clone()).map_err(OpenError::Thread)?;
        Ok(Arc::new(Service { shared, writing }))
    }

    /// Borrows a function and waits until it can be used. When the caller does not wait so long
    /// (the future is dropped), the lease is given back.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow(&self, function: &str, borrower: &str) -> Result<Lease, ApiError> {
        let id: FunctionId = function.parse().map_err(|cause: rackbus_lease::BadFunctionId| {
            problem("bad_name", cause.to_string(), "`rackbus devices` lists the functions")
        })?;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let mut steps = self.shared.steps.subscribe();
        let granted = loop {
            let (function, borrower) = (id.clone(), borrower.to_owned());
            let ask = |answer| Request::Borrow { function, borrower, answer };
            match self.writing.ask(ask).await? {
                // Just after a restart: the nodes are on their way.
                Err(BorrowRefused::Awaited(_))
                    if tokio::time::timeout_at(deadline, steps.changed()).await.is_ok() => {}
                granted => break granted,
            }
        };
        let wanted = granted.map_err(|refused| {
            self.shared.known().refused += 1;
            tracing::info!(function, borrower, %refused, "borrow refused");
            self.shared.explain(refused)
        })?;
        let lease = wanted.lease;
        let settled = |known: &Known| {
            let record = known.leases.get(&lease)?;
            matches!(record.state, LeaseState::Active { .. } | LeaseState::Ended { .. })
                .then(|| record.clone())
        };
        match self.shared.wait(deadline, settled).await {
            Some(LeaseRecord { state: LeaseState::Ended { reason }, .. }) => Err(problem(
                "failed",
                format!("{function} could not be lent to {borrower}: {reason}"),
                "`rackbus status` tells how the nodes are",
            )),
            Some(record) => {
                wanted.keep();
                Ok(present(&record))
            }
            None => Err(problem(
                "timeout",
                format!("{function} could not be lent to {borrower} in {PATIENCE:?}"),
                "the lease is taken back; `rackbus status` tells how the nodes are",
            )),
        }
    }

    /// Returns a lease and waits until the function is offered again.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn give_back(&self, lease: u64) -> Result<Lease, ApiError> {
        let outcome = self.writing.ask(|answer| Request::GiveBack { lease, answer }).await?;
        outcome.map_err(|refused| match &refused {
            ReturnRefused::Unknown(_) => {
                problem("unknown_lease", refused.to_string(), "`rackbus leases` lists them")
            }
            ReturnRefused::Over { .. } => {
                problem("over", refused.to_string(), "there is nothing left to return")
            }
        })?;
        let deadline = tokio::time::Instant::now() + RETURN_PATIENCE;
        let back = self
            .shared
            .wait(deadline, |known| {
                let record = known.leases.get(&lease)?;
                let function = known.functions.get(&record.function)?;
                let held = matches!(function.state,
                    FunctionState::Lent { lease: l } | FunctionState::Revoking { lease: l } if l == lease);
                (!record.is_live() && !held).then(|| present(record))
            })
            .await;
        back.ok_or_else(|| {
            problem(
                "timeout",
                format!("lease {lease} is ending, but its function is not back after {RETURN_PATIENCE:?}"),
                "the control plane goes on asking; `rackbus status` tells how the nodes are",
            )
        })
    }

    /// Messages from a host's node.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host, or the state cannot be stored.
    pub async fn receive(&self, host: &str, messages: Vec<Message>) -> Result<(), ApiError> {
        self.shared.check_host(host)?;
        tracing::debug!(host, ?messages, "received");
        let host = host.to_owned();
        self.writing.ask(|answer| Request::Heard { host, messages, answer }).await
    }

    /// A node listens: what is said to it from now on. A later listener takes its place.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host.
    pub fn listen(&self, host: &str) -> Result<mpsc::Receiver<Message>, ApiError> {
        self.shared.check_host(host)?;
        let receiver = self.shared.known().listen(host);
        tracing::info!(host, "node connected");
        self.shared.tell_host(host);
        Ok(receiver)
    }

    /// What changes, from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.shared.events.subscribe()
    }
}

impl Shared {
    /// Held for moments only, and never while anything is waited for.
    fn known(&self) -> MutexGuard<'_, Known> {
        // It is changed in whole steps; a panic between two leaves it as it was.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A host was heard at `now`.
    fn heard(&self, host: &str, now: u64, registers: bool) {
        self.known().heard.insert(host.to_owned(), now);
        if registers {
            self.tell_host(host);
        }
    }

    /// A step is stored: lets everybody know.
    fn publish(&self, outcome: Outcome) {
        let records = outcome.records.clone();
        let mut known = self.known();
        known.publish(outcome);
        records.iter().for_each(|record| self.announce(&known, record));
        drop(known);
        self.steps.send_modify(|step| *step = step.wrapping_add(1));
    }

    fn announce(&self, known: &Known, record: &Record) {
        let event = match record {
            Record::Lease(lease) => Some(Event::Lease(present(lease))),
            Record::Function(function) => self
                .inventory
                .devices
                .iter()
                .find(|d| d.function == function.function)
                .map(|device| Event::Device(self.device(known, device))),
            Record::Host(_) | Record::NextLease { .. } | Record::Forgotten { .. } => None,
        };
        if let Some(event) = event {
            // Nobody listening is no failure.
            let _ = self.events.send(event);
        }
    }

    fn tell_host(&self, host: &str) {
        let status = self.host(&self.known(), host);
        let _ = self.events.send(Event::Host(status));
    }

    /// Waits until `ready` gives a value, at most until `deadline`.
    async fn wait<R>(
        &self,
        deadline: tokio::time::Instant,
        ready: impl Fn(&Known) -> Option<R>,
    ) -> Option<R> {
        let mut steps = self.steps.subscribe();
        loop {
            if let Some(value) = ready(&self.known()) {
                return Some(value);
            }
            tokio::time::timeout_at(deadline, steps.changed()).await.ok()?.ok()?;
        }
    }
}
