//! When the memory of an empty segment is given.

use rackbus_segment::message::{
    ConnectionChange, ConnectorMessage, OwnerMessage, Question, Refusal, Reply, SegmentAccess,
    SegmentKind, SessionRequest, TargetKind,
};
use rackbus_segment::{Directory, DirectoryAction, Handle, ObjectId, Recipient};

use super::{Memories, SESSION, directory, directory_at};

/// The memory that a request is answered with, or the refusal.
fn asked(
    directory: &mut Directory,
    memories: &mut Memories,
    request: SessionRequest,
) -> Result<(Reply, Vec<ObjectId>), Refusal> {
    let outputs = directory.request(0, SESSION, request, memories);
    let answer = outputs.into_iter().find_map(|output| match output {
        DirectoryAction::Send(Recipient::Reply(SESSION, reply), attached) => {
            Some((reply, attached.iter().map(|it| it.object).collect()))
        }
        _ => None,
    });
    match answer.unwrap() {
        (Reply::Refused(refusal), _) => Err(refusal),
        answer => Ok(answer),
    }
}

/// A process that could not map it asks for it again, before others use it.
#[test]
fn memory_is_given_again_until_others_use_it() {
    let (mut directory, mut memories) = (directory(), Memories::default());
    let request = |kind, id| SessionRequest::CreateSegment { id, choose: false, size: 4096, kind };
    let mut ask = |request| asked(&mut directory, &mut memories, request);
    let Ok((Reply::Created { segment, .. }, none)) = ask(request(SegmentKind::Empty, 7)) else {
        panic!("no segment")
    };
    assert_eq!(none, []);
    let give = SessionRequest::GiveMemory { segment };
    let Ok((Reply::Memory, first)) = ask(give.clone()) else { panic!("no memory") };
    assert_eq!(ask(give.clone()), Ok((Reply::Memory, first.clone())));
    // Once others may use it, its bytes are not the process' alone.
    ask(SessionRequest::SetAvailable { segment }).unwrap();
    assert!(matches!(ask(give.clone()), Err(Refusal::Illegal(_))));
    let what = Question::Segment { id: 7, what: TargetKind::Segment };
    let connect = ConnectorMessage::Question { request: 1, connection: Handle(1), what };
    directory.asked(0, 8, connect, &mut memories);
    let mut ask = |request| asked(&mut directory, &mut memories, request);
    let how = rackbus_segment::message::Withdrawal::Quiet;
    ask(SessionRequest::SetUnavailable { segment, how }).unwrap();
    let again = ask(SessionRequest::SetUnavailable { segment, how });
    assert!(matches!(again, Err(Refusal::Illegal(_))), "it is not available any more");
    assert!(matches!(ask(give), Err(Refusal::Illegal(_))), "somebody is connected still");
    let Ok((Reply::Created { segment, .. }, _)) = ask(request(SegmentKind::Shared, 8)) else {
        panic!("no segment")
    };
    let refused = ask(SessionRequest::GiveMemory { segment });
    assert!(matches!(refused, Err(Refusal::Illegal(_))), "it is not empty");
}

/// Those who lose no right are not told that they keep what they had last: it is emptied for the one that does.
#[test]
fn a_segment_that_ends_while_it_is_taken_from_one_host_is_revoked_for_all() {
    let hosts = [(4, "alpha"), (8, "beta"), (12, "gamma")];
    let mut directory = directory_at(&hosts, true, 1 << 20);
    let (mut memories, kind) = (Memories::default(), SegmentKind::Shared);
    let create = SessionRequest::CreateSegment { id: 7, choose: false, size: 4096, kind };
    let Ok((Reply::Created { segment, .. }, memory)) = asked(&mut directory, &mut memories, create)
    else {
        panic!("no segment")
    };
    asked(&mut directory, &mut memories, SessionRequest::SetAvailable { segment }).unwrap();
    for (node, connection) in [(8, Handle(1)), (12, Handle(2))] {
        let what = Question::Segment { id: 7, what: TargetKind::Segment };
        let connect = ConnectorMessage::Question { request: 1, connection, what };
        directory.asked(0, node, connect, &mut memories);
    }
    let (node, share) = (Some(8), SegmentAccess::None);
    let withdraw = SessionRequest::SetShare { first: 7, last: 7, node, share };
    directory.request(0, SESSION, withdraw, &mut memories);
    let ended = directory.closed(0, SESSION, &mut memories);
    let told = ended.iter().find_map(|it| match it {
        DirectoryAction::Send(Recipient::Tell(12, OwnerMessage::Remote { change, .. }), _) => {
            Some(*change)
        }
        _ => None,
    });
    let empties = |it: &DirectoryAction| matches!(it, DirectoryAction::Empty { object, .. } if memory.contains(object));
    assert!(ended.iter().any(empties), "{ended:?}");
    assert_eq!(told, Some(ConnectionChange::Revoked), "{ended:?}");
}
