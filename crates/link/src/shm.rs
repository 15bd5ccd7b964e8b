//! The link between hosts on one machine: UNIX sockets that pass descriptors of shared memory.
//!
//! An address is a socket's path. Only processes of the same user, or root's, are listened to:
//! the kernel says who connects. Which host a peer is, is for the
//! caller to find out by its process; this one's own name only the node itself has.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rackbus_memory::{Stream, StreamError};
use rustix::process::{getpid, getuid};

use crate::{Hello, HelloReply, Incoming, Link, LinkError, VERSION, receive_frame, send_frame};

/// How long a peer may take for the next message, or to take one, before it counts as lost. Below
/// the five seconds that QEMU waits for a reply, so that its guest gets an answer in any case.
pub const TIME_LIMIT: Duration = Duration::from_secs(3);

/// Connects by UNIX socket.
#[derive(Debug, Clone, Copy, Default)]
pub struct ShmLink;

impl Link for ShmLink {
    fn connect(&self, address: &str, hello: &Hello) -> Result<Arc<dyn Stream>, LinkError> {
        let unreachable = |cause| LinkError::Unreachable { address: address.to_owned(), cause };
        let broken = |cause| LinkError::Broken { peer: hello.to.clone(), cause };
        let stream = UnixStream::connect(address).map_err(unreachable)?;
        stream.set_read_timeout(Some(TIME_LIMIT)).map_err(unreachable)?;
        stream.set_write_timeout(Some(TIME_LIMIT)).map_err(unreachable)?;
        send_frame(&stream, hello).map_err(broken)?;
        match receive_frame(&stream).map_err(broken)? {
            Ok(HelloReply::Accepted) => Ok(Arc::new(stream)),
            Ok(HelloReply::Refused(reason)) => {
                Err(LinkError::Refused { peer: hello.to.clone(), reason })
            }
            Err(what) => Err(LinkError::Protocol { peer: hello.to.clone(), what }),
        }
    }
}

/// Listens for other nodes on a socket.
#[derive(Debug)]
pub struct ShmListener {
    listener: UnixListener,
    path: PathBuf,
}

impl ShmListener {
    /// Listens at `path`; a socket left by a process that is gone is replaced.
    ///
    /// # Errors
    /// When another process listens there, or the path cannot be made.
    pub fn bind(path: &Path) -> std::io::Result<ShmListener> {
        if UnixStream::connect(path).is_ok() {
            let text = format!("another process listens at {}", path.display());
            return Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, text));
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        Ok(ShmListener { listener, path: path.to_owned() })
    }

    /// The address for [`Link::connect`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next connection. Its hello is still to be heard: [`hear`], on another thread.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn accept(&self) -> std::io::Result<UnixStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}

impl Drop for ShmListener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Hears what a connection wants. `None` when it may not speak, or makes no sense; it has been
/// told so.
pub fn hear(stream: UnixStream, rack: &str, host: &str) -> Option<Incoming> {
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
    if hello.version != VERSION {
        return refuse(&format!("link version {}, this node speaks {VERSION}", hello.version));
    }
    if hello.rack != rack || hello.to != host {
        return refuse(&format!("this is {host} of rack {rack}"));
    }
    // Only this process speaks for this host; others would have its own rights.
    if hello.from == host && peer.pid != getpid() {
        return refuse(&format!("{host} is this node; only it calls itself so"));
    }
    // From here on the conversation has its own pace: an idle device sends nothing for days.
    stream.set_read_timeout(None).ok()?;
    Some(Incoming { hello, stream, process: peer.pid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Service;

    fn hello() -> Hello {
        let service = Service::Function { device: "nvme0".into(), lease: 3, epoch: 7 };
        Hello {
            version: VERSION,
            rack: "demo".into(),
            from: "beta".into(),
            to: "alpha".into(),
            service,
        }
    }

    fn meet(
        hello: Hello,
        answer: impl FnOnce(Incoming) + Send + 'static,
    ) -> Result<Arc<dyn Stream>, LinkError> {
        let folder = std::env::temp_dir().join(format!("rackbus-link-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("{:?}.sock", std::thread::current().id()));
        let listener = ShmListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            if let Some(incoming) = hear(listener.accept().unwrap(), "demo", "alpha") {
                answer(incoming);
            }
        });
        let result = ShmLink.connect(path.to_str().unwrap(), &hello);
        peer.join().unwrap();
        result
    }

    #[test]
    fn a_welcome_opens_the_conversation() {
        let stream = meet(hello(), |incoming| {
            assert_eq!(incoming.hello, hello());
            let stream = incoming.accept().unwrap();
            stream.send(&[b"hi"], &[]).unwrap();
        });
        let mut bytes = [0; 2];
        stream.unwrap().receive(&mut bytes, &mut Vec::new()).unwrap();
        assert_eq!(&bytes, b"hi");
    }

    /// Whoever may call himself this host has every right here. The test runs itself as another
    /// process of the same user.
    #[test]
    fn nobody_else_is_this_host() {
        const STRANGER: &str = "RACKBUS_LINK_STRANGER";
        let own = Hello { from: "alpha".into(), ..hello() };
        if let Ok(path) = std::env::var(STRANGER) {
            let refused = ShmLink.connect(&path, &own).err().expect("a stranger is let in");
            assert!(refused.to_string().contains("alpha is this node"), "{refused}");
            return;
        }
        let stream = meet(own.clone(), |incoming| drop(incoming.accept().unwrap()));
        assert!(stream.is_ok(), "the node reaches itself");
        let folder = std::env::temp_dir().join(format!("rackbus-link-{}", std::process::id()));
        let path = folder.join("stranger.sock");
        let listener = ShmListener::bind(&path).unwrap();
        let mut stranger = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shm::tests::nobody_else_is_this_host"])
            .env(STRANGER, &path)
            .spawn()
            .unwrap();
        if let Some(incoming) = hear(listener.accept().unwrap(), "demo", "alpha") {
            drop(incoming.accept());
        }
        assert!(stranger.wait().unwrap().success());
    }

    #[test]
    fn refusals_carry_their_reason() {
        let refused = meet(hello(), |incoming| incoming.refuse("epoch 7 is over")).err();
        assert_eq!(refused.unwrap().to_string(), "alpha refused: epoch 7 is over");
        let lost = meet(Hello { to: "gamma".into(), ..hello() }, |_| unreachable!()).err();
        assert_eq!(lost.unwrap().to_string(), "gamma refused: this is alpha of rack demo");
    }
}
