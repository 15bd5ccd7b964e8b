//! After the last fault: everything is available again.

use rackbus_lease::{Authority, Availability, FunctionId, LeaseId, LeaseRecord, LeaseState};

use crate::world::World;
use crate::{CONFIG, HOSTS};

/// What is borrowed once more in the end.
const ALPHAS: &str = "alpha/nvme0";

impl World {
    /// No more faults: everybody is up, every message arrives.
    pub fn settle(&mut self, until: impl Fn(&World) -> bool) -> Result<(), String> {
        for _ in 0..400 {
            while !self.network.is_empty() {
                self.deliver(0)?;
            }
            for host in 0..HOSTS.len() {
                self.finish_work(host)?;
            }
            self.attach()?;
            if self.network.is_empty() && until(self) {
                return Ok(());
            }
            self.now += 50;
            self.tick()?;
        }
        Err("after the faults stopped, it did not settle".to_owned())
    }

    pub fn recover(&mut self) -> Result<(), String> {
        self.faults = false;
        self.store_fails_until = 0;
        self.frozen_until = 0;
        self.slow_until.fill(0);
        self.clocks.reconnect();
        if self.authority.is_none() {
            self.restore_authority();
        }
        for host in 0..HOSTS.len() {
            if self.nodes[host].is_none() {
                self.start_node(host);
            }
        }
        // What could not be stored is asked again within this time.
        let asked_again = self.now + 2 * CONFIG.resend;
        self.settle(|w| {
            let mut leases = w.authority.iter().flat_map(Authority::leases);
            let active = |l: &LeaseRecord| matches!(l.state, LeaseState::Active { .. });
            w.now >= asked_again
                && w.nodes.iter().flatten().all(|n| n.registered && n.pending.is_empty())
                && leases.all(|l| !active(l) || l.asked_level().is_none())
        })?;
        self.check_levels()?;
        self.check_turns()?;
        // Whoever has something gives it back; then everything is available again.
        for lease in self.live() {
            self.give_back(lease)?;
        }
        // What is being withdrawn is withdrawn, and the rack file's devices are all offered again.
        // Nodes say once more what they have: records that are an older copy may tell of other devices.
        self.now += CONFIG.ttl;
        self.tick()?;
        self.settle(World::devices_are_answered)?;
        self.offer("nvme0")?;
        self.settle(|w| {
            let in_use = |state: &Availability| {
                matches!(state, Availability::Lent { .. } | Availability::Revoking { .. })
            };
            let idle = |a: &Authority| !a.functions().any(|it| in_use(&it.state));
            [ALPHAS, "beta/nvme1"].iter().all(|function| w.is_offered(function))
                && w.authority.as_ref().is_some_and(idle)
                && w.devices_are_answered()
        })?;
        // All nodes are heard from again, perhaps as lives that were not known before: the first
        // lease may still fall to that, the next must not.
        self.now += CONFIG.ttl;
        self.tick()?;
        self.settle(World::devices_are_answered)?;
        self.check_devices()?;
        let anew = self.borrow_anew("gamma")?;
        let lease = match anew {
            Some(lease) => lease,
            None => {
                let again = self.borrow_anew("gamma")?;
                again.ok_or("two leases in a row ended without a fault")?
            }
        };
        self.give_back(lease)?;
        self.settle(|w| w.is_offered(ALPHAS))?;
        let lease = self.borrow_anew("beta")?.ok_or("a lease ended without a fault")?;
        self.check_front(lease)
    }

    fn is_offered(&self, function: &str) -> bool {
        let function = function.parse().expect("a name");
        let found = self.authority.as_ref().and_then(|it| it.function(&function));
        found.is_some_and(|it| it.state == Availability::Offered)
    }

    /// Whether every node has said what it did about its devices.
    fn devices_are_answered(&self) -> bool {
        let Some(authority) = &self.authority else { return false };
        authority.devices().all(|change| {
            let host = authority.hosts().find(|(host, _)| host.host == change.host);
            let life = host.map(|(host, _)| host.incarnation);
            change.answer.as_ref().is_some_and(|it| Some(it.incarnation) == life)
        })
    }

    /// The lease of a host that borrows now, if it becomes active.
    pub fn borrow_anew(&mut self, borrower: &str) -> Result<Option<LeaseId>, String> {
        let function: FunctionId = ALPHAS.parse().expect("a name");
        let granted = self.borrow(&function, borrower)?.ok_or("nothing was decided")?;
        let lease = granted.map_err(|refused| format!("refused: {refused}"))?;
        let state =
            |w: &World| w.authority.as_ref().and_then(|a| a.lease(lease)).map(|l| l.state.clone());
        self.settle(|w| match state(w) {
            Some(LeaseState::Active { .. }) => true,
            Some(LeaseState::Ended { .. }) => w.is_offered(ALPHAS),
            _ => false,
        })?;
        Ok(matches!(state(self), Some(LeaseState::Active { .. })).then_some(lease))
    }
}
