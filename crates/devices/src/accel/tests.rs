//! The pool under tenants that share it, fail, and go.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rackbus_memory::{Access, Event, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::{Endpoint, Function, Work};
use rackbus_qos::TenantId;
use rackbus_spec::accel::{
    COMPLETION_SIZE, Completion, DESCRIPTOR_SIZE, Descriptor, Operation, OperationStatus,
    registers as reg, shadow,
};
use rackbus_spec::pcie::Command;

use super::buffer::EngineBuffer;
use super::engines::Spare;
use super::engines::{EngineStep, RunningOperation};
use super::gather::Gather;
use super::job::{EngineJob, JobEngines, JobInput};
use super::outbox::CompletionOutbox;
use super::pipeline::Pipeline;
use super::*;

mod at_once;
mod chain;
mod changing;
mod class;
mod foreign;
mod peers;
mod polled;
mod saved;
mod shaping;

/// An engine that fails as no engine should.
struct Panics;

impl RunningOperation for Panics {
    fn step(&mut self, _: &[u8], _: bool, _: &mut [u8]) -> Result<EngineStep, OperationStatus> {
        std::panic::resume_unwind(Box::new("planted"))
    }
}

fn pipeline(operation: Operation, engine: Box<dyn RunningOperation>) -> Pipeline {
    let mut pipeline = Pipeline::default();
    pipeline.push(operation, engine, EngineBuffer::default());
    pipeline
}

fn job(
    engine: Box<dyn RunningOperation>,
    number: u64,
    outbox: &Arc<CompletionOutbox>,
) -> (Arc<EngineJob>, usize) {
    // Of a kind whose input goes through engines.
    let start = Box::new(|_: &mut Spare| Ok(pipeline(Operation::Sha256, engine)));
    let memory = (Gather::default(), Gather::default());
    let engines = JobEngines::Waiting(start, 0);
    let order = JobInput { number, kind: 3, profile_ns: 1000.0, engines, memory };
    (Arc::new(EngineJob::new(order, outbox.clone())), 0)
}

fn wait(outbox: &CompletionOutbox) -> Vec<super::job::FinishedJob> {
    let begun = Instant::now();
    loop {
        let finished = outbox.take();
        if !finished.is_empty() {
            return finished;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing comes back");
        if outbox.sleep() {
            outbox.event().wait(Some(1_000_000_000));
        }
    }
}

/// An operation whose engine waits until it is told to continue.
fn held() -> (Box<dyn RunningOperation>, std::sync::mpsc::Sender<()>) {
    struct Held(std::sync::mpsc::Receiver<()>);
    impl RunningOperation for Held {
        fn step(
            &mut self,
            input: &[u8],
            _: bool,
            _: &mut [u8],
        ) -> Result<EngineStep, OperationStatus> {
            let _ = self.0.recv();
            Ok(EngineStep { read: input.len(), written: 0, finished: true })
        }
    }
    let (go_on, waits) = std::sync::mpsc::channel();
    (Box::new(Held(waits)), go_on)
}

#[test]
fn an_engine_that_panics_is_one_operations_error_and_goes_on() {
    let pool = EnginePool::new(PoolOptions::default());
    pool.start().unwrap();
    let outboxes = [(); 2].map(|()| Arc::new(CompletionOutbox::new().unwrap()));
    for (tenant, outbox) in (1..).zip(&outboxes) {
        pool.set_level(TenantId(tenant), None).unwrap();
        let request = engines::OperationRequest::default();
        let copy = engines::begin(Operation::Copy, &request, &mut Spare::default());
        let engine = if tenant == 1 { Box::new(Panics) } else { copy.unwrap() };
        pool.submit(TenantId(tenant), 0, vec![job(engine, 7, outbox)]);
    }
    let [first, second] = outboxes.map(|outbox| wait(&outbox)[0].status);
    assert_eq!((first, second), (OperationStatus::EngineFailed, OperationStatus::Success));
    assert_eq!(pool.failed(), 1);
    assert_eq!(pool.usage(TenantId(2)).unwrap().operations, 1);
}

#[test]
fn a_level_beyond_what_was_measured_is_refused_and_what_fits_is_kept() {
    let pool = EnginePool::new(PoolOptions::default());
    pool.start().unwrap();
    let refused = pool.set_level(TenantId(1), Some(&"sha256 1000000 Gbit/s".parse().unwrap()));
    let refused = refused.unwrap_err();
    let rackbus_qos::LevelRefused::TooMuch { fits, .. } = &refused else { panic!("{refused}") };
    assert!(fits.per_second > 0, "{refused}");
    let level = format!("sha256 {fits}").parse().unwrap();
    pool.set_level(TenantId(1), Some(&level)).unwrap();
    assert_eq!(pool.level(TenantId(1)), Some(level.clone()));
    // Of the same device, nothing is left for the next one, until the first gives it back.
    assert!(pool.set_level(TenantId(2), Some(&level)).is_err());
    pool.set_level(TenantId(1), None).unwrap();
    pool.set_level(TenantId(2), Some(&level)).unwrap();
}

/// A profile is asked for sizes and ratios that were not measured.
#[test]
fn an_operation_costs_about_what_the_profile_says_at_sizes_that_were_not_measured() {
    let profiles = profile::measure_all();
    for operation in [Operation::Sha256, Operation::Aes256GcmSeal, Operation::Deflate] {
        let length = Duration::from_millis(2);
        let content = profile::Content::Noise;
        let point = profile::measure(operation, 20_000, content, length).unwrap();
        let said = profiles[operation.name()].cost_ns(point.message, point.ratio);
        // What else runs on the machine has a part in both; ten times is not that.
        let ratio = said / point.cost_ns;
        assert!((0.3..3.0).contains(&ratio), "{operation:?}: {said:.0} ns, not {point:?}");
    }
}

const IOVA: u64 = 1 << 20;
const MEMORY: u64 = 8 << 20;
/// Places in the memory: the two rings, input and output.
const RINGS: [u64; 2] = [0, 0x1000];
const INPUT: u64 = 1 << 20;
const OUTPUT: u64 = 4 << 20;

/// A tenant that drives its function by hand.
struct Tenant {
    endpoint: Endpoint,
    memory: SharedMemory,
    sent: u32,
    seen: u64,
}

impl Tenant {
    fn new(pool: &Arc<EnginePool>, number: u32) -> Tenant {
        let model = Accelerator::new(pool, TenantId(number), None, 1).unwrap();
        let memory = SharedMemory::create("accel-test", MEMORY).unwrap();
        let mut tenant =
            Tenant { endpoint: Endpoint::new(Box::new(model)), memory, sent: 0, seen: 0 };
        tenant.set_up();
        tenant
    }

    /// Maps its memory, and makes a queue pair.
    fn set_up(&mut self) {
        self.map();
        let command = Command::MEMORY_SPACE | Command::BUS_MASTER;
        self.endpoint.write(FunctionRegion::Config, 4, &command.bits().to_le_bytes()).unwrap();
        self.write(reg::CONTROL, &1u32.to_le_bytes());
        for (register, ring) in [reg::SUBMISSION, reg::COMPLETION].into_iter().zip(RINGS) {
            self.write(reg::QUEUE + register, &(IOVA + ring).to_le_bytes());
        }
        self.write(reg::QUEUE + reg::RING_ENTRIES, &16u32.to_le_bytes());
        self.write(reg::QUEUE + reg::ENABLE, &1u32.to_le_bytes());
    }

    fn map(&mut self) {
        let handle = Some(self.memory.handle(0));
        self.endpoint.map(IOVA, MEMORY, Access::READ | Access::WRITE, handle).unwrap();
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.endpoint.write(FunctionRegion::Bar(0), offset, data).unwrap();
    }

    fn send(&mut self, operation: Operation, length: u32) {
        let descriptor = Descriptor {
            stages: [operation as u8, 0, 0, 0],
            input: IOVA + INPUT,
            output: IOVA + OUTPUT,
            input_length: length,
            output_length: 1 << 20,
            ..Descriptor::default()
        };
        self.memory.whole().write_obj(self.sent as usize * DESCRIPTOR_SIZE, &descriptor);
        self.sent += 1;
        self.write(reg::DOORBELL, &self.sent.to_le_bytes());
        self.poll();
    }

    fn poll(&mut self) {
        let now = self.endpoint.clock();
        self.endpoint.poll(now);
    }

    fn wait(&mut self) -> Completion {
        let at = RINGS[1] as usize + self.seen as usize * COMPLETION_SIZE;
        let begun = Instant::now();
        loop {
            self.poll();
            let completion: Completion = self.memory.whole().read_obj(at).unwrap();
            if completion.status & 1 == 1 {
                self.seen += 1;
                return completion;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is completed");
        }
    }

    /// Sends a descriptor as it is; the status that it ends with, and what it put out.
    fn ask(&mut self, descriptor: Descriptor) -> (OperationStatus, u32) {
        self.memory.whole().write_obj(self.sent as usize % 16 * DESCRIPTOR_SIZE, &descriptor);
        self.sent += 1;
        self.write(reg::DOORBELL, &self.sent.to_le_bytes());
        let Completion { status, output, .. } = self.wait();
        (OperationStatus::from_number(status >> 1).unwrap(), output)
    }

    fn output(&self, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.whole().part(OUTPUT as usize, length).unwrap().copy_to(&mut data);
        data
    }
}

/// Invariant I4 under way, and mappings that come and go as a guest's with a virtual IOMMU do.
#[test]
fn nothing_touches_memory_that_was_unmapped_and_the_operation_goes_on_when_it_is_back() {
    let pool = EnginePool::new(PoolOptions::default());
    let [mut tenant, mut other] = [1, 2].map(|number| Tenant::new(&pool, number));
    let mut state = 1u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    });
    let input: Vec<u8> = noise.take(900_000).collect();
    tenant.memory.whole().part(INPUT as usize, input.len()).unwrap().copy_from(&input);
    tenant.send(Operation::ZstdCompress, 900_000);
    let begun = Instant::now();
    while pool.usage(TenantId(1)).unwrap().turns < 2 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no engine takes it");
    }
    tenant.endpoint.unmap(IOVA, MEMORY).unwrap();
    let before = tenant.output(1 << 20);
    // Another tenant's operation comes and goes: the engine has passed by.
    other.send(Operation::Copy, 4096);
    assert_eq!(other.wait().status, 1);
    assert!(tenant.output(1 << 20) == before, "memory that was unmapped was written to");
    tenant.map();
    let completion = tenant.wait();
    assert_eq!(completion.status, 1);
    let compressed = tenant.output(completion.output as usize);
    tenant.memory.whole().part(INPUT as usize, compressed.len()).unwrap().copy_from(&compressed);
    tenant.send(Operation::ZstdDecompress, completion.output);
    let completion = tenant.wait();
    assert_eq!((completion.status, completion.output), (1, 900_000));
    assert!(tenant.output(900_000) == input, "it went on elsewhere");
}

/// What was taken from a queue pair goes with it, also where the tenant's level lets nothing through.
#[test]
fn a_queue_pair_that_is_made_again_and_again_leaves_nothing_before_the_engines() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    pool.set_level(TenantId(1), Some(&"copy 0 op/s max 1 op/s".parse().unwrap())).unwrap();
    for _ in 0..100 {
        for _ in 0..10 {
            tenant.send(Operation::Copy, 64);
        }
        for on in [0u32, 1] {
            tenant.write(reg::QUEUE + reg::ENABLE, &on.to_le_bytes());
        }
        tenant.sent = 0;
    }
    let waiting = pool.waiting();
    assert!(waiting <= 32, "{waiting} operations wait for nobody");
}

/// A tenant that detaches during its operations leaves nothing before the engines.
#[test]
fn a_tenant_that_detaches_during_operations_is_gone_at_once_and_the_next_one_begins_anew() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    for _ in 0..10 {
        tenant.send(Operation::Deflate, 1 << 20);
    }
    tenant.endpoint.scrub();
    let before = tenant.output(1 << 20);
    let mut other = Tenant::new(&pool, 2);
    other.send(Operation::Copy, 4096);
    assert_eq!(other.wait().status, 1);
    assert!(tenant.output(1 << 20) == before, "memory of a former user was written to");
    drop(tenant);
    let mut next = Tenant::new(&pool, 1);
    next.send(Operation::Copy, 4096);
    assert_eq!((next.wait().status, next.seen), (1, 1));
}

impl Tenant {
    /// Makes the queue pair anew with completions by `vector`, and the page of shadow doorbells behind the rings.
    fn remake(&mut self, vector: u32) {
        self.write(reg::CONTROL, &0u32.to_le_bytes());
        self.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap().fill(0);
        self.write(reg::SHADOW, &(IOVA + SHADOW).to_le_bytes());
        self.write(reg::CONTROL, &1u32.to_le_bytes());
        for (register, ring) in [reg::SUBMISSION, reg::COMPLETION].into_iter().zip(RINGS) {
            self.write(reg::QUEUE + register, &(IOVA + ring).to_le_bytes());
        }
        self.write(reg::QUEUE + reg::RING_ENTRIES, &16u32.to_le_bytes());
        self.write(reg::QUEUE + reg::VECTOR, &vector.to_le_bytes());
        self.memory.whole().part(RINGS[1] as usize, 16 * COMPLETION_SIZE).unwrap().fill(0);
        self.write(reg::QUEUE + reg::ENABLE, &1u32.to_le_bytes());
        (self.sent, self.seen) = (0, 0);
    }

    /// Sends an operation by the page, and waits for its completion.
    fn one(&mut self, polls: bool) {
        let at = SHADOW as usize + shadow::DOORBELL;
        let page = self.memory.clone();
        page.whole().store_u32(at + shadow::POLLS, polls.into(), Ordering::Release);
        page.whole().store_u32(at, self.sent + 1, Ordering::Release);
        self.send(Operation::Copy, 64);
        assert_eq!(self.wait().status, 1);
        page.whole().store_u32(at + 4, self.seen as u32, Ordering::Release);
    }
}

/// The page of shadow doorbells.
const SHADOW: u64 = 0x3000;

/// An interrupt for each completion that the driver has not said that it polls for, by the vector of its queue.
#[test]
fn completions_interrupt_whoever_does_not_poll() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    let events: Vec<Event> = (0..8).map(|_| Event::new().unwrap()).collect();
    let wires = events.iter().map(|event| Some(event.as_fd().try_clone_to_owned().unwrap()));
    tenant.endpoint.set_irqs(IrqChange::WireVectors(0, wires.collect())).unwrap();
    let rung = |events: &[Event]| events.iter().map(Event::drain).collect::<Vec<_>>();
    let only = |vector: usize| (0..8).map(|nth| nth == vector).collect::<Vec<_>>();
    for (vector, polls, expected) in [
        (3, false, only(3)),
        (7, false, only(7)),
        (3, true, only(8)),
        (u32::MAX, false, only(8)),
        (8, false, only(8)),
    ] {
        tenant.remake(vector);
        tenant.one(polls);
        assert_eq!(rung(&events), expected, "vector {vector}, polls: {polls}");
    }
    // Who stops to poll gets the next one.
    tenant.remake(0);
    for (polls, expected) in [(true, only(8)), (false, only(0)), (true, only(8))] {
        tenant.one(polls);
        assert_eq!(rung(&events), expected, "polls: {polls}");
    }
}

/// A driver in user space that ends without a word: its kernel turns bus mastering off, and no more.
#[test]
fn a_function_that_may_not_master_the_bus_any_more_asks_for_no_memory() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    tenant.remake(u32::MAX);
    tenant.one(true);
    let command = |tenant: &mut Tenant, command: Command| {
        tenant.endpoint.write(FunctionRegion::Config, 4, &command.bits().to_le_bytes()).unwrap();
    };
    let refused = |tenant: &Tenant| tenant.endpoint.dma().refusals().get().0;
    let before = refused(&tenant);
    command(&mut tenant, Command::MEMORY_SPACE);
    for _ in 0..3 {
        let now = tenant.endpoint.clock();
        assert_eq!(tenant.endpoint.poll(now), Work::Asleep(None), "it goes on looking");
        assert!(tenant.endpoint.park(), "it does not sleep");
    }
    assert_eq!(refused(&tenant), before, "refused accesses that nobody asked for");
    // What was stored in the page meanwhile is found there, and by that alone.
    let copy: Descriptor = tenant.memory.whole().read_obj(0).unwrap();
    tenant.memory.whole().write_obj(tenant.sent as usize * DESCRIPTOR_SIZE, &copy);
    tenant.sent += 1;
    let at = SHADOW as usize + shadow::DOORBELL;
    tenant.memory.whole().store_u32(at, tenant.sent, Ordering::Release);
    tenant.poll();
    assert_eq!(refused(&tenant), before, "refused accesses that nobody asked for");
    command(&mut tenant, Command::MEMORY_SPACE | Command::BUS_MASTER);
    assert_eq!(tenant.wait().status, 1);
}

/// Patterns for which each byte of noise makes a state of the automaton that was not there before.
#[test]
fn a_search_whose_patterns_are_dear_ends_its_turn_in_time() {
    let patterns = zeroize::Zeroizing::new(b"[01]*1[01]{3000}".to_vec());
    let context = engines::Context::new(Operation::RegexScan, &patterns).map(Arc::new).unwrap();
    let request = engines::OperationRequest { context: Some(&context), ..Default::default() };
    let mut noise = vec![0; 4096];
    let mut state = 1u64;
    noise.fill_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        b'0' + (state >> 63) as u8
    });
    let search = |goes_on: bool| {
        let scan = Operation::RegexScan;
        let engine = engines::begin(scan, &request, &mut Spare::default()).unwrap();
        let mut pipeline = pipeline(scan, engine);
        pipeline.feed(noise.len(), true, |to| to.copy_from_slice(&noise));
        let (mut out, mut all, mut turns) = (vec![0; 32 << 10], Vec::new(), 0);
        loop {
            let progress = pipeline.pump(&mut out, &mut || goes_on).unwrap();
            all.extend_from_slice(&out[..progress.written]);
            turns += 1;
            if progress.finished {
                return (all, turns);
            }
        }
    };
    let (whole, once) = search(true);
    let (pieces, turns) = search(false);
    assert!(once == 1 && turns > 4096 / 16, "{turns} turns");
    assert!(whole == pieces && !whole.is_empty(), "the matches differ");
}
