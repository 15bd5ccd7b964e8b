//! A function that another process had open, and that this one goes on with.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rackbus_spec::vfio_user::region;

use super::{VfioDevice, errno};
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
}
