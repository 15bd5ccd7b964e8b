//! What a function's leases are promised and use: the counters when one begins, and what that makes of the counters
//! now.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use rackbus_control::api::{AcceleratorRoom, DeviceReport, device_of};
use rackbus_control::usage::LeaseReport;
use rackbus_lease::{Epoch, LeaseId, LenderAction};

use super::{LendError, Lent, LentFunctions};

/// The lease that has a function, and the one before.
#[derive(Debug, Default)]
pub(super) struct Tenancy {
    begun: Option<(LeaseId, DeviceReport)>,
    last: Option<LeaseReport>,
}

impl Tenancy {
    /// A lease begins, with the function's counters as they are.
    pub fn begin(&mut self, lease: LeaseId, counters: DeviceReport) {
        self.begun = Some((lease, counters));
    }

    /// The lease ends, with the function's counters as they are now.
    pub fn end(&mut self, counters: &DeviceReport) {
        let Some((lease, begun)) = self.begun.take() else { return };
        self.last = LeaseReport::between(lease, &begun, counters);
    }

    /// What the lease that has it used so far, and what the one before did. One of which the beginning was not seen
    /// (another process let its borrower in) is looked at from now on.
    pub fn reports(
        &mut self,
        lease: Option<LeaseId>,
        now: &DeviceReport,
    ) -> (Option<LeaseReport>, Option<LeaseReport>) {
        if let (Some(lease), None) = (lease, &self.begun) {
            self.begin(lease, now.clone());
        }
        let lease = self.begun.as_ref();
        let lease = lease.and_then(|(lease, begun)| LeaseReport::between(*lease, begun, now));
        (lease, self.last.clone())
    }
}

impl LentFunctions {
    /// Gives the borrower of `epoch` another service level while it continues. A level that cannot be kept changes
    /// nothing.
    pub fn change_level(
        &self,
        device: &str,
        epoch: Epoch,
        number: u64,
        level: Option<&str>,
    ) -> Vec<LenderAction> {
        let outcome = self.find(device).and_then(|lent| {
            // Held meanwhile: who attaches now finds one or the other in both places.
            let mut promised = lent.promised();
            lent.lendable.change_level(level).map_err(LendError::Level)?;
            *promised = level.map(str::to_owned);
            Ok(())
        });
        let outcome = outcome.map_err(|error| error.to_string());
        tracing::info!(device, level, ?outcome, "the service level was changed");
        self.fence.lock().level_done(device, epoch, number, outcome)
    }
}

impl LentFunctions {
    /// What accelerators could still promise, by the names of the devices. One function of each is asked.
    pub fn rooms(&self) -> BTreeMap<String, AcceleratorRoom> {
        let all = self.read().clone();
        let mut rooms = BTreeMap::new();
        for (name, lent) in all {
            let device = device_of(&name);
            if !rooms.contains_key(device)
                && let Some(room) = lent.lendable.room()
            {
                rooms.insert(device.to_owned(), AcceleratorRoom::of(&room));
            }
        }
        rooms
    }
}

impl Lent {
    /// What the function counts and how it is, now.
    pub(super) fn describe(&self) -> DeviceReport {
        self.lendable.describe(DeviceReport::default())
    }

    pub(super) fn tenancy(&self) -> MutexGuard<'_, Tenancy> {
        self.tenancy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
