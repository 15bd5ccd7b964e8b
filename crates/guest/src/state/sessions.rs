//! Sessions: a guest's processes, each with its conversations with the node.

use std::collections::VecDeque;

use rackbus_segment::guest::{
    EXCHANGE, EXCHANGE_BYTES, GREETING, GuestChannel, GuestFrame, MAX_FRAME, MAX_MESSAGE,
    exchanged, is_refused,
};
use serde::{Deserialize, Serialize};

use super::keepers::{FileKeeper, MessageMeaning, RequestSubject};
use super::objects::GuestFile;
use super::{
    DescriptorKind, GuestAction, GuestState, MESSAGE_WAIT, MOST_POSTS, MOST_SESSIONS, MOST_UNREAD,
    MOST_WAITING, Parked, PendingRequest, Received,
};
use crate::fuse::{self, Errno, RequestHead};

/// A session of a process in the guest with the host's node.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GuestSession {
    user: (u32, u32),
    /// Its place among the sessions that there may be.
    slot: usize,
    phase: Phase,
    /// The page that proves that stores are seen.
    page: Option<u64>,
    calls: Queue,
    events: Queue,
    /// How many messages of the node's there were in each conversation: calls and events.
    received: [u64; 2],
    /// Requests that the node has not answered.
    asked: VecDeque<OpenRequest>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct OpenRequest {
    /// Whether anybody reads its reply.
    read: bool,
    subject: RequestSubject,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// Until the node is connected to, the guest's `open` waits.
    Connecting(PendingRequest),
    Open,
    Over,
}

/// Messages that wait for the process, or the process that waits for one.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
    parked: Option<Parked>,
}

impl Queue {
    fn push(&mut self, frame: Vec<u8>, actions: &mut Vec<GuestAction>) {
        let parked = self.parked.take();
        if let Some(parked) = parked.filter(|it| it.has_room(frame.len())) {
            actions.push(parked.answer(&frame));
            return;
        }
        // An exchange without an answer: that is to be read.
        actions.extend(parked.map(|it| it.answer(&[])));
        self.bytes += frame.len();
        self.waiting.push_back(frame);
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        let frame = self.waiting.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }

    fn is_full(&self) -> bool {
        self.waiting.len() >= MOST_WAITING.0 || self.bytes >= MOST_WAITING.1
    }

    fn end(&mut self, actions: &mut Vec<GuestAction>) {
        actions.extend(self.parked.take().map(|parked| parked.fail(Errno::NOTCONN)));
    }
}

impl GuestSession {
    fn queue(&mut self, place: GuestChannel) -> Option<&mut Queue> {
        match place {
            GuestChannel::Calls => Some(&mut self.calls),
            GuestChannel::Events => Some(&mut self.events),
            GuestChannel::Proof | GuestChannel::End | GuestChannel::Posts => None,
        }
    }

    /// Bytes of messages that wait for the process.
    pub(super) fn unread(&self) -> usize {
        self.calls.bytes + self.events.bytes
    }

    pub(super) fn parked(&self) -> impl Iterator<Item = &Parked> {
        self.calls.parked.iter().chain(&self.events.parked)
    }

    pub(super) fn answer_parked(
        &mut self,
        which: impl Fn(&Parked) -> bool,
        actions: &mut Vec<GuestAction>,
    ) {
        for queue in [&mut self.calls, &mut self.events] {
            actions.extend(queue.parked.take_if(|it| which(it)).map(|parked| parked.answer(&[])));
        }
    }

    /// No more is said in it; what waits can still be read.
    fn close(&mut self, actions: &mut Vec<GuestAction>) {
        if let Phase::Connecting(PendingRequest { token, unique }) = self.phase {
            let bytes = fuse::failed(unique, Errno::NOTCONN);
            actions.push(GuestAction::Answer { token, bytes });
        }
        self.phase = Phase::Over;
        self.calls.end(actions);
        self.events.end(actions);
    }

    pub(super) fn end(mut self, session: u64, actions: &mut Vec<GuestAction>) {
        self.close(actions);
        actions.push(GuestAction::End { session });
    }
}

impl GuestState {
    pub(super) fn open_session(
        &mut self,
        asked: PendingRequest,
        head: RequestHead,
        actions: &mut Vec<GuestAction>,
    ) -> Result<(), Errno> {
        let taken: Vec<usize> = self.sessions.values().map(|it| it.slot).collect();
        let slot = (0..MOST_SESSIONS).find(|slot| !taken.contains(slot)).ok_or(Errno::NFILE)?;
        let own = self.sessions.values().filter(|it| it.user.0 == head.user).count();
        // Not the guest's administrator: others are to have sessions as well.
        if head.user != 0 && own >= MOST_SESSIONS / 2 {
            return Err(Errno::NFILE);
        }
        let session = self.number();
        let it = GuestSession {
            user: (head.user, head.group),
            slot,
            phase: Phase::Connecting(asked),
            page: None,
            calls: Queue::default(),
            events: Queue::default(),
            received: [0; 2],
            asked: VecDeque::new(),
        };
        self.sessions.insert(session, it);
        actions.push(GuestAction::Connect { session });
        Ok(())
    }

    /// The node was connected to, and there is a page to prove with; or it was not. The page's number,
    /// unless the session is over already.
    pub fn connected(
        &mut self,
        session: u64,
        page: Option<DescriptorKind>,
    ) -> (Option<u64>, Vec<GuestAction>) {
        let mut actions = Vec::new();
        let Some(Phase::Connecting(asked)) = self.sessions.get(&session).map(|it| it.phase) else {
            return (None, vec![GuestAction::End { session }]);
        };
        let user = self.sessions.get(&session).map_or(0, |it| it.user.0);
        let full = !self.has_room(user, 1);
        let number = self.number();
        let it = self.sessions.get_mut(&session).zip(page.filter(|_| !full));
        let Some((it, kind)) = it else {
            self.release_session(session, &mut actions);
            return (None, actions);
        };
        (it.phase, it.page) = (Phase::Open, Some(number));
        let greeting =
            GuestFrame { objects: vec![number], lost: false, message: GREETING.to_vec() }.encode();
        it.calls.push(greeting, &mut actions);
        self.objects.insert(number, GuestFile::new(session, it.user, FileKeeper::default(), kind));
        let bytes = fuse::opened(asked.unique, session, false);
        actions.push(GuestAction::Answer { token: asked.token, bytes });
        (Some(number), actions)
    }

    pub(super) fn read_session(
        &mut self,
        now: u64,
        (asked, user): (PendingRequest, u32),
        handle: u64,
        (offset, size): (u64, u32),
    ) -> Result<Option<Vec<u8>>, Errno> {
        let session = self.sessions.get_mut(&handle).ok_or(Errno::BADF)?;
        let phase = session.phase;
        let queue =
            GuestChannel::at(offset).and_then(|place| session.queue(place)).ok_or(Errno::INVAL)?;
        if (size as usize) < MAX_FRAME {
            return Err(Errno::INVAL);
        }
        if let Some(frame) = queue.pop() {
            return Ok(Some(fuse::data(asked.unique, &frame)));
        }
        if phase == Phase::Over {
            return Err(Errno::NOTCONN);
        }
        if queue.parked.is_some() {
            return Err(Errno::AGAIN);
        }
        queue.parked = Some(Parked { asked, user, until: now + MESSAGE_WAIT, exchange: false });
        Ok(None)
    }

    pub(super) fn write_session(
        &mut self,
        asked: PendingRequest,
        handle: u64,
        (offset, data): (u64, &[u8]),
        actions: &mut Vec<GuestAction>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let session = self.sessions.get_mut(&handle).ok_or(Errno::BADF)?;
        let place = GuestChannel::at(offset).ok_or(Errno::INVAL)?;
        let posted = place == GuestChannel::Posts;
        match place {
            GuestChannel::End => {
                session.close(actions);
                actions.push(GuestAction::End { session: handle });
                self.end_memory_of(handle, actions);
            }
            _ if session.phase != Phase::Open => return Err(Errno::NOTCONN),
            GuestChannel::Proof => {
                let word = data.try_into().map(u64::from_le_bytes).map_err(|_| Errno::INVAL)?;
                let object = session.page.ok_or(Errno::INVAL)?;
                actions.push(GuestAction::Prove { object, word, asked });
                return Ok(None);
            }
            GuestChannel::Calls | GuestChannel::Events | GuestChannel::Posts => {
                if data.is_empty() || data.len() > MAX_MESSAGE {
                    return Err(Errno::INVAL);
                }
                let place = if place == GuestChannel::Events { place } else { GuestChannel::Calls };
                if place == GuestChannel::Calls {
                    if is_refused(data) {
                        return Err(Errno::ACCES);
                    }
                    let most = if posted { MOST_POSTS } else { MOST_WAITING.0 };
                    if session.asked.len() >= most {
                        return Err(Errno::AGAIN);
                    }
                    let subject = RequestSubject::of(data);
                    session.asked.push_back(OpenRequest { read: !posted, subject });
                }
                let message = data.to_vec();
                actions.push(GuestAction::Send { session: handle, place, message });
            }
        }
        Ok(Some(fuse::written(asked.unique, data.len() as u32)))
    }

    /// A request is written and its reply is waited for; what is longer than that is written and read.
    pub(super) fn exchange(
        &mut self,
        now: u64,
        (asked, user): (PendingRequest, u32),
        (handle, command): (u64, u32),
        (data, room): (&[u8], u32),
        actions: &mut Vec<GuestAction>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        if command != EXCHANGE {
            return Err(Errno::NOTTY);
        }
        let message = exchanged(data).ok_or(Errno::INVAL)?;
        if (room as usize) < EXCHANGE_BYTES {
            return Err(Errno::INVAL);
        }
        let session = self.sessions.get(&handle).ok_or(Errno::BADF)?;
        // Another message would be taken for the reply.
        if session.calls.parked.is_some() || !session.calls.waiting.is_empty() {
            return Err(Errno::AGAIN);
        }
        let place = GuestChannel::Calls.offset();
        self.write_session(asked, handle, (place, message), actions)?;
        let session = self.sessions.get_mut(&handle).ok_or(Errno::BADF)?;
        let until = now + MESSAGE_WAIT;
        session.calls.parked = Some(Parked { asked, user, until, exchange: true });
        Ok(None)
    }

    /// Whether the page had what the guest said that it stored.
    pub fn proven(&mut self, asked: PendingRequest, same: bool) -> Vec<GuestAction> {
        let PendingRequest { token, unique } = asked;
        let bytes = if same { fuse::written(unique, 8) } else { fuse::failed(unique, Errno::IO) };
        vec![GuestAction::Answer { token, bytes }]
    }

    pub(super) fn release_session(&mut self, session: u64, actions: &mut Vec<GuestAction>) {
        if let Some(it) = self.sessions.remove(&session) {
            it.end(session, actions);
            self.drop_unopened(session, actions);
            self.end_memory_of(session, actions);
        }
    }

    /// A session's place among those that there may be.
    pub fn slot(&self, session: u64) -> Option<usize> {
        self.sessions.get(&session).map(|it| it.slot)
    }

    /// How many messages of the node's were recorded in a conversation of a session.
    #[must_use]
    pub fn received_count(&self, session: u64, place: GuestChannel) -> u64 {
        let events = usize::from(place == GuestChannel::Events);
        self.sessions.get(&session).map_or(0, |it| it.received[events])
    }

    /// Sessions that wait for the node to be connected to, and those that are connected.
    pub fn phases(&self) -> (Vec<u64>, Vec<u64>) {
        let connecting = |it: &GuestSession| matches!(it.phase, Phase::Connecting(_));
        let of = |which: &dyn Fn(&GuestSession) -> bool| {
            self.sessions.iter().filter(|(_, it)| which(it)).map(|(number, _)| *number).collect()
        };
        (of(&connecting), of(&|it: &GuestSession| it.phase == Phase::Open))
    }

    /// The node has ended the session, or is gone.
    pub fn session_ended(&mut self, session: u64) -> Vec<GuestAction> {
        let mut actions = Vec::new();
        if let Some(it) = self.sessions.get_mut(&session) {
            it.close(&mut actions);
            self.end_memory_of(session, &mut actions);
        }
        actions
    }

    /// Whether messages of so many bytes more may wait for a user's processes.
    fn has_room_to_wait(&self, user: u32, more: usize) -> bool {
        let of = |whose: &dyn Fn(u32) -> bool| -> usize {
            let sessions = self.sessions.values().filter(|it| whose(it.user.0));
            sessions.map(GuestSession::unread).sum()
        };
        // All users but root have half of it, and each of them a quarter.
        let others = || of(&|it| it != 0) + more <= MOST_UNREAD / 2;
        let own = || of(&|it| it == user) + more <= MOST_UNREAD / 4;
        of(&|_| true) + more <= MOST_UNREAD && (user == 0 || others() && own())
    }

    /// The node says something. The numbers of what came along, which the shell holds from now on.
    pub fn received(
        &mut self,
        session: u64,
        place: GuestChannel,
        received: Received<'_>,
    ) -> (Vec<u64>, Vec<GuestAction>) {
        let mut actions = Vec::new();
        let user = self.sessions.get(&session).map_or(0, |it| it.user.0);
        let room = received.objects.is_empty() || self.has_room(user, received.objects.len());
        let numbers: Vec<u64> = match room {
            true => received.objects.iter().map(|_| self.number()).collect(),
            false => Vec::new(),
        };
        let unread = self.has_room_to_wait(user, received.message.len());
        let Some(it) = self.sessions.get_mut(&session).filter(|it| it.phase == Phase::Open) else {
            return (Vec::new(), actions);
        };
        it.received[usize::from(place == GuestChannel::Events)] += 1;
        let asked = (place == GuestChannel::Calls).then(|| it.asked.pop_front()).flatten();
        let subject = asked.map_or(RequestSubject::Other, |it| it.subject);
        let meaning = MessageMeaning::of(place, received.message, subject);
        if asked.is_some_and(|it| !it.read) {
            self.follow(session, &meaning, &mut actions);
            return (Vec::new(), actions);
        }
        let user = it.user;
        let Some(queue) = it.queue(place) else { return (Vec::new(), actions) };
        let lost = received.lost || !room;
        let message = received.message.to_vec();
        let frame = GuestFrame { objects: numbers.clone(), lost, message }.encode();
        let waits = queue.parked.is_none_or(|it| !it.has_room(frame.len()));
        if queue.is_full() || (waits && !unread) {
            tracing::warn!(session, "a process of the guest reads nothing and is disconnected");
            it.close(&mut actions);
            actions.push(GuestAction::End { session });
            self.end_memory_of(session, &mut actions);
            return (Vec::new(), actions);
        }
        queue.push(frame, &mut actions);
        // Before its files are there, which what has moved does not concern.
        self.follow(session, &meaning, &mut actions);
        for (at, (number, kind)) in numbers.iter().zip(&received.objects).enumerate() {
            let object = GuestFile::new(session, user, meaning.keeper(at, *kind), *kind);
            self.objects.insert(*number, object);
        }
        (numbers, actions)
    }
}
