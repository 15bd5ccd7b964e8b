//! Whether the node that has a front's medium is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the node that has the medium is lost: said by who holds the conversation with it, or by
/// the front, which has waited for too long.
#[derive(Clone)]
pub struct Lost(Arc<LostState>);

struct LostState {
    lost: AtomicBool,
    end: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lost").field(&self.get()).finish()
    }
}

impl Lost {
    /// It is not; `end` ends the conversation with it when the front gives it up.
    pub fn new(end: impl Fn() + Send + Sync + 'static) -> Lost {
        Lost(Arc::new(LostState { lost: AtomicBool::new(false), end: Box::new(end) }))
    }

    /// It is. What is under way fails when the engine next polls.
    pub fn set(&self) {
        self.0.lost.store(true, Ordering::Release);
    }

    pub(crate) fn give_up(&self) {
        self.set();
        (self.0.end)();
    }

    #[inline]
    pub(crate) fn get(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}
