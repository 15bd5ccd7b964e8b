//! The confidence interval of a median by order statistics (the sign test turned round): it assumes nothing about how the
//! values are distributed, and one disturbed run moves it by one place at most.

use crate::report::median;

/// What pairs of runs say: the median of their ratios or differences, and the bounds of its interval at 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// Places from either end of the sorted values at which the interval of at least 95 % for the
/// median begins: the largest k with P(Binomial(n, 1/2) < k) <= 2.5 %. `None` for fewer than six.
pub fn places(n: usize) -> Option<usize> {
    // Its logarithm: the chance itself is too small for a number where there are more than a thousand.
    let mut chance = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = 0.0;
    let mut k = 0;
    while sum + chance.exp() <= 0.025 {
        sum += chance.exp();
        chance += ((n - k) as f64 / (k + 1) as f64).ln();
        k += 1;
    }
    k.checked_sub(1)
}

/// The interval of the median of these values; `None` for fewer than six.
pub fn interval(values: &[f64]) -> Option<Interval> {
    let place = places(values.len())?;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[place], sorted[sorted.len() - 1 - place]);
    Some(Interval { median: median(&sorted), low, high })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_begins_where_tables_of_the_sign_test_say() {
        // For n = 15: P(B < 4) = 1.76 %, P(B < 5) = 5.9 %, so the fourth value from either end.
        assert_eq!(places(5), None);
        assert_eq!(places(6), Some(0));
        assert_eq!(places(15), Some(3));
        assert_eq!(places(20), Some(5));
        // By the normal distribution: 2000 / 2 - 1.96 * sqrt(2000) / 2 = 956.2.
        assert_eq!(places(2000), Some(955));
        let values: Vec<f64> = (1..=15).rev().map(f64::from).collect();
        assert_eq!(interval(&values), Some(Interval { median: 8.0, low: 4.0, high: 12.0 }));
    }
}
