//! Output is input: what a chain without engines costs.

use rackbus_spec::accel::OperationStatus;

use super::{EngineStep, OperationRequest, RunningOperation};

#[derive(Debug)]
pub struct Copy;

impl RunningOperation for Copy {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let count = input.len().min(out.len());
        out[..count].copy_from_slice(&input[..count]);
        Ok(EngineStep { read: count, written: count, finished: last && count == input.len() })
    }

    fn passes_memory(&self) -> bool {
        true
    }

    fn renew(&mut self, _: &OperationRequest<'_>) -> bool {
        true
    }
}
