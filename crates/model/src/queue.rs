//! The pending events of a simulation, in the order in which they happen.
//!
//! [`EventQueue`] is a radix heap with 64 buckets a digit (equally: a timing wheel of eleven levels
//! that spans all of [`Time`]). It rests on one property of simulations: nothing is scheduled
//! before the present. An event's bucket is given by the highest base-64 digit in which its time
//! differs from the present, and by that digit's value. Events of one bucket keep the order in
//! which they were scheduled, and equal times always share a bucket, so ties need no sequence
//! number. When the present reaches a bucket, its events move to buckets of lower digits; a bucket
//! of the lowest digit holds one single time and is a plain queue.
//!
//! Why this one: in the hold model (every event schedules itself again after a random delay) it
//! ran 1.1 to 1.3 times as fast as the standard library's `BinaryHeap` with 16 pending events, 1.7
//! to 2.4 times with 1024, 2.7 to 3.7 times with 65536, and up to eight times when many events
//! carry the same time. A 4-ary heap of 128-bit keys gained 1.2 to 1.9 at any size, and nothing
//! from equal times. A calendar queue guesses a bucket width, which delays from 1 ns to 100 us in
//! one run defeat; digits need no width. Narrower digits move an event more often. Linked single
//! events missed the cache; a vector for each bucket was a little faster still, but kept the memory
//! of each bucket's fullest moment. Hence lists of chunks, eight events each, in one arena: its
//! size is linear in the most events that were ever pending at once.

use std::fmt;

use crate::time::Time;

/// Bits of a digit: a level's buckets are the bits of one word.
const DIGIT_BITS: u32 = 6;
/// Buckets of a level.
const DIGITS: usize = 1 << DIGIT_BITS;
/// Digits of a time.
const LEVELS: usize = u64::BITS.div_ceil(DIGIT_BITS) as usize;
/// Events of a chunk.
const CHUNK: usize = 8;
/// In place of a chunk: the end of a list.
const NONE: u32 = u32::MAX;

/// Events that have yet to happen. The earliest comes out first; of the same time, the one that
/// was scheduled first. The time that an event takes is bounded, whatever else is pending: it moves
/// at most once per digit of its time.
#[derive(Clone)]
pub struct EventQueue<E> {
    /// The time last popped; no pending event is earlier.
    now: Time,
    len: usize,
    /// Bit n: level n has events.
    levels: u32,
    /// For each level, bit n: bucket n has events.
    occupied: [u64; LEVELS],
    /// Level after level. What an unoccupied one says means nothing.
    buckets: Vec<Bucket>,
    chunks: Chunks<E>,
}

/// A list of events in the order in which they were scheduled. Never empty while it is occupied.
#[derive(Clone, Copy, Default)]
struct Bucket {
    /// The earliest time of its events.
    earliest: Time,
    first: Place,
    last: Place,
}

/// Where an event is in the arena: its chunk's number times [`CHUNK`], plus its own in the chunk.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Place(u32);

impl Place {
    const fn start_of(chunk: u32) -> Place {
        Place(chunk * CHUNK as u32)
    }

    const fn chunk(self) -> usize {
        self.0 as usize / CHUNK
    }

    const fn slot(self) -> usize {
        self.0 as usize % CHUNK
    }

    const fn is_end_of_chunk(self) -> bool {
        self.slot() == CHUNK - 1
    }
}

impl<E: Copy> EventQueue<E> {
    /// A queue without events, at [`Time::ZERO`].
    pub fn new() -> EventQueue<E> {
        EventQueue {
            now: Time::ZERO,
            len: 0,
            levels: 0,
            occupied: [0; LEVELS],
            buckets: vec![Bucket::default(); LEVELS * DIGITS],
            chunks: Chunks { events: Vec::new(), next: Vec::new(), free: NONE },
        }
    }

    /// How many events are pending.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is pending.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The time of the event that [`EventQueue::pop`] would return.
    pub fn peek_time(&self) -> Option<Time> {
        let (level, digit) = self.first_bucket()?;
        Some(self.buckets[level * DIGITS + digit].earliest)
    }

    /// Lets `event` happen at `at`, after all that is already scheduled for that time.
    ///
    /// `at` must not be before the time last popped. Debug builds panic when it is; others let the
    /// event happen at the time last popped.
    #[inline]
    pub fn schedule(&mut self, at: Time, event: E) {
        debug_assert!(at >= self.now, "an event at {at} is scheduled late, at {}", self.now);
        self.len += 1;
        self.insert(at.max(self.now), event);
    }

    /// Bytes of memory that it holds.
    pub fn memory(&self) -> usize {
        let chunk = size_of::<[(Time, E); CHUNK]>();
        self.buckets.capacity() * size_of::<Bucket>()
            + self.chunks.events.capacity() * chunk
            + self.chunks.next.capacity() * size_of::<u32>()
    }

    /// Takes the next event out, and makes its time the present.
    #[inline]
    pub fn pop(&mut self) -> Option<(Time, E)> {
        let (level, digit) = self.first_bucket()?;
        self.len -= 1;
        let bucket = &mut self.buckets[level * DIGITS + digit];
        let Bucket { earliest, first, last } = *bucket;
        self.now = earliest;
        if first != last && level == 0 {
            let popped = self.chunks.get(first);
            bucket.first = self.chunks.after(first);
            return Some(popped);
        }
        self.occupied[level] &= !(1 << digit);
        if self.occupied[level] == 0 {
            self.levels &= !(1 << level);
        }
        if first != last {
            return Some(self.spread(earliest, first, last));
        }
        let popped = self.chunks.get(first);
        self.chunks.release(first);
        Some(popped)
    }

    /// The level and the digit of the bucket that has the earliest event.
    #[inline]
    fn first_bucket(&self) -> Option<(usize, usize)> {
        if self.levels == 0 {
            return None;
        }
        let level = self.levels.trailing_zeros() as usize;
        Some((level, self.occupied[level].trailing_zeros() as usize))
    }

    /// Moves the events from `first` to `last`, whose bucket the present has reached, to buckets of
    /// lower digits, all but the first one at `earliest`: that is returned.
    fn spread(&mut self, earliest: Time, first: Place, last: Place) -> (Time, E) {
        let mut popped = None;
        let mut place = first;
        loop {
            let (at, event) = self.chunks.get(place);
            if popped.is_none() && at == earliest {
                popped = Some((at, event));
            } else {
                self.insert(at, event);
            }
            if place == last {
                self.chunks.release(place);
                break;
            }
            place = self.chunks.after(place);
        }
        popped.expect("a bucket's earliest time is the time of one of its events")
    }

    /// Appends an event to the bucket for its time.
    #[inline]
    fn insert(&mut self, at: Time, event: E) {
        let differs = at.ps() ^ self.now.ps();
        let level = (differs | 1).ilog2() / DIGIT_BITS;
        let digit = (at.ps() >> (level * DIGIT_BITS)) as usize % DIGITS;
        let level = level as usize;
        let bucket = &mut self.buckets[level * DIGITS + digit];
        if self.occupied[level] & (1 << digit) == 0 {
            self.occupied[level] |= 1 << digit;
            self.levels |= 1 << level;
            let place = self.chunks.start((at, event));
            *bucket = Bucket { earliest: at, first: place, last: place };
        } else {
            bucket.last = self.chunks.append(bucket.last, (at, event));
            bucket.earliest = bucket.earliest.min(at);
        }
    }
}

impl<E: Copy> Default for EventQueue<E> {
    fn default() -> EventQueue<E> {
        EventQueue::new()
    }
}

impl<E> fmt::Debug for EventQueue<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventQueue").field("now", &self.now).field("len", &self.len).finish()
    }
}

/// The arena: chunks of events, each in one list or free.
#[derive(Clone)]
struct Chunks<E> {
    events: Vec<[(Time, E); CHUNK]>,
    /// The chunk after each in its list.
    next: Vec<u32>,
    /// The first chunk that is free.
    free: u32,
}

impl<E: Copy> Chunks<E> {
    #[inline]
    fn get(&self, place: Place) -> (Time, E) {
        self.events[place.chunk()][place.slot()]
    }

    /// The place after `place`, which is not the last of its list. A chunk that is passed becomes
    /// free.
    #[inline]
    fn after(&mut self, place: Place) -> Place {
        if !place.is_end_of_chunk() {
            return Place(place.0 + 1);
        }
        let next = self.next[place.chunk()];
        self.release(place);
        Place::start_of(next)
    }

    #[inline]
    fn start(&mut self, event: (Time, E)) -> Place {
        if self.free == NONE {
            return self.grow(event);
        }
        let place = Place::start_of(self.free);
        self.free = self.next[place.chunk()];
        self.events[place.chunk()][0] = event;
        place
    }

    /// Begins a list when nothing is free. The rest of the chunk holds copies, for want of anything
    /// else of type `E`.
    #[cold]
    fn grow(&mut self, event: (Time, E)) -> Place {
        let chunk = self.events.len();
        assert!(chunk < NONE as usize / CHUNK, "the arena is full: fewer events must be pending");
        self.events.push([event; CHUNK]);
        self.next.push(NONE);
        Place::start_of(chunk as u32)
    }

    /// Continues the list that ends at `last`.
    #[inline]
    fn append(&mut self, last: Place, event: (Time, E)) -> Place {
        if last.is_end_of_chunk() {
            let place = self.start(event);
            self.next[last.chunk()] = place.chunk() as u32;
            return place;
        }
        let place = Place(last.0 + 1);
        self.events[place.chunk()][place.slot()] = event;
        place
    }

    /// Frees the chunk that `place` is in.
    #[inline]
    fn release(&mut self, place: Place) {
        self.next[place.chunk()] = self.free;
        self.free = place.chunk() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A step of a simulation.
    #[derive(Debug, Clone)]
    enum Step {
        /// Schedules one event this much after the present.
        After(u64),
        /// Schedules as many events for one moment.
        Burst(u64, usize),
        /// Takes as many events out.
        Pop(usize),
    }

    fn delay() -> impl Strategy<Value = u64> {
        prop_oneof![
            Just(0),
            0..4u64,
            (0..8u64).prop_map(|ns| ns * 1_000),
            1_000..100_000_000u64,
            (0..64u32, any::<u64>()).prop_map(|(bits, wide)| wide >> bits),
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => delay().prop_map(Step::After),
            1 => (delay(), 1..40usize).prop_map(|(delay, count)| Step::Burst(delay, count)),
            2 => (1..12usize).prop_map(Step::Pop),
        ]
    }

    /// The queue beside a list that is searched for its first earliest event.
    #[derive(Default)]
    struct Both {
        queue: EventQueue<u64>,
        list: Vec<(Time, u64)>,
        now: Time,
        scheduled: u64,
    }

    impl Both {
        fn schedule(&mut self, delay: u64) {
            let at = Time::from_ps(self.now.ps().saturating_add(delay));
            self.queue.schedule(at, self.scheduled);
            self.list.push((at, self.scheduled));
            self.scheduled += 1;
        }

        fn pop(&mut self) -> Result<bool, TestCaseError> {
            let first = (0..self.list.len()).min_by_key(|&n| self.list[n]);
            let expected = first.map(|n| self.list.remove(n));
            prop_assert_eq!(self.queue.peek_time(), expected.map(|(at, _)| at));
            prop_assert_eq!(self.queue.pop(), expected);
            prop_assert_eq!(self.queue.len(), self.list.len());
            prop_assert_eq!(self.queue.is_empty(), self.list.is_empty());
            self.now = expected.map_or(self.now, |(at, _)| at);
            Ok(expected.is_some())
        }
    }

    proptest! {
        #[test]
        fn events_come_in_order_of_time_then_of_scheduling(
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let mut both = Both::default();
            for step in steps {
                match step {
                    Step::After(delay) => both.schedule(delay),
                    Step::Burst(delay, count) => (0..count).for_each(|_| both.schedule(delay)),
                    Step::Pop(count) => for _ in 0..count {
                        both.pop()?;
                    },
                }
                let earliest = both.list.iter().map(|&(at, _)| at).min();
                prop_assert_eq!(both.queue.peek_time(), earliest);
            }
            while both.pop()? {}
        }
    }

    #[test]
    fn memory_is_linear_in_the_pending_events() {
        let pending = 10_000;
        let mut queue = EventQueue::new();
        for n in 0..pending {
            queue.schedule(Time::from_ns(n), n);
        }
        // Long enough to visit buckets of six levels, at times crowded: every 64th delay is none.
        for step in 0..1_000_000 {
            let (now, event) = queue.pop().unwrap();
            let delay = if step % 64 == 0 { 0 } else { step * 7_990_271 % 90_000_000 };
            queue.schedule(now + Time::from_ps(delay), event);
        }
        let most = pending as usize / CHUNK + LEVELS * DIGITS;
        let chunks = queue.chunks.events.len();
        assert!(chunks <= most, "{chunks} chunks for {pending} events, not {most} at most");
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "scheduled late"))]
    fn a_late_event_is_a_bug_and_happens_at_once() {
        let mut queue = EventQueue::new();
        queue.schedule(Time::from_ns(2), 'a');
        queue.schedule(Time::from_ns(3), 'c');
        queue.pop();
        queue.schedule(Time::from_ns(1), 'b');
        assert_eq!(queue.pop(), Some((Time::from_ns(2), 'b')));
        assert_eq!(queue.pop(), Some((Time::from_ns(3), 'c')));
    }
}
