//! The control plane's shell around [`rackbus_lease::Authority`]: gives it time and messages,
//! stores what it decides, then sends what it says.
//!
//! `writer` takes the steps, on a thread of its own; `known` is what everybody sees of them.

mod compositions;
mod known;
mod levels;
mod metrics;
pub(crate) mod paths;
mod sections;
mod shares;
mod turns;
pub(crate) mod views;
mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::histogram::Histogram;
use rackbus_fabric::Topology;
use rackbus_lease::{
    Authority, BorrowRefused, Composition, Config, FunctionId, LeaseRecord, LeaseState, Message,
    Outcome, Placement, Priority, Queue, Record, ReturnRefused, Terms,
};
use tokio::sync::{broadcast, mpsc, watch};

use crate::access::Peer;
use crate::answers::Answers;
use crate::api::{
    ApiError, BorrowRequest, Change, Event, EventKind, Lease, NodeMessages, NodeReport,
};
use crate::events::{Draft, Log};
use crate::store::{Commit, Sqlite, Store, StoreError};

use known::Known;
pub use sections::{OfferedDevice, ReadRack, Section, Sections};
use turns::{Turn, is_busy};
pub(crate) use views::{not_lent, present, problem};
use writer::{Asker, Granted, Request, Returned, Wanted, Writing};

/// How long a request waits for nodes to do what it asks for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a return waits: a guest may take its time to let go of a device.
const RETURN_PATIENCE: Duration = Duration::from_secs(40);
/// How far the clocks of machines may be apart before somebody is told, in milliseconds.
const CLOCKS_APART: u64 = 5_000;
/// Terms that records can have lost.
const MOST_LOST: u64 = 1_000_000;
/// How many incidents the status tells.
const INCIDENTS: usize = 10;
/// Changes that a slow listener may be behind.
const CHANGES_BACKLOG: usize = 1024;

/// How long commits take, in seconds: what is told apart.
const COMMIT_TIMES: [f64; 10] = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0];

/// What the rack file says there is.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// Name of the rack, as its file says.
    pub rack: String,
    /// The hosts, by name.
    pub hosts: Vec<String>,
    /// Its devices, each with its functions.
    pub sections: Sections,
    /// All functions of the rack, in the order of its file.
    pub devices: Vec<InventoryDevice>,
    /// Compositions of the rack file.
    pub compositions: Vec<Composition>,
    /// The components and links that `rackbus path` goes along.
    pub topology: Topology,
    /// Hosts are machines that share no memory: fronts run at their borrowers only.
    pub apart: bool,
}

/// One function of the rack file.
#[derive(Debug, Clone)]
pub struct InventoryDevice {
    /// The function, by its lender and its name there.
    pub function: FunctionId,
    /// Its class, as the rack file has it: `nvme`.
    pub kind: String,
    /// Size and backing, for people.
    pub detail: String,
    /// Its front can run at the borrower, apart from what is lent; on another machine where hosts are
    /// [apart](Inventory::apart).
    pub separable: bool,
    /// The hosts to which NTBs of its lender lead, in whose own PCI trees it can appear; none where it is no function
    /// of the machine itself.
    pub windows: BTreeSet<String>,
}

/// Tells whether a process is the node of a host.
pub type IsNode = Arc<dyn Fn(&str, i32) -> bool + Send + Sync>;

/// How the control plane runs.
#[derive(Clone)]
pub struct Options {
    /// The hosts and functions of the rack file.
    pub inventory: Inventory,
    /// Reads the rack file again with devices beside its own; nothing where devices cannot be offered.
    pub read_rack: Option<ReadRack>,
    /// Time limits of the protocol.
    pub config: Config,
    /// Where the state is kept.
    pub database: PathBuf,
    /// How many lines this process has left out of its log.
    pub log_lines_left_out: fn() -> u64,
    /// Which process speaks for which host. This process plays any host itself.
    pub is_node: IsNode,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("database", &self.database).finish_non_exhaustive()
    }
}

/// The running control plane.
pub struct Service {
    shared: Arc<Shared>,
    writing: Writing,
    is_node: IsNode,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("shared", &self.shared).finish_non_exhaustive()
    }
}

/// What the writer and those who ask share.
struct Shared {
    /// Exchanged as a whole when devices were offered or withdrawn.
    inventory: RwLock<Arc<Inventory>>,
    read_rack: Option<ReadRack>,
    clock: Clock,
    log_lines_left_out: fn() -> u64,
    known: Mutex<Known>,
    /// Who waits for which function. Locked for moments only, after `known` where both are.
    queue: Mutex<Queue>,
    /// Moves with every step.
    steps: watch::Sender<u64>,
    changes: broadcast::Sender<Change>,
    /// How long commits took, in seconds.
    commits: Histogram,
    /// The leader's term, which goes with all that nodes are told.
    term: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("known", &self.known).finish_non_exhaustive()
    }
}

/// Functions that are asked for together.
struct Asked<'a> {
    functions: Vec<FunctionId>,
    borrower: &'a str,
    terms: Terms,
    /// Goes with one function only.
    key: Option<String>,
}

fn function_id(name: &str) -> Result<FunctionId, ApiError> {
    name.parse().map_err(|cause: rackbus_lease::BadFunctionId| {
        problem("bad_name", cause.to_string(), "`rackbus devices` lists the functions")
    })
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
        let store = Sqlite::open(&options.database, &options.inventory.rack)?;
        Service::open_with(options, Box::new(store))
    }

    /// The same, with a store of the caller's.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_with(options: Options, store: Box<dyn Store>) -> Result<Arc<Service>, OpenError> {
        let text = format!("the control plane {} was started", env!("CARGO_PKG_VERSION"));
        Service::begin(options, store, text)
    }

    /// The same, where `text` tells in the events who begins.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn begin(
        options: Options,
        mut store: Box<dyn Store>,
        text: String,
    ) -> Result<Arc<Service>, OpenError> {
        let clock = Clock::new();
        let state = store.load()?;
        let term = store.begin()?;
        let newest = state.events.last().map_or(0, |event| event.at_ms);
        let behind = newest.checked_sub(clock.now()).filter(|behind| *behind > CLOCKS_APART);
        let mut authority = Authority::restore(options.config, clock.now(), state.records);
        let sections = &options.inventory.sections;
        let listed = |host: &str, device: &str| {
            let section = sections.get(&(host.to_owned(), device.to_owned()))?;
            Some((section.text.as_str(), &section.functions[..]))
        };
        if options.read_rack.is_some() {
            // Before anything else is known of it.
            let relisted = authority.relist(clock.now(), listed);
            store.commit(&Commit { records: relisted.records, ..Commit::default() })?;
        }
        let mut known = Known::of(&authority);
        known.log = Log::of(state.events);
        let shared = Arc::new(Shared {
            inventory: RwLock::new(Arc::new(options.inventory)),
            read_rack: options.read_rack,
            clock,
            log_lines_left_out: options.log_lines_left_out,
            known: Mutex::new(known),
            queue: Mutex::default(),
            steps: watch::Sender::new(0),
            changes: broadcast::Sender::new(CHANGES_BACKLOG),
            commits: Histogram::new(COMMIT_TIMES),
            term: AtomicU64::new(term),
        });
        shared.renew_inventory();
        let answers = Answers::of(state.answers);
        let mut started = vec![Draft::of_host(EventKind::Restart, None, text)];
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
        Ok(Arc::new(Service { shared, writing, is_node: options.is_node }))
    }

    /// Borrows a function and waits until it can be used, and where the request says so, until others
    /// have returned it. When the caller does not wait so long (the future is dropped), it loses its
    /// place in the queue, and the lease is given back. Asked again with the same idempotency key,
    /// the answer is that to the first request.
    ///
    /// # Errors
    /// [`ApiError`], which names the holder when there is one.
    pub async fn borrow(
        &self,
        request: &BorrowRequest,
        key: Option<String>,
    ) -> Result<Lease, ApiError> {
        let id = function_id(&request.function)?;
        let (wait, priority) = (request.wait()?, request.priority);
        if self.shared.inventory().apart && request.placement == Some(Placement::Lender) {
            return Err(problem(
                "inseparable",
                format!(
                    "the hosts of this rack are machines: the front of {id} can run at its borrower only"
                ),
                "ask for placement `borrower` or, where an NTB joins the two, `host`, or for no placement",
            ));
        }
        let asked = Asked {
            functions: vec![id],
            borrower: &request.borrower,
            terms: request.terms()?,
            key,
        };
        match self.grant(asked, wait, priority).await? {
            Granted::Answered(answer) => *answer,
            Granted::Leases(wanted) => {
                let mut leases = self.settle(wanted, &request.function, &request.borrower).await?;
                Ok(leases.remove(0))
            }
        }
    }

    /// Has leases granted on functions, on all or on none, as soon as they are to be had.
    async fn grant(
        &self,
        asked: Asked<'_>,
        wait: Option<Duration>,
        priority: Priority,
    ) -> Result<Granted, ApiError> {
        let Asked { functions, borrower, mut terms, key } = asked;
        if self.shared.inventory().apart && terms.placement != Placement::Host {
            terms.placement = Placement::Borrower;
        }
        self.shared.check_placement(&functions, terms.placement, borrower)?;
        let (begun, now) = (Instant::now(), tokio::time::Instant::now());
        let wait_until = wait.map(|wait| now + wait);
        let patience = now + PATIENCE;
        let turn = wait.map(|_| Turn::enter(&self.shared, &functions, priority));
        let asker = turn.as_ref().map_or(Asker::Now(priority), Turn::asker);
        let mut steps = self.shared.steps.subscribe();
        let granted = loop {
            let (functions, borrower) = (functions.clone(), borrower.to_owned());
            let (terms, key) = (terms.clone(), key.clone());
            let ask = |answer| Request::Borrow { functions, borrower, terms, key, asker, answer };
            let refused = match self.writing.ask(ask).await? {
                Err(refused) => refused,
                granted => break granted,
            };
            let again = match &refused {
                // Just after a restart: the nodes are on their way.
                BorrowRefused::Awaited(_) | BorrowRefused::Joining(_) => {
                    let until = wait_until.map_or(patience, |until| until.max(patience));
                    tokio::time::timeout_at(until, steps.changed()).await.is_ok()
                }
                busy if is_busy(busy) => match (&turn, wait_until) {
                    (Some(turn), Some(until)) => turn.come(until).await,
                    _ => false,
                },
                _ => false,
            };
            if !again {
                break Err(refused);
            }
        };
        drop(turn);
        if let Err(refused) = &granted
            && (matches!(refused, BorrowRefused::Awaited(_) | BorrowRefused::Joining(_))
                || wait.is_some() && is_busy(refused))
        {
            self.shared.known().refused += 1;
            let waited = wait.map(|_| format!(" after {} ms", begun.elapsed().as_millis()));
            let text = format!("{borrower} was refused{}: {refused}", waited.unwrap_or_default());
            let refusal = Draft::of_host(EventKind::Refusal, Some(borrower), text);
            self.writing.note(vec![refusal]).await;
        }
        granted.map_err(|refused| self.shared.explain(refused))
    }

    /// Waits until all that was granted can be used. If one cannot, all are given back.
    async fn settle(
        &self,
        wanted: Vec<Wanted>,
        what: &str,
        borrower: &str,
    ) -> Result<Vec<Lease>, ApiError> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let settled = |known: &Known| {
            let record = |wanted: &Wanted| known.leases.get(&wanted.lease).cloned();
            let records: Vec<LeaseRecord> = wanted.iter().filter_map(record).collect();
            let ended = |record: &LeaseRecord| matches!(record.state, LeaseState::Ended { .. });
            let open = |record: &LeaseRecord| matches!(record.state, LeaseState::Active { .. });
            let all_open = records.len() == wanted.len() && records.iter().all(open);
            (records.iter().any(ended) || all_open).then_some(records)
        };
        let Some(records) = self.shared.wait(deadline, settled).await else {
            return Err(problem(
                "timeout",
                format!("{what} could not be lent to {borrower} in {PATIENCE:?}"),
                "the lease is taken back; `rackbus status` tells how the nodes are",
            ));
        };
        for record in &records {
            if let LeaseState::Ended { reason } = &record.state {
                return Err(not_lent(record, reason));
            }
        }
        wanted.into_iter().for_each(Wanted::keep);
        Ok(records.iter().map(present).collect())
    }

    /// Returns a lease and waits until the function is offered again. Asked again with the same
    /// idempotency key, the answer is that to the first request.
    ///
    /// # Errors
    /// [`ApiError`].
    pub async fn give_back(&self, lease: u64, key: Option<String>) -> Result<Lease, ApiError> {
        let ask = |answer| Request::GiveBack { lease, key, answer };
        match self.writing.ask(ask).await? {
            Ok(Returned::Awaited) => {}
            Ok(Returned::Answered(answer)) => return *answer,
            Err(refused @ ReturnRefused::Unknown(_)) => {
                let help = "`rackbus leases` lists them";
                return Err(problem("unknown_lease", refused.to_string(), help));
            }
            Err(refused @ ReturnRefused::AlreadyEnded { .. }) => {
                let help = "there is nothing left to return";
                return Err(problem("over", refused.to_string(), help));
            }
        }
        let deadline = tokio::time::Instant::now() + RETURN_PATIENCE;
        let back = self
            .shared
            .wait(deadline, |known| {
                let record = known.leases.get(&lease)?;
                (!record.is_live() && !known.is_held(lease)).then(|| present(record))
            })
            .await;
        back.ok_or_else(|| {
            let function = self.shared.known().leases.get(&lease).map(|l| l.function.clone());
            let trouble = function.and_then(|function| self.shared.trouble(&function));
            let cause = trouble.map(|trouble| format!(": {trouble}")).unwrap_or_default();
            problem(
                "timeout",
                format!("lease {lease} is ending, but its function is not back after {RETURN_PATIENCE:?}{cause}"),
                "the control plane goes on asking; `rackbus status` tells how the nodes are",
            )
        })
    }

    /// Lets only the node of `host` speak for it: what a node says ends leases.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host, or `peer` is not its node.
    pub fn check_node(&self, host: &str, peer: &Peer) -> Result<(), ApiError> {
        self.shared.check_host(host)?;
        let own = |process: i32| u32::try_from(process) == Ok(std::process::id());
        let is_node = match peer {
            Peer::Local(Some(process)) => own(*process) || (self.is_node)(host, *process),
            Peer::Local(None) | Peer::Control | Peer::Stranger => false,
            Peer::Node(node) => node == host,
        };
        if is_node {
            return Ok(());
        }
        tracing::warn!(host, ?peer, "somebody who is not the host's node was refused");
        let error = format!("you are not the node of {host}");
        Err(problem("not_the_node", error, "nodes are started with `rackbus node --host HOST`"))
    }

    /// Lets nobody change the devices of `host` but its own node, and who administrates the rack: what is offered may
    /// name files and programs of that host.
    ///
    /// # Errors
    /// `forbidden`.
    pub fn check_device_of(&self, host: &str, peer: &Peer) -> Result<(), ApiError> {
        let Peer::Local(Some(process)) = peer else { return peer.acts_for(host) };
        let inventory = self.shared.inventory();
        let node_of = inventory.hosts.iter().find(|it| (self.is_node)(it, *process));
        match node_of {
            Some(own) => Peer::Node(own.clone()).acts_for(host),
            None => Ok(()),
        }
    }

    /// Lets nobody but the borrower of `lease`, and who administrates the rack, change it.
    ///
    /// # Errors
    /// `forbidden`; of what is not known, for others than administrators: it may be made at this moment.
    pub fn check_borrower(&self, lease: u64, peer: &Peer) -> Result<(), ApiError> {
        match (self.lease(lease), peer) {
            (_, Peer::Local(_) | Peer::Control) => Ok(()),
            (Some(known), _) => peer.acts_for(&known.borrower),
            (None, _) => {
                let error = format!("there is no lease {lease}");
                Err(problem("unknown_lease", error, "`rackbus leases --all` lists them"))
            }
        }
    }

    /// Messages from a host's node.
    ///
    /// # Errors
    /// [`ApiError`] when the rack has no such host, or the state cannot be stored.
    pub async fn receive(&self, host: &str, said: NodeMessages) -> Result<(), ApiError> {
        self.shared.check_host(host)?;
        let NodeMessages { mut messages, report } = said;
        for message in &mut messages {
            self.shared.bound(host, message)?;
        }
        tracing::debug!(host, ?messages, "received");
        let events = report.map(|report| self.shared.note(host, report)).unwrap_or_default();
        let host = host.to_owned();
        self.writing.ask(|answer| Request::Heard { host, messages, events, answer }).await
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

    /// The term in which nodes are told what they are told. `known`: the newest one that a node knows of; where that
    /// is later, the records are an older copy, and this goes on in one that is later yet.
    ///
    /// # Errors
    /// [`ApiError`], when that cannot be stored.
    pub async fn term(&self, known: u64) -> Result<u64, ApiError> {
        let term = self.shared.term.load(Ordering::Acquire);
        if known <= term {
            return Ok(term);
        }
        // A node that tells of more would use up the numbers.
        let above = known.min(term.saturating_add(MOST_LOST));
        self.writing.ask(|answer| Request::RaiseTerm { above, answer }).await
    }

    /// What changes, from now on.
    pub fn changes(&self) -> broadcast::Receiver<Change> {
        self.shared.changes.subscribe()
    }

    /// What happened after event number `after`, of one kind or of all, at most the last `most`; and
    /// the number of the newest event.
    pub fn events(&self, after: u64, kind: Option<EventKind>, most: usize) -> (Vec<Event>, u64) {
        let known = self.shared.known();
        (known.log.after(after, kind, most), known.log.newest())
    }

    /// Moves whenever something was stored.
    pub fn steps(&self) -> watch::Receiver<u64> {
        self.shared.steps.subscribe()
    }
}

impl Shared {
    /// Held for moments only, and never while anything is waited for.
    fn known(&self) -> MutexGuard<'_, Known> {
        // It is changed in whole steps; a panic between two leaves it as it was.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the rack has now.
    fn inventory(&self) -> Arc<Inventory> {
        self.inventory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Devices were offered or withdrawn.
    fn renew_inventory(&self) {
        let changes: Vec<_> = self.known().devices.values().cloned().collect();
        if let Some(inventory) = self.read_inventory(&changes) {
            *self.inventory.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(inventory);
        }
    }

    /// A host was heard at `now`.
    fn heard(&self, host: &str, now: u64, registers: bool) {
        self.known().heard.insert(host.to_owned(), now);
        if registers {
            self.tell_host(host);
        }
    }

    /// A node said how it is. Only what the rack has is kept. Returns what is new in it.
    fn note(&self, host: &str, mut report: NodeReport) -> Vec<Draft> {
        let inventory = self.inventory();
        let own = inventory.devices.iter().filter(|device| device.function.host == host);
        let own: Vec<&InventoryDevice> = own.collect();
        let counted_ms = report.counted_ms;
        let functions = report.devices.values_mut().chain(report.fronts.values_mut());
        functions.for_each(|function| function.counted_ms = counted_ms);
        report.devices.retain(|name, _| own.iter().any(|own| own.function.device == *name));
        let mut known = self.known();
        report.fronts.retain(|name, _| known.borrows(host, name));
        report.peers.retain(|name, _| known.borrows(host, name));
        let restarts = report.restarts_in_place;
        let pause_us = report.restart_pause_us;
        let before = known.reports.insert(host.to_owned(), report);
        let mut drafts = Vec::new();
        if before.as_ref().is_some_and(|before| before.restarts_in_place < restarts) {
            drafts.push(Draft::of_restart_in_place(host, pause_us));
        }
        let first = before.is_none();
        let before = before.unwrap_or_default();
        for device in own {
            let name = &device.function.device;
            let of = |report: &NodeReport| report.devices.get(name).cloned().unwrap_or_default();
            let (before, now) = (of(&before), known.reports.get(host).map(of).unwrap_or_default());
            if before.trouble != now.trouble {
                let _ = self.changes.send(Change::Device(Box::new(self.device(&known, device))));
            }
            let function = device.function.to_string();
            let news = Draft::of_report(host, &function, &before, &now).into_iter();
            // After a restart of the control plane everything in a report is new to it.
            drafts.extend(news.filter(|draft| !first || !known.log.says(draft)));
        }
        for (function, now) in known.reports.get(host).iter().flat_map(|report| &report.fronts) {
            let before = before.fronts.get(function).cloned().unwrap_or_default();
            drafts.extend(Draft::of_report(host, function, &before, now));
        }
        for (function, now) in known.reports.get(host).iter().flat_map(|report| &report.peers) {
            let before = before.peers.get(function).cloned().unwrap_or_default();
            drafts.extend(Draft::of_peers(host, function, &before, now));
        }
        drafts
    }

    /// A step is stored: lets everybody know.
    fn publish(&self, outcome: Outcome, events: Vec<Event>, first_event: u64) {
        events.iter().for_each(crate::events::log);
        let Outcome { records, messages } = outcome;
        let changes = |it: &Record| matches!(it, Record::Device(_) | Record::DeviceRemoved { .. });
        let mut known = self.known();
        known.log.put(&events, first_event);
        known.note(records.clone());
        if records.iter().any(changes) {
            drop(known);
            // Before a node is told of a device, whose answer is read by it.
            self.renew_inventory();
            known = self.known();
        }
        known.say(messages);
        records.iter().for_each(|record| self.announce(&known, record));
        drop(known);
        self.steps.send_modify(|step| *step = step.wrapping_add(1));
    }

    fn announce(&self, known: &Known, record: &Record) {
        let change = match record {
            Record::Lease(lease) => Some(Change::Lease(present(lease))),
            Record::Function(function) => self
                .inventory()
                .devices
                .iter()
                .find(|d| d.function == function.function)
                .map(|device| Change::Device(Box::new(self.device(known, device)))),
            // The others are seen by what becomes of functions and leases.
            _ => None,
        };
        if let Some(change) = change {
            // Nobody listening is no failure.
            let _ = self.changes.send(change);
        }
    }

    fn tell_host(&self, host: &str) {
        let status = self.host(&self.known(), host);
        let _ = self.changes.send(Change::Host(status));
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
