//! Takes away what a function reaches, from outside the thread that runs it.
//!
//! That thread may hang for as long as a disk does, with addresses of its user's memory in its
//! hands or in the kernel's. So its mappings are kept here as well, and [`Revoker::revoke`]
//! replaces each by private memory: what the thread or the kernel still writes reaches nobody.
//!
//! A host may stall, too, with threads that are about to touch that memory, while its user gives the function up
//! and others get the memory. Such threads look first: see [`Revoker::before_access`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rackbus_fabric::LoanEnd;

use crate::region::Region;
use crate::stream::Stream;
use crate::ticks;

/// A hold on all memory that one [`DmaSpace`](crate::DmaSpace) leads to; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Revoker(Arc<Shared>);

#[derive(Default)]
struct Shared {
    revoked: AtomicBool,
    /// What is mapped now, by its address, and the loans.
    regions: Mutex<BTreeMap<u64, (Weak<Region>, LoanEnd)>>,
    /// What ends the loans of interrupts, by the places of their entries.
    interrupts: Mutex<BTreeMap<u64, LoanEnd>>,
    /// The conversation of the user that has the function, where it may end unseen.
    user: Mutex<Option<Arc<dyn Stream>>>,
    /// The counter when this user's memory was last about to be accessed. Each user has its own: a look for one says
    /// nothing of another.
    looked: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("revoked", &self.revoked).finish_non_exhaustive()
    }
}

impl Revoker {
    /// The function has this user from now on, or none.
    pub fn used_by(&self, conversation: Option<Arc<dyn Stream>>) {
        *self.user() = conversation;
    }

    /// Takes everything away if the user has given the function up.
    #[cold]
    pub fn check_user(&self) {
        let user = self.user().clone();
        if user.is_some_and(|user| user.is_closed()) && !self.is_revoked() {
            tracing::warn!("the user gave the function up while this host stalled");
            self.revoke();
        }
    }

    /// Something in memory is about to be used or written by a thread that says so each time. If the host stalled since
    /// the last time that any of them did, and the user has given the function up meanwhile, everything is taken away first: whatever is done with it
    /// afterwards reaches nobody.
    #[inline]
    pub fn before_access(&self) {
        self.before_access_at(ticks::now());
    }

    /// The same where the processor's counter is known.
    #[inline]
    pub fn before_access_at(&self, now: u64) {
        let looked = self.0.looked.load(Ordering::Acquire);
        if ticks::is_gap(looked, now) {
            self.check_user();
        }
        // Behind the check: until it is over, whoever else looks finds the gap as well. Not each time, since others have
        // the same place in their caches.
        if now.wrapping_sub(looked) > ticks::GAP / 8 {
            self.0.looked.store(now, Ordering::Release);
        }
    }

    /// Takes everything away that is mapped now, and lets nothing be mapped until the next user
    /// [begins](crate::DmaSpace::begin). On return nothing reaches the memory any more, whatever
    /// the function's thread does, and the loans have ended; the thread finds its mappings as they were.
    pub fn revoke(&self) {
        let regions = self.regions();
        self.0.revoked.store(true, Ordering::Release);
        for (region, loan) in regions.values() {
            if let Some(region) = region.upgrade() {
                revoke_region(&region);
            }
            loan.end();
        }
        self.interrupts().values().for_each(LoanEnd::end);
    }

    /// Ends the loan of an interrupt, too, when everything is taken away; at once where that was done. It replaces what was
    /// kept for the same `place`.
    pub fn keep_interrupt(&self, place: u64, loan: LoanEnd) {
        let mut interrupts = self.interrupts();
        // Whoever revokes has said so before it looks here.
        if self.is_revoked() {
            loan.end();
        }
        interrupts.insert(place, loan);
    }

    /// Whether everything was taken away.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.0.revoked.load(Ordering::Acquire)
    }

    /// Keeps a mapping; false when nothing may be mapped any more.
    pub(crate) fn admit(&self, iova: u64, region: &Arc<Region>, loan: LoanEnd) -> bool {
        let mut regions = self.regions();
        let admitted = !self.is_revoked();
        if admitted {
            regions.insert(iova, (Arc::downgrade(region), loan));
        }
        admitted
    }

    /// The mapping at `iova` is gone.
    pub(crate) fn forget(&self, iova: u64) {
        self.regions().remove(&iova);
    }

    /// All mappings are gone.
    pub(crate) fn forget_all(&self) {
        self.regions().clear();
    }

    /// Lets memory be mapped again.
    pub(crate) fn renew(&self) {
        let _regions = self.regions();
        self.interrupts().clear();
        self.0.revoked.store(false, Ordering::Release);
    }

    fn interrupts(&self) -> MutexGuard<'_, BTreeMap<u64, LoanEnd>> {
        self.0.interrupts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn user(&self) -> MutexGuard<'_, Option<Arc<dyn Stream>>> {
        self.0.user.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<u64, (Weak<Region>, LoanEnd)>> {
        // Entries come and go whole.
        self.0.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a region's memory away from all who hold it.
pub(crate) fn revoke_region(region: &Region) {
    if let Err(error) = region.revoke() {
        // Without the replacement the holder could still reach memory that is no longer granted.
        tracing::error!(%error, "a revoked window could not be taken away; ending the process");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use crate::region::SharedMemory;
    use crate::space::{DmaSpace, MapError};
    use crate::ticks;
    use rackbus_fabric::{Access, Lending};

    /// Any thread that says so before each access, and not the function's alone.
    #[test]
    fn a_thread_that_stalled_while_the_user_left_reaches_nothing() {
        let memory = SharedMemory::create("user", 0x1000).unwrap();
        let mut space = DmaSpace::new();
        space.set_master(true);
        let lent = Lending::alone().lend(0, 0x1000, Access::all(), Some(memory.handle(0)));
        space.map(lent.unwrap()).unwrap();
        let (conversation, user) = UnixStream::pair().unwrap();
        space.revoker().used_by(Some(Arc::new(conversation)));
        let pinned = space.pin(0, 16, Access::WRITE).unwrap();
        let revoker = space.revoker().clone();
        let (stall, stalled) = channel();
        let thread = std::thread::spawn(move || {
            revoker.before_access();
            pinned.get().fill(1);
            stalled.recv().unwrap();
            revoker.before_access();
            pinned.get().fill(2);
        });
        while memory.region().whole().read_obj::<u8>(0).unwrap() != 1 {
            std::thread::yield_now();
        }
        drop(user);
        let begun = ticks::now();
        while !ticks::is_gap(begun, ticks::now()) {
            std::thread::yield_now();
        }
        stall.send(()).unwrap();
        thread.join().unwrap();
        assert!(space.revoker().is_revoked());
        assert_eq!(memory.region().whole().read_obj::<u8>(0), Some(1), "it reaches the memory");
    }

    /// One thread works for many users.
    #[test]
    fn a_look_for_one_user_is_none_for_another() {
        let users = [(); 2].map(|()| UnixStream::pair().unwrap());
        let revokers = users.map(|(conversation, user)| {
            let revoker = super::Revoker::default();
            revoker.used_by(Some(Arc::new(conversation)));
            revoker.before_access();
            drop(user);
            revoker
        });
        let begun = ticks::now();
        while !ticks::is_gap(begun, ticks::now()) {
            std::thread::yield_now();
        }
        revokers.iter().for_each(super::Revoker::before_access);
        assert!(revokers.iter().all(super::Revoker::is_revoked));
    }

    #[test]
    fn what_is_taken_away_elsewhere_is_reached_by_nobody_until_the_next_user() {
        let memory = SharedMemory::create("user", 0x2000).unwrap();
        let byte = |at| memory.region().whole().read_obj::<u8>(at).unwrap();
        let mut space = DmaSpace::new();
        space.set_master(true);
        let lending = Lending::alone();
        let lent =
            || lending.fabric().with(|fabric| fabric.reached("host/function").unwrap().len());
        let map = |space: &mut DmaSpace, iova| {
            space.map(lending.lend(iova, 0x1000, Access::all(), Some(memory.handle(iova)))?)
        };
        map(&mut space, 0).unwrap();
        map(&mut space, 0x1000).unwrap();
        space.unmap(0x1000, 0x1000).unwrap();
        space.write(0, &[1]).unwrap();
        let pinned = space.pin(0, 16, Access::WRITE).unwrap();
        let revoker = space.revoker().clone();
        assert_eq!(lent(), 1);
        std::thread::spawn(move || revoker.revoke()).join().unwrap();
        assert_eq!(lent(), 0, "the fabric has the loan still");
        pinned.get().fill(2);
        let _ = space.write(0, &[3]);
        assert_eq!(byte(0), 1, "it still reaches the memory");
        // Nothing comes in by a request that was under way.
        assert!(matches!(map(&mut space, 0x1000), Err(MapError::Revoked)));
        assert_eq!(lent(), 0, "a mapping that was refused has a loan");
        space.unmap_all();
        space.begin();
        map(&mut space, 0).unwrap();
        space.write(0, &[4]).unwrap();
        assert_eq!(byte(0), 4);
    }
}
