//! A token bucket that may be overdrawn: what something costs is known afterwards.

use crate::SECOND;

/// Tokens that come at a rate, up to a depth. Whoever finds one may spend as many as it needs, and waits
/// until the debt is paid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Tokens that come each second.
    rate: u64,
    /// Tokens that are kept at most.
    depth: u64,
    /// Tokens that are there, in parts of a billion, so that no rate is rounded.
    level: i128,
    /// When `level` was so.
    at: u64,
}

impl Bucket {
    /// A full bucket. One without depth has room for a single token.
    pub fn full(rate: u64, depth: u64, now: u64) -> Bucket {
        let depth = depth.max(1);
        Bucket { rate, depth, level: scaled(depth), at: now }
    }

    /// Another rate and depth from now on; what was spent stays spent.
    pub fn change(&mut self, rate: u64, depth: u64, now: u64) {
        self.fill(now);
        (self.rate, self.depth) = (rate, depth.max(1));
        self.level = self.level.min(scaled(self.depth));
    }

    /// Only one token is left from then on, as when somebody has taken all that there was for long.
    pub fn use_up(&mut self, from: u64) {
        self.fill(from);
        self.level = self.level.min(scaled(1));
    }

    /// How many tokens come each second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Whether there is a token now.
    pub fn ready(&mut self, now: u64) -> bool {
        self.fill(now);
        self.level >= scaled(1)
    }

    /// Tokens that there are now: none where it is overdrawn.
    pub fn tokens(&mut self, now: u64) -> u64 {
        self.fill(now);
        u64::try_from(self.level / i128::from(SECOND)).unwrap_or(0)
    }

    /// Takes tokens, more than there are if need be.
    pub fn spend(&mut self, tokens: u64) {
        self.level -= scaled(tokens);
    }

    /// Corrects what was spent as an estimate.
    pub fn settle(&mut self, estimated: u64, actual: u64) {
        self.level = (self.level + scaled(estimated) - scaled(actual)).min(scaled(self.depth));
    }

    /// When there will be a token, if nothing else is spent: `u64::MAX` for never.
    pub fn ready_at(&self) -> u64 {
        if self.level >= scaled(1) {
            return self.at;
        }
        if self.rate == 0 {
            return u64::MAX;
        }
        let rate = i128::from(self.rate);
        let wait = (scaled(1) - self.level + rate - 1) / rate;
        self.at.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    fn fill(&mut self, now: u64) {
        let passed = now.saturating_sub(self.at);
        let came = i128::from(passed) * i128::from(self.rate);
        self.level = (self.level + came).min(scaled(self.depth));
        self.at = self.at.max(now);
    }
}

fn scaled(tokens: u64) -> i128 {
    i128::from(tokens) * i128::from(SECOND)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whoever spends whenever it may gets the rate, whatever its pieces are, and never more than
        /// the rate, the depth and one piece.
        #[test]
        fn the_rate_is_kept(
            rate in 1u64..1_000_000_000,
            depth in 0u64..1_000_000,
            pieces in prop::collection::vec((1u64..100_000, 1u64..100_000), 10..200),
        ) {
            let mut bucket = Bucket::full(rate, depth, 0);
            let (mut now, mut spent) = (0, 0u64);
            let last = pieces.last().unwrap().1;
            for (estimated, actual) in pieces {
                prop_assert!(bucket.ready(now) || bucket.ready_at() > now);
                now = now.max(bucket.ready_at());
                prop_assert!(bucket.ready(now), "it is not ready when it says");
                bucket.spend(estimated);
                bucket.settle(estimated, actual);
                spent += actual;
            }
            let earned = u128::from(now) * u128::from(rate) / u128::from(SECOND);
            let most = earned + u128::from(depth.max(1)) + u128::from(last);
            prop_assert!(u128::from(spent) <= most + 1, "{spent} of {most}");
        }
    }

    #[test]
    fn a_bucket_of_no_rate_is_ready_until_it_is_empty() {
        let mut bucket = Bucket::full(0, 10, 0);
        assert!(bucket.ready(5));
        bucket.spend(10);
        assert!(!bucket.ready(SECOND / 2));
        assert_eq!(bucket.ready_at(), u64::MAX);
        bucket.change(10, 10, SECOND);
        assert!(bucket.ready(2 * SECOND));
    }
}
