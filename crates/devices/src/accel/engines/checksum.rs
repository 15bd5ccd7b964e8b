//! CRC-32C: four bytes, little-endian.

use rackbus_spec::accel::Status;

use super::{EngineStep, OperationRequest, RunningOperation};

#[derive(Debug, Default)]
pub struct Crc32c(u32);

impl RunningOperation for Crc32c {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<EngineStep, Status> {
        self.0 = crc32c::crc32c_append(self.0, input);
        let mut written = 0;
        if last {
            out[..4].copy_from_slice(&self.0.to_le_bytes());
            written = 4;
        }
        Ok(EngineStep { read: input.len(), written, finished: last })
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        self.0 = 0;
        true
    }
}
