//! The control plane's shell around [`rackbus_lease::Authority`]: gives it time and messages,
//! stores what it decides, then sends what it says.
//!
//! `writer` takes the steps, on a thread of its own; `known` is what everybody sees of them.

mod accelerators;
mod access;
mod asked;
mod certificates;
mod clock;
mod compositions;
mod following;
mod inventory;
mod known;
mod leases;
mod levels;
mod metrics;
mod news;
mod nodes;
pub(crate) mod paths;
mod sections;
mod shared;
mod shares;
mod together;
mod turns;
pub(crate) mod views;
mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};

use prometheus_client::metrics::histogram::Histogram;
use rackbus_identity::Revocations;
use rackbus_lease::{Authority, Config};
use tokio::sync::{broadcast, watch};

use crate::access::Forbidden;
use crate::answers::KeptAnswers;
use crate::api::{Change, EventKind, EventRecord};
use crate::events::{Draft, Log};
use crate::register::CertificateRegister;
use crate::store::{Commit, Sqlite, Store, StoreError};

pub(crate) use certificates::{OTHER_AUTHORITIES, anew};
use clock::{WallClock, millis};
use following::HostsChange;
pub use inventory::{Inventory, InventoryDevice, InventoryDevices};
use known::RackState;
use leases::{FunctionsRequest, function_id};
pub use sections::{DescribedDevice, OfferedDevice, ReadFile, ReadRack, Sections};
use shared::WriterShared;
pub(crate) use views::{not_lent, present, problem};
use writer::{Granted, WriterRequest, Writing};

/// How far the clocks of machines may be apart before somebody is told, in milliseconds.
const CLOCKS_APART: u64 = 5_000;
/// How many incidents the status tells.
const INCIDENTS: usize = 10;
/// Changes that a slow listener may be behind.
const CHANGES_BACKLOG: usize = 1024;

/// How long commits take, in seconds: what is told apart.
const COMMIT_TIMES: [f64; 10] = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0];

/// Tells whether a process is the node of a host.
pub type IsNode = Arc<dyn Fn(&str, i32) -> bool + Send + Sync>;

/// How the control plane runs.
#[derive(Clone)]
pub struct ServiceOptions {
    /// The hosts and functions of the rack file.
    pub inventory: Inventory,
    /// Reads the rack file again with devices beside its own; nothing where devices cannot be offered.
    pub read_rack: Option<ReadRack>,
    /// Reads another rack file while the rack runs; nothing where the rack stays that of the file it was started with.
    pub read_file: Option<ReadFile>,
    /// Time limits of the protocol.
    pub config: Config,
    /// Where the state is kept.
    pub database: PathBuf,
    /// How many lines this process has left out of its log.
    pub log_lines_left_out: fn() -> u64,
    /// Which process speaks for which host. This process plays any host itself.
    pub is_node: IsNode,
}

impl std::fmt::Debug for ServiceOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceOptions").field("database", &self.database).finish_non_exhaustive()
    }
}

/// The running control plane.
pub struct Service {
    shared: Arc<WriterShared>,
    writing: Writing,
    /// How long the user of a lease that is returned has to release its function, in milliseconds.
    return_grace: u64,
    is_node: IsNode,
    forbidden: Forbidden,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("shared", &self.shared).finish_non_exhaustive()
    }
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
    pub fn open(options: ServiceOptions) -> Result<Arc<Service>, OpenError> {
        let store = Sqlite::open(&options.database, &options.inventory.rack)?;
        Service::open_with(options, Box::new(store))
    }

    /// The same, with a store of the caller's.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_with(
        options: ServiceOptions,
        store: Box<dyn Store>,
    ) -> Result<Arc<Service>, OpenError> {
        let text = format!("the control plane {} was started", env!("CARGO_PKG_VERSION"));
        Service::begin(options, store, text)
    }

    /// The same, where `text` tells in the events who begins.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn begin(
        options: ServiceOptions,
        mut store: Box<dyn Store>,
        text: String,
    ) -> Result<Arc<Service>, OpenError> {
        let clock = WallClock::new();
        let state = store.load()?;
        let term = store.begin()?;
        let newest = state.events.last().map_or(0, |event| event.at_ms);
        let behind = newest.checked_sub(clock.now()).filter(|behind| *behind > CLOCKS_APART);
        let return_grace = options.config.close_grace;
        let mut authority = Authority::restore(options.config, clock.now(), state.records);
        let listed_sections = &options.inventory.sections;
        let listed = |host: &str, device: &str| sections::listed_in(listed_sections, host, device);
        let mut left = BTreeSet::new();
        if options.read_rack.is_some() {
            // Before anything else is known of it.
            let mut read = authority.relist(clock.now(), listed);
            if options.read_file.is_some() {
                let hosts = options.inventory.hosts.iter().cloned().collect();
                read.append(authority.keep_hosts(clock.now(), &hosts));
            }
            left.extend(read.records.iter().filter_map(HostsChange::host_that_left));
            store.commit(&Commit { records: read.records, ..Commit::default() })?;
            authority.settle();
        }
        let mut known = RackState::of(&authority);
        known.log = Log::of(state.events);
        let hosts = options.inventory.hosts.iter().cloned();
        let mut register = CertificateRegister::of(state.certificates).with_hosts(hosts);
        // Before anybody is told what is revoked: nothing prolonged it while no control plane ran.
        writer::prolong_all(&mut register, &mut *store)?;
        let revocations = Revocations::default();
        revocations.learn(register.revoked(), rackbus_identity::now());
        let shared = Arc::new(WriterShared {
            inventory: RwLock::new(Arc::new(options.inventory)),
            read_rack: RwLock::new(options.read_rack),
            read_file: options.read_file,
            clock,
            log_lines_left_out: options.log_lines_left_out,
            known: Mutex::new(known),
            queue: Mutex::default(),
            steps: watch::Sender::new(0),
            changes: broadcast::Sender::new(CHANGES_BACKLOG),
            commits: Histogram::new(COMMIT_TIMES),
            term: AtomicU64::new(term),
            revoked_version: watch::Sender::new(register.revoked().version),
            authorities: watch::Sender::new(register.authorities().cloned()),
            register: Mutex::new(register),
            revocations,
        });
        shared.renew_inventory();
        let answers = KeptAnswers::of(state.answers);
        let mut started = vec![Draft::of_host(EventKind::Restart, None, text)];
        started.extend(HostsChange { left, ..HostsChange::default() }.events());
        if let Some(behind) = behind {
            let text = format!(
                "the clock of the control plane's machine is {} s behind what was seen before: see to its time",
                behind / 1000
            );
            tracing::warn!("{text}");
            started.push(Draft::of_host(EventKind::Fault, None, text));
        }
        let writing = Writing::start(authority, store, answers, shared.clone(), started);
        let writing = writing.map_err(OpenError::Thread)?;
        let (is_node, forbidden) = (options.is_node, Forbidden::default());
        Ok(Arc::new(Service { shared, writing, return_grace, is_node, forbidden }))
    }

    /// What changes, from now on.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.shared.changes.subscribe()
    }

    /// What happened after event number `after`, of one kind or of all, at most the last `most`; and
    /// the number of the newest event.
    pub fn events(
        &self,
        after: u64,
        kind: Option<EventKind>,
        most: usize,
    ) -> (Vec<EventRecord>, u64) {
        let known = self.shared.known();
        (known.log.after(after, kind, most), known.log.newest())
    }

    /// Moves whenever something was stored.
    pub fn steps(&self) -> watch::Receiver<u64> {
        self.shared.steps.subscribe()
    }
}
