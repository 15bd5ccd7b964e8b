//! How long each lease was waited for while the control plane was awake: what expires must have
//! been waited for long enough, and what was is to expire.

use std::collections::BTreeMap;

use rackbus_lease::{Config, LeaseId, Millis};

/// The least and the most time that may count against a lease since it was last renewed.
#[derive(Default)]
struct Waited {
    least: Millis,
    most: Millis,
}

/// What was waited for each live lease.
pub struct Patience {
    config: Config,
    seen: Millis,
    waited: BTreeMap<LeaseId, Waited>,
}

impl Patience {
    /// An authority begins at `now`.
    pub fn new(config: Config, now: Millis) -> Self {
        Patience { config, seen: now, waited: BTreeMap::new() }
    }

    /// It takes a step at `now`. Much time since the one before passed in its sleep.
    pub fn pass(&mut self, now: Millis) {
        let beat = self.config.ttl.min(self.config.close_grace) / 8;
        let passed = now.saturating_sub(self.seen);
        self.seen = self.seen.max(now);
        for waited in self.waited.values_mut() {
            waited.least += passed.min(beat);
            waited.most += passed.min(2 * beat);
        }
    }

    /// A lease begins, or is renewed.
    pub fn begin(&mut self, lease: LeaseId) {
        self.waited.insert(lease, Waited::default());
    }

    /// It is not waited for any more.
    pub fn end(&mut self, lease: LeaseId) {
        self.waited.remove(&lease);
    }

    /// The authority let the lease expire: an error if less time than its TTL was seen to pass.
    pub fn expired(&mut self, lease: LeaseId) -> Result<(), String> {
        let (ttl, waited) = (self.config.ttl, self.waited.remove(&lease).unwrap_or_default());
        match waited.most >= ttl {
            true => Ok(()),
            false => Err(format!("lease {lease} expired after {} ms of {ttl}", waited.most)),
        }
    }

    /// It is live after a tick.
    pub fn still_live(&self, lease: LeaseId) -> Result<(), String> {
        match self.waited.get(&lease) {
            Some(waited) if waited.least > self.config.ttl => {
                Err(format!("lease {lease} lives on, {} ms unrenewed", waited.least))
            }
            _ => Ok(()),
        }
    }
}
