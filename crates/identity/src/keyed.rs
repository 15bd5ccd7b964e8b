//! What a certificate says, together with the key that it is for: whoever has an authority's key can make another certificate
//! that says the same, and cannot make one for a key that somebody else has.

use std::fmt;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use crate::{AuthorityError, Certified, CredentialsError, digest, hex, of_hex};

/// SHA-256 of a certificate's public key, as the certificate has it (SubjectPublicKeyInfo, in DER): hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct KeyDigest([u8; 32]);

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl From<[u8; 32]> for KeyDigest {
    fn from(bytes: [u8; 32]) -> KeyDigest {
        KeyDigest(bytes)
    }
}

impl From<KeyDigest> for String {
    fn from(digest: KeyDigest) -> String {
        hex(&digest.0)
    }
}

/// A text that is no digest of a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest of a key has 64 hexadecimal digits")]
pub struct BadKeyDigest;

impl TryFrom<String> for KeyDigest {
    type Error = BadKeyDigest;

    fn try_from(text: String) -> Result<KeyDigest, BadKeyDigest> {
        of_hex(&text).map(KeyDigest).ok_or(BadKeyDigest)
    }
}

/// What a certificate says, and for which key it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyedCertificate {
    /// Of whom it is, its number and how long it is good.
    pub certified: Certified,
    /// The digest of its public key.
    pub key: KeyDigest,
}

impl KeyedCertificate {
    /// What `certificate` says, and its key; nothing where it names nobody of a rack. Whether it is of this rack, and whether
    /// whoever shows it has the key, has been looked at.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<KeyedCertificate> {
        let certified = Certified::of(certificate)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let key = KeyDigest(digest(parsed.public_key().raw));
        Some(KeyedCertificate { certified, key })
    }

    /// The same of the first certificate of this text (PEM), as an authority signed it.
    ///
    /// # Errors
    /// [`AuthorityError::Credentials`], where there is none.
    pub fn of_pem(text: &str) -> Result<KeyedCertificate, AuthorityError> {
        let signed = CertificateDer::from_pem_slice(text.as_bytes()).ok();
        let unusable = || CredentialsError::Unusable("it names nobody of a rack".to_owned());
        Ok(signed.as_ref().and_then(KeyedCertificate::of).ok_or_else(unusable)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CertificateAuthority, CertificateRequest, NODE_LIFE, Subject};

    #[test]
    fn two_certificates_that_say_the_same_are_told_apart_by_their_keys() {
        let authority = CertificateAuthority::generate("lab").unwrap();
        let certified = Certified::new(Subject::Node("beta".to_owned()), NODE_LIFE);
        let requests = [(); 2].map(|()| CertificateRequest::new().unwrap());
        let signed = |request: &CertificateRequest| {
            let text = authority.sign(&certified, request.text()).unwrap();
            KeyedCertificate::of_pem(&text).unwrap()
        };
        let [one, other] = [&requests[0], &requests[1]].map(signed);
        assert_eq!((&one.certified, &other.certified), (&certified, &certified));
        assert_ne!(one.key, other.key);
        assert_eq!(signed(&requests[0]), one, "signed anew, it is for the same key");
        assert!(KeyedCertificate::of_pem("nothing").is_err());
    }

    #[test]
    fn digests_are_written_as_digits_and_read_again() {
        let digest = KeyDigest([0xa5; 32]);
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(text, format!("\"{}\"", "a5".repeat(32)));
        assert_eq!(serde_json::from_str::<KeyDigest>(&text).unwrap(), digest);
        for bad in ["\"\"", "\"a5\"", &format!("\"{}\"", "x".repeat(64))] {
            assert!(serde_json::from_str::<KeyDigest>(bad).is_err(), "{bad}");
        }
    }
}
