//! The guest's memory: mapped in one piece or in several, taken away and given back. Nothing touches it meanwhile.

use std::collections::BTreeSet;

use super::*;

/// What mappings of the guest's memory are multiples of: entries of queues are not divided.
const CUT: u64 = 64;

/// What the guest's memory is filled with while it is unmapped.
const POISON: [u8; 4096] = [0xa5; 4096];

impl World {
    /// Takes the guest's memory away; what is in it must not be touched until it is back.
    pub(super) fn unmap(&mut self) -> Result<(), String> {
        let failed_before = self.disk.state().sync_failed;
        self.host.unmap_ram();
        self.harvest(failed_before)?;
        self.saved.resize(guest::RAM_BYTES as usize, 0);
        self.host.ram.whole().copy_to(&mut self.saved);
        self.host.ram.whole().fill(POISON[0]);
        self.unmapped = Some(self.now_ns());
        self.log(format_args!("memory is unmapped"));
        self.now_polled();
        Ok(())
    }

    /// Another way for the guest's memory to be mapped in: in one piece, or in several, as that of
    /// a guest which translates DMA itself. They meet in queues and in buffers.
    pub(super) fn cut(&mut self) {
        let mut cuts = BTreeSet::new();
        if self.random.chance(20) {
            for _ in 0..=self.random.below(5) {
                let within =
                    if self.random.chance(50) { guest::QUEUE_BYTES } else { guest::RAM_BYTES };
                cuts.insert(CUT * (1 + self.random.below((within / CUT) as usize - 1) as u64));
            }
        }
        self.host.cuts = cuts.into_iter().collect();
    }

    pub(super) fn map(&mut self) -> Result<(), String> {
        if self.unmapped.take().is_none() {
            return Ok(());
        }
        for page in (RAM..RAM + guest::RAM_BYTES).step_by(POISON.len()) {
            if self.host.peek(page, POISON.len()) != POISON {
                return Err("memory was written after it was unmapped".to_owned());
            }
        }
        self.host.poke(RAM, &self.saved);
        self.cut();
        self.host.map_ram();
        self.log(format_args!("memory is mapped in {} pieces", self.host.cuts.len() + 1));
        self.guest.mapped(self.polls);
        if let Some(since) = &mut self.shutting_down {
            *since = self.polls;
        }
        self.now_polled();
        Ok(())
    }
}
