//! Engines between two operations: what a compressor allocates and clears for itself takes longer than a short
//! message, so that an engine's thread keeps one of each kind.

use std::collections::BTreeMap;

use rackbus_spec::accel::Operation;

use super::{OperationRequest, RunningOperation};

/// Engines of one thread that wait for their next operation: one of each kind at most, so that their memory is
/// bounded whatever tenants do.
#[derive(Default)]
pub struct Spare(BTreeMap<u8, Box<dyn RunningOperation>>);

impl Spare {
    /// Keeps an engine whose operation has ended well, of the kinds where that saves time.
    pub fn put(&mut self, operation: Operation, engine: Box<dyn RunningOperation>) {
        if is_kept(operation) {
            self.0.entry(operation as u8).or_insert(engine);
        }
    }

    /// An engine for `operation`, as one that was just begun.
    pub fn take(
        &mut self,
        operation: Operation,
        request: &OperationRequest<'_>,
    ) -> Option<Box<dyn RunningOperation>> {
        let mut engine = self.0.remove(&(operation as u8))?;
        engine.renew(request).then_some(engine)
    }
}

/// Engines that have much memory of their own and no key. Those of LZ4 cannot begin anew: the library's encoder
/// leaves out the header of a second frame that is empty.
fn is_kept(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Deflate
            | Operation::Inflate
            | Operation::ZstdCompress
            | Operation::ZstdDecompress
    )
}

impl std::fmt::Debug for Spare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Spare").field(&self.0.len()).finish()
    }
}
