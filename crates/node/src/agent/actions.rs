//! What the state machines say is done: each in order for its device or lease, beside the agent.

use rackbus_control::api::NodeMessages;
use rackbus_control::lease_span;
use std::collections::hash_map::Entry;

use rackbus_lease::{BorrowerAction, Grant, LeaseId, LenderAction, Message, Millis};

use super::{Agent, AgentEvent};
use crate::borrower::BorrowedFunctions;
use crate::release::ReleaseLimit;
use crate::unplug::{Unplugger, without_plug};

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
                        heard.tell_from_job(AgentEvent::Lending(said));
                    });
                }
                LenderAction::SetLevel { device, lease, epoch, number, level } => {
                    self.by_device.run(device.clone(), move || {
                        let _about = lease_span(lease).entered();
                        let said = lender.change_level(&device, epoch, number, level.as_deref());
                        heard.tell_from_job(AgentEvent::Lending(said));
                    });
                }
                LenderAction::Offer { device, number, section } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.take_on(&device, number, &section);
                        heard.tell_from_job(AgentEvent::Lending(said));
                    });
                }
                LenderAction::Withdraw { device, number, functions } => {
                    self.by_device.run(device.clone(), move || {
                        let said = lender.release(&device, number, &functions);
                        heard.tell_from_job(AgentEvent::Lending(said));
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
                        heard.tell_from_job(AgentEvent::Lending(actions));
                    });
                }
            }
        }
    }

    /// Takes back what was not renewed for its time to live.
    pub(super) fn end_unrenewed(&mut self, now: Millis) {
        let actions = self.lender.tick(now);
        for action in &actions {
            if let LenderAction::Revoke { device, epoch, .. } = action {
                tracing::warn!(device, epoch, "not renewed for its time to live");
            }
        }
        self.do_lender(actions);
    }

    pub(super) fn do_borrower(&mut self, actions: Vec<BorrowerAction>) {
        for action in actions {
            match action {
                BorrowerAction::Send(message) => self.say(message),
                BorrowerAction::Open(grant) => self.open(grant),
                BorrowerAction::Cut { lease, reason, closing } => self.cut(lease, reason, closing),
                BorrowerAction::Close { lease, reason, within } => {
                    let limit = self.release_limit(lease, within, 0);
                    self.release(lease, limit, move || {
                        tracing::info!(reason, "releasing the function")
                    });
                }
                BorrowerAction::Yield { lease, grace, within } => {
                    let limit = self.release_limit(lease, within, grace);
                    self.release(lease, limit, move || {
                        tracing::info!(grace, "the turn is over: releasing the function");
                    });
                }
                BorrowerAction::Hasten { lease, within, grace } => {
                    if let Some(limit) = self.releasing.get(&lease) {
                        limit.hasten(within, grace);
                    }
                }
            }
        }
    }

    /// Serves a granted function, and plugs it into the VM that it is for.
    fn open(&mut self, grant: Grant) {
        let (lease, unplugger) = (grant.lease, self.unplugger.clone());
        let (borrower, heard) = (self.borrower.clone(), self.heard.clone());
        self.by_lease.run(lease, move || {
            let _about = lease_span(lease).entered();
            tracing::info!(function = %grant.function, epoch = grant.epoch, "borrowed");
            let (function, vm) = (grant.function.to_string(), grant.vm.clone());
            let in_turn = grant.turn.as_ref().and_then(|turn| turn.vm.clone());
            let opened = borrower.open(grant);
            let plugged = match (vm, &opened) {
                (Some(vm), Ok(socket)) => unplugger.plug(&vm, &function, socket),
                _ => Ok(()),
            };
            if let Err(error) = plugged {
                tracing::warn!(function, %error, "the function cannot be hot-added");
                borrower.close(lease);
                heard.tell_from_job(AgentEvent::OpenDone(lease, Err(error.to_string())));
                return;
            }
            let outcome = opened.as_ref().map(|path| path.display().to_string());
            heard.tell_from_job(AgentEvent::OpenDone(lease, outcome.map_err(ToString::to_string)));
            // A turn has begun when its function can be used, also where its guest does not use it.
            if let (Some(vm), Ok(socket)) = (in_turn, opened)
                && let Err(error) = unplugger.plug(&vm, &function, &socket)
            {
                tracing::warn!(vm, function, %error, "the function cannot be hot-added in this turn");
                heard.tell_from_job(AgentEvent::TurnUsed(lease, without_plug(&error)));
            }
        });
    }

    /// How long the user of a lease has to release its function: not longer than it was told before.
    pub(super) fn release_limit(
        &mut self,
        lease: LeaseId,
        within: Option<Millis>,
        grace: Millis,
    ) -> ReleaseLimit {
        match self.releasing.entry(lease) {
            Entry::Occupied(entry) => {
                entry.get().hasten(within, grace);
                entry.get().clone()
            }
            Entry::Vacant(entry) => entry.insert(ReleaseLimit::new(within, grace)).clone(),
        }
    }

    /// Stops serving a lease when its user has released the function, a guest in its own time and a program within its
    /// grace, or when the limit is reached.
    fn release(
        &mut self,
        lease: LeaseId,
        limit: ReleaseLimit,
        tell: impl FnOnce() + Send + 'static,
    ) {
        self.turns.end(lease);
        let unplugger = self.unplugger.clone();
        let (borrower, heard) = (self.borrower.clone(), self.heard.clone());
        self.by_lease.run(lease, move || {
            let _about = lease_span(lease).entered();
            tell();
            unplug(&borrower, &unplugger, lease, &limit);
            borrower.await_user(lease, || limit.program());
            borrower.close(lease);
            heard.tell_from_job(AgentEvent::CloseDone(lease));
        });
    }

    /// Stops serving a lease at once, whatever is done with it meanwhile. Its user finds an absent device, and has the usual
    /// time to release that, or what is left of the time that it was given before.
    fn cut(&mut self, lease: LeaseId, reason: String, closing: bool) {
        let borrower = self.borrower.clone();
        tokio::task::spawn_blocking(move || borrower.cut(lease));
        if closing {
            let _about = lease_span(lease).entered();
            return tracing::warn!(reason, "the function is not served any more");
        }
        let limit = self.release_limit(lease, None, 0);
        self.release(lease, limit, move || {
            tracing::warn!(reason, "the function is not served any more");
        });
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
        for (lease, how) in self.turns.look(now, |lease| borrower.use_of(lease)) {
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
    limit: &ReleaseLimit,
) {
    if let Some((socket, Some(_user))) = borrower.user(lease) {
        unplugger.unplug(&socket, || limit.guest());
    }
}
