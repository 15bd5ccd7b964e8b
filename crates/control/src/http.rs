//! The routes of the API, and the OpenAPI document that describes them.
//!
//! The API listens on a UNIX socket in the rack's run directory. Only processes of the same user,
//! or root's, are heard: the kernel says who connects.

use std::os::unix::net;
use std::path::Path as FilePath;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::IncomingStream;
use axum::{Json, Router};
use futures_util::{Stream, StreamExt};
use rustix::process::{Uid, getuid};
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::BroadcastStream;
use utoipa::{IntoParams, OpenApi};

use crate::access::{self, AccessRefused, ApiPeer};
use crate::answers::check_key;
use crate::api::{
    ApiError, BorrowRequest, Change, Device, DeviceReport, DeviceState, EventKind, EventRecord,
    Hop, HostState, HostStatus, Isolation, Lease, LeaseStage, MediumLinkReport, NodeMessages,
    NodeReport, OperationReport, RackStatus, RdmaLaneReport, ReportedIdentity,
};
use crate::leaders::IDEMPOTENCY_KEY;
use crate::leadership::serving::ControlStatus;
use crate::service::{Service, problem};
use crate::versions::{AnyMessages, NotUnderstood};
use crate::{
    authorities, certificates, compositions, levels, machines, offers, people, said, shares,
    together,
};

type Shared = State<Arc<Service>>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "rackbus control plane",
        description = "Who may use which function of the rack. Served on the UNIX socket \
                       `control.sock` of the rack's run directory.",
        license(name = "Apache-2.0 OR MIT")
    ),
    paths(
        status, control, devices, leases, lease, borrow, give_back, path, events, changes, listen,
        say
    ),
    components(schemas(
        ApiError,
        BorrowRequest,
        Isolation,
        Change,
        Device,
        DeviceReport,
        DeviceState,
        EventRecord,
        EventKind,
        Hop,
        crate::api::Crossing,
        HostState,
        HostStatus,
        Lease,
        LeaseStage,
        crate::usage::LeaseReport,
        NodeMessages,
        NotUnderstood,
        NodeReport,
        OperationReport,
        MediumLinkReport,
        RdmaLaneReport,
        ReportedIdentity,
        crate::api::PortTraffic,
        crate::api::PeerTraffic,
        crate::api::AccessPath,
        RackStatus,
        ControlStatus,
        crate::leadership::election::Member,
        crate::leadership::members::StoreHealth
    ))
)]
struct Document;

/// The OpenAPI document, as `/openapi.json` serves it.
pub fn openapi() -> String {
    let mut document = Document::openapi();
    document.merge(compositions::Document::openapi());
    document.merge(levels::Document::openapi());
    document.merge(shares::Document::openapi());
    document.merge(together::Document::openapi());
    document.merge(offers::Document::openapi());
    document.merge(machines::Document::openapi());
    document.merge(people::Document::openapi());
    document.merge(certificates::Document::openapi());
    document.merge(authorities::Document::openapi());
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match self.code.as_str() {
            "not_the_node" | "forbidden" => StatusCode::FORBIDDEN,
            "bad_name" | "bad_key" | "bad_request" => StatusCode::BAD_REQUEST,
            "unknown_function"
            | "unknown_host"
            | "unknown_lease"
            | "unknown_place"
            | "unknown_composition"
            | "unknown_request"
            | "unknown_certificate"
            | "unknown_share"
            | "no_way" => StatusCode::NOT_FOUND,
            "none_free" | "implausible_term" | "shared" | "level_refused" | "exists"
            | "in_rack_file" | "held" | "returning" | "queued" | "withdrawn" | "over"
            | "too_many" | "cannot_restart" | "rotation" => StatusCode::CONFLICT,
            "key_reused" | "contradiction" | "inseparable" | "no_window" | "bad_time" => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            "silent" | "not_stored" | "ending" => StatusCode::SERVICE_UNAVAILABLE,
            "not_the_leader" => StatusCode::MISDIRECTED_REQUEST,
            "version" => StatusCode::UPGRADE_REQUIRED,
            "unreachable" => StatusCode::BAD_GATEWAY,
            "timeout" => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let refused = (status == StatusCode::FORBIDDEN).then(|| AccessRefused(self.clone()));
        let mut response = (status, Json(self)).into_response();
        // Who decided about the request says so to whoever notes it.
        refused.map(|refused| response.extensions_mut().insert(refused));
        response
    }
}

/// The rack as a whole: its hosts, and what went wrong lately.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = RackStatus)))]
async fn status(State(service): Shared) -> Json<RackStatus> {
    Json(service.status())
}

/// The control plane itself: its processes, which of them leads, and its store. Whoever is asked answers, leading or not.
///
/// All other requests to one that does not lead are answered with 421 and, in the header `rackbus-leader`, where the
/// leader is.
#[utoipa::path(get, path = "/v1/control", responses((status = 200, body = ControlStatus)))]
async fn control(State(service): Shared) -> Json<ControlStatus> {
    Json(service.alone())
}

/// The functions of the rack.
#[utoipa::path(get, path = "/v1/devices", responses((status = 200, body = Vec<Device>)))]
async fn devices(State(service): Shared) -> Json<Vec<Device>> {
    Json(service.devices())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct LeasesQuery {
    /// Also those that are over.
    #[serde(default)]
    all: bool,
}

/// All leases that last, and with `all` those that are over and still known.
#[utoipa::path(get, path = "/v1/leases", params(LeasesQuery), responses((status = 200, body = Vec<Lease>)))]
async fn leases(State(service): Shared, Query(query): Query<LeasesQuery>) -> Json<Vec<Lease>> {
    Json(service.leases(query.all))
}

/// One lease by its number, also one that is over, as long as it is known.
#[utoipa::path(get, path = "/v1/leases/{lease}", params(("lease" = u64, Path, description = "Its number")),
    responses((status = 200, body = Lease), (status = 404, body = ApiError)))]
async fn lease(State(service): Shared, Path(lease): Path<u64>) -> Result<Json<Lease>, ApiError> {
    service.lease(lease).map(Json).ok_or_else(|| {
        problem(
            "unknown_lease",
            format!("there is no lease {lease}"),
            "`rackbus leases --all` lists them",
        )
    })
}

/// The idempotency key that a request carries.
pub(crate) fn key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    headers.get(IDEMPOTENCY_KEY).map(|value| check_key(value.as_bytes())).transpose()
}

/// Borrows a function, or whichever accelerator keeps a service level; answers when it can be used.
///
/// Who repeats the request with the same `Idempotency-Key` within a day gets the answer to the first
/// one, and no second lease. A refusal changed nothing: then the request is decided anew.
#[utoipa::path(post, path = "/v1/leases", request_body = BorrowRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Lease),
    (status = 404, body = ApiError, description = "No such function or host"),
    (status = 409, body = ApiError, description = "Somebody has it; `holder` and `lease` tell who. No accelerator keeps the level; `offers` tells what would fit"),
    (status = 422, body = ApiError, description = "The key belongs to another request, or what is asked for contradicts itself"),
    (status = 503, body = ApiError, description = "A node that is needed is silent")))]
async fn borrow(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Json(request): Json<BorrowRequest>,
) -> Result<Json<Lease>, ApiError> {
    peer.acts_for(&request.borrower)?;
    service.borrow(&request, key(&headers)?).await.map(Json)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct ReturnQuery {
    /// After so many milliseconds the function is taken from a user that has not released it; without it, after the rack's
    /// `return_grace`. 600,000 at most.
    within_ms: Option<u64>,
}

/// Returns a lease; answers when the function is reset, scrubbed and offered again.
///
/// Its user is asked to release the function, and loses it when that takes longer than `within_ms`, or the rack's
/// `return_grace` where no time is given. Of a lease that is
/// being returned already, the time can be made shorter.
///
/// Who repeats the request with the same `Idempotency-Key` within a day gets the answer to the first
/// one.
#[utoipa::path(delete, path = "/v1/leases/{lease}", params(
        ("lease" = u64, Path, description = "Its number"), ReturnQuery,
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Lease), (status = 404, body = ApiError), (status = 409, body = ApiError),
    (status = 422, body = ApiError, description = "The key belongs to another request, or the time is too long")))]
async fn give_back(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(lease): Path<u64>,
    Query(query): Query<ReturnQuery>,
) -> Result<Json<Lease>, ApiError> {
    service.check_borrower(lease, &peer)?;
    service.give_back(lease, query.within_ms, key(&headers)?).await.map(Json)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct PathQuery {
    /// Where it begins: a host or a function.
    from: String,
    /// Where it ends: a host (its memory) or a function.
    to: String,
}

/// The way that memory accesses take from one place of the rack to another.
#[utoipa::path(get, path = "/v1/path", params(PathQuery), responses(
    (status = 200, body = crate::api::AccessPath),
    (status = 404, body = ApiError, description = "No such host or function, or no way")))]
async fn path(
    State(service): Shared,
    Query(query): Query<PathQuery>,
) -> Result<Json<crate::api::AccessPath>, ApiError> {
    service.path(&query.from, &query.to).map(Json)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    /// Only those with a greater number.
    #[serde(default)]
    after: u64,
    /// Only those of this kind.
    kind: Option<EventKind>,
    /// The last so many; without it, all that are kept.
    most: Option<usize>,
    /// Also those that are still to happen: the answer has no end.
    #[serde(default)]
    follow: bool,
}

/// What happened, with its cause, oldest first: one JSON object a line. The last 10,000 events are
/// kept, for up to 30 days.
#[utoipa::path(get, path = "/v1/events", params(EventsQuery),
    responses((status = 200, body = EventRecord, content_type = "application/x-ndjson")))]
async fn events(State(service): Shared, Query(query): Query<EventsQuery>) -> Response {
    let EventsQuery { after, kind, most, follow } = query;
    let most = most.unwrap_or(usize::MAX);
    if !follow {
        let (kept, _) = service.events(after, kind, most);
        return lines(futures_util::stream::iter(kept));
    }
    let steps = service.steps();
    // Read from what is kept, whenever something was added: who is slow misses nothing.
    let batches =
        futures_util::stream::unfold((steps, after, most), move |(mut steps, after, most)| {
            let service = service.clone();
            async move {
                let (mut after, mut most) = (after, most);
                loop {
                    steps.borrow_and_update();
                    let (batch, newest) = service.events(after, kind, most);
                    (after, most) = (newest, usize::MAX);
                    if !batch.is_empty() {
                        return Some((futures_util::stream::iter(batch), (steps, after, most)));
                    }
                    steps.changed().await.ok()?;
                }
            }
        });
    lines(batches.flatten())
}

/// What changes, from now on: the new state of leases, functions and hosts, one JSON object a line.
#[utoipa::path(get, path = "/v1/changes", responses((status = 200, body = Change, content_type = "application/x-ndjson")))]
async fn changes(State(service): Shared) -> Response {
    // A listener that is too slow misses changes; it sees the next.
    lines(BroadcastStream::new(service.changes()).filter_map(|change| async { change.ok() }))
}

#[derive(Debug, Deserialize, IntoParams)]
struct ListenQuery {
    /// The newest term that the node was told of.
    #[serde(default)]
    term: u64,
}

/// What the control plane says to a host's node, from now on: one message a line, with the leader's term. For nodes.
#[utoipa::path(get, path = "/v1/hosts/{host}/messages", params(("host" = String, Path, description = "The host"), ListenQuery),
    responses((status = 200, body = Object, content_type = "application/x-ndjson"), (status = 404, body = ApiError),
        (status = 403, body = ApiError, description = "Another process is the host's node"),
        (status = 409, body = ApiError, description = "No control plane can have led in the term that it names")))]
async fn listen(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    Path(host): Path<String>,
    Query(query): Query<ListenQuery>,
) -> Result<Response, ApiError> {
    service.check_node(&host, &peer).await?;
    let term = service.term(query.term).await?;
    Ok(lines(said::stream(term, service.listen(&host)?)))
}

/// A host's node says something. For nodes. What is not known is answered as `not_understood`, and the rest heard.
#[utoipa::path(post, path = "/v1/hosts/{host}/messages", params(("host" = String, Path, description = "The host")),
    request_body = NodeMessages, responses((status = 200, body = Option<NotUnderstood>), (status = 404, body = ApiError),
        (status = 403, body = ApiError, description = "Another process is the host's node")))]
async fn say(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    Path(host): Path<String>,
    Json(said): Json<AnyMessages>,
) -> Result<Json<Option<NotUnderstood>>, ApiError> {
    service.check_node(&host, &peer).await?;
    let (said, unknown) = said.understood();
    if let Some(unknown) = &unknown {
        tracing::warn!(host, ?unknown, "a node sent a message of an unknown kind");
    }
    service.receive(&host, said).await?;
    Ok(Json(unknown))
}

/// An answer of a line of JSON for each value.
pub(crate) fn lines<T: Serialize>(values: impl Stream<Item = T> + Send + 'static) -> Response {
    let text = values.map(|value| {
        let mut line = serde_json::to_vec(&value).map_err(std::io::Error::other)?;
        line.push(b'\n');
        Ok::<_, std::io::Error>(line)
    });
    // The first, empty line tells the client at once that it is heard.
    let hello = futures_util::stream::once(async { Ok(b"\n".to_vec()) });
    let body = Body::from_stream(hello.chain(text));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// All routes, for who may ask. Requests carry a [`ConnectInfo`] of the [`ApiPeer`] that they came from.
pub fn routes(service: Arc<Service>) -> Router {
    let check = axum::middleware::from_fn_with_state(service.clone(), access::check);
    bare_routes(service).layer(check)
}

/// The same for everybody: others are put beside them before it is looked at who asks.
pub(crate) fn bare_routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/control", get(control))
        .route("/v1/devices", get(devices))
        .route("/v1/leases", get(leases).post(borrow))
        .route("/v1/leases/{lease}", get(lease).delete(give_back))
        .route("/v1/path", get(path))
        .route("/v1/events", get(events))
        .route("/v1/changes", get(changes))
        .route("/v1/hosts/{host}/messages", get(listen).post(say))
        .route(
            "/openapi.json",
            get(|| async { ([(header::CONTENT_TYPE, "application/json")], openapi()) }),
        )
        .merge(compositions::routes())
        .merge(levels::routes())
        .merge(shares::routes())
        .merge(together::routes())
        .merge(offers::routes())
        .merge(people::own_routes())
        .with_state(service.clone())
        .merge(crate::metrics::routes(Arc::new(move || service.metrics())))
}

/// Serves the API at `socket` until the process ends.
///
/// # Errors
/// When the socket cannot be made, or fails.
pub async fn serve(service: Arc<Service>, socket: &FilePath) -> std::io::Result<()> {
    serve_routes(routes(service), socket).await
}

/// Serves `routes` at `socket` until the process ends, to processes of the same user and root's.
async fn serve_routes(routes: Router, socket: &FilePath) -> std::io::Result<()> {
    serve_on(routes, UnixListener::from_std(listen_at(socket)?)?).await
}

/// Listens at `socket`, which a process that is gone may have left.
///
/// # Errors
/// When another process listens there, or the socket cannot be made.
pub(crate) fn listen_at(socket: &FilePath) -> std::io::Result<net::UnixListener> {
    if net::UnixStream::connect(socket).is_ok() {
        let text = format!("another process listens at {}", socket.display());
        return Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, text));
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = net::UnixListener::bind(socket)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves `routes` to who connects to `listener`, until the process ends, to processes of the same user
/// and root's.
pub(crate) async fn serve_on(routes: Router, listener: UnixListener) -> std::io::Result<()> {
    axum::serve(OwnUsers(listener), routes.into_make_service_with_connect_info::<ApiPeer>()).await
}

impl Connected<IncomingStream<'_, OwnUsers>> for ApiPeer {
    fn connect_info(stream: IncomingStream<'_, OwnUsers>) -> Self {
        let credentials = stream.io().peer_cred();
        ApiPeer::Local(credentials.ok().and_then(|peer| peer.pid()))
    }
}

/// Accepts connections of the same user's processes, and root's.
pub(crate) struct OwnUsers(UnixListener);

impl OwnUsers {
    /// Of those who connect to `listener`.
    ///
    /// # Errors
    /// When the runtime cannot watch it.
    pub(crate) fn new(listener: net::UnixListener) -> std::io::Result<OwnUsers> {
        UnixListener::from_std(listener).map(OwnUsers)
    }
}

impl axum::serve::Listener for OwnUsers {
    type Io = UnixStream;
    type Addr = tokio::net::unix::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = match self.0.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::error!(%error, "a connection could not be accepted");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            };
            match stream.peer_cred() {
                Ok(peer) if peer.uid() == getuid().as_raw() || peer.uid() == Uid::ROOT.as_raw() => {
                    return (stream, address);
                }
                Ok(peer) => {
                    tracing::warn!(uid = peer.uid(), "a connection of another user was refused")
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was refused: its process cannot be identified")
                }
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}
