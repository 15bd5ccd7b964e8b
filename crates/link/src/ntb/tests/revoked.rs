//! Hosts that are revoked, and speak by TCP when they have joined anew.

use std::sync::RwLock;

use rackbus_identity::{
    CertificateAuthority, CertificateRequest, Credentials, Renewed, Revocation, RevocationList,
    Revoked, now,
};

use super::*;
use crate::tcp::{SCHEME, TcpLink};

/// A host's certificate that was made then (seconds since 1970).
fn certificate(authority: &CertificateAuthority, host: &str, since: u64) -> Credentials {
    let request = CertificateRequest::new().unwrap();
    let subject = Subject::Node(host.to_owned());
    let certified = Certified { since, until: since + 1000, ..Certified::unshown(subject) };
    let signed = authority.sign(&certified, request.text()).unwrap();
    request.answered(&signed).unwrap()
}

/// Two hosts with certificates that were made at `since`, before TCP, and what beta shows.
fn pair(authority: &CertificateAuthority, since: u64) -> (Pair, Renewed) {
    let shown = HOSTS.map(|host| Arc::new(RwLock::new(certificate(authority, host, since))));
    let revocations: [Revocations; 2] = Default::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let behind = [0, 1].map(|end| -> Arc<dyn Link> {
        let link = TcpLink::new("demo", &place, &place, shown[end].clone());
        let alpha = format!("{SCHEME}{place}");
        link.locate_by(move |_| Some(alpha.clone()));
        Arc::new(link.with_revocations(revocations[end].clone()))
    });
    let folder = tempfile::tempdir().unwrap();
    (Pair::before(behind, folder, Some(listener), revocations), shown[1].clone())
}

/// Tells a host that this was revoked at `at`, for 1000 seconds.
fn revoke(pair: &Pair, end: usize, what: Revoked, at: u64) {
    let number = pair.revocations[end].list().version + 1;
    let revoked = vec![Revocation { number, what, at, until: at + 1000 }];
    assert!(pair.revocations[end].learn(&RevocationList { version: number, revoked }, at));
}

/// Conversations through the NTB that beta has begun.
fn begun(pair: &Pair) -> u64 {
    pair.status(1).conversations[0]
}

#[test]
fn a_host_that_is_revoked_speaks_by_tcp_alone_and_with_a_later_certificate() {
    let (authority, at) = (CertificateAuthority::generate("demo").unwrap(), now());
    let (pair, shown) = pair(&authority, at);
    let beta = || Revoked::Host("beta".into());
    let streams = pair.meet(&hello(Purpose::Segments));
    // Nobody knows here whose certificate that was, and nobody has asked for one.
    let serial = shown.read().unwrap().certified().serial.clone();
    revoke(&pair, 0, Revoked::Serial(serial), at);
    exchange(&streams, b"hello");
    revoke(&pair, 0, beta(), at);
    streams.iter().for_each(|stream| stream.wait_closed());
    let refused = |said: &str| {
        let error = pair.meeting(&hello(Purpose::Segments)).err().unwrap().to_string();
        assert!(error.contains(said), "{error}");
    };
    // beta has not heard of it, and then it has.
    refused("beta was revoked: show a certificate, by TCP");
    assert_eq!(begun(&pair), 2);
    revoke(&pair, 1, beta(), at);
    refused("of beta.node.rackbus was revoked");
    assert!([0, 1].iter().all(|end| pair.status(*end).revoked));
    *shown.write().unwrap() = certificate(&authority, "beta", at + 1);
    let streams = pair.meet(&hello(Purpose::Segments));
    exchange(&streams, b"again");
    assert_eq!(begun(&pair), 2);
    // When the revocation is of no more use, neither is the way around.
    pair.revocations.iter().for_each(|it| {
        it.learn(&RevocationList::default(), at + 1000);
    });
    exchange(&pair.meet(&hello(Purpose::Segments)), b"through");
    assert_eq!((begun(&pair), pair.status(1).revoked), (3, false));
}

#[test]
fn a_host_that_is_revoked_is_not_spoken_to_through_the_ntb() {
    let (authority, at) = (CertificateAuthority::generate("demo").unwrap(), now());
    let (pair, _) = pair(&authority, at);
    let streams = pair.meet(&hello(Purpose::Network));
    revoke(&pair, 1, Revoked::Host("alpha".into()), at);
    streams.iter().for_each(|stream| stream.wait_closed());
    let error = pair.meeting(&hello(Purpose::Network)).err().unwrap().to_string();
    assert!(error.contains("alpha") && !error.contains("NTB"), "{error}");
    assert_eq!((begun(&pair), pair.status(1).up), (1, true));
}
