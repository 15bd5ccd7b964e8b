//! The API's client: what the command line and the nodes use.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rackbus_identity::rustls::ClientConfig;
use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use crate::api::{
    ApiError, BorrowRequest, Change, Device, Event, EventKind, Lease, NodeMessages, RackStatus,
};
use crate::compositions::{Composition, CompositionRequest, CompositionSpec};
use crate::leaders::{Asked, Leaders};
use crate::leadership::serving::ControlStatus;
use crate::levels::LevelRequest;
use crate::machines::{Certificates, JoinRequest, NewToken, RackFile, RenewRequest, TokenRequest};
use crate::network::{CaptureDone, CaptureRequest, NetworkStatus};
use crate::node::{NodeProcess, RestartRequest};
use crate::offers::{OfferRequest, RackSection};
use crate::reach::ReachedRange;
use crate::said::Said;
use crate::shares::{Share, ShareSpec};

/// How long a request whose answer was lost is repeated.
const REPEATED: Duration = Duration::from_secs(10);
/// How long is waited before it is repeated.
const BEFORE_REPEATING: Duration = Duration::from_millis(100);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens at the socket, or it is gone.
    #[error("the control plane does not answer at {}: {cause}", .place.display())]
    Unreachable {
        /// Where it should be: a socket's path, or an address.
        place: PathBuf,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The control plane refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The conversation broke off.
    #[error("the conversation with the control plane broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// The answer makes no sense.
    #[error("the control plane's answer makes no sense: {0}")]
    Answer(String),
}

/// A way to the control plane. Each request makes its own connection, so that a control plane
/// which was restarted is found again.
#[derive(Debug, Clone)]
pub struct Client {
    to: To,
}

/// Where the control plane is.
#[derive(Debug, Clone)]
enum To {
    /// It listens at this socket.
    Socket(PathBuf),
    /// It is one of several on whatever machines.
    Machines(Arc<Leaders>),
}

impl Client {
    /// A client of the control plane that listens at `socket`.
    pub fn new(socket: &Path) -> Self {
        Client { to: To::Socket(socket.to_owned()) }
    }

    /// A client of the control plane at `addresses` (each `HOST:PORT`), on whatever machines: of the one that leads.
    pub fn over_tls(addresses: &[String], tls: Arc<ClientConfig>) -> Self {
        let tls = Arc::new(move || tls.clone());
        Client::of(Arc::new(Leaders::new(addresses.iter().cloned(), tls)))
    }

    /// A client of whoever leads.
    pub fn of(leaders: Arc<Leaders>) -> Self {
        Client { to: To::Machines(leaders) }
    }

    /// The control plane itself: its processes, which of them leads, and its store.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn control(&self) -> Result<ControlStatus, ClientError> {
        self.get("/v1/control").await
    }

    /// The rack as a whole.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn status(&self) -> Result<RackStatus, ClientError> {
        self.get("/v1/status").await
    }

    /// The functions.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn devices(&self) -> Result<Vec<Device>, ClientError> {
        self.get("/v1/devices").await
    }

    /// The leases that are not over; with `all`, those that are, too.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leases(&self, all: bool) -> Result<Vec<Lease>, ClientError> {
        self.get(if all { "/v1/leases?all=true" } else { "/v1/leases" }).await
    }

    /// One lease.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn lease(&self, lease: u64) -> Result<Lease, ClientError> {
        self.get(&format!("/v1/leases/{lease}")).await
    }

    /// Borrows a function; answers when it can be used. A control plane that is restarted meanwhile
    /// is asked again; a request that waits does so at the end of its queue.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] names the holder.
    pub async fn borrow(&self, function: &str, borrower: &str) -> Result<Lease, ClientError> {
        self.borrow_as(&BorrowRequest::new(function, borrower)).await
    }

    /// The same, with all that can be asked for.
    ///
    /// # Errors
    /// As [`borrow`](Client::borrow).
    pub async fn borrow_as(&self, request: &BorrowRequest) -> Result<Lease, ClientError> {
        self.change(Method::POST, "/v1/leases", request).await
    }

    /// Returns a lease; answers when the function is offered again. A control plane that is restarted
    /// meanwhile is asked again.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn give_back(&self, lease: u64) -> Result<Lease, ClientError> {
        self.change(Method::DELETE, &format!("/v1/leases/{lease}"), &()).await
    }

    /// Changes the service level of a lease; answers when its lender has decided.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] says what would fit.
    pub async fn change_level(
        &self,
        lease: u64,
        level: Option<&str>,
    ) -> Result<Lease, ClientError> {
        let request = LevelRequest { level: level.map(str::to_owned) };
        self.change(Method::PUT, &format!("/v1/leases/{lease}/level"), &request).await
    }

    /// Those who take turns on functions.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn shares(&self) -> Result<Vec<Share>, ClientError> {
        self.get("/v1/shares").await
    }

    /// Takes turns on a function from now on. It is asked for once only: each time is another share.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn join_share(&self, spec: &ShareSpec) -> Result<Share, ClientError> {
        self.call(Method::POST, "/v1/shares", spec).await
    }

    /// Takes no more turns; as it was.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leave_share(&self, share: u64) -> Result<Share, ClientError> {
        self.call(Method::DELETE, &format!("/v1/shares/{share}"), &()).await
    }

    /// Gives a share's turn back early.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn give_turn_back(&self, share: u64) -> Result<Share, ClientError> {
        self.call(Method::POST, &format!("/v1/shares/{share}/yield"), &()).await
    }

    /// How a share stands, now and whenever that changes, until it is left.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn turns(&self, share: u64) -> Result<Lines<Share>, ClientError> {
        self.stream(&format!("/v1/shares/{share}/turns")).await
    }

    /// The compositions of the rack.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn compositions(&self) -> Result<Vec<Composition>, ClientError> {
        self.get("/v1/compositions").await
    }

    /// Saves a composition, to be borrowed by its name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn save_composition(
        &self,
        spec: &CompositionSpec,
    ) -> Result<Composition, ClientError> {
        self.change(Method::POST, "/v1/compositions", spec).await
    }

    /// Forgets a composition; as it was.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_composition(&self, name: &str) -> Result<Composition, ClientError> {
        self.call(Method::DELETE, &format!("/v1/compositions/{}", escape(name)), &()).await
    }

    /// The devices of the rack, each as a whole.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn sections(&self) -> Result<Vec<RackSection>, ClientError> {
        self.get("/v1/sections").await
    }

    /// Has a device join the running rack; answers when its functions can be borrowed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn offer(&self, request: &OfferRequest) -> Result<RackSection, ClientError> {
        self.change(Method::POST, "/v1/sections", request).await
    }

    /// Withdraws a device; with `force`, the leases of its functions are ended first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn withdraw(
        &self,
        host: &str,
        device: &str,
        force: bool,
    ) -> Result<RackSection, ClientError> {
        let path = format!("/v1/sections/{}/{}?force={force}", escape(host), escape(device));
        self.change(Method::DELETE, &path, &()).await
    }

    /// Borrows a composition, whole or not at all.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn borrow_composition(
        &self,
        name: &str,
        request: &CompositionRequest,
    ) -> Result<Composition, ClientError> {
        let path = format!("/v1/compositions/{}/borrow", escape(name));
        self.change(Method::POST, &path, request).await
    }

    /// Returns all that is borrowed of a composition.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn return_composition(&self, name: &str) -> Result<Composition, ClientError> {
        let path = format!("/v1/compositions/{}/return", escape(name));
        self.change(Method::POST, &path, &()).await
    }

    /// The way from a host or function to another.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn path(&self, from: &str, to: &str) -> Result<crate::api::Path, ClientError> {
        self.get(&format!("/v1/path?from={}&to={}", escape(from), escape(to))).await
    }

    /// What a function or host reaches now, of a node whose socket is the client's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn reach(&self, of: &str) -> Result<Vec<ReachedRange>, ClientError> {
        self.get(&format!("/v1/reach?of={}", escape(of))).await
    }

    /// The process of the node whose socket is the client's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn node_process(&self) -> Result<NodeProcess, ClientError> {
        self.get("/v1/process").await
    }

    /// Asks the node whose socket is the client's to be restarted in place. Where it is done, the
    /// connection breaks off.
    ///
    /// # Errors
    /// [`ClientError`]; always, as it is not answered otherwise.
    pub async fn restart_node(&self, request: &RestartRequest) -> Result<(), ClientError> {
        self.call(Method::POST, "/v1/restart", request).await
    }

    /// A node's part in the rack's network, asked of the node itself.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn network(&self) -> Result<NetworkStatus, ClientError> {
        self.get("/v1/network").await
    }

    /// Has the node make its host's interface, or take it away.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_network(&self, up: bool) -> Result<NetworkStatus, ClientError> {
        let path = if up { "/v1/network/up" } else { "/v1/network/down" };
        self.call(Method::POST, path, &()).await
    }

    /// Has the node capture frames; waits until that has ended, and ends it when dropped.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn capture(&self, request: &CaptureRequest) -> Result<CaptureDone, ClientError> {
        self.call(Method::POST, "/v1/network/capture", request).await
    }

    /// Makes a token with which `host` joins once within `time`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn token(&self, host: &str, time: Duration) -> Result<String, ClientError> {
        let asked = TokenRequest { host: host.to_owned(), seconds: time.as_secs() };
        let made: NewToken = self.call(Method::POST, "/v1/tokens", &asked).await?;
        Ok(made.token)
    }

    /// Joins the rack, as a host that has no certificate yet; the certificates (PEM).
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn join(&self, asked: &JoinRequest) -> Result<String, ClientError> {
        let signed: Certificates = self.call(Method::POST, "/v1/join", asked).await?;
        Ok(signed.certificates)
    }

    /// New certificates (PEM) for the node whose credentials the client has.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn renew(&self, request: &str) -> Result<String, ClientError> {
        let asked = RenewRequest { request: request.to_owned() };
        let signed: Certificates = self.call(Method::POST, "/v1/renew", &asked).await?;
        Ok(signed.certificates)
    }

    /// The rack file, of a rack of several machines.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn rack_file(&self) -> Result<String, ClientError> {
        let file: RackFile = self.get("/v1/rack").await?;
        Ok(file.text)
    }

    /// The OpenAPI document.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.get("/openapi.json").await
    }

    /// The metrics of the process that listens at the client's socket: the control plane's, or a
    /// node's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let response = checked(self.request(Method::GET, "/metrics", &(), None).await?).await?;
        let bytes = response.into_body().collect().await?.to_bytes();
        String::from_utf8(bytes.into()).map_err(|cause| ClientError::Answer(cause.to_string()))
    }

    /// A `GET` of any path whose answer is JSON.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.call(Method::GET, path, &()).await
    }

    /// A node says something.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn say(&self, host: &str, said: &NodeMessages) -> Result<(), ClientError> {
        let path = format!("/v1/hosts/{host}/messages");
        self.call(Method::POST, &path, said).await
    }

    /// What the control plane says to a node that knows of no later term than `term`, from now on.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn listen(&self, host: &str, term: u64) -> Result<Lines<Said>, ClientError> {
        let path = format!("/v1/hosts/{host}/messages?term={term}");
        self.stream(&path).await
    }

    /// What changes in the rack, from now on.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn changes(&self) -> Result<Lines<Change>, ClientError> {
        self.stream("/v1/changes").await
    }

    /// What happened, of one kind or of all; of these the last `most`, and with `follow` also what is
    /// still to happen.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn events(
        &self,
        kind: Option<EventKind>,
        most: Option<usize>,
        follow: bool,
    ) -> Result<Lines<Event>, ClientError> {
        let mut path = format!("/v1/events?follow={follow}");
        if let Some(kind) = kind {
            let word = serde_json::to_value(kind).unwrap_or_default();
            path += &format!("&kind={}", word.as_str().unwrap_or_default());
        }
        if let Some(most) = most {
            path += &format!("&most={most}");
        }
        self.stream(&path).await
    }

    async fn stream<T: DeserializeOwned>(&self, path: &str) -> Result<Lines<T>, ClientError> {
        let response = self.request(Method::GET, path, &(), None).await?;
        Ok(Lines::new(checked(response).await?))
    }

    /// A request that changes something. It carries a key, so that one whose answer was lost may be
    /// repeated.
    async fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let key = new_key();
        let (mut sent, mut lost_since) = (false, None);
        loop {
            let asked = Instant::now();
            let outcome = self.ask(method.clone(), path, body, Some(&key)).await;
            let lost = match &outcome {
                Err(ClientError::Broken(_)) => true,
                Err(ClientError::Refused(refused)) => refused.code == "ending",
                // It was there before, and is on its way back.
                Err(ClientError::Unreachable { .. }) => sent,
                _ => false,
            };
            // One that waited for long was lost just now.
            let since = lost_since.filter(|_| asked.elapsed() < REPEATED);
            let since = *lost_since.insert(since.unwrap_or_else(Instant::now));
            if !lost || since.elapsed() > REPEATED {
                return outcome;
            }
            sent = true;
            tokio::time::sleep(BEFORE_REPEATING).await;
        }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.ask(method, path, body, None).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: Option<&str>,
    ) -> Result<T, ClientError> {
        let response = checked(self.request(method, path, body, key).await?).await?;
        let bytes = response.into_body().collect().await?.to_bytes();
        serde_json::from_slice(&bytes).map_err(|cause| ClientError::Answer(cause.to_string()))
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: Option<&str>,
    ) -> Result<Response<Incoming>, ClientError> {
        let text =
            serde_json::to_vec(body).map_err(|cause| ClientError::Answer(cause.to_string()))?;
        let key = key.map(HeaderValue::from_str).transpose();
        let key = key.map_err(|cause| ClientError::Answer(cause.to_string()))?;
        let asked = Asked { method, path: path.to_owned(), key, body: Bytes::from(text) };
        match &self.to {
            To::Machines(leaders) => leaders.send(&asked).await,
            To::Socket(place) => {
                let unreachable = |cause| ClientError::Unreachable { place: place.clone(), cause };
                let stream = UnixStream::connect(place).await.map_err(unreachable)?;
                Ok(speak(stream).await?.send_request(asked.request()?).await?)
            }
        }
    }
}

/// Begins HTTP on a connection.
pub(crate) async fn speak(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<http1::SendRequest<Full<Bytes>>, ClientError> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// A key that no other request has: 128 bits, seeded by the system.
fn new_key() -> String {
    let random = || RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()));
    format!("{:016x}{:016x}", random(), random())
}

/// Percent-encodes what may not stand in a query.
fn escape(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    text.bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// The response, unless it is an error.
async fn checked(response: Response<Incoming>) -> Result<Response<Incoming>, ClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let bytes = response.into_body().collect().await?.to_bytes();
    match serde_json::from_slice::<ApiError>(&bytes) {
        Ok(error) => Err(ClientError::Refused(error)),
        Err(_) if status == StatusCode::NOT_FOUND => {
            Err(ClientError::Answer("it does not know this request".to_owned()))
        }
        Err(_) => {
            Err(ClientError::Answer(format!("{status}: {}", String::from_utf8_lossy(&bytes))))
        }
    }
}

/// A stream of JSON values, one a line.
#[derive(Debug)]
pub struct Lines<T> {
    body: Incoming,
    buffer: Vec<u8>,
    kind: std::marker::PhantomData<T>,
}

impl<T: DeserializeOwned> Lines<T> {
    fn new(response: Response<Incoming>) -> Self {
        Lines { body: response.into_body(), buffer: Vec::new(), kind: std::marker::PhantomData }
    }

    /// The next value; `None` when the stream has ended. A line that makes no sense is passed
    /// over (a newer control plane may say more than is known here).
    pub async fn next(&mut self) -> Option<T> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(value) => return Some(value),
                    Err(_) if line.len() <= 1 => continue,
                    Err(cause) => {
                        tracing::debug!(%cause, "a line of the stream makes no sense");
                        continue;
                    }
                }
            }
            let frame = self.body.frame().await?.ok()?;
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}
