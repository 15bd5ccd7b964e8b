//! How loans of a function end: with its user, whichever way it went, and with the memory behind them; and what is
//! not lent.
//!
//! That mappings and loans are the same at every step is simulated in `mappings`.

mod common;

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use common::Copier;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{BarPlace, Fabric, FabricHandle, Lending, derive};
use rackbus_memory::{Access, Event, MemoryHandle, SharedMemory};
use rackbus_pci::endpoint::{FunctionRegion, IrqChange};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{EngineDevice, ServedDevice};
use rackbus_pci::{Endpoint, Engine};
use rackbus_seeds::huge::{HUGE_PAGE, HugePages};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta]\nmemory = \"64 MiB\"\n[hosts.gamma]\niommu = false\n";
const FUNCTION: &str = "alpha/nvme0";
/// A function whose BAR the other one reaches.
const PEER: &str = "beta/nvme0";
const PAGE: u64 = 4096;

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

fn wire() -> IrqChange {
    wire_from(0)
}

/// A wire for this vector.
fn wire_from(vector: u32) -> IrqChange {
    let event = Event::new().unwrap();
    IrqChange::WireVectors(vector, vec![Some(event.as_fd().try_clone_to_owned().unwrap())])
}

/// An engine with a user that has mapped a page, and wired a vector.
fn in_use(fabric: &FabricHandle, memory: &SharedMemory) -> (Engine, EngineDevice, UnixStream) {
    let engine = Engine::start("test", Copier::new(), EngineOptions::default()).unwrap();
    let device = EngineDevice::new(engine.handle().clone()).unwrap();
    let (user, conversation) = UnixStream::pair().unwrap();
    let session = device.session_of(lending(fabric), Some(Arc::new(conversation))).unwrap();
    session.map(0, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    session.set_irqs(wire()).unwrap();
    assert_eq!(reached(fabric), 2);
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
    session.set_irqs(wire()).unwrap();
    assert_eq!(reached(&fabric), 0, "what is wired after that");
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
    // Nor does one whose file may not be written to.
    let sealed = rustix::fs::open(
        format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd()),
        rustix::fs::OFlags::RDONLY,
        rustix::fs::Mode::empty(),
    );
    let sealed = MemoryHandle::new(sealed.unwrap(), 0).unwrap();
    endpoint.map(PAGE, PAGE, Access::all(), Some(sealed)).unwrap_err();
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    assert!(endpoint.dma().read_obj::<u8>(PAGE).is_ok(), "a refused mapping closed a window");
    drop(endpoint);
    let front = fabric.front_lending(FUNCTION, "gamma").unwrap();
    let session = device.session_of(front, None).unwrap();
    let refused = map(&session, 0, PAGE).unwrap_err();
    assert_eq!(refused.errno, Errno::ACCESS);
    assert!(refused.message.starts_with("gamma has no IOMMU"), "{}", refused.message);
}

#[test]
fn a_function_that_goes_on_elsewhere_raises_what_it_raised_before() {
    let (ours, theirs) = (fabric(), fabric());
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&ours), None);
    endpoint.set_irqs(wire()).unwrap();
    let saved = endpoint.save().unwrap();
    let mut next = Endpoint::new(Copier::new());
    next.begin(lending(&theirs), None);
    next.restore(&saved.state, saved.descriptors).unwrap();
    drop(endpoint);
    assert_eq!((reached(&ours), reached(&theirs)), (0, 1));
    next.scrub();
    assert_eq!(reached(&theirs), 0);
}

/// To the fabric, fronts of one function on one host are the same, one after the other.
#[test]
fn a_user_that_lost_the_function_takes_no_interrupt_of_the_next_one() {
    let (fabric, memory) = (fabric(), SharedMemory::create("user", PAGE).unwrap());
    let (engine, former, _user) = in_use(&fabric, &memory);
    engine.handle().revoker().revoke();
    let other = Engine::start("next", Copier::new(), EngineOptions::default()).unwrap();
    let next = EngineDevice::new(other.handle().clone()).unwrap();
    let next = next.session_of(lending(&fabric), None).unwrap();
    former.set_irqs(wire_from(1)).unwrap();
    next.set_irqs(wire_from(0)).unwrap();
    next.set_irqs(wire_from(1)).unwrap();
    former.set_irqs(wire_from(0)).unwrap();
    drop(former);
    assert_eq!(reached(&fabric), 2);
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

/// A mapping of such memory is of whole huge pages, wherever the part that is lent begins.
#[test]
fn huge_pages_that_are_truncated_while_they_are_lent_are_reached_no_more() {
    let Some(_reserved) = HugePages::reserve(2) else { return };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("user", flags).unwrap();
    rustix::fs::ftruncate(&file, 2 * HUGE_PAGE).unwrap();
    let (fabric, memory) = (fabric(), SharedMemory::create("user", PAGE).unwrap());
    let mut endpoint = Endpoint::new(Copier::new());
    endpoint.begin(lending(&fabric), None);
    let handle = MemoryHandle::new(file.try_clone().unwrap(), HUGE_PAGE - PAGE).unwrap();
    endpoint.map(0, 2 * PAGE, Access::all(), Some(handle.clone())).unwrap();
    endpoint.map(2 * PAGE, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    for at in [0, PAGE] {
        endpoint.dma().write_obj(at, &7u64).unwrap();
        assert_eq!(endpoint.dma().read_obj::<u64>(at).unwrap(), 7);
    }
    rustix::fs::ftruncate(&file, 0).unwrap();
    let _ = endpoint.dma().read_obj::<u64>(PAGE);
    endpoint.check_memory();
    assert_eq!(reached(&fabric), 0, "memory that is gone is reached");
    for at in [0, PAGE, 2 * PAGE] {
        assert!(endpoint.dma().read_obj::<u64>(at).is_err(), "{at:#x}");
    }
    // What is there again is mapped by the same request.
    rustix::fs::ftruncate(&file, 2 * HUGE_PAGE).unwrap();
    endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
    endpoint.map(0, 2 * PAGE, Access::all(), Some(handle)).unwrap();
    assert_eq!(endpoint.dma().read_obj::<u64>(PAGE).unwrap(), 0);
    assert_eq!(reached(&fabric), 1);
}

/// The request is there before the engine has looked at what was truncated.
#[test]
fn what_is_mapped_again_at_once_after_it_was_truncated_stays_mapped() {
    let (fabric, engine) =
        (fabric(), Engine::start("test", Copier::new(), EngineOptions::default()).unwrap());
    let engine = engine.handle();
    let file = rustix::fs::memfd_create("user", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, PAGE).unwrap();
    let handle = MemoryHandle::new(file.try_clone().unwrap(), 0).unwrap();
    let (first, lending) = (handle.clone(), lending(&fabric));
    engine
        .call(move |endpoint| {
            endpoint.begin(lending, None);
            endpoint.map(0, PAGE, Access::all(), Some(first)).unwrap();
            endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        })
        .unwrap();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    engine.post(move |_| wait.recv().unwrap()).unwrap();
    engine
        .post(move |endpoint| {
            rustix::fs::ftruncate(&file, 0).unwrap();
            let _ = endpoint.dma().read_obj::<u64>(0);
            rustix::fs::ftruncate(&file, PAGE).unwrap();
        })
        .unwrap();
    engine
        .post(move |endpoint| {
            endpoint.map(0, PAGE, Access::all(), Some(handle)).unwrap();
            endpoint.write(FunctionRegion::Config, 4, &[6, 0]).unwrap();
        })
        .unwrap();
    go.send(()).unwrap();
    // Behind all of them, and behind the engine's next look at its memory.
    engine.call(|_| ()).unwrap();
    engine.call(|endpoint| endpoint.dma().write_obj(0, &7u64).unwrap()).unwrap();
    assert_eq!(reached(&fabric), 1);
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
