//! Resolve and route: against a naive walk, against each other, and against published maps.

use proptest::prelude::*;
use rackbus_fabric::rack::Rack;
use rackbus_fabric::{
    Access, AccessError, AddressTarget, BarPlace, ComponentId, ComponentKind, DemandMapped,
    Destination, Fabric, FabricHandle, FaultCause, FunctionInterrupt, HostId, Lending, LentMemory,
    LoanError, ObjectKey, Place, Requester, Topology, derive,
};

const ALL: Access = Access::READ.union(Access::WRITE);
const GIB: u64 = 1 << 30;

fn fabric(file: &str) -> Fabric {
    Fabric::new(derive::topology(&Rack::parse("rack.toml", file).unwrap()).unwrap())
}

fn named(fabric: &Fabric, name: &str) -> ComponentId {
    fabric.topology().named(name).unwrap_or_else(|| panic!("{name} is there"))
}

fn host(fabric: &Fabric, name: &str) -> HostId {
    fabric.topology().host_named(name).unwrap_or_else(|| panic!("{name} is there"))
}

/// Roots and hops of the way from `from` to `to`.
fn counts(fabric: &Fabric, from: &str, to: &str) -> (usize, usize) {
    let path = fabric.topology().path(named(fabric, from), named(fabric, to)).unwrap();
    (path.roots(fabric.topology()), path.hops().len())
}

/// Two lenders, two GPUs in each, on one switch with the NTB adapter, and a borrower: the bare
/// metal testbed of Device Lending (2019), figure 11.
fn lenders(iommu: bool) -> Fabric {
    let mut text = String::from("name = \"lab\"\n");
    let device = "kind = \"nvme\"\nsize = \"1 GiB\"\n";
    for host in ["one", "two"] {
        text += &format!("[hosts.{host}]\niommu = {iommu}\n");
        for gpu in ["gpu0", "gpu1"] {
            text += &format!("[hosts.{host}.devices.{gpu}]\n{device}");
        }
        text += &format!("[fabric.adapters.{host}-ntb]\nhost = \"{host}\"\n");
        text += &format!("[fabric.switches.{host}-sw]\nhost = \"{host}\"\n");
        for part in ["gpu0", "gpu1"] {
            text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}/{part}\"]\n");
        }
        text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}-ntb\"]\n");
        text += &format!("[[fabric.links]]\nends = [\"{host}-sw\", \"{host}\"]\n");
    }
    text += "[[fabric.links]]\nends = [\"one-ntb\", \"two-ntb\"]\n";
    fabric(&text)
}

#[test]
fn hops_and_roots_are_counted_as_in_device_lending() {
    // Table 1: 1L-P2P-SW 0/1, 1L-P2P-IOMMU 1/3, 2L-P2P-SW 0/4, 2L-P2P-IOMMU 2/8.
    let (switched, checked) = (lenders(false), lenders(true));
    assert_eq!(counts(&switched, "one/gpu0", "one/gpu1"), (0, 1));
    assert_eq!(counts(&checked, "one/gpu0", "one/gpu1"), (1, 3));
    assert_eq!(counts(&switched, "one/gpu0", "two/gpu0"), (0, 4));
    assert_eq!(counts(&checked, "one/gpu0", "two/gpu0"), (2, 8));
    // Local memory is behind the switch and the root.
    assert_eq!(counts(&switched, "one/gpu0", "one/memory"), (1, 2));
}

/// A loan of a BAR goes the way that the model and `rackbus path` know of any access between the two.
#[test]
fn a_loan_of_a_bar_takes_the_way_that_is_told_of_it() {
    let topology = lenders(true).topology().clone();
    let handle = FabricHandle::new(Fabric::new(topology.clone()));
    let lending = handle.lending("one/gpu0", "two").unwrap();
    let own = derive::own_memory(topology).unwrap();
    let from = named(&own, "one/gpu0");
    let mut asked = DemandMapped::new(own);
    for (nth, (target, expected)) in [("one/gpu1", (1, 3)), ("two/gpu0", (2, 8))].iter().enumerate()
    {
        let iova = (nth as u64 + 1) << 30;
        let place = BarPlace { function: (*target).to_owned(), bar: 2, offset: 0x1000 };
        let loan = lending.lend_bar(iova, 0x2000, ALL, &place, File(7, 0)).unwrap();
        let to = asked.fabric().topology().named(target).unwrap();
        let found = handle.with(|it| it.route(Requester::Device(from), iova + 0x10, ALL)).unwrap();
        assert_eq!(found.place, Place::Bar { device: to, bar: 2, offset: 0x1010 });
        let told = asked.route(Requester::Device(from), Destination::Device(to)).unwrap().path;
        assert_eq!(found.path, told);
        let counts = handle.with(|fabric| found.path.roots(fabric.topology()));
        assert_eq!((counts, found.path.hops().len()), *expected);
        let reached = || handle.with(|fabric| fabric.reached("one/gpu0").unwrap().len());
        assert_eq!(reached(), 1);
        drop(loan);
        assert_eq!(reached(), 0);
    }
    for (function, expected) in [("one/gpu7", "knows no one/gpu7"), ("one-ntb", "cannot be mapped")]
    {
        let place = BarPlace { function: function.to_owned(), bar: 0, offset: 0 };
        let refused = lending.lend_bar(0, 0x1000, ALL, &place, File(7, 0)).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

/// Marlin (2014), figure 2: the management host maps each machine's memory above its own; each
/// machine maps the management host's whole address space above its own memory.
#[test]
fn every_machine_of_marlin_sees_the_whole_pool() {
    let machines = 49;
    let mut text =
        String::from("name = \"marlin\"\n[hosts.mh]\nmemory = \"32 GiB\"\niommu = false\n");
    for i in 1..=machines {
        text += &format!("[hosts.ch{i}]\nmemory = \"32 GiB\"\niommu = false\n");
    }
    let mut fabric = fabric(&text);
    let size = 32 * GIB;
    let manager = host(&fabric, "mh");
    let own = AddressTarget::Memory { offset: 0 };
    fabric.map(manager, 0, size, ALL, own.clone()).unwrap();
    for i in 1..=machines {
        let machine = host(&fabric, &format!("ch{i}"));
        let (ntb, peer) = (named(&fabric, "mh/ntb"), named(&fabric, &format!("ch{i}/ntb")));
        let down = AddressTarget::Window { ntb, peer, address: 0 };
        fabric.map(manager, size + (i - 1) * size, size, ALL, down).unwrap();
        fabric.map(machine, 0, size, ALL, own.clone()).unwrap();
        let up = AddressTarget::Window { ntb: peer, peer: ntb, address: 0 };
        fabric.map(machine, size, (machines + 1) * size, ALL, up).unwrap();
    }
    let viewer = Requester::Cpu(host(&fabric, "ch7"));
    for i in 1..=machines {
        let address = 64 * GIB + (i - 1) * size + 12345;
        let found = fabric.resolve(viewer, address, 8, ALL).unwrap();
        let there = Place::Memory { host: host(&fabric, &format!("ch{i}")), offset: 12345 };
        assert_eq!((found.place, found.windows), (there, 2));
    }
    let (own, manager_memory) = (12345, 32 * GIB + 12345);
    assert_eq!(fabric.resolve(viewer, own, 8, ALL).unwrap().windows, 0);
    assert_eq!(fabric.resolve(viewer, manager_memory, 8, ALL).unwrap().windows, 1);
    assert!(fabric.resolve(viewer, 32 * GIB + 1600 * GIB, 1, ALL).is_err());
}

#[test]
fn windows_that_lead_in_a_circle_are_found() {
    let mut fabric = fabric("name = \"lab\"\n[hosts.a]\niommu = false\n[hosts.b]\niommu = false\n");
    let (a, b) = (host(&fabric, "a"), host(&fabric, "b"));
    let (ntb_a, ntb_b) = (named(&fabric, "a/ntb"), named(&fabric, "b/ntb"));
    let there = AddressTarget::Window { ntb: ntb_a, peer: ntb_b, address: 0 };
    let back = AddressTarget::Window { ntb: ntb_b, peer: ntb_a, address: 0 };
    fabric.map(a, 0, 4096, ALL, there).unwrap();
    fabric.map(b, 0, 4096, ALL, back).unwrap();
    let cpu = Requester::Cpu(a);
    assert_eq!(fabric.resolve(cpu, 0, 8, ALL), Err(AccessError::Circle));
    assert_eq!(fabric.route(cpu, 0, ALL).unwrap_err(), AccessError::Circle);
}

#[test]
fn what_leads_nowhere_is_not_mapped() {
    let mut fabric = fabric(
        "name = \"lab\"\n[hosts.a]\nmemory = \"1 GiB\"\n[hosts.b.devices.d]\nkind = \"nvme\"\nsize = \"1 GiB\"\n",
    );
    let (a, device) = (host(&fabric, "a"), named(&fabric, "b/d"));
    let (ntb_a, ntb_b) = (named(&fabric, "a/ntb"), named(&fabric, "b/ntb"));
    let wrong = [
        (GIB + 1, AddressTarget::Memory { offset: 0 }),
        (1, AddressTarget::Memory { offset: GIB }),
        (1, AddressTarget::Memory { offset: u64::MAX }),
        (1, AddressTarget::Bar { device, bar: 0, offset: 0 }),
        (2, AddressTarget::Window { ntb: ntb_a, peer: ntb_b, address: u64::MAX }),
        (1, AddressTarget::Window { ntb: ntb_a, peer: ntb_a, address: 0 }),
        (1, AddressTarget::Window { ntb: ntb_b, peer: ntb_a, address: 0 }),
        (0, AddressTarget::Memory { offset: 0 }),
    ];
    for (length, target) in wrong {
        assert!(fabric.map(a, 0, length, ALL, target.clone()).is_err(), "{target:?}");
    }
    assert!(fabric.grant(named(&fabric, "a/root"), 0, 1, ALL, 0).is_err());
    assert!(fabric.grant(device, 0, 2, ALL, u64::MAX).is_err());
}

/// A rack of three hosts with a device each, for random mappings.
fn rack(iommu: [bool; 3]) -> Fabric {
    let mut text = String::from("name = \"lab\"\n");
    for (name, iommu) in ["a", "b", "c"].iter().zip(iommu) {
        text += &format!("[hosts.{name}]\nmemory = \"64 MiB\"\niommu = {iommu}\n");
        text += &format!("[hosts.{name}.devices.d]\nkind = \"nvme\"\nsize = \"1 GiB\"\n");
    }
    fabric(&text)
}

/// A mapping of a host's space, or of a requester's domain, in small numbers.
#[derive(Debug, Clone, Copy)]
struct Plan {
    host: usize,
    start: u64,
    length: u64,
    write: bool,
    /// 0 memory, 1 BAR, 2 window to the next host, 3 to the one after, 4 the device's domain,
    /// 5 the NTB's domain.
    what: u8,
    offset: u64,
}

fn plans() -> impl Strategy<Value = Plan> {
    (0usize..3, 0u64..48, 1u64..32, any::<bool>(), 0u8..6, 0u64..48).prop_map(
        |(host, start, length, write, what, offset)| Plan {
            host,
            start,
            length,
            write,
            what,
            offset,
        },
    )
}

/// The naive answer for one byte: follow it through a list of plans that were accepted.
fn follow(
    plans: &[Plan],
    iommu: [bool; 3],
    mut host: usize,
    mut domain: Option<u8>,
    mut address: u64,
    access: Access,
) -> Option<(bool, usize, u64)> {
    let allowed = |plan: &Plan| plan.write || access == Access::READ;
    for _ in 0..17 {
        if let Some(kind) = domain.filter(|_| iommu[host]) {
            let plan = plans.iter().find(|p| {
                p.host == host && p.what == kind && (p.start..p.start + p.length).contains(&address)
            })?;
            if !allowed(plan) {
                return None;
            }
            address = plan.offset + (address - plan.start);
        }
        let plan = plans.iter().find(|p| {
            p.host == host && p.what < 4 && (p.start..p.start + p.length).contains(&address)
        })?;
        if !allowed(plan) {
            return None;
        }
        let there = plan.offset + (address - plan.start);
        match plan.what {
            0 => return Some((true, host, there)),
            1 => return Some((false, host, there)),
            step => (host, domain, address) = ((host + usize::from(step) - 1) % 3, Some(5), there),
        }
    }
    None
}

struct Parts {
    hosts: [HostId; 3],
    devices: [ComponentId; 3],
    ntbs: [ComponentId; 3],
}

fn parts(fabric: &Fabric) -> Parts {
    let names = ["a", "b", "c"];
    Parts {
        hosts: names.map(|n| host(fabric, n)),
        devices: names.map(|n| named(fabric, &format!("{n}/d"))),
        ntbs: names.map(|n| named(fabric, &format!("{n}/ntb"))),
    }
}

fn apply(fabric: &mut Fabric, parts: &Parts, plan: Plan) -> bool {
    let access = if plan.write { ALL } else { Access::READ };
    let Plan { host, start, length, offset, .. } = plan;
    let target = match plan.what {
        0 => AddressTarget::Memory { offset },
        1 => AddressTarget::Bar { device: parts.devices[host], bar: 0, offset },
        2 | 3 => {
            let peer = parts.ntbs[(host + usize::from(plan.what) - 1) % 3];
            AddressTarget::Window { ntb: parts.ntbs[host], peer, address: offset }
        }
        4 => return fabric.grant(parts.devices[host], start, length, access, offset).is_ok(),
        _ => return fabric.grant(parts.ntbs[host], start, length, access, offset).is_ok(),
    };
    fabric.map(parts.hosts[host], start, length, access, target).is_ok()
}

/// Neighbouring components of a path are joined, and nothing on it is only an end.
fn check_path(topology: &Topology, components: &[ComponentId], place: Place) {
    for pair in components.windows(2) {
        assert!(topology.link(pair[0], pair[1]).is_some(), "{pair:?} are not joined");
    }
    // A device that addresses itself goes nowhere: its path is one component long.
    for middle in components.iter().skip(1).take(components.len().saturating_sub(2)) {
        let kind = topology.component(*middle).kind;
        assert!(
            !matches!(kind, ComponentKind::Memory | ComponentKind::Device),
            "{kind} on the way"
        );
    }
    let end = *components.last().unwrap();
    match place {
        Place::Memory { host, .. } => assert_eq!(end, topology.host(host).memory),
        Place::Bar { device, .. } => assert_eq!(end, device),
        Place::Lent { .. } | Place::Interrupt { .. } | Place::Wired { .. } => {
            unreachable!("nothing of the kind is mapped")
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn resolve_follows_the_mappings_and_route_agrees(
        plans in prop::collection::vec(plans(), 0..24),
        iommu in any::<[bool; 3]>(),
    ) {
        let mut fabric = rack(iommu);
        let parts = parts(&fabric);
        let accepted: Vec<Plan> =
            plans.into_iter().filter(|plan| apply(&mut fabric, &parts, *plan)).collect();
        for who in 0..6 {
            let (index, is_device) = (who % 3, who >= 3);
            let (requester, domain) = match is_device {
                true => (Requester::Device(parts.devices[index]), Some(4)),
                false => (Requester::Cpu(parts.hosts[index]), None),
            };
            for address in 0..82 {
                for access in [Access::READ, ALL] {
                    let naive = follow(&accepted, iommu, index, domain, address, access);
                    let found = fabric.resolve(requester, address, 1, access);
                    let simple = found.ok().map(|found| match found.place {
                        Place::Memory { host, offset } => {
                            (true, parts.hosts.iter().position(|h| *h == host).unwrap(), offset)
                        }
                        Place::Bar { device, offset, .. } => {
                            (false, parts.devices.iter().position(|d| *d == device).unwrap(), offset)
                        }
                        other => unreachable!("{other:?} is not mapped"),
                    });
                    prop_assert_eq!(simple, naive, "{:?} {:#x}", requester, address);
                    match (found, fabric.route(requester, address, access)) {
                        (Ok(found), Ok(route)) => {
                            prop_assert_eq!(found.place, route.place);
                            check_path(fabric.topology(), route.path.components(), route.place);
                        }
                        (Err(one), Err(other)) => prop_assert_eq!(one, other),
                        (found, route) => prop_assert!(false, "{:?} but {:?}", found, route),
                    }
                }
            }
        }
    }

    /// A long access gets the bytes that follow each other, and each of them resolves by itself.
    #[test]
    fn the_length_is_what_lies_together(
        plans in prop::collection::vec(plans(), 0..24),
        address in 0u64..80,
        length in 1u64..64,
    ) {
        let mut fabric = rack([true, false, true]);
        let parts = parts(&fabric);
        plans.into_iter().for_each(|plan| { apply(&mut fabric, &parts, plan); });
        let requester = Requester::Device(parts.devices[0]);
        if let Ok(found) = fabric.resolve(requester, address, length, Access::READ) {
            prop_assert!((1..=length).contains(&found.length));
            for step in 0..found.length {
                let one = fabric.resolve(requester, address + step, 1, Access::READ).unwrap();
                let moved = match found.place {
                    Place::Memory { host, offset } => Place::Memory { host, offset: offset + step },
                    Place::Bar { device, bar, offset } => {
                        Place::Bar { device, bar, offset: offset + step }
                    }
                    other => unreachable!("{other:?} is not mapped"),
                };
                prop_assert_eq!(one.place, moved);
            }
        }
    }

    #[test]
    fn unmapping_leaves_nothing(plans in prop::collection::vec(plans(), 0..24)) {
        let mut fabric = rack([true, false, true]);
        let parts = parts(&fabric);
        let accepted: Vec<Plan> =
            plans.into_iter().filter(|plan| apply(&mut fabric, &parts, *plan)).collect();
        for plan in accepted {
            let Plan { host, start, length, .. } = plan;
            let gone = match plan.what {
                4 => fabric.withdraw(parts.devices[host], start, length).is_ok(),
                5 => fabric.withdraw(parts.ntbs[host], start, length).is_ok(),
                _ => fabric.unmap(parts.hosts[host], start, length).is_ok(),
            };
            prop_assert!(gone);
        }
        for index in 0..3 {
            for requester in [Requester::Cpu(parts.hosts[index]), Requester::Device(parts.devices[index])] {
                for address in 0..82 {
                    match fabric.resolve(requester, address, 1, Access::READ) {
                        Err(AccessError::Fault { fault, .. }) => {
                            prop_assert_eq!(fault.cause, FaultCause::NotMapped);
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
            }
        }
    }

    /// What is lent is reached, with its own rights, by the way that the topology tells; what is
    /// dropped, or ended from elsewhere, is not; and nothing is left of it.
    #[test]
    fn loans_are_reached_until_they_are_over(
        wishes in prop::collection::vec((0u64..200, 0u64..40, any::<bool>(), 0usize..3, 0u64..999), 1..30),
        order in any::<u64>(),
    ) {
        let fabric = FabricHandle::new(rack([true; 3]));
        let parts = fabric.with(parts);
        let (function, names) = (parts.devices[0], ["a", "b", "c"]);
        let requester = Requester::Device(function);
        let mut loans = Vec::new();
        for (iova, length, write, borrower, offset) in wishes {
            let access = if write { ALL } else { Access::READ };
            let lending = fabric.lending("a/d", names[borrower]).unwrap();
            if let Ok(loan) = lending.lend(iova, length, access, Some(File(7, offset))) {
                loans.push((loan, access, parts.hosts[borrower], offset));
            }
        }
        let mut order = order;
        while !loans.is_empty() {
            let reached = fabric.with(|fabric| fabric.reached("a/d")).unwrap();
            prop_assert_eq!(reached.len(), loans.len());
            for (loan, access, borrower, offset) in &loans {
                let (iova, length) = loan.range();
                for step in [0, length - 1] {
                    let found = fabric.with(|it| it.resolve(requester, iova + step, 1, *access)).unwrap();
                    let (host, object) = (*borrower, ObjectKey(0, 7));
                    let there = Place::Lent { host, object, offset: offset + step };
                    prop_assert_eq!(found.place, there);
                    let way = fabric.with(|fabric| {
                        let memory = fabric.topology().host(*borrower).memory;
                        fabric.topology().path(function, memory).unwrap()
                    });
                    prop_assert_eq!(fabric.with(|it| it.route(requester, iova + step, *access)).unwrap().path, way);
                }
                if *access == Access::READ {
                    prop_assert!(fabric.with(|it| it.resolve(requester, iova, 1, ALL)).is_err());
                }
                let listed = reached.iter().find(|it| it.address == iova).unwrap();
                prop_assert_eq!((listed.length, listed.access), (length, *access));
            }
            order = order.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let index = usize::try_from(order >> 33).unwrap() % loans.len();
            let (loan, ..) = loans.swap_remove(index);
            let (iova, _) = loan.range();
            match order & 1 {
                0 => drop(loan),
                _ => loan.ending().end(),
            }
            prop_assert!(fabric.with(|it| it.resolve(requester, iova, 1, Access::READ)).is_err());
        }
        fabric.with(|fabric| nothing_is_left(fabric, &parts));
    }
}

/// Memory by the number of its file.
#[derive(Debug)]
struct File(u64, u64);

impl LentMemory for File {
    fn object(&self) -> ObjectKey {
        ObjectKey(0, self.0)
    }

    fn offset(&self) -> u64 {
        self.1
    }
}

fn nothing_is_left(fabric: &Fabric, parts: &Parts) {
    for part in 0..3 {
        for requester in [parts.devices[part], parts.ntbs[part]] {
            assert!(fabric.domain(requester).is_none_or(|d| d.is_empty()));
        }
        assert!(fabric.space(parts.hosts[part]).is_none_or(|s| s.is_empty()));
    }
}

/// The hosts have 64 MiB each. What is lent twice counts once, whoever it is lent to.
#[test]
fn no_host_lends_more_than_its_memory() {
    let fabric = FabricHandle::new(rack([true; 3]));
    let (one, other) = (fabric.lending("a/d", "b").unwrap(), fabric.lending("c/d", "b").unwrap());
    let mib = 1 << 20;
    let low = one.lend(0, 40 * mib, ALL, Some(File(1, 0))).unwrap();
    let again = other.lend(0, 40 * mib, ALL, Some(File(1, 0))).unwrap();
    let overlapping = one.lend(64 * mib, 40 * mib, ALL, Some(File(1, 24 * mib))).unwrap();
    let error = other.lend(64 * mib, 4096, ALL, Some(File(2, 0))).unwrap_err();
    let (memory, lent) = (64 * mib, 64 * mib + 4096);
    assert_eq!(error, LoanError::TooMuch { host: "b".into(), memory, lent });
    let text = "b has 64 MiB of memory by the rack file, and 65540 KiB of it would be lent here \
                together";
    assert_eq!(error.to_string(), text);
    // Others have memory of their own.
    let own = fabric.lending("a/d", "a").unwrap();
    drop(own.lend(1 << 40, 64 * mib, ALL, Some(File(2, 0))).unwrap());
    // What another loan still covers is not free yet.
    drop(low);
    assert!(other.lend(64 * mib, 4096, ALL, Some(File(2, 0))).is_err());
    drop(again);
    assert!(other.lend(64 * mib, 24 * mib + 1, ALL, Some(File(2, 0))).is_err());
    drop(other.lend(64 * mib, 24 * mib, ALL, Some(File(2, 0))).unwrap());
    drop(overlapping);
    fabric.with(|fabric| nothing_is_left(fabric, &parts(fabric)));
}

#[test]
fn functions_of_a_host_without_iommu_are_lent_no_memory() {
    let fabric = FabricHandle::new(rack([false, true, true]));
    let text = "a has no IOMMU (iommu = false in the rack file), so nothing would bound what a/d \
                reaches there; no memory is lent to it";
    let lent = fabric.lending("a/d", "b").unwrap().lend(0, 4096, ALL, Some(File(1, 0)));
    assert_eq!(lent.unwrap_err().to_string(), text);
    // What its host lends to functions elsewhere, their hosts check, and a front there is one.
    drop(fabric.lending("b/d", "a").unwrap().lend(0, 4096, ALL, Some(File(1, 0))).unwrap());
    drop(fabric.front_lending("a/d", "b").unwrap().lend(0, 4096, ALL, Some(File(1, 0))).unwrap());
    assert!(fabric.front_lending("b/d", "a").unwrap().lend(0, 1, ALL, Some(File(1, 0))).is_err());
    fabric.with(|fabric| nothing_is_left(fabric, &parts(fabric)));
}

#[test]
fn segments_and_interrupts_are_reached_as_loans() {
    let fabric = FabricHandle::new(rack([true; 3]));
    let parts = fabric.with(parts);
    let [a, b, _] = parts.hosts;
    let segment = AddressTarget::Memory { offset: 8192 };
    let read = fabric.share(a, b, 4096, Access::READ, segment.clone()).unwrap();
    let own = fabric.share(b, b, 4096, ALL, segment.clone()).unwrap();
    let ring =
        fabric.share(a, b, 4, Access::WRITE, AddressTarget::Interrupt { number: 3, data: true });
    let ring = ring.unwrap();
    let places = |host| -> Vec<Place> {
        let reached = fabric.with(|fabric| fabric.reached(host)).unwrap();
        reached.iter().map(|it| it.route.place).collect()
    };
    let there = Place::Memory { host: b, offset: 8192 };
    let interrupt = Place::Interrupt { host: b, number: 3, data: true };
    assert_eq!((places("a"), places("b")), (vec![there, interrupt], vec![there]));
    assert!(fabric.with(|it| it.resolve(Requester::Cpu(a), read.range().0, 1, ALL)).is_err());
    let route =
        fabric.with(|it| it.route(Requester::Cpu(a), ring.range().0, Access::WRITE)).unwrap();
    fabric.with(|fabric| {
        let names = route.path.components().iter().map(|id| &fabric.topology().component(*id).name);
        assert_eq!(names.collect::<Vec<_>>(), ["a/root", "a/ntb", "shm", "b/ntb", "b/root"]);
    });
    let beyond = AddressTarget::Memory { offset: (64 << 20) - 4095 };
    assert!(fabric.share(a, b, 4096, ALL, beyond).is_err(), "a segment past the end of memory");
    drop((read, own, ring));
    fabric.with(|fabric| nothing_is_left(fabric, &parts));
}

/// The first loan of a host begins at address 0 there.
#[test]
fn a_loan_that_is_refused_leaves_the_others_of_its_host_in_sight() {
    let fabric = FabricHandle::new(rack([true; 3]));
    let [a, b, _] = fabric.with(parts).hosts;
    let segment = AddressTarget::Memory { offset: 0 };
    let own = fabric.share(a, a, 4096, ALL, segment).unwrap();
    assert_eq!(own.range().0, 0);
    let beyond = AddressTarget::Memory { offset: 64 << 20 };
    assert!(fabric.share(a, b, 4096, ALL, beyond).is_err());
    assert_eq!(fabric.with(|fabric| fabric.reached("a")).unwrap().len(), 1);
}

/// A host of any size: what it lends is counted exactly anyway.
#[test]
fn more_than_can_be_counted_is_refused_and_counts_for_nothing() {
    let lending = Lending::alone();
    let low = lending.lend(0, 4096, ALL, Some(File(1, 0))).unwrap();
    let most = 4096u64.wrapping_neg();
    let error = lending.lend(4096, most, ALL, Some(File(2, 0))).unwrap_err();
    assert!(matches!(error, LoanError::TooMuch { lent: u64::MAX, .. }), "{error}");
    drop(low);
    drop(lending.lend(0, most, ALL, Some(File(2, 0))).unwrap());
}

/// What a function may raise is a table apart from its IOMMU domain: no address that a driver maps is taken for it.
#[test]
fn interrupts_and_registers_of_a_function_are_loans_between_it_and_its_user() {
    let handle = FabricHandle::of_hosts(["alpha", "beta"]).unwrap();
    handle.add_function("alpha", "nvme0").unwrap();
    let lending = handle.lending("alpha/nvme0", "beta").unwrap();
    let [alpha, beta] = ["alpha", "beta"].map(|host| handle.host(host).unwrap());
    let device = handle.with(|fabric| fabric.topology().named("alpha/nvme0").unwrap());
    let third = FunctionInterrupt::Vector(3);
    let loans = [third, FunctionInterrupt::Pin].map(|it| lending.lend_interrupt(it).unwrap());
    assert!(lending.lend_interrupt(third).is_err(), "the same twice");
    let bar = lending.share_bar(2, (0x1000, 0x2000)).unwrap();
    let memory = lending.lend(third.place(), 0x1000, ALL, Some(File(7, 0))).unwrap();
    let reached = |name| handle.with(|fabric| fabric.reached(name).unwrap());
    let places = |name| reached(name).into_iter().map(|it| it.route.place).collect::<Vec<_>>();
    let wired = |interrupt| Place::Wired { host: beta, interrupt };
    let lent = Place::Lent { host: beta, object: ObjectKey(0, 7), offset: 0 };
    assert_eq!(places("alpha/nvme0"), [lent, wired(third), wired(FunctionInterrupt::Pin)]);
    assert_eq!(places("beta"), [Place::Bar { device, bar: 2, offset: 0x1000 }]);
    let hosts = reached("alpha/nvme0").iter().map(|it| it.route.path.components().len()).min();
    assert!(hosts > Some(3), "they pass the NTBs between the two hosts");
    drop(loans);
    assert_eq!(places("alpha/nvme0"), [lent]);
    drop((bar, memory));
    assert!(places("alpha/nvme0").is_empty() && places("beta").is_empty());
    handle.with(|fabric| {
        let entries = |host| fabric.space(host).map_or(0, |space| space.iter().count());
        assert_eq!((entries(alpha), entries(beta)), (0, 0));
    });
}
