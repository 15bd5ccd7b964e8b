//! The registers of a virtio function and what they mean (virtio 1.2, sections 3 and 4.1): features, status, queues,
//! interrupts.

use std::sync::atomic::{Ordering, fence};

use rackbus_memory::DmaSpace;
use rackbus_pci::{Interrupts, Mode};
use rackbus_spec::virtio::{common as reg, feature, isr, status};

use super::DriverFault;
use super::layout::{ISR, Structure, structure};
use super::ring::{QueueAddresses, VirtioRing};

/// The largest queue that is offered.
pub const QUEUE_SIZE: u16 = 1024;

/// What a write to the registers means to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterWrite {
    /// Nothing that concerns the device.
    None,
    /// The device is reset.
    Reset,
    /// The driver drives it.
    DriverOk,
    /// A queue was reset.
    QueueReset(u16),
}

/// A queue as its registers show it.
#[derive(Debug)]
pub struct QueueRegisters {
    /// Where it is, or is to be.
    pub place: QueueAddresses,
    /// Vector of its interrupts.
    pub vector: u16,
    /// While it is enabled.
    pub ring: Option<VirtioRing>,
    /// Since when its memory, or that of its next request, cannot be reached.
    pub unreachable_since: Option<u64>,
}

impl QueueRegisters {
    fn new() -> QueueRegisters {
        let place = QueueAddresses { size: QUEUE_SIZE, descriptors: 0, driver: 0, device: 0 };
        QueueRegisters { place, vector: reg::NO_VECTOR, ring: None, unreachable_since: None }
    }
}

/// Registers and queues of a function.
#[derive(Debug)]
pub struct Transport {
    pub(super) offered: u64,
    /// What of that is shown to no driver: one of a state that an earlier version saved may have accepted it.
    withheld: u64,
    /// Whether a driver may accept these features.
    allowed: fn(u64) -> bool,
    pub(super) accepted: u64,
    pub(super) feature_selects: [u32; 2],
    pub(super) status: u8,
    pub(super) config_vector: u16,
    pub(super) generation: u8,
    pub(super) selected: u16,
    pub(super) isr: u8,
    pub(super) queues: Vec<QueueRegisters>,
    /// Generation of the mappings by which the queues' memory was looked up.
    pub(super) mapped: Option<u64>,
}

impl Transport {
    /// A device that offers these features, of which a driver may accept what `allows` says, with so many queues.
    pub fn new(offered: u64, allows: fn(u64) -> bool, queues: u16) -> Transport {
        Transport {
            offered,
            withheld: 0,
            allowed: allows,
            accepted: 0,
            feature_selects: [0; 2],
            status: 0,
            config_vector: reg::NO_VECTOR,
            generation: 0,
            selected: 0,
            isr: 0,
            queues: (0..queues).map(|_| QueueRegisters::new()).collect(),
            mapped: None,
        }
    }

    /// The same, of which no driver sees these features, though a saved state may have them accepted.
    #[must_use]
    pub fn withholding(self, features: u64) -> Transport {
        Transport { withheld: features, ..self }
    }

    fn shown(&self) -> u64 {
        self.offered & !self.withheld
    }

    /// Whether a driver may accept these together.
    pub(super) fn allows(&self, features: u64) -> bool {
        (self.allowed)(features)
    }

    /// Puts everything back as it is after power-on, and takes the pin's interrupt back.
    pub fn reset(&mut self, irq: &Interrupts) {
        if self.isr != 0 {
            irq.intx(false);
        }
        let count = self.queues.len() as u16;
        *self = Transport::new(self.offered, self.allowed, count).withholding(self.withheld);
    }

    /// Whether the driver accepted a feature.
    #[inline]
    pub fn has(&self, feature: u64) -> bool {
        self.accepted & feature != 0
    }

    /// All features that the driver accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Whether the driver drives the device, and it does not need a reset.
    #[inline]
    pub fn runs(&self) -> bool {
        self.status & (status::DRIVER_OK | status::DEVICE_NEEDS_RESET) == status::DRIVER_OK
    }

    /// Whether the device needs a reset.
    pub fn is_broken(&self) -> bool {
        self.status & status::DEVICE_NEEDS_RESET != 0
    }

    /// The queue of this number, while it is enabled.
    #[inline]
    pub fn ring(&mut self, queue: u16) -> Option<&mut VirtioRing> {
        self.queues.get_mut(usize::from(queue))?.ring.as_mut()
    }

    /// The queue of this number.
    #[inline]
    pub fn queue(&mut self, queue: u16) -> Option<&mut QueueRegisters> {
        self.queues.get_mut(usize::from(queue))
    }

    /// Looks up the memory of all queues again if mappings have changed since.
    #[inline]
    pub fn refresh(&mut self, dma: &DmaSpace) {
        if self.mapped != Some(dma.generation()) {
            self.mapped = Some(dma.generation());
            self.queues.iter_mut().filter_map(|queue| queue.ring.as_mut()).for_each(|ring| {
                ring.resolve(dma);
            });
        }
    }

    /// Releases the memory of all queues.
    pub fn release_memory(&mut self) {
        self.mapped = None;
        self.queues
            .iter_mut()
            .filter_map(|queue| queue.ring.as_mut())
            .for_each(VirtioRing::release_memory);
    }

    /// What the driver did needs a reset: the driver is told, and nothing is done any more until then.
    #[cold]
    pub fn fail(&mut self, irq: &Interrupts, fault: DriverFault) {
        tracing::warn!(%fault, "a virtio driver broke its device, which needs a reset");
        let told = self.runs();
        self.status |= status::DEVICE_NEEDS_RESET;
        if told {
            self.config_changed(irq);
        }
    }

    /// The device's configuration changed as its driver asked for.
    pub fn config_moved(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// The device's configuration changed.
    pub fn config_changed(&mut self, irq: &Interrupts) {
        self.config_moved();
        if self.status & status::DRIVER_OK != 0 {
            self.signal(irq, self.config_vector, isr::CONFIG);
        }
    }

    /// Interrupts for what a queue completed, if its driver wants that.
    #[inline]
    pub fn interrupt(&mut self, irq: &Interrupts, queue: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(queue)) else { return };
        let vector = queue.vector;
        if queue.ring.as_mut().is_some_and(VirtioRing::wants_interrupt) {
            self.signal(irq, vector, isr::QUEUE);
        }
    }

    fn signal(&mut self, irq: &Interrupts, vector: u16, cause: u8) {
        match irq.mode() {
            Mode::Msix => irq.trigger(vector),
            Mode::Pin | Mode::Msi { .. } => {
                self.isr |= cause;
                irq.intx(true);
            }
        }
    }

    /// All queues are polled from now on, or their drivers notify them. True when something has come of which a driver may
    /// have told nothing.
    pub fn poll_queues(&mut self, polled: bool) -> bool {
        let rings = self.queues.iter_mut().filter_map(|queue| queue.ring.as_mut());
        let untold = rings.fold(false, |untold, ring| ring.ask_notifications(!polled) | untold);
        // Either the driver sees that it has to notify, or what it made available is seen by who looks now.
        fence(Ordering::SeqCst);
        untold
    }

    /// Whether a queue has a request.
    #[inline]
    pub fn has_work(&self, queue: u16) -> bool {
        let ring = self.queues.get(usize::from(queue)).and_then(|queue| queue.ring.as_ref());
        ring.is_some_and(VirtioRing::has_work)
    }

    /// A driver reads `data.len()` bytes at `offset` of BAR 0; the device's own configuration is in `config`.
    pub fn read(&mut self, irq: &Interrupts, offset: u64, data: &mut [u8], config: &[u8]) {
        match structure(offset) {
            Structure::Common(at) => copy(&self.common(), at, data),
            Structure::Isr => {
                if let (Some(byte), ISR) = (data.first_mut(), offset) {
                    *byte = std::mem::take(&mut self.isr);
                    irq.intx(false);
                }
            }
            Structure::Device(at) => copy(config, at, data),
            Structure::Notify => {}
        }
    }

    /// The common configuration as it reads.
    fn common(&self) -> [u8; reg::SIZE as usize] {
        let mut image = [0; reg::SIZE as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..][..bytes.len()].copy_from_slice(bytes);
        };
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let [device, driver] = self.feature_selects;
        put(reg::DEVICE_FEATURE_SELECT, &device.to_le_bytes());
        put(reg::DEVICE_FEATURE, &half(self.shown(), device).to_le_bytes());
        put(reg::DRIVER_FEATURE_SELECT, &driver.to_le_bytes());
        put(reg::DRIVER_FEATURE, &half(self.accepted, driver).to_le_bytes());
        put(reg::CONFIG_VECTOR, &self.config_vector.to_le_bytes());
        put(reg::NUM_QUEUES, &(self.queues.len() as u16).to_le_bytes());
        put(reg::DEVICE_STATUS, &[self.status]);
        put(reg::CONFIG_GENERATION, &[self.generation]);
        put(reg::QUEUE_SELECT, &self.selected.to_le_bytes());
        if let Some(queue) = self.queues.get(usize::from(self.selected)) {
            put(reg::QUEUE_SIZE, &queue.place.size.to_le_bytes());
            put(reg::QUEUE_VECTOR, &queue.vector.to_le_bytes());
            put(reg::QUEUE_ENABLE, &u16::from(queue.ring.is_some()).to_le_bytes());
            put(reg::QUEUE_NOTIFY_OFF, &self.selected.to_le_bytes());
            put(reg::QUEUE_DESC, &queue.place.descriptors.to_le_bytes());
            put(reg::QUEUE_DRIVER, &queue.place.driver.to_le_bytes());
            put(reg::QUEUE_DEVICE, &queue.place.device.to_le_bytes());
            put(reg::QUEUE_NOTIFY_DATA, &self.selected.to_le_bytes());
        } else {
            put(reg::QUEUE_VECTOR, &reg::NO_VECTOR.to_le_bytes());
        }
        image
    }

    /// A driver writes `data` at `offset` of BAR 0, outside of the device's own configuration. Notifications wake the
    /// engine, which looks at all queues: which one is meant does not matter.
    pub fn write(
        &mut self,
        dma: &DmaSpace,
        irq: &Interrupts,
        offset: u64,
        data: &[u8],
    ) -> RegisterWrite {
        let Structure::Common(at) = structure(offset) else { return RegisterWrite::None };
        let value = data.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        let (half, word) = (value as u16, value as u32);
        let vectors = irq.vectors();
        let known = |vector: u16| match usize::from(vector) < vectors {
            true => vector,
            false => reg::NO_VECTOR,
        };
        match (at, data.len()) {
            (reg::DEVICE_FEATURE_SELECT, 4) => self.feature_selects[0] = word,
            (reg::DRIVER_FEATURE_SELECT, 4) => self.feature_selects[1] = word,
            (reg::DRIVER_FEATURE, 4) if self.status & status::FEATURES_OK == 0 => {
                self.accept(word);
            }
            (reg::CONFIG_VECTOR, 2) => self.config_vector = known(half),
            (reg::DEVICE_STATUS, 1) => return self.write_status(value as u8),
            (reg::QUEUE_SELECT, 2) => self.selected = half,
            (reg::QUEUE_VECTOR, 2) => {
                if let Some(queue) = self.queues.get_mut(usize::from(self.selected)) {
                    queue.vector = known(half);
                }
            }
            (reg::QUEUE_ENABLE, 2) if half == 1 => {
                if let Err(fault) = self.enable(dma) {
                    self.fail(irq, fault);
                }
            }
            (reg::QUEUE_RESET, 2) if half == 1 && self.has(feature::RING_RESET) => {
                if let Some(queue) = self.queues.get_mut(usize::from(self.selected)) {
                    *queue = QueueRegisters::new();
                    return RegisterWrite::QueueReset(self.selected);
                }
            }
            _ => self.write_place(at, data.len(), value),
        }
        RegisterWrite::None
    }

    fn accept(&mut self, word: u32) {
        let word = u64::from(word);
        self.accepted = match self.feature_selects[1] {
            0 => self.accepted & !0xffff_ffff | word,
            1 => self.accepted & 0xffff_ffff | word << 32,
            _ => self.accepted,
        };
    }

    fn write_status(&mut self, value: u8) -> RegisterWrite {
        if value == 0 {
            return RegisterWrite::Reset;
        }
        // The driver sets bits and clears none; the device's own bit is not the driver's.
        let mut set = value & !status::DEVICE_NEEDS_RESET & !self.status;
        let features = self.accepted;
        // Also what is shown no more: a driver that wakes up after a reset asks for what it had without looking again.
        let possible = features & !self.offered == 0
            && features & feature::VERSION_1 != 0
            && self.allows(features);
        if set & status::FEATURES_OK != 0 && !possible {
            set &= !status::FEATURES_OK;
        }
        if (self.status | set) & status::FEATURES_OK == 0 {
            set &= !status::DRIVER_OK;
        }
        self.status |= set;
        match set & status::DRIVER_OK != 0 {
            true => RegisterWrite::DriverOk,
            false => RegisterWrite::None,
        }
    }

    /// The driver writes where the selected queue is to be.
    fn write_place(&mut self, at: u64, length: usize, value: u64) {
        let Some(queue) = self.queues.get_mut(usize::from(self.selected)) else { return };
        if queue.ring.is_some() {
            return;
        }
        let place = &mut queue.place;
        if (at, length) == (reg::QUEUE_SIZE, 2) {
            place.size = value as u16;
            return;
        }
        let (field, base) = match at {
            reg::QUEUE_DESC..reg::QUEUE_DRIVER => (&mut place.descriptors, reg::QUEUE_DESC),
            reg::QUEUE_DRIVER..reg::QUEUE_DEVICE => (&mut place.driver, reg::QUEUE_DRIVER),
            reg::QUEUE_DEVICE..reg::QUEUE_NOTIFY_DATA => (&mut place.device, reg::QUEUE_DEVICE),
            _ => return,
        };
        *field = match (at - base, length) {
            (0, 8) => value,
            (0, 4) => *field & !0xffff_ffff | value,
            (4, 4) => *field & 0xffff_ffff | value << 32,
            _ => *field,
        };
    }

    fn enable(&mut self, dma: &DmaSpace) -> Result<(), DriverFault> {
        let accepted = self.accepted;
        if self.status & status::FEATURES_OK == 0 {
            return Ok(());
        }
        let Some(queue) = self.queues.get_mut(usize::from(self.selected)) else { return Ok(()) };
        if queue.ring.is_none() {
            if queue.place.size == 0 || queue.place.size > QUEUE_SIZE {
                return Err(DriverFault::Queue);
            }
            queue.ring = Some(VirtioRing::new(dma, queue.place, accepted)?);
        }
        Ok(())
    }
}

fn copy(image: &[u8], at: u64, data: &mut [u8]) {
    let from = usize::try_from(at).ok().and_then(|at| image.get(at..)).unwrap_or(&[]);
    let count = from.len().min(data.len());
    data[..count].copy_from_slice(&from[..count]);
}
