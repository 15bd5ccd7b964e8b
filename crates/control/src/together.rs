//! Functions that a host borrows together without a composition's name, as the API has it: all of them in one step, or
//! none.

use std::sync::Arc;

use axum::extract::{ConnectInfo, State};
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Json, Router};
use rackbus_lease::Placement;
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};

use crate::access::ApiPeer;
use crate::api::{ApiError, Lease};
use crate::http::key;
use crate::service::Service;

/// Asks for several functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowAllRequest {
    /// Names of the functions, `HOST/DEVICE`; at least one, each once.
    pub functions: Vec<String>,
    /// The host that shall have them.
    pub borrower: String,
    /// Where the functions' fronts run: `lender` or `borrower`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub placement: Placement,
    /// The user that they are for: functions of one group reach each other's memory by DMA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The running VM of the borrower that they are plugged into: answered when all are, and refused where one cannot be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// How long to wait while others have some of them, in milliseconds, at most a day; nothing: not at all. What waits
    /// has none of them meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Of those who wait, the greatest comes first.
    #[serde(default)]
    pub priority: u8,
}

/// Borrows functions, whole or not at all, in one step; answers when all can be used.
///
/// Who repeats the request with the same `Idempotency-Key` within a day gets the leases of the first one as they stand,
/// or, where one of them has ended, a refusal; the others stay as they are.
#[utoipa::path(post, path = "/v1/leases/together", request_body = BorrowAllRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Vec<Lease>), (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "Somebody has one of them; `holder` and `lease` tell who"),
    (status = 422, body = ApiError, description = "The key belongs to another request"),
    (status = 503, body = ApiError, description = "A node that is needed is silent")))]
async fn borrow(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Json(request): Json<BorrowAllRequest>,
) -> Result<Json<Vec<Lease>>, ApiError> {
    peer.acts_for(&request.borrower)?;
    service.borrow_together(&request, key(&headers)?).await.map(Json)
}

/// What of the OpenAPI document is about functions that are borrowed together.
#[derive(OpenApi)]
#[openapi(paths(borrow), components(schemas(BorrowAllRequest)))]
pub(crate) struct Document;

/// `POST /v1/leases/together`: all of several functions, or none.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/v1/leases/together", post(borrow))
}
