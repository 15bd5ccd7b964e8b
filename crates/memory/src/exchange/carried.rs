//! An end of an exchange whose messages and data go as bytes to a process that shares no memory with this one.
//!
//! A frame is a header, the message, and the data that go along, which the other side finds in the place of
//! the same tag. Nothing waits: what a [`Carrier`] does not take now is sent later, from the place itself, and
//! each tag has at most one message that waits or is not acknowledged.
//!
//! Connections come and go, and the session that they carry continues: messages are [numbered and
//! kept](super::session) until the other side has them. Their data need no copy for that: a place is used again
//! when the message that answers has come, or asks anew, which says that the one before has arrived.

mod beside;
mod carrier;
mod connection;
mod handle;
mod note;
mod passing;
mod saved;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::lane::{LaneNews, WrongLane};
use super::session::{FrameOutbox, SessionEndReason, SessionMillis, SessionSide};
use super::{ExchangeError, ExchangeLayout, MESSAGE_BYTES, place, unfit};
use crate::region::SharedMemory;
use crate::ring::PushError;
use crate::slice::PinnedSlice;
use crate::stream::StreamError;

use beside::Beside;
pub use carrier::{Carried, Carrier};
use connection::{Came, CarrierConnection, DataTransport, FrameHeader, SessionFrame, kind};
pub use handle::{CarriedSession, OnSessionChange, SessionChange, SessionStatus};
pub use note::LaneStatus;
pub(super) use passing::FILES;
pub use saved::{CarriedSessionState, UnfitState, VERSION as STATE_VERSION};

/// Pieces that are looked at in one turn: a peer that sends what is no message keeps nobody.
const TURN: usize = 1024;

/// One end of an exchange between processes that share no memory.
#[derive(Debug)]
pub(super) struct CarriedEnd {
    layout: ExchangeLayout,
    side: SessionSide,
    /// The places for data of this side.
    memory: SharedMemory,
    session: CarriedSession,
    connection: Option<CarrierConnection>,
    outbox: FrameOutbox<SessionFrame>,
    /// What moves data beside the connection.
    lane: Option<Box<Beside>>,
    /// How many messages were received.
    received: u64,
    /// Between two looks at the time, and when the next is due.
    beat: SessionMillis,
    beat_at: SessionMillis,
    /// The last of the other side's that was heard.
    beat_heard: u32,
    /// Readable when there is something to do.
    readiness: OwnedFd,
    /// Rings with each beat: an end that rests says that it is there.
    timer: OwnedFd,
    closed: AtomicBool,
    /// Another process has this end now.
    passed_on: bool,
}

fn system(errno: rustix::io::Errno) -> ExchangeError {
    ExchangeError::Events(errno.into())
}

/// Bytes of all places for data.
fn places(layout: ExchangeLayout) -> Result<usize, ExchangeError> {
    layout.places().ok_or_else(|| unfit(layout))?;
    Ok(layout.data_bytes.next_multiple_of(super::PAGE) * layout.tags as usize)
}

/// A descriptor that becomes readable every so many milliseconds.
fn timer(every: SessionMillis) -> rustix::io::Result<OwnedFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    let nanoseconds = (every % 1000) * 1_000_000;
    let every = Timespec { tv_sec: (every / 1000) as i64, tv_nsec: nanoseconds as i64 };
    let times = Itimerspec { it_interval: every, it_value: every };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times)?;
    Ok(timer)
}

impl CarriedEnd {
    pub(super) fn new(
        name: &str,
        carried: Carried,
        layout: ExchangeLayout,
    ) -> Result<CarriedEnd, ExchangeError> {
        let places = places(layout)?;
        // The lane's proof is behind the places.
        let bytes = places + if carried.lane.is_some() { super::PAGE } else { 0 };
        let memory = SharedMemory::create(name, bytes.max(super::PAGE) as u64)?;
        let Carried { carrier, session, side, lane } = carried;
        let mut end = CarriedEnd::without_connection(memory, session, side, layout)?;
        end.lane = lane.map(|lane| {
            let (region, readiness) = (end.memory.region(), &end.readiness);
            Box::new(Beside::new(lane, region, places, layout, &end.session, readiness))
        });
        let speaks = (side == SessionSide::Asks).then_some(LaneNews::None);
        let connection = CarrierConnection::new(0, carrier, speaks, &end.readiness);
        end.connection = Some(connection.map_err(system)?);
        end.advance();
        Ok(end)
    }

    /// One that has sent and received nothing in any process, and whose session waits for a connection.
    pub(super) fn waiting(
        name: &str,
        session: CarriedSession,
        side: SessionSide,
        layout: ExchangeLayout,
    ) -> Result<CarriedEnd, ExchangeError> {
        let memory = SharedMemory::create(name, places(layout)?.max(super::PAGE) as u64)?;
        CarriedEnd::without_connection(memory, session, side, layout)
    }

    /// One that has sent and received nothing, and waits for a connection.
    fn without_connection(
        memory: SharedMemory,
        session: CarriedSession,
        side: SessionSide,
        layout: ExchangeLayout,
    ) -> Result<CarriedEnd, ExchangeError> {
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        let beat = session.timing().beat;
        let timer = timer(beat).map_err(system)?;
        for fd in [timer.as_fd(), session.news()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&readiness, fd, data, epoll::EventFlags::IN).map_err(system)?;
        }
        Ok(CarriedEnd {
            layout,
            side,
            memory,
            session,
            connection: None,
            outbox: FrameOutbox::new(layout.tags as usize),
            lane: None,
            received: 0,
            beat,
            beat_at: 0,
            beat_heard: 0,
            readiness,
            timer,
            closed: AtomicBool::new(false),
            passed_on: false,
        })
    }

    pub(super) fn send(
        &mut self,
        message: &[u8],
        data: Option<(u32, usize)>,
    ) -> Result<(), PushError> {
        if message.len() > MESSAGE_BYTES {
            let slot_bytes = MESSAGE_BYTES as u32;
            return Err(PushError::TooLong { length: message.len(), slot_bytes });
        }
        let (tag, length) = data.unwrap_or_default();
        let message_length = message.len();
        let mut frame = SessionFrame {
            message: [0; MESSAGE_BYTES],
            message_length,
            tag,
            length,
            taken: 0,
            way: DataTransport::Behind,
        };
        frame.message[..message_length].copy_from_slice(message);
        if self.outbox.is_full() {
            return Err(PushError::Full);
        }
        if let Some(Beside::Asks(lane)) = self.lane.as_deref_mut() {
            frame.way = lane.way(tag, length);
        }
        self.outbox.push(frame).map_err(|_| PushError::Full)
    }

    pub(super) fn ring(&mut self) {
        self.advance();
    }

    /// Sends what waits, as far as that goes now.
    fn advance(&mut self) {
        if let Some(Beside::Asks(lane)) = self.lane.as_deref_mut() {
            lane.pump(&mut self.outbox);
        }
        let Some(connection) = &mut self.connection else { return };
        if connection.joined
            && let Some(lane) = self.lane.as_deref_mut()
        {
            lane.tell(connection);
        }
        let places = (self.memory.region(), self.layout);
        let lane = self.lane.as_deref();
        if let Err(error) = connection.send(&mut self.outbox, places, self.received, lane) {
            self.lose(error);
        }
    }

    /// The connection is of no more use.
    fn lose(&mut self, error: StreamError) {
        let Some(connection) = self.connection.take() else { return };
        connection.end(&self.readiness, false);
        if error == StreamError::Closed {
            self.session.end(SessionEndReason::There);
        } else {
            self.session.broke(connection.number, &error.to_string());
        }
        self.look_over();
    }

    /// The other side breaks the rules: nothing is heard or said any more.
    fn wrong(&mut self) {
        tracing::warn!("a node violates the link's protocol and is disconnected");
        self.session.end(SessionEndReason::Rules);
        self.look_over();
    }

    fn look_over(&self) {
        if self.session.is_over() && !self.closed.swap(true, Ordering::Relaxed) {
            self.hang_up();
        }
    }

    fn hang_up(&self) {
        if let Some(connection) = &self.connection {
            connection.end(&self.readiness, true);
        }
    }

    /// Looks at the time, and whether another connection is there. What was sent by the one before and is not
    /// acknowledged is sent again when the other side has said what it has.
    fn look(&mut self) {
        if self.session.take_news() {
            if let Some((number, carrier)) = self.session.take_arrived() {
                self.join(number, carrier);
            }
            self.look_over();
        }
        let now = self.session.now();
        if now < self.beat_at || self.is_closed() {
            return;
        }
        self.beat_at = now + self.beat;
        let heard = self.connection.as_mut();
        let heard = heard.and_then(|it| std::mem::take(&mut it.heard).then_some(it.number));
        if !self.session.tick(heard)
            && let Some(connection) = self.connection.take()
        {
            connection.end(&self.readiness, false);
        }
        self.look_over();
        if let Some(lane) = self.lane.as_deref_mut() {
            lane.look(now, &mut self.outbox);
        }
        if let Some(connection) = self.connection.as_mut().filter(|it| it.joined) {
            let (tag, data) = (self.session.beat().into(), self.beat_heard.into());
            connection.say(FrameHeader { kind: kind::BEAT, tag, data, ..FrameHeader::default() });
            self.advance();
        }
    }

    fn join(&mut self, number: u64, carrier: Box<dyn Carrier>) {
        if let Some(before) = self.connection.take() {
            before.end(&self.readiness, false);
        }
        let known = self.lane.as_deref_mut().map_or(LaneNews::None, Beside::reconnected);
        let speaks = (self.side == SessionSide::Asks).then_some(known);
        match CarrierConnection::new(number, carrier, speaks, &self.readiness) {
            Ok(connection) => self.connection = Some(connection),
            Err(error) => self.session.broke(number, &error.to_string()),
        }
        self.advance();
    }

    pub(super) fn receive(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        // Who still takes messages has it again.
        self.passed_on = false;
        self.look();
        if self.is_closed() {
            return None;
        }
        if let Some(Beside::Asks(lane)) = self.lane.as_deref_mut() {
            lane.pump(&mut self.outbox);
        }
        if self.has_unsent() {
            self.advance();
        }
        for _ in 0..TURN {
            if let Some(length) = self.take_answer(message) {
                return Some(length);
            }
            let places = (self.memory.region(), self.layout);
            match self.connection.as_mut()?.take(message, places, self.lane.as_deref()) {
                Came::Message(length, left) => {
                    self.received += 1;
                    let Some(Beside::Asks(lane)) = self.lane.as_deref_mut() else {
                        return Some(length);
                    };
                    if lane.answered(message, length, left).is_err() {
                        self.wrong();
                    } else {
                        lane.pump(&mut self.outbox);
                    }
                }
                Came::Fetched(tag, length) => {
                    let fetched = self.lane.as_mut().map(|lane| lane.fetched(tag, length));
                    if fetched != Some(Ok(())) {
                        self.wrong();
                    }
                }
                Came::Begun(header) => self.began(&header),
                Came::Wrong => self.wrong(),
                Came::Nothing if self.fill() => {}
                Came::Nothing => return None,
            }
            if self.is_closed() {
                return None;
            }
        }
        None
    }

    /// The next answer whose data the lane has brought.
    fn take_answer(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        match self.lane.as_deref_mut() {
            Some(Beside::Asks(lane)) => lane.receive(message),
            _ => None,
        }
    }

    /// A header came: the other side has so many messages of this one.
    fn began(&mut self, header: &FrameHeader) {
        let seen = header.seen.get();
        if header.kind != kind::RESUME {
            if header.kind == kind::BEAT {
                self.beat_heard = header.tag.get();
                self.session.echoed(header.data.get());
            }
            let heard = self.hear_of_lane(header);
            if self.outbox.acknowledge(seen).is_err() || heard.is_err() {
                self.wrong();
            }
            return;
        }
        if self.hear_of_lane(header).is_err() {
            return self.wrong();
        }
        let Some(connection) = &mut self.connection else { return };
        let Ok(repeated) = self.outbox.resume(seen) else { return self.wrong() };
        for frame in self.outbox.kept_mut() {
            frame.taken = 0;
            // What is left for the side that asks is decided anew; what that has moved is there.
            if self.side == SessionSide::Answers {
                frame.way = DataTransport::Behind;
            }
        }
        connection.joined = true;
        if self.side == SessionSide::Answers {
            connection.say(FrameHeader { kind: kind::RESUME, ..FrameHeader::default() });
        }
        let connection_number = connection.number;
        self.session.resumed(connection_number, repeated);
        self.advance();
    }

    /// What a header says of the lane. An end without one knows nothing of that.
    fn hear_of_lane(&mut self, header: &FrameHeader) -> Result<(), WrongLane> {
        let Some(lane) = self.lane.as_deref_mut() else { return Ok(()) };
        let (tag, length) = (header.tag.get(), header.data.get() as usize);
        match header.kind {
            kind::RESUME | kind::LANE => {
                lane.told(LaneNews::numbered(tag)?, &mut self.outbox);
                Ok(())
            }
            kind::FETCH if tag < self.layout.tags && length <= self.layout.data_bytes => {
                lane.fetch(tag, length)
            }
            kind::FETCH => Err(WrongLane),
            _ => Ok(()),
        }
    }

    fn has_unsent(&self) -> bool {
        let joined = |it: &CarrierConnection| {
            it.joined && self.lane.as_deref().is_some_and(Beside::has_unsaid)
        };
        self.connection.as_ref().is_some_and(|it| it.has_unsent(&self.outbox) || joined(it))
    }

    /// Receives more; false when there is nothing now.
    fn fill(&mut self) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        match connection.fill() {
            Ok(some) => some,
            Err(error) => {
                self.lose(error);
                false
            }
        }
    }

    pub(super) fn rest(&mut self) -> bool {
        // It is readable until then.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.session.expect_news();
        self.look();
        if self.is_closed() {
            return false;
        }
        let quiet = self.take_controls();
        if self.has_unsent() {
            self.advance();
        }
        // Last: what is above may take in what would have woken this end.
        let quiet = quiet & self.rest_lane();
        let waits = self.has_unsent();
        if let Some(connection) = &mut self.connection {
            connection.wait_to_send(&self.readiness, waits);
        }
        quiet && !self.is_closed()
    }

    /// Arranges that the lane wakes this end; false when it brought something, or cannot wake anybody.
    fn rest_lane(&mut self) -> bool {
        match self.lane.as_deref_mut() {
            Some(Beside::Asks(lane)) => lane.rest(&mut self.outbox),
            _ => true,
        }
    }

    /// Takes what is no message; true when nothing else came.
    fn take_controls(&mut self) -> bool {
        // Bytes that the carrier has received already make no descriptor readable.
        for _ in 0..TURN {
            let Some(connection) = &mut self.connection else { return !self.is_closed() };
            if let Some(header) = connection.take_control(self.lane.is_some()) {
                self.began(&header);
            } else if connection.has_some() {
                return false;
            } else if !self.fill() {
                return !self.is_closed();
            }
        }
        false
    }

    pub(super) fn data(&self, tag: u32, length: usize) -> Option<PinnedSlice> {
        place(self.memory.region(), self.layout, 0, tag, length)
    }

    /// The lane's memory is taken away with the end of the session, whoever ends it.
    pub(super) fn close(&self) {
        if self.passed_on {
            return;
        }
        self.session.end(SessionEndReason::Here);
        if !self.closed.swap(true, Ordering::Relaxed) {
            self.hang_up();
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

impl Drop for CarriedEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl AsFd for CarriedEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

#[cfg(test)]
mod tests;
