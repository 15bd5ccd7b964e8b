//! Pending events, in the order of their times; at the same time, in the order of scheduling.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::time::Time;

/// Pending events.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<(Time, u64, u32)>>,
    events: Vec<E>,
    free: Vec<u32>,
    scheduled: u64,
}

impl<E: Copy> EventQueue<E> {
    /// None.
    pub fn new() -> Self {
        EventQueue { heap: BinaryHeap::new(), events: Vec::new(), free: Vec::new(), scheduled: 0 }
    }

    /// Adds an event that happens at a time.
    pub fn schedule(&mut self, at: Time, event: E) {
        let place = match self.free.pop() {
            Some(place) => {
                self.events[place as usize] = event;
                place
            }
            None => {
                self.events.push(event);
                (self.events.len() - 1) as u32
            }
        };
        self.scheduled += 1;
        self.heap.push(Reverse((at, self.scheduled, place)));
    }

    /// Takes the next event.
    pub fn pop(&mut self) -> Option<(Time, E)> {
        let Reverse((at, _, place)) = self.heap.pop()?;
        self.free.push(place);
        Some((at, self.events[place as usize]))
    }

    /// When the next event happens.
    pub fn peek_time(&self) -> Option<Time> {
        self.heap.peek().map(|next| next.0.0)
    }
}

impl<E: Copy> Default for EventQueue<E> {
    fn default() -> Self {
        EventQueue::new()
    }
}
