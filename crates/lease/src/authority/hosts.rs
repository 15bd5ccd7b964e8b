//! Hosts leave the rack while it runs.
//!
//! A host joins by being heard: nothing is noted of it before. One that leaves has nothing that others have, and nothing
//! of others; that is decided in the step in which it leaves, so nobody borrows in between.

use std::collections::BTreeSet;

use crate::device::DeviceChange;
use crate::message::{FunctionId, LeaseId, Millis};

use super::{Authority, Availability, Decision, FunctionRecord, LeaseRecord, Record, Undo};

/// Why a host cannot leave the rack now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostInUse {
    /// Somebody has a function of it, or it is not back yet.
    #[error("{function} is lent to {borrower} (lease {lease})")]
    Lends {
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// The host that borrowed it.
        borrower: String,
        /// The lease by which it did.
        lease: LeaseId,
    },
    /// It has a function of another host, or has not given it back yet.
    #[error("{host} borrows {function} (lease {lease})")]
    Borrows {
        /// The host that is to leave.
        host: String,
        /// The function, by its lender and its name there.
        function: FunctionId,
        /// The lease by which it has it.
        lease: LeaseId,
    },
    /// It takes turns on a function, or others do on one of its own.
    #[error("{borrower} takes turns on {function}")]
    Shares {
        /// The host that takes turns.
        borrower: String,
        /// The function, by its lender and its name there.
        function: FunctionId,
    },
    /// A composition that was saved has functions of it, or is for it.
    #[error("the saved composition {composition} is of {host}")]
    Composed {
        /// Name of the composition.
        composition: String,
        /// The host that is to leave.
        host: String,
    },
}

impl Authority {
    /// Has hosts leave the rack, whose nodes are to end: nobody borrows of them or for them any more. One that joins again
    /// is a new one, but for the epochs of its functions: these only grow. What is not in the rack leaves without an
    /// effect.
    ///
    /// # Errors
    /// [`HostInUse`]; nothing changes then.
    pub fn remove_hosts(
        &mut self,
        now: Millis,
        hosts: &BTreeSet<String>,
    ) -> Result<Decision, HostInUse> {
        self.enter(now);
        self.check_unused(hosts)?;
        for host in hosts {
            let offered = |it: &&FunctionRecord| it.state != Availability::Withdrawn;
            let functions: Vec<FunctionRecord> =
                self.functions.of_host(host).filter(offered).cloned().collect();
            for record in functions {
                self.put_function(FunctionRecord { state: Availability::Withdrawn, ..record });
            }
            let of_host = |it: &&DeviceChange| it.host == *host;
            let changes: Vec<_> = self.devices.values().filter(of_host).cloned().collect();
            changes.into_iter().for_each(|change| self.remove_device(change));
            self.forget_host(host);
        }
        Ok(self.take())
    }

    /// Has those of the noted hosts leave the rack that are not among `hosts`: a control plane that ended before a host's
    /// leaving was stored goes on with a rack file that has the host no more. What is in use stays as it is.
    pub fn keep_hosts(&mut self, now: Millis, hosts: &BTreeSet<String>) -> Decision {
        let functions = self.functions.values().filter(|it| it.state != Availability::Withdrawn);
        let lenders = functions.map(|it| &it.function.host);
        let noted =
            self.hosts.keys().chain(lenders).chain(self.devices.values().map(|it| &it.host));
        let left: BTreeSet<String> = noted.filter(|host| !hosts.contains(*host)).cloned().collect();
        let mut outcome = Decision::default();
        for host in left {
            if let Ok(removed) = self.remove_hosts(now, &BTreeSet::from([host])) {
                outcome.append(removed);
            }
        }
        outcome
    }

    fn check_unused(&self, hosts: &BTreeSet<String>) -> Result<(), HostInUse> {
        let leaves =
            |it: &LeaseRecord| hosts.contains(&it.borrower) || hosts.contains(&it.function.host);
        // Also one that is over, as long as its function is on its way back.
        let held = |it: &LeaseRecord| {
            let state = self.functions.get(&it.function).map(|record| &record.state);
            it.is_live()
                || matches!(state, Some(Availability::Revoking { lease }) if *lease == it.lease)
        };
        if let Some(lease) = self.leases.values().find(|it| leaves(it) && held(it)) {
            let (function, number) = (lease.function.clone(), lease.lease);
            let borrower = lease.borrower.clone();
            return Err(match hosts.contains(&function.host) {
                true => HostInUse::Lends { function, borrower, lease: number },
                false => HostInUse::Borrows { host: borrower, function, lease: number },
            });
        }
        let shares = self.shares.values();
        let mut concerned =
            shares.filter(|it| hosts.contains(&it.borrower) || hosts.contains(&it.function.host));
        if let Some(share) = concerned.next() {
            let (borrower, function) = (share.borrower.clone(), share.function.clone());
            return Err(HostInUse::Shares { borrower, function });
        }
        for composition in self.compositions.values() {
            let lenders = composition.functions.iter().map(|function| &function.host);
            let mut named = lenders.chain([&composition.borrower]);
            if let Some(host) = named.find(|host| hosts.contains(*host)) {
                let (composition, host) = (composition.name.clone(), host.clone());
                return Err(HostInUse::Composed { composition, host });
            }
        }
        Ok(())
    }

    fn forget_host(&mut self, host: &str) {
        if let Some(contact) = self.contacts.remove(host) {
            self.undo.push(Undo::Contact(host.to_owned(), contact));
        }
        if let Some(before) = self.hosts.remove(host) {
            self.undo.push(Undo::Host(host.to_owned(), Some(before)));
            self.outcome.records.push(Record::HostRemoved { host: host.to_owned() });
        }
    }
}
