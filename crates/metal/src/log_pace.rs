//! How often a line is logged about what a borrower may do as fast as it likes (pure).

use std::time::{Duration, Instant};

/// Between two lines at least.
const INTERVAL: Duration = Duration::from_secs(1);

/// The lines about one thing: the first, and one a second at most after it.
#[derive(Debug, Default)]
pub(crate) struct LogPace {
    /// When the last line was logged.
    last: Option<Instant>,
    left_out: u64,
}

impl LogPace {
    /// Whether a line is logged of what happens `now`, and how many were left out before it.
    pub fn line(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_says_how_many_were_left_out() {
        let mut pace = LogPace::default();
        let begun = Instant::now();
        let mut at = |ms| pace.line(begun + Duration::from_millis(ms));
        assert_eq!(at(0), Some(0));
        assert_eq!(at(1), None);
        assert_eq!(at(999), None);
        assert_eq!(at(1000), Some(2));
        assert_eq!(at(1999), None);
        assert_eq!(at(5000), Some(1));
        assert_eq!(at(6000), Some(0));
    }
}
