//! A function's state as a value. Frames that lie in its port's ring are the network's; those that were being cut for a
//! driver that takes no large ones are given up, as a network may.

use std::os::fd::OwnedFd;

use rackbus_pci::{Bus, ModelState, RestoreError, SaveError};
use rackbus_spec::virtio::net::feature;
use serde::{Deserialize, Serialize};

use super::CLASS;
use super::control::NicSettings;
use super::function::Nic;
use crate::virtio::saved::TransportState;

/// The version of [`NicState`].
pub const VERSION: u32 = 1;

/// All that a function is made of when it continues in another process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NicState {
    transport: TransportState,
    settings: NicSettings,
    link_up: bool,
}

fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(RestoreError::Invalid(what.to_owned())) }
}

impl Nic {
    /// Makes a value of the function's state.
    pub(super) fn take_state(&mut self) -> Result<(ModelState, Vec<OwnedFd>), SaveError> {
        let value = NicState {
            transport: self.transport.save(),
            settings: self.settings.clone(),
            link_up: self.link_up,
        };
        Ok((ModelState::new(CLASS, VERSION, &value)?, Vec::new()))
    }

    /// Goes on with a saved function's state.
    pub(super) fn put_state(
        &mut self,
        bus: &Bus<'_>,
        model: &ModelState,
    ) -> Result<(), RestoreError> {
        let NicState { transport, settings, link_up } = model.read(CLASS, VERSION)?;
        let vectors = usize::from(rackbus_pci::Function::info(self).msix_vectors);
        self.transport.restore(bus.dma, vectors, &transport)?;
        let taken = self.transport.accepted() & feature::GUEST_OFFLOADS;
        require((1..=self.most_pairs).contains(&settings.pairs), "the pairs of queues")?;
        require(settings.offloads & !taken == 0, "the offloads")?;
        require(settings.filter.is_possible(), "the filter")?;
        require(settings.mac() == self.mac, "the address")?;
        self.settings = settings;
        self.link_up = link_up;
        self.went_on(bus);
        Ok(())
    }
}
