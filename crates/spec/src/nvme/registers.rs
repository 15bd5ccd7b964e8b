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
    /// Contiguous Queues Required.
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
    /// Boot Partition Support.
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
    /// Enable.
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
    /// Ready.
    pub rdy: bool,
    /// Controller Fatal Status.
    pub cfs: bool,
    /// Shutdown Status: 00b normal operation, 01b occurring, 10b complete.
    #[bits(2)]
    pub shst: u8,
    /// NVM Subsystem Reset Occurred.
    pub nssro: bool,
    /// Processing Paused.
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
    }

    #[test]
    fn doorbells_follow_the_stride() {
        assert_eq!(sq_tail_doorbell(0, 0), 0x1000);
        assert_eq!(cq_head_doorbell(0, 0), 0x1004);
        assert_eq!(sq_tail_doorbell(3, 4), 0x1000 + 3 * 128);
        assert_eq!(cq_head_doorbell(3, 4), 0x1000 + 3 * 128 + 64);
    }
}
