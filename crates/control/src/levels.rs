//! Service levels as the API has them: that of a lease is changed while it is used.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::HeaderMap;
use axum::routing::put;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};

use crate::access::ApiPeer;
use crate::api::{
    AcceleratorChoice, AcceleratorOffer, AcceleratorRoom, ApiError, EngineCost, LONGEST_LEVEL,
    Lease,
};
use crate::http::key;
use crate::service::{Service, problem};

/// Another service level for a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LevelRequest {
    /// The level that the lender is to promise from now on: `aes256gcm 6 Gbit/s`; nothing for what a lease without
    /// a level has.
    pub level: Option<String>,
}

/// Refuses what cannot be a service level, of whatever class.
///
/// # Errors
/// [`ApiError`] when it is too long, or not one line.
pub(crate) fn check_level(level: Option<&str>) -> Result<(), ApiError> {
    let long = |level: &str| level.len() > LONGEST_LEVEL || level.chars().any(char::is_control);
    match level {
        Some(level) if long(level) => Err(problem(
            "bad_request",
            "the service level is too long, or not one line".to_owned(),
            &format!("write it in {LONGEST_LEVEL} bytes at most, as `aes256gcm 4 Gbit/s`"),
        )),
        _ => Ok(()),
    }
}

/// Changes the service level of a lease while it is used; answers when the lender has decided. Refused with what
/// would fit; the level before stays in force then. To ask again for the same changes nothing.
///
/// Who repeats the request with the same `Idempotency-Key` within a day changes nothing more: a level that somebody
/// asked for since stays.
#[utoipa::path(put, path = "/v1/leases/{lease}/level", request_body = LevelRequest,
    params(("lease" = u64, Path, description = "Its number"),
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = Lease), (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "The level cannot be kept, another change is under way, or the lease is not in use"),
    (status = 422, body = ApiError, description = "The key belongs to another request"),
    (status = 504, body = ApiError, description = "The lender has not answered yet, and goes on being asked")))]
async fn change(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    headers: HeaderMap,
    Path(lease): Path<u64>,
    Json(request): Json<LevelRequest>,
) -> Result<Json<Lease>, ApiError> {
    service.check_borrower(lease, &peer)?;
    service.change_level(lease, &request, key(&headers)?).await.map(Json)
}

/// What of the OpenAPI document is about service levels.
#[derive(OpenApi)]
#[openapi(
    paths(change),
    components(schemas(
        LevelRequest,
        AcceleratorChoice,
        AcceleratorOffer,
        AcceleratorRoom,
        EngineCost
    ))
)]
pub(crate) struct Document;

/// The routes of service levels.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/v1/leases/{lease}/level", put(change))
}
