//! The link between hosts on one machine: UNIX sockets that pass descriptors of shared memory.
//!
//! An address is a socket's path, in the rack's run directory. Only processes of the same user, or
//! root's, are listened to: the kernel says who connects, and whether that is the node of the host that it
//! says ([`presence`](crate::presence)); this one's own name only the node itself has.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_memory::socket::connect_within;
use rackbus_memory::{HandleRef, Handles, PacketStream, ResourceHandle, Stream, StreamError};
use rustix::process::{Pid, getpid, getuid};

use crate::presence::speaks_for;
use crate::{
    Caller, Connect, Conversation, Hello, HelloReply, IncomingConnection, Link, LinkError,
    Listener, VERSIONS, answered, arrived, common_version, receive_frame, send_frame,
};

/// How long a peer may take for the next message, or to take one, before it counts as lost. Below
/// the five seconds that QEMU waits for a reply, so that its guest gets an answer in any case.
pub const TIME_LIMIT: Duration = Duration::from_secs(3);

/// The link of a rack on this machine: connects by UNIX sockets in its run directory.
#[derive(Debug, Clone)]
pub struct ShmLink {
    rack: String,
    run_dir: PathBuf,
    hosts: Arc<[String]>,
}

impl ShmLink {
    /// The link of `rack`, which has these hosts and that run directory.
    pub fn new<'h>(
        rack: &str,
        run_dir: &Path,
        hosts: impl IntoIterator<Item = &'h str>,
    ) -> ShmLink {
        let hosts = hosts.into_iter().map(str::to_owned).collect();
        ShmLink { rack: rack.to_owned(), run_dir: run_dir.to_owned(), hosts }
    }

    fn socket(&self, host: &str) -> PathBuf {
        self.run_dir.join(host).join("link.sock")
    }

    fn listener(&self, host: &str, listener: UnixListener) -> std::io::Result<Box<dyn Listener>> {
        listener.set_nonblocking(true)?;
        let (path, link) = (self.socket(host), self.clone());
        Ok(Box::new(ShmListener { listener, path, link, host: host.to_owned() }))
    }
}

impl Connect for ShmLink {
    fn address(&self, host: &str) -> String {
        self.socket(host).display().to_string()
    }

    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let unreachable = |cause: std::io::Error| {
            let cause = match cause.kind() {
                ErrorKind::WouldBlock => Error::new(ErrorKind::TimedOut, "it takes nobody in"),
                _ => cause,
            };
            LinkError::Unreachable { address: address.to_owned(), cause }
        };
        let broken = |cause| LinkError::Broken { peer: hello.to.clone(), cause };
        let stream = connect_within(Path::new(address), TIME_LIMIT).map_err(unreachable)?;
        send_frame(&stream, hello).map_err(broken)?;
        let reply = receive_frame(&stream).map_err(broken)?;
        let reply = reply.map_err(|what| LinkError::Protocol { peer: hello.to.clone(), what })?;
        let version = answered(hello, reply)?;
        Ok(Arc::new(ShmConversation { stream, version }))
    }
}

impl Link for ShmLink {
    fn listen(&self, host: &str) -> std::io::Result<Box<dyn Listener>> {
        let path = self.socket(host);
        let named = |cause: std::io::Error| {
            std::io::Error::new(cause.kind(), format!("{}: {cause}", path.display()))
        };
        let listener = rackbus_memory::socket::listen(&path).map_err(named)?;
        self.listener(host, listener)
    }

    fn listen_on(
        &self,
        host: &str,
        listener: ResourceHandle,
    ) -> std::io::Result<Box<dyn Listener>> {
        self.listener(host, listener.into_descriptor()?.into())
    }

    fn conversation(&self, conversation: ResourceHandle) -> std::io::Result<Arc<dyn Conversation>> {
        Ok(Arc::new(UnixStream::from(conversation.into_descriptor()?)))
    }
}

/// A conversation that this side began, in the version that both speak.
#[derive(Debug)]
struct ShmConversation {
    stream: UnixStream,
    version: u32,
}

impl Stream for ShmConversation {
    fn send(&self, parts: &[&[u8]], handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        self.stream.send(parts, handles)
    }

    fn receive(&self, buffer: &mut [u8], handles: &mut Handles) -> Result<(), StreamError> {
        self.stream.receive(buffer, handles)
    }

    fn wait_closed(&self) {
        self.stream.wait_closed();
    }

    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        self.stream.wait_closed_or(other);
    }

    fn is_closed(&self) -> bool {
        self.stream.is_closed()
    }

    fn shut_down(&self) {
        self.stream.shut_down();
    }

    fn handle(&self) -> Option<HandleRef<'_>> {
        self.stream.handle()
    }
}

impl Conversation for ShmConversation {
    fn offer_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        self.stream.offer_packets()
    }

    fn take_packets(&self) -> Result<Arc<dyn PacketStream>, StreamError> {
        self.stream.take_packets()
    }

    fn version(&self) -> u32 {
        self.version
    }
}

/// Listens for other nodes on a socket.
#[derive(Debug)]
struct ShmListener {
    listener: UnixListener,
    path: PathBuf,
    link: ShmLink,
    host: String,
}

impl Listener for ShmListener {
    fn accept_arrived(&self) -> std::io::Result<Option<Box<dyn Caller>>> {
        let Some((stream, _)) = arrived(self.listener.accept())? else { return Ok(None) };
        let (link, host) = (self.link.clone(), self.host.clone());
        Ok(Some(Box::new(ShmCaller { stream, link, host })))
    }

    fn arrival(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn handle(&self) -> Option<HandleRef<'_>> {
        Some(HandleRef::of_descriptor(self.listener.as_fd()))
    }
}

impl Drop for ShmListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Who connected to a socket.
#[derive(Debug)]
struct ShmCaller {
    stream: UnixStream,
    link: ShmLink,
    host: String,
}

impl Caller for ShmCaller {
    fn hear(self: Box<Self>) -> Option<IncomingConnection> {
        let ShmLink { rack, run_dir, hosts } = &self.link;
        let (incoming, process) = hear(self.stream, rack, &self.host)?;
        let from = &incoming.hello.from;
        if speaks_for(run_dir, hosts, from, process) {
            return Some(incoming);
        }
        let reason = format!("you are not the node of {from}");
        tracing::warn!(?process, reason, "a connection to the link was refused");
        incoming.refuse(&reason);
        None
    }
}

/// Hears what a connection to the node of `host` wants, and of which process it is. `None` when it may not speak, or makes no sense; it has been
/// told so.
pub fn hear(stream: UnixStream, rack: &str, host: &str) -> Option<(IncomingConnection, Pid)> {
    let stream = Arc::new(stream);
    let refuse = |reason: &str| {
        tracing::warn!(reason, "a connection to the link was refused");
        let _ = send_frame(&*stream, &HelloReply::Refused(reason.to_owned()));
        None
    };
    let peer = match rustix::net::sockopt::socket_peercred(&stream) {
        Ok(peer) if peer.uid == getuid() || peer.uid.is_root() => peer,
        Ok(peer) => return refuse(&format!("user {} may not connect", peer.uid.as_raw())),
        Err(cause) => return refuse(&format!("who connects is unknown: {cause}")),
    };
    stream.set_read_timeout(Some(TIME_LIMIT)).ok()?;
    stream.set_write_timeout(Some(TIME_LIMIT)).ok()?;
    let hello: Hello = match receive_frame(&*stream) {
        Ok(Ok(hello)) => hello,
        Ok(Err(what)) => return refuse(&format!("the hello makes no sense: {what}")),
        Err(StreamError::Closed) => return None,
        Err(cause) => return refuse(&cause.to_string()),
    };
    let version = match common_version(VERSIONS, &hello) {
        Ok(version) => version,
        Err(reason) => return refuse(&reason),
    };
    if hello.rack != rack || hello.to != host {
        return refuse(&format!("this is {host} of rack {rack}"));
    }
    // Only this process speaks for this host; others would have its own rights.
    if hello.from == host && peer.pid != getpid() {
        return refuse(&format!("{host} is this node; only it calls itself so"));
    }
    // From here on the conversation has its own pace: an idle device sends nothing for days.
    stream.set_read_timeout(None).ok()?;
    Some((IncomingConnection { hello, version, stream }, peer.pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Purpose;

    fn hello() -> Hello {
        let service = Purpose::Function { device: "nvme0".into(), lease: 3, epoch: 7 };
        Hello {
            versions: VERSIONS,
            rack: "demo".into(),
            from: "beta".into(),
            to: "alpha".into(),
            service,
        }
    }

    /// Of a rack by itself, for one test.
    fn link(test: &str) -> ShmLink {
        let folder =
            std::env::temp_dir().join(format!("rackbus-link-{}-{test}", std::process::id()));
        std::fs::create_dir_all(folder.join("alpha")).unwrap();
        ShmLink::new("demo", &folder, ["alpha", "beta"])
    }

    fn meet(
        test: &str,
        hello: Hello,
        answer: impl FnOnce(IncomingConnection) + Send + 'static,
    ) -> Result<Arc<dyn Conversation>, LinkError> {
        let link = link(test);
        let listener = link.listen("alpha").unwrap();
        let peer = std::thread::spawn(move || {
            if let Some(incoming) = listener.accept().unwrap().hear() {
                answer(incoming);
            }
        });
        let result = link.connect(&link.address("alpha"), &hello);
        peer.join().unwrap();
        result
    }

    #[test]
    fn a_welcome_opens_the_conversation() {
        let stream = meet("welcome", hello(), |incoming| {
            assert_eq!(incoming.hello, hello());
            let stream = incoming.accept().unwrap();
            stream.send(&[b"hi"], &[]).unwrap();
        });
        let mut bytes = [0; 2];
        stream.unwrap().receive(&mut bytes, &mut Handles::new()).unwrap();
        assert_eq!(&bytes, b"hi");
    }

    /// A node of the version before answers so; what it does not know is not said to it.
    #[test]
    fn a_conversation_is_of_the_version_that_the_peer_answered_with() {
        let link = link("version");
        let older = VERSIONS.newest() - 1;
        let listener = UnixListener::bind(link.address("alpha")).unwrap();
        let peer = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let _: Hello = receive_frame(&stream).unwrap().unwrap();
            send_frame(&stream, &HelloReply::AcceptedAs(older)).unwrap();
        });
        let stream = link.connect(&link.address("alpha"), &hello()).unwrap();
        assert_eq!(stream.version(), older);
        peer.join().unwrap();
        std::fs::remove_dir_all(&link.run_dir).unwrap();
        let stream = meet("newest", hello(), |incoming| drop(incoming.accept().unwrap())).unwrap();
        assert_eq!(stream.version(), VERSIONS.newest());
    }

    /// Whoever may call himself this host has every right here. The test runs itself as another
    /// process of the same user.
    #[test]
    fn only_one_process_is_this_host() {
        const STRANGER: &str = "RACKBUS_LINK_STRANGER";
        let own = Hello { from: "alpha".into(), ..hello() };
        if let Ok(folder) = std::env::var(STRANGER) {
            let link = ShmLink::new("demo", Path::new(&folder), []);
            // Nor is it a host of which another process is the node.
            let beta = Hello { from: "beta".into(), ..hello() };
            for (hello, reason) in [(own, "alpha is this node"), (beta, "not the node of beta")] {
                let refused = link.connect(&link.address("alpha"), &hello).err();
                let refused = refused.expect("a stranger is let in").to_string();
                assert!(refused.contains(reason), "{refused}");
            }
            return;
        }
        let stream = meet("own", own, |incoming| drop(incoming.accept().unwrap()));
        assert!(stream.is_ok(), "the node reaches itself");
        let link = link("stranger");
        let listener = link.listen("alpha").unwrap();
        let mut stranger = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shm::tests::only_one_process_is_this_host"])
            .env(STRANGER, &link.run_dir)
            .spawn()
            .unwrap();
        for _ in 0..2 {
            assert!(listener.accept().unwrap().hear().is_none(), "a stranger is heard");
        }
        assert!(stranger.wait().unwrap().success());
    }

    #[test]
    fn refusals_carry_their_reason() {
        let refused = meet("refused", hello(), |incoming| incoming.refuse("epoch 7 is over")).err();
        assert_eq!(refused.unwrap().to_string(), "alpha refused: epoch 7 is over");
        let lost = meet("lost", Hello { to: "gamma".into(), ..hello() }, |_| unreachable!()).err();
        assert_eq!(lost.unwrap().to_string(), "gamma refused: this is alpha of rack demo");
    }
}
