//! Time-sharing, simulated: borrowers take turns on one function while messages are lost and delayed, users release it late
//! or early, borrowers freeze and die, and the control plane is restarted from what it stored.
//!
//! * One borrower at a time has the function, and never without having been asked to release it before it is taken away.
//! * Equal borrowers have it equally long: Jain's index of the time that each had it, hand-over included, is at least
//!   0.99; so it is per weight where weights differ.
//! * Nobody who is there starves, and who died for good leaves the ring.

use std::collections::BTreeMap;

use rackbus_lease::{
    Authority, Borrower, BorrowerAction, Config, Decision, LeaseId, Lender, LenderAction, Message,
    Millis, Placement, Record, ShareRequest, TurnUse,
};
use rackbus_seeds::Random;

const CONFIG: Config =
    Config { ttl: 3000, close_grace: 2000, resend: 100, silence: 4000, strict_ttl: false };
const SLICE: Millis = 2000;
const GRACE: Millis = 2000;
/// The host that has the function; the others borrow it.
const LENDER: usize = 0;
/// Milliseconds that a step of the simulation takes.
const STEP: Millis = 5;

enum Work {
    Arm(String, u64),
    Revoke(String, u64),
    Open(LeaseId),
    Close(LeaseId),
}

struct Host {
    name: String,
    lender: Lender,
    borrower: Borrower,
    life: u64,
    registered: bool,
    register_at: Millis,
    alive: bool,
    frozen_until: Millis,
    /// The lease by which its user has the function, and since when.
    has: Option<(LeaseId, Millis)>,
    /// For how long it had the function.
    held: Millis,
    /// When it had it last.
    last_had: Millis,
    /// The greatest time that its user takes to release the function.
    slowness: Millis,
}

struct Rack {
    random: Random,
    now: Millis,
    authority: Authority,
    stored: BTreeMap<String, Record>,
    hosts: Vec<Host>,
    /// What arrives when: from or to the authority.
    network: Vec<(Millis, usize, bool, Message)>,
    work: Vec<(Millis, usize, Work)>,
    /// Messages lost, of a hundred.
    loss: u64,
    /// Users that are done before their turn is over, of a hundred.
    early: u64,
    handovers: u64,
}

impl Rack {
    fn new(seed: u64, borrowers: usize, loss: u64) -> Rack {
        let mut random = Random(seed);
        let host = |number: usize| {
            let devices = (number == LENDER).then(|| "nvme0".to_owned());
            Host {
                name: format!("host{number}"),
                lender: Lender::new(1, devices),
                borrower: Borrower::new(1),
                life: 1,
                registered: false,
                register_at: 0,
                alive: true,
                frozen_until: 0,
                has: None,
                held: 0,
                last_had: 0,
                // Every other one releases it at once.
                slowness: (number % 2) as u64
                    * (GRACE / 2 + random.below(GRACE as usize / 2) as u64),
            }
        };
        let hosts = (0..=borrowers).map(host).collect();
        Rack {
            random,
            now: 1,
            authority: Authority::new(CONFIG),
            stored: BTreeMap::new(),
            hosts,
            network: Vec::new(),
            work: Vec::new(),
            loss,
            early: 0,
            handovers: 0,
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        let now = self.now;
        if self.authority.next_tick().is_some_and(|at| at <= now) {
            let outcome = self.authority.tick(now);
            self.perform(outcome);
        }
        let frozen: Vec<bool> = self.hosts.iter().map(|it| it.frozen_until > now).collect();
        let (due, later) = std::mem::take(&mut self.network)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, host, up, _)| *at <= now && (*up || !frozen[*host]));
        self.network = later;
        due.into_iter().for_each(|(_, host, up, message)| self.deliver(host, up, message));
        let (due, later) = std::mem::take(&mut self.work)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, host, _)| *at <= now && !frozen[*host]);
        self.work = later;
        due.into_iter().for_each(|(_, host, work)| self.finish(host, work));
        for at in (0..self.hosts.len()).filter(|at| !frozen[*at]) {
            self.tick(at);
        }
    }

    fn tick(&mut self, at: usize) {
        let (now, host) = (self.now, &mut self.hosts[at]);
        if !host.alive {
            return;
        }
        let actions = host.borrower.tick(now);
        if host.register_at <= now {
            host.register_at = now + if host.registered { CONFIG.ttl / 3 } else { CONFIG.resend };
            let newest_lease = host.lender.newest_lease().max(host.borrower.newest_lease());
            let (incarnation, devices) = (host.life, host.lender.newest_epochs());
            let address = host.name.clone();
            self.send(at, true, Message::Register { incarnation, devices, newest_lease, address });
        }
        self.borrower_actions(at, actions);
        let done = self.early > 0 && self.random.below(20_000) < self.early as usize;
        if let Some((lease, _)) = self.hosts[at].has.filter(|_| done) {
            let actions = self.hosts[at].borrower.turn_used(lease, TurnUse::Used);
            self.borrower_actions(at, actions);
        }
    }

    fn send(&mut self, host: usize, up: bool, message: Message) {
        if !self.random.chance(self.loss) {
            let at = self.now + 1 + self.random.below(30) as u64;
            self.network.push((at, host, up, message));
        }
    }

    fn perform(&mut self, outcome: Decision) {
        for record in outcome.records {
            if let Record::Lease(lease) = &record
                && lease.turn.is_some()
                && lease.epoch > 1
                && matches!(lease.state, rackbus_lease::LeaseState::Active { .. })
            {
                self.handovers += 1;
            }
            match record.removes() {
                true => self.stored.remove(&record.key()),
                false => self.stored.insert(record.key(), record),
            };
        }
        for (host, message) in outcome.messages {
            let at = self.hosts.iter().position(|it| it.name == host).expect("a host of the rack");
            self.send(at, false, message);
        }
    }

    fn deliver(&mut self, at: usize, up: bool, message: Message) {
        if up {
            let outcome = self.authority.receive(self.now, &self.hosts[at].name, message);
            return self.perform(outcome);
        }
        let host = &mut self.hosts[at];
        match message {
            _ if !host.alive => {}
            Message::Registered { incarnation } => host.registered |= incarnation == host.life,
            Message::Arm { .. } | Message::Revoke { .. } => {
                let actions = host.lender.receive(self.now, message);
                self.lender_actions(at, actions);
            }
            other => {
                let actions = host.borrower.receive(self.now, other);
                self.borrower_actions(at, actions);
            }
        }
    }

    fn lender_actions(&mut self, at: usize, actions: Vec<LenderAction>) {
        for action in actions {
            let done = self.now + 5 + self.random.below(40) as u64;
            match action {
                LenderAction::Send(message) => self.send(at, true, message),
                LenderAction::Arm { device, epoch, .. } => {
                    self.work.push((done, at, Work::Arm(device, epoch)));
                }
                LenderAction::Revoke { device, epoch, .. } => {
                    self.work.push((done, at, Work::Revoke(device, epoch)));
                }
                other => panic!("nobody asked for {other:?}"),
            }
        }
    }

    fn borrower_actions(&mut self, at: usize, actions: Vec<BorrowerAction>) {
        for action in actions {
            let work = match action {
                BorrowerAction::Send(message) => {
                    self.send(at, true, message);
                    continue;
                }
                // Its users release a function when they are asked to.
                BorrowerAction::Hasten { .. } | BorrowerAction::Cut { .. } => continue,
                BorrowerAction::Open(grant) => (10, Work::Open(grant.lease)),
                BorrowerAction::Close { lease, .. } => (10, Work::Close(lease)),
                BorrowerAction::Yield { lease, grace, .. } => {
                    let late = self.random.below(self.hosts[at].slowness as usize + 1) as u64;
                    assert_eq!(grace, GRACE);
                    (late.min(grace), Work::Close(lease))
                }
            };
            self.work.push((self.now + work.0, at, work.1));
        }
    }

    fn finish(&mut self, at: usize, work: Work) {
        let host = &mut self.hosts[at];
        if !host.alive {
            return;
        }
        match work {
            Work::Arm(device, epoch) => {
                let actions = host.lender.arm_done(&device, epoch, Ok(()));
                self.lender_actions(at, actions);
            }
            Work::Revoke(device, epoch) => {
                // Whoever had it has it no longer.
                for at in 0..self.hosts.len() {
                    self.release(at);
                }
                let actions = self.hosts[at].lender.revoke_done(&device, epoch);
                self.lender_actions(at, actions);
            }
            Work::Open(lease) => {
                let actions = host.borrower.open_done(lease, Ok("socket".to_owned()));
                // The lender lets in whom it was armed for, and nobody else.
                let admitted = self.hosts[LENDER].lender.admitted("nvme0").map(|it| it.lease);
                if !actions.is_empty() && admitted == Some(lease) {
                    let holders = self.hosts.iter().filter(|it| it.has.is_some()).count();
                    assert_eq!(holders, 0, "two borrowers have the function");
                    self.hosts[at].has = Some((lease, self.now));
                }
                self.borrower_actions(at, actions);
            }
            Work::Close(lease) => {
                if self.hosts[at].has.is_some_and(|(had, _)| had == lease) {
                    self.release(at);
                }
                let actions = self.hosts[at].borrower.close_done(lease);
                self.borrower_actions(at, actions);
            }
        }
    }

    fn release(&mut self, at: usize) {
        let now = self.now;
        if let Some((_, since)) = self.hosts[at].has.take() {
            self.hosts[at].held += now - since;
            self.hosts[at].last_had = now;
        }
    }

    fn share(&mut self, at: usize, weight: u32) {
        let request = ShareRequest {
            function: "host0/nvme0".parse().unwrap(),
            borrower: self.hosts[at].name.clone(),
            terms: Placement::Lender.into(),
            slice: Some(SLICE),
            grace: GRACE,
            weight,
        };
        let (_, outcome) = self.authority.share(self.now, request).unwrap();
        self.perform(outcome);
    }

    fn restart_authority(&mut self) {
        self.authority = Authority::restore(CONFIG, self.now, self.stored.values().cloned());
        self.network.clear();
        for host in &mut self.hosts {
            (host.registered, host.register_at) = (false, self.now);
            host.borrower.reconnected();
        }
    }

    /// Another life of a borrower's node.
    fn restart(&mut self, at: usize) {
        self.release(at);
        self.work.retain(|(_, host, _)| *host != at);
        let host = &mut self.hosts[at];
        host.life += 1;
        host.borrower = Borrower::new(host.life);
        (host.alive, host.registered, host.register_at) = (true, false, self.now);
    }

    fn die(&mut self, at: usize) {
        self.release(at);
        self.hosts[at].alive = false;
    }

    fn run(&mut self, time: Millis, mut each: impl FnMut(&mut Rack)) {
        let until = self.now + time;
        while self.now < until {
            self.step();
            each(self);
        }
    }
}

fn jain(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    let sum: f64 = values.iter().sum();
    sum * sum / (values.len() as f64 * values.iter().map(|value| value * value).sum::<f64>())
}

/// A rack whose nodes have registered, with a share for each of `weights`.
fn ring(seed: u64, weights: &[u32], loss: u64) -> Rack {
    let mut rack = Rack::new(seed, weights.len(), 0);
    rack.run(1000, |_| ());
    rack.loss = loss;
    for (at, weight) in weights.iter().enumerate() {
        rack.share(at + 1, *weight);
    }
    rack
}

#[test]
fn eight_equal_borrowers_have_it_equally_long() {
    for seed in 0..4 {
        let mut rack = ring(seed, &[1; 8], 5);
        rack.run(40 * 8 * SLICE, |_| ());
        let held: Vec<Millis> = rack.hosts[1..].iter().map(|it| it.held).collect();
        let jain = jain(held.iter().map(|held| *held as f64));
        assert!(jain >= 0.99, "seed {seed}: {jain}: {held:?}");
        // A turn of a slow one is longer, and so it has fewer: without an account they would not be equal.
        let per_turn = |slow: usize| {
            let of = |at: usize| rack.authority.shares().nth(at - 1).unwrap();
            let all = (1..=8).filter(|at| at % 2 == slow).map(of);
            let (held, turns) =
                all.fold((0, 0), |(held, turns), it| (held + it.held, turns + it.turns));
            held as f64 / turns as f64
        };
        assert!(per_turn(1) > 1.1 * per_turn(0), "seed {seed}: all release it as quickly");
        // What is nobody's is small: hand-over, and messages that are lost on the way.
        let all: Millis = held.iter().sum();
        assert!(all * 100 >= rack.now * 80, "seed {seed}: {all} of {} ms", rack.now);
        assert!(rack.handovers > 200, "{}", rack.handovers);
    }
}

#[test]
fn weights_divide_the_time() {
    for seed in 0..4 {
        let weights = [1, 2, 3, 1];
        let mut rack = ring(seed, &weights, 5);
        rack.run(60 * 7 * SLICE, |_| ());
        let per_weight = rack.hosts[1..].iter().zip(weights);
        let per_weight = per_weight.map(|(host, weight)| host.held as f64 / f64::from(weight));
        let jain = jain(per_weight);
        assert!(jain >= 0.99, "seed {seed}: {jain}");
    }
}

#[test]
fn a_control_plane_that_is_restarted_goes_on_with_the_ring() {
    for seed in 0..4 {
        let mut rack = ring(seed, &[1; 5], 5);
        let mut random = Random(seed);
        rack.run(60 * 5 * SLICE, |rack| {
            if random.below(4000) == 0 {
                rack.restart_authority();
            }
        });
        assert_eq!(rack.authority.shares().count(), 5);
        let jain = jain(rack.hosts[1..].iter().map(|it| it.held as f64));
        assert!(jain >= 0.98, "seed {seed}: {jain}");
    }
}

#[test]
fn nobody_starves_beside_borrowers_that_freeze_and_die() {
    for seed in 0..12 {
        let mut rack = ring(seed, &[1; 6], 10);
        rack.early = 10;
        let mut random = Random(seed ^ 77);
        let calm = [1, 2];
        let mut longest = 0;
        rack.run(50 * 6 * SLICE, |rack| {
            let at = 3 + random.below(4);
            match random.below(3000) {
                0 => rack.hosts[at].frozen_until = rack.now + random.below(8000) as u64,
                1 if rack.hosts[at].alive => rack.die(at),
                1 | 2 if !rack.hosts[at].alive => rack.restart(at),
                _ => {}
            }
            for at in calm {
                let host = &rack.hosts[at];
                let waited = if host.has.is_some() { 0 } else { rack.now - host.last_had };
                longest = longest.max(waited);
            }
        });
        // Each of the others can hold on for its slice, its grace, and until the lender takes it away, in each round.
        let round = 6 * (SLICE + GRACE + CONFIG.close_grace + CONFIG.ttl);
        assert!(longest < 2 * round, "seed {seed}: somebody waited for {longest} ms");
        let held = calm.map(|at| rack.hosts[at].held);
        assert!(held.iter().all(|held| *held > 10 * SLICE), "seed {seed}: {held:?}");
    }
}

#[test]
fn a_share_of_a_silent_host_leaves_the_ring_and_one_of_a_host_that_returned_stays() {
    let mut rack = ring(1, &[1; 3], 0);
    rack.run(4 * SLICE, |_| ());
    (1..3).for_each(|at| rack.die(at));
    rack.run(2 * CONFIG.silence, |_| ());
    assert_eq!(rack.authority.shares().count(), 3, "they may come back");
    rack.restart(1);
    rack.run(10 * CONFIG.silence, |_| ());
    let there: Vec<String> = rack.authority.shares().map(|it| it.borrower.clone()).collect();
    assert_eq!(there, ["host1", "host3"]);
    assert!(rack.hosts[1].has.is_some() || rack.hosts[3].has.is_some());
}

#[test]
fn the_only_share_is_not_asked_to_release_its_function() {
    let mut rack = ring(1, &[1], 0);
    rack.run(20 * SLICE, |_| ());
    let first = rack.hosts[1].has.expect("it has the function").0;
    rack.run(20 * SLICE, |_| ());
    assert_eq!(rack.hosts[1].has.map(|(lease, _)| lease), Some(first));
    // Another one that comes waits for no whole slice: this one had its own long ago.
    let host = Host {
        name: "late".to_owned(),
        lender: Lender::new(1, []),
        borrower: Borrower::new(1),
        slowness: 0,
        has: None,
        held: 0,
        last_had: 0,
        life: 1,
        registered: false,
        register_at: rack.now,
        alive: true,
        frozen_until: 0,
    };
    rack.hosts.push(host);
    rack.run(200, |_| ());
    rack.share(2, 1);
    rack.run(GRACE + 500, |_| ());
    assert!(rack.hosts[2].has.is_some());
    let shares: Vec<i64> = rack.authority.shares().map(|it| it.credit).collect();
    assert!(shares[0] > -(GRACE as i64) - 200, "it owes for its time alone: {shares:?}");
}
