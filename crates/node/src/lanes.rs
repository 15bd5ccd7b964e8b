//! What moves the data of mediums beside the link between machines: which providers of libfabric this host uses, and
//! the two ends of a lane. Where there are none, everything is sent over the link.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use rackbus_link::{Conversation, IncomingConnection, OfferedMedium, Purpose};
use rackbus_memory::exchange::lane::{CarriedLane, LaneError};
use rackbus_rma::{Initiator, LaneOffer, ProviderChoice, RmaTarget, providers};

use crate::segments::landing::{LandingLane, LandingMemory};

/// The lanes of a host: what its rack file says of them, and what is found here when they are first wanted.
#[derive(Debug, Clone)]
pub struct Lanes(Arc<HostProviders>);

#[derive(Debug)]
struct HostProviders {
    choice: ProviderChoice,
    providers: OnceLock<Vec<String>>,
}

impl Default for Lanes {
    /// No RDMA: the link carries all data.
    fn default() -> Lanes {
        Lanes::new("off")
    }
}

impl Lanes {
    /// As the rack file says: `auto`, `off`, or the name of a provider.
    pub fn new(choice: &str) -> Lanes {
        let Ok(choice) = choice.parse();
        Lanes(Arc::new(HostProviders { choice, providers: OnceLock::new() }))
    }

    /// The providers that can be used, the preferred ones first.
    pub(crate) fn providers(&self) -> &[String] {
        self.0.providers.get_or_init(|| {
            let found = providers(&self.0.choice).unwrap_or_else(|error| {
                tracing::error!(%error, "data of borrowed devices are sent over the link alone");
                Vec::new()
            });
            if !found.is_empty() {
                tracing::info!(providers = found.join(", "), "RDMA lanes can be used");
            }
            found
        })
    }

    /// The lender's end of a lane for who connected, by the first of its providers that this host has, too.
    pub(crate) fn target(&self, incoming: &IncomingConnection) -> Option<Arc<RmaTarget>> {
        let Purpose::Medium { lanes, .. } = &incoming.hello.service else { return None };
        self.common_target(lanes, incoming.stream.local_address(), &incoming.hello.from)
    }

    /// The end whose memory is reached, for `to`, who has the providers `theirs`: by the first of these that this host has, too.
    fn common_target(
        &self,
        theirs: &[String],
        from: Option<IpAddr>,
        to: &str,
    ) -> Option<Arc<RmaTarget>> {
        if theirs.is_empty() {
            return None;
        }
        let common = theirs.iter().find(|name| self.providers().contains(name))?;
        let target = RmaTarget::open(common, from).inspect_err(|error| {
            tracing::warn!(%error, to, "no RDMA lane is offered");
        });
        target.ok().map(Arc::new)
    }

    /// Memory in which copies of another host land that has these providers, reached from the interface with address `from`; and
    /// what that host needs to reach it.
    pub(crate) fn landing(
        &self,
        theirs: &[String],
        from: Option<IpAddr>,
    ) -> Option<(LandingMemory, String)> {
        let target = self.common_target(theirs, from, "a host that copies")?;
        let memory = LandingMemory::new(target.clone()).inspect_err(|error| {
            tracing::warn!(%error, "copies of another host do not land");
        });
        let memory = memory.ok()?;
        let offer = serde_json::to_string(&target.offer()?).ok()?;
        Some((memory, offer))
    }

    /// The lane to memory that a host has offered for copies, if this host has its provider.
    pub(crate) fn landing_lane(
        &self,
        offer: &str,
        from: Option<IpAddr>,
    ) -> Option<Arc<LandingLane>> {
        let offer: LaneOffer = serde_json::from_str(offer).ok()?;
        if !self.providers().contains(&offer.provider) {
            tracing::warn!(provider = offer.provider, "the RDMA lane was not asked for");
            return None;
        }
        let opened = Initiator::open(&offer, from).map_err(|error| LaneError(error.to_string()));
        let lane = opened.and_then(|lane| {
            let proof = lane.proof();
            LandingLane::new(Box::new(lane), proof)
        });
        match lane {
            Ok(lane) => {
                tracing::info!(provider = offer.provider, "copies go by an RDMA lane");
                Some(lane)
            }
            Err(error) => {
                tracing::warn!(%error, "an RDMA lane is not used for copies");
                None
            }
        }
    }

    /// The borrower's end of the lane that `lender` has offered with its medium, if this host has its provider.
    pub(crate) fn initiator(
        &self,
        stream: &dyn Conversation,
        medium: &OfferedMedium,
        lender: &str,
    ) -> Option<CarriedLane> {
        let offer = medium.session.as_ref()?.lane.as_ref()?;
        if !self.providers().contains(&offer.provider) {
            tracing::warn!(lender, provider = offer.provider, "the RDMA lane was not asked for");
            return None;
        }
        let lane = Initiator::open(offer, stream.local_address()).inspect_err(|error| {
            tracing::warn!(%error, lender, "the RDMA lane is not used");
        });
        lane.ok().map(|lane| {
            let proof = lane.proof();
            CarriedLane::Asks(Box::new(lane), proof)
        })
    }
}
