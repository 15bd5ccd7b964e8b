//! What a function's leases use: the counters when one begins, and what that makes of the counters now.

use rackbus_control::api::DeviceReport;
use rackbus_control::usage::LeaseReport;
use rackbus_lease::LeaseId;

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

    /// It ends.
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
