//! Memory whose keeper has ended: how much of it a guest keeps.

use rackbus_segment::message::{Refusal, SegmentKind};

use super::*;

const QUARTER: u64 = WINDOW / 4;
const MEMORY: DescriptorKind = DescriptorKind::Memory { size: QUARTER, write: true };

impl Guest {
    /// Asks the node something by writing, and has it answered with these files; their numbers, and what follows.
    fn call(
        &mut self,
        session: u64,
        (place, request): (GuestChannel, &SessionRequest),
        reply: &Reply,
        objects: &[DescriptorKind],
    ) -> (Vec<u64>, Vec<GuestAction>) {
        let message = encode(request);
        let mut arguments = words(&[session, place.offset()]);
        arguments.extend((message.len() as u32).to_le_bytes());
        arguments.extend([0; 20]);
        arguments.extend(&message);
        self.ask(16, CONTROL, &arguments).unwrap();
        let message = encode(reply);
        let received = Received { message: &message, objects: objects.to_vec(), lost: false };
        let said = self.state.received(session, GuestChannel::Calls, received);
        if place == GuestChannel::Calls {
            self.read(session, GuestChannel::Calls).unwrap();
        }
        said
    }

    /// A segment of a quarter of the window, which is mapped at this quarter.
    fn create(&mut self, session: u64, segment: u64, at: u64) -> u64 {
        let segment = Handle(segment);
        let (id, kind) = (1, SegmentKind::Shared);
        let request = SessionRequest::CreateSegment { id, choose: true, size: QUARTER, kind };
        let reply = Reply::Created { segment, id, address: None };
        let (numbers, _) = self.call(session, (GuestChannel::Calls, &request), &reply, &[MEMORY]);
        self.open_and_map(numbers[0], at);
        numbers[0]
    }

    fn open_and_map(&mut self, node: u64, at: u64) {
        let mut name = object_name(node).into_bytes();
        name.push(0);
        self.ask(1, ROOT, &name).unwrap();
        self.ask(14, node, &words(&[0])).unwrap();
        let at = at * QUARTER;
        assert_eq!(self.ask(48, node, &words(&[0, 0, QUARTER, 1, at])), Err(-1));
        let job = self.actions.iter().find_map(|action| match action {
            GuestAction::Map { job, .. } => Some(*job),
            _ => None,
        });
        self.state.mapped(job.unwrap(), true);
    }

    fn remove(&mut self, session: u64, segment: u64) -> Vec<GuestAction> {
        let request = SessionRequest::Remove { segment: Handle(segment) };
        self.call(session, (GuestChannel::Calls, &request), &Reply::Done, &[]).1
    }
}

/// What is done with a file that is let go, which was mapped at a quarter.
fn let_go(object: u64, at: u64) -> [GuestAction; 2] {
    let ranges = vec![(at * QUARTER, QUARTER)];
    [GuestAction::Unmap { ranges, asked: None }, GuestAction::Release { object }]
}

#[test]
fn segments_that_a_guest_has_removed_and_still_maps_are_kept_up_to_the_windows_size() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let mut nodes = std::collections::VecDeque::new();
    for turn in 0..12_u64 {
        // Its place is taken by the fifth after it: those are the ones that are gone by then.
        nodes.push_back(guest.create(session, turn, turn % 4));
        let gone = guest.state.counts()[2];
        assert_eq!(gone, nodes.len().min(4), "{turn}");
        if turn % 4 == 3 {
            let refused = Reply::Refused(Refusal::Busy);
            let request = SessionRequest::Remove { segment: Handle(turn) };
            let place = (GuestChannel::Calls, &request);
            assert_eq!(guest.call(session, place, &refused, &[]).1, []);
        }
        let actions = guest.remove(session, turn);
        let forgotten: Vec<&GuestAction> =
            actions.iter().filter(|it| matches!(it, GuestAction::Release { .. })).collect();
        if turn < 4 {
            assert_eq!(forgotten, Vec::<&GuestAction>::new());
        } else {
            let object = nodes[turn as usize - 4];
            assert_eq!(forgotten, [&GuestAction::Release { object }]);
        }
    }
    // What is gone is not there any more, and the rest is.
    assert!(guest.map(nodes[0], 0, 0).is_ok());
    assert!(guest.actions.iter().all(|it| !matches!(it, GuestAction::Map { .. })));
    assert_eq!(guest.map(nodes[11], 0, 3 * QUARTER), Err(-1));
}

/// Each way in which memory's keeper ends; with that the fifth quarter is too much.
#[test]
fn whatever_ends_counts() {
    let remote = |change| SessionEvent::Remote { connection: Handle(0), change };
    let told = [
        remote(ConnectionChange::Removed),
        remote(ConnectionChange::Lost),
        SessionEvent::SenderGone { interrupt: Handle(50), ring: Handle(0) },
    ];
    for event in told {
        let mut guest = Guest::new();
        let session = guest.open_session();
        let first = guest.create(session, 0, 0);
        assert_eq!(guest.told(session, &event), [], "{event:?}");
        for turn in 1..4 {
            guest.create(session, turn, turn);
            assert_eq!(guest.remove(session, turn), []);
        }
        let second = guest.open_session();
        let last = guest.connected(second, 9, MEMORY);
        // The end of a session, whose page counts as well.
        let ended = guest.state.session_ended(second);
        assert_eq!(ended[..2], let_go(first, 0), "{event:?}");
        assert_eq!(ended.len(), 4);
        assert!(guest.state.objects.contains_key(&last));
    }
}

#[test]
fn connections_that_are_given_up_without_an_answer_count() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let first = guest.connected(session, 20, MEMORY);
    guest.ask(48, first, &words(&[0, 0, QUARTER, 1, 0])).unwrap_err();
    for turn in 0..4 {
        guest.create(session, turn, turn);
    }
    // The first one's place was taken by another: only its memory is let go.
    let request = SessionRequest::Disconnect { connection: Handle(20) };
    let place = (GuestChannel::Posts, &request);
    assert_eq!(guest.call(session, place, &Reply::Done, &[]).1, []);
    (0..3).for_each(|turn| assert_eq!(guest.remove(session, turn), []));
    assert_eq!(guest.remove(session, 3), [GuestAction::Release { object: first }]);
}

/// Memory that is given later, of extents and of rings belongs to what the node calls so.
#[test]
fn all_memory_has_its_keeper() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let ends = |guest: &Guest| guest.state.objects.values().filter(|it| it.ended.is_some()).count();
    let give = SessionRequest::GiveMemory { segment: Handle(1) };
    let calls = GuestChannel::Calls;
    guest.call(session, (calls, &give), &Reply::Memory, &[MEMORY]);
    let allocate = SessionRequest::Allocate { size: QUARTER };
    let extent = Reply::Extent { extent: Handle(2), address: 0 };
    guest.call(session, (calls, &allocate), &extent, &[MEMORY]);
    let pages = SessionRequest::MapPages { address: 0, length: 2 * QUARTER };
    let lengths = vec![QUARTER, QUARTER];
    let mapped = Reply::Pages { connection: Handle(3), lengths, write: true };
    guest.call(session, (calls, &pages), &mapped, &[MEMORY, MEMORY]);
    let sender = encode(&SessionEvent::Sender { interrupt: Handle(4), ring: Handle(5) });
    let received = Received { message: &sender, objects: vec![SEGMENT], lost: false };
    guest.state.received(session, GuestChannel::Events, received);
    let requests = [
        SessionRequest::Remove { segment: Handle(1) },
        SessionRequest::Free { extent: Handle(2) },
        SessionRequest::Disconnect { connection: Handle(3) },
        SessionRequest::RemoveInterrupt { interrupt: Handle(4) },
    ];
    for (request, ended) in requests.iter().zip([1, 2, 4, 5]) {
        guest.call(session, (calls, request), &Reply::Done, &[]);
        assert_eq!(ends(&guest), ended, "{request:?}");
    }
}

#[test]
fn memory_that_was_left_by_a_move_counts_when_all_have_gone_over() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let node = guest.create(session, 1, 0);
    let (keeper, ticket, half) = (Handle(1), Handle(7), QUARTER / 2);
    let ends = |guest: &Guest, node: u64| guest.state.objects[&node].ended.is_some();
    let mut over = Vec::new();
    for offset in [0, half] {
        let adopt = SessionEvent::Adopt { ticket, keeper, offset, length: half, from: 0 };
        let message = encode(&adopt);
        let received = Received { message: &message, objects: vec![MEMORY], lost: false };
        over.extend(guest.state.received(session, GuestChannel::Events, received).0);
        assert!(!ends(&guest, node));
        guest.told(session, &SessionEvent::Unfreeze { ticket, keeper, offset, length: half });
        assert_eq!(ends(&guest, node), offset == half);
    }
    assert!(over.iter().all(|node| !ends(&guest, *node)));
}

/// The memory of users that have little is not let go for the sake of one who has much.
#[test]
fn the_session_that_keeps_most_loses_first() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let first = guest.create(session, 0, 0);
    assert_eq!(guest.remove(session, 0), []);
    guest.user = 1001;
    let other = guest.open_session();
    let nodes: Vec<u64> = (1..5).map(|turn| guest.create(other, turn, turn % 4)).collect();
    (1..4).for_each(|turn| assert_eq!(guest.remove(other, turn), []));
    assert_eq!(guest.remove(other, 4), let_go(nodes[0], 1));
    assert!(!guest.state.objects[&first].released);
}
