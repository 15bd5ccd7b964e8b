//! Compositions as the API has them: functions that a host borrows whole or not at all.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum::{Json, Router};
use rackbus_lease::Placement;
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};

use crate::access::ApiPeer;
use crate::api::{ApiError, Isolation, Lease};
use crate::http::key;
use crate::service::Service;

/// A composition to be saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompositionSpec {
    /// Its name, which is also that of the group that its leases belong to: at most 64 letters, digits, `.`,
    /// `_` and `-`.
    pub name: String,
    /// The host that borrows it.
    pub borrower: String,
    /// Names of its functions, `HOST/DEVICE`; at least one, each once.
    pub functions: Vec<String>,
    /// What the lenders must not be able to do.
    #[serde(default)]
    pub isolation: Isolation,
}

/// How a composition is borrowed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CompositionRequest {
    /// How long to wait for its functions while others have some of them, in milliseconds, at most a day;
    /// nothing: not at all. What waits has none of them meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Of those who wait, the greatest comes first.
    pub priority: u8,
    /// The running VM of its host that its functions are plugged into: answered when all are, and refused where one cannot
    /// be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The process of the borrower's machine that starts what will use the functions, as ID.BIRTH.NAMESPACE: what nobody has
    /// used when it ends is returned, as of a single function that is borrowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub starter: Option<String>,
}

/// A composition as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Composition {
    /// Name of the composition and of the group of its leases.
    pub name: String,
    /// The host that borrows it.
    pub borrower: String,
    /// Names of its functions, `HOST/DEVICE`.
    pub functions: Vec<String>,
    /// Where the functions' fronts run: `lender` or `borrower`.
    #[schema(value_type = String)]
    pub placement: Placement,
    /// Whether the rack file has it; then it is changed there.
    pub in_rack_file: bool,
    /// How much of it is borrowed.
    pub state: CompositionState,
    /// The leases of its group that are not over; those of a VM that was moved are another host's.
    pub leases: Vec<Lease>,
}

impl Composition {
    /// What is answered of a composition that an earlier request with the same key has removed: of what it consisted is
    /// not known any more.
    pub(crate) fn removed(name: &str) -> Composition {
        Composition {
            name: name.to_owned(),
            borrower: String::new(),
            functions: Vec::new(),
            placement: Placement::default(),
            in_rack_file: false,
            state: CompositionState::Free,
            leases: Vec::new(),
        }
    }
}

/// How much of a composition is borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CompositionState {
    /// None of its functions is borrowed in its group.
    Free,
    /// All of it, and all can be used.
    Borrowed,
    /// Some of it: it is on its way, or a lender was lost.
    Partly,
}

type Shared = State<Arc<Service>>;

/// The compositions: those of the rack file, and those that were saved.
#[utoipa::path(get, path = "/v1/compositions", responses((status = 200, body = Vec<Composition>)))]
async fn list(State(service): Shared) -> Json<Vec<Composition>> {
    Json(service.compositions())
}

/// Saves a composition. To save the same again changes nothing.
///
/// Who repeats the request with the same `Idempotency-Key` within a day changes nothing more: one that was removed
/// since stays so.
#[utoipa::path(post, path = "/v1/compositions", request_body = CompositionSpec,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Composition),
    (status = 404, body = ApiError, description = "No such function or host"),
    (status = 409, body = ApiError, description = "Another one has this name"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn save(
    State(service): Shared,
    headers: HeaderMap,
    Json(spec): Json<CompositionSpec>,
) -> Result<Json<Composition>, ApiError> {
    service.save_composition(&spec, key(&headers)?).await.map(Json)
}

/// Forgets a composition of which nothing is borrowed.
///
/// Who repeats the request with the same `Idempotency-Key` within a day changes nothing more: one of the same name
/// that was saved since stays. Where there is none, the answer has its name, and no functions.
#[utoipa::path(delete, path = "/v1/compositions/{name}", params(("name" = String, Path, description = "Its name"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Composition), (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "Some of it is borrowed, or the rack file has it"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn remove(
    State(service): Shared,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Json<Composition>, ApiError> {
    service.remove_composition(&name, key(&headers)?).await.map(Json)
}

/// Borrows a composition, whole or not at all; answers when all of it can be used. One that is borrowed is
/// answered as it is.
///
/// Who repeats the request with the same `Idempotency-Key` within a day has the leases of the first one as they
/// stand, or, where one of them has ended, a refusal; the others stay as they are.
#[utoipa::path(post, path = "/v1/compositions/{name}/borrow", request_body = CompositionRequest,
    params(("name" = String, Path, description = "Its name"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")), responses(
    (status = 200, body = Composition), (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "Somebody has a part of it; `holder` and `lease` tell who"),
    (status = 422, body = ApiError, description = "The key belongs to another request"),
    (status = 503, body = ApiError, description = "A node that is needed is silent")))]
async fn borrow(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(name): Path<String>,
    Json(request): Json<CompositionRequest>,
) -> Result<Json<Composition>, ApiError> {
    service.check_composition(&name, &peer)?;
    service.borrow_composition(&name, &request, key(&headers)?).await.map(Json)
}

/// Returns all leases of a composition's group; answers when every function is offered again.
///
/// Who repeats the request with the same `Idempotency-Key` within a day returns nothing more: what was borrowed since
/// stays.
#[utoipa::path(post, path = "/v1/compositions/{name}/return",
    params(("name" = String, Path, description = "Its name"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Composition), (status = 404, body = ApiError),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn give_back(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Json<Composition>, ApiError> {
    service.check_composition(&name, &peer)?;
    service.return_composition(&name, key(&headers)?, &peer).await.map(Json)
}

/// What of the OpenAPI document is about compositions.
#[derive(OpenApi)]
#[openapi(
    paths(list, save, remove, borrow, give_back),
    components(schemas(Composition, CompositionSpec, CompositionRequest, CompositionState))
)]
pub(crate) struct Document;

/// The routes of compositions.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/v1/compositions", get(list).post(save))
        .route("/v1/compositions/{name}", axum::routing::delete(remove))
        .route("/v1/compositions/{name}/borrow", post(borrow))
        .route("/v1/compositions/{name}/return", post(give_back))
}
