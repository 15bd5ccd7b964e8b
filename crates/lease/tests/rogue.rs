//! A node that says whatever it likes, as the host that it is: it harms nobody but itself.
//!
//! The control plane knows by the connection which host a node is of, so a rogue says everything as its own host. It
//! repeats what it, and what others, have said before, with other numbers in it, and makes up the rest. Two honest hosts
//! have a lease between them meanwhile. Also a rogue that is party to a lease, as its lender or its borrower, spoils
//! that one, and no other.

use rackbus_lease::{
    Authority, Config, Decision, Epoch, LeaseId, LeaseState, Message, Placement, ShareRequest,
    TurnUse,
};
use rackbus_seeds::Random;

const CONFIG: Config =
    Config { ttl: 3000, close_grace: 2000, resend: 100, silence: 4000, strict_ttl: false };
const ROGUE: &str = "gamma";

struct Rack {
    random: Random,
    now: u64,
    authority: Authority,
    /// What anybody said to the control plane, and it to anybody.
    heard: Vec<Message>,
    /// The rogue's host is its owner's again.
    is_reformed: bool,
}

impl Rack {
    /// Alpha lends two functions, the rogue one; beta has borrowed the first.
    fn new(seed: u64) -> (Rack, LeaseId) {
        let authority = Authority::new(CONFIG);
        let (random, heard) = (Random(seed), Vec::new());
        let mut rack = Rack { random, now: 1, authority, heard, is_reformed: false };
        for (host, devices) in
            [("alpha", &["nvme0", "nvme1"][..]), ("beta", &[]), (ROGUE, &["ram0"])]
        {
            rack.register(host, devices);
        }
        let lease = rack.borrow("alpha/nvme0", "beta").expect("nobody has it");
        (rack, lease)
    }

    fn register(&mut self, host: &str, devices: &[&str]) {
        let devices = devices.iter().map(|device| ((*device).to_owned(), 0)).collect();
        let address = host.to_owned();
        self.say(host, Message::Register { incarnation: 5, devices, newest_lease: 0, address });
    }

    fn say(&mut self, host: &str, message: Message) {
        self.heard.push(message.clone());
        let outcome = self.authority.receive(self.now, host, message);
        self.perform(outcome);
    }

    /// Honest nodes answer at once; the rogue when it likes.
    fn perform(&mut self, outcome: Decision) {
        let mut said = outcome.messages;
        while let Some((host, message)) = said.pop() {
            self.heard.push(message.clone());
            if host == ROGUE && !self.is_reformed {
                continue;
            }
            let answer = match message {
                Message::Arm { incarnation, device, epoch, .. } => {
                    Message::Armed { incarnation, device, epoch, change: None }
                }
                Message::Revoke { incarnation, device, epoch } => {
                    Message::Revoked { incarnation, device, epoch }
                }
                Message::Granted(grant) => {
                    Message::Opened { lease: grant.lease, outcome: Ok("socket".to_owned()) }
                }
                Message::Ended { lease, .. } | Message::TurnOver { lease, .. } => {
                    Message::Closed { lease }
                }
                _ => continue,
            };
            self.heard.push(answer.clone());
            said.extend(self.authority.receive(self.now, &host, answer).messages);
        }
    }

    fn borrow(&mut self, function: &str, borrower: &str) -> Option<LeaseId> {
        let function = function.parse().unwrap();
        let (lease, outcome) =
            self.authority.borrow(self.now, &function, borrower, Placement::Lender).ok()?;
        self.perform(outcome);
        Some(lease)
    }

    fn number(&mut self) -> u64 {
        match self.random.below(8) {
            0 => u64::MAX,
            1 => self.random.next(),
            _ => self.random.below(8) as u64,
        }
    }

    fn device(&mut self) -> String {
        ["nvme0", "nvme1", "ram0", "../alpha", ""][self.random.below(5)].to_owned()
    }

    /// Anything that a node can say.
    fn made_up(&mut self) -> Message {
        let (incarnation, device, epoch): (u64, String, Epoch) =
            (self.number(), self.device(), self.number());
        let lease = self.number();
        let text = || "made up".to_owned();
        match self.random.below(12) {
            0 => {
                let devices = (0..self.random.below(4)).map(|_| (self.device(), self.number()));
                let devices = devices.collect();
                // More than some leases cannot have been lost.
                Message::Register { incarnation, devices, newest_lease: lease, address: text() }
            }
            1 => Message::Armed { incarnation, device, epoch, change: None },
            2 => Message::ArmFailed {
                incarnation,
                device,
                epoch,
                reason: text(),
                refused: self.random.chance(50),
            },
            3 => Message::Revoked { incarnation, device, epoch },
            4 => Message::Opened { lease, outcome: Ok(text()) },
            5 => Message::Opened { lease, outcome: Err(text()) },
            6 => Message::Renew { lease, incarnation, sent: None },
            7 => Message::Lost { lease, reason: text() },
            8 => Message::Closed { lease },
            9 => Message::TurnUsed { lease, how: TurnUse::Gone(text()) },
            10 => {
                let (number, level) = (lease, Some(text()));
                let outcome = if self.random.chance(70) { Ok(()) } else { Err(text()) };
                Message::LevelSet { incarnation, device, epoch, number, level, outcome }
            }
            _ => Message::Withdrawn { incarnation, device, number: lease },
        }
    }

    /// The rogue says something.
    fn rogue(&mut self) {
        let message = match self.random.chance(40) {
            true => self.heard[self.random.below(self.heard.len())].clone(),
            false => self.made_up(),
        };
        self.say(ROGUE, message);
        // Nobody remembers everything.
        if self.heard.len() > 500 {
            self.heard.drain(..250);
        }
    }

    /// Time passes; the honest renew.
    fn pass(&mut self, lease: LeaseId) {
        self.now += self.random.below(800) as u64;
        self.register("alpha", &["nvme0", "nvme1"]);
        self.register("beta", &[]);
        self.say("beta", Message::Renew { lease, incarnation: 5, sent: None });
        let outcome = self.authority.tick(self.now);
        self.perform(outcome);
    }

    /// The rogue's host has its own node again, which begins as any node does.
    fn reform(&mut self) {
        self.is_reformed = true;
        // By its clock.
        let mut incarnation = 1000;
        for _ in 0..2 {
            let devices = [("ram0".to_owned(), 0)].into();
            let address = ROGUE.to_owned();
            let register = Message::Register { incarnation, devices, newest_lease: 0, address };
            let outcome = self.authority.receive(self.now, ROGUE, register);
            let later = outcome.messages.iter().find_map(|(_, message)| match message {
                Message::StaleIncarnation { latest, .. } => Some(*latest),
                _ => None,
            });
            self.perform(outcome);
            match later {
                Some(latest) => incarnation = latest.checked_add(1).expect("a later life"),
                None => return,
            }
        }
        panic!("its host is kept out");
    }

    /// The lease that is none of the rogue's is as it was, and its function is lent by it.
    fn is_kept(&self, lease: LeaseId) {
        let record = self.authority.lease(lease).expect("it is known");
        assert!(matches!(record.state, LeaseState::Active { .. }), "{record:?}");
        let function = self.authority.function(&record.function).unwrap();
        assert_eq!(function.epoch, record.epoch, "{function:?}");
    }
}

fn seeds() -> impl Iterator<Item = u64> {
    0..400
}

#[test]
fn a_node_of_another_host_ends_no_lease_of_others() {
    for seed in seeds() {
        let (mut rack, lease) = Rack::new(seed);
        for _ in 0..200 {
            match rack.random.below(10) {
                0 => rack.pass(lease),
                _ => rack.rogue(),
            }
            rack.is_kept(lease);
        }
        // And the honest go on: the other function of alpha's is available, and given back.
        let other = rack.borrow("alpha/nvme1", "beta").expect("nobody has it");
        rack.is_kept(other);
        let outcome = rack.authority.give_back(rack.now, other, None).unwrap();
        rack.perform(outcome);
        assert!(rack.borrow("alpha/nvme1", "beta").is_some(), "seed {seed}: it is not back");
    }
}

#[test]
fn a_lying_borrower_harms_its_own_lease_only() {
    for seed in seeds() {
        let (mut rack, lease) = Rack::new(seed);
        rack.borrow("alpha/nvme1", ROGUE);
        for _ in 0..100 {
            match rack.random.below(10) {
                0 => rack.pass(lease),
                1 => drop(rack.borrow("alpha/nvme1", ROGUE)),
                _ => rack.rogue(),
            }
            rack.is_kept(lease);
        }
        // What it has goes back when it does nothing of what it is asked for, also against its will.
        for _ in 0..20 {
            rack.now += CONFIG.ttl / 4;
            rack.pass(lease);
        }
        assert!(rack.borrow("alpha/nvme1", "beta").is_some(), "seed {seed}: it keeps it");
        rack.is_kept(lease);
    }
}

#[test]
fn a_lying_lender_harms_what_it_lends_only() {
    for seed in seeds() {
        let (mut rack, lease) = Rack::new(seed);
        for _ in 0..100 {
            match rack.random.below(10) {
                0 => rack.pass(lease),
                1 => drop(rack.borrow("gamma/ram0", "beta")),
                _ => rack.rogue(),
            }
            rack.is_kept(lease);
        }
        // Two leases of a function of its own are never live at once.
        let live = rack.authority.leases().filter(|it| it.is_live());
        let own = live.filter(|it| it.function.host == ROGUE && it.function.device == "ram0");
        assert!(own.count() <= 1, "seed {seed}");
        // When the host is its owner's again, what it has is lent again, and each time under a later epoch.
        rack.reform();
        let mut epoch = 0;
        for _ in 0..3 {
            let lease = rack.borrow("gamma/ram0", "beta").expect("it is offered again");
            let record = rack.authority.lease(lease).expect("it is known").clone();
            assert!(record.epoch > epoch, "seed {seed}: epoch {} follows {epoch}", record.epoch);
            epoch = record.epoch;
            let outcome = rack.authority.give_back(rack.now, lease, None).unwrap();
            rack.perform(outcome);
        }
    }
}

#[test]
fn a_rogue_borrower_does_not_delay_the_turns_of_others() {
    for seed in seeds().take(100) {
        let (mut rack, lease) = Rack::new(seed);
        let mut shares = Vec::new();
        for borrower in ["beta", ROGUE] {
            let request = ShareRequest {
                function: "alpha/nvme1".parse().unwrap(),
                borrower: borrower.to_owned(),
                terms: Placement::Lender.into(),
                slice: Some(1000),
                grace: 500,
                weight: 1,
            };
            let (share, outcome) = rack.authority.share(rack.now, request).unwrap();
            rack.perform(outcome);
            shares.push(share);
        }
        for _ in 0..600 {
            match rack.random.below(4) {
                0 => rack.pass(lease),
                _ => rack.rogue(),
            }
            rack.is_kept(lease);
        }
        let beta = rack.authority.shares().find(|share| share.share == shares[0]).unwrap();
        assert!(beta.turns + u64::from(beta.turn.is_some()) > 3, "seed {seed}: {beta:?}");
    }
}
