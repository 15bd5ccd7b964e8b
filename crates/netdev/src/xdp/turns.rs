//! Whose frame is taken next, of several queues (pure): each has some in a row, so that one which is never empty leaves
//! the others their turns.

/// Frames of a queue in a row, while others may have some.
const IN_A_ROW: usize = 32;

/// Which of so many queues is next, and how many frames it may still have.
#[derive(Debug)]
pub(super) struct QueueTurns {
    queues: usize,
    queue: usize,
    left: usize,
}

impl QueueTurns {
    pub fn of(queues: usize) -> QueueTurns {
        QueueTurns { queues, queue: 0, left: IN_A_ROW }
    }

    /// The next of what the queues have, each of which `take` takes from by its number; nothing when all are empty.
    pub fn next<T>(&mut self, mut take: impl FnMut(usize) -> Option<T>) -> Option<T> {
        for _ in 0..self.queues {
            if self.left == 0 {
                self.pass();
            }
            if let Some(taken) = take(self.queue) {
                self.left -= 1;
                return Some(taken);
            }
            self.pass();
        }
        None
    }

    fn pass(&mut self) {
        self.queue = (self.queue + 1) % self.queues;
        self.left = IN_A_ROW;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of queues that are never empty, each gets as much as the others.
    #[test]
    fn a_queue_that_is_never_empty_keeps_nobody_from_its_turns() {
        for full in 1..1_u32 << 5 {
            let is_full = |queue: usize| full & 1 << queue != 0;
            let (mut turns, mut taken) = (QueueTurns::of(5), [0; 5]);
            for _ in 0..full.count_ones() as usize * IN_A_ROW * 10 {
                let queue = turns.next(|queue| is_full(queue).then_some(queue));
                taken[queue.expect("one has frames")] += 1;
            }
            let fair = [0, 1, 2, 3, 4].map(|it| if is_full(it) { IN_A_ROW * 10 } else { 0 });
            assert_eq!(taken, fair, "{full:b}");
            assert_eq!(turns.next(|_| None::<usize>), None);
        }
    }

    #[test]
    fn one_frame_is_found_wherever_it_lies() {
        for wanted in 0..5 {
            let mut turns = QueueTurns::of(5);
            for _ in 0..100 {
                assert_eq!(turns.next(|queue| (queue == wanted).then_some(queue)), Some(wanted));
            }
        }
    }
}
