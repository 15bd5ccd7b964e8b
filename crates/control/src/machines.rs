//! The control plane for other machines: over TLS, and how hosts on them join.
//!
//! A host joins with a token and gets its certificate for it; from then on it is known by that. What its own
//! machine's tools ask at its socket is passed on ([`forward`]), so that they are the same everywhere. People get in
//! the same way ([`people`]).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, State};
use axum::routing::{get, post};
use axum::serve::{IncomingStream, Listener};
use axum::{Json, Router};
use rackbus_identity::{
    Authority, Bearer, Certified, Credentials, NODE_LIFE, Renewed, Revocations, Revoked, Subject,
    Token, TokenRefused, Tokens,
};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use utoipa::{OpenApi, ToSchema};

use crate::access::{self, Peer};
use crate::api::{ApiError, EventKind};
use crate::events::Draft;
use crate::http::{OwnUsers, bare_routes, listen_at, serve_on};
use crate::leaders::{Leaders, TlsSource};
use crate::service::{Service, problem};
use crate::{certificates, people};

/// How long somebody may take to be known.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Connections of each host at a time, so that none takes those of others; and of the other control planes.
const CONNECTIONS: usize = 512;
/// Connections at a time of those who are not known yet.
const HANDSHAKES: usize = 256;
/// Connections at a time of those who have no certificate, each for so long at most: they come to join.
const STRANGERS: usize = 64;
const JOINING: Duration = Duration::from_secs(10);
/// How long a token is good at most.
pub(crate) const LONGEST_TOKEN: Duration = Duration::from_secs(7 * 24 * 3600);

/// What hosts join by.
#[derive(Debug)]
pub struct Joining {
    authority: Authority,
    tokens: Mutex<Tokens>,
    hosts: Vec<String>,
    rack_file: String,
}

impl Joining {
    /// For a rack of these hosts, which its file describes; with `authority`, and its tokens.
    pub fn new(
        authority: Authority,
        tokens: Tokens,
        hosts: Vec<String>,
        rack_file: String,
    ) -> Joining {
        Joining { authority, tokens: Mutex::new(tokens), hosts, rack_file }
    }

    fn tokens(&self) -> MutexGuard<'_, Tokens> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_host(&self, host: &str) -> Result<(), ApiError> {
        if self.hosts.iter().any(|known| known == host) {
            return Ok(());
        }
        let known = self.hosts.join(", ");
        Err(problem(
            "unknown_host",
            format!("the rack has no host {host}"),
            &format!("its hosts are {known}"),
        ))
    }

    fn sign(&self, certified: &Certified, request: &str) -> Result<Certificates, ApiError> {
        let refused = |error: rackbus_identity::AuthorityError| {
            let remedy = "join with `rackbus node --join`, or log in with `rackbus login`";
            problem("bad_request", error.to_string(), remedy)
        };
        let certificates = self.authority.sign(certified, request).map_err(refused)?;
        Ok(Certificates { certificates })
    }
}

/// Lets hosts and people in: what they are let in by, and where that is noted.
#[derive(Debug)]
pub(crate) struct Admission {
    joining: Arc<Joining>,
    service: Arc<Service>,
}

impl Admission {
    pub(crate) fn check_host(&self, host: &str) -> Result<(), ApiError> {
        self.joining.check_host(host)
    }

    /// Notes who was let in.
    pub(crate) async fn note(&self, event: Draft) {
        self.service.note(event).await;
    }

    /// A token for `bearer`, which is good for so long.
    pub(crate) async fn make_token(
        &self,
        bearer: Bearer,
        time: Duration,
    ) -> Result<NewToken, ApiError> {
        let joining = self.joining.clone();
        let made = blocking(move || joining.tokens().make(&bearer, time));
        let stored = |error: std::io::Error| {
            problem("not_stored", error.to_string(), "see to the state directory")
        };
        Ok(NewToken { token: made.await.map_err(stored)?.to_string() })
    }

    /// Certificates for who has `token`, which is used up by that. `subject` says of whom they are, and for how long.
    pub(crate) async fn admit(
        &self,
        token: Token,
        request: String,
        remedy: &'static str,
        subject: impl Fn(&Bearer) -> Result<(Subject, Duration), ApiError> + Send + 'static,
    ) -> Result<(Subject, Certificates), ApiError> {
        let refused = move |error: TokenRefused| problem("forbidden", error.to_string(), remedy);
        let (joining, shown) = (self.joining.clone(), token.clone());
        // Who has no token learns nothing.
        let bearer = blocking(move || joining.tokens().bearer(&shown)).await.map_err(refused)?;
        let (subject, life) = subject(&bearer)?;
        // What cannot be signed costs none.
        let signed = self.give(subject.clone(), life, &request, None).await?;
        let joining = self.joining.clone();
        // Of several that show it at once, one gets its certificate.
        blocking(move || joining.tokens().take(&token, &bearer)).await.map_err(refused)?;
        Ok((subject, signed))
    }

    /// Gives out a certificate; one that is renewed goes with the one that it is renewed by.
    async fn give(
        &self,
        subject: Subject,
        life: Duration,
        request: &str,
        old: Option<Certified>,
    ) -> Result<Certificates, ApiError> {
        let certified = self.service.draft_certificate(subject, life);
        let signed = self.joining.sign(&certified, request)?;
        self.service.issue_certificate(&certified, old).await?;
        Ok(signed)
    }

    /// Forgets the tokens of who is revoked; how many there were.
    pub(crate) async fn forget_tokens(&self, what: Revoked) -> Result<usize, ApiError> {
        let of = move |bearer: &Bearer| match (bearer, &what) {
            (Bearer::Host(host), Revoked::Host(revoked)) => host == revoked,
            (Bearer::Person(person, _), Revoked::User(revoked)) => person.user == *revoked,
            _ => false,
        };
        let joining = self.joining.clone();
        let forgotten = blocking(move || joining.tokens().forget(of)).await;
        forgotten.map_err(|error| {
            problem("not_stored", error.to_string(), "nothing was revoked; see to the store")
        })
    }

    pub(crate) fn service(&self) -> &Service {
        &self.service
    }
}

/// Asks for a token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// The host that is to join with it.
    pub host: String,
    /// For how many seconds it is good.
    pub seconds: u64,
}

/// A token. Whoever has it first is the host.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// As a host joins with it.
    pub token: String,
}

/// A host wants to join.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
pub struct RenewRequest {
    /// What asks for it (PKCS #10, in PEM).
    pub request: String,
}

/// A certificate and its authority's.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Certificates {
    /// In PEM.
    pub certificates: String,
}

/// The rack file.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RackFile {
    /// Its text.
    pub text: String,
}

type Shared = State<Arc<Admission>>;

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
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenRequest,
    responses((status = 200, body = NewToken), (status = 404, body = ApiError)))]
async fn token(
    State(admission): Shared,
    Json(asked): Json<TokenRequest>,
) -> Result<Json<NewToken>, ApiError> {
    admission.check_host(&asked.host)?;
    let time = Duration::from_secs(asked.seconds).min(LONGEST_TOKEN);
    let token = admission.make_token(Bearer::Host(asked.host.clone()), time).await?;
    let text = format!("a token was made for host {}", asked.host);
    admission.note(Draft::of_host(EventKind::Access, Some(&asked.host), text)).await;
    Ok(Json(token))
}

/// A host joins.
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
        Bearer::Host(host) if *host == joins => Ok((Subject::Node(host.clone()), NODE_LIFE)),
        other => Err(problem("forbidden", TokenRefused::Other(other.clone()).to_string(), remedy)),
    };
    let admitted = admission.admit(token, request, remedy, of_host).await;
    let (_, signed) = admitted.inspect_err(|error: &ApiError| {
        tracing::warn!(host, error = error.error, "a host was not let in");
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
    ConnectInfo(peer): ConnectInfo<Peer>,
    Json(asked): Json<RenewRequest>,
) -> Result<Json<Certificates>, ApiError> {
    let (subject, life, old) = match peer {
        Peer::Node(host, Some(old)) => {
            // A host that the rack file has no more is not renewed.
            admission.check_host(&host)?;
            (Subject::Node(host), NODE_LIFE, old)
        }
        Peer::Person(person, old) => {
            person.role.host().map_or(Ok(()), |host| admission.check_host(host))?;
            (Subject::Person(person), old.life(), old)
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

async fn blocking<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(job).await {
        Ok(done) => done,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}

/// The API of a control plane for all machines.
pub fn all_routes(service: Arc<Service>, joining: Arc<Joining>) -> Router {
    let admission = Admission { joining, service: service.clone() };
    let entering = Router::new()
        .route("/v1/tokens", post(token))
        .route("/v1/join", post(join))
        .route("/v1/renew", post(renew))
        .route("/v1/rack", get(rack))
        .merge(people::routes())
        .merge(certificates::routes())
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
    let local = routes.clone().into_make_service_with_connect_info::<Peer>();
    let others = routes.into_make_service_with_connect_info::<Peer>();
    let listener = TlsListener::new(listener, credentials, revocations)?;
    tokio::try_join!(async { axum::serve(own, local).await }, async {
        axum::serve(listener, others).await
    },)?;
    Ok(())
}

/// Accepts connections whose handshake is done: of each, nobody else waits for it.
struct TlsListener {
    ready: mpsc::Receiver<(Held, SocketAddr)>,
    local: SocketAddr,
}

/// A connection, and its place among all.
type Held = Counted<server::TlsStream<TcpStream>>;

impl TlsListener {
    fn new(
        listener: TcpListener,
        credentials: Renewed,
        revocations: Revocations,
    ) -> std::io::Result<TlsListener> {
        let local = listener.local_addr()?;
        let (begun, ready) = mpsc::channel(16);
        tokio::spawn(accept(listener, credentials, revocations, begun));
        Ok(TlsListener { ready, local })
    }
}

async fn accept(
    listener: TcpListener,
    credentials: Renewed,
    revocations: Revocations,
    begun: mpsc::Sender<(Held, SocketAddr)>,
) {
    let unknown = Arc::new(Semaphore::new(HANDSHAKES));
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    let places = Places { known: Arc::default(), strangers, revocations };
    loop {
        let (socket, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::error!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = unknown.clone().try_acquire_owned() else {
            tracing::warn!(%address, "a connection was refused: too many are not known yet");
            continue;
        };
        let config = current(&credentials).open_server().clone();
        let (begun, places) = (begun.clone(), places.clone());
        tokio::spawn(async move {
            let _place = place;
            if watch(&socket).is_err() {
                return;
            }
            let handshake = TlsAcceptor::from(config).accept(socket);
            match tokio::time::timeout(HANDSHAKE, handshake).await {
                Ok(Ok(stream)) => match places.take(stream) {
                    Some(counted) => drop(begun.send((counted, address)).await),
                    None => {
                        tracing::warn!(%address, "a connection was refused: there are too many")
                    }
                },
                Ok(Err(error)) => tracing::warn!(%address, %error, "a connection was refused"),
                Err(_) => tracing::warn!(%address, "a connection was refused: it said nothing"),
            }
        });
    }
}

/// Places for those who are known.
#[derive(Clone)]
struct Places {
    known: Arc<Mutex<BTreeMap<String, Arc<Semaphore>>>>,
    strangers: Arc<Semaphore>,
    revocations: Revocations,
}

impl Places {
    /// Gives `stream` one; `None` where all are taken. Who is revoked is a stranger.
    fn take(&self, stream: server::TlsStream<TcpStream>) -> Option<Held> {
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let stranger = |stream, is_revoked| {
            let place = self.strangers.clone().try_acquire_owned().ok()?;
            Some(Counted::stranger(stream, place, JOINING, is_revoked))
        };
        let Some(certified) = certificate.and_then(Certified::of) else {
            return stranger(stream, false);
        };
        let subject = certified.subject.to_string();
        let (end, ended) = tokio::sync::watch::channel(false);
        let watched = self.revocations.watch(certified, move || {
            end.send_replace(true);
        });
        let Ok(watched) = watched else { return stranger(stream, true) };
        // As many as there were ever certificates for; the other control planes are one of them.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let own = known.entry(subject).or_insert_with(|| Arc::new(Semaphore::new(CONNECTIONS)));
        let place = own.clone().try_acquire_owned().ok()?;
        Some(Counted::known(stream, place, watched, ended))
    }
}

/// Has a machine that is gone noticed, also by who only listens.
fn watch(socket: &TcpStream) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_tcp_user_timeout(socket, 5000)?;
    Ok(())
}

fn current(credentials: &Renewed) -> Credentials {
    credentials.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Listener for TlsListener {
    type Io = Held;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(ready) => ready,
            // Whoever accepts goes on for as long as this is there.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        Ok(self.local)
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        let (_, tls) = stream.io().get().get_ref();
        let certificate = tls.peer_certificates().and_then(|chain| chain.first());
        let Some(certified) = certificate.and_then(Certified::of) else { return Peer::Stranger };
        let certified = Box::new(certified);
        if stream.io().is_revoked() {
            return Peer::Revoked(certified);
        }
        match certified.subject.clone() {
            Subject::Node(host) => Peer::Node(host, Some(certified)),
            Subject::Person(person) => Peer::Person(person, certified),
            Subject::Control => Peer::Control,
        }
    }
}

/// Passes what processes of this machine ask at `socket` on to the control plane that leads, until the process ends.
///
/// # Errors
/// When the socket cannot be made, or fails.
pub async fn forward(socket: &FilePath, leaders: Arc<Leaders>) -> std::io::Result<()> {
    serve_on(leaders.routes(), tokio::net::UnixListener::from_std(listen_at(socket)?)?).await
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

mod counted;
use counted::Counted;
