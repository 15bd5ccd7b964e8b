//! Devices that join and leave a running rack, as the API has them.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::HeaderMap;
use axum::routing::{delete, post, put};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, OpenApi, ToSchema};

use crate::access::ApiPeer;
use crate::api::{ApiError, RackStatus};
use crate::http::key;
use crate::machines::RackFile;
use crate::service::Service;

/// A device to be offered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OfferRequest {
    /// Its name in the rack, `HOST/DEVICE`: `alpha/nvme2`.
    pub device: String,
    /// What the rack file would say of it, in TOML without the section's head: `kind = "nvme"` and so on. Nothing for a
    /// device that the rack file lists and that was withdrawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
    /// Its host's node has it from a file of its own (`rackbus node --devices`).
    #[serde(default)]
    pub by_node: bool,
}

/// A device of the rack as a whole, with what the rack file says of it or would say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RackSection {
    /// Its name in the rack, `HOST/DEVICE`.
    pub device: String,
    /// Names of its functions, `HOST/FUNCTION`, each of which is lent by itself.
    pub functions: Vec<String>,
    /// What the rack file says of it, in TOML without the section's head.
    pub section: String,
    /// Whether the rack file has it; otherwise it was offered since.
    pub listed: bool,
    /// Whether its host's node has it from a file of its own.
    #[serde(default)]
    pub by_node: bool,
    /// How far it is.
    pub state: SectionState,
    /// Why its node cannot have it, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// How far a device is in or out of the rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SectionState {
    /// Its functions can be borrowed, as far as nobody has them.
    Offered,
    /// Its host's node has not taken it on yet, or cannot.
    Joining,
    /// Its functions cannot be borrowed any more; its host's node has not released it yet.
    Leaving,
    /// Its host's node does not have it.
    Withdrawn,
}

type Shared = State<Arc<Service>>;

/// The devices, each as a whole.
#[utoipa::path(get, path = "/v1/sections", responses((status = 200, body = Vec<RackSection>)))]
async fn list(State(service): Shared) -> Json<Vec<RackSection>> {
    Json(service.sections())
}

/// Offers a device; answers when its functions can be borrowed. To offer the same again changes nothing.
///
/// Who repeats the request with the same `Idempotency-Key` within a day changes nothing more: a device that was
/// withdrawn since stays so.
#[utoipa::path(post, path = "/v1/sections", request_body = OfferRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = RackSection),
    (status = 400, body = ApiError, description = "No device can be as described"),
    (status = 404, body = ApiError, description = "No such host"),
    (status = 409, body = ApiError, description = "There is another device of this name"),
    (status = 422, body = ApiError, description = "The key belongs to another request"),
    (status = 503, body = ApiError, description = "The node of its host is silent")))]
async fn offer(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Json(request): Json<OfferRequest>,
) -> Result<Json<RackSection>, ApiError> {
    service.offer(&request, &peer, key(&headers)?).await.map(Json)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
struct WithdrawQuery {
    /// End the leases of its functions first, in order.
    #[serde(default)]
    force: bool,
}

/// Withdraws a device; answers when its host's node has released it, or is not there to do so.
///
/// Who repeats the request with the same `Idempotency-Key` within a day changes nothing more: a device that was
/// offered again since stays, with its leases. Where the rack has none of this name any more, it is unknown.
#[utoipa::path(delete, path = "/v1/sections/{host}/{device}", params(WithdrawQuery,
        ("host" = String, Path, description = "Its host"), ("device" = String, Path, description = "Its name there"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = RackSection), (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "Somebody has a function of it; `holder` and `lease` tell who"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn withdraw(
    State(service): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path((host, device)): Path<(String, String)>,
    Query(query): Query<WithdrawQuery>,
) -> Result<Json<RackSection>, ApiError> {
    service.check_device_of(&host, &peer).await?;
    service.withdraw(&host, &device, query.force, key(&headers)?).await.map(Json)
}

/// Has the running rack be that of another rack file, which lists its devices as they are now.
///
/// Compositions, hosts and the fabric are those of the file from then on. Devices of hosts that stay join and leave by
/// `/v1/sections` before. To follow the same file again changes nothing. A rack whose hosts are machines of their own follows none.
#[utoipa::path(put, path = "/v1/rack", request_body = RackFile, responses((status = 200, body = RackStatus),
    (status = 400, body = ApiError, description = "It is no rack file, or this rack follows none"),
    (status = 409, body = ApiError, description = "A composition that it changes is borrowed, one of a name was saved, or a host that it has no more is in use"),
    (status = 422, body = ApiError, description = "It is of another rack, or has devices that differ from those of the rack")))]
async fn follow(
    State(service): Shared,
    Json(file): Json<RackFile>,
) -> Result<Json<RackStatus>, ApiError> {
    service.follow_file(file.text).await.map(Json)
}

/// What of the OpenAPI document is about devices that join and leave.
#[derive(OpenApi)]
#[openapi(
    paths(list, offer, withdraw, follow),
    components(schemas(OfferRequest, RackSection, SectionState))
)]
pub(crate) struct Document;

/// The routes of devices that join and leave.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/v1/sections", post(offer).get(list))
        .route("/v1/sections/{host}/{device}", delete(withdraw))
        .route("/v1/rack", put(follow))
}
