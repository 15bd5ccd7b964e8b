//! The node's side of the lending protocol: has the lender's and the borrower's state machine decide
//! ([`LentFunctions`], [`BorrowedFunctions`]), does what they say, and tells the control plane.
//!
//! Everything comes in through one [inbox] and is decided in order. What takes time (revoking
//! waits for I/O in flight, closing waits for a guest to release it) runs beside, but in order for
//! each device and each lease. Losing the control plane stops nothing here: the agent goes on
//! trying to reach it, and what is lent and borrowed stays so.

mod actions;
mod control;
mod inbox;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rackbus_control::api::{NodeMessages, NodeReport};
use rackbus_control::node::AskedRestart;
use rackbus_control::{ControlClient, lease_span};
use rackbus_lease::{Borrower, BorrowerAction, LeaseId, LenderAction, Message, Millis, TurnUse};

use actions::unplug;
use control::{ControlOutbox, listen, post};
pub use inbox::{AgentHandle, AgentInbox, inbox};

use crate::borrower::BorrowedFunctions;
use crate::handover::state::AgentState;
use crate::handover::{HandOver, HandOverError, begun_ns, instant_of};
use crate::lender::LentFunctions;
use crate::release::ReleaseLimit;
use crate::sequencer::{Sequencer, essential};
use crate::term::NewestTerm;
use crate::turns::UsableTurns;
use crate::unplug::Unplugger;

/// How often a node says that it is there.
const HEARTBEAT: Millis = 3_000;
/// How often a node says how it is while that changes.
const REPORT: Millis = 1_000;
/// How often it says so until it is answered.
const REGISTER_AGAIN: Millis = 250;

/// How long a restart waits for what is under way, and how often it looks.
const UNDER_WAY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What the agent hears.
#[derive(Debug)]
pub enum AgentEvent {
    /// The control plane listens (again): say who we are.
    Connected,
    /// A message of the control plane's.
    Said(Message),
    /// The lender has done something, and this follows.
    Lending(Vec<LenderAction>),
    /// A front has ended, and this follows.
    Borrowing(Vec<BorrowerAction>),
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
pub struct AgentIdentity {
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
    identity: AgentIdentity,
    lender: Arc<LentFunctions>,
    borrower: Arc<BorrowedFunctions>,
    unplugger: Unplugger,
    observe: Observe,
    /// The last report, and when the next one is due.
    reported: (NodeReport, Millis),
    incarnation: u64,
    registered: bool,
    register_at: Millis,
    begun: Instant,
    heard: AgentHandle,
    said: ControlOutbox,
    by_device: Sequencer<String>,
    by_lease: Sequencer<LeaseId>,
    /// How long the users of leases that are being closed have.
    releasing: HashMap<LeaseId, ReleaseLimit>,
    turns: UsableTurns,
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
        identity: AgentIdentity,
        lender: Arc<LentFunctions>,
        borrower: Arc<BorrowedFunctions>,
        unplugger: Unplugger,
        observe: Observe,
        heard: AgentHandle,
    ) -> Self {
        // Lives are numbered by the clock; where it went back, the authority names a later one.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let incarnation = u64::try_from(since.as_nanos()).unwrap_or(0);
        lender.set_incarnation(incarnation);
        borrower.decide(|it| it.set_incarnation(incarnation));
        let (said, outbox) = ControlOutbox::new();
        let client = ControlClient::new(&identity.control);
        let post = tokio::spawn(post(client.clone(), identity.host.clone(), outbox));
        let term = NewestTerm::open(identity.term.clone());
        let listen = tokio::spawn(listen(client, identity.host.clone(), heard.clone(), term));
        tokio::spawn(essential(post));
        tokio::spawn(essential(listen));
        Agent {
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
            releasing: HashMap::new(),
            turns: UsableTurns::default(),
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
        // The borrower goes on already.
        let AgentState { incarnation, begun_ns, borrowing: _ } = state;
        self.lender.set_incarnation(incarnation);
        self.borrower.decide(|it| {
            it.set_incarnation(incarnation);
            // What the process before was about to say is lost.
            it.reconnected();
        });
        let mut agent = Agent { incarnation, begun: instant_of(begun_ns), ..self };
        agent.borrower.turns().into_iter().for_each(|lease| agent.begin_turn(lease));
        agent
    }

    /// Hears and acts until nobody can tell anything any more.
    pub async fn run(mut self, mut inbox: AgentInbox) {
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
            let actions = self.borrower.decide(|it| it.tick(now));
            self.do_borrower(actions);
            self.end_unrenewed(now);
            self.look_at_turns(now);
            let due = self.register_at.min(self.reported.1).min(self.turns.due(now));
            let due = self.lender.next_tick().unwrap_or(u64::MAX).min(due);
            let due = self.borrower.decide(|it| it.next_tick()).unwrap_or(u64::MAX).min(due);
            let wait = Duration::from_millis(due.saturating_sub(self.now()));
            let wait = if self.restart.is_some() { wait.min(LOOK_AGAIN) } else { wait };
            tokio::select! {
                heard = inbox.next() => match heard {
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
        let newest = self.borrower.decide(|it| it.newest_lease());
        let register = Message::Register {
            incarnation: self.incarnation,
            devices: self.lender.newest_epochs(),
            newest_lease: self.lender.newest_lease().max(newest),
            address: self.identity.address.clone(),
        };
        let report = self.report(now);
        self.tell(NodeMessages { messages: vec![register], report: Some(report) });
    }

    /// What the node says of itself. While that changes it is said more often.
    fn report(&mut self, now: Millis) -> NodeReport {
        let (devices, fronts) = (self.lender.report(), self.borrower.fronts());
        let (peers, accelerators) = (self.borrower.peers(), self.lender.rooms());
        let report = NodeReport { devices, fronts, peers, accelerators, ..(self.observe)() };
        let next = if report == self.reported.0 { u64::MAX } else { now.saturating_add(REPORT) };
        self.reported = (report.clone(), next);
        NodeReport { counted_ms: now, ..report }
    }

    fn say(&self, message: Message) {
        self.tell(NodeMessages { messages: vec![message], report: None });
    }

    fn tell(&self, said: NodeMessages) {
        self.said.put(said);
    }

    fn hear(&mut self, heard: AgentEvent) {
        let now = self.now();
        match heard {
            AgentEvent::Connected => {
                // This control plane may be a new one: repeated until it has answered.
                self.registered = false;
                self.register_at = now;
                self.borrower.decide(Borrower::reconnected);
            }
            AgentEvent::Said(message) => self.receive(now, message),
            AgentEvent::Lending(actions) => self.do_lender(actions),
            AgentEvent::Borrowing(actions) => self.do_borrower(actions),
            AgentEvent::Trouble => self.register_at = now,
            AgentEvent::Restart(asked) => {
                self.restart = Some((asked, Instant::now() + UNDER_WAY));
            }
            AgentEvent::OpenDone(lease, outcome) => {
                if outcome.is_ok() {
                    self.begin_turn(lease);
                }
                let actions = self.borrower.decide(|it| it.open_done(lease, outcome));
                self.do_borrower(actions);
            }
            AgentEvent::TurnUsed(lease, how) => {
                self.turns.end(lease);
                let actions = self.borrower.decide(|it| it.turn_used(lease, how));
                self.do_borrower(actions);
            }
            AgentEvent::CloseDone(lease) => {
                self.releasing.remove(&lease);
                let actions = self.borrower.decide(|it| it.close_done(lease));
                self.do_borrower(actions);
            }
            AgentEvent::LenderLost(lease, reason) => {
                let actions = self.borrower.decide(|it| it.lender_lost(lease, reason));
                self.do_borrower(actions);
                // The guest loses the device now, control plane or not.
                if !self.borrower.decide(|it| it.has(lease)) {
                    return;
                }
                let limit = self.release_limit(lease, None, 0);
                let (borrower, unplugger) = (self.borrower.clone(), self.unplugger.clone());
                self.by_lease.run(lease, move || {
                    let _about = lease_span(lease).entered();
                    unplug(&borrower, &unplugger, lease, &limit);
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
        let request = &asked.request;
        let refused = match (under_way, &self.hand_over) {
            (Some(error), _) => error,
            (None, None) => HandOverError::Link,
            (None, Some(hand_over)) => {
                tracing::info!(program = %request.program.display(), "the node is restarted in place");
                let state = AgentState {
                    incarnation: self.incarnation,
                    begun_ns: begun_ns(self.begun),
                    borrowing: self.borrower.decide(|it| it.clone()),
                };
                tokio::task::block_in_place(|| hand_over.perform(request, state))
            }
        };
        tracing::warn!(error = %refused, "the node is not restarted and goes on");
        // Who asked may have gone.
        let _ = asked.answer.send(Err(refused.problem()));
    }

    /// What has to end before the node can be restarted.
    fn under_way(&self) -> Option<HandOverError> {
        let lending = self.hand_over.as_ref().and_then(|it| it.lender.fence().under_way());
        match lending.or_else(|| self.borrower.decide(|it| it.under_way())) {
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
                self.borrower.decide(|it| it.set_incarnation(self.incarnation));
                self.register_at = now;
            }
            Message::Arm { .. }
            | Message::Revoke { .. }
            | Message::Extend { .. }
            | Message::SetLevel { .. }
            | Message::Offer { .. }
            | Message::Withdraw { .. } => {
                let actions = self.lender.receive(now, message);
                self.do_lender(actions);
            }
            other => {
                let actions = self.borrower.decide(|it| it.receive(now, other));
                self.do_borrower(actions);
            }
        }
    }
}
