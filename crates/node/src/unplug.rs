//! Takes a function out of the VM that uses it, as a person would pull a card: the guest is asked,
//! and lets go of the device in order.

use std::path::{Path, PathBuf};

use rackbus_vm::{Vm, registry};

/// Finds a host's VMs by the vfio-user sockets they use.
#[derive(Debug, Clone)]
pub struct Unplugger {
    run_dir: PathBuf,
    host: String,
}

impl Unplugger {
    /// For the VMs of `host` in the rack's run directory.
    pub fn new(run_dir: &Path, host: &str) -> Self {
        Unplugger { run_dir: run_dir.to_owned(), host: host.to_owned() }
    }

    /// Hot-removes the function behind `socket` from its VM and waits until the guest has let go.
    /// A user that is no VM of ours (another program, a QEMU started by hand) is left to see the
    /// connection close.
    pub fn unplug(&self, socket: &Path) {
        let found = match registry::find_by_socket(&self.run_dir, &self.host, socket) {
            Ok(Some(found)) => found,
            Ok(None) => {
                tracing::info!(socket = %socket.display(), "used by no VM of this host's");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "the host's VMs cannot be looked through");
                return;
            }
        };
        let (record, device) = found;
        let vm = record.name.clone();
        match Vm::attach(record).hot_remove(&device) {
            Ok(()) => tracing::info!(vm, device, "hot-removed"),
            Err(error) => tracing::warn!(vm, device, %error, "the guest did not let go"),
        }
    }
}
