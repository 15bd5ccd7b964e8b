//! The protocol under seeded random schedules: messages lost, delayed, reordered and duplicated,
//! nodes and control plane dying, returning and freezing, nodes' processes
//! replaced by others that go on, clocks read out of order, nodes cut off from the control plane in one direction or
//! both, each with a clock of its own that is up to 4 % faster or slower, a store that
//! fails, is lost or replaced by an older copy, while invariants are checked at every step.
//!
//! * I2: no two epochs of a function have live accesses at once.
//! * I4: after a revocation was answered, nothing of its epoch or an older one gets in, and the
//!   function is scrubbed before another epoch's borrower touches it.
//! * A lease expires after a whole time to live in which the control plane was awake and heard
//!   nothing, and then it does.
//! * Where leases are strict, as with every other seed, no lender serves an epoch beyond its time to live by its own
//!   clock, and who borrowed it has ended it before by its own.
//! * A change of a lease's service level is made or refused once the faults stop, and the records then say
//!   what its borrower has.
//! * Devices are offered and withdrawn: one in use is not released, and once the faults stop the records say what the
//!   nodes have.
//! * Borrowers take turns on functions: each that does has one once the faults stop.
//! * Where fronts run at their borrower, one of a function at a time reaches its user's memory, whatever its lease,
//!   and no lease is answered as closed while one of it does.
//! * A lease that becomes active is one that its lender lets in.
//! * When the faults stop, what was asked for is granted and what was crashed is offered again.
//!
//! A failing seed prints the command that replays it with its whole trace.

mod clocks;
mod control;
mod fronts;
mod patience;
mod recovery;
mod turns;
mod work;
mod world;

use rackbus_lease::Config;
use rackbus_seeds::Simulation;

use world::World;

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];
const DEVICES: [(&str, &[&str]); 3] = [("alpha", &["nvme0"]), ("beta", &["nvme1"]), ("gamma", &[])];
const CONFIG: Config =
    Config { ttl: 3000, close_grace: 2000, resend: 100, silence: 4000, strict_ttl: false };
const AUTHORITY: usize = HOSTS.len();

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
    /// A process that goes on for another one knows nothing of what that one was told.
    Amnesia,
    /// An authority whose store fails starts again from what is stored.
    FreshStart,
    /// A node gives its borrower the service level that it refuses.
    RefusedLevel,
    /// A front begins although a former one of its function has not released its user's memory.
    NoSuccession,
    /// A front waits for a former one of its lease, and for none of another lease of its function.
    SuccessionByLease,
    /// A front begins under a lease that is not served any more.
    LateFront,
    /// A front counts as ended when its conversation has, before it has released its user's memory.
    EarlyEnd,
    /// A lease is answered as closed when its socket is gone, whether or not a front of it runs.
    HastyClose,
    /// A process that goes on for another one does not ask for the fronts that it continues.
    ForgottenFronts,
    /// A lender does not look at its clock.
    NoClock,
    /// A borrower counts a renewal from when it was answered.
    LateRenewal,
    /// The control plane answers a renewal of which the lender has not heard.
    UnheardRenewal,
}

fn run(seed: u64, mistake: Mistake, traced: bool) -> Result<(), (String, String)> {
    let mut world = World::new(seed, mistake, traced);
    let steps = 100 + world.random.below(500);
    let outcome = (0..steps).try_for_each(|_| world.step()).and_then(|()| world.recover());
    outcome.map_err(|error| (error, world.trace.unwrap_or_default()))
}

#[test]
fn invariants_hold_under_random_schedules() {
    let simulation = Simulation { test: "-p rackbus-lease --test simulation", usual: 100_000 };
    simulation.run(|seed, traced| {
        run(seed, Mistake::None, traced).map_err(|(error, trace)| format!("{error}\n{trace}"))
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
        Mistake::Amnesia,
        Mistake::RefusedLevel,
        Mistake::NoSuccession,
        Mistake::SuccessionByLease,
        Mistake::LateFront,
        Mistake::EarlyEnd,
        Mistake::HastyClose,
        Mistake::ForgottenFronts,
        Mistake::NoClock,
        Mistake::LateRenewal,
        Mistake::UnheardRenewal,
    ] {
        let found = (0..20_000).find_map(|seed| Some((seed, run(seed, mistake, false).err()?.0)));
        let (seed, error) = found.unwrap_or_else(|| panic!("{mistake:?} went unnoticed"));
        println!("{mistake:?} is found by seed {seed}: {error}");
    }
}
