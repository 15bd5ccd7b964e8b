//! How the two arenas of an NTB are laid out (pure).
//!
//! Each host has an arena, into which its peer's window leads. The peer alone writes there, and the host alone reads: a header,
//! then a head for each slot, then a ring of bytes for each slot. A slot is a place for one conversation.

/// Conversations that there are at a time. The hosts begin them in slots of their own: one in those with even numbers, the
/// other in those with odd ones.
pub const SLOTS: usize = 64;

/// Words of the header, in bytes from the beginning of an arena.
pub(super) mod header {
    /// [`MAGIC`](super::MAGIC), for whoever looks whether this is an arena.
    pub const MAGIC: u32 = 0;
    /// Which layout the writer has: never 0.
    pub const SHAPE: u32 = 4;
    /// Who the writer takes itself and the reader for: 64 bits of a digest, neither word of which is 0.
    pub const NAMES: u32 = 8;
    /// The writer's life: another one has another number, which is never 0.
    pub const LIFE: u32 = 16;
    /// The life of the reader's that the writer knows, and has forgotten all former ones; 0: none.
    pub const KNOWN: u32 = 20;
    /// Changes ten times in a second while the writer lives.
    pub const BEAT: u32 = 24;
    /// Not 0 while the writer sleeps: whoever stores something rings its doorbell, once for each value.
    pub const ASLEEP: u32 = 28;
    /// How many words there are.
    pub const WORDS: u32 = 8;
}

/// The first word of an arena. Its lowest byte is the version of what follows.
pub(super) const MAGIC: u32 = 0x4c42_5202;

/// Whether this is the first word of an arena of whatever version.
pub(super) fn is_magic(word: u32) -> bool {
    word >> 8 == MAGIC >> 8
}

/// Where the heads of slots begin, and the bytes of each.
const HEADS: u32 = 4096;
const HEAD: u32 = 64;
/// Where the rings begin.
const RINGS: u32 = HEADS + SLOTS as u32 * HEAD;
/// The most and the fewest bytes of a ring.
const LARGEST: u32 = 256 << 10;
const SMALLEST: u32 = 4 << 10;

/// Words in the head of a slot, in bytes from its beginning.
#[derive(Debug, Clone, Copy)]
pub(super) enum SlotWord {
    /// The number of the writer's conversation there, and whether it has ended.
    State = 0,
    /// Bytes that the writer has put into the slot's ring here, modulo 2^32.
    Put = 4,
    /// Bytes that it has taken out of the slot's ring in its own arena, modulo 2^32.
    Taken = 8,
}

/// Sizes of both arenas of an NTB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaLayout {
    ring: u32,
}

impl ArenaLayout {
    /// For windows onto the arenas of this many bytes, in either direction; `None` where they are too small.
    pub fn within(windows: [u64; 2]) -> Option<ArenaLayout> {
        let smaller = windows[0].min(windows[1]);
        let of_each = smaller.checked_sub(RINGS.into())? / SLOTS as u64;
        let ring = 1u64.checked_shl(of_each.checked_ilog2()?)?.min(LARGEST.into()) as u32;
        (ring >= SMALLEST).then_some(ArenaLayout { ring })
    }

    /// Bytes of an arena: whole pages.
    pub fn bytes(&self) -> u64 {
        u64::from(RINGS) + SLOTS as u64 * u64::from(self.ring)
    }

    /// Bytes of a slot's ring: a power of two.
    pub(super) fn ring(&self) -> u32 {
        self.ring
    }

    /// A number that is different for another layout, and not 0.
    pub(super) fn shape(&self) -> u32 {
        (SLOTS as u32) << 8 | self.ring.ilog2()
    }

    /// Where the heads of all slots are, and their bytes.
    pub(super) fn heads(&self) -> (u32, u32) {
        (HEADS, RINGS - HEADS)
    }

    /// Where a word of a slot is.
    pub(super) fn word(&self, slot: usize, word: SlotWord) -> u32 {
        HEADS + slot as u32 * HEAD + word as u32
    }

    /// Where the byte of a slot's ring is that has this number.
    pub(super) fn byte(&self, slot: usize, number: u32) -> u32 {
        RINGS + slot as u32 * self.ring + (number & (self.ring - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_fits_into_the_smaller_window() {
        for window in (19..40).map(|log2| 1u64 << log2) {
            for windows in [[window, 1 << 40], [1 << 40, window]] {
                let layout = ArenaLayout::within(windows).unwrap();
                assert!(layout.bytes() <= window && layout.ring().is_power_of_two());
                assert!(layout.bytes().is_multiple_of(4096));
                assert_eq!(u64::from(layout.byte(SLOTS - 1, u32::MAX)) + 1, layout.bytes());
            }
        }
        for small in [0, 4096, 256 << 10] {
            assert_eq!(ArenaLayout::within([small, 1 << 40]), None);
        }
    }
}
