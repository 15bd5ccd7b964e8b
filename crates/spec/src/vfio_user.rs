//! The vfio-user protocol, version 0.0: the messages between a device's user (client) and the
//! process that runs the device (server).
//!
//! Source: "vfio-user Protocol Specification" (docs/interop/vfio-user.rst of QEMU), whose section
//! each item names, and the Linux VFIO user API for the structures it shares. All integers are in
//! the host's byte order.

use bitflags::bitflags;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Protocol version spoken here ("Version"). QEMU insists on minor 0.
pub const VERSION: (u16, u16) = (0, 0);

/// Numbers in a header's `command` ("Commands"); a reply repeats its request's.
pub mod command {
    /// Negotiates version and capabilities; first message of a connection.
    pub const VERSION: u16 = 1;
    /// Makes memory of the client reachable.
    pub const DMA_MAP: u16 = 2;
    /// Takes it away again.
    pub const DMA_UNMAP: u16 = 3;
    /// Number of regions and interrupts.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// One region's size, rights and mappable parts.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// Descriptors that short-cut region accesses.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// One interrupt index's number of vectors.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// Wires, masks or triggers interrupts.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// Reads up to the negotiated size from a region; the data is in the reply.
    pub const REGION_READ: u16 = 9;
    /// Writes to a region; the data follows the body, and a posted write has no reply.
    pub const REGION_WRITE: u16 = 10;
    /// Server reads the client's memory by message.
    pub const DMA_READ: u16 = 11;
    /// Server writes the client's memory by message.
    pub const DMA_WRITE: u16 = 12;
    /// Takes the device back to its state after power-on.
    pub const DEVICE_RESET: u16 = 13;
    /// Several posted writes in one message; only when negotiated.
    pub const REGION_WRITE_MULTI: u16 = 15;
    /// Rackbus' own, between nodes: makes a BAR of another function reachable; see [`PeerMap`](super::PeerMap).
    pub const PEER_MAP: u16 = 0x8000;
    /// Rackbus' own, between nodes: takes that away again; its body is a [`DmaUnmap`](super::DmaUnmap).
    pub const PEER_UNMAP: u16 = 0x8001;
    /// Rackbus' own: asks for the registers of a BAR as memory; see [`Registers`](super::Registers).
    pub const REGISTERS: u16 = 0x8002;
}

bitflags! {
    /// Type and options of a message, as the header has them ("Header").
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Flags: u32 {
        /// The message is a reply (type field, bits 0 to 3).
        const REPLY = 1;
        /// The sender wants no reply: a posted write.
        const NO_REPLY = 1 << 4;
        /// The reply reports an error; the header's `error` is an errno.
        const ERROR = 1 << 5;
    }
}

/// Bits of [`MessageHeader::flags`] that hold the message type: 0 command, 1 reply.
pub const TYPE_MASK: u32 = 0xf;

/// First 16 bytes of every message ("Header").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MessageHeader {
    /// Chosen by the sender, copied into the reply. May repeat.
    pub message_id: u16,
    /// What the message is about, one of [`command`]; a reply has its request's.
    pub command: u16,
    /// Bytes of the whole message, this header included.
    pub message_size: u32,
    /// Type and options: bits of [`Flags`].
    pub flags: u32,
    /// An errno, in error replies.
    pub error: u32,
}

/// Body of `VERSION` ("VFIO_USER_VERSION"), followed by NUL-terminated JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Version {
    /// Major version, which both peers must have.
    pub major: u16,
    /// Minor version, which may differ between peers.
    pub minor: u16,
}

bitflags! {
    /// Flags of [`DmaMap`] ("VFIO_USER_DMA_MAP").
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DmaMapFlags: u32 {
        /// The device may read.
        const READ = 1;
        /// The device may write.
        const WRITE = 1 << 1;
    }
}

/// Body of `DMA_MAP`; the descriptor comes beside it ("VFIO_USER_DMA_MAP").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: u32,
    /// What the device may do with the range: bits of [`DmaMapFlags`].
    pub flags: u32,
    /// Where in the descriptor's file the range begins.
    pub offset: u64,
    /// The range's address as the device will use it.
    pub address: u64,
    /// The range's length in bytes.
    pub size: u64,
}

/// Body of `PEER_MAP`, followed by the name of the function whose BAR it is; the descriptor of the BAR's
/// memory comes beside it. Rackbus' own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PeerMap {
    /// The range, as for `DMA_MAP`.
    pub map: DmaMap,
    /// Where the range begins in the BAR, in bytes.
    pub bar_offset: u64,
    /// The BAR, 0 to 5.
    pub bar: u32,
    /// Bytes of the name that follows.
    pub name_length: u32,
}

/// Body of `REGISTERS` and of its reply, whose descriptor leads to the registers' memory. Rackbus' own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Registers {
    /// Size of this structure.
    pub argsz: u32,
    /// The BAR, 0 to 5.
    pub bar: u32,
    /// Bytes of the registers, from the BAR's first one on; 0 in the question.
    pub size: u64,
}

bitflags! {
    /// Flags of [`DmaUnmap`] ("VFIO_USER_DMA_UNMAP").
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DmaUnmapFlags: u32 {
        /// Takes every mapping away; address and size are 0.
        const ALL = 1 << 1;
    }
}

/// Body of `DMA_UNMAP` and of its reply ("VFIO_USER_DMA_UNMAP").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaUnmap {
    /// Size of this structure.
    pub argsz: u32,
    /// Whether one range goes or all: bits of [`DmaUnmapFlags`].
    pub flags: u32,
    /// First address of the range in the client's address space.
    pub address: u64,
    /// Length of the range in bytes.
    pub size: u64,
}

bitflags! {
    /// Flags of [`DeviceInfo`] (Linux VFIO user API, `vfio_device_info`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DeviceInfoFlags: u32 {
        /// The device can be reset.
        const RESET = 1;
        /// It is a PCI device.
        const PCI = 1 << 1;
    }
}

/// Body of `DEVICE_GET_INFO` and of its reply ("VFIO_USER_DEVICE_GET_INFO").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DeviceInfo {
    /// Size of this structure, or of what the sender can take.
    pub argsz: u32,
    /// What kind of device it is: bits of [`DeviceInfoFlags`].
    pub flags: u32,
    /// How many regions there are: for a PCI device, those in [`region`].
    pub num_regions: u32,
    /// Number of interrupt indexes.
    pub num_irqs: u32,
}

bitflags! {
    /// Flags of [`RegionInfo`] (Linux VFIO user API, `vfio_region_info`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct RegionInfoFlags: u32 {
        /// The client may read the region.
        const READ = 1;
        /// The client may write the region.
        const WRITE = 1 << 1;
        /// Can be mapped, in whole or as its capability says.
        const MMAP = 1 << 2;
        /// Capabilities follow in the reply, which say which parts can be mapped.
        const CAPS = 1 << 3;
    }
}

/// Body of `DEVICE_GET_REGION_INFO` and head of its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegionInfo {
    /// Size of the whole reply, or of what the sender can take.
    pub argsz: u32,
    /// What the client may do with the region: bits of [`RegionInfoFlags`].
    pub flags: u32,
    /// Index of the region the client asks about.
    pub index: u32,
    /// Where the first capability begins, from the start of this structure.
    pub cap_offset: u32,
    /// The region's size in bytes.
    pub size: u64,
    /// Where the region begins in the descriptor that comes beside the reply.
    pub offset: u64,
}

/// Head of a capability in a region's information (`vfio_info_cap_header`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CapHeader {
    /// What kind of capability it is, as the kernel's VFIO numbers them.
    pub id: u16,
    /// Version of the capability.
    pub version: u16,
    /// Where the next begins, from the start of [`RegionInfo`]; 0 for none.
    pub next: u32,
}

/// [`CapHeader::id`] of the list of mappable areas (`VFIO_REGION_INFO_CAP_SPARSE_MMAP`).
pub const CAP_SPARSE_MMAP: u16 = 1;

/// The sparse mmap capability, followed by `nr_areas` times [`SparseArea`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseMmap {
    /// Identifier, version and place of the next capability.
    pub header: CapHeader,
    /// How many areas follow.
    pub nr_areas: u32,
    /// Fills up to 8 bytes; 0.
    pub reserved: u32,
}

/// One mappable part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct SparseArea {
    /// Where it begins in the region.
    pub offset: u64,
    /// Its length in bytes.
    pub size: u64,
}

bitflags! {
    /// Flags of [`IrqInfo`] (Linux VFIO user API, `vfio_irq_info`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct IrqInfoFlags: u32 {
        /// Is signalled through an eventfd.
        const EVENTFD = 1;
        /// The client may mask the interrupts.
        const MASKABLE = 1 << 1;
        /// Masks itself when it fires.
        const AUTOMASKED = 1 << 2;
        /// The number of vectors wired at once is fixed.
        const NORESIZE = 1 << 3;
    }
}

/// Body of `DEVICE_GET_IRQ_INFO` and of its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IrqInfo {
    /// Size of this structure, or of what the sender can take.
    pub argsz: u32,
    /// How the index's interrupts can be used: bits of [`IrqInfoFlags`].
    pub flags: u32,
    /// Which interrupt index: [`irq`].
    pub index: u32,
    /// How many vectors it has.
    pub count: u32,
}

bitflags! {
    /// Flags of [`IrqSet`] (Linux VFIO user API, `vfio_irq_set`): one data kind, one action.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct IrqSetFlags: u32 {
        /// The request carries no data for each vector.
        const DATA_NONE = 1;
        /// One byte a vector: act on those that are not 0.
        const DATA_BOOL = 1 << 1;
        /// One descriptor a vector, beside the message; none at all means no wire.
        const DATA_EVENTFD = 1 << 2;
        /// The named vectors raise nothing until they are unmasked.
        const ACTION_MASK = 1 << 3;
        /// The named vectors raise interrupts again.
        const ACTION_UNMASK = 1 << 4;
        /// Wire (with descriptors) or fire (without).
        const ACTION_TRIGGER = 1 << 5;
    }
}

/// Body of `DEVICE_SET_IRQS`, followed by a byte a vector with `DATA_BOOL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct IrqSet {
    /// Size of this structure and its data.
    pub argsz: u32,
    /// One kind of data and one action: bits of [`IrqSetFlags`].
    pub flags: u32,
    /// Which interrupt index: [`irq`].
    pub index: u32,
    /// First vector that the request is about.
    pub start: u32,
    /// Number of vectors that the request is about.
    pub count: u32,
}

/// Body of `REGION_READ` and `REGION_WRITE` and head of their replies; data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: u64,
    /// Index of the region that is read or written, as in [`region`].
    pub region: u32,
    /// Number of bytes to read or write.
    pub count: u32,
}

/// Body of `DMA_READ` and `DMA_WRITE` and head of their replies; data follows ("VFIO_USER_DMA_READ").
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DmaAccess {
    /// Address in the client's DMA address space.
    pub address: u64,
    /// Number of bytes to read or write.
    pub count: u64,
}

/// Region numbers of a PCI device (Linux VFIO user API, `VFIO_PCI_*_REGION_INDEX`).
pub mod region {
    /// BAR 0; the others follow.
    pub const BAR0: u32 = 0;
    /// The expansion ROM; of size 0 where there is none.
    pub const ROM: u32 = 6;
    /// Configuration space, 256 or 4096 bytes.
    pub const CONFIG: u32 = 7;
    /// Number of regions: six BARs, ROM, configuration space, VGA.
    pub const COUNT: u32 = 9;
}

/// Interrupt indexes of a PCI device (Linux VFIO user API, `VFIO_PCI_*_IRQ_INDEX`).
pub mod irq {
    /// The interrupt pin, one vector at most.
    pub const INTX: u32 = 0;
    /// Message signalled interrupts, up to 32 vectors.
    pub const MSI: u32 = 1;
    /// Message signalled interrupts by a table, up to 2048 vectors.
    pub const MSIX: u32 = 2;
    /// Uncorrectable errors that the device reports (AER).
    pub const ERR: u32 = 3;
    /// The device wants to go: release it.
    pub const REQ: u32 = 4;
    /// How many indexes a PCI device has.
    pub const COUNT: u32 = 5;
}

const _: () = {
    assert!(size_of::<MessageHeader>() == 16);
    assert!(size_of::<Version>() == 4);
    assert!(size_of::<DmaMap>() == 32);
    assert!(size_of::<DmaUnmap>() == 24);
    assert!(size_of::<DeviceInfo>() == 16);
    assert!(size_of::<RegionInfo>() == 32);
    assert!(size_of::<CapHeader>() == 8);
    assert!(size_of::<SparseMmap>() == 16);
    assert!(size_of::<SparseArea>() == 16);
    assert!(size_of::<IrqInfo>() == 16);
    assert!(size_of::<IrqSet>() == 20);
    assert!(size_of::<RegionAccess>() == 16);
    assert!(size_of::<DmaAccess>() == 16);
};
