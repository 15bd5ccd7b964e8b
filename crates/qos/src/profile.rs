//! What operations of an engine cost, by the size of a message and the ratio of output to input.
//!
//! Measured at a few sizes and ratios, asked for any: cost between sizes is taken as a line (an
//! operation has a fixed part and one for each byte, which changes where a cache ends), and so is cost
//! between ratios. Throughput, which is what people look at, is not linear in either (seed paper,
//! observations 1 and 2, figure 2).

use serde::{Deserialize, Serialize};

use crate::SECOND;

/// What a message of one size costs an engine, as it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Bytes that went in.
    pub message: u64,
    /// Bytes that came out, in thousandths of those that went in.
    pub ratio: u32,
    /// Engine time of one operation, in nanoseconds.
    pub cost_ns: f64,
}

/// Costs of one engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Point>", into = "Vec<Point>")]
pub struct EngineProfile {
    /// By ratio; each has its sizes, ascending, with costs that never decrease.
    rows: Vec<Row>,
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    ratio: u32,
    costs: Vec<(u64, f64)>,
}

/// Why points are no profile.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// The profile has no points.
    #[error("the profile has no points")]
    Empty,
    /// A cost that is not above zero and below a second.
    #[error("the profile's point for {message} bytes has a cost of {cost_ns} ns")]
    Point {
        /// Size of the message in bytes.
        message: u64,
        /// The cost in nanoseconds.
        cost_ns: f64,
    },
}

impl EngineProfile {
    /// A profile of measured points, in any order. Of two for the same size and ratio the dearer
    /// counts. A cost below that of a smaller message is noise of the measurement, and is raised.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn new(mut points: Vec<Point>) -> Result<EngineProfile, ProfileError> {
        let bad = |point: &&Point| !(point.cost_ns > 0.0 && point.cost_ns < SECOND as f64);
        if let Some(Point { message, cost_ns, .. }) = points.iter().find(bad).copied() {
            return Err(ProfileError::Point { message, cost_ns });
        }
        points.sort_by_key(|point| (point.ratio, point.message));
        let mut rows: Vec<Row> = Vec::new();
        for Point { message, ratio, cost_ns } in points {
            if rows.last().is_none_or(|row| row.ratio != ratio) {
                rows.push(Row { ratio, costs: Vec::new() });
            }
            let Some(Row { costs, .. }) = rows.last_mut() else { continue };
            let cost = costs.last().map_or(cost_ns, |(_, before)| cost_ns.max(*before));
            match costs.last_mut() {
                Some((last, before)) if *last == message => *before = cost,
                _ => costs.push((message, cost)),
            }
        }
        if rows.is_empty() { Err(ProfileError::Empty) } else { Ok(EngineProfile { rows }) }
    }

    /// Engine time of one operation on `message` bytes with `ratio` thousandths as much output, in
    /// nanoseconds.
    pub fn cost_ns(&self, message: u64, ratio: u32) -> f64 {
        let above = self.rows.partition_point(|row| row.ratio < ratio);
        let above = above.min(self.rows.len() - 1);
        let (low, high) = (&self.rows[above.saturating_sub(1)], &self.rows[above]);
        let cost = high.cost_ns(message);
        if ratio >= high.ratio || high.ratio == low.ratio || ratio <= low.ratio {
            return if ratio <= low.ratio { low.cost_ns(message) } else { cost };
        }
        let part = f64::from(ratio - low.ratio) / f64::from(high.ratio - low.ratio);
        low.cost_ns(message) * (1.0 - part) + cost * part
    }

    /// What an operation of that kind costs at most, whatever the content.
    pub fn worst_ns(&self, message: u64) -> f64 {
        self.rows.iter().map(|row| row.cost_ns(message)).fold(0.0, f64::max)
    }

    /// Bytes into one engine each second, with messages of that kind.
    pub fn bytes_per_second(&self, message: u64, ratio: u32) -> f64 {
        message as f64 * SECOND as f64 / self.cost_ns(message, ratio)
    }

    /// The points that it was made of, as far as they count.
    pub fn points(&self) -> Vec<Point> {
        let row = |row: &Row| {
            let ratio = row.ratio;
            let point = |(message, cost_ns)| Point { message, ratio, cost_ns };
            row.costs.clone().into_iter().map(point).collect::<Vec<_>>()
        };
        self.rows.iter().flat_map(row).collect()
    }
}

impl Row {
    fn cost_ns(&self, message: u64) -> f64 {
        let (first, last) = (self.costs[0], self.costs[self.costs.len() - 1]);
        if self.costs.len() == 1 {
            // One point says nothing of a fixed part.
            return first.1 * (message as f64 / first.0.max(1) as f64).max(1.0);
        }
        // Beyond the ends, the first and the last line continue.
        let at = self.costs.partition_point(|(size, _)| *size < message);
        let at = at.clamp(1, self.costs.len() - 1);
        let ((left, low), (right, high)) = (self.costs[at - 1], self.costs[at]);
        let slope = (high - low) / (right - left) as f64;
        let cost = low + (message as f64 - left as f64) * slope;
        let floor = if message > last.0 { last.1 } else { first.1 * 0.1 };
        cost.max(floor)
    }
}

impl TryFrom<Vec<Point>> for EngineProfile {
    type Error = ProfileError;

    fn try_from(points: Vec<Point>) -> Result<EngineProfile, ProfileError> {
        EngineProfile::new(points)
    }
}

impl From<EngineProfile> for Vec<Point> {
    fn from(profile: EngineProfile) -> Vec<Point> {
        profile.points()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn point(message: u64, ratio: u32, cost_ns: f64) -> Point {
        Point { message, ratio, cost_ns }
    }

    proptest! {
        /// An engine with a fixed part and one for each byte is known exactly at every size and ratio
        /// after measuring a few.
        #[test]
        fn a_linear_engine_is_known_everywhere(
            fixed in 1.0f64..1000.0, byte in 0.01f64..20.0, out in 0.01f64..20.0,
            message in 1u64..1_000_000, ratio in 0u32..4000,
        ) {
            let cost = |message: u64, ratio: u32| {
                fixed + message as f64 * (byte + out * f64::from(ratio) / 1000.0)
            };
            let points = [64, 4096, 65_536].into_iter().flat_map(|message| {
                [0, 1000, 4000].map(|ratio| point(message, ratio, cost(message, ratio)))
            });
            let profile = EngineProfile::new(points.collect()).unwrap();
            let (asked, expected) = (profile.cost_ns(message, ratio), cost(message, ratio));
            prop_assert!((asked / expected - 1.0).abs() < 1e-6, "{asked} is not {expected}");
            prop_assert!(profile.worst_ns(message) >= asked * 0.999_999);
        }

        /// Whatever was measured, more bytes never cost less.
        #[test]
        fn cost_grows_with_size(
            points in prop::collection::vec((1u64..100_000, 0u32..3, 1.0f64..1e6), 1..20),
            a in 1u64..200_000, b in 1u64..200_000, ratio in 0u32..3,
        ) {
            let points = points.into_iter().map(|(message, ratio, cost)| point(message, ratio, cost));
            let profile = EngineProfile::new(points.collect()).unwrap();
            let (small, large) = (profile.cost_ns(a.min(b), ratio), profile.cost_ns(a.max(b), ratio));
            prop_assert!(small > 0.0 && small <= large * (1.0 + 1e-9), "{small} {large}");
        }
    }

    #[test]
    fn points_that_cannot_be_are_refused() {
        assert_eq!(EngineProfile::new(Vec::new()), Err(ProfileError::Empty));
        for cost in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(
                EngineProfile::new(vec![point(64, 0, cost)]),
                Err(ProfileError::Point { .. })
            ));
        }
        assert!(serde_json::from_str::<EngineProfile>("[]").is_err());
    }

    #[test]
    fn beyond_the_measured_ratios_the_nearest_counts() {
        let points = vec![point(64, 100, 10.0), point(128, 100, 20.0), point(64, 200, 30.0)];
        let profile = EngineProfile::new(points.clone()).unwrap();
        assert_eq!((profile.cost_ns(64, 0), profile.cost_ns(64, 900)), (10.0, 30.0));
        assert_eq!((profile.cost_ns(64, 150), profile.worst_ns(64)), (20.0, 30.0));
        let json = serde_json::to_string(&profile).unwrap();
        assert_eq!(serde_json::from_str::<EngineProfile>(&json).unwrap(), profile);
    }
}
