//! What functions of the machine are given, as they see it, and that it is decided as for modelled ones.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use proptest::prelude::*;
use rackbus_devices::Folders;
use rackbus_devices::class::parse_rack;
use rackbus_memory::SharedMemory;
use rackbus_pci::endpoint::Endpoint;

use super::*;

/// What a function reaches: by first address the length, and whether it is a window. And whether it refuses memory that is
/// no window.
#[derive(Default)]
struct Reached(RefCell<BTreeMap<u64, (u64, bool)>>, Cell<bool>);

impl MapsMemory for Reached {
    fn map(
        &self,
        (iova, length): (u64, u64),
        _access: Access,
        _memory: &MemoryHandle,
        window: bool,
    ) -> Result<(), RequestRefused> {
        if self.1.get() && !window {
            return Err(RequestRefused::new(Errno::NOSPC, "it takes no more"));
        }
        let mut reached = self.0.borrow_mut();
        let ranges = reached.iter().map(|(at, (length, _))| (*at, *length));
        match meeting(ranges, iova, length).is_empty() {
            true => drop(reached.insert(iova, (length, window))),
            false => return Err(RequestRefused::new(Errno::EXIST, "it is mapped")),
        }
        Ok(())
    }

    fn unmap(&self, (iova, length): (u64, u64)) -> Result<(), RequestRefused> {
        let taken = self.0.borrow_mut().remove(&iova);
        assert_eq!(taken.map(|(length, _)| length), Some(length), "{iova:#x} is not mapped so");
        Ok(())
    }
}

struct Given {
    lending: Lending,
    function: Reached,
    mappings: Mappings,
}

const PAGE: u64 = 4096;

impl Given {
    fn new() -> Given {
        let mappings = Mappings::default();
        Given { lending: Lending::alone(), function: Reached::default(), mappings }
    }

    fn map(&mut self, page: u64, pages: u64, memory: bool) -> bool {
        let memory = memory.then(|| handle(pages));
        let by = (&self.lending, &self.function);
        self.mappings.map(by, (page * PAGE, pages * PAGE), Access::all(), memory).is_ok()
    }

    fn window(&mut self, page: u64) -> bool {
        let place = BarPlace { function: "host/function".to_owned(), bar: 2, offset: 0 };
        let by = (&self.lending, &self.function);
        let range = (page * PAGE, PAGE);
        self.mappings.open_window(by, range, Access::all(), place, handle(1)).is_ok()
    }

    fn unmap(&mut self, page: u64, pages: u64) -> bool {
        self.mappings.unmap(&self.function, (page * PAGE, pages * PAGE)).is_ok()
    }

    /// Pages that are reached, those of windows with a minus.
    fn reached(&self) -> Vec<i64> {
        let reached = self.function.0.borrow();
        let page = |at: &u64| i64::try_from(at / PAGE).unwrap();
        reached.iter().map(|(at, (_, window))| page(at) * if *window { -1 } else { 1 }).collect()
    }
}

fn handle(pages: u64) -> MemoryHandle {
    let memory = SharedMemory::create("mapped", pages * PAGE).unwrap();
    memory.handle(0)
}

#[test]
fn what_has_no_memory_takes_no_place_of_what_has() {
    let mut given = Given::new();
    assert!(given.map(4, 2, true));
    for (page, pages) in [(4, 2), (4, 1), (5, 1), (3, 2), (1, 9)] {
        assert!(!given.map(page, pages, false), "{page}+{pages}");
        assert!(!given.map(page, pages, true), "{page}+{pages}");
    }
    assert_eq!(given.reached(), [4]);
    // What is acknowledged is so.
    assert!(given.unmap(4, 2));
    assert!(given.reached().is_empty());
    assert!(!given.unmap(4, 2));
}

#[test]
fn memory_of_the_users_closes_a_window_and_a_range_without_is_beside_it() {
    let mut given = Given::new();
    assert!(given.window(7));
    assert!(given.map(7, 1, false), "noted beside the window");
    assert_eq!(given.reached(), [-7]);
    assert!(given.unmap(7, 1), "and unmapped so");
    assert_eq!(given.reached(), [-7]);
    assert!(!given.unmap(7, 1), "a window is no mapping of the user's");
    assert!(given.map(6, 3, true));
    assert_eq!(given.reached(), [6]);
    assert!(!given.window(7), "the user's own memory is there");
    assert!(given.unmap(6, 3) && given.window(7));
    assert!(given.map(2, 1, true));
    given.mappings.unmap_all(&given.function).unwrap();
    assert_eq!(given.reached(), [-7]);
    given.mappings.clear(&given.function).unwrap();
    assert!(given.reached().is_empty());
}

#[test]
fn what_was_given_is_lent_again_and_not_mapped_again() {
    let mut before = Given::new();
    assert!(before.map(4, 2, true) && before.map(6, 1, false) && before.window(9));
    let (own, windows) = before.mappings.given();
    let key = |it: &UserMapping| {
        let place = |memory: &MemoryHandle| (memory.object(), memory.offset());
        (it.iova, it.length, it.access, it.memory.as_ref().map(place))
    };
    let was: Vec<_> = own.iter().chain(windows.iter().map(|(it, _)| it)).map(key).collect();
    let (lending, function) = (Lending::alone(), before.function);
    let mut mappings = Mappings::default();
    mappings.resume(&lending, own, windows).unwrap();
    let (own, windows) = mappings.given();
    let is: Vec<_> = own.iter().chain(windows.iter().map(|(it, _)| it)).map(key).collect();
    assert_eq!(is, was);
    let lent = |lending: &Lending| {
        let reached = lending.fabric().with(|fabric| fabric.reached("host/function").unwrap());
        reached.iter().map(|it| it.address / PAGE).collect::<Vec<_>>()
    };
    assert_eq!(lent(&lending), [4, 9]);
    // Whatever the user does next, the function follows.
    let mut after = Given { lending, function, mappings };
    assert!(after.unmap(4, 2) && !after.unmap(4, 2));
    assert_eq!(after.reached(), [-9]);
    assert!(after.map(8, 2, true), "memory of the user's closes a window");
    assert_eq!(after.reached(), [8]);
    drop(after.mappings);
    assert!(lent(&after.lending).is_empty());
}

#[test]
fn what_overlaps_is_not_gone_on_with() {
    let mapping = |page: u64| {
        let memory = Some(handle(1));
        UserMapping { iova: page * PAGE, length: PAGE, access: Access::all(), memory }
    };
    let place = BarPlace { function: "host/function".to_owned(), bar: 2, offset: 0 };
    let resume = |own, windows| Mappings::default().resume(&Lending::alone(), own, windows).is_ok();
    assert!(resume(vec![mapping(1), mapping(2)], Vec::new()));
    assert!(!resume(vec![mapping(1), mapping(1)], Vec::new()));
    let empty = UserMapping { memory: None, ..mapping(3) };
    assert!(!resume(vec![mapping(1)], vec![(empty, place)]));
}

/// What a function's user, or its node, asks for: ranges by first page and pages, memory by number.
#[derive(Debug, Clone)]
enum Step {
    Map {
        range: (u64, u64),
        access: Access,
        memory: Option<usize>,
    },
    /// As `Map`, which the function refuses: nothing changes.
    Refuse {
        range: (u64, u64),
        memory: usize,
    },
    Unmap {
        range: (u64, u64),
    },
    UnmapAll,
    Open {
        range: (u64, u64),
        access: Access,
        memory: usize,
    },
    Close {
        range: (u64, u64),
    },
}

/// Pages of the address space that is used, and of each memory.
const PAGES: u64 = 8;
const MEMORIES: usize = 3;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few ranges, so that they meet and the same comes again.
    let range = || (0..PAGES, 0..4u64);
    let access = || prop::sample::select(vec![Access::READ, Access::READ | Access::WRITE]);
    let memory = || 0..MEMORIES;
    let step = prop_oneof![
        4 => (range(), access(), prop::option::weighted(0.7, memory()))
            .prop_map(|(range, access, memory)| Step::Map { range, access, memory }),
        1 => (range(), memory()).prop_map(|(range, memory)| Step::Refuse { range, memory }),
        2 => range().prop_map(|range| Step::Unmap { range }),
        1 => Just(Step::UnmapAll),
        3 => (range(), access(), memory())
            .prop_map(|(range, access, memory)| Step::Open { range, access, memory }),
        2 => range().prop_map(|range| Step::Close { range }),
    ];
    prop::collection::vec(step, 1..40)
}

/// Ranges that are within reach: address, length, access.
fn within_reach(lending: &Lending) -> Vec<(u64, u64, Access)> {
    let reached = lending.fabric().with(|fabric| fabric.reached("host/function").unwrap());
    reached.iter().map(|it| (it.address, it.length, it.access)).collect()
}

fn modelled(lending: &Lending) -> Endpoint {
    let text = "name = \"lab\"\n[hosts.a.devices.d]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let (_, devices) = parse_rack("rack.toml", text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folders = Folders::new(folder.path(), folder.path());
    let model = devices[0].config.clone().unwrap().model(&folders).unwrap();
    let mut endpoint = Endpoint::new(model);
    endpoint.begin(lending.clone(), None);
    endpoint
}

proptest! {
    /// What is allowed to a function of the machine, and what it reaches then, is what a modelled one is and does.
    #[test]
    fn decisions_are_those_of_a_modelled_function(steps in steps()) {
        let memories: Vec<SharedMemory> = (0..MEMORIES)
            .map(|_| SharedMemory::create("given", PAGES * PAGE).unwrap())
            .collect();
        let place = |memory: usize| BarPlace {
            function: "host/function".to_owned(),
            bar: 2,
            offset: memory as u64 * PAGES * PAGE,
        };
        let (ours, theirs) = (Lending::alone(), Lending::alone());
        let (mut mappings, function) = (Mappings::default(), Reached::default());
        let mut endpoint = modelled(&theirs);
        for step in steps {
            let bytes = |(page, pages): (u64, u64)| (page * PAGE, pages * PAGE);
            let by = (&ours, &function);
            let allowed = match step.clone() {
                Step::Map { range, access, memory } => {
                    let (iova, length) = bytes(range);
                    let handle = || memory.map(|nth| memories[nth].handle(0));
                    (
                        mappings.map(by, (iova, length), access, handle()).is_ok(),
                        endpoint.map(iova, length, access, handle()).is_ok(),
                    )
                }
                Step::Refuse { range, memory } => {
                    let (iova, length) = bytes(range);
                    let handle = Some(memories[memory].handle(0));
                    // The same again is not asked of it, and others have another kind of access.
                    let access = Access::WRITE;
                    function.1.set(true);
                    let allowed = mappings.map(by, (iova, length), access, handle).is_ok();
                    function.1.set(false);
                    (allowed, false)
                }
                Step::Unmap { range } => {
                    let (iova, length) = bytes(range);
                    (
                        mappings.unmap(&function, (iova, length)).is_ok(),
                        endpoint.unmap(iova, length).is_ok(),
                    )
                }
                Step::UnmapAll => {
                    endpoint.unmap_all();
                    (mappings.unmap_all(&function).is_ok(), true)
                }
                Step::Open { range, access, memory } => {
                    let ((iova, length), place) = (bytes(range), place(memory));
                    let handle = || memories[memory].handle(0);
                    (
                        mappings
                            .open_window(by, (iova, length), access, place.clone(), handle())
                            .is_ok(),
                        endpoint.open_window(iova, length, access, place, handle()).is_ok(),
                    )
                }
                Step::Close { range } => {
                    let (iova, length) = bytes(range);
                    (
                        mappings.close_window(&function, (iova, length)).is_ok(),
                        endpoint.close_window(iova, length).is_ok(),
                    )
                }
            };
            prop_assert_eq!(allowed.0, allowed.1, "{:?}", step);
            let (here, there) = (within_reach(&ours), within_reach(&theirs));
            prop_assert_eq!(&here, &there, "after {:?}", step);
            // And the function has just that.
            let mapped: Vec<_> =
                function.0.borrow().iter().map(|(at, (length, _))| (*at, *length)).collect();
            let lent: Vec<_> = here.iter().map(|(at, length, _)| (*at, *length)).collect();
            prop_assert_eq!(mapped, lent, "after {:?}", step);
        }
    }
}
