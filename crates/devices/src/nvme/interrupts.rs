//! When completions interrupt the host (NVM Express base 1.4, sections 7.5 and 5.21.1.8).
//!
//! One pass over the queues raises a vector at most once, however many completions it posted.
//! With interrupt coalescing, vectors of I/O queues wait for more completions or for a time. Pure:
//! time comes in, vectors to raise go out.

use rackbus_spec::nvme::features::InterruptCoalescing;

/// Interrupt vectors: one for each completion queue.
pub const VECTORS: u16 = 32;

/// The unit of the aggregation time, in nanoseconds.
const TIME_UNIT_NS: u64 = 100_000;

#[derive(Debug, Clone, Copy, Default)]
struct Vector {
    /// Completions since it was raised last.
    completions: u32,
    /// When the first of them was posted.
    since_ns: u64,
    /// Not to be delayed.
    urgent: bool,
}

/// The state of all vectors.
#[derive(Debug, Default)]
pub struct Vectors {
    vectors: [Vector; VECTORS as usize],
    /// Vectors with completions, a bit each.
    waiting: u32,
}

impl Vectors {
    /// A completion was posted to a queue that interrupts with `vector`; `urgent` for the admin
    /// queue's, which are never delayed.
    #[inline]
    pub fn posted(&mut self, vector: u16, now_ns: u64, urgent: bool) {
        let Some(state) = self.vectors.get_mut(usize::from(vector)) else {
            return;
        };
        if state.completions == 0 {
            state.since_ns = now_ns;
        }
        state.completions = state.completions.saturating_add(1);
        state.urgent |= urgent;
        self.waiting |= 1 << vector;
    }

    /// The vectors that wait to be raised, a bit each.
    pub fn waiting(&self) -> u32 {
        self.waiting
    }

    /// Whether any vector waits to be raised.
    #[inline]
    pub fn any_waiting(&self) -> bool {
        self.waiting != 0
    }

    /// Raises the vectors whose time has come; `exempt` has a bit for each vector that is not
    /// coalesced. Returns when to look again, if one still waits.
    pub fn deliver(
        &mut self,
        now_ns: u64,
        coalescing: InterruptCoalescing,
        exempt: u32,
        mut raise: impl FnMut(u16),
    ) -> Option<u64> {
        let delay = u64::from(coalescing.time()) * TIME_UNIT_NS;
        let mut next: Option<u64> = None;
        let mut left = self.waiting;
        while left != 0 {
            let vector = left.trailing_zeros() as u16;
            left &= left - 1;
            let state = &mut self.vectors[usize::from(vector)];
            let due = state.since_ns.saturating_add(delay);
            let delayed = !state.urgent
                && exempt & 1 << vector == 0
                && state.completions <= u32::from(coalescing.thr())
                && now_ns < due;
            if delayed {
                next = Some(next.map_or(due, |at| at.min(due)));
            } else {
                *state = Vector::default();
                self.waiting &= !(1 << vector);
                raise(vector);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raised(vectors: &mut Vectors, now: u64, thr: u8, time: u8, exempt: u32) -> Vec<u16> {
        let mut out = Vec::new();
        let setting = InterruptCoalescing::new().with_thr(thr).with_time(time);
        vectors.deliver(now, setting, exempt, |vector| out.push(vector));
        out
    }

    #[test]
    fn without_coalescing_a_pass_raises_each_vector_once() {
        let mut vectors = Vectors::default();
        for _ in 0..5 {
            vectors.posted(3, 0, false);
        }
        vectors.posted(1, 0, false);
        assert_eq!(raised(&mut vectors, 0, 0, 0, 0), [1, 3]);
        assert!(raised(&mut vectors, 0, 0, 0, 0).is_empty());
    }

    #[test]
    fn the_threshold_is_zero_based() {
        let mut vectors = Vectors::default();
        vectors.posted(2, 0, false);
        vectors.posted(2, 0, false);
        assert!(raised(&mut vectors, 1, 2, 10, 0).is_empty());
        vectors.posted(2, 1, false);
        assert_eq!(raised(&mut vectors, 1, 2, 10, 0), [2]);
    }

    #[test]
    fn the_time_runs_from_the_first_completion() {
        let mut vectors = Vectors::default();
        let setting = InterruptCoalescing::new().with_thr(200).with_time(2);
        vectors.posted(2, 1000, false);
        vectors.posted(2, 9000, false);
        let next = vectors.deliver(9000, setting, 0, |_| panic!("too early"));
        assert_eq!(next, Some(201_000));
        assert!(raised(&mut vectors, 200_999, 200, 2, 0).is_empty());
        assert_eq!(raised(&mut vectors, 201_000, 200, 2, 0), [2]);
    }

    #[test]
    fn admin_and_exempt_vectors_never_wait() {
        let mut vectors = Vectors::default();
        vectors.posted(0, 0, true);
        vectors.posted(4, 0, false);
        vectors.posted(5, 0, false);
        assert_eq!(raised(&mut vectors, 0, 200, 200, 1 << 4), [0, 4]);
    }
}
