//! How what the guest has of the drive ends: by a reset, a shutdown, the end of its lease, the death of the lender's
//! process or a loss of power. Each is followed by a new beginning.

use rackbus_pci::Endpoint;
use rackbus_spec::nvme::registers::{Cc, SHN_NORMAL, SHST_COMPLETE};

use super::disk::BLOCKS;
use super::*;

impl World {
    pub(super) fn reset(&mut self) -> Result<(), String> {
        self.map()?;
        match self.random.below(3) {
            0 => {
                self.log(format_args!("controller reset"));
                self.host.write4(reg::CC, 0);
            }
            1 => {
                self.log(format_args!("function-level reset"));
                self.host.endpoint.reset();
            }
            _ => {
                self.log(format_args!("the lease ends, another begins"));
                self.host.endpoint.scrub();
            }
        }
        self.take_reverted()?;
        self.give_up();
        self.set_up()
    }

    /// The guest shuts the controller down, and submits nothing any more.
    pub(super) fn shut_down(&mut self) -> Result<(), String> {
        if self.shutting_down.is_some() {
            return Ok(());
        }
        self.log(format_args!("shutdown"));
        let failed_before = self.disk.state().sync_failed;
        self.shutting_down = Some(self.polls);
        let cc = Cc::from(self.host.read4(reg::CC)).with_shn(SHN_NORMAL);
        self.host.write4(reg::CC, cc.into());
        self.now_polled();
        self.harvest(failed_before)?;
        self.take_shutdown(failed_before)
    }

    /// A shutdown that is complete left nothing volatile (NVM Express base 1.4, section 7.6.2).
    pub(super) fn take_shutdown(&mut self, failed_before: bool) -> Result<(), String> {
        if self.shutting_down.is_none() || self.host.csts().shst() != SHST_COMPLETE {
            return Ok(());
        }
        if failed_before {
            return Err("a shutdown is complete after a failure".to_owned());
        }
        self.log(format_args!("shut down"));
        let at = self.tick();
        self.promises.flushed(at);
        if self.random.chance(50) { self.die() } else { self.reset() }
    }

    /// The lender's process dies, or the machine's power fails, and a new process has the file.
    pub(super) fn die(&mut self) -> Result<(), String> {
        self.map()?;
        let power = self.random.chance(70);
        self.log(format_args!("{}", if power { "power is lost" } else { "the process dies" }));
        self.disk.state().die(power);
        self.give_up();
        // Another drive takes its place before it releases what it has in flight.
        let ram = self.host.ram.clone();
        self.host = TestHost::with_endpoint(World::nothing()?, ram.clone());
        self.disk.state().revive();
        self.take_reverted()?;
        if power {
            for block in 0..BLOCKS {
                let at = self.tick();
                let version = guest::version_of(self.disk.state().content(block))?;
                self.promises.survived(block, version, at)?;
            }
        }
        self.host = TestHost::with_endpoint(World::drive(&self.disk, self.policy)?, ram);
        self.take_reverted()?;
        self.set_up()
    }

    /// What is in the place of a drive while there is none.
    pub(super) fn nothing() -> Result<Endpoint, String> {
        let nothing = NvmeConfig::memory(1 << 20, "-");
        let nothing = Nvme::new(&NvmeConfig { backing: BackingConfig::Null, ..nothing });
        Ok(Endpoint::new(Box::new(nothing.map_err(|e| e.to_string())?)))
    }
}
