//! Random numbers of a seed: SplitMix64 (Steele, Lea and Flood, 2014). Small, fast, and the same
//! everywhere.

use crate::time::Time;

/// A number that two others decide, as if it were random.
pub(crate) fn mix(one: u64, other: u64) -> u64 {
    RandomSequence(one ^ other.wrapping_mul(0xd6e8_feb8_6659_fd93)).bits()
}

/// A sequence of random numbers.
#[derive(Debug, Clone)]
pub struct RandomSequence(u64);

impl RandomSequence {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> RandomSequence {
        RandomSequence(seed)
    }

    /// One of a seed's sequences: different numbers give sequences that have nothing to do with each other.
    pub fn of(seed: u64, sequence: u64) -> RandomSequence {
        RandomSequence(mix(seed, sequence))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of `0..below`; 0 when there is none.
    pub fn below(&mut self, below: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(below)) >> 64) as u64
    }

    /// An exponentially distributed span of this mean: the time between Poisson arrivals.
    pub fn exponential(&mut self, mean: Time) -> Time {
        Time::from_ps((-self.uniform().ln() * mean.ps() as f64).round() as u64)
    }
}

impl RandomSequence {
    /// In (0, 1]: its logarithm is finite.
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// A number of the standard normal distribution (Marsaglia's polar method, 1964).
    fn normal(&mut self) -> f64 {
        loop {
            let [x, y] = [(); 2].map(|()| 2.0 * self.uniform() - 1.0);
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                return x * (-2.0 * square.ln() / square).sqrt();
            }
        }
    }
}

/// How long something takes that does not always take the same: a drive's media, a thought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Distribution {
    /// It does always take the same.
    Fixed(Time),
    /// Exponentially distributed, of this mean.
    Exponential(Time),
    /// Its logarithm is normally distributed: the mean of the spans, and the deviation of the logarithm in
    /// thousandths.
    LogNormal(Time, u32),
    /// As often as measured: spans, of which each stands for those above the one before, with counts.
    Measured(Vec<(Time, u64)>),
}

impl Distribution {
    /// Draws a span, with as many numbers of `random` as its kind takes.
    pub fn draw(&self, random: &mut RandomSequence) -> Time {
        match self {
            Distribution::Fixed(span) => *span,
            Distribution::Exponential(mean) => random.exponential(*mean),
            Distribution::LogNormal(mean, sigma) => {
                let sigma = f64::from(*sigma) / 1e3;
                // The mean of a log-normal distribution is above its median, by this factor.
                let factor = (sigma * random.normal() - sigma * sigma / 2.0).exp();
                Time::from_ps((mean.ps() as f64 * factor).round() as u64)
            }
            Distribution::Measured(counts) => {
                let all: u64 = counts.iter().map(|(_, count)| count).sum();
                let mut rank = random.below(all);
                let mut before = counts.first().map_or(Time::ZERO, |(span, _)| *span);
                for (span, count) in counts {
                    if rank < *count {
                        // Anywhere between two spans, as evenly as the file knows.
                        let width = span.since(before).ps();
                        return before + Time::from_ps(random.below(width + 1));
                    }
                    rank -= count;
                    before = *span;
                }
                before
            }
        }
    }

    /// The mean of what it draws; of a measured one, of spans evenly spread between its entries.
    pub fn mean(&self) -> Time {
        match self {
            Distribution::Fixed(mean)
            | Distribution::Exponential(mean)
            | Distribution::LogNormal(mean, _) => *mean,
            Distribution::Measured(counts) => {
                let all: u128 = counts.iter().map(|(_, count)| u128::from(*count)).sum();
                let mut before = counts.first().map_or(Time::ZERO, |(span, _)| *span);
                let mut sum = 0;
                for (span, count) in counts {
                    sum += u128::from(*count) * u128::from((before + *span).ps() / 2);
                    before = *span;
                }
                Time::from_ps(sum.checked_div(all).unwrap_or(0) as u64)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_has_the_mean_that_is_said_and_is_the_same_each_time() {
        let us = Time::from_us;
        let measured = vec![(us(10), 50), (us(20), 30), (us(100), 20)];
        for (distribution, spread) in [
            (Distribution::Fixed(us(10)), 0.0),
            (Distribution::Exponential(us(10)), 1.0),
            (Distribution::LogNormal(us(10), 500), 0.533),
            (Distribution::Measured(measured), 1.024),
        ] {
            let draw = |seed| {
                let random = &mut RandomSequence::new(seed);
                (0..200_000).map(|_| distribution.draw(random).us()).collect::<Vec<_>>()
            };
            let spans = draw(3);
            assert_eq!(spans, draw(3));
            let mean = spans.iter().sum::<f64>() / spans.len() as f64;
            assert!(
                (mean / distribution.mean().us() - 1.0).abs() < 0.01,
                "{distribution:?}: {mean}"
            );
            let square = spans.iter().map(|span| (span - mean).powi(2)).sum::<f64>();
            let deviation = (square / spans.len() as f64).sqrt() / mean;
            assert!((deviation - spread).abs() < 0.05, "{distribution:?}: {deviation}");
        }
    }
}
