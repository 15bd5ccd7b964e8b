//! Copies of a session to memory of other machines: by the node, from memory that the process and it have in common.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rackbus_memory::ResourceHandle;
use rackbus_segment::directory::AttachedObject;
use rackbus_segment::landing::LANDING_SLOTS;
use rackbus_segment::message::{COPY_BUFFER, Refusal, Reply, SessionRequest};
use rackbus_segment::{Handle, ObjectId, Objects, SessionId};

use super::Segments;
use super::far::{BegunCopy, CopyPart, Far, PATIENCE};
use super::objects::ObjectStore;

/// Parts that have not taken effect when the next is asked for, at most: with that one, as many as may have landed.
const MOST_BEGUN: usize = LANDING_SLOTS as usize - 1;

/// What a session copies from; none until it asks for it.
#[derive(Debug, Default)]
pub(super) struct SessionCopies {
    store: ObjectStore,
    buffer: Option<ObjectId>,
    /// Where the next part of a copy begins that has begun: the connection, and the first byte.
    next: Option<(Handle, u64)>,
    /// Parts that were answered and have not taken effect: only the last one of a copy waits for them.
    begun: Vec<BegunCopy>,
    /// How copies are that have begun, by their connections.
    ongoing: BTreeMap<Handle, OngoingCopy>,
}

/// A copy of which some parts have ended.
#[derive(Debug, Default)]
struct OngoingCopy {
    /// The flush of what was stored before it.
    flush: Option<u64>,
    /// A part did not take effect in time, which nobody was told.
    has_failed: bool,
}

impl SessionCopies {
    /// Does what a session asks for about copies, which may take as long as a flush: the answer, and what goes beside it.
    /// `None` when it asks for something else, or shares all memory with other hosts.
    pub fn answer(
        &mut self,
        service: &Segments,
        session: SessionId,
        request: &SessionRequest,
    ) -> Option<(Reply, Option<ResourceHandle>)> {
        let answer = match *request {
            SessionRequest::CopyBuffer if service.lock().directory.between_machines() => {
                self.give().map(|beside| (Reply::Memory, Some(beside)))
            }
            SessionRequest::Copy { connection, offset, from, length, follows, more } => {
                let (far, connection) = service.far_of(session, connection)?;
                let part = CopyPart { offset, follows };
                let copied = self.copy(&far, connection, (from, length), (part, more));
                copied.map(|()| (Reply::Done, None))
            }
            _ => return None,
        };
        Some(answer.unwrap_or_else(|refusal| (Reply::Refused(refusal), None)))
    }

    /// The session's memory to copy from, which is made for its first question.
    fn give(&mut self) -> Result<ResourceHandle, Refusal> {
        let object = match self.buffer {
            Some(object) => object,
            None => self.store.memory(COPY_BUFFER.into()).map_err(Refusal::System)?,
        };
        self.buffer = Some(object);
        let handles = self.store.attach(&[AttachedObject { object, write: true }]);
        let handles = handles.map_err(|error| Refusal::System(error.to_string()))?;
        handles.into_iter().next().ok_or_else(|| Refusal::System("no memory".to_owned()))
    }

    /// Copies a part; with the last one, all have taken effect. One that goes on with a copy is the next one of that.
    fn copy(
        &mut self,
        far: &Arc<Far>,
        connection: Handle,
        (from, length): (u32, u32),
        (part, more): (CopyPart, bool),
    ) -> Result<(), Refusal> {
        let next = self.next.take();
        if part.follows && next != Some((connection, part.offset)) {
            return Err(Refusal::Illegal("a part of a copy that does not go on with one".into()));
        }
        let memory = self.buffer.and_then(|buffer| self.store.get(buffer)?.region().ok());
        let bytes = memory.and_then(|memory| {
            // Read once: the process may store there meanwhile.
            let part = memory.whole().part(from as usize, length as usize)?;
            let mut bytes = far.copy_buffer(part.len());
            part.copy_to(&mut bytes);
            Some(bytes)
        });
        let outside = || Refusal::Illegal("a copy of bytes that are not in the copy buffer".into());
        self.begun.push(far.begin_copy(connection, bytes.ok_or_else(outside)?, part)?);
        let until = Instant::now() + PATIENCE;
        self.wait_for(if more { None } else { Some(connection) }, until);
        if self.ongoing.get(&connection).is_some_and(|copy| copy.has_failed) {
            self.ongoing.remove(&connection);
            return Err(Refusal::NotResponding);
        }
        if more {
            self.next = Some((connection, part.offset + u64::from(length)));
            return Ok(());
        }
        let flush = self.ongoing.remove(&connection).and_then(|copy| copy.flush);
        far.end_copy(connection, flush, until)
    }

    /// Waits until no more parts are under way than may be, or none of the copy to a connection that `ends`.
    fn wait_for(&mut self, ends: Option<Handle>, until: Instant) {
        let is_awaited = |begun: &[BegunCopy]| match ends {
            Some(connection) => begun.iter().position(|it| it.connection() == connection),
            None => (begun.len() > MOST_BEGUN).then_some(0),
        };
        while let Some(at) = is_awaited(&self.begun) {
            let begun = self.begun.remove(at);
            let connection = begun.connection();
            let copy = self.ongoing.entry(connection).or_default();
            match begun.wait(until) {
                Some(flush) => copy.flush = flush.or(copy.flush),
                None => {
                    copy.has_failed = true;
                    // What would still be made of it comes too late.
                    self.begun.retain(|it| it.connection() != connection);
                }
            }
        }
        // Of one that nobody ended, nothing is kept but that it failed: without its flush, another one is made.
        let begun = &self.begun;
        let is_begun = |of: Handle| begun.iter().any(|it| it.connection() == of);
        self.ongoing.retain(|of, copy| copy.has_failed || ends == Some(*of) || is_begun(*of));
    }
}

impl Segments {
    /// What this host has in common with the machine that a session's connection leads to, and the connection.
    fn far_of(&self, session: SessionId, keeper: Handle) -> Option<(Arc<Far>, Handle)> {
        let state = self.lock();
        let (owner, connection) = state.directory.owner_of(session, keeper)?;
        let owner = Some(owner).filter(|owner| state.is_on_another_machine(*owner))?;
        Some((state.fars.get(&owner)?.clone(), connection))
    }
}
