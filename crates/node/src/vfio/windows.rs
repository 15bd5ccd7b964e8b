//! Lending a function to another host's own kernel, through the NTB that leads there.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::{Lending, Revoker, Stream};
use rackbus_metal::{LentWindow, MetalError, OnTakenAway, WindowLoan};
use rackbus_pci::vfio_user::ServedDevice;
use tracing::Span;

use super::Ntbs;
use crate::lendable::LentInWindow;

/// How a function is lent in windows, and whether it is.
#[derive(Debug, Default)]
pub struct WindowLending {
    ntbs: Arc<Ntbs>,
    taker: String,
    lent: Arc<AtomicBool>,
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
        self.lent.load(Ordering::Relaxed)
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
        let (device, conversation) = (name.to_owned(), conversation.clone());
        // A thread of the NTB's says so, which has no lease of its own.
        let about = Span::current();
        let lost: OnTakenAway = Box::new(move |reason: &str| {
            let _about = about.enter();
            tracing::warn!(device, reason, "its borrower lost it");
            conversation.shut_down();
        });
        let lent = lend(&window, lost).map_err(io::Error::other)?;
        self.lent.store(true, Ordering::Relaxed);
        let offset = lent.status().offset;
        let held = HeldInWindow { lent: Some(lent), flag: self.lent.clone() };
        Ok(LentInWindow { offset, held: Box::new(held) })
    }
}

/// A function that is lent in a window, until this is dropped.
#[derive(Debug)]
struct HeldInWindow {
    lent: Option<WindowLoan>,
    flag: Arc<AtomicBool>,
}

impl Drop for HeldInWindow {
    fn drop(&mut self) {
        drop(self.lent.take());
        self.flag.store(false, Ordering::Relaxed);
    }
}
