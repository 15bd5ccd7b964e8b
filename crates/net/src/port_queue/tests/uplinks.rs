//! Three uplinks whose hosts freeze and go on, at any step, driven by a seed. What is checked: no frame from outside comes
//! into the rack twice, none goes out by an uplink that was frozen and whose place is taken, and while hosts run
//! frames go both ways.

use super::*;
use crate::liveness::SILENT_NS;
use crate::uplink::{FENCE_NS, LOOK_NS, UplinkSeat, UplinkSteadiness};

const UPLINKS: std::ops::Range<usize> = STATIONS..STATIONS + 3;
const OUTSIDE: [u8; 6] = [2, 9, 9, 9, 9, 9];
const MS: u64 = 1_000_000;
/// How long after the first of the running hosts has changed frames may be lost.
const CHANGES_NS: u64 = 2 * SILENT_NS + SILENT_NS / 2;

/// An uplink, and frames that came to its interface and were not read yet, by number.
struct Uplink {
    seat: UplinkSeat,
    arrived: Vec<u64>,
    frozen_until: u64,
    steadiness: UplinkSteadiness,
    /// Its interface counts as down until then.
    rests_until: u64,
    /// It has looked, and froze before it did anything.
    looked: bool,
}

struct Rack {
    world: World,
    uplinks: Vec<Uplink>,
    /// When each frame came from outside, and those that were forwarded, by number.
    came: Vec<u64>,
    forwarded: BTreeSet<u64>,
    /// When a host sent each frame outside, and those that left.
    sent: Vec<u64>,
    left: BTreeSet<u64>,
    /// Since when the first of the uplinks that run is the same.
    steady: (Option<usize>, u64),
}

/// A frame goes one way, once, and not when it is as old as one that lay with a frozen host.
fn once(gone: &mut BTreeSet<u64>, number: u64, age: u64, way: &str) -> Result<(), String> {
    match gone.insert(number) {
        true if age <= FENCE_NS + 100 * MS => Ok(()),
        true => Err(format!("frame {number} went {way} {} ms after it was sent", age / MS)),
        false => Err(format!("frame {number} went {way} twice")),
    }
}

impl Rack {
    fn new(seed: u64) -> Rack {
        let world = World::with("uplinks = [\"a/eth1\", \"b/eth1\", \"c/eth1\"]\n", seed);
        let switch = world.queues[0].switch();
        let uplink = |own| Uplink {
            seat: UplinkSeat::new(switch, own, 1),
            arrived: Vec::new(),
            frozen_until: 0,
            steadiness: UplinkSteadiness::default(),
            rests_until: 0,
            looked: false,
        };
        let uplinks = UPLINKS.map(uplink).collect();
        let (forwarded, left) = (BTreeSet::new(), BTreeSet::new());
        let (came, sent) = (Vec::new(), Vec::new());
        Rack { world, uplinks, came, forwarded, sent, left, steady: (None, 0) }
    }

    /// The uplink that is to be used, if it has been the same for long enough; `first` is the first that had a turn.
    fn expected(&mut self, first: Option<usize>) -> Option<usize> {
        let now = self.world.now();
        if self.steady.0 != first {
            self.steady = (first, now);
        }
        first.filter(|nth| self.has_turn(*nth) && now - self.steady.1 > CHANGES_NS)
    }

    /// A frame from outside comes to all uplinks, as on one network.
    fn arrive(&mut self) {
        let number = self.came.len() as u64;
        self.came.push(self.world.now());
        self.uplinks.iter_mut().for_each(|it| it.arrived.push(number));
    }

    fn freeze(&mut self, nth: usize) {
        let now = self.world.now();
        self.uplinks[nth].frozen_until = now + self.world.random.next() % (5 * SILENT_NS);
    }

    /// Whether the host of an uplink stood still too often, which then has no interface for a while.
    fn rests(&mut self, nth: usize) -> bool {
        let now = self.world.now();
        let uplink = &mut self.uplinks[nth];
        let Some(rest) = uplink.steadiness.rest_ns(uplink.seat.stops(), now) else { return false };
        uplink.rests_until = now + rest;
        self.world.close(STATIONS + nth);
        true
    }

    fn has_turn(&self, nth: usize) -> bool {
        self.uplinks[nth].frozen_until.max(self.uplinks[nth].rests_until) <= self.world.now()
    }

    /// An uplink looks at the others; false when it rests instead.
    fn look(&mut self, nth: usize) -> bool {
        let own = STATIONS + nth;
        if self.world.down.remove(&own) {
            let switch = self.world.queues[own].switch();
            self.uplinks[nth].seat = UplinkSeat::new(switch, own, self.world.now());
            self.uplinks[nth].steadiness.begin_seat();
            self.uplinks[nth].arrived.clear();
        }
        self.uplinks[nth].seat.look(&mut self.world.queues[own]);
        !self.rests(nth)
    }

    /// What an uplink's thread does in a turn. It may freeze after each part of it.
    fn turn(&mut self, nth: usize) -> Result<(), String> {
        if !std::mem::take(&mut self.uplinks[nth].looked) {
            if !self.look(nth) {
                return Ok(());
            }
            if self.world.random.chance(1) {
                self.uplinks[nth].looked = true;
                self.freeze(nth);
                return Ok(());
            }
        }
        self.forward(nth)
    }

    fn forward(&mut self, nth: usize) -> Result<(), String> {
        let own = STATIONS + nth;
        let clock = self.world.clock.clone();
        let now = || clock.load(Ordering::Relaxed);
        let Rack { world, uplinks, came, forwarded, sent, left, .. } = self;
        let (uplink, queue) = (&mut uplinks[nth], &mut world.queues[own]);
        for number in std::mem::take(&mut uplink.arrived) {
            if uplink.seat.is_active() && !uplink.seat.is_fenced(now) {
                once(forwarded, number, now() - came[number as usize], "in")?;
            }
        }
        let switch = queue.switch.clone();
        while let Some(frame) = queue.next() {
            let mut bytes = vec![0; frame.bytes.len()];
            frame.bytes.copy_to(&mut bytes);
            if !uplink.seat.hear(&switch, &bytes) && !uplink.seat.is_fenced(now) {
                let number = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
                once(left, number, now() - sent[number as usize], "out")?;
            }
            queue.consume();
        }
        Ok(())
    }

    /// The first host sends a frame outside.
    fn send(&mut self) {
        let number = self.sent.len() as u64;
        self.sent.push(self.world.now());
        let own = self.world.stations.all()[0].mac.0;
        let frame = [&OUTSIDE[..], &own, &KIND, &number.to_le_bytes(), &[0; 60]].concat();
        let _ = self.world.queues[0].send_checked(Offload::default(), &frame, &[]);
        self.world.queues[0].flush();
    }

    fn step(&mut self) -> Result<(), String> {
        self.world.clock.fetch_add(self.world.random.next() % (20 * MS), Ordering::Relaxed);
        self.world.answer(true);
        if self.world.random.below(400) == 0 {
            let nth = self.world.random.below(UPLINKS.len());
            self.freeze(nth);
        }
        self.arrive();
        self.send();
        let turns: Vec<usize> = (0..self.uplinks.len()).filter(|nth| self.has_turn(*nth)).collect();
        for nth in &turns {
            self.turn(*nth)?;
        }
        let (came, sent) = (self.came.len() as u64 - 1, self.sent.len() as u64 - 1);
        if let Some(nth) = self.expected(turns.first().copied()) {
            let (in_time, out) = (self.forwarded.contains(&came), self.left.contains(&sent));
            if !self.uplinks[nth].seat.is_active() || !in_time || !out {
                return Err(format!(
                    "uplink {nth} runs and is not used: active {}, frame {came} in {in_time}, {sent} out {out}",
                    self.uplinks[nth].seat.is_active(),
                ));
            }
        }
        Ok(())
    }
}

#[test]
fn one_uplink_at_a_time_is_used_however_hosts_freeze() {
    const { assert!(LOOK_NS + FENCE_NS < SILENT_NS) };
    let simulation = Simulation {
        test: "-p rackbus-net --lib port_queue::tests::uplinks::one_uplink",
        usual: 40,
    };
    simulation.run(|seed, _| {
        let mut rack = Rack::new(seed);
        (0..4000).try_for_each(|_| rack.step())
    });
}

/// A rack that has run for a while, whose first uplink is active.
fn running() -> Rack {
    let mut rack = Rack::new(1);
    // It says nothing: the first one waits for that for two seconds.
    rack.uplinks[2].frozen_until = u64::MAX;
    for _ in 0..300 {
        rack.tick();
    }
    assert!(rack.uplinks[0].seat.is_active() && !rack.uplinks[1].seat.is_active());
    rack
}

impl Rack {
    /// 10 ms without surprises.
    fn tick(&mut self) {
        self.world.clock.fetch_add(10 * MS, Ordering::Relaxed);
        self.world.answer(true);
        self.arrive();
        self.send();
        for nth in 0..UPLINKS.len() {
            if self.has_turn(nth) && self.look(nth) {
                self.forward(nth).unwrap();
            }
        }
    }
}

#[test]
fn an_uplink_whose_host_stops_again_and_again_rests_and_another_takes_over() {
    let mut rack = running();
    let mut rests = Vec::new();
    for nth in 0..4000 {
        // It runs for 200 ms of each 900 ms, so that nobody finds it frozen.
        rack.uplinks[0].frozen_until = if nth % 90 < 70 { u64::MAX } else { 0 };
        rack.tick();
        if rests.last().is_none_or(|at| *at != rack.uplinks[0].rests_until) {
            rests.push(rack.uplinks[0].rests_until);
        }
    }
    let lost = (0..rack.came.len() as u64).filter(|it| !rack.forwarded.contains(it)).count();
    // The first three stops, and those between a rest and the next one.
    assert!(rests.len() >= 3 && lost < 1500, "{rests:?} {lost} of {}", rack.came.len());
    assert!(rack.uplinks[1].seat.is_active());
    rack.uplinks[0].frozen_until = 0;
    while !rack.uplinks[0].seat.is_active() {
        rack.tick();
        assert!(rack.came.len() < 20_000, "it is used again when it runs");
    }
    assert!(!rack.uplinks[1].seat.is_active());
}

#[test]
fn an_uplink_that_hears_that_another_stands_in_drops_frames_until_that_one_does_not() {
    let mut rack = running();
    let switch = rack.world.queues[0].switch.clone();
    let word = |says: u8| {
        let [to, from] = [0, 1].map(|nth| switch.mac(STATIONS + nth).0);
        [&to[..], &from, &[0x88, 0xb5, b'u', says]].concat()
    };
    assert!(rack.uplinks[0].seat.hear(&switch, &word(1)));
    let now = rack.world.now();
    assert!(!rack.uplinks[0].seat.is_active() && rack.uplinks[0].seat.is_fenced(|| now));
    assert!(rack.uplinks[0].seat.hear(&switch, &word(0)));
    let ticks = (0..).take_while(|_| {
        rack.tick();
        !rack.uplinks[0].seat.is_active()
    });
    let ticks = ticks.count();
    assert!((20..40).contains(&ticks), "{ticks} times 10 ms");
}

#[test]
fn another_uplink_takes_over_from_a_frozen_one_which_stays_back_when_it_goes_on() {
    let mut rack = running();
    rack.uplinks[0].frozen_until = u64::MAX;
    let ticks = (0..).take_while(|_| {
        rack.tick();
        !rack.uplinks[1].seat.is_active()
    });
    let ticks = ticks.count();
    assert!((90..130).contains(&ticks), "{ticks} times 10 ms");
    for _ in 0..50 {
        rack.tick();
    }
    let last = rack.came.len() as u64 - 1;
    assert!(rack.forwarded.contains(&last) && rack.left.contains(&last));
    // It goes on where it was: it is active as far as it knows, and has old frames of both directions.
    let before = (rack.forwarded.len(), rack.left.len());
    rack.forward(0).unwrap();
    assert_eq!((rack.forwarded.len(), rack.left.len()), before);
    assert!(!rack.uplinks[0].seat.is_active());
    rack.uplinks[0].frozen_until = 0;
    let ticks = (0..).take_while(|_| {
        rack.tick();
        !rack.uplinks[0].seat.is_active()
    });
    let ticks = ticks.count();
    assert!((20..60).contains(&ticks), "{ticks} times 10 ms");
    assert!(!rack.uplinks[1].seat.is_active());
}
