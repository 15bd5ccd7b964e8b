//! Registers as memory: a driver that only loads and stores, and one that stores anything.

use proptest::prelude::*;
use rackbus_pci::{NotPolled, PolledRegisters, Work};
use rackbus_spec::accel::queue_state;

use super::*;

const ENTRIES: u32 = 16;
const DONE: u16 = OperationStatus::Success as u16;

/// A tenant whose function has its registers in memory. It sends and receives by queue pair 0.
struct Host {
    endpoint: Endpoint,
    memory: SharedMemory,
    registers: PolledRegisters,
    now: u64,
    /// How many descriptors were sent, and completions seen, since the queue pair was made.
    sent: u32,
    seen: u32,
}

/// A function that was mapped and is stopped, of a pool of its own.
fn host() -> Host {
    let pool = EnginePool::new(PoolOptions::default());
    let model = Accelerator::new(&pool, TenantId(1), None, 1).unwrap();
    let memory = SharedMemory::create("accel-polled", MEMORY).unwrap();
    let mut endpoint = Endpoint::new(Box::new(model));
    endpoint.map(IOVA, MEMORY, Access::READ | Access::WRITE, Some(memory.handle(0))).unwrap();
    Host::with_endpoint(endpoint, memory)
}

fn registers_of(endpoint: &mut Endpoint) -> PolledRegisters {
    let (file, length) = endpoint.poll_registers(0).unwrap();
    PolledRegisters::adopt(file, length).unwrap()
}

impl Host {
    fn with_endpoint(mut endpoint: Endpoint, memory: SharedMemory) -> Host {
        let (registers, now) = (registers_of(&mut endpoint), endpoint.clock());
        let mut host = Host { endpoint, memory, registers, now, sent: 0, seen: 0 };
        host.master();
        host
    }

    fn master(&mut self) {
        let command = (Command::MEMORY_SPACE | Command::BUS_MASTER).bits().to_le_bytes();
        self.endpoint.write(FunctionRegion::Config, 4, &command).unwrap();
    }

    fn poll(&mut self) -> Work {
        self.now = self.now.max(self.endpoint.clock());
        self.endpoint.poll(self.now)
    }

    /// Polls until a register has this value.
    fn until(&mut self, register: u64, value: u32) {
        let begun = Instant::now();
        while self.registers.load(register) != value {
            self.poll();
            assert!(begun.elapsed() < Duration::from_secs(20), "{register:#x} does not change");
        }
    }

    fn stop(&mut self) {
        self.registers.store(reg::CONTROL, 0);
        self.until(reg::STATUS, 0);
    }

    /// Runs the function, and makes its first queue pair.
    fn start(&mut self, shadow: u64) {
        self.registers.store_pair(reg::SHADOW, shadow);
        self.registers.store(reg::CONTROL, 1);
        self.until(reg::STATUS, 1);
        self.make(ENTRIES, queue_state::ON);
    }

    /// Makes the first queue pair, which then is in this state.
    fn make(&mut self, entries: u32, state: u32) {
        self.memory.whole().part(RINGS[1] as usize, 16 * COMPLETION_SIZE).unwrap().fill(0);
        (self.sent, self.seen) = (0, 0);
        for (register, ring) in [reg::SUBMISSION, reg::COMPLETION].into_iter().zip(RINGS) {
            self.registers.store_pair(reg::QUEUE + register, IOVA + ring);
        }
        self.registers.store(reg::QUEUE + reg::RING_ENTRIES, entries);
        self.registers.store(reg::QUEUE + reg::VECTOR, 0);
        self.registers.store(reg::QUEUE + reg::ENABLE, 1);
        self.until(reg::QUEUE + reg::STATE, state);
        assert_eq!([0, 4].map(|at| self.registers.load(reg::DOORBELL + at)), [0; 2]);
    }

    fn unmake(&mut self) {
        self.registers.store(reg::QUEUE + reg::ENABLE, 0);
        self.until(reg::QUEUE + reg::STATE, queue_state::OFF);
    }

    /// Puts a descriptor into the ring; what the tail is then.
    fn put(&mut self, descriptor: &Descriptor) -> u32 {
        let at = (self.sent % ENTRIES) as usize * DESCRIPTOR_SIZE;
        self.memory.whole().write_obj(at, descriptor);
        self.sent += 1;
        self.sent % ENTRIES
    }

    /// The next completion, when it has come.
    fn completion(&mut self) -> Option<Completion> {
        let at = RINGS[1] as usize + (self.seen % ENTRIES) as usize * COMPLETION_SIZE;
        let completion: Completion = self.memory.whole().read_obj(at).unwrap();
        let phase = u16::from((self.seen / ENTRIES).is_multiple_of(2));
        (completion.status & 1 == phase).then(|| {
            self.seen += 1;
            completion
        })
    }

    fn wait(&mut self) -> Completion {
        let begun = Instant::now();
        loop {
            if let Some(completion) = self.completion() {
                return completion;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is completed");
            self.poll();
        }
    }

    /// Has a descriptor done, by the doorbells in the registers; its status and value.
    fn run(&mut self, descriptor: &Descriptor) -> (u16, u32) {
        let tail = self.put(descriptor);
        self.registers.store(reg::DOORBELL, tail);
        let completion = self.wait();
        self.registers.store(reg::DOORBELL + 4, self.seen % ENTRIES);
        (completion.status >> 1, completion.value)
    }

    fn copy(&mut self, byte: u8) {
        let [input, output] = [INPUT, OUTPUT].map(|at| at as usize);
        self.memory.whole().part(input, 4096).unwrap().fill(byte);
        self.memory.whole().part(output, 4096).unwrap().fill(!byte);
        assert_eq!(self.run(&copy()).0, DONE);
        let mut copied = [0; 4096];
        self.memory.whole().part(output, 4096).unwrap().copy_to(&mut copied);
        assert_eq!(copied, [byte; 4096]);
    }
}

fn copy() -> Descriptor {
    Descriptor {
        stages: [Operation::Copy as u8, 0, 0, 0],
        input: IOVA + INPUT,
        output: IOVA + OUTPUT,
        input_length: 4096,
        output_length: 4096,
        ..Descriptor::default()
    }
}

/// Makes a key of what is at the input.
fn key() -> Descriptor {
    let stages = [Operation::CreateContext as u8, Operation::Aes256Ctr as u8, 0, 0];
    Descriptor { stages, input_length: 32, ..copy() }
}

/// Encrypts by the key with this handle.
fn encrypted(handle: u32) -> Descriptor {
    let stages = [Operation::Aes256Ctr as u8, 0, 0, 0];
    Descriptor { stages, contexts: [handle as u16, 0, 0, 0], ..copy() }
}

#[test]
fn a_driver_that_only_loads_and_stores_uses_the_function() {
    let mut host = host();
    assert_eq!(host.registers.load(reg::MAGIC), reg::MAGIC_VALUE);
    assert_ne!(host.registers.load(reg::OPERATIONS), 0);
    host.start(0);
    // More than the rings hold: both doorbells wrap.
    for turn in 0..3 * ENTRIES {
        host.copy(turn as u8);
    }
    // The same by messages: both show the same registers.
    for at in (0..0x30).chain(reg::QUEUE..reg::QUEUE + reg::QUEUE_STRIDE).step_by(4) {
        let mut trapped = [0; 4];
        host.endpoint.read(FunctionRegion::Bar(0), at, &mut trapped).unwrap();
        assert_eq!(u32::from_le_bytes(trapped), host.registers.load(at), "{at:#x}");
    }
}

#[test]
fn a_function_that_is_started_again_has_no_queue_pairs_and_no_keys() {
    let mut host = host();
    for turn in 1..4 {
        host.start(0);
        let handle = host.run(&key()).1;
        assert_eq!(host.run(&encrypted(handle)).0, DONE);
        for _ in 0..turn {
            host.copy(turn);
        }
        host.stop();
        let state = [reg::QUEUE + reg::STATE, reg::QUEUE + reg::ENABLE, reg::DOORBELL];
        assert_eq!(state.map(|at| host.registers.load(at)), [0; 3]);
        host.start(0);
        let status = host.run(&encrypted(handle)).0;
        assert_eq!(status, OperationStatus::InvalidContext as u16);
        host.stop();
    }
}

#[test]
fn a_queue_pair_holds_still_until_it_is_taken_away() {
    let mut host = host();
    host.start(0);
    for register in [reg::SUBMISSION, reg::COMPLETION, reg::RING_ENTRIES] {
        host.registers.store(reg::QUEUE + register, 0xffff_ffff);
    }
    // Another value of ENABLE that says the same.
    host.registers.store(reg::QUEUE + reg::ENABLE, 3);
    host.copy(1);
    // No index of the ring.
    host.registers.store(reg::DOORBELL, ENTRIES);
    host.until(reg::QUEUE + reg::STATE, queue_state::ERROR);
    host.unmake();
    host.make(ENTRIES, queue_state::ON);
    host.copy(2);
    host.unmake();
    // No power of two.
    host.make(ENTRIES - 1, queue_state::ERROR);
}

#[test]
fn what_is_written_by_message_shows_in_memory() {
    let mut host = host();
    let mut write = |at: u64, value: u32| {
        host.endpoint.write(FunctionRegion::Bar(0), at, &value.to_le_bytes()).unwrap();
    };
    write(reg::CONTROL, 1);
    write(reg::QUEUE + reg::SUBMISSION, (IOVA + RINGS[0]) as u32);
    write(reg::QUEUE + reg::COMPLETION, (IOVA + RINGS[1]) as u32);
    write(reg::QUEUE + reg::RING_ENTRIES, ENTRIES);
    write(reg::QUEUE + reg::ENABLE, 1);
    host.until(reg::STATUS, 1);
    let shown = [reg::ENABLE, reg::STATE, reg::RING_ENTRIES];
    let shown = shown.map(|at| host.registers.load(reg::QUEUE + at));
    assert_eq!(shown, [1, queue_state::ON, ENTRIES]);
    host.copy(1);
    host.endpoint.write(FunctionRegion::Bar(0), reg::CONTROL, &[0; 4]).unwrap();
    let at = [reg::CONTROL, reg::STATUS, reg::QUEUE + reg::STATE];
    assert_eq!(at.map(|at| host.registers.load(at)), [0; 3]);
    host.start(0);
    host.copy(2);
}

/// Of the page, which may be behind an NTB, nothing is read but whether its driver wants interrupts.
#[test]
fn with_shadow_doorbells_all_of_them_are_stored_in_the_registers() {
    let mut host = host();
    let page = host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap();
    page.fill(0);
    let asleep = |host: &Host| {
        let page = host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap();
        page.load_u32(shadow::ASLEEP, Ordering::Acquire)
    };
    host.start(IOVA + SHADOW);
    assert_eq!(asleep(&host), Some(1));
    let event = Event::new().unwrap();
    let wires = vec![Some(event.as_fd().try_clone_to_owned().unwrap())];
    host.endpoint.set_irqs(IrqChange::WireVectors(0, wires)).unwrap();
    for turn in 0..2 * ENTRIES {
        let polls = u32::from(turn % 2 == 1);
        let page = host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap();
        page.store_u32(shadow::DOORBELL + shadow::POLLS, polls, Ordering::Release);
        host.copy(turn as u8);
        assert_eq!((event.drain(), asleep(&host)), (polls == 0, Some(1)), "turn {turn}");
    }
    let tail = host.put(&copy());
    let page = host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap();
    page.store_u32(shadow::DOORBELL, tail, Ordering::Release);
    for _ in 0..10 {
        host.poll();
    }
    assert_eq!(host.completion(), None);
    host.registers.store(reg::DOORBELL, tail);
    assert_eq!(host.wait().status >> 1, DONE);
}

/// Where the page cannot be reached when the function begins to run, its driver may store doorbells there alone later.
#[test]
fn a_page_that_comes_later_is_looked_at_as_ever() {
    let mut host = host();
    host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap().fill(0);
    host.endpoint.unmap(IOVA, MEMORY).unwrap();
    host.registers.store_pair(reg::SHADOW, IOVA + SHADOW);
    host.registers.store(reg::CONTROL, 1);
    host.until(reg::STATUS, 1);
    let memory = Some(host.memory.handle(0));
    host.endpoint.map(IOVA, MEMORY, Access::READ | Access::WRITE, memory).unwrap();
    host.make(ENTRIES, queue_state::ON);
    let tail = host.put(&copy());
    let page = host.memory.whole().part(SHADOW as usize, shadow::SIZE).unwrap();
    assert_eq!(page.load_u32(shadow::ASLEEP, Ordering::Acquire), Some(0));
    page.store_u32(shadow::DOORBELL, tail, Ordering::Release);
    assert_eq!(host.wait().status >> 1, DONE);
}

#[test]
fn a_driver_that_only_loads_and_stores_notices_nothing_when_another_process_goes_on() {
    for shadow in [0, IOVA + SHADOW] {
        let mut host = host();
        host.start(shadow);
        let handle = host.run(&key()).1;
        let saved = host.endpoint.save().unwrap();
        // Its doorbell is stored while nobody looks.
        let tail = host.put(&encrypted(handle));
        host.registers.store(reg::DOORBELL, tail);
        host.poll();
        assert_eq!(host.completion(), None, "the life that was saved goes on");
        let (state, parts) = (saved.state.to_bytes().unwrap(), (saved.descriptors, saved.medium));
        let next = super::saved::elsewhere(&state, parts).unwrap();
        // The life before ends, and what its driver has mapped is not taken away by that.
        drop(std::mem::replace(&mut host.endpoint, next));
        host.now = host.endpoint.clock();
        let completion = host.wait();
        assert_eq!(completion.status >> 1, DONE);
        host.registers.store(reg::DOORBELL + 4, host.seen % ENTRIES);
        // Doorbells are looked for where they were before.
        host.copy(5);
        host.stop();
        host.start(0);
        host.copy(6);
    }
}

#[test]
fn registers_of_a_function_that_is_taken_back_are_looked_at_again() {
    let mut host = host();
    host.start(0);
    let saved = host.endpoint.save().unwrap();
    let tail = host.put(&copy());
    host.registers.store(reg::DOORBELL, tail);
    host.poll();
    assert_eq!(host.completion(), None);
    host.endpoint.take_back(saved).unwrap();
    assert_eq!(host.wait().status >> 1, DONE);
}

#[test]
fn an_idle_function_looks_from_time_to_time() {
    let mut host = host();
    let Work::Watch(before) = host.poll() else { panic!("nobody rings") };
    host.start(0);
    while host.poll() == Work::Done {}
    host.now += 1_000_000_000;
    let Work::Watch(later) = host.endpoint.poll(host.now) else { panic!("nobody rings") };
    assert!(before < later && later <= 2_000_000, "{before} {later}");
    host.copy(1);
    while host.poll() == Work::Done {}
    let Work::Watch(soon) = host.endpoint.poll(host.now) else { panic!("nobody rings") };
    assert!(soon < later, "{soon} {later}");
}

#[test]
fn a_former_user_finds_a_device_that_was_pulled_out_and_its_keys_are_wiped() {
    let mut former = host();
    former.start(0);
    let handle = former.run(&key()).1;
    assert_eq!(former.run(&encrypted(handle)).0, DONE);
    let Host { mut endpoint, memory, registers, .. } = former;
    endpoint.scrub();
    let all = [reg::MAGIC, reg::STATUS, reg::CONTROL, reg::QUEUE + reg::STATE];
    assert_eq!(all.map(|at| registers.load(at)), [u32::MAX; 4]);
    endpoint.map(IOVA, MEMORY, Access::READ | Access::WRITE, Some(memory.handle(0))).unwrap();
    let mut next = Host::with_endpoint(endpoint, memory);
    // What the former one stores reaches nobody.
    registers.store(reg::CONTROL, 1);
    assert!(matches!(next.poll(), Work::Watch(_)));
    assert_eq!([reg::CONTROL, reg::STATUS].map(|at| next.registers.load(at)), [0; 2]);
    next.start(0);
    registers.store(reg::DOORBELL, 5);
    next.copy(2);
    assert_eq!(next.run(&encrypted(handle)).0, OperationStatus::InvalidContext as u16);
}

#[test]
fn a_function_level_reset_shows_in_memory() {
    let mut host = host();
    host.start(0);
    host.copy(1);
    host.endpoint.reset();
    let at = [reg::CONTROL, reg::STATUS, reg::QUEUE + reg::ENABLE, reg::QUEUE + reg::STATE];
    assert_eq!(at.map(|at| host.registers.load(at)), [0; 4]);
    assert_eq!(host.registers.load(reg::MAGIC), reg::MAGIC_VALUE);
    host.master();
    host.start(0);
    host.copy(2);
}

#[test]
fn registers_are_those_of_bar_0_of_a_front_that_runs_here() {
    let mut host = host();
    assert!(matches!(host.endpoint.poll_registers(4), Err(NotPolled::Bar(4))));
    let again = registers_of(&mut host.endpoint);
    host.registers.store(reg::QUEUE, 0x40);
    assert_eq!(again.load(reg::QUEUE), 0x40);
    host.endpoint.scrub();
    host.endpoint.serve_medium(None).unwrap();
    assert!(matches!(host.endpoint.poll_registers(0), Err(NotPolled::Elsewhere)));
}

/// The borrower's node retires them before the lender's engine has stopped.
#[test]
fn registers_that_were_retired_stay_so_while_the_function_goes_on() {
    for is_running in [false, true] {
        let mut host = host();
        if is_running {
            host.start(0);
            let tail = host.put(&copy());
            host.registers.store(reg::DOORBELL, tail);
        }
        host.registers.retire();
        for _ in 0..3 {
            host.poll();
        }
        let all = [reg::MAGIC, reg::CONTROL, reg::STATUS, reg::QUEUE + reg::STATE, reg::DOORBELL];
        let all = all.map(|at| host.registers.load(at));
        assert_eq!(all, [u32::MAX; 5], "running: {is_running}");
    }
}

/// Registers that a hostile driver stores to: those of the function, of two queue pairs, and doorbells.
fn anywhere() -> impl Strategy<Value = u64> {
    let queues = (0u64..32).prop_map(|word| reg::QUEUE + 4 * word);
    let doorbells = (0u64..20).prop_map(|word| reg::DOORBELL + 4 * word);
    prop_oneof![(0u64..16).prop_map(|word| 4 * word), queues, doorbells]
}

fn anything() -> impl Strategy<Value = u32> {
    let rings = Just((IOVA + RINGS[0]) as u32);
    prop_oneof![any::<u32>(), 0u32..20, Just(1), Just(ENTRIES), rings]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is stored, whenever: nothing fails but the user's own function, nothing is written outside of the memory
    /// that the function was given, and a reset makes it usable.
    #[test]
    fn whatever_a_driver_stores_is_the_drivers_own_trouble(
        stores in prop::collection::vec((anywhere(), anything(), any::<bool>()), 1..200)
    ) {
        // The output of the copies is its last part.
        let (mut host, length) = (host(), OUTPUT + 4096);
        let (memory, both) = (host.memory.clone(), Access::READ | Access::WRITE);
        host.endpoint.unmap(IOVA, MEMORY).unwrap();
        host.endpoint.map(IOVA, length, both, Some(memory.handle(0))).unwrap();
        let outside = memory.whole().part(length as usize, (MEMORY - length) as usize).unwrap();
        outside.fill(0xc5);
        host.start(0);
        for (register, value, poll) in stores {
            host.registers.store(register, value);
            if poll {
                host.poll();
            }
        }
        for _ in 0..10 {
            host.poll();
        }
        host.endpoint.reset();
        let mut bytes = vec![0; outside.len()];
        outside.copy_to(&mut bytes);
        prop_assert!(bytes.iter().all(|byte| *byte == 0xc5));
        host.master();
        host.start(0);
        host.copy(1);
    }
}
