//! What the rack file says there is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use rackbus_fabric::Topology;
use rackbus_fabric::rack::DeviceCapability;
use rackbus_lease::{CompositionRecord, FunctionId, Placement};

use super::Sections;

/// What the rack file says there is.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// Name of the rack, as its file says.
    pub rack: String,
    /// The hosts, by name.
    pub hosts: Vec<String>,
    /// Its devices, each with its functions.
    pub sections: Sections,
    /// All functions of the rack, in the order of its file.
    pub devices: InventoryDevices,
    /// Compositions of the rack file.
    pub compositions: Vec<CompositionRecord>,
    /// The components and links that `rackbus path` goes along.
    pub topology: Topology,
    /// Hosts are machines that share no memory: fronts run at their borrowers only.
    pub apart: bool,
    /// The pairs of hosts whose nodes share memory and the network through an NTB, each in either order.
    pub ntb_linked: BTreeSet<(String, String)>,
}

/// The functions of a rack in the order of its file, which may be tens of thousands; read as the slice that they are.
#[derive(Debug, Clone, Default)]
pub struct InventoryDevices {
    devices: Vec<InventoryDevice>,
    /// Where each of them is.
    places: BTreeMap<FunctionId, usize>,
}

impl InventoryDevices {
    /// The function of this name.
    pub fn get(&self, function: &FunctionId) -> Option<&InventoryDevice> {
        self.places.get(function).and_then(|place| self.devices.get(*place))
    }

    /// The functions of a host, in the order of their names.
    pub fn of_host(&self, host: &str) -> impl Iterator<Item = &InventoryDevice> {
        let first = FunctionId { host: host.to_owned(), device: String::new() };
        let own = self.places.range(first..).take_while(move |(it, _)| it.host == host);
        own.filter_map(|(_, place)| self.devices.get(*place))
    }
}

impl Deref for InventoryDevices {
    type Target = [InventoryDevice];

    fn deref(&self) -> &[InventoryDevice] {
        &self.devices
    }
}

impl From<Vec<InventoryDevice>> for InventoryDevices {
    fn from(devices: Vec<InventoryDevice>) -> InventoryDevices {
        let named = devices.iter().enumerate();
        let places = named.map(|(place, device)| (device.function.clone(), place)).collect();
        InventoryDevices { devices, places }
    }
}

impl FromIterator<InventoryDevice> for InventoryDevices {
    fn from_iter<T: IntoIterator<Item = InventoryDevice>>(devices: T) -> InventoryDevices {
        devices.into_iter().collect::<Vec<_>>().into()
    }
}

/// One function of the rack file.
#[derive(Debug, Clone)]
pub struct InventoryDevice {
    /// The function, by its lender and its name there.
    pub function: FunctionId,
    /// Its class, as the rack file has it: `nvme`.
    pub kind: String,
    /// What can be done with it, as its class says.
    pub capabilities: &'static [DeviceCapability],
    /// Size and backing, for people.
    pub detail: String,
    /// Its front can run at the borrower, apart from what is lent; on another machine where hosts are
    /// [apart](Inventory::apart).
    pub separable: bool,
    /// The hosts to which NTBs of its lender lead, in whose own PCI trees it can appear; none where it is neither a function
    /// of the machine itself nor of a class whose registers can be polled.
    pub windows: BTreeSet<String>,
}

impl InventoryDevice {
    /// Whether its front can run at `placement` for `borrower`.
    pub(super) fn serves(&self, placement: Placement, borrower: &str) -> bool {
        match placement {
            Placement::Lender => true,
            Placement::Borrower => self.separable,
            Placement::Host => self.windows.contains(borrower),
        }
    }
}
