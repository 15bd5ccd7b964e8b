//! The link between machines: TLS 1.3 over TCP, with certificates of the rack on both sides.
//!
//! An address is `tcp:HOST:PORT`, where the node of a host listens. Which host a peer is says its certificate
//! ([`Subject::Node`]). Nothing of one machine can be passed to another: what needs that is refused on both
//! sides. What is left is the conversation of a front at the borrower with its medium at the lender, that of the network,
//! whose frames are carried, and that about segments, whose packets (`whole`) say what became of memory instead of
//! passing it.

mod connecting;

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rackbus_identity::rustls::{ClientConnection, ServerConnection};
use rackbus_identity::{
    Credentials, Handshake, Handshakes, Renewed, Revocations, Subject, Versions, has_spoken,
};
use rackbus_memory::{HandleRef, ResourceHandle, StreamError};

use crate::tls::TlsConversation;
use crate::{
    Caller, Connect, Conversation, Hello, HelloReply, IncomingConnection, Link, LinkError,
    Listener, Purpose, VERSIONS, answered, arrived, common_version, receive_frame, send_frame,
};
use connecting::{ConnectPace, connect_to};

/// How long a peer may take for each of a connection, a handshake and an answer before it counts as lost.
pub const TIME_LIMIT: Duration = Duration::from_secs(3);
/// The same for the connection alone where a session is resumed.
const RESUME_LIMIT: Duration = Duration::from_secs(1);
/// And how often it is begun meanwhile: sooner than the kernel repeats what was lost, which takes a second.
const BEGIN_AGAIN: Duration = Duration::from_millis(200);
/// What addresses of this link begin with.
pub const SCHEME: &str = "tcp:";
/// Peers that may be under way with their handshake and hello at a time: of each, memory is taken before it
/// is known.
const UNHEARD: usize = 256;

/// How many connections of this process the kernel seals, or has sealed (kTLS).
pub fn connections_sealed_by_kernel() -> u64 {
    crate::tls::kernel::taken_over()
}

/// The link of a host to others of its rack on other machines.
#[derive(Debug, Clone)]
pub struct TcpLink {
    rack: String,
    /// What this host's node tells others where it is.
    advertised: String,
    /// The address that it listens at: `HOST:PORT`.
    listen: String,
    credentials: Renewed,
    revocations: Revocations,
    versions: Versions,
    unheard: Handshakes,
    others: Others,
    /// Whether the kernel seals what sessions send, where it can.
    ktls: bool,
}

/// Says where the node of another host is, if anybody knows.
type Locate = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Who knows where other hosts' nodes are, once that is known.
#[derive(Clone, Default)]
struct Others(Arc<OnceLock<Box<Locate>>>);

impl std::fmt::Debug for Others {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Others").finish_non_exhaustive()
    }
}

impl TcpLink {
    /// The link of a host of `rack`: its node listens at `listen` (address and port), and others reach it at
    /// `advertised`.
    pub fn new(rack: &str, listen: &str, advertised: &str, credentials: Renewed) -> TcpLink {
        TcpLink {
            rack: rack.to_owned(),
            advertised: format!("{SCHEME}{advertised}"),
            listen: listen.to_owned(),
            credentials,
            revocations: Revocations::default(),
            versions: VERSIONS,
            unheard: Handshakes::new(UNHEARD),
            others: Others::default(),
            ktls: true,
        }
    }

    /// The same, whose conversations the kernel seals where it can and they are about a session that can be resumed, or
    /// never.
    #[must_use]
    pub fn with_ktls(self, ktls: bool) -> TcpLink {
        TcpLink { ktls, ..self }
    }

    /// Whether the kernel is to seal a conversation about this. Others than those of a session that goes on with another
    /// connection must not end because a kernel does not renew keys.
    fn is_sealed_by_kernel(&self, service: &Purpose) -> bool {
        self.ktls && matches!(service, Purpose::Medium { .. } | Purpose::Resume { .. })
    }

    /// The same, which speaks to nobody whose certificate is revoked, and ends the conversations of who is.
    #[must_use]
    pub fn with_revocations(self, revocations: Revocations) -> TcpLink {
        TcpLink { revocations, ..self }
    }

    /// The revocations that it keeps to.
    pub fn revocations(&self) -> &Revocations {
        &self.revocations
    }

    /// Asks `locate` for the addresses of other hosts' nodes, from whatever thread wants one: it may wait
    /// there. What is said first stays.
    pub fn locate_by(&self, locate: impl Fn(&str) -> Option<String> + Send + Sync + 'static) {
        let _ = self.others.0.set(Box::new(locate));
    }

    fn credentials(&self) -> Credentials {
        self.credentials.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What of a link of shared memory this one has not.
fn refusal(service: &Purpose) -> Option<&'static str> {
    match service {
        Purpose::Medium { .. }
        | Purpose::Resume { .. }
        | Purpose::Window { .. }
        | Purpose::Segments
        | Purpose::Network => None,
        Purpose::Function { .. } => Some(
            "between machines, a function's front runs at its borrower; borrow it with \
             `--placement borrower`",
        ),
    }
}

impl Connect for TcpLink {
    /// Only the node's own is known here: others' come with what they lend.
    fn address(&self, host: &str) -> String {
        let own = Subject::Node(host.to_owned()) == *self.credentials().subject();
        if own { self.advertised.clone() } else { String::new() }
    }

    fn locate(&self, host: &str) -> Option<String> {
        let own = Some(self.address(host)).filter(|address| !address.is_empty());
        own.or_else(|| self.others.0.get()?(host))
    }

    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let peer = || hello.to.clone();
        if let Some(reason) = refusal(&hello.service) {
            return Err(LinkError::Refused { peer: peer(), reason: reason.to_owned() });
        }
        let unreachable = |cause| LinkError::Unreachable { address: address.to_owned(), cause };
        let broken = |cause| LinkError::Broken { peer: peer(), cause };
        let place = address.strip_prefix(SCHEME).ok_or_else(|| LinkError::Protocol {
            peer: peer(),
            what: format!("its address {address:?} is none of this link"),
        })?;
        let socket = connect_to(place, pace(&hello.service)).map_err(unreachable)?;
        let name = Subject::Node(hello.to.clone()).server_name();
        let name = name.ok_or_else(|| unreachable(std::io::ErrorKind::InvalidInput.into()))?;
        let config = self.credentials().client().clone();
        let tls = ClientConnection::new(config, name).map_err(std::io::Error::other);
        let tls = tls.map_err(unreachable)?;
        let stream = TlsConversation::begin(socket, tls.into(), TIME_LIMIT).map_err(unreachable)?;
        let known = stream.end_when_revoked(&self.revocations);
        known.map_err(|reason| LinkError::Refused { peer: peer(), reason })?;
        if self.is_sealed_by_kernel(&hello.service) {
            stream.seal_by_kernel().map_err(broken)?;
        }
        send_frame(&stream, hello).map_err(broken)?;
        let reply = receive_frame(&stream).map_err(broken)?;
        let reply = reply.map_err(|what| LinkError::Protocol { peer: peer(), what })?;
        stream.agree(answered(hello, reply)?);
        Ok(Arc::new(stream))
    }
}

/// How long a connection may take, and how often it is begun meanwhile. One that resumes a session is tried again and
/// again: what was sent while nothing passed is not waited for.
fn pace(service: &Purpose) -> ConnectPace {
    match service {
        Purpose::Resume { .. } => ConnectPace { limit: RESUME_LIMIT, every: BEGIN_AGAIN },
        _ => ConnectPace { limit: TIME_LIMIT, every: TIME_LIMIT },
    }
}

impl Link for TcpLink {
    fn listen(&self, host: &str) -> std::io::Result<Box<dyn Listener>> {
        let named = |cause: std::io::Error| {
            std::io::Error::new(cause.kind(), format!("{}: {cause}", self.listen))
        };
        self.listening(TcpListener::bind(&self.listen).map_err(named)?, host)
    }

    fn listen_on(
        &self,
        host: &str,
        listener: ResourceHandle,
    ) -> std::io::Result<Box<dyn Listener>> {
        self.listening(TcpListener::from(listener.into_descriptor()?), host)
    }
}

impl TcpLink {
    fn listening(&self, listener: TcpListener, host: &str) -> std::io::Result<Box<dyn Listener>> {
        listener.set_nonblocking(true)?;
        Ok(Box::new(TcpListening { listener, link: self.clone(), host: host.to_owned() }))
    }
}

/// Listens for other nodes.
#[derive(Debug)]
struct TcpListening {
    listener: TcpListener,
    link: TcpLink,
    host: String,
}

impl Listener for TcpListening {
    fn accept_arrived(&self) -> std::io::Result<Option<Box<dyn Caller>>> {
        let Some((socket, from)) = arrived(self.listener.accept())? else { return Ok(None) };
        let ended = socket.try_clone()?;
        let end = move || {
            tracing::warn!(%from, "a connection to the link was ended: others need its place, and it has not identified itself yet");
            let _ = ended.shutdown(std::net::Shutdown::Both);
        };
        let spoken = has_spoken(&socket);
        let Some(unheard) = self.link.unheard.begin(from.ip(), spoken, end) else {
            tracing::warn!(%from, "a connection to the link was refused: too many have not identified themselves yet");
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        };
        let (link, host) = (self.link.clone(), self.host.clone());
        Ok(Some(Box::new(TcpCaller { socket, link, host, unheard })))
    }

    fn arrival(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn handle(&self) -> Option<HandleRef<'_>> {
        Some(HandleRef::of_descriptor(self.listener.as_fd()))
    }
}

/// A connection whose other end proved by its certificate which host it is.
#[derive(Debug)]
struct TcpCaller {
    socket: TcpStream,
    link: TcpLink,
    host: String,
    unheard: Handshake,
}

/// Waits until the peer has said something.
fn first_word(socket: &TcpStream, limit: Duration) -> std::io::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.peek(&mut [0]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl Caller for TcpCaller {
    fn is_slow(&self) -> bool {
        true
    }

    fn hear(self: Box<Self>) -> Option<IncomingConnection> {
        // Nothing is made for who says nothing.
        if let Err(error) = first_word(&self.socket, TIME_LIMIT) {
            // Who connects may have begun more than one, and ends those that it does not need.
            match error.kind() {
                ErrorKind::UnexpectedEof => {
                    tracing::debug!("a connection to the link ended unused")
                }
                _ => {
                    tracing::warn!(%error, "a connection to the link was refused: it said nothing")
                }
            }
            return None;
        }
        self.unheard.note_heard();
        let config = self.link.credentials().server().clone();
        let tls = ServerConnection::new(config).ok()?;
        let stream = match TlsConversation::begin(self.socket, tls.into(), TIME_LIMIT) {
            Ok(stream) => Arc::new(stream),
            Err(error) => {
                tracing::warn!(%error, "a connection to the link was refused");
                return None;
            }
        };
        let refuse = |reason: &str| {
            tracing::warn!(reason, "a connection to the link was refused");
            let _ = send_frame(&*stream, &HelloReply::Refused(reason.to_owned()));
            None
        };
        let peer = match stream.end_when_revoked(&self.link.revocations) {
            Ok(certified) => certified.subject,
            Err(reason) => return refuse(&reason),
        };
        let hello: Hello = match receive_frame(&*stream) {
            Ok(Ok(hello)) => hello,
            Ok(Err(what)) => return refuse(&format!("the hello makes no sense: {what}")),
            // Nobody is told why: a peer that stood still for a moment would take that for the end of its session, and it
            // connects again.
            Err(StreamError::Closed) => return None,
            Err(error) => {
                tracing::warn!(%error, "a connection to the link said nothing of what it is for");
                return None;
            }
        };
        let version = match common_version(self.link.versions, &hello) {
            Ok(version) => version,
            Err(reason) => return refuse(&reason),
        };
        if hello.rack != self.link.rack || hello.to != self.host {
            return refuse(&format!("this is {} of rack {}", self.host, self.link.rack));
        }
        if peer != Subject::Node(hello.from.clone()) {
            return refuse(&format!("your certificate is not that of {}", hello.from));
        }
        if let Some(reason) = refusal(&hello.service) {
            return refuse(reason);
        }
        if self.link.is_sealed_by_kernel(&hello.service)
            && let Err(error) = stream.seal_by_kernel()
        {
            tracing::warn!(%error, "a connection to the link was refused: the kernel does not seal it");
            return None;
        }
        // From here on the conversation has its own pace: an idle device sends nothing for days.
        stream.receive_without_limit();
        Some(IncomingConnection { hello, version, stream })
    }
}

#[cfg(test)]
mod tests;
