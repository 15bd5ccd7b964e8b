//! Which devices there are, and what they are.

use std::ffi::c_char;

use rackbus_attach::DeviceEntry;
use rackbus_attach::devices::{BorrowedDevice, DeviceIdentity};

use super::{SciDevice, code, devices};
use crate::constants::errors::*;
use crate::constants::layout::{QueryDevice, SciDeviceInfo};
use crate::constants::*;
use crate::error::{SciResult, check_flags, fail, put};
use crate::handles::{HandleKind, RawHandle};
use crate::library::Child;

/// Devices that are like `filter`, in the order of their names.
pub(super) fn list(
    sd: RawHandle,
    filter: Option<&SciDeviceInfo>,
    flags: u32,
) -> SciResult<Vec<u64>> {
    check_flags(flags, 0)?;
    drop(Child::of(sd)?);
    let all = devices()?.list().map_err(|error| code("devices", error))?;
    let wanted = |entry: &&DeviceEntry| filter.is_none_or(|filter| is_like(&info(entry), filter));
    Ok(all.iter().filter(wanted).map(|entry| entry.fdid).collect())
}

/// What is known of a device without borrowing it.
fn info(entry: &DeviceEntry) -> SciDeviceInfo {
    let mut user_name: [c_char; 64] = [0; 64];
    // The last one stays the text's end.
    for (place, byte) in user_name[..63].iter_mut().zip(entry.function.bytes()) {
        *place = byte as c_char;
    }
    SciDeviceInfo {
        fdid: entry.fdid,
        pci_device_id: entry.device_id,
        pci_vendor_id: entry.vendor_id,
        pci_class: entry.class,
        pci_subsystem_device_id: 0,
        pci_subsystem_vendor_id: 0,
        pci_serial_number: 0,
        remote_bdf: 0,
        local_bdf: 0,
        adapter: 0,
        node_id: entry.node,
        physical_slot: 0,
        user_name,
        uuid: [0; 37],
    }
}

/// The same of one that this process has borrowed: it was asked itself.
fn asked(device: &BorrowedDevice, identity: DeviceIdentity) -> SciDeviceInfo {
    SciDeviceInfo {
        pci_vendor_id: identity.vendor_id,
        pci_device_id: identity.device_id,
        pci_class: identity.class,
        pci_subsystem_vendor_id: identity.subsystem_vendor_id,
        pci_subsystem_device_id: identity.subsystem_id,
        ..info(device.entry())
    }
}

/// Whether a device is what a filter says, where that says something.
fn is_like(info: &SciDeviceInfo, filter: &SciDeviceInfo) -> bool {
    let numbers = [
        (info.fdid, filter.fdid),
        (info.pci_device_id.into(), filter.pci_device_id.into()),
        (info.pci_vendor_id.into(), filter.pci_vendor_id.into()),
        (info.pci_class.into(), filter.pci_class.into()),
        (info.pci_subsystem_device_id.into(), filter.pci_subsystem_device_id.into()),
        (info.pci_subsystem_vendor_id.into(), filter.pci_subsystem_vendor_id.into()),
        (info.pci_serial_number, filter.pci_serial_number),
        (info.remote_bdf.into(), filter.remote_bdf.into()),
        (info.local_bdf.into(), filter.local_bdf.into()),
        (info.adapter.into(), filter.adapter.into()),
        (info.node_id.into(), filter.node_id.into()),
    ];
    let same_slot = filter.physical_slot == 0 || info.physical_slot == filter.physical_slot;
    let named = |text: &[c_char]| text.first().is_some_and(|first| *first != 0);
    let until_end = |text: &[c_char]| -> Vec<c_char> {
        text.iter().copied().take_while(|byte| *byte != 0).collect()
    };
    let like =
        |info: &[c_char], filter: &[c_char]| !named(filter) || until_end(info) == until_end(filter);
    numbers.iter().all(|(is, wanted)| *wanted == 0 || is == wanted)
        && same_slot
        && like(&info.user_name, &filter.user_name)
        && like(&info.uuid, &filter.uuid)
}

/// Answers `SCIQuery` with the command `SCI_Q_DEVICE`.
///
/// # Safety
/// `query.data` is null or leads to what the subcommand is answered with.
pub(crate) unsafe fn query(query: &QueryDevice) -> SciResult<()> {
    if query.subcommand != SCI_Q_DEVICE_INFO {
        return fail(SCI_ERR_ILLEGAL_QUERY);
    }
    if query.data.is_null() {
        return fail(SCI_ERR_ILLEGAL_PARAMETER);
    }
    let borrowed = SciDevice::table().all();
    let own = borrowed.iter().find(|device| device.borrowed.entry().fdid == query.fdid);
    let answer = match own {
        Some(device) => {
            let identity = device.borrowed.identity().map_err(|error| code("query", error))?;
            asked(&device.borrowed, identity)
        }
        None => {
            let all = devices()?.list().map_err(|error| code("devices", error))?;
            match all.iter().find(|entry| entry.fdid == query.fdid) {
                Some(entry) => info(entry),
                None => return fail(SCI_ERR_NO_SUCH_FDID),
            }
        }
    };
    // SAFETY: as the caller says.
    unsafe { put(query.data.cast(), answer) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive() -> SciDeviceInfo {
        let function = "alpha/nvme0".to_owned();
        let (vendor_id, device_id, class) = (0x1234, 0x7262, 0x01_0802);
        info(&DeviceEntry { fdid: 7, function, node: 4, vendor_id, device_id, class, free: true })
    }

    fn filter(change: impl FnOnce(&mut SciDeviceInfo)) -> SciDeviceInfo {
        let entry = DeviceEntry {
            fdid: 0,
            function: String::new(),
            node: 0,
            vendor_id: 0,
            device_id: 0,
            class: 0,
            free: false,
        };
        let mut filter = info(&entry);
        change(&mut filter);
        filter
    }

    #[test]
    fn a_filter_counts_where_it_says_something() {
        assert!(is_like(&drive(), &filter(|_| ())));
        assert!(is_like(&drive(), &drive()));
        type Change = fn(&mut SciDeviceInfo);
        let others: [Change; 8] = [
            |it| it.fdid = 8,
            |it| it.pci_device_id = 1,
            |it| it.pci_vendor_id = 1,
            |it| it.pci_class = 0x02_0000,
            |it| it.node_id = 8,
            |it| it.physical_slot = 3,
            |it| it.user_name[0] = b'b' as c_char,
            |it| it.uuid[0] = b'0' as c_char,
        ];
        for (number, change) in others.into_iter().enumerate() {
            assert!(!is_like(&drive(), &filter(change)), "{number}");
        }
        assert!(is_like(&drive(), &filter(|it| it.pci_class = 0x01_0802)));
        assert!(is_like(&drive(), &filter(|it| it.user_name = drive().user_name)));
    }

    #[test]
    fn a_name_that_is_too_long_ends_in_its_place() {
        let function = "host/".to_owned() + &"n".repeat(100);
        let entry = DeviceEntry {
            fdid: 1,
            function,
            node: 4,
            vendor_id: 0,
            device_id: 0,
            class: 0,
            free: true,
        };
        assert_eq!(info(&entry).user_name[62..], [b'n' as c_char, 0]);
    }
}
