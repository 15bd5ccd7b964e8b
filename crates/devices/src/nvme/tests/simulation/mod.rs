//! The whole storage path under seeded schedules: the real controller, file backing, endpoint and
//! pace of the engine, over a simulated file and io_uring ([`disk`]) and a guest with several
//! queues ([`guest`]), while leases come and go, memory is unmapped, processes die and power is
//! lost. What the guest sees is checked against what NVMe promises ([`model`]):
//!
//! * a read gives what was written last, or what is being written;
//! * what was flushed, written or read with FUA, written while the write cache was off, or there
//!   when a shutdown was complete survives a loss of power (I5); after a failure no flush, no turning
//!   off of the cache and no shutdown succeeds until the file was loaded anew (I7);
//! * a comparison fails only where the blocks may differ;
//! * after a reset, an unmap or the end of a lease nothing of the old is read or written (I4);
//! * where another process continues with the drive's state, all that holds as if nothing had
//!   happened: what was in flight completes, each command once ([`succession`]);
//! * every command completes, in all queues, however deep the others are, and however many
//!   mappings their memory lies in.
//!
//! A failing seed prints the command that replays it with its whole trace. `RACKBUS_SEEDS` sets
//! how many seeds are tried, `RACKBUS_SEED` replays one.

mod disk;
mod ends;
mod guest;
mod mapping;
mod model;
mod old;
mod succession;

use std::fmt::Write as _;

use rackbus_memory::AdaptiveSpin;
use rackbus_pci::Endpoint;
use rackbus_pci::endpoint::Clock;
use rackbus_pci::pace::{NextStep, Pace};
use rackbus_seeds::{Random, Simulation};

use super::super::arbitration::tests::FirstComesFirst;
use super::super::arbitration::{Arbiter, RoundRobin, TurnShares};
use super::super::backing::Backing;
use super::super::backing::parts::FileBacking;
use super::*;
use crate::nvme::BackingConfig;
use disk::{BLOCK, BLOCKS, Character, Disk};
use guest::SimulatedGuest;
use model::Promises;
use old::FlushMistake;
use succession::Mistake;

/// Polls that a command may take while nothing hinders it, on a fast and on a slow medium: more
/// than all commands of all queues need one after the other.
const PATIENCE_POLLS: [u64; 2] = [150, 6000];
/// What polls and turns may be about: small, so that few commands are many.
const SHARES: TurnShares =
    TurnShares { quantum: 8 << 10, poll: 16 << 10, least: 512, most: 32 << 10 };
/// How long memory may be unmapped before the controller gives up (its `UNREACHABLE_NS`).
const UNREACHABLE_NS: u64 = 100_000_000;

/// Bytes of the drive.
const SIZE: u64 = (BLOCK * BLOCKS) as u64;

/// A policy of before, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Current,
    OldFlush(FlushMistake),
    OldOrder,
    /// A process that goes on makes this mistake.
    Careless(Mistake),
}

struct DiskClock(Disk);

impl Clock for DiskClock {
    fn now_ns(&self) -> u64 {
        self.0.state().now_ns
    }

    fn ticks(&self) -> u64 {
        self.now_ns()
    }
}

/// Whether the engine sleeps, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Awake,
    Asleep(Option<u64>),
}

struct World {
    random: Random,
    policy: Policy,
    disk: Disk,
    host: TestHost,
    pace: Pace,
    engine: Engine,
    guest: SimulatedGuest,
    promises: Promises,
    /// Position in the order of events.
    at: u64,
    polls: u64,
    /// Since when the guest's memory is unmapped.
    unmapped: Option<u64>,
    /// What the guest's memory held when it was unmapped.
    saved: Vec<u8>,
    /// Since which poll the guest waits for the controller to be shut down.
    shutting_down: Option<u64>,
    trace: Option<String>,
}

impl World {
    fn new(seed: u64, policy: Policy, ram: &SharedMemory, traced: bool) -> Result<World, String> {
        let mut random = Random(seed);
        let character = Character {
            fails: random.chance(40),
            slow: random.chance(30),
            holes: random.chance(80),
            ranges: random.chance(60),
            coarse: random.chance(30),
            cold: [2, 30][random.below(2)],
        };
        // The old backing knows one way to zero: it is to be found out by its flushes alone.
        let character = match policy {
            Policy::OldFlush(_) => Character { holes: true, coarse: false, ..character },
            _ => character,
        };
        let disk = Disk::new(random.fork(), character);
        let host = TestHost::with_endpoint(World::drive(&disk, policy)?, ram.clone());
        let pace = Pace::new(AdaptiveSpin::default(), disk.state().now_ns);
        let guest = SimulatedGuest::new(random.fork());
        let mut world = World {
            random,
            policy,
            disk,
            host,
            pace,
            engine: Engine::Awake,
            guest,
            promises: Promises::new(),
            at: 1,
            polls: 0,
            unmapped: None,
            saved: Vec::new(),
            shutting_down: None,
            trace: traced.then(String::new),
        };
        world.log(format_args!("{character:?}"));
        world.set_up()?;
        Ok(world)
    }

    /// The drive over the file, as a process has it.
    fn drive(disk: &Disk, policy: Policy) -> Result<Endpoint, String> {
        let backing: Box<dyn Backing> = match policy {
            Policy::OldFlush(mistake) => Box::new(old::OldBacking::new(disk.clone(), mistake)),
            _ => Box::new(FileBacking::new(disk.clone(), SIZE, 1).map_err(|e| e.to_string())?),
        };
        World::controller(disk, policy, backing)
    }

    /// The controller with its endpoint, around `backing`.
    fn controller(
        disk: &Disk,
        policy: Policy,
        backing: Box<dyn Backing>,
    ) -> Result<Endpoint, String> {
        let arbiter: Box<dyn Arbiter> = match policy {
            Policy::OldOrder => Box::new(FirstComesFirst::new(SHARES.poll)),
            _ => Box::new(RoundRobin::with_shares(SHARES)),
        };
        let nvme = Nvme::with_backing(&NvmeConfig::memory(SIZE, "SIM"), backing);
        let nvme = nvme.map_err(|e| e.to_string())?.with_arbiter(arbiter);
        Ok(Endpoint::with_clock(Box::new(nvme), Box::new(DiskClock(disk.clone()))))
    }

    fn log(&mut self, what: std::fmt::Arguments<'_>) {
        if let Some(trace) = &mut self.trace {
            let now = self.disk.state().now_ns;
            let _ = writeln!(trace, "{:5} {now:12} {what}", self.at);
        }
    }

    fn tick(&mut self) -> u64 {
        self.at += 1;
        self.at
    }

    fn now_ns(&self) -> u64 {
        self.disk.state().now_ns
    }

    /// The guest enables the controller and makes its queues.
    fn set_up(&mut self) -> Result<(), String> {
        self.guest.restart();
        self.shutting_down = None;
        self.host.now = self.now_ns();
        self.host.endpoint.unmap_all();
        self.cut();
        self.host.map_ram();
        self.host.command_register(0b110);
        self.host.restart(RAM);
        self.engine = Engine::Awake;
        let queues = self.guest.queues;
        for qid in 1..=queues {
            self.host.create_pair(qid, ENTRIES);
        }
        if self.guest.shadowed {
            self.host.configure_shadow();
        }
        self.disk.state().now_ns = self.host.now;
        self.now_polled();
        Ok(())
    }

    /// The host's helpers poll by themselves: the pace takes over.
    fn now_polled(&mut self) {
        let now = self.now_ns();
        self.pace.disturbed(now);
        self.engine = Engine::Awake;
    }

    /// One poll of the engine, or none while it sleeps.
    fn run_engine(&mut self) -> Result<(), String> {
        let now = self.now_ns();
        if let Engine::Asleep(until) = self.engine {
            let rung = self.disk.state().has_completions();
            if !rung && until.is_none_or(|until| now < until) {
                return Ok(());
            }
            self.now_polled();
        }
        let failed_before = self.disk.state().sync_failed;
        let work = self.host.endpoint.poll(self.pace.now_ns());
        self.polls += 1;
        let clock = self.disk.clone();
        // A spin takes as long as it takes, and a yield as long as others like.
        clock.state().now_ns += 200;
        match self.pace.after(work, || clock.state().now_ns) {
            NextStep::Poll | NextStep::Move | NextStep::LookForIdle | NextStep::Check => {}
            NextStep::Yield => {
                self.disk.state().now_ns += self.random.below(50_000) as u64;
                self.pace.returned(self.now_ns());
            }
            NextStep::Sleep(until) => {
                if self.host.endpoint.park() {
                    self.log(format_args!("the engine sleeps until {until:?}"));
                    self.engine = Engine::Asleep(until);
                }
            }
        }
        self.harvest(failed_before)?;
        self.take_shutdown(failed_before)
    }

    /// Takes in what the controller has posted.
    fn harvest(&mut self, failed_before: bool) -> Result<(), String> {
        self.take_completions(failed_before)?;
        if self.unmapped.is_some() {
            return Ok(());
        }
        for qid in 0..=self.guest.queues {
            // Drivers tell of what they have taken now or later; greedy ones now.
            if (self.guest.greedy || self.random.chance(60)) && self.host.give_back(qid) {
                self.now_polled();
            }
        }
        Ok(())
    }

    /// The same without a word to the controller.
    fn take_completions(&mut self, failed_before: bool) -> Result<(), String> {
        self.take_reverted()?;
        if self.unmapped.is_some() {
            return Ok(());
        }
        for qid in 0..=self.guest.queues {
            while let Some(cqe) = self.host.take_completion(qid) {
                let at = self.tick();
                self.log(format_args!("queue {qid}: {} ended {:?}", cqe.cid, cqe.status()));
                let fails = self.disk.state().failures > 0;
                let trouble = self.host.endpoint.health().trouble().is_some();
                let sync_failed = failed_before;
                let state = guest::Circumstances { at, fails, sync_failed, trouble };
                self.guest.completed(&self.host, &mut self.promises, qid, cqe, state)?;
            }
        }
        Ok(())
    }

    /// Pages that the system lost.
    fn take_reverted(&mut self) -> Result<(), String> {
        let reverted = std::mem::take(&mut self.disk.state().reverted);
        for pages in reverted {
            for block in pages.first_block..pages.first_block + pages.blocks {
                let at = self.tick();
                let version = guest::version_of(self.disk.state().content(block))?;
                self.promises.reverted(block, version, at)?;
            }
        }
        Ok(())
    }

    fn submit_some(&mut self) {
        if self.unmapped.is_some() || self.shutting_down.is_some() {
            return;
        }
        if self.random.chance(4) {
            let moment = guest::Moment { at: self.tick(), polls: self.polls };
            if let Some(what) = self.guest.submit_cache(&mut self.host, moment) {
                self.log(format_args!("queue 0: {what}"));
                self.host.ring(0);
                self.now_polled();
            }
        }
        let qid = 1 + self.random.below(usize::from(self.guest.queues)) as u16;
        let burst = if self.random.chance(20) { 15 } else { 1 + self.random.below(4) };
        self.submit_to(qid, burst);
    }

    fn submit_to(&mut self, qid: u16, burst: usize) {
        for _ in 0..burst {
            let at = self.tick();
            let moment = guest::Moment { at, polls: self.polls };
            let Some(what) = self.guest.submit(&mut self.host, &mut self.promises, qid, moment)
            else {
                break;
            };
            self.log(format_args!("queue {qid}: {what}"));
        }
        if self.host.ring(qid) {
            self.now_polled();
        }
    }

    /// All that the guest waits for is given up.
    fn give_up(&mut self) {
        let at = self.tick();
        self.guest.give_up(&mut self.promises, at);
    }

    fn step(&mut self) -> Result<(), String> {
        self.disk.state().now_ns += 1 + self.random.below(3000) as u64;
        self.disk.state().advance();
        self.take_reverted()?;
        match self.random.below(100) {
            0..20 => self.submit_some(),
            20..90 => {
                self.run_engine()?;
                if self.guest.greedy && self.unmapped.is_none() && self.shutting_down.is_none() {
                    self.submit_to(1, ENTRIES.into());
                }
            }
            90..91 if self.unmapped.is_none() => self.unmap()?,
            90..94 => self.map()?,
            94 => self.succeed()?,
            95 if self.random.chance(15) => self.shut_down()?,
            95..98 if self.unmapped.is_some() && self.random.chance(20) => {
                self.disk.state().now_ns += UNREACHABLE_NS / 2;
            }
            98 if self.random.chance(50) => self.reset()?,
            99 if self.random.chance(30) => self.die()?,
            _ => {}
        }
        self.check_alive()
    }

    /// The controller is up, or had a reason not to be, and no command is forgotten.
    fn check_alive(&mut self) -> Result<(), String> {
        if self.host.csts().cfs() {
            let now = self.now_ns();
            let reachable = self.unmapped.is_none_or(|since| now < since + UNREACHABLE_NS);
            // What could not be made durable keeps the drive from being shut down, and the drive says so. It may know of a
            // failure that a process before it was told of last.
            let failed = self.disk.state().failures > 0;
            let lost = failed && self.host.endpoint.health().trouble().is_some();
            let lost = lost && self.shutting_down.is_some();
            if reachable && !lost {
                return Err("a fatal status without a reason".to_owned());
            }
            self.log(format_args!("the controller gave up"));
            return self.reset();
        }
        if self.unmapped.is_some() {
            return Ok(());
        }
        let patience = PATIENCE_POLLS[usize::from(self.disk.state().character.slow)];
        match self.shutting_down {
            Some(since) if since + 2 * patience < self.polls => {
                Err("a shutdown waits and nothing hinders it".to_owned())
            }
            // What was not taken in time is not done any more.
            Some(_) => Ok(()),
            None => self.guest.check_waiting(self.polls, patience),
        }
    }

    /// Nothing fails any more: all commands end, and the drive holds what it should.
    fn settle(&mut self) -> Result<(), String> {
        self.map()?;
        self.disk.state().character.fails = false;
        self.log(format_args!("settling"));
        for _ in 0..PATIENCE_POLLS[1] {
            if !self.guest.is_waiting() && self.shutting_down.is_none() {
                break;
            }
            self.disk.state().now_ns += 50_000;
            self.disk.state().advance();
            self.take_reverted()?;
            for qid in 0..=self.guest.queues {
                if self.host.give_back(qid) {
                    self.now_polled();
                }
            }
            self.run_engine()?;
            self.check_alive()?;
        }
        if self.shutting_down.is_some() {
            return Err("a shutdown never ended".to_owned());
        }
        self.guest.check_none_waits()?;
        self.fall_asleep()?;
        for block in 0..BLOCKS {
            let at = self.tick();
            let version = guest::version_of(self.disk.state().content(block))?;
            self.promises.read(block, version, at, at + 1)?;
        }
        self.die_and_look()
    }

    /// With nothing to do the engine sleeps, and nothing wakes it.
    fn fall_asleep(&mut self) -> Result<(), String> {
        for _ in 0..PATIENCE_POLLS[1] {
            if self.engine == Engine::Asleep(None) && !self.disk.state().has_completions() {
                return Ok(());
            }
            self.disk.state().now_ns += 50_000;
            self.disk.state().advance();
            self.run_engine()?;
        }
        Err(format!("the engine is {:?} and there is nothing to do", self.engine))
    }

    /// A loss of power at the end: whatever was acknowledged is there.
    fn die_and_look(&mut self) -> Result<(), String> {
        self.disk.state().die(true);
        self.give_up();
        for block in 0..BLOCKS {
            let at = self.tick();
            let version = guest::version_of(self.disk.state().content(block))?;
            self.promises.survived(block, version, at)?;
        }
        Ok(())
    }
}

/// Memory for the guest of one simulation after the other.
fn memory() -> SharedMemory {
    SharedMemory::create("guest", guest::RAM_BYTES).unwrap()
}

fn run(
    seed: u64,
    policy: Policy,
    ram: &SharedMemory,
    traced: bool,
) -> Result<(), (String, String)> {
    let world = World::new(seed, policy, ram, traced);
    let mut world = world.map_err(|error| (error, String::new()))?;
    let steps = 50 + world.random.below(350);
    let outcome = (0..steps).try_for_each(|_| world.step()).and_then(|()| world.settle());
    // Whatever happened, nobody waits for the medium for ever.
    world.disk.state().die(true);
    outcome.map_err(|error| (error, world.trace.take().unwrap_or_default()))
}

#[test]
fn what_nvme_promises_holds_under_random_schedules() {
    let test = "-p rackbus-devices --lib nvme::tests::simulation";
    Simulation { test, usual: 100_000 }.run_with(memory, |ram, seed, traced| {
        let outcome = run(seed, Policy::Current, ram, traced);
        outcome.map_err(|(error, trace)| format!("{error}\n{trace}"))
    });
}

/// A simulation that does not find the defects of before would prove nothing.
#[test]
fn policies_of_before_are_found_out() {
    let waits = "waits and nothing hinders it";
    let reasons: [(Policy, &[&str]); 8] = [
        (Policy::OldFlush(FlushMistake::Early), &["something newer was durable"]),
        (Policy::OldFlush(FlushMistake::Forgets), &["after a failure"]),
        (Policy::OldOrder, &[waits]),
        (Policy::Careless(Mistake::CommandsForgotten), &[waits, "never ended"]),
        (Policy::Careless(Mistake::CommandsTwice), &["was not outstanding"]),
        (Policy::Careless(Mistake::HeldForgotten), &[waits, "never ended"]),
        (Policy::Careless(Mistake::CacheOn), &["something newer was durable"]),
        (Policy::Careless(Mistake::NoWitness), &["after a failure"]),
    ];
    for (policy, reasons) in reasons {
        // By what it does wrong: it has other faults, such as not telling of a failed medium.
        let found = (0..10_000).find_map(|seed| {
            let (error, _) = run(seed, policy, &memory(), false).err()?;
            reasons.iter().any(|reason| error.contains(reason)).then_some((seed, error))
        });
        let (seed, error) = found.unwrap_or_else(|| panic!("{policy:?} went unnoticed"));
        println!("{policy:?} is found by seed {seed}: {error}");
    }
}
