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
            SessionRequest::Copy { connection, offset, from, length, follows, rest } => {
                let (far, connection) = service.far_of(session, connection)?;
                let part = CopyPart { offset, length, follows, rest };
                self.copy(&far, connection, from, part).map(|()| (Reply::Done, None))
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

    fn copy(
        &self,
        far: &Arc<Far>,
        connection: Handle,
        from: u32,
        part: CopyPart,
    ) -> Result<(), Refusal> {
        let outside = || Refusal::Illegal("a copy of bytes that are not in the copy buffer".into());
        let memory = self.buffer.and_then(|buffer| self.store.get(buffer)?.region().ok());
        let memory = memory.ok_or_else(outside)?;
        if part.length == 0 || from.checked_add(part.length).is_none_or(|end| end > COPY_BUFFER) {
            return Err(outside());
        }
        match far.copy(connection, (&memory, from as usize), part) {
            true => Ok(()),
            false => Err(Refusal::NotResponding),
        }
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
