//! One function that is lent in a window, for who lent it: what is known of it, how it is passed on to another process, and its
//! end, after which its place is somebody else's.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::MetalError;
use crate::function::ControlledFunction;
use crate::lender::{AGAIN, Shared, locked};
use crate::room::LoanPlace;
use crate::saved::SavedLoan;

/// A function that is lent, until this is dropped.
#[derive(Debug)]
pub struct WindowLoan {
    pub(crate) shared: Arc<Shared>,
    /// With its thread, until this is dropped.
    pub(crate) running: Option<(Arc<ControlledFunction>, JoinHandle<()>)>,
    pub(crate) place: LoanPlace,
    /// As it was at the beginning.
    pub(crate) status: LentStatus,
}

/// What is known of a lent function.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LentStatus {
    /// What is lent: the PCI address of a function of this machine, or the name of a modelled one.
    pub device: String,
    /// Offset of its control area in the borrower's window 1.
    pub offset: u64,
    /// The lease's epoch, which the borrower's module compares.
    pub epoch: u64,
    /// Requests of the borrower that were carried out.
    pub requests: u64,
    /// Requests that were passed over, as they were none.
    pub refused: u32,
    /// Resets, those at its beginning and end not counted.
    pub resets: u64,
    /// Why it is of no more use.
    pub trouble: Option<String>,
}

/// A function that is lent, for who passes it on to another process. It is for as long as its [`WindowLoan`].
#[derive(Debug, Clone)]
pub struct LoanHandle {
    function: Weak<ControlledFunction>,
    place: LoanPlace,
}

impl LoanHandle {
    /// Does nothing for the borrower, and loses nothing of what it asks for or is to be told. The model is saved meanwhile.
    ///
    /// # Errors
    /// When what is being done for the borrower takes longer than `limit`. It goes on then.
    pub fn pause(&self, limit: Duration) -> Result<(), MetalError> {
        self.function.upgrade().map_or(Ok(()), |function| function.pause(limit))
    }

    /// Whether it is isolated for a user at its borrower, and cannot be [paused](LoanHandle::pause) therefore. Waits for nothing.
    pub fn is_isolated(&self) -> bool {
        self.function.upgrade().is_some_and(|function| function.is_isolated())
    }

    /// Goes on with what came while it was paused.
    pub fn go_on(&self) {
        if let Some(function) = self.function.upgrade() {
            function.go_on();
        }
    }

    /// As another process goes on with it, while it is paused; nothing of one that is taken from its borrower.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn save(&self) -> std::io::Result<Option<SavedLoan>> {
        self.function.upgrade().map_or(Ok(None), |function| function.save(&self.place))
    }
}

impl WindowLoan {
    /// What leads to it, for who passes it on.
    pub fn handle(&self) -> LoanHandle {
        let function = self.running.as_ref().map(|(function, _)| Arc::downgrade(function));
        LoanHandle { function: function.unwrap_or_default(), place: self.place.clone() }
    }

    /// What is known of it.
    pub fn status(&self) -> LentStatus {
        self.running.as_ref().map_or_else(|| self.status.clone(), |(function, _)| function.status())
    }
}

impl Drop for WindowLoan {
    fn drop(&mut self) {
        locked(&self.shared.functions).remove(&self.place.control);
        let Some((mut function, thread)) = self.running.take() else { return };
        function.end();
        // One that panicked has said so.
        let _ = thread.join();
        // Other threads look at it for a moment only. Nobody else can have the device before it is closed and its group
        // is released.
        let function = loop {
            match Arc::try_unwrap(function) {
                Ok(function) => break function,
                Err(shared) => function = shared,
            }
            std::thread::sleep(AGAIN);
        };
        let released = function.is_released();
        drop(function);
        self.shared.ntb.container().leave_idle_groups();
        // Who has not released it may still access what is at this place.
        let mut room = locked(&self.shared.room);
        match released {
            true => room.give_back(&self.place),
            false => room.retire(&self.place),
        }
    }
}
