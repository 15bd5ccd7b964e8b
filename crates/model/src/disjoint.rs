//! Groups of numbers that are joined by twos (union-find).

/// Numbers from 0 on, each in a group.
#[derive(Debug)]
pub(crate) struct Disjoint {
    above: Vec<usize>,
}

impl Disjoint {
    /// So many numbers, each a group of its own.
    pub(crate) fn new(count: usize) -> Disjoint {
        Disjoint { above: (0..count).collect() }
    }

    /// Makes one group of two numbers' groups.
    pub(crate) fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.first(one), self.first(other));
        self.above[one.max(other)] = one.min(other);
    }

    /// The first number of a number's group.
    pub(crate) fn first(&mut self, mut nth: usize) -> usize {
        while self.above[nth] != nth {
            self.above[nth] = self.above[self.above[nth]];
            nth = self.above[nth];
        }
        nth
    }
}
