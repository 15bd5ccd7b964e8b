//! Submission queue entries (section 4.2), opcodes (sections 5 and 6) and the command dwords
//! that have fields of their own.

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of a submission queue entry in bytes (section 4.2).
pub const SQE_SIZE: usize = 64;

/// Command Dword 0 (section 4.2).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Cdw0 {
    /// Opcode, bits 7:0: one of [`AdminOpcode`] or of [`IoOpcode`], by the queue.
    pub opcode: u8,
    /// Fused Operation; 00b is a normal command.
    #[bits(2)]
    pub fuse: u8,
    #[bits(4)]
    __: u8,
    /// PRP or SGL for Data Transfer.
    #[bits(2)]
    pub psdt: u8,
    /// Command Identifier, bits 31:16: no two commands of a queue have the same one at a time.
    pub cid: u16,
}

/// CDW0.PSDT: PRPs are used (section 4.2).
pub const PSDT_PRP: u8 = 0b00;
/// CDW0.PSDT: SGLs, with MPTR a contiguous buffer (section 4.2).
pub const PSDT_SGL_MPTR_BUFFER: u8 = 0b01;
/// CDW0.PSDT: SGLs, with MPTR an SGL segment (section 4.2).
pub const PSDT_SGL_MPTR_SGL: u8 = 0b10;

/// A submission queue entry (section 4.2).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Sqe {
    /// Opcode, fuse, PSDT and command identifier.
    pub cdw0: Cdw0,
    /// Namespace Identifier; FFFFFFFFh means all, where a command permits that.
    pub nsid: u32,
    /// Command Dwords 2 and 3.
    pub cdw2: [u32; 2],
    /// Metadata Pointer, for metadata that is apart from the data.
    pub mptr: u64,
    /// Data Pointer: PRP entries 1 and 2, or an SGL descriptor.
    pub dptr: [u64; 2],
    /// Command Dword 10, whose meaning the opcode says.
    pub cdw10: u32,
    /// Command Dword 11, whose meaning the opcode says.
    pub cdw11: u32,
    /// Command Dword 12: the number of blocks of commands that read or write.
    pub cdw12: u32,
    /// Command Dword 13, whose meaning the opcode says.
    pub cdw13: u32,
    /// Command Dword 14, whose meaning the opcode says.
    pub cdw14: u32,
    /// Command Dword 15, whose meaning the opcode says.
    pub cdw15: u32,
}
const _: () = assert!(size_of::<Sqe>() == SQE_SIZE);

impl Sqe {
    /// Starting LBA of a read, write, compare, verify or write zeroes command: dwords 10 and 11
    /// (section 6.9).
    pub const fn slba(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }
}

macro_rules! opcodes {
    ($(#[$outer:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name { $($(#[$doc])* $variant = $value,)* }

        impl $name {
            /// The opcode with this value, if the specification names one that rackbus knows.
            pub const fn from_u8(value: u8) -> Option<Self> {
                match value { $($value => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

opcodes! {
    /// Opcodes of admin commands (section 5, figure "Opcodes for Admin Commands").
    AdminOpcode {
        /// Delete I/O Submission Queue (section 5.6).
        DeleteSq = 0x00,
        /// Create I/O Submission Queue (section 5.4).
        CreateSq = 0x01,
        /// Get Log Page (section 5.14).
        GetLogPage = 0x02,
        /// Delete I/O Completion Queue (section 5.5).
        DeleteCq = 0x04,
        /// Create I/O Completion Queue (section 5.3).
        CreateCq = 0x05,
        /// Identify (section 5.15).
        Identify = 0x06,
        /// Abort (section 5.1).
        Abort = 0x08,
        /// Set Features (section 5.21).
        SetFeatures = 0x09,
        /// Get Features (section 5.13).
        GetFeatures = 0x0a,
        /// Asynchronous Event Request (section 5.2).
        AsyncEventRequest = 0x0c,
        /// Doorbell Buffer Config (section 5.7).
        DoorbellBufferConfig = 0x7c,
    }
}

opcodes! {
    /// Opcodes of the NVM command set (section 6, figure "Opcodes for NVM Commands").
    IoOpcode {
        /// Flush (section 6.8).
        Flush = 0x00,
        /// Write (section 6.15).
        Write = 0x01,
        /// Read (section 6.9).
        Read = 0x02,
        /// Compare (section 6.6).
        Compare = 0x05,
        /// Write Zeroes (section 6.17).
        WriteZeroes = 0x08,
        /// Dataset Management (section 6.7).
        DatasetManagement = 0x09,
        /// Verify (section 6.14).
        Verify = 0x0c,
    }
}

/// Dword 12 of read, write, compare, verify and write zeroes (sections 6.6, 6.9, 6.14, 6.15, 6.17).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct RwCdw12 {
    /// Number of Logical Blocks, 0's based.
    pub nlb: u16,
    #[bits(9)]
    __: u16,
    /// Deallocate (write zeroes only).
    pub deac: bool,
    /// Protection Information Field: what is checked, for formats with protection.
    #[bits(4)]
    pub prinfo: u8,
    /// Force Unit Access: data is durable before the command completes.
    pub fua: bool,
    /// Limited Retry: the controller may give up earlier than it would.
    pub lr: bool,
}

/// Dword 11 of Dataset Management (section 6.7).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct DsmCdw11 {
    /// Integral Dataset for Read.
    pub idr: bool,
    /// Integral Dataset for Write.
    pub idw: bool,
    /// Deallocate: the ranges' contents are no longer needed.
    pub ad: bool,
    #[bits(29)]
    __: u32,
}

/// Dword 10 of the four queue commands (sections 5.3 to 5.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct QueueCdw10 {
    /// Queue Identifier, from 1 on: 0 is the admin queue.
    pub qid: u16,
    /// Queue Size, 0's based (create commands).
    pub qsize: u16,
}

/// Dword 11 of Create I/O Completion Queue (section 5.3).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateCqCdw11 {
    /// Physically Contiguous: PRP1 is the queue's address; otherwise that of a list of pages.
    pub pc: bool,
    /// Interrupts Enabled: completions raise the vector below.
    pub ien: bool,
    #[bits(14)]
    __: u16,
    /// Interrupt Vector: the MSI-X entry or MSI message of the queue.
    pub iv: u16,
}

/// Dword 11 of Create I/O Submission Queue (section 5.4).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CreateSqCdw11 {
    /// Physically Contiguous: PRP1 is the queue's address; otherwise that of a list of pages.
    pub pc: bool,
    /// Queue Priority (weighted round robin only).
    #[bits(2)]
    pub qprio: u8,
    #[bits(13)]
    __: u16,
    /// Completion Queue Identifier: where this queue's commands complete.
    pub cqid: u16,
}

/// Dword 10 of Abort (section 5.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AbortCdw10 {
    /// Submission Queue Identifier: the queue of the command that is to be aborted.
    pub sqid: u16,
    /// Command Identifier of the command that is to be aborted.
    pub cid: u16,
}

/// Dword 10 of Get Features (section 5.13) and Set Features (section 5.21).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FeaturesCdw10 {
    /// Feature Identifier: which setting is read or changed.
    pub fid: u8,
    /// Select (Get Features): 0 current, 1 default, 2 saved, 3 supported capabilities.
    #[bits(3)]
    pub sel: u8,
    #[bits(20)]
    __: u32,
    /// Save (Set Features): the value outlives resets and power cycles.
    pub sv: bool,
}

/// Dword 10 of Get Log Page (section 5.14).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct LogCdw10 {
    /// Log Page Identifier, as in [`log`](super::log).
    pub lid: u8,
    /// Log Specific Field, which each page defines for itself.
    #[bits(4)]
    pub lsp: u8,
    #[bits(3)]
    __: u8,
    /// Retain Asynchronous Event: reading the page does not clear the event that told of it.
    pub rae: bool,
    /// Number of Dwords, lower 16 bits, 0's based.
    pub numdl: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_reads_back_from_its_bytes() {
        let mut sqe = Sqe { nsid: 1, cdw10: 0x5566_7788, cdw11: 0x1122_3344, ..Sqe::default() };
        sqe.cdw0 = Cdw0::new().with_opcode(2).with_psdt(1).with_cid(0xabcd);
        let bytes = sqe.as_bytes();
        assert_eq!(bytes[..8], [2, 0x40, 0xcd, 0xab, 1, 0, 0, 0]);
        assert_eq!(bytes[40..48], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(sqe.slba(), 0x1122_3344_5566_7788);
        assert_eq!(Sqe::read_from_bytes(bytes).unwrap(), sqe);
    }

    #[test]
    fn dword_fields_lie_where_the_specification_puts_them() {
        let rw = RwCdw12::new().with_nlb(7).with_deac(true).with_fua(true).with_lr(true);
        assert_eq!(u32::from(rw), 7 | 1 << 25 | 1 << 30 | 1 << 31);
        assert_eq!(u32::from(CreateSqCdw11::new().with_pc(true).with_cqid(9)), 1 | 9 << 16);
        assert_eq!(u32::from(FeaturesCdw10::new().with_sel(3).with_sv(true)), 3 << 8 | 1 << 31);
        assert_eq!(u32::from(LogCdw10::new().with_rae(true).with_numdl(2)), 1 << 15 | 2 << 16);
        assert_eq!(u32::from(DsmCdw11::new().with_ad(true)), 4);
    }
}
