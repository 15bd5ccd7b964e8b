//! The control planes of a rack, seen from outside: finds the one that leads, and finds the next one when that is gone.
//!
//! Who does not lead answers with [`LEADER`] where it knows who does. Whoever says so has shown a certificate of the
//! rack's control plane, and so does whoever is named.

mod kept;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, StatusCode};
use rackbus_identity::rustls::ClientConfig;

use kept::{Asker, KeptConnections};

use crate::client::{ControlClientError, speak};
use crate::machines;
use crate::service::problem;
use crate::versions::{self, VERSIONS};

/// The header in which a control plane that does not lead names the one that does.
pub const LEADER: &str = "rackbus-leader";
/// What a request carries that may be repeated.
pub(crate) const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// How long a leader is looked for: longer than it takes until there is a new one.
const FINDING: Duration = Duration::from_secs(10);
/// How long is waited when no control plane leads, before all of them are asked again.
const BETWEEN: Duration = Duration::from_millis(200);
/// How long one of several may take to be connected to.
const CONNECT: Duration = Duration::from_millis(1000);
/// How often is looked whether one of several that has not answered yet takes connections, and how many looks in a row may
/// be in vain.
const LOOKED_AFTER: Duration = Duration::from_secs(2);
const IN_VAIN: u32 = 2;
/// Control planes that are known at a time.
const MOST: usize = 16;
/// Bytes of the longest request that is passed on.
const LONGEST: usize = 2 << 20;

/// Shows who asks, and demands who answers; certificates are renewed while it is used.
pub type TlsSource = Arc<dyn Fn() -> Arc<ClientConfig> + Send + Sync>;

/// The control planes of a rack.
pub struct Leaders {
    tls: TlsSource,
    known: Mutex<KnownControlPlanes>,
    kept: KeptConnections,
}

#[derive(Debug, Default)]
struct KnownControlPlanes {
    /// The addresses that are tried, each `HOST:PORT`.
    addresses: Vec<String>,
    /// The one that led last.
    at: usize,
    /// It was said who leads: there are several, also where one address is known.
    was_told: bool,
}

impl std::fmt::Debug for Leaders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaders").field("known", &self.known).finish_non_exhaustive()
    }
}

/// A request that can be sent to one after the other.
#[derive(Debug, Clone)]
pub struct RepeatableRequest {
    /// The HTTP method, such as `POST`.
    pub method: Method,
    /// Path and query of the request: `/v1/leases?all=true`.
    pub path: String,
    /// The idempotency key of a request that changes something.
    pub key: Option<HeaderValue>,
    /// The body, as JSON.
    pub body: Bytes,
}

impl RepeatableRequest {
    pub(crate) fn request(self) -> Result<hyper::Request<Full<Bytes>>, ControlClientError> {
        let mut request = hyper::Request::builder()
            .method(self.method)
            .uri(self.path)
            .header("host", "rackbus")
            .header(versions::HEADER, VERSIONS.to_string())
            .header("content-type", "application/json");
        if let Some(key) = self.key {
            request = request.header(IDEMPOTENCY_KEY, key);
        }
        let request = request.body(Full::new(self.body));
        request.map_err(|cause| ControlClientError::Answer(cause.to_string()))
    }
}

impl Leaders {
    /// Those at these addresses (`HOST:PORT`), the likeliest leader first.
    pub fn new(addresses: impl IntoIterator<Item = String>, tls: TlsSource) -> Leaders {
        let (known, kept) = (Mutex::default(), KeptConnections::default());
        let leaders = Leaders { tls, known, kept };
        leaders.learn(addresses);
        leaders
    }

    fn known(&self) -> MutexGuard<'_, KnownControlPlanes> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The addresses that are known.
    pub fn addresses(&self) -> Vec<String> {
        self.known().addresses.clone()
    }

    /// There are these, too.
    pub fn learn(&self, addresses: impl IntoIterator<Item = String>) {
        let mut known = self.known();
        for address in addresses {
            if !known.addresses.contains(&address) {
                if known.addresses.len() >= MOST {
                    known.addresses.remove(0);
                    known.at = 0;
                }
                known.addresses.push(address);
            }
        }
    }

    fn place(&self) -> PathBuf {
        self.addresses().join(", ").into()
    }

    /// Which one is asked first, and how many there are.
    fn first(&self) -> (String, usize) {
        let known = self.known();
        (known.addresses.get(known.at).cloned().unwrap_or_default(), known.addresses.len())
    }

    /// `address` is not the one.
    fn pass(&self, address: &str, leader: Option<&str>) {
        if let Some(leader) = leader {
            self.learn([leader.to_owned()]);
        }
        let mut known = self.known();
        let named = known.addresses.iter().position(|it| Some(it.as_str()) == leader);
        let is_first = known.addresses.get(known.at).is_some_and(|it| it == address);
        match named.filter(|_| leader != Some(address)) {
            Some(named) => known.at = named,
            // Somebody else may have found another meanwhile.
            None if is_first => known.at = (known.at + 1) % known.addresses.len().max(1),
            None => {}
        }
    }

    /// This one leads, as far as it is known.
    pub fn lead_by(&self, address: &str) {
        self.learn([address.to_owned()]);
        let mut known = self.known();
        known.was_told = true;
        if let Some(at) = known.addresses.iter().position(|it| it == address) {
            known.at = at;
        }
    }

    /// Asks the leader, wherever it is.
    ///
    /// # Errors
    /// [`ControlClientError`], when none is found, or the one that was asked is gone before it answered.
    pub async fn send(
        &self,
        asked: &RepeatableRequest,
    ) -> Result<hyper::Response<Incoming>, ControlClientError> {
        let begun = Instant::now();
        let mut tried = 0;
        loop {
            let (address, all) = self.first();
            let shown = (self.tls)();
            if let Some(mut asker) = self.kept.take(&address, &shown, all) {
                let answer = asker.send_request(asked.clone().request()?);
                match self.answered(&address, all, &shown, answer).await {
                    Ok(response) if response.status() != StatusCode::MISDIRECTED_REQUEST => {
                        self.kept.keep(address, shown, asker);
                        return Ok(response);
                    }
                    // It is asked again below, and says who leads.
                    Ok(_) => {}
                    // The other side ended the connection before it heard this, or this changes nothing.
                    Err(ControlClientError::Broken(error))
                        if error.is_canceled() || asked.method == Method::GET => {}
                    // It may have been carried out: whoever asks has to know.
                    Err(error) => {
                        self.pass(&address, None);
                        return Err(error);
                    }
                }
            }
            tried += 1;
            let round_is_over = tried % all.max(1) == 0;
            match self.open(&address, all, shown.clone()).await {
                Ok(mut sender) => {
                    let answer = sender.send_request(asked.clone().request()?);
                    let response = self.answered(&address, all, &shown, answer).await;
                    let response = response.inspect_err(|_| self.pass(&address, None))?;
                    if response.status() != StatusCode::MISDIRECTED_REQUEST {
                        self.kept.keep(address, shown, sender);
                        return Ok(response);
                    }
                    let leader = response.headers().get(LEADER).and_then(|it| it.to_str().ok());
                    let leader = leader.and_then(|url| url.strip_prefix("https://"));
                    self.pass(&address, leader);
                    if begun.elapsed() > FINDING {
                        return Ok(response);
                    }
                }
                Err(cause) => {
                    self.pass(&address, None);
                    if all < 2 || begun.elapsed() > FINDING {
                        let cause = std::io::Error::new(cause.kind(), cause.to_string());
                        return Err(ControlClientError::Unreachable { place: self.place(), cause });
                    }
                }
            }
            if round_is_over {
                tokio::time::sleep(BETWEEN).await;
            }
        }
    }

    /// What is answered, however long that takes, while whoever is asked lives: of several, one whose process stands still
    /// takes requests and no new connections, and another one leads by then.
    async fn answered(
        &self,
        address: &str,
        all: usize,
        shown: &Arc<ClientConfig>,
        answer: impl Future<Output = hyper::Result<hyper::Response<Incoming>>>,
    ) -> Result<hyper::Response<Incoming>, ControlClientError> {
        let all = if self.known().was_told { all.max(2) } else { all };
        let stands_still = async {
            if all < 2 {
                // Nobody else could answer.
                return std::future::pending().await;
            }
            let mut in_vain = 0;
            while in_vain < IN_VAIN {
                tokio::time::sleep(LOOKED_AFTER).await;
                let opened = self.open(address, all, shown.clone()).await;
                in_vain = if opened.is_ok() { 0 } else { in_vain + 1 };
            }
        };
        tokio::select! {
            biased;
            answered = answer => Ok(answered?),
            () = stands_still => Err(ControlClientError::Silent { place: address.into() }),
        }
    }

    async fn open(
        &self,
        address: &str,
        all: usize,
        shown: Arc<ClientConfig>,
    ) -> std::io::Result<Asker> {
        let opened = async {
            let stream = machines::connect(address, shown).await?;
            speak(stream).await.map_err(std::io::Error::other)
        };
        match all {
            0 | 1 => opened.await,
            _ => tokio::time::timeout(CONNECT, opened)
                .await
                .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())),
        }
    }

    /// Passes a request on to the leader, and its answer back.
    pub async fn pass_on(&self, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let body = match http_body_util::Limited::new(body, LONGEST).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => {
                let remedy = "send less at once";
                return problem("bad_request", error.to_string(), remedy).into_response();
            }
        };
        let path = parts.uri.path_and_query().map_or("/", |it| it.as_str()).to_owned();
        let key = parts.headers.get(IDEMPOTENCY_KEY).cloned();
        let asked = RepeatableRequest { method: parts.method, path, key, body };
        match self.send(&asked).await {
            Ok(answer) => {
                let (parts, body) = answer.into_parts();
                let mut response = Response::new(Body::new(body));
                *response.status_mut() = parts.status;
                for name in [header::CONTENT_TYPE.as_str(), LEADER, versions::HEADER] {
                    if let Some(value) = parts.headers.get(name) {
                        let name = header::HeaderName::from_static(name);
                        response.headers_mut().insert(name, value.clone());
                    }
                }
                response
            }
            Err(error) => {
                tracing::debug!(%error, "a request was not passed on");
                let remedy =
                    "see that the machines of the control plane are up and reached from here";
                // It may have been carried out: whoever has a key asks again.
                let code = if error.is_lost() { "ending" } else { "unreachable" };
                problem(code, error.to_string(), remedy).into_response()
            }
        }
    }

    /// Routes that pass everything on.
    pub fn routes(self: Arc<Self>) -> Router {
        let pass_on = async |State(leaders): State<Arc<Leaders>>, request: Request| {
            leaders.pass_on(request).await
        };
        Router::new().fallback(pass_on).with_state(self)
    }
}
