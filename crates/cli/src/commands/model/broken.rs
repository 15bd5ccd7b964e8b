//! What if it breaks: a rack without some of its parts, or with a link at half its width.
//!
//! What moved over a part that is gone is not asked for any more, and is told: the others' answer is what
//! matters then.

use toml::{Table, Value};

use super::Source;
use crate::output::Failure;

const ENDS: &str = "name a link as A,B, with the names of the rack file";

/// Takes `parts` out of a rack file: hosts, devices, adapters, switches and CXL memories, with their links.
pub fn without(rack: &Source, parts: &[String]) -> Result<Source, Failure> {
    let mut table = parse(rack)?;
    for part in parts {
        if !remove(&mut table, part) {
            let error = format!(
                "{}: there is no host, device, adapter, switch or CXL memory `{part}`",
                rack.name
            );
            return Err(Failure::usage(error, "name a part of the rack file"));
        }
    }
    Ok(changed(rack, table, &format!("without {}", parts.join(", "))))
}

/// Halves the lanes of links, each named by its ends.
pub fn degrade(rack: &Source, links: &[String]) -> Result<Source, Failure> {
    let mut table = parse(rack)?;
    for link in links {
        let wanted: Vec<&str> = link.split(',').map(str::trim).collect();
        let found = entries(&mut table).iter_mut().find(|entry| {
            let ends = ends_of(entry);
            wanted.len() == 2
                && ends.len() == 2
                && wanted.iter().all(|end| ends.iter().any(|e| e == end))
        });
        let Some(Value::Table(entry)) = found else {
            return Err(Failure::usage(format!("{}: there is no link `{link}`", rack.name), ENDS));
        };
        let lanes = entry.get("lanes").and_then(Value::as_integer).unwrap_or(8);
        if lanes < 2 {
            let error = format!("the link `{link}` has one lane");
            return Err(Failure::usage(error, "take it out with --without one of its ends"));
        }
        entry.insert("lanes".to_owned(), Value::Integer(lanes / 2));
    }
    Ok(changed(rack, table, &format!("with {} at half width", links.join("; "))))
}

/// Takes the flows out of a workload that need one of `parts`; gives their names.
pub fn idle(workload: &Source, parts: &[String]) -> Result<(Source, Vec<String>), Failure> {
    let mut table = parse(workload)?;
    let shaped = unshape(&mut table, parts);
    let flows = table.get("flows").and_then(Value::as_table).into_iter().flatten();
    let needs = |flow: &Value| parts.iter().any(|part| names(flow, part));
    let gone = flows.filter(|(_, flow)| needs(flow)).map(|(name, _)| name.clone());
    let gone: Vec<String> = gone.collect();
    let left = if shaped {
        changed(workload, table, "without what shapes and is gone")
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
            let error = "no flow is left without those parts".to_owned();
            return Err(Failure::usage(error, "name parts that not every flow needs"));
        }
    }
    unshape(&mut table, &[]);
    Ok(changed(workload, table, "without the flows that need what is gone"))
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

fn parse(file: &Source) -> Result<Table, Failure> {
    file.text.parse().map_err(|cause: toml::de::Error| {
        Failure::usage(format!("{}: {}", file.name, cause.message()), "correct the file")
    })
}

fn changed(file: &Source, table: Table, how: &str) -> Source {
    let (name, folder) = (format!("{} {how}", file.name), file.folder.clone());
    Source { name, text: table.to_string(), folder }
}

fn entries(table: &mut Table) -> &mut [Value] {
    let links = table.get_mut("fabric").and_then(|fabric| fabric.get_mut("links"));
    links.and_then(Value::as_array_mut).map_or(&mut [], |links| links.as_mut_slice())
}

fn ends_of(entry: &Value) -> Vec<String> {
    let ends = entry.get("ends").and_then(Value::as_array).into_iter().flatten();
    ends.filter_map(|end| end.as_str().map(str::to_owned)).collect()
}

/// Whether a name is that of a part, or of something in it.
fn is_in(name: &str, part: &str) -> bool {
    name == part || name.strip_prefix(part).is_some_and(|rest| rest.starts_with(['/', '@']))
}

/// Whether a value of a flow names a part, at whatever depth.
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
        let left = without(&rack(), &["a/gpu0".to_owned()]).unwrap().text;
        assert!(!left.contains("gpu0") && left.contains("a-ntb"), "{left}");
        let left = without(&rack(), &["a".to_owned()]).unwrap().text;
        assert!(
            !left.contains("gpu0") && !left.contains("a-ntb") && left.contains("b-ntb"),
            "{left}"
        );
        assert!(without(&rack(), &["c".to_owned()]).is_err());
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
