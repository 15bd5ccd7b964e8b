//! What happens to a rack: processes die, stall and are replaced, and devices leave and come back.

use std::collections::BTreeMap;
use std::time::Duration;

use rackbus_e2e::{RackProcesses, Result};
use rackbus_seeds::Random;
use rustix::process::{Pid, Signal, kill_process};

use crate::{DEVICES, HOSTS};

/// Disturbs a rack, one thing after the other.
pub struct Disturber<'a> {
    rack: &'a RackProcesses,
    random: Random,
    counts: BTreeMap<&'static str, u64>,
    /// A process that stalls.
    frozen: Option<Pid>,
}

impl<'a> Disturber<'a> {
    pub fn new(rack: &'a RackProcesses, random: Random) -> Disturber<'a> {
        Disturber { rack, random, counts: BTreeMap::new(), frozen: None }
    }

    /// Waits a moment, and disturbs.
    pub fn disturb(&mut self) -> Result<()> {
        self.pause(500);
        let role = match self.random.below(4) {
            0 => "control",
            at => HOSTS[at - 1],
        };
        match self.random.below(10) {
            0..3 => {
                self.count("killed");
                self.rack.kill(role)?;
                self.pause(400);
                self.rack.revive(role)?;
                self.wait_process(role)
            }
            3..6 => {
                self.count("frozen");
                let process = self.rack.process(role)?;
                kill_process(process, Signal::STOP)?;
                self.frozen = Some(process);
                // Now and then for longer than a lease lives.
                let most_ms = if self.random.chance(20) { 3500 } else { 1000 };
                self.pause(most_ms);
                self.thaw();
                Ok(())
            }
            6..8 => {
                self.count("restarted in place");
                // It is refused while something is under way.
                let host = HOSTS[self.random.below(HOSTS.len())];
                drop(self.rack.output(&["restart", host])?);
                self.wait_process(host)
            }
            _ => {
                self.count("withdrawn");
                let function = DEVICES[self.random.below(DEVICES.len())];
                drop(self.rack.output(&["withdraw", function, "--force"])?);
                self.pause(200);
                drop(self.rack.output(&["offer", function])?);
                Ok(())
            }
        }
    }

    /// Everything runs, and every device is offered.
    pub fn calm(&mut self) -> Result<()> {
        self.thaw();
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
    pub fn counts(&self) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        counts.join(", ")
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn pause(&mut self, most_ms: usize) {
        std::thread::sleep(Duration::from_millis(self.random.below(most_ms) as u64));
    }

    fn thaw(&mut self) {
        if let Some(process) = self.frozen.take() {
            // It may have been ended meanwhile.
            let _ = kill_process(process, Signal::CONT);
        }
    }

    /// Waits until a process that was started has said its number.
    fn wait_process(&self, role: &str) -> Result<()> {
        let there = |rack: &RackProcesses| rack.process(role).ok().map(drop);
        self.rack.wait("a process that was started runs", Duration::from_secs(60), there)
    }
}

impl Drop for Disturber<'_> {
    fn drop(&mut self) {
        self.thaw();
    }
}
