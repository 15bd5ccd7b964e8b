//! The rack's certificate authority is replaced while a drive is in use: by real processes, with a control plane that is killed
//! between the steps, and those who come too late.

mod support;

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

use rackbus_identity::rustls::{
    AlertDescription, ClientConnection, Error as TlsError, ServerConnection, StreamOwned,
};
use rackbus_identity::{
    AuthorityBundle, CertificateAuthority, CertificateRequest, Credentials, Person, Role, Subject,
};
use serde_json::Value;
use support::machines::{Machine, Machines};
use support::open;

const RACK: &str = r#"
name = "lab"

[hosts.alpha.devices.nvme0]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.alpha.devices.nvme1]
kind = "nvme"
size = "16 MiB"
backing = "file"

[hosts.beta]
[hosts.gamma]
"#;

fn logged_in(rack: &Machines, user: &str, role: &str) -> Machine {
    let made = rack.control.json(&["token", "--user", user, "--role", role]);
    let desk = rack.desk(user);
    let file = rack.control.run_dir().join(format!("{user}.token"));
    std::fs::write(&file, made["token"].as_str().unwrap()).unwrap();
    desk.json(&["login", &rack.url, "--token-file", file.to_str().unwrap()]);
    desk
}

fn status(rack: &Machines) -> Value {
    rack.control.json(&["control", "ca", "status"])
}

/// Who holds up the next step.
fn behind(status: &Value) -> Vec<String> {
    let all = status["behind"].as_array().unwrap().iter();
    all.map(|it| it["subject"].as_str().unwrap().to_owned()).collect()
}

/// The number of the authority that signs, and how many are trusted.
fn signing(status: &Value) -> (u64, usize) {
    let all = status["authorities"].as_array().unwrap();
    (all[0]["number"].as_u64().unwrap(), all.len())
}

/// What a node has: its certificate, that of the authority which made it, those of others, and the key.
fn blocks(machine: &Machine) -> Vec<String> {
    let text = std::fs::read_to_string(machine.state_dir().join("identity.pem")).unwrap();
    text.split_inclusive("-----BEGIN")
        .filter(|it| it.contains("-----END"))
        .map(|block| {
            let block = block.trim_end_matches("-----BEGIN");
            format!("-----BEGIN{block}")
        })
        .collect()
}

type Tls = StreamOwned<ClientConnection, std::net::TcpStream>;

/// A connection to the control plane as who has these credentials.
fn connect(rack: &Machines, credentials: &Credentials) -> std::io::Result<Tls> {
    let name = Subject::Control.server_name().unwrap();
    let tls = ClientConnection::new(credentials.client().clone(), name).unwrap();
    let socket = std::net::TcpStream::connect(rack.url.trim_start_matches("https://"))?;
    socket.set_read_timeout(Some(support::PATIENCE))?;
    Ok(StreamOwned::new(tls, socket))
}

/// Asks for the rack's state; the first line of the answer.
fn ask(tls: &mut Tls) -> std::io::Result<String> {
    tls.write_all(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut buffer = [0; 256];
    while !answer.contains(&b'\n') {
        match tls.read(&mut buffer)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => answer.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
}

/// Everybody reaches everybody: also who begins anew.
fn reach_each_other(rack: &Machines, mut alpha: Machine, borrowers: [(&Machine, &str); 2]) {
    alpha.crash();
    rack.wait(|rack| rack.state_of("alpha") == "down");
    rack.node(&mut alpha, "alpha", None);
    for (machine, host) in borrowers {
        let lease = machine.borrow("alpha/nvme1", host);
        open(&lease).read(0, &mut [0; 4096]).unwrap();
        machine.json(&["return", &lease.lease.to_string()]);
    }
}

/// The events say who asked for the steps.
fn check_events(rack: &Machines) {
    let events = rack.control.json(&["events", "--kind", "access"]);
    let by_root = |text: &str| {
        let all = events.as_array().unwrap().iter();
        let mut all = all.filter(|it| it["by"]["user"] == "root");
        all.any(|it| it["text"].as_str().unwrap().starts_with(text))
    };
    assert!(by_root("there is a new certificate authority"), "{events}");
    assert!(by_root("the old certificate authority is retired"), "{events}");
}

/// Of two certificates of beta, that of the new authority is taken, and the one of the old refused for that.
fn check_refused(rack: &Machines, beta: &Machine, stolen: &Credentials) {
    let good = Credentials::load(&beta.state_dir()).unwrap().unwrap();
    assert_eq!(connect(rack, &good).and_then(|mut tls| ask(&mut tls)).unwrap(), "HTTP/1.1 200 OK");
    let refused = connect(rack, stolen).and_then(|mut tls| ask(&mut tls)).unwrap_err();
    let cause = refused.get_ref().and_then(|it| it.downcast_ref::<TlsError>());
    // The authorities have the same name, so that it is the signature that is wrong.
    let expected = TlsError::AlertReceived(AlertDescription::DecryptError);
    assert_eq!(cause, Some(&expected), "{refused:?}");
}

/// The nodes come by themselves, people with their next command, and none signs before; nor does a crash change that.
fn introduce(rack: &mut Machines, [admin, ann]: [&Machine; 2], uses: &dyn Fn(u8)) {
    admin.json(&["control", "ca", "rotate"]);
    admin.json(&["status"]);
    rack.wait(|rack| behind(&status(rack)) == ["ann.operator.user.rackbus"]);
    uses(2);
    rack.restart_control();
    assert_eq!(signing(&status(rack)), (0, 2));
    let refused = admin.bad(&["control", "ca", "retire"]);
    assert!(refused.contains("not trusted yet by ann.operator.user"), "{refused}");
    assert!(admin.bad(&["control", "ca", "rotate"]).contains("not trusted yet by"));
    ann.json(&["status"]);
    rack.wait(|rack| signing(&status(rack)) == (1, 2));
    uses(3);
}

/// A token of before names the old authority, and is refused; with another one gamma joins.
fn join_by_a_new_token(rack: &Machines, early: &Path) -> Machine {
    let mut gamma = rack.machine("gamma");
    let said = gamma.bad(&[
        "node",
        "--host",
        "gamma",
        "--join",
        &rack.url,
        "--token-file",
        early.to_str().unwrap(),
        "--listen",
        "127.0.0.1:0",
    ]);
    assert!(said.contains("another rack's, or was made before"), "{said}");
    let token = rack.token("gamma");
    rack.node(&mut gamma, "gamma", Some(&token));
    gamma
}

#[test]
fn the_authority_is_replaced_under_a_drive_in_use_and_the_old_one_ends() {
    let mut rack = Machines::start(RACK);
    let [alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let early = rack.token("gamma");
    let admin = logged_in(&rack, "root", "administrator");
    let ann = logged_in(&rack, "ann", "operator");
    let stolen = blocks(&beta);
    let lease = beta.borrow("alpha/nvme0", "beta");
    let drive = RefCell::new(open(&lease));
    let uses = |value: u8| {
        let mut read = vec![0; 4096];
        drive.borrow_mut().write(0, &[value; 4096], false).unwrap();
        drive.borrow_mut().read(0, &mut read).unwrap();
        assert!(read == [value; 4096]);
    };
    uses(1);
    assert_eq!(signing(&status(&rack)), (0, 1));
    for asked in [&["rotate"][..], &["status"], &["retire"]] {
        assert!(ann.bad(&[&["control", "ca"], asked].concat()).contains("may not ask for"));
    }
    assert!(admin.bad(&["control", "ca", "retire"]).contains("none to retire"));

    introduce(&mut rack, [&admin, &ann], &uses);

    // All get certificates of the new one.
    rack.wait(|rack| {
        let behind = behind(&status(rack));
        !behind.iter().any(|it| it.contains("node"))
    });
    let refused = rack.control.bad(&["control", "ca", "retire"]);
    assert!(refused.contains("in use by ann.operator.user"), "{refused}");
    admin.json(&["status"]);
    ann.json(&["status"]);
    // The old one is good until it is retired. A thief takes whatever the control plane shows.
    let folder = tempfile::tempdir().unwrap();
    let both = [&stolen[..2], &blocks(&beta)[1..2], &stolen[2..]].concat().concat();
    std::fs::write(folder.path().join("identity.pem"), both).unwrap();
    let stolen = Credentials::load(folder.path()).unwrap().unwrap();
    let mut open_before = connect(&rack, &stolen).unwrap();
    assert_eq!(ask(&mut open_before).unwrap(), "HTTP/1.1 200 OK");
    // Beta's is in use again, until its node shows the one in its place once more.
    rack.wait(|rack| behind(&status(rack)).is_empty());
    admin.json(&["control", "ca", "retire"]);
    while let Ok(1..) = open_before.read(&mut [0; 4096]) {}
    let ended = open_before.read(&mut [0; 1]).map_err(|error| error.kind());
    assert!(ended != Err(ErrorKind::WouldBlock), "a connection by the old authority stays open");
    rack.restart_control();
    let now = status(&rack);
    assert_eq!((signing(&now), behind(&now).len()), ((1, 1), 0));
    assert_eq!(now["control_planes"][0]["authority"], now["authorities"][0]["fingerprint"]);
    uses(4);
    check_refused(&rack, &beta, &stolen);

    let gamma = join_by_a_new_token(&rack, &early);
    reach_each_other(&rack, alpha, [(&beta, "beta"), (&gamma, "gamma")]);
    ann.json(&["status"]);
    check_events(&rack);
}

#[test]
fn nodes_without_a_new_certificate_are_named_and_cut_off_by_force_alone() {
    let mut rack = Machines::start(RACK);
    let [_alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    beta.crash();
    // There is none yet that could sign.
    let done = rack.control.json(&["control", "ca", "rotate", "--force"]);
    assert_eq!(done, serde_json::json!({ "newest": "introduced", "cut_off": [] }));
    rack.wait(|rack| behind(&status(rack)) == ["beta.node.rackbus"]);
    let done = rack.control.json(&["control", "ca", "rotate", "--force"]);
    assert_eq!(done["cut_off"], serde_json::json!(["beta.node.rackbus"]));
    assert_eq!(done["newest"], "signs");
    rack.wait(|rack| behind(&status(rack)) == ["beta.node.rackbus"]);
    let refused = rack.control.bad(&["control", "ca", "retire"]);
    assert!(refused.contains("in use by beta.node"), "{refused}");
    let done = rack.control.json(&["control", "ca", "retire", "--force"]);
    assert_eq!(done["cut_off"], serde_json::json!(["beta.node.rackbus"]));
    // The state is whole in a backup.
    let backup = rack.control.run_dir().join("lab.backup");
    rack.control.json(&["control", "backup", backup.to_str().unwrap()]);
    rack.control.crash();
    let state = rack.control.state_dir();
    std::fs::remove_dir_all(&state).unwrap();
    let to = format!("sqlite:{}", state.join("control.db").display());
    rack.control.json(&["control", "restore", backup.to_str().unwrap(), "--to", &to]);
    rack.begin_control();
    assert_eq!(signing(&status(&rack)), (1, 1));
    rack.wait(|rack| rack.state_of("alpha") == "up");
    let token = rack.token("beta");
    std::fs::remove_file(beta.state_dir().join("identity.pem")).unwrap();
    rack.node(&mut beta, "beta", Some(&token));
    let lease = beta.borrow("alpha/nvme0", "beta");
    open(&lease).read(0, &mut [0; 4096]).unwrap();
}

/// What the control plane answers to who has these credentials: all of it.
fn answer(rack: &Machines, credentials: &Credentials, request: &str, body: &str) -> String {
    let mut tls = connect(rack, credentials).unwrap();
    let length = body.len();
    let text = format!(
        "{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    tls.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    tls.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

/// The rack's first authority, with its key.
fn stolen_authority(rack: &Machines) -> CertificateAuthority {
    let folder = rack.control.state_dir().join("identity");
    CertificateAuthority::load(&folder).unwrap().unwrap()
}

/// What a thief signs by, who has the key of `stolen` and trusts whatever a node of the rack does.
fn thief(stolen: &CertificateAuthority, node: &Machine) -> AuthorityBundle {
    let (old, key) = stolen.pem();
    let known = blocks(node);
    let others: Vec<&str> = known[1..known.len() - 1].iter().map(|it| it.trim()).collect();
    let others: Vec<&str> = others.into_iter().filter(|it| *it != old.trim()).collect();
    let signing = CertificateAuthority::from_pem(old, &key).unwrap();
    AuthorityBundle::new(signing, &others).unwrap()
}

#[test]
fn the_key_of_a_replaced_authority_opens_nothing() {
    let rack = Machines::start(RACK);
    let [alpha, _beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let stolen = stolen_authority(&rack);
    let forged = |user: &str, host: &str| {
        let person = Person { user: user.to_owned(), role: Role::Administrator };
        let subjects = [Subject::Person(person), Subject::Node(host.to_owned())];
        let bundle = thief(&stolen, &alpha);
        subjects.map(|it| bundle.issue(&it).unwrap())
    };
    let request = CertificateRequest::new().unwrap();
    let renewal = serde_json::json!({ "request": request.text() }).to_string();
    for forged in forged("mallory", "gamma") {
        let answer = answer(&rack, &forged, "POST /v1/renew", &renewal);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let refused = || {
        for (forged, remedy) in forged("eve", "beta").iter().zip(["log in anew", "join anew"]) {
            for (asked, body) in [("POST /v1/renew", renewal.as_str()), ("GET /v1/status", "")] {
                let answer = answer(&rack, forged, asked, body);
                assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
                assert!(answer.contains("none that the control plane knows"), "{answer}");
                assert!(answer.contains(remedy), "{answer}");
            }
        }
    };
    rack.control.json(&["control", "ca", "rotate"]);
    refused();
    // What was got by them before is listed, and holds the rotation up.
    rack.wait(|rack| {
        let mut behind = behind(&status(rack));
        behind.sort();
        behind == ["gamma.node.rackbus", "mallory.administrator.user.rackbus"]
    });
    rack.control.json(&["revoke", "host", "gamma"]);
    rack.control.json(&["revoke", "user", "mallory"]);
    rack.wait(|rack| signing(&status(rack)) == (1, 2) && behind(&status(rack)).is_empty());
    refused();
    rack.control.json(&["control", "ca", "retire"]);
    let events = rack.control.json(&["events", "--kind", "access"]).to_string();
    for host in ["alpha", "beta"] {
        let said = format!("{host}.node has the certificate");
        assert!(events.contains(&said), "{said}: {events}");
    }
}

/// What a thief makes who has the key and the register: a certificate that says what a good one does, for another key.
fn copy_of(good: &Credentials, bundle: &AuthorityBundle) -> Credentials {
    let request = CertificateRequest::new().unwrap();
    let signed = bundle.sign(good.certified(), request.text()).unwrap();
    request.answered(&signed).unwrap()
}

#[test]
fn a_copy_of_a_good_certificate_for_another_key_is_refused() {
    let rack = Machines::start(RACK);
    let [alpha, beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let stolen = stolen_authority(&rack);
    let request = CertificateRequest::new().unwrap();
    let renewal = serde_json::json!({ "request": request.text() }).to_string();
    let refused = || {
        let good = Credentials::load(&beta.state_dir()).unwrap().unwrap();
        let copy = copy_of(&good, &thief(&stolen, &alpha));
        assert_eq!(copy.certified(), good.certified());
        for (asked, body) in [("POST /v1/renew", renewal.as_str()), ("GET /v1/status", "")] {
            let answer = answer(&rack, &copy, asked, body);
            assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
            assert!(answer.contains("is for another key"), "{answer}");
        }
        let answer = answer(&rack, &good, "GET /v1/status", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    };
    refused();
    rack.control.json(&["control", "ca", "rotate"]);
    refused();
    rack.wait(|rack| signing(&status(rack)) == (1, 2));
    refused();
}

#[test]
fn a_forged_control_plane_is_refused_once_the_authority_is_replaced() {
    let rack = Machines::start(RACK);
    let [alpha, mut beta] = ["alpha", "beta"].map(|host| rack.joined(host));
    let stolen = stolen_authority(&rack);
    let ask = || {
        let forged = thief(&stolen, &alpha).issue(&Subject::Control).unwrap();
        answer(&rack, &forged, "POST /v1/tokens", r#"{"host":"gamma","seconds":60}"#)
    };
    assert!(ask().starts_with("HTTP/1.1 200"), "{}", ask());
    // One that is not trusted by everybody holds the step up for as long as the test takes.
    beta.crash();
    rack.control.json(&["control", "ca", "rotate"]);
    rack.wait(|_| ask().starts_with("HTTP/1.1 403"));
    assert!(ask().contains("the newest certificate authority"), "{}", ask());
    assert_eq!(signing(&status(&rack)), (0, 2));
    // Nodes that have a certificate of the new one take a control plane of the old one for none.
    rack.control.json(&["control", "ca", "rotate", "--force"]);
    let forged = || thief(&stolen, &alpha).issue(&Subject::Control).unwrap();
    rack.wait(|_| {
        let own = Credentials::load(&alpha.state_dir()).unwrap().unwrap();
        own.authorities()[0] != forged().authorities()[0]
    });
    let own = Credentials::load(&alpha.state_dir()).unwrap().unwrap();
    assert_eq!(own.authorities().len(), 2, "the old one is trusted still");
    let mut forged = ServerConnection::new(forged().server().clone()).unwrap();
    let name = Subject::Control.server_name().unwrap();
    let mut node = ClientConnection::new(own.client().clone(), name).unwrap();
    assert!(shake_hands(&mut node, &mut forged).is_err());
}

/// What comes of a handshake, at the client.
fn shake_hands(
    client: &mut ClientConnection,
    server: &mut ServerConnection,
) -> Result<(), TlsError> {
    let mut bytes = Vec::new();
    while client.is_handshaking() {
        client.write_tls(&mut bytes).unwrap();
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets()?;
        bytes.clear();
        server.write_tls(&mut bytes).unwrap();
        client.read_tls(&mut bytes.as_slice()).unwrap();
        client.process_new_packets()?;
        bytes.clear();
    }
    Ok(())
}
