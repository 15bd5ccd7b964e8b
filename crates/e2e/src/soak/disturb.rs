//! What all who disturb a rack need: choices, pauses, a process that stalls, and how often each thing was done.

use std::collections::BTreeMap;
use std::time::Duration;

use rackbus_seeds::Random;
use rustix::process::{Pid, Signal, kill_process};

use crate::Result;

/// Disturbances of a rack so far. A process that stalls goes on when this ends.
#[derive(Debug)]
pub struct Disturbances {
    /// What is chosen next.
    pub random: Random,
    counts: BTreeMap<&'static str, u64>,
    stalled: Option<Pid>,
}

impl Disturbances {
    /// Nothing is disturbed yet; what is, is drawn from `random`.
    #[must_use]
    pub fn new(random: Random) -> Disturbances {
        Disturbances { random, counts: BTreeMap::new(), stalled: None }
    }

    /// Counts one that is about to be done.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Waits for less than so many milliseconds.
    pub fn pause(&mut self, most_ms: usize) {
        std::thread::sleep(Duration::from_millis(self.random.below(most_ms) as u64));
    }

    /// Has a process stand still for less than `most_ms`, or now and then than `long_ms`.
    ///
    /// # Errors
    /// When it has ended.
    pub fn stall(&mut self, process: Pid, most_ms: usize, long_ms: usize) -> Result<()> {
        self.count("frozen");
        kill_process(process, Signal::STOP)?;
        self.stalled = Some(process);
        let most_ms = if self.random.chance(20) { long_ms } else { most_ms };
        self.pause(most_ms);
        self.go_on();
        Ok(())
    }

    /// A process that was stalled goes on.
    pub fn go_on(&mut self) {
        if let Some(process) = self.stalled.take() {
            // It may have been ended meanwhile.
            let _ = kill_process(process, Signal::CONT);
        }
    }

    /// What was done, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        counts.join(", ")
    }
}

impl Drop for Disturbances {
    fn drop(&mut self) {
        self.go_on();
    }
}
