//! A node is restarted in place: what was borrowed continues in this process, and later restarts are looked at before
//! anything is stopped for them.

use std::sync::Arc;

use rackbus_control::node::{AskedRestart, NodeProcess};
use tokio::sync::mpsc;

use super::NodeOptions;
use crate::agent::{AgentEvent, AgentHandle};
use crate::borrower::BorrowedFunctions;
use crate::handover::parcel::ParcelDescriptors;
use crate::handover::state::{AgentState, NodeState};
use crate::handover::{HandOver, monotonic_ns};

/// How far the process has gone on in the place of the one before.
pub(super) struct SuccessionProgress {
    /// When the state was received, in nanoseconds of the monotonic clock.
    pub(super) received_ns: u64,
    /// How many lent functions continue with their users.
    pub(super) lent_in_use: usize,
}

/// The node's process, and the state of the agent before it where it goes on with what another process left.
pub(super) fn process_and_agent(
    options: &NodeOptions,
    borrower: &BorrowedFunctions,
    state: Option<NodeState>,
    descriptors: &mut ParcelDescriptors,
    progress: SuccessionProgress,
) -> std::io::Result<(NodeProcess, Option<AgentState>)> {
    let Some(state) = state else { return Ok((process_of_this_version(), None)) };
    let (process, agent) = resume_borrowed(options, borrower, state, descriptors, progress)?;
    Ok((process, Some(agent)))
}

/// A process that was not restarted in place.
fn process_of_this_version() -> NodeProcess {
    NodeProcess { version: env!("CARGO_PKG_VERSION").to_owned(), ..NodeProcess::default() }
}

/// Goes on with what the process that left `state` had borrowed. Beside this process, the state of its agent.
fn resume_borrowed(
    options: &NodeOptions,
    borrower: &BorrowedFunctions,
    state: NodeState,
    descriptors: &mut ParcelDescriptors,
    SuccessionProgress { received_ns, lent_in_use }: SuccessionProgress,
) -> std::io::Result<(NodeProcess, AgentState)> {
    let in_use = lent_in_use + state.borrowed.iter().filter(|it| it.client.is_some()).count();
    let in_use = in_use + state.in_host.len();
    let borrowed = (state.borrowed, state.in_host);
    borrower.resume(state.agent.borrowing.clone(), borrowed, descriptors, &*options.link)?;
    let moments = [state.paused_ns, state.saved_ns, received_ns, monotonic_ns()];
    let pause_us = tell_pause(&options.host, in_use, moments);
    let (restarts, in_use) = (state.restarts, in_use as u64);
    Ok((NodeProcess { pause_us, restarts, in_use, ..process_of_this_version() }, state.agent))
}

/// Logs what the pause of a restart in place consisted of, and answers how long it was, in microseconds. The
/// moments, in nanoseconds: when conversations rested, when all was saved, when it was received, and now.
fn tell_pause(host: &str, in_use: usize, [paused, saved, received, now]: [u64; 4]) -> u64 {
    let us = |from: u64, to: u64| to.saturating_sub(from) / 1000;
    tracing::info!(
        host,
        in_use,
        saving_us = us(paused, saved),
        starting_us = us(saved, received),
        resuming_us = us(received, now),
        "the node goes on"
    );
    us(paused, now)
}

/// Looks at each restart that is asked for, while everything continues, and hands what is possible to the
/// agent.
pub(super) async fn check_restarts(
    hand_over: Option<Arc<HandOver>>,
    mut asked: mpsc::Receiver<AskedRestart>,
    heard: AgentHandle,
) {
    let Some(hand_over) = hand_over else { return };
    while let Some(asked) = asked.recv().await {
        let (hand_over, request) = (hand_over.clone(), asked.request.clone());
        let checked = tokio::task::spawn_blocking(move || hand_over.check(&request)).await;
        match checked {
            // Whoever asked may have gone.
            Ok(Ok(())) if asked.request.check_only => drop(asked.answer.send(Ok(()))),
            Ok(Ok(())) => heard.tell(AgentEvent::Restart(asked)).await,
            Ok(Err(error)) => drop(asked.answer.send(Err(error.problem()))),
            // It failed: who asked is told so when `asked` is dropped.
            Err(error) => tracing::error!(%error, "a restart could not be prepared"),
        }
    }
}
