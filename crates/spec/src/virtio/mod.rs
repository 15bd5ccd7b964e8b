//! Virtio devices on the PCI bus.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.2; the section is named with each item.
//!
//! * [`ring`]: the layouts of split and packed virtqueues. [`net`]: network devices.

pub mod net;
pub mod ring;

/// PCI vendor id of virtio devices (section 4.1.2).
pub const VENDOR_ID: u16 = 0x1af4;
/// PCI device id of a device of type 0 (section 4.1.2): its type is added.
pub const DEVICE_ID_BASE: u16 = 0x1040;
/// Subsystem id of devices that are not transitional (section 4.1.2.1): 0x40 or more.
pub const SUBSYSTEM_ID: u16 = 0x1100;

/// Bits of the device status (section 2.1).
pub mod status {
    /// A guest has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// It has a driver for it.
    pub const DRIVER: u8 = 2;
    /// The driver drives it.
    pub const DRIVER_OK: u8 = 4;
    /// The driver has chosen features, and the device accepts them.
    pub const FEATURES_OK: u8 = 8;
    /// The device met an error that only a reset ends.
    pub const DEVICE_NEEDS_RESET: u8 = 64;
    /// The driver has given up.
    pub const FAILED: u8 = 128;
}

/// Feature bits of every device (section 6).
pub mod feature {
    /// Descriptors may point to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are asked for by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The device follows version 1 or later of the specification.
    pub const VERSION_1: u64 = 1 << 32;
    /// Addresses are those that the platform gives to the device.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// Virtqueues may be packed: one ring that both sides write.
    pub const RING_PACKED: u64 = 1 << 34;
    /// Notifications say how far the driver is.
    pub const NOTIFICATION_DATA: u64 = 1 << 38;
    /// A queue is reset by itself.
    pub const RING_RESET: u64 = 1 << 40;
}

/// Capabilities in configuration space (section 4.1.4): vendor-specific ones, with these parts behind the
/// identifier and the pointer to the next.
pub mod capability {
    /// Offset of the capability's length, 8 bits.
    pub const LENGTH: usize = 2;
    /// Offset of its type, 8 bits.
    pub const TYPE: usize = 3;
    /// Offset of the BAR that has the structure, 8 bits.
    pub const BAR: usize = 4;
    /// Offset of the structure's place in the BAR, 32 bits.
    pub const OFFSET: usize = 8;
    /// Offset of the structure's length, 32 bits.
    pub const STRUCTURE_LENGTH: usize = 12;
    /// Bytes of a capability without more.
    pub const SIZE: usize = 16;
    /// Of a notification capability, offset of the multiplier, 32 bits (section 4.1.4.4).
    pub const NOTIFY_MULTIPLIER: usize = 16;
    /// Of an access capability, offset of the data, 4 bytes (section 4.1.4.9).
    pub const ACCESS_DATA: usize = 16;

    /// The structure that sets up the device and its queues ([`common`](super::common)).
    pub const COMMON: u8 = 1;
    /// Where the driver tells that a queue has something new.
    pub const NOTIFY: u8 = 2;
    /// One byte that says why the pin was asserted ([`isr`](super::isr)); a read clears it.
    pub const ISR: u8 = 3;
    /// What devices of one type have to themselves, an address or a size.
    pub const DEVICE: u8 = 4;
    /// Access to the BARs through configuration space.
    pub const PCI_ACCESS: u8 = 5;
}

/// Common configuration structure (section 4.1.4.3): offsets.
pub mod common {
    /// 32 bits: which half of the device's features is shown.
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    /// 32 bits, read only.
    pub const DEVICE_FEATURE: u64 = 0x04;
    /// 32 bits: which half of the driver's features is written.
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    /// Half of the features that the driver accepts, 32 bits.
    pub const DRIVER_FEATURE: u64 = 0x0c;
    /// 16 bits: the vector of configuration changes.
    pub const CONFIG_VECTOR: u64 = 0x10;
    /// 16 bits, read only: how many queues there are.
    pub const NUM_QUEUES: u64 = 0x12;
    /// 8 bits: how far the driver is, as in [`status`](super::status); 0 resets the device.
    pub const DEVICE_STATUS: u64 = 0x14;
    /// 8 bits, read only: moves when the device's configuration does.
    pub const CONFIG_GENERATION: u64 = 0x15;
    /// 16 bits: the queue that what follows is about.
    pub const QUEUE_SELECT: u64 = 0x16;
    /// 16 bits: entries of the queue; the driver may write fewer than it reads.
    pub const QUEUE_SIZE: u64 = 0x18;
    /// 16 bits: the vector of the queue.
    pub const QUEUE_VECTOR: u64 = 0x1a;
    /// 16 bits: 1 makes the device use the queue.
    pub const QUEUE_ENABLE: u64 = 0x1c;
    /// 16 bits, read only: where the queue is notified, in multipliers.
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    /// 64 bits: descriptor area.
    pub const QUEUE_DESC: u64 = 0x20;
    /// 64 bits: driver area.
    pub const QUEUE_DRIVER: u64 = 0x28;
    /// 64 bits: device area.
    pub const QUEUE_DEVICE: u64 = 0x30;
    /// 16 bits, read only: what to notify the queue with.
    pub const QUEUE_NOTIFY_DATA: u64 = 0x38;
    /// 16 bits: resets the queue.
    pub const QUEUE_RESET: u64 = 0x3a;
    /// Bytes of the structure.
    pub const SIZE: u64 = 0x3c;
    /// A vector that is none (section 4.1.5.1.2).
    pub const NO_VECTOR: u16 = 0xffff;
}

/// Bits of the ISR status (section 4.1.4.5).
pub mod isr {
    /// A queue has news.
    pub const QUEUE: u8 = 1;
    /// The device's configuration changed, which the driver is to read again.
    pub const CONFIG: u8 = 2;
}
