//! The persistent memory region (NVM Express base 1.4, section 4.8): memory of the drive behind a BAR of its own, whose
//! bytes outlive the drive's process and, once its driver has asked for that, a loss of power.
//!
//! The bytes are in a file on the lender's disk, which is mapped by whoever uses the region: drivers, other functions and
//! the controller itself. So what was stored is in the page cache, which the end of a process does not touch. What makes it
//! durable is a read of PMRSTS (`PMRCAP.PMRWBM`): it is answered when all that was stored before is on the disk, and says in
//! `PMRSTS.ERR` if that failed. A failure stays until the region goes to somebody else, as with a drive's blocks: the
//! system reports data that it could not write once, and forgets it.
//!
//! As the drive's blocks are, the content is kept when the drive goes to somebody else. It is then in another file of the same
//! name, so that a former user reaches nothing of the next one's (`memory::span`).
//!
//! The region holds data, neither queues nor lists.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rackbus_memory::{Access, DmaSlice, Handles, Region, ResourceHandle};
use rackbus_pci::{Bar, BarMemory, Mappable};
use rackbus_spec::nvme::registers::{
    BARRIER_STATUS, PMRSTS, Pmrcap, Pmrmsc, Pmrsts, REGION_SOUND, REGION_UNRELIABLE,
};

use super::buffer::{ControllerMemoryWindow, out_of_descriptors};
use super::config::NvmeError;
use crate::memory::{MemorySpan, SpanError};

/// The BAR that is the region.
pub const BAR: u8 = 4;

/// Where a region's bytes are kept.
pub trait PmrStore: Send + Debug {
    /// Length of the region in bytes.
    fn length(&self) -> u64;

    /// The file that has them now.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn descriptor(&self) -> io::Result<OwnedFd>;

    /// What another process needs to continue.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    fn files(&self) -> io::Result<Vec<OwnedFd>>;

    /// What was stored so far survives a loss of power when this returns.
    ///
    /// # Errors
    /// When it may not.
    fn make_durable(&self) -> io::Result<()>;

    /// Puts the content, durable, where nobody has it mapped.
    ///
    /// # Errors
    /// When the system cannot.
    fn take_away(&mut self) -> Result<(), SpanError>;
}

impl PmrStore for MemorySpan {
    fn length(&self) -> u64 {
        self.length()
    }

    fn descriptor(&self) -> io::Result<OwnedFd> {
        self.descriptor()
    }

    fn files(&self) -> io::Result<Vec<OwnedFd>> {
        self.files()
    }

    fn make_durable(&self) -> io::Result<()> {
        self.make_durable()
    }

    fn take_away(&mut self) -> Result<(), SpanError> {
        self.take_away()
    }
}

/// What the PMR registers show of a region (PMRCAP, PMRSTS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmrStatus {
    /// Length of the region in bytes.
    pub size: u64,
    /// What was stored may not be durable.
    pub failed: bool,
}

/// What the driver wrote to the region's control registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PmrControl {
    /// Whether the region is enabled (PMRCTL.EN).
    pub enabled: bool,
    /// The addresses at which commands find the region (PMRMSC).
    pub space: Pmrmsc,
}

/// A drive's persistent memory region.
#[derive(Debug)]
pub struct PersistentRegion {
    store: Box<dyn PmrStore>,
    memory: Arc<Region>,
    bar: BarMemory,
    /// A user of an earlier life of the drive may have what there is mapped.
    inherited: bool,
    failed: bool,
}

impl PersistentRegion {
    /// The region of `size` bytes in the file at `path`, which is made if it is missing.
    ///
    /// # Errors
    /// When the file cannot be used, or its disk has no room.
    pub fn open(path: &Path, size: u64) -> Result<PersistentRegion, NvmeError> {
        PersistentRegion::around(Box::new(MemorySpan::reserved(path, size)?))
    }

    /// The region that an earlier life of the drive had, whose [`files`](PersistentRegion::files) these are.
    ///
    /// # Errors
    /// When they are not that.
    pub fn again(
        path: &Path,
        size: u64,
        files: Vec<OwnedFd>,
    ) -> Result<PersistentRegion, NvmeError> {
        let store = Box::new(MemorySpan::reserved_again(path, size, files)?);
        Ok(PersistentRegion { inherited: true, ..PersistentRegion::around(store)? })
    }

    /// The region of a drive of another node, which gave what leads to it as the next of `handles`, and takes it away
    /// itself.
    ///
    /// # Errors
    /// When it is not that.
    pub fn elsewhere(handles: &mut Handles, size: u64) -> Result<PersistentRegion, NvmeError> {
        PersistentRegion::around(Box::new(MemorySpan::elsewhere(handles, size)?))
    }

    /// The region that `store` keeps.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub(super) fn around(store: Box<dyn PmrStore>) -> Result<PersistentRegion, NvmeError> {
        let (file, memory) = map(&*store)?;
        let bar = BarMemory::new(file);
        Ok(PersistentRegion { store, memory, bar, inherited: false, failed: false })
    }

    /// The BAR that the host maps it by.
    pub fn bar(&self) -> Bar {
        let size = self.store.length();
        let mappable = Some(Mappable { memory: self.bar.clone(), areas: vec![(0, size)] });
        Bar { index: BAR, size, is_64bit: true, prefetchable: true, mappable }
    }

    /// What registers show of it.
    pub fn shown(&self) -> PmrStatus {
        PmrStatus { size: self.store.length(), failed: self.has_failed() }
    }

    /// Whether what was stored may not be durable, whatever is done.
    pub fn has_failed(&self) -> bool {
        // Where the file could not be read or written, memory of nobody's took its place.
        self.failed || self.memory.truncated() || !self.bar.is_there()
    }

    /// An earlier life of the drive could not make it durable.
    pub fn inherit_failure(&mut self) {
        self.failed = true;
    }

    /// What leads a front elsewhere to it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn handle(&self) -> io::Result<ResourceHandle> {
        self.bar.handle()
    }

    /// What whoever goes on with the drive needs of it.
    ///
    /// # Errors
    /// When the process has no descriptors left, or what a former user had could not be taken away.
    pub fn files(&self) -> io::Result<Vec<OwnedFd>> {
        match self.bar.is_there() {
            true => self.store.files(),
            false => Err(io::Error::other("the region of a former user could not be taken away")),
        }
    }

    /// A driver reads by a message what it could load.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(part) = self.part(offset, data.len()) {
            part.copy_to(data);
        }
    }

    /// A driver writes by a message what it could store.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Some(part) = self.part(offset, data.len()) {
            part.copy_from(data);
        }
    }

    fn part(&self, offset: u64, length: usize) -> Option<DmaSlice<'_>> {
        let memory = self.bar.is_there().then_some(&self.memory)?;
        memory.slice(usize::try_from(offset).ok()?, length)
    }

    /// Makes durable what was stored so far. True when it fails, for the first time: from then on the region
    /// [has](PersistentRegion::has_failed), and nothing is attempted.
    #[must_use]
    pub fn fails_to_be_durable(&mut self) -> bool {
        if self.failed || !self.bar.is_there() {
            return false;
        }
        if let Err(error) = self.store.make_durable() {
            tracing::error!(%error, "what was stored in a persistent memory region may be lost");
            self.failed = true;
        }
        self.failed |= self.memory.truncated();
        self.failed
    }

    /// Takes it away from its user: the content stays, and who still maps the old file finds nothing there. What nobody was
    /// given stays where it is.
    ///
    /// # Errors
    /// When the system cannot. Nobody can map or use the region until it succeeds.
    pub fn renew(&mut self) -> Result<(), NvmeError> {
        if !self.inherited && !self.bar.is_given() && !self.has_failed() {
            return Ok(());
        }
        self.bar.replace(None);
        self.store.take_away()?;
        let (file, memory) = map(&*self.store)?;
        self.memory = memory;
        self.bar.replace(Some(file));
        (self.inherited, self.failed) = (false, false);
        Ok(())
    }

    /// The addresses that the driver gave it, if it has.
    pub fn window(&self, control: PmrControl) -> Option<ControllerMemoryWindow> {
        let base = control.base(self.store.length()).filter(|_| self.bar.is_there())?;
        Some(ControllerMemoryWindow::new(base, self.memory.clone()))
    }
}

fn map(store: &dyn PmrStore) -> Result<(OwnedFd, Arc<Region>), NvmeError> {
    let file = store.descriptor().map_err(out_of_descriptors)?;
    let both = Access::READ | Access::WRITE;
    let memory = Region::map_stored(file.as_fd(), 0, store.length(), both)?;
    Ok((file, Arc::new(memory)))
}

impl PmrControl {
    /// Where a region of `size` bytes is for commands; `None` while it is not enabled, and for a base from which it would
    /// go past the last address (`PMRSTS.CBAI`).
    fn base(self, size: u64) -> Option<u64> {
        let base = self.space.cba() << 12;
        let enabled = self.enabled && self.space.cmse();
        (enabled && base.checked_add(size - 1).is_some()).then_some(base)
    }

    /// PMRSTS of a region.
    pub fn status(self, region: PmrStatus) -> Pmrsts {
        let placed = self.enabled && self.space.cmse();
        let health = if region.failed { REGION_UNRELIABLE } else { REGION_SOUND };
        Pmrsts::new()
            .with_err(region.failed.into())
            .with_nrdy(!self.enabled)
            .with_hsts(health)
            .with_cbai(placed && self.base(region.size).is_none())
    }
}

/// What PMRCAP says of every region: it takes data in both directions, and a read of PMRSTS makes it durable.
pub fn capabilities() -> Pmrcap {
    let takes = Pmrcap::new().with_rds(true).with_wds(true).with_cmss(true);
    takes.with_bir(BAR).with_pmrwbm(BARRIER_STATUS).with_pmrto(1)
}

/// Whether a read of registers is one of PMRSTS.
pub fn is_barrier(offset: u64, length: usize) -> bool {
    offset < PMRSTS + 4 && offset.saturating_add(length as u64) > PMRSTS
}
