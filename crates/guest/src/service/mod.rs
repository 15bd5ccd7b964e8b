//! The device of one VM: what [`State`] decides, done with sockets, descriptors and QEMU.
//!
//! Threads: that of QEMU's messages and that of the guest's requests (`backend`), one that asks QEMU to map
//! (`window`), one that hears events and the time (`bells`), two for each session (`sessions`). All but the
//! first go through one lock; nothing waits under it. The first must not wait for any of the others: QEMU
//! does nothing else while it waits for an answer there.

mod backend;
mod bells;
mod chains;
mod sessions;
mod window;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rackbus_memory::Doorbell;
use rackbus_segment::guest::proof;
use vhost_user_backend::VhostUserDaemon;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::state::{Action, Asked, State};
use backend::Backend;
use bells::Bells;
use chains::Chains;
use sessions::Conversation;
use window::{Job, Window};

/// The window's size: so much of segments can be mapped in a guest at a time; more comes and goes through
/// it. The guest's kernel spends a 64th of it in memory of its own, and QEMU has 509 slots, one for each
/// 2 MiB that are mapped.
pub const WINDOW: u64 = 512 << 20;

/// Why a VM's device could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Something of the system's failed.
    #[error("{what}: {cause}")]
    System {
        /// What was tried.
        what: String,
        /// The error that the system gave.
        cause: std::io::Error,
    },
    /// The conversation with QEMU failed.
    #[error("vhost-user: {0}")]
    Vhost(vhost_user_backend::Error),
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// QEMU has connected, and its VM is over.
    Ended,
}

/// What a file of the guest's is here.
#[derive(Debug)]
enum Held {
    Memory(Arc<OwnedFd>),
    Bell(Arc<Doorbell>),
    Other,
}

/// All that is behind the lock.
#[derive(Debug)]
struct Inner {
    state: State,
    held: HashMap<u64, Held>,
    sessions: HashMap<u64, Conversation>,
    jobs: Sender<Job>,
}

/// One VM's device.
struct Device {
    /// The socket that processes of the guest's host attach to.
    node: PathBuf,
    begun: Instant,
    inner: Mutex<Inner>,
    chains: Chains,
    window: Window,
    bells: Bells,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Serves the device of one VM: waits at `socket` for QEMU, until the VM ends. `node` is the socket that
/// processes attach to on the host that the guest is for.
///
/// # Errors
/// When the socket cannot be made, or QEMU says what makes no sense.
pub fn serve(socket: &Path, node: &Path) -> Result<Served, ServeError> {
    let system = |what: &str| {
        let what = what.to_owned();
        move |cause| ServeError::System { what, cause }
    };
    // A socket that was left there by somebody who is gone.
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(system(&socket.display().to_string())(error));
        }
        _ => {}
    }
    let listener = std::os::unix::net::UnixListener::bind(socket)
        .map_err(system(&socket.display().to_string()))?;
    let (jobs, jobs_to_do) = std::sync::mpsc::channel();
    let device = Arc::new(Device {
        node: node.to_owned(),
        begun: Instant::now(),
        inner: Mutex::new(Inner {
            state: State::new(WINDOW),
            held: HashMap::new(),
            sessions: HashMap::new(),
            jobs,
        }),
        chains: Chains::default(),
        window: Window::default(),
        bells: Bells::new().map_err(system("epoll"))?,
    });
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::<()>::new());
    let backend = Arc::new(Backend::new(device.clone(), memory.clone()));
    let mut daemon = VhostUserDaemon::new("rackbus guest".to_owned(), backend, memory)
        .map_err(ServeError::Vhost)?;
    spawn("window", device.clone(), move |device| device.map_and_unmap(jobs_to_do))?;
    spawn("bells", device.clone(), |device| device.hear_bells())?;
    let mut listener = vhost::vhost_user::Listener::from(listener);
    daemon.start(&mut listener).map_err(ServeError::Vhost)?;
    // Nobody else is to connect, and whoever looks sees that somebody has.
    let _ = std::fs::remove_file(socket);
    tracing::info!("QEMU has connected");
    let outcome = daemon.wait();
    daemon.get_epoll_handlers().iter().for_each(|handler| handler.send_exit_event());
    device.end();
    match outcome {
        // That is how it ends, in between two messages or within one.
        Ok(()) | Err(vhost_user_backend::Error::HandleRequest(_)) => Ok(Served::Ended),
        Err(error) => Err(ServeError::Vhost(error)),
    }
}

fn spawn(
    name: &str,
    device: Arc<Device>,
    work: impl FnOnce(&Arc<Device>) + Send + 'static,
) -> Result<(), ServeError> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    let failed = |cause| ServeError::System { what: format!("a thread ({name})"), cause };
    thread.spawn(move || work(&device)).map(drop).map_err(failed)
}

impl Device {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Asks the state, and does what it says.
    fn act(self: &Arc<Self>, question: impl FnOnce(&mut State, u64) -> Vec<Action>) {
        let now = self.now();
        let mut inner = self.lock();
        let actions = question(&mut inner.state, now);
        self.perform(inner, actions);
    }

    /// Does what the state said under this lock: what is in an order, before it is given up.
    fn perform(self: &Arc<Self>, mut inner: MutexGuard<'_, Inner>, actions: Vec<Action>) {
        let mut later = Vec::new();
        for action in actions {
            match action {
                Action::Map { job, object, at, offset, length } => {
                    let Some(Held::Memory(file)) = inner.held.get(&object) else {
                        later.extend(inner.state.mapped(job, false));
                        continue;
                    };
                    let file = file.clone();
                    inner.order(Job::Map { job, file, at, offset, length });
                }
                Action::Unmap { ranges, asked } => inner.order(Job::Unmap { ranges, asked }),
                Action::Forget { object } => {
                    if let Some(Held::Bell(bell)) = inner.held.remove(&object) {
                        self.bells.forget(&bell);
                    }
                }
                Action::End { session } => {
                    if let Some(conversation) = inner.sessions.remove(&session) {
                        conversation.shut_down();
                    }
                }
                Action::Send { session, place, message } => {
                    let sent = inner.sessions.get_mut(&session).map(|it| it.send(place, &message));
                    if !matches!(sent, Some(Ok(()))) {
                        later.extend(inner.state.over(session));
                    }
                }
                Action::Ring { object } => {
                    if let Some(Held::Bell(bell)) = inner.held.get(&object) {
                        bell.relay();
                    }
                }
                Action::Prove { object, word, asked } => {
                    let page = match inner.held.get(&object) {
                        Some(Held::Memory(page)) => Some(page.clone()),
                        _ => None,
                    };
                    let same = page.is_some_and(|page| prove(&page, word).unwrap_or(false));
                    later.extend(inner.state.proven(asked, same));
                }
                answer_or_connection => later.push(answer_or_connection),
            }
        }
        drop(inner);
        for action in later {
            match action {
                Action::Answer { token, bytes } => self.chains.complete(token, &bytes),
                Action::Connect { session } => self.connect(session),
                _ => {}
            }
        }
    }

    /// Everything of the guest is over.
    fn end(self: &Arc<Self>) {
        self.act(|state, _| {
            let mut actions = Vec::new();
            state.clear(&mut actions);
            actions
        });
        self.window.close();
    }

    /// A job of unmapping is done.
    fn unmapped(&self, asked: Option<Asked>) {
        if let Some(Asked { token, unique }) = asked {
            self.chains.complete(token, &crate::fuse::done(unique));
        }
    }
}

impl Inner {
    fn order(&self, job: Job) {
        // Whoever does the jobs lives as long as the device.
        let _ = self.jobs.send(job);
    }
}

/// Whether a page begins with `word`, which is answered behind it.
fn prove(page: &OwnedFd, word: u64) -> std::io::Result<bool> {
    let mut there = [0; 8];
    if rustix::io::pread(page, &mut there, 0)? != 8 || u64::from_le_bytes(there) != word {
        return Ok(false);
    }
    Ok(rustix::io::pwrite(page, &proof(word).to_le_bytes(), 8)? == 8)
}
