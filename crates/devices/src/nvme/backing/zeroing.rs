//! How a range is made to read as zeroes (pure): in which way, and in pieces of which length.
//!
//! Where the medium cannot deallocate or zero by itself, zeroes are written, and a range may be as
//! long as the drive. So a range is done in pieces, and after each of them it can be given up.

/// Pieces shorter than this are doubled.
const QUICK_NS: u64 = 5_000_000;
/// Pieces longer than this are halved: as long as a reset may have to wait for one.
const SLOW_NS: u64 = 50_000_000;
/// The bounds of a piece that the medium zeroes, and the length to begin with.
const PIECE: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 30;
const FIRST_PIECE: u64 = 4 << 20;
/// Most bytes of zeroes that are written at once.
pub const WRITTEN_PIECE: u64 = 1 << 20;

/// A way to zero; what is not supported is followed by the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroBy {
    /// By `fallocate` with `FALLOC_FL_ZERO_RANGE`.
    Range,
    /// By `fallocate` with `FALLOC_FL_PUNCH_HOLE`.
    Hole,
    /// By writing zeroes, on file systems that have neither.
    Writing,
}

/// What is known of the medium.
#[derive(Debug)]
pub struct ZeroPolicy {
    by: ZeroBy,
    piece: u64,
    /// Ranges that the medium zeroes begin and end at multiples of this.
    alignment: u64,
}

/// A range that is being zeroed.
#[derive(Debug, Clone, Copy)]
pub struct Zeroing {
    next: u64,
    end: u64,
    deallocate: bool,
    by: ZeroBy,
}

/// The next piece of a range that is to be zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroPiece {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// How many bytes are zeroed.
    pub length: u64,
    /// Which way of zeroing is tried.
    pub by: ZeroBy,
}

impl ZeroPolicy {
    /// For a medium that zeroes in multiples of `alignment` bytes, a power of two.
    pub fn new(alignment: u64) -> ZeroPolicy {
        ZeroPolicy { by: ZeroBy::Range, piece: FIRST_PIECE, alignment: alignment.max(1) }
    }

    /// The range `[offset, offset + length)`; `deallocate` when its space may be given back.
    pub fn begin(&self, offset: u64, length: u64, deallocate: bool) -> Zeroing {
        let by = if deallocate { ZeroBy::Hole } else { self.by };
        Zeroing { next: offset, end: offset + length, deallocate, by }
    }

    /// The next piece of `zeroing`; `None` when it is done.
    pub fn piece(&self, zeroing: &Zeroing) -> Option<ZeroPiece> {
        let Zeroing { next, end, by, .. } = *zeroing;
        if next >= end {
            return None;
        }
        let edge = next.next_multiple_of(self.alignment).min(end);
        let whole = (end - next) / self.alignment * self.alignment;
        let (by, length) = match by {
            ZeroBy::Writing => (by, end - next),
            _ if edge > next => (ZeroBy::Writing, edge - next),
            _ if whole > 0 => (by, whole.min(self.piece.next_multiple_of(self.alignment))),
            _ => (ZeroBy::Writing, end - next),
        };
        let most = if by == ZeroBy::Writing { WRITTEN_PIECE } else { u64::MAX };
        Some(ZeroPiece { offset: next, length: length.min(most), by })
    }

    /// `piece` of `zeroing` was done in `took_ns`.
    pub fn done(&mut self, zeroing: &mut Zeroing, piece: ZeroPiece, took_ns: u64) {
        zeroing.next = piece.offset + piece.length;
        if piece.by == ZeroBy::Writing {
            return;
        }
        if took_ns < QUICK_NS && piece.length >= self.piece {
            self.piece = (self.piece * 2).min(*PIECE.end());
        } else if took_ns > SLOW_NS {
            self.piece = (self.piece / 2).max(*PIECE.start());
        }
    }

    /// The medium does not do it this way; `never` when it does so for no range. The rest of
    /// `zeroing` is done in another way. False when there is none.
    pub fn unsupported(&mut self, zeroing: &mut Zeroing, piece: ZeroPiece, never: bool) -> bool {
        let next = match (piece.by, zeroing.deallocate) {
            (ZeroBy::Writing, _) => return false,
            _ if !never => ZeroBy::Writing,
            // Asked to deallocate, the hole was tried first.
            (ZeroBy::Range, false) => ZeroBy::Hole,
            (ZeroBy::Hole, true) => ZeroBy::Range,
            _ => ZeroBy::Writing,
        };
        if never && !zeroing.deallocate {
            self.by = self.by.max(next);
        }
        zeroing.by = next;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_the_range_once_and_are_aligned_where_they_must_be(
            offset in 0u64..1 << 24, length in 1u64..1 << 24, deallocate: bool, shift in 0u32..13,
            refusals in prop::collection::vec((any::<bool>(), any::<bool>()), 0..4),
            took in prop::collection::vec(0u64..100_000_000, 1..8),
        ) {
            let alignment = 1u64 << shift;
            let mut policy = ZeroPolicy::new(alignment);
            let mut zeroing = policy.begin(offset, length, deallocate);
            let (mut refusals, mut times) = (refusals.into_iter(), took.into_iter().cycle());
            let mut at = offset;
            while let Some(piece) = policy.piece(&zeroing) {
                prop_assert_eq!(piece.offset, at);
                prop_assert!(piece.length > 0);
                if piece.by == ZeroBy::Writing {
                    prop_assert!(piece.length <= WRITTEN_PIECE);
                } else {
                    prop_assert!(piece.offset % alignment == 0 && piece.length % alignment == 0);
                    prop_assert!(piece.length <= (*PIECE.end()).max(alignment));
                    if let Some((true, never)) = refusals.next() {
                        prop_assert!(policy.unsupported(&mut zeroing, piece, never));
                        continue;
                    }
                }
                policy.done(&mut zeroing, piece, times.next().unwrap());
                at += piece.length;
            }
            prop_assert_eq!(at, offset + length);
        }
    }

    #[test]
    fn pieces_adapt_to_the_medium() {
        let mut policy = ZeroPolicy::new(1);
        let mut zeroing = policy.begin(0, 1 << 40, true);
        let mut lengths = Vec::new();
        for took in [0, 0, SLOW_NS + 1, SLOW_NS + 1, SLOW_NS + 1, SLOW_NS + 1, SLOW_NS + 1, 0] {
            let piece = policy.piece(&zeroing).unwrap();
            lengths.push(piece.length >> 20);
            policy.done(&mut zeroing, piece, took);
        }
        assert_eq!(lengths, [4, 8, 16, 8, 4, 2, 1, 1]);
    }
}
