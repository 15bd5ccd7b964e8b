//! What the rest of the link has of an NTB, whose thread opens it, serves it, and ends the link when it itself ends.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rackbus_memory::{Event, Stream};

use super::bridge::{AGAIN, BridgeStatus, MovingBridge, OpenNtb};
use super::layout::SLOTS;
use super::peer::{EndNames, PeerMismatch};

/// How long nothing is logged of other words than those that were refused before.
const LOGGED_AGAIN: Duration = Duration::from_secs(60);

/// Conversations that peers began, and nobody has taken yet: of each peer at most as many as it can have.
#[derive(Debug)]
pub(super) struct Incoming {
    queue: Mutex<VecDeque<(String, UnixStream)>>,
    event: Event,
}

impl Incoming {
    pub(super) fn new() -> std::io::Result<Incoming> {
        Ok(Incoming { queue: Mutex::default(), event: Event::new()? })
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<(String, UnixStream)>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts one in that comes from `host`, and gives the bridge's end of it.
    pub(super) fn put(&self, host: &str) -> std::io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut queue = self.queue();
        // Those that have ended are not heard.
        queue.retain(|(_, socket)| !socket.is_closed());
        if queue.iter().filter(|(from, _)| from == host).count() >= SLOTS / 2 {
            return Err(std::io::Error::other("too many have not been heard yet"));
        }
        queue.push_back((host.to_owned(), theirs));
        self.event.ring();
        Ok(ours)
    }

    /// Takes the oldest one, with the host that it comes from.
    pub(super) fn take(&self) -> Option<(String, UnixStream)> {
        let mut queue = self.queue();
        // With the lock: one that is put in meanwhile would be taken, and its ring would stay.
        self.event.drain();
        let first = queue.pop_front();
        if !queue.is_empty() {
            self.event.ring();
        }
        first
    }

    /// Readable while there is one, and not else.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Why an NTB is not used now, and what was logged of that.
#[derive(Debug, Default)]
struct NotedMismatch {
    now: Option<PeerMismatch>,
    /// What was logged last, and when. Whoever has the cable may store other words at any time.
    logged: Option<(PeerMismatch, Instant)>,
}

impl NotedMismatch {
    /// Notes what is wrong at `now`; what is to be logged then, at most once in [`LOGGED_AGAIN`].
    fn note(&mut self, what: Option<PeerMismatch>, now: Instant) -> Option<PeerMismatch> {
        let is_quiet = |(before, at): (PeerMismatch, Instant)| {
            Some(before) == what || now.duration_since(at) < LOGGED_AGAIN
        };
        self.now = what;
        let new = what.filter(|_| !self.logged.is_some_and(is_quiet))?;
        self.logged = Some((new, now));
        Some(new)
    }
}

/// An NTB's state and the wishes about it, which its thread and the rest of the link share.
#[derive(Debug)]
pub(super) struct LinkEnd {
    pub(super) host: String,
    pub(super) names: EndNames,
    /// Whether conversations begin in the even slots here.
    pub(super) even: bool,
    /// Conversations that are to begin: the bridge's ends of their sockets.
    wanted: Mutex<VecDeque<UnixStream>>,
    pub(super) wake: Event,
    pub(super) stopped: AtomicBool,
    /// The NTB is to be closed until it is opened again, and whether it is.
    closing: AtomicBool,
    closed: Mutex<bool>,
    changed: Condvar,
    pub(super) up: AtomicBool,
    failed: AtomicBool,
    mismatch: Mutex<NotedMismatch>,
    pub(super) sleeps: AtomicU64,
    pub(super) doorbells: [AtomicU64; 2],
    /// Of the lives of the NTB that are over, and of this one.
    pub(super) counted: Mutex<BridgeStatus>,
}

impl LinkEnd {
    /// Of `host` in `rack`, whose NTB leads to `peer`.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(super) fn new(rack: &str, host: &str, peer: &str) -> std::io::Result<LinkEnd> {
        Ok(LinkEnd {
            host: peer.to_owned(),
            names: EndNames::new(rack, host, peer),
            // Both know who of them is first.
            even: host < peer,
            wanted: Mutex::default(),
            wake: Event::new()?,
            stopped: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            closed: Mutex::new(false),
            changed: Condvar::new(),
            up: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            mismatch: Mutex::default(),
            sleeps: AtomicU64::new(0),
            doorbells: Default::default(),
            counted: Mutex::default(),
        })
    }

    /// Begins a conversation with the peer.
    ///
    /// # Errors
    /// While the peer is not there, as many are to begin as can be, or the process has no descriptors left.
    pub(super) fn begin(&self) -> std::io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut wanted = self.wanted();
        // Looked at with the lock: whoever finds later that the peer is lost ends what is wanted by then.
        if !self.up.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::NotConnected, self.absence()));
        }
        if wanted.len() >= SLOTS {
            return Err(Error::new(ErrorKind::WouldBlock, "too many conversations begin just now"));
        }
        wanted.push_back(theirs);
        drop(wanted);
        self.wake.ring();
        Ok(ours)
    }

    /// Why the peer is not there, as far as that is known.
    fn absence(&self) -> String {
        let nobody = "its node is not there, at the other end of the NTB";
        match self.mismatch() {
            _ if self.failed.load(Ordering::Relaxed) => {
                "this node has ended its link through the NTB: its log says why; start the node anew".to_owned()
            }
            Some(what) => format!("{nobody}: {what}"),
            None => nobody.to_owned(),
        }
    }

    fn wanted(&self) -> MutexGuard<'_, VecDeque<UnixStream>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mismatch(&self) -> Option<PeerMismatch> {
        self.noted_mismatch().now
    }

    fn noted_mismatch(&self) -> MutexGuard<'_, NotedMismatch> {
        self.mismatch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what is wrong with whoever is at the other end, and logs what is new in it, as often as that may be.
    pub(super) fn note_mismatch(&self, what: Option<PeerMismatch>) {
        if let Some(what) = self.noted_mismatch().note(what, Instant::now()) {
            tracing::error!(host = self.host, "the NTB is not used for the link: {what}");
        }
    }

    /// Takes all that are to begin.
    pub(super) fn take_wanted(&self) -> VecDeque<UnixStream> {
        std::mem::take(&mut *self.wanted())
    }

    /// Has the thread end.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.wake.ring();
        self.reopen();
    }

    /// Whether the thread is to serve the NTB.
    pub(super) fn is_to_run(&self) -> bool {
        !self.stopped.load(Ordering::Relaxed) && !self.closing.load(Ordering::Relaxed)
    }

    /// Has the thread tell the peer that this end goes, and close the NTB, until it is to [reopen](LinkEnd::reopen) it.
    pub(super) fn begin_closing(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.wake.ring();
    }

    /// Waits until it is closed, but not beyond `until`. One that does not answer ends with the process.
    pub(super) fn wait_closed(&self, until: Instant) {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_open = |closed: &mut bool| !*closed;
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(closed, left, is_open);
        if waited.is_ok_and(|(_, limit)| limit.timed_out()) {
            tracing::error!(host = self.host, "the NTB is not closed in time");
        }
    }

    /// Has the thread open the NTB again.
    pub(super) fn reopen(&self) {
        let _closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        self.closing.store(false, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// The NTB is closed: the thread waits until it is to be opened again.
    fn rest(&self) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        *closed = true;
        self.changed.notify_all();
        let closing = |_: &mut bool| self.closing.load(Ordering::Relaxed);
        let waited = self.changed.wait_while(closed, closing);
        *waited.unwrap_or_else(PoisonError::into_inner) = false;
    }

    pub(super) fn status(&self) -> BridgeStatus {
        let counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        BridgeStatus {
            host: self.host.clone(),
            up: self.up.load(Ordering::Relaxed),
            mismatch: self.mismatch(),
            failed: self.failed.load(Ordering::Relaxed),
            doorbells: self.doorbells.each_ref().map(|count| count.load(Ordering::Relaxed)),
            sleeps: self.sleeps.load(Ordering::Relaxed),
            ..counted
        }
    }

    /// Nobody has conversations through it any more. Who wanted one was told that the peer is there.
    fn lose(&self) {
        self.up.store(false, Ordering::Relaxed);
        self.note_mismatch(None);
        self.wanted().clear();
    }

    /// Opens the NTB and serves it, again whenever it failed, until it is to [stop](LinkEnd::stop).
    pub(super) fn serve(&self, open: &OpenNtb, incoming: &Incoming) {
        let _ended = EndedLink(self);
        let mut told = None;
        while !self.stopped.load(Ordering::Relaxed) {
            if self.closing.load(Ordering::Relaxed) {
                self.rest();
                continue;
            }
            match open() {
                Ok(bridge) => {
                    told = None;
                    let mut moving = MovingBridge::new(self, bridge, incoming);
                    moving.run();
                    if self.is_to_run() {
                        tracing::warn!(host = self.host, "the NTB was reset: it is opened anew");
                    } else {
                        moving.leave();
                    }
                    self.lose();
                }
                Err(error) => {
                    let said = Some(error.to_string());
                    if said != told {
                        tracing::warn!(host = self.host, %error, "the NTB cannot be used for the link; it is tried again");
                        told = said;
                    }
                }
            }
            if self.is_to_run() {
                self.wake.wait(Some(u64::try_from(AGAIN.as_nanos()).unwrap_or(u64::MAX)));
            }
        }
    }
}

/// Ends the link with the thread that serves it, however that ends.
struct EndedLink<'e>(&'e LinkEnd);

impl Drop for EndedLink<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                host = self.0.host,
                "the link through the NTB has ended, as a part of it failed: start the node anew"
            );
            self.0.failed.store(true, Ordering::Relaxed);
        }
        self.0.lose();
        // Nobody closes it any more: it is.
        *self.0.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

/// Serves an NTB on a thread of its own until the end is told to stop.
///
/// # Errors
/// When there is no thread for it.
pub(super) fn serve_on_thread(
    end: Arc<LinkEnd>,
    open: OpenNtb,
    incoming: Arc<Incoming>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let serve = move || end.serve(&open, &incoming);
    std::thread::Builder::new().name("link ntb".into()).spawn(serve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_stores_changing_headers_does_not_fill_the_log() {
        let (mut noted, begun) = (NotedMismatch::default(), Instant::now());
        let mut logged = 0;
        for nth in 0..1000u32 {
            let what = (nth % 3 > 0).then_some(PeerMismatch::Version(nth));
            logged += noted.note(what, begun + LOGGED_AGAIN * nth / 500).iter().count();
            assert_eq!(noted.now, what);
        }
        assert_eq!(logged, 2);
    }
}
