//! What a node counts, for Prometheus: its functions, the conversations over its link, and the shared
//! memory of its host.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rackbus_control::api::{NodeReport, traffic};
use rackbus_control::metrics::{FunctionPart, Labels, MetricsPage, MetricsSource};
use rackbus_control::network::NodeNetwork;
use rackbus_control::node::NodeProcess;
use rackbus_link::ntb::BridgeStatus;
use rackbus_link::tcp::connections_sealed_by_kernel;
use rackbus_link::{Connect, Purpose};
use rackbus_memory::copy::Statistics;

use crate::agent::Observe;
use crate::borrower::BorrowedFunctions;
use crate::lender::LentFunctions;
use crate::network::{NetworkService, page as network_page};
use crate::segments::Segments;

/// A node's socket for metrics, in its host's folder.
pub const SOCKET: &str = "metrics.sock";

/// Conversations about functions that one host may have with this node at a time. Each that is let in has a thread, and one
/// that uses a function memory for its operations.
const MOST_OF_FUNCTIONS: usize = 1024;
/// And of each other kind: a host has one that counts, while those before it end.
const MOST_OF_OTHERS: usize = 16;

/// Conversations of one kind over the link.
#[derive(Debug, Default)]
struct Conversations {
    begun: AtomicU64,
    open: AtomicU64,
    refused: AtomicU64,
    /// How many of those that are open each host has.
    of_host: Mutex<HashMap<String, usize>>,
}

impl Conversations {
    fn of_host(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.of_host.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is counted of the link: those who connected to this node.
#[derive(Debug, Default)]
pub struct LinkCounters {
    functions: Conversations,
    mediums: Conversations,
    segments: Conversations,
    network: Conversations,
    refused: AtomicU64,
}

impl LinkCounters {
    /// A conversation of a host begins, and lasts until what is returned is dropped; `None` when it has as many as it may.
    pub fn begin(self: &Arc<Self>, service: &Purpose, host: &str) -> Option<OpenConversation> {
        let (of, most): (fn(&LinkCounters) -> &Conversations, usize) = match service {
            Purpose::Function { .. } => (|link| &link.functions, MOST_OF_FUNCTIONS),
            Purpose::Medium { .. } | Purpose::Resume { .. } | Purpose::Window { .. } => {
                (|link| &link.mediums, MOST_OF_FUNCTIONS)
            }
            Purpose::Segments => (|link| &link.segments, MOST_OF_OTHERS),
            Purpose::Network => (|link| &link.network, MOST_OF_OTHERS),
        };
        let conversations = of(self);
        let mut of_host = conversations.of_host();
        let own = of_host.entry(host.to_owned()).or_default();
        if *own >= most {
            drop(of_host);
            conversations.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        *own += 1;
        drop(of_host);
        conversations.begun.fetch_add(1, Ordering::Relaxed);
        conversations.open.fetch_add(1, Ordering::Relaxed);
        Some(OpenConversation { counters: self.clone(), of, host: host.to_owned() })
    }

    /// All kinds, by what they are for.
    fn kinds(&self) -> [(&'static str, &Conversations); 4] {
        [
            ("functions", &self.functions),
            ("mediums", &self.mediums),
            ("segments", &self.segments),
            ("network", &self.network),
        ]
    }

    /// How many conversations were refused, as their host had as many as it may.
    fn over_bounds(&self) -> u64 {
        self.kinds().iter().map(|(_, of_kind)| of_kind.refused.load(Ordering::Relaxed)).sum()
    }

    /// Somebody was not listened to.
    pub fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// A conversation under way.
pub struct OpenConversation {
    counters: Arc<LinkCounters>,
    of: fn(&LinkCounters) -> &Conversations,
    host: String,
}

impl Drop for OpenConversation {
    fn drop(&mut self) {
        let conversations = (self.of)(&self.counters);
        conversations.open.fetch_sub(1, Ordering::Relaxed);
        let mut of_host = conversations.of_host();
        if let Some(own) = of_host.get_mut(&self.host) {
            *own -= 1;
            if *own == 0 {
                of_host.remove(&self.host);
            }
        }
    }
}

/// What a node says to the control plane of the same.
pub fn observe(
    segments: Arc<Segments>,
    network: NetworkService,
    (way, link): (Arc<dyn Connect>, Arc<LinkCounters>),
    log_lines_left_out: fn() -> u64,
    process: NodeProcess,
) -> Observe {
    Box::new(move || {
        let shared = segments.statistics();
        let shared = shared.map(|(what, count)| (what.to_owned(), count as u64));
        let open = link
            .kinds()
            .map(|(kind, of_kind)| (kind.to_owned(), of_kind.open.load(Ordering::Relaxed)));
        let (over, last) = segments.refusals();
        let mut refused: BTreeMap<String, u64> =
            over.into_iter().map(|(what, count)| (what.to_owned(), count)).collect();
        refused.insert("conversations".to_owned(), link.over_bounds());
        let bridges = way.bridges();
        let used_ntbs = bridges.iter().filter(|it| it.up).map(|it| it.host.clone()).collect();
        NodeReport {
            over_bounds: refused,
            last_over_bounds: last,
            log_lines_left_out: log_lines_left_out(),
            shared_memory: shared.into(),
            shared_bytes: segments.sizes().map(|(what, bytes)| (what.to_owned(), bytes)).into(),
            network: traffic(&network.status()),
            channels: channel_counts(segments.channels()),
            conversations: open.into(),
            unused_ntbs: unused(bridges),
            used_ntbs,
            restarts_in_place: process.restarts,
            restart_pause_us: process.pause_us,
            plugs_into_vms: true,
            ..NodeReport::default()
        }
    })
}

/// Which NTBs are not used for the link though they should be, and why.
fn unused(bridges: Vec<BridgeStatus>) -> BTreeMap<String, String> {
    let why = |it: BridgeStatus| {
        let failed = it.failed.then(|| "a part of the link failed: start the node anew".to_owned());
        Some((it.host, failed.or_else(|| Some(it.mismatch?.to_string()))?))
    };
    bridges.into_iter().filter_map(why).collect()
}

fn channel_counts(channels: Statistics) -> BTreeMap<String, u64> {
    let counts = [
        ("transactions", channels.transactions),
        ("bytes", channels.bytes),
        ("failures", channels.failures),
        ("aborts", channels.aborts),
    ];
    counts.map(|(what, count)| (what.to_owned(), count)).into()
}

/// Makes a node's page of metrics anew at each request.
pub fn source(
    host: &str,
    lender: Arc<LentFunctions>,
    borrower: Arc<BorrowedFunctions>,
    segments: Arc<Segments>,
    network: NetworkService,
    (way, link): (Arc<dyn Connect>, Arc<LinkCounters>),
    process: NodeProcess,
) -> MetricsSource {
    let host = host.to_owned();
    Arc::new(move || {
        let mut page = MetricsPage::default();
        let reports = lender.report();
        let fronts = borrower.fronts();
        let own = reports.iter().map(|(device, report)| {
            (FunctionPart::of_lender(format!("{host}/{device}"), host.clone()), report)
        });
        let borrowed = fronts.iter().map(|(function, report)| {
            (FunctionPart::of_borrower(function.clone(), host.clone()), report)
        });
        page.functions(own.chain(borrowed));
        let refused = borrower.refused().into_iter();
        let refused = refused.map(|(function, count)| (vec![("function", function)], count));
        let help = "Requests of a borrowed function's user that this node refused by itself";
        page.counter("borrowed_requests_refused", help, refused);
        let attached = lender.attached().into_iter().map(|(device, attached)| {
            let labels = vec![("function", format!("{host}/{device}"))];
            (labels, f64::from(u8::from(attached)))
        });
        page.gauge("function_attached", "Whether a borrower is attached to a function", attached);
        leases_page(&lender, &borrower, &mut page);
        link_page(&link, &mut page);
        bridges_page(&way.bridges(), &mut page);
        let restarts = [(Labels::new(), process.restarts)];
        page.counter("restarts_in_place", "Times that the node was restarted in place", restarts);
        let pause = [(Labels::new(), process.pause_us as f64 / 1e6)];
        let help = "How long the node answered nobody at the last restart in place";
        page.gauge("restart_pause_seconds", help, pause);
        let counts = segments.statistics();
        let counts = counts.map(|(what, count)| (vec![("what", what.to_owned())], count as f64));
        let help = "What the host's processes share, and who is connected to it";
        page.gauge("shared_memory", help, counts);
        let sizes = segments.sizes();
        let sizes = sizes.map(|(what, bytes)| (vec![("what", what.to_owned())], bytes as f64));
        let help = "Bytes of memory that the host's processes share, and that it exports at most";
        page.gauge("shared_memory_bytes", help, sizes);
        let copied = segments.copied();
        let copied = copied.map(|(by, bytes)| (vec![("by", by.to_owned())], bytes));
        let help = "Bytes that the host's processes have copied to other machines, by an RDMA lane or by the link";
        page.counter("copied_to_machines_bytes", help, copied);
        let (over, _) = segments.refusals();
        let over = over.map(|(what, count)| (vec![("what", what.to_owned())], count));
        let help =
            "What other machines were refused of shared memory, as they had as much as one may";
        page.counter("shared_memory_refused", help, over);
        channels_page(segments.channels(), &mut page);
        network_page(&network.status(), &mut page);
        page
    })
}

fn leases_page(lender: &LentFunctions, borrower: &BorrowedFunctions, page: &mut MetricsPage) {
    let of = |role: &str, (state, count): (&str, usize)| {
        (vec![("role", role.to_owned()), ("state", state.to_owned())], count as f64)
    };
    let lent = lender.lease_counts().map(|count| of("lender", count));
    let borrowed = borrower.decide(|it| it.lease_counts()).map(|count| of("borrower", count));
    let help = "Leases by which the host lends or borrows a function, by state";
    page.gauge("node_leases", help, lent.into_iter().chain(borrowed));
}

fn channels_page(channels: Statistics, page: &mut MetricsPage) {
    let counters = [
        ("channel_transactions", "Transactions of copy channels that ended", channels.transactions),
        ("channel_bytes", "Bytes that copy channels copied", channels.bytes),
        ("channel_failures", "Transactions of copy channels that failed", channels.failures),
        ("channel_aborts", "Transactions of copy channels that were aborted", channels.aborts),
    ];
    for (name, help, count) in counters {
        page.counter(name, help, [(Labels::new(), count)]);
    }
    let busy = [(Labels::new(), Duration::from_nanos(channels.busy_ns))];
    page.time_counter("channel_busy", "How long copy channels had something to do", busy);
}

fn link_page(link: &LinkCounters, page: &mut MetricsPage) {
    let kinds = link.kinds();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let of = |kind: &str| vec![("service", kind.to_owned())];
    let open = kinds.map(|(kind, of_kind)| (of(kind), count(&of_kind.open) as f64));
    page.gauge("link_conversations", "Conversations that other nodes have with this one", open);
    let begun = kinds.map(|(kind, of_kind)| (of(kind), count(&of_kind.begun)));
    page.counter("link_conversations_begun", "Conversations that were begun", begun);
    let over = kinds.map(|(kind, of_kind)| (of(kind), count(&of_kind.refused)));
    let help = "Conversations that were refused, as their host has as many as it may";
    page.counter("link_conversations_refused", help, over);
    let refused = [(Labels::new(), count(&link.refused))];
    page.counter("link_connections_refused", "Connections that made no sense", refused);
    let sealed = [(Labels::new(), connections_sealed_by_kernel())];
    let help = "Connections to and from other machines' nodes that the kernel encrypts (kTLS)";
    page.counter("link_connections_sealed_by_kernel", help, sealed);
}

/// What went through NTBs that the link has.
fn bridges_page(bridges: &[BridgeStatus], page: &mut MetricsPage) {
    if bridges.is_empty() {
        return;
    }
    let of = |it: &BridgeStatus| vec![("host", it.host.clone())];
    let up = bridges.iter().map(|it| (of(it), f64::from(u8::from(it.up))));
    page.gauge("link_ntb_up", "Whether the node at the other end of the NTB is there", up);
    let is_wrong = |it: &BridgeStatus| it.failed || it.mismatch.is_some();
    let wrong = bridges.iter().map(|it| (of(it), f64::from(u8::from(is_wrong(it)))));
    let help = "Whether the NTB is not used, as it leads to another host or the link has failed";
    page.gauge("link_ntb_unused", help, wrong);
    type Both = fn(&BridgeStatus) -> [u64; 2];
    let both: [(&str, &str, Both); 3] = [
        ("link_ntb_bytes", "Bytes of conversations through the NTB", |it| it.bytes),
        ("link_ntb_conversations", "Conversations that began through the NTB", |it| {
            it.conversations
        }),
        ("link_ntb_doorbells", "Doorbells of the NTB that were rung", |it| it.doorbells),
    ];
    for (name, help, counts) in both {
        let by = |it: &BridgeStatus, by: &str| [of(it), vec![("by", by.to_owned())]].concat();
        let each = bridges.iter().flat_map(|it| {
            let [here, there] = counts(it);
            [(by(it, "this host"), here), (by(it, "its peer"), there)]
        });
        page.counter(name, help, each);
    }
    type One = fn(&BridgeStatus) -> u64;
    let one: [(&str, &str, One); 3] = [
        ("link_ntb_sleeps", "Times that the link slept until a doorbell of the NTB", |it| {
            it.sleeps
        }),
        ("link_ntb_losses", "Times that the node at the other end of the NTB was lost", |it| {
            it.losses
        }),
        (
            "link_ntb_violations",
            "Times that what the other end of the NTB stored made no sense",
            |it| it.violations,
        ),
    ];
    for (name, help, count) in one {
        page.counter(name, help, bridges.iter().map(|it| (of(it), count(it))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_so_many_conversations_of_a_kind_and_takes_none_of_others() {
        let link = Arc::new(LinkCounters::default());
        let begin = |host: &str| link.begin(&Purpose::Segments, host);
        let mut held: Vec<_> = (0..MOST_OF_OTHERS).map(|_| begin("beta").unwrap()).collect();
        assert!(begin("beta").is_none() && begin("beta").is_none());
        assert!(begin("gamma").is_some() && link.begin(&Purpose::Network, "beta").is_some());
        held.pop();
        held.push(begin("beta").unwrap());
        assert_eq!(link.segments.refused.load(Ordering::Relaxed), 2);
        drop(held);
        assert!(link.segments.of_host().is_empty());
        assert_eq!(link.segments.open.load(Ordering::Relaxed), 0);
    }
}
