//! A session and a function in files, as this version writes them: another process continues from each.
//!
//! The versions of the two are one ([`VERSION`]), and so far there is one. What was added to it since is left out where
//! there is none of it: a function with windows is refused by programs that know none.

use rackbus_fabric::rack::Rack;
use rackbus_fabric::{BarPlace, Fabric, FabricHandle, derive};
use rackbus_pci::state::VERSION;
use rackbus_seeds::stored::StoredStates;
use serde_json::Value;

use super::*;

const RACK: &str = "name = \"test\"\n[hosts.alpha.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n\
                    [hosts.beta.devices.nvme0]\nkind = \"nvme\"\nsize = \"1 MiB\"\n";
const PAGE: u64 = 4096;
/// Where MSI-X is turned on.
const MSIX: u64 = 0x92;
const ON: u16 = 0x8000;

fn stored(name: &'static str) -> StoredStates {
    StoredStates::new(
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/succession/stored"),
        name,
        VERSION,
    )
}

fn lending() -> Lending {
    let rack = Rack::parse("rack.toml", RACK).unwrap();
    let fabric = FabricHandle::new(Fabric::new(derive::here(&rack).unwrap()));
    fabric.lending("alpha/nvme0", "beta").unwrap()
}

/// What the file says, after what was saved just now was compared with it. The client was promised no more mappings than
/// any machine has.
fn session(saved: &[u8]) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(saved).unwrap();
    value["conversation"]["max_dma_maps"] = 512.into();
    stored("session").compare(&serde_json::to_vec(&value).unwrap());
    stored("session").read(VERSION).into_bytes()
}

#[test]
fn a_session_continues_from_what_this_version_wrote() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let theirs = Arc::new(theirs);
    let life = Life::first(&theirs);
    let client = Client::with_stream(Arc::new(ours)).unwrap();
    client.write(7, 4, &6u16.to_le_bytes()).unwrap();
    client.write(7, MSIX, &ON.to_le_bytes()).unwrap();
    client.write(4, 0x20, &[7; 16]).unwrap();
    let memory = map(&client, 0x10_0000, 0x4000);
    client.dma_map(0x20_0000, 0x1000, Access::READ, None).unwrap();
    let event = Event::new().unwrap();
    let wire = || [Some(event.as_fd().try_clone_to_owned().unwrap())];
    client.wire_irqs(irq::MSIX, 3, &wire()).unwrap();
    // It raises vector 0, which nobody has wired.
    memory.whole().copy_from(b"the quick brown fox");
    assert_eq!(copy(&client, 0x10_0000, 0x10_1000, 19), 1);
    // The memory and the descriptors are those of this session, which did the same as the one that was stored.
    let (bytes, descriptors) = life.end();
    // A command that nobody has heard yet: the copy of the copy.
    for (register, value) in [
        (common::STATUS, 0u64),
        (common::SOURCE, 0x10_1000),
        (common::DESTINATION, 0x10_2000),
        (common::GO, 1),
    ] {
        client.post(0, register, &value.to_le_bytes()).unwrap();
    }
    let life = Life::next(&session(&bytes), descriptors, &theirs);
    let mut status = [0];
    while status[0] == 0 {
        client.read(0, common::STATUS, &mut status).unwrap();
    }
    assert_eq!(status[0], 1);
    let mut out = [0; 19];
    memory.region().slice(0x2000, 19).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"the quick brown fox", "its length is that of the life before");
    assert!(!event.drain(), "another vector rings");
    client.wire_irqs(irq::MSIX, 0, &wire()).unwrap();
    assert!(event.wait(Some(10_000_000_000)), "what was raised is lost");
    let mut entry = [0; 16];
    client.read(4, 0x20, &mut entry).unwrap();
    assert_eq!(entry, [7; 16]);
    client.dma_unmap(0x20_0000, 0x1000).unwrap();
    client.dma_unmap(0x10_0000, 0x4000).unwrap();
    drop(life.end());
}

/// It has begun nothing of what it was told when it is saved.
#[test]
fn a_function_with_a_window_continues_from_what_this_version_wrote() {
    let mut first = Endpoint::new(Copier::new());
    first.begin(lending(), None);
    let [memory, bar] = ["user", "bar"].map(|name| SharedMemory::create(name, 2 * PAGE).unwrap());
    let access = Access::READ | Access::WRITE;
    first.map(PAGE, 2 * PAGE, access, Some(memory.handle(0))).unwrap();
    let place = BarPlace { function: "beta/nvme0".to_owned(), bar: 2, offset: PAGE };
    first.open_window(8 * PAGE, PAGE, access, place, bar.handle(PAGE)).unwrap();
    first.write(FunctionRegion::Config, 4, &6u16.to_le_bytes()).unwrap();
    first.write(FunctionRegion::Config, MSIX, &ON.to_le_bytes()).unwrap();
    let event = Event::new().unwrap();
    let wire = Some(event.as_fd().try_clone_to_owned().unwrap());
    first.set_irqs(IrqChange::WireVectors(0, vec![wire])).unwrap();
    memory.whole().copy_from(b"through a window");
    for (register, value) in
        [(common::SOURCE, PAGE), (common::DESTINATION, 8 * PAGE), (common::LENGTH, 16)]
    {
        first.write(FunctionRegion::Bar(0), register, &value.to_le_bytes()).unwrap();
    }
    first.write(FunctionRegion::Bar(0), common::GO, &1u64.to_le_bytes()).unwrap();
    let saved = first.save().unwrap();
    stored("function").compare(&saved.state.to_bytes().unwrap());
    drop(first);
    let state = FunctionState::from_bytes(stored("function").read(VERSION).as_bytes()).unwrap();
    let mut next = Endpoint::new(Copier::new());
    next.begin(lending(), None);
    next.restore(&state, saved.descriptors).unwrap();
    next.poll(1);
    next.poll(2);
    let mut out = [0; 16];
    bar.region().slice(PAGE as usize, 16).unwrap().copy_to(&mut out);
    assert_eq!(&out, b"through a window");
    assert!(event.drain() && !event.drain(), "its interrupt comes once");
}

#[test]
fn a_session_of_a_newer_version_is_refused_whatever_else_it_says() {
    let text = stored("session").read(VERSION);
    let state: Value = serde_json::from_str(&text).unwrap();
    let mut newer = state.clone();
    newer["version"] = 99.into();
    newer["more"] = true.into();
    let mut within = state;
    within["function"]["version"] = 99.into();
    for newer in [newer, within] {
        let refused = SessionState::from_bytes(&serde_json::to_vec(&newer).unwrap()).unwrap_err();
        let expected =
            format!("the state has version 99, this program knows {VERSION}; use a newer program");
        assert_eq!(refused.to_string(), expected);
    }
}
