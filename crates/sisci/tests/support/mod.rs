//! A rack of segment services inside of the test's process, and C programs that run on its hosts.

#![allow(dead_code, unused_macros, reason = "each test binary uses its part")]

pub mod nodes;
#[macro_use]
pub mod scenarios;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

use rackbus_attach::Location;
use rackbus_fabric::FabricHandle;
use rackbus_identity::{CertificateAuthority, Subject};
use rackbus_link::Link;
use rackbus_link::shm::ShmLink;
use rackbus_link::tcp::{SCHEME, TcpLink};
use rackbus_node::segments::Segments;
use rackbus_segment::directory::{DirectorySettings, HostRange};
use tracing::Level;

/// The hosts: their node ids and names.
pub const HOSTS: [(u32, &str); 3] = [(4, "alpha"), (8, "beta"), (12, "gamma")];

/// Says to the scenarios that hosts are machines: what they may expect depends on it.
const MACHINES: &str = "SCENARIO_MACHINES";

/// How the C programs are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// As users build theirs.
    Plain,
    /// Watched by AddressSanitizer and UndefinedBehaviorSanitizer.
    Address,
    /// Watched by ThreadSanitizer, for data races.
    Thread,
}

impl Build {
    /// The folder of its programs, its sanitizers, and the libraries that they are.
    fn parts(self) -> (&'static str, &'static str, &'static [&'static str]) {
        match self {
            Build::Plain => ("sisci", "", &[]),
            Build::Address => ("sisci-address", "address,undefined", &["libasan", "libubsan"]),
            Build::Thread => ("sisci-thread", "thread", &["libtsan"]),
        }
    }

    /// What its sanitizers are told when a program runs: what they must not report, and why, is
    /// in `tests/c/thread.supp`.
    pub fn environment(self) -> Option<(&'static str, String)> {
        match self {
            Build::Plain => None,
            Build::Address => Some(("ASAN_OPTIONS", "detect_stack_use_after_return=1".into())),
            Build::Thread => {
                let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/thread.supp");
                Some(("TSAN_OPTIONS", format!("halt_on_error=1:suppressions={file}")))
            }
        }
    }

    /// A compiler that builds so, with its flags for a file that is not in the Makefile.
    pub fn compiler(self) -> Command {
        let (_, sanitizers, libraries) = self.parts();
        for library in libraries {
            let file = format!("{library}.so");
            let found = Command::new("gcc").arg(format!("-print-file-name={file}")).output();
            let found = found.unwrap_or_else(|error| panic!("gcc: {error}; install gcc and g++"));
            // gcc repeats the name of a file that it has not got.
            assert!(
                text(&found).trim() != file,
                "gcc has no {file}; install gcc's sanitizers: libgcc-N-dev on Debian (gcc-N has it \
                 with it), {library} on Fedora",
            );
        }
        let mut gcc = Command::new("gcc");
        gcc.args(["-g", "-O1", "-pthread", &format!("-fsanitize={sanitizers}")]);
        gcc.args(["-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]);
        gcc
    }
}

/// Builds the C programs on the library that this test was built with; where they are. Once.
pub fn programs(build: Build) -> &'static Path {
    static BUILT: [OnceLock<PathBuf>; 3] = [const { OnceLock::new() }; 3];
    BUILT[build as usize].get_or_init(|| {
        let (folder, sanitizers, _) = build.parts();
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        // Cargo puts a package's library beside the tests that use it.
        let test = std::env::current_exe().unwrap();
        let library = test.parent().unwrap();
        assert!(library.join("libsisci.so").exists(), "no library in {}", library.display());
        let mut make = Command::new("make");
        make.args(["--silent", "-j2", "-C", env!("CARGO_MANIFEST_DIR")])
            .arg(format!("LIB={}", library.display()))
            .arg(format!("OUT={}", out.display()))
            // Not the environment of a `make test` around this one.
            .env_remove("MAKEFLAGS");
        if build != Build::Plain {
            build.compiler();
            make.args([&format!("SANITIZE={sanitizers}"), "CFLAGS=-O1 -g", "tests"]);
        }
        let made = make.output().expect("make, gcc and g++ are needed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        out
    })
}

/// Hosts with nothing but their segment services.
pub struct Rack {
    folder: tempfile::TempDir,
    build: Build,
    machines: bool,
}

impl Rack {
    /// Starts all of [`HOSTS`].
    pub fn start() -> Rack {
        Rack::of(Build::Plain)
    }

    /// The same, for the programs of a build.
    pub fn of(build: Build) -> Rack {
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let link = Arc::new(ShmLink::new("test", folder.path(), HOSTS.map(|(_, name)| name)));
        for (node, name) in HOSTS {
            start(folder.path(), node, name, Linked { link: link.clone(), machines: false });
        }
        Rack { folder, build, machines: false }
    }

    /// The same with hosts that are machines: they reach each other by TCP alone.
    pub fn of_machines() -> Rack {
        // A scenario says only that the other host does not answer; why, the nodes say.
        let _ = tracing_subscriber::fmt().with_test_writer().with_max_level(Level::INFO).try_init();
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        for ((node, name), link) in HOSTS.into_iter().zip(links_of_machines(folder.path())) {
            start(folder.path(), node, name, Linked { link, machines: true });
        }
        Rack { folder, build: Build::Plain, machines: true }
    }

    /// Where a process on a host finds its node.
    pub fn location(&self, host: &str) -> Location {
        Location { run_dir: self.folder.path().to_owned(), host: host.to_owned() }
    }

    /// A program of [`programs`], to be run on a host.
    pub fn on(&self, host: &str, program: &str) -> Command {
        let program = programs(self.build).join(program);
        let mut command = program_on(self.folder.path(), host, &program, self.build);
        if self.machines {
            command.env(MACHINES, "1");
        }
        command
    }

    /// Runs two programs side by side, which must both succeed; what they printed.
    pub fn both(&self, mut first: Command, mut second: Command) -> [String; 2] {
        let (first, second) = (first.spawn().unwrap(), second.spawn().unwrap());
        let first = std::thread::spawn(move || first.wait_with_output().unwrap());
        let second = second.wait_with_output().unwrap();
        let outputs = [first.join().unwrap(), second];
        let texts = outputs.each_ref().map(text);
        assert!(outputs.iter().all(|output| output.status.success()), "{texts:#?}");
        texts
    }
}

/// The links of [`HOSTS`] that are machines, with a certificate authority in `folder`.
pub fn links_of_machines(folder: &Path) -> [Arc<TcpLink>; 3] {
    let authority = CertificateAuthority::open(folder, "test").unwrap();
    // An address of its own for each rack: a port that was free is nobody else's before its node listens there.
    static RACKS: AtomicU32 = AtomicU32::new(1);
    let (process, rack) = (std::process::id(), RACKS.fetch_add(1, Ordering::Relaxed));
    let loopback = format!("127.{}.{}.{rack}", 1 + process / 256 % 250, process % 256);
    // All at once, so that no two hosts get the same one.
    let listeners = HOSTS.map(|_| TcpListener::bind(format!("{loopback}:0")).unwrap());
    let addresses = listeners.map(|listener| listener.local_addr().unwrap().to_string());
    let ports: Vec<(String, String)> =
        HOSTS.iter().map(|(_, name)| (*name).to_owned()).zip(addresses).collect();
    HOSTS.map(|(_, name)| {
        let credentials = authority.issue(&Subject::Node(name.to_owned())).unwrap();
        let address = &ports.iter().find(|(host, _)| host == name).unwrap().1;
        let credentials = Arc::new(RwLock::new(credentials));
        let link = TcpLink::new("test", address, address, credentials);
        let others = ports.clone();
        link.locate_by(move |host| {
            let found = others.iter().find(|(name, _)| name == host);
            found.map(|(_, address)| format!("{SCHEME}{address}"))
        });
        Arc::new(link)
    })
}

/// Runs a scenario of two processes on two machines, each way round.
pub fn between_machines(scenario: &str) {
    let rack = Rack::of_machines();
    for (owner_host, owner_node, peer_host) in [("alpha", "4", "beta"), ("beta", "8", "alpha")] {
        let peer_node = if peer_host == "beta" { "8" } else { "4" };
        let mut owner = rack.on(owner_host, &format!("tests/{scenario}"));
        owner.args(["owner", peer_node]);
        let mut peer = rack.on(peer_host, &format!("tests/{scenario}++"));
        peer.args(["peer", owner_node]);
        rack.both(owner, peer);
    }
}

/// A program that was built so, to be run on a host of the rack in `run_dir`.
fn program_on(run_dir: &Path, host: &str, program: &Path, build: Build) -> Command {
    let mut command = match build == Build::Thread && addresses_are_spread() {
        false => Command::new(program),
        true => {
            let mut command = Command::new("setarch");
            command.arg("--addr-no-randomize").arg(program);
            command
        }
    };
    command
        .env("RACKBUS_RUN_DIR", run_dir)
        .env("RACKBUS_HOST", host)
        // Cargo's leads to the library of the last build, which may be an older one.
        .env_remove("LD_LIBRARY_PATH")
        .envs(build.environment())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Whether the system maps files where ThreadSanitizer of gcc before 14 does not expect any.
fn addresses_are_spread() -> bool {
    let bits = std::fs::read_to_string("/proc/sys/vm/mmap_rnd_bits").unwrap_or_default();
    bits.trim().parse::<u32>().is_ok_and(|bits| bits > 28)
}

/// All that a program printed.
pub fn text(output: &Output) -> String {
    let mut all = output.stdout.clone();
    all.extend_from_slice(&output.stderr);
    String::from_utf8_lossy(&all).into_owned()
}

/// How hosts reach each other.
struct Linked {
    link: Arc<dyn Link>,
    machines: bool,
}

fn start(run_dir: &Path, node: u32, name: &'static str, link: Linked) {
    let folder = run_dir.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let range = |node: u32| HostRange { base: u64::from(node) << 40, size: 64 << 30 };
    let settings = DirectorySettings {
        node,
        hosts: HOSTS.iter().map(|(node, name)| (*node, (*name).to_owned())).collect(),
        range: range(node),
        ranges: HOSTS.iter().map(|(node, _)| (*node, range(*node))).collect(),
        rules: Default::default(),
        machines: link.machines,
    };
    let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
    let service = Segments::new("test", name, link.link.clone(), settings, fabric);
    service.start(&folder).unwrap();
    let listener = link.link.listen(name).unwrap();
    std::thread::spawn(move || {
        while let Ok(caller) = listener.accept() {
            let service = service.clone();
            std::thread::spawn(move || {
                if let Some(incoming) = caller.hear() {
                    service.attend(incoming);
                }
            });
        }
    });
}
