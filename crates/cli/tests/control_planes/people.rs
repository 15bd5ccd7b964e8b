//! People and revocations with several control planes: whoever leads, and who does not.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use rackbus_control::certificates::RevokeRequest;
use rackbus_control::people::UserTokenRequest;
use rackbus_control::register::CertificateRegister;
use rackbus_control::store::{Sqlite, Store};

use super::RACK;
use super::processes::{Cluster, etcd};
use super::support::PATIENCE;

/// `rackbus` where somebody works.
fn run(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
    command.args(args).env("XDG_CONFIG_HOME", home).env("XDG_RUNTIME_DIR", home);
    command.env_remove("RACKBUS_RUN_DIR").env_remove("RACKBUS_CONTEXT").output().unwrap()
}

/// Runs it until it succeeds, or says this.
fn until(home: &Path, args: &[&str], says: Option<&str>) {
    let begun = Instant::now();
    loop {
        let output = run(home, args);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let done = match says {
            None => output.status.success(),
            Some(says) => !output.status.success() && errors.contains(says),
        };
        if done {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{args:?}: {errors}");
    }
}

pub async fn log_in(cluster: &Cluster, leader: usize, user: &str, url: &str) -> tempfile::TempDir {
    let asked = UserTokenRequest {
        user: user.to_owned(),
        role: "operator".to_owned(),
        host: None,
        seconds: 600,
        life_seconds: None,
    };
    let token = cluster.controls[leader].client().user_token(&asked).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("token");
    std::fs::write(&file, token).unwrap();
    until(home.path(), &["login", url, "--token-file", file.to_str().unwrap()], None);
    home
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_context_finds_the_leader_and_a_revocation_holds_whoever_leads() {
    let Some(program) = etcd() else { return };
    let mut cluster = Cluster::start(&program, 1, 3, RACK);
    let first = cluster.leader(None).await;
    // One control plane is named, wherever the leader is; the others are learned of.
    let urls: Vec<String> = cluster.join.split(',').map(str::to_owned).collect();
    let other = (first + 1) % urls.len();
    let (begun, mut known) = (Instant::now(), 0);
    while known < urls.len() {
        // The leader looks now and then who else is there.
        assert!(begun.elapsed() < PATIENCE, "the leader knows of {known} control planes");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        known = cluster.status(first).await.map_or(0, |status| status.members.len());
    }
    let ann = log_in(&cluster, first, "ann", &urls[other]).await;
    let eve = log_in(&cluster, first, "eve", &cluster.join.clone()).await;
    let shown = String::from_utf8(run(ann.path(), &["context", "show"]).stdout).unwrap();
    assert!(urls.iter().all(|url| shown.contains(url.trim_start_matches("https://"))), "{shown}");
    let revoke = RevokeRequest { user: Some("eve".to_owned()), ..RevokeRequest::default() };
    cluster.controls[first].client().revoke(&revoke).await.unwrap();
    until(eve.path(), &["status"], Some("was revoked"));
    // Also of one that does not lead she is told nothing any more.
    let listen = urls[other].trim_start_matches("https://");
    let context = eve.path().join("rackbus/contexts/lab/context.json");
    let alone = serde_json::json!({ "rack": "lab", "control_planes": [listen] });
    std::fs::write(&context, alone.to_string()).unwrap();
    until(eve.path(), &["control", "status"], Some("was revoked"));
    cluster.controls[first].kill();
    cluster.leader(Some(first)).await;
    until(ann.path(), &["status"], None);
    until(eve.path(), &["status"], Some("was revoked"));
    // The next leader has it from the store, with who was let in.
    let next = cluster.leader(Some(first)).await;
    let known = cluster.controls[next].client().certificates().await.unwrap();
    let revoked: Vec<&str> =
        known.iter().filter(|it| it.revoked.is_some()).map(|it| it.subject.as_str()).collect();
    assert_eq!(revoked, ["eve.operator.user.rackbus"]);
    assert!(known.iter().any(|it| it.subject == "ann.operator.user.rackbus"));
    // And so has a file that the state is moved to.
    for control in &mut cluster.controls {
        if control.is_running() {
            control.end();
        }
    }
    let file = cluster.root.path().join("moved/control.db");
    let (from, to) = (format!("etcd:{}", cluster.store), format!("sqlite:{}", file.display()));
    let args = ["--rack", "lab", "control", "migrate", "--from", &from, "--to", &to];
    cluster.controls[next].run(&args).unwrap();
    let moved = Sqlite::open(&file, "lab").unwrap().load().unwrap().certificates;
    let moved = CertificateRegister::of(moved);
    let revoked = moved.issued().filter(|(_, revoked)| revoked.is_some());
    let revoked: Vec<String> = revoked.map(|(it, _)| it.subject.to_string()).collect();
    assert_eq!(revoked, ["eve.operator.user.rackbus"]);
}
