//! What the rack has: the devices of its file, with those that were offered since.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rackbus_control::service::{
    DescribedDevice, Inventory, InventoryDevice, OfferedDevice, ReadRack, Sections,
};
use rackbus_devices::RackDevice;
use rackbus_devices::class::{self, parse_rack};
use rackbus_fabric::derive;
use rackbus_fabric::rack::{CompositionConfig, Host, Rack};
use rackbus_lease::Placement;
use toml::{Table, Value};

/// The name that errors have for what is put together here.
const OFFERED: &str = "the rack with what is offered";

/// What the control plane has of a rack, of which `text` is the file. Hosts are machines of their own where they are
/// `apart`.
///
/// # Errors
/// What is wrong with it, for people.
pub fn inventory(
    rack: &Rack,
    devices: &[RackDevice],
    text: &str,
    apart: bool,
) -> Result<Inventory, String> {
    let offered = devices.iter().filter_map(|device| {
        let function = device.function.parse().ok()?;
        // Devices that only the timing model knows are not there to borrow.
        let config = device.config.as_ref()?;
        let (kind, detail) = (device.kind.to_owned(), config.detail());
        let capabilities = class::capabilities(device.kind);
        let separable = if apart { config.is_carried() } else { config.is_separable() };
        let windows = windows(rack, device, config.has_windows());
        Some(InventoryDevice { function, kind, capabilities, detail, separable, windows })
    });
    let topology = match apart {
        true => derive::topology_of_machines(rack),
        false => derive::topology(rack),
    };
    let topology = topology.map_err(|error| error.to_string())?;
    Ok(Inventory {
        rack: rack.name.clone(),
        hosts: rack.hosts.iter().map(|host| host.name.clone()).collect(),
        sections: sections(devices, text),
        devices: offered.collect(),
        compositions: rack.compositions.iter().filter_map(saved).collect(),
        topology,
        apart,
        ntb_linked: ntb_linked(rack),
    })
}

/// The pairs of hosts whose link is an NTB, each in either order: the file names both ends.
fn ntb_linked(rack: &Rack) -> BTreeSet<(String, String)> {
    let of_host = |host: &Host| -> Vec<(String, String)> {
        host.link_ntbs.keys().map(|peer| (host.name.clone(), peer.clone())).collect()
    };
    rack.hosts.iter().flat_map(of_host).collect()
}

/// Reads a rack file again with devices beside its own. What depends on a function's address in the rack's network is
/// known to every host from the file, and cannot be offered.
pub fn reader(text: String, apart: bool) -> ReadRack {
    Arc::new(move |offered: &[OfferedDevice]| {
        let whole = with_devices(&text, offered)?;
        let (rack, devices) = parse_rack(OFFERED, &whole).map_err(|error| error.what)?;
        let own = |it: &OfferedDevice, device: &RackDevice| {
            device.section == format!("{}/{}", it.host, it.device)
        };
        for offer in offered {
            let functions: Vec<_> = devices.iter().filter(|device| own(offer, device)).collect();
            let name = format!("{}/{}", offer.host, offer.device);
            if functions.iter().any(|it| it.config.as_ref().is_none_or(|it| it.port().is_some())) {
                let kind = functions.first().map_or("", |device| device.kind);
                return Err(format!(
                    "{name}: a device of kind `{kind}` cannot join a running rack; list it in the rack file"
                ));
            }
        }
        let mut inventory = inventory(&rack, &devices, &whole, apart)?;
        for offer in offered {
            let key = (offer.host.clone(), offer.device.clone());
            if let Some(section) = inventory.sections.get_mut(&key) {
                (section.listed, section.text) = (false, offer.section.clone());
            }
        }
        Ok(inventory)
    })
}

/// The functions of one device of `host`, read as if the rack file `text` described it.
///
/// # Errors
/// What is wrong with it, for people.
pub fn device(
    text: &str,
    host: &str,
    device: &str,
    section: &str,
) -> Result<Vec<RackDevice>, String> {
    let (host, name) = (host.to_owned(), device.to_owned());
    let whole = format!("{host}/{device}");
    let offered = OfferedDevice { host, device: name, section: section.to_owned() };
    let (_, devices) =
        parse_rack(OFFERED, &with_devices(text, &[offered])?).map_err(|error| error.what)?;
    Ok(devices.into_iter().filter(|device| device.section == whole).collect())
}

/// A rack file's text with devices beside its own, or instead of its own of the same name.
fn with_devices(text: &str, offered: &[OfferedDevice]) -> Result<String, String> {
    if offered.is_empty() {
        return Ok(text.to_owned());
    }
    let mut rack: Table =
        text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
    for OfferedDevice { host, device, section } in offered {
        let parsed: Table = section
            .parse()
            .map_err(|error: toml::de::Error| format!("{host}/{device}: {}", error.message()))?;
        let mut place = &mut rack;
        for key in ["hosts", host] {
            let next = place.get_mut(key).and_then(Value::as_table_mut);
            place = next.ok_or_else(|| format!("the rack has no host {host}"))?;
        }
        let devices = place.entry("devices").or_insert_with(|| Value::Table(Table::new()));
        place = devices.as_table_mut().ok_or("`devices` is no table")?;
        place.insert(device.clone(), Value::Table(parsed));
    }
    toml::to_string(&rack).map_err(|error| error.to_string())
}

/// The devices of a rack file, each with what the file says of it.
pub fn sections(devices: &[RackDevice], text: &str) -> Sections {
    let rack: Table = text.parse().unwrap_or_default();
    let mut sections = BTreeMap::new();
    for device in devices.iter().filter(|device| device.config.is_some()) {
        let Some((host, name)) = device.section.split_once('/') else { continue };
        let said = ["hosts", host, "devices", name]
            .iter()
            .try_fold(&rack, |table, key| table.get(*key).and_then(Value::as_table));
        let text = said.and_then(|said| toml::to_string(said).ok()).unwrap_or_default();
        let fresh = DescribedDevice { text, functions: Vec::new(), listed: true };
        let section: &mut DescribedDevice =
            sections.entry((host.to_owned(), name.to_owned())).or_insert(fresh);
        let function = device.function.split_once('/').map_or("", |(_, function)| function);
        section.functions.push(function.to_owned());
    }
    sections
}

/// A composition of the rack file as the control plane knows it.
fn saved(composition: &CompositionConfig) -> Option<rackbus_lease::CompositionRecord> {
    let functions = composition.functions.iter().map(|function| function.parse().ok());
    Some(rackbus_lease::CompositionRecord {
        name: composition.name.clone(),
        borrower: composition.host.clone(),
        functions: functions.collect::<Option<_>>()?,
        placement: if composition.strict { Placement::Borrower } else { Placement::Lender },
    })
}

/// The hosts in whose PCI trees a device can appear: those that its host has an NTB to, and that have one back.
fn windows(rack: &Rack, device: &RackDevice, has_windows: bool) -> BTreeSet<String> {
    let host = |name: &str| rack.hosts.iter().find(|host| host.name == name);
    let lender = device.function.split('/').next().unwrap_or_default();
    let Some(own) = host(lender).filter(|_| has_windows) else { return BTreeSet::new() };
    let back = |other: &&String| host(other).is_some_and(|it| it.ntbs.contains_key(lender));
    own.ntbs.keys().filter(back).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hosts in whose PCI trees the function `alpha/d` may appear, or `alpha/d.vf1`, which has these keys in the rack
    /// file. There is an NTB from alpha to beta; gamma has none back.
    fn hosts_of(keys: &str) -> Vec<String> {
        let text = format!(
            "name = \"lab\"\n[hosts.alpha.devices.d]\n{keys}\n\
             [hosts.alpha.ntb.beta]\naddress = \"0000:05:00.0\"\n\
             [hosts.alpha.ntb.gamma]\naddress = \"0000:06:00.0\"\n\
             [hosts.beta.ntb.alpha]\naddress = \"0000:05:00.0\"\n[hosts.gamma]\n"
        );
        let (rack, devices) = parse_rack("rack.toml", &text).unwrap();
        let inventory = inventory(&rack, &devices, &text, false).unwrap();
        let [device] = &inventory.devices[..] else { panic!("{:?}", inventory.devices) };
        device.windows.iter().cloned().collect()
    }

    /// The table "Functions that rackbus models" of the book, and functions of the machine.
    #[test]
    fn functions_whose_registers_can_be_memory_appear_where_an_ntb_leads_both_ways() {
        let cases = [
            ("kind = \"nvme\"\nsize = \"1 MiB\"", true),
            ("kind = \"nvme\"\nsize = \"1 MiB\"\npersistent = \"1 MiB\"", false),
            ("kind = \"accelerator\"\nfunctions = 1", true),
            ("kind = \"vfio\"\naddress = \"0000:03:00.0\"", true),
            ("kind = \"memory\"\nsize = \"1 MiB\"", false),
            ("kind = \"nic\"\nfunctions = 1", false),
            ("kind = \"upstream\"\nsocket = \"./d.sock\"", false),
        ];
        for (keys, appears) in cases {
            let expected: &[&str] = if appears { &["beta"] } else { &[] };
            assert_eq!(hosts_of(keys), expected, "{keys}");
        }
    }
}
