//! The engines' libraries, called directly on one processor.

use std::time::{Duration, Instant};

use aes::Aes256;
use aes::cipher::{KeyIvInit, StreamCipher};
use rackbus_devices::accel::profile::{Content, sample};
use rackbus_spec::accel::Operation;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sha2::Digest;

use crate::BenchError;

/// Key and first counter block, as the queue pair's.
pub const KEY: [u8; 32] = [7; 32];

type Call = Box<dyn FnMut(&[u8], &mut Vec<u8>)>;

/// An operation of a library, and its outputs, which it writes in turn.
pub struct Direct {
    call: Call,
    outputs: Vec<Vec<u8>>,
}

/// A message of `size` bytes, or what the reverse operation makes of one.
pub fn message(operation: Operation, size: usize) -> Vec<u8> {
    sample(operation, size, Content::Text)
}

/// A function of the whole message.
fn digest<D: AsRef<[u8]> + 'static>(of: fn(&[u8]) -> D) -> Call {
    Box::new(move |input, out| {
        out.clear();
        out.extend_from_slice(of(input).as_ref());
    })
}

impl Direct {
    /// The library's `operation`, with room for so many bytes in each of so many outputs.
    ///
    /// # Errors
    /// When the library cannot be obtained.
    pub fn new(operation: Operation, room: usize, outputs: usize) -> Result<Direct, BenchError> {
        let no = |what: &str| BenchError::Peer(format!("{what} cannot be used"));
        let call: Call = match operation {
            Operation::Copy => Box::new(|input, out| {
                out.clear();
                out.extend_from_slice(input);
            }),
            Operation::Aes256Ctr => Box::new(|input, out| {
                out.resize(input.len(), 0);
                let mut cipher = ctr::Ctr128BE::<Aes256>::new(&KEY.into(), &[0; 16].into());
                let _ = cipher.try_apply_keystream_b2b(input, out);
            }),
            Operation::Aes256GcmSeal => {
                let key = UnboundKey::new(&AES_256_GCM, &KEY).map_err(|_| no("AES-GCM"))?;
                let key = LessSafeKey::new(key);
                Box::new(move |input, out| {
                    out.clear();
                    out.extend_from_slice(input);
                    let nonce = Nonce::assume_unique_for_key([0; 12]);
                    let tag = key.seal_in_place_separate_tag(nonce, Aad::empty(), out);
                    out.extend(tag.iter().flat_map(|tag| tag.as_ref()));
                })
            }
            Operation::Sha256 => digest(|input| sha2::Sha256::digest(input)),
            Operation::Sha3_512 => digest(|input| sha3::Sha3_512::digest(input)),
            Operation::Blake3 => digest(|input| *blake3::hash(input).as_bytes()),
            Operation::Crc32c => digest(|input| crc32c::crc32c(input).to_le_bytes()),
            Operation::Deflate => {
                let mut with = flate2::Compress::new(flate2::Compression::fast(), false);
                Box::new(move |input, out| {
                    with.reset();
                    out.clear();
                    let _ = with.compress_vec(input, out, flate2::FlushCompress::Finish);
                })
            }
            Operation::Inflate => {
                let mut with = flate2::Decompress::new(false);
                Box::new(move |input, out| {
                    with.reset(false);
                    out.clear();
                    let _ = with.decompress_vec(input, out, flate2::FlushDecompress::Finish);
                })
            }
            Operation::ZstdCompress => {
                let mut with = zstd_safe::CCtx::try_create().ok_or_else(|| no("zstd"))?;
                Box::new(move |input, out| {
                    out.resize(room, 0);
                    let _ = with.compress(out.as_mut_slice(), input, 1);
                })
            }
            Operation::ZstdDecompress => {
                let mut with = zstd_safe::DCtx::try_create().ok_or_else(|| no("zstd"))?;
                Box::new(move |input, out| {
                    out.resize(room, 0);
                    let _ = with.decompress(out.as_mut_slice(), input);
                })
            }
            Operation::Lz4Compress => Box::new(|input, out| {
                out.clear();
                let mut frame = lz4_flex::frame::FrameEncoder::new(std::mem::take(out));
                let _ = std::io::Write::write_all(&mut frame, input);
                *out = frame.finish().unwrap_or_default();
            }),
            Operation::Lz4Decompress => Box::new(|input, out| {
                out.clear();
                let mut frame = lz4_flex::frame::FrameDecoder::new(input);
                let _ = std::io::Read::read_to_end(&mut frame, out);
            }),
            _ => return Err(no(operation.name())),
        };
        let outputs = (0..outputs).map(|_| Vec::with_capacity(room)).collect();
        Ok(Direct { call, outputs })
    }

    /// Operations each second on `messages` in turn: as much memory as a queue pair's operations are about, or what is
    /// in the library's caches is not in the queue pair's.
    pub fn rate(&mut self, time: Duration, messages: &[Vec<u8>]) -> f64 {
        let (begun, mut done) = (Instant::now(), 0u64);
        loop {
            // The clock takes as long as the smallest operation.
            for at in 0..32 {
                let out = &mut self.outputs[at % messages.len()];
                (self.call)(std::hint::black_box(&messages[at % messages.len()]), out);
                std::hint::black_box(out);
            }
            done += 32;
            let elapsed = begun.elapsed();
            if elapsed >= time {
                return done as f64 / elapsed.as_secs_f64();
            }
        }
    }
}
