//! What a drive does together with other functions: transfers with data that is not in the driver's memory, but in
//! a BAR of theirs or in its own memory buffer or persistent memory region, and what they need to wait for it.

use rackbus_memory::SharedMemory;
use rackbus_spec::nvme::IoOpcode;
use rackbus_spec::nvme::registers::{
    self as reg, BARRIER_STATUS, Cap, Cmbloc, Cmbmsc, Cmbsz, Pmrcap, Pmrmsc, Pmrsts,
};

use super::admin::read4;
use super::{Drive, name};
use crate::DriveError;
use crate::device::bar_register;

impl Drive {
    /// The memory that the driver shares with the drive.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Places the drive's controller memory buffer at `address` (NVM Express base 1.4, section 4.7): for commands of this
    /// drive, and, by its BAR, for other functions of the same user. Returns its size in bytes, of which `address` must
    /// be a multiple.
    ///
    /// # Errors
    /// [`DriveError::Unsupported`] when it has none.
    pub fn place_buffer(&mut self, address: u64) -> Result<u64, DriveError> {
        let device = &mut *self.device;
        let mut cap = [0; 8];
        device.read(reg::CAP, &mut cap)?;
        if !Cap::from(u64::from_le_bytes(cap)).cmbs() {
            return Err(DriveError::Unsupported("it has no controller memory buffer"));
        }
        let control = Cmbmsc::new().with_cre(true);
        device.write(reg::CMBMSC, &u64::from(control).to_le_bytes())?;
        let location = Cmbloc::from(read4(device, reg::CMBLOC)?);
        let extent = Cmbsz::from(read4(device, reg::CMBSZ)?);
        let unit = 4096u64 << (4 * u32::from(extent.szu().min(6)));
        let size = u64::from(extent.sz()) * unit;
        if location.ofst() != 0 || size == 0 {
            return Err(DriveError::Unsupported("its memory buffer is not a BAR of its own"));
        }
        if !address.is_multiple_of(size) || address.checked_add(size - 1).is_none() {
            return Err(DriveError::Request("the address is not a multiple of the buffer's size"));
        }
        device.write_config(bar_register(location.bir()), &address.to_le_bytes())?;
        let control = control.with_cmse(true).with_cba(address >> 12);
        device.write(reg::CMBMSC, &u64::from(control).to_le_bytes())?;
        // A read comes after the write before it, which commands that are found in memory may overtake.
        match read4(device, reg::CMBSTS)? {
            0 => Ok(size),
            _ => Err(DriveError::Unsupported("its memory buffer cannot be at that address")),
        }
    }

    /// Turns the drive's persistent memory region on (NVM Express base 1.4, section 4.8): what is behind its BAR, whose
    /// number is returned.
    ///
    /// # Errors
    /// [`DriveError::Unsupported`] when it has none, or none that a read of PMRSTS makes durable.
    pub fn enable_region(&mut self) -> Result<u8, DriveError> {
        let device = &mut *self.device;
        let mut cap = [0; 8];
        device.read(reg::CAP, &mut cap)?;
        let said = match Cap::from(u64::from_le_bytes(cap)).pmrs() {
            true => Pmrcap::from(read4(device, reg::PMRCAP)?),
            false => {
                return Err(DriveError::Unsupported("it has no persistent memory region"));
            }
        };
        if said.pmrwbm() & BARRIER_STATUS == 0 {
            return Err(DriveError::Unsupported("its region is made durable by other means"));
        }
        device.write(reg::PMRCTL, &1u32.to_le_bytes())?;
        match Pmrsts::from(read4(device, reg::PMRSTS)?).nrdy() {
            false => Ok(said.bir()),
            true => Err(DriveError::Unsupported("its region does not become ready at once")),
        }
    }

    /// Places the region that was [turned on](Drive::enable_region) at `address`, a multiple of its size: for commands of this
    /// drive and, by its BAR, for other functions of the same user.
    ///
    /// # Errors
    /// [`DriveError::Unsupported`] when it has none, or cannot be there.
    pub fn place_region(&mut self, address: u64) -> Result<(), DriveError> {
        let bar = self.enable_region()?;
        let device = &mut *self.device;
        device.write_config(bar_register(bar), &address.to_le_bytes())?;
        self.address_region(address)
    }

    /// As [`place_region`](Drive::place_region), where the BAR is there already.
    ///
    /// # Errors
    /// As [`place_region`](Drive::place_region).
    pub fn address_region(&mut self, address: u64) -> Result<(), DriveError> {
        let device = &mut *self.device;
        let control = u64::from(Pmrmsc::new().with_cmse(true).with_cba(address >> 12));
        device.write(reg::PMRMSC, &(control as u32).to_le_bytes())?;
        device.write(reg::PMRMSC + 4, &((control >> 32) as u32).to_le_bytes())?;
        match Pmrsts::from(read4(device, reg::PMRSTS)?).cbai() {
            false => Ok(()),
            true => Err(DriveError::Unsupported("its region cannot be at that address")),
        }
    }

    /// Returns when all that was stored in the region before, by whomever, survives a loss of power.
    ///
    /// # Errors
    /// [`DriveError::NotDurable`] when it may not; that stays so until the drive is given back.
    pub fn make_region_durable(&mut self) -> Result<(), DriveError> {
        let status = Pmrsts::from(read4(&mut *self.device, reg::PMRSTS)?);
        match status.err() == 0 && !status.nrdy() {
            true => Ok(()),
            false => Err(DriveError::NotDurable),
        }
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
