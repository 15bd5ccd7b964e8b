//! How the control plane's state looks from outside: hosts, functions, leases, and refusals.

use rackbus_lease::{
    Availability, BorrowRefused, EndReason, FunctionId, FunctionRecord, LeaseRecord, LeaseState,
    Message, Placement, TurnUse,
};

use super::{INCIDENTS, InventoryDevice, RackState, Service, WriterShared, millis};
use crate::api::{
    ApiError, Device, DeviceState, HostState, HostStatus, LONGEST_LEVEL, Lease, LeaseStage,
    RackStatus,
};

use crate::leadership::members::StoreHealth;
use crate::leadership::serving::ControlStatus;

/// Bytes of the longest reason, or path, that is kept of what a node says.
const LONGEST_REASON: usize = 1024;
/// Bytes of the longest message that a node sends, without the devices that it registers.
const LONGEST_MESSAGE: usize = 64 << 10;

/// Leaves of a text no more than so many bytes.
fn shorten(text: &mut String, longest: usize) {
    let end = (0..=longest.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
}

impl Service {
    /// The rack as a whole.
    pub fn status(&self) -> RackStatus {
        let (shared, known) = (&self.shared, self.shared.known());
        let inventory = shared.inventory();
        let ended = known.leases.values().rev().map(present);
        let incidents = ended.filter(|lease| lease.reason.is_some() && !lease.returned);
        let hosts = inventory.hosts.iter();
        RackStatus {
            rack: inventory.rack.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: millis(shared.clock.begun.elapsed()),
            pid: std::process::id(),
            hosts: hosts.map(|host| shared.host(&known, host)).collect(),
            live_leases: known.leases.values().filter(|l| l.is_live()).count(),
            refused: known.refused,
            store_failures: known.store_failures,
            log_lines_left_out: (shared.log_lines_left_out)(),
            incidents: incidents.take(INCIDENTS).collect(),
        }
    }

    /// The control plane, where this process is all of it.
    pub fn alone(&self) -> ControlStatus {
        let health = StoreHealth { healthy: true, ..StoreHealth::default() };
        ControlStatus {
            rack: self.shared.inventory().rack.clone(),
            store: "sqlite".to_owned(),
            answers: None,
            leads: true,
            leader: None,
            term: Some(self.shared.term.load(std::sync::atomic::Ordering::Acquire)),
            members: Vec::new(),
            health,
        }
    }

    /// The functions of the rack.
    pub fn devices(&self) -> Vec<Device> {
        let (shared, known) = (&self.shared, self.shared.known());
        shared.inventory().devices.iter().map(|device| shared.device(&known, device)).collect()
    }

    /// The leases; with `all`, also those that are over.
    pub fn leases(&self, all: bool) -> Vec<Lease> {
        let known = self.shared.known();
        known.leases.values().filter(|l| all || l.is_live()).map(present).collect()
    }

    /// The lease of this number, also one that has ended and is still remembered.
    pub fn lease(&self, lease: u64) -> Option<Lease> {
        self.shared.known().leases.get(&lease).map(present)
    }
}

impl WriterShared {
    pub(super) fn check_host(&self, host: &str) -> Result<(), ApiError> {
        match self.inventory().hosts.iter().any(|h| h == host) {
            true => Ok(()),
            false => Err(problem(
                "unknown_host",
                format!("rack {} has no host {host}", self.inventory().rack),
                &format!("its hosts are {}", self.inventory().hosts.join(", ")),
            )),
        }
    }

    /// Where a front that is asked for at `placement` runs: of hosts that are machines, at its borrower or in that host's own
    /// PCI tree.
    pub(super) fn placed(&self, placement: Placement) -> Placement {
        match placement {
            Placement::Host => Placement::Host,
            _ if self.inventory().apart => Placement::Borrower,
            placement => placement,
        }
    }

    /// Refuses a front of `what` at a lender that is another machine.
    pub(super) fn check_apart(
        &self,
        placement: Option<Placement>,
        what: &str,
    ) -> Result<(), ApiError> {
        if !self.inventory().apart || placement != Some(Placement::Lender) {
            return Ok(());
        }
        Err(problem(
            "inseparable",
            format!(
                "the hosts of this rack are machines: the front of {what} can run at its borrower only"
            ),
            "ask for placement `borrower` or, where an NTB joins the two, `host`, or for no placement",
        ))
    }

    /// Whether the fronts of all of `functions` can run at `placement` for `borrower`. One that there is not is
    /// refused elsewhere.
    pub(super) fn check_placement(
        &self,
        functions: &[FunctionId],
        placement: Placement,
        borrower: &str,
    ) -> Result<(), ApiError> {
        let inventory = self.inventory();
        let unfit = |device: &&InventoryDevice| !device.serves(placement, borrower);
        let mut named = functions.iter().filter_map(|function| inventory.devices.get(function));
        let Some(device) = named.find(unfit) else { return Ok(()) };
        let InventoryDevice { function, kind, .. } = device;
        Err(match placement {
            Placement::Host => problem(
                "no_window",
                format!(
                    "{function} cannot appear in {borrower}'s own PCI tree: that takes an NTB from {} to {borrower}, and \
                     a function of kind {kind} that can be lent through one ({})",
                    function.host, device.detail
                ),
                "name the NTBs in the rack file ([hosts.HOST.ntb.OTHER]), or ask for no placement",
            ),
            Placement::Borrower | Placement::Lender => problem(
                "inseparable",
                format!(
                    "{function} cannot be borrowed with strict isolation, or from another machine: a function of \
                     kind {kind} runs whole at its lender"
                ),
                "borrow it on its lender's machine without strict isolation, if the lender may have memory of \
                 the borrower's",
            ),
        })
    }

    /// Whether the borrower's node plugs functions into VMs, where one is to be plugged into `vm`. An older one ignores
    /// that, and would have it said that the function is there.
    pub(super) fn check_plugs(&self, vm: Option<&str>, borrower: &str) -> Result<(), ApiError> {
        let known = self.known();
        let is_older = known.reports.get(borrower).is_some_and(|report| !report.plugs_into_vms);
        match vm.filter(|_| is_older) {
            None => Ok(()),
            Some(vm) => Err(problem(
                "version",
                format!("{borrower}'s node is older and does not plug functions into VM {vm}"),
                &format!("restart it with this version: rackbus restart {borrower}"),
            )),
        }
    }

    /// Refuses, or leaves out, what a node may not fill the records with.
    pub(super) fn bound(&self, host: &str, message: &mut Message) -> Result<(), ApiError> {
        let mut most = LONGEST_MESSAGE;
        if let Message::Opened { outcome: Ok(text) | Err(text), .. }
        | Message::Lost { reason: text, .. }
        | Message::ArmFailed { reason: text, .. }
        | Message::LevelSet { outcome: Err(text), .. }
        | Message::TurnUsed { how: TurnUse::Gone(text), .. }
        | Message::Offered { outcome: Err(text), .. } = message
        {
            // They are kept in records and events, of which there are many.
            shorten(text, LONGEST_REASON);
        }
        let level = match message {
            Message::LevelSet { level, .. } => level.as_mut(),
            Message::Armed { change: Some(change), .. } => {
                if let Some(Err(reason)) = &mut change.outcome {
                    shorten(reason, LONGEST_REASON);
                }
                change.level.as_mut()
            }
            _ => None,
        };
        // No level that was asked for is longer.
        if let Some(level) = level {
            shorten(level, LONGEST_LEVEL);
        }
        if let Message::Register { devices, .. } | Message::Offered { outcome: Ok(devices), .. } =
            message
        {
            let inventory = self.inventory();
            let of_host =
                |name: &String| FunctionId { host: host.to_owned(), device: name.clone() };
            devices.retain(|name, _| inventory.devices.get(&of_host(name)).is_some());
            // As many as the rack file has, each with its name and epoch.
            most += devices.keys().map(|name| name.len() + 32).sum::<usize>();
        }
        let text = serde_json::to_string(message).unwrap_or_default();
        if text.len() <= most {
            return Ok(());
        }
        let error =
            format!("a message of {} bytes is longer than any that a node sends", text.len());
        Err(problem("bad_request", error, "run the same version of rackbus on all machines"))
    }

    pub(super) fn host(&self, known: &RackState, host: &str) -> HostStatus {
        let registered = known.hosts.get(host);
        let listens = known.listens(host);
        let leases = || known.leases.values().filter(|l| l.is_live());
        let report = known.reports.get(host).filter(|_| listens);
        HostStatus {
            host: host.to_owned(),
            state: match registered {
                None => HostState::NeverSeen,
                Some(_) if known.is_up(host) => HostState::Up,
                Some(_) => HostState::Down,
            },
            heard_ms_ago: registered
                .and_then(|_| known.heard.get(host))
                .map(|heard| self.clock.now().saturating_sub(*heard)),
            address: registered.map(|record| record.address.clone()),
            overruns: known.overruns.get(host).copied().unwrap_or_default(),
            log_lines_left_out: known.reports.get(host).map_or(0, |r| r.log_lines_left_out),
            offers: known.functions_of(host).filter(|f| f.state == Availability::Offered).count(),
            borrows: leases().filter(|l| l.borrower == host).count(),
            shared_memory: report.map(|r| r.shared_memory.clone()).unwrap_or_default(),
            shared_bytes: report.map(|r| r.shared_bytes.clone()).unwrap_or_default(),
            network: report.map(|r| r.network.clone()).unwrap_or_default(),
            counted_ms: report.map_or(0, |r| r.counted_ms),
            channels: report.map(|r| r.channels.clone()).unwrap_or_default(),
            conversations: report.map(|r| r.conversations.clone()).unwrap_or_default(),
        }
    }

    pub(super) fn device(&self, known: &RackState, device: &InventoryDevice) -> Device {
        let record = known.functions.get(&device.function);
        let lease = record.and_then(|r| match r.state {
            Availability::Lent { lease } | Availability::Revoking { lease } => Some(lease),
            _ => None,
        });
        let up = known.is_up(&device.function.host);
        let state = match record.map(|r| &r.state) {
            None | Some(Availability::Withdrawn) => DeviceState::Absent,
            Some(_) if !up => DeviceState::Unreachable,
            Some(Availability::Lent { .. }) => DeviceState::Lent,
            Some(Availability::Revoking { .. }) => DeviceState::Returning,
            Some(Availability::Offered) if known.is_leaving(&device.function) => {
                DeviceState::Absent
            }
            Some(Availability::Offered) => DeviceState::Offered,
        };
        let holder = lease.and_then(|l| known.leases.get(&l)).map(|l| l.borrower.clone());
        Device {
            function: device.function.to_string(),
            kind: device.kind.clone(),
            capabilities: Some(device.capabilities.iter().map(|it| it.word().to_owned()).collect()),
            detail: device.detail.clone(),
            state,
            lease,
            epoch: record.map_or(0, |r: &FunctionRecord| r.epoch),
            waiting: self.queue().length(&device.function),
            turns: self.turns(known, &device.function),
            report: known.report(&device.function).cloned().map(Box::new),
            front: holder
                .as_deref()
                .and_then(|holder| known.front(holder, &device.function).cloned())
                .map(Box::new),
            peers: holder
                .as_deref()
                .and_then(|holder| known.peers(holder, &device.function).cloned()),
            holder,
        }
    }

    /// What its node says is wrong with a function.
    pub(super) fn trouble(&self, function: &FunctionId) -> Option<String> {
        self.known().report(function)?.trouble.clone()
    }

    pub(super) fn explain(&self, refused: BorrowRefused) -> ApiError {
        let error = refused.to_string();
        let remedy = match &refused {
            BorrowRefused::Unknown(_) => "`rackbus devices` lists the functions".to_owned(),
            BorrowRefused::Withdrawn(function) => {
                format!("offer its device again: `rackbus offer`, where {} has it", function.host)
            }
            BorrowRefused::Held { lease, .. } => {
                format!("wait for it with `--wait`, or return it with `rackbus return {lease}`")
            }
            BorrowRefused::Returning { function, .. } => match self.trouble(function) {
                Some(trouble) => format!("it takes long: {trouble}"),
                None => "try again in a moment".to_owned(),
            },
            BorrowRefused::Shared { function, .. } => {
                format!("take turns as well: `rackbus share join {function} --for HOST`")
            }
            BorrowRefused::Queued { .. } => {
                "wait for it as well, with `--wait`, or ask with a greater priority".to_owned()
            }
            BorrowRefused::NoHost(_) => {
                format!("the rack's hosts are {}", self.inventory().hosts.join(", "))
            }
            BorrowRefused::Silent { host, .. }
            | BorrowRefused::Awaited(host)
            | BorrowRefused::Joining(FunctionId { host, .. }) => {
                format!("see whether the node of {host} runs: `rackbus status`")
            }
        };
        let code = match &refused {
            BorrowRefused::Unknown(_) => "unknown_function",
            BorrowRefused::Withdrawn(_) => "withdrawn",
            BorrowRefused::Held { .. } => "held",
            BorrowRefused::Returning { .. } => "returning",
            BorrowRefused::Queued { .. } => "queued",
            BorrowRefused::Shared { .. } => "shared",
            BorrowRefused::NoHost(_) => "unknown_host",
            BorrowRefused::Silent { .. }
            | BorrowRefused::Awaited(_)
            | BorrowRefused::Joining(_) => "silent",
        };
        let (holder, lease) = match refused {
            BorrowRefused::Held { borrower, lease, .. }
            | BorrowRefused::Returning { borrower, lease, .. } => (Some(borrower), Some(lease)),
            _ => (None, None),
        };
        ApiError { holder, lease, ..problem(code, error, &remedy) }
    }
}

/// An error with its remedy.
pub(crate) fn problem(code: &str, error: String, remedy: &str) -> ApiError {
    ApiError::new(code, error, remedy)
}

/// A lease ended before its borrower could use its function.
pub(crate) fn not_lent(lease: &LeaseRecord, reason: &EndReason) -> ApiError {
    problem(
        "failed",
        format!("{} could not be lent to {}: {reason}", lease.function, lease.borrower),
        "`rackbus status` tells how the nodes are",
    )
}

/// A lease as the API shows it.
pub(crate) fn present(record: &LeaseRecord) -> Lease {
    let (stage, socket, reason) = match &record.state {
        LeaseState::Arming => (LeaseStage::Arming, None, None),
        LeaseState::Opening => (LeaseStage::Opening, None, None),
        LeaseState::Active { socket } => (LeaseStage::Active, Some(socket.clone()), None),
        LeaseState::Closing { reason, .. } => (LeaseStage::Closing, None, Some(reason)),
        LeaseState::Ended { reason } => (LeaseStage::Ended, None, Some(reason)),
    };
    Lease {
        lease: record.lease,
        function: record.function.to_string(),
        lender: record.function.host.clone(),
        borrower: record.borrower.clone(),
        epoch: record.epoch,
        placement: record.placement,
        group: record.group.clone(),
        level: record.level.clone(),
        level_asked: record
            .asked_level()
            .map(|asked| asked.level.clone().unwrap_or_else(|| "none".to_owned())),
        stage,
        socket,
        reason: reason.map(EndReason::to_string),
        returned: matches!(
            reason,
            Some(EndReason::Returned | EndReason::TurnOver | EndReason::TurnGivenBack)
        ),
        share: record.turn.as_ref().map(|turn| turn.share),
        vm: record.vm.clone().or_else(|| record.turn.as_ref()?.vm.clone()),
        since_ms: record.since,
        until_ms: record.until,
    }
}
