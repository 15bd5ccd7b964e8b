//! When the memory of an empty segment is given.

use rackbus_segment::message::{
    ConnectorMessage, Question, Refusal, Reply, SegmentKind, SessionRequest, TargetKind,
};
use rackbus_segment::{Directory, DirectoryAction, Handle, ObjectId, Recipient};

use super::{Memories, SESSION, directory};

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
    assert!(matches!(ask(give), Err(Refusal::Illegal(_))), "somebody is connected still");
    let Ok((Reply::Created { segment, .. }, _)) = ask(request(SegmentKind::Shared, 8)) else {
        panic!("no segment")
    };
    let refused = ask(SessionRequest::GiveMemory { segment });
    assert!(matches!(refused, Err(Refusal::Illegal(_))), "it is not empty");
}
