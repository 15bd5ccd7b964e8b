use std::sync::Arc;

use rackbus_memory::{AsHandle, Packets, SharedMemory};

use super::*;

/// Far above what anything here takes.
const MOVED: Duration = Duration::from_secs(120);

const NOW: Option<Duration> = Some(Duration::ZERO);

/// More answers than the system keeps for a node that is busy.
#[test]
fn no_answer_is_lost_while_the_node_reads_nothing() {
    const ASKED: u64 = 2000;
    let (events, node) = Packets::pair().unwrap();
    let registry = Registry::new(Calls::start().unwrap());
    let asked = std::thread::spawn(move || {
        for turn in 0..ASKED {
            let hide = SessionEvent::Hide { turn, keeper: Handle(1), offset: 0, length: 1 };
            registry.came(hide, Handles::new(), &events);
        }
    });
    // Until it cannot go on without being read.
    let begun = std::time::Instant::now();
    while !asked.is_finished() && begun.elapsed() < Duration::from_millis(300) {
        std::thread::yield_now();
    }
    let mut buffer = vec![0; rackbus_memory::packets::MAX_PACKET];
    for turn in 0..ASKED {
        let deadline = Some(std::time::Instant::now() + MOVED);
        let packet = node.receive(&mut buffer, &mut AdaptiveSpin::default(), deadline).unwrap();
        assert_eq!(decode(&buffer[..packet.length]), Some(Notice::Hidden { turn }));
    }
    asked.join().unwrap();
}

#[test]
fn what_came_early_stays_before_what_comes_next() {
    let (events, _node) = Packets::pair().unwrap();
    let registry = Registry::new(Calls::start().unwrap());
    for number in 0..50 {
        let segment = Handle(number);
        let event = |node| match node {
            0 => SessionEvent::Connected { segment, node: 4 },
            _ => SessionEvent::Disconnected { segment, node: 4 },
        };
        let watch = Watch::new(None);
        let watched = Watched { watch: Arc::downgrade(&watch), ..Watched::default() };
        registry.came(event(0), Handles::new(), &events);
        // Many that came early take long enough for the next one to come meanwhile.
        (0..64).for_each(|_| registry.came(event(0), Handles::new(), &events));
        std::thread::scope(|scope| {
            scope.spawn(|| registry.watch_from(segment, watched, &events));
            while lock(&registry.unwatched).early.iter().any(|(about, ..)| *about == segment) {
                std::hint::spin_loop();
            }
            registry.came(event(1), Handles::new(), &events);
        });
        (0..64).for_each(|_| assert_eq!(watch.wait(NOW), Some(SegmentEvent::Connected(4))));
        let heard = [watch.wait(NOW), watch.wait(NOW)].map(Option::unwrap);
        assert_eq!(heard, [SegmentEvent::Connected(4), SegmentEvent::Disconnected(4)]);
    }
}

/// Whether the other end of a socket is closed.
fn is_closed(mut other: &std::os::unix::net::UnixStream) -> bool {
    other.set_nonblocking(true).unwrap();
    matches!(std::io::Read::read(&mut other, &mut [0]), Ok(0))
}

#[test]
fn handles_for_what_was_given_back_are_closed() {
    let (events, _node) = Packets::pair().unwrap();
    let registry = Registry::new(Calls::start().unwrap());
    let moved = |keeper| {
        let (file, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (ticket, offset, length, from) = (Handle(1), 0, 4096, 0);
        let adopt = SessionEvent::Adopt { ticket, keeper, offset, length, from };
        registry.came(adopt, Handles::of_descriptors(vec![file.into()]), &events);
        other
    };
    registry.watch_from(Handle(4), Watched::default(), &events);
    registry.forget(Handle(4));
    assert!(is_closed(&moved(Handle(4))), "it came late");
    let early = moved(Handle(5));
    assert!(!is_closed(&early), "it may be known in a moment");
    registry.forget(Handle(5));
    assert!(is_closed(&early), "it came early");
    (0..2 * MOST_FORGOTTEN as u64).for_each(|number| registry.forget(Handle(100 + number)));
    assert_eq!(lock(&registry.unwatched).forgotten.len(), MOST_FORGOTTEN);
}

/// Brings `first` before `watched` is known, and `second` while what came early is dealt with.
fn one_early_one_late(
    watched: Watched,
    first: (SessionEvent, Option<ResourceHandle>),
    second: SessionEvent,
) {
    let (events, _node) = Packets::pair().unwrap();
    let registry = Registry::new(Calls::start().unwrap());
    let (early, memory) = first;
    let mut handles = Handles::new();
    memory.iter().for_each(|memory| handles.push(memory.as_handle()).unwrap());
    let handle = about(&early).unwrap();
    // Many that came early take long enough for the next one to come meanwhile.
    let other = SessionEvent::Connected { segment: handle, node: 4 };
    (0..64).for_each(|_| registry.came(other.clone(), Handles::new(), &events));
    registry.came(early, handles, &events);
    std::thread::scope(|scope| {
        scope.spawn(|| registry.watch_from(handle, watched, &events));
        while lock(&registry.unwatched).early.iter().any(|(about, ..)| *about == handle) {
            std::hint::spin_loop();
        }
        registry.came(second, Handles::new(), &events);
    });
}

#[test]
fn a_freeze_that_came_early_ends_with_the_loss_that_followed_it() {
    for number in 0..50 {
        let file = ResourceHandle::of_descriptor(SharedMemory::reserve("test", 4096).unwrap());
        let (memory, keeper) = (MappedMemory::new(Some(file), true, 4096), Handle(number));
        let watch = Watch::new(None);
        let watched = Watched {
            watch: Arc::downgrade(&watch),
            memory: Arc::downgrade(&memory),
            size: 4096,
            ..Watched::default()
        };
        let freeze = SessionEvent::Freeze { ticket: Handle(1), keeper, offset: 0, length: 4096 };
        let lost = SessionEvent::Remote { connection: keeper, change: ConnectionChange::Lost };
        one_early_one_late(watched, (freeze, None), lost);
        assert!(!memory.is_frozen(), "its writers wait for ever");
    }
}

#[test]
fn what_is_hidden_before_it_is_known_is_until_it_is_shown() {
    let (events, node) = Packets::pair().unwrap();
    let registry = Registry::new(Calls::start().unwrap());
    for (number, shown_before) in [(1, false), (2, true)] {
        let keeper = Handle(number);
        let file = ResourceHandle::of_descriptor(SharedMemory::reserve("test", 4096).unwrap());
        let memory = MappedMemory::new(Some(file), true, 4096);
        let watched = Watched { memory: Arc::downgrade(&memory), ..Watched::default() };
        let hide = SessionEvent::Hide { turn: number, keeper, offset: 0, length: 16 };
        registry.came(hide, Handles::new(), &events);
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let answer = node.receive(&mut buffer, &mut spin, None).unwrap();
        assert_eq!(decode(&buffer[..answer.length]), Some(Notice::Hidden { turn: number }));
        if shown_before {
            registry.came(SessionEvent::Show { keeper }, Handles::new(), &events);
        }
        registry.watch_from(keeper, watched, &events);
        assert_eq!(memory.is_hidden(), !shown_before);
        registry.came(SessionEvent::Show { keeper }, Handles::new(), &events);
        assert!(!memory.is_hidden());
    }
}

#[test]
fn a_sender_that_came_early_goes_when_it_is_gone() {
    for number in 0..50 {
        let (rings, interrupt) = (Rings::silent(), Handle(number));
        let watched = Watched { rings: Arc::downgrade(&rings), ..Watched::default() };
        let ring = Handle(7);
        let file = ResourceHandle::of_descriptor(SharedMemory::reserve("ring", 1 << 20).unwrap());
        let sender = (SessionEvent::Sender { interrupt, ring }, Some(file));
        one_early_one_late(watched, sender, SessionEvent::SenderGone { interrupt, ring });
        assert_eq!(rings.count(), 0, "its ring stays for ever");
    }
}

#[test]
fn waiting_for_the_end_of_a_move_fails_when_the_node_is_gone() {
    for number in 0..2_000 {
        let finished = FinishedCall::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| finished.wait(Handle(number), MOVED));
            finished.end();
            let gone = waiting.join().unwrap();
            assert!(matches!(gone, Err(AttachError::Gone(StreamError::Closed))));
        });
    }
    let finished = FinishedCall::default();
    finished.tell(Handle(1), Ok(()));
    finished.end();
    finished.wait(Handle(1), MOVED).unwrap();
}

#[test]
fn a_move_that_takes_too_long_is_no_lost_node_and_its_end_is_not_kept() {
    let finished = FinishedCall::default();
    let late = finished.wait(Handle(1), Duration::ZERO);
    assert!(matches!(late, Err(AttachError::Busy)), "{late:?}");
    finished.tell(Handle(1), Ok(()));
    let state = lock(&finished.state);
    assert!(state.by_ticket.is_empty() && state.given_up.is_empty(), "{state:?}");
}

/// Whoever has looked and does not sleep yet would miss it, and sleep for as long as moves may
/// take.
#[test]
fn that_the_node_is_gone_is_not_told_between_a_look_and_the_sleep_that_follows() {
    let finished = FinishedCall::default();
    std::thread::scope(|scope| {
        let looking = lock(&finished.state);
        let (told, telling) = std::sync::mpsc::channel();
        let finished = &finished;
        scope.spawn(move || {
            finished.end();
            told.send(()).unwrap();
        });
        assert!(telling.recv_timeout(Duration::from_millis(20)).is_err(), "nobody is woken");
        drop(looking);
        telling.recv().unwrap();
    });
}
