//! The way to the control plane: what the node says to it, and what it says to the node.

use std::time::Duration;

use rackbus_control::api::NodeMessages;
use rackbus_control::client::JsonLines;
use rackbus_control::said::{NodeLine, SILENCE};
use rackbus_control::{ControlClient, ControlClientError};
use tokio::sync::mpsc;

use super::{AgentEvent, AgentHandle};
use crate::term::NewestTerm;

/// How long it waits before it looks for a lost control plane again.
const RECONNECT: Duration = Duration::from_millis(100);

/// How long it waits at most where the control plane is there and refuses it: each time twice as long.
const REFUSED: Duration = Duration::from_secs(5);

/// How long the control plane may take to hear a message, before the next is tried.
const ANSWER: Duration = Duration::from_secs(5);

/// Messages and reports that may wait to be brought to the control plane. One that does not answer is waited for as
/// long as [`ANSWER`]; a node says some ten things a second of itself, and one or two at a time of each lease and
/// device.
const UNSAID: usize = 1024;

/// What the node says, on its way to [`post`].
pub(super) struct ControlOutbox(mpsc::Sender<NodeMessages>);

impl ControlOutbox {
    /// An outbox, and what takes from it.
    pub(super) fn new() -> (ControlOutbox, mpsc::Receiver<NodeMessages>) {
        let (said, outbox) = mpsc::channel(UNSAID);
        (ControlOutbox(said), outbox)
    }

    /// Says something. Where too much waits it is dropped, as if it had been lost on its way: the protocol says it
    /// again. The agent never waits for the control plane.
    pub(super) fn put(&self, said: NodeMessages) {
        if let Err(error) = self.0.try_send(said) {
            tracing::debug!(%error, "the control plane is not told");
        }
    }
}

/// Brings what the node says to the control plane, in order. What cannot be brought is dropped:
/// the protocol says it again.
pub(super) async fn post(
    client: ControlClient,
    host: String,
    mut outbox: mpsc::Receiver<NodeMessages>,
) {
    while let Some(mut said) = outbox.recv().await {
        while let Ok(next) = outbox.try_recv() {
            said.messages.extend(next.messages);
            said.report = next.report.or(said.report);
        }
        match tokio::time::timeout(ANSWER, client.say(&host, &said)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the control plane did not hear"),
            Err(_) => tracing::debug!("the control plane does not answer"),
        }
    }
}

/// Hears what the control plane says, and finds it again whenever it is lost.
pub(super) async fn listen(
    client: ControlClient,
    host: String,
    heard: AgentHandle,
    mut newest: NewestTerm,
) {
    let (mut lost, mut wait) = (false, RECONNECT);
    if !newest.is_known() {
        // It was said why. No control plane is obeyed, so none is asked for anything.
        heard.closed().await;
    }
    while !heard.is_closed() {
        // One whose process stands still takes the question, and answers nothing.
        let asked = client.listen(&host, newest.newest());
        match tokio::time::timeout(SILENCE, asked).await {
            Ok(Ok(mut said)) => {
                wait = RECONNECT;
                let mut connected = false;
                while let Some(NodeLine { term, message }) = next(&mut said, newest.newest()).await
                {
                    let taken;
                    (newest, taken) = take(newest, term).await;
                    match taken {
                        Ok(true) => {}
                        Ok(false) => {
                            tracing::warn!(
                                term,
                                "a message of a control plane that is no longer the leader was ignored"
                            );
                            break;
                        }
                        Err(error) => {
                            tracing::error!(%error, "the leader's term cannot be stored, so its messages are ignored");
                            break;
                        }
                    }
                    if !std::mem::replace(&mut connected, true) {
                        tracing::info!(host, term, "connected to the control plane");
                        lost = false;
                        heard.tell(AgentEvent::Connected).await;
                    }
                    if let Some(message) = message {
                        heard.tell(AgentEvent::Said(message)).await;
                    }
                }
            }
            // It is there, and this node has to be upgraded, say, or was revoked.
            Ok(Err(ControlClientError::Refused(refused))) => {
                if !lost {
                    tracing::error!(%refused, "the control plane refuses this node");
                }
                // Not where another one is to lead in a moment.
                wait = match refused.code.as_str() {
                    "forbidden" | "implausible_term" => (wait * 2).min(REFUSED),
                    _ => RECONNECT,
                };
            }
            Ok(Err(error)) => {
                wait = RECONNECT;
                tracing::debug!(%error, "no control plane");
            }
            Err(_) => wait = RECONNECT,
        }
        if !std::mem::replace(&mut lost, true) {
            tracing::warn!(
                host,
                "the control plane does not answer; what is lent and borrowed stays so"
            );
        }
        tokio::time::sleep(wait).await;
    }
}

/// Whether what is said in `term` may be taken. A later one than before is on disk then.
pub(super) async fn take(mut newest: NewestTerm, term: u64) -> (NewestTerm, std::io::Result<bool>) {
    if term <= newest.newest() {
        return (newest.clone(), newest.take(term));
    }
    let kept = newest.clone();
    let taking = tokio::task::spawn_blocking(move || {
        let taken = newest.take(term);
        (newest, taken)
    });
    taking.await.unwrap_or_else(|_| (kept, Err(std::io::Error::other("the process ends"))))
}

/// The next line. A control plane that has terms says something all the time: one that stalls is given up.
pub(super) async fn next(said: &mut JsonLines<NodeLine>, term: u64) -> Option<NodeLine> {
    if term == 0 {
        return said.next().await;
    }
    tokio::time::timeout(SILENCE, said.next()).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use rackbus_lease::Message;

    use super::*;

    /// The control plane is there and answers nothing.
    #[test]
    fn what_is_said_while_nobody_takes_it_is_bounded_and_dropped() {
        let (said, mut outbox) = ControlOutbox::new();
        for lease in 0..10_000 {
            let message = Message::Renew { lease, incarnation: 1, sent: None };
            said.put(NodeMessages { messages: vec![message], report: None });
        }
        assert_eq!(outbox.len(), UNSAID);
        let first = outbox.try_recv().unwrap().messages;
        assert_eq!(first, [Message::Renew { lease: 0, incarnation: 1, sent: None }]);
        let message = Message::Closed { lease: 7 };
        said.put(NodeMessages { messages: vec![message.clone()], report: None });
        let last = std::iter::from_fn(|| outbox.try_recv().ok()).last().unwrap();
        assert_eq!(last.messages, [message], "there is a place again");
    }
}
