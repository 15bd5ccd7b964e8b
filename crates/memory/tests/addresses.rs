//! The addresses of a process are shared: a function that maps the same memory over and over takes no more than its share, and
//! all of them together leave room for what the process itself needs. A process of its own, since the budget is the process'.

use rackbus_fabric::Lending;
use rackbus_memory::{Access, DmaSpace, MapError, SharedMemory};

/// Bytes of the memory, of which nothing is ever touched.
const LENGTH: u64 = 1 << 40;

/// Maps all of the memory again and again, until that is refused; how often it was not.
fn fill(space: &mut DmaSpace, memory: &SharedMemory) -> u64 {
    let lending = Lending::alone();
    let first = space.len() as u64;
    for nth in first.. {
        let loan =
            lending.lend(nth * LENGTH, LENGTH, Access::all(), Some(memory.handle(0))).unwrap();
        match space.map(loan) {
            Ok(()) => {}
            Err(MapError::TooManyBytes(_)) => return nth - first,
            Err(other) => panic!("{other}"),
        }
    }
    unreachable!("there is a limit")
}

#[test]
fn functions_that_map_the_same_memory_over_and_over_leave_their_process_its_addresses() {
    let memory = SharedMemory::create("mapped again", LENGTH).unwrap();
    let mut spaces = Vec::new();
    let mut total = 0;
    loop {
        let mut space = DmaSpace::new();
        let mapped = fill(&mut space, &memory);
        total += mapped;
        spaces.push((space, mapped));
        // Its first one, which no others can take.
        if mapped == 1 {
            break;
        }
        assert!(mapped <= 8, "a function takes more than its share");
        assert!(spaces.len() < 100, "there is no limit for all");
    }
    assert!(spaces.len() > 4, "a few functions take everything");
    assert!(total <= 32 + spaces.len() as u64, "{total}");
    let (mut gone, freed) = spaces.swap_remove(0);
    assert_eq!(gone.unmap_all() as u64, freed);
    assert_eq!(fill(&mut gone, &memory), freed, "what is given back is free");
}
