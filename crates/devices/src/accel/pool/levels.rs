//! What tenants are promised, and what follows from it for whoever serves them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rackbus_qos::{LevelRefused, LevelRoom, ServiceLevel, TenantId, TenantShare};

use super::super::LARGEST;
use super::{PoolEngines, Shared};

impl Shared {
    /// Promises a tenant a level in the place of what it has, or takes that away.
    fn promise(
        &mut self,
        tenant: TenantId,
        level: Option<&ServiceLevel>,
    ) -> Result<TenantShare, LevelRefused> {
        match level {
            Some(level) => self.admission.admit(tenant.0.into(), level),
            None => {
                self.admission.release(tenant.0.into());
                Ok(TenantShare::default())
            }
        }
    }

    /// Tells whoever checks what a tenant sends what its level says of that.
    fn note_largest(&mut self, tenant: TenantId) {
        let level = self.admission.level(tenant.0.into());
        let largest = level.and_then(|level| u32::try_from(level.largest).ok()).unwrap_or(LARGEST);
        if let Some(known) = self.largest.get(&tenant) {
            known.store(largest, Ordering::Relaxed);
        }
    }
}

impl PoolEngines {
    /// A tenant has another level: the one it asks for, or a part of what is left.
    ///
    /// # Errors
    /// [`LevelRefused`], with what would fit; the tenant has what it had.
    pub fn set_level(
        &self,
        tenant: TenantId,
        level: Option<&ServiceLevel>,
    ) -> Result<(), LevelRefused> {
        let mut shared = self.lock();
        let share = shared.promise(tenant, level)?;
        self.set(&mut shared, tenant, share);
        Ok(())
    }

    /// A tenant has a level that it was promised before, in an earlier life of the device too, whether it still fits or
    /// not.
    ///
    /// # Errors
    /// [`LevelRefused`] where no such level can be kept by these engines; the tenant has what it had.
    pub fn keep_level(&self, tenant: TenantId, level: &ServiceLevel) -> Result<(), LevelRefused> {
        let mut shared = self.lock();
        let share = shared.admission.keep(tenant.0.into(), level)?;
        self.set(&mut shared, tenant, share);
        Ok(())
    }

    /// Whether what a tenant was promised stays so while its function has no model: one that failed is made anew, and
    /// nobody else gets its level meanwhile.
    pub fn hold_level(&self, tenant: TenantId, held: bool) {
        let mut shared = self.lock();
        if held {
            shared.held.insert(tenant);
        } else {
            shared.held.remove(&tenant);
        }
    }

    /// Whether a tenant's level is [held](PoolEngines::hold_level).
    pub fn is_held(&self, tenant: TenantId) -> bool {
        self.lock().held.contains(&tenant)
    }

    /// A tenant comes in the place of the one before, whose debts and level are not its own.
    ///
    /// # Errors
    /// [`LevelRefused`], with what would fit; the tenant has what the one before had.
    pub fn begin(
        &self,
        tenant: TenantId,
        level: Option<&ServiceLevel>,
    ) -> Result<(), LevelRefused> {
        let mut shared = self.lock();
        let share = shared.promise(tenant, level)?;
        self.renew(&mut shared, tenant, share);
        Ok(())
    }

    /// The same for the host that has the device, which takes what is promised to it; false where nothing is, or
    /// another tenant of that host has it.
    pub fn begin_own(&self, tenant: TenantId) -> bool {
        let mut shared = self.lock();
        let Some(share) = shared.admission.take_reserved(tenant.0.into()) else { return false };
        self.renew(&mut shared, tenant, share);
        true
    }

    /// A tenant of the host that has the device takes what is promised to that from now on; false as for
    /// [`begin_own`](PoolEngines::begin_own).
    pub fn set_own(&self, tenant: TenantId) -> bool {
        let mut shared = self.lock();
        let Some(share) = shared.admission.take_reserved(tenant.0.into()) else { return false };
        self.set(&mut shared, tenant, share);
        true
    }

    fn renew(&self, shared: &mut Shared, tenant: TenantId, share: TenantShare) {
        for message in shared.sharing.renew(tenant, share, self.now_ns()) {
            shared.jobs.remove(&message.tag);
        }
        shared.estimates.retain(|(of, _), _| *of != tenant);
        shared.note_largest(tenant);
        self.work.notify_all();
    }

    fn set(&self, shared: &mut Shared, tenant: TenantId, share: TenantShare) {
        shared.sharing.set(tenant, share, self.now_ns());
        shared.note_largest(tenant);
        self.work.notify_all();
    }

    /// Input bytes of a tenant's longest message, as its level says at any time.
    pub fn largest(&self, tenant: TenantId) -> Arc<AtomicU32> {
        let mut shared = self.lock();
        let largest = shared.largest.entry(tenant).or_insert_with(|| Arc::new(LARGEST.into()));
        let largest = largest.clone();
        shared.note_largest(tenant);
        largest
    }

    /// What could still be promised; nothing before the pool is started.
    pub fn room(&self) -> Option<LevelRoom> {
        self.started.get().map(|_| self.lock().admission.room())
    }

    /// The level that a tenant has.
    pub fn level(&self, tenant: TenantId) -> Option<ServiceLevel> {
        self.lock().admission.level(tenant.0.into()).cloned()
    }
}
