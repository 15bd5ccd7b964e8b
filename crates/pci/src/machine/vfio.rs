//! A function that is bound to `vfio-pci`.

use std::io;
use std::os::fd::AsFd;

use rackbus_memory::{Access, Event, SharedMemory};
use rackbus_spec::vfio_user::region;
use rackbus_vfio::{InterruptIndex, VfioError};
use rustix::io::Errno;

use super::{MachineError, Place, ReachedRun, file};

#[derive(Debug)]
pub struct MachineVfioDevice(rackbus_vfio::VfioDevice);

impl MachineVfioDevice {
    pub fn open(place: &Place) -> Result<MachineVfioDevice, MachineError> {
        Ok(MachineVfioDevice(rackbus_vfio::VfioDevice::open_alone(place.address.parse()?)?))
    }

    pub fn read(&self, offset: u64) -> Result<u32, MachineError> {
        let mut word = [0; 4];
        self.0.read(region::BAR0, offset, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    pub fn write(&self, offset: u64, value: u32) -> Result<(), MachineError> {
        Ok(self.0.write(region::BAR0, offset, &value.to_le_bytes())?)
    }

    pub fn start(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> Result<Vec<ReachedRun>, MachineError> {
        match self.0.reset() {
            // Its driver stops it in its own way then.
            Err(VfioError::NoReset(_)) => {}
            reset => drop(reset?),
        }
        self.0.container().map(iova, memory, Access::READ | Access::WRITE)?;
        self.0.enable(true)?;
        Ok(vec![ReachedRun { offset: 0, address: iova }])
    }

    pub fn share(
        &mut self,
        iova: u64,
        memory: &SharedMemory,
    ) -> Result<Vec<ReachedRun>, MachineError> {
        self.0.container().map(iova, memory, Access::READ)?;
        Ok(vec![ReachedRun { offset: 0, address: iova }])
    }

    pub fn unshare(&mut self, iova: u64, length: u64) -> Result<(), MachineError> {
        Ok(self.0.container().unmap(iova, length)?)
    }

    pub fn interrupts(&mut self, count: u16) -> Result<Vec<Event>, MachineError> {
        for kind in [InterruptIndex::Msix, InterruptIndex::Msi] {
            let mut wanted = self.0.vectors(kind).min(count.into()) as usize;
            while wanted > 0 {
                let events = (0..wanted).map(|_| Event::new()).collect::<io::Result<Vec<_>>>();
                let events = events.map_err(file("eventfd"))?;
                let wires: Vec<_> = events.iter().map(|event| Some(event.as_fd())).collect();
                match self.0.wire(kind, 0, &wires) {
                    Ok(()) => return Ok(events),
                    // There are fewer for this function than it has.
                    Err(VfioError::Refused { cause: Errno::NOSPC | Errno::INVAL, .. }) => {
                        wanted /= 2
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(Vec::new())
    }
}
