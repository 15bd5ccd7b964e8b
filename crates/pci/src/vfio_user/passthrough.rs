//! A session with a function that no engine here runs, such as one of the machine, as a value.
//!
//! What the function does goes on in the machine meanwhile. The value has what its user gave it, and what its owner needs
//! to take it over: a state of its own, and descriptors. It is written as that of a function with an engine is, and can be
//! gone on with once.

use std::os::fd::OwnedFd;

use rackbus_fabric::{BarPlace, LentMemory, ObjectKey};
use rackbus_memory::{Access, MemoryHandle};

use super::session::{RestingConversation, SavedSession, SessionState};
use crate::state::{
    Claim, Descriptors, FunctionState, InterruptState, MappingState, ModelState, RestoreError,
    SaveError, VERSION, WindowState,
};

/// A range of the addresses of a function's user.
#[derive(Debug, Clone)]
pub struct UserMapping {
    /// First address of the range, as the function sees it.
    pub iova: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// What the function may do there.
    pub access: Access,
    /// The memory that is there; `None` where the function reaches nothing.
    pub memory: Option<MemoryHandle>,
}

/// What the user of a function gave it.
#[derive(Debug, Default)]
pub struct UserResources {
    /// What the user mapped.
    pub mappings: Vec<UserMapping>,
    /// Windows to BARs of its other functions.
    pub windows: Vec<(UserMapping, BarPlace)>,
    /// Vectors, each with the eventfd that it is wired to.
    pub vectors: Vec<(u32, OwnedFd)>,
    /// The eventfd of the interrupt pin.
    pub pin: Option<OwnedFd>,
}

/// A session with a function that runs without an engine.
#[derive(Debug)]
pub struct PassthroughSession {
    /// The conversation with the user, which rests.
    pub conversation: RestingConversation,
    /// What the user gave the function.
    pub resources: UserResources,
    /// The bytes of the MSI-X table that are not zero, each with its offset.
    pub msix_table: Vec<(u32, u8)>,
    /// What the owner of the function writes down beside that.
    pub model: ModelState,
    /// The descriptors by which the owner has the function.
    pub medium: Vec<OwnedFd>,
}

impl PassthroughSession {
    /// The session as a value, to go on with elsewhere.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn save(self) -> Result<SavedSession, SaveError> {
        let UserResources { mappings, windows, vectors, pin } = self.resources;
        let mut files = FileNumbers { descriptors: vec![Claim::create()?], known: Vec::new() };
        let mappings = mappings.iter().map(|it| files.mapping(it)).collect::<Result<_, _>>()?;
        let window = |(mapping, place): &(UserMapping, BarPlace)| {
            let BarPlace { function, bar, offset } = place.clone();
            Ok::<_, SaveError>(WindowState {
                mapping: files.mapping(mapping)?,
                function,
                bar,
                offset,
            })
        };
        let windows = windows.iter().map(window).collect::<Result<_, _>>()?;
        let wires = vectors.into_iter().map(|(vector, event)| (vector, files.put(event)));
        let wires = wires.collect();
        let intx = pin.map(|event| files.put(event));
        let descriptors = files.descriptors;
        let function = FunctionState {
            version: VERSION,
            config: Vec::new(),
            msix_table: self.msix_table,
            interrupts: InterruptState { wires, intx, ..InterruptState::default() },
            mappings,
            windows,
            registers: None,
            claim: 0,
            descriptors: u32::try_from(descriptors.len()).unwrap_or(u32::MAX),
            model: self.model,
        };
        let state = SessionState::new(self.conversation, function);
        Ok(SavedSession { state, descriptors, medium: self.medium })
    }

    /// The session of a value that nobody has gone on with. From now on nobody else can.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn restore(saved: SavedSession) -> Result<PassthroughSession, RestoreError> {
        let SavedSession { state, descriptors, medium } = saved;
        let (conversation, function) = state.into_parts();
        let mut descriptors = Descriptors::new(descriptors, function.descriptors)?;
        Claim::take(descriptors.take(function.claim)?)?;
        let mut resources = UserResources::default();
        for mapping in &function.mappings {
            let memory = match mapping.memory {
                Some((number, offset)) => Some(descriptors.memory(number, offset)?),
                None => None,
            };
            resources.mappings.push(mapping.with(memory));
        }
        for WindowState { mapping, function, bar, offset } in &function.windows {
            let no_memory = || RestoreError::Invalid("a window without memory".to_owned());
            let (number, at) = mapping.memory.ok_or_else(no_memory)?;
            let place = BarPlace { function: function.clone(), bar: *bar, offset: *offset };
            let memory = descriptors.bar(number, at, &place)?;
            resources.windows.push((mapping.with(Some(memory)), place));
        }
        for (vector, number) in &function.interrupts.wires {
            resources.vectors.push((*vector, descriptors.take(*number)?));
        }
        let pin = function.interrupts.intx.map(|number| descriptors.take(number));
        resources.pin = pin.transpose()?;
        let FunctionState { msix_table, model, .. } = function;
        Ok(PassthroughSession { conversation, resources, msix_table, model, medium })
    }
}

impl SavedSession {
    /// Has nobody go on with it: whoever saved it does so itself.
    ///
    /// # Errors
    /// [`RestoreError`] when somebody has.
    pub fn reclaim(self) -> Result<(), RestoreError> {
        let (_, function) = self.state.into_parts();
        let mut descriptors = Descriptors::new(self.descriptors, function.descriptors)?;
        Claim::take(descriptors.take(function.claim)?).map(drop)
    }
}

/// Descriptors of a value, with the numbers of the files that are among them already.
struct FileNumbers {
    descriptors: Vec<OwnedFd>,
    known: Vec<(ObjectKey, u32)>,
}

impl FileNumbers {
    fn put(&mut self, fd: OwnedFd) -> u32 {
        self.descriptors.push(fd);
        u32::try_from(self.descriptors.len() - 1).unwrap_or(u32::MAX)
    }

    fn mapping(&mut self, mapping: &UserMapping) -> Result<MappingState, SaveError> {
        let memory = match &mapping.memory {
            Some(memory) => Some((self.file(memory)?, memory.offset())),
            None => None,
        };
        Ok(MappingState::new((mapping.iova, mapping.length), mapping.access, memory))
    }

    fn file(&mut self, memory: &MemoryHandle) -> Result<u32, SaveError> {
        let object = memory.object();
        if let Some((_, number)) = self.known.iter().find(|(known, _)| *known == object) {
            return Ok(*number);
        }
        let number = self.put(memory.as_descriptor().0.try_clone_to_owned()?);
        self.known.push((object, number));
        Ok(number)
    }
}

impl MappingState {
    fn with(&self, memory: Option<MemoryHandle>) -> UserMapping {
        UserMapping { iova: self.iova, length: self.length, access: self.access(), memory }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rackbus_memory::{Event, SharedMemory};

    use super::*;

    fn copies(fds: &[OwnedFd]) -> Vec<OwnedFd> {
        fds.iter().map(|fd| fd.try_clone().unwrap()).collect()
    }

    /// The same value, as another process has it.
    fn copy(saved: &SavedSession) -> SavedSession {
        let state = SessionState::from_bytes(&saved.state.to_bytes().unwrap()).unwrap();
        let (descriptors, medium) = (copies(&saved.descriptors), copies(&saved.medium));
        SavedSession { state, descriptors, medium }
    }

    fn event() -> (Event, OwnedFd) {
        let event = Event::new().unwrap();
        let copy = event.as_fd().try_clone_to_owned().unwrap();
        (event, copy)
    }

    fn mapping(iova: u64, memory: Option<MemoryHandle>) -> UserMapping {
        UserMapping { iova, length: 4096, access: Access::READ, memory }
    }

    fn session(memory: &SharedMemory, wires: [OwnedFd; 2]) -> PassthroughSession {
        let place = BarPlace { function: "beta/gpu0".to_owned(), bar: 2, offset: 64 };
        let [vector, pin] = wires;
        let resources = UserResources {
            mappings: vec![
                mapping(0x1000, Some(memory.handle(0))),
                mapping(0x9000, Some(memory.handle(4096))),
                mapping(0x20000, None),
            ],
            windows: vec![(mapping(0x30000, Some(memory.handle(0))), place)],
            vectors: vec![(3, vector)],
            pin: Some(pin),
        };
        PassthroughSession {
            conversation: RestingConversation::default(),
            resources,
            msix_table: vec![(17, 5)],
            model: ModelState::new("vfio", 1, &"owner's").unwrap(),
            medium: vec![event().1],
        }
    }

    #[test]
    fn what_a_user_gave_is_what_it_was_and_each_file_goes_along_once() {
        let memory = SharedMemory::create("mapped", 8192).unwrap();
        let (vector, pin) = (event(), event());
        let saved = session(&memory, [vector.1, pin.1]).save().unwrap();
        assert_eq!(saved.descriptors.len(), 4, "the right to go on, a file and two wires");
        let again = PassthroughSession::restore(copy(&saved)).unwrap();
        let given = |all: &[UserMapping]| -> Vec<_> {
            let place = |memory: &MemoryHandle| (memory.object(), memory.offset());
            all.iter()
                .map(|it| (it.iova, it.length, it.access, it.memory.as_ref().map(place)))
                .collect()
        };
        let file = memory.handle(0).object();
        let expected = [
            (0x1000, 4096, Access::READ, Some((file, 0))),
            (0x9000, 4096, Access::READ, Some((file, 4096))),
            (0x20000, 4096, Access::READ, None),
        ];
        assert_eq!(given(&again.resources.mappings), expected);
        let (window, place) = &again.resources.windows[0];
        assert_eq!(
            given(std::slice::from_ref(window)),
            [(0x30000, 4096, Access::READ, Some((file, 0)))]
        );
        assert_eq!((&*place.function, place.bar, place.offset), ("beta/gpu0", 2, 64));
        let (number, wire) = &again.resources.vectors[0];
        rustix::io::write(wire, &1u64.to_ne_bytes()).unwrap();
        assert_eq!((*number, vector.0.drain()), (3, true));
        rustix::io::write(again.resources.pin.as_ref().unwrap(), &1u64.to_ne_bytes()).unwrap();
        assert!(pin.0.drain());
        assert_eq!((again.msix_table, again.medium.len()), (vec![(17, 5)], 1));
        assert_eq!(again.model.read::<String>("vfio", 1).unwrap(), "owner's");
    }

    #[test]
    fn a_session_is_gone_on_with_once() {
        let memory = SharedMemory::create("mapped", 8192).unwrap();
        let saved = || session(&memory, [event().1, event().1]).save().unwrap();
        let first = saved();
        PassthroughSession::restore(copy(&first)).unwrap();
        let again = PassthroughSession::restore(copy(&first)).unwrap_err();
        assert!(matches!(again, RestoreError::Taken), "{again}");
        assert!(matches!(first.reclaim(), Err(RestoreError::Taken)));
        let second = saved();
        copy(&second).reclaim().unwrap();
        assert!(matches!(PassthroughSession::restore(second), Err(RestoreError::Taken)));
    }

    #[test]
    fn a_session_without_all_of_its_descriptors_is_refused() {
        let memory = SharedMemory::create("mapped", 8192).unwrap();
        let saved = session(&memory, [event().1, event().1]).save().unwrap();
        for (from, to) in [
            ("\"descriptors\":4", "\"descriptors\":5"),
            ("[[3,2]]", "[[3,9]]"),
            ("[[3,2]]", "[[3,1]]"),
        ] {
            let mut other = copy(&saved);
            // Each has a right of its own to be gone on with.
            other.descriptors[0] = Claim::create().unwrap();
            let text = String::from_utf8(saved.state.to_bytes().unwrap()).unwrap();
            assert!(text.contains(from), "{text}");
            other.state = SessionState::from_bytes(text.replace(from, to).as_bytes()).unwrap();
            let refused = PassthroughSession::restore(other).unwrap_err();
            assert!(matches!(refused, RestoreError::Invalid(_)), "{to}: {refused}");
        }
    }
}
