//! Certificates and revocations as the API has them.
//!
//! Nodes, and control planes that do not lead, follow the list of revocations ([`follow`]): they are answered when it
//! changes, so whoever is revoked is refused everywhere within moments.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::routing::get;
use axum::{Json, Router};
use hyper::Method;
use rackbus_identity::{
    Certified, Person, Revocation, RevocationList, Revocations, Revoked, Role, Subject, now,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::{IntoParams, OpenApi, ToSchema};

use crate::answers::KeyedChange;
use crate::api::ApiError;
use crate::blocking::blocking;
use crate::client::{ControlClient, ControlClientError};
use crate::http::key;
use crate::machines::RackAdmission;
use crate::register::{AuthoritySet, RegisterOutcome};
use crate::service::{Service, problem};

/// The longest that an answer waits for something new.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How long whoever follows waits for an answer.
const FOLLOWED: Duration = Duration::from_secs(20);
/// How long whoever follows waits after one that did not come.
const AGAIN: Duration = Duration::from_millis(500);

/// A certificate that was given out and has not been forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Certificate {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// Whose it is, as the certificate says: `beta.node.rackbus`, `ann.operator.user.rackbus`.
    pub subject: String,
    /// When it was made, in seconds since 1970.
    pub since: u64,
    /// Until when it is good, in seconds since 1970.
    pub until: u64,
    /// The number of the revocation that it is covered by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
}

/// What is to be revoked: one of these.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct RevokeRequest {
    /// All certificates of this host's node, and tokens for it that nobody has used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// All certificates of this person, and tokens for them that nobody has used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The certificate with this number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// What came of a revocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RevokeAnswer {
    /// How many certificates that were good are revoked by it, as far as the control plane knows them.
    pub certificates: usize,
    /// How many tokens are of no more use by it.
    pub tokens: usize,
    /// The number of the revocation.
    pub version: u64,
}

impl RevokeRequest {
    fn what(&self) -> Result<Revoked, ApiError> {
        let bad = |error: String| {
            problem("bad_request", error, "name a host, a user, or the number of a certificate")
        };
        match (&self.host, &self.user, &self.serial) {
            (Some(host), None, None) => Ok(Revoked::Host(host.clone())),
            (None, Some(user), None) => {
                let person = Person { user: user.clone(), role: Role::Reader };
                match Subject::Person(person).is_valid() {
                    true => Ok(Revoked::User(user.clone())),
                    false => Err(bad(format!("no certificate can name {user:?}"))),
                }
            }
            (None, None, Some(serial)) => {
                serial.parse().map(Revoked::Serial).map_err(|error| bad(format!("{error}")))
            }
            _ => Err(bad("it is not one thing that is to be revoked".to_owned())),
        }
    }
}

impl From<(&Certified, Option<&Revocation>)> for Certificate {
    fn from((certified, revocation): (&Certified, Option<&Revocation>)) -> Certificate {
        let Certified { subject, serial, since, until } = certified;
        Certificate {
            serial: serial.to_string(),
            subject: subject.to_string(),
            since: *since,
            until: *until,
            revoked: revocation.map(|it| it.number),
        }
    }
}

type Shared = State<Arc<RackAdmission>>;

/// The certificates that were given out and are not over.
#[utoipa::path(get, path = "/v1/certificates", responses((status = 200, body = Vec<Certificate>)))]
async fn list(State(admission): Shared) -> Json<Vec<Certificate>> {
    Json(admission.service().certificates())
}

/// Revokes certificates. They are refused from then on, and connections by them are ended.
///
/// Who repeats the request with the same `Idempotency-Key` within a day revokes nothing more: certificates and tokens
/// that were given out since stay good. The answer counts the certificates that the first one covers now, and no tokens.
#[utoipa::path(post, path = "/v1/revocations", request_body = RevokeRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = RevokeAnswer),
    (status = 400, body = ApiError, description = "Not one thing is named"),
    (status = 404, body = ApiError, description = "No certificate has this number"),
    (status = 422, body = ApiError, description = "The key belongs to another request")))]
async fn revoke(
    State(admission): Shared,
    headers: HeaderMap,
    Json(asked): Json<RevokeRequest>,
) -> Result<Json<RevokeAnswer>, ApiError> {
    let what = asked.what()?;
    if let Revoked::Host(host) = &what
        && !admission.service().register().has_host(host)
    {
        admission.check_host(host)?;
    }
    let keyed = KeyedChange::new(key(&headers)?, "revoke", &asked);
    // Before the certificates: with a token there would be another one.
    let tokens = match admission.service().was_made(&keyed).await? {
        true => 0,
        false => admission.forget_tokens(what.clone()).await?,
    };
    let RegisterOutcome { certificates, version, .. } =
        admission.service().revoke(what, keyed).await?;
    Ok(Json(RevokeAnswer { certificates, tokens, version }))
}

#[derive(Debug, Deserialize, IntoParams)]
struct FollowQuery {
    /// The version that is known.
    #[serde(default)]
    after: u64,
    /// How long to wait for a later one, in milliseconds, at most half a minute.
    #[serde(default)]
    wait_ms: u64,
    /// The fingerprints of the certificate authorities that are known, with commas between them.
    #[serde(default)]
    authorities: Option<String>,
}

/// What whoever follows is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FollowedIdentity {
    /// All that is revoked.
    #[serde(flatten)]
    pub list: RevocationList,
    /// The fingerprints of the rack's certificate authorities, the one that signs first. A control plane that is older says
    /// none.
    #[serde(default)]
    pub authorities: Vec<String>,
}

/// What is revoked, by nodes to be looked at: `version`, and `revoked`, a list; and `authorities`, the fingerprints of the
/// certificate authorities that are trusted, the one that signs first. Answers when the version or these are others than
/// those that are known, or the time is over.
#[utoipa::path(get, path = "/v1/revocations", params(FollowQuery),
    responses((status = 200, body = Object)))]
async fn revocations(
    State(admission): Shared,
    Query(query): Query<FollowQuery>,
) -> Result<Json<FollowedIdentity>, ApiError> {
    let wait = Duration::from_millis(query.wait_ms).min(LONGEST_WAIT);
    let are_known = |set: Option<&AuthoritySet>| {
        let now = admission.bundle(set).map(|it| it.fingerprints().join(","));
        query.authorities.as_ref().is_none_or(|known| now.is_ok_and(|now| now == *known))
    };
    let list = admission.service().revocations_after(query.after, are_known, wait).await;
    let (bundle, _) = admission.authorities()?;
    Ok(Json(FollowedIdentity { list, authorities: bundle.fingerprints().to_vec() }))
}

/// What of the OpenAPI document is about certificates.
#[derive(OpenApi)]
#[openapi(
    paths(list, revoke, revocations),
    components(schemas(Certificate, RevokeRequest, RevokeAnswer))
)]
pub(crate) struct Document;

/// The routes of certificates.
pub(crate) fn routes() -> Router<Arc<RackAdmission>> {
    Router::new()
        .route("/v1/certificates", get(list))
        .route("/v1/revocations", get(revocations).post(revoke))
}

impl ControlClient {
    /// The certificates that were given out and are not over.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn certificates(&self) -> Result<Vec<Certificate>, ControlClientError> {
        self.get("/v1/certificates").await
    }

    /// Has the control plane revoke the certificates that `asked` names. One that is restarted meanwhile is asked again,
    /// under the same idempotency key.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn revoke(&self, asked: &RevokeRequest) -> Result<RevokeAnswer, ControlClientError> {
        self.change(Method::POST, "/v1/revocations", asked).await
    }

    /// What is revoked, and which authorities there are, when that is another version than `after`, these are others than
    /// `authorities` (fingerprints), or `wait` is over.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn revocations(
        &self,
        after: u64,
        authorities: &[String],
        wait: Duration,
    ) -> Result<FollowedIdentity, ControlClientError> {
        let (wait, authorities) = (wait.as_millis(), authorities.join(","));
        let path =
            format!("/v1/revocations?after={after}&wait_ms={wait}&authorities={authorities}");
        self.get(&path).await
    }
}

/// Learns what is revoked, and which certificate authorities there are, for as long as the process lives; `learned` is told of
/// revocations that are new, and may wait for files.
pub async fn follow(
    client: ControlClient,
    known: Revocations,
    authorities: watch::Sender<Vec<String>>,
    learned: impl Fn(&RevocationList) + Clone + Send + 'static,
) {
    loop {
        let (version, limit) = (known.list().version, FOLLOWED + AGAIN);
        let trusted = authorities.borrow().clone();
        let asked = client.revocations(version, &trusted, FOLLOWED);
        match tokio::time::timeout(limit, asked).await {
            Ok(Ok(FollowedIdentity { list, authorities: told })) => {
                let is_other = authorities.send_if_modified(|known| {
                    let is_other = *known != told;
                    *known = told;
                    is_other
                });
                if known.learn(&list, now()) {
                    let (version, revoked) = (list.version, list.revoked.len());
                    tracing::info!(version, revoked, "the list of revocations has changed");
                    let (learned, list) = (learned.clone(), known.list());
                    blocking(move || learned(&list)).await;
                } else if list.version <= version && !is_other {
                    // Whoever answered at once, though it has nothing new, is not asked without end.
                    tokio::time::sleep(AGAIN).await;
                }
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "what is revoked is not known");
                tokio::time::sleep(AGAIN).await;
            }
            Err(_) => {}
        }
    }
}

impl Service {
    /// The certificates that were given out and are not over.
    pub fn certificates(&self) -> Vec<Certificate> {
        self.register()
            .issued()
            .filter(|(it, _)| !it.is_over(now()))
            .map(Certificate::from)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_revoked_at_a_time() {
        let asked = |host: Option<&str>, user: Option<&str>, serial: Option<&str>| {
            let owned = |it: Option<&str>| it.map(str::to_owned);
            RevokeRequest { host: owned(host), user: owned(user), serial: owned(serial) }.what()
        };
        assert_eq!(asked(Some("beta"), None, None), Ok(Revoked::Host("beta".into())));
        assert_eq!(asked(None, Some("ann"), None), Ok(Revoked::User("ann".into())));
        assert!(matches!(asked(None, None, Some("41ab")), Ok(Revoked::Serial(_))));
        assert!(
            asked(None, Some("Ann Smith"), None).is_err() && asked(None, Some(""), None).is_err()
        );
        assert!(asked(None, None, None).is_err() && asked(None, None, Some("beta")).is_err());
        assert!(asked(Some("beta"), Some("ann"), None).is_err());
    }
}
