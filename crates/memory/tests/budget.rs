//! The mappings that a process may have are shared: no function takes more than its share, all of
//! them together leave room for what the process itself needs, and what is given back is free. A
//! process of its own, since the budget is the process'.

use std::io::Write;

use rackbus_fabric::Lending;
use rackbus_memory::space::max_mappings;
use rackbus_memory::{Access, DmaSpace, MapError, SharedMemory};

const PAGE: u64 = 4096;

/// Maps single pages, which never make one mapping, until no more are let in; how many were.
fn fill(space: &mut DmaSpace, memory: &SharedMemory) -> (usize, MapError) {
    let lending = Lending::alone();
    for nth in 0.. {
        let page = Some(memory.handle(nth % 2 * PAGE));
        let loan = lending.lend(nth * 2 * PAGE, PAGE, Access::all(), page).unwrap();
        if let Err(error) = space.map(loan) {
            return (nth as usize, error);
        }
    }
    unreachable!("there is a limit")
}

#[test]
fn functions_share_the_mappings_of_their_process_and_leave_it_enough() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let system: usize = text.trim().parse().unwrap();
    let memory = SharedMemory::create("pages", 2 * PAGE).unwrap();
    assert!(max_mappings() <= system / 16, "{} of {system}", max_mappings());
    if system > 1 << 18 {
        // To use up so many takes minutes. Said where the output of tests that pass is not kept back.
        let why = format!("{system} mappings are too many to use them all up");
        let _ = writeln!(std::io::stderr(), "\n*** NOT TESTED: {why} ***\n");
        return;
    }
    let mut spaces = Vec::new();
    let mut total = 0;
    loop {
        let mut space = DmaSpace::new();
        let (mapped, error) = fill(&mut space, &memory);
        total += mapped;
        spaces.push((space, mapped));
        match error {
            MapError::TooMany(most) => assert_eq!((mapped, most), (max_mappings(), mapped)),
            MapError::Exhausted(most) => {
                // Each has one that no others can take.
                assert_eq!(total, most + spaces.len());
                break;
            }
            other => panic!("{other}"),
        }
        assert!(spaces.len() < 1000, "there is no limit for all");
    }
    assert!(spaces.len() > 4, "a few functions take everything");
    assert!(total <= system / 2 + spaces.len(), "{total} of {system}");
    // The process continues: threads have stacks, and large allocations mappings of their own.
    let threads: Vec<_> = (0..100).map(|_| std::thread::spawn(|| vec![1_u8; 1 << 20])).collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap().len() == 1 << 20));
    // Nobody has more than one, and then as many as another one has left.
    let mut next = DmaSpace::new();
    for _ in 0..2 {
        assert!(matches!(fill(&mut next, &memory), (1, MapError::Exhausted(_))));
        assert_eq!(next.unmap_all(), 1);
    }
    let (mut gone, freed) = spaces.swap_remove(0);
    assert_eq!(gone.unmap_all(), freed);
    assert_eq!(fill(&mut next, &memory).0, freed);
    // Its owner truncates the memory: a mapping is given what is there then, and is none more.
    next.drop_memory();
    let again = Lending::alone().lend(0, PAGE, Access::all(), Some(memory.handle(0))).unwrap();
    next.map(again).unwrap();
    assert_eq!(next.len(), freed);
}
