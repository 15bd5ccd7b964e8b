#![deny(unsafe_code)]
//! Node to node: how one host's node reaches another's.
//!
//! A [`Link`] belongs to the rack: it knows where each host's node is reached. One side connects to a peer
//! and says with a [`Hello`] what it wants; the other's [`Listener`] hears it, as one who is known to be the
//! host that it says, and either refuses with a reason or goes on with the [`Conversation`] that the hello asked
//! for, which carries bytes or packets, and what leads to memory.
//!
//! [`shm`] is the link between hosts on one machine: memory itself is passed, so what is mapped
//! once needs no software afterwards. [`tcp`] is the one between machines: a medium's operations are carried
//! over TLS. [`ntb`] stands before that one where an NTB joins two machines, for segments and the network. Nothing above this crate knows how a link finds and knows its peers.

// What tests of several crates have in common names this one.
#[cfg(test)]
extern crate self as rackbus_link;

mod conversation;
mod framed;
mod medium;
pub mod ntb;
pub mod presence;
mod session;
pub mod shm;
pub mod tcp;
mod tls;
mod whole;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use conversation::{Conversation, OnRevoked};
pub use framed::FramedPackets;
pub use medium::{InWindow, OfferedMedium};
pub use rackbus_identity::{IsRevoked, WatchedConnection};
pub use session::{MediumSession, Secret};

use rackbus_identity::Versions;
use rackbus_memory::{Event, HandleRef, Handles, ResourceHandle, Stream, StreamError};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Versions of the link that are spoken here: of the hello, and of what follows it. Since version 2, conversations about
/// segments have locks, and flushes that are passed on; since version 3 they say of a connection that ends whether its
/// process has died; since version 4 what was copied goes by messages of its own, and since version
/// 5 its bytes may go beside the link.
pub const VERSIONS: Versions = Versions::new(1, 6);

/// What a connecting node says first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The versions of the link that the sender speaks.
    #[serde(flatten)]
    pub versions: Versions,
    /// The rack both belong to.
    pub rack: String,
    /// Name of the connecting host.
    pub from: String,
    /// The host it means to reach.
    pub to: String,
    /// What the conversation is for.
    pub service: Purpose,
}

/// What a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// To use a lent function; the conversation that follows is vfio-user.
    Function {
        /// The device's name on the lender, `nvme0`.
        device: String,
        /// Number of the lease that it is used under.
        lease: u64,
        /// The lease's fencing epoch.
        epoch: u64,
    },
    /// To use a lent function's medium, with its front on the connecting host: what the front needs to
    /// know follows, with the exchange it joins, and the conversation stays open for as long as it is used.
    Medium {
        /// The device's name on the lender, `nvme0`.
        device: String,
        /// Number of the lease that it is used under.
        lease: u64,
        /// The lease's fencing epoch.
        epoch: u64,
        /// By which providers of libfabric the connecting host can move data beside the link, the preferred ones
        /// first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        lanes: Vec<String>,
    },
    /// To go on with a session whose connection is lost, of a medium or of a function in a window: what was received follows.
    Resume {
        /// The device's name on the lender, `nvme0`.
        device: String,
        /// Number of the lease that it is used under.
        lease: u64,
        /// The lease's fencing epoch.
        epoch: u64,
        /// What only the two ends of the session know: the offer had it.
        secret: Secret,
        /// Number of the connection in the session; those before it are of no more use.
        connection: u64,
    },
    /// To use a lent function in the connecting host's own PCI tree: where it is in that host's window of their NTB
    /// follows, and the conversation stays open for as long as it is used.
    Window {
        /// The device's name on the lender, `nvme0`.
        device: String,
        /// Number of the lease that it is used under.
        lease: u64,
        /// The lease's fencing epoch.
        epoch: u64,
        /// Whether the connecting host goes on by other connections when this one is lost, where the answer
        /// [has a session](InWindow::session).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        held: bool,
    },
    /// To use segments and interrupts of the host: a packet socket follows, and the conversation
    /// goes on there.
    Segments,
    /// To send frames to the network's ports of the host: a packet socket follows, and the conversation goes on
    /// there.
    Network,
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HelloReply {
    /// The conversation may begin, in the newest version that the sender of the hello speaks.
    Accepted,
    /// The conversation may begin, in this older version that the sender of the hello speaks, too.
    AcceptedAs(u32),
    /// It may not, for this reason.
    Refused(String),
}

/// Why a peer could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody answers at the peer's address.
    #[error("no node answers at {address}: {cause}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The peer said no.
    #[error("{peer} refused: {reason}")]
    Refused {
        /// Name of the host that refused.
        peer: String,
        /// The reason that it gave.
        reason: String,
    },
    /// The connection failed before the peer answered.
    #[error("link to {peer}: {cause}")]
    Broken {
        /// Name of the host that was to be reached.
        peer: String,
        /// How the connection failed.
        cause: StreamError,
    },
    /// The peer's answer is not one.
    #[error("link to {peer}: it does not speak this protocol ({what})")]
    Protocol {
        /// Name of the host that was to be reached.
        peer: String,
        /// What it sent instead.
        what: String,
    },
}

impl LinkError {
    /// Whether a connection was made and ended before the peer had heard what it is for: its node may have been restarted in
    /// place at that moment.
    pub fn is_cut_off(&self) -> bool {
        use std::io::ErrorKind as K;
        match self {
            LinkError::Unreachable { cause, .. } => matches!(
                cause.kind(),
                K::UnexpectedEof | K::ConnectionReset | K::ConnectionAborted | K::BrokenPipe
            ),
            LinkError::Broken { cause: StreamError::Closed, .. } => true,
            LinkError::Broken { cause: StreamError::Socket(errno), .. } => {
                matches!(*errno, Errno::CONNRESET | Errno::PIPE)
            }
            _ => false,
        }
    }
}

/// A way to other hosts' nodes.
pub trait Connect: Send + Sync {
    /// Where the node of a host of the rack is reached: for [`connect`](Connect::connect), of any node's
    /// link of the same kind, and not to be read by anybody else.
    fn address(&self, host: &str) -> String;

    /// The same for whoever has no address of the host from elsewhere: where that is not known here, whoever
    /// knows is asked, and waited for. `None` when nobody does.
    fn locate(&self, host: &str) -> Option<String> {
        Some(self.address(host))
    }

    /// Connects to the node at `address` and waits for its welcome.
    ///
    /// # Errors
    /// [`LinkError`].
    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError>;

    /// Closes the NTBs through which some of its conversations go, when another process is about to take the place of this
    /// one: their peers are told, and on return nothing of them is used here any more. Until they are
    /// [opened](Connect::reopen_bridges), nobody is reached through them.
    fn close_bridges(&self) {}

    /// Opens them again, as this process goes on.
    fn reopen_bridges(&self) {}

    /// What the NTBs have counted through which some of its conversations go.
    fn bridges(&self) -> Vec<ntb::BridgeStatus> {
        Vec::new()
    }
}

/// The link of a node: the way to others, and where others come in.
pub trait Link: Connect {
    /// Listens for other nodes, as the node of `host`.
    ///
    /// # Errors
    /// When another process does, or the system refuses.
    fn listen(&self, host: &str) -> std::io::Result<Box<dyn Listener>>;

    /// Goes on listening as the node of `host` in the place of another process, with its
    /// [handle](Listener::handle).
    ///
    /// # Errors
    /// When what it leads to is none of this link's.
    fn listen_on(
        &self,
        host: &str,
        listener: ResourceHandle,
    ) -> std::io::Result<Box<dyn Listener>> {
        let _ = (host, listener);
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Goes on with a conversation in the place of another process, with its [handle](Stream::handle).
    ///
    /// # Errors
    /// When what it leads to is none of this link's.
    fn conversation(&self, conversation: ResourceHandle) -> std::io::Result<Arc<dyn Conversation>> {
        let _ = conversation;
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// Where other nodes come in.
pub trait Listener: Send {
    /// The next one that has connected, if anybody has: waits for nobody, also where somebody was there a moment ago. What it
    /// wants is still to be heard.
    ///
    /// # Errors
    /// When nobody can be let in now; [`ConnectionRefused`](std::io::ErrorKind::ConnectionRefused) when the one that
    /// connected was not, and the next one may be.
    fn accept_arrived(&self) -> std::io::Result<Option<Box<dyn Caller>>>;

    /// Readable when somebody may have connected.
    fn arrival(&self) -> BorrowedFd<'_>;

    /// Waits for the next one to connect.
    ///
    /// # Errors
    /// As [`accept_arrived`](Listener::accept_arrived).
    fn accept(&self) -> std::io::Result<Box<dyn Caller>> {
        loop {
            Event::wait_any(&[self.arrival()], None);
            if let Some(caller) = self.accept_arrived()? {
                return Ok(caller);
            }
        }
    }

    /// What leads another process to it, which can go on listening then. `None` where there is no such thing: then a node over
    /// this link is not restarted in place.
    fn handle(&self) -> Option<HandleRef<'_>> {
        None
    }
}

/// What a listener's socket gave; nothing where nobody was there any more.
fn arrived<T>(accepted: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match accepted {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        accepted => accepted.map(Some),
    }
}

/// Somebody who connected and has not said yet what it wants.
pub trait Caller: Send {
    /// Hears what it wants, which may take a while. `None` when it may not speak, is not the host that it
    /// says, or makes no sense; it has been told so.
    fn hear(self: Box<Self>) -> Option<IncomingConnection>;

    /// Whether it is on another machine, or says that it is: then hearing it may take long, and who goes on in the place
    /// of this process does not wait for it.
    fn is_slow(&self) -> bool {
        false
    }
}

/// A connection that said hello and waits for its answer.
pub struct IncomingConnection {
    /// The hello, whose sender is known to be the host that it names.
    pub hello: Hello,
    /// The version of the link that both speak.
    pub version: u32,
    /// The connection, for the conversation that the hello asks for.
    pub stream: Arc<dyn Conversation>,
}

impl std::fmt::Debug for IncomingConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IncomingConnection").field("hello", &self.hello).finish_non_exhaustive()
    }
}

impl IncomingConnection {
    /// Says that the conversation may begin, in the version that both speak.
    ///
    /// # Errors
    /// When the peer is gone.
    pub fn accept(self) -> Result<Arc<dyn Conversation>, StreamError> {
        send_frame(&*self.stream, &accepted(self.version, &self.hello))?;
        Ok(self.stream)
    }

    /// Says why it may not.
    pub fn refuse(self, reason: &str) {
        // A peer that is gone needs no reason.
        let _ = send_frame(&*self.stream, &HelloReply::Refused(reason.to_owned()));
        self.stream.shut_down();
    }
}

/// The version that the sender of a hello and this side, which speaks `own`, have in common.
///
/// # Errors
/// That there is none, and which side is to be upgraded.
fn common_version(own: Versions, hello: &Hello) -> Result<u32, String> {
    let Hello { versions, from, to, .. } = hello;
    own.common(*versions).map_err(|apart| apart.explained(to, from))
}

/// That a hello is accepted: without the version where that is the newest of its sender, as before there were several.
fn accepted(version: u32, hello: &Hello) -> HelloReply {
    match hello.versions.newest() == version {
        true => HelloReply::Accepted,
        false => HelloReply::AcceptedAs(version),
    }
}

/// Whether an answer to `hello` lets the conversation begin, and in which version.
fn answered(hello: &Hello, reply: HelloReply) -> Result<u32, LinkError> {
    let peer = || hello.to.clone();
    match reply {
        HelloReply::Accepted => Ok(hello.versions.newest()),
        HelloReply::AcceptedAs(version) => {
            let what = format!("it goes on in version {version}, which was not offered");
            let offered = hello.versions.has(version).then_some(version);
            offered.ok_or_else(|| LinkError::Protocol { peer: peer(), what })
        }
        HelloReply::Refused(reason) => Err(LinkError::Refused { peer: peer(), reason }),
    }
}

/// Largest hello or welcome in bytes.
const MAX_FRAME: usize = 4096;

/// Sends a value as its length (32 bits, little endian) and its JSON.
fn send_frame(stream: &dyn Stream, value: &impl Serialize) -> Result<(), StreamError> {
    send_frame_with(stream, value, &[])
}

/// The same, with handles beside it.
fn send_frame_with(
    stream: &dyn Stream,
    value: &impl Serialize,
    handles: &[HandleRef<'_>],
) -> Result<(), StreamError> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes();
    stream.send(&[&length, &text], handles)
}

/// Receives what [`send_frame`] sent; the inner error says what came instead.
fn receive_frame<T: for<'a> Deserialize<'a>>(
    stream: &dyn Stream,
) -> Result<Result<T, String>, StreamError> {
    let mut handles = Handles::new();
    let value = receive_frame_with(stream, &mut handles)?;
    if !handles.is_empty() {
        return Ok(Err("handles beside a frame that has none".to_owned()));
    }
    Ok(value)
}

/// The same, with what came beside it.
fn receive_frame_with<T: for<'a> Deserialize<'a>>(
    stream: &dyn Stream,
    handles: &mut Handles,
) -> Result<Result<T, String>, StreamError> {
    let mut length = [0; 4];
    stream.receive(&mut length, handles)?;
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_FRAME {
        return Ok(Err(format!("a frame of {length} bytes")));
    }
    let mut text = vec![0; length];
    stream.receive(&mut text, handles)?;
    Ok(serde_json::from_slice(&text).map_err(|cause| cause.to_string()))
}
