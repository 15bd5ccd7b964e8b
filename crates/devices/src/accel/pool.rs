//! The engines of a device: threads that ask the shaper what to do next.
//!
//! All functions of the device put their operations here. [`rackbus_qos`] decides; what is measured is
//! the processor time of the engine's thread, so that what else runs on the machine is not charged to
//! a tenant.

mod held;
mod levels;
mod wipe;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use rackbus_memory::{ticks, wiping};
use rackbus_qos::{
    Capacity, EngineProfile, EngineSharing, EngineTurn, Estimate, LevelAdmission, MinimumRecord,
    OutputEstimate, QueuedMessage, SECOND, ServiceLevel, Shaping, SharingSettings, TenantId, Usage,
};
use rackbus_spec::accel::{OPERATIONS, Operation};

use super::capacity;
use super::clock::TickRate;
use super::job::EngineJob;
use super::profile::measure_all;

pub use held::HeldTurn;

/// Input bytes between two places where an operation can be interrupted.
pub(super) const GRANULE: u64 = 4096;
/// How often engines are measured at most until what their host is promised can be kept.
const MEASUREMENTS: u32 = 3;

/// How a device's engines are run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolOptions {
    /// Engines that work at the same time.
    pub workers: u32,
    /// Engine time of a turn, in nanoseconds.
    pub slice_ns: u64,
    /// What the host that has the device is promised for its own work.
    pub provider: Option<ServiceLevel>,
    /// Whether tenants are served by their shares, or their queue pairs in turn.
    pub shaping: Shaping,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions { workers: 1, slice_ns: 50_000, provider: None, shaping: Shaping::On }
    }
}

/// The engines of one device, and its shaper: for those that use it. The engines end with it.
#[derive(Debug)]
pub struct EnginePool(Arc<PoolEngines>);

impl Deref for EnginePool {
    type Target = PoolEngines;

    fn deref(&self) -> &PoolEngines {
        &self.0
    }
}

impl Drop for EnginePool {
    fn drop(&mut self) {
        self.lock().over = true;
        self.work.notify_all();
    }
}

/// What a pool consists of. Its engines have it too, so that it is there as long as one of them is.
#[derive(Debug)]
pub struct PoolEngines {
    options: PoolOptions,
    shared: Mutex<Shared>,
    work: Condvar,
    /// Some engine's thread has wiped its memory.
    wiped: Condvar,
    /// Counts what is submitted, for those who look for work.
    submitted: AtomicU64,
    begun: Instant,
    /// The processor's counter at `begun`.
    begun_ticks: u64,
    started: OnceLock<Started>,
}

/// What came of starting the engines.
#[derive(Debug)]
struct Started {
    /// What each operation costs on these engines, by its name.
    profiles: BTreeMap<String, EngineProfile>,
    /// The same by the operation's number.
    by_number: [Option<EngineProfile>; OPERATIONS.len() + 1],
    /// How fast the processor's counter counts.
    rate: TickRate,
    /// What the engines do together.
    capacity: Capacity,
    /// Why there are fewer engines than there should be.
    failed: Option<String>,
}

struct Shared {
    sharing: EngineSharing,
    admission: LevelAdmission,
    /// Tenants whose level stays promised while their functions have no model.
    held: BTreeSet<TenantId>,
    jobs: BTreeMap<u64, Arc<EngineJob>>,
    estimates: BTreeMap<(TenantId, u8), KindEstimate>,
    /// Input bytes of a tenant's longest message, by its level: for those who look without asking here.
    largest: BTreeMap<TenantId, Arc<AtomicU32>>,
    next_tag: u64,
    /// Engines that work: no more than there are, whoever's thread lends them its time.
    busy: u32,
    sleeping: u32,
    /// Operations whose engine failed.
    failed: u64,
    /// How often engines' threads were asked to wipe their memory, and up to which of these each has done so.
    wipes: u64,
    wiped: BTreeMap<u32, u64>,
    /// Nobody uses the pool any more: the engines end.
    over: bool,
}

/// What a tenant's operations of one kind will cost and put out.
#[derive(Default)]
struct KindEstimate {
    cost: Estimate,
    output: OutputEstimate,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

impl Shared {
    /// The operations of a turn, where there still are any.
    fn jobs_of(&self, turn: &EngineTurn) -> Vec<Option<Arc<EngineJob>>> {
        turn.pieces.iter().map(|piece| self.jobs.get(&piece.message.tag).cloned()).collect()
    }

    /// What profiles' costs of a tenant's operations of this kind are multiplied by.
    fn factor(&self, tenant: TenantId, kind: u8) -> f64 {
        self.estimates.get(&(tenant, kind)).map_or(1.0, |estimate| estimate.cost.factor())
    }

    /// Takes those of a tenant's operations that `which` says from before the engines.
    fn take_out(&mut self, tenant: TenantId, now: u64, which: impl Fn(Option<&EngineJob>) -> bool) {
        let Shared { sharing, jobs, .. } = self;
        let job = |message: &QueuedMessage| jobs.get(&message.tag).map(Arc::as_ref);
        for message in sharing.take_out(tenant, now, |_, message| which(job(message))) {
            jobs.remove(&message.tag);
        }
    }
}

impl EnginePool {
    /// A pool whose engines start when they are first needed.
    pub fn new(options: PoolOptions) -> Arc<EnginePool> {
        let PoolOptions { workers, slice_ns, shaping, .. } = options;
        let settings = SharingSettings { slice_ns, workers, ..SharingSettings::default() };
        let capacity = Capacity::of(workers);
        Arc::new(EnginePool(Arc::new(PoolEngines {
            options,
            shared: Mutex::new(Shared {
                sharing: EngineSharing::new(shaping, settings),
                admission: LevelAdmission::new(capacity, BTreeMap::new()).with_shaping(shaping),
                held: BTreeSet::new(),
                jobs: BTreeMap::new(),
                estimates: BTreeMap::new(),
                largest: BTreeMap::new(),
                next_tag: 0,
                busy: 0,
                sleeping: 0,
                failed: 0,
                wipes: 0,
                wiped: BTreeMap::new(),
                over: false,
            }),
            work: Condvar::new(),
            wiped: Condvar::new(),
            submitted: AtomicU64::new(0),
            begun: Instant::now(),
            begun_ticks: ticks::now(),
            started: OnceLock::new(),
        })))
    }

    /// Measures what operations cost, and starts the engines, once.
    ///
    /// # Errors
    /// When threads cannot be started: for every function of the device, which would wait for engines that there
    /// are not.
    pub fn start(&self) -> std::io::Result<()> {
        let started = self.started.get_or_init(|| {
            if !wiping::is_installed() {
                tracing::warn!(
                    "what engines free is not wiped, for the program's allocator does not do that"
                );
            }
            let (profiles, capacity, admission, mut failed) = self.measured();
            if capacity.engine_ns < Capacity::of(self.options.workers).engine_ns {
                let processors = capacity.engine_ns as f64 / SECOND as f64;
                let engines = self.options.workers;
                tracing::warn!(
                    engines,
                    processors,
                    "an accelerator has more engines than this machine has processors for"
                );
            }
            self.lock().admission = admission;
            for number in 0..self.options.workers {
                let pool = self.0.clone();
                let thread = std::thread::Builder::new().name(format!("accel {number}"));
                let cause = thread.spawn(move || worker::work(&pool, number)).err();
                failed = cause.map(|cause| cause.to_string()).or(failed);
            }
            let mut by_number = [const { None }; OPERATIONS.len() + 1];
            for operation in OPERATIONS {
                by_number[operation as usize] = profiles.get(operation.name()).cloned();
            }
            // The measurements took long enough for it to be known.
            let rate = TickRate::since((self.begun_ticks, self.begun));
            Started { profiles, by_number, rate, failed, capacity }
        });
        match &started.failed {
            Some(cause) => Err(std::io::Error::other(cause.clone())),
            None => Ok(()),
        }
    }
}

impl PoolEngines {
    /// What operations cost and the engines do together, what can be promised of that beside what the device's own host
    /// has, and why that host's level cannot be kept. What else ran on the machine may have made it look slower than it
    /// is: one that cannot be kept is tried with other measurements before it is refused.
    fn measured(
        &self,
    ) -> (BTreeMap<String, EngineProfile>, Capacity, LevelAdmission, Option<String>) {
        let PoolOptions { workers, provider, shaping, .. } = &self.options;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let (profiles, capacity) = (measure_all(), capacity::measure(*workers));
            let mut admission =
                LevelAdmission::new(capacity, profiles.clone()).with_shaping(*shaping);
            let reserved = provider.as_ref().map_or(Ok(()), |provider| admission.reserve(provider));
            let failed = reserved.err().map(|why| format!("`provider` cannot be kept: {why}"));
            if failed.is_none() || attempts == MEASUREMENTS {
                return (profiles, capacity, admission, failed);
            }
        }
    }

    /// What operations cost here, by name; nothing before it is started.
    pub fn profiles(&self) -> Option<&BTreeMap<String, EngineProfile>> {
        self.started.get().map(|started| &started.profiles)
    }

    /// What the engines have together; nothing before it is started.
    pub fn capacity(&self) -> Option<Capacity> {
        self.started.get().map(|started| started.capacity)
    }

    /// What an operation on so many bytes costs by the profiles, in nanoseconds; nothing where that is not measured.
    pub fn cost_ns(&self, operation: Operation, length: u64) -> f64 {
        let profile = |started: &'_ Started| {
            let profile = started.by_number[operation as usize].as_ref();
            profile.map(|profile| profile.cost_ns(length, 1000))
        };
        self.started.get().and_then(profile).unwrap_or(0.0)
    }

    /// How fast the processor's counter counts.
    fn rate(&self) -> TickRate {
        let measured = self.started.get().map(|started| started.rate);
        measured.unwrap_or_else(|| TickRate::since((self.begun_ticks, self.begun)))
    }

    /// How the engines are run.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// Something was done for a tenant outside of the engines, and took so much time of a processor.
    pub fn charge(&self, tenant: TenantId, engine_ns: u64) {
        let now = self.now_ns();
        self.lock().sharing.charge(tenant, engine_ns, now);
    }

    /// The same, in ticks of the processor's counter.
    pub fn charge_ticks(&self, tenant: TenantId, ticks: u64) {
        self.charge(tenant, self.rate().ns(ticks));
    }

    /// Whether a tenant owes so much that nothing more is to be done for it outside of the engines.
    pub fn owes(&self, tenant: TenantId) -> bool {
        let now = self.now_ns();
        self.lock().sharing.owes(tenant, now)
    }

    /// How far a tenant got its minimum.
    pub fn kept(&self, tenant: TenantId) -> Option<MinimumRecord> {
        let now = self.now_ns();
        self.lock().sharing.kept(tenant, now)
    }

    /// A tenant goes: what it waits for is not done any more. Its level is free, unless it is
    /// [held](PoolEngines::hold_level).
    pub fn leave(&self, tenant: TenantId) {
        let mut shared = self.lock();
        for message in shared.sharing.remove(tenant) {
            shared.jobs.remove(&message.tag);
        }
        if !shared.held.contains(&tenant) {
            shared.admission.release(tenant.0.into());
        }
        shared.largest.remove(&tenant);
        shared.estimates.retain(|(of, _), _| *of != tenant);
    }

    /// Nothing that a tenant waits for is done any more.
    pub fn clear(&self, tenant: TenantId) {
        let mut shared = self.lock();
        shared.take_out(tenant, self.now_ns(), |_| true);
        shared.estimates.retain(|(of, _), _| *of != tenant);
    }

    /// What a tenant gave up has no place before the engines any more: it would have it until its turn came, which for
    /// one that is let through slowly is never.
    pub fn forget_given_up(&self, tenant: TenantId) {
        self.lock().take_out(tenant, self.now_ns(), |job| job.is_none_or(EngineJob::is_given_up));
    }

    /// Operations before the engines.
    pub fn waiting(&self) -> usize {
        self.lock().jobs.len()
    }

    /// What a tenant has used since it came.
    pub fn usage(&self, tenant: TenantId) -> Option<Usage> {
        self.lock().sharing.usage(tenant)
    }

    /// Operations whose engine failed.
    pub fn failed(&self) -> u64 {
        self.lock().failed
    }

    /// Puts operations before the engines, each with the input bytes of it that are done.
    pub fn submit(&self, tenant: TenantId, queue: u16, jobs: Vec<(Arc<EngineJob>, usize)>) {
        if jobs.is_empty() {
            return;
        }
        let mut shared = self.lock();
        let count = jobs.len();
        let now = self.now_ns();
        for (job, done) in jobs {
            let tag = shared.next_tag;
            shared.next_tag += 1;
            let KindEstimate { cost, output } =
                shared.estimates.entry((tenant, job.kind)).or_default();
            let message = QueuedMessage {
                tag,
                ingress: job.input_length as u64,
                egress: output.of(job.output_length as u64),
                cost_ns: (job.profile_ns * cost.factor()) as u64,
                granule: GRANULE,
                done: done as u64,
            };
            shared.jobs.insert(tag, job);
            if !shared.sharing.submit(tenant, queue, message, now) {
                shared.jobs.remove(&tag);
            }
        }
        self.call(&shared, count);
    }

    /// Tells engines that there is something for `count` of them.
    fn call(&self, shared: &Shared, count: usize) {
        self.submitted.fetch_add(1, Ordering::Release);
        match (shared.sleeping, count) {
            (0, _) => {}
            (_, 1) => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn engines_end_with_the_last_handle_of_their_pool() {
        let pool = EnginePool::new(PoolOptions { workers: 8, ..PoolOptions::default() });
        pool.start().unwrap();
        let engines = Arc::downgrade(&pool.0);
        let second = pool.clone();
        drop(pool);
        assert!(engines.strong_count() > 1, "they stay as long as anybody has the pool");
        drop(second);
        let begun = Instant::now();
        while engines.strong_count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(10), "there still are engines");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
