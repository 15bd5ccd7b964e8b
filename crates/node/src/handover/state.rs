//! What a node's process writes down for the one that continues in its place.
//!
//! It comes from a process of the same user on the same host, through a socket that nobody else has: it is
//! checked for its version and for what a fault could spoil, not for malice.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rackbus_devices::{class, upstream as upstream_class};
use rackbus_lease::{Borrower, Grant, Incarnation, Lender};
use rackbus_link::OfferedMedium;
use rackbus_memory::Stream;
use rackbus_memory::exchange::{CarriedSessionState, STATE_VERSION};
use rackbus_metal::{LoanState, NtbWindowState, SavedLoan};
use rackbus_pci::BarMemory;
use rackbus_pci::vfio_user::{
    DeviceShape, RegionShape, RestingConversation, SavedSession, SessionState, SharedPart,
};
use serde::{Deserialize, Serialize};

use super::HandOverError;
use super::parcel::{Parcel, ParcelDescriptors};

use crate::borrower::host::SavedInHost;
use crate::lent_out::LentRange;
use crate::sessions::{LentSession, LentSessionState};
use crate::users::VmUser;
use crate::{upstream, vfio};

/// The version of [`NodeState`]. Since version 3 it has sessions with other machines, since version 4 the socket that
/// requests of the host are answered at, since version 5 the VMs whose leases end with them, since version 6 the service
/// levels of functions that begin anew, and which leases were used, since version 7 until when strict leases are served, since
/// version 8 functions in hosts' own PCI trees, and registers that users have as memory.
pub const VERSION: u32 = 8;

/// The versions of all that is written down: whoever goes on knows these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateVersions {
    /// Of the node itself.
    pub node: u32,
    /// Of functions and sessions ([`rackbus_pci::state`]).
    pub function: u32,
    /// Of exchanges with other machines. Programs that know none refuse the version of the node.
    #[serde(default)]
    pub exchange: u32,
    /// Of NTBs' windows. Programs that know none refuse the version of the node.
    #[serde(default)]
    pub window: u32,
    /// Of device models, by their classes.
    pub classes: BTreeMap<String, u32>,
}

impl StateVersions {
    /// Those that this program writes, and the newest that it reads.
    pub fn here() -> StateVersions {
        // Those of functions that are not modelled beside those that are.
        let others =
            [(vfio::CLASS, vfio::STATE_VERSION), (upstream_class::CLASS, upstream::STATE_VERSION)];
        let classes = class::state_versions().chain(others);
        let classes = classes.map(|(class, version)| (class.to_owned(), version));
        StateVersions {
            node: VERSION,
            function: rackbus_pci::state::VERSION,
            exchange: STATE_VERSION,
            window: rackbus_metal::STATE_VERSION,
            classes: classes.collect(),
        }
    }

    /// Whether this program can continue from what a program of these versions writes.
    ///
    /// # Errors
    /// What it cannot read.
    pub fn check(&self) -> Result<(), String> {
        let here = StateVersions::here();
        let known = |what: &str, theirs: u32, ours: u32| match theirs <= ours {
            true => Ok(()),
            false => {
                Err(format!("the state of {what} has version {theirs}, this program knows {ours}"))
            }
        };
        known("a node", self.node, here.node)?;
        known("a function", self.function, here.function)?;
        known("an exchange", self.exchange, here.exchange)?;
        known("a window", self.window, here.window)?;
        for (class, version) in &self.classes {
            let ours = here.classes.get(class).copied().unwrap_or(0);
            known(&format!("a device of kind {class}"), *version, ours)?;
        }
        Ok(())
    }
}

/// All that a node's process knows, and no other record has.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeState {
    pub version: u32,
    /// What the program around the node passes on.
    pub carried: String,
    /// How often the node was restarted in place, this time included.
    pub restarts: u64,
    /// Since when nobody is answered, in nanoseconds of the monotonic clock.
    pub paused_ns: u64,
    /// When all of it was written down.
    pub saved_ns: u64,
    pub agent: AgentState,
    pub lender: Lender,
    pub lent: BTreeMap<String, LentState>,
    /// The NTBs' windows in which some of these are lent, by the host that each leads to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub windows: BTreeMap<String, WithDescriptors<NtbWindowState>>,
    /// The service levels that borrowers were promised, by the functions' names: a function that begins anew has no state
    /// of its own, and keeps its borrower.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub levels: BTreeMap<String, String>,
    pub borrowed: Vec<SavedBorrow>,
    /// Functions of others in this host's own PCI tree.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_host: Vec<SavedInHost>,
    /// The sockets that the node listens on.
    pub listeners: Listeners<u32>,
    /// The socket at which the program around the node answers requests of its host, where it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u32>,
}

/// What the agent goes on with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentState {
    pub incarnation: Incarnation,
    /// When its clock began, in nanoseconds of the monotonic clock.
    pub begun_ns: u64,
    pub borrowing: Borrower,
}

/// The sockets that a node listens on.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listeners<T> {
    /// The link's socket, which other nodes connect to.
    pub link: T,
    /// For processes of this host that share memory.
    pub segments: T,
    /// For questions, and the request to restart.
    pub questions: T,
}

/// A function of this host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LentState {
    /// Nothing of a function of the machine in a window.
    pub function: Option<SavedState>,
    /// The conversation with its user.
    pub conversation: Option<u32>,
    /// The session with its user on another machine, in the place of a conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<LentSessionState>,
    /// What is lent of it in a window, where it is in another host's own PCI tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<WithDescriptors<LoanState>>,
    /// The service level that its borrower was promised, as programs wrote it before [`NodeState::levels`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

/// A function that was saved, with the numbers of its descriptors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    /// As [`SessionState`] is written; it has a version of its own.
    session: serde_json::Value,
    descriptors: Vec<u32>,
    medium: Vec<u32>,
}

impl SavedState {
    /// A function that was saved, its descriptors in `parcel`.
    ///
    /// # Errors
    /// When it cannot be passed on.
    pub fn new(saved: &SavedSession, parcel: &mut Parcel) -> std::io::Result<SavedState> {
        Ok(SavedState {
            session: serde_json::to_value(&saved.state)?,
            descriptors: parcel.put_all(&saved.descriptors)?,
            medium: parcel.put_all(&saved.medium)?,
        })
    }

    /// The function to go on with.
    ///
    /// # Errors
    /// When it is none, or did not come with all of its descriptors.
    pub fn take(self, descriptors: &mut ParcelDescriptors) -> std::io::Result<SavedSession> {
        let state = SessionState::from_bytes(&serde_json::to_vec(&self.session)?);
        Ok(SavedSession {
            state: state.map_err(std::io::Error::other)?,
            descriptors: descriptors.take_all(&self.descriptors)?,
            medium: descriptors.take_all(&self.medium)?,
        })
    }
}

/// A value with the numbers of its descriptors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WithDescriptors<T> {
    state: T,
    descriptors: Vec<u32>,
}

impl<T> WithDescriptors<T> {
    /// A value, its descriptors in `parcel`.
    ///
    /// # Errors
    /// When it cannot be passed on.
    pub fn new(
        state: T,
        descriptors: &[OwnedFd],
        parcel: &mut Parcel,
    ) -> std::io::Result<WithDescriptors<T>> {
        Ok(WithDescriptors { state, descriptors: parcel.put_all(descriptors)? })
    }

    /// The value with its descriptors.
    ///
    /// # Errors
    /// When it did not come with all of them.
    pub fn take(self, descriptors: &mut ParcelDescriptors) -> std::io::Result<(T, Vec<OwnedFd>)> {
        Ok((self.state, descriptors.take_all(&self.descriptors)?))
    }
}

impl LentState {
    /// A function that was saved, or is `lent` in a window, or both, and the conversation with its user.
    ///
    /// # Errors
    /// When it cannot be passed on.
    pub fn new(
        saved: Option<&SavedSession>,
        lent: Option<SavedLoan>,
        (stream, session): (Option<Arc<dyn Stream>>, Option<&LentSession>),
        parcel: &mut Parcel,
    ) -> Result<LentState, HandOverError> {
        let session = session.map(LentSession::save);
        let conversation = match &stream {
            Some(stream) if session.is_none() => {
                let handle = stream.handle().ok_or(HandOverError::Link)?;
                Some(parcel.put_handle(handle)?)
            }
            _ => None,
        };
        let function = saved.map(|saved| SavedState::new(saved, parcel)).transpose()?;
        let window = lent.map(|SavedLoan { state, descriptors }| {
            WithDescriptors::new(state, &descriptors, parcel)
        });
        let window = window.transpose()?;
        Ok(LentState { function, conversation, session, window, level: None })
    }
}

/// A lease of this host's, or one that has ended and whose user still has the socket open.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedBorrow {
    pub grant: Grant,
    /// The socket on which users are accepted; none when the lease has ended.
    pub listener: Option<u32>,
    pub client: Option<ClientState>,
    /// The VM that uses it, or did last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<VmUser>,
    /// Whether somebody has attached since the lease began, who may have released it again.
    #[serde(default)]
    pub was_used: bool,
}

/// The user of a borrowed function.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientState {
    pub stream: u32,
    pub conversation: RestingConversation,
    pub shape: ShapeState,
    /// Bytes of configuration space that it is shown instead of the function's.
    pub fixed: Vec<(u64, u8)>,
    /// The conversation with the lender; none when it has ended, and the function answers as an absent one.
    pub lender: Option<u32>,
    /// What the lender was lent.
    pub lent: Vec<LentRange>,
    /// The front, where it runs here.
    pub front: Option<FrontState>,
    /// The windows that its lender has opened for it, each an address and a length.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<(u64, u64)>,
    /// The registers of a function at its lender that the user has as memory: those of a front are part of its state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registers: Vec<SharedRegisters>,
}

/// Registers of a BAR that a user has as memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedRegisters {
    pub bar: u8,
    /// The descriptor of the memory, and its bytes.
    pub memory: u32,
    pub length: u64,
}

/// The front of a function whose medium is elsewhere.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontState {
    pub medium: OfferedMedium,
    pub function: SavedState,
    /// The session with the medium on another machine, in the place of a conversation with the lender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<CarriedSessionState>,
}

/// What a function looks like to its user.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapeState {
    regions: Vec<RegionState>,
    /// Vectors by interrupt index.
    irqs: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegionState {
    size: u64,
    mappable: Option<MappableState>,
}

/// The part of a region that the user may map.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MappableState {
    memory: u32,
    /// Where the region begins in the memory.
    offset: u64,
    /// Offset in the region and length of each part.
    areas: Vec<(u64, u64)>,
}

impl ShapeState {
    /// What a function looks like, its memory in `parcel`. Memory that is not available is left out.
    ///
    /// # Errors
    /// When it cannot be passed on.
    pub fn new(shape: &DeviceShape, parcel: &mut Parcel) -> std::io::Result<ShapeState> {
        let mut regions = Vec::new();
        for RegionShape { size, mappable } in &shape.regions {
            let part =
                mappable.as_ref().and_then(|part| Some((part.memory.descriptor().ok()?, part)));
            let mappable = match part {
                Some((memory, SharedPart { offset, areas, .. })) => {
                    let (offset, areas) = (*offset, areas.clone());
                    Some(MappableState { memory: parcel.put(memory.as_fd())?, offset, areas })
                }
                None => None,
            };
            regions.push(RegionState { size: *size, mappable });
        }
        Ok(ShapeState { regions, irqs: shape.irqs.clone() })
    }

    /// The same in another process.
    ///
    /// # Errors
    /// When its memory did not come with it.
    pub fn take(self, descriptors: &mut ParcelDescriptors) -> std::io::Result<DeviceShape> {
        let mut regions = Vec::new();
        for RegionState { size, mappable } in self.regions {
            let mappable = match mappable {
                Some(MappableState { memory, offset, areas }) => {
                    let memory = BarMemory::new(descriptors.take(memory)?);
                    Some(SharedPart { memory, offset, areas })
                }
                None => None,
            };
            regions.push(RegionShape { size, mappable });
        }
        Ok(DeviceShape { regions, irqs: self.irqs })
    }
}

impl NodeState {
    /// Serialises the state for the process that continues.
    ///
    /// # Errors
    /// When it cannot be written down.
    pub fn to_bytes(&self) -> std::io::Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(std::io::Error::other)
    }

    /// From bytes of a program whose versions were [checked](StateVersions::check).
    ///
    /// # Errors
    /// When they are no state.
    pub fn from_bytes(bytes: &[u8]) -> std::io::Result<NodeState> {
        // Before anything else is looked at: another version may have other fields.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_slice(bytes)?;
        match version {
            1..=VERSION => Ok(serde_json::from_slice(bytes)?),
            other => {
                let text = format!(
                    "the state of a node has version {other}, this program knows {VERSION}"
                );
                Err(std::io::Error::other(text))
            }
        }
    }
}
