//! Inputs to begin with: a server that answers as it should, one that refuses, and such as do not keep to the protocol.

use rackbus_spec::pcie::capability;
use rackbus_spec::vfio_user::{
    CAP_SPARSE_MMAP, CapHeader, DeviceInfo, IrqInfo, IrqSetFlags, RegionAccess, RegionInfo,
    RegionInfoFlags, Registers, SparseArea, SparseMmap, Version, command, irq, region,
};
use zerocopy::IntoBytes;

use super::server::{ERROR, answer, beside};
use super::{act, mode};

/// An answer as the input spells it.
fn says(kind: u8, beside: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, beside, body.len() as u8], body].concat()
}

fn done() -> Vec<u8> {
    says(0, 0, &[])
}

fn refused() -> Vec<u8> {
    // EINVAL.
    [says(ERROR, 0, &[]), vec![22]].concat()
}

/// So many descriptors of a kind.
fn fds(kind: u8, count: u8) -> u8 {
    kind << 4 | count
}

/// A number as [`Input::number`](crate::input::Input::number) reads it.
fn number(value: u32) -> Vec<u8> {
    [&[0xf4], &value.to_le_bytes()[..]].concat()
}

fn version() -> Vec<u8> {
    let version = Version { major: 0, minor: 0 };
    says(0, 0, &[version.as_bytes(), b"{\"capabilities\":{\"max_msg_fds\":8}}\0"].concat())
}

/// Says that a region has two parts that can be mapped, behind a capability that nobody knows.
fn region_with_areas(beside: u8) -> Vec<u8> {
    let all = RegionInfoFlags::READ | RegionInfoFlags::WRITE;
    let info = RegionInfo {
        argsz: 96,
        flags: (all | RegionInfoFlags::MMAP | RegionInfoFlags::CAPS).bits(),
        index: 0,
        cap_offset: 32,
        size: 0x4000,
        offset: 0x1000,
    };
    let other = CapHeader { id: 7, version: 1, next: 40 };
    let header = CapHeader { id: CAP_SPARSE_MMAP, version: 1, next: 0 };
    let sparse = SparseMmap { header, nr_areas: 2, reserved: 0 };
    let areas = [(0x1000, 0x1000), (0x2000, 0x2000)];
    let areas = areas.map(|(offset, size)| SparseArea { offset, size });
    let parts = [info.as_bytes(), other.as_bytes(), sparse.as_bytes(), areas.as_bytes()];
    says(0, beside, &parts.concat())
}

/// A region that can be mapped as a whole, and needs more room for saying so than was asked with when `more`.
fn whole_region(more: bool, beside: u8) -> Vec<u8> {
    let argsz = if more { 4096 } else { 32 };
    let flags = RegionInfoFlags::all() - RegionInfoFlags::CAPS;
    let (flags, size) = (flags.bits(), 0x1000);
    let info = RegionInfo { argsz, flags, index: 0, cap_offset: 0, size, offset: 0 };
    says(0, beside, info.as_bytes())
}

fn vectors(index: u32, count: u32) -> Vec<u8> {
    says(0, 0, IrqInfo { argsz: 16, flags: 1, index, count }.as_bytes())
}

fn registers(size: u64, beside: u8) -> Vec<u8> {
    says(0, beside, Registers { argsz: 16, bar: 0, size }.as_bytes())
}

/// An access of 32 bytes.
fn access(act: u8, region: u32) -> Vec<u8> {
    vec![act, region as u8, 0x10, 32]
}

fn map_region(offset: u32, length: u32) -> Vec<u8> {
    [vec![act::MAP_REGION, 0], number(offset), number(length)].concat()
}

/// What a client does to a function whose server is well-behaved, and what that answers.
fn used() -> Vec<u8> {
    let info = DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 };
    let trigger = (IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_TRIGGER).bits() as u8;
    let (sealed, unsealed) = (fds(beside::SEALED, 1), fds(beside::UNSEALED, 1));
    [
        [vec![act::DEVICE_INFO], says(0, 0, info.as_bytes())].concat(),
        [vec![act::REGION_INFO, 0], region_with_areas(sealed)].concat(),
        [vec![act::REGION_INFO, 2], whole_region(true, 0), whole_region(false, sealed)].concat(),
        [vec![act::IRQ_INFO, irq::MSIX as u8], vectors(irq::MSIX, 8)].concat(),
        [access(act::READ, region::CONFIG), says(answer::FITS, 0, &[])].concat(),
        [access(act::WRITE, region::BAR0), says(0, 0, &[0; 16])].concat(),
        access(act::POST, region::BAR0),
        [vec![act::DMA_MAP, 1, 64, 7], done()].concat(),
        [vec![act::DMA_UNMAP, 1, 64, 0], done()].concat(),
        [vec![act::UNMAP_ALL], done()].concat(),
        // Ten vectors, of which the first has no wire: in three messages.
        [vec![act::WIRE_IRQS, irq::MSIX as u8, 0, 10, 11], done(), done(), done()].concat(),
        [vec![act::SET_IRQS, trigger, 0, irq::INTX as u8, 0], done()].concat(),
        [vec![act::RESET], done()].concat(),
        [map_region(0x2000, 0x1800), region_with_areas(sealed)].concat(),
        [map_region(0x1000, 0x1000), region_with_areas(unsealed)].concat(),
        [vec![act::REGISTERS, 0], registers(0x2000, sealed)].concat(),
        [vec![act::OPEN_WINDOW, 1, 64, 3], done()].concat(),
        [vec![act::CLOSE_WINDOW, 1, 64, 0], done()].concat(),
    ]
    .concat()
}

/// What a borrower's node asks before it serves a function, with these capabilities: where each is, and its kind.
fn learned(capabilities: &[(u8, u8)]) -> Vec<u8> {
    let sealed = fds(beside::SEALED, 1);
    let mut said = [version(), region_with_areas(sealed), whole_region(false, sealed)].concat();
    (2..region::CONFIG).for_each(|_| said.extend(refused()));
    said.extend(whole_region(false, 0));
    said.extend(refused());
    (0..irq::COUNT).for_each(|index| said.extend(vectors(index, [1, 4, 8, 0, 1][index as usize])));
    // Shown with MSI.
    said.push(0);
    let byte = |value: u8| {
        let access = RegionAccess { offset: 0, region: region::CONFIG, count: 1 };
        says(0, 0, &[access.as_bytes(), &[value]].concat())
    };
    said.extend(byte(capabilities.first().map_or(0, |(at, _)| *at)));
    for (nth, (_, kind)) in capabilities.iter().enumerate() {
        said.extend(byte(capabilities.get(nth + 1).map_or(0, |(at, _)| *at)));
        said.extend(byte(*kind));
    }
    said
}

/// What the user of a borrowed function does, and what the server answers.
fn served() -> Vec<u8> {
    let sealed = fds(beside::SEALED, 1);
    [
        // Of configuration space, and of a BAR.
        [vec![act::READ, 6, 0x30, 0x40], says(answer::FITS, 0, &[])].concat(),
        [vec![act::WRITE, 6, 0x30, 0x20], done(), done(), done()].concat(),
        vec![act::POST, 0, 0, 4],
        [vec![act::DMA_MAP, 1, 64, 7], done()].concat(),
        [vec![act::DMA_UNMAP, 1, 64, 0], refused()].concat(),
        [vec![act::WIRE_IRQS, 0, 0, 0, 4, 0], done()].concat(),
        [vec![act::WIRE_IRQS, 3, 0, 1, 3, 0], done(), done(), done()].concat(),
        [vec![act::WIRE_IRQS, 5, 0, 0, 0, 0], done()].concat(),
        [vec![act::REGISTERS, 0], registers(0x1000, sealed)].concat(),
        [vec![act::RESET], done()].concat(),
    ]
    .concat()
}

/// Servers that do not keep to the protocol, each in one thing: what comes behind a right greeting.
fn wrong() -> Vec<Vec<u8>> {
    let read = || access(act::READ, region::BAR0);
    let unasked = |command: u16, flags: u8, body: &[u8]| {
        [says(answer::UNASKED | answer::FITS, 0, &[]), vec![command as u8, flags], says_body(body)]
            .concat()
    };
    let all = || [vec![act::REGION_INFO, 0], region_with_areas(fds(beside::SOCKET, 15))].concat();
    vec![
        [read(), refused(), vec![act::RESET], refused()].concat(),
        // A request for DMA before the answer, and a reply behind it.
        [read(), unasked(command::DMA_READ, 0, &[0; 16])].concat(),
        [read(), unasked(command::REGION_READ, 1, &[0; 17]), vec![act::RESET], done()].concat(),
        // Data of another length, and a length that cannot be.
        [read(), says(0, 0, &[0; 17]), read(), says(answer::LONG, 0, &[]), vec![0xff, 1]].concat(),
        [read(), says(answer::LENGTH, 0, &[]), vec![0xff; 4]].concat(),
        [read(), says(answer::LENGTH, 0, &[]), vec![15, 0, 0, 0]].concat(),
        // The answer to another request.
        [read(), says(3, 0, &[]), vec![9, 0, 9, 0]].concat(),
        [all(), map_region(0x1000, 0x1000), region_with_areas(fds(beside::FOLDER, 1))].concat(),
        [map_region(0x1000, 0x1000), region_with_areas(fds(beside::EVENT, 1))].concat(),
        [map_region(0, 0x1000), whole_region(false, fds(beside::DEVICE, 1))].concat(),
        [vec![act::REGISTERS, 0], registers(u64::MAX, fds(beside::UNSEALED, 1))].concat(),
    ]
}

/// Bytes behind their length.
fn says_body(body: &[u8]) -> Vec<u8> {
    [&[body.len() as u8], body].concat()
}

/// Conversations of all kinds.
pub fn seeds() -> Vec<Vec<u8>> {
    let one = |mode: u8, said: &[&[u8]]| [&[mode], &said.concat()[..]].concat();
    let messages = [(0x40, capability::MSI), (0x60, capability::MSIX)];
    let mut seeds = vec![
        one(mode::CLIENT, &[&version(), &used()]),
        one(mode::CLIENT, &[&refused()]),
        one(mode::BORROWER, &[&learned(&messages), &served()]),
        // A list of capabilities that goes in a circle.
        one(mode::BORROWER, &[&learned(&[(0x40, capability::MSIX); 48]), &served()]),
        one(mode::FOREIGN, &[&learned(&[]), &served()]),
    ];
    seeds.extend(wrong().iter().map(|wrong| one(mode::CLIENT, &[&version(), wrong])));
    seeds
}
