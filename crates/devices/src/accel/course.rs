//! An operation on its way through its engines: what is fed to them, what comes out, and how far it is.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rackbus_spec::accel::OperationStatus;

use super::engines::{Portion, Spare};
use super::gather::MessageMemory;
use super::pipeline::Pipeline;

/// The engines of an operation that has begun, and how far they came.
pub struct Course {
    pipeline: Pipeline,
    /// Input bytes that were taken.
    pub read: usize,
    /// Output bytes that were put out.
    pub written: usize,
    fed: bool,
}

/// Begins an operation's engines, behind `done` bytes that were done in an earlier life.
///
/// # Errors
/// The status that the operation ends with.
pub fn begin(
    start: impl FnOnce() -> Result<Pipeline, OperationStatus>,
    done: usize,
) -> Result<Course, OperationStatus> {
    let pipeline =
        catch_unwind(AssertUnwindSafe(start)).unwrap_or(Err(OperationStatus::EngineFailed))?;
    Ok(Course { pipeline, read: done, written: done, fed: false })
}

impl Course {
    /// Does the input up to `end`, as long as `goes_on` says so; the status, when it has ended. What comes out is in
    /// `out` before it goes to the tenant's memory.
    pub fn go<M: MessageMemory>(
        &mut self,
        memory: &(M, M),
        end: usize,
        out: &mut [u8],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Option<OperationStatus> {
        let before = self.written;
        // Whatever an engine does with what a tenant sent, it harms that operation alone.
        let outcome = catch_unwind(AssertUnwindSafe(|| match self.pipeline.passes_memory() {
            true => self.pass(memory, end, goes_on),
            false => self.steps(memory, end, out, goes_on),
        }));
        match outcome.unwrap_or(Err(OperationStatus::EngineFailed)) {
            Ok(false) => None,
            Ok(true) => Some(OperationStatus::Success),
            Err(status) => {
                // Nothing is put out that was not found to be authentic, whatever it ended with before that.
                if self.pipeline.opens() {
                    memory.1.clear(self.written);
                }
                if status == OperationStatus::NotAuthentic {
                    memory.1.clear_unauthentic(memory.0.len());
                }
                self.written = before;
                Some(status)
            }
        }
    }

    /// The operation has ended well: its engines go where the next ones find them.
    pub fn leave(self, spare: &mut Spare) {
        self.pipeline.leave(spare);
    }

    /// True when nothing more comes out.
    fn steps<M: MessageMemory>(
        &mut self,
        (input, output): &(M, M),
        end: usize,
        out: &mut [u8],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, OperationStatus> {
        let (portion, takes_memory) = (self.pipeline.portion(), self.pipeline.takes_memory());
        // What is put out at once stays in the caches, too.
        let room = portion.room().min(out.len());
        let out = &mut out[..room];
        let whole = self.read == 0 && end == input.len() && !self.fed;
        if whole && let Some(written) = self.whole(input, out)? {
            if written > output.len() {
                return Err(OperationStatus::OutputTooSmall);
            }
            output.write(0, &out[..written]);
            (self.read, self.written, self.fed) = (end, written, true);
            return Ok(true);
        }
        let mut fed_last = self.read == input.len();
        // Engines that were fed nothing have nothing to do yet.
        let mut hungry = !std::mem::replace(&mut self.fed, true);
        if hungry && fed_last {
            self.pipeline.feed(0, true, |_| {});
            hungry = false;
        }
        let mut last_written = 0;
        loop {
            if hungry && self.read == end {
                return Ok(false);
            }
            if hungry {
                let (at, count) = (self.read, portion.next(end - self.read));
                self.read += count;
                fed_last = self.read == input.len();
                if takes_memory {
                    input.each(at, count, |part| self.pipeline.take(part));
                    self.pipeline.feed(0, fed_last, |_| {});
                } else {
                    self.pipeline.feed(count, fed_last, |to| input.read(at, to));
                }
                if portion == Portion::Small && !takes_memory {
                    // While this is done, what follows comes near.
                    input.prefetch(self.read, count.min(end - self.read));
                    output.prefetch_write(self.written, last_written);
                }
            }
            let progress = self.pipeline.pump(out, goes_on)?;
            if progress.written > output.len() - self.written {
                return Err(OperationStatus::OutputTooSmall);
            }
            output.write(self.written, &out[..progress.written]);
            self.written += progress.written;
            if progress.finished {
                return Ok(true);
            }
            (hungry, last_written) = (progress.hungry, progress.written);
            if hungry && fed_last {
                return Err(OperationStatus::CorruptInput);
            }
            if !goes_on() {
                return Ok(false);
            }
        }
    }

    /// Does the whole message at once, where its engine does that: how many bytes came out.
    fn whole<M: MessageMemory>(
        &mut self,
        input: &M,
        out: &mut [u8],
    ) -> Result<Option<usize>, OperationStatus> {
        let length = input.len();
        let there = |head| input.piece(head, length - head);
        self.pipeline.whole(length, out, there, |head, text| {
            input.read(0, head);
            input.read(head.len(), text);
        })
    }

    /// The same where the output is as long as the input at every point, and goes from the one memory to the other.
    fn pass<M: MessageMemory>(
        &mut self,
        (input, output): &(M, M),
        end: usize,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, OperationStatus> {
        while self.read < end {
            let count = (end - self.read).min(Portion::Whole.bytes());
            if count > output.len() - self.written {
                return Err(OperationStatus::OutputTooSmall);
            }
            let pipeline = &mut self.pipeline;
            output.each_of(self.read, count, input, |from, to| pipeline.pass(from, to));
            (self.read, self.written) = (self.read + count, self.written + count);
            if self.read < end && !goes_on() {
                return Ok(false);
            }
        }
        Ok(self.read == input.len())
    }
}
