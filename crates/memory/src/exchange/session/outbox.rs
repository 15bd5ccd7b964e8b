//! Frames that one side sends, each numbered, and kept until the other side has it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// No frame can be put in before the other side has said that it has an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutboxFull;

/// The other side says that it has frames that it cannot have, or lacks some that it said it had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongCount;

/// What one side sends, for another process that goes on with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutboxState<F> {
    acknowledged: u64,
    begun: u64,
    kept: Vec<F>,
}

impl<F> OutboxState<F> {
    /// The same with what `frame` makes of each frame that is kept.
    ///
    /// # Errors
    /// The first of `frame`.
    pub fn try_map<T, E>(self, frame: impl FnMut(F) -> Result<T, E>) -> Result<OutboxState<T>, E> {
        let OutboxState { acknowledged, begun, kept } = self;
        let kept = kept.into_iter().map(frame).collect::<Result<_, E>>()?;
        Ok(OutboxState { acknowledged, begun, kept })
    }
}

/// What one side sends. Frames are numbered from 1 on, in the order in which they are put in.
#[derive(Debug)]
pub struct FrameOutbox<F> {
    /// The other side has this many.
    acknowledged: u64,
    /// Frames after those, which may have to be sent again.
    kept: VecDeque<F>,
    /// How many of the kept ones were sent on the connection that there is now.
    sent: usize,
    /// How many have been sent on any connection, in part or whole.
    begun: u64,
    limit: usize,
}

impl<F> FrameOutbox<F> {
    /// An empty one, which keeps at most `limit` frames.
    pub fn new(limit: usize) -> FrameOutbox<F> {
        FrameOutbox { acknowledged: 0, kept: VecDeque::new(), sent: 0, begun: 0, limit }
    }

    /// As a value; each frame that is kept becomes what `frame` makes of it.
    pub fn save<S>(&self, frame: impl FnMut(&F) -> S) -> OutboxState<S> {
        let kept = self.kept.iter().map(frame).collect();
        OutboxState { acknowledged: self.acknowledged, begun: self.begun, kept }
    }

    /// Goes on with what was [saved](FrameOutbox::save): nothing was sent on a connection that there is now.
    ///
    /// # Errors
    /// [`WrongCount`] when the value is none that there can be.
    pub fn again(limit: usize, state: OutboxState<F>) -> Result<FrameOutbox<F>, WrongCount> {
        let OutboxState { acknowledged, begun, kept } = state;
        let sent = begun.checked_sub(acknowledged).ok_or(WrongCount)?;
        if kept.len() > limit || sent > kept.len() as u64 {
            return Err(WrongCount);
        }
        Ok(FrameOutbox { acknowledged, kept: kept.into(), sent: 0, begun, limit })
    }

    /// Puts a frame in, behind all others.
    ///
    /// # Errors
    /// [`OutboxFull`]; it was not put in.
    pub fn push(&mut self, frame: F) -> Result<(), OutboxFull> {
        if self.kept.len() >= self.limit {
            return Err(OutboxFull);
        }
        self.kept.push_back(frame);
        Ok(())
    }

    /// The frame that is sent next on this connection.
    pub fn unsent(&self) -> Option<&F> {
        self.kept.get(self.sent)
    }

    /// The frame that is sent next on this connection, which counts as begun from now on.
    pub fn next_unsent(&mut self) -> Option<&mut F> {
        let frame = self.kept.get_mut(self.sent)?;
        self.begun = self.begun.max(self.acknowledged + self.sent as u64 + 1);
        Some(frame)
    }

    /// All of the [next](FrameOutbox::next_unsent) frame was given to the connection.
    pub fn advance(&mut self) {
        self.sent = (self.sent + 1).min(self.kept.len());
    }

    /// Whether there is anything to send on this connection.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// The other side has `count` frames: they are not kept any more.
    ///
    /// # Errors
    /// [`WrongCount`] when it cannot have so many, or had more before.
    pub fn acknowledge(&mut self, count: u64) -> Result<(), WrongCount> {
        if count < self.acknowledged || count > self.begun {
            return Err(WrongCount);
        }
        let new = usize::try_from(count - self.acknowledged).map_err(|_| WrongCount)?;
        self.kept.drain(..new.min(self.kept.len()));
        self.sent = self.sent.saturating_sub(new);
        self.acknowledged = count;
        Ok(())
    }

    /// A new connection is there, on which the other side says that it has `count` frames. All others are sent
    /// (again), in their order. Returns how many of them had been sent before.
    ///
    /// # Errors
    /// As [`acknowledge`](FrameOutbox::acknowledge).
    pub fn resume(&mut self, count: u64) -> Result<u64, WrongCount> {
        self.acknowledge(count)?;
        self.sent = 0;
        Ok(self.begun - self.acknowledged)
    }

    /// The frames that are kept.
    pub fn kept_mut(&mut self) -> impl Iterator<Item = &mut F> {
        self.kept.iter_mut()
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether no frame can be put in.
    pub fn is_full(&self) -> bool {
        self.kept.len() >= self.limit
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_acknowledged_is_sent_again_in_order() {
        let mut outbox = FrameOutbox::new(3);
        for frame in 1..=3 {
            outbox.push(frame).unwrap();
        }
        assert_eq!(outbox.push(4), Err(OutboxFull));
        for frame in 1..=2 {
            assert_eq!(outbox.next_unsent(), Some(&mut frame.clone()));
            outbox.advance();
        }
        outbox.acknowledge(1).unwrap();
        outbox.push(4).unwrap();
        // The second was sent, and its acknowledgement is lost with the connection.
        assert_eq!(outbox.resume(1), Ok(1));
        for frame in 2..=4 {
            assert_eq!(outbox.next_unsent(), Some(&mut frame.clone()));
            outbox.advance();
        }
        assert!(!outbox.has_unsent() && outbox.next_unsent().is_none());
        assert_eq!(outbox.resume(4), Ok(0));
        assert!(outbox.is_empty());
    }

    #[test]
    fn counts_that_cannot_be_are_refused() {
        let mut outbox = FrameOutbox::new(3);
        outbox.push('a').unwrap();
        assert_eq!(outbox.acknowledge(1), Err(WrongCount), "it was not sent");
        outbox.next_unsent();
        outbox.advance();
        outbox.acknowledge(1).unwrap();
        assert_eq!(outbox.acknowledge(0), Err(WrongCount));
        assert_eq!(outbox.resume(2), Err(WrongCount));
        assert_eq!(outbox.resume(u64::MAX), Err(WrongCount));
    }

    #[test]
    fn another_process_sends_again_what_was_not_acknowledged() {
        let mut outbox = FrameOutbox::new(3);
        for frame in 1..=3 {
            outbox.push(frame).unwrap();
        }
        for _ in 0..2 {
            outbox.next_unsent();
            outbox.advance();
        }
        outbox.acknowledge(1).unwrap();
        let state = outbox.save(|frame| *frame);
        assert!(FrameOutbox::again(1, state.clone()).is_err(), "there is no room for it");
        let mut again = FrameOutbox::again(3, state.clone()).unwrap();
        assert_eq!(again.acknowledge(3), Err(WrongCount), "it was not sent");
        assert_eq!((again.resume(1), again.len()), (Ok(1), 2));
        assert_eq!(again.next_unsent(), Some(&mut 2));
        let wrong = |acknowledged, begun| {
            FrameOutbox::again(3, OutboxState { acknowledged, begun, ..state.clone() }).is_err()
        };
        assert!(wrong(3, 2) && wrong(1, 4));
    }

    /// A frame that was received before its last byte was seen to be sent is not possible; one whose bytes were
    /// given to the connection in part may have arrived whole only when all of them were.
    #[test]
    fn a_frame_that_was_begun_counts_as_repeated() {
        let mut outbox = FrameOutbox::new(2);
        outbox.push('a').unwrap();
        outbox.push('b').unwrap();
        outbox.next_unsent();
        assert_eq!(outbox.resume(0), Ok(1));
    }
}
