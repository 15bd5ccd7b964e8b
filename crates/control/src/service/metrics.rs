//! The control plane's metrics.

use std::collections::BTreeMap;

use rackbus_lease::{LeaseState, ShareRecord};

use super::{RackState, Service, WriterShared};
use crate::api::{Device, DeviceState, EventKind, HostState, NodeReport};
use crate::metrics::{FunctionPart, Labels, MetricsPage};

impl Service {
    /// What the control plane counts, now.
    pub fn metrics(&self) -> MetricsPage {
        let mut page = MetricsPage::default();
        let known = self.shared.known();
        self.shared.leases_and_functions(&known, &mut page);
        self.shared.hosts(&known, &mut page);
        shared_between_hosts(&known, &mut page);
        let own = |value| [(Labels::new(), value)];
        page.counter(
            "requests_refused",
            "Requests for functions that were refused",
            own(known.refused),
        );
        let forbidden = self.forbidden().counts().into_iter();
        let forbidden = forbidden.map(|(role, count)| (vec![("role", role)], count));
        let help = "Requests of somebody who has no right to what they ask for";
        page.counter("requests_forbidden", help, forbidden);
        let refused = crate::machines::counted::refused().into_iter();
        let refused = refused.map(|(cause, count)| (vec![("cause", cause.to_owned())], count));
        let help = "Connections of other machines that were refused before anything was asked";
        page.counter("connections_refused", help, refused);
        let help = "Decisions and events that could not be stored";
        page.counter("store_failures", help, own(known.store_failures));
        let help = "How long a commit to the store takes";
        page.histogram("store_commit_seconds", help, &self.shared.commits);
        let events = [
            EventKind::Lease,
            EventKind::Loss,
            EventKind::Refusal,
            EventKind::Fault,
            EventKind::Restart,
            EventKind::Access,
        ];
        let events = events.map(|kind| (vec![("kind", word(&kind))], known.log.count(kind)));
        page.counter("events", "Events since the control plane was started", events);
        page
    }
}

impl WriterShared {
    fn leases_and_functions(&self, known: &RackState, page: &mut MetricsPage) {
        let stages = ["arming", "opening", "active", "closing"].map(|stage| {
            let count =
                known.leases.values().filter(|lease| live_stage(&lease.state) == Some(stage));
            (vec![("stage", stage.to_owned())], count.count() as f64)
        });
        page.gauge("leases", "Leases that have not ended, by stage", stages);
        let devices: Vec<_> =
            self.inventory().devices.iter().map(|device| self.device(known, device)).collect();
        let states = [
            DeviceState::Offered,
            DeviceState::Lent,
            DeviceState::Returning,
            DeviceState::Unreachable,
            DeviceState::Absent,
        ];
        let states = states.map(|state| {
            let count = devices.iter().filter(|device| device.state == state).count();
            (vec![("state", word(&state))], count as f64)
        });
        page.gauge("functions", "Functions of the rack file, by state", states);
        let shared = || devices.iter().filter_map(|device| Some((device, device.turns.as_ref()?)));
        let named = |device: &Device| vec![("function", device.function.clone())];
        let shares = shared().map(|(device, turns)| (named(device), turns.shares as f64));
        page.gauge("shares", "Borrowers that take turns on a function", shares);
        let share = |share: &ShareRecord| {
            let function = ("function", share.function.to_string());
            vec![function, ("host", share.borrower.clone()), ("share", share.share.to_string())]
        };
        let of = |value: fn(&ShareRecord) -> u64| {
            known.shares.values().map(move |it| (share(it), value(it)))
        };
        let help = "Turns that a borrower had on a function";
        page.counter("turns", help, of(|share| share.turns));
        let help = "Milliseconds for which a borrower had a function in its turns";
        page.counter("turn_held_ms", help, of(|share| share.held));
        let help = "Times that a function was handed over to a borrower whose turn came";
        page.counter("handovers", help, of(|share| share.handovers));
        let help = "Milliseconds for which nobody had a function while it was handed over";
        page.counter("handover_ms", help, of(|share| share.handover));
        let holds = |share: &ShareRecord| f64::from(u8::from(share.turn.is_some()));
        let turn = known.shares.values().map(|it| (share(it), holds(it)));
        page.gauge("turn", "Whether it is a borrower's turn", turn);
        let own = devices.iter().filter_map(|device| {
            let host = device.function.split('/').next().unwrap_or_default();
            let part = FunctionPart::of_lender(device.function.clone(), host.to_owned());
            Some((part, device.report.as_deref()?))
        });
        let reports = known.reports.iter().filter(|(host, _)| known.listens(host));
        let fronts = reports.flat_map(|(host, report)| {
            let part =
                |function: &String| FunctionPart::of_borrower(function.clone(), host.clone());
            report.fronts.iter().map(move |(function, report)| (part(function), report))
        });
        page.functions(own.chain(fronts));
    }

    fn hosts(&self, known: &RackState, page: &mut MetricsPage) {
        let hosts: Vec<_> = self.inventory().hosts.iter().map(|h| self.host(known, h)).collect();
        let of = |host: &String| vec![("host", host.clone())];
        let up = hosts
            .iter()
            .map(|host| (of(&host.host), f64::from(u8::from(host.state == HostState::Up))));
        page.gauge("node_up", "Whether a host's node is connected", up);
        let overruns = hosts.iter().map(|host| (of(&host.host), host.overruns));
        let help = "Times that a node was cut off because it took nothing";
        page.counter("node_overruns", help, overruns);
        let left_out = hosts.iter().map(|host| (of(&host.host), host.log_lines_left_out));
        let own = (Labels::new(), (self.log_lines_left_out)());
        let help = "Lines left out of a node's log, or (without a host) of the control plane's";
        page.counter("log_lines_left_out", help, left_out.chain([own]));
    }
}

/// What the nodes that are connected report of segments, copy channels and conversations.
fn shared_between_hosts(known: &RackState, page: &mut MetricsPage) {
    type Counts = BTreeMap<String, u64>;
    let reports = || known.reports.iter().filter(|(host, _)| known.listens(host));
    let named = |label: &'static str, of: fn(&NodeReport) -> &Counts| {
        reports().flat_map(move |(host, report)| {
            let labels = move |name: &String| vec![("host", host.clone()), (label, name.clone())];
            of(report).iter().map(move |(name, count)| (labels(name), *count))
        })
    };
    let help = "What a host's processes share, and who is connected to it";
    let shared = named("what", |report| &report.shared_memory);
    page.gauge("shared_memory", help, shared.map(|(labels, count)| (labels, count as f64)));
    let help = "Bytes of memory that a host's processes share, and that it exports at most";
    let bytes = named("what", |report| &report.shared_bytes);
    page.gauge("shared_memory_bytes", help, bytes.map(|(labels, count)| (labels, count as f64)));
    let help = "Conversations that other nodes have with a host's";
    let open = named("service", |report| &report.conversations);
    page.gauge("link_conversations", help, open.map(|(labels, count)| (labels, count as f64)));
    let help = "What other hosts were refused, as they had as much as one may";
    page.counter("over_bounds", help, named("what", |report| &report.over_bounds));
    let channels = [
        ("transactions", "channel_transactions", "Transactions of copy channels that ended"),
        ("bytes", "channel_bytes", "Bytes that copy channels copied"),
        ("failures", "channel_failures", "Transactions of copy channels that failed"),
        ("aborts", "channel_aborts", "Transactions of copy channels that were aborted"),
    ];
    for (what, name, help) in channels {
        let counts = reports().filter_map(|(host, report)| {
            Some((vec![("host", host.clone())], *report.channels.get(what)?))
        });
        page.counter(name, help, counts);
    }
}

fn live_stage(state: &LeaseState) -> Option<&'static str> {
    match state {
        LeaseState::Arming => Some("arming"),
        LeaseState::Opening => Some("opening"),
        LeaseState::Active { .. } => Some("active"),
        LeaseState::Closing { .. } => Some("closing"),
        LeaseState::Ended { .. } => None,
    }
}

/// The word that the API has for a value.
fn word(value: &impl serde::Serialize) -> String {
    let word = serde_json::to_value(value).unwrap_or_default();
    word.as_str().unwrap_or_default().to_owned()
}
