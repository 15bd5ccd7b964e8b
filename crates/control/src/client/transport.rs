//! Requests over HTTP: to this machine each on a connection of its own, to others on one that is kept. One whose answer was
//! lost is repeated: what changes something with the same key, and what only reads.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use super::lines::JsonLines;
use super::{ControlClient, ControlClientError, To};
use crate::api::ApiError;
use crate::leaders::RepeatableRequest;
use crate::versions::{VERSIONS, check_answer};

/// How long a request whose answer was lost is repeated.
pub(crate) const REPEATED: Duration = Duration::from_secs(10);
/// How long is waited before it is repeated.
const BEFORE_REPEATING: Duration = Duration::from_millis(100);

impl ControlClient {
    /// An idempotency key that no other request has: 128 bits, seeded by the system.
    pub fn new_key() -> String {
        let random =
            || RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()));
        format!("{:016x}{:016x}", random(), random())
    }

    pub(super) async fn stream<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<JsonLines<T>, ControlClientError> {
        let response = self.request(Method::GET, path, &(), None).await?;
        Ok(JsonLines::new(checked(response).await?))
    }

    /// A request that changes something. It carries a key, so that one whose answer was lost may be
    /// repeated.
    pub(crate) async fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ControlClientError> {
        self.change_as(method, path, body, &ControlClient::new_key()).await
    }

    /// The same, with a key that the caller may use again.
    pub(super) async fn change_as<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: &str,
    ) -> Result<T, ControlClientError> {
        self.repeat(method, path, body, Some(key)).await
    }

    /// Asks again while the answer is lost: what only reads, or carries a key.
    pub(super) async fn repeat<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: Option<&str>,
    ) -> Result<T, ControlClientError> {
        let (mut sent, mut lost_since) = (false, None);
        loop {
            let asked = Instant::now();
            let outcome = self.ask(method.clone(), path, body, key).await;
            let lost = match &outcome {
                Err(error) if error.is_lost() => true,
                Err(ControlClientError::Refused(refused)) => refused.code == "ending",
                // It was there before, and is on its way back.
                Err(ControlClientError::Unreachable { .. }) => sent,
                _ => false,
            };
            // A request that was under way for long was lost just now; one that found no control plane was lost before.
            let nobody = matches!(outcome, Err(ControlClientError::Unreachable { .. }));
            let since = lost_since.filter(|_| nobody || asked.elapsed() < REPEATED);
            let since = *lost_since.insert(since.unwrap_or_else(Instant::now));
            if !lost || since.elapsed() > REPEATED {
                return outcome;
            }
            sent = true;
            tokio::time::sleep(BEFORE_REPEATING).await;
        }
    }

    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ControlClientError> {
        self.ask(method, path, body, None).await
    }

    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: Option<&str>,
    ) -> Result<T, ControlClientError> {
        let response = checked(self.request(method, path, body, key).await?).await?;
        let bytes = response.into_body().collect().await?.to_bytes();
        serde_json::from_slice(&bytes)
            .map_err(|cause| ControlClientError::Answer(cause.to_string()))
    }

    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        key: Option<&str>,
    ) -> Result<Response<Incoming>, ControlClientError> {
        let text = serde_json::to_vec(body)
            .map_err(|cause| ControlClientError::Answer(cause.to_string()))?;
        let key = key.map(HeaderValue::from_str).transpose();
        let key = key.map_err(|cause| ControlClientError::Answer(cause.to_string()))?;
        let asked =
            RepeatableRequest { method, path: path.to_owned(), key, body: Bytes::from(text) };
        let answered = match &self.to {
            To::Machines(leaders) => leaders.send(&asked).await?,
            To::Socket(place) => {
                let unreachable =
                    |cause| ControlClientError::Unreachable { place: place.clone(), cause };
                let stream = UnixStream::connect(place).await.map_err(unreachable)?;
                speak(stream).await?.send_request(asked.request()?).await?
            }
        };
        check_answer(VERSIONS, answered.headers()).map_err(ControlClientError::Version)?;
        Ok(answered)
    }
}

/// Begins HTTP on a connection.
pub(crate) async fn speak(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<http1::SendRequest<Full<Bytes>>, ControlClientError> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Percent-encodes what may not stand in a query.
pub(super) fn escape(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    text.bytes()
        .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// The response, unless it is an error.
pub(super) async fn checked(
    response: Response<Incoming>,
) -> Result<Response<Incoming>, ControlClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let bytes = response.into_body().collect().await?.to_bytes();
    match serde_json::from_slice::<ApiError>(&bytes) {
        Ok(error) => Err(ControlClientError::Refused(error)),
        Err(_) if status == StatusCode::NOT_FOUND => {
            Err(ControlClientError::Answer("it does not know this request".to_owned()))
        }
        Err(_) => Err(ControlClientError::Answer(format!(
            "{status}: {}",
            String::from_utf8_lossy(&bytes)
        ))),
    }
}
