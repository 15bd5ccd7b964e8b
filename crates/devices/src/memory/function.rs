//! The function: a BAR that is memory, and nothing else. It never reaches into its user's memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::Carried;
use rackbus_pci::{
    Bar, BarMemory, Bus, Function, FunctionInfo, Health, Mappable, MediumOffer, MediumRefused,
    ModelState, ResetKind, RestoreError, SaveError, Work,
};
use serde::{Deserialize, Serialize};

use super::CLASS;
use super::span::{MemorySpan, SpanError};
use crate::class::FrontError;

/// The BAR that is the memory. Its number is that of the shared memory of QEMU's `ivshmem-plain`, so
/// that programs which map `resource2` find it.
pub const BAR: u8 = 2;
/// The version of [`MemoryState`]. Since version 2 it says whether a front elsewhere has the medium.
pub const VERSION: u32 = 2;
pub(super) const VENDOR_ID: u16 = crate::nvme::VENDOR_ID;
pub(super) const DEVICE_ID: u16 = 0x726d;
/// Memory controller, RAM (PCI Code and ID Assignment Specification 1.15, section 1.6).
pub(super) const CLASS_CODE: [u8; 3] = [0x05, 0x00, 0x00];

/// What a front needs to know of the memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    /// Length of the span, and of the BAR, in bytes.
    size: u64,
    /// Device serial number that the function's PCI capability shows.
    serial: u64,
}

/// The function's registers as they are saved; its content stays in its file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryState {
    size: u64,
    serial: u64,
    #[serde(default)]
    served: bool,
}

/// Memory as a function.
#[derive(Debug)]
pub struct MemoryFunction {
    info: FunctionInfo,
    span: MemorySpan,
    memory: BarMemory,
    health: Health,
    /// A front elsewhere has the medium.
    served: bool,
}

impl MemoryFunction {
    /// The function of `span`, whose length is a power of two.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(span: MemorySpan, serial: u64) -> std::io::Result<MemoryFunction> {
        let memory = BarMemory::new(span.descriptor()?);
        let mappable = Mappable { memory: memory.clone(), areas: vec![(0, span.length())] };
        let bar = Bar {
            index: BAR,
            size: span.length(),
            is_64bit: true,
            prefetchable: true,
            mappable: Some(mappable),
        };
        let info = FunctionInfo {
            vendor_id: VENDOR_ID,
            device_id: DEVICE_ID,
            subsystem_vendor_id: VENDOR_ID,
            subsystem_id: DEVICE_ID,
            revision: 1,
            class: CLASS_CODE,
            bars: vec![bar],
            // It raises none, but every function has one.
            msix_vectors: 1,
            msi_vectors: 0,
            vendor: Vec::new(),
            serial,
        };
        Ok(MemoryFunction { info, span, memory, health: Health::default(), served: false })
    }

    /// The front of the memory that another node described and whose file it gave. The function is
    /// this node's, the bytes are that one's, which takes them away when the lease ends.
    ///
    /// # Errors
    /// [`FrontError`].
    pub fn front(description: &str, files: Vec<OwnedFd>) -> Result<MemoryFunction, FrontError> {
        let Described { size, serial } = serde_json::from_str(description)?;
        let unfit = |error: SpanError| FrontError::Device(std::io::Error::other(error));
        if !(4096..=1 << 62).contains(&size) || !size.is_power_of_two() {
            return Err(unfit(SpanError::Unfit(size)));
        }
        let count = files.len();
        let [file] = files.try_into().map_err(|_| FrontError::Files(count, 1))?;
        let span = MemorySpan::elsewhere(file, size).map_err(unfit)?;
        MemoryFunction::new(span, serial).map_err(FrontError::Device)
    }

    fn described(&self) -> Described {
        Described { size: self.span.length(), serial: self.info.serial }
    }

    /// What a user had is taken away. Where that fails, nobody gets the memory until it succeeds.
    fn take_away(&mut self) {
        let moved = self.span.take_away().map_err(|error| error.to_string());
        let file = moved.and_then(|()| self.span.descriptor().map_err(|error| error.to_string()));
        match file {
            Ok(file) => {
                self.memory.replace(Some(file));
                self.health.recover();
            }
            Err(error) => {
                tracing::error!(error, "the memory of a former user could not be taken away");
                self.memory.replace(None);
                self.health.fail(&error);
            }
        }
    }
}

impl Function for MemoryFunction {
    fn info(&self) -> &FunctionInfo {
        &self.info
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &mut [u8]) {
        if !self.memory.is_there() || self.span.read(offset, data).is_err() {
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &[u8]) {
        if !self.memory.is_there() {
            return;
        }
        if let Err(error) = self.span.write(offset, data) {
            tracing::error!(%error, "a store into memory was lost");
            self.health.fail(&format!("a store was lost: {error}"));
        }
    }

    fn reset(&mut self, _bus: &Bus<'_>, kind: ResetKind) {
        // Memory keeps its content when it is reset; it has no other state.
        if kind == ResetKind::Scrub {
            self.served = false;
            self.take_away();
        }
    }

    fn poll(&mut self, _bus: &Bus<'_>) -> Work {
        Work::Asleep(None)
    }

    fn park(&mut self, _bus: &Bus<'_>) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        if carried.is_some() {
            return Err(MediumRefused::Unmapped);
        }
        if self.served {
            return Err(MediumRefused::InUse);
        }
        let files = vec![self.memory.descriptor().map_err(MediumRefused::Files)?];
        self.served = true;
        let description = serde_json::to_string(&self.described()).unwrap_or_default();
        Ok(MediumOffer { class: CLASS, description, files })
    }

    fn quiesce(&mut self, _bus: &Bus<'_>) {}

    fn save(&mut self, _bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        // What could not be taken away from a former user is not passed on to who goes on either.
        drop(self.memory.descriptor()?);
        let Described { size, serial } = self.described();
        let state = MemoryState { size, serial, served: self.served };
        let state = ModelState::new(CLASS, VERSION, &state)?;
        Ok((state, self.span.files()?))
    }

    /// The content continues with its file, which the function was made with.
    fn restore(&mut self, _bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        let MemoryState { size, serial, served } = state.read(CLASS, VERSION)?;
        let saved = Described { size, serial };
        let here = self.described();
        if saved == here {
            self.served = served;
            return Ok(());
        }
        Err(RestoreError::Different(format!(
            "of memory {:#x} with {} bytes, this is {:#x} with {}",
            saved.serial, saved.size, here.serial, here.size
        )))
    }
}
