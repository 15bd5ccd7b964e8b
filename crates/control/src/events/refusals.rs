//! Which refusals are events, where somebody is refused again and again.

use std::collections::BTreeMap;

use super::Draft;

/// How long refusals that are alike are only counted after each that is an event; the last time from then on. After
/// such a time without any, it begins anew.
const REFUSALS_EVERY_MS: [u64; 4] = [1000, 10_000, 60_000, 600_000];
/// The longest of these.
const QUIET_MS: u64 = 600_000;
/// Refusals that are told apart at most.
const MOST_REFUSALS: usize = 1000;

/// Keeps somebody who is refused again and again from filling the log.
#[derive(Debug, Clone, Default)]
pub struct RefusalLimiter {
    /// By what is alike.
    said: BTreeMap<String, RefusalHistory>,
}

/// What was said of refusals that are alike.
#[derive(Debug, Clone, Default)]
struct RefusalHistory {
    /// Until when they are only counted.
    silent_until: u64,
    /// When the last one was, said or not.
    last: u64,
    /// How many were said without a quiet time between.
    times: usize,
    /// How many were not said since the last that was.
    left_out: u64,
}

impl RefusalLimiter {
    /// The event of a `refusal` at `now`; nothing when one that is `alike` was said a moment ago.
    pub fn refused(&mut self, now: u64, alike: &str, refusal: Draft) -> Option<Draft> {
        if !self.said.contains_key(alike) && self.said.len() >= MOST_REFUSALS {
            self.said.retain(|_, told| now < told.silent_until);
            if self.said.len() >= MOST_REFUSALS {
                return None;
            }
        }
        let told = self.said.entry(alike.to_owned()).or_default();
        let last = std::mem::replace(&mut told.last, now);
        if now < told.silent_until {
            told.left_out += 1;
            return None;
        }
        if now >= last.saturating_add(QUIET_MS) {
            told.times = 0;
        }
        let wait = REFUSALS_EVERY_MS.get(told.times).copied().unwrap_or(QUIET_MS);
        told.times = (told.times + 1).min(REFUSALS_EVERY_MS.len());
        told.silent_until = now.saturating_add(wait);
        Some(match std::mem::take(&mut told.left_out) {
            0 => refusal,
            count => {
                let text = format!("{} ({count} more times since the last)", refusal.text);
                Draft { text, ..refusal }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::EventKind;

    #[test]
    fn what_is_remembered_of_refusals_is_bounded() {
        let mut refusals = RefusalLimiter::default();
        for number in 0..2 * MOST_REFUSALS {
            let refusal = Draft::of_host(EventKind::Refusal, None, "no".to_owned());
            refusals.refused(70_000, &number.to_string(), refusal);
        }
        assert!(refusals.said.len() <= MOST_REFUSALS);
    }
}
