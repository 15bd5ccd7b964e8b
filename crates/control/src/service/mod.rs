//! The control plane's shell around [`rackbus_lease::Authority`]: gives it time and messages,
//! stores what it decides, then sends what it says.

mod paths;
mod views;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_fabric::Topology;
use rackbus_lease::{
    Authority, Config, FunctionId, FunctionState, LeaseRecord, LeaseState, Message, Outcome,
    Record, ReturnRefused,
};
use tokio::sync::{broadcast, mpsc, watch};

use crate::api::{ApiError, Event, Lease};
use crate::store::{Store, StoreError};

use views::present;
pub(crate) use views::problem;

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
    inventory: Inventory,
    config: Config,
    clock: Clock,
    core: Mutex<Core>,
    /// Moves with every step.
    steps: watch::Sender<u64>,
    events: broadcast::Sender<Event>,
}

#[derive(Debug)]
struct Core {
    authority: Authority,
    store: Store,
    /// The nodes that listen now.
    nodes: BTreeMap<String, mpsc::UnboundedSender<Message>>,
    refused: u64,
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

impl Service {
    /// Opens the state and goes on where it stopped.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(options: Options) -> Result<Arc<Service>, StoreError> {
        let store = Store::open(&options.database, &options.inventory.rack)?;
        let clock = Clock::new();
        let authority = Authority::restore(options.config, clock.now(), store.load()?);
        let core = Core { authority, store, nodes: BTreeMap::new(), refused: 0 };
        Ok(Arc::new(Service {
            inventory: options.inventory,
            config: options.config,
            clock,
            core: Mutex::new(core),
            steps: watch::Sender::new(0),
            events: broadcast::Sender::new(EVENT_BACKLOG),
        }))
    }

    /// Lets time pass for the authority, for ever.
    pub async fn run_clock(self: Arc<Self>) {
        let mut steps = self.steps.subscribe();
        loop {
            let due = self.core().authority.next_tick();
            let now = self.clock.now();
            let wait = due.map(|at| Duration::from_millis(at.saturating_sub(now)));
            tokio::select! {
                () = tokio::time::sleep(wait.unwrap_or(Duration::MAX)), if wait.is_some() => {
                    // A failure is logged, and the tick comes again.
                    let _ = self.step(|authority, now| ((), authority.tick(now)));
                }
                _ = steps.changed() => {}
            }
        }
    }

    /// Borrows a function and waits until it can be used.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow(&self, function: &str, borrower: &str) -> Result<Lease, ApiError> {
        let id: FunctionId = function.parse().map_err(|cause: rackbus_lease::BadFunctionId| {
            problem("bad_name", cause.to_string(), "`rackbus devices` lists the functions")
        })?;
        let granted = self.step(|authority, now| match authority.borrow(now, &id, borrower) {
            Ok((lease, outcome)) => (Ok(lease), outcome),
            Err(refused) => (Err(refused), Outcome::default()),
        })?;
        let lease = granted.map_err(|refused| {
            self.core().refused += 1;
            tracing::info!(function, borrower, %refused, "borrow refused");
            self.explain(refused)
        })?;
        let waited = self
            .wait(PATIENCE, |core| {
                let record = core.authority.lease(lease)?;
                matches!(record.state, LeaseState::Active { .. } | LeaseState::Ended { .. })
                    .then(|| record.clone())
            })
            .await;
        match waited {
            Some(LeaseRecord { state: LeaseState::Ended { reason }, .. }) => Err(problem(
                "failed",
                format!("{function} could not be lent to {borrower}: {reason}"),
                "`rackbus status` tells how the nodes are",
            )),
            Some(record) => Ok(present(&record)),
            None => {
                let _ = self.step(|authority, now| {
                    ((), authority.give_back(now, lease).unwrap_or_default())
                });
                Err(problem(
                    "timeout",
                    format!("{function} could not be lent to {borrower} in {PATIENCE:?}"),
                    "the lease is taken back; `rackbus status` tells how the nodes are",
                ))
            }
        }
    }

    /// Returns a lease and waits until the function is offered again.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn give_back(&self, lease: u64) -> Result<Lease, ApiError> {
        let outcome = self.step(|authority, now| match authority.give_back(now, lease) {
            Ok(outcome) => (Ok(()), outcome),
            Err(refused) => (Err(refused), Outcome::default()),
        })?;
        outcome.map_err(|refused| match &refused {
            ReturnRefused::Unknown(_) => {
                problem("unknown_lease", refused.to_string(), "`rackbus leases` lists them")
            }
            ReturnRefused::Over { .. } => {
                problem("over", refused.to_string(), "there is nothing left to return")
            }
        })?;
        let back = self
            .wait(RETURN_PATIENCE, |core| {
                let record = core.authority.lease(lease)?;
                let function = core.authority.function(&record.function)?;
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
    pub fn receive(&self, host: &str, messages: Vec<Message>) -> Result<(), ApiError> {
        self.check_host(host)?;
        for message in messages {
            tracing::debug!(host, ?message, "received");
            let registers = matches!(message, Message::Register { .. });
            self.step(|authority, now| ((), authority.receive(now, host, message)))?;
            if registers {
                self.tell_host(host);
            }
        }
        Ok(())
    }

    /// A node listens: what is said to it from now on. A later listener takes its place.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host.
    pub fn listen(&self, host: &str) -> Result<mpsc::UnboundedReceiver<Message>, ApiError> {
        self.check_host(host)?;
        let (sender, receiver) = mpsc::unbounded_channel();
        self.core().nodes.insert(host.to_owned(), sender);
        tracing::info!(host, "node connected");
        self.tell_host(host);
        Ok(receiver)
    }

    /// What changes, from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // The core is changed in whole steps; a panic between two leaves it as it was.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step of the authority: decide, store, send, tell.
    fn step<R>(
        &self,
        decide: impl FnOnce(&mut Authority, u64) -> (R, Outcome),
    ) -> Result<R, ApiError> {
        let now = self.clock.now();
        let mut guard = self.core();
        let core = &mut *guard;
        let (answer, outcome) = decide(&mut core.authority, now);
        if let Err(error) = core.store.save(&outcome.records) {
            tracing::error!(%error, "a decision could not be stored and is taken back");
            self.take_back(core);
            return Err(problem(
                "not_stored",
                format!("the decision could not be stored: {error}"),
                "nothing was changed; see to the disk of the control plane and try again",
            ));
        }
        for (host, message) in outcome.messages {
            tracing::debug!(host, ?message, "sent");
            if let Some(node) = core.nodes.get(&host)
                && node.send(message).is_err()
            {
                core.nodes.remove(&host);
            }
        }
        for record in &outcome.records {
            self.announce(core, record);
        }
        drop(guard);
        self.steps.send_modify(|step| *step = step.wrapping_add(1));
        Ok(answer)
    }

    /// What was decided and not stored never happened.
    fn take_back(&self, core: &mut Core) {
        match core.store.load() {
            Ok(records) => {
                core.authority = Authority::restore(self.config, self.clock.now(), records);
            }
            Err(error) => {
                tracing::error!(%error, "the state cannot be read back; the control plane ends");
                std::process::exit(1);
            }
        }
    }

    fn announce(&self, core: &Core, record: &Record) {
        let event = match record {
            Record::Lease(lease) => Some(Event::Lease(present(lease))),
            Record::Function(function) => self
                .inventory
                .devices
                .iter()
                .find(|d| d.function == function.function)
                .map(|device| Event::Device(self.device(core, device))),
            Record::Host(_) | Record::Forgotten { .. } => None,
        };
        if let Some(event) = event {
            // Nobody listening is no failure.
            let _ = self.events.send(event);
        }
    }

    fn tell_host(&self, host: &str) {
        let status = self.host(&self.core(), host);
        let _ = self.events.send(Event::Host(status));
    }

    /// Waits until `ready` gives a value, at most `patience`.
    async fn wait<R>(&self, patience: Duration, ready: impl Fn(&Core) -> Option<R>) -> Option<R> {
        let mut steps = self.steps.subscribe();
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            if let Some(value) = ready(&self.core()) {
                return Some(value);
            }
            tokio::time::timeout_at(deadline, steps.changed()).await.ok()?.ok()?;
        }
    }
}
