//! AES-256 in counter mode, and GCM (NIST SP 800-38D): by a library that does whole messages, and made of counter mode
//! and GHASH where a message is done in parts.

use std::sync::Arc;

use aes::Aes256Enc;
use aes::cipher::{BlockCipherEncrypt, InnerIvInit, StreamCipher, StreamCipherSeek};
use aws_lc_rs::aead::{Aad, NONCE_LEN, Nonce};
use ctr::{Ctr32BE, Ctr128BE};
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use rackbus_spec::accel::OperationStatus;
use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use super::context::CipherKey;
use super::{Context, EngineStep, OperationRequest, Portion, RunningOperation};

const BLOCK: usize = 16;

fn key(context: &Context) -> Result<&CipherKey, OperationStatus> {
    match context {
        Context::Key(key) => Ok(key),
        Context::Patterns(_) => Err(OperationStatus::InvalidContext),
    }
}

/// Counter mode with a 128-bit big-endian counter (NIST SP 800-38A).
pub struct CounterMode(Ctr128BE<Aes256Enc>);

impl CounterMode {
    pub fn new(request: &OperationRequest<'_>) -> Result<CounterMode, OperationStatus> {
        let key = key(request.context.ok_or(OperationStatus::InvalidContext)?)?;
        let cipher = ctr::CtrCore::inner_iv_init(key.cipher.clone(), &request.nonce.into());
        let mut cipher = Ctr128BE::from_core(cipher);
        cipher.try_seek(request.done as u64).map_err(|_| OperationStatus::InvalidField)?;
        Ok(CounterMode(cipher))
    }
}

impl RunningOperation for CounterMode {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let count = input.len().min(out.len());
        let done = self.0.try_apply_keystream_b2b(&input[..count], &mut out[..count]);
        done.map_err(|_| OperationStatus::InvalidField)?;
        Ok(EngineStep { read: count, written: count, finished: last && count == input.len() })
    }
}

/// GCM in one direction: of a message that comes whole by a library that does it in one pass, of one that comes in parts
/// by counter mode and GHASH.
pub struct Gcm {
    context: Arc<Context>,
    nonce: [u8; BLOCK],
    associated: usize,
    seal: bool,
    /// Beside, so that what this is moved with is not a place for them that has anything in it.
    parts: Option<Box<GcmInParts>>,
}

impl Gcm {
    pub fn seal(request: &OperationRequest<'_>) -> Result<Gcm, OperationStatus> {
        Gcm::new(request, true)
    }

    pub fn open(request: &OperationRequest<'_>) -> Result<Gcm, OperationStatus> {
        Gcm::new(request, false)
    }

    fn new(request: &OperationRequest<'_>, seal: bool) -> Result<Gcm, OperationStatus> {
        let context = request.context.ok_or(OperationStatus::InvalidContext)?.clone();
        key(&context)?;
        let associated = request.associated as usize;
        Ok(Gcm { context, nonce: request.nonce, associated, seal, parts: None })
    }
}

impl RunningOperation for Gcm {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let fits = input.len() >= self.associated && input.len() + BLOCK <= out.len();
        if self.parts.is_none() && last && fits {
            let (head, text) = input.split_at(self.associated);
            out[..text.len()].copy_from_slice(text);
            let written = self.whole(head, text.len(), out)?;
            return Ok(EngineStep { read: input.len(), written, finished: true });
        }
        if self.parts.is_none() {
            let key = &key(&self.context)?.cipher;
            let parts = GcmInParts::new(key, self.nonce, self.associated, self.seal);
            self.parts = Some(Box::new(parts));
        }
        let Some(parts) = &mut self.parts else { return Err(OperationStatus::EngineFailed) };
        parts.step(input, last, out)
    }

    fn portion(&self) -> Portion {
        Portion::Message
    }

    fn in_place(&self) -> Option<usize> {
        self.parts.is_none().then_some(self.associated)
    }

    fn whole(
        &mut self,
        head: &[u8],
        length: usize,
        out: &mut [u8],
    ) -> Result<usize, OperationStatus> {
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&self.nonce[..NONCE_LEN]);
        let (nonce, head) = (Nonce::assume_unique_for_key(nonce), Aad::from(head));
        let gcm = &key(&self.context)?.gcm;
        let (text, behind) =
            out.split_at_mut_checked(length).ok_or(OperationStatus::EngineFailed)?;
        if !self.seal {
            if length < BLOCK {
                return Err(OperationStatus::CorruptInput);
            }
            let opened = gcm.open_in_place(nonce, head, text);
            return Ok(opened.map_err(|_| OperationStatus::NotAuthentic)?.len());
        }
        let behind = behind.first_chunk_mut::<BLOCK>().ok_or(OperationStatus::EngineFailed)?;
        let tag = gcm.seal_in_place_separate_tag(nonce, head, text);
        behind.copy_from_slice(tag.map_err(|_| OperationStatus::EngineFailed)?.as_ref());
        Ok(length + BLOCK)
    }
}

/// GCM of a message in parts.
struct GcmInParts {
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

impl Drop for GcmInParts {
    /// The others wipe themselves.
    fn drop(&mut self) {
        self.mask.zeroize();
    }
}

impl GcmInParts {
    fn new(key: &Aes256Enc, nonce: [u8; BLOCK], associated: usize, seal: bool) -> GcmInParts {
        let encrypted = |block: [u8; BLOCK]| {
            let mut block = block.into();
            key.encrypt_block(&mut block);
            <[u8; BLOCK]>::from(block)
        };
        let counter = |number: u8| {
            let mut block = nonce;
            block[12..].copy_from_slice(&[0, 0, 0, number]);
            block
        };
        let cipher = ctr::CtrCore::inner_iv_init(key.clone(), &counter(2).into());
        GcmInParts {
            cipher: Ctr32BE::from_core(cipher),
            hash: GHash::new(&encrypted([0; BLOCK]).into()),
            mask: encrypted(counter(1)),
            seal,
            associated_left: associated,
            associated: associated as u64,
            text: 0,
        }
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

    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let mut step = EngineStep::default();
        if self.associated_left > 0 {
            let before = self.associated_left;
            match self.associate(input) {
                Some(count) => step.read = count,
                None if last => return Err(OperationStatus::InvalidField),
                None => return Ok(EngineStep { read: before - self.associated_left, ..step }),
            }
        }
        let input = &input[step.read..];
        // Of what is opened, the last block may be the tag.
        let text = match self.seal {
            true => input.len(),
            false if last && input.len() < BLOCK => return Err(OperationStatus::CorruptInput),
            false => input.len().saturating_sub(BLOCK),
        };
        let mut count = text.min(out.len());
        let ends = last && count == text;
        if !ends {
            count -= count % BLOCK;
        }
        // Both passes over what is in the first cache.
        let part = Portion::Small.bytes();
        for (from, to) in input[..count].chunks(part).zip(out[..count].chunks_mut(part)) {
            if !self.seal {
                self.hash.update_padded(from);
            }
            let done = self.cipher.try_apply_keystream_b2b(from, to);
            done.map_err(|_| OperationStatus::InvalidField)?;
            if self.seal {
                self.hash.update_padded(to);
            }
        }
        self.text += count as u64;
        (step.read, step.written) = (step.read + count, count);
        if ends && !self.seal {
            let given = &input[count..count + BLOCK];
            if !bool::from(self.tag().ct_eq(given)) {
                return Err(OperationStatus::NotAuthentic);
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
