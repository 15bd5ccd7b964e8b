//! What moves data beside the connections of an end: the shell around the [lane](super::super::lane)'s decisions.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::epoll;

use super::CarriedSession;
use super::connection::{CarrierConnection, DataTransport, FrameHeader, SessionFrame, kind};
use super::saved::{BesideState, LeftAnswer};
use crate::exchange::lane::{
    AnsweringLane, AskingLane, CarriedLane, Finished, LEAST, Lane, LaneError, LaneNews, LaneTarget,
    Moves, PROOF_BYTES, Transfer, WrongLane,
};
use crate::exchange::session::{FrameOutbox, SessionEndReason, SessionMillis};
use crate::exchange::{ExchangeLayout, MESSAGE_BYTES, PAGE};
use crate::region::Region;
use crate::slice::PinnedSlice;

/// The lane of an end.
#[derive(Debug)]
pub(super) enum Beside {
    Asks(AskingEnd),
    Answers(AnsweringEnd),
}

impl Beside {
    /// A lane between places in `region`, and the proof behind them, at `proof`. One that cannot be obtained is given up at
    /// once.
    pub(super) fn new(
        lane: CarriedLane,
        region: &Arc<Region>,
        proof: usize,
        layout: ExchangeLayout,
        session: &CarriedSession,
        readiness: &OwnedFd,
    ) -> Beside {
        let session = session.clone();
        match lane {
            CarriedLane::Asks(lane, expected) => {
                session.lane_note().begin(lane.provider());
                let core = AskingLane::new(layout.tags, session.now());
                let proof = (proof, PinnedSlice::new(region.clone(), proof, PROOF_BYTES));
                let stride = layout.data_bytes.next_multiple_of(PAGE);
                let ended = Vec::new();
                let mut end =
                    AskingEnd { core, lane: Some(lane), proof, expected, stride, session, ended };
                end.begin(region, readiness);
                Beside::Asks(end)
            }
            CarriedLane::Answers(target) => {
                session.lane_note().begin(target.provider());
                let mut end = AnsweringEnd {
                    core: AnsweringLane::new(layout.tags),
                    tags: layout.tags as usize,
                    target: Some(target.clone()),
                    session: session.clone(),
                };
                match target.expose(region, proof) {
                    Ok(()) => session.expose(target),
                    Err(error) => end.lose(&error),
                }
                Beside::Answers(end)
            }
        }
    }

    /// Goes on where another process of this side gave its lane up, for this reason.
    pub(super) fn again(
        state: BesideState,
        layout: ExchangeLayout,
        session: &CarriedSession,
        why: LaneError,
    ) -> Beside {
        let session = session.clone();
        session.lane_note().begin(state.provider());
        session.lane_note().set(false, Some(&why));
        match state {
            BesideState::Asks { was_up, answers, .. } => {
                let now = session.now();
                let answers = answers.iter().filter_map(LeftAnswer::parts);
                let core = AskingLane::given_up(layout.tags, now, why, was_up, answers);
                let (lane, proof, expected) = (None, (0, None), [0; PROOF_BYTES]);
                let stride = layout.data_bytes.next_multiple_of(PAGE);
                let ended = Vec::new();
                Beside::Asks(AskingEnd { core, lane, proof, expected, stride, session, ended })
            }
            BesideState::Answers { used, .. } => {
                let core = AnsweringLane::given_up(layout.tags, used);
                let tags = layout.tags as usize;
                Beside::Answers(AnsweringEnd { core, tags, target: None, session })
            }
        }
    }

    /// Gives the lane up, for this reason, and says what another process needs to go on without it.
    pub(super) fn give_up(
        &mut self,
        why: &LaneError,
        outbox: &mut FrameOutbox<SessionFrame>,
    ) -> BesideState {
        let status = match self {
            Beside::Asks(end) => {
                end.lose(why.clone(), outbox);
                end.session.lane()
            }
            Beside::Answers(end) => {
                end.lose(why);
                end.session.lane()
            }
        };
        let provider = status.unwrap_or_default().provider;
        match self {
            Beside::Asks(end) => {
                let answers = end.core.answers().map(|((message, length), left)| {
                    LeftAnswer::new(message.get(..*length).unwrap_or_default(), left)
                });
                let was_up = end.core.known() == LaneNews::Down;
                BesideState::Asks { provider, was_up, answers: answers.collect() }
            }
            Beside::Answers(end) => BesideState::Answers { provider, used: end.core.may_be_left() },
        }
    }

    /// Whether so many bytes that go with an answer are left for the other side to read.
    pub(super) fn leaves(&self, length: usize) -> bool {
        match self {
            Beside::Asks(_) => false,
            Beside::Answers(end) => {
                let leaves = end.core.leaves(length);
                if leaves {
                    end.session.lane_note().count(length);
                }
                leaves
            }
        }
    }

    /// Whether the other side may leave data in their place.
    pub(super) fn may_be_left(&self) -> bool {
        match self {
            Beside::Asks(end) => end.core.known() != LaneNews::None,
            Beside::Answers(end) => end.core.may_be_left(),
        }
    }

    /// Whether these data were asked for.
    pub(super) fn expects(&self, tag: u32, length: usize) -> bool {
        match self {
            Beside::Asks(end) => end.core.expects(tag, length),
            Beside::Answers(_) => false,
        }
    }

    /// The other side says how it is with the lane.
    pub(super) fn told(&mut self, news: LaneNews, outbox: &mut FrameOutbox<SessionFrame>) {
        match self {
            Beside::Asks(end) if matches!(news, LaneNews::Down | LaneNews::Refused) => {
                end.lose(LaneError("the lender gave it up".to_owned()), outbox);
            }
            Beside::Asks(_) => {}
            Beside::Answers(end) => {
                if end.core.told(news) {
                    end.take_away();
                    let why = LaneError("the borrower gave it up".to_owned());
                    end.session.lane_note().set(false, Some(&why));
                } else if news == LaneNews::Up && end.core.leaves(LEAST) {
                    end.session.lane_note().set(true, None);
                }
            }
        }
    }

    /// The other side asks for data that were left.
    pub(super) fn fetch(&mut self, tag: u32, length: usize) -> Result<(), WrongLane> {
        match self {
            Beside::Asks(_) => Err(WrongLane),
            Beside::Answers(end) => end.core.fetch(tag, length),
        }
    }

    /// Data that were asked for are in their place.
    pub(super) fn fetched(&mut self, tag: u32, length: usize) -> Result<(), WrongLane> {
        match self {
            Beside::Asks(end) => end.core.fetched(tag, length),
            Beside::Answers(_) => Err(WrongLane),
        }
    }

    /// Puts into `connection` what is to be said and sent.
    pub(super) fn tell(&mut self, connection: &mut CarrierConnection) {
        let news = match self {
            Beside::Asks(end) => end.core.news(),
            Beside::Answers(end) => end.core.news(),
        };
        if let Some(news) = news {
            connection.say(FrameHeader::of_lane(kind::LANE, news));
        }
        match self {
            Beside::Asks(end) => {
                while let Some((tag, length)) = end.core.next_fetch() {
                    let (tag, data) = (tag.into(), (length as u32).into());
                    let fetch =
                        FrameHeader { kind: kind::FETCH, tag, data, ..FrameHeader::default() };
                    connection.say(fetch);
                }
            }
            Beside::Answers(end) => {
                // One that asks without end and receives nothing is not remembered without end.
                while connection.unfetched() < end.tags
                    && let Some((tag, length)) = end.core.next_fetch()
                {
                    connection.send_fetched(tag, length);
                }
            }
        }
    }

    /// Whether there is something to [tell](Beside::tell).
    pub(super) fn has_unsaid(&self) -> bool {
        match self {
            Beside::Asks(end) => end.core.has_unsaid(),
            Beside::Answers(end) => end.core.has_unsaid(),
        }
    }

    /// Another connection is there; what its first frame says of the lane.
    pub(super) fn reconnected(&mut self) -> LaneNews {
        match self {
            Beside::Asks(end) => {
                end.core.reconnected();
                end.core.known()
            }
            Beside::Answers(end) => {
                end.core.reconnected();
                LaneNews::None
            }
        }
    }

    /// Looks whether the lane still works.
    pub(super) fn look(&mut self, now: SessionMillis, outbox: &mut FrameOutbox<SessionFrame>) {
        match self {
            Beside::Asks(end) => {
                end.pump(outbox);
                if !end.core.look(now) {
                    end.lost(outbox);
                }
            }
            Beside::Answers(end) => {
                if let Some(error) = end.target.as_ref().and_then(|target| target.failure()) {
                    end.lose(&error);
                }
            }
        }
    }
}

/// The lane of the side that asks.
#[derive(Debug)]
pub(super) struct AskingEnd {
    core: AskingLane<([u8; MESSAGE_BYTES], usize)>,
    /// `None` when it is closed.
    lane: Option<Box<dyn Lane>>,
    /// Where the proof arrives, and what it should be.
    proof: (usize, Option<PinnedSlice>),
    expected: [u8; PROOF_BYTES],
    stride: usize,
    session: CarriedSession,
    ended: Vec<u64>,
}

impl AskingEnd {
    /// Registers the memory and begins with the proof.
    fn begin(&mut self, region: &Arc<Region>, readiness: &OwnedFd) {
        let Some(lane) = &mut self.lane else { return };
        let registered = lane.register(region).and_then(|()| {
            let Some(fd) = lane.wake_fd() else { return Ok(()) };
            let data = epoll::EventData::new_u64(0);
            let added = epoll::add(readiness, fd, data, epoll::EventFlags::IN);
            added.map_err(|errno| LaneError(errno.to_string()))
        });
        let mut none = FrameOutbox::new(0);
        match registered {
            Ok(()) => self.pump(&mut none),
            Err(error) => self.lose(error, &mut none),
        }
    }

    /// How data of a question go.
    pub(super) fn way(&mut self, tag: u32, length: usize) -> DataTransport {
        if length < LEAST {
            return DataTransport::Behind;
        }
        match self.core.write(tag, length) {
            Some(id) => DataTransport::Moving(id),
            None => {
                self.session.lane_note().fell_back.fetch_add(1, Ordering::Relaxed);
                DataTransport::Behind
            }
        }
    }

    /// Begins transfers that wait, and takes in those that have ended.
    pub(super) fn pump(&mut self, outbox: &mut FrameOutbox<SessionFrame>) {
        if self.core.is_busy() {
            self.poll(outbox);
        }
    }

    /// The same, also when there are none: a provider has more to do than transfers.
    fn poll(&mut self, outbox: &mut FrameOutbox<SessionFrame>) {
        if let Err(error) = self.transfer(outbox) {
            self.lose(error, outbox);
        }
    }

    fn transfer(&mut self, outbox: &mut FrameOutbox<SessionFrame>) -> Result<(), LaneError> {
        let Some(lane) = &mut self.lane else { return Ok(()) };
        while let Some(Transfer { id, moves, tag, length }) = self.core.to_begin() {
            let at = match moves {
                Moves::Proof => self.proof.0,
                Moves::Read | Moves::Write => tag as usize * self.stride,
            };
            if !lane.begin(id, moves == Moves::Write, at, length)? {
                break;
            }
            self.core.begun();
            if moves != Moves::Proof {
                self.session.lane_note().count(length);
            }
        }
        lane.poll(&mut self.ended)?;
        for id in self.ended.drain(..) {
            match self.core.ended(id) {
                Some(Finished::Proof) => {
                    let mut came = [0; PROOF_BYTES];
                    self.proof.1.as_ref().map(|proof| proof.get().copy_to(&mut came));
                    let right = came == self.expected;
                    self.core.proved(right);
                    if right {
                        self.session.lane_note().set(true, None);
                        self.session.lane_changed(None);
                    }
                }
                Some(Finished::Write(id)) => {
                    let moved = |frame: &&mut SessionFrame| frame.way == DataTransport::Moving(id);
                    outbox
                        .kept_mut()
                        .filter(moved)
                        .for_each(|frame| frame.way = DataTransport::Left);
                }
                Some(Finished::Read) | None => {}
            }
        }
        if self.core.failure().is_some() {
            self.lost(outbox);
        }
        Ok(())
    }

    /// The lane is of no more use.
    fn lose(&mut self, why: LaneError, outbox: &mut FrameOutbox<SessionFrame>) {
        if self.core.lose(why) {
            self.lost(outbox);
        }
    }

    /// Closes the lane, which is given up: what was to be moved is sent over the connection.
    fn lost(&mut self, outbox: &mut FrameOutbox<SessionFrame>) {
        let Some(mut lane) = self.lane.take() else { return };
        if !lane.close() {
            self.session.end(SessionEndReason::Reachable);
        }
        let moving = |frame: &&mut SessionFrame| matches!(frame.way, DataTransport::Moving(_));
        outbox.kept_mut().filter(moving).for_each(|frame| {
            frame.way = DataTransport::Behind;
            self.session.lane_note().fell_back.fetch_add(1, Ordering::Relaxed);
        });
        let why = self.core.failure().cloned();
        self.session.lane_note().set(false, why.as_ref());
        self.session.lane_changed(Some(&why.map_or_else(String::new, |why| why.to_string())));
    }

    /// An answer came, with the tag and length of data that were left for it.
    pub(super) fn answered(
        &mut self,
        message: &[u8; MESSAGE_BYTES],
        length: usize,
        left: Option<(u32, usize)>,
    ) -> Result<(), WrongLane> {
        if left.is_some() && self.lane.is_none() {
            self.session.lane_note().fell_back.fetch_add(1, Ordering::Relaxed);
        }
        self.core.answered((*message, length), left)
    }

    /// Takes the next answer whose data are there.
    pub(super) fn receive(&mut self, message: &mut [u8; MESSAGE_BYTES]) -> Option<usize> {
        let (answer, length) = self.core.receive()?;
        *message = answer;
        Some(length)
    }

    /// Arranges that the end of a transfer wakes this end; false when one has ended, or that cannot be arranged.
    pub(super) fn rest(&mut self, outbox: &mut FrameOutbox<SessionFrame>) -> bool {
        self.poll(outbox);
        if self.core.has_answer() {
            return false;
        }
        let busy = self.core.is_busy();
        match &mut self.lane {
            // A descriptor that stays readable wakes this end for ever.
            Some(lane) if lane.wake_fd().is_some() => lane.rest(),
            Some(_) => !busy,
            None => true,
        }
    }
}

impl Drop for AskingEnd {
    fn drop(&mut self) {
        if let Some(mut lane) = self.lane.take() {
            // Nobody uses the memory after this.
            let _ = lane.close();
        }
    }
}

/// The lane of the side that answers.
#[derive(Debug)]
pub(super) struct AnsweringEnd {
    core: AnsweringLane,
    tags: usize,
    /// `None` where an earlier process of this side had it.
    target: Option<Arc<dyn LaneTarget>>,
    session: CarriedSession,
}

impl AnsweringEnd {
    /// Takes the memory away. Where that fails the session ends, before a place is used again.
    fn take_away(&self) {
        if self.target.as_ref().is_some_and(|target| !target.close()) {
            self.session.end(SessionEndReason::Reachable);
        }
    }

    /// The memory is not exposed any more, or could not be.
    fn lose(&mut self, why: &LaneError) {
        if self.core.lose() {
            self.take_away();
            self.session.lane_note().set(false, Some(why));
            self.session.lane_changed(Some(&why.to_string()));
        }
    }
}

impl Drop for AnsweringEnd {
    fn drop(&mut self) {
        // Nobody uses the memory after this.
        let _ = self.target.as_ref().map(|target| target.close());
    }
}
