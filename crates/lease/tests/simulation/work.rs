//! What nodes were told to do, each in its time.

use rackbus_lease::{ArmFailure, BorrowerAction, Epoch, LeaseId, Message};

use crate::Mistake;
use crate::world::{Device, Node, World};

pub enum Work {
    Arm(String, Epoch, Option<String>),
    Level { device: String, epoch: Epoch, number: u64, level: Option<String> },
    Revoke(String, Epoch),
    Open(LeaseId),
    Close(LeaseId),
    Offer(String, LeaseId),
    Withdraw(String, LeaseId),
}

impl World {
    /// A node finishes something that it was told to do, or one of its fronts goes a step further.
    pub fn finish_work(&mut self, host: usize) -> Result<(), String> {
        if self.slow_until[host] > self.now {
            return Ok(());
        }
        let Some(mut node) = self.nodes[host].take() else {
            return Ok(());
        };
        let work = !node.pending.is_empty();
        if !node.fronts.is_empty() && (!work || self.random.chance(50)) {
            self.go_on_with_front(host, &mut node)?;
        } else if work {
            let index = self.random.below(node.pending.len());
            match node.pending.remove(index) {
                Work::Open(lease) => self.open(host, &mut node, lease)?,
                Work::Close(lease) => self.close(host, &mut node, lease)?,
                lending => self.lend(host, &mut node, lending)?,
            }
        }
        self.nodes[host] = Some(node);
        Ok(())
    }

    fn open(&mut self, host: usize, node: &mut Node, lease: LeaseId) -> Result<(), String> {
        let failed = self.faults && self.random.chance(3);
        let outcome = if failed { Err("no socket".into()) } else { Ok("sock".into()) };
        let actions = node.borrower.open_done(lease, outcome);
        self.borrower_actions(host, node, actions)
    }

    fn close(&mut self, host: usize, node: &mut Node, lease: LeaseId) -> Result<(), String> {
        if let Some((function, epoch)) = node.open.remove(&lease) {
            self.detach(node, host, &function, epoch);
        }
        self.close_fronts(host, node, lease);
        let mut actions = node.borrower.close_done(lease);
        if self.mistake == Mistake::HastyClose && actions.is_empty() {
            actions.push(BorrowerAction::Send(Message::Closed { lease }));
        }
        self.borrower_actions(host, node, actions)
    }

    fn lend(&mut self, host: usize, node: &mut Node, work: Work) -> Result<(), String> {
        let actions = match work {
            Work::Arm(device, epoch, level) => {
                let failed = self.faults && self.random.chance(5);
                let failure = ArmFailure::broken("broken".to_owned());
                let outcome = if failed { Err(failure) } else { Ok(()) };
                // A node does what a device is told one after the other: an arming whose epoch was revoked comes
                // behind nothing that is newer.
                let armed = node.devices.get_mut(&device);
                if let Some(device) = armed.filter(|it| !failed && epoch > it.revoked) {
                    device.level = level;
                }
                node.lender.arm_done(&device, epoch, outcome)
            }
            Work::Level { device, epoch, number, level } => {
                let refused = self.random.chance(30);
                let outcome = if refused { Err("too much".to_owned()) } else { Ok(()) };
                let actions = node.lender.level_done(&device, epoch, number, outcome);
                // What a revocation came before is not done any more.
                if let Some(device) = node.devices.get_mut(&device)
                    && (!refused || self.mistake == Mistake::RefusedLevel)
                    && !actions.is_empty()
                {
                    device.level = level;
                }
                actions
            }
            Work::Revoke(name, epoch) => {
                // A device that is gone was nobody's.
                let mut none = Device::default();
                let device = node.devices.get_mut(&name).unwrap_or(&mut none);
                if self.mistake != Mistake::LazyRevoke {
                    device.sessions.retain(|e| *e > epoch);
                    device.dirty = device.dirty.filter(|e| *e > epoch);
                }
                if node.lender.attached_up_to(&name, epoch) {
                    node.lender.detached(&name);
                }
                device.revoked = device.revoked.max(epoch);
                node.lender.revoke_done(&name, epoch)
            }
            Work::Offer(name, number) => {
                let failed = self.faults && self.random.chance(10);
                let outcome = if failed { Err("no file".to_owned()) } else { Ok(()) };
                if !failed && node.devices.insert(name.clone(), Device::default()).is_some() {
                    return Err(format!("{name} is taken on, and was there before"));
                }
                node.lender.offer_done(&name, number, outcome)
            }
            Work::Withdraw(name, number) => {
                let device = node.devices.remove(&name).unwrap_or_default();
                if !device.sessions.is_empty() || device.dirty.is_some() {
                    return Err(format!("I4: {name} is withdrawn in use: {:?}", device.dirty));
                }
                node.lender.withdraw_done(&name, number)
            }
            Work::Open(_) | Work::Close(_) => Vec::new(),
        };
        self.lender_actions(host, node, actions);
        Ok(())
    }
}
