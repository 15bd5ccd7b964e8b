//! A process takes the state of the drive out, ends, and another one continues with it: unnoticed by
//! the guest, whatever is in flight. What the system had under way for the first one ends or does
//! not, and nobody hears of it.

use serde_json::Value;

use rackbus_pci::FunctionState;

use super::super::super::backing::Backing;
use super::super::super::backing::parts::FileBacking;
use super::{Policy, SIZE, World};

/// What a process that goes on may do wrong, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Commands in flight are not done again.
    CommandsForgotten,
    /// One of them is answered twice.
    CommandsTwice,
    /// Completions that wait for their queue are not posted.
    HeldForgotten,
    /// The volatile write cache that the guest turned off is on again.
    CacheOn,
    /// The file is opened as after a death that the user knows of.
    NoWitness,
}

impl World {
    /// Saves the drive, drops it, and restores it as another process would.
    pub(super) fn succeed(&mut self) -> Result<(), String> {
        if matches!(self.policy, Policy::OldFlush(_)) {
            return Ok(());
        }
        let failed_before = self.disk.state().sync_failed;
        let saved = self.host.endpoint.save().map_err(|error| error.to_string())?;
        let failed = self.host.endpoint.health().trouble().is_some();
        self.take_completions(failed_before)?;
        let state = saved.state.to_bytes().map_err(|error| error.to_string())?;
        let state = match self.policy {
            Policy::Careless(mistake) => mistake.make(&state)?,
            _ => state,
        };
        let state = FunctionState::from_bytes(&state).map_err(|error| error.to_string())?;
        self.disk.state().die(false);
        self.host.endpoint = World::nothing()?;
        self.disk.state().now_ns += self.random.below(2_000_000) as u64;
        self.take_reverted()?;
        let lost = failed || self.disk.state().unwitnessed;
        self.disk.state().revive();
        let open = match self.policy {
            Policy::Careless(Mistake::NoWitness) => FileBacking::new,
            _ => FileBacking::again,
        };
        let backing = open(self.disk.clone(), SIZE, 1).map_err(|error| error.to_string())?;
        let backing: Box<dyn Backing> = Box::new(backing);
        // Whatever the process does, its user was promised what is lost.
        self.disk.state().sync_failed |= lost;
        self.take_reverted()?;
        self.host.endpoint = World::controller(&self.disk, self.policy, backing)?;
        let failed_before = self.disk.state().sync_failed;
        let restored = self.host.endpoint.restore(&state, saved.descriptors);
        restored.map_err(|error| error.to_string())?;
        self.log(format_args!("another process goes on"));
        self.now_polled();
        self.harvest(failed_before)?;
        self.take_shutdown(failed_before)
    }
}

impl Mistake {
    /// Makes the mistake in a saved state.
    fn make(self, state: &[u8]) -> Result<Vec<u8>, String> {
        let mut state: Value = serde_json::from_slice(state).map_err(|error| error.to_string())?;
        let drive = &mut state["model"]["state"];
        match self {
            Mistake::CommandsForgotten => drive["jobs"] = Value::Array(Vec::new()),
            Mistake::CommandsTwice => {
                let jobs = drive["jobs"].as_array_mut().ok_or("no jobs")?;
                jobs.extend(jobs.last().cloned());
            }
            Mistake::HeldForgotten => drive["held"] = Value::Array(Vec::new()),
            Mistake::CacheOn => drive["features"]["write_cache"] = Value::Bool(true),
            Mistake::NoWitness => {}
        }
        serde_json::to_vec(&state).map_err(|error| error.to_string())
    }
}
