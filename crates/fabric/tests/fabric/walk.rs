//! Random mappings: `resolve` and `route` against a naive walk, and what unmapping leaves.

use super::*;

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
}
