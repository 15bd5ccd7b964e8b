//! An operation of a function that its device's engines have, and what its medium does with that meanwhile.

use std::sync::Arc;

use rackbus_spec::accel::OperationStatus;

use super::super::super::engines::Context;
use super::super::super::job::EngineJob;

/// An operation before the engines.
pub struct LocalWork {
    pub(super) job: Arc<EngineJob>,
    /// It does nothing but end with this status.
    pub(super) refused: Option<OperationStatus>,
    /// The contexts that it uses, each with the handle that it had.
    pub(super) contexts: Vec<(u16, Arc<Context>)>,
}

impl LocalWork {
    /// Nothing touches its memory on return.
    pub(in super::super) fn release_memory(&self) {
        // What was refused has none, and needs none to end.
        if self.refused.is_none() {
            self.job.release_memory();
        }
    }

    /// The status with which it is going to end that was refused.
    pub(in super::super) fn refused(&self) -> Option<OperationStatus> {
        self.refused
    }

    /// Nothing touches its memory on return, and it does not end.
    pub(in super::super) fn cancel(&self) {
        self.job.cancel();
    }
}
