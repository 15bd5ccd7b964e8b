//! A physical function in its user's hands goes on in another process.
//!
//! What the function does, nobody stops: the kernel keeps its container with the mappings, its interrupts' wires and its
//! registers as long as somebody has the descriptors. Those go along, and what this process alone knew: what its user
//! gave it, what the user sees of configuration space, and which interrupts are enabled. The next process makes the loans
//! anew and maps nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rackbus_pci::vfio_user::{
    PassthroughSession, RestingConversation, SavedSession, UserResources,
};
use rackbus_pci::{ModelState, RestoreError, SaveError};
use rackbus_vfio::{Container, InterruptIndex, PassedOnFunction, PciAddress};
use serde::{Deserialize, Serialize};

use super::locked;
use super::opened::OpenedFunction;
use super::shown::MessageControl;
use super::watch::WatchedDescriptors;

/// Name of the class, in the state.
pub const CLASS: &str = "vfio";
/// The version of what is written down of a function beside what its user gave it.
pub const STATE_VERSION: u32 = 1;

/// What there is of a function beside what its user gave it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PhysicalState {
    /// PCI address of the function.
    pub address: PciAddress,
    /// What the user wrote to the control words of MSI and MSI-X.
    pub control: MessageControl,
    /// The kind of interrupts that the kernel has enabled, and with how many vectors.
    pub live: Option<(InterruptIndex, u32)>,
    /// The IOMMU groups of its container, in the order of their descriptors.
    groups: Vec<u32>,
    /// What its end is told by, in the order of the eventfds.
    watched: Vec<InterruptIndex>,
    /// Whether the kernel's log comes behind these.
    log: bool,
}

/// The descriptors of a function, in this order: its container, itself, its groups, what it is watched by.
#[derive(Debug)]
pub(super) struct PhysicalDescriptors {
    container: OwnedFd,
    groups: Vec<(u32, OwnedFd)>,
    function: OwnedFd,
    watched: WatchedDescriptors,
}

impl PhysicalDescriptors {
    /// Those that came with `state`.
    ///
    /// # Errors
    /// When there are more or fewer.
    pub fn of(state: &PhysicalState, all: Vec<OwnedFd>) -> Result<Self, RestoreError> {
        let came = all.len();
        let mut all = all.into_iter();
        let mut next = || {
            let missing =
                || RestoreError::Invalid(format!("a function comes with {came} descriptors"));
            all.next().ok_or_else(missing)
        };
        let (container, function) = (next()?, next()?);
        let mut groups = Vec::new();
        for number in &state.groups {
            groups.push((*number, next()?));
        }
        let mut events = Vec::new();
        for kind in &state.watched {
            events.push((*kind, next()?));
        }
        let log = state.log.then(&mut next).transpose()?;
        match next() {
            Ok(_) => Err(RestoreError::Invalid("more descriptors than a function has".to_owned())),
            Err(_) => {
                Ok(PhysicalDescriptors { container, groups, function, watched: (events, log) })
            }
        }
    }

    /// The container as it is, with what its functions reach: where it is dropped, they reach nothing any more. Beside
    /// it the function's file, and what it is watched by.
    ///
    /// # Errors
    /// When it is no container.
    pub fn open(
        self,
        resources: &UserResources,
    ) -> io::Result<(Container, OwnedFd, WatchedDescriptors)> {
        let windows = resources.windows.iter().map(|(mapping, _)| mapping);
        let all = resources.mappings.iter().chain(windows);
        let mapped = all.filter(|it| it.memory.is_some()).map(|it| (it.iova, it.length));
        let container = Container::inherited(self.container, self.groups, mapped);
        Ok((container.map_err(io::Error::other)?, self.function, self.watched))
    }
}

/// What ends all that a function reaches which another process had, unless it goes on here.
///
/// # Errors
/// When its descriptors did not come, or this process has none left.
pub(super) fn passed_on(saved: &SavedSession) -> io::Result<PassedOnFunction> {
    match &saved.medium[..] {
        [container, function, ..] => PassedOnFunction::new(container.as_fd(), function.as_fd()),
        all => {
            let came = all.len();
            Err(io::Error::other(format!(
                "a function of the machine comes with {came} descriptors"
            )))
        }
    }
}

/// Ends what a function of another process reaches that cannot go on here, where it is one of the machine.
pub(crate) fn abandon(saved: &SavedSession) {
    if saved.state.function.class() != CLASS {
        return;
    }
    match passed_on(saved) {
        Ok(function) => drop(function),
        Err(error) => tracing::error!(%error, "what a function reaches is not taken away"),
    }
}

impl OpenedFunction {
    /// The function as a value, and the conversation with its user, which rests. Nothing of the function changes.
    ///
    /// # Errors
    /// When it is gone or its memory was taken away, or this process has no descriptors left.
    pub(super) fn save(
        &self,
        conversation: RestingConversation,
    ) -> Result<SavedSession, SaveError> {
        let container = self.device.container();
        if self.is_gone() || container.is_revoked() {
            return Err(SaveError::Revoked);
        }
        let (of_container, groups) = container.descriptors()?;
        let mut medium = vec![of_container, self.device.as_fd().try_clone_to_owned()?];
        let (numbers, groups): (Vec<u32>, Vec<OwnedFd>) = groups.into_iter().unzip();
        medium.extend(groups);
        let watched = self.watched.as_ref().map(|watched| watched.descriptors()).transpose()?;
        let (events, log) = watched.unwrap_or_default();
        let (watched, events): (Vec<InterruptIndex>, Vec<OwnedFd>) = events.into_iter().unzip();
        medium.extend(events);
        let (control, msix_table) = locked(&self.shown).written();
        let wiring = locked(&self.wiring);
        let wired = wiring.wired();
        let state = PhysicalState {
            address: self.device.address(),
            control,
            live: wired.live,
            groups: numbers,
            watched,
            log: log.is_some(),
        };
        medium.extend(log);
        let copy = |(vector, event): (u32, &OwnedFd)| Ok((vector, event.try_clone()?));
        let vectors = wired.vectors.into_iter().map(copy).collect::<io::Result<_>>()?;
        let pin = wired.pin.map(OwnedFd::try_clone).transpose()?;
        let (mappings, windows) = locked(&self.mappings).given();
        let resources = UserResources { mappings, windows, vectors, pin };
        let model = ModelState::new(CLASS, STATE_VERSION, &state)?;
        PassthroughSession { conversation, resources, msix_table, model, medium }.save()
    }
}

#[cfg(test)]
mod tests {
    use rackbus_memory::Event;
    use rackbus_seeds::stored::StoredStates;

    use super::*;

    fn stored() -> StoredStates {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/vfio/stored");
        StoredStates::new(folder, "function", STATE_VERSION)
    }

    fn state() -> PhysicalState {
        PhysicalState {
            address: "0000:03:00.1".parse().unwrap(),
            control: MessageControl::default(),
            live: Some((InterruptIndex::Msix, 3)),
            groups: vec![14],
            watched: vec![InterruptIndex::Error, InterruptIndex::Request],
            log: true,
        }
    }

    #[test]
    fn a_function_goes_on_from_what_each_version_wrote() {
        let written = ModelState::new(CLASS, STATE_VERSION, &state()).unwrap();
        stored().compare(&serde_json::to_vec(&written).unwrap());
        for version in 1..=STATE_VERSION {
            let read: ModelState = serde_json::from_str(&stored().read(version)).unwrap();
            let read: PhysicalState = read.read(CLASS, STATE_VERSION).unwrap();
            assert_eq!(read, state(), "version {version}");
        }
    }

    #[test]
    fn a_function_without_all_of_its_descriptors_is_refused() {
        let came = |count: usize| -> Vec<OwnedFd> {
            (0..count).map(|_| Event::new().unwrap().into()).collect()
        };
        let all = PhysicalDescriptors::of(&state(), came(6)).unwrap();
        assert_eq!((all.groups.len(), all.watched.0.len()), (1, 2));
        assert!(all.watched.1.is_some());
        for count in [0, 1, 2, 5, 7] {
            let refused = PhysicalDescriptors::of(&state(), came(count)).unwrap_err();
            assert!(matches!(refused, RestoreError::Invalid(_)), "{count}: {refused}");
        }
    }

    /// What is no container is refused before anything else is looked at.
    #[test]
    fn only_a_container_is_gone_on_with() {
        let came = (0..6).map(|_| Event::new().unwrap().into()).collect();
        let descriptors = PhysicalDescriptors::of(&state(), came).unwrap();
        assert!(descriptors.open(&UserResources::default()).is_err());
    }
}
