//! What a function's leases are promised and use: the counters when one begins, and what that makes of the counters
//! now.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use rackbus_control::api::{AcceleratorRoom, DeviceReport, device_of};
use rackbus_control::usage::{LeaseReport, began_anew};
use rackbus_lease::{Epoch, LeaseId, LenderAction};

use super::{LendError, LentFunction, LentFunctions};

/// The lease that has a function, and the one before.
#[derive(Debug, Default)]
pub(super) struct Tenancy {
    begun: Option<BegunLease>,
    last: Option<LeaseReport>,
}

/// A lease that has a function.
#[derive(Debug)]
struct BegunLease {
    lease: LeaseId,
    /// The function's counters when the lease began, or the function did so anew.
    from: DeviceReport,
    /// The same as they were seen last.
    seen: DeviceReport,
    /// What it used before the function began anew.
    before: Option<LeaseReport>,
}

impl BegunLease {
    fn new(lease: LeaseId, from: DeviceReport) -> BegunLease {
        BegunLease { lease, seen: from.clone(), from, before: None }
    }

    /// What it used so far. A function whose model failed and was begun anew counts from the beginning: what it had
    /// counted when it was seen last is added to that.
    fn used(&mut self, now: &DeviceReport) -> Option<LeaseReport> {
        if began_anew(&self.seen, now) {
            let seen = std::mem::take(&mut self.seen);
            self.before = self.since(&seen);
            self.from = DeviceReport::default();
        }
        self.seen = now.clone();
        self.since(now)
    }

    fn since(&self, now: &DeviceReport) -> Option<LeaseReport> {
        let since = LeaseReport::between(self.lease, &self.from, now);
        match (&self.before, since) {
            (Some(before), Some(since)) => Some(since.after(before)),
            // Nothing is counted while the function cannot be begun.
            (before, since) => since.or_else(|| before.clone()),
        }
    }
}

impl Tenancy {
    /// A lease begins, with the function's counters as they are.
    pub fn begin(&mut self, lease: LeaseId, counters: DeviceReport) {
        self.begun = Some(BegunLease::new(lease, counters));
    }

    /// The lease ends, with the function's counters as they are now.
    pub fn end(&mut self, counters: &DeviceReport) {
        let Some(mut begun) = self.begun.take() else { return };
        self.last = begun.used(counters);
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
        let lease = self.begun.as_mut().and_then(|begun| begun.used(now));
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

impl LentFunction {
    /// What the function counts and how it is, now.
    pub(super) fn describe(&self) -> DeviceReport {
        self.lendable.describe(DeviceReport::default())
    }

    pub(super) fn tenancy(&self) -> MutexGuard<'_, Tenancy> {
        self.tenancy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rackbus_control::api::OperationReport;

    use super::*;

    fn counters(done: u64, engine_ns: u64) -> DeviceReport {
        let counts = OperationReport { done, ..OperationReport::default() };
        DeviceReport {
            operations: [("zstd".to_owned(), counts)].into(),
            shaping: [("engine_ns".to_owned(), engine_ns)].into(),
            ..DeviceReport::default()
        }
    }

    /// The lease continues, and its function counts from 0 again.
    #[test]
    fn a_lease_used_what_was_counted_before_its_function_began_anew_too() {
        let used = |report: Option<LeaseReport>| {
            report.map(|report| (report.all_operations().done, report.shaped("engine_ns")))
        };
        let mut tenancy = Tenancy::default();
        tenancy.begin(1, counters(100, 1000));
        let mut report = |now: &DeviceReport| used(tenancy.reports(Some(1), now).0);
        assert_eq!(report(&counters(150, 1700)), Some((50, 700)));
        assert_eq!(report(&counters(2, 30)), Some((52, 730)));
        assert_eq!(report(&counters(9, 90)), Some((59, 790)));
        // While it cannot be begun, nothing is counted; and then for a third time from 0.
        assert_eq!(report(&DeviceReport::default()), Some((59, 790)));
        assert_eq!(report(&counters(120, 1200)), Some((179, 1990)));
        tenancy.end(&counters(1, 10));
        assert_eq!(used(tenancy.last.clone()), Some((180, 2000)));
        // The next one has nothing of that.
        tenancy.begin(2, counters(1, 10));
        assert_eq!(used(tenancy.reports(Some(2), &counters(4, 50)).0), Some((3, 40)));
    }
}
