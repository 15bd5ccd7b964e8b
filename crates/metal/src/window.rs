//! The control area of a lent function, as `kernel/include/rackbus_window.h` defines it: plain memory of the lender,
//! little endian. A test compares what is here with that header.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rackbus_memory::{Access, SharedMemory};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::isolated::{MAPPED_MSI, MappingRequest};

/// What a control area begins with.
pub const MAGIC: u32 = 0x5355_4252;
/// The version of the layout.
pub const VERSION: u32 = 1;
/// Bytes of each of the area's three pages: header, configuration space, ring.
pub const PAGE: usize = 4096;
/// Bytes of the whole area.
pub const AREA: usize = 3 * PAGE;
/// Requests that the ring has room for, a power of two.
pub const RING_ENTRIES: u32 = 128;
/// The heartbeat changes at least this often, in milliseconds.
pub const HEARTBEAT_MS: u64 = 100;
/// Where x86 takes interrupts as writes, 1 MiB.
pub const MSI_ADDRESS: u64 = 0xfee0_0000;
/// How many bytes that takes.
pub const MSI_SIZE: u64 = 1 << 20;
/// The flag of a window onto the borrower's memory that bypasses the borrower's own IOMMU.
pub const DIRECT: u32 = 1;

/// Where the parts are.
pub(crate) const CONFIG: usize = PAGE;
pub(crate) const RING: usize = 2 * PAGE;
const STATE: usize = 0x10;
const HEARTBEAT: usize = 0x14;
/// Inside of the ring's page.
pub(crate) const PRODUCER: usize = 0x00;
pub(crate) const CONSUMER: usize = 0x40;
const REFUSED: usize = 0x44;
pub(crate) const ENTRIES: usize = 0x80;
pub(crate) const MAPPING: usize = 0x900;
/// What came of a request about a mapping, in its description.
pub(crate) const RESULT: usize = 0x1c;

/// Whether the function can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FunctionStatus {
    /// Nothing is lent here.
    None = 0,
    /// All of the area is valid.
    Ready = 1,
    /// It was lent and is not any more.
    Revoked = 2,
}

/// A BAR as the header has it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct WindowBar {
    /// Its offset in window 1.
    pub offset: U64,
    /// Its bytes, a power of two.
    pub size: U64,
    /// What kind of BAR it is: bits as [`BAR_PRESENT`].
    pub flags: U32,
    reserved: U32,
}

/// A BAR of memory is there.
pub const BAR_PRESENT: u32 = 1;
/// It takes the next one's place.
pub const BAR_64: u32 = 2;
/// Reads have no side effects.
pub const BAR_PREFETCH: u32 = 4;

impl WindowBar {
    /// A BAR that is there.
    pub fn new(offset: u64, size: u64, flags: u32) -> WindowBar {
        WindowBar {
            offset: offset.into(),
            size: size.into(),
            flags: (BAR_PRESENT | flags).into(),
            reserved: U32::ZERO,
        }
    }
}

/// The first page's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WindowHeader {
    magic: U32,
    version: U32,
    epoch: U64,
    state: U32,
    heartbeat: U32,
    flags: U32,
    vectors: U32,
    dma_base: U64,
    dma_size: U64,
    msi_base: U64,
    config_offset: U32,
    ring_offset: U32,
    ring_entries: U32,
    doorbell: U32,
    mappings: U32,
    reserved: U32,
    mapped_msi_base: U64,
    more_reserved: [U32; 2],
    bars: [WindowBar; 6],
}

/// A mapping as the borrower describes it in the ring's page.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct WindowMapping {
    iova: U64,
    address: U64,
    size: U64,
    access: U32,
    result: U32,
}

/// What differs from function to function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The epoch of the lease by which the function is lent.
    pub epoch: u64,
    /// MSI-X vectors of the device.
    pub vectors: u32,
    /// Whether the window bypasses the borrower's IOMMU: [`DIRECT`], or 0.
    pub flags: u32,
    /// Where the device reaches the borrower's memory, and how much of it.
    pub dma: (u64, u64),
    /// Where the device reaches the borrower's [`MSI_ADDRESS`].
    pub msi_base: u64,
    /// The doorbell that the borrower rings.
    pub doorbell: u32,
    /// How many mappings are made for the function while it is isolated; 0 where it cannot be.
    pub mappings: u32,
    /// The BARs by number; flags of 0 for those that the function does not have.
    pub bars: [WindowBar; 6],
}

impl Offer {
    fn header(&self) -> WindowHeader {
        WindowHeader {
            magic: MAGIC.into(),
            version: VERSION.into(),
            epoch: self.epoch.into(),
            state: (FunctionStatus::None as u32).into(),
            heartbeat: U32::ZERO,
            flags: self.flags.into(),
            vectors: self.vectors.into(),
            dma_base: self.dma.0.into(),
            dma_size: self.dma.1.into(),
            msi_base: self.msi_base.into(),
            config_offset: (CONFIG as u32).into(),
            ring_offset: (RING as u32).into(),
            ring_entries: RING_ENTRIES.into(),
            doorbell: self.doorbell.into(),
            mappings: self.mappings.into(),
            reserved: U32::ZERO,
            mapped_msi_base: MAPPED_MSI.into(),
            more_reserved: [U32::ZERO; 2],
            bars: self.bars,
        }
    }
}

/// Gives the heartbeat in the first part of a control area another value.
pub(crate) fn beat_in(shown: &SharedMemory, value: u32) {
    shown.whole().store_u32(HEARTBEAT, value.to_le(), Ordering::Release);
}

/// The first part of a control area that another process made, for its heartbeat.
pub(crate) fn adopt_shown(shown: OwnedFd) -> Result<SharedMemory, rackbus_memory::RegionError> {
    SharedMemory::adopt(shown, RING as u64)
}

/// A control area in the lender's memory. The borrower may write any of it at any time: what is read is read once,
/// and only the ring's producer and entries are.
#[derive(Debug)]
pub struct ControlArea {
    /// Header and configuration space, which only the lender writes.
    shown: SharedMemory,
    ring: SharedMemory,
}

impl ControlArea {
    /// An area in which nothing is lent.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new() -> Result<ControlArea, rackbus_memory::RegionError> {
        Ok(ControlArea {
            shown: SharedMemory::create("control", RING as u64)?,
            ring: SharedMemory::create("requests", (AREA - RING) as u64)?,
        })
    }

    /// One that another process made, by the descriptors of its parts: what the borrower is shown stays.
    ///
    /// # Errors
    /// When they are none.
    pub fn adopt([shown, ring]: [OwnedFd; 2]) -> Result<ControlArea, rackbus_memory::RegionError> {
        Ok(ControlArea {
            shown: adopt_shown(shown)?,
            ring: SharedMemory::adopt(ring, (AREA - RING) as u64)?,
        })
    }

    /// The descriptors of its parts, for a process that goes on with it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn descriptors(&self) -> std::io::Result<[OwnedFd; 2]> {
        Ok([self.shown.descriptor()?, self.ring.descriptor()?])
    }

    /// Whether the function of this epoch is shown as ready.
    pub fn is_ready(&self, epoch: u64) -> bool {
        let whole = self.shown.whole();
        let state = whole.load_u32(STATE, Ordering::Acquire).map(u32::from_le);
        let header: Option<WindowHeader> = whole.read_obj(0);
        state == Some(FunctionStatus::Ready as u32)
            && header
                .is_some_and(|header| header.magic.get() == MAGIC && header.epoch.get() == epoch)
    }

    /// The memory that it is, each part with its offset and what the borrower may do there.
    pub fn parts(&self) -> [(u64, &SharedMemory, Access); 2] {
        [(0, &self.shown, Access::READ), (RING as u64, &self.ring, Access::READ | Access::WRITE)]
    }

    /// Shows a function. It is ready on return.
    pub fn publish(&self, offer: &Offer, image: &[u8; PAGE]) {
        self.ring.whole().fill(0);
        let whole = self.shown.whole();
        whole.fill(0);
        whole.write_obj(0, &offer.header());
        if let Some(page) = whole.part(CONFIG, PAGE) {
            page.copy_from(image);
        }
        self.set_state(FunctionStatus::Ready);
    }

    /// Says whether the function can be used; all that was written before is seen by who sees this.
    pub fn set_state(&self, state: FunctionStatus) {
        self.shown.whole().store_u32(STATE, (state as u32).to_le(), Ordering::Release);
    }

    /// Gives the heartbeat another value.
    pub fn beat(&self, value: u32) {
        beat_in(&self.shown, value);
    }

    /// How far the borrower has written its ring.
    pub fn producer(&self) -> u32 {
        let found = self.ring.whole().load_u32(PRODUCER, Ordering::Acquire);
        u32::from_le(found.unwrap_or(0))
    }

    /// The words of an entry of the ring.
    pub fn entry(&self, number: u32) -> [u32; 4] {
        let at = ENTRIES + 16 * (number % RING_ENTRIES) as usize;
        let words: Option<[U32; 4]> = self.ring.whole().read_obj(at);
        words.map_or([0; 4], |words| words.map(U32::get))
    }

    /// The mapping that the borrower describes.
    pub fn mapping(&self) -> MappingRequest {
        let found: Option<WindowMapping> = self.ring.whole().read_obj(MAPPING);
        found.map_or_else(MappingRequest::default, |it| MappingRequest {
            iova: it.iova.get(),
            address: it.address.get(),
            size: it.size.get(),
            access: it.access.get(),
        })
    }

    /// Says what came of a request about a mapping: 0, or an error number. Before it is [consumed](ControlArea::consumed).
    pub fn answer(&self, result: u32) {
        self.ring.whole().store_u32(MAPPING + RESULT, result.to_le(), Ordering::Relaxed);
    }

    /// Says how far the ring was carried out, and how many requests were passed over.
    pub fn consumed(&self, consumer: u32, refused: u32) {
        let whole = self.ring.whole();
        whole.store_u32(REFUSED, refused.to_le(), Ordering::Relaxed);
        whole.store_u32(CONSUMER, consumer.to_le(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    /// The kernel module is compiled from the header; this is compared with it.
    #[test]
    fn the_layout_is_that_of_the_kernel_module() {
        let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/include");
        let dir = tempfile::tempdir().unwrap();
        let (source, program) = (dir.path().join("layout.c"), dir.path().join("layout"));
        let text = r#"
            #include <stdio.h>
            #include "rackbus_window.h"
            #define AT(field) (unsigned long)offsetof(struct rackbus_window_header, field)
            #define IN(field) (unsigned long)offsetof(struct rackbus_window_ring, field)
            #define OF(field) (unsigned long)offsetof(struct rackbus_window_mapping, field)
            int main(void) {
                printf("%lu %lu %lu %lu %lu %lu %lu %lu %lu %lu %lu %lu %lu %lu %lu ",
                    AT(epoch), AT(state), AT(heartbeat), AT(flags), AT(vectors), AT(dma_base), AT(dma_size),
                    AT(msi_base), AT(config_offset), AT(ring_offset), AT(ring_entries), AT(doorbell), AT(bars),
                    (unsigned long)sizeof(struct rackbus_window_header), (unsigned long)sizeof(struct rackbus_window_bar));
                printf("%lu %lu %lu %lu ", IN(producer), IN(consumer), IN(refused), IN(entries));
                printf("%lu %lu %lu %lu %lu %lu %lu %lu ", AT(mappings), AT(mapped_msi_base), IN(mapping),
                    OF(address), OF(size), OF(access), OF(result), (unsigned long)sizeof(struct rackbus_window_mapping));
                printf("%u %u %u %u %u %u %u %u %u %u %u\n", RACKBUS_MAGIC, RACKBUS_VERSION, RACKBUS_PAGE,
                    RACKBUS_HEARTBEAT_MS, RACKBUS_MSI_ADDRESS, RACKBUS_MSI_SIZE, RACKBUS_DIRECT, RACKBUS_BAR_PRESENT, RACKBUS_BAR_64,
                    RACKBUS_BAR_PREFETCH, RACKBUS_MAX_REQUESTS);
                return 0;
            }
        "#;
        std::fs::write(&source, text).unwrap();
        let mut cc = Command::new("cc");
        cc.arg("-I").arg(include).arg(&source).arg("-o").arg(&program);
        assert!(cc.status().expect("a C compiler").success());
        let output = Command::new(&program).output().unwrap();
        let found: Vec<u64> = String::from_utf8(output.stdout)
            .unwrap()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let ours = [
            offset_of!(WindowHeader, epoch),
            STATE,
            HEARTBEAT,
            offset_of!(WindowHeader, flags),
            offset_of!(WindowHeader, vectors),
            offset_of!(WindowHeader, dma_base),
            offset_of!(WindowHeader, dma_size),
            offset_of!(WindowHeader, msi_base),
            offset_of!(WindowHeader, config_offset),
            offset_of!(WindowHeader, ring_offset),
            offset_of!(WindowHeader, ring_entries),
            offset_of!(WindowHeader, doorbell),
            offset_of!(WindowHeader, bars),
            size_of::<WindowHeader>(),
            size_of::<WindowBar>(),
            PRODUCER,
            CONSUMER,
            REFUSED,
            ENTRIES,
            offset_of!(WindowHeader, mappings),
            offset_of!(WindowHeader, mapped_msi_base),
            MAPPING,
            offset_of!(WindowMapping, address),
            offset_of!(WindowMapping, size),
            offset_of!(WindowMapping, access),
            RESULT,
            size_of::<WindowMapping>(),
        ];
        let constants = [
            u64::from(MAGIC),
            VERSION.into(),
            PAGE as u64,
            HEARTBEAT_MS,
            MSI_ADDRESS,
            MSI_SIZE,
            DIRECT.into(),
            BAR_PRESENT.into(),
            BAR_64.into(),
            BAR_PREFETCH.into(),
            RING_ENTRIES.into(),
        ];
        let ours: Vec<u64> = ours.map(|at| at as u64).into_iter().chain(constants).collect();
        assert_eq!(found, ours);
        assert_eq!(offset_of!(WindowMapping, result), RESULT);
        assert_eq!(offset_of!(WindowHeader, state), STATE);
        assert_eq!(offset_of!(WindowHeader, heartbeat), HEARTBEAT);
    }
}
