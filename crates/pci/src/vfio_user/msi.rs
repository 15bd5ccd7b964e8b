//! A function shown with MSI instead of MSI-X, so that it can be taken out of a running QEMU.
//!
//! QEMU's vfio-user client (11.1 is the one this was seen with) ends with a failed assertion when
//! a function with MSI-X is unplugged: it removes its own window over the pending bits from a
//! region that is gone already. The guest would die of a function's loss. With MSI it does not.
//! So a borrowed function shows MSI. The price: one vector, as
//! stock guests take no more than one of MSI's without an interrupt remapper.
//!
//! The capability takes the place of MSI-X's, at the same address; enabling it enables MSI-X at
//! the device, whose first vector is the one that is wired.
//!
//! Source: PCI Express Base Specification 6.0, sections 7.7.1 (MSI) and 7.7.2 (MSI-X).

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rackbus_memory::Access;
use rackbus_spec::pcie::{capability, header, msi, msix};
use rackbus_spec::vfio_user::irq;

use super::device::{Device, DeviceError, DeviceShape};
use crate::endpoint::{IrqChange, Region};

/// A device whose MSI-X capability is shown as MSI.
pub struct MsiView<D> {
    device: D,
    shape: DeviceShape,
    /// Where the capability is in configuration space.
    at: u64,
    /// The capability as the driver sees it: its address and data registers live here.
    capability: Mutex<[u8; msi::SIZE as usize]>,
}

impl<D: std::fmt::Debug> std::fmt::Debug for MsiView<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MsiView").field("device", &self.device).finish_non_exhaustive()
    }
}

impl<D: Device> MsiView<D> {
    /// Shows `device` with MSI. One without MSI-X is shown as it is.
    ///
    /// # Errors
    /// When its configuration space cannot be read.
    pub fn new(device: D) -> Result<Self, DeviceError> {
        let found = find_msix(&device)?;
        let mut shape = device.shape().clone();
        let mut bytes = [0; msi::SIZE as usize];
        if let Some((_, next)) = found {
            let have = shape.irqs.get(irq::MSIX as usize).copied().unwrap_or(1);
            let vectors: u32 = 1 << have.clamp(1, msi::MAX_VECTORS.into()).ilog2();
            let capable = u8::try_from(vectors.ilog2()).unwrap_or(0) << msi::CAPABLE_SHIFT;
            for (index, count) in [(irq::MSIX, 0), (irq::MSI, vectors)] {
                if let Some(slot) = shape.irqs.get_mut(index as usize) {
                    *slot = count;
                }
            }
            bytes[0] = capability::MSI;
            bytes[1] = next;
            bytes[usize::from(msi::CONTROL)] = msi::CONTROL_64BIT.to_le_bytes()[0] | capable;
        }
        let at = found.map_or(u64::MAX, |(at, _)| u64::from(at));
        Ok(MsiView { device, shape, at, capability: Mutex::new(bytes) })
    }

    /// The part of `[offset, offset + length)` inside the capability: where it begins in the
    /// access and in the capability, and its length.
    fn overlap(&self, region: Region, offset: u64, length: usize) -> Option<(usize, usize, usize)> {
        let size = u64::from(msi::SIZE);
        let end = offset.checked_add(length as u64)?;
        let limit = self.at.checked_add(size)?;
        let (first, last) = (offset.max(self.at), end.min(limit));
        if region != Region::Config || first >= last {
            return None;
        }
        let narrow = |value: u64| usize::try_from(value).ok();
        Some((narrow(first - offset)?, narrow(first - self.at)?, narrow(last - first)?))
    }

    /// Takes a write to the capability; gives what MSI-X's message control becomes when the
    /// enable bit changed.
    fn write_capability(&self, at: usize, data: &[u8]) -> Option<u16> {
        let mut bytes = self.capability.lock().unwrap_or_else(PoisonError::into_inner);
        let control = usize::from(msi::CONTROL);
        let enable = msi::CONTROL_ENABLE.to_le_bytes()[0];
        let before = bytes[control] & enable;
        for (index, value) in (at..).zip(data) {
            let writable = match index {
                _ if index == control => enable | msi::CONTROL_ENABLED_MASK.to_le_bytes()[0],
                _ if index < usize::from(msi::ADDRESS) => 0,
                _ => 0xff,
            };
            if let Some(byte) = bytes.get_mut(index) {
                *byte = (*byte & !writable) | (value & writable);
            }
        }
        let after = bytes[control] & enable;
        (before != after).then_some(if after == 0 { 0 } else { msix::CONTROL_ENABLE })
    }
}

/// Walks the capability list for MSI-X: its address and what it points to next.
fn find_msix(device: &dyn Device) -> Result<Option<(u8, u8)>, DeviceError> {
    let byte = |at: u16| {
        let data = device.read(Region::Config, at.into(), 1)?;
        Ok::<u8, DeviceError>(data.first().copied().unwrap_or(0))
    };
    let mut at = byte(header::CAPABILITIES_POINTER)?;
    // A list can have no more entries than fit; a longer one goes in a circle.
    for _ in 0..48 {
        if at < 0x40 {
            return Ok(None);
        }
        let next = byte(u16::from(at) + 1)?;
        if byte(at.into())? == capability::MSIX {
            return Ok(Some((at, next)));
        }
        at = next;
    }
    Ok(None)
}

impl<D: Device> Device for MsiView<D> {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(&self, region: Region, offset: u64, count: usize) -> Result<Vec<u8>, DeviceError> {
        let mut data = self.device.read(region, offset, count)?;
        if let Some((from, at, length)) = self.overlap(region, offset, data.len()) {
            let bytes = self.capability.lock().unwrap_or_else(PoisonError::into_inner);
            data[from..from + length].copy_from_slice(&bytes[at..at + length]);
        }
        Ok(data)
    }

    fn write(
        &self,
        region: Region,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), DeviceError> {
        let Some((from, at, length)) = self.overlap(region, offset, data.len()) else {
            return self.device.write(region, offset, data, posted);
        };
        if let Some(control) = self.write_capability(at, &data[from..from + length]) {
            let at = self.at + u64::from(msix::CONTROL);
            self.device.write(Region::Config, at, control.to_le_bytes().to_vec(), posted)?;
        }
        // What the access has besides the capability goes where it was meant to.
        let (before, after) = (data[..from].to_vec(), data[from + length..].to_vec());
        if !before.is_empty() {
            self.device.write(region, offset, before, posted)?;
        }
        if !after.is_empty() {
            self.device.write(region, offset + (from + length) as u64, after, posted)?;
        }
        Ok(())
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<(OwnedFd, u64)>,
    ) -> Result<(), DeviceError> {
        self.device.map(iova, length, access, memory)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), DeviceError> {
        self.device.unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), DeviceError> {
        self.device.unmap_all()
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), DeviceError> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        self.write_capability(usize::from(msi::CONTROL), &[0, 0]);
        self.device.reset()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configuration space alone: what MsiView reads and writes.
    struct Plain(DeviceShape, Mutex<Vec<u8>>);

    impl Plain {
        fn new() -> Self {
            let mut irqs = vec![0; irq::COUNT as usize];
            irqs[irq::MSIX as usize] = 33;
            let mut space = vec![0; 256];
            space[usize::from(header::CAPABILITIES_POINTER)] = 0x40;
            space[0x40..0x42].copy_from_slice(&[capability::POWER_MANAGEMENT, 0x90]);
            space[0x90..0x94].copy_from_slice(&[capability::MSIX, 0, 32, 0]);
            Plain(DeviceShape { regions: Vec::new(), irqs }, Mutex::new(space))
        }
    }

    impl Device for Plain {
        fn shape(&self) -> &DeviceShape {
            &self.0
        }
        fn read(&self, _: Region, offset: u64, count: usize) -> Result<Vec<u8>, DeviceError> {
            let at = offset as usize;
            Ok(self.1.lock().expect("lock")[at..at + count].to_vec())
        }
        fn write(&self, _: Region, at: u64, data: Vec<u8>, _: bool) -> Result<(), DeviceError> {
            let at = at as usize;
            self.1.lock().expect("lock")[at..at + data.len()].copy_from_slice(&data);
            Ok(())
        }
        fn map(
            &self,
            _: u64,
            _: u64,
            _: Access,
            _: Option<(OwnedFd, u64)>,
        ) -> Result<(), DeviceError> {
            Ok(())
        }
        fn unmap(&self, _: u64, _: u64) -> Result<(), DeviceError> {
            Ok(())
        }
        fn unmap_all(&self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn set_irqs(&self, _: IrqChange) -> Result<(), DeviceError> {
            Ok(())
        }
        fn reset(&self) -> Result<(), DeviceError> {
            Ok(())
        }
    }

    #[test]
    fn msix_is_seen_as_msi_and_enabling_one_enables_the_other() {
        let view = MsiView::new(Plain::new()).expect("view");
        // 33 vectors are there; MSI counts in powers of two.
        assert_eq!(view.shape().irqs[irq::MSI as usize], 32);
        assert_eq!(view.shape().irqs[irq::MSIX as usize], 0);
        let head = view.read(Region::Config, 0x8e, 6).expect("read");
        assert_eq!(head, [0, 0, capability::MSI, 0, 0x8a, 0]);
        let enabled = || view.device.1.lock().expect("lock")[0x93] & 0x80 != 0;
        view.write(Region::Config, 0x94, vec![1, 2, 3, 4], false).expect("address");
        assert_eq!(view.read(Region::Config, 0x94, 4).expect("read"), [1, 2, 3, 4]);
        assert!(!enabled());
        view.write(Region::Config, 0x92, vec![0x81, 0], false).expect("enable");
        assert!(enabled());
        view.write(Region::Config, 0x92, vec![0xff, 0xff], false).expect("eight bits of it");
        assert_eq!(view.read(Region::Config, 0x92, 2).expect("read"), [0xfb, 0]);
        view.write(Region::Config, 0x92, vec![0x80, 0], false).expect("disable");
        assert!(!enabled());
        view.write(Region::Config, 0x8f, vec![9, 0xff, 0xff], false).expect("around it");
        assert_eq!(view.read(Region::Config, 0x8f, 3).expect("read"), [9, capability::MSI, 0]);
    }
}
