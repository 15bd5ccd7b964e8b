//! Which of this host's NTBs the kernel module has: it takes none by itself, and one that it has closed is open again when it is
//! bound anew.

use std::path::PathBuf;

use rackbus_vfio::{Facts, PciAddress, Sysfs};

use super::Module;
use crate::error::MetalError;

/// The driver that the module registers.
const DRIVER: &str = "rackbus";

/// Binds an NTB to the module, which takes none by itself. One that is bound stays so.
///
/// # Errors
/// When there is no such function, another driver has it, or the module does not take it.
pub fn bind(sysfs: &Sysfs, ntb: PciAddress) -> Result<(), MetalError> {
    let facts = sysfs.facts(ntb)?;
    if !facts.is_ntb() {
        let Facts { address, vendor, device, .. } = facts;
        return Err(MetalError::NotAnNtb { address, vendor, device });
    }
    match facts.driver.as_deref() {
        Some(DRIVER) => return Ok(()),
        Some(other) => {
            let reason = format!("the driver {other} has it: unbind that first");
            return Err(MetalError::NotBound { address: ntb, reason });
        }
        None => {}
    }
    let bound = override_and_probe(sysfs, ntb, DRIVER).and_then(|()| {
        match sysfs.facts(ntb)?.driver.as_deref() {
            Some(DRIVER) => Ok(()),
            _ => {
                let reason = "the module does not take it; the kernel's log says why".to_owned();
                Err(MetalError::NotBound { address: ntb, reason })
            }
        }
    });
    if bound.is_err() {
        // The kernel's own driver may have it again; an empty line takes the override away. The first error is told.
        let _ = override_and_probe(sysfs, ntb, "\n");
    }
    bound
}

/// Opens an NTB that the module has closed, by binding it anew. **What a lender at its other end reaches, it reaches again**: that
/// lender is dead, or known to have ended what it did not say.
///
/// # Errors
/// When functions that were borrowed through it are listed still, it is no NTB of the module's, or the module does not take it.
pub fn reopen(sysfs: &Sysfs, module: &Module, ntb: PciAddress) -> Result<(), MetalError> {
    let behind = module.handles()?.into_iter().filter_map(|handle| module.status(handle).ok());
    let behind = behind.filter(|status| status.ntb == ntb).map(|status| status.handle.to_string());
    let handles: Vec<String> = behind.collect();
    match handles.is_empty() {
        true => bind_anew(sysfs, ntb),
        false => Err(MetalError::Behind { ntb, handles: handles.join(", ") }),
    }
}

/// Takes an NTB that the module has from it, and gives it back.
fn bind_anew(sysfs: &Sysfs, ntb: PciAddress) -> Result<(), MetalError> {
    if sysfs.facts(ntb)?.driver.as_deref() == Some(DRIVER) {
        let unbound = std::fs::write(sysfs.driver(DRIVER).join("unbind"), ntb.to_string());
        let failed = |cause| MetalError::System { what: "taking the NTB from the module", cause };
        unbound.map_err(failed)?;
    }
    bind(sysfs, ntb)
}

/// Says which driver alone is to have an NTB, and has the kernel look for one.
fn override_and_probe(sysfs: &Sysfs, ntb: PciAddress, driver: &str) -> Result<(), MetalError> {
    let failed = |cause| MetalError::System { what: "binding the NTB to the module", cause };
    let write = |path: PathBuf, text: &str| std::fs::write(path, text).map_err(failed);
    write(sysfs.function(ntb).join("driver_override"), driver)?;
    write(sysfs.probe(), &ntb.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with an NTB that no driver takes, however it is asked.
    #[test]
    fn an_ntb_that_the_module_does_not_take_is_left_to_other_drivers() {
        let tree = tempfile::tempdir().unwrap();
        let name = "0000:05:00.0";
        let folder = tree.path().join("sys/bus/pci/devices").join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for (file, text) in
            [("vendor", "0x8086\n"), ("device", "0x201c\n"), ("class", "0x068000\n")]
        {
            std::fs::write(folder.join(file), text).unwrap();
        }
        let sysfs = Sysfs::below(tree.path());
        let refused = bind(&sysfs, name.parse().unwrap()).unwrap_err();
        assert!(matches!(refused, MetalError::NotBound { .. }), "{refused}");
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        assert_eq!(read(folder.join("driver_override")), "\n");
        assert_eq!(read(sysfs.probe()), name);
        // One that the module has is taken from it first.
        let driver = sysfs.driver(DRIVER);
        std::fs::create_dir_all(&driver).unwrap();
        std::os::unix::fs::symlink(&driver, folder.join("driver")).unwrap();
        bind_anew(&sysfs, name.parse().unwrap()).unwrap();
        assert_eq!(read(driver.join("unbind")), name);
        std::fs::remove_file(folder.join("driver")).unwrap();
        // The kernel cannot be asked: the override goes, too.
        std::fs::remove_file(sysfs.probe()).unwrap();
        std::fs::create_dir(sysfs.probe()).unwrap();
        let failed = bind(&sysfs, name.parse().unwrap()).unwrap_err();
        assert!(matches!(failed, MetalError::System { .. }), "{failed}");
        assert_eq!(read(folder.join("driver_override")), "\n");
    }
}
