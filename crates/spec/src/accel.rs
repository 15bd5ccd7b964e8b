//! The accelerator function: registers, rings, descriptors and completions. It is rackbus' own; the
//! book's chapter "The accelerator's interface" describes it for whoever writes a driver.
//!
//! All values are little-endian.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// PCI vendor id: the one that QEMU has for devices of its own.
pub const VENDOR_ID: u16 = 0x1234;
/// PCI device id of the accelerator: the letters `ra`.
pub const DEVICE_ID: u16 = 0x7261;
/// Class code: processing accelerator (PCI Code and ID Assignment Specification 1.15, section 1.19).
pub const CLASS_CODE: [u8; 3] = [0x12, 0x00, 0x00];
/// Bytes of BAR 0.
pub const BAR_SIZE: u64 = 16 << 10;

/// Registers of BAR 0, by offset. They are read and written whole, 4 or 8 bytes as their name says.
pub mod registers {
    /// 4 bytes, read only: [`MAGIC_VALUE`].
    pub const MAGIC: u64 = 0x00;
    /// What [`MAGIC`] reads: `RBAC`.
    pub const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"RBAC");
    /// 4 bytes, read only: version of this interface.
    pub const VERSION: u64 = 0x04;
    /// What software reads at [`VERSION`]: the layout of this file.
    pub const VERSION_VALUE: u32 = 1;
    /// 4 bytes, read only: queue pairs.
    pub const QUEUES: u64 = 0x08;
    /// 4 bytes, read only: entries of a ring at most.
    pub const ENTRIES: u64 = 0x0c;
    /// 4 bytes, read only: contexts at most.
    pub const CONTEXTS: u64 = 0x10;
    /// 4 bytes, read only: bytes of a message at most.
    pub const LARGEST: u64 = 0x14;
    /// 8 bytes, read only: bit N says that operation N is available.
    pub const OPERATIONS: u64 = 0x18;
    /// 4 bytes: 1 runs the function, 0 stops it and forgets queues and contexts.
    pub const CONTROL: u64 = 0x20;
    /// 4 bytes, read only: 1 while it runs.
    pub const STATUS: u64 = 0x24;
    /// 8 bytes: address of the shadow doorbells, page aligned; 0 for none. Written while stopped.
    pub const SHADOW: u64 = 0x28;

    /// Where the queue pairs' registers begin.
    pub const QUEUE: u64 = 0x1000;
    /// Bytes from one queue pair's registers to the next one's.
    pub const QUEUE_STRIDE: u64 = 0x40;
    /// Of a queue pair, 8 bytes: address of the submission ring, 64-byte aligned.
    pub const SUBMISSION: u64 = 0x00;
    /// Of a queue pair, 8 bytes: address of the completion ring, 64-byte aligned.
    pub const COMPLETION: u64 = 0x08;
    /// Of a queue pair, 4 bytes: entries of each ring, a power of two from 2 on.
    pub const RING_ENTRIES: u64 = 0x10;
    /// Of a queue pair, 4 bytes: the MSI-X vector of its completions; all ones for none.
    pub const VECTOR: u64 = 0x14;
    /// Of a queue pair, 4 bytes: 1 makes it, from its other registers; 0 takes it away.
    pub const ENABLE: u64 = 0x18;
    /// Of a queue pair, 4 bytes, read only: [`OFF`](super::queue_state::OFF) and so on.
    pub const STATE: u64 = 0x1c;

    /// Where the doorbells begin.
    pub const DOORBELL: u64 = 0x2000;
    /// Bytes from one queue pair's doorbells to the next one's. The first 4 bytes are the submission
    /// ring's tail, the next 4 the completion ring's head.
    pub const DOORBELL_STRIDE: u64 = 8;
}

/// States of a queue pair.
pub mod queue_state {
    /// It is not there.
    pub const OFF: u32 = 0;
    /// It takes descriptors from its submission ring.
    pub const ON: u32 = 1;
    /// Its registers were refused, or its rings could not be reached, or a doorbell was no index. It does
    /// nothing until it is taken away and made again.
    pub const ERROR: u32 = 2;
}

/// The shadow doorbells: a page of the host's memory.
pub mod shadow {
    /// Bytes of the page.
    pub const SIZE: usize = 4096;
    /// Offset of 4 bytes that the function writes: 0 while it looks at the page, 1 when it only hears
    /// doorbells in the registers.
    pub const ASLEEP: usize = 0;
    /// Where the queue pairs' doorbells begin.
    pub const DOORBELL: usize = 64;
    /// Bytes from one queue pair's doorbells to the next one's, laid out as in the registers.
    pub const STRIDE: usize = 64;
    /// Offset behind a queue pair's doorbells of 4 bytes that the driver writes: 1 while it polls and wants no
    /// interrupts of the queue pair.
    pub const POLLS: usize = 8;
}

/// What an operation does, as descriptors number it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Keeps the input as a context: a key or patterns. The completion's `value` is its handle.
    CreateContext = 1,
    /// Wipes the context that the first stage names.
    DestroyContext = 2,
    /// Copies the input to the output, to move data by DMA.
    Copy = 3,
    /// AES-256 in counter mode, either direction.
    Aes256Ctr = 4,
    /// AES-256-GCM: output is the ciphertext and a tag of 16 bytes.
    Aes256GcmSeal = 5,
    /// AES-256-GCM: input is a ciphertext and its tag.
    Aes256GcmOpen = 6,
    /// SHA-256 of the input: 32 bytes of output.
    Sha256 = 7,
    /// SHA3-512 of the input: 64 bytes of output.
    Sha3_512 = 8,
    /// BLAKE3 of the input: 32 bytes of output.
    Blake3 = 9,
    /// Raw deflate (RFC 1951).
    Deflate = 10,
    /// Unpacks a stream as [`Operation::Deflate`] makes it.
    Inflate = 11,
    /// A Zstandard frame (RFC 8878).
    ZstdCompress = 12,
    /// Unpacks a Zstandard frame.
    ZstdDecompress = 13,
    /// Packs the input into one LZ4 frame.
    Lz4Compress = 14,
    /// Unpacks an LZ4 frame.
    Lz4Decompress = 15,
    /// Looks for the context's patterns: a match is 16 bytes, a pattern's number and the input offset
    /// behind its end, each of 8.
    RegexScan = 16,
    /// CRC-32C (Castagnoli): 4 bytes.
    Crc32c = 17,
    /// Waits until the 4 bytes at `input` are what the descriptor's [`Condition`] says. What is behind it in the
    /// ring is not begun before.
    Wait = 18,
}

/// All operations, in the order of their numbers.
pub const OPERATIONS: [Operation; 18] = [
    Operation::CreateContext,
    Operation::DestroyContext,
    Operation::Copy,
    Operation::Aes256Ctr,
    Operation::Aes256GcmSeal,
    Operation::Aes256GcmOpen,
    Operation::Sha256,
    Operation::Sha3_512,
    Operation::Blake3,
    Operation::Deflate,
    Operation::Inflate,
    Operation::ZstdCompress,
    Operation::ZstdDecompress,
    Operation::Lz4Compress,
    Operation::Lz4Decompress,
    Operation::RegexScan,
    Operation::Crc32c,
    Operation::Wait,
];

impl Operation {
    /// The operation with this number.
    pub fn from_number(number: u8) -> Option<Operation> {
        OPERATIONS.into_iter().find(|operation| *operation as u8 == number)
    }

    /// Its name, for people and service levels.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::CreateContext => "create-context",
            Operation::DestroyContext => "destroy-context",
            Operation::Copy => "copy",
            Operation::Aes256Ctr => "aes256ctr",
            Operation::Aes256GcmSeal => "aes256gcm",
            Operation::Aes256GcmOpen => "aes256gcm-open",
            Operation::Sha256 => "sha256",
            Operation::Sha3_512 => "sha3-512",
            Operation::Blake3 => "blake3",
            Operation::Deflate => "deflate",
            Operation::Inflate => "inflate",
            Operation::ZstdCompress => "zstd",
            Operation::ZstdDecompress => "unzstd",
            Operation::Lz4Compress => "lz4",
            Operation::Lz4Decompress => "unlz4",
            Operation::RegexScan => "regex",
            Operation::Crc32c => "crc32c",
            Operation::Wait => "wait",
        }
    }

    /// The operation with this name.
    pub fn named(name: &str) -> Option<Operation> {
        OPERATIONS.into_iter().find(|operation| operation.name() == name)
    }
}

/// Stages of a pipeline at most.
pub const STAGES: usize = 4;
/// Segments of a scatter-gather list at most.
pub const SEGMENTS: usize = 256;
/// Bytes of a submission ring's entry.
pub const DESCRIPTOR_SIZE: usize = 64;
/// Bytes of a completion ring's entry.
pub const COMPLETION_SIZE: usize = 16;

/// An entry of a submission ring.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Descriptor {
    /// The driver's name for it; the completion has it too.
    pub id: u16,
    /// Segments of the input's scatter-gather list; 0 where `input` is the data itself.
    pub input_segments: u16,
    /// The same of the output.
    pub output_segments: u16,
    /// Fills up to the next field; software writes 0.
    pub reserved: u16,
    /// Operations of the pipeline, in order; 0 ends it before its fourth.
    pub stages: [u8; STAGES],
    /// Bytes at the beginning of the input that AES-GCM authenticates and does not encrypt; they are not
    /// in the output.
    pub associated: u32,
    /// Address of the input, or of its list.
    pub input: u64,
    /// Address of the output, or of its list.
    pub output: u64,
    /// Bytes of the input.
    pub input_length: u32,
    /// Bytes that the output has room for.
    pub output_length: u32,
    /// The context of each stage; 0 for none.
    pub contexts: [u16; STAGES],
    /// Nonce of AES-GCM (the first 12 bytes), or first counter block of AES-CTR.
    pub nonce: [u8; 16],
}

/// What [`Operation::Wait`] waits for, in the place of the nonce. `associated` has the limit, in milliseconds.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Condition {
    /// The bits of the word that say that it is there.
    pub mask: u32,
    /// What they are then.
    pub value: u32,
    /// The bits of it that say that all is well.
    pub good_mask: u32,
    /// What they are then.
    pub good_value: u32,
}

/// Milliseconds that an operation waits at most.
pub const LONGEST_WAIT: u32 = 60_000;

/// An entry of a scatter-gather list.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SglEntry {
    /// Address of its first byte.
    pub address: u64,
    /// Bytes of the segment, from `address` on.
    pub length: u32,
    /// Fills up to 16 bytes; software writes 0.
    pub reserved: u32,
}

/// An entry of a completion ring.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Completion {
    /// How many bytes of output were written.
    pub output: u32,
    /// The handle of a context that was created; else the engine time in nanoseconds that is charged, all ones where it is
    /// more, 0 where none is. It is the time of the threads that did the operation, or, of a short one, what passed since the
    /// function took it up.
    pub value: u32,
    /// Where the function goes on reading in the submission ring.
    pub head: u16,
    /// The `id` of the descriptor that has ended.
    pub id: u16,
    /// The [`OperationStatus`], shifted left by one, and the phase tag in bit 0: 1 in the first round, then 0, and
    /// so on. Written after everything else.
    pub status: u16,
    /// Fills up to the next field; the device writes 0.
    pub reserved: u16,
}

/// How a descriptor ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum OperationStatus {
    /// The operation was done as asked.
    Success = 0,
    /// There is no such operation, or it cannot be at that place of a pipeline.
    InvalidOperation = 1,
    /// A field is beyond its bounds.
    InvalidField = 2,
    /// There is no such context, or it is of another kind.
    InvalidContext = 3,
    /// Memory that it names cannot be reached.
    Transfer = 4,
    /// The output has too little room.
    OutputTooSmall = 5,
    /// The input is not what the operation reverses.
    CorruptInput = 6,
    /// The tag is not that of the input. The output is zeroes.
    NotAuthentic = 7,
    /// The engine failed, through no fault of the descriptor.
    EngineFailed = 8,
    /// All contexts are taken, or patterns need more memory than a context may have.
    NoRoom = 9,
    /// What it waited for came, and is not well; or the one before it waited for that.
    ConditionFailed = 10,
    /// What it waited for did not come in time; or the one before it waited for that.
    TimedOut = 11,
    /// The device's engines cannot be reached any more. Whether it was done is not known.
    Unreachable = 12,
}

/// All statuses, in the order of their numbers.
pub const STATUSES: [OperationStatus; 13] = [
    OperationStatus::Success,
    OperationStatus::InvalidOperation,
    OperationStatus::InvalidField,
    OperationStatus::InvalidContext,
    OperationStatus::Transfer,
    OperationStatus::OutputTooSmall,
    OperationStatus::CorruptInput,
    OperationStatus::NotAuthentic,
    OperationStatus::EngineFailed,
    OperationStatus::NoRoom,
    OperationStatus::ConditionFailed,
    OperationStatus::TimedOut,
    OperationStatus::Unreachable,
];

impl OperationStatus {
    /// The status with this number.
    pub fn from_number(number: u16) -> Option<OperationStatus> {
        STATUSES.into_iter().find(|status| *status as u16 == number)
    }
}

impl std::fmt::Display for OperationStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            OperationStatus::Success => "success",
            OperationStatus::InvalidOperation => {
                "no such operation, or not at this place of a pipeline"
            }
            OperationStatus::InvalidField => "a field is beyond its bounds",
            OperationStatus::InvalidContext => "no such context, or one of another kind",
            OperationStatus::Transfer => "memory that cannot be reached",
            OperationStatus::OutputTooSmall => "the output has too little room",
            OperationStatus::CorruptInput => "the input is damaged",
            OperationStatus::NotAuthentic => "the tag is not that of the input",
            OperationStatus::EngineFailed => "the engine failed",
            OperationStatus::NoRoom => "no room for another context, or for one so large",
            OperationStatus::ConditionFailed => "what it waited for is not well",
            OperationStatus::TimedOut => "what it waited for did not come in time",
            OperationStatus::Unreachable => "the device's engines cannot be reached any more",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_their_sizes_and_numbers_their_names() {
        assert_eq!(size_of::<Descriptor>(), DESCRIPTOR_SIZE);
        assert_eq!(size_of::<Completion>(), COMPLETION_SIZE);
        assert_eq!((size_of::<SglEntry>(), size_of::<Condition>()), (16, 16));
        for (number, operation) in (1..).zip(OPERATIONS) {
            assert_eq!(operation as u8, number);
            assert_eq!(Operation::named(operation.name()), Some(operation));
        }
        for (number, status) in (0..).zip(STATUSES) {
            assert_eq!(OperationStatus::from_number(number), Some(status));
        }
        assert_eq!((Operation::from_number(0), OperationStatus::from_number(13)), (None, None));
    }
}
