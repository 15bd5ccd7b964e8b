//! People: how they get in with a token, and what they are told of themselves.
//!
//! An administrator makes a token for somebody, with a role; whoever has it exchanges it for a certificate that names
//! both, and is known by that from then on. The certificate is good for some days, and renewed by the command line when
//! it is used.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, State};
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::Method;
use rackbus_identity::{Bearer, PERSON_LIFE, Person, Role, Subject, Token};
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};

use crate::access::{ApiPeer, RequestOrigin};
use crate::api::{ApiError, EventKind};
use crate::client::{ControlClient, ControlClientError};
use crate::events::Draft;
use crate::http::key;
use crate::machines::{
    Certificates, LONGEST_TOKEN, NewToken, RackAdmission, SHORTEST_PERSON_LIFE, certificate_life,
};
use crate::service::{Service, problem};

/// Asks for a token for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UserTokenRequest {
    /// By which name the rack is to know them: lower-case letters, digits and `-`.
    pub user: String,
    /// What they may: `administrator`, `operator`, `borrower` or `reader`.
    pub role: String,
    /// The host that a borrower borrows for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// For how many seconds the token is good.
    pub seconds: u64,
    /// For how many seconds their certificates are good; a week unless named, thirty days at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life_seconds: Option<u64>,
}

/// A person wants to be known.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct LoginRequest {
    /// The token that was made for them.
    pub token: String,
    /// What asks for their certificate (PKCS #10, in PEM).
    pub request: String,
}

/// Who asks, as the control plane knows them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// Name of the rack.
    pub rack: String,
    /// What they may: see the events.
    #[serde(flatten)]
    pub asker: RequestOrigin,
}

impl UserTokenRequest {
    /// Who is to have the token, and for how long their certificates are good.
    fn person(&self) -> Result<(Person, Duration), ApiError> {
        let bad = |error: String, remedy: &str| problem("bad_request", error, remedy);
        let role = Role::named(&self.role, self.host.as_deref())
            .map_err(|error| bad(error.to_string(), "see `rackbus token --help`"))?;
        let person = Person { user: self.user.clone(), role };
        if !Subject::Person(person.clone()).is_valid() {
            let error = format!("no certificate can name {:?}", self.user);
            return Err(bad(error, "name users with lower-case letters, digits and `-`"));
        }
        Ok((person, certificate_life(self.life_seconds, SHORTEST_PERSON_LIFE, PERSON_LIFE)?))
    }
}

type Shared = State<Arc<RackAdmission>>;

/// Makes a token with which a person logs in once. Where the rack has several machines; for administrators.
///
/// Who repeats the request with the same `Idempotency-Key` gets another token in the place of the first, which lets
/// nobody in any more.
#[utoipa::path(post, path = "/v1/users/tokens", request_body = UserTokenRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = NewToken), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn user_token(
    State(admission): Shared,
    headers: HeaderMap,
    Json(asked): Json<UserTokenRequest>,
) -> Result<Json<NewToken>, ApiError> {
    let (person, life) = asked.person()?;
    if let Some(host) = &asked.host {
        admission.check_host(host)?;
    }
    let text = format!("a token was made for {}, {}", person.user, person.role);
    let time = Duration::from_secs(asked.seconds).min(LONGEST_TOKEN);
    let token = admission.make_token(Bearer::Person(person, life), time, key(&headers)?).await?;
    admission.note(Draft::of_host(EventKind::Access, asked.host.as_deref(), text)).await;
    Ok(Json(token))
}

/// A person logs in.
///
/// The same token with the same certificate request is good again for some minutes, for whoever got no answer.
#[utoipa::path(post, path = "/v1/login", request_body = LoginRequest,
    responses((status = 200, body = Certificates), (status = 403, body = ApiError)))]
async fn login(
    State(admission): Shared,
    Json(asked): Json<LoginRequest>,
) -> Result<Json<Certificates>, ApiError> {
    let remedy = "ask an administrator for another: `rackbus token --user NAME --role ROLE`";
    let token: Token =
        asked.token.parse().map_err(|error| problem("bad_request", format!("{error}"), remedy))?;
    let of_person = |bearer: &Bearer| match bearer {
        Bearer::Person(person, life) => Ok((Subject::Person(person.clone()), *life)),
        Bearer::Host(host, _) => {
            let error = format!("the token is for host {host}");
            Err(problem("forbidden", error, "join with it: `rackbus node --join`"))
        }
    };
    let (subject, signed) = admission.admit(token, asked.request, remedy, of_person).await?;
    if let Subject::Person(person) = &subject {
        let text = format!("{} logged in as {}", person.user, person.role);
        let host = person.role.host();
        admission.note(Draft::of_host(EventKind::Access, host, text)).await;
    }
    Ok(Json(signed))
}

/// Who asks, as the control plane knows them.
#[utoipa::path(get, path = "/v1/whoami", responses((status = 200, body = WhoAmI)))]
async fn whoami(
    State(service): State<Arc<Service>>,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
) -> Json<WhoAmI> {
    Json(WhoAmI { rack: service.rack(), asker: peer.asker() })
}

/// What of the OpenAPI document is about people.
#[derive(OpenApi)]
#[openapi(
    paths(user_token, login, whoami),
    components(schemas(UserTokenRequest, LoginRequest, WhoAmI, RequestOrigin))
)]
pub(crate) struct Document;

/// How people get in.
pub(crate) fn routes() -> Router<Arc<RackAdmission>> {
    Router::new().route("/v1/users/tokens", post(user_token)).route("/v1/login", post(login))
}

/// What everybody is told of themselves, also where the whole rack runs on one machine.
pub(crate) fn own_routes() -> Router<Arc<Service>> {
    Router::new().route("/v1/whoami", get(whoami))
}

impl ControlClient {
    /// Makes a token with which a person logs in once.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn user_token(&self, asked: &UserTokenRequest) -> Result<String, ControlClientError> {
        let made: NewToken = self.change(Method::POST, "/v1/users/tokens", asked).await?;
        Ok(made.token)
    }

    /// Logs in, as who has no certificate yet; the certificates (PEM).
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn login(&self, asked: &LoginRequest) -> Result<String, ControlClientError> {
        let signed: Certificates = self.change(Method::POST, "/v1/login", asked).await?;
        Ok(signed.certificates)
    }

    /// Who asks, as the control plane knows them.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn whoami(&self) -> Result<WhoAmI, ControlClientError> {
        self.get("/v1/whoami").await
    }
}

#[cfg(test)]
mod tests {
    use rackbus_identity::LONGEST_LIFE;

    use super::*;

    fn asked(user: &str, role: &str, host: Option<&str>) -> UserTokenRequest {
        let (user, role, host) = (user.into(), role.into(), host.map(str::to_owned));
        UserTokenRequest { user, role, host, seconds: 60, life_seconds: None }
    }

    #[test]
    fn what_no_certificate_can_say_is_refused() {
        assert!(asked("ann", "borrower", Some("beta")).person().is_ok());
        for (user, role, host) in [
            ("Ann", "reader", None),
            ("a.operator", "reader", None),
            ("", "reader", None),
            ("ann", "root", None),
            ("ann", "borrower", None),
            ("ann", "operator", Some("beta")),
            ("ann", "borrower", Some("a.b")),
        ] {
            let refused = asked(user, role, host).person().unwrap_err();
            assert_eq!(refused.code, "bad_request", "{user} {role} {host:?}");
        }
        for life in [0, 4, LONGEST_LIFE.as_secs() + 1] {
            let request =
                UserTokenRequest { life_seconds: Some(life), ..asked("ann", "reader", None) };
            assert!(request.person().is_err(), "{life}");
        }
    }
}
