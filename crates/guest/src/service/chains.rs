//! Requests of the guest that are not answered yet: their descriptors in the guest's memory.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vhost_user_backend::{VringRwLock, VringT};
use virtio_queue::DescriptorChain;
use vm_memory::{GuestMemoryLoadGuard, GuestMemoryMmap};

use crate::fuse::MAX_REQUEST;

pub(super) type Chain = DescriptorChain<GuestMemoryLoadGuard<GuestMemoryMmap>>;

/// All that wait for an answer, by token.
#[derive(Default)]
pub(super) struct Chains(Mutex<Pending>);

#[derive(Default)]
struct Pending {
    by_token: HashMap<u64, (VringRwLock, Chain)>,
    last: u64,
}

impl Chains {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request in: its token, and its bytes. One that cannot be read is empty.
    pub(super) fn take(&self, vring: &VringRwLock, chain: Chain) -> (u64, Vec<u8>) {
        let bytes = read(&chain).unwrap_or_default();
        let mut pending = self.lock();
        pending.last += 1;
        let token = pending.last;
        pending.by_token.insert(token, (vring.clone(), chain));
        (token, bytes)
    }

    /// Answers a request, if it still waits.
    pub(super) fn complete(&self, token: u64, bytes: &[u8]) {
        let mut pending = self.lock();
        let Some((vring, chain)) = pending.by_token.remove(&token) else { return };
        let head = chain.head_index();
        let length = write(chain, bytes).unwrap_or(0);
        // Under the lock: after `forget` the guest's memory is not written to any more.
        let used = vring.add_used(head, length).map_err(|error| error.to_string());
        let told = used.and_then(|()| vring.signal_used_queue().map_err(|error| error.to_string()));
        if let Err(error) = told {
            tracing::warn!(error, "a request of the guest could not be answered");
        }
    }

    /// The queues stop: what is not answered now never is.
    pub(super) fn forget(&self) {
        self.lock().by_token.clear();
    }
}

fn read(chain: &Chain) -> Option<Vec<u8>> {
    let reader = chain.clone().reader(chain.memory()).ok()?;
    let mut bytes = Vec::with_capacity(reader.available_bytes().min(MAX_REQUEST));
    reader.take(MAX_REQUEST as u64).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn write(chain: Chain, bytes: &[u8]) -> Option<u32> {
    let memory = chain.clone();
    let mut writer = chain.writer(memory.memory()).ok()?;
    let room = writer.available_bytes().min(bytes.len());
    writer.write_all(bytes.get(..room)?).ok()?;
    u32::try_from(room).ok()
}
