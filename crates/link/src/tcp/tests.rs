//! Conversations over TLS between hosts, each with certificates of one rack.

use std::io::{Read, Write};
use std::sync::RwLock;

use rackbus_identity::{CertificateAuthority, Revocation, RevocationList, Revoked};
use rackbus_memory::exchange::MESSAGE_BYTES;
use rackbus_memory::exchange::session::SessionSide;
use rackbus_memory::{Carried, CarriedSession, Event, Exchange, ExchangeLayout, Handles};

use super::*;

fn authority() -> CertificateAuthority {
    CertificateAuthority::open(tempfile::tempdir().unwrap().path(), "lab").unwrap()
}

fn link(authority: &CertificateAuthority, host: &str) -> TcpLink {
    let credentials = authority.issue(&Subject::Node(host.to_owned())).unwrap();
    let credentials = Arc::new(RwLock::new(credentials));
    TcpLink::new("lab", "127.0.0.1:0", "127.0.0.1:1", credentials)
}

/// The node of alpha, and the address that it listens at.
fn listening(link: &TcpLink) -> (TcpListening, String) {
    let listener = TcpListener::bind(&link.listen).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    (TcpListening { listener, link: link.clone(), host: "alpha".to_owned() }, address)
}

fn hello(from: &str, service: Purpose) -> Hello {
    let (rack, from, to) = ("lab".into(), from.into(), "alpha".into());
    Hello { versions: VERSIONS, rack, from, to, service }
}

fn medium() -> Purpose {
    Purpose::Medium { device: "nvme0".into(), lease: 3, epoch: 7, lanes: Vec::new() }
}

fn carried(stream: &dyn Conversation, side: SessionSide) -> Carried {
    let session = CarriedSession::of_one_connection(side).unwrap();
    Carried { carrier: stream.carrier().unwrap(), session, side, lane: None }
}

type Met = (Option<IncomingConnection>, Result<Arc<dyn Conversation>, LinkError>);

fn meet(alpha: &TcpLink, other: &TcpLink, hello: Hello) -> Met {
    let (listening, address) = listening(alpha);
    let connecting = other.clone();
    let connect = std::thread::spawn(move || connecting.connect(&address, &hello));
    let incoming = listening.accept().unwrap().hear();
    let Some(incoming) = incoming else { return (None, connect.join().unwrap()) };
    let (hello, version) = (incoming.hello.clone(), incoming.version);
    let stream = incoming.accept().unwrap();
    (Some(IncomingConnection { hello, version, stream }), connect.join().unwrap())
}

fn refused(alpha: &TcpLink, other: &TcpLink, hello: Hello) -> String {
    let (incoming, outcome) = meet(alpha, other, hello);
    assert!(incoming.is_none(), "it was let in");
    outcome.err().expect("it was let in").to_string()
}

#[test]
fn operations_and_their_data_go_there_and_back() {
    const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 8, data_bytes: 1 << 20 };
    let authority = authority();
    let (alpha, beta) = (link(&authority, "alpha"), link(&authority, "beta"));
    let (incoming, stream) = meet(&alpha, &beta, hello("beta", medium()));
    let (theirs, ours) = (incoming.unwrap().stream, stream.unwrap());
    // What the lender says first goes before what is carried.
    theirs.send(&[b"medium"], &[]).unwrap();
    let mut answers =
        Exchange::carried("a", carried(&*theirs, SessionSide::Answers), LAYOUT).unwrap();
    let mut said = [0; 6];
    ours.receive(&mut said, &mut Handles::new()).unwrap();
    assert_eq!(&said, b"medium");
    let mut asks = Exchange::carried("b", carried(&*ours, SessionSide::Asks), LAYOUT).unwrap();
    let mut message = [0; MESSAGE_BYTES];
    let mut wait = |to: &mut Exchange, from: &mut Exchange| loop {
        if let Some(length) = to.receive(&mut message) {
            return length;
        }
        assert!(!to.is_closed() && !from.is_closed());
        from.ring();
        if to.rest() && from.rest() {
            let waiting = [std::os::fd::AsFd::as_fd(&*to), std::os::fd::AsFd::as_fd(&*from)];
            assert!(Event::wait_any(&waiting, Some(10_000_000_000)));
        }
    };
    for round in 1..=20u8 {
        for tag in 0..LAYOUT.tags {
            asks.data(tag, 1 << 20).unwrap().get().fill(round ^ tag as u8);
            asks.send(&[1, 2, 3], Some((tag, 1 << 20))).unwrap();
            asks.ring();
            assert_eq!(wait(&mut answers, &mut asks), 3);
            let mut read = vec![0; 1 << 20];
            answers.data(tag, 1 << 20).unwrap().get().copy_to(&mut read);
            assert!(read.iter().all(|byte| *byte == round ^ tag as u8));
            answers.send(&[4], None).unwrap();
            answers.ring();
            assert_eq!(wait(&mut asks, &mut answers), 1);
        }
    }
    drop(answers);
    theirs.wait_closed();
    ours.wait_closed();
    assert!(asks.receive(&mut [0; MESSAGE_BYTES]).is_none() && asks.is_closed());
}

#[test]
fn a_host_cannot_act_for_another_one() {
    let authority = authority();
    let (alpha, gamma) = (link(&authority, "alpha"), link(&authority, "gamma"));
    let said = refused(&alpha, &gamma, hello("beta", medium()));
    assert_eq!(said, "alpha refused: your certificate is not that of beta");
    // Nor can it be one that others connect to.
    let (listening, address) = listening(&gamma);
    let hear = std::thread::spawn(move || listening.accept().unwrap().hear().is_some());
    let beta = link(&authority, "beta");
    let said = beta.connect(&address, &hello("beta", medium())).err().unwrap().to_string();
    assert!(said.contains("NotValidForName") || said.contains("not valid for"), "{said}");
    assert!(!hear.join().unwrap());
}

#[test]
fn a_peer_without_a_certificate_of_the_rack_is_refused() {
    let (own, other) = (authority(), authority());
    let (alpha, beta) = (link(&own, "alpha"), link(&other, "beta"));
    let said = refused(&alpha, &beta, hello("beta", medium()));
    assert!(said.contains("UnknownIssuer") || said.contains("certificate"), "{said}");
    // A scanner, which speaks no TLS, and one that says nothing at all are not waited for.
    let (listening, address) = listening(&alpha);
    let hear = std::thread::spawn(move || listening.accept().unwrap().hear().is_none());
    let mut scanner = TcpStream::connect(address.strip_prefix(SCHEME).unwrap()).unwrap();
    scanner.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert!(hear.join().unwrap());
    let _ = scanner.read(&mut [0; 100]);
}

#[test]
fn a_connection_beyond_the_places_of_its_address_is_refused_and_the_next_is_not() {
    let (listening, address) = listening(&link(&authority(), "alpha"));
    let mut sockets = Vec::new();
    let mut next = || {
        sockets.push(TcpStream::connect(address.strip_prefix(SCHEME).unwrap()).unwrap());
        assert!(sockets.len() < 1000, "an address has no bound");
        listening.accept()
    };
    let mut callers = Vec::new();
    let refused = loop {
        match next() {
            Ok(caller) => callers.push(caller),
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(refused, std::io::ErrorKind::ConnectionRefused);
    callers.pop();
    assert!(next().is_ok());
}

#[test]
fn nodes_of_adjacent_versions_use_the_newest_in_common() {
    let authority = authority();
    let node = |host: &str, versions| TcpLink { versions, ..link(&authority, host) };
    let says = |versions| Hello { versions, ..hello("beta", medium()) };
    let (first, both) = (Versions::new(1, 1), Versions::new(1, 2));
    for (theirs, ours, common) in [(first, both, 1), (both, first, 1), (both, both, 2)] {
        let (incoming, stream) = meet(&node("alpha", theirs), &node("beta", ours), says(ours));
        assert_eq!(incoming.unwrap().version, common);
        assert!(stream.is_ok());
    }
    let later = Versions::new(3, 4);
    let said = refused(&node("alpha", later), &node("beta", both), says(both));
    assert!(
        said.ends_with(
            "alpha speaks version 3-4 of the protocol and beta 1-2: upgrade rackbus of beta"
        ),
        "{said}"
    );
    let said = refused(&node("alpha", both), &node("beta", later), says(later));
    assert!(said.ends_with("upgrade rackbus of alpha"), "{said}");
    // Whoever answers with what was not offered is not gone on with.
    let reply = HelloReply::AcceptedAs(7);
    assert!(answered(&says(both), reply).is_err());
}

#[test]
fn a_revoked_peer_is_refused_and_its_conversations_end() {
    let authority = authority();
    let revocations = Revocations::default();
    let (alpha, beta) = (link(&authority, "alpha"), link(&authority, "beta"));
    let alpha = alpha.with_revocations(revocations.clone());
    let (incoming, ours) = meet(&alpha, &beta, hello("beta", medium()));
    let (theirs, ours) = (incoming.unwrap().stream, ours.unwrap());
    let gamma = link(&authority, "gamma");
    let (_gamma, stays) = meet(&alpha, &gamma, hello("gamma", medium()));
    let now = rackbus_identity::now();
    let revoke = |host: &str, number: u64| {
        let what = Revoked::Host(host.to_owned());
        let revoked = vec![Revocation { number, what, at: now + 5, until: now + 1000 }];
        revocations.learn(&RevocationList { version: number, revoked }, now);
    };
    revoke("beta", 1);
    // Both sides see the end, whoever waits for whatever.
    theirs.wait_closed();
    ours.wait_closed();
    assert!(!stays.unwrap().is_closed(), "another host's conversation ended");
    let said = refused(&alpha, &beta, hello("beta", medium()));
    assert!(said.contains("of beta.node.rackbus was revoked"), "{said}");
    // Nor is it spoken to.
    revoke("gamma", 2);
    let (listening, address) = listening(&gamma);
    let hear = std::thread::spawn(move || listening.accept().unwrap().hear().is_some());
    let to_gamma = Hello { to: "gamma".into(), ..hello("alpha", medium()) };
    let said = alpha.connect(&address, &to_gamma).err().unwrap().to_string();
    assert!(said.contains("of gamma.node.rackbus was revoked"), "{said}");
    assert!(!hear.join().unwrap());
}

#[test]
fn what_needs_memory_that_is_shared_is_refused_on_both_sides() {
    let authority = authority();
    let (alpha, beta) = (link(&authority, "alpha"), link(&authority, "beta"));
    let function = Purpose::Function { device: "nvme0".into(), lease: 3, epoch: 7 };
    {
        let (asked, why) = (hello("beta", function), "--placement borrower");
        let said = beta.connect("tcp:127.0.0.1:1", &asked).err().unwrap().to_string();
        assert!(said.contains(why), "{said}");
        // A borrower that asks anyway.
        let (listening, address) = listening(&alpha);
        let hear = std::thread::spawn(move || listening.accept().unwrap().hear().is_none());
        let socket = TcpStream::connect(address.strip_prefix(SCHEME).unwrap()).unwrap();
        let name = Subject::Node("alpha".into()).server_name().unwrap();
        let tls = ClientConnection::new(beta.credentials().client().clone(), name).unwrap();
        let stream = TlsConversation::begin(socket, tls.into(), TIME_LIMIT).unwrap();
        send_frame(&stream, &asked).unwrap();
        let answer: HelloReply = receive_frame(&stream).unwrap().unwrap();
        assert!(matches!(answer, HelloReply::Refused(reason) if reason.contains(why)));
        assert!(hear.join().unwrap());
    }
}

/// It may have stood still between its handshake and its hello: of a session that goes on it would take a refusal for the
/// end.
#[test]
fn a_peer_that_is_late_is_cut_off_and_not_refused() {
    let authority = authority();
    let (alpha, beta) = (link(&authority, "alpha"), link(&authority, "beta"));
    let (listening, address) = listening(&alpha);
    let hear = std::thread::spawn(move || listening.accept().unwrap().hear().is_none());
    let socket = TcpStream::connect(address.strip_prefix(SCHEME).unwrap()).unwrap();
    let name = Subject::Node("alpha".into()).server_name().unwrap();
    let tls = ClientConnection::new(beta.credentials().client().clone(), name).unwrap();
    let stream = TlsConversation::begin(socket, tls.into(), 2 * TIME_LIMIT).unwrap();
    let answer = receive_frame::<HelloReply>(&stream);
    assert!(matches!(answer, Err(StreamError::Closed)), "{answer:?}");
    assert!(hear.join().unwrap());
}
