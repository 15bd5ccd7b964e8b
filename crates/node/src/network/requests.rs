//! Rings that queues of this host ask for, until the service looks at each.

use std::collections::HashSet;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rackbus_net::{PortQueueId, RingOpener};

/// A queue that wants to send, and the station that it wants to send to.
type RingRequest = (PortQueueId, usize);

/// Requests that wait, as a set: a queue that asks again for the same station, as one does whose port was made
/// anew, is in it already. So no more wait than the host's queues have stations to send to, and nobody who asks
/// waits for a place: that is the thread that moves frames.
type WaitingRequests = Arc<Mutex<HashSet<RingRequest>>>;

fn lock(waiting: &WaitingRequests) -> MutexGuard<'_, HashSet<RingRequest>> {
    // Each change of it is one call.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What opens rings for queues.
#[derive(Debug, Clone)]
pub(super) struct RingRequests {
    requests: Sender<RingRequest>,
    waiting: WaitingRequests,
}

/// What takes the requests.
#[derive(Debug)]
pub(super) struct AskedRings {
    requests: Receiver<RingRequest>,
    waiting: WaitingRequests,
}

/// The way for requests, and what takes them.
pub(super) fn ring_requests() -> (RingRequests, AskedRings) {
    let ((sender, receiver), waiting) = (mpsc::channel(), WaitingRequests::default());
    (
        RingRequests { requests: sender, waiting: waiting.clone() },
        AskedRings { requests: receiver, waiting },
    )
}

impl RingOpener for RingRequests {
    fn open(&self, from: PortQueueId, station: usize) {
        if lock(&self.waiting).insert((from, station)) {
            // Without a service nothing is opened, and frames are dropped in time.
            let _ = self.requests.send((from, station));
        }
    }
}

impl AskedRings {
    /// The next request, as soon as there is one; `None` when nobody can ask any more.
    pub(super) fn next(&self) -> Option<RingRequest> {
        self.requests.recv().ok().inspect(|request| self.taken(request))
    }

    /// The next one that is there.
    #[cfg(test)]
    pub(super) fn try_next(&self) -> Option<RingRequest> {
        self.requests.try_recv().ok().inspect(|request| self.taken(request))
    }

    /// From now on it may be asked for again: what is looked at now says nothing of what follows.
    fn taken(&self, request: &RingRequest) {
        lock(&self.waiting).remove(request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port that is closed and made anew asks for what its former life has asked for.
    #[test]
    fn what_is_asked_for_again_before_it_is_looked_at_waits_once() {
        let (requests, asked) = ring_requests();
        let queue = |number| PortQueueId { station: 1, number };
        for _ in 0..1000 {
            requests.open(queue(0), 2);
            requests.open(queue(1), 2);
            requests.open(queue(0), 3);
        }
        let waiting: Vec<_> = std::iter::from_fn(|| asked.try_next()).collect();
        assert_eq!(waiting, [(queue(0), 2), (queue(1), 2), (queue(0), 3)]);
        requests.open(queue(0), 2);
        assert_eq!(asked.try_next(), Some((queue(0), 2)), "it is asked for anew");
        drop(requests);
        assert_eq!(asked.next(), None);
    }
}
