//! The kind of interrupts that a function is shown with: MSI-X, MSI, or the pin alone.
//!
//! QEMU's vfio-user client (11.1 is the one this was seen with) ends with a failed assertion when
//! a function with MSI-X is unplugged: it removes its own window over the pending bits from a
//! region that is gone already. The guest would die of a function's loss. So a borrowed function
//! does not show MSI-X there, but MSI: up to 32 vectors where the guest has an interrupt remapper,
//! one elsewhere. A class that knows no MSI shows its pin.
//!
//! What is not shown is left out of the list of capabilities, cannot be written and counts no
//! vectors. The rest is the function's own: nothing is kept here that could differ from it.
//!
//! Source: PCI Express Base Specification 6.0, sections 7.5.1.1.11 (the list of capabilities), 7.7.1
//! (MSI) and 7.7.2 (MSI-X).

use std::os::fd::OwnedFd;

use rackbus_memory::{Access, MemoryHandle};
use rackbus_spec::pcie::{capability, header, msi, msix};
use rackbus_spec::vfio_user::irq;

use super::device::{DeviceShape, RequestRefused, ServedDevice};
use crate::endpoint::{FunctionRegion, IrqChange};

/// The kind of interrupts that a function is shown with, besides its pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownInterrupts {
    /// Vectors are MSI-X; MSI is hidden.
    Msix,
    /// Vectors are MSI; MSI-X is hidden.
    Msi,
    /// Neither: the function has its INTx pin alone.
    Pin,
}

impl ShownInterrupts {
    /// What a function of this shape is shown with, where MSI-X may be used or not.
    pub fn choose(shape: &DeviceShape, msix: bool) -> ShownInterrupts {
        let has = |index: u32| shape.irqs.get(index as usize).is_some_and(|count| *count > 0);
        match (msix && has(irq::MSIX), has(irq::MSI)) {
            (true, _) => ShownInterrupts::Msix,
            (false, true) => ShownInterrupts::Msi,
            (false, false) => ShownInterrupts::Pin,
        }
    }

    /// The capabilities that are not shown: identifier, and interrupt index.
    fn hidden(self) -> &'static [(u8, u32)] {
        const MSI: (u8, u32) = (capability::MSI, irq::MSI);
        const MSIX: (u8, u32) = (capability::MSIX, irq::MSIX);
        match self {
            ShownInterrupts::Msix => &[MSI],
            ShownInterrupts::Msi => &[MSIX],
            ShownInterrupts::Pin => &[MSI, MSIX],
        }
    }
}

/// A device with only one kind of message, or none.
#[derive(Debug)]
pub struct ShownWith<D> {
    device: D,
    shape: DeviceShape,
    /// Bytes of configuration space that are not the device's: what they read as. Writes to them
    /// are dropped.
    fixed: Vec<(u64, u8)>,
}

impl<D: ServedDevice> ShownWith<D> {
    /// Shows `device` with this kind of interrupts alone, as far as it has it.
    ///
    /// # Errors
    /// When its configuration space cannot be read.
    pub fn new(device: D, shown: ShownInterrupts) -> Result<Self, RequestRefused> {
        let mut shape = device.shape().clone();
        let mut fixed = Vec::new();
        // The byte that points at the next capability that is shown.
        let mut pointer = header::CAPABILITIES_POINTER;
        for Capability { at, id, next } in list(&device)? {
            match shown.hidden().iter().find(|(hidden, _)| *hidden == id) {
                Some((_, index)) => {
                    let length = length(&device, at, id)?;
                    fixed.extend((0..length).map(|byte| (u64::from(u16::from(at) + byte), 0)));
                    if let Some(count) = shape.irqs.get_mut(*index as usize) {
                        *count = 0;
                    }
                    fixed.retain(|(at, _)| *at != u64::from(pointer));
                    fixed.push((u64::from(pointer), next));
                }
                None => pointer = u16::from(at) + 1,
            }
        }
        Ok(ShownWith { device, shape, fixed })
    }

    /// The same where another process chose: what it showed, and the bytes that it [fixed](Self::fixed_bytes).
    /// Nothing is asked of the device.
    pub fn resume(device: D, shape: DeviceShape, fixed: Vec<(u64, u8)>) -> Self {
        ShownWith { device, shape, fixed }
    }

    /// The bytes of configuration space that are not the device's, and what they read as.
    pub fn fixed_bytes(&self) -> &[(u64, u8)] {
        &self.fixed
    }

    /// What of the bytes from `offset` on is fixed: where it is among them, and its value.
    fn fixed(&self, region: FunctionRegion, offset: u64) -> impl Iterator<Item = (usize, u8)> + '_ {
        let bytes = self.fixed.iter().filter(move |_| region == FunctionRegion::Config);
        bytes.filter_map(move |(at, value)| {
            let index = usize::try_from(at.checked_sub(offset)?).ok()?;
            Some((index, *value))
        })
    }
}

/// A capability in the list.
struct Capability {
    at: u8,
    id: u8,
    next: u8,
}

/// Bytes of the interrupt capability at `at`.
fn length(device: &dyn ServedDevice, at: u8, id: u8) -> Result<u16, RequestRefused> {
    if id == capability::MSIX {
        return Ok(msix::SIZE);
    }
    let control = u64::from(u16::from(at) + msi::CONTROL);
    let control = device.read(FunctionRegion::Config, control, 2)?;
    Ok(msi::size(control.first_chunk().map_or(0, |word| u16::from_le_bytes(*word))))
}

/// Walks the list of capabilities.
fn list(device: &dyn ServedDevice) -> Result<Vec<Capability>, RequestRefused> {
    let byte = |at: u16| {
        let data = device.read(FunctionRegion::Config, at.into(), 1)?;
        Ok::<u8, RequestRefused>(data.first().copied().unwrap_or(0))
    };
    let mut found = Vec::new();
    let mut at = byte(header::CAPABILITIES_POINTER)?;
    // A list can have no more entries than fit; a longer one goes in a circle.
    while at >= 0x40 && found.len() < 48 {
        let next = byte(u16::from(at) + 1)?;
        found.push(Capability { at, id: byte(at.into())?, next });
        at = next;
    }
    Ok(found)
}

impl<D: ServedDevice> ServedDevice for ShownWith<D> {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }

    fn read(
        &self,
        region: FunctionRegion,
        offset: u64,
        count: usize,
    ) -> Result<Vec<u8>, RequestRefused> {
        let mut data = self.device.read(region, offset, count)?;
        for (index, value) in self.fixed(region, offset) {
            if let Some(byte) = data.get_mut(index) {
                *byte = value;
            }
        }
        Ok(data)
    }

    fn write(
        &self,
        region: FunctionRegion,
        offset: u64,
        data: Vec<u8>,
        posted: bool,
    ) -> Result<(), RequestRefused> {
        let mut dropped: Vec<usize> = self.fixed(region, offset).map(|(index, _)| index).collect();
        dropped.retain(|index| *index < data.len());
        if dropped.is_empty() {
            return self.device.write(region, offset, data, posted);
        }
        // What the access has besides goes where it was meant to, in pieces.
        dropped.push(data.len());
        dropped.sort_unstable();
        let mut from = 0;
        for end in dropped {
            if from < end {
                let piece = data[from..end].to_vec();
                self.device.write(region, offset + from as u64, piece, posted)?;
            }
            from = end + 1;
        }
        Ok(())
    }

    fn map(
        &self,
        iova: u64,
        length: u64,
        access: Access,
        memory: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        self.device.map(iova, length, access, memory)
    }

    fn unmap(&self, iova: u64, length: u64) -> Result<(), RequestRefused> {
        self.device.unmap(iova, length)
    }

    fn unmap_all(&self) -> Result<(), RequestRefused> {
        self.device.unmap_all()
    }

    fn registers(&self, bar: u8) -> Result<(OwnedFd, u64), RequestRefused> {
        self.device.registers(bar)
    }

    fn count_refused(&self) {
        self.device.count_refused();
    }

    fn set_irqs(&self, change: IrqChange) -> Result<(), RequestRefused> {
        self.device.set_irqs(change)
    }

    fn reset(&self) -> Result<(), RequestRefused> {
        self.device.reset()
    }
}
