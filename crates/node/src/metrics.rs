//! What a node counts, for Prometheus: its functions, the conversations over its link, and the shared
//! memory of its host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rackbus_control::api::NodeReport;
use rackbus_control::metrics::{Labels, MetricsPage, MetricsSource};
use rackbus_control::network::NodeNetwork;
use rackbus_control::node::NodeProcess;
use rackbus_link::Purpose;

use crate::agent::Observe;
use crate::borrower::BorrowedFunctions;
use crate::lender::LentFunctions;
use crate::network::{NetworkService, page as network_page};
use crate::segments::Segments;

/// A node's socket for metrics, in its host's folder.
pub const SOCKET: &str = "metrics.sock";

/// Conversations of one kind over the link.
#[derive(Debug, Default)]
struct Conversations {
    begun: AtomicU64,
    open: AtomicU64,
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
    /// A conversation begins, and lasts until what is returned is dropped.
    pub fn begin(self: &Arc<Self>, service: &Purpose) -> impl Drop + Send + use<> {
        let of: fn(&LinkCounters) -> &Conversations = match service {
            Purpose::Function { .. } => |link| &link.functions,
            Purpose::Medium { .. } | Purpose::Resume { .. } | Purpose::Window { .. } => {
                |link| &link.mediums
            }
            Purpose::Segments => |link| &link.segments,
            Purpose::Network => |link| &link.network,
        };
        of(self).begun.fetch_add(1, Ordering::Relaxed);
        of(self).open.fetch_add(1, Ordering::Relaxed);
        Open(self.clone(), of)
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

    /// Somebody was not listened to.
    pub fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// A conversation under way.
struct Open(Arc<LinkCounters>, fn(&LinkCounters) -> &Conversations);

impl Drop for Open {
    fn drop(&mut self) {
        (self.1)(&self.0).open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a node says to the control plane of the same.
pub fn observe(
    segments: Arc<Segments>,
    link: Arc<LinkCounters>,
    log_lines_left_out: fn() -> u64,
    process: NodeProcess,
) -> Observe {
    Box::new(move || {
        let shared = segments.statistics();
        let shared = shared.map(|(what, count)| (what.to_owned(), count as u64));
        let open = link
            .kinds()
            .map(|(kind, of_kind)| (kind.to_owned(), of_kind.open.load(Ordering::Relaxed)));
        NodeReport {
            log_lines_left_out: log_lines_left_out(),
            shared_memory: shared.into(),
            conversations: open.into(),
            restarts_in_place: process.restarts,
            restart_pause_us: process.pause_us,
            ..NodeReport::default()
        }
    })
}

/// Makes a node's page of metrics anew at each request.
pub fn source(
    host: &str,
    lender: Arc<LentFunctions>,
    borrower: Arc<BorrowedFunctions>,
    segments: Arc<Segments>,
    network: NetworkService,
    link: Arc<LinkCounters>,
    process: NodeProcess,
) -> MetricsSource {
    let host = host.to_owned();
    Arc::new(move || {
        let mut page = MetricsPage::default();
        let reports = lender.report();
        let fronts = borrower.fronts();
        let own = reports.iter().map(|(device, report)| (format!("{host}/{device}"), report));
        let borrowed = fronts.iter().map(|(function, report)| (function.clone(), report));
        let here = |(function, report)| ((function, host.clone()), report);
        page.functions(own.chain(borrowed).map(here));
        let attached = lender.attached().into_iter().map(|(device, attached)| {
            let labels = vec![("function", format!("{host}/{device}"))];
            (labels, f64::from(u8::from(attached)))
        });
        page.gauge("function_attached", "Whether a borrower is attached to a function", attached);
        link_page(&link, &mut page);
        let restarts = [(Labels::new(), process.restarts)];
        page.counter("restarts_in_place", "Times that the node was restarted in place", restarts);
        let pause = [(Labels::new(), process.pause_us as f64 / 1e6)];
        let help = "How long the node answered nobody at the last restart in place";
        page.gauge("restart_pause_seconds", help, pause);
        let counts = segments.statistics();
        let counts = counts.map(|(what, count)| (vec![("what", what.to_owned())], count as f64));
        let help = "What the host's processes share, and who is connected to it";
        page.gauge("shared_memory", help, counts);
        network_page(&network.status(), &mut page);
        page
    })
}

fn link_page(link: &LinkCounters, page: &mut MetricsPage) {
    let kinds = link.kinds();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let of = |kind: &str| vec![("service", kind.to_owned())];
    let open = kinds.map(|(kind, of_kind)| (of(kind), count(&of_kind.open) as f64));
    page.gauge("link_conversations", "Conversations that other nodes have with this one", open);
    let begun = kinds.map(|(kind, of_kind)| (of(kind), count(&of_kind.begun)));
    page.counter("link_conversations_begun", "Conversations that were begun", begun);
    let refused = [(Labels::new(), count(&link.refused))];
    page.counter("link_connections_refused", "Connections that made no sense", refused);
}
