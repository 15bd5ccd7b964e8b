//! Interrupts between processes of several hosts, with data and without.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use rackbus_attach::{Interrupt, InterruptError, Refusal, SegmentAccess};
use rackbus_memory::Access;
use rackbus_memory::doorbell::Doorbell;
use rackbus_segment::message::{InterruptKind, SessionRequest};

use crate::common::segments::{ALPHA, BETA, GAMMA, Hosts};
use crate::support::{LIMIT, SOON, Stranger, answered, refusal};

#[test]
fn interrupts_count_or_meet_and_messages_keep_their_order() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let plain = alpha.create_interrupt(Some(5), false, false).unwrap();
    let counting = alpha.create_interrupt(None, false, true).unwrap();
    let again = alpha.create_interrupt(Some(5), false, false);
    assert_eq!(refusal(again), Refusal::InUse);
    for (interrupt, times) in [(&plain, 1), (&counting, 3)] {
        let sender = answered(|| beta.connect_interrupt(ALPHA, interrupt.number(), LIMIT)).unwrap();
        (0..3).for_each(|_| sender.trigger().unwrap());
        for _ in 0..times {
            interrupt.wait(SOON).unwrap();
        }
        let none = interrupt.wait(Some(Duration::ZERO));
        assert_eq!(none, Err(InterruptError::TimedOut));
    }
    let data = alpha.create_data_interrupt(Some(5)).unwrap();
    let senders = [ALPHA, BETA, GAMMA]
        .map(|node| answered(|| rack.session(node).connect_data_interrupt(252, 5, LIMIT)).unwrap());
    for number in 0..10_u8 {
        senders.iter().enumerate().for_each(|(n, s)| s.send(&[n as u8, number]).unwrap());
    }
    let mut next = [0; 3];
    let mut buffer = [0; 8];
    for _ in 0..30 {
        assert_eq!(data.receive(&mut buffer, SOON), Ok(2));
        let sender = usize::from(buffer[0]);
        assert_eq!(buffer[1], next[sender]);
        next[sender] += 1;
    }
    let full = (0..100).find_map(|_| senders[0].send(&[0; 1024]).err());
    assert_eq!(full, Some(InterruptError::Full));
    assert_eq!(senders[1].send(&[0; 1025]), Err(InterruptError::TooLong));
    assert_eq!(data.receive(&mut buffer, SOON), Err(InterruptError::BufferTooShort(1024)));
    drop(data);
    let sender = &senders[2];
    while sender.send(&[1]).is_ok() {}
    assert_eq!(sender.send(&[1]), Err(InterruptError::Gone));
}

/// Senders' places are given back: that they were not could never be shown.
#[test]
fn any_number_of_senders_come_to_one_interrupt_and_leave() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let plain = alpha.create_interrupt(Some(5), false, true).unwrap();
    let data = alpha.create_data_interrupt(Some(5)).unwrap();
    let mut buffer = [0; 8];
    for number in 0..200_u8 {
        let sender = answered(|| beta.connect_interrupt(ALPHA, 5, LIMIT)).unwrap();
        sender.trigger().unwrap();
        plain.wait(SOON).unwrap();
        let sender = answered(|| beta.connect_data_interrupt(ALPHA, 5, LIMIT)).unwrap();
        sender.send(&[number]).unwrap();
        assert_eq!((data.receive(&mut buffer, SOON), buffer[0]), (Ok(1), number));
    }
}

#[test]
fn a_new_member_of_a_shared_interrupt_hears_later_triggers() {
    let rack = Hosts::start(|link| Arc::new(link));
    let first = rack.session(ALPHA).create_interrupt(Some(5), true, true).unwrap();
    let sender = answered(|| rack.session(BETA).connect_interrupt(ALPHA, 5, LIMIT)).unwrap();
    (0..3).for_each(|_| sender.trigger().unwrap());
    let second = rack.session(ALPHA).create_interrupt(Some(5), true, true).unwrap();
    assert_eq!(second.wait(Some(Duration::ZERO)), Err(InterruptError::TimedOut));
    sender.trigger().unwrap();
    for (interrupt, times) in [(&first, 4), (&second, 1)] {
        (0..times).for_each(|_| interrupt.wait(SOON).unwrap());
        assert_eq!(interrupt.wait(Some(Duration::ZERO)), Err(InterruptError::TimedOut));
    }
}

/// Whoever joins while triggers come hears each one that begins after it has joined, and none that was over before it
/// began to: the node that makes it a receiver says how many rings were before.
#[test]
fn a_new_member_amid_triggers_hears_all_later_ones() {
    const ROUNDS: usize = 200;
    /// Triggers of a round that begin after the other side has joined.
    const AFTER: usize = 500;
    let rack = Hosts::start(|link| Arc::new(link));
    let first = rack.session(ALPHA).create_interrupt(Some(5), true, true).unwrap();
    let sender = answered(|| rack.session(BETA).connect_interrupt(ALPHA, 5, LIMIT)).unwrap();
    let joining = rack.session(ALPHA);
    let (begun, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let has_joined = AtomicBool::new(false);
    let round = Barrier::new(2);
    let trigger = || {
        begun.fetch_add(1, Ordering::SeqCst);
        sender.trigger().unwrap();
        over.fetch_add(1, Ordering::SeqCst);
    };
    let triggers = || {
        round.wait();
        while !has_joined.load(Ordering::SeqCst) {
            trigger();
        }
        (0..AFTER).for_each(|_| trigger());
        round.wait();
    };
    let heard = |interrupt: &Interrupt| {
        std::iter::from_fn(|| interrupt.wait(Some(Duration::ZERO)).ok()).count()
    };
    let bounds = std::thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS).for_each(|_| triggers()));
        let join = |_| {
            has_joined.store(false, Ordering::SeqCst);
            let start = over.load(Ordering::SeqCst);
            round.wait();
            while over.load(Ordering::SeqCst) == start {
                std::thread::yield_now();
            }
            let before = over.load(Ordering::SeqCst);
            let joined = joining.create_interrupt(Some(5), true, true).unwrap();
            let after = begun.load(Ordering::SeqCst);
            has_joined.store(true, Ordering::SeqCst);
            round.wait();
            let all = over.load(Ordering::SeqCst);
            (all - after, heard(&joined), all - before)
        };
        (0..ROUNDS).map(join).collect::<Vec<_>>()
    });
    for (least, heard, most) in &bounds {
        assert!((least..=most).contains(&heard), "{heard} of {least} to {most}");
    }
    assert_eq!(heard(&first), over.load(Ordering::SeqCst));
}

/// Threads wait for one interrupt, and leave and come again; each trigger is one wait's.
#[test]
fn each_trigger_is_taken_by_one_of_several_threads_that_wait() {
    const TRIGGERS: usize = 20_000;
    let all = AtomicBool::new(false);
    let rack = Hosts::start(|link| Arc::new(link));
    let interrupt = rack.session(ALPHA).create_interrupt(Some(5), false, true).unwrap();
    let sender = answered(|| rack.session(BETA).connect_interrupt(ALPHA, 5, LIMIT)).unwrap();
    let waits = &|thread: usize| {
        let (mut taken, mut tries, mut idle) = (0, thread as u64, 0);
        // Some waits are for no time at all. A thread ends when nothing has come since the last trigger.
        while idle < 9 {
            tries += 1;
            match interrupt.wait(Some(Duration::from_millis(tries % 3 * 50))) {
                Ok(()) => (taken, idle) = (taken + 1, 0),
                Err(InterruptError::TimedOut) => idle += u64::from(all.load(Ordering::Acquire)),
                Err(error) => panic!("{error}"),
            }
        }
        taken
    };
    let taken: usize = std::thread::scope(|scope| {
        let threads = [0, 1, 2].map(|thread| scope.spawn(move || waits(thread)));
        (0..TRIGGERS).for_each(|_| sender.trigger().unwrap());
        all.store(true, Ordering::Release);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(taken, TRIGGERS);
    assert_eq!(interrupt.wait(Some(Duration::ZERO)), Err(InterruptError::TimedOut));
}

#[test]
fn a_peer_that_signals_without_pause_defeats_no_timeout() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let data = alpha.create_data_interrupt(Some(5)).unwrap();
    let area = alpha.export_area(4096).unwrap();
    // Rings without a message, as a peer that shares the line can.
    let stranger = Stranger::attach(&rack, BETA);
    let (node, kind, number, timeout_ms) = (ALPHA, InterruptKind::Data, 5, LIMIT);
    let connect = SessionRequest::ConnectInterrupt { node, kind, number, timeout_ms };
    let (_, mut handles) = stranger.ask_whole(&connect, &[]).unwrap();
    let access = Access::READ | Access::WRITE;
    let region = handles.memory(0).unwrap().map(64, access, false).unwrap();
    let event = handles.event().unwrap();
    let bell = Doorbell::new(Arc::new(region), 0, event).unwrap();
    let noise = answered(|| beta.connect_data_interrupt(ALPHA, area.key().signals, LIMIT)).unwrap();
    let ended = AtomicBool::new(false);
    let patience = SOON.unwrap();
    let begun = std::time::Instant::now();
    let loud = || !ended.load(Ordering::Relaxed) && begun.elapsed() < patience;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while loud() {
                bell.ring();
                // No signal of a sender's: too short.
                let _ = noise.send(b"noise");
            }
        });
        for timeout in [0, 20].map(Duration::from_millis) {
            let received = data.receive(&mut [0; 8], Some(timeout));
            assert_eq!(received, Err(InterruptError::TimedOut));
            assert_eq!(area.wait(Some(timeout)), Err(InterruptError::TimedOut));
        }
        ended.store(true, Ordering::Relaxed);
        assert!(begun.elapsed() < patience, "{:?}", begun.elapsed());
    });
}

#[test]
fn a_host_that_may_use_nothing_of_another_cannot_interrupt_it() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let _interrupt = alpha.create_interrupt(Some(5), false, false).unwrap();
    alpha.set_share(0..=u32::MAX, Some(BETA), SegmentAccess::None).unwrap();
    assert_eq!(refusal(answered(|| beta.connect_interrupt(ALPHA, 5, LIMIT))), Refusal::Denied);
    alpha.set_share(9..=9, Some(BETA), SegmentAccess::Read).unwrap();
    answered(|| beta.connect_interrupt(ALPHA, 5, LIMIT)).unwrap();
}
