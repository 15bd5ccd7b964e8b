//! Processes that are not who they say: of another user, or no node of the rack. Whatever they connect to of a running
//! rack, nothing is lent, ended or read by it.

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rackbus_lease::Message;
use rackbus_link::{Hello, Purpose, VERSIONS};
use support::{Rack, THREE_HOSTS, open, socket};

/// Tells the test binary that it is a process of another user, and where the rack is.
const RUN_DIR: &str = "RACKBUS_TEST_STRANGER";

/// What a request is answered with; nothing where the connection is closed.
fn ask(path: &Path, request: &str) -> String {
    let Ok(mut stream) = UnixStream::connect(path) else { return String::new() };
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut answer = String::new();
    // One that is not heard has its connection closed, at whatever moment.
    if stream.write_all(request.as_bytes()).is_ok() {
        let _ = stream.read_to_string(&mut answer);
    }
    answer
}

fn request(method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: rack\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// What a node says, as the API takes it.
fn said(message: &Message) -> String {
    format!("{{\"messages\":[{}]}}", serde_json::to_string(message).unwrap())
}

/// The beginning of a conversation with a node, framed as links frame it.
fn hello(lease: u64, epoch: u64) -> Vec<u8> {
    let service = Purpose::Function { device: "nvme0".to_owned(), lease, epoch };
    let (rack, from, to) = ("lab".to_owned(), "beta".to_owned(), "alpha".to_owned());
    let hello = Hello { versions: VERSIONS, rack, from, to, service };
    let text = serde_json::to_vec(&hello).unwrap();
    [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], &text].concat()
}

/// Everything that a process can try without being anybody; each is refused.
fn try_all(run: &Path, is_same_user: bool) {
    let control = run.join("control.sock");
    let status = ask(&control, &request("GET", "/v1/status", ""));
    assert_eq!(status.is_empty(), !is_same_user, "{status}");
    let gone = [
        Message::Closed { lease: 1 },
        Message::Lost { lease: 1, reason: "made up".to_owned() },
        Message::Register {
            incarnation: u64::MAX,
            devices: Default::default(),
            newest_lease: 0,
            address: "elsewhere".to_owned(),
        },
    ];
    for (host, message) in
        ["alpha", "beta"].into_iter().flat_map(|host| gone.iter().map(move |it| (host, it)))
    {
        let path = format!("/v1/hosts/{host}/messages");
        let answer = ask(&control, &request("POST", &path, &said(message)));
        let refused = answer.is_empty() || answer.contains("not_the_node");
        assert!(refused, "a process spoke for {host}: {answer}");
        let answer = ask(&control, &request("GET", &path, ""));
        let refused = answer.is_empty() || answer.contains("not_the_node");
        assert!(refused, "a process hears what {host} is told: {answer}");
    }
    // As the borrower, with the lease and epoch that it has, and with former ones.
    for epoch in [0, 1, 2] {
        let mut stream = UnixStream::connect(run.join("alpha/link.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut answer = Vec::new();
        // Another user is answered before anything is read, and may find the connection closed already.
        let _ = stream.write_all(&hello(1, epoch));
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let why = if is_same_user { "not the node of beta" } else { "user 65534 may not connect" };
        assert!(answer.contains(why), "the lender answers: {answer}");
    }
}

/// In a process of another user.
#[test]
fn stranger() {
    if let Some(run) = std::env::var_os(RUN_DIR).map(PathBuf::from) {
        try_all(&run, false);
    }
}

#[test]
fn only_its_node_acts_for_a_host_or_is_admitted_as_it() {
    let rack = Rack::up(THREE_HOSTS);
    let lease = rack.borrow("alpha/nvme0", "beta");
    assert_eq!((lease.lease, lease.epoch), (1, 1));
    // A process of the same user administrates the rack, but is no node.
    try_all(&rack.run_dir(), true);
    let mut drive = open(&lease);
    drive.write(0, &[7; 4096], true).unwrap();
    if rustix::process::getuid().is_root() {
        let all = |path: &Path, mode: u32| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        // As if the folders were open to everybody.
        let run = rack.run_dir();
        for path in [run.parent().unwrap(), &run, &run.join("alpha"), &run.join("beta")] {
            all(path, 0o755);
        }
        all(socket(&lease).parent().unwrap(), 0o755);
        for path in [run.join("control.sock"), run.join("alpha/link.sock")] {
            all(&path, 0o777);
        }
        let binary = run.join("binary");
        std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
        all(&binary, 0o755);
        let mut command = Command::new(&binary);
        command.args(["--exact", "stranger"]).env_clear().env(RUN_DIR, &run).current_dir("/");
        command.stdout(Stdio::null()).uid(65_534).gid(65_534);
        assert!(command.status().unwrap().success(), "another user's process was heard");
    } else {
        eprintln!("only root can be somebody else: a part is not tested");
    }
    // The lease is as it was, and so is the drive.
    let mut data = [0; 4096];
    drive.read(0, &mut data).unwrap();
    assert_eq!(data, [7; 4096]);
    let leases = rack.json(&["leases"]);
    assert_eq!(
        (leases[0]["stage"].as_str(), leases[0]["epoch"].as_u64()),
        (Some("active"), Some(1))
    );
    drop(drive);
    rack.give_back(&lease);
}
