//! Time-sharing as the API has it: borrowers that take turns on a function.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use rackbus_lease::Placement;
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};

use crate::access::ApiPeer;
use crate::api::{ApiError, Isolation};
use crate::http::{key, lines};
use crate::service::Service;

/// Asks for turns on a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareSpec {
    /// Name of the function, `HOST/DEVICE`.
    pub function: String,
    /// The host that shall have it in turns.
    pub borrower: String,
    /// The VM of that host into which it is plugged in each turn, and out of which it is unplugged after it; nothing
    /// where it is for a program, which opens its socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// How long a turn of weight 1 is, in milliseconds, from 100 to a day; the same for all who share a function.
    /// Nothing: as the others have it, or 30 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice_ms: Option<u64>,
    /// How long a program may take to release the function when its turn is over, in milliseconds, at most 60,000; nothing: 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// How many slices a turn has, from 1 to 100; nothing: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// What the lender must not be able to do.
    #[serde(default)]
    pub isolation: Isolation,
    /// The user that it is for, among those of the borrower: functions of one group reach each other's memory by DMA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level that the lender is to promise in each turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

impl ShareSpec {
    /// Turns on a function for a host, with nothing particular asked for.
    pub fn new(function: &str, borrower: &str) -> ShareSpec {
        ShareSpec {
            function: function.to_owned(),
            borrower: borrower.to_owned(),
            vm: None,
            slice_ms: None,
            grace_ms: None,
            weight: None,
            isolation: Isolation::Shared,
            group: None,
            level: None,
        }
    }
}

/// Where a share stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShareState {
    /// Others have the function, or nobody can have it.
    Waiting,
    /// Its turn begins: the function is being lent to it.
    Coming,
    /// It is its turn: the function can be used.
    Turn,
    /// Its turn ends: its user is asked to release the function.
    Asked,
}

/// A borrower that takes turns on a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Share {
    /// Number of the share, from those of leases.
    pub share: u64,
    /// Name of the function, `HOST/DEVICE`.
    pub function: String,
    /// The host that has it in turns.
    pub borrower: String,
    /// The VM into which it is plugged; nothing where it is for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Where the function's front runs.
    #[schema(value_type = String)]
    pub placement: Placement,
    /// The user that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The service level of each turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// How long a turn of weight 1 is, in milliseconds.
    pub slice_ms: u64,
    /// How long a program may take to release the function, in milliseconds.
    pub grace_ms: u64,
    /// How many slices a turn has.
    pub weight: u32,
    /// Whether it waits, has its turn, or is asked to release the function.
    pub state: ShareState,
    /// Number of the lease that its turn is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u64>,
    /// Where the function is served in this turn: a vfio-user socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    /// How long this turn is while others want the function, in milliseconds; of one that waits, how long its next one
    /// would be. Negative where it owes time and misses turns.
    pub allowance_ms: i64,
    /// Shares that come before it; nothing while it has a turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<usize>,
    /// Turns that it had.
    pub turns: u64,
    /// For how long it had the function in these turns, in milliseconds.
    pub held_ms: u64,
    /// How often it got the function from another share that was asked to release it.
    pub handovers: u64,
    /// For how long nobody had the function at these, all together, in milliseconds.
    pub handover_ms: u64,
    /// When it joined, milliseconds since 1970.
    pub since_ms: u64,
}

impl Share {
    /// What is answered of a share that an earlier request with the same key has left: of what it consisted is not known
    /// any more.
    pub(crate) fn left(share: u64) -> Share {
        Share {
            share,
            function: String::new(),
            borrower: String::new(),
            vm: None,
            placement: Placement::default(),
            group: None,
            level: None,
            slice_ms: 0,
            grace_ms: 0,
            weight: 0,
            state: ShareState::Waiting,
            lease: None,
            socket: None,
            allowance_ms: 0,
            ahead: None,
            turns: 0,
            held_ms: 0,
            handovers: 0,
            handover_ms: 0,
            since_ms: 0,
        }
    }
}

/// What is said of the turns on a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Turns {
    /// How many shares the function has.
    pub shares: usize,
    /// The share whose turn it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u64>,
    /// How long a turn of weight 1 is, in milliseconds.
    pub slice_ms: u64,
    /// Turns that those who share it now had.
    pub turns: u64,
    /// How many of those passed the function from one share to another.
    pub handovers: u64,
    /// For how long nobody had the function at these, all together, in milliseconds.
    pub handover_ms: u64,
}

impl Turns {
    /// How long a hand-over takes in the middle, in milliseconds: nobody has the function then.
    pub fn handover(&self) -> Option<f64> {
        (self.handovers > 0).then(|| self.handover_ms as f64 / self.handovers as f64)
    }
}

type Shared = State<Arc<Service>>;

/// Those who take turns on functions.
#[utoipa::path(get, path = "/v1/shares", responses((status = 200, body = Vec<Share>)))]
async fn list(State(service): Shared) -> Json<Vec<Share>> {
    Json(service.shares())
}

/// Takes turns on a function from now on, until the share is left: unattended, also across restarts of the control
/// plane.
///
/// Who repeats the request with the same `Idempotency-Key` within a day gets the same share, as it stands then; where it was
/// left meanwhile, it is unknown.
#[utoipa::path(post, path = "/v1/shares", request_body = ShareSpec,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Share),
    (status = 404, body = ApiError, description = "No such function or host"),
    (status = 409, body = ApiError, description = "The function is shared otherwise, or others wait for it"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn join(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Json(spec): Json<ShareSpec>,
) -> Result<Json<Share>, ApiError> {
    peer.acts_for(&spec.borrower)?;
    service.join_share(&spec, key(&headers)?).await.map(Json)
}

/// One of those who take turns.
#[utoipa::path(get, path = "/v1/shares/{share}", params(("share" = u64, Path, description = "Its number")),
    responses((status = 200, body = Share), (status = 404, body = ApiError)))]
async fn one(State(service): Shared, Path(share): Path<u64>) -> Result<Json<Share>, ApiError> {
    service.find_share(share).map(Json)
}

/// Takes no more turns. Where it has the function, that is returned in order. No other share ever has its number:
/// to ask again changes nothing, and it is unknown.
///
/// Who repeats the request with the same `Idempotency-Key` within a day is answered that it was left: with its number,
/// and without a function or a borrower.
#[utoipa::path(delete, path = "/v1/shares/{share}",
    params(("share" = u64, Path, description = "Its number"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Share), (status = 404, body = ApiError),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn leave(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(share): Path<u64>,
) -> Result<Json<Share>, ApiError> {
    service.leave_share(share, &peer, key(&headers)?).await.map(Json)
}

/// Gives its turn back early, and goes on taking turns.
///
/// Who repeats the request with the same `Idempotency-Key` within a day gives nothing more back: a later turn stays.
#[utoipa::path(post, path = "/v1/shares/{share}/yield",
    params(("share" = u64, Path, description = "Its number"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")), responses((status = 200, body = Share),
    (status = 404, body = ApiError), (status = 409, body = ApiError, description = "It is not its turn"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn give_turn_back(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(share): Path<u64>,
) -> Result<Json<Share>, ApiError> {
    peer.acts_for(&service.find_share(share)?.borrower)?;
    service.give_turn_back(share, key(&headers)?).await.map(Json)
}

/// How a share stands now, and whenever that changes: its turn begins, it is asked to release the function, its turn is over. One
/// JSON object a line; the answer ends when the share is left.
#[utoipa::path(get, path = "/v1/shares/{share}/turns",
    params(("share" = u64, Path, description = "Its number")), responses(
    (status = 200, body = Share, content_type = "application/x-ndjson"), (status = 404, body = ApiError)))]
async fn turns(State(service): Shared, Path(share): Path<u64>) -> Result<Response, ApiError> {
    service.find_share(share)?;
    let (steps, last) = (service.steps(), None::<(ShareState, Option<u64>)>);
    let news = futures_util::stream::unfold((steps, last), move |(mut steps, last)| {
        let service = service.clone();
        async move {
            loop {
                steps.borrow_and_update();
                let now = service.find_share(share).ok()?;
                let stands = Some((now.state, now.lease));
                if stands != last {
                    return Some((now, (steps, stands)));
                }
                steps.changed().await.ok()?;
            }
        }
    });
    Ok(lines(news))
}

/// What of the OpenAPI document is about time-sharing.
#[derive(OpenApi)]
#[openapi(
    paths(list, join, one, leave, give_turn_back, turns),
    components(schemas(Share, ShareSpec, ShareState, Turns))
)]
pub(crate) struct Document;

/// The routes of time-sharing.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/v1/shares", get(list).post(join))
        .route("/v1/shares/{share}", get(one).delete(leave))
        .route("/v1/shares/{share}/yield", post(give_turn_back))
        .route("/v1/shares/{share}/turns", get(turns))
}
