//! What an accelerator computes: an engine is one file here, and a line in [`begin`].
//!
//! An engine is fed its input in pieces and puts out what it has, so that it can be interrupted
//! between any two, its results are bounded by the room that they are given, and engines can be
//! chained. What it is fed comes from a tenant: nothing of it makes an engine fail, or take more time
//! than the input and the output justify.

mod aes;
mod aws_lc;
mod checksum;
mod compress;
mod context;
mod copy;
mod hash;
mod lz4;
mod regex;
mod spare;
mod zstd;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use rackbus_memory::DmaSlice;
use rackbus_spec::accel::{Operation, OperationStatus};

pub use aws_lc::Sha256State;
pub use context::{Context, wipe_stack};
pub use spare::Spare;

/// What a step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStep {
    /// Input bytes that are done.
    pub read: usize,
    /// Output bytes that were put out.
    pub written: usize,
    /// Nothing more comes out.
    pub finished: bool,
}

/// How much input an engine is best fed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Portion {
    /// Little: it does byte after byte, and what it is fed and puts out stays in the first cache.
    Small,
    /// As much as there is, within the second cache: its library does a whole message with fewer copies, or many parts of it
    /// at the same time.
    Whole,
    /// All of the message, up to 256 KiB whatever the caches: in parts it takes several times as long.
    Message,
}

/// Bytes of output that each step has room for at least.
pub const LEAST_ROOM: usize = 256;

/// An operation under way.
pub trait RunningOperation: Send {
    /// Does some of `input`, which begins where the last step stopped reading, and puts what comes out at
    /// the beginning of `out`; `last` says that nothing follows behind `input`. A step that did nothing
    /// and was not finished needs more input. Where a byte may take long, a step does few of them.
    ///
    /// # Errors
    /// The status that the operation ends with.
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus>;

    /// Whether it [takes](RunningOperation::take) input from the tenant's memory itself: reading each byte once, for
    /// others change them meanwhile.
    fn takes_memory(&self) -> bool {
        false
    }

    /// Does all of `input`, which begins where the last step or the last part ended. Nothing comes out.
    fn take(&mut self, input: DmaSlice<'_>) {
        let _ = input;
    }

    /// Whether its output is as long as its input at every point, and it [passes](RunningOperation::pass) a message from
    /// the tenant's memory to the tenant's memory itself.
    fn passes_memory(&self) -> bool {
        false
    }

    /// Does all of `input`, which begins where the last part ended, and puts what comes out to `out`, which is as long.
    fn pass(&mut self, input: DmaSlice<'_>, out: DmaSlice<'_>) {
        out.copy_from_slice(input);
    }

    /// How much input it is best fed at once.
    fn portion(&self) -> Portion {
        Portion::Small
    }

    /// Bytes at the beginning of a message that are not part of its text, where it does a
    /// [whole](RunningOperation::whole) one in the place of what comes out: that saves a copy.
    fn in_place(&self) -> Option<usize> {
        None
    }

    /// Does a whole message at once. Its text is the first `length` bytes of `out`, which has [`LEAST_ROOM`] behind
    /// them, and is replaced by what comes out: so many bytes.
    ///
    /// # Errors
    /// The status that the operation ends with.
    fn whole(
        &mut self,
        head: &[u8],
        length: usize,
        out: &mut [u8],
    ) -> Result<usize, OperationStatus> {
        let _ = (head, length, out);
        Err(OperationStatus::EngineFailed)
    }

    /// Does a [whole](RunningOperation::whole) message at once whose text is in one piece of the tenant's memory, and reads
    /// that there: each byte once, for others change them meanwhile. `None` where it wants the text in the place of what
    /// comes out.
    ///
    /// # Errors
    /// The status that the operation ends with.
    fn whole_from(
        &mut self,
        head: &[u8],
        text: DmaSlice<'_>,
        out: &mut [u8],
    ) -> Option<Result<usize, OperationStatus>> {
        let _ = (head, text, out);
        None
    }

    /// After an operation that ended well: makes it as one that was just begun for `request`. False where a new one is
    /// to be taken. What it was fed before must have no part in what it puts out afterwards.
    fn renew(&mut self, request: &OperationRequest<'_>) -> bool {
        let _ = request;
        false
    }

    /// After an operation that ended well: whether it may wait for a next one. One that can only be taken for this one, or
    /// has more memory than most, may not.
    fn may_wait(&self) -> bool {
        true
    }
}

/// What an operation is asked for, beside its input.
#[derive(Debug, Clone, Copy, Default)]
pub struct OperationRequest<'a> {
    /// Nonce or first counter block.
    pub nonce: [u8; 16],
    /// Bytes of the input that are authenticated only.
    pub associated: u32,
    /// The context that the descriptor names.
    pub context: Option<&'a Arc<Context>>,
    /// Bytes of the message that were done before, by an engine whose output is as long as its input.
    pub done: usize,
    /// Bytes of the whole input, where they are known.
    pub length: Option<usize>,
}

/// Begins `operation`, with one of the `spare` engines where it can.
///
/// # Errors
/// The status that it ends with at once.
pub fn begin(
    operation: Operation,
    request: &OperationRequest<'_>,
    spare: &mut Spare,
) -> Result<Box<dyn RunningOperation>, OperationStatus> {
    if request.associated > 0 && !takes_associated(operation) {
        return Err(OperationStatus::InvalidField);
    }
    if let Some(engine) = spare.take(operation, request) {
        return Ok(engine);
    }
    Ok(match operation {
        Operation::CreateContext | Operation::DestroyContext | Operation::Wait => {
            return Err(OperationStatus::InvalidOperation);
        }
        Operation::Copy => Box::new(copy::Copy),
        Operation::Aes256Ctr => Box::new(aes::CounterMode::new(request)?),
        Operation::Aes256GcmSeal => Box::new(aes::Gcm::seal(request)?),
        Operation::Aes256GcmOpen => Box::new(aes::Gcm::open(request)?),
        Operation::Sha256 => Box::new(hash::Sha256::default()),
        Operation::Sha3_512 => Box::new(hash::Hash::<sha3::Sha3_512>::default()),
        Operation::Blake3 => Box::new(hash::Blake3::default()),
        Operation::Deflate => Box::new(compress::Deflate::default()),
        Operation::Inflate => Box::new(compress::Inflate::default()),
        Operation::ZstdCompress => Box::new(zstd::ZstdCompressor::new(request)?),
        Operation::ZstdDecompress => Box::new(zstd::ZstdDecompressor::new()?),
        Operation::Lz4Compress => Box::new(lz4::Lz4Compressor::default()),
        Operation::Lz4Decompress => Box::new(lz4::Lz4Decompressor::default()),
        Operation::RegexScan => Box::new(regex::Scan::new(request)?),
        Operation::Crc32c => Box::new(checksum::Crc32c::default()),
    })
}

/// Whether part of the operation's input may be authenticated only.
pub fn takes_associated(operation: Operation) -> bool {
    matches!(operation, Operation::Aes256GcmSeal | Operation::Aes256GcmOpen)
}

/// Whether the operation uses the descriptor's nonce.
pub fn takes_nonce(operation: Operation) -> bool {
    operation == Operation::Aes256Ctr || takes_associated(operation)
}
