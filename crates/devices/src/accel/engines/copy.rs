//! Output is input: what a chain without engines costs.

use rackbus_spec::accel::Status;

use super::{Engine, Step};

#[derive(Debug)]
pub struct Copy;

impl Engine for Copy {
    fn step(&mut self, input: &[u8], last: bool, out: &mut [u8]) -> Result<Step, Status> {
        let count = input.len().min(out.len());
        out[..count].copy_from_slice(&input[..count]);
        Ok(Step { read: count, written: count, finished: last && count == input.len() })
    }
}
