//! A vfio-user server that answers anything it likes to a client, with descriptors beside its answers.
//!
//! The input is what a client does and what it is answered, in turn: by itself, as whoever has a socket uses it, or as
//! the function of another host that a borrower's node serves (`device`). The server sees each request, and with it
//! that the client speaks as it must: one request at a time, well-formed, and none after the conversation has ended.

mod device;
mod seeds;
mod server;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, Region};
use rackbus_pci::PolledRegisters;
use rackbus_pci::vfio_user::{Client, ClientError};
use rackbus_spec::vfio_user::{IrqSetFlags, RegionAccess, RegionInfo};
use zerocopy::FromBytes;

pub use seeds::seeds;
use server::FuzzedServer;

use crate::input::Input;

/// Most requests of one conversation.
const MOST: usize = 64;
/// Most bytes of an access.
const LONGEST: u64 = 70_000;
/// Most areas of a region that anybody looks at.
const MOST_AREAS: usize = 64;

/// What the client does: in an input, one byte.
mod act {
    pub(super) const DEVICE_INFO: u8 = 0;
    pub(super) const REGION_INFO: u8 = 1;
    pub(super) const IRQ_INFO: u8 = 2;
    pub(super) const READ: u8 = 3;
    pub(super) const WRITE: u8 = 4;
    pub(super) const POST: u8 = 5;
    pub(super) const DMA_MAP: u8 = 6;
    pub(super) const DMA_UNMAP: u8 = 7;
    pub(super) const UNMAP_ALL: u8 = 8;
    pub(super) const WIRE_IRQS: u8 = 9;
    pub(super) const SET_IRQS: u8 = 10;
    pub(super) const RESET: u8 = 11;
    pub(super) const MAP_REGION: u8 = 12;
    pub(super) const REGISTERS: u8 = 13;
    pub(super) const OPEN_WINDOW: u8 = 14;
    pub(super) const CLOSE_WINDOW: u8 = 15;
    pub(super) const COUNT: u8 = 16;
}

/// Who speaks to the server: the first byte of an input.
mod mode {
    pub(super) const CLIENT: u8 = 0;
    pub(super) const BORROWER: u8 = 1;
    /// The borrower of a function whose server is not a node's.
    pub(super) const FOREIGN: u8 = 2;
    pub(super) const COUNT: u8 = 3;
}

/// Holds the conversation that `data` says.
pub fn run(data: &[u8]) {
    let server = Arc::new(FuzzedServer::new(data));
    match server.take(|input| input.u8()) % mode::COUNT {
        mode::CLIENT => {
            if let Ok(client) = Client::with_stream(server.clone()) {
                for _ in 0..MOST {
                    if !server.says_more() {
                        break;
                    }
                    ask(&client, &server);
                }
                client.shut_down();
                let after = client.reset();
                assert!(matches!(after, Err(ClientError::Wire(_))), "it has ended: {after:?}");
            }
        }
        served => device::use_one(&server, served == mode::FOREIGN),
    }
    assert!(server.has_its_descriptors_back(), "a descriptor that came along stays open");
}

/// Has the client do one thing.
fn ask(client: &Client, server: &FuzzedServer) {
    // What it is answered is anything; what it makes of it is looked at where something must hold.
    match server.take(|input| input.u8()) % act::COUNT {
        act::DEVICE_INFO => drop(client.device_info()),
        act::REGION_INFO => look_at_region(client, server),
        act::IRQ_INFO => drop(client.irq_info(server.take(|input| input.u8()).into())),
        act::READ => read(client, server),
        written @ (act::WRITE | act::POST) => {
            let (region, offset, length) = server.take(access);
            let data = vec![region as u8; length];
            let _ = match written {
                act::WRITE => client.write(region, offset, &data),
                _ => client.post(region, offset, &data),
            };
        }
        act::DMA_MAP => {
            let (iova, length, choice) = server.take(range);
            let memory = (choice & 4 != 0).then(|| (server.event.as_fd(), length));
            let _ = client.dma_map(iova, length, access_of(choice), memory);
        }
        act::DMA_UNMAP => {
            let (iova, length, _) = server.take(range);
            let _ = client.dma_unmap(iova, length);
        }
        act::UNMAP_ALL => drop(client.dma_unmap_all()),
        act::WIRE_IRQS => {
            let (index, start, wires) = server.take(|input| wires(server, input));
            let _ = client.wire_irqs(index, start, &wires);
        }
        act::SET_IRQS => {
            let (flags, bools) = server.take(|input| (input.u8(), input.short().to_vec()));
            let flags = IrqSetFlags::from_bits_truncate(flags.into());
            let (index, start) = server.take(|input| (input.u8(), input.number()));
            let _ = client.set_irqs(index.into(), start as u32, 1, flags, &bools, &[]);
        }
        act::RESET => drop(client.reset()),
        act::MAP_REGION => map_region(client, server),
        act::REGISTERS => {
            if let Ok((file, length)) = client.registers(server.take(|input| input.u8())) {
                look_at_registers(file, length);
            }
        }
        act::OPEN_WINDOW => {
            let (iova, length, choice) = server.take(range);
            let function = "host/function".to_owned();
            let place = BarPlace { function, bar: choice % 6, offset: iova / 2 };
            let memory = (server.event.as_fd(), length);
            let _ = client.open_window(iova, length, access_of(choice), &place, memory);
        }
        act::CLOSE_WINDOW => {
            let (iova, length, _) = server.take(range);
            let _ = client.close_window(iova, length);
        }
        other => unreachable!("{other}"),
    }
}

/// What an access is to: region, offset and length.
fn access(input: &mut Input<'_>) -> (u32, u64, usize) {
    let (region, offset) = (input.u8().into(), input.number());
    (region, offset, input.number().min(LONGEST) as usize)
}

/// A range of addresses, and a choice.
fn range(input: &mut Input<'_>) -> (u64, u64, u8) {
    (input.number(), input.number(), input.u8())
}

fn access_of(choice: u8) -> Access {
    Access::from_bits_truncate(choice & 3)
}

/// Interrupts to wire: index, first vector, and a descriptor for each vector, or none.
fn wires(server: &FuzzedServer, input: &mut Input<'_>) -> (u32, u32, Vec<Option<OwnedFd>>) {
    let (index, start) = (input.u8().into(), input.number() as u32);
    let (count, bare) = (input.u8() % 40, input.u8());
    let event = || server.event.as_fd().try_clone_to_owned().expect("there is room for it");
    let wire = |nth| (bare == 0 || nth % bare != 0).then(event);
    (index, start, (0..count).map(wire).collect())
}

fn read(client: &Client, server: &FuzzedServer) {
    let (region, offset, length) = server.take(access);
    let mut data = vec![0; length];
    if client.read(region, offset, &mut data).is_ok() {
        let answered = server.answered();
        let said = answered.get(size_of::<RegionAccess>()..).unwrap_or(&[]);
        assert_eq!(data, said, "it read what the server did not say");
    }
}

/// That what a region is said to be made of is inside of it.
fn check_areas(size: u64, areas: &[(u64, u64)]) {
    assert!(areas.len() <= MOST_AREAS, "{} areas", areas.len());
    for (offset, length) in areas {
        let end = offset.checked_add(*length);
        assert!(*length > 0 && end.is_some_and(|end| end <= size), "{areas:x?} of {size:#x}");
    }
}

fn look_at_region(client: &Client, server: &FuzzedServer) {
    if let Ok(region) = client.region_info(server.take(|input| input.u8()).into()) {
        check_areas(region.size, &region.areas);
    }
}

/// Maps a part of a region and touches it, also after its server has truncated the file.
fn map_region(client: &Client, server: &FuzzedServer) {
    let (region, offset, length) =
        server.take(|input| (input.u8(), input.number(), input.number()));
    let Ok(mapping) = client.map_region(region.into(), offset, length) else { return };
    assert_eq!(mapping.len() as u64, length);
    let answered = server.answered();
    let (info, _) = RegionInfo::read_from_prefix(&answered).expect("it was taken for one");
    let end = offset.checked_add(length).expect("it was mapped");
    assert!(end <= info.size, "{offset:#x}+{length:#x} of {:#x}", info.size);
    let last = info.offset.checked_add(end).expect("it was mapped");
    assert!(last <= server::MEMORY, "up to {last:#x} of a file that is shorter");
    touch(&mapping);
    server.truncate();
    touch(&mapping);
}

/// Reads and writes the first and the last words of a mapping.
fn touch(mapping: &Region) {
    let whole = mapping.whole();
    for at in [0, whole.len().saturating_sub(4) & !3] {
        if let Some(word) = whole.load_u32(at, Ordering::Relaxed) {
            let _ = whole.store_u32(at, word.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

fn look_at_registers(file: OwnedFd, length: u64) {
    let Ok(registers) = PolledRegisters::adopt(file, length) else { return };
    registers.store_pair(length.saturating_sub(8), 7);
    registers.load_pair(length.saturating_sub(4));
    registers.retire();
    assert_eq!(registers.load(0), u32::MAX);
}
