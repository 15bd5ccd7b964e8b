//! What a session, an owner or another host may have too much of, and who is to notice nothing of that.

use std::time::{Duration, Instant};

use rackbus_segment::message::{
    ConnectorMessage, InterruptKind, LockHolder, LockOperation, LockRequest, MOST_FAR_PARTIES,
    OwnerMessage, PeerReply, Question, Refusal, Reply, SegmentAccess, SegmentKind, SessionRequest,
    TargetKind, encode,
};
use rackbus_segment::{Directory, DirectoryAction, Handle, NodeId, Objects, Recipient, SessionId};

use super::{
    DATA, Lines, Memories, Nothing, Receiving, SESSION, directory, directory_of_hosts,
    directory_with, replies,
};

/// What is asked of a node by that.
fn asks(outputs: &[DirectoryAction], of: NodeId) -> Vec<ConnectorMessage> {
    let ask = |output: &DirectoryAction| match output {
        DirectoryAction::Send(Recipient::Ask(node, ask), _) if *node == of => Some(ask.clone()),
        _ => None,
    };
    outputs.iter().filter_map(ask).collect()
}

/// The one reply to a request.
fn reply(directory: &mut Directory, objects: &mut dyn Objects, request: SessionRequest) -> Reply {
    let told = replies(directory.request(0, SESSION, request, objects));
    told.into_iter().next().expect("it is answered at once")
}

#[test]
fn a_host_that_stands_still_keeps_nobody_from_asking_another() {
    let mut directory = directory_of_hosts(&[4, 8, 12]);
    let mut now = 0;
    let probe = |directory: &mut Directory, now, node| {
        directory.request(now, SESSION, SessionRequest::Probe { node }, &mut Nothing)
    };
    for round in 0..16 {
        for _ in 0..1024 {
            let asked = probe(&mut directory, now, 8);
            assert_eq!(asks(&asked, 8).len(), 1, "round {round}: {asked:?}");
        }
        let full = replies(probe(&mut directory, now, 12));
        assert_eq!(full, [Reply::Refused(Refusal::TooMany(1024))], "it waits for as many");
        now = directory.next_tick().expect("somebody waits");
        assert_eq!(replies(directory.tick(now, &mut Nothing)).len(), 1024);
        assert_eq!(directory.next_tick(), None, "nobody waits any more");
        let asked = probe(&mut directory, now, 12);
        let other = asks(&asked, 12);
        let [ConnectorMessage::Question { request, .. }] = other[..] else { panic!("{asked:?}") };
        let answer = OwnerMessage::Answer { request, answer: Ok(PeerReply::Here) };
        let told = replies(directory.told(now, 12, answer, Vec::new(), &mut Nothing));
        assert_eq!(told, [Reply::Done]);
    }
    // It is known to answer nobody.
    let told = replies(probe(&mut directory, now, 8));
    assert_eq!(told, [Reply::Refused(Refusal::NotResponding)]);
    directory.owner_gone(now, 8, rackbus_segment::directory::Loss::Dead, &mut Nothing);
    assert_eq!(asks(&probe(&mut directory, now, 8), 8).len(), 1);
}

/// The question of a machine's process would be longer than a packet, and end the conversation of two nodes.
#[test]
fn a_barrier_of_too_many_parties_is_not_asked_about() {
    let mut directory = directory();
    let what = TargetKind::Segment;
    let connect = SessionRequest::Connect { node: 8, id: 7, timeout_ms: 1000, what };
    let asked = asks(&directory.request(0, SESSION, connect, &mut Nothing), 8);
    let [ConnectorMessage::Question { request, connection, .. }] = asked[..] else { panic!() };
    let answer = Ok(PeerReply::Memory { size: 4096, write: true, address: None });
    let answer = OwnerMessage::Answer { request, answer };
    directory.told(0, 8, answer, Vec::new(), &mut Nothing);
    let parties = |count| {
        let party = LockHolder { node: u32::MAX, session: SessionId(u64::MAX) };
        vec![party; count]
    };
    let dead = parties(1)[0];
    for (count, most) in [(MOST_FAR_PARTIES, true), (MOST_FAR_PARTIES + 1, false)] {
        for operation in [
            LockOperation::Arrive { parties: parties(count), passed: None },
            LockOperation::Exclude { parties: parties(count), dead },
        ] {
            let request = LockRequest { offset: 0, operation };
            let lock = SessionRequest::Lock { keeper: connection, request };
            let outputs = directory.request(0, SESSION, lock, &mut Nothing);
            let asked = asks(&outputs, 8);
            if most {
                assert!(matches!(&asked[..], [ask] if encode(ask).len() < 30_000));
            } else {
                assert_eq!(asked, []);
                let refused = Refusal::TooMany(MOST_FAR_PARTIES as u32);
                assert_eq!(replies(outputs), [Reply::Refused(refused)]);
            }
        }
    }
}

/// The bytes of a small group would be counted, and those of a large segment given.
#[test]
fn a_segment_is_not_given_to_who_asks_for_a_group() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let (kind, size) = (SegmentKind::Shared, 1 << 19);
    let create = SessionRequest::CreateSegment { id: 7, choose: false, size, kind };
    let made = reply(&mut directory, &mut memories, create);
    let Reply::Created { segment, .. } = made else { panic!("{made:?}") };
    reply(&mut directory, &mut memories, SessionRequest::SetAvailable { segment });
    let mut ask = |connection, what| {
        let ask = ConnectorMessage::Question { request: 1, connection, what };
        let outputs = directory.asked(0, 8, ask, &mut memories);
        outputs.into_iter().find_map(|output| match output {
            DirectoryAction::Send(Recipient::Tell(8, OwnerMessage::Answer { answer, .. }), _) => {
                Some(answer.map(drop))
            }
            _ => None,
        })
    };
    assert_eq!(ask(Handle(1), Question::Group { id: 7, size: Some(4096) }), Some(Ok(())));
    let crossed = Question::Segment { id: 7, what: TargetKind::Group };
    assert_eq!(ask(Handle(2), crossed), Some(Err(Refusal::NoSuchSegment)));
    let segment = Question::Segment { id: 7, what: TargetKind::Segment };
    assert_eq!(ask(Handle(3), segment), Some(Ok(())));
}

/// A member counts twice, also where there is room for one thing more.
#[test]
fn joining_and_leaving_groups_gives_no_more_than_others_have() {
    let (mut directory, mut memories) = (directory_with(false, 1 << 30), Memories::default());
    let create = |id, kind| SessionRequest::CreateSegment { id, choose: false, size: 64, kind };
    for id in 0..65_535 {
        let made = reply(&mut directory, &mut memories, create(id, SegmentKind::Shared));
        assert!(matches!(made, Reply::Created { .. }), "{id}: {made:?}");
    }
    for _ in 0..10 {
        let joined = reply(&mut directory, &mut memories, create(1, SegmentKind::Group));
        if let Reply::Created { segment, .. } = joined {
            reply(&mut directory, &mut memories, SessionRequest::Remove { segment });
        }
    }
    let made = (0..10)
        .map(|id| reply(&mut directory, &mut memories, create(100_000 + id, SegmentKind::Shared)));
    let made = made.filter(|made| matches!(made, Reply::Created { .. })).count();
    assert_eq!(made, 1);
}

#[test]
fn the_rules_for_a_host_are_changed_in_so_many_ranges_and_no_more() {
    let mut directory = directory();
    let share = SegmentAccess::None;
    let set = |first, last| SessionRequest::SetShare { first, last, node: Some(8), share };
    for nth in 0..4096 {
        let done = reply(&mut directory, &mut Nothing, set(2 * nth, 2 * nth));
        assert_eq!(done, Reply::Done);
    }
    let refused = reply(&mut directory, &mut Nothing, set(10_000, 10_000));
    assert_eq!(refused, Reply::Refused(Refusal::TooMany(4096)));
    assert_eq!(reply(&mut directory, &mut Nothing, set(0, u32::MAX)), Reply::Done);
}

/// How long a thousand of these take.
fn thousand(
    directory: &mut Directory,
    objects: &mut dyn Objects,
    request: &SessionRequest,
) -> Duration {
    let begun = Instant::now();
    for _ in 0..1000 {
        let made = reply(directory, objects, request.clone());
        assert!(!matches!(made, Reply::Refused(_)), "{made:?}");
    }
    begun.elapsed()
}

/// All other sessions wait while a number is looked for.
#[test]
fn a_free_number_is_chosen_as_soon_among_many() {
    let (size, kind) = (64, SegmentKind::Shared);
    let segment = SessionRequest::CreateSegment { id: 0, choose: true, size, kind };
    let interrupt =
        SessionRequest::CreateInterrupt { kind: InterruptKind::Plain, number: None, shared: false };
    let mut lines = Lines(0);
    for (request, objects) in
        [(segment, &mut Memories::default() as &mut dyn Objects), (interrupt, &mut lines)]
    {
        let mut directory = directory_with(false, 1 << 30);
        let took: Vec<Duration> =
            (0..30).map(|_| thousand(&mut directory, objects, &request)).collect();
        // Of several, as others use the processor as well.
        let least = |some: &[Duration]| some.iter().min().copied().unwrap_or_default();
        let (first, last) = (least(&took[..5]), least(&took[25..]));
        assert!(
            last < 8 * first,
            "{first:?} for a thousand at first, {last:?} at last: {request:?}"
        );
    }
}

/// Each has a ring that this host's node and the interrupt's owner map.
#[test]
fn a_host_has_so_many_senders_of_data_interrupts_and_no_more() {
    const MOST: u64 = 4096;
    let mut receiving = Receiving::new();
    for nth in 1..=MOST {
        assert_eq!(receiving.connect(8, nth), Ok(()), "{nth}");
    }
    assert_eq!(receiving.connect(8, MOST + 1), Err(Refusal::TooMany(MOST as u32)));
    receiving.disconnect(8, 1);
    assert_eq!(receiving.connect(8, MOST + 2), Ok(()));
    assert!(receiving.connect(8, MOST + 3).is_err());
    receiving.0.connector_gone(0, 8, &mut receiving.1);
    assert_eq!(receiving.connect(8, MOST + 4), Ok(()));
}

/// This host's own processes are none of the others.
#[test]
fn all_other_hosts_have_so_many_senders_of_data_interrupts_and_no_more() {
    const EACH: u64 = 4096;
    const MOST: u32 = 16 * 1024;
    let mut receiving = Receiving::new();
    for node in [8, 12, 16, 20] {
        assert_eq!((1..=EACH).find(|nth| receiving.connect(node, *nth).is_err()), None);
    }
    assert_eq!(receiving.connect(24, 1), Err(Refusal::TooMany(MOST)));
    let connect =
        SessionRequest::ConnectInterrupt { node: 4, kind: DATA, number: 7, timeout_ms: 1000 };
    let own = replies(receiving.0.request(0, SESSION, connect, &mut receiving.1));
    assert!(matches!(own[..], [Reply::Connected(_)]), "{own:?}");
    assert_eq!(receiving.connect(24, 2), Err(Refusal::TooMany(MOST)));
    receiving.disconnect(16, 1);
    assert_eq!(receiving.connect(24, 3), Ok(()));
    assert_eq!(receiving.connect(24, 4), Err(Refusal::TooMany(MOST)));
}
