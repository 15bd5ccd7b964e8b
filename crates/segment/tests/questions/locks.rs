//! What parties of another host do with locks and barriers in this host's memory.

use std::collections::BTreeMap;

use rackbus_segment::directory::{LinePart, LockAccess, LockState, Loss};
use rackbus_segment::message::{
    BarrierPhase, ConnectorMessage, LockHolder, LockOperation, LockReply, LockRequest,
    OwnerMessage, PeerReply, Question, Refusal, Reply, SegmentKind, SessionRequest, TargetKind,
};
use rackbus_segment::{
    Directory, DirectoryAction, Handle, ObjectId, Objects, Recipient, SessionId,
};

use super::{SESSION, directory, replies};

/// Memory with locks that are always free, and barriers at which nobody waits; what was done there.
#[derive(Default)]
pub struct Locks {
    made: u64,
    held: BTreeMap<u64, LockHolder>,
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
pub fn with_connection(directory: &mut Directory, locks: &mut Locks) -> Handle {
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

/// A party that connected anew may have arrived by its former connection, so the barrier moves on before it arrives by the
/// new one. That arrival has to count, also when the question before it came twice.
#[test]
fn a_question_about_a_barrier_that_comes_again_keeps_nobody_from_arriving() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let me = LockHolder { node: 8, session: SessionId(3) };
    locks.phase = 3;
    arrive(&mut directory, &mut locks, (connection, 100), (&[me], None));
    locks.phase = 4;
    for (request, passed) in (101..).zip([None, Some(3)]) {
        arrive(&mut directory, &mut locks, (connection, request), (&[me], passed));
    }
    assert_eq!(locks.arrived, [None, None, Some(3)], "waits for ever");
}

#[test]
fn a_process_that_is_cut_off_before_it_arrives_at_a_barrier_is_not_waited_for() {
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

/// A process of the host waits for it in memory, and asks nobody.
#[test]
fn a_lock_that_cannot_be_freed_now_is_freed_after_a_while() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    for cut in [false, true] {
        let take = (0, LockOperation::Take { attempt: 1 + u64::from(cut) });
        let request = 100 + 10 * u64::from(cut);
        ask_lock(&mut directory, &mut locks, (connection, request), take).unwrap();
        locks.fails = true;
        match cut {
            true => drop(directory.connector_gone(0, 8, &mut locks)),
            false => {
                let release = (0, LockOperation::Release { attempt: 1 });
                ask_lock(&mut directory, &mut locks, (connection, request + 1), release).unwrap();
            }
        }
        for _ in 0..3 {
            let due = directory.next_tick().expect("it is tried again");
            directory.tick(due, &mut locks);
            assert_eq!(locks.held.len(), 1);
        }
        locks.fails = false;
        let due = directory.next_tick().unwrap();
        directory.tick(due, &mut locks);
        assert!(locks.held.is_empty());
        assert_eq!(directory.next_tick(), None);
    }
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

/// Most barriers of a program have the same parties, which each arrival names.
#[test]
fn many_barriers_of_the_same_parties_leave_room_for_locks() {
    let (mut directory, mut locks) = (directory(), Locks::default());
    let connection = with_connection(&mut directory, &mut locks);
    let parties: Vec<LockHolder> =
        (0..64).map(|session| LockHolder { node: 8, session: SessionId(session) }).collect();
    let arrive =
        |directory: &mut Directory, locks: &mut Locks, nth: u64, parties: &[LockHolder]| {
            let arrive = LockOperation::Arrive { parties: parties.to_vec(), passed: None };
            ask_lock(directory, locks, (connection, 100 + nth), (64 * nth, arrive))
        };
    for nth in 0..4096 {
        let told = arrive(&mut directory, &mut locks, nth, &parties);
        assert!(told.is_ok(), "{nth}: {told:?}");
    }
    let take = (1 << 18, LockOperation::Take { attempt: 1 });
    ask_lock(&mut directory, &mut locks, (connection, 10_000), take).unwrap();
    // Other parties each time fill much memory with few arrivals.
    let fills = (0..4096).find(|nth| {
        let parties: Vec<LockHolder> = (0..1024)
            .map(|party| LockHolder { node: 8, session: SessionId(1000 + 1024 * nth + party) })
            .collect();
        arrive(&mut directory, &mut locks, 20_000 + nth, &parties).is_err()
    });
    assert!(fills.is_some_and(|nth| (32..=64).contains(&nth)), "{fills:?}");
    // All of it is free again with the connection.
    directory.connector_gone(0, 8, &mut locks);
    let what = Question::Segment { id: 7, what: TargetKind::Segment };
    directory.asked(0, 8, ConnectorMessage::Question { request: 1, connection, what }, &mut locks);
    for attempt in 1..=65_536 {
        let take = (64 * attempt, LockOperation::Take { attempt });
        let told = ask_lock(&mut directory, &mut locks, (connection, 100_000 + attempt), take);
        assert!(told.is_ok(), "{attempt}: {told:?}");
    }
}
