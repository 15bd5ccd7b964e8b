//! One front of a function at a time on a host: its memory is lent in the fabric under one name, whatever its lease. The lender
//! has the function back before a front that ends has released that memory, and may lend it to this host again.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Functions of which a front is here, by their names in the rack.
#[derive(Debug, Clone, Default)]
pub(crate) struct FrontSlots(Arc<Slots>);

#[derive(Debug, Default)]
struct Slots {
    taken: Mutex<BTreeSet<String>>,
    freed: Condvar,
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a front, until it is dropped.
#[derive(Debug)]
pub(crate) struct FrontSlot {
    of: Arc<Slots>,
    function: String,
}

impl FrontSlots {
    /// Takes the place of a function's front; waits for at most `limit` until a former one has ended. `None` when it
    /// has not.
    pub(crate) fn take(&self, function: &str, limit: Duration) -> Option<FrontSlot> {
        let is_taken = |taken: &mut BTreeSet<String>| taken.contains(function);
        let waited = self.0.freed.wait_timeout_while(self.0.lock(), limit, is_taken);
        let mut taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        let is_new = taken.insert(function.to_owned());
        is_new.then(|| FrontSlot { of: self.0.clone(), function: function.to_owned() })
    }
}

impl Drop for FrontSlot {
    fn drop(&mut self) {
        self.of.lock().remove(&self.function);
        self.of.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_front_begins_when_the_former_one_has_ended() {
        let slots = FrontSlots::default();
        let long = Duration::from_secs(60);
        let former = slots.take("alpha/d0", long).unwrap();
        assert!(slots.take("alpha/d0", Duration::ZERO).is_none());
        let other = slots.take("alpha/d1", Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| slots.take("alpha/d0", long));
            drop(former);
            let next = next.join().unwrap().unwrap();
            assert!(slots.take("alpha/d0", Duration::ZERO).is_none());
            drop((next, other));
        });
        assert!(slots.take("alpha/d0", Duration::ZERO).is_some());
    }
}
