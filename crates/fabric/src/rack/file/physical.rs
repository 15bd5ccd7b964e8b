//! The physical fabric: parts, links and windows, which must not form loops.

use std::collections::{BTreeMap, BTreeSet};

use toml::Spanned;
use toml::de::DeValue;

use crate::rack::{Adapter, Cable, CxlMemory, Host, PAGE, PhysicalFabric, Switch, Window};
use crate::text::{Named, Parsed, Section, list, mismatch, subsection, wrong};
use crate::values::SIZES;

pub(super) fn fabric(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Parsed<PhysicalFabric> {
    let section =
        subsection(value, "fabric", &["adapters", "switches", "memories", "links", "windows"])?;
    let mut names: BTreeSet<String> = BTreeSet::new();
    for host in hosts {
        names.insert(host.name.clone());
        names.extend(host.devices.iter().map(|d| format!("{}/{}", host.name, d.function())));
    }
    let mut adapters = Vec::new();
    for entry in section.tables("adapters")? {
        let place = format!("adapter {}", entry.name);
        let part = Section::new(entry.table, entry.span.clone(), place, &["host"])?;
        let host = part.require("host", placed(&part, hosts)?, "write host = \"…\"")?;
        take_name(&mut names, &entry)?;
        adapters.push(Adapter { name: entry.name.to_owned(), host });
    }
    let mut switches = Vec::new();
    for entry in section.tables("switches")? {
        let place = format!("switch {}", entry.name);
        let part = Section::new(entry.table, entry.span.clone(), place, &["host", "cxl"])?;
        take_name(&mut names, &entry)?;
        let host = placed(&part, hosts)?;
        let cxl = part.truth("cxl")?.unwrap_or(false);
        if cxl && host.is_some() {
            let what = format!("the CXL switch {} is in a host", entry.name);
            return wrong(
                part.place("host"),
                what,
                "CXL switches are between hosts: leave `host` out",
            );
        }
        switches.push(Switch { name: entry.name.to_owned(), host, cxl });
    }
    let mut memories = Vec::new();
    for entry in section.tables("memories")? {
        let place = format!("memory {}", entry.name);
        let part = Section::new(entry.table, entry.span.clone(), place, &["size"])?;
        take_name(&mut names, &entry)?;
        let size = part.require("size", part.size("size", PAGE, u64::MAX / 2)?, SIZES)?;
        memories.push(CxlMemory { name: entry.name.to_owned(), size });
    }
    let links = match section.get("links") {
        Some(value) => {
            let links = links(value, &names)?;
            let outer: Vec<&str> = switches
                .iter()
                .filter(|switch: &&Switch| switch.host.is_none())
                .map(|switch| switch.name.as_str())
                .collect();
            refuse_loops(value, &links, &adapters, &outer)?;
            links
        }
        None => Vec::new(),
    };
    let windows = match section.get("windows") {
        Some(value) => windows(value, hosts)?,
        None => Vec::new(),
    };
    Ok(PhysicalFabric { adapters, switches, memories, links, windows })
}

/// The host that a part names as its own.
fn placed(part: &Section<'_>, hosts: &[Host]) -> Parsed<Option<String>> {
    let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let allowed = format!("`host` is one of {}", list(&known));
    match part.text("host", &allowed)? {
        Some((host, _)) if known.contains(&host) => Ok(Some(host.to_owned())),
        Some((host, span)) => wrong(span, format!("there is no host `{host}`"), allowed),
        None => Ok(None),
    }
}

fn take_name(names: &mut BTreeSet<String>, entry: &Named<'_>) -> Parsed<()> {
    match names.insert(entry.name.to_owned()) {
        true => Ok(()),
        false => wrong(
            entry.span.clone(),
            format!("`{}` names two parts", entry.name),
            "hosts, adapters, switches and memories have different names",
        ),
    }
}

/// A part in a hierarchy; of an NTB, the side that is towards other hosts is another than its host's.
type Side<'l> = (&'l str, bool);

/// The part that stands for all that a part hangs together with.
fn last<'l>(next: &BTreeMap<Side<'l>, Side<'l>>, mut part: Side<'l>) -> Side<'l> {
    while let Some(further) = next.get(&part) {
        part = *further;
    }
    part
}

/// A hierarchy of PCIe is a tree, and each side of an NTB is in one: what closes a loop there would only be
/// another way, and decide routes without a word. Cables from NTB to NTB are hierarchies of their own, and
/// join hosts that nothing else joins.
fn refuse_loops<'l>(
    value: &Spanned<DeValue<'_>>,
    links: &'l [Cable],
    adapters: &[Adapter],
    outer: &[&str],
) -> Parsed<()> {
    let is_adapter = |name: &str| adapters.iter().any(|adapter| adapter.name == name);
    let is_cable = |link: &Cable| link.ends.iter().all(|end| is_adapter(end));
    let mut next: BTreeMap<Side<'l>, Side<'l>> = BTreeMap::new();
    let mut cables: BTreeSet<[&'l str; 2]> = BTreeSet::new();
    let numbered = || links.iter().enumerate();
    let others = numbered().filter(|(_, link)| !is_cable(link));
    for (nth, link) in others.chain(numbered().filter(|(_, link)| is_cable(link))) {
        let [a, b] = link.ends.each_ref().map(String::as_str);
        let away = is_cable(link) || outer.contains(&a) || outer.contains(&b);
        let side = |name: &'l str| (name, is_adapter(name) && away);
        let (one, other) = (last(&next, side(a)), last(&next, side(b)));
        let twice = is_cable(link) && !cables.insert([a.min(b), a.max(b)]);
        if one == other || twice {
            let span = match value.get_ref() {
                DeValue::Array(entries) => entries.get(nth).map_or(value.span(), Spanned::span),
                _ => value.span(),
            };
            let what = format!("the link from {a} to {b} closes a loop");
            return wrong(span, what, "a PCIe hierarchy is a tree: join two parts in one way only");
        }
        if !is_cable(link) {
            next.insert(one, other);
        }
    }
    Ok(())
}

pub(super) fn windows(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Parsed<Vec<Window>> {
    let form = "write [[fabric.windows]] with host, at, size, to and address";
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("windows", value.get_ref()), form);
    };
    let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let named = |section: &Section<'_>, key| {
        let allowed = format!("`{key}` is one of {}", list(&known));
        let (name, span) = section.require(key, section.text(key, &allowed)?, form)?;
        if known.contains(&name) {
            return Ok(name.to_owned());
        }
        wrong(span, format!("there is no host `{name}`"), allowed)
    };
    let mut windows = Vec::new();
    for entry in entries.iter() {
        let keys = &["host", "at", "size", "to", "address"];
        let section = subsection(entry, "fabric.windows", keys)?;
        windows.push(Window {
            host: named(&section, "host")?,
            at: section.require("at", section.size("at", 0, u64::MAX / 2)?, SIZES)?,
            size: section.require("size", section.size("size", 1, u64::MAX / 2)?, SIZES)?,
            to: named(&section, "to")?,
            address: section.size("address", 0, u64::MAX / 2)?.unwrap_or(0),
        });
    }
    Ok(windows)
}

pub(super) fn links(value: &Spanned<DeValue<'_>>, names: &BTreeSet<String>) -> Parsed<Vec<Cable>> {
    let form = "write [[fabric.links]] with ends = [\"A\", \"B\"], generation and lanes";
    let DeValue::Array(entries) = value.get_ref() else {
        return wrong(value.span(), mismatch("links", value.get_ref()), form);
    };
    let mut links = Vec::new();
    for entry in entries.iter() {
        let keys = &["ends", "generation", "lanes", "length"];
        let section = subsection(entry, "fabric.links", keys)?;
        let ends = section.require("ends", section.get("ends"), form)?;
        let DeValue::Array(pair) = ends.get_ref() else {
            return wrong(ends.span(), mismatch("ends", ends.get_ref()), form);
        };
        let mut found = Vec::new();
        for end in pair.iter() {
            match end.get_ref() {
                DeValue::String(name) if names.contains(name.as_ref()) => {
                    found.push(name.to_string());
                }
                DeValue::String(name) => {
                    let known: Vec<&str> = names.iter().map(String::as_str).collect();
                    let allowed = format!("an end is one of {}", list(&known));
                    return wrong(end.span(), format!("there is no `{name}`"), allowed);
                }
                other => return wrong(end.span(), mismatch("ends", other), form),
            }
        }
        let ends: [String; 2] = match found.try_into() {
            Ok(pair) => pair,
            Err(_) => return wrong(ends.span(), "`ends` does not name two", form),
        };
        if ends[0] == ends[1] {
            return wrong(entry.span(), format!("a link from {0} to {0}", ends[0]), form);
        }
        links.push(Cable {
            ends,
            generation: section.choice("generation", &[1, 2, 3, 4, 5, 6])?.unwrap_or(3),
            lanes: section.choice("lanes", &[1, 2, 4, 8, 16])?.unwrap_or(8),
            length: section.length("length", 1_000_000)?,
        });
    }
    Ok(links)
}
