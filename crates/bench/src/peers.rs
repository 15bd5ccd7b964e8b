//! Other systems, through their own programs. One that is not installed is left out, with a note.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::BenchError;
use crate::machine::{CLIENT_CPU, SERVER_CPU};
use crate::nvme::ClientLoad;

/// Whether a program is installed.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// A port where nobody listens.
///
/// # Errors
/// When there is none.
pub fn free_port() -> Result<String, BenchError> {
    let failed = "finding a free port";
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(BenchError::io(failed))?;
    Ok(listener.local_addr().map_err(BenchError::io(failed))?.port().to_string())
}

/// What fio reports of a run.
#[derive(Debug, Clone, Copy)]
pub struct FioResult {
    /// Operations that completed each second.
    pub iops: f64,
    /// Mean latency from submission to completion in microseconds, without fio's own loop.
    pub mean_us: f64,
}

/// Runs fio with `load` on `target` (`--filename=…` or `--uri=…`) by `engine`.
///
/// # Errors
/// When fio fails or its report cannot be read.
pub fn fio(
    load: &ClientLoad,
    engine: &str,
    target: &str,
    size: u64,
    time: Duration,
) -> Result<FioResult, BenchError> {
    let direction = if load.write { "write" } else { "read" };
    let pattern = if load.random { format!("rand{direction}") } else { direction.to_owned() };
    let output = Command::new("fio")
        .args(["--name=bench", "--output-format=json", "--time_based", "--thread"])
        .args(["--norandommap", "--random_generator=lfsr", "--invalidate=0", "--fadvise_hint=0"])
        .arg(format!("--ioengine={engine}"))
        .arg(target)
        .arg(format!("--size={size}"))
        .arg(format!("--rw={pattern}"))
        .arg(format!("--bs={}", load.bytes))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--runtime={}ms", time.as_millis().max(1000)))
        .arg(format!("--cpus_allowed={CLIENT_CPU}"))
        .output()
        .map_err(BenchError::io("running fio"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.find('{').map_or("", |at| &text[at..]);
    let report: serde_json::Value = serde_json::from_str(report).map_err(|error| {
        let complaint = String::from_utf8_lossy(&output.stderr);
        BenchError::Peer(format!("fio {engine} gave no report ({error}): {complaint}"))
    })?;
    let job = &report["jobs"][0][direction];
    match (job["iops"].as_f64(), job["lat_ns"]["mean"].as_f64()) {
        (Some(iops), Some(mean_ns)) if iops > 0.0 => {
            Ok(FioResult { iops, mean_us: mean_ns / 1000.0 })
        }
        _ => Err(BenchError::Peer(format!("fio {engine} did nothing"))),
    }
}

/// A server of another system, ended when dropped.
#[derive(Debug)]
pub struct PeerServer(Child);

impl PeerServer {
    /// A command of `program` that is pinned to the server's processor.
    pub fn command(program: &str, arguments: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", &SERVER_CPU.to_string(), program]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Starts `program`, pinned to the server's processor, and waits for `socket`.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(program: &str, arguments: &[String], socket: &Path) -> Result<Self, BenchError> {
        PeerServer::run(PeerServer::command(program, arguments), program, || socket.exists())
    }

    /// Starts `program` by this command, and waits until it is up.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn run(
        mut command: Command,
        program: &str,
        is_up: impl Fn() -> bool,
    ) -> Result<Self, BenchError> {
        let child = command.spawn().map_err(BenchError::io(format!("starting {program}")))?;
        let mut server = PeerServer(child);
        let start = Instant::now();
        while !is_up() {
            let ended = server.0.try_wait().map_err(BenchError::io(program))?.is_some();
            if ended || start.elapsed() > Duration::from_secs(5) {
                return Err(BenchError::Peer(format!("{program} did not come up")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// nbdkit with `size` bytes of memory.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn nbdkit(socket: &Path, size: u64) -> Result<Self, BenchError> {
        let at = socket.display().to_string();
        let arguments = ["-f", "-U", &at, "memory", &format!("size={size}")];
        PeerServer::start("nbdkit", &arguments.map(str::to_owned), socket)
    }

    /// qemu-storage-daemon with a vhost-user-blk export of the block node that `node` describes.
    ///
    /// # Errors
    /// When it does not come up.
    #[cfg(feature = "peers")]
    pub fn qemu_storage_daemon(socket: &Path, node: &str) -> Result<Self, BenchError> {
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=n,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        );
        let node = format!("{node},node-name=n");
        let arguments = ["--blockdev".to_owned(), node, "--export".to_owned(), export];
        PeerServer::start("qemu-storage-daemon", &arguments, socket)
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
