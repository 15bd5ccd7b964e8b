//! From TOML to a [`Rack`], with the place of everything that is wrong.

mod physical;

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::DeValue;

use super::{
    BROADCAST_NODE_ID, ControlConfig, DeclaredFunction, DeviceFacts, Host, LAST_NODE_ID, Links,
    PAGE, Rack, composition, network, share,
};
use crate::names::{self, is_name};
use crate::text::{Named, Parsed, Section, document, mismatch, subsection, wrong};
use crate::values::format_size;
use physical::fabric;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Reads a rack file; its devices' sections go to `read`, one after the other. Without one, nothing is known of virtual
/// functions.
pub(super) fn parse(text: &str, mut read: Option<ReadDevice<'_>>) -> Parsed<Rack> {
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
    let knows_functions = read.is_some();
    let mut facts = |section: &DeviceSection<'_>| match &mut read {
        Some(read) => read(section).map(Some),
        None => Ok(None),
    };
    let hosts = entries.iter().zip(ids).map(|(entry, id)| host(entry, id, &mut facts));
    let hosts = hosts.collect::<Parsed<Vec<_>>>()?;
    if hosts.is_empty() {
        return wrong(0..0, "the rack has no host", "write [hosts.NAME] for each host");
    }
    check_ntbs(&top, &hosts)?;
    let shares = match top.get("share") {
        Some(value) => share::rules(value, &hosts)?,
        None => Vec::new(),
    };
    let compositions = match top.get("composition") {
        Some(value) => composition::all(value, &hosts, knows_functions)?,
        None => Vec::new(),
    };
    let control = match top.get("control") {
        Some(value) => control(value)?,
        None => ControlConfig::default(),
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

fn host(entry: &Named<'_>, node_id: u32, facts: AskFacts<'_>) -> Parsed<Host> {
    let section = host_section(entry)?;
    let stated = section.size("memory", 64 * MIB, 64 * TIB)?;
    let memory = stated.unwrap_or(4096 * MIB);
    let export = section.size("export", 0, memory)?;
    if let Some(bytes) = export.filter(|bytes| bytes % PAGE != 0) {
        let what = format!("`export` is {}", format_size(bytes));
        let allowed = format!("memory is exported in pages of {}", format_size(PAGE));
        return wrong(section.place("export"), what, allowed);
    }
    let [ntbs, link_ntbs] = ntbs(&section)?;
    Ok(Host {
        name: entry.name.to_owned(),
        node_id,
        memory,
        memory_stated: stated.is_some(),
        export: export.unwrap_or(memory - memory % PAGE),
        iommu: section.truth("iommu")?.unwrap_or(true),
        ntbs,
        link_ntbs,
        devices: section
            .tables("devices")?
            .iter()
            .map(|device_entry| device(entry.name, device_entry, facts))
            .collect::<Parsed<Vec<_>>>()?
            .concat(),
    })
}

/// Where a host's NTBs are, each in a table that is named as the host it leads to: those for functions, and those for the link.
fn ntbs(section: &Section<'_>) -> Parsed<[BTreeMap<String, String>; 2]> {
    let mut all = [BTreeMap::new(), BTreeMap::new()];
    for entry in section.tables("ntb")? {
        let place = format!("the NTB to {}", entry.name);
        let keys = Section::new(entry.table, entry.span.clone(), place, &["address", "use"])?;
        let found = keys.text("address", NTB_ADDRESS)?;
        let (address, place) = keys.require("address", found, NTB_ADDRESS)?;
        let Some(function) = pci_address(address) else {
            return wrong(place, format!("`address` is {address:?}"), NTB_ADDRESS);
        };
        let of_use = match keys.text("use", NTB_USE)? {
            None | Some(("functions", _)) => 0,
            Some(("link", _)) => 1,
            Some((other, place)) => return wrong(place, format!("`use` is {other:?}"), NTB_USE),
        };
        // One function may be written in several ways.
        let twice = |it: &BTreeMap<_, String>| {
            it.values().any(|other| pci_address(other) == Some(function))
        };
        if of_use == 1 && twice(&all[1]) || twice(&all[1 - of_use]) {
            let what = format!("the NTB at {address} is named twice");
            return wrong(place, what, "an NTB leads to one host, and has one use");
        }
        all[of_use].insert(entry.name.to_owned(), address.to_owned());
    }
    Ok(all)
}

const NTB_USE: &str = "`use` is \"functions\", which are lent through the NTB, or \"link\", for messages between the \
                       nodes at both ends";

const NTB_ADDRESS: &str =
    "`address` is where the NTB is on that host, as `lspci -D` shows it (\"0000:05:00.0\")";

/// Domain, bus, device and function of an address in hexadecimal digits; a domain that is not written is 0.
fn pci_address(text: &str) -> Option<[u32; 4]> {
    let hex = |text: &str, most: usize| {
        let digits = (1..=most).contains(&text.len());
        let digits = digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
    };
    let (place, function) = text.rsplit_once('.')?;
    let parts: Vec<&str> = place.split(':').collect();
    let (domain, bus, device) = match parts[..] {
        [bus, device] => ("0", bus, device),
        [domain, bus, device] => (domain, bus, device),
        _ => return None,
    };
    let function = hex(function, 1).filter(|function| *function < 8)?;
    Some([hex(domain, 8)?, hex(bus, 2)?, hex(device, 2)?, function])
}

/// Hosts that NTBs lead to are hosts of the rack, and others.
fn check_ntbs(top: &Section<'_>, hosts: &[Host]) -> Parsed<()> {
    for host in hosts {
        for other in host.ntbs.keys().chain(host.link_ntbs.keys()) {
            if *other == host.name || !hosts.iter().any(|host| host.name == *other) {
                let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
                let what = format!("the NTB of {} leads to `{other}`", host.name);
                let allowed = format!("it leads to another host of the rack: {}", names.join(", "));
                let place = top.get("hosts").map_or(0..0, Spanned::span);
                return wrong(place, what, allowed);
            }
        }
        for other in host.link_ntbs.keys() {
            let is_far = |it: &&Host| it.name == *other;
            let far = hosts.iter().find(is_far).and_then(|it| it.link_ntbs.get(&host.name));
            if far.is_none() {
                let what = format!(
                    "the NTB of {} to {other} is for the link, and {other}'s is not",
                    host.name
                );
                let allowed =
                    format!("write [hosts.{other}.ntb.{}] with use = \"link\", too", host.name);
                let place = top.get("hosts").map_or(0..0, Spanned::span);
                return wrong(place, what, allowed);
            }
        }
    }
    Ok(())
}

fn host_section<'a>(entry: &Named<'a>) -> Parsed<Section<'a>> {
    Section::new(entry.table, entry.span.clone(), format!("host {}", entry.name), HOST)
}

/// The hosts' node ids: those that the file gives, and for the others what is free, in order.
fn node_ids(hosts: &[Named<'_>]) -> Parsed<Vec<u32>> {
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

/// Reads a device's section by what its class says of it.
pub(super) type ReadDevice<'r> = &'r mut dyn FnMut(&DeviceSection<'_>) -> Parsed<DeviceFacts>;

/// The same, or nothing where the file is read without the classes.
type AskFacts<'r> = &'r mut dyn FnMut(&DeviceSection<'_>) -> Parsed<Option<DeviceFacts>>;

fn device(host: &str, entry: &Named<'_>, facts: AskFacts<'_>) -> Parsed<Vec<DeclaredFunction>> {
    let section = DeviceSection { function: format!("{host}/{}", entry.name), entry };
    let facts = facts(&section)?;
    let capabilities = facts.as_ref().map(|it| it.capabilities);
    let DeviceFacts { virtual_functions, timing, .. } = facts.unwrap_or_default();
    let mut timing = timing.into_iter();
    let (kind, _) = section.kind("write kind = \"…\", the name of a class of devices")?;
    let mut function = |vf| {
        let (name, kind) = (entry.name.to_owned(), kind.to_owned());
        let timing = timing.next().unwrap_or_default();
        DeclaredFunction { name, vf, kind, capabilities, timing }
    };
    Ok(match virtual_functions {
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
    pub fn kind(&self, allowed: &str) -> Parsed<(&'a str, Range<usize>)> {
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
    pub fn keys(&self, known: &'static [&'static str]) -> Parsed<Section<'a>> {
        debug_assert!(known.contains(&KIND));
        let place = format!("device {}", self.function);
        Section::new(self.entry.table, self.entry.span.clone(), place, known)
    }
}

const KIND: &str = "kind";

fn control(value: &Spanned<DeValue<'_>>) -> Parsed<ControlConfig> {
    let section = subsection(value, "control", &["lease_ttl", "return_grace", "strict_ttl"])?;
    let default = ControlConfig::default();
    let strict_ttl = section.truth("strict_ttl")?.unwrap_or(default.strict_ttl);
    // A control plane that starts, or another one that takes over, needs so long until it answers renewals.
    let least = if strict_ttl { 3000 } else { 100 };
    Ok(ControlConfig {
        strict_ttl,
        lease_ttl_ms: section
            .duration("lease_ttl", least, 3_600_000)?
            .unwrap_or(default.lease_ttl_ms),
        return_grace_ms: section
            .duration("return_grace", 100, 600_000)?
            .unwrap_or(default.return_grace_ms),
    })
}

fn links_between(value: &Spanned<DeValue<'_>>) -> Parsed<Links> {
    let section = subsection(value, "link", &["hold", "rdma", "ktls"])?;
    let hold_ms = section.duration("hold", 0, 600_000)?;
    let allowed = "`auto`, `off`, or the name of a provider of libfabric such as `verbs`";
    let rdma = section.text("rdma", allowed)?;
    if let Some((text, span)) = &rdma {
        let named = |byte: u8| byte.is_ascii_alphanumeric() || b"_;-".contains(&byte);
        if text.is_empty() || text.len() > 64 || !text.bytes().all(named) {
            return wrong(span.clone(), format!("`rdma` is \"{text}\""), allowed);
        }
    }
    let allowed = "`auto` or `off`";
    let ktls = match section.text("ktls", allowed)? {
        None => Links::default().ktls,
        Some(("auto", _)) => true,
        Some(("off", _)) => false,
        Some((text, span)) => return wrong(span, format!("`ktls` is \"{text}\""), allowed),
    };
    let default = Links::default();
    Ok(Links {
        ktls,
        hold_ms: hold_ms.unwrap_or(default.hold_ms),
        rdma: rdma.map_or(default.rdma, |(text, _)| text.to_owned()),
    })
}
