//! What a class of devices says of its devices to the parts of rackbus that know no class.
//!
//! The control plane, the command line and the timing model ask for a capability where they want devices that something
//! can be done with. They name no class, so a new one that has the capability needs no edit there.

/// Something that can be done with all functions of a class, whatever else they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceCapability {
    /// They are drives: they read and write blocks by NVMe commands.
    Blocks,
    /// They have engines whose throughput is promised by service levels.
    Engines,
    /// They are stations of the rack's network, each with a port.
    Port,
}

impl DeviceCapability {
    /// The word in the API: `engines`.
    pub fn word(self) -> &'static str {
        match self {
            DeviceCapability::Blocks => "blocks",
            DeviceCapability::Engines => "engines",
            DeviceCapability::Port => "port",
        }
    }
}

/// What whoever knows the classes says of a device when a rack file is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// How many virtual functions it has. With any, those are lent, and not the device itself.
    pub virtual_functions: u16,
    /// What can be done with its functions.
    pub capabilities: &'static [DeviceCapability],
    /// For the timing model, what is known of each virtual function, or of the device where it has none.
    pub timing: Vec<FunctionTiming>,
}

/// What a class tells the timing model of a function, as its rack file has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionTiming {
    /// How many jobs the device works on at a time with all of its functions, where its class knows.
    pub jobs: Option<u32>,
    /// What the function may do in a second, by which its lender keeps it.
    pub limits: Vec<FunctionLimit>,
    /// Bytes that one operation moves at most, where there is such a bound: what is longer counts as several.
    pub longest: Option<u64>,
    /// How the device's functions take turns at what it works on, where it does not take jobs as they come.
    pub turns: Option<TurnTiming>,
}

/// How the functions of a device take turns at its engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnTiming {
    /// A turn takes so many nanoseconds of an engine at most, as far as messages can be interrupted.
    pub slice_ns: u64,
    /// Messages can be interrupted at multiples of so many bytes of their input.
    pub granule: u64,
    /// Whether functions get engine time by their levels. Without, queues take turns by message, whosever they are.
    pub shaped: bool,
    /// The service level that the function is promised, as the rack file has it.
    pub level: Option<String>,
}

/// A bound on what a function does in a second: a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionLimit {
    /// What there is a token for.
    pub counts: LimitCounts,
    /// Tokens that come each second.
    pub rate: u64,
    /// Tokens that are kept at most, for what comes at once.
    pub burst: u64,
}

/// What a limit of a function counts, as the function's DMA sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitCounts {
    /// Bytes that it moves, both ways together.
    Bytes,
    /// Bytes that it reads from memory, to send them.
    BytesRead,
    /// Bytes that it writes to memory, as it has received them.
    BytesWritten,
    /// Operations, whatever they move.
    Operations,
}
