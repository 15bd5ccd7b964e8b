//! Data pointers and structures that commands carry: SGL descriptors (section 4.4), Dataset
//! Management ranges (section 6.7).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of a PRP entry in bytes (section 4.3).
pub const PRP_SIZE: usize = 8;

/// An SGL descriptor (section 4.4).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SglDescriptor {
    /// Address of the data or of the next segment.
    pub address: u64,
    /// Bytes of the data, or of the next segment.
    pub length: u32,
    /// Reserved (bytes 12 to 14); 0.
    pub reserved: [u8; 3],
    /// SGL Identifier: type in bits 7:4, sub type in bits 3:0.
    pub identifier: u8,
}
const _: () = assert!(size_of::<SglDescriptor>() == SGL_DESCRIPTOR_SIZE);

/// Size of an SGL descriptor in bytes (section 4.4).
pub const SGL_DESCRIPTOR_SIZE: usize = 16;

/// Types of SGL descriptors (section 4.4, figure "SGL Descriptor Type").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglType {
    /// 0h: a data buffer.
    DataBlock,
    /// 1h: data read is discarded.
    BitBucket,
    /// 2h: the next segment, which is not the last.
    Segment,
    /// 3h: the last segment.
    LastSegment,
}

impl SglDescriptor {
    /// The type, if it is one that a PCIe controller may support with sub type 0h (address).
    pub const fn kind(&self) -> Option<SglType> {
        match self.identifier {
            0x00 => Some(SglType::DataBlock),
            0x10 => Some(SglType::BitBucket),
            0x20 => Some(SglType::Segment),
            0x30 => Some(SglType::LastSegment),
            _ => None,
        }
    }

    /// A descriptor of the given type.
    pub const fn new(kind: SglType, address: u64, length: u32) -> Self {
        let identifier = match kind {
            SglType::DataBlock => 0x00,
            SglType::BitBucket => 0x10,
            SglType::Segment => 0x20,
            SglType::LastSegment => 0x30,
        };
        SglDescriptor { address, length, reserved: [0; 3], identifier }
    }
}

/// One range of a Dataset Management command (section 6.7.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct DsmRange {
    /// Context Attributes: hints on how the range is used, which a controller may ignore.
    pub attributes: u32,
    /// Length in logical blocks.
    pub nlb: u32,
    /// Starting LBA, the range's first logical block.
    pub slba: u64,
}
const _: () = assert!(size_of::<DsmRange>() == 16);

/// Most ranges that one Dataset Management command carries (section 6.7: NR is 0's based, 8 bits).
pub const DSM_MAX_RANGES: usize = 256;
