//! Ranges that lie in several mappings, as those of a guest that translates DMA itself.

use proptest::prelude::*;
use rackbus_fabric::Lending;
use rackbus_memory::{Access, DmaSpace, SharedMemory};

const BASE: u64 = 0x10_0000;
const PAGES: usize = 8;
const PAGE: usize = 4096;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is mapped where: every byte of a range that is mapped as a whole is found, in order,
    /// through its pieces, and a range with a hole is refused.
    #[test]
    fn pieces_are_what_reading_finds(
        places in prop::collection::vec(prop::option::weighted(0.9, 0..PAGES), PAGES),
        from in 0..PAGES * PAGE,
        length in 1..3 * PAGE,
        probes in prop::collection::vec((0..3 * PAGE, 1usize..64), 16),
    ) {
        let memory = SharedMemory::create("pieces", (PAGES * PAGE) as u64).expect("memory");
        let content: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / 7 + at / PAGE) as u8).collect();
        memory.whole().copy_from(&content);
        let (mut space, lending) = (DmaSpace::new(), Lending::alone());
        space.set_master(true);
        for (page, place) in places.iter().enumerate() {
            if let Some(place) = place {
                let window = Some(memory.handle((place * PAGE) as u64));
                let at = BASE + (page * PAGE) as u64;
                let loan = lending.lend(at, PAGE as u64, Access::READ, window).expect("lend");
                space.map(loan).expect("map");
            }
        }
        let mut found = vec![0; length];
        let read = space.read(BASE + from as u64, &mut found);
        let pinned = space.pin_pieces(BASE + from as u64, length, Access::READ);
        prop_assert_eq!(read.is_ok(), pinned.is_ok());
        let Ok(pieces) = pinned else { return Ok(()) };
        for (at, count) in probes {
            let whole = at + count <= length;
            let apart = (from + at) / PAGE != (from + at + count - 1) / PAGE;
            match pieces.at(at, count) {
                Some(part) => {
                    let mut bytes = vec![0; count];
                    part.copy_to(&mut bytes);
                    prop_assert_eq!(&bytes, &found[at..at + count]);
                }
                None => prop_assert!(!whole || apart, "{}+{} is in one piece", at, count),
            }
        }
        let first = PAGE - from % PAGE;
        prop_assert!(length <= first || pieces.meet_at(2) == first.is_multiple_of(2));
        let mut joined = Vec::new();
        for piece in pieces.into_pieces() {
            let mut bytes = vec![0; piece.get().len()];
            piece.get().copy_to(&mut bytes);
            joined.extend(bytes);
        }
        prop_assert_eq!(joined, found);
    }
}
