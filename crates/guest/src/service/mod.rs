//! The device of one VM: what [`Core`] decides, done with sockets, descriptors and QEMU.
//!
//! Threads: those of QEMU's messages (`relay`, and one that answers them) and that of the guest's requests
//! (`backend`), one that asks QEMU to map (`window`), one that hears events and the time (`bells`), two for
//! each session (`sessions`), one that looks after the standby (`standby`). All go through one lock, under
//! which nothing waits but for a standby to have room. What QEMU waits for must not wait for QEMU: it does
//! nothing else meanwhile.
//!
//! Everything that happens is a [`JournalRecord`]: the standby is told of it, then it is decided on, then what was
//! decided is done. So when this process dies, the standby knows what it knew.

mod backend;
mod bells;
mod chains;
mod kept;
mod ledger;
mod link;
mod relay;
mod sessions;
mod standby;
#[cfg(test)]
mod tests;
mod window;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rackbus_segment::guest::proof;
use rustix::time::{ClockId, clock_gettime};
use vhost_user_backend::{VhostUserDaemon, VringRwLock, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::journal::frontend::VhostSetting;
use crate::journal::{Core, JournalRecord, QUEUES, QueuedRequest};
use crate::state::GuestAction;
use backend::Backend;
use bells::Bells;
use chains::{Chains, RequestChain};
use kept::{DeviceParts, KeptFile};
use ledger::Ledger;
use link::StandbyLink;
use relay::Relay;
use sessions::SessionThreads;
use window::{QemuWindow, WindowJob};

pub use standby::{StandbyStart, stand_by};

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
        /// The step that failed.
        what: String,
        /// The error that the system gave.
        cause: std::io::Error,
    },
    /// The conversation with QEMU failed.
    #[error("vhost-user: {0}")]
    Vhost(vhost_user_backend::Error),
}

fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> ServeError {
    let what = what.into();
    move |cause| ServeError::System { what, cause }
}

/// How serving a VM has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServingEnd {
    /// QEMU has connected, and its VM has ended.
    Ended,
}

/// All that is behind the lock.
#[derive(Debug)]
struct Inner {
    kept: DeviceParts,
    /// Not bounded by itself, since whoever holds the lock must not wait for QEMU, whose answers take the lock.
    /// What waits is bounded by the guest: each mapping and each removal that it asks for holds its request's entry
    /// of a queue until it is done, and what is taken away otherwise was mapped by such a request before, and is
    /// taken away once.
    jobs: Sender<WindowJob>,
    /// The way to the standby, while there is one that follows.
    link: Option<StandbyLink>,
}

/// The file system device of one VM.
struct Device {
    helper: StandbyStart,
    /// The socket that processes of the guest's host attach to.
    node: PathBuf,
    inner: Mutex<Inner>,
    chains: Chains,
    ledger: Arc<Ledger>,
    window: QemuWindow,
    bells: Bells,
    threads: SessionThreads,
    /// Queues that another process served, or that were stopped, and that have not been looked at since.
    inherited: Mutex<[bool; QUEUES]>,
    /// Queues whose driver did what none may do: they are not served until they were stopped.
    faulty: [AtomicBool; QUEUES],
    taken_up: Condvar,
    /// The process id of the standby; none while there is none.
    standby: Mutex<Option<rustix::process::Pid>>,
    /// The VM has ended.
    over: AtomicBool,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Milliseconds of the clock that all processes of the machine have.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1000 + nanoseconds / 1_000_000
}

/// Serves the device of one VM: waits at the helper's socket for QEMU, until the VM ends. Calls `connected`
/// when QEMU has come.
///
/// # Errors
/// When the socket cannot be made, or QEMU says what makes no sense.
pub fn serve(helper: StandbyStart, connected: impl FnOnce()) -> Result<ServingEnd, ServeError> {
    let socket = helper.socket.clone();
    let named = || socket.display().to_string();
    let listener = rackbus_memory::socket::listen(&socket).map_err(system(named()))?;
    let (qemu, _) = listener.accept().map_err(system(named()))?;
    connected();
    // Nobody else is to connect.
    let _ = std::fs::remove_file(&socket);
    tracing::info!("QEMU has connected");
    let ledger = Ledger::new().map_err(|error| system("memory")(std::io::Error::other(error)))?;
    run(helper, DeviceParts::new(Core::new(WINDOW)), ledger, qemu, false)
}

/// Serves QEMU from here on, until the VM ends; what there is, another process may have begun.
fn run(
    helper: StandbyStart,
    kept: DeviceParts,
    ledger: Ledger,
    qemu: UnixStream,
    inherited: bool,
) -> Result<ServingEnd, ServeError> {
    let (jobs, jobs_to_do) = std::sync::mpsc::channel();
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::<()>::new());
    let qemu = Arc::new(qemu);
    let device = Arc::new(Device::new(helper, (kept, ledger), jobs, &memory, inherited)?);
    let backend = Arc::new(Backend::new(device.clone(), memory.clone()));
    let mut daemon = VhostUserDaemon::new("rackbus guest".to_owned(), backend, memory)
        .map_err(ServeError::Vhost)?;
    let inside = start_inside(&mut daemon, &device.helper.socket)?;
    let relay = Relay { qemu: qemu.clone(), inside };
    if inherited {
        device.resume(&relay)?;
    }
    spawn("window", device.clone(), move |device| device.map_and_unmap(jobs_to_do, inherited))?;
    spawn("bells", device.clone(), |device| device.hear_bells())?;
    spawn("standby", device.clone(), move |device| device.keep_standby(&qemu))?;
    spawn("relay", device.clone(), move |device| {
        if inherited && let Err(error) = relay.resume(device) {
            tracing::warn!(%error, "QEMU is not answered");
        }
        relay.run(device);
    })?;
    let outcome = daemon.wait();
    tracing::debug!(?outcome, "the conversation with QEMU has ended");
    daemon.get_epoll_handlers().iter().for_each(|handler| handler.send_exit_event());
    device.end();
    match outcome {
        // That is how it ends, in between two messages or within one.
        Ok(()) | Err(vhost_user_backend::Error::HandleRequest(_)) => Ok(ServingEnd::Ended),
        Err(error) => Err(ServeError::Vhost(error)),
    }
}

/// Has the daemon answer at a socket of this process' own: the other end of it.
fn start_inside(
    daemon: &mut VhostUserDaemon<Arc<Backend>>,
    beside: &Path,
) -> Result<UnixStream, ServeError> {
    let folder = beside.parent().unwrap_or(Path::new("."));
    let named = || folder.display().to_string();
    let folder = std::fs::File::open(folder).map_err(system(named()))?;
    // By the folder's descriptor: a path may be too long for a socket.
    let name = format!(".{}.{}", std::process::id(), now());
    let number = std::os::fd::AsRawFd::as_raw_fd(&folder);
    let path = PathBuf::from(format!("/proc/self/fd/{number}/{name}"));
    let listener = std::os::unix::net::UnixListener::bind(&path).map_err(system(named()))?;
    let mut listener = vhost::vhost_user::Listener::from(listener);
    let other_end = UnixStream::connect(&path).map_err(system(named()));
    let started = daemon.start(&mut listener).map_err(ServeError::Vhost);
    let _ = std::fs::remove_file(&path);
    started?;
    other_end
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
    fn new(
        helper: StandbyStart,
        (kept, ledger): (DeviceParts, Ledger),
        jobs: Sender<WindowJob>,
        memory: &GuestMemoryAtomic<GuestMemoryMmap>,
        inherited: bool,
    ) -> Result<Device, ServeError> {
        let ledger = Arc::new(ledger);
        let started = |queue: usize| {
            inherited
                && kept
                    .core
                    .frontend
                    .has(VhostSetting::Kick(u8::try_from(queue).unwrap_or(u8::MAX)))
        };
        Ok(Device {
            node: helper.node.clone(),
            helper,
            inherited: Mutex::new(std::array::from_fn(started)),
            faulty: Default::default(),
            taken_up: Condvar::new(),
            standby: Mutex::new(None),
            inner: Mutex::new(Inner { kept, jobs, link: None }),
            chains: Chains::new(memory.clone(), ledger.clone()),
            ledger,
            window: QemuWindow::default(),
            bells: Bells::new().map_err(system("epoll"))?,
            threads: SessionThreads::default(),
            over: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something happened: does what is to be done then.
    fn act(self: &Arc<Self>, record: &JournalRecord) {
        self.act_with(record, Vec::new());
    }

    /// The same, and this came along.
    fn act_with(self: &Arc<Self>, record: &JournalRecord, beside: Vec<OwnedFd>) {
        let mut inner = self.lock();
        let actions = self.record(&mut inner, record, beside);
        self.perform(inner, actions);
    }

    /// QEMU said something, which leads to nothing here; the number of the record.
    fn record_only(self: &Arc<Self>, record: &JournalRecord, beside: Vec<OwnedFd>) -> u64 {
        let mut inner = self.lock();
        let actions = self.record(&mut inner, record, beside);
        let number = inner.kept.core.records();
        self.perform(inner, actions);
        number
    }

    /// A request came by a queue; false where its driver is at fault, and the queue is served no more.
    fn request(self: &Arc<Self>, queue: u8, vring: &VringRwLock, chain: &RequestChain) -> bool {
        let head = chain.head_index();
        if !self.chains.admits(vring, queue, head) {
            self.fail(queue, vring, head);
            return false;
        }
        let (room, bytes) = (chains::room(chain), chains::read(chain));
        let mut inner = self.lock();
        let token = inner.kept.core.next_token();
        let request = QueuedRequest { queue, head, room: room.clone(), answer: None };
        self.ledger.taken(queue, head, token);
        self.chains.wait(token, vring, &request);
        let record = JournalRecord::Request { now: now(), queue, head, room, bytes };
        let actions = self.record(&mut inner, &record, Vec::new());
        self.perform(inner, actions);
        true
    }

    /// A driver posted a head that it may not post.
    fn fail(&self, queue: u8, vring: &VringRwLock, head: u16) {
        tracing::warn!(
            queue,
            head,
            "the guest's driver posts a request that it may not; its queue is not served any more"
        );
        if let Some(faulty) = self.faulty.get(usize::from(queue)) {
            faulty.store(true, Ordering::Release);
        }
        // It was not taken: what is said of the queue is what was recorded.
        let mut state = vring.get_mut();
        let next = state.get_queue().next_avail().wrapping_sub(1);
        state.get_queue_mut().set_next_avail(next);
    }

    /// Tells the standby, and decides.
    fn record(
        &self,
        inner: &mut Inner,
        record: &JournalRecord,
        beside: Vec<OwnedFd>,
    ) -> Vec<GuestAction> {
        if let Some(link) = &inner.link
            && let Err(error) = link.happened(record, &sessions::borrowed(&beside))
        {
            tracing::warn!(%error, "the standby does not follow; it is replaced");
            // It is not to see the end of the socket and continue with what it has.
            self.kill_standby();
            inner.link = None;
        }
        let outcome = inner.kept.take(record, beside);
        for number in outcome.objects {
            if let Some(KeptFile::Bell(bell, _)) = inner.kept.held.get(&number)
                && let Err(error) = self.bells.listen(number, bell)
            {
                tracing::error!(%error, "an interrupt of the guest cannot be waited for and may be delayed");
            }
        }
        outcome.actions
    }

    /// Does what was decided under this lock: what is in an order, before it is given up.
    fn perform(self: &Arc<Self>, mut inner: MutexGuard<'_, Inner>, actions: Vec<GuestAction>) {
        let (mut todo, mut later) = (std::collections::VecDeque::from(actions), Vec::new());
        while let Some(action) = todo.pop_front() {
            match action {
                GuestAction::Map { .. } | GuestAction::Unmap { .. } => inner.order(&action, false),
                GuestAction::Release { object } | GuestAction::Forget { object } => {
                    if let Some(KeptFile::Bell(bell, _)) = inner.kept.held.remove(&object) {
                        self.bells.forget(&bell);
                    }
                }
                GuestAction::End { session } => {
                    if let Some(conversation) = inner.kept.sessions.remove(&session) {
                        conversation.shut_down();
                    }
                }
                GuestAction::Send { session, place, message } => {
                    let conversation = inner.kept.sessions.get_mut(&session);
                    let sent = conversation.map(|it| it.send(place, &message));
                    if !matches!(sent, Some(Ok(()))) {
                        // The node learns of it, and so does who hears what it says.
                        if let Some(conversation) = inner.kept.sessions.get(&session) {
                            conversation.shut_down();
                        }
                        todo.extend(self.record(
                            &mut inner,
                            &JournalRecord::Over { session },
                            Vec::new(),
                        ));
                    }
                }
                GuestAction::Ring { object } => {
                    if let Some(KeptFile::Bell(bell, _)) = inner.kept.held.get(&object) {
                        bell.relay();
                    }
                }
                GuestAction::Prove { object, word, asked } => {
                    let same = match inner.kept.held.get(&object) {
                        Some(KeptFile::Memory(page)) => prove(page, word).unwrap_or(false),
                        _ => false,
                    };
                    let record = JournalRecord::Proven { asked, same };
                    todo.extend(self.record(&mut inner, &record, Vec::new()));
                }
                answer_or_connection => later.push(answer_or_connection),
            }
        }
        self.ledger.performed(inner.kept.core.records());
        drop(inner);
        for action in later {
            match action {
                GuestAction::Answer { token, bytes } => self.chains.complete(token, &bytes),
                GuestAction::Connect { session } => self.connect(session),
                _ => {}
            }
        }
    }

    /// Everything of the guest has ended.
    fn end(self: &Arc<Self>) {
        self.over.store(true, Ordering::Release);
        self.act(&JournalRecord::Clear);
        self.window.close();
        // Whoever does the jobs lives as long as the device.
        let _ = self.lock().jobs.send(WindowJob::End);
        self.end_standby();
    }

    /// The queues stop: when they continue, what was not answered is.
    fn set_aside(&self) {
        *self.inherited.lock().unwrap_or_else(PoisonError::into_inner) = [true; QUEUES];
        self.faulty.iter().for_each(|faulty| faulty.store(false, Ordering::Release));
    }

    /// Looks at a queue for the first time after another process did, or after it was stopped: what was
    /// taken and not answered is to be answered from here on. Whether the queue is served.
    fn take_up(self: &Arc<Self>, queue: u8, vring: &VringRwLock) -> bool {
        let mut inherited = self.inherited.lock().unwrap_or_else(PoisonError::into_inner);
        // Under this lock: a kick from before the end of the queue is not to be taken for its new beginning.
        if !chains::is_running(vring) {
            return false;
        }
        let faulty = |it: &AtomicBool| it.load(Ordering::Acquire);
        let Some(waits) = inherited.get_mut(usize::from(queue)).filter(|waits| **waits) else {
            return !self.faulty.get(usize::from(queue)).is_none_or(faulty);
        };
        let Ok(entry) = vring.queue_used_idx() else { return false };
        let mut answers = Vec::new();
        {
            let inner = self.lock();
            let open = |token, head| self.ledger.is_open(queue, head, token, entry);
            let requests = inner.kept.core.requests(queue);
            let (open, closed): (Vec<_>, Vec<_>) =
                requests.partition(|(token, request)| open(*token, request.head));
            closed.iter().for_each(|(_, request)| self.ledger.answered(queue, request.head));
            for (token, request) in open {
                self.chains.wait(token, vring, request);
                answers.extend(request.answer.clone().map(|bytes| (token, bytes)));
            }
        }
        tracing::debug!(queue, answered = answers.len(), "a queue is taken up");
        for (token, bytes) in answers {
            self.chains.complete(token, &bytes);
        }
        // The last answer may be there without the guest having been told.
        let _ = vring.signal_used_queue();
        *waits = false;
        self.taken_up.notify_all();
        true
    }
}

impl Inner {
    /// Has QEMU asked for something; `again`: another process may have done so.
    fn order(&self, action: &GuestAction, again: bool) {
        let job = match action {
            GuestAction::Map { job, object, at, offset, length } => {
                let file = match self.kept.held.get(object) {
                    Some(KeptFile::Memory(file)) => Some(file.clone()),
                    _ => None,
                };
                let (job, at, offset, length) = (*job, *at, *offset, *length);
                WindowJob::Map { job, file, at, offset, length, again }
            }
            GuestAction::Unmap { ranges, .. } => WindowJob::Unmap { ranges: ranges.clone() },
            _ => return,
        };
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
