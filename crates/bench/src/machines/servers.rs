//! Drives of other machines as other systems have them: NBD and iSCSI, by their own servers and clients.
//!
//! Each server has its data in memory and listens on the loopback, as the link does here. They speak plain TCP, and the link
//! TLS: what encryption costs is in the link's figures alone.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rackbus_memory::SharedMemory;

use crate::lent;
use crate::machine::CLIENT_CPU;
use crate::nvme::ClientLoad;
use crate::peers::{self, PeerServer, free_port};
use crate::raw::STORE;
use crate::report::Case;
use crate::{BenchError, Report};

use super::{Borrowed, CASES, Settings, failed};

/// What iSCSI counts in, bytes.
const BLOCK: usize = 512;
/// The target that is served to whoever comes.
const TARGET: &str = "iqn.2026-11.rackbus:bench";

/// A server of another system, and how its client puts a load on it.
struct BlockServer {
    name: &'static str,
    port: String,
    client: BlockClient,
    _server: PeerServer,
}

enum BlockClient {
    /// fio's own engine for NBD, with the export's name.
    Nbd(&'static str),
    /// libiscsi's `iscsi-perf`, which knows the target by itself.
    Iscsi,
}

impl BlockServer {
    /// nbdkit with its plugin that keeps data in memory.
    fn nbdkit() -> Result<BlockServer, BenchError> {
        let port = free_port()?;
        let size = format!("size={STORE}");
        let arguments = ["-f", "-i", "127.0.0.1", "-p", &port, "memory", &size];
        let server = serve("nbdkit", &arguments, &port)?;
        let client = BlockClient::Nbd("");
        Ok(BlockServer { name: "nbdkit, fio nbd", port, client, _server: server })
    }

    /// QEMU's storage daemon with a file in memory.
    fn qemu(file: &Path) -> Result<BlockServer, BenchError> {
        let port = free_port()?;
        let node = format!("driver=file,filename={},node-name=n", file.display());
        let listen = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}");
        let export = "type=nbd,id=e,node-name=n,writable=on";
        let arguments = ["--blockdev", &node, "--nbd-server", &listen, "--export", export];
        let server = serve("qemu-storage-daemon", &arguments, &port)?;
        let client = BlockClient::Nbd("n");
        Ok(BlockServer { name: "qemu-storage-daemon, fio nbd", port, client, _server: server })
    }

    /// The Linux SCSI target framework's daemon with a file in memory.
    fn tgt(dir: &Path, file: &Path) -> Result<BlockServer, BenchError> {
        let port = free_port()?;
        let control = dir.join("tgtd");
        let portal = format!("portal=127.0.0.1:{port}");
        let arguments = ["-f", "--iscsi", &portal];
        let place = ("TGT_IPC_SOCKET", control.as_path());
        let mut command = PeerServer::command("tgtd", &arguments);
        command.env(place.0, place.1).stderr(Stdio::null());
        let server = PeerServer::run(command, "tgtd", || answers(&port))?;
        let file = file.display().to_string();
        let steps: [&[&str]; 3] = [
            &["--mode", "target", "--op", "new", "--tid", "1", "-T", TARGET],
            &["--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", "1", "-b", &file],
            &["--mode", "target", "--op", "bind", "--tid", "1", "-I", "ALL"],
        ];
        for step in steps {
            let output = Command::new("tgtadm")
                .args(["--lld", "iscsi"])
                .args(step)
                .env(place.0, place.1)
                .output()
                .map_err(BenchError::io("running tgtadm"))?;
            if !output.status.success() {
                return Err(failed(String::from_utf8_lossy(&output.stderr)));
            }
        }
        let client = BlockClient::Iscsi;
        Ok(BlockServer { name: "tgt, libiscsi", port, client, _server: server })
    }

    /// Operations of a load in a second.
    fn rate(&self, load: &ClientLoad, time: Duration) -> Result<f64, BenchError> {
        match self.client {
            BlockClient::Nbd(export) => {
                let target = format!("--uri=nbd://127.0.0.1:{}/{export}", self.port);
                Ok(peers::fio(load, "nbd", &target, STORE as u64, time)?.iops)
            }
            BlockClient::Iscsi => iscsi(load, &self.port, time),
        }
    }
}

/// Starts a server, and waits until it listens.
fn serve(program: &str, arguments: &[&str], port: &str) -> Result<PeerServer, BenchError> {
    PeerServer::run(PeerServer::command(program, arguments), program, || answers(port))
}

fn answers(port: &str) -> bool {
    TcpStream::connect(format!("127.0.0.1:{port}")).is_ok()
}

/// Operations in a second by `iscsi-perf`, which counts whole seconds.
fn iscsi(load: &ClientLoad, port: &str, time: Duration) -> Result<f64, BenchError> {
    let mut command = Command::new("taskset");
    command.args(["-c", &CLIENT_CPU.to_string(), "iscsi-perf"]);
    command.args(["-m", &load.depth.to_string(), "-b", &(load.bytes / BLOCK).to_string()]);
    command.args(["-t", &time.as_secs_f64().ceil().max(1.0).to_string()]);
    if load.random {
        command.arg("-r");
    }
    command.arg(format!("iscsi://127.0.0.1:{port}/{TARGET}/1"));
    let output = command.output().map_err(BenchError::io("running iscsi-perf"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // The last of them is of the whole run: `iops average 19438 (75 MB/s)`.
    let average = text.rsplit("iops average ").next().and_then(|rest| rest.split(' ').next());
    let rate = average.and_then(|rate| rate.parse().ok()).filter(|rate| *rate > 0.0);
    rate.ok_or_else(|| {
        let complaint = String::from_utf8_lossy(&output.stderr);
        BenchError::Peer(format!("iscsi-perf gave no figure: {text} {complaint}"))
    })
}

/// A case of reads over the link, against the same reads from each server that is installed.
pub(super) fn against(
    borrowed: &mut Borrowed,
    settings: &Settings,
    report: &mut Report,
) -> Result<(), BenchError> {
    let Settings { dir, time, runs, .. } = settings;
    let memory = SharedMemory::create("store", STORE as u64).map_err(failed)?;
    let file = memory.descriptor().map_err(BenchError::io("opening a file in memory"))?;
    let file = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    type Start<'a> = Box<dyn Fn() -> Result<BlockServer, BenchError> + 'a>;
    let servers: [(&[&str], Start<'_>); 3] = [
        (&["nbdkit", "fio"], Box::new(BlockServer::nbdkit)),
        (&["qemu-storage-daemon", "fio"], Box::new(|| BlockServer::qemu(&file))),
        (&["tgtd", "tgtadm", "iscsi-perf"], Box::new(|| BlockServer::tgt(dir, &file))),
    ];
    for (programs, start) in servers {
        if let Some(missing) = programs.iter().find(|it| !peers::installed(it)) {
            report.left_out(programs[0], &format!("{missing} is not installed"));
            continue;
        }
        let mut server = None;
        for (case, load, is_latency) in CASES {
            if !format!("{case}, {}", programs[0]).contains(&settings.only) {
                continue;
            }
            let server: &BlockServer = match &mut server {
                Some(server) => server,
                none => none.insert(start()?),
            };
            let unit = if is_latency { "us" } else { "kIOPS" };
            let figure = |rate: f64| if is_latency { 1e6 / rate } else { rate / 1e3 };
            report.compare(
                Case { area: "machines", case, peer_name: server.name, unit, runs: *runs },
                || Ok(figure(lent::run_anywhere(&mut borrowed.drive, &load, *time)?)),
                || Ok(figure(server.rate(&load, *time)?)),
                |ours, peer| ours / peer,
            )?;
        }
    }
    Ok(())
}
