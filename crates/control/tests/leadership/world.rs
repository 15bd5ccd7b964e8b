//! The simulated world.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rackbus_control::api::{EventKind, EventRecord};
use rackbus_control::etcd::model::ModelCluster;
use rackbus_control::etcd::{KeyPage, KeyRange, Kv, KvError, TransactionResult, Txn};
use rackbus_control::leadership::core::{
    CandidateConfig, EtcdUnavailable, Leadership, LeadershipAction, Won,
};
use rackbus_control::leadership::election::{self, Member};
use rackbus_control::leadership::{Tenure, TenureClock};
use rackbus_control::store::{Commit, Etcd, Keys, Store, StoreError};
use rackbus_lease::Record;
use rackbus_seeds::Random;

const TTL: u64 = 3000;
const CANDIDATES: usize = 3;
/// How long things go wrong, and how long they are well again after that, in milliseconds.
const TROUBLE: u64 = 20_000;
const PEACE: u64 = 15_000;
/// Requests that may be under way within each other.
const DEEPEST: usize = 3;

/// Simulates the schedule that `seed` gives; fails where an invariant does not hold.
pub fn run(seed: u64, traced: bool) -> Result<(), String> {
    let world = World::new(seed, traced);
    world.advance(TROUBLE);
    world.heal();
    let before = world.history().done.len();
    world.advance(PEACE);
    let history = world.history();
    if let Some(error) = &history.wrong {
        return Err(error.clone());
    }
    match history.done.len() > before {
        true => Ok(()),
        false => Err("nobody leads although all is well".to_owned()),
    }
}

/// What was done, and what went wrong with it.
#[derive(Default)]
struct History {
    /// Numbers whose commit was answered.
    done: BTreeSet<u64>,
    newest_term: u64,
    /// All tenures that may not be over.
    tenures: Vec<(usize, Arc<Tenure>)>,
    wrong: Option<String>,
}

struct World {
    this: Weak<World>,
    model: ModelCluster,
    now: Arc<AtomicU64>,
    random: Mutex<Random>,
    candidates: Vec<Mutex<Candidate>>,
    history: Mutex<History>,
    depth: AtomicUsize,
    traced: bool,
}

struct Candidate {
    own: usize,
    clock: TenureClock,
    core: Leadership,
    lead: Option<Lead>,
    frozen_until: u64,
    cut: bool,
}

/// What a leader has in memory.
struct Lead {
    tenure: Arc<Tenure>,
    store: Etcd,
    number: u64,
}

fn keys() -> Keys {
    Keys::of("demo", None)
}

impl World {
    fn new(seed: u64, traced: bool) -> Arc<World> {
        let mut random = Random(seed);
        let now = Arc::new(AtomicU64::new(1));
        let candidates = (0..CANDIDATES).map(|own| {
            // Clocks that are five percent too fast or too slow.
            let (offset, rate) = (random.next() % 100_000, 950 + random.next() % 101);
            let now = now.clone();
            let clock: TenureClock =
                Arc::new(move || offset + now.load(Ordering::Relaxed) * rate / 1000);
            let core = Leadership::new(CandidateConfig::of_ttl(TTL));
            let candidate = Candidate { own, clock, core, lead: None, frozen_until: 0, cut: false };
            Mutex::new(candidate)
        });
        let candidates = candidates.collect();
        Arc::new_cyclic(|this| World {
            this: this.clone(),
            model: ModelCluster::default(),
            now,
            random: Mutex::new(random),
            candidates,
            history: Mutex::default(),
            depth: AtomicUsize::new(0),
            traced,
        })
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap()
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    fn trouble(&self) -> bool {
        self.now() < TROUBLE
    }

    fn below(&self, bound: usize) -> usize {
        self.random.lock().unwrap().below(bound)
    }

    fn chance(&self, percent: u64) -> bool {
        self.random.lock().unwrap().chance(percent)
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        if self.traced {
            println!("{:>6} {}", self.now(), what());
        }
    }

    fn wrong(&self, error: String) {
        self.trace(|| format!("WRONG: {error}"));
        self.history().wrong.get_or_insert(error);
    }

    fn heal(&self) {
        for candidate in &self.candidates {
            let mut candidate = candidate.lock().unwrap();
            (candidate.cut, candidate.frozen_until) = (false, 0);
        }
    }

    /// Lets time pass: whoever is not busy acts.
    fn advance(&self, time: u64) {
        let until = self.now() + time;
        let depth = self.depth.fetch_add(1, Ordering::Relaxed);
        while self.now() < until {
            let step = 10 + self.below(60) as u64;
            let now = (self.now() + step).min(until);
            self.now.store(now, Ordering::Relaxed);
            self.model.pass(now);
            self.check_leaders();
            if depth >= DEEPEST {
                continue;
            }
            for candidate in &self.candidates {
                if let Ok(mut candidate) = candidate.try_lock() {
                    self.befall(&mut candidate);
                    if candidate.frozen_until <= self.now() {
                        candidate.step(self);
                    }
                }
            }
        }
        self.depth.fetch_sub(1, Ordering::Relaxed);
    }

    /// Something may go wrong with a candidate.
    fn befall(&self, candidate: &mut Candidate) {
        if !self.trouble() || !self.chance(3) {
            return;
        }
        let own = candidate.own;
        match self.below(4) {
            0 => {
                candidate.frozen_until = self.now() + self.below(9000) as u64;
                self.trace(|| format!("{own} is frozen until {}", candidate.frozen_until));
            }
            1 => candidate.cut = true,
            2 => candidate.cut = false,
            _ => {
                self.trace(|| format!("{own} dies"));
                candidate.core = Leadership::new(CandidateConfig::of_ttl(TTL));
                candidate.lead = None;
                candidate.cut = false;
            }
        }
    }

    fn check_leaders(&self) {
        let mut history = self.history();
        history.tenures.retain(|(_, tenure)| !tenure.is_over());
        let leaders: Vec<usize> = history.tenures.iter().map(|(own, _)| *own).collect();
        drop(history);
        if leaders.len() > 1 {
            self.wrong(format!("{leaders:?} lead at the same time"));
        }
    }

    /// A request to the cluster by a candidate: it may be lost, or its answer, and both take time.
    fn request<T>(
        &self,
        cut: bool,
        ask: impl FnOnce(&mut ModelCluster) -> Result<T, KvError>,
    ) -> Result<T, KvError> {
        let lossy = self.trouble() && self.chance(10);
        if cut && self.chance(70) {
            self.advance(100 + self.below(500) as u64);
            return Err(KvError::Unreachable("cut off".to_owned()));
        }
        // Most are fast; some are delayed for longer than a lease lives.
        let long = if self.trouble() && self.chance(10) { 5000 } else { 20 };
        self.advance(1 + self.below(long) as u64);
        if lossy && self.chance(50) {
            return Err(KvError::Unknown("lost".to_owned()));
        }
        let answer = ask(&mut self.model.clone());
        self.advance(1 + self.below(long) as u64);
        match cut || lossy {
            true => Err(KvError::Unknown("the answer is lost".to_owned())),
            false => answer,
        }
    }
}

/// The cluster as one candidate reaches it.
#[derive(Debug)]
struct Reached {
    world: Weak<World>,
    cut: bool,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl Kv for Reached {
    fn txn(&mut self, txn: &Txn) -> Result<TransactionResult, KvError> {
        let world = self.world.upgrade().expect("it is there while it runs");
        let done = world.request(self.cut, |model| model.txn(txn));
        // Cut off or not by chance, from then on.
        self.cut = world.trouble() && world.chance(10);
        done
    }

    fn range(&mut self, range: &KeyRange) -> Result<KeyPage, KvError> {
        let world = self.world.upgrade().expect("it is there while it runs");
        world.request(self.cut, |model| model.range(range))
    }

    fn pause(&mut self) {
        let world = self.world.upgrade().expect("it is there while it runs");
        world.advance(50);
    }
}

fn failed<T>(outcome: Result<T, KvError>) -> Result<T, EtcdUnavailable> {
    outcome.map_err(|_| EtcdUnavailable)
}

impl Candidate {
    fn now(&self) -> u64 {
        (self.clock)()
    }

    fn step(&mut self, world: &World) {
        if self.lead.as_ref().is_some_and(|lead| lead.tenure.is_over())
            && self.core.until().is_some()
        {
            self.core.lost();
        }
        match self.core.poll(self.now()) {
            Some(action) => self.act(action, world),
            None if self.lead.is_some() && world.chance(30) => self.serve(world),
            None => {}
        }
        if let (Some(lead), Some(until)) = (&self.lead, self.core.until()) {
            lead.tenure.extend(until);
        }
    }

    fn act(&mut self, action: LeadershipAction, world: &World) {
        let (sent, own) = (self.now(), self.own);
        world.trace(|| format!("{own} {action:?}"));
        match action {
            LeadershipAction::Grant => {
                let granted = world.request(self.cut, |model| Ok((model.grant(TTL), TTL)));
                self.core.granted(sent, self.now(), failed(granted));
            }
            LeadershipAction::Renew(lease) => {
                let renewed = world.request(self.cut, |model| Ok(model.renew(lease)));
                self.core.renewed(sent, self.now(), failed(renewed));
            }
            LeadershipAction::Look => {
                let look = election::look(&keys());
                let seen = world.request(self.cut, |model| model.txn(&look));
                let seen = failed(seen).map(|done| election::seen(&done).0);
                self.core.looked(self.now(), seen);
            }
            LeadershipAction::Campaign { lease, term, term_revision } => {
                let (id, version) = (own.to_string(), String::new());
                let member = Member { url: format!("https://{id}:1"), id, version, pid: 1 };
                let txn = election::campaign(&keys(), &member, lease, term, term_revision);
                let done = world.request(self.cut, |model| model.txn(&txn));
                let won = failed(done).map(|done| election::won(&done, term));
                self.core.campaigned(self.now(), won);
            }
            LeadershipAction::Lead(won) => self.begin(won, world),
            LeadershipAction::Stop(_) => {
                if let Some(lead) = self.lead.take() {
                    lead.tenure.end();
                }
            }
        }
    }

    /// Leads from now on, with what the store has.
    fn begin(&mut self, won: Won, world: &World) {
        let Some(until) = self.core.until() else { return };
        let mut history = world.history();
        let newest = std::mem::replace(&mut history.newest_term, won.term);
        drop(history);
        if won.term <= newest {
            world.wrong(format!("term {} after term {newest}", won.term));
        }
        let tenure = Arc::new(Tenure::new(won, until, self.clock.clone()));
        world.history().tenures.push((self.own, tenure.clone()));
        let kv = Reached { world: world.this.clone(), cut: self.cut };
        let mut store = Etcd::new(Box::new(kv), keys(), tenure.clone());
        let Ok(state) = store.load() else {
            tenure.end();
            return self.core.lost();
        };
        let number = state.records.iter().find_map(|record| match record {
            Record::NextLease { lease } => Some(*lease),
            _ => None,
        });
        let number = number.unwrap_or(0);
        if state.events.last().map_or(0, |event| event.id) != number {
            world.wrong(format!("number {number} without its event: a commit was stored in part"));
        }
        self.lead = Some(Lead { tenure, store, number });
    }

    /// Answers somebody: a change, or a read.
    fn serve(&mut self, world: &World) {
        let Some(lead) = &mut self.lead else { return };
        let before = world.history().done.last().copied().unwrap_or(0);
        if world.chance(30) {
            world.advance(world.below(30) as u64);
            if !lead.tenure.is_over() && lead.number < before {
                world.wrong(format!("read {} after {before} was answered", lead.number));
            }
            return;
        }
        let number = lead.number + 1;
        let event = EventRecord {
            id: number,
            at_ms: 1,
            kind: EventKind::Lease,
            host: None,
            function: None,
            lease: None,
            epoch: None,
            by: None,
            text: String::new(),
        };
        let commit = Commit {
            records: vec![Record::NextLease { lease: number }],
            events: vec![event],
            first_event: number.saturating_sub(5),
            ..Commit::default()
        };
        let own = self.own;
        match lead.store.commit(&commit) {
            Ok(()) => {
                world.trace(|| format!("{own} has committed {number}"));
                lead.number = number;
                let is_new = world.history().done.insert(number);
                if !is_new || number <= before {
                    world.wrong(format!("{number} was committed twice, or after {before}"));
                }
            }
            Err(StoreError::NotLeading) => {
                world.trace(|| format!("{own} does not know whether {number} is committed"));
            }
            Err(error) => world.wrong(format!("a commit was refused: {error}")),
        }
    }
}
