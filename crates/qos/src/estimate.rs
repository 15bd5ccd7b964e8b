//! What a tenant's operations will cost: the profile's answer, corrected by what its last ones did.
//!
//! The content of a message is unknown when it is handed to an engine, but a tenant's messages are
//! alike for a while. The correction follows at once where they become dearer, so that nobody's turn
//! is too long, and only when it has lasted where they become cheaper (hysteresis).

/// Windows in a row that must agree before the correction becomes smaller.
const WINDOWS: u32 = 2;
/// Engine time that a window covers, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000;
/// A change of less than this part is none.
const BAND: f64 = 0.1;
/// How far the correction goes: sixteen times either way (deflate's costs differ by fifteen).
const FARTHEST: f64 = 16.0;

/// The part of a change to less output that is followed at once.
const OUTPUT_FOLLOWS: f64 = 0.25;

/// The correction for one tenant and engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    factor: f64,
    expected_ns: f64,
    measured_ns: u64,
    /// Windows in a row whose costs were below the band.
    below: u32,
    changes: u64,
}

impl Default for Estimate {
    fn default() -> Estimate {
        Estimate { factor: 1.0, expected_ns: 0.0, measured_ns: 0, below: 0, changes: 0 }
    }
}

impl Estimate {
    /// What to multiply the profile's cost by.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// How often the factor was changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Work that costs `profile_ns` by the profile has taken `measured_ns`. True when the factor is
    /// another one now.
    pub fn observe(&mut self, profile_ns: f64, measured_ns: u64) -> bool {
        self.expected_ns += profile_ns;
        self.measured_ns = self.measured_ns.saturating_add(measured_ns);
        let ratio = self.measured_ns as f64 / self.expected_ns.max(1.0);
        let ratio = ratio.clamp(1.0 / FARTHEST, FARTHEST);
        let dearer = ratio > self.factor * (1.0 + BAND);
        let whole = self.measured_ns >= WINDOW_NS;
        // A tenth of a window says enough when it says that turns are too long.
        if !(whole || dearer && self.measured_ns >= WINDOW_NS / 10) {
            return false;
        }
        (self.expected_ns, self.measured_ns) = (0.0, 0);
        self.below = if ratio < self.factor * (1.0 - BAND) { self.below + 1 } else { 0 };
        let changed = dearer || self.below >= WINDOWS;
        if changed {
            (self.factor, self.below) = (ratio, 0);
            self.changes += 1;
        }
        changed
    }
}

/// What part of the room that they have for output a tenant's operations fill: that is known, and says little of what
/// comes out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputEstimate {
    part: f64,
}

impl Default for OutputEstimate {
    fn default() -> OutputEstimate {
        OutputEstimate { part: 1.0 }
    }
}

impl OutputEstimate {
    /// Bytes that come out where there is room for so many.
    pub fn of(&self, room: u64) -> u64 {
        (room as f64 * self.part).ceil() as u64
    }

    /// Where there was room for `room` bytes, `came` came out. As with costs, more counts at once.
    pub fn observe(&mut self, room: f64, came: u64) {
        if room > 0.0 {
            let part = (came as f64 / room).clamp(0.0, 1.0);
            let follows = if part > self.part { 1.0 } else { OUTPUT_FOLLOWS };
            self.part += (part - self.part) * follows;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_as_much_of_its_room_as_it_was_and_never_more_than_that() {
        let mut output = OutputEstimate::default();
        assert_eq!(output.of(1 << 20), 1 << 20);
        output.observe(0.0, 0);
        for _ in 0..100 {
            output.observe(f64::from(1 << 20), 64);
        }
        assert_eq!(output.of(1 << 20), 65);
        output.observe(1000.0, 500);
        assert_eq!(output.of(1 << 20), 1 << 19);
        output.observe(1000.0, 5000);
        assert_eq!((output.of(10), output.of(0)), (10, 0));
    }

    #[test]
    fn it_follows_dearer_content_at_once_and_cheaper_when_it_lasts() {
        let mut estimate = Estimate::default();
        assert!(estimate.observe(1e6, 5_000_000));
        assert_eq!(estimate.factor(), 5.0);
        assert!(!estimate.observe(1e7, 10_000_000), "one cheap window changes nothing");
        assert!(!estimate.observe(2e6, 10_000_000), "and a dear one begins anew");
        assert!(!estimate.observe(1e7, 10_000_000));
        assert!(estimate.observe(1e7, 10_000_000));
        assert_eq!((estimate.factor(), estimate.changes()), (1.0, 2));
    }

    #[test]
    fn noise_within_a_tenth_changes_nothing_and_outliers_are_bounded() {
        let mut estimate = Estimate::default();
        for round in 0..100 {
            assert!(!estimate.observe(1e7, 10_000_000 + (round % 3) * 450_000));
        }
        assert!(estimate.observe(0.0, u64::MAX / 2));
        assert_eq!(estimate.factor(), 16.0);
    }
}
