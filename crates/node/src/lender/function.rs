//! One function that is lent: who is attached, and how that ends.

use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rackbus_control::api::DeviceReport;
use rackbus_lease::{ArmedFor, Epoch, NotAdmitted};
use rackbus_memory::{GatePassage, Stream};
use rackbus_metal::MetalError;
use rackbus_pci::vfio_user::{RestingConversation, ServedDevice, serve_within};

use super::tenancy::Tenancy;
use super::{Fence, LendError};
use crate::lendable::{Lendable, NotReady};
use crate::sessions::LentSession;

/// How long an attach waits for the same borrower's previous conversation to be cleaned up.
const SUCCESSION: Duration = Duration::from_secs(2);

/// Between two looks meanwhile whether that conversation's connection is lost.
const LOOK: Duration = Duration::from_millis(100);

/// Between two attempts to take a lock for which there is a limit.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(5);

pub(super) struct LentFunction {
    pub(super) name: String,
    pub(super) fence: Fence,
    pub(super) lendable: Arc<dyn Lendable>,
    pub(super) patience: Duration,
    pub(super) state: Mutex<LentUse>,
    pub(super) seen: Mutex<VisibleState>,
    /// The service level that its borrower was promised.
    pub(super) promised: Mutex<Option<String>>,
    /// What its leases use.
    pub(super) tenancy: Mutex<Tenancy>,
    /// Signalled when a conversation has ended and the function is scrubbed.
    pub(super) idle: Condvar,
}

/// What others may see of a device, whatever holds its state.
#[derive(Debug, Default)]
pub(super) struct VisibleState {
    /// Why it cannot be obtained now.
    pub(super) trouble: Option<String>,
    /// How many were not let in, and why the last was not.
    pub(super) attach_refused: u64,
    pub(super) last_attach_refused: Option<String>,
}

impl std::fmt::Debug for LentFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentFunction").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Default)]
pub(super) struct LentUse {
    pub(super) session: Option<InUse>,
}

/// The conversation of who is attached.
pub(super) struct InUse {
    pub(super) stream: Arc<dyn Stream>,
    /// What outlives its connection, between machines.
    pub(super) session: Option<LentSession>,
    /// Where it rests; nothing while it continues.
    pub(super) at: Option<RestingConversation>,
}

/// Ends what was [attached](LentFunction::attach), however its conversation ended: a revocation waits for it.
/// Dropped after the session, and so after the function was scrubbed.
pub(super) struct SessionEnd<'a>(pub(super) &'a LentFunction);

impl Drop for SessionEnd<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.session = None;
        self.0.fence.lock().detached(&self.0.name);
        drop(state);
        self.0.idle.notify_all();
    }
}

/// Says that an attach that was admitted came to nothing, also where the function panics at it. Whoever waits for that
/// looks when the state is unlocked.
struct AttachAttempt<'a>(&'a LentFunction);

impl Drop for AttachAttempt<'_> {
    fn drop(&mut self) {
        self.0.fence.lock().detached(&self.0.name);
        self.0.idle.notify_all();
    }
}

impl LentFunction {
    pub(super) fn lock(&self) -> MutexGuard<'_, LentUse> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, VisibleState> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn promised(&self) -> MutexGuard<'_, Option<String>> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_refusal(&self, said: String) {
        let mut seen = self.seen();
        seen.attach_refused += 1;
        seen.last_attach_refused = Some(said);
    }

    pub(super) fn report(&self) -> DeviceReport {
        let seen = self.seen();
        let report = DeviceReport {
            trouble: seen.trouble.clone(),
            attach_refused: seen.attach_refused,
            last_attach_refused: seen.last_attach_refused.clone(),
            ..DeviceReport::default()
        };
        drop(seen);
        // Before the counters are read: those that somebody else read later must not come first, or these would look as
        // if the function had begun anew.
        let mut tenancy = self.tenancy();
        let mut report = self.lendable.describe(report);
        let lease = self.fence.lock().admitted(&self.name).map(|holder| holder.lease);
        (report.lease, report.last_lease) = tenancy.reports(lease, &report);
        drop(tenancy);
        report
    }

    pub(super) fn hangs(&self) -> LendError {
        LendError::Hangs { device: self.name.clone(), limit: self.patience }
    }

    /// Holds the conversation of who is attached.
    pub(super) fn hold(
        &self,
        stream: &dyn Stream,
        session: &dyn ServedDevice,
        from: RestingConversation,
        passage: &GatePassage,
    ) {
        let at = |paused| self.rests(paused);
        if let Err(error) = serve_within(stream, session, from, passage, at) {
            tracing::warn!(device = self.name, %error, "conversation ended");
        }
    }

    /// Holds the conversation of who has the medium: nothing is said in it.
    pub(super) fn hold_medium(&self, stream: &dyn Stream, passage: &GatePassage) {
        let carried = self.lock().session.as_ref().is_some_and(|it| it.session.is_some());
        if stream.handle().is_none() && !carried {
            // It cannot be passed on, so it does not rest for that.
            return stream.wait_closed();
        }
        while !stream.is_closed() {
            stream.wait_closed_or(passage.gate().as_fd());
            if !stream.is_closed() {
                self.rests(Some(RestingConversation::default()));
                passage.rest();
                self.rests(None);
            }
        }
    }

    /// Has a function that is lent in a window do nothing for its borrower; false when it is not lent so.
    ///
    /// # Errors
    /// When what it does for the borrower takes longer than `limit`. It goes on then.
    pub(super) fn pause_in_window(&self, limit: Duration) -> Result<bool, MetalError> {
        match self.lendable.windows().filter(|windows| windows.is_lent()) {
            Some(windows) => windows.pause(limit).map(|()| true),
            None => Ok(false),
        }
    }

    /// Whether it cannot be [paused](LentFunction::pause_in_window) as its borrower's VFIO has it. Waits for nothing.
    pub(super) fn is_isolated(&self) -> bool {
        self.lendable.windows().is_some_and(|windows| windows.is_isolated())
    }

    /// Has a function that was [paused](LentFunction::pause_in_window) go on.
    pub(super) fn go_on_in_window(&self) {
        if let Some(windows) = self.lendable.windows() {
            windows.go_on();
        }
    }

    pub(super) fn rests(&self, at: Option<RestingConversation>) {
        if let Some(session) = &mut self.lock().session {
            session.at = at;
        }
    }

    /// Has the function ready, and notes why it is not. Who has `_state` is alone with it.
    pub(super) fn start(&self, state: &LentUse) -> Result<(), LendError> {
        self.start_within(self.patience, state)
    }

    /// The same, for which others wait so long at most.
    pub(super) fn start_within(&self, limit: Duration, _state: &LentUse) -> Result<(), LendError> {
        let outcome = self.lendable.arm(limit).map_err(|error| match error {
            NotReady::Hangs => self.hangs(),
            NotReady::Failed(cause) => self.broken(cause),
        });
        self.seen().trouble = outcome.as_ref().err().map(LendError::to_string);
        outcome
    }

    pub(super) fn broken(&self, cause: std::io::Error) -> LendError {
        LendError::Device { device: self.name.clone(), cause }
    }

    /// Ends the conversation of who is attached under `epoch` or an older one, and waits for its end
    /// and for the engine.
    pub(super) fn cut(&self, epoch: Epoch) -> Result<(), LendError> {
        if let Some(state) = self.lock_within(self.patience) {
            self.end_session(&state, epoch);
            let attached = |_: &mut LentUse| self.fence.lock().attached_up_to(&self.name, epoch);
            let waited = self.idle.wait_timeout_while(state, self.patience, attached);
            let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if !waited.timed_out() {
                return self.start(&state);
            }
        }
        // The conversation waits for the function, or it does not come to be opened.
        self.lendable.revoke();
        let hangs = self.hangs();
        self.seen().trouble = Some(hangs.to_string());
        Err(hangs)
    }

    /// Waits for the end of a conversation that was cut, however long it takes.
    pub(super) fn wait_cut(&self, epoch: Epoch) -> Result<(), LendError> {
        let state = loop {
            match self.lock_within(self.patience) {
                Some(state) => break state,
                None => self.lendable.revoke(),
            }
        };
        self.end_session(&state, epoch);
        let attached = |_: &mut LentUse| self.fence.lock().attached_up_to(&self.name, epoch);
        let waited = self.idle.wait_while(state, attached);
        self.start(&waited.unwrap_or_else(PoisonError::into_inner))
    }

    fn end_session(&self, state: &LentUse, epoch: Epoch) {
        if let Some(session) = &state.session
            && self.fence.lock().attached_up_to(&self.name, epoch)
        {
            session.stream.shut_down();
        }
    }

    /// The lock, which whoever opens a function holds meanwhile: another program that serves it may take its time.
    fn lock_within(&self, limit: Duration) -> Option<MutexGuard<'_, LentUse>> {
        let begun = Instant::now();
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() > limit => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(BETWEEN_ATTEMPTS),
            }
        }
    }

    /// Lets `wanted` attach, if the lease says so. Its own former conversation may need a moment to
    /// end. Dropping the session and then the other half ends it.
    pub(super) fn attach<T>(
        &self,
        wanted: &ArmedFor,
        caller: InUse,
        give: impl FnOnce(&dyn Lendable) -> std::io::Result<T>,
    ) -> Result<(SessionEnd<'_>, T), LendError> {
        let deadline = Instant::now() + SUCCESSION;
        let mut state = self.lock();
        loop {
            let decided = self.fence.lock().attach(&self.name, wanted);
            let left = deadline.saturating_duration_since(Instant::now());
            match decided {
                Ok(()) => break,
                Err(NotAdmitted::InUse { .. }) if !left.is_zero() => {}
                Err(refused) => return Err(refused.into()),
            }
            if let Some(InUse { session: Some(session), stream, .. }) = &state.session
                && session.is_away()
            {
                // Whoever begins anew does not come back to what was lost.
                stream.shut_down();
            }
            let waited = self.idle.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let attempt = AttachAttempt(self);
        let session = self.open(&mut state, caller, give)?;
        // From here on the session's end says so.
        std::mem::forget(attempt);
        Ok((SessionEnd(self), session))
    }

    pub(super) fn open<T>(
        &self,
        state: &mut LentUse,
        caller: InUse,
        give: impl FnOnce(&dyn Lendable) -> std::io::Result<T>,
    ) -> Result<T, LendError> {
        self.start(state)?;
        // A model that failed since it was armed was started anew just now, and knows of no promise.
        let promised = self.promised();
        if promised.is_some() {
            self.lendable.change_level(promised.as_deref()).map_err(LendError::Level)?;
        }
        drop(promised);
        let attached = give(&*self.lendable);
        let attached = attached.map_err(|cause| self.broken(cause))?;
        state.session = Some(caller);
        Ok(attached)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rackbus_devices::class::{LentTo, parse_rack};
    use rackbus_fabric::{Fabric, FabricHandle, derive};
    use rackbus_lease::{LenderAction, Message, Placement};

    use super::*;
    use crate::handover::parcel::Parcel;
    use crate::lendable::Attached;
    use crate::lender::LentFunctions;

    /// A function that remembers which levels it was given since it was started last.
    #[derive(Debug, Default)]
    struct Restarted(Mutex<Vec<Option<String>>>);

    impl Lendable for Restarted {
        fn arm(&self, _limit: Duration) -> Result<(), NotReady> {
            self.0.lock().unwrap().clear();
            Ok(())
        }

        fn set_level(&self, level: Option<&str>, _to: LentTo) -> Result<(), String> {
            self.change_level(level)
        }

        fn change_level(&self, level: Option<&str>) -> Result<(), String> {
            self.0.lock().unwrap().push(level.map(str::to_owned));
            Ok(())
        }

        fn attach(
            &self,
            _lending: rackbus_fabric::Lending,
            _stream: &Arc<dyn Stream>,
        ) -> std::io::Result<Box<dyn Attached>> {
            Err(std::io::Error::other("it is not needed here"))
        }

        fn revoke(&self) {}

        fn describe(&self, known: DeviceReport) -> DeviceReport {
            known
        }
    }

    fn lender() -> (LentFunctions, FabricHandle) {
        let file = "name = \"test\"\n[hosts.alpha.devices.d0]\nkind = \"nvme\"\n\
                    size = \"1 MiB\"\n[hosts.beta]\n";
        let (rack, _) = parse_rack("rack.toml", file).unwrap();
        let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
        (LentFunctions::new("alpha", fabric.clone()), fabric)
    }

    /// Arms the function for the first lease of beta's.
    fn arm(lender: &LentFunctions, level: Option<String>) -> ArmedFor {
        let (device, borrower) = ("d0".to_owned(), "beta".to_owned());
        let (lease, epoch, placement) = (1, 1, Placement::Lender);
        let holder = ArmedFor { lease, epoch, borrower: borrower.clone(), placement };
        let level_of = level.clone();
        let arm = Message::Arm {
            incarnation: 0,
            device,
            lease,
            epoch,
            borrower,
            placement,
            level,
            serve_for: None,
        };
        assert_eq!(lender.receive(0, arm).len(), 1);
        lender.arm("d0", epoch, level_of.as_deref());
        holder
    }

    /// The lease continues, and with it what it was promised.
    #[test]
    fn a_model_that_is_started_anew_for_the_same_lease_keeps_to_its_level() {
        let (lender, fabric) = lender();
        let function = Arc::new(Restarted::default());
        lender.add("d0", function.clone()).unwrap();
        let level_of = Some("10".to_owned());
        let holder = arm(&lender, level_of.clone());
        let lending = fabric.lending("alpha/d0", "beta").unwrap();
        let stream: Arc<dyn Stream> = Arc::new(UnixStream::pair().unwrap().0);
        let caller = InUse { stream: stream.clone(), session: None, at: None };
        assert!(
            lender
                .find("d0")
                .unwrap()
                .attach(&holder, caller, |it| it.attach(lending, &stream))
                .is_err()
        );
        assert_eq!(*function.0.lock().unwrap(), [level_of]);
    }

    /// The thread of the conversation is gone then, and nobody else would say that the function is free.
    #[test]
    fn a_function_that_panics_when_it_is_attached_is_taken_back_all_the_same() {
        let (lender, fabric) = lender();
        lender.add("d0", Arc::new(Restarted::default())).unwrap();
        let holder = arm(&lender, None);
        let lending = fabric.lending("alpha/d0", "beta").unwrap();
        let stream: Arc<dyn Stream> = Arc::new(UnixStream::pair().unwrap().0);
        let caller = InUse { stream, session: None, at: None };
        let lent = lender.find("d0").unwrap();
        let attaching = std::thread::spawn(move || {
            let give = |_: &dyn Lendable| -> std::io::Result<()> {
                drop(lending);
                panic!("planted: the model fails")
            };
            lent.attach(&holder, caller, give).map(drop)
        });
        assert!(attaching.join().is_err());
        let revoke = Message::Revoke { incarnation: 0, device: "d0".to_owned(), epoch: 1 };
        assert_eq!(lender.receive(0, revoke).len(), 1);
        let said = lender.revoke("d0", 1).expect("somebody is attached for ever");
        assert!(
            matches!(said[..], [LenderAction::Send(Message::Revoked { epoch: 1, .. })]),
            "{said:?}"
        );
    }

    /// Who has one of the function's state, the fence and the map may have to wait for another of them: no thread may
    /// wait for one and keep another from them for as long.
    #[test]
    fn nobody_keeps_the_map_or_the_fence_while_waiting_for_something_else() {
        let (lender, _fabric) = lender();
        lender.add("d0", Arc::new(Restarted::default())).unwrap();
        let lender = &lender;
        let lent = lender.find("d0").unwrap();
        type Look = fn(&LentFunctions);
        let looks: [(&str, Look); 2] = [
            ("can be saved", |lender| drop(lender.can_be_saved())),
            ("save", |lender| drop(lender.save(&mut Parcel::default()))),
        ];
        std::thread::scope(|scope| {
            for (name, look) in looks {
                let state = lent.lock();
                let waiting = Waiting::begin(scope, move || look(lender));
                let free = waiting.leaves_free(|| lender.lent.try_write().is_ok());
                drop(state);
                assert!(free, "{name}");
            }
            let map = lender.write();
            let waiting = Waiting::begin(scope, || drop(lender.attached()));
            let free = waiting.leaves_free(|| lender.fence.0.try_lock().is_ok());
            drop(map);
            assert!(free, "attached");
        });
    }

    /// After this long a test fails instead of waiting on.
    const LONG: Duration = Duration::from_secs(60);

    /// A thread that comes to wait for something.
    struct Waiting(rustix::process::Pid);

    impl Waiting {
        fn begin<'s>(
            scope: &'s std::thread::Scope<'s, '_>,
            what: impl FnOnce() + Send + 's,
        ) -> Waiting {
            let (tells, told) = std::sync::mpsc::channel();
            scope.spawn(move || {
                tells.send(rustix::thread::gettid()).unwrap();
                what();
            });
            Waiting(told.recv().unwrap())
        }

        /// Whether it comes to wait with something free that it may have had on its way there.
        fn leaves_free(&self, is_free: impl Fn() -> bool) -> bool {
            let stat = format!("/proc/self/task/{}/stat", self.0.as_raw_pid());
            let waits = || {
                let stat = std::fs::read_to_string(&stat).unwrap();
                stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
            };
            let begun = Instant::now();
            while !(waits() && is_free()) {
                if begun.elapsed() > LONG {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            true
        }
    }
}
