//! The processes: members of etcd, control planes, and hosts' nodes, each with folders of its own, on this machine.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_control::ControlClient;
use rackbus_control::leadership::serving::ControlStatus;
use rustix::process::{Pid, Signal};

use super::support::machines::free_port;
use super::support::{PATIENCE, Process};

/// Names the program `etcd`.
pub const ETCD: &str = "RACKBUS_ETCD";

/// The program `etcd`: the one that is named, that `scripts/setup etcd` made, or this host's. Where there is none,
/// that is said loudly, and nothing is tested.
pub fn etcd() -> Option<PathBuf> {
    let named = std::env::var_os(ETCD).map(PathBuf::from);
    if let Some(named) = named {
        assert!(named.exists(), "{ETCD} names {}, which is not there", named.display());
        return Some(named);
    }
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("RACKBUS_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| home.map(|home| home.join("rackbus")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = cache.into_iter().map(|it| it.join("etcd/run"));
    let mut found = places.chain(std::env::split_paths(&path)).map(|it| it.join("etcd"));
    let found = found.find(|it| it.exists());
    if found.is_none() {
        let remedy = "`scripts/setup etcd` takes it from Debian";
        super::support::not_tested(&format!("there is no etcd here; {remedy}"));
    }
    found
}

/// A process that is ended with the test, and may be killed, stopped and started again before.
pub struct Part {
    pub name: String,
    folder: PathBuf,
    program: PathBuf,
    args: Vec<String>,
    log_level: Option<&'static str>,
    process: Option<Child>,
}

impl Part {
    fn start(root: &Path, name: &str, program: PathBuf, args: Vec<String>) -> Part {
        Part::logging(root, name, program, args, None)
    }

    fn logging(
        root: &Path,
        name: &str,
        program: PathBuf,
        args: Vec<String>,
        log_level: Option<&'static str>,
    ) -> Part {
        let (folder, name) = (root.join(name), name.to_owned());
        std::fs::create_dir_all(&folder).unwrap();
        let mut part = Part { name, folder, program, args, log_level, process: None };
        part.again();
        part
    }

    /// `rackbus` with these words, running.
    pub fn rackbus(root: &Path, name: &str, args: &[&str]) -> Part {
        let args = args.iter().map(|it| (*it).to_owned()).collect();
        Part::start(root, name, env!("CARGO_BIN_EXE_rackbus").into(), args)
    }

    /// Starts it, as it was started before.
    pub fn again(&mut self) {
        let log = self.folder.join("log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null()).current_dir(&self.folder);
        command.env("RACKBUS_RUN_DIR", self.folder.join("run"));
        command.env("RACKBUS_STATE_DIR", self.folder.join("state"));
        command.envs(self.log_level.map(|level| ("RACKBUS_LOG", level)));
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.process = Some(command.spawn().unwrap());
    }

    pub fn signal(&self, signal: Signal) {
        Process::of(Pid::from_child(self.process.as_ref().unwrap())).signal(signal);
    }

    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Whether it was started, and not ended since.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// A client at its socket.
    pub fn client(&self) -> ControlClient {
        ControlClient::new(&self.folder.join("run/control.sock"))
    }

    /// Waits until it ends by itself; how.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        self.process.take().unwrap().wait().unwrap()
    }

    /// Asks it to end, and waits until it has.
    pub fn end(&mut self) {
        self.signal(Signal::TERM);
        self.process.take().unwrap().wait().unwrap();
    }

    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// `rackbus` with these words, where this one's socket is; what it printed, or what it said is wrong.
    pub fn run(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rackbus"));
        command.args(args).env("RACKBUS_RUN_DIR", self.folder.join("run"));
        let output = command.env("RACKBUS_STATE_DIR", self.state()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(text(output.stderr)),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A store, its control planes, and the nodes of a rack.
pub struct Cluster {
    pub etcd: Vec<Part>,
    pub controls: Vec<Part>,
    pub nodes: Vec<Part>,
    /// The members of etcd, as they are named.
    pub store: String,
    pub root: tempfile::TempDir,
    /// Where the control planes are, with commas between them.
    pub join: String,
    /// What control planes and nodes log that are started from now on, in place of what they log otherwise.
    pub log_level: Option<&'static str>,
}

/// What etcd is told so that it speaks TLS alone, as in the book.
fn etcd_with_tls(folder: &Path) -> Vec<String> {
    let files = [
        ("--cert-file", "etcd.pem"),
        ("--key-file", "etcd.key"),
        ("--trusted-ca-file", "ca.pem"),
        ("--peer-cert-file", "etcd.pem"),
        ("--peer-key-file", "etcd.key"),
        ("--peer-trusted-ca-file", "ca.pem"),
    ];
    let files = files
        .iter()
        .flat_map(|(option, file)| [(*option).to_owned(), folder.join(file).display().to_string()]);
    let authenticated = ["--client-cert-auth", "--peer-client-cert-auth"].map(str::to_owned);
    files.chain(authenticated).collect()
}

impl Cluster {
    /// So many members of etcd and control planes of the rack that `text` describes; no nodes yet.
    pub fn start(program: &Path, members: usize, controls: usize, text: &str) -> Cluster {
        let mut cluster = Cluster::store(program, members, text, None);
        let store = cluster.store.clone();
        for _ in 0..controls {
            cluster.control(&["--etcd", &store]);
        }
        cluster
    }

    /// So many members of etcd for the rack that `text` describes; no control planes yet. With a folder of certificates
    /// (`ca.pem`, `etcd.pem`, `etcd.key`), they speak TLS alone, and to those of the same authority.
    pub fn store(program: &Path, members: usize, text: &str, secured: Option<&Path>) -> Cluster {
        let root = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let ports: Vec<(u16, u16)> = (0..members).map(|_| (free_port(), free_port())).collect();
        // The certificates have the machine's name; etcd listens at an address.
        let (scheme, name) =
            if secured.is_some() { ("https", "localhost") } else { ("http", "127.0.0.1") };
        let at = |host: &str, port: u16| format!("{scheme}://{host}:{port}");
        let peers: Vec<String> =
            ports.iter().enumerate().map(|(n, it)| format!("e{n}={}", at(name, it.1))).collect();
        let peers = peers.join(",");
        let etcd = ports.iter().enumerate().map(|(n, (client, peer))| {
            let own = format!("e{n}");
            let args = [
                ("--name", own.clone()),
                ("--data-dir", "data".to_owned()),
                ("--listen-client-urls", at("127.0.0.1", *client)),
                ("--advertise-client-urls", at(name, *client)),
                ("--listen-peer-urls", at("127.0.0.1", *peer)),
                ("--initial-advertise-peer-urls", at(name, *peer)),
                ("--initial-cluster", peers.clone()),
            ];
            let args = args.into_iter().flat_map(|(a, b)| [a.to_owned(), b]);
            let args = args.chain(secured.into_iter().flat_map(etcd_with_tls)).collect();
            Part::start(root.path(), &own, program.to_owned(), args)
        });
        let etcd: Vec<Part> = etcd.collect();
        std::fs::write(root.path().join("rack.toml"), text).unwrap();
        let store: Vec<String> = ports.iter().map(|it| at(name, it.0)).collect();
        let (controls, nodes, join) = (Vec::new(), Vec::new(), String::new());
        Cluster { etcd, controls, nodes, store: store.join(","), root, join, log_level: None }
    }

    /// Starts a control plane, which reaches etcd as these arguments say.
    pub fn control(&mut self, store: &[&str]) {
        let file = self.root.path().join("rack.toml");
        let listen = format!("127.0.0.1:{}", free_port());
        let own = ["control", file.to_str().unwrap(), "--listen", &listen, "--store", "etcd"];
        let name = format!("c{}", self.controls.len());
        self.controls.push(self.part(&name, &[&own, store].concat()));
        if !self.join.is_empty() {
            self.join.push(',');
        }
        self.join += &format!("https://{listen}");
    }

    /// `rackbus` with these words, running, with as much in its log as the others have.
    pub fn part(&self, name: &str, args: &[&str]) -> Part {
        let args = args.iter().map(|it| (*it).to_owned()).collect();
        let program = env!("CARGO_BIN_EXE_rackbus").into();
        Part::logging(self.root.path(), name, program, args, self.log_level)
    }

    /// Where nodes join, for a control plane that is started besides.
    pub fn join_at(&mut self, url: &str) {
        self.join = url.to_owned();
    }

    /// Has the node of a host join.
    pub async fn node(&mut self, host: &str) {
        let begun = Instant::now();
        let token = loop {
            match self.controls[0].client().token(host, Duration::from_secs(600)).await {
                Ok(token) => break token,
                Err(error) => {
                    assert!(begun.elapsed() < PATIENCE, "{error}\n{}", self.controls[0].log())
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let file = self.root.path().join(format!("{host}.token"));
        std::fs::write(&file, token).unwrap();
        let listen = format!("127.0.0.1:{}", free_port());
        let file = file.to_str().unwrap();
        let args = [
            "node",
            "--host",
            host,
            "--join",
            &self.join,
            "--token-file",
            file,
            "--listen",
            &listen,
        ];
        self.nodes.push(self.part(host, &args));
    }

    /// The state of one control plane, if it answers.
    pub async fn status(&self, control: usize) -> Option<ControlStatus> {
        let client = self.controls[control].client();
        let asked = tokio::time::timeout(Duration::from_millis(500), client.control());
        asked.await.ok()?.ok()
    }

    /// Waits until one of the control planes leads, other than `not`.
    pub async fn leader(&self, not: Option<usize>) -> usize {
        let begun = Instant::now();
        loop {
            for n in (0..self.controls.len()).filter(|n| Some(*n) != not) {
                if self.controls[n].process.is_some()
                    && self.status(n).await.is_some_and(|it| it.leads)
                {
                    return n;
                }
            }
            assert!(begun.elapsed() < PATIENCE, "nobody leads: {}", self.controls[0].log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until all nodes are up.
    pub async fn up(&self) {
        let begun = Instant::now();
        loop {
            let status = self.nodes[0].client().status().await;
            let state = rackbus_control::api::HostState::Up;
            if status.is_ok_and(|it| it.hosts.iter().all(|host| host.state == state)) {
                return;
            }
            let logs: String = self.nodes.iter().map(Part::log).collect();
            assert!(begun.elapsed() < PATIENCE, "the nodes do not come up: {logs}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
