//! Devices of the rack, as programs of a host learn of them from its node.

use serde::{Deserialize, Serialize};

use super::NodeId;

/// The most functions that a process may have borrowed at a time.
pub const MOST_BORROWED: u32 = 64;

/// A function that a program may borrow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEntry {
    /// Its fabric device id: [`fabric_device_id`].
    pub fdid: u64,
    /// Name of the function in the rack, `HOST/DEVICE`.
    pub function: String,
    /// Number of its host.
    pub node: NodeId,
    /// PCI vendor id; 0 where it is known only to who borrows it.
    pub vendor_id: u16,
    /// PCI device id, or 0.
    pub device_id: u16,
    /// PCI class code: base class, sub-class and programming interface, from bit 23 on down. Or 0.
    pub class: u32,
    /// Whether nobody has it.
    pub free: bool,
}

/// A function that a process has borrowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowedEntry {
    /// Number of its lease.
    pub lease: u64,
    /// What is known of it.
    pub device: DeviceEntry,
    /// The vfio-user socket by which it is used, a path on this host.
    pub socket: String,
}

/// The fabric device id of `device` of a host: the host's number in the upper 16 bits, and below a hash of the
/// name (FNV-1a, folded to 48 bits). So it is the same in every process, and for as long as the device has its name.
pub fn fabric_device_id(node: NodeId, device: &str) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    const LOWER: u64 = (1 << 48) - 1;
    let hash =
        device.bytes().fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    u64::from(node & 0xffff) << 48 | (hash ^ hash >> 48) & LOWER
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_that_programs_have_noted() {
        assert_eq!(fabric_device_id(4, "nvme0") >> 48, 4);
        // A change of the hash would break programs that keep an id.
        assert_eq!(fabric_device_id(4, ""), 0x0004_9ce4_8422_e8d7);
    }

    #[test]
    fn devices_of_a_rack_have_ids_of_their_own() {
        let mut all = std::collections::BTreeSet::new();
        for node in (4..=252).step_by(4) {
            for device in 0..200 {
                assert!(all.insert(fabric_device_id(node, &format!("nvme0.vf{device}"))));
                assert!(all.insert(fabric_device_id(node, &format!("nvme{device}"))));
            }
        }
    }
}
