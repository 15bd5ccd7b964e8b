#![forbid(unsafe_code)]
//! Who is who between the machines of a rack.
//!
//! A rack has a certificate authority of its own, made by its control plane ([`Authority`]). Whoever belongs to
//! the rack has a certificate of it that names what it is ([`Subject`]), and shows that in TLS 1.3 to all others
//! ([`Credentials`]). A host gets its first one for a [token](Token), which is good once and for a limited time.

mod authority;
mod credentials;
mod join;
mod token;

use std::fmt;

use rustls::pki_types::{CertificateDer, ServerName};

pub use authority::{Authority, AuthorityError};
pub use credentials::{Credentials, CredentialsError, Request, write_private};
pub use join::joining_config;
pub use rustls;
pub use token::{BadToken, Shelf, Token, TokenRefused, Tokens};

/// Credentials that are renewed while they are used.
pub type Renewed = std::sync::Arc<std::sync::RwLock<Credentials>>;

/// What a certificate of the rack names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A control plane of the rack.
    Control,
    /// The node of this host.
    Node(String),
}

/// Ends the names of nodes.
const NODE: &str = ".node.rackbus";
/// The name of the control plane.
const CONTROL: &str = "control.rackbus";

impl Subject {
    /// The subject that `certificate` names: one, and none but by its name for DNS. Whether the certificate is
    /// of this rack has been looked at.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Subject> {
        let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
        let mut names = certificate.valid_dns_names();
        let name = names.next()?;
        let subject = match name.strip_suffix(NODE) {
            Some(host) if !host.is_empty() => Subject::Node(host.to_owned()),
            _ if name == CONTROL => Subject::Control,
            _ => return None,
        };
        names.next().is_none().then_some(subject)
    }

    /// The name by which others connect to it; `None` where it is not [valid](Subject::is_valid).
    pub fn server_name(&self) -> Option<ServerName<'static>> {
        ServerName::try_from(self.to_string()).ok().filter(|_| self.is_valid())
    }

    /// Whether a certificate can name it: a host's name is a label of a DNS name.
    pub fn is_valid(&self) -> bool {
        match self {
            Subject::Control => true,
            Subject::Node(host) => {
                let plain =
                    |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
                let ends = !host.starts_with('-') && !host.ends_with('-');
                (1..=63).contains(&host.len()) && ends && host.bytes().all(plain)
            }
        }
    }
}

/// The name in the certificate: `alpha.node.rackbus`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Control => f.write_str(CONTROL),
            Subject::Node(host) => write!(f, "{host}{NODE}"),
        }
    }
}

/// Bytes that nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut bytes).expect("the system has random numbers");
    bytes
}

/// The fingerprint of a certificate: SHA-256 of its DER encoding.
fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(certificate).into()
}

/// As hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes written as hexadecimal digits; `None` when these are not `N`.
fn of_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}
