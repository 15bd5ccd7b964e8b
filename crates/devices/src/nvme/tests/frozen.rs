//! A lender that stalled, at any moment between two steps, and continues: with a user that has
//! given the drive up meanwhile, it touches nothing of what was the user's memory; with one that
//! is there, it continues as if nothing had happened.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use rackbus_memory::{Lending, ticks};
use rackbus_pci::endpoint::Clock;

use super::super::medium;
use super::background::{BackgroundControl, slow_drive};
use super::*;
use crate::lost::Lost;

/// A processor's counter that stands where it is put.
#[derive(Clone, Default)]
struct Counter(Arc<AtomicU64>);

impl Clock for Counter {
    fn now_ns(&self) -> u64 {
        self.ticks()
    }
    fn ticks(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What happens to the drive, one after the other.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A command with one page of data: to the backing that is slow, so it is done in the background.
    Read,
    Write,
    /// Something that the admin queue answers.
    Admin,
    /// The backing has finished what it got first.
    Finish,
    Poll,
    Park,
}

fn step() -> impl Strategy<Value = Step> {
    use Step::*;
    prop::sample::select(&[Read, Write, Admin, Finish, Poll, Poll, Poll, Park])
}

struct Rack {
    host: TestHost,
    control: Arc<std::sync::Mutex<BackgroundControl>>,
    counter: Counter,
    user: Option<UnixStream>,
    depth: usize,
}

impl Rack {
    fn new(shadowed: bool) -> Rack {
        let (nvme, control) = slow_drive();
        let counter = Counter::default();
        let ram = SharedMemory::create("host", RAM_SIZE).unwrap();
        let mut endpoint = Endpoint::with_clock(Box::new(nvme), Box::new(counter.clone()));
        let (user, lender) = UnixStream::pair().unwrap();
        endpoint.begin(Lending::alone(), Some(Arc::new(lender)));
        let mut host = TestHost::with_endpoint(endpoint, ram);
        host.enable();
        host.create_pair(1, ENTRIES);
        if shadowed {
            host.configure_shadow();
        }
        Rack { host, control, counter, user: Some(user), depth: 0 }
    }

    fn command(&mut self, qid: u16, sqe: Sqe) {
        if self.depth < usize::from(ENTRIES) - 1 {
            self.depth += 1;
            self.host.enqueue(qid, sqe);
            self.host.ring(qid);
        }
    }

    fn take(&mut self, step: Step) {
        let buffer = self.host.scratch();
        match step {
            Step::Read => self.command(1, transfer(IoOpcode::Read, 0, 4096, buffer)),
            Step::Write => self.command(1, transfer(IoOpcode::Write, 0, 4096, buffer)),
            Step::Admin => self.command(0, admin_data(AdminOpcode::Identify, 0, 1, buffer)),
            Step::Finish => {
                let mut control = self.control.lock().unwrap();
                if !control.held.is_empty() {
                    control.finish_one();
                }
            }
            Step::Poll => drop(self.host.poll()),
            Step::Park => drop(self.host.endpoint.park()),
        }
    }

    fn pass(&self, ticks: u64) {
        self.counter.0.fetch_add(ticks, Ordering::Relaxed);
    }

    fn memory(&self) -> Vec<u8> {
        self.host.peek(RAM, RAM_SIZE as usize)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn nothing_of_a_user_that_left_meanwhile_is_touched(
        shadowed: bool,
        before in prop::collection::vec((step(), 0..ticks::GAP / 4), 0..40),
        frozen in ticks::GAP + 1..u64::MAX / 2,
        after in prop::collection::vec(prop_oneof![Just(Step::Poll), Just(Step::Park)], 1..20),
    ) {
        let mut rack = Rack::new(shadowed);
        for (step, took) in before {
            rack.take(step);
            rack.pass(took);
        }
        rack.user = None;
        rack.pass(frozen);
        let memory = rack.memory();
        for step in after {
            rack.take(step);
            rack.take(Step::Poll);
        }
        prop_assert!(rack.memory() == memory, "it went on");
    }

    #[test]
    fn a_user_that_is_still_there_gets_its_answers(
        shadowed: bool,
        steps in prop::collection::vec((step(), 0..4 * ticks::GAP), 0..40),
    ) {
        let mut rack = Rack::new(shadowed);
        for (step, took) in steps {
            rack.take(step);
            rack.pass(took);
        }
        for _ in 0..usize::from(ENTRIES) + 1 {
            rack.take(Step::Poll);
            rack.take(Step::Finish);
            rack.take(Step::Poll);
        }
        let mut answers = 0;
        while rack.host.completion(0).is_some() || rack.host.completion(1).is_some() {
            answers += 1;
        }
        prop_assert_eq!(answers, rack.depth);
    }
}

/// The same where the front is elsewhere: what it asked for last is not begun, though something else
/// has just ended.
#[test]
fn nothing_is_begun_for_a_front_that_left_meanwhile() {
    let (nvme, control) = slow_drive();
    let counter = Counter::default();
    let mut lender = Endpoint::with_clock(Box::new(nvme), Box::new(counter.clone()));
    let (user, stream) = UnixStream::pair().unwrap();
    lender.begin(Lending::alone(), Some(Arc::new(stream)));
    let offer = lender.serve_medium(None).unwrap();
    let front = medium::front(&offer.description, offer.handles, Lost::new(|| {})).unwrap();
    let mut host = TestHost::around(front);
    host.enable();
    host.create_pair(1, ENTRIES);
    let buffer = host.scratch();
    host.submit(1, transfer(IoOpcode::Write, 0, 512, buffer));
    host.poll();
    lender.poll(0);
    assert_eq!(control.lock().unwrap().held.len(), 1);
    host.submit(1, transfer(IoOpcode::Write, 1, 512, buffer));
    host.poll();
    drop(user);
    counter.0.fetch_add(ticks::GAP + 1, Ordering::Relaxed);
    control.lock().unwrap().finish_one();
    lender.poll(counter.now_ns());
    assert!(control.lock().unwrap().held.is_empty(), "it went on");
}
