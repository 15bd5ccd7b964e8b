//! What set-up (`scripts/setup`) left in the cache: QEMU, and the guests; and which accelerator
//! really runs them here.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
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
    /// All of them, the default one first.
    const ALL: [GuestRelease; 3] = [Self::Trixie, Self::Bookworm, Self::TrixieBackports];

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
    /// for this kernel of the host, and TCG until the host starts anew: another hypervisor may have had KVM.
    ///
    /// # Errors
    /// When `RACKBUS_ACCEL` has another value.
    pub fn accel(&self) -> Result<Acceleration> {
        if let Ok(choice) = std::env::var("RACKBUS_ACCEL") {
            return choice.parse();
        }
        let opens = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
        Ok(if opens { self.known_or_probed() } else { Acceleration::Tcg })
    }

    /// What runs guests where `/dev/kvm` opens.
    fn known_or_probed(&self) -> Acceleration {
        let host = rustix::system::uname();
        let kernel = host.release().to_string_lossy();
        let answer = self.cache.join(format!("accel-{kernel}"));
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let until_boot = format!("{} {}", Acceleration::Tcg, boot.trim());
        let known = fs::read_to_string(&answer).unwrap_or_default();
        if known == until_boot {
            return Acceleration::Tcg;
        }
        if known == Acceleration::Kvm.name() {
            return Acceleration::Kvm;
        }
        tracing::info!("finding out whether KVM runs guests on this host (once)");
        let (accel, kept) = match self.probe_kvm() {
            Ok(Ok(())) => (Acceleration::Kvm, Acceleration::Kvm.to_string()),
            Ok(Err(error)) => {
                tracing::info!(%error, "KVM does not run guests on this host");
                (Acceleration::Tcg, until_boot)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot find out whether KVM runs guests on this host");
                return Acceleration::Tcg;
            }
        };
        tracing::info!("guests run under {accel} here; set RACKBUS_ACCEL=kvm or tcg to change it");
        if let Err(error) = fs::write(&answer, kept).map_err(io("write", &answer)) {
            tracing::warn!(%error, "whether KVM runs guests is found out again at the next start");
        }
        accel
    }

    /// Boots a guest under KVM, whichever is there: whether it does, or why not, since QEMU ends or stops with an internal
    /// error, or the guest hangs.
    ///
    /// # Errors
    /// When that cannot be found out: there is no guest, or QEMU cannot be started.
    fn probe_kvm(&self) -> Result<Result<()>> {
        // In a folder of this process'.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = |guest: &GuestRelease| self.guest(*guest).is_ok();
        let guest = GuestRelease::ALL.into_iter().find(is_there).unwrap_or_default();
        // In a folder of the user's own: others may make one that has this name where all may.
        let dir = self.cache.join(format!("kvm-probe-{}", std::process::id()));
        let mut spec = VmSpec::new("probe", &dir.join("vm"), Boot::Guest(guest));
        spec.console = Console::Socket;
        spec.accel = Some(Acceleration::Kvm);
        let booted = match Vm::launch(self, &spec) {
            Ok(mut vm) => {
                let booted = vm.wait_boot(KVM_PROBE);
                vm.kill();
                Ok(booted)
            }
            Err(error @ VmError::Ended { .. }) => Ok(Err(error)),
            Err(error) => Err(error),
        };
        let _ = fs::remove_dir_all(&dir);
        booted
    }

    fn file(&self, what: &'static str, name: &str) -> Result<PathBuf> {
        let path = self.cache.join(name);
        if path.exists() { Ok(path) } else { Err(VmError::NotSetUp { what, path }) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A cache with a QEMU that is this script, and the files of one guest.
    fn cache(script: &str, guest: Option<GuestRelease>) -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = cache.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        file("qemu/run/qemu-system-x86_64", script);
        for name in ["vmlinuz", "initrd", "root.ext4"] {
            if let Some(guest) = guest {
                file(&format!("guests/{}/{name}", guest.name()), "");
            }
        }
        cache
    }

    fn kept(cache: &tempfile::TempDir) -> Vec<String> {
        let files = fs::read_dir(cache.path()).unwrap().flatten();
        let kept = files.filter(|file| file.file_type().unwrap().is_file());
        kept.map(|file| fs::read_to_string(file.path()).unwrap()).collect()
    }

    /// QEMU ends where another hypervisor has the processor's extensions, though `/dev/kvm` opens.
    #[test]
    fn guests_run_under_tcg_where_qemu_ends_under_kvm() {
        for guest in GuestRelease::ALL {
            let cache = cache("#!/bin/sh\nexit 1\n", Some(guest));
            let assets = Assets::in_folder(cache.path());
            assert_eq!(assets.known_or_probed(), Acceleration::Tcg);
            assert!(kept(&cache)[0].starts_with("tcg ") && kept(&cache).len() == 1);
            let left = cache.path().join(format!("kvm-probe-{}", std::process::id()));
            assert!(!left.exists());
        }
    }

    #[test]
    fn nothing_is_kept_where_there_is_no_guest_to_find_out_with() {
        let cache = cache("#!/bin/sh\nexit 1\n", None);
        assert_eq!(Assets::in_folder(cache.path()).known_or_probed(), Acceleration::Tcg);
        assert_eq!(kept(&cache), [""; 0]);
    }

    #[test]
    fn what_did_not_work_is_tried_again_when_the_host_was_started_anew() {
        let cache = cache("#!/bin/sh\nexit 1\n", Some(GuestRelease::Trixie));
        let assets = Assets::in_folder(cache.path());
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let answer = cache.path().join(format!("accel-{kernel}"));
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let this = format!("tcg {}", boot.trim());
        for (before, accel, after) in [
            (&*this, Acceleration::Tcg, &*this),
            ("tcg 4a9bd2a6-another-boot", Acceleration::Tcg, &*this),
            ("tcg", Acceleration::Tcg, &*this),
            ("kvm", Acceleration::Kvm, "kvm"),
        ] {
            fs::write(&answer, before).unwrap();
            assert_eq!(assets.known_or_probed(), accel, "{before}");
            assert_eq!(fs::read_to_string(&answer).unwrap(), after);
        }
    }
}
