//! Which bytes copies move, whatever their length, their places and their way; and in which pieces small ones store.

#[cfg(target_arch = "x86_64")]
use super::super::stream::{StreamingCopy, x86};
use super::*;
use proptest::prelude::*;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

#[cfg(target_arch = "x86_64")]
proptest! {
    #[test]
    fn streaming_copies_exactly_the_range(from in 0usize..130, to in 0usize..130, short in 0usize..1000, pages in 0usize..9) {
        let length = short + pages * 4096;
        let source = pattern(from + length);
        let ways: [StreamingCopy; 2] = [x86::stream_sse2::<1>, x86::stream_sse2::<{ x86::PAGES }>];
        for way in ways.into_iter().chain(streaming().unwrap()) {
            let mut destination = vec![0xee; to + length + 64];
            // SAFETY: both vectors have the range.
            unsafe { way(source[from..].as_ptr(), destination[to..].as_mut_ptr(), length) };
            prop_assert_eq!(&destination[to..to + length], &source[from..]);
            prop_assert!(destination[..to].iter().all(|byte| *byte == 0xee));
            prop_assert!(destination[to + length..].iter().all(|byte| *byte == 0xee));
        }
    }
}

#[test]
fn small_copies_move_any_length_to_any_place() {
    for length in 0..130 {
        for (from, to) in [(0, 0), (0, 130), (130, 0), (5, 0), (0, 5), (3, 70)] {
            // What is copied out of shared memory goes to memory of the program's own.
            let overlaps = usize::abs_diff(from, to) < length;
            for out in [false, true].into_iter().filter(|out| !(*out && overlaps)) {
                let mut bytes = pattern(300);
                let mut expected = bytes.clone();
                expected.copy_within(from..from + length, to);
                let start = bytes.as_mut_ptr();
                // SAFETY: both ranges are inside of the vector.
                unsafe {
                    let (source, destination) = (start.add(from), start.add(to));
                    match out {
                        false => copy(source, destination, length),
                        true => copy_out(source, destination, length),
                    }
                }
                assert!(bytes == expected, "{length} from {from} to {to}, out: {out}");
            }
        }
    }
}

/// Notes what is stored.
struct Noted(Vec<(usize, usize)>);

impl Put for Noted {
    unsafe fn put<T: Copy>(&mut self, at: usize, _value: T) {
        self.0.push((at, size_of::<T>()));
    }

    unsafe fn copied_overlapping(&mut self, _source: *const u8, _length: usize) -> bool {
        false
    }
}

#[test]
fn small_copies_store_each_byte_once_in_order() {
    let source = pattern(SMALL);
    for length in 1..=SMALL {
        let mut noted = Noted(Vec::new());
        // SAFETY: the source has as many bytes, and nothing is stored.
        unsafe { copy_small(source.as_ptr(), &mut noted, length) };
        let end = noted.0.iter().fold(0, |end, (at, bytes)| {
            assert_eq!(*at, end, "{length} bytes: {:?}", noted.0);
            end + bytes
        });
        assert_eq!(end, length, "{:?}", noted.0);
        if length.is_power_of_two() && length <= 16 {
            assert_eq!(noted.0.len(), 1, "{length} bytes are stored in one piece");
        }
    }
}

#[test]
fn large_copies_are_whole_whatever_their_ends() {
    for (skip, length) in [(0, ROUND), (1, ROUND + 1), (63, 2 * ROUND + 12_345)] {
        let source = pattern(skip + length);
        let ways = [CopyMethod::Plain, CopyMethod::Stream, CopyMethod::StreamPages];
        for (odd, even) in ways.into_iter().flat_map(|odd| ways.map(|even| (odd, even))) {
            let mut destination = vec![0; length + 1];
            let (from, to) = (source[skip..].as_ptr(), destination.as_mut_ptr());
            let parts = std::cell::Cell::new(0);
            // All by one way, or by two in turns.
            let choose = |_, _| {
                let is_odd = parts.replace(parts.get() + 1) % 2 == 0;
                (if is_odd { odd } else { even }, || {})
            };
            // SAFETY: both vectors have the range.
            assert!(unsafe { copy_by(from, to, length, choose, || false) });
            assert!(destination[..length] == source[skip..]);
            assert_eq!(destination[length], 0);
        }
        let mut destination = vec![0; length];
        // SAFETY: as above.
        unsafe { copy(source[skip..].as_ptr(), destination.as_mut_ptr(), length) };
        assert!(destination == source[skip..]);
    }
}

#[test]
fn overlapping_ranges_are_moved() {
    let mut bytes = pattern(ROUND + 100);
    let before = bytes.clone();
    let start = bytes.as_mut_ptr();
    // SAFETY: both ranges are inside of the vector.
    unsafe { copy(start, start.add(100), ROUND) };
    assert!(bytes[100..] == before[..ROUND]);
}

#[test]
fn cache_sizes_are_read_as_the_system_writes_them() {
    assert_eq!(kibibytes("2048K\n"), Some(2 << 20));
    assert_eq!([kibibytes(""), kibibytes("2M"), kibibytes("K")], [None; 3]);
    assert!(own_caches().iter().all(|bytes| *bytes < 1 << 30), "{:?}", own_caches());
}

#[test]
fn stops_between_rounds_when_asked_to() {
    let source = pattern(3 * ROUND);
    let mut destination = vec![0; 3 * ROUND];
    let asked = std::cell::Cell::new(0);
    let stop = || asked.replace(asked.get() + 1) == 1;
    let (from, to) = (source.as_ptr(), destination.as_mut_ptr());
    // SAFETY: both vectors have the range.
    let all = unsafe { copy_large(from, to, 3 * ROUND, stop) };
    assert!(!all);
    assert!(destination[..ROUND] == source[..ROUND]);
    assert!(destination[ROUND..].iter().all(|byte| *byte == 0));
}
