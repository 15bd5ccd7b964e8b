use proptest::prelude::*;

use super::*;
use crate::Event;
use crate::region::SharedMemory;

const LAYOUT: FramesLayout = FramesLayout { ring_bytes: 4096, longest: 1500 };

fn events() -> [FrameEvents; 2] {
    let [frames, room] = [(); 2].map(|()| std::os::fd::OwnedFd::from(Event::new().unwrap()));
    let copy = |fd: &std::os::fd::OwnedFd| PeerEvent::new(fd.try_clone().unwrap()).unwrap();
    let both = || FrameEvents { frames: copy(&frames), room: copy(&room) };
    [both(), both()]
}

fn ring(layout: FramesLayout) -> (SharedMemory, FrameSender, FrameReceiver) {
    let bytes = layout.bytes().unwrap() as u64;
    let memory = SharedMemory::create("frames", bytes).unwrap();
    let [ours, theirs] = events();
    let sender = FrameSender::new(memory.region().clone(), ours, layout).unwrap();
    let receiver = FrameReceiver::new(memory.region().clone(), theirs, layout).unwrap();
    (memory, sender, receiver)
}

fn received(receiver: &mut FrameReceiver) -> Option<(u8, Vec<u8>)> {
    let frame = receiver.peek().unwrap()?;
    let mut bytes = vec![0; frame.bytes.len()];
    frame.bytes.copy_to(&mut bytes);
    let header = frame.header[0];
    receiver.consume();
    Some((header, bytes))
}

/// A frame that can be told from all others.
fn frame(number: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (number * 31 + at * 7) as u8).collect()
}

proptest! {
    /// What was sent is received once, in order and whole, when it was handed over and not before, however far the
    /// two sides are apart; what has no room has room when the other side has taken what there is.
    #[test]
    fn frames_come_out_as_they_went_in(
        steps in prop::collection::vec((0u8..7, 1usize..=1500), 1..400),
        split in 0usize..64,
    ) {
        let (_memory, mut sender, mut receiver) = ring(LAYOUT);
        let mut under_way = std::collections::VecDeque::new();
        let mut written = std::collections::VecDeque::new();
        for (number, (step, length)) in steps.into_iter().enumerate() {
            match step {
                0..3 => {
                    prop_assert_eq!(received(&mut receiver), under_way.pop_front());
                    continue;
                }
                3 => {
                    sender.flush();
                    under_way.append(&mut written);
                    continue;
                }
                _ => {}
            }
            let bytes = frame(number, length);
            let source = SharedMemory::create("source", 2048).unwrap();
            source.whole().copy_from(&bytes);
            let split = split.min(length);
            let parts = [
                source.whole().part(0, split).unwrap(),
                source.whole().part(split, length - split).unwrap(),
            ];
            let head = &bytes[..length.min(9)];
            match sender.send(&[number as u8; FRAME_HEADER], head, &parts) {
                Ok(()) => written.push_back((number as u8, bytes)),
                Err(FrameError::Full) => {
                    under_way.append(&mut written);
                    prop_assert!(!under_way.is_empty());
                    while let Some(expected) = under_way.pop_front() {
                        prop_assert_eq!(received(&mut receiver), Some(expected));
                    }
                    prop_assert_eq!(received(&mut receiver), None);
                    prop_assert!(sender.has_room(length));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Whatever a sender writes into the ring, its receiver ends: with frames inside of the ring, or with an
    /// error.
    #[test]
    fn any_bytes_of_a_sender_are_an_error_or_a_frame(
        words in prop::collection::vec((0usize..64, any::<u32>(), 0u32..3000), 1..80),
        sent in 0usize..4,
    ) {
        let (memory, mut sender, mut receiver) = ring(LAYOUT);
        for number in 0..sent {
            let _ = sender.send(&[0; FRAME_HEADER], &frame(number, 700), &[]);
            sender.flush();
        }
        for (line, place, length) in words {
            let place = if place % 3 == 0 { place } else { line as u32 };
            let length = if length == 2999 { u32::MAX } else { length };
            memory.whole().write_obj(RING + line * LINE, &(u64::from(place) << 32 | u64::from(length)));
        }
        for _ in 0..1000 {
            match receiver.peek() {
                Ok(Some(frame)) => prop_assert!((1..=1500).contains(&frame.bytes.len())),
                Ok(None) | Err(RingBroken) => break,
            }
            receiver.consume();
        }
    }
}

#[test]
fn a_receiver_that_gives_back_what_it_never_had_is_found_out() {
    for lie in [u64::MAX, 1 << 20] {
        let (memory, mut sender, _receiver) = ring(LAYOUT);
        memory.whole().write_obj(CREDIT, &lie);
        let outcome =
            (0..10).find_map(|nth| sender.send(&[0; FRAME_HEADER], &frame(nth, 1000), &[]).err());
        assert_eq!(outcome, Some(FrameError::Broken(RingBroken)));
    }
}

#[test]
fn what_a_frame_brings_is_not_taken_for_a_frame() {
    // Frames full of marks for the places that come next: each would be one, were it not cleared.
    let (_memory, mut sender, mut receiver) = ring(LAYOUT);
    let mut place = 0u64;
    for _ in 0..40 {
        let mut bytes = vec![0; 1500];
        for (nth, word) in bytes.chunks_exact_mut(8).enumerate() {
            let lap = 4096 / LINE as u64;
            let line = (place + (FRAME + nth * 8) as u64 / LINE as u64) % lap;
            let later = place - place % lap + lap + line;
            word.copy_from_slice(&(later << 32 | 60).to_ne_bytes());
        }
        sender.send(&[0; FRAME_HEADER], &bytes, &[]).unwrap();
        sender.flush();
        place += lines_of(1500) as u64;
        assert_eq!(received(&mut receiver).unwrap().1, bytes);
        assert_eq!(received(&mut receiver), None);
    }
}

#[test]
fn frames_that_no_ring_has_are_refused() {
    let (_memory, mut sender, _receiver) = ring(LAYOUT);
    assert_eq!(sender.send(&[0; FRAME_HEADER], &[], &[]), Err(FrameError::Length));
    assert_eq!(sender.send(&[0; FRAME_HEADER], &[0; 1501], &[]), Err(FrameError::Length));
}

#[test]
fn a_parked_receiver_is_rung_for_later_frames_and_told_of_earlier_ones() {
    let (_memory, mut sender, mut receiver) = ring(LAYOUT);
    let is_rung = |fd: BorrowedFd<'_>| Event::wait_any(&[fd], Some(0));
    assert!(receiver.park());
    sender.send(&[0; FRAME_HEADER], &[1; 1500], &[]).unwrap();
    assert!(!is_rung(receiver.as_fd()));
    sender.flush();
    assert!(is_rung(receiver.as_fd()));
    assert!(!receiver.park());
    assert!(!sender.park(1500));
    while sender.send(&[0; FRAME_HEADER], &[1; 1500], &[]).is_ok() {}
    assert!(sender.park(1500));
    while received(&mut receiver).is_some() {}
    assert!(is_rung(sender.as_fd()) && sender.has_room(1500));
}

#[test]
fn rings_that_cannot_be_are_none() {
    let bytes = |ring_bytes, longest| FramesLayout { ring_bytes, longest }.bytes();
    assert_eq!(bytes(4096, 1500), Some(4096 + 256));
    assert_eq!(bytes(4096, 2048), None);
    assert_eq!(bytes(4095, 100), None);
    assert_eq!(bytes(1 << 27, 100), None);
    assert_eq!(bytes(4096, usize::MAX), None);
}

#[test]
fn a_closed_doorbell_keeps_nobody_awake() {
    let (memory, mut sender, mut receiver) = ring(LAYOUT);
    assert!(receiver.park());
    // The flag behind the count and the turn, of both doorbells.
    for bell in [0, ROOM_BELL] {
        memory.whole().write_obj(bell + 8, &1u32);
    }
    assert!(!receiver.park());
    assert_eq!(receiver.peek().err(), Some(RingBroken));
    while sender.send(&[0; FRAME_HEADER], &[1; 1500], &[]).is_ok() {}
    assert!(!sender.park(1500));
    assert_eq!(sender.send(&[0; FRAME_HEADER], &[1; 60], &[]), Err(FrameError::Broken(RingBroken)));
}

#[test]
fn a_sender_knows_what_is_left_when_its_receiver_is_gone() {
    let (memory, mut sender, mut receiver) = ring(LAYOUT);
    let mut sent = 0;
    let mut taken = 0;
    // Several times around the ring, whose end is left out where a record would go beyond it.
    for number in 0..200 {
        let length = 1 + number * 37 % 700;
        while sender.send(&[0; FRAME_HEADER], &frame(number, length), &[]).is_err() {
            assert_eq!(sender.unread(), sent - taken);
            while received(&mut receiver).is_some() {
                taken += 1;
            }
        }
        sent += 1;
    }
    sender.flush();
    let left = sender.unread();
    assert!(left > 0 && left == sent - taken, "{left} of {}", sent - taken);
    // Whatever is written into the ring, it ends, with no more than the ring could hold.
    for byte in 0..=255 {
        let bytes = vec![byte; LAYOUT.ring_bytes];
        memory.whole().part(RING, LAYOUT.ring_bytes).unwrap().copy_from(&bytes);
        assert!(sender.unread() <= (LAYOUT.ring_bytes / LINE) as u64);
    }
    memory.whole().part(CREDIT, 8).unwrap().copy_from(&[0xff; 8]);
    assert_eq!(sender.unread(), 0);
}
