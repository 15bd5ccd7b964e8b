//! Requests for several functions, among them ones that want each other's: whatever comes when, each is
//! served whole and none waits for ever. The authority and the queue decide, as in the live control plane; who
//! wants what, and when it is returned, is drawn from a seed.

use std::collections::BTreeSet;

use rackbus_lease::{
    Authority, Config, Decision, FunctionId, LeaseId, Message, Placement, QueuePlace, Terms,
    WaitingQueue,
};
use rackbus_seeds::Random;

const FUNCTIONS: usize = 4;
const REQUESTS: usize = 12;

fn function(number: usize) -> FunctionId {
    format!("alpha/nvme{number}").parse().unwrap()
}

/// A rack of one lender and one borrower, whose nodes answer at once.
struct Rack {
    authority: Authority,
    now: u64,
}

impl Rack {
    fn new() -> Rack {
        let mut rack = Rack { authority: Authority::new(Config::default()), now: 0 };
        let devices: Vec<String> = (0..FUNCTIONS).map(|n| format!("nvme{n}")).collect();
        for (host, devices) in [("alpha", devices), ("beta", Vec::new())] {
            let (incarnation, address) = (1, "here".to_owned());
            let devices = devices.into_iter().map(|device| (device, 0)).collect();
            let said = Message::Register { incarnation, devices, newest_lease: 0, address };
            let outcome = rack.authority.receive(rack.now, host, said);
            rack.perform(outcome);
        }
        rack
    }

    /// Delivers what was said, and what is answered, until nobody says anything.
    fn perform(&mut self, outcome: Decision) {
        let mut said = outcome.messages;
        while let Some((host, message)) = said.pop() {
            let answer = match message {
                Message::Arm { device, epoch, .. } => {
                    Message::Armed { incarnation: 1, device, epoch, change: None }
                }
                Message::Revoke { device, epoch, .. } => {
                    Message::Revoked { incarnation: 1, device, epoch }
                }
                Message::Granted(grant) => {
                    Message::Opened { lease: grant.lease, outcome: Ok("socket".to_owned()) }
                }
                Message::Ended { lease, .. } => Message::Closed { lease },
                _ => continue,
            };
            said.extend(self.authority.receive(self.now, &host, answer).messages);
        }
    }

    fn give_back(&mut self, lease: LeaseId) {
        let outcome = self.authority.give_back(self.now, lease, None).unwrap();
        self.perform(outcome);
    }
}

/// How a request that wants several functions goes about it.
trait Policy {
    /// Takes the functions that are free for the request at `place`; the leases that it has then, of which it needs one for
    /// each function.
    fn try_to_get(
        rack: &mut Rack,
        queue: &WaitingQueue,
        functions: &[FunctionId],
        place: QueuePlace,
        has: &[LeaseId],
    ) -> Vec<LeaseId>;
}

/// As the control plane does it: all in one step, when it is its turn for each.
struct Whole;

impl Policy for Whole {
    fn try_to_get(
        rack: &mut Rack,
        queue: &WaitingQueue,
        functions: &[FunctionId],
        place: QueuePlace,
        _: &[LeaseId],
    ) -> Vec<LeaseId> {
        if functions.iter().any(|function| queue.before(function, place) > 0) {
            return Vec::new();
        }
        let terms = Terms::from(Placement::Lender);
        match rack.authority.borrow_all(rack.now, functions, "beta", &terms) {
            Ok((leases, outcome)) => {
                rack.perform(outcome);
                leases
            }
            Err(_) => Vec::new(),
        }
    }
}

/// As a script would do it that borrows one after the other, and waits with what it has.
struct OneByOne;

impl Policy for OneByOne {
    fn try_to_get(
        rack: &mut Rack,
        _: &WaitingQueue,
        functions: &[FunctionId],
        _: QueuePlace,
        has: &[LeaseId],
    ) -> Vec<LeaseId> {
        let mut leases = has.to_vec();
        if let Some(next) = functions.get(has.len())
            && let Ok((lease, outcome)) =
                rack.authority.borrow(rack.now, next, "beta", Placement::Lender)
        {
            rack.perform(outcome);
            leases.push(lease);
        }
        leases
    }
}

struct Asker {
    functions: Vec<FunctionId>,
    place: QueuePlace,
    has: Vec<LeaseId>,
}

impl Asker {
    fn is_served(&self) -> bool {
        self.has.len() == self.functions.len()
    }
}

/// Plays one seed; false when requests wait and nothing can happen any more.
fn play<P: Policy>(seed: u64) -> bool {
    let mut random = Random(seed);
    let (mut rack, mut queue) = (Rack::new(), WaitingQueue::default());
    let (mut askers, mut asked): (Vec<Asker>, usize) = (Vec::new(), 0);
    loop {
        rack.now += 1;
        if asked < REQUESTS && (askers.is_empty() || random.chance(40)) {
            asked += 1;
            let mut wanted = BTreeSet::new();
            let count = 1 + random.below(FUNCTIONS);
            while wanted.len() < count {
                wanted.insert(random.below(FUNCTIONS));
            }
            // In any order: nobody knows what others want.
            let mut functions: Vec<FunctionId> = wanted.into_iter().map(function).collect();
            for at in (1..functions.len()).rev() {
                functions.swap(at, random.below(at + 1));
            }
            let place = queue.enter(&functions, random.below(3) as u8);
            askers.push(Asker { functions, place, has: Vec::new() });
        }
        let mut moved = false;
        for asker in askers.iter_mut().filter(|asker| !asker.is_served()) {
            let Asker { functions, place, has } = asker;
            let now_has = P::try_to_get(&mut rack, &queue, functions, *place, has);
            moved |= now_has.len() > has.len();
            *has = now_has;
            if asker.is_served() {
                queue.leave(&asker.functions, asker.place);
            }
        }
        // Whoever has all that it wants returns it some time.
        let served: Vec<usize> = (0..askers.len()).filter(|at| askers[*at].is_served()).collect();
        if !served.is_empty() && (asked == REQUESTS || random.chance(50)) {
            let asker = askers.remove(served[random.below(served.len())]);
            asker.has.into_iter().for_each(|lease| rack.give_back(lease));
            moved = true;
        }
        if asked == REQUESTS && askers.is_empty() {
            return true;
        }
        if asked == REQUESTS && !moved {
            return false;
        }
    }
}

#[test]
fn compositions_that_want_each_others_functions_are_all_served() {
    for seed in 0..2_000 {
        assert!(play::<Whole>(seed), "seed {seed}: requests wait for ever");
    }
}

/// The simulation finds the deadlock of those who wait with a part of what they want.
#[test]
fn waiting_with_a_part_of_a_composition_is_found_to_deadlock() {
    assert!((0..200).any(|seed| !play::<OneByOne>(seed)));
}
