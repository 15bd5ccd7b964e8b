//! Engines one behind the other: what comes out of one goes into the next and never leaves the device.

use rackbus_spec::accel::Status;

use super::engines::{Engine, LEAST_ROOM};

/// Bytes that wait between two engines at most, and that an engine puts out in a step.
const BETWEEN: usize = 16 << 10;

/// A chain of engines, of one at least.
pub struct Pipeline {
    stages: Vec<Stage>,
}

struct Stage {
    engine: Box<dyn Engine>,
    /// Its input from `start` on.
    input: Vec<u8>,
    start: usize,
    /// Nothing follows behind `input`.
    last: bool,
    finished: bool,
}

/// How far a pipeline came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that it put out.
    pub written: usize,
    /// Nothing more comes out.
    pub finished: bool,
    /// It could do nothing more without more input.
    pub hungry: bool,
}

impl Pipeline {
    /// These engines, in order.
    pub fn new(engines: Vec<Box<dyn Engine>>) -> Pipeline {
        let stage =
            |engine| Stage { engine, input: Vec::new(), start: 0, last: false, finished: false };
        Pipeline { stages: engines.into_iter().map(stage).collect() }
    }

    /// Gives the first engine `length` more bytes of input, which `fill` writes; `last` says that no more
    /// will follow.
    pub fn feed(&mut self, length: usize, last: bool, fill: impl FnOnce(&mut [u8])) {
        let Some(first) = self.stages.first_mut() else { return };
        first.last = last;
        let at = first.make_room(length);
        fill(&mut first.input[at..]);
    }

    /// Goes on until `out` has little room left, or there is too little input, as long as `goes_on` says so.
    ///
    /// # Errors
    /// The status that the operation ends with.
    pub fn pump(
        &mut self,
        out: &mut [u8],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Progress, Status> {
        let mut written = 0;
        loop {
            let mut moved = false;
            for nth in 0..self.stages.len() {
                let (here, behind) = self.stages.split_at_mut(nth + 1);
                let Some(stage) = here.last_mut().filter(|stage| !stage.finished) else { continue };
                let Some(next) = behind.first_mut() else {
                    let room = &mut out[written..];
                    if room.len() < LEAST_ROOM {
                        return Ok(Progress { written, finished: false, hungry: false });
                    }
                    let (count, active) = stage.step(room)?;
                    written += count;
                    moved |= active;
                    continue;
                };
                if next.input.len() - next.start >= BETWEEN {
                    continue;
                }
                let at = next.make_room(BETWEEN);
                let stepped = stage.step(&mut next.input[at..]);
                let (count, active) = stepped.inspect_err(|_| next.input.truncate(at))?;
                next.input.truncate(at + count);
                next.last = stage.finished;
                moved |= active;
            }
            let finished = self.stages.last().is_none_or(|stage| stage.finished);
            if finished || !moved {
                return Ok(Progress { written, finished, hungry: !finished });
            }
            if !goes_on() {
                return Ok(Progress { written, finished: false, hungry: false });
            }
        }
    }
}

impl Stage {
    /// Makes room for `length` more bytes of input; where they begin.
    fn make_room(&mut self, length: usize) -> usize {
        self.input.drain(..self.start);
        self.start = 0;
        let at = self.input.len();
        self.input.resize(at + length, 0);
        at
    }

    /// Bytes that came out, and whether anything was done.
    fn step(&mut self, out: &mut [u8]) -> Result<(usize, bool), Status> {
        let input = &self.input[self.start..];
        if input.is_empty() && !self.last {
            return Ok((0, false));
        }
        let step = self.engine.step(input, self.last, out)?;
        self.start += step.read;
        self.finished = step.finished;
        Ok((step.written, step.finished || step.read > 0 || step.written > 0))
    }
}
