//! The configuration space that a borrower sees of a lent device (pure): made once of the device's own.
//!
//! It has the device's identity, PCI Express, MSI-X, vendor-specific capabilities and the serial number; what makes
//! no sense through an NTB (MSI, the pin, power management, error reporting, virtual functions, address translation)
//! is left out. Source: PCIe base 6.0, sections 7.5.1, 7.5.3, 7.7.2, 7.9.3 and 7.9.4.

use std::ops::Range;

use rackbus_spec::pcie::{capability, express, header, msix};
use serde::{Deserialize, Serialize};

use crate::requests::Writable;
use crate::window::PAGE;

/// Bytes of the configuration space that old devices have.
const CONVENTIONAL: usize = 256;
/// Where capabilities may begin.
const FIRST_CAPABILITY: u8 = 0x40;
/// Where extended capabilities begin.
const EXTENDED: usize = 0x100;
const SERIAL_BYTES: usize = 12;
/// Bytes of PCI Express' capability of version 1.
const EXPRESS_1_BYTES: usize = 0x14;
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Where a device has its MSI-X table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixTable {
    /// The BAR that has the structure, 0 to 5.
    pub bar: u8,
    /// Where it begins in the BAR, in bytes.
    pub offset: u32,
    /// Entries, 1 to 2048.
    pub entries: u16,
}

/// A configuration space, ready to be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// What the borrower reads.
    pub bytes: Box<[u8; PAGE]>,
    /// Where the table is, of a device that has one.
    pub msix: Option<MsixTable>,
    /// Which registers a borrower may ask to be written.
    pub writable: Writable,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// Makes what is shown of a device whose configuration space begins with `found`: 256 bytes or more. `None` when it is
/// no ordinary function's (type 0), or too short.
pub fn of(found: &[u8]) -> Option<Image> {
    if found.len() < CONVENTIONAL || found[usize::from(header::HEADER_TYPE)] & 0x7f != 0 {
        return None;
    }
    let mut bytes = Box::new([0; PAGE]);
    let mut keep = |at: u16, length: usize| {
        let at = usize::from(at);
        bytes[at..at + length].copy_from_slice(&found[at..at + length]);
    };
    keep(header::VENDOR_ID, 4);
    // Revision and class code.
    keep(header::REVISION_ID, 4);
    keep(header::SUBSYSTEM_VENDOR_ID, 4);
    let mut writable = Writable { msix_control: 0, device_control: 0 };
    let mut table_at = None;
    let mut link = usize::from(header::CAPABILITIES_POINTER);
    let mut used: Vec<Range<usize>> = Vec::new();
    for (kind, at) in capabilities(found) {
        let place = usize::from(at);
        let Some(length) = length_of(kind, found, place) else { continue };
        let end = place + length;
        // One that lies over another, or that there is twice, is none.
        let is_clear = used.iter().all(|range| end <= range.start || range.end <= place);
        match kind {
            _ if end > CONVENTIONAL || !is_clear => continue,
            capability::PCI_EXPRESS if writable.device_control == 0 => {
                writable.device_control = u16::from(at) + express::DEVICE_CONTROL;
            }
            capability::MSIX if table_at.is_none() => {
                let table = u32_at(found, place + 4);
                let entries = (u16_at(found, place + 2) & 0x7ff) + 1;
                table_at = Some(MsixTable { bar: (table & 7) as u8, offset: table & !7, entries });
                writable.msix_control = u16::from(at) + msix::CONTROL;
            }
            capability::VENDOR => {}
            _ => continue,
        }
        used.push(place..end);
        bytes[place..end].copy_from_slice(&found[place..end]);
        bytes[link] = at;
        link = place + 1;
        bytes[link] = 0;
    }
    if bytes[usize::from(header::CAPABILITIES_POINTER)] != 0 {
        let status = usize::from(header::STATUS);
        bytes[status..status + 2].copy_from_slice(&STATUS_CAPABILITIES.to_le_bytes());
    }
    let control = usize::from(writable.device_control);
    if control != 0 {
        bytes[control..control + 2].fill(0);
        // The lender resets it by whatever way there is.
        let at = control - usize::from(express::DEVICE_CONTROL - express::DEVICE_CAPABILITIES);
        let features = u32_at(&bytes[..], at) | express::DEVCAP_FLR;
        bytes[at..at + 4].copy_from_slice(&features.to_le_bytes());
    }
    let at = usize::from(writable.msix_control);
    if at != 0 {
        let size = u16_at(&bytes[..], at) & 0x7ff;
        bytes[at..at + 2].copy_from_slice(&size.to_le_bytes());
    }
    if let Some(serial) = serial_number(found) {
        bytes[EXTENDED..EXTENDED + SERIAL_BYTES].copy_from_slice(serial);
        // The last of its chain.
        bytes[EXTENDED + 2..EXTENDED + 4].copy_from_slice(&1u16.to_le_bytes());
    }
    Some(Image { bytes, msix: table_at, writable })
}

/// Bytes of a capability that is shown; `None` for one that is not.
fn length_of(kind: u8, found: &[u8], place: usize) -> Option<usize> {
    match kind {
        capability::PCI_EXPRESS => {
            let version = u16_at(found, place + usize::from(express::CAPABILITIES)) & 0xf;
            let short = version < express::VERSION_2;
            Some(if short { EXPRESS_1_BYTES } else { express::SIZE.into() })
        }
        capability::MSIX => Some(msix::SIZE.into()),
        capability::VENDOR => Some(found[place + 2].into()).filter(|length| *length >= 4),
        _ => None,
    }
}

/// The capabilities, each its number and place; a chain that goes round ends.
fn capabilities(found: &[u8]) -> Vec<(u8, u8)> {
    let mut all: Vec<(u8, u8)> = Vec::new();
    if u16_at(found, header::STATUS.into()) & STATUS_CAPABILITIES == 0 {
        return all;
    }
    let mut at = found[usize::from(header::CAPABILITIES_POINTER)] & !3;
    while at >= FIRST_CAPABILITY && !all.iter().any(|(_, known)| *known == at) {
        all.push((found[usize::from(at)], at));
        at = found[usize::from(at) + 1] & !3;
    }
    all
}

/// The capability with the serial number.
fn serial_number(found: &[u8]) -> Option<&[u8]> {
    let mut at = EXTENDED;
    // As many as there can be.
    for _ in 0..(PAGE - EXTENDED) / 8 {
        let entry = found.get(at..at + SERIAL_BYTES)?;
        if u16_at(entry, 0) == capability::EXT_SERIAL_NUMBER {
            return Some(entry);
        }
        at = usize::from(u16_at(entry, 2) >> 4 & !3);
        if at < EXTENDED {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A drive with power management, MSI, PCI Express, MSI-X and a serial number behind error reporting.
    fn drive() -> Vec<u8> {
        let mut found = vec![0; PAGE];
        found[..16]
            .copy_from_slice(&[0x86, 0x80, 0x45, 0x58, 6, 4, 0x10, 0, 2, 2, 8, 1, 8, 0, 0x80, 0]);
        found[0x10..0x14].copy_from_slice(&0xfe00_0004u32.to_le_bytes());
        found[0x2c..0x30].copy_from_slice(&[0xf4, 0x1a, 0, 0x11]);
        (found[0x34], found[0x3d]) = (0x40, 1);
        found[0x40..0x42].copy_from_slice(&[capability::POWER_MANAGEMENT, 0x50]);
        found[0x50..0x52].copy_from_slice(&[capability::MSI, 0x60]);
        found[0x60..0x64].copy_from_slice(&[capability::PCI_EXPRESS, 0xb0, 2, 0]);
        found[0x68..0x6a].copy_from_slice(&0x2810u16.to_le_bytes());
        found[0xb0..0xbc].copy_from_slice(&[
            capability::MSIX,
            0,
            0x40,
            0xc0,
            0,
            0x20,
            0,
            0,
            0,
            0x30,
            0,
            0,
        ]);
        found[0x100..0x104].copy_from_slice(&[1, 0, 2, 0x15]);
        found[0x150..0x15c].copy_from_slice(&[3, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        found
    }

    #[test]
    fn a_drive_is_shown_with_what_works_through_a_bridge() {
        let Image { bytes, msix, writable } = of(&drive()).unwrap();
        assert_eq!(msix, Some(MsixTable { bar: 0, offset: 0x2000, entries: 65 }));
        assert_eq!(writable, Writable { msix_control: 0xb2, device_control: 0x68 });
        assert_eq!(bytes[..4], [0x86, 0x80, 0x45, 0x58]);
        assert_eq!(bytes[4..8], [0, 0, 0x10, 0], "nothing is on, and there are capabilities");
        assert_eq!(bytes[0x10..0x14], [0; 4], "BARs are the borrower's");
        assert_eq!((bytes[0x0e], bytes[0x3d]), (0, 0), "one function, without a pin");
        assert_eq!(
            capabilities(&bytes[..]),
            [(capability::PCI_EXPRESS, 0x60), (capability::MSIX, 0xb0)]
        );
        assert_eq!(u32_at(&bytes[..], 0x64) & express::DEVCAP_FLR, express::DEVCAP_FLR);
        assert_eq!((u16_at(&bytes[..], 0x68), u16_at(&bytes[..], 0xb2)), (0, 0x40));
        assert_eq!(bytes[0x100..0x10c], [3, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[0x40..0x60], [0; 0x20], "what is hidden");
    }

    #[test]
    fn bridges_and_less_than_a_configuration_space_are_refused() {
        let mut found = drive();
        found[0x0e] = 1;
        assert_eq!(of(&found), None);
        assert_eq!(of(&drive()[..255]), None);
        assert!(of(&drive()[..256]).is_some());
    }

    proptest! {
        /// Whatever a device says, its image is made, and shows nothing but what is meant to be shown.
        #[test]
        fn any_device_has_an_image(
            start in prop::collection::vec(any::<u8>(), 256),
            behind in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut found = [start, behind].concat();
            found[0x0e] = 0;
            let image = of(&found).unwrap();
            for (kind, at) in capabilities(&image.bytes[..]) {
                prop_assert!(
                    [capability::PCI_EXPRESS, capability::MSIX, capability::VENDOR].contains(&kind),
                    "{kind} at {at}"
                );
            }
            prop_assert_eq!(&image.bytes[0x10..0x2c], &[0; 0x1c][..]);
        }
    }
}
