//! Resolve and route: against a naive walk, against each other, and against published maps.

mod loans;
mod walk;
mod ways;

use proptest::prelude::*;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{
    Access, AccessError, AddressTarget, BarPlace, ComponentId, ComponentKind, DemandMapped,
    Destination, Fabric, FabricHandle, FaultCause, FunctionInterrupt, HostId, Lending, LentMemory,
    LoanError, ObjectKey, Place, Requester, Topology, derive,
};

const ALL: Access = Access::READ.union(Access::WRITE);
const GIB: u64 = 1 << 30;

fn fabric(file: &str) -> Fabric {
    Fabric::new(derive::topology(&Rack::parse("rack.toml", file).unwrap()).unwrap())
}

fn named(fabric: &Fabric, name: &str) -> ComponentId {
    fabric.topology().named(name).unwrap_or_else(|| panic!("{name} is there"))
}

fn host(fabric: &Fabric, name: &str) -> HostId {
    fabric.topology().host_named(name).unwrap_or_else(|| panic!("{name} is there"))
}

/// Roots and hops of the way from `from` to `to`.
fn counts(fabric: &Fabric, from: &str, to: &str) -> (usize, usize) {
    let path = fabric.topology().path(named(fabric, from), named(fabric, to)).unwrap();
    (path.roots(fabric.topology()), path.hops().len())
}

/// Two lenders, two GPUs in each, on one switch with the NTB adapter, and a borrower: the bare
/// metal testbed of Device Lending (2019), figure 11.
fn lenders(iommu: bool) -> Fabric {
    let mut text = String::from("name = \"lab\"\n");
    let device = "kind = \"nvme\"\nsize = \"1 GiB\"\n";
    for host in ["one", "two"] {
        text += &format!("[hosts.{host}]\niommu = {iommu}\n");
        for gpu in ["gpu0", "gpu1"] {
            text += &format!("[hosts.{host}.devices.{gpu}]\n{device}");
        }
        text += &format!("[fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n");
        text += &format!("[fabric.switches.{host}-sw]\nhost = \"{host}\"\n");
        for part in ["gpu0", "gpu1"] {
            text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}/{part}\"]\n");
        }
        text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}-ntb\"]\n");
        text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}\"]\n");
    }
    text += "[[fabric.links]]\nends = [\"one-ntb\", \"two-ntb\"]\n";
    fabric(&text)
}

/// A rack of three hosts with a device each, for random mappings.
fn rack(iommu: [bool; 3]) -> Fabric {
    let mut text = String::from("name = \"lab\"\n");
    for (name, iommu) in ["a", "b", "c"].iter().zip(iommu) {
        text += &format!("[hosts.{name}]\nmemory = \"64 MiB\"\niommu = {iommu}\n");
        text += &format!("[hosts.{name}.devices.d]\nkind = \"nvme\"\nsize = \"1 GiB\"\n");
    }
    fabric(&text)
}

/// What there is of each of the three hosts.
struct Parts {
    hosts: [HostId; 3],
    devices: [ComponentId; 3],
    ntbs: [ComponentId; 3],
}

fn parts(fabric: &Fabric) -> Parts {
    let names = ["a", "b", "c"];
    Parts {
        hosts: names.map(|n| host(fabric, n)),
        devices: names.map(|n| named(fabric, &format!("{n}/d"))),
        ntbs: names.map(|n| named(fabric, &format!("{n}/ntb"))),
    }
}

/// Memory by the number of its file.
#[derive(Debug)]
struct File(u64, u64);

impl LentMemory for File {
    fn object(&self) -> ObjectKey {
        ObjectKey(0, self.0)
    }

    fn offset(&self) -> u64 {
        self.1
    }
}
