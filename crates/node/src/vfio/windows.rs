//! Lending a function to another host's own kernel, through the NTB that leads there.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rackbus_memory::{Lending, MemoryHandle, Revoker, Stream};
use rackbus_metal::{LentWindow, LoanHandle, MetalError, OnTakenAway, SavedLoan, WindowLoan};
use rackbus_pci::vfio_user::ServedDevice;
use rackbus_vfio::Facts;
use tracing::Span;

use super::{Ntbs, locked};
use crate::lendable::LentInWindow;

/// How a function is lent in windows, and whether it is.
#[derive(Debug, Default)]
pub struct WindowLending {
    ntbs: Arc<Ntbs>,
    taker: String,
    /// The function, while it is lent so.
    lent: Arc<Mutex<Option<LoanHandle>>>,
}

impl WindowLending {
    /// By these NTBs, which are taken for `taker`.
    pub fn new(ntbs: Arc<Ntbs>, taker: String) -> WindowLending {
        WindowLending { ntbs, taker, lent: Arc::default() }
    }

    /// Takes and opens the NTBs, unless that was done.
    pub(crate) fn open_all(&self) {
        self.ntbs.open_all(&self.taker);
    }

    /// Takes note of a conversation in which the function is used without an NTB, and which ends with the node.
    ///
    /// # Errors
    /// When the node ends.
    pub(super) fn begin_without(&self, conversation: &Arc<dyn Stream>) -> io::Result<()> {
        self.ntbs.begin(conversation)
    }

    /// Whether the function is lent so.
    pub(crate) fn is_lent(&self) -> bool {
        locked(&self.lent).is_some()
    }

    /// Has the function that is lent so do nothing for its borrower, and lose nothing.
    ///
    /// # Errors
    /// When what it does for the borrower takes longer than `limit`. It goes on then.
    pub(crate) fn pause(&self, limit: Duration) -> Result<(), MetalError> {
        let lent = locked(&self.lent).clone();
        lent.map_or(Ok(()), |lent| lent.pause(limit))
    }

    /// Whether the function that is lent so is isolated, and cannot be paused therefore. Waits for nothing.
    pub(crate) fn is_isolated(&self) -> bool {
        locked(&self.lent).as_ref().is_some_and(LoanHandle::is_isolated)
    }

    /// Has a function that was paused go on.
    pub(crate) fn go_on(&self) {
        let lent = locked(&self.lent).clone();
        if let Some(lent) = lent {
            lent.go_on();
        }
    }

    /// The function as another process goes on with it in its window, while it is paused; nothing of one that is not lent so,
    /// or is being taken away.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn save(&self) -> io::Result<Option<SavedLoan>> {
        let lent = locked(&self.lent).clone();
        lent.map_or(Ok(None), |lent| lent.save())
    }

    /// The memory of `borrower`, as a model reaches it that goes on in a window of another process.
    ///
    /// # Errors
    /// When there is no such window.
    pub(crate) fn memory_of(&self, borrower: &str) -> io::Result<MemoryHandle> {
        self.ntbs.passed_on_to(borrower)?.memory().map_err(io::Error::other)
    }

    /// Goes on with the function `name` of another process in the window to `borrower`, as [`lend`](WindowLending::lend) lends
    /// one.
    ///
    /// # Errors
    /// When there is no such window, or it cannot be gone on with.
    pub(crate) fn lend_again(
        &self,
        name: &str,
        device: (Box<dyn ServedDevice>, Revoker),
        lending: &Lending,
        (borrower, saved): (&str, SavedLoan),
        conversation: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let window = self.ntbs.passed_on_to(borrower)?;
        let lend =
            |window: &LentWindow, lost| window.lend_model_again(name, device, lending, saved, lost);
        self.lend_through(&window, name, conversation, lend)
    }

    /// The same with the function of this machine that has these facts.
    ///
    /// # Errors
    /// As [`lend_again`](WindowLending::lend_again).
    pub(super) fn lend_machine_again(
        &self,
        name: &str,
        facts: Facts,
        lending: &Lending,
        (borrower, saved): (&str, SavedLoan),
        conversation: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let window = self.ntbs.passed_on_to(borrower)?;
        let lend = |window: &LentWindow, lost| window.lend_again(facts, lending, saved, lost);
        self.lend_through(&window, name, conversation, lend)
    }

    /// Lends the function `name` that `device` models to the kernel of a host, for the lease of this epoch, with what takes
    /// its memory away; `lending` is what its session was made with. When it is taken away before its time, the conversation
    /// is ended.
    ///
    /// # Errors
    /// When no NTB leads there, it cannot be used, or the function cannot be lent through one.
    pub(crate) fn lend(
        &self,
        name: &str,
        device: (Box<dyn ServedDevice>, Revoker),
        lending: &Lending,
        (borrower, epoch): (&str, u64),
        conversation: &Arc<dyn Stream>,
    ) -> io::Result<LentInWindow> {
        let lend =
            |window: &LentWindow, lost| window.lend_model(name, device, lending, epoch, lost);
        self.lend_by(name, borrower, conversation, lend)
    }

    /// The same, of whatever `lend` lends in the window.
    ///
    /// # Errors
    /// As [`lend`](WindowLending::lend).
    pub(super) fn lend_by(
        &self,
        name: &str,
        borrower: &str,
        conversation: &Arc<dyn Stream>,
        lend: impl FnOnce(&LentWindow, OnTakenAway) -> Result<WindowLoan, MetalError>,
    ) -> io::Result<LentInWindow> {
        let window = self.ntbs.window_to(borrower, &self.taker)?;
        self.lend_through(&window, name, conversation, lend)
    }

    fn lend_through(
        &self,
        window: &LentWindow,
        name: &str,
        conversation: &Arc<dyn Stream>,
        lend: impl FnOnce(&LentWindow, OnTakenAway) -> Result<WindowLoan, MetalError>,
    ) -> io::Result<LentInWindow> {
        let (device, conversation) = (name.to_owned(), conversation.clone());
        // A thread of the NTB's says so, which has no lease of its own.
        let about = Span::current();
        let lost: OnTakenAway = Box::new(move |reason: &str| {
            let _about = about.enter();
            tracing::warn!(device, reason, "its borrower lost it");
            conversation.shut_down();
        });
        let lent = lend(window, lost).map_err(io::Error::other)?;
        *locked(&self.lent) = Some(lent.handle());
        let offset = lent.status().offset;
        let held = HeldInWindow { lent: Some(lent), handle: self.lent.clone() };
        Ok(LentInWindow { offset, held: Box::new(held) })
    }
}

/// A function that is lent in a window, until this is dropped.
#[derive(Debug)]
struct HeldInWindow {
    lent: Option<WindowLoan>,
    handle: Arc<Mutex<Option<LoanHandle>>>,
}

impl Drop for HeldInWindow {
    fn drop(&mut self) {
        drop(self.lent.take());
        *locked(&self.handle) = None;
    }
}
