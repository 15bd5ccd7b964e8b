//! What a guest's kernel asks for, and what it must not get.

mod bounds;
mod ended;

use proptest::prelude::*;
use rackbus_segment::Handle;
use rackbus_segment::guest::{
    EXCHANGE, EXCHANGE_BYTES, GREETING, GuestChannel, GuestFrame, MAX_FRAME, object_name,
    to_exchange,
};
use rackbus_segment::message::{
    Connected, ConnectionChange, Reply, SessionEvent, SessionRequest, encode,
};

use super::*;
use crate::fuse::REQUEST_HEAD;

const WINDOW: u64 = 64 << 20;
const PIECE: u64 = 2 << 20;

fn words(fields: &[u64]) -> Vec<u8> {
    fields.iter().flat_map(|field| field.to_le_bytes()).collect()
}

/// A guest's kernel, and the node behind the shell.
struct Guest {
    state: GuestState,
    now: u64,
    token: u64,
    user: u32,
    /// What the last request led to.
    actions: Vec<GuestAction>,
}

impl Guest {
    fn new() -> Guest {
        let (state, actions) = (GuestState::new(WINDOW), Vec::new());
        let mut guest = Guest { state, now: 0, token: 0, user: 1000, actions };
        let init = [7_u32, 39, 0, 1 << 30, 2, 0, 0, 0];
        let init: Vec<u8> = init.iter().flat_map(|field| field.to_le_bytes()).collect();
        assert_eq!(guest.ask(26, ROOT, &init).unwrap()[..4], 7_u32.to_le_bytes());
        guest
    }

    /// Asks something; the answer if it came at once, or its error.
    fn ask(&mut self, code: u32, node: u64, arguments: &[u8]) -> Result<Vec<u8>, i32> {
        self.token += 1;
        let mut bytes = ((REQUEST_HEAD + arguments.len()) as u32).to_le_bytes().to_vec();
        bytes.extend(code.to_le_bytes());
        bytes.extend(words(&[self.token, node]));
        [self.user, 100, 1, 0].iter().for_each(|field| bytes.extend(field.to_le_bytes()));
        bytes.extend(arguments);
        self.actions = self.state.request(self.now, self.token, &bytes);
        self.answer(self.token)
    }

    /// The answer to a request among the last actions; -1 when there is none.
    fn answer(&self, wanted: u64) -> Result<Vec<u8>, i32> {
        answer_in(&self.actions, wanted)
    }

    fn open_session(&mut self) -> u64 {
        assert_eq!(self.ask(14, CONTROL, &words(&[0])), Err(-1));
        let [GuestAction::Connect { session }] = self.actions[..] else {
            panic!("{:?}", self.actions)
        };
        let page = DescriptorKind::Memory { size: 4096, write: true };
        let (number, actions) = self.state.connected(session, Some(page));
        assert_eq!(answer_in(&actions, self.token).unwrap()[..8], session.to_le_bytes());
        let greeting = self.read(session, GuestChannel::Calls).unwrap();
        assert_eq!(GuestFrame::decode(&greeting).unwrap().objects, [number.unwrap()]);
        assert!(greeting.ends_with(GREETING));
        session
    }

    fn read(&mut self, session: u64, place: GuestChannel) -> Result<Vec<u8>, i32> {
        let mut arguments = words(&[session, place.offset()]);
        arguments.extend((MAX_FRAME as u32).to_le_bytes());
        self.ask(15, CONTROL, &arguments)
    }

    /// The node answers a connection to a segment.
    fn connected(&mut self, session: u64, connection: u64, kind: DescriptorKind) -> u64 {
        let connection = Handle(connection);
        let connected = Connected { connection, size: 1, write: true, address: None };
        let message = encode(&Reply::Connected(connected));
        let received = Received { message: &message, objects: vec![kind], lost: false };
        let (numbers, _) = self.state.received(session, GuestChannel::Calls, received);
        let frame = GuestFrame::decode(&self.read(session, GuestChannel::Calls).unwrap()).unwrap();
        assert_eq!(frame.objects, numbers);
        let mut name = object_name(numbers[0]).into_bytes();
        name.push(0);
        self.ask(1, ROOT, &name).unwrap();
        self.ask(14, numbers[0], &words(&[0])).unwrap();
        numbers[0]
    }

    fn exchange(&mut self, session: u64, message: &[u8]) -> Result<Vec<u8>, i32> {
        let mut arguments = words(&[session, u64::from(EXCHANGE) << 32, 0]);
        arguments.extend([EXCHANGE_BYTES as u32; 2].iter().flat_map(|it| it.to_le_bytes()));
        arguments.extend(to_exchange(message).unwrap());
        self.ask(39, CONTROL, &arguments)
    }

    fn map(&mut self, node: u64, offset: u64, at: u64) -> Result<Vec<u8>, i32> {
        self.ask(48, node, &words(&[0, offset, PIECE, 1, at]))
    }

    fn told(&mut self, session: u64, event: &SessionEvent) -> Vec<GuestAction> {
        let message = encode(event);
        let received = Received { message: &message, objects: Vec::new(), lost: false };
        self.state.received(session, GuestChannel::Events, received).1
    }
}

fn answer_in(actions: &[GuestAction], wanted: u64) -> Result<Vec<u8>, i32> {
    let found = actions.iter().find_map(|action| match action {
        GuestAction::Answer { token, bytes } if *token == wanted => Some(bytes),
        _ => None,
    });
    let Some(bytes) = found else { return Err(-1) };
    match bytes.get(4..8).map(|field| i32::from_le_bytes(field.try_into().unwrap())) {
        Some(0) => Ok(bytes[16..].to_vec()),
        Some(error) => Err(-error),
        None => Ok(Vec::new()),
    }
}

const SEGMENT: DescriptorKind = DescriptorKind::Memory { size: 3 << 20, write: true };

#[test]
fn a_segment_is_mapped_up_to_its_end_and_taken_back_as_it_was_mapped() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let node = guest.connected(session, 1, SEGMENT);
    assert_eq!(guest.map(node, PIECE, 4 << 20), Err(-1));
    let mapping = (4 << 20, 1 << 20);
    let [GuestAction::Map { job, object, at, offset, length }] = guest.actions[..] else {
        panic!()
    };
    assert_eq!((object, (at, length), offset), (node, mapping, PIECE));
    let answered = guest.state.mapped(job, true);
    assert!(answer_in(&answered, guest.token).is_ok());
    // For stores as well, now: it was for both.
    assert!(guest.map(node, PIECE, 4 << 20).is_ok());
    let mut removal = 1_u32.to_le_bytes().to_vec();
    removal.extend(words(&[4 << 20, PIECE]));
    assert_eq!(guest.ask(49, node, &removal), Err(-1));
    let asked = Some(PendingRequest { token: guest.token, unique: guest.token });
    assert_eq!(guest.actions, [GuestAction::Unmap { ranges: vec![mapping], asked }]);
    // Nothing is there any more.
    guest.ask(49, node, &removal).unwrap_err();
    assert!(matches!(&guest.actions[..], [GuestAction::Unmap { ranges, .. }] if ranges.is_empty()));
}

#[test]
fn forged_mappings_are_refused() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let node = guest.connected(session, 1, SEGMENT);
    let read_only =
        guest.connected(session, 2, DescriptorKind::Memory { size: PIECE, write: false });
    let bell = guest.connected(session, 3, DescriptorKind::Bell);
    let max = u64::MAX;
    for (file, offset, length, at) in [
        (node, 0, PIECE, WINDOW),
        (node, 0, PIECE, WINDOW - 4096),
        (node, 0, PIECE, max - 4095),
        (node, 0, max - 4095, 4096),
        (node, 4 << 20, PIECE, 0),
        (node, max - 4095, PIECE, 0),
        (node, 100, PIECE, 0),
        (node, 0, PIECE, 100),
        (node, 0, 100, 0),
        (node, 0, 0, 0),
        (node + 1000, 0, PIECE, 0),
        (CONTROL, 0, PIECE, 0),
        (bell, 0, PIECE, 0),
        (read_only, 0, PIECE, 0),
    ] {
        let outcome = guest.ask(48, file, &words(&[0, offset, length, 1, at]));
        assert!(outcome.is_err_and(|error| error > 0), "{file} {offset:#x} {length:#x} {at:#x}");
        assert_eq!(guest.actions.len(), 1, "nothing but the answer");
    }
    // The kernel's own page cache is no way round.
    assert_eq!(guest.ask(15, node, &words(&[0, 0, 4096])), Err(Errno::IO.0));
}

#[test]
fn what_is_mapped_over_goes_first() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let (one, other) = (guest.connected(session, 1, SEGMENT), guest.connected(session, 2, SEGMENT));
    for at in [0, PIECE] {
        guest.map(one, 0, at).unwrap_err();
    }
    guest.map(other, 0, PIECE / 2).unwrap_err();
    let [GuestAction::Unmap { ranges, asked: None }, GuestAction::Map { at, .. }] =
        &guest.actions[..]
    else {
        panic!("{:?}", guest.actions)
    };
    let mut ranges = ranges.clone();
    ranges.sort_unstable();
    assert_eq!((&ranges[..], *at), (&[(0, PIECE), (PIECE, PIECE)][..], PIECE / 2));
}

#[test]
fn what_is_revoked_leads_nowhere_from_then_on() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let (taken, kept) =
        (guest.connected(session, 1, SEGMENT), guest.connected(session, 2, SEGMENT));
    guest.map(taken, 0, 0).unwrap_err();
    guest.map(kept, 0, PIECE).unwrap_err();
    let event = SessionEvent::Remote { connection: Handle(1), change: ConnectionChange::Revoked };
    let actions = guest.told(session, &event);
    assert_eq!(actions, [GuestAction::Unmap { ranges: vec![(0, PIECE)], asked: None }]);
    // A page of it that is touched again is not there, and the kernel is content.
    assert!(guest.map(taken, 0, 4 << 20).is_ok());
    assert!(matches!(guest.actions[..], [GuestAction::Answer { .. }]));
    assert!(guest.map(kept, 0, PIECE).is_ok());
}

#[test]
fn a_session_of_an_earlier_mount_has_ended() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let node = guest.connected(session, 1, SEGMENT);
    guest.map(node, 0, 0).unwrap_err();
    assert_eq!(guest.read(session, GuestChannel::Events), Err(-1));
    let waits = guest.token;
    let init = [7_u32, 39, 0, 0].iter().flat_map(|field| field.to_le_bytes()).collect::<Vec<_>>();
    assert!(guest.ask(26, ROOT, &init).is_ok());
    assert_eq!(guest.answer(waits), Err(Errno::NOTCONN.0));
    assert!(guest.actions.contains(&GuestAction::End { session }));
    assert!(guest.actions.contains(&GuestAction::Forget { object: node }));
    assert!(guest.actions.contains(&GuestAction::Unmap { ranges: vec![(0, PIECE)], asked: None }));
    assert_eq!(guest.state.counts(), [0; 3]);
    assert_eq!(guest.read(session, GuestChannel::Calls), Err(Errno::BADF.0));
}

/// A device is plugged into the machine by its host; a process in it cannot take one from the rack.
#[test]
fn a_guest_asks_for_no_devices() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let mut write = |request: &SessionRequest, place: GuestChannel| {
        let message = encode(request);
        let mut arguments = words(&[session, place.offset()]);
        arguments.extend((message.len() as u32).to_le_bytes());
        arguments.extend([0; 20]);
        arguments.extend(&message);
        let answer = guest.ask(16, CONTROL, &arguments);
        (answer.map(drop), guest.actions.iter().any(|it| matches!(it, GuestAction::Send { .. })))
    };
    for place in [GuestChannel::Calls, GuestChannel::Posts] {
        for request in [
            SessionRequest::ListDevices { skip: 0 },
            SessionRequest::BorrowDevice { fdid: 1, strict: false },
            SessionRequest::ReturnDevice { lease: 1 },
        ] {
            assert_eq!(write(&request, place), (Err(Errno::ACCES.0), false), "{request:?}");
        }
    }
    assert_eq!(write(&SessionRequest::Probe { node: 4 }, GuestChannel::Calls), (Ok(()), true));
}

/// Who posts faster than the node answers is held up, and not disconnected.
#[test]
fn so_many_posts_wait_for_the_node_and_no_more() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let message = encode(&SessionRequest::Disconnect { connection: Handle(1) });
    let post = |guest: &mut Guest| {
        let mut arguments = words(&[session, GuestChannel::Posts.offset()]);
        arguments.extend((message.len() as u32).to_le_bytes());
        arguments.extend([0; 20]);
        arguments.extend(&message);
        let answer = guest.ask(16, CONTROL, &arguments);
        let sent = guest.actions.iter().any(|it| matches!(it, GuestAction::Send { .. }));
        assert_eq!(sent, answer.is_ok());
        answer.map(drop)
    };
    let taken = (0..400).filter(|_| post(&mut guest) == Ok(())).count();
    assert_eq!(taken, MOST_POSTS);
    assert_eq!(post(&mut guest), Err(Errno::AGAIN.0));
    // What is to be answered goes on, and each answer makes room.
    assert_eq!(guest.exchange(session, &message), Err(-1));
    let reply = encode(&Reply::Done);
    for _ in 0..2 {
        let received = Received { message: &reply, objects: Vec::new(), lost: false };
        guest.state.received(session, GuestChannel::Calls, received);
    }
    assert_eq!((post(&mut guest), post(&mut guest)), (Ok(()), Err(Errno::AGAIN.0)));
}

#[test]
fn a_request_and_its_reply_are_exchanged_at_once() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let request = encode(&SessionRequest::Probe { node: 4 });
    assert_eq!(guest.exchange(session, &request), Err(-1));
    let [GuestAction::Send { message, .. }] = &guest.actions[..] else {
        panic!("{:?}", guest.actions)
    };
    assert_eq!(*message, request);
    let exchanged = guest.token;
    assert_eq!(guest.exchange(session, &request), Err(Errno::AGAIN.0), "one at a time");
    let replied = |guest: &mut Guest, message: &[u8]| {
        let received = Received { message, objects: Vec::new(), lost: false };
        guest.state.received(session, GuestChannel::Calls, received).1
    };
    let reply = encode(&Reply::Done);
    let answer = answer_in(&replied(&mut guest, &reply), exchanged).unwrap();
    let (head, frame) = answer.split_at(16);
    assert_eq!(head[..4], (frame.len() as u32).to_le_bytes());
    assert_eq!(GuestFrame::decode(frame).unwrap().message, reply);
    // A reply that is longer is read, and none that comes too late is taken for another one.
    for (message, late) in [(vec![7; EXCHANGE_BYTES], false), (reply, true)] {
        assert_eq!(guest.exchange(session, &request), Err(-1));
        let exchanged = guest.token;
        let now = if late { guest.state.tick(MESSAGE_WAIT) } else { Vec::new() };
        let later = replied(&mut guest, &message);
        let answer = answer_in(if late { &now } else { &later }, exchanged).unwrap();
        assert_eq!(answer, [0; 16]);
        assert_eq!(guest.exchange(session, &request), Err(Errno::AGAIN.0));
        let frame = guest.read(session, GuestChannel::Calls).unwrap();
        assert_eq!(GuestFrame::decode(&frame).unwrap().message, message);
    }
    assert_eq!(guest.exchange(session, &request), Err(-1));
    let exchanged = guest.token;
    let ended = guest.state.session_ended(session);
    assert_eq!(answer_in(&ended, exchanged), Err(Errno::NOTCONN.0));
    assert_eq!(guest.exchange(session, &request), Err(Errno::NOTCONN.0));
}

#[test]
fn a_file_is_there_until_the_kernel_forgets_it() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let node = guest.connected(session, 1, SEGMENT);
    guest.map(node, 0, 0).unwrap_err();
    guest.ask(18, CONTROL, &words(&[session, 0, 0])).unwrap();
    // The page of the greeting was never opened.
    assert_eq!(guest.state.counts(), [0, 1, 1]);
    guest.ask(2, node, &words(&[1])).unwrap();
    assert!(guest.actions.contains(&GuestAction::Unmap { ranges: vec![(0, PIECE)], asked: None }));
    assert!(guest.actions.contains(&GuestAction::Forget { object: node }));
    assert_eq!(guest.state.counts(), [0; 3]);
}

#[test]
fn a_waiting_reader_is_woken_by_a_ring_by_time_or_by_the_end() {
    let mut guest = Guest::new();
    let session = guest.open_session();
    let bell = guest.connected(session, 1, DescriptorKind::Bell);
    let wait = |seen: u64| {
        let mut arguments = words(&[0, seen]);
        arguments.extend(8_u32.to_le_bytes());
        arguments
    };
    assert_eq!(guest.ask(15, bell, &wait(0)), Err(-1));
    assert_eq!(guest.state.next_tick(), Some(RING_WAIT));
    let rung = guest.state.rang(bell);
    assert_eq!(answer_in(&rung, guest.token), Ok(words(&[1])));
    // A ring that came between is not missed.
    assert_eq!(guest.ask(15, bell, &wait(0)), Ok(words(&[1])));
    assert_eq!(guest.ask(15, bell, &wait(1)), Err(-1));
    assert_eq!(guest.state.tick(RING_WAIT - 1), []);
    let expired = guest.state.tick(RING_WAIT);
    assert_eq!(answer_in(&expired, guest.token), Ok(words(&[1])));
    assert_eq!(guest.read(session, GuestChannel::Events), Err(-1));
    let stopped = guest.state.stop();
    assert_eq!(answer_in(&stopped, guest.token), Ok(Vec::new()));
    assert_eq!(guest.read(session, GuestChannel::Events), Err(-1));
    let over = guest.state.session_ended(session);
    assert_eq!(answer_in(&over, guest.token), Err(Errno::NOTCONN.0));
    assert_eq!(guest.read(session, GuestChannel::Events), Err(Errno::NOTCONN.0));
}

proptest! {
    /// Whatever a kernel asks, mappings lie inside of the window, beside each other, and what QEMU is told
    /// to take away is what it was told to map.
    #[test]
    fn mappings_never_overlap(
        requests in prop::collection::vec((0_u8..6, 0_u64..4, 0_u64..40, 0_u64..40, 0_u64..5), 1..200),
    ) {
        let mut guest = Guest::new();
        let session = guest.open_session();
        let nodes: Vec<u64> = (0..3).map(|it| guest.connected(session, it, SEGMENT)).collect();
        let mut there: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
        for (what, node, at, offset, length) in requests {
            let node = nodes.get(node as usize).copied().unwrap_or(node);
            let (at, offset, length) = (at << 19, offset << 18, length << 20);
            match what {
                0..=2 => drop(guest.ask(48, node, &words(&[0, offset, length, 1, at]))),
                3 => {
                    let mut removal = 1_u32.to_le_bytes().to_vec();
                    removal.extend(words(&[at, length]));
                    drop(guest.ask(49, node, &removal));
                }
                4 => {
                    let connection = Handle(node % 3);
                    let event = SessionEvent::Remote { connection, change: ConnectionChange::Revoked };
                    guest.actions = if offset == 0 { guest.told(session, &event) } else { Vec::new() };
                }
                _ => drop(guest.ask(2, node, &words(&[length & 1]))),
            }
            for action in std::mem::take(&mut guest.actions) {
                match action {
                    GuestAction::Unmap { ranges, .. } => for (at, length) in ranges {
                        prop_assert_eq!(there.remove(&at), Some(length));
                    },
                    GuestAction::Map { job, at, length, .. } => {
                        prop_assert!(length > 0 && at + length <= WINDOW);
                        let before = there.range(..at + length).next_back();
                        prop_assert!(before.is_none_or(|(begin, long)| begin + long <= at));
                        there.insert(at, length);
                        guest.state.mapped(job, true);
                    }
                    _ => {}
                }
            }
        }
    }
}

/// What a hundred guests have, with full windows whose pieces come and go: all of it goes away again.
#[test]
fn a_hundred_guests_leave_nothing_behind() {
    for _ in 0..100 {
        let mut guest = Guest::new();
        let sessions: Vec<u64> = (0..8).map(|_| guest.open_session()).collect();
        let mut nodes = Vec::new();
        for (at, session) in sessions.iter().cycle().take(64).enumerate() {
            nodes.push(guest.connected(*session, at as u64, SEGMENT));
        }
        let pieces = WINDOW / PIECE;
        for (turn, node) in nodes.iter().cycle().take(1000).enumerate() {
            let at = (turn as u64 % pieces) * PIECE;
            if turn as u64 >= pieces {
                let mut removal = 1_u32.to_le_bytes().to_vec();
                removal.extend(words(&[at, PIECE]));
                assert_eq!(guest.ask(49, *node, &removal), Err(-1));
            }
            assert_eq!(guest.map(*node, 0, at), Err(-1));
            let job = guest.actions.iter().find_map(|action| match action {
                GuestAction::Map { job, .. } => Some(*job),
                _ => None,
            });
            assert!(answer_in(&guest.state.mapped(job.unwrap(), true), guest.token).is_ok());
        }
        assert_eq!(guest.state.counts(), [8, 8 + 64, pieces as usize]);
        nodes.iter().for_each(|node| drop(guest.ask(2, *node, &words(&[1]))));
        for session in sessions {
            guest.ask(18, CONTROL, &words(&[session, 0, 0])).unwrap();
        }
        assert_eq!(guest.state.counts(), [0; 3]);
    }
}
