//! What is counted: distributions of spans, and what flows got done.

use crate::time::Time;

/// Steps of a distribution within each doubling: values are kept to 1/64, about 1.6 %.
const STEPS: u32 = 64;

/// A distribution of spans. Sum, least and greatest are exact, quantiles to 1.6 %.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum: u128,
    least: Option<Time>,
    greatest: Time,
}

impl Histogram {
    /// Counts a span: exactly in sum, least and greatest, to 1/64 in the distribution.
    pub fn add(&mut self, span: Time) {
        let place = place(span.ps());
        if self.counts.len() <= place {
            self.counts.resize(place + 1, 0);
        }
        self.counts[place] += 1;
        self.count += 1;
        self.sum += u128::from(span.ps());
        self.least = Some(self.least.map_or(span, |least| least.min(span)));
        self.greatest = self.greatest.max(span);
    }

    /// Adds all spans of another.
    pub fn merge(&mut self, other: &Histogram) {
        let places = self.counts.len().max(other.counts.len());
        self.counts.resize(places, 0);
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.least = self.least.into_iter().chain(other.least).min();
        self.greatest = self.greatest.max(other.greatest);
    }

    /// How many spans there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean, zero when there is none.
    pub fn mean(&self) -> Time {
        let mean = self.sum.checked_div(u128::from(self.count)).unwrap_or(0);
        Time::from_ps(mean as u64)
    }

    /// The least, zero when there is none.
    pub fn least(&self) -> Time {
        self.least.unwrap_or(Time::ZERO)
    }

    /// The greatest span, zero when there is none.
    pub fn greatest(&self) -> Time {
        self.greatest
    }

    /// The span that a share of all, from 0 to 1, does not exceed.
    pub fn quantile(&self, share: f64) -> Time {
        let rank = ((share * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (place, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Time::from_ps(value(place)).clamp(self.least(), self.greatest);
            }
        }
        self.greatest
    }

    /// The distribution: spans, and the share of all that does not exceed each.
    pub fn cumulative(&self) -> Vec<(Time, f64)> {
        let mut seen = 0;
        let mut points = Vec::new();
        for (place, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            seen += count;
            let span = Time::from_ps(value(place)).clamp(self.least(), self.greatest);
            points.push((span, seen as f64 / self.count as f64));
        }
        points
    }
}

/// Where a value is counted.
fn place(value: u64) -> usize {
    let steps = u64::from(STEPS);
    if value < steps {
        return value as usize;
    }
    let octave = value.ilog2() - STEPS.ilog2();
    (u64::from(octave) * steps + (value >> octave)) as usize
}

/// The middle of the values that are counted there.
fn value(place: usize) -> u64 {
    let steps = u64::from(STEPS);
    let place = place as u64;
    if place < 2 * steps {
        return place;
    }
    let octave = place / steps - 1;
    let low = (place - octave * steps) << octave;
    low + (1 << octave) / 2
}

/// Parts of the measured time for each of which bytes are counted.
pub const BATCHES: usize = 20;

/// Student's factor for a confidence of 95 % in the mean of [`BATCHES`] values.
const STUDENT: f64 = 2.093;

/// Bytes that moved in each part of the measured time.
pub type Batches = [u64; BATCHES];

/// How far the mean of batches may be from the true one with a confidence of 95 %, as a share of it. Batches
/// are taken as independent: each must be long against what lets rates vary.
pub fn confidence(batches: &Batches) -> f64 {
    let count = BATCHES as f64;
    let mean = batches.iter().map(|bytes| *bytes as f64).sum::<f64>() / count;
    let squares = batches.iter().map(|bytes| (*bytes as f64 - mean).powi(2)).sum::<f64>();
    let deviation = (squares / (count - 1.0)).sqrt();
    if mean == 0.0 { f64::INFINITY } else { STUDENT * deviation / count.sqrt() / mean }
}

/// What a flow got done in the measured time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlowStats {
    /// Jobs that began in the measured time.
    pub begun: u64,
    /// Jobs that ended in the measured time, those that began before it included.
    pub jobs: u64,
    /// Bytes that came where they should, of all steps.
    pub moved: u64,
    /// The same, by parts of the measured time.
    pub batches: Batches,
    /// Bytes that a job counts for, and those that all its steps move; of a trace, those of all jobs that began.
    pub of_job: (u64, u64),
    /// How long each took.
    pub latency: Histogram,
    /// By mark: how long after a job's beginning it was reached, summed.
    pub marks: Vec<Time>,
    /// When the last job ended.
    pub ended: Time,
}

impl FlowStats {
    /// Bytes that the flow got done, of jobs that had not ended too: as much of what a job counts for as its
    /// steps have moved.
    pub fn bytes(&self) -> u64 {
        match self.of_job {
            (bytes, 0) => self.jobs * bytes,
            (bytes, all) => (u128::from(self.moved) * u128::from(bytes) / u128::from(all)) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn places_keep_values_to_their_precision(number in 0u64..u64::MAX / 2) {
            let kept = value(place(number));
            let off = kept.abs_diff(number) as f64;
            prop_assert!(off <= number as f64 / 64.0, "{number} is kept as {kept}");
            prop_assert!(place(number) <= place(number + 1));
        }

        #[test]
        fn quantiles_are_those_of_the_sorted_values(mut spans in prop::collection::vec(1u64..1_000_000_000, 1..200), share in 0.0f64..=1.0) {
            let mut histogram = Histogram::default();
            spans.iter().for_each(|span| histogram.add(Time::from_ps(*span)));
            spans.sort_unstable();
            let rank = ((share * spans.len() as f64).ceil() as usize).max(1);
            let exact = spans[rank - 1] as f64;
            let ours = histogram.quantile(share).ps() as f64;
            prop_assert!((ours - exact).abs() <= exact / 32.0 + 1.0, "{ours} for {exact}");
        }
    }
}
