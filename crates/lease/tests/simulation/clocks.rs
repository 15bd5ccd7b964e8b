//! Each node's own clock, who is cut off from the control plane, and what has to hold of strict leases by these clocks.
//!
//! A lender serves no epoch beyond its time to live since it was last heard of, and when it ends one by its clock, its
//! borrower has ended it already. A node that is frozen serves nobody meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use rackbus_lease::{Epoch, FunctionId, LenderAction, Message, Millis};
use rackbus_seeds::Random;

use crate::world::{Node, World};
use crate::{AUTHORITY, CONFIG, HOSTS, Mistake};

/// How much faster or slower than the world's a node's clock may be, in thousandths.
const DRIFT: usize = 40;

/// What a node's clock shows, which nobody compares with another one.
#[derive(Clone, Copy)]
struct Clock {
    offset: Millis,
    /// Its milliseconds in a second of the world's.
    rate: u64,
}

/// What the nodes' clocks show, and what was done by them.
pub struct Clocks {
    clocks: Vec<Clock>,
    /// Until when nothing from and to each host arrives.
    cut_until: Vec<[Millis; 2]>,
    /// The epoch of each device that its lender heard of last, and when that was by the lender's clock.
    heard: BTreeMap<(usize, String), (Epoch, Millis)>,
    /// What lenders ended by their clocks.
    ended: BTreeSet<(usize, String, Epoch)>,
}

impl Clocks {
    pub fn new(random: &mut Random) -> Self {
        let clock = |_| Clock {
            offset: random.next() % 1_000_000,
            rate: (1000 - DRIFT + random.below(2 * DRIFT + 1)) as u64,
        };
        let clocks = (0..HOSTS.len()).map(clock).collect();
        let cut_until = vec![[0; 2]; HOSTS.len()];
        Clocks { clocks, cut_until, heard: BTreeMap::new(), ended: BTreeSet::new() }
    }

    /// What the clock of `host` shows at `now`.
    pub fn at(&self, host: usize, now: Millis) -> Millis {
        self.clocks[host].offset + now * self.clocks[host].rate / 1000
    }

    /// Whether a message is lost because one of its ends is cut off.
    pub fn is_cut(&self, from: usize, to: usize, now: Millis) -> bool {
        let (host, way) = if from == AUTHORITY { (to, 1) } else { (from, 0) };
        self.cut_until[host][way] > now
    }

    /// Everybody can be reached.
    pub fn reconnect(&mut self) {
        self.cut_until.fill([0; 2]);
    }

    /// A node starts anew, and nothing is armed.
    pub fn begin(&mut self, host: usize) {
        self.heard.retain(|(of, _), _| *of != host);
        self.ended.retain(|(of, ..)| *of != host);
    }

    /// Whether the lender has ended an epoch by its clock.
    pub fn has_ended(&self, host: usize, device: &str, epoch: Epoch) -> bool {
        self.ended.contains(&(host, device.to_owned(), epoch))
    }
}

impl World {
    /// What the clock of `host` shows.
    pub fn clock(&self, host: usize) -> Millis {
        self.clocks.at(host, self.now)
    }

    /// Hosts are cut off from the control plane, in both directions or in one, and not from each other.
    pub fn cut_off(&mut self) {
        let until = self.now + self.random.next() % (4 * CONFIG.ttl);
        let (hosts, ways) = (1 + self.random.below(7), 1 + self.random.below(3));
        self.note(|| format!("hosts {hosts:b} are cut off in ways {ways:b} until {until}"));
        for host in (0..HOSTS.len()).filter(|host| hosts >> host & 1 == 1) {
            for way in (0..2).filter(|way| ways >> way & 1 == 1) {
                self.clocks.cut_until[host][way] = until;
            }
        }
    }

    /// A lender hears something from the control plane.
    pub fn lender_hears(&mut self, host: usize, node: &mut Node, message: Message) {
        let now = self.clock(host);
        let (device, epoch, renewed) = match &message {
            Message::Arm { device, epoch, .. } => (device.clone(), *epoch, false),
            Message::Extend { device, epoch, .. } => (device.clone(), *epoch, true),
            _ => (String::new(), 0, false),
        };
        let holder = |node: &Node| node.lender.holder(&device).map(|holder| holder.epoch);
        let before = holder(node);
        let actions = node.lender.receive(now, message);
        // Who is armed already is not renewed by hearing so again.
        if holder(node) == Some(epoch) && (renewed || before != Some(epoch)) {
            self.clocks.heard.insert((host, device), (epoch, now));
        }
        self.lender_actions(host, node, actions);
    }

    /// Has a lender end what was not renewed; returns what that was.
    pub fn end_by_clock(&mut self, host: usize, node: &mut Node) -> Vec<(FunctionId, Epoch)> {
        if self.mistake == Mistake::NoClock {
            return Vec::new();
        }
        let actions = node.lender.tick(self.clock(host));
        let mut ended = Vec::new();
        for action in &actions {
            if let LenderAction::Revoke { device, epoch, .. } = action {
                self.note(|| format!("{}/{device} ends epoch {epoch} by its clock", HOSTS[host]));
                self.clocks.ended.insert((host, device.clone(), *epoch));
                let (host, device) = (HOSTS[host].to_owned(), device.clone());
                ended.push((FunctionId { host, device }, *epoch));
            }
        }
        self.lender_actions(host, node, actions);
        ended
    }

    /// All nodes that are not frozen have looked at their clocks, and lenders have ended these epochs by theirs.
    pub fn check_clocks(&self, ended: &[(FunctionId, Epoch)]) -> Result<(), String> {
        for (host, node) in self.nodes.iter().enumerate() {
            let Some(node) = node.as_ref().filter(|_| self.slow_until[host] <= self.now) else {
                continue;
            };
            // Also one that is being returned, and that its user has not released yet.
            let late = node.open.iter().find(|(_, function)| ended.contains(function));
            if let Some((lease, (function, _))) = late {
                return Err(format!(
                    "{function} is served after its lender has ended lease {lease}"
                ));
            }
            for device in node.devices.keys().filter(|_| self.strict) {
                let Some(holder) = node.lender.admitted(device) else { continue };
                let heard = self.clocks.heard.get(&(host, device.clone()));
                let heard = heard.filter(|(epoch, _)| *epoch == holder.epoch);
                let unheard = heard.map(|(_, at)| self.clock(host) - at);
                if unheard.is_none_or(|time| time >= CONFIG.ttl) {
                    let epoch = holder.epoch;
                    return Err(format!("{device} serves epoch {epoch} after {unheard:?} ms"));
                }
            }
        }
        Ok(())
    }
}
