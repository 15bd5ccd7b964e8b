//! Engines between two operations: what one allocates and clears for itself takes longer than a short message, so that
//! an engine's thread keeps one of each kind.

use rackbus_spec::accel::{OPERATIONS, Operation, STAGES};

use super::super::buffer::EngineBuffer;
use super::super::pipeline::Pipeline;
use super::{OperationRequest, RunningOperation};

/// Engines of one thread that wait for their next operation: those of the one that ended last, and one of each kind at
/// most, so that their memory is bounded whatever tenants do; and the memory between engines.
#[derive(Default)]
pub struct Spare {
    engines: [Option<Box<dyn RunningOperation>>; OPERATIONS.len() + 1],
    buffers: Vec<EngineBuffer>,
    /// The engines of the operation that ended last, as they were.
    pipeline: Pipeline,
}

impl Spare {
    /// Keeps an engine whose operation has ended well, where it may wait.
    pub fn put(&mut self, operation: Operation, engine: Box<dyn RunningOperation>) {
        if is_kept(operation, &*engine)
            && let Some(place) = self.engines.get_mut(operation as usize)
        {
            *place = Some(engine);
        }
    }

    /// An engine for `operation`, as one that was just begun.
    pub fn take(
        &mut self,
        operation: Operation,
        request: &OperationRequest<'_>,
    ) -> Option<Box<dyn RunningOperation>> {
        let mut engine = self.engines.get_mut(operation as usize)?.take()?;
        engine.renew(request).then_some(engine)
    }

    /// Keeps memory that was between engines. What is in it is of no use to a later operation.
    pub fn put_buffer(&mut self, buffer: EngineBuffer) {
        if self.buffers.len() < STAGES {
            self.buffers.push(buffer);
        }
    }

    /// Keeps the engines of an operation that has ended well, where they may wait.
    pub fn put_pipeline(&mut self, mut pipeline: Pipeline) {
        if !pipeline.all(is_kept) {
            pipeline.dissolve(self);
        }
        if !self.pipeline.is_empty() {
            std::mem::take(&mut self.pipeline).dissolve(self);
        }
        self.pipeline = pipeline;
    }

    /// The engines of the operation that ended last, if they were kept.
    pub fn take_pipeline(&mut self) -> Pipeline {
        std::mem::take(&mut self.pipeline)
    }

    /// How many engines wait, each by itself.
    pub fn waiting(&self) -> usize {
        self.engines.iter().flatten().count()
    }

    /// Zeroes the memory between engines, and gives the engines up.
    pub fn wipe(&mut self) {
        let mut pipeline = self.take_pipeline();
        pipeline.wipe();
        self.buffers.iter_mut().for_each(EngineBuffer::wipe);
        pipeline.dissolve(self);
        self.engines = Default::default();
    }

    /// Memory between engines, with anything in it.
    pub fn take_buffer(&mut self) -> EngineBuffer {
        self.buffers.pop().unwrap_or_default()
    }
}

/// Whether an engine is kept: those with a key are wiped.
fn is_kept(operation: Operation, engine: &dyn RunningOperation) -> bool {
    let has_key = matches!(
        operation,
        Operation::Aes256Ctr | Operation::Aes256GcmSeal | Operation::Aes256GcmOpen
    );
    !has_key && engine.may_wait()
}

impl std::fmt::Debug for Spare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Spare").field(&self.waiting()).finish()
    }
}
