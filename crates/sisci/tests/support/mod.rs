//! A rack of segment services inside of the test's process, and C programs that run on its hosts.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, OnceLock};

use rackbus_link::shm::{ShmLink, ShmListener, hear};
use rackbus_node::segments::Segments;
use rackbus_segment::directory::{HostRange, Settings};

/// The hosts: their node ids and names.
pub const HOSTS: [(u32, &str); 3] = [(4, "alpha"), (8, "beta"), (12, "gamma")];

/// Builds the C programs on the library that this test was built with; where they are. Once.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sisci");
        // Cargo puts a package's library beside the tests that use it.
        let test = std::env::current_exe().unwrap();
        let library = test.parent().unwrap();
        assert!(library.join("libsisci.so").exists(), "no library in {}", library.display());
        let made = Command::new("make")
            .args(["--silent", "-j2", "-C", env!("CARGO_MANIFEST_DIR")])
            .arg(format!("LIB={}", library.display()))
            .arg(format!("OUT={}", out.display()))
            // Not the environment of a `make test` around this one.
            .env_remove("MAKEFLAGS")
            .output()
            .expect("make, gcc and g++ are needed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        out
    })
}

/// Hosts with nothing but their segment services.
pub struct Rack(tempfile::TempDir);

impl Rack {
    /// Starts all of [`HOSTS`].
    pub fn start() -> Rack {
        let rack = Rack(tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap());
        for (node, name) in HOSTS {
            start(rack.0.path(), node, name);
        }
        rack
    }

    /// A program of [`programs`], to be run on a host.
    pub fn on(&self, host: &str, program: &str) -> Command {
        let mut command = Command::new(programs().join(program));
        command
            .env("RACKBUS_RUN_DIR", self.0.path())
            .env("RACKBUS_HOST", host)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
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

/// All that a program printed.
pub fn text(output: &Output) -> String {
    let mut all = output.stdout.clone();
    all.extend_from_slice(&output.stderr);
    String::from_utf8_lossy(&all).into_owned()
}

fn start(run_dir: &Path, node: u32, name: &'static str) {
    let folder = run_dir.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let range = |node: u32| HostRange { base: u64::from(node) << 40, size: 64 << 30 };
    let settings = Settings {
        node,
        hosts: HOSTS.iter().map(|(node, name)| (*node, (*name).to_owned())).collect(),
        range: range(node),
        ranges: HOSTS.iter().map(|(node, _)| (*node, range(*node))).collect(),
        rules: Default::default(),
    };
    let service = Segments::new("test", name, run_dir, Arc::new(ShmLink), settings);
    service.start(&folder).unwrap();
    let listener = ShmListener::bind(&folder.join("link.sock")).unwrap();
    std::thread::spawn(move || {
        while let Ok(stream) = listener.accept() {
            let service = service.clone();
            std::thread::spawn(move || {
                if let Some(incoming) = hear(stream, "test", name) {
                    service.attend(incoming);
                }
            });
        }
    });
}
