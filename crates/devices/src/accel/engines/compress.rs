//! Raw deflate and its reverse (RFC 1951).

use flate2::{Compression, FlushCompress, FlushDecompress, Status as State};
use rackbus_spec::accel::OperationStatus;

use super::super::pipeline::BETWEEN;
use super::{EngineStep, OperationRequest, Portion, RunningOperation};

/// So many bytes the library has at a time. As many may wait between two engines, so that each engine comes to have them.
const BLOCK: usize = BETWEEN;

/// What it puts out depends on the message alone. The library's output depends on how much input it has at a time, and on
/// when it is told that the message ends: it has a block at a time, and is told behind the last one.
pub struct Deflate {
    stream: flate2::Compress,
    /// It was told that the message ends.
    ending: bool,
}

impl Default for Deflate {
    fn default() -> Deflate {
        let stream = flate2::Compress::new(Compression::fast(), false);
        Deflate { stream, ending: false }
    }
}

impl RunningOperation for Deflate {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let Deflate { stream, ending } = self;
        let totals = |stream: &flate2::Compress| (stream.total_in(), stream.total_out());
        let before = totals(stream);
        let mut progress = true;
        loop {
            let now = totals(stream);
            let done = step(before, now, false);
            let (rest, out) = (&input[done.read..], &mut out[done.written..]);
            let left_of_block = BLOCK - (now.0 % BLOCK as u64) as usize;
            *ending |= last && rest.is_empty();
            if !progress || out.is_empty() || rest.len() < left_of_block && !last {
                return Ok(done);
            }
            let flush = if *ending { FlushCompress::Finish } else { FlushCompress::None };
            let block = &rest[..rest.len().min(left_of_block)];
            let state = stream.compress(block, out, flush);
            if state.map_err(|_| OperationStatus::EngineFailed)? == State::StreamEnd {
                return Ok(step(before, totals(stream), true));
            }
            progress = totals(stream) != now;
        }
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.ending = false;
        self.stream.reset();
        true
    }
}

pub struct Inflate {
    stream: flate2::Decompress,
    /// The stream has ended.
    over: bool,
}

impl Default for Inflate {
    fn default() -> Inflate {
        Inflate { stream: flate2::Decompress::new(false), over: false }
    }
}

impl RunningOperation for Inflate {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        if self.over {
            let nothing = EngineStep { finished: last, ..EngineStep::default() };
            return if input.is_empty() { Ok(nothing) } else { Err(OperationStatus::CorruptInput) };
        }
        let before = (self.stream.total_in(), self.stream.total_out());
        // With all of its input, and room for all of its output, it keeps no window for later calls.
        let flush = if last { FlushDecompress::Finish } else { FlushDecompress::None };
        let state = self.stream.decompress(input, out, flush);
        self.over = state.map_err(|_| OperationStatus::CorruptInput)? == State::StreamEnd;
        let after = (self.stream.total_in(), self.stream.total_out());
        let done = step(before, after, self.over && last);
        // It ends too early, or something follows behind its end.
        let stuck = last && done.read == input.len() && done.written < out.len();
        if !self.over && stuck || self.over && done.read < input.len() {
            return Err(OperationStatus::CorruptInput);
        }
        Ok(done)
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.over = false;
        self.stream.reset(false);
        true
    }
}

fn step(before: (u64, u64), after: (u64, u64), finished: bool) -> EngineStep {
    let count = |before: u64, after: u64| (after - before) as usize;
    EngineStep { read: count(before.0, after.0), written: count(before.1, after.1), finished }
}
