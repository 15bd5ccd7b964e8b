//! What the simulations have in common: a schedule from a number, and which numbers to run.

/// splitmix64: a whole schedule from one number.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Runs the seed of `RACKBUS_SEED` with its trace, or as many as `RACKBUS_SEEDS` says, else
/// `usual`, until one fails: then says how to replay it. `test` is the name of the test program.
pub fn for_seeds(test: &str, usual: u64, run: impl Fn(u64, bool) -> Result<(), String> + Sync) {
    if let Some(seed) = number("RACKBUS_SEED") {
        if let Err(error) = run(seed, true) {
            panic!("seed {seed}: {error}");
        }
        return;
    }
    let seeds = number("RACKBUS_SEEDS").unwrap_or(usual);
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let run = &run;
            scope.spawn(move || {
                for seed in (thread..seeds).step_by(threads as usize) {
                    let one = std::panic::AssertUnwindSafe(|| run(seed, false));
                    let error = match std::panic::catch_unwind(one) {
                        Ok(Ok(())) => continue,
                        Ok(Err(error)) => error,
                        Err(_) => "a check failed, see above".to_owned(),
                    };
                    panic!(
                        "seed {seed}: {error}\nreplay it with: RACKBUS_SEED={seed} cargo test \
                         -p rackbus-segment --test {test} -- --nocapture"
                    );
                }
            });
        }
    });
}
