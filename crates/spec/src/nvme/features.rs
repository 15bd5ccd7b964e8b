//! Features (section 5.21.1): identifiers and the dwords that have fields.

use bitfield_struct::bitfield;

/// Arbitration (section 5.21.1.1).
pub const ARBITRATION: u8 = 0x01;
/// Power Management (section 5.21.1.2).
pub const POWER_MANAGEMENT: u8 = 0x02;
/// Temperature Threshold (section 5.21.1.4).
pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
/// Error Recovery (section 5.21.1.5).
pub const ERROR_RECOVERY: u8 = 0x05;
/// Volatile Write Cache (section 5.21.1.6).
pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
/// Number of Queues (section 5.21.1.7).
pub const NUMBER_OF_QUEUES: u8 = 0x07;
/// Interrupt Coalescing (section 5.21.1.8).
pub const INTERRUPT_COALESCING: u8 = 0x08;
/// Interrupt Vector Configuration (section 5.21.1.9).
pub const INTERRUPT_VECTOR_CONFIG: u8 = 0x09;
/// Write Atomicity Normal (section 5.21.1.10).
pub const WRITE_ATOMICITY: u8 = 0x0a;
/// Asynchronous Event Configuration (section 5.21.1.11).
pub const ASYNC_EVENT_CONFIG: u8 = 0x0b;
/// Software Progress Marker (section 5.21.1.23).
pub const SOFTWARE_PROGRESS_MARKER: u8 = 0x80;
/// Host Identifier (section 5.21.1.24).
pub const HOST_IDENTIFIER: u8 = 0x81;

/// Get Features select: current value (section 5.13).
pub const SELECT_CURRENT: u8 = 0;
/// Get Features select: default value (section 5.13).
pub const SELECT_DEFAULT: u8 = 1;
/// Get Features select: saved value (section 5.13).
pub const SELECT_SAVED: u8 = 2;
/// Get Features select: supported capabilities (section 5.13).
pub const SELECT_SUPPORTED: u8 = 3;

/// Dword 0 of the completion of Get Features with select "supported capabilities" (section 5.13).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FeatureCapabilities {
    /// The feature's value can be saved.
    pub saveable: bool,
    /// The feature has a value for each namespace.
    pub namespace_specific: bool,
    /// The feature can be changed.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

/// Number of Queues: dword 11 asks, dword 0 of the completion answers; both 0's based
/// (section 5.21.1.7).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// I/O submission queues, 0's based.
    pub nsq: u16,
    /// I/O completion queues, 0's based.
    pub ncq: u16,
}

/// Interrupt Coalescing (section 5.21.1.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptCoalescing {
    /// Aggregation Threshold: completions for each interrupt, 0's based.
    pub thr: u8,
    /// Aggregation Time in units of 100 µs; 0 is no delay.
    pub time: u8,
    __: u16,
}

/// Interrupt Vector Configuration (section 5.21.1.9).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptVectorConfig {
    /// Interrupt Vector that the setting is for.
    pub iv: u16,
    /// Coalescing Disable: each completion raises the vector at once.
    pub cd: bool,
    #[bits(15)]
    __: u16,
}

/// Temperature Threshold (section 5.21.1.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// Threshold in kelvin, which the sensor is over or under.
    pub tmpth: u16,
    /// Sensor: 0 is the composite temperature, Fh all sensors (set only).
    #[bits(4)]
    pub tmpsel: u8,
    /// Threshold type: 00b over, 01b under.
    #[bits(2)]
    pub thsel: u8,
    #[bits(10)]
    __: u16,
}

/// Asynchronous Event Configuration (section 5.21.1.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// SMART / Health Critical Warnings that raise an event, laid out as the log's byte 0.
    pub smart: u8,
    /// Namespace Attribute Notices: an event when Identify data of a namespace change.
    pub namespace_attribute: bool,
    /// Firmware Activation Notices: an event when new firmware starts.
    pub firmware_activation: bool,
    #[bits(22)]
    __: u32,
}

/// Dword 0 of the completion of an Asynchronous Event Request (section 5.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type: [`EVENT_ERROR`], [`EVENT_SMART`], 2h for notices.
    #[bits(3)]
    pub event_type: u8,
    #[bits(5)]
    __: u8,
    /// Asynchronous Event Information, which says more by the type.
    pub info: u8,
    /// Log Page Identifier to read.
    pub log_page: u8,
    __: u8,
}

/// Event type 0h: error status (section 5.2.1).
pub const EVENT_ERROR: u8 = 0;
/// Event type 1h: SMART / health status (section 5.2.1).
pub const EVENT_SMART: u8 = 1;
/// Error status 00h: write to an invalid doorbell register (section 5.2.1).
pub const ERROR_INVALID_DOORBELL: u8 = 0x00;
/// Error status 01h: invalid doorbell write value (section 5.2.1).
pub const ERROR_INVALID_DOORBELL_VALUE: u8 = 0x01;
/// Error status 03h: persistent internal error (section 5.2.1).
pub const ERROR_PERSISTENT_INTERNAL: u8 = 0x03;
/// SMART status 01h: a temperature threshold was crossed (section 5.2.1).
pub const SMART_TEMPERATURE: u8 = 0x01;
/// Information of a SMART event: the reliability of the drive has degraded.
pub const SMART_RELIABILITY: u8 = 0x00;
