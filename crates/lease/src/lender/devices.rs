//! Devices that the lender is told of while it runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::message::{Epoch, LeaseId, Message};

use super::{Lender, LenderAction, State};

/// The newest change of a device that this lender was told of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewestChange {
    pub(super) number: LeaseId,
    functions: Vec<String>,
    /// What the rack file would say of it; none where it is withdrawn.
    section: Option<String>,
    /// Whether it was carried out, or why not; none while the node is working on it.
    outcome: Option<Result<(), String>>,
    /// Whether the node took the device on as `section` says. Where it had the functions already, it kept them as they were.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    taken_on: bool,
}

/// A device that was offered since the node began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToldDevice<'a> {
    /// Its name on the host.
    pub device: &'a str,
    /// What the rack file would say of it.
    pub section: &'a str,
    /// Names of its functions on the host.
    pub functions: &'a [String],
    /// Whether the node took it on as `section` says, also where the rack file says otherwise. What was not taken on, the
    /// rack file lists, or it was offered by a program that did not write this down.
    pub taken_on: bool,
}

impl NewestChange {
    /// Whether it offers something else than `section` says.
    fn offers_other(&self, section: &str) -> bool {
        self.section.as_deref().is_some_and(|own| own != section)
    }
}

/// The changes of devices that a lender was told of since its node began.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeviceChanges {
    told: BTreeMap<String, NewestChange>,
    /// Functions that were withdrawn, each with the newest epoch that this lender was told of: one of the same name
    /// continues from there.
    withdrawn: BTreeMap<String, Epoch>,
}

impl DeviceChanges {
    /// A device that the node is taking on or releasing.
    pub(super) fn under_way(&self) -> Option<&String> {
        self.told.iter().find(|(_, told)| told.outcome.is_none()).map(|(device, _)| device)
    }

    /// The greatest number of a change.
    pub(super) fn newest(&self) -> LeaseId {
        self.told.values().map(|told| told.number).max().unwrap_or(0)
    }
}

impl Lender {
    /// The devices that were offered since the node began: another process that continues with this value has to have
    /// them too.
    pub fn offered(&self) -> impl Iterator<Item = ToldDevice<'_>> {
        self.changes.told.iter().filter_map(|(device, told)| {
            let NewestChange { functions, section, outcome: Some(Ok(())), taken_on, .. } = told
            else {
                return None;
            };
            let (section, taken_on) = (section.as_deref()?, *taken_on);
            Some(ToldDevice { device, section, functions, taken_on })
        })
    }

    /// The functions of the rack file that this lender was told to release.
    pub fn is_withdrawn(&self, function: &str) -> bool {
        !self.devices.contains_key(function) && self.changes.withdrawn.contains_key(function)
    }

    pub(super) fn offer(
        &mut self,
        device: String,
        number: LeaseId,
        functions: Vec<String>,
        section: String,
    ) -> Vec<LenderAction> {
        let known = self.changes.told.get(&device);
        if known.is_some_and(|told| told.number == number && told.offers_other(&section)) {
            let incarnation = self.incarnation;
            let outcome = Err(format!("there is another device {device}; withdraw that first"));
            return vec![LenderAction::Send(Message::Offered {
                incarnation,
                device,
                number,
                outcome,
            })];
        }
        if let Some(answer) = self.known_change(&device, number) {
            return answer;
        }
        let same = known.is_some_and(|told| told.section.as_ref() == Some(&section));
        let from_file = known.is_none();
        let taken_on = same && known.is_some_and(|told| told.taken_on);
        let here = functions.iter().filter(|name| self.devices.contains_key(*name)).count();
        let outcome = match here {
            0 => None,
            // The rack file lists it, or an authority that lost its records offers it once more.
            all if all == functions.len() && (same || from_file) => Some(Ok(())),
            _ => Some(Err(format!("there is another device {device}; withdraw that first"))),
        };
        let told = NewestChange {
            number,
            functions,
            section: Some(section.clone()),
            outcome: outcome.clone(),
            taken_on,
        };
        match outcome {
            Some(Err(reason)) => {
                let (incarnation, outcome) = (self.incarnation, Err(reason));
                vec![LenderAction::Send(Message::Offered { incarnation, device, number, outcome })]
            }
            Some(Ok(())) => {
                self.changes.told.insert(device.clone(), told);
                vec![self.answer(&device)]
            }
            None => {
                self.changes.told.insert(device.clone(), told);
                vec![LenderAction::Offer { device, number, section }]
            }
        }
    }

    /// The node has the device ready, or cannot have it: then it is as if it had never been offered.
    pub fn offer_done(
        &mut self,
        device: &str,
        number: LeaseId,
        outcome: Result<(), String>,
    ) -> Vec<LenderAction> {
        let Some(told) = self.at_work(device, number) else { return Vec::new() };
        let functions = told.functions.clone();
        told.outcome = Some(outcome.clone());
        told.taken_on = outcome.is_ok();
        if outcome.is_ok() {
            for function in functions {
                let newest = self.changes.withdrawn.remove(&function).unwrap_or(0);
                self.add_from(function, newest);
            }
        }
        vec![self.answer(device)]
    }

    pub(super) fn withdraw(
        &mut self,
        device: String,
        number: LeaseId,
        functions: Vec<String>,
    ) -> Vec<LenderAction> {
        if let Some(answer) = self.known_change(&device, number) {
            return answer;
        }
        let mut actions = Vec::new();
        for function in &functions {
            let Some(entry) = self.devices.get_mut(function) else { continue };
            match &entry.state {
                State::Free if entry.attached.is_none() => {}
                // An authority that knew of it would have had it taken back: it has lost its records.
                State::Armed(holder) | State::Arming(holder) => {
                    let (device, epoch, lease) =
                        (function.clone(), holder.epoch, Some(holder.lease));
                    entry.state = State::Revoking(epoch);
                    actions.push(LenderAction::Revoke { device, epoch, lease });
                }
                State::Free | State::Revoking(_) => return actions,
            }
        }
        if !actions.is_empty() {
            // The authority says it again.
            return actions;
        }
        let gone: BTreeSet<String> = functions.iter().cloned().collect();
        for function in gone {
            if let Some(entry) = self.devices.remove(&function) {
                self.changes.withdrawn.insert(function, entry.newest);
            }
        }
        let (section, outcome, taken_on) = (None, None, false);
        let told =
            NewestChange { number, functions: functions.clone(), section, outcome, taken_on };
        self.changes.told.insert(device.clone(), told);
        vec![LenderAction::Withdraw { device, number, functions }]
    }

    /// The node has released the device.
    pub fn withdraw_done(&mut self, device: &str, number: LeaseId) -> Vec<LenderAction> {
        let Some(told) = self.at_work(device, number) else { return Vec::new() };
        told.outcome = Some(Ok(()));
        vec![self.answer(device)]
    }

    /// What to say to a change that is not news; nothing where it is.
    fn known_change(&self, device: &str, number: LeaseId) -> Option<Vec<LenderAction>> {
        let told = self.changes.told.get(device)?;
        match &told.outcome {
            Some(_) if told.number == number => Some(vec![self.answer(device)]),
            // One thing after the other; the authority says it again.
            None => Some(Vec::new()),
            Some(_) => (told.number > number).then(Vec::new),
        }
    }

    /// The change of `device` that the node is at.
    fn at_work(&mut self, device: &str, number: LeaseId) -> Option<&mut NewestChange> {
        let told = self.changes.told.get_mut(device)?;
        (told.number == number && told.outcome.is_none()).then_some(told)
    }

    /// The outcome of the newest change of `device`.
    fn answer(&self, device: &str) -> LenderAction {
        let (incarnation, told) = (self.incarnation, &self.changes.told[device]);
        let (device, number) = (device.to_owned(), told.number);
        if told.section.is_none() {
            return LenderAction::Send(Message::Withdrawn { incarnation, device, number });
        }
        let newest = |name: &String| Some((name.clone(), self.devices.get(name)?.newest));
        let newest = || told.functions.iter().filter_map(newest).collect();
        let outcome = told.outcome.clone().unwrap_or(Ok(())).map(|()| newest());
        LenderAction::Send(Message::Offered { incarnation, device, number, outcome })
    }
}
