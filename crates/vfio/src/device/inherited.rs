//! A function that another process had open, and that this one goes on with.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rackbus_spec::pcie::{Command, header};
use rackbus_spec::vfio_user::{IrqSetFlags, region};

use super::{InterruptIndex, VfioDevice, errno};
use crate::container::Container;
use crate::error::{VfioError, refused};
use crate::facts::{Facts, PciAddress};
use crate::kernel;

impl VfioDevice {
    /// The function that another process has open in a container that was [passed on](Container::inherited), by its file
    /// there. It is in use meanwhile, and nothing about it changes.
    ///
    /// # Errors
    /// When the file is not that of this function, or the kernel refuses.
    pub fn inherited(
        container: &Arc<Container>,
        facts: Facts,
        file: OwnedFd,
    ) -> Result<VfioDevice, VfioError> {
        let address = facts.address;
        let number = facts.group.ok_or(VfioError::NoIommu(address))?;
        let group = container.groups().remove(&number).ok_or(VfioError::NotOfFile(address))?;
        let file = File::from(file);
        check_file(&group, address, &file)?;
        VfioDevice::describe(file, group, container.clone(), facts)
    }
}

/// A function that another process passed on, and with which nobody goes on yet. Where this is dropped before that, the function
/// masters nothing, signals nothing and reaches nothing any more, whoever else has its descriptors: a user that maps its
/// registers has one, and keeps the kernel's container with it.
#[derive(Debug)]
pub struct PassedOnFunction {
    container: File,
    function: File,
    kept: bool,
}

impl PassedOnFunction {
    /// The function of these descriptors, of which copies are made.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub fn new(container: BorrowedFd<'_>, function: BorrowedFd<'_>) -> io::Result<Self> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        let (container, function) = (copy(container)?, copy(function)?);
        Ok(PassedOnFunction { container, function, kept: false })
    }

    /// Somebody goes on with it, who ends what it reaches.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for PassedOnFunction {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // Files of other kinds answer none of this, and are not written to.
        if let Ok((info, _)) = kernel::region_info(&self.function, region::CONFIG) {
            let at = info.offset + u64::from(header::COMMAND);
            let mut command = [0; 2];
            let read = self.function.read_exact_at(&mut command, at);
            let command = u16::from_le_bytes(command) & !Command::BUS_MASTER.bits();
            let _ = read.and_then(|()| self.function.write_all_at(&command.to_le_bytes(), at));
        }
        for kind in [InterruptIndex::Intx, InterruptIndex::Msi, InterruptIndex::Msix] {
            // All but one of them are off.
            let trigger = IrqSetFlags::ACTION_TRIGGER;
            let _ = kernel::set_irqs(&self.function, kind.index(), (0, 0), trigger);
        }
        if let Err(error) = kernel::unmap_all(&self.container) {
            tracing::error!(%error, "memory that a function was given is not taken away");
        }
    }
}

/// Refuses a file that is not that of the function at `address` of a group. The function is open by it, so opening it once
/// more changes nothing. The kernel tells files of different functions apart since Linux 6.10; before, by what they are.
fn check_file(group: &File, address: PciAddress, file: &File) -> Result<(), VfioError> {
    let of_kernel = kernel::device_info(file);
    of_kernel.map_err(refused("the description", "a function that was passed on"))?;
    let opened = kernel::device(group, &address.to_string());
    let opened = opened.map_err(refused("opening", address))?;
    let known = |file: &File| {
        let stat = rustix::fs::fstat(file).map_err(refused("its file", address))?;
        Ok::<_, VfioError>((stat.st_dev, stat.st_ino, identity(file, address)?))
    };
    match known(file)? == known(&opened)? {
        true => Ok(()),
        false => Err(VfioError::NotOfFile(address)),
    }
}

/// What a function is: vendor, device, revision, class and subsystem (PCI Local Bus 3.0, section 6.1).
fn identity(file: &File, address: PciAddress) -> Result<[u8; 12], VfioError> {
    let (info, _) =
        kernel::region_info(file, region::CONFIG).map_err(refused("a region", address))?;
    let mut identity = [0; 12];
    for (part, register) in identity.chunks_exact_mut(4).zip([0, 8, 0x2c]) {
        let read = file.read_exact_at(part, info.offset + register);
        read.map_err(|error| refused("reading", address)(errno(&error)))?;
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rackbus_memory::SharedMemory;

    use super::*;

    /// Whatever a peer named like one, it is written to by nobody.
    #[test]
    fn a_file_that_is_no_functions_is_refused_before_its_function_is_looked_for() {
        let memory = SharedMemory::create("vfio-device", 4096).unwrap();
        let copy = || File::from(memory.as_fd().try_clone_to_owned().unwrap());
        let address: PciAddress = "0000:03:00.0".parse().unwrap();
        let refused = check_file(&copy(), address, &copy()).unwrap_err();
        assert!(matches!(refused, VfioError::Refused { what: "the description", .. }), "{refused}");
    }

    /// Descriptors that are none of VFIO's are let be, though what they lead to could be written to.
    #[test]
    fn only_what_the_kernel_knows_as_a_function_is_written_to() {
        let memory = SharedMemory::create("vfio-device", 4096).unwrap();
        let file = File::from(memory.as_fd().try_clone_to_owned().unwrap());
        file.write_all_at(&[0xff; 4096], 0).unwrap();
        drop(PassedOnFunction::new(memory.as_fd(), memory.as_fd()).unwrap());
        let mut after = [0; 4096];
        file.read_exact_at(&mut after, 0).unwrap();
        assert_eq!(after, [0xff; 4096]);
    }
}
