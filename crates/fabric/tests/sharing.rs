//! Rules and their changes against the plain reading of both: the newest change that fits, else the
//! first rule that fits.

use std::ops::RangeInclusive;

use proptest::prelude::*;
use rackbus_fabric::rack::{Rack, ShareAccess};
use rackbus_fabric::sharing::{MOST_CHANGES, Rules, TooManyChanges};

const HOSTS: [&str; 3] = ["alpha", "beta", "gamma"];

/// Few enough that all can be asked for, at both ends of what there is.
fn segments() -> impl Iterator<Item = u32> {
    (0..12).chain(u32::MAX - 11..=u32::MAX)
}

fn segment() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..12, (u32::MAX - 11)..=u32::MAX]
}

fn range() -> impl Strategy<Value = RangeInclusive<u32>> {
    (segment(), segment()).prop_map(|(a, b)| a.min(b)..=a.max(b))
}

fn access() -> impl Strategy<Value = ShareAccess> {
    prop_oneof![Just(ShareAccess::None), Just(ShareAccess::Read), Just(ShareAccess::Write)]
}

/// A rule in the file: owner, segments, host or all, access.
type Rule = (usize, RangeInclusive<u32>, Option<usize>, ShareAccess);

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = (0..HOSTS.len(), range(), prop::option::of(0..HOSTS.len()), access());
    prop::collection::vec(rule, 0..5)
}

#[derive(Debug, Clone)]
enum Change {
    Set(usize, RangeInclusive<u32>, usize, ShareAccess),
    Forget(usize, RangeInclusive<u32>),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let host = || 0..HOSTS.len();
    let set = (host(), range(), host(), access()).prop_map(|(o, r, h, a)| Change::Set(o, r, h, a));
    let forget = (host(), range()).prop_map(|(owner, range)| Change::Forget(owner, range));
    prop::collection::vec(prop_oneof![4 => set, 1 => forget], 0..12)
}

fn file(rules: &[Rule]) -> String {
    let mut text = "name = \"lab\"\n[hosts.alpha]\n[hosts.beta]\n[hosts.gamma]\n".to_owned();
    for (owner, range, with, access) in rules {
        let with = with.map_or("\"*\"".to_owned(), |host| format!("[\"{}\"]", HOSTS[host]));
        text += &format!(
            "[[share]]\nhost = \"{}\"\nsegments = \"{}-{:#x}\"\nwith = {with}\naccess = \"{}\"\n",
            HOSTS[*owner],
            range.start(),
            range.end(),
            access.word(),
        );
    }
    text
}

fn expected(
    rules: &[Rule],
    changes: &[Change],
    owner: usize,
    segment: u32,
    host: usize,
) -> ShareAccess {
    if owner == host {
        return ShareAccess::Write;
    }
    for change in changes.iter().rev() {
        match change {
            Change::Set(o, range, h, access)
                if (*o, *h) == (owner, host) && range.contains(&segment) =>
            {
                return *access;
            }
            Change::Forget(o, range) if *o == owner && range.contains(&segment) => break,
            _ => {}
        }
    }
    let mut of_owner = rules.iter().filter(|rule| rule.0 == owner).peekable();
    if of_owner.peek().is_none() {
        return ShareAccess::Write;
    }
    let fits = |rule: &&Rule| rule.1.contains(&segment) && rule.2.is_none_or(|with| with == host);
    of_owner.find(fits).map_or(ShareAccess::None, |rule| rule.3)
}

proptest! {
    #[test]
    fn the_newest_change_counts_and_then_the_first_rule(rules in rules(), changes in changes()) {
        let rack = Rack::parse("rack.toml", &file(&rules)).unwrap();
        let mut live = Rules::of(&rack);
        for change in &changes {
            match change {
                Change::Set(owner, range, host, access) => {
                    live.set(HOSTS[*owner], range.clone(), &[HOSTS[*host]], *access).unwrap();
                }
                Change::Forget(owner, range) => live.forget(HOSTS[*owner], range.clone()),
            }
        }
        for (owner, host) in (0..3).flat_map(|owner| (0..3).map(move |host| (owner, host))) {
            for segment in segments() {
                prop_assert_eq!(
                    live.allowed(HOSTS[owner], segment, HOSTS[host]),
                    expected(&rules, &changes, owner, segment, host),
                    "{} of {} for {}", segment, HOSTS[owner], HOSTS[host]
                );
            }
        }
        // Nothing is left of changes that are taken back.
        for owner in HOSTS {
            live.forget(owner, 0..=u32::MAX);
        }
        prop_assert_eq!(live, Rules::of(&rack));
    }
}

fn alpha_has(rules: &[Rule]) -> Rules {
    Rules::of(&Rack::parse("rack.toml", &file(rules)).unwrap())
}

#[test]
fn ranges_that_touch_and_allow_the_same_are_one() {
    for file in [vec![], vec![(0, 5..=7, Some(1), ShareAccess::Write)]] {
        let (mut parts, mut whole) = (alpha_has(&file), alpha_has(&file));
        for part in [0..=3, 8..=9, 4..=7, 10..=u32::MAX] {
            parts.set("alpha", part, &["beta"], ShareAccess::Read).unwrap();
        }
        whole.set("alpha", 0..=u32::MAX, &["beta"], ShareAccess::Read).unwrap();
        assert_eq!(parts, whole);
    }
}

#[test]
fn what_the_file_says_is_no_change() {
    let file = vec![(0, 5..=7, Some(1), ShareAccess::Write)];
    let mut live = alpha_has(&file);
    for (range, access) in [
        (5..=7, ShareAccess::Write),
        (0..=4, ShareAccess::None),
        (6..=6, ShareAccess::Read),
        (6..=6, ShareAccess::Write),
        (3..=9, ShareAccess::Read),
        // Cut away on either side, it says in the middle what the file does not.
        (3..=4, ShareAccess::None),
        (8..=9, ShareAccess::None),
        (5..=7, ShareAccess::Write),
    ] {
        live.set("alpha", range, &["beta", "alpha"], access).unwrap();
    }
    assert_eq!(live, alpha_has(&file));
}

#[test]
fn so_many_ranges_are_changed_for_a_host_and_no_more() {
    let mut live = alpha_has(&[]);
    let set = |live: &mut Rules, range: RangeInclusive<u32>, hosts: &[&str], access| {
        live.set("alpha", range, hosts, access)
    };
    for nth in 0..MOST_CHANGES as u32 {
        set(&mut live, 2 * nth..=2 * nth, &["beta"], ShareAccess::None).unwrap();
    }
    let before = live.clone();
    let next = 2 * MOST_CHANGES as u32;
    let refused = set(&mut live, next..=next, &["gamma", "beta"], ShareAccess::None);
    assert_eq!((refused, &live), (Err(TooManyChanges), &before), "for nobody");
    // One that is there may become longer or shorter, and all of them one.
    set(&mut live, next - 1..=next - 1, &["beta"], ShareAccess::None).unwrap();
    set(&mut live, 0..=0, &["beta"], ShareAccess::Write).unwrap();
    set(&mut live, next + 1..=next + 1, &["beta"], ShareAccess::None).unwrap();
    set(&mut live, 0..=u32::MAX, &["gamma", "beta"], ShareAccess::None).unwrap();
    let mut all = alpha_has(&[]);
    set(&mut all, 0..=u32::MAX, &["beta", "gamma"], ShareAccess::None).unwrap();
    assert_eq!(live, all);
}
