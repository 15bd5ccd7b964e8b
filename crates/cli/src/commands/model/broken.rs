//! What if it breaks: a rack without some of its parts, or with a link at half its width.
//!
//! What moved over a part that is gone is not asked for any more, and is told: the others' answer is what
//! matters then.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use super::Source;
use super::variants::{is_joined_by_cables, table as parse};
use crate::output::Failure;

const ENDS: &str = "name a link as A,B, with the names of the rack file";

/// Takes `parts` out of a rack file: hosts, devices, adapters, switches and CXL memories, with their links. What was
/// joined to its host through them goes too, and is named: without a link of its own it would count as joined directly.
pub fn without(rack: &Source, parts: &[String]) -> Result<(Source, Vec<String>), Failure> {
    let mut table = parse(rack)?;
    let (before, by_cables) = (joined(&table), is_joined_by_cables(&table));
    leave_timing(&mut table);
    let whole = table.clone();
    for part in parts {
        // It may have gone with another.
        if !remove(&mut table, part) && !remove(&mut whole.clone(), part) {
            let error = format!(
                "{}: there is no host, device, adapter, switch or CXL memory `{part}`",
                rack.name
            );
            return Err(Failure::usage(error, "name a part of the rack file"));
        }
    }
    let after = joined(&table);
    let cut = before.difference(&after).filter(|part| remove(&mut table, part)).cloned();
    let cut: Vec<String> = cut.collect();
    if by_cables && !is_joined_by_cables(&table) {
        keep_apart(&mut table);
    }
    Ok((rack.changed(table.to_string(), &format!("without {}", parts.join(", "))), cut))
}

/// Drops what says nothing of timing, and may name hosts and functions that go.
fn leave_timing(table: &mut Table) {
    for section in ["share", "composition", "network"] {
        table.remove(section);
    }
    let hosts = table.get_mut("hosts").and_then(Value::as_table_mut).into_iter().flatten();
    hosts.filter_map(|(_, host)| host.as_table_mut()).for_each(|host| drop(host.remove("ntb")));
}

/// Adds a switch that leads nowhere: hosts count as joined by shared memory where a file tells of no cables at all, and
/// those that lost theirs are not.
fn keep_apart(table: &mut Table) {
    let is_host = |name: &str| table.get("hosts").is_some_and(|hosts| hosts.get(name).is_some());
    let mut name = "gone".to_owned();
    while is_host(&name) {
        name.push('-');
        name.push('0');
    }
    let fabric = table.get_mut("fabric").and_then(Value::as_table_mut);
    let Some(fabric) = fabric else { return };
    let switches = fabric.entry("switches").or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(switches) = switches {
        switches.insert(name, Value::Table(Table::new()));
    }
}

/// The parts that written links of their host's own parts join to it.
fn joined(table: &Table) -> BTreeSet<String> {
    let section = |name: &str| table.get(name).and_then(Value::as_table);
    let fabric = section("fabric");
    let mut hosts: BTreeMap<String, String> = BTreeMap::new();
    for (host, of) in section("hosts").into_iter().flatten() {
        hosts.insert(host.clone(), host.clone());
        let devices = of.get("devices").and_then(Value::as_table).into_iter().flatten();
        hosts.extend(devices.map(|(device, _)| (format!("{host}/{device}"), host.clone())));
    }
    for kind in ["adapters", "switches"] {
        let parts = fabric.and_then(|fabric| fabric.get(kind)?.as_table()).into_iter().flatten();
        let own = |(name, of): (&String, &Value)| {
            Some((name.clone(), of.get("host")?.as_str()?.to_owned()))
        };
        hosts.extend(parts.filter_map(own));
    }
    let links = fabric.and_then(|fabric| fabric.get("links")?.as_array()).into_iter().flatten();
    let links: Vec<Vec<String>> = links.map(ends_of).collect();
    let mut found: BTreeSet<String> =
        hosts.iter().filter(|(name, host)| name == host).map(|(name, _)| name.clone()).collect();
    loop {
        let reached = |ends: &&Vec<String>| {
            let own = ends.iter().all(|end| hosts.get(end).is_some_and(|h| h == &hosts[&ends[0]]));
            own && ends.iter().any(|end| found.contains(end))
        };
        let more: BTreeSet<String> = links.iter().filter(reached).flatten().cloned().collect();
        if more.is_subset(&found) {
            return found;
        }
        found.extend(more);
    }
}

/// Halves the lanes of links, each named by its ends.
pub fn degrade(rack: &Source, links: &[String]) -> Result<Source, Failure> {
    let mut table = parse(rack)?;
    for link in links {
        // Answers name root complexes, and rack files their hosts.
        let host = |end: &'_ str| end.trim().trim_end_matches("/root").to_owned();
        let wanted: Vec<String> = link.split(',').map(host).collect();
        let found = entries(&mut table).iter_mut().find(|entry| {
            let ends = ends_of(entry);
            wanted.len() == 2
                && ends.len() == 2
                && wanted.iter().all(|end| ends.iter().any(|e| e == end))
        });
        let Some(Value::Table(entry)) = found else {
            let error = format!("{}: [[fabric.links]] has no link `{link}`", rack.name);
            return Err(Failure::usage(error, ENDS));
        };
        let lanes = entry.get("lanes").and_then(Value::as_integer).unwrap_or(8);
        if lanes < 2 {
            let error = format!("the link `{link}` has one lane");
            return Err(Failure::usage(error, "take it out with --without one of its ends"));
        }
        entry.insert("lanes".to_owned(), Value::Integer(lanes / 2));
    }
    Ok(rack.changed(table.to_string(), &format!("with {} at half width", links.join("; "))))
}

/// Takes the flows out of a workload that need one of `parts`; gives their names.
pub fn idle(workload: &Source, parts: &[String]) -> Result<(Source, Vec<String>), Failure> {
    let mut table = parse(workload)?;
    let shaped = unshape(&mut table, parts);
    let flows = table.get("flows").and_then(Value::as_table).into_iter().flatten();
    let needs = |flow: &Value| parts.iter().any(|part| moves(flow, part));
    let gone = flows.filter(|(_, flow)| needs(flow)).map(|(name, _)| name.clone());
    let gone: Vec<String> = gone.collect();
    let left = if shaped {
        workload.changed(table.to_string(), "without what shapes and is gone")
    } else {
        workload.clone()
    };
    Ok((leave_out(&left, &gone)?, gone))
}

/// Takes flows out of a workload, and tenants that have none any more.
pub fn leave_out(workload: &Source, gone: &[String]) -> Result<Source, Failure> {
    if gone.is_empty() {
        return Ok(workload.clone());
    }
    let mut table = parse(workload)?;
    if let Some(Value::Table(flows)) = table.get_mut("flows") {
        gone.iter().for_each(|name| drop(flows.remove(name)));
        if flows.is_empty() {
            let error = format!("every flow needs what is gone: {}", gone.join(", "));
            return Err(Failure::usage(error, "without it, nothing of this workload moves"));
        }
    }
    unshape(&mut table, &[]);
    Ok(workload.changed(table.to_string(), "without the flows that need what is gone"))
}

/// Takes what shapes and is gone out of a workload, and tenants that have no flow any more; whether there was any.
fn unshape(table: &mut Table, parts: &[String]) -> bool {
    let flows = table.get("flows").and_then(Value::as_table).into_iter().flatten();
    let tenants = flows.filter_map(|(_, flow)| Some(flow.get("tenant")?.as_str()?.to_owned()));
    let tenants: Vec<String> = tenants.collect();
    let Some(Value::Table(shaping)) = table.get_mut("shaping") else { return false };
    let before = shaping.clone();
    shaping.retain(|name, _| !parts.iter().any(|part| is_in(name, part)));
    for of in shaping.iter_mut().filter_map(|(_, of)| of.as_table_mut()) {
        of.retain(|tenant, _| tenants.iter().any(|name| name == tenant));
    }
    *shaping != before
}

fn entries(table: &mut Table) -> &mut [Value] {
    let links = table.get_mut("fabric").and_then(|fabric| fabric.get_mut("links"));
    links.and_then(Value::as_array_mut).map_or(&mut [], |links| links.as_mut_slice())
}

fn ends_of(entry: &Value) -> Vec<String> {
    let ends = entry.get("ends").and_then(Value::as_array).into_iter().flatten();
    ends.filter_map(|end| end.as_str().map(str::to_owned)).collect()
}

/// Whether a name is that of a part, or of something in it: a host's device or address, a device's function.
fn is_in(name: &str, part: &str) -> bool {
    name == part || name.strip_prefix(part).is_some_and(|rest| rest.starts_with(['/', '@', '.']))
}

/// What of a flow, or of a step of one, names parts; other texts may have the same letters: a tenant, a kind, a file.
const PARTS: &[&str] = &["from", "to", "by", "host", "device", "members"];

/// Whether a flow, or a step of one, names a part as one that it needs.
fn moves(flow: &Value, part: &str) -> bool {
    match flow {
        Value::Array(steps) => steps.iter().any(|step| moves(step, part)),
        Value::Table(table) => table.iter().any(|(key, value)| match value {
            Value::Array(_) | Value::Table(_) if key != "members" => moves(value, part),
            value => PARTS.contains(&key.as_str()) && names(value, part),
        }),
        _ => false,
    }
}

/// Whether a value names a part, at whatever depth.
fn names(value: &Value, part: &str) -> bool {
    match value {
        Value::String(text) => is_in(text, part),
        Value::Array(items) => items.iter().any(|item| names(item, part)),
        Value::Table(table) => table.values().any(|value| names(value, part)),
        _ => false,
    }
}

fn remove(table: &mut Table, part: &str) -> bool {
    let mut found = false;
    if let Some(Value::Table(hosts)) = table.get_mut("hosts") {
        match part.split_once('/') {
            None => found |= hosts.remove(part).is_some(),
            Some((host, device)) => {
                let devices = hosts.get_mut(host).and_then(|host| host.get_mut("devices"));
                let devices = devices.and_then(Value::as_table_mut);
                found |= devices.is_some_and(|devices| devices.remove(device).is_some());
            }
        }
    }
    let mut gone = vec![part.to_owned()];
    if let Some(Value::Table(fabric)) = table.get_mut("fabric") {
        for kind in ["adapters", "switches", "memories"] {
            let Some(Value::Table(parts)) = fabric.get_mut(kind) else { continue };
            found |= parts.remove(part).is_some();
            // What is in a host goes with it.
            let own = |value: &Value| value.get("host").and_then(Value::as_str) == Some(part);
            let with = parts.iter().filter(|(_, value)| own(value)).map(|(name, _)| name.clone());
            let with: Vec<String> = with.collect();
            with.iter().for_each(|name| drop(parts.remove(name)));
            gone.extend(with);
        }
        let meets = |entry: &Value| {
            ends_of(entry).iter().any(|end| gone.iter().any(|part| is_in(end, part)))
        };
        if let Some(Value::Array(links)) = fabric.get_mut("links") {
            links.retain(|entry| !meets(entry));
        }
        if let Some(Value::Array(windows)) = fabric.get_mut("windows") {
            windows.retain(|window| !gone.iter().any(|part| names(window, part)));
        }
    }
    if let Some(Value::Table(timing)) = table.get_mut("timing") {
        for kind in ["parts", "hosts"] {
            if let Some(Value::Table(parts)) = timing.get_mut(kind) {
                parts.retain(|name, _| !gone.iter().any(|part| is_in(name, part)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const RACK: &str = "name = \"lab\"\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[hosts.b]\n\
                        [fabric.adapters.a-ntb]\nhost = \"a\"\n[fabric.adapters.b-ntb]\nhost = \"b\"\n\
                        [[fabric.links]]\nends = [\"a\", \"a/gpu0\"]\nlanes = 16\n\
                        [[fabric.links]]\nends = [\"a-ntb\", \"b-ntb\"]\n\
                        [timing.parts.\"a/gpu0\"]\ntags = 3\n";

    fn rack() -> Source {
        Source { name: "rack.toml".into(), text: RACK.into(), ..Source::default() }
    }

    #[test]
    fn a_part_goes_with_its_links_and_what_is_in_it() {
        let left = without(&rack(), &["a/gpu0".to_owned()]).unwrap().0.text;
        assert!(!left.contains("gpu0") && left.contains("a-ntb"), "{left}");
        let left = without(&rack(), &["a".to_owned()]).unwrap().0.text;
        assert!(
            !left.contains("gpu0") && !left.contains("a-ntb") && left.contains("b-ntb"),
            "{left}"
        );
        assert!(without(&rack(), &["c".to_owned()]).is_err());
    }

    #[test]
    fn what_is_behind_a_switch_of_a_host_goes_with_it() {
        let text = "[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[hosts.a.devices.gpu1]\nkind = \"gpu\"\n\
                    [fabric.adapters.a-ntb]\nhost = \"a\"\n[fabric.switches.sw]\nhost = \"a\"\n\
                    [fabric.switches.top]\n[[fabric.links]]\nends = [\"a\", \"sw\"]\n\
                    [[fabric.links]]\nends = [\"sw\", \"a/gpu0\"]\n[[fabric.links]]\nends = [\"sw\", \"a-ntb\"]\n\
                    [[fabric.links]]\nends = [\"a-ntb\", \"top\"]\n";
        let rack = Source { text: text.into(), ..rack() };
        let (left, cut) = without(&rack, &["sw".to_owned()]).unwrap();
        assert_eq!(cut, ["a-ntb", "a/gpu0"]);
        assert!(left.text.contains("gpu1") && !left.text.contains("a-ntb"), "{}", left.text);
        // What no link was written for is joined to the host itself, as before.
        assert!(without(&rack, &["top".to_owned()]).unwrap().1.is_empty());
    }

    /// The rack file was refused once, for naming a host that is gone.
    #[test]
    fn nothing_that_is_left_names_what_is_gone() {
        let more = "[[share]]\nowner = \"b\"\nsegments = 1\nwith = [\"a\"]\naccess = \"read\"\n\
                    [[composition]]\nname = \"x\"\nhost = \"b\"\nfunctions = [\"a/gpu0\"]\n\
                    [network]\nuplinks = [\"a/eth1\"]\n[network.host.a]\nvlan = 7\n\
                    [hosts.b.ntb.a]\naddress = \"0000:01:00.0\"\n";
        let rack = Source { text: format!("{RACK}{more}"), ..rack() };
        for parts in [&["a"][..], &["a", "a/gpu0", "a-ntb"], &["a/gpu0", "a"]] {
            let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
            let left = without(&rack, &parts).unwrap().0.text;
            let left: Table = left.parse().unwrap();
            let known = ["fabric", "hosts", "name", "timing"];
            assert!(left.keys().all(|key| known.contains(&key.as_str())), "{left}");
            assert!(left["hosts"]["b"].as_table().unwrap().is_empty(), "{left}");
        }
    }

    /// Links of its functions were left once, and led nowhere.
    #[test]
    fn a_drive_goes_with_its_functions() {
        let text = "[hosts.a.devices.nvme1.functions]\nvf1 = { size = \"1 GiB\" }\n[hosts.b]\n\
                    [[fabric.links]]\nends = [\"a\", \"a/nvme1.vf1\"]\n[timing.parts.\"a/nvme1.vf1\"]\ntags = 3\n";
        let rack = Source { text: text.into(), ..rack() };
        let left = without(&rack, &["a/nvme1".to_owned()]).unwrap().0.text;
        assert!(!left.contains("nvme1"), "{left}");
    }

    /// A rack without any cable is taken to be hosts on one machine; one that lost its cables is not.
    #[test]
    fn hosts_that_lost_all_their_cables_share_no_memory() {
        let text = "name = \"lab\"\n[hosts.a]\n[hosts.gone]\n\
                    [fabric.adapters.a-ntb]\nhost = \"a\"\n[fabric.adapters.b-ntb]\nhost = \"gone\"\n\
                    [[fabric.links]]\nends = [\"a-ntb\", \"b-ntb\"]\n";
        let rack = Source { text: text.into(), ..rack() };
        let (left, _) = without(&rack, &["a-ntb".to_owned(), "b-ntb".to_owned()]).unwrap();
        let left: Table = left.text.parse().unwrap();
        assert!(is_joined_by_cables(&left), "{left}");
        assert!(left["fabric"]["switches"].get("gone").is_none(), "{left}");
    }

    #[test]
    fn a_text_of_the_same_letters_is_no_part() {
        let text = "[flows.x]\nkind = \"nvme-read\"\nhost = \"b\"\ndevice = \"c/nvme0\"\nqueues_in = \"lender\"\n\
                    tenant = \"a\"\n[flows.y]\nkind = \"steps\"\n\
                    steps = [{ together = [[{ write = 4, from = \"b\", to = \"lender\" }]] }]\n\
                    [flows.z]\nkind = \"all-reduce\"\nmembers = [\"b/gpu0\", \"a/gpu0\"]\n";
        let workload = Source { name: "w.toml".into(), text: text.into(), ..Source::default() };
        assert_eq!(idle(&workload, &["lender".to_owned()]).unwrap().1, ["y"]);
        assert_eq!(idle(&workload, &["a".to_owned()]).unwrap().1, ["z"]);
    }

    #[test]
    fn a_link_is_halved() {
        let half = degrade(&rack(), &["b-ntb,a-ntb".to_owned(), "a,a/gpu0".to_owned()]).unwrap();
        assert!(
            half.text.contains("lanes = 4") && half.text.contains("lanes = 8"),
            "{}",
            half.text
        );
        assert!(degrade(&rack(), &["a,b".to_owned()]).is_err());
    }

    #[test]
    fn flows_that_need_what_is_gone_are_named() {
        let text = "[flows.x]\nkind = \"read\"\nfrom = \"a/gpu0\"\nto = \"b\"\n[flows.y]\nkind = \"read\"\n\
                    from = \"b\"\nto = \"a\"\n";
        let workload = Source { name: "w.toml".into(), text: text.into(), ..Source::default() };
        let (left, gone) = idle(&workload, &["a/gpu0".to_owned()]).unwrap();
        assert_eq!(gone, ["x"]);
        assert!(left.text.contains("[flows.y]"));
        assert!(idle(&workload, &["a".to_owned()]).is_err());
        let shaped = text.replace(
            "kind = \"read\"\nfrom = \"a/gpu0\"",
            "kind = \"read\"\ntenant = \"shop\"\nfrom = \"a/gpu0\"",
        ) + "[shaping.\"a/gpu0\".shop]\nweight = 2\n[shaping.sw.shop]\nweight = 3\n";
        let workload = Source { text: shaped, ..workload };
        let (left, _) = idle(&workload, &["a/gpu0".to_owned()]).unwrap();
        assert!(!left.text.contains("gpu0") && !left.text.contains("shop"), "{}", left.text);
    }
}
