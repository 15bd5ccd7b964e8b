//! Engines one behind the other: what comes out of one goes into the next and never leaves the device.

use rackbus_memory::DmaSlice;
use rackbus_memory::wiping::WipeFreed;
use rackbus_spec::accel::{Operation, OperationStatus};

use super::buffer::EngineBuffer;
use super::engines::{self, LEAST_ROOM, OperationRequest, Portion, RunningOperation, Spare};

/// Bytes that wait between two engines at most, and that an engine puts out in a step.
pub const BETWEEN: usize = 16 << 10;

/// A chain of engines, of one at least.
#[derive(Default)]
pub struct Pipeline {
    stages: Vec<Stage>,
}

struct Stage {
    operation: Operation,
    engine: Box<dyn RunningOperation>,
    /// Its input is from `start` to `end` in here. It only grows, and goes from operation to operation, so that its
    /// bytes are zeroed once.
    buffer: EngineBuffer,
    start: usize,
    end: usize,
    /// Nothing follows behind `end`.
    last: bool,
    finished: bool,
}

impl Drop for Pipeline {
    /// Wherever it is given up, what its engines had of a message is wiped.
    fn drop(&mut self) {
        let _wiping = WipeFreed::begin();
        self.stages.clear();
    }
}

/// How far a pipeline came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineProgress {
    /// Bytes that it put out.
    pub written: usize,
    /// Nothing more comes out.
    pub finished: bool,
    /// It could do nothing more without more input.
    pub hungry: bool,
}

impl Pipeline {
    /// The engines of these operations, in order; `request` tells what each one is asked for, by its place. Those of the
    /// operation before go on where they are the same.
    ///
    /// # Errors
    /// The status that the operation ends with at once.
    pub fn begin<'a>(
        operations: &[Operation],
        request: impl Fn(usize) -> OperationRequest<'a>,
        spare: &mut Spare,
    ) -> Result<Pipeline, OperationStatus> {
        let mut pipeline = spare.take_pipeline();
        if pipeline.is_renewed(operations, &request) {
            return Ok(pipeline);
        }
        pipeline.dissolve(spare);
        for (nth, operation) in operations.iter().enumerate() {
            let engine = engines::begin(*operation, &request(nth), spare)?;
            pipeline.push(*operation, engine, spare.take_buffer());
        }
        Ok(pipeline)
    }

    /// Adds an engine behind those that there are. `buffer` is memory for its input.
    pub fn push(
        &mut self,
        operation: Operation,
        engine: Box<dyn RunningOperation>,
        buffer: EngineBuffer,
    ) {
        let (start, end) = (0, 0);
        self.stages.push(Stage {
            operation,
            engine,
            buffer,
            start,
            end,
            last: false,
            finished: false,
        });
    }

    /// Leaves engines and memory, so that the next operation need not begin with new ones.
    pub fn leave(self, spare: &mut Spare) {
        spare.put_pipeline(self);
    }

    /// Takes all engines out and leaves them, each by itself.
    pub fn dissolve(&mut self, spare: &mut Spare) {
        for stage in self.stages.drain(..) {
            spare.put(stage.operation, stage.engine);
            spare.put_buffer(stage.buffer);
        }
    }

    /// Zeroes what is between its engines.
    pub fn wipe(&mut self) {
        for stage in &mut self.stages {
            stage.buffer.wipe();
        }
    }

    /// Whether all of its engines are such as `which` says.
    pub fn all(&self, which: impl Fn(Operation, &dyn RunningOperation) -> bool) -> bool {
        self.stages.iter().all(|stage| which(stage.operation, &*stage.engine))
    }

    /// Whether it has no engines.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Whether it has just these engines, and all are as ones that were just begun, after an operation that ended well.
    fn is_renewed<'a>(
        &mut self,
        operations: &[Operation],
        request: impl Fn(usize) -> OperationRequest<'a>,
    ) -> bool {
        let there = self.stages.iter().map(|stage| stage.operation);
        there.eq(operations.iter().copied())
            && self.stages.iter_mut().enumerate().all(|(nth, stage)| {
                (stage.start, stage.end, stage.last, stage.finished) = (0, 0, false, false);
                stage.engine.renew(&request(nth))
            })
    }

    /// How much input the first engine is best fed at once.
    pub fn portion(&self) -> Portion {
        self.stages.first().map_or(Portion::Small, |stage| stage.engine.portion())
    }

    /// Whether the only engine passes a message from the tenant's memory to the tenant's memory itself, and nothing was fed.
    pub fn passes_memory(&self) -> bool {
        let passes = |stage: &Stage| stage.engine.passes_memory() && stage.end == 0;
        matches!(&self.stages[..], [stage] if passes(stage))
    }

    /// Has that engine do more input, and put what comes out where it belongs.
    pub fn pass(&mut self, input: DmaSlice<'_>, out: DmaSlice<'_>) {
        if let [stage] = &mut self.stages[..] {
            stage.engine.pass(input, out);
        }
    }

    /// Whether what is put out is to be found authentic first.
    pub fn opens(&self) -> bool {
        self.stages.iter().any(|stage| stage.operation == Operation::Aes256GcmOpen)
    }

    /// Whether the only engine reads the tenant's memory itself.
    pub fn takes_memory(&self) -> bool {
        matches!(&self.stages[..], [stage] if stage.engine.takes_memory())
    }

    /// Gives that engine more input.
    pub fn take(&mut self, input: DmaSlice<'_>) {
        if let [stage] = &mut self.stages[..] {
            stage.engine.take(input);
        }
    }

    /// Does a message of `length` bytes at once, where the only engine does that and there is room: how many bytes come out.
    /// The engine reads the text where it is, if `there` knows that for what begins at a place in the message, or in the place
    /// of what comes out. `fill` writes the first bytes of the message, and those that follow where they are not read there.
    ///
    /// # Errors
    /// The status that the operation ends with.
    pub fn whole<'a>(
        &mut self,
        length: usize,
        out: &mut [u8],
        there: impl FnOnce(usize) -> Option<DmaSlice<'a>>,
        mut fill: impl FnMut(&mut [u8], &mut [u8]),
    ) -> Result<Option<usize>, OperationStatus> {
        let [stage] = &mut self.stages[..] else { return Ok(None) };
        let fits =
            length <= stage.engine.portion().next(length) && length + LEAST_ROOM <= out.len();
        let head = stage.engine.in_place().filter(|head| fits && *head <= length && stage.end == 0);
        let Some(head) = head else { return Ok(None) };
        stage.make_room(head);
        let Stage { engine, buffer, .. } = stage;
        if let Some(text) = there(head) {
            fill(&mut buffer[..head], &mut []);
            if let Some(done) = engine.whole_from(&buffer[..head], text, out) {
                return done.map(Some);
            }
        }
        fill(&mut buffer[..head], &mut out[..length - head]);
        engine.whole(&buffer[..head], length - head, out).map(Some)
    }

    /// Gives the first engine `length` more bytes of input, which `fill` writes; `last` says that no more
    /// will follow.
    pub fn feed(&mut self, length: usize, last: bool, fill: impl FnOnce(&mut [u8])) {
        let Some(first) = self.stages.first_mut() else { return };
        first.last = last;
        fill(first.make_room(length));
        first.end += length;
    }

    /// Goes on until `out` has little room left, or there is too little input, as long as `goes_on` says so.
    ///
    /// # Errors
    /// The status that the operation ends with.
    pub fn pump(
        &mut self,
        out: &mut [u8],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<PipelineProgress, OperationStatus> {
        let mut written = 0;
        loop {
            let mut moved = false;
            for nth in 0..self.stages.len() {
                let (here, behind) = self.stages.split_at_mut(nth + 1);
                let Some(stage) = here.last_mut().filter(|stage| !stage.finished) else { continue };
                let Some(next) = behind.first_mut() else {
                    let room = &mut out[written..];
                    if room.len() < LEAST_ROOM {
                        return Ok(PipelineProgress { written, finished: false, hungry: false });
                    }
                    let (count, active) = stage.step(room)?;
                    written += count;
                    moved |= active;
                    continue;
                };
                if next.end - next.start >= BETWEEN {
                    continue;
                }
                let (count, active) = stage.step(next.make_room(BETWEEN))?;
                next.end += count;
                next.last = stage.finished;
                moved |= active;
            }
            // What comes last may have all that it needs before a stage in front of it has found its message authentic.
            let finished = self.stages.iter().all(|stage| stage.finished);
            if finished || !moved || self.is_drained() {
                return Ok(PipelineProgress { written, finished, hungry: !finished });
            }
            if !goes_on() {
                return Ok(PipelineProgress { written, finished: false, hungry: false });
            }
        }
    }
}

impl Pipeline {
    /// No engine has any input, nor will one have without more for the first.
    fn is_drained(&self) -> bool {
        self.stages.iter().all(|stage| stage.start == stage.end && !stage.last)
    }
}

impl Stage {
    /// Room for `length` more bytes behind its input.
    fn make_room(&mut self, length: usize) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.buffer.grow(self.end + length);
        &mut self.buffer[self.end..self.end + length]
    }

    /// Bytes that came out, and whether anything was done.
    fn step(&mut self, out: &mut [u8]) -> Result<(usize, bool), OperationStatus> {
        let input = &self.buffer[self.start..self.end];
        if input.is_empty() && !self.last {
            return Ok((0, false));
        }
        let step = self.engine.step(input, self.last, out)?;
        self.start += step.read;
        self.finished = step.finished;
        Ok((step.written, step.finished || step.read > 0 || step.written > 0))
    }
}
