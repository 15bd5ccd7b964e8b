//! Regular expressions: all patterns of a context at once, by a lazily built DFA. So the memory does not
//! depend on what the patterns or the input are, and the time for a byte only where a state is built for it:
//! that takes up to some tens of microseconds, so that a step ends soon after.

use std::sync::Arc;

use rackbus_spec::accel::OperationStatus;
use regex_automata::hybrid::LazyStateID;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::syntax;
use regex_automata::{Input, MatchKind};

use super::{Context, EngineStep, OperationRequest, RunningOperation};

/// Bytes of a context's automaton, and of the states that a scan keeps.
const MEMORY: usize = 1 << 20;
/// Patterns of a context at most.
const PATTERNS: usize = 1024;
/// Bytes of a match in the output.
const MATCH: usize = 16;

/// Compiles patterns, one a line, with the syntax of Rust's `regex`.
pub fn compile(text: &[u8]) -> Result<DFA, OperationStatus> {
    let text = std::str::from_utf8(text).map_err(|_| OperationStatus::InvalidField)?;
    let patterns: Vec<&str> = text.lines().collect();
    if patterns.is_empty() || patterns.len() > PATTERNS {
        return Err(OperationStatus::InvalidField);
    }
    let config = DFA::config()
        .match_kind(MatchKind::All)
        .cache_capacity(MEMORY)
        .skip_cache_capacity_check(true);
    let syntax = syntax::Config::new().utf8(false).nest_limit(64);
    let nfa = thompson::Config::new().utf8(false).nfa_size_limit(Some(MEMORY));
    let built = DFA::builder().configure(config).syntax(syntax).thompson(nfa).build_many(&patterns);
    built.map_err(|error| {
        let text = format!("{error:?}");
        if text.contains("ExceededSizeLimit") {
            OperationStatus::NoRoom
        } else {
            OperationStatus::InvalidField
        }
    })
}

/// The state before the first byte of a message.
fn start(dfa: &DFA, cache: &mut Cache) -> Result<LazyStateID, OperationStatus> {
    dfa.start_state_forward(cache, &Input::new("")).map_err(|_| OperationStatus::EngineFailed)
}

/// Bytes between two looks at whether states were built.
const LOOK: usize = 8;

/// A scan under way.
pub struct Scan {
    context: Arc<Context>,
    dfa: DFA,
    cache: Cache,
    state: LazyStateID,
    /// Input bytes that are done.
    offset: u64,
    /// Matches of `state` that are out.
    told: usize,
    ended: bool,
}

impl Scan {
    pub fn new(request: &OperationRequest<'_>) -> Result<Scan, OperationStatus> {
        let context = request.context.ok_or(OperationStatus::InvalidContext)?.clone();
        let automaton = match &*context {
            Context::Patterns(patterns) => patterns.automaton(),
            Context::Key(_) => None,
        };
        let dfa = automaton.ok_or(OperationStatus::InvalidContext)?.clone();
        let mut cache = dfa.create_cache();
        let state = start(&dfa, &mut cache)?;
        Ok(Scan { context, dfa, cache, state, offset: 0, told: 0, ended: false })
    }

    /// Puts out the matches of the state that was just entered; false when there is no room for all.
    fn tell(&mut self, out: &mut [u8], written: &mut usize) -> bool {
        if !self.state.is_match() {
            return true;
        }
        let matches = self.dfa.match_len(&self.cache, self.state);
        // A match is seen with the byte behind it.
        let end = if self.ended { self.offset } else { self.offset.saturating_sub(1) };
        while self.told < matches {
            let Some(place) = out.get_mut(*written..*written + MATCH) else { return false };
            let pattern = self.dfa.match_pattern(&self.cache, self.state, self.told);
            place[..8].copy_from_slice(&(pattern.as_usize() as u64).to_le_bytes());
            place[8..].copy_from_slice(&end.to_le_bytes());
            *written += MATCH;
            self.told += 1;
        }
        true
    }
}

impl RunningOperation for Scan {
    fn step(
        &mut self,
        input: &[u8],
        last: bool,
        out: &mut [u8],
    ) -> Result<EngineStep, OperationStatus> {
        let failed = |_| OperationStatus::EngineFailed;
        let mut step = EngineStep::default();
        if !self.tell(out, &mut step.written) {
            return Ok(step);
        }
        let built = self.cache.memory_usage();
        for (nth, byte) in input.iter().enumerate() {
            if nth > 0 && nth % LOOK == 0 && self.cache.memory_usage() != built {
                return Ok(step);
            }
            self.state = self.dfa.next_state(&mut self.cache, self.state, *byte).map_err(failed)?;
            (self.offset, self.told) = (self.offset + 1, 0);
            step.read += 1;
            if self.state.is_tagged() && !self.tell(out, &mut step.written) {
                return Ok(step);
            }
        }
        if last && !self.ended {
            self.state = self.dfa.next_eoi_state(&mut self.cache, self.state).map_err(failed)?;
            (self.ended, self.told) = (true, 0);
        }
        step.finished = self.ended && self.tell(out, &mut step.written);
        Ok(step)
    }

    /// What states there are depends on the patterns, and which of them were built so far on what was searched: with other
    /// states built, the matches are the same.
    fn renew(&mut self, request: &OperationRequest<'_>) -> bool {
        let same = request.context.is_some_and(|context| Arc::ptr_eq(context, &self.context));
        let first = if same { start(&self.dfa, &mut self.cache).ok() } else { None };
        let Some(first) = first else { return false };
        (self.state, self.offset, self.told, self.ended) = (first, 0, 0, false);
        true
    }
}
