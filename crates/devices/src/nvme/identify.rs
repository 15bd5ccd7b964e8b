//! What the drive says of itself (NVM Express base 1.4, section 5.15). Everything announced here
//! is carried out elsewhere; what is not announced is refused.

use rackbus_spec::nvme::VERSION_1_4;
use rackbus_spec::nvme::identify::{self as id, IdentifyController, IdentifyNamespace, LbaFormat};
use zerocopy::FromZeros;

use super::config::NvmeConfig;
use super::events::REQUEST_LIMIT;
use super::features::{CRITICAL_TEMPERATURE, WARNING_TEMPERATURE};
use super::logs::ERROR_ENTRIES;

/// PCI vendor and subsystem vendor id. 1234h is assigned to nobody and used by emulators.
pub const VENDOR_ID: u16 = 0x1234;
/// PCI device and subsystem id, within that vendor id.
pub const DEVICE_ID: u16 = 0x7262;
/// Identifier of the controller's only namespace.
pub const NSID: u32 = 1;
/// Largest transfer, as a power of two of 4096 bytes: 1 MiB.
const MDTS: u8 = 8;
/// Largest transfer in bytes.
pub const MAX_TRANSFER: u64 = 4096 << MDTS;
/// Abort commands that may be outstanding, 0's based. Each completes at once.
const ABORT_LIMIT: u8 = 3;
/// The page cache's and most file systems' block.
const PREFERRED_BYTES: u64 = 4096;

/// The size of the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Logical block size as a power of two.
    pub block_shift: u8,
    /// Number of logical blocks.
    pub blocks: u64,
}

impl Geometry {
    /// `count` blocks from `slba` as an offset and a length in bytes; `None` beyond the end.
    #[inline]
    pub fn range(&self, slba: u64, count: u64) -> Option<(u64, u64)> {
        let end = slba.checked_add(count)?;
        // What fits in the namespace fits in 63 bits when shifted.
        (end <= self.blocks).then(|| (slba << self.block_shift, count << self.block_shift))
    }
}

/// The drive's names and size.
#[derive(Debug, Clone)]
pub struct Identity {
    serial: [u8; 20],
    model: [u8; 40],
    uuid: [u8; 16],
    /// Size of the namespace and of its blocks.
    pub geometry: Geometry,
    /// Whether writes can rest in a volatile cache.
    pub volatile_cache: bool,
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [b' '; N];
    for (slot, byte) in out.iter_mut().zip(text.bytes()) {
        *slot = byte;
    }
    out
}

/// FNV-1a with 64 bits: a name for a text, not a secret.
fn fnv(seed: u64, text: &str) -> u64 {
    text.bytes()
        .fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A version 8 UUID (RFC 9562, section 5.8) that depends on `text` alone.
fn uuid(text: &str) -> [u8; 16] {
    let high = fnv(0xcbf2_9ce4_8422_2325, text);
    let low = fnv(high ^ 0x9e37_79b9_7f4a_7c15, text);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&high.to_be_bytes());
    bytes[8..].copy_from_slice(&low.to_be_bytes());
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

impl Identity {
    /// From a checked description and the capacity that its backing has.
    pub fn new(config: &NvmeConfig, capacity: u64, volatile_cache: bool) -> Self {
        let block_shift = config.block_size.trailing_zeros() as u8;
        Identity {
            serial: padded(&config.serial),
            model: padded(&config.model),
            uuid: uuid(&format!("{}/{}", config.model, config.serial)),
            geometry: Geometry { block_shift, blocks: capacity >> block_shift },
            volatile_cache,
        }
    }

    /// The firmware revision: the version of this crate.
    pub fn firmware(&self) -> [u8; 8] {
        padded(env!("CARGO_PKG_VERSION"))
    }

    /// A number for the PCIe device serial number capability.
    pub fn pci_serial(&self) -> u64 {
        u64::from_be_bytes(*self.uuid.first_chunk().expect("16 bytes"))
    }

    /// The Identify Controller data structure (CNS 01h).
    pub fn controller(&self) -> IdentifyController {
        let mut data = IdentifyController::new_zeroed();
        data.vid = VENDOR_ID;
        data.ssvid = VENDOR_ID;
        data.sn = self.serial;
        data.mn = self.model;
        data.fr = self.firmware();
        data.rab = 6;
        data.mdts = MDTS;
        data.cntlid = 1;
        data.ver = VERSION_1_4;
        data.ctratt = id::CTRATT_HOST_ID_128;
        data.cntrltype = 1;
        data.oacs = id::OACS_DOORBELL_BUFFER;
        data.acl = ABORT_LIMIT;
        data.aerl = (REQUEST_LIMIT - 1) as u8;
        // One firmware slot, read only.
        data.frmw = 1 << 1 | 1;
        data.lpa = id::LPA_COMMANDS_SUPPORTED | id::LPA_EXTENDED;
        data.elpe = (ERROR_ENTRIES - 1) as u8;
        data.wctemp = WARNING_TEMPERATURE;
        data.cctemp = CRITICAL_TEMPERATURE;
        data.sqes = 0x66;
        data.cqes = 0x44;
        data.nn = NSID;
        data.oncs = id::ONCS_COMPARE
            | id::ONCS_DATASET_MANAGEMENT
            | id::ONCS_WRITE_ZEROES
            | id::ONCS_SAVE_SELECT
            | id::ONCS_VERIFY;
        data.vwc = id::VWC_FLUSH_ALL | if self.volatile_cache { id::VWC_PRESENT } else { 0 };
        data.sgls = id::SGLS_SUPPORTED | id::SGLS_BIT_BUCKET | id::SGLS_EXCESS_LENGTH;
        let nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{}", self.uuid_text());
        data.subnqn[..nqn.len()].copy_from_slice(nqn.as_bytes());
        // One power state; its figures are not known.
        data.psd[0].max_power = 100;
        data
    }

    fn uuid_text(&self) -> String {
        let value = u128::from_be_bytes(self.uuid);
        format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            value >> 96,
            value >> 80 & 0xffff,
            value >> 64 & 0xffff,
            value >> 48 & 0xffff,
            value & 0xffff_ffff_ffff
        )
    }

    /// The Identify Namespace data structure (CNS 00h).
    pub fn namespace(&self) -> IdentifyNamespace {
        let mut data = IdentifyNamespace::new_zeroed();
        let Geometry { block_shift, blocks } = self.geometry;
        data.nsze = blocks;
        data.ncap = blocks;
        data.nuse = blocks;
        data.nsfeat = id::NSFEAT_OPTIMAL;
        data.dlfeat = id::DLFEAT_READS_ZERO | id::DLFEAT_WRITE_ZEROES_DEAC;
        let preferred = ((PREFERRED_BYTES >> block_shift) - 1) as u16;
        data.npwg = preferred;
        data.npwa = preferred;
        data.npdg = preferred;
        data.npda = preferred;
        data.nows = ((MAX_TRANSFER >> block_shift) - 1) as u16;
        data.lbaf[0] = LbaFormat { ms: 0, lbads: block_shift, rp: 0 };
        data
    }

    /// CNS 03h: the namespace's UUID.
    pub fn namespace_descriptors(&self) -> Vec<u8> {
        let mut data = vec![0; id::IDENTIFY_SIZE];
        data[..4].copy_from_slice(&[id::NIDT_UUID, 16, 0, 0]);
        data[4..20].copy_from_slice(&self.uuid);
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_never_leaves_the_namespace(slba: u64, count in 0u64..1 << 33, blocks in 0u64..1 << 51) {
            let geometry = Geometry { block_shift: 12, blocks };
            let inside = u128::from(slba) + u128::from(count) <= u128::from(blocks);
            prop_assert_eq!(geometry.range(slba, count), inside.then_some((slba << 12, count << 12)));
        }
    }

    #[test]
    fn names_depend_on_the_serial_alone() {
        let a = Identity::new(&NvmeConfig::memory(1 << 20, "A"), 1 << 20, false);
        let again = Identity::new(&NvmeConfig::memory(1 << 30, "A"), 1 << 30, true);
        let b = Identity::new(&NvmeConfig::memory(1 << 20, "B"), 1 << 20, false);
        assert_eq!(a.uuid, again.uuid);
        assert_ne!(a.uuid, b.uuid);
        let text = a.uuid_text();
        assert_eq!((text.len(), &text[14..15]), (36, "8"));
        assert_eq!(a.controller().sn, *b"A                   ");
    }
}
