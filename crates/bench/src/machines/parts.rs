//! Processes that are measured against each other: etcd, control planes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rackbus_identity::rustls::ClientConfig;
use rackbus_identity::{CertificateAuthority, CertificateRequest, Certified, Subject};

use super::failed;
use super::network::free_address;
use crate::BenchError;

/// In a second, of what Linux says of processor time.
const USER_HZ: f64 = 100.0;

/// A process that ends with this.
pub(super) struct RunningPart(Child);

impl Drop for RunningPart {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl RunningPart {
    pub(super) fn start(command: &mut Command) -> Result<RunningPart, BenchError> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.spawn().map(RunningPart).map_err(BenchError::io("starting a process"))
    }

    /// Seconds of processor time so far, and bytes that it has in memory.
    pub(super) fn used(&self) -> Result<(f64, u64), BenchError> {
        let of = |what: &str| {
            std::fs::read_to_string(format!("/proc/{}/{what}", self.0.id()))
                .map_err(BenchError::io("reading what a process uses"))
        };
        let (stat, status) = (of("stat")?, of("status")?);
        let fields: Vec<&str> =
            stat.rsplit(") ").next().unwrap_or_default().split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|it| it.parse::<f64>().ok()).unwrap_or(0.0);
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
        Ok(((ticks(11) + ticks(12)) / USER_HZ, kib.unwrap_or(0) << 10))
    }
}

/// Starts a member of etcd that keeps its state in `dir`, and its URL; `None` where there is no etcd.
///
/// # Errors
/// When it cannot be started.
pub(super) fn etcd(dir: &Path) -> Result<Option<(RunningPart, String)>, BenchError> {
    let known = std::env::var_os("RACKBUS_ETCD").map(PathBuf::from);
    let cached =
        std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/rackbus/etcd/run/etcd"));
    let Some(program) = known.or(cached).filter(|it| it.is_file()) else { return Ok(None) };
    let (client, peer) = (free_address()?, free_address()?);
    let mut command = Command::new(program);
    command.args(["--name", "e1", "--log-level", "error", "--data-dir"]).arg(dir.join("etcd"));
    let (client, peer) = (format!("http://{client}"), format!("http://{peer}"));
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("e1={peer}")]).stderr(Stdio::null());
    Ok(Some((RunningPart::start(&mut command)?, client)))
}

/// What shows to a control plane that whoever asks is `subject`: signed by the rack's own authority.
///
/// # Errors
/// When that does not sign it.
pub(super) fn shown(
    authority: &CertificateAuthority,
    subject: Subject,
) -> Result<Arc<ClientConfig>, BenchError> {
    let certified = Certified::new(subject, Duration::from_secs(3600));
    let request = CertificateRequest::new().map_err(failed)?;
    let signed = authority.sign(&certified, request.text()).map_err(failed)?;
    Ok(request.answered(&signed).map_err(failed)?.client().clone())
}

/// A new authority of `rack`, which a control plane with the state directory `state` finds at its first start.
///
/// # Errors
/// When it cannot be written there.
pub(super) fn first_authority(
    state: &Path,
    rack: &str,
) -> Result<CertificateAuthority, BenchError> {
    let folder = state.join("identity");
    std::fs::create_dir_all(&folder).map_err(BenchError::io("making a state directory"))?;
    CertificateAuthority::open(&folder, rack).map_err(failed)
}
