//! vhost-user: what QEMU says, and the guest's queues.
//!
//! The device is QEMU's `vhost-user-test-device-pci` with the number of a file system. Its two queues are
//! for requests that are not answered (the kernel forgets a file) and for all others.

use std::sync::Arc;

use vhost::vhost_user::Backend as Frontend;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserShMemConfig};
use vhost_user_backend::{VhostUserBackend, VringRwLock, VringT};
use virtio_queue::QueueT;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use rackbus_segment::guest::TAG;

use super::{Device, WINDOW};
use crate::journal::{JournalRecord, QUEUES};
use crate::state::MOST_PARKED;

/// Entries of each queue.
pub const QUEUE_SIZE: usize = 256;
// What is answered soon has entries, however much waits.
const _: () = assert!(MOST_PARKED + 64 <= QUEUE_SIZE);
/// Bytes of the device's configuration: the tag, and how many queues for requests there are.
pub const CONFIG_SIZE: usize = 40;
const TAG_SIZE: usize = 36;

/// Descriptors may lie in a table of their own: each request takes one entry of its queue.
const INDIRECT: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;

/// What QEMU speaks to.
pub(super) struct Backend {
    device: Arc<Device>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
}

impl Backend {
    pub(super) fn new(device: Arc<Device>, memory: GuestMemoryAtomic<GuestMemoryMmap>) -> Backend {
        Backend { device, memory }
    }
}

/// The configuration of a virtio file system device: its tag, and one request queue.
fn config() -> [u8; CONFIG_SIZE] {
    let mut bytes = [0; CONFIG_SIZE];
    bytes[..TAG.len()].copy_from_slice(TAG.as_bytes());
    bytes[TAG_SIZE..].copy_from_slice(&1_u32.to_le_bytes());
    bytes
}

impl VhostUserBackend for Backend {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        VERSION_1 | PROTOCOL_FEATURES | INDIRECT
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::SHMEM
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn reset_device(&self) {
        tracing::info!("the VM was reset");
        self.stop();
        self.device.act(&JournalRecord::Clear);
    }

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let (start, size) = (offset as usize, size as usize);
        let end = start.saturating_add(size);
        config().get(start..end).map_or_else(|| vec![0; size.min(CONFIG_SIZE)], <[u8]>::to_vec)
    }

    fn update_memory(&self, _memory: GuestMemoryAtomic<GuestMemoryMmap>) -> std::io::Result<()> {
        Ok(())
    }

    fn set_backend_req_fd(&self, frontend: Frontend) {
        self.device.window.open(frontend);
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::CLOEXEC).ok()
    }

    fn stop_vring(&self, _queue: u32) -> std::io::Result<()> {
        self.stop();
        Ok(())
    }

    fn handle_event(
        &self,
        queue: u16,
        _events: EventSet,
        vrings: &[VringRwLock],
        _thread: usize,
    ) -> std::io::Result<()> {
        let Some(vring) = vrings.get(usize::from(queue)) else { return Ok(()) };
        let queue = u8::try_from(queue).unwrap_or(u8::MAX);
        if !self.device.take_up(queue, vring) {
            return Ok(());
        }
        self.device.window.set_running(self.device.lock().kept.core.is_started());
        loop {
            let chain = vring.get_mut().get_queue_mut().pop_descriptor_chain(self.memory.memory());
            let Some(chain) = chain else { return Ok(()) };
            if !self.device.request(queue, vring, &chain) {
                return Ok(());
            }
        }
    }

    fn get_shmem_config(&self) -> std::io::Result<VhostUserShMemConfig> {
        Ok(VhostUserShMemConfig::new(1, &[WINDOW]))
    }
}

impl Backend {
    /// The queues stop: who waits is told so, and nothing of the guest's memory is touched until they continue. QEMU
    /// waits for this, and does nothing else: so nobody may wait for QEMU here.
    fn stop(&self) {
        self.device.window.set_running(false);
        self.device.act(&JournalRecord::Stop);
        self.device.chains.forget();
        self.device.set_aside();
    }
}
