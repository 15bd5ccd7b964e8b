//! The domain against a list of intervals in 128-bit arithmetic, where nothing wraps.

use proptest::prelude::*;
use rackbus_fabric::{Access, Domain, DomainMapError, FaultCause};

/// One past the last address.
const END: u128 = 1 << 64;

#[derive(Debug, Clone, Copy)]
enum Step {
    Map(u64, u64, Access),
    /// Unmaps a range that may or may not be mapped.
    Unmap(u64, u64),
    /// Unmaps whatever is inside of a range.
    UnmapWithin(u64, u64),
    /// Unmaps the nth mapping there is.
    UnmapNth(usize),
    Resolve(u64, u64, Access),
    Clear,
}

#[derive(Debug, Clone, Copy)]
struct Interval {
    start: u128,
    end: u128,
    access: Access,
    target: usize,
}

fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..48, (u64::MAX - 48)..=u64::MAX, (1u64 << 40)..(1 << 40) + 48, any::<u64>()]
}

fn lengths() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..24, 1 => Just(u64::MAX), 1 => Just(1u64 << 63), 1 => any::<u64>()]
}

fn accesses() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::READ), Just(Access::WRITE), Just(Access::READ | Access::WRITE)]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (addresses(), lengths(), accesses()).prop_map(|(a, l, x)| Step::Map(a, l, x)),
        1 => (addresses(), lengths()).prop_map(|(a, l)| Step::Unmap(a, l)),
        2 => (addresses(), lengths()).prop_map(|(a, l)| Step::UnmapWithin(a, l)),
        2 => (0usize..8).prop_map(Step::UnmapNth),
        6 => (addresses(), lengths(), accesses()).prop_map(|(a, l, x)| Step::Resolve(a, l, x)),
        1 => Just(Step::Clear),
    ]
}

/// What the interval list says of an access: target, offset and length, or the cause of a fault.
fn expected(
    model: &[Interval],
    address: u64,
    length: u64,
    access: Access,
) -> Result<(usize, u64, u64), FaultCause> {
    let (start, end) = (u128::from(address), u128::from(address) + u128::from(length));
    if length == 0 {
        return Err(FaultCause::Empty);
    }
    if end > END {
        return Err(FaultCause::Wraps);
    }
    let hit = model.iter().find(|m| m.start <= start && start < m.end);
    let hit = hit.ok_or(FaultCause::NotMapped)?;
    if !hit.access.contains(access) {
        return Err(FaultCause::Denied);
    }
    let narrow = |wide: u128| u64::try_from(wide).expect("it is less than an address");
    Ok((hit.target, narrow(start - hit.start), narrow(end.min(hit.end) - start)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_domain_behaves_as_a_list_of_intervals(steps in prop::collection::vec(steps(), 1..60)) {
        let mut domain = Domain::new();
        let mut model: Vec<Interval> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Map(start, length, access) => {
                    let (from, to) = (u128::from(start), u128::from(start) + u128::from(length));
                    let overlaps = model.iter().any(|m| m.start < to && from < m.end);
                    let outcome = domain.map(start, length, access, number);
                    match outcome {
                        Err(DomainMapError::Empty { .. }) => prop_assert_eq!(length, 0),
                        Err(DomainMapError::Wraps { .. }) => prop_assert!(to > END),
                        Err(DomainMapError::Overlaps { .. }) => prop_assert!(overlaps),
                        Ok(()) => {
                            prop_assert!(length > 0 && to <= END && !overlaps);
                            model.push(Interval { start: from, end: to, access, target: number });
                        }
                    }
                }
                Step::Unmap(start, length) => {
                    let (from, to) = (u128::from(start), u128::from(start) + u128::from(length));
                    let known = model.iter().position(|m| m.start == from && m.end == to);
                    let known = known.map(|index| model.remove(index).target);
                    prop_assert_eq!(domain.unmap(start, length).ok(), known);
                }
                Step::UnmapWithin(start, length) => {
                    let (from, to) = (u128::from(start), u128::from(start) + u128::from(length));
                    let touches = |m: &Interval| m.start < to && from < m.end;
                    let inside = |m: &Interval| from <= m.start && m.end <= to;
                    let good = length > 0 && to <= END && model.iter().any(touches);
                    let good = good && model.iter().filter(|m| touches(m)).all(inside);
                    let outcome = domain.unmap_within(start, length);
                    prop_assert_eq!(outcome.is_ok(), good);
                    if let Ok(targets) = outcome {
                        model.sort_by_key(|m| m.start);
                        let gone = model.extract_if(.., |m| inside(m)).map(|m| m.target);
                        prop_assert_eq!(targets, gone.collect::<Vec<_>>());
                    }
                }
                Step::UnmapNth(index) if index < model.len() => {
                    let gone = model.remove(index);
                    let length = u64::try_from(gone.end - gone.start);
                    if let (Ok(start), Ok(length)) = (u64::try_from(gone.start), length) {
                        prop_assert_eq!(domain.unmap(start, length), Ok(gone.target));
                        let after = domain.resolve(start, 1, Access::empty());
                        prop_assert_eq!(after.map_err(|f| f.cause), Err(FaultCause::NotMapped));
                    }
                }
                Step::UnmapNth(_) => {}
                Step::Resolve(address, length, access) => {
                    let found = domain.resolve(address, length, access);
                    let found = found.map(|h| (*h.target, h.offset, h.length)).map_err(|f| f.cause);
                    prop_assert_eq!(found, expected(&model, address, length, access));
                }
                Step::Clear => {
                    model.sort_by_key(|m| m.start);
                    let all: Vec<usize> = model.drain(..).map(|m| m.target).collect();
                    prop_assert_eq!(domain.clear(), all);
                    prop_assert!(domain.is_empty());
                }
            }
            if let Some(start) = domain.gap(16, 24) {
                prop_assert!(start >= 16);
                prop_assert!(domain.check(start, 24).is_ok());
            }
            prop_assert_eq!(domain.len(), model.len());
            let sorted = domain.iter().zip(domain.iter().skip(1)).all(|(a, b)| a.last < b.start);
            prop_assert!(sorted);
        }
    }
}

#[test]
fn a_mapping_may_end_with_the_address_space_and_not_go_on() {
    let mut domain = Domain::new();
    assert!(domain.map(u64::MAX - 15, 16, Access::READ, ()).is_ok());
    assert_eq!(domain.resolve(u64::MAX, 1, Access::READ).map(|h| h.length), Ok(1));
    let wraps = domain.resolve(u64::MAX, 2, Access::READ).unwrap_err();
    assert_eq!(wraps.cause, FaultCause::Wraps);
    assert!(matches!(
        domain.map(u64::MAX - 40, 42, Access::READ, ()),
        Err(DomainMapError::Wraps { .. })
    ));
}
