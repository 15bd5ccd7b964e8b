//! Where a virtio function's structures are in BAR 0, and the capabilities that say so (virtio 1.2, section 4.1.4).

use rackbus_pci::{Bar, FunctionInfo, VendorCapability};
use rackbus_spec::virtio::{DEVICE_ID_BASE, SUBSYSTEM_ID, VENDOR_ID, capability as cap, common};

/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 16 << 10;
/// Where the common configuration is.
pub const COMMON: u64 = 0;
/// Where the byte is that says why the pin was asserted.
pub const ISR: u64 = 0x1000;
/// The device's own configuration.
pub const DEVICE: u64 = 0x2000;
/// Notifications: 4 bytes for each queue.
pub const NOTIFY: u64 = 0x3000;
/// Bytes from one queue's notification to the next one's.
pub const NOTIFY_STRIDE: u64 = 4;

/// The structure that an offset in BAR 0 is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    /// Common configuration, at this offset of it.
    Common(u64),
    /// The byte that says why the pin was asserted.
    Isr,
    /// The device's own, at this offset.
    Device(u64),
    /// Notifications, by which a driver says that a queue has something.
    Notify,
}

/// The structure that an offset of the BAR belongs to.
pub fn structure(offset: u64) -> Structure {
    match offset {
        ..ISR => Structure::Common(offset),
        ISR..DEVICE => Structure::Isr,
        DEVICE..NOTIFY => Structure::Device(offset - DEVICE),
        NOTIFY.. => Structure::Notify,
    }
}

/// Who a virtio function is: a device of type `kind` with `queues` queues and a vector for each and for changes of the
/// configuration, of which its driver sees `device_bytes`.
pub fn info(
    kind: u16,
    class: [u8; 3],
    queues: u16,
    device_bytes: u64,
    serial: u64,
) -> FunctionInfo {
    let bar = Bar { index: 0, size: BAR_SIZE, is_64bit: true, prefetchable: false, mappable: None };
    let notify = u64::from(queues) * NOTIFY_STRIDE;
    let mut notifications = body(cap::NOTIFY, NOTIFY, notify);
    notifications.extend((NOTIFY_STRIDE as u32).to_le_bytes());
    let mut access = body(cap::PCI_ACCESS, 0, 0);
    access.extend([0; 4]);
    let own = |body| VendorCapability { body, access: false };
    FunctionInfo {
        vendor_id: VENDOR_ID,
        device_id: DEVICE_ID_BASE + kind,
        subsystem_vendor_id: VENDOR_ID,
        subsystem_id: SUBSYSTEM_ID,
        revision: 1,
        class,
        bars: vec![bar],
        msix_vectors: queues + 1,
        msi_vectors: 0,
        vendor: vec![
            own(body(cap::COMMON, COMMON, common::SIZE)),
            own(notifications),
            own(body(cap::ISR, ISR, 1)),
            own(body(cap::DEVICE, DEVICE, device_bytes)),
            VendorCapability { body: access, access: true },
        ],
        serial,
    }
}

/// What a capability has behind its length.
fn body(kind: u8, offset: u64, length: u64) -> Vec<u8> {
    let mut body = vec![0; cap::SIZE - cap::TYPE];
    body[0] = kind;
    let mut put = |at: usize, value: u64| {
        body[at - cap::TYPE..][..4].copy_from_slice(&(value as u32).to_le_bytes());
    };
    put(cap::OFFSET, offset);
    put(cap::STRUCTURE_LENGTH, length);
    body
}
