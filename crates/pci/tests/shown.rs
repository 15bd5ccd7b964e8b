//! A function shown with one kind of interrupts: what its driver finds, and what reaches it.

use rackbus_memory::{Access, MemoryHandle};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::engine::{Engine, EngineOptions};
use rackbus_pci::vfio_user::{
    DeviceShape, EngineDevice, RequestRefused, ServedDevice, ShownInterrupts, ShownWith,
};
use rackbus_pci::{Bus, Function, FunctionInfo, Mode, ResetKind, Work};
use rackbus_spec::pcie::{capability, express, header, msi, msix, pm};
use rackbus_spec::vfio_user::irq;
use std::os::fd::BorrowedFd;

/// A function that does nothing but have interrupts.
struct Still(FunctionInfo);

impl Function for Still {
    fn info(&self) -> &FunctionInfo {
        &self.0
    }
    fn bar_read(&mut self, bus: &Bus<'_>, _: u8, _: u64, data: &mut [u8]) {
        data[0] = match bus.irq.mode() {
            Mode::Pin => 0,
            Mode::Msi { vectors } => vectors as u8,
            Mode::Msix => 0xff,
        };
    }
    fn bar_write(&mut self, _: &Bus<'_>, _: u8, _: u64, _: &[u8]) {}
    fn reset(&mut self, _: &Bus<'_>, _: ResetKind) {}
    fn poll(&mut self, _: &Bus<'_>) -> Work {
        Work::Asleep(None)
    }
    fn park(&mut self, _: &Bus<'_>) -> bool {
        true
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn quiesce(&mut self, _: &Bus<'_>) {}
}

fn engine(msi_vectors: u16) -> (Engine, EngineDevice) {
    let bar = rackbus_pci::Bar {
        index: 0,
        size: 4096,
        is_64bit: true,
        prefetchable: false,
        mappable: None,
    };
    let info = FunctionInfo {
        vendor_id: 1,
        device_id: 2,
        subsystem_vendor_id: 0,
        subsystem_id: 0,
        revision: 0,
        class: [0xff, 0, 0],
        bars: vec![bar],
        msix_vectors: 33,
        msi_vectors,
        vendor: Vec::new(),
        serial: 1,
    };
    let engine = Engine::start("still", Box::new(Still(info)), EngineOptions::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    (engine, device)
}

fn byte(device: &dyn ServedDevice, at: u16) -> u8 {
    device.read(FunctionRegion::Config, at.into(), 1).unwrap()[0]
}

/// The capabilities that a driver finds: identifier and place.
fn capabilities(device: &dyn ServedDevice) -> Vec<(u8, u16)> {
    let mut found = Vec::new();
    let mut at = u16::from(byte(device, header::CAPABILITIES_POINTER));
    while at != 0 {
        found.push((byte(device, at), at));
        at = byte(device, at + 1).into();
    }
    found
}

fn place(device: &dyn ServedDevice, id: u8) -> u16 {
    capabilities(device).iter().find(|(found, _)| *found == id).expect("the capability").1
}

fn write(device: &dyn ServedDevice, at: u16, data: &[u8]) {
    device.write(FunctionRegion::Config, at.into(), data.to_vec(), false).unwrap();
}

/// The kind of interrupts that the function itself believes its driver to have enabled.
fn mode(device: &dyn ServedDevice) -> u8 {
    write(device, header::COMMAND, &[2, 0]);
    device.read(FunctionRegion::Bar(0), 0, 1).unwrap()[0]
}

#[test]
fn a_class_is_shown_with_what_it_has_and_its_user_can_bear() {
    let shape = |msi, msix| {
        let mut irqs = vec![0; irq::COUNT as usize];
        (irqs[irq::MSI as usize], irqs[irq::MSIX as usize]) = (msi, msix);
        DeviceShape { regions: Vec::new(), irqs }
    };
    for (msi, msix, allowed, expected) in [
        (32, 32, true, ShownInterrupts::Msix),
        (32, 32, false, ShownInterrupts::Msi),
        (32, 0, true, ShownInterrupts::Msi),
        (0, 32, true, ShownInterrupts::Msix),
        (0, 32, false, ShownInterrupts::Pin),
        (0, 0, true, ShownInterrupts::Pin),
    ] {
        assert_eq!(ShownInterrupts::choose(&shape(msi, msix), allowed), expected);
    }
}

#[test]
fn what_is_not_shown_is_not_there() {
    let (_engine, device) = engine(32);
    let all = capabilities(&device);
    for (shown, hidden, counts) in [
        (ShownInterrupts::Msix, vec![capability::MSI], (0, 33)),
        (ShownInterrupts::Msi, vec![capability::MSIX], (32, 0)),
        (ShownInterrupts::Pin, vec![capability::MSI, capability::MSIX], (0, 0)),
    ] {
        let view = ShownWith::new(device.clone(), shown).unwrap();
        let expected: Vec<_> = all.iter().filter(|(id, _)| !hidden.contains(id)).collect();
        assert_eq!(capabilities(&view).iter().collect::<Vec<_>>(), expected);
        let irqs = &view.shape().irqs;
        assert_eq!((irqs[irq::MSI as usize], irqs[irq::MSIX as usize]), counts);
        // A driver that writes where it is nevertheless does not get there, whatever the access.
        for (_, at) in all.iter().filter(|(id, _)| hidden.contains(id)) {
            write(&view, at - 2, &[0xff; 8]);
            assert_eq!(view.read(FunctionRegion::Config, (*at).into(), 8).unwrap(), [0; 8]);
        }
        assert_eq!(mode(&view), 0);
    }
}

#[test]
fn enabling_what_is_shown_enables_it_at_the_function() {
    let (_engine, device) = engine(32);
    let view = ShownWith::new(device.clone(), ShownInterrupts::Msi).unwrap();
    let control = place(&view, capability::MSI) + msi::CONTROL;
    assert_eq!(byte(&view, control), 0x8a, "32 vectors, 64-bit address");
    write(&view, control, &[0x21, 0]);
    assert_eq!(mode(&view), 4);
    write(&view, control, &[0, 0]);
    assert_eq!(mode(&view), 0);
    let view = ShownWith::new(device, ShownInterrupts::Msix).unwrap();
    write(&view, place(&view, capability::MSIX) + msix::CONTROL, &[0, 0x80]);
    assert_eq!(mode(&view), 0xff);
}

/// A driver that resets the function by either way and enables its interrupts again has them.
#[test]
fn interrupts_enabled_after_a_reset_are_enabled() {
    let (_engine, device) = engine(32);
    let view = ShownWith::new(device, ShownInterrupts::Msi).unwrap();
    let control = place(&view, capability::MSI) + msi::CONTROL;
    let flr = place(&view, capability::PCI_EXPRESS) + express::DEVICE_CONTROL + 1;
    let power = place(&view, capability::POWER_MANAGEMENT) + pm::PMCSR;
    for reset in [vec![(flr, 0x80)], vec![(power, 3), (power, 0)]] {
        write(&view, control, &[0x51, 0]);
        assert_eq!(mode(&view), 32);
        for (at, value) in reset {
            write(&view, at, &[value]);
        }
        assert_eq!((byte(&view, control) & 1, mode(&view)), (0, 0));
        write(&view, control, &[0x51, 0]);
        assert_eq!(mode(&view), 32);
    }
}

/// A device of configuration space alone.
struct Configured {
    shape: DeviceShape,
    config: Vec<u8>,
}

impl ServedDevice for Configured {
    fn shape(&self) -> &DeviceShape {
        &self.shape
    }
    fn read(&self, _: FunctionRegion, at: u64, count: usize) -> Result<Vec<u8>, RequestRefused> {
        let at = usize::try_from(at).unwrap();
        Ok(self.config[at..at + count].to_vec())
    }
    fn write(&self, _: FunctionRegion, _: u64, _: Vec<u8>, _: bool) -> Result<(), RequestRefused> {
        Ok(())
    }
    fn map(
        &self,
        _: u64,
        _: u64,
        _: Access,
        _: Option<MemoryHandle>,
    ) -> Result<(), RequestRefused> {
        Ok(())
    }
    fn unmap(&self, _: u64, _: u64) -> Result<(), RequestRefused> {
        Ok(())
    }
    fn unmap_all(&self) -> Result<(), RequestRefused> {
        Ok(())
    }
    fn set_irqs(&self, _: IrqChange) -> Result<(), RequestRefused> {
        Ok(())
    }
    fn reset(&self) -> Result<(), RequestRefused> {
        Ok(())
    }
}

/// MSI has four forms; what lies right behind the one that is hidden is shown.
#[test]
fn a_capability_behind_a_short_msi_is_shown() {
    for (control, size) in [(0u16, 0xau8), (0x80, 0xe), (0x100, 0x14), (0x180, 0x18)] {
        let mut config = vec![0; 256];
        config[usize::from(header::CAPABILITIES_POINTER)] = 0x50;
        let behind = 0x50 + size.next_multiple_of(4);
        config[0x50..0x54].copy_from_slice(&[
            capability::MSI,
            behind,
            control as u8,
            (control >> 8) as u8,
        ]);
        config[usize::from(behind)] = capability::MSIX;
        config[usize::from(behind) + 1] = 0xc0;
        config[0xc0] = capability::PCI_EXPRESS;
        let shape = DeviceShape { regions: Vec::new(), irqs: vec![1; irq::COUNT as usize] };
        let view = ShownWith::new(Configured { shape, config }, ShownInterrupts::Msix).unwrap();
        let byte = |at: u8| view.read(FunctionRegion::Config, at.into(), 1).unwrap()[0];
        let first = byte(header::CAPABILITIES_POINTER as u8);
        assert_eq!((first, byte(first)), (behind, capability::MSIX), "{control:#x}");
        assert_eq!(byte(byte(first + 1)), capability::PCI_EXPRESS);
        assert_eq!(byte(0x50), 0, "MSI itself is hidden");
    }
}
