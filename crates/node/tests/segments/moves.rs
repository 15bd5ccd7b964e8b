//! Memory that is moved away from those who lose it, while others use it.

use std::sync::Arc;

use rackbus_attach::{SegmentAccess, SegmentOptions};
use rackbus_segment::message::{Notice, SessionEvent};

use crate::common::segments::{ALPHA, BETA, GAMMA, Hosts};
use crate::support::{LIMIT, SOON, Stranger, answered, mapped, until};

#[test]
fn after_a_move_nobody_writes_before_all_have_the_new_memory() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, gamma) = (rack.session(ALPHA), rack.session(GAMMA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 4096).unwrap();
    let _lost = answered(|| gamma.connect(ALPHA, 7, LIMIT)).unwrap();
    let slow = Stranger::attach(&rack, BETA);
    let keeper = slow.connect(ALPHA, 7);
    let (_, before) = mapped(&mine);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| alpha.set_share(7..=7, Some(GAMMA), SegmentAccess::None));
        let SessionEvent::Freeze { ticket, .. } = slow.event() else { panic!("not a freeze") };
        slow.notice(Notice::Frozen { ticket, keeper });
        assert!(matches!(slow.event(), SessionEvent::Adopt { .. }));
        // The owner has the new memory, and the other reader still the old.
        until(|| mapped(&mine).1 != before);
        assert!(mapped(&mine).0);
        slow.notice(Notice::Adopted { ticket, keeper });
        assert!(matches!(slow.event(), SessionEvent::Unfreeze { .. }));
        until(|| !mapped(&mine).0);
        taken.join().unwrap().unwrap();
    });
}

#[test]
fn a_segment_that_goes_during_a_move_leaves_no_writer_waiting() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, gamma) = (rack.session(ALPHA), rack.session(GAMMA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 4096).unwrap();
    let kept = answered(|| gamma.connect(ALPHA, 7, LIMIT)).unwrap();
    let theirs = kept.map(0, 4096).unwrap();
    let beta = rack.session(BETA);
    let _lost = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    let silent = Stranger::attach(&rack, ALPHA);
    silent.connect(ALPHA, 7);
    let (done, written) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| alpha.set_share(7..=7, Some(BETA), SegmentAccess::None));
        until(|| mapped(&mine).0 && mapped(&theirs).0);
        for mapping in [mine.clone(), theirs.clone()] {
            let done = done.clone();
            // Not one of the scope's: were it to wait for ever, the test would.
            std::thread::spawn(move || {
                mapping.whole().write_obj(0, &1_u64).unwrap();
                done.send(()).unwrap();
            });
        }
        drop(kept);
        drop(segment);
        for _ in 0..2 {
            written.recv_timeout(SOON.unwrap()).expect("a writer waits for ever");
        }
        taken.join().unwrap().unwrap();
    });
}
