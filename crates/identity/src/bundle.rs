//! The certificate authorities of a rack while one takes the place of another: the one that makes certificates, and those
//! that are trusted beside it.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::{
    AuthorityError, CertificateAuthority, CertificateRequest, Certified, Credentials,
    CredentialsError, NODE_LIFE, Subject, fingerprint, hex,
};

/// The authority that makes a rack's certificates, and the certificates (PEM) of others that are trusted too.
#[derive(Debug)]
pub struct AuthorityBundle {
    signing: CertificateAuthority,
    others: String,
    fingerprints: Vec<String>,
}

impl AuthorityBundle {
    /// `signing` makes certificates, and who has one trusts `others` (PEM, each one certificate) as well.
    ///
    /// # Errors
    /// [`AuthorityError`], where one of these is no certificate.
    pub fn new(
        signing: CertificateAuthority,
        others: &[&str],
    ) -> Result<AuthorityBundle, AuthorityError> {
        let mut fingerprints = vec![hex(&signing.fingerprint())];
        for other in others {
            fingerprints.push(fingerprint_of(other)?);
        }
        Ok(AuthorityBundle { signing, others: others.concat(), fingerprints })
    }

    /// The fingerprints of all of them, in hexadecimal digits, that of the one that makes certificates first.
    pub fn fingerprints(&self) -> &[String] {
        &self.fingerprints
    }

    /// The fingerprint of the one that makes certificates: tokens name it.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.signing.fingerprint()
    }

    /// A new authority that takes the place of the one that makes certificates, as [`CertificateAuthority::successor`].
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn successor(&self, rack: &str) -> Result<CertificateAuthority, AuthorityError> {
        self.signing.successor(rack)
    }

    /// Signs as [`CertificateAuthority::sign`] does. The answer has the certificates of the others behind the authority's.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn sign(&self, certified: &Certified, request: &str) -> Result<String, AuthorityError> {
        Ok(self.signing.sign(certified, request)? + &self.others)
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

/// The fingerprint of a certificate (PEM), in hexadecimal digits.
///
/// # Errors
/// [`AuthorityError::Credentials`], where it is none.
pub fn fingerprint_of(certificate: &str) -> Result<String, AuthorityError> {
    let parsed = CertificateDer::from_pem_slice(certificate.as_bytes());
    let parsed = parsed
        .map_err(|_| CredentialsError::Unusable("an authority's is no certificate".into()))?;
    Ok(hex(&fingerprint(&parsed)))
}

/// The fingerprint of the authority that made the certificate at the begin of this chain, as somebody shows it in TLS; nothing
/// where that is not shown.
pub fn issuer_of(chain: &[CertificateDer<'_>]) -> Option<String> {
    chain.get(1).map(|authority| hex(&fingerprint(authority)))
}

#[cfg(test)]
mod tests {
    use rustls::{ClientConnection, ServerConnection};

    use super::*;

    fn node() -> Subject {
        Subject::Node("beta".to_owned())
    }

    #[test]
    fn credentials_are_of_those_authorities_that_they_were_made_with() {
        let [one, other] = [(); 2].map(|()| CertificateAuthority::generate("lab").unwrap());
        let pem = other.pem().0.to_owned();
        let alone = one.issue(&node()).unwrap();
        let bundle = AuthorityBundle::new(one, &[&pem]).unwrap();
        let both = bundle.issue(&node()).unwrap();
        assert_eq!(both.authorities(), bundle.fingerprints());
        let [first, second] = bundle.fingerprints() else { panic!("{bundle:?}") };
        let turned = [second.clone(), first.clone()];
        assert!(both.are_of(bundle.fingerprints()) && !both.are_of(&turned));
        assert!(!both.are_of(&turned[1..]) && !alone.are_of(bundle.fingerprints()));
        assert!(alone.are_of(std::slice::from_ref(first)) && alone.are_of(&[]));
        // What is kept says the same.
        let folder = tempfile::tempdir().unwrap();
        both.save(folder.path()).unwrap();
        let kept = Credentials::load(folder.path()).unwrap().unwrap();
        assert_eq!(kept.authorities(), both.authorities());
    }

    fn chain_of(credentials: &Credentials) -> Vec<CertificateDer<'static>> {
        let folder = tempfile::tempdir().unwrap();
        credentials.save(folder.path()).unwrap();
        let chain = CertificateDer::pem_file_iter(folder.path().join("identity.pem")).unwrap();
        chain.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn a_chain_is_let_in_while_its_authority_is_trusted() {
        let [one, other] = [(); 2].map(|()| CertificateAuthority::generate("lab").unwrap());
        let (shown, pem) = (one.issue(&node()).unwrap(), one.pem().0.to_owned());
        let chain = chain_of(&shown);
        let alone = other.issue(&Subject::Control).unwrap();
        let both = AuthorityBundle::new(other, &[&pem]).unwrap().issue(&Subject::Control).unwrap();
        assert!(both.let_in(&chain) && !alone.let_in(&chain) && !both.let_in(&[]));
        // Whatever is shown behind it.
        let told = [&chain[..1], &chain_of(&alone)[1..]].concat();
        assert!(!alone.let_in(&told));
    }

    /// What comes of a handshake, at the client.
    fn connects(client: &Credentials, server: &Credentials) -> bool {
        let name = server.subject().server_name().unwrap();
        let mut client = ClientConnection::new(client.client().clone(), name).unwrap();
        let mut server = ServerConnection::new(server.server().clone()).unwrap();
        while client.is_handshaking() {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut bytes.as_slice()).unwrap();
            if client.process_new_packets().is_err() {
                return false;
            }
        }
        true
    }

    #[test]
    fn a_control_plane_is_of_ones_own_authority_or_of_a_later_one() {
        let old = CertificateAuthority::generate("lab").unwrap();
        let new = old.successor("lab").unwrap();
        let pem = [&old, &new].map(|it| it.pem().0.to_owned());
        let [before, after] = [
            AuthorityBundle::new(old, &[&pem[1]]).unwrap(),
            AuthorityBundle::new(new, &[&pem[0]]).unwrap(),
        ];
        let issued = |bundle: &AuthorityBundle| {
            [node(), Subject::Control].map(|it| bundle.issue(&it).unwrap())
        };
        let ([old_node, old_control], [new_node, new_control]) = (issued(&before), issued(&after));
        for server in [&old_node, &new_node, &old_control, &new_control] {
            assert!(connects(&old_node, server), "{server:?}");
        }
        for server in [&old_node, &new_node, &new_control] {
            assert!(connects(&new_node, server), "{server:?}");
        }
        assert!(!connects(&new_node, &old_control), "the old one is trusted still, for nodes");
        // And whose certificate it is that is shown, also at the other end.
        for (shown, bundle) in [(&old_control, &before), (&new_control, &after)] {
            let issuer = new_control.issuer_of(&chain_of(shown)).unwrap();
            assert_eq!(issuer, bundle.fingerprints()[0]);
        }
    }

    #[test]
    fn no_more_authorities_are_taken_than_a_rack_has() {
        let one = CertificateAuthority::generate("lab").unwrap();
        let pem = one.pem().0.to_owned();
        let many = AuthorityBundle::new(one, &[pem.as_str(); 5]).unwrap();
        assert!(many.issue(&node()).unwrap_err().to_string().contains("so many authorities"));
        let one = CertificateAuthority::generate("lab").unwrap();
        assert!(AuthorityBundle::new(one, &["nothing"]).is_err());
    }
}
