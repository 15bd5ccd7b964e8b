//! How a part of a large copy is copied (pure).
//!
//! A part whose destination is in no cache streams. One that was copied to so lately that a cache
//! should hold it does not, since a receiver finds it there, and streaming would keep it out for
//! ever. But whether it does hold it, no size tells: a cache is shared, on a rented machine with
//! others than this system's. So for such parts the times of both ways are compared, and the faster
//! one is taken; the other one is tried again now and then, for as long as it needs to show itself.
//! So it is, apart, for parts that look as if a cache held them though nobody copied to them: some
//! loads are a thin sample.
//!
//! In the same manner one of two ways to stream is taken: page after page, or several pages at once.
//! Which is faster differs by a fifth from one kind of processor to the other, and not always for the
//! same one.

/// Parts between two trials of the slower way: at first, and when the last one changed what is chosen; twice as many
/// after each that did not, up to the most.
const BETWEEN_TRIALS: [u32; 2] = [8, 256];
/// Parts that a trial copies without streaming: those that a cache could hold, once to bring them
/// there and once to profit.
const TRIAL: u32 = 8;

/// How a part is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyMethod {
    /// By stores that leave it in the cache.
    Plain,
    /// By stores that pass the cache by, page after page.
    Stream,
    /// By the same stores, several pages at once.
    StreamPages,
}

/// What was chosen for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    /// How it is copied.
    pub way: CopyMethod,
    /// Which times it is compared by.
    kind: Kind,
}

/// Where a part is thought to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// In a cache: it was copied to lately.
    Again,
    /// In a cache: loads from it were fast.
    Warm,
    /// In no cache, by how long loads from it took.
    Cold,
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
    /// For parts that a cache may hold, [`Kind::Again`] and [`Kind::Warm`]: without streaming, or with it.
    caching: [Comparison; 2],
    /// For parts of each kind that stream: page after page, or several at once.
    streaming: [Comparison; 3],
}

/// How fast two ways were for parts of one kind, and when the slower one is tried again.
#[derive(Debug, Clone, Copy)]
struct Comparison {
    rates: [Rate; 2],
    /// Parts that a trial of either way takes.
    trials: [u32; 2],
    /// Parts since the last trial, and how many there are before the next.
    since_trial: u32,
    between: u32,
    /// The way that was chosen before the trial.
    before: usize,
}

impl Comparison {
    /// Of two ways, the first of which is chosen until both are known; the other one is tried after `between` parts.
    const fn new(trials: [u32; 2], between: u32) -> Comparison {
        Comparison { rates: [Rate(0); 2], trials, since_trial: 0, between, before: 0 }
    }

    /// Which way the next part goes, 0 or 1.
    fn next(&mut self) -> usize {
        self.since_trial += 1;
        let [first, second] = self.rates.map(|rate| rate.0);
        let chosen = usize::from(first != 0 && second != 0 && second < first);
        if self.since_trial <= self.between {
            self.before = chosen;
            return chosen;
        }
        let tried = 1 - self.before;
        if self.since_trial > self.between + self.trials[tried] {
            let [least, most] = BETWEEN_TRIALS;
            let changed = chosen != self.before;
            self.between = if changed { least } else { most.min(2 * self.between) };
            self.since_trial = 0;
            return chosen;
        }
        tried
    }
}

impl Choice {
    pub(super) const fn new() -> Choice {
        Choice {
            parts: [(0, 0); 16],
            next: 0,
            copied: 0,
            caching: [Comparison::new([TRIAL, 1], BETWEEN_TRIALS[0]); 2],
            // Both ways stream, so a look at the other one costs little: it comes at once.
            streaming: [Comparison::new([1, 1], 1); 3],
        }
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
            false if is_cold() => Kind::Cold,
            false => Kind::Warm,
        };
        // Only what a cache may hold is compared.
        let streams = self.caching.get_mut(kind as usize).is_none_or(|rates| rates.next() == 1);
        let way = match streams {
            false => CopyMethod::Plain,
            true if self.streaming[kind as usize].next() == 0 => CopyMethod::Stream,
            true => CopyMethod::StreamPages,
        };
        Chosen { way, kind }
    }

    /// The part took so many ticks.
    pub(super) fn took(&mut self, Chosen { way, kind }: Chosen, length: usize, ticks: u64) {
        let [page, pages] = &mut self.streaming[kind as usize].rates;
        match way {
            CopyMethod::Plain => {}
            CopyMethod::Stream => page.measured(ticks, length),
            CopyMethod::StreamPages => pages.measured(ticks, length),
        }
        let streamed = usize::from(way != CopyMethod::Plain);
        match self.caching.get_mut(kind as usize) {
            Some(rates) => rates.rates[streamed].measured(ticks, length),
            // What streams past the cache takes as long wherever it should have been.
            None => {
                for rates in &mut self.caching {
                    rates.rates[streamed].measured(ticks, length);
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
                let streams = chosen.way != CopyMethod::Plain;
                choice.took(chosen, PART, if streams { stream } else { plain });
                streamed += usize::from(2 * round >= rounds && streams);
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

    proptest! {
        /// Parts that no cache holds: the faster way to stream is found within a few, and followed when it changes.
        #[test]
        fn the_faster_way_to_stream_is_used(
            page in 1_000u64..1_000_000, percent in 20u64..500, noise in prop::collection::vec(0u64..3, 64),
        ) {
            prop_assume!(!(95..105).contains(&percent));
            let pages = page * percent / 100;
            let mut choice = Choice::new();
            let mut slower = |page: u64, pages: u64, count: usize| {
                let slow = if page < pages { CopyMethod::StreamPages } else { CopyMethod::Stream };
                let took = |way, nth: usize| {
                    let ticks = if way == CopyMethod::Stream { page } else { pages };
                    // Sometimes somebody else has the processor meanwhile.
                    ticks + if noise[nth % noise.len()] == 0 { ticks / 50 } else { 0 }
                };
                let part = |nth: usize| {
                    let chosen = choice.choose(nth * PART, PART, PART, || true);
                    choice.took(chosen, PART, took(chosen.way, nth));
                    usize::from(chosen.way == slow)
                };
                (0..count).map(part).sum::<usize>()
            };
            prop_assert!(slower(page, pages, 32) <= 8);
            prop_assert!(slower(page, pages, 2000) <= 40);
            let _ = slower(pages, page, 2000);
            prop_assert!(slower(pages, page, 2000) <= 40);
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
