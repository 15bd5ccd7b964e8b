//! What a drive does together with other functions: transfers with data that is not in the driver's memory, but in
//! a BAR of theirs, and what they need to wait for it.

use rackbus_memory::SharedMemory;
use rackbus_spec::nvme::IoOpcode;

use super::{Drive, name};
use crate::DriveError;

impl Drive {
    /// The memory that the driver shares with the drive.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Reads `length` bytes, whole blocks, from block `lba` on into memory that the drive reaches at `address`,
    /// which is not this driver's: a part of a BAR of another function.
    ///
    /// # Errors
    /// [`DriveError`]; a data transfer error when the drive does not reach it.
    pub fn read_to(&mut self, lba: u64, length: usize, address: u64) -> Result<(), DriveError> {
        self.transfer_at(IoOpcode::Read, lba, length, address)
    }

    /// Writes `length` bytes, whole blocks, from such memory to block `lba` on.
    ///
    /// # Errors
    /// As [`read_to`](Drive::read_to).
    pub fn write_from(&mut self, lba: u64, length: usize, address: u64) -> Result<(), DriveError> {
        self.transfer_at(IoOpcode::Write, lba, length, address)
    }

    fn transfer_at(
        &mut self,
        opcode: IoOpcode,
        lba: u64,
        length: usize,
        address: u64,
    ) -> Result<(), DriveError> {
        let block = self.info.block_size as usize;
        let most = self.info.max_transfer - self.info.max_transfer % block;
        if !length.is_multiple_of(block) {
            return Err(DriveError::Request("the length is not a multiple of the block size"));
        }
        self.check_idle()?;
        for start in (0..length).step_by(most) {
            let (piece, lba) = (most.min(length - start), lba.checked_add((start / block) as u64));
            let lba = lba.ok_or(DriveError::Request("the blocks are beyond the drive's end"))?;
            let data = (address.wrapping_add(start as u64), piece);
            self.queue.submit_at(opcode, lba, (piece / block) as u32, data, false)?;
            self.finish(name(opcode))?;
        }
        Ok(())
    }
}
