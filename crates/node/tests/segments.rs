//! Two hosts' segment services and processes' sessions with them: what is shared, with whom, and
//! what becomes of it.

mod common;

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::segments::{ALPHA, BETA, GAMMA, Hosts, name, shm};
use rackbus_attach::{
    AreaKey, BROADCAST_NODE, Change, Copier, CopyError, InterruptError, LockError, Locked, Refusal,
    SegmentEvent, SegmentKind, SegmentOptions, Share, Signal, Withdrawal, Written,
};
use rackbus_link::{Connect, Conversation, Hello, Link, LinkError, Purpose};
use rackbus_memory::doorbell::Doorbell;
use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{Access, AdaptiveSpin, Packets, Region, Stream, StreamError};
use rackbus_segment::message::{
    Ask, Event, Holder, InterruptKind, Notice, Question, Reply, Request, Target, Tell, VERSION,
    decode, encode,
};
use rackbus_segment::{Handle, SessionId};

const SOON: Option<Duration> = Some(Duration::from_secs(5));

/// A process that speaks the protocol itself.
struct Stranger {
    calls: Packets,
    events: Packets,
}

impl Stranger {
    fn attach(rack: &Hosts, node: u32) -> Stranger {
        let path = rack.folder().join(name(node)).join("segments.sock");
        let (events, theirs) = Packets::pair().unwrap();
        let stranger = Stranger { calls: Packets::connect(&path).unwrap(), events };
        let hello = Request::Hello { version: VERSION };
        let welcome = stranger.ask(&hello, &[theirs.as_fd()]);
        assert!(matches!(welcome, Some(Reply::Welcome(_))));
        stranger
    }

    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Option<Reply> {
        self.ask_whole(request, fds).map(|(reply, _)| reply)
    }

    /// With what came beside the reply.
    fn ask_whole(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Option<(Reply, Vec<OwnedFd>)> {
        self.calls.send(&encode(request), fds).ok()?;
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = self.calls.receive(&mut buffer, &mut spin, None).ok()?;
        Some((decode(&buffer[..packet.length])?, packet.fds))
    }

    fn event(&self) -> Event {
        let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
        let packet = self.events.receive(&mut buffer, &mut spin, None).unwrap();
        decode(&buffer[..packet.length]).unwrap()
    }

    fn notice(&self, notice: Notice) {
        self.events.send(&encode(&notice), &[]).unwrap();
    }

    /// Connects to a segment, as one of those who keep it.
    fn connect(&self, node: u32, id: u32) -> Handle {
        let request = Request::Connect { node, id, timeout_ms: 1000, what: Target::Segment };
        match self.ask(&request, &[]) {
            Some(Reply::Connected(connected)) => connected.connection,
            other => panic!("{other:?}"),
        }
    }
}

/// What the system says of a mapping: whether its writers wait, and of which file it is.
fn mapped(mapping: &rackbus_attach::Mapping) -> (bool, String) {
    let start = format!("{:x}-", mapping.whole().as_ptr() as usize);
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = all.lines().skip_while(|line| !line.starts_with(&start));
    let words: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
    // Not writable, or write-protected by userfaultfd.
    let frozen = !words[1].contains('w') || flags.split(' ').any(|flag| flag == "uw");
    (frozen, words[4].to_owned())
}

/// Waits until something is so that nothing tells.
fn until(what: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !what() {
        assert!(begun.elapsed() < SOON.unwrap(), "it does not come to that");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn refusal<T: std::fmt::Debug>(outcome: Result<T, rackbus_attach::AttachError>) -> Refusal {
    match outcome.unwrap_err() {
        rackbus_attach::AttachError::Refused(refusal) => refusal,
        other => panic!("{other}"),
    }
}

fn word(mapping: &rackbus_attach::Mapping, offset: usize) -> u64 {
    mapping.whole().read_obj::<u64>(offset).unwrap()
}

#[test]
fn what_one_host_stores_another_loads() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 12_345)).unwrap();
    assert_eq!(refusal(beta.connect(ALPHA, 7, 100)), Refusal::NoSuchSegment);
    segment.set_available().unwrap();
    let remote = beta.connect(ALPHA, 7, 100).unwrap();
    assert_eq!((remote.size(), remote.writable()), (12_345, true));
    assert_eq!(segment.watch().wait(SOON), Some(SegmentEvent::Connected(BETA)));
    let (here, there) = (segment.map(0, 12_345).unwrap(), remote.map(4099, 8).unwrap());
    there.whole().write_obj(0, &42_u64).unwrap();
    assert_eq!(word(&here, 4099), 42);
    drop(remote);
    assert_eq!(segment.watch().wait(SOON), Some(SegmentEvent::Disconnected(BETA)));
    // On one host, too.
    let other = rack.session(ALPHA).connect(ALPHA, 7, 100).unwrap();
    assert_eq!(word(&other.map(4099, 8).unwrap(), 0), 42);
}

#[test]
fn numbers_are_taken_once_and_free_again() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (one, two) = (rack.session(ALPHA), rack.session(ALPHA));
    let segment = one.create_segment(&SegmentOptions::shared(0xffff_ffff, 1)).unwrap();
    let again = SegmentOptions::shared(0xffff_ffff, 1);
    assert_eq!(refusal(two.create_segment(&again)), Refusal::InUse);
    let chosen = SegmentOptions { choose: true, ..SegmentOptions::shared(0, 8) };
    let (first, second) =
        (two.create_segment(&chosen).unwrap(), two.create_segment(&chosen).unwrap());
    assert_eq!((first.id(), second.id()), (1024, 1025));
    drop(segment);
    two.create_segment(&again).unwrap();
    assert_eq!(refusal(two.create_segment(&SegmentOptions::shared(1, 0))), Refusal::Size);
    let huge = SegmentOptions::shared(1, 65 << 30);
    assert!(matches!(refusal(two.create_segment(&huge)), Refusal::NoSpace { .. }));
    let sparse = two.create_segment(&SegmentOptions::shared(1, 32 << 30)).unwrap();
    let end = sparse.map((32 << 30) - 8, 8).unwrap();
    end.whole().write_obj(0, &1_u64).unwrap();
}

#[test]
fn a_removed_segment_keeps_its_last_content_for_those_who_map_it() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    segment.set_available().unwrap();
    let remote = beta.connect(ALPHA, 7, 100).unwrap();
    let mapping = remote.map(0, 8192).unwrap();
    mapping.whole().write_obj(0, &9_u64).unwrap();
    drop(segment);
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Removed)));
    assert_eq!(word(&mapping, 0), 9);
    let next = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    next.set_available().unwrap();
    let fresh = next.map(0, 8).unwrap();
    assert_eq!(word(&fresh, 0), 0, "the former owner's data");
    fresh.whole().write_obj(0, &5_u64).unwrap();
    assert_eq!(word(&mapping, 0), 9, "the next owner's data");
    // An owner that dies leaves it, too.
    let remote = beta.connect(ALPHA, 7, 100).unwrap();
    let mapping = remote.map(0, 8192).unwrap();
    alpha.close();
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Lost)));
    assert_eq!(word(&mapping, 0), 5);
}

#[test]
fn who_is_forced_out_sees_nothing_new_while_others_go_on() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 1 << 20)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 1 << 20).unwrap();
    let (kept, lost) =
        (beta.connect(ALPHA, 7, 100).unwrap(), gamma.connect(ALPHA, 7, 100).unwrap());
    let (kept_map, lost_map) = (kept.map(0, 1 << 20).unwrap(), lost.map(0, 1 << 20).unwrap());
    mine.whole().write_obj(4096, &1_u64).unwrap();
    assert_eq!((word(&kept_map, 4096), word(&lost_map, 4096)), (1, 1));

    alpha.set_share(7..=7, Some(GAMMA), Share::None).unwrap();
    mine.whole().write_obj(4096, &2_u64).unwrap();
    assert_eq!((word(&kept_map, 4096), word(&lost_map, 4096)), (2, 0));
    lost_map.whole().write_obj(4096, &3_u64).unwrap();
    assert_eq!((word(&mine, 4096), word(&kept_map, 4096)), (2, 2));
    assert_eq!(lost.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Revoked)));
    assert_eq!(refusal(gamma.connect(ALPHA, 7, 100)), Refusal::Denied);

    segment.set_unavailable(Withdrawal::Force).unwrap();
    mine.whole().write_obj(4096, &4_u64).unwrap();
    assert_eq!(word(&kept_map, 4096), 0);
    assert_eq!(kept.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Revoked)));
}

#[test]
fn whoever_may_only_load_cannot_store() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    alpha.set_share(0..=u32::MAX, None, Share::Read).unwrap();
    let remote = beta.connect(ALPHA, 7, 100).unwrap();
    assert!(!remote.writable());
    segment.map(0, 8).unwrap().whole().write_obj(0, &6_u64).unwrap();
    assert_eq!(word(&remote.map(0, 8).unwrap(), 0), 6);
}

#[test]
fn one_store_reaches_every_member_of_a_group() {
    let rack = Hosts::start(|link| Arc::new(link));
    let sessions = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 4096) };
    assert_eq!(refusal(sessions[1].connect(252, 3, 100)), Refusal::NoSuchSegment);
    // A member's memory is that of the group.
    let members = [1, 2].map(|n: usize| sessions[n].create_segment(&options).unwrap());
    let sender = sessions[0].connect(252, 3, 100).unwrap();
    sender.map(0, 8).unwrap().whole().write_obj(0, &8_u64).unwrap();
    for member in &members {
        assert_eq!(word(&member.map(0, 8).unwrap(), 0), 8);
    }
    drop(members);
    assert_eq!(sender.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Lost)));
}

#[test]
fn pages_are_open_to_one_host_until_they_are_closed() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    let extent = alpha.allocate(16 * 4096).unwrap();
    let mine = extent.mapping();
    for page in 0..16_u64 {
        mine.whole().write_obj(page as usize * 4096, &(100 + page)).unwrap();
    }
    let page = |n: u64| extent.address() + n * 4096;
    assert_eq!(refusal(beta.map_pages(page(2), 4096)), Refusal::Denied);
    extent.open(2 * 4096, 2 * 4096, BETA, true).unwrap();
    extent.open(4 * 4096, 4096, BETA, false).unwrap();

    let there = beta.map_pages(page(2), 3 * 4096).unwrap();
    let words = |mapping: &rackbus_attach::Mapping| [0, 4096, 8192].map(|at| word(mapping, at));
    assert_eq!(words(there.mapping()), [102, 103, 104]);
    assert!(!there.writable());
    let there = beta.map_pages(page(2), 2 * 4096).unwrap();
    there.mapping().whole().write_obj(4096, &7_u64).unwrap();
    assert_eq!(word(mine, 3 * 4096), 7);
    assert_eq!(refusal(gamma.map_pages(page(2), 4096)), Refusal::Denied);
    // Neither more than was opened, nor a part of it.
    assert_eq!(refusal(beta.map_pages(page(1), 2 * 4096)), Refusal::Denied);
    assert_eq!(refusal(beta.map_pages(page(2), 4096)), Refusal::Denied);

    extent.close(2 * 4096, 2 * 4096).unwrap();
    assert_eq!(there.watch().wait(SOON), Some(SegmentEvent::Remote(Change::Lost)));
    assert_eq!(word(mine, 3 * 4096), 7);
    mine.whole().write_obj(3 * 4096, &8_u64).unwrap();
    assert_eq!(word(there.mapping(), 4096), 0);
    there.mapping().whole().write_obj(4096, &9_u64).unwrap();
    assert_eq!(word(mine, 3 * 4096), 8);
    assert_eq!(refusal(beta.map_pages(page(2), 2 * 4096)), Refusal::Denied);
    // To another host now.
    extent.open(2 * 4096, 4096, GAMMA, true).unwrap();
    assert_eq!(word(gamma.map_pages(page(2), 4096).unwrap().mapping(), 0), 102);
}

#[test]
fn interrupts_count_or_meet_and_messages_keep_their_order() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let plain = alpha.create_interrupt(Some(5), false, false).unwrap();
    let counting = alpha.create_interrupt(None, false, true).unwrap();
    let again = alpha.create_interrupt(Some(5), false, false);
    assert_eq!(refusal(again), Refusal::InUse);
    for (interrupt, times) in [(&plain, 1), (&counting, 3)] {
        let sender = beta.connect_interrupt(ALPHA, interrupt.number(), 100).unwrap();
        (0..3).for_each(|_| sender.trigger().unwrap());
        for _ in 0..times {
            interrupt.wait(SOON).unwrap();
        }
        let none = interrupt.wait(Some(Duration::ZERO));
        assert_eq!(none, Err(InterruptError::TimedOut));
    }
    let data = alpha.create_data_interrupt(Some(5)).unwrap();
    let senders = [ALPHA, BETA, GAMMA]
        .map(|node| rack.session(node).connect_data_interrupt(252, 5, 100).unwrap());
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

#[test]
fn who_joins_a_shared_interrupt_hears_what_comes_from_then_on() {
    let rack = Hosts::start(|link| Arc::new(link));
    let first = rack.session(ALPHA).create_interrupt(Some(5), true, true).unwrap();
    let sender = rack.session(BETA).connect_interrupt(ALPHA, 5, 100).unwrap();
    (0..3).for_each(|_| sender.trigger().unwrap());
    let second = rack.session(ALPHA).create_interrupt(Some(5), true, true).unwrap();
    assert_eq!(second.wait(Some(Duration::ZERO)), Err(InterruptError::TimedOut));
    sender.trigger().unwrap();
    for (interrupt, times) in [(&first, 4), (&second, 1)] {
        (0..times).for_each(|_| interrupt.wait(SOON).unwrap());
        assert_eq!(interrupt.wait(Some(Duration::ZERO)), Err(InterruptError::TimedOut));
    }
}

#[test]
fn a_peer_that_signals_without_pause_defeats_no_timeout() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let data = alpha.create_data_interrupt(Some(5)).unwrap();
    let area = alpha.export_area(4096).unwrap();
    // Rings without a message, as a peer that shares the line can.
    let stranger = Stranger::attach(&rack, BETA);
    let (node, kind, number, timeout_ms) = (ALPHA, InterruptKind::Data, 5, 1_000);
    let connect = Request::ConnectInterrupt { node, kind, number, timeout_ms };
    let mut fds = stranger.ask_whole(&connect, &[]).unwrap().1.into_iter();
    let access = Access::READ | Access::WRITE;
    let region = Region::map(fds.next().unwrap().as_fd(), 0, 64, access).unwrap();
    let event = rackbus_memory::PeerEvent::new(fds.next().unwrap()).unwrap();
    let bell = Doorbell::new(Arc::new(region), 0, event).unwrap();
    let noise = beta.connect_data_interrupt(ALPHA, area.key().signals, 100).unwrap();
    let ended = AtomicBool::new(false);
    let patience = Duration::from_secs(5);
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
fn a_lock_outlives_its_holder_and_a_barrier_its_party() {
    let rack = Hosts::start(|link| Arc::new(link));
    let sessions = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let segment = sessions[0].create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mapping = |n: usize| sessions[n].connect(ALPHA, 7, 100).unwrap().map(0, 4096).unwrap();
    let maps = [0, 1, 2].map(mapping);
    let mutex = |n: usize| sessions[n].mutex(&maps[n], 64).unwrap();
    let (alpha, beta) = (mutex(0), mutex(1));
    let parties = [0, 1, 2].map(|n: usize| sessions[n].holder());
    let barrier = |n: usize| sessions[n].barrier(&maps[n], 1024, &parties).unwrap();
    assert!(sessions[0].mutex(&maps[0], 1).is_err());

    {
        let held = alpha.lock(SOON).unwrap();
        assert!(matches!(beta.lock(Some(Duration::from_millis(50))), Err(LockError::TimedOut)));
        drop(held);
    }
    let [mut first, mut second, mut third] = [0, 1, 2].map(barrier);
    std::thread::scope(|scope| {
        for barrier in [&mut first, &mut second, &mut third] {
            scope.spawn(move || assert_eq!(barrier.wait(SOON), Ok(3)));
        }
    });
    // Beta dies with the lock, and never arrives again.
    std::mem::forget(beta.lock(SOON).unwrap());
    sessions[1].close();
    assert!(matches!(alpha.lock(SOON), Ok(Locked::OwnerDied(_))));
    assert!(matches!(alpha.lock(SOON), Ok(Locked::Clean(_))));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(first.wait(SOON), Ok(2)));
        scope.spawn(|| assert_eq!(third.wait(SOON), Ok(2)));
    });
}

#[test]
fn an_area_is_written_to_by_those_who_know_its_key() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let area = alpha.export_area(1 << 20).unwrap();
    let handle = beta.register_area(area.key()).unwrap();
    handle.write(100, b"hello", Signal::Tagged(7)).unwrap();
    assert_eq!(area.wait(SOON), Ok(Written { offset: 100, length: 5, tag: 7 }));
    let mut text = [0; 5];
    area.mapping().whole().part(100, 5).unwrap().copy_to(&mut text);
    assert_eq!(&text, b"hello");
    assert!(matches!(
        handle.write((1 << 20) - 4, b"hello", Signal::None),
        Err(CopyError::Piece(_))
    ));

    let source = beta.create_segment(&SegmentOptions::shared(1, 1 << 20)).unwrap();
    let source = source.map(0, 1 << 20).unwrap();
    source.whole().fill(9);
    let copier = Copier::start(&Default::default()).unwrap();
    let pieces = [(0, 0, 4096), (4096, 4096, 4096), (65_536, 8192, 4096)];
    copier.gather(&handle, &pieces, &source, Signal::Tagged(8)).unwrap().finish().unwrap();
    assert_eq!(area.wait(SOON), Ok(Written { offset: 0, length: 3 * 4096, tag: 8 }));
    for (at, byte) in [(0, 9), (8191, 9), (8192, 0), (65_536, 9), (65_536 + 4095, 9)] {
        assert_eq!(area.mapping().whole().read_obj::<u8>(at), Some(byte), "at {at}");
    }
    let statistics = copier.statistics()[0];
    assert_eq!((statistics.pieces, statistics.merged, statistics.bytes), (3, 1, 3 * 4096));

    // Neither another key, nor one of an area that is gone.
    let other = AreaKey { segment: area.key().segment + 1, ..area.key() };
    assert_eq!(refusal(beta.register_area(other)), Refusal::NoSuchSegment);
    let key = area.key();
    drop(area);
    while !handle.is_gone() {
        std::thread::yield_now();
    }
    assert!(matches!(handle.write(0, b"late", Signal::None), Err(CopyError::Gone)));
    assert_eq!(refusal(beta.register_area(key)), Refusal::NoSuchSegment);
}

#[test]
fn handles_of_others_are_refused_whatever_is_guessed() {
    let rack = Hosts::start(|link| Arc::new(link));
    let alpha = rack.session(ALPHA);
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let interrupt = alpha.create_interrupt(Some(7), false, false).unwrap();
    let extent = alpha.allocate(4096).unwrap();
    let remote = rack.session(BETA).connect(ALPHA, 7, 100).unwrap();

    // It makes up every handle there could be.
    let stranger = Stranger::attach(&rack, ALPHA);
    for handle in (0..200).map(Handle) {
        let how = Withdrawal::Force;
        for request in [
            Request::Remove { segment: handle },
            Request::SetUnavailable { segment: handle, how },
            Request::Share { segment: handle },
            Request::GiveMemory { segment: handle },
            Request::Disconnect { connection: handle },
            Request::RemoveInterrupt { interrupt: handle },
            Request::Free { extent: handle },
            Request::OpenPages {
                extent: handle,
                offset: 0,
                length: 4096,
                node: GAMMA,
                write: true,
            },
            Request::ClosePages { extent: handle, offset: 0, length: 4096 },
        ] {
            let refused = Some(Reply::Refused(Refusal::Stale));
            assert_eq!(stranger.ask(&request, &[]), refused, "{request:?}");
        }
    }
    assert_eq!(alpha.segments().unwrap()[0].connections, [BETA]);
    assert!(!remote.watch().lost());
    // Nonsense ends the conversation, and only that.
    stranger.calls.send(&[0xff; 100], &[]).unwrap();
    assert_eq!(stranger.ask(&Request::ListSegments { skip: 0 }, &[]), None);
    rack.session(BETA).connect_interrupt(ALPHA, 7, 100).unwrap().trigger().unwrap();
    interrupt.wait(SOON).unwrap();
    drop(extent);
}

#[test]
fn who_has_disconnected_loses_the_memory_that_is_taken_back() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    segment.set_available().unwrap();
    let here = segment.map(0, 8192).unwrap();
    here.whole().write_obj(0, &1_u64).unwrap();
    let keeps = |take_back: &dyn Fn()| {
        let remote = beta.connect(ALPHA, 7, 100).unwrap();
        let kept = remote.map(0, 8192).unwrap();
        drop(remote);
        assert_eq!(word(&kept, 0), 1);
        take_back();
        here.whole().write_obj(4096, &2_u64).unwrap();
        assert_eq!((word(&kept, 0), word(&kept, 4096)), (0, 0));
        kept.whole().write_obj(0, &3_u64).unwrap();
        assert_eq!(word(&here, 0), 1);
        here.whole().write_obj(4096, &0_u64).unwrap();
    };
    keeps(&|| segment.set_unavailable(Withdrawal::Force).unwrap());
    segment.set_available().unwrap();
    keeps(&|| alpha.set_share(7..=7, Some(BETA), Share::None).unwrap());
}

#[test]
fn a_group_is_for_those_whom_its_home_allows() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    alpha.set_share(3..=3, Some(GAMMA), Share::None).unwrap();
    alpha.set_share(3..=3, Some(BETA), Share::Read).unwrap();
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 4096) };
    let member = alpha.create_segment(&options).unwrap();
    assert_eq!(refusal(gamma.create_segment(&options)), Refusal::Denied);
    assert_eq!(refusal(gamma.connect(BROADCAST_NODE, 3, 100)), Refusal::Denied);
    assert_eq!(refusal(beta.create_segment(&options)), Refusal::Denied);
    let reader = beta.connect(BROADCAST_NODE, 3, 100).unwrap();
    assert!(!reader.writable());
    member.map(0, 8).unwrap().whole().write_obj(0, &5_u64).unwrap();
    assert_eq!(word(&reader.map(0, 8).unwrap(), 0), 5);
}

#[test]
fn a_rule_that_changes_reaches_the_members_and_senders_of_a_group() {
    let rack = Hosts::start(|link| Arc::new(link));
    let [alpha, beta, gamma] = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let options = SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, 8192) };
    let members = [&alpha, &beta, &gamma].map(|session| session.create_segment(&options).unwrap());
    let sender = rack.session(GAMMA).connect(252, 3, 100).unwrap();
    let maps = members.each_ref().map(|member| member.map(0, 8192).unwrap());
    let sends = sender.map(0, 8192).unwrap();
    sends.whole().write_obj(4096, &1_u64).unwrap();
    assert_eq!(maps.each_ref().map(|map| word(map, 4096)), [1; 3]);

    let listed = alpha.segments().unwrap();
    assert_eq!((listed[0].id, listed[0].size, listed[0].group), (3, 8192, true));
    assert_eq!(listed[0].connections, [ALPHA, BETA, GAMMA, GAMMA]);
    // Whoever may only load is as much too many for a member as who may do nothing.
    alpha.set_share(3..=3, Some(GAMMA), Share::Read).unwrap();
    maps[0].whole().write_obj(4096, &2_u64).unwrap();
    assert_eq!(maps.each_ref().map(|map| word(map, 4096)), [2, 2, 0]);
    assert_eq!(word(&sends, 4096), 0);
    sends.whole().write_obj(0, &9_u64).unwrap();
    maps[2].whole().write_obj(0, &9_u64).unwrap();
    assert_eq!([&maps[0], &maps[1]].map(|map| word(map, 0)), [0, 0]);
    for watch in [members[2].watch(), sender.watch()] {
        assert_eq!(watch.wait(SOON), Some(SegmentEvent::Remote(Change::Revoked)));
    }
    assert_eq!(refusal(gamma.create_segment(&options)), Refusal::Denied);
    // The others' mappings that are made later are of the same memory, and they have a group still.
    maps[1].whole().write_obj(8, &3_u64).unwrap();
    assert_eq!(word(&members[0].map(0, 16).unwrap(), 8), 3);
    let reader = rack.session(GAMMA).connect(252, 3, 100).unwrap();
    assert!(!reader.writable());
    let reads = reader.map(0, 16).unwrap();
    assert_eq!(word(&reads, 8), 3);

    // Who let go of it before the rule was changed keeps nothing of it either.
    drop(reader);
    alpha.set_share(3..=3, None, Share::None).unwrap();
    assert_eq!(word(&reads, 8), 0);
    assert_eq!(word(&maps[1], 8), 0);
    assert_eq!(word(&maps[0], 8), 3, "the home's own process may always");
}

#[test]
fn a_member_of_another_size_is_told_which_one_the_group_has() {
    let rack = Hosts::start(|link| Arc::new(link));
    let of = |size| SegmentOptions { kind: SegmentKind::Group, ..SegmentOptions::shared(3, size) };
    let _first = rack.session(BETA).create_segment(&of(8192)).unwrap();
    let second = refusal(rack.session(GAMMA).create_segment(&of(4096)));
    assert_eq!(second, Refusal::OtherSize { size: 8192 });
    assert!(second.to_string().contains("8192"));
}

#[test]
fn who_may_use_nothing_of_a_host_cannot_interrupt_it() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let _interrupt = alpha.create_interrupt(Some(5), false, false).unwrap();
    alpha.set_share(0..=u32::MAX, Some(BETA), Share::None).unwrap();
    assert_eq!(refusal(beta.connect_interrupt(ALPHA, 5, 100)), Refusal::Denied);
    alpha.set_share(9..=9, Some(BETA), Share::Read).unwrap();
    beta.connect_interrupt(ALPHA, 5, 100).unwrap();
}

#[test]
fn after_a_move_nobody_writes_before_all_have_the_new_memory() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, gamma) = (rack.session(ALPHA), rack.session(GAMMA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 4096).unwrap();
    let _lost = gamma.connect(ALPHA, 7, 100).unwrap();
    let slow = Stranger::attach(&rack, BETA);
    let keeper = slow.connect(ALPHA, 7);
    let (_, before) = mapped(&mine);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| alpha.set_share(7..=7, Some(GAMMA), Share::None));
        let Event::Freeze { ticket, .. } = slow.event() else { panic!("not a freeze") };
        slow.notice(Notice::Frozen { ticket, keeper });
        assert!(matches!(slow.event(), Event::Adopt { .. }));
        // The owner has the new memory, and the other reader still the old.
        until(|| mapped(&mine).1 != before);
        assert!(mapped(&mine).0);
        slow.notice(Notice::Adopted { ticket, keeper });
        assert!(matches!(slow.event(), Event::Unfreeze { .. }));
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
    let kept = gamma.connect(ALPHA, 7, 100).unwrap();
    let theirs = kept.map(0, 4096).unwrap();
    let beta = rack.session(BETA);
    let _lost = beta.connect(ALPHA, 7, 100).unwrap();
    let silent = Stranger::attach(&rack, ALPHA);
    silent.connect(ALPHA, 7);
    let (done, written) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| alpha.set_share(7..=7, Some(BETA), Share::None));
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

/// A way to nodes that are too slow.
struct Slow;

impl Connect for Slow {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, _: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        Err(LinkError::Broken { peer: hello.to.clone(), cause: StreamError::TimedOut })
    }
}

#[test]
fn only_a_dead_node_makes_the_holders_of_locks_dead() {
    let holder = Holder { node: BETA, session: SessionId(1) };
    let slow = Hosts::alone(ALPHA, |_| Arc::new(Slow));
    assert!(slow.session(ALPHA).alive(holder).unwrap());
    let rack = Hosts::alone(ALPHA, |run_dir| Arc::new(shm(run_dir)));
    let session = rack.session(ALPHA);
    assert!(!session.alive(holder).unwrap(), "there has never been such a node");
    // It has no room for the conversation that it is passed.
    let folder = rack.folder().join("beta");
    std::fs::create_dir_all(&folder).unwrap();
    let listener = shm(rack.folder()).listen("beta").unwrap();
    let caller = std::sync::Mutex::new(listener);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let incoming = caller.lock().unwrap().accept().unwrap().hear().unwrap();
            let stream = incoming.accept().unwrap();
            let mut fds = Vec::new();
            stream.receive(&mut [0], &mut fds).unwrap();
        });
        assert!(session.alive(holder).unwrap());
    });
    // Left by a node that was killed: nobody listens there.
    std::fs::rename(folder.join("link.sock"), folder.join("kept")).unwrap();
    drop(caller);
    std::fs::rename(folder.join("kept"), folder.join("link.sock")).unwrap();
    assert!(!session.alive(holder).unwrap());
}

/// Beta's node, a connector's, at the door of alpha's.
fn at_the_door(rack: &Hosts) -> Arc<dyn Conversation> {
    let hello = Hello {
        versions: rackbus_link::VERSIONS,
        rack: "test".into(),
        from: "beta".into(),
        to: "alpha".into(),
        service: Purpose::Segments,
    };
    let link = shm(rack.folder());
    link.connect(&link.address("alpha"), &hello).unwrap()
}

/// The former conversation ends before, while and after the next one begins.
#[test]
fn a_node_that_is_back_at_once_keeps_what_it_connects_to() {
    let rack = Hosts::alone(ALPHA, |run_dir| Arc::new(shm(run_dir)));
    let alpha = rack.session(ALPHA);
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let is_connected = || alpha.segments().unwrap()[0].connections == [BETA];
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
    let mut before: Option<Packets> = None;
    for request in 1..1000 {
        let connection = Handle(request);
        let stream = at_the_door(&rack);
        let (next, theirs) = Packets::pair().unwrap();
        assert!(before.is_none() || is_connected(), "its connection was lost: {request}");
        std::thread::scope(|scope| {
            let before = before.take();
            scope.spawn(move || {
                (0..request % 8 * 200).for_each(|_| std::hint::spin_loop());
                drop(before);
            });
            (0..request / 8 % 8 * 200).for_each(|_| std::hint::spin_loop());
            stream.send(&[&[0]], &[theirs.as_fd()]).unwrap();
            drop(theirs);
            let what = Question::Segment { id: 7, what: Target::Segment };
            next.send(&encode(&Ask::Question { request, connection, what }), &[]).unwrap();
            let packet = next.receive(&mut buffer, &mut spin, None).unwrap();
            let answer = decode(&buffer[..packet.length]);
            assert!(matches!(answer, Some(Tell::Answer { answer: Ok(_), .. })), "{answer:?}");
        });
        until(is_connected);
        before = Some(next);
    }
}

/// Beta's node, an owner's, that ends each conversation soon and takes the next one at once. It
/// keeps the numbers of the segments that it has answered for.
#[derive(Default)]
struct Restless(Arc<Mutex<BTreeSet<u32>>>);

impl Connect for Restless {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, _: &str, _: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answered = self.0.clone();
        std::thread::spawn(move || {
            let mut fds = Vec::new();
            theirs.receive(&mut [0], &mut fds).unwrap();
            let packets = Packets::from_peer(fds.pop().unwrap()).unwrap();
            let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
            for _ in 0..3 {
                let Ok(packet) = packets.receive(&mut buffer, &mut spin, None) else { return };
                let asked = decode(&buffer[..packet.length]);
                let Some(Ask::Question { request, what: Question::Segment { id, .. }, .. }) = asked
                else {
                    continue;
                };
                let answer = Tell::Answer { request, answer: Err(Refusal::NoSuchSegment) };
                answered.lock().unwrap().insert(id);
                packets.send(&encode(&answer), &[]).unwrap();
            }
            // What was answered arrives: a socket with unread messages would take it away again.
            packets.shut_down();
            while packets.receive(&mut buffer, &mut spin, None).is_ok() {}
        });
        Ok(Arc::new(ours))
    }
}

#[test]
fn who_asks_a_node_that_is_back_at_once_gets_its_answer() {
    const ASKERS: u32 = 4;
    let link = Arc::new(Restless::default());
    let rack = Hosts::alone(ALPHA, |_| link.clone());
    let unanswered = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for asker in 0..ASKERS {
            let (session, unanswered) = (rack.session(ALPHA), &unanswered);
            scope.spawn(move || {
                for nth in 0..1000 {
                    let id = nth * ASKERS + asker + 1;
                    match refusal(session.connect(BETA, id, 5000)) {
                        Refusal::NoSuchSegment => {}
                        // It was lost with its conversation.
                        Refusal::NotResponding => drop(unanswered.lock().unwrap().insert(id)),
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    let (answered, unanswered) = (link.0.lock().unwrap(), unanswered.into_inner().unwrap());
    let both = answered.intersection(&unanswered).count();
    assert_eq!(both, 0, "beta answered {}, and was said not to respond", answered.len());
    assert!(answered.len() > 100, "{} of {ASKERS}000 were answered", answered.len());
}
