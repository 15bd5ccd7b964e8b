//! What others reach of this host, as loans of the fabric: a segment, a page or an interrupt is a window
//! there like the memory that a function reaches.

use std::collections::BTreeMap;

use rackbus_fabric::{Access, AddressTarget, FabricHandle, HostId, Loan};

use super::{DirectorySettings, GuestConnection};
use crate::message::{InterruptKind, NodeId, Refusal};

/// Bytes that raising an interrupt writes.
const DOORBELL: u64 = 4;

/// Lends what this host has.
#[derive(Debug)]
pub(super) struct Windows {
    fabric: FabricHandle,
    owner: NodeId,
    hosts: BTreeMap<NodeId, HostId>,
}

impl Windows {
    pub fn new(settings: &DirectorySettings, fabric: FabricHandle) -> Windows {
        let known = |(node, name): (&NodeId, &String)| Some((*node, fabric.host(name)?));
        let hosts = settings.hosts.iter().filter_map(known).collect();
        Windows { fabric, owner: settings.node, hosts }
    }

    /// Lets the processors of a guest's host reach `length` bytes of what this host exports, from
    /// `offset` on.
    pub fn memory(
        &self,
        guest: GuestConnection,
        (offset, length): (u64, u64),
        write: bool,
    ) -> Result<Loan, Refusal> {
        let mut access = Access::READ;
        access.set(Access::WRITE, write);
        self.lend(guest, length, access, AddressTarget::Memory { offset })
    }

    /// Lets them raise an interrupt.
    pub fn interrupt(
        &self,
        guest: GuestConnection,
        kind: InterruptKind,
        number: u32,
    ) -> Result<Loan, Refusal> {
        let data = kind == InterruptKind::Data;
        self.lend(guest, DOORBELL, Access::WRITE, AddressTarget::Interrupt { number, data })
    }

    fn lend(
        &self,
        guest: GuestConnection,
        length: u64,
        access: Access,
        target: AddressTarget,
    ) -> Result<Loan, Refusal> {
        let host = |node| self.hosts.get(&node).copied().ok_or(Refusal::NoSuchNode);
        let loan = self.fabric.share(host(guest.0)?, host(self.owner)?, length, access, target);
        loan.map_err(|error| Refusal::System(error.to_string()))
    }
}
