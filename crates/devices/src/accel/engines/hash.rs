//! Hashes: whatever goes in, the output is the digest.

use rackbus_spec::accel::Status;
use sha2::Digest;

use super::{EngineStep, RunningOperation};

/// A hash of the RustCrypto project's.
#[derive(Debug, Default)]
pub struct Hash<D>(D);

impl<D: Digest + Clone + Send> RunningOperation for Hash<D> {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        self.0.update(input);
        let written = if last { put(&self.0.clone().finalize(), out) } else { 0 };
        Ok(EngineStep { read: input.len(), written, finished: last })
    }
}

/// BLAKE3, which has an interface of its own.
#[derive(Debug, Default)]
pub struct Blake3(blake3::Hasher);

impl RunningOperation for Blake3 {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        self.0.update(input);
        let written = if last { put(self.0.finalize().as_bytes(), out) } else { 0 };
        Ok(EngineStep { read: input.len(), written, finished: last })
    }
}

fn put(digest: &[u8], out: &mut [u8]) -> usize {
    out[..digest.len()].copy_from_slice(digest);
    digest.len()
}
