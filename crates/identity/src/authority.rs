//! The rack's certificate authority, which its control plane has.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use time::OffsetDateTime;

use crate::certified::{Certified, NODE_LIFE, SKEW, now};
use crate::credentials::{write_private, write_public};
use crate::servers::began;
use crate::{CertificateRequest, Credentials, CredentialsError, Subject, fingerprint};

/// How long the certificate of an authority is good.
const AUTHORITY: Duration = Duration::from_secs(3650 * 24 * 3600);

/// Why an authority cannot be loaded, or does not sign.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file cannot be read or written.
    #[error("{path}: {cause}")]
    File {
        /// The file that cannot be used.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// A host or a person has a name that no certificate can have.
    #[error(
        "no certificate can name {0}; names of hosts and people have lower-case letters, digits and `-` only"
    )]
    Name(String),
    /// What is to be signed, or what was stored, is no such thing.
    #[error("the certificate cannot be made: {0}")]
    Certificate(#[from] rcgen::Error),
    /// What was made cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
}

/// What the authority's name begins with; the rack's follows.
pub(crate) const RACK: &str = "rackbus ";

/// A rack's certificate authority.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pem: String,
}

impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertificateAuthority").finish_non_exhaustive()
    }
}

impl CertificateAuthority {
    /// The authority whose files are in `folder`, made at the first start of `rack`. Its key is readable for
    /// its owner only.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn open(folder: &Path, rack: &str) -> Result<CertificateAuthority, AuthorityError> {
        if let Some(authority) = CertificateAuthority::load(folder)? {
            return Ok(authority);
        }
        let authority = CertificateAuthority::generate(rack)?;
        authority.save(folder)?;
        Ok(authority)
    }

    /// The authority whose files are in `folder`; `None` when there is none.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn load(folder: &Path) -> Result<Option<CertificateAuthority>, AuthorityError> {
        let (key_path, certificate_path) = (folder.join("ca.key"), folder.join("ca.pem"));
        let file = |path: &Path| {
            let path = path.to_owned();
            move |cause| AuthorityError::File { path, cause }
        };
        // The certificate is written last: with it all is there.
        match std::fs::read_to_string(&certificate_path) {
            Ok(pem) => {
                let key = std::fs::read_to_string(&key_path).map_err(file(&key_path))?;
                CertificateAuthority::from_pem(&pem, &key).map(Some)
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(file(&certificate_path)(cause)),
        }
    }

    /// A new authority of `rack`, kept nowhere yet.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn generate(rack: &str) -> Result<CertificateAuthority, AuthorityError> {
        CertificateAuthority::generated(rack, 0)
    }

    /// A new authority of `rack` that takes the place of this one, kept nowhere yet. Its certificate is good from later on, by whatever
    /// clock this one was made: so it is known which one is the newer.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn successor(&self, rack: &str) -> Result<CertificateAuthority, AuthorityError> {
        let own = began(&self.certificate).ok_or(rcgen::Error::CouldNotParseCertificate)?;
        CertificateAuthority::generated(rack, own.saturating_add(1))
    }

    fn generated(rack: &str, earliest: u64) -> Result<CertificateAuthority, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        let name = DnValue::Utf8String(format!("{RACK}{rack}"));
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let since = now();
        let begins = since.saturating_sub(SKEW.as_secs()).max(earliest);
        params.not_before = moment(begins)?;
        params.not_after = moment(begins.max(since).saturating_add(AUTHORITY.as_secs()))?;
        let pem = params.self_signed(&key)?.pem();
        CertificateAuthority::of(pem, key)
    }

    /// The authority with this certificate and key, as [`pem`](CertificateAuthority::pem) has them.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn from_pem(certificate: &str, key: &str) -> Result<CertificateAuthority, AuthorityError> {
        CertificateAuthority::of(certificate.to_owned(), KeyPair::from_pem(key)?)
    }

    /// Its certificate and its key, which is as secret as the rack.
    pub fn pem(&self) -> (&str, String) {
        (&self.pem, self.issuer.key().serialize_pem())
    }

    /// Writes its files into `folder`, where nobody else can read the key.
    ///
    /// # Errors
    /// [`AuthorityError::File`].
    pub fn save(&self, folder: &Path) -> Result<(), AuthorityError> {
        let (key_path, certificate_path) = (folder.join("ca.key"), folder.join("ca.pem"));
        let file = |path: &Path| {
            let path = path.to_owned();
            move |cause| AuthorityError::File { path, cause }
        };
        let (certificate, key) = self.pem();
        write_private(&key_path, &key).map_err(file(&key_path))?;
        write_public(&certificate_path, certificate).map_err(file(&certificate_path))
    }

    fn of(pem: String, key: KeyPair) -> Result<CertificateAuthority, AuthorityError> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key)?;
        Ok(CertificateAuthority { issuer, certificate, pem })
    }

    /// SHA-256 of its certificate, by which who joins knows it.
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint(&self.certificate)
    }

    /// Signs a certificate that says what `certified` does, for who has the key of `request` (PEM). Whatever else the
    /// request asks for is left out. The answer is the certificate and the authority's (PEM).
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn sign(&self, certified: &Certified, request: &str) -> Result<String, AuthorityError> {
        let subject = &certified.subject;
        if !subject.is_valid() {
            return Err(AuthorityError::Name(subject.to_string()));
        }
        let mut asked = CertificateSigningRequestParams::from_pem(request)?;
        let mut params = CertificateParams::new(vec![subject.to_string()])?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match subject {
            // Nobody connects to a person.
            Subject::Person(_) => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Subject::Node(_) | Subject::Control => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
        };
        params.distinguished_name.push(DnType::CommonName, subject.to_string());
        params.serial_number = Some(SerialNumber::from_slice(certified.serial.bytes()));
        let since = certified.since.saturating_sub(SKEW.as_secs());
        (params.not_before, params.not_after) = (moment(since)?, moment(certified.until)?);
        asked.params = params;
        let signed = asked.signed_by(&self.issuer)?;
        Ok(format!("{}{}", signed.pem(), self.pem))
    }

    /// Credentials of `subject`, made here, which are good for [`NODE_LIFE`].
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn issue(&self, subject: &Subject) -> Result<Credentials, AuthorityError> {
        let request = CertificateRequest::new()?;
        let certified = Certified::new(subject.clone(), NODE_LIFE);
        let signed = self.sign(&certified, request.text())?;
        Ok(request.answered(&signed)?)
    }
}

fn moment(seconds: u64) -> Result<OffsetDateTime, AuthorityError> {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    // Nothing that is known is good for thousands of years.
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|_| rcgen::Error::Time.into())
}
