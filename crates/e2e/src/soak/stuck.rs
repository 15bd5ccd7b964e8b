//! How long leases are on their way: nobody can use them, and nobody else can have their function.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::{RackProcesses, Result, ensure};

/// Since when leases have been seen on their way.
#[derive(Debug)]
pub struct LeasesUnderWay {
    /// The longest that a lease may be armed, opened or closed.
    limit: Duration,
    since: BTreeMap<(u64, String), Instant>,
    longest: Duration,
    /// Leases on their way, each as often as it was seen.
    seen: u64,
}

impl LeasesUnderWay {
    /// None may be on its way for longer than `limit`.
    #[must_use]
    pub fn new(limit: Duration) -> LeasesUnderWay {
        LeasesUnderWay { limit, since: BTreeMap::new(), longest: Duration::ZERO, seen: 0 }
    }

    /// Looks at all leases. The time for which it is waited in vain for an answer does not count: nobody could end them.
    ///
    /// # Errors
    /// When one has been in the same stage for too long.
    pub fn look(&mut self, rack: &RackProcesses) -> Result<()> {
        let asked = Instant::now();
        let answer = rack.json(&["leases"]);
        let now = Instant::now();
        let Ok(leases) = answer else {
            self.since.values_mut().for_each(|since| *since += now.duration_since(asked));
            return Ok(());
        };
        let mut seen = BTreeMap::new();
        for lease in leases.as_array().into_iter().flatten() {
            let stage = lease["stage"].as_str().unwrap_or_default().to_owned();
            if stage == "active" {
                continue;
            }
            let key = (lease["lease"].as_u64().unwrap_or(0), stage);
            self.seen += 1;
            let since = self.since.get(&key).copied().unwrap_or(now);
            let time = now.duration_since(since);
            self.longest = self.longest.max(time);
            ensure!(time <= self.limit, "for {} s there is no progress of {lease}", time.as_secs());
            seen.insert(key, since);
        }
        self.since = seen;
        Ok(())
    }

    /// The longest time that was seen, for people.
    pub fn describe(&self) -> String {
        let (seen, longest) = (self.seen, self.longest.as_secs_f64());
        format!("leases seen {seen} times under way, none for longer than {longest:.1} s")
    }
}
