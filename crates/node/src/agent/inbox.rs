//! What the agent hears, and who may wait until it does.
//!
//! The agent takes what it hears as fast as it can, but may be busy for seconds while the node is restarted in
//! place. Jobs and the control plane's messages wait for a place in a bounded queue: each does nothing else
//! meanwhile that the agent could wait for. Who notices a loss may be within a passage of the gate, for whose end a
//! restart in place waits: it must never wait for the agent. So losses, trouble and the ends of fronts are noted beside
//! the queue, each lease and each cause once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_lease::{BorrowerAction, LeaseId};
use tokio::sync::{Notify, mpsc};

use super::AgentEvent;

/// Messages and ends of jobs that may wait for the agent. A control plane that comes back says a few for each
/// function of a host, and each job tells three things at most.
const BACKLOG: usize = 256;

/// The way to the agent.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    heard: mpsc::Sender<AgentEvent>,
    notices: Arc<Notices>,
}

/// All that the agent hears.
#[derive(Debug)]
pub struct AgentInbox {
    heard: mpsc::Receiver<AgentEvent>,
    notices: Arc<Notices>,
}

/// An inbox, and the way to whoever hears it.
pub fn inbox() -> (AgentHandle, AgentInbox) {
    let (sender, heard) = mpsc::channel(BACKLOG);
    let notices = Arc::<Notices>::default();
    (AgentHandle { heard: sender, notices: notices.clone() }, AgentInbox { heard, notices })
}

impl AgentHandle {
    /// Tells it something as soon as there is a place; an agent that is gone hears nothing.
    pub async fn tell(&self, heard: AgentEvent) {
        let _ = self.heard.send(heard).await;
    }

    /// The same from a thread that may wait, and for which nobody does who holds up the agent.
    pub(super) fn tell_from_job(&self, heard: AgentEvent) {
        let _ = self.heard.blocking_send(heard);
    }

    /// A device hangs, or no longer does. Told again before it is heard, it is the same. Never waits.
    pub fn trouble(&self) {
        self.notices.note(|notices| notices.trouble = true);
    }

    /// The lender of a lease is gone, for the first reason that is told. Never waits.
    pub fn lender_lost(&self, lease: LeaseId, reason: String) {
        self.notices.note(|notices| {
            notices.lost.entry(lease).or_insert(reason);
        });
    }

    /// What follows from the end of a front, which ends once. Never waits.
    pub fn front_ended(&self, follows: Vec<BorrowerAction>) {
        self.notices.note(|notices| notices.follows.extend(follows));
    }

    /// Whether the agent is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.heard.is_closed()
    }

    /// Waits until nothing is heard any more.
    pub(super) async fn closed(&self) {
        self.heard.closed().await;
    }
}

impl AgentInbox {
    /// The next that is to be heard; `None` when nobody can tell anything any more. Dropped before it is there, it
    /// takes nothing.
    pub(super) async fn next(&mut self) -> Option<AgentEvent> {
        // Whichever is there, in random order where both are: none keeps the other waiting for ever.
        tokio::select! {
            heard = self.heard.recv() => heard,
            heard = self.notices.next() => Some(heard),
        }
    }

    /// Whether everything was heard.
    pub(super) fn is_empty(&self) -> bool {
        self.heard.is_empty() && self.notices.lock().is_empty()
    }
}

/// What is noted beside the queue.
#[derive(Debug, Default)]
struct Notices {
    waiting: Mutex<Waiting>,
    came: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    trouble: bool,
    /// At most one of each lease that the host has.
    lost: BTreeMap<LeaseId, String>,
    /// At most one of each front that has ended. How often a front can begin again meanwhile is bounded by the seconds for
    /// which the agent may be busy.
    follows: Vec<BorrowerAction>,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        !self.trouble && self.lost.is_empty() && self.follows.is_empty()
    }

    fn take(&mut self) -> Option<AgentEvent> {
        if !self.follows.is_empty() {
            return Some(AgentEvent::Borrowing(std::mem::take(&mut self.follows)));
        }
        match self.lost.pop_first() {
            Some((lease, reason)) => Some(AgentEvent::LenderLost(lease, reason)),
            None => std::mem::take(&mut self.trouble).then_some(AgentEvent::Trouble),
        }
    }
}

impl Notices {
    /// Held for moments only.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Each change of it is one assignment or call.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, note: impl FnOnce(&mut Waiting)) {
        note(&mut self.lock());
        self.came.notify_one();
    }

    async fn next(&self) -> AgentEvent {
        loop {
            // What is noted in between leaves a permit, with which the wait is over at once.
            let noted = self.lock().take();
            match noted {
                Some(heard) => return heard,
                None => self.came.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Of a queue that is full, no thread of a conversation waits for a place.
    #[tokio::test]
    async fn losses_and_trouble_never_wait_and_are_noted_once() {
        let (agent, mut inbox) = inbox();
        for _ in 0..BACKLOG {
            agent.tell(AgentEvent::Connected).await;
        }
        let more = agent.tell(AgentEvent::Connected);
        let waits = tokio::time::timeout(Duration::from_millis(10), more).await;
        assert!(waits.is_err(), "the queue has no bound");
        for round in 0..10_000 {
            agent.trouble();
            agent.lender_lost(7, format!("reason {round}"));
            agent.lender_lost(8, format!("reason {round}"));
        }
        let (mut connected, mut troubles, mut lost) = (0, 0, Vec::new());
        while !inbox.is_empty() {
            match inbox.next().await.unwrap() {
                AgentEvent::Connected => connected += 1,
                AgentEvent::Trouble => troubles += 1,
                AgentEvent::LenderLost(lease, reason) => lost.push((lease, reason)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((connected, troubles), (BACKLOG, 1));
        assert_eq!(lost, [(7, "reason 0".to_owned()), (8, "reason 0".to_owned())]);
    }

    #[tokio::test]
    async fn waiting_for_an_agent_event_returns_what_is_noted() {
        let (agent, mut inbox) = inbox();
        let noted = async {
            tokio::task::yield_now().await;
            agent.trouble();
        };
        let (heard, ()) = tokio::join!(inbox.next(), noted);
        assert!(matches!(heard, Some(AgentEvent::Trouble)), "{heard:?}");
        drop(agent);
        assert!(inbox.next().await.is_none(), "nobody is left");
    }
}
