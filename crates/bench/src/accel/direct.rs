//! The engines' libraries, called directly on one processor.

use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::cipher::{AES_256, EncryptingKey, EncryptionContext, UnboundCipherKey};
use aws_lc_rs::digest::SHA256;
use aws_lc_rs::iv::FixedLength;
use rackbus_devices::accel::profile::{Content, PATTERNS, sample};
use rackbus_spec::accel::Operation;
use regex_automata::hybrid::dfa::DFA;
use regex_automata::nfa::thompson;
use regex_automata::util::syntax;
use regex_automata::{Input, MatchKind};
use sha3::Digest;

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

/// AES in counter mode, in place, of a copy of the message.
fn ctr() -> Option<Call> {
    let key = EncryptingKey::ctr(UnboundCipherKey::new(&AES_256, &KEY).ok()?).ok()?;
    Some(Box::new(move |input, out| {
        out.clear();
        out.extend_from_slice(input);
        let first = EncryptionContext::Iv128(FixedLength::from([0; 16]));
        let _ = key.less_safe_encrypt(out, first);
    }))
}

/// AES-GCM in place, of a copy of the message.
fn gcm(call: fn(&LessSafeKey, Nonce, &mut Vec<u8>)) -> Option<Call> {
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &KEY).ok()?);
    Some(Box::new(move |input, out| {
        out.clear();
        out.extend_from_slice(input);
        call(&key, Nonce::assume_unique_for_key([0; 12]), out);
    }))
}

fn seal(key: &LessSafeKey, nonce: Nonce, text: &mut Vec<u8>) {
    let tag = key.seal_in_place_separate_tag(nonce, Aad::empty(), text);
    text.extend(tag.iter().flat_map(|tag| tag.as_ref()));
}

fn open(key: &LessSafeKey, nonce: Nonce, sealed: &mut Vec<u8>) {
    let opened = key.open_in_place(nonce, Aad::empty(), sealed);
    let length = opened.map_or(0, |text| text.len());
    sealed.truncate(length);
}

/// All places where one of the patterns, one a line, matches: the number of the pattern and the place behind the match, 8 bytes
/// each. By the library's automaton, byte after byte: its search for matches one after the other takes longer.
fn scan(patterns: &[u8]) -> Option<Call> {
    let patterns: Vec<&str> = std::str::from_utf8(patterns).ok()?.lines().collect();
    let all = DFA::config().match_kind(MatchKind::All);
    let syntax = syntax::Config::new().utf8(false);
    let mut builder = DFA::builder();
    builder.configure(all).syntax(syntax).thompson(thompson::Config::new().utf8(false));
    let dfa = builder.build_many(&patterns).ok()?;
    let mut cache = dfa.create_cache();
    Some(Box::new(move |input, out| {
        out.clear();
        let Ok(mut state) = dfa.start_state_forward(&mut cache, &Input::new("")) else { return };
        for at in 0..=input.len() {
            // A match is seen with the byte behind it, or the end.
            let next = match input.get(at) {
                Some(byte) => dfa.next_state(&mut cache, state, *byte),
                None => dfa.next_eoi_state(&mut cache, state),
            };
            let Ok(next) = next else { return };
            state = next;
            let matches = if state.is_match() { dfa.match_len(&cache, state) } else { 0 };
            for nth in 0..matches {
                let pattern = dfa.match_pattern(&cache, state, nth);
                out.extend((pattern.as_usize() as u64).to_le_bytes());
                out.extend((at as u64).to_le_bytes());
            }
        }
    }))
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
            Operation::Aes256Ctr => ctr().ok_or_else(|| no("AES in counter mode"))?,
            Operation::Aes256GcmSeal => gcm(seal).ok_or_else(|| no("AES-GCM"))?,
            Operation::Aes256GcmOpen => gcm(open).ok_or_else(|| no("AES-GCM"))?,
            Operation::RegexScan => scan(PATTERNS).ok_or_else(|| no("regular expressions"))?,
            Operation::Sha256 => digest(|input| aws_lc_rs::digest::digest(&SHA256, input)),
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

#[cfg(test)]
mod tests {
    use rackbus_devices::accel::profile::{Content, sample};

    use super::*;
    use crate::accel::queue::LoadedQueuePair;

    /// What is compared does the same: the library's output is as long as the queue pair's.
    #[test]
    fn libraries_put_out_as_much_as_queue_pairs() {
        for operation in [Operation::RegexScan, Operation::Aes256GcmOpen, Operation::Sha3_512] {
            let message = sample(operation, 8192, Content::Text);
            let mut direct = Direct::new(operation, 2 * message.len(), 1).unwrap();
            let (call, out) = (&mut direct.call, &mut direct.outputs[0]);
            call(&message, out);
            assert!(!out.is_empty(), "{operation:?}");
            let mut queue = LoadedQueuePair::new(&[operation], &message, 1 << 20, 1).unwrap();
            assert_eq!(queue.output_once().unwrap(), *out, "{operation:?}");
        }
    }
}
