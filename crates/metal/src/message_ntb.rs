//! One of two ends of an NTB that is used for messages: memory of this process that the other end stores to, and a way to the
//! other end's.
//!
//! The container has that memory and nothing else, so that is all that the other side reaches of this host. A bridge in software
//! passes by the IOMMU with its window 2, which is for tests.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rackbus_memory::{Access, MappedRegisters, SharedMemory};
use rackbus_vfio::{Container, Facts};

use crate::error::MetalError;
use crate::ntb::Ntb;

/// An end whose memory the other side stores to.
#[derive(Debug)]
pub struct MessageNtb {
    ntb: Ntb,
    memory: SharedMemory,
}

impl MessageNtb {
    /// Opens the NTB with these facts, which is bound to `vfio-pci`, and its end of the link. `bytes` says how much memory the
    /// other side is to reach, by the sizes of its window 1 and of this side's; nothing where they are too small.
    ///
    /// # Errors
    /// When the NTB cannot be used, the memory cannot be pinned, or VFIO refuses.
    pub fn open(
        facts: Facts,
        bytes: impl FnOnce([u64; 2]) -> Option<u64>,
    ) -> Result<MessageNtb, MetalError> {
        let address = facts.address;
        let container = Arc::new(Container::new()?);
        let ntb = Ntb::open(&container, facts)?;
        let windows = ntb.plan().window_sizes();
        let fits = |bytes: &u64| *bytes <= windows[0];
        let reason = "its windows are too small for a link: 512 KiB at least";
        let bytes = bytes(windows).filter(fits).ok_or(MetalError::Windows { address, reason })?;
        let memory = SharedMemory::create("ntb", bytes)?;
        container.map(ntb.plan().inbound.start, &memory, Access::READ | Access::WRITE)?;
        ntb.start()?;
        Ok(MessageNtb { ntb, memory })
    }

    /// Sizes of the other side's window 1 and of this side's.
    pub fn window_sizes(&self) -> [u64; 2] {
        self.ntb.plan().window_sizes()
    }

    /// The memory that the other side stores to.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The other side's memory, as far as this end's window 1 leads there.
    pub fn outbound(&self) -> &MappedRegisters {
        self.ntb.outbound()
    }

    /// Rings the other side's doorbell.
    pub fn ring(&self) {
        self.ntb.ring();
    }

    /// Takes note of the doorbell, which can ring again then; false when it has not rung.
    pub fn answer(&self) -> bool {
        self.ntb.answer()
    }

    /// Whether the link went down, or up, since this was asked last.
    pub fn was_cut(&self) -> bool {
        self.ntb.link_changed()
    }

    /// Whether the NTB still is as it was set up.
    pub fn works(&self) -> bool {
        self.ntb.works()
    }
}

/// Readable when the other side rang.
impl AsFd for MessageNtb {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ntb.as_fd()
    }
}
