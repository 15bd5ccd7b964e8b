//! What connections and locks become when a node is slow, gone or back.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rackbus_attach::{Refusal, SegmentOptions};
use rackbus_link::{Connect, Conversation, Hello, Link, LinkError, Purpose};
use rackbus_memory::packets::MAX_PACKET;
use rackbus_memory::{AdaptiveSpin, AsHandle, Handles, Packets, Stream, StreamError};
use rackbus_segment::message::{
    ConnectorMessage, LockHolder, LockOperation, LockRequest, OwnerMessage, Question, Reply,
    SessionRequest, TargetKind, decode, encode,
};
use rackbus_segment::{Handle, SessionId};

use crate::common::segments::{ALPHA, BETA, Hosts, shm};
use crate::support::{LIMIT, SOON, Stranger, answered, refusal, until};

/// A way to nodes that are too slow.
struct Slow;

impl Connect for Slow {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, _: &str, hello: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        Err(LinkError::Broken { peer: hello.to.clone(), cause: StreamError::TimedOut })
    }
}

#[test]
fn only_a_dead_node_makes_the_holders_of_locks_dead() {
    let holder = LockHolder { node: BETA, session: SessionId(1) };
    let slow = Hosts::alone(ALPHA, |_| Arc::new(Slow));
    assert!(slow.session(ALPHA).alive(holder).unwrap());
    let rack = Hosts::alone(ALPHA, |run_dir| Arc::new(shm(run_dir)));
    let session = rack.session(ALPHA);
    assert!(!session.alive(holder).unwrap(), "there has never been such a node");
    // It has no room for the conversation that it is passed.
    let folder = rack.folder().join("beta");
    std::fs::create_dir_all(&folder).unwrap();
    let listener = shm(rack.folder()).listen("beta").unwrap();
    let caller = std::sync::Mutex::new(listener);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let incoming = caller.lock().unwrap().accept().unwrap().hear().unwrap();
            let stream = incoming.accept().unwrap();
            let mut handles = Handles::new();
            stream.receive(&mut [0], &mut handles).unwrap();
        });
        assert!(session.alive(holder).unwrap());
    });
    // Left by a node that was killed: nobody listens there.
    std::fs::rename(folder.join("link.sock"), folder.join("kept")).unwrap();
    drop(caller);
    std::fs::rename(folder.join("kept"), folder.join("link.sock")).unwrap();
    assert!(!session.alive(holder).unwrap());
}

/// Beta's node, a connector's, at the door of alpha's.
fn at_the_door(rack: &Hosts) -> Arc<dyn Conversation> {
    let hello = Hello {
        versions: rackbus_link::VERSIONS,
        rack: "test".into(),
        from: "beta".into(),
        to: "alpha".into(),
        service: Purpose::Segments,
    };
    let link = shm(rack.folder());
    link.connect(&link.address("alpha"), &hello).unwrap()
}

/// The former conversation ends before, while and after the next one begins.
#[test]
fn a_node_that_is_back_at_once_keeps_what_it_connects_to() {
    let rack = Hosts::alone(ALPHA, |run_dir| Arc::new(shm(run_dir)));
    let alpha = rack.session(ALPHA);
    let segment = alpha.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let is_connected = || alpha.segments().unwrap()[0].connections == [BETA];
    let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
    let mut before: Option<Packets> = None;
    for request in 1..1000 {
        let connection = Handle(request);
        let stream = at_the_door(&rack);
        let (next, theirs) = Packets::pair().unwrap();
        assert!(before.is_none() || is_connected(), "its connection was lost: {request}");
        std::thread::scope(|scope| {
            let before = before.take();
            scope.spawn(move || {
                (0..request % 8 * 200).for_each(|_| std::hint::spin_loop());
                drop(before);
            });
            (0..request / 8 % 8 * 200).for_each(|_| std::hint::spin_loop());
            stream.send(&[&[0]], &[theirs.as_handle()]).unwrap();
            drop(theirs);
            let what = Question::Segment { id: 7, what: TargetKind::Segment };
            next.send(&encode(&ConnectorMessage::Question { request, connection, what }), &[])
                .unwrap();
            let packet = next.receive(&mut buffer, &mut spin, None).unwrap();
            let answer = decode(&buffer[..packet.length]);
            assert!(
                matches!(answer, Some(OwnerMessage::Answer { answer: Ok(_), .. })),
                "{answer:?}"
            );
        });
        until(is_connected);
        before = Some(next);
    }
}

/// Beta's node, an owner's, that ends each conversation soon and takes the next one at once. It
/// keeps the numbers of the segments that it has answered for.
#[derive(Default)]
struct Restless(Arc<Mutex<BTreeSet<u32>>>);

impl Connect for Restless {
    fn address(&self, host: &str) -> String {
        host.to_owned()
    }

    fn connect(&self, _: &str, _: &Hello) -> Result<Arc<dyn Conversation>, LinkError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answered = self.0.clone();
        std::thread::spawn(move || {
            let mut handles = Handles::new();
            theirs.receive(&mut [0], &mut handles).unwrap();
            let packets = handles.packets().unwrap();
            let (mut buffer, mut spin) = (vec![0; MAX_PACKET], AdaptiveSpin::default());
            for _ in 0..3 {
                let Ok(packet) = packets.receive(&mut buffer, &mut spin, None) else { return };
                let asked = decode(&buffer[..packet.length]);
                let Some(ConnectorMessage::Question {
                    request,
                    what: Question::Segment { id, .. },
                    ..
                }) = asked
                else {
                    continue;
                };
                let answer = OwnerMessage::Answer { request, answer: Err(Refusal::NoSuchSegment) };
                answered.lock().unwrap().insert(id);
                packets.send(&encode(&answer), &[]).unwrap();
            }
            // What was answered arrives: a socket with unread messages would take it away again.
            packets.shut_down();
            while packets.receive(&mut buffer, &mut spin, None).is_ok() {}
        });
        Ok(Arc::new(ours))
    }
}

#[test]
fn a_request_to_a_node_that_is_back_at_once_is_answered() {
    const ASKERS: u32 = 4;
    let link = Arc::new(Restless::default());
    let rack = Hosts::alone(ALPHA, |_| link.clone());
    let unanswered = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for asker in 0..ASKERS {
            let (session, unanswered, link) = (rack.session(ALPHA), &unanswered, &link);
            scope.spawn(move || {
                let begun = Instant::now();
                // On a busy machine, few are answered before their conversation ends.
                let is_enough = || link.0.lock().unwrap().len() > 100;
                for nth in 0.. {
                    if nth >= 1000 && (is_enough() || begun.elapsed() > SOON.unwrap()) {
                        break;
                    }
                    let id = nth * ASKERS + asker + 1;
                    match refusal(session.connect(BETA, id, 5000)) {
                        Refusal::NoSuchSegment => {}
                        // It was lost with its conversation.
                        Refusal::NotResponding => drop(unanswered.lock().unwrap().insert(id)),
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    let (answered, unanswered) = (link.0.lock().unwrap(), unanswered.into_inner().unwrap());
    let both = answered.intersection(&unanswered).count();
    assert_eq!(both, 0, "beta answered {}, and was said not to respond", answered.len());
    assert!(answered.len() > 100, "{} were answered", answered.len());
}

/// Which a process may say by itself: its node has to know that it is too long for another one.
#[test]
fn a_question_that_is_too_long_for_another_node_leaves_their_conversation_alone() {
    let rack = Hosts::start(|link| Arc::new(link));
    let (alpha, beta) = (rack.session(ALPHA), rack.session(BETA));
    let segment = beta.create_segment(&SegmentOptions::shared(7, 4096)).unwrap();
    segment.set_available().unwrap();
    let others = answered(|| alpha.connect(BETA, 7, LIMIT)).unwrap();
    let stranger = Stranger::attach(&rack, ALPHA);
    let keeper = stranger.connect(BETA, 7);
    let arrive = |count| {
        let party = LockHolder { node: ALPHA, session: SessionId(3) };
        let operation = LockOperation::Arrive { parties: vec![party; count], passed: None };
        SessionRequest::Lock { keeper, request: LockRequest { offset: 0, operation } }
    };
    let fits = |count: &usize| encode(&arrive(*count)).len() <= MAX_PACKET;
    let most = (MAX_PACKET / 2 - 100..).take_while(fits).last().unwrap();
    let told = stranger.ask(&arrive(most), &[]);
    assert!(matches!(told, Some(Reply::Refused(Refusal::TooMany(_)))), "{told:?}");
    let next = answered(|| alpha.connect(BETA, 7, LIMIT)).unwrap();
    assert_eq!(beta.segments().unwrap()[0].connections.len(), 3, "one was lost");
    drop((others, next));
}
