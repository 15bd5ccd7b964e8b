//! Ways through published topologies and through windows, and what leads nowhere.

use super::*;

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
