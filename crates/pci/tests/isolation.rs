//! A function that its user tells to reach any memory reaches that user's, and the BARs that are windows of its user's
//! functions, and nothing else: against a reference model that knows for each byte where it leads.
//!
//! Reads and writes begin and end at every kind of boundary: of mappings, of windows, of the address space; mappings and
//! windows come and go in between, and the function goes on in another process. What is refused changes nothing, and is
//! counted, with its address.

#[path = "common/probe.rs"]
mod probe;

use std::collections::BTreeMap;

use probe::{ADDRESS, COMMAND, DONE, LENGTH, Probe, READ, REFUSED, STATUS, SUM, VALUE, WRITE};
use proptest::prelude::*;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{BarPlace, Fabric, FabricHandle, derive};
use rackbus_memory::{Access, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::{Endpoint, FunctionState};

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta]\nmemory = \"64 MiB\"\n[hosts.gamma]\nmemory = \"64 MiB\"\n";
const FUNCTION: &str = "alpha/nvme0";
const PEER: &str = "beta/nvme0";
const PAGE: u64 = 4096;
/// Pages of each memory: of those, some are never mapped, at both ends.
const PAGES: u64 = 16;
/// The highest page of the address space.
const TOP: u64 = u64::MAX - PAGE + 1;

/// Whose memory: the user's own, the other function's BAR, another user's.
const OWN: usize = 0;
const BAR: usize = 1;
const OTHER: usize = 2;

/// A range of the function's addresses that leads to memory, or to none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    at: u64,
    length: u64,
    access: Access,
    memory: Option<(usize, u64)>,
}

impl Range {
    fn last(&self) -> u64 {
        self.at + (self.length - 1)
    }

    fn meets(&self, other: &Range) -> bool {
        self.at <= other.last() && other.at <= self.last()
    }

    /// Where a byte of it leads.
    fn place(&self, at: u64, access: Access) -> Option<(usize, u64)> {
        let (memory, offset) = self.memory?;
        let inside = self.at <= at && at <= self.last() && self.access.contains(access);
        inside.then(|| (memory, offset + (at - self.at)))
    }
}

/// What the function may reach, and what all memory is then.
struct Model {
    mappings: Vec<Range>,
    windows: Vec<Range>,
    memory: [Vec<u8>; 3],
    refused: u64,
}

impl Model {
    /// Where the byte at an address leads: to the user's memory, else to a window.
    fn place(&self, at: u64, access: Access) -> Option<(usize, u64)> {
        let own = self.mappings.iter().find_map(|range| range.place(at, access));
        own.or_else(|| self.windows.iter().find_map(|range| range.place(at, access)))
    }

    /// Where each byte of an access leads; none where one of them leads nowhere.
    fn places(&self, at: u64, length: u64, access: Access) -> Option<Vec<(usize, u64)>> {
        // Nothing is so long that all of it is mapped.
        if length > 4 * PAGES * PAGE {
            return None;
        }
        if length == 0 {
            return Some(Vec::new());
        }
        let last = at.checked_add(length - 1)?;
        (at..=last).map(|at| self.place(at, access)).collect()
    }

    /// Whether one mapping or window has all of it.
    fn is_within_one(&self, at: u64, length: u64) -> bool {
        let ranges = || self.mappings.iter().chain(&self.windows);
        let has = |range: &Range| range.at <= at && at - range.at <= range.length - length;
        let meets = |range: &&Range| range.at <= at + (length - 1) && at <= range.last();
        length > 0
            && ranges().filter(meets).count() == 1
            && ranges().any(|it| it.length >= length && has(it))
    }
}

/// Where an access begins, or how long it is, by what is there: a choice of boundaries and a small step.
#[derive(Debug, Clone)]
enum Step {
    Map { page: u64, pages: u64, at: u64, access: Access, memory: bool },
    Unmap { page: u64, pages: u64 },
    Open { page: u64, pages: u64, at: u64, access: Access },
    Close(prop::sample::Index),
    Scrub,
    Succeed,
    Probe { write: bool, at: (prop::sample::Index, i8), end: (prop::sample::Index, i8), value: u8 },
}

fn page() -> impl Strategy<Value = u64> {
    prop_oneof![12 => (0..PAGES).prop_map(|page| page * PAGE), 1 => Just(TOP), 1 => Just(1 << 47)]
}

fn steps() -> impl Strategy<Value = Step> {
    let access = || prop_oneof![Just(Access::READ), Just(Access::WRITE), Just(Access::all())];
    let map = (page(), 1u64..4, 1..PAGES - 4, access(), prop::bool::weighted(0.9));
    let near =
        || (any::<prop::sample::Index>(), prop_oneof![Just(0i8), Just(-1), Just(1), -9i8..9]);
    prop_oneof![
        5 => map.prop_map(|(page, pages, at, access, memory)| Step::Map {
            page, pages, at, access, memory
        }),
        3 => (page(), 1u64..5).prop_map(|(page, pages)| Step::Unmap { page, pages }),
        3 => (page(), 1u64..4, 1..PAGES - 4, access())
            .prop_map(|(page, pages, at, access)| Step::Open { page, pages, at, access }),
        2 => any::<prop::sample::Index>().prop_map(Step::Close),
        1 => Just(Step::Scrub),
        1 => Just(Step::Succeed),
        24 => (any::<bool>(), near(), near(), any::<u8>())
            .prop_map(|(write, at, end, value)| Step::Probe { write, at, end, value }),
    ]
}

/// A rack, memory of several, and a function of one user.
struct World {
    fabric: FabricHandle,
    shared: [SharedMemory; 3],
    endpoint: Endpoint,
    other: Endpoint,
    model: Model,
}

impl World {
    fn new() -> World {
        let rack = Rack::parse("rack.toml", RACK).unwrap();
        let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
        let shared = ["own", "bar", "other"].map(|name| {
            let memory = SharedMemory::create(name, PAGES * PAGE).unwrap();
            let bytes: Vec<u8> = (0..PAGES * PAGE).map(|at| (at * 31 + at / PAGE) as u8).collect();
            memory.region().whole().copy_from(&bytes);
            memory
        });
        let memory = [OWN, BAR, OTHER].map(|which| load(&shared[which]));
        let (mappings, windows, refused) = Default::default();
        let model = Model { mappings, windows, memory, refused };
        let endpoint = World::endpoint(&fabric, "beta");
        // Another user's function, of the same fabric: all of its memory is mapped, from address 0 on.
        let mut other = Endpoint::new(Probe::new());
        other.begin(fabric.lending(PEER, "gamma").unwrap(), None);
        let all = shared[OTHER].handle(0);
        other.map(0, PAGES * PAGE, Access::all(), Some(all)).unwrap();
        World { fabric, shared, endpoint, other, model }
    }

    fn endpoint(fabric: &FabricHandle, user: &str) -> Endpoint {
        let mut endpoint = Endpoint::new(Probe::new());
        endpoint.begin(fabric.lending(FUNCTION, user).unwrap(), None);
        endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        endpoint
    }

    /// Addresses at which something begins or ends.
    fn boundaries(&self) -> Vec<u64> {
        let ranges = self.model.mappings.iter().chain(&self.model.windows);
        let ends = ranges.flat_map(|range| [range.at, range.last().wrapping_add(1)]);
        let fixed = [0, PAGE, u64::MAX, TOP, 1 << 47, PAGES * PAGE, 1 << 63];
        let all: BTreeMap<u64, ()> = ends.chain(fixed).map(|at| (at, ())).collect();
        all.into_keys().collect()
    }

    fn register(&mut self, register: u64, value: u64) {
        self.endpoint.write(FunctionRegion::Bar(0), register, &value.to_le_bytes()).unwrap();
    }

    fn read(&mut self, register: u64) -> u64 {
        let mut value = [0; 8];
        self.endpoint.read(FunctionRegion::Bar(0), register, &mut value).unwrap();
        u64::from_le_bytes(value)
    }

    /// Has the function do an access; whether it says that it reached what it was told to, and what it read.
    fn access(&mut self, command: u64, at: u64, length: u64, value: u8) -> (bool, u64) {
        for (register, value) in [
            (ADDRESS, at),
            (LENGTH, length),
            (VALUE, value.into()),
            (STATUS, 0),
            (COMMAND, command),
        ] {
            self.register(register, value);
        }
        self.endpoint.poll(0);
        let status = self.read(STATUS);
        assert!([DONE, REFUSED].contains(&status), "{status}");
        (status == DONE, self.read(SUM))
    }

    fn probe(&mut self, write: bool, at: u64, length: u64, value: u8) {
        let (command, access) = if write { (WRITE, Access::WRITE) } else { (READ, Access::READ) };
        let what = format!("{access:?} of {length:#x} bytes at {at:#x}");
        let places = self.model.places(at, length, access);
        let (reached, sum) = self.access(command, at, length, value);
        match &places {
            None => assert!(!reached, "{what} reached what leads nowhere"),
            Some(_) if self.model.is_within_one(at, length) => assert!(reached, "{what}: refused"),
            // What lies in several may be asked for in parts.
            Some(_) => {}
        }
        if let Some(places) = places.filter(|_| reached) {
            let memory = &mut self.model.memory;
            if write {
                places.iter().for_each(|(of, at)| memory[*of][*at as usize] = value);
            } else {
                let read: Vec<u8> =
                    places.iter().map(|(of, at)| memory[*of][*at as usize]).collect();
                assert_eq!(sum, probe::sum(probe::SUM_OF_NONE, &read), "{what}: other bytes");
            }
        } else {
            self.model.refused += 1;
            let (count, last) = self.endpoint.dma().refusals().get();
            assert_eq!(count, self.model.refused, "{what}: it is counted once");
            let last = last.expect("the last that was refused").to_string();
            // The whole access, or the part of it that is missing.
            let told = last.split("0x").nth(1).map(|it| it.split(['+', ':']).next().unwrap());
            let told = u64::from_str_radix(told.unwrap(), 16).unwrap();
            let inside = at <= told && (length == 0 || told - at < length);
            assert!(inside, "{what}: told as `{last}`");
        }
        for (which, shared) in self.shared.iter().enumerate() {
            assert!(load(shared) == self.model.memory[which], "{what} changed memory {which}");
        }
    }

    /// The user maps a range.
    fn map(&mut self, range: Range) {
        let Range { at, length, access, memory } = range;
        let handle = memory.map(|(of, offset)| self.shared[of].handle(offset));
        let mapped = self.endpoint.map(at, length, access, handle);
        if length - 1 > u64::MAX - at {
            assert!(mapped.is_err(), "a mapping around the end of the address space");
            return;
        }
        let model = &mut self.model;
        // One that is refused closes no windows.
        if mapped.is_err() || model.mappings.contains(&range) {
            return;
        }
        if memory.is_some() {
            model.windows.retain(|window| !window.meets(&range));
            // The same with nothing behind it is given the memory.
            let empty = Range { memory: None, ..range };
            model.mappings.retain(|it| *it != empty);
        }
        assert!(!model.mappings.iter().any(|it| it.meets(&range)), "two mappings");
        model.mappings.push(range);
    }

    fn step(&mut self, step: Step) {
        let model = &mut self.model;
        match step {
            Step::Map { page, pages, at, access, memory } => {
                let memory = memory.then_some((OWN, at * PAGE));
                self.map(Range { at: page, length: pages * PAGE, access, memory });
            }
            Step::Unmap { page, pages } => {
                let length = pages * PAGE;
                if self.endpoint.unmap(page, length).is_ok() {
                    let inside = |it: &Range| it.at >= page && it.last() - page < length;
                    model.mappings.retain(|mapping| !inside(mapping));
                }
            }
            Step::Open { page, pages, at, access } => {
                let (length, offset) = (pages * PAGE, at * PAGE);
                let place = BarPlace { function: PEER.to_owned(), bar: 2, offset };
                let memory = self.shared[BAR].handle(offset);
                let opened = self.endpoint.open_window(page, length, access, place, memory);
                if length - 1 > u64::MAX - page {
                    assert!(opened.is_err(), "a window around the end of the address space");
                    return;
                }
                let range = Range { at: page, length, access, memory: Some((BAR, offset)) };
                if opened.is_ok() && !model.windows.contains(&range) {
                    assert!(!model.windows.iter().any(|it| it.meets(&range)), "two windows");
                    model.windows.push(range);
                }
            }
            Step::Close(which) => {
                if !model.windows.is_empty() {
                    let window = model.windows.remove(which.index(model.windows.len()));
                    self.endpoint.close_window(window.at, window.length).unwrap();
                }
            }
            Step::Scrub => {
                self.endpoint.scrub();
                (model.mappings, model.windows) = Default::default();
                let lending = self.fabric.lending(FUNCTION, "beta").unwrap();
                self.endpoint.begin(lending, None);
                self.endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
                self.model.refused = self.endpoint.dma().refusals().get().0;
            }
            Step::Succeed => {
                let saved = self.endpoint.save().unwrap();
                self.endpoint.scrub();
                let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
                let mut next = Endpoint::new(Probe::new());
                next.begin(self.fabric.lending(FUNCTION, "beta").unwrap(), None);
                next.restore(&state, saved.descriptors).unwrap();
                self.endpoint = next;
                self.model.refused = self.endpoint.dma().refusals().get().0;
            }
            Step::Probe { write, at: (first, before), end: (last, behind), value } => {
                let all = self.boundaries();
                let near = |which: prop::sample::Index, step: i8| {
                    all[which.index(all.len())].wrapping_add_signed(step.into())
                };
                let (at, end) = (near(first, before), near(last, behind));
                // Ends that lie before make lengths that wrap around.
                self.probe(write, at, end.wrapping_sub(at), value);
            }
        }
    }
}

fn load(memory: &SharedMemory) -> Vec<u8> {
    let mut bytes = vec![0; (PAGES * PAGE) as usize];
    memory.region().whole().copy_to(&mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn a_function_reaches_what_its_user_has_and_nothing_else(
        steps in prop::collection::vec(steps(), 1..60),
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.step(step));
        // The other user's is as it was, and still its own.
        let (count, _) = world.other.dma().refusals().get();
        prop_assert_eq!(count, 0);
        prop_assert!(world.other.dma().len() == 1);
    }
}

/// All starts and ends near the boundaries of two mappings beside each other, one away from them and a window.
#[test]
fn every_boundary_of_every_mapping_holds() {
    let mut world = World::new();
    let map = |page: u64, at, access| Step::Map { page, pages: 1, at, access, memory: true };
    let steps = [
        map(PAGE, 2, Access::all()),
        map(2 * PAGE, 7, Access::READ),
        map(5 * PAGE, 5, Access::WRITE),
        map(TOP, 9, Access::all()),
        Step::Open { page: 3 * PAGE, pages: 1, at: 3, access: Access::all() },
    ];
    steps.into_iter().for_each(|step| world.step(step));
    let near = [-8i64, -1, 0, 1, 8];
    let all: Vec<u64> = world.boundaries();
    let all = all.iter().flat_map(|at| near.map(|step| at.wrapping_add_signed(step)));
    let all: Vec<u64> = all.collect();
    let mut reached = 0;
    for (nth, at) in all.iter().enumerate() {
        for end in &all {
            let before = world.model.refused;
            world.probe(nth % 2 == 0, *at, end.wrapping_sub(*at), nth as u8);
            reached += u64::from(world.model.refused == before);
        }
    }
    assert!(reached > 20, "{reached}");
    let causes: BTreeMap<_, _> =
        world.endpoint.dma().refusals().by_cause().filter(|(_, count)| *count > 0).collect();
    for cause in ["not mapped", "denied", "past the address space"] {
        assert!(causes.contains_key(cause), "{causes:?}");
    }
    assert_eq!(causes.values().sum::<u64>(), world.model.refused);
}
