//! Takes a function out of the VM that uses it, as a person would pull a card: the guest is asked,
//! and releases the device in order.

use std::path::{Path, PathBuf};

use rackbus_lease::TurnUse;
use rackbus_vm::{InterruptChoice, Vm, VmError, registry};

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

    /// Takes out of the host's VMs what an earlier life of this node served, beside: nobody answers
    /// for it any more, and QEMU ends at the next change of its memory mappings, a reset of the VM,
    /// while such a function is plugged in.
    pub fn unplug_orphans(&self) {
        let sockets = registry::noted_sockets(&self.run_dir, &self.host);
        if sockets.is_empty() {
            return;
        }
        let unplugger = self.clone();
        let work = move || sockets.iter().for_each(|socket| unplugger.unplug(socket));
        if let Err(error) = std::thread::Builder::new().name("unplug".into()).spawn(work) {
            tracing::error!(%error, "cannot start a thread to unplug functions that nobody serves any more");
        }
    }

    /// Hot-adds the function behind `socket` to a VM of the host.
    ///
    /// # Errors
    /// What that means for the turn that it was for.
    pub fn plug(&self, vm: &str, function: &str, socket: &Path) -> Result<(), TurnUse> {
        let added = registry::find(&self.run_dir, &self.host, vm)
            .and_then(|record| Vm::attach(record).hot_add(function, socket));
        match added {
            Ok(device) => {
                tracing::info!(vm, device, "hot-added");
                Ok(())
            }
            // Nor will it be possible the next time.
            Err(error @ (VmError::NoSuchVm { .. } | VmError::NoFreePort(_))) => {
                tracing::warn!(vm, function, %error, "the function cannot be hot-added and is not tried again");
                Err(TurnUse::Gone(error.to_string()))
            }
            Err(error) => {
                tracing::warn!(vm, function, %error, "the function cannot be hot-added in this turn");
                Err(TurnUse::Unused)
            }
        }
    }

    /// Hot-removes the function behind `socket` from its VM and waits until the guest has released it.
    /// A user that is no VM of ours (another program, a QEMU started by hand) is left to see the
    /// connection close.
    pub fn unplug(&self, socket: &Path) {
        if InterruptChoice::noted(socket) == InterruptChoice::MsixKept {
            tracing::info!(socket = %socket.display(), "shown with MSI-X: it stays until its VM ends");
            return;
        }
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
            Err(error) => {
                tracing::warn!(vm, device, %error, "the guest did not release the function")
            }
        }
    }
}
