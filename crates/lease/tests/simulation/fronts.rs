//! Who uses functions: conversations with lenders, and the fronts that run at their borrowers.
//!
//! A front reaches its user's memory from when it begins until it has released it, which takes a while after its
//! conversation with the lender has ended.

use rackbus_lease::{ArmedFor, Epoch, FrontRefused, FunctionId, LeaseId, Placement};

use crate::world::{Node, World, host_index, placement};
use crate::{HOSTS, Mistake};

/// How far a front is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its lender has let it in, and it has not begun.
    Attached,
    /// It reaches its user's memory.
    Running,
    /// Its conversation has ended, and it still reaches that memory.
    Ending,
}

/// A front at its borrower.
#[derive(Debug, Clone)]
pub struct Front {
    pub function: FunctionId,
    pub lease: LeaseId,
    pub epoch: Epoch,
    pub stage: Stage,
}

impl World {
    /// The borrower detaches: the lender sees the conversation end, and scrubs.
    pub fn detach(&mut self, own: &mut Node, host: usize, function: &FunctionId, epoch: Epoch) {
        let lender = host_index(&function.host);
        let node = if lender == host { Some(own) } else { self.nodes[lender].as_mut() };
        let Some(node) = node else { return };
        let device = node.devices.get_mut(&function.device);
        if let Some(device) = device.filter(|d| d.sessions.contains(&epoch)) {
            device.sessions.retain(|e| *e != epoch);
            device.dirty = None;
            node.lender.detached(&function.device);
        }
    }

    /// Whether the conversation of `front`, which runs at `host`, has ended at its lender.
    fn is_lost(&self, own: &Node, host: usize, front: &Front) -> bool {
        let lender = host_index(&front.function.host);
        let node = if lender == host { Some(own) } else { self.nodes[lender].as_ref() };
        let device = node.and_then(|node| node.devices.get(&front.function.device));
        !device.is_some_and(|device| device.sessions.contains(&front.epoch))
    }

    /// Somebody tries to use a function under any epoch it ever heard of.
    pub fn attach(&mut self) -> Result<(), String> {
        if self.known.is_empty() {
            return Ok(());
        }
        // Who has a new lease uses it, however many leases there were before.
        let newest = self.random.chance(if self.faults { 30 } else { 50 });
        let index = match newest {
            true => self.known.len() - 1,
            false => self.random.below(self.known.len()),
        };
        let (host, function, lease, epoch) = self.known[index].clone();
        let Some(node) = &mut self.nodes[host_index(&function.host)] else {
            return Ok(());
        };
        let (borrower, placement) = (HOSTS[host].to_owned(), placement(HOSTS[host]));
        let wanted = ArmedFor { lease, epoch, borrower, placement };
        let let_in = node.lender.attach(&function.device, &wanted).is_ok();
        if !let_in && self.mistake != Mistake::NoFence {
            return Ok(());
        }
        let Some(device) = node.devices.get_mut(&function.device) else {
            if self.mistake == Mistake::NoFence {
                return Ok(());
            }
            return Err(format!("{function} let somebody in and is not there"));
        };
        if epoch <= device.revoked {
            return Err(format!("I4: {function} let in epoch {epoch} after revoking it"));
        }
        if let Some(other) = device.sessions.iter().find(|e| **e != epoch) {
            return Err(format!("I2: {function} has epochs {other} and {epoch} at once"));
        }
        if let Some(other) = device.dirty.filter(|e| *e != epoch) {
            return Err(format!("I4: {function} still has traces of epoch {other}, now {epoch}"));
        }
        device.sessions.push(epoch);
        device.dirty = Some(epoch);
        self.note(|| format!("lease {lease} uses {function} under epoch {epoch}"));
        if placement == Placement::Borrower
            && let Some(node) = &mut self.nodes[host]
        {
            node.fronts.push(Front { function, lease, epoch, stage: Stage::Attached });
        }
        Ok(())
    }

    /// One of the fronts at a host goes a step further.
    pub fn go_on_with_front(&mut self, host: usize, node: &mut Node) -> Result<(), String> {
        let index = self.random.below(node.fronts.len());
        let front = node.fronts[index].clone();
        let closes = self.faults && self.random.chance(10);
        // Some take so long that a later lease of the function is there meanwhile.
        let ends = if self.faults && front.lease.is_multiple_of(3) { 3 } else { 50 };
        match front.stage {
            Stage::Attached => return self.begin_front(host, node, index, &front),
            // Its user closes it, or it sees that its conversation has ended.
            Stage::Running if closes || self.is_lost(node, host, &front) => {
                self.end_front(host, node, index);
            }
            Stage::Ending if self.random.chance(ends) => {
                self.note(|| format!("the front of lease {} has ended", front.lease));
                node.fronts.remove(index);
                if self.mistake != Mistake::EarlyEnd {
                    let actions = node.borrower.front_ended(front.lease);
                    self.borrower_actions(host, node, actions)?;
                }
            }
            Stage::Running | Stage::Ending => {}
        }
        Ok(())
    }

    /// Asks whether a front may begin that its lender has let in. One that waits does not wait for ever.
    fn begin_front(
        &mut self,
        host: usize,
        node: &mut Node,
        index: usize,
        front: &Front,
    ) -> Result<(), String> {
        let begins = match node.borrower.begin_front(front.lease) {
            Ok(()) => true,
            Err(FrontRefused::StillEnding { .. }) if self.mistake == Mistake::NoSuccession => true,
            Err(FrontRefused::StillEnding { lease, .. })
                if lease != front.lease && self.mistake == Mistake::SuccessionByLease =>
            {
                true
            }
            Err(FrontRefused::NotServed(_)) if self.mistake == Mistake::LateFront => true,
            Err(refused) if refused.is_for_now() && self.random.chance(80) => return Ok(()),
            Err(_) => false,
        };
        if begins {
            return self.front_begins(node, index, front);
        }
        node.fronts.remove(index);
        self.detach(node, host, &front.function, front.epoch);
        Ok(())
    }

    /// A front begins to reach its user's memory: no other front of the function does, and its lease is none that was
    /// answered as closed.
    fn front_begins(&mut self, node: &mut Node, index: usize, front: &Front) -> Result<(), String> {
        let Front { function, lease, epoch, .. } = front;
        self.note(|| format!("a front of {function} begins under epoch {epoch}"));
        let reaches = |it: &&Front| it.stage != Stage::Attached && it.function == *function;
        if let Some(other) = node.fronts.iter().find(reaches) {
            return Err(format!(
                "two fronts of {function} at once, of epochs {} and {epoch}",
                other.epoch
            ));
        }
        if node.closed.contains(lease) {
            return Err(format!("a front begins under lease {lease}, which was closed"));
        }
        node.fronts[index].stage = Stage::Running;
        Ok(())
    }

    /// The conversation of a front ends.
    fn end_front(&mut self, host: usize, node: &mut Node, index: usize) {
        let front = &mut node.fronts[index];
        front.stage = Stage::Ending;
        let Front { function, lease, epoch, .. } = front.clone();
        self.detach(node, host, &function, epoch);
        if self.mistake == Mistake::EarlyEnd {
            // Nothing follows that is not said at the end of the lease, too.
            let _ = node.borrower.front_ended(lease);
        }
    }

    /// The socket of a lease is gone, and who used it loses its conversation.
    pub fn close_fronts(&mut self, host: usize, node: &mut Node, lease: LeaseId) {
        let running = |it: &Front| it.lease == lease && it.stage == Stage::Running;
        while let Some(index) = node.fronts.iter().position(running) {
            self.end_front(host, node, index);
        }
    }

    /// A lease is answered as closed: no front of it reaches anything.
    pub fn check_closed(node: &mut Node, lease: LeaseId) -> Result<(), String> {
        let runs = |it: &&Front| it.lease == lease && it.stage != Stage::Attached;
        if let Some(front) = node.fronts.iter().find(runs) {
            return Err(format!("lease {lease} is answered as closed, and has {front:?}"));
        }
        node.closed.insert(lease);
        Ok(())
    }

    /// Another process of the node goes on with the fronts that run; those that were ending have ended with the one
    /// before.
    pub fn adopt_fronts(&mut self, host: usize, node: &mut Node) -> Result<(), String> {
        for front in std::mem::take(&mut node.fronts) {
            if front.stage == Stage::Ending {
                continue;
            }
            if self.mistake != Mistake::ForgottenFronts
                && let Err(refused) = node.borrower.begin_front(front.lease)
            {
                let is_lost = self.is_lost(node, host, &front);
                if !is_lost && self.mistake != Mistake::Amnesia {
                    return Err(format!("{front:?} cannot continue: {refused}"));
                }
                self.detach(node, host, &front.function, front.epoch);
                continue;
            }
            node.fronts.push(front);
        }
        Ok(())
    }

    /// No faults any more: a front begins under a lease that its borrower has.
    pub fn check_front(&mut self, lease: LeaseId) -> Result<(), String> {
        let runs = |it: &Front| it.lease == lease && it.stage == Stage::Running;
        self.settle(|world| world.nodes.iter().flatten().any(|node| node.fronts.iter().any(runs)))
            .map_err(|error| format!("no front of lease {lease} begins: {error}"))
    }
}
