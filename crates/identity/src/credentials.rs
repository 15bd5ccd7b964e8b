//! What somebody of the rack shows and demands in TLS: a certificate, its key, and the rack's authority.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::authority::RACK;
use crate::servers::RackServerVerifier;
use crate::{Certified, Subject, fingerprint, hex, now};

/// Why credentials cannot be loaded or made.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read or written.
    #[error("{path}: {cause}")]
    File {
        /// The file that cannot be used.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// They are none of this rack's.
    #[error("the certificate is not usable: {0}")]
    Unusable(String),
}

fn unusable(what: impl std::fmt::Display) -> CredentialsError {
    CredentialsError::Unusable(what.to_string())
}

/// A new key, and what asks for a certificate for it.
#[derive(Debug)]
pub struct CertificateRequest {
    key: KeyPair,
    text: String,
}

impl CertificateRequest {
    /// Makes a new private key, and the request for its certificate.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new() -> Result<CertificateRequest, CredentialsError> {
        let key = KeyPair::generate().map_err(unusable)?;
        let params = CertificateParams::new(Vec::new()).map_err(unusable)?;
        let text = params.serialize_request(&key).and_then(|it| it.pem()).map_err(unusable)?;
        Ok(CertificateRequest { key, text })
    }

    /// The request as PKCS #10, in PEM.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The credentials, with the certificates (PEM) that the authority answered.
    ///
    /// # Errors
    /// When these are for another key, or nobody's.
    pub fn answered(self, certificates: &str) -> Result<Credentials, CredentialsError> {
        Credentials::of(certificates, &self.key.serialize_pem())
    }
}

/// A certificate of the rack with its key.
#[derive(Clone)]
pub struct Credentials {
    certified: Certified,
    /// The certificate and those of the authorities, in PEM, and the key.
    text: (String, String),
    /// The fingerprints of the authorities that are trusted, the one that made the certificate first.
    authorities: Vec<String>,
    /// One for each of these authorities.
    verifiers: Vec<Arc<dyn ClientCertVerifier>>,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    open_server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("certified", &self.certified).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Those in `folder`; `None` when there are none.
    ///
    /// # Errors
    /// [`CredentialsError`].
    pub fn load(folder: &Path) -> Result<Option<Credentials>, CredentialsError> {
        let read = |name: &str| match std::fs::read_to_string(folder.join(name)) {
            Ok(text) => Ok(Some(text)),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(CredentialsError::File { path: folder.join(name), cause }),
        };
        // One file for both, so that they belong together whenever this is read.
        let Some(text) = read(FILE)? else { return Ok(None) };
        Credentials::of(&text, &text).map(Some)
    }

    /// Writes them into `folder`, where nobody else can read them.
    ///
    /// # Errors
    /// [`CredentialsError::File`].
    pub fn save(&self, folder: &Path) -> Result<(), CredentialsError> {
        let path = folder.join(FILE);
        let (certificates, key) = &self.text;
        let written = write_private(&path, &format!("{certificates}{key}"));
        written.map_err(|cause| CredentialsError::File { path, cause })
    }

    fn of(certificates: &str, key: &str) -> Result<Credentials, CredentialsError> {
        let chain: Vec<CertificateDer<'static>> =
            CertificateDer::pem_slice_iter(certificates.as_bytes())
                .collect::<Result<_, _>>()
                .map_err(unusable)?;
        let [own, authority, others @ ..] = &chain[..] else {
            return Err(unusable("it is not one certificate with its authority's"));
        };
        if others.len() > MOST_OTHERS {
            return Err(unusable("a rack has not so many authorities"));
        }
        let certified = Certified::of(own).ok_or_else(|| unusable("it names nobody of a rack"))?;
        let mut roots = RootCertStore::empty();
        for trusted in [authority].into_iter().chain(others) {
            roots.add(trusted.clone()).map_err(unusable)?;
        }
        let authorities = chain[1..].iter().map(|it| hex(&fingerprint(it))).collect();
        // Whoever trusts another authority only has no use for that one's certificate.
        let shown = vec![own.clone(), authority.clone()];
        let roots = Arc::new(roots);
        let provider = Arc::new(default_provider());
        let servers = RackServerVerifier::new((authority, &certified.subject), others, &provider);
        let servers = servers.ok_or_else(|| unusable("an authority's is no certificate"))?;
        let secret = || PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(unusable);
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(servers))
            .with_client_auth_cert(shown.clone(), secret()?)
            .map_err(unusable)?;
        client.enable_secret_extraction = true;
        let verifier = |roots: Arc<RootCertStore>, open: bool| {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
            let verifier = if open { verifier.allow_unauthenticated() } else { verifier };
            verifier.build().map_err(unusable)
        };
        let server = |open: bool| {
            let mut config = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&TLS13])
                .map_err(unusable)?
                .with_client_cert_verifier(verifier(roots.clone(), open)?)
                .with_single_cert(shown.clone(), secret()?)
                .map_err(unusable)?;
            // A session that is taken up again is not verified again, and would outlive its certificate.
            config.send_tls13_tickets = 0;
            // For the kernel, which may go on with a connection of the link.
            config.enable_secret_extraction = true;
            Ok::<_, CredentialsError>(config)
        };
        let (open_server, server) = (Arc::new(server(true)?), Arc::new(server(false)?));
        let text = (certificates_of(certificates), key_of(key));
        let of_one = |authority: &CertificateDer<'static>| {
            let mut roots = RootCertStore::empty();
            roots.add(authority.clone()).map_err(unusable)?;
            verifier(Arc::new(roots), false)
        };
        let verifiers = chain[1..].iter().map(of_one).collect::<Result<_, _>>()?;
        let client = Arc::new(client);
        Ok(Credentials { certified, text, authorities, verifiers, client, server, open_server })
    }

    /// Whom they are of.
    pub fn subject(&self) -> &Subject {
        &self.certified.subject
    }

    /// What the certificate says.
    pub fn certified(&self) -> &Certified {
        &self.certified
    }

    /// The fingerprints of the authorities that they trust, the one that made the certificate first.
    pub fn authorities(&self) -> &[String] {
        &self.authorities
    }

    /// Whether they are what would be given out now by a rack with the authorities of these fingerprints, the one that makes
    /// certificates first. Where none is named, that is not known, and they are.
    pub fn are_of(&self, authorities: &[String]) -> bool {
        let trusted = |it: &String| self.authorities.contains(it);
        authorities.first().is_none_or(|first| {
            self.authorities.first() == Some(first)
                && self.authorities.len() == authorities.len()
                && authorities.iter().all(trusted)
        })
    }

    /// Whether somebody would be let in now who shows this chain, by its certificates alone.
    pub fn let_in(&self, chain: &[CertificateDer<'_>]) -> bool {
        self.issuer_of(chain).is_some()
    }

    /// The fingerprint of the authority that made the certificate at the begin of this chain, whatever is shown behind it; nothing
    /// where none of those did that are trusted, or the certificate is over.
    pub fn issuer_of(&self, chain: &[CertificateDer<'_>]) -> Option<String> {
        let (own, others) = chain.split_first()?;
        let made = |it: &Arc<dyn ClientCertVerifier>| {
            it.verify_client_cert(own, others, UnixTime::now()).is_ok()
        };
        let at = self.verifiers.iter().position(made)?;
        self.authorities.get(at).cloned()
    }

    /// The name of the rack, as its authority has it; nothing where that has none.
    pub fn rack(&self) -> Option<String> {
        let own = CertificateDer::pem_slice_iter(self.text.0.as_bytes()).next()?.ok()?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&own).ok()?;
        let name = parsed.issuer().iter_common_name().next()?.as_str().ok()?;
        name.strip_prefix(RACK).map(str::to_owned)
    }

    /// For connecting to others of the rack.
    pub fn client(&self) -> &Arc<ClientConfig> {
        &self.client
    }

    /// For being connected to by others of the rack, and nobody else.
    pub fn server(&self) -> &Arc<ServerConfig> {
        &self.server
    }

    /// For being connected to by others of the rack, and by those who have no certificate yet.
    pub fn open_server(&self) -> &Arc<ServerConfig> {
        &self.open_server
    }

    /// Whether they are of no more use: their time is over.
    pub fn is_over(&self) -> bool {
        self.certified.is_over(now())
    }

    /// Whether they are to be renewed by now.
    pub fn is_due(&self) -> bool {
        self.certified.is_due(now())
    }
}

/// Authorities that are trusted beside the one that made a certificate, at most: that which is to come or that which was.
const MOST_OTHERS: usize = 4;
/// The file with a certificate, those of the authorities, and the key.
const FILE: &str = "identity.pem";

/// The parts of a PEM text between lines of this kind.
fn part(text: &str, is_part: impl Fn(&str) -> bool) -> String {
    let (mut inside, mut out) = (false, String::new());
    for line in text.lines() {
        inside |= line.starts_with("-----BEGIN") && is_part(line);
        if inside {
            out += line;
            out.push('\n');
        }
        inside &= !line.starts_with("-----END");
    }
    out
}

fn certificates_of(text: &str) -> String {
    part(text, |line| line.contains("CERTIFICATE"))
}

fn key_of(text: &str) -> String {
    part(text, |line| line.contains("PRIVATE KEY"))
}

/// Writes a file that only its owner can read, in one step.
///
/// # Errors
/// What the system says; a file that was there is as before then.
pub fn write_private(path: &Path, text: &str) -> io::Result<()> {
    write(path, text, 0o600)
}

pub(crate) fn write_public(path: &Path, text: &str) -> io::Result<()> {
    write(path, text, 0o644)
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    // Another process, or thread, may write the same file now: each has its own until it is whole.
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nth = COUNT.fetch_add(1, Ordering::Relaxed);
    let new = path.with_extension(format!("{}-{nth}.new", std::process::id()));
    // One of a process that had the same number and ended half way.
    let _ = std::fs::remove_file(&new);
    let mut file = std::fs::File::options().write(true).create_new(true).mode(mode).open(&new)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if let Err(error) = written.and_then(|()| std::fs::rename(&new, path)) {
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    // The name, too, is to be there after a loss of power.
    path.parent().map_or(Ok(()), |folder| std::fs::File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_say_of_which_rack_they_are() {
        let authority = crate::CertificateAuthority::generate("lab two").unwrap();
        let credentials = authority.issue(&Subject::Node("beta".to_owned())).unwrap();
        assert_eq!(credentials.rack().as_deref(), Some("lab two"));
    }

    #[test]
    fn a_file_that_several_write_at_once_is_one_of_them_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.pem");
        let texts: Vec<String> = ["a", "b", "c", "d"].map(|it| it.repeat(1000)).into();
        std::thread::scope(|scope| {
            for text in &texts {
                scope.spawn(|| (0..20).for_each(|_| write_private(&path, text).unwrap()));
            }
        });
        assert!(texts.contains(&std::fs::read_to_string(&path).unwrap()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }
}
