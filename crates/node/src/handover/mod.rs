//! A node is restarted in place: the process continues as another program, newer or the same, and what the
//! node lends and borrows stays in use. Nobody but the control plane, to which the node connects anew,
//! notices more than a pause.
//!
//! `execve` keeps the process: its number, the locks by which others know it as the host's node, and who
//! watches over it. What is in memory is written down (`state`) and what the kernel has for it, sockets,
//! memory files and eventfds, goes along (`parcel`). Before that every conversation is brought to rest
//! between two messages (`rackbus_memory::gate`) and every function is saved (`rackbus_pci::state`).
//!
//! What can be known beforehand to prevent it is looked at first, while everything continues. What fails
//! afterwards is taken back, until there is no way back: the new program has begun. A function with which it
//! cannot go on begins anew then, as after a failure of its own.

pub(crate) mod parcel;
pub(crate) mod state;

pub use state::StateVersions;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_control::api::ApiError;
use rackbus_control::node::RestartRequest;
use rackbus_lease::UnderWay;
use rackbus_link::Link;
use rackbus_memory::Gate;
use rackbus_memory::gate::NotClosed;
use rackbus_metal::SavedWindow;
use rackbus_pci::SaveError;
use rustix::time::{ClockId, clock_gettime};

use crate::borrower::BorrowedFunctions;
use crate::lender::LentFunctions;
use crate::segments::Segments;
use crate::vfio::Ntbs;
use parcel::{Parcel, ParcelDescriptors};
use state::{AgentState, Listeners, NodeState, VERSION, WithDescriptors};

/// How long conversations may take to come to rest. Those that rest already wait meanwhile, and their
/// peers with them: below the link's time limit and QEMU's.
const REST: Duration = Duration::from_secs(1);

/// How long the system may take to end what functions have asked their media for. It begins when the functions
/// stand still, in the same pause.
const SETTLE: Duration = Duration::from_millis(500);

/// Why a node was not restarted in place. It continues as it was.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// A lease is being changed.
    #[error("{0}")]
    UnderWay(UnderWay),
    /// A guest is losing a function.
    #[error("a function is being taken out of a VM")]
    Unplugging,
    /// A conversation did not come to rest between two messages in time.
    #[error(transparent)]
    Busy(#[from] NotClosed),
    /// Somebody uses a function at this moment.
    #[error("{function} is being attached to")]
    InUse {
        /// Name of the function.
        function: String,
    },
    /// A function in a host's own PCI tree is of no more use there, and its end waits for the node.
    #[error("{0} is being taken from its borrower")]
    TakenAway(String),
    /// A function in a host's own PCI tree has a user by that host's VFIO, whose mappings only this process makes.
    #[error("{0} is used by its borrower's vfio-pci: restart the node when that has released it")]
    Isolated(String),
    /// An engine does not answer.
    #[error("{0} does not answer, most likely its storage or its lender hangs")]
    Hangs(String),
    /// The system has not ended what a function asked its medium for, and would keep the process until then.
    #[error("the storage of {0} does not answer in {limit} ms", limit = SETTLE.as_millis())]
    Storage(String),
    /// The state of a function cannot be obtained.
    #[error("{function}: {cause}")]
    Save {
        /// Name of the function.
        function: String,
        /// What its model or session says.
        cause: SaveError,
    },
    /// Processes of the host share memory, which cannot be passed on.
    #[error("processes of the host share memory or have connected to that of others ({0})")]
    Segments(String),
    /// The conversation with a user's node has the connection that it began with and no other, as those of older nodes about
    /// functions in their hosts' own PCI trees.
    #[error(
        "{function} would be lost: its borrower's node knows no sessions for functions in its own PCI tree"
    )]
    Window {
        /// Name of the function in the rack.
        function: String,
    },
    /// A host's kernel has a function of another host, whose node is older.
    #[error(
        "{0} is in this host's own PCI tree, and would be lost: its lender's node knows no sessions for that"
    )]
    InHost(String),
    /// A lost connection ends the use of the function.
    #[error(
        "{function} is used between machines, and the rack file's `hold` of 0 ends that with its connection"
    )]
    NotHeld {
        /// Name of the function in the rack.
        function: String,
    },
    /// The link has nothing that another process could go on with.
    #[error("the link's conversations cannot be passed on")]
    Link,
    /// The program cannot continue.
    #[error("the program cannot take over this node: {0}")]
    Program(String),
    /// A system call failed.
    #[error("the node's state cannot be passed on: {0}")]
    System(#[from] std::io::Error),
}

impl HandOverError {
    /// What the user can do.
    fn remedy(&self) -> &'static str {
        match self {
            HandOverError::UnderWay(_)
            | HandOverError::Unplugging
            | HandOverError::Busy(_)
            | HandOverError::InUse { .. }
            | HandOverError::TakenAway(_) => "the node goes on; try again in a moment",
            HandOverError::Storage(_) => "the node goes on; try again when the storage answers",
            HandOverError::Segments(_) => "the node goes on; end those processes first",
            HandOverError::Window { .. } | HandOverError::InHost(_) => {
                "the node goes on; return those functions first"
            }
            HandOverError::Program(_) => "the node goes on; use another program",
            _ => "the node goes on; see its log",
        }
    }

    /// As the node answers it.
    pub fn problem(&self) -> ApiError {
        ApiError::new("cannot_restart", self.to_string(), self.remedy())
    }
}

/// The program that runs the node, and is replaced by another at a handover.
pub trait HandoverProgram: Send + Sync {
    /// What it passes on to the program that continues, with another rack file of this text where one is named.
    fn carried(&self, rack: Option<&str>) -> String;

    /// The socket at which it answers requests of its host, if it does. It is passed on, so that none is turned away
    /// meanwhile.
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether `program` can continue as this node, with what was written in these versions, and with another rack file of
    /// this text where one is named.
    ///
    /// # Errors
    /// Why not.
    fn check(
        &self,
        program: &Path,
        versions: &StateVersions,
        rack: Option<&str>,
    ) -> Result<(), String>;

    /// Goes on as `program`, whose standard input is `parcel`. Returns only where that failed, and then
    /// nothing has changed.
    fn replace(&self, program: &Path, parcel: OwnedFd) -> std::io::Error;
}

/// What another process of this node left.
#[derive(Debug)]
pub struct InheritedNode {
    pub(crate) state: NodeState,
    pub(crate) descriptors: ParcelDescriptors,
    /// When it was received, in nanoseconds of the monotonic clock.
    pub(crate) received_ns: u64,
}

impl InheritedNode {
    /// Receives it from the standard input, where the process before put it.
    ///
    /// # Errors
    /// When nothing is there, or nothing that this program knows.
    pub fn receive(socket: OwnedFd) -> std::io::Result<InheritedNode> {
        let (bytes, descriptors) = parcel::receive(socket)?;
        let state = NodeState::from_bytes(&bytes)?;
        Ok(InheritedNode { state, descriptors, received_ns: monotonic_ns() })
    }

    /// What the [program](HandoverProgram::carried) before passed on.
    pub fn carried(&self) -> &str {
        &self.state.carried
    }

    /// The socket at which the program before answered [requests](HandoverProgram::requests) of its host; what came
    /// meanwhile waits in it. `None` where it had none.
    ///
    /// # Errors
    /// When it was named and not passed on.
    pub fn take_requests(&mut self) -> std::io::Result<Option<OwnedFd>> {
        let number = self.state.requests.take();
        number.map(|number| self.descriptors.take(number)).transpose()
    }
}

/// Nanoseconds of the clock that all processes of a host have in common.
pub(crate) fn monotonic_ns() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// The same, of one that goes on while the machine sleeps.
pub(crate) fn boot_time_ns() -> u64 {
    nanoseconds(ClockId::Boottime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The same of a moment that has passed.
pub(crate) fn begun_ns(begun: Instant) -> u64 {
    let elapsed = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    monotonic_ns().saturating_sub(elapsed)
}

/// The moment that the clock of all processes had `ns`.
pub(crate) fn instant_of(ns: u64) -> Instant {
    let ago = Duration::from_nanos(monotonic_ns().saturating_sub(ns));
    Instant::now().checked_sub(ago).unwrap_or_else(Instant::now)
}

/// Restarts a node in place.
pub struct HandOver {
    pub(crate) gate: Gate,
    pub(crate) lender: Arc<LentFunctions>,
    pub(crate) borrower: Arc<BorrowedFunctions>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) ntbs: Arc<Ntbs>,
    pub(crate) link: Arc<dyn Link>,
    /// `None` where the link has nothing to pass on.
    pub(crate) listeners: Option<Listeners<OwnedFd>>,
    pub(crate) program: Arc<dyn HandoverProgram>,
    /// How often the node was restarted in place until now.
    pub(crate) restarts: u64,
}

impl std::fmt::Debug for HandOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandOver").field("restarts", &self.restarts).finish_non_exhaustive()
    }
}

impl HandOver {
    /// Whether the node could be restarted now as that is asked for. Nothing changes, and nobody waits.
    ///
    /// # Errors
    /// [`HandOverError`].
    pub fn check(&self, request: &RestartRequest) -> Result<(), HandOverError> {
        self.listeners.as_ref().ok_or(HandOverError::Link)?;
        self.check_use()?;
        let checked =
            self.program.check(&request.program, &StateVersions::here(), request.rack.as_deref());
        checked.map_err(HandOverError::Program)
    }

    /// Whether all that is in use can be passed on.
    fn check_use(&self) -> Result<(), HandOverError> {
        self.lender.can_be_saved()?;
        self.borrower.can_be_saved()?;
        self.segments.in_use().map_or(Ok(()), |use_| Err(HandOverError::Segments(use_)))
    }

    /// Restarts the node as that is asked for. Returns only where that was not possible; the node has gone on
    /// then.
    pub fn perform(&self, request: &RestartRequest, agent: AgentState) -> HandOverError {
        match self.try_perform(request, agent) {
            Ok(cause) => HandOverError::Program(cause.to_string()),
            Err(error) => error,
        }
    }

    fn try_perform(
        &self,
        request: &RestartRequest,
        agent: AgentState,
    ) -> Result<std::io::Error, HandOverError> {
        let paused_ns = monotonic_ns();
        let _closed = self.gate.close(REST)?;
        // Nobody has begun anything since.
        self.check_use()?;
        // Before anything stands still: a provider's library takes its time.
        self.segments.give_lanes_up();
        let mut parcel = Parcel::default();
        let listeners = self.listeners.as_ref().ok_or(HandOverError::Link)?;
        let mut put = |fd: BorrowedFd<'_>| parcel.put(fd);
        let listeners = Listeners {
            link: put(listeners.link.as_fd())?,
            segments: put(listeners.segments.as_fd())?,
            questions: put(listeners.questions.as_fd())?,
        };
        // Taken back when this returns: until then no function does anything, but those of the machine.
        let mut borrowed = self.borrower.save(&mut parcel)?;
        let mut saved = self.lender.save(&mut parcel)?;
        saved.settle(SETTLE)?;
        let mut windows = BTreeMap::new();
        for (host, SavedWindow { state, descriptors }) in self.ntbs.save()? {
            windows.insert(host, WithDescriptors::new(state, &descriptors, &mut parcel)?);
        }
        // The last one, so that the numbers of the others are those of every version.
        let requests = self.program.requests();
        let requests = requests.map(|it| parcel.put(it)).transpose()?;
        let state = NodeState {
            version: VERSION,
            carried: self.program.carried(request.rack.as_deref()),
            restarts: self.restarts + 1,
            paused_ns,
            saved_ns: monotonic_ns(),
            agent,
            lender: self.lender.fence(),
            lent: std::mem::take(&mut saved.states),
            windows,
            levels: std::mem::take(&mut saved.levels),
            borrowed: std::mem::take(&mut borrowed.states),
            in_host: std::mem::take(&mut borrowed.in_host),
            listeners,
            requests,
        };
        let parcel = parcel.send(&state.to_bytes()?)?;
        // Last of all: whoever speaks through them is cut off.
        let _closed = ClosedBridges::of(&*self.link);
        Ok(self.program.replace(&request.program, parcel))
    }
}

/// The NTBs of a link, which are closed until this is dropped.
struct ClosedBridges<'l>(&'l dyn Link);

impl<'l> ClosedBridges<'l> {
    fn of(link: &'l dyn Link) -> ClosedBridges<'l> {
        link.close_bridges();
        ClosedBridges(link)
    }
}

impl Drop for ClosedBridges<'_> {
    fn drop(&mut self) {
        self.0.reopen_bridges();
    }
}
