//! What set-up (`scripts/setup`) left in the cache: QEMU, and the guests; and which accelerator
//! really runs them here.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::io;
use crate::spec::{Boot, Console, VmSpec};
use crate::{Result, Vm, VmError};

/// How long a guest under real KVM may take until its agent answers before KVM is given up; it
/// takes about a second where KVM works.
const KVM_PROBE: Duration = Duration::from_secs(15);

/// What executes a guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Acceleration {
    /// KVM: the guest runs on the processor itself.
    Kvm,
    /// QEMU's translator: runs everywhere, some ten times slower.
    Tcg,
}

impl Acceleration {
    /// QEMU's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Acceleration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Acceleration {
    type Err = VmError;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            other => Err(VmError::Invalid(format!("accelerator '{other}': use kvm or tcg"))),
        }
    }
}

/// A guest that set-up prepared: Debian's own kernel and tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestRelease {
    /// Debian 12, Linux 6.1.
    Bookworm,
    /// Debian 13, Linux 6.12.
    #[default]
    Trixie,
    /// Debian 13 with its backports' kernel, Linux 7.
    #[serde(rename = "trixie-backports")]
    TrixieBackports,
}

impl GuestRelease {
    /// The name of its Debian release.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::TrixieBackports => "trixie-backports",
        }
    }
}

impl FromStr for GuestRelease {
    type Err = VmError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "bookworm" => Ok(Self::Bookworm),
            "trixie" => Ok(Self::Trixie),
            "trixie-backports" => Ok(Self::TrixieBackports),
            other => Err(VmError::Invalid(format!(
                "guest '{other}': use bookworm, trixie or trixie-backports"
            ))),
        }
    }
}

/// A prepared guest's files.
#[derive(Clone, Debug)]
pub struct GuestFiles {
    /// The kernel as Debian ships it.
    pub kernel: PathBuf,
    /// The initial RAM disk: busybox and the kernel's modules.
    pub initrd: PathBuf,
    /// The tools, an ext4 file system that every guest mounts read-only.
    pub tools: PathBuf,
}

/// UEFI for VMs: Debian's build of OVMF.
#[derive(Clone, Debug)]
pub struct Firmware {
    /// Its code, which VMs share.
    pub code: PathBuf,
    /// Its variables as a VM begins with; each has a copy.
    pub variables: PathBuf,
}

/// The cache that set-up fills.
#[derive(Clone, Debug)]
pub struct Assets {
    cache: PathBuf,
}

impl Assets {
    /// The cache of this user: `RACKBUS_CACHE`, or `~/.cache/rackbus`.
    #[must_use]
    pub fn of_user() -> Self {
        let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache = set("RACKBUS_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|c| c.join("rackbus")))
            .or_else(|| set("HOME").map(|h| h.join(".cache/rackbus")))
            .unwrap_or_else(|| PathBuf::from("/var/cache/rackbus"));
        Self { cache }
    }

    /// Assets whose cache is in this folder instead of the user's.
    #[cfg(test)]
    pub(crate) fn in_folder(cache: &Path) -> Self {
        Self { cache: cache.to_owned() }
    }

    /// Where the cache is.
    #[must_use]
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// The QEMU that set-up chose or extracted.
    ///
    /// # Errors
    /// When set-up has not been run.
    pub fn qemu(&self) -> Result<PathBuf> {
        self.file("QEMU with vfio-user", "qemu/run/qemu-system-x86_64")
    }

    /// A program that set-up extracted to measure against (`scripts/setup bench`).
    ///
    /// # Errors
    /// When set-up has not been run.
    pub fn bench(&self, program: &str) -> Result<PathBuf> {
        self.file("a program to measure against", &format!("bench/run/{program}"))
    }

    /// The files that a guest of this release boots from.
    ///
    /// # Errors
    /// When set-up has not been run.
    pub fn guest(&self, guest: GuestRelease) -> Result<GuestFiles> {
        let name = guest.name();
        Ok(GuestFiles {
            kernel: self.file("a guest's kernel", &format!("guests/{name}/vmlinuz"))?,
            initrd: self.file("a guest's initrd", &format!("guests/{name}/initrd"))?,
            tools: self.file("a guest's tools", &format!("guests/{name}/root.ext4"))?,
        })
    }

    /// The folder of Linux' NTB drivers, built for a guest's kernel (`scripts/setup kernel`).
    ///
    /// # Errors
    /// When set-up has not been run for kernels.
    pub fn ntb_drivers(&self, guest: GuestRelease) -> Result<PathBuf> {
        let what = "a folder of kernel modules ('scripts/setup kernel' makes it)";
        self.file(what, &format!("kernel/{}/ntb", guest.name()))
    }

    /// The project's kernel module for a guest's kernel.
    ///
    /// # Errors
    /// When set-up has not been run for kernels.
    pub fn kernel_module(&self, guest: GuestRelease) -> Result<PathBuf> {
        let what = "the kernel module ('scripts/setup kernel' makes it)";
        self.file(what, &format!("kernel/{}-rackbus/rackbus.ko", guest.name()))
    }

    /// The UEFI firmware that VMs boot from borrowed drives with.
    ///
    /// # Errors
    /// When set-up has not been run.
    pub fn firmware(&self) -> Result<Firmware> {
        Ok(Firmware {
            code: self.file("firmware", "ovmf/OVMF_CODE_4M.fd")?,
            variables: self.file("firmware", "ovmf/OVMF_VARS_4M.fd")?,
        })
    }

    /// What runs guests here: `RACKBUS_ACCEL` when set, else KVM where a guest was seen to boot
    /// under it (a `/dev/kvm` that opens is not enough), else TCG. The answer is kept in the cache
    /// for this kernel of the host.
    ///
    /// # Errors
    /// When `RACKBUS_ACCEL` has another value, or set-up has not been run.
    pub fn accel(&self) -> Result<Acceleration> {
        if let Ok(choice) = std::env::var("RACKBUS_ACCEL") {
            return choice.parse();
        }
        let usable = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        if !usable {
            return Ok(Acceleration::Tcg);
        }
        let host = rustix::system::uname();
        let kernel = host.release().to_string_lossy();
        let answer = self.cache.join(format!("accel-{kernel}"));
        if let Some(known) = fs::read_to_string(&answer).ok().and_then(|t| t.parse().ok()) {
            return Ok(known);
        }
        tracing::info!("finding out whether KVM runs guests on this host (once)");
        let accel = if self.probe_kvm()? { Acceleration::Kvm } else { Acceleration::Tcg };
        tracing::info!("guests run under {accel} here; set RACKBUS_ACCEL=kvm or tcg to change it");
        fs::write(&answer, accel.name()).map_err(io("write", &answer))?;
        Ok(accel)
    }

    fn probe_kvm(&self) -> Result<bool> {
        let dir = std::env::temp_dir().join(format!("rackbus-kvm-probe-{}", std::process::id()));
        let mut spec = VmSpec::new("probe", &dir, Boot::Guest(GuestRelease::Trixie));
        spec.console = Console::Socket;
        spec.accel = Some(Acceleration::Kvm);
        let mut vm = Vm::launch(self, &spec)?;
        // QEMU may end, stop with an internal error, or let the guest hang: all mean no.
        let works = vm.wait_boot(KVM_PROBE).is_ok();
        vm.kill();
        Ok(works)
    }

    fn file(&self, what: &'static str, name: &str) -> Result<PathBuf> {
        let path = self.cache.join(name);
        if path.exists() { Ok(path) } else { Err(VmError::NotSetUp { what, path }) }
    }
}
