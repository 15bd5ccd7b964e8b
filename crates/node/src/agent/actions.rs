//! What the state machines say is done: each in order for its device or lease, beside the agent.

use rackbus_control::api::NodeMessages;
use rackbus_control::lease_span;
use std::time::Duration;

use rackbus_lease::{BorrowerAction, LeaseId, LenderAction, Message, Millis};

use super::{Agent, Heard};
use crate::borrower::BorrowedFunctions;
use crate::unplug::Unplugger;
use rackbus_vm::UNPLUG;

impl Agent {
    pub(super) fn do_lender(&mut self, actions: Vec<LenderAction>) {
        for action in actions {
            let (lender, heard) = (self.lender.clone(), self.heard.clone());
            match action {
                // With what the lease used, as long as that is the last one.
                LenderAction::Send(message @ Message::Revoked { .. }) => {
                    let report = Some(self.report(self.now()));
                    self.tell(NodeMessages { messages: vec![message], report });
                }
                LenderAction::Send(message) => self.say(message),
                LenderAction::Arm { device, lease, epoch, borrower, level } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(device, epoch, borrower, "to be lent");
                        let said = lender.arm(&device, epoch, level.as_deref());
                        heard.tell_from_job(Heard::Lending(said));
                    });
                }
                LenderAction::SetLevel { device, lease, epoch, number, level } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        let said = lender.change_level(&device, epoch, number, level.as_deref());
                        heard.tell_from_job(Heard::Lending(said));
                    });
                }
                LenderAction::Offer { device, number, section } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.take_on(&device, number, &section);
                        heard.tell_from_job(Heard::Lending(said));
                    });
                }
                LenderAction::Withdraw { device, number, functions } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.release(&device, number, &functions);
                        heard.tell_from_job(Heard::Lending(said));
                    });
                }
                LenderAction::Revoke { device, epoch, lease } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease.map(|lease| lease_span(lease).entered());
                        tracing::info!(device, epoch, "to be taken back");
                        let actions = lender.revoke(&device, epoch).unwrap_or_else(|error| {
                            tracing::error!(device, %error, "a revocation has not ended yet");
                            heard.trouble();
                            let actions = lender.finish(&device, epoch);
                            heard.trouble();
                            actions
                        });
                        heard.tell_from_job(Heard::Lending(actions));
                    });
                }
            }
        }
    }

    pub(super) fn do_borrower(&mut self, actions: Vec<BorrowerAction>) {
        for action in actions {
            let (borrower, heard) = (self.borrower.clone(), self.heard.clone());
            match action {
                BorrowerAction::Send(message) => self.say(message),
                BorrowerAction::Open(grant) => {
                    let (lease, unplugger) = (grant.lease, self.unplugger.clone());
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(function = %grant.function, epoch = grant.epoch, "borrowed");
                        let vm = grant.turn.as_ref().and_then(|turn| turn.vm.clone());
                        let function = grant.function.to_string();
                        let opened = borrower.open(grant);
                        let outcome = opened.as_ref().map(|path| path.display().to_string());
                        let outcome = outcome.map_err(ToString::to_string);
                        heard.tell_from_job(Heard::OpenDone(lease, outcome));
                        if let (Some(vm), Ok(socket)) = (vm, opened)
                            && let Err(how) = unplugger.plug(&vm, &function, &socket)
                        {
                            heard.tell_from_job(Heard::TurnUsed(lease, how));
                        }
                    });
                }
                BorrowerAction::Close { lease, reason, within } => {
                    self.turns.end(lease);
                    let unplugger = self.unplugger.clone();
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(reason, "releasing the function");
                        unplug(&borrower, &unplugger, lease, within);
                        borrower.close(lease);
                        heard.tell_from_job(Heard::CloseDone(lease));
                    });
                }
                BorrowerAction::Yield { lease, grace, within } => {
                    self.turns.end(lease);
                    let unplugger = self.unplugger.clone();
                    self.by_lease.run(lease, move || {
                        let _about = lease_span(lease).entered();
                        tracing::info!(grace, "the turn is over: releasing the function");
                        // A guest releases it in its own time, a program within its grace.
                        unplug(&borrower, &unplugger, lease, within);
                        borrower.await_user(lease, Duration::from_millis(grace));
                        borrower.close(lease);
                        heard.tell_from_job(Heard::CloseDone(lease));
                    });
                }
            }
        }
    }

    /// A lease can be used; if it is a turn, it is noticed who does.
    pub(super) fn begin_turn(&mut self, lease: LeaseId) {
        if let Some(turn) = self.borrower.turn(lease) {
            self.turns.begin(self.now(), lease, turn.claim);
        }
    }

    /// Gives back what is not needed any more.
    pub(super) fn look_at_turns(&mut self, now: Millis) {
        let borrower = self.borrower.clone();
        let has_user = |lease| borrower.user(lease).is_some_and(|(_, user)| user.is_some());
        for (lease, how) in self.turns.look(now, has_user) {
            let actions = self.borrower.decide(|it| it.turn_used(lease, how));
            self.do_borrower(actions);
        }
    }
}

/// Takes a lease's function out of the VM that uses it, if one does.
pub(super) fn unplug(
    borrower: &BorrowedFunctions,
    unplugger: &Unplugger,
    lease: LeaseId,
    within: Option<Millis>,
) {
    if let Some((socket, Some(_user))) = borrower.user(lease) {
        unplugger.unplug(&socket, within.map_or(UNPLUG, Duration::from_millis));
    }
}
