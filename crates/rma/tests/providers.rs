//! libfabric's providers that need no adapter: data that move between two ends, ends that are closed, memory that is
//! taken away. Without libfabric these tests say so and pass, unless `RACKBUS_LIBFABRIC` names one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rackbus_memory::exchange::lane::{Lane, LaneError, LaneTarget, PROOF_BYTES};
use rackbus_memory::{Region, SharedMemory};
use rackbus_rma::{
    Initiator, LIBRARY_ENV, LaneOffer, Library, ProviderChoice, RmaTarget, providers,
};

const BYTES: usize = 8 << 20;
/// Two ends of `shm` in one process share what either of them maps: there, none is closed with transfers under way.
const CLOSED: &str = "tcp";

/// Whether libfabric is here.
fn is_here() -> bool {
    match Library::load() {
        Ok(library) => {
            println!("libfabric {:?}", library.version());
            true
        }
        Err(error) if std::env::var_os(LIBRARY_ENV).is_some() => panic!("{error}"),
        Err(error) => {
            println!("left out: {error}");
            false
        }
    }
}

fn memory() -> Arc<Region> {
    SharedMemory::create("lane", (BYTES + 4096) as u64).unwrap().region().clone()
}

struct Both {
    lane: Initiator,
    target: RmaTarget,
    ours: Arc<Region>,
    theirs: Arc<Region>,
    next: u64,
}

fn both(provider: &str) -> Both {
    let local = Some([127, 0, 0, 1].into());
    let target = RmaTarget::open(provider, local).unwrap();
    let (ours, theirs) = (memory(), memory());
    target.expose(&theirs, BYTES).unwrap();
    let mut lane = Initiator::open(&target.offer().unwrap(), local).unwrap();
    lane.register(&ours).unwrap();
    Both { lane, target, ours, theirs, next: 0 }
}

impl Both {
    /// Moves all of `places`, an offset and a length each, and waits for their ends.
    fn transfer(&mut self, write: bool, places: &[(usize, usize)]) -> Result<(), LaneError> {
        let first = self.next;
        let mut to_begin = places.iter();
        let mut one = to_begin.next();
        let mut ended = Vec::new();
        let begun = Instant::now();
        while ended.len() < places.len() {
            while let Some((offset, length)) = one {
                if !self.lane.begin(self.next, write, *offset, *length)? {
                    break;
                }
                self.next += 1;
                one = to_begin.next();
            }
            self.lane.poll(&mut ended)?;
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing moves");
        }
        ended.sort_unstable();
        assert!(ended.iter().copied().eq(first..self.next), "each ends once: {ended:?}");
        Ok(())
    }
}

fn fill(region: &Region, seed: u8) {
    for page in 0..BYTES / 4096 {
        region.slice(page * 4096, 4096).unwrap().fill(seed ^ page as u8);
    }
}

fn read(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    region.whole().copy_to(&mut bytes);
    bytes
}

#[test]
fn data_move_both_ways_and_a_proof_is_found() {
    if !is_here() {
        return;
    }
    for provider in ["tcp", "shm"] {
        let mut both = both(provider);
        both.transfer(false, &[(BYTES, PROOF_BYTES)]).unwrap();
        let mut proof = [0; PROOF_BYTES];
        both.ours.slice(BYTES, PROOF_BYTES).unwrap().copy_to(&mut proof);
        assert_eq!(proof, both.lane.proof(), "{provider}");
        // More than are under way at a time, of all sizes.
        let places: Vec<_> = (0..512).map(|at| (at * 16384, 4096 + (at % 4) * 4096)).collect();
        fill(&both.ours, 5);
        both.transfer(true, &places).unwrap();
        let (ours, theirs) = (read(&both.ours), read(&both.theirs));
        for (offset, length) in &places {
            let range = *offset..offset + length;
            assert_eq!(ours[range.clone()], theirs[range], "{provider}, {offset}");
        }
        fill(&both.theirs, 99);
        both.transfer(false, &[(0, 1 << 20), (1 << 20, 7 << 20)]).unwrap();
        assert_eq!(read(&both.ours), read(&both.theirs), "{provider}");
    }
}

/// A provider whose ends of writes promise too little: what was written is read back before that counts.
#[test]
fn writes_that_are_read_back_end_once() {
    if !is_here() {
        return;
    }
    let mut both = both("tcp");
    both.lane = both.lane.confirming();
    fill(&both.ours, 3);
    let places: Vec<_> = (0..200).map(|at| (at * 8192, 8192)).collect();
    both.transfer(true, &places).unwrap();
    let (ours, theirs) = (read(&both.ours), read(&both.theirs));
    assert_eq!(ours[..200 * 8192], theirs[..200 * 8192]);
    assert_eq!(read(&both.ours)[..8192], ours[..8192]);
}

/// After [`LaneTarget::close`] returned, nobody changes or reads the memory, whatever was under way.
#[test]
fn memory_that_is_taken_away_is_reached_by_nobody() {
    if !is_here() {
        return;
    }
    let mut both = both(CLOSED);
    both.transfer(true, &[(0, 4096)]).unwrap();
    fill(&both.ours, 17);
    let mut begin = |at: &u64| both.lane.begin(1000 + at, true, *at as usize * 65536, 65536);
    assert!((0..32).take_while(|at| begin(at).unwrap()).count() > 0);
    assert!(both.target.close());
    assert!(both.target.offer().is_none());
    fill(&both.theirs, 1);
    let before = read(&both.theirs);
    let begun = Instant::now();
    let mut ended = Vec::new();
    // Some may have ended before; the others fail, or never end.
    while both.lane.poll(&mut ended).is_ok() && begun.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    assert_eq!(read(&both.theirs), before);
    assert!(both.lane.close());
}

/// A lane that is closed changes nothing of its own side's memory any more.
#[test]
fn a_lane_that_is_closed_moves_nothing() {
    if !is_here() {
        return;
    }
    let mut both = both(CLOSED);
    both.transfer(false, &[(0, 4096)]).unwrap();
    fill(&both.theirs, 200);
    let mut begin = |at: &u64| both.lane.begin(1000 + at, false, *at as usize * 65536, 65536);
    assert!((0..32).take_while(|at| begin(at).unwrap()).count() > 0);
    assert!(both.lane.close());
    fill(&both.ours, 2);
    let before = read(&both.ours);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(read(&both.ours), before);
    assert!(both.lane.poll(&mut Vec::new()).is_ok());
}

/// What a lender says is not trusted: a wrong key, memory that is not exposed, an address that leads nowhere or is none.
#[test]
fn offers_that_are_wrong_end_in_errors() {
    if !is_here() {
        return;
    }
    let right = both("tcp");
    let offer = right.target.offer().unwrap();
    let fails = |offer: &LaneOffer| {
        let mut lane = match Initiator::open(offer, Some([127, 0, 0, 1].into())) {
            Ok(lane) => lane,
            Err(_) => return,
        };
        lane.register(&memory()).unwrap();
        let mut ended = Vec::new();
        let mut begun = false;
        let since = Instant::now();
        loop {
            if !begun {
                match lane.begin(1, false, 0, 4096) {
                    Ok(now) => begun = now,
                    Err(_) => return,
                }
            }
            if lane.poll(&mut ended).is_err() {
                return;
            }
            assert!(ended.is_empty(), "it has moved something: {offer:?}");
            // One that never ends is given up by who counts the time.
            if since.elapsed() > Duration::from_secs(2) {
                return;
            }
        }
    };
    fails(&LaneOffer { key: !offer.key, ..offer.clone() });
    fails(&LaneOffer { base: u64::MAX - 5, ..offer.clone() });
    fails(&LaneOffer { base: BYTES as u64 + 4096, ..offer.clone() });
    fails(&LaneOffer { address: "0200".to_owned(), ..offer.clone() });
    fails(&LaneOffer { address: "zz".to_owned(), ..offer.clone() });
    fails(&LaneOffer { address: "00".repeat(300), ..offer.clone() });
    fails(&LaneOffer { proof: String::new(), ..offer.clone() });
    fails(&LaneOffer { provider: "none".to_owned(), ..offer });
}

#[test]
fn only_adapters_are_chosen_without_a_name() {
    if !is_here() {
        return;
    }
    assert_eq!(providers(&ProviderChoice::Off), Ok(Vec::new()));
    let chosen = providers(&ProviderChoice::Auto).unwrap();
    assert!(chosen.iter().all(|it| !it.starts_with("tcp") && it != "shm"), "{chosen:?}");
    let named = providers(&ProviderChoice::Named("tcp".to_owned())).unwrap();
    assert!(named.len() == 1 && named[0].starts_with("tcp"), "{named:?}");
    let error = providers(&ProviderChoice::Named("nothing".to_owned())).unwrap_err();
    assert!(error.to_string().contains("nothing"), "{error}");
}
