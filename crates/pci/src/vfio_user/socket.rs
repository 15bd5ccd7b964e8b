//! A vfio-user socket: accepts clients for one device, one at a time. Each has its own thread and its own
//! device, so one that is slow or hostile harms nobody else.
//!
//! While the [gate](Gate) of the process is closed nobody is accepted, and the client that is there waits
//! between two messages: socket and client can be passed to another process then, which
//! [goes on](Server::resume) with them.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rackbus_memory::{Gate, GatePassage, Stream};
use rackbus_spec::vfio_user::MessageHeader;
use rustix::io::Errno;

use super::device::{DeviceShape, RequestRefused, ServedDevice};
use super::requests::serve_asking;
use super::server::send_error;
use super::session::{RestingConversation, serve_within};
use super::wire::WireMessage;

/// Serves a device on a vfio-user socket, one client at a time.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Until it is retired.
    listener: Option<Arc<UnixListener>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    closing: AtomicBool,
    /// The client that has the device.
    current: Mutex<Option<Current>>,
    /// Signalled when a client has left and the device is released.
    left: Condvar,
}

#[derive(Debug)]
struct Current {
    stream: Arc<UnixStream>,
    /// Where its conversation rests, and what it was shown; nothing while it continues.
    at: Option<(RestingConversation, DeviceShape)>,
}

/// A client whose conversation rests.
#[derive(Debug)]
pub struct RestingClient {
    /// The client's connection, between two messages.
    pub stream: Arc<UnixStream>,
    /// Where the conversation rests.
    pub conversation: RestingConversation,
    /// What the device looks like to it.
    pub shape: DeviceShape,
}

/// A client with whom another process held a conversation, and the device that it goes on with.
pub struct ResumedClient {
    /// The client's connection, between two messages.
    pub stream: UnixStream,
    /// The device that the client sees.
    pub device: Box<dyn ServedDevice>,
    /// Where the conversation rested.
    pub conversation: RestingConversation,
}

/// How long a client waits for the one before it, which has closed the connection, to be cleaned
/// up after. Below QEMU's patience of five seconds.
const SUCCESSION: Duration = Duration::from_secs(3);

impl Shared {
    fn current(&self) -> MutexGuard<'_, Option<Current>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hands out the device to a client that connects; what it returns is released when dropped.
pub trait Opener: Send + Sync + 'static {
    /// Takes the device for a new client.
    ///
    /// # Errors
    /// Why the client cannot have it; its `VERSION` is answered with this error.
    fn open(&self) -> Result<Box<dyn ServedDevice>, RequestRefused>;
}

impl<F> Opener for F
where
    F: Fn() -> Result<Box<dyn ServedDevice>, RequestRefused> + Send + Sync + 'static,
{
    fn open(&self) -> Result<Box<dyn ServedDevice>, RequestRefused> {
        self()
    }
}

impl Server {
    /// Listens at `path`. A socket left by a process that is gone is replaced.
    ///
    /// # Errors
    /// When the path is taken or cannot be made.
    pub fn bind(path: &Path, opener: impl Opener) -> std::io::Result<Server> {
        Server::bind_within(path, opener, Gate::new()?)
    }

    /// The same in a process with this gate.
    ///
    /// # Errors
    /// As [`bind`](Server::bind).
    pub fn bind_within(path: &Path, opener: impl Opener, gate: Gate) -> std::io::Result<Server> {
        let listener = rackbus_memory::socket::listen(path)?;
        Server::without_listener(path).listen(listener, opener, gate, Vec::new())
    }

    /// Goes on in the place of another process, with its `listener` at `path`, unless it was
    /// [retired](Server::retire), and with the client that was there.
    ///
    /// # Errors
    /// When there are no threads left.
    pub fn resume(
        path: &Path,
        listener: Option<UnixListener>,
        client: Option<ResumedClient>,
        opener: impl Opener,
        gate: Gate,
    ) -> std::io::Result<Server> {
        let server = Server::without_listener(path);
        let mut clients = Vec::new();
        if let Some(ResumedClient { stream, device, conversation }) = client {
            let (stream, shared) = (Arc::new(stream), server.shared.clone());
            *shared.current() = Some(Current { stream: stream.clone(), at: None });
            let passage = gate.enter();
            clients.push(thread(move || {
                let passage = passage;
                let leaving = Leaving(&shared);
                // Behind `leaving`, so that it is released first also where this thread panics.
                let device = device;
                hold(&stream, &*device, conversation, &shared, &passage);
                drop(device);
                drop(leaving);
            })?);
        }
        match listener {
            Some(listener) => server.listen(listener, opener, gate, clients),
            None => Ok(server),
        }
    }

    fn without_listener(path: &Path) -> Server {
        Server { path: path.to_owned(), shared: Arc::default(), listener: None, thread: None }
    }

    fn listen(
        mut self,
        listener: UnixListener,
        opener: impl Opener,
        gate: Gate,
        clients: Vec<JoinHandle<()>>,
    ) -> std::io::Result<Server> {
        let opener: Arc<dyn Opener> = Arc::new(opener);
        let listener = Arc::new(listener);
        let thread = std::thread::Builder::new().name("vfio-user".into()).spawn({
            let (listener, shared) = (listener.clone(), self.shared.clone());
            move || accept(&listener, &opener, &shared, &gate, clients)
        })?;
        (self.listener, self.thread) = (Some(listener), Some(thread));
        Ok(self)
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket on which it accepts clients, until it is [retired](Server::retire).
    pub fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(|listener| listener.as_fd())
    }

    /// The client that is there, and rests.
    pub fn resting_client(&self) -> Option<RestingClient> {
        let current = self.shared.current();
        let Current { stream, at } = current.as_ref()?;
        let (conversation, shape) = at.clone()?;
        Some(RestingClient { stream: stream.clone(), conversation, shape })
    }

    /// The process at the other end, as the kernel knows it.
    pub fn client_pid(&self) -> Option<u32> {
        let stream = self.shared.current().as_ref()?.stream.clone();
        let peer = rustix::net::sockopt::socket_peercred(&*stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Accepts nobody any more and removes the socket, but continues with the client that is there:
    /// its conversation ends when the client ends it, also when this is dropped.
    pub fn retire(&mut self) {
        self.close();
        self.listener = None;
        // Dropping what is left does nothing more.
        self.thread = None;
    }

    /// Stops accepting; true when the accepting thread was told so.
    fn close(&self) -> bool {
        self.shared.closing.store(true, Ordering::Release);
        // Wakes the thread that accepts. If the path was removed, nobody can connect, and the
        // thread ends with the process.
        let woken = UnixStream::connect(&self.path).is_ok();
        let _ = std::fs::remove_file(&self.path);
        woken
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let woken = self.close();
        if let Some(current) = &*self.shared.current() {
            current.stream.shut_down();
        }
        if woken {
            let _ = thread.join();
        }
    }
}

fn accept(
    listener: &UnixListener,
    opener: &Arc<dyn Opener>,
    shared: &Arc<Shared>,
    gate: &Gate,
    mut clients: Vec<JoinHandle<()>>,
) {
    while !shared.closing.load(Ordering::Acquire) {
        let passage = gate.enter_when_readable(listener.as_fd());
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(cause) => {
                tracing::error!(%cause, "a client could not be accepted");
                // Out of descriptors, most likely: others need a moment to give some back.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        clients.retain(|client| !client.is_finished());
        if shared.closing.load(Ordering::Acquire) {
            break;
        }
        let (opener, shared) = (opener.clone(), shared.clone());
        match thread(move || converse(stream, &*opener, &shared, &passage)) {
            Ok(client) => clients.push(client),
            Err(cause) => {
                tracing::error!(%cause, "a client was refused: cannot start a thread for it")
            }
        }
    }
    for client in clients {
        let _ = client.join();
    }
}

fn thread(client: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("vfio-user client".into()).spawn(client)
}

fn converse(stream: UnixStream, opener: &dyn Opener, shared: &Shared, passage: &GatePassage) {
    let stream = Arc::new(stream);
    if !take_over(&stream, shared) {
        let busy = RequestRefused::new(Errno::BUSY, "another client has the device");
        refuse(&stream, &busy);
        return;
    }
    // Also when the device panics: the next client may have it once it is released.
    let leaving = Leaving(shared);
    match opener.open() {
        Ok(device) => hold(&stream, &*device, RestingConversation::default(), shared, passage),
        Err(error) => refuse(&stream, &error),
    }
    // The device is released (dropped) by here.
    drop(leaving);
}

fn hold(
    stream: &Arc<UnixStream>,
    device: &dyn ServedDevice,
    conversation: RestingConversation,
    shared: &Shared,
    passage: &GatePassage,
) {
    let at = |paused: Option<RestingConversation>| {
        if let Some(current) = &mut *shared.current() {
            current.at = paused.map(|conversation| (conversation, device.shape().clone()));
        }
    };
    let outcome = match device.requests() {
        Some(requests) => serve_asking(stream, device, requests),
        None => serve_within(&**stream, device, conversation, passage, at),
    };
    if let Err(error) = outcome {
        tracing::warn!(%error, "the client's conversation ended");
    }
}

/// Says, when dropped, that the client has left.
struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        *self.0.current() = None;
        self.0.left.notify_all();
    }
}

/// Makes `stream` the one that has the device. One that is there and has not closed its connection
/// keeps it.
fn take_over(stream: &Arc<UnixStream>, shared: &Shared) -> bool {
    let leaving = |current: &mut Option<Current>| {
        current.as_ref().is_some_and(|current| current.stream.is_closed())
    };
    let waited = shared.left.wait_timeout_while(shared.current(), SUCCESSION, leaving);
    let (mut current, _) = waited.unwrap_or_else(PoisonError::into_inner);
    let free = current.is_none();
    if free {
        *current = Some(Current { stream: stream.clone(), at: None });
    }
    free
}

/// Answers a client's first message with an error.
fn refuse(stream: &UnixStream, error: &RequestRefused) {
    tracing::warn!(%error, "a client was refused");
    // A client that never speaks must not keep the thread.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    if let Ok(message) = WireMessage::receive(stream) {
        let MessageHeader { message_id, command, .. } = message.header;
        let _ = send_error(stream, message_id, command, error.errno);
    }
}
