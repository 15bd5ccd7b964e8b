//! Long ranges of zeroes that a front asks its medium for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::super::zero_parts::FIRST as ZERO_ASK;
use super::*;
use crate::nvme::backing::parts::ZERO_PIECE;

/// The front's other operations are answered between the pieces of it.
#[test]
fn a_long_range_of_zeroes_keeps_no_other_operation_waiting() {
    let size = 8 * ZERO_PIECE;
    let (mut lender, offer) = offered(&NvmeConfig::memory(size, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let front =
        RemoteBacking::new(description, offer.handles.try_into().unwrap(), Lost::new(|| {}));
    let mut front = front.unwrap();
    let (source, from) = buffer(8192);
    source.whole().fill(5);
    // Something in each piece: what was never written takes no time.
    for offset in (0..size).step_by(ZERO_PIECE as usize) {
        let mut written = Vec::new();
        let write = MediumRequest::Write { offset, from: from.clone(), durable: false };
        front.background().unwrap().start(0, write);
        front.background().unwrap().submit();
        while written.is_empty() {
            lender.poll(0);
            front.background().unwrap().reap(&mut written);
        }
    }
    let background = front.background().unwrap();
    background
        .start(1, MediumRequest::Zero { offset: 8192, length: size - 8192, deallocate: false });
    background.start(2, MediumRequest::Write { offset: 0, from, durable: true });
    background.submit();
    let (mut polls, mut finished) = (0, Vec::new());
    while finished.len() < 2 {
        assert_eq!(lender.poll(0), Work::Done, "a poll that does a piece is work");
        front.background().unwrap().reap(&mut finished);
        polls += 1;
    }
    assert_eq!(finished, [(2, Ok(())), (1, Ok(()))]);
    assert!(polls >= 8, "{polls} polls");
    let (target, into) = buffer(8192);
    front.background().unwrap().start(3, MediumRequest::Read { offset: 0, into });
    front.background().unwrap().submit();
    while finished.len() < 3 {
        lender.poll(0);
        front.background().unwrap().reap(&mut finished);
    }
    let mut data = vec![9; 8192];
    target.whole().copy_to(&mut data);
    assert_eq!(data, [5; 8192]);
}

/// Ends the lender's thread, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A lender that needs a moment for each piece of it is not taken for one that hangs.
#[test]
fn a_reset_waits_for_a_part_of_a_long_range_of_zeroes_and_gives_up_the_rest() {
    let size = 4 * ZERO_ASK;
    let (mut lender, offer) = offered(&NvmeConfig::memory(size, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let front =
        RemoteBacking::new(description, offer.handles.try_into().unwrap(), Lost::new(|| {}));
    let mut front = front.unwrap().with_patience(Duration::from_secs(1));
    let at = [0, ZERO_ASK, 2 * ZERO_ASK, size - 8192];
    let (source, target) = (buffer(8192), buffer(8192));
    source.0.whole().fill(5);
    let (stop, slow) = (AtomicBool::new(false), &AtomicBool::new(false));
    let stop = &stop;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                lender.poll(0);
                if slow.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let _stop = Stop(stop);
        let mut finished = Vec::new();
        let mut ask = |front: &mut RemoteBacking, request| {
            front.background().unwrap().start(1, request);
            front.background().unwrap().submit();
            while finished.is_empty() {
                front.background().unwrap().reap(&mut finished);
            }
            assert_eq!(std::mem::take(&mut finished), [(1, Ok(()))]);
        };
        // Something in each piece, so that there is something to be done.
        for offset in (0..size).step_by(ZERO_PIECE as usize).chain(at) {
            ask(
                &mut front,
                MediumRequest::Write { offset, from: source.1.clone(), durable: false },
            );
        }
        slow.store(true, Ordering::Relaxed);
        let zero = MediumRequest::Zero { offset: 0, length: size, deallocate: false };
        front.background().unwrap().start(2, zero);
        front.background().unwrap().abort();
        slow.store(false, Ordering::Relaxed);
        let first = at.map(|offset| {
            ask(&mut front, MediumRequest::Read { offset, into: target.1.clone() });
            let mut byte = [0];
            target.0.whole().part(0, 1).unwrap().copy_to(&mut byte);
            byte[0]
        });
        assert_eq!(first, [0, 5, 5, 5], "the part that was under way");
        // Not given up, all of it is made zeroes, and it is answered once.
        ask(&mut front, MediumRequest::Zero { offset: 0, length: size, deallocate: false });
        ask(&mut front, MediumRequest::Read { offset: at[3], into: target.1.clone() });
        let mut byte = [9];
        target.0.whole().part(8191, 1).unwrap().copy_to(&mut byte);
        assert_eq!(byte, [0]);
    });
}

/// An unmap waits for what has buffers, and may have to wait for zeroes first; parts of them that are answered in time
/// show that the lender does not hang.
#[test]
fn zeroing_a_long_range_shows_progress_by_its_parts() {
    const PARTS: u64 = 5;
    let (size, patience) = (PARTS * ZERO_ASK, Duration::from_secs(2));
    let (mut lender, offer) = offered(&NvmeConfig::memory(size, "M1"));
    let description = serde_json::from_str(&offer.description).unwrap();
    let front =
        RemoteBacking::new(description, offer.handles.try_into().unwrap(), Lost::new(|| {}));
    let mut front = front.unwrap().with_patience(patience);
    let source = buffer(8192);
    let (stop, slow) = (AtomicBool::new(false), &AtomicBool::new(false));
    let stop = &stop;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A third of its patience for each part: all of them take longer than one answer may.
            let pause = patience / 3 / (ZERO_ASK / ZERO_PIECE) as u32;
            while !stop.load(Ordering::Relaxed) {
                if lender.poll(0) == rackbus_pci::Work::Done && slow.load(Ordering::Relaxed) {
                    std::thread::sleep(pause);
                }
            }
        });
        let _stop = Stop(stop);
        let mut finished = Vec::new();
        for offset in (0..size).step_by(ZERO_PIECE as usize) {
            let write = MediumRequest::Write { offset, from: source.1.clone(), durable: false };
            front.background().unwrap().start(1, write);
            while finished.is_empty() {
                front.background().unwrap().reap(&mut finished);
            }
            finished.clear();
        }
        slow.store(true, Ordering::Relaxed);
        let begun = Instant::now();
        let zero = MediumRequest::Zero { offset: 0, length: size, deallocate: false };
        front.background().unwrap().start(2, zero);
        while finished.is_empty() {
            front.background().unwrap().wait(&mut finished);
        }
        assert_eq!(finished, [(2, Ok(()))]);
        assert!(begun.elapsed() > patience, "nothing was slow: the test shows nothing");
    });
}
