//! The server's function as a borrower's node has it, with the interrupts that its user is shown.

use std::os::fd::AsFd;
use std::sync::Arc;

use rackbus_memory::MemoryHandle;
use rackbus_node::RemoteDevice;
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::vfio_user::{DeviceShape, ServedDevice, ShownInterrupts, ShownWith};
use rackbus_spec::pcie::msix;
use rackbus_spec::vfio_user::{irq, region};

use super::server::FuzzedServer;
use super::{MOST, access, access_of, act, check_areas, look_at_registers, range, wires};
use crate::input::Input;

/// Learns what the function is and uses it, as one of a node's or not.
pub(super) fn use_one(server: &Arc<FuzzedServer>, foreign: bool) {
    let Ok(device) = RemoteDevice::attach(server.clone(), Box::new(drop)) else { return };
    let device = if foreign { device.of_foreign_server() } else { device };
    check(device.shape());
    let mappable = |device: &RemoteDevice| {
        device.shape().regions.iter().any(|region| region.mappable.is_some())
    };
    assert!(!foreign || !mappable(&device), "a foreign server's memory can be mapped");
    let shown = ShownInterrupts::choose(device.shape(), server.take(|input| input.u8()) & 1 != 0);
    let Ok(device) = ShownWith::new(device, shown) else { return };
    for _ in 0..MOST {
        if !server.says_more() {
            break;
        }
        do_one(&device, server);
    }
}

/// That a function can be what the server says.
fn check(shape: &DeviceShape) {
    let lengths = (shape.regions.len() as u32, shape.irqs.len() as u32);
    assert_eq!(lengths, (region::COUNT, irq::COUNT));
    assert!(shape.irqs.iter().all(|count| *count <= msix::MAX_VECTORS.into()), "{:?}", shape.irqs);
    for region in &shape.regions {
        if let Some(mappable) = &region.mappable {
            check_areas(region.size, &mappable.areas);
        }
    }
}

/// Has its user do one thing. What is refused is refused by the server.
fn do_one(device: &dyn ServedDevice, server: &FuzzedServer) {
    match server.take(|input| input.u8()) % act::COUNT {
        act::READ => {
            let (region, offset, length) = server.take(access);
            if let Ok(data) = device.read(part(region), offset, length) {
                assert_eq!(data.len(), length, "it read another length");
            }
        }
        written @ (act::WRITE | act::POST) => {
            let (region, offset, length) = server.take(access);
            let data = vec![region as u8; length];
            let _ = device.write(part(region), offset, data, written == act::POST);
        }
        act::DMA_MAP => {
            let (iova, length, choice) = server.take(range);
            let file = server.event.as_fd().try_clone_to_owned().expect("there is room for it");
            let memory = MemoryHandle::new(file, length).expect("it is a file");
            let memory = (choice & 4 != 0).then_some(memory);
            let _ = device.map(iova, length, access_of(choice), memory);
        }
        act::DMA_UNMAP => {
            let (iova, length, _) = server.take(range);
            let _ = device.unmap(iova, length);
        }
        act::UNMAP_ALL => drop(device.unmap_all()),
        act::WIRE_IRQS | act::SET_IRQS => {
            let change = server.take(|input| change(server, input));
            let _ = device.set_irqs(change);
        }
        act::RESET => drop(device.reset()),
        // Twice: the second time those that are there already are given.
        act::REGISTERS => {
            let bar = server.take(|input| input.u8());
            for _ in 0..2 {
                if let Ok((file, length)) = device.registers(bar) {
                    look_at_registers(file, length);
                }
            }
        }
        _ => check(device.shape()),
    }
}

fn part(region: u32) -> FunctionRegion {
    match region % 7 {
        6 => FunctionRegion::Config,
        bar => FunctionRegion::Bar(bar as u8),
    }
}

fn change(server: &FuzzedServer, input: &mut Input<'_>) -> IrqChange {
    let kind = input.u8() % 8;
    let (_, start, mut wires) = wires(server, input);
    match kind {
        0 | 1 => IrqChange::WireVectors(start, wires),
        2 => IrqChange::UnwireVectors,
        3 => {
            IrqChange::FireVectors((0..wires.len()).map(|nth| start as u16 ^ nth as u16).collect())
        }
        4 => IrqChange::WireIntx(wires.pop().flatten()),
        5 => IrqChange::MaskIntx(true),
        6 => IrqChange::MaskIntx(false),
        _ => IrqChange::FireIntx,
    }
}
