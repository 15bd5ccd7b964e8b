//! Takes a function out of the VM that uses it, as a person would pull a card: the guest is asked,
//! and releases the device in order.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rackbus_lease::TurnUse;
use rackbus_vm::registry::VmRecord;
use rackbus_vm::{Assets, InterruptChoice, UNPLUG, Vm, VmError, interrupts, registry};

/// How long until VMs are looked through again, where that failed.
const LOOK: Duration = Duration::from_millis(100);

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
        let vms = registry::list(&self.run_dir, &self.host).unwrap_or_default();
        for record in vms.into_iter().filter(|record| record.noted().is_ok_and(|it| !it.is_empty()))
        {
            // A thread for each: a guest that does not answer keeps no other one waiting.
            let work = move || unplug_all(record);
            if let Err(error) = std::thread::Builder::new().name("unplug".into()).spawn(work) {
                tracing::error!(%error, "cannot start a thread to unplug functions that nobody serves any more");
            }
        }
    }

    /// Hot-adds the function behind `socket` to a VM of the host, with MSI-X where the VM's QEMU is known to unplug that.
    ///
    /// # Errors
    /// When there is no such VM, it has no port free, or its QEMU refuses.
    pub fn plug(&self, vm: &str, function: &str, socket: &Path) -> Result<(), VmError> {
        let record = registry::find(&self.run_dir, &self.host, vm)?;
        show(&record, socket);
        let device = Vm::attach(record).hot_add(function, socket)?;
        tracing::info!(vm, device, "hot-added");
        Ok(())
    }

    /// Hot-removes the function behind `socket` from its VM and waits until the guest has released it, while `left` says
    /// that there is time.
    /// A user that is no VM of ours (another program, a QEMU started by hand) is left to see the
    /// connection close.
    pub fn unplug(&self, socket: &Path, left: impl Fn() -> Duration) {
        if stays(socket) {
            return;
        }
        let (record, device) = loop {
            match registry::find_by_socket(&self.run_dir, &self.host, socket, left()) {
                Ok(Some(found)) => break found,
                Ok(None) => {
                    tracing::info!(socket = %socket.display(), "used by no VM of this host's");
                    return;
                }
                Err(error) if left() > LOOK => {
                    tracing::info!(%error, "the host's VMs cannot be looked through yet");
                    std::thread::sleep(LOOK);
                }
                Err(error) => {
                    tracing::warn!(%error, "the host's VMs cannot be looked through");
                    return;
                }
            }
        };
        let name = record.name.clone();
        let noted = record.clone();
        // Under the same name the guest may have the function of the next lease by then.
        let is_same = || {
            let all = noted.noted().unwrap_or_default();
            all.iter().any(|it| it.id == device && it.socket == socket)
        };
        let left = || if is_same() { left() } else { Duration::ZERO };
        let removed = Vm::attach(record).hot_remove_while(&device, left);
        tell_removed(&name, &device, removed);
    }
}

/// What it means for a turn that its function could not be hot-added.
pub fn without_plug(error: &VmError) -> TurnUse {
    match error {
        // Nor will it be possible the next time.
        VmError::NoSuchVm { .. } | VmError::NoFreePort(_) => TurnUse::Gone(error.to_string()),
        _ => TurnUse::Unused,
    }
}

/// Shows the function behind `socket` with MSI-X where the VM's own QEMU is known to unplug that.
fn show(vm: &VmRecord, socket: &Path) {
    let bears = interrupts::is_known_to_unplug_msix(&Assets::of_user(), vm.pid);
    if let Err(error) = InterruptChoice::choose(bears, false).note(socket) {
        tracing::info!(%error, "shown without MSI-X");
    }
}

/// Takes all functions out of a VM.
fn unplug_all(record: VmRecord) {
    let (name, vm) = (record.name.clone(), Vm::attach(record));
    match vm.functions() {
        Ok(functions) => {
            let leave = functions.iter().filter(|function| !stays(&function.socket));
            leave.for_each(|function| {
                tell_removed(&name, &function.id, vm.hot_remove(&function.id, UNPLUG));
            });
        }
        Err(error) => tracing::warn!(vm = name, %error, "the VM's functions cannot be unplugged"),
    }
}

/// Whether the function behind `socket` is never unplugged.
fn stays(socket: &Path) -> bool {
    let kept = InterruptChoice::noted(socket) == InterruptChoice::MsixKept;
    if kept {
        tracing::info!(socket = %socket.display(), "shown with MSI-X: it stays until its VM ends");
    }
    kept
}

fn tell_removed(vm: &str, device: &str, removed: Result<(), VmError>) {
    match removed {
        Ok(()) => tracing::info!(vm, device, "hot-removed"),
        Err(error) => {
            tracing::warn!(vm, device, %error, "the guest did not release the function")
        }
    }
}
