//! Whom somebody of the rack takes for whom it connects to.
//!
//! A control plane is taken for one by a certificate of the authority that made one's own, or of a later one. All control planes
//! have a certificate of a later authority before anybody else has, so who has an old one's key stands in for none of them
//! towards those that have one of its successor, though they trust the old one until it is retired. Nodes come one after the
//! other: they are taken by a certificate of each authority that is trusted.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::Subject;

/// Verifies whom is connected to.
#[derive(Debug)]
pub(crate) struct RackServerVerifier {
    control: Arc<WebPkiServerVerifier>,
    others: Arc<WebPkiServerVerifier>,
    control_name: Option<ServerName<'static>>,
}

impl RackServerVerifier {
    /// For `subject`, who has a certificate of `own`, and trusts `others` as well. Nothing where one of them is no authority. A control
    /// plane trusts those alone that others of its kind are of.
    pub fn new(
        (own, subject): (&CertificateDer<'static>, &Subject),
        others: &[CertificateDer<'static>],
        provider: &Arc<CryptoProvider>,
    ) -> Option<RackServerVerifier> {
        let verifier = |trusted: Vec<&CertificateDer<'static>>| {
            let mut roots = RootCertStore::empty();
            trusted.into_iter().try_for_each(|it| roots.add(it.clone())).ok()?;
            let provider = provider.clone();
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().ok()
        };
        let begins = began(own)?;
        let is_control = *subject == Subject::Control;
        let is_later = |it: &&CertificateDer<'_>| began(it).is_some_and(|it| it >= begins);
        let later = others.iter().filter(|it| is_control || is_later(it));
        let control = verifier([own].into_iter().chain(later).collect())?;
        let others = verifier([own].into_iter().chain(others).collect())?;
        Some(RackServerVerifier { control, others, control_name: Subject::Control.server_name() })
    }
}

/// From when on a certificate is good, in seconds since 1970: that of an authority is so from later on than that of the one in
/// whose place it came.
pub(crate) fn began(certificate: &CertificateDer<'_>) -> Option<u64> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    u64::try_from(parsed.validity().not_before.timestamp()).ok()
}

impl ServerCertVerifier for RackServerVerifier {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        behind: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let is_control = self.control_name.as_ref() == Some(name);
        let verifier = if is_control { &self.control } else { &self.others };
        verifier.verify_server_cert(own, behind, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.others.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.others.supported_verify_schemes()
    }
}
