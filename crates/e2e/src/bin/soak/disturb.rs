//! What happens to a rack: processes die, stall and are replaced, and devices leave and come back.

use std::time::Duration;

use rackbus_e2e::soak::Disturbances;
use rackbus_e2e::{RackProcesses, Result};
use rackbus_seeds::Random;

use crate::{DEVICES, HOSTS};

/// Disturbs a rack, one thing after the other.
pub struct RackDisturber<'a> {
    rack: &'a RackProcesses,
    done: Disturbances,
}

impl<'a> RackDisturber<'a> {
    pub fn new(rack: &'a RackProcesses, random: Random) -> RackDisturber<'a> {
        RackDisturber { rack, done: Disturbances::new(random) }
    }

    /// Waits a moment, and disturbs.
    pub fn disturb(&mut self) -> Result<()> {
        self.done.pause(500);
        let role = match self.done.random.below(4) {
            0 => "control",
            at => HOSTS[at - 1],
        };
        match self.done.random.below(10) {
            0..3 => {
                self.done.count("killed");
                self.rack.kill(role)?;
                self.done.pause(400);
                self.rack.revive(role)?;
                self.wait_process(role)
            }
            3..6 => {
                let process = self.rack.process(role)?;
                // Now and then for longer than a lease lives.
                self.done.stall(process, 1000, 3500)
            }
            6..8 => {
                self.done.count("restarted in place");
                // It is refused while something is under way.
                let host = HOSTS[self.done.random.below(HOSTS.len())];
                drop(self.rack.output(&["restart", host])?);
                self.wait_process(host)
            }
            _ => {
                self.done.count("withdrawn");
                let function = DEVICES[self.done.random.below(DEVICES.len())];
                drop(self.rack.output(&["withdraw", function, "--force"])?);
                self.done.pause(200);
                drop(self.rack.output(&["offer", function])?);
                Ok(())
            }
        }
    }

    /// Everything runs, and every device is offered.
    pub fn calm(&mut self) -> Result<()> {
        self.done.go_on();
        for role in ["control"].into_iter().chain(HOSTS) {
            if self.rack.process(role).is_err() {
                self.rack.revive(role)?;
                self.wait_process(role)?;
            }
        }
        self.rack.wait_hosts(&HOSTS)?;
        for function in DEVICES {
            self.rack.wait("what was withdrawn is offered", Duration::from_secs(60), |rack| {
                rack.json(&["offer", function]).ok()
            })?;
        }
        Ok(())
    }

    /// What was done, for people.
    pub fn describe(&self) -> String {
        self.done.describe()
    }

    /// Waits until a process that was started has said its number.
    fn wait_process(&self, role: &str) -> Result<()> {
        let there = |rack: &RackProcesses| rack.process(role).ok().map(drop);
        self.rack.wait("a process that was started runs", Duration::from_secs(60), there)
    }
}
