//! The authority: who may use what, and the records that survive it.
//!
//! Every change is returned as [`Record`]s to be stored *before* the messages beside them are
//! sent; an authority restored from its records goes on where the old one stopped. It repeats
//! what was not answered, so it does not matter which messages its death swallowed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::message::{Epoch, FunctionId, Grant, Incarnation, LeaseId, Message, Millis};

/// Time limits, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// How long a lease lives without being renewed.
    pub ttl: Millis,
    /// How long a borrower may take to let go in order (a guest unplugs the device) before its
    /// lender is told to take the function away.
    pub close_grace: Millis,
    /// How long to wait for an answer before a message is sent again.
    pub resend: Millis,
    /// How long a node may be silent before new leases on it are refused.
    pub silence: Millis,
}

impl Default for Config {
    fn default() -> Self {
        Config { ttl: 15_000, close_grace: 20_000, resend: 250, silence: 15_000 }
    }
}

/// Why a lease ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", content = "detail", rename_all = "snake_case")]
pub enum EndReason {
    /// It was returned.
    Returned,
    /// Its borrower was silent for longer than its time to live.
    Expired,
    /// Its borrower's node started anew, without it.
    BorrowerRestarted,
    /// Its lender's node is gone, as the borrower noticed.
    LenderLost(String),
    /// Its lender's node started anew; what the function was doing is lost.
    LenderRestarted,
    /// The lender could not run the device.
    LenderFailed(String),
    /// The borrower could not serve the function.
    BorrowerFailed(String),
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndReason::Returned => f.write_str("returned"),
            EndReason::Expired => f.write_str("expired: its borrower was silent too long"),
            EndReason::BorrowerRestarted => f.write_str("its borrower's node was restarted"),
            EndReason::LenderLost(how) => write!(f, "its lender was lost: {how}"),
            EndReason::LenderRestarted => f.write_str("its lender's node was restarted"),
            EndReason::LenderFailed(how) => write!(f, "its lender could not lend it: {how}"),
            EndReason::BorrowerFailed(how) => write!(f, "its borrower could not open it: {how}"),
        }
    }
}

/// Where a lease stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LeaseState {
    /// The lender is being told to let the borrower in.
    Arming,
    /// The borrower is being told to open its end.
    Opening,
    /// The function can be used.
    Active {
        /// Where the borrower serves it.
        socket: String,
    },
    /// The borrower is being told to let go.
    Closing {
        /// Why.
        reason: EndReason,
    },
    /// It is over. The function may still be on its way back.
    Ended {
        /// Why.
        reason: EndReason,
    },
}

/// A lease, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// Its number.
    pub lease: LeaseId,
    /// The function.
    pub function: FunctionId,
    /// Its fencing epoch.
    pub epoch: Epoch,
    /// The borrowing host.
    pub borrower: String,
    /// When it was asked for.
    pub since: Millis,
    /// When it ended.
    pub until: Option<Millis>,
    /// Where it stands.
    pub state: LeaseState,
}

impl LeaseRecord {
    /// Whether it is not over.
    pub fn is_live(&self) -> bool {
        !matches!(self.state, LeaseState::Ended { .. })
    }
}

/// Where a function stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum FunctionState {
    /// To be had.
    Offered,
    /// Taken by a lease.
    Lent {
        /// Which.
        lease: LeaseId,
    },
    /// The lender is being told to take it back, reset and scrub it.
    Revoking {
        /// From which lease.
        lease: LeaseId,
    },
    /// Its host no longer offers it.
    Withdrawn,
}

/// A function, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// Its name.
    pub function: FunctionId,
    /// The newest epoch given out.
    pub epoch: Epoch,
    /// Where it stands.
    pub state: FunctionState,
}

/// A host's node, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// The host.
    pub host: String,
    /// Its latest life.
    pub incarnation: Incarnation,
    /// Where its link listens.
    pub address: String,
}

/// One thing to store, by its key, before anything is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// A host's node.
    Host(HostRecord),
    /// A function.
    Function(FunctionRecord),
    /// A lease.
    Lease(LeaseRecord),
    /// A lease that is over for long: to be removed.
    Forgotten {
        /// Which.
        lease: LeaseId,
    },
}

/// Leases that are over and still remembered, to tell why they ended.
const REMEMBERED: usize = 1000;

/// Why a function cannot be borrowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BorrowRefused {
    /// Nobody offers such a function.
    #[error("no host offers {0}")]
    Unknown(FunctionId),
    /// Its host's node no longer offers it.
    #[error("{0} is no longer offered by its host")]
    Withdrawn(FunctionId),
    /// Somebody has it.
    #[error("{function} is lent to {borrower} (lease {lease})")]
    Held {
        /// The function.
        function: FunctionId,
        /// Who has it.
        borrower: String,
        /// Under which lease.
        lease: LeaseId,
        /// Since when.
        since: Millis,
    },
    /// It is on its way back from somebody.
    #[error("{function} is being taken back from {borrower} (lease {lease})")]
    Returning {
        /// The function.
        function: FunctionId,
        /// Who had it.
        borrower: String,
        /// Under which lease.
        lease: LeaseId,
    },
    /// There is no such host.
    #[error("no host {0} has registered")]
    NoHost(String),
    /// A node that is needed is silent.
    #[error("the node of {host} has not been heard from for {silent_ms} ms")]
    Silent {
        /// The host.
        host: String,
        /// For how long.
        silent_ms: Millis,
    },
}

/// Why a lease cannot be returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReturnRefused {
    /// There is no such lease.
    #[error("there is no lease {0}")]
    Unknown(LeaseId),
    /// It is over already.
    #[error("lease {lease} is over already: {reason}")]
    Over {
        /// Which.
        lease: LeaseId,
        /// Why it ended.
        reason: EndReason,
    },
}

/// What the control plane must do: store the records, then send the messages.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// To be stored first, all or nothing.
    pub records: Vec<Record>,
    /// To be sent then: the host, and what.
    pub messages: Vec<(String, Message)>,
}

/// What is known of a host in this life of the authority only.
#[derive(Debug, Clone, Copy)]
struct Contact {
    heard: Millis,
}

/// The state machine of the control plane.
#[derive(Debug)]
pub struct Authority {
    config: Config,
    hosts: BTreeMap<String, HostRecord>,
    contacts: BTreeMap<String, Contact>,
    functions: BTreeMap<FunctionId, FunctionRecord>,
    leases: BTreeMap<LeaseId, LeaseRecord>,
    /// When each live lease expires; each closing one stops being waited for.
    deadlines: BTreeMap<LeaseId, Millis>,
    next_lease: LeaseId,
    resend_at: Millis,
    outcome: Outcome,
}

impl Authority {
    /// An authority of an empty rack.
    pub fn new(config: Config) -> Self {
        Authority::restore(config, 0, [])
    }

    /// The authority that stored `records`, going on at `now`. Every live lease gets a whole time
    /// to live: nobody could renew while there was nobody to renew with.
    pub fn restore(config: Config, now: Millis, records: impl IntoIterator<Item = Record>) -> Self {
        let mut authority = Authority {
            config,
            hosts: BTreeMap::new(),
            contacts: BTreeMap::new(),
            functions: BTreeMap::new(),
            leases: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            next_lease: 1,
            resend_at: now,
            outcome: Outcome::default(),
        };
        for record in records {
            match record {
                Record::Host(host) => {
                    authority.contacts.insert(host.host.clone(), Contact { heard: now });
                    authority.hosts.insert(host.host.clone(), host);
                }
                Record::Function(function) => {
                    authority.functions.insert(function.function.clone(), function);
                }
                Record::Lease(lease) => {
                    authority.next_lease = authority.next_lease.max(lease.lease + 1);
                    let time = match lease.state {
                        LeaseState::Closing { .. } => Some(config.close_grace),
                        LeaseState::Ended { .. } => None,
                        _ => Some(config.ttl),
                    };
                    if let Some(time) = time {
                        authority.deadlines.insert(lease.lease, now.saturating_add(time));
                    }
                    authority.leases.insert(lease.lease, lease);
                }
                Record::Forgotten { lease } => {
                    authority.leases.remove(&lease);
                }
            }
        }
        authority
    }

    /// Lends `function` to `borrower`, if it can be had.
    ///
    /// # Errors
    /// [`BorrowRefused`], which names the holder; nothing changes then.
    pub fn borrow(
        &mut self,
        now: Millis,
        function: &FunctionId,
        borrower: &str,
    ) -> Result<(LeaseId, Outcome), BorrowRefused> {
        self.check_contact(now, borrower)?;
        let record = self.functions.get(function);
        let record = record.ok_or_else(|| BorrowRefused::Unknown(function.clone()))?;
        match record.state {
            FunctionState::Withdrawn => return Err(BorrowRefused::Withdrawn(function.clone())),
            FunctionState::Lent { lease } | FunctionState::Revoking { lease } => {
                return Err(self.held(function, lease));
            }
            FunctionState::Offered => {}
        }
        self.check_contact(now, &function.host)?;
        let lease = self.next_lease;
        self.next_lease += 1;
        let epoch = record.epoch + 1;
        let (function, borrower) = (function.clone(), borrower.to_owned());
        let state = LeaseState::Arming;
        let record = LeaseRecord {
            lease,
            function: function.clone(),
            epoch,
            borrower,
            since: now,
            until: None,
            state,
        };
        self.deadlines.insert(lease, now.saturating_add(self.config.ttl));
        self.put_lease(record);
        self.put_function(FunctionRecord { function, epoch, state: FunctionState::Lent { lease } });
        self.say(lease);
        Ok((lease, self.take()))
    }

    /// Ends a lease in order: its borrower lets go first.
    ///
    /// # Errors
    /// [`ReturnRefused`]; nothing changes then.
    pub fn give_back(&mut self, now: Millis, lease: LeaseId) -> Result<Outcome, ReturnRefused> {
        let record = self.leases.get(&lease).ok_or(ReturnRefused::Unknown(lease))?;
        match &record.state {
            LeaseState::Ended { reason } => {
                return Err(ReturnRefused::Over { lease, reason: reason.clone() });
            }
            LeaseState::Closing { .. } => {}
            _ => self.close(now, lease, EndReason::Returned),
        }
        Ok(self.take())
    }

    /// A message from `host`'s node.
    pub fn receive(&mut self, now: Millis, host: &str, message: Message) -> Outcome {
        self.contacts.insert(host.to_owned(), Contact { heard: now });
        match message {
            Message::Register { incarnation, devices, address } => {
                self.register(now, host, incarnation, devices, address);
            }
            Message::Armed { incarnation, device, epoch } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch)
                    && self.leases[&lease].state == LeaseState::Arming
                {
                    self.set_lease_state(lease, LeaseState::Opening);
                    self.say(lease);
                }
            }
            Message::ArmFailed { incarnation, device, epoch, reason } => {
                if let Some(lease) = self.current(host, incarnation, &device, epoch) {
                    self.finish(now, lease, EndReason::LenderFailed(reason));
                }
            }
            Message::Revoked { incarnation, device, epoch } => {
                self.revoked(host, incarnation, device, epoch);
            }
            Message::Opened { lease, outcome } => self.opened(now, host, lease, outcome),
            Message::Renew { lease, .. } => self.renew(now, host, lease),
            Message::Lost { lease, reason } => self.lost(now, host, lease, reason),
            Message::Closed { lease } => self.closed(now, host, lease),
            // Only an authority says the others.
            _ => {}
        }
        self.take()
    }

    /// Time has passed: expires leases and repeats what was not answered. Call it at
    /// [`next_tick`](Authority::next_tick).
    pub fn tick(&mut self, now: Millis) -> Outcome {
        let due: Vec<LeaseId> =
            self.deadlines.iter().filter(|(_, at)| **at <= now).map(|(l, _)| *l).collect();
        for lease in due {
            let reason = match &self.leases[&lease].state {
                LeaseState::Closing { reason } => reason.clone(),
                _ => EndReason::Expired,
            };
            self.finish(now, lease, reason);
        }
        if self.resend_at <= now {
            self.resend_at = now.saturating_add(self.config.resend);
            let live: Vec<LeaseId> = self.deadlines.keys().copied().collect();
            live.into_iter().for_each(|lease| self.say(lease));
            let back: Vec<LeaseId> = self
                .functions
                .values()
                .filter_map(|f| match f.state {
                    FunctionState::Revoking { lease } => Some(lease),
                    _ => None,
                })
                .collect();
            back.into_iter().for_each(|lease| self.say_revoke(lease));
        }
        self.take()
    }

    /// When [`tick`](Authority::tick) has something to do next, if nothing else happens before.
    pub fn next_tick(&self) -> Option<Millis> {
        let waiting = self.leases.values().any(|l| {
            matches!(l.state, LeaseState::Arming | LeaseState::Opening | LeaseState::Closing { .. })
        }) || self
            .functions
            .values()
            .any(|f| matches!(f.state, FunctionState::Revoking { .. }));
        let resend = waiting.then_some(self.resend_at);
        self.deadlines.values().copied().chain(resend).min()
    }

    /// The leases, also those that are over.
    pub fn leases(&self) -> impl Iterator<Item = &LeaseRecord> {
        self.leases.values()
    }

    /// One lease.
    pub fn lease(&self, lease: LeaseId) -> Option<&LeaseRecord> {
        self.leases.get(&lease)
    }

    /// The functions.
    pub fn functions(&self) -> impl Iterator<Item = &FunctionRecord> {
        self.functions.values()
    }

    /// One function.
    pub fn function(&self, function: &FunctionId) -> Option<&FunctionRecord> {
        self.functions.get(function)
    }

    /// The hosts, and when each was last heard from.
    pub fn hosts(&self) -> impl Iterator<Item = (&HostRecord, Millis)> {
        self.hosts.values().map(|h| (h, self.contacts.get(&h.host).map_or(0, |c| c.heard)))
    }

    /// The time limits.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn check_contact(&self, now: Millis, host: &str) -> Result<(), BorrowRefused> {
        if !self.hosts.contains_key(host) {
            return Err(BorrowRefused::NoHost(host.to_owned()));
        }
        let heard = self.contacts.get(host).map_or(0, |c| c.heard);
        match now.saturating_sub(heard) {
            silent_ms if silent_ms > self.config.silence => {
                Err(BorrowRefused::Silent { host: host.to_owned(), silent_ms })
            }
            _ => Ok(()),
        }
    }

    fn held(&self, function: &FunctionId, lease: LeaseId) -> BorrowRefused {
        let record = &self.leases[&lease];
        let (function, borrower) = (function.clone(), record.borrower.clone());
        match record.state {
            LeaseState::Closing { .. } | LeaseState::Ended { .. } => {
                BorrowRefused::Returning { function, borrower, lease }
            }
            _ => BorrowRefused::Held { function, borrower, lease, since: record.since },
        }
    }

    fn register(
        &mut self,
        now: Millis,
        host: &str,
        incarnation: Incarnation,
        devices: Vec<String>,
        address: String,
    ) {
        let known = self.hosts.get(host).cloned();
        let latest = known.as_ref().map_or(0, |h| h.incarnation);
        if incarnation < latest {
            self.send(host, Message::Outlived { incarnation, latest });
            return;
        }
        self.send(host, Message::Registered { incarnation });
        let record = HostRecord { host: host.to_owned(), incarnation, address };
        let new_life = incarnation > latest;
        if !new_life && known.as_ref() == Some(&record) {
            return;
        }
        self.hosts.insert(host.to_owned(), record.clone());
        self.outcome.records.push(Record::Host(record));
        if new_life {
            self.new_life(now, host, &devices);
        }
    }

    /// A node started anew: nothing of its former life can reach or be reached any more.
    fn new_life(&mut self, now: Millis, host: &str, devices: &[String]) {
        let lent: Vec<FunctionRecord> =
            self.functions.values().filter(|f| f.function.host == host).cloned().collect();
        for mut function in lent {
            if let FunctionState::Lent { lease } = function.state {
                self.end_lease(now, lease, EndReason::LenderRestarted);
                self.say_ended(lease);
            }
            // Also when it was being revoked: its process is gone, and every mapping with it.
            function.state = match devices.contains(&function.function.device) {
                true => FunctionState::Offered,
                false => FunctionState::Withdrawn,
            };
            self.put_function(function);
        }
        for device in devices {
            let function = FunctionId { host: host.to_owned(), device: device.clone() };
            if !self.functions.contains_key(&function) {
                let state = FunctionState::Offered;
                self.put_function(FunctionRecord { function, epoch: 0, state });
            }
        }
        let borrowed: Vec<LeaseId> = self
            .leases
            .values()
            .filter(|l| l.is_live() && l.borrower == host)
            .map(|l| l.lease)
            .collect();
        for lease in borrowed {
            self.finish(now, lease, EndReason::BorrowerRestarted);
        }
    }

    /// The live lease that has `device` under `epoch`, if the message is about this life of its host.
    fn current(
        &self,
        host: &str,
        incarnation: Incarnation,
        device: &str,
        epoch: Epoch,
    ) -> Option<LeaseId> {
        if self.hosts.get(host)?.incarnation != incarnation {
            return None;
        }
        let function = FunctionId { host: host.to_owned(), device: device.to_owned() };
        let record = self.functions.get(&function)?;
        match record.state {
            FunctionState::Lent { lease } if record.epoch == epoch => Some(lease),
            _ => None,
        }
    }

    fn opened(&mut self, now: Millis, host: &str, lease: LeaseId, outcome: Result<String, String>) {
        let Some(record) = self.leases.get(&lease).filter(|l| l.borrower == host) else {
            return;
        };
        match (&record.state, outcome) {
            (LeaseState::Opening, Ok(socket)) => {
                self.set_lease_state(lease, LeaseState::Active { socket });
                self.deadlines.insert(lease, now.saturating_add(self.config.ttl));
            }
            (LeaseState::Opening | LeaseState::Active { .. }, Err(reason)) => {
                self.finish(now, lease, EndReason::BorrowerFailed(reason));
            }
            (LeaseState::Ended { .. }, _) => self.say_ended(lease),
            _ => {}
        }
    }

    fn renew(&mut self, now: Millis, host: &str, lease: LeaseId) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Arming | LeaseState::Opening | LeaseState::Active { .. }) => {
                self.deadlines.insert(lease, now.saturating_add(self.config.ttl));
            }
            Some(LeaseState::Closing { .. }) => {}
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            None => {
                let reason = "the control plane does not know this lease".to_owned();
                self.send(host, Message::Ended { lease, reason });
            }
        }
    }

    fn lost(&mut self, now: Millis, host: &str, lease: LeaseId, reason: String) {
        match self.leases.get(&lease).filter(|l| l.borrower == host).map(|l| &l.state) {
            Some(LeaseState::Ended { .. }) => self.say_ended(lease),
            Some(LeaseState::Closing { .. }) | None => {}
            Some(_) => self.close(now, lease, EndReason::LenderLost(reason)),
        }
    }

    fn closed(&mut self, now: Millis, host: &str, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease).filter(|l| l.borrower == host) else {
            return;
        };
        if let LeaseState::Closing { reason } = &record.state {
            let reason = reason.clone();
            self.end_lease(now, lease, reason);
            self.start_revoke(lease);
        }
    }

    fn revoked(&mut self, host: &str, incarnation: Incarnation, device: String, epoch: Epoch) {
        if self.hosts.get(host).is_none_or(|h| h.incarnation != incarnation) {
            return;
        }
        let function = FunctionId { host: host.to_owned(), device };
        let Some(record) = self.functions.get(&function) else {
            return;
        };
        if record.epoch == epoch && matches!(record.state, FunctionState::Revoking { .. }) {
            let record = FunctionRecord { state: FunctionState::Offered, ..record.clone() };
            self.put_function(record);
        }
    }

    /// Ends a lease in order: the borrower first, then the lender.
    fn close(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.set_lease_state(lease, LeaseState::Closing { reason });
        self.deadlines.insert(lease, now.saturating_add(self.config.close_grace));
        self.say(lease);
    }

    /// Ends a lease at once: the lender takes the function away, the borrower is told.
    fn finish(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.end_lease(now, lease, reason);
        self.say_ended(lease);
        self.start_revoke(lease);
    }

    fn end_lease(&mut self, now: Millis, lease: LeaseId, reason: EndReason) {
        self.deadlines.remove(&lease);
        if let Some(record) = self.leases.get(&lease).cloned() {
            let state = LeaseState::Ended { reason };
            self.put_lease(LeaseRecord { state, until: Some(now), ..record });
            self.forget();
        }
    }

    /// Lets go of the oldest lease that is over and back, when there are too many.
    fn forget(&mut self) {
        if self.leases.len() <= REMEMBERED {
            return;
        }
        let wanted = |lease: LeaseId| {
            self.functions.values().any(|f| {
                matches!(f.state, FunctionState::Lent { lease: l } | FunctionState::Revoking { lease: l } if l == lease)
            })
        };
        let oldest = self.leases.values().find(|l| !l.is_live() && !wanted(l.lease));
        if let Some(lease) = oldest.map(|l| l.lease) {
            self.leases.remove(&lease);
            self.outcome.records.push(Record::Forgotten { lease });
        }
    }

    fn start_revoke(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let Some(function) = self.functions.get(&record.function) else {
            return;
        };
        if function.state == (FunctionState::Lent { lease }) {
            let state = FunctionState::Revoking { lease };
            self.put_function(FunctionRecord { state, ..function.clone() });
            self.say_revoke(lease);
        }
    }

    /// Says (again) what a live lease waits for.
    fn say(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease).cloned() else {
            return;
        };
        let Some(lender) = self.hosts.get(&record.function.host).cloned() else {
            return;
        };
        match record.state {
            LeaseState::Arming => {
                let message = Message::Arm {
                    incarnation: lender.incarnation,
                    device: record.function.device,
                    lease,
                    epoch: record.epoch,
                    borrower: record.borrower,
                };
                self.send(&lender.host, message);
            }
            LeaseState::Opening => {
                let (function, epoch) = (record.function, record.epoch);
                let (address, ttl) = (lender.address, self.config.ttl);
                let grant = Grant { lease, function, epoch, address, ttl };
                self.send(&record.borrower, Message::Granted(grant));
            }
            LeaseState::Closing { reason } => {
                let reason = reason.to_string();
                self.send(&record.borrower, Message::Ended { lease, reason });
            }
            LeaseState::Active { .. } | LeaseState::Ended { .. } => {}
        }
    }

    fn say_ended(&mut self, lease: LeaseId) {
        if let Some(LeaseRecord { borrower, state: LeaseState::Ended { reason }, .. }) =
            self.leases.get(&lease)
        {
            let (borrower, reason) = (borrower.clone(), reason.to_string());
            self.send(&borrower, Message::Ended { lease, reason });
        }
    }

    fn say_revoke(&mut self, lease: LeaseId) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let Some(lender) = self.hosts.get(&record.function.host) else {
            return;
        };
        let message = Message::Revoke {
            incarnation: lender.incarnation,
            device: record.function.device.clone(),
            epoch: record.epoch,
        };
        let host = lender.host.clone();
        self.send(&host, message);
    }

    fn send(&mut self, host: &str, message: Message) {
        self.outcome.messages.push((host.to_owned(), message));
    }

    fn set_lease_state(&mut self, lease: LeaseId, state: LeaseState) {
        if let Some(record) = self.leases.get(&lease).cloned() {
            self.put_lease(LeaseRecord { state, ..record });
        }
    }

    fn put_lease(&mut self, record: LeaseRecord) {
        self.outcome.records.push(Record::Lease(record.clone()));
        self.leases.insert(record.lease, record);
    }

    fn put_function(&mut self, record: FunctionRecord) {
        self.outcome.records.push(Record::Function(record.clone()));
        self.functions.insert(record.function.clone(), record);
    }

    fn take(&mut self) -> Outcome {
        std::mem::take(&mut self.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registered(hosts: &[(&str, &[&str])]) -> Authority {
        let mut authority = Authority::new(Config::default());
        for (host, devices) in hosts {
            let devices = devices.iter().map(|d| (*d).to_owned()).collect();
            let address = (*host).to_owned();
            let message = Message::Register { incarnation: 1, devices, address };
            authority.receive(0, host, message);
        }
        authority
    }

    /// Borrows for beta, and carries the messages of a faultless rack.
    fn lend(authority: &mut Authority, now: Millis) -> LeaseId {
        let function: FunctionId = "alpha/nvme0".parse().unwrap();
        let (lease, _) = authority.borrow(now, &function, "beta").unwrap();
        let epoch = authority.lease(lease).unwrap().epoch;
        let device = "nvme0".to_owned();
        authority.receive(now, "alpha", Message::Armed { incarnation: 1, device, epoch });
        authority.receive(now, "beta", Message::Opened { lease, outcome: Ok("s".into()) });
        lease
    }

    fn take_back(authority: &mut Authority, now: Millis, lease: LeaseId) {
        let epoch = authority.lease(lease).unwrap().epoch;
        authority.give_back(now, lease).unwrap();
        authority.receive(now, "beta", Message::Closed { lease });
        let device = "nvme0".to_owned();
        authority.receive(now, "alpha", Message::Revoked { incarnation: 1, device, epoch });
    }

    #[test]
    fn a_lease_that_is_not_renewed_expires_and_one_that_is_does_not() {
        let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
        let lease = lend(&mut authority, 0);
        let ttl = authority.config().ttl;
        authority.receive(ttl - 1, "beta", Message::Renew { lease, incarnation: 1 });
        authority.tick(ttl + 1);
        assert!(authority.lease(lease).unwrap().is_live());
        let outcome = authority.tick(2 * ttl);
        let state = &authority.lease(lease).unwrap().state;
        assert_eq!(state, &LeaseState::Ended { reason: EndReason::Expired });
        assert!(outcome.messages.iter().any(|(_, m)| matches!(m, Message::Revoke { .. })));
    }

    #[test]
    fn a_returning_authority_gives_every_lease_a_whole_time_to_live() {
        let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
        let lease = lend(&mut authority, 0);
        let records: Vec<Record> = (authority.hosts.values().cloned().map(Record::Host))
            .chain(authority.functions.values().cloned().map(Record::Function))
            .chain(authority.leases.values().cloned().map(Record::Lease))
            .collect();
        let ttl = authority.config().ttl;
        let mut returned = Authority::restore(Config::default(), 10 * ttl, records);
        returned.tick(11 * ttl - 1);
        assert!(returned.lease(lease).unwrap().is_live());
        returned.tick(11 * ttl);
        assert!(!returned.lease(lease).unwrap().is_live());
    }

    #[test]
    fn the_refusal_names_the_holder() {
        let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[]), ("gamma", &[])]);
        let lease = lend(&mut authority, 5);
        let function: FunctionId = "alpha/nvme0".parse().unwrap();
        let refused = authority.borrow(6, &function, "gamma").unwrap_err();
        let borrower = "beta".to_owned();
        assert_eq!(refused, BorrowRefused::Held { function, borrower, lease, since: 5 });
    }

    #[test]
    fn old_leases_are_forgotten_and_their_numbers_stay_used() {
        let mut authority = registered(&[("alpha", &["nvme0"]), ("beta", &[])]);
        let mut last = 0;
        for cycle in 0..REMEMBERED as u64 + 10 {
            last = lend(&mut authority, cycle);
            take_back(&mut authority, cycle, last);
        }
        assert!(authority.leases().count() <= REMEMBERED);
        assert!(authority.lease(1).is_none() && authority.lease(last).is_some());
        assert_eq!(lend(&mut authority, 0), last + 1);
    }
}
