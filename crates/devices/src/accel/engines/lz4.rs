//! The engines for LZ4 frames: a compressor, and a decompressor that keeps its memory from one message to the next.

use std::io::{Read, Write};

use lz4_flex::frame::{BlockSize, FrameDecoder, FrameEncoder, FrameInfo};
use rackbus_spec::accel::OperationStatus;

use super::{EngineStep, OperationRequest, Portion, RunningOperation};
use crate::accel::LARGEST;
use crate::accel::buffer::EngineBuffer;

pub struct Lz4Compressor {
    encoder: FrameEncoder<Vec<u8>>,
    /// The frame is complete.
    ended: bool,
    /// What has come out, and how much of it was taken.
    out: Vec<u8>,
    taken: usize,
    /// It was given input of this frame.
    opened: bool,
    /// There was a frame before.
    used: bool,
}

impl Default for Lz4Compressor {
    fn default() -> Lz4Compressor {
        // The library would take larger blocks for who writes more at once first.
        let info = FrameInfo::new().block_size(BlockSize::Max64KB);
        let encoder = FrameEncoder::with_frame_info(info, Vec::new());
        Lz4Compressor {
            encoder,
            ended: false,
            out: Vec::new(),
            taken: 0,
            opened: false,
            used: false,
        }
    }
}

impl RunningOperation for Lz4Compressor {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let mut read = 0;
        if self.taken == self.out.len() && !self.ended {
            self.out.clear();
            self.taken = 0;
            if self.used && !self.opened && input.is_empty() {
                // The library's encoder leaves out the header of a second frame that is empty.
                *self = Lz4Compressor::default();
            }
            self.opened |= !input.is_empty();
            self.encoder.write_all(input).map_err(|_| OperationStatus::EngineFailed)?;
            read = input.len();
            if last {
                self.encoder.try_finish().map_err(|_| OperationStatus::EngineFailed)?;
                self.ended = true;
            }
            std::mem::swap(&mut self.out, self.encoder.get_mut());
        }
        let count = (self.out.len() - self.taken).min(out.len());
        out[..count].copy_from_slice(&self.out[self.taken..self.taken + count]);
        self.taken += count;
        let finished = self.ended && self.taken == self.out.len();
        Ok(EngineStep { read, written: count, finished })
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.used |= self.ended;
        (self.ended, self.opened, self.taken) = (false, false, 0);
        self.out.clear();
        true
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

/// So many bytes a frame has at most. What does not get smaller is a little longer as a frame than as a message.
const LONGEST_FRAME: usize = 2 * LARGEST as usize;

/// A kept decoder has memory for a frame of so many bytes at most.
const KEPT_FRAME: usize = 256 << 10;

/// How a frame begins whose blocks have up to 64 KiB and no part in each other: the magic number, and of FLG and BD the
/// bits that say so.
const MAGIC: [u8; 4] = [0x04, 0x22, 0x4d, 0x18];
const INDEPENDENT: u8 = 1 << 5;
const BLOCK_SIZE: u8 = 7 << 4;
const BLOCKS_OF_64_KIB: u8 = 4 << 4;

/// A frame as far as it has come, for the library to read.
#[derive(Default)]
struct FrameInput {
    memory: EngineBuffer,
    /// Its bytes are so many at the beginning of the memory, of which so many were read.
    length: usize,
    read: usize,
}

impl FrameInput {
    fn come(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    fn append(&mut self, data: &[u8]) {
        let end = self.length + data.len();
        self.memory.grow(end);
        self.memory[self.length..end].copy_from_slice(data);
        self.length = end;
    }

    /// Whether memory of a decoder that has read it is small, and as the library makes it for any other frame like it.
    fn is_usual(&self) -> bool {
        let [flags, descriptor] = match self.come() {
            [m0, m1, m2, m3, flags, descriptor, ..] if [*m0, *m1, *m2, *m3] == MAGIC => {
                [*flags, *descriptor]
            }
            _ => return false,
        };
        flags & INDEPENDENT != 0
            && descriptor & BLOCK_SIZE == BLOCKS_OF_64_KIB
            && self.memory.len() <= KEPT_FRAME
    }
}

impl Read for FrameInput {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let left = &self.memory[self.read..self.length];
        let count = left.len().min(out.len());
        out[..count].copy_from_slice(&left[..count]);
        self.read += count;
        Ok(count)
    }
}

/// The library reads a frame when all of it is there. A decoder is for frames of the usual form one after the other, of
/// which nothing is left for the next; for any other it is for one, since its memory is as large as the frame's header says,
/// and the library makes it otherwise for each form.
pub struct Lz4Decompressor {
    decoder: FrameDecoder<FrameInput>,
    /// The frame is all there, and is one.
    checked: bool,
}

impl Default for Lz4Decompressor {
    fn default() -> Lz4Decompressor {
        Lz4Decompressor { decoder: FrameDecoder::new(FrameInput::default()), checked: false }
    }
}

impl RunningOperation for Lz4Decompressor {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let frame = self.decoder.get_mut();
        // In a chain it may come from what makes gigabytes of a message.
        if frame.length.saturating_add(input.len()) > LONGEST_FRAME {
            return Err(OperationStatus::CorruptInput);
        }
        frame.append(input);
        if !last {
            return Ok(EngineStep { read: input.len(), ..EngineStep::default() });
        }
        if !self.checked && !is_one_frame(frame.come()) {
            return Err(OperationStatus::CorruptInput);
        }
        self.checked = true;
        loop {
            let before = self.decoder.get_ref().read;
            let written = self.decoder.read(out).map_err(|_| OperationStatus::CorruptInput)?;
            let frame = self.decoder.get_ref();
            // The library puts out nothing for a block that is empty, as it does at the end.
            let finished = written == 0 && frame.read == frame.length;
            if written > 0 || finished {
                return Ok(EngineStep { read: input.len(), written, finished });
            }
            if frame.read == before {
                return Err(OperationStatus::CorruptInput);
            }
        }
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        let usual = self.may_wait();
        let frame = self.decoder.get_mut();
        (frame.length, frame.read, self.checked) = (0, 0, false);
        usual
    }

    fn may_wait(&self) -> bool {
        self.checked && self.decoder.get_ref().is_usual()
    }
}

#[cfg(test)]
mod tests {
    use lz4_flex::frame::BlockMode;

    use super::super::{Operation, Spare};
    use super::*;

    fn frame(message: &[u8], block_size: BlockSize, block_mode: BlockMode) -> Vec<u8> {
        let info = FrameInfo::new().block_size(block_size).block_mode(block_mode);
        let mut encoder = FrameEncoder::with_frame_info(info, Vec::new());
        encoder.write_all(message).unwrap();
        encoder.finish().unwrap()
    }

    fn decode(engine: &mut Lz4Decompressor, frame: &[u8]) -> Result<Vec<u8>, OperationStatus> {
        let (mut all, mut out, mut input) = (Vec::new(), vec![0; 4096], frame);
        loop {
            let step = engine.step(input, true, &mut out)?;
            input = &input[step.read..];
            all.extend_from_slice(&out[..step.written]);
            if step.finished {
                return Ok(all);
            }
        }
    }

    /// A match that begins before its frame does not copy from the message before.
    #[test]
    fn a_frame_cannot_refer_to_the_one_before() {
        for block_mode in [BlockMode::Independent, BlockMode::Linked] {
            let mut engine = Lz4Decompressor::default();
            let secret = frame(&[b's'; 60_000], BlockSize::Max64KB, BlockMode::Independent);
            assert_eq!(decode(&mut engine, &secret), Ok(vec![b's'; 60_000]));
            assert!(engine.renew(&OperationRequest::default()));
            let head = &frame(b"", BlockSize::Max64KB, block_mode)[..7];
            // A literal, four bytes from eight before, and five literals; the end mark.
            let block = [10, 0, 0, 0, 0x10, b'a', 8, 0, 0x50, b'a', b'b', b'c', b'd', b'e'];
            let found = decode(&mut engine, &[head, &block, &[0; 4]].concat());
            assert_eq!(found, Err(OperationStatus::CorruptInput), "{block_mode:?}");
        }
    }

    /// Memory that a frame's header or length asks for is given back with the operation.
    #[test]
    fn a_decoder_waits_for_the_next_frame_with_little_memory_only() {
        // What does not get smaller.
        let noise = |length: u32| {
            let words = (0..length / 4).map(|n| n.wrapping_mul(0x9e37_79b9).rotate_left(n % 31));
            words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        for (length, block_size, block_mode, waits) in [
            (60_000, BlockSize::Max64KB, BlockMode::Independent, 1),
            (60_000, BlockSize::Max64KB, BlockMode::Linked, 0),
            (60_000, BlockSize::Max4MB, BlockMode::Independent, 0),
            (1_000_000, BlockSize::Max64KB, BlockMode::Independent, 0),
        ] {
            let mut engine = Box::new(Lz4Decompressor::default());
            let message = noise(length);
            let back = decode(&mut engine, &frame(&message, block_size, block_mode));
            assert!(back == Ok(message));
            let mut spare = Spare::default();
            spare.put(Operation::Lz4Decompress, engine);
            assert_eq!(spare.waiting(), waits, "{length} bytes, {block_size:?}, {block_mode:?}");
        }
    }
}
