//! Ends leases with the VM that used them: a VM that powered off, was quit or crashed gives nothing
//! back by itself. Who is not a VM of this host's (a program, a QEMU that somebody started by hand)
//! may come again, and its lease stays.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_control::{Client, ClientError};
use rackbus_vm::registry;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How long until a control plane that does not answer is asked again: at first, and at most.
const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// Watches the VMs of one host.
#[derive(Debug)]
pub struct Users {
    run_dir: PathBuf,
    host: String,
    client: Client,
    runtime: tokio::runtime::Handle,
}

impl Users {
    /// For the VMs of `host` in the rack's run directory. To be called inside of a tokio runtime.
    pub fn new(run_dir: &Path, host: &str, client: Client) -> Self {
        let runtime = tokio::runtime::Handle::current();
        Users { run_dir: run_dir.to_owned(), host: host.to_owned(), client, runtime }
    }

    /// Process `process` uses the function of `lease` at `socket` from now on. If it is a VM, the
    /// lease is returned when it ends, unless `lease_ended` says then that there is nothing to return.
    pub fn watch(
        &self,
        lease: u64,
        socket: &Path,
        process: u32,
        lease_ended: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        let Some(vm) = registry::noted_with(&self.run_dir, &self.host, socket) else { return };
        let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
        let watched = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let ended = match watched {
            Some(Ok(ended)) => ended,
            other => {
                tracing::warn!(vm, process, ?other, "the VM cannot be watched: its lease stays");
                return;
            }
        };
        let (client, runtime) = (self.client.clone(), self.runtime.clone());
        let wait = move || {
            if let Err(error) = wait_readable(&ended) {
                tracing::warn!(vm, process, %error, "the VM cannot be watched: its lease stays");
                return;
            }
            if !lease_ended() {
                tracing::info!(vm, lease, "the VM has ended; what it borrowed goes back");
                runtime.block_on(give_back(&client, lease, lease_ended));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("vm watch".into()).spawn(wait) {
            tracing::error!(%error, process, "no thread to watch a VM: its lease stays");
        }
    }
}

/// Waits for a process to end: its descriptor is readable then.
fn wait_readable(process: &OwnedFd) -> rustix::io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(process, PollFlags::IN)], None) {
            Err(Errno::INTR) => {}
            outcome => return outcome.map(drop),
        }
    }
}

/// Returns a lease. While the control plane does not answer, it is asked again.
async fn give_back(client: &Client, lease: u64, lease_ended: impl Fn() -> bool) {
    let [mut wait, most] = AGAIN;
    while !lease_ended() {
        match client.give_back(lease).await {
            Ok(_) => return,
            Err(ClientError::Refused(refused)) if refused.code != "not_stored" => {
                // It has ended otherwise meanwhile, or is ending.
                tracing::debug!(lease, error = refused.error, "not returned");
                return;
            }
            Err(error) => tracing::debug!(lease, %error, "not returned yet"),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(most);
    }
}
