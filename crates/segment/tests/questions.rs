//! What a session is told when another host's node says nothing.

#[path = "questions/bounds.rs"]
mod bounds;
#[path = "questions/locks.rs"]
mod locks;
#[path = "questions/memory.rs"]
mod memory;

use locks::{Locks, with_connection};
use rackbus_fabric::FabricHandle;
use rackbus_segment::directory::{DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{
    ConnectorMessage, InterruptKind, LockHolder, Notice, OwnerMessage, PeerReply, Question,
    Refusal, Reply, SegmentAccess, SegmentKind, SessionEvent, SessionRequest, TargetKind, VERSION,
    Withdrawal,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, NodeId, ObjectId, Objects, Recipient, SessionId,
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
    directory_at(&[(4, "alpha"), (8, "beta")], machines, size)
}

/// Of the first of these hosts.
fn directory_of_hosts(nodes: &[NodeId]) -> Directory {
    let names: Vec<String> = nodes.iter().map(|node| format!("host{node}")).collect();
    let hosts: Vec<_> = nodes.iter().copied().zip(names.iter().map(String::as_str)).collect();
    directory_at(&hosts, false, 1 << 20)
}

fn directory_at(hosts: &[(NodeId, &str)], machines: bool, size: u64) -> Directory {
    let range = HostRange { base: 1 << 32, size };
    let hosts = hosts.iter().map(|(node, name)| (*node, (*name).to_owned())).collect();
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

/// Once what was made for it stayed until its session ended.
#[test]
fn what_a_reply_gives_that_cannot_be_sent_is_given_back() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let (kind, size, what) = (SegmentKind::Shared, 4096, TargetKind::Segment);
    let create = |id| SessionRequest::CreateSegment { id, choose: false, size, kind };
    let connect = SessionRequest::Connect { node: 4, id: 7, timeout_ms: 1000, what };
    let one = |outputs| replies(outputs).into_iter().next().unwrap();
    let made = one(directory.request(0, SESSION, create(7), &mut memories));
    let Reply::Created { segment, .. } = made else { panic!("{made:?}") };
    directory.request(0, SESSION, SessionRequest::SetAvailable { segment }, &mut memories);
    let before = directory.statistics();
    let sizes = directory.sizes().map(|(what, bytes)| (what, bytes > 0));
    let there =
        [("segments", true), ("groups", false), ("page extents", false), ("exported", true)];
    assert_eq!((sizes, directory.sizes()[0].1), (there, 4096));
    for request in [create(8), connect, SessionRequest::Allocate { size }] {
        let reply = one(directory.request(0, SESSION, request.clone(), &mut memories));
        assert_ne!(directory.statistics(), before, "{request:?}");
        let why = || "no descriptor is left".to_owned();
        let told = one(directory.unsent(0, SESSION, &reply, why(), &mut memories));
        assert_eq!(told, Reply::Refused(Refusal::System(why())));
        assert_eq!(directory.statistics(), before, "{request:?}");
    }
}

/// An owner may have made a connection whose memory it could not send.
#[test]
fn a_connection_that_failed_at_its_owner_or_was_answered_by_something_else_is_ended_there() {
    let failed = Err(Refusal::System("no descriptor is left".into()));
    for answer in [failed, Ok(PeerReply::Alive(true))] {
        let (mut directory, mut memories) = (directory(), Memories::default());
        let what = TargetKind::Segment;
        let connect = SessionRequest::Connect { node: 8, id: 7, timeout_ms: 1000, what };
        let before = directory.statistics();
        let asked = directory.request(0, SESSION, connect, &mut memories);
        let asks = |outputs: Vec<DirectoryAction>| {
            let ask = |output| match output {
                DirectoryAction::Send(Recipient::Ask(8, ask), _) => Some(ask),
                _ => None,
            };
            outputs.into_iter().find_map(ask)
        };
        let Some(ConnectorMessage::Question { request, connection, .. }) = asks(asked) else {
            panic!()
        };
        let tell = OwnerMessage::Answer { request, answer };
        let done = directory.told(0, 8, tell, Vec::new(), &mut memories);
        assert!(matches!(replies(done.clone())[..], [Reply::Refused(_)]), "{done:?}");
        assert_eq!(asks(done), Some(ConnectorMessage::Disconnect { connection }));
        assert_eq!(directory.statistics(), before);
    }
}

/// The node answers for it, when it has read all that it has in common with the other machine.
#[test]
fn a_connection_of_another_machine_is_not_ended_because_a_move_takes_long() {
    let hosts = [(4, "alpha"), (8, "beta"), (12, "gamma")];
    let (mut directory, mut memories) = (directory_at(&hosts, true, 1 << 20), Memories::default());
    let (kind, size) = (SegmentKind::Shared, 4096);
    let create = SessionRequest::CreateSegment { id: 7, choose: false, size, kind };
    let made = replies(directory.request(0, SESSION, create, &mut memories));
    let [Reply::Created { segment, .. }] = made[..] else { panic!("{made:?}") };
    directory.request(0, SESSION, SessionRequest::SetAvailable { segment }, &mut memories);
    let connection = Handle(9);
    for node in [8, 12] {
        let what = Question::Segment { id: 7, what: TargetKind::Segment };
        let ask = ConnectorMessage::Question { request: 1, connection, what };
        directory.asked(0, node, ask, &mut memories);
    }
    let (share, node) = (SegmentAccess::None, Some(8));
    let withdraw = SessionRequest::SetShare { first: 7, last: 7, node, share };
    let begun = directory.request(0, SESSION, withdraw, &mut memories);
    let told = |outputs: &[DirectoryAction]| -> Vec<OwnerMessage> {
        let tell = |output: &DirectoryAction| match output {
            DirectoryAction::Send(Recipient::Tell(12, tell), _) => Some(tell.clone()),
            _ => None,
        };
        outputs.iter().filter_map(tell).collect()
    };
    let freeze = told(&begun);
    let [OwnerMessage::Freeze { ticket, .. }] = freeze[..] else { panic!("{begun:?}") };
    let frozen = SessionEvent::Freeze { ticket, keeper: segment, offset: 0, length: size };
    assert!(begun.contains(&DirectoryAction::Send(Recipient::Event(SESSION, frozen), vec![])));
    let notice = Notice::Frozen { ticket, keeper: segment };
    directory.noticed(0, SESSION, notice, &mut memories);
    for _ in 0..10 {
        let due = directory.next_tick().unwrap();
        assert_eq!(directory.tick(due, &mut memories), []);
        assert!(directory.next_tick() > Some(due), "asked again at once");
    }
    let answer = ConnectorMessage::Frozen { ticket, connection };
    let copies = directory.asked(0, 12, answer, &mut memories);
    assert!(matches!(copies[..], [DirectoryAction::Copy { .. }]), "{copies:?}");
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
        let ranges = [(to.connection, 8..16), (to.connection, 64..72), (Handle(u64::MAX), 0..8)];
        let keepers: Vec<_> = directory.keepers(node, ranges).into_iter().collect();
        let both = [segment, to.connection].map(|keeper| ((SESSION, keeper), 8..72));
        assert_eq!(keepers, both);
        found.push(memory);
    }
    assert_ne!(found[0], found[1]);
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

/// Lines can be made, and nothing else.
struct Lines(u64);

impl Objects for Lines {
    fn memory(&mut self, _size: u64) -> Result<ObjectId, String> {
        Err("no memory".into())
    }
    fn event(&mut self) -> Result<ObjectId, String> {
        self.line(LinePart::Doorbell)
    }
    fn line(&mut self, _part: LinePart) -> Result<ObjectId, String> {
        self.0 += 1;
        Ok(ObjectId(self.0))
    }
    fn rung(&self, _line: ObjectId) -> Result<u32, String> {
        Ok(0)
    }
}

/// An interrupt of this host with a session of its own, and the connecting of senders to it.
struct Receiving(Directory, Lines);

const DATA: InterruptKind = InterruptKind::Data;

impl Receiving {
    fn new() -> Receiving {
        let mut receiving = Receiving(directory_of_hosts(&[4, 8, 12, 16, 20, 24]), Lines(0));
        let create = SessionRequest::CreateInterrupt { kind: DATA, number: Some(7), shared: false };
        receiving.0.request(0, SESSION, create, &mut receiving.1);
        receiving
    }

    fn connect(&mut self, node: NodeId, nth: u64) -> Result<(), Refusal> {
        let what = Question::Interrupt { kind: DATA, number: 7 };
        let ask = ConnectorMessage::Question { request: nth, connection: Handle(nth), what };
        let outputs = self.0.asked(0, node, ask, &mut self.1);
        let answer = |output| match output {
            DirectoryAction::Send(Recipient::Tell(to, OwnerMessage::Answer { answer, .. }), _) => {
                Some(answer).filter(|_| to == node)
            }
            _ => None,
        };
        outputs.into_iter().find_map(answer).unwrap().map(drop)
    }

    fn disconnect(&mut self, node: NodeId, nth: u64) {
        let over = ConnectorMessage::Disconnect { connection: Handle(nth) };
        self.0.asked(0, node, over, &mut self.1);
    }
}

/// Large memory takes its time to come from another machine.
#[test]
fn a_connection_that_was_answered_is_waited_for_while_its_memory_comes() {
    let mut slow = directory_of(true);
    let what = TargetKind::Segment;
    let connect = SessionRequest::Connect { node: 8, id: 7, timeout_ms: 3000, what };
    let asked = slow.request(0, SESSION, connect, &mut Nothing);
    let connection = asked.iter().find_map(|output| match output {
        DirectoryAction::Send(
            Recipient::Ask(8, ConnectorMessage::Question { connection, .. }),
            _,
        ) => Some(*connection),
        _ => None,
    });
    slow.is_being_completed(2_999, 8, connection.unwrap());
    assert_eq!(replies(slow.tick(10_000, &mut Nothing)), []);
    // Before the process takes its node for dead.
    let due = slow.next_tick().unwrap();
    assert!(due <= 12_000, "{due} ms");
    let told = replies(slow.tick(due, &mut Nothing));
    assert_eq!(told, [Reply::Refused(Refusal::NotResponding)]);
}
