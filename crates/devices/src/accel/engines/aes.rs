//! AES-256 in counter mode, and GCM (NIST SP 800-38D) made of that and GHASH, so that a message can be
//! done in pieces.

use aes::Aes256Enc;
use aes::cipher::{BlockCipherEncrypt, InnerIvInit, StreamCipher, StreamCipherSeek};
use ctr::{Ctr32BE, Ctr128BE};
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use rackbus_spec::accel::Status;
use subtle::ConstantTimeEq;

use super::{Context, EngineStep, OperationRequest, RunningOperation};

const BLOCK: usize = 16;

fn key<'a>(request: &OperationRequest<'a>) -> Result<&'a Aes256Enc, Status> {
    match request.context {
        Some(Context::Key(key)) => Ok(key),
        _ => Err(Status::InvalidContext),
    }
}

/// Counter mode with a 128-bit big-endian counter (NIST SP 800-38A).
pub struct CounterMode(Ctr128BE<Aes256Enc>);

impl CounterMode {
    pub fn new(request: &OperationRequest<'_>) -> Result<CounterMode, Status> {
        let cipher = ctr::CtrCore::inner_iv_init(key(request)?.clone(), &request.nonce.into());
        let mut cipher = Ctr128BE::from_core(cipher);
        cipher.try_seek(request.done as u64).map_err(|_| Status::InvalidField)?;
        Ok(CounterMode(cipher))
    }
}

impl RunningOperation for CounterMode {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        let count = input.len().min(out.len());
        let done = self.0.try_apply_keystream_b2b(&input[..count], &mut out[..count]);
        done.map_err(|_| Status::InvalidField)?;
        Ok(EngineStep { read: count, written: count, finished: last && count == input.len() })
    }
}

/// GCM in one direction.
pub struct Gcm {
    cipher: Ctr32BE<Aes256Enc>,
    hash: GHash,
    /// What the hash is added to: the encrypted first counter block.
    mask: [u8; BLOCK],
    seal: bool,
    /// Bytes that are still to be authenticated only.
    associated_left: usize,
    associated: u64,
    text: u64,
}

impl Gcm {
    pub fn seal(request: &OperationRequest<'_>) -> Result<Gcm, Status> {
        Gcm::new(request, true)
    }

    pub fn open(request: &OperationRequest<'_>) -> Result<Gcm, Status> {
        Gcm::new(request, false)
    }

    fn new(request: &OperationRequest<'_>, seal: bool) -> Result<Gcm, Status> {
        let key = key(request)?;
        let encrypted = |block: [u8; BLOCK]| {
            let mut block = block.into();
            key.encrypt_block(&mut block);
            <[u8; BLOCK]>::from(block)
        };
        let counter = |number: u8| {
            let mut block = request.nonce;
            block[12..].copy_from_slice(&[0, 0, 0, number]);
            block
        };
        let cipher = ctr::CtrCore::inner_iv_init(key.clone(), &counter(2).into());
        Ok(Gcm {
            cipher: Ctr32BE::from_core(cipher),
            hash: GHash::new(&encrypted([0; BLOCK]).into()),
            mask: encrypted(counter(1)),
            seal,
            associated_left: request.associated as usize,
            associated: request.associated.into(),
            text: 0,
        })
    }

    fn tag(&self) -> [u8; BLOCK] {
        let mut hash = self.hash.clone();
        let mut lengths = [0; BLOCK];
        lengths[..8].copy_from_slice(&(self.associated * 8).to_be_bytes());
        lengths[8..].copy_from_slice(&(self.text * 8).to_be_bytes());
        hash.update(&[lengths.into()]);
        let mut tag: [u8; BLOCK] = hash.finalize().into();
        tag.iter_mut().zip(self.mask).for_each(|(byte, mask)| *byte ^= mask);
        tag
    }

    /// Takes what is authenticated only: whole blocks, and the rest of them together. None when more
    /// input is needed.
    fn associate(&mut self, input: &[u8]) -> Option<usize> {
        let count = match input.len() {
            length if length >= self.associated_left => self.associated_left,
            length => length - length % BLOCK,
        };
        self.hash.update_padded(&input[..count]);
        self.associated_left -= count;
        (self.associated_left == 0).then_some(count)
    }
}

impl RunningOperation for Gcm {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        let mut step = EngineStep::default();
        if self.associated_left > 0 {
            let before = self.associated_left;
            match self.associate(input) {
                Some(count) => step.read = count,
                None if last => return Err(Status::InvalidField),
                None => return Ok(EngineStep { read: before - self.associated_left, ..step }),
            }
        }
        let input = &input[step.read..];
        // Of what is opened, the last block may be the tag.
        let text = match self.seal {
            true => input.len(),
            false if last && input.len() < BLOCK => return Err(Status::CorruptInput),
            false => input.len().saturating_sub(BLOCK),
        };
        let mut count = text.min(out.len());
        let ends = last && count == text;
        if !ends {
            count -= count % BLOCK;
        }
        let (from, to) = (&input[..count], &mut out[..count]);
        if !self.seal {
            self.hash.update_padded(from);
        }
        let done = self.cipher.try_apply_keystream_b2b(from, to);
        done.map_err(|_| Status::InvalidField)?;
        if self.seal {
            self.hash.update_padded(to);
        }
        self.text += count as u64;
        (step.read, step.written) = (step.read + count, count);
        if ends && !self.seal {
            let given = &input[count..count + BLOCK];
            if !bool::from(self.tag().ct_eq(given)) {
                return Err(Status::NotAuthentic);
            }
            step.read += BLOCK;
            step.finished = true;
        }
        if ends && self.seal && out.len() - count >= BLOCK {
            out[count..count + BLOCK].copy_from_slice(&self.tag());
            step.written += BLOCK;
            step.finished = true;
        }
        Ok(step)
    }
}
