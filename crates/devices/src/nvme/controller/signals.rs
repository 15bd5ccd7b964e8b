//! Interrupts are raised, held while they are masked, and sent.

use rackbus_pci::{Bus, Mode};
use rackbus_spec::nvme::features as fid;

use super::Nvme;
use crate::nvme::interrupts::VECTORS;

impl Nvme {
    /// Raises the interrupts that are due; returns when to look again.
    #[inline]
    pub(super) fn interrupt(&mut self, bus: &Bus<'_>) -> Option<u64> {
        if !self.state.vectors.any_waiting() {
            return None;
        }
        let (coalescing, exempt) = self.state.features.coalescing();
        self.raise(bus, coalescing, exempt)
    }

    pub(super) fn raise(
        &mut self,
        bus: &Bus<'_>,
        coalescing: fid::InterruptCoalescing,
        exempt: u32,
    ) -> Option<u64> {
        // A message that the mask holds back is sent when it is taken away, if it matters then.
        let sent = match bus.irq.mode() {
            Mode::Pin => 0,
            Mode::Msi { .. } => !self.state.registers.interrupt_mask,
            Mode::Msix => !0,
        };
        let next = self.state.vectors.deliver(bus.now_ns, coalescing, exempt, |vector| {
            if sent & 1 << vector != 0 {
                bus.irq.trigger(vector);
            }
        });
        self.update_pin(bus);
        next
    }

    /// The vectors of queues that interrupt and hold completions, a bit each (section 7.5.1.1: the
    /// interrupt status before it is masked).
    fn holding(&self) -> u32 {
        let queues = self.state.cqs.iter().flatten();
        let holding = queues.filter(|queue| queue.interrupts && queue.holds_completions());
        holding.fold(0, |vectors, queue| vectors | 1 << queue.vector)
    }

    /// The interrupt mask was written. A vector that is masked no more and has completions waiting
    /// sends its message now (section 7.5.1.1): MSI tells of a change, and that was held back.
    pub(super) fn mask_changed(&mut self, bus: &Bus<'_>, old: u32) {
        let unmasked = old & !self.state.registers.interrupt_mask;
        if unmasked != 0 && matches!(bus.irq.mode(), Mode::Msi { .. }) {
            self.send_held(bus, unmasked);
        }
        self.update_pin(bus);
    }

    /// The driver enabled another kind of interrupts: what was told by the old one alone is told by
    /// the new one as well.
    pub(super) fn mode_changed(&mut self, bus: &Bus<'_>) {
        self.state.mode = bus.irq.mode();
        match self.state.mode {
            Mode::Pin => {}
            Mode::Msi { .. } => self.send_held(bus, !self.state.registers.interrupt_mask),
            Mode::Msix => self.send_held(bus, !0),
        }
        self.update_pin(bus);
    }

    /// Sends the messages of those of `vectors` that have completions waiting.
    fn send_held(&mut self, bus: &Bus<'_>, vectors: u32) {
        self.refresh_heads();
        let due = self.holding() & vectors;
        (0..VECTORS).filter(|vector| due & 1 << vector != 0).for_each(|v| bus.irq.trigger(v));
    }

    /// Brings the interrupt pin in line (section 7.5.1.1): high while a queue that interrupts
    /// holds completions and its vector is not masked.
    pub(in crate::nvme) fn update_pin(&mut self, bus: &Bus<'_>) {
        let level = bus.irq.mode() == Mode::Pin
            && self.holding() & !self.state.registers.interrupt_mask != 0;
        if level != self.state.pin {
            self.state.pin = level;
            bus.irq.intx(level);
        }
    }

    /// With a pin interrupt pending, the host's progress matters even when there is room.
    pub(super) fn refresh_pin(&mut self, bus: &Bus<'_>) {
        bus.user.before_access();
        self.refresh_heads();
        self.update_pin(bus);
    }
}
