//! A function's state as a value. Frames that lie in its port's ring are the network's; those that were being cut for a
//! driver that takes no large ones are given up, as a network may.

use std::os::fd::OwnedFd;

use rackbus_pci::{Bus, ModelState, RestoreError, SaveError};
use rackbus_spec::virtio::net::feature;
use serde::{Deserialize, Serialize};

use super::CLASS;
use super::control::NicSettings;
use super::function::Nic;
use super::medium::{RemotePortState, ServedPort, ServedState};
use super::port::NicPort;
use crate::virtio::saved::TransportState;

/// The version of [`NicState`]. Since version 2 both ends of a port elsewhere know of generations; programs that know
/// version 1 would refuse them.
pub const VERSION: u32 = 2;

/// All that a function is made of when it continues in another process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NicState {
    transport: TransportState,
    settings: NicSettings,
    link_up: bool,
    /// What lies between a front and its port, at whichever end this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    medium: Option<MediumState>,
}

/// One end of what lies between a front and its port.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum MediumState {
    Front(RemotePortState),
    Served(ServedState),
}

fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(RestoreError::Invalid(what.to_owned())) }
}

impl Nic {
    /// Makes a value of the function's state.
    pub(super) fn take_state(&mut self) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        let saved = match (&mut self.served, &mut self.port) {
            (Some(served), _) => {
                let (state, files) = served.save()?;
                Some((MediumState::Served(state), files))
            }
            (None, NicPort::Remote(port)) => {
                let (state, files) = port.save()?;
                Some((MediumState::Front(state), files))
            }
            (None, NicPort::Own(_) | NicPort::Absent) => None,
        };
        let (medium, files) = saved.unzip();
        let value = NicState {
            transport: self.transport.save(),
            settings: self.settings.clone(),
            link_up: self.link_up,
            medium,
        };
        Ok((ModelState::new(CLASS, VERSION, &value)?, files.unwrap_or_default()))
    }

    /// Goes on here with what was made a value of.
    pub(super) fn keep_state(&mut self) {
        if let Some(served) = &mut self.served {
            served.take_back();
        } else if let NicPort::Remote(port) = &mut self.port {
            port.take_back();
        }
    }

    /// Goes on with what lay between a front and its port.
    fn put_medium(&mut self, state: Option<&MediumState>) -> Result<(), RestoreError> {
        match (state, &mut self.port) {
            (Some(MediumState::Front(state)), NicPort::Remote(port)) => {
                let restored = port.restore(state);
                restored.map_err(|what| RestoreError::Invalid(what.to_owned()))
            }
            (Some(MediumState::Served(state)), NicPort::Own(port)) => {
                let end = std::mem::take(&mut self.inherited);
                let served = ServedPort::resume(end, &mut **port, state);
                self.served = Some(served.map_err(|error| {
                    tracing::error!(%error, "the connection of a network function's front on another node is lost");
                    RestoreError::Invalid("the exchange with a front elsewhere".to_owned())
                })?);
                Ok(())
            }
            (None, NicPort::Own(_) | NicPort::Absent) => Ok(()),
            _ => require(false, "the port"),
        }
    }

    /// Goes on with a saved function's state.
    pub(super) fn put_state(
        &mut self,
        bus: &Bus<'_>,
        model: &ModelState,
    ) -> Result<(), RestoreError> {
        let NicState { transport, settings, link_up, medium } = model.read(CLASS, VERSION)?;
        let vectors = usize::from(rackbus_pci::Function::info(self).msix_vectors);
        self.transport.restore(bus.dma, vectors, &transport)?;
        let taken = self.transport.accepted() & feature::GUEST_OFFLOADS;
        require((1..=self.most_pairs).contains(&settings.pairs), "the pairs of queues")?;
        require(settings.offloads & !taken == 0, "the offloads")?;
        require(settings.filter.is_possible(), "the filter")?;
        require(settings.mac() == self.mac, "the address")?;
        self.settings = settings;
        self.link_up = link_up;
        self.put_medium(medium.as_ref())?;
        self.went_on(bus);
        Ok(())
    }
}
