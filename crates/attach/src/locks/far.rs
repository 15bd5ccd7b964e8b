//! Locks and barriers in memory of another machine. Its host takes and frees them for this process; what is mapped here
//! shows, a little later, when asking again is worth while. So who waits costs the network next to nothing.
//!
//! What was stored before a lock is let go, or a barrier is arrived at, is there before; and what others stored before
//! is here when a lock is taken or a barrier passed: the nodes see to both.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rackbus_memory::lock::{LockError, Locked, SharedBarrier, SharedMutex};
use rackbus_segment::message::{
    BarrierPhase, LockHolder, LockOperation, LockReply, LockRequest, MOST_FAR_LOCKS,
    MOST_FAR_PARTIES, Refusal, Reply, SessionRequest,
};

use crate::memory::FarPlace;
use crate::session::{AttachError, Session, lock};

/// Between two looks at what is mapped here, and at most, when it takes long.
const LOOK: Duration = Duration::from_micros(50);
const MOST_LOOK: Duration = Duration::from_millis(1);
/// What is mapped here may be late: the host is asked again after so long whatever it shows.
const ASK: Duration = Duration::from_millis(10);

/// Numbers of attempts: each connection's count up.
static ATTEMPTS: AtomicU64 = AtomicU64::new(1);

/// Who asks, and for what.
#[derive(Debug)]
struct Asking {
    session: Session,
    place: Arc<FarPlace>,
    offset: u64,
}

impl Asking {
    fn new(session: &Session, place: &Arc<FarPlace>, offset: usize) -> Asking {
        let offset = place.offset + offset as u64;
        Asking { session: session.clone(), place: place.clone(), offset }
    }

    /// Asks the host; [`LockError::TimedOut`] when it does not answer now, and [`LockError::TooMany`] when it notes nothing
    /// more for this machine, or this process asks too much at once.
    fn ask(&self, operation: LockOperation) -> Result<LockReply, LockError> {
        if self.place.watch.lost() {
            return Err(LockError::Closed);
        }
        let request = LockRequest { offset: self.offset, operation };
        let request = SessionRequest::Lock { keeper: self.place.keeper, request };
        match self.session.call(&request) {
            Ok((Reply::Lock(reply), _)) => Ok(reply),
            Err(AttachError::Refused(refusal)) if !self.place.watch.lost() => {
                Err(failure(&refusal))
            }
            Ok(_) | Err(_) => Err(LockError::Closed),
        }
    }
}

/// What a refusal says to who waits: only what may be otherwise by itself is worth waiting for.
fn failure(refusal: &Refusal) -> LockError {
    match refusal {
        Refusal::TooMany(MOST_FAR_LOCKS) => LockError::TooMany,
        // So many questions at a time: there are fewer soon.
        Refusal::NotResponding | Refusal::Busy | Refusal::TooMany(_) => LockError::TimedOut,
        _ => LockError::Closed,
    }
}

/// Looks until `shows` or the time has come to ask, at most until `deadline`.
fn look_until(deadline: Instant, shows: impl Fn() -> bool) {
    let (mut pause, until) = (LOOK, deadline.min(Instant::now() + ASK));
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        // Not before the first pause: what shows may be from before the last answer.
        std::thread::sleep(pause.min(left));
        if shows() {
            return;
        }
        pause = (pause * 2).min(MOST_LOOK);
    }
}

/// A lock in memory of another machine, whose host takes and frees it for this process.
#[derive(Debug)]
pub struct FarMutex {
    asking: Asking,
    /// What is mapped here of it: never stored to.
    shown: SharedMutex,
    /// Who held it when it was asked for last.
    holder: std::sync::Mutex<Option<LockHolder>>,
}

/// Unlocks when it is dropped.
#[derive(Debug)]
pub struct FarGuard<'a> {
    mutex: &'a FarMutex,
    attempt: u64,
}

impl FarMutex {
    pub fn new(
        session: &Session,
        place: &Arc<FarPlace>,
        offset: usize,
        shown: SharedMutex,
    ) -> FarMutex {
        let asking = Asking::new(session, place, offset);
        FarMutex { asking, shown, holder: std::sync::Mutex::default() }
    }

    /// Takes it, waiting for at most `limit`.
    pub fn lock(&self, limit: Duration) -> Result<Locked<FarGuard<'_>>, LockError> {
        let deadline = Instant::now() + limit;
        loop {
            let attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed);
            match self.asking.ask(LockOperation::Take { attempt }) {
                Ok(LockReply::Taken { died }) => {
                    let guard = FarGuard { mutex: self, attempt };
                    return Ok(if died { Locked::OwnerDied(guard) } else { Locked::Clean(guard) });
                }
                Ok(LockReply::Held { holder }) => *lock(&self.holder) = holder,
                Ok(LockReply::Done | LockReply::Barrier { .. }) => return Err(LockError::Closed),
                Err(LockError::TimedOut) => {}
                Err(error) => return Err(error),
            }
            if Instant::now() >= deadline {
                return Err(LockError::TimedOut);
            }
            look_until(deadline, || self.shown.owner().is_none());
        }
    }

    /// Who held it when it was asked for last.
    pub fn holder(&self) -> Option<LockHolder> {
        *lock(&self.holder)
    }

    /// Says that a holder is dead.
    pub fn declare_dead(&self, holder: LockHolder) {
        // Whoever waits asks again, and says it again.
        let _ = self.asking.ask(LockOperation::DeclareDead { holder });
    }
}

impl Drop for FarGuard<'_> {
    fn drop(&mut self) {
        let release = || LockOperation::Release { attempt: self.attempt };
        // As long as nobody answers, or others of this process ask too much: who is cut off does not hold it any more.
        while let Err(LockError::TimedOut | LockError::TooMany) = self.mutex.asking.ask(release()) {
            std::thread::sleep(MOST_LOOK);
        }
    }
}

/// A barrier in memory of another machine, whose host notes who has arrived.
#[derive(Debug)]
pub struct FarBarrier {
    asking: Asking,
    parties: Vec<LockHolder>,
    /// What is mapped here of it: never stored to.
    shown: SharedBarrier,
    /// Phases that were passed, when that is known.
    passed: Option<u32>,
}

impl FarBarrier {
    pub fn new(
        session: &Session,
        place: &Arc<FarPlace>,
        offset: usize,
        parties: &[LockHolder],
        shown: SharedBarrier,
    ) -> Result<FarBarrier, AttachError> {
        if parties.len() > MOST_FAR_PARTIES {
            return Err(Refusal::TooMany(MOST_FAR_PARTIES as u32).into());
        }
        let (asking, parties) = (Asking::new(session, place, offset), parties.to_vec());
        let mut barrier = FarBarrier { asking, parties, shown, passed: None };
        // Its host knows of the party from now on: nobody waits for one whose machine is cut off before it arrives.
        // Where there is no answer now, `wait` asks again.
        match barrier.arrive() {
            Ok(LockReply::Barrier { passed, .. }) => barrier.passed = Some(passed),
            Err(LockError::TooMany) => return Err(Refusal::TooMany(MOST_FAR_LOCKS).into()),
            Ok(_) | Err(_) => {}
        }
        Ok(barrier)
    }

    /// Arrives; or asks how many phases were passed, where that is not known.
    fn arrive(&self) -> Result<LockReply, LockError> {
        let (parties, passed) = (self.parties.clone(), self.passed);
        self.asking.ask(LockOperation::Arrive { parties, passed })
    }

    /// Arrives, and waits for at most `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<usize, LockError> {
        let deadline = Instant::now() + limit;
        loop {
            let before = self.shown.phases();
            match self.arrive() {
                Ok(LockReply::Barrier { passed, phase }) => match phase {
                    BarrierPhase::Passed { live } => {
                        self.passed = Some(passed.wrapping_add(1));
                        return Ok(live as usize);
                    }
                    BarrierPhase::Excluded => return Err(LockError::Excluded),
                    // Known only now: it arrives by what is said next.
                    BarrierPhase::Waiting if self.passed.is_none() => {
                        self.passed = Some(passed);
                        continue;
                    }
                    BarrierPhase::Waiting => {}
                },
                Ok(_) => return Err(LockError::Closed),
                Err(LockError::TimedOut) => {}
                Err(error) => return Err(error),
            }
            if Instant::now() >= deadline {
                return Err(LockError::TimedOut);
            }
            look_until(deadline, || self.shown.phases() != before);
        }
    }

    /// Says that a party is dead.
    pub fn declare_dead(&self, dead: LockHolder) {
        // Whoever waits asks again, and says it again.
        let _ = self.asking.ask(LockOperation::Exclude { parties: self.parties.clone(), dead });
    }
}
