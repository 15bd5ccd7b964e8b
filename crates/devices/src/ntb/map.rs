//! Where the registers of a third-generation Intel NTB are.
//!
//! Source: Linux, `drivers/ntb/hw/intel/ntb_hw_gen3.h` and `ntb_hw_intel.h` (facts): the driver is the only public
//! description. Registers that it reads and writes without their meaning anything here keep what is written.

/// PCI vendor and device id (`PCI_DEVICE_ID_INTEL_NTB_B2B_SKX`).
pub const ID: (u16, u16) = (0x8086, 0x201c);

/// Configuration space: log2 of the window sizes, for this side and the other (`GEN3_IMBAR1SZ_OFFSET` and on).
pub const BAR_SIZES: u16 = 0xd0;
/// Configuration space: how the two ends are connected (`XEON_PPD_OFFSET`).
pub const PPD: u16 = 0xd4;
/// [`PPD`]: back to back with another such bridge (`XEON_PPD_CONN_B2B`).
pub const PPD_BACK_TO_BACK: u8 = 0x01;
/// [`PPD`]: the end whose port has number 1 (`XEON_PPD_DEV_DSD`).
pub const PPD_DOWNSTREAM: u8 = 0x10;
/// Configuration space: speed, width and state of the link (`GEN3_LINK_STATUS_OFFSET`).
pub const LINK_STATUS: u16 = 0x1a2;
/// [`LINK_STATUS`]: the link is up (`NTB_LNK_STA_ACTIVE_BIT`).
pub const LINK_ACTIVE: u16 = 1 << 13;
/// [`LINK_STATUS`]: eight lanes of 8 GT/s.
pub const LINK_SHAPE: u16 = 8 << 4 | 3;

/// Bytes of BAR 0.
pub const BAR0_SIZE: u64 = 0x1_0000;
/// The BAR of the registers, and of the MSI-X table.
pub const BAR_REGISTERS: u8 = 0;
/// The BARs of the two windows; each is 64 bits wide.
pub const BAR_WINDOWS: [u8; 2] = [2, 4];

/// Link control, 32 bits (`GEN3_NTBCNTL_OFFSET`).
pub const CONTROL: u64 = 0x0000;
/// [`CONTROL`]: configuration is locked.
pub const CONTROL_LOCK: u32 = 1;
/// [`CONTROL`]: the link is switched off.
pub const CONTROL_DISABLE: u32 = 1 << 1;
/// Base and limit of each window that the peer has onto this side, 16 bytes for a window
/// (`GEN3_IMBAR1XBASE_OFFSET` and on).
pub const INBOUND: u64 = 0x0010;
/// Doorbells that were rung here; writing ones clears (`GEN3_IM_INT_STATUS_OFFSET`).
pub const STATUS: u64 = 0x0040;
/// Doorbells that raise no interrupt (`GEN3_IM_INT_DISABLE_OFFSET`).
pub const DISABLED: u64 = 0x0048;
/// Accesses of the peer's that went nowhere (`GEN3_USMEMMISS_OFFSET`).
pub const MISSES: u64 = 0x0070;
/// This side's scratchpads (`GEN3_IM_SPAD_OFFSET`).
pub const SCRATCHPADS: u64 = 0x0080;
/// The MSI-X vector of each doorbell, a byte each (`GEN3_INTVEC_OFFSET`).
pub const VECTORS: u64 = 0x00d0;
/// The peer's doorbells, a word each (`GEN3_IM_DOORBELL_OFFSET`).
pub const PEER_DOORBELLS: u64 = 0x0100;
/// The peer's scratchpads (`GEN3_B2B_SPAD_OFFSET`).
pub const PEER_SCRATCHPADS: u64 = 0x0180;
/// Translations and limits of the outbound side, kept (`GEN3_EMBAR0XBASE_OFFSET` and on).
pub const OUTBOUND: u64 = 0x4008;
/// The peer's [`STATUS`], to be read (`GEN3_EM_INT_STATUS_OFFSET`).
pub const PEER_STATUS: u64 = 0x4040;
/// The peer's [`DISABLED`], to be read (`GEN3_EM_INT_DISABLE_OFFSET`).
pub const PEER_DISABLED: u64 = 0x4048;
/// The peer's scratchpads once more (`GEN3_EM_SPAD_OFFSET`).
pub const PEER_SCRATCHPADS_EM: u64 = 0x4080;
/// The other side's command register, kept (`GEN3_SPCICMD_OFFSET`).
pub const PEER_COMMAND: u64 = 0x4504;
/// The other side's BARs, kept (`GEN3_EMBAR0_OFFSET` and on).
pub const PEER_BARS: u64 = 0x4510;
/// The MSI-X table, 16 bytes for each vector.
pub const MSIX_TABLE: u64 = 0xc000;
/// The pending bits of MSI-X.
pub const MSIX_PENDING: u64 = 0xe000;

/// Doorbells that software rings.
pub const DOORBELLS: u32 = 32;
/// The doorbell that rings when the link changes (`GEN3_DB_LINK`).
pub const LINK_DOORBELL: u32 = 32;
/// The doorbells of software and that of the link, a bit each.
pub const ALL_DOORBELLS: u64 = (1 << (DOORBELLS + 1)) - 1;
/// MSI-X vectors, one for each doorbell (`GEN3_DB_MSIX_VECTOR_COUNT`).
pub const MSIX_VECTORS: u16 = 33;
/// Scratchpads of a side, 32 bits each (`GEN3_SPAD_COUNT`).
pub const SCRATCHPAD_COUNT: usize = 16;
