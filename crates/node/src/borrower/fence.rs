//! What is decided for what this host borrows: [`rackbus_lease::Borrower`], which the agent and whoever attaches ask.
//! Here is only who waits for a decision, and who is told of what follows.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_lease::{Borrower, FrontRefused, LeaseId};

use super::UseListener;

/// The one record of which leases are served here, and of which a front runs. It is locked for a decision only, never
/// while something is done about it.
#[derive(Clone)]
pub(crate) struct BorrowerFence(Arc<Shared>);

struct Shared {
    decided: Mutex<Borrower>,
    changed: Condvar,
    listener: Arc<dyn UseListener>,
}

impl fmt::Debug for BorrowerFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BorrowerFence").field(&*self.lock()).finish()
    }
}

impl BorrowerFence {
    /// Nothing is borrowed yet. `listener` is told what follows from the end of fronts.
    pub(crate) fn new(listener: Arc<dyn UseListener>) -> Self {
        let (decided, changed) = (Mutex::new(Borrower::new(0)), Condvar::new());
        BorrowerFence(Arc::new(Shared { decided, changed, listener }))
    }

    fn lock(&self) -> MutexGuard<'_, Borrower> {
        self.0.decided.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides something; whoever waits looks again.
    pub(crate) fn decide<R>(&self, decide: impl FnOnce(&mut Borrower) -> R) -> R {
        let decided = decide(&mut self.lock());
        self.0.changed.notify_all();
        decided
    }

    /// Whether users may attach to what `lease` lends.
    pub(crate) fn serves(&self, lease: LeaseId) -> bool {
        self.lock().serves(lease)
    }

    /// Lets a front of `lease` begin; waits for at most `limit` until a former one of its function has ended.
    ///
    /// # Errors
    /// [`FrontRefused`].
    pub(crate) fn begin_front(
        &self,
        lease: LeaseId,
        limit: Duration,
    ) -> Result<FrontSlot, FrontRefused> {
        let mut answer = Err(FrontRefused::NotServed(lease));
        let is_to_wait = |decided: &mut Borrower| {
            answer = decided.begin_front(lease);
            answer.as_ref().is_err_and(FrontRefused::is_for_now)
        };
        drop(self.0.changed.wait_timeout_while(self.lock(), limit, is_to_wait));
        answer.map(|()| FrontSlot { fence: self.clone(), lease })
    }
}

/// A front that may run. It has ended, and reaches no memory of its user any more, when this is dropped.
#[derive(Debug)]
pub(crate) struct FrontSlot {
    fence: BorrowerFence,
    lease: LeaseId,
}

impl Drop for FrontSlot {
    fn drop(&mut self) {
        let follows = self.fence.decide(|borrower| borrower.front_ended(self.lease));
        if !follows.is_empty() {
            self.fence.0.listener.front_ended(follows);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;
    use std::sync::mpsc;

    use rackbus_lease::{BorrowerAction, Grant, Message, Placement};

    use super::*;
    use crate::borrower::LeaseEnded;
    use crate::users::VmUser;

    const LONG: Duration = Duration::from_secs(60);

    /// Passes on what follows from the end of fronts.
    pub(crate) struct Follows(pub mpsc::Sender<Vec<BorrowerAction>>);

    impl UseListener for Follows {
        fn lender_lost(&self, _grant: &Grant, _reason: &str) {}
        fn vm_of(&self, _socket: &Path) -> Option<String> {
            None
        }
        fn user_of(&self, _socket: &Path, _process: u32) -> Option<VmUser> {
            None
        }
        fn running_vm(&self, _socket: &Path) -> Option<VmUser> {
            None
        }
        fn used(&self, _grant: &Grant, _user: &VmUser, _ended: LeaseEnded) {}
        fn front_ended(&self, actions: Vec<BorrowerAction>) {
            let _ = self.0.send(actions);
        }
    }

    /// A lease of `function` whose front runs at the borrower.
    pub(crate) fn grant(lease: LeaseId, function: &str) -> Grant {
        let (function, address) = (function.parse().unwrap(), "nowhere".to_owned());
        let (placement, epoch, ttl) = (Placement::Borrower, lease, 1000);
        let (group, turn, vm, starter, strict_ttl) = Default::default();
        #[rustfmt::skip]
        let grant = Grant {
            lease, function, epoch, address, ttl, placement, group, turn, vm, starter, strict_ttl,
        };
        grant
    }

    /// A borrower that was granted these, and what follows from the end of fronts.
    pub(crate) fn granted(
        leases: &[(LeaseId, &str)],
    ) -> (BorrowerFence, mpsc::Receiver<Vec<BorrowerAction>>) {
        let (follows, following) = mpsc::channel();
        let fence = BorrowerFence::new(Arc::new(Follows(follows)));
        for (lease, function) in leases {
            fence.decide(|it| it.receive(0, Message::Granted(grant(*lease, function))));
        }
        (fence, following)
    }

    pub(crate) fn ended(lease: LeaseId) -> Message {
        Message::Ended { lease, reason: "returned".to_owned(), within: None }
    }

    #[test]
    fn the_next_front_begins_when_the_former_one_has_ended() {
        let (fence, _follows) = granted(&[(1, "alpha/d0"), (2, "alpha/d1")]);
        let former = fence.begin_front(1, LONG).unwrap();
        fence.decide(|it| it.receive(0, Message::Granted(grant(3, "alpha/d0"))));
        assert!(fence.begin_front(3, Duration::ZERO).is_err());
        let other = fence.begin_front(2, Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| fence.begin_front(3, LONG));
            drop(former);
            let next = next.join().unwrap().unwrap();
            assert!(fence.begin_front(3, Duration::ZERO).is_err());
            drop((next, other));
        });
        assert!(fence.begin_front(3, Duration::ZERO).is_ok());
    }

    #[test]
    fn an_attach_that_waits_for_a_former_front_is_refused_when_its_lease_ends() {
        let (fence, _follows) = granted(&[(1, "alpha/d0")]);
        let former = fence.begin_front(1, LONG).unwrap();
        fence.decide(|it| it.receive(0, Message::Granted(grant(2, "alpha/d0"))));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| fence.begin_front(2, LONG));
            fence.decide(|it| it.receive(0, ended(2)));
            assert_eq!(next.join().unwrap().unwrap_err(), FrontRefused::NotServed(2));
        });
        drop(former);
    }

    #[test]
    fn what_follows_from_the_end_of_a_front_is_told() {
        let (fence, follows) = granted(&[(1, "alpha/d0")]);
        let front = fence.begin_front(1, LONG).unwrap();
        fence.decide(|it| it.receive(0, ended(1)));
        assert_eq!(fence.decide(|it| it.close_done(1)), []);
        assert!(follows.try_recv().is_err(), "its front runs");
        drop(front);
        let closed = BorrowerAction::Send(Message::Closed { lease: 1 });
        assert_eq!(follows.recv().unwrap(), [closed]);
    }
}
