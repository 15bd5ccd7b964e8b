//! What is lent in a window: a function of this machine, or the model of one.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::time::Instant;

use rackbus_memory::Event;
use rackbus_spec::pcie::msix;
use rackbus_vfio::{RangeTarget, VfioError};
use rustix::io::Errno;

use crate::error::MetalError;
use crate::image::{Image, MsixTable};
use crate::isolated::{IsolatedMapping, MappingRefusal};
use crate::lender::locked;
use crate::log_pace::LogPace;
use crate::saved::SavedDevice;
use crate::window::{BAR_64, BAR_PREFETCH, PAGE};

/// Behind this offset of an entry of the MSI-X table is its mask.
pub(crate) const VECTOR_CONTROL: u64 = 12;

/// What the borrower asks of a lent device. Those that change it come one at a time.
pub(crate) trait WindowDevice: Send + Sync {
    /// Its name, for people: the address of a function of this machine, or the device's name in the rack.
    fn name(&self) -> String;

    /// Takes the borrower's memory away from it at once, whatever it does; false where only
    /// [`set_master`](WindowDevice::set_master) does that. From any thread.
    fn cut(&self) -> bool;

    /// Lets it master the bus and answer at its memory, or the latter alone. On return what was under way has ended
    /// when it may not.
    ///
    /// # Errors
    /// When it does not answer.
    fn set_master(&self, on: bool) -> Result<(), MetalError>;

    /// Sets the bits of the device control register that are the borrower's.
    ///
    /// # Errors
    /// When it does not answer.
    fn set_device_control(&self, bits: u16) -> Result<(), MetalError>;

    /// Resets it. It is as it was when it was lent then: its memory answers, it does not master the bus, and its vectors
    /// are masked.
    ///
    /// # Errors
    /// When it cannot be reset.
    fn reset(&self) -> Result<(), MetalError>;

    /// How many mappings are made for it at most while it is isolated; 0 where it cannot be.
    fn most_mappings(&self) -> u32 {
        0
    }

    /// Whether it can be isolated now.
    ///
    /// # Errors
    /// The reason why not.
    fn may_isolate(&self) -> Result<(), MappingRefusal> {
        Err(MappingRefusal::Unsupported)
    }

    /// Takes all of the borrower's memory away from it, to reach what is [mapped](WindowDevice::map) from then on; or gives it
    /// all of the window again, and ends what is mapped. It is reset in between. Whoever closes it for that has its BARs ended
    /// before, and lends them anew.
    ///
    /// # Errors
    /// When that does not succeed. It is of no more use then.
    fn isolate(&self, _on: bool, _bars: &mut dyn LentBars) -> Result<(), MetalError> {
        Err(not_lendable(self.name(), "it cannot be isolated"))
    }

    /// Makes a mapping, while it is isolated.
    ///
    /// # Errors
    /// When it is not made.
    fn map(&self, _mapping: &IsolatedMapping) -> Result<(), MappingRefusal> {
        Err(MappingRefusal::Unsupported)
    }

    /// Ends a mapping. On return it is not reached any more.
    ///
    /// # Errors
    /// When it may be reached still. The device is of no more use then.
    fn unmap(&self, _mapping: &IsolatedMapping) -> Result<(), MetalError> {
        Ok(())
    }

    /// Why it is of no more use, if it is not. Asked some times a second, and when the [alarm](WindowDevice::alarm) rings.
    fn trouble(&self) -> Option<&'static str>;

    /// Rings when it may be of no more use.
    fn alarm(&self) -> Option<BorrowedFd<'_>>;

    /// Does nothing by itself for its borrower, or goes on with what came meanwhile: another process may go on with it.
    fn pause(&self, _on: bool) {}

    /// As another process goes on with it, beside what the class of a model saves.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn save(&self) -> std::io::Result<SavedDevice>;
}

/// The BARs of a function, as its borrower's processors have them.
pub(crate) trait LentBars {
    /// Takes all of them away from the borrower.
    ///
    /// # Errors
    /// When that is refused.
    fn end_bars(&mut self) -> Result<(), MetalError>;

    /// Lends the same ones again, of a device that was closed meanwhile.
    ///
    /// # Errors
    /// When they are others, or are refused.
    fn lend_bars(&mut self, bars: Vec<BarMap>) -> Result<(), MetalError>;
}

/// A BAR as memory.
#[derive(Debug)]
pub(crate) struct BarMap {
    /// Its number, 0 to 5.
    pub number: u8,
    /// Its bytes, a power of two.
    pub size: u64,
    /// Its kind: [`BAR_64`] and [`BAR_PREFETCH`], or none.
    pub flags: u32,
    /// The memory or registers that the borrower's accesses reach.
    pub target: RangeTarget,
}

impl BarMap {
    /// `None` for sizes that no BAR in a window has.
    pub fn new(
        (number, size): (u8, u64),
        (wide, prefetchable): (bool, bool),
        target: impl Into<RangeTarget>,
    ) -> Option<BarMap> {
        if !size.is_power_of_two() || size < PAGE as u64 {
            return None;
        }
        let wide = if wide { BAR_64 } else { 0 };
        let prefetch = if prefetchable { BAR_PREFETCH } else { 0 };
        Some(BarMap { number, size, flags: wide | prefetch, target: target.into() })
    }
}

/// A device that is ready to be lent, and what its borrower sees of it.
pub(crate) struct ReadyDevice {
    pub device: Box<dyn WindowDevice>,
    pub image: Image,
    pub bars: Vec<BarMap>,
}

/// Mappings that a device refused: told in the log as often as that is of use.
#[derive(Debug, Default)]
pub(crate) struct RefusedMappings(Mutex<LogPace>);

impl RefusedMappings {
    /// A mapping is not made for this reason, as its borrower is told.
    pub fn refuse(
        &self,
        device: &str,
        mapping: &IsolatedMapping,
        error: &MetalError,
    ) -> MappingRefusal {
        if let Some(left_out) = locked(&self.0).line(Instant::now()) {
            tracing::warn!(device, ?mapping, %error, left_out, "a mapping is not made");
        }
        match error {
            MetalError::Vfio(VfioError::TooManyMappings) => MappingRefusal::TooMany,
            MetalError::Model { cause, .. } if cause.errno == Errno::NOSPC => {
                MappingRefusal::TooMany
            }
            MetalError::Vfio(VfioError::Unmappable { .. }) => MappingRefusal::Taken,
            MetalError::NotLent(_) => MappingRefusal::NoMemory,
            _ => MappingRefusal::Failed,
        }
    }
}

pub(crate) fn not_lendable(device: impl ToString, reason: impl Into<String>) -> MetalError {
    MetalError::NotLendable { device: device.to_string(), reason: reason.into() }
}

pub(crate) fn event() -> Result<Event, MetalError> {
    Event::new().map_err(|cause| MetalError::System { what: "making an event", cause })
}

/// Where the MSI-X table of a device is that has these BARs, and which of them has it.
pub(crate) fn table_of(
    device: &str,
    image: &Image,
    bars: &[BarMap],
) -> Result<(MsixTable, usize), MetalError> {
    let none = "it has no MSI-X, and other interrupts do not pass an NTB";
    let table = image.msix.ok_or_else(|| not_lendable(device, none))?;
    let end = u64::from(table.offset) + msix::ENTRY_SIZE * u64::from(table.entries);
    let nth = bars.iter().position(|bar| bar.number == table.bar && end <= bar.size);
    Ok((table, nth.ok_or_else(|| not_lendable(device, "its MSI-X table is in no BAR"))?))
}
