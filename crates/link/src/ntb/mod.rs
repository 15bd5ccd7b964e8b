//! The link through a non-transparent bridge (NTB) between two hosts: what one node sends, its processor stores into memory of
//! the other's.
//!
//! It stands before another link ([`NtbLink`]): conversations about segments and of the network with a host at the other end
//! of an NTB go through that, all others by the link behind. Bytes are neither encrypted nor signed. Who the peer is says the
//! cable: the rack file names the host at the other end. No certificate tells a host that was revoked from one that has joined anew,
//! so for as long as a revocation of it is kept, all conversations with it go by the link behind, which asks for certificates.
//!
//! * [`layout`]: where things are in an arena, the memory that a peer stores to. [`protocol`]: what the ends say to each other there.
//!   `peer`: who the other one is. All are pure.
//! * `bridge`: what moves the bytes of an NTB. `end`: what the rest of the link has of it, and its thread. `conversation`: what
//!   the node has of it.
//!
//! The driver of the adapter is whoever implements [`NtbDriver`].

mod bridge;
mod conversation;
mod end;
pub mod layout;
mod peer;
pub mod protocol;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_identity::{Certified, Revocations, Subject};
use rackbus_memory::{HandleRef, ResourceHandle, StreamError};
use rustix::event::epoll;

pub use bridge::{BridgeStatus, NtbDriver, OpenNtb};
pub use layout::ArenaLayout;
pub use peer::{EndNames, PeerMismatch};
pub use protocol::Arenas;

use crate::{
    Caller, Connect, Conversation, Hello, HelloReply, IncomingConnection, Link, LinkError,
    Listener, Purpose, VERSIONS, answered, common_version, receive_frame, send_frame,
};

use conversation::NtbConversation;
use end::{Incoming, LinkEnd, serve_on_thread};

/// How long closing all NTBs may take: nodes at the other ends wait 3 s in all for one that is restarted.
const CLOSING: Duration = Duration::from_millis(800);
/// What addresses of this link begin with, in messages.
const SCHEME: &str = "ntb:";

/// A link whose conversations with some hosts go through NTBs, and all others by another link.
pub struct NtbLink {
    inner: Arc<dyn Link>,
    rack: String,
    host: String,
    revocations: Revocations,
    ends: BTreeMap<String, Arc<LinkEnd>>,
    incoming: Arc<Incoming>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for NtbLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NtbLink").field("ends", &self.ends).finish_non_exhaustive()
    }
}

/// Whether a conversation for this goes through the NTB. Functions have their own ways: a window, or a medium whose session
/// outlives its connection.
fn goes_through(service: &Purpose) -> bool {
    matches!(service, Purpose::Segments | Purpose::Network)
}

impl NtbLink {
    /// The link of `host` in `rack`, with NTBs by the host that each leads to, before the link `inner`. An NTB that cannot be
    /// opened is tried again.
    ///
    /// # Errors
    /// When the process has no descriptors or threads left.
    pub fn new(
        inner: Arc<dyn Link>,
        rack: &str,
        host: &str,
        bridges: impl IntoIterator<Item = (String, OpenNtb)>,
    ) -> std::io::Result<NtbLink> {
        let incoming = Arc::new(Incoming::new()?);
        let mut link = NtbLink {
            inner,
            rack: rack.to_owned(),
            host: host.to_owned(),
            revocations: Revocations::default(),
            ends: BTreeMap::new(),
            incoming,
            threads: Mutex::default(),
        };
        for (peer, open) in bridges {
            let end = Arc::new(LinkEnd::new(rack, host, &peer)?);
            let thread = serve_on_thread(end.clone(), open, link.incoming.clone())?;
            link.ends.insert(peer, end);
            link.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(link)
    }

    /// The same, which has no conversation through an NTB with a host of which all certificates were revoked, and ends those
    /// that there are.
    #[must_use]
    pub fn with_revocations(mut self, revocations: Revocations) -> NtbLink {
        self.revocations = revocations;
        self
    }

    /// Whether conversations with `peer` go by the link behind, as a revocation of it or of this host is kept: then a peer asks
    /// for this one's certificate.
    fn is_revoked(&self, peer: &str) -> bool {
        [peer, &self.host].into_iter().any(|host| {
            let certified = Certified::unshown(Subject::Node(host.to_owned()));
            self.revocations.check(&certified).is_err()
        })
    }

    /// The end through which a conversation begins, if it goes through an NTB.
    fn end_for(&self, hello: &Hello) -> Option<&LinkEnd> {
        let end = self.ends.get(&hello.to).filter(|_| goes_through(&hello.service))?;
        (!self.is_revoked(&hello.to)).then_some(&**end)
    }

    /// Ends all conversations through NTBs and closes these for good; on return nobody of this process has them any more.
    pub fn close(&self) {
        self.ends.values().for_each(|end| end.stop());
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for NtbLink {
    fn drop(&mut self) {
        self.close();
    }
}

impl Connect for NtbLink {
    fn address(&self, host: &str) -> String {
        self.inner.address(host)
    }

    fn locate(&self, host: &str) -> Option<String> {
        self.inner.locate(host)
    }

    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let Some(end) = self.end_for(hello) else { return self.inner.connect(address, hello) };
        let unreachable = |cause| {
            let address = format!("{SCHEME}{}", hello.to);
            LinkError::Unreachable { address, cause }
        };
        let broken = |cause| LinkError::Broken { peer: hello.to.clone(), cause };
        let socket = end.begin().map_err(unreachable)?;
        let stream = NtbConversation::new(socket).map_err(unreachable)?;
        if stream.end_when_revoked(&self.revocations, &hello.to).is_err() {
            return self.inner.connect(address, hello);
        }
        send_frame(&stream, hello).map_err(broken)?;
        let reply = receive_frame(&stream).map_err(broken)?;
        let reply = reply.map_err(|what| LinkError::Protocol { peer: hello.to.clone(), what })?;
        stream.agree(answered(hello, reply)?).map_err(unreachable)?;
        Ok(Arc::new(stream))
    }

    fn close_bridges(&self) {
        self.ends.values().for_each(|end| end.begin_closing());
        let until = Instant::now() + CLOSING;
        self.ends.values().for_each(|end| end.wait_closed(until));
    }

    fn reopen_bridges(&self) {
        self.ends.values().for_each(|end| end.reopen());
    }

    fn bridges(&self) -> Vec<BridgeStatus> {
        let status = |(host, end): (&String, &Arc<LinkEnd>)| BridgeStatus {
            revoked: self.is_revoked(host),
            ..end.status()
        };
        self.ends.iter().map(status).collect()
    }
}

impl Link for NtbLink {
    fn listen(&self, host: &str) -> std::io::Result<Box<dyn Listener>> {
        self.listening(self.inner.listen(host)?)
    }

    fn listen_on(
        &self,
        host: &str,
        listener: ResourceHandle,
    ) -> std::io::Result<Box<dyn Listener>> {
        self.listening(self.inner.listen_on(host, listener)?)
    }

    fn conversation(&self, conversation: ResourceHandle) -> std::io::Result<Arc<dyn Conversation>> {
        self.inner.conversation(conversation)
    }
}

impl NtbLink {
    fn listening(&self, inner: Box<dyn Listener>) -> std::io::Result<Box<dyn Listener>> {
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for one in [inner.arrival(), self.incoming.event()] {
            epoll::add(&either, one, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let (incoming, revocations) = (self.incoming.clone(), self.revocations.clone());
        let (rack, host) = (self.rack.clone(), self.host.clone());
        let behind_first = AtomicBool::new(false);
        let listening =
            NtbListening { inner, either, incoming, behind_first, revocations, rack, host };
        Ok(Box::new(listening))
    }
}

/// Listens at the NTBs and at the link behind.
///
/// Its [handle](Listener::handle) is that of the link behind: whoever goes on opens the NTBs anew.
struct NtbListening {
    inner: Box<dyn Listener>,
    /// Readable when somebody has come through an NTB or is behind.
    either: OwnedFd,
    incoming: Arc<Incoming>,
    /// The last one came through an NTB: whoever waits behind is next.
    behind_first: AtomicBool,
    revocations: Revocations,
    rack: String,
    host: String,
}

impl NtbListening {
    fn of_ntbs(&self) -> Option<Box<dyn Caller>> {
        let (from, socket) = self.incoming.take()?;
        self.behind_first.store(true, Ordering::Relaxed);
        let (rack, host) = (self.rack.clone(), self.host.clone());
        let revocations = self.revocations.clone();
        Some(Box::new(NtbCaller { socket, from, revocations, rack, host }))
    }
}

impl Listener for NtbListening {
    /// Those that come through NTBs and those behind in turn, so that neither keeps the others waiting.
    fn accept_arrived(&self) -> std::io::Result<Option<Box<dyn Caller>>> {
        let behind_first = self.behind_first.swap(false, Ordering::Relaxed);
        if let Some(caller) = (!behind_first).then(|| self.of_ntbs()).flatten() {
            return Ok(Some(caller));
        }
        Ok(self.inner.accept_arrived()?.or_else(|| self.of_ntbs()))
    }

    fn arrival(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }

    fn handle(&self) -> Option<HandleRef<'_>> {
        self.inner.handle()
    }
}

/// Who connected through an NTB: the host at its other end.
struct NtbCaller {
    socket: UnixStream,
    from: String,
    revocations: Revocations,
    rack: String,
    host: String,
}

impl Caller for NtbCaller {
    fn is_slow(&self) -> bool {
        true
    }

    fn hear(self: Box<Self>) -> Option<IncomingConnection> {
        let NtbCaller { socket, from, revocations, rack, host } = *self;
        let stream = NtbConversation::new(socket).ok()?;
        let refuse = |reason: &str| {
            tracing::warn!(from, reason, "a connection through the NTB was refused");
            let _ = send_frame(&stream, &HelloReply::Refused(reason.to_owned()));
            None
        };
        if stream.end_when_revoked(&revocations, &from).is_err() {
            return refuse(&format!("{from} was revoked: show a certificate, by TCP"));
        }
        let hello: Hello = match receive_frame(&stream) {
            Ok(Ok(hello)) => hello,
            Ok(Err(what)) => return refuse(&format!("the hello makes no sense: {what}")),
            Err(StreamError::Closed) => return None,
            Err(error) => return refuse(&error.to_string()),
        };
        let version = match common_version(VERSIONS, &hello) {
            Ok(version) => version,
            Err(reason) => return refuse(&reason),
        };
        if hello.rack != rack || hello.to != host {
            return refuse(&format!("this is {host} of rack {rack}"));
        }
        if hello.from != from {
            return refuse(&format!("the NTB leads to {from}, and not to {}", hello.from));
        }
        if !goes_through(&hello.service) {
            return refuse("segments and the network go through an NTB, functions by TCP");
        }
        stream.agree(version).ok()?;
        Some(IncomingConnection { hello, version, stream: Arc::new(stream) })
    }
}

#[cfg(test)]
mod tests;
