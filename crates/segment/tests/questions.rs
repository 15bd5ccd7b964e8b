//! What a session is told when another host's node says nothing.

use rackbus_fabric::FabricHandle;
use rackbus_segment::directory::{
    DirectorySettings, HostRange, LinePart, LockAccess, LockState, Loss,
};
use rackbus_segment::message::{
    BarrierPhase, ConnectorMessage, LockHolder, LockOperation, LockReply, LockRequest, Notice,
    OwnerMessage, PeerReply, Question, Refusal, Reply, SegmentAccess, SegmentKind, SessionEvent,
    SessionRequest, TargetKind, VERSION, Withdrawal,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, ObjectId, Objects, Recipient, SessionId,
};

/// Nothing is made in these tests.
struct Nothing;

impl Objects for Nothing {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        Err("no memory".into())
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        Err("no event".into())
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        Err("no line".into())
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Err("no line".into())
    }
}

const SESSION: SessionId = SessionId(1);

fn directory() -> Directory {
    directory_of(false)
}

fn directory_of(machines: bool) -> Directory {
    directory_with(machines, 1 << 20)
}

/// Whose hosts have so many bytes of the rack's address space each.
fn directory_with(machines: bool, size: u64) -> Directory {
    let range = HostRange { base: 1 << 32, size };
    let hosts = [(4, "alpha".to_owned()), (8, "beta".to_owned())].into();
    let rules = Default::default();
    let ranges = vec![(4, range)];
    let settings = DirectorySettings { node: 4, hosts, range, ranges, rules, machines };
    let fabric = FabricHandle::of_hosts(settings.hosts.values().map(String::as_str)).unwrap();
    let mut directory = Directory::new(settings, fabric);
    directory.request(0, SESSION, SessionRequest::Hello { version: VERSION }, &mut Nothing);
    directory
}

fn replies(outputs: Vec<DirectoryAction>) -> Vec<Reply> {
    let reply = |output| match output {
        DirectoryAction::Send(Recipient::Reply(SESSION, reply), _) => Some(reply),
        _ => None,
    };
    outputs.into_iter().filter_map(reply).collect()
}

#[test]
fn a_holder_is_dead_only_when_somebody_says_so() {
    let holder = LockHolder { node: 8, session: SessionId(7) };
    let mut slow = directory();
    let asked = slow.request(0, SESSION, SessionRequest::Alive { holder }, &mut Nothing);
    assert_eq!(replies(asked), []);
    let due = slow.next_tick().unwrap();
    assert_eq!(replies(slow.tick(due, &mut Nothing)), [Reply::Alive(true)]);
    // A node that is dead has cut off its processes; one that is out of reach may be well.
    for (loss, alive) in [(Loss::Dead, false), (Loss::OutOfReach, true)] {
        let mut gone = directory();
        gone.request(0, SESSION, SessionRequest::Alive { holder }, &mut Nothing);
        gone.request(0, SESSION, SessionRequest::Probe { node: 8 }, &mut Nothing);
        let told = replies(gone.owner_gone(0, 8, loss, &mut Nothing));
        assert_eq!(told, [Reply::Alive(alive), Reply::Refused(Refusal::NotResponding)]);
    }
}

/// Whoever asks without end, while the other node takes its time, fills no memory, and keeps nobody else from asking.
#[test]
fn a_session_has_so_many_questions_that_are_not_answered() {
    const OTHER: SessionId = SessionId(2);
    let mut slow = directory();
    slow.request(0, OTHER, SessionRequest::Hello { version: VERSION }, &mut Nothing);
    let probe = |slow: &mut Directory, session| {
        slow.request(0, session, SessionRequest::Probe { node: 8 }, &mut Nothing)
    };
    let outputs: Vec<DirectoryAction> =
        (0..100_000).flat_map(|_| probe(&mut slow, SESSION)).collect();
    let is_ask =
        |output: &&DirectoryAction| matches!(output, DirectoryAction::Send(Recipient::Ask(..), _));
    let asked = outputs.iter().filter(is_ask).count();
    assert!((500..5000).contains(&asked), "{asked} are asked");
    assert!(replies(outputs).iter().all(|it| matches!(it, Reply::Refused(Refusal::TooMany(_)))));
    let others = probe(&mut slow, OTHER);
    assert_eq!(others.iter().filter(is_ask).count(), 1);
    // It may ask again when that is over.
    slow.owner_gone(0, 8, Loss::OutOfReach, &mut Nothing);
    assert_eq!(probe(&mut slow, SESSION).iter().filter(is_ask).count(), 1);
}

/// Whoever comes, asks and leaves leaves questions, and an owner that never answers keeps them.
#[test]
fn an_owner_that_never_answers_is_asked_so_much_and_no_more() {
    const MOST: u64 = 16 * 1024;
    let mut directory = directory();
    let ask = |directory: &mut Directory, number: u64| {
        let session = SessionId(2 + number);
        directory.request(0, session, SessionRequest::Hello { version: VERSION }, &mut Nothing);
        let probe = SessionRequest::Probe { node: 8 };
        let asked = directory.request(0, session, probe, &mut Nothing);
        directory.closed(0, session, &mut Nothing);
        let refused = |output: &DirectoryAction| {
            let no = Reply::Refused(Refusal::TooMany(MOST as u32));
            matches!(output, DirectoryAction::Send(Recipient::Reply(_, reply), _) if *reply == no)
        };
        asked.iter().any(refused)
    };
    assert_eq!((0..MOST).find(|number| ask(&mut directory, *number)), None);
    assert!(ask(&mut directory, MOST));
    // Once it is gone, it is asked no more, and nothing is kept.
    directory.owner_gone(0, 8, Loss::Dead, &mut Nothing);
    assert!(!ask(&mut directory, MOST + 1));
}

#[test]
fn a_probe_that_nobody_answers_is_refused() {
    let mut slow = directory();
    slow.request(0, SESSION, SessionRequest::Probe { node: 8 }, &mut Nothing);
    let due = slow.next_tick().unwrap();
    let told = replies(slow.tick(due, &mut Nothing));
    assert_eq!(told, [Reply::Refused(Refusal::NotResponding)]);
}

/// Memory can be made, and nothing else.
#[derive(Default)]
struct Memories(u64);

impl Objects for Memories {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        self.0 += 1;
        Ok(ObjectId(self.0))
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        Err("no event".into())
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        Err("no line".into())
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Err("no line".into())
    }
}

#[test]
fn nobody_is_cut_off_because_the_node_itself_stalled() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let mut ask = |directory: &mut Directory, request| {
        let told = replies(directory.request(0, SESSION, request, &mut memories));
        told.into_iter().next().unwrap()
    };
    let (kind, size) = (SegmentKind::Shared, 4096);
    let create = SessionRequest::CreateSegment { id: 7, choose: false, size, kind };
    let Reply::Created { segment, .. } = ask(&mut directory, create) else { panic!() };
    ask(&mut directory, SessionRequest::SetAvailable { segment });
    let what = TargetKind::Segment;
    let connect = SessionRequest::Connect { node: 4, id: 7, timeout_ms: 1000, what };
    assert!(matches!(ask(&mut directory, connect), Reply::Connected(_)));
    let withdraw = SessionRequest::SetUnavailable { segment, how: Withdrawal::Force };
    assert!(matches!(ask(&mut directory, withdraw), Reply::Started { .. }));
    // The owner has answered, perhaps: the node has not been able to hear it.
    let due = directory.next_tick().unwrap();
    assert_eq!(directory.tick(due + 60_000, &mut memories), []);
    // Who is silent even now is cut off, however late that is found.
    let due = directory.next_tick().unwrap();
    let cut = directory.tick(due + 60_000, &mut memories);
    assert!(cut.contains(&DirectoryAction::Cut(SESSION)), "{cut:?}");
}

/// A gigabyte is emptied by somebody who holds up no other request meanwhile, and who is asked for that.
#[test]
fn large_memory_is_emptied_beside_other_requests_and_answered_when_it_is() {
    let (mut directory, mut memories) = (directory_with(false, 1 << 30), Memories::default());
    // Beta may have a group, of which alpha is the home, until it is taken away.
    for (size, beside) in [(4096, false), (512 << 20, true)] {
        let share = |share| SessionRequest::SetShare { first: 3, last: 3, node: Some(8), share };
        directory.request(0, SESSION, share(SegmentAccess::Write), &mut memories);
        let what = Question::Group { id: 3, size: Some(size) };
        let ask = ConnectorMessage::Question { request: size, connection: Handle(size), what };
        directory.asked(0, 8, ask, &mut memories);
        let outputs = directory.request(0, SESSION, share(SegmentAccess::None), &mut memories);
        let emptied = outputs.iter().find_map(|output| match output {
            DirectoryAction::Empty { job, length, .. } if *length == size => Some(*job),
            _ => None,
        });
        let job = emptied.expect("it is emptied");
        assert_eq!(job.is_some(), beside, "{size} bytes");
        match (&replies(outputs)[..], job) {
            ([Reply::Done], None) => {}
            ([Reply::Started { ticket }], Some(job)) => {
                let outputs = directory.emptied(0, job, Ok(()), &mut memories);
                let done = SessionEvent::Finished { ticket: *ticket, outcome: Ok(()) };
                let done = DirectoryAction::Send(Recipient::Event(SESSION, done), Vec::new());
                assert!(outputs.contains(&done), "{outputs:?}");
            }
            (told, _) => panic!("{size} bytes: {told:?}"),
        }
    }
}

/// Pages are emptied where they are taken away, even if their owner dies meanwhile; what it leaves open is not.
#[test]
fn of_an_owner_that_dies_only_the_pages_that_are_being_closed_are_emptied() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let allocate = SessionRequest::Allocate { size: 3 * 4096 };
    let told = replies(directory.request(0, SESSION, allocate, &mut memories));
    let Some(&Reply::Extent { extent, .. }) = told.first() else { panic!("{told:?}") };
    let (mut opened, length) = (Vec::new(), 4096);
    for offset in [0, 4096] {
        let open = SessionRequest::OpenPages { extent, offset, length, node: 8, write: true };
        let ticket = frozen(&directory.request(0, SESSION, open, &mut memories));
        let frozen = Notice::Frozen { ticket, keeper: extent };
        let copy = directory.noticed(0, SESSION, frozen, &mut memories);
        let Some(DirectoryAction::Copy { to, .. }) = copy.first() else { panic!("{copy:?}") };
        opened.push(to.0);
        directory.copied(0, ticket, Ok(()), &mut memories);
        directory.noticed(0, SESSION, Notice::Adopted { ticket, keeper: extent }, &mut memories);
    }
    let close = SessionRequest::ClosePages { extent, offset: 4096, length };
    frozen(&directory.request(0, SESSION, close, &mut memories));
    let ended = directory.closed(0, SESSION, &mut memories);
    let empties = |it: &&DirectoryAction| matches!(it, DirectoryAction::Empty { .. });
    let emptied: Vec<_> = ended.iter().filter(empties).collect();
    assert!(matches!(emptied[..], [DirectoryAction::Empty { object, .. }] if *object == opened[1]));
    assert!(ended.contains(&DirectoryAction::Forget(opened[0])), "{ended:?}");
}

/// The move for which a session is asked to stop writing.
fn frozen(outputs: &[DirectoryAction]) -> Handle {
    let DirectoryAction::Send(Recipient::Event(_, event), _) = &outputs[0] else { panic!() };
    let SessionEvent::Freeze { ticket, .. } = event else { panic!("{event:?}") };
    *ticket
}

/// Whatever way it is stored by, a flush finds the other machines that have the memory, and who is kept from it there.
#[test]
fn memory_of_this_host_is_found_by_each_handle_that_leads_to_it() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let mut ask = |directory: &mut Directory, request| {
        let told = replies(directory.request(0, SESSION, request, &mut memories));
        told.into_iter().next().unwrap()
    };
    let mut found = Vec::new();
    for (id, kind, what) in
        [(7, SegmentKind::Shared, TargetKind::Segment), (3, SegmentKind::Group, TargetKind::Group)]
    {
        let create = SessionRequest::CreateSegment { id, choose: false, size: 4096, kind };
        let Reply::Created { segment, .. } = ask(&mut directory, create) else { panic!() };
        ask(&mut directory, SessionRequest::SetAvailable { segment });
        let connect = SessionRequest::Connect { node: 4, id, timeout_ms: 1000, what };
        let Reply::Connected(to) = ask(&mut directory, connect) else { panic!() };
        let memory = directory.memory_of(SESSION, segment).unwrap();
        assert_eq!(directory.memory_of(SESSION, to.connection), Some(memory));
        assert_eq!(directory.memory_of(SessionId(2), to.connection), None);
        let (node, _) = directory.owner_of(SESSION, to.connection).unwrap();
        let mut keepers = directory.keepers(node, to.connection);
        keepers.sort();
        assert_eq!(keepers, [(SESSION, segment), (SESSION, to.connection)]);
        found.push(memory);
    }
    assert_ne!(found[0], found[1]);
}

/// Memory with locks that are always free, and barriers at which nobody waits; what was done there.
#[derive(Default)]
struct Locks {
    made: u64,
    held: std::collections::BTreeMap<u64, LockHolder>,
    arrived: Vec<Option<u32>>,
    /// Nothing can be done in memory now.
    fails: bool,
    /// Phases that the barriers are past.
    phase: u32,
    excluded: Vec<(Vec<LockHolder>, LockHolder)>,
}

impl Objects for Locks {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        self.made += 1;
        Ok(ObjectId(self.made))
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        Err("no event".into())
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        Err("no line".into())
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Err("no line".into())
    }
    fn lock(&mut self, _memory: ObjectId, at: u64, access: LockAccess<'_>) -> Option<LockState> {
        match access {
            _ if self.fails => return None,
            LockAccess::Take(me) => {
                self.held.insert(at, me);
                return Some(LockState::Taken { died: false });
            }
            LockAccess::Free(_) | LockAccess::FreeOfDead(_) => drop(self.held.remove(&at)),
            LockAccess::Arrive { passed, .. } => {
                self.arrived.push(passed);
                self.phase = self.phase.max(passed.unwrap_or_default());
                let phase = BarrierPhase::Waiting;
                return Some(LockState::Arrived(passed.unwrap_or(self.phase), phase));
            }
            LockAccess::Exclude { parties, dead } => self.excluded.push((parties.to_vec(), dead)),
            LockAccess::Look => {}
        }
        Some(LockState::Held(self.held.get(&at).copied()))
    }
}

/// A segment of this host, and beta's connection to it.
fn with_connection(directory: &mut Directory, locks: &mut Locks) -> Handle {
    let (kind, size, connection) = (SegmentKind::Shared, 1 << 19, Handle(1));
    let create = SessionRequest::CreateSegment { id: 7, choose: false, size, kind };
    let told = replies(directory.request(0, SESSION, create, locks));
    let [Reply::Created { segment, .. }] = told[..] else { panic!("{told:?}") };
    directory.request(0, SESSION, SessionRequest::SetAvailable { segment }, locks);
    let what = Question::Segment { id: 7, what: TargetKind::Segment };
    directory.asked(0, 8, ConnectorMessage::Question { request: 1, connection, what }, locks);
    connection
}

fn ask_lock(
    directory: &mut Directory,
    locks: &mut Locks,
    (connection, request): (Handle, u64),
    (offset, operation): (u64, LockOperation),
) -> Result<PeerReply, Refusal> {
    let what = Question::Lock {
        connection,
        session: SessionId(3),
        request: LockRequest { offset, operation },
    };
    let ask = ConnectorMessage::Question { request, connection: Handle(request), what };
    let told = directory.asked(0, 8, ask, locks);
    let answer = told.into_iter().find_map(|action| match action {
        DirectoryAction::Send(Recipient::Tell(8, OwnerMessage::Answer { answer, .. }), _) => {
            Some(answer)
        }
        _ => None,
    });
    answer.unwrap()
}

/// Party 3 of beta arrives, or asks how far it is.
fn arrive(
    directory: &mut Directory,
    locks: &mut Locks,
    (connection, request): (Handle, u64),
    (parties, passed): (&[LockHolder], Option<u32>),
) {
    let arrive = LockOperation::Arrive { parties: parties.to_vec(), passed };
    let told = ask_lock(directory, locks, (connection, request), (64, arrive));
    assert!(matches!(told, Ok(PeerReply::Lock(LockReply::Barrier { .. }))), "{told:?}");
}

#[test]
fn an_arrival_that_comes_again_is_none_and_who_is_cut_off_is_not_waited_for() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let me = LockHolder { node: 8, session: SessionId(3) };
    for (request, passed) in (100..).zip([None, Some(0), Some(0), Some(1), Some(0), Some(1)]) {
        arrive(&mut directory, &mut locks, (connection, request), (&[me], passed));
    }
    assert_eq!(locks.arrived, [None, Some(0), Some(0), Some(1), Some(1)]);
    directory.connector_gone(0, 8, &mut locks);
    assert_eq!(locks.excluded, [(vec![me], me)]);
}

#[test]
fn who_has_asked_about_a_barrier_and_is_cut_off_before_it_arrives_is_not_waited_for() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let me = LockHolder { node: 8, session: SessionId(3) };
    arrive(&mut directory, &mut locks, (connection, 100), (&[me], None));
    directory.connector_gone(0, 8, &mut locks);
    assert_eq!(locks.excluded, [(vec![me], me)]);
}

#[test]
fn a_barrier_whose_memory_is_zeroes_again_is_a_new_one_by_the_same_connection() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let me = LockHolder { node: 8, session: SessionId(3) };
    let other = LockHolder { node: 4, session: SESSION };
    for (request, passed) in (100..).zip([None, Some(0), Some(1), Some(2)]) {
        arrive(&mut directory, &mut locks, (connection, request), (&[me], passed));
    }
    (locks.phase, locks.arrived) = (0, Vec::new());
    for (request, passed) in (200..).zip([None, Some(0), Some(0)]) {
        arrive(&mut directory, &mut locks, (connection, request), (&[other, me], passed));
    }
    assert_eq!(locks.arrived.last(), Some(&Some(0)), "waits for ever");
    directory.connector_gone(0, 8, &mut locks);
    assert_eq!(locks.excluded, [(vec![other, me], me)], "the parties of the barrier that is there");
}

#[test]
fn a_lock_is_not_taken_from_a_holder_whose_connection_is_there() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let me = LockHolder { node: 8, session: SessionId(3) };
    let take = (0, LockOperation::Take { attempt: 1 });
    ask_lock(&mut directory, &mut locks, (connection, 100), take).unwrap();
    arrive(&mut directory, &mut locks, (connection, 101), (&[me], None));
    // Somebody else who does not reach beta says so, and may be wrong.
    for (request, offset, operation) in [
        (102, 0, LockOperation::DeclareDead { holder: me }),
        (103, 64, LockOperation::Exclude { parties: vec![me], dead: me }),
    ] {
        let done = ask_lock(&mut directory, &mut locks, (connection, request), (offset, operation));
        assert_eq!(done, Ok(PeerReply::Lock(LockReply::Done)));
    }
    assert_eq!((locks.held.get(&0), locks.excluded.as_slice()), (Some(&me), &[][..]));
    // The end of the connection frees the lock; of whom nothing is noted, others say whether it is dead.
    directory.asked(0, 8, ConnectorMessage::Disconnect { connection }, &mut locks);
    assert!(locks.held.is_empty() && locks.excluded.is_empty());
}

/// Of two conversations between two nodes one may be lost, and the processes there go on.
#[test]
fn a_holder_is_not_dead_whose_node_has_connections_here() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let holder = LockHolder { node: 8, session: SessionId(3) };
    for (there, alive) in [(true, true), (false, false)] {
        if !there {
            let over = ConnectorMessage::Disconnect { connection };
            directory.asked(0, 8, over, &mut locks);
        }
        let question = SessionRequest::Alive { holder };
        assert_eq!(replies(directory.request(0, SESSION, question, &mut locks)), []);
        let told = replies(directory.owner_gone(0, 8, Loss::Dead, &mut locks));
        assert_eq!(told, [Reply::Alive(alive)]);
    }
}

#[test]
fn a_lock_that_cannot_be_freed_now_is_freed_later() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let ask = |directory: &mut Directory, locks: &mut Locks, request, operation| {
        ask_lock(directory, locks, (connection, request), (0, operation)).unwrap()
    };
    ask(&mut directory, &mut locks, 100, LockOperation::Take { attempt: 1 });
    locks.fails = true;
    ask(&mut directory, &mut locks, 101, LockOperation::Release { attempt: 1 });
    assert_eq!(locks.held.len(), 1);
    locks.fails = false;
    // Whoever asks for anything next.
    ask(&mut directory, &mut locks, 102, LockOperation::Release { attempt: 2 });
    assert!(locks.held.is_empty());
}

#[test]
fn a_host_holds_so_many_locks_of_another_and_no_more() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let take = |directory: &mut Directory, locks: &mut Locks, attempt: u64| {
        let operation = LockOperation::Take { attempt };
        ask_lock(directory, locks, (connection, 100 + attempt), (64 * attempt, operation))
    };
    for attempt in 1..=65_536 {
        assert!(take(&mut directory, &mut locks, attempt).is_ok());
    }
    assert_eq!(take(&mut directory, &mut locks, 65_537), Err(Refusal::TooMany(65_536)));
    let release = (64, LockOperation::Release { attempt: 1 });
    ask_lock(&mut directory, &mut locks, (connection, 99), release).unwrap();
    assert!(take(&mut directory, &mut locks, 65_538).is_ok());
    directory.connector_gone(0, 8, &mut locks);
    assert!(locks.held.is_empty());
}

#[test]
fn the_connections_of_a_host_lead_to_so_many_bytes_and_no_more() {
    let (mut directory, mut locks) = (directory_of(true), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let connect = |directory: &mut Directory, locks: &mut Locks, nth: u64| {
        let what = Question::Segment { id: 7, what: TargetKind::Segment };
        let (request, connection) = (nth, Handle(1000 + nth));
        let ask = ConnectorMessage::Question { request, connection, what };
        let outputs = directory.asked(0, 8, ask, locks);
        let answer = |output| match output {
            DirectoryAction::Send(Recipient::Tell(8, OwnerMessage::Answer { answer, .. }), _) => {
                Some(answer)
            }
            _ => None,
        };
        outputs.into_iter().find_map(answer).unwrap()
    };
    // A GiB, as the host exports less than a sixteenth of that; the segment has 512 KiB.
    let most = (1 << 30) / (1 << 19);
    for nth in 1..most {
        assert!(connect(&mut directory, &mut locks, nth).is_ok(), "{nth} of {most}");
    }
    assert_eq!(connect(&mut directory, &mut locks, most), Err(Refusal::NoSpace { free: 0 }));
    let refused =
        directory.refusals().into_iter().find(|(what, _)| *what == "bytes of connections");
    assert_eq!(refused, Some(("bytes of connections", 1)));
    assert!(directory.last_refusal().unwrap().contains("no memory is left"));
    directory.asked(0, 8, ConnectorMessage::Disconnect { connection }, &mut locks);
    assert!(connect(&mut directory, &mut locks, most).is_ok());
    assert!(connect(&mut directory, &mut locks, most + 1).is_err());
    directory.connector_gone(0, 8, &mut locks);
    assert!(
        connect(&mut directory, &mut locks, most + 2).is_ok(),
        "a host that begins anew has all its room"
    );
}
