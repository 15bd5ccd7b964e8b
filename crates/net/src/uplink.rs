//! Which of the rack's uplinks is used, and that it is one at a time, also when hosts freeze and go on.
//!
//! The first uplink of the list that works is *active*. The others find out whether it works by *words* that they send it
//! ten times a second, each saying whether its sender is active: a node that is gone ends its rings, and one that is
//! frozen takes no words ([`crate::liveness`]). Then the next one says that it is active from now on, looks once more
//! whether that was taken, and is.
//!
//! A host that was frozen does not know it when it goes on, and another uplink may be active. So an uplink looks at the clock
//! before each frame: if it has not run for [`FENCE_NS`], which is less than others wait for it, it is *fenced*. It
//! drops all frames in both directions, for what lies there is old and may be with others already, until those who may
//! stand in for it have said that they do not, for which they have to see first that it is back. What it may still do
//! after it was frozen is the one step with a frame that it was in.
//!
//! An uplink that works, but is taken for frozen, hears that another one is about to stand in: it is fenced as well.
//! One whose interface has just come up begins so if others come after it, for one of them is used at that moment.
//!
//! A host that stops again and again, each time for less than others wait for it, would be fenced most of the time and
//! stood in for by nobody. So an uplink that stops too often [rests](UplinkSteadiness): it ends its rings, as if its
//! interface was down.
//!
//! This holds while the clock goes on for a host that is frozen, or asleep.

use std::collections::BTreeMap;

use crate::liveness::SILENT_NS;
use crate::port::MIN_FRAME;
use crate::port_queue::PortQueue;
use crate::switch::StationSwitch;

/// How often an uplink looks at others and is to be asked to [look](UplinkSeat::look), at least.
pub const LOOK_NS: u64 = 100_000_000;
/// An uplink that has not looked for so long may be stood in for.
pub const FENCE_NS: u64 = SILENT_NS / 2;
/// How long it stays back at least: others look meanwhile, and what lies there is dropped.
const SETTLE_NS: u64 = 250_000_000;
/// And at most, where one that may stand in says nothing: that one is frozen, and fenced when it goes on.
const SETTLE_MOST_NS: u64 = 2_000_000_000;
/// How soon it looks again after it said that it will be active.
const CLAIM_NS: u64 = 1_000_000;

/// What a word is in a frame behind the addresses: an EtherType for local experiments (IEEE 802, section 9.2.4), a letter, and
/// whether its sender is active.
const WORD: [u8; 3] = [0x88, 0xb5, b'u'];
/// Bytes of a word.
pub const WORD_BYTES: usize = MIN_FRAME + 2;

/// An uplink's place among those of the rack.
#[derive(Debug)]
pub struct UplinkSeat {
    own: usize,
    /// Those that are used before it, and those that are used after it.
    before: Vec<usize>,
    after: Vec<usize>,
    active: bool,
    /// When it said that it will be active.
    claims: Option<u64>,
    looked_ns: u64,
    said_ns: Option<u64>,
    /// What those after it said last: that they are active, or not.
    words: BTreeMap<usize, bool>,
    fence: Option<Fence>,
    /// Its host stood still since it looked, and how many times it did where others could have its place.
    stopped: bool,
    stops: u64,
}

#[derive(Debug)]
struct Fence {
    since_ns: u64,
    /// Those who are to speak.
    awaited: Vec<usize>,
}

impl UplinkSeat {
    /// That of the station `own`, whose interface has come up at `now_ns`.
    pub fn new(switch: &StationSwitch, own: usize, now_ns: u64) -> UplinkSeat {
        let all = switch.uplinks();
        let place = all.iter().position(|it| *it == own).unwrap_or(0);
        let before = all[..place].to_vec();
        let after: Vec<usize> = all.iter().skip(place + 1).copied().collect();
        let fence = (!after.is_empty()).then(|| Fence { since_ns: now_ns, awaited: after.clone() });
        UplinkSeat {
            own,
            before,
            after,
            active: false,
            claims: None,
            looked_ns: now_ns,
            said_ns: None,
            words: BTreeMap::new(),
            fence,
            stopped: false,
            stops: 0,
        }
    }

    fn is_alone(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// How long it may sleep before it looks again; `None` where it has nobody to look at.
    pub fn look_within_ns(&self) -> Option<u64> {
        let within = if self.claims.is_some() { CLAIM_NS } else { LOOK_NS };
        (!self.is_alone()).then_some(within)
    }

    /// Whether what comes from outside, and what is for all, is its to forward.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Whether it may do nothing with a frame at `now_ns` but drop it. To be asked right before each is forwarded.
    #[inline]
    pub fn is_fenced(&mut self, now_ns: impl FnOnce() -> u64) -> bool {
        if !self.is_alone() && self.fence.is_none() {
            self.reckon(now_ns());
        }
        self.fence.is_some()
    }

    /// It is fenced if it has not looked for too long.
    fn reckon(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.looked_ns) < FENCE_NS {
            return;
        }
        let mut awaited: Vec<usize> = std::mem::take(&mut self.words).into_keys().collect();
        // Frozen once more: who was to speak then still is.
        awaited.extend(self.fence.take().into_iter().flat_map(|before| before.awaited));
        awaited.sort_unstable();
        awaited.dedup();
        self.fence = Some(Fence { since_ns: now_ns, awaited });
        (self.active, self.claims, self.stopped) = (false, None, true);
    }

    /// How many times it has stood still for so long that others, which were there, may stand in for it.
    pub fn stops(&self) -> u64 {
        self.stops
    }

    /// Looks what the others do, and tells them what it does. `port_queue` is its own.
    pub fn look(&mut self, port_queue: &mut PortQueue) {
        let now = port_queue.now_ns();
        if self.is_alone() {
            self.active = true;
            return;
        }
        self.reckon(now);
        self.looked_ns = now;
        let others = self.before.iter().chain(&self.after);
        let is_countable = std::mem::take(&mut self.stopped)
            && others.into_iter().any(|it| port_queue.is_joined(*it));
        self.stops += u64::from(is_countable);
        if self.fence.as_ref().is_some_and(|fence| self.lifts(fence, now)) {
            self.fence = None;
        }
        // Others are looked at also while it is fenced.
        let first = port_queue.look_for_way_out() == Some(self.own) && self.fence.is_none();
        let claimed = self.claims.is_some_and(|at| now.saturating_sub(at) >= CLAIM_NS);
        let active = first && (claimed || self.active || self.before.is_empty());
        let says = first && !self.before.is_empty();
        let changed = says != (self.claims.is_some() || self.active) && !self.before.is_empty();
        self.claims = (first && !active).then(|| self.claims.unwrap_or(now));
        self.active = active;
        if changed || self.said_ns.is_none_or(|at| now.saturating_sub(at) >= LOOK_NS) {
            self.say(port_queue, says, changed);
            self.said_ns = Some(now);
        }
    }

    fn lifts(&self, fence: &Fence, now_ns: u64) -> bool {
        let passed = now_ns.saturating_sub(fence.since_ns);
        let all_spoke = fence.awaited.iter().all(|it| self.words.contains_key(it));
        let nobody_stands_in = self.words.values().all(|active| !active);
        passed >= SETTLE_MOST_NS || passed >= SETTLE_NS && all_spoke && nobody_stands_in
    }

    /// Tells those before it whether it is active. One that has not taken the word before is not told the same again.
    fn say(&self, port_queue: &mut PortQueue, active: bool, changed: bool) {
        for to in &self.before {
            if changed || port_queue.has_taken_all(*to) {
                let addresses = [*to, self.own].map(|it| port_queue.switch().mac(it).0);
                let word = [addresses.as_flattened(), &WORD, &[u8::from(active)]].concat();
                port_queue.say(*to, &word);
            }
        }
    }

    /// Hears a frame that came to the uplink and begins with `start`; true when it is a word, and not to be forwarded.
    pub fn hear(&mut self, switch: &StationSwitch, start: &[u8]) -> bool {
        let Some(word) = start.get(..WORD_BYTES).filter(|word| word[12..15] == WORD) else {
            return false;
        };
        let from = self.after.iter().find(|it| switch.mac(**it).0[..] == word[6..12]);
        let Some(from) = from.filter(|_| switch.mac(self.own).0[..] == word[..6]) else {
            return false;
        };
        let stands_in = word[15] != 0;
        self.words.insert(*from, stands_in);
        if stands_in && self.active {
            // Taken for frozen: that one will be active in a moment, and looks at this one only later.
            self.fence = Some(Fence { since_ns: self.looked_ns, awaited: Vec::new() });
            (self.active, self.claims) = (false, None);
        }
        true
    }
}

/// How many stops in [`WITHIN_NS`] are too many.
const MOST_STOPS: usize = 3;
const WITHIN_NS: u64 = 10_000_000_000;
/// How long an uplink rests that stops too often: at first, and at most. Each rest is twice as long as the one before.
const REST_NS: u64 = 5_000_000_000;
const REST_MOST_NS: u64 = 16 * REST_NS;

/// How often the host of an uplink stood still, and whether the uplink had better leave its place to another for now. It
/// outlives a seat.
#[derive(Debug, Default)]
pub struct UplinkSteadiness {
    /// Stops of the seat that are known.
    known: u64,
    /// When the latest were noticed.
    stops_ns: Vec<u64>,
    /// The last rest: when it ended, and how long it was.
    rested: Option<(u64, u64)>,
}

impl UplinkSteadiness {
    /// The next stops are those of another seat.
    pub fn begin_seat(&mut self) {
        self.known = 0;
    }

    /// Looks at the stops of a seat; says how long to rest from `now_ns` if there were too many.
    pub fn rest_ns(&mut self, stops: u64, now_ns: u64) -> Option<u64> {
        let fresh = stops.saturating_sub(std::mem::replace(&mut self.known, stops));
        if fresh == 0 {
            return None;
        }
        self.stops_ns.retain(|at| now_ns.saturating_sub(*at) < WITHIN_NS);
        self.stops_ns.push(now_ns);
        if self.stops_ns.len() < MOST_STOPS {
            return None;
        }
        self.stops_ns.clear();
        let before = self
            .rested
            .filter(|(ended, rest)| now_ns.saturating_sub(*ended) < 2 * rest + WITHIN_NS);
        let rest = before.map_or(REST_NS, |(_, rest)| (2 * rest).min(REST_MOST_NS));
        self.rested = Some((now_ns.saturating_add(rest), rest));
        Some(rest)
    }
}
