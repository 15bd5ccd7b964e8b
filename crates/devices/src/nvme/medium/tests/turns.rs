//! How much data either end moves before it tells of it.

use super::*;

/// Bytes of a command.
const COMMAND: u64 = 128 << 10;

/// Neither end keeps what is done to itself until all is: the front reports some reads while answers to others are there,
/// and the lender answers some while others wait. What is small is reported together.
#[test]
fn what_is_done_is_told_before_more_is_moved_than_a_turn_has() {
    let turn = (TURN_BYTES / COMMAND) as usize;
    for (bytes, at_once) in [(COMMAND, turn), (4096, 8)] {
        let mut both = both(&NvmeConfig::memory(SIZE, "M1"));
        for tag in 0..8 {
            let (_, into) = buffer(bytes as usize);
            both.start(tag, MediumRequest::Read { offset: u64::from(tag) * bytes, into });
        }
        let mut finished = Vec::new();
        both.front.background().unwrap().submit();
        for polls in 1..=8 / at_once {
            assert_eq!(both.lender.poll(0), Work::Done);
            both.front.background().unwrap().reap(&mut finished);
            assert_eq!(finished.len(), polls * at_once, "the lender answers {at_once} in a poll");
        }
        for tag in 0..8 {
            let (_, into) = buffer(bytes as usize);
            both.start(tag, MediumRequest::Read { offset: u64::from(tag) * bytes, into });
        }
        both.front.background().unwrap().submit();
        while both.lender.poll(0) == Work::Done {}
        for reaps in 1..=8 / at_once {
            assert!(both.front.background().unwrap().rearm(), "it would sleep over what is left");
            finished.clear();
            both.front.background().unwrap().reap(&mut finished);
            assert_eq!(finished.len(), at_once, "the front reports in look {reaps}");
        }
    }
}
