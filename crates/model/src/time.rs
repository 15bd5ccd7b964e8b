//! Time and rates: whole picoseconds, whole bytes per second, so that every run adds up the same.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// A moment, or a span, of simulated time in picoseconds. 64 bits last 213 days.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The beginning, or no time.
    pub const ZERO: Time = Time(0);
    /// Later than every event: the end of a run that ends by itself.
    pub const MAX: Time = Time(u64::MAX);

    /// A time of `ps` picoseconds.
    pub const fn from_ps(ps: u64) -> Time {
        Time(ps)
    }

    /// A time of `ns` nanoseconds.
    pub const fn from_ns(ns: u64) -> Time {
        Time(ns * 1_000)
    }

    /// A time of `us` microseconds.
    pub const fn from_us(us: u64) -> Time {
        Time(us * 1_000_000)
    }

    /// The time in picoseconds, exact.
    pub const fn ps(self) -> u64 {
        self.0
    }

    /// In nanoseconds, for people.
    pub fn ns(self) -> f64 {
        self.0 as f64 / 1e3
    }

    /// In microseconds, for people.
    pub fn us(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// In seconds, for rates.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// The span from `earlier` to this; none when it is not earlier.
    pub const fn since(self, earlier: Time) -> Time {
        Time(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Time {
    type Output = Time;
    fn add(self, other: Time) -> Time {
        Time(self.0 + other.0)
    }
}

impl AddAssign for Time {
    fn add_assign(&mut self, other: Time) {
        self.0 += other.0;
    }
}

impl Sub for Time {
    type Output = Time;
    fn sub(self, other: Time) -> Time {
        Time(self.0 - other.0)
    }
}

impl Mul<u64> for Time {
    type Output = Time;
    fn mul(self, times: u64) -> Time {
        Time(self.0 * times)
    }
}

impl Div<u64> for Time {
    type Output = Time;
    fn div(self, parts: u64) -> Time {
        Time(self.0 / parts)
    }
}

impl Sum for Time {
    fn sum<I: Iterator<Item = Time>>(spans: I) -> Time {
        spans.fold(Time::ZERO, Add::add)
    }
}

impl fmt::Display for Time {
    /// In the largest unit that leaves a whole part: `850 ps`, `1.250 us`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..1_000 => write!(f, "{} ps", self.0),
            1_000..1_000_000 => write!(f, "{:.1} ns", self.ns()),
            1_000_000..1_000_000_000 => write!(f, "{:.3} us", self.us()),
            _ => write!(f, "{:.3} ms", self.us() / 1e3),
        }
    }
}
