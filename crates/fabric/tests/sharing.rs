//! Rules and their changes against the plain reading of both: the newest change that fits, else the
//! first rule that fits.

use std::ops::RangeInclusive;

use proptest::prelude::*;
use rackbus_fabric::rack::{Rack, ShareAccess};
use rackbus_fabric::sharing::Rules;

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
                    live.set(HOSTS[*owner], range.clone(), HOSTS[*host], *access);
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
