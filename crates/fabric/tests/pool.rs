//! The rack's address space against Marlin's and against the hosts one by one; extents against a
//! map of pages.

use proptest::prelude::*;
use rackbus_fabric::pool::{Extents, MemoryPool};
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{Access, Place, Requester, derive};

const GIB: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// The windows of the testbed are set as the paper sets them (section 3.1); whatever a machine
/// reaches by them must be what the pool says.
#[test]
fn the_map_of_the_pool_is_that_of_the_marlin_paper() {
    let text = include_str!("../../../examples/testbeds/marlin-pool.toml");
    let rack = Rack::parse("marlin-pool.toml", text).unwrap();
    let pool = MemoryPool::of(&rack);
    assert_eq!(pool.host("mh").unwrap().base, 32 * GIB);
    for i in 1..50 {
        assert_eq!(pool.host(&format!("ch{i}")).unwrap().base, 64 * GIB + (i - 1) * 32 * GIB);
    }
    assert_eq!(pool.hosts().iter().map(|exported| exported.size).sum::<u64>(), 1600 * GIB);

    let fabric = derive::fabric(&rack, derive::topology(&rack).unwrap()).unwrap();
    let topology = fabric.topology();
    let viewer = topology.host_named("ch7").unwrap();
    for exported in pool.hosts() {
        // Its own it reaches directly, below all others.
        let host = topology.host_named(&exported.host).unwrap();
        for offset in [0, 4095, 17 * GIB + 5, 32 * GIB - 1] {
            let address = pool.address(&exported.host, offset).unwrap();
            assert_eq!(pool.resolve(address), Some((exported, offset)));
            let address = if host == viewer { offset } else { address };
            let found = fabric.resolve(Requester::Cpu(viewer), address, 1, Access::READ).unwrap();
            assert_eq!(found.place, Place::Memory { host, offset });
        }
    }
}

fn racks() -> impl Strategy<Value = Rack> {
    let host = (1u64 << 26..=1 << 46, 0u64..=100);
    prop::collection::vec(host, 1..8).prop_map(|hosts| {
        let mut text = "name = \"lab\"\n".to_owned();
        for (nth, (memory, percent)) in hosts.into_iter().enumerate() {
            let export = (memory / 100 * percent) / PAGE * PAGE;
            text += &format!("[hosts.h{nth}]\nmemory = {memory}\nexport = {export}\n");
        }
        Rack::parse("rack.toml", &text).unwrap()
    })
}

proptest! {
    #[test]
    fn an_address_is_one_hosts(rack in racks(), any in any::<u64>(), near in 0usize..8) {
        let pool = MemoryPool::of(&rack);
        let near = &pool.hosts()[near % rack.hosts.len()];
        let ends = [near.base, near.base + near.size, near.base + near.size / 2];
        let around = ends.into_iter().flat_map(|end| [end.wrapping_sub(1), end, end + 1]);
        for address in around.chain([any, any % (1 << 50), 0, u64::MAX]) {
            let mut holders =
                pool.hosts().iter().filter(|it| (it.base..it.base + it.size).contains(&address));
            let expected = holders.next().map(|it| (it, address - it.base));
            prop_assert_eq!(holders.next(), None, "two hosts have {:#x}", address);
            prop_assert_eq!(pool.resolve(address), expected);
            if let Some((exported, offset)) = expected {
                prop_assert_eq!(pool.address(&exported.host, offset), Some(address));
            }
        }
        // Nobody's own memory is covered, and exports are whole.
        for (host, exported) in rack.hosts.iter().zip(pool.hosts()) {
            prop_assert!(rack.hosts.iter().all(|other| other.memory <= exported.base));
            prop_assert_eq!((&host.name, host.export), (&exported.host, exported.size));
            prop_assert_eq!(pool.address(&host.name, host.export), None);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Allocate(u64),
    /// Gives any range back, taken or not.
    Free(u64, u64),
    /// Gives the nth that was taken back.
    FreeNth(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = || prop_oneof![4 => 0u64..8 * PAGE, 1 => Just(u64::MAX)];
    let step = prop_oneof![
        6 => bytes().prop_map(Step::Allocate),
        1 => (0u64..34 * PAGE, bytes()).prop_map(|(offset, size)| Step::Free(offset, size)),
        2 => (0u64..34, bytes()).prop_map(|(page, size)| Step::Free(page * PAGE, size)),
        4 => (0usize..16).prop_map(Step::FreeNth),
    ];
    prop::collection::vec(step, 0..60)
}

/// The pages, one by one: true where taken.
struct Pages(Vec<bool>);

impl Pages {
    fn allocate(&mut self, size: u64) -> Option<u64> {
        let pages = usize::try_from(size.div_ceil(PAGE)).ok().filter(|pages| *pages > 0)?;
        let first = self.0.windows(pages).position(|run| run.iter().all(|taken| !taken))?;
        self.0[first..first + pages].fill(true);
        Some(first as u64 * PAGE)
    }

    fn free(&mut self, offset: u64, size: u64) -> bool {
        let (first, pages) = ((offset / PAGE) as usize, size.div_ceil(PAGE) as usize);
        let run = first..first.saturating_add(pages);
        match self.0.get_mut(run) {
            Some(run)
                if offset.is_multiple_of(PAGE)
                    && !run.is_empty()
                    && run.iter().all(|taken| *taken) =>
            {
                run.fill(false);
                true
            }
            _ => false,
        }
    }
}

proptest! {
    #[test]
    fn extents_do_what_a_map_of_pages_does(pages in 0u64..32, rest in 0..PAGE, steps in steps()) {
        let mut extents = Extents::new(pages * PAGE + rest);
        let mut model = Pages(vec![false; pages as usize]);
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(size) => {
                    let found = extents.allocate(size);
                    prop_assert_eq!(found, model.allocate(size));
                    taken.extend(found.map(|offset| (offset, size)));
                }
                Step::Free(offset, size) => {
                    prop_assert_eq!(extents.free(offset, size), model.free(offset, size));
                }
                Step::FreeNth(nth) if nth < taken.len() => {
                    let (offset, size) = taken.swap_remove(nth);
                    prop_assert_eq!(extents.free(offset, size), model.free(offset, size));
                }
                Step::FreeNth(_) => {}
            }
            let free = model.0.iter().filter(|taken| !**taken).count() as u64;
            prop_assert_eq!(extents.free_bytes(), free * PAGE);
        }
        // Pieces that are given back grow together.
        for page in 0..pages {
            extents.free(page * PAGE, PAGE);
        }
        prop_assert_eq!(extents, Extents::new(pages * PAGE));
    }
}
