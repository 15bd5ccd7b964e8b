//! A device at another place: its link leads elsewhere, and in another host it has that host's name.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::variants::{self, Variant};
use crate::output::Failure;

/// The hosts of a rack, and the switches that are in them: where a device may be.
pub fn places(rack: &Table) -> Vec<String> {
    let mut found = hosts(rack);
    let of = |name: &str| rack.get("fabric")?.get(name)?.as_table();
    let inside = |(_, switch): &(&String, &Value)| switch.get("host").is_some();
    found.extend(of("switches").into_iter().flatten().filter(inside).map(|(name, _)| name.clone()));
    found
}

/// The hosts of a rack.
pub fn hosts(rack: &Table) -> Vec<String> {
    let hosts = rack.get("hosts").and_then(Value::as_table);
    hosts.into_iter().flatten().map(|(name, _)| name.clone()).collect()
}

/// The rack with a device's link leading to another place, and the workload with the name that the device has there.
///
/// # Errors
/// When there is no such device, or it cannot be there.
pub fn moved(variant: &Variant, device: &str, place: &str) -> Result<Variant, Failure> {
    let mut variant = variant.clone();
    let mut rack = variants::table(&variant.rack)?;
    let name = in_host(&mut rack, device, place);
    if name != device {
        let mut workload = variants::table(&variant.workload)?;
        rename(&mut rack, device, &name);
        rename(&mut workload, device, &name);
        variant.workload =
            variant.workload.changed(workload.to_string(), &format!("with {device} at {place}"));
    }
    if !relinked(&mut rack, &name, place) {
        let error = format!("{}: no one link leads to `{device}`", variant.rack.name);
        return Err(Failure::usage(error, "write a link for the device in [[fabric.links]]"));
    }
    variant.choice.push((device.to_owned(), place.to_owned()));
    variant.rack = variant.rack.changed(rack.to_string(), &format!("with {device} at {place}"));
    Ok(variant)
}

/// Where a device is as the rack file has it: what its first link leads to, or its host.
pub fn place_of(rack: &Table, device: &str) -> Option<String> {
    let links = rack.get("fabric").and_then(|fabric| fabric.get("links")?.as_array());
    let mut links = links.into_iter().flatten();
    let other = |link: &Value| {
        own_end(link, device)?;
        let mut ends = ends_of(link).into_iter().filter(|end| !is_of(end, device));
        ends.next().map(str::to_owned)
    };
    let host = || Some(device.split_once('/')?.0.to_owned());
    links.find_map(other).or_else(host)
}

/// The ends of a link.
fn ends_of(link: &Value) -> Vec<&str> {
    let ends = link.get("ends").and_then(Value::as_array).into_iter().flatten();
    ends.filter_map(Value::as_str).collect()
}

/// Which end of a link is a device, or one of its functions.
fn own_end<'l>(link: &'l Value, device: &str) -> Option<&'l str> {
    ends_of(link).into_iter().find(|end| is_of(end, device))
}

/// Whether a name is that of a device, or of one of its functions.
fn is_of(name: &str, device: &str) -> bool {
    name.strip_prefix(device).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Puts a device into the host that a place is, or is in; gives the name that it has then: its own, or with a number
/// where the host has a device of that name.
fn in_host(rack: &mut Table, device: &str, place: &str) -> String {
    let switch = rack.get("fabric").and_then(|fabric| fabric.get("switches")?.get(place));
    let host = switch.and_then(|switch| switch.get("host")).and_then(Value::as_str);
    let host = host.unwrap_or(place).to_owned();
    put_into(rack, device, &host).unwrap_or_else(|| device.to_owned())
}

/// Moves a device from its host to another; `None` where there is no such host or device, or it is there.
fn put_into(rack: &mut Table, device: &str, host: &str) -> Option<String> {
    fn devices<'t>(hosts: &'t mut Table, host: &str) -> Option<&'t mut Table> {
        let host = hosts.get_mut(host)?.as_table_mut()?;
        host.entry("devices").or_insert_with(|| Value::Table(Table::new())).as_table_mut()
    }
    let (from, name) = device.split_once('/').filter(|(from, _)| *from != host)?;
    let hosts = rack.get_mut("hosts")?.as_table_mut()?;
    let there = devices(hosts, host)?;
    let (mut free, mut nth) = (name.to_owned(), 2);
    while there.contains_key(&free) {
        free = format!("{name}-{nth}");
        nth += 1;
    }
    let own = devices(hosts, from)?.remove(name)?;
    devices(hosts, host)?.insert(free.clone(), own);
    Some(format!("{host}/{free}"))
}

/// Calls a device by its new name wherever it is named, as a key or a text, and so its functions.
fn rename(table: &mut Table, from: &str, to: &str) {
    let named = |text: &str| match text.strip_prefix(from) {
        Some(rest) if rest.is_empty() || rest.starts_with('.') => Some(format!("{to}{rest}")),
        _ => None,
    };
    let keys: Vec<(String, String)> =
        table.keys().filter_map(|key| Some((key.clone(), named(key)?))).collect();
    for (key, new) in keys {
        if let Some(value) = table.remove(&key) {
            table.insert(new, value);
        }
    }
    fn all(value: &mut Value, from: &str, to: &str, named: &dyn Fn(&str) -> Option<String>) {
        match value {
            Value::String(text) => {
                if let Some(new) = named(text) {
                    *text = new;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| all(item, from, to, named)),
            Value::Table(table) => rename(table, from, to),
            _ => {}
        }
    }
    table.iter_mut().for_each(|(_, value)| all(value, from, to, &named));
}

/// Lets the one link of a device, or of each of its functions, lead to another place; false where there is no such device,
/// or more links. A device without one is at its host's root complex, and has an ample one elsewhere. Where a rack has no
/// cables, its host is all that says where it is: a link would say that hosts share no memory.
fn relinked(table: &mut Table, device: &str, place: &str) -> bool {
    let Some((host, name)) = device.split_once('/') else { return false };
    let devices = table.get("hosts").and_then(|hosts| hosts.get(host)?.get("devices"));
    let known = devices.is_some_and(|devices| devices.get(name).is_some());
    if !variants::is_joined_by_cables(table) {
        return known && host == place;
    }
    let at_root = known && host == place;
    let Some(Value::Table(fabric)) = table.get_mut("fabric") else { return false };
    let links = fabric.entry("links").or_insert_with(|| Value::Array(Vec::new()));
    let Value::Array(links) = links else { return false };
    let mut found = BTreeSet::new();
    for link in links.iter_mut() {
        let Some(own) = own_end(link, device).map(str::to_owned) else { continue };
        let ends = link.get_mut("ends").and_then(Value::as_array_mut).into_iter().flatten();
        for end in ends.filter(|end| end.as_str() != Some(&own)) {
            *end = Value::String(place.to_owned());
        }
        if !found.insert(own) {
            return false;
        }
    }
    if !found.is_empty() || at_root {
        return true;
    }
    let ends = [place, device].map(|end| Value::String(end.to_owned()));
    let (generation, lanes) = rackbus_model::wire::AMPLE;
    let link = [
        ("ends", Value::Array(ends.into())),
        ("generation", Value::Integer(generation.into())),
        ("lanes", Value::Integer(lanes.into())),
    ];
    let link = link.map(|(key, value)| (key.to_owned(), value));
    links.push(Value::Table(link.into_iter().collect()));
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a drive that has functions, these have the links.
    #[test]
    fn a_drive_moves_with_its_functions() {
        let rack = "[hosts.a.devices.nvme1.functions]\nvf1 = { size = \"1 GiB\" }\n[hosts.b.devices.nvme1]\n\
                    [fabric.switches.board]\nhost = \"b\"\n\
                    [[fabric.links]]\nends = [\"a\", \"a/nvme1.vf1\"]\n[[fabric.links]]\nends = [\"b\", \"board\"]\n";
        let workload = "[flows.x]\ndevice = \"a/nvme1.vf1\"\n";
        let source = |text: &str| super::super::Source { text: text.into(), ..Default::default() };
        let first = Variant { choice: Vec::new(), rack: source(rack), workload: source(workload) };
        let before = variants::table(&first.rack).unwrap();
        assert_eq!(place_of(&before, "a/nvme1").as_deref(), Some("a"));
        let there = moved(&first, "a/nvme1", "board").unwrap();
        let after = variants::table(&there.rack).unwrap();
        let link = &after["fabric"]["links"][0];
        assert_eq!(ends_of(link), ["board", "b/nvme1-2.vf1"]);
        assert!(there.workload.text.contains("b/nvme1-2.vf1"), "{}", there.workload.text);
        assert!(moved(&first, "a/nvme2", "board").is_err());
    }
}
