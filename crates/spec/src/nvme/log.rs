//! Log pages (section 5.14.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Error Information (section 5.14.1.1).
pub const ERROR_INFORMATION: u8 = 0x01;
/// SMART / Health Information (section 5.14.1.2).
pub const SMART_HEALTH: u8 = 0x02;
/// Firmware Slot Information (section 5.14.1.3).
pub const FIRMWARE_SLOT: u8 = 0x03;
/// Commands Supported and Effects (section 5.14.1.5).
pub const COMMANDS_SUPPORTED: u8 = 0x05;

/// An entry of the Error Information log (section 5.14.1.1).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, packed)]
pub struct ErrorEntry {
    /// Error Count: a unique number, 1 upwards; 0 is an invalid entry.
    pub error_count: u64,
    /// Submission Queue ID of the command; FFFFh where no command is to blame.
    pub sq_id: u16,
    /// Command ID of the command; FFFFh where no command is to blame.
    pub cid: u16,
    /// Status Field with the phase tag in bit 0.
    pub status: u16,
    /// Byte (bits 7:0) and bit (bits 10:8) of the command that was wrong; FFFFh for none.
    pub parameter_location: u16,
    /// First LBA that had the error.
    pub lba: u64,
    /// Namespace that the error is about, if it is about one.
    pub nsid: u32,
    /// Vendor specific information available.
    pub vendor: u8,
    /// Transport type (TRTYPE); 0 for PCIe.
    pub transport: u8,
    /// Reserved (bytes 30 and 31); 0.
    pub reserved: [u8; 2],
    /// Command specific information, where the command defines any.
    pub command_specific: u64,
    /// Transport type specific information.
    pub transport_specific: u16,
    /// Reserved (bytes 42 to 63); 0.
    pub reserved2: [u8; 22],
}
const _: () = assert!(size_of::<ErrorEntry>() == 64);

/// SMART / Health Information (section 5.14.1.2). The 128-bit counters are two 64-bit halves,
/// the lower first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct SmartHealth {
    /// Critical Warning: [`WARNING_TEMPERATURE`], [`WARNING_RELIABILITY`] and others; 0 is well.
    pub critical_warning: u8,
    /// Composite Temperature in kelvin.
    pub temperature: u16,
    /// Available Spare in per cent.
    pub available_spare: u8,
    /// Available Spare Threshold in per cent.
    pub spare_threshold: u8,
    /// Percentage Used of the expected life; it may pass 100, and 255 means more than 254.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary.
    pub endurance_warning: u8,
    /// Reserved (bytes 7 to 31); 0.
    pub reserved: [u8; 25],
    /// Data Units Read, in thousands of 512 bytes, rounded up.
    pub data_units_read: [u64; 2],
    /// Data Units Written, in thousands of 512 bytes, rounded up.
    pub data_units_written: [u64; 2],
    /// Host Read Commands that the controller completed; Compare counts as one.
    pub host_reads: [u64; 2],
    /// Host Write Commands that the controller completed.
    pub host_writes: [u64; 2],
    /// Controller Busy Time in minutes.
    pub busy_time: [u64; 2],
    /// Power Cycles, how often the controller was powered on.
    pub power_cycles: [u64; 2],
    /// Power On Hours, without times in non-operational power states where these are not counted.
    pub power_on_hours: [u64; 2],
    /// Unsafe Shutdowns: power was lost without a shutdown notification before.
    pub unsafe_shutdowns: [u64; 2],
    /// Media and Data Integrity Errors.
    pub media_errors: [u64; 2],
    /// Number of Error Information Log Entries.
    pub error_entries: [u64; 2],
    /// Warning Composite Temperature Time in minutes.
    pub warning_time: u32,
    /// Critical Composite Temperature Time in minutes.
    pub critical_time: u32,
    /// Temperature Sensors 1 to 8.
    pub sensors: [u16; 8],
    /// Thermal management transition counts and times.
    pub thermal: [u32; 4],
    /// Reserved (bytes 232 to 511); 0.
    pub reserved2: [u8; 280],
}
const _: () = assert!(size_of::<SmartHealth>() == 512);

/// SMART critical warning bit 1: temperature beyond a threshold (section 5.14.1.2).
pub const WARNING_TEMPERATURE: u8 = 1 << 1;
/// Critical warning: errors of the medium or within the drive have degraded its reliability.
pub const WARNING_RELIABILITY: u8 = 1 << 2;
/// Critical Warning: the persistent memory region has become unreliable (section 5.14.1.2).
pub const WARNING_REGION: u8 = 1 << 5;

/// Firmware Slot Information (section 5.14.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FirmwareSlot {
    /// Active Firmware Info: the active slot in bits 2:0.
    pub active: u8,
    /// Reserved (bytes 1 to 7); 0.
    pub reserved: [u8; 7],
    /// Firmware revision of slots 1 to 7, ASCII.
    pub revisions: [[u8; 8]; 7],
    /// Reserved (bytes 64 to 511); 0.
    pub reserved2: [u8; 448],
}
const _: () = assert!(size_of::<FirmwareSlot>() == 512);

/// Commands Supported and Effects (section 5.14.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CommandsSupported {
    /// Admin commands by opcode.
    pub admin: [u32; 256],
    /// I/O commands by opcode.
    pub io: [u32; 256],
    /// Reserved (bytes 2048 to 4095); 0.
    pub reserved: [u8; 2048],
}
const _: () = assert!(size_of::<CommandsSupported>() == 4096);

/// Effects bit 0: the command is supported (section 5.14.1.5).
pub const EFFECT_SUPPORTED: u32 = 1 << 0;
/// Effects bit 1: the command may change logical block contents (section 5.14.1.5).
pub const EFFECT_LOGICAL_BLOCK_CHANGE: u32 = 1 << 1;
