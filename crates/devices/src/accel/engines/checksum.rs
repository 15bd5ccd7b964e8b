//! CRC-32C: four bytes, little-endian.

use rackbus_spec::accel::Status;

use super::{Engine, Step};

#[derive(Debug, Default)]
pub struct Crc32c(u32);

impl Engine for Crc32c {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Step, Status> {
        self.0 = crc32c::crc32c_append(self.0, input);
        let mut written = 0;
        if last {
            out[..4].copy_from_slice(&self.0.to_le_bytes());
            written = 4;
        }
        Ok(Step { read: input.len(), written, finished: last })
    }
}
