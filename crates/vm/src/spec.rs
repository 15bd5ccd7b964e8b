//! What a VM is to be, and the QEMU arguments that make it so.
//!
//! Two things matter to a borrower. All guest memory is one shared memfd, so that the lender can
//! map it and the device's DMA goes straight to it. And every borrowed function sits behind a PCIe
//! root port of its own, with spare ones left free, so that functions come and go while the guest
//! runs.

mod iommu;
mod memory;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::assets::{Acceleration, Assets, GuestRelease};
use crate::{Result, VmError};

pub use iommu::VmIommu;
use iommu::{REMAPPER, ends_at_boot, is_iommu};
pub(crate) use memory::backend as memory_backend;
use memory::size_option;
pub use memory::{MEMORY_BLOCK_MIB, check_memory};

/// The guest memory that a VM gets unless told otherwise, MiB.
pub const DEFAULT_MEMORY_MIB: u32 = 512;

/// Free hot-plug ports that a VM gets unless told otherwise.
pub const DEFAULT_SPARE_PORTS: u8 = 4;

/// QEMU's id of the device through which a guest shares memory with the rack.
pub const FABRIC_ID: &str = "rackbus-fabric";

/// What the VM starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Boot {
    /// One of the guests that set-up prepared.
    Guest(GuestRelease),
    /// A kernel of the user's own.
    Kernel {
        /// Path of the kernel image that QEMU boots directly.
        kernel: PathBuf,
        /// The initial RAM file system, if any.
        initrd: Option<PathBuf>,
        /// The kernel's command line.
        append: String,
    },
    /// A raw or qcow2 disk image of the user's own, started by its boot loader.
    Disk(PathBuf),
    /// UEFI, which starts what the first of the VM's functions has: a drive with an EFI system partition.
    Firmware,
}

/// Where the guest's serial console goes. It is kept in `console.log` in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Console {
    /// The terminal that the command runs in.
    Terminal,
    /// The socket `console.sock` in the VM's folder.
    Socket,
}

/// A function to be plugged in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// What people call it: `alpha/nvme0`.
    pub name: String,
    /// The vfio-user socket that the borrower's node serves.
    pub socket: PathBuf,
}

/// A VM to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    /// Its name, unique on its host.
    pub name: String,
    /// Its folder: sockets, log, record.
    pub dir: PathBuf,
    /// What it starts from.
    pub boot: Boot,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// How much memory it may have when more is plugged in, MiB; `None`: nothing can be plugged in.
    #[serde(default)]
    pub max_memory_mib: Option<u32>,
    /// Number of virtual processors.
    pub cpus: u32,
    /// What executes it; `None`: what works here ([`Assets::accel`]).
    pub accel: Option<Acceleration>,
    /// Functions plugged in from the start.
    pub functions: Vec<FunctionSpec>,
    /// PCIe ports beside those of the functions it starts with.
    pub spare_ports: u8,
    /// Where the serial console goes.
    pub console: Console,
    /// The socket of the helper through which the guest shares memory with the rack.
    pub fabric: Option<PathBuf>,
    /// All of its memory is there from the beginning, and not as it is first used.
    #[serde(default)]
    pub prealloc: bool,
    /// The file that is to be its memory; without one it is anonymous.
    pub memory_file: Option<PathBuf>,
    /// What the VM has of an IOMMU, unless `extra` has one.
    pub iommu: VmIommu,
    /// More of the kernel's command line, for a prepared guest.
    pub append: String,
    /// More QEMU arguments, passed on as they are.
    pub extra: Vec<String>,
    /// The folder that QEMU runs in, which paths in `extra` may be relative to; without one that of whoever starts it.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The firmware's variables that it goes on with; without them, those that a VM begins with. Its folder has a file of
    /// them once it is started.
    #[serde(skip)]
    pub variables: Option<Vec<u8>>,
}

/// Where a VM with this folder keeps the firmware's variables.
pub(crate) fn variables_file(dir: &Path) -> PathBuf {
    dir.join("variables.fd")
}

impl VmSpec {
    /// A VM with the usual sizes and no functions.
    #[must_use]
    pub fn new(name: &str, dir: &Path, boot: Boot) -> Self {
        Self {
            name: name.to_owned(),
            dir: dir.to_owned(),
            boot,
            memory_mib: DEFAULT_MEMORY_MIB,
            max_memory_mib: None,
            cpus: 1,
            accel: None,
            functions: Vec::new(),
            spare_ports: DEFAULT_SPARE_PORTS,
            console: Console::Socket,
            fabric: None,
            prealloc: false,
            memory_file: None,
            iommu: VmIommu::default(),
            append: String::new(),
            extra: Vec::new(),
            folder: None,
            variables: None,
        }
    }

    /// The arguments for QEMU, without the program's name.
    ///
    /// # Errors
    /// When a value cannot be given to QEMU, or set-up has not been run.
    pub fn args(&self, assets: &Assets) -> Result<Vec<String>> {
        self.check()?;
        let accel = self.accel.map_or_else(|| assets.accel(), Ok)?;
        let mut args = Args(Vec::new());
        args.put("-name", &format!("rackbus-{}", self.name));
        for flag in ["-nodefaults", "-no-user-config"] {
            args.0.push(flag.into());
        }
        args.put("-display", "none");
        args.put("-accel", accel.name());
        args.put("-cpu", "max");
        args.put("-smp", &self.cpus.to_string());
        args.put("-machine", "q35,memory-backend=ram,kernel-irqchip=split");
        // A machine has one IOMMU: the user's own, if there is one.
        if let Some(device) = self.iommu.device()
            && !self.extra.iter().any(|argument| is_iommu(argument))
        {
            args.put("-device", device);
        }
        args.put("-m", &size_option(self.memory_mib, self.max_memory_mib));
        let file = self.memory_file.as_deref();
        let mut memory = memory_backend("ram", self.memory_mib, file)?;
        if self.prealloc {
            memory["prealloc"] = true.into();
        }
        args.json("-object", &memory);
        self.boot_args(assets, &mut args)?;
        self.control_args(&mut args);
        if let Some(socket) = &self.fabric {
            args.fabric(&text(socket)?);
        }
        self.port_args(&mut args);
        args.0.extend(self.extra.iter().cloned());
        Ok(args.0)
    }

    /// Checks what does not depend on which functions are borrowed for the VM, only on how many.
    ///
    /// # Errors
    /// When a value cannot be given to QEMU.
    pub fn check_options(&self, functions: usize) -> Result<()> {
        let invalid = |text: String| Err(VmError::Invalid(text));
        check_name(&self.name)?;
        check_memory(self.memory_mib, self.max_memory_mib)?;
        if let Some(device) = self.extra.iter().find(|argument| ends_at_boot(argument)) {
            return invalid(format!(
                "{device}: with intremap=on, give dma-translation=off too, or QEMU ends when the guest boots"
            ));
        }
        if self.cpus == 0 || self.cpus > 255 {
            return invalid(format!("{} processors: give 1 to 255", self.cpus));
        }
        let ports = functions + usize::from(self.spare_ports);
        if ports > 28 {
            return invalid(format!("{ports} functions and spare ports: at most 28"));
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let invalid = |text: String| Err(VmError::Invalid(text));
        self.check_options(self.functions.len())?;
        if self.boot == Boot::Firmware && self.functions.is_empty() {
            return invalid("firmware has nothing to start: borrow a drive for the VM".to_owned());
        }
        let longest = self.dir.join("console.sock");
        let sockets =
            self.functions.iter().map(|f| &f.socket).chain([&longest]).chain(&self.fabric);
        for socket in sockets {
            // struct sockaddr_un has 108 bytes with the terminating zero.
            if socket.as_os_str().len() > 107 {
                let text = format!(
                    "{}: over 107 characters, too long for a socket; use a shorter run directory (RACKBUS_RUN_DIR)",
                    socket.display()
                );
                return invalid(text);
            }
        }
        Ok(())
    }

    /// The VM's own copy of the firmware's variables.
    pub(crate) fn variables_file(&self) -> PathBuf {
        variables_file(&self.dir)
    }

    fn ports(&self) -> usize {
        self.functions.len() + usize::from(self.spare_ports)
    }

    fn boot_args(&self, assets: &Assets, args: &mut Args) -> Result<()> {
        match &self.boot {
            Boot::Guest(guest) => {
                let files = assets.guest(*guest)?;
                args.put("-kernel", &text(&files.kernel)?);
                args.put("-initrd", &text(&files.initrd)?);
                // Mitigations guard a guest against itself and double its time under TCG.
                let append = "console=ttyS0 quiet mitigations=off panic=-1";
                args.put("-append", format!("{append} {}", self.append).trim_end());
                args.json(
                    "-blockdev",
                    &json!({"driver": "raw", "node-name": "tools", "read-only": true, "file": {
                        "driver": "file", "filename": text(&files.tools)?, "locking": "off"}}),
                );
                args.json("-device", &json!({"driver": "virtio-blk-pci", "drive": "tools"}));
            }
            Boot::Kernel { kernel, initrd, append } => {
                args.put("-kernel", &text(kernel)?);
                if let Some(initrd) = initrd {
                    args.put("-initrd", &text(initrd)?);
                }
                args.put("-append", append);
            }
            Boot::Disk(image) => {
                let qcow2 = image.extension().is_some_and(|e| e == "qcow2");
                let driver = if qcow2 { "qcow2" } else { "raw" };
                args.json(
                    "-blockdev",
                    &json!({"driver": driver, "node-name": "disk", "file": {
                        "driver": "file", "filename": text(image)?}}),
                );
                args.json(
                    "-device",
                    &json!({"driver": "virtio-blk-pci", "drive": "disk", "bootindex": 0}),
                );
            }
            Boot::Firmware => {
                let firmware = assets.firmware()?;
                let flash = |name: &str, file: &Path, read_only: bool| {
                    Ok::<_, VmError>(json!({"driver": "raw", "node-name": name,
                        "read-only": read_only, "file": {
                        "driver": "file", "filename": text(file)?, "locking": "off"}}))
                };
                args.json("-blockdev", &flash("code", &firmware.code, true)?);
                args.json("-blockdev", &flash("variables", &self.variables_file(), false)?);
                args.put("-machine", "pflash0=code,pflash1=variables");
            }
        }
        Ok(())
    }

    /// Sockets for rackbus (`qmp.sock`), for people (`monitor.sock`) and for the guest's agent.
    fn control_args(&self, args: &mut Args) {
        let socket = |name: &str| {
            let path = self.dir.join(name);
            format!("path={},server=on,wait=off", path.display().to_string().replace(',', ",,"))
        };
        let unix = |name: &str| socket(name).replacen("path=", "unix:", 1);
        args.put("-qmp", &unix("qmp.sock"));
        args.put("-qmp-pretty", &unix("monitor.sock"));
        args.put("-device", "virtio-serial-pci");
        for port in 0..crate::agent::PORTS {
            let path = socket(&crate::agent::socket_name(port));
            args.put("-chardev", &format!("socket,id=agent{port},{path}"));
            let device =
                format!("virtserialport,chardev=agent{port},name=org.rackbus.agent.{port}");
            args.put("-device", &device);
        }
        let log = self.dir.join("console.log").display().to_string().replace(',', ",,");
        match self.console {
            Console::Terminal => {
                args.put("-chardev", &format!("stdio,id=console,mux=on,signal=off,logfile={log}"));
            }
            Console::Socket => {
                let socket = socket("console.sock");
                args.put("-chardev", &format!("socket,id=console,{socket},logfile={log}"));
            }
        }
        args.put("-serial", "chardev:console");
    }

    fn port_args(&self, args: &mut Args) {
        for port in 0..self.ports() {
            let number = port + 1;
            args.put(
                "-device",
                &format!("pcie-root-port,id={},chassis={number},slot={number}", port_id(port)),
            );
        }
        for (port, function) in self.functions.iter().enumerate() {
            let mut device = device(&function.name, &function.socket, &port_id(port));
            if port == 0 && self.boot == Boot::Firmware {
                device["bootindex"] = json!(0);
            }
            args.json("-device", &device);
        }
    }
}

/// What a VM that people start themselves needs of arguments, so that it can use these functions:
/// shared memory, and a port for each; and the device through which it shares memory with the rack, whose
/// helper listens at `fabric`.
#[must_use]
pub fn own_vm_args(
    memory_mib: u32,
    max_memory_mib: Option<u32>,
    prealloc: bool,
    functions: &[FunctionSpec],
    fabric: Option<&Path>,
) -> Vec<String> {
    let size = u64::from(memory_mib) << 20;
    let mut args = Args(Vec::new());
    args.put("-m", &size_option(memory_mib, max_memory_mib));
    args.put("-machine", "q35,memory-backend=rackbus-ram,kernel-irqchip=split");
    args.put("-device", REMAPPER);
    let prealloc = if prealloc { ",prealloc=on" } else { "" };
    let memory = format!("memory-backend-memfd,id=rackbus-ram,size={size},share=on{prealloc}");
    args.put("-object", &memory);
    for (index, function) in functions.iter().enumerate() {
        let port = format!("rackbus-port{index}");
        // Chassis numbers must differ from those of the user's own ports.
        let chassis = 200 + index;
        args.put("-device", &format!("pcie-root-port,id={port},chassis={chassis}"));
        args.json("-device", &device(&function.name, &function.socket, &port));
    }
    if let Some(socket) = fabric {
        args.fabric(&socket.display().to_string());
    }
    args.0
}

/// QEMU's id of the hot-plug port with this index.
pub(crate) fn port_id(port: usize) -> String {
    format!("port{port}")
}

/// QEMU's id for a borrowed function: its name, in the characters that QEMU takes. Names have no
/// `_`, so that `a-b/c` and `a/b-c` are two.
#[must_use]
pub fn device_id(name: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' }
    };
    format!("fn-{}", name.chars().map(plain).collect::<String>())
}

/// A vfio-user function behind a port, for `-device` and for `device_add` alike.
pub(crate) fn device(name: &str, socket: &Path, port: &str) -> Value {
    json!({
        "driver": "vfio-user-pci",
        "id": device_id(name),
        "bus": port,
        "socket": {"type": "unix", "path": socket.display().to_string()},
    })
}

fn text(path: &Path) -> Result<String> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| VmError::Invalid(format!("{}: the path is not UTF-8", path.display())))
}

struct Args(Vec<String>);

impl Args {
    fn put(&mut self, option: &str, value: &str) {
        self.0.push(option.to_owned());
        self.0.push(value.to_owned());
    }

    fn json(&mut self, option: &str, value: &Value) {
        self.put(option, &value.to_string());
    }

    /// The device that a guest shares memory with the rack through: a file system (26) whose memory window
    /// the helper at `socket` fills. It is there when the guest boots: plugged in later, behind a port, its
    /// window would have no address, and the guest would mount it without one.
    fn fabric(&mut self, socket: &str) {
        let path = socket.replace(',', ",,");
        self.put("-chardev", &format!("socket,id={FABRIC_ID},path={path}"));
        self.put(
            "-device",
            &format!(
                "vhost-user-test-device-pci,id={FABRIC_ID},chardev={FABRIC_ID},virtio-id=26,num_vqs=2,\
                 vq_size=256,config_size=40"
            ),
        );
    }
}

/// A VM's name is part of paths.
///
/// # Errors
/// It has other characters than letters, digits, `-`, `_` and `.`, begins with a dot, or is empty.
pub fn check_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
        let text = format!("VM name '{name}': use letters, digits, '-', '_', '.'");
        return Err(VmError::Invalid(text));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
