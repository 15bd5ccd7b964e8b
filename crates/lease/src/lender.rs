//! The lender's side: which epoch of each function may attach, and which one is attached. This is
//! where a lease is enforced: the node that runs the functions asks here before it lets anybody in,
//! and keeps no record of its own of who may.

mod devices;
mod levels;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::message::{Epoch, Incarnation, LeaseId, Message, Placement};
use crate::under_way::UnderWay;
use devices::Devices;
use levels::Change;

/// What the node must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LenderAction {
    /// Let the borrower of this epoch attach from now on; then call [`Lender::arm_done`].
    Arm {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's number, which no other lease ever gets.
        lease: LeaseId,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The borrowing host's name in the rack file.
        borrower: String,
        /// The service level that it is to have.
        level: Option<String>,
    },
    /// Give the borrower of this epoch, which is armed, another service level; then call
    /// [`Lender::level_done`].
    SetLevel {
        /// The device's name at its lender: `accel0.vf1`.
        device: String,
        /// The lease's number.
        lease: LeaseId,
        /// The lease's fencing epoch.
        epoch: Epoch,
        /// Which change of this lease's level it is.
        number: u64,
        /// The level; none for what anybody gets.
        level: Option<String>,
    },
    /// Nobody of this epoch or an older one may attach any more. End the conversation of who
    /// [is attached](Lender::attached_up_to), take away what it has mapped, reset and scrub the
    /// function; then call [`Lender::revoke_done`].
    Revoke {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// The lease that has it, as far as this is known here.
        lease: Option<LeaseId>,
    },
    /// Have this device ready to be lent; then call [`Lender::offer_done`].
    Offer {
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
        /// What the rack file would say of it.
        section: String,
    },
    /// Let go of this device, whose functions nobody has or gets any more; then call [`Lender::withdraw_done`].
    Withdraw {
        /// The device's name at its lender: `accel0`.
        device: String,
        /// Which change of the rack's devices it is.
        number: LeaseId,
        /// Names of its functions.
        functions: Vec<String>,
    },
    /// Send this to the authority.
    Send(Message),
}

/// Whom a function is armed for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Holder {
    /// The lease's number, which no other lease ever gets.
    pub lease: LeaseId,
    /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
    pub epoch: Epoch,
    /// The borrowing host's name in the rack file.
    pub borrower: String,
    /// Where the function's front runs: who attaches says which half of the function it wants.
    pub placement: Placement,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    /// Nobody may attach: it was not armed, or was revoked.
    Free,
    /// The node is being told to let this one in.
    Arming(Holder),
    /// This one may attach.
    Armed(Holder),
    /// The node is taking this epoch's accesses away.
    Revoking(Epoch),
}

/// Why a borrower is not let in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// This lender has no such device.
    #[error("there is no device {0}")]
    NoDevice(String),
    /// Another lease has the function.
    #[error(
        "epoch {epoch} of {device} is not valid here (lease {} of {} has it under epoch {})",
        .holder.lease, .holder.borrower, .holder.epoch
    )]
    Held {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
        /// Who may attach instead.
        holder: Holder,
    },
    /// The function is being made ready, or taken back.
    #[error("epoch {epoch} of {device} is not valid here (its function is being {doing})")]
    Busy {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
        /// What is being done with the function.
        doing: &'static str,
    },
    /// It is armed for nobody.
    #[error("epoch {epoch} of {device} is not valid here (it is not lent to anybody)")]
    NotLent {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
    },
    /// The borrower may attach, to the other half of the function.
    #[error("the front of {device} runs at its {} under epoch {epoch}", .placement)]
    Placed {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The lease's fencing epoch; a lender lets in the newest that it was armed for.
        epoch: Epoch,
        /// Where the front runs.
        placement: Placement,
    },
    /// The borrower may attach, and has not: there is nothing to go on with.
    #[error("nobody uses {device} under epoch {epoch}")]
    NotInUse {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that was presented.
        epoch: Epoch,
    },
    /// The borrower may attach, and is attached already.
    #[error("{device} is in use under epoch {epoch}")]
    InUse {
        /// The device's name at its lender: `nvme0`.
        device: String,
        /// The epoch that is attached.
        epoch: Epoch,
    },
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
    refused: Option<(Holder, String)>,
    /// The newest change of a borrower's service level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    change: Option<Change>,
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
    changes: Devices,
}

impl Lender {
    /// A lender of `devices`, just started: nothing is armed.
    pub fn new(incarnation: Incarnation, devices: impl IntoIterator<Item = String>) -> Self {
        let mut lender = Lender {
            incarnation,
            devices: BTreeMap::new(),
            newest_lease: 0,
            changes: Devices::default(),
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
        let (refused, change) = (None, None);
        let free = Device { state: State::Free, attached: None, newest, refused, change };
        self.devices.entry(device).or_insert(free);
    }

    /// The node took a later number for this life, before anything was armed in it.
    pub fn set_incarnation(&mut self, incarnation: Incarnation) {
        self.incarnation = incarnation;
    }

    /// What the node is doing now and has not reported as done. Another process that goes on with this
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

    /// The devices, each with the newest epoch that this life was told of.
    pub fn newest_epochs(&self) -> BTreeMap<String, Epoch> {
        self.devices.iter().map(|(name, device)| (name.clone(), device.newest)).collect()
    }

    /// The greatest lease number this life was told of; 0 when of none.
    pub fn newest_lease(&self) -> LeaseId {
        self.newest_lease.max(self.changes.newest())
    }

    /// A message from the authority.
    pub fn receive(&mut self, message: Message) -> Vec<LenderAction> {
        match message {
            Message::Arm { incarnation, device, lease, epoch, borrower, placement, level }
                if incarnation == self.incarnation =>
            {
                self.arm(device, Holder { lease, epoch, borrower, placement }, level)
            }
            Message::SetLevel { incarnation, device, epoch, number, level }
                if incarnation == self.incarnation =>
            {
                self.set_level(device, Change { epoch, number, level, outcome: None })
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
        outcome: Result<(), String>,
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
            Err(reason) => {
                entry.refused = Some((holder.clone(), reason.clone()));
                entry.state = State::Free;
                Message::ArmFailed { incarnation, device, epoch, reason }
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

    /// Who may attach to `device` now, or as soon as it is ready.
    pub fn holder(&self, device: &str) -> Option<&Holder> {
        match &self.devices.get(device)?.state {
            State::Arming(holder) | State::Armed(holder) => Some(holder),
            State::Free | State::Revoking(_) => None,
        }
    }

    /// Who may attach to `device` now.
    pub fn admitted(&self, device: &str) -> Option<&Holder> {
        match &self.devices.get(device)?.state {
            State::Armed(holder) => Some(holder),
            _ => None,
        }
    }

    /// Whether `wanted` may attach to `device` now, and nobody is attached.
    ///
    /// # Errors
    /// [`NotAdmitted`] says why not.
    pub fn admits(&self, device: &str, wanted: &Holder) -> Result<(), NotAdmitted> {
        let Some(entry) = self.devices.get(device) else {
            return Err(NotAdmitted::NoDevice(device.to_owned()));
        };
        let (device, epoch) = (device.to_owned(), wanted.epoch);
        match (&entry.state, entry.attached) {
            (State::Armed(holder), None) if holder == wanted => Ok(()),
            (State::Armed(holder), Some(epoch)) if holder == wanted => {
                Err(NotAdmitted::InUse { device, epoch })
            }
            (State::Armed(holder), _)
                if *holder == (Holder { placement: holder.placement, ..wanted.clone() }) =>
            {
                Err(NotAdmitted::Placed { device, epoch, placement: holder.placement })
            }
            (State::Armed(holder), _) => {
                Err(NotAdmitted::Held { device, epoch, holder: holder.clone() })
            }
            (State::Arming(_), _) => Err(NotAdmitted::Busy { device, epoch, doing: "made ready" }),
            (State::Revoking(_), _) => {
                Err(NotAdmitted::Busy { device, epoch, doing: "taken back" })
            }
            (State::Free, _) => Err(NotAdmitted::NotLent { device, epoch }),
        }
    }

    /// Whether `wanted` is attached to `device`, and may go on.
    ///
    /// # Errors
    /// [`NotAdmitted`] says why not.
    pub fn resumes(&self, device: &str, wanted: &Holder) -> Result<(), NotAdmitted> {
        match self.admits(device, wanted) {
            Err(NotAdmitted::InUse { epoch, .. }) if epoch == wanted.epoch => Ok(()),
            Err(refused) => Err(refused),
            Ok(()) => Err(NotAdmitted::NotInUse { device: device.to_owned(), epoch: wanted.epoch }),
        }
    }

    /// Lets `wanted` attach to `device`, until [`detached`](Lender::detached).
    ///
    /// # Errors
    /// [`NotAdmitted`]; nothing changes then.
    pub fn attach(&mut self, device: &str, wanted: &Holder) -> Result<(), NotAdmitted> {
        self.admits(device, wanted)?;
        if let Some(entry) = self.devices.get_mut(device) {
            entry.attached = Some(wanted.epoch);
        }
        Ok(())
    }

    /// The conversation of whoever was attached to `device` has ended, nothing of its is mapped any
    /// more, and the function is scrubbed.
    pub fn detached(&mut self, device: &str) {
        if let Some(entry) = self.devices.get_mut(device) {
            entry.attached = None;
        }
    }

    /// Whether a borrower of `epoch` or an older one is still attached to `device`. A revocation of
    /// that epoch ends its conversation.
    pub fn attached_up_to(&self, device: &str, epoch: Epoch) -> bool {
        self.devices.get(device).is_some_and(|entry| entry.attached.is_some_and(|e| e <= epoch))
    }

    fn arm(&mut self, device: String, wanted: Holder, level: Option<String>) -> Vec<LenderAction> {
        let (incarnation, epoch) = (self.incarnation, wanted.epoch);
        self.newest_lease = self.newest_lease.max(wanted.lease);
        let Some(entry) = self.devices.get_mut(&device) else {
            let reason = format!("there is no device {device}");
            let failed = Message::ArmFailed { incarnation, device, epoch, reason };
            return vec![LenderAction::Send(failed)];
        };
        match &entry.state {
            State::Armed(current) if *current == wanted => {
                let change = entry.answered_change();
                let armed = Message::Armed { incarnation, device, epoch, change };
                vec![LenderAction::Send(armed)]
            }
            State::Arming(current) if *current == wanted => Vec::new(),
            // It failed, was revoked, or was somebody else's: if the authority still waits for it,
            // it must not. It may hear this before what was said at the failure, or instead of it.
            _ if epoch <= entry.newest => {
                let reason = match &entry.refused {
                    Some((refused, reason)) if *refused == wanted => reason.clone(),
                    _ => format!("{device} gave up epoch {epoch} already"),
                };
                let failed = Message::ArmFailed { incarnation, device, epoch, reason };
                vec![LenderAction::Send(failed)]
            }
            State::Free => {
                (entry.newest, entry.refused, entry.change) = (epoch, None, None);
                entry.state = State::Arming(wanted.clone());
                let Holder { lease, epoch, borrower, placement: _ } = wanted;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(epoch: Epoch) -> Message {
        let (device, borrower) = ("nvme0".to_owned(), "beta".to_owned());
        Message::Arm {
            incarnation: 1,
            device,
            lease: epoch,
            epoch,
            borrower,
            placement: Placement::Lender,
            level: None,
        }
    }

    fn revoke(epoch: Epoch) -> Message {
        Message::Revoke { incarnation: 1, device: "nvme0".into(), epoch }
    }

    fn lender() -> Lender {
        Lender::new(1, ["nvme0".to_owned()])
    }

    #[test]
    fn arms_once_and_answers_again() {
        let mut lender = lender();
        assert!(matches!(lender.receive(arm(1))[..], [LenderAction::Arm { epoch: 1, .. }]));
        assert!(lender.admitted("nvme0").is_none(), "not before the node did it");
        assert_eq!(lender.arm_done("nvme0", 1, Ok(())).len(), 1);
        assert_eq!(lender.admitted("nvme0").map(|h| h.epoch), Some(1));
        assert!(matches!(lender.receive(arm(1))[..], [LenderAction::Send(Message::Armed { .. })]));
    }

    /// The node hears the arming again between its failure and the sending of the failure, or what it sent is
    /// lost: the authority is told the cause all the same.
    #[test]
    fn an_arming_that_failed_fails_again_for_the_same_reason() {
        let mut lender = lender();
        lender.receive(arm(1));
        let failed = lender.arm_done("nvme0", 1, Err("0.9 Gbit/s would fit".to_owned()));
        assert!(matches!(
            &failed[..],
            [LenderAction::Send(Message::ArmFailed { epoch: 1, reason, .. })]
                if reason == "0.9 Gbit/s would fit"
        ));
        assert_eq!(lender.receive(arm(1)), failed);
        // Also in the process that goes on for it.
        let saved = serde_json::to_string(&lender).unwrap();
        let mut lender: Lender = serde_json::from_str(&saved).unwrap();
        assert_eq!(lender.receive(arm(1)), failed);
        // Another lease of that epoch, and one that was let in since, have other reasons.
        let mut other = arm(1);
        if let Message::Arm { lease, .. } = &mut other {
            *lease = 7;
        }
        assert_ne!(lender.receive(other), failed);
        lender.receive(arm(2));
        lender.arm_done("nvme0", 2, Ok(()));
        assert_ne!(lender.receive(arm(1)), failed);
    }

    #[test]
    fn a_late_arm_after_its_revocation_fails() {
        let mut lender = lender();
        assert!(matches!(
            lender.receive(revoke(1))[..],
            [LenderAction::Send(Message::Revoked { epoch: 1, .. })]
        ));
        assert!(matches!(
            lender.receive(arm(1))[..],
            [LenderAction::Send(Message::ArmFailed { epoch: 1, .. })]
        ));
        assert!(lender.admitted("nvme0").is_none());
    }

    #[test]
    fn nothing_is_armed_while_a_revocation_is_under_way() {
        let mut lender = lender();
        lender.receive(arm(1));
        lender.arm_done("nvme0", 1, Ok(()));
        assert!(matches!(lender.receive(revoke(1))[..], [LenderAction::Revoke { epoch: 1, .. }]));
        assert!(lender.admitted("nvme0").is_none());
        assert!(lender.receive(arm(2)).is_empty());
        assert_eq!(lender.revoke_done("nvme0", 1).len(), 1);
        assert_eq!(lender.receive(arm(2)).len(), 1);
    }

    fn holder(epoch: Epoch) -> Holder {
        let (borrower, placement) = ("beta".to_owned(), Placement::Lender);
        Holder { lease: epoch, epoch, borrower, placement }
    }

    fn armed(epoch: Epoch) -> Lender {
        let mut lender = lender();
        lender.receive(arm(epoch));
        lender.arm_done("nvme0", epoch, Ok(()));
        lender
    }

    #[test]
    fn only_the_armed_lease_of_the_armed_borrower_is_admitted() {
        let lender = armed(2);
        assert_eq!(lender.admits("nvme0", &holder(2)), Ok(()));
        let stranger = Holder { borrower: "gamma".to_owned(), ..holder(2) };
        let other_lease = Holder { lease: 7, ..holder(2) };
        for wanted in [holder(1), holder(3), stranger, other_lease] {
            let refused = lender.admits("nvme0", &wanted).unwrap_err();
            assert!(matches!(refused, NotAdmitted::Held { .. }), "{wanted:?}: {refused}");
        }
        let placed = Holder { placement: Placement::Borrower, ..holder(2) };
        let refused = lender.admits("nvme0", &placed).unwrap_err();
        assert!(matches!(refused, NotAdmitted::Placed { placement: Placement::Lender, .. }));
        let nowhere = NotAdmitted::NoDevice("nvme9".to_owned());
        assert_eq!(lender.admits("nvme9", &holder(2)), Err(nowhere));
    }

    #[test]
    fn one_conversation_at_a_time_is_let_in() {
        let mut lender = armed(1);
        lender.attach("nvme0", &holder(1)).unwrap();
        let refused = lender.attach("nvme0", &holder(1)).unwrap_err();
        assert!(matches!(refused, NotAdmitted::InUse { epoch: 1, .. }), "{refused}");
        lender.detached("nvme0");
        lender.attach("nvme0", &holder(1)).unwrap();
    }

    #[test]
    fn only_who_is_attached_goes_on_and_not_beyond_a_revocation() {
        let mut lender = armed(1);
        let refused = lender.resumes("nvme0", &holder(1)).unwrap_err();
        assert!(matches!(refused, NotAdmitted::NotInUse { epoch: 1, .. }), "{refused}");
        lender.attach("nvme0", &holder(1)).unwrap();
        lender.resumes("nvme0", &holder(1)).unwrap();
        for other in [holder(2), Holder { borrower: "gamma".to_owned(), ..holder(1) }] {
            assert!(lender.resumes("nvme0", &other).is_err());
        }
        lender.receive(revoke(1));
        assert!(lender.resumes("nvme0", &holder(1)).is_err(), "it is attached, and revoked");
    }

    #[test]
    fn a_revocation_refuses_at_once_and_is_answered_when_nobody_is_attached() {
        let mut lender = armed(1);
        lender.attach("nvme0", &holder(1)).unwrap();
        lender.receive(revoke(1));
        let refused = lender.admits("nvme0", &holder(1)).unwrap_err();
        assert!(matches!(refused, NotAdmitted::Busy { .. }), "{refused}");
        assert!(lender.attached_up_to("nvme0", 1) && !lender.attached_up_to("nvme0", 0));
        assert_eq!(lender.revoke_done("nvme0", 1), [], "somebody is still attached");
        lender.detached("nvme0");
        assert_eq!(lender.revoke_done("nvme0", 1).len(), 1);
        let refused = lender.admits("nvme0", &holder(1)).unwrap_err();
        assert!(matches!(refused, NotAdmitted::NotLent { .. }), "{refused}");
    }

    #[test]
    fn other_lives_messages_are_not_its_own() {
        let mut lender = Lender::new(2, ["nvme0".to_owned()]);
        assert!(lender.receive(arm(1)).is_empty() && lender.receive(revoke(1)).is_empty());
    }

    /// The authority's records were lost: it numbers anew, and knows nothing of who has what.
    #[test]
    fn who_comes_with_an_epoch_that_another_has_is_not_let_in() {
        let mut lender = lender();
        lender.receive(arm(3));
        lender.arm_done("nvme0", 3, Ok(()));
        let (device, borrower) = ("nvme0".to_owned(), "gamma".to_owned());
        let other = Message::Arm {
            incarnation: 1,
            device,
            lease: 1,
            epoch: 3,
            borrower,
            placement: Placement::Lender,
            level: None,
        };
        let said = lender.receive(other);
        assert!(
            matches!(said[..], [LenderAction::Send(Message::ArmFailed { epoch: 3, .. })]),
            "{said:?}"
        );
        assert_eq!((lender.newest_epochs()["nvme0"], lender.newest_lease()), (3, 3));
        // A newer one gets it, when the older one's accesses are gone.
        assert!(matches!(lender.receive(arm(4))[..], [LenderAction::Revoke { epoch: 3, .. }]));
        assert!(lender.receive(arm(4)).is_empty());
        lender.revoke_done("nvme0", 3);
        assert!(matches!(lender.receive(arm(4))[..], [LenderAction::Arm { epoch: 4, .. }]));
    }
}
