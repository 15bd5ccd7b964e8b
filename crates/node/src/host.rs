//! A whole node: one host's lender, borrower, link and agent, put together and run.

mod attend;
mod lending;
mod restarts;
mod sockets;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_control::metrics::MetricsSource;
use rackbus_control::node::{NodeProcess, NodeSources, serve_node};
use rackbus_control::{ControlClient, lease_span};
use rackbus_fabric::{Fabric, FabricHandle, Topology};
use rackbus_lease::{BorrowerAction, Grant};
use rackbus_link::{Connect, Link};
use rackbus_memory::Gate;
use rackbus_segment::directory::DirectorySettings;
use tokio::sync::mpsc;

use attend::{NodeServices, attend};
use lending::lend_available;
use restarts::{SuccessionProgress, check_restarts, process_and_agent};
use sockets::Sockets;

use crate::agent::{Agent, AgentHandle, AgentIdentity, Observe, inbox};
use crate::borrower::{BorrowedFunctions, LeaseEnded, UseListener, functions_folder};
use crate::handover::state::Listeners;
use crate::handover::{HandOver, HandoverProgram, InheritedNode};
use crate::lanes::Lanes;
use crate::lendable::Lendable;
use crate::lender::devices::OfferedFunctions;
use crate::lender::{LendError, LentFunctions};
use crate::metrics::{self, LinkCounters};
use crate::network::NetworkService;
use crate::segments::{SOCKET, Segments};
use crate::unplug::Unplugger;
use crate::users::{Users, VmUser};
use crate::vfio::Ntbs;

/// What a node is started with.
#[derive(Clone)]
pub struct NodeOptions {
    /// The NTBs through which functions come into this host's own PCI tree, or into those of the hosts that they lead to.
    pub ntbs: Arc<Ntbs>,
    /// Name of the rack that it belongs to.
    pub rack: String,
    /// Name of the node's host.
    pub host: String,
    /// The rack's run directory: the node works in the folder `host` of it.
    pub run_dir: PathBuf,
    /// The devices that this host lends.
    pub devices: Vec<(String, Arc<dyn Lendable>)>,
    /// Makes the functions of devices that are offered while the node runs; nothing where none can be.
    pub offered: Option<OfferedFunctions>,
    /// The way to the other nodes of the rack, and from them.
    pub link: Arc<dyn Link>,
    /// The rack's hosts and functions, and what joins them here.
    pub topology: Topology,
    /// Whom the segment service serves, its addresses and its sharing rules.
    pub segments: DirectorySettings,
    /// Its part in the rack's network, not begun yet.
    pub network: NetworkService,
    /// How long fronts here hold what is under way while their mediums on other machines cannot be reached.
    pub hold: Duration,
    /// What moves data between mediums and fronts on other machines beside the link.
    pub lanes: Lanes,
    /// How many lines this process has left out of its log.
    pub log_lines_left_out: fn() -> u64,
    /// The file with the newest term in which the control plane has spoken to this node.
    pub term: PathBuf,
    /// The program around the node; without one the node is not restarted in place.
    pub program: Option<Arc<dyn HandoverProgram>>,
}

/// The control plane's socket in a run directory.
pub fn control_socket(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

/// Why a node cannot run.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A folder or socket cannot be made.
    #[error("{path}: {cause}")]
    Path {
        /// The folder or socket.
        path: PathBuf,
        /// The error that it failed with.
        cause: std::io::Error,
    },
    /// A device cannot be run.
    #[error(transparent)]
    Device(#[from] LendError),
    /// Other nodes cannot be listened to.
    #[error("other nodes cannot be listened to: {0}")]
    Link(std::io::Error),
    /// What another process left cannot be gone on with.
    #[error("the state that the previous process passed on cannot be used: {0}")]
    Inherited(std::io::Error),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Runs the node until the process ends.
///
/// # Errors
/// [`NodeError`], before anything is offered.
pub async fn run(options: NodeOptions) -> Result<(), NodeError> {
    start(options, None).await
}

/// Goes on as the node in the place of another process, which left what is `inherited`.
///
/// # Errors
/// [`NodeError`]; then the process is to end, and with it what it lends and borrows.
pub async fn resume(options: NodeOptions, inherited: InheritedNode) -> Result<(), NodeError> {
    start(options, Some(inherited)).await
}

async fn start(
    mut options: NodeOptions,
    inherited: Option<InheritedNode>,
) -> Result<(), NodeError> {
    let folder = options.run_dir.join(&options.host);
    let functions = functions_folder(&options.run_dir, &options.host);
    std::fs::create_dir_all(&functions).map_err(path_error(&functions))?;
    let parted = |it: InheritedNode| (Some(it.state), it.descriptors, it.received_ns);
    let (mut state, mut descriptors, received_ns) = inherited.map(parted).unwrap_or_default();
    let resumed = state.is_some();

    // Whatever this node lets anybody reach is a loan of this.
    let fabric = FabricHandle::new(Fabric::new(options.topology.clone()));
    let link = options.link.clone();
    let gate = Gate::new().map_err(NodeError::Inherited)?;
    let (lender, lent_in_use) =
        lend_available(&mut options, &fabric, &gate, &mut state, &mut descriptors).await?;
    let lender = Arc::new(lender);

    let sockets = Sockets::of(state.as_ref(), &mut descriptors, &*link, &options.host, &folder)?;
    let copies = sockets.copies().map_err(NodeError::Inherited)?;
    let served = NodeServices::new(&options, lender.clone(), &fabric);
    let counters = Arc::new(LinkCounters::default());
    let Sockets { link: callers, segments: processes, questions } = sockets;
    attend(callers, served.clone(), counters.clone(), gate.clone()).map_err(NodeError::Thread)?;
    let NodeServices { segments, network, .. } = served;
    network.start(fabric.clone()).map_err(NodeError::Thread)?;
    let started = segments.start_on(&folder, processes, gate.clone());
    started.map_err(path_error(&folder.join(SOCKET)))?;

    let (heard, inbox) = inbox();
    let unplugger = Unplugger::new(&options.run_dir, &options.host);
    if !resumed {
        // Before anything is borrowed anew: what is plugged in by now nobody serves any more.
        unplugger.unplug_orphans();
    }
    let borrower = borrow(&options, &functions, fabric.clone(), heard.clone(), gate.clone());
    let taken = SuccessionProgress { received_ns, lent_in_use };
    let resumed = process_and_agent(&options, &borrower, state, &mut descriptors, taken);
    let (process, agent_state) = resumed.map_err(NodeError::Inherited)?;
    borrower.return_left();
    // What nobody took is closed, so that no peer waits for who does not come.
    drop(descriptors);
    let borrower = Arc::new(borrower);
    let (lending, shared) =
        ((lender.clone(), borrower.clone()), (segments.clone(), network.clone()));
    let (metrics, observe) = observed(&options, lending, shared, counters, &process);
    tracing::info!(host = options.host, devices = lender.devices().len(), "node up");
    let restarted = (gate, copies, process.restarts);
    let hand_over = hand_over(&options, (lender.clone(), borrower.clone()), segments, restarted);
    let mut agent =
        Agent::new(identity(&options), lender, borrower, unplugger, observe, heard.clone());
    if let Some(hand_over) = &hand_over {
        agent = agent.with_hand_over(hand_over.clone());
    }
    if let Some(state) = agent_state {
        agent = agent.resume(state);
    }
    // One is looked at, and one waits: whoever asks beside these waits for its place in its own conversation.
    let (restarts, asked) = mpsc::channel(1);
    tokio::spawn(check_restarts(hand_over, asked, heard));
    let answers = NodeSources { metrics, fabric, network: Arc::new(network), process, restarts };
    tokio::select! {
        () = agent.run(inbox) => Ok(()),
        never = answer(answers, questions) => match never {},
    }
}

/// What restarts the node in place, by the gate that all conversations pass and copies of its sockets; nothing where no program
/// can go on as the node.
fn hand_over(
    options: &NodeOptions,
    (lender, borrower): (Arc<LentFunctions>, Arc<BorrowedFunctions>),
    segments: Arc<Segments>,
    (gate, listeners, restarts): (Gate, Option<Listeners<OwnedFd>>, u64),
) -> Option<Arc<HandOver>> {
    let (program, link, ntbs) =
        (options.program.clone()?, options.link.clone(), options.ntbs.clone());
    Some(Arc::new(HandOver {
        gate,
        lender,
        borrower,
        segments,
        ntbs,
        link,
        listeners,
        program,
        restarts,
    }))
}

/// What makes the node's page of metrics, and what it says to the control plane of the same.
fn observed(
    options: &NodeOptions,
    (lender, borrower): (Arc<LentFunctions>, Arc<BorrowedFunctions>),
    (segments, network): (Arc<Segments>, NetworkService),
    counters: Arc<LinkCounters>,
    process: &NodeProcess,
) -> (MetricsSource, Observe) {
    let link = (options.link.clone() as Arc<dyn Connect>, counters);
    let left_out = options.log_lines_left_out;
    let observe = metrics::observe(
        segments.clone(),
        network.clone(),
        link.clone(),
        left_out,
        process.clone(),
    );
    let host = &options.host;
    let metrics = metrics::source(host, lender, borrower, segments, network, link, process.clone());
    (metrics, observe)
}

/// Who the node of these options is, to the control plane.
fn identity(options: &NodeOptions) -> AgentIdentity {
    AgentIdentity {
        host: options.host.clone(),
        address: options.link.address(&options.host),
        control: control_socket(&options.run_dir),
        term: options.term.clone(),
    }
}

/// The error of a folder or socket that cannot be made at `path`.
fn path_error(path: &Path) -> impl FnOnce(std::io::Error) -> NodeError {
    let path = path.to_owned();
    move |cause| NodeError::Path { path, cause }
}

/// The node's borrower, which has nothing yet and makes its sockets in `functions`.
fn borrow(
    options: &NodeOptions,
    functions: &Path,
    fabric: FabricHandle,
    heard: AgentHandle,
    gate: Gate,
) -> BorrowedFunctions {
    let client = ControlClient::new(&control_socket(&options.run_dir));
    let users = Users::new(&options.run_dir, &options.host, client);
    let listener = Arc::new(Listener { heard, users });
    let (rack, host, link) = (&options.rack, &options.host, options.link.clone());
    BorrowedFunctions::new(rack, host, functions, link, fabric, listener, gate)
        .with_ntbs(options.ntbs.addresses().clone())
        .with_hold(options.hold)
        .with_lanes(options.lanes.clone())
}

/// Answers for the node. Where that fails, it goes on without.
async fn answer(answers: NodeSources, listener: UnixListener) -> std::convert::Infallible {
    if let Err(error) = serve_node(answers, listener).await {
        tracing::error!(%error, "the node's metrics and reach cannot be served");
    }
    std::future::pending().await
}

/// Hands losses to the agent, and users to who watches them.
#[derive(Debug)]
struct Listener {
    heard: AgentHandle,
    users: Users,
}

impl UseListener for Listener {
    fn lender_lost(&self, grant: &Grant, reason: &str) {
        let _about = lease_span(grant.lease).entered();
        tracing::warn!(lender = grant.function.host, reason, "the lender is lost");
        self.heard.lender_lost(grant.lease, reason.to_owned());
    }

    fn link_changed(&self, _grant: &Grant) {
        self.heard.trouble();
    }

    fn vm_of(&self, socket: &Path) -> Option<String> {
        self.users.vm_of(socket)
    }

    fn user_of(&self, socket: &Path, process: u32) -> Option<VmUser> {
        self.users.user_of(socket, process)
    }

    fn running_vm(&self, socket: &Path) -> Option<VmUser> {
        self.users.running_vm(socket)
    }

    fn used(&self, grant: &Grant, user: &VmUser, ended: LeaseEnded) {
        self.users.watch(grant.lease, user, ended);
    }

    fn front_ended(&self, actions: Vec<BorrowerAction>) {
        self.heard.front_ended(actions);
    }
}
