#![forbid(unsafe_code)]
//! Seeded simulations: a schedule from a number, which numbers to run, and how to replay one.
//!
//! For tests. `RACKBUS_SEED=N` runs one seed with its trace, `RACKBUS_SEEDS=N` as many as that;
//! without either, a simulation runs as many as it usually does. A failing seed is reported with the
//! command that replays it, and [`RAN`] says how many were run, which `make sim` adds up.
//!
//! Beside that, what tests of saved states have in common ([`stored`]), and huge pages for tests ([`huge`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub mod huge;
pub mod stored;

/// What the line that says how many seeds were run begins with.
pub const RAN: &str = "seeds run:";
/// What lines begin with that say how many are left and for how long, of a run that takes minutes: `make sim` shows them.
pub const LEFT: &str = "seeds left:";
/// How often that is said.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// splitmix64: a whole schedule from one number.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next number, of 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it is endless, so no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// True in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// Another generator, so that what one part draws does not move the other.
    pub fn fork(&mut self) -> Random {
        Random(self.next())
    }
}

/// A simulation: how many seeds it usually runs, and the test that does it.
#[derive(Debug, Clone, Copy)]
pub struct Simulation {
    /// The arguments of `cargo test` that run it alone: `-p rackbus-lease --test simulation`.
    pub test: &'static str,
    /// Seeds that it runs when nobody says otherwise.
    pub usual: u64,
}

impl Simulation {
    /// Runs the seeds that the environment asks for. `run` is given a seed and whether to print its
    /// trace.
    ///
    /// # Panics
    /// When a seed fails, with the command that replays it.
    pub fn run(&self, run: impl Fn(u64, bool) -> Result<(), String> + Sync) {
        self.run_with(|| (), |(), seed, traced| run(seed, traced));
    }

    /// The same with something that each thread makes once (`prepare`) and uses for all its seeds.
    ///
    /// # Panics
    /// When a seed fails, with the command that replays it.
    pub fn run_with<T>(
        &self,
        prepare: impl Fn() -> T + Sync,
        run: impl Fn(&mut T, u64, bool) -> Result<(), String> + Sync,
    ) {
        if let Some(seed) = number("RACKBUS_SEED") {
            if let Err(error) = run(&mut prepare(), seed, true) {
                panic!("seed {seed}: {error}");
            }
            return;
        }
        let (ran, failed) = run_seeds(number("RACKBUS_SEEDS").unwrap_or(self.usual), prepare, run);
        println!("{RAN} {ran}");
        if let Some((seed, error)) = failed {
            let test = self.test;
            panic!(
                "seed {seed}: {error}\n\
                 replay it with: RACKBUS_SEED={seed} cargo test {test} -- --nocapture"
            );
        }
    }
}

/// Runs the first `seeds` seeds on all processors until one fails; how many were run, and the one
/// that failed.
fn run_seeds<T>(
    seeds: u64,
    prepare: impl Fn() -> T + Sync,
    run: impl Fn(&mut T, u64, bool) -> Result<(), String> + Sync,
) -> (u64, Option<(u64, String)>) {
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    let (ran, stop, failed) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(None));
    let begun = Instant::now();
    let work = |first: u64| {
        let (mut own, mut said) = (prepare(), begun);
        for seed in (first..seeds).step_by(threads as usize) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let before = ran.fetch_add(1, Ordering::Relaxed);
            if first == 0 && said.elapsed() >= SAID_EVERY {
                said = Instant::now();
                println!("{}", left(before, seeds, begun.elapsed()));
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| run(&mut own, seed, false)));
            let error = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error,
                Err(_) => "a check failed, see above".to_owned(),
            };
            stop.store(true, Ordering::Relaxed);
            failed.lock().expect("nobody panics with it").get_or_insert((seed, error));
        }
    };
    std::thread::scope(|scope| {
        for first in 0..threads {
            let work = &work;
            scope.spawn(move || work(first));
        }
    });
    (ran.into_inner(), failed.into_inner().expect("nobody panics with it"))
}

/// The line that says of `seeds` how many are left, and for how long, where `ran` of them took `elapsed`.
fn left(ran: u64, seeds: u64, elapsed: Duration) -> String {
    let left = seeds - ran;
    let minutes = elapsed.as_secs_f64() / 60.0 * left as f64 / ran.max(1) as f64;
    format!("{LEFT} {left} of {seeds}, about {:.0} min", minutes.ceil())
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not `{text}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_is_run_once() {
        let seen = Mutex::new(Vec::new());
        let (ran, failed) = run_seeds(
            1000,
            || (),
            |(), seed, traced| {
                assert!(!traced);
                seen.lock().unwrap().push(seed);
                Ok(())
            },
        );
        assert_eq!((ran, failed), (1000, None));
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1000));
    }

    #[test]
    fn what_is_left_takes_as_long_as_what_was_run() {
        let minute = Duration::from_secs(60);
        assert_eq!(left(1000, 4000, minute), "seeds left: 3000 of 4000, about 3 min");
        assert_eq!(left(3990, 4000, minute), "seeds left: 10 of 4000, about 1 min");
        assert_eq!(left(0, 10, minute), "seeds left: 10 of 10, about 10 min");
    }

    #[test]
    fn the_first_failure_is_reported_and_ends_the_run() {
        let wrong = |(): &mut (), seed: u64, _| match seed {
            17 => Err("it is seventeen".to_owned()),
            _ => Ok(()),
        };
        let (ran, failed) = run_seeds(u64::MAX, || (), wrong);
        assert!(ran >= 9, "{ran}");
        assert_eq!(failed, Some((17, "it is seventeen".to_owned())));
        let (_, failed) = run_seeds(
            100,
            || (),
            |(), seed, _| match seed {
                40 => panic!("planted"),
                _ => Ok(()),
            },
        );
        assert_eq!(failed, Some((40, "a check failed, see above".to_owned())));
    }
}
