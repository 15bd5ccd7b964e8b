//! What there may be at a time, of all users and of one.

use super::*;

#[test]
fn those_who_wait_leave_room_for_others_in_the_queue() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let bell = guest.connected(session, 1, DescriptorKind::Bell);
    let mut waiting = std::collections::VecDeque::new();
    let mut arguments = words(&[0, 0]);
    arguments.extend(8_u32.to_le_bytes());
    assert_eq!(guest.read(session, GuestChannel::Events), Err(-1));
    waiting.push_back(guest.token);
    for _ in 0..300 {
        assert_eq!(guest.ask(15, bell, &arguments), Err(-1));
        waiting.push_back(guest.token);
        let answered = (waiting.len() > MOST_PARKED).then(|| waiting.pop_front().unwrap());
        let tokens = guest.actions.iter().filter_map(|action| match action {
            GuestAction::Answer { token, .. } => Some(*token),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), answered.into_iter().collect::<Vec<_>>());
        assert!(guest.state.parked().count() <= MOST_PARKED);
    }
    assert_eq!(guest.state.rang(bell).len(), MOST_PARKED);
}

#[test]
fn one_user_has_not_all_sessions_and_files() {
    let mut guest = Guest::new();
    let sessions: Vec<u64> = (0..MOST_SESSIONS / 2).map(|_| guest.open_session()).collect();
    assert_eq!(guest.ask(14, CONTROL, &words(&[0])), Err(Errno::NFILE.0));
    let open = |guest: &mut Guest, user: u32| {
        guest.user = user;
        guest.ask(14, CONTROL, &words(&[0])) == Err(-1)
    };
    assert!(open(&mut guest, 1001) && open(&mut guest, 0));
    guest.user = 1000;
    let files = |guest: &mut Guest, count: usize| {
        let message = encode(&Reply::Done);
        let received = Received { message: &message, objects: vec![SEGMENT; count], lost: false };
        guest.state.received(sessions[0], GuestChannel::Calls, received).0.len()
    };
    let left = MOST_OBJECTS / 2 - sessions.len();
    assert_eq!((files(&mut guest, left + 1), files(&mut guest, left)), (0, left));
    assert_eq!((files(&mut guest, 1), guest.state.has_room(0, 1)), (0, true));
}

#[test]
fn a_process_that_reads_nothing_is_disconnected_and_can_read_what_came_before() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let event = SessionEvent::Connected { segment: Handle(1), node: 4 };
    let mut ended = Vec::new();
    for _ in 0..=MOST_WAITING.0 {
        ended.extend(guest.told(session, &event));
    }
    assert_eq!(ended, [GuestAction::End { session }]);
    assert!(guest.read(session, GuestChannel::Events).is_ok());
}

/// Has a user wait for an event until there are so many waits; the tokens that are answered meanwhile.
fn wait_for(guest: &mut Guest, bell: u64, user: u32, count: usize) -> Vec<u64> {
    let mut arguments = words(&[0, 0]);
    arguments.extend(8_u32.to_le_bytes());
    guest.user = user;
    let mut answered = Vec::new();
    for _ in 0..count {
        assert_eq!(guest.ask(15, bell, &arguments), Err(-1));
        answered.extend(guest.actions.iter().filter_map(|action| match action {
            GuestAction::Answer { token, .. } => Some(*token),
            _ => None,
        }));
    }
    answered
}

#[test]
fn a_process_that_waits_in_many_places_wakes_nobody_else() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let bell = guest.connected(session, 1, DescriptorKind::Bell);
    assert!(wait_for(&mut guest, bell, 1001, 50).is_empty());
    let first = guest.token + 1;
    let answered = wait_for(&mut guest, bell, 1002, 1000);
    // The user's own, in their order.
    let own = MOST_PARKED - 50;
    assert_eq!(answered, (first..).take(1000 - own).collect::<Vec<_>>());
    // A third one comes, and makes room for himself at the cost of who has most.
    assert!(wait_for(&mut guest, bell, 0, 60).iter().all(|token| *token >= first));
    let of = |user: u32| guest.state.parked().filter(|it| it.user == user).count();
    assert_eq!((of(1001), of(1002), of(0)), (50, MOST_PARKED - 110, 60));
}

/// What all sessions have not read is bounded, and what those of users other than root have is half of it.
#[test]
fn what_is_not_read_is_bounded_for_all_sessions_together() {
    let mut guest = Guest::new();
    let said = [7; 16 << 10];
    // Says so much to new sessions of a user until one of them ends; how many did not.
    let fill = |guest: &mut Guest, user: u32| {
        guest.user = user;
        for sessions in 0..MOST_SESSIONS {
            let session = guest.open_session();
            for _ in 0..32 {
                let received = Received { message: &said, objects: Vec::new(), lost: false };
                let (_, actions) = guest.state.received(session, GuestChannel::Events, received);
                if actions == [GuestAction::End { session }] {
                    return (sessions, session);
                }
                assert_eq!(actions, []);
            }
        }
        panic!("without a bound");
    };
    let unread =
        |guest: &Guest| -> usize { guest.state.sessions.values().map(|it| it.unread()).sum() };
    let (sessions, last) = fill(&mut guest, 1001);
    assert_eq!(sessions, MOST_UNREAD / 4 / (32 * said.len()) - 1);
    assert!(unread(&guest) <= MOST_UNREAD / 4);
    // Others are not concerned, up to half of all that there is, and root not at all.
    fill(&mut guest, 1002);
    assert!(unread(&guest) <= MOST_UNREAD / 2);
    guest.user = 0;
    let session = guest.open_session();
    let received = Received { message: &said, objects: Vec::new(), lost: false };
    assert_eq!(guest.state.received(session, GuestChannel::Events, received).1, []);
    assert!(guest.read(session, GuestChannel::Events).is_ok());
    let mut waits = || {
        assert_eq!(guest.read(session, GuestChannel::Events), Err(-1));
        let received = Received { message: &said, objects: Vec::new(), lost: false };
        guest.state.received(session, GuestChannel::Events, received).1
    };
    // Who waits for a message gets it.
    (0..100).for_each(|_| assert!(matches!(waits()[..], [GuestAction::Answer { .. }])));
    // What came before can be read, and what is read makes room.
    assert!(guest.read(last, GuestChannel::Events).is_ok());
    guest.ask(18, CONTROL, &words(&[last, 0, 0])).unwrap();
    let event = SessionEvent::Connected { segment: Handle(1), node: 4 };
    assert_eq!(guest.told(session, &event), []);
}
