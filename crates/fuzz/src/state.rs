//! The saved state of a function, as whoever wrote it likes: of a drive in use, with the descriptors
//! that belong to it.
//!
//! What is read is restored or refused. What was refused holds nothing of its user's, what was
//! restored can be used, and the next driver finds a drive that works.

use std::os::fd::OwnedFd;

use rackbus_fabric::BarPlace;
use rackbus_memory::{Access, Event, SharedMemory};
use rackbus_pci::vfio_user::{
    PassthroughSession, RestingConversation, SavedSession, SessionState, UserMapping, UserResources,
};
use rackbus_pci::{FunctionState, ModelState};

use crate::nvme::{self, NvmeDriver};

/// What states have in them.
pub const WORDS: &[&str] = &[
    "\"version\":",
    "\"mappings\":[",
    "\"iova\":",
    "\"length\":",
    "\"memory\":[",
    "\"wires\":[[",
    "\"claim\":",
    "\"descriptors\":",
    "\"jobs\":[",
    "\"sqs\":[",
    "\"cqs\":[",
    "\"held\":[",
    "18446744073709551615",
    "4294967295",
    "null",
    "true",
];

/// Restores what `data` says.
pub fn run(data: &[u8]) {
    if let Ok(session) = SessionState::from_bytes(data) {
        let again = session.to_bytes().expect("it was read");
        assert_eq!(SessionState::from_bytes(&again).expect("it was written here"), session);
        (1..=MOST_DESCRIPTORS).for_each(|count| without_engine(session.clone(), count));
    }
    let Ok(state) = FunctionState::from_bytes(data) else { return };
    let again = state.to_bytes().expect("it was read");
    assert_eq!(FunctionState::from_bytes(&again).expect("it was written here"), state);
    let large = data.windows(LARGE.len()).any(|part| part == LARGE);
    let mut driver = NvmeDriver::new(if large { 4096 } else { 512 });
    let saved = driver.endpoint.save().expect("it has not ended");
    if driver.go_on(&state, saved) {
        driver.poll();
        (0..3).for_each(|qid| driver.ring(qid));
        driver.poll();
        driver.endpoint.park();
        driver.go_on_as_it_is();
    } else {
        assert!(driver.endpoint.dma().is_empty(), "what was refused holds memory");
    }
    driver.serve_next();
}

/// The most descriptors that come with a session whose function has no engine here.
const MOST_DESCRIPTORS: usize = 6;

/// Goes on with a session whose function has no engine here, which comes with the right to that, and with files and events
/// in turn. It is refused, or can be written down and gone on with again.
fn without_engine(state: SessionState, count: usize) {
    let claim = Event::new().expect("an event");
    claim.ring();
    let mut descriptors = vec![OwnedFd::from(claim)];
    for number in 1..count {
        descriptors.push(match number % 2 {
            0 => Event::new().expect("an event").into(),
            _ => SharedMemory::reserve("fuzzed", 1 << 16).expect("memory"),
        });
    }
    let saved = SavedSession { state, descriptors, medium: Vec::new() };
    if let Ok(session) = PassthroughSession::restore(saved) {
        let again = session.save().expect("there are descriptors left");
        PassthroughSession::restore(again).expect("it was written here");
    }
}

/// Of a drive with large blocks.
const LARGE: &[u8] = b"\"block_size\":4096";

/// The session of a function with a mapping, a window and two wires.
fn session() -> Vec<u8> {
    let memory = SharedMemory::create("fuzzed", 1 << 16).expect("memory");
    let mapping = |iova| {
        let memory = Some(memory.handle(0));
        UserMapping { iova, length: 4096, access: Access::READ, memory }
    };
    let place = BarPlace { function: "a/d".to_owned(), bar: 2, offset: 0 };
    let event = || OwnedFd::from(Event::new().expect("an event"));
    let resources = UserResources {
        mappings: vec![mapping(4096), UserMapping { memory: None, ..mapping(1 << 20) }],
        windows: vec![(mapping(1 << 32), place)],
        vectors: vec![(1, event())],
        pin: Some(event()),
    };
    let (conversation, medium) = (RestingConversation::default(), Vec::new());
    let model = ModelState::new("vfio", 1, &0).expect("it can be written");
    let msix_table = vec![(4, 1)];
    let session = PassthroughSession { conversation, resources, msix_table, model, medium };
    let saved = session.save().expect("there are descriptors left");
    saved.state.to_bytes().expect("it can be written")
}

/// States of drives that drivers have used, and a session with a function that has no engine.
pub fn seeds() -> Vec<Vec<u8>> {
    let used = nvme::seeds().into_iter().map(|deeds| {
        let saved = nvme::driven(&deeds).endpoint.save().expect("it has not ended");
        saved.state.to_bytes().expect("it can be written")
    });
    used.chain([session()]).collect()
}
