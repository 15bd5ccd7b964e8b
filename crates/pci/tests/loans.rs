//! What a function has mapped and what its fabric says that it reaches are the same, at every step; and
//! nothing is reached any more when its user is gone, whichever way it went.

mod common;

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use common::Copier;
use proptest::prelude::*;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{BarPlace, Fabric, FabricHandle, Lending, Place, Requester, derive};
use rackbus_memory::space::Behind;
use rackbus_memory::{Access, MemoryHandle, SharedMemory};
use rackbus_pci::endpoint::FunctionRegion;
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{EngineDevice, ServedDevice};
use rackbus_pci::{Endpoint, Engine, FunctionState};
use rustix::io::Errno;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta]\nmemory = \"64 MiB\"\n[hosts.gamma]\niommu = false\n";
const FUNCTION: &str = "alpha/nvme0";
/// A function whose BAR the other one reaches.
const PEER: &str = "beta/nvme0";
const PAGE: u64 = 4096;

/// Each page is reached where its user has memory or a window is, and nowhere else: a mapping without memory
/// hides no window.
fn reads_what_is_there(endpoint: &mut Endpoint) {
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    let dma = endpoint.dma();
    for page in 0..16 {
        let within = |iova: u64, length: u64| (iova..iova + length).contains(&(page * PAGE));
        let readable = |access: Access| access.contains(Access::READ);
        let own = dma.mappings().find(|m| within(m.iova, m.length));
        let own = own.filter(|m| !matches!(m.behind, Behind::Nothing));
        let expected = match own {
            Some(own) => readable(own.access),
            None => dma.windows().any(|(m, _)| within(m.iova, m.length) && readable(m.access)),
        };
        assert_eq!(dma.read_obj::<u8>(page * PAGE).is_ok(), expected, "page {page}");
    }
}

fn fabric() -> FabricHandle {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()))
}

fn lending(fabric: &FabricHandle) -> Lending {
    fabric.lending(FUNCTION, "beta").unwrap()
}

/// How many ranges the fabric says that the function reaches.
fn reached(fabric: &FabricHandle) -> usize {
    fabric.with(|fabric| fabric.reached(FUNCTION).unwrap().len())
}

/// The fabric has exactly the mappings with memory behind them and the windows, and each leads where it
/// should.
fn agree(fabric: &FabricHandle, endpoint: &Endpoint) {
    let beta = fabric.host("beta").unwrap();
    let function = fabric.with(|fabric| fabric.topology().named(FUNCTION).unwrap());
    let mut behind = 0;
    for mapping in endpoint.dma().mappings() {
        let requester = Requester::Device(function);
        let found = fabric.resolve(requester, mapping.iova, mapping.length, mapping.access);
        match mapping.behind {
            // A window may be there.
            Behind::Nothing => {
                let bar = found.is_ok_and(|found| matches!(found.place, Place::Bar { .. }));
                assert!(found.is_err() || bar, "{mapping:?} is reached");
            }
            Behind::Kept(_, object, offset) | Behind::NotKept(object, offset) => {
                behind += 1;
                let found = found.unwrap();
                let (object, offset) = (*object, *offset);
                assert_eq!(found.place, Place::Lent { host: beta, object, offset });
                assert_eq!(found.length, mapping.length);
            }
        }
    }
    for (window, place) in endpoint.dma().windows() {
        behind += 1;
        let requester = Requester::Device(function);
        let found = fabric.resolve(requester, window.iova, window.length, window.access).unwrap();
        let device = fabric.with(|fabric| fabric.topology().named(&place.function).unwrap());
        let (bar, offset) = (place.bar, place.offset);
        assert_eq!(found.place, Place::Bar { device, bar, offset });
    }
    assert_eq!(reached(fabric), behind);
}

#[derive(Debug, Clone)]
enum Step {
    Map {
        page: u64,
        pages: u64,
        at: u64,
        access: Access,
        memory: bool,
    },
    Unmap {
        page: u64,
        pages: u64,
    },
    Open {
        page: u64,
        pages: u64,
        at: u64,
    },
    Close {
        page: u64,
        pages: u64,
    },
    UnmapAll,
    DropMemory,
    Scrub,
    /// It continues in another endpoint.
    Succeed,
}

fn steps() -> impl Strategy<Value = Step> {
    let access = prop_oneof![Just(Access::READ), Just(Access::WRITE), Just(Access::all())];
    let map = (0u64..12, 0u64..5, 0u64..12, access, prop::bool::weighted(0.9));
    prop_oneof![
        8 => map.prop_map(|(page, pages, at, access, memory)| Step::Map {
            page, pages, at, access, memory
        }),
        6 => (0u64..12, 1u64..5).prop_map(|(page, pages)| Step::Unmap { page, pages }),
        4 => (0u64..12, 0u64..5, 0u64..12)
            .prop_map(|(page, pages, at)| Step::Open { page, pages, at }),
        3 => (0u64..12, 1u64..5).prop_map(|(page, pages)| Step::Close { page, pages }),
        1 => Just(Step::UnmapAll),
        1 => Just(Step::DropMemory),
        1 => Just(Step::Scrub),
        1 => Just(Step::Succeed),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn mappings_and_loans_are_the_same(steps in prop::collection::vec(steps(), 1..40)) {
        // Some of what is asked for lies beyond the memory, and is refused.
        let memory = SharedMemory::create("user", 12 * PAGE).unwrap();
        let peers = SharedMemory::create("peer", 12 * PAGE).unwrap();
        let fabric = fabric();
        let endpoint = |lending| {
            let mut endpoint = Endpoint::new(Copier::new());
            endpoint.begin(lending, None);
            endpoint
        };
        let mut now = endpoint(lending(&fabric));
        for step in steps {
            match step {
                Step::Map { page, pages, at, access, memory: behind } => {
                    let memory = behind.then(|| memory.handle(at * PAGE));
                    let _ = now.map(page * PAGE, pages * PAGE, access, memory);
                }
                Step::Unmap { page, pages } => {
                    let _ = now.unmap(page * PAGE, pages * PAGE);
                }
                Step::Open { page, pages, at } => {
                    let place =
                        BarPlace { function: PEER.to_owned(), bar: 2, offset: at * PAGE };
                    let (memory, length) = (peers.handle(at * PAGE), pages * PAGE);
                    let _ = now.open_window(page * PAGE, length, Access::all(), place, memory);
                }
                Step::Close { page, pages } => {
                    let _ = now.close_window(page * PAGE, pages * PAGE);
                }
                Step::UnmapAll => drop(now.unmap_all()),
                Step::DropMemory => now.drop_memory(),
                Step::Scrub => now.scrub(),
                Step::Succeed => {
                    let saved = now.save().unwrap();
                    // As in another process, which has a fabric of its own or the former life's end.
                    now.scrub();
                    prop_assert_eq!(reached(&fabric), 0);
                    let state = FunctionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
                    now = endpoint(lending(&fabric));
                    now.restore(&state, saved.descriptors).unwrap();
                }
            }
            agree(&fabric, &now);
            reads_what_is_there(&mut now);
        }
        drop(now);
        prop_assert_eq!(reached(&fabric), 0);
    }
}

/// An engine with a user that has mapped a page.
fn in_use(fabric: &FabricHandle, memory: &SharedMemory) -> (Engine, EngineDevice, UnixStream) {
    let engine = Engine::start("test", Copier::new(), EngineOptions::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    let (user, conversation) = UnixStream::pair().unwrap();
    let session = device.session_of(lending(fabric), Some(Arc::new(conversation))).unwrap();
    session.map(0, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    assert_eq!(reached(fabric), 1);
    (engine, session, user)
}

#[test]
fn whichever_way_a_user_goes_its_loans_end() {
    let (fabric, memory) = (fabric(), SharedMemory::create("user", PAGE).unwrap());
    let (_engine, session, _user) = in_use(&fabric, &memory);
    drop(session);
    assert_eq!(reached(&fabric), 0, "the session has ended");

    let (engine, session, _user) = in_use(&fabric, &memory);
    engine.handle().revoker().revoke();
    assert_eq!(reached(&fabric), 0, "its memory was taken away from outside");
    drop(session);

    let (engine, session, _user) = in_use(&fabric, &memory);
    drop(engine);
    assert_eq!(reached(&fabric), 0, "its engine has ended");
    drop(session);

    let (engine, session, _user) = in_use(&fabric, &memory);
    assert!(engine.handle().call(|_| panic!("planted: the model fails")).is_err());
    drop(engine);
    assert_eq!(reached(&fabric), 0, "its model failed");
    drop(session);
}

#[test]
fn what_a_rack_file_bounds_is_refused_to_the_user_in_one_line() {
    let fabric = fabric();
    let memory = SharedMemory::create("user", 80 << 20).unwrap();
    let engine = Engine::start("test", Copier::new(), EngineOptions::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    let session = device.session_of(lending(&fabric), None).unwrap();
    let map = |session: &EngineDevice, at, length| {
        session.map(at, length, Access::all(), Some(memory.handle(0)))
    };
    map(&session, 0, 64 << 20).unwrap();
    // The same memory at another address is no more memory.
    map(&session, 1 << 30, 64 << 20).unwrap();
    let refused = map(&session, 1 << 32, 65 << 20).unwrap_err();
    assert_eq!(refused.errno, Errno::NOSPC);
    let text =
        "beta has 64 MiB of memory by the rack file, and 65 MiB of it would be lent here together";
    assert_eq!(refused.message, text);
    assert_eq!(reached(&fabric), 2);
    drop(session);
    // A refusal by the fabric's bounds closes no windows either.
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&fabric), None);
    let bar = SharedMemory::create("bar", PAGE).unwrap();
    let place = BarPlace { function: PEER.to_owned(), bar: 2, offset: 0 };
    endpoint.open_window(PAGE, PAGE, Access::all(), place, bar.handle(0)).unwrap();
    assert!(endpoint.map(0, 65 << 20, Access::all(), Some(memory.handle(0))).is_err());
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    assert!(endpoint.dma().read_obj::<u8>(PAGE).is_ok(), "a refused mapping closed a window");
    drop(endpoint);
    let front = fabric.front_lending(FUNCTION, "gamma").unwrap();
    let session = device.session_of(front, None).unwrap();
    let refused = map(&session, 0, PAGE).unwrap_err();
    assert_eq!(refused.errno, Errno::ACCESS);
    assert!(refused.message.starts_with("gamma has no IOMMU"), "{}", refused.message);
}

/// The other function's memory is its lender's: what becomes of it is no fault of this one's user.
#[test]
fn a_bar_that_is_truncated_is_reached_no_more_and_nothing_else_is_lost() {
    let (fabric, memory) = (fabric(), SharedMemory::create("user", PAGE).unwrap());
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&fabric), None);
    endpoint.map(0, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    let bar = rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&bar, 2 * PAGE).unwrap();
    let handle = MemoryHandle::new(bar.try_clone().unwrap(), 0).unwrap();
    let place = || BarPlace { function: PEER.to_owned(), bar: 2, offset: 0 };
    endpoint.open_window(PAGE, 2 * PAGE, Access::all(), place(), handle.clone()).unwrap();
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    endpoint.dma().write(PAGE, &[1; 64]).unwrap();
    assert_eq!((reached(&fabric), endpoint.dma().peer_bytes().get()), (2, (0, 64)));
    rustix::fs::ftruncate(&bar, 0).unwrap();
    let _ = endpoint.dma().read_obj::<u64>(PAGE);
    endpoint.check_memory();
    assert_eq!(reached(&fabric), 1);
    assert!(endpoint.dma().read_obj::<u64>(PAGE).is_err());
    assert!(endpoint.dma().master(), "the function was reset");
    endpoint.dma().read_obj::<u64>(0).unwrap();

    // Its user maps memory of its own over a part: that is meant then, and the window is closed as a whole.
    rustix::fs::ftruncate(&bar, 2 * PAGE).unwrap();
    endpoint.open_window(PAGE, 2 * PAGE, Access::all(), place(), handle).unwrap();
    endpoint.map(2 * PAGE, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    assert!(endpoint.dma().read_obj::<u64>(PAGE).is_err());
    endpoint.dma().read_obj::<u64>(2 * PAGE).unwrap();
    assert_eq!(reached(&fabric), 2);
    endpoint.scrub();
    assert_eq!(reached(&fabric), 0);
}

#[test]
fn memory_that_was_truncated_is_mapped_again_by_the_same_request() {
    let fabric = fabric();
    let file = rustix::fs::memfd_create("user", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let handle = MemoryHandle::new(file.try_clone().unwrap(), 0).unwrap();
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&fabric), None);
    let master = |endpoint: &mut Endpoint| {
        endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    };
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    endpoint.map(0, PAGE, Access::all(), Some(handle.clone())).unwrap();
    master(&mut endpoint);
    rustix::fs::ftruncate(&file, 0).unwrap();
    let _ = endpoint.dma().read_obj::<u64>(0);
    endpoint.check_memory();
    assert_eq!(reached(&fabric), 0);
    master(&mut endpoint);
    endpoint.map(0, PAGE, Access::all(), Some(handle.clone())).unwrap_err();
    assert_eq!(endpoint.dma().len(), 1, "a refused request took the mapping away");

    rustix::fs::ftruncate(&file, PAGE).unwrap();
    endpoint.map(0, PAGE, Access::READ, Some(handle.clone())).unwrap_err();
    endpoint.map(0, PAGE, Access::all(), Some(handle)).unwrap();
    endpoint.dma().write_obj(0, &7u64).unwrap();
    assert_eq!((reached(&fabric), endpoint.dma().len()), (1, 1));
    endpoint.unmap(0, PAGE).unwrap();
    assert_eq!(reached(&fabric), 0);
}

#[test]
fn a_mapping_beyond_its_file_and_one_after_a_revoke_close_no_window() {
    let (fabric, memory) = (fabric(), SharedMemory::create("user", PAGE).unwrap());
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&fabric), None);
    let bar = SharedMemory::create("bar", PAGE).unwrap();
    let place = BarPlace { function: PEER.to_owned(), bar: 2, offset: 0 };
    endpoint.open_window(PAGE, PAGE, Access::all(), place, bar.handle(0)).unwrap();
    endpoint.map(0, 2 * PAGE, Access::all(), Some(memory.handle(0))).unwrap_err();
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    assert!(endpoint.dma().read_obj::<u8>(PAGE).is_ok(), "a refused mapping closed a window");
    // What reaches into nothing behind the window is not counted as moved.
    assert!(endpoint.dma().pin_pieces(PAGE, 2 * PAGE as usize, Access::READ).is_err());
    assert_eq!(endpoint.dma().peer_bytes().get(), (1, 0));
    endpoint.dma().revoker().revoke();
    endpoint.map(PAGE, PAGE, Access::all(), Some(memory.handle(0))).unwrap_err();
    assert_eq!(endpoint.dma().windows().count(), 1);
}
