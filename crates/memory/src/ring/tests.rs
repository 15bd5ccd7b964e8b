use std::collections::VecDeque;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::region::SharedMemory;

const AT: usize = 64;

fn ring(layout: RingLayout) -> (SharedMemory, Producer, Consumer) {
    let bytes = layout.bytes().unwrap();
    let memory = SharedMemory::create("ring", (AT + bytes) as u64).unwrap();
    let producer = Producer::new(memory.region().clone(), AT, layout).unwrap();
    let consumer = Consumer::new(memory.region().clone(), AT, layout).unwrap();
    (memory, producer, consumer)
}

#[derive(Debug, Clone)]
enum Step {
    Push(Vec<u8>),
    Pop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..24).prop_map(Step::Push),
        (0usize..24).prop_map(Step::Pop),
    ]
}

proptest! {
    #[test]
    fn does_what_a_queue_does(slots in 0u32..4, slot_bytes in 1u32..20, steps in prop::collection::vec(step(), 0..200)) {
        let layout = RingLayout { slots: 1 << slots, slot_bytes };
        let (_memory, mut producer, mut consumer) = ring(layout);
        let mut queue: VecDeque<Vec<u8>> = VecDeque::new();
        for step in steps {
            match step {
                Step::Push(message) => {
                    let expected = if message.len() > slot_bytes as usize {
                        Err(PushError::TooLong { length: message.len(), slot_bytes })
                    } else if queue.len() == layout.slots as usize {
                        Err(PushError::Full)
                    } else {
                        queue.push_back(message.clone());
                        Ok(())
                    };
                    prop_assert_eq!(producer.push(&message), expected);
                }
                Step::Pop(room) => {
                    let mut buffer = vec![0; room];
                    let length = consumer.pop(&mut buffer);
                    prop_assert_eq!(length, queue.front().map(Vec::len));
                    if let Some(buffer) = length.and_then(|length| buffer.get(..length)) {
                        prop_assert_eq!(buffer, &queue.pop_front().unwrap()[..]);
                    }
                }
            }
            prop_assert_eq!(consumer.len(), queue.len());
            prop_assert_eq!(consumer.is_empty(), queue.is_empty());
        }
        prop_assert_eq!(consumer.malformed(), 0);
    }

    #[test]
    fn survives_any_bytes(seed in prop::collection::vec(any::<u8>(), 1..64), pushes in 0usize..20) {
        let layout = RingLayout { slots: 8, slot_bytes: 12 };
        let (memory, mut producer, mut consumer) = ring(layout);
        for (at, byte) in seed.iter().cycle().take(memory.len()).enumerate() {
            memory.whole().write_obj(at, byte).unwrap();
        }
        let mut buffer = [0; 12];
        for _ in 0..pushes {
            let _ = producer.push(b"message");
            prop_assert!(consumer.pop(&mut buffer).is_none_or(|length| length <= 12));
            prop_assert!(consumer.len() <= 8);
        }
    }
}

#[test]
fn layouts_that_cannot_be_are_refused() {
    for (slots, slot_bytes) in [(0, 8), (3, 8), (1 << 21, 8), (8, 0), (8, (1 << 24) + 1)] {
        assert_eq!(RingLayout { slots, slot_bytes }.bytes(), None, "{slots} {slot_bytes}");
    }
    let layout = RingLayout { slots: 16, slot_bytes: 60 };
    assert_eq!(layout.bytes(), Some(128 + 16 * 64));
    let memory = SharedMemory::create("ring", 4096).unwrap();
    let at = |offset| Producer::new(memory.region().clone(), offset, layout).is_some();
    assert!(at(4096 - 1152) && at(0));
    assert!(!at(32) && !at(4096 - 1152 + 64) && !at(usize::MAX - 63));
}

#[test]
fn goes_on_where_a_former_end_stopped_and_wraps() {
    let layout = RingLayout { slots: 4, slot_bytes: 8 };
    let (memory, ..) = ring(layout);
    memory.whole().store_u32(AT, u32::MAX - 1, Ordering::SeqCst).unwrap();
    memory.whole().store_u32(AT + 64, u32::MAX - 1, Ordering::SeqCst).unwrap();
    let mut buffer = [0; 8];
    for round in 0..6u64 {
        let mut producer = Producer::new(memory.region().clone(), AT, layout).unwrap();
        let mut consumer = Consumer::new(memory.region().clone(), AT, layout).unwrap();
        producer.push(&round.to_ne_bytes()).unwrap();
        assert_eq!(consumer.pop(&mut buffer), Some(8));
        assert_eq!(u64::from_ne_bytes(buffer), round);
    }
}

#[test]
fn a_length_beyond_the_slot_is_thrown_away_and_counted() {
    let layout = RingLayout { slots: 4, slot_bytes: 8 };
    let (memory, mut producer, mut consumer) = ring(layout);
    producer.push(b"false").unwrap();
    producer.push(b"true").unwrap();
    memory.whole().store_u32(AT + 128, 9, Ordering::SeqCst).unwrap();
    let mut buffer = [0; 8];
    assert_eq!(consumer.pop(&mut buffer), Some(4));
    assert_eq!(&buffer[..4], b"true");
    assert_eq!(consumer.malformed(), 1);
    assert_eq!(consumer.pop(&mut buffer), None);
}

#[test]
fn carries_everything_between_two_threads_in_order() {
    const MESSAGES: u64 = 200_000;
    let layout = RingLayout { slots: 64, slot_bytes: 60 };
    let (_memory, mut producer, mut consumer) = ring(layout);
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..MESSAGES {
                let message = [number.to_ne_bytes(); 7];
                let message = &message.as_flattened()[..8 + (number % 49) as usize];
                while producer.push(message) == Err(PushError::Full) {
                    thread::yield_now();
                }
            }
        });
        let mut buffer = [0; 60];
        for number in 0..MESSAGES {
            let length = loop {
                match consumer.pop(&mut buffer) {
                    Some(length) => break length,
                    None => thread::yield_now(),
                }
            };
            let expected = [number.to_ne_bytes(); 7];
            assert_eq!(&buffer[..length], &expected.as_flattened()[..8 + (number % 49) as usize]);
        }
    });
}

#[test]
fn a_scribbling_peer_cannot_harm_either_side() {
    let layout = RingLayout { slots: 8, slot_bytes: 20 };
    let (memory, mut producer, mut consumer) = ring(layout);
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut word = 0x9e37_79b9_7f4a_7c15u64;
            while !done.load(Ordering::Relaxed) {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let at = AT + (word >> 33) as usize % (memory.len() - AT) / 8 * 8;
                memory.whole().store_u64(at, word, Ordering::Relaxed).unwrap();
            }
        });
        let mut buffer = [0; 20];
        for _ in 0..100_000 {
            let _ = producer.push(b"message");
            assert!(consumer.pop(&mut buffer).is_none_or(|length| length <= 20));
            assert!(consumer.len() <= 8);
        }
        done.store(true, Ordering::Relaxed);
    });
}
