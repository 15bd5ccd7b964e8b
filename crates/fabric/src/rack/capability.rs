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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// How many virtual functions it has. With any, those are lent, and not the device itself.
    pub virtual_functions: u16,
    /// What can be done with its functions.
    pub capabilities: &'static [DeviceCapability],
    /// How many jobs all of its functions work on at a time, for the timing model, where its class knows.
    pub jobs: Option<u32>,
}
