//! A whole node: one host's lender, borrower, link and agent, put together and run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rackbus_control::metrics::Source;
use rackbus_control::reach::serve_node;
use rackbus_control::{Client, lease_span};
use rackbus_fabric::{Fabric, FabricHandle, Topology};
use rackbus_lease::Grant;
use rackbus_link::{Link, Listener as LinkListener, Service};
use rackbus_segment::directory::Settings;
use tokio::sync::mpsc;

use crate::agent::{Agent, Heard, Identity};
use crate::borrower::{BorrowedFunctions, LeaseEnded, UseListener, functions_folder};
use crate::lendable::Lendable;
use crate::lender::{LendError, LentFunctions};
use crate::metrics::{self, LinkCounters};
use crate::segments::{SOCKET, Segments};
use crate::unplug::Unplugger;
use crate::users::Users;

/// A node's description.
#[derive(Clone)]
pub struct NodeOptions {
    /// The rack's name.
    pub rack: String,
    /// This host.
    pub host: String,
    /// The rack's run directory: the node works in the folder `host` of it.
    pub run_dir: PathBuf,
    /// The devices that this host lends.
    pub devices: Vec<(String, Arc<dyn Lendable>)>,
    /// The way to the other nodes of the rack, and from them.
    pub link: Arc<dyn Link>,
    /// The rack's hosts and functions, and what joins them here.
    pub topology: Topology,
    /// Whom the segment service serves, its addresses and its sharing rules.
    pub segments: Settings,
    /// How many lines this process has left out of its log.
    pub log_lines_left_out: fn() -> u64,
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
        /// Why.
        cause: std::io::Error,
    },
    /// A device cannot be run.
    #[error(transparent)]
    Device(#[from] LendError),
    /// Other nodes cannot be listened to.
    #[error("other nodes cannot be listened to: {0}")]
    Link(std::io::Error),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Runs the node until the process ends.
///
/// # Errors
/// [`NodeError`], before anything is offered.
pub async fn run(options: NodeOptions) -> Result<(), NodeError> {
    let folder = options.run_dir.join(&options.host);
    let functions = functions_folder(&options.run_dir, &options.host);
    let path_error = |path: &Path| {
        let path = path.to_owned();
        move |cause| NodeError::Path { path, cause }
    };
    std::fs::create_dir_all(&functions).map_err(path_error(&functions))?;

    // Whatever this node lets anybody reach is a loan of this.
    let fabric = FabricHandle::new(Fabric::new(options.topology.clone()));
    let mut lender = LentFunctions::new(&options.host, fabric.clone());
    for (name, lendable) in &options.devices {
        lender.add(name, lendable.clone())?;
    }
    let lender = Arc::new(lender);

    let link = options.link.clone();
    let listener = link.listen(&options.host).map_err(NodeError::Link)?;
    let settings = options.segments.clone();
    let (rack, host) = (&options.rack, &options.host);
    let segments = Segments::new(rack, host, link.clone(), settings, fabric.clone());
    let counters = Arc::new(LinkCounters::default());
    attend(listener, lender.clone(), segments.clone(), counters.clone())
        .map_err(NodeError::Thread)?;
    segments.start(&folder).map_err(path_error(&folder.join(SOCKET)))?;

    let (heard, inbox) = mpsc::unbounded_channel();
    let unplugger = Unplugger::new(&options.run_dir, &options.host);
    let control = control_socket(&options.run_dir);
    let users = Users::new(&options.run_dir, &options.host, Client::new(&control));
    let listener = Arc::new(Listener { heard: heard.clone(), users });
    // Before anything is borrowed anew: what is plugged in by now nobody serves any more.
    unplugger.unplug_orphans();
    let borrower = BorrowedFunctions::new(
        &options.rack,
        &options.host,
        &functions,
        link.clone(),
        fabric.clone(),
        listener,
    );
    let borrower = Arc::new(borrower);
    let metrics = metrics::source(
        &options.host,
        lender.clone(),
        borrower.clone(),
        segments.clone(),
        counters.clone(),
    );
    let identity =
        Identity { host: options.host.clone(), address: link.address(&options.host), control };
    let observe = metrics::observe(segments, counters, options.log_lines_left_out);
    tracing::info!(host = options.host, devices = options.devices.len(), "node up");
    let agent = Agent::new(identity, lender, borrower, unplugger, observe, heard);
    let questions = question_server(metrics, fabric, folder.join(metrics::SOCKET));
    tokio::select! {
        () = agent.run(inbox) => Ok(()),
        never = questions => match never {},
    }
}

/// Answers for the node's metrics and its fabric. Where that fails, the node goes on without.
async fn question_server(
    metrics: Source,
    fabric: FabricHandle,
    socket: PathBuf,
) -> std::convert::Infallible {
    if let Err(error) = serve_node(metrics, fabric, &socket).await {
        tracing::error!(%error, socket = %socket.display(), "metrics and reach cannot be served");
    }
    std::future::pending().await
}

/// A thread that hears who connects to the link; each conversation gets its own.
fn attend(
    listener: Box<dyn LinkListener>,
    lender: Arc<LentFunctions>,
    segments: Arc<Segments>,
    counters: Arc<LinkCounters>,
) -> std::io::Result<()> {
    let accept = move || {
        loop {
            let caller = match listener.accept() {
                Ok(caller) => caller,
                Err(error) => {
                    tracing::error!(%error, "the link cannot accept");
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                }
            };
            let (lender, segments) = (lender.clone(), segments.clone());
            let counters = counters.clone();
            let talk = move || {
                let Some(incoming) = caller.hear() else { return counters.refuse() };
                let _open = counters.begin(&incoming.hello.service);
                match incoming.hello.service {
                    Service::Segments => segments.attend(incoming),
                    Service::Function { .. } | Service::Medium { .. } => lender.attend(incoming),
                }
            };
            if let Err(error) = std::thread::Builder::new().name("link peer".into()).spawn(talk) {
                tracing::error!(%error, "a connection to the link was dropped: no thread for it");
            }
        }
    };
    std::thread::Builder::new().name("link".into()).spawn(accept).map(drop)
}

/// Hands losses to the agent, and users to who watches them.
#[derive(Debug)]
struct Listener {
    heard: mpsc::UnboundedSender<Heard>,
    users: Users,
}

impl UseListener for Listener {
    fn lender_lost(&self, grant: &Grant, reason: &str) {
        let _about = lease_span(grant.lease).entered();
        tracing::warn!(lender = grant.function.host, reason, "the lender is lost");
        let _ = self.heard.send(Heard::LenderLost(grant.lease, reason.to_owned()));
    }

    fn opened(&self, grant: &Grant, socket: &Path, process: u32, ended: LeaseEnded) {
        self.users.watch(grant.lease, socket, process, ended);
    }
}
