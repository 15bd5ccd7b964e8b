//! A control plane that is one of several: they share a store, etcd, and one of them leads.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_control::authorities::{self, ControlPlanesSource, KnownAuthorities};
use rackbus_control::etcd::{Blocking, Cluster, EtcdEndpoint, KvError};
use rackbus_control::leaders::Leaders;
use rackbus_control::leadership::candidate::Candidate;
use rackbus_control::leadership::election::Member;
use rackbus_control::leadership::serving::{ControlPlane, OpenService};
use rackbus_control::leadership::shared::{self, SharedError, SharedShelf};
use rackbus_control::leadership::{self, Tenure};
use rackbus_control::machines::{self, Joining};
use rackbus_control::register::AuthoritySet;
use rackbus_control::service::OpenError;
use rackbus_control::store::{self, Keys};
use rackbus_control::{ControlClient, Service, ServiceOptions, certificates};
use rackbus_fabric::rack::Rack;
use rackbus_identity::rustls::pki_types::pem::PemObject;
use rackbus_identity::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rackbus_identity::rustls::version::TLS13;
use rackbus_identity::rustls::{ClientConfig, RootCertStore};
use rackbus_identity::{CertificateAuthority, Revocations, Tokens, now};
use tokio::sync::watch;

use crate::output::Failure;
use crate::process;

/// How long etcd may take to answer when the control plane is started.
const FIRST_ANSWER: Duration = Duration::from_secs(15);
/// How long a request to etcd may take, where it decides something.
const PATIENCE: Duration = Duration::from_secs(1);

/// How the store of several control planes is reached.
#[derive(Debug, Clone, clap::Args)]
pub struct EtcdArgs {
    /// The members of the etcd cluster: `https://e1:2379,https://e2:2379`.
    #[arg(long = "etcd", value_name = "URL,…", value_delimiter = ',')]
    pub members: Vec<EtcdEndpoint>,
    /// The certificate authority that they are known by (PEM).
    #[arg(long = "etcd-ca", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The certificate that is shown to them (PEM).
    #[arg(long = "etcd-cert", value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// The key of that certificate, as a PEM file.
    #[arg(long = "etcd-key", value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// Where the rack's keys are; `/rackbus/RACK` unless named.
    #[arg(long = "etcd-prefix", value_name = "PREFIX")]
    prefix: Option<String>,
}

impl EtcdArgs {
    /// The cluster that is named.
    pub fn cluster(&self) -> Result<Cluster, Failure> {
        let remedy =
            "name its members with --etcd https://HOST:2379,… and their authority with --etcd-ca";
        if self.members.is_empty() {
            return Err(Failure::usage("etcd has no members", remedy));
        }
        let tls = self.ca.as_deref().map(|ca| self.tls(ca)).transpose()?;
        Cluster::new(self.members.clone(), tls)
            .map_err(|error| Failure::usage(error.to_string(), remedy))
    }

    /// The same, of these members.
    pub fn with_members(&self, members: &[EtcdEndpoint]) -> EtcdArgs {
        EtcdArgs { members: members.to_vec(), ..self.clone() }
    }

    /// Whether it is said where the keys are, whatever the rack's name.
    pub fn has_prefix(&self) -> bool {
        self.prefix.is_some()
    }

    /// Where the keys of a rack are.
    pub fn keys(&self, rack: &str) -> Keys {
        Keys::of(rack, self.prefix.as_deref())
    }

    fn tls(&self, ca: &Path) -> Result<Arc<ClientConfig>, Failure> {
        let unusable = |path: &Path, error: &dyn std::fmt::Display| {
            let error = format!("{}: {error}", path.display());
            Failure::usage(error, "name files with certificates and a key in PEM")
        };
        let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, Failure> {
            let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
            all.map_err(|error| unusable(path, &error))
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            roots.add(root).map_err(|error| unusable(ca, &error))?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(
            rackbus_identity::rustls::crypto::ring::default_provider(),
        ))
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| unusable(ca, &error))?
        .with_root_certificates(roots);
        let config = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let secret =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, &error))?;
                let shown = config.with_client_auth_cert(certificates(cert)?, secret);
                shown.map_err(|error| unusable(cert, &error))?
            }
            _ => config.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }
}

/// Where control planes are, as `HOST:PORT`.
fn addresses_of(members: &[Member]) -> Vec<String> {
    members.iter().map(|it| it.url.trim_start_matches("https://").to_owned()).collect()
}

/// Tells at once of the authorities that are stored by who leads, while it does.
async fn tell_authorities(
    mut stored: watch::Receiver<Option<AuthoritySet>>,
    known: watch::Sender<Option<AuthoritySet>>,
    tenure: Arc<Tenure>,
) {
    loop {
        leadership::authorities::tell(&known, stored.borrow_and_update().clone());
        tokio::select! {
            changed = stored.changed() => if changed.is_err() { return },
            () = tenure.ended() => return,
        }
    }
}

/// Where it is told, and heard, which authorities there are.
type AuthoritiesChannel =
    (watch::Sender<Option<AuthoritySet>>, watch::Receiver<Option<AuthoritySet>>);

/// What one of several control planes is started with.
pub struct ClusterOptions<'a> {
    pub rack: &'a Rack,
    /// The rack file's text.
    pub text: String,
    pub options: ServiceOptions,
    pub cluster: Cluster,
    pub keys: Keys,
    pub ttl: u64,
    pub state_dir: &'a Path,
    pub socket: PathBuf,
    pub listen: SocketAddr,
    pub advertise: Option<String>,
    pub metrics: Option<SocketAddr>,
}

impl ClusterOptions<'_> {
    /// Serves until the process is asked to end.
    pub async fn serve(self) -> Result<(), Failure> {
        let hosts = super::certified_hosts(self.rack)?;
        let authority = self.authority().await?;
        let failed = |error: String| Failure::new(error, "see to the cause, and start again");
        let known = KnownAuthorities::new(&authority).map_err(|error| failed(error.to_string()))?;
        let known = Arc::new(known);
        let (told, stored) = self.stored_authorities().await?;
        let credentials = super::own_credentials(&known, stored.borrow().as_ref())?;
        tokio::spawn(authorities::renew(known.clone(), stored, credentials.clone()));
        let member = self.member()?;
        let listener = super::listen_at(self.listen).await?;
        let (stop, stopped) = watch::channel(false);
        let ClusterOptions { cluster, keys, options, text, .. } = &self;
        let candidate = Candidate {
            cluster: cluster.clone(),
            keys: keys.clone(),
            member: member.clone(),
            ttl: self.ttl,
        };
        let (runtime, url) = (tokio::runtime::Handle::current(), member.url.clone());
        let (cluster, keys, options, text) =
            (cluster.clone(), keys.clone(), options.clone(), text.clone());
        let revocations = Revocations::default();
        let revoked = revocations.clone();
        let candidacy = candidate.start(stopped);
        let members = candidacy.members.clone();
        let source = ControlPlanesSource {
            addresses: Arc::new(move || addresses_of(&members.borrow().members)),
            tls: machines::tls_of(&credentials.asking),
        };
        let open: OpenService = Box::new(move |tenure| {
            let _entered = runtime.enter();
            let kv = || Box::new(Blocking::new(cluster.client(PATIENCE)));
            let store = store::Etcd::new(kv(), keys.clone(), tenure.clone());
            let begins = format!("the control plane at {url} leads, in term {}", tenure.term());
            let service = Service::begin(options.clone(), Box::new(store), begins)?;
            service.revocations().tell(&revoked, now());
            let unusable = |error: &dyn std::fmt::Display| {
                OpenError::Store(store::StoreError::Other(error.to_string()))
            };
            let bundle = known.bundle(service.authorities().borrow().as_ref());
            let bundle = bundle.map_err(|error| unusable(&error))?;
            tokio::spawn(tell_authorities(service.authorities(), told.clone(), tenure.clone()));
            let shelf = SharedShelf::new(kv(), keys.clone(), tenure);
            let tokens = Tokens::on(Box::new(shelf), bundle.fingerprint());
            let joining = Joining::new(known.clone(), tokens, hosts.clone(), text.clone())
                .with_control_planes(source.clone());
            let routes = machines::all_routes(service.clone(), Arc::new(joining));
            Ok((service, routes))
        });
        let tls = machines::tls_of(&credentials.asking);
        // Whoever leads says what is revoked, this one or another.
        let own = member.url.trim_start_matches("https://").to_owned();
        let leaders = Arc::new(Leaders::new([own], tls.clone()));
        // It reads them from the store.
        let unheard = watch::Sender::default();
        let following =
            certificates::follow(ControlClient::of(leaders), revocations.clone(), unheard, |_| {});
        tokio::spawn(following);
        let front = ControlPlane::start(&self.rack.name, member, candidacy, tls, open);
        let (counted, serving) = (front.clone(), credentials.serving);
        let scraped = super::scraped(Arc::new(move || counted.metrics()), self.metrics);
        let served = machines::serve(front.routes(), &self.socket, listener, serving, revocations);
        let outcome = tokio::select! {
            outcome = scraped => outcome,
            outcome = served => outcome.map_err(|error| failed(error.to_string())),
            never = process::ready_at(&self.socket) => match never {},
            () = process::asked_to_end() => Ok(()),
        };
        // Another one leads at once instead of waiting for this one's lease to end.
        stop.send_replace(true);
        drop(tokio::time::timeout(PATIENCE, front.resigned()).await);
        outcome
    }

    /// The rack's authority: etcd has it, or gets the one of the state directory, or a new one.
    async fn authority(&self) -> Result<CertificateAuthority, Failure> {
        let folder = self.state_dir.join("identity");
        let own = CertificateAuthority::load(&folder);
        let own = own.map_err(|e| Failure::new(e.to_string(), "see to the state directory"))?;
        let mut etcd = self.cluster.client(PATIENCE);
        let (begun, mut waits) = (Instant::now(), false);
        loop {
            let found =
                shared::authority(&mut etcd, &self.keys, &self.rack.name, own.as_ref()).await;
            match found {
                Ok(authority) => return Ok(authority),
                Err(SharedError::Etcd(error @ (KvError::Unreachable(_) | KvError::Unknown(_))))
                    if begun.elapsed() < FIRST_ANSWER =>
                {
                    if !std::mem::replace(&mut waits, true) {
                        tracing::warn!(%error, "waiting for etcd");
                    }
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                Err(error) => {
                    let remedy = match error {
                        SharedError::Etcd(_) => {
                            "see that etcd runs, that its members are named right, and that they take the certificate"
                        }
                        _ => "see to what is named",
                    };
                    return Err(Failure::new(error.to_string(), remedy));
                }
            }
        }
    }

    /// The authorities that took the place of the first one, now and later, and where others tell of them.
    async fn stored_authorities(&self) -> Result<AuthoritiesChannel, Failure> {
        let mut etcd = self.cluster.client(PATIENCE);
        let stored = leadership::authorities::read(&mut etcd, &self.keys).await;
        let stored = stored.map_err(|error| Failure::new(error.to_string(), "start it again"))?;
        // Before they are read again: that ends when nobody listens.
        let (told, known) = watch::channel(stored);
        tokio::spawn(leadership::authorities::follow(etcd, self.keys.clone(), told.clone()));
        Ok((told, known))
    }

    /// This process as the others know it.
    fn member(&self) -> Result<Member, Failure> {
        let url = match &self.advertise {
            Some(address) => format!("https://{}", address.trim_start_matches("https://")),
            None if self.listen.ip().is_unspecified() => {
                return Err(Failure::usage(
                    format!("where the others reach {} is not known", self.listen),
                    "name it with --advertise HOST:PORT, or listen at an address of this machine",
                ));
            }
            None => format!("https://{}", self.listen),
        };
        let begun = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let begun = begun.unwrap_or_default().as_nanos();
        let pid = std::process::id();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Member { id: format!("{begun:x}-{pid:x}"), url, version, pid })
    }
}
