//! Hashes: whatever goes in, the output is the digest.

use rackbus_memory::DmaSlice;
use rackbus_spec::accel::OperationStatus;
use sha3::Digest;
use sha3::digest::{FixedOutputReset, Reset};

use super::aws_lc::Sha256State;
use super::{EngineStep, OperationRequest, Portion, RunningOperation};

/// A hash of the RustCrypto project's.
#[derive(Debug, Default)]
pub struct Hash<D>(D);

impl<D: Digest + FixedOutputReset + Send> RunningOperation for Hash<D> {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        Digest::update(&mut self.0, input);
        let written = if last { put(&self.0.finalize_reset(), out) } else { 0 };
        Ok(EngineStep { read: input.len(), written, finished: last })
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        Reset::reset(&mut self.0);
        true
    }
}

/// SHA-256, which reads the tenant's memory itself.
#[derive(Default)]
pub struct Sha256(Sha256State);

impl RunningOperation for Sha256 {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        self.0.add(input);
        let written = if last { put(&self.0.finish(), out) } else { 0 };
        Ok(EngineStep { read: input.len(), written, finished: last })
    }

    fn takes_memory(&self) -> bool {
        true
    }

    fn take(&mut self, input: DmaSlice<'_>) {
        self.0.add_from(input);
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.0 = Sha256State::default();
        true
    }
}

/// BLAKE3, which has an interface of its own.
#[derive(Debug, Default)]
pub struct Blake3(blake3::Hasher);

impl RunningOperation for Blake3 {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        self.0.update(input);
        let written = if last { put(self.0.finalize().as_bytes(), out) } else { 0 };
        Ok(EngineStep { read: input.len(), written, finished: last })
    }

    fn portion(&self) -> Portion {
        Portion::Whole
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.0.reset();
        true
    }
}

fn put(digest: &[u8], out: &mut [u8]) -> usize {
    out[..digest.len()].copy_from_slice(digest);
    digest.len()
}
