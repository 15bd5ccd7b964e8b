//! Where a borrowed function finds the memory of the host that borrowed it: for drivers in user space, which map nothing by
//! the kernel and have physical addresses.

use std::io::ErrorKind;

use rackbus_pci::machine::MemoryWindow;
use rackbus_vfio::PciAddress;

use crate::borrower::Module;
use crate::error::MetalError;

/// By what window the function at `address` of this host finds this host's memory, where it was borrowed through an NTB;
/// nothing for one of this host's own.
///
/// # Errors
/// When the module is loaded and does not tell: it takes root.
pub fn window_of(address: PciAddress) -> Result<Option<MemoryWindow>, MetalError> {
    let module = match Module::open() {
        Err(MetalError::NoModule(error)) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    for handle in module.handles()? {
        let status = match module.status(handle) {
            Ok(status) => status,
            // It was returned meanwhile, and is in the list no more. Any other may be the one.
            Err(_) if !module.handles()?.contains(&handle) => continue,
            Err(error) => return Err(error),
        };
        if status.domain == address.domain {
            return Ok(Some(MemoryWindow { base: status.dma_base, size: status.dma_size }));
        }
    }
    Ok(None)
}
