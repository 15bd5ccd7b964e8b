//! The function: a BAR that is memory, and nothing else. It never reaches into its user's memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use rackbus_memory::{AsHandle, Carried, CarriedSession, Handles, InheritedEnd, ticks};
use rackbus_pci::{
    Bar, BarMemory, Bus, Function, FunctionInfo, Health, Mappable, MediumOffer, MediumRefused,
    ModelState, Operations, ResetKind, RestoreError, SaveError, Work,
};
use serde::{Deserialize, Serialize};

use super::CLASS;
use super::accesses::{AccessCounts, AccessKind};
use super::medium::MemoryPort;
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
pub(super) struct Described {
    /// Length of the span, and of the BAR, in bytes.
    size: u64,
    /// Device serial number that the function's PCI capability shows.
    serial: u64,
}

impl Described {
    /// What another node described.
    ///
    /// # Errors
    /// When it is no memory that there can be.
    pub fn read(description: &str) -> Result<Described, FrontError> {
        let described: Described = serde_json::from_str(description)?;
        let size = described.size;
        if !(4096..=1 << 62).contains(&size) || !size.is_power_of_two() {
            return Err(FrontError::Device(std::io::Error::other(SpanError::Unfit(size))));
        }
        Ok(described)
    }
}

/// The function of that memory, whose BAR is `mappable` or asks for each access.
pub(super) fn info(described: &Described, mappable: Option<Mappable>) -> FunctionInfo {
    let bar =
        Bar { index: BAR, size: described.size, is_64bit: true, prefetchable: true, mappable };
    FunctionInfo {
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
        serial: described.serial,
    }
}

/// The function's registers as they are saved; its content stays in its file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemoryState {
    size: u64,
    serial: u64,
    #[serde(default)]
    served: bool,
    /// A front on another machine is served, by an exchange whose files come behind the memory's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    carried: bool,
}

impl MemoryState {
    /// Of memory that nobody elsewhere has.
    pub fn of(described: &Described) -> MemoryState {
        let Described { size, serial } = *described;
        MemoryState { size, serial, served: false, carried: false }
    }

    /// Refuses the state of other memory than that.
    ///
    /// # Errors
    /// [`RestoreError::Different`].
    pub fn is_of(&self, here: &Described) -> Result<(), RestoreError> {
        if (self.size, self.serial) == (here.size, here.serial) {
            return Ok(());
        }
        Err(RestoreError::Different(format!(
            "of memory {:#x} with {} bytes, this is {:#x} with {}",
            self.serial, self.size, here.serial, here.size
        )))
    }
}

/// Memory as a function.
#[derive(Debug)]
pub struct MemoryFunction {
    info: FunctionInfo,
    span: MemorySpan,
    memory: BarMemory,
    health: Health,
    accesses: AccessCounts,
    /// A front elsewhere has the medium.
    served: bool,
    /// What serves it to a front on another machine.
    pub(super) port: Option<MemoryPort>,
    /// What came with a saved state that is to be restored.
    pub(super) inherited: InheritedEnd,
}

impl MemoryFunction {
    /// The function of `span`, whose length is a power of two.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(span: MemorySpan, serial: u64) -> std::io::Result<MemoryFunction> {
        let memory = BarMemory::new(span.descriptor()?);
        let mappable = Mappable { memory: memory.clone(), areas: vec![(0, span.length())] };
        let info = info(&Described { size: span.length(), serial }, Some(mappable));
        Ok(MemoryFunction {
            info,
            span,
            memory,
            health: Health::default(),
            accesses: AccessCounts::default(),
            served: false,
            port: None,
            inherited: InheritedEnd::default(),
        })
    }

    /// The front of the memory that another node described, with what it gave that leads there. The function is
    /// this node's, the bytes are that one's, which takes them away when the lease ends.
    ///
    /// # Errors
    /// [`FrontError`].
    pub fn front(description: &str, mut handles: Handles) -> Result<MemoryFunction, FrontError> {
        let Described { size, serial } = Described::read(description)?;
        let unfit = |error: SpanError| FrontError::Device(std::io::Error::other(error));
        let span = MemorySpan::elsewhere(&mut handles, size).map_err(unfit)?;
        handles.finish()?;
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

    fn operations(&self) -> Operations {
        self.accesses.operations()
    }

    fn bar_read(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &mut [u8]) {
        let begun = ticks::now();
        let done = self.memory.is_there() && self.span.read(offset, data).is_ok();
        if !done {
            data.fill(0xff);
        }
        self.accesses.count(AccessKind::Read, data.len(), done, begun);
    }

    fn bar_write(&mut self, _bus: &Bus<'_>, _bar: u8, offset: u64, data: &[u8]) {
        let begun = ticks::now();
        let done = self.memory.is_there()
            && match self.span.write(offset, data) {
                Ok(()) => true,
                Err(error) => {
                    tracing::error!(%error, "a store into memory was lost");
                    self.health.fail(&format!("a store was lost: {error}"));
                    false
                }
            };
        self.accesses.count(AccessKind::Write, data.len(), done, begun);
    }

    fn reset(&mut self, _bus: &Bus<'_>, kind: ResetKind) {
        if let Some(mut port) = self.port.take() {
            port.end();
            self.served = false;
        }
        // Memory keeps its content when it is reset; it has no other state.
        if kind == ResetKind::Scrub {
            self.served = false;
            self.take_away();
        }
    }

    fn poll(&mut self, bus: &Bus<'_>) -> Work {
        self.port
            .as_mut()
            .map_or(Work::Asleep(None), |port| port.poll(&self.span, &self.health, bus))
    }

    fn park(&mut self, _bus: &Bus<'_>) -> bool {
        self.port.as_mut().is_none_or(MemoryPort::rest)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.as_ref().and_then(MemoryPort::wake_fd)
    }

    fn serve_medium(&mut self, carried: Option<Carried>) -> Result<MediumOffer, MediumRefused> {
        if self.served {
            return Err(MediumRefused::InUse);
        }
        // What could not be taken away from a former user is nobody else's.
        let memory = self.memory.handle().map_err(MediumRefused::Files)?;
        let mut handles = Handles::new();
        match carried {
            None => handles.push(memory.as_handle()).map_err(MediumRefused::Files)?,
            Some(carried) => self.port = Some(MemoryPort::carried(carried)?),
        }
        self.served = true;
        let description = serde_json::to_string(&self.described()).unwrap_or_default();
        Ok(MediumOffer { class: CLASS, description, handles })
    }

    fn front_memory(&self) -> &'static [u8] {
        &[BAR]
    }

    fn carried_by(&mut self, session: CarriedSession) {
        self.inherited.session = Some(session);
    }

    fn quiesce(&mut self, _bus: &Bus<'_>) {}

    fn save(&mut self, _bus: &Bus<'_>) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        // What could not be taken away from a former user is not passed on to who goes on either.
        drop(self.memory.descriptor()?);
        let mut files = self.span.files()?;
        files.extend(self.port.as_mut().map(MemoryPort::save).transpose()?.unwrap_or_default());
        let (served, carried) = (self.served, self.port.is_some());
        let state = MemoryState { served, carried, ..MemoryState::of(&self.described()) };
        Ok((ModelState::new(CLASS, VERSION, &state)?, files))
    }

    fn take_back(&mut self) {
        if let Some(port) = &mut self.port {
            port.take_back();
        }
    }

    /// The content continues with its file, which the function was made with.
    fn restore(&mut self, _bus: &Bus<'_>, state: &ModelState) -> Result<(), RestoreError> {
        let state: MemoryState = state.read(CLASS, VERSION)?;
        state.is_of(&self.described())?;
        let end = std::mem::take(&mut self.inherited);
        if state.carried {
            let port =
                MemoryPort::again(end).map_err(|error| RestoreError::Invalid(error.to_string()));
            self.port = Some(port?);
        }
        self.served = state.served;
        Ok(())
    }
}
