//! Zstandard (RFC 8878): one frame.

use rackbus_spec::accel::OperationStatus;
use zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective};

use super::{EngineStep, OperationRequest, Portion, RunningOperation};

/// Zstandard's compression level: the fastest, since engines are paid by their time.
const LEVEL: i32 = 1;
/// Power of two of the bytes that a frame may look back: what a tenant's frame can make the engine keep.
const WINDOW: u32 = 21;

/// A frame's blocks are so long at most (RFC 8878, section 3.1.1.2.4).
const BLOCK: usize = 128 << 10;

/// What it puts out depends on the message alone, and on whether its length is known. The library does several blocks
/// otherwise where they are than it does one after the other in its own memory, and takes a message that it has whole for
/// one of a known length: it is told that the message ends with the only block of a known one, and else behind all of it.
pub struct ZstdCompressor {
    context: CCtx<'static>,
    /// The message is one block, and its length is known.
    one_block: bool,
    /// It was told that the message ends.
    ending: bool,
}

impl ZstdCompressor {
    pub fn new(request: &OperationRequest<'_>) -> Result<ZstdCompressor, OperationStatus> {
        let mut context = CCtx::try_create().ok_or(OperationStatus::NoRoom)?;
        for parameter in [CParameter::CompressionLevel(LEVEL), CParameter::WindowLog(WINDOW - 2)] {
            context.set_parameter(parameter).map_err(|_| OperationStatus::EngineFailed)?;
        }
        let mut engine = ZstdCompressor { context, one_block: false, ending: false };
        if engine.expect(request) { Ok(engine) } else { Err(OperationStatus::EngineFailed) }
    }

    /// How long the message is, which its frame says then, and for which the library takes smaller tables.
    fn expect(&mut self, request: &OperationRequest<'_>) -> bool {
        self.one_block = request.length.is_some_and(|length| length <= BLOCK);
        let length = request.length.map(|length| length as u64);
        self.context.set_pledged_src_size(length).is_ok()
    }
}

impl RunningOperation for ZstdCompressor {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let (mut source, mut target) = (InBuffer::around(input), OutBuffer::around(out));
        let mut compress = |source: &mut InBuffer<'_>, end| {
            let left = self.context.compress_stream2(&mut target, source, end);
            left.map_err(|_| OperationStatus::EngineFailed)
        };
        self.ending |= last && self.one_block;
        if !self.ending {
            compress(&mut source, ZSTD_EndDirective::ZSTD_e_continue)?;
            self.ending = last && source.pos() == input.len();
        }
        let finished = self.ending && compress(&mut source, ZSTD_EndDirective::ZSTD_e_end)? == 0;
        Ok(EngineStep { read: source.pos(), written: target.pos(), finished })
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, request: &OperationRequest<'_>) -> bool {
        self.ending = false;
        self.context.reset(ResetDirective::SessionOnly).is_ok() && self.expect(request)
    }
}

pub struct ZstdDecompressor {
    context: DCtx<'static>,
    /// The frame has ended.
    over: bool,
}

impl ZstdDecompressor {
    pub fn new() -> Result<ZstdDecompressor, OperationStatus> {
        let mut context = DCtx::try_create().ok_or(OperationStatus::NoRoom)?;
        let window = DParameter::WindowLogMax(WINDOW);
        context.set_parameter(window).map_err(|_| OperationStatus::EngineFailed)?;
        Ok(ZstdDecompressor { context, over: false })
    }
}

impl RunningOperation for ZstdDecompressor {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let room = out.len();
        let (mut source, mut target) = (InBuffer::around(input), OutBuffer::around(out));
        if !self.over {
            let more = self.context.decompress_stream(&mut target, &mut source);
            self.over = more.map_err(|_| OperationStatus::CorruptInput)? == 0;
        }
        let (read, written) = (source.pos(), target.pos());
        if self.over && read < input.len()
            || !self.over && last && read == input.len() && written < room
        {
            return Err(OperationStatus::CorruptInput);
        }
        Ok(EngineStep { read, written, finished: self.over && last })
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.over = false;
        self.context.reset(ResetDirective::SessionOnly).is_ok()
    }
}
