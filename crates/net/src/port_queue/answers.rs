//! Answers for the owner of a queue to what it asked of all stations, which its own node knew: frames that come by no ring.
//!
//! There is room for a few. Who asks faster than it takes answers is answered as if nobody here knew: those hear it that
//! have the address.

use std::collections::VecDeque;

use rackbus_memory::SharedMemory;

use crate::ethernet::TAG;
use crate::neighbours::LONGEST_ANSWER;
use crate::offload::Offload;
use crate::port::Frame;

/// Answers that wait at most.
const PLACES: usize = 64;
/// Bytes that each has room for.
const PLACE: usize = (LONGEST_ANSWER + TAG).next_multiple_of(64);

#[derive(Debug, Default)]
pub(super) struct Answers {
    /// From the first answer on.
    memory: Option<SharedMemory>,
    /// Bytes of each that waits, the next one first.
    waiting: VecDeque<usize>,
    /// Where the next one lies.
    first: usize,
    /// The next one was given out.
    is_current: bool,
}

impl Answers {
    /// Puts an answer behind the others; false where there is no room.
    pub fn put(&mut self, answer: &[u8]) -> bool {
        if self.waiting.len() >= PLACES || answer.len() > PLACE {
            return false;
        }
        if self.memory.is_none() {
            match SharedMemory::create("answers", (PLACES * PLACE) as u64) {
                Ok(memory) => self.memory = Some(memory),
                Err(error) => {
                    tracing::debug!(%error, "there is no memory for answers: stations are asked");
                    return false;
                }
            }
        }
        let at = (self.first + self.waiting.len()) % PLACES * PLACE;
        let place = self.memory.as_ref().and_then(|it| it.whole().part(at, answer.len()));
        let Some(place) = place else { return false };
        place.copy_from(answer);
        self.waiting.push_back(answer.len());
        true
    }

    /// Whether no answer waits for its asker.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Gives the next one out, if there is one: whether it was not given out before.
    pub fn begin(&mut self) -> Option<bool> {
        let is_new = !self.is_current;
        self.is_current = !self.is_empty();
        self.is_current.then_some(is_new)
    }

    /// The oldest answer that waits, as the frame that its asker receives.
    pub fn frame(&self) -> Option<Frame<'_>> {
        let bytes =
            self.memory.as_ref()?.whole().part(self.first * PLACE, *self.waiting.front()?)?;
        Some(Frame { offload: Offload::default(), bytes })
    }

    /// The one that was given out is done with; false where none was.
    pub fn consume(&mut self) -> bool {
        if !std::mem::take(&mut self.is_current) {
            return false;
        }
        self.waiting.pop_front();
        self.first = (self.first + 1) % PLACES;
        true
    }
}
