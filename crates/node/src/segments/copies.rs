//! Copies of a session to memory of other machines: by the node, from memory that the process and it have in common.

use std::sync::Arc;

use rackbus_memory::ResourceHandle;
use rackbus_segment::directory::AttachedObject;
use rackbus_segment::message::{COPY_BUFFER, Refusal, Reply, SessionRequest};
use rackbus_segment::{Handle, ObjectId, Objects, SessionId};

use super::Segments;
use super::far::{CopyPart, Far};
use super::objects::ObjectStore;

/// What a session copies from; none until it asks for it.
#[derive(Debug, Default)]
pub(super) struct SessionCopies {
    store: ObjectStore,
    buffer: Option<ObjectId>,
    /// Where the next part of a copy begins that has begun: the connection, and the first byte.
    next: Option<(Handle, u64)>,
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
                let part = CopyPart { offset, follows, more };
                self.copy(&far, connection, (from, length), part).map(|()| (Reply::Done, None))
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

    /// Copies a part. One that goes on with a copy is the next one of that.
    fn copy(
        &mut self,
        far: &Arc<Far>,
        connection: Handle,
        (from, length): (u32, u32),
        part: CopyPart,
    ) -> Result<(), Refusal> {
        let next = self.next.take();
        if part.follows && next != Some((connection, part.offset)) {
            return Err(Refusal::Illegal("a part of a copy that does not go on with one".into()));
        }
        let memory = self.buffer.and_then(|buffer| self.store.get(buffer)?.region().ok());
        let bytes = memory.and_then(|memory| {
            // Read once: the process may store there meanwhile.
            let part = memory.whole().part(from as usize, length as usize)?;
            let mut bytes = vec![0; length as usize];
            part.copy_to(&mut bytes);
            Some(bytes)
        });
        let outside = || Refusal::Illegal("a copy of bytes that are not in the copy buffer".into());
        far.copy(connection, bytes.ok_or_else(outside)?, part)?;
        let end = part.offset + u64::from(length);
        self.next = part.more.then_some((connection, end));
        Ok(())
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
