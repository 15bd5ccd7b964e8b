//! The configuration space of an end: who the function is, and what `ntb_hw_intel` reads beside that.

use rackbus_pci::config::{ConfigSpace, MsixPlace};
use rackbus_pci::{Bar, FunctionInfo};

use super::map;
use super::registers::{BridgeSide, BridgeWindows};

/// The configuration space of an end.
pub(super) fn config_space(side: BridgeSide, windows: [BridgeWindows; 2]) -> ConfigSpace {
    let [own, peer] = [side, side.peer()].map(|side| windows[side.index()].sizes);
    let log2 = |size: u64| size.trailing_zeros();
    let port = match side {
        BridgeSide::A => 0,
        BridgeSide::B => map::PPD_DOWNSTREAM,
    };
    let [first, second] = [0, 1].map(|window| (log2(own[window]), log2(peer[window])));
    let registers = [
        (map::BAR_SIZES, 1, first.0),
        (map::BAR_SIZES + 1, 1, second.0),
        (map::BAR_SIZES + 2, 1, first.1),
        (map::BAR_SIZES + 3, 1, second.1),
        (map::PPD, 1, u32::from(map::PPD_BACK_TO_BACK | port)),
        (map::LINK_STATUS, 2, u32::from(map::LINK_SHAPE)),
    ];
    let msix = MsixPlace {
        bar: map::BAR_REGISTERS,
        table: map::MSIX_TABLE as u32,
        pba: map::MSIX_PENDING as u32,
    };
    ConfigSpace::with(&info(own), msix, &registers)
}

/// Who the function is.
fn info(windows: [u64; 2]) -> FunctionInfo {
    const BRIDGE_OTHER: [u8; 3] = [0x06, 0x80, 0];
    let bar = |index, size, prefetchable| Bar {
        index,
        size,
        is_64bit: true,
        prefetchable,
        mappable: None,
    };
    let mut bars = vec![bar(map::BAR_REGISTERS, map::BAR0_SIZE, false)];
    bars.extend(map::BAR_WINDOWS.iter().zip(windows).map(|(index, size)| bar(*index, size, true)));
    FunctionInfo {
        vendor_id: map::ID.0,
        device_id: map::ID.1,
        subsystem_vendor_id: 0x1af4,
        subsystem_id: 0x1100,
        revision: 0,
        class: BRIDGE_OTHER,
        bars,
        msix_vectors: map::MSIX_VECTORS,
        msi_vectors: 0,
        vendor: Vec::new(),
        serial: 0,
    }
}
