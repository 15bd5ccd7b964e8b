//! Turns on a function, step by step: what ends one, what it costs, and what its borrower is told.

use std::collections::{BTreeMap, VecDeque};

use rackbus_lease::{
    Authority, Config, Decision, DeviceChange, LeaseState, Message, Millis, Placement, Record,
    ShareRecord, ShareRequest, TurnUse,
};

const SLICE: Millis = 1000;
const GRACE: Millis = 5000;

/// A rack whose messages arrive at once: alpha lends nvme0, beta and gamma take turns on it.
struct Rack {
    now: Millis,
    authority: Authority,
    stored: BTreeMap<String, Record>,
    /// Alpha's node fails to arm its function.
    broken: bool,
    /// Borrowers that were asked to release the function within their grace, by their leases.
    asked: BTreeMap<u64, String>,
    /// Leases that were taken away at once.
    ended: Vec<u64>,
}

impl Rack {
    fn new() -> Rack {
        let mut rack = Rack {
            now: 1000,
            authority: Authority::new(Config::default()),
            stored: BTreeMap::new(),
            broken: false,
            asked: BTreeMap::new(),
            ended: Vec::new(),
        };
        rack.register();
        rack
    }

    fn register(&mut self) {
        for host in ["alpha", "beta", "gamma"] {
            let devices = (host == "alpha").then(|| ("nvme0".to_owned(), 0));
            let (devices, address) = (devices.into_iter().collect(), host.to_owned());
            let message = Message::Register { incarnation: 1, devices, newest_lease: 0, address };
            self.hear(host, message);
        }
    }

    fn hear(&mut self, host: &str, message: Message) {
        let outcome = self.authority.receive(self.now, host, message);
        self.perform(outcome);
    }

    fn perform(&mut self, outcome: Decision) {
        let mut outcomes = VecDeque::from([outcome]);
        while let Some(Decision { records, messages, .. }) = outcomes.pop_front() {
            for record in records {
                match record.removes() {
                    true => self.stored.remove(&record.key()),
                    false => self.stored.insert(record.key(), record),
                };
            }
            for (host, message) in messages {
                if let Some(answer) = self.answer(&host, message) {
                    outcomes.push_back(self.authority.receive(self.now, &host, answer));
                }
            }
        }
    }

    fn answer(&mut self, host: &str, message: Message) -> Option<Message> {
        match message {
            Message::Arm { incarnation, device, epoch, .. } if self.broken => {
                let reason = "no such level".to_owned();
                Some(Message::ArmFailed { incarnation, device, epoch, reason, refused: false })
            }
            Message::Arm { incarnation, device, epoch, .. } => {
                Some(Message::Armed { incarnation, device, epoch, change: None })
            }
            Message::Granted(grant) => {
                Some(Message::Opened { lease: grant.lease, outcome: Ok("socket".to_owned()) })
            }
            Message::Revoke { incarnation, device, epoch } => {
                Some(Message::Revoked { incarnation, device, epoch })
            }
            Message::TurnOver { lease, grace, .. } => {
                assert_eq!(grace, GRACE);
                self.asked.insert(lease, host.to_owned());
                None
            }
            Message::Ended { lease, .. } => {
                self.ended.push(lease);
                Some(Message::Closed { lease })
            }
            _ => None,
        }
    }

    fn share(&mut self, host: &str) -> u64 {
        let request = ShareRequest {
            function: "alpha/nvme0".parse().unwrap(),
            borrower: host.to_owned(),
            terms: Placement::Lender.into(),
            slice: Some(SLICE),
            grace: GRACE,
            weight: 1,
        };
        let (share, outcome) = self.authority.share(self.now, request).unwrap();
        self.perform(outcome);
        share
    }

    /// Time passes, in which all nodes are heard.
    fn pass(&mut self, time: Millis) {
        let until = self.now + time;
        while self.now < until {
            self.now += 50;
            self.register();
            for lease in self.live() {
                let host = self.authority.lease(lease).unwrap().borrower.clone();
                self.hear(&host, Message::Renew { lease, incarnation: 1, sent: None });
            }
            if self.authority.next_tick().is_some_and(|at| at <= self.now) {
                let outcome = self.authority.tick(self.now);
                self.perform(outcome);
            }
        }
    }

    fn live(&self) -> Vec<u64> {
        self.authority.leases().filter(|it| it.is_live()).map(|it| it.lease).collect()
    }

    /// The lease that can be used, or is asked back.
    fn lease(&self) -> u64 {
        self.live()[0]
    }

    fn holder(&self) -> String {
        self.authority.lease(self.lease()).unwrap().borrower.clone()
    }

    fn used(&mut self, how: TurnUse) {
        let (lease, holder) = (self.lease(), self.holder());
        self.hear(&holder, Message::TurnUsed { lease, how });
    }

    /// Who was asked releases the function.
    fn release(&mut self) {
        for (lease, host) in std::mem::take(&mut self.asked) {
            self.hear(&host, Message::Closed { lease });
        }
    }

    fn restart(&mut self, now: Millis) {
        self.now = now;
        let records = self.stored.values().cloned();
        self.authority = Authority::restore(Config::default(), now, records);
        self.register();
    }

    fn of(&self, share: u64) -> Option<ShareRecord> {
        self.authority.shares().find(|it| it.share == share).cloned()
    }
}

#[test]
fn turns_that_nobody_used_count_in_a_row_only() {
    let mut rack = Rack::new();
    let beta = rack.share("beta");
    rack.used(TurnUse::Unused);
    rack.used(TurnUse::Unused);
    // One in which somebody used it until it was over.
    rack.share("gamma");
    rack.pass(SLICE);
    assert_eq!(rack.asked.values().collect::<Vec<_>>(), ["beta"]);
    rack.release();
    rack.pass(SLICE);
    rack.release();
    assert_eq!(rack.holder(), "beta");
    rack.used(TurnUse::Unused);
    assert_eq!(rack.of(beta).map(|it| it.unused), Some(1), "it has left");
}

#[test]
fn a_share_that_its_lender_refuses_each_time_leaves_the_ring() {
    let mut rack = Rack::new();
    rack.broken = true;
    let beta = rack.share("beta");
    rack.pass(60_000);
    assert_eq!(rack.of(beta), None);
    assert!(rack.live().is_empty());
}

#[test]
fn shares_that_leave_yield_or_lose_their_function_have_their_grace() {
    let ends: [fn(&mut Authority, Millis, u64) -> Decision; 4] = [
        |authority, now, share| authority.leave(now, share).unwrap(),
        |authority, now, share| authority.give_turn_back(now, share).unwrap(),
        |authority, now, share| {
            let turn = authority.shares().find(|it| it.share == share).unwrap().turn.clone();
            authority.give_back(now, turn.unwrap().lease, None).unwrap()
        },
        |authority, now, _| {
            let change = DeviceChange {
                host: "alpha".to_owned(),
                device: "nvme0".to_owned(),
                number: 0,
                functions: vec!["nvme0".to_owned()],
                section: None,
                was: None,
                listed: true,
                by_node: false,
                answer: None,
            };
            authority.withdraw(now, change, true).unwrap().1
        },
    ];
    for (at, end) in ends.into_iter().enumerate() {
        let mut rack = Rack::new();
        let share = rack.share("beta");
        let lease = rack.lease();
        let outcome = end(&mut rack.authority, rack.now, share);
        rack.perform(outcome);
        assert_eq!(rack.asked.keys().collect::<Vec<_>>(), [&lease], "end {at}");
        rack.pass(GRACE);
        assert!(rack.authority.lease(lease).unwrap().is_live(), "end {at}");
        assert_eq!(rack.ended, [] as [u64; 0], "end {at}");
    }
}

#[test]
fn what_the_node_gives_back_is_taken_at_once() {
    for how in [TurnUse::Used, TurnUse::Unused, TurnUse::Gone("the VM has ended".to_owned())] {
        let mut rack = Rack::new();
        rack.share("beta");
        let lease = rack.lease();
        rack.used(how);
        assert_eq!((rack.ended, rack.asked.len()), (vec![lease], 0));
    }
}

#[test]
fn a_holder_that_is_next_by_its_account_keeps_the_function() {
    let mut rack = Rack::new();
    let beta = rack.share("beta");
    let gamma = rack.share("gamma");
    rack.pass(SLICE);
    // Beta holds on for four slices longer than its turn.
    rack.pass(4 * SLICE);
    rack.release();
    assert_eq!(rack.holder(), "gamma");
    let (lease, debt) = (rack.lease(), rack.of(beta).unwrap().credit);
    assert!(debt <= -4 * SLICE as i64, "{debt}");
    rack.pass(3 * SLICE);
    assert_eq!((rack.lease(), rack.asked.len()), (lease, 0), "it was handed over to itself");
    assert!(rack.of(beta).unwrap().credit > debt, "its debt is paid meanwhile");
    assert!(rack.of(gamma).unwrap().turns >= 2);
    rack.pass(3 * SLICE);
    assert_eq!(rack.asked.keys().collect::<Vec<_>>(), [&lease], "beta has paid");
}

#[test]
fn a_clock_that_is_set_back_across_a_restart_delays_no_turn() {
    let mut rack = Rack::new();
    rack.now = 10_000_000;
    rack.register();
    rack.share("beta");
    rack.share("gamma");
    let lease = rack.lease();
    assert!(matches!(rack.authority.lease(lease).unwrap().state, LeaseState::Active { .. }));
    rack.restart(1000);
    rack.pass(2 * SLICE);
    assert_eq!(rack.asked.keys().collect::<Vec<_>>(), [&lease]);
    rack.release();
    assert_eq!(rack.holder(), "gamma");

    let mut rack = Rack::new();
    rack.now = 10_000_000;
    rack.register();
    rack.broken = true;
    let beta = rack.share("beta");
    assert!(rack.of(beta).unwrap().not_before > rack.now);
    rack.broken = false;
    rack.restart(1000);
    rack.pass(60_000);
    assert_eq!(rack.holder(), "beta");
}
