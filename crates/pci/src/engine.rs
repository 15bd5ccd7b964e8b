//! The thread that runs one function, and the handle by which everybody else talks to it.
//!
//! The engine owns its [`Endpoint`]: register accesses, mappings and resets come in through a
//! mailbox and run between two polls of the device model. So a model needs no locks, an unmap
//! never races a transfer, and what one function does to its engine no other function feels.
//!
//! While there is work the engine polls, and looks at the mailbox by one relaxed load; when there
//! is none for a while ([`Pace`]), it sleeps until the mailbox, the model or a timer rings.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rackbus_memory::space::PeerBytes;
use rackbus_memory::{AdaptiveSpin, Event, Refusals, Revoker, guard};
use rustix::thread::CpuSet;
use tracing::Span;
use tracing::span::EnteredSpan;

use crate::endpoint::Endpoint;
use crate::function::{Function, Health, Work};
use crate::operations::Operations;
use crate::pace::{NextStep, Pace};

type Job = Box<dyn FnOnce(&mut Endpoint) + Send>;

/// Posted jobs that may wait before the poster has to.
const MAILBOX_LIMIT: usize = 256;
/// The engine ended: its device model failed, or the node is going down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the function's engine has stopped")]
pub struct EngineStopped;

/// Why an engine did not answer in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The engine's thread has ended.
    #[error(transparent)]
    Stopped(#[from] EngineStopped),
    /// It does something else for so long already; the job is done when it is back.
    #[error("the function's engine does not answer")]
    Late,
}

/// Counters of one engine, readable from anywhere.
#[derive(Debug, Default)]
pub struct EngineCounters {
    /// Polls that found work.
    pub busy_polls: AtomicU64,
    /// Polls that found nothing.
    pub idle_polls: AtomicU64,
    /// Times it went to sleep.
    pub parks: AtomicU64,
    /// Times it was woken by somebody: of the others a timer ended the sleep.
    pub wakeups: AtomicU64,
    /// Jobs from the mailbox.
    pub jobs: AtomicU64,
    /// Requests of its users that were refused, as wrong or not possible.
    pub requests_refused: AtomicU64,
    /// Times it went to another processor, because its own was somebody else's too.
    pub moves: AtomicU64,
}

struct Mailbox {
    jobs: Mutex<VecDeque<Job>>,
    room: Condvar,
    waiting: AtomicUsize,
    parked: AtomicBool,
    stopped: AtomicBool,
    event: Event,
    counters: EngineCounters,
    revoker: Revoker,
    refusals: Refusals,
    peer_bytes: PeerBytes,
    health: Health,
    operations: Operations,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Job>> {
        // A queue of jobs is whole even if somebody panicked while holding it.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How others reach an engine; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle(Arc<Mailbox>);

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EngineHandle").field(&self.0.counters).finish()
    }
}

impl EngineHandle {
    /// Runs `job` on the engine's thread and waits for its answer.
    ///
    /// # Errors
    /// [`EngineStopped`], also when it stops before the answer.
    pub fn call<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Endpoint) -> R + Send + 'static,
    ) -> Result<R, EngineStopped> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.post(move |endpoint| {
            // The caller may have gone; its answer then goes nowhere.
            let _ = reply.send(job(endpoint));
        })?;
        answer.recv().map_err(|_| EngineStopped)
    }

    /// Runs `job` on the engine's thread, in order, without waiting for it. Waits for room when
    /// the mailbox is full.
    ///
    /// # Errors
    /// [`EngineStopped`].
    pub fn post(
        &self,
        job: impl FnOnce(&mut Endpoint) + Send + 'static,
    ) -> Result<(), EngineStopped> {
        match self.put(Box::new(job), None) {
            Ok(()) => Ok(()),
            // Without a limit it waits until there is room.
            Err(NoAnswer::Stopped(_) | NoAnswer::Late) => Err(EngineStopped),
        }
    }

    /// As [`call`](EngineHandle::call), but waits no longer than `limit`.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub fn call_within<R: Send + 'static>(
        &self,
        limit: Duration,
        job: impl FnOnce(&mut Endpoint) -> R + Send + 'static,
    ) -> Result<R, NoAnswer> {
        let deadline = Instant::now() + limit;
        let (reply, answer) = mpsc::sync_channel(1);
        let job = move |endpoint: &mut Endpoint| {
            // The caller may have gone; its answer then goes nowhere.
            let _ = reply.send(job(endpoint));
        };
        self.put(Box::new(job), Some(deadline))?;
        let left = deadline.saturating_duration_since(Instant::now());
        answer.recv_timeout(left).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => NoAnswer::Late,
            mpsc::RecvTimeoutError::Disconnected => NoAnswer::Stopped(EngineStopped),
        })
    }

    /// Puts a job into the mailbox; where there is no room, waits for it until `deadline`.
    fn put(&self, job: Job, deadline: Option<Instant>) -> Result<(), NoAnswer> {
        let mailbox = &*self.0;
        let mut jobs = mailbox.lock();
        while jobs.len() >= MAILBOX_LIMIT && !mailbox.stopped.load(Ordering::Acquire) {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            jobs = match left {
                None => mailbox.room.wait(jobs).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(NoAnswer::Late),
                Some(left) => {
                    let waited = mailbox.room.wait_timeout(jobs, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        if mailbox.stopped.load(Ordering::Acquire) {
            return Err(EngineStopped.into());
        }
        jobs.push_back(job);
        mailbox.waiting.store(jobs.len(), Ordering::Release);
        drop(jobs);
        // Pairs with the fence in `sleep`: either the engine sees the job before it sleeps, or
        // this sees it parked and rings.
        fence(Ordering::SeqCst);
        if mailbox.parked.load(Ordering::Relaxed) {
            mailbox.event.ring();
        }
        Ok(())
    }

    /// What takes all memory away from the function and silences its interrupts, even while the
    /// engine hangs.
    pub fn revoker(&self) -> &Revoker {
        &self.0.revoker
    }

    /// How often the engine polled, slept and was woken.
    pub fn counters(&self) -> &EngineCounters {
        &self.0.counters
    }

    /// Counts a request of a user's that was refused.
    pub fn count_refused(&self) {
        self.0.counters.requests_refused.fetch_add(1, Ordering::Relaxed);
    }

    /// What the function moved from and to BARs of others.
    pub fn peer_bytes(&self) -> &PeerBytes {
        &self.0.peer_bytes
    }

    /// The accesses to memory that were refused to the function.
    pub fn refusals(&self) -> &Refusals {
        &self.0.refusals
    }

    /// Whether its device works as it should.
    pub fn health(&self) -> &Health {
        &self.0.health
    }

    /// What its function has done.
    pub fn operations(&self) -> &Operations {
        &self.0.operations
    }

    fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        self.0.room.notify_all();
        self.0.event.ring();
    }
}

/// How an engine polls.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    /// How long it spins for the next piece of work.
    pub spin: AdaptiveSpin,
    /// Pin its thread to this processor.
    pub cpu: Option<usize>,
}

/// A running engine; dropping it stops the thread and releases everything the function held.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread named `name` that runs `model`.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn start(
        name: &str,
        model: Box<dyn Function>,
        options: EngineOptions,
    ) -> std::io::Result<Engine> {
        let endpoint = Endpoint::new(model);
        let mailbox = Arc::new(Mailbox {
            jobs: Mutex::default(),
            room: Condvar::new(),
            waiting: AtomicUsize::new(0),
            parked: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            event: Event::new()?,
            counters: EngineCounters::default(),
            revoker: endpoint.dma().revoker().clone(),
            refusals: endpoint.dma().refusals().clone(),
            peer_bytes: endpoint.dma().peer_bytes().clone(),
            health: endpoint.health(),
            operations: endpoint.operations(),
        });
        let handle = EngineHandle(mailbox.clone());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _end = StopOnDrop(&mailbox);
            Runner::new(&mailbox, endpoint, options).run();
        })?;
        Ok(Engine { handle, thread: Some(thread) })
    }

    /// How to talk to it.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the model was reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

/// Ends the mailbox when the thread ends, in whatever way: callers get an error, not a wait.
struct StopOnDrop<'a>(&'a Mailbox);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let mut jobs = self.0.lock();
        self.0.stopped.store(true, Ordering::Release);
        jobs.clear();
        self.0.room.notify_all();
    }
}

struct Runner<'a> {
    mailbox: &'a Mailbox,
    endpoint: Endpoint,
    pace: Pace,
    replaced: u64,
    /// The processors that it may run on; `None` when it stays on one.
    allowed: Option<CpuSet>,
    /// What this thread logs about. It is entered once for each user, not for each poll.
    about: EnteredSpan,
}

impl<'a> Runner<'a> {
    fn new(mailbox: &'a Mailbox, endpoint: Endpoint, options: EngineOptions) -> Self {
        let replaced = guard::replaced_count();
        let pace = Pace::new(options.spin, endpoint.clock());
        let allowed = match options.cpu {
            Some(cpu) => {
                pin(cpu);
                None
            }
            None => rustix::thread::sched_getaffinity(None).ok(),
        };
        let about = Span::none().entered();
        Runner { mailbox, endpoint, pace, replaced, allowed, about }
    }

    fn run(&mut self) {
        while !self.mailbox.stopped.load(Ordering::Relaxed) {
            if self.mailbox.waiting.load(Ordering::Relaxed) > 0 {
                self.run_jobs();
            }
            self.look_at_memory();
            let work = self.endpoint.poll(self.pace.now_ns());
            let counters = &self.mailbox.counters;
            match work {
                Work::Done => count(&counters.busy_polls),
                Work::Idle | Work::Watch(_) => {
                    count(&counters.idle_polls);
                    std::hint::spin_loop();
                }
                Work::Asleep(_) => count(&counters.idle_polls),
            }
            match self.pace.after(work, || self.endpoint.clock()) {
                NextStep::Poll => {}
                NextStep::Yield => {
                    std::thread::yield_now();
                    self.pace.returned(self.endpoint.clock());
                }
                NextStep::Move => self.go_elsewhere(),
                NextStep::LookForIdle => {
                    if idle_ns().is_some_and(|idle| self.pace.saw_idle(idle)) {
                        self.go_elsewhere();
                    }
                }
                NextStep::Check => self.endpoint.check_user(),
                NextStep::Sleep(deadline) => self.sleep(deadline),
            }
        }
    }

    /// Leaves this processor for any other that the thread may run on.
    fn go_elsewhere(&mut self) {
        let Some(allowed) = &self.allowed else { return };
        let mut others = *allowed;
        others.unset(rustix::thread::sched_getcpu());
        if others.count() > 0 && rustix::thread::sched_setaffinity(None, &others).is_ok() {
            self.mailbox.counters.moves.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The engine did something else than polling, or slept.
    fn disturbed(&mut self) {
        if self.pace.disturbed(self.endpoint.clock()) {
            self.endpoint.check_user();
        }
    }

    /// Somebody may have truncated memory that is mapped.
    fn look_at_memory(&mut self) {
        if self.replaced != guard::replaced_count() {
            self.replaced = guard::replaced_count();
            self.endpoint.check_memory();
        }
    }

    fn run_jobs(&mut self) {
        self.disturbed();
        // One at a time: a job may take as long as a disk, and posters wait for room meanwhile.
        loop {
            let mut jobs = self.mailbox.lock();
            let job = jobs.pop_front();
            self.mailbox.waiting.store(jobs.len(), Ordering::Relaxed);
            drop(jobs);
            self.mailbox.room.notify_one();
            let Some(job) = job else { break };
            // Whoever maps again what was truncated is not told that it is mapped.
            self.look_at_memory();
            job(&mut self.endpoint);
            self.log_about_user();
            self.mailbox.counters.jobs.fetch_add(1, Ordering::Relaxed);
        }
        self.disturbed();
    }

    /// A job may have let a user in, or scrubbed what was its.
    fn log_about_user(&mut self) {
        if self.about.id() != self.endpoint.about().id() {
            // What was entered is left first.
            self.about = Span::none().entered();
            self.about = self.endpoint.about().clone().entered();
        }
    }

    /// Sleeps until something rings, or until `deadline` on the endpoint's clock.
    fn sleep(&mut self, deadline: Option<u64>) {
        self.mailbox.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let stay = self.mailbox.waiting.load(Ordering::Relaxed) > 0
            || self.mailbox.stopped.load(Ordering::Relaxed)
            || !self.endpoint.park();
        if !stay {
            self.mailbox.counters.parks.fetch_add(1, Ordering::Relaxed);
            let timeout = deadline.map(|at| at.saturating_sub(self.endpoint.clock()));
            let own = self.mailbox.event.as_fd();
            let woken = match self.endpoint.wake_fd() {
                Some(fd) => Event::wait_any(&[own, fd], timeout),
                None => Event::wait_any(&[own], timeout),
            };
            if woken {
                self.mailbox.counters.wakeups.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.mailbox.parked.store(false, Ordering::Relaxed);
        self.mailbox.event.drain();
        self.disturbed();
    }
}

/// Counts a poll. Only the engine's thread writes the counter: a load and a store need no locked instruction.
#[inline]
fn count(polls: &AtomicU64) {
    polls.store(polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// How long all processors together have been idle since the system started, in steps of 10 ms; `None` where the system
/// does not say so.
fn idle_ns() -> Option<u64> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = uptime.split_whitespace().nth(1)?.parse().ok()?;
    Some((seconds * 1e9) as u64)
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    if let Err(cause) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(cpu, %cause, "the engine's thread could not be pinned");
    }
}
