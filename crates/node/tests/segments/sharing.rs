//! Segments between processes of several hosts: stores and loads, rights, locks, copies into an area.

use std::sync::Arc;
use std::time::Duration;

use rackbus_attach::{
    AreaKey, ConnectionChange, Copier, CopyError, LockError, Locked, Refusal, SegmentAccess,
    SegmentEvent, SegmentOptions, Signal, Withdrawal, WriteNotice,
};
use rackbus_segment::Handle;
use rackbus_segment::message::{Reply, SessionRequest};

use crate::common::segments::{ALPHA, BETA, GAMMA, Hosts};
use crate::support::{LIMIT, SOON, Stranger, answered, refusal, word};

#[test]
fn what_one_host_stores_another_loads() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 12_345)).unwrap();
    assert_eq!(refusal(answered(|| beta.connect(ALPHA, 7, LIMIT))), Refusal::NoSuchSegment);
    segment.set_available().unwrap();
    let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    assert_eq!((remote.size(), remote.writable()), (12_345, true));
    assert_eq!(segment.watch().wait(SOON), Some(SegmentEvent::Connected(BETA)));
    let (here, there) = (segment.map(0, 12_345).unwrap(), remote.map(4099, 8).unwrap());
    there.whole().write_obj(0, &42_u64).unwrap();
    assert_eq!(word(&here, 4099), 42);
    drop(remote);
    assert_eq!(segment.watch().wait(SOON), Some(SegmentEvent::Disconnected(BETA)));
    // On one host, too.
    let other = answered(|| rack.session(ALPHA).connect(ALPHA, 7, LIMIT)).unwrap();
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
    let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    let mapping = remote.map(0, 8192).unwrap();
    mapping.whole().write_obj(0, &9_u64).unwrap();
    drop(segment);
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Removed)));
    assert_eq!(word(&mapping, 0), 9);
    let next = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    next.set_available().unwrap();
    let fresh = next.map(0, 8).unwrap();
    assert_eq!(word(&fresh, 0), 0, "the former owner's data");
    fresh.whole().write_obj(0, &5_u64).unwrap();
    assert_eq!(word(&mapping, 0), 9, "the next owner's data");
    // An owner that dies leaves it, too.
    let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    let mapping = remote.map(0, 8192).unwrap();
    alpha.close();
    assert_eq!(remote.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Lost)));
    assert_eq!(word(&mapping, 0), 5);
}

#[test]
fn a_process_that_is_forced_out_sees_nothing_new_while_others_go_on() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta, gamma) = (rack.session(ALPHA), rack.session(BETA), rack.session(GAMMA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 1 << 20)).unwrap();
    segment.set_available().unwrap();
    let mine = segment.map(0, 1 << 20).unwrap();
    let (kept, lost) = (
        answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap(),
        answered(|| gamma.connect(ALPHA, 7, LIMIT)).unwrap(),
    );
    let (kept_map, lost_map) = (kept.map(0, 1 << 20).unwrap(), lost.map(0, 1 << 20).unwrap());
    mine.whole().write_obj(4096, &1_u64).unwrap();
    assert_eq!((word(&kept_map, 4096), word(&lost_map, 4096)), (1, 1));

    alpha.set_share(7..=7, Some(GAMMA), SegmentAccess::None).unwrap();
    mine.whole().write_obj(4096, &2_u64).unwrap();
    assert_eq!((word(&kept_map, 4096), word(&lost_map, 4096)), (2, 0));
    lost_map.whole().write_obj(4096, &3_u64).unwrap();
    assert_eq!((word(&mine, 4096), word(&kept_map, 4096)), (2, 2));
    assert_eq!(lost.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
    assert_eq!(refusal(answered(|| gamma.connect(ALPHA, 7, LIMIT))), Refusal::Denied);

    segment.set_unavailable(Withdrawal::Force).unwrap();
    mine.whole().write_obj(4096, &4_u64).unwrap();
    assert_eq!(word(&kept_map, 4096), 0);
    assert_eq!(kept.watch().wait(SOON), Some(SegmentEvent::Remote(ConnectionChange::Revoked)));
}

#[test]
fn a_read_only_connection_cannot_store() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    alpha.set_share(0..=u32::MAX, None, SegmentAccess::Read).unwrap();
    let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
    assert!(!remote.writable());
    segment.map(0, 8).unwrap().whole().write_obj(0, &6_u64).unwrap();
    assert_eq!(word(&remote.map(0, 8).unwrap(), 0), 6);
}

#[test]
fn disconnected_processes_lose_the_memory_that_is_taken_back() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 8192)).unwrap();
    segment.set_available().unwrap();
    let here = segment.map(0, 8192).unwrap();
    here.whole().write_obj(0, &1_u64).unwrap();
    let keeps = |take_back: &dyn Fn()| {
        let remote = answered(|| beta.connect(ALPHA, 7, LIMIT)).unwrap();
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
    keeps(&|| alpha.set_share(7..=7, Some(BETA), SegmentAccess::None).unwrap());
}

#[test]
fn a_lock_outlives_its_holder_and_a_barrier_its_party() {
    let rack = Hosts::start(|link| Arc::new(link));
    let sessions = [ALPHA, BETA, GAMMA].map(|node| rack.session(node));
    let segment = sessions[0].create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let mapping =
        |n: usize| answered(|| sessions[n].connect(ALPHA, 7, LIMIT)).unwrap().map(0, 4096).unwrap();
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
    assert_eq!(area.wait(SOON), Ok(WriteNotice { offset: 100, length: 5, tag: 7 }));
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
    assert_eq!(area.wait(SOON), Ok(WriteNotice { offset: 0, length: 3 * 4096, tag: 8 }));
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
    let remote = answered(|| rack.session(BETA).connect(ALPHA, 7, LIMIT)).unwrap();

    // It makes up every handle there could be.
    let stranger = Stranger::attach(&rack, ALPHA);
    for handle in (0..200).map(Handle) {
        let how = Withdrawal::Force;
        for request in [
            SessionRequest::Remove { segment: handle },
            SessionRequest::SetUnavailable { segment: handle, how },
            SessionRequest::Share { segment: handle },
            SessionRequest::GiveMemory { segment: handle },
            SessionRequest::Disconnect { connection: handle },
            SessionRequest::RemoveInterrupt { interrupt: handle },
            SessionRequest::Free { extent: handle },
            SessionRequest::OpenPages {
                extent: handle,
                offset: 0,
                length: 4096,
                node: GAMMA,
                write: true,
            },
            SessionRequest::ClosePages { extent: handle, offset: 0, length: 4096 },
        ] {
            let refused = Some(Reply::Refused(Refusal::Stale));
            assert_eq!(stranger.ask(&request, &[]), refused, "{request:?}");
        }
    }
    assert_eq!(alpha.segments().unwrap()[0].connections, [BETA]);
    assert!(!remote.watch().lost());
    // Nonsense ends the conversation, and only that.
    stranger.calls.send(&[0xff; 100], &[]).unwrap();
    assert_eq!(stranger.ask(&SessionRequest::ListSegments { skip: 0 }, &[]), None);
    answered(|| rack.session(BETA).connect_interrupt(ALPHA, 7, LIMIT)).unwrap().trigger().unwrap();
    interrupt.wait(SOON).unwrap();
    drop(extent);
}
