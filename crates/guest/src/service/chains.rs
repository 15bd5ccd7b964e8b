//! Requests of the guest that are not answered yet: where their answers go in the guest's memory.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vhost_user_backend::{VringRwLock, VringT};
use virtio_queue::{DescriptorChain, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryLoadGuard,
    GuestMemoryMmap,
};

use super::ledger::Ledger;
use crate::fuse::MAX_REQUEST;
use crate::journal::QueuedRequest;

pub(super) type RequestChain = DescriptorChain<GuestMemoryLoadGuard<GuestMemoryMmap>>;

/// Most pieces of memory that an answer may go to; what a queue has entries.
const MOST_PIECES: usize = super::backend::QUEUE_SIZE;

/// All that wait for an answer.
pub(super) struct Chains {
    pending: Mutex<Pending>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    ledger: Arc<Ledger>,
}

#[derive(Default)]
struct Pending {
    by_token: HashMap<u64, Waiting>,
    /// Their queues and heads.
    heads: HashSet<(u8, u16)>,
}

impl Pending {
    fn insert(&mut self, token: u64, waiting: Waiting) {
        self.heads.insert((waiting.queue, waiting.head));
        self.by_token.insert(token, waiting);
    }

    fn remove(&mut self, token: u64) -> Option<Waiting> {
        let waiting = self.by_token.remove(&token)?;
        self.heads.remove(&(waiting.queue, waiting.head));
        Some(waiting)
    }
}

struct Waiting {
    vring: VringRwLock,
    queue: u8,
    head: u16,
    room: Vec<(u64, u32)>,
}

impl Chains {
    pub(super) fn new(memory: GuestMemoryAtomic<GuestMemoryMmap>, ledger: Arc<Ledger>) -> Chains {
        Chains { pending: Mutex::default(), memory, ledger }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request with this head may be taken: the head is one of its queue's, and its former request is answered.
    /// A driver that does otherwise would have any number of requests wait.
    pub(super) fn admits(&self, vring: &VringRwLock, queue: u8, head: u16) -> bool {
        head < vring.get_ref().get_queue().size() && !self.lock().heads.contains(&(queue, head))
    }

    /// A request waits for its answer from now on, unless its queue has stopped meanwhile: then it waits from when
    /// that continues.
    pub(super) fn wait(&self, token: u64, vring: &VringRwLock, request: &QueuedRequest) {
        let QueuedRequest { queue, head, room, .. } = request;
        let mut pending = self.lock();
        if is_running(vring) {
            let (vring, queue, head, room) = (vring.clone(), *queue, *head, room.clone());
            pending.insert(token, Waiting { vring, queue, head, room });
        }
    }

    /// Requests that have no answer yet.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().by_token.len()
    }

    /// Answers a request, if it still waits.
    pub(super) fn complete(&self, token: u64, bytes: &[u8]) {
        let mut pending = self.lock();
        let Some(Waiting { vring, queue, head, room }) = pending.remove(token) else { return };
        // A VM that is reset has something else there soon. Where it continues, the request has its answer with it.
        if !is_running(&vring) {
            return;
        }
        let length = self.write(&room, bytes);
        // Under the lock: after `forget` the guest's memory is not written to any more.
        let entry = vring.get_ref().get_queue().next_used();
        self.ledger.answers(queue, head, entry);
        let used = vring.add_used(head, length).map_err(|error| error.to_string());
        self.ledger.answered(queue, head);
        let told = used.and_then(|()| vring.signal_used_queue().map_err(|error| error.to_string()));
        if let Err(error) = told {
            tracing::warn!(error, "a request of the guest could not be answered");
        }
    }

    /// The queues stop: what is not answered now is answered when they continue, if they do.
    pub(super) fn forget(&self) {
        *self.lock() = Pending::default();
    }

    /// Writes as much of an answer as there is room for; how much.
    fn write(&self, room: &[(u64, u32)], bytes: &[u8]) -> u32 {
        let (memory, mut rest) = (self.memory.memory(), bytes);
        for (at, length) in room {
            let (now, later) = rest.split_at(rest.len().min(*length as usize));
            if memory.write_slice(now, GuestAddress(*at)).is_err() {
                break;
            }
            rest = later;
        }
        u32::try_from(bytes.len() - rest.len()).unwrap_or(0)
    }
}

/// Whether QEMU has a queue started and enabled: at no other time is anything of it touched.
pub(super) fn is_running(vring: &VringRwLock) -> bool {
    let state = vring.get_ref();
    state.get_queue().ready() && state.is_enabled()
}

/// What a request says; nothing when it cannot be read.
pub(super) fn read(chain: &RequestChain) -> Vec<u8> {
    let Ok(reader) = chain.clone().reader(chain.memory()) else { return Vec::new() };
    let mut bytes = Vec::with_capacity(reader.available_bytes().min(MAX_REQUEST));
    match reader.take(MAX_REQUEST as u64).read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}

/// Where its answer goes.
pub(super) fn room(chain: &RequestChain) -> Vec<(u64, u32)> {
    let pieces = chain.clone().writable().take(MOST_PIECES);
    pieces.map(|piece| (piece.addr().0, piece.len())).collect()
}
