//! Who may use whose segments: the rack file's rules, and what was changed since.
//!
//! A host may always use its own. Where the file has no rule for an owner, every other host may use
//! that owner's segments; where it has one or more, the first that fits counts, and what none fits
//! is refused. What is changed at run time, for one host at a time, comes before the file, and stays when whoever changed
//! it is gone: the ranges of each host are kept as few as they can be, and are bounded.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::rack::{Rack, ShareAccess, ShareRule, With};

/// Ranges in which what one host may do with another one's segments was changed, at most.
pub const MOST_CHANGES: usize = 4096;

/// A change that is refused, because what one host may do would be another in more ranges than are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the rules for one host were changed in {MOST_CHANGES} separate ranges of segments; change larger ranges, or allow again \
     what the rack file allows"
)]
pub struct TooManyChanges;

/// The rules of a rack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    file: Vec<ShareRule>,
    /// By owner and host. Newer changes have cut what they cover out of older ones.
    changes: BTreeMap<Pair, Changes>,
}

/// An owner, and a host that may use its segments.
type Pair = (String, String);

/// Ranges that do not overlap, nor touch where they allow the same: by its first segment, each one's last, and what is
/// allowed. None of them says in all of it what the file says.
type Changes = BTreeMap<u32, (u32, ShareAccess)>;

impl Rules {
    /// The rules of a rack's file, with nothing changed.
    pub fn of(rack: &Rack) -> Rules {
        Rules { file: rack.shares.clone(), changes: BTreeMap::new() }
    }

    /// What `host` may do with that segment of `owner`'s.
    pub fn allowed(&self, owner: &str, segment: u32, host: &str) -> ShareAccess {
        if owner == host {
            return ShareAccess::Write;
        }
        let changes = self.changes.get(&(owner.to_owned(), host.to_owned()));
        match changes.and_then(|changes| around(changes, segment)) {
            Some((.., access)) => access,
            None => self.in_file(owner, segment, host),
        }
    }

    fn in_file(&self, owner: &str, segment: u32, host: &str) -> ShareAccess {
        let mut none = ShareAccess::Write;
        for rule in self.file.iter().filter(|rule| rule.owner == owner) {
            let covers = rule.segments.iter().any(|range| range.contains(&segment));
            if covers && rule.with.includes(host) {
                return rule.access;
            }
            none = ShareAccess::None;
        }
        none
    }

    /// Whether `host` may use anything of `owner`'s at all.
    pub fn allows_any(&self, owner: &str, host: &str) -> bool {
        // What is allowed changes only where a rule or a change begins or has ended.
        let changes = self.changes.get(&(owner.to_owned(), host.to_owned()));
        let changed =
            changes.into_iter().flatten().flat_map(|(first, (last, _))| ends(*first, *last));
        std::iter::once(0)
            .chain(self.borders(owner))
            .chain(changed)
            .any(|segment| self.allowed(owner, segment, host) != ShareAccess::None)
    }

    /// The segments of an owner at which what the file allows may be another than just before.
    fn borders(&self, owner: &str) -> impl Iterator<Item = u32> {
        let rules = self.file.iter().filter(move |rule| rule.owner == owner);
        rules.flat_map(|rule| &rule.segments).flat_map(|it| ends(*it.start(), *it.end()))
    }

    /// What the file lets a host do with all of these segments, if that is one and the same.
    fn all_in_file(
        &self,
        (owner, host): &Pair,
        segments: &RangeInclusive<u32>,
    ) -> Option<ShareAccess> {
        let access = self.in_file(owner, *segments.start(), host);
        let mut borders = self.borders(owner).filter(|at| segments.contains(at));
        borders.all(|at| self.in_file(owner, at, host) == access).then_some(access)
    }

    /// Allows `hosts` so much of these segments of `owner`'s from now on, whatever was said before.
    ///
    /// # Errors
    /// When one of them would have more than [`MOST_CHANGES`] ranges; nothing is changed then.
    pub fn set(
        &mut self,
        owner: &str,
        segments: RangeInclusive<u32>,
        hosts: &[&str],
        access: ShareAccess,
    ) -> Result<(), TooManyChanges> {
        if segments.is_empty() {
            return Ok(());
        }
        let others = hosts.iter().filter(|host| **host != owner);
        let changed = |host: &&str| {
            let pair = (owner.to_owned(), (*host).to_owned());
            let changes = self.changed(&pair, &segments, access);
            (changes.len() <= MOST_CHANGES).then_some((pair, changes)).ok_or(TooManyChanges)
        };
        let changed = others.map(changed).collect::<Result<Vec<_>, _>>()?;
        self.changes.extend(changed);
        self.changes.retain(|_, changes| !changes.is_empty());
        Ok(())
    }

    /// The changes for a host, with one more.
    fn changed(&self, pair: &Pair, segments: &RangeInclusive<u32>, access: ShareAccess) -> Changes {
        let mut changes = self.changes.get(pair).cloned().unwrap_or_default();
        cut(&mut changes, segments);
        let (mut first, mut last) = (*segments.start(), *segments.end());
        let beside = [first.checked_sub(1), last.checked_add(1)];
        for (start, end, allowed) in beside.map(|at| around(&changes, at?)).into_iter().flatten() {
            if allowed == access {
                changes.remove(&start);
                (first, last) = (first.min(start), last.max(end));
            }
        }
        changes.insert(first, (last, access));
        // What is left of a range that was cut may say what the file says as well.
        let [before, behind] = beside;
        for at in [before, Some(first), behind].into_iter().flatten() {
            let Some((start, end, allowed)) = around(&changes, at) else { continue };
            if self.all_in_file(pair, &(start..=end)) == Some(allowed) {
                changes.remove(&start);
            }
        }
        changes
    }

    /// Takes back what was changed for these segments of `owner`'s: the file's rules count again.
    pub fn forget(&mut self, owner: &str, segments: RangeInclusive<u32>) {
        if segments.is_empty() {
            return;
        }
        for (_, changes) in self.changes.iter_mut().filter(|((name, _), _)| name == owner) {
            cut(changes, &segments);
        }
        self.changes.retain(|_, changes| !changes.is_empty());
    }
}

/// Segments as people write them: `*` for all, an id (`4711`, `0x1267`), or a range (`0x100-0x1ff`),
/// which may be empty. `None` when it is none of these.
pub fn segment_range(text: &str) -> Option<RangeInclusive<u32>> {
    if text == "*" {
        return Some(0..=u32::MAX);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    segment(first.trim()).zip(segment(last.trim())).map(|(first, last)| first..=last)
}

/// A segment id as programs print them: `4711` or `0x1267`.
fn segment(text: &str) -> Option<u32> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // The parser would take a sign.
    let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u32::from_str_radix(digits, radix).ok().filter(|_| plain)
}

impl With {
    /// Whether `host` is meant.
    pub fn includes(&self, host: &str) -> bool {
        match self {
            With::All => true,
            With::Hosts(names) => names.iter().any(|name| name == host),
        }
    }
}

/// Where something begins, and where it has ended, if there is anything behind it.
fn ends(first: u32, last: u32) -> impl Iterator<Item = u32> {
    [Some(first), last.checked_add(1)].into_iter().flatten()
}

/// The range that has a segment: its first and its last, and what is allowed.
fn around(changes: &Changes, segment: u32) -> Option<(u32, u32, ShareAccess)> {
    let (first, (last, access)) = changes.range(..=segment).next_back()?;
    (segment <= *last).then_some((*first, *last, *access))
}

/// Takes `segments` out of every change; what a change has on either side of them stays.
fn cut(changes: &mut Changes, segments: &RangeInclusive<u32>) {
    let (first, last) = (*segments.start(), *segments.end());
    let touched: Vec<u32> = changes
        .range(..=last)
        .rev()
        .take_while(|(_, (end, _))| *end >= first)
        .map(|(start, _)| *start)
        .collect();
    for start in touched {
        let Some((end, access)) = changes.remove(&start) else { continue };
        if start < first {
            changes.insert(start, (first - 1, access));
        }
        if end > last {
            changes.insert(last + 1, (end, access));
        }
    }
}
