//! Attacks on the control plane of a rack whose hosts are machines, each played: what the book lists under "Attacks
//! that were tried". Those on the link between nodes are in the `link` crate; those with tokens in `machines` and
//! `people`; revoked certificates in `revocation`.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rackbus_identity::rustls::{ClientConnection, StreamOwned};
use rackbus_identity::{
    CertificateAuthority, CertificateRequest, Certified, Credentials, Person, Role, Subject, now,
};
use support::machines::Machines;
use support::{PATIENCE, Rack};

const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

fn address(rack: &Machines) -> String {
    rack.url.strip_prefix("https://").unwrap().to_owned()
}

/// The rack's authority, as whoever has stolen its key has it: to make certificates that the rack would not.
fn authority(rack: &Machines) -> CertificateAuthority {
    CertificateAuthority::load(&rack.control.state_dir().join("identity")).unwrap().unwrap()
}

fn credentials(authority: &CertificateAuthority, certified: &Certified) -> Credentials {
    let request = CertificateRequest::new().unwrap();
    let signed = authority.sign(certified, request.text()).unwrap();
    request.answered(&signed).unwrap()
}

fn person(role: Role) -> Subject {
    Subject::Person(Person { user: "ann".into(), role })
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A connection as who has these credentials.
fn connect(rack: &Machines, credentials: &Credentials) -> Tls {
    let name = Subject::Control.server_name().unwrap();
    let tls = ClientConnection::new(credentials.client().clone(), name).unwrap();
    let socket = TcpStream::connect(address(rack)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    StreamOwned::new(tls, socket)
}

/// Asks for `what`; the answer's first line, or why there is none.
fn ask(tls: &mut Tls, what: &str, body: &str) -> Result<String, String> {
    let length = body.len();
    let text = format!(
        "{what} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    tls.write_all(text.as_bytes()).map_err(|error| error.to_string())?;
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while !answer.windows(2).any(|pair| pair == b"\r\n") {
        match tls.read(&mut buffer) {
            Ok(0) => return Err("closed".to_owned()),
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) => return Err(error.to_string()),
        }
    }
    let text = String::from_utf8_lossy(&answer).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The control plane is well, and answers others.
fn is_well(rack: &Machines) {
    assert_eq!(rack.control.json(&["status"])["rack"], "lab");
}

const BORROW_FOR_GAMMA: &str = r#"{"function": "alpha/nvme0", "borrower": "gamma"}"#;

#[test]
fn a_stolen_certificate_of_one_host_acts_for_no_other() {
    let rack = Machines::start(RACK);
    let stolen = Certified::new(Subject::Node("beta".into()), Duration::from_secs(60));
    let stolen = credentials(&authority(&rack), &stolen);
    for (what, body) in [
        ("POST /v1/leases", BORROW_FOR_GAMMA),
        ("GET /v1/hosts/gamma/messages", ""),
        ("POST /v1/hosts/gamma/messages", r#"{"messages": []}"#),
        ("DELETE /v1/sections/gamma/nvme0", ""),
        ("POST /v1/tokens", r#"{"host": "gamma", "seconds": 60}"#),
        ("POST /v1/revocations", r#"{"host": "gamma"}"#),
    ] {
        let answer = ask(&mut connect(&rack, &stolen), what, body).unwrap();
        assert!(answer.contains("403"), "{what}: {answer}");
    }
    let answer = ask(&mut connect(&rack, &stolen), "GET /v1/status", "").unwrap();
    assert!(answer.contains("200"), "{answer}");
}

#[test]
fn a_reader_does_not_borrow_and_a_borrower_for_beta_not_for_gamma() {
    let rack = Machines::start(RACK);
    let authority = authority(&rack);
    for role in [Role::Reader, Role::Borrower("beta".into())] {
        let certified = Certified::new(person(role), Duration::from_secs(60));
        let mut tls = connect(&rack, &credentials(&authority, &certified));
        let answer = ask(&mut tls, "POST /v1/leases", BORROW_FOR_GAMMA).unwrap();
        assert!(answer.contains("403"), "{answer}");
    }
}

#[test]
fn metrics_are_served_without_tls_to_no_other_machine() {
    let described = Rack::described(RACK);
    for command in ["up", "control"] {
        let open = [command, &described.file(), "--metrics", "0.0.0.0:0"];
        let refused = described.bad(2, &open);
        assert!(refused.contains("with a reader's certificate"), "{refused}");
        assert!(!described.run_dir().exists(), "{command} has begun something");
    }
    // As it says: where machines are listened to, for who may read.
    let rack = Machines::start(RACK);
    let reader = Certified::new(person(Role::Reader), Duration::from_secs(60));
    let mut tls = connect(&rack, &credentials(&authority(&rack), &reader));
    let answer = ask(&mut tls, "GET /metrics", "").unwrap();
    assert!(answer.contains("200"), "{answer}");
}

/// What it says it is; certificates that TLS does not take end the handshake.
fn is_refused(rack: &Machines, credentials: &Credentials, why: &str) {
    let refused = ask(&mut connect(rack, credentials), "GET /v1/status", "").unwrap_err();
    assert!(refused.contains(why), "{refused}");
    is_well(rack);
}

#[test]
fn expired_early_and_foreign_certificates_are_refused() {
    let rack = Machines::start(RACK);
    let authority = authority(&rack);
    let administrator = || Certified::new(person(Role::Administrator), Duration::from_secs(60));
    let day = 24 * 3600;
    let expired = Certified { since: now() - 2 * day, until: now() - day, ..administrator() };
    is_refused(&rack, &credentials(&authority, &expired), "CertificateExpired");
    // Of another rack of the same name, by somebody who knows this rack's authority.
    let foreign = credentials(&CertificateAuthority::generate("lab").unwrap(), &administrator());
    let folder = tempfile::tempdir().unwrap();
    foreign.save(folder.path()).unwrap();
    let path = folder.path().join("identity.pem");
    let text = std::fs::read_to_string(&path).unwrap();
    let end = "-----END CERTIFICATE-----\n";
    let parts: Vec<&str> = text.split(end).collect();
    let own = authority.pem().0;
    std::fs::write(&path, format!("{}{end}{own}{}", parts[0], parts[2])).unwrap();
    let foreign = Credentials::load(folder.path()).unwrap().unwrap();
    is_refused(&rack, &foreign, "fatal alert");
    // The same with the rack's own signature is taken.
    let mut tls = connect(&rack, &credentials(&authority, &administrator()));
    assert!(ask(&mut tls, "GET /v1/status", "").unwrap().contains("200"));
}

#[test]
fn tls_12_is_not_spoken() {
    let rack = Machines::start(RACK);
    let mut socket = TcpStream::connect(address(&rack)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // A ClientHello of TLS 1.2: no extension offers a later version. ECDHE-ECDSA with AES-128-GCM.
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
    let extensions = [
        // supported_groups: P-256; signature_algorithms: ecdsa_secp256r1_sha256; ec_point_formats.
        0, 10, 0, 4, 0, 2, 0, 23, 0, 13, 0, 4, 0, 2, 4, 3, 0, 11, 0, 2, 1, 0,
    ];
    hello.extend([0, extensions.len() as u8]);
    hello.extend(extensions);
    let mut record = vec![22, 3, 1, 0, (hello.len() + 4) as u8, 1, 0, 0, hello.len() as u8];
    record.extend(hello);
    socket.write_all(&record).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    // A fatal alert: protocol_version (70).
    assert_eq!(answer[..1], [21], "{answer:?}");
    assert_eq!(answer[5..], [2, 70], "{answer:?}");
    is_well(&rack);
}

#[test]
fn peers_that_send_slowly_or_nothing_are_disconnected_and_disturb_nobody() {
    let rack = Machines::start(RACK);
    // From another address than that of who is known: more than may be under way, again and again.
    let attacker = Flood::start(&rack);
    let ann = Certified::new(person(Role::Reader), Duration::from_secs(600));
    let ann = credentials(&authority(&rack), &ann);
    // One that sends a byte of its handshake now and then.
    let mut slow = TcpStream::connect(address(&rack)).unwrap();
    slow.set_nodelay(true).unwrap();
    let (begun, mut is_cut_off) = (Instant::now(), false);
    for byte in [22u8, 3, 1, 2, 0].into_iter().chain(std::iter::repeat(1)) {
        // Others are answered all the while, by TLS.
        let answer = ask(&mut connect(&rack, &ann), "GET /v1/status", "").unwrap();
        assert!(answer.contains("200"), "{answer}");
        is_cut_off |= slow.write_all(&[byte]).is_err();
        if is_cut_off && attacker.opened() > 300 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "cut off: {is_cut_off}, {}", attacker.opened());
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(attacker);
    let metrics = String::from_utf8(rack.control.run(&["metrics"]).stdout).unwrap();
    for cause in ["too many not known yet", "silent"] {
        let counted = format!("rackbus_connections_refused_total{{cause=\"{cause}\"}}");
        assert!(metrics.contains(&counted), "{cause}: {metrics}");
    }
}

/// Opens connections from an address of its own, and says nothing on them, until it is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Flood {
    fn start(rack: &Machines) -> Flood {
        let to: std::net::SocketAddr = address(rack).parse().unwrap();
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stops, counts) = (stop.clone(), opened.clone());
        let work = move || {
            let mut open = std::collections::VecDeque::new();
            while !stops.load(Ordering::Relaxed) {
                open.extend(from_another_address(to));
                counts.fetch_add(1, Ordering::Relaxed);
                if open.len() > 400 {
                    open.pop_front();
                }
                // Others are to have a processor, too.
                std::thread::sleep(Duration::from_micros(500));
            }
        };
        Flood { stop, opened, thread: Some(std::thread::spawn(work)) }
    }

    fn opened(&self) -> usize {
        self.opened.load(Ordering::Relaxed)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// A connection from 127.0.0.2.
fn from_another_address(to: std::net::SocketAddr) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 2], 0))).ok()?;
    connect(&socket, &to).ok()?;
    Some(socket)
}
