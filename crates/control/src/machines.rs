//! The control plane for other machines: over TLS, and how hosts on them join.
//!
//! A host joins with a token and gets its certificate for it; from then on it is known by that. What its own
//! machine's tools ask at its socket is passed on ([`forward`]), so that they are the same everywhere. People get in
//! the same way ([`people`]).

mod admission;
pub(crate) mod counted;
mod listener;

use std::os::unix::net::UnixListener;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, State};
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum::{Json, Router};
use rackbus_identity::{Bearer, NODE_LIFE, Renewed, Revocations, Subject, Token, TokenRefused};
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsConnector, client};
use utoipa::{OpenApi, ToSchema};

pub use admission::Joining;
use admission::SHORTEST_NODE_LIFE;
pub(crate) use admission::{RackAdmission, SHORTEST_PERSON_LIFE, certificate_life};
use listener::{TlsListener, current, watch};

use crate::access::{self, ApiPeer};
use crate::api::{ApiError, EventKind};
use crate::events::Draft;
use crate::http::{OwnUsers, bare_routes, key, listen_at, serve_on};
use crate::leaders::{Leaders, TlsSource};
use crate::service::{Service, problem};
use crate::{authorities, certificates, people};

/// How long somebody may take to be known.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// How long a token is good at most.
pub(crate) const LONGEST_TOKEN: Duration = Duration::from_secs(7 * 24 * 3600);

/// Asks for a token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TokenRequest {
    /// The host that is to join with it.
    pub host: String,
    /// For how many seconds it is good.
    pub seconds: u64,
    /// For how many seconds the host's certificates are good; thirty days unless named, and at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life_seconds: Option<u64>,
}

/// A token. Whoever has it first is the host.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// As a host joins with it.
    pub token: String,
    /// For how many seconds the certificates of a host that joins with it are good. Control planes that do not know how to be
    /// asked for it do not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life_seconds: Option<u64>,
}

/// A host wants to join.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct JoinRequest {
    /// Its name in the rack.
    pub host: String,
    /// The token that was made for it.
    pub token: String,
    /// What asks for its certificate (PKCS #10, in PEM).
    pub request: String,
}

/// A node wants a new certificate.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RenewRequest {
    /// What asks for it (PKCS #10, in PEM).
    pub request: String,
}

/// A certificate and its authority's.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Certificates {
    /// The node's certificate and that of the authority, in PEM.
    pub certificates: String,
}

/// A rack file that a joined host reads, or that the rack is to follow.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RackFile {
    /// The file's text, in TOML.
    pub text: String,
}

type Shared = State<Arc<RackAdmission>>;

#[derive(OpenApi)]
#[openapi(
    paths(token, join, renew, rack),
    components(schemas(
        TokenRequest,
        NewToken,
        JoinRequest,
        RenewRequest,
        Certificates,
        RackFile
    ))
)]
pub(crate) struct Document;

/// Makes a token with which a host joins once. Where the rack has several machines; for administrators.
///
/// Who repeats the request with the same `Idempotency-Key` gets another token in the place of the first, which lets
/// nobody in any more.
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 128 visible ASCII characters, another for each request")),
    responses((status = 200, body = NewToken), (status = 400, body = ApiError), (status = 404, body = ApiError)))]
async fn token(
    State(admission): Shared,
    headers: HeaderMap,
    Json(asked): Json<TokenRequest>,
) -> Result<Json<NewToken>, ApiError> {
    admission.check_host(&asked.host)?;
    let life = certificate_life(asked.life_seconds, SHORTEST_NODE_LIFE, NODE_LIFE)?;
    let time = Duration::from_secs(asked.seconds).min(LONGEST_TOKEN);
    let bearer = Bearer::Host(asked.host.clone(), life);
    let made = admission.make_token(bearer, time, key(&headers)?).await?;
    let token = NewToken { life_seconds: Some(life.as_secs()), ..made };
    let text = format!("a token was made for host {}", asked.host);
    admission.note(Draft::of_host(EventKind::Access, Some(&asked.host), text)).await;
    Ok(Json(token))
}

/// Lets a machine join as a host: gives it a certificate for the token that it brings.
///
/// The same token with the same certificate request is good again for some minutes, for whoever got no answer.
#[utoipa::path(post, path = "/v1/join", request_body = JoinRequest,
    responses((status = 200, body = Certificates), (status = 403, body = ApiError)))]
async fn join(
    State(admission): Shared,
    Json(asked): Json<JoinRequest>,
) -> Result<Json<Certificates>, ApiError> {
    let JoinRequest { host, token, request } = asked;
    let remedy = "make another with `rackbus token` on the machine of the control plane";
    let token: Token =
        token.parse().map_err(|error| problem("bad_request", format!("{error}"), remedy))?;
    let joins = host.clone();
    let of_host = move |bearer: &Bearer| match bearer {
        Bearer::Host(host, life) if *host == joins => Ok((Subject::Node(host.clone()), *life)),
        other => Err(problem("forbidden", TokenRefused::Other(other.clone()).to_string(), remedy)),
    };
    let admitted = admission.admit(token, request, remedy, of_host).await;
    let (_, signed) = admitted.inspect_err(|error: &ApiError| {
        tracing::warn!(host, error = error.error, "a host was refused");
    })?;
    let text = format!("the machine of {host} has joined");
    admission.note(Draft::of_host(EventKind::Access, Some(&host), text)).await;
    Ok(Json(signed))
}

/// A node or a person gets a new certificate before their own is over.
#[utoipa::path(post, path = "/v1/renew", request_body = RenewRequest,
    responses((status = 200, body = Certificates), (status = 403, body = ApiError)))]
async fn renew(
    State(admission): Shared,
    ConnectInfo(peer): ConnectInfo<ApiPeer>,
    Json(asked): Json<RenewRequest>,
) -> Result<Json<Certificates>, ApiError> {
    let (subject, life, old) = match peer {
        ApiPeer::Node(host, Some(old)) => {
            // A host that the rack file has no more is not renewed.
            admission.check_host(&host)?;
            (Subject::Node(host), old.certified.life(), old)
        }
        ApiPeer::Person(person, old) => {
            person.role.host().map_or(Ok(()), |host| admission.check_host(host))?;
            (Subject::Person(person), old.certified.life(), old)
        }
        _ => {
            let error = "only who has joined or logged in has a certificate to renew".to_owned();
            return Err(problem("forbidden", error, "join with `rackbus node --join`"));
        }
    };
    admission.give(subject, life, &asked.request, Some(*old)).await.map(Json)
}

/// The rack file, for nodes on other machines.
#[utoipa::path(get, path = "/v1/rack", responses((status = 200, body = RackFile)))]
async fn rack(State(admission): Shared) -> Json<RackFile> {
    Json(RackFile { text: admission.joining.rack_file.clone() })
}

/// The API of a control plane for all machines.
pub fn all_routes(service: Arc<Service>, joining: Arc<Joining>) -> Router {
    let admission = RackAdmission { joining, service: service.clone() };
    let entering = Router::new()
        .route("/v1/tokens", post(token))
        .route("/v1/join", post(join))
        .route("/v1/renew", post(renew))
        .route("/v1/rack", get(rack))
        .merge(people::routes())
        .merge(certificates::routes())
        .merge(authorities::routes())
        .with_state(Arc::new(admission));
    let all = bare_routes(service.clone()).merge(entering);
    all.layer(axum::middleware::from_fn_with_state(service, access::check))
}

/// Serves `routes` at `socket` to this machine, and at `listener` to others, until the process ends.
///
/// # Errors
/// When the socket cannot be made, or fails.
pub async fn serve(
    routes: Router,
    socket: &FilePath,
    listener: TcpListener,
    credentials: Renewed,
    revocations: Revocations,
) -> std::io::Result<()> {
    let own = OwnUsers::new(listen_at(socket)?)?;
    let local = routes.clone().into_make_service_with_connect_info::<ApiPeer>();
    let others = routes.into_make_service_with_connect_info::<ApiPeer>();
    let listener = TlsListener::new(listener, credentials, revocations)?;
    tokio::try_join!(async { axum::serve(own, local).await }, async {
        axum::serve(listener, others).await
    },)?;
    Ok(())
}

/// Passes what processes of this machine ask at `listener`, which [`listen`](crate::node::listen) made, on to the control
/// plane that leads, until the process ends.
///
/// # Errors
/// When the socket fails.
pub async fn forward(listener: UnixListener, leaders: Arc<Leaders>) -> std::io::Result<()> {
    serve_on(leaders.routes(), tokio::net::UnixListener::from_std(listener)?).await
}

/// Shows and demands what the credentials have at that moment.
pub fn tls_of(credentials: &Renewed) -> TlsSource {
    let credentials = credentials.clone();
    Arc::new(move || current(&credentials).client().clone())
}

/// Connects to the control plane at `address`.
///
/// # Errors
/// When it does not answer, or is another.
pub(crate) async fn connect(
    address: &str,
    config: Arc<rackbus_identity::rustls::ClientConfig>,
) -> std::io::Result<client::TlsStream<TcpStream>> {
    let name = Subject::Control.server_name().ok_or(std::io::ErrorKind::InvalidInput)?;
    let connected = async {
        let socket = TcpStream::connect(address).await?;
        watch(&socket)?;
        TlsConnector::from(config).connect(name, socket).await
    };
    match tokio::time::timeout(HANDSHAKE, connected).await {
        Ok(connected) => connected,
        Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
    }
}
