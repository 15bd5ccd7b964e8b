//! A session with its function as a value: another process continues with the connected socket, and
//! the client does not notice.
//!
//! What a session knows besides its function is what was promised to the client when the version
//! was negotiated. A session stops between two messages: what the client sends meanwhile waits in
//! the socket for the next process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_fabric::Lending;
use rackbus_memory::{Event, GatePassage, Stream};
use rackbus_spec::vfio_user::VERSION as PROTOCOL;
use serde::{Deserialize, Serialize};

use super::device::{EngineDevice, ServedDevice};
use super::server::ClientSession;
use super::wire::{MAX_FDS, MAX_TRANSFER, WireError};
use crate::engine::EngineHandle;
use crate::polled::{NotPolled, PolledRegisters};
use crate::state::{self, FunctionState, RestoreError, SaveError, Saved, VERSION};

/// What a client was told that it may rely on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Promised {
    pub major: u16,
    pub minor: u16,
    pub max_msg_fds: usize,
    pub max_data_xfer_size: usize,
    pub max_dma_maps: usize,
}

impl Promised {
    /// What this program promises.
    pub fn here() -> Promised {
        Promised {
            major: PROTOCOL.0,
            minor: PROTOCOL.1,
            max_msg_fds: MAX_FDS,
            max_data_xfer_size: MAX_TRANSFER,
            max_dma_maps: rackbus_memory::space::max_mappings(),
        }
    }

    /// Whether this program keeps to it.
    fn check(&self) -> Result<(), RestoreError> {
        let here = Promised::here();
        let kept = self.major == here.major
            && self.minor <= here.minor
            && self.max_msg_fds <= here.max_msg_fds
            && self.max_data_xfer_size <= here.max_data_xfer_size
            && self.max_dma_maps <= here.max_dma_maps;
        if kept {
            return Ok(());
        }
        Err(RestoreError::Invalid(format!(
            "the client was promised {self:?}, here is {here:?}; raise vm.max_map_count or use \
             another program"
        )))
    }
}

/// A conversation between two of its messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestingConversation(pub(super) Option<Promised>);

impl RestingConversation {
    /// Whether this program keeps to what the client was promised.
    ///
    /// # Errors
    /// [`RestoreError`] when it does not.
    pub fn check(&self) -> Result<(), RestoreError> {
        self.0.as_ref().map_or(Ok(()), Promised::check)
    }
}

/// Why [`serve_until`] served no longer.
#[derive(Debug)]
pub enum Ended {
    /// The client closed the connection.
    Closed,
    /// It was asked to pause.
    Paused(RestingConversation),
}

/// Holds a conversation, from its beginning or from where it was paused, until the client closes
/// the connection or `pause` is readable. A message that has begun to arrive is answered first. One whose
/// stream has no [handle](Stream::handle) cannot be taken up by another process, and does not pause.
///
/// # Errors
/// As [`serve`](super::serve).
pub fn serve_until(
    stream: &dyn Stream,
    device: &dyn ServedDevice,
    conversation: RestingConversation,
    pause: &impl AsFd,
) -> Result<Ended, WireError> {
    let mut session = ClientSession::new(device, conversation);
    loop {
        if let Some(handle) = stream.handle() {
            let socket = handle.as_descriptor();
            Event::wait_any(&[pause.as_fd(), socket], None);
            if Event::wait_any(&[pause.as_fd()], Some(0)) {
                return Ok(Ended::Paused(session.into_conversation()));
            }
            // A signal ended the wait, or the pause was over before the second look: without a message to receive, a
            // pause would not be noticed.
            if !Event::wait_any(&[socket], Some(0)) {
                continue;
            }
        }
        if !session.answer_next(stream)? {
            return Ok(Ended::Closed);
        }
    }
}

/// Holds a conversation as [`serve_until`] does, until the client closes the connection, and rests whenever
/// the gate of `passage` is closed. Where it rests is told to `at`, and that it continues.
///
/// # Errors
/// As [`serve`](super::serve).
pub fn serve_within(
    stream: &dyn Stream,
    device: &dyn ServedDevice,
    mut conversation: RestingConversation,
    passage: &GatePassage,
    at: impl Fn(Option<RestingConversation>),
) -> Result<(), WireError> {
    loop {
        match serve_until(stream, device, conversation, passage.gate())? {
            Ended::Closed => return Ok(()),
            Ended::Paused(paused) => {
                at(Some(paused.clone()));
                passage.rest();
                at(None);
                conversation = paused;
            }
        }
    }
}

/// A session with its function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionState {
    version: u32,
    conversation: RestingConversation,
    /// The function; its model says what the medium is opened with.
    pub function: FunctionState,
}

/// A session's state with the descriptors that go with it; as [`Saved`].
#[derive(Debug)]
pub struct SavedSession {
    /// What can be written down.
    pub state: SessionState,
    /// The right to continue from it, the user's memory and eventfds.
    pub descriptors: Vec<OwnedFd>,
    /// What the medium has to be opened with.
    pub medium: Vec<OwnedFd>,
}

impl SavedSession {
    /// The function's registers that its driver has as memory, for who looks after them where nobody goes on with the function.
    ///
    /// # Errors
    /// When the process has no descriptors left, or what came is no such memory.
    pub fn registers(&self) -> Result<Option<PolledRegisters>, RestoreError> {
        let Some(registers) = &self.state.function.registers else { return Ok(None) };
        let file = self.descriptors.get(registers.memory as usize);
        let file = file.ok_or_else(|| RestoreError::Invalid("registers without memory".into()))?;
        let file = file.try_clone().map_err(NotPolled::from)?;
        Ok(Some(PolledRegisters::adopt(file, registers.watched.length())?))
    }
}

impl SessionState {
    /// Of a `conversation` that rests, and its function.
    pub(super) fn new(conversation: RestingConversation, function: FunctionState) -> SessionState {
        SessionState { version: VERSION, conversation, function }
    }

    pub(super) fn into_parts(self) -> (RestingConversation, FunctionState) {
        (self.conversation, self.function)
    }

    /// Serialises the state for the process that continues.
    ///
    /// # Errors
    /// When it cannot be written down.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SaveError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// From bytes, whoever wrote them.
    ///
    /// # Errors
    /// [`RestoreError`] when they are no state, or of a newer version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, RestoreError> {
        let session: SessionState = state::read(bytes)?;
        session.function.check_version()?;
        Ok(session)
    }
}

impl EngineDevice {
    /// The session and its function, to continue with elsewhere. `conversation` was paused; the
    /// function ends here, see [`Endpoint::save`](crate::Endpoint::save).
    ///
    /// # Errors
    /// [`SaveError`]; the conversation can go on here then, unless the engine has stopped.
    pub fn save(&self, conversation: RestingConversation) -> Result<SavedSession, SaveError> {
        let saved = self.engine().call(crate::Endpoint::save)??;
        let state = SessionState::new(conversation, saved.state);
        Ok(SavedSession { state, descriptors: saved.descriptors, medium: saved.medium })
    }

    /// Whether what the saved function has under way with its medium has ended: the process may become another
    /// program without waiting for it. True when the engine has stopped.
    pub fn is_settled(&self) -> bool {
        self.engine().call(crate::Endpoint::is_settled).unwrap_or(true)
    }

    /// Goes on here with a session that was [saved](EngineDevice::save), as if it had not been.
    ///
    /// # Errors
    /// [`RestoreError`] when somebody else has gone on with it.
    pub fn take_back(&self, saved: SavedSession) -> Result<(), RestoreError> {
        let SavedSession { state, descriptors, medium } = saved;
        let saved = Saved { state: state.function, descriptors, medium };
        self.engine().call(move |endpoint| endpoint.take_back(saved))?
    }

    /// Goes on with a function that nobody used when it was saved.
    ///
    /// # Errors
    /// [`RestoreError`]; the function is scrubbed then.
    pub fn resume_unused(
        engine: &EngineHandle,
        state: SessionState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), RestoreError> {
        engine.call(move |endpoint| endpoint.restore(&state.function, descriptors))?
    }

    /// The user has what it had of the function's registers as memory.
    fn share_again(&self, function: &FunctionState) -> Result<(), RestoreError> {
        let Some(registers) = &function.registers else { return Ok(()) };
        let shared = self.share_registers(registers.bar, registers.watched.length());
        shared.map_err(|error| RestoreError::Device(error.to_string()))
    }

    /// Goes on with a session: `engine` runs a new model, which takes the state of the old one, and the
    /// user lends by `lending` what it had lent, over its `stream` as in
    /// [`session_of`](EngineDevice::session_of). [`serve_until`] takes the conversation up again with what this returns. As of a
    /// [session](EngineDevice::session), the function is scrubbed when the device is dropped.
    ///
    /// # Errors
    /// [`RestoreError`]; the function is scrubbed then.
    pub fn resume(
        engine: EngineHandle,
        state: SessionState,
        descriptors: Vec<OwnedFd>,
        lending: Lending,
        stream: Option<Arc<dyn Stream>>,
    ) -> Result<(EngineDevice, RestingConversation), RestoreError> {
        let SessionState { conversation, function, .. } = state;
        conversation.check()?;
        let device = EngineDevice::new(engine.clone());
        let session = device.and_then(|device| device.session_of(lending, stream));
        let session = session.map_err(|error| RestoreError::Device(error.to_string()))?;
        session.share_again(&function)?;
        engine.call(move |endpoint| endpoint.restore(&function, descriptors))??;
        Ok((session, conversation))
    }
}
