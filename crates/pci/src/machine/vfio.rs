//! A function that is bound to `vfio-pci`.
//!
//! Source: Linux, `Documentation/driver-api/vfio.rst` and `include/uapi/linux/vfio.h`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rackbus_memory::{Event, SharedMemory};
use rackbus_spec::vfio_user::{DeviceInfoFlags, irq, region};
use rustix::io::Errno;

use super::{COMMAND, MachineError, Place, Run, enabled, file, ioctl};

const CONTAINER: &str = "/dev/vfio/vfio";
/// The kind of IOMMU: `VFIO_TYPE1v2_IOMMU`.
const TYPE1: usize = 3;

/// The order is that in which the files are closed.
#[derive(Debug)]
pub struct Device {
    device: File,
    /// The group and the container are kept open for as long as the device is used.
    _group: File,
    container: File,
    /// Where BAR 0 and configuration space are in the device's file, and the BAR's size.
    bar: (u64, u64),
    config: u64,
    name: PathBuf,
}

impl Device {
    pub fn open(place: &Place) -> Result<Device, MachineError> {
        let group = place.iommu_group();
        let group = group.ok_or(MachineError::Vfio("the function is in no IOMMU group"))?;
        let path = Path::new("/dev/vfio").join(&group);
        let open =
            |path: &Path| File::options().read(true).write(true).open(path).map_err(file(path));
        let said = |errno: Errno| file(path.clone())(errno.into());
        let container = open(Path::new(CONTAINER))?;
        if ioctl::api_version(&container).map_err(said)? != 0 {
            return Err(MachineError::Vfio("its interface has another version"));
        }
        let file_of_group = open(&path)?;
        if !ioctl::is_viable(&file_of_group).map_err(said)? {
            return Err(MachineError::NotViable(group));
        }
        ioctl::set_container(&file_of_group, &container).map_err(said)?;
        ioctl::set_iommu(&container, TYPE1).map_err(said)?;
        let device = ioctl::device(&file_of_group, &place.address).map_err(said)?;
        let bar = ioctl::region_info(&device, region::BAR0).map_err(said)?;
        let config = ioctl::region_info(&device, region::CONFIG).map_err(said)?;
        Ok(Device {
            device,
            _group: file_of_group,
            container,
            bar: (bar.offset, bar.size),
            config: config.offset,
            name: path,
        })
    }

    pub fn read(&self, offset: u64) -> Result<u32, MachineError> {
        let mut word = [0; 4];
        self.device.read_exact_at(&mut word, self.at(offset)?).map_err(self.said())?;
        Ok(u32::from_le_bytes(word))
    }

    pub fn write(&self, offset: u64, value: u32) -> Result<(), MachineError> {
        self.device.write_all_at(&value.to_le_bytes(), self.at(offset)?).map_err(self.said())
    }

    pub fn start(&mut self, iova: u64, memory: &SharedMemory) -> Result<Vec<Run>, MachineError> {
        let said = |errno: Errno| self.said()(errno.into());
        let info = ioctl::device_info(&self.device).map_err(said)?;
        if info.flags & DeviceInfoFlags::RESET.bits() != 0 {
            ioctl::reset(&self.device).map_err(said)?;
        }
        ioctl::map(&self.container, iova, memory).map_err(said)?;
        let mut command = [0; 2];
        let at = self.config + COMMAND;
        self.device.read_exact_at(&mut command, at).map_err(self.said())?;
        let command = enabled(u16::from_le_bytes(command));
        self.device.write_all_at(&command.to_le_bytes(), at).map_err(self.said())?;
        Ok(vec![Run { offset: 0, address: iova }])
    }

    pub fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, MachineError> {
        let said = |errno: Errno| self.said()(errno.into());
        for index in [irq::MSIX, irq::MSI] {
            let has = ioctl::irq_count(&self.device, index).map_err(said)?;
            let mut wanted = has.min(count.into()) as usize;
            while wanted > 0 {
                let events = (0..wanted).map(|_| Event::new()).collect::<io::Result<Vec<_>>>();
                let events = events.map_err(self.said())?;
                match ioctl::wire(&self.device, index, &events) {
                    Ok(Ok(())) => return Ok(events),
                    Ok(Err(fewer)) => wanted = wanted.saturating_sub(1).min(fewer as usize),
                    Err(Errno::NOSPC | Errno::INVAL) => wanted /= 2,
                    Err(errno) => return Err(said(errno)),
                }
            }
        }
        Ok(Vec::new())
    }

    fn at(&self, offset: u64) -> Result<u64, MachineError> {
        let (first, size) = self.bar;
        match offset.checked_add(4).is_some_and(|end| end <= size) {
            true => Ok(first + offset),
            false => Err(MachineError::OutOfBar(offset)),
        }
    }

    fn said(&self) -> impl FnOnce(io::Error) -> MachineError + use<> {
        file(self.name.clone())
    }
}
