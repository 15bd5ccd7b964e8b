//! The accelerators that a borrower may be lent: what is known of each, as [`rackbus_qos::choice`] decides by it.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{Availability, FunctionId, Placement, Priority, Terms};
use rackbus_qos::{CandidateDevice, CandidateFunction, ServiceLevel};
use tokio::time::Instant;

use super::super::known::RackState;
use super::super::leases::PATIENCE;
use super::super::{InventoryDevice, WriterShared};
use crate::api::{ApiError, BorrowRequest, device_of};

/// Whether a function has engines that are promised by service levels, whatever its class.
fn has_engines(device: &InventoryDevice) -> bool {
    device.capabilities.contains(&DeviceCapability::Engines)
}

/// Whether a function is an accelerator's, and may be lent to `borrower` so.
fn is_candidate(device: &InventoryDevice, placement: Placement, borrower: &str) -> bool {
    has_engines(device) && device.serves(placement, borrower)
}

/// A level that somebody was promised, where it can be read.
fn read(level: Option<&String>) -> Option<ServiceLevel> {
    level?.parse().ok()
}

impl WriterShared {
    /// Refuses terms on which no accelerator of the rack can be lent, for the reason that the first one has.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(super) fn check_candidates(&self, terms: &Terms, borrower: &str) -> Result<(), ApiError> {
        let inventory = self.inventory();
        let is_candidate =
            |device: &InventoryDevice| is_candidate(device, terms.placement, borrower);
        let mut all = inventory.devices.iter().filter(|device| has_engines(device));
        match all.next() {
            Some(first) if !is_candidate(first) && !all.any(is_candidate) => {
                let function = std::slice::from_ref(&first.function);
                self.check_placement(function, terms.placement, borrower)
            }
            _ => Ok(()),
        }
    }

    /// The accelerators that can be lent on these terms, with all that is known of them now.
    pub(super) fn candidates(
        &self,
        request: &BorrowRequest,
        terms: &Terms,
    ) -> Vec<CandidateDevice> {
        let inventory = self.inventory();
        let known = self.known();
        let in_turns = in_turns(&known);
        let mut devices = BTreeMap::<String, CandidateDevice>::new();
        let mut said = BTreeMap::new();
        for InventoryDevice { function, .. } in inventory
            .devices
            .iter()
            .filter(|device| is_candidate(device, terms.placement, &request.borrower))
        {
            let text = function.to_string();
            let name = device_of(&text);
            if !devices.contains_key(name) {
                let report = known.reports.get(&function.host);
                let report = report.filter(|_| known.listens(&function.host));
                let room = report.and_then(|it| it.accelerators.get(device_of(&function.device)));
                room.map(|room| said.insert(name.to_owned(), room.clone()));
                let (name, functions) = (name.to_owned(), Vec::new());
                devices.insert(name.clone(), CandidateDevice { name, functions, room: None });
            }
            let candidate = CandidateFunction {
                free: self.is_free(&known, &in_turns, function, request.priority),
                counted: read(known.report(function).and_then(|report| report.level.as_ref())),
                promised: promised(&known, function),
                name: text.clone(),
            };
            if let Some(device) = devices.get_mut(name) {
                device.functions.push(candidate);
            }
        }
        drop(known);
        for (name, room) in said {
            if let (Some(device), Ok(room)) = (devices.get_mut(&name), room.room()) {
                device.room = Some(room);
            }
        }
        devices.into_values().collect()
    }

    /// Whether the node of `borrower` is there. Just after a start the nodes are on their way: then it is waited for those
    /// that have accelerators as well, or functions would seem to be nobody's to lend.
    pub(super) async fn nodes_come(&self, borrower: &str) -> bool {
        let until = Instant::from_std(self.clock.begun) + PATIENCE;
        let all_there = |known: &RackState| {
            let inventory = self.inventory();
            let mut all = inventory.devices.iter().filter(|device| has_engines(device));
            let there = all.all(|device| known.listens(&device.function.host));
            (there && known.listens(borrower)).then_some(())
        };
        // Where one does not come, the others are asked.
        let _ = self.wait(until, all_there).await;
        self.known().listens(borrower)
    }

    /// Waits until an accelerator has a function free; false where none has until then.
    pub(super) async fn free_accelerator(&self, request: &BorrowRequest, until: Instant) -> bool {
        let free = self.wait(until, |known| {
            let (inventory, in_turns) = (self.inventory(), in_turns(known));
            let all = inventory.devices.iter().filter(|device| has_engines(device));
            { all }
                .any(|it| self.is_free(known, &in_turns, &it.function, request.priority))
                .then_some(())
        });
        free.await.is_some()
    }

    /// Whether a function can be lent now to who asks with this priority.
    fn is_free(
        &self,
        known: &RackState,
        in_turns: &BTreeSet<&FunctionId>,
        function: &FunctionId,
        priority: Priority,
    ) -> bool {
        let record = known.functions.get(function);
        record.is_some_and(|record| record.state == Availability::Offered)
            && known.listens(&function.host)
            && !known.is_leaving(function)
            && !in_turns.contains(function)
            && self.queue().before_newcomer(function, priority) == 0
    }
}

/// The functions on which borrowers take turns.
fn in_turns(known: &RackState) -> BTreeSet<&FunctionId> {
    known.shares.values().map(|share| &share.function).collect()
}

/// The level that the lease of a function has, or is to have.
fn promised(known: &RackState, function: &FunctionId) -> Option<ServiceLevel> {
    match known.functions.get(function)?.state {
        Availability::Lent { lease } => read(known.leases.get(&lease)?.level.as_ref()),
        _ => None,
    }
}
