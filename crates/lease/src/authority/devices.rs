//! Devices are offered and withdrawn while the rack runs.

use std::collections::BTreeMap;

use crate::device::{DeviceAnswer, DeviceChange, DeviceRefused};
use crate::message::{Epoch, FunctionId, Incarnation, LeaseId, Message, Millis};

use super::nodes::plausible_epoch;
use super::{
    Authority, Availability, Decision, EndReason, FunctionRecord, LeaseState, Record, Undo, put,
};

impl Authority {
    /// Offers a device of `change`'s host, which is said to its node until that has answered. Offering the same again
    /// changes nothing. The number is given here.
    ///
    /// # Errors
    /// [`DeviceRefused`]; nothing changes then.
    pub fn offer(
        &mut self,
        now: Millis,
        change: DeviceChange,
    ) -> Result<(LeaseId, Decision), DeviceRefused> {
        let now = self.enter(now);
        let key = (change.host.clone(), change.device.clone());
        match self.devices.get(&key) {
            Some(known) if known.section.is_none() && !self.is_answered(known) => {
                return Err(DeviceRefused::Leaving(change.name()));
            }
            Some(known) if known.section.is_some() && known.failure().is_none() => {
                let same = known.section == change.section && known.functions == change.functions;
                return match same {
                    true => Ok((known.number, Decision::default())),
                    false => Err(DeviceRefused::Exists(change.name())),
                };
            }
            _ => {}
        }
        let withdrawn = |function: FunctionId| {
            self.functions
                .get(&function)
                .is_none_or(|record| record.state == Availability::Withdrawn)
        };
        if !change.function_ids().all(withdrawn) {
            return Err(DeviceRefused::Exists(change.name()));
        }
        self.check_contact(now, &change.host)?;
        Ok((self.begin_change(change), self.take()))
    }

    /// Withdraws a device: nobody borrows its functions any more, and when all of them are back, its node is told to
    /// released it. Where `force` says so, leases that have them are ended, in order. Withdrawing again changes nothing
    /// else.
    ///
    /// # Errors
    /// [`DeviceRefused::Held`] without `force`; nothing changes then.
    pub fn withdraw(
        &mut self,
        now: Millis,
        change: DeviceChange,
        force: bool,
    ) -> Result<(LeaseId, Decision), DeviceRefused> {
        let now = self.enter(now);
        let mut leases = Vec::new();
        for function in change.function_ids() {
            let shares = self.ring(&function).len();
            if shares > 0 && !force {
                return Err(DeviceRefused::Shared { function, shares });
            }
            let state = self.functions.get(&function).map(|record| &record.state);
            let Some(Availability::Lent { lease }) = state else { continue };
            let record = &self.leases[lease];
            if !force {
                let (borrower, lease) = (record.borrower.clone(), *lease);
                return Err(DeviceRefused::Held { function, borrower, lease });
            }
            leases.push((*lease, matches!(record.state, LeaseState::Closing { .. })));
        }
        for (lease, closing) in leases {
            match closing {
                true => self.hasten(now, lease, self.config.close_grace),
                false => self.close(now, lease, EndReason::Withdrawn, None),
            }
        }
        change.function_ids().for_each(|function| self.end_shares_of(now, &function));
        let key = (change.host.clone(), change.device.clone());
        let number = match self.devices.get(&key).filter(|known| known.section.is_none()) {
            Some(known) => known.number,
            None => self.begin_change(DeviceChange { section: None, ..change }),
        };
        Ok((number, self.take()))
    }

    /// The rack file is read anew: `listed` has what it says of a device, and the names of its functions. Changes that it
    /// has overtaken are forgotten: of devices that it lists or describes otherwise than when they were made.
    pub fn relist<'a>(
        &mut self,
        now: Millis,
        listed: impl Fn(&str, &str) -> Option<(&'a str, &'a [String])>,
    ) -> Decision {
        self.enter(now);
        let overtaken = |change: &&DeviceChange| {
            let described = change.section.as_deref().or(change.was.as_deref());
            match listed(&change.host, &change.device) {
                None => change.listed,
                Some(is) => !change.listed || described != Some(is.0) || change.functions != is.1,
            }
        };
        let overtaken: Vec<_> = self.devices.values().filter(overtaken).cloned().collect();
        overtaken.into_iter().for_each(|change| self.remove_device(change));
        self.take()
    }

    /// The devices that differ from what the rack file lists, in the order of hosts and names.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceChange> {
        self.devices.values()
    }

    /// Whether the function may be lent, as far as its device's changes say.
    pub(super) fn is_withdrawn(&self, function: &FunctionId) -> bool {
        let withdrawn = |change: &&DeviceChange| change.section.is_none() && change.has(function);
        self.devices.values().find(withdrawn).is_some()
    }

    /// Whether its host's node has still to take it on.
    pub(super) fn is_joining(&self, function: &FunctionId) -> bool {
        let joins = |change: &&DeviceChange| change.section.is_some() && change.has(function);
        self.devices.values().find(joins).is_some_and(|change| !self.is_answered(change))
    }

    /// Whether the node, in its newest life, has answered.
    pub(super) fn is_answered(&self, change: &DeviceChange) -> bool {
        let life = self.hosts.get(&change.host).map(|host| host.incarnation);
        change.answer_in(life).is_some()
    }

    /// The node knows another change by this one's number, which records that were lost had: it needs a later one.
    fn change_again(&mut self, change: DeviceChange) {
        self.begin_change(change);
    }

    fn begin_change(&mut self, change: DeviceChange) -> LeaseId {
        let number = self.next_lease;
        self.set_next_lease(number.saturating_add(1));
        let host = change.host.clone();
        self.put_device(DeviceChange { number, answer: None, ..change });
        self.say_devices(&host);
        number
    }

    /// A node says which functions it has. Where that contradicts what it answered, the records are an older copy; and
    /// one that was not answered may have the number of another, which was lost. Both are made again, with a number
    /// above all that the node was told of. `newest_lease` is the newest number that the node knows, where it came back
    /// to records that may be an older copy: later on, what it does not answer takes it long, and has no other number.
    pub(super) fn check_devices(
        &mut self,
        host: &str,
        devices: &BTreeMap<String, Epoch>,
        newest_lease: Option<LeaseId>,
    ) {
        let gone = |record: &&FunctionRecord| {
            let offered = record.state == Availability::Offered;
            offered && !devices.contains_key(&record.function.device)
        };
        let gone: Vec<_> = self.functions.of_host(host).filter(gone).cloned().collect();
        for record in gone {
            self.put_function(FunctionRecord { state: Availability::Withdrawn, ..record });
        }
        let contradicted = |change: &&DeviceChange| {
            if change.host != host || !self.is_answered(change) {
                let newer = newest_lease.is_some_and(|newest| change.number < newest);
                return change.host == host && newer;
            }
            let has = |name: &String| devices.contains_key(name);
            let fits = match change.section {
                Some(_) if change.failure().is_none() => change.functions.iter().all(has),
                _ => !change.functions.iter().any(has),
            };
            !fits
        };
        let again: Vec<_> = self.devices.values().filter(contradicted).cloned().collect();
        for change in again {
            self.begin_change(change);
        }
    }

    /// Says (again) to a node what it has not answered, where that can be done now.
    pub(super) fn say_devices(&mut self, host: &str) {
        if !self.is_registered(host) {
            return;
        }
        let Some(incarnation) = self.hosts.get(host).map(|host| host.incarnation) else { return };
        let waiting = |change: &&DeviceChange| change.host == host && !self.is_answered(change);
        let waiting: Vec<DeviceChange> =
            self.devices.values().filter(waiting).filter(|it| self.is_free(it)).cloned().collect();
        for change in waiting {
            let DeviceChange { device, number, functions, section, .. } = change;
            let message = match section {
                Some(section) => Message::Offer { incarnation, device, number, functions, section },
                None => Message::Withdraw { incarnation, device, number, functions },
            };
            self.send(host, message);
        }
    }

    /// Whether its functions are in nobody's hands, where that matters.
    fn is_free(&self, change: &DeviceChange) -> bool {
        let free = |function: FunctionId| {
            let state = self.functions.get(&function).map(|record| &record.state);
            !matches!(state, Some(Availability::Lent { .. } | Availability::Revoking { .. }))
        };
        change.section.is_some() || change.function_ids().all(free)
    }

    /// Whether something is to be said again to a node that is there.
    pub(super) fn devices_wait(&self) -> bool {
        self.devices.values().any(|change| {
            let contact = self.contacts.get(&change.host);
            !self.is_answered(change) && contact.is_some_and(|contact| contact.registered)
        })
    }

    /// A node lends a device from now on, or cannot.
    pub(super) fn device_offered(
        &mut self,
        host: &str,
        life: Incarnation,
        (device, number): (String, LeaseId),
        outcome: Result<BTreeMap<String, Epoch>, String>,
    ) {
        let Some(change) = self.asked(host, life, &device, number) else { return };
        if change.section.is_none() {
            return self.change_again(change);
        }
        if let Ok(newest) = &outcome {
            for function in change.function_ids() {
                let newest = newest.get(&function.device).copied().unwrap_or(0);
                let known = self.functions.get(&function);
                let epoch = plausible_epoch(known.map_or(0, |record| record.epoch), newest);
                let lendable = known.is_none_or(|it| it.state == Availability::Withdrawn);
                if lendable {
                    let state = Availability::Offered;
                    self.put_function(FunctionRecord { function, epoch, state });
                }
            }
        }
        let answer = Some(DeviceAnswer { incarnation: life, outcome: outcome.map(drop) });
        self.put_device(DeviceChange { answer, ..change });
    }

    /// A node has released a device.
    pub(super) fn device_withdrawn(
        &mut self,
        host: &str,
        life: Incarnation,
        device: &str,
        number: LeaseId,
    ) {
        let Some(change) = self.asked(host, life, device, number) else { return };
        if change.section.is_some() {
            return self.change_again(change);
        }
        for function in change.function_ids() {
            let offered = |it: &&FunctionRecord| it.state == Availability::Offered;
            if let Some(record) = self.functions.get(&function).filter(offered) {
                let state = Availability::Withdrawn;
                self.put_function(FunctionRecord { state, ..record.clone() });
            }
        }
        if change.listed {
            let answer = Some(DeviceAnswer { incarnation: life, outcome: Ok(()) });
            return self.put_device(DeviceChange { answer, ..change });
        }
        // No life of the node knows it any more.
        self.remove_device(change);
    }

    pub(super) fn remove_device(&mut self, change: DeviceChange) {
        let key = (change.host.clone(), change.device.clone());
        let before = self.devices.remove(&key);
        self.undo.push(Undo::Device(key, before));
        let (host, device) = (change.host, change.device);
        self.outcome.records.push(Record::DeviceRemoved { host, device });
    }

    /// The change that is meant, if this life of the node is to answer it.
    fn asked(
        &self,
        host: &str,
        life: Incarnation,
        device: &str,
        number: LeaseId,
    ) -> Option<DeviceChange> {
        let current = self.hosts.get(host)?.incarnation == life;
        let change = self.devices.get(&(host.to_owned(), device.to_owned()))?;
        let asked = current && change.number == number && !self.is_answered(change);
        asked.then(|| change.clone())
    }

    fn put_device(&mut self, change: DeviceChange) {
        self.outcome.records.push(Record::Device(change.clone()));
        let key = (change.host.clone(), change.device.clone());
        let before = put(&mut self.devices, key.clone(), Some(change));
        self.undo.push(Undo::Device(key, before));
    }
}
