//! Identify data structures (section 5.15.2).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of every Identify data structure in bytes (section 5.15).
pub const IDENTIFY_SIZE: usize = 4096;

/// CNS 00h: Identify Namespace (section 5.15.2.1).
pub const CNS_NAMESPACE: u8 = 0x00;
/// CNS 01h: Identify Controller (section 5.15.2.2).
pub const CNS_CONTROLLER: u8 = 0x01;
/// CNS 02h: Active Namespace ID list (section 5.15.2.3).
pub const CNS_ACTIVE_NAMESPACES: u8 = 0x02;
/// CNS 03h: Namespace Identification Descriptor list (section 5.15.2.4).
pub const CNS_NAMESPACE_DESCRIPTORS: u8 = 0x03;

/// Namespace Identifier Type 1h: EUI-64, 8 bytes (section 5.15.2.4).
pub const NIDT_EUI64: u8 = 1;
/// Namespace Identifier Type 2h: NGUID, 16 bytes (section 5.15.2.4).
pub const NIDT_NGUID: u8 = 2;
/// Namespace Identifier Type 3h: UUID, 16 bytes (section 5.15.2.4).
pub const NIDT_UUID: u8 = 3;

/// A power state descriptor (section 5.15.2.2, figure "Power State Descriptor"). Only the fields
/// that describe a controller with one power state are named.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PowerState {
    /// Maximum Power in centiwatts.
    pub max_power: u16,
    /// Reserved, scale and flags.
    pub flags: [u8; 2],
    /// Entry latency in microseconds.
    pub entry_latency: u32,
    /// Exit latency in microseconds.
    pub exit_latency: u32,
    /// Relative throughput and latency, idle and active power.
    pub rest: [u8; 20],
}
const _: () = assert!(size_of::<PowerState>() == 32);

/// Identify Controller data (section 5.15.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct IdentifyController {
    /// PCI Vendor ID, as configuration space has it.
    pub vid: u16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: u16,
    /// Serial Number, ASCII, padded with spaces.
    pub sn: [u8; 20],
    /// Model Number, ASCII, padded with spaces.
    pub mn: [u8; 40],
    /// Firmware Revision, ASCII, padded with spaces.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst, a power of two.
    pub rab: u8,
    /// IEEE OUI Identifier of the vendor, the least significant byte first.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
    pub cmic: u8,
    /// Maximum Data Transfer Size, a power of two of minimum pages; 0 is no limit.
    pub mdts: u8,
    /// Controller ID, unlike that of any other controller of the subsystem.
    pub cntlid: u16,
    /// Version of the specification, as in the register VS.
    pub ver: u32,
    /// RTD3 Resume Latency in microseconds; 0 when it is not reported.
    pub rtd3r: u32,
    /// RTD3 Entry Latency in microseconds; 0 when it is not reported.
    pub rtd3e: u32,
    /// Optional Asynchronous Events Supported.
    pub oaes: u32,
    /// Controller Attributes; bit 0 is the 128-bit host identifier.
    pub ctratt: u32,
    /// Read Recovery Levels Supported.
    pub rrls: u16,
    /// Reserved (bytes 102 to 110); 0.
    pub reserved102: [u8; 9],
    /// Controller Type; 1 is an I/O controller.
    pub cntrltype: u8,
    /// FRU Globally Unique Identifier.
    pub fguid: [u8; 16],
    /// Command Retry Delay Times 1 to 3.
    pub crdt: [u16; 3],
    /// Reserved (bytes 134 to 255), some of it for the management interface; 0.
    pub reserved134: [u8; 122],
    /// Optional Admin Command Support; bit 8 is Doorbell Buffer Config.
    pub oacs: u16,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Asynchronous Event Request Limit, 0's based.
    pub aerl: u8,
    /// Firmware Updates; bit 0 slot 1 is read only, bits 3:1 number of slots.
    pub frmw: u8,
    /// Log Page Attributes; bit 1 commands supported, bit 2 extended data (offsets).
    pub lpa: u8,
    /// Error Log Page Entries, 0's based.
    pub elpe: u8,
    /// Number of Power States Support, 0's based.
    pub npss: u8,
    /// Admin Vendor Specific Command Configuration.
    pub avscc: u8,
    /// Autonomous Power State Transition Attributes.
    pub apsta: u8,
    /// Warning Composite Temperature Threshold in kelvin.
    pub wctemp: u16,
    /// Critical Composite Temperature Threshold in kelvin.
    pub cctemp: u16,
    /// Maximum Time for Firmware Activation.
    pub mtfa: u16,
    /// Host Memory Buffer Preferred Size.
    pub hmpre: u32,
    /// Host Memory Buffer Minimum Size.
    pub hmmin: u32,
    /// Total NVM Capacity in bytes.
    pub tnvmcap: [u64; 2],
    /// Unallocated NVM Capacity in bytes.
    pub unvmcap: [u64; 2],
    /// Bytes 312 to 511: RPMB, self-test, keep alive, sanitize, NVM sets, ANA.
    pub reserved312: [u8; 200],
    /// Submission Queue Entry Size: required in bits 3:0, maximum in bits 7:4.
    pub sqes: u8,
    /// Completion Queue Entry Size: required in bits 3:0, maximum in bits 7:4.
    pub cqes: u8,
    /// Maximum Outstanding Commands (fabrics).
    pub maxcmd: u16,
    /// Number of Namespaces, the greatest namespace identifier that is valid.
    pub nn: u32,
    /// Optional NVM Command Support.
    pub oncs: u16,
    /// Fused Operation Support; bit 0 is Compare and Write.
    pub fuses: u16,
    /// Format NVM Attributes: whether formatting and erasing concern all namespaces.
    pub fna: u8,
    /// Volatile Write Cache; bit 0 present, bits 2:1 flush with NSID FFFFFFFFh.
    pub vwc: u8,
    /// Atomic Write Unit Normal, 0's based.
    pub awun: u16,
    /// Atomic Write Unit Power Fail, 0's based.
    pub awupf: u16,
    /// NVM Vendor Specific Command Configuration.
    pub nvscc: u8,
    /// Namespace Write Protection Capabilities.
    pub nwpc: u8,
    /// Atomic Compare and Write Unit.
    pub acwu: u16,
    /// Reserved (bytes 534 and 535); 0.
    pub reserved534: u16,
    /// SGL Support: [`SGLS_SUPPORTED`] and which descriptors may be used.
    pub sgls: u32,
    /// Maximum Number of Allowed Namespaces.
    pub mnan: u32,
    /// Reserved (bytes 544 to 767); 0.
    pub reserved544: [u8; 224],
    /// NVM Subsystem NVMe Qualified Name, UTF-8, null terminated.
    pub subnqn: [u8; 256],
    /// Reserved, and NVMe over Fabrics.
    pub reserved1024: [u8; 1024],
    /// Power State Descriptors 0 to 31.
    pub psd: [PowerState; 32],
    /// Vendor Specific (bytes 3072 to 4095).
    pub vendor: [u8; 1024],
}
const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY_SIZE);
const _: () = assert!(core::mem::offset_of!(IdentifyController, oacs) == 256);
const _: () = assert!(core::mem::offset_of!(IdentifyController, sqes) == 512);
const _: () = assert!(core::mem::offset_of!(IdentifyController, sgls) == 536);
const _: () = assert!(core::mem::offset_of!(IdentifyController, subnqn) == 768);
const _: () = assert!(core::mem::offset_of!(IdentifyController, psd) == 2048);

/// OACS bit 8: Doorbell Buffer Config (section 5.15.2.2).
pub const OACS_DOORBELL_BUFFER: u16 = 1 << 8;
/// LPA bit 1: Commands Supported and Effects log (section 5.15.2.2).
pub const LPA_COMMANDS_SUPPORTED: u8 = 1 << 1;
/// LPA bit 2: extended data for Get Log Page, i.e. 32-bit lengths and offsets (section 5.15.2.2).
pub const LPA_EXTENDED: u8 = 1 << 2;
/// ONCS bit 0: Compare (section 5.15.2.2).
pub const ONCS_COMPARE: u16 = 1 << 0;
/// ONCS bit 2: Dataset Management (section 5.15.2.2).
pub const ONCS_DATASET_MANAGEMENT: u16 = 1 << 2;
/// ONCS bit 3: Write Zeroes (section 5.15.2.2).
pub const ONCS_WRITE_ZEROES: u16 = 1 << 3;
/// ONCS bit 4: the Save and Select fields of Set and Get Features (section 5.15.2.2).
pub const ONCS_SAVE_SELECT: u16 = 1 << 4;
/// ONCS bit 7: Verify (section 5.15.2.2).
pub const ONCS_VERIFY: u16 = 1 << 7;
/// SGLS bits 1:0 = 01b: SGLs supported without alignment requirement (section 5.15.2.2).
pub const SGLS_SUPPORTED: u32 = 0b01;
/// SGLS bit 16: bit bucket descriptors (section 5.15.2.2).
pub const SGLS_BIT_BUCKET: u32 = 1 << 16;
/// SGLS bit 18: SGLs longer than the data are allowed (section 5.15.2.2).
pub const SGLS_EXCESS_LENGTH: u32 = 1 << 18;
/// CTRATT bit 0: 128-bit host identifier (section 5.15.2.2).
pub const CTRATT_HOST_ID_128: u32 = 1 << 0;
/// VWC bit 0: a volatile write cache is present (section 5.15.2.2).
pub const VWC_PRESENT: u8 = 1 << 0;
/// VWC bits 2:1 = 11b: Flush accepts NSID FFFFFFFFh (section 5.15.2.2).
pub const VWC_FLUSH_ALL: u8 = 0b11 << 1;

/// An LBA format (section 5.15.2.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LbaFormat {
    /// Metadata Size in bytes.
    pub ms: u16,
    /// LBA Data Size, a power of two.
    pub lbads: u8,
    /// Relative Performance among the namespace's formats: 0 best, 3 degraded.
    pub rp: u8,
}

/// Identify Namespace data (section 5.15.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct IdentifyNamespace {
    /// Namespace Size in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity in logical blocks.
    pub ncap: u64,
    /// Namespace Utilization in logical blocks.
    pub nuse: u64,
    /// Namespace Features; bit 4: NPWG, NPWA, NPDG, NPDA and NOWS are defined.
    pub nsfeat: u8,
    /// Number of LBA Formats, 0's based.
    pub nlbaf: u8,
    /// Formatted LBA Size: bits 3:0 the format that is used, bit 4 metadata behind each block.
    pub flbas: u8,
    /// Metadata Capabilities: bit 0 behind the data of each block, bit 1 in a buffer apart.
    pub mc: u8,
    /// End-to-end Data Protection Capabilities.
    pub dpc: u8,
    /// End-to-end Data Protection Type Settings.
    pub dps: u8,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: u8,
    /// Reservation Capabilities: which kinds of reservation there are; 0 for none.
    pub rescap: u8,
    /// Format Progress Indicator: bit 7 when it is supported, bits 6:0 per cent left.
    pub fpi: u8,
    /// Deallocate Logical Block Features.
    pub dlfeat: u8,
    /// Atomic write units and boundaries of the namespace.
    pub atomics: [u16; 6],
    /// Namespace Optimal I/O Boundary in logical blocks.
    pub noiob: u16,
    /// NVM Capacity in bytes.
    pub nvmcap: [u64; 2],
    /// Namespace Preferred Write Granularity, 0's based.
    pub npwg: u16,
    /// Namespace Preferred Write Alignment, 0's based.
    pub npwa: u16,
    /// Namespace Preferred Deallocate Granularity, 0's based.
    pub npdg: u16,
    /// Namespace Preferred Deallocate Alignment, 0's based.
    pub npda: u16,
    /// Namespace Optimal Write Size, 0's based.
    pub nows: u16,
    /// Reserved, ANA group, attributes, NVM set, endurance group.
    pub reserved74: [u8; 30],
    /// Namespace Globally Unique Identifier, big endian.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier, big endian.
    pub eui64: [u8; 8],
    /// LBA Formats 0 to 15.
    pub lbaf: [LbaFormat; 16],
    /// Reserved (bytes 192 to 383); 0.
    pub reserved192: [u8; 192],
    /// Vendor Specific (bytes 384 to 4095).
    pub vendor: [u8; 3712],
}
const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_SIZE);
const _: () = assert!(core::mem::offset_of!(IdentifyNamespace, nguid) == 104);
const _: () = assert!(core::mem::offset_of!(IdentifyNamespace, lbaf) == 128);

/// NSFEAT bit 4: the preferred granularity fields are defined (section 5.15.2.1).
pub const NSFEAT_OPTIMAL: u8 = 1 << 4;
/// DLFEAT bits 2:0 = 001b: deallocated blocks read as zeroes (section 5.15.2.1).
pub const DLFEAT_READS_ZERO: u8 = 0b001;
/// DLFEAT bit 3: Write Zeroes accepts the Deallocate bit (section 5.15.2.1).
pub const DLFEAT_WRITE_ZEROES_DEAC: u8 = 1 << 3;
