//! What a process has left when its host's node is killed: here another process, which this test runs as itself.

mod support;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rackbus_attach::{InterruptError, Location, Session};
use support::Rack;

/// Where the process that has the nodes says in which folder they are.
const SAYS: &str = "RACKBUS_TEST_NODES";

/// How long nodes may take to start, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Nodes in a process of their own, which can be killed.
struct Nodes {
    process: Child,
    run_dir: PathBuf,
}

impl Nodes {
    fn start(test: &str) -> Nodes {
        let folder = tempfile::Builder::new().prefix("rb-").tempdir_in("/tmp").unwrap();
        let says = folder.path().join("nodes");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(SAYS, &says).stdout(Stdio::null());
        // It ends when this process does, however that comes: nobody writes any more then.
        let mut process = command.stdin(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while !says.exists() {
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none() && begun.elapsed() < PATIENCE, "no nodes: {ended:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let run_dir = PathBuf::from(std::fs::read_to_string(&says).unwrap());
        Nodes { process, run_dir }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // A test that failed leaves neither behind.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.run_dir);
    }
}

/// Has the nodes, where this is the process for that, until it is killed.
fn be_nodes() {
    let Some(says) = std::env::var_os(SAYS) else { return };
    let rack = Rack::start();
    let written = Path::new(&says).with_extension("new");
    std::fs::write(&written, rack.location("alpha").run_dir.to_str().unwrap()).unwrap();
    std::fs::rename(written, says).unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    std::process::exit(0);
}

#[test]
fn waiting_for_an_interrupt_fails_when_the_node_is_gone() {
    be_nodes();
    let mut nodes = Nodes::start("waiting_for_an_interrupt_fails_when_the_node_is_gone");
    let place = Location { run_dir: nodes.run_dir.clone(), host: "alpha".into() };
    let session = Session::open(&place).unwrap();
    let plain = session.create_interrupt(None, false, false).unwrap();
    let data = session.create_data_interrupt(None).unwrap();
    let triggered = session.create_interrupt(None, false, true).unwrap();
    let sent = session.create_data_interrupt(None).unwrap();
    let trigger = session.connect_interrupt(4, triggered.number(), 3_000).unwrap();
    let sender = session.connect_data_interrupt(4, sent.number(), 3_000).unwrap();
    (0..2).for_each(|_| trigger.trigger().unwrap());
    sender.send(b"last").unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| plain.wait(None));
        let receives = scope.spawn(|| data.receive(&mut [0; 64], None));
        std::thread::sleep(Duration::from_millis(50));
        nodes.kill();
        assert_eq!(waits.join().unwrap(), Err(InterruptError::Gone));
        assert_eq!(receives.join().unwrap(), Err(InterruptError::Gone));
    });
    // What came before is still there, and nothing comes after it, though who sends has the memory still.
    assert_eq!(trigger.trigger(), Err(InterruptError::Unreachable));
    assert_eq!(sender.send(b"late"), Err(InterruptError::Unreachable));
    let taken = [(); 3].map(|()| triggered.wait(None));
    assert_eq!(taken, [Ok(()), Ok(()), Err(InterruptError::Gone)]);
    let mut buffer = [0; 64];
    assert_eq!(sent.receive(&mut buffer, None), Ok(4));
    assert_eq!(sent.receive(&mut buffer, None), Err(InterruptError::Gone));
}
