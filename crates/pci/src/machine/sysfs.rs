//! A function by the files that sysfs has of it, for root: as `uio_pci_generic` leaves it, or with no driver.
//!
//! With `uio_pci_generic`, the function stops mastering the bus when this process ends, however it ends: the
//! kernel's driver sees to that as soon as its device file is closed. Without a driver that is done when the
//! value is dropped, and a process that is killed leaves the function running; what it writes to then are
//! huge pages that nobody else has been given, as long as nobody takes them.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rackbus_memory::{MappedRegisters, SharedMemory};

use super::{
    COMMAND, MachineError, MemoryWindow, Place, ReachedRun, disabled, enabled, file, physical,
};

#[derive(Debug)]
pub struct SysfsDevice {
    registers: MappedRegisters,
    config: File,
    /// The device file of `uio_pci_generic`, where that is bound.
    _uio: Option<File>,
    /// By which it reaches physical memory, where it does not reach that directly.
    window: Option<MemoryWindow>,
    /// Of another function's driver. It is there as long as this one may reach it.
    shared: Option<SharedMemory>,
}

impl SysfsDevice {
    pub fn open(place: &Place) -> Result<SysfsDevice, MachineError> {
        // A group of its own is an IOMMU's; one that translates nothing is not in the way.
        if let Some(group) = place.iommu_group() {
            let kind = fs::read_to_string(format!("/sys/kernel/iommu_groups/{group}/type"));
            if kind.unwrap_or_default().trim() != "identity" {
                return Err(MachineError::Translated(place.address.clone()));
            }
        }
        let open = |name: &str| {
            let path = place.path.join(name);
            File::options().read(true).write(true).open(&path).map_err(file(path))
        };
        let uio = match fs::read_dir(place.path.join("uio")).ok().and_then(|mut all| all.next()) {
            Some(Ok(entry)) => {
                let path = std::path::Path::new("/dev").join(entry.file_name());
                Some(File::options().read(true).write(true).open(&path).map_err(file(path))?)
            }
            _ => None,
        };
        if uio.is_none() {
            let path = place.path.join("enable");
            fs::write(&path, "1").map_err(file(path))?;
        }
        // Not every function can be reset by itself; its driver stops it in its own way then.
        let _ = fs::write(place.path.join("reset"), "1");
        let bar = open("resource0")?;
        let length = bar.metadata().map_err(file(place.path.join("resource0")))?.len();
        let registers = MappedRegisters::map(bar.as_fd(), length)?;
        Ok(SysfsDevice {
            registers,
            config: open("config")?,
            _uio: uio,
            window: None,
            shared: None,
        })
    }

    pub fn behind(mut self, window: MemoryWindow) -> SysfsDevice {
        self.window = Some(window);
        self
    }

    pub fn read(&self, offset: u64) -> Result<u32, MachineError> {
        let value = self.registers.read(offset).ok_or(MachineError::OutOfBar(offset))?;
        self.present().map(|()| value)
    }

    pub fn write(&self, offset: u64, value: u32) -> Result<(), MachineError> {
        self.registers.write(offset, value).ok_or(MachineError::OutOfBar(offset))?;
        self.present()
    }

    pub fn start(&mut self, memory: &SharedMemory) -> Result<Vec<ReachedRun>, MachineError> {
        // A page that was never written to may not be there.
        memory.whole().fill(0);
        let runs = self.runs(memory)?;
        self.command(enabled).map_err(file("config"))?;
        Ok(runs)
    }

    pub fn share(&mut self, memory: &SharedMemory) -> Result<Vec<ReachedRun>, MachineError> {
        if !memory.in_huge_pages() {
            return Err(MachineError::SmallPages);
        }
        let runs = self.runs(memory)?;
        self.shared = Some(memory.clone());
        Ok(runs)
    }

    /// Where it reaches memory in huge pages.
    fn runs(&self, memory: &SharedMemory) -> Result<Vec<ReachedRun>, MachineError> {
        let runs = physical::runs(memory)?;
        match self.window {
            Some(window) => physical::through(runs, memory.len() as u64, window),
            None => Ok(runs),
        }
    }

    fn present(&self) -> Result<(), MachineError> {
        if self.registers.gone() { Err(MachineError::Gone) } else { Ok(()) }
    }

    fn command(&self, change: fn(u16) -> u16) -> std::io::Result<()> {
        let mut command = [0; 2];
        self.config.read_exact_at(&mut command, COMMAND)?;
        let command = change(u16::from_le_bytes(command));
        self.config.write_all_at(&command.to_le_bytes(), COMMAND)
    }
}

impl Drop for SysfsDevice {
    fn drop(&mut self) {
        // One that was removed has no command register any more.
        let _ = self.command(disabled);
    }
}
