//! Raw deflate and its reverse (RFC 1951).

use flate2::{Compression, FlushCompress, FlushDecompress, Status as State};
use rackbus_spec::accel::OperationStatus;

use super::{EngineStep, OperationRequest, Portion, RunningOperation};

pub struct Deflate(flate2::Compress);

impl Default for Deflate {
    fn default() -> Deflate {
        Deflate(flate2::Compress::new(Compression::fast(), false))
    }
}

impl RunningOperation for Deflate {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let before = (self.0.total_in(), self.0.total_out());
        let flush = if last { FlushCompress::Finish } else { FlushCompress::None };
        let state =
            self.0.compress(input, out, flush).map_err(|_| OperationStatus::EngineFailed)?;
        let after = (self.0.total_in(), self.0.total_out());
        Ok(step(before, after, state == State::StreamEnd))
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.0.reset();
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
