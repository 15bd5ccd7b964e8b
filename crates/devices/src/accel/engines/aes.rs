//! AES-256 in counter mode, and GCM (NIST SP 800-38D): by a library that does whole messages, and made of counter mode
//! and GHASH where a message is done in parts.

use std::sync::Arc;

use aes::Aes256Enc;
use aes::cipher::{BlockCipherEncrypt, InnerIvInit, StreamCipher};
use ctr::Ctr32BE;
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use rackbus_memory::DmaSlice;
use rackbus_spec::accel::OperationStatus;
use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use super::aws_lc::{BLOCK, CounterState, NONCE, SealedText};
use super::context::CipherKey;
use super::{Context, EngineStep, OperationRequest, Portion, RunningOperation};

fn key(context: &Context) -> Result<&CipherKey, OperationStatus> {
    match context {
        Context::Key(key) => Ok(key),
        Context::Patterns(_) => Err(OperationStatus::InvalidContext),
    }
}

/// Counter mode, which reads and writes the tenant's memory itself.
pub struct CounterMode {
    context: Arc<Context>,
    state: CounterState,
}

impl CounterMode {
    pub fn new(request: &OperationRequest<'_>) -> Result<CounterMode, OperationStatus> {
        let context = request.context.ok_or(OperationStatus::InvalidContext)?.clone();
        let state = CounterState::new(&key(&context)?.counter, request.nonce, request.done);
        Ok(CounterMode { context, state })
    }
}

impl RunningOperation for CounterMode {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let count = self.state.apply(&key(&self.context)?.counter, input, out);
        Ok(EngineStep { read: count, written: count, finished: last && count == input.len() })
    }

    fn passes_memory(&self) -> bool {
        true
    }

    fn pass(&mut self, input: DmaSlice<'_>, out: DmaSlice<'_>) {
        if let Ok(key) = key(&self.context) {
            self.state.apply_there(&key.counter, input, out);
        }
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

    /// Seals a whole message; bytes that came out.
    fn sealed(
        &self,
        head: &[u8],
        text: SealedText<'_>,
        out: &mut [u8],
    ) -> Result<usize, OperationStatus> {
        let sealed = key(&self.context)?.gcm.seal(&self.nonce(), head, text, out);
        sealed.ok_or(OperationStatus::EngineFailed)
    }

    fn nonce(&self) -> [u8; NONCE] {
        std::array::from_fn(|nth| self.nonce[nth])
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
            let written = match self.seal {
                true => self.sealed(head, SealedText::Own(text), out)?,
                false => {
                    out[..text.len()].copy_from_slice(text);
                    self.whole(head, text.len(), out)?
                }
            };
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
        if self.seal {
            return self.sealed(head, SealedText::InPlace(length), out);
        }
        let text = length.checked_sub(BLOCK).ok_or(OperationStatus::CorruptInput)?;
        let sealed = out.get_mut(..length).ok_or(OperationStatus::EngineFailed)?;
        let authentic = key(&self.context)?.gcm.open(&self.nonce(), head, sealed);
        if authentic { Ok(text) } else { Err(OperationStatus::NotAuthentic) }
    }

    fn whole_from(
        &mut self,
        head: &[u8],
        text: DmaSlice<'_>,
        out: &mut [u8],
    ) -> Option<Result<usize, OperationStatus>> {
        self.seal.then(|| self.sealed(head, SealedText::There(text), out))
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
