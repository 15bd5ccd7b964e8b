//! DPDK's packets between two processes through shared memory, one `dpdk-testpmd` that sends and one that receives: by
//! memif, and by vhost-user between a driver of virtio in one process and its device in the other.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::traffic::PacketResult;
use crate::BenchError;
use crate::machine::processor_time;

const PROGRAM: &str = "dpdk-testpmd";
/// How long both take to start and to find each other.
const START: Duration = Duration::from_secs(3);

/// Whether it is there, with its libraries.
pub fn is_there() -> bool {
    let mut asks = Command::new(PROGRAM);
    let answer = asks.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    // What it answers itself is no success either; a loader that misses a library says 127.
    answer.is_ok_and(|status| status.code() != Some(127))
}

/// The virtual link between the two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DpdkLink {
    /// DPDK's memif: rings in shared memory between two processes.
    Memif,
    /// Vhost-user, from the driver to the device.
    FromDriver,
    /// Vhost-user, from the device to the driver.
    ToDriver,
}

impl DpdkLink {
    /// The devices of the process that makes the socket, and of the one that connects to it.
    fn devices(self, socket: &Path) -> [String; 2] {
        let socket = socket.display();
        let memif = |role| {
            format!("net_memif0,role={role},id=0,socket={socket},socket-abstract=no,bsize=2048")
        };
        match self {
            DpdkLink::Memif => [memif("server"), memif("client")],
            DpdkLink::FromDriver | DpdkLink::ToDriver => {
                [format!("net_vhost0,iface={socket}"), format!("net_virtio_user0,path={socket}")]
            }
        }
    }
}

/// Bytes of the data of DPDK's buffers: longer packets are in several.
const BUFFER: usize = 2048;

/// Packets in several buffers are sent (`RTE_ETH_TX_OFFLOAD_MULTI_SEGS`).
const SEVERAL_BUFFERS: &str = "--tx-offloads=0x8000";

/// The lengths of the parts of a packet, as `testpmd` takes them.
fn parts(bytes: usize) -> String {
    let whole = std::iter::repeat_n(BUFFER, bytes / BUFFER);
    let rest = Some(bytes % BUFFER).filter(|rest| *rest > 0);
    whole.chain(rest).map(|part| part.to_string()).collect::<Vec<_>>().join(",")
}

/// Packets of so many bytes that come out, over some seconds.
///
/// # Errors
/// When either does not run, or nothing comes out.
pub fn packets(
    dir: &Path,
    way: DpdkLink,
    bytes: usize,
    time: Duration,
) -> Result<PacketResult, BenchError> {
    // DPDK does not find the directory of a relative path.
    let socket = std::path::absolute(dir.join("dpdk.sock"));
    let socket = socket.map_err(BenchError::io("finding the work directory"))?;
    let _ = std::fs::remove_file(&socket);
    let devices = way.devices(&socket);
    let mut sends = vec!["--forward-mode=txonly".to_owned(), format!("--txpkts={}", parts(bytes))];
    if bytes > BUFFER {
        sends.push(SEVERAL_BUFFERS.to_owned());
    }
    let receives = ["--forward-mode=rxonly".to_owned()];
    let modes = match way {
        DpdkLink::ToDriver => [&sends[..], &receives[..]],
        DpdkLink::Memif | DpdkLink::FromDriver => [&receives[..], &sends[..]],
    };
    let first = start("first", &devices[0], "--main-lcore=0", modes[0])?;
    std::thread::sleep(START);
    let second = start("second", &devices[1], "--main-lcore=1", modes[1])?;
    std::thread::sleep(START);
    let (before, begun) = (first.processor_time() + second.processor_time(), Instant::now());
    std::thread::sleep(time.max(Duration::from_secs(3)));
    let worked = (first.processor_time() + second.processor_time()).saturating_sub(before);
    let took = begun.elapsed();
    let (sender, receiver) = match way {
        DpdkLink::ToDriver => (first, second),
        DpdkLink::Memif | DpdkLink::FromDriver => (second, first),
    };
    drop(sender);
    let told = receiver.end()?;
    let rates = told.lines().filter_map(|line| {
        let rate = line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?;
        rate.parse::<f64>().ok().filter(|rate| *rate > 0.0)
    });
    // The first interval began before the sender did.
    let rates: Vec<f64> = rates.skip(1).collect();
    match rates.is_empty() {
        true => Err(BenchError::Peer(format!("no packets came through DPDK's {way:?}"))),
        false => {
            let packets = crate::report::median(&rates) * took.as_secs_f64();
            Ok(PacketResult::of(packets as u64, bytes, took, worked))
        }
    }
}

/// One of both; killed when it is dropped.
struct Running(Option<Child>);

fn start(role: &str, device: &str, core: &str, mode: &[String]) -> Result<Running, BenchError> {
    let device = format!("--vdev={device}");
    let prefix = format!("--file-prefix=rackbus-{role}-{}", std::process::id());
    let child = Command::new(PROGRAM)
        .args(["--no-pci", "--no-huge", "-m", "256", "-l", "0,1", &prefix, &device, core])
        .args(["--", "--total-num-mbufs=8192", "--stats-period=1"])
        .args(mode)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    Ok(Running(Some(child.map_err(BenchError::io(format!("starting {PROGRAM}")))?)))
}

impl Running {
    /// Processor time of its threads so far.
    fn processor_time(&self) -> Duration {
        self.0.as_ref().map_or(Duration::ZERO, |child| processor_time(child.id()))
    }

    /// Ends it; what it printed.
    fn end(mut self) -> Result<String, BenchError> {
        let child = self.0.take().expect("it was started");
        // Asked to end, it writes what it has printed so far. One that has ended by itself is waited for anyway.
        let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        let output = child.wait_with_output().map_err(BenchError::io("ending DPDK"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
