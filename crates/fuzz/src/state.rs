//! The saved state of a function, as whoever wrote it likes: of a drive in use, with the descriptors
//! that belong to it.
//!
//! What is read is restored or refused. What was refused holds nothing of its user's, what was
//! restored can be used, and the next driver finds a drive that works.

use rackbus_pci::FunctionState;
use rackbus_pci::vfio_user::SessionState;

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

/// Of a drive with large blocks.
const LARGE: &[u8] = b"\"block_size\":4096";

/// States of drives that drivers have used.
pub fn seeds() -> Vec<Vec<u8>> {
    let used = nvme::seeds().into_iter().map(|deeds| {
        let saved = nvme::driven(&deeds).endpoint.save().expect("it has not ended");
        saved.state.to_bytes().expect("it can be written")
    });
    used.collect()
}
