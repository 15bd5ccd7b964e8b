//! Who may use whose segments: the rack file's rules, and what was changed since.
//!
//! A host may always use its own. Where the file has no rule for an owner, every other host may use
//! that owner's segments; where it has one or more, the first that fits counts, and what none fits
//! is refused. What is changed at run time, for one host at a time, comes before the file.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::rack::{Rack, ShareAccess, ShareRule, With};

/// The rules of a rack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    file: Vec<ShareRule>,
    /// By owner and host. Newer changes have cut what they cover out of older ones.
    changes: BTreeMap<(String, String), Changes>,
}

/// Ranges that do not overlap: by its first segment, each one's last, and what is allowed.
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
        let change = changes.and_then(|changes| changes.range(..=segment).next_back());
        match change {
            Some((_, (last, access))) if segment <= *last => *access,
            _ => self.in_file(owner, segment, host),
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
        let rules = self.file.iter().filter(|rule| rule.owner == owner);
        let in_file = rules.flat_map(|rule| &rule.segments).map(|it| (*it.start(), *it.end()));
        let changes = self.changes.get(&(owner.to_owned(), host.to_owned()));
        let changed = changes.into_iter().flatten().map(|(first, (last, _))| (*first, *last));
        let borders =
            in_file.chain(changed).flat_map(|(first, last)| [Some(first), last.checked_add(1)]);
        std::iter::once(0)
            .chain(borders.flatten())
            .any(|segment| self.allowed(owner, segment, host) != ShareAccess::None)
    }

    /// Allows `host` so much of these segments of `owner`'s from now on, whatever was said before.
    pub fn set(
        &mut self,
        owner: &str,
        segments: RangeInclusive<u32>,
        host: &str,
        access: ShareAccess,
    ) {
        if segments.is_empty() {
            return;
        }
        let changes = self.changes.entry((owner.to_owned(), host.to_owned())).or_default();
        cut(changes, &segments);
        changes.insert(*segments.start(), (*segments.end(), access));
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
