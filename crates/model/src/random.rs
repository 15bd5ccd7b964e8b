//! Random numbers of a seed: SplitMix64 (Steele, Lea and Flood, 2014). Small, fast, and the same
//! everywhere.

use crate::time::Time;

/// A sequence of random numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
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
        // In (0, 1]: its logarithm is finite.
        let uniform = ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        Time::from_ps((-uniform.ln() * mean.ps() as f64).round() as u64)
    }
}
