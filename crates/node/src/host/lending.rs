//! The functions that a node begins with: new ones, or those that the process before it had.

use std::collections::BTreeSet;
use std::time::Duration;

use rackbus_control::ControlClient;
use rackbus_control::offers::{RackSection, SectionState};
use rackbus_fabric::FabricHandle;
use rackbus_memory::Gate;
use rackbus_metal::SavedWindow;

use super::{NodeError, NodeOptions, control_socket};
use crate::handover::parcel::ParcelDescriptors;
use crate::handover::state::NodeState;
use crate::lender::LentFunctions;
use crate::lender::saved::ResumedSession;

/// How long the control plane may take to say what was withdrawn, when a device cannot be run.
const ASKING: Duration = Duration::from_secs(3);

/// Lends those of the node's devices that are there, as [`lend`] does. One that cannot be run may have been withdrawn
/// because it is there no more: the control plane is asked. The devices are taken out of `options`, so that one that is
/// withdrawn later is dropped. Beside the lender, how many functions continue with their users.
pub(super) async fn lend_available(
    options: &mut NodeOptions,
    fabric: &FabricHandle,
    gate: &Gate,
    state: &mut Option<NodeState>,
    descriptors: &mut ParcelDescriptors,
) -> Result<(LentFunctions, usize), NodeError> {
    let (lender, sessions) = match lend(options, fabric.clone(), state, descriptors) {
        Err(error @ NodeError::Device(_)) if state.is_none() => {
            let leaving = withdrawn(options).await;
            let before = options.devices.len();
            options.devices.retain(|(name, _)| !leaving.contains(name));
            if options.devices.len() == before {
                return Err(error);
            }
            lend(options, fabric.clone(), state, descriptors)?
        }
        lent => lent?,
    };
    options.devices.clear();
    let in_use = sessions.len();
    for session in sessions {
        session.go_on(gate).map_err(NodeError::Thread)?;
    }
    Ok((lender, in_use))
}

/// Lends the node's devices: anew, or as another process that left `state` had them. Then the conversations
/// with their users are still to continue.
fn lend(
    options: &NodeOptions,
    fabric: FabricHandle,
    state: &mut Option<NodeState>,
    descriptors: &mut ParcelDescriptors,
) -> Result<(LentFunctions, Vec<ResumedSession>), NodeError> {
    let mut lender = LentFunctions::new(&options.host, fabric)
        .with_hold(options.hold)
        .with_lanes(options.lanes.clone());
    if let Some(offered) = &options.offered {
        lender = lender.with_offers(offered.clone());
    }
    let Some(state) = state else {
        for (name, lendable) in &options.devices {
            match lender.add(name, lendable.clone()) {
                Err(error) if lendable.may_be_absent() => {
                    tracing::error!(%error, "it is tried again when it is lent");
                }
                added => added?,
            }
        }
        return Ok((lender, Vec::new()));
    };
    lender = lender.with_fence(state.lender.clone());
    for (to, window) in std::mem::take(&mut state.windows) {
        let saved = window.take(descriptors);
        let saved = saved.map(|(state, descriptors)| SavedWindow { state, descriptors });
        if let Err(error) = saved.and_then(|saved| options.ntbs.inherit(&to, saved)) {
            tracing::error!(to, %error, "what was lent through an NTB is lost");
        }
    }
    let (states, levels) = (std::mem::take(&mut state.lent), std::mem::take(&mut state.levels));
    let sessions = lender.resume_all(&options.devices, states, levels, descriptors, &*options.link);
    options.ntbs.end_left();
    Ok((lender, sessions))
}

/// The functions of this host that the control plane knows to be withdrawn; none where it does not answer.
async fn withdrawn(options: &NodeOptions) -> BTreeSet<String> {
    let client = ControlClient::new(&control_socket(&options.run_dir));
    let Ok(Ok(sections)) = tokio::time::timeout(ASKING, client.sections()).await else {
        return BTreeSet::new();
    };
    let own = format!("{}/", options.host);
    let gone =
        |it: &&RackSection| matches!(it.state, SectionState::Leaving | SectionState::Withdrawn);
    let functions = sections.iter().filter(gone).flat_map(|it| &it.functions);
    functions.filter_map(|name| name.strip_prefix(&own)).map(str::to_owned).collect()
}
