//! Controller registers (section 3.1): offsets in BAR 0 and the layout of each.

use bitfield_struct::bitfield;

/// Offset of CAP, Controller Capabilities, 8 bytes (section 3.1.1).
pub const CAP: u64 = 0x00;
/// Offset of VS, Version (section 3.1.2).
pub const VS: u64 = 0x08;
/// Offset of INTMS, Interrupt Mask Set (section 3.1.3).
pub const INTMS: u64 = 0x0c;
/// Offset of INTMC, Interrupt Mask Clear (section 3.1.4).
pub const INTMC: u64 = 0x10;
/// Offset of CC, Controller Configuration (section 3.1.5).
pub const CC: u64 = 0x14;
/// Offset of CSTS, Controller Status (section 3.1.6).
pub const CSTS: u64 = 0x1c;
/// Offset of NSSR, NVM Subsystem Reset (section 3.1.7).
pub const NSSR: u64 = 0x20;
/// Offset of AQA, Admin Queue Attributes (section 3.1.8).
pub const AQA: u64 = 0x24;
/// Offset of ASQ, Admin Submission Queue Base Address, 8 bytes (section 3.1.9).
pub const ASQ: u64 = 0x28;
/// Offset of ACQ, Admin Completion Queue Base Address, 8 bytes (section 3.1.10).
pub const ACQ: u64 = 0x30;
/// Offset of CMBLOC, Controller Memory Buffer Location (section 3.1.11).
pub const CMBLOC: u64 = 0x38;
/// Offset of CMBSZ, Controller Memory Buffer Size (section 3.1.12).
pub const CMBSZ: u64 = 0x3c;
/// Offset of CMBMSC, Controller Memory Buffer Memory Space Control, 8 bytes (section 3.1.16).
pub const CMBMSC: u64 = 0x50;
/// Offset of CMBSTS, Controller Memory Buffer Status (section 3.1.17).
pub const CMBSTS: u64 = 0x58;
/// Offset of PMRCAP, Persistent Memory Region Capabilities (section 3.1.18).
pub const PMRCAP: u64 = 0xe00;
/// Offset of PMRCTL, Persistent Memory Region Control (section 3.1.19).
pub const PMRCTL: u64 = 0xe04;
/// Offset of PMRSTS, Persistent Memory Region Status (section 3.1.20).
pub const PMRSTS: u64 = 0xe08;
/// Offset of PMREBS, Persistent Memory Region Elasticity Buffer Size (section 3.1.21).
pub const PMREBS: u64 = 0xe0c;
/// Offset of PMRSWTP, Persistent Memory Region Sustained Write Throughput (section 3.1.22).
pub const PMRSWTP: u64 = 0xe10;
/// Offset of PMRMSCL, Persistent Memory Region Memory Space Control, 8 bytes: its lower half, then PMRMSCU (section
/// 3.1.23).
pub const PMRMSC: u64 = 0xe14;
/// Offset of the first doorbell, SQ0TDBL (section 3.1.24).
pub const DOORBELLS: u64 = 0x1000;

/// Offset in BAR 0 of the tail doorbell of submission queue `qid` (section 3.1.24):
/// 1000h + (2y * (4 << CAP.DSTRD)).
pub const fn sq_tail_doorbell(qid: u16, dstrd: u8) -> u64 {
    DOORBELLS + 2 * qid as u64 * (4u64 << dstrd)
}

/// Offset in BAR 0 of the head doorbell of completion queue `qid` (section 3.1.25):
/// 1000h + ((2y + 1) * (4 << CAP.DSTRD)).
pub const fn cq_head_doorbell(qid: u16, dstrd: u8) -> u64 {
    DOORBELLS + (2 * qid as u64 + 1) * (4u64 << dstrd)
}

/// CAP, Controller Capabilities (section 3.1.1).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// Maximum Queue Entries Supported, 0's based.
    pub mqes: u16,
    /// Contiguous Queues Required: a queue may not be a list of pages.
    pub cqr: bool,
    /// Arbitration Mechanism Supported beyond round robin.
    #[bits(2)]
    pub ams: u8,
    #[bits(5)]
    __: u8,
    /// Timeout: worst case time for CSTS.RDY to follow CC.EN, in units of 500 ms.
    pub to: u8,
    /// Doorbell Stride: doorbells are `4 << dstrd` bytes apart.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM Subsystem Reset Supported.
    pub nssrs: bool,
    /// Command Sets Supported; bit 0 is the NVM command set.
    pub css: u8,
    /// Boot Partition Support: the controller has a boot partition.
    pub bps: bool,
    #[bits(2)]
    __: u8,
    /// Memory Page Size Minimum: `4096 << mpsmin` bytes.
    #[bits(4)]
    pub mpsmin: u8,
    /// Memory Page Size Maximum: `4096 << mpsmax` bytes.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent Memory Region Supported.
    pub pmrs: bool,
    /// Controller Memory Buffer Supported.
    pub cmbs: bool,
    #[bits(6)]
    __: u8,
}

/// CC, Controller Configuration (section 3.1.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// Enable: 1 starts the controller, 0 resets it.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// I/O Command Set Selected; 000b is the NVM command set.
    #[bits(3)]
    pub css: u8,
    /// Memory Page Size: `4096 << mps` bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration Mechanism Selected; 000b is round robin.
    #[bits(3)]
    pub ams: u8,
    /// Shutdown Notification: 01b normal, 10b abrupt.
    #[bits(2)]
    pub shn: u8,
    /// I/O Submission Queue Entry Size, a power of two.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O Completion Queue Entry Size, a power of two.
    #[bits(4)]
    pub iocqes: u8,
    __: u8,
}

/// CC.SHN: no notification (section 3.1.5).
pub const SHN_NONE: u8 = 0b00;
/// CC.SHN: normal shutdown (section 3.1.5).
pub const SHN_NORMAL: u8 = 0b01;
/// CC.SHN: abrupt shutdown (section 3.1.5).
pub const SHN_ABRUPT: u8 = 0b10;

/// CSTS, Controller Status (section 3.1.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// Ready: follows CC.EN when the controller has started or was reset.
    pub rdy: bool,
    /// Controller Fatal Status: only a reset goes on from here.
    pub cfs: bool,
    /// Shutdown Status: 00b normal operation, 01b occurring, 10b complete.
    #[bits(2)]
    pub shst: u8,
    /// NVM Subsystem Reset Occurred.
    pub nssro: bool,
    /// Processing Paused: commands wait, as while firmware is activated.
    pub pp: bool,
    #[bits(26)]
    __: u32,
}

/// CSTS.SHST: no shutdown requested (section 3.1.6).
pub const SHST_NORMAL: u8 = 0b00;
/// CSTS.SHST: shutdown processing occurring (section 3.1.6).
pub const SHST_OCCURRING: u8 = 0b01;
/// CSTS.SHST: shutdown processing complete (section 3.1.6).
pub const SHST_COMPLETE: u8 = 0b10;

/// AQA, Admin Queue Attributes (section 3.1.8). Both sizes are 0's based.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Aqa {
    /// Admin Submission Queue Size, 0's based.
    #[bits(12)]
    pub asqs: u16,
    #[bits(4)]
    __: u8,
    /// Admin Completion Queue Size, 0's based.
    #[bits(12)]
    pub acqs: u16,
    #[bits(4)]
    __: u8,
}

/// CMBLOC, Controller Memory Buffer Location (section 3.1.11).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cmbloc {
    /// Base Indicator Register: the BAR that has the buffer.
    #[bits(3)]
    pub bir: u8,
    /// A queue may lie partly in the buffer.
    pub cqmms: bool,
    /// Queues of several pieces may lie in the buffer.
    pub cqpds: bool,
    /// The pieces of a PRP list or SGL may be in the buffer or not, each.
    pub cdpmls: bool,
    /// Pointers of a command may be in the buffer although its queue is not, and the reverse.
    pub cdpcils: bool,
    /// Data may be in the buffer although metadata is not, and the reverse.
    pub cdmmms: bool,
    /// Queues in the buffer are written in aligned dwords.
    pub cqda: bool,
    #[bits(3)]
    __: u8,
    /// Offset of the buffer in its BAR, in the units of [`Cmbsz::szu`].
    #[bits(20)]
    pub ofst: u32,
}

/// CMBSZ, Controller Memory Buffer Size (section 3.1.12).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cmbsz {
    /// Submission queues may lie in the buffer.
    pub sqs: bool,
    /// Completion queues may lie in the buffer.
    pub cqs: bool,
    /// PRP lists and SGL segments may lie in the buffer.
    pub lists: bool,
    /// Data that the controller reads from the host's side may lie in the buffer: NVMe writes.
    pub rds: bool,
    /// Data that the controller writes to the host's side may lie in the buffer: NVMe reads.
    pub wds: bool,
    #[bits(3)]
    __: u8,
    /// Size unit: `4096 << (4 * szu)` bytes, up to 6.
    #[bits(4)]
    pub szu: u8,
    /// Size of the buffer in those units.
    #[bits(20)]
    pub sz: u32,
}

/// CMBMSC, Controller Memory Buffer Memory Space Control (section 3.1.16).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cmbmsc {
    /// Capabilities Registers Enabled: CMBLOC and CMBSZ say what there is.
    pub cre: bool,
    /// Controller Memory Space Enable: addresses from the base on are those of the buffer.
    pub cmse: bool,
    #[bits(10)]
    __: u16,
    /// Controller Base Address: bits 63 to 12 of it.
    #[bits(52)]
    pub cba: u64,
}

/// PMRCAP, Persistent Memory Region Capabilities (section 3.1.18).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Pmrcap {
    #[bits(3)]
    __: u8,
    /// Data that the controller reads may lie in the region: NVMe writes.
    pub rds: bool,
    /// Data that the controller writes may lie in the region: NVMe reads.
    pub wds: bool,
    /// Base Indicator Register: the BAR that is the region.
    #[bits(3)]
    pub bir: u8,
    /// Time units: 00b for 500 ms, 01b for minutes.
    #[bits(2)]
    pub pmrtu: u8,
    /// Write Barrier Mechanisms: [`BARRIER_READ`], [`BARRIER_STATUS`].
    #[bits(4)]
    pub pmrwbm: u8,
    #[bits(2)]
    __: u8,
    /// Timeout: how long PMRSTS.NRDY may take to follow PMRCTL.EN, in the time units.
    pub pmrto: u8,
    /// Controller Memory Space Supported: PMRMSC gives the region addresses for commands.
    pub cmss: bool,
    #[bits(7)]
    __: u8,
}

/// PMRCAP.PMRWBM: a read of any byte of the region makes what was written before durable (section 3.1.18).
pub const BARRIER_READ: u8 = 0b0001;
/// PMRCAP.PMRWBM: a read of PMRSTS makes what was written before durable (section 3.1.18).
pub const BARRIER_STATUS: u8 = 0b0010;

/// PMRSTS, Persistent Memory Region Status (section 3.1.20).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Pmrsts {
    /// Error: not 0 when writes may be incomplete or not durable.
    pub err: u8,
    /// Not Ready: the region cannot be used now.
    pub nrdy: bool,
    /// Health Status: [`REGION_SOUND`], [`REGION_UNRELIABLE`].
    #[bits(3)]
    pub hsts: u8,
    /// Controller Base Address Invalid.
    pub cbai: bool,
    #[bits(19)]
    __: u32,
}

/// PMRSTS.HSTS: the region works (section 3.1.20).
pub const REGION_SOUND: u8 = 0b000;
/// PMRSTS.HSTS: the region may be read and written, and may not keep what is written (section 3.1.20).
pub const REGION_UNRELIABLE: u8 = 0b011;

/// PMRMSC, Persistent Memory Region Memory Space Control: PMRMSCL and PMRMSCU (section 3.1.23).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Pmrmsc {
    __: bool,
    /// Controller Memory Space Enable: addresses from the base on are those of the region.
    pub cmse: bool,
    #[bits(10)]
    __: u16,
    /// Controller Base Address: bits 63 to 12 of it.
    #[bits(52)]
    pub cba: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        let cap = Cap::new().with_mqes(0x3ff).with_cqr(true).with_to(20).with_dstrd(4).with_css(1);
        assert_eq!(u64::from(cap), 0x3ff | 1 << 16 | 20 << 24 | 4 << 32 | 1 << 37);
        assert_eq!(u64::from(Cap::new().with_mpsmin(1).with_mpsmax(4)), 1 << 48 | 4 << 52);
        let cc = Cc::new().with_en(true).with_mps(2).with_shn(1).with_iosqes(6).with_iocqes(4);
        assert_eq!(u32::from(cc), 1 | 2 << 7 | 1 << 14 | 6 << 16 | 4 << 20);
        assert_eq!(u32::from(Csts::new().with_cfs(true).with_shst(2)), 1 << 1 | 2 << 2);
        assert_eq!(u32::from(Aqa::new().with_asqs(31).with_acqs(63)), 31 | 63 << 16);
        let cmbloc = Cmbloc::new().with_bir(2).with_cdpmls(true).with_cqda(true).with_ofst(1);
        assert_eq!(u32::from(cmbloc), 2 | 1 << 5 | 1 << 8 | 1 << 12);
        let cmbsz = Cmbsz::new().with_rds(true).with_wds(true).with_szu(2).with_sz(3);
        assert_eq!(u32::from(cmbsz), 1 << 3 | 1 << 4 | 2 << 8 | 3 << 12);
        let cmbmsc = Cmbmsc::new().with_cre(true).with_cmse(true).with_cba(5);
        assert_eq!(u64::from(cmbmsc), 3 | 5 << 12);
        let pmrcap = Pmrcap::new().with_wds(true).with_bir(4).with_pmrwbm(2).with_pmrto(1);
        assert_eq!(
            u32::from(pmrcap.with_cmss(true)),
            1 << 4 | 4 << 5 | 2 << 10 | 1 << 16 | 1 << 24
        );
        let pmrsts = Pmrsts::new().with_nrdy(true).with_hsts(3).with_cbai(true);
        assert_eq!(u32::from(pmrsts), 1 << 8 | 3 << 9 | 1 << 12);
        assert_eq!(u64::from(Pmrmsc::new().with_cmse(true).with_cba(5)), 2 | 5 << 12);
    }

    #[test]
    fn doorbells_follow_the_stride() {
        assert_eq!(sq_tail_doorbell(0, 0), 0x1000);
        assert_eq!(cq_head_doorbell(0, 0), 0x1004);
        assert_eq!(sq_tail_doorbell(3, 4), 0x1000 + 3 * 128);
        assert_eq!(cq_head_doorbell(3, 4), 0x1000 + 3 * 128 + 64);
    }
}
