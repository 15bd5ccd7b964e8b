//! The node's side of the lending protocol: runs the borrower's state machine, has the lender's
//! ([`LentFunctions`]) decide, does what they say, and tells the control plane.
//!
//! Everything comes in through one channel and is decided in order. What takes time (revoking
//! waits for I/O in flight, closing waits for a guest to let go) runs beside, but in order for
//! each device and each lease. Losing the control plane stops nothing here: the agent goes on
//! trying to reach it, and what is lent and borrowed stays so.

use std::collections::HashMap;
use std::hash::Hash;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_control::api::{NodeMessages, NodeReport};
use rackbus_control::{Client, lease_span};
use rackbus_lease::{BorrowerAction, LeaseId, LenderAction, Message, Millis};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::borrower::BorrowedFunctions;
use crate::lender::LentFunctions;
use crate::unplug::Unplugger;

/// How often a node says that it is there.
const HEARTBEAT: Millis = 3_000;
/// How often a node says how it is while that changes.
const REPORT: Millis = 1_000;
/// How often it says so until it is answered.
const REGISTER_AGAIN: Millis = 250;
/// How long it waits before it looks for a lost control plane again.
const RECONNECT: Duration = Duration::from_millis(100);

/// How long the control plane may take to hear a message, before the next is tried.
const ANSWER: Duration = Duration::from_secs(5);

/// What the agent hears.
#[derive(Debug)]
pub enum Heard {
    /// The control plane listens (again): say who we are.
    Connected,
    /// A message of the control plane's.
    Said(Message),
    /// The lender has done something, and this follows.
    Lending(Vec<LenderAction>),
    /// A device hangs, or no longer does: the control plane is to know at once.
    Trouble,
    /// A lease's socket is served, or cannot be.
    OpenDone(LeaseId, Result<String, String>),
    /// A lease's socket is gone.
    CloseDone(LeaseId),
    /// The lender of a lease is gone.
    LenderLost(LeaseId, String),
}

/// Who the agent speaks for.
#[derive(Debug, Clone)]
pub struct Identity {
    /// This host.
    pub host: String,
    /// Where its link listens.
    pub address: String,
    /// The control plane's socket.
    pub control: PathBuf,
}

/// What a node says of itself, beside its functions.
pub type Observe = Box<dyn Fn() -> NodeReport + Send>;

/// The agent of one node.
pub struct Agent {
    identity: Identity,
    lender: Arc<LentFunctions>,
    borrower: Arc<BorrowedFunctions>,
    unplugger: Unplugger,
    observe: Observe,
    /// The last report, and when the next one is due.
    reported: (NodeReport, Millis),
    borrowing: rackbus_lease::Borrower,
    incarnation: u64,
    registered: bool,
    register_at: Millis,
    begun: Instant,
    heard: mpsc::UnboundedSender<Heard>,
    said: mpsc::UnboundedSender<NodeMessages>,
    by_device: Sequencer<String>,
    by_lease: Sequencer<LeaseId>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Agent {
    /// An agent that hears what is sent to `heard`.
    pub fn new(
        identity: Identity,
        lender: Arc<LentFunctions>,
        borrower: Arc<BorrowedFunctions>,
        unplugger: Unplugger,
        observe: Observe,
        heard: mpsc::UnboundedSender<Heard>,
    ) -> Self {
        // Lives are numbered by the clock; where it went back, the authority names a later one.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let incarnation = u64::try_from(since.as_nanos()).unwrap_or(0);
        lender.set_incarnation(incarnation);
        let (said, outbox) = mpsc::unbounded_channel();
        let client = Client::new(&identity.control);
        let post = tokio::spawn(post(client.clone(), identity.host.clone(), outbox));
        let listen = tokio::spawn(listen(client, identity.host.clone(), heard.clone()));
        tokio::spawn(essential(post));
        tokio::spawn(essential(listen));
        Agent {
            borrowing: rackbus_lease::Borrower::new(incarnation),
            identity,
            lender,
            borrower,
            unplugger,
            observe,
            reported: Default::default(),
            incarnation,
            registered: false,
            register_at: 0,
            begun: Instant::now(),
            heard,
            said,
            by_device: Sequencer::default(),
            by_lease: Sequencer::default(),
        }
    }

    /// Hears and acts until the channel closes.
    pub async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Heard>) {
        loop {
            let now = self.now();
            if self.register_at <= now {
                self.register(now);
            } else if self.reported.1 <= now {
                let report = self.report(now);
                self.tell(NodeMessages { messages: Vec::new(), report: Some(report) });
            }
            let actions = self.borrowing.tick(now);
            self.do_borrower(actions);
            let due = self.register_at.min(self.reported.1);
            let due = self.borrowing.next_tick().unwrap_or(u64::MAX).min(due);
            let wait = Duration::from_millis(due.saturating_sub(self.now()));
            tokio::select! {
                heard = inbox.recv() => match heard {
                    Some(heard) => self.hear(heard),
                    None => return,
                },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn now(&self) -> Millis {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn register(&mut self, now: Millis) {
        let again = if self.registered { HEARTBEAT } else { REGISTER_AGAIN };
        self.register_at = now.saturating_add(again);
        let register = Message::Register {
            incarnation: self.incarnation,
            devices: self.lender.newest_epochs(),
            newest_lease: self.lender.newest_lease().max(self.borrowing.newest_lease()),
            address: self.identity.address.clone(),
        };
        let report = self.report(now);
        self.tell(NodeMessages { messages: vec![register], report: Some(report) });
    }

    /// What the node says of itself. While that changes it is said more often.
    fn report(&mut self, now: Millis) -> NodeReport {
        let (devices, fronts) = (self.lender.report(), self.borrower.fronts());
        let report = NodeReport { devices, fronts, ..(self.observe)() };
        let next = if report == self.reported.0 { u64::MAX } else { now.saturating_add(REPORT) };
        self.reported = (report.clone(), next);
        NodeReport { counted_ms: now, ..report }
    }

    fn say(&self, message: Message) {
        self.tell(NodeMessages { messages: vec![message], report: None });
    }

    fn tell(&self, said: NodeMessages) {
        // The outbox lives as long as the process.
        let _ = self.said.send(said);
    }

    fn hear(&mut self, heard: Heard) {
        let now = self.now();
        match heard {
            Heard::Connected => {
                // This control plane may be a new one: repeated until it has answered.
                self.registered = false;
                self.register_at = now;
            }
            Heard::Said(message) => self.receive(now, message),
            Heard::Lending(actions) => self.do_lender(actions),
            Heard::Trouble => self.register_at = now,
            Heard::OpenDone(lease, outcome) => {
                let actions = self.borrowing.open_done(lease, outcome);
                self.do_borrower(actions);
            }
            Heard::CloseDone(lease) => {
                let actions = self.borrowing.close_done(lease);
                self.do_borrower(actions);
            }
            Heard::LenderLost(lease, reason) => {
                let actions = self.borrowing.lender_lost(lease, reason);
                self.do_borrower(actions);
                // The guest loses the device now, control plane or not.
                let (borrower, unplugger) = (self.borrower.clone(), self.unplugger.clone());
                self.by_lease.run(lease, move || {
                    let _about = lease_span(lease).entered();
                    unplug(&borrower, &unplugger, lease);
                });
            }
        }
    }

    fn receive(&mut self, now: Millis, message: Message) {
        match message {
            Message::Registered { incarnation } => {
                self.registered |= incarnation == self.incarnation;
            }
            Message::StaleIncarnation { incarnation, latest }
                if incarnation == self.incarnation =>
            {
                self.incarnation = latest.saturating_add(1);
                self.lender.set_incarnation(self.incarnation);
                self.borrowing.set_incarnation(self.incarnation);
                self.register_at = now;
            }
            Message::Arm { .. } | Message::Revoke { .. } => {
                let actions = self.lender.receive(message);
                self.do_lender(actions);
            }
            other => {
                let actions = self.borrowing.receive(now, other);
                self.do_borrower(actions);
            }
        }
    }

    fn do_lender(&mut self, actions: Vec<LenderAction>) {
        for action in actions {
            let (lender, heard) = (self.lender.clone(), self.heard.clone());
            match action {
                LenderAction::Send(message) => self.say(message),
                LenderAction::Arm { device, lease, epoch, borrower } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(device, epoch, borrower, "to be lent");
                        let _ = heard.send(Heard::Lending(lender.arm(&device, epoch)));
                    });
                }
                LenderAction::Revoke { device, epoch, lease } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease.map(|lease| lease_span(lease).entered());
                        tracing::info!(device, epoch, "to be taken back");
                        let actions = lender.revoke(&device, epoch).unwrap_or_else(|error| {
                            tracing::error!(device, %error, "a revocation takes long");
                            let _ = heard.send(Heard::Trouble);
                            let actions = lender.finish(&device, epoch);
                            let _ = heard.send(Heard::Trouble);
                            actions
                        });
                        let _ = heard.send(Heard::Lending(actions));
                    });
                }
            }
        }
    }

    fn do_borrower(&mut self, actions: Vec<BorrowerAction>) {
        for action in actions {
            let (borrower, heard) = (self.borrower.clone(), self.heard.clone());
            match action {
                BorrowerAction::Send(message) => self.say(message),
                BorrowerAction::Open(grant) => {
                    let lease = grant.lease;
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(function = %grant.function, epoch = grant.epoch, "borrowed");
                        let outcome = borrower
                            .open(grant)
                            .map(|path| path.display().to_string())
                            .map_err(|error| error.to_string());
                        let _ = heard.send(Heard::OpenDone(lease, outcome));
                    });
                }
                BorrowerAction::Close { lease, reason } => {
                    let unplugger = self.unplugger.clone();
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(reason, "letting go");
                        unplug(&borrower, &unplugger, lease);
                        borrower.close(lease);
                        let _ = heard.send(Heard::CloseDone(lease));
                    });
                }
            }
        }
    }
}

/// Takes a lease's function out of the VM that uses it, if one does.
fn unplug(borrower: &BorrowedFunctions, unplugger: &Unplugger, lease: LeaseId) {
    if let Some((socket, Some(_user))) = borrower.user(lease) {
        unplugger.unplug(&socket);
    }
}

/// Runs jobs beside, one after the other for each key.
#[derive(Debug)]
struct Sequencer<K> {
    last: HashMap<K, JoinHandle<()>>,
}

impl<K> Default for Sequencer<K> {
    fn default() -> Self {
        Sequencer { last: HashMap::new() }
    }
}

impl<K: Hash + Eq> Sequencer<K> {
    fn run(&mut self, key: K, job: impl FnOnce() + Send + 'static) {
        self.last.retain(|_, job| !job.is_finished());
        let before = self.last.remove(&key);
        let task = tokio::spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            essential(tokio::task::spawn_blocking(job)).await;
        });
        self.last.insert(key, task);
    }
}

/// Waits for something that the node cannot do without. Where it failed, nobody would ever hear that
/// it is done: the process ends, and its next life, which has nothing mapped, is safe.
async fn essential(work: JoinHandle<()>) {
    if let Err(error) = work.await
        && error.is_panic()
    {
        tracing::error!(%error, "a job of the node failed; the process ends");
        std::process::abort();
    }
}

/// Brings what the node says to the control plane, in order. What cannot be brought is dropped:
/// the protocol says it again.
async fn post(client: Client, host: String, mut outbox: mpsc::UnboundedReceiver<NodeMessages>) {
    while let Some(mut said) = outbox.recv().await {
        while let Ok(next) = outbox.try_recv() {
            said.messages.extend(next.messages);
            said.report = next.report.or(said.report);
        }
        match tokio::time::timeout(ANSWER, client.say(&host, &said)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the control plane did not hear"),
            Err(_) => tracing::debug!("the control plane does not answer"),
        }
    }
}

/// Hears what the control plane says, and finds it again whenever it is lost.
async fn listen(client: Client, host: String, heard: mpsc::UnboundedSender<Heard>) {
    let mut lost = false;
    while !heard.is_closed() {
        match client.listen(&host).await {
            Ok(mut messages) => {
                tracing::info!(host, "connected to the control plane");
                lost = false;
                let _ = heard.send(Heard::Connected);
                while let Some(message) = messages.next().await {
                    let _ = heard.send(Heard::Said(message));
                }
            }
            Err(error) => tracing::debug!(%error, "no control plane"),
        }
        if !std::mem::replace(&mut lost, true) {
            tracing::warn!(host, "the control plane is gone; what is lent and borrowed stays so");
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test runs itself as the process that ends.
    #[test]
    fn a_job_that_fails_ends_the_process() {
        const VICTIM: &str = "RACKBUS_AGENT_VICTIM";
        if std::env::var_os(VICTIM).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut jobs = Sequencer::default();
                jobs.run("nvme0", || panic!("a fault in the device model"));
                jobs.last.remove("nvme0").unwrap().await.unwrap();
            });
            return;
        }
        let name = "agent::tests::a_job_that_fails_ends_the_process";
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap());
        let ended = victim.args(["--exact", name]).env(VICTIM, "1").output().unwrap();
        assert!(!ended.status.success(), "it goes on, and revokes for ever");
    }
}
