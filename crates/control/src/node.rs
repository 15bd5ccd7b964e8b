//! What a node answers at its own socket, besides its metrics: who reaches what (`GET /v1/reach?of=…`), how
//! often it was restarted in place (`GET /v1/process`), and that it is to be (`POST /v1/restart`); its part in the
//! rack's network ([`crate::network`]): `GET /v1/network`, `POST /v1/network/up`, `…/down` and `…/capture`.

use std::os::unix::net::UnixListener;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::{Query, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use rackbus_fabric::FabricHandle;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::api::ApiError;
use crate::http::{listen_at, serve_on};
use crate::metrics::{self, MetricsSource};
use crate::network::{CaptureDone, CaptureRequest, NodeNetwork};
use crate::reach::reached;
use crate::service::views::problem;

/// Which program a node's process runs now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProcess {
    /// How often the node was restarted in place since it was started.
    pub restarts: u64,
    /// How long nobody was answered at the last of these restarts, in microseconds.
    pub pause_us: u64,
    /// Functions that were in use then, lent and borrowed ones.
    pub in_use: u64,
    /// Version of the program that it runs.
    pub version: String,
}

/// That a node is to be restarted in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartRequest {
    /// The program that continues as the node: an absolute path.
    pub program: PathBuf,
    /// The text of the rack file that it continues with; that of before where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// It is only asked whether that can be done now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check_only: bool,
}

impl RestartRequest {
    /// That a node continues as `program`, in the rack that it is in.
    pub fn of(program: PathBuf) -> RestartRequest {
        RestartRequest { program, rack: None, check_only: false }
    }
}

/// A request to restart the node. It is answered where it is refused, or nothing is to be done; otherwise the process that
/// was asked is replaced, and the connection ends.
#[derive(Debug)]
pub struct AskedRestart {
    /// What is asked for.
    pub request: RestartRequest,
    /// Told why it is not done, or that it could be.
    pub answer: oneshot::Sender<Result<(), ApiError>>,
}

/// What a node answers from.
pub struct NodeSources {
    /// What is counted on the node, as Prometheus reads it.
    pub metrics: MetricsSource,
    /// What it lets others reach.
    pub fabric: FabricHandle,
    /// Its part in the rack's network.
    pub network: Arc<dyn NodeNetwork>,
    /// Which program the node is now, and how often it was restarted in place.
    pub process: NodeProcess,
    /// Who is to restart it. Where it has no place for another request, whoever asks waits for one; a caller that goes
    /// before that has not asked.
    pub restarts: mpsc::Sender<AskedRestart>,
}

impl std::fmt::Debug for NodeSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeSources").field("process", &self.process).finish_non_exhaustive()
    }
}

/// Listens at a node's socket, which a process that is gone may have left.
///
/// # Errors
/// When another process listens there, or the socket cannot be made.
pub fn listen(socket: &FilePath) -> std::io::Result<UnixListener> {
    listen_at(socket)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReachQuery {
    of: String,
}

/// Answers at `listener` until the process ends, to processes of the same user and root's.
///
/// # Errors
/// When the socket fails.
pub async fn serve_node(answers: NodeSources, listener: UnixListener) -> std::io::Result<()> {
    let NodeSources { metrics, fabric, network, process, restarts } = answers;
    let reach = async move |Query(query): Query<ReachQuery>| {
        fabric.with(|fabric| reached(fabric, &query.of)).map(Json)
    };
    let routes: Router = metrics::routes(metrics)
        .route("/v1/reach", get(reach))
        .route("/v1/process", get(async move || Json(process.clone())))
        .merge(network_routes(network))
        .merge(Router::new().route("/v1/restart", post(restart)).with_state(restarts));
    serve_on(routes, tokio::net::UnixListener::from_std(listener)?).await
}

async fn restart(
    State(restarts): State<mpsc::Sender<AskedRestart>>,
    Json(request): Json<RestartRequest>,
) -> Result<Json<()>, ApiError> {
    let (answer, answered) = oneshot::channel();
    let unable = || {
        let text = "this node cannot be restarted in place".to_owned();
        problem("cannot_restart", text, "stop the rack with `rackbus down` and start it again")
    };
    restarts.send(AskedRestart { request, answer }).await.map_err(|_| unable())?;
    // Who was asked does not return where it is done.
    answered.await.unwrap_or_else(|_| Err(unable())).map(Json)
}

fn network_routes(network: Arc<dyn NodeNetwork>) -> Router {
    let set = |up: bool| {
        post(async move |State(network): State<Arc<dyn NodeNetwork>>| {
            blocking(move || network.set_up(up)).await
        })
    };
    let status = async |State(network): State<Arc<dyn NodeNetwork>>| {
        blocking(move || Ok(network.status())).await
    };
    Router::new()
        .route("/v1/network", get(status))
        .route("/v1/network/up", set(true))
        .route("/v1/network/down", set(false))
        .route("/v1/network/capture", post(capture))
        .with_state(network)
}

async fn capture(
    State(network): State<Arc<dyn NodeNetwork>>,
    Json(request): Json<CaptureRequest>,
) -> Result<Json<CaptureDone>, ApiError> {
    // Whoever asked and is gone wants no more: then this is dropped where it waits.
    let stop = StopOnDrop(Arc::new(AtomicBool::new(false)));
    let stopped = stop.0.clone();
    blocking(move || network.capture(&request, &|| stopped.load(Ordering::Relaxed))).await
}

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does what waits for the system on a thread that may.
async fn blocking<T: Send + 'static>(
    job: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<Json<T>, ApiError> {
    let failed = |_| problem("failed", "the node could not do it".to_owned(), "see the node's log");
    tokio::task::spawn_blocking(job).await.map_err(failed)?.map(Json)
}
