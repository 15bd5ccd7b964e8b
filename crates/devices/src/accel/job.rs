//! An operation between a function, which took it from a ring, and the engines that do it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_qos::MessagePiece;
use rackbus_spec::accel::OperationStatus;

use super::course::{Course, begin};
use super::engines::Spare;
use super::gather::{Gather, MessageMemory};
use super::outbox::CompletionOutbox;
use super::pipeline::Pipeline;
use super::scratch::Scratch;

/// An operation under way: its pipeline, and how far it has come.
pub struct EngineJob {
    /// Its function's name for it.
    pub number: u64,
    /// Bytes of its input.
    pub input_length: usize,
    /// Bytes that its output has room for.
    pub output_length: usize,
    /// The estimate that it counts for: its first operation.
    pub kind: u8,
    /// What it costs by the profiles, in nanoseconds.
    pub profile_ns: f64,
    pub outbox: Arc<CompletionOutbox>,
    state: Mutex<State>,
}

impl std::fmt::Debug for EngineJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineJob").field("number", &self.number).finish_non_exhaustive()
    }
}

/// Begins an operation's engines.
pub type StartEngines = Box<dyn FnOnce(&mut Spare) -> Result<Pipeline, OperationStatus> + Send>;

/// The engines of an operation.
pub enum JobEngines {
    /// They have not begun, and do so behind bytes that were done in an earlier life.
    Waiting(StartEngines, usize),
    /// They have done some of it, and took so much engine time for that, in nanoseconds.
    Running(Course, u64),
    /// The operation has ended, or was given up.
    Over,
}

struct State {
    engines: JobEngines,
    /// Its memory; none while mappings change.
    memory: Option<(Gather, Gather)>,
    read: usize,
    written: usize,
    engine_ns: u64,
    /// An engine found no memory and gave it up.
    waits: bool,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FinishedJob {
    /// The function's name for it.
    pub number: u64,
    /// The status that its completion gets.
    pub status: OperationStatus,
    /// Bytes that it put out.
    pub written: usize,
    /// What its completion has as its value: the engine time that it took, in nanoseconds, or the handle of the
    /// context that it created.
    pub value: u64,
}

/// What an engine's turn with an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// Input bytes that were taken.
    pub read: usize,
    /// Output bytes that were made.
    pub written: usize,
    /// There is nothing more to do, for now at least.
    pub over: bool,
    /// It has ended, so.
    pub status: Option<OperationStatus>,
}

/// What an operation is about, for [`EngineJob::new`].
pub struct JobInput {
    pub number: u64,
    pub kind: u8,
    pub profile_ns: f64,
    pub engines: JobEngines,
    pub memory: (Gather, Gather),
}

impl EngineJob {
    pub fn new(order: JobInput, outbox: Arc<CompletionOutbox>) -> EngineJob {
        let JobInput { number, kind, profile_ns, engines, memory } = order;
        let (read, written, engine_ns) = match &engines {
            JobEngines::Waiting(_, done) => (*done, *done, 0),
            JobEngines::Running(course, engine_ns) => (course.read, course.written, *engine_ns),
            JobEngines::Over => (0, 0, 0),
        };
        EngineJob {
            number,
            input_length: memory.0.len(),
            output_length: memory.1.len(),
            kind,
            profile_ns,
            outbox,
            state: Mutex::new(State {
                engines,
                memory: Some(memory),
                read,
                written,
                engine_ns,
                waits: false,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `piece` of it, as long as `goes_on` says so. `scratch` is the engine's own memory.
    pub fn run(
        &self,
        piece: &MessagePiece,
        scratch: &mut Scratch,
        mut goes_on: impl FnMut() -> bool,
    ) -> Ran {
        let Scratch { out, spare, .. } = scratch;
        let mut state = self.lock();
        let state = &mut *state;
        let none = Ran { read: 0, written: 0, over: true, status: None };
        let Some(memory) = &state.memory else {
            state.waits = !matches!(state.engines, JobEngines::Over);
            return none;
        };
        let begun = match std::mem::replace(&mut state.engines, JobEngines::Over) {
            JobEngines::Over => return none,
            JobEngines::Running(course, _) => Ok(course),
            JobEngines::Waiting(start, done) => begin(|| start(spare), done),
        };
        let mut course = match begun {
            Ok(course) => course,
            Err(status) => return Ran { status: Some(status), ..none },
        };
        let (first, before) = (course.read, course.written);
        let end = first.saturating_add(usize::try_from(piece.length).unwrap_or(usize::MAX));
        let status = course.go(memory, end.min(self.input_length), out, &mut goes_on);
        (state.read, state.written) = (course.read, course.written);
        let ran = Ran {
            read: course.read - first,
            written: course.written - before,
            over: status.is_some(),
            status,
        };
        // Of an operation that has ended, what is in its engines, keys too, goes now.
        match status {
            None => state.engines = JobEngines::Running(course, 0),
            Some(OperationStatus::Success) => course.leave(spare),
            Some(_) => {}
        }
        ran
    }

    /// Adds engine time; how it ended, with that.
    pub fn account(&self, engine_ns: u64, status: Option<OperationStatus>) -> Option<FinishedJob> {
        let mut state = self.lock();
        state.engine_ns += engine_ns;
        let written = if status == Some(OperationStatus::Success) { state.written } else { 0 };
        let (number, value) = (self.number, state.engine_ns);
        status.map(|status| FinishedJob { number, status, written, value })
    }

    /// Its memory is about to change. On return nothing touches it.
    pub fn release_memory(&self) {
        self.lock().memory = None;
    }

    /// It has memory again. Where an engine gave it up meanwhile: how much input is done, to go on there.
    pub fn take_up(&self, memory: (Gather, Gather)) -> Option<usize> {
        let mut state = self.lock();
        state.memory = Some(memory);
        std::mem::take(&mut state.waits).then_some(state.read)
    }

    /// How many bytes it has put out. It has no memory now, or has ended.
    pub fn written(&self) -> usize {
        self.lock().written
    }

    /// Whether it has no memory now.
    pub fn is_memory_released(&self) -> bool {
        self.lock().memory.is_none()
    }

    /// Whether it was [given up](EngineJob::cancel). One that an engine has at this moment is not known to be.
    pub fn is_given_up(&self) -> bool {
        let state = self.state.try_lock();
        state.is_ok_and(|it| it.memory.is_none() && matches!(it.engines, JobEngines::Over))
    }

    /// Gives it up. On return nothing touches its memory, and its keys are wiped.
    pub fn cancel(&self) {
        let mut state = self.lock();
        (state.engines, state.memory, state.waits) = (JobEngines::Over, None, false);
    }
}
