//! The official JSON gateway of an etcd cluster (version 3.4 or newer): its members, one after the other, over HTTP
//! or TLS.
//!
//! A connection is kept while it works; with the member that does not answer, the next one is asked. Each request
//! is answered within its time or fails.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rackbus_identity::rustls::pki_types::ServerName;
use rackbus_identity::rustls::{CertificateError, ClientConfig, Error as TlsError};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::json::{done, encode, key_values, number, revision, txn_json};
use super::{EtcdLease, KeyPage, KeyRange, Kv, KvError, TransactionResult, Txn};

/// How long a member may take to be connected to, of several.
const CONNECT: Duration = Duration::from_millis(700);
/// Bytes of the longest answer that is taken.
const LONGEST: usize = 16 << 20;
/// Before something that failed is tried again.
const PAUSE: Duration = Duration::from_millis(50);

/// Where a member listens for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    host: String,
    port: u16,
    tls: bool,
}

/// Why a cluster is not usable as it is named.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// It is no URL of a member.
    #[error("{0} is no address of etcd: name its members as `https://HOST:PORT`")]
    Url(String),
    /// Everything would go over the network in clear, the key of the rack's certificate authority among it.
    #[error(
        "{0} is on another machine and speaks no TLS; only `https://` keeps the rack's keys to itself"
    )]
    Clear(String),
    /// It cannot be known whether it is the right one.
    #[error(
        "members at https:// take the certificate authority that they are known by (--etcd-ca)"
    )]
    Authority,
}

impl std::str::FromStr for EtcdEndpoint {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<EtcdEndpoint, ClusterError> {
        let wrong = || ClusterError::Url(text.to_owned());
        let (scheme, rest) = text.trim().split_once("://").ok_or_else(wrong)?;
        let tls = match scheme {
            "https" => true,
            "http" => false,
            _ => return Err(wrong()),
        };
        let (host, port) = rest.trim_end_matches('/').rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() || host.contains('/') {
            return Err(wrong());
        }
        let own = host.parse::<IpAddr>().map_or(host == "localhost", |it| it.is_loopback());
        match tls || own {
            true => Ok(EtcdEndpoint { host, port, tls }),
            false => Err(ClusterError::Clear(text.to_owned())),
        }
    }
}

impl std::fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

/// The members of a cluster, and how they are spoken to.
#[derive(Debug, Clone)]
pub struct Cluster {
    endpoints: Vec<EtcdEndpoint>,
    tls: Option<Arc<ClientConfig>>,
}

impl Cluster {
    /// The cluster with these members; with TLS for those at `https://`.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn new(
        endpoints: Vec<EtcdEndpoint>,
        tls: Option<Arc<ClientConfig>>,
    ) -> Result<Cluster, ClusterError> {
        match endpoints.iter().any(|it| it.tls) && tls.is_none() {
            true => Err(ClusterError::Authority),
            false => Ok(Cluster { endpoints, tls }),
        }
    }

    /// A client, whose requests take at most `patience` each.
    pub fn client(&self, patience: Duration) -> EtcdClient {
        EtcdClient { cluster: self.clone(), at: 0, open: None, patience }
    }

    /// Where its members are.
    pub fn endpoints(&self) -> &[EtcdEndpoint] {
        &self.endpoints
    }
}

/// A connection: what asks on it, and what ends with it, and says why.
#[derive(Debug)]
struct Open {
    sender: http1::SendRequest<Full<Bytes>>,
    ended: JoinHandle<hyper::Result<()>>,
}

impl Open {
    /// Sends a request; what fails says why the connection ended, where it did.
    async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<hyper::Response<Incoming>, KvError> {
        match self.sender.send_request(request).await {
            Ok(response) => Ok(response),
            Err(error) => {
                let ended = tokio::time::timeout(PAUSE, &mut self.ended).await;
                let error = match ended {
                    Ok(Ok(Err(cause))) => cause,
                    _ => error,
                };
                Err(KvError::Unknown(causes(&error)))
            }
        }
    }
}

/// An error with all that it comes from.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}

/// A client of a cluster: one request at a time.
#[derive(Debug)]
pub struct EtcdClient {
    cluster: Cluster,
    /// Which member is asked.
    at: usize,
    open: Option<Open>,
    patience: Duration,
}

impl EtcdClient {
    /// Carries out a transaction.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn txn(&mut self, txn: &Txn) -> Result<TransactionResult, KvError> {
        txn.check_size().map_err(KvError::Refused)?;
        let answer = self.call("/v3/kv/txn", &txn_json(txn)).await?;
        done(&answer)
    }

    /// Reads keys, as the whole cluster has them.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn range(&mut self, range: &KeyRange) -> Result<KeyPage, KvError> {
        let asked = json!({
            "key": encode(&range.from),
            "range_end": encode(&range.to),
            "revision": range.revision.to_string(),
            "limit": range.limit.to_string(),
        });
        let answer = self.call("/v3/kv/range", &asked).await?;
        let more = answer["more"].as_bool().unwrap_or(false);
        Ok(KeyPage { values: key_values(&answer)?, revision: revision(&answer), more })
    }

    /// Grants a lease of so many seconds; its number, and the seconds that it really has.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn grant(&mut self, seconds: u64) -> Result<(EtcdLease, u64), KvError> {
        let answer = self.call("/v3/lease/grant", &json!({ "TTL": seconds.to_string() })).await?;
        let (lease, time) = (number(&answer["ID"]), number(&answer["TTL"]));
        match lease > 0 && time > 0 {
            true => Ok((lease, time.unsigned_abs())),
            false => Err(KvError::Unknown("it has granted no lease".to_owned())),
        }
    }

    /// Renews a lease; for how many seconds. `None`: it has ended.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn renew(&mut self, lease: EtcdLease) -> Result<Option<u64>, KvError> {
        let answer = self.call("/v3/lease/keepalive", &json!({ "ID": lease.to_string() })).await?;
        let time = number(&answer["result"]["TTL"]);
        Ok((time > 0).then_some(time.unsigned_abs()))
    }

    /// Ends a lease; with it go the keys that are bound to it.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn revoke(&mut self, lease: EtcdLease) -> Result<(), KvError> {
        match self.call("/v3/lease/revoke", &json!({ "ID": lease.to_string() })).await {
            Ok(_) | Err(KvError::Gone(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The version, and the bytes that its database has, of the member that is asked now.
    ///
    /// # Errors
    /// [`KvError`].
    pub async fn health(&mut self) -> Result<(String, u64), KvError> {
        let answer = self.call("/v3/maintenance/status", &json!({})).await?;
        let version = answer["version"].as_str().unwrap_or_default().to_owned();
        // Alarms: the database is full or corrupt, or the member has no leader.
        let errors = answer["errors"].as_array().map(Vec::as_slice).unwrap_or_default();
        if let Some(error) = errors.first().and_then(Value::as_str) {
            return Err(KvError::Refused(error.to_owned()));
        }
        Ok((version, number(&answer["dbSize"]).unsigned_abs()))
    }

    /// Asks a member; the next one where that does not answer. What was sent is not sent again.
    async fn call(&mut self, path: &str, asked: &Value) -> Result<Value, KvError> {
        let body = Bytes::from(asked.to_string());
        let outcome = tokio::time::timeout(self.patience, self.exchange(path, body)).await;
        let outcome = outcome.unwrap_or_else(|_| {
            Err(KvError::Unknown(format!("{} takes too long", self.cluster.endpoints[self.at])))
        });
        if matches!(
            outcome,
            Err(KvError::NotTrusted(_) | KvError::Unknown(_) | KvError::Unreachable(_))
        ) {
            self.open = None;
            self.at = (self.at + 1) % self.cluster.endpoints.len();
        }
        outcome
    }

    async fn exchange(&mut self, path: &str, body: Bytes) -> Result<Value, KvError> {
        let unknown = |error: &dyn std::fmt::Display| KvError::Unknown(error.to_string());
        let open = self.connected().await?;
        let request = Request::post(path)
            .header("host", "etcd")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| KvError::Refused(error.to_string()))?;
        let response = open.send(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LONGEST).collect().await;
        let bytes = body.map_err(|error| unknown(&error))?.to_bytes();
        let answer: Value = serde_json::from_slice(&bytes).map_err(|error| unknown(&error))?;
        let error = if answer["error"].is_object() { &answer["error"] } else { &answer };
        let code = error["code"].as_i64().or(error["grpc_code"].as_i64()).unwrap_or(0);
        if status.is_success() && code == 0 {
            return Ok(answer);
        }
        let text = error["message"].as_str().or(error["error"].as_str());
        let text = text.unwrap_or("it does not say why").to_owned();
        Err(match code {
            // NOT_FOUND.
            5 => KvError::Gone(text),
            // INVALID_ARGUMENT, PERMISSION_DENIED, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, OUT_OF_RANGE,
            // UNIMPLEMENTED, UNAUTHENTICATED: decided before anything is changed.
            3 | 7 | 8 | 9 | 11 | 12 | 16 => KvError::Refused(text),
            // Among them "request timed out": it may be carried out yet.
            _ => KvError::Unknown(text),
        })
    }

    /// A connection: the one that is open, or one to the first member that can be reached.
    async fn connected(&mut self) -> Result<&mut Open, KvError> {
        let usable = match &mut self.open {
            Some(open) => open.sender.ready().await.is_ok(),
            None => false,
        };
        if !usable {
            self.open = None;
            let members = self.cluster.endpoints.len();
            let (mut failed, mut refused) = ("it has no members".to_owned(), 0);
            for _ in 0..members {
                let member = &self.cluster.endpoints[self.at];
                match tokio::time::timeout(CONNECT, connect(&self.cluster, member)).await {
                    Ok(Ok(open)) => {
                        self.open = Some(open);
                        break;
                    }
                    Ok(Err(error @ NotConnected::NotTrusted(_))) => {
                        refused += 1;
                        failed = format!("{member}: {error}");
                    }
                    // A certificate that is refused says more than others that do not answer.
                    _ if refused > 0 => {}
                    Ok(Err(error)) => failed = format!("{member}: {error}"),
                    Err(_) => failed = format!("{member} takes too long"),
                }
                self.at = (self.at + 1) % members;
            }
            if self.open.is_none() {
                // Of members that do not answer it is not known which certificate they have.
                return Err(match refused > 0 && refused == members {
                    true => KvError::NotTrusted(failed),
                    false => KvError::Unreachable(failed),
                });
            }
        }
        self.open.as_mut().ok_or_else(|| KvError::Unreachable("no connection".to_owned()))
    }
}

/// Why there is no connection to a member.
#[derive(Debug, thiserror::Error)]
enum NotConnected {
    /// Its certificate is refused, with the reason.
    #[error("{0}")]
    NotTrusted(String),
    #[error(transparent)]
    Failed(#[from] std::io::Error),
}

async fn connect(cluster: &Cluster, member: &EtcdEndpoint) -> Result<Open, NotConnected> {
    let socket = TcpStream::connect((member.host.as_str(), member.port)).await?;
    socket.set_nodelay(true)?;
    match cluster.tls.as_ref().filter(|_| member.tls) {
        None => Ok(begin(TokioIo::new(socket)).await?),
        Some(tls) => {
            let name = ServerName::try_from(member.host.clone())
                .map_err(|_| std::io::Error::other("it has a name that no certificate can have"))?;
            let connected = TlsConnector::from(tls.clone()).connect(name, socket).await;
            Ok(begin(TokioIo::new(connected.map_err(not_trusted)?)).await?)
        }
    }
}

/// Says of a member whose certificate is refused what is wrong with it, in the words of who named it.
fn not_trusted(error: std::io::Error) -> NotConnected {
    let cause = error.get_ref().and_then(|it| it.downcast_ref::<TlsError>());
    let wrong = match cause {
        // Of another authority, which may have the same name.
        Some(TlsError::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => "its certificate is not of the authority that --etcd-ca names",
        Some(TlsError::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        )) => "its certificate does not name the host by which it is named here",
        _ => return NotConnected::Failed(error),
    };
    NotConnected::NotTrusted(format!("{wrong} ({error})"))
}

async fn begin(
    stream: impl hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static,
) -> std::io::Result<Open> {
    let (sender, connection) = http1::handshake(stream).await.map_err(std::io::Error::other)?;
    Ok(Open { sender, ended: tokio::spawn(connection) })
}

/// A client for a thread that may wait; what it asks is done by the runtime's threads. It waits for each answer
/// before it asks again, so that there is a place for one question and never a second one.
#[derive(Debug)]
pub struct Blocking {
    asked: tokio::sync::mpsc::Sender<EtcdRequest>,
}

#[derive(Debug)]
enum EtcdRequest {
    Txn(Txn, mpsc::SyncSender<Result<TransactionResult, KvError>>),
    Range(KeyRange, mpsc::SyncSender<Result<KeyPage, KvError>>),
}

impl Blocking {
    /// On the runtime that this is called on.
    pub fn new(mut etcd: EtcdClient) -> Blocking {
        let (asked, mut inbox) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(asked) = inbox.recv().await {
                match asked {
                    EtcdRequest::Txn(txn, answer) => drop(answer.send(etcd.txn(&txn).await)),
                    EtcdRequest::Range(range, answer) => {
                        drop(answer.send(etcd.range(&range).await))
                    }
                }
            }
        });
        Blocking { asked }
    }

    fn ask<T>(
        &mut self,
        ask: impl FnOnce(mpsc::SyncSender<Result<T, KvError>>) -> EtcdRequest,
    ) -> Result<T, KvError> {
        let gone = || KvError::Unknown("the process ends".to_owned());
        let (answer, answered) = mpsc::sync_channel(1);
        // The place is free, as the last question was taken before it was answered.
        self.asked.try_send(ask(answer)).map_err(|_| gone())?;
        answered.recv().map_err(|_| gone())?
    }
}

impl Kv for Blocking {
    fn txn(&mut self, txn: &Txn) -> Result<TransactionResult, KvError> {
        self.ask(|answer| EtcdRequest::Txn(txn.clone(), answer))
    }

    fn range(&mut self, range: &KeyRange) -> Result<KeyPage, KvError> {
        self.ask(|answer| EtcdRequest::Range(range.clone(), answer))
    }

    fn pause(&mut self) {
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_named_by_url_and_only_this_machines_without_tls() {
        for good in
            ["https://e1:2379", "http://127.0.0.1:2379", "http://[::1]:2379", "http://localhost:1"]
        {
            assert_eq!(good.parse::<EtcdEndpoint>().unwrap().to_string(), good);
        }
        assert_eq!(
            "https://e1:2379/".parse::<EtcdEndpoint>().unwrap().to_string(),
            "https://e1:2379"
        );
        for bad in [
            "e1:2379",
            "https://e1",
            "https://:2379",
            "ftp://e1:1",
            "https://e1:0",
            "https://a/b:1",
        ] {
            assert!(matches!(bad.parse::<EtcdEndpoint>(), Err(ClusterError::Url(_))), "{bad}");
        }
        let clear = "http://10.0.0.1:2379".parse::<EtcdEndpoint>();
        assert!(matches!(clear, Err(ClusterError::Clear(_))));
        let tls = "https://e1:2379".parse().unwrap();
        assert_eq!(Cluster::new(vec![tls], None).unwrap_err(), ClusterError::Authority);
    }
}
