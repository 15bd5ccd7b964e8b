//! Ways against a plain breadth-first search, and ways in a large rack.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rackbus_fabric::{ComponentId, ComponentKind, HostId, Topology, TopologyLink};

const KINDS: [ComponentKind; 7] = [
    ComponentKind::Switch,
    ComponentKind::Ntb,
    ComponentKind::Device,
    ComponentKind::SharedMemory,
    ComponentKind::Network,
    ComponentKind::CxlMemory,
    ComponentKind::CxlSwitch,
];

/// What a breadth-first search finds first.
fn naive(topology: &Topology, from: ComponentId, to: ComponentId) -> Option<Vec<ComponentId>> {
    let ends = [from, to].map(|id| topology.component(id).host);
    let passes = |id| {
        let part = topology.component(id);
        let through = match part.kind {
            ComponentKind::Memory | ComponentKind::Device | ComponentKind::CxlMemory => false,
            ComponentKind::Ntb => ends[0] != ends[1],
            ComponentKind::CxlSwitch => ends.contains(&None),
            _ => true,
        };
        through && (part.host.is_none() || ends.contains(&part.host))
    };
    let mut ways = BTreeMap::from([(from, vec![from])]);
    let mut queue = VecDeque::from([from]);
    while let Some(here) = queue.pop_front() {
        if here != from && !passes(here) {
            continue;
        }
        for (next, _) in topology.neighbours(here) {
            if !ways.contains_key(next) {
                let way = [&ways[&here][..], &[*next]].concat();
                ways.insert(*next, way);
                queue.push_back(*next);
            }
        }
    }
    ways.remove(&to)
}

/// Up to four hosts, parts in and between them, and links wherever they may be.
fn topologies() -> impl Strategy<Value = Topology> {
    let part = (prop::option::weighted(0.6, 0usize..4), 0usize..KINDS.len());
    let parts = prop::collection::vec(part, 0..14);
    let end = any::<prop::sample::Index>;
    let links = prop::collection::vec((end(), end(), 1u8..7), 0..60);
    (1usize..5, parts, links).prop_map(|(hosts, parts, links)| {
        let mut topology = Topology::new();
        let hosts: Vec<HostId> = (0..hosts)
            .map(|host| topology.add_host(&format!("h{host}"), 1 << 30, host % 2 == 0).unwrap())
            .collect();
        for (index, (host, kind)) in parts.into_iter().enumerate() {
            let host = host.map(|host| hosts[host % hosts.len()]);
            topology.add(host, KINDS[kind], &format!("p{index}")).unwrap();
        }
        let ids: Vec<ComponentId> = topology.components().map(|(id, _)| id).collect();
        for (a, b, generation) in links {
            // Many pairs cannot be joined; those are left out.
            let link = TopologyLink::Pcie { generation, lanes: 4 };
            let _ = topology.connect(*a.get(&ids), *b.get(&ids), link);
        }
        topology
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn ways_are_the_first_that_a_breadth_first_search_finds(topology in topologies()) {
        let ids: Vec<ComponentId> = topology.components().map(|(id, _)| id).collect();
        for from in &ids {
            for to in &ids {
                prop_assert_eq!(topology.way(*from, *to), naive(&topology, *from, *to));
                let mut links = topology.neighbours(*from).iter();
                let first = links.find(|(id, _)| id == to).map(|(_, link)| *link);
                prop_assert_eq!(topology.link(*from, *to), first);
            }
        }
    }
}

/// Hosts of a device and an NTB each, below a tree of switches with 32 ports.
fn tree(hosts: usize) -> Topology {
    let link = TopologyLink::Pcie { generation: 4, lanes: 16 };
    let mut topology = Topology::new();
    let mut level: Vec<ComponentId> = (0..hosts)
        .map(|host| {
            let name = format!("h{host}");
            let id = topology.add_host(&name, 1 << 30, false).unwrap();
            let root = topology.host(id).root;
            let [_, ntb] = [ComponentKind::Device, ComponentKind::Ntb].map(|kind| {
                let part = topology.add(Some(id), kind, &format!("{name}/{kind}")).unwrap();
                topology.connect(root, part, link).unwrap();
                part
            });
            ntb
        })
        .collect();
    while level.len() > 1 {
        let parts = topology.components().count();
        let above = level.chunks(31).enumerate().map(|(index, below)| {
            let name = format!("switch{}", parts + index);
            let switch = topology.add(None, ComponentKind::Switch, &name).unwrap();
            below.iter().for_each(|part| topology.connect(*part, switch, link).unwrap());
            switch
        });
        level = above.collect();
    }
    topology
}

/// A search that looks at every host takes a hundred times as long in a rack of a hundred times as many.
#[test]
fn a_way_in_a_large_rack_is_found_in_far_less_than_a_time_for_each_host() {
    let (hosts, pairs) = (20_000, 5_000);
    let (small, large) = (find_ways(hosts / 100, pairs), find_ways(hosts, pairs));
    println!("{pairs} ways among {} hosts: {small:?}, among {hosts}: {large:?}", hosts / 100);
    assert!(large < 30 * small, "{large:?}, and {small:?} in the small rack");
}

/// How long it takes to find ways from devices to memory of random hosts: the shortest of several times, which what else
/// runs on the machine has held up the least.
fn find_ways(hosts: usize, pairs: usize) -> Duration {
    let topology = tree(hosts);
    (0..5).map(|_| find_ways_in(&topology, hosts, pairs)).min().unwrap()
}

fn find_ways_in(topology: &Topology, hosts: usize, pairs: usize) -> Duration {
    let mut seed = 1u64;
    let mut host = || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        format!("h{}", usize::try_from(seed >> 33).unwrap() % hosts)
    };
    let begin = Instant::now();
    for _ in 0..pairs {
        let (from, to) = (host(), host());
        let device = topology.named(&format!("{from}/device")).unwrap();
        let memory = topology.host(topology.host_named(&to).unwrap()).memory;
        let path = topology.path(device, memory).unwrap();
        assert!(from == to || (5..=9).contains(&path.hops().len()), "{path:?}");
    }
    begin.elapsed()
}
