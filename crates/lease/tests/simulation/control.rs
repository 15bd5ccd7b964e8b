//! The control plane's side: decides, stores and sends as it does, and checks what is stored.

use std::collections::BTreeMap;

use rackbus_lease::{
    ArmedFor, Authority, Availability, Decision, DeviceChange, EndReason, FunctionId, LeaseId,
    LeaseRecord, LeaseState, Millis, Record,
};

use crate::patience::Patience;
use crate::world::{Node, World, config, host_index, placement};
use crate::{AUTHORITY, CONFIG, Mistake};

/// What an authority has to know again when it returns.
fn known(authority: &Authority) -> Vec<Record> {
    let hosts = authority.hosts().map(|(host, _)| Record::Host(host.clone()));
    let functions = authority.functions().cloned().map(Record::Function);
    let leases = authority.leases().cloned().map(|mut lease| {
        // One that returns asks the lender again.
        if lease.state == LeaseState::Opening {
            lease.state = LeaseState::Arming;
        }
        Record::Lease(lease)
    });
    let devices = authority.devices().cloned().map(Record::Device);
    let shares = authority.shares().cloned().map(|share| Record::Share(Box::new(share)));
    hosts.chain(functions).chain(leases).chain(devices).chain(shares).collect()
}

/// A device of alpha's that has one function.
fn device_of_alpha(device: &str) -> DeviceChange {
    DeviceChange {
        host: "alpha".to_owned(),
        device: device.to_owned(),
        number: 0,
        functions: vec![device.to_owned()],
        section: Some(format!("# {device}")),
        was: None,
        by_node: false,
        listed: device != "extra",
        answer: None,
    }
}

impl World {
    /// One step of the authority: decide, store, send; as the control plane does it.
    pub fn decide<R>(
        &mut self,
        decide: impl FnOnce(&mut Authority, Millis) -> (R, Decision),
    ) -> Result<Option<R>, String> {
        if self.frozen_until > self.now {
            return Ok(None);
        }
        let Some(mut authority) = self.authority.take() else {
            return Ok(None);
        };
        // Now and then the clock was read before somebody else's step.
        let late = if self.faults && self.random.chance(5) { self.random.next() % 200 } else { 0 };
        if self.mistake == Mistake::Sleepwalker {
            self.sleepwalk(&mut authority)?;
        }
        let now = self.now.saturating_sub(late);
        // Several steps may be stored together.
        let together = self.faults && self.random.chance(10);
        let mut outcome = if together { authority.tick(now) } else { Decision::default() };
        let (answer, last) = decide(&mut authority, now);
        outcome.append(last);
        self.patience.pass(now);
        let answer = self.store_and_send(&mut authority, outcome)?.then_some(answer);
        // What is to be expired is, unless that cannot be stored.
        self.authority.get_or_insert(authority);
        Ok(answer)
    }

    /// What the authority knows is what is stored, neither more nor less.
    pub fn check_stored(&self, authority: &Authority) -> Result<(), String> {
        let records = self.stored.values().cloned();
        let stored = known(&Authority::restore(config(self.strict), self.now, records));
        let known = known(authority);
        match known.iter().find(|record| !stored.contains(record)) {
            _ if known == stored => Ok(()),
            Some(record) => Err(format!("not stored: {record:?}")),
            None => Err("more is stored than is known".to_owned()),
        }
    }

    /// Has the authority believe that it was awake all the time, as it did when it did not ask.
    pub fn sleepwalk(&mut self, authority: &mut Authority) -> Result<(), String> {
        while let Some(at) = authority.next_tick().filter(|at| *at < self.now) {
            let outcome = authority.tick(at);
            if !self.store_and_send(authority, outcome)? {
                break;
            }
        }
        Ok(())
    }

    pub fn store_and_send(
        &mut self,
        authority: &mut Authority,
        outcome: Decision,
    ) -> Result<bool, String> {
        if !outcome.records.is_empty() && self.store_fails_until > self.now {
            self.note(|| "the store fails".into());
            match self.mistake {
                Mistake::FreshStart => {
                    let records = self.stored.values().cloned();
                    *authority = Authority::restore(config(self.strict), self.now, records);
                }
                _ => {
                    authority.take_back();
                    self.check_stored(authority)?;
                }
            }
            return Ok(false);
        }
        authority.settle();
        for record in outcome.records {
            if let Record::Lease(lease) = &record {
                self.check_lease(lease)?;
            }
            match &record {
                removed if removed.removes() => self.stored.remove(&record.key()),
                _ => self.stored.insert(record.key(), record),
            };
        }
        for (host, message) in outcome.messages {
            self.send(AUTHORITY, host_index(&host), message);
        }
        Ok(true)
    }

    /// A lease's new state, about to be stored.
    pub fn check_lease(&mut self, lease: &LeaseRecord) -> Result<(), String> {
        let number = lease.lease;
        match &lease.state {
            // Its lender may say of a level that the records do not know of: that renews nothing.
            LeaseState::Arming if self.stored.contains_key(&Record::Lease(lease.clone()).key()) => {
            }
            LeaseState::Arming => self.patience.begin(number),
            LeaseState::Active { .. } => {
                let before = self.stored.get(&Record::Lease(lease.clone()).key());
                // A change of its level renews nothing.
                if !matches!(before, Some(Record::Lease(l)) if l.state == LeaseState::Opening) {
                    return Ok(());
                }
                self.patience.begin(number);
                let function = &lease.function;
                let Some(Record::Host(life)) = self.stored.get(&format!("host/{}", function.host))
                else {
                    return Err(format!("{function} is lent by nobody"));
                };
                let node = self.nodes[host_index(&function.host)].as_ref();
                let Some(node) = node.filter(|n| n.incarnation == life.incarnation) else {
                    return Ok(());
                };
                let (epoch, borrower) = (lease.epoch, lease.borrower.clone());
                let placement = lease.placement;
                let wanted = ArmedFor { lease: number, epoch, borrower, placement };
                let admitted = node.lender.admitted(&function.device);
                // What its borrower has said may be late, and both have ended it since by their clocks.
                let host = host_index(&function.host);
                let has_ended = self.clocks.has_ended(host, &function.device, epoch);
                if admitted != Some(&wanted) && !has_ended {
                    return Err(format!("active, but not let in: {wanted:?}, but {admitted:?}"));
                }
            }
            LeaseState::Ended { reason: EndReason::Expired } => self.patience.expired(number)?,
            LeaseState::Closing { .. } | LeaseState::Ended { .. } => self.patience.end(number),
            LeaseState::Opening => {}
        }
        Ok(())
    }

    pub fn live(&self) -> Vec<LeaseId> {
        let leases = self.authority.iter().flat_map(Authority::leases);
        leases.filter(|l| l.is_live()).map(|l| l.lease).collect()
    }

    pub fn give_back(&mut self, lease: LeaseId) -> Result<(), String> {
        // A user that does not release it in time loses it.
        let within = (self.random.below(4) == 0).then(|| self.random.below(3000) as u64);
        let give_back =
            |a: &mut Authority, now| ((), a.give_back(now, lease, within).unwrap_or_default());
        self.decide(give_back).map(drop)
    }

    /// Asks for another service level of a lease.
    pub fn change_level(&mut self, lease: LeaseId) -> Result<(), String> {
        let level = Some(self.random.below(4).to_string());
        self.note(|| format!("lease {lease} is to have the level {level:?}"));
        let change =
            |a: &mut Authority, now| ((), a.change_level(now, lease, level).unwrap_or_default());
        self.decide(change).map(drop)
    }

    /// Offers a device, or withdraws one: one that the rack file lists, or another.
    pub fn change_device(&mut self) -> Result<(), String> {
        let device = if self.random.chance(30) { "nvme0" } else { "extra" };
        if self.random.chance(50) {
            return self.offer(device);
        }
        let (change, force) = (device_of_alpha(device), self.random.chance(50));
        self.note(|| format!("alpha/{device} is to be withdrawn, force {force}"));
        let withdraw = |a: &mut Authority, now| match a.withdraw(now, change, force) {
            Ok((_, outcome)) => ((), outcome),
            Err(_) => ((), Decision::default()),
        };
        self.decide(withdraw).map(drop)
    }

    /// Offers a device of alpha's.
    pub fn offer(&mut self, device: &str) -> Result<(), String> {
        self.note(|| format!("alpha/{device} is offered"));
        let change = device_of_alpha(device);
        let offer = |a: &mut Authority, now| match a.offer(now, change) {
            Ok((_, outcome)) => ((), outcome),
            Err(_) => ((), Decision::default()),
        };
        self.decide(offer).map(drop)
    }

    /// What the records say that nodes have, they have, and what was withdrawn they have not. Every node has
    /// registered since the last fault, and what was said to it has arrived.
    pub fn check_devices(&self) -> Result<(), String> {
        let Some(authority) = &self.authority else { return Err("there is no authority".into()) };
        let has = |function: &FunctionId| {
            let node = self.nodes[host_index(&function.host)].as_ref();
            let lends = |node: &Node| node.lender.newest_epochs().contains_key(&function.device);
            node.is_some_and(|it| lends(it) && it.devices.contains_key(&function.device))
        };
        for change in authority.devices() {
            let there = change.function_ids().all(|function| has(&function));
            if there != (change.section.is_some() && change.failure().is_none()) {
                return Err(format!("the node of {}: {there}, not as in {change:?}", change.host));
            }
        }
        for function in authority.functions() {
            if function.state == Availability::Offered && !has(&function.function) {
                return Err(format!("{} is offered, and its node has none", function.function));
            }
        }
        Ok(())
    }

    /// What the records say that borrowers have is what their lenders gave them, when no change is under way.
    pub fn check_levels(&self) -> Result<(), String> {
        let active = |lease: &&LeaseRecord| matches!(lease.state, LeaseState::Active { .. });
        let leases = self.authority.iter().flat_map(Authority::leases).filter(active);
        for lease in leases {
            let LeaseRecord { function, epoch, level, change, .. } = lease;
            let Some(node) = &self.nodes[host_index(&function.host)] else { continue };
            let armed = node.lender.admitted(&function.device).map(|holder| holder.epoch);
            let has = &node.devices[&function.device].level;
            if armed == Some(*epoch) && lease.asked_level().is_none() && has != level {
                return Err(format!(
                    "{function} has the level {has:?}, not {level:?} ({change:?})"
                ));
            }
        }
        Ok(())
    }

    /// Borrows; `None` when that was not decided, or is not stored.
    pub fn borrow(
        &mut self,
        function: &FunctionId,
        borrower: &str,
    ) -> Result<Option<Result<LeaseId, String>>, String> {
        self.decide(|a, now| match a.borrow(now, function, borrower, placement(borrower)) {
            Ok((lease, outcome)) => (Ok(lease), outcome),
            Err(refused) => (Err(refused.to_string()), Decision::default()),
        })
    }

    pub fn restore_authority(&mut self) {
        self.note(|| "authority returns".into());
        self.frozen_until = 0;
        let records = self.stored.values().cloned();
        let authority = Authority::restore(config(self.strict), self.now, records);
        self.patience = Patience::new(CONFIG, self.now);
        authority.leases().filter(|l| l.is_live()).for_each(|l| self.patience.begin(l.lease));
        self.authority = Some(authority);
        // Nodes that find a control plane say who they are.
        for node in self.nodes.iter_mut().flatten() {
            node.registered = false;
            node.register_at = self.now;
        }
    }

    /// The control plane ends, and its successor finds nothing, or an older copy. That takes longer
    /// than a message lives: they end with their connections.
    pub fn lose_database(&mut self) {
        let lost = self.random.chance(50);
        self.note(|| format!("the database is {}", if lost { "lost" } else { "replaced" }));
        self.stored = if lost { BTreeMap::new() } else { self.backup.clone() };
        self.network.clear();
        self.restore_authority();
    }
}
