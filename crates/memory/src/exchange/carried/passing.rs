//! An end goes on in another process of its host.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;

use super::beside::Beside;
use super::saved::{EndState, FrameState, UnfitState};
use super::{CarriedEnd, CarriedSession, places};
use crate::exchange::lane::LaneError;
use crate::exchange::session::{FrameOutbox, SessionSide};
use crate::exchange::{ExchangeError, ExchangeLayout, PAGE};
use crate::region::SharedMemory;

/// Descriptors that another process needs to go on with an end.
pub const FILES: usize = 2;

impl CarriedEnd {
    /// What another process needs to go on with this end, between two messages of this side: its memory, and the rest as
    /// a value. The lane, if there is one, is given up. Dropping this end then ends nothing.
    ///
    /// # Errors
    /// When there are no memory or descriptors left; it goes on then.
    pub fn pass_on(&mut self) -> std::io::Result<[OwnedFd; FILES]> {
        let why = LaneError("its node was restarted".to_owned());
        let lane = self.lane.as_deref_mut().map(|lane| lane.give_up(&why, &mut self.outbox));
        let counts = (self.received, self.beat_heard);
        let state = EndState::new(self.side, counts, self.outbox.save(FrameState::of), lane);
        let bytes = state.to_bytes()?;
        let flags = MemfdFlags::CLOEXEC;
        let mut text = File::from(rustix::fs::memfd_create("rackbus-exchange", flags)?);
        text.write_all(&bytes)?;
        let files = [self.memory.descriptor()?, text.into()];
        self.passed_on = true;
        Ok(files)
    }

    /// Goes on here after all.
    pub fn take_back(&mut self) {
        self.passed_on = false;
    }

    /// Goes on where an end of another process was [passed on](CarriedEnd::pass_on). The session's next connection
    /// carries it.
    ///
    /// # Errors
    /// [`ExchangeError`].
    pub fn again(
        [memory, text]: [OwnedFd; FILES],
        session: CarriedSession,
        side: SessionSide,
        layout: ExchangeLayout,
    ) -> Result<CarriedEnd, ExchangeError> {
        let (mut text, mut bytes) = (File::from(text), Vec::new());
        text.rewind()?;
        text.read_to_end(&mut bytes)?;
        let state = EndState::from_bytes(&bytes)?;
        if state.side != side {
            return Err(UnfitState::Senseless("it is of the other side".to_owned()).into());
        }
        let bytes = places(layout)?.max(PAGE);
        let memory = SharedMemory::adopt(memory, bytes as u64)?;
        let mut end = CarriedEnd::without_connection(memory, session, side, layout)?;
        let counts = |_| UnfitState::Senseless("its counts".to_owned());
        let outbox = FrameOutbox::again(layout.tags as usize, state.outbox.frames()?);
        end.outbox = outbox.map_err(counts)?;
        (end.received, end.beat_heard) = (state.received, state.beat_heard);
        let why = LaneError("the node was restarted".to_owned());
        end.lane = state.lane.map(|lane| Box::new(Beside::again(lane, layout, &end.session, why)));
        Ok(end)
    }
}
