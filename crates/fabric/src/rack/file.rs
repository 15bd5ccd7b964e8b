//! From TOML to a [`Rack`], with the place of everything that is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use toml::Spanned;
use toml::de::DeValue;

use super::{
    Adapter, BROADCAST_NODE_ID, Cable, Control, CxlMemory, Device, Host, LAST_NODE_ID, Links, PAGE,
    Physical, Rack, Switch, Window, composition, network, share,
};
use crate::names::{self, is_name};
use crate::text::{Named, Outcome, Section, document, list, mismatch, subsection, wrong};
use crate::values::{SIZES, format_size};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Reads a rack file; its devices' sections go to `read`, one after the other.
pub(super) fn parse(text: &str, read: ReadDevice<'_>) -> Outcome<Rack> {
    let root = document(text)?;
    let top = Section::new(
        root.get_ref(),
        0..0,
        "the rack file",
        // `timing` is the timing model's to read.
        &[
            "name",
            "hosts",
            "share",
            "composition",
            "control",
            "link",
            "network",
            "fabric",
            "timing",
        ],
    )?;
    let allowed = "write name = \"…\" at the top";
    let (name, span) = top.require("name", top.text("name", allowed)?, allowed)?;
    if !is_name(name) {
        return wrong(span, format!("`{name}` is no name"), names::ALLOWED);
    }
    let entries = top.tables("hosts")?;
    let ids = node_ids(&entries)?;
    let hosts = entries.iter().zip(ids).map(|(entry, id)| host(entry, id, read));
    let hosts = hosts.collect::<Outcome<Vec<_>>>()?;
    if hosts.is_empty() {
        return wrong(0..0, "the rack has no host", "write [hosts.NAME] for each host");
    }
    check_ntbs(&top, &hosts)?;
    let shares = match top.get("share") {
        Some(value) => share::rules(value, &hosts)?,
        None => Vec::new(),
    };
    let compositions = match top.get("composition") {
        Some(value) => composition::all(value, &hosts)?,
        None => Vec::new(),
    };
    let control = match top.get("control") {
        Some(value) => control(value)?,
        None => Control::default(),
    };
    let links = match top.get("link") {
        Some(value) => links_between(value)?,
        None => Links::default(),
    };
    let network = network::network(top.get("network"), &hosts)?;
    let fabric = match top.get("fabric") {
        Some(value) => Some(fabric(value, &hosts)?),
        None => None,
    };
    let name = name.to_owned();
    let rack = Rack { name, hosts, shares, compositions, control, links, network, fabric };
    let place = top.get("fabric").map_or(0..0, Spanned::span);
    let topology = match crate::derive::topology(&rack) {
        Ok(topology) => topology,
        Err(error) => {
            return wrong(place, error.to_string(), "parts of one host are joined freely");
        }
    };
    if let Err((nth, error)) = crate::derive::fabric(&rack, topology) {
        let what = format!("window {} cannot be: {error}", nth.saturating_add(1));
        return wrong(
            place,
            what,
            "windows lead between hosts whose NTBs are joined, and overlap nothing",
        );
    }
    Ok(rack)
}

/// The keys of a host.
// `profile` is the timing model's to read.
const HOST: &[&str] = &["node_id", "memory", "export", "iommu", "ntb", "devices", "profile"];

fn host(entry: &Named<'_>, node_id: u32, read: ReadDevice<'_>) -> Outcome<Host> {
    let section = host_section(entry)?;
    let stated = section.size("memory", 64 * MIB, 64 * TIB)?;
    let memory = stated.unwrap_or(4096 * MIB);
    let export = section.size("export", 0, memory)?;
    if let Some(bytes) = export.filter(|bytes| bytes % PAGE != 0) {
        let what = format!("`export` is {}", format_size(bytes));
        let allowed = format!("memory is exported in pages of {}", format_size(PAGE));
        return wrong(section.place("export"), what, allowed);
    }
    Ok(Host {
        name: entry.name.to_owned(),
        node_id,
        memory,
        memory_stated: stated.is_some(),
        export: export.unwrap_or(memory - memory % PAGE),
        iommu: section.truth("iommu")?.unwrap_or(true),
        ntbs: ntbs(&section)?,
        devices: section
            .tables("devices")?
            .iter()
            .map(|device_entry| device(entry.name, device_entry, read))
            .collect::<Outcome<Vec<_>>>()?
            .concat(),
    })
}

/// Where a host's NTBs are, each in a table that is named as the host it leads to.
fn ntbs(section: &Section<'_>) -> Outcome<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for entry in section.tables("ntb")? {
        let place = format!("the NTB to {}", entry.name);
        let keys = Section::new(entry.table, entry.span.clone(), place, &["address"])?;
        let found = keys.text("address", NTB_ADDRESS)?;
        let (address, place) = keys.require("address", found, NTB_ADDRESS)?;
        if !is_pci_address(address) {
            return wrong(place, format!("`address` is {address:?}"), NTB_ADDRESS);
        }
        all.insert(entry.name.to_owned(), address.to_owned());
    }
    Ok(all)
}

const NTB_ADDRESS: &str =
    "`address` is where the NTB is on that host, as `lspci -D` shows it (\"0000:05:00.0\")";

/// Whether a text is domain, bus, device and function, in hexadecimal digits.
fn is_pci_address(text: &str) -> bool {
    let hex = |text: &str, most: usize| {
        (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let Some((place, function)) = text.rsplit_once('.') else { return false };
    let parts: Vec<&str> = place.split(':').collect();
    let known = match parts[..] {
        [bus, device] => hex(bus, 2) && hex(device, 2),
        [domain, bus, device] => hex(domain, 8) && hex(bus, 2) && hex(device, 2),
        _ => false,
    };
    known && function.len() == 1 && matches!(function.as_bytes()[0], b'0'..=b'7')
}

/// Hosts that NTBs lead to are hosts of the rack, and others.
fn check_ntbs(top: &Section<'_>, hosts: &[Host]) -> Outcome<()> {
    for host in hosts {
        for other in host.ntbs.keys() {
            if *other == host.name || !hosts.iter().any(|host| host.name == *other) {
                let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
                let what = format!("the NTB of {} leads to `{other}`", host.name);
                let allowed = format!("it leads to another host of the rack: {}", names.join(", "));
                let place = top.get("hosts").map_or(0..0, Spanned::span);
                return wrong(place, what, allowed);
            }
        }
    }
    Ok(())
}

fn host_section<'a>(entry: &Named<'a>) -> Outcome<Section<'a>> {
    Section::new(entry.table, entry.span.clone(), format!("host {}", entry.name), HOST)
}

/// The hosts' node ids: those that the file gives, and for the others what is free, in order.
fn node_ids(hosts: &[Named<'_>]) -> Outcome<Vec<u32>> {
    let mut taken: BTreeMap<u32, &str> = BTreeMap::new();
    let mut given = Vec::new();
    for entry in hosts {
        let section = host_section(entry)?;
        let id = match section.number("node_id", NODE_IDS)? {
            None => None,
            Some((number, span)) => match u32::try_from(number).ok().filter(|id| is_node_id(*id)) {
                None => return wrong(span, format!("`node_id` is {number}"), NODE_IDS),
                Some(id) => {
                    if let Some(other) = taken.insert(id, entry.name) {
                        let what = format!("hosts {other} and {} have node id {id}", entry.name);
                        return wrong(span, what, "each host has a node id of its own");
                    }
                    Some(id)
                }
            },
        };
        given.push(id);
    }
    let mut free =
        (4..=LAST_NODE_ID).step_by(4).filter(|id| is_node_id(*id) && !taken.contains_key(id));
    let ids = hosts.iter().zip(given).map(|(entry, given)| match given.or_else(|| free.next()) {
        Some(id) => Ok(id),
        None => {
            let what = format!("there is no node id left for host {}", entry.name);
            wrong(entry.span.clone(), what, format!("at most {MOST_HOSTS} hosts have one"))
        }
    });
    ids.collect()
}

fn is_node_id(id: u32) -> bool {
    (4..=LAST_NODE_ID).contains(&id) && id.is_multiple_of(4) && id != BROADCAST_NODE_ID
}

const NODE_IDS: &str =
    "a node id is a multiple of 4 from 4 to 65532, but not 252, which means every host";

/// As many hosts as there are node ids.
const MOST_HOSTS: u32 = LAST_NODE_ID / 4 - 1;

/// Reads a device's section by what its class says of it; how many virtual functions it has.
pub(super) type ReadDevice<'r> = &'r mut dyn FnMut(&DeviceSection<'_>) -> Outcome<u16>;

fn device(host: &str, entry: &Named<'_>, read: ReadDevice<'_>) -> Outcome<Vec<Device>> {
    let section = DeviceSection { function: format!("{host}/{}", entry.name), entry };
    let functions = read(&section)?;
    let (kind, _) = section.kind("write kind = \"…\", the name of a class of devices")?;
    let function = |vf| Device { name: entry.name.to_owned(), vf, kind: kind.to_owned() };
    Ok(match functions {
        0 => vec![function(None)],
        most => (1..=most).map(|vf| function(Some(vf))).collect(),
    })
}

/// The section of a device in the rack file, for its class to read.
#[derive(Debug)]
pub struct DeviceSection<'a> {
    function: String,
    entry: &'a Named<'a>,
}

impl<'a> DeviceSection<'a> {
    /// The device's name in the rack: `alpha/nvme0`.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// The word for its class, and that word's place; `allowed` says which there are.
    ///
    /// # Errors
    /// [`Problem`](crate::text::Problem) when there is none.
    pub fn kind(&self, allowed: &str) -> Outcome<(&'a str, Range<usize>)> {
        let kind = match self.entry.table.get(KIND) {
            None => None,
            Some(value) => match value.get_ref() {
                DeValue::String(text) => Some((text.as_ref(), value.span())),
                other => return wrong(value.span(), mismatch(KIND, other), allowed),
            },
        };
        match kind {
            Some(kind) => Ok(kind),
            None => {
                let what = format!("device {} has no `{KIND}`", self.function);
                wrong(self.entry.span.clone(), what, allowed)
            }
        }
    }

    /// Its keys, which are `known` to its class; `kind` is one of them.
    ///
    /// # Errors
    /// [`Problem`](crate::text::Problem) for a key that is not.
    pub fn keys(&self, known: &'static [&'static str]) -> Outcome<Section<'a>> {
        debug_assert!(known.contains(&KIND));
        let place = format!("device {}", self.function);
        Section::new(self.entry.table, self.entry.span.clone(), place, known)
    }
}

const KIND: &str = "kind";

fn control(value: &Spanned<DeValue<'_>>) -> Outcome<Control> {
    let section = subsection(value, "control", &["lease_ttl", "return_grace"])?;
    let default = Control::default();
    Ok(Control {
        lease_ttl_ms: section
            .duration("lease_ttl", 100, 3_600_000)?
            .unwrap_or(default.lease_ttl_ms),
        return_grace_ms: section
            .duration("return_grace", 100, 600_000)?
            .unwrap_or(default.return_grace_ms),
    })
}

fn links_between(value: &Spanned<DeValue<'_>>) -> Outcome<Links> {
    let section = subsection(value, "link", &["hold"])?;
    let hold_ms = section.duration("hold", 0, 600_000)?;
    Ok(Links { hold_ms: hold_ms.unwrap_or(Links::default().hold_ms) })
}

fn fabric(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Outcome<Physical> {
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
    Ok(Physical { adapters, switches, memories, links, windows })
}

/// The host that a part names as its own.
fn placed(part: &Section<'_>, hosts: &[Host]) -> Outcome<Option<String>> {
    let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    let allowed = format!("`host` is one of {}", list(&known));
    match part.text("host", &allowed)? {
        Some((host, _)) if known.contains(&host) => Ok(Some(host.to_owned())),
        Some((host, span)) => wrong(span, format!("there is no host `{host}`"), allowed),
        None => Ok(None),
    }
}

fn take_name(names: &mut BTreeSet<String>, entry: &Named<'_>) -> Outcome<()> {
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
) -> Outcome<()> {
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

fn windows(value: &Spanned<DeValue<'_>>, hosts: &[Host]) -> Outcome<Vec<Window>> {
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

fn links(value: &Spanned<DeValue<'_>>, names: &BTreeSet<String>) -> Outcome<Vec<Cable>> {
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
