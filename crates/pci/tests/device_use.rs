//! A device used through its socket as a driver would use it: DMA, interrupts, mapped pages,
//! resets, and what happens when a user goes away.

mod common;
#[path = "common/probe.rs"]
#[allow(dead_code, reason = "its registers are for others")]
mod probe;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{SHARED_PAGE, SOURCE, connect, copy, map, serve_copier, socket_path};
use probe::Probe;
use rackbus_memory::{Access, Event};
use rackbus_pci::engine::EngineOptions;
use rackbus_pci::vfio_user::{Client, ClientError, serve_function};
use rackbus_spec::vfio_user::{IrqSetFlags, irq};
use rustix::io::Errno;

const LIMIT: Duration = Duration::from_secs(5);

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Errno {
    match result {
        Err(ClientError::Refused(errno)) => errno,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn dma_reaches_what_is_mapped_and_nothing_else() {
    let function = serve_copier();
    let client = connect(&function);
    let memory = map(&client, 0x10_0000, 0x4000);
    memory.whole().copy_from(b"the quick brown fox");
    assert_eq!(copy(&client, 0x10_0000, 0x10_2000, 19), 1);
    let mut out = [0; 19];
    memory.region().slice(0x2000, 19).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"the quick brown fox");
    for (source, destination, length) in [
        (0x10_0000, 0x10_3ff0, 17), // one byte past the end
        (0x0f_ffff, 0x10_0000, 2),  // one byte before the start
        (0x10_0000, 0x20_0000, 1),  // elsewhere
        (u64::MAX, 0x10_0000, 2),   // around the end of the address space
    ] {
        assert_eq!(copy(&client, source, destination, length), 2);
    }
    client.dma_unmap(0x10_0000, 0x4000).unwrap();
    assert_eq!(copy(&client, 0x10_0000, 0x10_2000, 1), 2);
}

#[test]
fn dma_crosses_adjoining_mappings_and_respects_rights() {
    let function = serve_copier();
    let client = connect(&function);
    let low = map(&client, 0x1000, 0x1000);
    let high = map(&client, 0x2000, 0x1000);
    low.region().slice(0xffe, 2).unwrap().copy_from(b"ab");
    high.whole().copy_from(b"cd");
    assert_eq!(copy(&client, 0x1ffe, 0x1100, 4), 1);
    let mut out = [0; 4];
    low.region().slice(0x100, 4).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"abcd");
    client.dma_map(0x9000, 0x1000, Access::READ, Some((low.as_fd(), 0))).unwrap();
    assert_eq!(copy(&client, 0x9000, 0x2000, 8), 1, "readable");
    assert_eq!(copy(&client, 0x2000, 0x9000, 8), 2, "not writable");
}

#[test]
fn without_bus_mastering_nothing_is_reached() {
    let function = serve_copier();
    let client = connect(&function);
    let _memory = map(&client, 0, 0x1000);
    assert_eq!(copy(&client, 0, 0x100, 8), 1);
    client.write(7, 4, &2u16.to_le_bytes()).unwrap();
    assert_eq!(copy(&client, 0, 0x100, 8), 2);
    client.write(7, 4, &0u16.to_le_bytes()).unwrap();
    let mut status = [0; 4];
    client.read(0, SOURCE, &mut status).unwrap();
    assert_eq!(status, [0xff; 4], "memory space is off");
}

#[test]
fn mappings_are_exact() {
    let function = serve_copier();
    let client = connect(&function);
    let memory = map(&client, 0x1000, 0x2000);
    let fd = || Some((memory.as_fd(), 0));
    let rw = Access::READ | Access::WRITE;
    assert_eq!(refused(client.dma_map(0x2000, 0x1000, rw, fd())), Errno::EXIST);
    client.dma_map(0x1000, 0x2000, rw, fd()).expect("the same again changes nothing");
    let other = Some((memory.as_fd(), 0x1000));
    for (access, memory) in [(rw, other), (Access::READ, fd()), (rw, None)] {
        assert_eq!(refused(client.dma_map(0x1000, 0x2000, access, memory)), Errno::EXIST);
    }
    assert_eq!(refused(client.dma_map(u64::MAX - 0xfff, 0x2000, rw, fd())), Errno::INVAL);
    assert_eq!(refused(client.dma_map(0x8000, 0, rw, fd())), Errno::INVAL);
    assert_eq!(refused(client.dma_map(0x8000, 0x2001, rw, fd())), Errno::INVAL, "beyond the file");
    assert_eq!(refused(client.dma_unmap(0x1000, 0x1000)), Errno::NOENT);
    assert_eq!(refused(client.dma_unmap(0x3000, 0x1000)), Errno::NOENT);
    client.dma_map(0x8000, 0x1000, rw, fd()).unwrap();
    client.dma_map(0xa000, 0x1000, rw, fd()).unwrap();
    // A part of one, nothing, no bytes, and beyond the end of all addresses.
    for (iova, length) in [(0x2000, 0x7000), (0x9000, 0x1000), (0x8000, 0), (u64::MAX, 2)] {
        assert_eq!(refused(client.dma_unmap(iova, length)), Errno::NOENT, "{iova:#x}");
    }
    client.dma_unmap(0x4000, 0x1_0000).expect("two whole mappings");
    assert_eq!(refused(client.dma_unmap(0xa000, 0x1000)), Errno::NOENT);
    client.dma_unmap(0x1000, 0x2000).unwrap();
    let null = std::fs::File::open("/dev/zero").unwrap();
    assert_eq!(refused(client.dma_map(0, 0x1000, rw, Some((null.as_fd(), 0)))), Errno::INVAL);
    client.dma_map(0xc_0000, 0x1000, rw, None).unwrap();
    assert_eq!(copy(&client, 0xc_0000, 0xc_0800, 8), 2, "mapped without memory");
    client.dma_unmap_all().unwrap();
    assert_eq!(refused(client.dma_unmap(0xc_0000, 0x1000)), Errno::NOENT);
}

#[test]
fn interrupts_reach_their_vectors() {
    let function = serve_copier();
    let client = connect(&function);
    let _memory = map(&client, 0, 0x1000);
    let events: Vec<Event> = (0..20).map(|_| Event::new().unwrap()).collect();
    let fds: Vec<Option<OwnedFd>> =
        events.iter().map(|e| Some(e.as_fd().try_clone_to_owned().unwrap())).collect();
    client.wire_irqs(irq::MSIX, 0, &fds).unwrap();
    client.write(7, 0x92, &0x8000u16.to_le_bytes()).unwrap();
    copy(&client, 0, 0x100, 8);
    assert!(events[0].wait(Some(1_000_000_000)));
    let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_TRIGGER;
    client.set_irqs(irq::MSIX, 19, 1, flags, &[], &[]).unwrap();
    assert!(events[19].drain() && !events[18].drain());
    // Without its wire a vector is pending; the wire delivers it.
    client.wire_irqs(irq::MSIX, 0, &[None]).unwrap();
    copy(&client, 0, 0x100, 8);
    let mut pba = [0; 8];
    client.read(4, 0x1000, &mut pba).unwrap();
    assert_eq!(pba, [1, 0, 0, 0, 0, 0, 0, 0]);
    client.wire_irqs(irq::MSIX, 0, &fds[..1]).unwrap();
    assert!(events[0].wait(Some(1_000_000_000)));
    assert_eq!(
        refused(client.set_irqs(irq::MSIX, 19, 2, flags, &[], &[])),
        Errno::INVAL,
        "there is no vector 20"
    );
    let (pipe, _writer) = std::io::pipe().unwrap();
    let trigger = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER;
    let outcome = client.set_irqs(irq::MSIX, 0, 1, trigger, &[], &[pipe.as_fd()]);
    assert_eq!(refused(outcome), Errno::INVAL, "a pipe is no eventfd");
}

/// A function has one set of vectors for both kinds of messages: a hypervisor turns off the kind that it does not use.
#[test]
fn turning_off_one_kind_of_messages_leaves_the_vectors_of_the_other() {
    let function = serve_function(Probe::new(), &socket_path(), EngineOptions::default()).unwrap();
    let client = connect(&function);
    let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_TRIGGER;
    let eventfd = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::ACTION_TRIGGER;
    for (used, other) in [(irq::MSIX, irq::MSI), (irq::MSI, irq::MSIX)] {
        let event = Event::new().unwrap();
        let wire = Some(event.as_fd().try_clone_to_owned().unwrap());
        client.wire_irqs(used, 0, &[wire]).unwrap();
        let fire = || client.set_irqs(used, 0, 1, flags, &[], &[]).unwrap();
        client.set_irqs(other, 0, 0, flags, &[], &[]).unwrap();
        fire();
        assert!(event.drain(), "index {other} has taken what index {used} has");
        client.set_irqs(other, 0, 1, eventfd, &[], &[]).unwrap();
        fire();
        assert!(event.drain(), "index {other} has taken the wire of index {used}");
        client.set_irqs(used, 0, 0, flags, &[], &[]).unwrap();
        fire();
        assert!(!event.drain());
    }
}

/// A borrower's node cannot tell which kind its user has: what it says of vectors it says by both, in the same order.
#[test]
fn vectors_that_both_kinds_have_wired_are_taken_away_by_both() {
    let function = serve_function(Probe::new(), &socket_path(), EngineOptions::default()).unwrap();
    let client = connect(&function);
    let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_TRIGGER;
    let event = Event::new().unwrap();
    let wire = || Some(event.as_fd().try_clone_to_owned().unwrap());
    let is_wired = || {
        client.set_irqs(irq::MSIX, 0, 1, flags, &[], &[]).unwrap();
        event.drain()
    };
    let both = [irq::MSIX, irq::MSI];
    both.iter().for_each(|index| client.wire_irqs(*index, 0, &[wire()]).unwrap());
    assert!(is_wired());
    both.iter().for_each(|index| client.wire_irqs(*index, 0, &[None]).unwrap());
    assert!(!is_wired(), "one wire");
    both.iter().for_each(|index| client.wire_irqs(*index, 0, &[wire()]).unwrap());
    event.drain();
    both.iter().for_each(|index| client.set_irqs(*index, 0, 0, flags, &[], &[]).unwrap());
    assert!(!is_wired(), "all wires");
}

#[test]
fn intx_is_level_triggered() {
    let function = serve_copier();
    let client = connect(&function);
    let _memory = map(&client, 0, 0x1000);
    let event = Event::new().unwrap();
    let fd = Some(event.as_fd().try_clone_to_owned().unwrap());
    client.wire_irqs(irq::INTX, 0, &[fd]).unwrap();
    copy(&client, 0, 0x100, 8);
    assert!(event.wait(Some(1_000_000_000)));
    copy(&client, 0, 0x100, 8);
    assert!(!event.drain(), "masked until it is handled");
    let unmask = IrqSetFlags::DATA_NONE | IrqSetFlags::ACTION_UNMASK;
    client.set_irqs(irq::INTX, 0, 1, unmask, &[], &[]).unwrap();
    assert!(event.drain(), "still high");
    let mut status = [0; 2];
    client.read(7, 6, &mut status).unwrap();
    assert_eq!(status[0] & 8, 8, "interrupt status");
}

#[test]
fn the_shared_page_is_the_devices_own() {
    let function = serve_copier();
    let client = connect(&function);
    let page = client.map_region(0, SHARED_PAGE, 0x1000).unwrap();
    page.whole().store_u32(8, 77, Ordering::Release).unwrap();
    let again = client.map_region(0, SHARED_PAGE, 0x1000).unwrap();
    assert_eq!(again.whole().load_u32(8, Ordering::Acquire), Some(77));
    assert!(client.map_region(0, 0, 0x1000).is_err(), "the registers are not mappable");
    assert!(client.map_region(7, 0, 0x1000).is_err());
}

#[test]
fn a_new_user_finds_nothing_of_the_old_one() {
    let function = serve_copier();
    let client = connect(&function);
    let _memory = map(&client, 0, 0x1000);
    client.write(0, SOURCE, &42u64.to_le_bytes()).unwrap();
    let busy = Client::connect(function.server().path(), LIMIT);
    assert_eq!(refused(busy), Errno::BUSY);
    drop(client);
    // The next user waits until the function is scrubbed.
    let client = Client::connect(function.server().path(), LIMIT).unwrap();
    let mut command = [0xff; 2];
    client.read(7, 4, &mut command).unwrap();
    assert_eq!(command, [0, 0]);
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    let mut source = [0xff; 8];
    client.read(0, SOURCE, &mut source).unwrap();
    assert_eq!(source, [0; 8]);
    assert_eq!(copy(&client, 0, 0x100, 8), 2, "the old user's memory is not reachable");
}

#[test]
fn a_user_that_truncates_its_memory_harms_only_itself() {
    let function = serve_copier();
    let client = connect(&function);
    let fd = rustix::fs::memfd_create("truncated", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 0x2000).unwrap();
    client.dma_map(0, 0x2000, Access::READ | Access::WRITE, Some((fd.as_fd(), 0))).unwrap();
    assert_eq!(copy(&client, 0, 0x1000, 8), 1);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    // The access itself survives; the function then drops everything of this user's.
    client.write(0, common::SOURCE, &0u64.to_le_bytes()).unwrap();
    client.write(0, common::GO, &1u64.to_le_bytes()).unwrap();
    let mut length = [0; 8];
    client.write(0, common::LENGTH, &8u64.to_le_bytes()).unwrap();
    client.write(0, common::GO, &1u64.to_le_bytes()).unwrap();
    while client.read(7, 4, &mut length[..2]).is_ok() && length[0] != 0 {}
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    assert_eq!(copy(&client, 0, 0x1000, 8), 2);
    // Its record of what is mapped holds: the range can be unmapped, and mapped to other memory.
    client.dma_unmap(0, 0x2000).expect("the mapping is still there");
    let _memory = map(&client, 0, 0x2000);
    assert_eq!(copy(&client, 0, 0x1000, 8), 1);
    // Another function in the same process never noticed.
    let other = serve_copier();
    let client = connect(&other);
    let _memory = map(&client, 0, 0x1000);
    assert_eq!(copy(&client, 0, 0x100, 8), 1);
}

#[test]
fn flr_resets_the_function_but_not_its_users_mappings() {
    let function = serve_copier();
    let client = connect(&function);
    let _memory = map(&client, 0, 0x1000);
    client.write(0, SOURCE, &42u64.to_le_bytes()).unwrap();
    client.write(7, 0x58, &0x8000u16.to_le_bytes()).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    let mut source = [0xff; 8];
    client.read(0, SOURCE, &mut source).unwrap();
    assert_eq!(source, [0; 8]);
    assert_eq!(copy(&client, 0, 0x100, 8), 1);
    client.reset().unwrap();
    client.read(7, 4, &mut source[..2]).unwrap();
    assert_eq!(source[..2], [0, 0]);
}

/// A class whose medium is part of it runs at its lender only.
#[test]
fn a_medium_that_cannot_be_separated_is_refused() {
    let mut endpoint = rackbus_pci::endpoint::Endpoint::new(common::Copier::new());
    let refused = endpoint.serve_medium(None).unwrap_err();
    assert!(matches!(refused, rackbus_pci::MediumRefused::Inseparable), "{refused}");
}
