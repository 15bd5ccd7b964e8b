//! The protocol under seeded random schedules: messages lost, delayed, reordered and duplicated,
//! nodes and control plane dying, returning and freezing, clocks read out of order, a store that
//! fails, is lost or replaced by an older copy, while invariants are checked at every step.
//!
//! * I2: no two epochs of a function have live accesses at once.
//! * I4: after a revocation was answered, nothing of its epoch or an older one gets in, and the
//!   function is scrubbed before another epoch's borrower touches it.
//! * A lease expires after a whole time to live in which the control plane was awake and heard
//!   nothing, and then it does.
//! * A lease that becomes active is one that its lender lets in.
//! * When the faults stop, what was asked for is granted and what was crashed is offered again.
//!
//! A failing seed prints the command that replays it with its whole trace.

mod control;
mod patience;
mod recovery;
mod world;

use rackbus_lease::Config;

use world::World;

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const DEVICES: [(&str, &[&str]); 3] = [("alpha", &["nvme0"]), ("beta", &["nvme1"]), ("gamma", &[])];
const CONFIG: Config = Config { ttl: 3000, close_grace: 2000, resend: 100, silence: 4000 };
const AUTHORITY: usize = HOSTS.len();

/// splitmix64: a whole schedule from one number.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// A deliberate mistake, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A lender lets in whoever has a grant, without looking at its epoch.
    NoFence,
    /// A lender answers a revocation without cutting its borrower off.
    LazyRevoke,
    /// A node does not say which epochs and leases it was told of.
    Silence,
    /// An authority that was frozen takes the time for time in which nobody renewed.
    Sleepwalker,
    /// An authority whose store fails starts again from what is stored.
    FreshStart,
}

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), (String, String)> {
    let mut world = World::new(seed, mistake, traced);
    let steps = 100 + world.random.below(500);
    let outcome = (0..steps).try_for_each(|_| world.step()).and_then(|()| world.recover());
    outcome.map_err(|error| (error, world.trace.unwrap_or_default()))
}

fn replay(seed: u64) -> String {
    format!(
        "RACKBUS_LEASE_SEED={seed} cargo test -p rackbus-lease --test simulation -- --nocapture"
    )
}

#[test]
fn invariants_hold_under_random_schedules() {
    if let Ok(seed) = std::env::var("RACKBUS_LEASE_SEED") {
        let seed = seed.parse().expect("RACKBUS_LEASE_SEED is a number");
        if let Err((error, trace)) = run(seed, Mistake::None, true) {
            panic!("{trace}\nseed {seed}: {error}");
        }
        return;
    }
    const SEEDS: u64 = 100_000;
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (thread..SEEDS).step_by(threads as usize) {
                    if let Err((error, _)) = run(seed, Mistake::None, false) {
                        panic!("seed {seed}: {error}\nreplay it with: {}", replay(seed));
                    }
                }
            });
        }
    });
}

/// A simulation that finds no planted mistake would prove nothing.
#[test]
fn planted_mistakes_are_found() {
    for mistake in [
        Mistake::NoFence,
        Mistake::LazyRevoke,
        Mistake::Silence,
        Mistake::Sleepwalker,
        Mistake::FreshStart,
    ] {
        let found = (0..5000).find(|seed| run(*seed, mistake, false).is_err());
        assert!(found.is_some(), "{mistake:?} went unnoticed");
        println!("{mistake:?} is found by seed {found:?}");
    }
}
