//! Tenants beside each other before one engine, with shaping and without.
//!
//! All of their messages wait before the engine when it begins, and what each had is looked at while both still have
//! some. So it does not matter when a busy machine lets the test run: shares are those of the policy, measured in the
//! engine's processor time.

use rackbus_qos::Shaping;

use super::*;

/// What a tenant sends: the same message again and again, by each of its queue pairs.
#[derive(Clone)]
struct Sends {
    operation: Operation,
    message: Vec<u8>,
    queues: u64,
    /// Messages in each queue.
    count: u32,
}

/// Where rings are that have room for all of it, and how many bytes a pair of them takes.
const LARGE_RINGS: u64 = 6 << 20;
const LARGE_RING: u64 = ENTRIES as u64 * DESCRIPTOR_SIZE as u64;
const LARGE_PAIR: u64 = LARGE_RING + ENTRIES as u64 * COMPLETION_SIZE as u64;

impl Tenant {
    /// Puts all messages into rings of their own, and rings each doorbell once.
    fn fill(&mut self, sends: &Sends) {
        self.memory
            .whole()
            .part(INPUT as usize, sends.message.len())
            .unwrap()
            .copy_from(&sends.message);
        let descriptor = Descriptor {
            stages: [sends.operation as u8, 0, 0, 0],
            input: IOVA + INPUT,
            output: IOVA + OUTPUT,
            input_length: sends.message.len() as u32,
            output_length: 1 << 20,
            ..Descriptor::default()
        };
        for queue in 0..sends.queues {
            let (ring, registers) =
                (LARGE_RINGS + queue * LARGE_PAIR, reg::QUEUE + queue * reg::QUEUE_STRIDE);
            for nth in 0..sends.count as usize {
                let at = ring as usize + nth * DESCRIPTOR_SIZE;
                self.memory.whole().write_obj(at, &descriptor);
            }
            self.write(registers + reg::ENABLE, &0u32.to_le_bytes());
            self.write(registers + reg::SUBMISSION, &(IOVA + ring).to_le_bytes());
            self.write(registers + reg::COMPLETION, &(IOVA + ring + LARGE_RING).to_le_bytes());
            self.write(registers + reg::RING_ENTRIES, &u32::from(ENTRIES).to_le_bytes());
            self.write(registers + reg::ENABLE, &1u32.to_le_bytes());
            let doorbell = reg::DOORBELL + queue * reg::DOORBELL_STRIDE;
            self.write(doorbell, &sends.count.to_le_bytes());
        }
    }
}

/// An engine that does nothing until it is told to; until then, what is submitted waits.
fn busy_engine(pool: &Arc<EnginePool>) -> std::sync::mpsc::Sender<()> {
    const HOLDER: TenantId = TenantId(99);
    pool.start().unwrap();
    pool.set_level(HOLDER, None).unwrap();
    let (engine, go_on) = held();
    pool.submit(HOLDER, 0, vec![job(engine, 7, &Arc::new(CompletionOutbox::new().unwrap()))]);
    let begun = Instant::now();
    while pool.usage(HOLDER).unwrap().turns == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no engine takes it");
        std::thread::yield_now();
    }
    go_on
}

/// Engine time of the first tenant over that of the second, while both have messages waiting.
fn ratio(shaping: Shaping, sends: &[Sends; 2]) -> f64 {
    let pool = EnginePool::new(PoolOptions { shaping, ..PoolOptions::default() });
    let go_on = busy_engine(&pool);
    let mut tenants = [1, 2].map(|number| Tenant::new(&pool, number));
    let all = sends.each_ref().map(|sends| sends.queues * u64::from(sends.count));
    let begun = Instant::now();
    for (tenant, sends) in tenants.iter_mut().zip(sends) {
        tenant.fill(sends);
    }
    while pool.waiting() as u64 <= all.iter().sum() {
        tenants.iter_mut().for_each(Tenant::poll);
        assert!(begun.elapsed() < Duration::from_secs(20), "{} wait", pool.waiting());
    }
    go_on.send(()).unwrap();
    loop {
        let used = [1, 2].map(|tenant| pool.usage(TenantId(tenant)).unwrap());
        if used.iter().zip(all).any(|(used, all)| used.operations >= all / 2) {
            return used[0].engine_ns as f64 / used[1].engine_ns.max(1) as f64;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the engine stalls: {used:?}");
        std::thread::yield_now();
    }
}

/// Nanoseconds of the engine that a message takes by itself: the median of three runs.
fn cost(sends: &Sends) -> f64 {
    let mut costs = [0; 3].map(|_| {
        let pool = EnginePool::new(PoolOptions { shaping: Shaping::Off, ..PoolOptions::default() });
        let mut tenant = Tenant::new(&pool, 1);
        tenant.fill(sends);
        pool.start().unwrap();
        let begun = Instant::now();
        loop {
            tenant.poll();
            let used = pool.usage(TenantId(1)).unwrap();
            if used.operations >= u64::from(sends.count) / 2 {
                return used.engine_ns as f64 / used.operations as f64;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the engine stalls: {used:?}");
        }
    });
    costs.sort_by(f64::total_cmp);
    costs[1]
}

/// The ratio without shaping and with it: of the median of three runs each, in turns.
fn off_and_on(name: &str, sends: [Sends; 2]) -> (f64, f64) {
    let mut ratios = [const { Vec::new() }; 2];
    for _ in 0..3 {
        for (ratios, shaping) in ratios.iter_mut().zip([Shaping::Off, Shaping::On]) {
            ratios.push(ratio(shaping, &sends));
        }
    }
    let [off, on] = ratios.map(|mut ratios| {
        ratios.sort_by(f64::total_cmp);
        ratios[1]
    });
    eprintln!("{name}: {off:.3} without shaping, {on:.3} with");
    assert!((0.95..=1.05).contains(&on), "{name}: {on:.3} with shaping");
    (off, on)
}

fn noise(size: usize) -> Vec<u8> {
    profile::sample(Operation::Copy, size, profile::Content::Noise)
}

fn sends(operation: Operation, message: Vec<u8>, queues: u64, count: u32) -> Sends {
    Sends { operation, message, queues, count }
}

#[test]
fn two_equal_tenants_get_the_same() {
    let equal = sends(Operation::Sha3_512, noise(4096), 1, 2000);
    let (off, _) = off_and_on("equal tenants", [equal.clone(), equal]);
    assert!((0.95..=1.05).contains(&off), "{off:.3}: they have the same turns");
}

#[test]
fn large_messages_take_more_than_small_ones_unless_tenants_are_shaped() {
    let large = sends(Operation::Deflate, noise(64 << 10), 1, 100);
    let small = sends(Operation::Deflate, noise(64), 1, 4000);
    let (off, _) = off_and_on("64 KiB and 64 B", [large, small]);
    assert!(off > 5.0, "{off:.3} without shaping");
}

#[test]
fn four_queue_pairs_get_more_than_one_unless_tenants_are_shaped() {
    let many = sends(Operation::Sha3_512, noise(4096), 4, 1000);
    let (off, _) = off_and_on("4 queues and 1", [many.clone(), Sends { queues: 1, ..many }]);
    assert!((2.5..6.0).contains(&off), "{off:.3} without shaping");
}

#[test]
fn compression_takes_more_than_decompression_unless_tenants_are_shaped() {
    let size = 16 << 10;
    let compresses = sends(Operation::Deflate, noise(size), 1, 500);
    let packed = profile::sample(Operation::Inflate, size, profile::Content::Noise);
    let decompresses = sends(Operation::Inflate, packed, 1, 4000);
    let costs = [&compresses, &decompresses].map(cost);
    let (off, _) = off_and_on("compression and decompression", [compresses, decompresses]);
    // Each has as many turns as the other, so that their shares are as what a turn costs.
    let expected = costs[0] / costs[1];
    assert!(expected > 1.2, "{costs:?} ns: they cost the same here");
    assert!(
        (0.75..1.33).contains(&(off / expected)),
        "{off:.3} without shaping, not {expected:.3}"
    );
}

/// A number of no operation.
const MALFORMED: u8 = 200;

impl Tenant {
    fn send_malformed(&mut self) {
        let descriptor = Descriptor { stages: [MALFORMED, 0, 0, 0], ..Descriptor::default() };
        self.memory.whole().write_obj(self.sent as usize * DESCRIPTOR_SIZE, &descriptor);
        self.sent += 1;
        self.write(reg::DOORBELL, &self.sent.to_le_bytes());
        self.poll();
    }

    /// The status of a completion that is there.
    fn status_at(&self, nth: usize) -> Option<OperationStatus> {
        let at = RINGS[1] as usize + nth * COMPLETION_SIZE;
        let completion: Completion = self.memory.whole().read_obj(at).unwrap();
        (completion.status & 1 == 1)
            .then(|| OperationStatus::from_number(completion.status >> 1).unwrap())
    }
}

/// Also by bounds of its own, and with the time that it takes to look at what it sends.
#[test]
fn a_descriptor_that_is_refused_costs_its_tenant_as_much_as_a_short_operation() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    for _ in 0..8 {
        tenant.send_malformed();
        assert_eq!(tenant.wait().status >> 1, OperationStatus::InvalidOperation as u16);
    }
    let usage = pool.usage(TenantId(1)).unwrap();
    assert!(usage.operations == 8 && usage.engine_ns >= 8 * 100, "{usage:?}");
    // So does one that waits in vain, and what is behind it.
    let at = tenant.sent as usize * DESCRIPTOR_SIZE;
    let wait = Descriptor { stages: [Operation::Wait as u8, 0, 0, 0], ..Descriptor::default() };
    tenant
        .memory
        .whole()
        .write_obj(at, &Descriptor { input: 1 << 50, input_length: 4, associated: 1000, ..wait });
    tenant.sent += 1;
    tenant.send(Operation::Copy, 4096);
    for _ in 0..2 {
        assert_eq!(tenant.wait().status >> 1, OperationStatus::Transfer as u16);
    }
    assert_eq!(pool.usage(TenantId(1)).unwrap().operations, 10);
    // One that lets one operation through each second lets one of these through.
    pool.set_level(TenantId(1), Some(&"copy 0 op/s max 1 op/s".parse().unwrap())).unwrap();
    let mut other = Tenant::new(&pool, 2);
    for _ in 0..4 {
        tenant.send_malformed();
    }
    other.send(Operation::Copy, 4096);
    assert_eq!(other.wait().status, 1);
    let begun = Instant::now();
    while pool.usage(TenantId(1)).unwrap().throttled == 0 {
        tenant.poll();
        assert!(begun.elapsed() < Duration::from_secs(20), "nothing holds it back");
    }
    assert!(tenant.status_at(13).is_none(), "all were refused at once");
    // What waits for its turn has ended for whoever goes on with a saved function.
    tenant.endpoint.save().unwrap();
    let statuses: Vec<_> = (10..14).map(|nth| tenant.status_at(nth)).collect();
    assert_eq!(statuses, [Some(OperationStatus::InvalidOperation); 4]);
}

/// What is refused waits for the engine behind others' work, as what is done does.
#[test]
fn each_refused_descriptor_of_a_flood_is_charged_and_many_share_a_turn() {
    let pool = EnginePool::new(PoolOptions::default());
    let go_on = busy_engine(&pool);
    let mut tenants = [1, 2].map(|number| Tenant::new(&pool, number));
    let victim = sends(Operation::Sha3_512, noise(4096), 1, 500);
    let flood = sends(Operation::Wait, vec![0; 3], 4, 1000);
    tenants[0].fill(&victim);
    tenants[1].fill(&flood);
    let begun = Instant::now();
    while pool.waiting() <= 4500 {
        tenants.iter_mut().for_each(Tenant::poll);
        assert!(begun.elapsed() < Duration::from_secs(20), "{} wait", pool.waiting());
    }
    go_on.send(()).unwrap();
    let used = || [1, 2].map(|tenant| pool.usage(TenantId(tenant)).unwrap());
    while used()[0].operations < 500 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the engine stalls: {:?}", used());
        std::thread::yield_now();
    }
    while used()[1].operations < 4000 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the engine stalls: {:?}", used());
        std::thread::yield_now();
    }
    let [_, flood] = used();
    assert!(flood.engine_ns >= 4000 * 100, "{flood:?}");
    // Many share a turn, so that the shaper has little work with them.
    assert!(flood.turns < 1000, "{flood:?}");
}

/// Also where what is wrong is found only when the memory or the context is looked up.
#[test]
fn many_refused_descriptors_share_a_turn_that_nobody_waits_for() {
    const COUNT: u64 = 15;
    let good = Descriptor {
        stages: [Operation::Crc32c as u8, 0, 0, 0],
        input: IOVA + INPUT,
        output: IOVA + OUTPUT,
        input_length: 64,
        output_length: 64,
        ..Descriptor::default()
    };
    let refused = [
        (Descriptor { input: 1 << 50, ..good }, OperationStatus::Transfer),
        (Descriptor { contexts: [77, 0, 0, 0], ..good }, OperationStatus::InvalidContext),
    ];
    for (descriptor, status) in refused {
        // One turn lasts for all of them.
        let slice_ns = 10_000_000;
        let pool = EnginePool::new(PoolOptions { slice_ns, ..PoolOptions::default() });
        let mut tenant = Tenant::new(&pool, 1);
        for nth in 0..COUNT as usize {
            tenant.memory.whole().write_obj(nth * DESCRIPTOR_SIZE, &descriptor);
        }
        tenant.write(reg::DOORBELL, &(COUNT as u32).to_le_bytes());
        for _ in 0..COUNT {
            assert_eq!(tenant.wait().status >> 1, status as u16);
        }
        let usage = pool.usage(TenantId(1)).unwrap();
        assert!(usage.operations == COUNT && usage.engine_ns >= COUNT * 100, "{usage:?}");
        assert!(usage.turns <= 3, "{usage:?}");
        // What is good is done as ever.
        tenant.memory.whole().write_obj(COUNT as usize * DESCRIPTOR_SIZE, &good);
        tenant.write(reg::DOORBELL + 4, &(COUNT as u32).to_le_bytes());
        tenant.write(reg::DOORBELL, &0u32.to_le_bytes());
        assert_eq!(tenant.wait().status, 1);
    }
}

/// A tenant's messages have a thousand times the room that they fill, and its bound is of what comes out.
#[test]
fn an_output_that_was_estimated_too_high_holds_nobody_back() {
    let pool = EnginePool::new(PoolOptions { workers: 2, ..PoolOptions::default() });
    let mut tenant = Tenant::new(&pool, 1);
    // The room of all messages together would take 200 s.
    pool.set_level(TenantId(1), Some(&"sha3-512 0 op/s out 1 MB/s".parse().unwrap())).unwrap();
    tenant.fill(&sends(Operation::Sha3_512, noise(64 << 10), 1, 200));
    let begun = Instant::now();
    while pool.usage(TenantId(1)).unwrap().operations < 200 {
        tenant.poll();
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", pool.usage(TenantId(1)));
    }
    let usage = pool.usage(TenantId(1)).unwrap();
    assert!(usage.egress == 200 * 64 && usage.throttled_ns < 5_000_000_000, "{usage:?}");
}

/// Each may take long to make, and whoever takes the function back waits for one at most.
#[test]
fn a_poll_takes_up_one_context_in_whichever_queue_it_is() {
    let pool = EnginePool::new(PoolOptions::default());
    let mut tenant = Tenant::new(&pool, 1);
    tenant.fill(&sends(Operation::CreateContext, vec![5; 32], 4, 2));
    let (mut polls, mut ended, begun) = (0, 0, Instant::now());
    while ended < 8 {
        tenant.poll();
        polls += 1;
        ended = pool.usage(TenantId(1)).unwrap().operations;
        assert!(ended <= polls, "{ended} in {polls} polls");
        assert!(begun.elapsed() < Duration::from_secs(20), "{ended} have ended");
    }
}
