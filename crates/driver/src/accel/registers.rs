//! The function's registers: what it says of itself, and how it takes what is stored there.

use std::time::Instant;

use rackbus_spec::accel::{OPERATIONS, Operation, registers as reg};

use super::{AccelError, AccelInfo, NAP, TIME_LIMIT};
use crate::DriveError;
use crate::device::DrivenFunction;

/// What the function says of itself.
pub(super) fn identify(device: &mut dyn DrivenFunction) -> Result<AccelInfo, AccelError> {
    match read4(device, reg::MAGIC)? {
        u32::MAX => return Err(AccelError::Device(DriveError::Absent)),
        reg::MAGIC_VALUE => {}
        _ => return Err(AccelError::Unsupported("it is no accelerator")),
    }
    if read4(device, reg::VERSION)? != reg::VERSION_VALUE {
        return Err(AccelError::Unsupported("its interface is of another version"));
    }
    let mut operations = [0; 8];
    device.read(reg::OPERATIONS, &mut operations)?;
    let bits = u64::from_le_bytes(operations);
    let can = |operation: &Operation| bits >> *operation as u8 & 1 == 1;
    Ok(AccelInfo {
        queues: read4(device, reg::QUEUES)?,
        contexts: read4(device, reg::CONTEXTS)?,
        largest: read4(device, reg::LARGEST)?,
        operations: OPERATIONS.into_iter().filter(can).collect(),
    })
}

/// A register of four bytes.
pub(super) fn read4(device: &mut dyn DrivenFunction, offset: u64) -> Result<u32, AccelError> {
    let mut data = [0; 4];
    device.read(offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

/// A register when it is as it should be, after what the driver has stored elsewhere. That is so at once where the store
/// traps; where registers are memory the function has to look first.
pub(super) fn settled(
    device: &mut dyn DrivenFunction,
    register: u64,
    wanted: impl Fn(u32) -> bool,
) -> Result<u32, AccelError> {
    let begun = Instant::now();
    loop {
        match read4(device, register)? {
            u32::MAX => return Err(AccelError::Device(DriveError::Absent)),
            value if wanted(value) => return Ok(value),
            _ if begun.elapsed() >= TIME_LIMIT => return Err(AccelError::TimedOut),
            _ if device.progress() => {}
            _ => std::thread::sleep(NAP),
        }
    }
}

/// Writes a register of four bytes.
pub(super) fn write4(
    device: &mut dyn DrivenFunction,
    offset: u64,
    value: u32,
) -> Result<(), AccelError> {
    Ok(device.write(offset, &value.to_le_bytes())?)
}
