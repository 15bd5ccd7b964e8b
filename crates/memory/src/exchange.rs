//! Questions and answers between two processes that trust each other with nothing, and the data that goes
//! along.
//!
//! Every question has a *tag*, and every tag a place for data of its own, so that neither side has to
//! agree with the other on what lies where. Processes that can share memory do (`shared`): one memory
//! file with a ring of messages and a doorbell in each direction, made, and sealed, by the side that answers:
//! it holds no memory of the side that asks. Between machines each side has places of its own, and messages
//! and data are `carried` as bytes. Either way, data in a place may change while it is used, by whoever has
//! the other end.

mod carried;
pub mod lane;
pub mod session;
mod shared;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::doorbell::DOORBELL_BYTES;
use crate::handles::{HandleError, Handles};
use crate::peer_event::PeerEvent;
use crate::region::{Region, RegionError};
use crate::ring::{PushError, RingLayout};
use crate::slice::PinnedSlice;

use carried::CarriedEnd;
pub use carried::{
    Carried, CarriedSession, CarriedSessionState, Carrier, LaneStatus, OnSessionChange,
    STATE_VERSION, SessionChange, SessionStatus, UnfitState,
};
use session::SessionSide;
use shared::SharedEnd;

/// Bytes of the longest message: with its length, one cache line.
pub const MESSAGE_BYTES: usize = 60;
/// Places for data begin at pages.
const PAGE: usize = 4096;

/// How large an exchange is; both sides must agree on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeLayout {
    /// Questions that may be open at a time: a power of two, at most 2^16.
    pub tags: u32,
    /// Bytes of data that go with one.
    pub data_bytes: usize,
}

/// Where the parts are in the memory.
#[derive(Debug, Clone, Copy)]
struct ExchangePlaces {
    ring: RingLayout,
    /// The ring of questions, and that of answers.
    rings: [usize; 2],
    data: usize,
    total: usize,
}

impl ExchangeLayout {
    fn places(self) -> Option<ExchangePlaces> {
        let slot_bytes = u32::try_from(MESSAGE_BYTES).ok()?;
        let ring = RingLayout { slots: self.tags, slot_bytes };
        let bytes = ring.bytes().filter(|_| self.tags <= 1 << 16)?;
        let first = 2 * DOORBELL_BYTES;
        let second = first + bytes.next_multiple_of(DOORBELL_BYTES);
        let data = (second + bytes).next_multiple_of(PAGE);
        let stride = self.data_bytes.checked_next_multiple_of(PAGE)?;
        let total = stride.checked_mul(self.tags as usize)?.checked_add(data)?;
        Some(ExchangePlaces { ring, rings: [first, second], data, total })
    }
}

/// What the other side needs to [join](Exchange::join).
#[derive(Debug)]
pub struct ExchangeHandles {
    /// The memory with operations, answers and data; mapped, and with that looked at, by who joins.
    memory: OwnedFd,
    /// The event of who answers, and that of who asks.
    events: [PeerEvent; 2],
}

impl ExchangeHandles {
    /// Takes those of an exchange from what came beside a message; what is behind them is left.
    ///
    /// # Errors
    /// [`HandleError`] when they are not that.
    pub fn take(handles: &mut Handles) -> Result<ExchangeHandles, HandleError> {
        let memory = handles.next_descriptor()?;
        Ok(ExchangeHandles { memory, events: [handles.event()?, handles.event()?] })
    }

    /// The same once more, for another who joins.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn try_clone(&self) -> std::io::Result<ExchangeHandles> {
        let [answers, asks] = &self.events;
        let events = [answers.try_clone()?, asks.try_clone()?];
        Ok(ExchangeHandles { memory: self.memory.try_clone()?, events })
    }
}

impl From<ExchangeHandles> for Handles {
    fn from(handles: ExchangeHandles) -> Handles {
        let [answers, asks] = handles.events;
        Handles::of_descriptors(vec![handles.memory, answers.into(), asks.into()])
    }
}

impl TryFrom<Handles> for ExchangeHandles {
    type Error = HandleError;

    fn try_from(mut handles: Handles) -> Result<ExchangeHandles, HandleError> {
        let taken = ExchangeHandles::take(&mut handles)?;
        handles.finish()?;
        Ok(taken)
    }
}

/// An end that another process of this host had and [passed on](Exchange::pass_on).
#[derive(Debug, Default)]
pub struct InheritedEnd {
    /// What came with it.
    pub files: Vec<OwnedFd>,
    /// The session that carries its messages and data; `None` where these are in shared memory.
    pub session: Option<CarriedSession>,
}

impl InheritedEnd {
    /// What came with it, as it comes beside a message that offers the same.
    pub fn into_handles(self) -> Handles {
        Handles::of_descriptors(self.files)
    }

    /// How many files come with an end whose messages are `carried`, or are in shared memory.
    pub const fn file_count(carried: bool) -> usize {
        if carried { carried::FILES } else { 3 }
    }
}

/// Why an exchange cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// Its memory cannot be obtained.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// Its events cannot be obtained.
    #[error("an exchange's events: {0}")]
    Events(#[from] std::io::Error),
    /// It was passed on by a process of another version, or what it passed on is none that there can be.
    #[error(transparent)]
    Passed(#[from] UnfitState),
    /// It was passed on without all that is needed to go on with it.
    #[error("{0} descriptors came with an exchange, not {1}")]
    Files(usize, usize),
    /// What it was passed on or offered with is something else.
    #[error(transparent)]
    Handles(#[from] HandleError),
    /// The layout is none that can be, or the memory is smaller.
    #[error("an exchange of {tags} tags of {data_bytes} bytes does not fit its memory")]
    Layout {
        /// Number of operations that can be in progress.
        tags: u32,
        /// Bytes of data that each operation has room for.
        data_bytes: usize,
    },
}

/// One end of an exchange.
#[derive(Debug)]
pub struct Exchange(End);

#[derive(Debug)]
enum End {
    Shared(SharedEnd),
    Carried(CarriedEnd),
}

macro_rules! of_end {
    ($exchange:expr, $end:ident => $call:expr) => {
        match $exchange {
            End::Shared($end) => $call,
            End::Carried($end) => $call,
        }
    };
}

impl Exchange {
    /// Makes one in shared memory, for the side that answers.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn create(
        name: &str,
        layout: ExchangeLayout,
    ) -> Result<(Exchange, ExchangeHandles), ExchangeError> {
        let (end, handles) = SharedEnd::create(name, layout)?;
        Ok((Exchange(End::Shared(end)), handles))
    }

    /// The other end, for the side that asks.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn join(
        handles: ExchangeHandles,
        layout: ExchangeLayout,
    ) -> Result<Exchange, ExchangeError> {
        Ok(Exchange(End::Shared(SharedEnd::join(handles, layout)?)))
    }

    /// The end of this side that another process had.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn again(
        side: SessionSide,
        end: InheritedEnd,
        layout: ExchangeLayout,
    ) -> Result<Exchange, ExchangeError> {
        let InheritedEnd { files, session } = end;
        let (count, expected) = (files.len(), InheritedEnd::file_count(session.is_some()));
        let wrong = |_| ExchangeError::Files(count, expected);
        let Some(session) = session else {
            let files = ExchangeHandles::try_from(Handles::of_descriptors(files))?;
            return Ok(Exchange(End::Shared(match side {
                SessionSide::Asks => SharedEnd::join(files, layout)?,
                SessionSide::Answers => SharedEnd::resume(files, layout)?,
            })));
        };
        let files = files.try_into().map_err(wrong)?;
        Ok(Exchange(End::Carried(CarriedEnd::again(files, session, side, layout)?)))
    }

    /// An end whose messages and data are sent over connections, for either side.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn carried(
        name: &str,
        carried: Carried,
        layout: ExchangeLayout,
    ) -> Result<Exchange, ExchangeError> {
        Ok(Exchange(End::Carried(CarriedEnd::new(name, carried, layout)?)))
    }

    /// The same for a session of which another process had the end, in which no message was ever sent: it goes on by the
    /// session's next connection, and nothing but the [session](CarriedSession::save) has to be passed on for it.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn carried_again(
        name: &str,
        session: CarriedSession,
        side: SessionSide,
        layout: ExchangeLayout,
    ) -> Result<Exchange, ExchangeError> {
        Ok(Exchange(End::Carried(CarriedEnd::waiting(name, session, side, layout)?)))
    }

    /// What another process needs to continue with this end, between two messages of this side. Dropping
    /// this end then ends nothing. The session of one that is carried is passed on
    /// [by itself](CarriedSession::save).
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn pass_on(&mut self) -> std::io::Result<Vec<OwnedFd>> {
        match &mut self.0 {
            End::Shared(end) => end.pass_on().map(|it| Handles::from(it).into_descriptors()),
            End::Carried(end) => end.pass_on().map(Vec::from),
        }
    }

    /// Goes on here with what was [passed on](Exchange::pass_on), which nobody else has gone on with.
    pub fn take_back(&mut self) {
        of_end!(&mut self.0, end => end.take_back());
    }

    /// Puts a message in, behind all others, with so many bytes of data of a tag, if any. The other side
    /// hears of it with the next [`ring`](Exchange::ring). The data stay as they are until it has answered.
    ///
    /// # Errors
    /// [`PushError`], and nothing was put in.
    #[inline]
    pub fn send(&mut self, message: &[u8], data: Option<(u32, usize)>) -> Result<(), PushError> {
        match &mut self.0 {
            // The data are in memory of both sides already.
            End::Shared(end) => end.send(message),
            End::Carried(end) => end.send(message, data),
        }
    }

    /// Tells the other side to look.
    #[inline]
    pub fn ring(&mut self) {
        of_end!(&mut self.0, end => end.ring());
    }

    /// Takes the next message out, if there is one; its length.
    #[inline]
    pub fn receive(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        of_end!(&mut self.0, end => end.receive(message))
    }

    /// Arranges that the next ring makes the descriptor ([`AsFd`]) readable; false when there is a
    /// message already, or nothing will come any more.
    pub fn rest(&mut self) -> bool {
        of_end!(&mut self.0, end => end.rest())
    }

    /// The first `length` bytes of the place for data of `tag`; `None` when it has not so many.
    pub fn data(&self, tag: u32, length: usize) -> Option<PinnedSlice> {
        of_end!(&self.0, end => end.data(tag, length))
    }

    /// Ends it for both sides.
    pub fn close(&self) {
        of_end!(&self.0, end => end.close());
    }

    /// Whether either side ended it, or its memory is gone.
    #[inline]
    pub fn is_closed(&self) -> bool {
        of_end!(&self.0, end => end.is_closed())
    }
}

impl AsFd for Exchange {
    fn as_fd(&self) -> BorrowedFd<'_> {
        of_end!(&self.0, end => end.as_fd())
    }
}

/// The first `length` bytes of the place of `tag` in `region`, where places begin at `first`.
fn place(
    region: &Arc<Region>,
    layout: ExchangeLayout,
    first: usize,
    tag: u32,
    length: usize,
) -> Option<PinnedSlice> {
    if tag >= layout.tags || length > layout.data_bytes {
        return None;
    }
    let stride = layout.data_bytes.next_multiple_of(PAGE);
    PinnedSlice::new(region.clone(), first + tag as usize * stride, length)
}

fn unfit(layout: ExchangeLayout) -> ExchangeError {
    ExchangeError::Layout { tags: layout.tags, data_bytes: layout.data_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::handles::HandleTarget;

    const LAYOUT: ExchangeLayout = ExchangeLayout { tags: 4, data_bytes: 5000 };

    fn both() -> (Exchange, Exchange) {
        let (answers, files) = Exchange::create("exchange", LAYOUT).unwrap();
        (answers, Exchange::join(files, LAYOUT).unwrap())
    }

    #[test]
    fn a_question_its_data_and_its_answer_arrive() {
        let (mut answers, mut asks) = both();
        let mut message = [0; MESSAGE_BYTES];
        assert!(answers.rest() && answers.receive(&mut message).is_none());
        asks.data(3, 5000).unwrap().get().fill(7);
        asks.send(b"three", None).unwrap();
        asks.ring();
        assert!(!answers.rest());
        assert_eq!(answers.receive(&mut message), Some(5));
        let mut data = [0; 5000];
        answers.data(3, 5000).unwrap().get().copy_to(&mut data);
        assert_eq!((&message[..5], data), (&b"three"[..], [7; 5000]));
        answers.send(b"ok", None).unwrap();
        answers.ring();
        assert_eq!(asks.receive(&mut message), Some(2));
    }

    #[test]
    fn places_for_data_do_not_overlap_and_end() {
        let (answers, asks) = both();
        for tag in 0..4 {
            asks.data(tag, 5000).unwrap().get().fill(tag as u8 + 1);
        }
        for tag in 0..4 {
            let mut data = [0; 5000];
            answers.data(tag, 5000).unwrap().get().copy_to(&mut data);
            assert_eq!(data, [tag as u8 + 1; 5000]);
        }
        assert!(asks.data(4, 1).is_none() && asks.data(0, 5001).is_none());
    }

    #[test]
    fn the_end_of_one_side_is_that_of_both() {
        let (answers, mut asks) = both();
        drop(answers);
        assert!(asks.is_closed() && !asks.rest());
    }

    #[test]
    fn both_ends_go_on_where_others_left_them() {
        let (mut answers, mut asks) = both();
        asks.send(b"one", None).unwrap();
        asks.send(b"two", None).unwrap();
        let mut message = [0; MESSAGE_BYTES];
        assert_eq!((answers.receive(&mut message), &message[..3]), (Some(3), &b"one"[..]));
        answers.send(b"first", None).unwrap();
        let files = answers.pass_on().unwrap();
        drop(answers);
        let again = |side, files| {
            Exchange::again(side, InheritedEnd { files, session: None }, LAYOUT).unwrap()
        };
        let mut answers = again(SessionSide::Answers, files);
        let files = asks.pass_on().unwrap();
        drop(asks);
        let mut asks = again(SessionSide::Asks, files);
        assert_eq!((answers.receive(&mut message), &message[..3]), (Some(3), &b"two"[..]));
        assert_eq!((asks.receive(&mut message), &message[..5]), (Some(5), &b"first"[..]));
        assert!(answers.rest());
        asks.send(b"three", None).unwrap();
        asks.ring();
        assert!(Event::wait_any(&[answers.as_fd()], Some(0)), "its event is another");
        drop(asks);
        assert!(answers.is_closed());
    }

    #[test]
    fn the_end_of_one_that_was_taken_back_is_that_of_both() {
        let (mut answers, mut asks) = both();
        for passed_on in [answers.pass_on(), asks.pass_on()] {
            drop(passed_on.unwrap());
        }
        asks.take_back();
        drop(asks);
        assert!(answers.is_closed());
    }

    #[test]
    fn what_leads_to_an_exchange_is_taken_whole_and_as_what_it_is() {
        let offered = || Handles::from(Exchange::create("exchange", LAYOUT).unwrap().1);
        let taken = |handles| ExchangeHandles::try_from(handles).map(drop);
        taken(offered()).unwrap();
        let mut more = offered();
        more.append(offered());
        assert!(matches!(taken(more), Err(HandleError::TooMany(3))));
        let fewer = |count| {
            let mut descriptors = offered().into_descriptors();
            descriptors.truncate(count);
            taken(Handles::of_descriptors(descriptors))
        };
        assert!(matches!(fewer(0), Err(HandleError::Missing(HandleTarget::Memory))));
        assert!(matches!(fewer(2), Err(HandleError::Missing(HandleTarget::Event))));
        let mut turned = offered().into_descriptors();
        turned.rotate_left(1);
        let turned = taken(Handles::of_descriptors(turned));
        assert!(matches!(turned, Err(HandleError::Unfit { target: HandleTarget::Event, .. })));
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let (_answers, files) = Exchange::create("exchange", LAYOUT).unwrap();
        let larger = ExchangeLayout { data_bytes: 50_000, ..LAYOUT };
        assert!(Exchange::join(files, larger).is_err());
        assert!(Exchange::create("exchange", ExchangeLayout { tags: 3, ..LAYOUT }).is_err());
    }
}
