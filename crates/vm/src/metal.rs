//! Machines that stand for physical hosts, to try and to test what runs on bare metal: stock kernels in VMs with what a
//! host has, an IOMMU, PCI devices, a network, and memory in a file so that a bridge in software reaches it.
//!
//! The bridge (`rackbus ntb`, [`BridgeProcess`]) is started first, then the machines, which connect to it when they
//! start; they are handed files (programs, kernel modules) and run scripts. [`BareMetalRack`] is a whole rack of them.

mod bridge;
mod network;
pub mod programs;
mod rack;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::agent::RunningCommand;
use crate::error::io;
use crate::machine::ASKED_AGAIN;
use crate::spec::{Boot, FunctionSpec, VmIommu, VmSpec};
use crate::{Assets, GuestRelease, Result, Vm, VmError};

pub use bridge::{BridgeProcess, MemoryFiles};
pub use network::{NetworkCable, SharedNetwork};
pub use rack::{ACCELERATOR, BareMetalRack, BareMetalSpec, DRIVE, MODELLED, PRELUDE, run};

/// How long a machine may take to boot under TCG on a busy host.
const BOOT: Duration = Duration::from_secs(300);
/// How long a script may take unless told otherwise.
const SCRIPT: Duration = Duration::from_secs(300);
/// Where a machine finds the files it was given.
pub const FILES: &str = "/mnt/files";
/// What tells one boot of a machine from another.
const BOOT_ID: &str = "cat /proc/sys/kernel/random/boot_id";
/// The serial number of the disk that brings them.
const FILES_SERIAL: &str = "files";

/// A machine to start.
#[derive(Debug, Clone)]
pub struct MachineSpec {
    /// Name of the machine, by which its files and sockets are named.
    pub name: String,
    /// Its kernel and tools.
    pub guest: GuestRelease,
    /// Its memory in MiB; up to 2048 lie in the file as on the machine's bus.
    pub memory_mib: u32,
    /// The file that is its memory, where a bridge is to reach it.
    pub memory_file: Option<PathBuf>,
    /// How many virtual processors it has.
    pub cpus: u32,
    /// What it has of an IOMMU.
    pub iommu: VmIommu,
    /// vfio-user sockets of functions it has, bridges among them, each behind a root port, in this order.
    pub functions: Vec<PathBuf>,
    /// Other devices, as QEMU's `-device` takes them, and their back ends: option and value in turn.
    pub devices: Vec<String>,
    /// More of the kernel's command line, such as `iommu=pt`.
    pub append: String,
    /// A folder whose files it gets, under [`FILES`].
    pub files: Option<PathBuf>,
    /// Where its network interface is plugged in.
    pub cable: Option<NetworkCable>,
}

impl MachineSpec {
    /// A machine of 512 MiB and one processor, without devices.
    #[must_use]
    pub fn new(name: &str, guest: GuestRelease) -> Self {
        Self {
            name: name.to_owned(),
            guest,
            memory_mib: crate::spec::DEFAULT_MEMORY_MIB,
            memory_file: None,
            cpus: 1,
            iommu: VmIommu::Absent,
            functions: Vec::new(),
            devices: Vec::new(),
            append: String::new(),
            files: None,
            cable: None,
        }
    }

    /// The VM that is this machine, with its folder.
    fn vm(&self, dir: &Path) -> Result<VmSpec> {
        let mut vm = VmSpec::new(&self.name, dir, Boot::Guest(self.guest));
        vm.memory_mib = self.memory_mib;
        vm.memory_file.clone_from(&self.memory_file);
        vm.cpus = self.cpus;
        vm.iommu = self.iommu;
        vm.append.clone_from(&self.append);
        vm.spare_ports = 0;
        let function = |(nth, socket): (usize, &PathBuf)| FunctionSpec {
            name: format!("{}/{nth}", self.name),
            socket: socket.clone(),
        };
        vm.functions = self.functions.iter().enumerate().map(function).collect();
        vm.extra.clone_from(&self.devices);
        if let Some(folder) = &self.files {
            let disk = dir.with_extension("files");
            pack(folder, &disk)?;
            let drive = json!({"driver": "raw", "node-name": "files", "read-only": true, "file": {
                "driver": "file", "filename": disk.display().to_string(), "locking": "off"}});
            let device =
                json!({"driver": "virtio-blk-pci", "drive": "files", "serial": FILES_SERIAL});
            vm.extra.extend(["-blockdev".into(), drive.to_string()]);
            vm.extra.extend(["-device".into(), device.to_string()]);
        }
        if let Some(cable) = &self.cable {
            vm.extra.extend(cable.args());
        }
        Ok(vm)
    }
}

/// A machine that runs. Its VM ends when it is dropped.
#[derive(Debug)]
pub struct BareMetalMachine {
    name: String,
    vm: Vm,
    address: Option<String>,
    has_files: bool,
}

impl BareMetalMachine {
    /// Starts a machine, with its folder in `dir`; it boots meanwhile.
    ///
    /// # Errors
    /// When set-up has not been run, or QEMU does not start: then with its reason.
    pub fn start(assets: &Assets, spec: &MachineSpec, dir: &Path) -> Result<BareMetalMachine> {
        std::fs::create_dir_all(dir).map_err(io("make", dir))?;
        let vm = Vm::launch(assets, &spec.vm(&dir.join(&spec.name))?)?;
        let address = spec.cable.as_ref().map(NetworkCable::address);
        Ok(BareMetalMachine {
            name: spec.name.clone(),
            vm,
            address,
            has_files: spec.files.is_some(),
        })
    }

    /// Waits until it has booted, has its files and its network.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn booted(&mut self) -> Result<()> {
        self.vm.wait_boot(BOOT)?;
        self.run("mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug")?;
        if self.has_files {
            let find = format!("grep -lx {FILES_SERIAL} /sys/block/vd*/serial | cut -d/ -f4");
            self.run(&format!("mkdir -p {FILES} && tar -xf /dev/$({find}) -C {FILES}"))?;
        }
        if let Some(address) = &self.address {
            let interface = "$(ls /sys/class/net | grep -m 1 -v -x lo)";
            let up = format!(
                "ip link set lo up && ip addr add {address} dev {interface} && ip link set {interface} up"
            );
            self.run(&up)?;
        }
        Ok(())
    }

    /// Has its kernel reboot at once, whatever its programs do, and waits until it has booted again, with its files and its network.
    ///
    /// # Errors
    /// When it does not in time, or its VM ends.
    pub fn reboot(&mut self) -> Result<()> {
        let before = self.run(BOOT_ID)?;
        drop(self.begin("sync; reboot -f", SCRIPT)?);
        let deadline = Instant::now() + BOOT;
        loop {
            match self.vm.exec(BOOT_ID, ASKED_AGAIN) {
                Ok(output) if output.ok() && output.text() != before => return self.booted(),
                // It cannot be asked while it boots.
                Ok(_) | Err(VmError::TimedOut { .. }) if Instant::now() < deadline => {}
                Ok(_) => {
                    let what = format!("the reboot of '{}'", self.name);
                    return Err(VmError::TimedOut { what, limit: BOOT });
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Switches it off at once, as a power cut does.
    pub fn cut_power(&mut self) {
        self.vm.kill();
    }

    /// The name that it was started by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The VM that it is.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// Runs a script that must succeed, and gives what it wrote.
    ///
    /// # Errors
    /// When it fails: with what it wrote.
    pub fn run(&mut self, script: &str) -> Result<String> {
        let output = self.vm.exec(script, SCRIPT)?;
        if output.ok() {
            return Ok(output.text());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let (name, status, text) = (&self.name, output.status, output.text());
        Err(VmError::Invalid(format!("{name}: status {status} of\n{script}\n{text}\n{errors}")))
    }

    /// Starts a script that may take up to `limit`.
    ///
    /// # Errors
    /// When the VM has gone.
    pub fn begin(&mut self, script: &str, limit: Duration) -> Result<RunningCommand> {
        self.vm.agent()?.start(script, limit)
    }

    /// Loads kernel modules that are among its files, in this order.
    ///
    /// # Errors
    /// When one does not load: with the kernel's last words.
    pub fn load(&mut self, modules: &[&str]) -> Result<()> {
        for module in modules {
            let (name, options) = module.split_once(' ').unwrap_or((module, ""));
            self.run(&format!(
                "insmod {FILES}/{name}.ko {options} || {{ dmesg | tail -n 20; exit 1; }}"
            ))?;
        }
        Ok(())
    }

    /// What its kernel has said.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn kernel_log(&mut self) -> Result<String> {
        self.run("dmesg")
    }
}

impl Drop for BareMetalMachine {
    fn drop(&mut self) {
        self.vm.kill();
    }
}

/// Writes the files of a folder to `disk`, as `tar` does.
fn pack(folder: &Path, disk: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(folder).arg("-cf").arg(disk).arg(".").stdin(Stdio::null());
    let output = tar.output().map_err(io("run tar for", folder))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(VmError::Invalid(format!("tar of {}: {}", folder.display(), said.trim())))
}
