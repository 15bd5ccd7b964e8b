//! The state of a function as a value: taken out of one process and put into another, which continues
//! where the first one stopped, unnoticed by the function's user.
//!
//! A value is what can be written down, and beside it the descriptors that it names by number: the
//! user's memory and eventfds. It has a version; one that is newer than this code, or that no code
//! wrote, is refused. Whoever reads a value trusts nothing in it: it may come from another host.
//!
//! Saving ends a life of the function. From then on the old one does nothing any more, neither
//! takes commands nor answers any, so that each command is answered once. For the same reason a
//! value is restored once: among its descriptors is the right to continue from it, which whoever
//! restores it takes, in whatever process, however many copies of the value there are.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rackbus_fabric::BarPlace;
use rackbus_memory::space::{Behind, DmaMapping, KEPT_FILES};
use rackbus_memory::{Access, DmaSpace, Event, MapError, MemoryHandle, PeerEvent};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::engine::EngineStopped;
use crate::interrupts::WiringError;
use crate::polled::{NotPolled, WatchedState};

/// The version of everything that this crate writes. The model's own state has another.
pub const VERSION: u32 = 1;

/// Why a function's state could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Its class has no such thing.
    #[error("the state of functions of this class cannot be saved")]
    Unsupported,
    /// It was saved before.
    #[error("the function was saved already and continues in another process")]
    Ended,
    /// The registers that its user has as memory cannot be passed on.
    #[error("the function's registers in memory: {0}")]
    Registers(#[from] NotPolled),
    /// Its user's memory was taken away.
    #[error("the function's memory was taken away from it; there is nothing to go on with")]
    Revoked,
    /// Its user mapped more files than are kept.
    #[error("the function's user mapped more than {0} different files, which are not all kept")]
    TooManyFiles(usize),
    /// Descriptors could not be obtained.
    #[error("descriptors for the function's state: {0}")]
    Descriptors(#[from] std::io::Error),
    /// Its engine has stopped.
    #[error(transparent)]
    Stopped(#[from] EngineStopped),
    /// The state could not be written down.
    #[error("the function's state cannot be written down: {0}")]
    Written(#[from] serde_json::Error),
}

/// Why a function's state could not be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Its class has no such thing.
    #[error("the state of functions of this class cannot be restored")]
    Unsupported,
    /// Newer code wrote it.
    #[error("the state has version {found}, this program knows {known}; use a newer program")]
    Newer {
        /// The version it has.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// It is no state at all.
    #[error("the state is damaged: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Somebody continued from it.
    #[error("the state was restored already, which can be done once")]
    Taken,
    /// It says what cannot be.
    #[error("the state is damaged: {0}")]
    Invalid(String),
    /// It is another function's.
    #[error("the state is of another function: {0}")]
    Different(String),
    /// The engine that is to run it has stopped.
    #[error(transparent)]
    Stopped(#[from] EngineStopped),
    /// It cannot be served.
    #[error("the function cannot be served: {0}")]
    Device(String),
    /// Memory could not be mapped.
    #[error("the state's memory at {iova:#x}: {cause}")]
    Map {
        /// Address of the mapping in the user's address space.
        iova: u64,
        /// What the system said.
        cause: MapError,
    },
    /// An interrupt could not be wired.
    #[error("the state's interrupts: {0}")]
    Interrupts(#[from] WiringError),
    /// Its registers in memory could not be gone on with.
    #[error("the state's registers in memory: {0}")]
    Registers(#[from] NotPolled),
}

/// The state of a device model, as its class writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelState {
    /// Name of the function's class.
    pub class: String,
    /// The version of what follows, counted by the class.
    pub version: u32,
    /// State of the model, as its class writes it.
    #[serde(deserialize_with = "whole_numbers")]
    pub state: Value,
}

/// A state in which all numbers are whole, as models write them: one with a fraction, or beyond 64 bits, would not be
/// written again as it was read.
fn whole_numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
    fn is_whole(value: &Value) -> bool {
        match value {
            Value::Number(number) => !number.is_f64(),
            Value::Array(values) => values.iter().all(is_whole),
            Value::Object(fields) => fields.values().all(is_whole),
            Value::Null | Value::Bool(_) | Value::String(_) => true,
        }
    }
    let state = Value::deserialize(deserializer)?;
    match is_whole(&state) {
        true => Ok(state),
        false => Err(D::Error::custom("a number of the model's state is no 64-bit integer")),
    }
}

impl ModelState {
    /// `state` of class `class` in its `version`.
    ///
    /// # Errors
    /// When it cannot be written down.
    pub fn new(class: &str, version: u32, state: &impl Serialize) -> Result<Self, SaveError> {
        Ok(ModelState { class: class.to_owned(), version, state: serde_json::to_value(state)? })
    }

    /// The state, of class `class` and no newer than version `known`.
    ///
    /// # Errors
    /// [`RestoreError`] when it is anything else.
    pub fn read<T: DeserializeOwned>(&self, class: &str, known: u32) -> Result<T, RestoreError> {
        if self.class != class {
            return Err(RestoreError::Different(format!("of class {:?}", self.class)));
        }
        check_version(self.version, known)?;
        Ok(T::deserialize(&self.state)?)
    }
}

/// A mapping of the user's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MappingState {
    pub iova: u64,
    pub length: u64,
    pub read: bool,
    pub write: bool,
    /// Descriptor and offset; none where there is no memory behind it.
    pub memory: Option<(u32, u64)>,
    /// The memory is a device's, which whoever goes on [gives](crate::Endpoint::give_memory). Programs that know no such
    /// functions continue with others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
}

/// A window to a BAR of another function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WindowState {
    pub mapping: MappingState,
    /// The function whose BAR it is, `HOST/DEVICE`.
    pub function: String,
    pub bar: u8,
    /// Bytes from the beginning of the BAR.
    pub offset: u64,
}

/// Registers that the function's user has as memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegistersState {
    pub bar: u8,
    /// The descriptor of the memory.
    pub memory: u32,
    pub watched: WatchedState,
}

/// Levels, bits and wires of a function's interrupts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InterruptState {
    /// Vectors with their descriptors.
    pub wires: Vec<(u32, u32)>,
    /// Vectors that were raised and not delivered.
    pub pending: Vec<u32>,
    /// The descriptor of the pin.
    pub intx: Option<u32>,
    pub intx_level: bool,
    pub intx_masked: bool,
}

/// The state of a whole function; see [`Endpoint::save`](crate::Endpoint::save).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    pub(crate) version: u32,
    /// The bytes of configuration space that software may change, where they are not zero.
    pub(crate) config: Vec<(u16, u8)>,
    /// The same of the MSI-X table.
    pub(crate) msix_table: Vec<(u32, u8)>,
    pub(crate) interrupts: InterruptState,
    pub(crate) mappings: Vec<MappingState>,
    /// Programs that know no windows continue with a function that has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) windows: Vec<WindowState>,
    /// Programs that know none continue with a function whose registers are mapped by nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) registers: Option<RegistersState>,
    /// The descriptor of the right to continue from it.
    pub(crate) claim: u32,
    /// How many descriptors belong to it.
    pub(crate) descriptors: u32,
    pub(crate) model: ModelState,
}

/// A function's state with the descriptors that go with it.
#[derive(Debug)]
pub struct Saved {
    /// What can be written down.
    pub state: FunctionState,
    /// The right to continue from it, the user's memory and eventfds, as the state numbers them.
    pub descriptors: Vec<OwnedFd>,
    /// What the model's medium has to be opened with, as its class says.
    pub medium: Vec<OwnedFd>,
}

impl FunctionState {
    /// Name of the function's class.
    pub fn class(&self) -> &str {
        &self.model.class
    }

    /// What the function's class wrote down.
    pub fn model(&self) -> &ModelState {
        &self.model
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
        read(bytes)
    }

    /// Whether it is known here, where it is part of something else.
    pub(crate) fn check_version(&self) -> Result<(), RestoreError> {
        check_version(self.version, VERSION)
    }
}

/// Reads a value with a version, which is judged before anything else of it is looked at.
pub(crate) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RestoreError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } = serde_json::from_slice(bytes)?;
    check_version(version, VERSION)?;
    Ok(serde_json::from_slice(bytes)?)
}

fn check_version(found: u32, known: u32) -> Result<(), RestoreError> {
    match found {
        0 => Err(RestoreError::Invalid("its version is 0".to_owned())),
        found if found > known => Err(RestoreError::Newer { found, known }),
        _ => Ok(()),
    }
}

/// The right to continue from a value: an eventfd that was rung once. Whoever takes the count has it.
pub(crate) struct Claim(PeerEvent);

impl Claim {
    /// The right to continue from a new value.
    pub fn create() -> std::io::Result<OwnedFd> {
        let event = Event::new()?;
        event.ring();
        Ok(event.into())
    }

    /// Takes the right that came with a value, unless somebody has.
    pub fn take(fd: OwnedFd) -> Result<Claim, RestoreError> {
        let event = PeerEvent::new(fd).map_err(|error| RestoreError::Invalid(error.to_string()))?;
        if event.drain() { Ok(Claim(event)) } else { Err(RestoreError::Taken) }
    }

    /// It was not used.
    pub fn give_back(self) {
        self.0.ring();
    }
}

/// The bytes that are not zero, with where they are.
pub(crate) fn sparse<T: TryFrom<usize>>(bytes: &[u8]) -> Vec<(T, u8)> {
    let bytes = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
    bytes.filter_map(|(at, byte)| Some((T::try_from(at).ok()?, *byte))).collect()
}

/// What a function reaches, as a value: the files are appended to `descriptors`, each once.
pub(crate) struct MappingSaver<'d> {
    descriptors: &'d mut Vec<OwnedFd>,
    numbers: Vec<(*const OwnedFd, u32)>,
}

impl<'d> MappingSaver<'d> {
    pub fn new(descriptors: &'d mut Vec<OwnedFd>) -> Self {
        MappingSaver { descriptors, numbers: Vec::new() }
    }

    /// What its user mapped.
    pub fn mappings(&mut self, dma: &DmaSpace) -> Result<Vec<MappingState>, SaveError> {
        dma.mappings().map(|mapping| self.mapping(mapping)).collect()
    }

    /// Its windows to BARs of others.
    pub fn windows(&mut self, dma: &DmaSpace) -> Result<Vec<WindowState>, SaveError> {
        let window = |(mapping, place): (DmaMapping<'_>, &BarPlace)| {
            let BarPlace { function, bar, offset } = place.clone();
            Ok(WindowState { mapping: self.mapping(mapping)?, function, bar, offset })
        };
        dma.windows().map(window).collect()
    }

    fn mapping(&mut self, mapping: DmaMapping<'_>) -> Result<MappingState, SaveError> {
        let device = mapping.behind.is_of_device();
        let memory = match mapping.behind {
            Behind::Nothing => None,
            _ if device => None,
            Behind::NotKept(..) => return Err(SaveError::TooManyFiles(KEPT_FILES)),
            Behind::Kept(file, _, offset) => {
                let known = self.numbers.iter().find(|(known, _)| *known == Arc::as_ptr(file));
                let number = match known {
                    Some((_, number)) => *number,
                    None => {
                        let number = u32::try_from(self.descriptors.len()).unwrap_or(u32::MAX);
                        self.descriptors.push(file.try_clone()?);
                        self.numbers.push((Arc::as_ptr(file), number));
                        number
                    }
                };
                Some((number, *offset))
            }
        };
        let state = MappingState::new((mapping.iova, mapping.length), mapping.access, memory);
        Ok(MappingState { device, ..state })
    }
}

impl MappingState {
    /// A range, its first address and length, with the number of its memory's descriptor and where it begins there.
    pub fn new((iova, length): (u64, u64), access: Access, memory: Option<(u32, u64)>) -> Self {
        let (read, write) = (access.contains(Access::READ), access.contains(Access::WRITE));
        MappingState { iova, length, read, write, memory, device: false }
    }

    pub fn access(&self) -> Access {
        let mut access = Access::empty();
        access.set(Access::READ, self.read);
        access.set(Access::WRITE, self.write);
        access
    }
}

/// Descriptors of a state, each of which is taken once: memory files many times.
pub(crate) struct Descriptors(Vec<Option<Arc<OwnedFd>>>);

impl Descriptors {
    /// Those of a state that has `expected` of them.
    pub fn new(fds: Vec<OwnedFd>, expected: u32) -> Result<Self, RestoreError> {
        if fds.len() != expected as usize {
            let text = format!("it comes with {} descriptors instead of {expected}", fds.len());
            return Err(RestoreError::Invalid(text));
        }
        Ok(Descriptors(fds.into_iter().map(|fd| Some(Arc::new(fd))).collect()))
    }

    /// The memory in the file of this number, from `offset` on.
    pub fn memory(&self, number: u32, offset: u64) -> Result<MemoryHandle, RestoreError> {
        let memory = MemoryHandle::shared(self.file(number)?, offset);
        memory.map_err(|cause| unreadable(number, &cause))
    }

    /// The same, of what is behind a BAR: a device's file is such a one again.
    pub fn bar(
        &self,
        number: u32,
        offset: u64,
        place: &BarPlace,
    ) -> Result<MemoryHandle, RestoreError> {
        let memory = MemoryHandle::of_bar(self.file(number)?, offset, place);
        memory.map_err(|cause| unreadable(number, &cause))
    }

    fn file(&self, number: u32) -> Result<Arc<OwnedFd>, RestoreError> {
        let file = self.0.get(number as usize).and_then(Option::as_ref);
        Ok(file.ok_or_else(|| missing(number))?.clone())
    }

    /// The one with this number, to keep. It is not a memory file's.
    pub fn take(&mut self, number: u32) -> Result<OwnedFd, RestoreError> {
        let taken = self.0.get_mut(number as usize).and_then(Option::take);
        taken.and_then(Arc::into_inner).ok_or_else(|| missing(number))
    }
}

fn unreadable(number: u32, cause: &std::io::Error) -> RestoreError {
    RestoreError::Invalid(format!("descriptor {number}: {cause}"))
}

fn missing(number: u32) -> RestoreError {
    RestoreError::Invalid(format!("there is no descriptor {number}, or it was used"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a fuzzer found: a number of 90 digits was read as another one than it was written as.
    #[test]
    fn numbers_of_a_models_state_are_whole() {
        let model = |number: &str| {
            let text =
                format!("{{\"class\":\"nvme\",\"version\":1,\"state\":{{\"a\":[{number}]}}}}");
            serde_json::from_str::<ModelState>(&text)
        };
        for whole in ["0", "18446744073709551615", "-9223372036854775808"] {
            assert!(model(whole).is_ok(), "{whole}");
        }
        for other in ["18446744073709551616", "0.5", "1e3", &"8".repeat(90)] {
            assert!(model(other).is_err(), "{other}");
        }
    }
}
