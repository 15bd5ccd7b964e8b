//! Whether a part of a large copy streams (pure).
//!
//! A part whose destination is in no cache streams. One that was copied to so lately that a cache
//! should hold it does not, since a receiver finds it there, and streaming would keep it out for
//! ever. But whether it does hold it, no size tells: a cache is shared, on a rented machine with
//! others than this system's. So for such parts the times of both ways are compared, and the faster
//! one is taken; the other one is tried again now and then, for as long as it needs to show itself.
//! So it is, apart, for parts that look as if a cache held them though nobody copied to them: some
//! loads are a thin sample.

/// Parts of a kind between two trials of the other way: at first, and when the last one changed
/// what is chosen; twice as many after each that did not, up to the most.
const BETWEEN_TRIALS: [u32; 2] = [8, 256];
/// Parts that a trial copies without streaming: those that a cache could hold, once to bring them
/// there and once to profit.
const TRIAL: u32 = 8;

/// How a part is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyMethod {
    /// By stores that leave it in the cache.
    Plain,
    /// By stores that pass the cache by.
    Stream,
}

/// What was chosen for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    /// How it is copied.
    pub way: CopyMethod,
    /// Which times it is compared by; `None` where it is in no cache.
    kind: Option<Kind>,
}

/// Why a cache should hold a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It was copied to lately.
    Again,
    /// Loads from it were fast.
    Warm,
}

/// Time per mebibyte, smoothed; 0 until it was measured.
#[derive(Debug, Clone, Copy)]
struct Rate(u64);

impl Rate {
    fn measured(&mut self, ticks: u64, length: usize) {
        let new = (u128::from(ticks) << 20) / length.max(1) as u128;
        let new = u64::try_from(new).unwrap_or(u64::MAX).max(1);
        // A time that is too long has many reasons (somebody else had the processor), one that is
        // too short has none.
        self.0 = match self.0 {
            0 => new,
            old if new < old => old - (old - new) / 2,
            old => old + (new - old) / 8,
        };
    }
}

/// What a thread has copied lately, and how fast it went.
#[derive(Debug)]
pub(super) struct Choice {
    /// The parts copied to last, and what had been copied then.
    parts: [(usize, u64); 16],
    next: usize,
    copied: u64,
    by_kind: [Rates; 2],
}

/// How fast parts of one kind went, and when the other way is tried.
#[derive(Debug, Clone, Copy)]
struct Rates {
    plain: Rate,
    streamed: Rate,
    /// Parts since the last trial, and how many there are before the next.
    since_trial: u32,
    between: u32,
    /// Streaming was chosen before the trial.
    streamed_before: bool,
}

impl Rates {
    const fn new() -> Rates {
        let (plain, streamed, between) = (Rate(0), Rate(0), BETWEEN_TRIALS[0]);
        Rates { plain, streamed, since_trial: 0, between, streamed_before: false }
    }

    /// How the next part goes.
    fn next(&mut self) -> CopyMethod {
        self.since_trial += 1;
        let known = self.plain.0 != 0 && self.streamed.0 != 0;
        let streams = known && self.streamed.0 < self.plain.0;
        let chosen = if streams { CopyMethod::Stream } else { CopyMethod::Plain };
        if self.since_trial <= self.between {
            self.streamed_before = streams;
            return chosen;
        }
        let before = self.streamed_before;
        let trial = if before { TRIAL } else { 1 };
        if self.since_trial > self.between + trial {
            let [least, most] = BETWEEN_TRIALS;
            self.between = if streams == before { most.min(2 * self.between) } else { least };
            self.since_trial = 0;
            return chosen;
        }
        if before { CopyMethod::Plain } else { CopyMethod::Stream }
    }
}

impl Choice {
    pub(super) const fn new() -> Choice {
        Choice { parts: [(0, 0); 16], next: 0, copied: 0, by_kind: [const { Rates::new() }; 2] }
    }

    /// Notes a part; whether it was copied to before, with at most `cache` bytes since.
    fn comes_again(&mut self, start: usize, length: usize, cache: usize) -> bool {
        self.copied += length as u64;
        match self.parts.iter_mut().find(|(known, _)| *known == start) {
            Some((_, at)) => self.copied - std::mem::replace(at, self.copied) <= cache as u64,
            None => {
                self.parts[self.next] = (start, self.copied);
                self.next = (self.next + 1) % self.parts.len();
                false
            }
        }
    }

    /// Chooses for the part of `length` bytes at `start`, where a cache may hold `cache` bytes of
    /// what is copied to.
    pub(super) fn choose(
        &mut self,
        start: usize,
        length: usize,
        cache: usize,
        is_cold: impl FnOnce() -> bool,
    ) -> Chosen {
        let kind = match self.comes_again(start, length, cache) {
            true => Kind::Again,
            false if is_cold() => return Chosen { way: CopyMethod::Stream, kind: None },
            false => Kind::Warm,
        };
        Chosen { way: self.by_kind[kind as usize].next(), kind: Some(kind) }
    }

    /// The part took so many ticks.
    pub(super) fn took(&mut self, chosen: Chosen, length: usize, ticks: u64) {
        match (chosen.way, chosen.kind) {
            (CopyMethod::Plain, Some(kind)) => {
                self.by_kind[kind as usize].plain.measured(ticks, length)
            }
            (CopyMethod::Stream, Some(kind)) => {
                self.by_kind[kind as usize].streamed.measured(ticks, length);
            }
            // What streams past the cache takes as long wherever it should have been.
            (_, None) => {
                for rates in &mut self.by_kind {
                    rates.streamed.measured(ticks, length);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PART: usize = 4 << 20;

    /// Copies `parts` parts in turns, `rounds` times; how many of the last half were streamed.
    fn streamed(
        choice: &mut Choice,
        parts: usize,
        rounds: usize,
        plain: u64,
        stream: u64,
    ) -> usize {
        let mut streamed = 0;
        for round in 0..rounds {
            for part in 0..parts {
                let cold = round == 0;
                let chosen = choice.choose(part * PART, PART, 4 * PART, || cold);
                let ticks = if chosen.way == CopyMethod::Stream { stream } else { plain };
                choice.took(chosen, PART, ticks);
                streamed += usize::from(2 * round >= rounds && chosen.way == CopyMethod::Stream);
            }
        }
        streamed
    }

    proptest! {
        #[test]
        fn repeated_copies_use_the_faster_method(
            parts in 1usize..5, plain in 1_000u64..1_000_000, percent in 20u64..500,
        ) {
            prop_assume!(!(95..105).contains(&percent));
            let stream = plain * percent / 100;
            let (rounds, mut choice) = (2000, Choice::new());
            let count = parts * rounds / 2;
            let share = streamed(&mut choice, parts, rounds, plain, stream) as f64 / count as f64;
            prop_assert!(if stream < plain { share > 0.95 } else { share < 0.01 }, "{share}");
            // And when that changes, the other one.
            let share = streamed(&mut choice, parts, rounds, stream, plain) as f64 / count as f64;
            prop_assert!(if plain < stream { share > 0.95 } else { share < 0.01 }, "{share}");
        }
    }

    #[test]
    fn a_part_comes_again_while_the_cache_could_hold_what_was_copied_since() {
        let mut recent = Choice::new();
        assert!(!recent.comes_again(0x1000, 10, 100));
        assert!(recent.comes_again(0x1000, 10, 100));
        assert!(!recent.comes_again(0x2000, 95, 100));
        assert!(!recent.comes_again(0x1000, 10, 100), "105 bytes since");
        // Only so many are remembered.
        (0..16).for_each(|nth| assert!(!recent.comes_again(0x10_000 + nth, 1, 100)));
        assert!(!recent.comes_again(0x1000, 1, 100));
    }
}
