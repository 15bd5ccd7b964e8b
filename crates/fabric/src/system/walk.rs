//! The walk that `resolve` and `route` share: from a requester, through its IOMMU domain and address spaces, window by
//! window to where an access ends.

use super::{AccessError, AddressTarget, Fabric, MOST_WINDOWS, Place, Requester, Resolved};
use crate::domain::{Access, Domain};
use crate::topology::{ComponentId, ComponentKind, HostId};

/// Where a walk has come to.
struct WalkPosition {
    host: HostId,
    /// `None` for a processor.
    requester: Option<ComponentId>,
    /// What is looked up is an interrupt.
    raises: bool,
    address: u64,
    length: u64,
    windows: usize,
}

impl Fabric {
    /// Follows an access to where it ends, telling each component that it must pass.
    pub(super) fn walk(
        &self,
        requester: Requester,
        address: u64,
        length: u64,
        access: Access,
        mut passes: impl FnMut(ComponentId),
    ) -> Result<Resolved, AccessError> {
        let mut position = self.begin(requester, address, length)?;
        loop {
            let entry = position.requester.unwrap_or(self.topology.host(position.host).root);
            let mut stops = vec![entry];
            self.topology.checkpoint(position.host, entry, &mut stops);
            stops.into_iter().for_each(&mut passes);
            let (target, offset, covered) = self.look_up(&position, access)?;
            match *target {
                AddressTarget::Memory { offset: base } => {
                    passes(self.topology.host(position.host).memory);
                    let place = Place::Memory { host: position.host, offset: base + offset };
                    return Ok(Resolved { place, length: covered, windows: position.windows });
                }
                AddressTarget::Lent { object, offset: base } => {
                    passes(self.topology.host(position.host).memory);
                    let offset = base + offset;
                    let place = Place::Lent { host: position.host, object, offset };
                    return Ok(Resolved { place, length: covered, windows: position.windows });
                }
                AddressTarget::Interrupt { number, data } => {
                    passes(self.topology.host(position.host).root);
                    let place = Place::Interrupt { host: position.host, number, data };
                    return Ok(Resolved { place, length: covered, windows: position.windows });
                }
                AddressTarget::Wired(interrupt) => {
                    passes(self.topology.host(position.host).root);
                    let place = Place::Wired { host: position.host, interrupt };
                    return Ok(Resolved { place, length: covered, windows: position.windows });
                }
                AddressTarget::Bar { device, bar, offset: base } => {
                    passes(device);
                    let place = Place::Bar { device, bar, offset: base + offset };
                    return Ok(Resolved { place, length: covered, windows: position.windows });
                }
                AddressTarget::Window { ntb, peer, address } => {
                    passes(ntb);
                    if position.windows == MOST_WINDOWS {
                        return Err(AccessError::Circle);
                    }
                    let host = self.topology.component(peer).host.ok_or(AccessError::Requester)?;
                    position = WalkPosition {
                        host,
                        requester: Some(peer),
                        raises: false,
                        address: address + offset,
                        length: covered,
                        windows: position.windows + 1,
                    };
                }
            }
        }
    }

    fn begin(
        &self,
        requester: Requester,
        address: u64,
        length: u64,
    ) -> Result<WalkPosition, AccessError> {
        let raises = matches!(requester, Requester::Interrupts(_));
        let (host, requester) = match requester {
            Requester::Cpu(host) => (host, None),
            Requester::Device(id) | Requester::Interrupts(id) => {
                let component = self.topology.component(id);
                let device = component.kind == ComponentKind::Device;
                (component.host.filter(|_| device).ok_or(AccessError::Requester)?, Some(id))
            }
        };
        Ok(WalkPosition { host, requester, raises, address, length, windows: 0 })
    }

    /// What the position's address leads to: the target, the offset into its mapping, and how many
    /// bytes lie there. A mapping's offsets stay below 2^64: checked when it was made.
    fn look_up(
        &self,
        position: &WalkPosition,
        access: Access,
    ) -> Result<(&AddressTarget, u64, u64), AccessError> {
        let refused = |fault| AccessError::Fault {
            host: position.host,
            requester: position.requester,
            fault,
            windows: position.windows,
        };
        let (mut address, mut length) = (position.address, position.length);
        // Who wires an interrupt says where it goes, also where no IOMMU checks DMA.
        let checked = position.raises || self.topology.host(position.host).iommu;
        if let Some(requester) = position.requester.filter(|_| checked) {
            let empty = Domain::new();
            let tables = if position.raises { &self.remapping } else { &self.domains };
            let domain = tables.get(&requester).unwrap_or(&empty);
            let hit = domain.resolve(address, length, access).map_err(refused)?;
            (address, length) = (hit.target + hit.offset, hit.length);
        }
        match self.spaces.get(&position.host) {
            Some(space) => {
                let hit = space.resolve(address, length, access).map_err(refused)?;
                Ok((hit.target, hit.offset, hit.length))
            }
            None => {
                let fault = Domain::<AddressTarget>::new().resolve(address, length, access).err();
                Err(fault.map_or(AccessError::NoWay, refused))
            }
        }
    }
}
