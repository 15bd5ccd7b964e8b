//! The function of another program goes on in another process.
//!
//! The program goes on by itself: it keeps the connection, the memory and the interrupts that it was passed. So the
//! connection goes along between two requests, and what this process alone knew: what its user gave the function, and
//! what the program said that the function looks like. The next process makes the loans anew, and asks the program
//! nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rackbus_control::api::ReportedIdentity;
use rackbus_devices::upstream::CLASS;
use rackbus_pci::vfio_user::{
    DeviceShape, PassthroughSession, RegionShape, RestingConversation, SavedSession, ServedDevice,
    UserResources,
};
use rackbus_pci::{ModelState, SaveError};
use rackbus_spec::vfio_user::{irq, region};
use serde::{Deserialize, Serialize};

use super::locked;
use super::process::ServerProcess;
use super::session::OpenedUpstream;

/// The version of what is written down of a function beside what its user gave it.
pub(crate) const STATE_VERSION: u32 = 2;

/// What there is of a function beside what its user gave it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UpstreamState {
    /// Number of the process, where the program was run for this user.
    process: Option<u32>,
    /// Bytes of each region.
    regions: Vec<u64>,
    /// Vectors of each interrupt index.
    irqs: Vec<u32>,
    /// The vectors that the user has wired. The program has their eventfds.
    vectors: Vec<u32>,
    /// Whether the user has wired the interrupt pin.
    pin: bool,
    /// What it says that it is; version 1 did not keep it.
    #[serde(default)]
    identity: Option<ReportedIdentity>,
}

/// A function that another process passed on.
pub(super) struct PassedOn {
    /// The connection to the program.
    pub connection: UnixStream,
    /// What the function looks like.
    pub shape: DeviceShape,
    /// What its user gave it; its interrupts are beside this.
    pub resources: UserResources,
    /// The vectors that its user has wired.
    pub vectors: Vec<u32>,
    /// Whether its user has wired the interrupt pin.
    pub pin: bool,
    /// What it says that it is, where that is known.
    pub identity: Option<ReportedIdentity>,
    /// The conversation with the user, which rests.
    pub conversation: RestingConversation,
}

impl PassedOn {
    /// From the value that the other process left.
    ///
    /// # Errors
    /// It is of another class or a newer program, damaged, or somebody has gone on with it.
    pub fn of(saved: SavedSession) -> io::Result<PassedOn> {
        let passed = PassthroughSession::restore(saved).map_err(io::Error::other)?;
        let PassthroughSession { conversation, resources, model, medium, .. } = passed;
        conversation.check().map_err(io::Error::other)?;
        let state: UpstreamState = model.read(CLASS, STATE_VERSION).map_err(io::Error::other)?;
        let [connection] = <[OwnedFd; 1]>::try_from(medium)
            .map_err(|all| io::Error::other(format!("{} connections to one server", all.len())))?;
        let UpstreamState { process: _, regions, irqs, vectors, pin, identity } = state;
        if (regions.len(), irqs.len()) != (region::COUNT as usize, irq::COUNT as usize) {
            return Err(io::Error::other("it has other regions or interrupts than a PCI function"));
        }
        let regions = regions.into_iter().map(|size| RegionShape { size, mappable: None });
        let shape = DeviceShape { regions: regions.collect(), irqs };
        let connection = UnixStream::from(connection);
        Ok(PassedOn { connection, shape, resources, vectors, pin, identity, conversation })
    }
}

/// The program that another process ran for the user of a function; `None` where it did not, or where the function is of
/// another class.
///
/// # Errors
/// It is no child of this process, or the state is damaged.
pub(super) fn process_of(saved: &SavedSession) -> io::Result<Option<ServerProcess>> {
    let model = saved.state.function.model();
    if model.class != CLASS {
        return Ok(None);
    }
    let state: UpstreamState = model.read(CLASS, STATE_VERSION).map_err(io::Error::other)?;
    state.process.map(ServerProcess::inherited).transpose()
}

/// Ends the program of another process' function that cannot go on here. One that was not run by a node sees its
/// connection end.
pub(crate) fn abandon(saved: &SavedSession) {
    match process_of(saved) {
        Ok(process) => process.into_iter().for_each(ServerProcess::end),
        Err(error) => tracing::error!(%error, "the program of a function is not ended"),
    }
}

impl OpenedUpstream {
    /// The function as a value, with the number of its program's `process` and what it says that it is, and the conversation
    /// with its user, which rests. Nothing of the function changes.
    ///
    /// # Errors
    /// The program is gone, or this process has no descriptors left.
    pub(super) fn save(
        &self,
        process: Option<u32>,
        identity: Option<ReportedIdentity>,
        conversation: RestingConversation,
    ) -> Result<SavedSession, SaveError> {
        if !self.device.is_there() {
            return Err(SaveError::Revoked);
        }
        let DeviceShape { regions, irqs } = self.device.shape();
        let regions = regions.iter().map(|region| region.size).collect();
        let (vectors, pin) = self.interrupts.wired();
        let irqs = irqs.clone();
        let state = UpstreamState { process, regions, irqs, vectors, pin, identity };
        let medium = vec![OwnedFd::from(self.connection.try_clone()?)];
        let (mappings, windows) = locked(&self.mappings).given();
        // The program has the eventfds.
        let resources = UserResources { mappings, windows, ..UserResources::default() };
        let model = ModelState::new(CLASS, STATE_VERSION, &state)?;
        let msix_table = Vec::new();
        PassthroughSession { conversation, resources, msix_table, model, medium }.save()
    }
}

#[cfg(test)]
mod tests {
    use rackbus_seeds::stored::StoredStates;

    use super::*;

    fn stored() -> StoredStates {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/upstream/stored");
        StoredStates::new(folder, "function", STATE_VERSION)
    }

    fn state() -> UpstreamState {
        let mut regions = vec![0; region::COUNT as usize];
        regions[0] = 16384;
        let mut irqs = vec![0; irq::COUNT as usize];
        irqs[irq::MSIX as usize] = 9;
        let (process, vectors) = (Some(4711), vec![0, 3]);
        let identity = ReportedIdentity { vendor_id: 0x494f, device_id: 0xdc8, class: 0x07_0002 };
        UpstreamState { process, regions, irqs, vectors, pin: false, identity: Some(identity) }
    }

    fn saved(state: &UpstreamState, connections: usize) -> SavedSession {
        let model = ModelState::new(CLASS, STATE_VERSION, state).unwrap();
        let medium = (0..connections).map(|_| UnixStream::pair().unwrap().0.into()).collect();
        let (conversation, resources) = (RestingConversation::default(), UserResources::default());
        let msix_table = Vec::new();
        let session = PassthroughSession { conversation, resources, msix_table, model, medium };
        session.save().unwrap()
    }

    #[test]
    fn a_function_goes_on_from_what_each_version_wrote() {
        let written = ModelState::new(CLASS, STATE_VERSION, &state()).unwrap();
        stored().compare(&serde_json::to_vec(&written).unwrap());
        for version in 1..=STATE_VERSION {
            let read: ModelState = serde_json::from_str(&stored().read(version)).unwrap();
            let read: UpstreamState = read.read(CLASS, STATE_VERSION).unwrap();
            let identity = state().identity.filter(|_| version > 1);
            assert_eq!(read, UpstreamState { identity, ..state() }, "version {version}");
        }
    }

    #[test]
    fn only_what_one_function_has_is_gone_on_with() {
        let passed = PassedOn::of(saved(&state(), 1)).unwrap();
        assert_eq!((passed.shape.regions[0].size, passed.vectors), (16384, vec![0, 3]));
        let fewer = UpstreamState { regions: vec![16384], ..state() };
        for (state, connections) in [(&state(), 0), (&state(), 2), (&fewer, 1)] {
            assert!(PassedOn::of(saved(state, connections)).is_err(), "{connections}: {state:?}");
        }
    }

    #[test]
    fn a_program_that_is_no_child_is_not_ended() {
        let own = UpstreamState { process: Some(std::process::id()), ..state() };
        assert!(process_of(&saved(&own, 1)).is_err());
        abandon(&saved(&own, 1));
    }
}
