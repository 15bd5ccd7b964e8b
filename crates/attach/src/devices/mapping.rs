//! Memory that a borrowed device reaches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rackbus_memory::{Access, ResourceHandle};
use rackbus_pci::vfio_user::{Client, ClientError};

use super::addresses::PAGE;
use super::borrowed::{BorrowedDevice, DeviceSegment};
use super::{DeviceError, Shared};
use crate::memory::Follower;
use crate::session::lock;

/// Memory that a device reaches, until this is dropped.
#[derive(Debug)]
pub struct DeviceMapping {
    address: u64,
    _what: MappedTarget,
}

#[derive(Debug)]
#[expect(dead_code, reason = "it is held, and ends with the mapping")]
enum MappedTarget {
    Memory(Arc<DmaFollower>),
    /// The device whose BAR it is; windows to it are there as long as both are.
    Peer(Option<DeviceSegment>),
}

impl DeviceMapping {
    pub(super) fn of_memory(follower: Arc<DmaFollower>) -> DeviceMapping {
        DeviceMapping {
            address: follower.address + follower.lead,
            _what: MappedTarget::Memory(follower),
        }
    }

    pub(super) fn of_peer(address: u64, device: Option<DeviceSegment>) -> DeviceMapping {
        DeviceMapping { address, _what: MappedTarget::Peer(device) }
    }

    /// The address at which the device finds its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// Memory of segments that is mapped for a device, wherever its node moves it.
#[derive(Debug)]
pub(super) struct DmaFollower {
    shared: Arc<Shared>,
    client: Arc<Client>,
    address: u64,
    /// Bytes of its first page that come before what was asked for.
    lead: u64,
    /// The first page's offset in the memory's file, and the bytes of all pages.
    pages: (u64, u64),
    access: Access,
    state: Mutex<State>,
    /// Tells the device's program that the device does not reach it any more.
    unreached: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct State {
    /// The device has it mapped.
    mapped: bool,
    /// It had it mapped once: what fails now fails behind its program's back.
    begun: bool,
    /// Why it has not.
    failed: Option<DeviceError>,
}

impl State {
    /// The device was told where the memory is. True when its program is to hear that it is lost to the device.
    fn taken_up(&mut self, outcome: Result<(), DeviceError>) -> bool {
        self.mapped = outcome.is_ok();
        let lost = self.begun && !self.mapped;
        self.begun |= self.mapped;
        self.failed = outcome.err();
        lost
    }
}

impl DmaFollower {
    /// Takes addresses for a range, in whole pages: that is what a device can be kept to.
    pub(super) fn new(
        device: &BorrowedDevice,
        (offset, length): (u64, u64),
        write: bool,
    ) -> Result<Arc<DmaFollower>, DeviceError> {
        let lead = offset % PAGE;
        let bytes = (lead + length).next_multiple_of(PAGE);
        let (shared, client) = (device.shared().clone(), device.client().clone());
        let address = shared.take(bytes, PAGE)?;
        let access = if write { Access::READ | Access::WRITE } else { Access::READ };
        let (pages, state) = ((offset - lead, bytes), Mutex::default());
        let unreached = device.unreached().clone();
        Ok(Arc::new(DmaFollower { shared, client, address, lead, pages, access, state, unreached }))
    }

    /// Whether the device reached it when it was taken up last.
    pub(super) fn outcome(&self) -> Result<(), DeviceError> {
        match lock(&self.state).failed.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Ends the device's conversation, and has its program hear of it.
    fn end_device(&self) {
        self.unreached.store(true, Ordering::Release);
        self.client.shut_down();
    }
}

impl Follower for DmaFollower {
    fn device(&self) -> usize {
        Arc::as_ptr(&self.client).addr()
    }

    fn unmap(&self) {
        let mut state = lock(&self.state);
        if !std::mem::take(&mut state.mapped) {
            return;
        }
        match self.client.dma_unmap(self.address, self.pages.1) {
            Ok(()) => {}
            Err(error @ ClientError::Wire(_)) => {
                tracing::debug!(%error, "a device that is gone cannot unmap");
                self.client.shut_down();
            }
            Err(error) => {
                tracing::warn!(%error, "a device does not unmap memory; it is given up");
                self.end_device();
            }
        }
    }

    fn take_up(&self, file: &ResourceHandle) {
        let mut state = lock(&self.state);
        if state.mapped {
            return;
        }
        let (offset, length) = self.pages;
        let memory = Some((file.as_descriptor(), offset));
        let mapped = self.client.dma_map(self.address, length, self.access, memory);
        let outcome = mapped.map_err(|error| match error {
            ClientError::Wire(_) => DeviceError::Gone,
            error => {
                tracing::warn!(%error, "a device does not reach memory that was mapped for it");
                error.into()
            }
        });
        if state.taken_up(outcome) {
            self.unreached.store(true, Ordering::Release);
        }
    }

    fn give_up(&self) {
        tracing::warn!("a device's lender does not answer while memory moves; it is given up");
        self.end_device();
    }
}

impl Drop for DmaFollower {
    fn drop(&mut self) {
        self.unmap();
        self.shared.give_address_back(self.address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who maps is told of what fails then; of what fails when memory moves, nobody would be.
    #[test]
    fn an_error_after_memory_moved_is_reported() {
        let mut state = State::default();
        assert!(!state.taken_up(Err(DeviceError::NoAddress)), "the call that maps tells of it");
        assert!(!state.taken_up(Ok(())));
        assert!(!state.taken_up(Ok(())), "it moved, and is reached");
        assert!(state.taken_up(Err(DeviceError::NoAddress)));
        assert!(!state.taken_up(Ok(())), "it moved once more, and is reached again");
    }
}
