//! LZ4 frames.

use std::io::{Cursor, Read, Write};

use lz4_flex::frame::{FrameDecoder, FrameEncoder};
use rackbus_spec::accel::Status;

use super::{EngineStep, RunningOperation};

pub struct Compress {
    encoder: Option<FrameEncoder<Vec<u8>>>,
    /// What has come out, and how much of it was taken.
    out: Vec<u8>,
    taken: usize,
}

impl Default for Compress {
    fn default() -> Compress {
        Compress { encoder: Some(FrameEncoder::new(Vec::new())), out: Vec::new(), taken: 0 }
    }
}

impl RunningOperation for Compress {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        let mut read = 0;
        if self.taken == self.out.len() {
            self.out.clear();
            self.taken = 0;
            if let Some(encoder) = &mut self.encoder {
                encoder.write_all(input).map_err(|_| Status::EngineFailed)?;
                read = input.len();
                std::mem::swap(&mut self.out, encoder.get_mut());
            }
            if last && let Some(encoder) = self.encoder.take() {
                let rest = encoder.finish().map_err(|_| Status::EngineFailed)?;
                self.out.extend(rest);
            }
        }
        let count = (self.out.len() - self.taken).min(out.len());
        out[..count].copy_from_slice(&self.out[self.taken..self.taken + count]);
        self.taken += count;
        let finished = self.encoder.is_none() && self.taken == self.out.len();
        Ok(EngineStep { read, written: count, finished })
    }
}

/// The library reads a frame when all of it is there.
#[derive(Default)]
pub struct Decompress {
    input: Vec<u8>,
    decoder: Option<FrameDecoder<Cursor<Vec<u8>>>>,
}

impl RunningOperation for Decompress {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        self.input.extend_from_slice(input);
        if !last {
            return Ok(EngineStep { read: input.len(), ..EngineStep::default() });
        }
        let all = &mut self.input;
        let decoder =
            self.decoder.get_or_insert_with(|| FrameDecoder::new(Cursor::new(std::mem::take(all))));
        let written = decoder.read(out).map_err(|_| Status::CorruptInput)?;
        let whole = decoder.get_ref().position() == decoder.get_ref().get_ref().len() as u64;
        if written == 0 && (!whole || decoder.get_ref().get_ref().is_empty()) {
            return Err(Status::CorruptInput);
        }
        Ok(EngineStep { read: input.len(), written, finished: written == 0 })
    }
}
