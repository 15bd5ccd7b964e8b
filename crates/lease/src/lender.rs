//! The lender's side: which epoch of each function may attach, and which one is attached. This is
//! where a lease is enforced: the node that runs the functions asks here before it lets anybody in,
//! and keeps no record of its own of who may.

mod action;
mod admission;
mod devices;
mod levels;
mod serving;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use action::LenderAction;
pub use admission::{ArmedFor, NotAdmitted};

use crate::message::{Epoch, Incarnation, LeaseId, Message, Millis};
use crate::under_way::UnderWay;
use devices::DeviceChanges;
pub use devices::ToldDevice;
use levels::LenderChange;
use serving::Serving;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    /// Nobody may attach: it was not armed, or was revoked.
    Free,
    /// The node is being told to let this one in.
    Arming(ArmedFor),
    /// This one may attach.
    Armed(ArmedFor),
    /// The node is taking this epoch's accesses away.
    Revoking(Epoch),
}

/// Why a lender did not let a borrower in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArmFailure {
    /// What prevented it, for people.
    pub reason: String,
    /// Nothing is broken: the device does not give what was asked for.
    pub refused: bool,
}

impl ArmFailure {
    /// The device, or the way to it, does not work.
    pub fn broken(reason: String) -> ArmFailure {
        ArmFailure { reason, refused: false }
    }

    /// The device works, and does not give what was asked for.
    pub fn refusal(reason: String) -> ArmFailure {
        ArmFailure { reason, refused: true }
    }

    /// What the authority is told.
    fn told(self, incarnation: Incarnation, device: String, epoch: Epoch) -> Message {
        let ArmFailure { reason, refused } = self;
        Message::ArmFailed { incarnation, device, epoch, reason, refused }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    state: State,
    /// The epoch whose borrower has a conversation with the function, or had one whose traces are
    /// not scrubbed yet.
    attached: Option<Epoch>,
    /// The newest epoch ever named to this lender: nothing older or equal is armed any more.
    newest: Epoch,
    /// Who was refused last, and why: an arming that is said again has the same answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<(ArmedFor, String)>,
    /// Whether that was a refusal, and no failure.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    was_refusal: bool,
    /// The newest change of a borrower's service level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    change: Option<LenderChange>,
    /// Until when whoever it is armed for is served without a renewal; none where that has no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    serving: Option<Serving>,
}

/// The state machine of one lender, for one life of its node. It is a value that another process can go
/// on with, the same life of the node, when nothing is [under way](Lender::under_way).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lender {
    incarnation: Incarnation,
    devices: BTreeMap<String, Device>,
    /// The greatest lease number this life was told of.
    newest_lease: LeaseId,
    /// What it was told of devices since.
    #[serde(default)]
    changes: DeviceChanges,
}

impl Lender {
    /// A lender of `devices`, just started: nothing is armed.
    pub fn new(incarnation: Incarnation, devices: impl IntoIterator<Item = String>) -> Self {
        let mut lender = Lender {
            incarnation,
            devices: BTreeMap::new(),
            newest_lease: 0,
            changes: DeviceChanges::default(),
        };
        devices.into_iter().for_each(|name| lender.add(name));
        lender
    }

    /// Lends `device` too. Nothing changes when it is there already.
    pub fn add(&mut self, device: String) {
        self.add_from(device, 0);
    }

    /// The same; epochs up to `newest` were given out before.
    fn add_from(&mut self, device: String, newest: Epoch) {
        let (refused, was_refusal, change, serving) = (None, false, None, None);
        let (state, attached) = (State::Free, None);
        let free = Device { state, attached, newest, refused, was_refusal, change, serving };
        self.devices.entry(device).or_insert(free);
    }

    /// The node took a later number for this life, before anything was armed in it.
    pub fn set_incarnation(&mut self, incarnation: Incarnation) {
        self.incarnation = incarnation;
    }

    /// What the node is doing now and has not reported as done. Another process that continues with this
    /// value would not do it: there is none when the node changes processes.
    pub fn under_way(&self) -> Option<UnderWay> {
        let device = self.changes.under_way().cloned().map(UnderWay::Device);
        let function = || {
            self.devices.iter().find_map(|(device, entry)| match entry.state {
                State::Arming(_) => Some(UnderWay::Arming(device.clone())),
                State::Revoking(_) => Some(UnderWay::Revoking(device.clone())),
                State::Armed(_) if entry.changes() => Some(UnderWay::Level(device.clone())),
                State::Free | State::Armed(_) => None,
            })
        };
        device.or_else(function)
    }

    /// How many leases have a function here, by how far each is.
    pub fn lease_counts(&self) -> [(&'static str, usize); 3] {
        let count = |is: fn(&State) -> bool| {
            self.devices.values().filter(|device| is(&device.state)).count()
        };
        [
            ("arming", count(|state| matches!(state, State::Arming(_)))),
            ("armed", count(|state| matches!(state, State::Armed(_)))),
            ("revoking", count(|state| matches!(state, State::Revoking(_)))),
        ]
    }

    /// The devices, each with the newest epoch that this life was told of.
    pub fn newest_epochs(&self) -> BTreeMap<String, Epoch> {
        self.devices.iter().map(|(name, device)| (name.clone(), device.newest)).collect()
    }

    /// The greatest lease number this life was told of; 0 when of none.
    pub fn newest_lease(&self) -> LeaseId {
        self.newest_lease.max(self.changes.newest())
    }

    /// A message from the authority, at `now` by the lender's own clock.
    pub fn receive(&mut self, now: Millis, message: Message) -> Vec<LenderAction> {
        match message {
            #[rustfmt::skip]
            Message::Arm {
                incarnation, device, lease, epoch, borrower, placement, level, serve_for,
            } if incarnation == self.incarnation => {
                let serving = serve_for.map(|ttl| Serving::begin(now, ttl));
                self.arm(device, ArmedFor { lease, epoch, borrower, placement }, level, serving)
            }
            Message::Extend { incarnation, device, epoch, sent }
                if incarnation == self.incarnation =>
            {
                self.extend(now, device, epoch, sent)
            }
            Message::SetLevel { incarnation, device, epoch, number, level }
                if incarnation == self.incarnation =>
            {
                self.set_level(device, LenderChange { epoch, number, level, outcome: None })
            }
            Message::Revoke { incarnation, device, epoch } if incarnation == self.incarnation => {
                self.revoke(device, epoch)
            }
            Message::Offer { incarnation, device, number, functions, section }
                if incarnation == self.incarnation =>
            {
                self.offer(device, number, functions, section)
            }
            Message::Withdraw { incarnation, device, number, functions }
                if incarnation == self.incarnation =>
            {
                self.withdraw(device, number, functions)
            }
            // Meant for another life of this node, or not for a lender.
            _ => Vec::new(),
        }
    }

    /// The node lets the epoch in now, or cannot.
    pub fn arm_done(
        &mut self,
        device: &str,
        epoch: Epoch,
        outcome: Result<(), ArmFailure>,
    ) -> Vec<LenderAction> {
        let incarnation = self.incarnation;
        let Some(entry) = self.devices.get_mut(device) else { return Vec::new() };
        let State::Arming(holder) = &entry.state else { return Vec::new() };
        if holder.epoch != epoch {
            return Vec::new();
        }
        let device = device.to_owned();
        let message = match outcome {
            Ok(()) => {
                entry.state = State::Armed(holder.clone());
                Message::Armed { incarnation, device, epoch, change: None }
            }
            Err(failure) => {
                entry.refused = Some((holder.clone(), failure.reason.clone()));
                entry.was_refusal = failure.refused;
                entry.state = State::Free;
                failure.told(incarnation, device, epoch)
            }
        };
        vec![LenderAction::Send(message)]
    }

    /// Nothing of the epoch is reachable any more. While somebody is attached that is not so, and
    /// nothing is answered.
    pub fn revoke_done(&mut self, device: &str, epoch: Epoch) -> Vec<LenderAction> {
        match self.devices.get_mut(device) {
            Some(entry) if entry.state == State::Revoking(epoch) && entry.attached.is_none() => {
                entry.state = State::Free;
                vec![self.revoked(device.to_owned(), epoch)]
            }
            _ => Vec::new(),
        }
    }

    fn arm(
        &mut self,
        device: String,
        wanted: ArmedFor,
        level: Option<String>,
        serving: Option<Serving>,
    ) -> Vec<LenderAction> {
        let (incarnation, epoch) = (self.incarnation, wanted.epoch);
        self.newest_lease = self.newest_lease.max(wanted.lease);
        let Some(entry) = self.devices.get_mut(&device) else {
            let failure = ArmFailure::broken(format!("there is no device {device}"));
            return vec![LenderAction::Send(failure.told(incarnation, device, epoch))];
        };
        if entry.holder() == Some(&wanted) {
            entry.serving = Serving::said_again(entry.serving, serving);
        }
        match &entry.state {
            // What is answered tells of the newest change, and an authority whose records are older asks once: it asks
            // again until the change is made.
            State::Armed(current) if *current == wanted && entry.changes() => Vec::new(),
            State::Armed(current) if *current == wanted => {
                let change = entry.answered_change();
                let armed = Message::Armed { incarnation, device, epoch, change };
                vec![LenderAction::Send(armed)]
            }
            State::Arming(current) if *current == wanted => Vec::new(),
            // It failed, was revoked, or was somebody else's: if the authority still waits for it,
            // it must not. It may hear this before what was said at the failure, or instead of it.
            _ if epoch <= entry.newest => {
                let failure = entry.gave_up(&device, epoch, |refused| *refused == wanted);
                vec![LenderAction::Send(failure.told(incarnation, device, epoch))]
            }
            State::Free => {
                (entry.newest, entry.refused, entry.change) = (epoch, None, None);
                entry.was_refusal = false;
                entry.serving = serving;
                entry.state = State::Arming(wanted.clone());
                let ArmedFor { lease, epoch, borrower, placement: _ } = wanted;
                vec![LenderAction::Arm { device, lease, epoch, borrower, level }]
            }
            // An authority that knew of the older one would have had it revoked: it has lost its
            // records. The older one is taken back first; the authority says this one again.
            State::Armed(older) | State::Arming(older) => {
                let (epoch, lease) = (older.epoch, Some(older.lease));
                entry.state = State::Revoking(epoch);
                vec![LenderAction::Revoke { device, epoch, lease }]
            }
            // Too early; the authority says it again.
            State::Revoking(_) => Vec::new(),
        }
    }

    fn revoke(&mut self, device: String, epoch: Epoch) -> Vec<LenderAction> {
        let Some(entry) = self.devices.get_mut(&device) else {
            return vec![self.revoked(device, epoch)];
        };
        entry.newest = entry.newest.max(epoch);
        match &entry.state {
            State::Armed(current) | State::Arming(current) if current.epoch <= epoch => {
                let lease = Some(current.lease);
                entry.state = State::Revoking(epoch);
                vec![LenderAction::Revoke { device, epoch, lease }]
            }
            State::Revoking(current) if *current >= epoch => Vec::new(),
            State::Revoking(_) => {
                entry.state = State::Revoking(epoch);
                vec![LenderAction::Revoke { device, epoch, lease: None }]
            }
            // A newer epoch has it, or nobody: this one is over either way.
            State::Free | State::Armed(_) | State::Arming(_) => vec![self.revoked(device, epoch)],
        }
    }

    fn revoked(&self, device: String, epoch: Epoch) -> LenderAction {
        LenderAction::Send(Message::Revoked { incarnation: self.incarnation, device, epoch })
    }
}
