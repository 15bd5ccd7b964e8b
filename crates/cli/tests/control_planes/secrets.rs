//! No secret is in a log, in what commands say, or in the arguments of a process: machines join, somebody logs in, tokens
//! are made, a node is restarted in place, and the state moves to etcd, while everybody logs for debugging.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::people::log_in;
use super::processes::{Cluster, Part, etcd};
use super::support::machines::free_port;
use super::support::open;
use super::tls::{make_certificates, options};
use super::{RACK, logs};

/// All files in `folder` and below.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let of = |entry: std::fs::DirEntry| {
        let kind = entry.file_type().unwrap();
        match (kind.is_dir(), kind.is_file()) {
            (true, _) => files(&entry.path()),
            (false, true) => vec![entry.path()],
            (false, false) => Vec::new(),
        }
    };
    entries.flat_map(of).collect()
}

/// What of a text nobody else may know: of tokens what they prove, of private keys each line.
fn secrets_of(text: &str) -> Vec<String> {
    let tokens = text.split("rackbus1.").skip(1).filter_map(|rest| rest.split_once('.'));
    let tokens = tokens.map(|(secret, _)| secret.to_owned());
    let keys = text.split("PRIVATE KEY-----").skip(1).step_by(2);
    let lines = keys.flat_map(str::lines).filter(|line| !line.is_empty() && !line.contains('-'));
    tokens.chain(lines.map(str::to_owned)).collect()
}

/// The secrets in files with these names or endings, and how many files these are.
fn secrets_in(folders: &[&Path]) -> (BTreeSet<String>, usize) {
    let is_secret = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        ["token", ".key", "identity.pem"].iter().any(|end| name.ends_with(end))
    };
    let files = folders.iter().flat_map(|folder| files(folder)).filter(is_secret);
    let texts: Vec<String> = files.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let secrets = texts.iter().map(|text| secrets_of(text));
    let count = secrets.clone().filter(|found| !found.is_empty()).count();
    (secrets.flatten().collect(), count)
}

/// The arguments of all processes.
fn arguments() -> Vec<(String, String)> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let of = |path: PathBuf| {
        let arguments = std::fs::read(path.join("cmdline")).ok()?;
        Some((path.display().to_string(), String::from_utf8_lossy(&arguments).replace('\0', " ")))
    };
    entries.filter_map(|entry| of(entry.path())).collect()
}

/// What was written for people to read, and where.
struct Told(Vec<(String, String)>);

impl Told {
    fn said(&mut self, part: &Part, args: &[&str]) {
        let said = part.run(args).unwrap_or_else(|error| panic!("{args:?}: {error}"));
        self.0.push((args.join(" "), said));
    }

    /// The first of `secrets` that is in it, and where.
    fn finds<'a>(&'a self, secrets: &'a BTreeSet<String>) -> Option<(&'a str, &'a str)> {
        let has = |text: &str| secrets.iter().find(|secret| text.contains(secret.as_str()));
        self.0.iter().find_map(|(place, text)| Some((place.as_str(), has(text)?.as_str())))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_secret_is_in_a_log_or_an_argument() {
    let Some(program) = etcd() else { return };
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("etcd");
    make_certificates(&own);
    let text = RACK.replace("[hosts.gamma]\n", "");
    let mut cluster = Cluster::store(&program, 1, &text, Some(&own));
    cluster.log_level = Some("debug");
    let root = cluster.root.path().to_owned();
    let (file, listen) = (root.join("rack.toml"), format!("127.0.0.1:{}", free_port()));
    let one = ["control", file.to_str().unwrap(), "--listen", &listen];
    cluster.join_at(&format!("https://{listen}"));
    cluster.controls.push(cluster.part("c0", &one));
    for host in ["alpha", "beta"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    let mut told = Told(Vec::new());
    // Tokens that nobody uses, as a person and a program get them.
    let mut made = Vec::new();
    for args in [&["token", "beta"][..], &["token", "--user", "bob", "--role", "reader", "--json"]]
    {
        made.extend(secrets_of(&cluster.controls[0].run(args).unwrap()));
    }
    let ann = log_in(&cluster, 0, "ann", &cluster.join.clone()).await;
    let beta = cluster.nodes[1].client();
    let lease = beta.borrow("alpha/nvme0", "beta").await.unwrap();
    let used = lease.clone();
    tokio::task::spawn_blocking(move || open(&used).read(0, &mut [0; 4096]).unwrap())
        .await
        .unwrap();
    told.said(&cluster.nodes[1], &["restart", "beta"]);
    told.0.extend(arguments());

    // The rack's authority is in a file until then, and in etcd afterwards.
    let from = format!("sqlite:{}", cluster.controls[0].state().join("control.db").display());
    let to = format!("etcd:{}", cluster.store);
    let by = options(&own, Some(&own));
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    cluster.controls[0].end();
    let migrate = ["control", "migrate", "--from", &from, "--to", &to];
    told.said(&cluster.controls[0], &[&migrate, &by[..]].concat());
    let store = ["--store", "etcd", "--etcd", &cluster.store];
    let several = [&one[..], &store, &by].concat();
    cluster.controls[0] = cluster.part("c0", &several);
    cluster.leader(None).await;
    cluster.up().await;
    let (backup, args) = (root.join("backup"), ["--rack", "lab", "control", "backup"]);
    let args = [&args[..], &[backup.to_str().unwrap(), "--from", &to], &by].concat();
    told.said(&cluster.controls[0], &args);
    beta.give_back(lease.lease).await.unwrap();
    told.0.extend(arguments());

    // Of the authority, two nodes, a person, two that etcd has certified and etcd's authority; three tokens in files.
    let (mut secrets, count) = secrets_in(&[&root, folder.path(), ann.path()]);
    assert_eq!((count, made.len()), (10, 2), "where secrets are has changed");
    secrets.extend(made);
    let kept = std::fs::read_to_string(&backup).unwrap();
    let kept = Told(vec![("backup".to_owned(), kept)]);
    assert!(kept.finds(&secrets).is_some(), "a backup has the authority's key");
    let is_log = |path: &&PathBuf| path.file_name().is_some_and(|name| name == "log");
    let all = files(&root);
    for log in all.iter().filter(is_log) {
        told.0.push((log.display().to_string(), std::fs::read_to_string(log).unwrap()));
    }
    for part in cluster.controls.iter().chain(&cluster.nodes) {
        assert!(part.log().contains("DEBUG"), "{} does not log for debugging", part.name);
    }
    let of_rack = |place: &str, text: &str| {
        place.starts_with("/proc") && text.contains(root.to_str().unwrap())
    };
    let read = told.0.iter().filter(|(place, text)| of_rack(place, text)).count();
    assert!(read >= 2 * 3, "the arguments of {read} processes were read");
    if let Some((place, secret)) = told.finds(&secrets) {
        panic!("{place} has the secret {secret}\n{}", logs(&cluster));
    }
}
