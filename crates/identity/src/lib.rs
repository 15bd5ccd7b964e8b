#![forbid(unsafe_code)]
//! Who is who between the machines of a rack.
//!
//! A rack has a certificate authority of its own, made by its control plane ([`CertificateAuthority`]). Whoever belongs to
//! the rack has a certificate of it that names what it is ([`Subject`]), and shows that in TLS 1.3 to all others
//! ([`Credentials`]). Hosts and people get their first one for a [token](Token), which is good once and for a limited
//! time.

mod authority;
mod bundle;
mod certified;
mod credentials;
mod handshakes;
mod join;
mod keyed;
mod revoked;
mod servers;
mod subject;
mod token;
mod versions;

use rustls::pki_types::CertificateDer;

pub use authority::{AuthorityError, CertificateAuthority};
pub use bundle::{AuthorityBundle, fingerprint_of, issuer_of};
pub use certified::{BadSerial, Certified, LONGEST_LIFE, NODE_LIFE, PERSON_LIFE, Serial, now};
pub use credentials::{CertificateRequest, Credentials, CredentialsError, write_private};
pub use handshakes::{Handshake, Handshakes, has_spoken};
pub use join::joining_config;
pub use keyed::{BadKeyDigest, KeyDigest, KeyedCertificate};
pub use revoked::{
    IsRevoked, MOST_REVOKED, Revocation, RevocationList, Revocations, Revoked, WatchedConnection,
};
pub use rustls;
pub use subject::{BadRole, BadSubject, Person, Role, Subject};
pub use token::{BadToken, Bearer, Shelf, Token, TokenRefused, Tokens};
pub use versions::{BadVersions, NoCommonVersion, Versions};

/// Credentials that are renewed while they are used.
pub type Renewed = std::sync::Arc<std::sync::RwLock<Credentials>>;

/// Bytes that nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut bytes).expect("the system has random numbers");
    bytes
}

/// SHA-256 of these bytes.
pub fn digest(bytes: &[u8]) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).into()
}

/// The fingerprint of a certificate: SHA-256 of its DER encoding.
fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    digest(certificate)
}

/// Two lower-case digits for each byte, without separators.
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
