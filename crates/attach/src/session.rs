//! A process' conversation with its host's node.
//!
//! Requests go over one socket and are answered there, one after the other; events come over a
//! second one, on which a thread answers what concerns moved memory by itself. So a call never
//! waits for an event, and an event never for a callback.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::copy::published;
use rackbus_memory::region::RegionError;
use rackbus_memory::{
    AsHandle, HandleError, HandleRef, Handles, PacketStream, Packets, StreamError, threads,
};
use rackbus_segment::message::{
    LockHolder, NodeId, Refusal, Reply, SegmentAccess, SegmentEntry, SegmentId, SessionRequest,
    VERSION, Welcome,
};
use rackbus_segment::{Handle, SessionId};

use crate::carrying::CopyBuffer;
use crate::events::Calls;
use crate::guest::{self, WindowError};
use crate::line::{RequestSocket, ending};
use crate::location::{Location, NodeAddress};
use crate::memory::MappedMemory;
use crate::registry::Registry;

/// How long moving memory may take: tens of gigabytes are copied.
const MOVED: Duration = Duration::from_secs(120);
/// How long to try again while memory is being moved.
const BUSY: Duration = Duration::from_secs(5);

/// Why something could not be obtained.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No node listens on this host.
    #[error("no node answers at {}: {cause}; is the rack up?", path.display())]
    NoNode {
        /// Where the host's segment service listens.
        path: std::path::PathBuf,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The node is gone.
    #[error(
        "the connection to the host's node is lost ({0}); what is mapped stays usable, open a new session for anything else"
    )]
    Gone(StreamError),
    /// The node, or another's, said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The process is a fork of the one that attached.
    #[error("this process is a fork of the one that attached; open a session of its own")]
    Forked,
    /// The node answered something that makes no sense.
    #[error("the host's node does not speak this protocol; use the library of its version")]
    Protocol,
    /// What came beside an answer of the node's is not what belongs to it.
    #[error("the host's node does not speak this protocol ({0}); use the library of its version")]
    Handles(#[from] HandleError),
    /// The process may not have another descriptor. Nothing was made, all that it has stays.
    #[error("the process has no more file descriptors; raise its limit of open files (ulimit -n)")]
    NoDescriptors,
    /// Memory could not be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The operating system refused what was tried.
    #[error("{what}: {cause}")]
    System {
        /// What was tried, as a phrase for the message.
        what: &'static str,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The memory is being moved and that takes too long.
    #[error("the memory is being moved; try again")]
    Busy,
    /// An empty segment has no memory yet.
    #[error("the segment has no memory yet")]
    NoMemory,
    /// Memory may only be read.
    #[error("the memory may only be read")]
    ReadOnly,
    /// In a virtual machine: its memory and its host's are not the same.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// In a virtual machine: what may only be read is not given.
    #[error(transparent)]
    ReadOnlyInGuest(#[from] rackbus_segment::guest::ReadOnly),
    /// A lock cannot be where it was asked for.
    #[error("a lock lies inside of writable memory, at a multiple of 64, between its own parties")]
    Misplaced,
    /// A range is not inside of the area.
    #[error("{length} bytes from {offset} are not inside of {size} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Length that was asked for, in bytes.
        length: u64,
        /// Size of the memory in bytes.
        size: u64,
    },
}

/// A conversation with the host's node. Clones are the same one; it ends with the last of them and
/// of what was had through it.
#[derive(Debug, Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    welcome: Welcome,
    calls: Mutex<RequestSocket>,
    /// Held by who waits for the socket: who has had it several times is behind those who wait for it now.
    next: Mutex<()>,
    /// The connection that the node takes the process by: the same as that of `calls`.
    connection: Arc<dyn PacketStream>,
    events: Arc<dyn PacketStream>,
    /// Whether the process is in a virtual machine.
    in_guest: bool,
    registry: Arc<Registry>,
    copies: CopyBuffer,
    /// The process that attached. A fork of it has the same sockets, and must not use them.
    process: u32,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the node has made for this process, until somebody has it: mapping it may fail, and then nobody would end it.
#[derive(Debug)]
pub(crate) struct Unclaimed<'a> {
    session: &'a Session,
    ending: Option<SessionRequest>,
}

impl Unclaimed<'_> {
    /// Somebody has it now, and ends it.
    pub(crate) fn claim(mut self) {
        self.ending = None;
    }
}

impl Drop for Unclaimed<'_> {
    fn drop(&mut self) {
        if let Some(ending) = self.ending.take() {
            // A node that is gone has ended it already.
            let _ = self.session.done(&ending);
        }
    }
}

impl Session {
    /// Attaches to the node of the host that the process is on, or that its virtual machine is for.
    ///
    /// # Errors
    /// [`AttachError`] when no node is there, or does not let this process in.
    pub fn open(place: impl Into<NodeAddress>) -> Result<Session, AttachError> {
        match place.into() {
            NodeAddress::Host(location) => Session::open_on_host(&location),
            NodeAddress::Guest(folder) => {
                let [calls, events] = guest::open(&folder)?;
                Session::begin(RequestSocket::new(calls), events, &[], true)
            }
        }
    }

    fn open_on_host(location: &Location) -> Result<Session, AttachError> {
        let path = location.socket();
        let packets = Packets::connect(&path)
            .map_err(|cause| AttachError::NoNode { path: path.clone(), cause })?;
        let failed = |what| move |cause| AttachError::System { what, cause };
        let (events, theirs) = Packets::pair().map_err(failed("socketpair"))?;
        let line = RequestSocket::new(Arc::new(packets));
        let passed: Vec<_> = [theirs.as_handle()].into_iter().chain(published()).collect();
        Session::begin(line, Arc::new(events), &passed, false)
    }

    /// Says hello, with the node's end of the events beside it, and the memory that this process' channels count in.
    fn begin(
        mut line: RequestSocket,
        events: Arc<dyn PacketStream>,
        theirs: &[HandleRef<'_>],
        in_guest: bool,
    ) -> Result<Session, AttachError> {
        let failed = |what| move |cause| AttachError::System { what, cause };
        let hello = SessionRequest::Hello { version: VERSION };
        let welcome = match line.call(&hello, theirs)? {
            (Reply::Welcome(welcome), _) => welcome,
            (Reply::Refused(refusal), _) => return Err(refusal.into()),
            _ => return Err(AttachError::Protocol),
        };
        let calls = Calls::start().map_err(failed("a thread for callbacks"))?;
        let registry = Arc::new(Registry::new(calls));
        let (listening, registered) = (events.clone(), registry.clone());
        let listen = move || registered.listen(&*listening);
        threads::spawn("rackbus events", listen).map_err(failed("a thread for events"))?;
        let connection = line.packets.clone();
        let (calls, process) = (Mutex::new(line), std::process::id());
        let (next, copies) = (Mutex::new(()), CopyBuffer::default());
        #[rustfmt::skip]
        let inner = Inner { welcome, calls, next, connection, events, in_guest, registry, copies, process };
        Ok(Session(Arc::new(inner)))
    }

    /// Whether the process is in a virtual machine, and has its host's memory through a window.
    pub fn in_guest(&self) -> bool {
        self.0.in_guest
    }

    /// This host's node id.
    pub fn node(&self) -> NodeId {
        self.0.welcome.node
    }

    /// The rack's hosts and their node ids, by id.
    pub fn hosts(&self) -> &[(NodeId, String)] {
        &self.0.welcome.hosts
    }

    /// Who this session is, in the whole rack: what it holds locks as.
    pub fn holder(&self) -> LockHolder {
        LockHolder { node: self.0.welcome.node, session: self.0.welcome.session }
    }

    /// Whether the node is gone.
    pub fn is_gone(&self) -> bool {
        self.0.registry.gone.load(Ordering::Acquire)
    }

    /// Ends the conversation now, whoever still has a clone of it. All that was had is given back.
    pub fn close(&self) {
        if !self.is_own() {
            return;
        }
        self.0.events.shut_down();
        lock(&self.0.calls).packets.shut_down();
    }

    /// Whether the rack's hosts are machines: then what is stored here reaches others by messages.
    pub fn between_machines(&self) -> bool {
        self.0.welcome.machines
    }

    /// Whether a host is another machine than this one.
    pub(crate) fn is_far(&self, node: NodeId) -> bool {
        self.between_machines() && node != self.node()
    }

    /// The host that has the memory of multicast groups: that of the lowest node id.
    pub(crate) fn group_home(&self) -> NodeId {
        self.hosts().iter().map(|(node, _)| *node).min().unwrap_or(self.node())
    }

    /// Between machines, waits until what was stored before to the memory of a segment or a connection has taken
    /// effect everywhere.
    pub(crate) fn flush(&self, keeper: Handle) -> Result<(), AttachError> {
        match self.between_machines() {
            true => self.done(&SessionRequest::Flush { keeper }),
            false => Ok(()),
        }
    }

    /// Whether a host's node answers.
    ///
    /// # Errors
    /// [`AttachError::Refused`] when it does not, or there is no such host.
    pub fn probe(&self, node: NodeId) -> Result<(), AttachError> {
        self.done(&SessionRequest::Probe { node })
    }

    /// Whether a session of any host still lives. False is certain; true may only mean that
    /// nobody could be asked.
    ///
    /// # Errors
    /// [`AttachError`] when that cannot be told.
    pub fn alive(&self, holder: LockHolder) -> Result<bool, AttachError> {
        match self.call(&SessionRequest::Alive { holder })? {
            (Reply::Alive(alive), _) => Ok(alive),
            _ => Err(AttachError::Protocol),
        }
    }

    /// Changes who may use this host's segments, connected already or not. When it returns, who
    /// lost the right reads and writes nothing of these segments any more.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn set_share(
        &self,
        segments: std::ops::RangeInclusive<SegmentId>,
        node: Option<NodeId>,
        share: SegmentAccess,
    ) -> Result<(), AttachError> {
        let (first, last) = segments.into_inner();
        self.done(&SessionRequest::SetShare { first, last, node, share })
    }

    /// All segments of this host.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn segments(&self) -> Result<Vec<SegmentEntry>, AttachError> {
        let mut all = Vec::new();
        loop {
            let skip = u32::try_from(all.len()).unwrap_or(u32::MAX);
            match self.call(&SessionRequest::ListSegments { skip })? {
                (Reply::Segments { list, more }, _) => {
                    all.extend(list);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(AttachError::Protocol),
            }
        }
    }

    /// Whether this is the process that attached, and not a fork of it.
    pub(crate) fn is_own(&self) -> bool {
        self.0.is_own()
    }

    /// Gives up a fork's share of the connections, which are its parent's: where the parent ends, so does the session. In the
    /// process that attached it does nothing.
    pub fn abandon_in_fork(&self) {
        if !self.is_own() {
            self.0.connection.abandon_in_fork();
            self.0.events.abandon_in_fork();
        }
    }

    pub(crate) fn events(&self) -> &dyn PacketStream {
        &*self.0.events
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// Asks for something to be made, which ends again unless the caller [claims](Unclaimed::claim) it.
    pub(crate) fn make(
        &self,
        request: &SessionRequest,
    ) -> Result<(Unclaimed<'_>, Reply, Handles), AttachError> {
        let (reply, handles) = self.call(request)?;
        Ok((Unclaimed { session: self, ending: ending(&reply) }, reply, handles))
    }

    /// Asks the node; a refusal is an error.
    pub(crate) fn call(&self, request: &SessionRequest) -> Result<(Reply, Handles), AttachError> {
        if !self.is_own() {
            return Err(AttachError::Forked);
        }
        let begun = Instant::now();
        loop {
            match self.0.line().call(request, &[])? {
                (Reply::Refused(Refusal::Busy), _) if begun.elapsed() < BUSY => {}
                (Reply::Refused(refusal), _) => return Err(refusal.into()),
                answer => return Ok(answer),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The socket to the node, for who asks several things at once.
    pub(crate) fn line(&self) -> Result<MutexGuard<'_, RequestSocket>, AttachError> {
        match self.is_own() {
            true => Ok(self.0.line()),
            false => Err(AttachError::Forked),
        }
    }

    /// What it copies to other machines from.
    pub(crate) fn copy_buffer(&self) -> &CopyBuffer {
        &self.0.copies
    }

    /// Ends a connection. Nobody waits for that: what is asked next comes after it.
    pub(crate) fn disconnect(&self, connection: Handle) {
        if self.is_own() {
            // A node that is gone has ended it already.
            let _ = self.0.line().post(&SessionRequest::Disconnect { connection });
        }
    }

    /// Gives back what the node knows by `handle`: asks first, so that a move that is under way
    /// goes on to its end or is abandoned, then wakes those who wait for it, and only then hears
    /// no more of it.
    pub(crate) fn give_back(
        &self,
        handle: Handle,
        memory: &MappedMemory,
        request: &SessionRequest,
    ) -> Result<(), AttachError> {
        let outcome = self.done(request);
        memory.end();
        self.registry().forget(handle);
        outcome
    }

    /// Asks the node for something that has no result, and waits until it is done; [`AttachError::Busy`] where memory is
    /// still being moved for it after [`MOVED`].
    pub(crate) fn done(&self, request: &SessionRequest) -> Result<(), AttachError> {
        match self.call(request)? {
            (Reply::Done, _) => Ok(()),
            (Reply::Started { ticket }, _) => self.0.registry.finished.wait(ticket, MOVED),
            _ => Err(AttachError::Protocol),
        }
    }
}

impl Inner {
    fn line(&self) -> MutexGuard<'_, RequestSocket> {
        let _next = lock(&self.next);
        lock(&self.calls)
    }

    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Ends the thread of events, which ends that of callbacks. A fork has neither, and what it
        // shut down would be its parent's.
        if self.is_own() {
            self.events.shut_down();
        }
    }
}

/// Only its number, not what it is for.
impl From<&Session> for SessionId {
    fn from(session: &Session) -> SessionId {
        session.0.welcome.session
    }
}
