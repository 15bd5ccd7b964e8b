//! Metrics in Prometheus' (OpenMetrics) text format, for the control plane and for nodes.
//!
//! A page is made when it is asked for, from counters that are kept anyway: who is not looked at pays
//! nothing, and no data path waits for a scrape.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::net::TcpListener;

use crate::api::{DeviceReport, LATENCY_BOUNDS_NS, OperationReport, RdmaLaneReport};
use crate::blocking::blocking;

/// What the format is called.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What tells one value of a metric from the others.
pub type Labels = Vec<(&'static str, String)>;

/// One page of metrics. The names of all begin with `rackbus_`.
#[derive(Debug)]
pub struct MetricsPage(Registry);

impl Default for MetricsPage {
    fn default() -> Self {
        MetricsPage(Registry::with_prefix("rackbus"))
    }
}

impl MetricsPage {
    /// Adds something that goes up and down. A full stop is appended to the help.
    pub fn gauge(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(value);
        }
        self.0.register(name, help, family);
    }

    /// Adds something that only goes up while its process lives; `_total` is appended to the name.
    pub fn counter(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).inc_by(value);
        }
        self.0.register(name, help, family);
    }

    /// Adds a time that only grows while its process lives, in seconds; `_seconds_total` is appended to the name.
    pub fn time_counter(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels, Duration)>,
    ) {
        let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).inc_by(value.as_secs_f64());
        }
        self.0.register_with_unit(name, help, Unit::Seconds, family);
    }

    /// Adds a distribution that is kept.
    pub fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.0.register(name, help, histogram.clone());
    }

    /// Adds what nodes report of functions.
    pub fn functions<'r>(
        &mut self,
        reports: impl Iterator<Item = (FunctionPart, &'r DeviceReport)> + Clone,
    ) {
        type Count = (&'static str, &'static str, fn(&DeviceReport) -> u64);
        let counts: [Count; 10] = [
            ("function_peer_read_bytes", "Bytes that a function read from BARs of others", |r| {
                r.peer_bytes_read
            }),
            ("function_peer_written_bytes", "Bytes that a function wrote to BARs of others", |r| {
                r.peer_bytes_written
            }),
            ("function_attach_refused", "Borrowers that were not let in", |r| r.attach_refused),
            (
                "function_requests_refused",
                "Requests of a function's users that were refused",
                |r| r.requests_refused,
            ),
            ("engine_busy_polls", "Polls of a function's engine that found work", |r| r.busy_polls),
            ("engine_idle_polls", "Polls of a function's engine that found nothing", |r| {
                r.idle_polls
            }),
            ("engine_sleeps", "Times that an engine went to sleep", |r| r.parks),
            ("engine_wakeups", "Times that somebody woke an engine", |r| r.wakeups),
            ("engine_jobs", "Register accesses, mappings and resets", |r| r.jobs),
            ("engine_moves", "Times that an engine went to another processor", |r| r.moves),
        ];
        for (name, help, count) in counts {
            let values = reports.clone().map(|(name, report)| (of_function(name), count(report)));
            self.counter(name, help, values);
        }
        let refused = reports.clone().flat_map(|(name, report)| {
            report.dma_refused_by_cause.iter().map(move |(cause, count)| {
                let mut labels = of_function(name.clone());
                labels.push(("cause", cause.clone()));
                (labels, *count)
            })
        });
        let help = "Accesses to memory that were refused to a function";
        self.counter("function_dma_refused", help, refused);
        self.operations(reports.clone());
        let shaped = reports.clone().flat_map(|(name, report)| {
            report.shaping.iter().map(move |(what, count)| {
                let mut labels = of_function(name.clone());
                labels.push(("what", what.clone()));
                (labels, *count)
            })
        });
        let help =
            "What a shaper did for a function's user: engine time, turns, waits (ns and counts)";
        self.counter("function_shaping", help, shaped);
        self.links(reports.clone());
        let trouble = reports.map(|(name, report)| {
            (of_function(name), f64::from(u8::from(report.trouble.is_some())))
        });
        self.gauge("function_trouble", "Whether something is wrong with a function", trouble);
    }

    /// How the links are that fronts have to media on other machines, and what moved by RDMA lanes beside them.
    fn links<'r>(
        &mut self,
        reports: impl Iterator<Item = (FunctionPart, &'r DeviceReport)> + Clone,
    ) {
        let links = reports.filter_map(|(name, report)| Some((name, report.link.as_ref()?)));
        let resumed = links.clone().map(|(name, link)| (of_function(name), link.resumed));
        let help = "Times that the link between a front and its medium was lost and resumed";
        self.counter("function_link_resumed", help, resumed);
        let lanes = || links.clone().filter_map(|(name, link)| Some((name, link.lane.as_ref()?)));
        let of = |count: fn(&RdmaLaneReport) -> u64| {
            lanes().map(move |(name, lane)| (of_function(name), count(lane)))
        };
        let help = "Times that data of a function moved by its RDMA lane";
        self.counter("function_lane_operations", help, of(|lane| lane.operations));
        let help = "Bytes of a function that moved by its RDMA lane";
        self.counter("function_lane_bytes", help, of(|lane| lane.bytes));
        let help = "Times that data went by the link although an RDMA lane was offered";
        self.counter("function_lane_fell_back", help, of(|lane| lane.fell_back));
        let repeated = links.clone().map(|(name, link)| (of_function(name), link.repeated));
        let help = "Operations that a front sent again when its link was resumed";
        self.counter("function_link_repeated", help, repeated);
        let lost = links
            .map(|(name, link)| (of_function(name), f64::from(u8::from(link.lost_ms.is_some()))));
        let help = "Whether a front waits for the link to its medium";
        self.gauge("function_link_lost", help, lost);
    }

    /// What functions have done, by kind of operation.
    fn operations<'r>(
        &mut self,
        reports: impl Iterator<Item = (FunctionPart, &'r DeviceReport)> + Clone,
    ) {
        let each = reports.flat_map(|(name, report)| {
            report.operations.iter().map(move |(kind, counts)| {
                let mut labels = of_function(name.clone());
                labels.push(("operation", kind.clone()));
                (labels, counts)
            })
        });
        let failed = each.clone().map(|(labels, counts)| (labels, counts.failed));
        let help = "Operations of a function that failed";
        self.counter("function_operations_failed", help, failed);
        let bytes = each.clone().map(|(labels, counts)| (labels, counts.bytes));
        self.counter("function_bytes", "Bytes that a function moved", bytes);
        let times = Times(each.map(|(labels, counts)| (labels, counts.clone())).collect());
        let help = "How long operations of a function took, from when they were taken";
        self.0.register("function_operation_seconds", help, times);
    }

    /// The page as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // A String takes everything.
        let _ = encode(&mut text, &self.0);
        text
    }
}

/// Distributions that were counted elsewhere: of times, by their labels.
#[derive(Debug)]
struct Times(Vec<(Labels, OperationReport)>);

impl EncodeMetric for Times {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        for (labels, counts) in &self.0 {
            let known = counts.latency.iter().copied().chain(std::iter::repeat(0));
            let bounds = LATENCY_BOUNDS_NS.iter().map(|ns| *ns as f64 / 1e9);
            let bounds = bounds.chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(known).collect();
            let mut encoder = encoder.encode_family(labels)?;
            let total = counts.total_ns as f64 / 1e9;
            encoder.encode_histogram::<NoLabelSet>(total, counts.done, &buckets, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// What a node runs of a function. A host that borrows its own function strictly runs both parts of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionPart {
    function: String,
    host: String,
    role: &'static str,
}

impl FunctionPart {
    /// What its lender runs of it: all of it, or its medium where its front runs at the borrower.
    pub fn of_lender(function: String, host: String) -> FunctionPart {
        FunctionPart { function, host, role: "lender" }
    }

    /// The front that its borrower, the host `host`, runs.
    pub fn of_borrower(function: String, host: String) -> FunctionPart {
        FunctionPart { function, host, role: "borrower" }
    }
}

fn of_function(FunctionPart { function, host, role }: FunctionPart) -> Labels {
    vec![("function", function), ("host", host), ("role", role.to_owned())]
}

/// Makes a page whenever one is asked for.
pub type MetricsSource = Arc<dyn Fn() -> MetricsPage + Send + Sync>;

/// The route `/metrics` alone.
pub fn routes(source: MetricsSource) -> Router {
    let page = async move || {
        // What is counted is behind locks of whoever counts, and a node's network has its for as long as an interface
        // takes to be made.
        let text = blocking(move || source().text()).await;
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
    };
    Router::new().route("/metrics", get(page))
}

/// Serves `/metrics` on a network socket, until the process ends, to everybody who reaches it.
///
/// # Errors
/// When the socket fails.
pub async fn serve_on(source: MetricsSource, listener: TcpListener) -> std::io::Result<()> {
    axum::serve(listener, routes(source)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_names_help_labels_and_values() {
        let by_cause = [("not mapped".to_owned(), 3)].into();
        let reads = OperationReport {
            done: 5,
            failed: 1,
            bytes: 4096,
            total_ns: 1_500_000_000,
            latency: vec![3, 1, 0, 1],
        };
        let report = DeviceReport {
            dma_refused_by_cause: by_cause,
            busy_polls: 7,
            idle_polls: 9,
            operations: [("read".to_owned(), reads)].into(),
            trouble: Some("hangs \"now\"".to_owned()),
            ..DeviceReport::default()
        };
        let mut page = MetricsPage::default();
        let of = |part: fn(String, String) -> FunctionPart, host: &str| {
            part("alpha/nvme0".to_owned(), host.to_owned())
        };
        // The last two are of one host, which are not added up.
        let lenders = of(FunctionPart::of_lender, "alpha");
        let (own, beta) =
            (of(FunctionPart::of_borrower, "alpha"), of(FunctionPart::of_borrower, "beta"));
        page.functions([beta, lenders, own].into_iter().map(|part| (part, &report)));
        let busy = [(Labels::new(), Duration::from_millis(1250))];
        page.time_counter("channel_busy", "How long copy channels had something to do", busy);
        let text = page.text();
        for line in [
            "# HELP rackbus_engine_busy_polls Polls of a function's engine that found work.",
            "# TYPE rackbus_engine_busy_polls counter",
            "rackbus_engine_busy_polls_total{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\"} 7",
            "rackbus_engine_idle_polls_total{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\"} 9",
            "rackbus_engine_idle_polls_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"borrower\"} 9",
            "rackbus_engine_idle_polls_total{function=\"alpha/nvme0\",host=\"alpha\",role=\"lender\"} 9",
            "rackbus_function_dma_refused_total{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",cause=\"not mapped\"} 3",
            "rackbus_function_operations_failed_total{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 1",
            "rackbus_function_bytes_total{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 4096",
            "# TYPE rackbus_function_operation_seconds histogram",
            "rackbus_function_operation_seconds_sum{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 1.5",
            "rackbus_function_operation_seconds_count{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 5",
            "rackbus_function_operation_seconds_bucket{le=\"1.5e-7\",function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 4",
            "rackbus_function_operation_seconds_bucket{le=\"+Inf\",function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\",operation=\"read\"} 5",
            "rackbus_function_trouble{function=\"alpha/nvme0\",host=\"beta\",role=\"borrower\"} 1.0",
            "# TYPE rackbus_channel_busy_seconds counter",
            "# UNIT rackbus_channel_busy_seconds seconds",
            "rackbus_channel_busy_seconds_total{} 1.25",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
