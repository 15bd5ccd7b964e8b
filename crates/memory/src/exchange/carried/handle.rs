//! A session's handle: for those who make and take its connections, and for who waits for its end.
//!
//! Its end of the exchange belongs to an engine; this is all that other threads have of it. What is decided
//! about connections is decided under one lock by [`Contact`]. It is held for no system call that waits, but one: with the
//! end of the session the memory that a lane exposes is taken away under it, which takes as long as the lane's library and
//! adapter do. So nobody reaches that memory when [`end`](CarriedSession::end) returns,
//! whichever thread ended the session first.

use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::note::{LaneNote, LaneStatus};
use super::saved::CarriedSessionState;
use crate::event::Event;
use crate::exchange::Carrier;
use crate::exchange::lane::LaneTarget;
use crate::exchange::session::{
    Contact, SessionEndReason, SessionMillis, SessionSide, SessionTiming,
};
use crate::handles::{HandleRef, Handles};
use crate::stream::{Stream, StreamError};

/// Between two looks of a session that was saved whether it has ended.
const REST: Duration = Duration::from_millis(100);

/// How long to wait for what is `due`. What is overdue is its engine's to do, which may hang for as long as a disk does.
fn rest_until(due: SessionMillis, now: SessionMillis) -> Duration {
    match due.checked_sub(now) {
        Some(left) if left > 0 => Duration::from_millis(left),
        _ => REST,
    }
}

/// Nanoseconds of the clock that all processes of a host have in common, and of which [`Instant`]s are moments.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// What happened to a session, for who is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionChange {
    /// Its connection is lost, for this reason.
    Lost(String),
    /// Another connection carries it.
    Resumed {
        /// For how many milliseconds none did.
        after: SessionMillis,
        /// How many messages this side sent again.
        repeated: u64,
    },
    /// Data move beside its connection from now on, or do not any more.
    Lane,
}

/// How a session's connections are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionStatus {
    /// For how many milliseconds none has carried it; `None` while one does.
    pub lost_for: Option<SessionMillis>,
    /// How often it went on on another one.
    pub reconnects: u64,
    /// How many messages this side sent again then.
    pub repeated: u64,
    /// For how many milliseconds none carried it the last time.
    pub last_lost: SessionMillis,
}

/// Told of changes, by whatever thread notices them: it must not wait.
pub type OnSessionChange = Box<dyn Fn(SessionChange) + Send + Sync>;

/// A session of a carried exchange. As a [`Stream`] it is closed when the session has ended, not when a connection
/// is lost; nothing is sent or received by it.
#[derive(Clone)]
pub struct CarriedSession(Arc<Shared>);

struct Shared {
    /// Who is at the other end, for people.
    peer: String,
    begun: Instant,
    state: Mutex<State>,
    changed: Condvar,
    /// Rung for the end: there is a connection to take, or it has ended.
    news: Event,
    has_news: AtomicBool,
    /// Readable when it has ended.
    over: Event,
    is_over: AtomicBool,
    on_change: OnSessionChange,
    /// What is known of the lane beside its connections, where there is one.
    lane: Arc<LaneNote>,
}

struct State {
    contact: Contact,
    /// A connection that the end has not taken yet.
    arrived: Option<(u64, Box<dyn Carrier>)>,
    /// The memory that its end exposes, which is taken away when it has ended.
    exposed: Option<Arc<dyn LaneTarget>>,
    /// It was saved: no connection is asked for.
    saved: bool,
}

impl std::fmt::Debug for CarriedSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CarriedSession").field("peer", &self.0.peer).finish_non_exhaustive()
    }
}

impl CarriedSession {
    /// A session with `peer` that begins now, on a first connection.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(
        peer: &str,
        side: SessionSide,
        timing: SessionTiming,
        on_change: OnSessionChange,
    ) -> std::io::Result<CarriedSession> {
        CarriedSession::with(peer, Contact::new(side, timing), Instant::now(), on_change)
    }

    fn with(
        peer: &str,
        contact: Contact,
        begun: Instant,
        on_change: OnSessionChange,
    ) -> std::io::Result<CarriedSession> {
        let contact = contact.with_salt(RandomState::new().hash_one(peer));
        Ok(CarriedSession(Arc::new(Shared {
            peer: peer.to_owned(),
            begun,
            state: Mutex::new(State { contact, arrived: None, exposed: None, saved: false }),
            changed: Condvar::new(),
            news: Event::new()?,
            has_news: AtomicBool::new(false),
            over: Event::new()?,
            is_over: AtomicBool::new(false),
            on_change,
            lane: Arc::default(),
        })))
    }

    /// The session as a value, for another process of this host. No other connection is [asked
    /// for](CarriedSession::wait_wanted) here until it is [taken back](CarriedSession::take_back).
    pub fn save(&self) -> CarriedSessionState {
        let now = self.now();
        let mut state = self.lock();
        state.saved = true;
        let elapsed = u64::try_from(self.0.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let begun_ns = monotonic_ns().saturating_sub(elapsed);
        CarriedSessionState { begun_ns, contact: state.contact.save(now) }
    }

    /// Goes on here after all.
    pub fn take_back(&self) {
        self.lock().saved = false;
        self.0.changed.notify_all();
    }

    /// Goes on with a session with `peer` that another process [saved](CarriedSession::save), by other connections.
    ///
    /// # Errors
    /// As [`new`](CarriedSession::new).
    pub fn resume(
        peer: &str,
        state: &CarriedSessionState,
        on_change: OnSessionChange,
    ) -> std::io::Result<CarriedSession> {
        let age = Duration::from_nanos(monotonic_ns().saturating_sub(state.begun_ns));
        let begun = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
        let now = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let contact = Contact::resume(&state.contact, now);
        let session = CarriedSession::with(peer, contact, begun, on_change)?;
        // It may be over.
        session.decide(&mut session.lock(), |contact| contact.expire(now));
        Ok(session)
    }

    /// One that lasts as long as its first connection.
    ///
    /// # Errors
    /// As [`new`](CarriedSession::new).
    pub fn of_one_connection(side: SessionSide) -> std::io::Result<CarriedSession> {
        CarriedSession::new("the other node", side, SessionTiming::asking(0), Box::new(drop))
    }

    /// Waits until another connection is wanted, and returns its number, by which it is
    /// [given](CarriedSession::connected). `None` when the session has ended. For one thread of the side that asks.
    pub fn wait_wanted(&self) -> Option<u64> {
        let mut state = self.lock();
        loop {
            let now = self.now();
            self.decide(&mut state, |contact| contact.expire(now));
            if self.is_over() {
                return None;
            }
            let attempt = if state.saved { None } else { state.contact.attempt(now) };
            if attempt.is_some() {
                return attempt;
            }
            let due = state.contact.due().unwrap_or(now);
            let limit = rest_until(due, now).max(if state.saved { REST } else { Duration::ZERO });
            let waited = self.0.changed.wait_timeout(state, limit);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives it the connection with this number; false when it is not wanted any more.
    pub fn connected(&self, number: u64, carrier: Box<dyn Carrier>) -> bool {
        let now = self.now();
        let mut state = self.lock();
        let wanted = state.contact.connected(number, now);
        if wanted {
            state.arrived = Some((number, carrier));
            self.tell_end();
        }
        wanted
    }

    /// The connection with this number could not be made.
    pub fn failed(&self, number: u64) {
        let now = self.now();
        self.lock().contact.failed(number, now);
    }

    /// The other side does not continue with it.
    pub fn refused(&self, reason: &str) {
        self.end(SessionEndReason::Refused(reason.to_owned()));
    }

    /// Why it has ended; `None` while it continues.
    pub fn end_reason(&self) -> Option<SessionEndReason> {
        self.lock().contact.end().cloned()
    }

    /// How its connections are.
    pub fn status(&self) -> SessionStatus {
        let now = self.now();
        let state = self.lock();
        let (reconnects, repeated, last_lost) = state.contact.counts();
        SessionStatus { lost_for: state.contact.lost_for(now), reconnects, repeated, last_lost }
    }

    /// How it is with the lane beside its connections; `None` where there never was one.
    pub fn lane(&self) -> Option<LaneStatus> {
        self.0.lane.status()
    }

    /// Where what is known of the lane is noted.
    pub(super) fn lane_note(&self) -> &Arc<LaneNote> {
        &self.0.lane
    }

    /// Takes the exposed memory away when the session ends, whoever ends it: an engine may hang. At once, if it has.
    pub(super) fn expose(&self, target: Arc<dyn LaneTarget>) {
        let mut state = self.lock();
        match state.contact.end() {
            Some(_) => drop(target.close()),
            None => state.exposed = Some(target),
        }
    }

    /// The lane is used from now on, or not any more; tells whoever wants to know.
    pub(super) fn lane_changed(&self, lost: Option<&str>) {
        let peer = &self.0.peer;
        match lost {
            Some(_) if self.is_over() => return,
            Some(why) => {
                tracing::warn!(peer, why, "the RDMA lane is lost; data are sent over the link")
            }
            None => tracing::info!(peer, "data move by the RDMA lane"),
        }
        (self.0.on_change)(SessionChange::Lane);
    }

    /// How long its connections may take.
    pub fn timing(&self) -> SessionTiming {
        *self.lock().contact.timing()
    }

    pub(super) fn now(&self) -> SessionMillis {
        u64::try_from(self.0.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Readable when there is [news](CarriedSession::take_news).
    pub(super) fn news(&self) -> BorrowedFd<'_> {
        self.0.news.as_fd()
    }

    /// Whether there is a connection to take or it has ended; no further than this until there is more.
    pub(super) fn take_news(&self) -> bool {
        if !self.0.has_news.load(Ordering::Relaxed) {
            return false;
        }
        self.0.news.drain();
        self.0.has_news.swap(false, Ordering::Acquire)
    }

    /// Before who waits for [news](CarriedSession::news) looks for some: a ring whose news was taken before it came would
    /// wake for ever.
    pub(super) fn expect_news(&self) {
        self.0.news.drain();
    }

    /// The connection that is to be gone on with, and its number.
    pub(super) fn take_arrived(&self) -> Option<(u64, Box<dyn Carrier>)> {
        self.lock().arrived.take()
    }

    /// Lets time pass, as [`Contact::tick`] by this side's clock. False when the session has ended.
    pub(super) fn tick(&self, heard: Option<u64>) -> bool {
        let now = self.now();
        let mut state = self.lock();
        let mut kept = true;
        self.decide(&mut state, |contact| {
            if let Some(number) = heard {
                contact.heard(number, now);
            }
            kept = contact.tick(now);
        });
        if !kept {
            state.arrived = None;
        }
        drop(state);
        if !kept {
            self.lost("nothing comes from its node");
        }
        kept
    }

    /// Number of the next heartbeat, as [`Contact::beat`] by this side's clock.
    pub(super) fn beat(&self) -> u32 {
        let now = self.now();
        self.lock().contact.beat(now)
    }

    /// The other side has answered a heartbeat, as in [`Contact::echoed`].
    pub(super) fn echoed(&self, beat: u32) {
        self.lock().contact.echoed(beat);
    }

    /// A connection is lost, as in [`Contact::broke`]; tells whoever wants to know.
    pub(super) fn broke(&self, number: u64, why: &str) {
        let now = self.now();
        let mut state = self.lock();
        let before = state.contact.lost_for(now).is_some();
        self.decide(&mut state, |contact| {
            contact.broke(number, now);
            contact.expire(now);
        });
        state.arrived.take_if(|arrived| arrived.0 == number);
        let lost = !before && state.contact.lost_for(now).is_some();
        drop(state);
        self.0.changed.notify_all();
        if lost {
            self.lost(why);
        }
    }

    fn lost(&self, why: &str) {
        self.0.changed.notify_all();
        if !self.is_over() {
            tracing::warn!(peer = self.0.peer, why, "the link is lost; what is under way is held");
            (self.0.on_change)(SessionChange::Lost(why.to_owned()));
        }
    }

    /// Another connection goes on with the session, as in [`Contact::resumed`]; tells whoever wants
    /// to know.
    pub(super) fn resumed(&self, number: u64, repeated: u64) {
        let now = self.now();
        let Some(after) = self.lock().contact.resumed(number, now, repeated) else { return };
        tracing::info!(peer = self.0.peer, after_ms = after, repeated, "the link is back");
        (self.0.on_change)(SessionChange::Resumed { after, repeated });
    }

    /// The session has ended.
    pub(super) fn end(&self, end: SessionEndReason) {
        let mut state = self.lock();
        self.decide(&mut state, |contact| contact.finish(end));
    }

    /// Has `contact` decide, and tells everybody if the session is over by that.
    fn decide(&self, state: &mut State, what: impl FnOnce(&mut Contact)) {
        what(&mut state.contact);
        let Some(end) = state.contact.end() else { return };
        if self.0.is_over.swap(true, Ordering::AcqRel) {
            return;
        }
        match end {
            SessionEndReason::Here | SessionEndReason::There => {}
            end => tracing::warn!(peer = self.0.peer, why = %end, "the link is given up"),
        }
        state.arrived = None;
        if let Some(exposed) = state.exposed.take() {
            // The session is over, whether or not; nobody uses the memory after it.
            let _ = exposed.close();
        }
        self.0.over.ring();
        self.0.changed.notify_all();
        self.tell_end();
    }

    fn tell_end(&self) {
        self.0.has_news.store(true, Ordering::Release);
        self.0.news.ring();
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it has ended, or one of `others` is readable.
    fn wait_over(&self, other: Option<BorrowedFd<'_>>) {
        loop {
            let now = self.now();
            let mut state = self.lock();
            self.decide(&mut state, |contact| contact.expire(now));
            let due = state.contact.due();
            drop(state);
            if self.is_over() {
                return;
            }
            let limit = due.map_or(Duration::ZERO, |due| rest_until(due, now));
            let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).max(1_000_000);
            let over = self.0.over.as_fd();
            let woken = match other {
                Some(other) => Event::wait_any(&[over, other], Some(limit)),
                None => Event::wait_any(&[over], Some(limit)),
            };
            if woken {
                return;
            }
        }
    }
}

impl Stream for CarriedSession {
    fn send(&self, _parts: &[&[u8]], _handles: &[HandleRef<'_>]) -> Result<(), StreamError> {
        Err(StreamError::Closed)
    }

    fn receive(&self, _buffer: &mut [u8], _handles: &mut Handles) -> Result<(), StreamError> {
        Err(StreamError::Closed)
    }

    fn wait_closed(&self) {
        self.wait_over(None);
    }

    fn wait_closed_or(&self, other: BorrowedFd<'_>) {
        self.wait_over(Some(other));
    }

    fn is_closed(&self) -> bool {
        self.is_over()
    }

    fn shut_down(&self) {
        self.end(SessionEndReason::Here);
    }
}
