//! The node's side of the lending protocol: runs the borrower's state machine, has the lender's
//! ([`LentFunctions`]) decide, does what they say, and tells the control plane.
//!
//! Everything comes in through one channel and is decided in order. What takes time (revoking
//! waits for I/O in flight, closing waits for a guest to let go) runs beside, but in order for
//! each device and each lease. Losing the control plane stops nothing here: the agent goes on
//! trying to reach it, and what is lent and borrowed stays so.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_control::api::{NodeMessages, NodeReport};
use rackbus_control::client::Lines;
use rackbus_control::node::AskedRestart;
use rackbus_control::said::{SILENCE, Said};
use rackbus_control::{Client, lease_span};
use rackbus_lease::{BorrowerAction, LeaseId, LenderAction, Message, Millis, TurnUse};
use tokio::sync::mpsc;

use crate::borrower::BorrowedFunctions;
use crate::handover::state::AgentState;
use crate::handover::{HandOver, HandOverError, begun_ns, instant_of};
use crate::lender::LentFunctions;
use crate::sequencer::{Sequencer, essential};
use crate::term::NewestTerm;
use crate::turns::Turns;
use crate::unplug::Unplugger;

/// How often a node says that it is there.
const HEARTBEAT: Millis = 3_000;
/// How often a node says how it is while that changes.
const REPORT: Millis = 1_000;
/// How often it says so until it is answered.
const REGISTER_AGAIN: Millis = 250;
/// How long it waits before it looks for a lost control plane again.
const RECONNECT: Duration = Duration::from_millis(100);

/// How long a restart waits for what is under way, and how often it looks.
const UNDER_WAY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

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
    /// The turn that a lease is cannot be used.
    TurnUsed(LeaseId, TurnUse),
    /// The lender of a lease is gone.
    LenderLost(LeaseId, String),
    /// The node is to be restarted in place. What could be looked at beforehand was.
    Restart(AskedRestart),
}

/// Who the agent speaks for.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Name of the node's host.
    pub host: String,
    /// Where its link listens.
    pub address: String,
    /// The control plane's socket.
    pub control: PathBuf,
    /// The file with the newest term of a leader that was heard.
    pub term: PathBuf,
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
    turns: Turns,
    hand_over: Option<Arc<HandOver>>,
    /// A restart that waits for what is under way, until then.
    restart: Option<(AskedRestart, Instant)>,
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
        let term = NewestTerm::open(identity.term.clone());
        let listen = tokio::spawn(listen(client, identity.host.clone(), heard.clone(), term));
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
            turns: Turns::default(),
            hand_over: None,
            restart: None,
        }
    }

    /// The agent of a node that can be restarted in place.
    #[must_use]
    pub(crate) fn with_hand_over(self, hand_over: Arc<HandOver>) -> Self {
        Agent { hand_over: Some(hand_over), ..self }
    }

    /// Goes on as the same life of the node, in the place of another process.
    #[must_use]
    pub(crate) fn resume(self, state: AgentState) -> Self {
        let AgentState { incarnation, begun_ns, mut borrowing } = state;
        // What the process before was about to say is lost.
        borrowing.reconnected();
        self.lender.set_incarnation(incarnation);
        let mut agent = Agent { incarnation, borrowing, begun: instant_of(begun_ns), ..self };
        agent.borrower.turns().into_iter().for_each(|lease| agent.begin_turn(lease));
        agent
    }

    /// Hears and acts until the channel closes.
    pub async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Heard>) {
        loop {
            if inbox.is_empty() {
                self.try_restart();
            }
            let now = self.now();
            if self.register_at <= now {
                self.register(now);
            } else if self.reported.1 <= now {
                let report = self.report(now);
                self.tell(NodeMessages { messages: Vec::new(), report: Some(report) });
            }
            let actions = self.borrowing.tick(now);
            self.do_borrower(actions);
            self.look_at_turns(now);
            let due = self.register_at.min(self.reported.1).min(self.turns.due(now));
            let due = self.borrowing.next_tick().unwrap_or(u64::MAX).min(due);
            let wait = Duration::from_millis(due.saturating_sub(self.now()));
            let wait = if self.restart.is_some() { wait.min(LOOK_AGAIN) } else { wait };
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
        let peers = self.borrower.peers();
        let report = NodeReport { devices, fronts, peers, ..(self.observe)() };
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
                self.borrowing.reconnected();
            }
            Heard::Said(message) => self.receive(now, message),
            Heard::Lending(actions) => self.do_lender(actions),
            Heard::Trouble => self.register_at = now,
            Heard::Restart(asked) => {
                self.restart = Some((asked, Instant::now() + UNDER_WAY));
            }
            Heard::OpenDone(lease, outcome) => {
                if outcome.is_ok() {
                    self.begin_turn(lease);
                }
                let actions = self.borrowing.open_done(lease, outcome);
                self.do_borrower(actions);
            }
            Heard::TurnUsed(lease, how) => {
                self.turns.end(lease);
                let actions = self.borrowing.turn_used(lease, how);
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

    /// Restarts the node if that was asked for and nothing is under way. Everything that was heard has been
    /// dealt with. What the control plane says meanwhile, and what it has not heard yet, is said again.
    fn try_restart(&mut self) {
        let Some((asked, until)) = self.restart.take() else { return };
        let under_way = match self.under_way() {
            Some(_) if Instant::now() < until => {
                self.restart = Some((asked, until));
                return;
            }
            under_way => under_way,
        };
        let program = &asked.request.program;
        let refused = match (under_way, &self.hand_over) {
            (Some(error), _) => error,
            (None, None) => HandOverError::Link,
            (None, Some(hand_over)) => {
                tracing::info!(program = %program.display(), "the node is restarted in place");
                let state = AgentState {
                    incarnation: self.incarnation,
                    begun_ns: begun_ns(self.begun),
                    borrowing: self.borrowing.clone(),
                };
                tokio::task::block_in_place(|| hand_over.perform(program, state))
            }
        };
        tracing::warn!(error = %refused, "the node is not restarted and goes on");
        // Who asked may have gone.
        let _ = asked.refused.send(refused.problem());
    }

    /// What has to end before the node can be restarted.
    fn under_way(&self) -> Option<HandOverError> {
        let lending = self.hand_over.as_ref().and_then(|it| it.lender.fence().under_way());
        match lending.or_else(|| self.borrowing.under_way()) {
            Some(under_way) => Some(HandOverError::UnderWay(under_way)),
            None if self.by_device.is_idle() && self.by_lease.is_idle() => None,
            None => Some(HandOverError::Unplugging),
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
            Message::Arm { .. }
            | Message::Revoke { .. }
            | Message::SetLevel { .. }
            | Message::Offer { .. }
            | Message::Withdraw { .. } => {
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
                // With what the lease used, as long as that is the last one.
                LenderAction::Send(message @ Message::Revoked { .. }) => {
                    let report = Some(self.report(self.now()));
                    self.tell(NodeMessages { messages: vec![message], report });
                }
                LenderAction::Send(message) => self.say(message),
                LenderAction::Arm { device, lease, epoch, borrower, level } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(device, epoch, borrower, "to be lent");
                        let said = lender.arm(&device, epoch, level.as_deref());
                        let _ = heard.send(Heard::Lending(said));
                    });
                }
                LenderAction::SetLevel { device, lease, epoch, number, level } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        let said = lender.change_level(&device, epoch, number, level.as_deref());
                        let _ = heard.send(Heard::Lending(said));
                    });
                }
                LenderAction::Offer { device, number, section } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.take_on(&device, number, &section);
                        let _ = heard.send(Heard::Lending(said));
                    });
                }
                LenderAction::Withdraw { device, number, functions } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.let_go(&device, number, &functions);
                        let _ = heard.send(Heard::Lending(said));
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
                    let (lease, unplugger) = (grant.lease, self.unplugger.clone());
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(function = %grant.function, epoch = grant.epoch, "borrowed");
                        let vm = grant.turn.as_ref().and_then(|turn| turn.vm.clone());
                        let function = grant.function.to_string();
                        let opened = borrower.open(grant);
                        let outcome = opened.as_ref().map(|path| path.display().to_string());
                        let outcome = outcome.map_err(ToString::to_string);
                        let _ = heard.send(Heard::OpenDone(lease, outcome));
                        if let (Some(vm), Ok(socket)) = (vm, opened)
                            && let Err(how) = unplugger.plug(&vm, &function, &socket)
                        {
                            let _ = heard.send(Heard::TurnUsed(lease, how));
                        }
                    });
                }
                BorrowerAction::Close { lease, reason } => {
                    self.turns.end(lease);
                    let unplugger = self.unplugger.clone();
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(reason, "letting go");
                        unplug(&borrower, &unplugger, lease);
                        borrower.close(lease);
                        let _ = heard.send(Heard::CloseDone(lease));
                    });
                }
                BorrowerAction::Yield { lease, grace } => {
                    self.turns.end(lease);
                    let unplugger = self.unplugger.clone();
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(grace, "the turn is over: letting go");
                        // A guest lets go in its own time, a program within its grace.
                        unplug(&borrower, &unplugger, lease);
                        borrower.await_user(lease, Duration::from_millis(grace));
                        borrower.close(lease);
                        let _ = heard.send(Heard::CloseDone(lease));
                    });
                }
            }
        }
    }

    /// A lease can be used; if it is a turn, it is noticed who does.
    fn begin_turn(&mut self, lease: LeaseId) {
        if let Some(turn) = self.borrower.turn(lease) {
            self.turns.begin(self.now(), lease, turn.claim);
        }
    }

    /// Gives back what is not needed any more.
    fn look_at_turns(&mut self, now: Millis) {
        let borrower = self.borrower.clone();
        let has_user = |lease| borrower.user(lease).is_some_and(|(_, user)| user.is_some());
        for (lease, how) in self.turns.look(now, has_user) {
            let actions = self.borrowing.turn_used(lease, how);
            self.do_borrower(actions);
        }
    }
}

/// Takes a lease's function out of the VM that uses it, if one does.
fn unplug(borrower: &BorrowedFunctions, unplugger: &Unplugger, lease: LeaseId) {
    if let Some((socket, Some(_user))) = borrower.user(lease) {
        unplugger.unplug(&socket);
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
async fn listen(
    client: Client,
    host: String,
    heard: mpsc::UnboundedSender<Heard>,
    mut newest: NewestTerm,
) {
    let mut lost = false;
    while !heard.is_closed() {
        match client.listen(&host, newest.newest()).await {
            Ok(mut said) => {
                let mut connected = false;
                while let Some(Said { term, message }) = next(&mut said, newest.newest()).await {
                    let taken;
                    (newest, taken) = take(newest, term).await;
                    match taken {
                        Ok(true) => {}
                        Ok(false) => {
                            tracing::warn!(term, "a control plane that leads no more is not heard");
                            break;
                        }
                        Err(error) => {
                            tracing::error!(%error, "the leader's term cannot be kept, and so it is not heard");
                            break;
                        }
                    }
                    if !std::mem::replace(&mut connected, true) {
                        tracing::info!(host, term, "connected to the control plane");
                        lost = false;
                        let _ = heard.send(Heard::Connected);
                    }
                    if let Some(message) = message {
                        let _ = heard.send(Heard::Said(message));
                    }
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

/// Whether what is said in `term` may be taken. A later one than before is on disk then.
async fn take(mut newest: NewestTerm, term: u64) -> (NewestTerm, std::io::Result<bool>) {
    if term <= newest.newest() {
        return (newest.clone(), newest.take(term));
    }
    let kept = newest.clone();
    let taking = tokio::task::spawn_blocking(move || {
        let taken = newest.take(term);
        (newest, taken)
    });
    taking.await.unwrap_or_else(|_| (kept, Err(std::io::Error::other("the process ends"))))
}

/// The next line. A control plane that has terms says something all the time: one that stands still is given up.
async fn next(said: &mut Lines<Said>, term: u64) -> Option<Said> {
    if term == 0 {
        return said.next().await;
    }
    tokio::time::timeout(SILENCE, said.next()).await.ok().flatten()
}
