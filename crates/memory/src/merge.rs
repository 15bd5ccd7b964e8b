//! Stores of another machine, merged into memory that processes of this one store to at the same time.
//!
//! Each aligned word of 8 bytes changes in one step, and only in the bytes that were stored: nobody sees half of
//! a counter or of a pointer, and no store to the other bytes of the word is lost.

use std::sync::atomic::Ordering;

use crate::slice::DmaSlice;

const WORD: usize = 8;

/// Merges `stores` (each its offset, and its bytes), in rising order, into `memory`, whose length is a multiple of 8
/// and which begins at one. What is not inside of it is left out; whether all was.
pub fn merge<'a>(
    memory: DmaSlice<'_>,
    stores: impl IntoIterator<Item = (usize, &'a [u8])>,
) -> bool {
    let mut inside = true;
    // The word that is being put together: where, and which of its bytes are known.
    let (mut at, mut value, mut mask) = (0, [0; WORD], [0; WORD]);
    let put = |at: usize, value: &[u8; WORD], mask: &mut [u8; WORD]| {
        let (word, ones) = (u64::from_ne_bytes(*value), u64::from_ne_bytes(*mask));
        *mask = [0; WORD];
        ones == 0 || memory.merge_u64(at, word, ones).is_some()
    };
    for (offset, bytes) in stores {
        let mut rest = bytes;
        let mut offset = offset;
        while !rest.is_empty() {
            let (word, within) = (offset - offset % WORD, offset % WORD);
            if word != at {
                inside &= put(at, &value, &mut mask);
                at = word;
            }
            if within == 0 && rest.len() >= WORD {
                inside &= put(at, &value, &mut mask);
                let (now, later) = rest.split_at(rest.len() - rest.len() % WORD);
                inside &= store_words(memory, offset, now);
                (offset, rest) = (offset + now.len(), later);
                continue;
            }
            let (now, later) = rest.split_at(rest.len().min(WORD - within));
            value[within..within + now.len()].copy_from_slice(now);
            mask[within..within + now.len()].fill(0xff);
            (offset, rest) = (offset + now.len(), later);
        }
    }
    inside & put(at, &value, &mut mask)
}

/// Stores whole words from a multiple of 8; whether all were inside. They are not stored as bytes, since nobody sees half of
/// a word.
fn store_words(memory: DmaSlice<'_>, offset: usize, bytes: &[u8]) -> bool {
    let length = bytes.len().min(memory.len().saturating_sub(offset));
    let Some(words) = memory.part(offset, length) else { return false };
    for (nth, word) in bytes[..length].chunks_exact(WORD).enumerate() {
        let word = word.try_into().map_or(0, u64::from_ne_bytes);
        words.store_u64(nth * WORD, word, Ordering::Release);
    }
    length == bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedMemory;

    #[test]
    fn only_what_is_stored_changes() {
        let memory = SharedMemory::create("merge", 4096).unwrap();
        memory.whole().fill(9);
        assert!(merge(memory.whole(), [(3, &[1, 2][..]), (6, &[3][..]), (14, &[4, 5, 6, 7][..])]));
        let mut read = [0; 20];
        memory.whole().copy_to(&mut read);
        assert_eq!(read, [9, 9, 9, 1, 2, 9, 3, 9, 9, 9, 9, 9, 9, 9, 4, 5, 6, 7, 9, 9]);
        assert!(!merge(memory.whole(), [(4095, &[1, 2][..])]));
        let long: Vec<u8> = (1..=100).collect();
        assert!(merge(memory.whole(), [(99, &long[..]), (300, &[7][..])]));
        let mut read = [0; 300 - 98];
        memory.whole().part(98, read.len()).unwrap().copy_to(&mut read);
        assert_eq!((read[0], &read[1..101], read[101], read[201]), (9, &long[..], 9, 9));
        assert!(!merge(memory.whole(), [(4070, &long[..])]));
        memory.whole().part(4070, 26).unwrap().copy_to(&mut read);
        assert_eq!(read[..26], long[..26], "what is inside is stored");
        assert!(!merge(memory.whole(), [(5000, &long[..])]));
    }

    #[test]
    fn a_word_changes_in_one_step_beside_other_stores() {
        let memory = SharedMemory::create("merge", 4096).unwrap();
        let rounds = 20_000_u32;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for count in 1..=rounds {
                    // Two runs of one word are one store.
                    let bytes = count.to_le_bytes();
                    merge(memory.whole(), [(0, &bytes[..1]), (1, &bytes[1..])]);
                }
            });
            scope.spawn(|| {
                for count in 1..=rounds {
                    merge(memory.whole(), [(4, &count.to_le_bytes()[..])]);
                }
            });
            let mut last = 0;
            while last < rounds {
                let seen =
                    memory.whole().load_u32(0, std::sync::atomic::Ordering::Acquire).unwrap();
                assert!(seen >= last, "{seen} after {last}: half of a word");
                last = seen;
            }
        });
        let both = memory.whole().load_u64(0, std::sync::atomic::Ordering::Acquire).unwrap();
        assert_eq!(both, u64::from(rounds) << 32 | u64::from(rounds));
    }
}
