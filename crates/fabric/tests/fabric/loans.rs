//! Loans: reached as long as they last, counted against what their hosts may lend.

use super::*;

fn nothing_is_left(fabric: &Fabric, parts: &Parts) {
    for part in 0..3 {
        for requester in [parts.devices[part], parts.ntbs[part]] {
            assert!(fabric.domain(requester).is_none_or(|d| d.is_empty()));
        }
        assert!(fabric.space(parts.hosts[part]).is_none_or(|s| s.is_empty()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

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
