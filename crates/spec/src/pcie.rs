//! PCI Express configuration space: offsets, bits and capability layouts of a Type 0 header.
//!
//! Source: PCI Express Base Specification 6.0, chapter 7 ("Software Initialization and
//! Configuration"); the section is named with each item.

use bitflags::bitflags;

/// Bytes of a function's configuration space (section 7.2.2).
pub const CONFIG_SPACE_SIZE: usize = 4096;
/// Bytes that a conventional PCI access reaches (section 7.2.1).
pub const CONVENTIONAL_CONFIG_SIZE: usize = 256;

/// Offsets in the Type 0 header (sections 7.5.1.1 and 7.5.1.2).
pub mod header {
    /// Vendor ID, 16 bits.
    pub const VENDOR_ID: u16 = 0x00;
    /// Device ID, 16 bits.
    pub const DEVICE_ID: u16 = 0x02;
    /// Command register, 16 bits: what the function may do; see [`Command`](super::Command).
    pub const COMMAND: u16 = 0x04;
    /// Status register, 16 bits: what the function reports; see [`StatusRegister`](super::StatusRegister).
    pub const STATUS: u16 = 0x06;
    /// Revision ID, 8 bits.
    pub const REVISION_ID: u16 = 0x08;
    /// Class code, 24 bits: programming interface, sub-class, base class.
    pub const CLASS_CODE: u16 = 0x09;
    /// Cache line size, 8 bits; writable, without effect.
    pub const CACHE_LINE_SIZE: u16 = 0x0c;
    /// Header type, 8 bits; 0 for a single function with a Type 0 header.
    pub const HEADER_TYPE: u16 = 0x0e;
    /// First base address register, 32 bits; six of them.
    pub const BAR0: u16 = 0x10;
    /// Subsystem vendor ID, 16 bits.
    pub const SUBSYSTEM_VENDOR_ID: u16 = 0x2c;
    /// Subsystem ID, 16 bits.
    pub const SUBSYSTEM_ID: u16 = 0x2e;
    /// Capabilities pointer, 8 bits.
    pub const CAPABILITIES_POINTER: u16 = 0x34;
    /// Interrupt line, 8 bits; writable, for software's own use.
    pub const INTERRUPT_LINE: u16 = 0x3c;
    /// Interrupt pin, 8 bits: 1 is INTA.
    pub const INTERRUPT_PIN: u16 = 0x3d;
}

bitflags! {
    /// The command register (section 7.5.1.1.3).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Command: u16 {
        /// The function answers accesses to its memory BARs.
        const MEMORY_SPACE = 1 << 1;
        /// May issue memory requests.
        const BUS_MASTER = 1 << 2;
        /// Reports poisoned TLPs and the like.
        const PARITY_ERROR_RESPONSE = 1 << 6;
        /// Reports non-fatal and fatal errors.
        const SERR_ENABLE = 1 << 8;
        /// May not assert INTx.
        const INTERRUPT_DISABLE = 1 << 10;
    }
}

bitflags! {
    /// The status register (section 7.5.1.1.4), the bits used here.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct StatusRegister: u16 {
        /// An interrupt of the pin waits, whether or not the command register lets it out.
        const INTERRUPT_STATUS = 1 << 3;
        /// There is a capabilities list.
        const CAPABILITIES_LIST = 1 << 4;
    }
}

/// Bits of a base address register (section 7.5.1.2.1).
pub mod bar {
    /// Type: 64 bits wide.
    pub const TYPE_64BIT: u32 = 0b100;
    /// Reads have no side effects.
    pub const PREFETCHABLE: u32 = 0b1000;
    /// The bits that are not address.
    pub const FLAGS_MASK: u32 = 0b1111;
}

/// Capability ids (section 7.5, 7.7; PCI code and ID assignment).
pub mod capability {
    /// Power states D0 and D3hot; laid out as in [`pm`](super::pm).
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// Message signalled interrupts; laid out as in [`msi`](super::msi).
    pub const MSI: u8 = 0x05;
    /// A vendor's own structure; its length is in the byte behind the next pointer.
    pub const VENDOR: u8 = 0x09;
    /// What PCI Express adds to a function; laid out as in [`express`](super::express).
    pub const PCI_EXPRESS: u8 = 0x10;
    /// Message signalled interrupts with a table in a BAR; laid out as in [`msix`](super::msix).
    pub const MSIX: u8 = 0x11;
    /// Extended capability: device serial number.
    pub const EXT_SERIAL_NUMBER: u16 = 0x0003;
}

/// The power management capability (section 7.5.2), offsets from its start.
pub mod pm {
    /// Capabilities register, 16 bits.
    pub const PMC: u16 = 0x2;
    /// Control and status register, 16 bits.
    pub const PMCSR: u16 = 0x4;
    /// PMC: version 3 of the interface.
    pub const PMC_VERSION: u16 = 0b011;
    /// PMCSR: the power state's two bits; 0 is D0, 3 is D3hot.
    pub const PMCSR_STATE: u16 = 0b11;
    /// PMCSR: no internal reset on the way from D3hot to D0.
    pub const PMCSR_NO_SOFT_RESET: u16 = 1 << 3;
    /// Bytes of the capability.
    pub const SIZE: u16 = 8;
}

/// The PCI Express capability, version 2 (section 7.5.3), offsets from its start.
pub mod express {
    /// PCI Express capabilities register, 16 bits.
    pub const CAPABILITIES: u16 = 0x02;
    /// Device capabilities, 32 bits.
    pub const DEVICE_CAPABILITIES: u16 = 0x04;
    /// Device control, 16 bits.
    pub const DEVICE_CONTROL: u16 = 0x08;
    /// Link capabilities, 32 bits.
    pub const LINK_CAPABILITIES: u16 = 0x0c;
    /// Link control, 16 bits.
    pub const LINK_CONTROL: u16 = 0x10;
    /// Link status, 16 bits.
    pub const LINK_STATUS: u16 = 0x12;
    /// Device capabilities 2, 32 bits.
    pub const DEVICE_CAPABILITIES_2: u16 = 0x24;
    /// Device control 2, 16 bits.
    pub const DEVICE_CONTROL_2: u16 = 0x28;
    /// Link capabilities 2, 32 bits.
    pub const LINK_CAPABILITIES_2: u16 = 0x2c;
    /// Link control 2, 16 bits.
    pub const LINK_CONTROL_2: u16 = 0x30;
    /// Bytes of the capability.
    pub const SIZE: u16 = 0x3c;
    /// Capabilities: version 2, endpoint (device/port type 0).
    pub const VERSION_2: u16 = 2;
    /// Device capabilities: Role-Based Error Reporting, required since 1.1.
    pub const DEVCAP_ROLE_BASED_ERRORS: u32 = 1 << 15;
    /// Device capabilities: function-level reset is there.
    pub const DEVCAP_FLR: u32 = 1 << 28;
    /// Device capabilities: max payload size supported 256 bytes (encoding 1).
    pub const DEVCAP_MPS_256: u32 = 1;
    /// Device control: initiate function-level reset; always reads as 0.
    pub const DEVCTL_INITIATE_FLR: u16 = 1 << 15;
    /// Device control after reset: relaxed ordering and no-snoop enabled, MRRS 512 bytes.
    pub const DEVCTL_DEFAULT: u16 = (1 << 4) | (1 << 11) | (2 << 12);
    /// Link width field's place in link capabilities and link status.
    pub const LINK_WIDTH_SHIFT: u32 = 4;
    /// Device control 2: the completion time-out value's bits.
    pub const DEVCTL2_WRITABLE: u16 = 0x1f;
}

/// The MSI capability with a 64-bit address and without masks (section 7.7.1), offsets from its
/// start.
pub mod msi {
    /// Message control, 16 bits.
    pub const CONTROL: u16 = 0x2;
    /// Message address, 64 bits; the data follow it.
    pub const ADDRESS: u16 = 0x4;
    /// Message data, 16 bits.
    pub const DATA: u16 = 0xc;
    /// Bytes of the capability.
    pub const SIZE: u16 = 0xe;
    /// Message control: the function may use MSI.
    pub const CONTROL_ENABLE: u16 = 1 << 0;
    /// Message control: where the logarithm of the vectors that the function can use begins.
    pub const CAPABLE_SHIFT: u32 = 1;
    /// Message control: where the logarithm of the vectors that the function may use begins.
    pub const ENABLED_SHIFT: u32 = 4;
    /// Message control: the logarithm of the vectors that the function may use.
    pub const CONTROL_ENABLED_MASK: u16 = 7 << ENABLED_SHIFT;
    /// The most vectors a function can have.
    pub const MAX_VECTORS: u16 = 32;
    /// Message control: the address has 64 bits.
    pub const CONTROL_64BIT: u16 = 1 << 7;
    /// Message control: there are bits that mask vectors, and pending bits.
    pub const CONTROL_MASKABLE: u16 = 1 << 8;

    /// Bytes of a capability with this message control: of one with masks the pending bits end it.
    #[must_use]
    pub fn size(control: u16) -> u16 {
        match (control & CONTROL_64BIT != 0, control & CONTROL_MASKABLE != 0) {
            (false, false) => 0xa,
            (true, false) => SIZE,
            (false, true) => 0x14,
            (true, true) => 0x18,
        }
    }
}

/// The MSI-X capability and table (section 7.7.2), offsets from its start.
pub mod msix {
    /// Message control, 16 bits.
    pub const CONTROL: u16 = 0x2;
    /// Table offset and BAR indicator, 32 bits.
    pub const TABLE: u16 = 0x4;
    /// Pending bit array offset and BAR indicator, 32 bits.
    pub const PBA: u16 = 0x8;
    /// Bytes of the capability.
    pub const SIZE: u16 = 0xc;
    /// Message control: the function may use MSI-X.
    pub const CONTROL_ENABLE: u16 = 1 << 15;
    /// Message control: every vector is masked.
    pub const CONTROL_MASK_ALL: u16 = 1 << 14;
    /// Bytes of a table entry: address, data, vector control.
    pub const ENTRY_SIZE: u64 = 16;
    /// The most vectors a function can have.
    pub const MAX_VECTORS: u16 = 2048;
}
