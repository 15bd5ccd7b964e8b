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

/// Bits of a frame's FLG byte (LZ4 Frame Format 1.6.3): what follows a block, the descriptor and the end mark.
const BLOCK_CHECKSUMS: u8 = 1 << 4;
const CONTENT_SIZE: u8 = 1 << 3;
const CONTENT_CHECKSUM: u8 = 1 << 2;
const DICTIONARY: u8 = 1;
/// Of a block's size: the block is not compressed.
const STORED: u32 = 1 << 31;

/// Whether `input` is one frame up to its end mark and checksum, and nothing else. The library takes a frame that ends
/// where a block would begin, or within a block's size, for a complete one.
fn is_one_frame(input: &[u8]) -> bool {
    walk_frame(input).is_some_and(|end| end == input.len())
}

/// Where the frame that `input` begins with ends, if all of it is there.
fn walk_frame(input: &[u8]) -> Option<usize> {
    // The magic number, FLG and BD.
    let flags = *input.get(4)?;
    let optional = |flag: u8, bytes: usize| if flags & flag == 0 { 0 } else { bytes };
    // What the flags announce, and the descriptor's checksum.
    let mut at = 6 + optional(CONTENT_SIZE, 8) + optional(DICTIONARY, 4) + 1;
    loop {
        let size = input.get(at..at + 4)?;
        let size = u32::from_le_bytes(size.try_into().ok()?);
        at += 4;
        if size == 0 {
            return Some(at + optional(CONTENT_CHECKSUM, 4));
        }
        at += (size & !STORED) as usize + optional(BLOCK_CHECKSUMS, 4);
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
        if self.decoder.is_none() && !is_one_frame(&self.input) {
            return Err(Status::CorruptInput);
        }
        let all = &mut self.input;
        let decoder =
            self.decoder.get_or_insert_with(|| FrameDecoder::new(Cursor::new(std::mem::take(all))));
        let written = decoder.read(out).map_err(|_| Status::CorruptInput)?;
        Ok(EngineStep { read: input.len(), written, finished: written == 0 })
    }
}
