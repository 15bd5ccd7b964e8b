//! Registers and queues of a virtio function as a value. Between two polls every request that was taken is
//! completed, so a queue is where it is and how far it is, and nothing is under way.

use rackbus_memory::DmaSpace;
use rackbus_pci::RestoreError;
use rackbus_spec::virtio::{common, feature, status};
use serde::{Deserialize, Serialize};

use super::ring::{Cursor, QueueAddresses, VirtioRing};
use super::transport::{QUEUE_SIZE, Transport};

/// The transport's registers and queues, as they are saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    accepted: u64,
    feature_selects: [u32; 2],
    status: u8,
    config_vector: u16,
    generation: u8,
    selected: u16,
    isr: u8,
    queues: Vec<QueueState>,
}

/// A queue's addresses and how far it is, as they are saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueState {
    size: u16,
    descriptors: u64,
    driver: u64,
    device: u64,
    vector: u16,
    /// How far it is, if it is enabled.
    cursor: Option<Cursor>,
}

fn require(holds: bool, what: &str) -> Result<(), RestoreError> {
    if holds { Ok(()) } else { Err(RestoreError::Invalid(what.to_owned())) }
}

impl Transport {
    /// The transport as a value, from which another process continues.
    pub fn save(&self) -> TransportState {
        let queues = self.queues.iter().map(|queue| {
            let QueueAddresses { size, descriptors, driver, device } = queue.place;
            let cursor = queue.ring.as_ref().map(VirtioRing::cursor);
            QueueState { size, descriptors, driver, device, vector: queue.vector, cursor }
        });
        TransportState {
            accepted: self.accepted,
            feature_selects: self.feature_selects,
            status: self.status,
            config_vector: self.config_vector,
            generation: self.generation,
            selected: self.selected,
            isr: self.isr,
            queues: queues.collect(),
        }
    }

    /// Goes on as it was, from after power-on. `vectors` are as many as the function has.
    ///
    /// # Errors
    /// When it cannot have been so.
    pub fn restore(
        &mut self,
        dma: &DmaSpace,
        vectors: usize,
        saved: &TransportState,
    ) -> Result<(), RestoreError> {
        let vector = |vector: u16| vector == common::NO_VECTOR || usize::from(vector) < vectors;
        let negotiated = saved.status & status::FEATURES_OK != 0;
        require(saved.queues.len() == self.queues.len(), "the number of queues")?;
        require(vector(saved.config_vector), "a vector")?;
        if negotiated {
            let known = saved.accepted & !self.offered == 0;
            let allowed = saved.accepted & feature::VERSION_1 != 0 && self.allows(saved.accepted);
            require(known && allowed, "features")?;
        }
        require(negotiated || saved.status & status::DRIVER_OK == 0, "the status")?;
        for (queue, saved_queue) in self.queues.iter_mut().zip(&saved.queues) {
            let QueueState { size, descriptors, driver, device, vector: at, cursor } = *saved_queue;
            require(vector(at), "a vector")?;
            queue.place = QueueAddresses { size, descriptors, driver, device };
            queue.vector = at;
            let Some(cursor) = cursor else { continue };
            require(negotiated && (1..=QUEUE_SIZE).contains(&size), "a queue")?;
            let wrong = |_| RestoreError::Invalid("a queue".to_owned());
            let mut ring = VirtioRing::new(dma, queue.place, saved.accepted).map_err(wrong)?;
            ring.go_on(cursor).map_err(wrong)?;
            queue.ring = Some(ring);
        }
        self.accepted = saved.accepted;
        self.feature_selects = saved.feature_selects;
        self.status = saved.status;
        self.config_vector = saved.config_vector;
        self.generation = saved.generation;
        self.selected = saved.selected;
        self.isr = saved.isr;
        Ok(())
    }
}
