//! Rackbus' own messages between nodes: windows to BARs of other functions.
//!
//! The borrower's node sends them to a function's lender. Who opens a borrowed function's socket cannot: the
//! devices that a node serves there know no windows.

use std::sync::Arc;

use rackbus_fabric::BarPlace;
use rackbus_memory::MemoryHandle;
use rackbus_spec::vfio_user::{DmaUnmap, PeerMap};

use super::{Reply, access, exact, invalid};
use crate::vfio_user::device::{RequestRefused, ServedDevice};
use crate::vfio_user::wire::WireMessage;

/// A PCI function has BARs 0 to 5.
const BARS: u32 = 6;

pub(super) fn map(
    device: &dyn ServedDevice,
    mut message: WireMessage,
) -> Result<Reply, RequestRefused> {
    let peer: PeerMap = message.head().ok_or_else(|| invalid("the message is too short"))?;
    let name = message.tail::<PeerMap>();
    if name.len() != peer.name_length as usize {
        return Err(invalid("the name of PEER_MAP has another length than it says"));
    }
    let function =
        std::str::from_utf8(name).map_err(|cause| invalid(cause.to_string()))?.to_owned();
    let bar = u8::try_from(peer.bar).ok().filter(|_| peer.bar < BARS);
    let bar = bar.ok_or_else(|| invalid(format!("there is no BAR {}", peer.bar)))?;
    let place = BarPlace { function, bar, offset: peer.bar_offset };
    let access = access(&peer.map)?;
    let (Some(fd), true) = (message.fds.pop(), message.fds.is_empty()) else {
        return Err(invalid("PEER_MAP takes one descriptor"));
    };
    let memory = MemoryHandle::of_bar(Arc::new(fd), peer.map.offset, &place);
    let memory = memory.map_err(|cause| invalid(cause.to_string()))?;
    device.open_window(peer.map.address, peer.map.size, access, place, memory)?;
    Ok(Reply::default())
}

pub(super) fn unmap(
    device: &dyn ServedDevice,
    message: &WireMessage,
) -> Result<Reply, RequestRefused> {
    let unmap: DmaUnmap = exact(message)?;
    device.close_window(unmap.address, unmap.size)?;
    Ok(Reply::default())
}
