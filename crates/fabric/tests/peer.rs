//! The windows between the functions of a user against a list of what each decodes: whatever happens in
//! whatever order, nobody reaches what is not decoded, and all that should is reached in the end.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rackbus_fabric::peer::{
    BarPart, PeerFunction, PeerFunctions, PeerMember, PeerStep, PeerWindow, Programmed,
};

/// Two BARs, the second with two parts that are memory.
const PARTS: [BarPart; 3] = [
    BarPart { bar: 0, offset: 0x1000, length: 0x1000 },
    BarPart { bar: 2, offset: 0, length: 0x2000 },
    BarPart { bar: 2, offset: 0x3000, length: 0x1000 },
];

#[derive(Debug, Clone)]
enum Event {
    Join {
        isolated: bool,
    },
    Leave(usize),
    Program(usize, Programmed),
    /// Carries out so many steps, each of which fails where the bits say so.
    Steps(u8, u64),
}

fn addresses() -> impl Strategy<Value = u64> {
    // Mostly few, so that they meet; some go past the end.
    prop_oneof![8 => (1u64..12).prop_map(|n| n << 12), 1 => Just(u64::MAX - 0xfff)]
}

fn events() -> impl Strategy<Value = Event> {
    let decoded =
        prop::collection::btree_map(prop_oneof![Just(0u8), Just(2), Just(4)], addresses(), 0..3);
    prop_oneof![
        2 => prop::bool::weighted(0.2).prop_map(|isolated| Event::Join { isolated }),
        1 => (0usize..6).prop_map(Event::Leave),
        4 => (0usize..6, prop::bool::weighted(0.8), decoded).prop_map(|(nth, masters_bus, bars)| {
            Event::Program(nth, Programmed { masters_bus, bars })
        }),
        3 => (0u8..6, any::<u64>()).prop_map(|(count, fail)| Event::Steps(count, fail)),
    ]
}

#[derive(Debug, Clone)]
struct Expected {
    member: PeerMember,
    isolated: bool,
    programmed: Programmed,
}

/// All that is decoded by others than the initiator, in the order of joining: who comes later and would
/// overlap is left out.
fn expected(all: &[Expected]) -> BTreeSet<PeerWindow> {
    let mut windows = BTreeSet::new();
    for from in all.iter().filter(|from| !from.isolated && from.programmed.masters_bus) {
        let mut taken: Vec<(u128, u128)> = Vec::new();
        for to in all.iter().filter(|to| to.member != from.member && !to.isolated) {
            for part in PARTS {
                let Some(base) = to.programmed.bars.get(&part.bar) else { continue };
                let start = u128::from(*base) + u128::from(part.offset);
                let end = start + u128::from(part.length);
                let meets = taken.iter().any(|(other, last)| start < *last && *other < end);
                if end > 1 << 64 || meets {
                    continue;
                }
                taken.push((start, end));
                let (initiator, target, address) = (from.member, to.member, start as u64);
                windows.insert(PeerWindow { initiator, target, part, address });
            }
        }
    }
    windows
}

/// What initiators have mapped, as their lenders would see it.
#[derive(Debug, Default)]
struct Lenders(BTreeSet<PeerWindow>);

impl Lenders {
    /// Carries out a step; false when it is to fail.
    fn carry_out(&mut self, step: PeerStep, works: bool) -> Result<(), String> {
        match step {
            PeerStep::Close(window) => {
                assert!(self.0.remove(&window), "{window:?} is closed and was not open");
                if works { Ok(()) } else { Err("the connection broke".to_owned()) }
            }
            PeerStep::Open(_) if !works => Err("there is no room".to_owned()),
            PeerStep::Open(window) => {
                let last = |w: &PeerWindow| w.address + (w.part.length - 1);
                let meets = |other: &&PeerWindow| {
                    other.initiator == window.initiator
                        && window.address <= last(other)
                        && other.address <= last(&window)
                };
                assert_eq!(self.0.iter().find(meets), None, "{window:?} overlaps");
                assert!(self.0.insert(window), "{window:?} is opened twice");
                Ok(())
            }
        }
    }
}

proptest! {
    #[test]
    fn windows_are_what_is_decoded(events in prop::collection::vec(events(), 0..60)) {
        let mut peers = PeerFunctions::new();
        let mut all: Vec<Expected> = Vec::new();
        let mut lenders = Lenders::default();
        for event in events {
            match event {
                Event::Join { isolated } if all.len() < 6 => {
                    let (name, parts) = (format!("alpha/f{}", all.len()), PARTS.to_vec());
                    let member = peers.join(PeerFunction { name, isolated, parts });
                    all.push(Expected { member, isolated, programmed: Programmed::default() });
                }
                Event::Leave(nth) if nth < all.len() => {
                    let member = all.remove(nth).member;
                    peers.leave(member);
                    // Its DMA space is gone.
                    lenders.0.retain(|window| window.initiator != member);
                }
                Event::Program(nth, programmed) if nth < all.len() => {
                    peers.programmed(all[nth].member, programmed.clone());
                    all[nth].programmed = programmed;
                }
                Event::Steps(count, fail) => {
                    for nth in 0..count {
                        let Some(step) = peers.next() else { break };
                        let outcome = lenders.carry_out(step, fail >> nth & 1 == 0);
                        peers.done(step, outcome);
                    }
                }
                _ => {}
            }
            prop_assert_eq!(&peers.windows().copied().collect::<BTreeSet<_>>(), &lenders.0);
        }
        // What failed is tried again after a change.
        let member = peers.join(PeerFunction { name: "alpha/last".into(), isolated: false, parts: vec![] });
        peers.leave(member);
        let mut steps = 0;
        while let Some(step) = peers.next() {
            let outcome = lenders.carry_out(step, true);
            peers.done(step, outcome);
            steps += 1;
            prop_assert!(steps < 1000, "it does not end");
        }
        prop_assert_eq!(&lenders.0, &expected(&all));
    }
}

fn function(name: &str, isolated: bool) -> PeerFunction {
    PeerFunction { name: name.to_owned(), isolated, parts: vec![PARTS[1]] }
}

fn settle(peers: &mut PeerFunctions) {
    while let Some(step) = peers.next() {
        peers.done(step, Ok(()));
    }
}

/// A function that masters the bus, with its BAR 2 at `address` or nowhere.
fn master(address: Option<u64>) -> Programmed {
    let bars = address.into_iter().map(|address| (2, address)).collect();
    Programmed { masters_bus: true, bars }
}

#[test]
fn what_is_not_reached_is_told_with_the_reason_and_what_to_do() {
    let mut peers = PeerFunctions::new();
    let said =
        |peers: &PeerFunctions| peers.refused().iter().map(ToString::to_string).collect::<Vec<_>>();
    let drive = peers.join(function("alpha/nvme0", true));
    let memory = peers.join(function("gamma/ram0", false));
    peers.programmed(drive, master(None));
    assert_eq!(peers.refused(), [], "nothing is decoded that could be reached");
    let at = |address| Programmed { masters_bus: false, ..master(Some(address)) };
    peers.programmed(memory, at(0x10_0000));
    settle(&mut peers);
    let isolated = said(&peers);
    assert_eq!(isolated.len(), 1);
    let begins =
        "alpha/nvme0 does not reach gamma/ram0: the controller of alpha/nvme0 runs at its borrower";
    assert!(isolated[0].starts_with(begins), "{isolated:?}");
    peers.leave(drive);

    let other = peers.join(function("alpha/ram1", false));
    peers.programmed(other, at(0x10_1000));
    let drive = peers.join(function("beta/nvme0", false));
    peers.programmed(drive, master(None));
    settle(&mut peers);
    let expected = "beta/nvme0 does not reach alpha/ram1 at 0x101000: gamma/ram0 decodes the same \
                    addresses; program their BARs apart";
    assert_eq!(said(&peers), [expected]);
    peers.leave(other);
    peers.programmed(memory, at(0x20_0000));
    let step = peers.next().unwrap();
    assert!(matches!(step, PeerStep::Close(window) if window.address == 0x10_0000), "{step:?}");
    peers.done(step, Ok(()));
    let step = peers.next().unwrap();
    peers.done(step, Err("no room".into()));
    assert_eq!(peers.next(), None, "it is tried again although nothing has changed");
    assert_eq!(said(&peers), ["beta/nvme0 does not reach gamma/ram0 at 0x200000: no room"]);
}
