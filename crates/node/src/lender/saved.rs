//! What the lender has continues in another process: its functions, the conversations with their users, and
//! the record of who may attach.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_control::lease_span;
use rackbus_lease::{Lender, Placement};
use rackbus_link::Link;
use rackbus_memory::{Gate, Stream};
use rackbus_metal::{LoanState, MetalError, SavedLoan};
use rackbus_pci::SaveError;
use rackbus_pci::vfio_user::{RestingConversation, SavedSession};
use tracing::Span;

use super::attend::{LentUsage, is_kept};
use super::{InUse, LentFunction, LentFunctions, SessionEnd};
use crate::handover::HandOverError;
use crate::handover::parcel::{Parcel, ParcelDescriptors};
use crate::handover::state::{LentState, WithDescriptors};
use crate::lendable::{Lendable, NotSaved, User};
use crate::sessions::{LentSession, LentSessionState};
use crate::vfio::WindowLending;
use crate::{upstream, vfio};

/// Functions that were saved. They go on here when this is dropped.
#[derive(Default)]
pub struct SavedFunctions {
    /// As another process continues with them.
    pub states: BTreeMap<String, LentState>,
    /// The service levels that their borrowers were promised, also those of functions without anything to continue with.
    pub levels: BTreeMap<String, String>,
    saved: Vec<(Arc<LentFunction>, SavedSession)>,
    /// Functions in windows, which do nothing for their borrowers.
    paused: Vec<Arc<LentFunction>>,
    sessions: Vec<LentSession>,
}

impl SavedFunctions {
    /// Waits until the system has ended what the functions asked their media for: a process that becomes
    /// another program waits for that, whatever it takes, and nobody is served meanwhile.
    ///
    /// # Errors
    /// [`HandOverError::Storage`] when it takes longer than `limit`.
    pub(crate) fn settle(&self, limit: Duration) -> Result<(), HandOverError> {
        let begun = Instant::now();
        for (lent, _) in &self.saved {
            while !lent.lendable.is_settled() {
                if begun.elapsed() > limit {
                    return Err(HandOverError::Storage(lent.name.clone()));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}

impl Drop for SavedFunctions {
    fn drop(&mut self) {
        for (lent, saved) in std::mem::take(&mut self.saved) {
            lent.lendable.take_back(saved);
        }
        for lent in &self.paused {
            lent.go_on_in_window();
        }
        self.sessions.iter().for_each(|session| session.carried().take_back());
    }
}

/// A function that continues with its user.
pub struct ResumedSession {
    lent: Arc<LentFunction>,
    session: LentUsage,
    stream: Arc<dyn Stream>,
    conversation: RestingConversation,
    placement: Placement,
    /// Its medium is carried to another machine.
    carried: bool,
    /// Its lease, which what is logged is about.
    about: Span,
}

impl LentFunctions {
    /// Whether all functions can continue in another process, as far as this is known before it is tried.
    ///
    /// # Errors
    /// What cannot, and why.
    pub(crate) fn can_be_saved(&self) -> Result<(), HandOverError> {
        if let Some(under_way) = self.fence.lock().under_way() {
            return Err(HandOverError::UnderWay(under_way));
        }
        // A function's state may be held for seconds: the map is not locked meanwhile.
        let functions = self.read().clone();
        for (name, lent) in &functions {
            // Looked at again when it is paused.
            if lent.is_isolated() {
                return Err(HandOverError::Isolated(name.clone()));
            }
            let state = lent.lock();
            let Some(InUse { stream, session, .. }) = &state.session else { continue };
            let function = || format!("{}/{name}", self.host);
            match session {
                None if stream.handle().is_none() => {
                    return Err(HandOverError::Window { function: function() });
                }
                // The session's own hold is longer, so that the borrower's ends first.
                Some(_) if self.hold.is_zero() => {
                    return Err(HandOverError::NotHeld { function: function() });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// All functions as values, with their descriptors in `parcel`. Nobody attaches or detaches now.
    ///
    /// # Errors
    /// [`HandOverError`]; all go on then.
    pub(crate) fn save(&self, parcel: &mut Parcel) -> Result<SavedFunctions, HandOverError> {
        let mut all = SavedFunctions::default();
        let functions = self.read().clone();
        for (name, lent) in &functions {
            let state = lent.lock();
            all.levels.extend(lent.promised().clone().map(|level| (name.clone(), level)));
            let attached = match &state.session {
                Some(InUse { stream, session, at: Some(at) }) => {
                    Some((stream.clone(), session.clone(), at.clone()))
                }
                Some(InUse { at: None, .. }) => {
                    return Err(HandOverError::InUse { function: name.clone() });
                }
                None => None,
            };
            // First, so that all interrupts of a model are among what is saved of it.
            let paused = lent.pause_in_window(self.patience / 10);
            let why = |error| match error {
                MetalError::Isolated(_) => HandOverError::Isolated(name.clone()),
                _ => HandOverError::Hangs(name.clone()),
            };
            if paused.map_err(why)? {
                all.paused.push(lent.clone());
            }
            let from = attached.as_ref().map(|(.., at)| at.clone()).unwrap_or_default();
            let saved = match lent.lendable.save(from, self.patience / 10) {
                Ok(saved) => saved,
                // Without a user there is nothing that a new one would not have.
                Err(NotSaved::Refused(SaveError::Unsupported))
                    if attached.is_none() && lent.promised().is_none() =>
                {
                    continue;
                }
                Err(NotSaved::Hangs) => return Err(HandOverError::Hangs(name.clone())),
                Err(NotSaved::Refused(cause)) => {
                    return Err(HandOverError::Save { function: name.clone(), cause });
                }
            };
            drop(state);
            let (stream, session) = attached.map(|(stream, session, _)| (stream, session)).unzip();
            let session = session.flatten();
            let stated = state_of(lent, saved.as_ref(), (stream, session.as_ref()), parcel);
            // Also where that failed: it is taken back then.
            all.saved.extend(saved.map(|saved| (lent.clone(), saved)));
            all.sessions.extend(session);
            all.states.extend(stated?.map(|stated| (name.clone(), stated)));
        }
        Ok(all)
    }

    /// Who may attach, as it continues in another process.
    pub(crate) fn fence(&self) -> Lender {
        self.fence.lock().clone()
    }

    /// Goes on with who may attach, before any device is added.
    pub(crate) fn with_fence(self, fence: Lender) -> Self {
        *self.fence.lock() = fence;
        self
    }

    /// Adds the devices that another process had: those that the rack file lists, and those that were offered since. Beside
    /// them come the states of the functions that go on, and the service levels that were promised for any of them. Returns
    /// the functions that continue with their users.
    pub(crate) fn resume_all(
        &self,
        listed: &[(String, Arc<dyn Lendable>)],
        mut states: BTreeMap<String, LentState>,
        mut levels: BTreeMap<String, String>,
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> Vec<ResumedSession> {
        let resume = |(name, lendable): (String, Arc<dyn Lendable>)| {
            let state = states.remove(&name);
            let earlier = state.as_ref().and_then(|state| state.level.clone());
            let level = levels.remove(&name).or(earlier);
            self.add_resumed(&name, lendable, (state, level), descriptors, link)
        };
        let sessions = self.inherited(listed.to_vec()).into_iter().filter_map(resume).collect();
        // Nobody here has these functions.
        states.into_values().for_each(|state| abandon_state(state, descriptors));
        self.detach_missing();
        sessions
    }

    /// Says of each function that the other process had and this one has not that nobody is attached to it: its user's
    /// conversation ended with that process, and no other one ends here. Its revocation would wait for ever.
    fn detach_missing(&self) {
        // Before the fence is locked, under which nothing else is waited for.
        let here = self.devices();
        let mut fence = self.fence.lock();
        for device in fence.newest_epochs().into_keys() {
            if !here.contains(&device) {
                fence.detached(&device);
            }
        }
    }

    /// Adds a device that another process had. One that cannot go on begins anew; its user, if there is
    /// one, loses it. The lease goes on in both cases, and with it the level that was promised.
    fn add_resumed(
        &self,
        device: &str,
        lendable: Arc<dyn Lendable>,
        (state, level): (Option<LentState>, Option<String>),
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> Option<ResumedSession> {
        let lent = match self.insert(device, lendable) {
            Ok(lent) => lent,
            Err(error) => {
                tracing::error!(device, %error, "the function cannot go on");
                state.into_iter().for_each(|state| abandon_state(state, descriptors));
                return None;
            }
        };
        self.fence.lock().add(device.to_owned());
        let lease = self.fence.lock().holder(device).map(|holder| holder.lease);
        // Threads of the function that begin here are about its lease, too.
        let _about = lease.map(|lease| lease_span(lease).entered());
        let resumed = state.map(|state| self.resume(&lent, state, descriptors, link)).transpose();
        let session = match resumed {
            Ok(Some(session)) => session,
            Ok(None) => {
                self.begin_anew(&lent);
                None
            }
            Err(error) => {
                tracing::error!(device, %error, "the function cannot go on and begins anew");
                self.begin_anew(&lent);
                None
            }
        };
        self.keep_level(&lent, level);
        if session.is_none() {
            self.fence.lock().detached(device);
        }
        session
    }

    /// All others wait meanwhile: so it is waited for a function that is in somebody's hands for a moment only.
    fn begin_anew(&self, lent: &LentFunction) {
        if let Err(error) = lent.start_within(self.patience / 10, &lent.lock()) {
            tracing::error!(%error, "it is tried again when it is lent");
        }
    }

    /// Promises the borrower of a function anew what it was promised by the other process.
    fn keep_level(&self, lent: &LentFunction, level: Option<String>) {
        let holder = self.fence.lock().holder(&lent.name).cloned();
        if holder.is_none() {
            return;
        }
        // Who has the function keeps it, with a share of what is left if the promise cannot be kept, and attaches
        // again with that.
        let kept = lent.lendable.resume_level(level.as_deref(), self.lent_to(holder.as_ref()));
        if let Err(reason) = &kept {
            tracing::error!(
                device = lent.name,
                reason,
                "a guaranteed service level cannot be kept after the restart"
            );
        }
        *lent.promised() = level.filter(|_| kept.is_ok());
    }

    fn resume(
        &self,
        lent: &Arc<LentFunction>,
        state: LentState,
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> std::io::Result<Option<ResumedSession>> {
        let LentState { function, conversation, session, window, level: _ } = state;
        let saved = function.map(|function| function.take(descriptors)).transpose()?;
        let class = saved.as_ref().map(|saved| saved.state.function.class());
        if class.is_some_and(|class| !lent.lendable.continues(class)) {
            saved.iter().for_each(abandon);
            return Err(std::io::Error::other(
                "the rack file has another kind of device there now",
            ));
        }
        let user = self.resumed_user(lent, (conversation, session), descriptors, link);
        let (user, session) = user.inspect_err(|_| saved.iter().for_each(abandon))?;
        let stream = user.as_ref().map(|user| user.stream.clone());
        let placement = self.fence.lock().admitted(&lent.name).map(|holder| holder.placement);
        let placement = placement.unwrap_or_default();
        let missing = || std::io::Error::other("nothing of it was saved");
        let resumed = match (placement, user) {
            (Placement::Host, user) => match user.zip(window) {
                Some((user, window)) => {
                    let lent_so = (user, window, &session);
                    Some(self.resume_in_window(lent, saved, lent_so, descriptors)?)
                }
                None => {
                    // Its borrower is away, or loses it: the next one finds what is in it.
                    stream.iter().for_each(|stream| stream.shut_down());
                    lent.lendable.resume(saved.ok_or_else(missing)?, None)?;
                    None
                }
            },
            (_, user) => {
                let resumed = lent.lendable.resume(saved.ok_or_else(missing)?, user)?;
                resumed.map(|(session, conversation)| (LentUsage::Attached(session), conversation))
            }
        };
        let carried = session.is_some();
        let carried_session = session;
        let session = resumed.zip(stream).map(|((session, conversation), stream)| {
            lent.lock().session =
                Some(InUse { stream: stream.clone(), session: carried_session, at: None });
            let (lent, about) = (lent.clone(), Span::current());
            ResumedSession { lent, session, stream, conversation, placement, carried, about }
        });
        Ok(session)
    }

    /// Goes on with a function in another host's own PCI tree.
    fn resume_in_window(
        &self,
        lent: &LentFunction,
        saved: Option<SavedSession>,
        (user, window, session): (User, WithDescriptors<LoanState>, &Option<LentSession>),
        descriptors: &mut ParcelDescriptors,
    ) -> std::io::Result<(LentUsage, RestingConversation)> {
        let (state, descriptors) = window.take(descriptors)?;
        let borrower = self.borrower_of(&lent.name)?;
        let loan = (&borrower[..], SavedLoan { state, descriptors });
        let resumed = lent.lendable.resume_in_window(saved, user, loan)?;
        if !is_kept(session.clone().map(|session| (None, session))) {
            return Err(std::io::Error::other("its session with its borrower cannot be kept"));
        }
        Ok((LentUsage::InWindow(resumed), RestingConversation::default()))
    }

    /// Who was attached to a function, by the number of its conversation or by its session on another machine.
    fn resumed_user(
        &self,
        lent: &LentFunction,
        (conversation, session): (Option<u32>, Option<LentSessionState>),
        descriptors: &mut ParcelDescriptors,
        link: &dyn Link,
    ) -> std::io::Result<(Option<User>, Option<LentSession>)> {
        Ok(match (conversation, session) {
            (_, Some(state)) => {
                let session = LentSession::resume(&self.borrower_of(&lent.name)?, &state)?;
                let stream = Arc::new(session.carried().clone());
                (Some(self.user(&lent.name, stream, Some(&session))?), Some(session))
            }
            (Some(number), None) => {
                let stream = link.conversation(descriptors.take_handle(number)?)?;
                (Some(self.user(&lent.name, stream, None)?), None)
            }
            (None, None) => (None, None),
        })
    }

    /// Who is attached to `device`, as the record of who may attach says.
    fn user(
        &self,
        device: &str,
        stream: Arc<dyn Stream>,
        session: Option<&LentSession>,
    ) -> std::io::Result<User> {
        let (borrower, function) = (self.borrower_of(device)?, format!("{}/{device}", self.host));
        let lending = self.fabric.lending(&function, &borrower).map_err(std::io::Error::other)?;
        let session = session.map(|session| session.carried().clone());
        Ok(User { lending, stream, session })
    }

    /// The host that is attached to `device`.
    fn borrower_of(&self, device: &str) -> std::io::Result<String> {
        let borrower = self.fence.lock().admitted(device).map(|holder| holder.borrower.clone());
        borrower.ok_or_else(|| std::io::Error::other("it is lent to nobody"))
    }
}

impl ResumedSession {
    /// Holds the conversation on a thread of its own, until it ends.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(crate) fn go_on(self, gate: &Gate) -> std::io::Result<()> {
        let passage = gate.enter();
        let hold = move || {
            let ResumedSession { lent, session, stream, conversation, placement, carried, about } =
                self;
            let _about = about.entered();
            let passage = passage;
            let end = SessionEnd(&lent);
            // Behind `end`, so that it is scrubbed first also where this thread panics.
            let session = session;
            match &session {
                LentUsage::Attached(session) if placement == Placement::Lender => {
                    lent.hold(&*stream, session, conversation, &passage);
                }
                LentUsage::Attached(session) => {
                    session.share_medium(carried);
                    lent.hold_medium(&*stream, &passage);
                }
                LentUsage::InWindow(_) => lent.hold_medium(&*stream, &passage),
            }
            drop(session);
            drop(end);
            tracing::info!(device = lent.name, "function released");
        };
        std::thread::Builder::new().name("link peer".into()).spawn(hold).map(drop)
    }
}

/// What another process goes on with of a function that was `saved`, or is lent in a window, or both, and of its user; nothing
/// where there is neither.
///
/// # Errors
/// When it cannot be passed on, or is being taken from its borrower: its model's state is of no use then.
fn state_of(
    lent: &LentFunction,
    saved: Option<&SavedSession>,
    user: (Option<Arc<dyn Stream>>, Option<&LentSession>),
    parcel: &mut Parcel,
) -> Result<Option<LentState>, HandOverError> {
    let windows = lent.lendable.windows();
    let in_window = windows.map_or(Ok(None), WindowLending::save)?;
    if in_window.is_none() && windows.is_some_and(WindowLending::is_lent) {
        return Err(HandOverError::TakenAway(lent.name.clone()));
    }
    match (saved, in_window) {
        (None, None) => Ok(None),
        (saved, in_window) => LentState::new(saved, in_window, user, parcel).map(Some),
    }
}

/// Ends what a function of another process reaches that cannot go on here. Of modelled functions nothing does: they ended
/// with that process.
fn abandon(saved: &SavedSession) {
    vfio::abandon(saved);
    upstream::abandon(saved);
}

/// Ends what a function reaches that another process had and that does not go on here, where something does.
fn abandon_state(state: LentState, descriptors: &mut ParcelDescriptors) {
    match state.function.map(|function| function.take(descriptors)).transpose() {
        Ok(saved) => saved.iter().for_each(abandon),
        Err(error) => tracing::error!(%error, "the state of a function cannot be read"),
    }
}

#[cfg(test)]
mod tests;
