//! Copies that land beside the link: what is said of them, and what becomes of them where the lane is lost, or a peer lies.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rackbus_memory::exchange::lane::{Lane, LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::{Region, SharedMemory};
use rackbus_segment::landing::{LANDING_BYTES, LANDING_SLOT, LANDING_SLOTS, LEAST_LANDED};

use super::super::super::landing::{LandingLane, LandingMemory};
use super::*;

const LENGTH: usize = LEAST_LANDED as usize;
const BIG: u64 = 4 * LEAST_LANDED as u64;
const PROOF: [u8; PROOF_BYTES] = [9; PROOF_BYTES];

/// What a lane does from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Moves,
    Fails,
    Hangs,
    /// It hangs, with a transfer under way.
    Hung,
}

/// A lane to memory of the test.
#[derive(Debug)]
struct TestLane {
    there: Arc<Region>,
    here: Option<Arc<Region>>,
    begun: Vec<(u64, bool, usize, usize)>,
    does: Arc<Mutex<Does>>,
    closed: Arc<AtomicBool>,
}

impl Lane for TestLane {
    fn provider(&self) -> &str {
        "test"
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), LaneError> {
        self.here = Some(region.clone());
        Ok(())
    }

    fn begin(&mut self, id: u64, write: bool, at: usize, length: usize) -> Result<bool, LaneError> {
        self.begun.push((id, write, at, length));
        Ok(true)
    }

    fn poll(&mut self, ended: &mut Vec<u64>) -> Result<(), LaneError> {
        let mut does = self.does.lock().unwrap();
        match *does {
            Does::Moves => {}
            Does::Fails => return Err(LaneError("the cable is out".to_owned())),
            Does::Hangs if self.begun.is_empty() => return Ok(()),
            Does::Hangs | Does::Hung => {
                *does = Does::Hung;
                return Ok(());
            }
        }
        for (id, write, at, length) in self.begun.drain(..) {
            let here = self.here.as_ref().unwrap();
            let (from, to) = if write { (here, &self.there) } else { (&self.there, here) };
            let mut bytes = vec![0; length];
            from.slice(at, length).unwrap().copy_to(&mut bytes);
            to.slice(at, length).unwrap().copy_from(&bytes);
            ended.push(id);
        }
        Ok(())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn rest(&mut self) -> bool {
        false
    }

    fn close(&mut self) -> bool {
        self.closed.store(true, Ordering::Release);
        true
    }
}

/// The other end of a lane: what was exposed, until it is taken away.
#[derive(Debug, Default)]
struct TestTarget {
    exposed: Mutex<Option<Arc<Region>>>,
}

impl LaneTarget for TestTarget {
    fn provider(&self) -> &str {
        "test"
    }

    fn expose(&self, region: &Arc<Region>, proof: usize) -> Result<(), LaneError> {
        region.slice(proof, PROOF_BYTES).unwrap().copy_from(&PROOF);
        *self.exposed.lock().unwrap() = Some(region.clone());
        Ok(())
    }

    fn failure(&self) -> Option<LaneError> {
        None
    }

    fn close(&self) -> bool {
        self.exposed.lock().unwrap().take().is_some()
    }
}

/// A lane to `there`.
fn lane_to(there: &Arc<Region>) -> (TestLane, Arc<Mutex<Does>>, Arc<AtomicBool>) {
    let (does, closed) = (Arc::new(Mutex::new(Does::Moves)), Arc::<AtomicBool>::default());
    let lane = TestLane {
        there: there.clone(),
        here: None,
        begun: Vec::new(),
        does: does.clone(),
        closed: closed.clone(),
    };
    (lane, does, closed)
}

/// Memory of the test that a lane leads to.
fn landing_memory() -> Arc<Region> {
    let bytes = u64::from(LANDING_BYTES) + PROOF_BYTES as u64;
    let there = SharedMemory::create("there", bytes).unwrap().region().clone();
    there.slice(LANDING_BYTES as usize, PROOF_BYTES).unwrap().copy_from(&PROOF);
    there
}

/// Waits until a transfer is under way that does not end.
fn wait_until_hung(does: &Mutex<Does>) {
    let begun = Instant::now();
    while *does.lock().unwrap() != Does::Hung {
        assert!(begun.elapsed() < COMES, "no transfer begins");
        std::thread::yield_now();
    }
}

/// The connector's side, with a lane to memory that the test has.
struct Connector {
    side: Side,
    replica: Arc<Object>,
    there: Arc<Region>,
    does: Arc<Mutex<Does>>,
    closed: Arc<AtomicBool>,
    batch: u64,
}

impl Connector {
    fn new() -> Connector {
        let mut side = Side::new();
        let id = side.store.memory(BIG).unwrap();
        let replica = side.store.get(id).unwrap().clone();
        side.far.add_memory(REPLICA, replica.clone(), (BIG, true));
        let there = landing_memory();
        let (lane, does, closed) = lane_to(&there);
        let lane = LandingLane::new(Box::new(lane), PROOF).unwrap();
        side.far.lock().landings.set_lane(lane);
        Connector { side, replica, there, does, closed, batch: 0 }
    }

    /// Copies bytes of this value to the begin, beside the test.
    fn copying(&self, value: u8) -> std::thread::JoinHandle<Result<(), Refusal>> {
        let far = self.side.far.clone();
        let part = CopyPart { offset: 7, follows: false };
        std::thread::spawn(move || far.copy(REPLICA.1, vec![value; LENGTH], part))
    }

    fn applied(&mut self) {
        self.batch += 1;
        let (connection, batch) = (REPLICA.1, self.batch);
        self.side.hear(REPLICA.0, CarriedMessage::AppliedAlone { connection, batch });
    }

    /// The place of a copy of this value, which was said to have landed.
    fn next_landed(&self, value: u8) -> u32 {
        let (now, said) = (self.batch + 1, self.side.owner.next());
        let CarriedMessage::Landed { connection, batch, held, offset, place, length } = said else {
            panic!("{said:?}");
        };
        assert_eq!((connection, batch, held, offset), (REPLICA.1, now, false, 7));
        let mut landed = vec![0; length as usize];
        self.there.slice(place as usize, length as usize).unwrap().copy_to(&mut landed);
        assert!(landed == vec![value; LENGTH], "they are there before it is said");
        place
    }

    /// All of a copy of this value comes over the link.
    fn next_carried(&self, value: u8) {
        let mut bytes = 0;
        loop {
            let said = self.side.owner.next();
            let CarriedMessage::Copied { batch, last, offset, data, .. } = said else {
                panic!("{said:?}");
            };
            assert_eq!((batch, offset), (self.batch + 1, 7 + bytes as u64));
            assert!(data.iter().all(|it| *it == value));
            bytes += data.len();
            if last {
                return assert_eq!(bytes, LENGTH);
            }
        }
    }
}

#[test]
fn a_copy_lands_before_it_is_said_and_has_its_slot_until_it_has_taken_effect() {
    let mut connector = Connector::new();
    let first = connector.copying(1);
    let place = connector.next_landed(1);
    let mut here = vec![0; LENGTH];
    let replica = connector.replica.region().unwrap();
    replica.whole().part(7, LENGTH).unwrap().copy_to(&mut here);
    assert!(here == vec![1; LENGTH], "it is here as well");
    // As many others as there are slots: the last one goes over the link.
    let others: Vec<_> = (2..=LANDING_SLOTS as u8).map(|value| connector.copying(value)).collect();
    let begun = Instant::now();
    while connector.side.far.lock().copies.len() + 1 < LANDING_SLOTS as usize {
        assert!(begun.elapsed() < COMES, "they are not asked for");
        std::thread::yield_now();
    }
    let last = connector.copying(99);
    while connector.side.far.lock().copies.len() < LANDING_SLOTS as usize {
        assert!(begun.elapsed() < COMES, "it is not asked for");
        std::thread::yield_now();
    }
    connector.applied();
    assert_eq!(first.join().unwrap(), Ok(()));
    let mut places = vec![place];
    for _ in &others {
        let CarriedMessage::Landed { place, .. } = connector.side.owner.next() else {
            panic!("it does not land");
        };
        assert!(!places.contains(&place), "{place}");
        places.push(place);
        connector.applied();
    }
    connector.next_carried(99);
    connector.applied();
    for copy in others.into_iter().chain([last]) {
        assert_eq!(copy.join().unwrap(), Ok(()));
    }
    // The slots are free again.
    let next = connector.copying(50);
    connector.next_landed(50);
    connector.applied();
    assert_eq!(next.join().unwrap(), Ok(()));
    // What is short is not moved by a transfer.
    let far = connector.side.far.clone();
    let part = CopyPart { offset: 0, follows: false };
    let short = std::thread::spawn(move || far.copy(REPLICA.1, vec![1; 64], part).is_ok());
    assert!(matches!(connector.side.owner.next(), CarriedMessage::Copied { .. }));
    connector.applied();
    assert!(short.join().unwrap());
}

#[test]
fn a_copy_whose_lane_is_lost_in_the_middle_goes_over_the_link_and_so_do_all_others() {
    for lost in [Does::Fails, Does::Hangs] {
        let mut connector = Connector::new();
        let first = connector.copying(1);
        connector.next_landed(1);
        connector.applied();
        assert_eq!(first.join().unwrap(), Ok(()));
        *connector.does.lock().unwrap() = lost;
        let second = connector.copying(2);
        connector.next_carried(2);
        connector.applied();
        assert_eq!(second.join().unwrap(), Ok(()));
        assert!(connector.closed.load(Ordering::Acquire));
        // Also when it would go by now: bytes of before may still arrive in the slots.
        *connector.does.lock().unwrap() = Does::Moves;
        let third = connector.copying(3);
        connector.next_carried(3);
        connector.applied();
        assert_eq!(third.join().unwrap(), Ok(()));
    }
}

#[test]
fn a_slot_whose_copy_was_not_answered_is_not_used_again() {
    let connector = Connector::new();
    let copy = connector.copying(1);
    connector.next_landed(1);
    connector.side.far.forget(REPLICA);
    let lane = connector.side.far.lock().landings.lane().unwrap();
    // It is waited for as any answer, or given up with its connection.
    let _ = copy.join().unwrap();
    // By who looks at all memory, who may have it longer than who copied.
    let begun = Instant::now();
    while !connector.closed.load(Ordering::Acquire) {
        assert!(begun.elapsed() < COMES, "the lane stays open");
        std::thread::yield_now();
    }
    assert!(lane.land(&[2; LENGTH]).is_none());
}

/// As when a process is killed that copies: others still copy by the lane.
#[test]
fn a_slot_of_a_part_that_nobody_waits_for_any_more_is_free() {
    let connector = Connector::new();
    let far = &connector.side.far;
    let effects = far.effects.clone();
    let none_looks = effects.write().unwrap();
    let lane = far.lock().landings.lane().unwrap();
    for _ in 0..=LANDING_SLOTS {
        let part = CopyPart { offset: 7, follows: false };
        drop(far.begin_copy(REPLICA.1, vec![1; LENGTH], part).unwrap());
        let landed = lane.land(&[2; LENGTH]).expect("the lane is there");
        landed.free_slot();
    }
    drop(none_looks);
    assert!(!connector.closed.load(Ordering::Acquire));
}

#[test]
fn a_slot_is_given_back_without_waiting_for_the_transfer_of_another_copy() {
    let (lane, does, closed) = lane_to(&landing_memory());
    let lane = LandingLane::new(Box::new(lane), PROOF).unwrap();
    let first = lane.land(&[1; LENGTH]).unwrap();
    *does.lock().unwrap() = Does::Hangs;
    let second = {
        let lane = lane.clone();
        std::thread::spawn(move || lane.land(&[2; LENGTH]).is_some())
    };
    wait_until_hung(&does);
    first.free_slot();
    assert!(!closed.load(Ordering::Acquire), "it was waited for until it counted as lost");
    assert!(!second.join().unwrap());
    assert!(closed.load(Ordering::Acquire));
}

#[test]
fn a_copy_whose_connection_ends_while_it_moves_is_not_waited_for() {
    let connector = Connector::new();
    *connector.does.lock().unwrap() = Does::Hangs;
    let copy = connector.copying(1);
    wait_until_hung(&connector.does);
    connector.side.far.forget(REPLICA);
    assert_eq!(copy.join().unwrap(), Err(Refusal::NotResponding));
    assert_eq!(connector.side.far.lock().last_copy, 0, "it waits in a queue that nobody looks at");
}

#[test]
fn a_lane_that_leads_to_other_memory_is_not_used() {
    let there = landing_memory();
    there.slice(LANDING_BYTES as usize, PROOF_BYTES).unwrap().copy_from(&[0; PROOF_BYTES]);
    let (lane, ..) = lane_to(&there);
    assert!(LandingLane::new(Box::new(lane), PROOF).is_err());
}

fn landed(connection: Handle, offset: u64, (place, length): (u32, u32)) -> CarriedMessage<'static> {
    CarriedMessage::Landed { connection, batch: 1, held: false, offset, place, length }
}

#[test]
fn what_has_landed_takes_effect_with_its_batch_and_what_has_not_ends_the_conversation() {
    let mut side = Side::new();
    let home = side.add(HOME);
    let way = |side: &Side| (HOME.0, side.connector.outbox.clone());
    let hear = |side: &Side, said| {
        let (way, outbox) = way(side);
        side.far.hear((way, &outbox), said)
    };
    assert!(hear(&side, landed(HOME.1, 0, (0, 8))).is_err(), "nothing was given");
    let target = Arc::new(TestTarget::default());
    let memory = LandingMemory::new(target.clone()).unwrap();
    side.far.lock().landings.set_memory(memory);
    let exposed = target.exposed.lock().unwrap().clone().unwrap();
    exposed.slice(LANDING_SLOT as usize, 8).unwrap().copy_from(&[5; 8]);
    for (offset, place, length) in [
        // No slot, more than a slot, the proof, and what is not inside of the segment.
        (0, 8, 8),
        (0, LANDING_SLOT, LANDING_SLOT + 1),
        (0, LANDING_BYTES, 8),
        (SIZE - 4, LANDING_SLOT, 8),
        (u64::MAX, LANDING_SLOT, 8),
    ] {
        assert!(hear(&side, landed(HOME.1, offset, (place, length))).is_err(), "{offset} {place}");
    }
    // Nor of a connection that is over, or of another host's.
    hear(&side, landed(Handle(77), 0, (LANDING_SLOT, 8))).unwrap();
    let to_owner = (REPLICA.0, &side.owner.outbox);
    assert!(side.far.hear(to_owner, landed(REPLICA.1, 0, (LANDING_SLOT, 8))).is_err());
    let mut bytes = vec![0; SIZE as usize];
    home.region().unwrap().whole().copy_to(&mut bytes);
    assert_eq!(bytes, vec![0; SIZE as usize]);
    hear(&side, landed(HOME.1, 16, (LANDING_SLOT, 8))).unwrap();
    home.region().unwrap().whole().copy_to(&mut bytes);
    assert_eq!(
        (&bytes[..16], &bytes[16..24], &bytes[24..]),
        (&[0; 16][..], &[5; 8][..], &[0; SIZE as usize - 24][..])
    );
    // With the conversation the memory is taken away.
    side.far.end(HOME.0);
    let begun = Instant::now();
    while target.exposed.lock().unwrap().is_some() {
        assert!(begun.elapsed() < COMES, "it stays exposed");
        std::thread::yield_now();
    }
}

#[test]
fn memory_to_copy_to_is_given_once_and_taken_once() {
    let side = Side::new();
    let wanted = || CarriedMessage::LandingWanted { providers: vec!["none".to_owned()] };
    let given = || CarriedMessage::LandingGiven { offer: Some("{}".to_owned()) };
    let (owner, connector) = (&side.owner.outbox, &side.connector.outbox);
    assert!(side.far.hear((REPLICA.0, owner), given()).is_err(), "it was not asked for");
    assert!(side.far.hear((REPLICA.0, owner), wanted()).is_err(), "an owner has nothing to copy");
    side.far.hear((HOME.0, connector), wanted()).unwrap();
    assert_eq!(side.connector.next(), CarriedMessage::LandingGiven { offer: None });
    assert!(side.far.hear((HOME.0, connector), wanted()).is_err(), "once in a conversation");
}
