//! What a session is told when another host's node says nothing.

use rackbus_fabric::FabricHandle;
use rackbus_segment::directory::{DirectorySettings, HostRange, LinePart, Loss};
use rackbus_segment::message::{
    LockHolder, Refusal, Reply, SegmentKind, SessionRequest, TargetKind, VERSION, Withdrawal,
};
use rackbus_segment::{Directory, DirectoryAction, ObjectId, Objects, Recipient, SessionId};

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
    let range = HostRange { base: 1 << 32, size: 1 << 20 };
    let hosts = [(4, "alpha".to_owned()), (8, "beta".to_owned())].into();
    let rules = Default::default();
    let (ranges, machines) = (vec![(4, range)], false);
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
